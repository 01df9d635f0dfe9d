//! Makes changes: from the old values of their keys to batches and answers.

use std::collections::BTreeSet;
use std::mem;
use std::rc::Rc;

use lsm::BatchWriter;
use reactor::Class;

use crate::command::operation::{Operation, Transfer, When};
use crate::expiry::Deadline;
use crate::settings::FAMILY;
use crate::shard::ShardState;
use crate::shard::announce::Written;
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
    /// When the keys of the batch end, in their order; those that are missing here never end.
    pub deadlines: Vec<Deadline>,
}

impl ShardState {
    /// Makes a change now, or queues it.
    pub(super) fn begin(self: &Rc<Self>, mut change: Change, target: AnswerTarget) {
        if lsm::mutant("watches_are_checked_early")
            && let Some(steps) = change.steps.as_mut().filter(|steps| steps.watching)
        {
            steps.watching = false;
            if self
                .watches
                .borrow_mut()
                .take_conflict(target.answers.connection, self.core.unix_time_ms())
            {
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
            if cleared.is_ok() {
                shard.ledger.clear().await;
            }
            let answer = match cleared {
                Ok(_) => {
                    shard.known.borrow_mut().clear();
                    if shard.is_tracked() {
                        shard.announce([Written::All(target.answers.connection)]);
                    }
                    Answer::Ok
                }
                Err(error) => shard.fail(&error),
            };
            shard.settle(vec![(target, answer)]);
            shard.set_barrier(Barrier::None, None);
        });
    }

