//! Judges whether each write-ahead log continues where the logs before it ended.
//!
//! A healthy directory may have gaps in the sequences between two logs: RocksDB can write without a
//! log, and a flush may leave nothing of the last ones. So a gap is an error only with a proof that
//! a log lost its end or everything:
//! - The log is truncated, ends in zeros, or has no record. RocksDB begins no new log while the one
//!   before is empty, and no opening leaves a needed empty log, except with
//!   `avoid_flush_during_recovery`.
//! - A log of ours states the sequence that it begins with ([`LogStart`](rocksfmt::LogStart), or
//!   the mark of its first group): all earlier ones are in tables or in older logs.
//!
//! Any other gap between logs is a warning.

use rocksfmt::FileName;

use crate::error::{Error, Kind, Result};

/// The state of the check between two logs.
#[derive(Default)]
pub(crate) struct LogChain {
    /// By the MANIFEST, all sequences up to here are in tables, or never existed.
    covered: u64,
    /// Whether empty logs are legitimate.
    lenient: bool,
    /// Whether nothing before a log is missed.
    alone: bool,
    /// The previous log, and the offset where it is cut, if it does not end with a whole record.
    cut: Option<(u64, u64)>,
    /// A log since the last batch that has no records from this offset on, or ends in zeros there.
    hollow: Option<(u64, u64)>,
    /// Sequences that a log says come before it, but that are missing.
    lost: Option<Lost>,
    warnings: Vec<String>,
}

/// Sequences from `first` on are missing before log `before`, which begins with sequence `begins`.
struct Lost {
    first: u64,
    before: u64,
    begins: u64,
    /// The log that lost its end, and the offset of the loss, if known.
    of: Option<(u64, u64)>,
}

impl LogChain {
    /// A check of logs after a MANIFEST that knows all sequences up to `covered`.
    pub fn new(covered: u64) -> LogChain {
        LogChain { covered, ..LogChain::default() }
    }

    /// Treats empty logs as legitimate, not as proof of a loss.
    pub fn lenient(&mut self) {
        self.lenient = true;
    }

    /// Judges no log by those before it: what is missing is known to be lost.
    pub fn alone(&mut self) {
        self.alone = true;
    }

    /// Whether the previous log was cut and nothing has continued exactly there.
    pub fn is_cut(&self) -> bool {
        self.cut.is_some()
    }

    /// Notes that a log of ours begins with sequence `begins`.
    pub fn starts(&mut self, log: u64, begins: u64, expected: Option<u64>) {
        let first = self.next(expected);
        if begins > first && self.lost.is_none() && !self.alone {
            let of = self.cut.or(self.hollow);
            self.lost = Some(Lost { first, before: log, begins, of });
        }
    }

    /// Judges the first batch of a log, which begins with sequence `found`; the logs before end
    /// before `expected`.
    ///
    /// # Errors
    /// [`Kind::Corruption`] if sequences before it are missing.
    pub fn goes_on(&mut self, log: u64, found: u64, expected: Option<u64>) -> Result<()> {
        let corrupt = |text: String| Err(Error::new(Kind::Corruption, text));
        if self.alone {
            return Ok(());
        }
        let (name, next) = (FileName::Wal(log), self.next(expected));
        let exact = expected.unwrap_or(next);
        if let Some((cut, offset)) = self.cut
            && found > exact
        {
            return corrupt(format!(
                "{} ends at {offset} before sequence {exact}, but {name} continues with {found}",
                FileName::Wal(cut),
            ));
        }
        if found > next
            && let Some((hollow, offset)) = self.hollow
            && !self.lenient
        {
            return corrupt(format!(
                "{} is empty from offset {offset} on, where sequence {next} is missing, but {name} continues with {found}",
                FileName::Wal(hollow),
            ));
        }
        if let Some(Lost { first, before, begins, of }) = self.lost {
            let of = match of {
                Some((of, offset)) => format!("{} at {offset}", FileName::Wal(of)),
                None => format!("{} at 0", FileName::Wal(before)),
            };
            return corrupt(format!(
                "{of}: sequences from {first} on are missing: {} begins with {begins}",
                FileName::Wal(before),
            ));
        }
        if found > next {
            self.warnings.push(format!(
                "{name} begins with sequence {found}, but tables and older logs end before {next}: the writes \
                 between are lost, unless they were written without a log (disableWAL)"
            ));
        }
        self.hollow = None;
        Ok(())
    }

    /// Notes the end of a log: `cut` within a record, or after whole records with `hollow` space
    /// after them.
    pub fn ends(&mut self, log: u64, cut: Option<u64>, hollow: Option<u64>, had_batches: bool) {
        self.cut = match cut {
            Some(offset) => Some((log, offset)),
            // A log without batches does not close the gap after the one before.
            None if !had_batches => self.cut,
            None => None,
        };
        self.hollow = self.hollow.or(hollow.map(|offset| (log, offset)));
    }

    /// Oddities that do not prove a loss.
    pub fn into_warnings(self) -> Vec<String> {
        self.warnings
    }

    /// The first sequence that is neither in tables nor in logs so far.
    pub fn next(&self, expected: Option<u64>) -> u64 {
        expected.unwrap_or(0).max(self.covered + 1)
    }
}
