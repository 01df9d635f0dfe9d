//! A disk in a simulated world whose file fails, or whose machine loses power: what a guest was
//! told must be true of what is left.
#![cfg(not(loom))]

mod common;

use std::cell::RefCell;
use std::rc::Rc;

use bdev::{Bdev, Kind, Status};
use common::{Disk, Guest};
use reactor::sim::{Access, Crash, FailureKind, Fault, FaultKind, SimConfig, World};

const SIZE: usize = 1 << 20;
const BLOCK: u64 = 4096;
const SECTOR: u64 = 512;

fn world(seed: u64) -> World {
    let world = World::new(seed, 1, SimConfig::default());
    world.add_file("/disks/a.img", vec![0xEE; SIZE]);
    world
}

/// What a sector of the file may hold after a crash, as the guest knows it.
#[derive(Clone, Default)]
struct Known {
    /// What it was last told to be durable.
    durable: u8,
    /// What it has written or begun to write since.
    newer: Vec<u8>,
}

/// Writes, zeroes, discards and flushes at random, and keeps book of what was promised.
async fn work(disk: &Disk, core: &reactor::Core, book: &RefCell<Vec<Known>>, cached: bool) {
    let mut byte = 0_u8;
    loop {
        let n = core.random_u64() % (SIZE as u64 / BLOCK);
        byte = byte % 200 + 1;
        let through = !cached || core.random_u64().is_multiple_of(4);
        let (kind, value) = match core.random_u64() % 8 {
            0 => (Kind::WriteZeroes { unmap: true }, 0),
            1 => (Kind::WriteZeroes { unmap: false }, 0),
            2 => (Kind::Discard, 0),
            3 if cached => {
                let before: Vec<_> = book.borrow().iter().map(|known| known.newer.len()).collect();
                assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::Ok);
                for (known, n) in book.borrow_mut().iter_mut().zip(before) {
                    if let Some(&last) = known.newer[..n].last() {
                        (known.durable, known.newer) = (last, known.newer[n..].to_vec());
                    }
                }
                continue;
            }
            _ => (Kind::Write, byte),
        };
        disk.guest.put(0, &[value; BLOCK as usize]);
        // Half of them not aligned, and so through a buffer.
        let shift = if byte.is_multiple_of(2) { 4096 } else { 4096 + 7 };
        disk.guest.put(shift, &[value; BLOCK as usize]);
        let whole = [disk.guest.at(shift, BLOCK as usize)];
        let segments = if kind == Kind::Write { &whole[..] } else { &[] };
        let sectors = (n * BLOCK / SECTOR) as usize..((n + 1) * BLOCK / SECTOR) as usize;
        book.borrow_mut()[sectors.clone()].iter_mut().for_each(|known| known.newer.push(value));
        let tag = disk.submit(kind, n * BLOCK, segments, BLOCK, through).unwrap();
        assert_eq!(disk.wait(tag).await, Status::Ok);
        if through {
            for known in &mut book.borrow_mut()[sectors] {
                (known.durable, known.newer) = (value, Vec::new());
            }
        }
    }
}

#[test]
fn what_was_promised_to_be_durable_survives_power_cuts() {
    for (uri, cached) in [
        ("file:/disks/a.img", true),
        ("file:/disks/a.img?write=through", false),
        ("file:/disks/a.img?direct=off&write=through", false),
        ("delay:all=1us..1ms|file:/disks/a.img?direct=off", true),
    ] {
        for seed in 0..60 {
            let world = world(seed);
            let known = Known { durable: 0xEE, newer: Vec::new() };
            let book = Rc::new(RefCell::new(vec![known; SIZE / SECTOR as usize]));
            for round in 0..3 {
                world.crash_at(Crash::PowerCut, 20..200);
                let failure = world.run(|core| {
                    let book = book.clone();
                    async move {
                        let disk = Disk::open(&core, uri).await;
                        work(&disk, &core, &book, cached).await;
                    }
                });
                let kind = failure.unwrap_err().kind;
                assert!(matches!(kind, FailureKind::Crash(Crash::PowerCut)), "{kind:?}");
                let bytes = world.bytes("/disks/a.img").unwrap();
                let mut book = book.borrow_mut();
                for (n, (known, sector)) in book.iter_mut().zip(bytes.chunks(512)).enumerate() {
                    let value = sector[0];
                    assert!(sector.iter().all(|&byte| byte == value), "a sector is whole");
                    assert!(
                        value == known.durable || known.newer.contains(&value),
                        "{uri} seed {seed} round {round} sector {n}: {value:#x}, but {:#x} was \
                         promised",
                        known.durable
                    );
                    // What is there after a power cut stays.
                    (known.durable, known.newer) = (value, Vec::new());
                }
            }
        }
    }
}

#[test]
fn errors_of_the_disk_reach_the_guest_and_a_failed_flush_ends_all_writing() {
    let world = world(1);
    let faults = world.clone();
    world
        .run(move |core| {
            let world = faults.clone();
            async move {
                let disk = Disk::open(&core, "file:/disks/a.img").await;
                world.add_fault(Fault::new(FaultKind::Error(5)).range(0..4096));
                let full = Fault::new(FaultKind::Error(28)).of(Access::Write).range(8192..12288);
                world.add_fault(full);
                let refused = Fault::new(FaultKind::Error(95)).of(Access::Write).range(4096..8192);
                world.add_fault(refused.times(2));
                assert_eq!(disk.read(0, 4096).await, Err(Status::IoError));
                assert_eq!(disk.write(8192, &[1; 4096]).await, Status::NoSpace);
                assert_eq!(disk.plain(Kind::Discard, 4096, 4096).await, Status::Unsupported);
                // The hole is refused, and then the range is zeroed by other means.
                let zeroes = Kind::WriteZeroes { unmap: true };
                assert_eq!(disk.plain(zeroes, 4096, 4096).await, Status::Ok);
                assert_eq!(disk.read(4096, 4096).await.unwrap(), [0; 4096]);
                let tag = disk.submit(zeroes, 8192, &[], 4096, false).unwrap();
                assert_eq!(disk.wait(tag).await, Status::NoSpace);
                world.heal();
                assert_eq!(disk.write(8192, &[1; 4096]).await, Status::Ok);
                world.add_fault(Fault::new(FaultKind::Error(5)).of(Access::Sync).times(1));
                assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::IoError);
                assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::IoError);
                assert_eq!(disk.write(8192, &[2; 4096]).await, Status::IoError);
                // Another channel of the same device is told so, too; reading goes on.
                let other = Disk::with(&core, &disk.bdev, Guest::new(1 << 20));
                assert_eq!(other.plain(Kind::Discard, 0, 4096).await, Status::IoError);
                assert_eq!(other.read(8192, 4096).await.map(|b| b.len()), Ok(4096));
                let uri = "file:/disks/a.img?lock=off";
                let again = Disk::over(&core, &Bdev::open(&core, uri).await.unwrap());
                assert_eq!(again.plain(Kind::Flush, 0, 0).await, Status::Ok, "opened again");
            }
        })
        .unwrap();
}
