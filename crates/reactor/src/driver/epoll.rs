//! The driver for places without io_uring (containers forbid it by default): epoll for sockets
//! and wake-ups, threads for files.
//!
//! One `enter`:
//!
//! 1. staged operations: a file read that the page cache can answer is answered at once, other
//!    reads, writes and syncs go to the file threads (`file_threads`) in one batch; a socket
//!    operation is tried at once, without waiting, and remembered with its descriptor when it would
//!    block;
//! 2. results of the file threads;
//! 3. `epoll_wait`, if told to wait, or if sockets have not been looked at for a while; what has
//!    become ready is tried again.
//!
//! Registration is one-shot: a descriptor is armed exactly while operations wait for it, and each
//! arming says for what. So nothing rests on what the kernel remembers of a descriptor that was
//! closed and whose number came back: a left-over event finds no operation, or makes one be tried
//! that would still block and is armed again. It costs an `epoll_ctl` per operation that blocks.
//!
//! Waking: the file threads and other cores write the core's eventfd only if the core has set
//! its sleep flag. The results are looked at after that (the flag is set before `enter` waits),
//! which is the second look that `sleep` asks for.
//!
//! Compared with io_uring: two system calls more per blocking socket operation, and two thread
//! switches per disk operation. As many of them are in flight as there are threads ([`THREADS`]).
//! They share the core's processor, so a core that spins (`PollMode::Always`) competes with its own
//! disk: here that mode gains nothing.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::file_threads::{FileThreads, Job};
use super::host::Helpers;
use super::{Completion, Driver, IoOp, MetaOp, Token, Wait};
use crate::remote::{Remote, Shared};

/// File threads of a core, which is also the depth its disk sees. Measured with 4 KiB direct
/// reads on a virtual disk, all threads on one processor: 16 reach 106 k reads/s, 32 reach 126 k
/// at the least processor time per read, 64 reach 132 k at twice the latency.
const THREADS: usize = 32;
/// Operations unfinished at once. Waiting for a socket costs a few words, so this is no limit in
/// practice; it bounds the threads' inbox.
const CAPACITY: usize = 1 << 20;
/// Events taken by one `epoll_wait`.
const EVENTS: usize = 256;
/// A busy core looks at its sockets once in this time.
const LOOK_NS: u64 = 20_000;
/// The event of the core's eventfd; no descriptor has this number.
const WAKE: u64 = u64::MAX;

const READABLE: u32 = libc::EPOLLIN as u32;
const WRITABLE: u32 = libc::EPOLLOUT as u32;

/// The operations that wait for one descriptor, oldest first.
#[derive(Default)]
struct Waiting {
    ops: Vec<(Token, IoOp)>,
    /// A guess whether epoll knows the descriptor; a wrong one costs one system call.
    known: bool,
}

/// See the module text.
pub(crate) struct EpollDriver {
    epoll: OwnedFd,
    shared: Arc<Shared>,
    helpers: Arc<Helpers>,
    threads: FileThreads,
    staged: Vec<(Token, IoOp)>,
    /// On their way to the threads; empty between calls.
    jobs: Vec<Job>,
    /// By descriptor number.
    waiting: Vec<Waiting>,
    /// By token: the descriptor it waits for.
    place: Vec<Option<i32>>,
    /// Operations in `waiting`.
    blocked: usize,
    /// Ended outside `enter`.
    ended: Vec<Completion>,
    events: Vec<libc::epoll_event>,
    looked_ns: u64,
    /// The kernel has `epoll_pwait2`, which takes nanoseconds.
    precise: bool,
}

impl EpollDriver {
    /// Makes the epoll instance and starts the file threads, which inherit the calling
    /// thread's pinning.
    ///
    /// # Errors
    /// When the process has no descriptors or threads left.
    pub fn new(shared: &Arc<Shared>, helpers: &Arc<Helpers>) -> io::Result<EpollDriver> {
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

    /// Starts everything staged.
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
            // What waits for the same goes first. A poll is only asked of epoll.
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

    /// Lets an operation wait for its descriptor.
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

    /// Asks epoll for one event of what the operations of `fd` wait for. Where epoll refuses, they
    /// end: with success for a poll of something that is always readable, else with the error.
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

    /// Tries what waited for `fd` again.
    fn wake(&mut self, fd: i32, events: u32, done: &mut Vec<Completion>) {
        let Some(waiting) = self.waiting.get_mut(fd as usize) else {
            return;
        };
        let failed = events & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0;
        // Once one would block, those behind it that wait for the same would too.
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

    /// Asks epoll, waiting as told.
    fn look(&mut self, wait: Wait, done: &mut Vec<Completion>) -> io::Result<()> {
        self.looked_ns = super::host_now_ns();
        let n = loop {
            let n = self.epoll_wait(wait);
            if n >= 0 {
                break n as usize;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                // A signal: the core looks around.
                Some(libc::EINTR) => return Ok(()),
                // An older kernel, or a filter that does not know the call.
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
            // Up, so that a timer is never early and the core does not wake in vain.
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
            // Sockets block, as io_uring wants it, and `accept` has no flag against that.
            set_nonblocking(fd);
        }
        self.staged.push((token, op));
    }

    fn meta(&mut self, token: Token, op: MetaOp, shared: &Arc<Shared>) {
        let shared = shared.clone();
        self.helpers.run(op, move |answer| shared.post(Remote::Meta(token, answer)));
    }

    fn cancel(&mut self, token: Token) {
        let ended = Completion { token, result: -libc::ECANCELED };
        if let Some(at) = self.staged.iter().position(|(staged, _)| *staged == token) {
            self.staged.remove(at);
            self.ended.push(ended);
        } else if let Some(fd) = self.place.get_mut(token as usize).and_then(Option::take) {
            // The descriptor stays armed; its event will find nothing to do.
            self.waiting[fd as usize].ops.retain(|(waiting, _)| *waiting != token);
            self.blocked -= 1;
            self.ended.push(ended);
        }
        // Else a thread has it, and will be done soon.
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
            self.look(wait, done)?;
        } else if self.blocked > 0 && self.look_is_due() {
            self.look(Wait::No, done)?;
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
    /// Epoll cannot be asked without a system call, so a core that does not sleep asks now and
    /// then.
    fn look_is_due(&self) -> bool {
        super::host_now_ns().saturating_sub(self.looked_ns) >= LOOK_NS
    }
}

/// What a system call returned: a count, a negated error number, or `None` for "would block".
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

/// What an operation waits for.
fn interest(op: &IoOp) -> u32 {
    match op {
        IoOp::Send { .. } | IoOp::SendMsg { .. } => WRITABLE,
        _ => READABLE,
    }
}

/// Does a socket operation if it need not wait.
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
                // SAFETY: null pointers say that the address is not wanted.
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
            // The peer went away between its connection and our accept: there may be a next one.
            Some(error) if error == -libc::ECONNABORTED && matches!(op, IoOp::Accept { .. }) => {}
            outcome => return outcome,
        }
    }
}

/// Reads from the page cache if everything is there; `None` where a thread has to do it.
fn read_cached(fd: i32, iov: *const libc::iovec, n: i32, offset: u64) -> Option<i32> {
    // A direct read would go to the disk, and wait for it here.
    // SAFETY: takes no pointers.
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
    // A short count is the end of the file or the end of what is cached, and one cannot tell
    // which. Errors are for the thread to meet again.
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
