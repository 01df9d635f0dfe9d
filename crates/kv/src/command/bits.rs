//! Values as strings of bits: `GETBIT`, `SETBIT`, `BITCOUNT`, `BITPOS` and `BITOP`.
//!
//! Bit 0 is the most significant bit of the first byte. Functions over long values take a part at a
//! time, so that their callers can let other tasks run in between.

use std::ops::Range;

use resp::parse_i64;

use crate::command::args::Args;
use crate::command::refusal::Refusal;

/// Bytes that are counted, searched or combined at a time.
pub(crate) const STEP_BYTES: usize = 64 * 1024;

/// The refusal of an offset, also of one that would make a value too long.
pub(crate) const BAD_OFFSET: &str = "ERR bit offset is not an integer or out of range";
const NOT_AN_INTEGER: &str = "ERR value is not an integer or out of range";
const SYNTAX: &str = "ERR syntax error";

/// Parses the offset of a bit. With a `#` it counts fields of `field_bits` bits, where that is
/// given.
pub(crate) fn parse_offset(word: &[u8], field_bits: Option<u32>) -> Result<u64, Refusal<'_>> {
    let offset = match (word, field_bits) {
        ([b'#', digits @ ..], Some(bits)) => {
            parse_i64(digits).and_then(|field| field.checked_mul(bits.into()))
        }
        _ => parse_i64(word),
    };
    offset
        .and_then(|offset| u64::try_from(offset).ok())
        .filter(|offset| offset >> 3 < resp::BULK_BYTES_MAX as u64)
        .ok_or(Refusal::Text(BAD_OFFSET))
}

/// The bit at an offset; 0 after the end.
pub(crate) fn bit(value: &[u8], offset: u64) -> bool {
    let byte = usize::try_from(offset >> 3).ok().and_then(|at| value.get(at));
    byte.is_some_and(|byte| byte & (0x80 >> (offset & 7)) != 0)
}

/// Sets the bit at an offset within the value.
pub(crate) fn set_bit(value: &mut [u8], offset: u64, on: bool) {
    let mask = 0x80 >> (offset & 7);
    if let Some(byte) = usize::try_from(offset >> 3).ok().and_then(|at| value.get_mut(at)) {
        *byte = if on { *byte | mask } else { *byte & !mask };
    }
}

/// A part of a value, as the client gave it: negative positions count from the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitSpan {
    start: i64,
    end: i64,
    /// Positions of bits, not of bytes.
    of_bits: bool,
}

impl BitSpan {
    const ALL: Self = Self { start: 0, end: i64::MAX, of_bits: false };

    /// The bits of it in a value of `length` bytes.
    fn within(self, length: usize) -> Range<u64> {
        let length = i64::try_from(length).unwrap_or(i64::MAX / 8);
        let total = if self.of_bits { length * 8 } else { length };
        let from_end = |position: i64| {
            let position = if position < 0 { total.saturating_add(position) } else { position };
            position.max(0)
        };
        let (start, end) = (from_end(self.start), from_end(self.end).min(total - 1));
        if start > end {
            return 0..0;
        }
        let scale = if self.of_bits { 1 } else { 8 };
        start as u64 * scale..(end as u64 + 1) * scale
    }
}

/// A question about the bits of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitQuery {
    /// How many are set.
    Count(BitSpan),
    /// Where the first one with this value is. With an end that the client gave, the value does not
    /// continue with zeros.
    Find { on: bool, span: BitSpan, has_end: bool },
    /// An empty part, which has no bits.
    Nothing,
    /// Wrong options, which Redis refuses only if the key exists.
    Refused {
        error: &'static str,
        /// The answer if it does not exist.
        missing: i64,
    },
}

