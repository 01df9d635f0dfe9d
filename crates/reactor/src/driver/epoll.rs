//! The driver for systems without io_uring (containers forbid it by default): epoll for sockets and
//! wake-ups, threads for files.
//!
//! One `enter`:
//!
//! 1. staged operations: a file read is answered immediately if the page cache has the data; other
//!    reads, writes and syncs go to the file threads (`file_threads`) in one batch. A socket
//!    operation is tried without blocking; if it would block, it is kept with its descriptor;
//! 2. results of the file threads;
//! 3. `epoll_wait`, if told to wait, or if sockets have not been polled for a while; operations on
//!    ready descriptors are retried.
//!
//! Registration is one-shot: a descriptor is armed exactly while operations wait for it, and each
//! arming names the events. So a closed descriptor whose number is reused does no harm: a stale
//! event finds no operation, or causes one retry that would block and arms the descriptor again.
//! This costs one `epoll_ctl` per operation that blocks.
//!
//! Waking: the file threads and other cores write the core's eventfd only if the core has set its
//! sleep flag. The flag is set before `enter` waits, and the results are checked after that: the
//! second check that `sleep` requires.
//!
//! Compared with io_uring: two system calls more per blocking socket operation, and two thread
//! switches per disk operation. The number of threads ([`THREADS`]) bounds the disk operations in
//! flight. The threads share the core's processor, so a core that spins (`PollMode::Always`)
//! competes with its own disk: that mode has no benefit here.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::file_threads::{FileThreads, Job};
use super::host::Helpers;
use super::{Completion, Driver, IoOp, MetaOp, Token, Wait};
use crate::driver::remote::{CoreAddress, Remote};

/// File threads of a core, which is also the depth its disk sees. Measured with 4 KiB direct
/// reads on a virtual disk, all threads on one processor: 16 reach 106 k reads/s, 32 reach 126 k
/// at the least processor time per read, 64 reach 132 k at twice the latency.
const THREADS: usize = 32;
/// Most unfinished operations on files; bounds the threads' inbox.
const CAPACITY: usize = 1 << 20;
/// Events taken by one `epoll_wait`.
const EVENTS: usize = 256;
/// A busy core polls its sockets at this interval.
const LOOK_NS: u64 = 20_000;
/// The event number of the core's eventfd; not the number of any descriptor.
const WAKE: u64 = u64::MAX;

const READABLE: u32 = libc::EPOLLIN as u32;
const WRITABLE: u32 = libc::EPOLLOUT as u32;

/// The operations that wait for one descriptor, oldest first.
#[derive(Default)]
struct Waiting {
    ops: Vec<(Token, IoOp)>,
    /// Whether epoll probably knows the descriptor; a wrong guess costs one system call.
    known: bool,
}

/// The epoll driver of one core.
pub(crate) struct EpollDriver {
    epoll: OwnedFd,
    shared: Arc<CoreAddress>,
    helpers: Arc<Helpers>,
    threads: FileThreads,
    staged: Vec<(Token, IoOp)>,
    /// Jobs for the threads; empty between calls.
    jobs: Vec<Job>,
    /// By descriptor number.
    waiting: Vec<Waiting>,
    /// By token: the descriptor it waits for.
    place: Vec<Option<i32>>,
    /// Operations in `waiting`.
    blocked: usize,
    /// Operations that ended outside `enter`.
    ended: Vec<Completion>,
    events: Vec<libc::epoll_event>,
    looked_ns: u64,
    /// Whether the kernel has `epoll_pwait2`, which takes nanoseconds.
    precise: bool,
}

impl EpollDriver {
    /// Makes the epoll instance and starts the file threads, which inherit the calling
    /// thread's pinning.
    ///
    /// # Errors
    /// When the process has no descriptors or threads left.
    pub fn new(shared: &Arc<CoreAddress>, helpers: &Arc<Helpers>) -> io::Result<EpollDriver> {
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
        control(&epoll, libc::EPOLL_CTL_ADD, shared.event_fd(), READABLE, WAKE)?;
        Ok(EpollDriver {
            epoll,
            shared: shared.clone(),
            helpers: helpers.clone(),
            threads: FileThreads::start(THREADS, CAPACITY, shared)?,
            staged: Vec::new(),
            jobs: Vec::new(),
            waiting: Vec::new(),
            place: Vec::new(),
            blocked: 0,
            ended: Vec::new(),
            events: Vec::with_capacity(EVENTS),
            looked_ns: 0,
            precise: true,
        })
    }

