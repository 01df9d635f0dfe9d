//! Driving a virtual machine's disk as its guest would, without a virtual machine.
//!
//! 1. [`target`] serves the disk, unless somebody else's target is named.
//! 2. Crate `frontend` connects to it. One thread, on a processor of its own, drives all queues and
//!    keeps `depth` requests in flight on each: it polls, submits anew whatever has come back, and
//!    publishes once for each look at a queue. All requests found at one look share one reading of
//!    the clock.
//! 3. After a short run that does not count, the window begins. At its end what is in flight comes
//!    back; with `verify` everything written is then read once more.
//!
//! A guest that thinks (`think_us`) lets each slot rest before it uses it again. With `sync` each
//! write is followed by a flush in the same slot, and both are one request: what a guest does that
//! has a write cache and wants every write durable.
//!
//! A target that goes away in the window is waited for and connected to again with the same memory
//! and in-flight region, as QEMU does, only sooner; how long nothing came back is in the result.
//!
//! With `verify` each block carries which write of which block it is ([`pattern`]), and every read
//! of a block that was written is checked. No two requests for one block are in flight then.

#![expect(clippy::disallowed_methods, reason = "plays the guest: a thread beside the cores")]

mod idle;
mod outcome;
mod pattern;
mod pauses;
mod target;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use frontend::{Completion, Disk, DiskOptions, Queue, Request, Slot, Status};
use hdrhistogram::Histogram;
use node::{Error, Kind};

use crate::keys::below;
use crate::measure::histogram;
pub use idle::{IdlePlan, run_idle};
pub use outcome::{IdleOutcome, PausesOutcome, VdiskOutcome};
use pattern::{Ledger, Stamp};
pub use pauses::{PausesPlan, Replacement, run_pauses};
use target::Target;
pub(crate) use target::quoted;

/// How long requests run before those that count.
const WARM_UP_NS: u64 = 200_000_000;
/// Looks in vain between two looks at the clock.
const LOOKS: u32 = 64;
/// When nothing came back for so long, whether the target is still there is looked at.
const SILENCE_NS: u64 = 5_000_000;
/// How long a target may be gone.
const ABSENCE: Duration = Duration::from_secs(30);
/// How long a target that is there may take for a request.
const PATIENCE_NS: u64 = 60_000_000_000;
/// Blocks that `verify` keeps books of: no more of the disk is used then.
const LEDGER_BLOCKS: u64 = 1 << 22;

/// What is done, in fio's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Reads at random places.
    RandRead,
    /// Writes at random places.
    RandWrite,
    /// Both, by halves.
    RandRw,
    /// Reads in order.
    Read,
    /// Writes in order.
    Write,
}

impl Mix {
    /// All of them.
    pub const ALL: [Mix; 5] = [Mix::RandRead, Mix::RandWrite, Mix::RandRw, Mix::Read, Mix::Write];

    /// fio's word.
    pub fn name(self) -> &'static str {
        match self {
            Mix::RandRead => "randread",
            Mix::RandWrite => "randwrite",
            Mix::RandRw => "randrw",
            Mix::Read => "read",
            Mix::Write => "write",
        }
    }

    fn writes(self) -> bool {
        !matches!(self, Mix::RandRead | Mix::Read)
    }
}

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Mix, String> {
        Mix::ALL
            .into_iter()
            .find(|mix| mix.name() == text)
            .ok_or_else(|| format!("there is no mix '{text}'"))
    }
}

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct VdiskPlan {
    /// The disk that our own target is to serve.
    pub disk: Option<String>,
    /// Somebody else's target, which serves already.
    pub socket: Option<PathBuf>,
    /// What to do.
    pub rw: Mix,
    /// Bytes of a request.
    pub block_size: u32,
    /// Requests in flight on each queue.
    pub depth: u16,
    /// Queues.
    pub queues: u16,
    /// Packed rings.
    pub packed: bool,
    /// Length of the window.
    pub seconds: f64,
    /// Check the data.
    pub verify: bool,
    /// Follow each write by a flush.
    pub sync: bool,
    /// How long a slot rests before it is used again.
    pub think_us: u32,
    /// Processor of our own target.
    pub target_processor: usize,
    /// Processor of the front end.
    pub front_processor: usize,
}

