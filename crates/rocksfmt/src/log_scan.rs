//! Looks behind the first damage of a log for a record that should have been read.
//!
//! A log that simply stops was cut by a crash; everything acknowledged stands in front of the cut. A log that
//! stops and then *goes on* has lost something in its middle. Stock RocksDB drops what follows the first bad
//! record without a word, so the difference has to be found here.
//!
//! What counts as proof is a whole `Full` or `First` record with a valid checksum and, in a recyclable log,
//! this file's number, whose batch begins at or behind the next expected sequence. `Middle` and `Last` records
//! prove nothing: they may belong to the very record that was torn. The block with the damage is searched at
//! every byte, since the length of the bad record cannot be trusted; in later blocks, which begin with a
//! record, the chain is followed from the block's start.

use crate::coding::fixed64_at;
use crate::key::SEQUENCE_MAX;
use crate::log::{LOG_BLOCK_BYTES, LogKind, LogReader};
use crate::log_physical::{HEADER_BYTES, Physical, kind, physical};
use crate::log_zstd::RecordDecompressor;

/// A valid record behind a log's first damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaterRecord {
    /// Its file offset.
    pub offset: u64,
    /// The sequence its batch begins with; `None` in a MANIFEST.
    pub sequence: Option<u64>,
}

/// Searches the remainder of a log; see the module's head.
#[derive(Debug)]
pub struct DamageScan {
    log: LogKind,
    recycled: Option<bool>,
    damage_offset: u64,
    sequence_min: u64,
    decompressor: Option<RecordDecompressor>,
}

impl DamageScan {
    /// A scan behind `damage_offset` for batches that begin at `sequence_min` (the next expected sequence) or
    /// later, in the log that `reader` has read so far.
    pub fn new(reader: &LogReader, damage_offset: u64, sequence_min: u64) -> DamageScan {
        DamageScan {
            log: reader.kind(),
            recycled: reader.recycled(),
            damage_offset,
            sequence_min,
            decompressor: match reader.compressed() {
                true => RecordDecompressor::new().ok(),
                false => None,
            },
        }
    }

    /// Where feeding must begin: the start of the block with the damage.
    pub fn start(&self) -> u64 {
        self.damage_offset - self.damage_offset % LOG_BLOCK_BYTES as u64
    }

    /// Searches one piece of the file, whole blocks that begin at `piece_offset` (a multiple of
    /// [`LOG_BLOCK_BYTES`]).
    pub fn push(&mut self, piece_offset: u64, piece: &[u8]) -> Option<LaterRecord> {
        let mut offset = piece_offset;
        for block in piece.chunks(LOG_BLOCK_BYTES) {
            let end = offset + block.len() as u64;
            let found = if offset > self.damage_offset {
                self.follow(block, offset)
            } else if end > self.damage_offset {
                self.search(block, offset)
            } else {
                None
            };
            if found.is_some() {
                return found;
            }
            offset = end;
        }
        None
    }

    /// Follows the chain of records from the start of a block.
    fn follow(&mut self, block: &[u8], offset: u64) -> Option<LaterRecord> {
        let mut at = 0;
        while let Some((bytes, found)) = self.record_at(&block[at..], offset + at as u64) {
            if found.is_some() {
                return found;
            }
            at += bytes;
        }
        None
    }

    /// Tries every byte behind the damage. Only a type that can be proof is worth a checksum: that keeps the
    /// work on bytes made to be slow at some milliseconds.
    fn search(&mut self, block: &[u8], offset: u64) -> Option<LaterRecord> {
        let from = (self.damage_offset - offset) as usize + 1;
        let types = block.get(from + HEADER_BYTES - 1..)?;
        types.iter().enumerate().find_map(|(i, &kind)| {
            self.proving_form(kind)?;
            self.record_at(&block[from + i..], offset + (from + i) as u64)?.1
        })
    }

    /// Whether records of a type begin a batch, in the form the log has.
    fn proving_form(&self, kind: u8) -> Option<()> {
        let recyclable = match kind {
            kind::FULL | kind::FIRST => false,
            kind::RECYCLABLE_FULL | kind::RECYCLABLE_FIRST => true,
            _ => return None,
        };
        let possible = match self.log {
            LogKind::Manifest => !recyclable,
            LogKind::Wal { .. } => self.recycled.is_none_or(|recycled| recycled == recyclable),
        };
        possible.then_some(())
    }

    /// The valid record at the start of `rest`, and whether it is proof.
    fn record_at(&mut self, rest: &[u8], offset: u64) -> Option<(usize, Option<LaterRecord>)> {
        let number_low = match self.log {
            LogKind::Wal { number } => Some(number as u32),
            LogKind::Manifest => None,
        };
        let Physical::Record { kind, payload, bytes } = physical(rest, number_low) else {
            return None;
        };
        if self.proving_form(kind).is_none() {
            return Some((bytes, None));
        }
        if self.log == LogKind::Manifest {
            return Some((bytes, Some(LaterRecord { offset, sequence: None })));
        }
        let head = match &mut self.decompressor {
            None => payload,
            Some(decompressor) => decompressor.head(payload).unwrap_or_default(),
        };
        let proof = fixed64_at(head, 0)
            .filter(|&sequence| head.len() >= 12 && sequence >= self.sequence_min)
            .filter(|&sequence| sequence <= SEQUENCE_MAX);
        Some((bytes, proof.map(|sequence| LaterRecord { offset, sequence: Some(sequence) })))
    }
}