    /// Starts all staged operations.
    fn submit(&mut self, done: &mut Vec<Completion>) {
        for at in 0..self.staged.len() {
            let (token, op) = self.staged[at];
            if let IoOp::Read { fd, ptr, len, offset } = op {
                let piece = libc::iovec { iov_base: ptr.cast(), iov_len: len as usize };
                match read_cached(fd, &raw const piece, 1, offset) {
                    Some(result) => done.push(Completion { token, result }),
                    None => self.jobs.push(Job { token, op }),
                }
                continue;
            }
            if let IoOp::ReadV { fd, iov, n, threads: false, offset } = op {
                match read_cached(fd, iov, n.into(), offset) {
                    Some(result) => done.push(Completion { token, result }),
                    None => self.jobs.push(Job { token, op }),
                }
                continue;
            }
            if let IoOp::Write { .. }
            | IoOp::SyncData { .. }
            | IoOp::ReadV { .. }
            | IoOp::WriteV { .. }
            | IoOp::Fallocate { .. } = op
            {
                self.jobs.push(Job { token, op });
                continue;
            }
            let behind = self.waiting.get(descriptor(&op) as usize).is_some_and(|waiting| {
                waiting.ops.iter().any(|(_, other)| interest(other) == interest(&op))
            });
            // Operations that already wait for the same event go first. A poll is left to epoll.
            let result =
                if behind || matches!(op, IoOp::PollIn { .. }) { None } else { attempt(&op) };
            match result {
                Some(result) => done.push(Completion { token, result }),
                None => self.block(token, op, done),
            }
        }
        self.staged.clear();
        if !self.jobs.is_empty() {
            self.threads.submit(&mut self.jobs);
        }
    }

    /// Makes an operation wait for its descriptor.
    fn block(&mut self, token: Token, op: IoOp, done: &mut Vec<Completion>) {
        let fd = descriptor(&op);
        let (at, index) = (fd as usize, token as usize);
        if self.waiting.len() <= at {
            self.waiting.resize_with(at + 1, Waiting::default);
        }
        if self.place.len() <= index {
            self.place.resize(index + 1, None);
        }
        self.waiting[at].ops.push((token, op));
        self.place[index] = Some(fd);
        self.blocked += 1;
        self.arm(fd, done);
    }

    /// Arms `fd` in epoll for one of the events that its operations wait for. If epoll refuses, the
    /// operations end: a poll of a descriptor that is always readable with success, others with the
    /// error.
    fn arm(&mut self, fd: i32, done: &mut Vec<Completion>) {
        let waiting = &mut self.waiting[fd as usize];
        let events = waiting.ops.iter().fold(0, |events, (_, op)| events | interest(op));
        if events == 0 {
            return;
        }
        let events = events | libc::EPOLLONESHOT as u32;
        let (first, second, wrong) = if waiting.known {
            (libc::EPOLL_CTL_MOD, libc::EPOLL_CTL_ADD, libc::ENOENT)
        } else {
            (libc::EPOLL_CTL_ADD, libc::EPOLL_CTL_MOD, libc::EEXIST)
        };
        let mut result = control(&self.epoll, first, fd, events, fd as u64);
        if result.as_ref().is_err_and(|error| error.raw_os_error() == Some(wrong)) {
            result = control(&self.epoll, second, fd, events, fd as u64);
        }
        waiting.known = result.is_ok();
        let Err(error) = result else {
            return;
        };
        let error = error.raw_os_error().unwrap_or(libc::EIO);
        for (token, op) in waiting.ops.drain(..) {
            let regular = error == libc::EPERM && matches!(op, IoOp::PollIn { .. });
            let result = if regular { READABLE as i32 } else { -error };
            done.push(Completion { token, result });
            self.place[token as usize] = None;
            self.blocked -= 1;
        }
    }

    /// Retries the operations that waited for `fd`.
    fn wake(&mut self, fd: i32, events: u32, done: &mut Vec<Completion>) {
        let Some(waiting) = self.waiting.get_mut(fd as usize) else {
            return;
        };
        let failed = events & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0;
        // After one would block, later ones that wait for the same event would block, too.
        let mut shut = 0;
        let (place, blocked) = (&mut self.place, &mut self.blocked);
        waiting.ops.retain(|&(token, op)| {
            let wanted = interest(&op);
            if shut & wanted != 0 || (events & wanted == 0 && !failed) {
                return true;
            }
            let result = match op {
                IoOp::PollIn { .. } => Some(events as i32),
                _ => attempt(&op),
            };
            let Some(result) = result else {
                shut |= wanted;
                return true;
            };
            done.push(Completion { token, result });
            place[token as usize] = None;
            *blocked -= 1;
            false
        });
        self.arm(fd, done);
    }