    /// Makes a change whose old values are known.
    pub(super) fn make(&self, change: Change, mut old: Vec<OldValue>, target: AnswerTarget) {
        let connection = target.answers.connection;
        let now_ms = self.core.unix_time_ms();
        for old in &mut old {
            if let OldValue::Until(..) = old {
                *old = mem::replace(old, OldValue::Unknown).at(now_ms);
            }
        }
        match change.kind {
            Operation::Sync => return self.sync(target),
            Operation::Watch => return self.watch(change, &old, target),
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
            Operation::Execute => self.execute(change, &mut old, connection, now_ms),
            Operation::Reclaim => Ok(self.reclaim(change, &mut old)),
            _ => Ok(self.compute(change, &mut old, now_ms)),
        };
        let MadeChange { batch, answer, built_bytes, deadlines } = match made {
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
                self.gather(batch, (&old, &deadlines), built_bytes, (target, answer));
                if alone {
                    self.submit();
                }
            }
            None => self.answer_in_turn(target, answer),
        }
    }

    /// Computes what a change writes and how it is answered. `old` becomes the state before the
    /// batch that is written.
    pub(super) fn compute(
        &self,
        mut change: Change,
        old: &mut Vec<OldValue>,
        now_ms: u64,
    ) -> MadeChange {
        let (batch, answer) = match change.kind {
            Operation::Put if !change.when.is_empty() => return put_until(change, now_ms),
            Operation::Put if change.puts_of > 0 => {
                (Some(change.batch), Answer::Oks(change.puts_of))
            }
            Operation::Put => (Some(change.batch), Answer::Ok),
            Operation::PutIfNone if old.iter().any(OldValue::exists) => (None, Answer::Integer(0)),
            Operation::PutIfNone => (Some(change.batch), Answer::Integer(1)),
            Operation::Delete => {
                let (batch, count) = existing(&mut change.batch, old);
                ((count > 0).then_some(batch), Answer::Integer(count))
            }
            Operation::Reclaim => (None, Answer::Null),
            Operation::Combine(_) => return combined(change.batch),
            Operation::Transfer(how) => return transfer(how, change.batch, old),
            _ => return self.compute_one(change, old, now_ms),
        };
        MadeChange { batch, answer, built_bytes: 0, deadlines: Vec::new() }
    }

    /// The same for a change of one key that depends on its old value.
    fn compute_one(&self, change: Change, old: &mut [OldValue], now_ms: u64) -> MadeChange {
        let (kind, when) = (change.kind, change.when(0));
        let mut change = change.batch;
        let mut made =
            MadeChange { batch: None, answer: Answer::Null, built_bytes: 0, deadlines: Vec::new() };
        let Some((key, operand)) = entries(&mut change).next() else { return made };
        let before = mem::replace(&mut old[0], OldValue::There);
        let (known, exists) = (before.deadline(), before.exists());
        if !exists {
            old[0] = before.without_value();
        }
        let asked_ms = match when {
            When::At(at) => at,
            When::In(ms) => ms.saturating_add_unsigned(now_ms),
            When::Never | When::Keep | When::Refused(_) => i64::MAX,
        };
        if let Operation::Expire(only) = kind
            && !(exists && only.allows(known, asked_ms))
        {
            made.answer = Answer::Integer(0);
            return made;
        }
        let (write, answer) =
            modify::modify(kind, before, operand.unwrap_or_default(), self.value_bytes_max.get());
        made.answer = answer;
        if kind == Operation::GetExpire && matches!(when, When::Never) && known == Deadline::NEVER {
            // PERSIST takes nothing away.
            return made;
        }
        let value = match &write {
            Write::Nothing => return made,
            Write::AsItIs => operand,
            Write::Value(value) => Some(&value[..]),
        };
        if let When::Refused(text) = when {
            made.answer = Answer::Refused(text);
            return made;
        }
        let when = if kind.keeps_deadline() { When::Keep } else { when };
        match when.deadline(now_ms, known) {
            Some(deadline) => made.deadlines.push(deadline),
            None => {
                // It ends at once.
                let mut removal = BatchWriter::new();
                removal.delete(FAMILY, key);
                made.batch = exists.then_some(removal);
                return made;
            }
        }
        if matches!(write, Write::Value(_)) || matches!(kind, Operation::Restore { .. }) {
            made.built_bytes = value.map_or(0, <[u8]>::len);
        }
        made.batch = match write {
            Write::Value(value) => Some(modify::put(key, &value)),
            _ => Some(change),
        };
        made
    }

    /// Removes a key that has expired. The answer is 0 if it has a deadline that has not passed,
    /// but should have: the clock was set back.
    fn reclaim(&self, mut change: Change, old: &mut [OldValue]) -> MadeChange {
        let mut made = MadeChange {
            batch: None,
            answer: Answer::Integer(1),
            built_bytes: 0,
            deadlines: Vec::new(),
        };
        let Some((key, Some(due))) = change.entries().next() else { return made };
        match &old[0] {
            OldValue::Expired => {
                let mut removal = BatchWriter::new();
                removal.delete(FAMILY, key);
                made.batch = Some(removal);
                self.ledger.count_expired(1);
            }
            OldValue::Until(deadline, _)
                if deadline.unix_ms().is_some_and(|at| at.to_be_bytes() == *due) =>
            {
                made.answer = Answer::Integer(0);
            }
            _ => {}
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

/// Sets keys that end. Those that end at once are removed.
fn put_until(mut change: Change, now_ms: u64) -> MadeChange {
    let when = mem::take(&mut change.when);
    let at = |at: usize| when.get(at).copied().unwrap_or_default();
    let mut deadlines = Vec::with_capacity(when.len());
    let mut any_ends = false;
    for when in &when {
        let deadline = when.deadline(now_ms, Deadline::NEVER);
        any_ends |= deadline.is_none();
        deadlines.push(deadline.unwrap_or_default());
    }
    if any_ends {
        let mut batch = BatchWriter::new();
        for (number, (key, value)) in change.entries().enumerate() {
            match at(number).deadline(now_ms, Deadline::NEVER) {
                Some(_) => batch.put(FAMILY, key, value.unwrap_or_default()),
                None => batch.delete(FAMILY, key),
            }
        }
        change.batch = batch;
    }
    MadeChange { batch: Some(change.batch), answer: Answer::Ok, built_bytes: 0, deadlines }
}

/// Stores the result of a `BITOP`.
fn combined(mut batch: BatchWriter) -> MadeChange {
    let length = entries(&mut batch).next().map(|(_, value)| value.map_or(0, <[u8]>::len));
    let built_bytes = length.unwrap_or(0);
    let answer = Answer::Integer(built_bytes as i64);
    MadeChange { batch: length.map(|_| batch), answer, built_bytes, deadlines: Vec::new() }
}

/// Gives a key the value of another one. `old` becomes the state before the batch.
fn transfer(how: Transfer, mut batch: BatchWriter, old: &mut Vec<OldValue>) -> MadeChange {
    let none = |answer| MadeChange { batch: None, answer, built_bytes: 0, deadlines: Vec::new() };
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
    let deadline = source.deadline();
    let value = mem::replace(source, OldValue::There).into_bytes();
    let (mut made, mut deadlines) = (BatchWriter::new(), Vec::new());
    if how.moves() {
        // Tracked connections hear of them in Redis's order.
        made.delete(FAMILY, from);
        deadlines.push(Deadline::NEVER);
        old.swap(0, 1);
    } else {
        old.truncate(1);
    }
    made.put(FAMILY, to, &value);
    deadlines.push(deadline);
    let answer = if how == Transfer::Rename { Answer::Ok } else { Answer::Integer(1) };
    MadeChange { batch: Some(made), answer, built_bytes: value.len(), deadlines }
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
        let (both, copied) = (vec!["a=-".to_owned(), "b=v".to_owned()], vec!["b=v".to_owned()]);
        for (how, written, answer, before) in [
            (Transfer::Rename, both.clone(), Answer::Ok, vec![true, false]),
            (Transfer::RenameIfNone, both.clone(), Answer::Integer(1), vec![true, false]),
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
