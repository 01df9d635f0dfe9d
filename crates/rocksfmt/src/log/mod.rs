//! Reads RocksDB's log format: the container of write-ahead logs and of MANIFESTs.
//!
//! A log is a sequence of 32 KiB blocks. Physical records never cross a block; a logical record is
//! one `Full` record or `First`, `Middle`…, `Last`. One pass over a file:
//!
//! 1. [`LogReader::new`] says which file it is: a WAL and its number, or a MANIFEST.
//! 2. [`LogReader::feed`] takes the file in consecutive pieces (whole blocks, the last one shorter)
//!    and calls back once per logical record. Only a record that is split over pieces or blocks is
//!    copied.
//! 3. After the last piece, or as soon as reading cannot go on, [`LogReader::end`] says how the log
//!    ended.
//!
//! How a log may end matters more than anything else here. A writer that was killed leaves a record
//! cut short ([`LogEnd::Truncated`]); a recycled file (an old log overwritten from its start) goes
//! on with bytes of its former life, which fail their checksum or carry another log number
//! ([`LogEnd::StaleTail`]); preallocated space reads as zeros ([`LogEnd::Clean`]). None of these is
//! damage. A record that fails its checksum in a file that was never recycled may be
//! ([`LogEnd::Damage`]); whether something valid stands behind it is for
//! [`DamageScan`](crate::DamageScan) to find out.
//!
//! A zeroed stretch in front of further records is skipped, as RocksDB does, but the next record
//! says so in [`LogRecord::zeros_before`]: if its sequence does not continue the one before the stretch, writes are lost.

pub(crate) mod group_end;
pub(crate) mod physical;
pub(crate) mod scan;
pub(crate) mod start;
pub(crate) mod writer;
pub(crate) mod zstd;

use crate::coding::Decoder;
use crate::log::physical::{
    Physical, RECYCLABLE_HEADER_BYTES, has_recyclable_header, kind, physical,
};
use crate::log::zstd::RecordDecompressor;

/// Size of a log block.
pub const LOG_BLOCK_BYTES: usize = 32 * 1024;

/// Bound on a logical record, unless the caller sets another: RocksDB's own batches end at 4 GiB,
/// but what a record expands to must not be up to a few bytes of compressed input alone.
pub const LOG_RECORD_BYTES_MAX: usize = 1 << 30;

/// Which file a log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogKind {
    /// A write-ahead log and the number in its name; recycled files are recognised by it.
    Wal {
        /// The number in the file's name.
        number: u64,
    },
    /// A MANIFEST: never recycled, never compressed.
    Manifest,
}

/// One logical record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRecord<'a> {
    /// File offset of its first physical record.
    pub offset: u64,
    /// What the writer appended, decompressed.
    pub data: &'a [u8],
    /// Where a zeroed stretch in front of this record began, if one was skipped.
    pub zeros_before: Option<u64>,
}

/// How a log ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogEnd {
    /// With a whole record, perhaps followed by zeros.
    Clean,
    /// With a record cut short, at `offset`; what a killed writer leaves.
    Truncated {
        /// Where the record that has no end begins.
        offset: u64,
    },
    /// In a recycled file, with bytes of the file's former life from `offset` on.
    StaleTail {
        /// Where the stale bytes begin.
        offset: u64,
    },
    /// The bytes at `offset` contradict the format.
    Damage {
        /// Where the bad record begins.
        offset: u64,
        /// Expected against found.
        what: String,
    },
    /// A valid record asks for something this reader does not know; never a torn tail.
    Unsupported {
        /// Where that record begins.
        offset: u64,
        /// Its name.
        what: String,
    },
}

/// What a WAL says about the log before it (RocksDB 9.11 and later).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredecessorWal {
    /// Its number.
    pub number: u64,
    /// Its size in bytes when it was closed.
    pub size_bytes: u64,
    /// The last sequence written to it.
    pub last_sequence: u64,
}