impl BitQuery {
    /// `BITCOUNT key [start end [BYTE|BIT]]`.
    pub(crate) fn parse_count(args: Args<'_>) -> Self {
        let refused = |error| Self::Refused { error, missing: 0 };
        if args.len() == 2 {
            return Self::Count(BitSpan::ALL);
        }
        if !(4..=5).contains(&args.len()) {
            return refused(SYNTAX);
        }
        let (Some(start), Some(end)) = (parse_i64(args.get(2)), parse_i64(args.get(3))) else {
            return refused(NOT_AN_INTEGER);
        };
        if start < 0 && end < 0 && start > end {
            return Self::Nothing;
        }
        match unit(args, 4) {
            Some(of_bits) => Self::Count(BitSpan { start, end, of_bits }),
            None => refused(SYNTAX),
        }
    }

    /// `BITPOS key bit [start [end [BYTE|BIT]]]`.
    pub(crate) fn parse_find(args: Args<'_>) -> Result<Self, Refusal<'_>> {
        let on = match parse_i64(args.get(2)) {
            Some(0) => false,
            Some(1) => true,
            Some(_) => return Err(Refusal::Text("ERR The bit argument must be 1 or 0.")),
            None => return Err(Refusal::NOT_AN_INTEGER),
        };
        let refused = |error| Ok(Self::Refused { error, missing: Self::missing_bit(on) });
        if args.len() > 6 {
            return refused(SYNTAX);
        }
        let mut span = BitSpan::ALL;
        let number = |at: usize, default| match args.len() > at {
            true => parse_i64(args.get(at)),
            false => Some(default),
        };
        match number(3, 0) {
            Some(start) => span.start = start,
            None => return refused(NOT_AN_INTEGER),
        }
        match unit(args, 5) {
            Some(of_bits) => span.of_bits = of_bits,
            None => return refused(SYNTAX),
        }
        match number(4, i64::MAX) {
            Some(end) => span.end = end,
            None => return refused(NOT_AN_INTEGER),
        }
        Ok(Self::Find { on, span, has_end: args.len() > 4 })
    }

    /// A missing key is an endless row of zeros.
    fn missing_bit(on: bool) -> i64 {
        if on { -1 } else { 0 }
    }

    /// The answer for a key that does not exist.
    pub(crate) fn missing(self) -> i64 {
        match self {
            Self::Count(_) | Self::Nothing => 0,
            Self::Find { on, .. } => Self::missing_bit(on),
            Self::Refused { missing, .. } => missing,
        }
    }

    /// Begins to answer it for a value of `length` bytes.
    pub(crate) fn begin(self, length: usize) -> Result<BitSearch, &'static str> {
        let bits = match self {
            Self::Count(span) | Self::Find { span, .. } => span.within(length),
            Self::Nothing => 0..0,
            Self::Refused { error, .. } => return Err(error),
        };
        // Nothing is not a part that continues with zeros, either.
        let is_empty = bits.is_empty();
        Ok(BitSearch { query: self, bits, is_empty, count: 0, found: None })
    }

    /// The answer for a short value.
    pub(crate) fn answer(self, value: &[u8]) -> Result<i64, &'static str> {
        let mut search = self.begin(value.len())?;
        while search.step(value) {}
        Ok(search.answer())
    }
}

/// Whether the word at `at`, if any, says that positions are those of bits; `None` for a wrong
/// word.
fn unit(args: Args<'_>, at: usize) -> Option<bool> {
    match () {
        () if args.len() <= at => Some(false),
        () if args.is(at, "bit") => Some(true),
        () if args.is(at, "byte") => Some(false),
        () => None,
    }
}

/// The answer to a [`BitQuery`] in the making.
pub(crate) struct BitSearch {
    query: BitQuery,
    /// The bits that are still to be looked at.
    bits: Range<u64>,
    is_empty: bool,
    count: u64,
    found: Option<u64>,
}

