//! `BITFIELD`: integers of any width within a value.
//!
//! A command's operations travel to the shard as the operand of its change ([`encode`]), and are
//! applied to the value there ([`apply`]).

use resp::parse_i64;

use crate::command::args::Args;
use crate::command::bits::parse_offset;
use crate::command::refusal::Refusal;

/// Bytes of an operation in an operand.
const ENCODED_BYTES: usize = 20;

/// One operation on an integer of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FieldOperation {
    kind: FieldKind,
    signed: bool,
    bits: u8,
    overflow: Overflow,
    /// The first bit.
    offset: u64,
    /// The number to be stored or added.
    number: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FieldKind {
    Get,
    Set,
    Add,
}

/// What happens to a number that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overflow {
    Wrap,
    Saturate,
    Fail,
}

const BAD_TYPE: Refusal<'static> = Refusal::Text(
    "ERR Invalid bitfield type. Use something like i16 u8. Note that u64 is not supported but i64 is.",
);

/// Parses the operations of `BITFIELD` and `BITFIELD_RO`, whose arguments are `args`.
pub(crate) fn parse(args: Args<'_>) -> Result<Vec<FieldOperation>, Refusal<'_>> {
    let mut operations = Vec::new();
    let mut overflow = Overflow::Wrap;
    let mut at = 2;
    while at < args.len() {
        let more = args.len() - at - 1;
        let kind = match () {
            () if args.is(at, "get") && more >= 2 => FieldKind::Get,
            () if args.is(at, "set") && more >= 3 => FieldKind::Set,
            () if args.is(at, "incrby") && more >= 3 => FieldKind::Add,
            () if args.is(at, "overflow") && more >= 1 => {
                overflow = match () {
                    () if args.is(at + 1, "wrap") => Overflow::Wrap,
                    () if args.is(at + 1, "sat") => Overflow::Saturate,
                    () if args.is(at + 1, "fail") => Overflow::Fail,
                    () => return Err(Refusal::Text("ERR Invalid OVERFLOW type specified")),
                };
                at += 2;
                continue;
            }
            () => return Err(Refusal::SYNTAX),
        };
        let (signed, bits) = parse_type(args.get(at + 1)).ok_or(BAD_TYPE)?;
        let offset = parse_offset(args.get(at + 2), Some(bits.into()))?;
        let mut number = 0;
        if kind != FieldKind::Get {
            number = parse_i64(args.get(at + 3)).ok_or(Refusal::NOT_AN_INTEGER)?;
            at += 1;
        }
        at += 3;
        operations.push(FieldOperation { kind, signed, bits, overflow, offset, number });
    }
    Ok(operations)
}

/// Parses `i1` to `i64` and `u1` to `u63`; like Redis, up to a zero byte.
fn parse_type(word: &[u8]) -> Option<(bool, u8)> {
    let (signed, digits, bits_max) = match word {
        [b'i', digits @ ..] => (true, digits, 64),
        [b'u', digits @ ..] => (false, digits, 63),
        _ => return None,
    };
    let digits = digits.split(|byte| *byte == 0).next().unwrap_or_default();
    let bits = parse_i64(digits).filter(|bits| (1..=bits_max).contains(bits))?;
    Some((signed, bits as u8))
}

impl FieldOperation {
    /// Whether it changes the value.
    pub(crate) fn writes(&self) -> bool {
        self.kind != FieldKind::Get
    }
}

/// The length that a value has after the operations, at least; 0 if they only read.
pub(crate) fn bytes_min(operations: &[FieldOperation]) -> usize {
    let writing = operations.iter().filter(|operation| operation.writes());
    let last = writing.map(|operation| operation.offset + u64::from(operation.bits) - 1).max();
    last.map_or(0, |last| (last / 8) as usize + 1)
}

/// The operations as the operand of a change.
pub(crate) fn encode(operations: &[FieldOperation]) -> Vec<u8> {
    let mut operand = Vec::with_capacity(operations.len() * ENCODED_BYTES);
    for operation in operations {
        operand.push(operation.kind as u8);
        operand.push(operation.signed.into());
        operand.push(operation.bits);
        operand.push(operation.overflow as u8);
        operand.extend_from_slice(&operation.offset.to_le_bytes());
        operand.extend_from_slice(&operation.number.to_le_bytes());
    }
    operand
}

/// The operations of an operand that [`encode`] made.
pub(crate) fn decode(operand: &[u8]) -> impl Iterator<Item = FieldOperation> {
    operand.chunks_exact(ENCODED_BYTES).map(|bytes| {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            word
        };
        let kind = match bytes[0] {
            0 => FieldKind::Get,
            1 => FieldKind::Set,
            _ => FieldKind::Add,
        };
        let overflow = match bytes[3] {
            0 => Overflow::Wrap,
            1 => Overflow::Saturate,
            _ => Overflow::Fail,
        };
        FieldOperation {
            kind,
            signed: bytes[1] != 0,
            bits: bytes[2],
            overflow,
            offset: u64::from_le_bytes(word(4)),
            number: i64::from_le_bytes(word(12)),
        }
    })
}

