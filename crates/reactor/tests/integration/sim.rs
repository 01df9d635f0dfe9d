//! The simulated world itself: its guarantees to the tests that use it.

use std::path::Path;

use reactor::sim::{FailureKind, Fault, FaultKind, SimConfig, World};
use reactor::{Class, Core, File};

/// The byte at every offset of a test file.
fn byte_at(offset: u64) -> u8 {
    (offset ^ (offset >> 8) ^ (offset >> 16)) as u8
}

fn pattern(len: u64) -> Vec<u8> {
    (0..len).map(byte_at).collect()
}

fn world(seed: u64, cores: usize) -> World {
    let world = World::new(seed, cores, SimConfig::default());
    world.add_file("/db/000001.sst", pattern(1 << 20));
    world.add_file("/db/CURRENT", *b"MANIFEST-000001\n");
    world
}

async fn open(core: &Core, path: &str) -> File {
    core.attach(&core.open(Path::new(path), false).await.unwrap())
}

async fn read(file: &File, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let buf = file.core().alloc(len).unwrap();
    let (n, buf) = file.read_at(offset, buf).await;
    n.map(|n| buf[..n].to_vec())
}

/// Some of everything: reads by several tasks on several cores, timers, calls.
fn busy(seed: u64) -> (u64, u64) {
    let world = world(seed, 3);
    world.add_fault(Fault::new(FaultKind::Error(libc::EIO)).chance(50_000));
    world.add_fault(Fault::new(FaultKind::Stall(0..1_000_000)).chance(50_000));
    world
        .run(|core| async move {
            let file = open(&core, "/db/000001.sst").await;
            let tasks: Vec<_> = (0..10)
                .map(|_| {
                    let (core, file) = (core.clone(), file.clone());
                    core.clone().spawn(Class::Foreground, async move {
                        for _ in 0..20 {
                            let block = core.random_u64() % 256;
                            let _ = read(&file, block * 4096, 4096).await;
                            core.sleep_ns(core.random_u64() % 100_000).await;
                            let other = core.random_u64() as usize % core.cores();
                            assert_eq!(core.call(other, |core| core.id()).await, other);
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
        })
        .unwrap();
    world.trace()
}

#[test]
fn the_same_seed_twice_gives_the_same_trace() {
    for seed in 0..5 {
        let (hash, events) = busy(seed);
        assert_eq!((hash, events), busy(seed), "seed {seed}");
        assert!(events > 600, "the run did something: {events} events");
        assert_ne!(hash, busy(seed + 1000).0, "another seed is another run");
    }
}

#[test]
fn names_behave_as_on_the_host() {
    let world = world(1, 1);
    let inside = world.clone();
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                let errno = |e: std::io::Error| e.raw_os_error();
                let missing = core.open(Path::new("/db/none"), false).await.unwrap_err();
                assert_eq!(errno(missing), Some(libc::ENOENT));
                let dir = core.open(Path::new("/db"), false).await.unwrap_err();
                assert_eq!(errno(dir), Some(libc::EISDIR));
                let names: Vec<_> = core.list(Path::new("/db")).await.unwrap();
                assert_eq!(names.len(), 2);
                assert_eq!((names[0].name.as_str(), names[0].size), ("000001.sst", 1 << 20));
                let current = Path::new("/db/CURRENT");
                assert_eq!(core.read_small(current, 100).await.unwrap(), b"MANIFEST-000001\n");
                let long = core.read_small(current, 3).await.unwrap_err();
                assert_eq!(long.kind(), std::io::ErrorKind::InvalidData);

                world.lock_exclusively(current, true);
                let refused = core.lock_shared(current).await.unwrap_err();
                assert_eq!(refused.kind(), std::io::ErrorKind::WouldBlock);
                world.lock_exclusively(current, false);
                let guard = core.lock_shared(current).await.unwrap();
                assert_eq!(world.locks_held(current), 1);
                drop(guard);
                assert_eq!(world.locks_held(current), 0);
                core.lock_shared(Path::new("/db/none")).await.unwrap();

                let file = open(&core, "/db/CURRENT").await;
                assert_eq!(world.open_files(), 1);
                // A file outlives its name.
                assert!(world.remove_file(current));
                assert_eq!(read(&file, 0, 512).await.unwrap(), b"MANIFEST-000001\n");
                drop(file);
                assert_eq!(world.open_files(), 0);
                assert!(core.open(current, false).await.is_err());
            }
        })
        .unwrap();
}

#[test]
fn direct_reads_must_be_aligned_and_end_at_the_end_of_the_file() {
    let world = World::new(1, 1, SimConfig::default());
    world.add_file("/f", pattern(5000));
    world
        .run(|core| async move {
            let file = open(&core, "/f").await;
            assert_eq!((file.size(), file.alignment()), (5000, 512));
            for (offset, len) in [(1, 512), (512, 100), (256, 256)] {
                let error = read(&file, offset, len).await.unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{offset} {len}");
            }
            let all = pattern(5000);
            assert_eq!(read(&file, 512, 1024).await.unwrap(), all[512..1536]);
            assert_eq!(read(&file, 4608, 4096).await.unwrap(), all[4608..]);
            assert_eq!(read(&file, 8192, 4096).await.unwrap(), b"");
            let buffered = core.open(Path::new("/f"), true).await.unwrap();
            let buffered = core.attach(&buffered);
            assert_eq!(buffered.alignment(), 1);
            assert_eq!(read(&buffered, 3, 7).await.unwrap(), all[3..10]);
        })
        .unwrap();
}

#[test]
fn every_kind_of_fault_strikes_as_documented_and_heals() {
    let world = world(3, 1);
    let inside = world.clone();
    let path = "/db/000001.sst";
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                let file = open(&core, path).await;
                let right = pattern(1 << 20);

                world.add_fault(Fault::new(FaultKind::Error(libc::EIO)).on(".sst").range(0..512));
                let error = read(&file, 0, 4096).await.unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EIO));
                assert_eq!(read(&file, 512, 512).await.unwrap(), right[512..1024]);
                world.heal();
                assert_eq!(read(&file, 0, 4096).await.unwrap(), right[..4096]);

                world.add_fault(Fault::new(FaultKind::Short));
                let part = read(&file, 4096, 8192).await.unwrap();
                assert!(!part.is_empty() && part.len() < 8192 && part.len().is_multiple_of(512));
                assert_eq!(part, right[4096..4096 + part.len()]);
                assert_eq!(read(&file, 0, 512).await.unwrap().len(), 512, "a block is whole");
                world.heal();

                world.add_fault(Fault::new(FaultKind::Flip).times(1));
                let wrong = read(&file, 0, 4096).await.unwrap();
                let bits: u32 = wrong.iter().zip(&right).map(|(a, b)| (a ^ b).count_ones()).sum();
                assert_eq!(bits, 1);
                assert_eq!(read(&file, 0, 4096).await.unwrap(), right[..4096]);

                world.rot(path, 5000, 3).unwrap();
                for _ in 0..2 {
                    let rotten = read(&file, 4096, 4096).await.unwrap();
                    assert_eq!(rotten[904] ^ right[5000], 8);
                }
                assert!(world.rot(path, 1 << 20, 0).is_err(), "no byte beyond the end can rot");
                world.heal();
                assert_eq!(read(&file, 4096, 4096).await.unwrap(), right[4096..8192]);

                let begin = core.now_ns();
                let stall = 1_000_000_000..2_000_000_000;
                world.add_fault(Fault::new(FaultKind::Stall(stall)).times(1));
                read(&file, 0, 512).await.unwrap();
                let took = core.now_ns() - begin;
                assert!((1_000_000_000..2_010_000_000).contains(&took), "{took}");

                world.add_fault(Fault::new(FaultKind::NameError(libc::EMFILE)).times(1));
                let error = core.open(Path::new(path), false).await.unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
                core.open(Path::new(path), false).await.unwrap();

                let counts = world.faults();
                assert_eq!((counts.errors, counts.shorts, counts.flips), (1, 1, 1));
                assert_eq!((counts.rotten, counts.stalls, counts.names), (2, 1, 1));
            }
        })
        .unwrap();
}

