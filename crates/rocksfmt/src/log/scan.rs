//! Searches a log after its first damage for a record that should have been read.
//!
//! A log that simply stops was cut off by a crash; all acknowledged data is before the cut. A log
//! that stops and then *continues* has lost something in its middle. Stock RocksDB silently drops
//! everything after the first bad record, so Millrace has to detect the difference here.
//!
//! Proof is a whole `Full` or `First` record with a valid checksum and, in a recyclable log, this
//! file's number, if its batch begins at or after the next expected sequence. `Middle` and `Last`
//! records prove nothing: they may belong to the record that was torn. The block with the damage is
//! searched at every byte, since the length of the bad record cannot be trusted. Later blocks begin
//! with a record; there the chain of records is followed from the block's start as far as it goes.

use crate::coding::fixed64_at;
use crate::key::SEQUENCE_MAX;
use crate::log::group_end::{GroupEnd, TornGroup};
use crate::log::physical::{HEADER_BYTES, LOG_BLOCK_BYTES, Physical, kind, physical};
use crate::log::reader::{LogKind, LogReader};
use crate::log::zstd::{RecordDecompressor, looks_compressed};
use crate::manifest::edit::VersionEdit;

/// A valid record after a log's first damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaterRecord {
    /// Its file offset.
    pub offset: u64,
    /// The first sequence of its batch; `None` in a MANIFEST.
    pub sequence: Option<u64>,
}

/// Searches the remainder of a log; see the module's text.
#[derive(Debug)]
pub struct DamageScan {
    log: LogKind,
    recycled: Option<bool>,
    damage_offset: u64,
    sequence_min: u64,
    decompressor: Option<RecordDecompressor>,
    torn: Option<TornGroup>,
    /// The start of a short record that continues in the next block, and its bytes so far: it may
    /// be the end of a group.
    begun: Option<(u64, Vec<u8>)>,
}

/// The largest part of a group's end record in the block in which it begins.
const BEGUN_BYTES_MAX: usize = 64;

/// Whether `block`, a log block of a MANIFEST, has whole records from the byte `from` on, all of
/// them members of atomic groups. A power cut leaves this if it interrupts Millrace's writer in an
/// atomic group, because the writer writes the first sector of each block last.
pub fn is_torn_group(block: &[u8], from: usize) -> bool {
    let mut at = from;
    let mut found = false;
    while let Some(&kind) = block.get(at + HEADER_BYTES - 1) {
        let proves = matches!(kind, kind::FULL | kind::FIRST);
        match proves.then(|| physical(&block[at..], None)) {
            Some(Physical::Record { payload, bytes, .. }) => {
                let edit = VersionEdit::decode(payload);
                if !edit.is_ok_and(|edit| edit.atomic_group_remaining.is_some()) {
                    return false;
                }
                found = true;
                at += bytes;
            }
            _ => at += 1,
        }
    }
    found
}

impl DamageScan {
    /// A scan after `damage_offset` for batches that begin at `sequence_min` (the next expected
    /// sequence) or later, in the log that `reader` has read so far.
    pub fn new(reader: &LogReader, damage_offset: u64, sequence_min: u64) -> DamageScan {
        DamageScan {
            log: reader.kind(),
            recycled: reader.recycled(),
            damage_offset,
            sequence_min,
            // The first record of a log says whether it is compressed.
            decompressor: match reader.compressed() || reader.good_until() == 0 {
                true => RecordDecompressor::new().ok(),
                false => None,
            },
            torn: None,
            begun: None,
        }
    }

    /// The same for a log in which every group has an end record; `torn` may have judged records
    /// already.
    pub fn of_groups(mut self, torn: TornGroup) -> DamageScan {
        self.torn = Some(torn);
        self
    }

    /// The judge given to [`DamageScan::of_groups`], in its current state.
    pub fn torn(&self) -> Option<TornGroup> {
        self.torn
    }

    /// The offset at which feeding must begin: the start of the block with the damage.
    pub fn start(&self) -> u64 {
        self.damage_offset - self.damage_offset % LOG_BLOCK_BYTES as u64
    }

