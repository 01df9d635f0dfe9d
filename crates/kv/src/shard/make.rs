//! Makes changes: from the old values of their keys to batches and answers.

use std::collections::BTreeSet;
use std::mem;
use std::rc::Rc;

use lsm::BatchWriter;
use reactor::Class;

use crate::command::operation::{Operation, Transfer};
use crate::settings::FAMILY;
use crate::shard::ShardState;
use crate::shard::answers::{AnswerTarget, engine_answer, split};
use crate::shard::change::{Answer, Change, entries};
use crate::shard::delete_range::Barrier;
use crate::shard::knowledge::Knowledge;
use crate::shard::long::is_long;
use crate::shard::modify::{self, OldValue, Write};

/// Largest batch of the engine.
pub(super) const BATCH_BYTES_MAX: usize = 256 << 20;
/// A change of up to this size goes to the engine together with others.
const GATHERED_EACH_BYTES: usize = 1024;
/// Bytes of changes that go to the engine without waiting for more.
const GATHERED_BYTES: usize = 64 * 1024;

const NO_SUCH_KEY: &str = "ERR no such key";

/// What a change writes, and its answer.
pub(super) struct MadeChange {
    /// `None` if there is nothing to write.
    pub batch: Option<BatchWriter>,
    pub answer: Answer,
    /// Length of the value that was built here.
    pub built_bytes: usize,
}

impl ShardState {
    /// Makes a change now, or queues it.
    pub(super) fn begin(self: &Rc<Self>, mut change: Change, target: AnswerTarget) {
        if lsm::mutant("watches_are_checked_early")
            && let Some(steps) = change.steps.as_mut().filter(|steps| steps.watching)
        {
            steps.watching = false;
            if self.watches.borrow_mut().take_conflict(target.answers.connection) {
                return self.answer_in_turn(target, Answer::Conflict);
            }
        }
        if self.is_held(&mut change, &target) {
            return self.hold(change, target);
        }
        match change.kind {
            Operation::Clear => return self.clear(target),
            Operation::DeleteRange => return self.delete_range(change, target),
            Operation::ExecuteAlone => return self.execute_alone(change, target),
            _ => {}
        }
        let awaited = self.jobs.get() > 0 && {
            let overlay = self.overlay.borrow();
            self.turns.borrow().is_awaited(target.answers.connection)
                || change.entries().any(|(key, _)| overlay.is_awaited(key, self.print(key)))
        };
        // A long computation has a task of its own.
        if !awaited && !is_long(&change) && self.has_room(&change) {
            match self.look_up(&mut change) {
                Knowledge::All(old) => return self.make(change, old, target),
                Knowledge::Failed(_) if change.commands() > 1 => {
                    return split(change, target)
                        .for_each(|(change, target)| self.begin(change, target));
                }
                Knowledge::Failed(error) => {
                    return self.answer_in_turn(target, engine_answer(&error));
                }
                Knowledge::Partial(_) | Knowledge::After(_) => {}
            }
        }
        self.queue(change, target);
    }

    /// Removes every key: after all earlier changes, before all later ones.
    fn clear(self: &Rc<Self>, target: AnswerTarget) {
        self.barrier.replace(Barrier::All);
        let shard = self.clone();
        self.core.spawn(Class::Foreground, async move {
            // It empties level 0, so it must not wait until merges have made room there.
            let passing = shard.writer.let_pass();
            shard.changed.wait_until(|| shard.is_idle()).await;
            drop(passing);
            shard.touch_existing(None).await;
            let cleared = match shard.writer.clear(shard.family) {
                Ok(written) => written.await,
                Err(error) => Err(error),
            };
            let answer = match cleared {
                Ok(_) => {
                    shard.known.borrow_mut().clear();
                    Answer::Ok
                }
                Err(error) => shard.fail(&error),
            };
            shard.answer(target, answer);
            shard.set_barrier(Barrier::None, None);
        });
    }

