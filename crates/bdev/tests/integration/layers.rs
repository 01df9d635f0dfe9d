//! Layers over devices: errors, delays and limits, mostly in a simulated world, where time is
//! exact.

use crate::common;
use std::cell::RefCell;
use std::rc::Rc;

use crate::common::{Disk, Guest, PLACES, Place};
use bdev::{Bdev, Io, Kind, Status};
use reactor::Core;

async fn statuses(disk: &Disk, kind: Kind, offsets: impl Iterator<Item = u64>) -> Vec<Status> {
    let mut all = Vec::new();
    for offset in offsets {
        let segments = [disk.guest.at(0, 4096)];
        all.push(disk.vectored(kind, offset, &segments, 4096).await);
    }
    all
}

fn simulated<T: Send + 'static, Fut: Future<Output = T> + 'static>(
    main: impl Fn(Core) -> Fut + Clone + Send + 'static,
) -> T {
    Place::Sim.run("layers", 1 << 20, move |core, _| main(core))
}

#[test]
fn requests_fail_by_kind_and_range_every_nth_up_to_a_count() {
    simulated(|core| async move {
        let uri = "error:kind=write,flush&range=8K..16K&every=2&count=3&status=nospace|mem:1M";
        let disk = Disk::open(&core, uri).await;
        let some = || [0, 4096, 8192, 12288, 16384].into_iter();
        assert!(statuses(&disk, Kind::Read, some()).await.iter().all(|s| *s == Status::Ok));
        let (ok, full) = (Status::Ok, Status::NoSpace);
        let writes = statuses(&disk, Kind::Write, some()).await;
        assert_eq!(writes, [ok, ok, ok, full, ok], "two of them in range, the second fails");
        let writes = statuses(&disk, Kind::Write, [8192; 6].into_iter()).await;
        assert_eq!(writes, [ok, full, ok, full, ok, ok], "three are all");
    });
}

#[test]
fn a_failed_write_has_done_nothing_and_chance_follows_the_seed() {
    let run = || {
        simulated(|core| async move {
            let disk = Disk::open(&core, "error:kind=write&chance=0.3|mem:1M").await;
            let mut failed = Vec::new();
            for n in 0..100 {
                failed.push(disk.write(n * 4096, &[7; 4096]).await == Status::IoError);
                let expected = if failed[n as usize] { 0 } else { 7 };
                assert_eq!(disk.read(n * 4096, 4096).await.unwrap(), [expected; 4096]);
            }
            failed
        })
    };
    let failed = run();
    let count = failed.iter().filter(|failed| **failed).count();
    assert!((10..60).contains(&count), "{count} of 100");
    assert_eq!(run(), failed, "the same seed");
}

#[test]
fn completions_come_after_their_delay_and_in_another_order() {
    simulated(|core| async move {
        let disk = Disk::open(&core, "delay:read=1ms..5ms&write=20ms|mem:1M").await;
        let start = core.now_ns();
        let segments = [disk.guest.at(0, 4096)];
        let mut tags = vec![disk.submit(Kind::Write, 0, &segments, 4096, false).unwrap()];
        for n in 0..50 {
            tags.push(disk.submit(Kind::Read, n * 4096, &segments, 4096, false).unwrap());
        }
        for &tag in &tags[1..] {
            assert_eq!(disk.wait(tag).await, Status::Ok);
        }
        let reads = core.now_ns() - start;
        assert!((1_000_000..7_000_000).contains(&reads), "{reads} ns");
        assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::Ok);
        assert_eq!(disk.order().len(), 51, "the write is still held back");
        assert_eq!(disk.wait(tags[0]).await, Status::Ok);
        let all = core.now_ns() - start;
        assert!((20_000_000..22_000_000).contains(&all), "{all} ns");
        let order = disk.order();
        assert_ne!(order[..50], tags[1..], "in another order than they were asked for");
    });
}

