//! Batches of writes to a server.

use std::mem;
use std::time::Duration;

use millrace::client;

use crate::bytes::Slice;
use crate::error::{Code, ErrorOut, answer, given, or_else};

/// Writes that are done together: `millrace_client_batch`.
#[derive(Debug, Default)]
pub struct ClientBatch(client::WriteBatch);

impl ClientBatch {
    /// Takes the writes out.
    pub(super) fn take(&mut self) -> client::WriteBatch {
        mem::take(&mut self.0)
    }
}

/// Makes a batch without writes.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_batch_new() -> Box<ClientBatch> {
    Box::default()
}

/// Frees a batch.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_batch_free(batch: Option<Box<ClientBatch>>) {
    drop(batch);
}

/// See [`client::WriteBatch::set`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_batch_set(
    batch: Option<&mut ClientBatch>,
    key: Slice,
    value: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        given(batch, "batch")?.0.set(key, value);
        Ok(())
    })
}

/// See [`client::WriteBatch::set_with_ttl`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_batch_set_with_ttl(
    batch: Option<&mut ClientBatch>,
    key: Slice,
    value: Slice,
    ttl_ms: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        given(batch, "batch")?.0.set_with_ttl(key, value, Duration::from_millis(ttl_ms));
        Ok(())
    })
}

/// See [`client::WriteBatch::delete`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_batch_delete(
    batch: Option<&mut ClientBatch>,
    key: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        given(batch, "batch")?.0.delete(key);
        Ok(())
    })
}

/// See [`client::WriteBatch::delete_range`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_batch_delete_range(
    batch: Option<&mut ClientBatch>,
    start: Slice,
    end: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (start, end) = unsafe { (start.bytes("start")?, end.bytes("end")?) };
        given(batch, "batch")?.0.delete_range(start..end);
        Ok(())
    })
}

/// Removes all writes.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_batch_clear(batch: Option<&mut ClientBatch>) {
    or_else((), || {
        if let Some(batch) = batch {
            batch.0.clear();
        }
    });
}

/// The number of writes.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_batch_count(batch: Option<&ClientBatch>) -> usize {
    batch.map_or(0, |batch| batch.0.len())
}

/// Bytes of all keys and values.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_batch_bytes(batch: Option<&ClientBatch>) -> usize {
    batch.map_or(0, |batch| batch.0.bytes())
}
