//! Writing in a simulated world: the faults that its disk shows to writers, and those that it never
//! shows.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use reactor::sim::{Access, Crash, FailureKind, Fault, FaultCounts, FaultKind, SimConfig, World};
use reactor::{Buf, Class, Core, File, Mode, Opening};

const SEEDS: u64 = 300;

fn world(seed: u64, cores: usize) -> World {
    let world = World::new(seed, cores, SimConfig::default());
    world.add_dir("/db");
    world
}

async fn make(core: &Core, path: &str, mode: Mode) -> File {
    let opening = Opening::NewOrEmptied;
    core.attach(&core.open_for_writing(Path::new(path), opening, mode).await.unwrap())
}

fn filled(core: &Core, len: usize, byte: u8) -> Buf {
    let mut buf = core.alloc(len).unwrap();
    buf.fill(byte);
    buf
}

async fn write(file: &File, offset: u64, len: usize, byte: u8) -> io::Result<()> {
    file.write_at(offset, filled(file.core(), len, byte), len).await.0
}

async fn read(file: &File, offset: u64, len: usize) -> Vec<u8> {
    let (n, buf) = file.read_at(offset, file.core().alloc(len).unwrap()).await;
    buf[..n.unwrap()].to_vec()
}

/// Runs a process on one core that ends by crashing.
fn crashes<Fut: Future<Output = ()> + 'static>(world: &World, main: impl Fn(Core) -> Fut) -> Crash {
    match world.run(main).unwrap_err().kind {
        FailureKind::Crash(crash) => crash,
        kind => panic!("{kind:?}"),
    }
}

/// Runs a process on one core, and cuts the power when it is done.
fn cut_after<Fut: Future<Output = ()>>(
    world: &World,
    main: impl Fn(Core, World) -> Fut + Clone + 'static,
) {
    let inside = world.clone();
    crashes(world, move |core| {
        let (main, world) = (main.clone(), inside.clone());
        async move {
            main(core.clone(), world.clone()).await;
            world.crash(Crash::PowerCut);
            for_ever(&core).await;
        }
    });
}

/// Waits for ever.
async fn for_ever(core: &Core) {
    core.sleep_ns(u64::MAX).await;
}

fn errno(error: &io::Error) -> Option<i32> {
    error.raw_os_error()
}

fn sum(into: &mut FaultCounts, of: FaultCounts) {
    for (into, of) in [
        (&mut into.kept, of.kept),
        (&mut into.lost, of.lost),
        (&mut into.torn, of.torn),
        (&mut into.names_kept, of.names_kept),
        (&mut into.names_lost, of.names_lost),
        (&mut into.cut_short, of.cut_short),
        (&mut into.dropped, of.dropped),
    ] {
        *into += of;
    }
}

#[test]
fn every_core_reads_written_bytes() {
    let world = world(1, 2);
    let file = Rc::new(RefCell::new(None));
    world
        .run(|core| {
            let shared = file.clone();
            async move {
                if core.id() == 0 {
                    let path = Path::new("/db/f");
                    let file =
                        core.open_for_writing(path, Opening::New, Mode::Direct).await.unwrap();
                    write(&core.attach(&file), 4096, 1024, 7).await.unwrap();
                    *shared.borrow_mut() = Some(file);
                    return;
                }
                let file = loop {
                    let file = shared.borrow().clone();
                    match file {
                        Some(file) => break core.attach(&file),
                        None => core.sleep_ns(10_000).await,
                    }
                };
                assert_eq!((file.size(), file.alignment()), (5120, 512));
                assert_eq!(read(&file, 3584, 1024).await, [[0; 512], [7; 512]].concat());
                assert_eq!(core.list(Path::new("/db")).await.unwrap()[0].size, 5120);
            }
        })
        .unwrap();
    assert_eq!(world.bytes("/db/f").unwrap().len(), 5120);
}

