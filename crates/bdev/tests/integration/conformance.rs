//! One suite for every device and engine, on the host's drivers and in a simulated world: all
//! devices keep the same guarantees.

use crate::common;
use std::cell::RefCell;
use std::future::Future;
use std::path::PathBuf;
use std::rc::Rc;

use crate::common::{Disk, Guest, PLACES, quoted};
use bdev::{Bdev, ErrorKind, Kind, QUEUE_DEPTH, Status};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use reactor::Core;

/// Size of every device, in bytes.
const SIZE: u64 = 1 << 20;

/// Every device that stores data. `FILE` stands for the path.
const KEEPING: [&str; 14] = [
    "mem:1M",
    "mem:1M?block=4K",
    "file:FILE",
    "file:FILE?write=through",
    "file:FILE?direct=off",
    "file:FILE?direct=off&write=through",
    "file:FILE?engine=sync",
    "file:FILE?engine=aio",
    "file:FILE?engine=mmap",
    "file:FILE?block=4096",
    "error:count=1&chance=0|delay:all=0us..50us|mem:1M",
    "limit:iops=1000000&bytes=10G|file:FILE",
    "dirty:granule=4K|mem:1M",
    "dirty:file=FILE.dirty|delay:all=0us..50us|file:FILE",
];

/// Runs a scenario on each of these devices, in each place.
fn on<Fut>(name: &str, uris: &[&'static str], main: fn(Core, String) -> Fut)
where
    Fut: Future<Output = ()> + 'static,
{
    for place in PLACES.into_iter().filter(|place| place.available()) {
        for &uri in uris {
            eprintln!("{place:?} {uri}");
            place.run(name, SIZE, move |core, path: PathBuf| {
                main(core, uri.replace("FILE", &quoted(&path)))
            });
        }
    }
}

#[test]
fn holes_read_as_zeroes_and_what_was_written_is_none() {
    on("holes", &KEEPING, |core, uri| async move {
        let disk = Disk::open(&core, &uri).await;
        assert_eq!(disk.plain(Kind::Discard, 0, SIZE / 2).await, Status::Ok);
        assert_eq!(disk.write(65536, &[7; 8192]).await, Status::Ok);
        let extents = disk.bdev.extents(&core, 0, SIZE, 100).await;
        let (mut at, mut holes) = (0, 0);
        for extent in &extents {
            let end = at + extent.len;
            assert!(extent.len > 0 && extent.len % 512 == 0, "{uri}: {extents:?}");
            if extent.is_hole {
                holes += 1;
                assert!(end <= 65536 || at >= 65536 + 8192, "{uri}: {extents:?}");
                let bytes = disk.read(at, extent.len as usize).await.unwrap();
                assert!(bytes.iter().all(|byte| *byte == 0), "{uri}: {extents:?}");
            }
            at = end;
        }
        assert_eq!(at, SIZE, "{uri}: {extents:?}");
        assert!(!uri.contains("mem:") || holes >= 2, "{uri}: {extents:?}");
        // A part, and the first only.
        let part = disk.bdev.extents(&core, 65536, 8192, 1).await;
        assert_eq!((part.len(), part[0].len, part[0].is_hole), (1, 8192, false), "{uri}");
    });
}

#[test]
fn written_data_is_read_back_and_nothing_else_changes() {
    on("back", &KEEPING, |core, uri| async move {
        let disk = Disk::open(&core, &uri).await;
        let before = disk.read(0, 16384).await.unwrap();
        let bytes: Vec<u8> = (0..8192).map(|n| (n % 251) as u8).collect();
        assert_eq!(disk.write(4096, &bytes).await, Status::Ok);
        assert_eq!(disk.read(4096, 8192).await.unwrap(), bytes);
        assert_eq!(disk.read(0, 4096).await.unwrap(), before[..4096]);
        assert_eq!(disk.read(12288, 4096).await.unwrap(), before[12288..]);
        assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::Ok);
        let size = disk.bdev.size_bytes();
        assert_eq!((size, disk.channel().in_flight()), (SIZE, 0));
        assert_eq!(disk.write(size - 4096, &[1; 4096]).await, Status::Ok, "the last block");
        assert_eq!(disk.read(size - 4096, 4096).await.unwrap(), [1; 4096]);
    });
}

/// One step of a random history.
#[derive(Clone, Debug)]
struct Step {
    kind: u8,
    block: u64,
    blocks: u64,
    /// Where the memory is cut into segments, in thousandths of its length.
    cuts: Vec<u16>,
    /// Offset of the memory from a page boundary, in bytes.
    shift: usize,
    fua: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cuts = prop::collection::vec(0..1000_u16, 0..6);
    let shift = prop_oneof![4 => Just(0_usize), 1 => Just(512), 1 => 1..4096_usize];
    let step = (0..10_u8, 0..240_u64, 1..16_u64, cuts, shift, any::<bool>());
    let step = step.prop_map(|(kind, block, blocks, cuts, shift, fua)| Step {
        kind,
        block,
        blocks,
        cuts,
        shift,
        fua,
    });
    prop::collection::vec(step, 1..60)
}

/// Applies a history to a device and to a model.
async fn play(disk: &Disk, steps: &[Step]) {
    let block = u64::from(disk.bdev.geometry().block_size).max(4096);
    let mut model = disk.read(0, SIZE as usize).await.unwrap();
    for (n, step) in steps.iter().enumerate() {
        let (offset, len) = (step.block * block % SIZE, step.blocks * block);
        let len = len.min(SIZE - offset);
        let range = offset as usize..(offset + len) as usize;
        let bytes: Vec<u8> = (0..len).map(|at| (at as usize * 7 + n * 31) as u8).collect();
        let mut cuts: Vec<usize> =
            step.cuts.iter().map(|&cut| (u64::from(cut) * len / 1000) as usize).collect();
        if step.shift == 0 {
            // As a guest aligns them.
            cuts.iter_mut().for_each(|cut| *cut = *cut / 512 * 512);
        }
        cuts.extend([0, len as usize]);
        cuts.sort_unstable();
        // Each segment in its own place, the last one first.
        let mut place = step.shift;
        let mut segments = Vec::new();
        for ends in cuts.windows(2).rev() {
            segments.push((place, ends[0], ends[1] - ends[0]));
            place += (ends[1] - ends[0]).next_multiple_of(4096);
        }
        segments.reverse();
        let iov: Vec<_> = segments.iter().map(|&(at, _, len)| disk.guest.at(at, len)).collect();
        match step.kind {
            0..4 => {
                for &(at, from, len) in &segments {
                    disk.guest.put(at, &bytes[from..from + len]);
                }
                let tag = disk.submit(Kind::Write, offset, &iov, len, step.fua).unwrap();
                assert_eq!(disk.wait(tag).await, Status::Ok, "step {n}: {step:?}");
                model[range].copy_from_slice(&bytes);
            }
            4..7 => {
                let status = disk.vectored(Kind::Read, offset, &iov, len).await;
                assert_eq!(status, Status::Ok, "step {n}: {step:?}");
                for &(at, from, len) in &segments {
                    let from = offset as usize + from;
                    let found = disk.guest.get(at, len);
                    assert!(found == model[from..from + len], "step {n}: {step:?}");
                }
            }
            7 => assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::Ok),
            8 => {
                let kind = Kind::WriteZeroes { unmap: step.fua };
                let tag = disk.submit(kind, offset, &[], len, step.shift > 0).unwrap();
                assert_eq!(disk.wait(tag).await, Status::Ok, "step {n}: {step:?}");
                model[range].fill(0);
            }
            _ if disk.bdev.geometry().discard => {
                assert_eq!(disk.plain(Kind::Discard, offset, len).await, Status::Ok);
                assert!(disk.bdev.geometry().zeroes_after_discard);
                model[range].fill(0);
            }
            _ => {}
        }
    }
    assert!(disk.read(0, SIZE as usize).await.unwrap() == model, "the whole device at the end");
}

