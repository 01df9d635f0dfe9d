//! One core of a measurement.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use lsm::{Durability, OpenOptions, Reader, Writer};
use node::{CpuTime, Error, Kind};
use reactor::{Class, Core, JoinHandle};
use workload::Source;

use super::database::{alignment, drain, open, warm};
use super::meeting::Meeting;
use super::{Plan, SEED};
use crate::case::Case;
use crate::cases::Worker;
use crate::measure::{Counts, Meter};
use crate::mix::{Arrivals, Mixing, Owner, Writing};
use crate::outcome::{DiskCounts, Drained, WriteCounts};
use crate::peers::KEYS;
use crate::probe::flush_ns;
use crate::stalls::StallMeter;
use crate::values::Values;
use crate::writes::WriteWorker;

/// The result of one core.
pub struct CoreOutcome {
    /// Its operations.
    pub counts: Counts,
    /// Its writes, if it owns the database.
    pub writes: Option<WriteCounts>,
    /// Median time of a flush before the window.
    pub flush_ns: Option<u64>,
    /// The disk's counters in the window.
    pub disk: DiskCounts,
    /// The background work after the window.
    pub drained: Option<Drained>,
    /// Processor time of the whole process in the window.
    pub cpu_seconds: f64,
    /// Start of the window.
    pub from_ns: u64,
    /// Keys to draw from.
    pub keys: u64,
    /// Seconds to open the database.
    pub open_seconds: f64,
    /// Alignment of disk reads.
    pub io_alignment: usize,
    /// The driver.
    pub driver: &'static str,
}

/// Measures on one core.
pub async fn run_core(
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
        meeting.set_db(opened.map(|(db, writing)| {
            writer = writing;
            (db, seconds)
        }));
    }
    let (db, open_seconds) = meeting.db(core).await?;
    let reader = db.attach(core);
    let counted = reader.approximate_keys(0).map_err(|error| node::explain(&plan.data, &error))?;
    let keys = plan.keys.unwrap_or(if plan.case.fills() { KEYS } else { counted });
    if keys == 0 {
        return Err(Error::new(Kind::Usage, "cannot measure an empty database"));
    }
    // A core that fails must still come to the meeting, or the others would wait forever.
    let prepared = prepare(core, plan, meeting, &reader, writer.as_ref(), keys).await;
    let from_ns = meeting.begin(core).await;
    let flush_ns = prepared.map_err(failed)?;

    let window = Window { core, plan, keys, from_ns, reader, meter: meter(plan, from_ns) };
    let writing = writer.as_ref().map(|writer| window.write_worker(writer));
    let mixing = meeting.workload().map(|workload| {
        let mixing = window.mixing(writing.as_ref(), times);
        (mixing, workload)
    });
    let disk_before = disk_counts(core);
    let cpu_before = CpuTime::now().total();
    let mut result = Ok(());
    for task in window.start(mixing.as_ref(), writing.as_ref()) {
        let ended = task.await;
        if result.is_ok() {
            result = ended;
        }
    }
    // Compactions may run on any core, so each core's disk counts until all cores are done.
    meeting.end(core).await;
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
        counts: window.meter.counts(),
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
        open_seconds,
        io_alignment: alignment(core, plan).await,
        driver: core.driver_name(),
    })
}

fn failed(what: String) -> Error {
    Error::new(Kind::Damaged, what)
}

/// Everything that comes before the window: the warm-up, the workload, and a probe of the disk's
/// flushes, whose median is returned.
async fn prepare(
    core: &Core,
    plan: &Plan,
    meeting: &Meeting,
    reader: &Reader,
    writer: Option<&Writer>,
    keys: u64,
) -> Result<Option<u64>, String> {
    if plan.case.mixes() && core.id() == 0 {
        meeting.set_workload(workload::Plan::new(plan.mix, keys));
    }
    if plan.cached {
        warm(core, reader, keys).await?;
    }
    let probes = writer.is_some() && plan.write.durability == Durability::Power;
    let flush_ns = match probes {
        true => Some(flush_ns(core, &plan.data).await.map_err(|e| e.to_string())?),
        false => None,
    };
    if plan.case.mixes() {
        // Sleeps end as exactly as the kernel can, instead of up to 50 us late.
        nix::sys::prctl::set_timerslack(1).map_err(|e| e.to_string())?;
    }
    Ok(flush_ns)
}