#[test]
fn names_lengths_and_locks_are_as_on_the_host() {
    let world = world(2, 1);
    world.add_file("/db/old", *b"old");
    let inside = world.clone();
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                let open = |path: &'static str, opening| {
                    let core = core.clone();
                    async move { core.open_for_writing(path.as_ref(), opening, Mode::Buffered).await }
                };
                let kind = |error: io::Error| error.kind();
                assert_eq!(kind(open("/db/f", Opening::Existing).await.unwrap_err()), io::ErrorKind::NotFound);
                assert_eq!(kind(open("/db/old", Opening::New).await.unwrap_err()), io::ErrorKind::AlreadyExists);
                assert_eq!(errno(&open("/db", Opening::NewOrEmptied).await.unwrap_err()), Some(libc::EISDIR));
                assert_eq!(kind(open("/none/f", Opening::New).await.unwrap_err()), io::ErrorKind::NotFound);
                assert_eq!(open("/db/old", Opening::Existing).await.unwrap().size(), 3);

                assert_eq!(kind(open("/db/f", Opening::Unshared).await.unwrap_err()), io::ErrorKind::NotFound);
                let alone = open("/db/old", Opening::Unshared).await.unwrap();
                assert_eq!(kind(open("/db/old", Opening::Unshared).await.unwrap_err()), io::ErrorKind::WouldBlock);
                drop(alone);
                assert_eq!(open("/db/old", Opening::Unshared).await.unwrap().size(), 3);

                let file = core.attach(&open("/db/old", Opening::NewOrEmptied).await.unwrap());
                assert_eq!((file.size(), world.bytes("/db/old").unwrap().len()), (0, 0));
                write(&file, 10, 100, 5).await.unwrap();
                file.set_len(50).await.unwrap();
                file.allocate(20).await.unwrap();
                file.allocate(80).await.unwrap();
                assert_eq!(file.size(), 80);
                let expected = [[0; 10].as_slice(), &[5; 40], &[0; 30]].concat();
                assert_eq!(read(&file, 0, 100).await, expected);

                core.rename("/db/old".as_ref(), "/db/new".as_ref()).await.unwrap();
                core.sync_dir("/db".as_ref()).await.unwrap();
                assert_eq!(world.paths(), [PathBuf::from("/db/new")]);
                core.remove("/db/new".as_ref()).await.unwrap();
                assert_eq!(kind(core.remove("/db/new".as_ref()).await.unwrap_err()), io::ErrorKind::NotFound);
                assert!(core.list("/db".as_ref()).await.unwrap().is_empty());
                assert_eq!(read(&file, 10, 4).await, [5; 4]);
                assert_eq!(kind(core.sync_dir("/none".as_ref()).await.unwrap_err()), io::ErrorKind::NotFound);

                core.create_dir("/db/deep".as_ref()).await.unwrap();
                assert!(core.list("/db/deep".as_ref()).await.unwrap().is_empty());
                assert_eq!(kind(core.create_dir("/db/deep".as_ref()).await.unwrap_err()), io::ErrorKind::AlreadyExists);
                assert_eq!(kind(core.create_dir("/none/deep".as_ref()).await.unwrap_err()), io::ErrorKind::NotFound);

                let lock = Path::new("/db/LOCK");
                let guard = core.lock_exclusive(lock).await.unwrap();
                assert_eq!(kind(core.lock_exclusive(lock).await.unwrap_err()), io::ErrorKind::WouldBlock);
                assert_eq!(kind(core.lock_shared(lock).await.unwrap_err()), io::ErrorKind::WouldBlock);
                drop(guard);
                let guard = core.lock_shared(lock).await.unwrap();
                assert_eq!(kind(core.lock_exclusive(lock).await.unwrap_err()), io::ErrorKind::WouldBlock);
                drop(guard);
                world.lock_exclusively(lock, true);
                assert_eq!(kind(core.lock_exclusive(lock).await.unwrap_err()), io::ErrorKind::WouldBlock);
                world.lock_exclusively(lock, false);

                // Opened for reading.
                let file = core.attach(&core.open(lock, true).await.unwrap());
                assert_eq!(errno(&write(&file, 0, 1, 1).await.unwrap_err()), Some(libc::EBADF));
            }
        })
        .unwrap();
    assert_eq!((world.open_files(), world.locks_held("/db/LOCK")), (0, 0));
}

