//! Changes: what a command writes, in the form in which it travels to the shard that owns its keys,
//! and how it is answered.
//!
//! A change carries a batch of the engine. For most commands it is the batch that is written, built
//! by the core that read the command. Where the new value depends on the old one, the batch holds
//! the key and the operand, and the shard builds another batch when it knows the old value.

use lsm::{BatchWriter, Op, WriteBatch};

use crate::command::operation::{Operation, PutReply, When};
use crate::command::spec::CommandId;
use crate::settings::{FAMILY, Settings};
use crate::shard::execute::{NEED_EXISTENCE, NEED_NOTHING, NEED_VALUE, Steps};
use crate::shard::modify::built_bytes_min;

/// Memory for a key while a change of it is in flight, in bytes.
const KEY_BYTES: usize = 256;
/// Largest value that a command may build, unless [`Settings`](crate::Settings) allow less: Redis's
/// `proto-max-bulk-len`.
pub(crate) const VALUE_BYTES_MAX: usize = resp::BULK_BYTES_MAX;

/// A change of one or more keys; atomic.
pub struct Change {
    pub(crate) kind: Operation,
    pub(crate) batch: BatchWriter,
    /// The command it is for, if any.
    pub(crate) command: Option<CommandId>,
    /// Its connection wants to know which keys it writes.
    pub(crate) tells: bool,
    commands: Commands,
    /// The commands of a transaction. Its batch then has each of their keys once, with what must
    /// be known about it.
    pub(crate) steps: Option<Box<Steps>>,
    /// When the keys that it sets end, in their order; those that are missing here never end.
    pub(crate) when: Vec<When>,
    /// It sets the keys of a transaction of so many commands, which all do that; 0 outside one.
    pub(crate) puts_of: u32,
}

/// The commands that share a change. Only commands that set keys unconditionally share one; each of
/// them has a reply of its own.
struct Commands {
    count: u32,
    /// Keys of all commands except the last, which has the rest.
    keys_before: u32,
    /// Those of the commands before the last that do not have exactly one key: their positions and
    /// numbers of keys.
    wide: Vec<(u32, u32)>,
}

impl Commands {
    const ONE: Self = Self { count: 1, keys_before: 0, wide: Vec::new() };
}

/// What must be known about a change's keys before it can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    Nothing,
    Existence,
    Value,
}

impl Need {
    /// What a change of this kind must know about its key at position `at`. A database whose keys
    /// are `counted` must know whether they exist.
    pub(crate) fn of(kind: Operation, at: usize, counted: bool) -> Self {
        match kind {
            Operation::Put if !counted => Need::Nothing,
            // Without deadlines it is not asked.
            Operation::Watch => Need::Existence,
            Operation::Put | Operation::PutIfNone | Operation::Delete => Need::Existence,
            Operation::PutIf { reply: PutReply::Old, .. } => Need::Value,
            Operation::PutIf { .. } | Operation::Restore { .. } | Operation::Reclaim => {
                Need::Existence
            }
            // The first key is the one that gets the value.
            Operation::Transfer(_) | Operation::Combine(_) if at == 0 => Need::Existence,
            Operation::GetDelete
            | Operation::Append
            | Operation::SetRange(_)
            | Operation::Add(_)
            | Operation::AddFloat(_)
            | Operation::Expire(_)
            | Operation::GetExpire
            | Operation::SetBit { .. }
            | Operation::Fields { .. }
            | Operation::Combine(_)
            | Operation::Transfer(_) => Need::Value,
            Operation::Clear
            | Operation::DeleteRange
            | Operation::Sync
            | Operation::Unwatch
            // Its batch says what each key needs: see [`Change::needs`].
            | Operation::Execute
            | Operation::ExecuteAlone => Need::Nothing,
        }
    }
}

/// What the commands of a transaction must know about a key, as its batch has it noted.
fn need_of_steps(noted: Option<&[u8]>, counted: bool) -> Need {
    match noted {
        Some(NEED_VALUE) => Need::Value,
        Some(NEED_EXISTENCE) => Need::Existence,
        _ if counted => Need::Existence,
        _ => Need::Nothing,
    }
}

/// The answer to a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// `OK`.
    Ok,
    /// No such value, or nothing was set.
    Null,
    /// A number.
    Integer(i64),
    /// A value.
    Bulk(Vec<u8>),
    /// Numbers, or null in their place.
    Integers(Vec<Option<i64>>),
    /// The old value, if any.
    Old(Option<Vec<u8>>),
    /// Several values.
    Values(Vec<Option<Vec<u8>>>),
    /// The answers to the commands of a transaction.
    Executed(Vec<Answer>),
    /// The same of one whose commands, of this number, have set keys: `OK` for each.
    Oks(u32),
    /// Nothing was executed, because a watched key was written.
    Conflict,
    /// Nothing was executed, because the replies take this many bytes, more than was admitted.
    Larger(usize),
    /// The change was refused, in Redis's words.
    Refused(&'static str),
    /// The engine cannot make the change: its text, beginning with Redis's code.
    Failed(Box<str>),
}

