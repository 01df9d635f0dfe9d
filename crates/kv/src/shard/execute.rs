//! Executes the commands of a transaction on what is known about its keys.
//!
//! [`Steps`] travel from a connection to the shard as one change. The change waits at all keys that
//! the commands name, like a change of a single command, and is made in one go: the commands see
//! the state before them with the effects of the commands before ([`Keys`]), and what they leave is
//! one batch. Commands that concern keys which they do not name are executed by `alone`.
//!
//! Memory is bounded: a transaction whose values are too long together is refused as a whole. So is
//! one whose replies are longer than was admitted; the connection then takes memory for them, and
//! sends the transaction again.

use std::collections::BTreeMap;

use lsm::BatchWriter;

use crate::command::bits::{BitOperation, STEP_BYTES};
use crate::command::commands::Ask;
use crate::command::operation::Operation;
use crate::command::range::Extent;
use crate::expiry::Deadline;
use crate::expiry::ledger::Noted;
use crate::expiry::record::hash;
use crate::settings::FAMILY;
use crate::shard::ShardState;
use crate::shard::change::{Answer, Change, Need, entries};
use crate::shard::delete_range::KeyRange;
use crate::shard::make::{BATCH_BYTES_MAX, MadeChange};
use crate::shard::modify::OldValue;
use crate::shard::turns::Connection;

/// What the batch of a transaction says of each key.
pub(super) const NEED_NOTHING: &[u8] = b"";
pub(super) const NEED_EXISTENCE: &[u8] = b"e";
pub(super) const NEED_VALUE: &[u8] = b"v";

/// Memory for an answer, and the length of a reply without its value.
const ANSWER_BYTES: usize = 32;
/// Memory for a value that is to be read, as long as its length is unknown.
const VALUE_BYTES: usize = 1024;
/// Values of a transaction, as a multiple of the longest value.
pub(super) const VALUES_MAX: usize = 4;

pub(super) const TOO_MUCH: &str = "the values that a transaction reads and writes are more than four times the \
     longest value (proto-max-bulk-len) together: use several transactions";
const DISCARDED: &str = "EXECABORT Transaction discarded because of: ";

/// The commands of a transaction that concern keys, in order.
pub(crate) struct Steps {
    pub list: Vec<Step>,
    /// The connection watches keys: nothing is executed if one of them was written.
    pub watching: bool,
    /// The bytes of replies for which there is memory.
    pub reply_bytes_max: usize,
}

/// A command of a transaction.
pub(crate) enum Step {
    Change(Change),
    /// A read of one key, answered by its value.
    Read(Vec<u8>, Ask),
    /// `MGET`.
    Values(Vec<Vec<u8>>),
    /// `EXISTS`.
    Exists(Vec<Vec<u8>>),
    /// `DBSIZE`.
    Count,
    /// `KEYS` and `MR.RANGE`.
    Walk(KeyWalk),
}

/// A walk over the keys of a range.
pub(crate) struct KeyWalk {
    pub range: KeyRange,
    pub reverse: bool,
    pub extent: Extent,
    pub pattern: Option<Vec<u8>>,
}

impl Steps {
    /// Whether a command concerns keys that it does not name.
    pub fn is_alone(&self) -> bool {
        self.list.iter().any(|step| match step {
            Step::Change(change) => change.kind.is_of_many_keys(),
            Step::Count | Step::Walk(_) => true,
            Step::Read(..) | Step::Values(_) | Step::Exists(_) => false,
        })
    }

    /// The keys that the commands name, each once, with what must be known about it.
    pub fn needs(&mut self) -> BTreeMap<Vec<u8>, Need> {
        let mut needs = BTreeMap::new();
        for step in &mut self.list {
            step.needs(&mut |key, need| {
                let known = needs.entry(key.to_vec()).or_insert(need);
                *known = need.max(*known);
            });
        }
        needs
    }

