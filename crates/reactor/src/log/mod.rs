//! The log: `tracing` in front, one ring per thread, and one writer behind.
//!
//! 1. A thread logs with `tracing`'s macros. The level's look costs it a few nanoseconds; a line
//!    that is wanted is rendered right there, into a buffer of its own.
//! 2. The line goes into the thread's ring ([`lane`]). No lock, no system call, no wait: a full
//!    ring drops the line and counts it. If the writer sleeps, it is woken.
//! 3. The writer, one thread, takes what all rings hold, sorts it by time, and writes it with one
//!    call. It says how many lines were dropped since it said so last. After lines it rests for
//!    [`REST`], so that a burst of them wakes it once; without lines it sleeps until woken.
//!
//! How a thread finds its ring: [`Log::enter`] makes one and installs, for this thread, a
//! dispatcher of `tracing` that holds it; the reactor does so as a core starts. So the place per
//! thread is `tracing`'s, and nothing above the reactor has one of its own. Threads that entered
//! nowhere share one ring, under a lock that only they meet ([`Log::install`]).
//!
//! What always holds: no line is written twice, a line that was taken is written before the log is
//! stopped ([`Writer`]) or a [`Log::flush`] returns true, and one that was not is in
//! [`Log::dropped`]. Lines of one thread keep their order. Each lane holds [`LANE_LINES`] lines at
//! most, of [`LINE_MAX`] bytes and a bit at most.
//!
//! A simulated world runs none of this, as it has neither threads nor a clock to rest by: what its
//! cores log goes to the subscriber that a test has set, on the spot and in the world's order.
//!
//! What it does not do: spans, which nothing here uses; and it survives no `kill -9` with what came
//! within the last moment. A log is no journal.

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
pub use format::{Format, LINE_MAX};

use crate::sleep::SleepFlag;
use lane::{Lane, LaneState, Tap, Tickets, lane};

/// Lines that a thread's ring holds.
pub const LANE_LINES: usize = 4096;
/// How long the writer rests when it has written.
const REST: Duration = Duration::from_millis(1);
/// How long the end of the log waits for a writer that does not get on.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where lines go.
pub type Sink = Box<dyn Write + Send>;

/// A line on its way.
struct Line {
    unix_us: u64,
    text: Vec<u8>,
}

/// A handle on a log that runs. Clones are the same log.
#[derive(Clone)]
pub struct Log(Arc<Hub>);

/// What the threads that log share with the writer.
#[expect(clippy::disallowed_types, reason = "for starting and ending threads; no line takes it")]
struct Hub {
    format: Format,
    filter: Filter,
    /// The writer's.
    sleep: SleepFlag,
    thread: OnceLock<Thread>,
    tickets: Tickets,
    stop: AtomicBool,
    /// Lanes that the writer has not taken over yet.
    arriving: std::sync::Mutex<Vec<Tap<Line>>>,
    /// The counts of all lanes that live.
    states: std::sync::Mutex<Vec<Arc<LaneState>>>,
    /// Lines that lanes dropped which have ended, and lines that could not be written.
    lost: AtomicU64,
}

impl Log {
    /// Starts a log: from now on there is a writer that writes to `sink`.
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

    /// Gives this thread a ring of its own until the guard is dropped. `core` is named in its
    /// lines.
    pub fn enter(&self, core: Option<usize>) -> Entered {
        let lane = self.lane();
        let outlet = Outlet::Lane { lane, hub: self.0.clone(), core };
        let subscriber = Front { format: self.0.format, filter: self.0.filter.clone(), outlet };
        Entered(tracing::dispatcher::set_default(&Dispatch::new(subscriber)))
    }

    /// Makes this the log of all threads that have entered none. False when there is one already,
    /// which then stays.
    #[expect(clippy::disallowed_types, reason = "for threads that are no cores")]
    pub fn install(&self) -> bool {
        let lane = std::sync::Mutex::new(self.lane());
        let outlet = Outlet::Shared { lane, hub: self.0.clone() };
        let subscriber = Front { format: self.0.format, filter: self.0.filter.clone(), outlet };
        tracing::dispatcher::set_global_default(Dispatch::new(subscriber)).is_ok()
    }

    /// How many lines were dropped or could not be written so far.
    pub fn dropped(&self) -> u64 {
        self.0.dropped()
    }

    /// Waits until everything this thread has logged so far is written, as well as it can be.
    /// False when that took longer than `patience`. Blocks: for the end of a process.
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

    /// Wakes the writer if it sleeps; one that rests comes by itself.
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

/// The life of a log's writer: dropping it writes what there is and ends the thread. One that
/// does not get on, because nobody reads what it writes, is left behind after a second.
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
            // It does not panic; if it did, there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

/// A thread's ring is in use until this is dropped.
pub struct Entered(#[expect(dead_code, reason = "kept for its drop")] DefaultGuard);

/// A subscriber that writes each line to `sink` itself, under a lock: for tools, whose lines come
/// between others on the same terminal.
#[expect(clippy::disallowed_types, reason = "not for cores")]
pub fn direct(format: Format, filter: Filter, sink: Sink) -> Dispatch {
    let outlet = Outlet::Direct(std::sync::Mutex::new(sink));
    Dispatch::new(Front { format, filter, outlet })
}

/// What `tracing` sees.
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
                // Where the sink is closed, there is nobody left to tell.
                let _ = sink.lock().unwrap_or_else(|e| e.into_inner()).write_all(&text);
            }
        }
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        // No span is ever enabled; the number is without meaning.
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Microseconds since 1970. Read here and not from a core, as threads that are none log too.
#[expect(clippy::disallowed_methods, reason = "the log is no part of what a simulation replays")]
fn unix_time_us() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |time| time.as_micros() as u64)
}

#[cfg(test)]
mod tests;