/// Answers an operation that only reads.
pub(crate) fn get(value: &[u8], operation: FieldOperation) -> i64 {
    let field = read(value, operation.offset, operation.bits);
    if operation.signed { extend(field, operation.bits) } else { field as i64 }
}

/// Applies an operation to a value that is long enough. Returns its answer, and whether the value
/// was changed; `None` when the number does not fit.
pub(crate) fn apply(value: &mut [u8], operation: FieldOperation) -> Option<(i64, bool)> {
    let FieldOperation { kind, signed, bits, overflow, offset, number } = operation;
    let old = get(value, operation);
    if kind == FieldKind::Get {
        return Some((old, false));
    }
    // As in Redis, a number to be stored is one to which nothing is added.
    let (from, add) = if kind == FieldKind::Set { (number, 0) } else { (old, number) };
    let (new, fits) = match signed {
        true => sum_signed(from, add, bits, overflow),
        false => sum_unsigned(from as u64, add, bits, overflow),
    };
    if !fits && overflow == Overflow::Fail {
        return None;
    }
    write(value, offset, bits, new as u64);
    Some((if kind == FieldKind::Set { old } else { new }, old != get(value, operation)))
}

/// The sum as it is stored, and whether it fits. The comparisons are Redis's, which wrap around for
/// numbers that are far outside of the field.
fn sum_signed(value: i64, add: i64, bits: u8, overflow: Overflow) -> (i64, bool) {
    let most = (mask(bits) >> 1) as i64;
    let least = -most - 1;
    let (add_max, add_min) = (most.wrapping_sub(value), least.wrapping_sub(value));
    let narrow = bits < 64;
    let sum = value.wrapping_add(add);
    let limit = if value > most || narrow && add > add_max || value >= 0 && add > 0 && add > add_max
    {
        most
    } else if value < least || narrow && add < add_min || value < 0 && add < 0 && add < add_min {
        least
    } else {
        return (sum, true);
    };
    match overflow {
        Overflow::Saturate => (limit, false),
        Overflow::Wrap | Overflow::Fail => (extend(sum as u64 & mask(bits), bits), false),
    }
}

fn sum_unsigned(value: u64, add: i64, bits: u8, overflow: Overflow) -> (i64, bool) {
    let most = mask(bits);
    let (add_max, add_min) = (most.wrapping_sub(value) as i64, value.wrapping_neg() as i64);
    let sum = value.wrapping_add(add as u64);
    let limit = if value > most || add > 0 && add > add_max {
        most
    } else if add < 0 && add < add_min {
        0
    } else {
        return (sum as i64, true);
    };
    match overflow {
        Overflow::Saturate => (limit as i64, false),
        Overflow::Wrap | Overflow::Fail => ((sum & most) as i64, false),
    }
}

fn mask(bits: u8) -> u64 {
    u64::MAX >> (64 - u32::from(bits))
}

/// The number of a signed field.
fn extend(field: u64, bits: u8) -> i64 {
    let unused = 64 - u32::from(bits);
    ((field << unused) as i64) >> unused
}

/// The field of `bits` bits at an offset; zeros after the end of the value.
fn read(value: &[u8], offset: u64, bits: u8) -> u64 {
    let first = usize::try_from(offset / 8).unwrap_or(usize::MAX);
    let mut window = [0; 16];
    for (to, at) in window.iter_mut().zip(0..9) {
        *to = first.checked_add(at).and_then(|at| value.get(at)).copied().unwrap_or(0);
    }
    let window = u128::from_be_bytes(window) << (offset % 8);
    (window >> (128 - u32::from(bits))) as u64
}

