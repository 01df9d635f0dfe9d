//! The knowledge of a change's keys: looking it up, and reading the rest.

use lsm::Value;

use crate::shard::ShardState;
use crate::shard::change::{Change, Need};
use crate::shard::modify::OldValue;
use crate::shard::overlay::{Newest, Ticket};

/// Keys of one change that are read together: each takes memory meanwhile.
const READ_TOGETHER: usize = 256;

/// What is known about the keys of a change.
pub(super) enum Knowledge {
    All(Vec<OldValue>),
    /// Keys with [`OldValue::Unknown`] have to be read.
    Partial(Vec<OldValue>),
    /// This write must land first.
    After(Ticket),
    Failed(lsm::Error),
}

impl ShardState {
    /// Finds what is known about the keys of a change, without waiting.
    pub(super) fn look_up(&self, change: &mut Change) -> Knowledge {
        let (kind, counted) = (change.kind, self.is_counted());
        let overlay = self.overlay.borrow();
        let mut all = Vec::with_capacity(change.batch.count() as usize);
        let mut complete = true;
        let known = self.known.borrow();
        for (at, (key, _)) in change.entries().enumerate() {
            let need = Need::of(kind, at, counted);
            if need == Need::Nothing {
                all.push(OldValue::Unknown);
                continue;
            }
            let print = self.print(key);
            match (known.get(print), need) {
                (Some(true), Need::Existence) => {
                    all.push(OldValue::There);
                    continue;
                }
                (Some(false), _) => {
                    all.push(OldValue::Missing);
                    continue;
                }
                _ => {}
            }
            let old = match (need, overlay.newest(key, print)) {
                (_, Some((_, Newest::Missing))) => OldValue::Missing,
                (Need::Existence | Need::Nothing, Some(_)) => OldValue::There,
                (Need::Value, Some((_, Newest::Value(value)))) => OldValue::Value(value.to_vec()),
                (Need::Value, Some((ticket, Newest::There))) => return Knowledge::After(*ticket),
                (_, None) => match self.reader.get_cached(self.family, key) {
                    Some(Ok(found)) => old_state(found, need),
                    Some(Err(error)) => return Knowledge::Failed(error),
                    None => {
                        complete = false;
                        OldValue::Unknown
                    }
                },
            };
            all.push(old);
        }
        if complete { Knowledge::All(all) } else { Knowledge::Partial(all) }
    }

    /// Reads what is not known yet about the keys of a change whose turn it is.
    pub(super) async fn read(&self, change: &mut Change) -> lsm::Result<Vec<OldValue>> {
        let (kind, counted) = (change.kind, self.is_counted());
        loop {
            let refusals = self.refusals.get();
            match self.look_up(change) {
                Knowledge::All(old) => return Ok(old),
                Knowledge::Failed(error) => return Err(error),
                Knowledge::After(ticket) => {
                    self.changed.wait_until(|| self.landed.get() >= ticket).await
                }
                Knowledge::Partial(mut old) => {
                    let unknown = change
                        .entries()
                        .map(|(key, _)| key)
                        .enumerate()
                        .filter(|(at, _)| old[*at] == OldValue::Unknown);
                    let (exists, reads): (Vec<_>, Vec<_>) =
                        unknown.partition(|(at, _)| Need::of(kind, *at, counted) != Need::Value);
                    for some in exists.chunks(READ_TOGETHER) {
                        let keys: Vec<&[u8]> = some.iter().map(|(_, key)| *key).collect();
                        let found = self.reader.contains(self.family, &keys).await;
                        for ((at, _), found) in some.iter().zip(found) {
                            old[*at] = if found? { OldValue::There } else { OldValue::Missing };
                        }
                    }
                    for some in reads.chunks(READ_TOGETHER) {
                        let keys: Vec<&[u8]> = some.iter().map(|(_, key)| *key).collect();
                        let found = self.reader.multi_get(self.family, &keys, None).await;
                        for ((at, _), found) in some.iter().zip(found) {
                            old[*at] = old_state(found?, Need::Value);
                        }
                    }
                    // After a refusal the knowledge may be wrong.
                    if self.refusals.get() == refusals {
                        return Ok(old);
                    }
                }
            }
        }
    }
}

fn old_state(found: Option<Value>, need: Need) -> OldValue {
    match (found, need) {
        (None, _) => OldValue::Missing,
        (Some(value), Need::Value) => OldValue::Value(value.to_vec()),
        (Some(_), _) => OldValue::There,
    }
}
