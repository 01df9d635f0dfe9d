//! Changes that wait for their keys or for earlier changes of their connection.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use reactor::Class;

use crate::command::operation::Operation;
use crate::shard::ShardState;
use crate::shard::answers::{AnswerTarget, engine_answer, split};
use crate::shard::change::{Answer, Change};
use crate::shard::long::is_long;
use crate::shard::modify::OldValue;
use crate::shard::turns::Connection;

/// Bytes of values that have been read for changes whose turn has not come.
const AHEAD_BYTES_MAX: usize = 16 << 20;
/// Consecutive changes of a connection that are made in one go.
const MADE_PER_TURN: usize = 256;
/// Concurrent tasks that read for changes and make them.
const MAKING_MAX: usize = 4096;

/// A change that waits at its keys and for the earlier changes of its connection.
pub(super) struct Job {
    change: RefCell<Option<(Change, AnswerTarget)>>,
    connection: Connection,
    /// Each key once.
    keys: Vec<Box<[u8]>>,
    /// Number of keys at which other changes are before it.
    behind: Cell<usize>,
    /// It knows its old values, and waits only for its connection.
    is_ready: Cell<bool>,
    ahead: Cell<Option<ReadAhead>>,
    /// It reads its keys one after the other when its turn has come.
    is_long: bool,
}

/// Old values that were read before the turn of their change came.
pub(super) struct ReadAhead {
    old: Vec<OldValue>,
    /// Length of its values.
    bytes: usize,
    /// `ShardState::refusals` at that time: a later refusal may have made the values wrong.
    refusals: u64,
}

impl ShardState {
    /// Queues a change at all its keys and in its connection.
    pub(super) fn queue(self: &Rc<Self>, mut change: Change, target: AnswerTarget) {
        let mut keys: Vec<Box<[u8]>> = change.entries().map(|(key, _)| key.into()).collect();
        keys.sort_unstable();
        keys.dedup();
        self.count(|stats| stats.waited += 1);
        self.jobs.set(self.jobs.get() + 1);
        let job = Rc::new(Job {
            connection: target.answers.connection,
            is_long: is_long(&change),
            change: RefCell::new(Some((change, target))),
            keys,
            behind: Cell::new(0),
            is_ready: Cell::new(false),
            ahead: Cell::new(None),
        });
        self.turns.borrow_mut().wait(job.connection, &job);
        let mut overlay = self.overlay.borrow_mut();
        overlay.reserve(job.keys.len());
        let behind =
            job.keys.iter().filter(|key| !overlay.wait(key, self.print(key), &job)).count();
        drop(overlay);
        job.behind.set(behind);
        if behind == 0 {
            self.start(job);
        }
    }

    /// Starts a task for a change that is first at all its keys, so that its old values cannot
    /// change. The task reads these, and makes the change if it is first in its connection. If
    /// there are too many tasks, the change waits for one.
    fn start(self: &Rc<Self>, job: Rc<Job>) {
        if self.making.get() == MAKING_MAX {
            return self.due.borrow_mut().push_back(job);
        }
        self.making.set(self.making.get() + 1);
        let (shard, mut next) = (self.clone(), Some(job));
        self.core.spawn(Class::Foreground, async move {
            while let Some(job) = next {
                run(&shard, job).await;
                shard.core.checkpoint().await;
                next = shard.due.borrow_mut().pop_front();
            }
            shard.making.set(shard.making.get() - 1);
        });
    }

    /// Whether a change is the first of its connection.
    fn is_first(&self, job: &Rc<Job>) -> bool {
        self.turns.borrow().is_first(job.connection, job)
    }

    /// Reads the old values of a change that is not made yet. No other change of its keys is made
    /// meanwhile.
    async fn read_ahead(&self, job: &Job) {
        let Some((mut change, target)) = job.change.take() else { return };
        self.changed.wait_until(|| self.has_room(&change) || self.failed.borrow().is_some()).await;
        if self.failed.borrow().is_some() {
            job.change.replace(Some((change, target)));
            return;
        }
        // A failed read is repeated when its turn has come.
        if let Ok(old) = self.read(&mut change).await {
            let bytes = old.iter().map(OldValue::len).sum();
            if self.ahead_bytes.get() + bytes <= AHEAD_BYTES_MAX {
                self.ahead_bytes.set(self.ahead_bytes.get() + bytes);
                job.ahead.set(Some(ReadAhead { old, bytes, refusals: self.refusals.get() }));
            }
        }
        job.change.replace(Some((change, target)));
    }