impl Change {
    pub(crate) fn new(kind: Operation, batch: BatchWriter) -> Self {
        Self {
            kind,
            batch,
            command: None,
            tells: false,
            commands: Commands::ONE,
            steps: None,
            when: Vec::new(),
            puts_of: 0,
        }
    }

    /// Sets a key, like `SET`. Answered by [`Answer::Ok`].
    pub fn put(key: &[u8], value: &[u8]) -> Self {
        let mut change = Self::puts();
        change.also_put(key, value);
        change
    }

    /// An empty change that sets keys; see [`Change::also_put`].
    pub fn puts() -> Self {
        Self::of(Operation::Put)
    }

    /// Sets one more key in the same batch, for a change made by [`Change::put`] or
    /// [`Change::puts`]. If a key occurs twice, the last value wins.
    pub fn also_put(&mut self, key: &[u8], value: &[u8]) {
        self.batch.put(FAMILY, key, value);
    }

    /// The same for a key that ends.
    pub(crate) fn also_put_until(&mut self, key: &[u8], value: &[u8], when: When) {
        self.when.resize(self.batch.count() as usize, When::Never);
        self.also_put(key, value);
        self.when.push(when);
    }

    /// When the key at a position ends.
    pub(crate) fn when(&self, at: usize) -> When {
        self.when.get(at).copied().unwrap_or_default()
    }

    /// Removes keys, like `DEL`. Answered by the number of keys that existed.
    pub fn delete<'a>(keys: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut batch = BatchWriter::new();
        keys.into_iter().for_each(|key| batch.delete(FAMILY, key));
        Self::new(Operation::Delete, batch)
    }

    /// Removes every key, like `FLUSHDB`.
    pub fn clear() -> Self {
        Self::of(Operation::Clear)
    }

    /// Removes all keys from `start` to before `end`, or to the last key. Answered by their number.
    pub fn delete_range(start: &[u8], end: Option<&[u8]>) -> Self {
        let mut change = Self::of(Operation::DeleteRange);
        match end {
            Some(end) => change.batch.delete_range(FAMILY, start, end),
            None => change.batch.delete(FAMILY, start),
        }
        change
    }

    /// Changes nothing; answered when all earlier changes survive a power cut, whatever the
    /// durability: `SAVE`.
    pub fn sync() -> Self {
        Self::of(Operation::Sync)
    }

    /// Watches keys for a connection's next transaction.
    pub(crate) fn watch<'a>(keys: impl IntoIterator<Item = &'a [u8]>) -> Self {
        Self { kind: Operation::Watch, ..Self::delete(keys) }
    }

    /// A transaction.
    pub(crate) fn execute(mut steps: Steps) -> Self {
        let mut change = Self::of(match steps.is_alone() {
            true => Operation::ExecuteAlone,
            false => Operation::Execute,
        });
        if change.kind == Operation::Execute {
            for (key, need) in steps.needs() {
                let need: &[u8] = match need {
                    Need::Nothing => NEED_NOTHING,
                    Need::Existence => NEED_EXISTENCE,
                    Need::Value => NEED_VALUE,
                };
                change.also_put(&key, need);
            }
        }
        change.steps = Some(Box::new(steps));
        change
    }

    /// A change without keys yet.
    pub(crate) fn of(kind: Operation) -> Self {
        Self::new(kind, BatchWriter::new())
    }

    /// Begins the next command, which has a reply of its own.
    pub(crate) fn next_command(&mut self) {
        let commands = &mut self.commands;
        let keys = self.batch.count() - commands.keys_before;
        if keys != 1 {
            commands.wide.push((commands.count - 1, keys));
        }
        commands.keys_before += keys;
        commands.count += 1;
    }

    /// The number of commands it stands for.
    pub(crate) fn commands(&self) -> u32 {
        self.commands.count
    }

    /// Splits it into one change for each of its commands, in order.
    pub(crate) fn split(mut self) -> Vec<Change> {
        let Commands { count, wide, .. } = std::mem::replace(&mut self.commands, Commands::ONE);
        if count == 1 {
            return vec![self];
        }
        let mut wide = wide.into_iter().peekable();
        let mut when = std::mem::take(&mut self.when).into_iter();
        let mut entries = entries(&mut self.batch);
        let mut apart = Vec::with_capacity(count as usize);
        for command in 0..count {
            let keys = match wide.next_if(|(before, _)| *before == command) {
                Some((_, keys)) => keys,
                None if command + 1 < count => 1,
                None => u32::MAX,
            };
            let mut change = Change { command: self.command, ..Change::puts() };
            for (key, value) in entries.by_ref().take(keys as usize) {
                let value = value.unwrap_or_default();
                match when.next().unwrap_or_default() {
                    When::Never => change.also_put(key, value),
                    when => change.also_put_until(key, value, when),
                }
            }
            apart.push(change);
        }
        apart
    }

    /// Length of its batch in bytes.
    pub fn len(&self) -> usize {
        self.batch.len()
    }

    /// Whether it has no keys.
    pub fn is_empty(&self) -> bool {
        self.batch.is_empty()
    }

    /// Its keys in order, with what must be known about each.
    pub(crate) fn needs(&mut self, counted: bool) -> impl Iterator<Item = (&[u8], Need)> {
        let kind = self.kind;
        entries(&mut self.batch).enumerate().map(move |(at, (key, noted))| match kind {
            Operation::Execute => (key, need_of_steps(noted, counted)),
            _ => (key, Need::of(kind, at, counted)),
        })
    }

    /// Whether it must know values.
    pub(crate) fn needs_values(&self) -> bool {
        // All keys but the first are alike.
        [0, 1].iter().any(|at| Need::of(self.kind, *at, false) == Need::Value)
    }

    /// The approximate memory it takes until it is answered: its batch, the notes on each key, and
    /// the value it builds, as far as that is known.
    pub(crate) fn weight(&self) -> usize {
        let built = self.built_bytes_min().min(VALUE_BYTES_MAX);
        let steps = self.steps.as_ref().map_or(0, |steps| steps.weight());
        let when = self.when.len() * size_of::<When>();
        self.len() + self.batch.count() as usize * KEY_BYTES + built + steps + when
    }

    /// The length of the values that it builds, as far as it alone tells.
    pub(crate) fn built_bytes_min(&self) -> usize {
        match &self.steps {
            Some(steps) => steps.built_bytes_min(),
            None => built_bytes_min(self.kind, self.len()),
        }
    }

    /// Whether it builds values from short operands, or copies values.
    pub(crate) fn builds(&self) -> bool {
        self.kind.builds_value()
            || self.steps.as_ref().is_some_and(|steps| steps.built_bytes_min() > 0)
    }

    /// Whether it may leave a value that is not small.
    pub(crate) fn may_leave_long_value(&self) -> bool {
        self.kind.builds_value()
            || matches!(self.kind, Operation::Combine(_))
            || self.len() > Settings::REPLY_BYTES_SMALL
    }

    /// Its keys in order, with the value or operand of each; a removal has none.
    pub(crate) fn entries(&mut self) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        entries(&mut self.batch)
    }
}