    /// The approximate memory of the commands.
    pub fn weight(&self) -> usize {
        let of_step = |step: &Step| match step {
            Step::Change(change) => change.weight(),
            Step::Read(key, _) => key.len() + VALUE_BYTES,
            Step::Values(keys) | Step::Exists(keys) => {
                keys.iter().map(|key| key.len() + VALUE_BYTES).sum()
            }
            Step::Count | Step::Walk(_) => 0,
        };
        self.list.iter().map(|step| of_step(step) + size_of::<Step>() + ANSWER_BYTES).sum()
    }

    /// The length of the values that it builds or copies, as far as it alone tells.
    pub fn built_bytes_min(&self) -> usize {
        let of_step = |step: &Step| match step {
            Step::Change(change) if change.needs_values() || change.builds() => {
                change.built_bytes_min() + VALUE_BYTES
            }
            Step::Read(_, ask) if need_of(*ask) == Need::Value => VALUE_BYTES,
            Step::Values(keys) => keys.len() * VALUE_BYTES,
            Step::Change(_) | Step::Read(..) | Step::Exists(_) | Step::Count | Step::Walk(_) => 0,
        };
        self.list.iter().map(of_step).fold(0, usize::saturating_add)
    }
}

impl Step {
    /// Names its keys, with what must be known about each. A database whose keys are counted must
    /// know more, see [`Change::needs`].
    pub fn needs(&mut self, name: &mut dyn FnMut(&[u8], Need)) {
        match self {
            Step::Change(change) => {
                change.needs(false).for_each(|(key, need)| name(key, need));
            }
            Step::Read(key, ask) => name(key, need_of(*ask)),
            Step::Values(keys) => keys.iter().for_each(|key| name(key, Need::Value)),
            Step::Exists(keys) => keys.iter().for_each(|key| name(key, Need::Existence)),
            Step::Count | Step::Walk(_) => {}
        }
    }
}

fn need_of(ask: Ask) -> Need {
    match ask {
        Ask::Type | Ask::TimeToLive(_) | Ask::Frequency | Ask::IdleTime => Need::Existence,
        Ask::Value
        | Ask::Placed
        | Ask::Length
        | Ask::Part { .. }
        | Ask::Bit(_)
        | Ask::Encoding
        | Ask::Memory(_)
        | Ask::References => Need::Value,
    }
}

/// A key of a transaction.
struct KeyState {
    /// It existed before the transaction.
    existed: bool,
    now: OldValue,
    /// The number of its first write among those of the transaction.
    written: Option<u32>,
}

impl KeyState {
    fn write(&mut self, writes: &mut u32) {
        if self.written.is_none() {
            self.written = Some(*writes);
            *writes += 1;
        }
    }
}

/// The keys of a transaction, and what its commands have left.
pub(super) struct Keys {
    states: BTreeMap<Vec<u8>, KeyState>,
    /// Ranges of which all keys were removed, with exclusive ends, and the number of keys in them
    /// that are not among these.
    removed: Vec<(Vec<u8>, Vec<u8>)>,
    removed_keys: i64,
    /// Keys written so far.
    writes: u32,
    /// Every key was removed.
    cleared: bool,
    /// Bytes of values read, and of values built and answered.
    read_bytes: usize,
    bytes: usize,
    bytes_max: usize,
    reply_bytes: usize,
    reply_bytes_max: usize,
    /// The time of the transaction.
    now_ms: u64,
}

/// Computes what a change writes, and its answer.
pub(super) type Compute<'a> = &'a dyn Fn(Change, &mut Vec<OldValue>, u64) -> MadeChange;

impl Keys {
    pub fn new(bytes_max: usize, reply_bytes_max: usize, now_ms: u64) -> Self {
        Self {
            states: BTreeMap::new(),
            removed: Vec::new(),
            removed_keys: 0,
            writes: 0,
            cleared: false,
            read_bytes: 0,
            bytes: 0,
            bytes_max,
            reply_bytes: 0,
            reply_bytes_max,
            now_ms,
        }
    }

