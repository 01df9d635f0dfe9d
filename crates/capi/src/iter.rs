//! Iterators over ranges of keys.

use std::ffi::c_uint;
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};

use millrace::{Entry, blocking};

use crate::bytes::{Out, Slice, handle_out};
use crate::client::ClientRange;
use crate::db::{Bounds, Db, bounds};
use crate::error::{Code, Error, ErrorOut, Result, answer, given, or_else};
use crate::family::Family;
use crate::snapshot::Snapshot;

/// From the last key to the first: `MILLRACE_REVERSE`.
const REVERSE: c_uint = 1;
/// Without the start: `MILLRACE_EXCLUDE_START`.
const EXCLUDE_START: c_uint = 2;
/// With the end: `MILLRACE_INCLUDE_END`.
const INCLUDE_END: c_uint = 4;

/// The flags of a range.
pub(crate) const RANGE_FLAGS: c_uint = REVERSE | EXCLUDE_START | INCLUDE_END;
/// The flags of a prefix.
pub(crate) const PREFIX_FLAGS: c_uint = REVERSE;

/// Where the entries come from.
#[derive(Debug)]
pub(crate) enum Source {
    Db(blocking::Range),
    Client(ClientRange),
}

impl Source {
    fn next(&mut self) -> Result<Option<Entry>> {
        match self {
            Source::Db(range) => Ok(range.next().transpose()?),
            Source::Client(range) => range.next(),
        }
    }
}

/// The entries of a range in order: `millrace_iter`.
#[derive(Debug)]
pub struct Iter {
    source: Source,
    /// The entry that the caller looks at.
    entry: Option<Entry>,
    error: Option<Error>,
}

impl Iter {
    pub(crate) fn new(source: Source) -> Option<Box<Iter>> {
        Some(Box::new(Iter { source, entry: None, error: None }))
    }

    fn of_db(range: blocking::Range, flags: c_uint) -> Option<Box<Iter>> {
        Iter::new(Source::Db(if is_reverse(flags) { range.rev() } else { range }))
    }

    fn advance(&mut self) -> Option<&Entry> {
        self.entry = None;
        if self.error.is_none() {
            match catch_unwind(AssertUnwindSafe(|| self.source.next())) {
                Ok(Ok(entry)) => self.entry = entry,
                Ok(Err(error)) => self.error = Some(error),
                Err(payload) => self.error = Some(Error::panicked(&*payload)),
            }
        }
        self.entry.as_ref()
    }
}

pub(crate) fn check_flags(flags: c_uint, allowed: c_uint) -> Result<()> {
    match flags & !allowed {
        0 => Ok(()),
        unknown => Err(Error::argument(format!("unknown flags: {unknown:#x}"))),
    }
}

pub(crate) fn is_reverse(flags: c_uint) -> bool {
    flags & REVERSE != 0
}

/// Bounds without the start, or with the end, if the flags say so.
pub(crate) fn with_flags((start, end): Bounds<'_>, flags: c_uint) -> Bounds<'_> {
    let start = match start {
        Bound::Included(start) if flags & EXCLUDE_START != 0 => Bound::Excluded(start),
        start => start,
    };
    let end = match end {
        Bound::Excluded(end) if flags & INCLUDE_END != 0 => Bound::Included(end),
        end => end,
    };
    (start, end)
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
        check_flags(flags, RANGE_FLAGS)?;
        let db = given(db, "db")?;
        let family = db.family(family)?;
        // SAFETY: the caller's promise.
        let keys = with_flags(unsafe { bounds(start, end) }?, flags);
        let range = match snapshot {
            None => family.range(keys),
            Some(snapshot) => snapshot.of(db.id)?.range_in(family, keys),
        };
        *iter = Iter::of_db(range, flags);
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
        check_flags(flags, PREFIX_FLAGS)?;
        let db = given(db, "db")?;
        let family = db.family(family)?;
        // SAFETY: the caller's promise.
        let prefix = unsafe { prefix.bytes("prefix") }?;
        let range = match snapshot {
            None => family.prefix(prefix),
            Some(snapshot) => snapshot.of(db.id)?.prefix_in(family, prefix),
        };
        *iter = Iter::of_db(range, flags);
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