#[test]
fn any_history_ends_as_on_the_model() {
    for place in PLACES.into_iter().filter(|place| place.available()) {
        for uri in KEEPING {
            let config = Config {
                cases: 12,
                failure_persistence: None,
                rng_seed: RngSeed::Fixed(7),
                max_shrink_iters: 200,
                ..Config::default()
            };
            let story = TestRunner::new(config).run(&steps(), |steps| {
                place.run("story", SIZE, move |core, path| {
                    let (steps, uri) = (steps.clone(), uri.replace("FILE", &quoted(&path)));
                    async move { play(&Disk::open(&core, &uri).await, &steps).await }
                });
                Ok(())
            });
            if let Err(error) = story {
                panic!("{place:?} {uri}: {error}");
            }
        }
    }
}

#[test]
fn an_invalid_request_is_refused_and_changes_nothing() {
    on(
        "refused",
        &["null:1M", "mem:1M", "file:FILE", "file:FILE?engine=aio"],
        |core, uri| async move {
            let disk = Disk::open(&core, &uri).await;
            let segment = |len| [disk.guest.at(0, len)];
            for (kind, offset, segments, len) in [
                (Kind::Read, 1, segment(512), 512),
                (Kind::Read, 0, segment(100), 100),
                (Kind::Write, 256, segment(512), 512),
                (Kind::Read, 0, segment(512), 1024),
                (Kind::Write, 0, segment(1024), 512),
                (Kind::Read, SIZE, segment(512), 512),
                (Kind::Write, SIZE - 512, segment(1024), 1024),
                (Kind::Write, u64::MAX - 511, segment(512), 512),
                (Kind::Read, u64::MAX, segment(1), 1),
                (Kind::Discard, SIZE, segment(0), 512),
                (Kind::Discard, 100, segment(0), 512),
                (Kind::WriteZeroes { unmap: true }, 0, segment(0), SIZE + 512),
                (Kind::WriteZeroes { unmap: false }, 0, segment(0), 100),
            ] {
                let status = disk.vectored(kind, offset, &segments, len).await;
                assert_eq!(status, Status::IoError, "{kind:?} {offset} {len}");
            }
            for kind in [Kind::Read, Kind::Write, Kind::Discard, Kind::WriteZeroes { unmap: true }]
            {
                assert_eq!(disk.plain(kind, SIZE, 0).await, Status::Ok, "nothing, at the end");
            }
        },
    );
}

