//! One turn: a core, the file, and the tasks that use it.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::path::Path;
use std::rc::Rc;

use node::{CpuTime, Error, Kind};
use reactor::{Buf, Class, Core, MappedFile, Mapping, Mode, Opening, RuntimeConfig};

use super::outcome::MappedLine;
use super::{Load, MappedPlan, PAGE, TURNS, Way};
use crate::cases::TURN_NS;
use crate::keys::below;
use crate::measure::{Counts, Meter};

/// Bytes of the reads and writes that prepare the file.
const CHUNK: usize = 1 << 20;

/// The sums over turns.
#[derive(Clone, Default)]
pub(super) struct Sums {
    counts: Counts,
    seconds: f64,
    cpu_seconds: f64,
    copies: u64,
}

impl Sums {
    pub fn add(&mut self, other: &Sums) {
        self.counts.add(&other.counts);
        self.seconds += other.seconds;
        self.cpu_seconds += other.cpu_seconds;
        self.copies += other.copies;
    }

    pub fn line(&self, load: &'static str, way: &'static str) -> MappedLine {
        let operations = self.counts.operations.max(1) as f64;
        MappedLine {
            load,
            way,
            operations: self.counts.operations,
            ops_per_second: self.counts.operations as f64 / self.seconds.max(1e-9),
            cpu_us_per_op: self.cpu_seconds * 1e6 / operations,
            p50_us: self.counts.latency_us(0.5),
            p99_us: self.counts.latency_us(0.99),
            max_us: self.counts.latency_us(1.0),
            copied: self.copies as f64 / operations,
        }
    }
}

/// Makes the file of all loads but insert: its blocks are written, so that no way has to make them.
pub(super) fn make(plan: &MappedPlan, path: &Path) -> Result<(), Error> {
    let (size, path) = (plan.size_bytes, path.to_owned());
    on_a_core(plan, move |core| {
        let path = path.clone();
        async move {
            let shared = core.open_for_writing(&path, Opening::New, Mode::Direct).await?;
            let file = core.attach(&shared);
            file.allocate(size).await?;
            let mut buf = alloc(&core, CHUNK)?;
            buf.fill(1);
            for offset in (0..size).step_by(CHUNK) {
                let len = (size - offset).min(CHUNK as u64) as usize;
                let (result, back) = file.write_at(offset, buf, len).await;
                buf = back;
                result?;
            }
            file.sync_data().await
        }
    })
}

/// Runs one turn on a core of its own.
pub(super) fn run(plan: &MappedPlan, path: &Path, load: Load, way: Way) -> Result<Sums, Error> {
    let (own, path) = (plan.clone(), path.to_owned());
    on_a_core(plan, move |core| {
        let (plan, path) = (own.clone(), path.clone());
        async move {
            let worker = Rc::new(Worker::new(&core, &plan, load, way, &path).await?);
            measure(&core, &plan, worker).await
        }
    })
}

fn on_a_core<T, F>(
    plan: &MappedPlan,
    work: impl Fn(Core) -> F + Send + Clone + 'static,
) -> Result<T, Error>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + 'static,
{
    let config = RuntimeConfig {
        processors: vec![plan.processor],
        memory: (plan.depth as usize * 2 * PAGE + 4 * CHUNK).max(16 << 20),
        poll: plan.poll,
        driver: plan.driver,
        ..RuntimeConfig::default()
    };
    let results = reactor::run(&config, move |core| {
        let done = work(core);
        async move { done.await.map_err(|error| error.to_string()) }
    });
    let start = |error| format!("cannot start the core: {error}");
    let mut results = results.map_err(|error| Error::new(Kind::System, start(error)))?;
    let result = results.pop().expect("one core was started");
    result.map_err(|error| Error::new(Kind::System, format!("the file of the benchmark: {error}")))
}

async fn measure(core: &Core, plan: &MappedPlan, worker: Rc<Worker>) -> io::Result<Sums> {
    let (from_ns, cpu_before) = (core.now_exact_ns(), CpuTime::now().total());
    let copies_before = core.stats().mapped_copies.get();
    let until_ns = from_ns + (plan.seconds / f64::from(TURNS) * 1e9) as u64;
    let meter = Rc::new(Meter::new(until_ns));
    let tasks: Vec<_> = (0..plan.depth)
        .map(|_| core.spawn(Class::Foreground, worker.clone().run(meter.clone())))
        .collect();
    for task in tasks {
        task.await?;
    }
    if worker.load != Load::Read {
        worker.mapped.file().sync_data().await?;
    }
    Ok(Sums {
        counts: meter.counts(),
        seconds: (core.now_exact_ns() - from_ns) as f64 / 1e9,
        cpu_seconds: (CpuTime::now().total() - cpu_before).as_secs_f64(),
        copies: core.stats().mapped_copies.get() - copies_before,
    })
}