#[test]
fn every_kind_of_fault_strikes_writes_and_syncs_too() {
    let world = world(3, 1);
    let inside = world.clone();
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                let file = make(&core, "/db/f", Mode::Direct).await;
                let full = Fault::new(FaultKind::Error(libc::ENOSPC)).of(Access::Write);
                world.add_fault(full.range(8192..u64::MAX));
                write(&file, 0, 8192, 1).await.unwrap();
                let error = write(&file, 4096, 8192, 2).await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::StorageFull);
                world.heal();

                // Taken in several pieces, which the writer does not notice.
                world.add_fault(Fault::new(FaultKind::Short).of(Access::Write));
                let before = core.stats().disk_writes.get();
                write(&file, 0, 65536, 3).await.unwrap();
                assert!(core.stats().disk_writes.get() > before + 1);
                assert_eq!(read(&file, 0, 65536).await, [3; 65536]);
                world.heal();

                for access in [Access::Write, Access::Sync] {
                    let begin = core.now_ns();
                    let stall = FaultKind::Stall(1_000_000_000..2_000_000_000);
                    world.add_fault(Fault::new(stall).of(access).times(1));
                    write(&file, 0, 512, 4).await.unwrap();
                    file.sync_data().await.unwrap();
                    assert!(core.now_ns() - begin >= 1_000_000_000, "{access:?}");

                    world.add_fault(Fault::new(FaultKind::Stuck).of(access).times(1));
                    let f = file.clone();
                    let stuck = core.spawn(Class::Foreground, async move {
                        write(&f, 512, 512, 5).await.unwrap();
                        f.sync_data().await.unwrap();
                    });
                    core.sleep_ns(60_000_000_000).await;
                    assert!(stuck.try_take().is_none(), "{access:?}");
                    read(&file, 0, 512).await;
                    world.heal();
                    stuck.await;
                }

                let bad = Fault::new(FaultKind::Error(libc::EIO)).of(Access::Sync).after(1);
                world.add_fault(bad.times(1));
                file.sync_data().await.unwrap();
                assert_eq!(errno(&file.sync_data().await.unwrap_err()), Some(libc::EIO));
                let poisoned = file.sync_data().await.unwrap_err();
                assert!(poisoned.to_string().contains("earlier flush"), "{poisoned}");
                assert!(write(&file, 0, 512, 6).await.is_err());

                let names = Fault::new(FaultKind::NameError(libc::EIO)).times(4);
                world.add_fault(names);
                core.sync_dir("/db".as_ref()).await.unwrap_err();
                core.rename("/db/f".as_ref(), "/db/g".as_ref()).await.unwrap_err();
                core.remove("/db/f".as_ref()).await.unwrap_err();
                file.set_len(0).await.unwrap_err();
                assert_eq!(world.bytes("/db/f").unwrap().len(), 65536);
                let counts = world.faults();
                assert_eq!((counts.write_errors, counts.sync_errors, counts.names), (1, 1, 4));
                assert_eq!((counts.stalls, counts.stuck, counts.errors), (2, 2, 0));
            }
        })
        .unwrap();
}

/// If a stopping core cancelled a write, it would leave an unreported gap.
#[test]
fn a_stopping_core_waits_for_its_writes() {
    for seed in 0..20 {
        let world = world(seed, 1);
        world
            .run(|core| async move {
                let file = make(&core, "/db/f", Mode::Direct).await;
                for n in 0..16 {
                    file.write_at(n * 4096, filled(&core, 4096, 9), 4096).start();
                }
                file.sync_data().start();
            })
            .unwrap();
        assert_eq!(world.bytes("/db/f").unwrap()[..], [9; 65536]);
        assert_eq!((world.open_files(), world.abandoned()), (0, 0));
    }
}

