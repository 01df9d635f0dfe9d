//! The handle of an asynchronous client.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use resp::Reply;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

use super::driver::{Driver, REQUESTS_MAX, Request, State};
use super::range::Range;
use super::socket::Socket;
use super::transaction::Transaction;
use crate::batch::WriteBatch;
use crate::bounds::{KeyRange, prefix};
use crate::cache::{Cache, CacheStats, Lookup, Turn, WAIT_PART, WAITS_MAX};
use crate::command::{
    Class, Command, Cursor, KEYS_MAX, Touches, count, left, missed_value, ok, one, values, written,
};
use crate::error::{Error, ErrorKind, Result};
use crate::options::{Options, Target};
use crate::ttl::Ttl;

/// Transactions that have a connection at the same time.
const TRANSACTIONS_MAX: usize = 64;
/// Connections of transactions that are kept while nobody uses them.
const RESTING_MAX: usize = 8;

/// A client of a Millrace node or a Redis server, for tokio.
///
/// Clones are the same client, cheap, and may be used from any task. All calls share one
/// connection: requests of concurrent tasks are sent together, and answered as their replies
/// arrive.
///
/// **Dropping a future** of any method is safe at any time. The operation was either not begun, or
/// goes on to its end without its caller.
///
/// **Time**: every call ends within [`Options::timeout`].
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/example.rs"));
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> client::Result<()> {
/// # let server = Redis::start(&[]);
/// # let address = server.address();
/// use millrace::Client;
/// use millrace::client::{Ttl, WriteBatch};
/// use std::time::Duration;
///
/// let client = Client::connect(&address).await?; // such as "127.0.0.1:6379"
/// client.set("a", "1").await?;
/// assert_eq!(client.get("a").await?.as_deref(), Some(&b"1"[..]));
/// assert_eq!(client.multi_get(["a", "b"]).await?, [Some(b"1".to_vec()), None]);
/// assert!(client.delete("a").await?);
///
/// client.set_with_ttl("session", "Ada", Duration::from_secs(3600)).await?;
/// assert!(client.expire("session", Duration::from_secs(7200)).await?);
/// assert!(matches!(client.ttl("session").await?, Ttl::Left(left) if left.as_secs() > 3600));
///
/// let mut batch = WriteBatch::new();
/// batch.set("b", "2").set("c", "3");
/// client.write(batch).await?;
///
/// // Many tasks at once share the connection.
/// let tasks: Vec<_> = (0..100_u32)
///     .map(|n| {
///         let client = client.clone();
///         tokio::spawn(async move { client.set(n.to_be_bytes(), "v").await })
///     })
///     .collect();
/// for task in tasks {
///     task.await.expect("the task does not panic")?;
/// }
///
/// // On a Millrace node:
/// let mut range = client.range("b"..);
/// while let Some(entry) = range.next().await {
///     # if entry.is_err() { break } // This is a Redis server.
///     let (key, value) = entry?;
///     println!("{}: {}", key.escape_ascii(), value.escape_ascii());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Client {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub target: Arc<Target>,
    inbox: mpsc::Sender<Request>,
    pub cache: Option<Arc<Cache>>,
    resting: Mutex<Vec<Socket>>,
    pub transactions: Arc<Semaphore>,
}

impl Client {
    /// Connects with the default [`Options`].
    ///
    /// # Errors
    /// As for [`Options::connect`].
    pub async fn connect(address: &str) -> Result<Client> {
        Options::new().connect(address).await
    }

    pub(crate) async fn start(target: Target) -> Result<Client> {
        let target = Arc::new(target);
        let options = &target.options;
        let cache = Cache::of(options).map(Arc::new);
        let sent = Instant::now();
        let deadline = sent + options.connect_timeout;
        let socket = Socket::connect(&target, cache.is_some(), deadline).await?;
        if let Some(cache) = &cache {
            cache.open(sent.into_std());
            cache.serve_ahead(socket.facts.reads_ahead);
            cache.serve_index(socket.facts.indexes);
        }
        let (inbox, received) = mpsc::channel(REQUESTS_MAX);
        let driver = Driver {
            target: target.clone(),
            cache: cache.clone(),
            inbox: received,
            again: VecDeque::new(),
        };
        tokio::spawn(driver.run(socket));
        let (resting, transactions) =
            (Mutex::default(), Arc::new(Semaphore::new(TRANSACTIONS_MAX)));
        Ok(Client { shared: Arc::new(Shared { target, inbox, cache, resting, transactions }) })
    }

