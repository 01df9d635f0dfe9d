//! A test that cannot fail proves nothing: a device that says too early that a write is durable
//! must be caught. A program of its own, because a mutant is one for a whole process.
#![cfg(not(loom))]

mod common;

use bdev::Mutant;
use common::power;

#[test]
fn a_device_that_is_wrong_about_durability_is_caught() {
    for mutant in [Mutant::AcknowledgesEarly, Mutant::FlushCoversLater] {
        bdev::set_mutant(mutant);
        let caught = (0..200).find(|&seed| {
            let cut = || power::cut("file:/disks/a.img?write=through", false, seed);
            std::panic::catch_unwind(cut).is_err()
        });
        println!("{mutant:?}: caught by seed {caught:?}");
        assert!(caught.is_some(), "{mutant:?} went unnoticed");
    }
}