#[test]
fn a_full_disk_refuses_writes_until_space_is_freed() {
    let full = |error: std::io::Error| error.kind() == std::io::ErrorKind::StorageFull;
    for seed in 0..20 {
        let world = world(seed, 1);
        let inside = world.clone();
        world
            .run(move |core| {
                let world = inside.clone();
                async move {
                    let before = world.used();
                    let file = make(&core, "/db/f", Mode::Direct).await;
                    world.set_capacity(Some(world.used() + 8192));
                    file.reserve(4096).await.unwrap();
                    assert_eq!((file.size(), world.used()), (0, before + 512 + 4096));
                    let other = make(&core, "/db/g", Mode::Direct).await;
                    assert!(full(write(&other, 0, 4096, 1).await.unwrap_err()));
                    assert!(full(other.allocate(4096).await.unwrap_err()));
                    write(&file, 0, 4096, 2).await.unwrap();
                    write(&other, 0, 3584, 1).await.unwrap();
                    write(&other, 512, 512, 3).await.unwrap();
                    let path = std::path::Path::new("/db/h");
                    let made = core.open_for_writing(path, Opening::New, Mode::Direct).await;
                    assert!(full(made.err().unwrap()));
                    // Its space is freed when its last handle is closed.
                    core.remove("/db/f".as_ref()).await.unwrap();
                    assert!(full(write(&other, 3584, 512, 1).await.unwrap_err()));
                    drop(file);
                    core.sleep_ns(1_000_000).await;
                    write(&other, 3584, 4096, 1).await.unwrap();
                    other.set_len(512).await.unwrap();
                    make(&core, "/db/h", Mode::Direct).await;
                    assert_eq!(world.used(), before + 3 * 512);
                }
            })
            .unwrap();
        assert!(world.faults().full > 1);
    }
}

/// A file with synced bytes, and then every kind of change without a sync.
fn unsynced(seed: u64) -> (World, bool) {
    let world = world(seed, 1);
    let inside = world.clone();
    let crash = if seed.is_multiple_of(2) { Crash::PowerCut } else { Crash::Kill };
    let done = crashes(&world, move |core| {
        let world = inside.clone();
        async move {
            let file = make(&core, "/db/f", Mode::Direct).await;
            core.sync_dir("/db".as_ref()).await.unwrap();
            write(&file, 0, 8192, 1).await.unwrap();
            file.sync_data().await.unwrap();
            // Started before the write: does not cover it.
            let mut early = file.sync_data();
            early.start();
            write(&file, 8192, 4096, 2).await.unwrap();
            early.await.unwrap();
            write(&file, 1024, 512, 3).await.unwrap();
            make(&core, "/db/g", Mode::Buffered).await;
            make(&core, "/db/h", Mode::Buffered).await;
            world.crash(crash);
            for_ever(&core).await;
        }
    });
    assert_eq!(done, crash);
    (world, crash == Crash::Kill)
}

#[test]
fn synced_bytes_and_names_survive_a_power_cut_and_everything_a_kill() {
    let mut counts = FaultCounts::default();
    let (mut lengths, mut names, mut newer_only) = (BTreeSet::new(), BTreeSet::new(), 0);
    for seed in 0..SEEDS {
        let (world, killed) = unsynced(seed);
        let bytes = world.bytes("/db/f").expect("the name was synced");
        let third = &bytes[1024..1536];
        if killed {
            assert_eq!(bytes[8192..], [2; 4096]);
            assert_eq!((third, world.paths().len()), (&[3; 512][..], 3));
            continue;
        }
        assert!(bytes[..1024] == [1; 1024] && bytes[1536..8192].iter().all(|&b| b == 1));
        assert!(*third == [1; 512] || *third == [3; 512]);
        let tail = &bytes[8192..];
        assert!(tail.chunks(512).all(|s| s.len() == 512 && (s == [0; 512] || s == [2; 512])));
        newer_only += u32::from(third[0] == 3 && tail.is_empty());
        lengths.insert(bytes.len());
        names.insert(world.paths());
        sum(&mut counts, world.faults());
    }
    assert!(counts.kept > 50 && counts.lost > 50 && counts.torn > 10, "{counts:?}");
    assert!(counts.names_kept > 50 && counts.names_lost > 50, "{counts:?}");
    assert_eq!(names.len(), 4, "either name by itself");
    assert!(lengths.len() > 3 && newer_only > 0, "{lengths:?} {newer_only}");
}

