//! Replays write-ahead logs into memtables, and decides what the end of each log means.
//!
//! One log: [`WalReplay::begin`] gives the reader to feed with the file, [`WalReplay::record`] takes its records,
//! [`WalReplay::scan`] says whether the rest of the file must be searched, and [`WalReplay::end`] judges.
//!
//! What must hold, or replay is refused with file and offset:
//! - A log may be cut short or end in stale bytes, but nothing valid and newer may stand behind that.
//! - Sequences never go back. They may jump (a writer may skip the log for some writes), but not over a zeroed
//!   stretch, and not from a log that was cut short or has a stale tail to the next one (RocksDB drops the
//!   next one then).
//! - Batches are whole: a record whose checksum holds and whose batch does not parse is damage anywhere.
//!
//! Operations for column families that are dropped, that have flushed this log, or that cannot be read anyway
//! (an unknown comparator) are skipped, and still take their sequence.

use std::collections::BTreeMap;

use rocksfmt::{
    DamageScan, FileName, LaterRecord, LogEnd, LogKind, LogReader, LogRecord, ManifestState, Op,
    WriteBatch,
};

use crate::error::{Error, Kind, Result};
use crate::recovered::{Recovered, RecoveredBuilder};
use crate::recovery_plan::first_log;

/// What replay leads to.
pub(crate) struct Replayed {
    /// The column families that have writes in the logs.
    pub memtables: BTreeMap<u32, Recovered>,
    /// The largest sequence of the database.
    pub last_sequence: u64,
    /// Logs that end before their file does, and where, for the record.
    pub tails: Vec<(u64, LogEnd)>,
    /// Operations replayed.
    pub operations: u64,
}

struct Family {
    log_number: u64,
    /// `None` for a family whose order of keys is unknown.
    builder: Option<RecoveredBuilder>,
}

/// See the module text.
pub(crate) struct WalReplay {
    families: BTreeMap<u32, Family>,
    memory_max: u64,
    memory: u64,
    last_sequence: u64,
    /// The sequence the next batch normally begins with, once there was a batch.
    expected: Option<u64>,
    number: u64,
    previous: Option<u64>,
    /// The log before ended in something else than a whole record, at this offset.
    cut: Option<(u64, u64)>,
    first_number: u64,
    first_in_log: bool,
    tails: Vec<(u64, LogEnd)>,
    operations: u64,
}

impl WalReplay {
    /// A replay on top of what the MANIFEST says, holding at most `memory_max` bytes.
    pub fn new(state: &ManifestState, memory_max: u64) -> WalReplay {
        let family = |cf: &rocksfmt::ColumnFamily| Family {
            log_number: cf.log_number,
            builder: cf.comparator().ok().map(RecoveredBuilder::new),
        };
        WalReplay {
            families: state.column_families.iter().map(|(&id, cf)| (id, family(cf))).collect(),
            memory_max,
            memory: 0,
            last_sequence: state.last_sequence,
            expected: None,
            number: 0,
            previous: None,
            cut: None,
            first_number: first_log(state).max(1),
            first_in_log: true,
            tails: Vec::new(),
            operations: 0,
        }
    }

    /// Begins the next log; numbers ascend.
    pub fn begin(&mut self, number: u64) -> LogReader {
        self.number = number;
        self.first_in_log = true;
        LogReader::new(LogKind::Wal { number })
    }

    /// Takes the next record of the log.
    pub fn record(&mut self, record: LogRecord<'_>) -> Result<()> {
        let place = |this: &WalReplay| format!("{} at {}", this.name(), record.offset);
        let format = |this: &WalReplay, e: rocksfmt::Error| Error::format(place(this), &e);
        let batch = WriteBatch::parse(record.data).map_err(|e| format(self, e))?;
        self.check_order(&batch, &record)?;
        let before = self.operations;
        for op in batch.ops() {
            let (sequence, op) = op.map_err(|e| format(self, e))?;
            if let Op::Marker(marker) = op {
                return Err(format(self, marker.refused()));
            }
            let Some(id) = op.column_family() else { continue };
            self.operations += 1;
            let Some(family) = self.families.get_mut(&id) else { continue };
            let Some(builder) = &mut family.builder else { continue };
            if self.number < family.log_number {
                continue;
            }
            let held = builder.memory();
            builder.apply(sequence, &op)?;
            self.memory += (builder.memory() - held) as u64;
        }
        if self.memory > self.memory_max {
            return Err(Error::new(
                Kind::Memory,
                format!(
                    "{}: the write-ahead logs need more than {} bytes of memory; a larger memory \
                     limit, or opening and closing the database with RocksDB, helps",
                    place(self),
                    self.memory_max
                ),
            ));
        }
        self.expected = Some(batch.next_sequence());
        self.first_in_log = false;
        if self.operations > before {
            self.last_sequence = self.last_sequence.max(batch.next_sequence().saturating_sub(1));
        }
        Ok(())
    }

