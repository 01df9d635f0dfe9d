//! The io_uring driver: one ring per core.
//!
//! Flags are tried from the full set down (an older kernel returns EINVAL), and the level reached
//! is part of the driver's name. The completion queue is larger than the number of unfinished file
//! operations. The number of descriptors bounds the operations that wait for a peer: if all of them
//! complete together, the kernel keeps the completions for which the queue has no room
//! (`IORING_FEAT_NODROP`, which the driver requires). Under DEFER_TASKRUN completions appear only
//! inside `enter`; `ready` checks the flag that asks for a call.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, register::Restriction, squeue, types};

use super::file_threads::{FileThreads, Job};
use super::host::Helpers;
use super::{Completion, Driver, GATHER_NS, IoOp, MetaOp, Token, Wait};
use crate::driver::remote::{CoreAddress, Remote};
use crate::memory::region::Region;

const SQ_ENTRIES: u32 = 256;
const CQ_ENTRIES: u32 = 8192;
/// Most unfinished operations on files; below `CQ_ENTRIES`, which leaves room for others.
const CAPACITY: usize = 6144;

/// Timeout of an unlimited wait: without a timeout the kernel would never end the wait for several
/// completions after one.
const FOREVER_NS: u64 = 3_600_000_000_000;

const EVENT: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;

/// The io_uring driver of one core.
pub struct UringDriver {
    ring: IoUring,
    /// Registered with the ring as its buffer 0; dropped after the ring.
    region: Option<Rc<Region>>,
    name: &'static str,
    helpers: Arc<Helpers>,
    shared: Arc<CoreAddress>,
    staged: usize,
    event_armed: bool,
    /// Cancellations that wait for room in the submission queue.
    cancels: Vec<Token>,
    /// For operations that need a thread; started with the first of them.
    threads: Option<FileThreads>,
    /// Jobs for the threads.
    jobs: Vec<Job>,
}

/// File threads of a core with a device that needs them; also their depth.
const THREADS: usize = 16;

impl UringDriver {
    /// Makes the ring. Call it on the thread that will use the ring.
    ///
    /// # Errors
    /// `EPERM`, `ENOSYS` and the like where io_uring is forbidden or missing.
    pub(crate) fn new(
        shared: &Arc<CoreAddress>,
        helpers: &Arc<Helpers>,
        confined: bool,
        memory: usize,
    ) -> io::Result<UringDriver> {
        let (ring, name, region) = build(confined, memory)?;
        Ok(UringDriver {
            ring,
            region: region.map(Rc::new),
            name,
            helpers: helpers.clone(),
            shared: shared.clone(),
            staged: 0,
            event_armed: false,
            cancels: Vec::new(),
            threads: None,
            jobs: Vec::new(),
        })
    }

    /// Checks that this system allows a suitable ring.
    ///
    /// # Errors
    /// As for [`UringDriver::new`].
    pub(crate) fn probe(confined: bool) -> io::Result<()> {
        build(confined, 0).map(drop)
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the memory that the entry points to is owned by the core's operation table
            // until the entry's completion has been reaped (see `driver`), or is static.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                self.staged += 1;
                return;
            }
            self.submit_staged();
        }
    }

    /// The entry of a read into registered memory.
    fn fixed(&self, op: IoOp) -> Option<squeue::Entry> {
        let IoOp::Read { fd, ptr, len, offset } = op else { return None };
        let registered = self.region.as_ref()?.contains(ptr, len as usize);
        let entry = || opcode::ReadFixed::new(types::Fd(fd), ptr, len, 0).offset(offset).build();
        registered.then(entry)
    }

    /// Submits staged entries, to make room for more.
    fn submit_staged(&mut self) {
        match self.ring.submit() {
            Ok(taken) => self.staged -= taken.min(self.staged),
            Err(e) if is_transient(&e) => {}
            Err(e) => panic!("io_uring_enter refused to submit: {e}"),
        }
    }

    /// Hands jobs to the threads.
    fn submit_jobs(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        if self.threads.is_none() {
            match FileThreads::start(THREADS, CAPACITY, &self.shared) {
                Ok(threads) => self.threads = Some(threads),
                Err(error) => tracing::error!("cannot start a file thread: {error}"),
            }
        }
        match &mut self.threads {
            Some(threads) => threads.submit(&mut self.jobs),
            // Without threads the ring makes the operation.
            None => {
                for job in std::mem::take(&mut self.jobs) {
                    self.push(&entry(job.op).user_data(u64::from(job.token)));
                }
            }
        }
    }

    fn take_jobs(&mut self, done: &mut Vec<Completion>) {
        if let Some(threads) = &mut self.threads {
            threads.take(done);
        }
    }

    fn arm(&mut self) {
        if !self.event_armed {
            self.event_armed = true;
            let fd = types::Fd(self.shared.event_fd());
            let entry =
                opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build().user_data(EVENT);
            self.push(&entry);
        }
        while let Some(token) = self.cancels.pop() {
            let entry = opcode::AsyncCancel::new(u64::from(token)).build().user_data(CANCEL);
            self.push(&entry);
        }
    }

    /// Appends the completions; true when the core was signalled.
    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        let mut rung = false;
        let mut lost_event = false;
        for cqe in self.ring.completion() {
            match cqe.user_data() {
                EVENT => {
                    rung = true;
                    lost_event |= !io_uring::cqueue::more(cqe.flags());
                }
                CANCEL => {}
                token => done.push(Completion { token: token as Token, result: cqe.result() }),
            }
        }
        if rung {
            self.shared.clear_event();
        }
        if lost_event {
            self.event_armed = false;
        }
        rung
    }
}

