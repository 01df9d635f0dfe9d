//! Writes logs: the MANIFEST, and write-ahead logs of the recyclable form.
//!
//! A logical record becomes physical records that do not cross the log's 32 KiB blocks. The writer
//! only produces bytes; the caller writes and flushes them.

use crate::batch::{BATCH_HEADER_BYTES, tag};
use crate::crc::{crc32c, mask_crc};
use crate::log::group_end::GroupEnd;
use crate::log::physical::{HEADER_BYTES, LOG_BLOCK_BYTES, RECYCLABLE_HEADER_BYTES, kind};

/// The position in a log that is being written.
#[derive(Clone, Copy, Debug)]
pub struct LogWriter {
    /// The number of a recyclable log; its low half is in every record.
    number: Option<u64>,
    position: u64,
}

impl LogWriter {
    /// Continues at `position` bytes of a log: of the recyclable form with a number, of the legacy
    /// form without.
    pub fn new(recyclable: Option<u64>, position: u64) -> LogWriter {
        LogWriter { number: recyclable, position }
    }

    /// The length of the log so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Appends the bytes of a logical record to `out`.
    pub fn append(&mut self, record: &[u8], out: &mut Vec<u8>) {
        let shift = self.number.map_or(0, |_| kind::RECYCLABLE_FULL - kind::FULL);
        out.reserve(self.cost(record.len()));
        let mut rest = record;
        let mut first = true;
        loop {
            let left = self.left_in_block();
            if left < self.header_bytes() {
                out.resize(out.len() + left, 0);
                self.position += left as u64;
                continue;
            }
            let (part, tail) = rest.split_at(rest.len().min(left - self.header_bytes()));
            let kind = match (first, tail.is_empty()) {
                (true, true) => kind::FULL,
                (true, false) => kind::FIRST,
                (false, true) => kind::LAST,
                (false, false) => kind::MIDDLE,
            };
            self.physical(kind + shift, part, out);
            if tail.is_empty() {
                return;
            }
            rest = tail;
            first = false;
        }
    }

    /// The bytes that a record of `len` bytes adds, including headers and padding.
    pub fn cost(&self, len: usize) -> usize {
        let mut position = self.position;
        let mut rest = len;
        loop {
            let left = LOG_BLOCK_BYTES - position as usize % LOG_BLOCK_BYTES;
            if left < self.header_bytes() {
                position += left as u64;
                continue;
            }
            let part = rest.min(left - self.header_bytes());
            position += (self.header_bytes() + part) as u64;
            rest -= part;
            if rest == 0 {
                return (position - self.position) as usize;
            }
        }
    }

    /// Ends a group with its end record; `sequence` is that of the next batch. The record pads the
    /// log to a multiple of `alignment`, which divides the log's blocks and is at least 64. Zeros
    /// would not do: after them RocksDB skips the rest of the block.
    pub fn end_group(&mut self, end: GroupEnd, sequence: u64, alignment: usize, out: &mut Vec<u8>) {
        let mut annotation = end.annotation();
        let fixed = BATCH_HEADER_BYTES + 1;
        let mut record = Vec::with_capacity(fixed + annotation.len() + 3);
        record.extend_from_slice(&sequence.to_le_bytes());
        record.extend_from_slice(&[0; 4]);
        record.push(tag::LOG_DATA);
        let left = self.left_in_block();
        if left < self.header_bytes() {
            out.resize(out.len() + left, 0);
            self.position += left as u64;
        }
        let left = self.left_in_block();
        let mut room = alignment - self.position as usize % alignment;
        if room < self.header_bytes() + fixed + 1 + annotation.len() {
            room += alignment;
        }
        // If the room crosses the block's end, the record has two parts with a header each.
        let headers = if room <= left { 1 } else { 2 };
        let with_length = room - headers * self.header_bytes() - fixed;
        // The length and as many bytes must fill the room exactly; this may need a length with one
        // byte more than necessary.
        let length_bytes = [129, 16_386].iter().filter(|&&more| with_length >= more).count() + 1;
        annotation.resize(with_length - length_bytes, 0);
        for byte in 0..length_bytes {
            let more = if byte + 1 < length_bytes { 0x80 } else { 0 };
            record.push((annotation.len() >> (7 * byte)) as u8 & 0x7F | more);
        }
        record.extend_from_slice(&annotation);
        self.append(&record, out);
    }

