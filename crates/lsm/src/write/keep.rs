//! Which versions of a key a flush or a merge keeps. Pure; both ask it version by version.
//!
//! Versions come newest first. A version that is newer than the oldest snapshot is always kept. Of
//! the versions that every reader sees, one is dropped if
//!
//! - a range tombstone that every reader sees covers it,
//! - a newer version that every reader sees hides it, or
//! - it is a tombstone and no older version exists outside of the inputs; the older versions in the
//!   inputs are dropped with it.
//!
//! A SingleDelete neither hides nor is hidden: RocksDB drops it together with the one version below
//! it. Without the SingleDelete, that version would become visible again when a later SingleDelete
//! has removed the newer one. Without that version, the SingleDelete would remove another one, or
//! meet a Delete, which RocksDB treats as corruption. So both are kept until nothing lies below.

use rocksfmt::ValueType;

use crate::mutant::mutant;

/// The newer versions of a key so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Met {
    /// Nothing that hides older versions.
    Nothing,
    /// The last one was a SingleDelete.
    SingleDelete,
    /// A version that hides older ones.
    Newer,
    /// A tombstone with nothing below: all older versions are dropped.
    End,
}

/// Decides for the versions of one key after another.
pub(crate) struct Keep {
    oldest: u64,
    covered: u64,
    nothing_below: bool,
    met: Met,
}

impl Keep {
    /// No reader reads at an earlier sequence than `oldest`.
    pub fn new(oldest: u64) -> Keep {
        Keep { oldest, covered: 0, nothing_below: false, met: Met::Nothing }
    }

    /// Begins a key. `covered` is the newest sequence at which a range tombstone that every reader
    /// sees covers it. With `nothing_below`, all versions that exist are in the inputs.
    pub fn begin_key(&mut self, covered: u64, nothing_below: bool) {
        (self.covered, self.nothing_below, self.met) = (covered, nothing_below, Met::Nothing);
    }

    /// Whether the next older version of the key is kept.
    pub fn stays(&mut self, sequence: u64, kind: u8) -> bool {
        if self.met == Met::End || sequence < self.covered {
            return false;
        }
        let kind = ValueType::from_byte(kind);
        if sequence > self.oldest {
            let single = kind == Some(ValueType::SingleDeletion);
            self.met = if single { Met::SingleDelete } else { Met::Nothing };
            return true;
        }
        let Some(kind) = kind else { return self.met != Met::Newer };
        if kind.is_tombstone() && self.nothing_below {
            self.met = Met::End;
            return false;
        }
        if kind == ValueType::SingleDeletion {
            if mutant("single_deletes_are_hidden") && self.met == Met::Newer {
                return false;
            }
            self.met = Met::SingleDelete;
            return true;
        }
        let stays = self.met != Met::Newer;
        self.met = match (self.met, kind) {
            (Met::SingleDelete, ValueType::Deletion | ValueType::DeletionWithTimestamp) => {
                Met::Newer
            }
            // The SingleDelete is for this one.
            (Met::SingleDelete, _) => Met::Nothing,
            // A merge operand needs the versions below it.
            (met, ValueType::Merge) => met,
            _ => Met::Newer,
        };
        stays
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PUT: u8 = ValueType::Value as u8;
    const DELETE: u8 = ValueType::Deletion as u8;
    const SINGLE: u8 = ValueType::SingleDeletion as u8;
    const MERGE: u8 = ValueType::Merge as u8;

    /// Sequence and type, newest first.
    type Versions = Vec<(u64, u8)>;

    /// The operands and the value that a reader finds.
    fn read(versions: &[(u64, u8)], at: u64) -> Versions {
        let mut found = Versions::new();
        for &(sequence, kind) in versions.iter().filter(|version| version.0 <= at) {
            match kind {
                MERGE => found.push((sequence, kind)),
                PUT => {
                    found.push((sequence, kind));
                    break;
                }
                _ => break,
            }
        }
        found
    }

    fn kept(inputs: &[(u64, u8)], oldest: u64, nothing_below: bool) -> Versions {
        let mut keep = Keep::new(oldest);
        keep.begin_key(0, nothing_below);
        inputs.iter().copied().filter(|&(sequence, kind)| keep.stays(sequence, kind)).collect()
    }

    /// The versions that a full compaction by RocksDB keeps, without a snapshot.
    fn compacted_by_rocksdb(versions: &[(u64, u8)]) -> Result<Versions, &'static str> {
        let mut left = Versions::new();
        let mut at = 0;
        let mut hidden = false;
        while let Some(&(sequence, kind)) = versions.get(at) {
            at += 1;
            match (kind, versions.get(at)) {
                (SINGLE, None | Some((_, SINGLE))) => {}
                (SINGLE, Some((_, DELETE))) => return Err("a SingleDelete meets a Delete"),
                (SINGLE, Some(_)) => at += 1,
                _ => {
                    if !hidden && kind != DELETE {
                        left.push((sequence, kind));
                    }
                    hidden |= kind != MERGE;
                }
            }
        }
        Ok(left)
    }

