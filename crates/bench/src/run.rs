//! One measurement from start to end: cores, database, warm-up, window, sum.
//!
//! 1. Core 0 opens the database; the others wait for it. A second pass over the files is not
//!    needed: tables are shared.
//! 2. Every core attaches a reader and, if asked, warms its cache.
//! 3. When all are ready, core 0 names the time at which the window begins, a moment ahead, so
//!    that all begin together.
//! 4. Each core runs `depth` tasks until the window ends. Processor time and disk reads are taken
//!    at both ends.
//!
//! The cores meet over a few shared numbers that they look at every millisecond, before and after
//! the window only. Inside it they share nothing but the database.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use lsm::{Db, OpenOptions, Reader};
use node::{Budget, CpuTime, Error, Kind};
use reactor::{Class, Core, DriverKind, PollMode, RuntimeConfig};

use crate::case::Case;
use crate::cases::{Worker, warm_up};
use crate::measure::{Counts, Meter};
use crate::outcome::{DiskCounts, Outcome};

/// What to measure, and how.
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
    /// Memory budget; without it there is no block cache.
    pub memory_bytes: Option<u64>,
    /// Read every key once before.
    pub cached: bool,
    /// Keys in a batch.
    pub batch: u32,
    /// Steps after a seek.
    pub nexts: u32,
    /// Whether they go backwards.
    pub reverse: bool,
    /// Draw from the first so many keys; as many as there are otherwise.
    pub keys: Option<u64>,
    /// How cores wait.
    pub poll: PollMode,
    /// Which driver.
    pub driver: DriverKind,
    /// Read although another process has the database open for writing.
    pub secondary: bool,
}

/// Buffers of a core that has no block cache.
const POOL_BYTES: usize = 256 << 20;
/// How far ahead the beginning of the window is named.
const HEAD_START_NS: u64 = 5_000_000;
/// How often cores look for each other before the window.
const LOOK_NS: u64 = 1_000_000;
/// Calls in flight of the warm-up.
const WARM_UP_DEPTH: usize = 64;

/// Where the cores meet.
struct Meeting {
    db: OnceLock<Result<(Db, f64), Error>>,
    ready: AtomicUsize,
    /// Beginning of the window in monotonic nanoseconds; 0 as long as it is not named.
    from_ns: AtomicU64,
    done: AtomicUsize,
}

/// What one core brings home.
struct CoreOutcome {
    counts: Counts,
    disk: DiskCounts,
    cpu_seconds: f64,
    from_ns: u64,
    keys: u64,
    open_seconds: f64,
    io_alignment: usize,
    driver: &'static str,
}

/// Measures.
///
/// # Errors
/// When the cores cannot be started, or the database cannot be opened or read.
pub fn run(plan: &Plan) -> Result<Outcome, Error> {
    let cores = plan.processors.len();
    let budget = plan.memory_bytes.map(|bytes| Budget::split(bytes, cores));
    let config = RuntimeConfig {
        processors: plan.processors.clone(),
        memory: budget.map_or(POOL_BYTES, |budget| budget.pool),
        disk_depth: (plan.depth as usize).max(RuntimeConfig::default().disk_depth),
        poll: plan.poll,
        driver: plan.driver,
    };
    let options = OpenOptions {
        secondary: plan.secondary,
        cache_bytes: budget.map_or(0, |budget| budget.cache),
        memory_bytes: budget.map_or(usize::MAX, |budget| budget.shared),
        ..OpenOptions::default()
    };
    let cache_bytes = (options.cache_bytes * cores) as u64;
    let meeting = Arc::new(Meeting {
        db: OnceLock::new(),
        ready: AtomicUsize::new(0),
        from_ns: AtomicU64::new(0),
        done: AtomicUsize::new(0),
    });
    let shared = (Arc::new(plan.clone()), meeting, options);
    let results = reactor::run(&config, move |core| {
        let (plan, meeting, options) = shared.clone();
        async move { core_main(&core, &plan, &meeting, options).await }
    })
    .map_err(|error| Error::new(Kind::System, format!("starting the cores: {error}")))?;
    let results: Vec<CoreOutcome> = results.into_iter().collect::<Result<_, _>>()?;

    let mut counts = Counts::default();
    let mut disk = DiskCounts::default();
    for core in &results {
        counts.add(&core.counts);
        disk.reads += core.disk.reads;
        disk.bytes += core.disk.bytes;
    }
    let first = &results[0];
    let case = plan.case;
    let mut outcome = Outcome {
        name: case.name(),
        seconds: counts.end_ns.saturating_sub(first.from_ns).max(1) as f64 / 1e9,
        open_seconds: first.open_seconds,
        cores,
        depth: plan.depth,
        batch: (case == Case::MultiReadRandom).then_some(plan.batch),
        nexts: (case == Case::SeekRandom).then_some(plan.nexts),
        reverse: (case == Case::SeekRandom).then_some(plan.reverse),
        keys: first.keys,
        cache_bytes,
        cached: plan.cached,
        io_alignment: first.io_alignment,
        driver: first.driver,
        ..Outcome::default()
    };
    outcome.measure(case, &counts, disk, first.cpu_seconds);
    Ok(outcome)
}

