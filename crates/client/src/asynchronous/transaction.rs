//! Optimistic transactions.

use std::fmt;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::Client;
use super::socket::Socket;
use crate::backoff::Backoff;
use crate::batch::WriteBatch;
use crate::cache::Cache;
use crate::command::{Command, Touches, settle, watched, written};
use crate::error::{Error, ErrorKind, Result};

/// An optimistic transaction: it reads, collects writes, and [commits](Transaction::commit) them
/// all at once if no key that it has read was written meanwhile.
///
/// It has a connection of its own from its first read to its end; up to 64 transactions of a client
/// have one at the same time, and others wait. Dropping it writes nothing. Reads see the
/// transaction's own writes; they come from the server and not from the cache.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/example.rs"));
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> client::Result<()> {
/// # let server = Redis::start(&[]);
/// # let client = client::Client::connect(&server.address()).await?;
/// use millrace::client::ErrorKind;
///
/// loop {
///     let mut transaction = client.transaction();
///     let visits = transaction.get("visits").await?.unwrap_or(b"0".to_vec());
///     let visits: u64 = String::from_utf8_lossy(&visits).parse().unwrap_or(0);
///     transaction.set("visits", (visits + 1).to_string());
///     match transaction.commit().await {
///         Err(error) if error.kind() == ErrorKind::Conflict => continue,
///         result => break result?,
///     }
/// }
/// assert_eq!(client.get("visits").await?.unwrap(), b"1");
/// # Ok(())
/// # }
/// ```
pub struct Transaction {
    client: Client,
    /// Watches the keys that were read.
    socket: Option<(Socket, OwnedSemaphorePermit)>,
    broken: Option<Error>,
    batch: WriteBatch,
}

impl Transaction {
    pub(super) fn new(client: &Client) -> Transaction {
        let batch = WriteBatch::new();
        Transaction { client: client.clone(), socket: None, broken: None, batch }
    }

    /// Reads a key, and makes the commit depend on it.
    ///
    /// # Errors
    /// As for [`Client::get`]. When the connection breaks, or the future of an earlier read was
    /// dropped, the transaction fails: begin it again.
    pub async fn get(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>> {
        let key = key.as_ref();
        if let Some(said) = self.batch.says(key) {
            return Ok(said.map(<[u8]>::to_vec));
        }
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let deadline = self.client.deadline();
        let command = Command::watch_and_get(key);
        if self.socket.is_none() {
            self.socket = Some(self.connect(deadline).await?);
        }
        let Some((socket, _)) = &mut self.socket else { return Err(Error::closed()) };
        // Until it is answered, the connection does not watch what this transaction believes.
        let interrupted = "a read of the transaction was interrupted";
        self.broken = Some(Error::new(ErrorKind::Unreachable, interrupted));
        match socket.exchange(&command.bytes, command.replies, deadline).await {
            Ok(replies) => {
                self.broken = None;
                watched(replies)
            }
            Err(lost) => {
                self.broken = Some(lost.error.clone());
                Err(lost.error)
            }
        }
    }

    async fn connect(&self, deadline: Instant) -> Result<(Socket, OwnedSemaphorePermit)> {
        let places = self.client.shared.transactions.clone();
        let permit = match timeout_at(deadline, places.acquire_owned()).await {
            Ok(Ok(permit)) => permit,
            Ok(Err(_)) => return Err(Error::closed()),
            Err(_) => {
                return Err(Error::new(ErrorKind::Timeout, "too many transactions are open"));
            }
        };
        let mut backoff = Backoff::default();
        loop {
            match self.client.socket(deadline).await {
                Ok(socket) => return Ok((socket, permit)),
                Err(error) => {
                    let again = self.client.shared.target.options.retry && error.is_passing();
                    if !again || Instant::now() >= deadline {
                        return Err(error);
                    }
                }
            }
            backoff.failed(std::time::Instant::now());
            if let Some(until) = backoff.until() {
                sleep_until(deadline.min(until.into())).await;
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
    pub async fn commit(mut self) -> Result<()> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        let Some((mut socket, _permit)) = self.socket.take() else {
            return self.client.write(std::mem::take(&mut self.batch)).await;
        };
        let Some(command) = self.batch.request(true)? else { return Ok(()) };
        let deadline = self.client.deadline();
        // Also when this future is dropped.
        let settled =
            Settle { cache: self.client.shared.cache.as_deref(), touches: command.touches };
        let result = socket.exchange(&command.bytes, command.replies, deadline).await;
        drop(settled);
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

/// Makes the cache forget what a commit has written, however it ends.
struct Settle<'a> {
    cache: Option<&'a Cache>,
    touches: Touches,
}

impl Drop for Settle<'_> {
    fn drop(&mut self) {
        settle(self.cache, &self.touches, None);
    }
}

impl fmt::Debug for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction").field("writes", &self.batch.len()).finish_non_exhaustive()
    }
}
