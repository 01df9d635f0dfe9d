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
        "{} worlds: {} changes, {} tables ingested; {} checkpoints and {} backups, {} interrupted, \
         {} compared; {} tables written over old ones",
        all.len(),
        sum(|r| r.acknowledged),
        sum(|r| r.ingested),
        sum(|r| r.checkpoints),
        sum(|r| r.backups),
        sum(|r| r.interrupted),
        sum(|r| r.compared),
        sum(|r| r.rewritten),
    );
    if all.len() >= 40 {
        assert!(sum(|r| r.acknowledged) > 2_000 && sum(|r| r.ingested) > 300);
        assert!(sum(|r| r.checkpoints) > 100 && sum(|r| r.backups) > 50);
        assert!(sum(|r| r.interrupted) > 3 && sum(|r| r.compared) > 300);
        assert!(sum(|r| r.rewritten) > 20);
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
