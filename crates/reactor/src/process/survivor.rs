//! A second process that outlives this one for a moment, so that a kill ends this one at once.
//!
//! The kernel ends a process in a fixed order: it takes the memory apart, closes the files, and
//! tells the parent. The first step takes 29 ms for a context of Linux AIO ([`EventFd`] uses one
//! for each core) and 68 ms for each GiB of a guest's memory, in pages of 4 KiB; all others
//! together take 0.2 ms. Whoever waits for the end of the process, or for a lock that it has, waits
//! for all of it.
//!
//! The kernel does each step when the last process or thread that shares the memory, or the files,
//! ends. So the *survivor* shares both, and waits:
//!
//! 1. A kill ends all threads of this process within 0.2 ms. Nothing of it runs any more, its
//!    parent is told, and the survivor wakes.
//! 2. The survivor closes the io_uring rings. The kernel then drops their operations, each of which
//!    has a file open.
//! 3. After [`PAUSE_NS`] it closes all other files. If an operation still has one of them open, a
//!    worker of the kernel closes that at a later tick (4 ms).
//! 4. It ends. Its memory is taken apart at a low priority.
//!
//! Locks on files mean what they always do: the kernel releases a lock when the last operation on
//! its file has ended.
//!
//! Because it shares this process's memory, whoever takes over this process takes over the
//! survivor, too. So before this process confines itself, the survivor allows itself only its own
//! five system calls (`seccomp`). It uses neither thread-local memory nor the C library, which
//! belong to the thread that has started it.
//!
//! [`EventFd`]: crate::EventFd

use std::arch::asm;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use crate::io::unix::outcome;

/// The time that the kernel gets for dropping the operations of the rings.
const PAUSE_NS: i64 = 200_000;
/// The name of a ring's descriptor and of its mappings.
const RING: &str = "anon_inode:[io_uring]";
/// The rings' descriptors are below this number.
const DESCRIPTORS_MAX: u32 = 4096;
const STACK_BYTES: usize = 64 << 10;
/// At 19, a busy machine took 13 s to free a small node.
const NICE: usize = 10;
/// How long the survivor may take to start, in polls.
const POLLS_MAX: u32 = 20_000;
const POLL: Duration = Duration::from_micros(50);
/// The states of [`Orders::state`]; a negative one is an error number.
const STARTS: i32 = 0;
const IS_READY: i32 = 1;

/// The machine as `seccomp` names it, linux/audit.h.
#[cfg(target_arch = "x86_64")]
const MACHINE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const MACHINE: u32 = 0xC000_00B7;

/// Allows the calls of [`survive`], and ends the process at any other.
static FILTER: [libc::sock_filter; 10] = {
    const fn load(offset: u32) -> libc::sock_filter {
        let code = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        libc::sock_filter { code, jt: 0, jf: 0, k: offset }
    }
    /// Skips as many instructions.
    const fn if_equal(value: u32, jt: u8, jf: u8) -> libc::sock_filter {
        let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        libc::sock_filter { code, jt, jf, k: value }
    }
    const fn answer(action: u32) -> libc::sock_filter {
        let code = (libc::BPF_RET | libc::BPF_K) as u16;
        libc::sock_filter { code, jt: 0, jf: 0, k: action }
    }
    // `struct seccomp_data`: the call's number, and the machine.
    [
        load(4),
        if_equal(MACHINE, 0, 6),
        load(0),
        if_equal(libc::SYS_ppoll as u32, 5, 0),
        if_equal(libc::SYS_munmap as u32, 4, 0),
        if_equal(libc::SYS_close_range as u32, 3, 0),
        if_equal(libc::SYS_setpriority as u32, 2, 0),
        if_equal(libc::SYS_exit as u32, 1, 0),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
        answer(libc::SECCOMP_RET_ALLOW),
    ]
};

/// A system call. Unlike `libc::syscall` it does not touch the thread's error number.
///
/// # Safety
/// As for the call.
unsafe fn call(number: libc::c_long, arguments: [usize; 5]) -> isize {
    let [a, b, c, d, e] = arguments;
    let result: isize;
    // SAFETY: the caller's promise, and the machine's convention for system calls.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b,
            in("x2") c,
            in("x3") d,
            in("x4") e,
            options(nostack),
        );
    }
    result
}

/// What the survivor needs to know. It lives for ever.
struct Orders {
    state: AtomicI32,
    /// Becomes readable when this process has ended.
    end: OwnedFd,
    /// Descriptors of the rings, and their mappings, which keep them open as well.
    rings: Vec<u32>,
    mappings: Vec<Range<usize>>,
    /// The processors that this process may use.
    processors: libc::cpu_set_t,
}

/// What [`Survivor::start`] needs and a confined process cannot get any more.
pub struct Survivor {
    /// `/proc/self/maps`.
    maps: File,
    processors: libc::cpu_set_t,
}

