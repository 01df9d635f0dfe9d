//! Two cores that read the same database write no cache line in common.
//!
//! The processor itself checks this, with memory protection keys. Every thread allocates from an
//! arena of its own. Before a window is measured, all writable memory of the process is tagged: the
//! arenas of the two cores with a key each, the rest (memory of the threads that opened the
//! database and started the runtime, and the statics of this program and its libraries) with a
//! third. Inside the window a core's thread may write only memory with its own tag. Any other write
//! traps: its line is noted, the one instruction runs, and the right is revoked again. So each
//! write to memory that is not the thread's own is known, and the cores write no line in common if
//!
//! - no line is in both threads' notes, and
//! - neither thread's notes have a line in the other's arena, where the owner's writes are free.
//!
//! Two lines remain for each core, which the thread that started the runtime allocated: its sleep
//! flag, which it sets before it waits for the device and clears afterwards, and which others only
//! read until they have a message for it; and its end of the ring from the other core, where it
//! stores its position in every turn.
//!
//! A last window makes three forbidden writes, and each must be found.
//!
//! Not tagged are the two threads' stacks, into which the kernel writes with a signal handler's
//! few rights, the rings of io_uring, and memory that is mapped later: each belongs to one thread
//! only. Of a store that straddles two lines only the first is noted. On a machine without
//! protection keys or io_uring, or with one processor, nothing is proven, and the test says so.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::alloc::{GlobalAlloc, Layout};
use std::arch::{asm, naked_asm};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, LazyLock};

use lsm::{Db, IterOptions, OpenOptions, Reader};
use reactor::{Class, Core, DriverKind, RuntimeConfig};

const KEYS: u64 = 20_000;
/// Bytes: two lines of 64, because the prefetcher fetches them in pairs.
const LINE: usize = 128;

// ---- Memory: an arena for each thread.

const ARENAS: usize = 128;
const ARENA_BYTES: usize = 256 << 20;

struct Memory {
    /// Address of the first arena, a multiple of `ARENA_BYTES`; 0 if there is no memory.
    base: usize,
    /// The keys for memory that no core may write, for core 0 and for core 1; or why there are
    /// none.
    keys: Result<[usize; 3], i32>,
}

/// Created with the process's first allocation. A thread inherits the rights of the one that starts
/// it, so all threads may write everywhere until they drop that right.
static MEMORY: LazyLock<Memory> = LazyLock::new(|| {
    let len = (ARENAS + 1) * ARENA_BYTES;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
    let failed = start == libc::MAP_FAILED;
    let mut keys = Ok([0; 3]);
    for at in 0..3 {
        // SAFETY: takes two numbers.
        let key = unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) };
        match (&mut keys, usize::try_from(key)) {
            (Ok(keys), Ok(key)) => keys[at] = key,
            // SAFETY: the address of this thread's errno, always valid.
            _ => keys = Err(unsafe { *libc::__errno_location() }),
        }
    }
    let base = if failed { 0 } else { (start as usize).next_multiple_of(ARENA_BYTES) };
    Memory { base, keys }
});

static ARENAS_TAKEN: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// First free byte of this thread's arena; 0 before its first allocation.
    static NEXT: Cell<usize> = const { Cell::new(0) };
    /// The core of this thread. Other threads have no windows.
    static CORE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Hands out each byte once.
struct Arenas;

// SAFETY: every call returns memory of the mapping, aligned and long enough, that no other call
// returns: arenas do not overlap, each belongs to one thread, and `NEXT` only grows. It touches
// const-initialised thread-locals that need no allocation and no destructor.
unsafe impl GlobalAlloc for Arenas {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if NEXT.get() == 0 {
            let arena = ARENAS_TAKEN.fetch_add(1, Relaxed);
            if MEMORY.base == 0 || arena >= ARENAS {
                return std::ptr::null_mut();
            }
            NEXT.set(MEMORY.base + arena * ARENA_BYTES);
        }
        let at = NEXT.get().next_multiple_of(layout.align());
        if arena_of(NEXT.get()) != arena_of(at + layout.size()) {
            return std::ptr::null_mut();
        }
        NEXT.set(at + layout.size());
        at as *mut u8
    }
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static ALLOCATOR: Arenas = Arenas;

