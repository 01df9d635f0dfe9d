//! The client for plain threads: each call waits until it is answered.
//!
//! A [`Client`] may be shared by any number of threads. A thread that calls has a socket for itself
//! until it has its answer, so there are as many connections as threads that wait at the same time.
//! There is no hand-over to another thread.
//!
//! With a [cache](crate::Options::cache), the reads that it does not answer share one more
//! connection, on which the server sends the invalidations; a thread of its own receives them.
//!
//! ```
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/example.rs"));
//! # fn main() -> client::Result<()> {
//! # let server = Redis::start(&[]);
//! # let address = server.address();
//! use millrace::blocking::Client;
//! use millrace::client::{Ttl, WriteBatch};
//! use std::time::Duration;
//!
//! let client = Client::connect(&address)?; // such as "127.0.0.1:6379"
//! client.set("a", "1")?;
//! assert_eq!(client.get("a")?.as_deref(), Some(&b"1"[..]));
//! assert_eq!(client.multi_get(["a", "b"])?, [Some(b"1".to_vec()), None]);
//! assert!(client.delete("a")?);
//!
//! client.set_with_ttl("session", "Ada", Duration::from_secs(3600))?;
//! assert!(client.expire("session", Duration::from_secs(7200))?);
//! assert!(matches!(client.ttl("session")?, Ttl::Left(left) if left.as_secs() > 3600));
//!
//! let mut batch = WriteBatch::new();
//! batch.set("b", "2").set("c", "3");
//! client.write(batch)?;
//!
//! // On a Millrace node:
//! for entry in client.range("b"..) {
//!     # if entry.is_err() { break } // This is a Redis server.
//!     let (key, value) = entry?;
//!     println!("{}: {}", key.escape_ascii(), value.escape_ascii());
//! }
//! # Ok(())
//! # }
//! ```

mod link;
mod range;
mod socket;
mod transaction;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use resp::Reply;

use self::link::Link;
pub use self::range::Range;
use self::socket::Socket;
pub use self::transaction::Transaction;
use crate::backoff::Backoff;
use crate::batch::WriteBatch;
use crate::bounds::{KeyRange, prefix};
use crate::cache::{Cache, CacheStats, Lookup, Turn, WAIT_PART, WAITS_MAX};
use crate::command::{
    Class, Command, Cursor, KEYS_MAX, count, left, missed_value, ok, one, settle, value, values,
    written,
};
use crate::error::Result;
use crate::options::{Options, Target};
use crate::ttl::Ttl;

/// Sockets that are kept while nobody uses them.
const RESTING_MAX: usize = 256;

/// A client for threads; see [the module](self) for an example. Clones are the same client.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    target: Arc<Target>,
    resting: Mutex<Vec<Socket>>,
    backoff: Mutex<Backoff>,
    cache: Option<(Arc<Cache>, Arc<Link>)>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some((_, link)) = &self.cache {
            link.close();
        }
    }
}

impl Client {
    /// Connects with the default [`Options`].
    ///
    /// # Errors
    /// As for [`Options::connect_blocking`].
    pub fn connect(address: &str) -> Result<Client> {
        Options::new().connect_blocking(address)
    }

    pub(crate) fn start(target: Target) -> Result<Client> {
        let target = Arc::new(target);
        let deadline = Instant::now() + target.options.connect_timeout;
        let socket = Socket::connect(&target, false, deadline)?;
        let cache = match Cache::of(&target.options).map(Arc::new) {
            None => None,
            Some(cache) => {
                let link = Link::start(&target, &cache)?;
                Some((cache, link))
            }
        };
        let (resting, backoff) = (Mutex::new(vec![socket]), Mutex::default());
        Ok(Client { shared: Arc::new(Shared { target, resting, backoff, cache }) })
    }

