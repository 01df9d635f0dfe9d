//! The operations of commands that write, on the values of their keys.

use crate::command::bits::BitOperation;
use crate::command::long_double::LongDouble;

/// What a command does to its keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operation {
    /// Set all keys unconditionally.
    Put,
    /// Set the key if a condition holds.
    PutIf {
        only: Option<Condition>,
        reply: PutReply,
    },
    /// Set all keys if none of them exists.
    PutIfNone,
    /// Remove the keys and count those that existed.
    Delete,
    /// Remove the key and return its value.
    GetDelete,
    /// Give the first key the value of the second one.
    Transfer(Transfer),
    /// Combine the values of all keys but the first, and store the result there.
    Combine(BitOperation),
    /// Set a bit.
    SetBit {
        offset: u64,
        on: bool,
    },
    /// Change integers within the value, which has at least this length afterwards.
    Fields {
        bytes: usize,
    },
    /// Set the key from a payload of `DUMP`.
    Restore {
        /// Whether a key that exists gets another value.
        over: bool,
        payload: Payload,
    },
    Append,
    /// Overwrite a part of the value, from this offset on.
    SetRange(usize),
    Add(i64),
    AddFloat(LongDouble),
    /// Remove every key.
    Clear,
    /// Remove all keys of a range and count them.
    DeleteRange,
    /// Make all earlier changes survive a power cut.
    Sync,
    /// Watch keys for the next transaction of the connection.
    Watch,
    /// End the watches of the connection.
    Unwatch,
    /// Execute the commands of a transaction, on the keys that they name.
    Execute,
    /// The same where commands concern keys that they do not name.
    ExecuteAlone,
}

/// What is known about the payload of a `RESTORE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    /// The operand is the payload.
    Packed,
    /// The operand is the value that was in it.
    Unpacked,
    /// It, or the time to live, is refused.
    Refused(&'static str),
}

/// How a key gets the value of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// `RENAME`.
    Rename,
    /// `RENAMENX`.
    RenameIfNone,
    /// `COPY`.
    Copy,
    /// `COPY ... REPLACE`.
    CopyOver,
}

impl Transfer {
    /// Whether the other key is removed.
    pub(crate) fn moves(self) -> bool {
        matches!(self, Self::Rename | Self::RenameIfNone)
    }

    /// Whether a key that exists gets another value.
    pub(crate) fn overwrites(self) -> bool {
        matches!(self, Self::Rename | Self::CopyOver)
    }
}

/// The condition of a `SET`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// `NX`.
    Missing,
    /// `XX`.
    Existing,
}

/// The reply of the forms of `SET`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PutReply {
    /// `OK`, or null where nothing was set.
    Ok,
    /// The old value.
    Old,
    /// 1, or 0 where nothing was set.
    Flag,
}

impl Operation {
    /// Whether it changes keys that it does not name.
    pub(crate) fn is_of_many_keys(self) -> bool {
        matches!(self, Operation::Clear | Operation::DeleteRange | Operation::ExecuteAlone)
    }

    /// Whether it builds a value whose length the command does not tell.
    pub(crate) fn builds_value(self) -> bool {
        matches!(
            self,
            Operation::Append
                | Operation::SetRange(_)
                | Operation::SetBit { .. }
                | Operation::Fields { .. }
                | Operation::Transfer(_)
                | Operation::Restore { payload: Payload::Packed, .. }
        )
    }

    /// Whether its answer is the old value.
    pub(crate) fn gives_old(self) -> bool {
        matches!(self, Operation::GetDelete | Operation::PutIf { reply: PutReply::Old, .. })
    }
}