/// What the tasks of a turn share.
struct Worker {
    core: Core,
    load: Load,
    way: Way,
    mapped: MappedFile,
    /// Pages of the file; of an insert the most that are appended.
    pages: u64,
    /// Pages appended so far, and pages that the file has space for.
    appended: Cell<u64>,
    allocated: Cell<u64>,
    growing: Cell<bool>,
}

impl Worker {
    /// Opens the file, or makes an empty one for an insert, and reads it once if the way uses the
    /// page cache.
    async fn new(
        core: &Core,
        plan: &MappedPlan,
        load: Load,
        way: Way,
        path: &Path,
    ) -> io::Result<Worker> {
        let mode = if way == Way::Direct { Mode::Direct } else { Mode::Buffered };
        let shared = match load {
            Load::Insert => {
                let path = path.with_extension("insert");
                let shared = core.open_for_writing(&path, Opening::New, mode).await?;
                core.remove(&path).await?;
                shared
            }
            _ => core.open_for_writing(path, Opening::Existing, mode).await?,
        };
        let file = core.attach(&shared);
        let maps = matches!(way, Way::MappedReads | Way::Mapped);
        let mapping = match maps {
            true => Mapping::new(&shared, file.size(), way == Way::Mapped, core.cores()),
            false => None,
        };
        if maps && mapping.is_none() {
            return Err(io::Error::other("this system does not map it"));
        }
        if way != Way::Direct {
            let mut buf = alloc(core, CHUNK)?;
            for offset in (0..file.size()).step_by(CHUNK) {
                let (result, back) = file.read_at(offset, buf).await;
                buf = back;
                result?;
            }
        }
        Ok(Worker {
            core: core.clone(),
            load,
            way,
            allocated: Cell::new(file.size() / PAGE as u64),
            mapped: MappedFile::new(file, mapping),
            pages: plan.size_bytes / PAGE as u64,
            appended: Cell::new(0),
            growing: Cell::new(false),
        })
    }

    /// Reads or writes one page after the other until the time is over.
    async fn run(self: Rc<Self>, meter: Rc<Meter>) -> io::Result<()> {
        let mut buf = alloc(&self.core, PAGE)?;
        buf.fill(2);
        let mut from_ns = self.core.now_exact_ns();
        loop {
            let random = self.core.random_u64();
            let page = below(random, self.pages);
            buf = match self.load {
                Load::Read => self.read(page, buf).await?,
                Load::Mixed if random & 1 == 0 => self.read(page, buf).await?,
                Load::Mixed | Load::Update => self.write(page, buf).await?,
                Load::Insert => {
                    let page = self.appended.get();
                    if page == self.pages {
                        return Ok(());
                    }
                    self.appended.set(page + 1);
                    self.make_space(page).await?;
                    self.write(page, buf).await?
                }
            };
            let now_ns = self.core.now_exact_ns();
            if !meter.count(1, 1, 1, from_ns, now_ns) {
                return Ok(());
            }
            from_ns = now_ns;
            if now_ns.saturating_sub(self.core.now_ns()) > TURN_NS {
                self.core.yield_now().await;
            }
        }
    }

    async fn read(&self, page: u64, buf: Buf) -> io::Result<Buf> {
        let (result, buf) = self.mapped.read(page * PAGE as u64, buf).await;
        match result? {
            PAGE => Ok(buf),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    async fn write(&self, page: u64, buf: Buf) -> io::Result<Buf> {
        let offset = page * PAGE as u64;
        if self.way == Way::Mapped && self.mapped.write_now(offset, &buf) {
            return Ok(buf);
        }
        let (result, buf) = self.mapped.file().write_at(offset, buf, PAGE).await;
        result.map(|()| buf)
    }

    /// Waits until the file has space for a page. All ways allocate it in the same steps.
    async fn make_space(&self, page: u64) -> io::Result<()> {
        while page >= self.allocated.get() {
            if self.growing.replace(true) {
                self.core.yield_now().await;
                continue;
            }
            let grown = self.mapped.grow((page + 1) * PAGE as u64).await;
            self.growing.set(false);
            self.allocated.set(grown? / PAGE as u64);
        }
        Ok(())
    }
}

fn alloc(core: &Core, len: usize) -> io::Result<Buf> {
    core.alloc(len).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}
