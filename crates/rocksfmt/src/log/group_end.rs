//! The record that ends a group of a write-ahead log of ours.
//!
//! Batches that are written and flushed together are a group. While one is under way its sectors
//! may reach the disk in any order, so after a power cut a whole record may stand behind a hole;
//! but only in the last group, which nobody acknowledged. Behind a hole in an earlier group stands
//! a later group. To tell the two apart every group ends in a record that says where it begins.
//!
//! To RocksDB it is an empty batch with an annotation, which it replays and forgets:
//!
//! ```text
//! fixed64 sequence of the next batch | fixed32 0 | u8 3 (LogData) | varint length of the rest
//! "mge" | varint start of the group in the file | zeros
//! ```
//!
//! The zeros fill the disk's block. A log whose *first* record is one of these has one behind every
//! group ([`TornGroup`] counts on that).

use crate::batch::{BATCH_HEADER_BYTES, tag};
use crate::coding::{Decoder, put_varint};

const MAGIC: &[u8; 3] = b"mge";

/// What the record says; see the module text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupEnd {
    /// File offset at which the group begins: the end of the record before it.
    pub start: u64,
}

impl GroupEnd {
    /// What a logical record says, if it ends a group.
    pub fn parse(record: &[u8]) -> Option<GroupEnd> {
        let mut d = Decoder::new(record.get(BATCH_HEADER_BYTES - 4..)?);
        let head = d.fixed32("count").ok()? == 0 && d.u8("tag").ok()? == tag::LOG_DATA;
        let len = d.varint32("length").ok()?;
        if !head || len as usize != d.len() || d.bytes(3, "magic").ok()? != MAGIC {
            return None;
        }
        Some(GroupEnd { start: d.varint64("start").ok()? })
    }

    /// The annotation without filler.
    pub(crate) fn annotation(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        put_varint(&mut bytes, self.start);
        bytes
    }
}

/// Judges a hole in a log in which every group has an end, by the whole records behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TornGroup {
    hole: u64,
    ended: bool,
    records: u64,
}

impl TornGroup {
    /// Of a log whose last record before the hole ends at `hole`.
    pub fn new(hole: u64) -> TornGroup {
        TornGroup { hole, ended: false, records: 0 }
    }

    /// Where the hole begins.
    pub fn hole(&self) -> u64 {
        self.hole
    }

    /// Whole records that stand behind the hole.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Takes the next record behind the hole, and what it says if it ends a group. True if it
    /// belongs to a later group than the hole: that one was whole once, and the hole is damage.
    pub fn is_outlived_by(&mut self, end: Option<GroupEnd>) -> bool {
        self.records += 1;
        if self.ended {
            return true;
        }
        match end {
            Some(end) if end.start > self.hole => return true,
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
    fn what_a_record_says_is_read_back_and_nothing_else_is_taken_for_one() {
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
    fn only_what_is_left_of_the_same_group_may_stand_behind_a_hole() {
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
