//! Finds the first entry at or after a key in a block, without building whole keys.
//!
//! 1. Binary search over the restart points, whose keys are stored whole.
//! 2. A scan of one restart interval. It keeps the number `m` of leading bytes that the previous
//!    entry shares with the target's user key (that entry sorts before the target). If the next
//!    entry shares more than `m` bytes with the previous one, it has the same smaller byte at `m`
//!    and also sorts before the target: it is skipped without a comparison. If it shares at most
//!    `m`, its first `shared` bytes equal the target's, so comparing the suffix with the rest of
//!    the target is enough. `m` and this comparison give the next `m`.
//!
//! The scan needs the whole trailer (sequence and type) in the suffix. This fails if versions of
//! one user key share trailer bytes; then the interval is walked again and whole keys are built in
//! `scratch`.
//!
//! Hot: this and `key.rs` are the inner loops of every point read. No allocation, no calls that do
//! not inline.

use std::cmp::Ordering;

use crate::block::layout::{Entries, Entry};
use crate::key::{Comparator, compare_with_prefix, split_lenient};

/// The result of a search.
pub(crate) enum Hit<V> {
    /// The first entry that is not less than the target.
    Entry(Found<V>),
    /// All entries are less.
    PastEnd,
}

/// The entry at which a search ended.
pub(crate) struct Found<V> {
    pub entry: Entry<V>,
    /// Its offset.
    pub at: usize,
    /// Its restart interval.
    pub restart: u32,
    /// Sequence and type; 0 in blocks of user keys.
    pub packed: u64,
    pub equal_user_key: bool,
    /// Whether the key is in the scratch buffer. Otherwise it is the first `entry.shared` bytes of
    /// the target followed by the entry's suffix.
    pub key_in_scratch: bool,
}

/// Compares two keys of the kind that this block format holds.
#[inline(always)]
pub(crate) fn compare<F: Entries>(
    format: F,
    comparator: Comparator,
    a: &[u8],
    b: &[u8],
) -> Ordering {
    if format.trailer_bytes() == 0 {
        comparator.cmp_user(a, b)
    } else {
        comparator.cmp_internal(a, b)
    }
}

