//! The part of a column family in memory: a live memtable, or writes recovered from the log. All
//! are newer than the tables; [`crate::version::Family::mems`] has the newest first.

use std::ops::Range;
use std::sync::Arc;

use memtable::ValueRef;
use rocksfmt::KEY_TRAILER_BYTES;

use crate::mem::live::Live;
use crate::mem::recovered::{Recovered, RecoveredCursor};
use crate::mem::tombstones::TombstoneRuns;

pub(crate) mod live;
pub(crate) mod recovered;
pub(crate) mod tombstones;

/// A live or recovered memtable.
pub(crate) enum Mem {
    /// Writes found in the log, sorted once.
    Recovered(Recovered),
    /// A skip list with range tombstones beside it, which one core fills while all read.
    Live(Live),
}

/// The location of a value in its [`Mem`].
#[derive(Clone, Debug)]
pub(crate) enum MemValue {
    Recovered(Range<usize>),
    /// The value, and the range meant within it.
    Live(ValueRef, Range<usize>),
}

impl MemValue {
    /// A part of the value.
    pub fn part(&self, part: Range<usize>) -> MemValue {
        let within = |whole: &Range<usize>| whole.start + part.start..whole.start + part.end;
        match self {
            MemValue::Recovered(range) => MemValue::Recovered(within(range)),
            MemValue::Live(value, range) => MemValue::Live(*value, within(range)),
        }
    }
}

impl Mem {
    /// The newest entry of a user key visible at a sequence: packed sequence and type, and its
    /// value.
    #[inline]
    pub fn get(&self, user_key: &[u8], sequence: u64) -> Option<(u64, MemValue)> {
        match self {
            Mem::Recovered(mem) => mem
                .get(user_key, sequence)
                .map(|(packed, range)| (packed, MemValue::Recovered(range))),
            Mem::Live(mem) => mem.points.get(user_key, sequence).map(|entry| {
                let all = 0..entry.value().len();
                (entry.packed(), MemValue::Live(entry.value_ref(), all))
            }),
        }
    }

    /// The bytes of a value of this memtable.
    #[inline]
    pub fn value(&self, value: &MemValue) -> &[u8] {
        match (self, value) {
            (Mem::Recovered(mem), MemValue::Recovered(range)) => {
                mem.bytes().get(range.clone()).unwrap_or_default()
            }
            (Mem::Live(mem), MemValue::Live(value, range)) => {
                mem.points.value(*value).get(range.clone()).unwrap_or_default()
            }
            _ => unreachable!("a value is looked up in the memtable it was found in"),
        }
    }

    /// The largest sequence, at most `snapshot`, of a range tombstone that covers the user key; 0
    /// if there is none.
    #[inline]
    pub fn max_tombstone(&self, user_key: &[u8], snapshot: u64) -> u64 {
        match self {
            Mem::Recovered(mem) => mem.tombstones().max_sequence(user_key, snapshot),
            Mem::Live(mem) => mem.tombstones.max_sequence(user_key, snapshot),
        }
    }

    /// The range tombstones written so far, if there are any.
    pub fn tombstones(&self) -> Option<Arc<TombstoneRuns>> {
        match self {
            Mem::Recovered(mem) => Some(mem.tombstones().clone()).filter(|all| all.len() > 0),
            Mem::Live(mem) => mem.tombstones.all(),
        }
    }

    /// Entries, range tombstones not counted.
    pub fn len(&self) -> usize {
        match self {
            Mem::Recovered(mem) => mem.len(),
            Mem::Live(mem) => mem.points.len(),
        }
    }

    /// Bytes of memory held.
    pub fn memory(&self) -> usize {
        match self {
            Mem::Recovered(mem) => mem.memory(),
            Mem::Live(mem) => {
                mem.points.memory() + mem.tombstones.all().map_or(0, |all| all.memory())
            }
        }
    }
}

/// A position in a [`Mem`]. It borrows nothing; every call takes its memtable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemCursor {
    Recovered(RecoveredCursor),
    Live(memtable::Cursor),
}

/// Calls the corresponding method of either kind.
macro_rules! either {
    ($self:ident, $mem:ident, $recovered:ident / $live:ident $(, $key:ident)?) => {
        match ($self, $mem) {
            (MemCursor::Recovered(cursor), Mem::Recovered(mem)) => cursor.$recovered(mem $(, $key)?),
            (MemCursor::Live(cursor), Mem::Live(mem)) => {
                $(let ($key, packed) = split($key);)?
                cursor.$live(&mem.points $(, $key, packed)?)
            }
            _ => unreachable!("a cursor goes with the memtable it was made for"),
        }
    };
}

impl MemCursor {
    pub fn new(mem: &Mem) -> MemCursor {
        match mem {
            Mem::Recovered(_) => MemCursor::Recovered(RecoveredCursor::new()),
            Mem::Live(_) => MemCursor::Live(memtable::Cursor::new()),
        }
    }

    /// Whether it is on an entry.
    #[inline]
    pub fn valid(&self) -> bool {
        match self {
            MemCursor::Recovered(cursor) => cursor.valid(),
            MemCursor::Live(cursor) => cursor.valid(),
        }
    }

    /// Moves to the first entry.
    pub fn seek_to_first(&mut self, mem: &Mem) -> bool {
        either!(self, mem, seek_to_first / first)
    }

    /// Moves to the last entry.
    pub fn seek_to_last(&mut self, mem: &Mem) -> bool {
        either!(self, mem, seek_to_last / last)
    }

    /// Moves to the first entry at or after an internal key.
    pub fn seek(&mut self, mem: &Mem, key: &[u8]) -> bool {
        either!(self, mem, seek / seek, key)
    }

    /// Moves to the last entry at or before an internal key.
    pub fn seek_for_prev(&mut self, mem: &Mem, key: &[u8]) -> bool {
        either!(self, mem, seek_for_prev / seek_for_prev, key)
    }

    /// Moves to the next entry; at the end, returns false and is nowhere.
    #[inline]
    pub fn next(&mut self, mem: &Mem) -> bool {
        either!(self, mem, next / next)
    }

    /// Moves to the previous entry; at the start, returns false and is nowhere.
    #[inline]
    pub fn prev(&mut self, mem: &Mem) -> bool {
        either!(self, mem, prev / prev)
    }

    /// The current internal key; empty when nowhere.
    #[inline]
    pub fn key<'a>(&self, mem: &'a Mem) -> &'a [u8] {
        either!(self, mem, key / internal_key)
    }

    /// The current value.
    pub fn value(&self, mem: &Mem) -> Option<MemValue> {
        match (self, mem) {
            (MemCursor::Recovered(cursor), Mem::Recovered(mem)) => {
                Some(MemValue::Recovered(cursor.value_range(mem)))
            }
            (MemCursor::Live(cursor), Mem::Live(mem)) => {
                let all = 0..cursor.value(&mem.points).len();
                cursor.value_ref(&mem.points).map(|value| MemValue::Live(value, all))
            }
            _ => unreachable!("a cursor goes with the memtable it was made for"),
        }
    }
}

/// User key and trailer of an internal key.
pub(crate) fn split(key: &[u8]) -> (&[u8], u64) {
    let at = key.len().saturating_sub(KEY_TRAILER_BYTES);
    let (user, trailer) = key.split_at(at);
    (user, trailer.try_into().map_or(0, u64::from_le_bytes))
}
