//! A test that cannot fail proves nothing: a device that says too early that a write is durable must
//! be caught. A program of its own, because it is one for a whole process.
#![cfg(not(loom))]

mod common;

use common::power;

#[test]
fn a_device_that_acknowledges_before_it_has_flushed_is_caught() {
    bdev::acknowledge_early();
    for uri in ["file:/disks/a.img?write=through", "file:/disks/a.img"] {
        let cached = !uri.ends_with("through");
        let caught = (0..60)
            .find(|&seed| std::panic::catch_unwind(|| power::cut(uri, cached, seed)).is_err());
        println!("{uri}: caught by seed {caught:?}");
        assert!(caught.is_some(), "{uri}: went unnoticed");
    }
}
