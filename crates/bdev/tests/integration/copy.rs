//! Copies of devices that are in use.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use bdev::{Bdev, BufIo, Copy, CopyTarget, Kind, Status, TargetStep, TaskChannel};
use reactor::sim::{SimConfig, World};
use reactor::{Buf, Class, Core, Either, Event, race};

use crate::common::copied::target_of;
use crate::common::{PLACES, Place, copied};

/// Writes data that is not zero.
async fn write(core: &Core, channel: &TaskChannel, offset: u64, len: u32) {
    let mut buf = core.alloc(len as usize).unwrap();
    buf.fill(7);
    let io = BufIo { kind: Kind::Write, offset, len: len.into(), at: 0, fua: false, tag: 0 };
    assert_eq!(channel.run(io, Some(buf)).await.0, Status::Ok);
}

/// The first byte of a block.
async fn first_byte(core: &Core, channel: &TaskChannel, offset: u64) -> u8 {
    let io = BufIo { kind: Kind::Read, offset, len: 4096, at: 0, fua: false, tag: 0 };
    let (status, buf) = channel.run(io, Some(core.alloc(4096).unwrap())).await;
    assert_eq!(status, Status::Ok);
    buf.unwrap()[0]
}

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
            for mirrors in [false, true] {
                copied::copied(&core, "mem:2M", &file, mirrors).await;
                copied::copied(&core, &file, "mem:2M", mirrors).await;
            }
        });
    }
}

#[test]
fn a_copy_keeps_to_its_rate() {
    Place::Sim.run("rate", 512, |core, _| async move {
        let source = Bdev::open(&core, "mem:8M").await.unwrap();
        let channel = TaskChannel::new(&source, &core).unwrap();
        for part in 0..8 {
            write(&core, &channel, part << 20, 1 << 20).await;
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
        let channel = TaskChannel::new(&tracked, &core).unwrap();
        write(&core, &channel, 8192, 4096).await;
        let copy = Copy::new(&core, &tracked, target_of(&core, &target)).unwrap();
        let error = copy.pass().await.unwrap_err().to_string();
        assert!(error.contains("writing the target at byte 8192: no space left"), "{error}");
    });
}

#[test]
fn mirrored_writes_need_no_copy() {
    Place::Sim.run("mirrored", 512, |core, _| async move {
        let source = Bdev::open(&core, "mem:1M").await.unwrap();
        let target = Bdev::open(&core, "delay:write=1ms|mem:1M").await.unwrap();
        let tracked = source.mirrored(&core, 8192, &target).await.unwrap();
        let channel = TaskChannel::new(&tracked, &core).unwrap();
        let copied = TaskChannel::new(&target, &core).unwrap();
        let copy = Copy::new(&core, &tracked, target_of(&core, &target)).unwrap();
        copy.begin().await.unwrap();
        let at = |block: u64| block * 4096;
        // Not yet.
        write(&core, &channel, at(0), 4096).await;
        assert_eq!(copy.left_bytes(), 8192);
        // Nobody waits for the target. The first granule is marked, so it has to be copied.
        copy.mirror(true);
        let began_ns = core.now_ns();
        for block in [0, 3, 20, 21] {
            write(&core, &channel, at(block), 4096).await;
        }
        write(&core, &channel, at(40), 65536).await;
        assert!(core.now_ns() - began_ns < 1_000_000);
        assert_eq!(first_byte(&core, &copied, at(20)).await, 0);
        // Block 21 lies in the granule of block 20, which was under way.
        assert_eq!(copy.left_bytes(), 2 * 8192);
        assert_eq!(copy.pass().await.unwrap(), 8192);
        copy.until_mirrored().await;
        assert_eq!(copy.pass().await.unwrap(), 8192);
        for block in [0, 3, 20, 21, 40, 55] {
            assert_eq!(first_byte(&core, &copied, at(block)).await, 7, "block {block}");
        }
        // With a rate they are marked, and when the copy ends.
        for ends in [false, true] {
            copy.limit(if ends { 0 } else { 1 << 30 });
            copy.mirror(!ends);
            write(&core, &channel, at(80), 4096).await;
            assert_eq!(copy.left_bytes(), 8192);
            copy.limit(0);
            assert_eq!(copy.pass().await.unwrap(), 8192);
        }
    });
}

#[test]
fn what_cannot_be_mirrored_is_copied() {
    Place::Sim.run("unmirrored", 512, |core, _| async move { copied::with_failures(&core).await });
}

/// Another node that does not answer for now.
#[derive(Default)]
struct Away {
    answers: Cell<bool>,
    back: Event,
    written_bytes: Cell<u64>,
}

struct ToAway(Rc<Away>);

impl CopyTarget for ToAway {
    fn is_far(&self) -> bool {
        true
    }

    fn write(&self, _: u64, len: u64, buf: Buf) -> TargetStep<'_> {
        Box::pin(async move {
            self.0.back.wait_until(|| self.0.answers.get()).await;
            self.0.written_bytes.set(self.0.written_bytes.get() + len);
            drop(buf);
            Ok(())
        })
    }

    fn zero(&self, _: u64, _: u64, _: Buf) -> TargetStep<'_> {
        Box::pin(async { Ok(()) })
    }

    fn clear(&self, _: u64, _: u64) -> TargetStep<'_> {
        Box::pin(async { Ok(()) })
    }

    fn flush(&self) -> TargetStep<'_> {
        Box::pin(async { Ok(()) })
    }
}