fn meter(plan: &Plan, from_ns: u64) -> Rc<Meter> {
    Rc::new(Meter::new(from_ns + length_ns(plan)))
}

fn length_ns(plan: &Plan) -> u64 {
    (plan.seconds * 1e9) as u64
}

/// A task of the case.
type Running = JoinHandle<Result<(), String>>;

/// The window of one core.
struct Window<'a> {
    core: &'a Core,
    plan: &'a Plan,
    keys: u64,
    from_ns: u64,
    reader: Reader,
    meter: Rc<Meter>,
}

impl Window<'_> {
    /// The state of the tasks that write.
    fn write_worker(&self, writer: &Writer) -> Rc<WriteWorker> {
        let write = &self.plan.write;
        // A number of writes ends the case instead of the clock.
        let length_ns = match write.num {
            Some(_) if !self.plan.case.reads() => u64::MAX - self.from_ns,
            _ => length_ns(self.plan),
        };
        Rc::new(WriteWorker {
            core: self.core.clone(),
            writer: writer.clone(),
            meter: Rc::new(Meter::new(self.from_ns + length_ns)),
            stalls: Rc::new(StallMeter::default()),
            values: RefCell::new(self.values()),
            keys: self.keys,
            from_ns: self.from_ns,
            interval_ns: write.rate.map(|rate| 1e9 / rate),
            begun: Cell::new(0),
            num: write.num.unwrap_or(u64::MAX),
        })
    }

    fn values(&self) -> Values {
        Values::new(self.plan.write.value_size, || self.core.random_u64())
    }

    /// Starts the tasks of the case.
    fn start(
        &self,
        mixing: Option<&(Rc<Mixing>, Arc<workload::Plan>)>,
        writing: Option<&Rc<WriteWorker>>,
    ) -> Vec<Running> {
        if let Some((mixing, workload)) = mixing {
            return self.start_mixed(mixing, workload);
        }
        let mut tasks = self.start_readers();
        tasks.extend(writing.into_iter().flat_map(|writing| self.start_writers(writing)));
        tasks
    }

    fn start_readers(&self) -> Vec<Running> {
        let plan = self.plan;
        let worker = Worker {
            core: self.core.clone(),
            reader: self.reader.clone(),
            meter: self.meter.clone(),
            keys: self.keys,
            batch: plan.batch as usize,
            nexts: plan.nexts,
            reverse: plan.reverse,
            absent: plan.absent,
        };
        let readers = if plan.case.reads() { plan.depth } else { 0 };
        let run = |_| self.core.spawn(Class::Foreground, worker.clone().run(plan.case));
        (0..readers).map(run).collect()
    }

    fn start_writers(&self, writing: &Rc<WriteWorker>) -> Vec<Running> {
        if self.plan.case == Case::FillSeq {
            return vec![self.core.spawn(Class::Foreground, writing.clone().load())];
        }
        let run = |_| self.core.spawn(Class::Foreground, writing.clone().run());
        (0..self.plan.write.writers).map(run).collect()
    }

    /// The state of the tasks of a case that mixes operations; lets writes find the writer.
    fn mixing(
        &self,
        writing: Option<&Rc<WriteWorker>>,
        arrivals: Option<Arc<Arrivals>>,
    ) -> Rc<Mixing> {
        let core = self.core;
        let owner = writing.map(|writing| {
            Rc::new(Writing {
                core: core.clone(),
                writer: writing.writer.clone(),
                meter: writing.meter.clone(),
                stalls: writing.stalls.clone(),
            })
        });
        core.local::<Owner>().set(owner);
        Rc::new(Mixing {
            core: core.clone(),
            reader: self.reader.clone(),
            meter: self.meter.clone(),
            values: RefCell::new(self.values()),
            from_ns: self.from_ns,
            arrivals,
        })
    }

    fn start_mixed(&self, mixing: &Rc<Mixing>, workload: &Arc<workload::Plan>) -> Vec<Running> {
        let depth = self.plan.depth;
        let run = |nth| {
            let seed = SEED + (self.core.id() as u64) * u64::from(depth) + u64::from(nth);
            let source = Source::new(workload.clone(), seed);
            self.core.spawn(Class::Foreground, mixing.clone().run(source))
        };
        (0..depth).map(run).collect()
    }
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