    /// Searches one piece of the file: whole blocks from `piece_offset` on (a multiple of
    /// [`LOG_BLOCK_BYTES`]).
    pub fn push(&mut self, piece_offset: u64, piece: &[u8]) -> Option<LaterRecord> {
        let mut offset = piece_offset;
        for block in piece.chunks(LOG_BLOCK_BYTES) {
            let end = offset + block.len() as u64;
            let found = if offset > self.damage_offset {
                self.follow(block, offset)
            } else if end > self.damage_offset {
                self.search(block, offset, (self.damage_offset - offset) as usize + 1)
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

    /// Follows the chain of records from the start of a block. If it breaks, the damage continues,
    /// unless zeros or a recycled file's old records show that the log ends here.
    fn follow(&mut self, block: &[u8], offset: u64) -> Option<LaterRecord> {
        let mut at = 0;
        while let Some((bytes, found)) = self.record_at(&block[at..], offset + at as u64) {
            if found.is_some() {
                return found;
            }
            at += bytes;
        }
        let rest = &block[at..];
        let ends = matches!(physical(rest, self.number_low()), Physical::Stale { .. })
            || rest == &[0; LOG_BLOCK_BYTES][..rest.len()];
        if ends { None } else { self.search(block, offset, at + 1) }
    }

    /// Tries every byte of a block from `at` on. Computes a checksum only for types that can be
    /// proof: this limits the time for malicious bytes to some milliseconds.
    fn search(&mut self, block: &[u8], offset: u64, mut at: usize) -> Option<LaterRecord> {
        while let Some(&kind) = block.get(at + HEADER_BYTES - 1) {
            let mut step = 1;
            if self.proving_form(kind).is_some()
                && let Some((bytes, found)) = self.record_at(&block[at..], offset + at as u64)
            {
                if found.is_some() {
                    return found;
                }
                if self.torn.is_some() {
                    step = bytes;
                }
            }
            at += step;
        }
        None
    }

    /// Whether records of this type begin a batch, in the form that the log has.
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

    fn number_low(&self) -> Option<u32> {
        match self.log {
            LogKind::Wal { number } => Some(number as u32),
            LogKind::Manifest => None,
        }
    }

    /// The valid record at the start of `rest` (its size), and the proof if it is one.
    fn record_at(&mut self, rest: &[u8], offset: u64) -> Option<(usize, Option<LaterRecord>)> {
        let Physical::Record { kind, payload, bytes } = physical(rest, self.number_low()) else {
            return None;
        };
        let begun = self.begun.take();
        if self.proving_form(kind).is_none() {
            let last = matches!(kind, kind::LAST | kind::RECYCLABLE_LAST);
            let block = LOG_BLOCK_BYTES as u64;
            let found = match begun {
                Some((from, mut record)) if last && offset == from.next_multiple_of(block) => {
                    record.extend_from_slice(payload);
                    self.judge(&record, from)
                }
                _ => None,
            };
            return Some((bytes, found));
        }
        if self.log == LogKind::Manifest {
            return Some((bytes, Some(LaterRecord { offset, sequence: None })));
        }
        if self.torn.is_some() {
            let first = matches!(kind, kind::FIRST | kind::RECYCLABLE_FIRST);
            if first && payload.len() <= BEGUN_BYTES_MAX {
                self.begun = Some((offset, payload.to_vec()));
                return Some((bytes, None));
            }
            return Some((bytes, self.judge(payload, offset)));
        }
        let head = match &mut self.decompressor {
            Some(decompressor) if looks_compressed(payload) => {
                decompressor.head(payload).unwrap_or_default()
            }
            _ => payload,
        };
        Some((bytes, newer(head, self.sequence_min, offset)))
    }

    /// The proof, unless the record can be part of the torn group. `record` may be only the first
    /// part of a record.
    fn judge(&mut self, record: &[u8], offset: u64) -> Option<LaterRecord> {
        let later = newer(record, self.sequence_min, offset)?;
        self.torn.as_mut()?.is_outlived_by(GroupEnd::parse(record)).then_some(later)
    }
}

/// The record with these first bytes, if its batch is not older than `sequence_min`.
fn newer(head: &[u8], sequence_min: u64, offset: u64) -> Option<LaterRecord> {
    let sequence = fixed64_at(head, 0)?;
    let newer = head.len() >= 12 && (sequence_min..=SEQUENCE_MAX).contains(&sequence);
    newer.then_some(LaterRecord { offset, sequence: Some(sequence) })
}
