//! `SLOWLOG`: the commands of a core that took long, the last ones of them.
//!
//! A command is timed from its execution until its reply is made. For a command that a task
//! executes (`SCAN`, `KEYS`, `BITCOUNT` of a long value and others) this includes waiting for the
//! disk; for a read of one key and for a write it is the time of the connection's core alone, as in
//! `INFO commandstats`. Commands that are always quick are timed only if the threshold is so low
//! that they may reach it.
//!
//! The log is bounded: entries by `slowlog-max-len`, and arguments as in Redis.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use crate::client::registry::Client;
use crate::command::args::Args;
use crate::command::spec::CommandId;

/// The default of `slowlog-log-slower-than`, in microseconds.
const SLOWER_THAN_US: i64 = 10_000;
/// The default of `slowlog-max-len`, and its maximum.
const ENTRIES: usize = 128;
pub(crate) const ENTRIES_MAX: usize = 1024;
/// With a lower threshold all commands are timed.
const QUICK_US: i64 = 1000;
/// Arguments of an entry, and bytes of each.
const ARGS_MAX: usize = 32;
const ARG_BYTES_MAX: usize = 128;

/// Bytes of an entry in a reply besides its words, and of a word besides its own.
const ENTRY_BYTES: usize = 256;
const WORD_BYTES: usize = 8;

const REDACTED: &[u8] = b"(redacted)";

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlowCommand {
    pub number: u64,
    pub unix_time_s: u64,
    pub time_us: u64,
    pub noted: Noted,
}

/// A command that may become an entry: its words, without secrets and not all of them if they are
/// many or long, and its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Noted {
    pub args: Vec<Vec<u8>>,
    pub address: String,
    pub name: Vec<u8>,
    pub from_ns: u64,
}

impl Noted {
    pub fn new(args: Args<'_>, client: &Client, from_ns: u64) -> Self {
        let kept = if args.len() > ARGS_MAX { ARGS_MAX - 1 } else { args.len() };
        let mut words: Vec<Vec<u8>> = (0..kept).map(|at| word(args, at)).collect();
        if kept < args.len() {
            words.push(format!("... ({} more arguments)", args.len() - kept).into_bytes());
        }
        let mut name = client.name.borrow().clone();
        name.truncate(ARG_BYTES_MAX);
        Self { args: words, address: client.address_text(), name, from_ns }
    }
}

/// The argument at `at` as it is noted.
fn word(args: Args<'_>, at: usize) -> Vec<u8> {
    let is_secret = match () {
        () if args.is(0, "auth") => at > 0,
        () if args.is(0, "hello") => {
            at > 1 && (args.is(at - 1, "auth") || at > 2 && args.is(at - 2, "auth"))
        }
        () if args.is(0, "config") => at > 2 && args.is(at - 1, "requirepass"),
        () => false,
    };
    let word = args.get(at);
    match word.get(..ARG_BYTES_MAX) {
        _ if is_secret => REDACTED.to_vec(),
        Some(first) if word.len() > ARG_BYTES_MAX => {
            let more = format!("... ({} more bytes)", word.len() - ARG_BYTES_MAX);
            [first, more.as_bytes()].concat()
        }
        _ => word.to_vec(),
    }
}

/// Commands that take no longer than some microseconds, except with very long values.
fn is_quick(command: CommandId) -> bool {
    use CommandId::{
        Append, Decr, Decrby, Del, Echo, Get, Getbit, Getdel, Getset, Incr, Incrby, Incrbyfloat,
        Mget, Mset, Msetnx, Ping, Pttl, Set, Setbit, Setnx, Setrange, Strlen, Ttl, Type, Unlink,
    };
    matches!(
        command,
        Append
            | Decr
            | Decrby
            | Del
            | Echo
            | Get
            | Getbit
            | Getdel
            | Getset
            | Incr
            | Incrby
            | Incrbyfloat
            | Mget
            | Mset
            | Msetnx
            | Ping
            | Pttl
            | Set
            | Setbit
            | Setnx
            | Setrange
            | Strlen
            | Ttl
            | Type
            | Unlink
    )
}

