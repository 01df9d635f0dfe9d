//! Writes logs: the MANIFEST, and write-ahead logs of the recyclable form.
//!
//! A logical record becomes physical records that do not cross the log's 32 KiB blocks. The writer only makes
//! bytes; where they go and when they are safe is the caller's business.

use crate::batch::{BATCH_HEADER_BYTES, tag};
use crate::crc::{crc32c, mask_crc};
use crate::log::LOG_BLOCK_BYTES;
use crate::log_physical::{HEADER_BYTES, RECYCLABLE_HEADER_BYTES, kind};

/// Where a log that is written stands.
#[derive(Clone, Copy, Debug)]
pub struct LogWriter {
    /// The number of a recyclable log; its low half stands in every record.
    number: Option<u64>,
    position: u64,
}

impl LogWriter {
    /// Goes on at `position` bytes of a log: recyclable with a number, of the legacy form without.
    pub fn new(recyclable: Option<u64>, position: u64) -> LogWriter {
        LogWriter { number: recyclable, position }
    }

    /// Bytes of the log so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Appends to `out` what a logical record adds to the log.
    pub fn append(&mut self, record: &[u8], out: &mut Vec<u8>) {
        let shift = self.number.map_or(0, |_| kind::RECYCLABLE_FULL - kind::FULL);
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

    /// Bytes that a record of `len` bytes adds, header and padding included.
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

    /// Fills the log up to a multiple of `alignment` bytes, which divides the log's blocks and is at least 64,
    /// with an empty batch that holds one annotation: RocksDB replays it and does nothing. Zeros would not do,
    /// behind them RocksDB reads no further in the block.
    pub fn pad(&mut self, alignment: usize, sequence: u64, out: &mut Vec<u8>) {
        let over = self.position as usize % alignment;
        if over == 0 {
            return;
        }
        let left = self.left_in_block();
        if left < self.header_bytes() {
            // The block's end, which is zeros in any case.
            out.resize(out.len() + left, 0);
            self.position += left as u64;
            return;
        }
        let fixed = BATCH_HEADER_BYTES + 1;
        let mut room = alignment - over;
        if room < self.header_bytes() + fixed + 1 {
            room += alignment;
        }
        // Where the room reaches over the block's end, the filler is two records with a header each.
        let headers = if room <= left { 1 } else { 2 };
        let annotation = room - headers * self.header_bytes() - fixed;
        let mut filler = Vec::with_capacity(room);
        filler.extend_from_slice(&sequence.to_le_bytes());
        filler.extend_from_slice(&[0; 4]);
        filler.push(tag::LOG_DATA);
        // A length and so many bytes: together just what is left, if need be by a length of two bytes that one
        // could hold.
        if annotation <= 128 {
            filler.push((annotation - 1) as u8);
        } else {
            let len = annotation - 2;
            filler.extend_from_slice(&[len as u8 | 0x80, (len >> 7) as u8]);
        }
        filler.resize(fixed + annotation, 0);
        self.append(&filler, out);
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
    use crate::log::{LogEnd, LogKind, LogReader};
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
        // To the end, but for a block's last bytes that are too few for a header.
        let rest = &bytes[reader.good_until() as usize..];
        assert!(rest.len() < RECYCLABLE_HEADER_BYTES && rest.iter().all(|&byte| byte == 0));
        assert!(rest.is_empty() || bytes.len().is_multiple_of(LOG_BLOCK_BYTES));
        records
    }

    proptest! {
        #[test]
        fn padded_groups_are_read_back_and_fillers_do_nothing(
            start in prop_oneof![Just(0u64), Just(LOG_BLOCK_BYTES as u64 - 4096)],
            groups in proptest::collection::vec(
                proptest::collection::vec(
                    prop_oneof![12usize..60, 440usize..520, 4000usize..4200, 32_600usize..32_800, 12usize..100_000],
                    1..4),
                1..8),
            alignment in prop_oneof![Just(64usize), Just(512), Just(4096)],
        ) {
            let mut writer = LogWriter::new(Some(7), 0);
            let mut out = Vec::new();
            let mut written = Vec::new();
            if start > 0 {
                let record = vec![9; start as usize - RECYCLABLE_HEADER_BYTES];
                writer.append(&record, &mut out);
                written.push(record);
            }
            for group in groups {
                for len in group {
                    let record: Vec<u8> = (0..len).map(|i| (i % 251) as u8 + 1).collect();
                    let (cost, before) = (writer.cost(len), out.len());
                    writer.append(&record, &mut out);
                    prop_assert_eq!(out.len() - before, cost);
                    written.push(record);
                }
                writer.pad(alignment, 5, &mut out);
                prop_assert_eq!(out.len() % alignment, 0);
                prop_assert_eq!(writer.position(), out.len() as u64);
            }
            let (fillers, records): (Vec<_>, Vec<_>) = read(&out, 7).into_iter()
                .partition(|record| record[..12] == [5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            prop_assert_eq!(records, written);
            for filler in fillers {
                let batch = WriteBatch::parse(&filler).unwrap();
                prop_assert_eq!((batch.sequence(), batch.count()), (5, 0));
                batch.verify().unwrap();
            }
        }
    }
}
