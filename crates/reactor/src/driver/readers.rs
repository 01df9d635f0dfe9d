//! The threads that read files for the epoll driver: `epoll` cannot wait for a disk, so somebody
//! has to block in `pread`.
//!
//! 1. The core hands over what a turn has gathered, under one lock, and wakes as many threads as
//!    there are reads, if that many are idle.
//! 2. A thread takes one read, blocks in it, and posts its result to the core's mailbox of
//!    results; if the core sleeps, it is woken through its eventfd, once.
//! 3. The core takes the results in its next `enter`.
//!
//! The threads run on the core's own processor (they inherit its pinning), so the core meets the
//! queue's lock held only when it has preempted its holder.
//!
//! What always holds: a buffer is touched by the kernel only between the taking of its read and
//! the posting of its result; so when all results are in, all buffers are the core's again.
//! Dropping the pool waits for the reads that threads are in, and forgets those that wait.

use std::io;
use std::sync::Arc;

use super::queue::Queue;
use super::{Completion, Token};
use crate::mailbox::{Mailbox, Owner, mailbox};
use crate::remote::Shared;

/// A read on its way to a thread.
pub(super) struct Job {
    pub token: Token,
    pub fd: i32,
    pub ptr: *mut u8,
    pub len: u32,
    pub offset: u64,
}

// SAFETY: `ptr` is the only part that is not plain data. It points into a buffer that the core's
// operation table owns and leaves alone until this job's result has been posted (see `driver`),
// and exactly one thread has the job. So the pointer may be used on that thread.
unsafe impl Send for Job {}

impl Job {
    /// Reads, blocking: the count, or the negated error number.
    fn run(&self) -> i32 {
        let Ok(offset) = libc::off64_t::try_from(self.offset) else {
            return -libc::EINVAL;
        };
        loop {
            // SAFETY: `ptr` is valid for writes of `len` bytes and nobody else uses them until
            // the result is posted: see `Send` above.
            let n = unsafe { libc::pread64(self.fd, self.ptr.cast(), self.len as usize, offset) };
            match super::epoll::outcome(n) {
                Some(error) if error == -libc::EINTR => {}
                // A file that would block in spite of its kind; poll would say the same.
                None => return -libc::EAGAIN,
                Some(result) => return result,
            }
        }
    }
}

/// See the module text.
pub(super) struct Readers {
    queue: Arc<Queue<Job>>,
    threads: Vec<std::thread::JoinHandle<()>>,
    results: Owner<Completion>,
}

impl Readers {
    /// Starts `threads` threads for a core that has at most `capacity` reads unfinished.
    ///
    /// # Errors
    /// When a thread cannot be started.
    #[expect(clippy::disallowed_methods, reason = "the reactor is where threads are started")]
    pub fn start(threads: usize, capacity: usize, core: &Arc<Shared>) -> io::Result<Readers> {
        let (post, results) = mailbox(capacity);
        let mut readers = Readers {
            queue: Arc::new(Queue::new()),
            threads: Vec::with_capacity(threads),
            results,
        };
        for n in 0..threads {
            let (queue, post, core) = (readers.queue.clone(), post.clone(), core.clone());
            let thread = std::thread::Builder::new()
                .name(format!("millrace-read{n}"))
                // A read needs next to no stack.
                .stack_size(64 << 10)
                .spawn(move || serve(&queue, &post, &core))?;
            // If a later one fails, dropping `readers` stops those that run.
            readers.threads.push(thread);
        }
        Ok(readers)
    }

    /// Hands `jobs` over and leaves it empty.
    pub fn submit(&self, jobs: &mut Vec<Job>) {
        self.queue.push(jobs.drain(..));
    }

    /// Appends the results that are in.
    pub fn take(&mut self, done: &mut Vec<Completion>) {
        // Scheduled or not: the core looks here in every `enter`, and before it waits.
        let _ = self.results.take(usize::MAX, &mut |result| done.push(result));
    }

    /// Whether there are any.
    pub fn pure_check(&self) -> bool {
        self.results.pure_check()
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.queue.stop();
        for thread in self.threads.drain(..) {
            // The threads do not panic; if one did, there is nothing left to save.
            let _ = thread.join();
        }
    }
}

/// What a thread does until the pool is dropped.
fn serve(queue: &Queue<Job>, post: &Mailbox<Completion>, core: &Shared) {
    while let Some(job) = queue.pop() {
        let result = Completion { token: job.token, result: job.run() };
        // Never full: it has room for as many as the core may have unfinished. Closed: the pool
        // is being dropped.
        if post.post(result).is_ok() {
            core.wake_if_asleep();
        }
    }
}
