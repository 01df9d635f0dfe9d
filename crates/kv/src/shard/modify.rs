//! Computes what a change of one key writes and answers, given the old value: pure, with Redis
//! 7.0's refusals.

use lsm::BatchWriter;
use resp::parse_i64;

use crate::command::bits::{BAD_OFFSET, bit, set_bit};
use crate::command::dump::Restore;
use crate::command::fields;
use crate::command::long_double::LongDouble;
use crate::command::operation::{Condition, Operation, Payload, PutReply};
use crate::expiry::Deadline;
use crate::settings::FAMILY;
use crate::shard::change::Answer;

const BUSY: &str = "BUSYKEY Target key name already exists.";
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
    /// Exists with a deadline, and with this value, unless that does not matter.
    Until(Deadline, Option<Vec<u8>>),
    /// Has expired: it does not exist, but is not removed yet.
    Expired,
}

impl OldValue {
    pub fn exists(&self) -> bool {
        matches!(self, OldValue::There | OldValue::Value(_) | OldValue::Until(..))
    }

    /// Whether the engine has the key, which may have expired.
    pub fn is_stored(&self) -> bool {
        self.exists() || *self == OldValue::Expired
    }

    /// When it ends.
    pub fn deadline(&self) -> Deadline {
        match self {
            OldValue::Until(deadline, _) => *deadline,
            _ => Deadline::NEVER,
        }
    }

    /// What is known of a value and its deadline.
    pub fn of(value: Vec<u8>, deadline: Deadline) -> Self {
        match deadline {
            Deadline::NEVER => OldValue::Value(value),
            deadline => OldValue::Until(deadline, Some(value)),
        }
    }

    /// The same with a deadline that was not known before.
    pub fn until(self, deadline: Deadline) -> Self {
        match self {
            old if deadline == Deadline::NEVER => old,
            OldValue::Value(value) => OldValue::Until(deadline, Some(value)),
            OldValue::There => OldValue::Until(deadline, None),
            old => old,
        }
    }

    /// What it is at a time.
    pub fn at(self, now_ms: u64) -> Self {
        if self.deadline().has_passed(now_ms) { OldValue::Expired } else { self }
    }

    /// The same where the value does not matter.
    pub fn without_value(&self) -> Self {
        match self {
            OldValue::Value(_) => OldValue::There,
            OldValue::Until(deadline, _) => OldValue::Until(*deadline, None),
            old => old.clone(),
        }
    }

    /// Whether it has been read, value and all.
    pub fn has_value(&self) -> bool {
        self.bytes().is_some()
    }

