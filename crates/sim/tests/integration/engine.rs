//! The engine and its crashes, seed by seed.

use std::cell::RefCell;

use sim::engine::{Flaw, Report, engine};
use sim::seeds;

#[test]
fn the_engine_loses_nothing_by_a_crash_anywhere() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<Report>> = RefCell::default();
    seeds::many("one_engine", 21, |seed| all.borrow_mut().push(engine(seed, Flaw::None)));
    let all = all.into_inner();
    // A simulation without faults proves nothing.
    let sum = |of: fn(&Report) -> u64| all.iter().map(of).sum::<u64>();
    println!(
        "{} worlds: {} openings, {} crashed, {} salvaged; {} acknowledged, {} found unacknowledged, \
         {} scans, {} gets; {} kills, {} power cuts, {} closes, {} failures; keys counted {} times; {} flushes, {} merges, \
         {} tables written over old ones; found full {} times, {} refused",
        all.len(),
        sum(|r| r.openings),
        sum(|r| r.crashed_openings),
        sum(|r| r.salvaged),
        sum(|r| r.acknowledged),
        sum(|r| r.unacknowledged_found),
        sum(|r| r.scans),
        sum(|r| r.gets),
        sum(|r| r.kills),
        sum(|r| r.power_cuts),
        sum(|r| r.closes),
        sum(|r| r.failures),
        sum(|r| r.counted),
        sum(|r| r.flushes),
        sum(|r| r.merges),
        sum(|r| r.rewritten),
        sum(|r| r.full),
        sum(|r| r.refused),
    );
    if all.len() >= 400 {
        assert!(sum(|r| r.acknowledged) > 20_000 && sum(|r| r.unacknowledged_found) > 100);
        assert!(sum(|r| r.scans) > 5_000 && sum(|r| r.gets) > 10_000);
        assert!(sum(|r| r.crashed_openings) > 200 && sum(|r| r.salvaged) > 20);
        assert!(sum(|r| r.kills) > 300 && sum(|r| r.power_cuts) > 300);
        assert!(sum(|r| r.closes) > 100 && sum(|r| r.failures) > 50 && sum(|r| r.syncs) > 300);
        assert!(sum(|r| r.loads) > 40 && sum(|r| r.counted) > 500);
        assert!(sum(|r| r.flushes) > 1_000 && sum(|r| r.merges) > 100);
        assert!(sum(|r| r.rewritten) > 100);
        assert!(sum(|r| r.full) > 50 && sum(|r| r.refused) > 500);
        assert!(sum(|r| r.faults.torn) > 50 && sum(|r| r.faults.lost) > 300);
        assert!(sum(|r| r.faults.names_lost) > 300 && sum(|r| r.faults.cut_short) > 20);
        assert!(sum(|r| r.faults.dropped) > 20 && sum(|r| r.faults.write_errors) > 20);
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-sim one_engine -- --nocapture`.
#[test]
fn one_engine() {
    println!("{:#?}", engine(seeds::one().unwrap_or(1), Flaw::None));
}

#[test]
fn the_same_seed_twice_is_the_same_run() {
    for seed in 0..5 {
        assert_eq!(engine(seed, Flaw::None), engine(seed, Flaw::None), "seed {seed}");
    }
}