    /// Notes what was known about a key before the transaction.
    pub fn insert(&mut self, key: &[u8], old: OldValue) {
        let now = old.at(self.now_ms);
        let state = KeyState { existed: now.is_stored(), now, written: None };
        self.states.insert(key.to_vec(), state);
    }

    /// Notes what was learned about a key while the transaction is executed. It may have been known
    /// less well.
    ///
    /// # Errors
    /// The answer to the whole transaction, if its values are too long.
    pub fn learn(&mut self, key: &[u8], old: OldValue) -> Result<(), Answer> {
        self.read_bytes += old.len();
        if self.read_bytes > self.bytes_max {
            return Err(too_much());
        }
        match self.states.get_mut(key) {
            Some(state) => state.now = old.at(self.now_ms),
            None => self.insert(key, old),
        }
        Ok(())
    }

    /// Whether the state of a key is known, as far as `need` asks.
    pub fn knows(&self, key: &[u8], need: Need) -> bool {
        match self.states.get(key).map(|state| &state.now) {
            Some(
                OldValue::Missing
                | OldValue::Expired
                | OldValue::Value(_)
                | OldValue::Until(_, Some(_)),
            ) => true,
            Some(OldValue::There | OldValue::Until(_, None)) => need <= Need::Existence,
            Some(OldValue::Unknown) => need == Need::Nothing,
            None => false,
        }
    }

    /// Whether a key without a state was removed by the transaction.
    pub fn has_removed(&self, key: &[u8]) -> bool {
        let is_in = |(start, end): &(Vec<u8>, Vec<u8>)| start[..] <= *key && key < &end[..];
        self.cleared || self.removed.iter().any(is_in)
    }

    /// Whether a key has a state.
    pub fn has(&self, key: &[u8]) -> bool {
        self.states.contains_key(key)
    }

    /// The change of the number of keys; `all` is their number before.
    pub fn delta(&self, all: i64) -> i64 {
        let now = |state: &KeyState| i64::from(state.now.exists());
        if self.cleared {
            return self.states.values().map(now).sum::<i64>() - all;
        }
        // What has expired is not removed by being seen.
        let change = |state: &KeyState| match state.now {
            OldValue::Expired => 0,
            _ => now(state) - i64::from(state.existed),
        };
        self.states.values().map(change).sum::<i64>() - self.removed_keys
    }

    /// Removes the keys of a range. Of those without a state there are `others`, all before `end`.
    /// Returns the number of keys removed.
    pub fn remove(&mut self, range: &KeyRange, end: Vec<u8>, others: i64) -> i64 {
        let mut count = others;
        for (_, state) in self.states.iter_mut().filter(|(key, _)| range.has(key)) {
            if matches!(state.now, OldValue::Missing) {
                // What is not there is not removed.
                continue;
            }
            count += i64::from(state.now.exists());
            state.now = OldValue::Missing;
            state.write(&mut self.writes);
        }
        if others > 0 {
            self.removed_keys += others;
            self.removed.push((range.start.clone(), end));
        }
        count
    }

    /// Removes all keys, which are before `end`.
    pub fn clear(&mut self, end: Vec<u8>) {
        self.remove(&KeyRange::ALL, Vec::new(), 0);
        // The engine gives an empty range no sequence number: see `notes`.
        if !end.is_empty() {
            self.removed.push((Vec::new(), end));
        }
        self.cleared = true;
    }