impl VdiskPlan {
    fn options(&self) -> DiskOptions {
        DiskOptions {
            queues: self.queues,
            queue_size: self.depth.next_power_of_two().max(256),
            depth: self.depth,
            slot_bytes: self.block_size,
            packed: self.packed,
            ..DiskOptions::default()
        }
    }
}

/// Measures.
///
/// # Errors
/// When there is no target, when it breaks the protocol or stays away, or when data is not what was
/// written.
pub fn run_vdisk(plan: &VdiskPlan) -> Result<VdiskOutcome, Error> {
    if plan.verify && !plan.rw.writes() {
        let what = "to check data it must be written first";
        return Err(Error::new(Kind::Usage, what).hint("use --verify with --rw randrw"));
    }
    let own = match (&plan.socket, &plan.disk) {
        (Some(_), _) => None,
        (None, Some(disk)) => {
            Some(Target::start(std::slice::from_ref(disk), plan.queues, plan.target_processor)?)
        }
        (None, None) => {
            let what = "there is no disk to drive";
            return Err(Error::new(Kind::Usage, what).hint("name one with --disk or --socket"));
        }
    };
    let own_socket = own.as_ref().and_then(|target| target.sockets().first());
    let socket = own_socket.or(plan.socket.as_ref());
    let socket = socket.expect("there is one or the other");
    // The front end's thread is not the caller's, which keeps its own processors.
    std::thread::scope(|scope| {
        let front = scope.spawn(|| {
            frontend::pin(plan.front_processor).map_err(explain)?;
            drive(plan, socket)
        });
        front.join().unwrap_or_else(|_| Err(Error::new(Kind::System, "the front end panicked")))
    })
}

fn explain(error: frontend::Error) -> Error {
    let kind = match error.kind() {
        frontend::Kind::Ring | frontend::Kind::Protocol => Kind::Damaged,
        frontend::Kind::Refused => Kind::Unsupported,
        _ => Kind::System,
    };
    Error::new(kind, format!("the disk's target: {error}"))
}

fn drive(plan: &VdiskPlan, socket: &Path) -> Result<VdiskOutcome, Error> {
    let disk = Disk::connect(socket, plan.options()).map_err(explain)?;
    let pid = disk.session().connection().peer_pid();
    let pid = pid.filter(|pid| *pid as u32 != std::process::id());
    let size_bytes = disk.size_bytes();
    let mut front = Front::new(plan, socket, disk)?;
    front.fill()?;
    front.begin();
    front.run(WARM_UP_NS)?;
    front.counts = Counts::default();
    let cpu_before = pid.and_then(cpu_ns);
    let from_ns = front.now_ns();
    front.run((plan.seconds * 1e9) as u64)?;
    let seconds = (front.now_ns() - from_ns) as f64 / 1e9;
    let cpu_after = pid.and_then(cpu_ns);
    let counts = std::mem::take(&mut front.counts);
    front.end()?;
    let verified = if plan.verify { Some(front.sweep()?) } else { None };

    let us = |ns: f64| ns / 1000.0;
    let quantile = |quantile| us(counts.latency.value_at_quantile(quantile) as f64);
    let ops_per_second = counts.operations as f64 / seconds;
    let cpu_ns = cpu_before.zip(cpu_after).map(|(before, after)| after.saturating_sub(before));
    Ok(VdiskOutcome {
        name: "vdisk",
        disk: plan.disk.clone().filter(|_| plan.socket.is_none()),
        rw: plan.rw.name(),
        ops_per_second,
        operations: counts.operations,
        errors: counts.errors,
        bytes_per_second: ops_per_second * f64::from(plan.block_size),
        mean_us: us(counts.latency.mean()),
        p50_us: quantile(0.5),
        p99_us: quantile(0.99),
        p999_us: quantile(0.999),
        max_us: us(counts.latency.max() as f64),
        max_pause_ms: us(counts.pause_ns as f64) / 1000.0,
        cpu_us_per_op: cpu_ns.map(|ns| us(ns as f64) / counts.operations.max(1) as f64),
        reconnects: counts.reconnects,
        verified,
        seconds,
        queues: plan.queues,
        depth: plan.depth,
        block_size: plan.block_size,
        packed: plan.packed,
        sync: plan.sync,
        think_us: plan.think_us,
        size_bytes,
        millrace: env!("CARGO_PKG_VERSION"),
    })
}

