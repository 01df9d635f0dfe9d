//! The measured window: threads that start together, a deadline, latencies, and processor time.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

/// The result of a window, over all its threads.
pub struct Outcome {
    /// Operations done.
    pub operations: u64,
    /// Keys found.
    pub found: u64,
    /// Bytes of values returned by gets, and of keys and values read by iterators.
    pub bytes: u64,
    /// Wall-clock time from the common start to the last thread's end.
    pub elapsed: Duration,
    /// User and system time of the whole process in the window.
    pub cpu: Duration,
    /// Bytes that the whole process read from the device in the window, if the kernel reports
    /// them.
    pub read_bytes: Option<u64>,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
}

/// One thread's counters. The clock is read once per operation: an operation starts when the last
/// one ended.
pub struct Meter {
    deadline: Instant,
    last: Instant,
    operations: u64,
    found: u64,
    bytes: u64,
    latency: Histogram<u64>,
}

impl Meter {
    /// Counts bytes returned to the caller.
    pub fn returned(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// Sets the start of the next operation.
    pub fn begin(&mut self, from: Instant) {
        self.last = from;
    }

    /// Counts one call that did `operations` operations and found `found` keys; false when the time
    /// is over.
    pub fn count(&mut self, operations: u64, found: u64) -> bool {
        self.count_run(operations, found, 1)
    }

    /// As [`Meter::count`], for a call of `parts` equal steps: each counts with the mean latency.
    pub fn count_run(&mut self, operations: u64, found: u64, parts: u64) -> bool {
        let now = Instant::now();
        let nanos = now.saturating_duration_since(self.last).as_nanos() as u64;
        self.latency.saturating_record_n(nanos / parts.max(1), parts.max(1));
        self.last = now;
        self.operations += operations;
        self.found += found;
        now < self.deadline
    }
}

/// Runs `work` on every thread for `length` and adds up the results. `work` ends when its meter
/// says so.
pub fn window<W>(threads: usize, length: Duration, work: W) -> Result<Outcome, String>
where
    W: Fn(usize, &mut Meter) -> Result<(), String> + Sync,
{
    let gate = Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                let (gate, work) = (&gate, &work);
                scope.spawn(move || {
                    let latency = histogram()?;
                    gate.wait();
                    let start = Instant::now();
                    let mut meter = Meter {
                        deadline: start + length,
                        last: start,
                        operations: 0,
                        found: 0,
                        bytes: 0,
                        latency,
                    };
                    work(thread, &mut meter).map(|()| meter)
                })
            })
            .collect();
        gate.wait();
        let (start, cpu, read_bytes) = (Instant::now(), cpu_time()?, io_bytes("read_bytes"));
        let mut total = Outcome {
            operations: 0,
            found: 0,
            bytes: 0,
            elapsed: Duration::ZERO,
            cpu: Duration::ZERO,
            read_bytes: None,
            latency: histogram()?,
        };
        for handle in handles {
            let meter = handle.join().map_err(|_| "a worker panicked".to_owned())??;
            total.operations += meter.operations;
            total.found += meter.found;
            total.bytes += meter.bytes;
            total.latency.add(&meter.latency).map_err(|error| error.to_string())?;
        }
        total.elapsed = start.elapsed();
        total.cpu = cpu_time()?.saturating_sub(cpu);
        total.read_bytes =
            io_bytes("read_bytes").zip(read_bytes).map(|(after, before)| after - before);
        Ok(total)
    })
}

/// A histogram from a nanosecond to a minute with three significant digits.
fn histogram() -> Result<Histogram<u64>, String> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).map_err(|error| error.to_string())
}

/// Bytes that this process has read from or written to the device (`read_bytes` or `write_bytes`).
pub fn io_bytes(name: &str) -> Option<u64> {
    number_of("/proc/self/io", name)
}

/// Peak memory of this process in bytes.
pub fn memory_max_bytes() -> Option<u64> {
    number_of("/proc/self/status", "VmHWM").map(|kib| kib << 10)
}

/// The number after a name and a colon in a file of the kernel.
fn number_of(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

/// User and system time of this process so far.
pub fn cpu_time() -> Result<Duration, String> {
    cpu_time_of(UsageWho::RUSAGE_SELF)
}

/// User and system time of the calling thread so far.
pub fn thread_cpu_time() -> Result<Duration, String> {
    cpu_time_of(UsageWho::RUSAGE_THREAD)
}

fn cpu_time_of(who: UsageWho) -> Result<Duration, String> {
    let usage = getrusage(who).map_err(|error| error.to_string())?;
    let time = |t: TimeVal| Duration::new(t.tv_sec() as u64, t.tv_usec() as u32 * 1000);
    Ok(time(usage.user_time()) + time(usage.system_time()))
}