    /// Executes a command that names its keys, which are known.
    ///
    /// # Errors
    /// The answer to the whole transaction, if its values are too long.
    pub fn execute(&mut self, step: Step, compute: Compute<'_>) -> Result<Answer, Answer> {
        let answer = match step {
            Step::Change(change) => match change.kind {
                Operation::Combine(operation) => self.combine(operation, change)?,
                _ => self.change(change, compute)?,
            },
            Step::Read(key, ask) => match need_of(ask) {
                Need::Value => Answer::Old(self.value(&key)?),
                _ if let Ask::TimeToLive(unit) = ask => {
                    let state = self.states.get(&key).map(|state| &state.now);
                    let found = state.filter(|now| now.exists()).map(OldValue::deadline);
                    Answer::Integer(unit.answer(found, self.now_ms))
                }
                _ => Answer::Old(self.exists(&key).then(Vec::new)),
            },
            Step::Values(keys) => {
                let mut values = Vec::with_capacity(keys.len());
                for key in keys {
                    values.push(self.value(&key)?);
                }
                Answer::Values(values)
            }
            Step::Exists(keys) => {
                let count = keys.iter().filter(|key| self.exists(key)).count();
                Answer::Integer(count as i64)
            }
            // `alone` answers them.
            Step::Count | Step::Walk(_) => Answer::Null,
        };
        self.note_reply(&answer);
        Ok(answer)
    }

    /// Adds the length of a reply.
    pub fn note_reply(&mut self, answer: &Answer) {
        self.reply_bytes += ANSWER_BYTES + reply_bytes(answer);
    }

    /// Adds the length of a value that is returned.
    ///
    /// # Errors
    /// The answer to the whole transaction, if its values are too long.
    pub fn note_bytes(&mut self, bytes: usize) -> Result<(), Answer> {
        self.bytes += bytes + ANSWER_BYTES;
        if self.bytes > self.bytes_max { Err(too_much()) } else { Ok(()) }
    }

    /// The time of the transaction, in Unix milliseconds.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// The keys of a range that have a state, in order.
    pub fn of_range(&self, range: &KeyRange) -> Vec<Vec<u8>> {
        self.states.keys().filter(|key| range.has(key)).cloned().collect()
    }

    /// What is known about the value of a key.
    pub fn state(&self, key: &[u8]) -> Option<&OldValue> {
        self.states.get(key).map(|state| &state.now)
    }

    fn exists(&self, key: &[u8]) -> bool {
        self.states.get(key).is_some_and(|state| state.now.exists())
    }

