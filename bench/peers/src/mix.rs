//! Mixed operations: YCSB's workloads, and reads with writes among them; as fast as possible, or at
//! times that are fixed beforehand.
//!
//! At fixed times (an open loop) any free thread takes the next operation. Its latency counts from
//! the time at which it was to begin, so it includes the wait for a free thread, as a caller would
//! see it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rocksdb::{DB, ReadOptions, WriteOptions};
use workload::{Operation, Source};

use crate::cases::{Reads, touch};
use crate::keys::key;
use crate::measure::Meter;
use crate::stalls::StallMeter;
use crate::values::Values;

/// The start times of all threads' operations.
pub struct Arrivals {
    times_ns: Vec<u64>,
    next: AtomicUsize,
    start: OnceLock<Instant>,
}

impl Arrivals {
    /// Arrivals at these times, sorted, in nanoseconds after the first one is taken.
    pub fn new(times_ns: Vec<u64>) -> Self {
        Self { times_ns, next: AtomicUsize::new(0), start: OnceLock::new() }
    }

    /// The number of arrivals.
    pub fn len(&self) -> usize {
        self.times_ns.len()
    }

    /// The start time of the next operation, which may have passed.
    fn next(&self) -> Option<Instant> {
        let start = *self.start.get_or_init(Instant::now);
        let after_ns = self.times_ns.get(self.next.fetch_add(1, Relaxed))?;
        Some(start + Duration::from_nanos(*after_ns))
    }
}

/// The state of a thread.
pub struct Worker<'a> {
    pub db: &'a DB,
    /// Its operations.
    pub source: Source,
    pub values: Values,
    /// How iterators read.
    pub reads: Reads,
    pub gets: ReadOptions,
    pub puts: WriteOptions,
    /// The start times; without them each operation follows the last.
    pub arrivals: Option<&'a Arrivals>,
    pub stalls: &'a StallMeter,
}

impl Worker<'_> {
    /// Runs operations until the meter ends the run, or until all arrivals are done.
    pub fn run(mut self, meter: &mut Meter) -> Result<(), String> {
        // Sleeps end as exactly as the kernel can, instead of up to 50 us late.
        nix::sys::prctl::set_timerslack(1).map_err(|error| error.to_string())?;
        loop {
            if let Some(arrivals) = self.arrivals {
                let Some(due) = arrivals.next() else { return Ok(()) };
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                meter.begin(due);
            }
            let found = self.step(meter)?;
            if !meter.count(1, u64::from(found)) && self.arrivals.is_none() {
                return Ok(());
            }
        }
    }

    /// Does one operation. Returns whether it found its key, and true if it reads none.
    fn step(&mut self, meter: &mut Meter) -> Result<bool, String> {
        match self.source.draw() {
            Operation::Read(number) => self.get(number, meter),
            Operation::Update(number) => self.put(number).map(|()| true),
            Operation::Insert(number) => {
                self.put(number)?;
                self.source.plan().newest.done(number);
                Ok(true)
            }
            Operation::Scan(number, length) => self.scan(number, length, meter),
            Operation::ReadModifyWrite(number) => {
                let found = self.get(number, meter)?;
                self.put(number)?;
                Ok(found)
            }
        }
    }

    fn get(&self, number: u64, meter: &mut Meter) -> Result<bool, String> {
        let value =
            self.db.get_pinned_opt(key(number), &self.gets).map_err(|error| error.to_string())?;
        meter.returned(value.as_ref().map_or(0, |value| value.len()));
        Ok(value.is_some())
    }

    fn put(&mut self, number: u64) -> Result<(), String> {
        self.db
            .put_opt(key(number), self.values.next(), &self.puts)
            .map_err(|error| error.to_string())?;
        self.stalls.acknowledged();
        Ok(())
    }

    fn scan(&self, number: u64, length: u8, meter: &mut Meter) -> Result<bool, String> {
        let mut bytes = 0;
        let mut iter = self.db.raw_iterator_opt(self.reads.options());
        iter.seek(key(number));
        let found = iter.key() == Some(&key(number)[..]);
        for _ in 0..length {
            if !iter.valid() {
                break;
            }
            bytes += touch(&iter);
            iter.next();
        }
        iter.status().map_err(|error| error.to_string())?;
        meter.returned(bytes);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_arrival_is_taken_once_and_counts_from_the_start() {
        let arrivals = Arrivals::new(vec![0, 5_000, 7_000]);
        let first = arrivals.next().unwrap();
        assert_eq!(arrivals.next().unwrap() - first, Duration::from_micros(5));
        assert_eq!(arrivals.next().unwrap() - first, Duration::from_micros(7));
        assert!(arrivals.next().is_none());
    }
}