    /// Makes a change whose old values are known.
    pub(super) fn make(&self, change: Change, mut old: Vec<OldValue>, target: AnswerTarget) {
        let connection = target.answers.connection;
        match change.kind {
            Operation::Sync => return self.sync(target),
            Operation::Watch => return self.watch(change, target),
            Operation::Unwatch => {
                self.watches.borrow_mut().end(connection);
                return self.answer_in_turn(target, Answer::Ok);
            }
            _ => {}
        }
        if let Some(text) = &*self.failed.borrow() {
            return self.answer_in_turn(target, Answer::Failed(text.clone()));
        }
        let made = match change.kind {
            Operation::Execute => self.execute(change, &mut old, connection),
            _ => Ok(self.compute(change, &mut old)),
        };
        let MadeChange { batch, answer, built_bytes } = match made {
            Ok(made) => made,
            Err(refusal) => return self.answer_in_turn(target, refusal),
        };
        match batch {
            Some(batch) if batch.len() > BATCH_BYTES_MAX => {
                let text = format!(
                    "OOM a write of {} bytes: at most {BATCH_BYTES_MAX} fit into one",
                    batch.len()
                );
                self.answer_in_turn(target, Answer::Failed(text.into()));
            }
            Some(batch) => {
                let alone = batch.len() > GATHERED_EACH_BYTES;
                if alone || self.gathered.borrow().batch.len() > GATHERED_BYTES {
                    self.submit();
                }
                self.gather(batch, &old, built_bytes, (target, answer));
                if alone {
                    self.submit();
                }
            }
            None => self.answer_in_turn(target, answer),
        }
    }

    /// Computes what a change writes and how it is answered. `old` becomes the state before the
    /// batch that is written.
    pub(super) fn compute(&self, mut change: Change, old: &mut Vec<OldValue>) -> MadeChange {
        let (batch, answer) = match change.kind {
            Operation::Put => (Some(change.batch), Answer::Ok),
            Operation::PutIfNone if old.iter().any(OldValue::exists) => (None, Answer::Integer(0)),
            Operation::PutIfNone => (Some(change.batch), Answer::Integer(1)),
            Operation::Delete => {
                let (batch, count) = existing(&mut change.batch, old);
                ((count > 0).then_some(batch), Answer::Integer(count))
            }
            Operation::Combine(_) => return combined(change.batch),
            Operation::Transfer(how) => return transfer(how, change.batch, old),
            kind => return self.compute_one(kind, change.batch, old),
        };
        MadeChange { batch, answer, built_bytes: 0 }
    }

    /// The same for a change of one key that depends on its old value.
    fn compute_one(
        &self,
        kind: Operation,
        mut change: BatchWriter,
        old: &mut [OldValue],
    ) -> MadeChange {
        let mut made = MadeChange { batch: None, answer: Answer::Null, built_bytes: 0 };
        let Some((key, operand)) = entries(&mut change).next() else { return made };
        let before = old[0].exists();
        let (write, answer) = modify::modify(
            kind,
            mem::replace(&mut old[0], OldValue::There),
            operand.unwrap_or_default(),
            self.value_bytes_max.get(),
        );
        made.answer = answer;
        made.batch = match write {
            Write::Nothing => None,
            Write::AsItIs => {
                if matches!(kind, Operation::Restore { .. }) {
                    made.built_bytes = change.len();
                }
                Some(change)
            }
            Write::Value(value) => {
                made.built_bytes = value.len();
                Some(modify::put(key, &value))
            }
        };
        if !before {
            old[0] = OldValue::Missing;
        }
        made
    }

    /// Whether one more value may be built.
    pub(super) fn has_room(&self, change: &Change) -> bool {
        !change.builds() || self.built_bytes.get() <= self.built_bytes_max.get()
    }

    /// Takes room for the value that a change is about to build.
    pub(super) fn expect_built(&self, change: &Change) -> usize {
        let expected = change.built_bytes_min().min(self.value_bytes_max.get());
        self.built_bytes.set(self.built_bytes.get() + expected);
        expected
    }
}

/// Stores the result of a `BITOP`.
fn combined(mut batch: BatchWriter) -> MadeChange {
    let length = entries(&mut batch).next().map(|(_, value)| value.map_or(0, <[u8]>::len));
    let built_bytes = length.unwrap_or(0);
    let answer = Answer::Integer(built_bytes as i64);
    MadeChange { batch: length.map(|_| batch), answer, built_bytes }
}