/// A copy of a device that is full of data.
async fn copy_of_data(core: &Core, away: &Rc<Away>) -> Copy {
    let source = Bdev::open(core, "mem:1M").await.unwrap();
    let channel = TaskChannel::new(&source, core).unwrap();
    write(core, &channel, 0, 1 << 20).await;
    let tracked = source.tracked(core, 16384).await.unwrap();
    Copy::new(core, &tracked, Box::new(ToAway(away.clone()))).unwrap()
}

#[test]
fn copies_to_a_target_that_does_not_answer_leave_others_their_memory() {
    const MEMORY: usize = 8 << 20;
    const COPIES: usize = 20;
    let config = SimConfig { memory: MEMORY, ..SimConfig::default() };
    let run = World::new(1, 1, config).run(|core| async move {
        let away = Rc::<Away>::default();
        let ended = Rc::<RefCell<Vec<_>>>::default();
        let mut copies = Vec::new();
        for _ in 0..COPIES {
            let copy = copy_of_data(&core, &away).await;
            let ended = ended.clone();
            copies.push(core.spawn(Class::Background, async move {
                copy.begin().await.unwrap();
                let passed = copy.pass().await;
                ended.borrow_mut().push(passed.map_err(|error| error.to_string()));
            }));
        }
        core.sleep_ns(60_000_000_000).await;
        assert_eq!(*ended.borrow(), []);
        assert!(core.pool().used() <= MEMORY / 4 + COPIES * (128 << 10));
        assert!(core.alloc(2 << 20).is_some());
        // Others may hold the rest for a long time, too.
        let mut others = Vec::new();
        while let Some(buf) = core.alloc(16 << 10) {
            others.push(buf);
        }
        away.answers.set(true);
        away.back.notify_all();
        core.sleep_ns(15_000_000_000).await;
        drop(others);
        for copy in copies {
            copy.await;
        }
        assert_eq!(*ended.borrow(), vec![Ok(1 << 20); COPIES]);
        assert_eq!(away.written_bytes.get(), (COPIES as u64) << 20);
        assert_eq!(core.pool().used(), 0);
    });
    run.unwrap();
}

#[test]
fn memory_that_others_hold_for_long_delays_a_copy() {
    let config = SimConfig { memory: 8 << 20, ..SimConfig::default() };
    let run = World::new(1, 1, config).run(|core| async move {
        let away = Rc::<Away>::default();
        away.answers.set(true);
        let copy = copy_of_data(&core, &away).await;
        copy.begin().await.unwrap();
        let mut others = Vec::new();
        while let Some(buf) = core.alloc(16 << 10) {
            others.push(buf);
        }
        let release = async {
            core.sleep_ns(25_000_000_000).await;
            drop(others);
            std::future::pending::<()>().await;
        };
        match race(release, copy.pass()).await {
            Either::First(()) => unreachable!(),
            Either::Second(passed) => assert_eq!(passed.unwrap(), 1 << 20),
        }
    });
    run.unwrap();
}

#[test]
fn others_get_their_turns_while_a_large_bitmap_is_read() {
    Place::Sim.run("large", 512, |core, _| async move {
        const SIZE: u64 = 1 << 40;
        let source = Bdev::open(&core, "null:1T").await.unwrap();
        let tracked = source.tracked(&core, 16384).await.unwrap();
        let away = Rc::<Away>::default();
        away.answers.set(true);
        let copy = Copy::new(&core, &tracked, Box::new(ToAway(away))).unwrap();
        let turns = Rc::new(Cell::new(0));
        let (counts, other) = (turns.clone(), core.clone());
        let counting = core.spawn(Class::Foreground, async move {
            loop {
                counts.set(counts.get() + 1);
                other.yield_now().await;
            }
        });
        let _counting = counting.owned();
        let channel = TaskChannel::new(&tracked, &core).unwrap();
        for offset in [0, SIZE / 2, SIZE - 4096] {
            let io = bdev::BufIo {
                kind: bdev::Kind::WriteZeroes { unmap: true },
                offset,
                len: 4096,
                at: 0,
                fua: false,
                tag: 0,
            };
            assert_eq!(channel.run(io, None).await.0, bdev::Status::Ok);
        }
        let from = turns.get();
        assert_eq!(copy.count_left_bytes().await, 3 * 16384);
        assert_eq!(copy.known_left_bytes(), 3 * 16384);
        assert_eq!(copy.left_bytes(), 3 * 16384);
        let counted = turns.get();
        assert!(counted - from > 100, "{} turns", counted - from);
        assert_eq!(copy.pass().await.unwrap(), 3 * 16384);
        assert_eq!(copy.known_left_bytes(), 0);
        assert!(turns.get() - counted > 10, "{} turns", turns.get() - counted);
        assert_eq!(copy.count_left_bytes().await, 0);
    });
}
