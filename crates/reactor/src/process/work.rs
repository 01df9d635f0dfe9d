//! What a core was working on when its process died: notes that another process reads.
//!
//! 1. The other process makes a page of shared memory ([`work_page`]) and keeps its descriptor.
//! 2. This process notes its work there ([`note_work_in`]). A core stores a number before some work
//!    and the previous one afterwards ([`Core::work_on`]), in a cache line of its own: two stores,
//!    no system call, and one load of a pointer that is null where nobody wants to know.
//! 3. If a thread faults or aborts, a signal handler on that thread finds the core that runs there,
//!    and stores its number and the signal. The other process reads both with [`killed_by`].
//!
//! Only what the process did itself counts: a fault of its own code, or its own abort (a panic). A
//! signal that another process has sent is not noted, SIGKILL never, and neither is what happens on
//! threads that are not cores.
//!
//! docs/formats/work.md has the layout.

use std::future::{Future, poll_fn};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::pin::pin;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering, compiler_fence};

use crate::core::Core;
use crate::memory::guard;
use crate::process::signals::{Place, is_sent};

/// Cores that have a place.
const CORES_MAX: usize = 1023;

/// The page.
#[repr(C)]
struct Page {
    head: Head,
    cores: [Slot; CORES_MAX],
}

/// What has killed the process.
#[repr(C, align(64))]
struct Head {
    work: AtomicU64,
    signal: AtomicI32,
}

/// What a core is working on; 0 is nothing that anyone wants to know of.
#[repr(C, align(64))]
struct Slot {
    work: AtomicU64,
    /// The core's thread; 0 until it has worked.
    thread: AtomicI32,
}

const _: () = assert!(size_of::<Page>() == 64 << 10 && size_of::<Slot>() == 64);

/// The page of this process, which stays mapped; null if there is none.
static PAGE: AtomicPtr<Page> = AtomicPtr::new(std::ptr::null_mut());

/// Signals by which the kernel ends a process that has made a mistake, and that a handler sees. The
/// guard of mappings has the handler of SIGBUS.
const SIGNALS: [i32; 5] = [libc::SIGSEGV, libc::SIGABRT, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP];
static PLACES: [Place; SIGNALS.len()] = [const { Place::new() }; SIGNALS.len()];

/// What has killed a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Killed {
    /// The work of the core that died.
    pub work: u64,
    /// The signal.
    pub signal: i32,
}

/// The number of the work that a name stands for, never 0. Both processes compute it (FNV-1a).
pub fn work_of(name: &str) -> u64 {
    let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    });
    hash.max(1)
}

/// Makes a page for another process. Its length cannot be changed, so neither process can make the
/// other one fault.
///
/// # Errors
/// As the system gives them.
pub fn work_page() -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"work".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else has.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: takes no pointers.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), size_of::<Page>() as libc::off_t) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: takes no pointers.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(fd),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Notes the work of this process's cores in a page, from now on.
///
/// # Errors
/// As the system gives them.
pub fn note_work_in(page: &OwnedFd) -> io::Result<()> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let (any, len) = (std::ptr::null_mut(), size_of::<Page>());
    // SAFETY: a new mapping replaces nothing.
    let at = unsafe { libc::mmap(any, len, access, libc::MAP_SHARED, page.as_raw_fd(), 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // The page of an earlier call stays mapped: a core may be using it.
    PAGE.store(at.cast(), Ordering::Release);
    guard::install();
    for (signal, place) in SIGNALS.iter().zip(&PLACES) {
        place.install(*signal, handle);
    }
    Ok(())
}

/// What the process that had this page died of, if it was its own doing and at work.
pub fn killed_by(page: &OwnedFd) -> Option<Killed> {
    let mut head = [0_u8; 12];
    // Read, not mapped. SAFETY: a live buffer of this length.
    let read = unsafe { libc::pread(page.as_raw_fd(), head.as_mut_ptr().cast(), head.len(), 0) };
    if read != head.len() as isize {
        return None;
    }
    let (work, signal) = head.split_at(8);
    let work = u64::from_ne_bytes(work.try_into().ok()?);
    let signal = i32::from_ne_bytes(signal.try_into().ok()?);
    (work != 0).then_some(Killed { work, signal })
}

/// The page, if there is one.
#[inline]
fn page() -> Option<&'static Page> {
    // SAFETY: null, or a mapping of this length that is never unmapped. It is memory that both
    // processes access; all of it is atomic. Zeroes are valid values.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }
}

impl Core {
    /// Notes what this core is working on from now on; returns what it was working on.
    #[inline]
    pub fn work_on(&self, work: u64) -> u64 {
        match page().and_then(|page| page.cores.get(self.id())) {
            Some(slot) => slot.change(work),
            None => 0,
        }
    }

    /// Notes the work whenever the core polls this future.
    pub async fn working<T>(&self, work: u64, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        poll_fn(|cx| {
            let before = self.work_on(work);
            let polled = future.as_mut().poll(cx);
            self.work_on(before);
            polled
        })
        .await
    }
}

impl Slot {
    #[inline]
    fn change(&self, work: u64) -> u64 {
        if self.thread.load(Ordering::Relaxed) == 0 {
            self.begin();
        }
        let before = self.work.load(Ordering::Relaxed);
        // Only the handler on this thread has to see the order.
        compiler_fence(Ordering::SeqCst);
        self.work.store(work, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        before
    }

    #[cold]
    fn begin(&self) {
        // SAFETY: takes no pointers.
        self.thread.store(unsafe { libc::gettid() }, Ordering::Relaxed);
    }
}

/// Notes what the core of this thread was working on, if a fault or an abort of this process is
/// about to end it. Async-signal-safe.
///
/// # Safety
/// `info` is what the kernel has passed to a handler.
pub(crate) unsafe fn note_death(signal: i32, info: *const libc::siginfo_t) {
    let Some(page) = page() else { return };
    // SAFETY: live by the contract; a signal that was sent has the sender's process. The calls take
    // no pointers.
    let (theirs, thread) =
        unsafe { (is_sent(info) && (*info).si_pid() != libc::getpid(), libc::gettid()) };
    let here = page.cores.iter().find(|slot| slot.thread.load(Ordering::Relaxed) == thread);
    if let (Some(slot), false) = (here, theirs) {
        page.head.signal.store(signal, Ordering::Relaxed);
        page.head.work.store(slot.work.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the arguments are the kernel's.
    unsafe { note_death(signal, info) };
    if let Some(at) = SIGNALS.iter().position(|known| *known == signal) {
        // SAFETY: they are this handler's, which was installed in this place.
        unsafe { PLACES[at].pass_on(signal, info, context) };
    }
}