/// The number of restart points whose key is less than `target`; the caller knows that it is in
/// `low..=high`. `None` if the block is corrupt.
#[inline(always)]
pub(crate) fn restarts_less<F: Entries>(
    data: &[u8],
    entries: &[u8],
    format: F,
    comparator: Comparator,
    target: &[u8],
    mut low: u32,
    high: u32,
) -> Option<u32> {
    let mut high = high.min(format.layout().restart_count());
    while low < high {
        let middle = low + (high - low) / 2;
        let key = format.restart_key(entries, format.layout().restart(data, middle)?)?;
        if compare(format, comparator, key, target).is_lt() {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    Some(low)
}

/// Finds the first entry not less than `target` (an internal key, or a user key if the block holds
/// user keys). `None` if the block is corrupt.
#[inline(always)]
pub(crate) fn first_not_less<F: Entries>(
    data: &[u8],
    format: F,
    comparator: Comparator,
    target: &[u8],
    scratch: &mut Vec<u8>,
) -> Option<Hit<F::Value>> {
    let entries = format.layout().entries(data)?;
    if entries.is_empty() {
        return Some(Hit::PastEnd);
    }
    let less = restarts_less(data, entries, format, comparator, target, 0, u32::MAX)?;
    first_not_less_after(data, entries, format, comparator, target, scratch, less)
}

/// The second half of [`first_not_less`]: `less` restart points have keys less than the target.
#[inline(always)]
pub(crate) fn first_not_less_after<F: Entries>(
    data: &[u8],
    entries: &[u8],
    format: F,
    comparator: Comparator,
    target: &[u8],
    scratch: &mut Vec<u8>,
    less: u32,
) -> Option<Hit<F::Value>> {
    let layout = format.layout();
    // The key at restart `less`, if there is one, is not less; entries before restart `less - 1`
    // are less.
    let limit = layout.restart(data, less).unwrap_or(entries.len());
    if less > 0 {
        let start = layout.restart(data, less - 1)?;
        match scan(entries, format, comparator, target, start, limit) {
            Scan::Hit(found) => {
                return Some(Hit::Entry(Found { restart: less - 1, ..found }));
            }
            Scan::End => {}
            Scan::Corrupt => return None,
            Scan::SharedTrailer => {
                let found =
                    scan_whole_keys(entries, format, comparator, target, start, limit, scratch)?;
                if let Some(found) = found {
                    return Some(Hit::Entry(Found { restart: less - 1, ..found }));
                }
            }
        }
    }
    if limit == entries.len() {
        return Some(Hit::PastEnd);
    }
    let entry = format.entry(entries, limit, true, &F::Value::default())?;
    if entry.shared != 0 {
        return None;
    }
    let (user, packed) = split(format, entries.get(entry.suffix..entry.suffix_end)?);
    let equal_user_key = user == split(format, target).0;
    Some(Hit::Entry(Found {
        entry,
        at: limit,
        restart: less,
        packed,
        equal_user_key,
        key_in_scratch: false,
    }))
}

enum Scan<V> {
    Hit(Found<V>),
    /// Every entry up to the limit is less.
    End,
    /// A trailer is not entirely in its suffix; this scan cannot continue.
    SharedTrailer,
    Corrupt,
}

/// Scans the restart interval `start..limit`, whose first entry is less than the target.
#[inline(always)]
fn scan<F: Entries>(
    entries: &[u8],
    format: F,
    comparator: Comparator,
    target: &[u8],
    start: usize,
    limit: usize,
) -> Scan<F::Value> {
    let trailer = format.trailer_bytes();
    let (target_user, target_packed) = split(format, target);
    let Some(first) = format.entry(entries, start, true, &F::Value::default()) else {
        return Scan::Corrupt;
    };
    if first.next >= limit {
        // The usual case in an index: one entry per restart point.
        return if first.next == limit { Scan::End } else { Scan::Corrupt };
    }
    if first.shared != 0 {
        return Scan::Corrupt;
    }
    let mut key_len = first.suffix_end - first.suffix;
    let Some(user_len) = key_len.checked_sub(trailer) else { return Scan::Corrupt };
    let user = &entries[first.suffix..first.suffix + user_len];
    let mut matched = compare_with_prefix(user, target_user).1;
    let mut value = first.value;
    let mut at = first.next;
    while at < limit {
        let Some(entry) = format.entry(entries, at, false, &value) else { return Scan::Corrupt };
        let suffix_len = entry.suffix_end - entry.suffix;
        let shared = entry.shared;
        if shared > key_len {
            return Scan::Corrupt;
        }
        if suffix_len < trailer
            || (shared > matched && matched + trailer >= key_len) && trailer != 0
        {
            return Scan::SharedTrailer;
        }
        if shared <= matched {
            let suffix = &entries[entry.suffix..entry.suffix_end];
            let (rest, packed) = split(format, suffix);
            let (order, common) = compare_with_prefix(rest, &target_user[shared..]);
            let order = match comparator {
                Comparator::Bytewise => order,
                Comparator::ReverseBytewise => order.reverse(),
            };
            if order.is_gt() || (order.is_eq() && packed <= target_packed) {
                let equal_user_key = order.is_eq();
                let key_in_scratch = false;
                return Scan::Hit(Found {
                    entry,
                    at,
                    restart: 0,
                    packed,
                    equal_user_key,
                    key_in_scratch,
                });
            }
            matched = shared + common;
        }
        key_len = shared + suffix_len;
        value = entry.value;
        at = entry.next;
    }
    if at == limit { Scan::End } else { Scan::Corrupt }
}

/// The same scan with whole keys. `None` if the block is corrupt; `Some(None)` if every entry is
/// less.
#[cold]
#[inline(never)]
fn scan_whole_keys<F: Entries>(
    entries: &[u8],
    format: F,
    comparator: Comparator,
    target: &[u8],
    start: usize,
    limit: usize,
    key: &mut Vec<u8>,
) -> Option<Option<Found<F::Value>>> {
    let target_user = split(format, target).0;
    key.clear();
    let mut value = F::Value::default();
    let mut at = start;
    while at < limit {
        let entry = format.entry(entries, at, at == start, &value)?;
        if entry.shared > key.len() {
            return None;
        }
        key.truncate(entry.shared);
        key.extend_from_slice(entries.get(entry.suffix..entry.suffix_end)?);
        if compare(format, comparator, key, target).is_ge() {
            let (user, packed) = split(format, key);
            let equal_user_key = user == target_user;
            let key_in_scratch = true;
            return Some(Some(Found {
                entry,
                at,
                restart: 0,
                packed,
                equal_user_key,
                key_in_scratch,
            }));
        }
        value = entry.value;
        at = entry.next;
    }
    (at == limit).then_some(None)
}

#[inline(always)]
fn split<F: Entries>(format: F, key: &[u8]) -> (&[u8], u64) {
    if format.trailer_bytes() == 0 { (key, 0) } else { split_lenient(key) }
}
