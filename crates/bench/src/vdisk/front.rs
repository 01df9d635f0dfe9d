//! The guest's driver: keeps all queues full, and follows a target that goes away.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use frontend::{Completion, Disk, Queue, Request, Slot, Status};
use hdrhistogram::Histogram;
use node::{Error, Kind};

use super::explain;
use super::plan::VdiskPlan;
use super::source::{Source, verify};
use crate::measure::histogram;

/// Polls without a completion between two readings of the clock.
const IDLE_POLLS: u32 = 64;
/// After this time without a completion the connection to the target is checked.
const SILENCE_NS: u64 = 5_000_000;
/// How long a target may be gone.
const ABSENCE: Duration = Duration::from_secs(30);
/// How long a connected target may take for a request.
const PATIENCE_NS: u64 = 60_000_000_000;
/// The most blocks in the ledger; with `verify` no more of the disk is used.
const LEDGER_BLOCKS: u64 = 1 << 22;

/// The counters of the window.
pub struct Counts {
    /// Completed requests.
    pub operations: u64,
    /// Failed requests.
    pub errors: u64,
    /// Times that the target was connected to again.
    pub reconnects: u64,
    /// The longest time without a completion.
    pub pause_ns: u64,
    /// When that time ended.
    pub pause_end_ns: u64,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
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
pub struct Flight {
    /// When it was submitted.
    pub from_ns: u64,
    /// Its block.
    pub block: u64,
    /// Whether it writes.
    pub write: bool,
    /// Its write is done, and its flush in flight.
    pub flushing: bool,
}

/// One queue and its requests in flight, by slot.
pub struct Lane {
    /// The queue.
    pub queue: Queue,
    /// Its requests.
    pub flights: Vec<Flight>,
    /// The next block of sequential requests.
    pub at: u64,
    /// Idle slots of a guest that thinks, and since when.
    idle: VecDeque<(u64, Slot)>,
}

/// The guest's driver.
pub struct Front<'a> {
    plan: &'a VdiskPlan,
    socket: &'a Path,
    disk: Disk,
    lanes: Vec<Lane>,
    source: Source,
    /// The counters.
    pub counts: Counts,
    /// The zero of the front end's clock.
    pub began: Instant,
    /// Time of the last completion.
    progress_ns: u64,
    /// Polls since the last completion.
    idle_polls: u32,
    done: Vec<Completion>,
}