/// The operations that [`entry`] and the driver itself use.
const OPERATIONS: [u8; 13] = [
    opcode::Read::CODE,
    opcode::ReadFixed::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fallocate::CODE,
    opcode::Fsync::CODE,
    opcode::Recv::CODE,
    opcode::Send::CODE,
    opcode::SendMsg::CODE,
    opcode::Accept::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
];

/// Restricts a disabled ring to [`OPERATIONS`] permanently, and enables it.
fn restrict(ring: &IoUring) -> io::Result<()> {
    let mut allowed = OPERATIONS.map(Restriction::sqe_op);
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()
}

/// Makes a region for a core with `memory` bytes of buffers and registers it with `ring`. `None` if
/// that is too little memory for one, or if the kernel refuses (a limit on locked memory).
fn register(ring: &IoUring, memory: usize) -> Option<Region> {
    let region = Region::for_pool(memory)?;
    // SAFETY: the driver keeps the region until the ring was closed. The kernel writes to the
    // region only for operations of this ring, and each owns the buffer that it reads into.
    let registered = unsafe { ring.submitter().register_buffers(&[region.as_iovec()]) };
    if let Err(error) = registered {
        tracing::debug!("the kernel registers no read buffers: {error}");
        return None;
    }
    Some(region)
}

/// Makes a ring with the best set of flags that this kernel supports, for a core with `memory`
/// bytes of buffers. Returns its name and its registered memory, too.
fn build(confined: bool, memory: usize) -> io::Result<(IoUring, &'static str, Option<Region>)> {
    let mut last = None;
    for level in 0..3 {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(CQ_ENTRIES);
        let name = match level {
            0 => {
                builder
                    .setup_single_issuer()
                    .setup_defer_taskrun()
                    .setup_taskrun_flag()
                    .setup_submit_all();
                "io_uring (defer_taskrun)"
            }
            1 => {
                builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
                "io_uring (coop_taskrun)"
            }
            _ => "io_uring (plain)",
        };
        if confined {
            builder.setup_r_disabled();
        }
        match builder.build(SQ_ENTRIES) {
            Ok(ring) => {
                let region = register(&ring, memory);
                if confined {
                    restrict(&ring)?;
                }
                if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
                    return Err(io::Error::new(
                        io::ErrorKind::Unsupported,
                        "io_uring of this kernel is too old",
                    ));
                }
                return Ok((ring, name, region));
            }
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => last = Some(e),
            Err(e) => return Err(e),
        }
    }
    Err(last.unwrap_or_else(|| io::ErrorKind::Unsupported.into()))
}

/// Errors of `enter` after which the driver reaps and retries.
fn is_transient(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EBUSY | libc::EAGAIN | libc::EINTR | libc::ETIME | libc::ENOMEM)
    )
}

