//! Changes that take long: `BITOP`, which combines the values of many keys, and `RESTORE` of a long
//! payload. Each is computed by the task of its change, in steps.
//!
//! A `BITOP` waits at its keys like every other one, so that they do not change meanwhile. Its
//! task reads one source after the other, and combines it with the result, so that it holds the
//! result and one value in memory. One long change is
//! computed at a time.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::rc::Rc;

use lsm::{BatchWriter, Value};

use crate::command::bits::{BitOperation, STEP_BYTES};
use crate::command::dump::{self, Restore};
use crate::command::operation::{Operation, Payload};
use crate::settings::FAMILY;
use crate::shard::ShardState;
use crate::shard::change::Change;
use crate::shard::modify::{self, OldValue};
use crate::shard::overlay::Newest;

/// Payloads of up to this length are unpacked in one go.
const RESTORED_AT_ONCE: usize = 4 * 1024;

/// Whether a change takes so long that a task of its own computes it.
pub(super) fn is_long(change: &Change) -> bool {
    match change.kind {
        Operation::Combine(_) => true,
        Operation::Restore { payload: Payload::Packed, .. } => change.len() > RESTORED_AT_ONCE,
        _ => false,
    }
}

/// The value of a source.
enum Source {
    Missing,
    /// Written, and not yet visible.
    Written(Rc<[u8]>),
    Read(Value),
}

impl Deref for Source {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Missing => &[],
            Self::Written(value) => value,
            Self::Read(value) => value,
        }
    }
}

/// The sources that decide the result: one that is named many times counts once, or, where a second
/// time undoes the first, twice.
fn needed(operation: BitOperation, sources: &[Vec<u8>]) -> Vec<&Vec<u8>> {
    let mut times: BTreeMap<&Vec<u8>, usize> = BTreeMap::new();
    sources.iter().for_each(|source| *times.entry(source).or_default() += 1);
    let undoes = operation == BitOperation::Xor;
    let of = |(source, times): (_, usize)| {
        let twice = undoes && times.is_multiple_of(2);
        std::iter::repeat_n(source, if twice { 2 } else { 1 })
    };
    times.into_iter().flat_map(of).collect()
}

impl ShardState {
    /// Waits until no other long change is computed, and there is room for what this one builds.
    async fn begin_long(&self) {
        let has_room = || self.built_bytes.get() <= self.built_bytes_max.get();
        self.changed.wait_until(|| !self.computing.get() && has_room()).await;
        self.computing.set(true);
    }

    fn end_long(&self) {
        self.computing.set(false);
        self.changed.notify_all();
    }

    /// Unpacks the payload of a long `RESTORE`: its batch becomes one with the value.
    pub(super) async fn unpack(&self, change: &mut Change) {
        let Operation::Restore { over, .. } = change.kind else { return };
        self.begin_long().await;
        let unpacked = self.unpack_batch(change).await;
        self.end_long();
        let payload = match unpacked {
            Ok(batch) => {
                change.batch = batch;
                Payload::Unpacked
            }
            Err(text) => Payload::Refused(text),
        };
        change.kind = Operation::Restore { over, payload };
    }

    async fn unpack_batch(&self, change: &mut Change) -> Result<BatchWriter, &'static str> {
        let Some((key, Some(operand))) = change.entries().next() else {
            return Err(dump::BAD_FORMAT);
        };
        let mut restore = Restore::new(operand, self.value_bytes_max.get());
        loop {
            match restore.step()? {
                Some(value) => return Ok(modify::put(key, &value)),
                None => self.core.checkpoint().await,
            }
        }
    }

    /// Combines the values of a change's keys. Its batch becomes the one that is written. Returns
    /// the state before that.
    pub(super) async fn combine(
        &self,
        operation: BitOperation,
        change: &mut Change,
    ) -> lsm::Result<Vec<OldValue>> {
        self.begin_long().await;
        let keys: Vec<Vec<u8>> = change.entries().map(|(key, _)| key.to_vec()).collect();
        let combined = self.combine_all(operation, &keys).await;
        self.end_long();
        let (result, old) = combined?;
        change.batch = match (keys.first(), old.exists()) {
            (Some(key), _) if !result.is_empty() => modify::put(key, &result),
            (Some(key), true) => {
                let mut batch = BatchWriter::new();
                batch.delete(FAMILY, key);
                batch
            }
            _ => BatchWriter::new(),
        };
        Ok(vec![old])
    }

    /// The result, and what is known about the first key, which gets it.
    async fn combine_all(
        &self,
        operation: BitOperation,
        keys: &[Vec<u8>],
    ) -> lsm::Result<(Vec<u8>, OldValue)> {
        let Some((target, sources)) = keys.split_first() else {
            return Ok((Vec::new(), OldValue::Missing));
        };
        loop {
            let refusals = self.refusals.get();
            let mut result = Vec::new();
            for (number, key) in needed(operation, sources).into_iter().enumerate() {
                if let Some(why) = &*self.failed.borrow() {
                    return Err(lsm::Error::new(lsm::Kind::Io, &**why));
                }
                let source = self.source(key).await?;
                let mut at = 0;
                while operation.step(&mut result, &source, at, number == 0) {
                    at += STEP_BYTES;
                    self.core.checkpoint().await;
                }
            }
            let old = match self.source(target).await? {
                // It may have expired.
                Source::Missing => match self.is_stored(target).await? {
                    true => OldValue::Expired,
                    false => OldValue::Missing,
                },
                _ => OldValue::There,
            };
            // After a refusal the knowledge may be wrong.
            if self.refusals.get() == refusals {
                return Ok((result, old));
            }
        }
    }

    /// Whether the engine has a key, or will have it when all writes have landed.
    async fn is_stored(&self, key: &[u8]) -> lsm::Result<bool> {
        if !self.live.has_deadlines() {
            return Ok(false);
        }
        if let Some((_, newest)) = self.overlay.borrow().newest(key, self.print(key)) {
            return Ok(*newest != Newest::Missing);
        }
        self.reader.contains(self.family, &[key]).await.pop().unwrap_or(Ok(false))
    }

    /// The value of a key of a change whose turn it is.
    async fn source(&self, key: &[u8]) -> lsm::Result<Source> {
        let print = self.print(key);
        loop {
            let newest = self.overlay.borrow().newest(key, print).cloned();
            match newest {
                Some((_, Newest::Missing)) => return Ok(Source::Missing),
                Some((_, Newest::There(deadline) | Newest::Value(_, deadline)))
                    if deadline.has_passed(self.core.unix_time_ms()) =>
                {
                    return Ok(Source::Missing);
                }
                Some((_, Newest::Value(value, _))) => return Ok(Source::Written(value)),
                Some((ticket, Newest::There(_))) => {
                    self.changed.wait_until(|| self.landed.get() >= ticket).await;
                }
                None => {
                    let value = self.live.get(self.family, key).await?;
                    return Ok(value.map_or(Source::Missing, Source::Read));
                }
            }
        }
    }
}