/// Stores a field of a value that is long enough.
fn write(value: &mut [u8], offset: u64, bits: u8, field: u64) {
    let first = usize::try_from(offset / 8).unwrap_or(usize::MAX);
    let shift = 128 - u32::from(bits) - (offset % 8) as u32;
    let field = (u128::from(field & mask(bits)) << shift).to_be_bytes();
    let kept = (!(u128::from(mask(bits)) << shift)).to_be_bytes();
    let end = value.len().min(first.saturating_add(9));
    let bytes = value.get_mut(first..end).unwrap_or_default();
    for ((byte, field), kept) in bytes.iter_mut().zip(field).zip(kept) {
        *byte = *byte & kept | field;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::tests::with;
    use crate::command::bits::{bit, set_bit};
    use proptest::prelude::*;

    /// The answers to the operations of a line, and the value after them.
    fn applied(line: &str, value: &[u8]) -> (Vec<Option<i64>>, Vec<u8>) {
        let operations = with(line, |args| parse(args).unwrap());
        let mut value = value.to_vec();
        value.resize(value.len().max(bytes_min(&operations)), 0);
        let operand = encode(&operations);
        assert_eq!(decode(&operand).collect::<Vec<_>>(), operations);
        let answers = decode(&operand)
            .map(|operation| apply(&mut value, operation).map(|(answer, _)| answer));
        (answers.collect(), value)
    }

    /// The answers of redis-server 7.0.15.
    #[test]
    fn fields_are_changed_as_redis_changes_them() {
        let many: Vec<Option<i64>> = vec![Some(1), Some(0)];
        assert_eq!(applied("bitfield k incrby i5 100 1 get u4 0", b"").0, many);
        for (line, value, answers) in [
            ("bitfield k set u8 0 255 get u8 0", &b""[..], &[Some(0), Some(255)][..]),
            ("bitfield k set i8 0 -100 get u8 0 get i8 0", b"", &[Some(0), Some(156), Some(-100)]),
            ("bitfield k set u8 #1 200 get u8 8", b"", &[Some(0), Some(200)]),
            ("bitfield k incrby u8 0 1", b"\xff", &[Some(0)]),
            ("bitfield k overflow sat incrby u8 0 1", b"\xff", &[Some(255)]),
            ("bitfield k overflow fail incrby u8 0 1 get u8 0", b"\xff", &[None, Some(255)]),
            ("bitfield k overflow sat incrby i8 0 -200", b"\x80", &[Some(-128)]),
            ("bitfield k incrby i8 0 1", b"\x7f", &[Some(-128)]),
            ("bitfield k overflow sat set u8 0 -1 get u8 0", b"", &[Some(0), Some(255)]),
            ("bitfield k set u8 0 257 get u8 0", b"", &[Some(0), Some(1)]),
            (
                "bitfield k overflow sat set i8 0 -9223372036854775808 get i8 0",
                b"",
                &[Some(0), Some(127)],
            ),
            (
                "bitfield k set i64 0 -9223372036854775808 incrby i64 0 -1",
                b"",
                &[Some(0), Some(i64::MAX)],
            ),
            ("bitfield k set i1 0 1 get i1 0 get u1 0", b"", &[Some(0), Some(-1), Some(1)]),
            ("bitfield k get u63 9 get i64 1", b"", &[Some(0), Some(0)]),
            ("bitfield k", b"", &[]),
        ] {
            assert_eq!(applied(line, value).0, answers, "{line}");
        }
    }

    #[test]
    fn wrong_operations_are_refused() {
        for (line, error) in [
            ("bitfield k get u64 0", BAD_TYPE),
            ("bitfield k get i65 0", BAD_TYPE),
            ("bitfield k get x8 0", BAD_TYPE),
            ("bitfield k get u8 -1", Refusal::Text(crate::command::bits::BAD_OFFSET)),
            ("bitfield k get u8", Refusal::SYNTAX),
            ("bitfield k set u8 0", Refusal::SYNTAX),
            ("bitfield k set u8 0 x", Refusal::NOT_AN_INTEGER),
            ("bitfield k overflow x", Refusal::Text("ERR Invalid OVERFLOW type specified")),
            ("bitfield k foo", Refusal::SYNTAX),
        ] {
            with(line, |args| {
                let refusal = parse(args).unwrap_err();
                assert_eq!(format!("{refusal:?}"), format!("{error:?}"), "{line}");
            });
        }
    }

    proptest! {
        #[test]
        fn a_field_is_its_bits(
            value in proptest::collection::vec(any::<u8>(), 0..24),
            offset in 0..160u64,
            bits in 1..=64u8,
            field: u64,
        ) {
            let expected = (0..u64::from(bits))
                .fold(0, |number, at| number << 1 | u64::from(bit(&value, offset + at)));
            prop_assert_eq!(read(&value, offset, bits), expected);
            let mut stored = value.clone();
            let length = (offset as usize + usize::from(bits)).div_ceil(8);
            stored.resize(length.max(value.len()), 0);
            let mut slow = stored.clone();
            write(&mut stored, offset, bits, field);
            for at in 0..u64::from(bits) {
                set_bit(&mut slow, offset + at, field >> (u64::from(bits) - 1 - at) & 1 == 1);
            }
            prop_assert_eq!(stored, slow);
        }
    }
}