/// Reads the logical records of one log; see the module's head.
#[derive(Debug)]
pub struct LogReader {
    kind: LogKind,
    record_bytes_max: usize,
    /// File offset of the next byte to be fed.
    offset: u64,
    /// End of the last logical record handed out, or of the last record that carries no data.
    good_until: u64,
    /// Whether the file's records are of the recyclable form; unknown before the first one.
    recycled: Option<bool>,
    /// Start of a logical record whose last fragment has not come yet; its bytes are in `pending`.
    pending_from: Option<u64>,
    pending: Vec<u8>,
    zeros_from: Option<u64>,
    decompressor: Option<RecordDecompressor>,
    timestamp_sizes: Vec<(u32, u16)>,
    predecessor: Option<PredecessorWal>,
    end: Option<LogEnd>,
}

/// Whether a log, of which `start` is the first block, is of the recyclable form: each record has
/// its log's number, so that it is not taken for one of a log that is written over it.
pub fn is_recyclable_log(start: &[u8]) -> bool {
    matches!(physical(start, None), Physical::Record { kind, .. } if has_recyclable_header(kind))
}

impl LogReader {
    /// A reader at the start of a file.
    pub fn new(kind: LogKind) -> LogReader {
        LogReader {
            kind,
            record_bytes_max: LOG_RECORD_BYTES_MAX,
            offset: 0,
            good_until: 0,
            recycled: None,
            pending_from: None,
            pending: Vec::new(),
            zeros_from: None,
            decompressor: None,
            timestamp_sizes: Vec::new(),
            predecessor: None,
            end: None,
        }
    }

    /// The same with another bound on the size of a logical record.
    pub fn with_record_bytes_max(mut self, bytes: usize) -> LogReader {
        self.record_bytes_max = bytes;
        self
    }

