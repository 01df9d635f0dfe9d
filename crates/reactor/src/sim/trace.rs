//! The trace of a simulated world: a hash of all events, and the newest events as text.

use std::collections::VecDeque;
use std::fmt;

/// Number of events kept for a failure's report.
const KEPT: usize = 64;

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A core took a turn.
    Turn,
    /// A read was submitted: file, offset, length.
    Read { file: u32, offset: u64, len: u32 },
    /// A write was submitted: file, offset, length.
    Write { file: u32, offset: u64, len: u32 },
    /// A sync was submitted.
    Sync { file: u32 },
    /// The process was killed, or power cut, with this disk left.
    Crash { kind: u8, disk: u64 },
    /// A name operation was submitted.
    Name { kind: u8 },
    /// An operation on a simulated socket was submitted: socket and kind.
    Socket { fd: i32, kind: u8 },
    /// An operation was cancelled.
    Cancel,
    /// A fault of this kind was injected.
    Fault { kind: u8 },
    /// An operation completed.
    Done { result: i64 },
    /// A core's main task ended.
    MainEnded,
    /// A stopping core timed out waiting for its operations.
    GaveUp { left: u64 },
    /// A core ended.
    Ended,
}

/// An event with its core and time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub at: u64,
    pub core: u32,
    /// Its operation; `u32::MAX` for none.
    pub token: u32,
    pub what: What,
}

/// A record of events.
pub(crate) struct Trace {
    hash: u64,
    count: u64,
    newest: VecDeque<Event>,
}

impl Trace {
    pub fn new() -> Trace {
        Trace { hash: 0xCBF2_9CE4_8422_2325, count: 0, newest: VecDeque::with_capacity(KEPT) }
    }

    pub fn note(&mut self, event: Event) {
        self.count += 1;
        let (kind, a, b) = match event.what {
            What::Turn => (0u64, 0, 0),
            What::Read { file, offset, len } => (1, offset, u64::from(file) << 32 | u64::from(len)),
            What::Name { kind } => (2, u64::from(kind), 0),
            What::Socket { fd, kind } => (3, fd as u64, u64::from(kind)),
            What::Cancel => (4, 0, 0),
            What::Fault { kind } => (5, u64::from(kind), 0),
            What::Done { result } => (6, result as u64, 0),
            What::MainEnded => (7, 0, 0),
            What::GaveUp { left } => (8, left, 0),
            What::Ended => (9, 0, 0),
            What::Write { file, offset, len } => {
                (10, offset, u64::from(file) << 32 | u64::from(len))
            }
            What::Sync { file } => (11, u64::from(file), 0),
            What::Crash { kind, disk } => (12, u64::from(kind), disk),
        };
        let place = u64::from(event.core) << 32 | u64::from(event.token);
        for word in [event.at, place, kind, a, b] {
            // FNV-1a over words, with a rotation so that high bits reach low ones.
            self.hash = (self.hash ^ word).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(23);
        }
        // Turns are the most frequent events and tell the least.
        if event.what != What::Turn {
            if self.newest.len() == KEPT {
                self.newest.pop_front();
            }
            self.newest.push_back(event);
        }
    }

    pub fn hash(&self) -> u64 {
        self.hash
    }

    pub fn count(&self) -> u64 {
        self.count
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for event in &self.newest {
            write!(f, "  {:>12} ns core {}", event.at, event.core)?;
            if event.token != u32::MAX {
                write!(f, " op {}", event.token)?;
            }
            writeln!(f, " {:?}", event.what)?;
        }
        Ok(())
    }
}