#[test]
fn a_stalled_read_delays_no_other() {
    let world = world(4, 1);
    world.add_fault(Fault::new(FaultKind::Stall(1_000_000_000..1_000_000_001)).times(1));
    let slowest = world
        .run(|core| async move {
            let file = open(&core, "/db/000001.sst").await;
            let (c, f) = (core.clone(), file.clone());
            let stalled = core.spawn(Class::Foreground, async move {
                let begin = c.now_ns();
                read(&f, 0, 4096).await.unwrap();
                c.now_ns() - begin
            });
            core.yield_now().await;
            let mut slowest = 0;
            for block in 0..200 {
                let begin = core.now_ns();
                read(&file, block * 4096, 4096).await.unwrap();
                slowest = slowest.max(core.now_ns() - begin);
            }
            assert!(stalled.try_take().is_none(), "still in flight");
            assert!(stalled.await >= 1_000_000_000);
            slowest
        })
        .unwrap();
    assert!(slowest[0] < 2_000_000, "{slowest:?}");
}

#[test]
fn a_stopping_core_abandons_stuck_operations_and_frees_them_when_the_device_forgot() {
    let world = world(5, 2);
    world.add_fault(Fault::new(FaultKind::Stuck).times(1));
    let pools = world
        .run(|core| async move {
            let file = open(&core, "/db/000001.sst").await;
            for _ in 0..8 {
                let mut read = file.read_at(0, core.alloc(8192).unwrap());
                read.start();
            }
            let used = core.pool().used();
            assert_eq!(used, 8 * 8192);
            core.pool().clone()
        })
        .unwrap();
    assert_eq!(world.abandoned(), 1, "seven of eight were reaped, and all of the other core");
    assert!(world.now_ns() > 5_000_000_000, "the core was patient");
    assert!(pools.iter().all(|pool| pool.used() == 0));
}

