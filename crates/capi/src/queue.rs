//! The completion queue: asynchronous calls, and an eventfd that tells of their ends.
//!
//! 1. An asynchronous call copies its key and value, makes a future of them, and polls it once.
//!    That hands the request over to a core of the database, or to a client's thread.
//! 2. The core answers and wakes the task. [`Task::wake`] puts it into the queue's inbox and
//!    signals the eventfd. It runs on the core's thread, so it does no more: no lock, no poll.
//! 3. [`millrace_queue_take`] polls the tasks in the inbox. Those that are done become completions.
//!    One that is not (its request had to wait for room, and has now been handed over) comes back.
//!
//! So the queue has no thread of its own, and whoever takes drives it.
//!
//! **Who may touch what**: the inbox and `Taker` belong to the thread that holds the lock `taker`;
//! several threads may take. A task's state is its own lock's: only a poll takes it, and a task is
//! in the inbox at most once (`scheduled`), so two threads never wait for each other there.
//!
//! **Why no completion is missed**: a wake pushes, then sets `signalled`, and writes to the eventfd
//! if it was not set. A taker reads the eventfd, then clears `signalled`, then pops. A push that
//! finds `signalled` set comes before that clear, so this taker pops it; one that does not find it
//! set makes the eventfd readable after that read. What a taker leaves, it signals again.
//!
//! **Bounds**: `capacity` operations, from their call until their completion is taken.

use std::ffi::c_int;
use std::mem::{self, MaybeUninit};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use reactor::inbox::{Inbox, Sender, inbox};

use crate::batch::Batch;
use crate::bytes::{Out, Slice, Value, array_out, handle_out};
use crate::db::Db;
use crate::error::{Code, Error, ErrorOut, Result, answer, given, or_else};
use crate::event::Event;
use crate::family::Family;

/// A completion queue: `millrace_queue`.
pub struct Queue {
    shared: Arc<Shared>,
    taker: Mutex<Inbox<Arc<Task>>>,
    /// Operations whose completion was not taken yet.
    operations: AtomicUsize,
    capacity: usize,
    /// The process that made it.
    process: u32,
}

/// The end of an operation: `millrace_completion`.
#[repr(C)]
#[derive(Debug)]
pub struct Completion {
    tag: u64,
    code: Code,
    error: Option<Box<Error>>,
    value: Value,
    values: Values,
}

// As in the header: the code has padding after it.
const _: () = assert!(size_of::<Completion>() == 24 + 5 * size_of::<usize>());

/// The values of an operation that looks up many keys, or, without values, a number.
#[repr(C)]
#[derive(Debug)]
struct Values {
    /// Null, or a boxed slice of `count` values.
    items: *mut Value,
    count: u64,
}

impl Values {
    fn number(count: u64) -> Values {
        Values { items: ptr::null_mut(), count }
    }

    fn many(found: Vec<Option<millrace::Value>>) -> Values {
        let values: Box<[Value]> = found.into_iter().map(Value::new).collect();
        let count = values.len() as u64;
        Values { items: Box::into_raw(values).cast(), count }
    }
}

impl Drop for Values {
    fn drop(&mut self) {
        if !self.items.is_null() {
            let values = ptr::slice_from_raw_parts_mut(self.items, self.count as usize);
            // SAFETY: `many` made them, and nothing else does: a boxed slice of `count` values.
            // Its caller does not change the fields by the contract of the header, and there are
            // none after this: a drop is the only use of `items`.
            drop(unsafe { Box::from_raw(values) });
        }
    }
}

impl Completion {
    fn new(tag: u64, outcome: Outcome) -> Completion {
        let (code, error) = (Code::Ok, None);
        let (value, values) = (Value::NONE, Values::number(0));
        let nothing = Completion { tag, code, error, value, values };
        match outcome {
            Ok(Answer::Nothing) => nothing,
            Ok(Answer::Value(value)) => Completion { value: Value::new(value), ..nothing },
            Ok(Answer::Values(found)) => Completion { values: Values::many(found), ..nothing },
            Ok(Answer::Count(count)) => Completion { values: Values::number(count), ..nothing },
            Err(error) => {
                Completion { code: error.code(), error: Some(Box::new(error)), ..nothing }
            }
        }
    }
}

/// What the wakers reach.
struct Shared {
    event: Event,
    signalled: AtomicBool,
    ready: Sender<Arc<Task>>,
}

impl Shared {
    fn push(&self, task: Arc<Task>) {
        // It is never full: see `Queue::new`.
        if self.ready.send(task).is_ok() {
            self.signal();
        }
    }

    fn signal(&self) {
        if !self.signalled.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }
}

