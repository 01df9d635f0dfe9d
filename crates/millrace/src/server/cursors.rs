//! Cursors: ranges that callers read in chunks.
//!
//! A cursor holds a snapshot, so that it goes on from its last key whenever the caller asks. While
//! the caller is quick it also holds the iterator with its read-ahead. An iterator holds old
//! memtables and files, so one that nobody has used for a few seconds is dropped, and a seek makes
//! another.

use std::rc::Rc;
use std::sync::Arc;

use lsm::{CfId, Iter, IterOptions, Reader, Snapshot};
use reactor::Class;

use super::hall::Hall;
use super::reads::snapshot_of;
use super::spawn;
use super::writes::check_order;
use crate::bounds::Limits;
use crate::error::{Error, ErrorKind, Result};
use crate::request::{Back, Chunk, Handle, OpenCursor};

/// The first chunk's entries and bytes, and those of the largest.
const FIRST: (usize, usize) = (32, 16 << 10);
const LARGEST: (usize, usize) = (2048, 256 << 10);
/// Entries between two points where other tasks may run.
const CHECKPOINT: usize = 64;
/// An iterator that was not used for so long is dropped.
const IDLE_NS: u64 = 2_000_000_000;
/// How often idle cursors are looked for.
const WATCH_NS: u64 = 1_000_000_000;

/// A range that is being read.
pub(super) struct Cursor {
    family: CfId,
    limits: Limits,
    reverse: bool,
    snapshot: Rc<Snapshot>,
    /// On the next entry, if there is one.
    iter: Option<Iter>,
    /// The last key that was read.
    last: Option<Vec<u8>>,
    /// Entries and bytes of the next chunk.
    size: (usize, usize),
    used_ns: u64,
}

/// Opens a cursor and reads its first chunk.
pub(super) fn open(hall: &Rc<Hall>, open: OpenCursor) {
    let OpenCursor { snapshot: held, family, limits, reverse, back } = open;
    let snapshot = match check_order(hall, family, &limits) {
        Ok(()) => snapshot_of(hall, held.as_ref()),
        Err(error) => Err(error),
    };
    let snapshot = match snapshot {
        Ok(Some(snapshot)) => Ok(snapshot),
        Ok(None) => hall.reader().snapshot().map(Rc::new).map_err(Error::from),
        Err(error) => Err(error),
    };
    let snapshot = match snapshot {
        Ok(snapshot) => snapshot,
        Err(error) => return back.send(Err(error)),
    };
    let cursor = Cursor {
        family,
        limits,
        reverse,
        snapshot,
        iter: None,
        last: None,
        size: FIRST,
        used_ns: 0,
    };
    run(hall, cursor, None, back);
}

/// Reads the next chunk of a cursor.
pub(super) fn next(hall: &Rc<Hall>, handle: Handle, back: Back<Chunk>) {
    let cursor = hall.cursors.borrow_mut().remove(&handle.id);
    match cursor {
        Some(cursor) => run(hall, cursor, Some(handle), back),
        None => back.send(Err(Error::new(ErrorKind::Closed, "the range has ended"))),
    }
}

fn run(hall: &Rc<Hall>, mut cursor: Cursor, handle: Option<Handle>, back: Back<Chunk>) {
    let (runs, reader, hall) = (hall.read_runs(), hall.reader(), hall.clone());
    spawn(&hall.clone(), async move {
        let answer = cursor.read(&reader).await.map(|(mut chunk, goes_on)| {
            if goes_on {
                let handle = handle.unwrap_or_else(|| hall.new_handle());
                cursor.used_ns = hall.core.now_ns();
                hall.cursors.borrow_mut().insert(handle.id, cursor);
                hall.opened.notify();
                chunk.cursor = Some(handle);
            }
            chunk
        });
        drop(runs);
        // If nobody takes it, the drop of its handle releases the cursor.
        back.send(answer);
    });
}

impl Cursor {
    /// Reads a chunk, and tells whether more may follow.
    async fn read(&mut self, reader: &Reader) -> Result<(Chunk, bool)> {
        let mut iter = match self.iter.take() {
            Some(iter) => iter,
            None => self.seek(reader).await?,
        };
        let (entries_max, bytes_max) = self.size;
        self.size = (LARGEST.0.min(4 * entries_max), LARGEST.1.min(4 * bytes_max));
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        while iter.valid() && ends.len() < entries_max && bytes.len() < bytes_max {
            bytes.extend_from_slice(iter.key());
            let key = bytes.len();
            bytes.extend_from_slice(iter.value());
            let end = |at: usize| {
                u32::try_from(at).map_err(|_| Error::new(ErrorKind::Memory, "an entry of 4 GiB"))
            };
            ends.push((end(key)?, end(bytes.len())?));
            match self.reverse {
                true => iter.prev().await?,
                false => iter.next().await?,
            }
            if ends.len().is_multiple_of(CHECKPOINT) {
                reader.core().checkpoint().await;
            }
        }
        let goes_on = iter.valid();
        if goes_on && let Some(&(key, _)) = ends.last() {
            let from = ends.len().checked_sub(2).map_or(0, |at| ends[at].1);
            self.last = Some(bytes[from as usize..key as usize].to_vec());
            self.iter = Some(iter);
        }
        Ok((Chunk { bytes: Arc::new(bytes), ends, cursor: None }, goes_on))
    }

    /// An iterator on the first entry, or on the one after the last that was read.
    async fn seek(&self, reader: &Reader) -> Result<Iter> {
        let options = IterOptions {
            lower: self.limits.lower.clone(),
            upper: self.limits.upper.clone(),
            snapshot: Some(&self.snapshot),
            fill_cache: true,
            ..IterOptions::default()
        };
        let mut iter = reader.iter(self.family, options)?;
        match (&self.last, self.reverse) {
            (None, false) => iter.seek_to_first().await?,
            (None, true) => iter.seek_to_last().await?,
            (Some(last), false) => {
                iter.seek(last).await?;
                if iter.valid() && iter.key() == &last[..] {
                    iter.next().await?;
                }
            }
            (Some(last), true) => {
                iter.seek_for_prev(last).await?;
                if iter.valid() && iter.key() == &last[..] {
                    iter.prev().await?;
                }
            }
        }
        Ok(iter)
    }
}

/// Starts the task that drops the iterators of idle cursors.
pub(super) fn watch(hall: &Rc<Hall>) {
    let (core, opened, hall) = (hall.core.clone(), hall.opened.clone(), Rc::downgrade(hall));
    core.clone().spawn(Class::Background, async move {
        let any = || hall.upgrade().is_some_and(|hall| !hall.cursors.borrow().is_empty());
        loop {
            opened.wait_until(any).await;
            core.sleep_ns(WATCH_NS).await;
            let Some(hall) = hall.upgrade() else { return };
            let idle_before = core.now_ns().saturating_sub(IDLE_NS);
            let idle: Vec<Option<Iter>> = hall
                .cursors
                .borrow_mut()
                .values_mut()
                .filter(|cursor| cursor.used_ns < idle_before)
                .map(|cursor| cursor.iter.take())
                .collect();
            drop(idle);
        }
    });
}
