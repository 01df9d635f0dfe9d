//! The hand-over of requests to a core, and the wait for the answer.
//!
//! 1. [`Door::call`] makes the request, with a [`ReplySender`] in it, and sends it into the core's
//!    inbox. If that is full, the caller waits until the core has taken some.
//! 2. It rings the core's bell, which costs a system call only if the core sleeps.
//! 3. The core's poller (`server/receiver.rs`) takes all that waits in one turn, and answers each
//!    request as soon as it can.
//! 4. The answer wakes the caller's waker.
//!
//! The future may be dropped at any await: before step 1 has succeeded nothing has begun;
//! afterwards the core goes on, and its answer is dropped.
//!
//! Requests are bounded: in the inbox by its capacity, on the core by the poller, and batches of
//! writes also by their bytes until they are committed ([`Load`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use reactor::Bell;
use reactor::inbox::{SendError, Sender};
use reactor::reply::{ReplySender, Unanswered, reply};
use reactor::waiters::Waiters;

use crate::error::Result;

/// A core's inbox for requests of one kind, as the callers see it.
pub(crate) struct Door<T> {
    pub inbox: Sender<T>,
    pub bell: Bell,
    pub room: Arc<Load>,
}

impl<T> Clone for Door<T> {
    fn clone(&self) -> Self {
        Door { inbox: self.inbox.clone(), bell: self.bell.clone(), room: self.room.clone() }
    }
}

/// The bytes of batches that are on their way, and the callers that wait for room, for these or in
/// the inbox.
#[derive(Debug)]
pub(crate) struct Load {
    bytes: AtomicUsize,
    bytes_max: usize,
    waiters: Waiters,
}

impl Load {
    pub fn new(bytes_max: usize) -> Load {
        Load { bytes: AtomicUsize::new(0), bytes_max, waiters: Waiters::new() }
    }

    /// Counts a batch. One that is larger than the limit passes alone.
    fn try_take(&self, bytes: usize) -> bool {
        // A failed attempt changes nothing: it must wake nobody, or waiters wake each other.
        let take = |before: usize| {
            let after = before.saturating_add(bytes);
            (before == 0 || after <= self.bytes_max).then_some(after)
        };
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// A batch is done.
    fn give(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.waiters.notify_all();
    }

    /// The core has taken requests.
    pub fn notify(&self) {
        self.waiters.notify_all();
    }
}

/// A batch's part of the [`Load`], until it is done or dropped.
pub(crate) struct Weight(Arc<Load>, usize);

impl Drop for Weight {
    fn drop(&mut self) {
        self.0.give(self.1);
    }
}

/// The core takes no requests any more, or ended before it had answered this one.
pub(crate) struct NoAnswer;

impl<T: Unpin> Door<T> {
    /// Sends a request and waits for its answer. Drops of the future are safe: see the module text.
    pub async fn call<R>(
        &self,
        make: impl FnOnce(ReplySender<Result<R>>) -> T,
    ) -> std::result::Result<Result<R>, NoAnswer> {
        let (sender, answer) = reply();
        self.send(make(sender)).await?;
        answer.await.map_err(|Unanswered| NoAnswer)
    }

    /// Waits until there is room for the bytes of a request.
    pub async fn weigh(&self, bytes: usize) -> Weight {
        let load = &*self.room;
        if !load.try_take(bytes) {
            load.waiters.wait_for(|| load.try_take(bytes).then_some(())).await;
        }
        Weight(self.room.clone(), bytes)
    }

    async fn send(&self, request: T) -> std::result::Result<(), NoAnswer> {
        let sent = match self.inbox.send(request) {
            Ok(()) => Ok(()),
            Err(SendError::Closed(_)) => Err(NoAnswer),
            Err(SendError::Full(request)) => self.wait_and_send(request).await,
        };
        if sent.is_ok() {
            self.bell.ring();
        }
        sent
    }

    #[cold]
    async fn wait_and_send(&self, request: T) -> std::result::Result<(), NoAnswer> {
        let mut request = Some(request);
        let attempt = || match self.inbox.send(request.take()?) {
            Ok(()) => Some(Ok(())),
            Err(SendError::Closed(_)) => Some(Err(NoAnswer)),
            Err(SendError::Full(back)) => {
                request = Some(back);
                None
            }
        };
        self.room.waiters.wait_for(attempt).await
    }
}
