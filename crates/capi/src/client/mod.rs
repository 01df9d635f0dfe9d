//! Clients of nodes and of Redis servers.
//!
//! Each kind of handle is one of `millrace::client`. What holds sockets is in a
//! [`Here`](here::Here), so that a forked child does not disturb its parent's connections.

mod async_range;
mod async_transaction;
mod asynchronous;
mod batch;
mod here;
mod loan;
mod options;
mod stats;
mod transaction;
mod ttl;

use std::ffi::{c_char, c_uint};
use std::mem::MaybeUninit;

use millrace::client;

use self::here::Here;
use crate::bytes::{Out, Slice, Value, handle_out, text, value_out};
use crate::db::{bounds, fill};
use crate::error::{Code, ErrorOut, Result, answer, given, or_else};
use crate::iter::{Iter, PREFIX_FLAGS, RANGE_FLAGS, Source, check_flags, is_reverse, with_flags};

pub use self::async_range::*;
pub use self::async_transaction::*;
pub use self::asynchronous::*;
pub use self::batch::*;
pub use self::options::*;
pub use self::transaction::*;
pub use self::ttl::*;

/// A client for threads: `millrace_client`.
#[derive(Debug)]
pub struct Client(Here<client::blocking::Client>);

/// The entries of a range of a client.
#[derive(Debug)]
pub(crate) struct ClientRange(Here<client::blocking::Range>);

impl ClientRange {
    pub fn next(&mut self) -> Result<Option<millrace::Entry>> {
        let entry = self.0.get_mut()?.next().transpose()?;
        Ok(entry.map(|(key, value)| (key.into(), value.into())))
    }
}

/// An iterator over a range.
fn iter(range: client::blocking::Range, flags: c_uint) -> Option<Box<Iter>> {
    let range = if is_reverse(flags) { range.rev() } else { range };
    Iter::new(Source::Client(ClientRange(Here::new(range))))
}

/// See [`client::Options::connect_blocking`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_connect(
    address: *const c_char,
    options: Option<&ClientOptions>,
    client: Out<'_, Option<Box<Client>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let client = handle_out(client, "client")?;
        // SAFETY: the caller's promise.
        let address = unsafe { text(address, "address") }?;
        let options = options.map(ClientOptions::all).unwrap_or_default();
        *client = Some(Box::new(Client(Here::new(options.connect_blocking(address)?))));
        Ok(())
    })
}

/// Ends the connections of a client, and frees it.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_close(client: Option<Box<Client>>) {
    or_else((), || drop(client));
}

/// See [`client::blocking::Client::get`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_get(
    client: Option<&Client>,
    key: Slice,
    value: Out<'_, Value>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let value = value_out(value)?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let found = given(client, "client")?.0.get()?.get(key)?;
        *value = Value::new(found.map(Into::into));
        Ok(())
    })
}

/// See [`client::blocking::Client::multi_get`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_multi_get(
    client: Option<&Client>,
    keys: *const Slice,
    count: usize,
    values: *mut MaybeUninit<Value>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let look_up = |keys: Vec<&[u8]>| {
            let found = given(client, "client")?.0.get()?.multi_get(keys)?;
            Ok(found.into_iter().map(|value| value.map(Into::into)).collect())
        };
        // SAFETY: the caller's promise.
        unsafe { fill(keys, values, count, look_up) }
    })
}

/// See [`client::blocking::Client::set`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_set(
    client: Option<&Client>,
    key: Slice,
    value: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        Ok(given(client, "client")?.0.get()?.set(key, value)?)
    })
}

/// See [`client::blocking::Client::delete`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_delete(
    client: Option<&Client>,
    key: Slice,
    existed: Out<'_, bool>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let existed = existed.map(|existed| existed.write(false));
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let deleted = given(client, "client")?.0.get()?.delete(key)?;
        if let Some(existed) = existed {
            *existed = deleted;
        }
        Ok(())
    })
}

/// See [`client::blocking::Client::delete_range`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_delete_range(
    client: Option<&Client>,
    start: Slice,
    end: Slice,
    count: Out<'_, u64>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let count = count.map(|count| count.write(0));
        // SAFETY: the caller's promise.
        let (start, end) = unsafe { (start.bytes("start")?, end.bytes("end")?) };
        let deleted = given(client, "client")?.0.get()?.delete_range(start..end)?;
        if let Some(count) = count {
            *count = deleted;
        }
        Ok(())
    })
}

/// See [`client::blocking::Client::write`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_write(
    client: Option<&Client>,
    batch: Option<&mut ClientBatch>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let (client, batch) = (given(client, "client")?.0.get()?, given(batch, "batch")?);
        Ok(client.write(batch.take())?)
    })
}

/// See [`client::blocking::Client::range`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_range(
    client: Option<&Client>,
    start: Slice,
    end: Slice,
    flags: c_uint,
    iter: Out<'_, Option<Box<Iter>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let iter = handle_out(iter, "iter")?;
        check_flags(flags, RANGE_FLAGS)?;
        let client = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let keys = with_flags(unsafe { bounds(start, end) }?, flags);
        *iter = self::iter(client.range(keys), flags);
        Ok(())
    })
}

/// See [`client::blocking::Client::prefix`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_prefix(
    client: Option<&Client>,
    prefix: Slice,
    flags: c_uint,
    iter: Out<'_, Option<Box<Iter>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let iter = handle_out(iter, "iter")?;
        check_flags(flags, PREFIX_FLAGS)?;
        let client = given(client, "client")?.0.get()?;
        // SAFETY: the caller's promise.
        let prefix = unsafe { prefix.bytes("prefix") }?;
        *iter = self::iter(client.prefix(prefix), flags);
        Ok(())
    })
}

/// See [`client::blocking::Client::wait_coherent`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_wait_coherent(
    client: Option<&Client>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        given(client, "client")?.0.get()?.wait_coherent();
        Ok(())
    })
}

/// See [`client::blocking::Client::cache_stats`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_cache_stats(
    client: Option<&Client>,
    stats: *mut MaybeUninit<u64>,
    size: usize,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let found = given(client, "client")?.0.get()?.cache_stats();
        // SAFETY: the caller's promise.
        unsafe { stats::write(stats, size, &found) }
    })
}
