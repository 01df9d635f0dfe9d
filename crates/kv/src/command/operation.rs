//! The operations of commands that write, on the values of their keys.

use crate::command::bits::BitOperation;
use crate::command::long_double::LongDouble;
use crate::expiry::Deadline;

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
    /// Give the value another deadline: that of the change.
    Expire(ExpireIf),
    /// Return the value, and give it another deadline.
    GetExpire,
    /// Remove the key if it has expired.
    Reclaim,
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

/// When a key is to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum When {
    /// Never.
    #[default]
    Never,
    /// When it would have ended before.
    Keep,
    /// At a time in Unix milliseconds.
    At(i64),
    /// After a time in milliseconds.
    In(i64),
    /// The time is refused, if it comes to that.
    Refused(&'static str),
}

impl When {
    /// The deadline that a command with this option sets: `None` if the key ends at once.
    pub(crate) fn deadline(self, now_ms: u64, old: Deadline) -> Option<Deadline> {
        let at = match self {
            Self::Never | Self::Refused(_) => return Some(Deadline::NEVER),
            Self::Keep => return Some(old),
            Self::At(at) => at,
            Self::In(ms) => ms.saturating_add_unsigned(now_ms),
        };
        let at = u64::try_from(at).unwrap_or(0);
        (at > now_ms).then(|| Deadline::at(at))
    }
}

/// The conditions of `EXPIRE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpireIf {
    /// `NX`: only without a deadline.
    pub none: bool,
    /// `XX`: only with one.
    pub some: bool,
    /// `GT`: only if it becomes later.
    pub later: bool,
    /// `LT`: only if it becomes earlier.
    pub earlier: bool,
    /// Only to take the deadline away: `PERSIST`.
    pub persist: bool,
}

impl ExpireIf {
    /// Whether a key's deadline may change to a time that has been asked for.
    pub(crate) fn allows(self, old: Deadline, new_ms: i64) -> bool {
        let old = old.unix_ms().map(i64::try_from).map(|ms| ms.unwrap_or(i64::MAX));
        match old {
            None => !self.some && !self.later && !self.persist,
            Some(old) => {
                !self.none && (!self.later || new_ms > old) && (!self.earlier || new_ms < old)
            }
        }
    }
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
                | Operation::Expire(_)
                | Operation::GetExpire
                | Operation::Restore { payload: Payload::Packed, .. }
        )
    }

    /// Whether a key keeps its deadline.
    pub(crate) fn keeps_deadline(self) -> bool {
        matches!(
            self,
            Operation::Append
                | Operation::SetRange(_)
                | Operation::SetBit { .. }
                | Operation::Fields { .. }
                | Operation::Add(_)
                | Operation::AddFloat(_)
        )
    }

    /// Whether its answer is the old value.
    pub(crate) fn gives_old(self) -> bool {
        matches!(
            self,
            Operation::GetDelete
                | Operation::GetExpire
                | Operation::PutIf { reply: PutReply::Old, .. }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_comes_from_now_at_a_time_or_from_before() {
        let old = Deadline::at(50);
        assert_eq!(When::In(5).deadline(10, old), Some(Deadline::at(15)));
        assert_eq!(When::At(11).deadline(10, old), Some(Deadline::at(11)));
        assert_eq!(When::Keep.deadline(10, old), Some(old));
        assert_eq!(When::Never.deadline(10, old), Some(Deadline::NEVER));
        for past in [When::At(10), When::At(-3), When::In(0), When::In(i64::MIN)] {
            assert_eq!(past.deadline(10, old), None, "{past:?}");
        }
    }

    #[test]
    fn conditions_compare_with_the_deadline_before() {
        let none = ExpireIf::default();
        let later = ExpireIf { later: true, ..none };
        let earlier = ExpireIf { earlier: true, ..none };
        let allows = |only: ExpireIf, old: Deadline| [9, 10, 11].map(|new| only.allows(old, new));
        let ten = Deadline::at(10);
        assert_eq!(allows(none, ten), [true; 3]);
        assert_eq!(allows(later, ten), [false, false, true]);
        assert_eq!(allows(earlier, ten), [true, false, false]);
        // Without a deadline a key counts as one that never ends.
        assert_eq!(allows(later, Deadline::NEVER), [false; 3]);
        assert_eq!(allows(earlier, Deadline::NEVER), [true; 3]);
        assert_eq!(allows(ExpireIf { none: true, ..none }, ten), [false; 3]);
        assert_eq!(allows(ExpireIf { some: true, ..none }, Deadline::NEVER), [false; 3]);
        let persist = ExpireIf { persist: true, ..none };
        assert_eq!(
            (allows(persist, Deadline::NEVER), allows(persist, ten)),
            ([false; 3], [true; 3])
        );
    }
}
