//! The queue between cores and threads that may block: name operations go through one to the
//! helpers (`host`), operations on files of the epoll driver through another to its threads
//! (`file_threads`).
//!
//! This is the one place where a core takes a lock. It is held for a few instructions, and never
//! by a thread that blocks.
//!
//! The queue has no bound of its own: each job stands for an operation in its core's operation
//! table, which has one.

use std::collections::VecDeque;
use std::sync::PoisonError;

struct Jobs<J> {
    waiting: VecDeque<J>,
    /// Threads in `pop` that found nothing.
    idle: usize,
    stopped: bool,
}

/// A queue of jobs for threads.
#[expect(clippy::disallowed_types, reason = "its threads may block; see the module text")]
pub(super) struct Queue<J> {
    jobs: std::sync::Mutex<Jobs<J>>,
    wake: std::sync::Condvar,
}

impl<J> Queue<J> {
    #[expect(clippy::disallowed_types, reason = "as above")]
    pub fn new() -> Queue<J> {
        let jobs = Jobs { waiting: VecDeque::new(), idle: 0, stopped: false };
        Queue { jobs: std::sync::Mutex::new(jobs), wake: std::sync::Condvar::new() }
    }

    fn with<R>(&self, f: impl FnOnce(&mut Jobs<J>) -> R) -> R {
        f(&mut self.jobs.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Appends `jobs` and wakes as many idle threads as there are jobs. Returns how many jobs wait
    /// for a thread that is busy.
    pub fn push(&self, jobs: impl ExactSizeIterator<Item = J>) -> usize {
        let n = jobs.len();
        let (waiting, idle) = self.with(|queue| {
            queue.waiting.extend(jobs);
            (queue.waiting.len(), queue.idle)
        });
        for _ in 0..n.min(idle) {
            self.wake.notify_one();
        }
        waiting.saturating_sub(idle)
    }

    /// Waits for a job and takes the oldest; `None` once the queue has been stopped.
    pub fn pop(&self) -> Option<J> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if jobs.stopped {
                return None;
            }
            if let Some(job) = jobs.waiting.pop_front() {
                return Some(job);
            }
            jobs.idle += 1;
            jobs = self.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            jobs.idle -= 1;
        }
    }

    /// Drops the waiting jobs and makes every `pop` return `None`.
    pub fn stop(&self) {
        let waiting = self.with(|queue| {
            queue.stopped = true;
            std::mem::take(&mut queue.waiting)
        });
        self.wake.notify_all();
        drop(waiting);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_that_wait_for_a_thread_are_counted() {
        let queue = Queue::new();
        assert_eq!(queue.push([1, 2].into_iter()), 2);
        assert_eq!(queue.pop(), Some(1));
        assert_eq!(queue.push(std::iter::once(3)), 2, "2 waits, too");
        queue.with(|jobs| jobs.idle = 2);
        assert_eq!(queue.push(std::iter::once(4)), 1);
    }
}
