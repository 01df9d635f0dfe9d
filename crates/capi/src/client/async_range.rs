//! Ranges of a client for completion queues.

use std::ffi::c_uint;

use futures_core::Stream;
use millrace::client;
use tokio::runtime::Handle;

use super::Here;
use super::asynchronous::{AsyncClient, begin};
use super::loan::Slot;
use crate::bytes::{Out, Slice, handle_out};
use crate::db::bounds;
use crate::error::{Code, ErrorOut, Result, answer, given, or_else};
use crate::iter::{PREFIX_FLAGS, RANGE_FLAGS, check_flags, is_reverse, with_flags};
use crate::queue::{Answer, Queue};

/// The entries of a range of a client, in parts: `millrace_async_range`.
#[derive(Debug)]
pub struct AsyncRange(Here<(Slot<client::Range>, Handle)>);

impl AsyncRange {
    fn new(
        client: &AsyncClient,
        flags: c_uint,
        range: impl FnOnce(&client::Client) -> client::Range,
    ) -> Result<Box<AsyncRange>> {
        let (client, runtime) = client.parts()?;
        let range = range(client);
        let range = if is_reverse(flags) { range.rev() } else { range };
        Ok(Box::new(AsyncRange(Here::new((Slot::new(range, "range"), runtime)))))
    }
}

/// The next entry and all that are in memory after it: keys and values by turns.
async fn part(range: &mut client::Range) -> client::Result<Answer> {
    let mut part = Vec::new();
    let mut more = 1;
    while more > 0
        && let Some(entry) = range.next().await
    {
        let (key, value) = entry?;
        part.extend([Some(key.into()), Some(value.into())]);
        more = range.size_hint().0;
    }
    Ok(Answer::Values(part))
}

/// See [`client::Client::range`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_range(
    client: Option<&AsyncClient>,
    start: Slice,
    end: Slice,
    flags: c_uint,
    range: Out<'_, Option<Box<AsyncRange>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let range = handle_out(range, "range")?;
        check_flags(flags, RANGE_FLAGS)?;
        let client = given(client, "client")?;
        // SAFETY: the caller's promise.
        let keys = with_flags(unsafe { bounds(start, end) }?, flags);
        *range = Some(AsyncRange::new(client, flags, |client| client.range(keys))?);
        Ok(())
    })
}

/// See [`client::Client::prefix`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_client_prefix(
    client: Option<&AsyncClient>,
    prefix: Slice,
    flags: c_uint,
    range: Out<'_, Option<Box<AsyncRange>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let range = handle_out(range, "range")?;
        check_flags(flags, PREFIX_FLAGS)?;
        let client = given(client, "client")?;
        // SAFETY: the caller's promise.
        let prefix = unsafe { prefix.bytes("prefix") }?;
        *range = Some(AsyncRange::new(client, flags, |client| client.prefix(prefix))?);
        Ok(())
    })
}

/// Asks for the next entries of a range.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_async_range_next(
    range: Option<&AsyncRange>,
    queue: Option<&Queue>,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let (slot, runtime) = given(range, "range")?.0.get()?;
        let reserved = given(queue, "queue")?.reserve()?;
        let mut loan = slot.lend()?;
        begin(runtime, reserved, tag, false, async move {
            match loan.get() {
                Some(range) => part(range).await,
                None => Ok(Answer::Values(Vec::new())),
            }
        });
        Ok(())
    })
}

/// Frees a range.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_async_range_free(range: Option<Box<AsyncRange>>) {
    or_else((), || drop(range));
}
