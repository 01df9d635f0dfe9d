//! Snapshots.

use std::mem::MaybeUninit;

use millrace::blocking;

use crate::bytes::{Out, Slice, Value, handle_out, value_out};
use crate::db::{Db, check_db, fill};
use crate::error::{Code, ErrorOut, Result, answer, given, or_else};
use crate::family::Family;

/// The state of a database at one moment: `millrace_snapshot`.
#[derive(Debug)]
pub struct Snapshot {
    snapshot: blocking::Snapshot,
    db: u64,
}

impl Snapshot {
    /// The snapshot, if it belongs to this database.
    pub(crate) fn of(&self, db: u64) -> Result<&blocking::Snapshot> {
        check_db(db, self.db, "snapshot")?;
        Ok(&self.snapshot)
    }
}

/// See [`millrace::Db::snapshot`].
#[unsafe(no_mangle)]
pub extern "C" fn millrace_snapshot_new(
    db: Option<&Db>,
    snapshot: Out<'_, Option<Box<Snapshot>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let snapshot = handle_out(snapshot, "snapshot")?;
        let db = given(db, "db")?;
        *snapshot = Some(Box::new(Snapshot { snapshot: db.blocking.snapshot()?, db: db.id }));
        Ok(())
    })
}

/// Releases a snapshot.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_snapshot_free(snapshot: Option<Box<Snapshot>>) {
    or_else((), || drop(snapshot));
}

/// See [`millrace::Snapshot::get_in`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_snapshot_get(
    snapshot: Option<&Snapshot>,
    family: Option<&Family>,
    key: Slice,
    value: Out<'_, Value>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let value = value_out(value)?;
        let Snapshot { snapshot, db } = given(snapshot, "snapshot")?;
        // SAFETY: the caller's promise.
        let key = unsafe { key.bytes("key") }?;
        *value = Value::new(match family {
            None => snapshot.get(key)?,
            Some(family) => snapshot.get_in(family.of(*db)?, key)?,
        });
        Ok(())
    })
}

/// See [`millrace::Snapshot::multi_get_in`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_snapshot_multi_get(
    snapshot: Option<&Snapshot>,
    family: Option<&Family>,
    keys: *const Slice,
    count: usize,
    values: *mut MaybeUninit<Value>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let Snapshot { snapshot, db } = given(snapshot, "snapshot")?;
        let family = family.map(|family| family.of(*db)).transpose()?;
        let look_up = |keys: Vec<&[u8]>| match family {
            None => Ok(snapshot.multi_get(keys)?),
            Some(family) => Ok(snapshot.multi_get_in(family, keys)?),
        };
        // SAFETY: the caller's promise.
        unsafe { fill(keys, values, count, look_up) }
    })
}