/// The ring's entry for an operation.
fn entry(op: IoOp) -> squeue::Entry {
    match op {
        IoOp::Read { fd, ptr, len, offset } => {
            opcode::Read::new(types::Fd(fd), ptr, len).offset(offset).build()
        }
        IoOp::Write { fd, ptr, len, offset, durable } => {
            let flags = super::rw_flags(durable);
            opcode::Write::new(types::Fd(fd), ptr, len).offset(offset).rw_flags(flags).build()
        }
        IoOp::ReadV { fd, iov, n, offset, .. } => match single(iov, n) {
            Some((ptr, len)) => opcode::Read::new(types::Fd(fd), ptr, len).offset(offset).build(),
            None => opcode::Readv::new(types::Fd(fd), iov, n.into()).offset(offset).build(),
        },
        IoOp::WriteV { fd, iov, n, offset, .. } => match single(iov, n) {
            Some((ptr, len)) => opcode::Write::new(types::Fd(fd), ptr, len).offset(offset).build(),
            None => opcode::Writev::new(types::Fd(fd), iov, n.into()).offset(offset).build(),
        },
        IoOp::Fallocate { fd, mode, offset, len } => {
            opcode::Fallocate::new(types::Fd(fd), len).offset(offset).mode(mode).build()
        }
        IoOp::SyncData { fd } => {
            opcode::Fsync::new(types::Fd(fd)).flags(types::FsyncFlags::DATASYNC).build()
        }
        IoOp::Recv { fd, ptr, len } => opcode::Recv::new(types::Fd(fd), ptr, len).build(),
        IoOp::Send { fd, ptr, len } => {
            opcode::Send::new(types::Fd(fd), ptr, len).flags(libc::MSG_NOSIGNAL).build()
        }
        IoOp::SendMsg { fd, msg } => {
            opcode::SendMsg::new(types::Fd(fd), msg).flags(libc::MSG_NOSIGNAL as u32).build()
        }
        IoOp::Accept { fd } => {
            opcode::Accept::new(types::Fd(fd), std::ptr::null_mut(), std::ptr::null_mut())
                .flags(libc::SOCK_CLOEXEC)
                .build()
        }
        IoOp::PollIn { fd } => opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).build(),
    }
}

/// The piece of a vector of length 1, which the kernel need not copy.
fn single(iov: *const libc::iovec, n: u16) -> Option<(*mut u8, u32)> {
    if n != 1 {
        return None;
    }
    // SAFETY: `iov` points to `n` pieces in a queue's slot, which keeps them until the completion
    // has been reaped; this operation has not been handed over yet.
    let piece = unsafe { *iov };
    Some((piece.iov_base.cast(), u32::try_from(piece.iov_len).ok()?))
}

