//! Databases, and what they do for callers that wait.

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace::blocking;

use crate::batch::Batch;
use crate::bytes::{Out, Slice, Value, array, array_out, handle_out, path, value_out};
use crate::error::{Code, Error, ErrorOut, Result, answer, given};
use crate::family::Family;
use crate::options::Options;

/// An open database: `millrace_db`.
#[derive(Debug)]
pub struct Db {
    pub(crate) blocking: blocking::Db,
    /// The same, for asynchronous calls.
    pub(crate) asynchronous: millrace::Db,
    default: blocking::ColumnFamily,
    /// Tells the families and snapshots of other databases from its own.
    pub(crate) id: u64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Db {
    fn open(options: &millrace::Options, path: &std::path::Path) -> Result<Db> {
        let blocking = blocking::Db::open_with(options, path)?;
        Ok(Db {
            asynchronous: blocking.clone().into(),
            default: blocking.default_column_family(),
            blocking,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// The column family that a call means.
    pub(crate) fn family<'a>(
        &'a self,
        family: Option<&'a Family>,
    ) -> Result<&'a blocking::ColumnFamily> {
        match family {
            None => Ok(&self.default),
            Some(family) => family.of(self.id),
        }
    }
}

/// Keys as the crate `millrace` takes them.
///
/// # Safety
/// The [contract](crate#contract), during `'a`.
pub(crate) unsafe fn all_keys<'a>(keys: *const Slice, count: usize) -> Result<Vec<&'a [u8]>> {
    // SAFETY: the caller's promise, here and for each key.
    let keys = unsafe { array(keys, count, "keys") }?;
    // SAFETY: as above.
    keys.iter().map(|key| unsafe { key.bytes("key") }).collect()
}

/// The bounds of a range of keys.
pub(crate) type Bounds<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// The range of keys from one to before another one.
///
/// # Safety
/// The [contract](crate#contract), during `'a`.
pub(crate) unsafe fn bounds<'a>(start: Slice, end: Slice) -> Result<Bounds<'a>> {
    // SAFETY: the caller's promise.
    let (start, end) = unsafe { (start.bound("start")?, end.bound("end")?) };
    Ok((
        start.map_or(Bound::Unbounded, Bound::Included),
        end.map_or(Bound::Unbounded, Bound::Excluded),
    ))
}

/// Fills an array with the values that `look_up` finds for keys.
///
/// # Safety
/// The [contract](crate#contract).
pub(crate) unsafe fn fill(
    keys: *const Slice,
    values: *mut MaybeUninit<Value>,
    count: usize,
    look_up: impl FnOnce(Vec<&[u8]>) -> Result<Vec<Option<millrace::Value>>>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let values = unsafe { array_out(values, count, "values") }?;
    for value in &mut *values {
        value.write(Value::NONE);
    }
    // SAFETY: the caller's promise.
    let keys = unsafe { all_keys(keys, count) }?;
    for (value, found) in values.iter_mut().zip(look_up(keys)?) {
        value.write(Value::new(found));
    }
    Ok(())
}

/// Opens a database; see [`millrace::Options::open`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_open(
    path_text: *const c_char,
    options: Option<&Options>,
    db: Out<'_, Option<Box<Db>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let db = handle_out(db, "db")?;
        // SAFETY: the caller's promise.
        let path = unsafe { path(path_text, "path") }?;
        let defaults = millrace::Options::new();
        *db = Some(Box::new(Db::open(options.map_or(&defaults, |options| &options.0), path)?));
        Ok(())
    })
}

/// Closes a database, waits for its end, and frees the handle; see [`millrace::Db::close`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_close(db: Option<Box<Db>>, error: ErrorOut<'_>) -> Code {
    answer(error, || match db {
        Some(db) => Ok(db.blocking.close()?),
        None => Ok(()),
    })
}

/// See [`millrace::Db::get`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_get(
    db: Option<&Db>,
    family: Option<&Family>,
    key: Slice,
    value: Out<'_, Value>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let value = value_out(value)?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        *value = Value::new(given(db, "db")?.family(family)?.get(key)?);
        Ok(())
    })
}

/// See [`millrace::Db::multi_get`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_multi_get(
    db: Option<&Db>,
    family: Option<&Family>,
    keys: *const Slice,
    count: usize,
    values: *mut MaybeUninit<Value>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let family = given(db, "db")?.family(family)?;
        // SAFETY: the caller's promise.
        unsafe { fill(keys, values, count, |keys| Ok(family.multi_get(keys)?)) }
    })
}

/// See [`millrace::Db::put`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_put(
    db: Option<&Db>,
    family: Option<&Family>,
    key: Slice,
    value: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe { (key.bytes("key")?, value.bytes("value")?) };
        Ok(given(db, "db")?.family(family)?.put(key, value)?)
    })
}

/// See [`millrace::Db::delete`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_delete(
    db: Option<&Db>,
    family: Option<&Family>,
    key: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        Ok(given(db, "db")?.family(family)?.delete(key)?)
    })
}

/// See [`millrace::Db::delete_range`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_delete_range(
    db: Option<&Db>,
    family: Option<&Family>,
    start: Slice,
    end: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (start, end) = unsafe { (start.bytes("start")?, end.bytes("end")?) };
        Ok(given(db, "db")?.family(family)?.delete_range(start..end)?)
    })
}

/// See [`millrace::Db::merge`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_merge(
    db: Option<&Db>,
    family: Option<&Family>,
    key: Slice,
    operand: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let (key, operand) = unsafe { (key.bytes("key")?, operand.bytes("operand")?) };
        Ok(given(db, "db")?.family(family)?.merge(key, operand)?)
    })
}

/// See [`millrace::Db::write`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_write(
    db: Option<&Db>,
    batch: Option<&mut Batch>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let (db, batch) = (given(db, "db")?, given(batch, "batch")?);
        Ok(db.blocking.write(batch.take(db.id)?)?)
    })
}

/// See [`millrace::Db::sync`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_sync(db: Option<&Db>, error: ErrorOut<'_>) -> Code {
    answer(error, || Ok(given(db, "db")?.blocking.sync()?))
}

/// See [`millrace::Db::flush`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_flush(db: Option<&Db>, error: ErrorOut<'_>) -> Code {
    answer(error, || Ok(given(db, "db")?.blocking.flush()?))
}

/// See [`millrace::Db::compact_range`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_compact_range(
    db: Option<&Db>,
    family: Option<&Family>,
    start: Slice,
    end: Slice,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let keys = unsafe { bounds(start, end) }?;
        Ok(given(db, "db")?.family(family)?.compact_range(keys)?)
    })
}

/// See [`millrace::Db::checkpoint`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_checkpoint(
    db: Option<&Db>,
    path_text: *const c_char,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        // SAFETY: the caller's promise.
        let path = unsafe { path(path_text, "path") }?;
        Ok(given(db, "db")?.blocking.checkpoint(path)?)
    })
}

/// What belongs to another database is refused.
pub(crate) fn check_db(expected: u64, found: u64, name: &str) -> Result<()> {
    match expected == found {
        true => Ok(()),
        false => Err(Error::argument(format!("{name} belongs to another database"))),
    }
}