#[test]
fn a_crash_between_two_runs_loses_unflushed_data_of_the_last_one() {
    let mut left = BTreeSet::new();
    for seed in 0..50 {
        let world = world(seed, 1);
        world
            .run(|core| async move {
                let file = make(&core, "/db/f", Mode::Direct).await;
                core.sync_dir("/db".as_ref()).await.unwrap();
                write(&file, 0, 512, 1).await.unwrap();
            })
            .unwrap();
        world.crash(Crash::Kill);
        assert_eq!(world.bytes("/db/f").unwrap()[..], [1; 512], "the page cache is the machine's");
        world.crash(Crash::PowerCut);
        left.insert(world.bytes("/db/f").unwrap().to_vec());
        let after = world.run(|core| async move {
            let file = core.attach(&core.open("/db/f".as_ref(), false).await.unwrap());
            read(&file, 0, 512).await
        });
        assert_eq!(after.unwrap(), [world.bytes("/db/f").unwrap().to_vec()]);
    }
    // Also with the length and without the bytes.
    assert!(left.contains(&vec![]) && left.contains(&vec![1; 512]), "{left:?}");
}

/// Several writes are in flight when the process is killed.
#[test]
fn a_kill_leaves_any_number_of_the_first_sectors_of_a_write_in_flight() {
    let (mut sectors, mut cut) = (BTreeSet::new(), 0);
    for seed in 0..SEEDS {
        let world = world(seed, 1);
        let inside = world.clone();
        crashes(&world, move |core| {
            let world = inside.clone();
            async move {
                let file = make(&core, "/db/f", Mode::Direct).await;
                write(&file, 0, 16384, 1).await.unwrap();
                // The kill replaces one of their completions.
                world.crash_at(Crash::Kill, 1..5);
                for n in 0..4 {
                    file.write_at(n * 4096, filled(&core, 4096, 2), 4096).start();
                }
                for_ever(&core).await;
            }
        });
        let bytes = world.bytes("/db/f").unwrap();
        for write in bytes.chunks(4096) {
            let done = write.iter().take_while(|&&b| b == 2).count();
            assert!(done.is_multiple_of(512) && write[done..].iter().all(|&b| b == 1), "{done}");
            sectors.insert(done / 512);
        }
        cut += world.faults().cut_short;
    }
    assert_eq!(sectors, (0..=8).collect());
    assert!(cut > 100, "{cut}");
}

/// A flush fails, and one after it succeeds, on the file opened again.
#[test]
fn changes_forgotten_by_a_failed_sync_are_not_covered_by_the_next() {
    let (mut saved, mut forgotten) = (0, 0);
    for seed in 0..100 {
        let world = world(seed, 1);
        cut_after(&world, |core, world| async move {
            let file = make(&core, "/db/f", Mode::Direct).await;
            core.sync_dir("/db".as_ref()).await.unwrap();
            write(&file, 0, 512, 1).await.unwrap();
            let bad = Fault::new(FaultKind::Error(libc::EIO)).of(Access::Sync).times(1);
            world.add_fault(bad);
            file.sync_data().await.unwrap_err();
            let path = Path::new("/db/f");
            let again = core.open_for_writing(path, Opening::Existing, Mode::Direct).await;
            let again = core.attach(&again.unwrap());
            assert_eq!(read(&again, 0, 512).await, [1; 512], "it is still in the page cache");
            again.sync_data().await.unwrap();
        });
        let left = world.bytes("/db/f").unwrap();
        assert!(left[..] == [1; 512] || left.is_empty());
        *if left.is_empty() { &mut forgotten } else { &mut saved } += 1;
        assert_eq!(world.faults().dropped, u64::from(left.is_empty()));
    }
    assert!(saved > 10 && forgotten > 10, "{saved} {forgotten}");
}

