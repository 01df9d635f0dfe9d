//! One measurement from start to end: cores, database, warm-up, window, sum.
//!
//! 1. Core 0 opens the database, for writing where the case writes; the others wait for it. A
//!    second pass over the files is not needed: tables are shared.
//! 2. Every core attaches a reader and, if asked, warms its cache.
//! 3. When all are ready, core 0 names the time at which the window begins, a moment ahead, so that
//!    all begin together.
//! 4. Each core runs `depth` tasks that read, and core 0 those that write, until the window ends.
//!    Processor time and the disk's counters are taken at both ends. Then the writer is closed;
//!    what background work it still waits for is not in the window.
//!
//! The cores meet over a few shared numbers that they look at every millisecond, before and after
//! the window only. Inside it they share nothing but the database.

use std::cell::{Cell, RefCell};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use lsm::{Db, Durability, OpenOptions, Reader, WriteOptions, Writer};
use node::{Budget, CpuTime, Error, Kind, Size};
use reactor::{Class, Core, DriverKind, PollMode, RuntimeConfig};
use workload::{Mix, Source, arrivals};

use crate::case::Case;
use crate::cases::{Worker, warm_up};
use crate::measure::{Counts, Meter};
use crate::mix::{Arrivals, Mixing, Owner, Writing};
use crate::outcome::{DiskCounts, Drained, Outcome, WriteCounts};
use crate::peers::KEYS;
use crate::probe::flush_ns;
use crate::stalls::StallMeter;
use crate::values::Values;
use crate::writes::{WritePlan, WriteWorker};

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
    /// Get keys that are not there.
    pub absent: bool,
    /// The operations of a case that mixes them.
    pub mix: Mix,
    /// Draw from the first so many keys; as many as there are otherwise, or [`KEYS`] in a new
    /// database.
    pub keys: Option<u64>,
    /// How to write, where the case does.
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
/// Of arrivals and operations; every run draws the same.
const SEED: u64 = 1;
/// Memtables that there may be at once: one that is written to and those that become tables.
const MEMTABLES: u64 = 3;
/// How far ahead the beginning of the window is named.
const HEAD_START_NS: u64 = 5_000_000;
/// How often cores look for each other before the window.
const LOOK_NS: u64 = 1_000_000;
/// Calls in flight of the warm-up.
const WARM_UP_DEPTH: usize = 64;

/// Where the cores meet.
struct Meeting {
    db: OnceLock<Result<(Db, f64), Error>>,
    /// What is asked of a case that mixes operations.
    workload: OnceLock<Arc<workload::Plan>>,
    ready: AtomicUsize,
    /// Beginning of the window in monotonic nanoseconds; 0 as long as it is not named.
    from_ns: AtomicU64,
    done: AtomicUsize,
}

/// What one core brings home.
struct CoreOutcome {
    counts: Counts,
    writes: Option<WriteCounts>,
    flush_ns: Option<u64>,
    disk: DiskCounts,
    drained: Option<Drained>,
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
    if plan.case.fills() {
        let said = |error| format!("making {}: {error}", plan.data.display());
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
    let cache_bytes = (options.cache_bytes * cores) as u64;
    let meeting = Arc::new(Meeting {
        db: OnceLock::new(),
        workload: OnceLock::new(),
        ready: AtomicUsize::new(0),
        from_ns: AtomicU64::new(0),
        done: AtomicUsize::new(0),
    });
    let times = match plan.write.rate {
        Some(rate) if plan.case.mixes() => {
            Some(Arc::new(Arrivals::new(arrivals(rate, plan.seconds, SEED))))
        }
        _ => None,
    };
    let offered = times.as_ref().map(|times| times.len() as f64 / plan.seconds);
    let shared = (Arc::new(plan.clone()), meeting, options, times);
    let results = reactor::run(&config, move |core| {
        let (plan, meeting, options, times) = shared.clone();
        async move { core_main(&core, &plan, &meeting, options, times).await }
    })
    .map_err(|error| Error::new(Kind::System, format!("starting the cores: {error}")))?;
    let results: Vec<CoreOutcome> = results.into_iter().collect::<Result<_, _>>()?;

    let mut counts = Counts::default();
    let mut disk = DiskCounts::default();
    for core in &results {
        counts.add(&core.counts);
        disk.add(core.disk);
    }
    let first = &results[0];
    let case = plan.case;
    let writes = first.writes.as_ref();
    let write = writes.map(|_| &plan.write);
    let end_ns = counts.end_ns.max(writes.map_or(0, |writes| writes.counts.end_ns));
    let mut outcome = Outcome {
        name: case.name(),
        seconds: end_ns.saturating_sub(first.from_ns).max(1) as f64 / 1e9,
        open_seconds: first.open_seconds,
        cores,
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
        offered_per_second: offered,
        workload: case.mixes().then_some(plan.mix.name),
        write_percent: (case == Case::ReadRandomWriteRandom).then_some(plan.mix.shares.updates),
        absent: plan.absent,
        memory_max_bytes: memory_max_bytes(),
        flush_us: first.flush_ns.map(|ns| ns as f64 / 1000.0),
        cache_bytes,
        cached: plan.cached,
        io_alignment: first.io_alignment,
        driver: first.driver,
        ..Outcome::default()
    };
    outcome.measure(case, &counts, writes, disk, first.cpu_seconds);
    if let Some(drained) = &first.drained {
        outcome.add_debt(drained);
    }
    Ok(outcome)
}

/// How the memory is divided, if a size was named. Where the case writes, its memtables come off
/// it.
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
    // Nothing is connected to a bench.
    budget.pool += budget.connections;
    budget.cache += budget.connections;
    Ok(Some(budget))
}

