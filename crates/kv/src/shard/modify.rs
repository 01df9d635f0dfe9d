//! Computes what a change of one key writes and answers, given the old value: pure, with Redis
//! 7.0's refusals.

use lsm::BatchWriter;
use resp::parse_i64;

use crate::command::long_double::LongDouble;
use crate::command::operation::{Condition, Operation, PutReply};
use crate::settings::FAMILY;
use crate::shard::change::Answer;

const NOT_AN_INTEGER: &str = "ERR value is not an integer or out of range";
const OVERFLOW: &str = "ERR increment or decrement would overflow";
const NOT_A_FLOAT: &str = "ERR value is not a valid float";
const NOT_FINITE: &str = "ERR increment would produce NaN or Infinity";
const TOO_LONG: &str = "ERR string exceeds maximum allowed size (proto-max-bulk-len)";

/// The knowledge of a key before a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OldValue {
    /// Unknown, because it does not matter.
    Unknown,
    Missing,
    /// Exists, with a value that does not matter.
    There,
    Value(Vec<u8>),
}

impl OldValue {
    pub fn exists(&self) -> bool {
        matches!(self, OldValue::There | OldValue::Value(_))
    }

    /// Length of the value.
    pub fn len(&self) -> usize {
        self.bytes().map_or(0, <[u8]>::len)
    }

    fn bytes(&self) -> Option<&[u8]> {
        match self {
            OldValue::Value(value) => Some(value),
            _ => None,
        }
    }

    fn answer(self) -> Answer {
        match self {
            OldValue::Value(value) => Answer::Old(Some(value)),
            _ => Answer::Old(None),
        }
    }
}

/// What a change of one key writes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Write {
    Nothing,
    /// The batch that came with the change.
    AsItIs,
    /// This value instead of the operand.
    Value(Vec<u8>),
}

/// The length of the value that a change builds, as far as the change alone tells. The old value
/// may make it longer.
pub(crate) fn built_bytes_min(kind: Operation, operand_bytes: usize) -> usize {
    match kind {
        Operation::Append => operand_bytes,
        Operation::SetRange(offset) => offset.saturating_add(operand_bytes),
        _ => 0,
    }
}

/// Computes what a change of one key writes and how it is answered. `operand` is the value in its
/// batch. A value longer than `bytes_max` is refused before memory is taken for it.
pub(crate) fn modify(
    kind: Operation,
    old: OldValue,
    operand: &[u8],
    bytes_max: usize,
) -> (Write, Answer) {
    match kind {
        Operation::PutIf { only, reply } => {
            let sets = match only {
                None => true,
                Some(Condition::Missing) => !old.exists(),
                Some(Condition::Existing) => old.exists(),
            };
            let answer = match (reply, sets) {
                (PutReply::Old, _) => old.answer(),
                (PutReply::Flag, sets) => Answer::Integer(sets.into()),
                (PutReply::Ok, true) => Answer::Ok,
                (PutReply::Ok, false) => Answer::Null,
            };
            (if sets { Write::AsItIs } else { Write::Nothing }, answer)
        }
        Operation::GetDelete => {
            (if old.exists() { Write::AsItIs } else { Write::Nothing }, old.answer())
        }
        Operation::Append => {
            let mut value = take(old);
            if value.len() + operand.len() > bytes_max {
                return refuse(TOO_LONG);
            }
            value.extend_from_slice(operand);
            with_length(value)
        }
        Operation::SetRange(offset) => {
            let mut value = take(old);
            if operand.is_empty() {
                return (Write::Nothing, Answer::Integer(value.len() as i64));
            }
            let end = offset.saturating_add(operand.len());
            if value.len().max(end) > bytes_max {
                return refuse(TOO_LONG);
            }
            if value.len() < end {
                value.resize(end, 0);
            }
            value[offset..end].copy_from_slice(operand);
            with_length(value)
        }
        Operation::Add(by) => {
            let Some(value) = old.bytes().map_or(Some(0), parse_i64) else {
                return refuse(NOT_AN_INTEGER);
            };
            match value.checked_add(by) {
                Some(sum) => (Write::Value(sum.to_string().into_bytes()), Answer::Integer(sum)),
                None => refuse(OVERFLOW),
            }
        }
        Operation::AddFloat(by) => {
            let Some(value) = old.bytes().map_or(Some(LongDouble::ZERO), LongDouble::parse) else {
                return refuse(NOT_A_FLOAT);
            };
            match value.add(by).write() {
                Some(text) => (Write::Value(text.clone().into_bytes()), Answer::Bulk(text.into())),
                None => refuse(NOT_FINITE),
            }
        }
        Operation::Put
        | Operation::PutIfNone
        | Operation::Delete
        | Operation::Clear
        | Operation::DeleteRange
        | Operation::Sync
        | Operation::Watch
        | Operation::Unwatch
        | Operation::Execute
        | Operation::ExecuteAlone => {
            unreachable!("not a change of one key that depends on its value")
        }
    }
}

