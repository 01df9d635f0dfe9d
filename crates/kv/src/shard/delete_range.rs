//! Removing all keys of a range with one write, and counting them.
//!
//! 1. Later changes wait until every earlier one has been made. Then those that name no key of the
//!    range go on. The others, and all later changes of the same connections, stay in the queue.
//! 2. When the writes before have landed, readers see all earlier changes of the range, and there
//!    are no later ones. The keys are counted in steps, without holding anything but a counter.
//! 3. One range deletion is written, with the change of the number of keys. When it has landed, the
//!    changes that waited are made.

use std::collections::BTreeSet;
use std::rc::Rc;

use lsm::{BatchWriter, IterOptions, Op, WriteBatch};
use reactor::Class;

use crate::expiry::ledger::Noted;
use crate::shard::ShardState;
use crate::shard::announce::Written;
use crate::shard::answers::{AnswerTarget, engine_answer};
use crate::shard::change::{Answer, Change};
use crate::shard::turns::Connection;

/// Keys counted between two checkpoints of the task.
pub(super) const KEYS_AT_ONCE: i64 = 128;
pub(super) const WRONG_ORDER: &str =
    "ERR MR.DELRANGE needs a database whose keys are in the order of bytes";

/// What later changes must wait for.
#[derive(Default)]
pub(super) enum Barrier {
    #[default]
    None,
    /// A change that comes after all earlier changes and before all later ones.
    All,
    /// A range of keys is being removed.
    Range(KeyRange),
}

/// A range of keys.
#[derive(Clone)]
pub(crate) struct KeyRange {
    pub start: Vec<u8>,
    /// Exclusive; `None` for the last key.
    pub end: Option<Vec<u8>>,
}

impl KeyRange {
    /// All keys.
    pub const ALL: Self = Self { start: Vec::new(), end: None };

    /// The range of a change of kind `DeleteRange`.
    pub fn of(change: &mut Change) -> Option<KeyRange> {
        let batch = WriteBatch::parse(change.batch.finish(0)).ok()?;
        match batch.ops().next()? {
            Ok((_, Op::DeleteRange { begin, end, .. })) => {
                Some(KeyRange { start: begin.to_vec(), end: Some(end.to_vec()) })
            }
            Ok((_, Op::Delete { key, .. })) => Some(KeyRange { start: key.to_vec(), end: None }),
            _ => None,
        }
    }

    pub fn has(&self, key: &[u8]) -> bool {
        self.start[..] <= *key && self.end.as_deref().is_none_or(|end| key < end)
    }
}

impl ShardState {
    /// Whether a change has to wait for one that removes many keys.
    pub(super) fn is_held(&self, change: &mut Change, target: &AnswerTarget) -> bool {
        match &*self.barrier.borrow() {
            Barrier::None => false,
            Barrier::All => true,
            Barrier::Range(range) => {
                change.kind.is_of_many_keys()
                    || self.held_connections.borrow().contains(&target.answers.connection)
                    || change.entries().any(|(key, _)| range.has(key))
            }
        }
    }

    /// Queues a change until the barrier falls.
    pub(super) fn hold(&self, change: Change, target: AnswerTarget) {
        self.held_connections.borrow_mut().insert(target.answers.connection);
        self.held.borrow_mut().push_back((change, target));
    }

    /// Replaces the barrier, and makes the changes that it does not hold back. `connection` has a
    /// change that is being made.
    pub(super) fn set_barrier(self: &Rc<Self>, barrier: Barrier, connection: Option<Connection>) {
        self.barrier.replace(barrier);
        self.held_connections.replace(BTreeSet::from_iter(connection));
        for (change, target) in self.held.take() {
            self.begin(change, target);
        }
        self.changed.notify_all();
        self.end_turn();
    }