impl BitSearch {
    /// Looks at the next part of the value; false when there is no more.
    pub(crate) fn step(&mut self, value: &[u8]) -> bool {
        if self.bits.is_empty() || self.found.is_some() {
            return false;
        }
        let first = (self.bits.start / 8) as usize;
        let end = (self.bits.end.div_ceil(8) as usize).min(first + STEP_BYTES).min(value.len());
        let part = &value[first..end];
        let part_end = self.bits.end.min(end as u64 * 8);
        // Bits of the first and of the last byte that do not belong to it.
        let before = (self.bits.start % 8) as u32;
        let after = (end as u64 * 8 - part_end) as u32;
        match self.query {
            BitQuery::Find { on, .. } => {
                let at = find(part, on, before, after);
                self.found = at.map(|at| first as u64 * 8 + at);
            }
            _ => self.count += count(part, before, after),
        }
        self.bits.start = part_end;
        true
    }

    pub(crate) fn answer(&self) -> i64 {
        match self.query {
            BitQuery::Find { on, has_end, .. } => match self.found {
                Some(at) => at as i64,
                None if on || has_end || self.is_empty => -1,
                None => self.bits.end as i64,
            },
            _ => self.count as i64,
        }
    }
}

/// The bits that are set, without the first `before` and the last `after` ones.
fn count(part: &[u8], before: u32, after: u32) -> u64 {
    let words = part.chunks_exact(8);
    let rest: u64 = words.remainder().iter().map(|byte| u64::from(byte.count_ones())).sum();
    let all = words.fold(rest, |sum, word| {
        let word = word.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
        sum + u64::from(word.count_ones())
    });
    let (Some(first), Some(last)) = (part.first(), part.last()) else { return 0 };
    let outside_first = if before == 0 { 0 } else { first >> (8 - before) };
    let outside_last = last & ((1u16 << after) - 1) as u8;
    all - u64::from(outside_first.count_ones()) - u64::from(outside_last.count_ones())
}

/// The first bit that is `on`, not one of the first `before` or the last `after` ones.
fn find(part: &[u8], on: bool, before: u32, after: u32) -> Option<u64> {
    let none = if on { 0 } else { 0xff };
    let mut from = before;
    let mut at = 0;
    while let Some(byte) = part.get(at) {
        // Set where a bit is wanted.
        let mut wanted = (byte ^ none) & (0xff >> from);
        if at + 1 == part.len() {
            wanted &= 0xff << after;
        }
        if wanted != 0 {
            return Some(at as u64 * 8 + u64::from(wanted.leading_zeros()));
        }
        from = 0;
        at += 1;
        // All bytes but the last may be skipped whole.
        let rest = &part[at..part.len().max(at + 1) - 1];
        at += rest.iter().position(|byte| *byte != none).unwrap_or(rest.len());
    }
    None
}

/// `BITOP`'s operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitOperation {
    And,
    Or,
    Xor,
    Not,
}

impl BitOperation {
    /// Parses the operation's name.
    pub(crate) fn parse(word: &[u8]) -> Option<Self> {
        let all = [("and", Self::And), ("or", Self::Or), ("xor", Self::Xor), ("not", Self::Not)];
        let found = all.into_iter().find(|(name, _)| word.eq_ignore_ascii_case(name.as_bytes()));
        found.map(|(_, operation)| operation)
    }