#[test]
fn a_read_only_device_takes_no_writes() {
    on(
        "read-only",
        &["file:FILE?readonly=on", "file:FILE?readonly=on&engine=mmap"],
        |core, uri| async move {
            let disk = Disk::open(&core, &uri).await;
            assert!(disk.bdev.geometry().read_only);
            for kind in [Kind::Discard, Kind::WriteZeroes { unmap: false }] {
                assert_eq!(disk.plain(kind, 0, 4096).await, Status::IoError);
            }
            assert_eq!(disk.write(0, &[1; 4096]).await, Status::IoError);
            assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::Ok);
            assert_eq!(disk.read(0, 4096).await.unwrap(), [0xEE; 4096]);
        },
    );
}

#[test]
fn a_device_grows_and_shrinks_under_its_channels() {
    on("resize", &KEEPING, |core, uri| async move {
        let disk = Disk::open(&core, &uri).await;
        assert_eq!(disk.write(SIZE - 4096, &[7; 4096]).await, Status::Ok);
        disk.bdev.resize(&core, SIZE / 2).await.unwrap();
        assert_eq!(disk.bdev.geometry().size_bytes, SIZE / 2);
        assert_eq!(disk.read(SIZE / 2, 4096).await, Err(Status::IoError));
        disk.bdev.resize(&core, 2 * SIZE).await.unwrap();
        assert_eq!(disk.read(SIZE - 4096, 4096).await.unwrap(), [0; 4096], "what grew is empty");
        assert_eq!(disk.write(2 * SIZE - 4096, &[9; 4096]).await, Status::Ok);
        assert_eq!(disk.read(2 * SIZE - 4096, 4096).await.unwrap(), [9; 4096]);
        let error = disk.bdev.resize(&core, SIZE + 100).await.unwrap_err();
        assert!(error.to_string().contains("multiple"), "{error}");
        assert_eq!(disk.bdev.size_bytes(), 2 * SIZE);
    });
}