/// The start of the arena of an address.
fn arena_of(address: usize) -> usize {
    address & !(ARENA_BYTES - 1)
}

// ---- The watch.

/// The memory of a core: its arena, and the bounds of its stack.
static PLACES: [[AtomicUsize; 3]; 2] = [const { [const { AtomicUsize::new(0) }; 3] }; 2];

/// A line that was written, how often, and an instruction that wrote it, for `addr2line`.
type Note = [AtomicUsize; 3];
const NOTES: usize = 256;
/// The notes by core. The line of an empty note is 0.
static WRITTEN: [[Note; NOTES]; 2] =
    [const { [const { [const { AtomicUsize::new(0) }; 3] }; NOTES] }; 2];
/// Writes that found no room for their note.
static LOST: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    /// The address of this program; the linker defines it.
    static __executable_start: u8;
}

/// The offset of the rights in the registers that the kernel saves for a signal handler.
static SAVED_RIGHTS: LazyLock<usize> =
    LazyLock::new(|| std::arch::x86_64::__cpuid_count(0xD, 9).ebx as usize);

/// All memory may be read. The keys of memory that is not the core's own forbid writing.
fn rights(core: usize) -> u32 {
    let keys = MEMORY.keys.expect("asked before any window");
    (2 << (2 * keys[0])) | (2 << (2 * keys[2 - core]))
}

fn set_rights(rights: u32) {
    // SAFETY: the machine has protection keys, because the rights of one are set. Rust code that
    // the new rights stop is continued by `on_signal`.
    unsafe { asm!("wrpkru", in("eax") rights, in("ecx") 0, in("edx") 0) }
}

/// Signal handlers start with the right to untagged memory only. So this first takes all rights,
/// before it reads anything.
#[unsafe(naked)]
extern "C" fn enter_handler(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    naked_asm!(
        "mov r8, rdx",
        "xor eax, eax",
        "xor ecx, ecx",
        "xor edx, edx",
        "wrpkru",
        "mov rdx, r8",
        "jmp {}",
        sym on_signal,
    )
}

/// After a refused write: notes it, and lets one instruction run with all rights. After that
/// instruction: revokes the rights again.
extern "C" fn on_signal(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    const SEGV_PKUERR: i32 = 4;
    const TRAP_FLAG: i64 = 0x100;
    // SAFETY: the kernel passes a live `siginfo_t`, and a live context that is ours to change.
    let (info, context) = unsafe { (&*info, &mut *context.cast::<libc::ucontext_t>()) };
    let core = match CORE.get() {
        Some(core) if signal == libc::SIGTRAP || info.si_code == SEGV_PKUERR => core,
        _ => {
            // A real crash: it happens again, and then ends the process.
            // SAFETY: sets the default action.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
            return;
        }
    };
    let registers = &mut context.uc_mcontext.gregs;
    let now = if signal == libc::SIGTRAP {
        registers[libc::REG_EFL as usize] &= !TRAP_FLAG;
        rights(core)
    } else {
        registers[libc::REG_EFL as usize] |= TRAP_FLAG;
        // SAFETY: this signal has an address.
        let line = unsafe { info.si_addr() } as usize / LINE;
        let image = &raw const __executable_start as usize;
        note(core, line, (registers[libc::REG_RIP as usize] as usize).wrapping_sub(image));
        0
    };
    let saved = context.uc_mcontext.fpregs.cast::<u8>();
    // SAFETY: the kernel saves the registers in the standard format of XSAVE: 512 bytes, the bits
    // that say which parts are present, and the rights at the offset that the processor reports.
    unsafe {
        *saved.add(512).cast::<u64>() |= 1 << 9;
        saved.add(*SAVED_RIGHTS).cast::<u32>().write_unaligned(now);
    }
}