    /// Makes a source a part of the result, from byte `at` on and for at most [`STEP_BYTES`]; false
    /// when nothing of it is left. `is_first` says that there was no other source before it. The
    /// shorter of both continues with zeros.
    pub(crate) fn step(
        self,
        result: &mut Vec<u8>,
        source: &[u8],
        at: usize,
        is_first: bool,
    ) -> bool {
        let end = at + STEP_BYTES;
        let part = source.get(at..end.min(source.len())).unwrap_or_default();
        let before = result.len().clamp(at, end) - at;
        let (both, longer) = part.split_at(before.min(part.len()));
        if let Some(mine) = result.get_mut(at..at + before) {
            let (mine, alone) = mine.split_at_mut(both.len());
            let pairs = mine.iter_mut().zip(both);
            match self {
                Self::And => {
                    pairs.for_each(|(mine, byte)| *mine &= byte);
                    alone.fill(0);
                }
                Self::Or => pairs.for_each(|(mine, byte)| *mine |= byte),
                Self::Xor => pairs.for_each(|(mine, byte)| *mine ^= byte),
                Self::Not => {}
            }
        }
        match self {
            Self::Not => result.extend(longer.iter().map(|byte| !byte)),
            Self::And if !is_first => result.resize(result.len() + longer.len(), 0),
            _ => result.extend_from_slice(longer),
        }
        end < source.len().max(result.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::tests::with;
    use proptest::prelude::*;

    #[test]
    fn offsets_are_parsed_or_refused() {
        let parse = |word: &str, bits| parse_offset(word.as_bytes(), bits).ok();
        assert_eq!((parse("0", None), parse("4294967295", None)), (Some(0), Some((1 << 32) - 1)));
        assert_eq!((parse("#3", Some(8)), parse("#3", None)), (Some(24), None));
        for word in ["", "-1", "x", "4294967296", "9223372036854775807", "#9223372036854775807"] {
            assert_eq!(parse(word, Some(63)), None, "{word}");
        }
    }

    #[test]
    fn bits_are_read_and_set() {
        let mut value = vec![0x80, 0x01];
        let bits = |value: &[u8]| (0..18).filter(|at| bit(value, *at)).collect::<Vec<_>>();
        assert_eq!(bits(&value), [0, 15]);
        set_bit(&mut value, 0, false);
        set_bit(&mut value, 9, true);
        set_bit(&mut value, 99, true);
        assert_eq!(bits(&value), [9, 15]);
        assert!(!bit(&value, u64::MAX));
    }

    fn asked(line: &str, value: &[u8]) -> Result<i64, String> {
        with(line, |args| {
            let query = match args.is(0, "bitcount") {
                true => BitQuery::parse_count(args),
                false => BitQuery::parse_find(args).map_err(|error| format!("{error:?}"))?,
            };
            query.answer(value).map_err(str::to_owned)
        })
    }

    /// The answers of redis-server 7.0.15.
    #[test]
    fn questions_are_answered_as_redis_answers_them() {
        let foobar: &[u8] = b"foobar";
        for (line, value, answer) in [
            ("bitcount k", foobar, 26),
            ("bitcount k 0 0", foobar, 4),
            ("bitcount k 1 1", foobar, 6),
            ("bitcount k -2 -1", foobar, 7),
            ("bitcount k 5 30 bit", foobar, 17),
            ("bitcount k -1 -2 nonsense", foobar, 0),
            ("bitcount k 3 1", foobar, 0),
            ("bitcount k 0 -1", b"", 0),
            ("bitpos k 1", foobar, 1),
            ("bitpos k 0", b"\xff\xff", 16),
            ("bitpos k 0 0 -1", b"\xff\xff", -1),
            ("bitpos k 0 5", b"\xff\xff", -1),
            ("bitpos k 1", b"\0\0", -1),
            ("bitpos k 0", b"", -1),
            ("bitpos k 1 2 -1", b"\0\xff\xf0", 16),
            ("bitpos k 1 7 15 bit", b"\0\xff\xf0", 8),
            ("bitpos k 0 9 -1 bit", b"\0\xff\xf0", 20),
            ("bitpos k 1 -4 -1 bit", b"\0\xff\xf0", -1),
        ] {
            assert_eq!(asked(line, value), Ok(answer), "{line}");
        }
        for (line, error) in [
            ("bitcount k 0", SYNTAX),
            ("bitcount k 0 1 x", SYNTAX),
            ("bitcount k x 1", NOT_AN_INTEGER),
            ("bitcount k 0 1 bit x", SYNTAX),
            ("bitpos k 1 x", NOT_AN_INTEGER),
            ("bitpos k 1 0 x byte", NOT_AN_INTEGER),
            ("bitpos k 1 0 1 x", SYNTAX),
        ] {
            assert_eq!(asked(line, foobar), Err(error.to_owned()), "{line}");
        }
        for line in ["bitpos k 2", "bitpos k x"] {
            assert!(asked(line, foobar).is_err());
        }
    }

    proptest! {
        #[test]
        fn bits_are_counted_and_found_one_by_one(
            value in proptest::collection::vec(prop_oneof![Just(0), Just(0xff), any::<u8>()], 0..40),
            start in -50..400i64,
            end in -50..400i64,
            of_bits: bool,
            on: bool,
            has_end: bool,
        ) {
            let end = if has_end { end } else { i64::MAX };
            let span = BitSpan { start, end, of_bits };
            let inside = span.within(value.len());
            prop_assert!(inside.end <= value.len() as u64 * 8);
            let set = inside.clone().filter(|at| bit(&value, *at)).count() as i64;
            prop_assert_eq!(BitQuery::Count(span).answer(&value), Ok(set));
            let first = inside.clone().find(|at| bit(&value, *at) == on).map(|at| at as i64);
            let none = if on || has_end || inside.is_empty() { -1 } else { inside.end as i64 };
            let query = BitQuery::Find { on, span, has_end };
            prop_assert_eq!(query.answer(&value), Ok(first.unwrap_or(none)));
        }

        #[test]
        fn values_are_combined_byte_by_byte(
            sources in proptest::collection::vec((any::<u8>(), 0..3usize, 0..100usize), 1..5),
            kind in 0..4usize,
        ) {
            use BitOperation::*;
            let (name, operation) = [("AND", And), ("or", Or), ("Xor", Xor), ("not", Not)][kind];
            prop_assert_eq!(BitOperation::parse(name.as_bytes()), Some(operation));
            let sources: Vec<Vec<u8>> = sources
                .iter()
                .take(if operation == Not { 1 } else { 9 })
                .map(|(byte, steps, more)| {
                    let length = steps * STEP_BYTES + more;
                    (0..length).map(|at| byte.wrapping_mul(at as u8 | 1)).collect()
                })
                .collect();
            let mut result = Vec::new();
            for (number, source) in sources.iter().enumerate() {
                let mut at = 0;
                while operation.step(&mut result, source, at, number == 0) {
                    at += STEP_BYTES;
                }
            }
            let length = sources.iter().map(Vec::len).max().unwrap_or(0);
            prop_assert_eq!(result.len(), length);
            for at in (0..length).step_by(97).chain(length.saturating_sub(3)..length) {
                let mut bytes =
                    sources.iter().map(|source| source.get(at).copied().unwrap_or(0));
                let first = bytes.next().unwrap();
                let expected = match operation {
                    And => bytes.fold(first, |a, b| a & b),
                    Or => bytes.fold(first, |a, b| a | b),
                    Xor => bytes.fold(first, |a, b| a ^ b),
                    Not => !first,
                };
                prop_assert_eq!(result[at], expected, "{}", at);
            }
        }
    }

    #[test]
    fn long_values_are_searched_in_steps() {
        let mut value = vec![0; 3 * STEP_BYTES + 5];
        value[3 * STEP_BYTES] = 0x10;
        assert_eq!(asked("bitpos k 1", &value), Ok(3 * 8 * STEP_BYTES as i64 + 3));
        assert_eq!(asked("bitpos k 0 0 -1", &vec![0xff; 2 * STEP_BYTES]), Ok(-1));
        assert_eq!(asked("bitcount k", &value), Ok(1));
        assert_eq!(
            asked("bitcount k 4 -1 bit", &vec![0xff; STEP_BYTES + 1]),
            Ok(8 * (STEP_BYTES as i64 + 1) - 4)
        );
    }
}