    /// Looks up a key. `None`: there is no such key. A cached value needs no waiting.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`], [`ErrorKind::Timeout`] and those that the server's answer stands
    /// for, such as [`ErrorKind::WrongType`]; as from all calls.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>> {
        let key = key.as_ref();
        let (mut command, mut with_place) = (Command::get(key), false);
        let deadline = self.deadline();
        if let Some(cache) = &self.shared.cache {
            match cache.get(key, std::time::Instant::now()) {
                Lookup::Hit(found) => {
                    if cache.wants_chunk() {
                        self.wake_driver();
                    }
                    return Ok(found);
                }
                Lookup::Miss(ticket) => {
                    let wait_until =
                        Instant::now() + self.shared.target.options.timeout / WAIT_PART;
                    let (mut turn, mut waits) = (cache.turn(), 0);
                    while let Turn::Wait(stretch) = turn
                        && waits < WAITS_MAX
                        && Instant::now() < wait_until
                    {
                        let until = wait_until.into_std();
                        let found = cache.wait_for_as_task(stretch, key, until).await;
                        if let Some(found) = found {
                            return Ok(found);
                        }
                        (turn, waits) = (cache.turn(), waits + 1);
                    }
                    with_place = turn != Turn::Ask;
                    command = Command::get_missed(with_place, ticket, key);
                }
            }
        }
        missed_value(one(self.call_by(command, deadline).await?)?, with_place)
    }

    /// Looks up many keys. The answers are in the order of the keys; each may be of another moment.
    ///
    /// # Errors
    /// As for [`Client::get`], if any of the keys cannot be read; but a key that does not hold a
    /// string is `None`, as for Redis's `MGET`.
    pub async fn multi_get<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let keys: Vec<Vec<u8>> = keys.into_iter().map(|key| key.as_ref().to_vec()).collect();
        let mut found = vec![None; keys.len()];
        let mut missing = Vec::new();
        match &self.shared.cache {
            None => missing.extend((0..keys.len()).map(|nth| (nth, None))),
            Some(cache) => {
                for (nth, key) in keys.iter().enumerate() {
                    match cache.get(key, std::time::Instant::now()) {
                        Lookup::Hit(value) => found[nth] = value,
                        Lookup::Miss(ticket) => missing.push((nth, Some(ticket))),
                    }
                }
            }
        }
        let deadline = self.deadline();
        for chunk in missing.chunks(KEYS_MAX) {
            let mut command =
                Command::multi_get(chunk.iter().map(|(nth, _)| keys[*nth].as_slice()));
            if self.shared.cache.is_some() {
                let fills =
                    chunk.iter().filter_map(|(nth, ticket)| Some(((*ticket)?, keys[*nth].clone())));
                command = command.filling(fills.collect());
            }
            let reply = one(self.call_by(command, deadline).await?)?;
            for ((nth, _), value) in chunk.iter().zip(values(reply, chunk.len())?) {
                found[*nth] = value;
            }
        }
        Ok(found)
    }

    /// Sets a key. It is acknowledged when it is as durable as the server makes writes.
    ///
    /// # Errors
    /// [`ErrorKind::OutcomeUnknown`], [`ErrorKind::ReadOnly`], [`ErrorKind::Full`]; as for
    /// [`Client::get`].
    pub async fn set(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let command = Command::set(key.as_ref(), value.as_ref(), self.shared.cache.is_some());
        ok(&self.one(command).await?)
    }

    /// Sets a key that the server removes when this time is over, which begins when it makes the
    /// write. The time is rounded up to a whole millisecond.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`]: no time, or more than 2^62 ms. As for
    /// [`Client::set`].
    pub async fn set_with_ttl(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        ttl: Duration,
    ) -> Result<()> {
        let (key, value, is_cached) = (key.as_ref(), value.as_ref(), self.shared.cache.is_some());
        let command = Command::set_with_ttl(key, value, ttl, is_cached)?;
        ok(&self.one(command).await?)
    }

    /// Gives a key that is there a time to live, from now on, instead of the one that it has.
    /// Whether there is such a key. The time is rounded up to a whole millisecond.
    ///
    /// # Errors
    /// As for [`Client::set_with_ttl`].
    pub async fn expire(&self, key: impl AsRef<[u8]>, ttl: Duration) -> Result<bool> {
        let command = Command::expire(key.as_ref(), ttl, self.shared.cache.is_some())?;
        Ok(count(&self.one(command).await?)? > 0)
    }

    /// Takes away a key's time to live. Whether it had one.
    ///
    /// # Errors
    /// As for [`Client::set`].
    pub async fn persist(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        let command = Command::persist(key.as_ref(), self.shared.cache.is_some());
        Ok(count(&self.one(command).await?)? > 0)
    }

    /// How long a key lives from now on. The server is asked, not the cache.
    ///
    /// # Errors
    /// As for [`Client::get`].
    pub async fn ttl(&self, key: impl AsRef<[u8]>) -> Result<Ttl> {
        let key = key.as_ref();
        let reply = self.one(Command::ttl(key)).await?;
        left(self.shared.cache.as_deref(), key, &reply)
    }

    /// Deletes a key. Whether there was one.
    ///
    /// # Errors
    /// As for [`Client::set`].
    pub async fn delete(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        let command = Command::delete(key.as_ref(), self.shared.cache.is_some());
        Ok(count(&self.one(command).await?)? > 0)
    }

    /// Deletes all keys from the start of a range to before its end, as one write. How many there
    /// were. Only on a Millrace node.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] on other servers; as for [`Client::set`].
    pub async fn delete_range<K: AsRef<[u8]>>(&self, keys: std::ops::Range<K>) -> Result<u64> {
        if keys.start.as_ref() >= keys.end.as_ref() {
            return Ok(0);
        }
        let command = Command::delete_range(keys.start.as_ref(), keys.end.as_ref());
        count(&self.one(command).await?)
    }

    /// Writes a batch, all of it or nothing, as one write that others see whole; see
    /// [`WriteBatch`].
    ///
    /// # Errors
    /// As for [`Client::set`]. On a Redis server, a command of a batch that fails when it is
    /// executed, such as for lack of memory, does not undo the others.
    pub async fn write(&self, batch: WriteBatch) -> Result<()> {
        match batch.request(false)? {
            Some(command) => written(&self.call(command).await?),
            None => Ok(()),
        }
    }

    /// The entries of a range of keys, in their order, as a stream: `a..b`, `a..=b`, `a..`, `..b`,
    /// `..`. With [`Range::rev`] from the last to the first. They are read in pages, each of its
    /// own moment, and not cached. Only on a Millrace node.
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
    pub async fn wait_coherent(&self) {
        if let Some(cache) = &self.shared.cache
            && self.call(Command::read(&[b"PING"])).await.is_err()
        {
            cache.clear();
        }
    }

    /// The cache's counts; all 0 without a cache.
    pub fn cache_stats(&self) -> CacheStats {
        self.shared.cache.as_ref().map(|cache| cache.stats()).unwrap_or_default()
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.shared.target.options.timeout
    }

    pub(super) async fn one(&self, command: Command) -> Result<Reply> {
        one(self.call(command).await?)
    }

    /// Makes the driver look what is to be read ahead: with a request that it leaves out.
    fn wake_driver(&self) {
        let (back, _) = oneshot::channel();
        let (command, state) = (Command::read(&[b"PING"]), Arc::default());
        // If there is no room, the driver is awake.
        let _ =
            self.shared.inbox.try_send(Request { command, state, back, deadline: self.deadline() });
    }

    /// Hands a request to the driver and waits for its replies.
    async fn call(&self, command: Command) -> Result<Vec<Reply>> {
        let deadline = self.deadline();
        self.call_by(command, deadline).await
    }

    /// The same until a deadline, for a call of several commands.
    async fn call_by(&self, command: Command, deadline: Instant) -> Result<Vec<Reply>> {
        let Ok(place) = timeout_at(deadline, self.shared.inbox.reserve()).await else {
            return Err(Error::new(ErrorKind::Timeout, "too many requests wait before this one"));
        };
        let Ok(place) = place else { return Err(Error::closed()) };
        let (back, answered) = oneshot::channel();
        let (state, class) = (Arc::new(State::default()), command.class);
        // What a later answer would settle must hold when this call fails.
        let touches = match &command.touches {
            Touches::Fill(_) | Touches::Place(..) => Touches::Nothing,
            touches => touches.clone(),
        };
        place.send(Request { command, state: state.clone(), back, deadline });
        let error = match timeout_at(deadline, answered).await {
            Ok(Ok(result)) => return result,
            // The driver has ended with its runtime.
            Ok(Err(_)) => Error::closed(),
            Err(_) => Error::timeout(),
        };
        if state.give_up() || class == Class::Read {
            return Err(error);
        }
        crate::command::settle(self.shared.cache.as_deref(), &touches, None);
        Err(error.of_sent_write())
    }

    /// A connection for a transaction.
    pub(super) async fn socket(&self, deadline: Instant) -> Result<Socket> {
        loop {
            let resting = self.shared.resting.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(mut socket) = resting else {
                return Socket::connect(&self.shared.target, false, deadline).await;
            };
            if socket.is_usable() {
                return Ok(socket);
            }
        }
    }

    /// Keeps a connection for the next transaction.
    pub(super) fn rest(&self, socket: Socket) {
        let mut resting = self.shared.resting.lock().unwrap_or_else(PoisonError::into_inner);
        if resting.len() < RESTING_MAX {
            resting.push(socket);
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.shared.target.address.to_string();
        f.debug_struct("Client").field("address", &address).finish_non_exhaustive()
    }
}
