//! Calls to other cores: a function runs there, and its answer comes back.

use std::any::Any;
use std::future::Future;
use std::task::{Poll, Waker};

use super::{Core, CoreState};
use crate::channels::mesh::Envelope;
use crate::task::Class;

/// Calls to other cores whose answer is pending.
#[derive(Default)]
pub(super) struct Calls {
    slots: Vec<CallSlot>,
    free: Vec<u32>,
}

#[derive(Default)]
struct CallSlot {
    generation: u32,
    answer: Option<Box<dyn Any + Send>>,
    waker: Option<Waker>,
}

impl Core {
    /// Runs `f` on another core (or this one) and waits for its answer.
    pub async fn call<R: Send + 'static>(
        &self,
        core: usize,
        f: impl FnOnce(&Core) -> R + Send + 'static,
    ) -> R {
        if core == self.id() {
            return f(self);
        }
        self.ask(core, move |there, reply| reply.send(there, f(there))).await
    }

    /// Runs the task that `f` makes on another core (or this one), and waits until it has ended.
    /// The task runs to its end also when this future is dropped.
    pub async fn spawn_on<R: Send + 'static, Fut: Future<Output = R> + 'static>(
        &self,
        core: usize,
        class: Class,
        f: impl FnOnce(&Core) -> Fut + Send + 'static,
    ) -> R {
        if core == self.id() {
            return self.spawn(class, f(self)).await;
        }
        self.ask(core, move |there, reply: Reply| {
            let (task, back) = (f(there), there.clone());
            there.spawn(class, async move { reply.send(&back, task.await) });
        })
        .await
    }

    /// Runs `f` on another core, which must send the reply.
    async fn ask<R: 'static>(
        &self,
        core: usize,
        f: impl FnOnce(&Core, Reply) + Send + 'static,
    ) -> R {
        let (slot, generation) = {
            let mut calls = self.0.calls.borrow_mut();
            let slot = calls.free.pop().unwrap_or_else(|| {
                calls.slots.push(CallSlot::default());
                (calls.slots.len() - 1) as u32
            });
            (slot, calls.slots[slot as usize].generation)
        };
        let reply = Reply { to: self.id(), slot, generation };
        let guard = CallGuard { core: self, slot };
        let mut envelope: Option<Envelope> = Some(Box::new(move |there: &Core| f(there, reply)));
        std::future::poll_fn(|cx| {
            if let Some(message) = envelope.take()
                && let Err(message) = self.0.mesh.borrow_mut().send(core, message)
            {
                // The ring is full: the other core lags. Try again next turn.
                envelope = Some(message);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let mut calls = self.0.calls.borrow_mut();
            let call = &mut calls.slots[slot as usize];
            match call.answer.take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    call.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
        .downcast::<R>()
        .map(|answer| {
            drop(guard);
            *answer
        })
        .unwrap_or_else(|_| unreachable!("a call's answer has the type its caller expects"))
    }
}

impl CoreState {
    fn answer(&self, slot: u32, generation: u32, answer: Box<dyn Any + Send>) {
        let waker = {
            let mut calls = self.calls.borrow_mut();
            let call = &mut calls.slots[slot as usize];
            if call.generation != generation {
                return;
            }
            call.answer = Some(answer);
            call.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The return address of a call.
struct Reply {
    to: usize,
    slot: u32,
    generation: u32,
}

impl Reply {
    fn send<R: Send + 'static>(self, from: &Core, answer: R) {
        let answer: Box<dyn Any + Send> = Box::new(answer);
        let envelope: Envelope =
            Box::new(move |back: &Core| back.0.answer(self.slot, self.generation, answer));
        from.0.mesh.borrow_mut().send_or_queue(self.to, envelope);
    }
}

struct CallGuard<'a> {
    core: &'a Core,
    slot: u32,
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        let mut calls = self.core.0.calls.borrow_mut();
        let call = &mut calls.slots[self.slot as usize];
        call.generation = call.generation.wrapping_add(1);
        call.answer = None;
        call.waker = None;
        calls.free.push(self.slot);
    }
}
