//! Iterators over ranges of keys.

use std::ffi::c_uint;
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};

use millrace::{Entry, blocking};

use crate::bytes::{Out, Slice, handle_out};
use crate::db::{Db, bounds};
use crate::error::{Code, Error, ErrorOut, Result, answer, given, or_else};
use crate::family::Family;
use crate::snapshot::Snapshot;

/// From the last key to the first: `MILLRACE_REVERSE`.
const REVERSE: c_uint = 1;
/// Without the start: `MILLRACE_EXCLUDE_START`.
const EXCLUDE_START: c_uint = 2;
/// With the end: `MILLRACE_INCLUDE_END`.
const INCLUDE_END: c_uint = 4;

/// The entries of a range in order: `millrace_iter`.
#[derive(Debug)]
pub struct Iter {
    range: blocking::Range,
    /// The entry that the caller looks at.
    entry: Option<Entry>,
    error: Option<Error>,
}

impl Iter {
    fn new(range: blocking::Range, flags: c_uint) -> Option<Box<Iter>> {
        let range = if flags & REVERSE != 0 { range.rev() } else { range };
        Some(Box::new(Iter { range, entry: None, error: None }))
    }

    fn advance(&mut self) -> Option<&Entry> {
        self.entry = None;
        if self.error.is_none() {
            match catch_unwind(AssertUnwindSafe(|| self.range.next())) {
                Ok(Some(Ok(entry))) => self.entry = Some(entry),
                Ok(Some(Err(error))) => self.error = Some(error.into()),
                Ok(None) => {}
                Err(payload) => self.error = Some(Error::panicked(&*payload)),
            }
        }
        self.entry.as_ref()
    }
}

fn check_flags(flags: c_uint, allowed: c_uint) -> Result<()> {
    match flags & !allowed {
        0 => Ok(()),
        unknown => Err(Error::argument(format!("unknown flags: {unknown:#x}"))),
    }
}

/// See [`millrace::Db::range`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_range(
    db: Option<&Db>,
    family: Option<&Family>,
    snapshot: Option<&Snapshot>,
    start: Slice,
    end: Slice,
    flags: c_uint,
    iter: Out<'_, Option<Box<Iter>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let iter = handle_out(iter, "iter")?;
        check_flags(flags, REVERSE | EXCLUDE_START | INCLUDE_END)?;
        let db = given(db, "db")?;
        let family = db.family(family)?;
        // SAFETY: the caller's promise.
        let keys = match unsafe { bounds(start, end) }? {
            (Bound::Included(start), end) if flags & EXCLUDE_START != 0 => {
                (Bound::Excluded(start), end)
            }
            keys => keys,
        };
        let keys = match keys {
            (start, Bound::Excluded(end)) if flags & INCLUDE_END != 0 => {
                (start, Bound::Included(end))
            }
            keys => keys,
        };
        let range = match snapshot {
            None => family.range(keys),
            Some(snapshot) => snapshot.of(db.id)?.range_in(family, keys),
        };
        *iter = Iter::new(range, flags);
        Ok(())
    })
}

/// See [`millrace::Db::prefix`].
///
/// # Safety
/// The [contract](crate#contract).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_prefix(
    db: Option<&Db>,
    family: Option<&Family>,
    snapshot: Option<&Snapshot>,
    prefix: Slice,
    flags: c_uint,
    iter: Out<'_, Option<Box<Iter>>>,
    error: ErrorOut<'_>,
) -> Code {
    answer(error, || {
        let iter = handle_out(iter, "iter")?;
        check_flags(flags, REVERSE)?;
        let db = given(db, "db")?;
        let family = db.family(family)?;
        // SAFETY: the caller's promise.
        let prefix = unsafe { prefix.bytes("prefix") }?;
        let range = match snapshot {
            None => family.prefix(prefix),
            Some(snapshot) => snapshot.of(db.id)?.prefix_in(family, prefix),
        };
        *iter = Iter::new(range, flags);
        Ok(())
    })
}

/// Goes to the next entry, and returns whether there is one.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_iter_next(
    iter: Option<&mut Iter>,
    key: Out<'_, Slice>,
    value: Out<'_, Slice>,
) -> bool {
    or_else(false, || {
        let entry = iter.and_then(Iter::advance);
        let pair = entry
            .map_or((Slice::NONE, Slice::NONE), |(key, value)| (Slice::of(key), Slice::of(value)));
        for (out, part) in [(key, pair.0), (value, pair.1)] {
            if let Some(out) = out {
                out.write(part);
            }
        }
        entry.is_some()
    })
}

/// Why an iterator has ended: an error, or the end of the range.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_iter_status(iter: Option<&Iter>, error: ErrorOut<'_>) -> Code {
    answer(error, || given(iter, "iter")?.error.clone().map_or(Ok(()), Err))
}

/// Frees an iterator.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_iter_free(iter: Option<Box<Iter>>) {
    or_else((), || drop(iter));
}