/// Gives a key the value of another one. `old` becomes the state before the batch.
fn transfer(how: Transfer, mut batch: BatchWriter, old: &mut Vec<OldValue>) -> MadeChange {
    let none = |answer| MadeChange { batch: None, answer, built_bytes: 0 };
    let keys: Vec<&[u8]> = entries(&mut batch).map(|(key, _)| key).collect();
    let &[to, from] = &keys[..] else { return none(Answer::Null) };
    let [target, source] = &mut old[..] else { return none(Answer::Null) };
    match how {
        Transfer::Rename | Transfer::RenameIfNone if !source.exists() => {
            return none(Answer::Refused(NO_SUCH_KEY));
        }
        Transfer::Rename if to == from => return none(Answer::Ok),
        _ if !source.exists() || target.exists() && !how.overwrites() => {
            return none(Answer::Integer(0));
        }
        _ => {}
    }
    let value = mem::replace(source, OldValue::There).into_bytes();
    let mut made = modify::put(to, &value);
    if how.moves() {
        made.delete(FAMILY, from);
    } else {
        old.truncate(1);
    }
    let answer = if how == Transfer::Rename { Answer::Ok } else { Answer::Integer(1) };
    MadeChange { batch: Some(made), answer, built_bytes: value.len() }
}

/// Keeps the removals of existing keys, each once, and counts them. `old` becomes the state before
/// these.
fn existing(batch: &mut BatchWriter, old: &mut Vec<OldValue>) -> (BatchWriter, i64) {
    let mut kept = BatchWriter::new();
    let mut seen = BTreeSet::new();
    for ((key, _), old) in entries(batch).zip(old.iter()) {
        if old.exists() && seen.insert(key) {
            kept.delete(FAMILY, key);
        }
    }
    let count = i64::from(kept.count());
    *old = vec![OldValue::There; kept.count() as usize];
    (kept, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a transfer from `a` to `b` writes, answers, and replaces.
    fn moved(how: Transfer, a: OldValue, b: OldValue) -> (Vec<String>, Answer, Vec<bool>) {
        let mut change = BatchWriter::new();
        change.put(FAMILY, b"b", b"");
        change.delete(FAMILY, b"a");
        let mut old = vec![b, a];
        let made = transfer(how, change, &mut old);
        let written = made.batch.map(|mut batch| {
            let entries = entries(&mut batch).map(|(key, value)| {
                let value = value.map(|value| String::from_utf8_lossy(value).into_owned());
                format!("{}={}", key.escape_ascii(), value.as_deref().unwrap_or("-"))
            });
            entries.collect::<Vec<_>>()
        });
        let before = written.as_ref().map(|_| old.iter().map(OldValue::exists).collect());
        (written.unwrap_or_default(), made.answer, before.unwrap_or_default())
    }

    #[test]
    fn a_key_gets_the_value_of_another_in_one_batch() {
        let value = || OldValue::Value(b"v".to_vec());
        let (both, copied) = (vec!["b=v".to_owned(), "a=-".to_owned()], vec!["b=v".to_owned()]);
        for (how, written, answer, before) in [
            (Transfer::Rename, both.clone(), Answer::Ok, vec![false, true]),
            (Transfer::RenameIfNone, both.clone(), Answer::Integer(1), vec![false, true]),
            (Transfer::Copy, copied.clone(), Answer::Integer(1), vec![false]),
            (Transfer::CopyOver, copied.clone(), Answer::Integer(1), vec![false]),
        ] {
            assert_eq!(moved(how, value(), OldValue::Missing), (written, answer, before));
        }
        for (how, written, answer, before) in [
            (Transfer::Rename, both, Answer::Ok, vec![true, true]),
            (Transfer::RenameIfNone, vec![], Answer::Integer(0), vec![]),
            (Transfer::Copy, vec![], Answer::Integer(0), vec![]),
            (Transfer::CopyOver, copied, Answer::Integer(1), vec![true]),
        ] {
            assert_eq!(moved(how, value(), OldValue::There), (written, answer, before));
        }
        let missing = |how| moved(how, OldValue::Missing, OldValue::There).1;
        assert_eq!(missing(Transfer::Rename), Answer::Refused(NO_SUCH_KEY));
        assert_eq!(missing(Transfer::RenameIfNone), Answer::Refused(NO_SUCH_KEY));
        assert_eq!(missing(Transfer::CopyOver), Answer::Integer(0));
    }
}
