//! Gathers the writes of a connection's commands until they are sent to the shard.
//!
//! Consecutive commands that set values share one change: they become durable together anyway, and
//! one batch costs the engine less than many. The change knows its commands, because each has a
//! reply of its own. A command with long values, and every other command that writes, is a change
//! of its own. Any command that does not write sends the gathered writes.

use crate::command::args::Args;
use crate::command::commands::WriteCommand;
use crate::command::fields;
use crate::command::operation::{Operation, Payload};
use crate::command::range::RangeBound;
use crate::command::spec::CommandId;
use crate::connection::replies::Written;
use crate::connection::session::Session;
use crate::settings::FAMILY;
use crate::shard::change::Change;
use crate::shard::delete_range::KeyRange;

/// Weight of changes that are sent without waiting for more.
const PARCEL_WEIGHT: usize = 128 * 1024;
/// A batch of several commands ends with the command that makes it this long; a command of this
/// length has its own batch.
const BATCH_BYTES: usize = 64 * 1024;
/// Maximum number of changes of one parcel.
const CHANGES_MAX: usize = 64;

/// The gathered writes of one connection.
#[derive(Default)]
pub(crate) struct Outgoing {
    changes: Vec<Change>,
    /// Bytes of those changes, and their weight.
    bytes: usize,
    weight: usize,
    /// Whether the client wants no replies.
    silent: bool,
    /// Whether the connection wants to know which keys each command writes.
    tells: bool,
    /// Bytes of the last parcel: the next one may well become as long.
    expected_bytes: usize,
}

impl Outgoing {
    fn add(&mut self, id: Option<CommandId>, command: WriteCommand<'_>) {
        match command {
            WriteCommand::Put(key, value) => {
                self.put(id, key.len() + value.len(), |change| change.also_put(key, value));
            }
            WriteCommand::PutUntil(key, value, when) => {
                let put = |change: &mut Change| change.also_put_until(key, value, when);
                self.put(id, key.len() + value.len(), put);
            }
            WriteCommand::PutAll(pairs) => {
                let bytes = pairs.iter().map(<[u8]>::len).sum();
                self.put(id, bytes, |change| put_pairs(change, pairs));
            }
            other => self.push(id, change_of(other)),
        }
    }

    /// Whether a key may have a value that is not small after these changes.
    pub fn leaves_long(&self) -> bool {
        self.changes.iter().any(Change::may_leave_long_value)
    }

    /// Adds a change of its own.
    pub(super) fn push(&mut self, id: Option<CommandId>, mut change: Change) {
        change.command = id;
        change.tells = self.tells;
        self.bytes += change.len();
        self.weight += change.weight();
        self.changes.push(change);
    }

    /// Sets keys, with `bytes` bytes of keys and values, in the batch of the previous commands if
    /// these are the same command.
    fn put(&mut self, id: Option<CommandId>, bytes: usize, put: impl FnOnce(&mut Change)) {
        if let Some(last) = self.changes.last_mut()
            && !self.tells
            && last.kind == Operation::Put
            && last.puts_of == 0
            && last.command == id
            && last.batch.len() < BATCH_BYTES
            && bytes < BATCH_BYTES
        {
            let (bytes, weight) = (last.len(), last.weight());
            last.next_command();
            put(last);
            self.bytes += last.len() - bytes;
            self.weight += last.weight() - weight;
        } else {
            let mut change = Change::puts();
            change.batch.reserve(self.expected_bytes.min(BATCH_BYTES));
            put(&mut change);
            self.push(id, change);
        }
    }
}

/// The change of a command that has one of its own.
pub(super) fn change_of(command: WriteCommand<'_>) -> Change {
    match command {
        WriteCommand::Put(key, value) => Change::put(key, value),
        WriteCommand::PutUntil(key, value, when) => {
            let mut change = Change::puts();
            change.also_put_until(key, value, when);
            change
        }
        WriteCommand::ModifyUntil(kind, key, operand, when) => {
            let mut change = Change::of(kind);
            change.also_put_until(key, operand, when);
            change
        }
        WriteCommand::PutAll(pairs) => {
            let mut change = Change::puts();
            put_pairs(&mut change, pairs);
            change
        }
        WriteCommand::PutAllIfNone(pairs) => {
            let mut change = Change::of(Operation::PutIfNone);
            put_pairs(&mut change, pairs);
            change
        }
        WriteCommand::Clear => Change::clear(),
        WriteCommand::DeleteRange(start, end) => delete_range(start, end),
        WriteCommand::Delete(keys) => Change::delete(keys.iter()),
        WriteCommand::GetDelete(key) => {
            let mut change = Change::delete([key]);
            change.kind = Operation::GetDelete;
            change
        }
        WriteCommand::Combine(operation, to, sources) => {
            let mut change = Change::of(Operation::Combine(operation));
            change.also_put(to, b"");
            sources.iter().for_each(|key| change.batch.delete(FAMILY, key));
            change
        }
        WriteCommand::Fields(args) => {
            let operations = fields::parse(args).unwrap_or_default();
            let bytes = fields::bytes_min(&operations);
            let mut change = Change::of(Operation::Fields { bytes });
            change.also_put(args.get(1), &fields::encode(&operations));
            change
        }
        WriteCommand::Restore { key, payload, over, refused, when } => {
            let kind = match refused {
                Some(text) => Payload::Refused(text),
                None => Payload::Packed,
            };
            let mut change = Change::of(Operation::Restore { over, payload: kind });
            change.also_put_until(key, if refused.is_some() { b"" } else { payload }, when);
            change
        }
        WriteCommand::Transfer(how, from, to) => {
            let mut change = Change::of(Operation::Transfer(how));
            change.also_put(to, b"");
            change.batch.delete(FAMILY, from);
            change
        }
        WriteCommand::Modify(kind, key, operand) => {
            let mut change = Change::of(kind);
            change.also_put(key, operand);
            change
        }
    }
}

