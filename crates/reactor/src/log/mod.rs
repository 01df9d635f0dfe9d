//! The log: `tracing` as interface, one ring per thread, and one writer.
//!
//! 1. A thread logs with `tracing`'s macros. The check of the level costs a few nanoseconds; a line
//!    that passes is rendered on this thread, into a buffer of its own.
//! 2. The line goes into the thread's ring (`lane`), without a lock, a system call or a wait: a
//!    full ring drops the line and counts it. If the writer sleeps, it is woken.
//! 3. The writer, one thread, takes all lines from all rings, sorts them by time, and writes them
//!    with one call. It reports newly dropped lines. After lines it rests for `REST`, so that a
//!    burst of lines wakes it once; without lines it sleeps until woken.
//!
//! How a thread finds its ring: [`Log::enter`] makes one and installs, for this thread, a
//! dispatcher of `tracing` that holds it; the reactor does so when a core starts. So the
//! thread-local state is `tracing`'s, and no code above the reactor has its own. Threads that have
//! entered no log share one ring, under a lock of their own ([`Log::install`]).
//!
//! Invariants: no line is written twice. An accepted line is written before the log is stopped
//! ([`Writer`]) or a [`Log::flush`] returns true; any other line is counted in [`Log::dropped`].
//! Lines of one thread keep their order. Each lane holds at most [`LANE_LINES`] lines, of little
//! more than [`LINE_MAX`] bytes each.
//!
//! A simulated world does not use this, because it has neither threads nor a real clock: its cores'
//! lines go directly to the subscriber that a test has set, in the world's order.
//!
//! Left out: spans, which no crate here uses. Lines of the last moment do not survive a `kill -9`:
//! a log is not a journal.

mod file;
mod filter;
mod format;
mod lane;
mod writer;

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use tracing::level_filters::LevelFilter;
use tracing::subscriber::{DefaultGuard, Interest};
use tracing::{Dispatch, Event, Metadata, Subscriber, span};

pub use file::{LogFile, NextFile};
pub use filter::Filter;
pub use format::{Format, LINE_MAX, utc};

use crate::sleep::SleepFlag;
use lane::{Lane, LaneState, Tap, Tickets, lane};

/// Capacity of a thread's ring in lines.
pub const LANE_LINES: usize = 4096;
/// Pause of the writer after it has written.
const REST: Duration = Duration::from_millis(1);
/// How long the end of the log waits for a blocked writer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where lines go.
pub type Sink = Box<dyn Write + Send>;

/// A rendered line.
struct Line {
    unix_us: u64,
    text: Vec<u8>,
}

/// A handle on a running log. Clones are the same log.
#[derive(Clone)]
pub struct Log(Arc<Hub>);

/// The state that logging threads share with the writer.
#[expect(
    clippy::disallowed_types,
    reason = "for starting and ending threads; logging a line does not take it"
)]
struct Hub {
    format: Format,
    filter: Filter,
    /// The writer's.
    sleep: SleepFlag,
    thread: OnceLock<Thread>,
    tickets: Tickets,
    stop: AtomicBool,
    /// New lanes for the writer.
    arriving: std::sync::Mutex<Vec<Tap<Line>>>,
    /// The counts of all live lanes.
    states: std::sync::Mutex<Vec<Arc<LaneState>>>,
    /// Lines dropped by lanes that have ended, and lines that could not be written.
    lost: AtomicU64,
}

impl Log {
    /// Starts a log: a writer thread that writes to `sink`.
    ///
    /// # Errors
    /// When the thread cannot be started.
    #[expect(clippy::disallowed_methods, reason = "the reactor is where threads are started")]
    pub fn start(format: Format, filter: Filter, sink: Sink) -> io::Result<(Log, Writer)> {
        let log = Log(Arc::new(Hub {
            format,
            filter,
            sleep: SleepFlag::new(),
            thread: OnceLock::new(),
            tickets: Tickets::new(),
            stop: AtomicBool::new(false),
            arriving: Default::default(),
            states: Default::default(),
            lost: AtomicU64::new(0),
        }));
        let hub = log.0.clone();
        let thread = std::thread::Builder::new()
            .name("millrace-log".to_owned())
            .spawn(move || writer::write(&hub, sink))?;
        let _ = log.0.thread.set(thread.thread().clone());
        Ok((log.clone(), Writer { log, thread: Some(thread) }))
    }

    /// Gives this thread a ring of its own until the guard is dropped. Its lines name `core`.
    pub fn enter(&self, core: Option<usize>) -> Entered {
        let lane = self.lane();
        let outlet = Outlet::Lane { lane, hub: self.0.clone(), core };
        let subscriber = Front { format: self.0.format, filter: self.0.filter.clone(), outlet };
        Entered(tracing::dispatcher::set_default(&Dispatch::new(subscriber)))
    }

