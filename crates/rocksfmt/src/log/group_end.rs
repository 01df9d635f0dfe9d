//! The record that ends a group of a write-ahead log, and what it proves about a gap. The format
//! and its use are described in `docs/formats/group-end.md`.
//!
//! While a group is written its sectors may reach the disk in any order, so after a power cut a
//! whole record may follow a gap: in the last group, which nobody acknowledged. After a gap in an
//! earlier group there is a later group. To tell the two apart every group ends in a record that
//! holds the offset at which the group begins.
//!
//! To RocksDB it is an empty batch with an annotation, which it replays without effect:
//!
//! ```text
//! fixed64 sequence of the next batch | fixed32 0 | u8 3 (LogData) | varint length of the rest
//! "mge" | varint start of the group in the file | zeros
//! ```
//!
//! The zeros fill the disk's block. A log whose *first* record is an end record has one after every
//! group; [`TornGroup`] relies on that.

use crate::batch::{BATCH_HEADER_BYTES, tag};
use crate::coding::{Decoder, put_varint};

const MAGIC: &[u8; 3] = b"mge";

/// The contents of a record that ends a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupEnd {
    /// File offset at which the group begins: the end of the record before it.
    pub start: u64,
}

impl GroupEnd {
    /// Parses a logical record; `None` if it does not end a group.
    pub fn parse(record: &[u8]) -> Option<GroupEnd> {
        let mut d = Decoder::new(record.get(BATCH_HEADER_BYTES - 4..)?);
        let head = d.fixed32("count").ok()? == 0 && d.u8("tag").ok()? == tag::LOG_DATA;
        let len = d.varint32("length").ok()?;
        if !head || len as usize != d.len() || d.bytes(3, "magic").ok()? != MAGIC {
            return None;
        }
        Some(GroupEnd { start: d.varint64("start").ok()? })
    }

    /// The annotation without the zeros.
    pub(crate) fn annotation(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        put_varint(&mut bytes, self.start);
        bytes
    }
}

/// Judges a gap in a log in which every group has an end, by the whole records after the gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TornGroup {
    gap: u64,
    ended: bool,
    records: u64,
}

impl TornGroup {
    /// A judge for a log whose last record before the gap ends at `gap`.
    pub fn new(gap: u64) -> TornGroup {
        TornGroup { gap, ended: false, records: 0 }
    }

    /// The start of the gap.
    pub fn gap(&self) -> u64 {
        self.gap
    }

    /// The number of whole records after the gap.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Takes the next record after the gap, parsed if it ends a group. True if it belongs to a
    /// later group than the gap: the earlier group was whole once, so the gap is damage.
    pub fn is_outlived_by(&mut self, end: Option<GroupEnd>) -> bool {
        self.records += 1;
        if self.ended {
            return true;
        }
        match end {
            Some(end) if end.start > self.gap => return true,
            Some(_) => self.ended = true,
            None => {}
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::BatchBuilder;

    #[test]
    fn an_end_is_read_back_and_no_other_record_is_taken_for_one() {
        for end in [GroupEnd { start: 0 }, GroupEnd { start: u64::MAX }, GroupEnd { start: 4096 }] {
            let mut annotation = end.annotation();
            for _ in 0..3 {
                let record = BatchBuilder::new(7).log_data(&annotation).finish();
                assert_eq!(GroupEnd::parse(&record), Some(end));
                for cut in 0..record.len() {
                    assert_eq!(GroupEnd::parse(&record[..cut]), None);
                }
                annotation.resize(annotation.len() + 100, 0);
            }
            let other = BatchBuilder::new(7).put(0, &annotation, &annotation).finish();
            assert_eq!(GroupEnd::parse(&other), None);
            annotation[2] = b'f';
            let unknown = BatchBuilder::new(7).log_data(&annotation).finish();
            assert_eq!(GroupEnd::parse(&unknown), None);
        }
        let foreign = BatchBuilder::new(7).log_data(b"an application's note").finish();
        assert_eq!(GroupEnd::parse(&foreign), None);
    }

    #[test]
    fn only_records_of_the_same_group_can_follow_a_gap() {
        let end = |start| Some(GroupEnd { start });
        let judge = |records: &[Option<GroupEnd>]| {
            let mut torn = TornGroup::new(1000);
            records.iter().any(|&record| torn.is_outlived_by(record))
        };
        assert!(!judge(&[]));
        assert!(!judge(&[None, None]));
        assert!(!judge(&[None, end(512)]));
        assert!(!judge(&[end(1000)]));
        assert!(judge(&[None, end(1001)]));
        assert!(judge(&[end(512), None]));
    }
}
