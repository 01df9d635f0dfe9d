//! The knowledge of a change's keys: looking it up, and reading the rest.

use lsm::{Error, Kind, Value};

use crate::command::operation::Operation;
use crate::expiry::Deadline;
use crate::shard::ShardState;
use crate::shard::change::{Change, Need};
use crate::shard::execute::TOO_MUCH;
use crate::shard::modify::OldValue;
use crate::shard::overlay::{Newest, Ticket};

/// Keys of one change that are read together: each takes memory meanwhile.
const READ_TOGETHER: usize = 256;
/// The same where their values are read.
const VALUES_TOGETHER: usize = 8;

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
        let overlay = self.overlay.borrow();
        let mut all = Vec::with_capacity(change.batch.count() as usize);
        let mut complete = true;
        let known = self.known.borrow();
        // Whether a key has expired does not matter to one that is set whatever was there.
        let change_kind = change.kind;
        let asks = change_kind != Operation::Put && self.live.has_deadlines();
        for (key, need) in change.needs(self.is_counted()) {
            if need == Need::Nothing || !asks && change_kind == Operation::Watch {
                all.push(OldValue::Unknown);
                continue;
            }
            let print = self.print(key);
            match (known.get(print), need) {
                (Some(true), Need::Existence) if !asks => {
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
                (
                    Need::Existence | Need::Nothing,
                    Some((_, Newest::There(deadline) | Newest::Value(_, deadline))),
                ) => OldValue::There.until(*deadline),
                (Need::Value, Some((_, Newest::Value(value, deadline)))) => {
                    OldValue::of(value.to_vec(), *deadline)
                }
                (Need::Value, Some((ticket, Newest::There(_)))) => {
                    return Knowledge::After(*ticket);
                }
                (_, None) => match self.reader.get_cached(self.family, key) {
                    Some(Ok(found)) if asks && found.is_some() => {
                        match self.live.has_none_cached(self.family, key) {
                            Some(Ok(())) => old_state(found, need),
                            Some(Err(error)) => return Knowledge::Failed(error),
                            None => {
                                complete = false;
                                OldValue::Unknown
                            }
                        }
                    }
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
        loop {
            let refusals = self.refusals.get();
            match self.look_up(change) {
                Knowledge::All(old) => return Ok(old),
                Knowledge::Failed(error) => return Err(error),
                Knowledge::After(ticket) => {
                    self.changed.wait_until(|| self.landed.get() >= ticket).await
                }
                Knowledge::Partial(mut old) => {
                    let kind = change.kind;
                    let asks = kind != Operation::Put && self.live.has_deadlines();
                    let (mut existence, mut values) = (Vec::new(), Vec::new());
                    for (at, (key, need)) in change.needs(self.is_counted()).enumerate() {
                        match need {
                            _ if old[at] != OldValue::Unknown => {}
                            _ if kind == Operation::Watch && !asks => {}
                            Need::Nothing => {}
                            Need::Existence => existence.push((at, key)),
                            Need::Value => values.push((at, key)),
                        }
                    }
                    for some in existence.chunks(READ_TOGETHER) {
                        let keys: Vec<&[u8]> = some.iter().map(|(_, key)| *key).collect();
                        let found = self.reader.contains(self.family, &keys).await;
                        for ((at, key), found) in some.iter().zip(found) {
                            old[*at] = match found? {
                                true if asks => self.existence(kind, key).await?,
                                true => OldValue::There,
                                false => OldValue::Missing,
                            };
                        }
                    }
                    let mut bytes = 0;
                    for some in values.chunks(VALUES_TOGETHER) {
                        let keys: Vec<&[u8]> = some.iter().map(|(_, key)| *key).collect();
                        let found = self.reader.multi_get(self.family, &keys, None).await;
                        for ((at, key), found) in some.iter().zip(found) {
                            old[*at] = match found? {
                                Some(_) if asks => self.with_deadline(key, Need::Value).await?,
                                found => old_state(found, Need::Value),
                            };
                            bytes += old[*at].len();
                        }
                        if values.len() > 1 && bytes > self.transaction_bytes_max() {
                            return Err(Error::new(Kind::Memory, TOO_MUCH));
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

impl ShardState {
    /// Whether a key that is there has expired.
    async fn existence(&self, kind: Operation, key: &[u8]) -> lsm::Result<OldValue> {
        match self.with_deadline(key, Need::Existence).await {
            // Its deadline is not known without its value, which these do not need otherwise.
            Err(error) if is_overwriting(kind, &error) => Ok(OldValue::There),
            there => there,
        }
    }

    /// Reads a key with its deadline.
    async fn with_deadline(&self, key: &[u8], need: Need) -> lsm::Result<OldValue> {
        let found = match self.live.has_none_cached(self.family, key) {
            Some(none) => {
                none?;
                if need == Need::Existence {
                    return Ok(OldValue::There);
                }
                let value = self.reader.get(self.family, key, None).await?;
                value.map(|value| (value, Deadline::NEVER))
            }
            None => self.live.look_up(self.family, key, None).await?,
        };
        Ok(match found {
            Some((value, deadline)) => old_state(Some(value), need).until(deadline),
            None => OldValue::Missing,
        })
    }
}

/// Whether a change removes or replaces a value that cannot be read.
fn is_overwriting(kind: Operation, error: &Error) -> bool {
    matches!(kind, Operation::Put | Operation::PutIfNone | Operation::Delete)
        && matches!(error.kind(), Kind::Memory | Kind::Corruption)
}

fn old_state(found: Option<Value>, need: Need) -> OldValue {
    match (found, need) {
        (None, _) => OldValue::Missing,
        (Some(value), Need::Value) => OldValue::Value(value.to_vec()),
        (Some(_), _) => OldValue::There,
    }
}