async fn core_main(
    core: &Core,
    plan: &Plan,
    meeting: &Meeting,
    options: OpenOptions,
) -> Result<CoreOutcome, Error> {
    if core.id() == 0 {
        let began = core.now_exact_ns();
        let opened = node::open(core, &plan.data, options).await;
        let seconds = (core.now_exact_ns() - began) as f64 / 1e9;
        // Set once, here.
        let _ = meeting.db.set(opened.map(|db| (db, seconds)));
    }
    let (db, open_seconds) = loop {
        match meeting.db.get() {
            Some(Ok(opened)) => break opened,
            Some(Err(error)) => return Err(error.clone()),
            None => core.sleep_ns(LOOK_NS).await,
        }
    };
    let reader = db.attach(core);
    let failed = |what: String| Error::new(Kind::Damaged, what);
    let counted = reader.approximate_keys(0).map_err(|error| node::explain(&plan.data, &error))?;
    let keys = plan.keys.unwrap_or(counted);
    if keys == 0 {
        return Err(Error::new(Kind::Usage, "the database is empty: there is nothing to measure"));
    }
    // Whoever fails must still come to the meeting, or the others would wait for ever.
    let prepared = if plan.cached { warm(core, &reader, keys).await } else { Ok(()) };
    meeting.ready.fetch_add(1, Ordering::AcqRel);
    let from_ns = begin(core, meeting).await;
    prepared.map_err(failed)?;

    let length_ns = (plan.seconds * 1e9) as u64;
    let meter = Rc::new(Meter::new(from_ns + length_ns));
    let worker = Worker {
        core: core.clone(),
        reader,
        meter: meter.clone(),
        keys,
        batch: plan.batch as usize,
        nexts: plan.nexts,
        reverse: plan.reverse,
    };
    let disk_before = disk_counts(core);
    let cpu_before = CpuTime::now().total();
    let tasks: Vec<_> = (0..plan.depth)
        .map(|_| core.spawn(Class::Foreground, worker.clone().run(plan.case)))
        .collect();
    let mut result = Ok(());
    for task in tasks {
        let ended = task.await;
        if result.is_ok() {
            result = ended;
        }
    }
    let disk_after = disk_counts(core);
    meeting.done.fetch_add(1, Ordering::AcqRel);
    while core.id() == 0 && meeting.done.load(Ordering::Acquire) < core.cores() {
        core.sleep_ns(LOOK_NS).await;
    }
    let cpu_seconds = (CpuTime::now().total() - cpu_before).as_secs_f64();
    result.map_err(failed)?;
    Ok(CoreOutcome {
        counts: meter.counts(),
        disk: DiskCounts {
            reads: disk_after.reads - disk_before.reads,
            bytes: disk_after.bytes - disk_before.bytes,
        },
        cpu_seconds,
        from_ns,
        keys,
        open_seconds: *open_seconds,
        io_alignment: alignment(core, plan).await,
        driver: core.driver_name(),
    })
}

/// Waits until every core is ready and the window begins; tells when it began.
async fn begin(core: &Core, meeting: &Meeting) -> u64 {
    if core.id() == 0 {
        while meeting.ready.load(Ordering::Acquire) < core.cores() {
            core.sleep_ns(LOOK_NS).await;
        }
        meeting.from_ns.store(core.now_exact_ns() + HEAD_START_NS, Ordering::Release);
    }
    let from_ns = loop {
        match meeting.from_ns.load(Ordering::Acquire) {
            0 => core.sleep_ns(LOOK_NS).await,
            from_ns => break from_ns,
        }
    };
    core.sleep_ns(from_ns.saturating_sub(core.now_exact_ns())).await;
    from_ns
}

async fn warm(core: &Core, reader: &Reader, keys: u64) -> Result<(), String> {
    let tasks: Vec<_> = (0..WARM_UP_DEPTH)
        .map(|n| {
            let (core, reader) = (core.clone(), reader.clone());
            core.clone().spawn(Class::Foreground, async move {
                warm_up(&core, &reader, keys, n as u64, WARM_UP_DEPTH).await
            })
        })
        .collect();
    for task in tasks {
        task.await?;
    }
    Ok(())
}

fn disk_counts(core: &Core) -> DiskCounts {
    let stats = core.stats();
    DiskCounts { reads: stats.disk_reads.get(), bytes: stats.disk_bytes.get() }
}

/// What offsets and sizes of our reads are multiples of: asked of one table file.
async fn alignment(core: &Core, plan: &Plan) -> usize {
    let Ok(entries) = core.list(&plan.data).await else { return 0 };
    let Some(table) = entries.iter().find(|entry| entry.name.ends_with(".sst")) else { return 0 };
    core.open(&plan.data.join(&table.name), false).await.map_or(0, |file| file.alignment())
}
