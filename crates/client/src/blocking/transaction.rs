//! Optimistic transactions, for threads.

use std::fmt;
use std::time::{Duration, Instant};

use super::Client;
use super::socket::Socket;
use crate::batch::WriteBatch;
use crate::command::{Command, settle, watched, written};
use crate::error::{Error, ErrorKind, Result};

/// An optimistic transaction: it reads, collects writes, and [commits](Transaction::commit) them
/// all at once if no key that it has read was written meanwhile.
///
/// It has a connection of its own from its first read to its end. Dropping it writes nothing. Reads
/// see the transaction's own writes; they come from the server and not from the cache.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/example.rs"));
/// # fn main() -> client::Result<()> {
/// # let server = Redis::start(&[]);
/// # let client = client::blocking::Client::connect(&server.address())?;
/// use millrace::client::ErrorKind;
///
/// loop {
///     let mut transaction = client.transaction();
///     let visits = transaction.get("visits")?.unwrap_or(b"0".to_vec());
///     let visits: u64 = String::from_utf8_lossy(&visits).parse().unwrap_or(0);
///     transaction.set("visits", (visits + 1).to_string());
///     match transaction.commit() {
///         Err(error) if error.kind() == ErrorKind::Conflict => continue,
///         result => break result?,
///     }
/// }
/// assert_eq!(client.get("visits")?.unwrap(), b"1");
/// # Ok(())
/// # }
/// ```
pub struct Transaction {
    client: Client,
    /// Watches the keys that were read.
    socket: Option<Socket>,
    broken: Option<Error>,
    batch: WriteBatch,
}

impl Transaction {
    pub(super) fn new(client: &Client) -> Transaction {
        Transaction { client: client.clone(), socket: None, broken: None, batch: WriteBatch::new() }
    }

    /// Reads a key, and makes the commit depend on it.
    ///
    /// # Errors
    /// As for [`Client::get`]. When the connection breaks, the transaction fails: begin it again.
    pub fn get(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>> {
        let key = key.as_ref();
        if let Some(said) = self.batch.says(key) {
            return Ok(said.map(<[u8]>::to_vec));
        }
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let deadline = self.client.deadline();
        let command = Command::watch_and_get(key);
        let mut attempts = 0;
        loop {
            attempts += 1;
            let first = self.socket.is_none();
            let mut socket = match self.socket.take() {
                Some(socket) => socket,
                None => self.connect(deadline)?,
            };
            match socket.exchange(&command.bytes, command.replies, deadline) {
                Ok(replies) => {
                    self.socket = Some(socket);
                    return watched(replies);
                }
                // Nothing was read before: another connection is as good.
                Err(lost) if first && attempts < 3 && lost.error.is_passing() => {
                    if !self.client.shared.target.options.retry {
                        return Err(lost.error);
                    }
                }
                Err(lost) => {
                    self.broken = Some(lost.error.clone());
                    return Err(lost.error);
                }
            }
        }
    }

    fn connect(&self, deadline: Instant) -> Result<Socket> {
        loop {
            match self.client.socket(deadline) {
                Err(error)
                    if self.client.shared.target.options.retry
                        && error.is_passing()
                        && Instant::now() < deadline => {}
                result => return result,
            }
        }
    }

    /// Sets a key at commit.
    pub fn set(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) {
        self.batch.set(key, value);
    }

    /// Sets a key at commit that the server removes after this time, from the commit on; see
    /// [`Client::set_with_ttl`].
    pub fn set_with_ttl(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>, ttl: Duration) {
        self.batch.set_with_ttl(key, value, ttl);
    }

    /// Deletes a key at commit.
    pub fn delete(&mut self, key: impl AsRef<[u8]>) {
        self.batch.delete(key);
    }

    /// Makes all its writes, as one write, if no key that it has read was written since.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`]: nothing was written; begin the transaction again. As for
    /// [`Client::write`].
    pub fn commit(mut self) -> Result<()> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        let Some(mut socket) = self.socket.take() else {
            return self.client.write(std::mem::take(&mut self.batch));
        };
        let Some(command) = self.batch.request(true)? else { return Ok(()) };
        let deadline = self.client.deadline();
        let result = socket.exchange(&command.bytes, command.replies, deadline);
        let cache = self.client.shared.cache.as_ref().map(|(cache, _)| &**cache);
        settle(cache, &command.touches, None);
        match result {
            Ok(replies) => {
                let outcome = written(&replies);
                // The server has ended the transaction, and watches nothing any more.
                let ended = |error: &Error| error.kind() == ErrorKind::Conflict;
                if outcome.as_ref().err().is_none_or(ended) {
                    self.client.rest(socket);
                }
                outcome
            }
            Err(lost) if lost.sent => Err(lost.error.of_sent_write()),
            Err(lost) => Err(lost.error),
        }
    }
}

impl fmt::Debug for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction").field("writes", &self.batch.len()).finish_non_exhaustive()
    }
}
