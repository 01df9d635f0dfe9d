//! Batches of writes.

use std::mem;

use crate::bytes::Slice;
use crate::db::check_db;
use crate::error::{Code, ErrorOut, Result, answer, given, or_else};
use crate::family::Family;

/// Writes that are done together: `millrace_batch`.
#[derive(Debug, Default)]
pub struct Batch {
    batch: millrace::WriteBatch,
    /// The database of the column families in it.
    db: Option<u64>,
}

impl Batch {
    /// Takes the writes out, for a database.
    pub(crate) fn take(&mut self, db: u64) -> Result<millrace::WriteBatch> {
        check_db(db, self.db.unwrap_or(db), "a family of the batch")?;
        self.db = None;
        Ok(mem::take(&mut self.batch))
    }

    /// The writes, to which one for this family can be added.
    fn with(&mut self, family: &Family) -> Result<&mut millrace::WriteBatch> {
        let (_, db) = family.parts();
        check_db(*self.db.get_or_insert(db), db, "family")?;
        Ok(&mut self.batch)
    }
}

/// Makes a batch without writes.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_batch_new() -> Box<Batch> {
    Box::default()
}

/// Frees a batch.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_batch_free(batch: Option<Box<Batch>>) {
    drop(batch);
}

/// See [`millrace::WriteBatch::put_in`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_batch_put(
    batch: Option<&mut Batch>,
    family: Option<&Family>,
    key: Slice,
    value: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let batch = given(batch, "batch")?;
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        match family {
            None => batch.batch.put(key, value),
            Some(family) => batch.with(family)?.put_in(family.parts().0, key, value),
        };
        Ok(())
    })
}

/// See [`millrace::WriteBatch::delete_in`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_batch_delete(
    batch: Option<&mut Batch>,
    family: Option<&Family>,
    key: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let batch = given(batch, "batch")?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        match family {
            None => batch.batch.delete(key),
            Some(family) => batch.with(family)?.delete_in(family.parts().0, key),
        };
        Ok(())
    })
}

/// See [`millrace::WriteBatch::delete_range_in`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_batch_delete_range(
    batch: Option<&mut Batch>,
    family: Option<&Family>,
    start: Slice,
    end: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let batch = given(batch, "batch")?;
        // SAFETY: the caller's promise.
        let (start, end) = unsafe { (start.bytes("start")?, end.bytes("end")?) };
        match family {
            None => batch.batch.delete_range(start..end),
            Some(family) => batch.with(family)?.delete_range_in(family.parts().0, start..end),
        };
        Ok(())
    })
}

/// See [`millrace::WriteBatch::merge_in`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_batch_merge(
    batch: Option<&mut Batch>,
    family: Option<&Family>,
    key: Slice,
    operand: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let batch = given(batch, "batch")?;
        // SAFETY: the caller's promise.
        let (key, operand) = unsafe { (key.bytes("key")?, operand.bytes("operand")?) };
        match family {
            None => batch.batch.merge(key, operand),
            Some(family) => batch.with(family)?.merge_in(family.parts().0, key, operand),
        };
        Ok(())
    })
}

/// Removes all writes.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_batch_clear(batch: Option<&mut Batch>) {
    or_else((), || {
        if let Some(batch) = batch {
            batch.batch.clear();
            batch.db = None;
        }
    });
}

/// The number of writes.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_batch_count(batch: Option<&Batch>) -> usize {
    batch.map_or(0, |batch| batch.batch.len())
}

/// Bytes of the writes, as they go into the log.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_batch_bytes(batch: Option<&Batch>) -> usize {
    batch.map_or(0, |batch| batch.batch.bytes())
}