    /// Polls epoll, waiting according to `wait`.
    fn poll_ready(&mut self, wait: Wait, done: &mut Vec<Completion>) -> io::Result<()> {
        self.looked_ns = super::host_now_ns();
        let n = loop {
            let n = self.epoll_wait(wait);
            if n >= 0 {
                break n as usize;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                // A signal: the core takes a turn.
                Some(libc::EINTR) => return Ok(()),
                // An older kernel, or a system call filter without this call.
                Some(libc::ENOSYS | libc::EPERM) if self.precise => self.precise = false,
                _ => return Err(error),
            }
        };
        // SAFETY: the kernel has written `n <= EVENTS` events into the spare capacity, which is
        // at least EVENTS.
        unsafe { self.events.set_len(n) };
        for at in 0..n {
            // By value: the structure is packed on this architecture.
            let (events, data) = (self.events[at].events, self.events[at].u64);
            if data == WAKE {
                self.shared.clear_event();
            } else {
                self.wake(data as i32, events, done);
            }
        }
        self.events.clear();
        Ok(())
    }

    fn epoll_wait(&mut self, wait: Wait) -> libc::c_long {
        self.events.clear();
        self.events.reserve(EVENTS);
        let (epoll, room) = (self.epoll.as_raw_fd(), self.events.as_mut_ptr());
        if let (true, Wait::Ns(ns)) = (self.precise, wait) {
            let timeout = libc::timespec {
                tv_sec: (ns / 1_000_000_000) as libc::time_t,
                tv_nsec: (ns % 1_000_000_000) as libc::c_long,
            };
            // SAFETY: `room` has capacity for EVENTS events, `timeout` is live, and no signal
            // mask is passed.
            return unsafe {
                libc::syscall(
                    libc::SYS_epoll_pwait2,
                    epoll,
                    room,
                    EVENTS as libc::c_int,
                    &raw const timeout,
                    std::ptr::null::<libc::sigset_t>(),
                    0_usize,
                )
            };
        }
        let timeout = match wait {
            Wait::No => 0,
            // Rounded up, so that the core does not wake before the timer is due.
            Wait::Ns(ns) => i32::try_from(ns.div_ceil(1_000_000)).unwrap_or(i32::MAX),
            Wait::Forever => -1,
        };
        // SAFETY: `room` has capacity for EVENTS events.
        unsafe { libc::epoll_wait(epoll, room, EVENTS as libc::c_int, timeout) }.into()
    }
}

impl Driver for EpollDriver {
    fn name(&self) -> &'static str {
        "epoll"
    }

    fn stage(&mut self, token: Token, op: IoOp) {
        if let IoOp::Accept { fd } = op {
            // Sockets are blocking, as io_uring wants them, and `accept` has no flag against that.
            set_nonblocking(fd);
        }
        self.staged.push((token, op));
    }

    fn meta(&mut self, token: Token, op: MetaOp, shared: &Arc<CoreAddress>) {
        let shared = shared.clone();
        self.helpers.run(op, move |answer| shared.post(Remote::Meta(token, answer)));
    }

    fn cancel(&mut self, token: Token) {
        let ended = Completion { token, result: -libc::ECANCELED };
        if let Some(at) = self.staged.iter().position(|(staged, _)| *staged == token) {
            self.staged.remove(at);
            self.ended.push(ended);
        } else if let Some(fd) = self.place.get_mut(token as usize).and_then(Option::take) {
            // The descriptor stays armed; its event finds no operation.
            self.waiting[fd as usize].ops.retain(|(waiting, _)| *waiting != token);
            self.blocked -= 1;
            self.ended.push(ended);
        }
        // Otherwise a thread has it and completes it soon.
    }

    fn staged(&self) -> usize {
        self.staged.len() + self.ended.len()
    }

    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn enter(&mut self, wait: Wait, _: usize, done: &mut Vec<Completion>) -> io::Result<()> {
        done.append(&mut self.ended);
        self.submit(done);
        self.threads.take(done);
        if done.is_empty() && wait != Wait::No {
            self.poll_ready(wait, done)?;
        } else if self.blocked > 0 && self.look_is_due() {
            self.poll_ready(Wait::No, done)?;
        }
        self.threads.take(done);
        Ok(())
    }

    fn ready(&mut self) -> bool {
        self.threads.pure_check() || (self.blocked > 0 && self.look_is_due())
    }

    fn now_ns(&mut self) -> u64 {
        super::host_now_ns()
    }

    fn unix_time_ms(&mut self) -> u64 {
        super::host_unix_time_ms()
    }
}

