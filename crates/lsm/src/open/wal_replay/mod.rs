//! Replays write-ahead logs into memtables, and judges the end of each log.
//!
//! For one log, [`WalReplay::begin`] returns the reader to feed with the file,
//! [`WalReplay::record`] takes its records, [`WalReplay::scan`] tells whether the rest of the file
//! must be searched, and [`WalReplay::end`] judges the end.
//!
//! Replay is refused, with file and offset, unless:
//! - After the cut or the stale bytes at the end of a log there is no valid newer record.
//! - Sequences never go back. They may skip numbers (a writer can bypass the log for some writes),
//!   but not across zeros. `log_chain.rs` judges whether a log continues where the one before
//!   ended.
//! - Only the last group of a log of ours that marks its groups ([`GroupEnd`]) has gaps. It may
//!   have them anywhere: it was written at once and never acknowledged. Its records before the
//!   first gap are taken, those after it are not. A later group after the gap makes it damage.
//! - Batches are whole: a batch that does not parse in a record with a valid checksum is damage
//!   anywhere.
//!
//! Operations of column families that are dropped, that have flushed this log, or that cannot be
//! read (unknown comparator) are skipped, but still count in the sequence.

use std::collections::{BTreeMap, BTreeSet};

use rocksfmt::{
    DamageScan, FileName, GroupEnd, LaterRecord, LogEnd, LogKind, LogReader, LogRecord, LogStart,
    ManifestState, Op, TornGroup, WriteBatch, looks_compressed,
};

use crate::error::{Error, Kind, Result};
use crate::mem::recovered::Sorting;
use crate::mutant::mutant;
use crate::open::blob_tails::{self, BlobTails};
use crate::open::log_chain::LogChain;
use crate::open::recovery_plan::first_log;
use crate::open::wal_replay::memtables::Memtables;

mod memtables;
#[cfg(test)]
mod tests;

/// The result of a replay.
pub(crate) struct Replayed {
    /// The column families with writes in the logs.
    pub memtables: BTreeMap<u32, Sorting>,
    /// The largest sequence of the database.
    pub last_sequence: u64,
    /// Logs that end before their file does, and how, for the record.
    pub tails: Vec<(u64, LogEnd)>,
    /// Operations replayed.
    pub operations: u64,
    /// Change of the number of keys of the default column family, if every batch states it.
    pub keys: Option<i64>,
    /// New writes must never be recovered together with these logs: there are records after the
    /// replayed part, or a log was cut and the next sequence does not continue there.
    pub leftovers: bool,
    /// The column families with writes in the logs but no memtable, because their order of keys is
    /// unknown.
    pub unread: BTreeSet<u32>,
    /// Oddities of the logs that do not prove a loss.
    pub warnings: Vec<String>,
}

/// The position of a record relative to those before it.
#[derive(PartialEq, Eq)]
enum Order {
    Next,
    /// Records before it are missing that were never acknowledged.
    AfterGap,
}

/// The state of a replay.
pub(crate) struct WalReplay {
    pub memtables: Memtables,
    last_sequence: u64,
    /// The sequence that the next batch should begin with, once there was a batch.
    expected: Option<u64>,
    number: u64,
    previous: Option<u64>,
    chain: LogChain,
    first_number: u64,
    first_in_log: bool,
    tails: Vec<(u64, LogEnd)>,
    operations: u64,
    keys: Option<i64>,
    /// Sequences are or may be missing, and with them counted keys.
    gap: bool,
    /// Whether this log has had no record yet.
    empty: bool,
    leftovers: bool,
    /// Whether every group of this log has an end record.
    marked: bool,
    /// A batch had an operation that does nothing, as those of transactions have.
    has_noops: bool,
    /// The blob files that we wrote.
    pub blob_tails: BlobTails,
    /// The error of [`WalReplay::record`] was that of a batch that names values that were never
    /// durable.
    pub lacks_values: bool,
    /// The logs before are not missed.
    is_alone: bool,
    /// The gap in this log, if one was met: the records now being read come after it.
    torn: Option<TornGroup>,
}

