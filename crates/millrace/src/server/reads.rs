//! Gets, multi-gets and snapshots.

use std::rc::Rc;
use std::sync::Arc;

use lsm::{CfId, Reader, Snapshot, WARM_MAX};

use super::hall::Hall;
use super::{cursors, spawn};
use crate::error::{Error, ErrorKind, Result};
use crate::request::{Back, Handle, Read};
use crate::value::Value;

/// Keys of a multi-get that are looked up together.
const KEYS_PER_LOOKUP: usize = 256;

/// The gets of a turn. They are answered together, so that their lookups overlap their waits for
/// memory.
#[derive(Default)]
pub(super) struct Gets(Vec<Get>);

struct Get {
    family: CfId,
    key: Box<[u8]>,
    back: Back<Option<Value>>,
}

/// Answers a read, or starts its task.
pub(super) fn begin(hall: &Rc<Hall>, read: Read, gets: &mut Gets) {
    match read {
        Read::Get { family, key, back } => gets.0.push(Get { family, key, back }),
        Read::GetAt { snapshot, family, key, back } => {
            let (runs, reader) = (hall.read_runs(), hall.reader());
            let at = snapshot_of(hall, Some(&snapshot));
            spawn(hall, async move {
                let answer = match at {
                    Ok(at) => value(reader.get(family, &key, at.as_deref()).await),
                    Err(error) => Err(error),
                };
                drop((snapshot, runs));
                back.send(answer);
            });
        }
        Read::MultiGet { snapshot, family, keys, back } => {
            let (runs, reader) = (hall.read_runs(), hall.reader());
            let at = snapshot_of(hall, snapshot.as_ref());
            spawn(hall, async move {
                let answer = match at {
                    Ok(at) => multi_get(&reader, family, &keys, at.as_deref()).await,
                    Err(error) => Err(error),
                };
                drop((snapshot, runs));
                back.send(answer);
            });
        }
        Read::Snapshot { back } => back.send(take_snapshot(hall)),
        Read::Open(open) => cursors::open(hall, *open),
        Read::Next { cursor, back } => cursors::next(hall, cursor, back),
        #[cfg(test)]
        Read::Panic { in_task, back } => {
            let _back = (in_task, back);
            assert!(in_task, "on purpose");
            spawn(hall, async move {
                let _back = _back;
                panic!("on purpose");
            });
        }
    }
}

impl Gets {
    /// Answers those whose blocks are in memory, and starts a task for each of the others.
    pub fn answer(&mut self, hall: &Rc<Hall>) {
        if self.0.is_empty() {
            return;
        }
        let reader = hall.reader();
        for some in self.0.chunks(WARM_MAX) {
            let keys: [&[u8]; WARM_MAX] =
                std::array::from_fn(|at| some.get(at).map_or(&[][..], |get| &*get.key));
            let family = some[0].family;
            if some.len() > 1 && some.iter().all(|get| get.family == family) {
                reader.warm(family, &keys[..some.len()]);
            }
        }
        for Get { family, key, back } in self.0.drain(..) {
            if let Some(answer) = reader.get_cached(family, &key) {
                back.send(value(answer));
            } else if back.is_awaited() {
                let (runs, reader) = (hall.read_runs(), reader.clone());
                spawn(hall, async move {
                    let answer = value(reader.get(family, &key, None).await);
                    drop(runs);
                    back.send(answer);
                });
            }
        }
    }
}

/// Looks keys up, some at a time: each value that is found holds a block in memory until it is
/// copied, and all of them might fill the memory.
async fn multi_get(
    reader: &Reader,
    family: CfId,
    keys: &[Box<[u8]>],
    at: Option<&Snapshot>,
) -> Result<Vec<Option<Value>>> {
    let mut all = Vec::with_capacity(keys.len());
    for keys in keys.chunks(KEYS_PER_LOOKUP) {
        let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
        for found in reader.multi_get(family, &keys, at).await {
            all.push(value(found)?);
        }
        reader.core().checkpoint().await;
    }
    Ok(all)
}

/// Copies a value for its caller.
fn value(answer: lsm::Result<Option<lsm::Value>>) -> Result<Option<Value>> {
    match answer {
        Ok(found) => Ok(found.map(|value| Value::copy(&value))),
        Err(error) => Err(error.into()),
    }
}

/// A snapshot for a caller, with its sequence number.
fn take_snapshot(hall: &Rc<Hall>) -> Result<(Handle, u64)> {
    let snapshot = Rc::new(hall.reader().snapshot()?);
    let sequence = snapshot.sequence()?;
    let handle = hall.new_handle();
    hall.snapshots.borrow_mut().insert(handle.id, snapshot);
    Ok((handle, sequence))
}

/// The snapshot that a caller holds.
pub(super) fn snapshot_of(
    hall: &Hall,
    handle: Option<&Arc<Handle>>,
) -> Result<Option<Rc<Snapshot>>> {
    let Some(handle) = handle else { return Ok(None) };
    match hall.snapshots.borrow().get(&handle.id) {
        Some(snapshot) => Ok(Some(snapshot.clone())),
        None => Err(Error::new(ErrorKind::Expired, "the snapshot is of another database")),
    }
}