/// The batch that sets `key` to `value`.
pub(crate) fn put(key: &[u8], value: &[u8]) -> BatchWriter {
    let mut batch = BatchWriter::new();
    batch.put(FAMILY, key, value);
    batch
}

fn take(old: OldValue) -> Vec<u8> {
    match old {
        OldValue::Value(value) => value,
        _ => Vec::new(),
    }
}

fn with_length(value: Vec<u8>) -> (Write, Answer) {
    let length = value.len() as i64;
    (Write::Value(value), Answer::Integer(length))
}

fn refuse(text: &'static str) -> (Write, Answer) {
    (Write::Nothing, Answer::Refused(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> OldValue {
        OldValue::Value(text.into())
    }

    const BYTES_MAX: usize = 100;

    fn made(kind: Operation, old: OldValue, operand: &str) -> (Option<String>, Answer) {
        let (write, answer) = modify(kind, old, operand.as_bytes(), BYTES_MAX);
        let text = match write {
            Write::Nothing => None,
            Write::AsItIs => Some(operand.to_owned()),
            Write::Value(value) => Some(String::from_utf8(value).unwrap()),
        };
        (text, answer)
    }

    #[test]
    fn a_conditional_set_sets_when_its_condition_holds() {
        let set = |only, reply, old| made(Operation::PutIf { only, reply }, old, "new");
        let new = Some("new".to_owned());
        assert_eq!(
            set(Some(Condition::Missing), PutReply::Ok, OldValue::Missing),
            (new.clone(), Answer::Ok)
        );
        assert_eq!(
            set(Some(Condition::Missing), PutReply::Ok, OldValue::There),
            (None, Answer::Null)
        );
        assert_eq!(
            set(Some(Condition::Existing), PutReply::Ok, OldValue::Missing),
            (None, Answer::Null)
        );
        assert_eq!(
            set(Some(Condition::Missing), PutReply::Flag, OldValue::There),
            (None, Answer::Integer(0))
        );
        let old = Answer::Old(Some(b"old".to_vec()));
        assert_eq!(set(Some(Condition::Existing), PutReply::Old, value("old")), (new, old.clone()));
        assert_eq!(set(Some(Condition::Missing), PutReply::Old, value("old")), (None, old));
    }

    #[test]
    fn numbers_are_added_or_refused() {
        let add = |old, by| made(Operation::Add(by), old, "");
        assert_eq!(add(OldValue::Missing, -7), (Some("-7".to_owned()), Answer::Integer(-7)));
        assert_eq!(add(value("41"), 1), (Some("42".to_owned()), Answer::Integer(42)));
        for bad in ["", " 1", "1.5", "x", "9223372036854775808", "01"] {
            assert_eq!(add(value(bad), 1), (None, Answer::Refused(NOT_AN_INTEGER)), "{bad}");
        }
        let most = i64::MAX.to_string();
        assert_eq!(add(value(&most), 1), (None, Answer::Refused(OVERFLOW)));
        assert_eq!(add(value("-2"), i64::MIN), (None, Answer::Refused(OVERFLOW)));
    }

    #[test]
    fn parts_are_appended_and_overwritten() {
        assert_eq!(
            made(Operation::Append, value("ab"), "c"),
            (Some("abc".to_owned()), Answer::Integer(3))
        );
        assert_eq!(
            made(Operation::SetRange(1), value("abcd"), "XY"),
            (Some("aXYd".to_owned()), Answer::Integer(4))
        );
        assert_eq!(
            made(Operation::SetRange(2), OldValue::Missing, "x"),
            (Some("\0\0x".to_owned()), Answer::Integer(3))
        );
        assert_eq!(made(Operation::SetRange(9), value("ab"), ""), (None, Answer::Integer(2)));
        assert_eq!(made(Operation::SetRange(9), OldValue::Missing, ""), (None, Answer::Integer(0)));
        for offset in [BYTES_MAX, usize::MAX] {
            let refused = made(Operation::SetRange(offset), value("ab"), "x");
            assert_eq!(refused, (None, Answer::Refused(TOO_LONG)));
        }
        let (_, longest) = made(Operation::SetRange(BYTES_MAX - 1), value("ab"), "x");
        assert_eq!(longest, Answer::Integer(BYTES_MAX as i64));
        // A value that was written under a larger limit is not rebuilt, either.
        let longer = "x".repeat(BYTES_MAX + 1);
        for kind in [Operation::Append, Operation::SetRange(0)] {
            assert_eq!(made(kind, value(&longer), "y"), (None, Answer::Refused(TOO_LONG)));
        }
    }

    #[test]
    fn a_value_is_taken_away_once() {
        let taken = made(Operation::GetDelete, value("v"), "");
        assert_eq!(taken, (Some(String::new()), Answer::Old(Some(b"v".to_vec()))));
        assert_eq!(made(Operation::GetDelete, OldValue::Missing, ""), (None, Answer::Old(None)));
    }
}