    /// A copy of the value of a key.
    fn value(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Answer> {
        match self.states.get(key).and_then(|state| state.now.bytes()) {
            Some(value) => {
                self.bytes += value.len();
                let value = (self.bytes <= self.bytes_max).then(|| value.to_vec());
                value.map(Some).ok_or_else(too_much)
            }
            _ => Ok(None),
        }
    }

    fn change(&mut self, mut change: Change, compute: Compute<'_>) -> Result<Answer, Answer> {
        let mut old = Vec::with_capacity(change.batch.count() as usize);
        // A value that is too long is refused by itself, before it is built.
        let value_bytes_max = self.bytes_max / VALUES_MAX;
        let built = Some(change.built_bytes_min()).filter(|built| *built <= value_bytes_max);
        for (key, need) in change.needs(false) {
            let needs_value = need == Need::Value;
            let now = self.states.get(key).map_or(&OldValue::Missing, |state| &state.now);
            self.bytes += if needs_value { now.len() } else { 0 };
            if self.bytes + built.unwrap_or(0) > self.bytes_max {
                return Err(too_much());
            }
            old.push(match now {
                now if !needs_value => now.without_value(),
                now => now.clone(),
            });
        }
        let MadeChange { batch, answer, deadlines, .. } = compute(change, &mut old, self.now_ms);
        let mut batch = batch.unwrap_or_default();
        for (at, (key, value)) in entries(&mut batch).enumerate() {
            let value = match value {
                Some(value) => {
                    self.bytes += value.len();
                    let deadline = deadlines.get(at).copied().unwrap_or_default();
                    OldValue::of(value.to_vec(), deadline)
                }
                None => OldValue::Missing,
            };
            if self.bytes > self.bytes_max {
                return Err(too_much());
            }
            if let Some(state) = self.states.get_mut(key) {
                state.now = value;
                state.write(&mut self.writes);
            }
        }
        Ok(answer)
    }

    /// `BITOP`, in one go: its work is bounded by the bytes of a transaction.
    fn combine(&mut self, operation: BitOperation, mut change: Change) -> Result<Answer, Answer> {
        let mut result = Vec::new();
        let mut keys = change.entries().map(|(key, _)| key);
        let Some(target) = keys.next() else { return Ok(Answer::Null) };
        for (number, key) in keys.enumerate() {
            let source = self.states.get(key).and_then(|state| state.now.bytes());
            let source = source.unwrap_or_default();
            self.bytes += source.len().max(result.len());
            if self.bytes > self.bytes_max {
                return Err(too_much());
            }
            let mut at = 0;
            while operation.step(&mut result, source, at, number == 0) {
                at += STEP_BYTES;
            }
        }
        let length = result.len() as i64;
        if let Some(state) = self.states.get_mut(target) {
            if !result.is_empty() {
                state.now = OldValue::Value(result);
                state.write(&mut self.writes);
            } else if state.now.exists() {
                state.now = OldValue::Missing;
                state.write(&mut self.writes);
            }
        }
        Ok(Answer::Integer(length))
    }

    /// The answer to the whole transaction if its replies are longer than was admitted.
    pub fn check_replies(&self) -> Result<(), Answer> {
        match self.reply_bytes <= self.reply_bytes_max {
            true => Ok(()),
            false => Err(Answer::Larger(self.reply_bytes)),
        }
    }

    /// What the transaction writes, each key once after the removed ranges, with the state of each
    /// key before, and when each ends.
    pub fn batch(&self, family: lsm::CfId) -> (BatchWriter, Vec<OldValue>, Vec<Deadline>) {
        let (mut batch, mut old) = (BatchWriter::new(), Vec::new());
        let mut deadlines = Vec::new();
        for (start, end) in &self.removed {
            batch.delete_range(family, start, end);
        }
        for (key, state) in self.in_order() {
            match state.now.bytes() {
                Some(value) => batch.put(family, key, value),
                None => batch.delete(family, key),
            }
            deadlines.push(state.now.deadline());
            old.push(if state.existed { OldValue::There } else { OldValue::Missing });
        }
        (batch, old, deadlines)
    }

    /// The deadlines of what it writes, as [`Keys::batch`] has it.
    pub fn notes(&self) -> Vec<Noted> {
        let noted = self.in_order().into_iter().enumerate().filter_map(|(at, (key, state))| {
            let deadline = state.now.deadline();
            let value = state.now.bytes().filter(|_| deadline != Deadline::NEVER)?;
            let at = (self.removed.len() + at) as u64;
            Some(Noted { at, key: key.clone(), hash: hash(value), deadline })
        });
        noted.collect()
    }

    /// The keys that it writes, in the order of their first writes.
    fn in_order(&self) -> Vec<(&Vec<u8>, &KeyState)> {
        let written = self.states.iter().filter(|(_, state)| state.written.is_some());
        let mut written: Vec<_> = written.collect();
        written.sort_unstable_by_key(|(_, state)| state.written);
        written
    }

    /// Whether every key was removed.
    pub fn has_cleared(&self) -> bool {
        self.cleared
    }

    /// The keys that it writes, in order.
    pub fn written(&self) -> impl Iterator<Item = &[u8]> {
        self.in_order().into_iter().map(|(key, _)| &key[..])
    }

    /// The ranges that it removes.
    pub fn removed(&self) -> &[(Vec<u8>, Vec<u8>)] {
        &self.removed
    }
}

fn reply_bytes(answer: &Answer) -> usize {
    match answer {
        Answer::Bulk(value) | Answer::Old(Some(value)) => value.len(),
        Answer::Values(values) => {
            let bytes: usize = values.iter().flatten().map(Vec::len).sum();
            bytes + values.len() * ANSWER_BYTES
        }
        Answer::Failed(text) => text.len(),
        Answer::Refused(text) => text.len(),
        Answer::Integers(values) => values.len() * ANSWER_BYTES,
        Answer::Oks(count) => *count as usize * ANSWER_BYTES,
        Answer::Ok
        | Answer::Null
        | Answer::Integer(_)
        | Answer::Old(None)
        | Answer::Executed(_)
        | Answer::Conflict
        | Answer::Larger(_) => 0,
    }
}

/// The refusal of a transaction with too much to read and write.
pub(super) fn too_much() -> Answer {
    Answer::Failed(format!("{DISCARDED}OOM {TOO_MUCH}").into())
}

/// The answer to a transaction that was refused for the reason of another answer.
pub(crate) fn discarded(answer: Answer) -> Answer {
    match answer {
        Answer::Failed(text) if !text.starts_with(DISCARDED) => {
            Answer::Failed(format!("{DISCARDED}{text}").into())
        }
        answer => answer,
    }
}

impl ShardState {
    /// The bytes of values that a transaction may read and write together.
    pub(super) fn transaction_bytes_max(&self) -> usize {
        self.value_bytes_max.get().saturating_mul(VALUES_MAX).min(BATCH_BYTES_MAX)
    }