    /// Looks up a key. `None`: there is no such key.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`](crate::ErrorKind), [`Timeout`](crate::ErrorKind) and those that
    /// the server's answer stands for, such as [`WrongType`](crate::ErrorKind); as from all calls.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>> {
        let key = key.as_ref();
        let Some((cache, link)) = &self.shared.cache else {
            return value(self.one(&Command::get(key))?);
        };
        match cache.get(key, Instant::now()) {
            Lookup::Hit(found) => {
                if cache.wants_chunk() {
                    link.ask_ahead();
                }
                Ok(found)
            }
            Lookup::Miss(ticket) => {
                let deadline = self.deadline();
                let wait_until = Instant::now() + self.shared.target.options.timeout / WAIT_PART;
                let (mut turn, mut waits) = (cache.turn(), 0);
                while let Turn::Wait(stretch) = turn
                    && waits < WAITS_MAX
                    && Instant::now() < wait_until
                {
                    if let Some(found) = cache.wait_for(stretch, key, wait_until) {
                        return Ok(found);
                    }
                    (turn, waits) = (cache.turn(), waits + 1);
                }
                let with_place = turn != Turn::Ask;
                let asked = link.ask(Command::get_missed(with_place, ticket, key), deadline);
                match asked {
                    Ok(Some(reply)) => missed_value(reply, with_place),
                    not_answered => {
                        if with_place {
                            cache.answered(None);
                        }
                        not_answered?;
                        value(one(self.call_by(&Command::get(key), deadline)?)?)
                    }
                }
            }
        }
    }

    /// Looks up many keys. The answers are in the order of the keys; each may be of another moment.
    ///
    /// # Errors
    /// As for [`Client::get`], if any of the keys cannot be read; but a key that does not hold a
    /// string is `None`, as for Redis's `MGET`.
    pub fn multi_get<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let keys: Vec<K> = keys.into_iter().collect();
        let mut found = vec![None; keys.len()];
        let mut missing = Vec::new();
        match &self.shared.cache {
            None => missing.extend((0..keys.len()).map(|nth| (nth, None))),
            Some((cache, _)) => {
                for (nth, key) in keys.iter().enumerate() {
                    match cache.get(key.as_ref(), Instant::now()) {
                        Lookup::Hit(value) => found[nth] = value,
                        Lookup::Miss(ticket) => missing.push((nth, Some(ticket))),
                    }
                }
            }
        }
        let deadline = self.deadline();
        for chunk in missing.chunks(KEYS_MAX) {
            let command = Command::multi_get(chunk.iter().map(|(nth, _)| keys[*nth].as_ref()));
            let linked = match &self.shared.cache {
                None => None,
                Some((_, link)) => {
                    let fills = chunk.iter().filter_map(|(nth, ticket)| {
                        Some(((*ticket)?, keys[*nth].as_ref().to_vec()))
                    });
                    link.ask(command.clone().filling(fills.collect()), deadline)?
                }
            };
            let reply = match linked {
                Some(reply) => reply,
                None => one(self.call_by(&command, deadline)?)?,
            };
            for ((nth, _), value) in chunk.iter().zip(values(reply, chunk.len())?) {
                found[*nth] = value;
            }
        }
        Ok(found)
    }

    /// Sets a key. It is acknowledged when it is as durable as the server makes writes.
    ///
    /// # Errors
    /// [`OutcomeUnknown`](crate::ErrorKind), [`ReadOnly`](crate::ErrorKind),
    /// [`Full`](crate::ErrorKind); as for [`Client::get`].
    pub fn set(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let command = Command::set(key.as_ref(), value.as_ref(), self.shared.cache.is_some());
        ok(&self.one(&command)?)
    }

    /// Sets a key that the server removes when this time is over, which begins when it makes the
    /// write. The time is rounded up to a whole millisecond.
    ///
    /// # Errors
    /// [`InvalidOption`](crate::ErrorKind): no time, or more than 2^62 ms. As for
    /// [`Client::set`].
    pub fn set_with_ttl(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        ttl: Duration,
    ) -> Result<()> {
        let (key, value, is_cached) = (key.as_ref(), value.as_ref(), self.shared.cache.is_some());
        ok(&self.one(&Command::set_with_ttl(key, value, ttl, is_cached)?)?)
    }

    /// Gives a key that is there a time to live, from now on, instead of the one that it has.
    /// Whether there is such a key. The time is rounded up to a whole millisecond.
    ///
    /// # Errors
    /// As for [`Client::set_with_ttl`].
    pub fn expire(&self, key: impl AsRef<[u8]>, ttl: Duration) -> Result<bool> {
        let command = Command::expire(key.as_ref(), ttl, self.shared.cache.is_some())?;
        Ok(count(&self.one(&command)?)? > 0)
    }

    /// Takes away a key's time to live. Whether it had one.
    ///
    /// # Errors
    /// As for [`Client::set`].
    pub fn persist(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        let command = Command::persist(key.as_ref(), self.shared.cache.is_some());
        Ok(count(&self.one(&command)?)? > 0)
    }

    /// How long a key lives from now on. The server is asked, not the cache.
    ///
    /// # Errors
    /// As for [`Client::get`].
    pub fn ttl(&self, key: impl AsRef<[u8]>) -> Result<Ttl> {
        let key = key.as_ref();
        let reply = self.one(&Command::ttl(key))?;
        left(self.cache(), key, &reply)
    }

    /// Deletes a key. Whether there was one.
    ///
    /// # Errors
    /// As for [`Client::set`].
    pub fn delete(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        let command = Command::delete(key.as_ref(), self.shared.cache.is_some());
        Ok(count(&self.one(&command)?)? > 0)
    }

    /// Deletes all keys from the start of a range to before its end, as one write. How many there
    /// were. Only on a Millrace node.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind) on other servers; as for [`Client::set`].
    pub fn delete_range<K: AsRef<[u8]>>(&self, keys: std::ops::Range<K>) -> Result<u64> {
        if keys.start.as_ref() >= keys.end.as_ref() {
            return Ok(0);
        }
        count(&self.one(&Command::delete_range(keys.start.as_ref(), keys.end.as_ref()))?)
    }

    /// Writes a batch, all of it or nothing, as one write that others see whole; see
    /// [`WriteBatch`].
    ///
    /// # Errors
    /// As for [`Client::set`]. On a Redis server, a command of a batch that fails when it is
    /// executed, such as for lack of memory, does not undo the others.
    pub fn write(&self, batch: WriteBatch) -> Result<()> {
        match batch.request(false)? {
            Some(command) => written(&self.call(&command)?),
            None => Ok(()),
        }
    }

    /// The entries of a range of keys, in their order, as an iterator: `a..b`, `a..=b`, `a..`,
    /// `..b`, `..`. With [`Range::rev`] from the last to the first. They are read in pages, each
    /// of its own moment, and not cached. Only on a Millrace node.
    pub fn range(&self, keys: impl KeyRange) -> Range {
        Range::new(self, Cursor::new(keys.into_bounds()))
    }

    /// The entries whose keys begin with a prefix, as for [`Client::range`].
    pub fn prefix(&self, with: impl AsRef<[u8]>) -> Range {
        Range::new(self, Cursor::new(prefix(with.as_ref())))
    }

    /// Begins an optimistic transaction; see [`Transaction`].
    pub fn transaction(&self) -> Transaction {
        Transaction::new(self)
    }

    /// After this, no read of this client returns a value older than the call: the server is asked
    /// for a sign that comes after all invalidations that it has sent. Without a cache there is
    /// nothing to do. If the server does not answer, everything cached is dropped, which serves as
    /// well.
    pub fn wait_coherent(&self) {
        if let Some((_, link)) = &self.shared.cache {
            link.wait_coherent(self.deadline());
        }
    }

    /// The cache's counts; all 0 without a cache.
    pub fn cache_stats(&self) -> CacheStats {
        self.cache().map(Cache::stats).unwrap_or_default()
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.shared.target.options.timeout
    }

    fn one(&self, command: &Command) -> Result<Reply> {
        one(self.call(command)?)
    }

    /// Sends a command and waits for its replies, again where that is safe.
    fn call(&self, command: &Command) -> Result<Vec<Reply>> {
        self.call_by(command, self.deadline())
    }

    /// The same until a deadline, for a call of several commands.
    fn call_by(&self, command: &Command, deadline: Instant) -> Result<Vec<Reply>> {
        let result = self.attempts(command, deadline);
        settle(self.cache(), &command.touches, None);
        result
    }

    fn cache(&self) -> Option<&Cache> {
        self.shared.cache.as_ref().map(|(cache, _)| &**cache)
    }

    fn attempts(&self, command: &Command, deadline: Instant) -> Result<Vec<Reply>> {
        let mut pause = Backoff::default();
        loop {
            let (sent, error) = match self.socket(deadline) {
                Ok(mut socket) => {
                    match socket.exchange(&command.bytes, command.replies, deadline) {
                        Ok(replies) => {
                            self.rest(socket);
                            return Ok(replies);
                        }
                        Err(lost) => (lost.sent, lost.error),
                    }
                }
                Err(error) => (false, error),
            };
            if sent && command.class == Class::Write {
                return Err(error.of_sent_write());
            }
            let again = self.shared.target.options.retry && error.is_passing();
            if !again || Instant::now() >= deadline {
                return Err(error);
            }
            // The first attempt may have met a connection that had ended; the next one is at once.
            sleep_until(pause.until(), deadline);
            pause.failed(Instant::now());
        }
    }

    /// A socket that rests, or a new one.
    fn socket(&self, deadline: Instant) -> Result<Socket> {
        let shared = &self.shared;
        loop {
            let resting = shared.resting.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(mut socket) = resting else { break };
            if socket.is_usable() {
                return Ok(socket);
            }
        }
        let backoff = || shared.backoff.lock().unwrap_or_else(PoisonError::into_inner);
        let until = backoff().until().filter(|_| shared.target.options.retry);
        sleep_until(until, deadline);
        let connected = Socket::connect(&shared.target, false, deadline);
        match &connected {
            Ok(_) => backoff().succeeded(),
            Err(_) => backoff().failed(Instant::now()),
        }
        connected
    }

    /// Keeps a socket for the next call.
    fn rest(&self, socket: Socket) {
        let mut resting = self.shared.resting.lock().unwrap_or_else(PoisonError::into_inner);
        if resting.len() < RESTING_MAX {
            resting.push(socket);
        }
    }
}

fn sleep_until(time: Option<Instant>, deadline: Instant) {
    if let Some(time) = time {
        std::thread::sleep(time.min(deadline).saturating_duration_since(Instant::now()));
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.shared.target.address.to_string();
        f.debug_struct("Client").field("address", &address).finish_non_exhaustive()
    }
}
