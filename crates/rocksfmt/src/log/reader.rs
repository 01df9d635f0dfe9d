//! Reads RocksDB's log format, the container of write-ahead logs and MANIFESTs.
//!
//! A log is a sequence of 32 KiB blocks. Physical records never cross a block; a logical record is
//! one `Full` record or `First`, `Middle`…, `Last`. To read a file:
//!
//! 1. [`LogReader::new`] takes the kind of file: a WAL with its number, or a MANIFEST.
//! 2. [`LogReader::feed`] takes the file in consecutive pieces (whole blocks, the last one may be
//!    shorter) and calls back once per logical record. Only a record that is split over pieces or
//!    blocks is copied.
//! 3. After the last piece, or as soon as reading cannot continue, [`LogReader::end`] says how the
//!    log ended.
//!
//! The way a log ends matters most. A killed writer leaves a truncated record
//! ([`LogEnd::Truncated`]). A recycled file (an old log overwritten from its start) continues with
//! old bytes, which fail their checksum or carry another log number ([`LogEnd::StaleTail`]).
//! Preallocated space reads as zeros ([`LogEnd::Clean`]). None of these is damage. A record that
//! fails its checksum in a file that was never recycled may be ([`LogEnd::Damage`]);
//! [`DamageScan`](crate::DamageScan) finds out whether a valid record follows it.
//!
//! A zeroed stretch before further records is skipped, as in RocksDB, but reported in the next
//! record's [`LogRecord::zeros_before`]: if its sequence does not continue the one before the
//! stretch, writes are lost.

use crate::coding::Decoder;
use crate::log::physical::{
    LOG_BLOCK_BYTES, Physical, RECYCLABLE_HEADER_BYTES, has_recyclable_header, kind, physical,
};
use crate::log::zstd::RecordDecompressor;

/// The default bound on a logical record. RocksDB's own batches end at 4 GiB, but a few bytes of
/// compressed input must not decide how much memory a record takes.
pub const LOG_RECORD_BYTES_MAX: usize = 1 << 30;

/// The kind of a log file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogKind {
    /// A write-ahead log with the number in its name, by which records of a recycled file are
    /// recognised.
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
    /// The appended bytes, decompressed.
    pub data: &'a [u8],
    /// The start of a zeroed stretch that was skipped before this record.
    pub zeros_before: Option<u64>,
}

/// How a log ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogEnd {
    /// With a whole record, perhaps followed by zeros.
    Clean,
    /// With a truncated record at `offset`, as a killed writer leaves it.
    Truncated {
        /// The start of the truncated record.
        offset: u64,
    },
    /// In a recycled file, with the file's old bytes from `offset` on.
    StaleTail {
        /// The start of the old bytes.
        offset: u64,
    },
    /// The bytes at `offset` contradict the format.
    Damage {
        /// The start of the bad record.
        offset: u64,
        /// Expected against found.
        what: String,
    },
    /// A valid record needs a feature that this reader does not know; never a torn tail.
    Unsupported {
        /// The start of that record.
        offset: u64,
        /// The feature's name.
        what: String,
    },
}

/// A WAL's statement about the log before it (RocksDB 9.11 and later).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredecessorWal {
    /// Its number.
    pub number: u64,
    /// Its size in bytes when it was closed.
    pub size_bytes: u64,
    /// The last sequence written to it.
    pub last_sequence: u64,
}

/// Reads the logical records of one log; see the module's text.
#[derive(Debug)]
pub struct LogReader {
    kind: LogKind,
    record_bytes_max: usize,
    /// File offset of the next byte to feed.
    offset: u64,
    /// End of the last logical record handed out, or of the last record without data.
    good_until: u64,
    /// Whether the records have the recyclable form; unknown before the first one.
    recycled: Option<bool>,
    /// Start of a logical record whose last fragment is still missing; its bytes are in `pending`.
    pending_from: Option<u64>,
    pending: Vec<u8>,
    zeros_from: Option<u64>,
    decompressor: Option<RecordDecompressor>,
    timestamp_sizes: Vec<(u32, u16)>,
    predecessor: Option<PredecessorWal>,
    end: Option<LogEnd>,
}

