//! Copies of a database and ingestion into it, seed by seed.

use std::cell::RefCell;

use sim::copies::{Report, copies};
use sim::engine::Flaw;
use sim::seeds;

#[test]
fn copies_are_whole_or_absent_and_stay_as_they_were() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<Report>> = RefCell::default();
    seeds::many("one_world_of_copies", 2, |seed| {
        all.borrow_mut().push(copies(seed, Flaw::None));
    });
    let all = all.into_inner();
    let sum = |of: fn(&Report) -> u64| all.iter().map(of).sum::<u64>();
    println!(
        "{} worlds: {} changes, {} tables ingested; {} checkpoints and {} backups ({} deleted), {} \
         restored, {} interrupted, {} compared; {} tables written over old ones",
        all.len(),
        sum(|r| r.acknowledged),
        sum(|r| r.ingested),
        sum(|r| r.checkpoints),
        sum(|r| r.backups),
        sum(|r| r.deleted),
        sum(|r| r.restored),
        sum(|r| r.interrupted),
        sum(|r| r.compared),
        sum(|r| r.rewritten),
    );
    println!(
        "{} processes with faults, {} did not open; {} changes refused ({} ingestions), {} unknown \
         ({} ingestions, {} found); {} copies failed, {} of them are there; {} openings after lost \
         power at `process`, {} salvaged, {} lacked changes",
        sum(|r| r.failing),
        sum(|r| r.failed_openings),
        sum(|r| r.refused),
        sum(|r| r.refused_ingestions),
        sum(|r| r.unknown),
        sum(|r| r.unknown_ingestions),
        sum(|r| r.unknown_found),
        sum(|r| r.failed_copies),
        sum(|r| r.failed_and_there),
        sum(|r| r.loose),
        sum(|r| r.salvaged),
        sum(|r| r.shortened),
    );
    println!(
        "{} names, {} reads, {} writes, {} syncs failed; {} stalls, {} found the disk full",
        sum(|r| r.faults.names),
        sum(|r| r.faults.errors),
        sum(|r| r.faults.write_errors),
        sum(|r| r.faults.sync_errors),
        sum(|r| r.faults.stalls),
        sum(|r| r.faults.full),
    );
    if all.len() >= 40 {
        assert!(sum(|r| r.acknowledged) > 2_000 && sum(|r| r.ingested) > 300);
        assert!(sum(|r| r.checkpoints) > 100 && sum(|r| r.backups) > 50);
        assert!(sum(|r| r.interrupted) > 3 && sum(|r| r.compared) > 300);
        assert!(sum(|r| r.notes) > 50, "{}", sum(|r| r.notes));
        assert!(sum(|r| r.rewritten) > 20 && sum(|r| r.deleted) > 5);
        assert!(sum(|r| r.failing) > 20 && sum(|r| r.refused) > 50);
        assert!(sum(|r| r.failed_copies) > 50 && sum(|r| r.restored) > 10);
        assert!(sum(|r| r.loose) > 3 && sum(|r| r.shortened) > 1);
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-sim one_world_of_copies`.
#[test]
fn one_world_of_copies() {
    let seed = seeds::one().unwrap_or(1);
    let report = copies(seed, Flaw::None);
    println!("{report:#?}");
    assert_eq!(report, copies(seed, Flaw::None), "the same seed is the same run");
}