impl WalReplay {
    /// A replay on top of the MANIFEST's state, which is full at `memory_max` bytes.
    pub fn new(state: &ManifestState, memory_max: u64) -> WalReplay {
        WalReplay {
            memtables: Memtables::new(state, memory_max),
            last_sequence: state.last_sequence,
            expected: None,
            number: 0,
            previous: None,
            chain: LogChain::new(covered(state)),
            first_number: first_log(state).max(1),
            first_in_log: true,
            tails: Vec::new(),
            operations: 0,
            keys: Some(0),
            gap: false,
            empty: false,
            leftovers: false,
            marked: false,
            has_noops: false,
            blob_tails: BlobTails::new(),
            lacks_values: false,
            is_alone: false,
            torn: None,
        }
    }

    /// Change of the number of keys of the default column family by the batches so far, if known.
    pub fn keys(&self) -> Option<i64> {
        self.keys.filter(|_| !self.gap)
    }

    /// Lets needed logs be empty, as with RocksDB's `avoid_flush_during_recovery`.
    pub fn empty_logs_may_count(&mut self) {
        self.chain.lenient();
    }

    /// Takes each log whatever the logs before it hold.
    pub fn logs_are_alone(&mut self) {
        self.chain.alone();
        self.is_alone = true;
    }

    /// The last sequence so far.
    pub fn last_sequence(&self) -> u64 {
        self.last_sequence
    }

    /// Begins the next log; numbers ascend.
    pub fn begin(&mut self, number: u64) -> LogReader {
        self.number = number;
        self.first_in_log = true;
        self.marked = false;
        self.torn = None;
        // Nothing tells what an empty log before all others should have held.
        self.gap |= self.empty && self.expected.is_none();
        self.empty = true;
        LogReader::new(LogKind::Wal { number })
    }

    /// Takes the next record of the log.
    pub fn record(&mut self, record: LogRecord<'_>) -> Result<()> {
        let number = self.number;
        let format = |e: &rocksfmt::Error| {
            Error::format(format_args!("{} at {}", FileName::Wal(number), record.offset), e)
        };
        let batch = WriteBatch::parse(record.data).map_err(|e| format(&e))?;
        let is_first = std::mem::replace(&mut self.empty, false);
        if let Some(zeros) = record.zeros_before
            && is_first
        {
            return Err(self.zeros_at_start(zeros, &record, &batch));
        }
        let end = GroupEnd::parse(record.data);
        self.marked |= end.is_some() && record.offset == 0 && !mutant("groups_are_not_marked");
        let start = LogStart::parse(record.data).is_some() && record.offset == 0;
        let is_note = start || end.is_some();
        if self.check_order(&batch, &record, is_note)? == Order::AfterGap {
            return self.after_gap(&batch, &record, end);
        }
        if is_note {
            if record.offset == 0 {
                self.chain.starts(self.number, batch.sequence(), self.expected);
            }
            self.note(&batch);
            return Ok(());
        }
        if !self.blob_tails.is_empty() {
            self.find_values(&batch, &record)?;
        }
        let applied = self.memtables.apply(self.number, &batch, format)?;
        self.operations += applied.operations;
        self.has_noops |= batch.ops().any(|op| matches!(op, Ok((_, Op::Noop))));
        self.expected = Some(batch.next_sequence());
        self.first_in_log = false;
        if applied.changes_keys {
            let all = self.keys.zip(applied.keys_noted);
            self.keys = all.and_then(|(all, new)| all.checked_add(new));
        }
        if applied.operations > 0 {
            self.last_sequence = self.last_sequence.max(batch.next_sequence().saturating_sub(1));
        }
        Ok(())
    }

    /// Checks that blob files have the values that a batch names.
    fn find_values(&mut self, batch: &WriteBatch<'_>, record: &LogRecord<'_>) -> Result<()> {
        for op in batch.ops() {
            let Ok((_, Op::BlobIndex { index, .. })) = op else { continue };
            if let Some((what, is_torn)) = blob_tails::lacks(&self.blob_tails, index) {
                self.lacks_values = is_torn;
                let text = format!("{} at {}: {what}", self.name(), record.offset);
                return Err(Error::new(Kind::Corruption, text));
            }
        }
        Ok(())
    }

