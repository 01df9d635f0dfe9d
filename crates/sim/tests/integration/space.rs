//! The space of blob files, world by world.

use std::cell::RefCell;

use sim::engine::Flaw;
use sim::seeds;
use sim::space::{Report, space};

#[test]
fn blob_files_stay_below_the_limit_of_their_space() {
    if seeds::one().is_some() {
        return;
    }
    let all: RefCell<Vec<Report>> = RefCell::default();
    seeds::each("one_space", |seed| {
        let report = space(seed, Flaw::None);
        println!("seed {seed}: {report:?}, {} above", report.excess());
        all.borrow_mut().push(report);
        assert!(report.excess() <= 0, "{report:?}");
    });
    let collections: u64 = all.borrow().iter().map(|report| report.collections).sum();
    assert!(all.borrow().len() < 20 || collections > 100, "{collections} collections");
}

/// Replays one seed: `MILLRACE_SEED=... cargo test -p millrace-sim one_space -- --nocapture`.
#[test]
fn one_space() {
    let report = space(seeds::one().unwrap_or(1), Flaw::None);
    println!("{report:#?}");
    assert_eq!(report, space(seeds::one().unwrap_or(1), Flaw::None), "the same seed twice");
}
