//! Where the tables of a rebuilt MANIFEST go.
//!
//! Nothing says in which levels they were. A reader takes the version of a key that it finds first,
//! so of two tables that share keys the newer one must be above the other; their sequences say
//! which one that is, unless the two ranges overlap. Then both must be merged.

use rocksfmt::{Comparator, FileMeta};

/// The levels of tables that share no sequences where they share keys: each table is as deep as
/// older ones allow. `None` if they must be merged.
///
/// Compares all pairs of tables.
pub(super) fn place(
    order: Comparator,
    mut tables: Vec<FileMeta>,
    levels: usize,
) -> Option<Vec<Vec<FileMeta>>> {
    let mut placed = vec![Vec::new(); levels];
    tables.sort_by_key(|meta| (meta.largest_sequence, meta.smallest_sequence, meta.number));
    let mut above: Vec<usize> = Vec::with_capacity(tables.len());
    for (at, newer) in tables.iter().enumerate() {
        let mut height = 0;
        for (older, &its) in tables[..at].iter().zip(&above) {
            let apart = order.cmp_user(older.largest_user_key(), newer.smallest_user_key()).is_lt()
                || order.cmp_user(newer.largest_user_key(), older.smallest_user_key()).is_lt();
            if apart {
                continue;
            }
            if older.largest_sequence >= newer.smallest_sequence {
                return None;
            }
            height = height.max(its + 1);
        }
        above.push(height);
    }
    for (meta, height) in tables.into_iter().zip(above) {
        placed[(levels - 1).saturating_sub(height)].push(meta);
    }
    // RocksDB orders level 0 by sequences, whatever the keys.
    placed[0].reverse();
    let ordered = |pair: &[FileMeta]| pair[0].smallest_sequence > pair[1].largest_sequence;
    if !placed[0].windows(2).all(ordered) {
        return None;
    }
    for level in placed.iter_mut().skip(1) {
        level.sort_by(|a, b| order.cmp_internal(&a.smallest, &b.smallest));
    }
    while placed.len() > 1 && placed.last().is_some_and(Vec::is_empty) {
        placed.pop();
    }
    Some(placed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocksfmt::testing::file_meta;

    /// The first key, the last key and the sequences of a table.
    type Described<'a> = (&'a [u8], &'a [u8], (u64, u64));

    /// The numbers of each level's tables.
    fn placed(tables: &[Described<'_>], levels: usize) -> Option<Vec<Vec<u64>>> {
        let metas = tables.iter().enumerate().map(|(at, &(first, last, sequences))| FileMeta {
            smallest_sequence: sequences.0,
            largest_sequence: sequences.1,
            ..file_meta(at as u64, first, last, (1, 1))
        });
        let placed = place(Comparator::Bytewise, metas.collect(), levels)?;
        Some(placed.iter().map(|level| level.iter().map(|meta| meta.number).collect()).collect())
    }

    #[test]
    fn newer_tables_are_above_older_ones_that_share_keys() {
        let tables: [Described<'_>; 4] = [
            (b"a", b"c", (0, 50)),
            (b"d", b"f", (0, 60)),
            (b"b", b"e", (61, 70)),
            (b"x", b"z", (65, 80)),
        ];
        assert_eq!(placed(&tables, 3).unwrap(), [vec![], vec![2], vec![0, 1, 3]]);
    }

    #[test]
    fn what_has_no_room_below_is_in_level_0_in_order() {
        let tables: [Described<'_>; 4] = [
            (b"a", b"z", (1, 10)),
            (b"a", b"z", (11, 20)),
            (b"a", b"z", (21, 30)),
            (b"a", b"z", (31, 40)),
        ];
        assert_eq!(placed(&tables, 3).unwrap(), [vec![3, 2], vec![1], vec![0]]);
    }

    #[test]
    fn tables_that_share_keys_and_sequences_are_merged() {
        let both: [Described<'_>; 2] = [(b"a", b"m", (1, 10)), (b"m", b"z", (5, 20))];
        assert_eq!(placed(&both, 7), None);
        // Level 0 must have an order for RocksDB 7.8, also of tables without common keys.
        let wide: [Described<'_>; 4] = [
            (b"a", b"b", (1, 2)),
            (b"a", b"b", (3, 9)),
            (b"y", b"z", (1, 2)),
            (b"y", b"z", (5, 8)),
        ];
        assert_eq!(placed(&wide, 1), None);
        assert!(placed(&wide, 2).is_none());
        assert!(placed(&wide, 3).is_some());
    }
}