    /// The error for a log that begins with zeros instead of records.
    fn zeros_at_start(&self, zeros: u64, record: &LogRecord<'_>, batch: &WriteBatch<'_>) -> Error {
        let sequence = match looks_compressed(record.data) {
            true => String::new(),
            false => format!(" with sequence {}", batch.sequence()),
        };
        Error::new(
            Kind::Corruption,
            format!(
                "{} at {zeros}: zeros before a valid record{sequence} at {}",
                self.name(),
                record.offset
            ),
        )
    }

    /// Takes the end of a group or the start of a log, which also states the next sequence at that
    /// time. It may be beyond the rest of the previous log, if that was never durable. Sequences
    /// must not go back.
    fn note(&mut self, batch: &WriteBatch<'_>) {
        let last = batch.sequence().saturating_sub(1);
        self.leftovers |= self.expected.is_some_and(|expected| batch.sequence() > expected);
        self.last_sequence = self.last_sequence.max(last);
        // In the first log nothing else states how the first batch should begin: it may be lost.
        self.expected = self.expected.or(Some(batch.sequence()));
    }

    /// Judges a record after a gap, which is not taken.
    fn after_gap(
        &mut self,
        batch: &WriteBatch<'_>,
        record: &LogRecord<'_>,
        end: Option<GroupEnd>,
    ) -> Result<()> {
        let Some(torn) = &mut self.torn else { return Ok(()) };
        if !torn.is_outlived_by(end) {
            return Ok(());
        }
        let gap = torn.gap();
        Err(Error::new(
            Kind::Corruption,
            format!(
                "{} at {gap}: zeros before a valid record with sequence {} at {}",
                self.name(),
                batch.sequence(),
                record.offset
            ),
        ))
    }

    /// Checks that sequences neither go back nor skip a place where records may have been.
    fn check_order(
        &mut self,
        batch: &WriteBatch<'_>,
        record: &LogRecord<'_>,
        is_note: bool,
    ) -> Result<Order> {
        if self.torn.is_some() {
            return Ok(Order::AfterGap);
        }
        let found = batch.sequence();
        let is_first = self.first_in_log && !is_note;
        let Some(expected) = self.expected else {
            if is_first {
                self.chain.goes_on(self.number, found, None)?;
            }
            return Ok(Order::Next);
        };
        let corrupt = |text: String| Err(Error::new(Kind::Corruption, text));
        if found < expected && self.has_noops && !self.marked {
            // Each batch of such a transaction takes one sequence, whatever it holds.
            return Err(Error::new(
                Kind::Unsupported,
                format!(
                    "{} at {}: the sequences are those of write-prepared transactions, which are \
                     not read",
                    self.name(),
                    record.offset
                ),
            ));
        }
        if found < expected {
            return corrupt(format!(
                "{} at {}: sequence {found} goes back, expected {expected}",
                self.name(),
                record.offset
            ));
        }
        if let Some(zeros) = record.zeros_before
            && found > expected
        {
            if self.marked {
                self.torn = Some(TornGroup::new(zeros));
                return Ok(Order::AfterGap);
            }
            return corrupt(format!(
                "{} at {zeros}: zeros before sequence {found}, expected {expected}",
                self.name()
            ));
        }
        if is_first {
            self.chain.goes_on(self.number, found, Some(expected))?;
        }
        // A sequence number of an ingested table is in no log.
        self.gap |= found > self.chain.next(Some(expected));
        Ok(Order::Next)
    }

    /// The search to make in the rest of the file, from [`DamageScan::start`] on, before
    /// [`WalReplay::end`].
    pub fn scan(&self, reader: &LogReader) -> Option<DamageScan> {
        let offset = match reader.end()? {
            LogEnd::Clean | LogEnd::Unsupported { .. } => return None,
            LogEnd::Truncated { offset }
            | LogEnd::StaleTail { offset }
            | LogEnd::Damage { offset, .. } => *offset,
        };
        let scan = DamageScan::new(reader, offset, self.expected.unwrap_or_default());
        let torn = self.torn.unwrap_or(TornGroup::new(reader.good_until()));
        Some(if self.marked { scan.of_groups(torn) } else { scan })
    }