#[test]
fn a_file_that_ends_inside_a_block_ends_with_its_last_whole_block() {
    for place in PLACES.into_iter().filter(|place| place.available()) {
        for engine in ["uring", "sync", "aio", "mmap"] {
            place.run("odd", SIZE + 700, move |core, path| async move {
                let disk =
                    Disk::open(&core, &format!("file:{}?engine={engine}", quoted(&path))).await;
                assert_eq!(disk.bdev.size_bytes(), SIZE + 512);
                assert_eq!(disk.read(SIZE, 512).await.unwrap(), [0xEE; 512]);
                assert_eq!(disk.read(SIZE, 1024).await, Err(Status::IoError));
                assert_eq!(disk.write(SIZE, &[3; 512]).await, Status::Ok);
                assert_eq!(disk.read(SIZE, 512).await.unwrap(), [3; 512]);
            });
        }
    }
}

#[test]
fn a_full_channel_refuses_and_every_tag_comes_back_once() {
    let mut devices = KEEPING.to_vec();
    devices.push("null:1M");
    on("full", &devices, |core, uri| async move {
        let disk = Disk::open(&core, &uri).await;
        let mut tags = Vec::new();
        loop {
            let n = tags.len() as u64;
            // Separate memory: two reads into the same memory would be the guest's own race.
            let segments = [disk.guest.at(n as usize * 4096, 4096)];
            let kind = if n.is_multiple_of(3) { Kind::Write } else { Kind::Read };
            match disk.submit(kind, n % 256 * 4096, &segments, 4096, false) {
                Some(tag) => tags.push(tag),
                None => break,
            }
        }
        assert_eq!((tags.len(), disk.channel().in_flight()), (QUEUE_DEPTH, QUEUE_DEPTH));
        for tag in tags {
            assert_eq!(disk.wait(tag).await, Status::Ok);
        }
        assert_eq!(disk.channel().in_flight(), 0);
        assert_eq!(disk.read(0, 4096).await.map(drop), Ok(()), "and there is room again");
    });
}

/// The kernel continues to use the memory, so it must stay mapped.
#[test]
fn a_dropped_channel_holds_the_memory_until_its_requests_are_done() {
    on("dropped", &KEEPING, |core, uri| async move {
        let bdev = Bdev::open(&core, &uri).await.unwrap();
        let gone = Rc::new(RefCell::new(false));
        let disk = Disk::with(&core, &bdev, Guest::telling(8 << 20, &gone));
        for n in 0..200 {
            // Some of them are not aligned for direct I/O.
            let at = n as usize * 8192 + if n % 8 == 0 { 100 } else { 0 };
            let kind = if n % 2 == 0 { Kind::Write } else { Kind::Read };
            disk.submit(kind, n * 4096, &[disk.guest.at(at, 4096)], 4096, false).unwrap();
        }
        drop(disk);
        core.yield_now().await;
        while core.operations_in_flight() > 0 || !*gone.borrow() {
            core.sleep_ns(50_000).await;
        }
        assert_eq!(core.pool().used(), 0);
        let disk = Disk::over(&core, &bdev);
        assert_eq!(disk.read(0, 4096).await.map(|bytes| bytes.len()), Ok(4096));
    });
}

#[test]
fn a_second_user_of_an_image_is_refused_unless_both_only_read_or_one_takes_no_lock() {
    on("lock", &["file:FILE"], |core, uri| async move {
        let open = |params: &'static str| {
            let (core, uri) = (core.clone(), format!("{uri}?{params}"));
            async move { Bdev::open(&core, &uri).await }
        };
        let first = open("engine=uring").await.unwrap();
        for params in ["engine=sync", "readonly=on"] {
            let error = open(params).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        }
        drop(open("lock=off").await.unwrap());
        drop(first);
        // Another thread closes the descriptor.
        let readers = loop {
            match open("readonly=on").await {
                Ok(first) => break (first, open("readonly=on&engine=mmap").await.unwrap()),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
            }
            core.sleep_ns(1_000_000).await;
        };
        assert_eq!(open("engine=uring").await.unwrap_err().kind(), ErrorKind::Busy);
        drop(readers);
    });
}

