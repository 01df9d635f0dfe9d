//! Optimistic transactions of a client for completion queues.

use std::time::Duration;

use millrace::client;
use tokio::runtime::Handle;

use super::Here;
use super::asynchronous::{AsyncClient, begin};
use super::loan::Slot;
use crate::bytes::{Out, Slice, handle_out};
use crate::error::{Code, ErrorOut, answer, given, or_else};
use crate::queue::{Answer, Queue};

/// An optimistic transaction: `millrace_async_transaction`.
#[derive(Debug)]
pub struct AsyncTransaction(Here<(Slot<client::Transaction>, Handle)>);

/// See [`client::Client::transaction`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_async_transaction_begin(
    client: Option<&AsyncClient>,
    transaction: Out<'_, Option<Box<AsyncTransaction>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let transaction = handle_out(transaction, "transaction")?;
        let (client, runtime) = given(client, "client")?.parts()?;
        let slot = Slot::new(client.transaction(), "transaction");
        *transaction = Some(Box::new(AsyncTransaction(Here::new((slot, runtime)))));
        Ok(())
    })
}

/// See [`client::Transaction::get`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_transaction_get(
    transaction: Option<&AsyncTransaction>,
    queue: Option<&Queue>,
    key: Slice,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let (slot, runtime) = given(transaction, "transaction")?.0.get()?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?.to_vec();
        let reserved = given(queue, "queue")?.reserve()?;
        let mut loan = slot.lend()?;
        begin(runtime, reserved, tag, false, async move {
            match loan.get() {
                Some(transaction) => Ok(Answer::Value(transaction.get(key).await?.map(Into::into))),
                None => Ok(Answer::Nothing),
            }
        });
        Ok(())
    })
}

/// See [`client::Transaction::set`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_transaction_set(
    transaction: Option<&AsyncTransaction>,
    key: Slice,
    value: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        let (slot, _) = given(transaction, "transaction")?.0.get()?;
        slot.with(|transaction| transaction.set(key, value))
    })
}

/// See [`client::Transaction::set_with_ttl`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_transaction_set_with_ttl(
    transaction: Option<&AsyncTransaction>,
    key: Slice,
    value: Slice,
    ttl_ms: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        let (slot, _) = given(transaction, "transaction")?.0.get()?;
        let ttl = Duration::from_millis(ttl_ms);
        slot.with(|transaction| transaction.set_with_ttl(key, value, ttl))
    })
}

/// See [`client::Transaction::delete`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_async_transaction_delete(
    transaction: Option<&AsyncTransaction>,
    key: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let (slot, _) = given(transaction, "transaction")?.0.get()?;
        slot.with(|transaction| transaction.delete(key))
    })
}

/// See [`client::Transaction::commit`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_async_transaction_commit(
    transaction: Option<&AsyncTransaction>,
    queue: Option<&Queue>,
    tag: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let (slot, runtime) = given(transaction, "transaction")?.0.get()?;
        let reserved = given(queue, "queue")?.reserve()?;
        let transaction = slot.end()?;
        begin(runtime, reserved, tag, true, async move {
            transaction.commit().await.map(|()| Answer::Nothing)
        });
        Ok(())
    })
}

/// Frees a transaction; without a commit it is abandoned.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_async_transaction_free(transaction: Option<Box<AsyncTransaction>>) {
    or_else((), || drop(transaction));
}