    /// Judges the end of a log; `scan` is the search that was made, and `later` its result.
    pub fn end(
        &mut self,
        reader: &LogReader,
        scan: Option<&DamageScan>,
        later: Option<LaterRecord>,
    ) -> Result<()> {
        let name = self.name();
        let Some(end) = reader.end() else {
            return Err(Error::new(Kind::Corruption, format!("{name} was not read to its end")));
        };
        self.refuse_contents(reader)?;
        let cut = match end {
            LogEnd::Unsupported { offset, what } => {
                return Err(Error::new(Kind::Unsupported, format!("{name} at {offset}: {what}")));
            }
            LogEnd::Clean => None,
            LogEnd::Truncated { offset } => Some((*offset, "a record cut short")),
            LogEnd::StaleTail { offset } => Some((*offset, "a damaged record")),
            LogEnd::Damage { offset, what } => Some((*offset, what.as_str())),
        };
        if let (Some((offset, what)), Some(later)) = (cut, later) {
            return Err(Error::new(
                Kind::Corruption,
                format!(
                    "{name} at {offset}: {what} before a valid record with sequence {} at {}",
                    later.sequence.unwrap_or_default(),
                    later.offset
                ),
            ));
        }
        let torn = scan.and_then(DamageScan::torn).or(self.torn);
        self.leftovers |= torn.is_some_and(|torn| torn.records() > 0);
        self.note_end(reader, end, torn, cut.map(|(offset, _)| offset));
        Ok(())
    }

    /// Refuses keys with timestamps, and a log without its predecessor.
    fn refuse_contents(&self, reader: &LogReader) -> Result<()> {
        let name = self.name();
        if let Some((family, _)) = reader.timestamp_sizes().first() {
            return Err(Error::new(
                Kind::Unsupported,
                format!("{name}: keys of column family {family} have user-defined timestamps"),
            ));
        }
        if let Some(before) = reader.predecessor()
            && before.number >= self.first_number
            && !self.is_alone
            && self.previous != Some(before.number)
        {
            return Err(Error::new(
                Kind::Corruption,
                format!(
                    "{} is missing: {name} says that it comes before and ends with sequence {}",
                    FileName::Wal(before.number),
                    before.last_sequence
                ),
            ));
        }
        Ok(())
    }

    /// Notes an accepted end of a log, for judging the next one.
    fn note_end(
        &mut self,
        reader: &LogReader,
        end: &LogEnd,
        torn: Option<TornGroup>,
        cut: Option<u64>,
    ) {
        let gap = torn.filter(|_| self.torn.is_some()).map(|torn| torn.gap());
        let hollow = match cut {
            None if gap.is_none() => reader.zeros_from().or(self.empty.then_some(0)),
            _ => None,
        };
        self.chain.ends(self.number, gap.or(cut), hollow, !self.first_in_log);
        if let Some(torn) = self.torn {
            self.tails.push((self.number, LogEnd::Truncated { offset: torn.gap() }));
        } else if *end != LogEnd::Clean {
            self.tails.push((self.number, end.clone()));
        }
        self.previous = Some(self.number);
    }

    /// Ends the replay; the memtables are not sorted yet.
    pub fn finish(mut self) -> Replayed {
        let keys = self.keys();
        // After a cut log only a log that continues exactly is used, also by RocksDB.
        let goes_on = self.expected == Some(self.last_sequence + 1);
        let leftovers = self.leftovers || (self.chain.is_cut() && !goes_on);
        Replayed {
            memtables: self.memtables.take_piece(),
            last_sequence: self.last_sequence,
            tails: self.tails,
            operations: self.operations,
            keys,
            leftovers,
            unread: self.memtables.unread,
            warnings: self.chain.into_warnings(),
        }
    }

    fn name(&self) -> String {
        FileName::Wal(self.number).to_string()
    }
}

/// All sequences up to here are in tables, or never existed.
pub(crate) fn covered(state: &ManifestState) -> u64 {
    let files = state.column_families.values().flat_map(|family| family.files());
    let largest = files.map(|(_, file)| file.largest_sequence).max();
    state.last_sequence.max(largest.unwrap_or(0))
}
