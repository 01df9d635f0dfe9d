//! Splitting a large merge of level 0 into ranges of keys, which several cores merge at the same
//! time (RocksDB's subcompactions).

use rocksfmt::IndexCursor;

use crate::table::Table;
use crate::version::{Family, Version, user_key};
use crate::write::picker::{KeyRange, Plan};

/// A range has at least this many bytes of inputs.
const RANGE_BYTES_MIN: u64 = 32 << 20;
/// Keys that are taken from one table as possible borders, about.
const ANCHORS: u64 = 64;

/// Ranges of about the same number of bytes, at most `most`, in order and without gaps. One range
/// without bounds if it is not worth it. Only merges of level 0 are split: other jobs are small and
/// run beside each other. Keys that stay in level 0 must become one table, so such a merge is not
/// split either.
pub(crate) fn split(version: &Version, family: u32, plan: &Plan, most: usize) -> Vec<KeyRange> {
    let whole = || vec![KeyRange { from: None, to: None }];
    let bytes: u64 = plan.files().map(|(_, slot)| version.meta(slot).size_bytes).sum();
    let count = (bytes / RANGE_BYTES_MIN).min(most as u64);
    if plan.start != 0 || plan.moves || !plan.stays.is_empty() || count < 2 {
        return whole();
    }
    let Some(family) = version.families.find(family) else { return whole() };
    let mut anchors = anchors(version, plan);
    anchors.sort_by(|a, b| family.comparator.cmp_user(&a.0, &b.0));
    let all: u64 = anchors.iter().map(|anchor| anchor.1).sum();
    let mut ranges = Vec::new();
    let (mut from, mut seen) = (None, 0);
    for (key, bytes) in anchors {
        let wanted = all * (ranges.len() as u64 + 1) / count;
        seen += bytes;
        if seen >= wanted && ranges.len() as u64 + 1 < count && is_after(family, &from, &key) {
            ranges.push(KeyRange { from: from.replace(key.clone()), to: Some(key) });
        }
    }
    ranges.push(KeyRange { from, to: None });
    ranges
}

fn is_after(family: &Family, from: &Option<Vec<u8>>, key: &[u8]) -> bool {
    from.as_ref().is_none_or(|from| family.comparator.cmp_user(key, from).is_gt())
}

/// User keys of the inputs, each with the bytes from the one before, about.
fn anchors(version: &Version, plan: &Plan) -> Vec<(Vec<u8>, u64)> {
    let mut anchors = Vec::new();
    for (_, slot) in plan.files() {
        let meta = version.meta(slot);
        let some = version.table(slot).map(of_table);
        match some {
            Ok(keys) if !keys.is_empty() => {
                let each = meta.size_bytes / keys.len() as u64;
                anchors.extend(keys.into_iter().map(|key| (key, each)));
            }
            _ => anchors.push((user_key(&meta.largest).to_vec(), meta.size_bytes)),
        }
    }
    anchors
}

/// Some of the separators of a table's index, as user keys. None if the index cannot be read.
fn of_table(table: &Table) -> Vec<Vec<u8>> {
    let (data, layout) = (&table.index.data, &table.index.layout);
    let blocks = u64::from(layout.restart_count()).max(1);
    let step = (blocks / ANCHORS).max(1);
    let user_keys = layout.format().user_keys;
    let mut keys = Vec::new();
    let mut cursor = IndexCursor::new();
    let mut more = cursor.seek_to_first(data, layout).unwrap_or(false);
    let mut at = 0;
    while more {
        at += 1;
        if at % step == 0 {
            let key = cursor.key();
            keys.push(if user_keys { key.to_vec() } else { user_key(key).to_vec() });
        }
        more = cursor.next(data, layout).unwrap_or(false);
    }
    keys
}