    /// Makes this the log of all threads that have not entered one. False when there is one
    /// already, which then stays.
    #[expect(clippy::disallowed_types, reason = "for threads that are not cores")]
    pub fn install(&self) -> bool {
        let lane = std::sync::Mutex::new(self.lane());
        let outlet = Outlet::Shared { lane, hub: self.0.clone() };
        let subscriber = Front { format: self.0.format, filter: self.0.filter.clone(), outlet };
        tracing::dispatcher::set_global_default(Dispatch::new(subscriber)).is_ok()
    }

    /// Number of lines dropped or not written so far.
    pub fn dropped(&self) -> u64 {
        self.0.dropped()
    }

    /// Waits until all lines that this thread has logged so far are written, or have failed to be.
    /// False when that takes longer than `patience`. Blocks: for the end of a process.
    #[expect(clippy::disallowed_methods, reason = "the end of a process waits for its log")]
    pub fn flush(&self, patience: Duration) -> bool {
        let ticket = self.0.tickets.take();
        let begun = std::time::Instant::now();
        while !self.0.tickets.is_called(ticket) {
            if begun.elapsed() >= patience {
                return false;
            }
            self.0.prod();
            std::thread::sleep(Duration::from_micros(100));
        }
        true
    }

    fn lane(&self) -> Lane<Line> {
        let (lane, tap) = lane(LANE_LINES);
        let state = tap.state().clone();
        self.0.states.lock().unwrap_or_else(|e| e.into_inner()).push(state);
        self.0.arriving.lock().unwrap_or_else(|e| e.into_inner()).push(tap);
        lane
    }
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("format", &self.0.format).finish_non_exhaustive()
    }
}

impl Hub {
    fn dropped(&self) -> u64 {
        let states = self.states.lock().unwrap_or_else(|e| e.into_inner());
        let alive: u64 = states.iter().map(|state| state.dropped()).sum();
        alive + self.lost.load(Ordering::Relaxed)
    }

    /// Wakes the writer if it sleeps; a resting writer continues without a wake-up.
    fn wake(&self) {
        if self.sleep.must_wake() {
            self.prod();
        }
    }

    /// Wakes the writer from sleep and rest.
    fn prod(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// The owner of a log's writer: dropping it writes the remaining lines and ends the thread. A
/// writer that is blocked for a second, because its output is not read, is abandoned.
pub struct Writer {
    log: Log,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.log.0.stop.store(true, Ordering::Release);
        let written = self.log.flush(PATIENCE);
        if let (true, Some(thread)) = (written, self.thread.take()) {
            self.log.0.prod();
            // It does not panic; if it did, there is no log left for a report.
            let _ = thread.join();
        }
    }
}

/// The use of a ring by a thread, until this is dropped.
pub struct Entered(#[expect(dead_code, reason = "kept for its drop")] DefaultGuard);

/// A subscriber that writes each line directly to `sink`, under a lock: for tools, whose lines mix
/// with other output on the same terminal.
#[expect(clippy::disallowed_types, reason = "not for cores")]
pub fn direct(format: Format, filter: Filter, sink: Sink) -> Dispatch {
    let outlet = Outlet::Direct(std::sync::Mutex::new(sink));
    Dispatch::new(Front { format, filter, outlet })
}

/// The subscriber that `tracing` calls.
struct Front {
    format: Format,
    filter: Filter,
    outlet: Outlet,
}

#[expect(clippy::disallowed_types, reason = "not for cores, which have the first variant")]
enum Outlet {
    Lane { lane: Lane<Line>, hub: Arc<Hub>, core: Option<usize> },
    Shared { lane: std::sync::Mutex<Lane<Line>>, hub: Arc<Hub> },
    Direct(std::sync::Mutex<Sink>),
}

impl Subscriber for Front {
    fn register_callsite(&self, about: &'static Metadata<'static>) -> Interest {
        if self.filter.allows(about) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, about: &Metadata<'_>) -> bool {
        self.filter.allows(about)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.filter.max_level())
    }

    fn event(&self, event: &Event<'_>) {
        let unix_us = unix_time_us();
        let core = match &self.outlet {
            Outlet::Lane { core, .. } => *core,
            _ => None,
        };
        let text = self.format.render(unix_us, core, event);
        match &self.outlet {
            Outlet::Lane { lane, hub, .. } => {
                lane.push(Line { unix_us, text });
                hub.wake();
            }
            Outlet::Shared { lane, hub } => {
                lane.lock().unwrap_or_else(|e| e.into_inner()).push(Line { unix_us, text });
                hub.wake();
            }
            Outlet::Direct(sink) => {
                // If the sink is closed, the error cannot be reported.
                let _ = sink.lock().unwrap_or_else(|e| e.into_inner()).write_all(&text);
            }
        }
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        // No span is ever enabled; the number has no meaning.
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Microseconds since 1970. Not read from a core, because other threads log, too.
#[expect(clippy::disallowed_methods, reason = "a simulation does not replay the log")]
fn unix_time_us() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |time| time.as_micros() as u64)
}

#[cfg(test)]
mod tests;