impl Driver for UringDriver {
    fn name(&self) -> &'static str {
        self.name
    }

    fn stage(&mut self, token: Token, op: IoOp) {
        if let IoOp::ReadV { threads: true, .. } | IoOp::WriteV { threads: true, .. } = op {
            self.jobs.push(Job { token, op });
        } else {
            let entry = self.fixed(op).unwrap_or_else(|| entry(op));
            self.push(&entry.user_data(u64::from(token)));
        }
    }

    fn region(&self) -> Option<Rc<Region>> {
        self.region.clone()
    }

    fn meta(&mut self, token: Token, op: MetaOp, shared: &Arc<CoreAddress>) {
        let shared = shared.clone();
        self.helpers.run(op, move |answer| shared.post(Remote::Meta(token, answer)));
    }

    fn cancel(&mut self, token: Token) {
        self.cancels.push(token);
    }

    fn submit(&mut self) {
        self.submit_jobs();
        if self.staged > 0 {
            self.submit_staged();
        }
    }

    fn staged(&self) -> usize {
        self.staged + self.cancels.len() + self.jobs.len()
    }

    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn enter(&mut self, wait: Wait, at_least: usize, done: &mut Vec<Completion>) -> io::Result<()> {
        self.submit_jobs();
        self.arm();
        let rung = self.reap(done);
        self.take_jobs(done);
        // The signal has been taken: the core must check for work before a wait.
        let wait = if done.is_empty() && !rung { wait } else { Wait::No };
        let result = match wait {
            Wait::No => {
                // One call submits and posts pending completions: GETEVENTS without waiting.
                // SAFETY: no signal mask and no argument structure are passed.
                unsafe {
                    self.ring.submitter().enter::<libc::sigset_t>(
                        self.staged as u32,
                        0,
                        GETEVENTS,
                        None,
                    )
                }
            }
            Wait::Forever | Wait::Ns(_) => {
                let ns = if let Wait::Ns(ns) = wait { ns } else { FOREVER_NS };
                let timeout = types::Timespec::from(Duration::from_nanos(ns));
                let mut args = types::SubmitArgs::new().timespec(&timeout);
                // Kernels from 6.12 on can wait for several completions with a timeout, and then
                // for one.
                let gather = at_least > 1 && self.ring.params().is_feature_min_timeout();
                if gather {
                    args = args.min_wait_usec((GATHER_NS / 1000) as u32);
                }
                self.ring.submitter().submit_with_args(if gather { at_least } else { 1 }, &args)
            }
        };
        match result {
            Ok(taken) => self.staged -= taken.min(self.staged),
            // ETIME: all entries were taken before the wait began.
            Err(e) if e.raw_os_error() == Some(libc::ETIME) => {
                self.staged = self.ring.submission().len();
            }
            Err(e) if is_transient(&e) => self.staged = self.ring.submission().len(),
            Err(e) => return Err(e),
        }
        self.reap(done);
        self.take_jobs(done);
        Ok(())
    }

    fn ready(&mut self) -> bool {
        let flagged = {
            let sq = self.ring.submission();
            sq.taskrun() || sq.cq_overflow()
        };
        flagged
            || !self.ring.completion().is_empty()
            || self.threads.as_ref().is_some_and(FileThreads::pure_check)
    }

    fn now_ns(&mut self) -> u64 {
        super::host_now_ns()
    }

    fn unix_time_ms(&mut self) -> u64 {
        super::host_unix_time_ms()
    }
}

