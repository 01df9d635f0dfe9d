//! Optimistic transactions of a client.

use std::time::Duration;

use millrace::client::blocking;

use super::{Client, Here};
use crate::bytes::{Out, Slice, Value, handle_out, value_out};
use crate::error::{Code, ErrorOut, answer, given, or_else};

/// An optimistic transaction: `millrace_client_transaction`.
#[derive(Debug)]
pub struct ClientTransaction(Here<blocking::Transaction>);

/// See [`blocking::Client::transaction`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_transaction_begin(
    client: Option<&Client>,
    transaction: Out<'_, Option<Box<ClientTransaction>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let transaction = handle_out(transaction, "transaction")?;
        let begun = given(client, "client")?.0.get()?.transaction();
        *transaction = Some(Box::new(ClientTransaction(Here::new(begun))));
        Ok(())
    })
}

/// See [`blocking::Transaction::get`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_transaction_get(
    transaction: Option<&mut ClientTransaction>,
    key: Slice,
    value: Out<'_, Value>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let value = value_out(value)?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        let found = given(transaction, "transaction")?.0.get_mut()?.get(key)?;
        *value = Value::new(found.map(Into::into));
        Ok(())
    })
}

/// See [`blocking::Transaction::set`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_transaction_set(
    transaction: Option<&mut ClientTransaction>,
    key: Slice,
    value: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        given(transaction, "transaction")?.0.get_mut()?.set(key, value);
        Ok(())
    })
}

/// See [`blocking::Transaction::set_with_ttl`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_transaction_set_with_ttl(
    transaction: Option<&mut ClientTransaction>,
    key: Slice,
    value: Slice,
    ttl_ms: u64,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        let ttl = Duration::from_millis(ttl_ms);
        given(transaction, "transaction")?.0.get_mut()?.set_with_ttl(key, value, ttl);
        Ok(())
    })
}

/// See [`blocking::Transaction::delete`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_client_transaction_delete(
    transaction: Option<&mut ClientTransaction>,
    key: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        given(transaction, "transaction")?.0.get_mut()?.delete(key);
        Ok(())
    })
}

/// Commits a transaction and frees it; see [`blocking::Transaction::commit`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_transaction_commit(
    transaction: Option<Box<ClientTransaction>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || Ok(given(transaction, "transaction")?.0.take()?.commit()?))
}

/// Abandons a transaction.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_client_transaction_free(transaction: Option<Box<ClientTransaction>>) {
    or_else((), || drop(transaction));
}