/// Processor time of all threads of a process, and of those that it has started: a node that is
/// confined listens in one and serves in another.
fn cpu_ns(pid: i32) -> Option<u64> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let task = task.ok()?.path();
        // A thread may end meanwhile.
        let Ok(text) = std::fs::read_to_string(task.join("schedstat")) else { continue };
        sum += text.split(' ').next()?.parse::<u64>().ok()?;
        let children = std::fs::read_to_string(task.join("children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        sum += children.filter_map(cpu_ns).sum::<u64>();
    }
    Some(sum)
}

/// What is counted in the window.
struct Counts {
    operations: u64,
    errors: u64,
    reconnects: u64,
    /// The longest time without a completion, and when it ended.
    pause_ns: u64,
    pause_end_ns: u64,
    latency: Histogram<u64>,
}

impl Default for Counts {
    fn default() -> Counts {
        Counts {
            operations: 0,
            errors: 0,
            reconnects: 0,
            pause_ns: 0,
            pause_end_ns: 0,
            latency: histogram(),
        }
    }
}

/// A request in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Flight {
    from_ns: u64,
    block: u64,
    write: bool,
    /// Its write is done, and its flush under way.
    flushing: bool,
}

/// One queue and what is in flight on it, by slot.
struct Lane {
    queue: Queue,
    flights: Vec<Flight>,
    /// The next block, where they go in order.
    at: u64,
    /// Slots that rest, and since when.
    resting: VecDeque<(u64, Slot)>,
}

/// The guest's driver.
struct Front<'a> {
    plan: &'a VdiskPlan,
    socket: &'a Path,
    disk: Disk,
    lanes: Vec<Lane>,
    source: Source,
    counts: Counts,
    began: Instant,
    /// When something came back last.
    progress_ns: u64,
    /// When the target was last connected to again.
    connected: Option<Instant>,
    done: Vec<Completion>,
}

/// Where requests come from.
struct Source {
    rw: Mix,
    block_size: u32,
    blocks: u64,
    random: u64,
    ledger: Option<Ledger>,
    /// For a block's data and what it should be.
    buffers: [Vec<u8>; 2],
}

impl Source {
    fn draw(&mut self) -> u64 {
        // xorshift64*: the bench's places are nobody's secret, and it costs two nanoseconds.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Stages the next request in a slot.
    #[inline]
    fn submit(&mut self, lane: &mut Lane, slot: Slot, now_ns: u64) {
        let drawn = self.draw();
        let (write, mut block) = match self.rw {
            Mix::RandRead => (false, below(drawn, self.blocks)),
            Mix::RandWrite => (true, below(drawn, self.blocks)),
            Mix::RandRw => (self.random & 1 == 1, below(drawn, self.blocks)),
            Mix::Read | Mix::Write => {
                let at = lane.at;
                lane.at = if at + 1 == self.blocks { 0 } else { at + 1 };
                (self.rw == Mix::Write, at)
            }
        };
        if let Some(ledger) = &mut self.ledger {
            block = ledger.claim(block);
            if write {
                ledger.next(block).fill(&mut self.buffers[0]);
                lane.queue.write_data(slot, 0, &self.buffers[0]);
            }
        }
        lane.flights[slot.index()] = Flight { from_ns: now_ns, block, write, flushing: false };
        let (offset, len) = (block * u64::from(self.block_size), self.block_size);
        let request =
            if write { Request::Write { offset, len } } else { Request::Read { offset, len } };
        lane.queue.submit(slot, request);
    }

    /// Looks at what came back.
    #[inline]
    fn check(&mut self, lane: &Lane, completion: Completion) -> Result<(), Error> {
        let Some(ledger) = &mut self.ledger else { return Ok(()) };
        let Flight { block, write, flushing: _, from_ns: _ } =
            lane.flights[completion.slot.index()];
        let known = ledger.stamp(block);
        let sequence = match (write, completion.status) {
            (true, Status::Ok) => known.sequence + 1,
            (true, _) => 0,
            (false, _) => known.sequence,
        };
        ledger.release(block, sequence);
        if write || completion.status != Status::Ok || known.sequence == 0 {
            return Ok(());
        }
        let [bytes, scratch] = &mut self.buffers;
        lane.queue.read_data(completion.slot, 0, bytes);
        damaged(known, bytes, scratch)
    }
}

fn damaged(stamp: Stamp, bytes: &[u8], scratch: &mut [u8]) -> Result<(), Error> {
    stamp.check(bytes, scratch).map_err(|what| Error::new(Kind::Damaged, what))
}

impl<'a> Front<'a> {
    fn new(plan: &'a VdiskPlan, socket: &'a Path, mut disk: Disk) -> Result<Front<'a>, Error> {
        let mut blocks = disk.size_bytes() / u64::from(plan.block_size);
        if plan.verify {
            blocks = blocks.min(LEDGER_BLOCKS);
        }
        let in_flight = u64::from(plan.depth) * u64::from(plan.queues);
        if blocks <= in_flight {
            let what = format!("a disk of {blocks} blocks for {in_flight} requests in flight");
            return Err(Error::new(Kind::Usage, what));
        }
        let lane = |nth: u16| Lane {
            queue: disk.take_queue(nth),
            flights: vec![Flight::default(); plan.depth.into()],
            at: blocks / u64::from(plan.queues) * u64::from(nth),
            resting: VecDeque::with_capacity(plan.depth.into()),
        };
        let lanes = (0..plan.queues).map(lane).collect();
        let drawn = seed();
        let block_size = plan.block_size;
        let buffer = || vec![0; block_size as usize];
        let source = Source {
            rw: plan.rw,
            block_size,
            blocks,
            random: drawn | 1,
            ledger: plan.verify.then(|| Ledger::new(drawn, blocks as usize)),
            buffers: [buffer(), buffer()],
        };
        Ok(Front {
            plan,
            socket,
            disk,
            lanes,
            source,
            counts: Counts::default(),
            began: Instant::now(),
            progress_ns: 0,
            connected: None,
            done: Vec::with_capacity(plan.depth.into()),
        })
    }

