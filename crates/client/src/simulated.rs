//! The shared connection of a client without its socket and its clock, for a simulation that has
//! others: bytes and times in, bytes out. It speaks as the connections of both clients do, with
//! their greeting, commands, cache and index.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use resp::Reply;

use crate::cache::{Cache, Lookup};
use crate::command::{Command, Touches, settle};
use crate::error::{Error, Result};
use crate::mutant::{Mutant, is};
use crate::options::{Options, Target};
use crate::wire::{Facts, Greeting, Wire};
use crate::{CacheStats, ErrorKind};

/// Beyond every pause of the index, which are of the real clock.
const LATER: Duration = Duration::from_secs(1 << 20);

#[derive(Debug)]
enum Stage {
    /// There is no connection.
    Ended,
    /// The replies to a greeting, so far, and when the first one was sent.
    Greets(Greeting, Vec<Reply>, Instant),
    Serves,
}

/// A connection, and those after it.
#[derive(Debug)]
pub struct Link {
    target: Target,
    cache: Cache,
    began: Instant,
    wire: Wire,
    stage: Stage,
    pending: VecDeque<(Instant, Touches)>,
    /// Commands that were answered, on all connections.
    answers: u64,
    out: Vec<u8>,
    facts: Facts,
    /// Tracking is to be turned on late, as a mutant does.
    is_untracked: bool,
}

impl Link {
    /// A client without a connection, whose pages of the index have so many keys.
    ///
    /// # Errors
    /// The options are impossible, or without a cache.
    pub fn new(options: Options, page_keys: usize) -> Result<Link> {
        let target = options.checked("simulated:1")?;
        let cache = Cache::simulated(&target.options, page_keys);
        let cache = cache.ok_or_else(|| Error::new(ErrorKind::InvalidOption, "it has no cache"))?;
        Ok(Link {
            wire: Wire::new(&target)?,
            target,
            cache,
            began: Instant::now(),
            stage: Stage::Ended,
            pending: VecDeque::new(),
            answers: 0,
            out: Vec::new(),
            facts: Facts::default(),
            is_untracked: false,
        })
    }

    fn time(&self, now_ns: u64) -> Instant {
        self.began + Duration::from_nanos(now_ns)
    }

    /// A connection was made at this time.
    ///
    /// # Errors
    /// None without TLS.
    pub fn begin(&mut self, now_ns: u64) -> Result<()> {
        self.wire = Wire::new(&self.target)?;
        let greeting = Greeting::new(&self.target.options, true);
        self.out = greeting.bytes.clone();
        self.stage = Stage::Greets(greeting, Vec::new(), self.time(now_ns));
        (self.facts, self.is_untracked) = (Facts::default(), false);
        Ok(())
    }

    /// The connection has ended.
    pub fn end(&mut self) {
        self.stage = Stage::Ended;
        self.cache.close();
        self.pending.clear();
        self.out.clear();
    }

    /// What is to be sent now.
    pub fn take_out(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Whether commands may be asked: the server has greeted it.
    pub fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Serves)
    }

    /// Whether the command with this number was answered.
    pub fn has_answer(&self, number: u64) -> bool {
        self.answers >= number
    }

    /// Takes bytes that were received, and asks for the next page of the index if it is time.
    ///
    /// # Errors
    /// The connection is of no use any more: [`Link::end`] it.
    pub fn received(&mut self, bytes: &[u8], now_ns: u64) -> Result<()> {
        self.wire.feed(bytes)?;
        while let Some(reply) = self.wire.next()? {
            if let Reply::Push(message) = &reply {
                self.cache.pushed(message);
                continue;
            }
            match std::mem::replace(&mut self.stage, Stage::Serves) {
                Stage::Ended => return Err(Error::ended()),
                Stage::Greets(greeting, mut replies, sent) => {
                    replies.push(reply);
                    self.greet(greeting, replies, sent)?;
                }
                Stage::Serves => self.answered(reply, now_ns)?,
            }
        }
        if matches!(self.stage, Stage::Serves)
            && let Some(page) = self.cache.next_page(Instant::now() + LATER)
        {
            self.ask(Command::page(page), now_ns);
        }
        Ok(())
    }

    fn greet(&mut self, greeting: Greeting, replies: Vec<Reply>, sent: Instant) -> Result<()> {
        if replies.len() < greeting.replies {
            self.stage = Stage::Greets(greeting, replies, sent);
            return Ok(());
        }
        let facts = greeting.check(&replies)?;
        if greeting.is_first {
            self.facts = facts;
        }
        self.is_untracked = greeting.is_first && is(Mutant::TracksAfterTheFirstPage);
        if greeting.is_first && !self.is_untracked {
            let second = Greeting::tracking(self.facts);
            self.out.extend(&second.bytes);
            self.stage = Stage::Greets(second, Vec::new(), sent);
            return Ok(());
        }
        self.cache.open(sent);
        self.cache.serve_index(self.facts.indexes);
        Ok(())
    }

    fn answered(&mut self, reply: Reply, now_ns: u64) -> Result<()> {
        let Some((sent, touches)) = self.pending.pop_front() else {
            return Err(Error::protocol("it answered what was not asked"));
        };
        self.answers += 1;
        settle(Some(&self.cache), &touches, Some(std::slice::from_ref(&reply)));
        self.cache.renew(sent);
        if self.is_untracked && matches!(touches, Touches::Page(_)) {
            self.is_untracked = false;
            let late = Greeting::tracking(self.facts);
            self.out.extend(&late.bytes);
            self.pending.push_back((self.time(now_ns), Touches::Nothing));
        }
        Ok(())
    }

    /// Returns the number of the command.
    fn ask(&mut self, command: Command, now_ns: u64) -> u64 {
        self.out.extend(&command.bytes);
        self.pending.push_back((self.time(now_ns), command.touches));
        self.answers + self.pending.len() as u64
    }

    /// What the client knows of a key by itself: its value, or that there is none.
    pub fn look(&self, key: &[u8], now_ns: u64) -> Option<Option<Vec<u8>>> {
        match self.cache.get(key, self.time(now_ns)) {
            Lookup::Hit(value) => Some(value),
            Lookup::Miss(_) => None,
        }
    }

    /// Asks for a key, which is cached then. The server is asked in any case: which keys are cached
    /// depends on hashes, which are others when the simulation is repeated.
    pub fn get(&mut self, key: &[u8], now_ns: u64) -> u64 {
        let command = match self.cache.get(key, self.time(now_ns)) {
            Lookup::Miss(ticket) => Command::get_missed(false, ticket, key),
            Lookup::Hit(_) => Command::get(key),
        };
        self.ask(command, now_ns)
    }

    /// Sets a key, or removes it.
    pub fn write(&mut self, key: &[u8], value: Option<&[u8]>, now_ns: u64) -> u64 {
        let command = match value {
            Some(value) => Command::set(key, value, true),
            None => Command::delete(key, true),
        };
        self.ask(command, now_ns)
    }

    /// Asks for an answer. After it nothing is older than this call.
    pub fn ping(&mut self, now_ns: u64) -> u64 {
        self.ask(Command::read(&[b"PING"]), now_ns)
    }

    /// The counts of the cache.
    pub fn stats(&self) -> CacheStats {
        self.cache.stats()
    }
}
