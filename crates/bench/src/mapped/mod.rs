//! A file that is read and written in four ways: as WiredTiger compared its mapped files with
//! system calls (S4), without a database above.
//!
//! 1. For each load and each way a core runs `depth` tasks. Each reads or writes one page of 4 KiB
//!    at a time, at random, or appends it.
//! 2. The ways take turns, three short ones each, and the sums count.
//! 3. A turn ends when everything that it wrote is durable, so no way gains by leaving its writes
//!    in the cache.
//!
//! Before its turns, a way that uses the page cache reads the whole file once. A file that is
//! larger than the memory of the process's control group (or of the machine) shows what a mapping
//! does when it does not fit.

mod outcome;
mod turn;

use std::path::{Path, PathBuf};

use node::{Error, Kind};
use reactor::{DriverKind, PollMode};

pub use self::outcome::{MappedLine, MappedOutcome};
use self::turn::Sums;

/// Bytes of an operation.
const PAGE: usize = 4096;
/// Turns of each way at each load.
const TURNS: u32 = 3;

/// How to measure.
#[derive(Clone, Debug)]
pub struct MappedPlan {
    /// The directory for the file, which is removed afterwards.
    pub dir: PathBuf,
    /// Bytes of the file.
    pub size_bytes: u64,
    /// The processor.
    pub processor: usize,
    /// Operations in flight.
    pub depth: u32,
    /// Seconds for each way at each load.
    pub seconds: f64,
    /// How the core waits.
    pub poll: PollMode,
    /// The driver.
    pub driver: DriverKind,
}

/// What is done to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// Read pages.
    Read,
    /// Read or overwrite a page, one as often as the other.
    Mixed,
    /// Overwrite pages.
    Update,
    /// Append pages to an empty file.
    Insert,
}

impl Load {
    const ALL: [Load; 4] = [Load::Read, Load::Mixed, Load::Update, Load::Insert];

    fn name(self) -> &'static str {
        match self {
            Load::Read => "read",
            Load::Mixed => "50/50",
            Load::Update => "update",
            Load::Insert => "insert",
        }
    }
}

/// How the file is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Operations of the ring, past the page cache.
    Direct,
    /// Operations of the ring, through the page cache.
    Cached,
    /// As [`Way::Cached`]; reads of pages in memory are copies from a mapping.
    MappedReads,
    /// As [`Way::MappedReads`]; writes to pages in memory are copies to the mapping.
    Mapped,
}

impl Way {
    const ALL: [Way; 4] = [Way::Direct, Way::Cached, Way::MappedReads, Way::Mapped];

    fn name(self) -> &'static str {
        match self {
            Way::Direct => "ring, direct",
            Way::Cached => "ring, page cache",
            Way::MappedReads => "mapped reads",
            Way::Mapped => "mapped reads and writes",
        }
    }

    /// Whether it differs from the way before it at a load.
    fn differs(self, load: Load) -> bool {
        match self {
            Way::Direct | Way::Cached => true,
            Way::MappedReads => matches!(load, Load::Read | Load::Mixed),
            Way::Mapped => load != Load::Read,
        }
    }
}

/// Measures.
///
/// # Errors
/// The core cannot be started, or the file cannot be made, read or written.
#[expect(clippy::disallowed_methods, reason = "removes its file when all cores have ended")]
pub fn run_mapped(plan: &MappedPlan) -> Result<MappedOutcome, Error> {
    if plan.size_bytes < 1 << 20 {
        let what = "the file of bench mapped must have at least 1 MiB";
        return Err(Error::new(Kind::Usage, what).hint("name a larger --size"));
    }
    let path = plan.dir.join(format!("millrace-bench-mapped-{}", std::process::id()));
    let made = turn::make(plan, &path);
    let lines = made.and_then(|()| measure(plan, &path));
    // Also when something failed.
    let _ = std::fs::remove_file(&path);
    Ok(MappedOutcome {
        name: "mapped",
        size_bytes: plan.size_bytes,
        depth: plan.depth,
        lines: lines?,
        millrace: env!("CARGO_PKG_VERSION"),
    })
}

/// Measures all ways at all loads.
fn measure(plan: &MappedPlan, path: &Path) -> Result<Vec<MappedLine>, Error> {
    let mut lines = Vec::new();
    for load in Load::ALL {
        let ways: Vec<Way> = Way::ALL.into_iter().filter(|way| way.differs(load)).collect();
        let mut sums = vec![Sums::default(); ways.len()];
        for _ in 0..TURNS {
            for (way, sum) in ways.iter().zip(&mut sums) {
                sum.add(&turn::run(plan, path, load, *way)?);
            }
        }
        lines.extend(ways.iter().zip(&sums).map(|(way, sum)| sum.line(load.name(), way.name())));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_measured_at_every_load() {
        let plan = MappedPlan {
            dir: std::env::temp_dir(),
            size_bytes: 4 << 20,
            processor: reactor::processors()[0],
            depth: 4,
            seconds: 0.03,
            poll: PollMode::Adaptive,
            driver: DriverKind::Auto,
        };
        let outcome = run_mapped(&plan).unwrap();
        assert_eq!(outcome.lines.len(), 3 + 4 + 3 + 3);
        for line in &outcome.lines {
            assert!(line.operations > 0 && line.cpu_us_per_op > 0.0, "{line:?}");
            assert!(line.p50_us <= line.p99_us && line.p99_us <= line.max_us, "{line:?}");
            // A page that was never written is in no memory, so it is appended by the ring.
            let copies = line.way.starts_with("mapped") && line.load != "insert";
            assert_eq!(line.copied > 0.0, copies, "{line:?}");
        }
        assert_eq!(outcome.text().lines().count(), 2 + outcome.lines.len());
        let small = MappedPlan { size_bytes: 1, ..plan };
        assert!(run_mapped(&small).is_err());
    }
}