    #[inline]
    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Writes all of an own disk in memory that is going to be read: what was never written costs
    /// it no copy.
    fn fill(&mut self) -> Result<(), Error> {
        let in_memory = self.plan.disk.as_ref().is_some_and(|disk| disk.contains("mem:"));
        if !in_memory || self.plan.socket.is_some() {
            return Ok(());
        }
        let bytes = vec![0x5a; self.plan.block_size as usize];
        for block in 0..self.source.blocks {
            let offset = block * u64::from(self.plan.block_size);
            let status = self.lanes[0].queue.write(offset, &bytes).map_err(explain)?;
            if status != Status::Ok {
                let what = format!("writing block {block} before the measurement: {status:?}");
                return Err(Error::new(Kind::Damaged, what));
            }
        }
        Ok(())
    }

    /// Fills all queues.
    fn begin(&mut self) {
        let now_ns = self.now_ns();
        self.progress_ns = now_ns;
        for lane in &mut self.lanes {
            while let Some(slot) = lane.queue.take() {
                self.source.submit(lane, slot, now_ns);
            }
            lane.queue.publish();
        }
    }

    /// Keeps them full for a time.
    fn run(&mut self, length_ns: u64) -> Result<(), Error> {
        let end_ns = self.now_ns() + length_ns;
        self.work(Some(end_ns))
    }

    /// Lets come back what is in flight.
    fn end(&mut self) -> Result<(), Error> {
        self.work(None)
    }

    /// Until a time, submitting anew; without one, until nothing is in flight.
    fn work(&mut self, end_ns: Option<u64>) -> Result<(), Error> {
        let mut in_vain = 0;
        loop {
            let mut now_ns = None;
            for nth in 0..self.lanes.len() {
                now_ns = self.look(nth, end_ns.is_some())?.or(now_ns);
            }
            match now_ns {
                Some(_) => in_vain = 0,
                None => {
                    in_vain += 1;
                    std::hint::spin_loop();
                    if in_vain % LOOKS == 0 {
                        now_ns = Some(self.now_ns());
                        self.watch()?;
                    }
                }
            }
            let over = match end_ns {
                Some(end_ns) => now_ns.is_some_and(|now_ns| now_ns >= end_ns),
                None => self.lanes.iter().all(|lane| lane.queue.in_flight() == 0),
            };
            if over {
                return Ok(());
            }
        }
    }