    fn take_ahead(&self, job: &Job) -> Option<ReadAhead> {
        let ahead = job.ahead.take()?;
        self.ahead_bytes.set(self.ahead_bytes.get() - ahead.bytes);
        Some(ahead)
    }

    /// Ends a waiting change that has been made: the next changes at its keys may start.
    fn done(self: &Rc<Self>, job: &Job) {
        self.jobs.set(self.jobs.get() - 1);
        for key in &job.keys {
            let next = self.overlay.borrow_mut().next(key, self.print(key));
            if let Some(next) = next {
                next.behind.set(next.behind.get() - 1);
                if next.behind.get() == 0 {
                    self.start(next);
                }
            }
        }
    }

    /// Makes the next changes of a connection that are ready, after its first one has been made.
    fn make_next(self: &Rc<Self>, connection: Connection) {
        let mut made = 0;
        loop {
            let next = self.turns.borrow_mut().next(connection);
            let Some(job) = next.filter(|job| job.is_ready.get()) else { return };
            let has_room =
                job.change.borrow().as_ref().is_some_and(|(change, _)| self.has_room(change));
            let ahead = if has_room && made < MADE_PER_TURN { self.take_ahead(&job) } else { None };
            let ahead = ahead.filter(|ahead| ahead.refusals == self.refusals.get());
            let Some((ahead, (change, target))) =
                ahead.and_then(|ahead| Some((ahead, job.change.take()?)))
            else {
                return self.due.borrow_mut().push_front(job);
            };
            self.make(change, ahead.old, target);
            self.done(&job);
            made += 1;
        }
    }
}

/// Makes a change that is first at all its keys; or only reads its old values, if others of its
/// connection are before it.
async fn run(shard: &Rc<ShardState>, job: Rc<Job>) {
    if !shard.is_first(&job) && !job.is_ready.get() && !job.is_long {
        shard.read_ahead(&job).await;
    }
    if !shard.is_first(&job) {
        return job.is_ready.set(true);
    }
    let mut ahead = shard.take_ahead(&job);
    let mut waiting: VecDeque<_> = job.change.take().into_iter().collect();
    while let Some((mut change, target)) = waiting.pop_front() {
        shard
            .changed
            .wait_until(|| shard.has_room(&change) || shard.failed.borrow().is_some())
            .await;
        if let Some(text) = &*shard.failed.borrow() {
            shard.answer_in_turn(target, Answer::Failed(text.clone()));
            continue;
        }
        // Changes that wait for the same room must see what this one takes while it reads.
        if is_long(&change) {
            shard.unpack(&mut change).await;
        }
        let expected = shard.expect_built(&change);
        // After a refusal the values may be wrong.
        let ahead = ahead.take().filter(|ahead| ahead.refusals == shard.refusals.get());
        let old = match ahead {
            Some(ahead) => Ok(ahead.old),
            None => match change.kind {
                Operation::Combine(operation) => shard.combine(operation, &mut change).await,
                _ => shard.read(&mut change).await,
            },
        };
        shard.built_bytes.set(shard.built_bytes.get() - expected);
        match old {
            // The room was taken without knowing the length of the old value.
            Ok(_) if !shard.has_room(&change) => waiting.push_front((change, target)),
            Ok(old) => shard.make(change, old, target),
            // The failed key may belong to one of its commands only.
            Err(_) if change.commands() > 1 => waiting.extend(split(change, target)),
            Err(error) => shard.answer_in_turn(target, engine_answer(&error)),
        }
    }
    shard.done(&job);
    shard.make_next(job.connection);
    shard.changed.notify_all();
    shard.end_turn();
}
