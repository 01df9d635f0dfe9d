//! Repair after kills, power cuts and damage, seed by seed.

use std::cell::RefCell;

use sim::engine::Flaw;
use sim::repair::{Report, repairs};
use sim::seeds;

#[test]
fn a_repair_keeps_what_is_intact() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<Report>> = RefCell::default();
    seeds::many("one_repair", 21, |seed| all.borrow_mut().push(repairs(seed, Flaw::None)));
    let all = all.into_inner();
    let sum = |of: fn(&Report) -> u64| all.iter().map(of).sum::<u64>();
    println!(
        "{} worlds: {} changes; damaged {} times CURRENT, {} MANIFESTs ({} rebuilt, with {} obsolete \
         tables), {} tables, {} logs; {} repairs interrupted; {} exact, {} older values",
        all.len(),
        sum(|r| r.acknowledged),
        sum(|r| r.currents),
        sum(|r| r.manifests),
        sum(|r| r.rebuilt),
        sum(|r| r.obsolete),
        sum(|r| r.tables),
        sum(|r| r.logs),
        sum(|r| r.interrupted),
        sum(|r| r.exact),
        sum(|r| r.older),
    );
    if all.len() >= 400 {
        assert!(sum(|r| r.acknowledged) > 10_000 && sum(|r| r.interrupted) > 400);
        assert!(sum(|r| r.currents) > 80 && sum(|r| r.manifests) > 80 && sum(|r| r.rebuilt) > 80);
        assert!(sum(|r| r.tables) > 60 && sum(|r| r.logs) > 60);
        assert!(sum(|r| r.exact) > 80 && sum(|r| r.older) > 50);
    }
}

/// Replays one seed: `MILLRACE_SEED=… cargo test -p millrace-sim one_repair -- --nocapture`.
#[test]
fn one_repair() {
    let seed = seeds::one().unwrap_or(1);
    let report = repairs(seed, Flaw::None);
    println!("{report:#?}");
    assert_eq!(report, repairs(seed, Flaw::None), "the same seed is the same run");
}
