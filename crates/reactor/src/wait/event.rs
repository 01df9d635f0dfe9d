//! A condition variable for the tasks of one core.
//!
//! The condition itself lives in cells of the caller. The code that changes it calls
//! [`Event::notify`] or [`Event::notify_all`]; a task waits with [`Event::wait_until`].
//!
//! No notification is lost: a waiter is registered before control returns to the loop, and all code
//! of the core runs between two polls. A waiter that is dropped after [`Event::notify`] chose it
//! passes the notification on to the next one. An event has no memory: a notification without a
//! waiter does nothing, because the next waiter checks its condition first.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Wakes the tasks of one core that wait for a condition.
#[derive(Default)]
pub struct Event {
    /// In the order of their numbers, which is the order in which they began to wait.
    waiters: RefCell<VecDeque<Waiter>>,
    /// Number of the next waiter.
    next: Cell<u64>,
    /// All waiters with lower numbers have been notified by `notify_all`.
    all_below: Cell<u64>,
}

struct Waiter {
    number: u64,
    /// `None` until the first poll.
    waker: Option<Waker>,
}

impl Event {
    /// An event without waiters.
    pub const fn new() -> Event {
        Event {
            waiters: RefCell::new(VecDeque::new()),
            next: Cell::new(0),
            all_below: Cell::new(0),
        }
    }

    /// Wakes the task that has waited longest.
    pub fn notify(&self) {
        let waiter = self.waiters.borrow_mut().pop_front();
        if let Some(Waiter { waker: Some(waker), .. }) = waiter {
            waker.wake();
        }
    }

    /// Wakes all tasks that wait now.
    pub fn notify_all(&self) {
        let end = self.next.get();
        self.all_below.set(end);
        let next = || self.waiters.borrow_mut().pop_front_if(|waiter| waiter.number < end);
        while let Some(waiter) = next() {
            if let Some(waker) = waiter.waker {
                waker.wake();
            }
        }
    }

    /// Waits for the next notification. The waiter is registered by this call, not by the first
    /// poll: a notification in between ends the wait.
    pub fn wait(&self) -> Wait<'_> {
        let number = self.next.get();
        self.next.set(number + 1);
        self.waiters.borrow_mut().push_back(Waiter { number, waker: None });
        Wait { event: self, number, notified: false }
    }

    /// Waits until `ready` returns true. It is called in every poll of this future, so the event
    /// must be notified after each change that can make it true.
    pub async fn wait_until(&self, mut ready: impl FnMut() -> bool) {
        self.wait_for(|| ready().then_some(())).await;
    }

    /// Waits until `take` returns a value, and returns it. See [`Event::wait_until`].
    pub async fn wait_for<T>(&self, mut take: impl FnMut() -> Option<T>) -> T {
        let mut wait: Option<Wait<'_>> = None;
        poll_fn(|cx| {
            // A notification counts as used before `take` is called: if it finds nothing, this
            // waiter registers again, after all others.
            if wait.as_mut().is_some_and(|wait| wait.poll_notified(cx)) {
                wait = None;
            }
            if let Some(value) = take() {
                return Poll::Ready(value);
            }
            if wait.is_none() {
                wait.insert(self.wait()).poll_notified(cx);
            }
            Poll::Pending
        })
        .await
    }

    /// Position of a waiter in the queue; `None` if it has been notified.
    fn position(&self, number: u64) -> Option<usize> {
        self.waiters.borrow().binary_search_by_key(&number, |waiter| waiter.number).ok()
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("waiters", &self.waiters.borrow().len()).finish()
    }
}

/// A wait for one notification of an [`Event`].
#[must_use = "it waits only when awaited"]
pub struct Wait<'a> {
    event: &'a Event,
    number: u64,
    notified: bool,
}