#[test]
fn an_error_of_opening_names_its_object() {
    on("open", &["file:FILE"], |core, uri| async move {
        for (uri, expected) in [
            ("file:/none/there.img".to_owned(), "/none/there.img"),
            ("file:/".to_owned(), "/"),
            (format!("{uri}?block=64K&engine=fast"), "engine=fast"),
            ("mem:4611686018427387904".to_owned(), "address space"),
        ] {
            let error = Bdev::open(&core, &uri).await.unwrap_err();
            assert!(error.to_string().contains(expected), "{uri}: {error}");
        }
    });
}

#[test]
fn the_geometry_is_true() {
    for (uri, cache, block) in [
        ("mem:1M", false, 512),
        ("null:1M?block=4K", false, 4096),
        ("file:FILE", true, 512),
        ("file:FILE?write=through&block=4K", false, 4096),
    ] {
        for place in PLACES.into_iter().filter(|place| place.available()) {
            place.run("geometry", SIZE, move |core, path| async move {
                let bdev = Bdev::open(&core, &uri.replace("FILE", &quoted(&path))).await.unwrap();
                let geometry = bdev.geometry();
                assert_eq!((geometry.volatile_cache, geometry.block_size), (cache, block));
                assert_eq!(geometry.size_bytes, SIZE);
                assert!(geometry.min_io.is_multiple_of(geometry.block_size));
                assert!(geometry.physical_block_size >= block && geometry.write_zeroes);
            });
        }
    }
}

#[test]
fn unaligned_memory_goes_through_a_buffer_and_is_counted() {
    on("bounce", &["file:FILE", "file:FILE?engine=sync"], |core, uri| async move {
        let disk = Disk::open(&core, &uri).await;
        let len = 700 << 10;
        let bytes: Vec<u8> = (0..len).map(|n| (n / 512 % 250) as u8).collect();
        disk.guest.put(3, &bytes);
        let segments = [disk.guest.at(3, 1000), disk.guest.at(1003, len - 1000)];
        let status = disk.vectored(Kind::Write, 4096, &segments, len as u64).await;
        assert_eq!((status, disk.channel().bounced()), (Status::Ok, 1));
        assert_eq!(disk.read(4096, len).await.unwrap(), bytes);
        assert_eq!((disk.channel().bounced(), core.pool().used()), (1, 0));
        disk.guest.put(0, &vec![0; len + 1003]);
        let status = disk.vectored(Kind::Read, 4096, &segments, len as u64).await;
        assert_eq!((status, disk.channel().bounced()), (Status::Ok, 2));
        assert!(disk.guest.get(3, len) == bytes);
        // More requests than there are buffers and memory.
        let tags: Vec<u64> = (0..500)
            .map(|n| {
                let segments = [disk.guest.at(5 + n * 8192, 8192)];
                disk.submit(Kind::Read, n as u64 % 100 * 8192, &segments, 8192, false).unwrap()
            })
            .collect();
        for tag in tags {
            assert_eq!(disk.wait(tag).await, Status::Ok);
        }
        assert_eq!((disk.channel().bounced(), core.pool().used()), (502, 0));
    });
}

/// The core frees nothing that the kernel still uses, and does not wait for ever.
#[test]
fn a_core_stops_with_requests_in_flight() {
    on("stops", &KEEPING, |core, uri| async move {
        let disk = Disk::open(&core, &uri).await;
        for n in 0..200 {
            let kind = if n % 2 == 0 { Kind::Write } else { Kind::Read };
            let at = n as usize * 8192 + if n % 8 == 0 { 100 } else { 0 };
            disk.submit(kind, n * 4096, &[disk.guest.at(at, 4096)], 4096, false).unwrap();
        }
        disk.channel().poll(&mut Vec::new());
    });
}

