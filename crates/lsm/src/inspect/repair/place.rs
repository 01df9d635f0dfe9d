//! Where the tables of a rebuilt MANIFEST go.
//!
//! Nothing says in which levels they were. A reader takes the version of a key that it finds first,
//! so of two tables that share keys the newer one must be above the other; their sequences say
//! which one that is, unless the two ranges overlap. Then both must be merged.

use rocksfmt::{Comparator, FileMeta};

/// The levels of tables that share no sequences where they share keys: each table is as deep as
/// older ones allow. `None` if they must be merged.
pub(super) fn place(
    order: Comparator,
    mut tables: Vec<FileMeta>,
    levels: usize,
) -> Option<Vec<Vec<FileMeta>>> {
    let mut placed = vec![Vec::new(); levels];
    tables.sort_by_key(|meta| (meta.largest_sequence, meta.smallest_sequence, meta.number));
    let mut top = Skyline::of(order, &tables);
    let mut above: Vec<usize> = Vec::with_capacity(tables.len());
    for newer in &tables {
        let older = top.over(newer);
        if older.some && older.sequence >= newer.smallest_sequence {
            return None;
        }
        let height = if older.some { older.height + 1 } else { 0 };
        top.put(newer, Top { some: true, height, sequence: newer.largest_sequence });
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

/// The newest tables over a range of keys.
#[derive(Clone, Copy, Default)]
struct Top {
    /// There is a table.
    some: bool,
    /// The largest number of tables above each other.
    height: usize,
    /// The largest sequence.
    sequence: u64,
}

impl Top {
    fn join(self, other: Top) -> Top {
        Top {
            some: self.some || other.some,
            height: self.height.max(other.height),
            sequence: self.sequence.max(other.sequence),
        }
    }
}

/// What lies over each range of keys, as a tree over all bounds of the tables: looking at a table's
/// range, or putting one there, takes as many steps as the tree has levels.
struct Skyline<'a> {
    order: Comparator,
    /// The bounds, ascending.
    keys: Vec<&'a [u8]>,
    /// Node 1 is the root; the children of `n` are `2n` and `2n + 1`. The joined tops of
    /// everything in the node's range.
    inside: Vec<Top>,
    /// The joined tops of tables that span the node's whole range, but not that of its parent.
    across: Vec<Top>,
    leaves: usize,
}

impl<'a> Skyline<'a> {
    fn of(order: Comparator, tables: &'a [FileMeta]) -> Skyline<'a> {
        let bounds = |meta: &'a FileMeta| [meta.smallest_user_key(), meta.largest_user_key()];
        let mut keys: Vec<&[u8]> = tables.iter().flat_map(bounds).collect();
        keys.sort_by(|a, b| order.cmp_user(a, b));
        keys.dedup();
        let leaves = keys.len().next_power_of_two();
        let none = vec![Top::default(); 2 * leaves];
        Skyline { order, keys, inside: none.clone(), across: none, leaves }
    }

    /// The first and the last bound of a table, by index.
    fn span(&self, meta: &FileMeta) -> (usize, usize) {
        let at = |key: &[u8]| self.keys.partition_point(|k| self.order.cmp_user(k, key).is_lt());
        (at(meta.smallest_user_key()), at(meta.largest_user_key()))
    }

    /// What lies over the range of a table.
    fn over(&self, meta: &FileMeta) -> Top {
        let mut found = Top::default();
        self.visit(1, (0, self.leaves - 1), self.span(meta), &mut |node, whole| {
            found = found.join(if whole { self.inside[node] } else { self.across[node] });
        });
        found
    }

    /// Puts a table over its range.
    fn put(&mut self, meta: &FileMeta, top: Top) {
        let mut touched = Vec::new();
        self.visit(1, (0, self.leaves - 1), self.span(meta), &mut |node, whole| {
            touched.push((node, whole));
        });
        for (node, whole) in touched {
            self.inside[node] = self.inside[node].join(top);
            if whole {
                self.across[node] = self.across[node].join(top);
            }
        }
    }

    /// Calls `f` with the nodes that make up a span, and with `false` with those above them.
    fn visit(
        &self,
        node: usize,
        (low, high): (usize, usize),
        span: (usize, usize),
        f: &mut impl FnMut(usize, bool),
    ) {
        if high < span.0 || span.1 < low {
            return;
        }
        let whole = span.0 <= low && high <= span.1;
        f(node, whole);
        if !whole {
            let middle = low + (high - low) / 2;
            self.visit(2 * node, (low, middle), span, f);
            self.visit(2 * node + 1, (middle + 1, high), span, f);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
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

    proptest! {
        /// Each table is directly above the highest of the older tables that share keys with it.
        #[test]
        fn heights_are_those_of_a_comparison_of_all_pairs(
            tables in proptest::collection::vec((0u8..20, 0u8..6), 1..30),
        ) {
            let keys: Vec<[[u8; 1]; 2]> =
                tables.iter().map(|&(first, len)| [[first], [first + len]]).collect();
            let described: Vec<Described<'_>> = (1u64..)
                .zip(&keys)
                .map(|(at, [first, last])| (&first[..], &last[..], (10 * at, 10 * at + 5)))
                .collect();
            let mut heights: Vec<usize> = Vec::new();
            for (at, newer) in keys.iter().enumerate() {
                let meets = |older: &[[u8; 1]; 2]| older[0] <= newer[1] && newer[0] <= older[1];
                let below = keys[..at].iter().zip(&heights).filter(|(older, _)| meets(older));
                heights.push(below.map(|(_, height)| height + 1).max().unwrap_or(0));
            }
            let levels = placed(&described, 40).unwrap();
            for (at, &height) in heights.iter().enumerate() {
                prop_assert!(levels[39 - height].contains(&(at as u64)));
            }
        }
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