impl Wait<'_> {
    fn poll_notified(&mut self, cx: &mut Context<'_>) -> bool {
        if self.notified {
            return true;
        }
        match self.event.position(self.number) {
            None => self.notified = true,
            Some(at) => {
                let known = &mut self.event.waiters.borrow_mut()[at].waker;
                if known.as_ref().is_none_or(|known| !known.will_wake(cx.waker())) {
                    *known = Some(cx.waker().clone());
                }
            }
        }
        self.notified
    }
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.poll_notified(cx) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if self.notified {
            return;
        }
        match self.event.position(self.number) {
            Some(at) => drop(self.event.waiters.borrow_mut().remove(at)),
            None if self.number >= self.event.all_below.get() => self.event.notify(),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
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
    fn a_wait_counts_notifications_from_its_creation() {
        let event = Event::new();
        event.notify();
        event.notify_all();
        let wakes = Arc::new(Wakes::default());
        let mut late = pin!(event.wait());
        assert!(poll(late.as_mut(), &wakes).is_none());
        let mut unpolled = pin!(event.wait());
        event.notify_all();
        assert!(poll(unpolled.as_mut(), &wakes).is_some());
        assert!(poll(late.as_mut(), &wakes).is_some());
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn notify_wakes_waiters_one_by_one_in_order() {
        let event = Event::new();
        let wakes: Vec<_> = (0..3).map(|_| Arc::new(Wakes::default())).collect();
        let mut waits: Vec<_> = (0..3).map(|_| Box::pin(event.wait())).collect();
        for (wait, wakes) in waits.iter_mut().zip(&wakes) {
            assert!(poll(wait.as_mut(), wakes).is_none());
        }
        for nth in 0..3 {
            event.notify();
            let woken: Vec<_> = wakes.iter().map(|w| w.0.load(Ordering::Relaxed)).collect();
            assert_eq!(woken, (0..3).map(|n| usize::from(n <= nth)).collect::<Vec<_>>());
            assert!(poll(waits[nth].as_mut(), &wakes[nth]).is_some());
        }
    }

    #[test]
    fn a_dropped_waiter_passes_its_notification_on() {
        let event = Event::new();
        let wakes = Arc::new(Wakes::default());
        let (first, mut second) = (event.wait(), Box::pin(event.wait()));
        assert!(poll(second.as_mut(), &wakes).is_none());
        event.notify();
        assert!(poll(second.as_mut(), &wakes).is_none());
        drop(first);
        assert!(poll(second.as_mut(), &wakes).is_some());
        // One that was not notified takes nothing with it.
        let (first, mut second) = (event.wait(), Box::pin(event.wait()));
        drop(first);
        event.notify();
        assert!(poll(second.as_mut(), &wakes).is_some());
        assert!(event.waiters.borrow().is_empty());
    }

    #[test]
    fn a_waiter_dropped_after_notify_all_wakes_no_later_one() {
        let event = Event::new();
        let wakes = Arc::new(Wakes::default());
        let first = event.wait();
        event.notify_all();
        let mut later = pin!(event.wait());
        drop(first);
        assert!(poll(later.as_mut(), &wakes).is_none());
    }

    #[test]
    fn the_condition_form_checks_first_and_after_each_notification() {
        let (event, value) = (Rc::new(Event::new()), Cell::new(0));
        let wakes = Arc::new(Wakes::default());
        assert!(poll(pin!(event.wait_until(|| true)), &wakes).is_some());
        let mut even = pin!(event.wait_for(|| (value.get() == 2).then(|| value.take())));
        for _ in 0..2 {
            assert!(poll(even.as_mut(), &wakes).is_none());
            value.set(value.get() + 1);
            event.notify();
        }
        assert_eq!(poll(even.as_mut(), &wakes), Some(2));
        assert_eq!((wakes.0.load(Ordering::Relaxed), value.get()), (2, 0));
        assert!(event.waiters.borrow().is_empty());
    }

    #[test]
    fn a_notification_goes_to_one_waiter_even_if_its_condition_fails() {
        let (event, open) = (Event::new(), Cell::new(false));
        let wakes: Vec<_> = (0..2).map(|_| Arc::new(Wakes::default())).collect();
        let mut first = pin!(event.wait_until(|| open.get()));
        let mut second = pin!(event.wait_until(|| open.get()));
        assert!(poll(first.as_mut(), &wakes[0]).is_none());
        assert!(poll(second.as_mut(), &wakes[1]).is_none());
        event.notify();
        assert!(poll(first.as_mut(), &wakes[0]).is_none());
        open.set(true);
        // The first waits again, after the second.
        event.notify();
        assert_eq!(wakes[1].0.load(Ordering::Relaxed), 1);
        assert!(poll(second.as_mut(), &wakes[1]).is_some());
        event.notify();
        assert!(poll(first.as_mut(), &wakes[0]).is_some());
    }
}
