//! Looks behind the first damage of a log for a record that should have been read.
//!
//! A log that simply stops was cut by a crash; everything acknowledged stands in front of the cut.
//! A log that stops and then *goes on* has lost something in its middle. Stock RocksDB drops what
//! follows the first bad record without a word, so the difference has to be found here.
//!
//! What counts as proof is a whole `Full` or `First` record with a valid checksum and, in a
//! recyclable log, this file's number, whose batch begins at or behind the next expected sequence.
//! `Middle` and `Last` records prove nothing: they may belong to the very record that was torn. The
//! block with the damage is searched at every byte, since the length of the bad record cannot be
//! trusted; in later blocks, which begin with a record, the chain is followed from the block's
//! start as far as it goes.

use crate::coding::fixed64_at;
use crate::key::SEQUENCE_MAX;
use crate::log::group_end::{GroupEnd, TornGroup};
use crate::log::physical::{HEADER_BYTES, Physical, kind, physical};
use crate::log::zstd::{RecordDecompressor, looks_compressed};
use crate::log::{LOG_BLOCK_BYTES, LogKind, LogReader};
use crate::manifest::edit::VersionEdit;

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
    torn: Option<TornGroup>,
    /// Where a short record began that goes on in the next block, and its bytes so far: a group's
    /// end may.
    begun: Option<(u64, Vec<u8>)>,
}

/// The most that a group's end may have in the block in which it begins.
const BEGUN_BYTES_MAX: usize = 64;

/// Whether `block`, a MANIFEST's log block, has whole records from the byte `from` on, and all of
/// them are of atomic groups. So it looks when power was cut while such a group was written, as our
/// writer does it: the first sector of what it writes into a block comes last.
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
    /// A scan behind `damage_offset` for batches that begin at `sequence_min` (the next expected
    /// sequence) or later, in the log that `reader` has read so far.
    pub fn new(reader: &LogReader, damage_offset: u64, sequence_min: u64) -> DamageScan {
        DamageScan {
            log: reader.kind(),
            recycled: reader.recycled(),
            damage_offset,
            sequence_min,
            // A log says in its first record whether it is compressed.
            decompressor: match reader.compressed() || reader.good_until() == 0 {
                true => RecordDecompressor::new().ok(),
                false => None,
            },
            torn: None,
            begun: None,
        }
    }

    /// The same in a log in which every group has its end; what `torn` met before counts.
    pub fn of_groups(mut self, torn: TornGroup) -> DamageScan {
        self.torn = Some(torn);
        self
    }

    /// What has become of the judge that [`DamageScan::of_groups`] was given.
    pub fn torn(&self) -> Option<TornGroup> {
        self.torn
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

    /// Follows the chain of records from the start of a block. Where it breaks the damage goes on,
    /// unless zeros or the records of a file's former life say that the log ends here.
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

    /// Tries every byte of a block from `at` on. Only a type that can be proof is worth a checksum:
    /// that keeps the work on bytes made to be slow at some milliseconds.
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

    fn number_low(&self) -> Option<u32> {
        match self.log {
            LogKind::Wal { number } => Some(number as u32),
            LogKind::Manifest => None,
        }
    }

    /// The valid record at the start of `rest`, and whether it is proof.
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

    /// The proof that a record is where it may be of the torn group. `record` may be the first part
    /// of one.
    fn judge(&mut self, record: &[u8], offset: u64) -> Option<LaterRecord> {
        let later = newer(record, self.sequence_min, offset)?;
        self.torn.as_mut()?.is_outlived_by(GroupEnd::parse(record)).then_some(later)
    }
}

/// A record that begins like this, if its batch is not older than `sequence_min`.
fn newer(head: &[u8], sequence_min: u64, offset: u64) -> Option<LaterRecord> {
    let sequence = fixed64_at(head, 0)?;
    let newer = head.len() >= 12 && (sequence_min..=SEQUENCE_MAX).contains(&sequence);
    newer.then_some(LaterRecord { offset, sequence: Some(sequence) })
}
