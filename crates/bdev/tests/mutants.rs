//! A test that cannot fail proves nothing: a device that reports a write as durable too early must
//! be detected, and a copy that takes its marks too late. A separate program, because a mutant
//! applies to a whole process.
#![cfg(not(loom))]

mod common;

use bdev::Mutant;
use common::{copied, power};
use reactor::sim::{SimConfig, World};

#[test]
fn whatever_is_wrong_is_detected() {
    copy_takes_marks_late();
    failure_of_the_mirror_is_ignored();
    for mutant in [Mutant::AcknowledgesEarly, Mutant::FlushCoversLater] {
        bdev::set_mutant(mutant);
        let caught = (0..200).find(|&seed| {
            let cut = || power::cut("file:/disks/a.img?write=through", false, seed);
            std::panic::catch_unwind(cut).is_err()
        });
        println!("{mutant:?}: detected by seed {caught:?}");
        assert!(caught.is_some(), "{mutant:?} was not detected");
    }
}

fn failure_of_the_mirror_is_ignored() {
    bdev::set_mutant(Mutant::TrustsTheMirror);
    let run = || {
        World::new(1, 1, SimConfig::default())
            .run(|core| async move { copied::with_failures(&core).await })
            .unwrap();
    };
    assert!(std::panic::catch_unwind(run).is_err());
}

/// One test runs after the other, because the mutant is the process's.
fn copy_takes_marks_late() {
    bdev::set_mutant(Mutant::TakesMarksAfterCopy);
    let caught =
        (0..40).find(|&seed| std::panic::catch_unwind(|| copied::simulated(seed)).is_err());
    println!("a copy that takes marks late: detected by seed {caught:?}");
    assert!(caught.is_some());
}