/// Uses a loop device over a file, if the system provides one.
#[test]
fn a_block_device_is_a_device_too() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("block-device-{}.img", std::process::id()));
    let losetup = |args: &[&str]| {
        let output = std::process::Command::new("losetup").args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        output.status.success().then_some(text)
    };
    common::write(&path, &vec![0xEE; SIZE as usize]);
    let made = losetup(&["--find", "--show", path.to_str().unwrap()]);
    common::remove(&path);
    let Some(device) = made.filter(|device| device.starts_with("/dev/")) else {
        eprintln!("not tested: no loop device is available here");
        return;
    };
    let uris =
        ["uring", "sync", "aio", "mmap"].map(|engine| format!("file:{device}?engine={engine}"));
    for place in [common::Place::Uring, common::Place::Epoll] {
        for uri in uris.clone() {
            if !place.available() {
                continue;
            }
            place.run("block-device", 512, move |core, _| {
                let uri = uri.clone();
                async move {
                    let disk = loop {
                        // Another thread closes the previous descriptor.
                        match Bdev::open(&core, &uri).await {
                            Ok(bdev) => break Disk::over(&core, &bdev),
                            Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
                        }
                        core.sleep_ns(1_000_000).await;
                    };
                    assert_eq!(disk.bdev.geometry().size_bytes, SIZE);
                    assert_eq!(Bdev::open(&core, &uri).await.unwrap_err().kind(), ErrorKind::Busy);
                    let bytes: Vec<u8> = (0..16384).map(|n| (n / 64) as u8).collect();
                    assert_eq!(disk.write(SIZE - 16384, &bytes).await, Status::Ok);
                    assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::Ok);
                    assert_eq!(disk.read(SIZE - 16384, 16384).await.unwrap(), bytes);
                    let unmap = Kind::WriteZeroes { unmap: true };
                    for (kind, at) in [(unmap, 4), (Kind::WriteZeroes { unmap: false }, 3)] {
                        assert_eq!(disk.plain(kind, SIZE - at * 4096, 4096).await, Status::Ok);
                        let found = disk.read(SIZE - at * 4096, 4096).await.unwrap();
                        assert_eq!(found, [0; 4096]);
                    }
                    if disk.bdev.geometry().discard {
                        assert_eq!(disk.plain(Kind::Discard, SIZE - 4096, 4096).await, Status::Ok);
                        assert_eq!(disk.read(SIZE - 4096, 4096).await.unwrap(), [0; 4096]);
                    }
                    disk.bdev.resize(&core, SIZE / 2).await.unwrap();
                    assert_eq!(disk.read(SIZE / 2, 512).await, Err(Status::IoError));
                    disk.bdev.resize(&core, SIZE).await.unwrap();
                    let error = disk.bdev.resize(&core, 2 * SIZE).await.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                }
            });
        }
    }
    losetup(&["--detach", &device]).unwrap();
}

#[test]
fn a_mapping_follows_the_size_of_its_file() {
    on("mapping", &["file:FILE?engine=mmap"], |core, uri| async move {
        let disk = Disk::open(&core, &uri).await;
        for size in [4 * SIZE, SIZE / 2, 8 * SIZE] {
            disk.bdev.resize(&core, size).await.unwrap();
            let last = size - 4096;
            assert_eq!(disk.write(last, &[7; 4096]).await, Status::Ok);
            let before = core.stats().mapped_copies.get();
            // The page is in memory, but the core may not know yet.
            for _ in 0..2000 {
                assert_eq!(disk.read(last, 4096).await.unwrap(), [7; 4096]);
                if core.is_simulated() || core.stats().mapped_copies.get() > before {
                    break;
                }
                core.sleep_ns(1_000_000).await;
            }
            let copied = core.stats().mapped_copies.get() > before;
            assert!(copied || core.is_simulated(), "{size} bytes");
            assert_eq!(disk.read(size, 512).await, Err(Status::IoError), "beyond the end");
        }
    });
}