/// A durable write stays, one that fails is forgotten or not, and a file of which one has failed
/// takes no more.
#[test]
fn a_durable_write_survives_a_power_cut_and_its_failure_poisons_the_file() {
    let (mut saved, mut forgotten) = (0, 0);
    for seed in 0..100 {
        let world = world(seed, 1);
        cut_after(&world, |core, world| async move {
            let file = make(&core, "/db/f", Mode::Direct).await;
            file.sync_data().await.unwrap();
            core.sync_dir("/db".as_ref()).await.unwrap();
            let write =
                |offset, byte| file.write_durably_at(offset, filled(&core, 1024, byte), 1024);
            write(0, 1).await.0.unwrap();
            let bad = Fault::new(FaultKind::Error(libc::EIO)).of(Access::Sync).times(1);
            world.add_fault(bad);
            assert_eq!(errno(&write(1024, 2).await.0.unwrap_err()), Some(libc::EIO));
            let poisoned = write(1024, 3).await.0.unwrap_err();
            assert!(poisoned.to_string().contains("earlier flush"), "{poisoned}");
        });
        let left = world.bytes("/db/f").unwrap();
        assert_eq!(left[..1024], [1; 1024]);
        assert!(left[1024..].chunks(512).all(|part| part == [0; 512] || part == [2; 512]));
        *if left.contains(&2) { &mut saved } else { &mut forgotten } += 1;
    }
    assert!(saved > 10 && forgotten > 10, "{saved} {forgotten}");
}