/// The log of one core, and the settings for it, which are the same on all cores.
pub(crate) struct SlowLog {
    /// `slowlog-log-slower-than`: negative for never.
    pub slower_than_us: Cell<i64>,
    /// `slowlog-max-len`.
    pub len_max: Cell<usize>,
    /// From the newest to the oldest.
    entries: RefCell<VecDeque<SlowCommand>>,
}

impl Default for SlowLog {
    fn default() -> Self {
        Self {
            slower_than_us: Cell::new(SLOWER_THAN_US),
            len_max: Cell::new(ENTRIES),
            entries: RefCell::default(),
        }
    }
}

impl SlowLog {
    /// Whether a command is to be timed: the commands of a transaction are, instead of `EXEC`.
    #[inline]
    pub fn times(&self, command: CommandId) -> bool {
        let threshold = self.slower_than_us.get();
        threshold >= 0 && command != CommandId::Exec && (threshold < QUICK_US || !is_quick(command))
    }

    /// Whether a command that took so long belongs into the log.
    pub fn is_slow(&self, time_us: u64) -> bool {
        u64::try_from(self.slower_than_us.get()).is_ok_and(|threshold| time_us >= threshold)
    }

    pub fn add(&self, entry: SlowCommand) {
        let mut entries = self.entries.borrow_mut();
        entries.push_front(entry);
        entries.truncate(self.len_max.get());
    }

    pub fn list(&self) -> Vec<SlowCommand> {
        self.entries.borrow().iter().cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    /// The approximate length of all entries in a reply.
    pub fn bytes(&self) -> usize {
        let entries = self.entries.borrow();
        let words = entries.iter().flat_map(|entry| &entry.noted.args);
        entries.len() * ENTRY_BYTES + words.map(|word| word.len() + WORD_BYTES).sum::<usize>()
    }

    pub fn clear(&self) {
        self.entries.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::tests::with;

    fn words(line: &str) -> Vec<String> {
        with(line, |args| {
            (0..args.len()).map(|at| String::from_utf8(word(args, at)).unwrap()).collect()
        })
    }

    #[test]
    fn secrets_are_not_noted() {
        assert_eq!(words("auth user secret"), ["auth", "(redacted)", "(redacted)"]);
        assert_eq!(
            words("HELLO 3 AUTH user secret SETNAME me"),
            ["HELLO", "3", "AUTH", "(redacted)", "(redacted)", "SETNAME", "me"]
        );
        assert_eq!(
            words("config set save x requirepass secret"),
            ["config", "set", "save", "x", "requirepass", "(redacted)"]
        );
        assert_eq!(words("set auth value"), ["set", "auth", "value"]);
        let long = "x".repeat(130);
        let expected = format!("{}... (2 more bytes)", "x".repeat(128));
        assert_eq!(words(&format!("echo {long}"))[1], expected);
    }

    #[test]
    fn the_last_commands_that_reach_the_threshold_are_kept() {
        let log = SlowLog::default();
        assert!(log.times(CommandId::Keys) && !log.times(CommandId::Get));
        assert!(log.is_slow(10_000) && !log.is_slow(9_999));
        log.slower_than_us.set(0);
        assert!(log.times(CommandId::Get) && log.is_slow(0));
        log.slower_than_us.set(-1);
        assert!(!log.times(CommandId::Keys) && !log.is_slow(u64::MAX));
        log.len_max.set(2);
        for number in 0..3 {
            let noted =
                Noted { args: Vec::new(), address: String::new(), name: Vec::new(), from_ns: 0 };
            log.add(SlowCommand { number, unix_time_s: 1, time_us: 2, noted });
        }
        assert_eq!(log.bytes(), 2 * ENTRY_BYTES);
        assert_eq!(log.list().iter().map(|entry| entry.number).collect::<Vec<_>>(), [2, 1]);
        log.clear();
        assert_eq!(log.len(), 0);
    }
}