/// The most memory that this process has had.
#[expect(clippy::disallowed_methods, reason = "asks the kernel after the window")]
fn memory_max_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

async fn core_main(
    core: &Core,
    plan: &Plan,
    meeting: &Meeting,
    options: OpenOptions,
    times: Option<Arc<Arrivals>>,
) -> Result<CoreOutcome, Error> {
    let mut writer = None;
    if core.id() == 0 {
        let began = core.now_exact_ns();
        let opened = open(core, plan, options).await;
        let seconds = (core.now_exact_ns() - began) as f64 / 1e9;
        let opened = opened.map(|(db, writing)| {
            writer = writing;
            (db, seconds)
        });
        // Set once, here.
        let _ = meeting.db.set(opened);
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
    let default = if plan.case.fills() { KEYS } else { counted };
    let keys = plan.keys.unwrap_or(default);
    if keys == 0 {
        return Err(Error::new(Kind::Usage, "the database is empty: there is nothing to measure"));
    }
    // Whoever fails must still come to the meeting, or the others would wait for ever.
    let prepared = if plan.cached { warm(core, &reader, keys).await } else { Ok(()) };
    let flush_ns = match writer {
        Some(_) if plan.write.durability == Durability::Power => {
            Some(flush_ns(core, &plan.data).await.map_err(|e| failed(e.to_string())))
        }
        _ => None,
    };
    if plan.case.mixes() {
        if core.id() == 0 {
            // Set once, here.
            let _ = meeting.workload.set(Arc::new(workload::Plan::new(plan.mix, keys)));
        }
        // Sleeps end as exactly as the kernel can, instead of up to 50 us late.
        nix::sys::prctl::set_timerslack(1).map_err(|e| failed(e.to_string()))?;
    }
    meeting.ready.fetch_add(1, Ordering::AcqRel);
    let from_ns = begin(core, meeting).await;
    prepared.map_err(failed)?;
    let flush_ns = flush_ns.transpose()?;

    let length_ns = (plan.seconds * 1e9) as u64;
    let meter = Rc::new(Meter::new(from_ns + length_ns));
    let writing = writer.as_ref().map(|writer| write_worker(core, plan, writer, keys, from_ns));
    let mixing = meeting.workload.get().map(|workload| {
        let owner = writing.as_ref().map(|writing| {
            Rc::new(Writing {
                core: core.clone(),
                writer: writing.writer.clone(),
                meter: writing.meter.clone(),
                stalls: writing.stalls.clone(),
            })
        });
        core.local::<Owner>().set(owner);
        let mixing = Mixing {
            core: core.clone(),
            reader: reader.clone(),
            meter: meter.clone(),
            values: RefCell::new(Values::new(plan.write.value_size, || core.random_u64())),
            from_ns,
            arrivals: times,
        };
        (Rc::new(mixing), workload.clone())
    });
    let worker = Worker {
        core: core.clone(),
        reader,
        meter: meter.clone(),
        keys,
        batch: plan.batch as usize,
        nexts: plan.nexts,
        reverse: plan.reverse,
        absent: plan.absent,
    };
    let disk_before = disk_counts(core);
    let cpu_before = CpuTime::now().total();
    let readers = if plan.case.reads() && !plan.case.mixes() { plan.depth } else { 0 };
    let mut tasks: Vec<_> = (0..readers)
        .map(|_| core.spawn(Class::Foreground, worker.clone().run(plan.case)))
        .collect();
    if let Some((mixing, workload)) = &mixing {
        let run = |nth| {
            let seed = SEED + (core.id() as u64) * u64::from(plan.depth) + u64::from(nth);
            let source = Source::new(workload.clone(), seed);
            core.spawn(Class::Foreground, mixing.clone().run(source))
        };
        tasks.extend((0..plan.depth).map(run));
    } else if let Some(writing) = &writing {
        if plan.case == Case::FillSeq {
            tasks.push(core.spawn(Class::Foreground, writing.clone().load()));
        } else {
            let run = |_| core.spawn(Class::Foreground, writing.clone().run());
            tasks.extend((0..plan.write.writers).map(run));
        }
    }
    let mut result = Ok(());
    for task in tasks {
        let ended = task.await;
        if result.is_ok() {
            result = ended;
        }
    }
    // Merges of the writing core's database may run on any core, so each looks at its own disk to
    // the end.
    meeting.done.fetch_add(1, Ordering::AcqRel);
    while meeting.done.load(Ordering::Acquire) < core.cores() {
        core.sleep_ns(LOOK_NS).await;
    }
    core.local::<Owner>().set(None);
    let disk_after = disk_counts(core);
    let drained = match &writer {
        Some(writer) if plan.write.drain => Some(drain(core, writer, &plan.data).await),
        _ => None,
    };
    let cpu_seconds = (CpuTime::now().total() - cpu_before).as_secs_f64();
    if let Some(writer) = writer {
        writer.close().await.map_err(|error| node::explain(&plan.data, &error))?;
    }
    result.map_err(failed)?;
    Ok(CoreOutcome {
        counts: meter.counts(),
        writes: writing.map(|writing| WriteCounts {
            counts: writing.meter.counts(),
            stalls: writing.stalls.stalls(),
        }),
        flush_ns,
        disk: disk_after.since(disk_before),
        drained,
        cpu_seconds,
        from_ns,
        keys,
        open_seconds: *open_seconds,
        io_alignment: alignment(core, plan).await,
        driver: core.driver_name(),
    })
}

/// Opens the database as the case needs it.
async fn open(
    core: &Core,
    plan: &Plan,
    options: OpenOptions,
) -> Result<(Db, Option<Writer>), Error> {
    if !plan.case.writes() {
        return Ok((node::open(core, &plan.data, options).await?, None));
    }
    let create = plan.case.fills();
    let there = core.list(&plan.data).await.unwrap_or_default();
    if create && there.iter().any(|entry| entry.name == "CURRENT") {
        let what = format!("{}: a database is to be made, and here is one", plan.data.display());
        return Err(Error::new(Kind::Usage, what).hint("name an empty directory, or use overwrite"));
    }
    let write = WriteOptions {
        durability: plan.write.durability,
        create,
        memtable_bytes: plan.write.memtable_bytes,
        compression: plan.write.compression,
        ..WriteOptions::default()
    };
    match Db::open_for_writing(core, &plan.data, options, write).await {
        Ok((db, writer)) => Ok((db, Some(writer))),
        Err(error) => Err(node::explain(&plan.data, &error)),
    }
}

/// What the tasks that write share.
fn write_worker(
    core: &Core,
    plan: &Plan,
    writer: &Writer,
    keys: u64,
    from_ns: u64,
) -> Rc<WriteWorker> {
    // A number of writes ends the case instead of the clock.
    let length_ns = match plan.write.num {
        Some(_) if !plan.case.reads() => u64::MAX - from_ns,
        _ => (plan.seconds * 1e9) as u64,
    };
    Rc::new(WriteWorker {
        core: core.clone(),
        writer: writer.clone(),
        meter: Rc::new(Meter::new(from_ns + length_ns)),
        stalls: Rc::new(StallMeter::default()),
        values: RefCell::new(Values::new(plan.write.value_size, || core.random_u64())),
        keys,
        from_ns,
        interval_ns: plan.write.rate.map(|rate| 1e9 / rate),
        begun: Cell::new(0),
        num: plan.write.num.unwrap_or(u64::MAX),
    })
}

/// Waits until nothing is left to flush or to merge; tells how long that took, what the process has
/// had written to the device since its start, and what the database takes there now.
#[expect(clippy::disallowed_methods, reason = "asks the kernel after the window")]
async fn drain(core: &Core, writer: &Writer, dir: &Path) -> Drained {
    let from_ns = core.now_exact_ns();
    while !writer.is_at_rest() && writer.failure().is_none() {
        core.sleep_ns(LOOK_NS).await;
    }
    let seconds = (core.now_exact_ns() - from_ns) as f64 / 1e9;
    let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let device_bytes = io.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.parse().ok());
    let blocks = std::fs::read_dir(dir).map(|files| {
        files.filter_map(|file| Some(file.ok()?.metadata().ok()?.blocks())).sum::<u64>()
    });
    Drained { seconds, device_bytes, disk_bytes: blocks.unwrap_or(0) * 512 }
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
    DiskCounts {
        reads: stats.disk_reads.get(),
        bytes: stats.disk_bytes.get(),
        written_bytes: stats.disk_write_bytes.get(),
        syncs: stats.disk_syncs.get(),
    }
}

/// What offsets and sizes of our reads are multiples of: asked of one table file.
async fn alignment(core: &Core, plan: &Plan) -> usize {
    let Ok(entries) = core.list(&plan.data).await else { return 0 };
    let Some(table) = entries.iter().find(|entry| entry.name.ends_with(".sst")) else { return 0 };
    core.open(&plan.data.join(&table.name), false).await.map_or(0, |file| file.alignment())
}