    /// Sequences must not go back, nor jump over a place where records may have been.
    fn check_order(&mut self, batch: &WriteBatch<'_>, record: &LogRecord<'_>) -> Result<()> {
        let Some(expected) = self.expected else { return Ok(()) };
        let found = batch.sequence();
        let corrupt = |text: String| Err(Error::new(Kind::Corruption, text));
        if found < expected {
            return corrupt(format!(
                "{} at {}: sequence {found} goes back, expected {expected}",
                self.name(),
                record.offset
            ));
        }
        if found == expected {
            return Ok(());
        }
        if let Some(zeros) = record.zeros_before {
            return corrupt(format!(
                "{}: zeros at {zeros}, and sequence {found} behind them where {expected} was expected",
                self.name()
            ));
        }
        if let Some((number, offset)) = self.cut
            && self.first_in_log
        {
            return corrupt(format!(
                "{} ends at {offset} before sequence {expected}, and {} goes on with {found}",
                FileName::Wal(number),
                self.name()
            ));
        }
        Ok(())
    }

    /// The search to make in the rest of the file, from [`DamageScan::start`] on, before [`WalReplay::end`].
    pub fn scan(&self, reader: &LogReader) -> Option<DamageScan> {
        let offset = match reader.end()? {
            LogEnd::Clean | LogEnd::Unsupported { .. } => return None,
            LogEnd::Truncated { offset }
            | LogEnd::StaleTail { offset }
            | LogEnd::Damage { offset, .. } => *offset,
        };
        Some(DamageScan::new(reader, offset, self.expected.unwrap_or_default()))
    }

