//! A test that cannot fail proves nothing: a device that reports a write as durable too early must
//! be detected. A separate program, because a mutant applies to a whole process.
#![cfg(not(loom))]

mod common;

use bdev::Mutant;
use common::power;

#[test]
fn a_device_that_is_wrong_about_durability_is_detected() {
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