/// What an operation has to say.
#[derive(Debug)]
pub(crate) enum Answer {
    Nothing,
    Value(Option<millrace::Value>),
    Values(Vec<Option<millrace::Value>>),
    Count(u64),
}

/// How an operation ended.
type Outcome = Result<Answer>;
type Operation = Pin<Box<dyn Future<Output = Outcome> + Send>>;

enum State {
    Running(Operation),
    Done(Outcome),
    Taken,
}

struct Task {
    tag: u64,
    /// Weak, because the queue's inbox has tasks.
    queue: Weak<Shared>,
    /// It is in the inbox, or about to be polled.
    scheduled: AtomicBool,
    state: Mutex<State>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.scheduled.swap(true, Ordering::AcqRel)
            && let Some(queue) = self.queue.upgrade()
        {
            queue.push(self.clone());
        }
    }
}

impl Task {
    /// Polls the operation, unless it is done. Returns whether it is done now and was not before.
    fn poll(self: &Arc<Self>) -> bool {
        let mut state = lock(&self.state);
        // A wake from here on puts it into the inbox again. It sees what this poll leaves, and this
        // poll sees what the wakes before did.
        self.scheduled.swap(false, Ordering::AcqRel);
        let State::Running(operation) = &mut *state else { return false };
        let waker = Waker::from(self.clone());
        let mut cx = Context::from_waker(&waker);
        let polled = catch_unwind(AssertUnwindSafe(|| operation.as_mut().poll(&mut cx)));
        let outcome = match polled {
            Ok(Poll::Pending) => return false,
            Ok(Poll::Ready(outcome)) => outcome,
            Err(payload) => Err(Error::panicked(&*payload)),
        };
        *state = State::Done(outcome);
        true
    }

    /// Polls the operation, and takes its outcome if it is done.
    fn take(self: &Arc<Self>) -> Option<Outcome> {
        self.poll();
        let mut state = lock(&self.state);
        match mem::replace(&mut *state, State::Taken) {
            State::Done(outcome) => Some(outcome),
            other => {
                *state = other;
                None
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Queue {
    fn new(capacity: usize) -> Result<Queue> {
        if capacity == 0 {
            return Err(Error::argument("a queue needs a capacity"));
        }
        let event = Event::new().map_err(|error| {
            Error::new(Code::Io, format!("cannot make the eventfd of a queue: {error}"))
        })?;
        // A task is in it at most once, and `capacity` bounds the tasks. Tasks that were woken once
        // more after their end may be there, too, until the next take.
        let (ready, inbox) = inbox(usize::MAX / 2);
        Ok(Queue {
            shared: Arc::new(Shared { event, signalled: AtomicBool::new(false), ready }),
            taker: Mutex::new(inbox),
            operations: AtomicUsize::new(0),
            capacity,
            process: process::id(),
        })
    }

    /// Begins an operation.
    fn submit(&self, tag: u64, operation: impl Future<Output = Outcome> + Send + 'static) {
        let task = Arc::new(Task {
            tag,
            queue: Arc::downgrade(&self.shared),
            scheduled: AtomicBool::new(true),
            state: Mutex::new(State::Running(Box::pin(operation))),
        });
        if task.poll() {
            // A wake during the poll may have put it there already.
            task.wake();
        }
    }

    /// Makes room for one operation.
    pub(crate) fn reserve(&self) -> Result<Reserved<'_>> {
        let before = self.operations.fetch_add(1, Ordering::AcqRel);
        let reserved = Reserved(self);
        if before >= self.capacity {
            let text = format!("the queue has {} operations, as many as it may", self.capacity);
            return Err(Error::new(Code::Busy, text));
        }
        Ok(reserved)
    }

    /// Takes up to as many completions as there is room for.
    fn take(&self, completions: &mut [MaybeUninit<Completion>]) -> usize {
        let mut inbox = lock(&self.taker);
        self.shared.event.clear();
        self.shared.signalled.swap(false, Ordering::AcqRel);
        let mut taken = 0;
        for completion in completions {
            let Some((tag, outcome)) = std::iter::from_fn(|| inbox.pop())
                .find_map(|task| task.take().map(|outcome| (task.tag, outcome)))
            else {
                return taken;
            };
            completion.write(Completion::new(tag, outcome));
            self.operations.fetch_sub(1, Ordering::AcqRel);
            taken += 1;
        }
        if inbox.pure_check() {
            self.shared.signal();
        }
        taken
    }

    /// Waits for the end of all operations, and forgets how they ended.
    fn finish(&self) {
        while self.operations.load(Ordering::Acquire) > 0 {
            let mut completion = [MaybeUninit::uninit()];
            match self.take(&mut completion) {
                0 => self.shared.event.wait(),
                _ => {
                    let [completion] = completion;
                    // SAFETY: `take` has written one completion.
                    drop(unsafe { completion.assume_init() });
                }
            }
        }
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// Room for one operation, which is given back if the operation does not begin.
pub(crate) struct Reserved<'a>(&'a Queue);

impl Reserved<'_> {
    pub(crate) fn submit(
        self,
        tag: u64,
        operation: impl Future<Output = Result<Answer>> + Send + 'static,
    ) {
        let queue = self.0;
        mem::forget(self);
        queue.submit(tag, operation);
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.0.operations.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Makes a completion queue.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_queue_new(
    capacity: usize,
    queue: Out<'_, Option<Box<Queue>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let queue = handle_out(queue, "queue")?;
        *queue = Some(Box::new(Queue::new(capacity)?));
        Ok(())
    })
}

/// Waits for the end of all operations of a queue, and frees it.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_queue_free(queue: Option<Box<Queue>>) {
    or_else((), || match queue {
        Some(queue) if queue.process == process::id() => queue.finish(),
        // A forked child has no threads that would answer. It keeps the memory, because the
        // operations in it were copied at any point of their work.
        Some(queue) => mem::forget(queue),
        None => {}
    });
}

/// The eventfd of a queue, which is readable when completions may be taken; -1 for null.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_queue_fd(queue: Option<&Queue>) -> c_int {
    queue.map_or(-1, |queue| queue.shared.event.fd())
}

/// Takes completions; returns their number, and does not wait.
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_queue_take(
    queue: Option<&Queue>,
    completions: *mut MaybeUninit<Completion>,
    count: usize,
) -> usize {
    or_else(0, || {
        // SAFETY: the caller's promise.
        match (queue, unsafe { array_out(completions, count, "completions") }) {
            (Some(queue), Ok(completions)) => queue.take(completions),
            _ => 0,
        }
    })
}

/// Frees the error and the values of a completion.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_completion_free(completion: Option<&mut Completion>) {
    or_else((), || {
        if let Some(completion) = completion {
            completion.error = None;
            completion.value = Value::NONE;
            completion.values = Values::number(0);
        }
    });
}