/// `IORING_ENTER_GETEVENTS`.
const GETEVENTS: u32 = 1;

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;
    use crate::channels::mesh::Mesh;
    use crate::core::{Core, CoreConfig};
    use crate::flow::Board;
    use crate::idle::PollMode;
    use crate::memory::buf::Buf;
    use crate::runtime::block_on;

    const READS: usize = 64;
    const LEN: usize = 256 << 10;

    /// A file beside the test program, where direct I/O works. Removed when dropped.
    struct Scratch(std::path::PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let dir = std::env::current_exe().unwrap().parent().unwrap().to_owned();
            Scratch(dir.join(format!("{name}-{}", std::process::id())))
        }
    }

    impl Drop for Scratch {
        #[expect(clippy::disallowed_methods, reason = "a file of the host, for this test")]
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[expect(clippy::disallowed_methods, reason = "a file of the host, for this test")]
    fn write_scratch() -> Scratch {
        use std::io::Write;
        let scratch = Scratch::new("uring-in-flight");
        let options = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).clone();
        let mut file = options.open(&scratch.0).unwrap();
        for n in 0..READS {
            file.write_all(&vec![n as u8 + 1; LEN]).unwrap();
        }
        file.sync_all().unwrap();
        scratch
    }

    /// Without waiting for completions, up to 62 of these 64 reads wrote to freed memory: closing a
    /// ring does not wait, and a cancellation does not end a disk read.
    #[test]
    fn a_core_that_stops_with_64_large_reads_in_flight_frees_no_buffer_before_its_completion() {
        let scratch = write_scratch();
        // On a busy machine the disk may be faster than this thread.
        for _ in 0..20 {
            match stop_with_reads_in_flight(&scratch.0) {
                Some(0) => {}
                Some(_) | None => return,
            }
        }
        panic!("the reads were over before the core stopped, twenty times");
    }

    #[test]
    fn a_confined_ring_makes_no_socket_and_opens_no_file() {
        let Ok((mut ring, ..)) = build(true, 0) else {
            eprintln!("skipped: io_uring is not available here");
            return;
        };
        let socket = opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build();
        let at = types::Fd(libc::AT_FDCWD);
        let open = opcode::OpenAt::new(at, c"/etc/passwd".as_ptr()).build();
        for entry in [socket, open] {
            // SAFETY: the entries point to nothing, or to a string of the program.
            unsafe { ring.submission().push(&entry) }.unwrap();
            ring.submit_and_wait(1).unwrap();
            let result = ring.completion().next().unwrap().result();
            assert_eq!(result, -libc::EACCES);
        }
    }

    #[test]
    fn only_reads_into_the_region_are_fixed_and_a_ring_that_registers_nothing_has_none() {
        const MEMORY: usize = 256 << 20;
        let helpers = Arc::new(Helpers::start(1).unwrap());
        let (shared, _inbox) = CoreAddress::new().unwrap();
        let Ok(mut driver) = UringDriver::new(&shared, &helpers, false, MEMORY) else {
            eprintln!("skipped: io_uring is not available here");
            return;
        };
        let read = |ptr: *mut u8, len| IoOp::Read { fd: 0, ptr, len, offset: 0 };
        let base: *mut u8 = Region::for_pool(MEMORY).unwrap().as_iovec().iov_base.cast();
        assert!(driver.fixed(read(base, 512)).is_none(), "another region");
        if let Some(region) = &driver.region {
            let all = region.as_iovec();
            let (base, len): (*mut u8, _) = (all.iov_base.cast(), all.iov_len as u32);
            assert!(driver.fixed(read(base, len)).is_some());
            assert!(driver.fixed(read(base.wrapping_add(512), len - 512)).is_some());
            assert!(driver.fixed(read(base.wrapping_add(512), len)).is_none());
            assert!(driver.fixed(read(base.wrapping_sub(512), 512)).is_none());
            let write = IoOp::Write { fd: 0, ptr: base, len: 512, offset: 0, durable: false };
            assert!(driver.fixed(write).is_none());
            // The kernel refuses a second registration.
            assert!(register(&driver.ring, MEMORY).is_none());
        }
        driver.region = None;
        assert!(driver.fixed(read(base, 512)).is_none());
    }

    /// Returns how many reads were in flight when the core stopped; `None` without io_uring.
    fn stop_with_reads_in_flight(path: &std::path::Path) -> Option<usize> {
        let helpers = Arc::new(Helpers::start(1).unwrap());
        let (shared, inbox) = CoreAddress::new().unwrap();
        let driver = match UringDriver::new(&shared, &helpers, true, READS * LEN) {
            Ok(driver) => driver,
            Err(e) => {
                // Containers forbid it; the epoll driver's tests cover this.
                eprintln!("skipped: io_uring is not available here: {e}");
                return None;
            }
        };
        let config = CoreConfig {
            id: 0,
            cores: 1,
            memory: READS * LEN,
            disk_depth: 2 * READS,
            poll: PollMode::Never,
            seed: 1,
            board: Arc::new(Board::new(1)),
        };
        let mesh = Mesh::connect(std::slice::from_ref(&shared)).remove(0);
        let core = Core::new(config, shared, inbox, Box::new(driver), mesh);
        let pool = core.pool().clone();

        let (inner, path) = (core.clone(), path.to_owned());
        let started = block_on(&core, async move {
            let file = inner.attach(&inner.open(&path, false).await.unwrap());
            assert!(file.alignment() > 1, "the file is read directly");
            for n in 0..READS {
                let buf = inner.alloc(LEN).unwrap();
                file.read_at((n * LEN) as u64, buf).start();
            }
            assert!(inner.alloc(LEN).is_none(), "all memory belongs to the dropped reads");
            inner.operations_in_flight()
        });
        assert_eq!(started, READS);
        let in_flight = core.operations_in_flight();
        assert_eq!(pool.used(), in_flight * LEN, "only completed reads gave their buffer back");

        assert!(core.shut_down(30_000_000_000), "the disk answers within 30 s");
        assert_eq!((core.operations_in_flight(), pool.used()), (0, 0));
        drop(core);

        // The ring is closed and the buffers are free: a new owner has them exclusively.
        let mut bufs: Vec<Buf> = (0..READS).map(|_| pool.alloc(LEN).unwrap()).collect();
        for buf in &mut bufs {
            buf.fill(0xEE);
        }
        #[expect(clippy::disallowed_methods, reason = "gives a late write the time to show")]
        std::thread::sleep(std::time::Duration::from_millis(300));
        let touched = bufs.iter().filter(|buf| buf.iter().any(|&byte| byte != 0xEE)).count();
        assert_eq!(touched, 0, "buffers written to after they were freed");
        Some(in_flight)
    }
}