#[test]
fn healing_continues_stuck_operations() {
    let world = world(6, 1);
    world.add_fault(Fault::new(FaultKind::Stuck).times(1));
    let inside = world.clone();
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                let file = open(&core, "/db/000001.sst").await;
                let f = file.clone();
                let stuck = core.spawn(Class::Foreground, async move { read(&f, 0, 512).await });
                core.sleep_ns(60_000_000_000).await;
                assert!(stuck.try_take().is_none());
                world.heal();
                assert_eq!(stuck.await.unwrap(), pattern(512));
            }
        })
        .unwrap();
    assert_eq!(world.abandoned(), 0);
}

#[test]
fn a_deadlock_is_found_and_names_the_seed() {
    let world = world(77, 2);
    world.add_fault(Fault::new(FaultKind::Stuck).times(1));
    let failure = world
        .run(|core| async move {
            if core.id() == 1 {
                let file = open(&core, "/db/000001.sst").await;
                read(&file, 0, 512).await.unwrap();
            }
        })
        .unwrap_err();
    assert_eq!((failure.kind, failure.seed), (FailureKind::Deadlock, 77));
    let text = failure.to_string();
    assert!(text.contains("seed 77"), "{text}");
    assert!(text.contains("core 1 waits") && text.contains("1 of them stuck"), "{text}");
    // The world can run again.
    world.heal();
    world.run(|core| async move { open(&core, "/db/CURRENT").await.size() }).unwrap();
}

#[test]
fn a_run_without_end_is_stopped() {
    let config = SimConfig { turns_max: 10_000, ..SimConfig::default() };
    let endless = |core: Core| async move {
        loop {
            core.yield_now().await;
        }
    };
    let failure = World::new(1, 2, config).run::<_, _, ()>(endless).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Turns);
    let config = SimConfig { time_max_ns: 1_000_000_000, ..SimConfig::default() };
    let sleepy = |core: Core| async move { core.sleep_ns(2_000_000_000).await };
    let failure = World::new(1, 1, config).run(sleepy).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Time);
}

#[test]
fn a_directory_of_the_host_can_be_imported() {
    let world = World::new(1, 1, SimConfig::default());
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert!(world.import(here, "/crate").unwrap() > 10);
    let paths = world.paths();
    assert!(paths.contains(&"/crate/src/lib.rs".into()));
    assert!(world.bytes("/crate/Cargo.toml").unwrap().starts_with(b"[package]"));
}