    fn sequences(kinds: &[u8]) -> Versions {
        let newest_first = (1..=kinds.len() as u64).zip(kinds.iter().copied());
        let mut versions: Versions = newest_first.collect();
        versions.reverse();
        versions
    }

    proptest! {
        /// Every reader finds the same before and after, whatever versions lie below.
        #[test]
        fn readers_find_the_same(
            kinds in prop::collection::vec(prop::sample::select(vec![PUT, DELETE, SINGLE, MERGE]), 0..12),
            split in 0..12usize,
            oldest in 0..14u64,
            nothing_below: bool,
        ) {
            let all = sequences(&kinds);
            let split = if nothing_below { all.len() } else { split.min(all.len()) };
            let (inputs, below) = all.split_at(split);
            let mut after = kept(inputs, oldest, nothing_below);
            after.extend(below);
            for at in oldest..=all.len() as u64 {
                prop_assert_eq!(read(&all, at), read(&after, at), "at {}: {:?}", at, &after);
            }
        }

        /// A key is written once between two of its SingleDeletes. RocksDB finds the same after our
        /// flush or merge of any stretch of its history, and after any later history.
        #[test]
        fn rocksdb_finds_the_same_where_single_deletes_are_legal(
            pairs in prop::collection::vec(any::<bool>(), 1..8),
            ends_with_put: bool,
            oldest in 0..20u64,
            from in 0..16usize,
            to in 0..16usize,
        ) {
            let mut kinds = Vec::new();
            for twice in pairs {
                kinds.extend([PUT, SINGLE]);
                // A SingleDelete of a missing key is allowed.
                kinds.extend(twice.then_some(SINGLE));
            }
            kinds.extend(ends_with_put.then_some(PUT));
            let all = sequences(&kinds);
            let (from, to) = (from.min(all.len()), to.min(all.len()));
            let (from, to) = (from.min(to), from.max(to));
            let mut after = all[..from].to_vec();
            after.extend(kept(&all[from..to], oldest, to == all.len()));
            after.extend(&all[to..]);
            prop_assert_eq!(compacted_by_rocksdb(&after), compacted_by_rocksdb(&all), "{:?}", after);
        }

        /// Our Deletes are mixed with Puts and SingleDeletes of a program that uses RocksDB.
        #[test]
        fn our_deletes_mix_with_single_deletes(
            lives in prop::collection::vec(any::<bool>(), 1..8),
            oldest in 0..20u64,
            split in 0..16usize,
        ) {
            let kinds: Vec<u8> =
                lives.iter().flat_map(|&ours| [PUT, if ours { DELETE } else { SINGLE }]).collect();
            let all = sequences(&kinds);
            let split = split.min(all.len());
            let mut after = kept(&all[..split], oldest, split == all.len());
            after.extend(&all[split..]);
            prop_assert_eq!(compacted_by_rocksdb(&after), Ok(Versions::new()), "{:?}", after);
        }
    }

    #[test]
    fn a_single_delete_under_a_newer_put_stays_with_its_put() {
        let inputs = [(5, PUT), (4, SINGLE), (3, PUT), (2, PUT)];
        assert_eq!(kept(&inputs[..2], 9, false), inputs[..2]);
        assert_eq!(kept(&inputs, 9, false), inputs);
        assert_eq!(kept(&inputs, 9, true), inputs[..1]);
        assert_eq!(kept(&inputs, 4, false), inputs);
    }

    #[test]
    fn a_delete_is_dropped_under_a_newer_version_and_if_nothing_is_below() {
        let inputs = [(5, PUT), (4, DELETE), (3, PUT)];
        assert_eq!(kept(&inputs, 9, false), inputs[..1]);
        assert_eq!(kept(&inputs[1..], 9, false), [(4, DELETE)]);
        assert_eq!(kept(&inputs[1..], 9, true), []);
        assert_eq!(kept(&inputs[1..], 3, true), inputs[1..], "a snapshot sees the put");
    }

    #[test]
    fn versions_that_a_range_tombstone_covers_are_dropped() {
        let mut keep = Keep::new(9);
        keep.begin_key(4, false);
        let versions = [(5, PUT), (4, PUT), (3, SINGLE), (2, PUT)];
        let stay: Vec<bool> = versions.iter().map(|v| keep.stays(v.0, v.1)).collect();
        assert_eq!(stay, [true, false, false, false]);
    }
}
