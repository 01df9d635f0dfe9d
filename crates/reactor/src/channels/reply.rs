//! The answer to one request: a value from the thread that has it to a future on any thread.
//!
//! 1. The requester makes a pair with [`reply`], sends the [`ReplySender`] away with its request,
//!    and awaits the [`Reply`].
//! 2. [`Reply::poll`] puts its waker into the slot and announces it (*waiting*). When the waker has
//!    changed, it withdraws the announcement first.
//! 3. [`ReplySender::send`] puts the value into the slot, sets *done*, and wakes the waker if it
//!    was announced. Dropping the sender sets *done* without a value: a request that nobody answers
//!    any more, because its core stopped or panicked, ends with [`Unanswered`].
//!
//! **Why no answer is missed**: *waiting* and *done* are bits of one word, so their order is known.
//! If *done* comes first, the future's read-modify-write of *waiting* returns it. If *waiting*
//! comes first, the sender's returns that, and it wakes.
//!
//! **Who may touch the slot**: the value is the sender's until *done*, and the future's afterwards.
//! The waker is the future's while *waiting* is not set. While it is set, nobody changes it and
//! both may read it; after *done* it stays until the slot is freed.
//!
//! Either end may be dropped at any time; neither waits for the other. Cost: one allocation, one
//! read-modify-write of each end, and what the waker costs.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use loomable::{Arc, AtomicUsize, Ordering, UnsafeCell, mutant, weaken};

/// Bit: the waker is in the slot.
const WAITING: usize = 1;
/// Bit: the sender is done with the slot, with or without a value.
const DONE: usize = 2;

struct Slot<T> {
    state: AtomicUsize,
    value: UnsafeCell<Option<T>>,
    waker: UnsafeCell<Option<Waker>>,
}

// SAFETY: a `T` is moved from the sender's thread to the future's (or to the thread that drops the
// slot), for which `T: Send` suffices; no `&T` is shared. Wakers are `Send` and `Sync`.
unsafe impl<T: Send> Send for Slot<T> {}
// SAFETY: as above; the module text says which end may touch what, and when.
unsafe impl<T: Send> Sync for Slot<T> {}

/// Makes the two ends of an answer.
pub fn reply<T>() -> (ReplySender<T>, Reply<T>) {
    let slot = Arc::new(Slot {
        state: AtomicUsize::new(0),
        value: UnsafeCell::new(None),
        waker: UnsafeCell::new(None),
    });
    (ReplySender { slot: slot.clone() }, Reply { slot })
}

/// The end that answers.
pub struct ReplySender<T> {
    slot: Arc<Slot<T>>,
}

impl<T> ReplySender<T> {
    /// Answers, and wakes the requester. If its future was dropped, the value is dropped.
    pub fn send(self, value: T) {
        // SAFETY: *done* is not set: only the drop of `self` sets it, which follows. So the future
        // does not touch the value.
        self.slot.value.with_mut(|slot| unsafe { *slot = Some(value) });
    }

    /// Whether the future still exists. A request whose future was dropped may be left undone if
    /// it has not begun.
    pub fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.slot) > 1
    }
}

impl<T> Drop for ReplySender<T> {
    fn drop(&mut self) {
        let order = match mutant("reply.done_relaxed") {
            true => Ordering::Relaxed,
            false => Ordering::AcqRel,
        };
        let before = self.slot.state.fetch_or(DONE, order);
        if before & WAITING == 0 {
            return;
        }
        self.slot.waker.with(|waker| {
            // SAFETY: *waiting* was set when *done* was, and the future does not change the waker
            // after *done*. Its write came before: it set *waiting* by Release, and we read that
            // by Acquire.
            if let Some(waker) = unsafe { &*waker } {
                waker.wake_by_ref();
            }
        });
    }
}

impl<T> fmt::Debug for ReplySender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplySender").finish_non_exhaustive()
    }
}

/// The request was dropped without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unanswered;

/// The end that waits; see the module text. Polled again after its end, it returns [`Unanswered`].
#[must_use = "it waits only when awaited"]
pub struct Reply<T> {
    slot: Arc<Slot<T>>,
}

impl<T> Reply<T> {
    /// Takes the answer, if it has come.
    pub fn try_take(&mut self) -> Option<Result<T, Unanswered>> {
        let state = self.slot.state.load(weaken(Ordering::Acquire, "reply.look_relaxed"));
        (state & DONE != 0).then(|| self.take())
    }

    /// Takes the value after *done* was seen, by Acquire.
    fn take(&mut self) -> Result<T, Unanswered> {
        // SAFETY: after *done* the value is ours, and its write came before: the sender set *done*
        // by Release.
        self.slot.value.with_mut(|slot| unsafe { (*slot).take() }).ok_or(Unanswered)
    }
}