/// Renaming before the bytes are durable is the classic mistake; the model must show it.
#[test]
fn a_rename_is_atomic_and_does_not_wait_for_the_bytes() {
    let (mut empty, mut old, mut new) = (0, 0, 0);
    for seed in 0..SEEDS {
        let world = world(seed, 1);
        world.add_file("/db/CURRENT", *b"old");
        cut_after(&world, |core, _| async move {
            let file = make(&core, "/db/draft", Mode::Buffered).await;
            write(&file, 0, 3, b'n').await.unwrap();
            core.rename("/db/draft".as_ref(), "/db/CURRENT".as_ref()).await.unwrap();
        });
        match &world.bytes("/db/CURRENT").expect("the one or the other")[..] {
            b"old" => old += 1,
            b"nnn" => new += 1,
            b"" => empty += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(empty > 10 && old > 10 && new > 10, "{empty} {old} {new}");
}

/// The result of a run: its trace, the disk after it, and its end.
type Run = ((u64, u64), Vec<(PathBuf, Vec<u8>)>, Crash);

/// A process on two cores that writes, syncs and renames, with faults, and crashes somewhere.
fn busy(seed: u64) -> Run {
    let world = world(seed, 2);
    let crash = if seed.is_multiple_of(3) { Crash::Kill } else { Crash::PowerCut };
    world.crash_at(crash, 1..300);
    for access in [Access::Write, Access::Sync] {
        world.add_fault(Fault::new(FaultKind::Error(libc::EIO)).of(access).chance(20_000));
        world.add_fault(Fault::new(FaultKind::Short).of(access).chance(50_000));
    }
    let crashed = crashes(&world, |core| async move {
        let id = core.id() as u64;
        for n in 0.. {
            let path = format!("/db/{id}-{n}");
            let file = make(&core, &path, Mode::Direct).await;
            for at in 0..4 {
                let len = 512 * (1 + core.random_u64() as usize % 20);
                let _ = write(&file, at * 4096, len, n as u8).await;
                let _ = file.sync_data().await;
            }
            core.rename(path.as_ref(), format!("/db/{id}").as_ref()).await.unwrap();
            let _ = core.sync_dir("/db".as_ref()).await;
        }
    });
    let files = world.paths().into_iter();
    let files = files.map(|path| (path.clone(), world.bytes(path).unwrap().to_vec())).collect();
    (world.trace(), files, crashed)
}

#[test]
fn the_same_seed_twice_gives_the_same_crash_and_the_same_disk() {
    let mut traces = BTreeSet::new();
    for seed in 0..20 {
        let run = busy(seed);
        assert!(run == busy(seed), "seed {seed}");
        traces.insert(run.0);
    }
    assert_eq!(traces.len(), 20, "another seed is another run");
}

#[test]
fn a_scheduled_crash_does_not_outlive_its_run() {
    let world = world(1, 1);
    world.crash_at(Crash::Kill, 1000..1001);
    let ends = |core: Core| async move { drop(make(&core, "/db/f", Mode::Direct).await) };
    world.run(ends).unwrap();
    for _ in 0..600 {
        world.run(ends).unwrap();
    }
}

#[test]
fn a_crashed_process_has_no_more_effect_and_holds_nothing() {
    let world = world(1, 2);
    let (inside, kept) = (world.clone(), Rc::new(RefCell::new(Vec::new())));
    let (files, went_on) = (kept.clone(), Rc::new(Cell::new(0)));
    let counter = went_on.clone();
    crashes(&world, move |core| {
        let (world, files, counter) = (inside.clone(), files.clone(), counter.clone());
        async move {
            let path = Path::new("/db/LOCK");
            if core.id() == 1 {
                return for_ever(&core).await;
            }
            let guard = core.lock_exclusive(path).await.unwrap();
            files.borrow_mut().push(guard);
            let file = make(&core, "/db/f", Mode::Direct).await;
            write(&file, 0, 512, 1).await.unwrap();
            world.crash(Crash::Kill);
            // It has not noticed the crash yet.
            file.write_at(0, filled(&core, 512, 2), 512).start();
            let _ = core.remove("/db/f".as_ref()).await;
            counter.set(1);
        }
    });
    assert_eq!(went_on.get(), 0, "nothing completes after the crash");
    assert_eq!(world.bytes("/db/f").unwrap()[..], [1; 512]);
    assert_eq!((world.open_files(), world.locks_held("/db/LOCK")), (0, 0));
    // A guard of the crashed process holds no lock.
    let main = |core: Core| async move {
        if core.id() == 0 {
            core.lock_exclusive("/db/LOCK".as_ref()).await.unwrap();
        }
    };
    world.run(main).unwrap();
    assert_eq!(kept.take().len(), 1);
}

/// A rename without an answer yet.
#[test]
fn an_operation_on_names_in_flight_is_done_or_not() {
    for crash in [Crash::Kill, Crash::PowerCut] {
        let (mut done, mut not) = (0, 0);
        for seed in 0..60 {
            let world = world(seed, 1);
            world.add_file("/db/a", *b"a");
            world.crash_at(crash, 1..2);
            crashes(&world, |core| async move {
                core.rename("/db/a".as_ref(), "/db/b".as_ref()).await.unwrap();
                panic!("the crash came first");
            });
            assert_eq!(world.paths().len(), 1, "never both, never none");
            *if world.bytes("/db/b").is_ok() { &mut done } else { &mut not } += 1;
        }
        assert!(done > 5 && not > 5, "{crash:?}: {done} {not}");
    }
}

/// Background writes and syncs use the same queue depth as background reads, and a foreground write
/// overtakes waiting ones.
#[test]
fn background_writes_keep_to_their_depth_and_foreground_goes_first() {
    let world = world(1, 1);
    let inside = world.clone();
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                let file = make(&core, "/db/f", Mode::Direct).await;
                let tasks: Vec<_> = (0..200)
                    .map(|n| {
                        let file = file.clone();
                        core.spawn(Class::Background, async move {
                            write(&file, n * 512, 512, 1).await.unwrap();
                            file.sync_data().await.unwrap();
                        })
                    })
                    .collect();
                let mut most = 0;
                for n in 0..20 {
                    core.sleep_ns(10_000).await;
                    most = most.max(world.at_the_device(0));
                    write(&file, n * 512, 512, 2).await.unwrap();
                    let waiting = tasks.iter().filter(|task| task.try_take().is_none()).count();
                    assert!(waiting > 0, "foreground writes wait for no background");
                }
                assert!((16..=33).contains(&most), "{most} at the device");
                for task in tasks {
                    task.cancel();
                }
            }
        })
        .unwrap();
}
