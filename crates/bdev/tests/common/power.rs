//! A guest that writes until its machine loses power, and records what was acknowledged.

use std::cell::RefCell;
use std::rc::Rc;

use bdev::{Kind, Status};
use reactor::sim::{Crash, FailureKind, SimConfig, World};
use reactor::{Class, Core};

use super::Disk;

const SIZE: usize = 1 << 20;
const BLOCK: u64 = 4096;
const SECTOR: u64 = 512;
/// The number of concurrent writers if every write is durable.
const WORKERS: u64 = 4;

pub fn world(seed: u64) -> World {
    let world = World::new(seed, 1, SimConfig::default());
    world.add_file("/disks/a.img", vec![0xEE; SIZE]);
    world
}

/// The values that a sector of the file may have after a crash, as the guest knows it.
#[derive(Clone, Default)]
struct Known {
    /// The last value that was acknowledged as durable.
    durable: u8,
    /// The values that it has written or begun to write since.
    newer: Vec<u8>,
}

/// Writes, zeroes, discards and flushes at random, and records what was acknowledged. Each of
/// `workers` has its own blocks and memory; only a single worker flushes.
async fn work(
    core: &Core,
    disk: &Disk,
    book: &RefCell<Vec<Known>>,
    cached: bool,
    (me, workers): (u64, u64),
) {
    let mut byte = 0_u8;
    let memory = me as usize * 4 * BLOCK as usize;
    loop {
        let n = core.random_u64() % (SIZE as u64 / BLOCK / workers) * workers + me;
        byte = byte % 200 + 1;
        let fua = !cached || core.random_u64().is_multiple_of(4);
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
        // Half of them are not aligned, and so go through a buffer.
        let place = memory + if byte.is_multiple_of(2) { 0 } else { 7 };
        disk.guest.put(place, &[value; BLOCK as usize]);
        let whole = [disk.guest.at(place, BLOCK as usize)];
        let segments = if kind == Kind::Write { &whole[..] } else { &[] };
        let sectors = (n * BLOCK / SECTOR) as usize..((n + 1) * BLOCK / SECTOR) as usize;
        book.borrow_mut()[sectors.clone()].iter_mut().for_each(|known| known.newer.push(value));
        let tag = disk.submit(kind, n * BLOCK, segments, BLOCK, fua).unwrap();
        assert_eq!(disk.wait(tag).await, Status::Ok);
        if fua {
            for known in &mut book.borrow_mut()[sectors] {
                (known.durable, known.newer) = (value, Vec::new());
            }
        }
    }
}

/// Cuts the machine's power three times, and checks each time that the file holds what was
/// acknowledged.
pub fn cut(uri: &'static str, cached: bool, seed: u64) {
    let world = world(seed);
    let known = Known { durable: 0xEE, newer: Vec::new() };
    let book = Rc::new(RefCell::new(vec![known; SIZE / SECTOR as usize]));
    for round in 0..3 {
        world.crash_at(Crash::PowerCut, 20..200);
        let failure = world.run(|core| {
            let book = book.clone();
            async move {
                let disk = Rc::new(Disk::open(&core, uri).await);
                let workers = if cached { 1 } else { WORKERS };
                for me in 1..workers {
                    let (inner, disk, book) = (core.clone(), disk.clone(), book.clone());
                    core.spawn(Class::Foreground, async move {
                        work(&inner, &disk, &book, cached, (me, workers)).await;
                    });
                }
                work(&core, &disk, &book, cached, (0, workers)).await;
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
                "{uri} seed {seed} round {round} sector {n}: {value:#x}, but {:#x} was acknowledged",
                known.durable
            );
            // The data after a power cut stays.
            (known.durable, known.newer) = (value, Vec::new());
        }
    }
}