impl<'a> Front<'a> {
    /// A driver with no request in flight.
    pub fn new(plan: &'a VdiskPlan, socket: &'a Path, mut disk: Disk) -> Result<Front<'a>, Error> {
        let mut blocks = disk.size_bytes() / u64::from(plan.block_size);
        if plan.verify {
            blocks = blocks.min(LEDGER_BLOCKS);
        }
        let in_flight = u64::from(plan.depth) * u64::from(plan.queues);
        if blocks <= in_flight {
            let what = format!(
                "a disk of {blocks} blocks is too small for {in_flight} requests in flight"
            );
            return Err(Error::new(Kind::Usage, what));
        }
        let lane = |nth: u16| Lane {
            queue: disk.take_queue(nth),
            flights: vec![Flight::default(); plan.depth.into()],
            at: blocks / u64::from(plan.queues) * u64::from(nth),
            idle: VecDeque::with_capacity(plan.depth.into()),
        };
        let lanes = (0..plan.queues).map(lane).collect();
        Ok(Front {
            plan,
            socket,
            disk,
            lanes,
            source: Source::new(plan, blocks),
            counts: Counts::default(),
            began: Instant::now(),
            progress_ns: 0,
            idle_polls: 0,
            done: Vec::with_capacity(plan.depth.into()),
        })
    }

    /// Nanoseconds on the front end's clock.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Writes all blocks of our own disk in memory: reading a block that was never written would
    /// cost no copy.
    pub fn fill(&mut self) -> Result<(), Error> {
        let in_memory = self.plan.disk.as_ref().is_some_and(|disk| disk.contains("mem:"));
        if !in_memory || self.plan.socket.is_some() {
            return Ok(());
        }
        let bytes = vec![0x5a; self.plan.block_size as usize];
        for block in 0..self.source.blocks {
            let offset = block * u64::from(self.plan.block_size);
            let status = self.lanes[0].queue.write(offset, &bytes).map_err(explain)?;
            if status != Status::Ok {
                let what = format!("cannot write block {block} before the measurement: {status:?}");
                return Err(Error::new(Kind::Damaged, what));
            }
        }
        Ok(())
    }

    /// Fills all queues.
    pub fn begin(&mut self) {
        let now_ns = self.now_ns();
        self.progress_ns = now_ns;
        for lane in &mut self.lanes {
            while let Some(slot) = lane.queue.take() {
                self.source.prepare(lane, slot);
                self.source.submit(lane, slot, now_ns);
            }
            lane.queue.publish();
        }
    }

    /// Keeps the queues full for a time.
    pub fn run(&mut self, length_ns: u64) -> Result<(), Error> {
        let end_ns = self.now_ns() + length_ns;
        self.work(Some(end_ns))
    }

    /// Waits for all requests in flight.
    pub fn end(&mut self) -> Result<(), Error> {
        self.work(None)
    }

    /// Polls and submits again until `end_ns`; without it, polls until nothing is in flight.
    fn work(&mut self, end_ns: Option<u64>) -> Result<(), Error> {
        loop {
            let now_ns = self.turn(end_ns.is_some())?;
            let over = match end_ns {
                Some(end_ns) => now_ns.is_some_and(|now_ns| now_ns >= end_ns),
                None => self.is_idle(),
            };
            if over {
                return Ok(());
            }
        }
    }

    /// Polls once, and submits `again`. Returns the time, if it was read.
    #[inline]
    pub fn turn(&mut self, again: bool) -> Result<Option<u64>, Error> {
        let mut now_ns = None;
        for nth in 0..self.lanes.len() {
            now_ns = self.poll(nth, again)?.or(now_ns);
        }
        match now_ns {
            Some(_) => self.idle_polls = 0,
            None => {
                self.idle_polls += 1;
                std::hint::spin_loop();
                if self.idle_polls.is_multiple_of(IDLE_POLLS) {
                    now_ns = Some(self.now_ns());
                    self.watch()?;
                }
            }
        }
        Ok(now_ns)
    }

    /// Whether nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.lanes.iter().all(|lane| lane.queue.in_flight() == 0)
    }

    /// Takes the completions of one queue. Returns the time, if there were any.
    #[inline]
    fn poll(&mut self, nth: usize, again: bool) -> Result<Option<u64>, Error> {
        let lane = &mut self.lanes[nth];
        if !lane.idle.is_empty() {
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
                lane.idle.push_back((now_ns, completion.slot));
            } else if again {
                self.source.submit(lane, completion.slot, now_ns);
            } else {
                lane.queue.give_back(completion.slot);
            }
        }
        lane.queue.publish();
        Ok(Some(now_ns))
    }

    /// Uses slots again that were idle long enough.
    fn wake(&mut self, nth: usize, again: bool) {
        let now_ns = self.now_ns();
        let lane = &mut self.lanes[nth];
        let think_ns = u64::from(self.plan.think_us) * 1000;
        while let Some((since_ns, slot)) = lane.idle.front().copied() {
            if again && now_ns - since_ns < think_ns {
                break;
            }
            lane.idle.pop_front();
            if again {
                self.source.submit(lane, slot, now_ns);
            } else {
                lane.queue.give_back(slot);
            }
        }
        lane.queue.publish();
        // This time was not a wait for the target.
        self.progress_ns = now_ns;
    }

    /// Checks on a target that has been silent.
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
            let what = "the disk's target no longer answers requests";
            return Err(Error::new(Kind::System, what));
        }
        Ok(())
    }

    /// Connects again, as soon as the target listens.
    fn reconnect(&mut self) -> Result<(), Error> {
        let gone = Instant::now();
        loop {
            match self.disk.reconnect(self.socket) {
                Ok(()) => break,
                Err(error) if gone.elapsed() > ABSENCE => return Err(explain(error)),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        self.counts.reconnects += 1;
        Ok(())
    }

    /// Reads and verifies all written blocks; returns their number.
    pub fn sweep(&mut self) -> Result<u64, Error> {
        let Some(ledger) = self.source.ledger.take() else { return Ok(0) };
        let [bytes, scratch] = &mut self.source.buffers;
        let queue = &mut self.lanes[0].queue;
        let mut count = 0;
        for stamp in ledger.written() {
            let offset = stamp.block * u64::from(self.plan.block_size);
            let status = queue.read(offset, bytes).map_err(explain)?;
            if status != Status::Ok {
                let what = format!("cannot read block {} again: {status:?}", stamp.block);
                return Err(Error::new(Kind::Damaged, what));
            }
            verify(stamp, bytes, scratch)?;
            count += 1;
        }
        Ok(count)
    }
}
