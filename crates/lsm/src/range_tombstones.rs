//! The range tombstones of files as compactions need them: clipped to atomic units.
//! [`rocksfmt::RangeDelAggregator`] cuts them into fragments.

use std::borrow::Cow;
use std::sync::Arc;

use rocksfmt::{Comparator, SENTINEL_PACKED, clip};

use crate::error::{Error, Result};
use crate::mem::split;
use crate::version::{Family, Level, Version, user_key};

/// A range of user keys with an exclusive end, and the sequence of its deletion.
pub(crate) type Tombstone<'a> = (&'a [u8], Cow<'a, [u8]>, u64);

/// A table's range tombstones, clipped to its atomic unit: the adjacent tables of its level that
/// share user keys at their borders. A compaction has the whole unit among its inputs.
///
/// An item is an error if the clipped range cannot be represented in this order of keys.
pub(crate) fn clipped<'a>(
    version: &'a Version,
    family: &'a Family,
    slot: u32,
) -> impl Iterator<Item = Result<Tombstone<'a>>> {
    let unit = || atomic_unit(version, family.comparator, &family.levels, slot);
    let some = version.tombstones(slot).map(|tombstones| (tombstones, unit()));
    some.into_iter().flat_map(move |(tombstones, (smallest, largest))| {
        tombstones.iter().filter_map(move |(start, end, sequence)| {
            match clip(family.comparator, (start, end), smallest, largest) {
                Ok(clipped) => clipped.map(|(start, end)| Ok((start, end, sequence))),
                Err(e) => {
                    let place = format_args!("{:06}.sst", version.meta(slot).number);
                    Some(Err(Error::format(place, &e)))
                }
            }
        })
    })
}

/// The smallest and the largest internal key of a table's atomic unit.
fn atomic_unit<'a>(
    version: &'a Version,
    order: Comparator,
    levels: &[Arc<Level>],
    slot: u32,
) -> (&'a [u8], &'a [u8]) {
    let meta = version.meta(slot);
    let (mut smallest, mut largest) = (&meta.smallest[..], &meta.largest[..]);
    // Tables of level 0 are units of their own.
    for level in levels.iter().skip(1) {
        let at = level.find(order, &meta.smallest);
        // Two tables that share a key may both end at or after the smallest key of one of them.
        let Some(at) = (at..level.slots.len()).take(2).find(|&at| level.slots[at] == slot) else {
            continue;
        };
        for &before in level.slots[..at].iter().rev() {
            let before = version.meta(before);
            if !share_a_key(order, &before.largest, smallest) {
                break;
            }
            smallest = &before.smallest;
        }
        for &after in &level.slots[at + 1..] {
            let after = version.meta(after);
            if !share_a_key(order, largest, &after.smallest) {
                break;
            }
            largest = &after.largest;
        }
        break;
    }
    (smallest, largest)
}

/// Whether a table that ends with `largest` shares a user key with the next one.
fn share_a_key(comparator: Comparator, largest: &[u8], smallest: &[u8]) -> bool {
    let (user, packed) = split(largest);
    packed != SENTINEL_PACKED && comparator.cmp_user(user, user_key(smallest)).is_eq()
}

#[cfg(test)]
mod tests {
    use rocksfmt::testing::file_meta;
    use rocksfmt::{FileMeta, pack, put_internal_key};

    use super::*;
    use crate::error::Kind;
    use crate::family_list::FamilyList;
    use crate::version::Slot;

    const PUT: u8 = rocksfmt::ValueType::Value as u8;

    fn internal(user: &str, packed: u64) -> Vec<u8> {
        let mut key = Vec::new();
        put_internal_key(&mut key, user.as_bytes(), packed);
        key
    }

    /// A version with these tables in level 1, each from and to a user key and packed number.
    fn version(tables: &[(&str, u64, &str, u64)]) -> (Version, Vec<Arc<Level>>) {
        let slots: Vec<Slot> = tables
            .iter()
            .map(|&(first, low, last, high)| {
                let (smallest, largest) = (internal(first, low), internal(last, high));
                let meta = FileMeta { smallest, largest, ..file_meta(7, b"", b"", (0, 0)) };
                Slot::Broken {
                    meta: Box::new(meta),
                    error: Error::new(Kind::Corruption, "not opened"),
                }
            })
            .collect();
        let slots = crate::slots::Slots::from(slots);
        let level = Level::of((0..tables.len() as u32).collect(), &slots);
        let version = Version { families: FamilyList::default(), slots, epoch: 0 };
        (version, vec![Arc::default(), level])
    }

    #[test]
    fn tables_that_share_a_key_are_one_unit() {
        let put = |sequence| pack(sequence, PUT);
        let (version, levels) = version(&[
            ("a", put(9), "c", SENTINEL_PACKED),
            ("c", put(9), "k", put(66)),
            ("k", put(64), "k", put(44)),
            ("k", put(43), "m", put(1)),
            ("n", put(1), "z", put(1)),
        ]);
        let bounds = |slot| {
            let (smallest, largest) = atomic_unit(&version, Comparator::Bytewise, &levels, slot);
            (user_key(smallest), user_key(largest))
        };
        assert_eq!(bounds(0), (&b"a"[..], &b"c"[..]));
        for slot in [1, 2, 3] {
            assert_eq!(bounds(slot), (&b"c"[..], &b"m"[..]), "table {slot}");
        }
        assert_eq!(bounds(4), (&b"n"[..], &b"z"[..]));
    }
}
