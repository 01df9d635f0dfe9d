//! Tasks: `!Send` futures in a slab, one ready queue per class, and wakers that are numbers.
//!
//! A waker is a core's number, a task's slot and the slot's generation, packed into one word, so
//! cloning and dropping it are free. Waking on the task's own core pushes its slot on the ready
//! queue of its class; waking from another thread goes through the core's inbox. A stale waker
//! finds another generation and does nothing.
//!
//! A task is in its ready queue at most once (`queued`). While it is polled its future is outside
//! the slab, so it may spawn, wake and cancel tasks, including itself.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{RawWaker, RawWakerVTable, Waker};

use crate::core::CoreState;
use crate::driver::remote::{self, Remote, TaskId, UID_BITS};

const INDEX_BITS: u32 = 22;
const GEN_BITS: u32 = 22;
const _: () = assert!(INDEX_BITS + GEN_BITS + UID_BITS == 64 && usize::BITS == 64);
const GEN_MASK: u32 = (1 << GEN_BITS) - 1;

/// Most tasks a core can hold. All code that spawns tasks for clients bounds their number, so this
/// limit is not reached: with all limits used on one core there are fewer than 950,000 tasks.
/// Connections of clients: 10,000, with a task each; their reads: 65,536 and 4 more for each
/// connection; changes that read: 4096. Rings of disks: 1024 disks with 256 rings, with three tasks
/// each. Connections of operators and of metrics readers: 16 of each. More tasks are a leak.
pub const TASKS_MAX: usize = 1 << 20;

/// The purpose of a task: decides when it runs and its share of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Shutdown, administration, and the commit of writes, for which many requests wait: always
    /// first, must be short.
    Control,
    /// Requests of users.
    Foreground,
    /// Flush, compaction, checks: together at most 100 µs of a turn while other tasks are ready.
    Background,
    /// Export, migration, long replies: after all other classes, together at most 20 µs of a turn
    /// with what they submit.
    Bulk,
}

pub(crate) const CLASSES: usize = 4;

pub(crate) type BoxFuture = Pin<Box<dyn Future<Output = ()>>>;

struct Task {
    generation: u32,
    class: Class,
    live: bool,
    queued: bool,
    future: Option<BoxFuture>,
}

#[derive(Default)]
pub(crate) struct Tasks {
    slots: Vec<Task>,
    free: Vec<u32>,
    ready: [VecDeque<u32>; CLASSES],
    live: usize,
}

impl Tasks {
    /// # Panics
    /// When the core already holds `TASKS_MAX` tasks: callers bound the number they spawn.
    pub fn insert(&mut self, class: Class, future: BoxFuture) -> TaskId {
        assert!(self.live < TASKS_MAX, "a core holds {TASKS_MAX} tasks");
        self.live += 1;
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Task {
                    generation: 0,
                    class,
                    live: false,
                    queued: false,
                    future: None,
                });
                (self.slots.len() - 1) as u32
            }
        };
        let task = &mut self.slots[index as usize];
        task.class = class;
        task.live = true;
        task.queued = true;
        task.future = Some(future);
        let generation = task.generation;
        self.ready[class as usize].push_back(index);
        TaskId { index, generation }
    }

    pub fn wake(&mut self, id: TaskId) {
        if let Some(task) = self.slots.get_mut(id.index as usize)
            && task.live
            && task.generation == id.generation
            && !task.queued
        {
            task.queued = true;
            self.ready[task.class as usize].push_back(id.index);
        }
    }

    /// The next ready task of a class, with its future taken out for polling.
    pub fn take_ready(&mut self, class: usize) -> Option<(TaskId, BoxFuture)> {
        while let Some(index) = self.ready[class].pop_front() {
            let task = &mut self.slots[index as usize];
            task.queued = false;
            if task.live
                && let Some(future) = task.future.take()
            {
                return Some((TaskId { index, generation: task.generation }, future));
            }
        }
        None
    }

    /// Puts a pending future back; returns it if the task was cancelled meanwhile.
    pub fn put_back(&mut self, id: TaskId, future: BoxFuture) -> Option<BoxFuture> {
        let task = &mut self.slots[id.index as usize];
        if task.live && task.generation == id.generation {
            task.future = Some(future);
            None
        } else {
            Some(future)
        }
    }

    /// Ends a task. Returns its future, unless it is being polled; the caller drops it when nothing
    /// is borrowed.
    pub fn remove(&mut self, id: TaskId) -> Option<BoxFuture> {
        let task = self.slots.get_mut(id.index as usize)?;
        if !task.live || task.generation != id.generation {
            return None;
        }
        task.live = false;
        task.generation = (task.generation + 1) & GEN_MASK;
        let future = task.future.take();
        if !task.queued {
            self.free.push(id.index);
        } else {
            // Still in a ready queue: take it out, so that the slot can be reused.
            self.ready[task.class as usize].retain(|&index| index != id.index);
            task.queued = false;
            self.free.push(id.index);
        }
        self.live -= 1;
        future
    }

    pub fn ready(&self, class: usize) -> usize {
        self.ready[class].len()
    }

    pub fn any_ready(&self) -> bool {
        self.ready.iter().any(|queue| !queue.is_empty())
    }

    pub fn live(&self) -> usize {
        self.live
    }

    /// Ends all tasks and returns their futures, for the caller to drop.
    pub fn clear(&mut self) -> Vec<BoxFuture> {
        let ids: Vec<TaskId> = (0..self.slots.len())
            .filter(|&i| self.slots[i].live)
            .map(|i| TaskId { index: i as u32, generation: self.slots[i].generation })
            .collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }
}

thread_local! {
    /// The core whose turn this thread is running, or null.
    static CURRENT: Cell<*const CoreState> = const { Cell::new(std::ptr::null()) };
}

/// Marks a core as the current one of this thread, until dropped.
pub(crate) struct Entered<'a> {
    before: *const CoreState,
    _core: &'a CoreState,
}

pub(crate) fn enter(core: &CoreState) -> Entered<'_> {
    Entered { before: CURRENT.replace(core), _core: core }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

pub(crate) fn waker(uid: u32, id: TaskId) -> Waker {
    let packed = (u64::from(uid) << (INDEX_BITS + GEN_BITS))
        | (u64::from(id.generation) << INDEX_BITS)
        | u64::from(id.index);
    let data = std::ptr::without_provenance(packed as usize);
    // SAFETY: the vtable's functions treat the pointer as a number only, so any copy may be
    // used from any thread at any time, and there is nothing to release.
    unsafe { Waker::from_raw(RawWaker::new(data, &VTABLE)) }
}

static VTABLE: RawWakerVTable =
    RawWakerVTable::new(|data| RawWaker::new(data, &VTABLE), wake, wake, |_| {});

fn wake(data: *const ()) {
    let packed = data.addr() as u64;
    let uid = (packed >> (INDEX_BITS + GEN_BITS)) as u32;
    let id = TaskId {
        index: packed as u32 & ((1 << INDEX_BITS) - 1),
        generation: (packed >> INDEX_BITS) as u32 & GEN_MASK,
    };
    let current = CURRENT.get();
    if !current.is_null() {
        // SAFETY: `CURRENT` is set by `enter` from a reference that outlives the `Entered`
        // guard, and cleared when that guard drops, on this same thread.
        let core = unsafe { &*current };
        if core.uid == uid {
            core.tasks.borrow_mut().wake(id);
            return;
        }
    }
    if let Some(shared) = remote::find(uid) {
        shared.post(Remote::Wake(id));
    }
}
