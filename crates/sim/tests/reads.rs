//! Reads over a failing disk, seed by seed.

use std::cell::RefCell;

use sim::reads::{Report, reads};
use sim::seeds;

#[test]
fn every_answer_is_right_or_an_error_and_all_is_readable_when_the_disk_is_well() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<Report>> = RefCell::default();
    seeds::each("one_seed", |seed| all.borrow_mut().push(reads(seed)));
    let all = all.into_inner();
    // A simulation in which nothing goes wrong proves nothing.
    let sum = |of: fn(&Report) -> u64| all.iter().map(of).sum::<u64>();
    println!(
        "{} worlds: {} right answers, {} errors, {} dropped requests, {} failed openings",
        all.len(),
        sum(|r| r.right),
        sum(|r| r.errors),
        sum(|r| r.dropped),
        sum(|r| r.failed_openings),
    );
    if all.len() >= 20 {
        assert!(sum(|r| r.right) > 10_000);
        assert!(sum(|r| r.errors) > 100);
        assert!(sum(|r| r.dropped) > 500);
        assert!(sum(|r| r.failed_openings) > 0);
        assert!(sum(|r| r.faults.rotten) > 100 && sum(|r| r.faults.flips) > 50);
        assert!(sum(|r| r.faults.stalls) > 10 && sum(|r| r.faults.stuck) > 0);
        assert!(sum(|r| r.faults.shorts) > 50 && sum(|r| r.faults.errors) > 100);
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-sim one_seed -- --nocapture`.
#[test]
fn one_seed() {
    println!("{:#?}", reads(seeds::one().unwrap_or(1)));
}

#[test]
fn the_same_seed_twice_is_the_same_run() {
    for seed in [3, 1_000_003] {
        assert_eq!(reads(seed), reads(seed), "seed {seed}");
    }
}