/// The change of `MR.DELRANGE`.
fn delete_range(start: RangeBound<'_>, end: RangeBound<'_>) -> Change {
    let range = range_of(start, end);
    Change::delete_range(&range.start, range.end.as_deref())
}

/// The range between two bounds of a command.
pub(super) fn range_of(start: RangeBound<'_>, end: RangeBound<'_>) -> KeyRange {
    let after = |key: &[u8]| [key, &[0]].concat();
    let start = match start {
        RangeBound::Open => Some(Vec::new()),
        RangeBound::Nothing => None,
        RangeBound::Inclusive(key) => Some(key.to_vec()),
        RangeBound::Exclusive(key) => Some(after(key)),
    };
    let end = match end {
        RangeBound::Open => Some(None),
        RangeBound::Nothing => None,
        RangeBound::Inclusive(key) => Some(Some(after(key))),
        RangeBound::Exclusive(key) => Some(Some(key.to_vec())),
    };
    match (start, end) {
        (Some(start), Some(end)) => KeyRange { start, end },
        _ => KeyRange { start: Vec::new(), end: Some(Vec::new()) },
    }
}

/// Adds keys and values by turns.
pub(super) fn put_pairs(change: &mut Change, pairs: Args<'_>) {
    for at in (0..pairs.len()).step_by(2) {
        change.also_put(pairs.get(at), pairs.get(at + 1));
    }
}

impl Session {
    /// Gathers a command that writes.
    pub(crate) fn write(&mut self, command: WriteCommand<'_>) {
        self.gather(self.client.tracking.tells_itself(self.client.id));
        self.outgoing.add(self.replies.command, command);
        self.send_if_full();
    }

    /// Gathers a transaction that only sets keys.
    pub(super) fn write_transaction(&mut self, change: Change) {
        self.gather(false);
        self.outgoing.push(self.replies.command, change);
        self.send_if_full();
    }

    /// Begins to gather a write. Those that are answered and those that are not go apart.
    fn gather(&mut self, tells: bool) {
        if self.outgoing.silent != self.is_silent() {
            self.send_writes();
            self.outgoing.silent = self.is_silent();
        }
        self.outgoing.tells = tells;
    }

    /// Sends the gathered writes if they are many.
    fn send_if_full(&mut self) {
        let is_long = self.outgoing.weight >= PARCEL_WEIGHT;
        if is_long || self.outgoing.changes.len() >= CHANGES_MAX || self.replies.is_reserved() {
            self.send_writes();
        }
    }

    /// `SAVE`, or `BGSAVE`, which is answered immediately.
    pub(crate) fn save(&mut self, waits: bool) {
        self.send_change(Change::sync(), !waits || self.is_silent());
        if !waits {
            self.reply(|writer| writer.simple("Background saving started"));
        }
    }

    /// Sends a change of the connection itself, after the gathered ones.
    pub(super) fn send_change(&mut self, change: Change, silent: bool) {
        self.send_writes();
        self.outgoing.silent = silent;
        self.outgoing.push(self.replies.command, change);
        self.send_writes();
    }

    /// Sends the gathered changes to the shard.
    pub(crate) fn send_writes(&mut self) {
        let outgoing = &mut self.outgoing;
        if outgoing.changes.is_empty() {
            return;
        }
        let leaves_long = outgoing.leaves_long();
        let changes = std::mem::take(&mut outgoing.changes);
        let bytes = std::mem::take(&mut outgoing.bytes);
        outgoing.expected_bytes = bytes;
        let weight = std::mem::take(&mut outgoing.weight);
        let values = changes.iter().filter(|change| change.kind.gives_old()).count();
        let silent = outgoing.silent;
        let (state, core) = (&self.state, self.state.core.id());
        let slot = state.writes.send(&state.posters, core, self.client.id, changes, weight);
        let protocol = self.protocol;
        self.replies.write(Written { slot, protocol, silent, weight, values, leaves_long });
    }
}
