//! Waits of a task for time: sleeping, and yielding to other tasks.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::Core;
use crate::timer::TimerId;

impl Core {
    /// Suspends for `ns` nanoseconds.
    pub fn sleep_ns(&self, ns: u64) -> Sleep {
        Sleep { core: self.clone(), deadline: self.now_ns().saturating_add(ns), id: None }
    }

    /// Lets all other ready tasks run first.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(|cx| {
            if yielded {
                return Poll::Ready(());
            }
            yielded = true;
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// Yields if the running class has used up its share of this turn. Long loops of background
    /// work call it every few microseconds.
    pub async fn checkpoint(&self) {
        if self.now_exact_ns() >= self.0.deadline.get() {
            self.yield_now().await;
        }
    }
}

/// The future of [`Core::sleep_ns`].
pub struct Sleep {
    core: Core,
    deadline: u64,
    id: Option<TimerId>,
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let core = self.core.clone();
        match self.id {
            None if core.now_ns() >= self.deadline => Poll::Ready(()),
            None => {
                let waker = cx.waker().clone();
                self.id = Some(core.0.timers.borrow_mut().insert(self.deadline, waker));
                Poll::Pending
            }
            Some(id) => {
                if core.0.timers.borrow_mut().poll(id, cx.waker()) {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
            }
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.core.0.timers.borrow_mut().remove(id);
        }
    }
}
