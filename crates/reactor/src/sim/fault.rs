//! What can go wrong with a simulated file, layer by layer; see the module text of `sim`.

use std::ops::Range;
use std::path::Path;

use super::rng::Rng;

/// A kind of fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The read fails with this error number, and its buffer holds anything.
    Error(i32),
    /// The device transfers fewer bytes than asked for, at least one block.
    Short,
    /// One bit of what this read brings is wrong; the next read is right again.
    Flip,
    /// The read takes this many nanoseconds longer.
    Stall(Range<u64>),
    /// The read never completes, not even when it is cancelled, until [`heal`] lets it go on.
    ///
    /// [`heal`]: super::World::heal
    Stuck,
    /// Opening, listing or locking fails with this error number.
    NameError(i32),
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
        }
    }
}

/// A fault: what goes wrong, where, and how often. Without more, every read of every file.
///
/// ```
/// use reactor::sim::{Fault, FaultKind};
/// // One read in a hundred of what lies in the first megabyte of table files fails.
/// Fault::new(FaultKind::Error(5)).on(".sst").range(0..1 << 20).chance(10_000);
/// ```
#[derive(Clone, Debug)]
pub struct Fault {
    kind: FaultKind,
    path_end: Option<String>,
    range: Option<Range<u64>>,
    per_million: u32,
    times: u64,
}

impl Fault {
    /// A fault of every operation its kind applies to.
    pub fn new(kind: FaultKind) -> Fault {
        Fault { kind, path_end: None, range: None, per_million: 1_000_000, times: u64::MAX }
    }

    /// Only on paths that end with this text.
    #[must_use]
    pub fn on(mut self, path_end: &str) -> Fault {
        self.path_end = Some(path_end.to_owned());
        self
    }

    /// Only for reads that touch this range of bytes.
    #[must_use]
    pub fn range(mut self, range: Range<u64>) -> Fault {
        self.range = Some(range);
        self
    }

    /// Only this many times out of a million.
    #[must_use]
    pub fn chance(mut self, per_million: u32) -> Fault {
        self.per_million = per_million;
        self
    }

    /// Only the first so many times.
    #[must_use]
    pub fn times(mut self, times: u64) -> Fault {
        self.times = times;
        self
    }

    /// Whether it strikes here and now.
    pub(super) fn strikes(
        &mut self,
        rng: &mut Rng,
        names: bool,
        path: &Path,
        range: &Range<u64>,
    ) -> bool {
        if self.times == 0 || names != matches!(self.kind, FaultKind::NameError(_)) {
            return false;
        }
        if let Some(end) = &self.path_end
            && !path.as_os_str().as_encoded_bytes().ends_with(end.as_bytes())
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
        self.times -= 1;
        true
    }

    pub(super) fn kind(&self) -> &FaultKind {
        &self.kind
    }
}

/// How many faults have struck so far, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Reads that failed.
    pub errors: u64,
    /// Short transfers.
    pub shorts: u64,
    /// Reads with a bit wrong once.
    pub flips: u64,
    /// Reads that covered a rotten byte and brought it.
    pub rotten: u64,
    /// Delayed reads.
    pub stalls: u64,
    /// Reads that got stuck.
    pub stuck: u64,
    /// Name operations that failed.
    pub names: u64,
}

impl FaultCounts {
    pub(super) fn add(&mut self, kind: &FaultKind) {
        *match kind {
            FaultKind::Error(_) => &mut self.errors,
            FaultKind::Short => &mut self.shorts,
            FaultKind::Flip => &mut self.flips,
            FaultKind::Stall(_) => &mut self.stalls,
            FaultKind::Stuck => &mut self.stuck,
            FaultKind::NameError(_) => &mut self.names,
        } += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_where_and_as_often_as_it_says() {
        let mut rng = Rng::new(1);
        let mut fault = Fault::new(FaultKind::Error(5)).on(".sst").range(100..200).times(2);
        let sst = Path::new("/db/000001.sst");
        assert!(!fault.strikes(&mut rng, false, Path::new("/db/CURRENT"), &(100..200)));
        assert!(!fault.strikes(&mut rng, false, sst, &(0..100)));
        assert!(!fault.strikes(&mut rng, false, sst, &(200..300)));
        assert!(!fault.strikes(&mut rng, true, sst, &(100..200)), "names are another layer");
        assert!(fault.strikes(&mut rng, false, sst, &(199..300)));
        assert!(fault.strikes(&mut rng, false, sst, &(0..101)));
        assert!(!fault.strikes(&mut rng, false, sst, &(0..101)), "only twice");
    }
}
