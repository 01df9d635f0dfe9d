//! One measurement from start to end: cores, database, warm-up, window, sum.
//!
//! 1. Core 0 opens the database, for writing if the case writes; the others wait for it. They do
//!    not open the files' tables again: tables are shared.
//! 2. Every core attaches a reader and, if requested, warms its cache.
//! 3. When all are ready, core 0 sets the start of the window a moment ahead, so that all start
//!    together.
//! 4. Each core runs `depth` tasks that read, and core 0 those that write, until the window ends.
//!    Processor time and the disk's counters are read at both ends. Then the writer is closed;
//!    background work that it still waits for is outside the window.
//!
//! The cores meet over a few shared numbers ([`meeting`]), which they poll every millisecond before
//! and after the window only. In the window they share nothing but the database.

mod core;
mod database;
mod meeting;

use std::path::PathBuf;
use std::sync::Arc;

use lsm::{Durability, OpenOptions};
use node::{Budget, Error, Kind, Size};
use reactor::{DriverKind, PollMode, RuntimeConfig};
use workload::{Mix, arrivals};

use self::core::{CoreOutcome, run_core};
use self::meeting::Meeting;
use crate::case::Case;
use crate::measure::Counts;
use crate::mix::Arrivals;
use crate::outcome::{DiskCounts, Outcome};
#[cfg(doc)]
use crate::peers::KEYS;
use crate::writes::WritePlan;

/// A case and how to measure it.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The case.
    pub case: Case,
    /// The database's directory.
    pub data: PathBuf,
    /// Processors to run on, one core each.
    pub processors: Vec<usize>,
    /// Calls in flight per core.
    pub depth: u32,
    /// Length of the window.
    pub seconds: f64,
    /// Memory budget; without one there is no block cache.
    pub memory_bytes: Option<u64>,
    /// Read every key once beforehand.
    pub cached: bool,
    /// Keys in a batch.
    pub batch: u32,
    /// Steps after a seek.
    pub nexts: u32,
    /// Whether these go backwards.
    pub reverse: bool,
    /// Get absent keys.
    pub absent: bool,
    /// The operations of a case that mixes them.
    pub mix: Mix,
    /// Draw from the first keys, this number of them; otherwise from all, or from [`KEYS`] in a
    /// new database.
    pub keys: Option<u64>,
    /// How to write, if the case does.
    pub write: WritePlan,
    /// How cores wait.
    pub poll: PollMode,
    /// Which driver.
    pub driver: DriverKind,
    /// Read although another process has the database open for writing.
    pub secondary: bool,
}

/// Buffers of a core that has no block cache.
const POOL_BYTES: usize = 256 << 20;
/// Seed of the arrivals and operations; every run draws the same.
const SEED: u64 = 1;
/// The most memtables at a time: one that is written to and those being flushed.
const MEMTABLES: u64 = 3;

/// Measures.
///
/// # Errors
/// The cores cannot be started, or the database cannot be opened or read.
pub fn run(plan: &Plan) -> Result<Outcome, Error> {
    if plan.case.fills() {
        let said = |error| format!("cannot create {}: {error}", plan.data.display());
        std::fs::create_dir_all(&plan.data).map_err(|e| Error::new(Kind::System, said(e)))?;
    }
    let budget = budget(plan)?;
    let config = RuntimeConfig {
        processors: plan.processors.clone(),
        memory: budget.map_or(POOL_BYTES, |budget| budget.pool),
        disk_depth: (plan.depth as usize).max(RuntimeConfig::default().disk_depth),
        poll: plan.poll,
        driver: plan.driver,
        ..RuntimeConfig::default()
    };
    let options = OpenOptions {
        secondary: plan.secondary,
        cache_bytes: budget.map_or(0, |budget| budget.cache),
        memory_bytes: budget.map_or(usize::MAX, |budget| budget.tables),
        ..OpenOptions::default()
    };
    let cache_bytes = (options.cache_bytes * plan.processors.len()) as u64;
    let times = match plan.write.rate {
        Some(rate) if plan.case.mixes() => {
            Some(Arc::new(Arrivals::new(arrivals(rate, plan.seconds, SEED))))
        }
        _ => None,
    };
    let offered_per_second = times.as_ref().map(|times| times.len() as f64 / plan.seconds);
    let shared = (Arc::new(plan.clone()), Arc::new(Meeting::default()), options, times);
    let results = reactor::run(&config, move |core| {
        let (plan, meeting, options, times) = shared.clone();
        async move { run_core(&core, &plan, &meeting, options, times).await }
    })
    .map_err(|error| Error::new(Kind::System, format!("cannot start the cores: {error}")))?;
    let cores: Vec<CoreOutcome> = results.into_iter().collect::<Result<_, _>>()?;
    Ok(Outcome { cache_bytes, offered_per_second, ..outcome(plan, &cores) })
}

