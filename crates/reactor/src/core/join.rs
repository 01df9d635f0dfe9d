//! Starting tasks, and waiting for or ending them.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::Core;
use crate::driver::remote::TaskId;
use crate::task::{BoxFuture, Class};
use crate::wait::{OneshotReceiver, OneshotSender, oneshot};

impl Core {
    /// Starts a task.
    pub fn spawn<T: 'static>(
        &self,
        class: Class,
        future: impl Future<Output = T> + 'static,
    ) -> JoinHandle<T> {
        let (sender, result) = oneshot();
        let body: BoxFuture = Box::pin(Running { future, sender: Some(sender) });
        let id = self.0.tasks.borrow_mut().insert(class, body);
        JoinHandle { core: self.clone(), id, result }
    }
}

/// A task that sends its result. An `async` block that awaits `future` would have twice its size:
/// once for what it captures, and once for what it awaits.
struct Running<F: Future> {
    future: F,
    sender: Option<OneshotSender<F::Output>>,
}

impl<F: Future> Future for Running<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // SAFETY: nothing is moved out of `future`, here or elsewhere: it is pinned with the whole.
        // `sender` is never pinned. The type has no `Drop`, and is `Unpin` only if `future` is.
        let this = unsafe { self.get_unchecked_mut() };
        // SAFETY: as above: `future` stays where it is until it is dropped with the whole.
        let future = unsafe { Pin::new_unchecked(&mut this.future) };
        future.poll(cx).map(|result| {
            if let Some(sender) = this.sender.take() {
                // The handle may have been dropped.
                let _ = sender.send(result);
            }
        })
    }
}

/// A started task: await it for its result. Dropping it leaves the task running; see [`OwnedTask`].
pub struct JoinHandle<T> {
    core: Core,
    id: TaskId,
    result: OneshotReceiver<T>,
}

impl<T> JoinHandle<T> {
    /// Binds the task to the returned owner.
    #[must_use = "dropping it ends the task"]
    pub fn owned(self) -> OwnedTask<T> {
        OwnedTask(Some(self))
    }

    /// Ends the task at its current await, unless it is the task that runs now.
    pub fn cancel(self) {
        let future = self.core.0.tasks.borrow_mut().remove(self.id);
        drop(future);
    }

    /// Takes the result, if the task has ended.
    pub fn try_take(&self) -> Option<T> {
        self.result.try_take()
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match Pin::new(&mut self.result).poll(cx) {
            Poll::Ready(Ok(result)) => Poll::Ready(result),
            // The core stops and has dropped the task: it will not return.
            Poll::Ready(Err(_)) | Poll::Pending => Poll::Pending,
        }
    }
}

/// A task that ends with its owner: dropping this ends the task at its current await, unless it is
/// the task that runs now.
pub struct OwnedTask<T>(Option<JoinHandle<T>>);

impl<T> OwnedTask<T> {
    /// Whether the task has returned.
    pub fn has_ended(&self) -> bool {
        self.0.as_ref().is_none_or(|task| task.result.is_full())
    }
}

impl<T> Future for OwnedTask<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match &mut self.0 {
            Some(task) => Pin::new(task).poll(cx),
            None => Poll::Pending,
        }
    }
}

impl<T> Drop for OwnedTask<T> {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_running<F: Future>(_: &F) -> usize {
        size_of::<Running<F>>()
    }

    #[test]
    fn a_task_takes_little_more_memory_than_its_future() {
        let future = async {
            let large = [1_u8; 4000];
            std::future::pending::<()>().await;
            large
        };
        let bytes = size_of_val(&future);
        assert!(bytes >= 4000 && size_of_running(&future) < bytes + 64);
    }
}
