//! One value from one task to another task of the same core.
//!
//! [`oneshot`] makes a [`OneshotSender`] and a [`OneshotReceiver`]; each learns when the other is
//! dropped. [`Oneshot`] is the place itself, without an owner: for a table of places, or as a part
//! of a structure that is shared anyway, so that it costs no allocation.

use std::cell::RefCell;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// A place for one value, and for the task that waits for it.
#[derive(Debug)]
pub struct Oneshot<T>(RefCell<State<T>>);

#[derive(Debug)]
enum State<T> {
    Empty(Option<Waker>),
    Full(T),
    /// The value was taken, or will never come.
    Closed,
}

/// No value will come: the sender was dropped, or the value was already taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no answer will come")
    }
}

impl std::error::Error for Closed {}

impl<T> Default for Oneshot<T> {
    fn default() -> Self {
        Oneshot::new()
    }
}

impl<T> Oneshot<T> {
    /// An empty place.
    pub const fn new() -> Oneshot<T> {
        Oneshot(RefCell::new(State::Empty(None)))
    }

    /// Puts the value into the place and wakes the waiter.
    ///
    /// # Errors
    /// Returns the value if the place is closed or already has one.
    pub fn send(&self, value: T) -> Result<(), T> {
        let waker = {
            let mut state = self.0.borrow_mut();
            let State::Empty(waker) = &mut *state else { return Err(value) };
            let waker = waker.take();
            *state = State::Full(value);
            waker
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    /// Closes the place and wakes the waiter. A value that was not taken is dropped.
    pub fn close(&self) {
        let state = self.0.replace(State::Closed);
        if let State::Empty(Some(waker)) = state {
            waker.wake();
        }
    }

    /// Whether a value is here.
    pub fn is_full(&self) -> bool {
        matches!(*self.0.borrow(), State::Full(_))
    }

    /// Whether no value is here and none will come.
    pub fn is_closed(&self) -> bool {
        matches!(*self.0.borrow(), State::Closed)
    }

    /// Takes the value, if it is here.
    pub fn try_take(&self) -> Option<T> {
        let mut state = self.0.borrow_mut();
        match &*state {
            State::Full(_) => match std::mem::replace(&mut *state, State::Closed) {
                State::Full(value) => Some(value),
                State::Empty(_) | State::Closed => unreachable!("it was full"),
            },
            State::Empty(_) | State::Closed => None,
        }
    }

    /// Takes the value, or registers the task as the only waiter.
    pub fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Result<T, Closed>> {
        if let Some(value) = self.try_take() {
            return Poll::Ready(Ok(value));
        }
        match &mut *self.0.borrow_mut() {
            State::Empty(known) => {
                if known.as_ref().is_none_or(|known| !known.will_wake(cx.waker())) {
                    *known = Some(cx.waker().clone());
                }
                Poll::Pending
            }
            State::Full(_) | State::Closed => Poll::Ready(Err(Closed)),
        }
    }

    /// Waits for the value.
    ///
    /// # Errors
    /// [`Closed`] when none will come.
    pub async fn recv(&self) -> Result<T, Closed> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }
}

/// Makes the two ends of a [`Oneshot`].
pub fn oneshot<T>() -> (OneshotSender<T>, OneshotReceiver<T>) {
    let place = Rc::new(Oneshot::new());
    (OneshotSender(place.clone()), OneshotReceiver(place))
}

/// The end that sends. Dropping it tells the receiver that no value will come.
#[derive(Debug)]
pub struct OneshotSender<T>(Rc<Oneshot<T>>);

impl<T> OneshotSender<T> {
    /// Sends the value.
    ///
    /// # Errors
    /// Returns the value if the receiver was dropped.
    pub fn send(self, value: T) -> Result<(), T> {
        self.0.send(value)
    }

    /// Whether the receiver was dropped.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl<T> Drop for OneshotSender<T> {
    fn drop(&mut self) {
        if !self.0.is_full() {
            self.0.close();
        }
    }
}

/// The end that receives: a future of the value.
#[derive(Debug)]
#[must_use = "the value is lost when this is dropped"]
pub struct OneshotReceiver<T>(Rc<Oneshot<T>>);

impl<T> OneshotReceiver<T> {
    /// Whether the value is here.
    pub fn is_full(&self) -> bool {
        self.0.is_full()
    }

    /// Takes the value, if it is here.
    pub fn try_take(&self) -> Option<T> {
        self.0.try_take()
    }
}

impl<T> Future for OneshotReceiver<T> {
    type Output = Result<T, Closed>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_recv(cx)
    }
}

impl<T> Drop for OneshotReceiver<T> {
    fn drop(&mut self) {
        // The waker is the dropped task's own: it is not needed.
        self.0.0.replace(State::Closed);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
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

    #[test]
    fn a_value_wakes_the_receiver_and_is_taken_once() {
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let mut cx = Context::from_waker(&waker);
        let (sender, receiver) = oneshot();
        let mut receiver = pin!(receiver);
        assert!(receiver.as_mut().poll(&mut cx).is_pending());
        assert!(!sender.is_closed() && !receiver.is_full());
        sender.send(7).unwrap();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(receiver.is_full());
        assert_eq!(receiver.as_mut().poll(&mut cx), Poll::Ready(Ok(7)));
        assert_eq!(receiver.as_mut().poll(&mut cx), Poll::Ready(Err(Closed)));
    }

    #[test]
    fn each_end_learns_that_the_other_was_dropped() {
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let mut cx = Context::from_waker(&waker);
        let (sender, receiver) = oneshot::<u32>();
        let mut receiver = pin!(receiver);
        assert!(receiver.as_mut().poll(&mut cx).is_pending());
        drop(sender);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert_eq!(receiver.as_mut().poll(&mut cx), Poll::Ready(Err(Closed)));

        let (sender, receiver) = oneshot();
        drop(receiver);
        assert!(sender.is_closed());
        assert_eq!(sender.send(7), Err(7));
    }

    #[test]
    fn a_value_outlives_its_sender_and_is_dropped_with_the_receiver() {
        let value = Rc::new(());
        let (sender, receiver) = oneshot();
        sender.send(value.clone()).unwrap();
        assert!(receiver.is_full());
        drop(receiver);
        assert_eq!(Rc::strong_count(&value), 1);
    }

    #[test]
    fn a_place_takes_one_value() {
        let place = Oneshot::new();
        assert_eq!(place.try_take(), None);
        place.send(1).unwrap();
        assert_eq!(place.send(2), Err(2));
        assert_eq!(place.try_take(), Some(1));
        assert_eq!((place.send(3), place.is_closed()), (Err(3), true));
    }
}
