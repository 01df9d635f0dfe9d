//! The bytes of deadlines: `docs/formats/expiry.md`.

use twox_hash::XxHash3_64;

use crate::expiry::{Deadline, Due};

/// The first byte of the key of a record.
pub(crate) const RECORD: u8 = b'k';
/// That of an entry in the order of deadlines.
pub(crate) const DUE: u8 = b't';
/// That of a run.
pub(crate) const RUNS: u8 = b'r';

const PREFIX_BYTES: usize = 5;
const ENTRY_BYTES: usize = 28;

/// What a record says of one value of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The run in which the sequence was foreseen.
    pub run: u32,
    /// The value's sequence number.
    pub sequence: u64,
    /// [`hash`] of the value.
    pub hash: u64,
    pub deadline: Deadline,
}

/// The hash of a value.
pub(crate) fn hash(value: &[u8]) -> u64 {
    XxHash3_64::oneshot(value)
}

fn prefixed(tag: u8, family: u32) -> Vec<u8> {
    let mut key = vec![tag];
    key.extend_from_slice(&family.to_be_bytes());
    key
}

/// The key of the record of a key.
pub(crate) fn record_key(family: u32, key: &[u8]) -> Vec<u8> {
    let mut record = Vec::with_capacity(PREFIX_BYTES + key.len());
    record.push(RECORD);
    record.extend_from_slice(&family.to_be_bytes());
    record.extend_from_slice(key);
    record
}

/// The key of the entry of a key in the order of deadlines.
pub(crate) fn due_key(family: u32, deadline: Deadline, key: &[u8]) -> Vec<u8> {
    let mut due = prefixed(DUE, family);
    due.extend_from_slice(&deadline.0.to_be_bytes());
    due.extend_from_slice(key);
    due
}

/// The first possible entry after that of a key.
pub(crate) fn after_due(family: u32, (deadline, key): &Due) -> Vec<u8> {
    let mut after = due_key(family, *deadline, key);
    after.push(0);
    after
}

/// The first possible entry of a family in the order of deadlines.
pub(crate) fn due_start(family: u32) -> Vec<u8> {
    prefixed(DUE, family)
}

/// The ranges of keys that a family has: from one key to before another.
pub(crate) fn ranges_of(family: u32) -> [(Vec<u8>, Vec<u8>); 2] {
    [RECORD, DUE].map(|kind| {
        let end = match family.checked_add(1) {
            Some(next) => prefixed(kind, next),
            None => vec![kind + 1],
        };
        (prefixed(kind, family), end)
    })
}

/// The deadline and the key of an entry.
pub(crate) fn parse_due(due: &[u8]) -> Option<(Deadline, &[u8])> {
    let rest = due.get(PREFIX_BYTES..)?;
    let (deadline, key) = rest.split_first_chunk()?;
    Some((Deadline(u64::from_be_bytes(*deadline)), key))
}

/// The key and the value of the entry of a run.
pub(crate) fn run_entry(run: u32, before: u64) -> ([u8; 5], [u8; 8]) {
    let [a, b, c, d] = run.to_be_bytes();
    ([RUNS, a, b, c, d], before.to_le_bytes())
}

/// A run, and the last sequence before it.
pub(crate) fn run_of(key: &[u8], value: &[u8]) -> Option<(u32, u64)> {
    let run = key.strip_prefix(&[RUNS])?;
    Some((u32::from_be_bytes(run.try_into().ok()?), u64::from_le_bytes(value.try_into().ok()?)))
}

/// The value of a record: its entries in the order of sequences.
pub(crate) fn encode(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(entries.len() * ENTRY_BYTES);
    for entry in entries {
        bytes.extend_from_slice(&entry.run.to_le_bytes());
        bytes.extend_from_slice(&entry.sequence.to_le_bytes());
        bytes.extend_from_slice(&entry.hash.to_le_bytes());
        bytes.extend_from_slice(&entry.deadline.0.to_le_bytes());
    }
    bytes
}

/// The entries of a record. Bytes that are no whole entry are ignored.
pub(crate) fn decode(record: &[u8]) -> impl DoubleEndedIterator<Item = Entry> {
    let (entries, _) = record.as_chunks::<ENTRY_BYTES>();
    entries.iter().map(|entry| {
        let number = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&entry[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        Entry {
            run: number(0) as u32,
            sequence: number(4),
            hash: number(12),
            deadline: Deadline(number(20)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let entry = |n: u64| Entry {
            run: n as u32,
            sequence: n << 40,
            hash: !n,
            deadline: Deadline(n * 1000),
        };
        let all = [entry(1), entry(77)];
        let mut bytes = encode(&all);
        assert_eq!(decode(&bytes).collect::<Vec<_>>(), all);
        bytes.truncate(bytes.len() - 1);
        assert_eq!(decode(&bytes).collect::<Vec<_>>(), all[..1]);
    }

    #[test]
    fn entries_are_in_the_order_of_deadlines() {
        let due = |at, key: &[u8]| due_key(7, Deadline(at), key);
        assert!(due(255, b"z") < due(256, b"a") && due(256, b"a") < due(256, b"b"));
        assert_eq!(parse_due(&due(256, b"key")), Some((Deadline(256), &b"key"[..])));
        assert_eq!(parse_due(b"t1234567"), None);
        let (key, value) = run_entry(5, 1 << 50);
        assert_eq!(run_of(&key, &value), Some((5, 1 << 50)));
        assert_eq!((run_of(b"r1", &value), run_of(&key, b"1")), (None, None));
    }
}
