//! The writer thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tracing::Level;

use super::lane::{LaneState, Tap};
use super::{Hub, LANE_LINES, Line, REST, Sink, unix_time_us};

/// Bytes gathered for one call of the sink.
const GATHER: usize = 64 << 10;

/// The writer's state.
struct WriterState<'a> {
    hub: &'a Hub,
    sink: Sink,
    taps: Vec<Tap<Line>>,
    lines: Vec<Line>,
    bytes: Vec<u8>,
    /// Number of lost lines reported so far.
    said: u64,
}

/// Writes until the log is stopped.
pub fn write(hub: &Arc<Hub>, sink: Sink) {
    let (taps, lines, bytes) = (Vec::new(), Vec::new(), Vec::with_capacity(GATHER));
    let mut desk = WriterState { hub, sink, taps, lines, bytes, said: 0 };
    loop {
        // In this order: this pass takes all lines logged before the stop.
        let stop = hub.stop.load(Ordering::Acquire);
        let any = desk.pass();
        if stop {
            return;
        } else if any {
            std::thread::park_timeout(REST);
        } else if hub.sleep.prepare(|| desk.has_work()) {
            std::thread::park();
            hub.sleep.awake();
        }
    }
}

impl WriterState<'_> {
    /// Takes all lines, writes them and calls the tickets. True if there was a line.
    fn pass(&mut self) -> bool {
        let ticket = self.hub.tickets.newest();
        self.taps.append(&mut self.hub.arriving.lock().unwrap_or_else(|e| e.into_inner()));
        let mut gone: Vec<Arc<LaneState>> = Vec::new();
        let lines = &mut self.lines;
        self.taps.retain_mut(|tap| {
            // At most a full ring, or one busy thread would delay the others.
            let alive = tap.drain(LANE_LINES, &mut |line| lines.push(line));
            if !alive {
                gone.push(tap.state().clone());
            }
            alive
        });
        self.forget(&gone);
        // Stable, so the lines of one thread keep their order even if the clock is set back.
        self.lines.sort_by_key(|line| line.unix_us);
        let any = !self.lines.is_empty();
        let mut lost = 0;
        let mut lines = std::mem::take(&mut self.lines);
        for line in lines.drain(..) {
            if self.bytes.len() + line.text.len() > GATHER {
                lost += self.put();
            }
            self.bytes.extend_from_slice(&line.text);
        }
        self.lines = lines;
        lost += self.put();
        self.hub.lost.fetch_add(lost, Ordering::Relaxed);
        self.say_what_is_lost();
        self.hub.tickets.call(ticket);
        any
    }

    /// Writes the gathered lines; returns the number of lines that could not be written.
    fn put(&mut self) -> u64 {
        if self.bytes.is_empty() {
            return 0;
        }
        let done = self.sink.write_all(&self.bytes).and_then(|()| self.sink.flush());
        let lost = match done {
            Ok(()) => 0,
            Err(_) => self.bytes.iter().filter(|&&byte| byte == b'\n').count() as u64,
        };
        self.bytes.clear();
        lost
    }

    fn say_what_is_lost(&mut self) {
        let lost = self.hub.dropped();
        let new = lost - self.said;
        if new == 0 {
            return;
        }
        let text = self.hub.format.render_own(
            unix_time_us(),
            Level::WARN,
            format_args!("{new} lines of this log were dropped: it could not keep up"),
        );
        self.bytes.extend_from_slice(&text);
        // If this line cannot be written, the lines are reported later.
        if self.put() == 0 {
            self.said = lost;
        }
    }

    /// Adds the counts of lanes that have ended to the total.
    fn forget(&mut self, gone: &[Arc<LaneState>]) {
        if gone.is_empty() {
            return;
        }
        let mut states = self.hub.states.lock().unwrap_or_else(|e| e.into_inner());
        states.retain(|state| !gone.iter().any(|gone| Arc::ptr_eq(gone, state)));
        let dropped = gone.iter().map(|state| state.dropped()).sum();
        // Under the lock, so that a concurrent sum counts these once.
        self.hub.lost.fetch_add(dropped, Ordering::Relaxed);
    }

    /// The check before sleep.
    fn has_work(&self) -> bool {
        self.taps.iter().any(Tap::pure_check)
            || self.hub.tickets.pure_check()
            || self.hub.stop.load(Ordering::Acquire)
            || !self.hub.arriving.lock().unwrap_or_else(|e| e.into_inner()).is_empty()
    }
}