/// The keys of a batch, with the values it sets.
pub(crate) fn entries(batch: &mut BatchWriter) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
    let batch = WriteBatch::parse(batch.finish(0)).into_iter().flat_map(|batch| batch.ops());
    batch.filter_map(|op| match op {
        Ok((_, Op::Put { key, value, .. })) => Some((key, Some(value))),
        Ok((_, Op::Delete { key, .. })) => Some((key, None)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_knows_its_keys() {
        let mut change = Change::put(b"a", b"1");
        change.also_put(b"b", b"2");
        let expected = [(&b"a"[..], Some(&b"1"[..])), (b"b", Some(b"2"))];
        assert_eq!(change.entries().collect::<Vec<_>>(), expected);
        let mut change = Change::delete([&b"x"[..], b"y"]);
        assert_eq!(change.entries().map(|(key, _)| key).collect::<Vec<_>>(), [b"x", b"y"]);
    }

    #[test]
    fn a_change_of_several_commands_is_split_into_theirs() {
        // The number of keys of each command.
        for sizes in [&[1][..], &[1, 1, 1], &[2, 1], &[1, 2], &[3], &[1, 3, 1, 2, 2, 1]] {
            let (mut change, mut expected) = (Change::puts(), Vec::new());
            for (number, &keys) in sizes.iter().enumerate() {
                if number > 0 {
                    change.next_command();
                }
                let keys: Vec<_> = (0..keys).map(|key| format!("{number}:{key}")).collect();
                keys.iter().for_each(|key| change.also_put(key.as_bytes(), b"v"));
                expected.push(keys);
            }
            assert_eq!(change.commands() as usize, sizes.len());
            let apart = change.split().into_iter().map(|mut change| {
                assert_eq!((change.kind, change.commands()), (Operation::Put, 1));
                let keys = change.entries().map(|(key, _)| key.to_vec());
                keys.map(|key| String::from_utf8(key).unwrap()).collect::<Vec<_>>()
            });
            assert_eq!(apart.collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_plain_put_needs_no_knowledge_unless_keys_are_counted() {
        assert_eq!(Need::of(Operation::Put, 0, false), Need::Nothing);
        assert_eq!(Need::of(Operation::Put, 0, true), Need::Existence);
        let keep = Operation::PutIf { only: None, reply: PutReply::Ok };
        assert_eq!(Need::of(keep, 0, false), Need::Existence, "KEEPTTL asks for the deadline");
        assert_eq!(Need::of(Operation::Delete, 0, false), Need::Existence);
        assert_eq!(Need::of(Operation::Append, 0, false), Need::Value);
    }
}
