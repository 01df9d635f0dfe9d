//! Deadlines of keys, for callers that wait.

use std::time::Duration;

use millrace::client::Ttl;

use super::Client;
use crate::bytes::{Out, Slice};
use crate::error::{Code, ErrorOut, answer, given};

/// What is left of a key's time, in milliseconds, or `MILLRACE_NO_KEY` or `MILLRACE_FOREVER`.
pub(super) fn left_ms(ttl: Ttl) -> i64 {
    match ttl {
        Ttl::NoKey => -2,
        Ttl::Forever => -1,
        Ttl::Left(left) => i64::try_from(left.as_millis()).unwrap_or(i64::MAX),
    }
}

/// See [`Client::set_with_ttl`](millrace::blocking::Client::set_with_ttl).
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_set_with_ttl(
    client: Option<&Client>,
    key: Slice,
    value: Slice,
    ttl_ms: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        let ttl = Duration::from_millis(ttl_ms);
        Ok(given(client, "client")?.0.get()?.set_with_ttl(key, value, ttl)?)
    })
}

/// See [`Client::expire`](millrace::blocking::Client::expire).
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_expire(
    client: Option<&Client>,
    key: Slice,
    ttl_ms: u64,
    existed: Out<'_, bool>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let existed = existed.map(|existed| existed.write(false));
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let ttl = Duration::from_millis(ttl_ms);
        let done = given(client, "client")?.0.get()?.expire(key, ttl)?;
        if let Some(existed) = existed {
            *existed = done;
        }
        Ok(())
    })
}

/// See [`Client::persist`](millrace::blocking::Client::persist).
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_persist(
    client: Option<&Client>,
    key: Slice,
    had_ttl: Out<'_, bool>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let had_ttl = had_ttl.map(|had_ttl| had_ttl.write(false));
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let done = given(client, "client")?.0.get()?.persist(key)?;
        if let Some(had_ttl) = had_ttl {
            *had_ttl = done;
        }
        Ok(())
    })
}

/// See [`Client::ttl`](millrace::blocking::Client::ttl).
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_ttl(
    client: Option<&Client>,
    key: Slice,
    ttl_ms: Out<'_, i64>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let ttl_ms = given(ttl_ms, "ttl_ms")?.write(left_ms(Ttl::NoKey));
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        *ttl_ms = left_ms(given(client, "client")?.0.get()?.ttl(key)?);
        Ok(())
    })
}