impl EpollDriver {
    /// Polling epoll needs a system call, so a core that does not sleep polls at intervals.
    fn look_is_due(&self) -> bool {
        super::host_now_ns().saturating_sub(self.looked_ns) >= LOOK_NS
    }
}

/// The result of a system call: a count, a negated error number, or `None` for "would block".
pub(super) fn outcome(n: isize) -> Option<i32> {
    if n >= 0 {
        return Some(i32::try_from(n).unwrap_or(i32::MAX));
    }
    match io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) {
        libc::EAGAIN => None,
        error => Some(-error),
    }
}

fn descriptor(op: &IoOp) -> i32 {
    match *op {
        IoOp::Read { fd, .. }
        | IoOp::Write { fd, .. }
        | IoOp::ReadV { fd, .. }
        | IoOp::WriteV { fd, .. }
        | IoOp::Fallocate { fd, .. }
        | IoOp::SyncData { fd }
        | IoOp::Recv { fd, .. }
        | IoOp::Send { fd, .. }
        | IoOp::SendMsg { fd, .. }
        | IoOp::Accept { fd }
        | IoOp::PollIn { fd } => fd,
    }
}

/// The events that an operation waits for.
fn interest(op: &IoOp) -> u32 {
    match op {
        IoOp::Send { .. } | IoOp::SendMsg { .. } => WRITABLE,
        _ => READABLE,
    }
}

/// Makes a socket operation, unless it would block.
fn attempt(op: &IoOp) -> Option<i32> {
    loop {
        let n = match *op {
            IoOp::Recv { fd, ptr, len } => {
                // SAFETY: the operation table owns `len` bytes at `ptr` and leaves them alone
                // until the completion (see `driver`).
                unsafe { libc::recv(fd, ptr.cast(), len as usize, libc::MSG_DONTWAIT) }
            }
            IoOp::Send { fd, ptr, len } => {
                let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                // SAFETY: as above; only read from.
                unsafe { libc::send(fd, ptr.cast(), len as usize, flags) }
            }
            IoOp::SendMsg { fd, msg } => {
                // SAFETY: the operation table owns the header, its vector and the pieces.
                unsafe { libc::sendmsg(fd, msg, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }
            }
            IoOp::Accept { fd } => {
                let (addr, len) = (std::ptr::null_mut(), std::ptr::null_mut());
                // SAFETY: null pointers mean that the address is not wanted.
                unsafe { libc::accept4(fd, addr, len, libc::SOCK_CLOEXEC) as isize }
            }
            IoOp::Read { .. }
            | IoOp::Write { .. }
            | IoOp::ReadV { .. }
            | IoOp::WriteV { .. }
            | IoOp::Fallocate { .. }
            | IoOp::SyncData { .. }
            | IoOp::PollIn { .. } => return None,
        };
        match outcome(n) {
            Some(error) if error == -libc::EINTR => {}
            // The peer closed its connection before our accept: try the next one.
            Some(error) if error == -libc::ECONNABORTED && matches!(op, IoOp::Accept { .. }) => {}
            outcome => return outcome,
        }
    }
}

/// Reads from the page cache if it has all bytes; `None` where a thread must read.
fn read_cached(fd: i32, iov: *const libc::iovec, n: i32, offset: u64) -> Option<i32> {
    // A direct read would block here until the disk answers. SAFETY: takes no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 || flags & libc::O_DIRECT != 0 {
        return None;
    }
    let offset = libc::off64_t::try_from(offset).ok()?;
    // SAFETY: `n` pieces, valid for writes until the completion: the operation table owns them or
    // its submitter keeps them (see `driver`).
    let (len, n) = unsafe {
        let pieces = std::slice::from_raw_parts(iov, n as usize);
        let len: usize = pieces.iter().map(|piece| piece.iov_len).sum();
        (len, libc::preadv2(fd, iov, n, offset, libc::RWF_NOWAIT))
    };
    // A short count means the end of the file or of the cached part; the two look the same. After
    // an error the thread tries again.
    (n == len as isize || n == 0).then_some(n as i32)
}

fn set_nonblocking(fd: i32) {
    // SAFETY: takes no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags >= 0 && flags & libc::O_NONBLOCK == 0 {
        // SAFETY: takes no pointers.
        unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) };
    }
}

fn control(epoll: &OwnedFd, what: i32, fd: i32, events: u32, data: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events, u64: data };
    // SAFETY: `event` is live; the kernel copies it.
    match unsafe { libc::epoll_ctl(epoll.as_raw_fd(), what, fd, &raw mut event) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