    fn physical(&mut self, kind: u8, payload: &[u8], out: &mut Vec<u8>) {
        let at = out.len();
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&(payload.len() as u16).to_le_bytes());
        out.push(kind);
        if let Some(number) = self.number {
            out.extend_from_slice(&(number as u32).to_le_bytes());
        }
        out.extend_from_slice(payload);
        let crc = mask_crc(crc32c(&out[at + 6..]));
        out[at..at + 4].copy_from_slice(&crc.to_le_bytes());
        self.position += (out.len() - at) as u64;
    }

    fn left_in_block(&self) -> usize {
        LOG_BLOCK_BYTES - self.position as usize % LOG_BLOCK_BYTES
    }

    fn header_bytes(&self) -> usize {
        match self.number {
            Some(_) => RECYCLABLE_HEADER_BYTES,
            None => HEADER_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::WriteBatch;
    use crate::log::reader::{LogEnd, LogKind, LogReader};
    use proptest::prelude::*;

    fn read(bytes: &[u8], number: u64) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        let mut reader = LogReader::new(LogKind::Wal { number });
        reader
            .feed(bytes, true, |record| {
                records.push(record.data.to_vec());
                Ok::<_, crate::Error>(())
            })
            .unwrap();
        assert_eq!(reader.end(), Some(&LogEnd::Clean));
        // The log ends here, except for a block's last bytes that are too few for a header.
        let rest = &bytes[reader.good_until() as usize..];
        assert!(rest.len() < RECYCLABLE_HEADER_BYTES && rest.iter().all(|&byte| byte == 0));
        assert!(rest.is_empty() || bytes.len().is_multiple_of(LOG_BLOCK_BYTES));
        records
    }

    proptest! {
        #[test]
        fn groups_are_read_back_and_their_ends_have_no_effect(
            start in prop_oneof![Just(0u64), Just(LOG_BLOCK_BYTES as u64 - 4096)],
            groups in proptest::collection::vec(
                proptest::collection::vec(
                    prop_oneof![12usize..60, 440usize..520, 4000usize..4200, 32_600usize..32_800, 12usize..100_000],
                    1..4),
                1..8),
            alignment in prop_oneof![Just(64usize), Just(512), Just(4096), Just(LOG_BLOCK_BYTES)],
        ) {
            let mut writer = LogWriter::new(Some(7), 0);
            let mut out = Vec::new();
            let mut written = Vec::new();
            if start > 0 {
                let record = vec![9; start as usize - RECYCLABLE_HEADER_BYTES];
                writer.append(&record, &mut out);
                written.push(record);
            }
            let mut starts = Vec::new();
            for group in groups {
                let start = writer.position();
                starts.push(start);
                for len in group {
                    let record: Vec<u8> = (0..len).map(|i| (i % 251) as u8 + 1).collect();
                    let (cost, before) = (writer.cost(len), out.len());
                    writer.append(&record, &mut out);
                    prop_assert_eq!(out.len() - before, cost);
                    written.push(record);
                }
                writer.end_group(GroupEnd { start }, 5, alignment, &mut out);
                prop_assert_eq!(out.len() % alignment, 0);
                prop_assert_eq!(writer.position(), out.len() as u64);
            }
            let (ends, records): (Vec<_>, Vec<_>) = read(&out, 7).into_iter()
                .partition(|record| record[..12] == [5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            prop_assert_eq!(records, written);
            for end in &ends {
                let batch = WriteBatch::parse(end).unwrap();
                prop_assert_eq!((batch.sequence(), batch.count()), (5, 0));
                batch.verify().unwrap();
            }
            let ends: Vec<_> = ends.iter().map(|end| GroupEnd::parse(end).unwrap()).collect();
            let expected: Vec<_> = starts.into_iter().map(|start| GroupEnd { start }).collect();
            prop_assert_eq!(ends, expected);
        }
    }
}
