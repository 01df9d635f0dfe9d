//! The files that a directory has written, after a crash at any completion.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use fs::{Dir, FileWriter, Mode};
use reactor::Core;
use reactor::sim::{Access, Crash, FailureKind, Fault, FaultKind, SimConfig, World};

const DIR: &str = "/db";

fn world(seed: u64) -> (World, Crash) {
    let world = World::new(seed, 1, SimConfig::default());
    world.add_dir(DIR);
    let crash = if seed.is_multiple_of(3) { Crash::Kill } else { Crash::PowerCut };
    (world, crash)
}

/// Runs a process until it ends, or crashes as scheduled.
fn run<Fut: Future<Output = ()> + 'static>(world: &World, main: impl Fn(Core, Dir) -> Fut) {
    let result = world.run(|core| {
        let dir = Dir::new(&core, DIR.as_ref());
        main(core, dir)
    });
    if let Err(failure) = result {
        assert!(matches!(failure.kind, FailureKind::Crash(_)), "{failure}");
    }
}

/// `CURRENT` names the newest acknowledged manifest, or the one being written.
#[test]
fn a_small_file_is_all_old_or_all_new_and_new_once_acknowledged() {
    let mut ends = BTreeSet::new();
    for seed in 0..400 {
        let (world, crash) = world(seed);
        world.add_file("/db/CURRENT", *b"0");
        world.crash_at(crash, 1..40);
        let done = Rc::new(Cell::new(0));
        let counter = done.clone();
        run(&world, |_, dir| {
            let done = counter.clone();
            async move {
                for n in 1..=5_u64 {
                    let text = n.to_string().repeat(700 * n as usize);
                    dir.write_small_atomically("CURRENT", text.as_bytes()).await.unwrap();
                    done.set(n);
                }
            }
        });
        let text = String::from_utf8(world.bytes("/db/CURRENT").unwrap().to_vec()).unwrap();
        let found = text[..1].parse::<u64>().unwrap();
        assert_eq!(text, text[..1].repeat(700 * found.max(1) as usize)[..text.len().max(1)]);
        assert_eq!(text.len() as u64, if found == 0 { 1 } else { 700 * found });
        assert!([done.get(), done.get() + 1].contains(&found), "{found} after {}", done.get());
        ends.insert((done.get(), found));
    }
    assert!(ends.len() >= 9, "the crash came everywhere: {ends:?}");
}

#[test]
fn a_writer_keeps_synced_bytes_and_a_finished_file_is_whole() {
    let (mut cut, mut finished) = (0, 0);
    for seed in 0..200 {
        let (world, crash) = world(seed);
        world.crash_at(crash, 5..80);
        world.add_fault(Fault::new(FaultKind::Short).of(Access::Write).chance(100_000));
        let mode = if seed % 2 == 0 { Mode::Direct } else { Mode::Buffered };
        let synced: Rc<RefCell<(usize, bool)>> = Rc::default();
        let noted = synced.clone();
        let all: Rc<[u8]> = (0..1_500_000_u32).map(|n| (n ^ (n >> 9)) as u8).collect();
        let bytes = all.clone();
        run(&world, |core, dir| {
            let (noted, bytes) = (noted.clone(), bytes.clone());
            async move {
                let file = core.attach(&dir.create("f", mode).await.unwrap());
                dir.sync().await.unwrap();
                let mut writer = FileWriter::new(&file).await.unwrap();
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let n = rest.len().min(1 + core.random_u64() as usize % 100_000);
                    writer.append(&rest[..n]).await.unwrap();
                    rest = &rest[n..];
                    if core.random_u64().is_multiple_of(3) {
                        writer.sync().await.unwrap();
                        noted.borrow_mut().0 = bytes.len() - rest.len();
                    }
                }
                writer.finish().await.unwrap();
                *noted.borrow_mut() = (bytes.len(), true);
            }
        });
        let (len, whole) = *synced.borrow();
        let Ok(left) = world.bytes("/db/f") else {
            assert_eq!(len, 0, "the file's name was durable before its first byte");
            continue;
        };
        assert!(left.len() >= len && left[..len] == all[..len], "seed {seed}: {len} were synced");
        *if whole { &mut finished } else { &mut cut } += 1;
        assert!(!whole || left[..] == all[..], "and nothing after them");
    }
    assert!(cut > 20 && finished > 20, "{cut} {finished}");
}

/// The disk is full for a while, or a flush fails: errors, and no acknowledgement.
#[test]
fn a_writer_reports_a_failing_disk_and_stays_broken() {
    for kind in [libc_errno::ENOSPC, libc_errno::EIO] {
        for access in [Access::Write, Access::Sync] {
            let (world, _) = world(1);
            let fault = Fault::new(FaultKind::Error(kind)).of(access);
            world.add_fault(fault.after(1).times(1));
            run(&world, |core, dir| async move {
                let file = core.attach(&dir.create("f", Mode::Buffered).await.unwrap());
                let mut writer = FileWriter::new(&file).await.unwrap();
                writer.append(b"first").await.unwrap();
                writer.sync().await.unwrap();
                writer.append(b"second").await.unwrap();
                let error = writer.sync().await.unwrap_err();
                assert_eq!(error.raw_os_error(), Some(kind));
                assert!(writer.append(b"third").await.is_err());
                assert!(writer.finish().await.is_err());
            });
        }
    }
}

/// Error numbers of Linux.
mod libc_errno {
    pub const EIO: i32 = 5;
    pub const ENOSPC: i32 = 28;
}
