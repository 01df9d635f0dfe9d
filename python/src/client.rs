//! Clients of Millrace nodes and Redis servers.

use std::path::PathBuf;

use millrace::client;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::answer::Answer;
use crate::batch::ClientBatch;
use crate::bytes::{Bytes, keys};
use crate::error::{Failure, exception};
use crate::family::{bounds, or_default};
use crate::mode::Mode;
use crate::options::seconds;
use crate::range::{Range, Source};
use crate::runtime::in_runtime;
use crate::slot::Slot;

/// A client for threads, or for the tasks of a loop.
#[derive(Clone)]
pub enum Kind {
    Blocking(client::blocking::Client),
    Loop(client::Client),
}

/// A client of a Millrace node, or, for all but ranges, of any Redis server.
///
/// It may be used from any thread: one that calls has a socket for itself until it has its answer.
/// In a `with` statement it is closed at the end.
#[pyclass(frozen, module = "millrace")]
pub struct Client {
    slot: Slot<Kind>,
}

/// Connects to a server.
#[pyfunction]
#[pyo3(signature = (address, waits, *, user=None, password=None, database=None, timeout=None,
    connect_timeout=None, retry=None, cache=None, staleness_max=None, read_ahead=None, index=None,
    reply_bytes_max=None, tls=false, tls_authority=None, tls_certificate=None, tls_key=None, tls_server_name=None))]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub fn connect(
    py: Python<'_>,
    address: String,
    waits: bool,
    user: Option<String>,
    password: Option<String>,
    database: Option<u32>,
    timeout: Option<f64>,
    connect_timeout: Option<f64>,
    retry: Option<bool>,
    cache: Option<usize>,
    staleness_max: Option<f64>,
    read_ahead: Option<usize>,
    index: Option<usize>,
    reply_bytes_max: Option<usize>,
    tls: bool,
    tls_authority: Option<PathBuf>,
    tls_certificate: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_server_name: Option<String>,
) -> PyResult<Py<PyAny>> {
    let mut options = client::Options::new();
    if let Some(user) = user {
        options = options.user(user);
    }
    if let Some(password) = password {
        options = options.password(password);
    }
    if let Some(number) = database {
        options = options.database(number);
    }
    if let Some(time) = timeout {
        options = options.timeout(seconds(py, "timeout", time)?);
    }
    if let Some(time) = connect_timeout {
        options = options.connect_timeout(seconds(py, "connect_timeout", time)?);
    }
    if let Some(retry) = retry {
        options = options.retry(retry);
    }
    if let Some(bytes) = cache {
        options = options.cache(bytes);
    }
    if let Some(time) = staleness_max {
        options = options.staleness_max(seconds(py, "staleness_max", time)?);
    }
    if let Some(bytes) = read_ahead {
        options = options.read_ahead(bytes);
    }
    if let Some(bytes) = index {
        options = options.index(bytes);
    }
    if let Some(bytes) = reply_bytes_max {
        options = options.reply_bytes_max(bytes);
    }
    let mut given = tls;
    let mut chosen = client::Tls::new();
    if let Some(file) = tls_authority {
        chosen = chosen.authority(file);
        given = true;
    }
    match (tls_certificate, tls_key) {
        (Some(file), Some(key)) => {
            chosen = chosen.certificate(file, key);
            given = true;
        }
        (None, None) => {}
        _ => {
            let text = "tls_certificate and tls_key must be given together";
            return Err(exception(py, "InvalidOption", text));
        }
    }
    if let Some(name) = tls_server_name {
        chosen = chosen.server_name(name);
        given = true;
    }
    if given {
        options = options.tls(chosen);
    }
    match Mode::new(waits) {
        Mode::Blocking => {
            let client = py.detach(|| options.connect_blocking(&address));
            answer(py, client.map(|client| Answer::Client(Kind::Blocking(client))))
        }
        Mode::Loop => {
            let connected =
                async move { Ok(Answer::Client(Kind::Loop(options.connect(&address).await?))) };
            Mode::Loop.run(py, in_runtime(connected)?)
        }
    }
}

fn answer(py: Python<'_>, outcome: client::Result<Answer>) -> PyResult<Py<PyAny>> {
    outcome.map_err(|error| Failure::Client(error).into_py(py))?.into_py(py)
}