    /// Judges the end of a log; `later` is what the scan found.
    pub fn end(&mut self, reader: &LogReader, later: Option<LaterRecord>) -> Result<()> {
        let name = self.name();
        let Some(end) = reader.end() else {
            return Err(Error::new(Kind::Corruption, format!("{name} was not read to its end")));
        };
        if let Some((family, _)) = reader.timestamp_sizes().first() {
            return Err(Error::new(
                Kind::Unsupported,
                format!("{name}: keys of column family {family} have user-defined timestamps"),
            ));
        }
        if let Some(before) = reader.predecessor()
            && before.number >= self.first_number
            && self.previous != Some(before.number)
        {
            return Err(Error::new(
                Kind::Corruption,
                format!(
                    "{} is missing: {name} says it comes before it and ends with sequence {}",
                    FileName::Wal(before.number),
                    before.last_sequence
                ),
            ));
        }
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
                    "{name} at {offset}: {what}, and a valid record with sequence {} behind it at {}",
                    later.sequence.unwrap_or_default(),
                    later.offset
                ),
            ));
        }
        self.cut = match cut {
            Some((offset, _)) => Some((self.number, offset)),
            // A log without any record does not close the gap behind the one before.
            None if self.first_in_log => self.cut,
            None => None,
        };
        if *end != LogEnd::Clean {
            self.tails.push((self.number, end.clone()));
        }
        self.previous = Some(self.number);
        Ok(())
    }

    /// Sorts what was replayed.
    pub fn finish(self) -> Replayed {
        let mut memtables = BTreeMap::new();
        for (id, family) in self.families {
            if let Some(builder) = family.builder.filter(|builder| !builder.is_empty()) {
                memtables.insert(id, builder.freeze());
            }
        }
        Replayed {
            memtables,
            last_sequence: self.last_sequence,
            tails: self.tails,
            operations: self.operations,
        }
    }

    fn name(&self) -> String {
        FileName::Wal(self.number).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocksfmt::ManifestReplay;
    use rocksfmt::testing::{BatchBuilder, EditBuilder, LogBuilder};

    fn state() -> ManifestState {
        let mut replay = ManifestReplay::new();
        for edit in [
            EditBuilder::new().required(4, 50, 100),
            EditBuilder::new()
                .add_column_family("later", "leveldb.BytewiseComparator")
                .numbers(2, &[6])
                .column_family(1),
            EditBuilder::new()
                .add_column_family("odd", "my.Comparator")
                .numbers(2, &[4])
                .column_family(2),
        ] {
            replay.record(&edit.finish()).unwrap();
        }
        replay.finish().unwrap()
    }

    fn put(sequence: u64, cf: u32) -> Vec<u8> {
        BatchBuilder::new(sequence).put(cf, &sequence.to_be_bytes(), b"value").finish()
    }

    fn log(sequences: impl IntoIterator<Item = u64>) -> Vec<u8> {
        let mut log = LogBuilder::legacy();
        for sequence in sequences {
            log.append(&put(sequence, 0));
        }
        log.finish()
    }

    fn replay_with(memory_max: u64, logs: &[(u64, Vec<u8>)]) -> Result<Replayed> {
        let mut replay = WalReplay::new(&state(), memory_max);
        for (number, bytes) in logs {
            let mut reader = replay.begin(*number);
            reader.feed(bytes, true, |record| replay.record(record))?;
            let later = replay
                .scan(&reader)
                .and_then(|mut scan| scan.push(scan.start(), &bytes[scan.start() as usize..]));
            replay.end(&reader, later)?;
        }
        Ok(replay.finish())
    }

    fn replay(logs: &[(u64, Vec<u8>)]) -> Result<Replayed> {
        replay_with(1 << 30, logs)
    }

    fn refused(logs: &[(u64, Vec<u8>)], kind: Kind, text: &str) {
        let Err(e) = replay(logs) else { panic!("replayed, expected {text:?}") };
        assert!(e.to_string().contains(text), "{e} does not say {text:?}");
        assert_eq!(e.kind(), kind);
    }

    fn len(replayed: &Replayed, cf: u32) -> usize {
        replayed.memtables.get(&cf).map_or(0, Recovered::len)
    }

    #[test]
    fn writes_of_all_logs_are_found() {
        let replayed = replay(&[(4, log(101..200)), (7, log(200..300)), (9, vec![])]).unwrap();
        assert_eq!(len(&replayed, 0), 199);
        assert_eq!(replayed.last_sequence, 299);
        assert_eq!(replayed.operations, 199);
        assert!(replayed.tails.is_empty());
        let none = replay(&[]).unwrap();
        assert_eq!((none.last_sequence, none.memtables.len()), (100, 0));
    }

    /// Trap 40: what is skipped still takes its sequence.
    #[test]
    fn operations_count_for_families_that_have_not_flushed_the_log() {
        let batch = |sequence| {
            BatchBuilder::new(sequence)
                .put(1, b"skipped in log 4", b"")
                .put(9, b"dropped", b"")
                .put(2, b"unknown order", b"")
                .put(0, b"k", b"v")
                .finish()
        };
        let mut four = LogBuilder::legacy();
        four.append(&batch(101));
        let mut six = LogBuilder::legacy();
        six.append(&batch(105));
        let replayed = replay(&[(4, four.finish()), (6, six.finish())]).unwrap();
        assert_eq!((len(&replayed, 0), len(&replayed, 1), len(&replayed, 2)), (2, 1, 0));
        let (packed, _) = replayed.memtables[&0].get(b"k", 106).unwrap();
        assert_eq!(packed >> 8, 104);
        assert_eq!(replayed.last_sequence, 108);
    }

    #[test]
    fn a_batch_without_operations_changes_no_sequence() {
        let mut log = LogBuilder::legacy();
        log.append(&put(101, 0));
        log.append(&BatchBuilder::new(102).log_data(b"padding").finish());
        log.append(&put(102, 0));
        let replayed = replay(&[(4, log.finish())]).unwrap();
        assert_eq!((len(&replayed, 0), replayed.last_sequence), (2, 102));
        let mut empty = LogBuilder::legacy();
        empty.append(&BatchBuilder::new(500).log_data(b"padding").finish());
        assert_eq!(replay(&[(4, empty.finish())]).unwrap().last_sequence, 100);
    }

    #[test]
    fn sequences_may_jump_but_not_go_back() {
        let replayed = replay(&[(4, log([101, 105, 106]))]).unwrap();
        assert_eq!(replayed.last_sequence, 106);
        refused(
            &[(4, log([101, 102, 101]))],
            Kind::Corruption,
            "000004.log at 70: sequence 101 goes back, expected 103",
        );
        refused(&[(4, log(101..110)), (5, log([105]))], Kind::Corruption, "000005.log at 0");
    }

    #[test]
    fn a_torn_tail_is_the_end_if_the_next_log_goes_on_exactly() {
        let mut torn = log(101..110);
        torn.truncate(torn.len() - 5);
        let replayed = replay(&[(4, torn.clone()), (5, log(109..112))]).unwrap();
        assert_eq!((len(&replayed, 0), replayed.last_sequence), (11, 111));
        assert_eq!(replayed.tails.len(), 1);
        let text = "before sequence 109, and 000005.log goes on with 110";
        refused(&[(4, torn.clone()), (5, log(110..112))], Kind::Corruption, text);
        let text = "before sequence 109, and 000006.log goes on with 110";
        refused(&[(4, torn.clone()), (5, vec![]), (6, log(110..112))], Kind::Corruption, text);
        // The last record of the last log is cut: nothing contradicts it.
        assert_eq!(replay(&[(4, torn)]).unwrap().last_sequence, 108);
    }

    #[test]
    fn damage_in_front_of_a_valid_record_is_refused_with_both_offsets() {
        let mut bytes = log(101..110);
        bytes[35 * 3 + 20] ^= 1;
        refused(
            &[(4, bytes)],
            Kind::Corruption,
            "and a valid record with sequence 105 behind it at 140",
        );
        let mut last = log(101..110);
        let at = last.len() - 1;
        last[at] ^= 1;
        assert_eq!(replay(&[(4, last)]).unwrap().last_sequence, 108);
    }

    #[test]
    fn a_recycled_logs_stale_tail_is_its_end() {
        let stale = |number, sequences: std::ops::Range<u64>| {
            let mut log = LogBuilder::recyclable(number);
            for sequence in sequences {
                log.append(&put(sequence, 0));
            }
            log.finish()
        };
        let mut file = stale(2, 1..50);
        let new = stale(4, 101..110);
        file[..new.len()].copy_from_slice(&new);
        let replayed = replay(&[(4, file.clone()), (5, log(110..112))]).unwrap();
        assert_eq!(replayed.last_sequence, 111);
        // Stale bytes look like a torn record, so nothing may be missing behind them.
        let text = "before sequence 110, and 000005.log goes on with 120";
        refused(&[(4, file), (5, log(120..122))], Kind::Corruption, text);
    }

    #[test]
    fn a_zeroed_stretch_must_not_hide_writes() {
        let mut gap = LogBuilder::legacy();
        let long = BatchBuilder::new(101).put(0, b"k", &vec![b'x'; 32_700]).finish();
        gap.append(&long);
        let rest = 32_768 - gap.bytes().len();
        gap.raw(&vec![0; 32_768 + rest]);
        let mut lost = gap.clone();
        gap.append(&put(102, 0));
        assert_eq!(replay(&[(4, gap.finish())]).unwrap().last_sequence, 102);
        lost.append(&put(103, 0));
        refused(&[(4, lost.finish())], Kind::Corruption, "and sequence 103 behind them where 102");
    }

    #[test]
    fn batches_that_do_not_parse_are_refused_wherever_they_are() {
        for (batch, kind, text) in [
            (put(101, 0)[..20].to_vec(), Kind::Corruption, "000004.log at 0"),
            (vec![1; 11], Kind::Corruption, "shorter than its header"),
            (BatchBuilder::new(101).finish_with_count(1), Kind::Corruption, "announces 1"),
            (
                BatchBuilder::new(101).record(0x77, &[]).finish(),
                Kind::Unsupported,
                "unknown write batch tag 0x77",
            ),
            (BatchBuilder::new(101).record(0x09, &[]).finish(), Kind::Unsupported, "BeginPrepare"),
        ] {
            let mut log = LogBuilder::legacy();
            log.append(&batch);
            refused(&[(4, log.finish())], kind, text);
        }
    }

    #[test]
    fn timestamps_and_unknown_compression_are_refused_by_name() {
        let mut log = LogBuilder::legacy();
        log.meta(10, &[3, 0, 0, 0, 8, 0]).append(&put(101, 0));
        refused(&[(4, log.finish())], Kind::Unsupported, "user-defined timestamps");
        let mut log = LogBuilder::legacy();
        log.meta(9, &[4, 0, 0, 0]).append(&put(101, 0));
        refused(&[(4, log.finish())], Kind::Unsupported, "WAL compression type 4");
    }

    #[test]
    fn a_log_that_names_a_missing_predecessor_is_refused() {
        let after = |number: u64| {
            let mut log = LogBuilder::legacy();
            let fields = [number, 1000, 100].map(u64::to_le_bytes).concat();
            log.meta(130, &fields).append(&put(101, 0));
            log.finish()
        };
        refused(&[(9, after(7))], Kind::Corruption, "000007.log is missing");
        // Older than anything needed.
        assert_eq!(replay(&[(9, after(3))]).unwrap().last_sequence, 101);
        assert_eq!(replay(&[(7, vec![]), (9, after(7))]).unwrap().last_sequence, 101);
    }

    #[test]
    fn memory_is_bounded() {
        let Err(e) = replay_with(10_000, &[(4, log(101..5000))]) else {
            panic!("replayed without bound")
        };
        assert_eq!(e.kind(), Kind::Memory);
        assert!(e.to_string().contains("10000 bytes"), "{e}");
    }
}