/// Runs in a signal handler, on the core's own thread, which alone writes that core's notes.
fn note(core: usize, line: usize, code: usize) {
    let free_or_same = |note: &&Note| [0, line].contains(&note[0].load(Relaxed));
    match WRITTEN[core].iter().find(free_or_same) {
        Some(note) => {
            note[0].store(line, Relaxed);
            note[1].fetch_add(1, Relaxed);
            note[2].store(code, Relaxed);
        }
        None => _ = LOST.fetch_add(1, Relaxed),
    }
}

fn catch_signals() {
    LazyLock::force(&SAVED_RIGHTS);
    for signal in [libc::SIGSEGV, libc::SIGTRAP] {
        // SAFETY: plain C data for which all zeroes is a valid value; the handler has the
        // signature that SA_SIGINFO needs and touches nothing that may be locked.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = enter_handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
        }
    }
}

/// To be called by each core's thread before [`tag`].
fn tell_places(core: usize) {
    let (mut low, mut len) = (std::ptr::null_mut(), 0);
    // SAFETY: plain C data, initialised by the first call before the others read it.
    unsafe {
        let mut attributes = std::mem::zeroed();
        assert_eq!(libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes), 0);
        assert_eq!(libc::pthread_attr_getstack(&attributes, &mut low, &mut len), 0);
        libc::pthread_attr_destroy(&raw mut attributes);
    }
    let places = [arena_of(NEXT.get()), low as usize, low as usize + len];
    PLACES[core].iter().zip(places).for_each(|(place, at)| place.store(at, SeqCst));
    CORE.set(Some(core));
}

/// Gives all writable memory of the process its keys.
#[expect(clippy::disallowed_methods, reason = "a look at this very process")]
fn tag() {
    let keys = MEMORY.keys.expect("asked before any window");
    let set = |from: usize, to: usize, key: usize| {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is mapped, and stays as readable and writable as it was: no thread
        // has dropped any right yet.
        let done = unsafe { libc::syscall(libc::SYS_pkey_mprotect, from, to - from, prot, key) };
        assert_eq!(done, 0, "{from:x}-{to:x}: {}", std::io::Error::last_os_error());
    };
    for mapping in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let (range, rest) = mapping.split_once(' ').unwrap();
        let (from, to) = range.split_once('-').unwrap();
        if rest.starts_with("rw") && !rest.contains("[io_uring]") {
            let address = |text| usize::from_str_radix(text, 16).unwrap();
            set(address(from), address(to), keys[0]);
        }
    }
    for (core, place) in PLACES.iter().enumerate() {
        let [arena, low, high] = place.each_ref().map(|at| at.load(SeqCst));
        set(arena, arena + ARENA_BYTES, keys[1 + core]);
        set(low, high, 0);
    }
}

static FAILED: AtomicBool = AtomicBool::new(false);

/// Tells the other core of a panic, or it would wait for ever.
struct Fuse;

impl Drop for Fuse {
    fn drop(&mut self) {
        FAILED.fetch_or(std::thread::panicking(), SeqCst);
    }
}

/// Waits until both cores are here.
fn meet() {
    static ARRIVED: AtomicUsize = AtomicUsize::new(0);
    let until = ARRIVED.fetch_add(1, SeqCst) / 2 * 2 + 2;
    while ARRIVED.load(SeqCst) < until {
        assert!(!FAILED.load(SeqCst), "the other core failed");
        std::thread::yield_now();
    }
}

/// The lines of foreign memory that a core wrote, each with how often and by which code.
type Foreign = BTreeMap<usize, (usize, usize)>;

/// Does the work once to fill pools and tables, then again under watch, on both cores together.
async fn window(core: &Core, work: impl AsyncFn()) -> Foreign {
    work().await;
    WRITTEN[core.id()].as_flattened().iter().for_each(|part| part.store(0, Relaxed));
    meet();
    set_rights(rights(core.id()));
    work().await;
    set_rights(0);
    meet();
    let notes = WRITTEN[core.id()].iter().map(|note| note.each_ref().map(|n| n.load(Relaxed)));
    notes.filter(|note| note[0] != 0).map(|[line, n, code]| (line, (n, code))).collect()
}

