//! The list of all writes, and what may be found of them.

use std::collections::BTreeMap;

use super::Report;
use crate::families::Extra;

/// A unique value: it begins with its batch and its position in the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) batch: u64,
    pub(super) place: u16,
    pub(super) len: u32,
}

impl Content {
    pub(super) fn bytes(self) -> Vec<u8> {
        let mut bytes = self.batch.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.place.to_le_bytes());
        let fill = (self.batch as u8).wrapping_mul(31).wrapping_add(self.place as u8);
        let len = self.len as usize;
        // Half of it compresses well.
        bytes.resize(bytes.len().max(len / 2), fill);
        let mut noise = self.batch | 1;
        while bytes.len() < len {
            noise = noise.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            bytes.extend_from_slice(&noise.to_le_bytes());
        }
        bytes.truncate(len.max(10));
        bytes
    }
}

/// The key that every batch sets to its number.
pub(super) const LAST: &[u8] = b"last";

/// All writes: for every key, the values that batches gave it, in order.
#[derive(Default)]
pub(super) struct Model {
    pub(super) keys: BTreeMap<Vec<u8>, Vec<(u64, Option<Content>)>>,
    /// The number of the newest batch.
    pub(super) batches: u64,
    /// Number of batches that must exist when a process opens the database.
    pub(super) acknowledged: u64,
    /// The same after a power cut.
    pub(super) durable: u64,
    /// The numbers of the clearings of the database.
    pub(super) clears: Vec<u64>,
    /// The logs may have writes at durability `process`.
    pub(super) process_logs: bool,
    /// Power was cut in that state. True until the database was opened, or the logs that salvage
    /// left are gone.
    pub(super) loose: bool,
    /// After such an opening: the value of [`LAST`] then, and the batch number that it represents.
    pub(super) adopted: Option<(u64, u64)>,
    /// Batches of unknown fate by number. Readers do not see them. They may be there after a
    /// crash, unless a later batch was accepted.
    pub(super) unknown: BTreeMap<u64, Unknown>,
    /// How often a batch became unknown, and for each batch, how often before its submission.
    pub(super) doubts: u64,
    /// It was unknown at some time what had been written.
    pub(super) mixes: bool,
    pub(super) doubts_before: BTreeMap<u64, u64>,
    pub(super) extra: Extra,
    pub(super) report: Report,
}

/// A batch of unknown fate.
pub(super) struct Unknown {
    doubt: u64,
    changes: Vec<(Vec<u8>, Option<Content>)>,
    clears: bool,
    /// It writes to the extra column family.
    is_extra: bool,
}

/// Keys and values, sorted.
pub type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

pub(super) fn text(key: &[u8]) -> String {
    String::from_utf8_lossy(key).into_owned()
}

/// The batch of a value.
pub(super) fn batch_of(value: &[u8]) -> u64 {
    value.first_chunk().map_or(u64::MAX, |number| u64::from_le_bytes(*number))
}

impl Model {
    /// The value of a key after batch `number`.
    pub(super) fn at(&self, key: &[u8], number: u64) -> Option<Content> {
        let changes = self.keys.get(key)?;
        let after = changes.partition_point(|(batch, _)| *batch <= number);
        changes[..after].last()?.1
    }

    /// Removes the batches after `number`.
    pub(super) fn truncate(&mut self, number: u64) {
        for changes in self.keys.values_mut() {
            changes.retain(|(batch, _)| *batch <= number);
        }
        self.keys.retain(|_, changes| !changes.is_empty());
        self.batches = number;
        self.extra.truncate(number);
        self.clears.retain(|&clear| clear <= number);
        self.acknowledged = self.acknowledged.min(number);
    }

    /// Notes that a batch was refused; all later ones will be.
    pub(super) fn refuse(&mut self, number: u64) {
        if number <= self.batches {
            self.truncate(number - 1);
        }
    }

