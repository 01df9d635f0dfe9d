//! The threads that read, write and sync files for the epoll driver: `epoll` cannot wait for a
//! disk, so a thread must block in `pread`, `pwrite` and `fdatasync`.
//!
//! 1. The core hands over a turn's operations under one lock, and wakes one idle thread for each of
//!    them.
//! 2. A thread takes one operation, blocks in it, and sends its result to the core's inbox of
//!    results; if the core sleeps, it is woken through its eventfd, once.
//! 3. The core takes the results in its next `enter`.
//!
//! The threads run on the core's own processor (they inherit its pinning), so the core meets the
//! queue's lock held only when it has preempted its holder.
//!
//! Invariant: the kernel touches a buffer only between the taking of its operation and the posting
//! of its result; so when all results are in, all buffers are the core's again. Dropping the pool
//! waits for running operations and drops waiting ones.

use std::io;
use std::sync::Arc;

use super::queue::Queue;
use super::{Completion, IoOp, Token};
use crate::driver::remote::CoreAddress;
use crate::inbox::{Inbox, Sender, inbox};

/// An operation on a file, for a thread.
pub(super) struct Job {
    pub token: Token,
    pub op: IoOp,
}

// SAFETY: a job's operation is on a file (`run` refuses others), so the only parts that are not
// plain data are a read's and a write's `ptr` or `iov`. They point into a buffer that the core's
// operation table owns, or to the pieces that a queue's slot keeps, whose memory its submitter
// keeps valid; all that stays until this job's result has been posted (see `driver`), and exactly
// one thread has the job. So the pointers may be used on that thread.
unsafe impl Send for Job {}

impl Job {
    /// Makes the call, blocking: returns the count, or the negated error number.
    fn run(&self) -> i32 {
        loop {
            match self.attempt().map(super::epoll::outcome) {
                Ok(Some(error)) if error == -libc::EINTR => {}
                Ok(Some(result)) => return result,
                // A file that would block in spite of its kind; poll would say the same.
                Ok(None) => return -libc::EAGAIN,
                Err(errno) => return -errno,
            }
        }
    }

    /// What the system call returns, or an error number without one.
    fn attempt(&self) -> Result<isize, i32> {
        let place = |offset| libc::off64_t::try_from(offset).map_err(|_| libc::EINVAL);
        match self.op {
            IoOp::Read { fd, ptr, len, offset } => {
                let offset = place(offset)?;
                // SAFETY: `ptr` is valid for writes of `len` bytes and nobody else uses them
                // until the result is posted: see `Send` above.
                Ok(unsafe { libc::pread64(fd, ptr.cast(), len as usize, offset) })
            }
            IoOp::Write { fd, ptr, len, offset, durable } => {
                let offset = place(offset)?;
                let flags = super::rw_flags(durable);
                let piece = libc::iovec { iov_base: ptr.cast_mut().cast(), iov_len: len as usize };
                // SAFETY: a pointer to one live piece; `ptr` is valid for reads of `len`
                // initialised bytes and nobody writes to them until the result is
                // posted: see `Send` above.
                Ok(unsafe { libc::pwritev2(fd, &raw const piece, 1, offset, flags) })
            }
            IoOp::ReadV { fd, iov, n, offset, .. } => {
                let offset = place(offset)?;
                // SAFETY: `iov` points to `n` pieces that are valid for writes until the result
                // is posted: see `Send` above.
                Ok(unsafe { libc::preadv64(fd, iov, n.into(), offset) })
            }
            IoOp::WriteV { fd, iov, n, offset, .. } => {
                let offset = place(offset)?;
                // SAFETY: as above, valid for reads.
                Ok(unsafe { libc::pwritev64(fd, iov, n.into(), offset) })
            }
            IoOp::Fallocate { fd, mode, offset, len } => {
                let (offset, len) = (place(offset)?, place(len)?);
                // SAFETY: takes no pointers.
                Ok(unsafe { libc::fallocate64(fd, mode, offset, len) } as isize)
            }
            // SAFETY: takes no pointers.
            IoOp::SyncData { fd } => Ok(unsafe { libc::fdatasync(fd) } as isize),
            IoOp::Recv { .. }
            | IoOp::Send { .. }
            | IoOp::SendMsg { .. }
            | IoOp::Accept { .. }
            | IoOp::PollIn { .. } => Err(libc::EINVAL),
        }
    }
}

/// A core's file threads. Each is started when an operation finds none idle.
pub(super) struct FileThreads {
    queue: Arc<Queue<Job>>,
    threads: Vec<std::thread::JoinHandle<()>>,
    most: usize,
    sender: Sender<Completion>,
    results: Inbox<Completion>,
    core: Arc<CoreAddress>,
}

impl FileThreads {
    /// Starts the first of at most `most` threads for a core that has at most `capacity` operations
    /// unfinished.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(most: usize, capacity: usize, core: &Arc<CoreAddress>) -> io::Result<FileThreads> {
        let (sender, results) = inbox(capacity);
        let mut pool = FileThreads {
            queue: Arc::new(Queue::new()),
            threads: Vec::new(),
            most,
            sender,
            results,
            core: core.clone(),
        };
        pool.start_one()?;
        Ok(pool)
    }

    #[expect(clippy::disallowed_methods, reason = "the reactor is where threads are started")]
    fn start_one(&mut self) -> io::Result<()> {
        let (queue, sender) = (self.queue.clone(), self.sender.clone());
        let core = self.core.clone();
        let thread = std::thread::Builder::new()
            .name(format!("millrace-file{}", self.threads.len()))
            // A system call needs almost no user stack.
            .stack_size(64 << 10)
            .spawn(move || serve(&queue, &sender, &core))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Hands over all `jobs` and empties the vector.
    pub fn submit(&mut self, jobs: &mut Vec<Job>) {
        let waiting = self.queue.push(jobs.drain(..));
        for _ in 0..waiting.min(self.most - self.threads.len()) {
            if let Err(error) = self.start_one() {
                // Those that run do the work.
                tracing::debug!("cannot start another file thread: {error}");
                break;
            }
        }
    }

    /// Appends the results that have arrived.
    pub fn take(&mut self, done: &mut Vec<Completion>) {
        // The core checks here in every `enter`, and before it waits.
        done.extend(std::iter::from_fn(|| self.results.pop()));
    }

    /// Whether results have arrived.
    pub fn pure_check(&self) -> bool {
        self.results.pure_check()
    }
}

impl Drop for FileThreads {
    fn drop(&mut self) {
        self.queue.stop();
        for thread in self.threads.drain(..) {
            // The threads do not panic; if one did, nothing can be saved.
            let _ = thread.join();
        }
    }
}

/// Runs jobs until the pool is dropped.
fn serve(queue: &Queue<Job>, sender: &Sender<Completion>, core: &CoreAddress) {
    while let Some(job) = queue.pop() {
        let result = Completion { token: job.token, result: job.run() };
        // Never full: it has room for all unfinished operations. Closed: the pool is being dropped.
        if sender.send(result).is_ok() {
            core.wake_if_asleep();
        }
    }
}