impl Client {
    pub fn new(kind: Kind) -> Client {
        Client { slot: Slot::new(kind, "client") }
    }

    fn kind(&self, py: Python<'_>) -> PyResult<Kind> {
        self.slot.with(py, |kind| kind.clone())
    }
}

/// Makes a call of either client: `$await` is `.await` for the asynchronous one.
macro_rules! call {
    ($slf:ident, $py:ident, |$client:ident| $make:expr => $answer:expr) => {
        match $slf.kind($py)? {
            Kind::Blocking($client) => {
                let made = $py.detach(move || $make);
                answer($py, made.map($answer))
            }
            Kind::Loop($client) => {
                let call = async move { Ok($answer($make.await?)) };
                Mode::Loop.run($py, in_runtime(call)?)
            }
        }
    };
}

#[pymethods]
impl Client {
    /// Looks up a key; returns `default` if there is no such key.
    #[pyo3(signature = (key, default=None))]
    fn get(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        default: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let key = key.as_ref().to_vec();
        let found = call!(self, py, |client| client.get(key) => Answer::Bytes)?;
        Ok(or_default(py, found, default))
    }

    /// Looks up many keys. The values are in the order of the keys, with None for a key that is not
    /// there.
    fn multi_get(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let keys = self::keys(keys)?;
        call!(self, py, |client| client.multi_get(keys) => Answer::ManyBytes)
    }

    /// Sets a key. It is acknowledged when it is as durable as the server makes writes. With `ttl`
    /// the server removes it after so many seconds, from then on; without, it has no deadline any
    /// more.
    #[pyo3(signature = (key, value, *, ttl=None))]
    fn set(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        value: Bytes<'_, '_>,
        ttl: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        let (key, value) = (key.as_ref().to_vec(), value.as_ref().to_vec());
        match ttl {
            None => call!(self, py, |client| client.set(key, value) => |()| Answer::Nothing),
            Some(ttl) => {
                let ttl = seconds(py, "ttl", ttl)?;
                call!(self, py, |client| client.set_with_ttl(key, value, ttl) => |()| Answer::Nothing)
            }
        }
    }

    /// Gives a key that is there so many seconds to live, from now on. Returns whether there is
    /// such a key.
    fn expire(&self, py: Python<'_>, key: Bytes<'_, '_>, ttl: f64) -> PyResult<Py<PyAny>> {
        let (key, ttl) = (key.as_ref().to_vec(), seconds(py, "ttl", ttl)?);
        call!(self, py, |client| client.expire(key, ttl) => Answer::Bool)
    }

    /// Takes the deadline of a key away. Returns whether it had one.
    fn persist(&self, py: Python<'_>, key: Bytes<'_, '_>) -> PyResult<Py<PyAny>> {
        let key = key.as_ref().to_vec();
        call!(self, py, |client| client.persist(key) => Answer::Bool)
    }

    /// The seconds that a key lives from now on: math.inf if it has no deadline, None if there is
    /// no such key. The server is asked, not the cache.
    fn ttl(&self, py: Python<'_>, key: Bytes<'_, '_>) -> PyResult<Py<PyAny>> {
        let key = key.as_ref().to_vec();
        call!(self, py, |client| client.ttl(key) => Answer::Ttl)
    }

    /// Deletes a key. Returns whether there was one.
    fn delete(&self, py: Python<'_>, key: Bytes<'_, '_>) -> PyResult<Py<PyAny>> {
        let key = key.as_ref().to_vec();
        call!(self, py, |client| client.delete(key) => Answer::Bool)
    }

    /// Deletes all keys from `start` to before `stop`, as one write; returns how many there were.
    /// Only on a Millrace node.
    fn delete_range(
        &self,
        py: Python<'_>,
        start: Bytes<'_, '_>,
        stop: Bytes<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let keys = start.as_ref().to_vec()..stop.as_ref().to_vec();
        call!(self, py, |client| client.delete_range(keys) => Answer::Count)
    }

    /// Writes a batch, all of it or nothing. The batch may be used again.
    fn write(&self, py: Python<'_>, batch: &Bound<'_, ClientBatch>) -> PyResult<Py<PyAny>> {
        let batch = batch.borrow().batch.clone();
        call!(self, py, |client| client.write(batch) => |()| Answer::Nothing)
    }

