//! Queues of operations on files: one suite for every driver of the host, and tests in a simulated
//! world; see `drivers`.
#![expect(clippy::disallowed_methods, reason = "the outside of the reactor: files of the host")]

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::every_driver::{available, config};
use reactor::sim::{Access, Crash, FailureKind, Fault, FaultKind, SimConfig, World};
use reactor::{
    Core, DriverKind, File, FileDone, FileIo, FileQueue, ImageOpening, Mode, Opening, PollMode,
    Poller, RuntimeConfig, run,
};

/// Pages that no reference points to.
struct Memory(*mut u8, usize);

impl Memory {
    fn new(len: usize) -> Rc<Memory> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Rc::new(Memory(base.cast(), len))
    }

    fn piece(&self, at: usize, len: usize) -> libc::iovec {
        assert!(at + len <= self.1);
        libc::iovec { iov_base: self.0.wrapping_add(at).cast(), iov_len: len }
    }

    fn fill(&self, at: usize, len: usize, byte: u8) {
        let piece = self.piece(at, len);
        // SAFETY: the range lies in the mapping.
        unsafe { piece.iov_base.cast::<u8>().write_bytes(byte, len) };
    }

    fn get(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let from = self.piece(at, len).iov_base.cast();
        // SAFETY: the range lies in the mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
        bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`.
        unsafe { libc::munmap(self.0.cast(), self.1) };
    }
}

/// A queue and its memory.
struct Work {
    core: Core,
    queue: FileQueue,
    memory: Rc<Memory>,
}

impl Work {
    fn new(core: &Core, file: &File, depth: usize, threads: bool) -> Work {
        let memory = Memory::new(4 << 20);
        let mut queue = file.queue(depth, threads);
        let keep: Rc<dyn Any> = memory.clone();
        queue.hold(Some(keep));
        Work { core: core.clone(), queue, memory }
    }

    fn submit(&mut self, io: FileIo, pieces: &[libc::iovec], tag: u64) -> bool {
        // SAFETY: the pieces lie in the memory that the queue holds.
        unsafe { self.queue.submit(io, pieces, tag, tag as u32 + 1) }.is_ok()
    }

    /// Waits for `count` completions, and returns their errors by tag.
    async fn take(&mut self, n: usize) -> BTreeMap<u64, i32> {
        let mut done = BTreeMap::new();
        while done.len() < n {
            if self.queue.ready() == 0 {
                self.core.sleep_ns(20_000).await;
            }
            self.queue.take(|FileDone { tag, context, errno }| {
                assert_eq!(context, tag as u32 + 1);
                assert!(done.insert(tag, errno).is_none());
            });
        }
        done
    }

    async fn one(&mut self, io: FileIo, pieces: &[libc::iovec]) -> i32 {
        assert!(self.submit(io, pieces, 0));
        self.take(1).await[&0]
    }
}

fn scratch(name: &str, kind: DriverKind) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("queue-{name}-{kind:?}"))
}

async fn make(core: &Core, path: &Path, mode: Mode, len: u64) -> File {
    let shared = core.open_for_writing(path, Opening::NewOrEmptied, mode).await.unwrap();
    let file = core.attach(&shared);
    file.set_len(len).await.unwrap();
    file
}

const MODES: [Mode; 2] = [Mode::Direct, Mode::Buffered];
const LEN: u64 = 1 << 20;

on_every_driver! {
    fn pieces_are_written_and_read_back_in_any_shape(kind: DriverKind) {
        let path = scratch("shapes", kind);
        run(&config(kind), move |core| {
            let path = path.clone();
            async move {
                for (mode, threads) in MODES.into_iter().flat_map(|m| [(m, false), (m, true)]) {
                    let file = make(&core, &path, mode, LEN).await;
                    let mut work = Work::new(&core, &file, 64, threads);
                    for n in 0..60 {
                        let memory = work.memory.clone();
                        for piece in 0..3 {
                            memory.fill(n * 16384 + piece * 4096, 2048, (n * 3 + piece) as u8);
                        }
                        let pieces = [0, 2, 1].map(|p| memory.piece(n * 16384 + p * 4096, 2048));
                        let io = FileIo::Write { offset: n as u64 * 6144 };
                        assert!(work.submit(io, &pieces, n as u64));
                    }
                    assert!(work.take(60).await.values().all(|&errno| errno == 0));
                    assert_eq!(work.one(FileIo::SyncData, &[]).await, 0);
                    let whole = [work.memory.piece(1 << 20, 60 * 6144)];
                    assert_eq!(work.one(FileIo::Read { offset: 0 }, &whole).await, 0);
                    let bytes = work.memory.get(1 << 20, 60 * 6144);
                    assert_eq!(bytes, std::fs::read(&path).unwrap()[..bytes.len()]);
                    for (at, part) in bytes.chunks_exact(2048).enumerate() {
                        let expected = at / 3 * 3 + [0, 2, 1][at % 3];
                        assert!(part.iter().all(|&byte| byte == expected as u8), "part {at}");
                    }
                    assert_eq!(core.operations_in_flight(), 0);
                }
            }
        }).unwrap();
    }

    fn holes_and_zeroes_are_where_they_were_requested(kind: DriverKind) {
        let path = scratch("holes", kind);
        run(&config(kind), move |core| {
            let path = path.clone();
            async move {
                for mode in MODES {
                    let file = make(&core, &path, mode, LEN).await;
                    let mut work = Work::new(&core, &file, 4, false);
                    work.memory.fill(0, LEN as usize, 0xAA);
                    let whole = [work.memory.piece(0, LEN as usize)];
                    let io = FileIo::Write { offset: 0 };
                    assert_eq!(work.one(io, &whole).await, 0);
                    let hole = FileIo::PunchHole { offset: 8192, len: 4096 };
                    let zero = FileIo::ZeroRange { offset: 65536, len: 512 };
                    let behind = FileIo::ZeroRange { offset: LEN - 4096, len: 8192 };
                    for io in [hole, zero, behind] {
                        assert_eq!(work.one(io, &[]).await, 0);
                    }
                    assert_eq!(work.one(FileIo::Read { offset: 0 }, &whole).await, 0);
                    let bytes = work.memory.get(0, LEN as usize);
                    for (at, &byte) in bytes.iter().enumerate() {
                        let zero = (8192..12288).contains(&at)
                            || (65536..66048).contains(&at)
                            || at >= LEN as usize - 4096;
                        assert_eq!(byte, if zero { 0 } else { 0xAA }, "byte {at}");
                    }
                    assert_eq!(std::fs::metadata(&path).unwrap().len(), LEN, "it does not grow");
                }
            }
        }).unwrap();
    }

    fn operations_that_the_kernel_would_refuse_are_errors(kind: DriverKind) {
        let path = scratch("refused", kind);
        run(&config(kind), move |core| {
            let path = path.clone();
            async move {
                let file = make(&core, &path, Mode::Direct, LEN).await;
                assert_eq!((file.alignment(), core.operations_in_flight()), (512, 0));
                let mut work = Work::new(&core, &file, 2, false);
                let memory = work.memory.clone();
                let read = |offset| FileIo::Read { offset };
                for (io, pieces, errno) in [
                    (read(100), vec![memory.piece(0, 512)], libc::EINVAL),
                    (read(0), vec![memory.piece(0, 100)], libc::EINVAL),
                    (read(0), vec![memory.piece(1, 512)], libc::EINVAL),
                    (read(0), vec![memory.piece(0, 100), memory.piece(512, 412)], libc::EINVAL),
                    (read(u64::MAX - 511), vec![memory.piece(0, 512)], libc::EINVAL),
                    (read(0), vec![memory.piece(0, 512); 1025], libc::EINVAL),
                    (read(LEN), vec![memory.piece(0, 512)], libc::EIO),
                    (read(LEN - 512), vec![memory.piece(0, 1024)], libc::EIO),
                    (read(0), vec![], 0),
                ] {
                    assert_eq!(work.one(io, &pieces).await, errno, "{io:?} {}", pieces.len());
                }
                let one = [memory.piece(0, 512)];
                assert!(work.submit(read(0), &one, 1) && work.submit(read(0), &one, 2));
                assert!(!work.submit(read(0), &one, 3), "it is full");
                assert_eq!(work.take(2).await.len(), 2);
                assert!(work.submit(read(0), &one, 4));
                assert_eq!(work.take(1).await[&4], 0);
            }
        }).unwrap();
    }

    /// The kernel continues the operation, so the memory must stay.
    fn a_dropped_queue_holds_memory_and_file_until_its_operations_are_done(kind: DriverKind) {
        let path = scratch("dropped", kind);
        run(&config(kind), move |core| {
            let path = path.clone();
            async move {
                let file = make(&core, &path, Mode::Direct, LEN).await;
                let mut work = Work::new(&core, &file, 64, false);
                let alive = Rc::downgrade(&work.memory);
                for n in 0..64 {
                    let pieces = [work.memory.piece(n as usize * 16384, 16384)];
                    let offset = n * 16384;
                    assert!(work.submit(FileIo::Write { offset }, &pieces, n));
                }
                drop((work, file));
                assert_eq!(core.operations_in_flight() > 0, alive.strong_count() > 0);
                while core.operations_in_flight() > 0 {
                    assert!(alive.strong_count() > 0);
                    core.sleep_ns(10_000).await;
                }
                assert_eq!(alive.strong_count(), 0);
            }
        }).unwrap();
    }

    /// A core stops with operations in flight on the memory.
    fn a_core_that_stops_waits_for_its_queues(kind: DriverKind) {
        let path = scratch("stops", kind);
        run(&config(kind), move |core| {
            let path = path.clone();
            async move {
                let file = make(&core, &path, Mode::Direct, LEN).await;
                for threads in [false, true] {
                    let mut work = Work::new(&core, &file, 64, threads);
                    work.memory.fill(0, LEN as usize, 0x77);
                    for n in 0..64 {
                        let pieces = [work.memory.piece(n as usize * 16384, 16384)];
                        let offset = n * 16384;
                        assert!(work.submit(FileIo::Write { offset }, &pieces, n));
                    }
                }
                assert!(core.operations_in_flight() > 0);
            }
        }).unwrap();
        let bytes = std::fs::read(scratch("stops", kind)).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0x77), "a write is not cancelled");
    }

    /// The poller reports no work before it is run.
    fn a_completion_makes_a_sleeping_core_run_its_pollers(kind: DriverKind) {
        struct Looks(Rc<RefCell<Work>>, Rc<Cell<u32>>);
        impl Poller for Looks {
            fn poll(&mut self) -> bool {
                let mut work = self.0.borrow_mut();
                let before = self.1.get();
                work.queue.take(|done| {
                    assert_eq!(done.errno, 0);
                    self.1.set(self.1.get() + 1);
                });
                let more = self.1.get() > before && self.1.get() < 50;
                if more {
                    let pieces = [work.memory.piece(0, 4096)];
                    assert!(work.submit(FileIo::Read { offset: 0 }, &pieces, 7));
                }
                more
            }
            fn pure_check(&mut self) -> bool {
                false
            }
            fn arm(&mut self) -> bool {
                true
            }
            fn disarm(&mut self) {}
        }
        for poll in [PollMode::Never, PollMode::Adaptive, PollMode::Always] {
            let path = scratch("sleeps", kind);
            let config = RuntimeConfig { poll, ..config(kind) };
            run(&config, move |core| {
                let path = path.clone();
                async move {
                    let file = make(&core, &path, Mode::Direct, LEN).await;
                    let mut work = Work::new(&core, &file, 64, false);
                    let pieces = [work.memory.piece(0, 4096)];
                    // Long enough for the back-off to grow.
                    core.sleep_ns(2_000_000).await;
                    assert!(work.submit(FileIo::Read { offset: 0 }, &pieces, 7));
                    let (work, count) = (Rc::new(RefCell::new(work)), Rc::new(Cell::new(0)));
                    let slot = core.add_poller(Looks(work, count.clone()));
                    while count.get() < 50 {
                        core.sleep_ns(5_000_000).await;
                    }
                    drop(slot);
                }
            }).unwrap();
        }
    }

    fn an_image_is_locked_measured_and_described(kind: DriverKind) {
        let path = scratch("image", kind);
        run(&config(kind), move |core| {
            let path = path.clone();
            async move {
                drop(make(&core, &path, Mode::Buffered, LEN).await);
                let how = ImageOpening { read_only: false, mode: Mode::Direct, lock: true };
                let image = core.open_image(&path, how).await.unwrap();
                assert_eq!((image.file.size(), image.file.alignment()), (LEN, 512));
                assert_eq!(image.info.block_size, 512);
                assert!(!image.info.block_device && image.info.punch_hole);
                let reading = ImageOpening { read_only: true, ..how };
                for how in [how, reading] {
                    let error = core.open_image(&path, how).await.unwrap_err();
                    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                }
                let unlocked = ImageOpening { lock: false, ..how };
                let other = core.open_image(&path, unlocked).await.unwrap();
                core.attach(&other.file).set_len(2 * LEN).await.unwrap();
                assert_eq!(core.measure(&image.file).await.unwrap(), 2 * LEN);
                assert_eq!(image.file.size(), 2 * LEN);
                for path in ["/", "/dev/null"] {
                    let error = core.open_image(path.as_ref(), how).await.unwrap_err();
                    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{path}");
                }
            }
        }).unwrap();
    }
}

fn world(seed: u64) -> World {
    let world = World::new(seed, 1, SimConfig::default());
    world.add_file("/disk", vec![0xEE; LEN as usize]);
    world
}

async fn open(core: &Core) -> File {
    let how = ImageOpening { read_only: false, mode: Mode::Direct, lock: true };
    core.attach(&core.open_image(Path::new("/disk"), how).await.unwrap().file)
}

#[test]
fn a_simulated_transfer_that_ends_early_is_continued() {
    for seed in 0..50 {
        let world = world(seed);
        world.add_fault(Fault::new(FaultKind::Short).chance(500_000));
        world.add_fault(Fault::new(FaultKind::Short).of(Access::Write).chance(500_000));
        world
            .run(|core| async move {
                let file = open(&core).await;
                let mut work = Work::new(&core, &file, 8, false);
                for piece in 0..4 {
                    work.memory.fill(piece * 8192, 2048, piece as u8);
                }
                let pieces: Vec<_> = (0..4).map(|p| work.memory.piece(p * 8192, 2048)).collect();
                let io = FileIo::Write { offset: 4096 };
                assert_eq!(work.one(io, &pieces).await, 0);
                let parts = [(65536, 512), (70000 / 512 * 512, 4096), (131072, 3584)];
                let back: Vec<_> =
                    parts.iter().map(|&(at, len)| work.memory.piece(at, len)).collect();
                assert_eq!(work.one(FileIo::Read { offset: 4096 }, &back).await, 0);
                let found: Vec<u8> =
                    parts.iter().flat_map(|&(at, len)| work.memory.get(at, len)).collect();
                let expected: Vec<u8> = (0..4).flat_map(|byte| [byte; 2048]).collect();
                assert_eq!(found, expected);
            })
            .unwrap();
    }
}

/// Flushed writes survive a power cut; later ones may not.
#[test]
fn flushed_writes_survive_a_power_cut_and_others_need_not() {
    let mut lost = 0;
    for seed in 0..200 {
        let world = world(seed);
        let failure = world
            .run({
                let world = world.clone();
                move |core| {
                    let world = world.clone();
                    async move {
                        let file = open(&core).await;
                        let mut work = Work::new(&core, &file, 8, false);
                        for byte in 1..=3 {
                            work.memory.fill(0, 8192, byte);
                            let pieces = [work.memory.piece(0, 8192)];
                            let offset = if byte == 3 { 65536 } else { u64::from(byte) * 4096 };
                            assert_eq!(work.one(FileIo::Write { offset }, &pieces).await, 0);
                            if byte == 2 {
                                assert_eq!(work.one(FileIo::SyncData, &[]).await, 0);
                            }
                        }
                        world.crash(Crash::PowerCut);
                        core.sleep_ns(u64::MAX).await;
                    }
                }
            })
            .unwrap_err();
        assert!(matches!(failure.kind, FailureKind::Crash(Crash::PowerCut)));
        let bytes = world.bytes("/disk").unwrap();
        assert!(bytes[8192..16384].iter().all(|&byte| byte == 2), "seed {seed}");
        assert!(bytes[4096..8192].iter().all(|&byte| byte == 1));
        lost += u32::from(bytes[65536] != 3);
    }
    assert!((20..180).contains(&lost), "{lost} of 200");
}

#[test]
fn a_failed_sync_poisons_the_file_and_a_failed_write_or_hole_does_not() {
    let world = world(3);
    let faults = world.clone();
    world
        .run(move |core| {
            let world = faults.clone();
            async move {
                let file = open(&core).await;
                let mut work = Work::new(&core, &file, 8, false);
                let pieces = [work.memory.piece(0, 4096)];
                let write = FileIo::Write { offset: 0 };
                let hole = FileIo::PunchHole { offset: 0, len: 4096 };
                let zero = FileIo::ZeroRange { offset: 4096, len: 4096 };
                world.add_fault(Fault::new(FaultKind::Error(28)).of(Access::Write).times(3));
                for io in [write, hole, zero] {
                    assert_eq!(work.one(io, &pieces).await, 28);
                }
                for io in [write, hole, zero, FileIo::SyncData] {
                    assert_eq!(work.one(io, &pieces).await, 0);
                }
                world.add_fault(Fault::new(FaultKind::Error(5)).of(Access::Sync).times(1));
                assert_eq!(work.one(FileIo::SyncData, &[]).await, 5);
                for io in [FileIo::SyncData, write, hole] {
                    assert_eq!(work.one(io, &pieces).await, libc::EIO);
                }
                assert_eq!(work.one(FileIo::Read { offset: 0 }, &pieces).await, 0);
            }
        })
        .unwrap();
}

/// Which writes the failed one has lost is unknown, and the other does not report it.
#[test]
fn a_sync_that_ends_after_a_failed_one_fails() {
    let world = world(3);
    let faults = world.clone();
    world
        .run(move |core| {
            let world = faults.clone();
            async move {
                let file = open(&core).await;
                let mut work = Work::new(&core, &file, 8, false);
                let slow = Fault::new(FaultKind::Stall(10_000_000..11_000_000)).of(Access::Sync);
                world.add_fault(slow.times(1));
                let bad = Fault::new(FaultKind::Error(28)).of(Access::Sync);
                world.add_fault(bad.after(1).times(1));
                assert!(work.submit(FileIo::SyncData, &[], 0));
                assert!(work.submit(FileIo::SyncData, &[], 1));
                assert_eq!(work.take(1).await, BTreeMap::from([(1, 28)]));
                assert_eq!(work.take(1).await, BTreeMap::from([(0, libc::EIO)]));
            }
        })
        .unwrap();
}

/// A poller that always has work, and notes when it runs.
struct Busy(Core, Rc<RefCell<Vec<u64>>>);

impl Poller for Busy {
    fn poll(&mut self) -> bool {
        self.1.borrow_mut().push(self.0.now_ns());
        true
    }
    fn pure_check(&mut self) -> bool {
        true
    }
    fn arm(&mut self) -> bool {
        false
    }
    fn disarm(&mut self) {}
}

/// A core's pollers leave it to other work, but not for ever, and run as before afterwards.
#[test]
fn pollers_run_seldom_for_a_while() {
    let polls = world(1).run(|core| async move {
        let polls = Rc::new(RefCell::new(Vec::new()));
        let slot = core.add_poller(Busy(core.clone(), polls.clone()));
        core.sleep_ns(1_000_000).await;
        let before = polls.take().len();
        core.poll_seldom(500_000, u64::MAX);
        for _ in 0..200 {
            // What is due waits, too.
            core.turn_at(core.now_ns());
            core.sleep_ns(50_000).await;
        }
        let meanwhile = polls.take();
        core.poll_seldom(500_000, core.now_ns());
        core.sleep_ns(1_000_000).await;
        drop(slot);
        (before, meanwhile, polls.take().len())
    });
    let (before, meanwhile, after) = polls.unwrap().remove(0);
    let waits: Vec<_> = meanwhile.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(
        waits.len() >= 10 && waits.iter().all(|ns| (500_000..700_000).contains(ns)),
        "{waits:?}"
    );
    assert!(before > 100 && after > 100, "{before} and {after}");
}

/// A turn is taken at the requested time, although nothing else happens.
#[test]
fn a_core_takes_a_turn_when_a_poller_asked_for_it() {
    struct Asks(Core, Rc<Cell<u32>>, Cell<u64>);
    impl Poller for Asks {
        fn poll(&mut self) -> bool {
            if self.0.now_ns() >= self.2.get() {
                self.1.set(self.1.get() + 1);
                self.2.set(self.0.now_ns() + 300_000);
            }
            self.0.turn_at(self.2.get());
            false
        }
        fn pure_check(&mut self) -> bool {
            false
        }
        fn arm(&mut self) -> bool {
            true
        }
        fn disarm(&mut self) {}
    }
    let turns = world(1).run(|core| async move {
        let count = Rc::new(Cell::new(0));
        let slot = core.add_poller(Asks(core.clone(), count.clone(), Cell::new(0)));
        core.sleep_ns(60_000_000).await;
        drop(slot);
        count.get()
    });
    let turns = turns.unwrap()[0];
    assert!((150..=200).contains(&turns), "{turns} turns");
}