    /// Length of the value.
    pub fn len(&self) -> usize {
        self.bytes().map_or(0, <[u8]>::len)
    }

    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            OldValue::Value(value) | OldValue::Until(_, Some(value)) => Some(value),
            _ => None,
        }
    }

    /// The value; an empty one where it is not known.
    pub fn into_bytes(self) -> Vec<u8> {
        match self {
            OldValue::Value(value) | OldValue::Until(_, Some(value)) => value,
            _ => Vec::new(),
        }
    }

    fn answer(self) -> Answer {
        match self {
            OldValue::Value(value) | OldValue::Until(_, Some(value)) => Answer::Old(Some(value)),
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
        Operation::SetBit { offset, .. } => (offset / 8) as usize + 1,
        Operation::Fields { bytes } => bytes,
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
            let mut value = old.into_bytes();
            if value.len() + operand.len() > bytes_max {
                return refuse(TOO_LONG);
            }
            value.extend_from_slice(operand);
            with_length(value)
        }
        Operation::SetRange(offset) => {
            let mut value = old.into_bytes();
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
        Operation::SetBit { offset, on } => {
            let before = old.len();
            let mut value = old.into_bytes();
            let bytes = (offset / 8) as usize + 1;
            if value.len().max(bytes) > bytes_max {
                return refuse(if bytes > bytes_max { BAD_OFFSET } else { TOO_LONG });
            }
            let was_on = bit(&value, offset);
            value.resize(value.len().max(bytes), 0);
            set_bit(&mut value, offset, on);
            let changed = was_on != on || value.len() > before;
            let write = if changed { Write::Value(value) } else { Write::Nothing };
            (write, Answer::Integer(was_on.into()))
        }
        Operation::Fields { bytes } => {
            let before = old.len();
            let mut value = old.into_bytes();
            if bytes > 0 && value.len().max(bytes) > bytes_max {
                return refuse(if bytes > bytes_max { BAD_OFFSET } else { TOO_LONG });
            }
            value.resize(value.len().max(bytes), 0);
            let mut changed = value.len() > before;
            let answers = fields::decode(operand)
                .map(|operation| {
                    let (answer, has_changed) = fields::apply(&mut value, operation)?;
                    changed |= has_changed;
                    Some(answer)
                })
                .collect();
            let write = if changed { Write::Value(value) } else { Write::Nothing };
            (write, Answer::Integers(answers))
        }
        Operation::Restore { over: false, .. } if old.exists() => refuse(BUSY),
        Operation::Restore { payload: Payload::Refused(text), .. } => refuse(text),
        Operation::Restore { payload: Payload::Unpacked, .. } => (Write::AsItIs, Answer::Ok),
        Operation::Restore { payload: Payload::Packed, .. } => {
            match Restore::new(operand, bytes_max).finish() {
                Ok(value) => (Write::Value(value), Answer::Ok),
                Err(text) => refuse(text),
            }
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
        Operation::GetExpire => match old.bytes().map(<[u8]>::to_vec) {
            Some(value) => (Write::Value(value), old.answer()),
            None => (Write::Nothing, Answer::Old(None)),
        },
        Operation::Expire(_) => match old.has_value() {
            true => (Write::Value(old.into_bytes()), Answer::Integer(1)),
            false => (Write::Nothing, Answer::Integer(0)),
        },
        Operation::Put
        | Operation::PutIfNone
        | Operation::Reclaim
        | Operation::Delete
        | Operation::Transfer(_)
        | Operation::Combine(_)
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
    use crate::command::args::tests::with;

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
    fn bits_are_set_and_values_made_longer() {
        let set = |old, offset, on| made(Operation::SetBit { offset, on }, old, "");
        let longer = Some("\0\x40".to_owned());
        assert_eq!(set(OldValue::Missing, 9, true), (longer, Answer::Integer(0)));
        assert_eq!(set(value("A"), 0, false), (None, Answer::Integer(0)), "nothing changes");
        assert_eq!(set(value("A"), 1, false), (Some("\x01".to_owned()), Answer::Integer(1)));
        assert_eq!(set(OldValue::Missing, 0, false).0, Some("\0".to_owned()));
        let far = set(value("A"), 8 * BYTES_MAX as u64, true);
        assert_eq!(far, (None, Answer::Refused(BAD_OFFSET)));
    }

    #[test]
    fn fields_are_changed_in_order_and_a_failure_leaves_the_length() {
        let change = |line: &str, old: OldValue| {
            with(line, |args| {
                let operations = fields::parse(args).unwrap();
                let bytes = fields::bytes_min(&operations);
                let operand = fields::encode(&operations);
                let (write, answer) = modify(Operation::Fields { bytes }, old, &operand, BYTES_MAX);
                (matches!(write, Write::Value(_)), answer)
            })
        };
        let integers = |numbers: &[Option<i64>]| Answer::Integers(numbers.to_vec());
        assert_eq!(
            change("bitfield k set u8 0 65 get u8 0", value("B")),
            (true, integers(&[Some(66), Some(65)]))
        );
        assert_eq!(change("bitfield k set u8 0 66", value("B")), (false, integers(&[Some(66)])));
        assert_eq!(change("bitfield k get u8 0", OldValue::Missing), (false, integers(&[Some(0)])));
        let fail = "bitfield k overflow fail incrby u8 0 256";
        assert_eq!(change(fail, value("B")), (false, integers(&[None])));
        assert_eq!(change(fail, OldValue::Missing), (true, integers(&[None])), "Redis makes it");
        assert_eq!(
            change("bitfield k set u8 800 1", value("B")),
            (false, Answer::Refused(BAD_OFFSET))
        );
    }

    #[test]
    fn a_payload_is_restored_unless_the_key_exists() {
        let restore = |over, payload, old| {
            let (write, answer) =
                modify(Operation::Restore { over, payload }, old, b"not a payload", BYTES_MAX);
            (write != Write::Nothing, answer)
        };
        let busy = (false, Answer::Refused(BUSY));
        assert_eq!(restore(false, Payload::Packed, OldValue::There), busy);
        assert_eq!(restore(false, Payload::Refused("ERR x"), OldValue::There), busy);
        assert_eq!(
            restore(true, Payload::Refused("ERR x"), OldValue::There),
            (false, Answer::Refused("ERR x"))
        );
        let bad = (false, Answer::Refused(crate::command::dump::BAD_CHECKSUM));
        assert_eq!(restore(false, Payload::Packed, OldValue::Missing), bad);
        assert_eq!(restore(true, Payload::Unpacked, OldValue::There), (true, Answer::Ok));
    }

    #[test]
    fn a_value_is_taken_away_once() {
        let taken = made(Operation::GetDelete, value("v"), "");
        assert_eq!(taken, (Some(String::new()), Answer::Old(Some(b"v".to_vec()))));
        assert_eq!(made(Operation::GetDelete, OldValue::Missing, ""), (None, Answer::Old(None)));
    }
}
