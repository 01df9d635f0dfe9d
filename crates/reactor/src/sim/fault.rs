//! Faults of simulated files, layer by layer; see the module text of `sim`.

use std::ops::Range;
use std::path::Path;

use super::rng::Rng;

/// The accesses that a fault of the medium strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Syncs of files.
    Sync,
}

/// A kind of fault. Unless noted otherwise it strikes reads, or the accesses of [`Fault::of`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// It fails with this error number. The buffer of a read then has any content; a write has
    /// written some of its sectors; the changes that a sync should cover may be forgotten.
    Error(i32),
    /// The device transfers fewer bytes than requested, at least one block. Not for syncs.
    Short,
    /// One bit of this read's bytes is wrong; the next read is correct. For reads only.
    Flip,
    /// It takes longer by this time in nanoseconds.
    Stall(Range<u64>),
    /// It does not complete, even when it is cancelled, until [`heal`] is called.
    ///
    /// [`heal`]: super::World::heal
    Stuck,
    /// An operation on a name, a length or a directory fails with this error number, without
    /// effect.
    NameError(i32),
    /// For syncs of files and of directories: nothing becomes durable, and success is reported.
    /// Devices of the model do not do that; it shows what a program without this sync would lose.
    Skip,
}

impl FaultKind {
    pub(super) fn number(&self) -> u8 {
        match self {
            FaultKind::Error(_) => 0,
            FaultKind::Short => 1,
            FaultKind::Flip => 2,
            FaultKind::Stall(_) => 3,
            FaultKind::Stuck => 4,
            FaultKind::NameError(_) => 5,
            FaultKind::Skip => 6,
        }
    }
}

/// A fault: its kind, place and frequency. By default it strikes every read of every file.
///
/// ```
/// use reactor::sim::{Access, Fault, FaultKind};
/// // One in a hundred reads of the first megabyte of table files fails.
/// Fault::new(FaultKind::Error(5)).on(".sst").range(0..1 << 20).chance(10_000);
/// // The third write of a log and all later ones find the disk full (28 is ENOSPC).
/// Fault::new(FaultKind::Error(28)).of(Access::Write).on(".log").after(2);
/// ```
#[derive(Clone, Debug)]
pub struct Fault {
    kind: FaultKind,
    access: Access,
    spared: u64,
    path_end: Option<String>,
    path_part: Option<String>,
    range: Option<Range<u64>>,
    per_million: u32,
    times: u64,
}

impl Fault {
    /// A fault of every operation its kind applies to.
    pub fn new(kind: FaultKind) -> Fault {
        Fault {
            kind,
            access: Access::Read,
            spared: 0,
            path_end: None,
            path_part: None,
            range: None,
            per_million: 1_000_000,
            times: u64::MAX,
        }
    }

    /// Strikes this kind of access instead of reads.
    #[must_use]
    pub fn of(mut self, access: Access) -> Fault {
        self.access = access;
        self
    }

    /// Skips the first `times` accesses.
    #[must_use]
    pub fn after(mut self, spared: u64) -> Fault {
        self.spared = spared;
        self
    }

    /// Strikes only paths that end with this text.
    #[must_use]
    pub fn on(mut self, path_end: &str) -> Fault {
        self.path_end = Some(path_end.to_owned());
        self
    }

    /// Strikes only paths that contain this text.
    #[must_use]
    pub fn within(mut self, path_part: &str) -> Fault {
        self.path_part = Some(path_part.to_owned());
        self
    }

    /// Strikes only reads and writes that touch this range of bytes.
    #[must_use]
    pub fn range(mut self, range: Range<u64>) -> Fault {
        self.range = Some(range);
        self
    }

    /// Strikes with this chance in a million.
    #[must_use]
    pub fn chance(mut self, per_million: u32) -> Fault {
        self.per_million = per_million;
        self
    }

    /// Strikes at most `times` times.
    #[must_use]
    pub fn times(mut self, times: u64) -> Fault {
        self.times = times;
        self
    }