#[test]
fn a_limited_device_gives_what_it_has_saved_and_then_its_rate() {
    for (uri, expected_ms) in [
        // 1000 requests, of which 100 were saved.
        ("limit:iops=1000&burst=100ms|mem:1M", 900),
        // 4000 KiB at 1 MiB a second, of which 100 ms were saved.
        ("limit:bytes=1M&burst=100ms|mem:1M", 3806),
        ("limit:iops=1000000&bytes=8M&burst=0ms|mem:1M", 488),
    ] {
        let ns = simulated(move |core| async move {
            let disk = Disk::open(&core, uri).await;
            core.sleep_ns(1_000_000_000).await;
            let start = core.now_ns();
            let segments = [disk.guest.at(0, 4096)];
            let tags: Vec<_> = (0..1000)
                .map(|n| {
                    let kind = if n % 2 == 0 { Kind::Read } else { Kind::Write };
                    disk.submit(kind, n % 200 * 4096, &segments, 4096, false).unwrap()
                })
                .collect();
            assert_eq!(disk.plain(Kind::Flush, 0, 0).await, Status::Ok);
            assert!(core.now_ns() - start < 1_000_000, "a flush does not wait");
            for &tag in &tags {
                assert_eq!(disk.wait(tag).await, Status::Ok);
            }
            core.now_ns() - start
        });
        let ms = ns / 1_000_000;
        assert!((expected_ms - 10..expected_ms + 10).contains(&ms), "{uri}: {ms} ms");
    }
}

/// All layers over a file, on every driver: they hold the memory and wake the core.
#[test]
fn layers_cover_each_other_and_files() {
    for place in PLACES.into_iter().filter(|place| place.available()) {
        place.run("stack", 1 << 20, |core, path| async move {
            let path = common::quoted(&path);
            let uri = format!(
                "error:kind=discard|delay:all=10us..300us|limit:iops=20000&burst=1ms|file:{path}"
            );
            let disk = Disk::open(&core, &uri).await;
            let tags: Vec<_> = (0..200)
                .map(|n| {
                    disk.guest.put(n as usize * 4096, &[n as u8; 4096]);
                    let segments = [disk.guest.at(n as usize * 4096, 4096)];
                    disk.submit(Kind::Write, n * 4096, &segments, 4096, false).unwrap()
                })
                .collect();
            for tag in tags {
                assert_eq!(disk.wait(tag).await, Status::Ok);
            }
            assert_eq!(disk.plain(Kind::Discard, 0, 4096).await, Status::IoError);
            assert_eq!(disk.read(199 * 4096, 4096).await.unwrap(), [199; 4096]);
            disk.bdev.resize(&core, 1 << 19).await.unwrap();
            assert_eq!(disk.read(1 << 19, 512).await, Err(Status::IoError));
            assert_eq!(disk.channel().in_flight(), 0);
        });
    }
}

/// An unaligned request is copied when one of 64 buffers is free, and `limit:` begins a request
/// later: both after other memory was passed to `hold`.
#[test]
fn waiting_requests_hold_the_memory_of_their_submission() {
    for place in PLACES.into_iter().filter(|place| place.available()) {
        place.run("holds", 1 << 20, |core, path| async move {
            let path = common::quoted(&path);
            for over in ["", "limit:iops=100000&burst=1us|", "error:kind=flush|dirty:granule=4K|"] {
                // The lock of the previous device may be released a moment later.
                let uri = format!("{over}file:{path}?lock=off");
                let device = Bdev::open(&core, &uri).await.unwrap();
                let mut channel = device.channel(&core).unwrap();
                let gone = Rc::new(RefCell::new(false));
                let guest = Rc::new(Guest::telling(1 << 20, &gone));
                channel.hold(guest.clone());
                for tag in 0..200 {
                    let kind = if tag % 2 == 0 { Kind::Read } else { Kind::Write };
                    let segments = [guest.at(1 + 4096 * tag as usize, 4096)];
                    let offset = 4096 * tag;
                    let io = Io { kind, offset, len: 4096, segments: &segments, tag, fua: false };
                    // SAFETY: the memory is released with the last request that holds it.
                    unsafe { channel.submit(&io) }.unwrap();
                }
                channel.hold(Rc::new(()));
                drop(guest);
                let mut done = Vec::new();
                while channel.in_flight() > 0 {
                    assert!(!*gone.borrow(), "{over}: {} are in flight", channel.in_flight());
                    channel.poll(&mut done);
                    core.sleep_ns(10_000).await;
                }
                assert!(done.iter().all(|done| done.status == Status::Ok));
                assert!(*gone.borrow(), "{over}: no request needs it any more");
            }
        });
    }
}