    /// Iterates over the entries (key, value) from `start` to before `stop`, in the order of the
    /// keys; with `reverse` from the last to the first. They are read in pages, each of its own
    /// moment. Only on a Millrace node.
    #[pyo3(signature = (start=None, stop=None, *, reverse=false))]
    fn range(
        &self,
        py: Python<'_>,
        start: Option<Bytes<'_, '_>>,
        stop: Option<Bytes<'_, '_>>,
        reverse: bool,
    ) -> PyResult<Range> {
        let keys = bounds(start, stop);
        Ok(match self.kind(py)? {
            Kind::Blocking(client) => entries_blocking(client.range(keys), reverse),
            Kind::Loop(client) => entries(client.range(keys), reverse),
        })
    }

    /// Iterates over the entries whose keys begin with `prefix`. Only on a Millrace node.
    #[pyo3(signature = (prefix, *, reverse=false))]
    fn prefix(&self, py: Python<'_>, prefix: Bytes<'_, '_>, reverse: bool) -> PyResult<Range> {
        Ok(match self.kind(py)? {
            Kind::Blocking(client) => entries_blocking(client.prefix(prefix), reverse),
            Kind::Loop(client) => entries(client.prefix(prefix), reverse),
        })
    }

    /// Begins an optimistic transaction.
    fn transaction(&self, py: Python<'_>) -> PyResult<ClientTransaction> {
        let transaction = match self.kind(py)? {
            Kind::Blocking(client) => Work::Blocking(client.transaction()),
            Kind::Loop(client) => Work::Loop(client.transaction()),
        };
        Ok(ClientTransaction { slot: Slot::new(transaction, "transaction") })
    }

    /// After this, no read returns a cached value older than the call.
    fn wait_coherent(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self.kind(py)? {
            Kind::Blocking(client) => {
                py.detach(|| client.wait_coherent());
                Ok(py.None())
            }
            Kind::Loop(client) => {
                let call = async move {
                    client.wait_coherent().await;
                    Ok(Answer::Nothing)
                };
                Mode::Loop.run(py, in_runtime(call)?)
            }
        }
    }

    /// The counts of the cache, its read-ahead and its index; all 0 without a cache. `CacheStats`
    /// has their names.
    fn cache_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = match self.kind(py)? {
            Kind::Blocking(client) => client.cache_stats(),
            Kind::Loop(client) => client.cache_stats(),
        };
        let counts = PyDict::new(py);
        counts.set_item("hits", stats.hits)?;
        counts.set_item("misses", stats.misses)?;
        counts.set_item("invalidations", stats.invalidations)?;
        counts.set_item("clears", stats.clears)?;
        counts.set_item("entries", stats.entries)?;
        counts.set_item("bytes_cached", stats.bytes_cached)?;
        counts.set_item("bytes_used", stats.bytes_used)?;
        counts.set_item("round_trips", stats.round_trips)?;
        counts.set_item("stretches", stats.stretches)?;
        counts.set_item("values_ahead", stats.values_ahead)?;
        counts.set_item("values_ahead_used", stats.values_ahead_used)?;
        counts.set_item("index_is_whole", stats.index_is_whole)?;
        counts.set_item("index_keys", stats.index_keys)?;
        counts.set_item("index_bytes", stats.index_bytes)?;
        counts.set_item("index_answers", stats.index_answers)?;
        counts.set_item("index_loads", stats.index_loads)?;
        counts.set_item("index_load_time", stats.index_load_time.as_secs_f64())?;
        Ok(counts)
    }

    /// Ends the client: later calls raise ClosedError. Those under way go on.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let ended = self.slot.end()?;
        py.detach(|| drop(ended));
        Ok(())
    }

    /// The value of a key; KeyError if there is no such key.
    fn __getitem__(&self, key: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let found = self.get(key.py(), key.extract()?, None)?;
        match found.is_none(key.py()) {
            true => Err(PyKeyError::new_err(key.clone().unbind())),
            false => Ok(found),
        }
    }

    fn __setitem__(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        value: Bytes<'_, '_>,
    ) -> PyResult<()> {
        self.set(py, key, value, None).map(drop)
    }

    /// Deletes a key; a key that is not there is no error.
    fn __delitem__(&self, py: Python<'_>, key: Bytes<'_, '_>) -> PyResult<()> {
        self.delete(py, key).map(drop)
    }

    fn __contains__(&self, py: Python<'_>, key: Bytes<'_, '_>) -> PyResult<bool> {
        Ok(!self.get(py, key, None)?.is_none(py))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }
}