    /// Takes the next piece of the file and calls `each` for every logical record that ends in it.
    ///
    /// Every piece but the last must be a multiple of [`LOG_BLOCK_BYTES`]; a piece that is not is
    /// taken for the last, whatever `last` says. Stops at the callback's first error and hands
    /// it back. Once [`LogReader::end`] is known further pieces are ignored.
    pub fn feed<E>(
        &mut self,
        piece: &[u8],
        last: bool,
        mut each: impl FnMut(LogRecord<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let last = last || !piece.len().is_multiple_of(LOG_BLOCK_BYTES);
        for block in piece.chunks(LOG_BLOCK_BYTES) {
            if self.end.is_some() {
                return Ok(());
            }
            self.block(block, &mut each)?;
            self.offset += block.len() as u64;
        }
        if last && self.end.is_none() {
            self.end = Some(match self.pending_from {
                Some(offset) => LogEnd::Truncated { offset },
                None => LogEnd::Clean,
            });
        }
        Ok(())
    }

    /// How the log ended; `None` while more pieces are wanted.
    pub fn end(&self) -> Option<&LogEnd> {
        self.end.as_ref()
    }

    /// Which file this is.
    pub fn kind(&self) -> LogKind {
        self.kind
    }

    /// Offset behind the last whole record.
    pub fn good_until(&self) -> u64 {
        self.good_until
    }

    /// Whether the file is of the recyclable form; `None` before its first record.
    pub fn recycled(&self) -> Option<bool> {
        self.recycled
    }

    /// Whether the file's records are compressed.
    pub fn compressed(&self) -> bool {
        self.decompressor.is_some()
    }

    /// Column families whose keys in this log end in a timestamp, and the timestamp's size.
    pub fn timestamp_sizes(&self) -> &[(u32, u16)] {
        &self.timestamp_sizes
    }

    /// Where the zeros begin that the file ends in so far, if nothing else has come behind them.
    pub fn zeros_from(&self) -> Option<u64> {
        self.zeros_from
    }

    /// What the log says about the one before it.
    pub fn predecessor(&self) -> Option<PredecessorWal> {
        self.predecessor
    }

    fn log_number_low(&self) -> Option<u32> {
        match self.kind {
            LogKind::Wal { number } => Some(number as u32),
            LogKind::Manifest => None,
        }
    }

    fn block<E>(
        &mut self,
        block: &[u8],
        each: &mut impl FnMut(LogRecord<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = 0;
        while at < block.len() {
            let rest = &block[at..];
            let offset = self.offset + at as u64;
            match physical(rest, self.log_number_low()) {
                Physical::Record { kind, payload, bytes } => {
                    let end = offset + bytes as u64;
                    match self.record(kind, payload, offset, end) {
                        Ok(None) => {}
                        Ok(Some(first)) => self.complete(first, payload, end, each)?,
                        Err(end) => self.end = Some(end),
                    }
                    if self.end.is_some() {
                        return Ok(());
                    }
                    at += bytes;
                }
                Physical::Trailer if block.len() == LOG_BLOCK_BYTES => return Ok(()),
                Physical::Trailer | Physical::Zeros if rest.iter().all(|&b| b == 0) => {
                    // The few zeros at the end of a block are the writer's padding (up to 10 in the
                    // recyclable form), everything longer is space nobody has written yet.
                    if rest.len() >= RECYCLABLE_HEADER_BYTES {
                        self.zeros_from.get_or_insert(offset);
                    }
                    return Ok(());
                }
                bad => {
                    self.end = Some(self.end_at(bad, offset, block.len() < LOG_BLOCK_BYTES));
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// What it means that no record could be read at `offset`.
    fn end_at(&self, bad: Physical<'_>, offset: u64, short_block: bool) -> LogEnd {
        let recycled = self.recycled == Some(true);
        // An incomplete logical record in front of the trouble is part of the tail.
        let tail = self.pending_from.unwrap_or(offset);
        match bad {
            Physical::Stale { .. } if self.recycled != Some(false) => {
                LogEnd::StaleTail { offset: tail }
            }
            Physical::Stale { kind } => LogEnd::Damage {
                offset,
                what: format!("recyclable record type {kind} in a log that is not recycled"),
            },
            Physical::Short { .. } if short_block => LogEnd::Truncated { offset: tail },
            Physical::Trailer => LogEnd::Truncated { offset: tail },
            _ if recycled => LogEnd::StaleTail { offset: tail },
            // The header was not written, what should stand behind it was.
            Physical::Zeros => LogEnd::Truncated { offset: tail },
            Physical::Checksum { recyclable: true, .. } if self.recycled.is_none() => {
                LogEnd::StaleTail { offset: tail }
            }
            Physical::Checksum { expected, found, .. } => LogEnd::Damage {
                offset,
                what: format!("record checksum is {found:08x}, expected {expected:08x}"),
            },
            Physical::Short { length } => LogEnd::Damage {
                offset,
                what: format!("record of {length} bytes runs past its 32 KiB block"),
            },
            Physical::Record { kind, .. } => {
                LogEnd::Damage { offset, what: format!("unexpected record type {kind}") }
            }
        }
    }

    /// Takes one valid physical record. `Some(first)`: a logical record ends here, and its bytes
    /// are the payload if `first == offset` began it, else those in `pending`.
    fn record(
        &mut self,
        kind: u8,
        payload: &[u8],
        offset: u64,
        end: u64,
    ) -> Result<Option<u64>, LogEnd> {
        let damage = |offset, what: String| Err(LogEnd::Damage { offset, what });
        if has_recyclable_header(kind) {
            if self.kind == LogKind::Manifest {
                return damage(offset, format!("record type {kind} in a MANIFEST"));
            }
            if *self.recycled.get_or_insert(true) {
            } else {
                return damage(
                    offset,
                    format!("recyclable record type {kind} in a log that is not recycled"),
                );
            }
        } else if (kind::FULL..=kind::LAST).contains(&kind) && *self.recycled.get_or_insert(false) {
            // Bytes from before the file was recycled, written when logs of this database were not.
            return Err(LogEnd::StaleTail { offset: self.pending_from.unwrap_or(offset) });
        }
        match kind {
            kind::FULL..=kind::RECYCLABLE_LAST => self.fragment(kind, payload, offset),
            kind::SET_COMPRESSION => {
                if self.kind == LogKind::Manifest || offset != 0 {
                    return match self.recycled {
                        Some(true) => {
                            Err(LogEnd::StaleTail { offset: self.pending_from.unwrap_or(offset) })
                        }
                        _ => damage(offset, "compression record not at the start of a WAL".into()),
                    };
                }
                match Decoder::new(payload).fixed32("compression type") {
                    Ok(7) => match RecordDecompressor::new() {
                        Ok(decompressor) => self.decompressor = Some(decompressor),
                        Err(what) => return Err(LogEnd::Unsupported { offset, what }),
                    },
                    Ok(other) => {
                        return Err(LogEnd::Unsupported {
                            offset,
                            what: format!("WAL compression type {other}"),
                        });
                    }
                    Err(e) => return damage(offset, e.to_string()),
                }
                self.good_until = end;
                Ok(None)
            }
            kind::TIMESTAMP_SIZE | kind::RECYCLABLE_TIMESTAMP_SIZE => {
                let (entries, rest) = payload.as_chunks::<6>();
                if !rest.is_empty() {
                    return damage(
                        offset,
                        format!("timestamp size record of {} bytes", payload.len()),
                    );
                }
                for e in entries {
                    let family = u32::from_le_bytes([e[0], e[1], e[2], e[3]]);
                    let size = u16::from_le_bytes([e[4], e[5]]);
                    self.timestamp_sizes.push((family, size));
                }
                self.good_until = end;
                Ok(None)
            }
            kind::PREDECESSOR | kind::RECYCLABLE_PREDECESSOR => {
                let mut d = Decoder::new(payload);
                let mut read = || -> crate::Result<PredecessorWal> {
                    Ok(PredecessorWal {
                        number: d.fixed64("predecessor's number")?,
                        size_bytes: d.fixed64("predecessor's size")?,
                        last_sequence: d.fixed64("predecessor's last sequence")?,
                    })
                };
                match read() {
                    Ok(predecessor) => self.predecessor = Some(predecessor),
                    Err(e) => return damage(offset, e.to_string()),
                }
                self.good_until = end;
                Ok(None)
            }
            kind::IGNORABLE.. => {
                self.good_until = end;
                Ok(None)
            }
            _ => damage(offset, format!("unknown record type {kind}")),
        }
    }

    /// Takes one fragment of a logical record, `Full` included.
    fn fragment(&mut self, kind: u8, payload: &[u8], offset: u64) -> Result<Option<u64>, LogEnd> {
        let part = if kind >= kind::RECYCLABLE_FULL {
            kind - (kind::RECYCLABLE_FULL - kind::FULL)
        } else {
            kind
        };
        let begins = part == kind::FULL || part == kind::FIRST;
        if begins {
            // Old writers could leave an empty `First` at the very end of a block and begin again
            // behind it.
            if let Some(from) = self.pending_from
                && !self.pending.is_empty()
            {
                return Err(LogEnd::Damage {
                    offset: from,
                    what: format!("record has no last fragment, another begins at {offset}"),
                });
            }
            self.pending.clear();
            self.pending_from = Some(offset);
            if part == kind::FULL {
                return Ok(Some(offset));
            }
        }
        let Some(from) = self.pending_from else {
            return Err(LogEnd::Damage {
                offset,
                what: format!("fragment of type {kind} without a first one"),
            });
        };
        if let Some(zeros) = self.zeros_from
            && zeros >= from
        {
            return Err(LogEnd::Damage {
                offset: zeros,
                what: format!("zeros inside the record that begins at {from}"),
            });
        }
        if payload.len() > self.record_bytes_max.saturating_sub(self.pending.len()) {
            return Err(LogEnd::Unsupported {
                offset: from,
                what: format!("log record of more than {} bytes", self.record_bytes_max),
            });
        }
        self.pending.extend_from_slice(payload);
        Ok(match part {
            kind::FIRST | kind::MIDDLE => None,
            _ => Some(from),
        })
    }

    /// Hands out the logical record that began at `first` and ends with `payload`.
    fn complete<E>(
        &mut self,
        first: u64,
        payload: &[u8],
        end: u64,
        each: &mut impl FnMut(LogRecord<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.pending_from = None;
        let stored = if self.pending.is_empty() { payload } else { &self.pending };
        let data = match &mut self.decompressor {
            None => stored,
            Some(decompressor) => match decompressor.run(stored, self.record_bytes_max) {
                Ok(data) => data,
                Err(what) => {
                    self.end = Some(LogEnd::Damage { offset: first, what });
                    return Ok(());
                }
            },
        };
        let answer = each(LogRecord { offset: first, data, zeros_before: self.zeros_from.take() });
        self.good_until = end;
        self.pending.clear();
        answer
    }
}

#[cfg(test)]
mod tests;