/// Lines that both cores may have written.
fn in_common(foreign: &[&Foreign]) -> Vec<usize> {
    let others = |core: usize, line: usize| {
        foreign[1 - core].contains_key(&line)
            || arena_of(line * LINE) == PLACES[1 - core][0].load(SeqCst)
    };
    (0..2).flat_map(|c| foreign[c].keys().copied().filter(move |&line| others(c, line))).collect()
}

// ---- The work.

fn key(n: u64) -> [u8; 16] {
    let mut key = [b'0'; 16];
    key[..8].copy_from_slice(&(n % KEYS).to_be_bytes());
    key
}

/// Random gets, by 16 tasks.
async fn gets(reader: &Reader, count: u64) {
    let tasks: Vec<_> = (0..16)
        .map(|_| {
            let reader = reader.clone();
            reader.core().clone().spawn(Class::Foreground, async move {
                for _ in 0..count / 16 {
                    let key = key(reader.core().random_u64());
                    let value = match reader.get_cached(0, &key) {
                        Some(found) => found,
                        None => reader.get(0, &key, None).await,
                    };
                    assert_eq!(value.unwrap().expect("every key is there").len(), 1000);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await;
    }
}

/// Multi-gets of 16 keys and short scans.
async fn batches(reader: &Reader) {
    for _ in 0..BATCHES {
        let keys: [_; 16] = std::array::from_fn(|_| key(reader.core().random_u64()));
        let keys = keys.each_ref().map(|key| &key[..]);
        for value in reader.multi_get(0, &keys, None).await {
            assert_eq!(value.unwrap().expect("every key is there").len(), 1000);
        }
        let mut iter = reader.iter(0, IterOptions::default()).unwrap();
        iter.seek(&key(reader.core().random_u64() % (KEYS / 2))).await.unwrap();
        for _ in 0..50 {
            assert_eq!(iter.value().len(), 1000);
            iter.next().await.unwrap();
        }
    }
}

/// Counters of the two cores, side by side.
static WORDS: OnOneLine = OnOneLine([const { AtomicU64::new(0) }; 2]);

#[repr(align(128))]
struct OnOneLine([AtomicU64; 2]);

/// Forbidden writes that must be found: [`WORDS`], a count of holders, a write into the other's
/// arena.
#[derive(Default)]
struct Mistakes {
    held: Arc<u64>,
    /// By core: a word that the core allocated.
    own: [AtomicUsize; 2],
}

impl Mistakes {
    fn make_all(&self, core: usize) {
        WORDS.0[core].fetch_add(1, Relaxed);
        drop(std::hint::black_box(self.held.clone()));
        let theirs = self.own[1 - core].load(Relaxed) as *const AtomicU64;
        // SAFETY: the window has begun, so both have put the address of a leaked word there.
        unsafe { &*theirs }.fetch_add(1, Relaxed);
    }

    /// The lines that they write.
    fn lines(&self) -> Vec<usize> {
        let count = Arc::as_ptr(&self.held) as usize - 2 * size_of::<usize>();
        let own = self.own.each_ref().map(|at| at.load(Relaxed));
        let all = [WORDS.0.as_ptr() as usize, count, own[0], own[1]];
        all.map(|at| at / LINE).to_vec()
    }
}

const CACHED: u64 = 20_000;
const DIRECT: u64 = 8_000;
const BATCHES: u64 = 100;

/// The reads of each core, and how many foreign writes a hundred of them may need: gets that do not
/// wait only the few of the loop, others some for each wait.
const WINDOWS: [(u64, &str, u64); 3] = [
    (CACHED, "gets from the cache", 1),
    (DIRECT, "gets from the device", 500),
    (BATCHES * (16 + 50), "reads in batches and scans", 500),
];

async fn one_core(core: Core, dbs: [Db; 2], mistakes: Arc<Mistakes>) -> Vec<Foreign> {
    let _fuse = Fuse;
    let me = core.id();
    let [cached, direct] = dbs.each_ref().map(|db| db.attach(&core));
    for n in 0..KEYS {
        cached.get(0, &key(n), None).await.unwrap();
    }
    let misses = cached.stats().cache_misses;
    let word = Box::leak(Box::new(AtomicU64::new(0)));
    mistakes.own[me].store(std::ptr::from_mut(word) as usize, Relaxed);
    tell_places(me);
    meet();
    if me == 0 {
        tag();
    }
    meet();
    let seen = vec![
        window(&core, async || gets(&cached, CACHED).await).await,
        window(&core, async || gets(&direct, DIRECT).await).await,
        window(&core, async || batches(&direct).await).await,
        window(&core, async || {
            gets(&direct, DIRECT / 20).await;
            mistakes.make_all(me);
        })
        .await,
    ];
    assert_eq!(cached.stats().cache_misses, misses, "all is in the cache");
    assert!(direct.stats().cache_misses > DIRECT, "the device was read");
    seen
}

#[test]
fn two_cores_that_read_write_no_line_in_common() {
    let processors = reactor::processors();
    if let Err(error) = MEMORY.keys {
        let error = std::io::Error::from_raw_os_error(error);
        return eprintln!("skipped: this machine has no protection keys: {error}");
    }
    if processors.len() < 2 {
        return eprintln!("skipped: two cores need two processors");
    }
    // In the directory of this program, where direct I/O works.
    let dir =
        std::env::current_exe().unwrap().with_file_name(format!("share-{}", std::process::id()));
    let made = Command::new("db_bench")
        .args(["--benchmarks=fillseq,compact", &format!("--num={KEYS}"), "--value_size=1000"])
        .args(["--compression_type=snappy", "--bloom_bits=10"])
        .arg(format!("--db={}", dir.display()))
        .output()
        .expect("db_bench runs: install Debian's rocksdb-tools (./test does)");
    assert!(made.status.success(), "{made:?}");
    catch_signals();
    let config = |processors: &[usize]| RuntimeConfig {
        processors: processors.to_vec(),
        memory: 96 << 20,
        driver: DriverKind::Uring,
        ..RuntimeConfig::default()
    };
    // A separate core opens the database, so that shared memory is in neither reader's arena.
    let path = dir.clone();
    let opened = reactor::run(&config(&processors[..1]), move |core| {
        let path = path.clone();
        async move {
            let open = async |cache_bytes| {
                let options = OpenOptions { cache_bytes, ..OpenOptions::default() };
                Db::open(&core, &path, options).await.expect("the database opens")
            };
            [open(64 << 20).await, open(0).await]
        }
    });
    // Its files are open.
    let _ = std::fs::remove_dir_all(&dir);
    let dbs = match opened {
        Ok(mut dbs) => dbs.remove(0),
        // Then other threads read for the cores, and they are not watched.
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let mistakes = Arc::new(Mistakes::default());
    let shared = mistakes.clone();
    let main = move |core| one_core(core, dbs.clone(), shared.clone());
    let seen = reactor::run(&config(&processors[..2]), main).expect("the runtime starts");
    assert_eq!(LOST.load(SeqCst), 0, "writes without a note");
    for (at, (reads, name, percent_max)) in WINDOWS.into_iter().enumerate() {
        let foreign = [&seen[0][at], &seen[1][at]];
        let writes = foreign.map(|lines| lines.values().map(|(times, _)| times).sum::<usize>());
        println!("{reads} {name}: {writes:?} writes outside, {foreign:x?}");
        assert_eq!(in_common(&foreign), [], "{name}: lines that both cores write");
        let lines = foreign.map(|lines| lines.len());
        // A core posts the depth of its background work when the latency of its reads has changed
        // it.
        let known = "sleep flag, ring, depth";
        assert!(lines.iter().all(|&n| n <= 3), "{name}: {known}, and what? {foreign:x?}");
        let writes_max = (reads * percent_max / 100) as usize;
        assert!(writes.iter().all(|&n| n <= writes_max), "{name}: {writes:?} writes outside");
    }
    let found = in_common(&[&seen[0][3], &seen[1][3]]);
    for line in mistakes.lines() {
        assert!(found.contains(&line), "{line:x} is written by both, but only {found:x?} found");
    }
}
