//! Waiting for a condition that other threads change: [`Event`](crate::Event) between threads, for
//! conditions that seldom need a wait.
//!
//! 1. [`Waiters::wait_for`] makes its attempt. If that fails, it enters its waker into the list and
//!    tries once more.
//! 2. The code that changes the condition calls [`Waiters::notify_all`] afterwards. While nobody
//!    waits, that is one fence and one load.
//!
//! **Why no change is missed**: the waiter enters the list, then tries; the other thread makes its
//! change, then looks at the list. Each has a `SeqCst` fence between its two steps. One of the
//! fences comes first: if it is the waiter's, the other thread sees the waiter; if it is the other
//! thread's, the attempt sees the change.
//!
//! All waiters are woken, and those that fail again enter the list again. So a waiter that is
//! dropped owes nothing to the others.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

#[expect(clippy::disallowed_types, reason = "taken only by those that wait, and to wake them")]
use loomable::Mutex;
use loomable::{AtomicUsize, Ordering, fence_seq_cst};

/// The list of those that wait for one condition.
#[derive(Default)]
pub struct Waiters {
    /// Length of the list.
    waiting: AtomicUsize,
    #[expect(clippy::disallowed_types, reason = "taken only by those that wait, and to wake them")]
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    next: u64,
    wakers: Vec<(u64, Waker)>,
}

impl Waiters {
    /// A list without waiters.
    pub fn new() -> Waiters {
        Waiters::default()
    }

    /// Waits until `attempt` returns a value. Others must call [`Waiters::notify_all`] after each
    /// change that can make it do so.
    pub fn wait_for<T, F: FnMut() -> Option<T>>(&self, attempt: F) -> WaitFor<'_, F> {
        WaitFor { waiters: self, attempt, entered: None }
    }

    /// Wakes all that wait. Call it after the change.
    #[inline]
    pub fn notify_all(&self) {
        fence_seq_cst("waiters.no_notifier_fence");
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.wake_all();
        }
    }

    #[cold]
    fn wake_all(&self) {
        let wakers = self.with_list(|list| std::mem::take(&mut list.wakers));
        for (_, waker) in wakers {
            waker.wake();
        }
    }

    fn with_list<R>(&self, change: impl FnOnce(&mut List) -> R) -> R {
        let mut list = self.list.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let result = change(&mut list);
        self.waiting.store(list.wakers.len(), Ordering::Relaxed);
        result
    }
}

impl fmt::Debug for Waiters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiters").field("waiting", &self.waiting).finish_non_exhaustive()
    }
}

/// See [`Waiters::wait_for`].
#[must_use = "it waits only when awaited"]
pub struct WaitFor<'a, F> {
    waiters: &'a Waiters,
    attempt: F,
    /// Its number in the list.
    entered: Option<u64>,
}

impl<F> WaitFor<'_, F> {
    fn leave(&mut self) {
        if let Some(number) = self.entered.take() {
            self.waiters.with_list(|list| list.wakers.retain(|(other, _)| *other != number));
        }
    }
}

impl<T, F: FnMut() -> Option<T> + Unpin> Future for WaitFor<'_, F> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let this = &mut *self;
        if let Some(value) = (this.attempt)() {
            return Poll::Ready(value);
        }
        this.leave();
        this.entered = Some(this.waiters.with_list(|list| {
            list.next += 1;
            list.wakers.push((list.next, cx.waker().clone()));
            list.next
        }));
        fence_seq_cst("waiters.no_waiter_fence");
        match (this.attempt)() {
            Some(value) => Poll::Ready(value),
            None => Poll::Pending,
        }
    }
}

impl<F> Drop for WaitFor<'_, F> {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll<T>(future: Pin<&mut impl Future<Output = T>>, wakes: &Arc<Wakes>) -> Option<T> {
        match future.poll(&mut Context::from_waker(&Waker::from(wakes.clone()))) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn all_waiters_are_woken_and_those_that_fail_wait_again() {
        let (waiters, room, wakes) = (Waiters::new(), AtomicUsize::new(0), Arc::default());
        let take = || {
            room.load(Ordering::Relaxed).checked_sub(1).map(|left| {
                room.store(left, Ordering::Relaxed);
            })
        };
        let (mut first, mut second) = (pin!(waiters.wait_for(take)), pin!(waiters.wait_for(take)));
        assert!(poll(first.as_mut(), &wakes).is_none() && poll(second.as_mut(), &wakes).is_none());
        room.store(1, Ordering::Relaxed);
        waiters.notify_all();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
        assert!(poll(second.as_mut(), &wakes).is_some() && poll(first.as_mut(), &wakes).is_none());
        room.store(1, Ordering::Relaxed);
        waiters.notify_all();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 3);
        assert!(poll(first.as_mut(), &wakes).is_some());
    }

    #[test]
    fn a_dropped_waiter_leaves_the_list() {
        let (waiters, wakes) = (Waiters::new(), Arc::default());
        {
            let mut waiting = pin!(waiters.wait_for(|| None::<()>));
            assert!(poll(waiting.as_mut(), &wakes).is_none());
            assert!(poll(waiting.as_mut(), &wakes).is_none());
            assert_eq!(waiters.with_list(|list| list.wakers.len()), 1);
        }
        waiters.notify_all();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
    }
}