    /// Whether it strikes this access; `None` is an operation on names.
    pub(super) fn strikes(
        &mut self,
        rng: &mut Rng,
        access: Option<Access>,
        path: &Path,
        range: &Range<u64>,
    ) -> bool {
        let own = match self.kind {
            FaultKind::NameError(_) => None,
            FaultKind::Skip => Some(Access::Sync),
            _ => Some(self.access),
        };
        if self.times == 0 || access != own {
            return false;
        }
        if let Some(end) = &self.path_end
            && !path.as_os_str().as_encoded_bytes().ends_with(end.as_bytes())
        {
            return false;
        }
        if let Some(part) = &self.path_part
            && !path.to_string_lossy().contains(part.as_str())
        {
            return false;
        }
        if let Some(own) = &self.range
            && (own.start >= range.end || range.start >= own.end)
        {
            return false;
        }
        if !rng.chance(self.per_million) {
            return false;
        }
        if self.spared > 0 {
            self.spared -= 1;
            return false;
        }
        self.times -= 1;
        true
    }

    pub(super) fn kind(&self) -> &FaultKind {
        &self.kind
    }
}

/// Number of faults that have struck so far, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Reads that failed.
    pub errors: u64,
    /// Short transfers.
    pub shorts: u64,
    /// Reads with a wrong bit once.
    pub flips: u64,
    /// Reads that returned a rotten byte.
    pub rotten: u64,
    /// Delayed reads, writes and syncs.
    pub stalls: u64,
    /// Reads, writes and syncs that got stuck.
    pub stuck: u64,
    /// Name operations that failed.
    pub names: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Syncs that failed.
    pub sync_errors: u64,
    /// Changes of files that a failed sync has forgotten.
    pub dropped: u64,
    /// Unflushed changes of files that a power cut has kept.
    pub kept: u64,
    /// Unflushed changes of files that a power cut has lost.
    pub lost: u64,
    /// Unflushed writes of which a power cut has kept some sectors.
    pub torn: u64,
    /// Unflushed changes of names that a power cut has kept.
    pub names_kept: u64,
    /// Unflushed changes of names that a power cut has lost.
    pub names_lost: u64,
    /// Writes that had done some of their sectors when their process was killed.
    pub cut_short: u64,
    /// Syncs that were skipped.
    pub skipped: u64,
    /// Writes that found the disk full.
    pub full: u64,
}

impl FaultCounts {
    pub(super) fn add(&mut self, kind: &FaultKind, access: Access) {
        *match kind {
            FaultKind::Error(_) => match access {
                Access::Read => &mut self.errors,
                Access::Write => &mut self.write_errors,
                Access::Sync => &mut self.sync_errors,
            },
            FaultKind::Short => &mut self.shorts,
            FaultKind::Flip => &mut self.flips,
            FaultKind::Stall(_) => &mut self.stalls,
            FaultKind::Stuck => &mut self.stuck,
            FaultKind::NameError(_) => &mut self.names,
            FaultKind::Skip => &mut self.skipped,
        } += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_where_and_as_often_as_it_says() {
        let (mut rng, read) = (Rng::new(1), Some(Access::Read));
        let mut fault = Fault::new(FaultKind::Error(5)).on(".sst").range(100..200).times(2);
        let sst = Path::new("/db/000001.sst");
        assert!(!fault.strikes(&mut rng, read, Path::new("/db/CURRENT"), &(100..200)));
        assert!(!fault.strikes(&mut rng, read, sst, &(0..100)));
        assert!(!fault.strikes(&mut rng, read, sst, &(200..300)));
        assert!(!fault.strikes(&mut rng, None, sst, &(100..200)), "names are another layer");
        assert!(!fault.strikes(&mut rng, Some(Access::Write), sst, &(100..200)));
        assert!(fault.strikes(&mut rng, read, sst, &(199..300)));
        assert!(fault.strikes(&mut rng, read, sst, &(0..101)));
        assert!(!fault.strikes(&mut rng, read, sst, &(0..101)), "only twice");

        let mut fault = Fault::new(FaultKind::Error(5)).of(Access::Sync).after(2).times(1);
        let mut struck = || fault.strikes(&mut rng, Some(Access::Sync), sst, &(0..u64::MAX));
        assert_eq!([struck(), struck(), struck(), struck()], [false, false, true, false]);
    }
}
