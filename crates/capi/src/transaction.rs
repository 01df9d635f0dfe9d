//! Optimistic transactions.

use millrace::blocking;

use crate::bytes::{Out, Slice, Value, handle_out, value_out};
use crate::db::Db;
use crate::error::{Code, ErrorOut, answer, given, or_else};
use crate::family::Family;

/// An optimistic transaction: `millrace_transaction`.
#[derive(Debug)]
pub struct Transaction {
    transaction: blocking::Transaction,
    db: u64,
}

/// See [`millrace::Db::transaction`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_transaction_begin(
    db: Option<&Db>,
    transaction: Out<'_, Option<Box<Transaction>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let transaction = handle_out(transaction, "transaction")?;
        let db = given(db, "db")?;
        let begun = db.blocking.transaction()?;
        *transaction = Some(Box::new(Transaction { transaction: begun, db: db.id }));
        Ok(())
    })
}

/// See [`millrace::Transaction::get_in`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_transaction_get(
    transaction: Option<&mut Transaction>,
    family: Option<&Family>,
    key: Slice,
    value: Out<'_, Value>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let value = value_out(value)?;
        let Transaction { transaction, db } = given(transaction, "transaction")?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        *value = Value::new(match family {
            None => transaction.get(key)?,
            Some(family) => transaction.get_in(family.of(*db)?, key)?,
        });
        Ok(())
    })
}

/// See [`millrace::Transaction::put_in`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_transaction_put(
    transaction: Option<&mut Transaction>,
    family: Option<&Family>,
    key: Slice,
    value: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let Transaction { transaction, db } = given(transaction, "transaction")?;
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        match family {
            None => transaction.put(key, value),
            Some(family) => transaction.put_in(family.of(*db)?, key, value),
        };
        Ok(())
    })
}

/// See [`millrace::Transaction::delete_in`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_transaction_delete(
    transaction: Option<&mut Transaction>,
    family: Option<&Family>,
    key: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let Transaction { transaction, db } = given(transaction, "transaction")?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        match family {
            None => transaction.delete(key),
            Some(family) => transaction.delete_in(family.of(*db)?, key),
        };
        Ok(())
    })
}

/// Commits a transaction and frees it; see [`millrace::Transaction::commit`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_transaction_commit(
    transaction: Option<Box<Transaction>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || Ok(given(transaction, "transaction")?.transaction.commit()?))
}

/// Abandons a transaction.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_transaction_free(transaction: Option<Box<Transaction>>) {
    or_else((), || drop(transaction));
}
