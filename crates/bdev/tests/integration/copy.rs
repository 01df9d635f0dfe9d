//! Copies of devices that are in use.

use bdev::{Bdev, Copy};
use reactor::{Either, race};

use crate::common::copied::target_of;
use crate::common::{PLACES, Place, copied};

#[test]
fn a_copy_is_the_same_whatever_is_written_meanwhile() {
    for seed in 0..40 {
        copied::simulated(seed);
    }
}

#[test]
fn files_and_memory_are_copied_to_each_other() {
    for place in PLACES.into_iter().filter(|place| place.available()) {
        place.run("copy", 2 << 20, |core, path| async move {
            let file = format!("file:{}", path.display());
            copied::copied(&core, "mem:2M", &file).await;
            copied::copied(&core, &file, "mem:2M").await;
        });
    }
}

#[test]
fn a_copy_keeps_to_its_rate() {
    Place::Sim.run("rate", 512, |core, _| async move {
        let source = Bdev::open(&core, "mem:8M").await.unwrap();
        let channel = bdev::TaskChannel::new(&source, &core).unwrap();
        for part in 0..8 {
            let mut buf = core.alloc(1 << 20).unwrap();
            buf.fill(7);
            let io = bdev::BufIo {
                kind: bdev::Kind::Write,
                offset: part << 20,
                len: 1 << 20,
                at: 0,
                fua: false,
                tag: 0,
            };
            assert_eq!(channel.run(io, Some(buf)).await.0, bdev::Status::Ok);
        }
        let target = Bdev::open(&core, "mem:8M").await.unwrap();
        let tracked = source.tracked(&core, 65536).await.unwrap();
        let copy = Copy::new(&core, &tracked, target_of(&core, &target)).unwrap();
        copy.limit(4 << 20);
        copy.begin().await.unwrap();
        let began_ns = core.now_ns();
        // Changes of the rate let no more pass.
        let changes = async {
            for nth in 1.. {
                core.sleep_ns(90_000_000).await;
                copy.limit((4 << 20) + nth);
            }
        };
        let passed = match race(changes, copy.pass()).await {
            Either::First(()) => unreachable!(),
            Either::Second(passed) => passed,
        };
        assert_eq!(passed.unwrap(), 8 << 20);
        let ns = core.now_ns() - began_ns;
        assert!((1_800_000_000..2_100_000_000).contains(&ns), "{ns}");
    });
}

#[test]
fn a_target_that_fails_ends_the_copy() {
    Place::Sim.run("fails", 512, |core, _| async move {
        let source = Bdev::open(&core, "mem:1M").await.unwrap();
        let tracked = source.tracked(&core, 4096).await.unwrap();
        assert!(
            Copy::new(&core, &source, target_of(&core, &source)).is_err(),
            "it does not track writes"
        );
        let target = "error:kind=write,zeroes&status=nospace|mem:1M";
        let target = Bdev::open(&core, target).await.unwrap();
        let channel = bdev::TaskChannel::new(&tracked, &core).unwrap();
        let mut buf = core.alloc(4096).unwrap();
        buf.fill(7);
        let io = bdev::BufIo {
            kind: bdev::Kind::Write,
            offset: 8192,
            len: 4096,
            at: 0,
            fua: false,
            tag: 0,
        };
        assert_eq!(channel.run(io, Some(buf)).await.0, bdev::Status::Ok);
        let copy = Copy::new(&core, &tracked, target_of(&core, &target)).unwrap();
        let error = copy.pass().await.unwrap_err().to_string();
        assert!(error.contains("writing the target at byte 8192: no space left"), "{error}");
    });
}