    /// Takes what has come back on one queue. When that was, if anything had.
    #[inline]
    fn look(&mut self, nth: usize, again: bool) -> Result<Option<u64>, Error> {
        let lane = &mut self.lanes[nth];
        if !lane.resting.is_empty() {
            self.wake(nth, again);
        }
        let lane = &mut self.lanes[nth];
        self.done.clear();
        if lane.queue.poll(&mut self.done).map_err(explain)? == 0 {
            return Ok(None);
        }
        let now_ns = self.began.elapsed().as_nanos() as u64;
        let counts = &mut self.counts;
        if now_ns - self.progress_ns > counts.pause_ns {
            (counts.pause_ns, counts.pause_end_ns) = (now_ns - self.progress_ns, now_ns);
        }
        self.progress_ns = now_ns;
        let (think, sync) = (self.plan.think_us > 0, self.plan.sync);
        for completion in &self.done {
            let flight = &mut lane.flights[completion.slot.index()];
            let from_ns = flight.from_ns;
            if sync && flight.write && !flight.flushing && completion.status == Status::Ok {
                flight.flushing = true;
                lane.queue.submit(completion.slot, Request::Flush);
                continue;
            }
            counts.operations += 1;
            counts.latency.saturating_record(now_ns - from_ns);
            counts.errors += u64::from(completion.status != Status::Ok);
            self.source.check(lane, *completion)?;
            if again && think {
                lane.resting.push_back((now_ns, completion.slot));
            } else if again {
                self.source.submit(lane, completion.slot, now_ns);
            } else {
                lane.queue.give_back(completion.slot);
            }
        }
        lane.queue.publish();
        Ok(Some(now_ns))
    }

    /// Uses again what has rested long enough.
    fn wake(&mut self, nth: usize, again: bool) {
        let now_ns = self.now_ns();
        let lane = &mut self.lanes[nth];
        let rest_ns = u64::from(self.plan.think_us) * 1000;
        while let Some((since_ns, slot)) = lane.resting.front().copied() {
            if again && now_ns - since_ns < rest_ns {
                break;
            }
            lane.resting.pop_front();
            if again {
                self.source.submit(lane, slot, now_ns);
            } else {
                lane.queue.give_back(slot);
            }
        }
        lane.queue.publish();
        // Nobody owed us anything meanwhile.
        self.progress_ns = now_ns;
    }

    /// Looks after a target that has been silent.
    #[cold]
    fn watch(&mut self) -> Result<(), Error> {
        let silent_ns = self.now_ns() - self.progress_ns;
        if silent_ns < SILENCE_NS {
            return Ok(());
        }
        if self.disk.session().connection().is_readable() {
            return self.reconnect();
        }
        if silent_ns > PATIENCE_NS {
            let what = "the disk's target answers no requests any more";
            return Err(Error::new(Kind::System, what));
        }
        Ok(())
    }

    fn reconnect(&mut self) -> Result<(), Error> {
        let gone = Instant::now();
        loop {
            let now = Instant::now();
            match self.disk.reconnect(self.socket) {
                Ok(()) => {
                    self.connected = Some(now);
                    break;
                }
                Err(error) if gone.elapsed() > ABSENCE => return Err(explain(error)),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        self.counts.reconnects += 1;
        Ok(())
    }

    /// Reads once more what was written; gives the number of blocks.
    fn sweep(&mut self) -> Result<u64, Error> {
        let Some(ledger) = self.source.ledger.take() else { return Ok(0) };
        let [bytes, scratch] = &mut self.source.buffers;
        let queue = &mut self.lanes[0].queue;
        let mut count = 0;
        for stamp in ledger.written() {
            let offset = stamp.block * u64::from(self.plan.block_size);
            let status = queue.read(offset, bytes).map_err(explain)?;
            if status != Status::Ok {
                let what = format!("reading block {} again: {status:?}", stamp.block);
                return Err(Error::new(Kind::Damaged, what));
            }
            damaged(stamp, bytes, scratch)?;
            count += 1;
        }
        Ok(count)
    }
}

/// A number that differs from run to run.
fn seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let ns = since.unwrap_or_default().as_nanos() as u64;
    ns.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(std::process::id())
}
