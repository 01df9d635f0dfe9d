//! The query of `MR.RANGE`.
//!
//! `start` is always the lower end and `end` the upper one; `REVERSE` changes only the direction of
//! the walk. Ends are written as in `ZRANGEBYLEX`: `[key` includes the key, `(key` excludes it, `-`
//! is before the first key, `+` after the last.

/// One end of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeBound<'a> {
    /// No bound on this side.
    Open,
    /// `+` as the lower end or `-` as the upper one: the range is empty.
    Nothing,
    /// A key, included in the range.
    Inclusive(&'a [u8]),
    /// A key, excluded from the range.
    Exclusive(&'a [u8]),
}

impl<'a> RangeBound<'a> {
    /// Parses a lower end.
    pub fn parse_start(word: &'a [u8]) -> Option<Self> {
        match word {
            b"-" => Some(Self::Open),
            b"+" => Some(Self::Nothing),
            key => Self::parse_key(key),
        }
    }

    /// Parses an upper end.
    pub fn parse_end(word: &'a [u8]) -> Option<Self> {
        match word {
            b"+" => Some(Self::Open),
            b"-" => Some(Self::Nothing),
            key => Self::parse_key(key),
        }
    }

    fn parse_key(word: &'a [u8]) -> Option<Self> {
        match word {
            [b'[', key @ ..] => Some(Self::Inclusive(key)),
            [b'(', key @ ..] => Some(Self::Exclusive(key)),
            _ => None,
        }
    }
}

/// `MR.RANGE` with its options.
#[derive(Clone, Copy, Debug)]
pub struct RangeQuery<'a> {
    /// The lower end.
    pub start: RangeBound<'a>,
    /// The upper end.
    pub end: RangeBound<'a>,
    /// Walk from the upper end to the lower one.
    pub reverse: bool,
    /// What to return.
    pub extent: Extent,
}

/// What a walk over keys returns of them, and when it ends before the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Return each key's value after it.
    pub values: bool,
    /// Maximum number of keys.
    pub keys: u64,
    /// It ends with the key with which what it returns has this many bytes.
    pub bytes: u64,
}

impl Extent {
    /// All keys, without their values.
    pub const KEYS: Self = Self { values: false, keys: u64::MAX, bytes: u64::MAX };

    /// Whether it goes on after `keys` keys that have, with their values if they are wanted,
    /// `bytes` bytes.
    pub fn goes_on(&self, keys: u64, bytes: u64) -> bool {
        keys < self.keys && bytes < self.bytes
    }
}