    /// Executes a transaction whose keys are known. `old` becomes the state before the batch that
    /// is written.
    pub(super) fn execute(
        &self,
        mut change: Change,
        old: &mut Vec<OldValue>,
        connection: Connection,
        now_ms: u64,
    ) -> Result<MadeChange, Answer> {
        let Some(steps) = change.steps.take() else {
            return Ok(MadeChange {
                batch: None,
                answer: Answer::Null,
                built_bytes: 0,
                deadlines: Vec::new(),
            });
        };
        if steps.watching && self.watches.borrow_mut().take_conflict(connection, now_ms) {
            return Err(Answer::Conflict);
        }
        let builds = steps.built_bytes_min() > 0;
        let mut keys = Keys::new(self.transaction_bytes_max(), steps.reply_bytes_max, now_ms);
        for ((key, _), old) in change.entries().zip(old.drain(..)) {
            keys.insert(key, old);
        }
        let mut answers = Vec::with_capacity(steps.list.len());
        for step in steps.list {
            answers.push(keys.execute(step, &|change, old, now| self.compute(change, old, now))?);
        }
        keys.check_replies()?;
        self.watches.borrow_mut().end(connection);
        let (batch, before, deadlines) = keys.batch(FAMILY);
        *old = before;
        let built_bytes = if builds { batch.len() } else { 0 };
        let batch = (!batch.is_empty()).then_some(batch);
        Ok(MadeChange { built_bytes, batch, answer: Answer::Executed(answers), deadlines })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::modify::{Write, modify, put};

    fn change(kind: Operation, key: &[u8], operand: &[u8]) -> Step {
        let mut change = Change::of(kind);
        change.also_put(key, operand);
        Step::Change(change)
    }

    /// Values of up to ten bytes.
    fn compute(mut change: Change, old: &mut Vec<OldValue>, _: u64) -> MadeChange {
        let kind = change.kind;
        let (key, operand) = change.entries().next().unwrap();
        let (write, answer) = modify(kind, old.remove(0), operand.unwrap(), 10);
        let batch = match write {
            Write::Nothing => None,
            Write::AsItIs => Some(put(key, operand.unwrap())),
            Write::Value(value) => Some(put(key, &value)),
        };
        MadeChange { batch, answer, built_bytes: 0, deadlines: Vec::new() }
    }

    fn keys() -> Keys {
        let mut keys = Keys::new(40, 1000, 7);
        keys.insert(b"a", OldValue::Value(b"1".to_vec()));
        keys.insert(b"b", OldValue::Missing);
        keys
    }

    #[test]
    fn commands_see_what_earlier_ones_have_left() {
        let mut keys = keys();
        let steps = [
            change(Operation::Add(1), b"a", b""),
            Step::Read(b"a".to_vec(), Ask::Value),
            change(Operation::Append, b"b", b"x"),
            Step::Exists(vec![b"a".to_vec(), b"b".to_vec()]),
        ];
        let answers = steps.map(|step| keys.execute(step, &compute).unwrap());
        let two = || Some(b"2".to_vec());
        let expected =
            [Answer::Integer(2), Answer::Old(two()), Answer::Integer(1), Answer::Integer(2)];
        assert_eq!(answers, expected);
        let (mut batch, old, _) = keys.batch(FAMILY);
        let expected = [(&b"a"[..], Some(&b"2"[..])), (b"b", Some(b"x"))];
        assert_eq!(entries(&mut batch).collect::<Vec<_>>(), expected);
        assert_eq!(old, [OldValue::There, OldValue::Missing]);
        assert_eq!((keys.delta(1), keys.check_replies()), (1, Ok(())));
    }

    #[test]
    fn a_value_that_is_too_long_is_refused_by_itself_and_too_many_values_together() {
        let mut keys = keys();
        let far = change(Operation::SetRange(usize::MAX), b"b", b"x");
        assert!(matches!(keys.execute(far, &compute), Ok(Answer::Refused(_))));
        let refused = (0..9)
            .find_map(|_| keys.execute(change(Operation::SetRange(8), b"b", b"x"), &compute).err());
        assert_eq!(refused, Some(too_much()));
    }

    #[test]
    fn bits_are_combined_within_the_bytes_of_a_transaction() {
        let combine = |operation, words: &[&[u8]]| {
            let mut change = Change::of(Operation::Combine(operation));
            change.also_put(words[0], b"");
            words[1..].iter().for_each(|key| change.batch.delete(FAMILY, key));
            Step::Change(change)
        };
        let mut keys = keys();
        let or = keys.execute(combine(BitOperation::Or, &[b"b", b"a", b"b"]), &compute);
        assert_eq!(or, Ok(Answer::Integer(1)));
        assert_eq!(keys.state(b"b"), Some(&OldValue::Value(b"1".to_vec())));
        let xor = keys.execute(combine(BitOperation::Xor, &[b"a", b"a", b"b"]), &compute);
        assert_eq!(xor, Ok(Answer::Integer(1)));
        assert_eq!(keys.state(b"a"), Some(&OldValue::Value(b"\0".to_vec())));
        // Nothing is combined: the key is removed.
        let not = keys.execute(combine(BitOperation::Not, &[b"a", b"c"]), &compute);
        assert_eq!((not, keys.state(b"a")), (Ok(Answer::Integer(0)), Some(&OldValue::Missing)));
        let same: Vec<&[u8]> = [&b"a"[..]].into_iter().chain((0..50).map(|_| &b"b"[..])).collect();
        let refused = keys.execute(combine(BitOperation::And, &same), &compute);
        assert_eq!(refused, Err(too_much()));
    }

    #[test]
    fn replies_that_are_longer_than_admitted_are_told() {
        let mut keys = keys();
        for _ in 0..40 {
            keys.execute(Step::Read(b"a".to_vec(), Ask::Value), &compute).unwrap();
        }
        assert_eq!(keys.check_replies(), Err(Answer::Larger(40 * (ANSWER_BYTES + 1))));
    }

    #[test]
    fn a_removed_range_counts_keys_with_and_without_a_state() {
        let mut keys = keys();
        let range = KeyRange { start: b"a".to_vec(), end: Some(b"c".to_vec()) };
        assert_eq!(keys.remove(&range, b"c".to_vec(), 5), 6);
        assert!(keys.has_removed(b"bb") && !keys.has_removed(b"c") && keys.delta(10) == -6);
        keys.clear(b"z".to_vec());
        assert!(keys.has_removed(b"x") && keys.delta(10) == -10);
    }
}
