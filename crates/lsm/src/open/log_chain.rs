//! Whether each write-ahead log goes on where those before it ended.
//!
//! Sequences between two logs may be missing in a healthy directory: RocksDB writes without a log
//! where it is told to, and a flush may leave nothing of the last ones. So a gap is refused only
//! with a proof that a log lacks its end, or all it had:
//! - it was cut, ends in zeros, or has no record at all. RocksDB begins no new log while the one
//!   before is empty, and no opening leaves an empty one that still counts, but with
//!   `avoid_flush_during_recovery`;
//! - a log of ours says with which sequence it begins ([`LogStart`](rocksfmt::LogStart), or the
//!   mark of its first group): all before it are in tables or in older logs.
//!
//! Every other gap between logs is a warning.

use rocksfmt::FileName;

use crate::error::{Error, Kind, Result};

/// See the module text.
#[derive(Default)]
pub(crate) struct LogChain {
    /// All sequences up to here are in tables, or never were, as the MANIFEST says.
    covered: u64,
    /// Empty logs may stay and count.
    lenient: bool,
    /// The log before ended in something else than a whole record, at this offset.
    cut: Option<(u64, u64)>,
    /// A log since the last batch that has no record, or ends in zeros, at this offset.
    hollow: Option<(u64, u64)>,
    /// What a log says is before it, and is not.
    lost: Option<Lost>,
    warnings: Vec<String>,
}

/// Sequences from `first` on are missing before the log `before`, which begins with `begins`.
struct Lost {
    first: u64,
    before: u64,
    begins: u64,
    /// The log that lacks its end, from an offset on, if it is there.
    of: Option<(u64, u64)>,
}

impl LogChain {
    /// Of logs behind a MANIFEST that knows all sequences up to `covered`.
    pub fn new(covered: u64) -> LogChain {
        LogChain { covered, ..LogChain::default() }
    }

    /// Empty logs are no proof: see the module text.
    pub fn lenient(&mut self) {
        self.lenient = true;
    }

    /// The log before was cut, and nothing has gone on exactly there.
    pub fn is_cut(&self) -> bool {
        self.cut.is_some()
    }

    /// A log of ours says with which sequence it begins.
    pub fn starts(&mut self, log: u64, begins: u64, expected: Option<u64>) {
        let first = self.next(expected);
        if begins > first && self.lost.is_none() {
            let of = self.cut.or(self.hollow);
            self.lost = Some(Lost { first, before: log, begins, of });
        }
    }

    /// The first batch of a log begins with `found`, where those before end before `expected`.
    ///
    /// # Errors
    /// [`Kind::Corruption`] where something is missing in front of it.
    pub fn goes_on(&mut self, log: u64, found: u64, expected: Option<u64>) -> Result<()> {
        let corrupt = |text: String| Err(Error::new(Kind::Corruption, text));
        let (name, next) = (FileName::Wal(log), self.next(expected));
        let exact = expected.unwrap_or(next);
        if let Some((cut, offset)) = self.cut
            && found > exact
        {
            return corrupt(format!(
                "{} ends at {offset} before sequence {exact}, and {name} goes on with {found}",
                FileName::Wal(cut),
            ));
        }
        if found > next
            && let Some((hollow, offset)) = self.hollow
            && !self.lenient
        {
            return corrupt(format!(
                "{} has nothing from {offset} on, where sequence {next} is missing, and {name} goes on with {found}",
                FileName::Wal(hollow),
            ));
        }
        if let Some(Lost { first, before, begins, of }) = self.lost {
            let of = match of {
                Some((of, offset)) => format!("{} at {offset}", FileName::Wal(of)),
                None => format!("{} at 0", FileName::Wal(before)),
            };
            return corrupt(format!(
                "{of}: sequences from {first} on are missing, {} begins with {begins}",
                FileName::Wal(before),
            ));
        }
        if found > next {
            self.warnings.push(format!(
                "{name} begins with sequence {found}, and what tables and older logs have ends before {next}: what \
                 was between is lost, if it was not written without a log (disableWAL)"
            ));
        }
        self.hollow = None;
        Ok(())
    }

    /// A log ends: `cut` in the middle of a record, or after whole ones with `hollow` room behind
    /// them.
    pub fn ends(&mut self, log: u64, cut: Option<u64>, hollow: Option<u64>, had_batches: bool) {
        self.cut = match cut {
            Some(offset) => Some((log, offset)),
            // A log without any batch does not close the gap behind the one before.
            None if !had_batches => self.cut,
            None => None,
        };
        self.hollow = self.hollow.or(hollow.map(|offset| (log, offset)));
    }

    /// What was odd and is no proof of a loss.
    pub fn into_warnings(self) -> Vec<String> {
        self.warnings
    }

    /// The first sequence that is neither in tables nor in logs so far.
    fn next(&self, expected: Option<u64>) -> u64 {
        expected.unwrap_or(0).max(self.covered + 1)
    }
}