/// See [`millrace::Db::get`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_get_async(
    db: Option<&Db>,
    family: Option<&Family>,
    queue: Option<&Queue>,
    key: Slice,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let family = given(db, "db")?.family(family)?.as_ref().clone();
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let reserved = given(queue, "queue")?.reserve()?;
        let key = key.to_vec();
        reserved.submit(tag, async move { Ok(Answer::Value(family.get(key).await?)) });
        Ok(())
    })
}

/// See [`millrace::Db::put`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_put_async(
    db: Option<&Db>,
    family: Option<&Family>,
    queue: Option<&Queue>,
    key: Slice,
    value: Slice,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let db = given(db, "db")?;
        let family = db.family(family)?;
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        let reserved = given(queue, "queue")?.reserve()?;
        let mut batch = millrace::WriteBatch::new();
        batch.put_in(family, key, value);
        reserved.submit(tag, write(db, batch));
        Ok(())
    })
}

/// See [`millrace::Db::delete`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_delete_async(
    db: Option<&Db>,
    family: Option<&Family>,
    queue: Option<&Queue>,
    key: Slice,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let db = given(db, "db")?;
        let family = db.family(family)?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let reserved = given(queue, "queue")?.reserve()?;
        let mut batch = millrace::WriteBatch::new();
        batch.delete_in(family, key);
        reserved.submit(tag, write(db, batch));
        Ok(())
    })
}

/// See [`millrace::Db::write`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_write_async(
    db: Option<&Db>,
    queue: Option<&Queue>,
    batch: Option<&mut Batch>,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let (db, batch) = (given(db, "db")?, given(batch, "batch")?);
        let reserved = given(queue, "queue")?.reserve()?;
        let batch = batch.take(db.id)?;
        reserved.submit(tag, write(db, batch));
        Ok(())
    })
}

/// See [`millrace::Db::sync`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_sync_async(
    db: Option<&Db>,
    queue: Option<&Queue>,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let db = given(db, "db")?.asynchronous.clone();
        let reserved = given(queue, "queue")?.reserve()?;
        reserved.submit(tag, async move { Ok(db.sync().await.map(|()| Answer::Nothing)?) });
        Ok(())
    })
}

fn write(db: &Db, batch: millrace::WriteBatch) -> impl Future<Output = Outcome> + Send + 'static {
    let db = db.asynchronous.clone();
    async move { Ok(db.write(batch).await.map(|()| Answer::Nothing)?) }
}
