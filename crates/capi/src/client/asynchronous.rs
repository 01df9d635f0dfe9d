//! Clients for completion queues.
//!
//! 1. A call copies its arguments, makes a future of the asynchronous client, and polls it once.
//!    That answers it from the cache, or hands the request to the task that owns the connection.
//! 2. What is not done then becomes a task of the client's runtime: one thread, which also runs the
//!    connection. So operations go on whether anybody takes completions or not.
//! 3. The queue waits for that task, and is woken by it ([`Task::wake`](crate::queue)).
//!
//! Operations of a range or a transaction begin as a task, because the runtime may have ended
//! ([`begin`]): their handles outlive that of the client.
//!
//! **The end**: a client that is closed ends its runtime, which cancels the tasks. A queue hears of
//! it, and reports [`Code::Closed`], or [`Code::OutcomeUnknown`] for a write.

use std::ffi::c_char;
use std::future::ready;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use millrace::client;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinError;

use super::ttl::left_ms;
use super::{ClientBatch, ClientOptions, Here, stats};
use crate::bytes::{Out, Slice, handle_out, text};
use crate::db::all_keys;
use crate::error::{Code, Error, ErrorOut, Result, answer, given, or_else};
use crate::queue::{Answer, Queue, Reserved};

/// How long the end of a client waits for a look-up of a name, which cannot be cancelled.
const END: Duration = Duration::from_secs(1);

/// A client for completion queues: `millrace_async_client`.
#[derive(Debug)]
pub struct AsyncClient(Here<Running>);

#[derive(Debug)]
struct Running {
    client: client::Client,
    thread: Thread,
}

/// The runtime of a client; `None` only during the drop.
#[derive(Debug)]
struct Thread(Option<Runtime>);

impl Thread {
    fn start() -> Result<Thread> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("millrace-client")
            .enable_all()
            .build();
        let failed =
            |error| Error::new(Code::Io, format!("cannot start a client's thread: {error}"));
        Ok(Thread(Some(runtime.map_err(failed)?)))
    }

    fn runtime(&self) -> Result<&Runtime> {
        self.0.as_ref().ok_or_else(|| closed(false))
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_timeout(END);
        }
    }
}

#[cold]
fn closed(writes: bool) -> Error {
    let text = "the client was closed";
    match writes {
        false => Error::new(Code::Closed, text),
        true => {
            Error::new(Code::OutcomeUnknown, format!("the outcome of the write is unknown: {text}"))
        }
    }
}

impl Running {
    fn connect(address: &str, options: client::Options) -> Result<Running> {
        let thread = Thread::start()?;
        let client = thread.runtime()?.block_on(options.connect(address))?;
        Ok(Running { client, thread })
    }

    /// Begins an operation.
    fn submit<F>(
        &self,
        reserved: Reserved<'_>,
        tag: u64,
        writes: bool,
        call: impl FnOnce(client::Client) -> F,
    ) -> Result<()>
    where
        F: Future<Output = client::Result<Answer>> + Send + 'static,
    {
        let runtime = self.thread.runtime()?;
        let mut operation = Box::pin(call(self.client.clone()));
        let polled = {
            let _entered = runtime.enter();
            operation.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        };
        match polled {
            Poll::Ready(outcome) => reserved.submit(tag, ready(outcome.map_err(Error::from))),
            Poll::Pending => {
                let task = runtime.spawn(operation);
                reserved.submit(tag, async move { outcome(task.await, writes) });
            }
        }
        Ok(())
    }
}

fn outcome(
    ended: std::result::Result<client::Result<Answer>, JoinError>,
    writes: bool,
) -> Result<Answer> {
    match ended {
        Ok(outcome) => Ok(outcome?),
        Err(end) => Err(match end.try_into_panic() {
            Ok(payload) => Error::panicked(&*payload),
            Err(_) => closed(writes),
        }),
    }
}

impl AsyncClient {
    /// The client, and the runtime on which its operations run, which ends before the handle may.
    pub(super) fn parts(&self) -> Result<(&client::Client, Handle)> {
        let running = self.0.get()?;
        Ok((&running.client, running.thread.runtime()?.handle().clone()))
    }
}

/// Begins an operation on a runtime that may have ended: then it has not begun, and its completion
/// says so.
pub(super) fn begin(
    runtime: &Handle,
    reserved: Reserved<'_>,
    tag: u64,
    writes: bool,
    operation: impl Future<Output = client::Result<Answer>> + Send + 'static,
) {
    let began = Arc::new(AtomicBool::new(false));
    let begins = began.clone();
    let task = runtime.spawn(async move {
        begins.store(true, Ordering::Release);
        operation.await
    });
    reserved.submit(tag, async move {
        let ended = task.await;
        outcome(ended, writes && began.load(Ordering::Acquire))
    });
}

