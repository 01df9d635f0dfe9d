//! Mixed operations: YCSB's workloads, and reads with writes among them; as fast as possible, or at
//! times that are fixed beforehand.
//!
//! 1. Every core runs `depth` tasks, each with its own [`Source`]. Reads run on the core that draws
//!    them; writes go to core 0, which owns the database ([`Owner`]).
//! 2. At fixed times (an open loop) any free task of any core takes the next operation, as any free
//!    thread of a peer does. Its latency counts from the time at which it was to begin, so it
//!    includes the wait for a free task, as a caller would see it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lsm::{BatchWriter, IterOptions, Reader, Writer};
use reactor::{Class, Core};
use workload::{Operation, Source};

use crate::cases::TURN_NS;
use crate::keys::key;
use crate::measure::Meter;
use crate::stalls::StallMeter;
use crate::values::Values;

/// The core that does the writes.
const OWNER: usize = 0;

/// The start times of all cores' operations, in nanoseconds after the start of the window.
#[derive(Debug)]
pub struct Arrivals {
    times_ns: Vec<u64>,
    next: AtomicUsize,
}

impl Arrivals {
    /// Arrivals at these times, which must be sorted.
    pub fn new(times_ns: Vec<u64>) -> Arrivals {
        Arrivals { times_ns, next: AtomicUsize::new(0) }
    }

    /// The number of arrivals.
    pub fn len(&self) -> usize {
        self.times_ns.len()
    }

    /// The start time of the next operation, which may have passed; `None` after the last.
    fn next(&self) -> Option<u64> {
        self.times_ns.get(self.next.fetch_add(1, Ordering::Relaxed)).copied()
    }
}

/// The writer with its counters, for tasks that other cores send.
#[derive(Default)]
pub struct Owner(RefCell<Option<Rc<Writing>>>);

/// The writer with its counters.
pub struct Writing {
    /// The owner core.
    pub core: Core,
    /// The database.
    pub writer: Writer,
    /// Counts the writes.
    pub meter: Rc<Meter>,
    /// Measures their stalls.
    pub stalls: Rc<StallMeter>,
}

impl Owner {
    /// Sets or clears the writer.
    pub fn set(&self, writing: Option<Rc<Writing>>) {
        self.0.replace(writing);
    }

    fn get(&self) -> Result<Rc<Writing>, String> {
        self.0.borrow().clone().ok_or_else(|| "the database is closed".to_owned())
    }
}

impl Writing {
    async fn write(&self, batch: BatchWriter) -> Result<(), String> {
        let from_ns = self.core.now_exact_ns();
        self.stalls.begin(from_ns);
        self.writer.write(batch).await.map_err(|error| error.to_string())?;
        let now_ns = self.core.now_exact_ns();
        self.stalls.end(now_ns);
        self.meter.count(1, 0, 1, from_ns, now_ns);
        Ok(())
    }
}

/// The state that the tasks of a core share.
pub struct Mixing {
    /// The core.
    pub core: Core,
    /// The core's reader.
    pub reader: Reader,
    /// Counts all operations.
    pub meter: Rc<Meter>,
    /// Values to write.
    pub values: RefCell<Values>,
    /// When the window begins.
    pub from_ns: u64,
    /// The start times; without them each operation follows the last.
    pub arrivals: Option<Arc<Arrivals>>,
}

impl Mixing {
    /// Runs operations until the meter ends the run, or until all arrivals are done.
    ///
    /// # Errors
    /// The engine's error, as text.
    pub async fn run(self: Rc<Self>, mut source: Source) -> Result<(), String> {
        let mut from_ns = self.core.now_exact_ns();
        loop {
            if let Some(arrivals) = &self.arrivals {
                let Some(after_ns) = arrivals.next() else { return Ok(()) };
                from_ns = self.from_ns + after_ns;
                if from_ns > self.core.now_exact_ns() {
                    self.core.sleep_ns(from_ns.saturating_sub(self.core.now_ns())).await;
                }
            }
            let found = self.step(&mut source).await?;
            let now_ns = self.core.now_exact_ns();
            let more = self.meter.count(1, u64::from(found), 1, from_ns, now_ns);
            if !more && self.arrivals.is_none() {
                return Ok(());
            }
            from_ns = now_ns;
            if now_ns.saturating_sub(self.core.now_ns()) >= TURN_NS {
                self.core.yield_now().await;
                from_ns = self.core.now_exact_ns();
            }
        }
    }

    /// Does one operation. Returns whether it found its key, and true if it reads none.
    async fn step(&self, source: &mut Source) -> Result<bool, String> {
        match source.draw() {
            Operation::Read(number) => self.get(number).await,
            Operation::Update(number) => self.put(number).await.map(|()| true),
            Operation::Insert(number) => {
                self.put(number).await?;
                source.plan().newest.done(number);
                Ok(true)
            }
            Operation::Scan(number, length) => self.scan(number, length).await,
            Operation::ReadModifyWrite(number) => {
                let found = self.get(number).await?;
                self.put(number).await?;
                Ok(found)
            }
        }
    }

    async fn get(&self, number: u64) -> Result<bool, String> {
        let value = self.reader.get(0, &key(number), None).await.map_err(|e| e.to_string())?;
        self.meter.returned(value.as_ref().map_or(0, |value| value.len()));
        Ok(value.is_some())
    }

    async fn put(&self, number: u64) -> Result<(), String> {
        let mut batch = BatchWriter::new();
        batch.put(0, &key(number), self.values.borrow_mut().next());
        if self.core.id() == OWNER {
            return self.core.local::<Owner>().get()?.write(batch).await;
        }
        let write = move |there: &Core| {
            let owner = there.local::<Owner>();
            async move { owner.get()?.write(batch).await }
        };
        self.core.spawn_on(OWNER, Class::Foreground, write).await
    }

    async fn scan(&self, number: u64, length: u8) -> Result<bool, String> {
        let text = |error: lsm::Error| error.to_string();
        let (mut steps, mut bytes) = (0, 0);
        let options = IterOptions {
            fill_cache: true,
            expected: Some(usize::from(length)),
            ..IterOptions::default()
        };
        let mut iter = self.reader.iter(0, options).map_err(text)?;
        iter.seek(&key(number)).await.map_err(text)?;
        let found = iter.valid() && iter.key() == key(number);
        while steps < length && iter.valid() {
            bytes += iter.key().len() + iter.value().len();
            iter.next().await.map_err(text)?;
            steps += 1;
        }
        self.meter.step(u64::from(steps));
        self.meter.returned(bytes);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_arrival_is_taken_once_by_any_core() {
        let arrivals = Arc::new(Arrivals::new(vec![1, 2, 3]));
        let other = arrivals.clone();
        assert_eq!((arrivals.next(), other.next(), arrivals.next()), (Some(1), Some(2), Some(3)));
        assert_eq!((arrivals.next(), other.next()), (None, None));
    }
}