impl<T> Future for Reply<T> {
    type Output = Result<T, Unanswered>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let slot = &*this.slot;
        let state = slot.state.load(weaken(Ordering::Acquire, "reply.look_relaxed"));
        if state & DONE != 0 {
            return Poll::Ready(this.take());
        }
        if state & WAITING != 0 {
            // SAFETY: only we change the waker, and the sender only reads it.
            let same = slot.waker.with(|waker| unsafe {
                (*waker).as_ref().is_some_and(|waker| waker.will_wake(cx.waker()))
            });
            if same {
                return Poll::Pending;
            }
            if !mutant("reply.change_announced")
                && slot.state.fetch_and(!WAITING, Ordering::Acquire) & DONE != 0
            {
                return Poll::Ready(this.take());
            }
        }
        // SAFETY: *waiting* is not set. If *done* is set before we set it again, the sender sees
        // that, and does not touch the waker.
        slot.waker.with_mut(|waker| unsafe { *waker = Some(cx.waker().clone()) });
        let order = match mutant("reply.wait_relaxed") {
            true => Ordering::Relaxed,
            false => Ordering::AcqRel,
        };
        let before = slot.state.fetch_or(WAITING, order);
        if before & DONE != 0 && !mutant("reply.miss_done") {
            return Poll::Ready(this.take());
        }
        Poll::Pending
    }
}

impl<T> fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::pin::pin;
    use std::rc::Rc;
    use std::sync::atomic::AtomicUsize as Count;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Wakes(Count);

    impl Wake for Wakes {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll<T>(
        reply: &mut Reply<T>,
        wakes: &std::sync::Arc<Wakes>,
    ) -> Option<Result<T, Unanswered>> {
        match pin!(reply).poll(&mut Context::from_waker(&Waker::from(wakes.clone()))) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => None,
        }
    }

    #[test]
    fn an_answer_wakes_the_last_waker_once() {
        let (sender, mut reply) = reply();
        let (first, last) = (std::sync::Arc::new(Wakes::default()), Default::default());
        assert!(poll(&mut reply, &first).is_none());
        assert!(poll(&mut reply, &first).is_none());
        assert!(poll(&mut reply, &last).is_none());
        assert!(reply.try_take().is_none());
        sender.send(7);
        let count = |wakes: &Wakes| wakes.0.load(Ordering::Relaxed);
        assert_eq!((count(&first), count(&last)), (0, 1));
        assert_eq!(poll(&mut reply, &last), Some(Ok(7)));
        assert_eq!(poll(&mut reply, &last), Some(Err(Unanswered)));
    }

    #[test]
    fn a_dropped_request_ends_its_future() {
        let (sender, mut reply) = reply::<u32>();
        let wakes = std::sync::Arc::new(Wakes::default());
        assert!(poll(&mut reply, &wakes).is_none());
        drop(sender);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert_eq!(poll(&mut reply, &wakes), Some(Err(Unanswered)));
    }

    #[test]
    fn an_answer_that_nobody_takes_is_freed() {
        let item = Rc::new(());
        let (sender, reply) = reply();
        assert!(sender.is_awaited());
        drop(reply);
        assert!(!sender.is_awaited());
        sender.send(item.clone());
        let (sender, reply) = super::reply();
        sender.send(item.clone());
        drop(reply);
        assert_eq!(Rc::strong_count(&item), 1);
    }

    #[test]
    fn answers_cross_threads() {
        let count = if cfg!(miri) { 20 } else { 10_000 };
        let (requests, mut inbox) = crate::inbox::inbox::<(u32, ReplySender<u32>)>(4);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut answered = 0;
                while answered < count {
                    match inbox.pop() {
                        Some((n, sender)) => {
                            sender.send(n + 1);
                            answered += 1;
                        }
                        None => std::thread::yield_now(),
                    }
                }
            });
            for n in 0..count {
                let (sender, mut reply) = reply();
                requests.send((n, sender)).unwrap();
                struct Unpark(std::thread::Thread);
                impl Wake for Unpark {
                    fn wake(self: std::sync::Arc<Self>) {
                        self.0.unpark();
                    }
                }
                let waker = Waker::from(std::sync::Arc::new(Unpark(std::thread::current())));
                let answer = loop {
                    match pin!(&mut reply).poll(&mut Context::from_waker(&waker)) {
                        Poll::Ready(answer) => break answer,
                        Poll::Pending => std::thread::park(),
                    }
                };
                assert_eq!(answer, Ok(n + 1));
            }
        });
    }
}
