//! Crash consistency of the smallest log, seed by seed.

use std::cell::RefCell;

use sim::journal::{Flaw, Report, journal};
use sim::seeds;

#[test]
fn every_acknowledged_record_is_there_after_a_crash_anywhere() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<Report>> = RefCell::default();
    seeds::many("one_journal", 10, |seed| all.borrow_mut().push(journal(seed, Flaw::None)));
    let all = all.into_inner();
    // A simulation without faults proves nothing.
    let sum = |of: fn(&Report) -> u64| all.iter().map(of).sum::<u64>();
    println!(
        "{} worlds: {} acknowledged, {} found unacknowledged, {} kills, {} power cuts, {} ends",
        all.len(),
        sum(|r| r.acknowledged),
        sum(|r| r.unacknowledged_found),
        sum(|r| r.kills),
        sum(|r| r.power_cuts),
        sum(|r| r.ends),
    );
    if all.len() >= 200 {
        assert!(sum(|r| r.acknowledged) > 10_000);
        assert!(sum(|r| r.unacknowledged_found) > 100);
        assert!(sum(|r| r.kills) > 500 && sum(|r| r.power_cuts) > 500 && sum(|r| r.ends) > 20);
        assert!(sum(|r| r.faults.torn) > 20 && sum(|r| r.faults.lost) > 100);
        assert!(sum(|r| r.faults.names_lost) > 100 && sum(|r| r.faults.cut_short) > 20);
        assert!(sum(|r| r.faults.dropped) > 20 && sum(|r| r.faults.write_errors) > 20);
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-sim one_journal -- --nocapture`.
#[test]
fn one_journal() {
    println!("{:#?}", journal(seeds::one().unwrap_or(1), Flaw::None));
}

#[test]
fn the_same_seed_twice_is_the_same_run() {
    for seed in 0..5 {
        assert_eq!(journal(seed, Flaw::None), journal(seed, Flaw::None), "seed {seed}");
    }
}

/// A test that cannot fail proves nothing: each flaw must be caught.
#[test]
fn each_durability_flaw_of_a_log_is_caught() {
    use Flaw::{NoCopy, NoDirSync, NoDraftSync, NoSync, SyncAgain};
    for flaw in [NoSync, NoDirSync, NoDraftSync, NoCopy, SyncAgain] {
        let seeds = 0..400;
        let caught = seeds.clone().find(|&seed| {
            let run = std::panic::catch_unwind(|| journal(seed, flaw));
            run.is_err_and(|why| {
                let why = why.downcast_ref::<String>().expect("an assertion's text");
                let why = why.as_str();
                why.contains("acknowledged records are left") || why.starts_with("CURRENT")
            })
        });
        println!("{flaw:?} is caught by seed {caught:?}");
        assert!(caught.is_some(), "{flaw:?} went unnoticed by {} seeds", seeds.end);
    }
}