    /// Removes all keys of a range: after all earlier changes of them, before all later ones.
    pub(super) fn delete_range(self: &Rc<Self>, mut change: Change, target: AnswerTarget) {
        self.barrier.replace(Barrier::All);
        let shard = self.clone();
        self.core.spawn(Class::Foreground, async move {
            let connection = target.answers.connection;
            shard.changed.wait_until(|| shard.jobs.get() == 0).await;
            let answer = match KeyRange::of(&mut change) {
                Some(range) => shard.remove(range, connection).await,
                None => Answer::Integer(0),
            };
            shard.settle(vec![(target, answer)]);
            shard.set_barrier(Barrier::None, None);
        });
    }

    /// Whether the keys are in the order of bytes.
    pub(super) fn is_ascending(&self) -> bool {
        let families = self.reader.db().column_families();
        families.iter().any(|family| {
            family.id == self.family && family.comparator == "leveldb.BytewiseComparator"
        })
    }

    async fn remove(self: &Rc<Self>, range: KeyRange, connection: Connection) -> Answer {
        if !self.is_ascending() {
            return Answer::Failed(WRONG_ORDER.into());
        }
        self.submit();
        let before = self.ticket.get();
        self.set_barrier(Barrier::Range(range.clone()), Some(connection));
        self.changed.wait_until(|| self.landed.get() >= before).await;
        if let Some(text) = &*self.failed.borrow() {
            return Answer::Failed(text.clone());
        }
        let (keys, end) = match self.count_keys(&range).await {
            Ok((0, _)) => return Answer::Integer(0),
            Ok(counted) => counted,
            Err(error) => return engine_answer(&error),
        };
        // No watch of a key of the range begins meanwhile.
        self.touch_existing(Some(&range)).await;
        let mut batch = BatchWriter::new();
        batch.delete_range(self.family, &range.start, &end);
        match self.write_removing(batch, -keys, Vec::new()).await {
            Ok(()) => {
                if self.is_tracked() {
                    self.announce([Written::Range(range)]);
                }
                Answer::Integer(keys)
            }
            Err(answer) => answer,
        }
    }

    /// Writes a batch that removes ranges, and changes the number of keys by `keys`. Later changes
    /// wait behind a barrier. Suspends until it is durable and visible.
    ///
    /// # Errors
    /// The answer to the client, if it is not written.
    pub(super) async fn write_removing(
        &self,
        batch: BatchWriter,
        keys: i64,
        notes: Vec<Noted>,
    ) -> Result<(), Answer> {
        if !notes.is_empty() {
            self.ledger.begin();
        }
        if let Some(text) = &*self.failed.borrow() {
            return Err(Answer::Failed(text.clone()));
        }
        let written = match self.submit_noted(batch, self.counted(keys), notes) {
            Ok(written) => written.await,
            Err(error) => Err(error),
        };
        // It may remember keys of the ranges.
        self.known.borrow_mut().forget();
        match written {
            Ok(_) => {
                self.count(|stats| stats.written += 1);
                self.unsaved.set(self.unsaved.get() + 1);
                Ok(())
            }
            Err(error) => Err(self.fail(&error)),
        }
    }

    /// The number of keys in a range, and the exclusive end of the range. Suspends for blocks, and
    /// to let other tasks run.
    async fn count_keys(&self, range: &KeyRange) -> lsm::Result<(i64, Vec<u8>)> {
        let (lower, upper) = (Some(range.start.clone()), range.end.clone());
        let mut iter = self
            .reader
            .iter(self.family, IterOptions { lower, upper, ..IterOptions::default() })?;
        let end = match &range.end {
            Some(end) => end.clone(),
            None => {
                iter.seek_to_last().await?;
                let mut after = iter.key().to_vec();
                after.push(0);
                after
            }
        };
        let mut keys = 0;
        iter.seek_to_first().await?;
        while iter.valid() && self.failed.borrow().is_none() {
            keys += 1;
            if keys % KEYS_AT_ONCE == 0 {
                self.core.checkpoint().await;
            }
            iter.next().await?;
        }
        Ok((keys, end))
    }
}