fn entries_blocking(range: client::blocking::Range, reverse: bool) -> Range {
    let range = if reverse { range.rev() } else { range };
    Range::new(Source::Blocking(range), false, Mode::Blocking)
}

fn entries(range: client::Range, reverse: bool) -> Range {
    let range = if reverse { range.rev() } else { range };
    Range::new(Source::Client(range), false, Mode::Loop)
}

enum Work {
    Blocking(client::blocking::Transaction),
    Loop(client::Transaction),
}

/// An optimistic transaction of a server: its writes are made at the commit, together, if no key
/// that it has read was written meanwhile; else the commit raises ConflictError.
///
/// It has a connection of its own from its first read to its end. In a `with` statement it is
/// committed at the end, or abandoned after an exception.
#[pyclass(frozen, module = "millrace")]
pub struct ClientTransaction {
    slot: Slot<Work>,
}

#[pymethods]
impl ClientTransaction {
    /// Reads a key, and makes the commit depend on it.
    #[pyo3(signature = (key, default=None))]
    fn get(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        default: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let key = key.as_ref().to_vec();
        let mut lent = self.slot.lend(py)?;
        let found = match lent.get() {
            Work::Blocking(transaction) => {
                let found = py.detach(|| transaction.get(key));
                answer(py, found.map(Answer::Bytes))?
            }
            Work::Loop(_) => {
                let call = async move {
                    match lent.get() {
                        Work::Loop(transaction) => Ok(Answer::Bytes(transaction.get(key).await?)),
                        Work::Blocking(_) => Ok(Answer::Nothing),
                    }
                };
                Mode::Loop.run(py, in_runtime(call)?)?
            }
        };
        Ok(or_default(py, found, default))
    }

    /// Sets a key at the commit. With `ttl` the server removes it after so many seconds.
    #[pyo3(signature = (key, value, *, ttl=None))]
    fn set(
        &self,
        py: Python<'_>,
        key: Bytes<'_, '_>,
        value: Bytes<'_, '_>,
        ttl: Option<f64>,
    ) -> PyResult<()> {
        let ttl = ttl.map(|ttl| seconds(py, "ttl", ttl)).transpose()?;
        self.slot.with(py, |work| match (work, ttl) {
            (Work::Blocking(transaction), None) => transaction.set(key, value),
            (Work::Blocking(transaction), Some(ttl)) => transaction.set_with_ttl(key, value, ttl),
            (Work::Loop(transaction), None) => transaction.set(key, value),
            (Work::Loop(transaction), Some(ttl)) => transaction.set_with_ttl(key, value, ttl),
        })
    }

    /// Deletes a key at the commit.
    fn delete(&self, py: Python<'_>, key: Bytes<'_, '_>) -> PyResult<()> {
        self.slot.with(py, |work| match work {
            Work::Blocking(transaction) => transaction.delete(key),
            Work::Loop(transaction) => transaction.delete(key),
        })
    }

    /// Makes the writes, all together. Raises ConflictError if a key that was read was written
    /// meanwhile; then nothing was written.
    fn commit(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self.slot.end()?.ok_or_else(|| self.slot.ended(py))? {
            Work::Blocking(transaction) => {
                let done = py.detach(|| transaction.commit());
                answer(py, done.map(|()| Answer::Nothing))
            }
            Work::Loop(transaction) => {
                let call = async move {
                    transaction.commit().await?;
                    Ok(Answer::Nothing)
                };
                Mode::Loop.run(py, in_runtime(call)?)
            }
        }
    }

    /// Abandons the transaction. Nothing is written.
    fn abandon(&self) -> PyResult<()> {
        self.slot.end().map(drop)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, _error, _trace))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if kind.is_some() {
            return self.abandon();
        }
        // It may have been committed or abandoned in the block.
        if self.slot.has_ended() { Ok(()) } else { self.commit(py).map(drop) }
    }
}