    /// Notes that the fate of a batch is unknown.
    pub(super) fn doubt(&mut self, number: u64) {
        let mut changes = Vec::new();
        for (key, of_key) in &mut self.keys {
            let of_batch = of_key.extract_if(.., |(batch, _)| *batch == number);
            changes.extend(of_batch.map(|(_, content)| (key.clone(), content)));
        }
        let clears = self.clears.contains(&number);
        if !clears {
            // It was submitted, and went to a log, after the fate of these was settled.
            let settled = self.doubts_before.get(&number).copied().unwrap_or(0);
            self.unknown.retain(|_, unknown| unknown.doubt >= settled);
        }
        self.clears.retain(|&clear| clear != number);
        let is_extra = self.extra.remove(number);
        self.unknown.insert(number, Unknown { doubt: self.doubts, changes, clears, is_extra });
        self.doubts += 1;
        self.report.unknown += 1;
    }

    /// Settles unknown batches by what an opening has found. They are there up to one of them.
    pub(super) fn settle(&mut self, found: &Pairs) {
        let last = found.iter().find(|(key, _)| key == LAST).map(|(_, value)| batch_of(value));
        let is_last = |(number, unknown): &(&u64, &Unknown)| match unknown.clears {
            true => found.is_empty(),
            false => last == Some(**number),
        };
        let there = self.unknown.iter().filter(is_last).map(|(number, _)| *number).max();
        for (number, unknown) in std::mem::take(&mut self.unknown) {
            let is_there = there.is_some_and(|last| number <= last);
            if !is_there && !self.loose {
                continue;
            }
            self.report.unknown_found += u64::from(is_there);
            for (key, content) in unknown.changes {
                let of_key = self.keys.entry(key).or_default();
                let at = of_key.partition_point(|(batch, _)| *batch <= number);
                of_key.insert(at, (number, content));
            }
            if unknown.clears && is_there {
                self.clears.push(number);
            }
            if unknown.is_extra {
                self.extra.write(number);
            }
        }
    }

    /// The number of the newest clearing.
    pub(super) fn cleared(&self) -> u64 {
        self.clears.last().copied().unwrap_or(0)
    }

    /// The number of batches, from the value of [`LAST`].
    pub(super) fn number_in(&self, found: &Pairs) -> u64 {
        let last = found.iter().find(|(key, _)| key == LAST);
        let says = last.map_or(self.cleared(), |(_, value)| batch_of(value));
        match self.adopted {
            Some((last, number)) if last == says => number,
            _ => says,
        }
    }

    /// Checks that the found contents are those after batch `number`.
    pub(super) fn compare(&self, found: &Pairs, number: u64) {
        let mut rest = found.iter();
        for key in self.keys.keys() {
            let Some(content) = self.at(key, number) else { continue };
            let name = text(key);
            let Some((next, value)) = rest.next() else {
                panic!("{name} is missing after batch {number}");
            };
            assert!(next == key, "{} is in place of {name} after batch {number}", text(next));
            assert!(
                *value == content.bytes(),
                "{name} is of batch {} and should be {content:?} after batch {number}",
                batch_of(value)
            );
        }
        if let Some((key, _)) = rest.next() {
            panic!("{} should not be there after batch {number}", text(key));
        }
    }

    /// Checks that each key has one of the values it had since it was durable. These values are the
    /// contents from now on.
    pub(super) fn adopt(&mut self, found: &Pairs) {
        let mut left: BTreeMap<&[u8], &[u8]> =
            found.iter().map(|(key, value)| (&key[..], &value[..])).collect();
        let last = left.get(LAST).map_or(self.cleared(), |value| batch_of(value));
        let now = self.batches;
        for (key, changes) in &mut self.keys {
            let value = left.remove(&key[..]);
            let first = changes.partition_point(|(batch, _)| *batch <= self.durable);
            let possible = &changes[first.saturating_sub(1)..];
            let is = match possible
                .iter()
                .find(|(_, content)| content.map(Content::bytes).as_deref() == value)
            {
                Some((_, is)) => *is,
                None => {
                    let says = value.map(batch_of);
                    let name = text(key);
                    assert!(
                        first == 0 && value.is_none(),
                        "{name} is of batch {says:?} and should be one of {possible:?}"
                    );
                    None
                }
            };
            changes.push((now, is));
        }
        assert!(
            left.is_empty(),
            "keys that were not written: {:?}",
            left.keys().map(|key| text(key))
        );
        self.acknowledged = now;
        self.adopted = Some((last, now));
    }
}