/// The cores' results as one.
fn outcome(plan: &Plan, cores: &[CoreOutcome]) -> Outcome {
    let mut counts = Counts::default();
    let mut disk = DiskCounts::default();
    for core in cores {
        counts.add(&core.counts);
        disk.add(core.disk);
    }
    let first = &cores[0];
    let case = plan.case;
    let writes = first.writes.as_ref();
    let write = writes.map(|_| &plan.write);
    let end_ns = counts.end_ns.max(writes.map_or(0, |writes| writes.counts.end_ns));
    let mut outcome = Outcome {
        name: case.name(),
        seconds: end_ns.saturating_sub(first.from_ns).max(1) as f64 / 1e9,
        open_seconds: first.open_seconds,
        cores: cores.len(),
        depth: plan.depth,
        batch: (case == Case::MultiReadRandom).then_some(plan.batch),
        nexts: (case == Case::SeekRandom).then_some(plan.nexts),
        reverse: (case == Case::SeekRandom).then_some(plan.reverse),
        keys: first.keys,
        durability: write.map(|write| match write.durability {
            Durability::Process => "process",
            Durability::Power => "power",
        }),
        writers: write
            .filter(|_| case != Case::FillSeq && !case.mixes())
            .map(|write| write.writers),
        value_size: write.map(|write| write.value_size),
        memtable_bytes: write.map(|write| write.memtable_bytes),
        rate: write.filter(|_| !case.mixes()).and_then(|write| write.rate),
        workload: case.mixes().then_some(plan.mix.name),
        write_percent: (case == Case::ReadRandomWriteRandom).then_some(plan.mix.shares.updates),
        absent: plan.absent,
        memory_max_bytes: memory_max_bytes(),
        flush_us: first.flush_ns.map(|ns| ns as f64 / 1000.0),
        cached: plan.cached,
        io_alignment: first.io_alignment,
        driver: first.driver,
        ..Outcome::default()
    };
    outcome.measure(case, &counts, writes, disk, first.cpu_seconds);
    if let Some(drained) = &first.drained {
        outcome.add_debt(drained);
    }
    outcome
}

/// Divides the memory, if a size was named. If the case writes, its memtables are taken from it.
fn budget(plan: &Plan) -> Result<Option<Budget>, Error> {
    let Some(bytes) = plan.memory_bytes else { return Ok(None) };
    let memtables = match plan.case.writes() {
        true => MEMTABLES * plan.write.memtable_bytes as u64,
        false => 0,
    };
    let rest = bytes.checked_sub(memtables).filter(|rest| *rest > 0).ok_or_else(|| {
        let what = format!("{} is less than {MEMTABLES} memtables", Size(bytes));
        Error::new(Kind::Usage, what).hint("name more --memory or a smaller --memtable")
    })?;
    let mut budget = Budget::split(rest, plan.processors.len(), false);
    // A benchmark has no connections.
    budget.pool += budget.connections;
    budget.cache += budget.connections;
    Ok(Some(budget))
}

/// Peak memory of this process.
#[expect(clippy::disallowed_methods, reason = "asks the kernel after the window")]
fn memory_max_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}