/// See [`client::Options::connect`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_connect(
    address: *const c_char,
    options: Option<&ClientOptions>,
    client: Out<'_, Option<Box<AsyncClient>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let client = handle_out(client, "client")?;
        // SAFETY: the caller's promise.
        let address = unsafe { text(address, "address") }?;
        let options = options.map(ClientOptions::all).unwrap_or_default();
        *client = Some(Box::new(AsyncClient(Here::new(Running::connect(address, options)?))));
        Ok(())
    })
}

/// Ends the connections and the thread of a client, and frees it.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_async_client_close(client: Option<Box<AsyncClient>>) {
    or_else((), || drop(client));
}

/// See [`client::Client::get`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_get(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    key: Slice,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let reserved = given(queue, "queue")?.reserve()?;
        let key = key.to_vec();
        running.submit(reserved, tag, false, |client| async move {
            Ok(Answer::Value(client.get(key).await?.map(Into::into)))
        })
    })
}

/// See [`client::Client::multi_get`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_multi_get(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    keys: *const Slice,
    count: usize,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let keys = unsafe { all_keys(keys, count) }?;
        let reserved = given(queue, "queue")?.reserve()?;
        let keys: Vec<Vec<u8>> = keys.into_iter().map(<[u8]>::to_vec).collect();
        running.submit(reserved, tag, false, |client| async move {
            let found = client.multi_get(keys).await?;
            Ok(Answer::Values(found.into_iter().map(|value| value.map(Into::into)).collect()))
        })
    })
}

/// See [`client::Client::set`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_set(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    key: Slice,
    value: Slice,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        let reserved = given(queue, "queue")?.reserve()?;
        let (key, value) = (key.to_vec(), value.to_vec());
        running.submit(reserved, tag, true, |client| async move {
            client.set(key, value).await.map(|()| Answer::Nothing)
        })
    })
}

/// See [`client::Client::set_with_ttl`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_set_with_ttl(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    key: Slice,
    value: Slice,
    ttl_ms: u64,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        let reserved = given(queue, "queue")?.reserve()?;
        let (key, value) = (key.to_vec(), value.to_vec());
        let ttl = Duration::from_millis(ttl_ms);
        running.submit(reserved, tag, true, |client| async move {
            client.set_with_ttl(key, value, ttl).await.map(|()| Answer::Nothing)
        })
    })
}

/// See [`client::Client::expire`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_expire(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    key: Slice,
    ttl_ms: u64,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let reserved = given(queue, "queue")?.reserve()?;
        let key = key.to_vec();
        let ttl = Duration::from_millis(ttl_ms);
        running.submit(reserved, tag, true, |client| async move {
            Ok(Answer::Count(client.expire(key, ttl).await?.into()))
        })
    })
}

/// See [`client::Client::persist`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_persist(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    key: Slice,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let reserved = given(queue, "queue")?.reserve()?;
        let key = key.to_vec();
        running.submit(reserved, tag, true, |client| async move {
            Ok(Answer::Count(client.persist(key).await?.into()))
        })
    })
}

/// See [`client::Client::ttl`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_ttl(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    key: Slice,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let reserved = given(queue, "queue")?.reserve()?;
        let key = key.to_vec();
        running.submit(reserved, tag, false, |client| async move {
            Ok(Answer::Count(left_ms(client.ttl(key).await?).cast_unsigned()))
        })
    })
}

/// See [`client::Client::delete`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_delete(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    key: Slice,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let reserved = given(queue, "queue")?.reserve()?;
        let key = key.to_vec();
        running.submit(reserved, tag, true, |client| async move {
            Ok(Answer::Count(client.delete(key).await?.into()))
        })
    })
}

/// See [`client::Client::delete_range`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_delete_range(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    start: Slice,
    end: Slice,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let (start, end) = unsafe { (start.bytes("start")?, end.bytes("end")?) };
        let reserved = given(queue, "queue")?.reserve()?;
        let keys = start.to_vec()..end.to_vec();
        running.submit(reserved, tag, true, |client| async move {
            Ok(Answer::Count(client.delete_range(keys).await?))
        })
    })
}

/// See [`client::Client::write`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_async_client_write(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    batch: Option<&mut ClientBatch>,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        let batch = given(batch, "batch")?;
        let reserved = given(queue, "queue")?.reserve()?;
        let batch = batch.take();
        running.submit(reserved, tag, true, |client| async move {
            client.write(batch).await.map(|()| Answer::Nothing)
        })
    })
}

/// See [`client::Client::wait_coherent`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_async_client_wait_coherent(
    client: Option<&AsyncClient>,
    queue: Option<&Queue>,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let running = given(client, "client")?.0.get()?;
        let reserved = given(queue, "queue")?.reserve()?;
        running.submit(reserved, tag, false, |client| async move {
            client.wait_coherent().await;
            Ok(Answer::Nothing)
        })
    })
}

/// See [`client::Client::cache_stats`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_cache_stats(
    client: Option<&AsyncClient>,
    stats: *mut MaybeUninit<u64>,
    size: usize,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let found = given(client, "client")?.0.get()?.client.cache_stats();
        // SAFETY: the caller's promise.
        unsafe { stats::write(stats, size, &found) }
    })
}