/// Whether a log with the first block `start` has the recyclable form, in which each record carries
/// its log's number: a reader then never takes it for a record of a log that overwrites the file.
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

    /// Sets another bound on the size of a logical record.
    pub fn with_record_bytes_max(mut self, bytes: usize) -> LogReader {
        self.record_bytes_max = bytes;
        self
    }

    /// Takes the next piece of the file and calls `each` for every logical record that ends in it.
    ///
    /// Every piece except the last must be a multiple of [`LOG_BLOCK_BYTES`]; any other piece
    /// counts as the last, whatever `last` says. Stops at the callback's first error and returns
    /// it. Once [`LogReader::end`] is known further pieces are ignored.
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

    /// How the log ended; `None` while more pieces are needed.
    pub fn end(&self) -> Option<&LogEnd> {
        self.end.as_ref()
    }

    /// The kind of file.
    pub fn kind(&self) -> LogKind {
        self.kind
    }

    /// The offset after the last whole record.
    pub fn good_until(&self) -> u64 {
        self.good_until
    }

    /// Whether the file has the recyclable form; `None` before its first record.
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

    /// The start of the zeros at the end of the data read so far, if there are any.
    pub fn zeros_from(&self) -> Option<u64> {
        self.zeros_from
    }

    /// What the log states about its predecessor.
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
                    // A few zeros at the end of a block are the writer's padding (up to 10 in the
                    // recyclable form); more are unwritten space.
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

    /// How the log ends if `offset` has no valid record.
    fn end_at(&self, bad: Physical<'_>, offset: u64, short_block: bool) -> LogEnd {
        let recycled = self.recycled == Some(true);
        // An incomplete logical record before it is part of the tail.
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
            // The payload was written, its header was not.
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

    /// Takes one valid physical record. `Some(first)`: a logical record ends here. If it also began
    /// here (`first == offset`), its bytes are the payload, else those in `pending`.
    fn record(
        &mut self,
        kind: u8,
        payload: &[u8],
        offset: u64,
        end: u64,
    ) -> Result<Option<u64>, LogEnd> {
        self.check_form(kind, offset)?;
        if (kind::FULL..=kind::RECYCLABLE_LAST).contains(&kind) {
            return self.fragment(kind, payload, offset);
        }
        self.control(kind, payload, offset)?;
        self.good_until = end;
        Ok(None)
    }

    /// Checks that a record type has the form of the log's other records.
    fn check_form(&mut self, kind: u8, offset: u64) -> Result<(), LogEnd> {
        let damage = |what| Err(LogEnd::Damage { offset, what });
        if has_recyclable_header(kind) {
            if self.kind == LogKind::Manifest {
                return damage(format!("record type {kind} in a MANIFEST"));
            }
            if !*self.recycled.get_or_insert(true) {
                return damage(format!(
                    "recyclable record type {kind} in a log that is not recycled"
                ));
            }
        } else if (kind::FULL..=kind::LAST).contains(&kind) && *self.recycled.get_or_insert(false) {
            // Bytes from before the file was recycled, when the database's logs had the legacy
            // form.
            return Err(LogEnd::StaleTail { offset: self.pending_from.unwrap_or(offset) });
        }
        Ok(())
    }

    /// Takes a record that carries no data of the writer.
    fn control(&mut self, kind: u8, payload: &[u8], offset: u64) -> Result<(), LogEnd> {
        let damage = |what| Err(LogEnd::Damage { offset, what });
        match kind {
            kind::SET_COMPRESSION => self.set_compression(payload, offset),
            kind::TIMESTAMP_SIZE | kind::RECYCLABLE_TIMESTAMP_SIZE => {
                let (entries, rest) = payload.as_chunks::<6>();
                if !rest.is_empty() {
                    return damage(format!("timestamp size record of {} bytes", payload.len()));
                }
                for e in entries {
                    let family = u32::from_le_bytes([e[0], e[1], e[2], e[3]]);
                    let size = u16::from_le_bytes([e[4], e[5]]);
                    self.timestamp_sizes.push((family, size));
                }
                Ok(())
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
                    Err(e) => return damage(e.to_string()),
                }
                Ok(())
            }
            kind::IGNORABLE.. => Ok(()),
            _ => damage(format!("unknown record type {kind}")),
        }
    }

    fn set_compression(&mut self, payload: &[u8], offset: u64) -> Result<(), LogEnd> {
        let damage = |what| Err(LogEnd::Damage { offset, what });
        if self.kind == LogKind::Manifest || offset != 0 {
            return match self.recycled {
                Some(true) => {
                    Err(LogEnd::StaleTail { offset: self.pending_from.unwrap_or(offset) })
                }
                _ => damage("compression record not at the start of a WAL".to_owned()),
            };
        }
        match Decoder::new(payload).fixed32("compression type") {
            Ok(7) => match RecordDecompressor::new() {
                Ok(decompressor) => self.decompressor = Some(decompressor),
                Err(what) => return Err(LogEnd::Unsupported { offset, what }),
            },
            Ok(other) => {
                let what = format!("WAL compression type {other}");
                return Err(LogEnd::Unsupported { offset, what });
            }
            Err(e) => return damage(e.to_string()),
        }
        Ok(())
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
            // after it.
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
