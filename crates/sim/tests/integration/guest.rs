//! A guest's disk: its process is killed, hands over and loses power at any moment, seed by seed.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use sim::guest::{Flaw, Report, guest};
use sim::seeds;

#[test]
fn a_guest_loses_nothing_when_its_server_is_killed_or_hands_over() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<Report>> = RefCell::default();
    seeds::many("one_guest", 10, |seed| all.borrow_mut().push(guest(seed, Flaw::None)));
    let all = all.into_inner();
    let sum = |of: fn(&Report) -> u64| all.iter().map(of).sum::<u64>();
    println!(
        "{} worlds, {} packed: {} processes, {} killed, {} without power, {} rests, {} handed over; {} requests, {} done \
         again, {} flushes, {} sectors checked",
        all.len(),
        all.iter().filter(|report| report.packed).count(),
        sum(|r| r.processes),
        sum(|r| r.kills),
        sum(|r| r.power_cuts),
        sum(|r| r.rests),
        sum(|r| r.handed_over),
        sum(|r| r.requests),
        sum(|r| r.resubmitted),
        sum(|r| r.flushes),
        sum(|r| r.checked_sectors),
    );
    // A simulation without faults proves nothing.
    if all.len() >= 200 {
        assert!(all.iter().any(|report| report.packed) && !all.iter().all(|report| report.packed));
        assert!(sum(|r| r.kills) > 200 && sum(|r| r.power_cuts) > 100);
        assert!(sum(|r| r.handed_over) > 100 && sum(|r| r.rests) > sum(|r| r.handed_over));
        assert!(sum(|r| r.resubmitted) > 500 && sum(|r| r.flushes) > 500);
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-sim one_guest -- --nocapture`.
#[test]
fn one_guest() {
    println!("{:#?}", guest(seeds::one().unwrap_or(1), Flaw::None));
}

#[test]
fn the_same_seed_twice_is_the_same_guest() {
    for seed in 0..10 {
        assert_eq!(guest(seed, Flaw::None), guest(seed, Flaw::None), "seed {seed}");
    }
}

/// Each flaw is found by one of some seeds.
#[test]
fn each_deliberate_flaw_is_caught() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let found =
        |flaw| (0..40).any(|seed| catch_unwind(AssertUnwindSafe(|| guest(seed, flaw))).is_err());
    let missed: Vec<_> =
        [Flaw::NoRegion, Flaw::NoFlush].into_iter().filter(|&f| !found(f)).collect();
    std::panic::set_hook(hook);
    assert!(missed.is_empty(), "{missed:?}");
}