impl Survivor {
    /// Call it before the process confines itself and pins its threads.
    ///
    /// # Errors
    /// As the system gives them.
    #[expect(clippy::disallowed_methods, reason = "a kernel file, opened at the start")]
    pub fn prepare() -> io::Result<Survivor> {
        // SAFETY: a plain C struct for which all zeroes is a valid value.
        let mut processors: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: `processors` is live and its size is given.
        let done = unsafe {
            libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut processors)
        };
        outcome(done as isize)?;
        Ok(Survivor { maps: File::open("/proc/self/maps")?, processors })
    }

    /// Starts the survivor, and returns its process id. Call it once, when all rings are made, and
    /// before system calls are restricted.
    ///
    /// # Errors
    /// As the system gives them; then the process ends as any other.
    #[expect(clippy::disallowed_methods, reason = "start-up code")]
    pub fn start(&self) -> io::Result<u32> {
        let mut maps = String::new();
        (&self.maps).read_to_string(&mut maps)?;
        // SAFETY: takes no pointers.
        let end = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) };
        let end = outcome(end as isize)? as i32;
        let is_ring = |fd: &u32| {
            let name = std::fs::read_link(format!("/proc/self/fd/{fd}"));
            name.is_ok_and(|name| name.as_os_str() == RING)
        };
        let orders = Box::leak(Box::new(Orders {
            state: AtomicI32::new(STARTS),
            // SAFETY: a new descriptor that nobody else owns.
            end: unsafe { OwnedFd::from_raw_fd(end) },
            rings: open_descriptors().filter(is_ring).collect(),
            mappings: mappings(&maps),
            processors: self.processors,
        }));
        let stack = Box::leak(vec![0_u128; STACK_BYTES / size_of::<u128>()].into_boxed_slice());
        let pid = spawn(stack, orders)?;
        for _ in 0..POLLS_MAX {
            match orders.state.load(Ordering::Acquire) {
                STARTS => std::thread::sleep(POLL),
                IS_READY => return Ok(pid as u32),
                error => return Err(io::Error::from_raw_os_error(-error)),
            }
        }
        // SAFETY: takes no pointers. The process is a child that nobody has waited for.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        Err(io::ErrorKind::TimedOut.into())
    }
}

/// The descriptors that are open. Looking each number up by its name would take milliseconds.
fn open_descriptors() -> impl Iterator<Item = u32> {
    // SAFETY: takes no pointers, and changes nothing.
    (0..DESCRIPTORS_MAX).filter(|fd| unsafe { libc::fcntl(*fd as i32, libc::F_GETFD) } >= 0)
}

/// Starts the process.
fn spawn(stack: &'static mut [u128], orders: &'static Orders) -> io::Result<i32> {
    // SAFETY: `sigset_t` is plain data, and sigfillset initialises it before it is read.
    let (all, mut before) = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        (all, std::mem::zeroed::<libc::sigset_t>())
    };
    // The process inherits the mask: only SIGKILL ends it, and no handler runs in it.
    // SAFETY: both sets are live.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    // SAFETY: the stack and the orders live for ever; nobody else uses the stack, and of the orders
    // only the state changes, which is an atomic. The process has this thread's thread-local
    // memory, which `survive` does not use. `survive` never returns.
    let pid = unsafe {
        libc::clone(
            survive,
            stack.as_mut_ptr_range().end.cast(),
            libc::CLONE_VM | libc::CLONE_FILES,
            std::ptr::from_ref(orders).cast_mut().cast(),
        )
    };
    let result = outcome(pid as isize);
    // SAFETY: the set is live.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result.map(|pid| pid as i32)
}

/// The mappings of rings, in a text like that of `/proc/self/maps`.
fn mappings(maps: &str) -> Vec<Range<usize>> {
    let range = |line: &str| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        Some(usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?)
    };
    maps.lines().filter(|line| line.ends_with(RING)).filter_map(range).collect()
}

/// The survivor's whole life.
extern "C" fn survive(orders: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `spawn` passes orders that live for ever.
    let orders = unsafe { &*orders.cast_const().cast::<Orders>() };
    let mut end = libc::pollfd { fd: orders.end.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut pause = libc::timespec { tv_sec: 0, tv_nsec: PAUSE_NS };
    let filter = libc::sock_fprog {
        len: FILTER.len() as u16,
        filter: (&raw const FILTER).cast_mut().cast(),
    };
    // SAFETY: every pointer is to live memory of the size that the call expects, or null where that
    // is allowed. What is unmapped and closed belonged to the other process, which has ended.
    unsafe {
        let size = size_of::<libc::cpu_set_t>();
        call(
            libc::SYS_sched_setaffinity,
            [0, size, (&raw const orders.processors).expose_provenance(), 0, 0],
        );
        call(
            libc::SYS_prctl,
            [libc::PR_SET_NAME as usize, c"millrace-end".as_ptr().expose_provenance(), 0, 0, 0],
        );
        let mut confined = call(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0]);
        if confined == 0 {
            let mode = libc::SECCOMP_SET_MODE_FILTER as usize;
            confined =
                call(libc::SYS_seccomp, [mode, 0, (&raw const filter).expose_provenance(), 0, 0]);
        }
        let state = if confined == 0 { IS_READY } else { confined as i32 };
        orders.state.store(state, Ordering::Release);
        if confined == 0 {
            while end.revents == 0 {
                call(libc::SYS_ppoll, [(&raw mut end).expose_provenance(), 1, 0, 0, 0]);
            }
            for mapping in &orders.mappings {
                call(libc::SYS_munmap, [mapping.start, mapping.end - mapping.start, 0, 0, 0]);
            }
            for ring in &orders.rings {
                call(libc::SYS_close_range, [*ring as usize, *ring as usize, 0, 0, 0]);
            }
            call(libc::SYS_ppoll, [0, 0, (&raw mut pause).expose_provenance(), 0, 0]);
            call(libc::SYS_close_range, [0, u32::MAX as usize, 0, 0, 0]);
            call(libc::SYS_setpriority, [libc::PRIO_PROCESS as usize, 0, NICE, 0, 0]);
        }
        loop {
            call(libc::SYS_exit, [0; 5]);
        }
    }
}
