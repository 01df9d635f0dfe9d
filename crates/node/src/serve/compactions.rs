//! Control over merges from the admin socket: compaction of a range on request, pauses, limits, and
//! the state of levels.
//!
//! A compaction may take hours, longer than a connection may be silent. So a request begins it, and
//! the program asks for its state until it has ended. If the program stops asking, because it was
//! killed or lost its terminal, the compaction is cancelled: what was merged until then stays.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use kv::Shard;
use lsm::{
    Compacted, CompactionLimits, CompactionStatus, CompactionWatch, FamilyCompaction,
    LevelCompaction, LevelCounters,
};
use reactor::{Class, Core};
use serde_json::{Value, json};

use super::open::explain;
use crate::error::{Error, Kind};

/// How long a compaction goes on without a question for its state, in nanoseconds.
pub const LEASE_NS: u64 = 20_000_000_000;
/// Most compactions on request at a time.
const COMPACTIONS_MAX: usize = 8;

/// Control over the merges of a node.
pub(crate) struct Compactions {
    core: Core,
    /// `None` if the node writes to no database.
    shard: Option<Shard>,
    begun: RefCell<BTreeMap<u64, Begun>>,
    next: Cell<u64>,
}

/// A compaction on request, until its end was reported.
struct Begun {
    watch: CompactionWatch,
    until_ns: u64,
    result: Option<Result<Compacted, Error>>,
}

impl Compactions {
    pub fn new(core: &Core, shard: Option<Shard>) -> Rc<Compactions> {
        // Another process must not know a number of this one.
        let next = Cell::new(core.random_u64() >> 12);
        Rc::new(Compactions { core: core.clone(), shard, begun: RefCell::default(), next })
    }

    fn shard(&self) -> Result<&Shard, Error> {
        self.shard.as_ref().ok_or_else(|| {
            Error::new(Kind::Usage, "this node writes to no database, and merges nothing")
                .hint("a directory that no process writes to is compacted with --data DIR")
        })
    }

    /// Begins a compaction. Returns its number.
    pub fn begin(
        self: &Rc<Compactions>,
        family: &str,
        from: Option<&str>,
        to: Option<&str>,
    ) -> Result<Value, Error> {
        let shard = self.shard()?.clone();
        let (from, to) = (key(from)?, key(to)?);
        let id = shard.may_compact(family, (from.as_deref(), to.as_deref()));
        let id = id.map_err(|error| explain(shard.path(), &error))?;
        if shard.compaction_is_paused() {
            return Err(Error::new(Kind::Usage, "compaction is paused")
                .hint("millrace kv compaction resume ends the pause"));
        }
        if self.begun.borrow().len() >= COMPACTIONS_MAX {
            let what = format!("{COMPACTIONS_MAX} compactions on request are under way already");
            return Err(Error::new(Kind::System, what));
        }
        let number = self.next.replace(self.next.get() + 1);
        let watch = CompactionWatch::default();
        let until_ns = self.core.now_ns() + LEASE_NS;
        let begun = Begun { watch: watch.clone(), until_ns, result: None };
        self.begun.borrow_mut().insert(number, begun);
        let all = Rc::downgrade(self);
        self.core.spawn(Class::Control, async move {
            let done = shard.compact(id, (from.as_deref(), to.as_deref()), &watch).await;
            let done = done.map_err(|error| explain(shard.path(), &error));
            if let Some(all) = all.upgrade()
                && let Some(begun) = all.begun.borrow_mut().get_mut(&number)
            {
                begun.result = Some(done);
            }
        });
        self.end_without_questions(number);
        Ok(json!({"id": number}))
    }

    /// Cancels a compaction that nobody asks for any more, and forgets it.
    fn end_without_questions(self: &Rc<Compactions>, number: u64) {
        let (all, core) = (Rc::downgrade(self), self.core.clone());
        self.core.spawn(Class::Control, async move {
            loop {
                let Some(until_ns) =
                    all.upgrade().and_then(|all| Some(all.begun.borrow().get(&number)?.until_ns))
                else {
                    return;
                };
                if until_ns > core.now_ns() {
                    core.sleep_ns(until_ns - core.now_ns()).await;
                    continue;
                }
                let Some(all) = all.upgrade() else { return };
                let Some(begun) = all.begun.borrow_mut().remove(&number) else { return };
                if begun.result.is_none()
                    && let Some(shard) = &all.shard
                {
                    shard.cancel_compaction(&begun.watch);
                    tracing::warn!("a compaction is cancelled: its program has gone");
                }
                return;
            }
        });
    }

    /// The state of a compaction, which goes on. Its end is reported once.
    pub fn state(&self, number: u64) -> Result<Value, Error> {
        let mut all = self.begun.borrow_mut();
        let begun = all.get_mut(&number).ok_or_else(unknown)?;
        begun.until_ns = self.core.now_ns() + LEASE_NS;
        let (done_bytes, total_bytes) = begun.watch.progress();
        let done = begun.watch.done();
        let (ended, done) = match begun.result.take() {
            None => (false, done),
            Some(result) => {
                all.remove(&number);
                (true, result?)
            }
        };
        Ok(json!({
            "ended": ended,
            "paused": self.shard()?.compaction_is_paused(),
            "done_bytes": done_bytes,
            "total_bytes": total_bytes,
            "merges": done.merges,
            "moved_files": done.moved_files,
            "read_bytes": done.bytes,
            "written_bytes": done.into_bytes,
            "cancelled": done.cancelled,
        }))
    }

    /// Cancels a compaction.
    pub fn cancel(&self, number: u64) -> Result<Value, Error> {
        let all = self.begun.borrow();
        let begun = all.get(&number).ok_or_else(unknown)?;
        self.shard()?.cancel_compaction(&begun.watch);
        Ok(json!({}))
    }

    /// Pauses merges, or lets them go on.
    pub fn pause(&self, paused: bool) -> Result<Value, Error> {
        let shard = self.shard()?;
        let was_paused = shard.compaction_is_paused();
        shard.pause_compaction(paused);
        if paused && !was_paused {
            tracing::warn!("merges are paused: writes will stop when level 0 is full");
        } else if !paused && was_paused {
            tracing::info!("merges go on after a pause");
        }
        Ok(json!({"paused": paused, "was_paused": was_paused}))
    }

    /// Changes the limits that are given; 0 is no limit. Returns the limits.
    pub fn limit(&self, cores: Option<u32>, bytes_per_second: Option<u64>) -> Result<Value, Error> {
        let shard = self.shard()?;
        let mut limits = shard.compaction_limits();
        if let Some(percent) = cores {
            limits.cores_percent = Some(percent).filter(|&percent| percent > 0);
        }
        if let Some(bytes) = bytes_per_second {
            limits.bytes_per_second = Some(bytes).filter(|&bytes| bytes > 0);
        }
        shard.limit_compaction(limits);
        tracing::info!(?limits, "merges are limited");
        Ok(limits_json(limits))
    }

    /// The state of merges and levels.
    pub fn status(&self) -> Result<Value, Error> {
        Ok(status_json(&self.shard()?.compaction_status()))
    }
}

fn unknown() -> Error {
    Error::new(Kind::System, "the node knows no such compaction")
        .hint("it was restarted, or waited too long for a sign of life; what was merged stays")
}

/// A key in hexadecimal.
fn key(text: Option<&str>) -> Result<Option<Vec<u8>>, Error> {
    let Some(text) = text else { return Ok(None) };
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|digit| digit as u8);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| Some(digit(high)? << 4 | digit(low)?));
    let bytes: Option<Vec<u8>> = bytes.collect();
    let bytes = bytes.filter(|_| rest.is_empty());
    bytes.map(Some).ok_or_else(|| Error::new(Kind::Usage, "a key must be hexadecimal"))
}

fn limits_json(limits: CompactionLimits) -> Value {
    json!({
        "cores": limits.cores_percent.map(|percent| f64::from(percent) / 100.0),
        "bytes_per_second": limits.bytes_per_second,
    })
}

fn status_json(status: &CompactionStatus) -> Value {
    let name = |id: u32| {
        let family = status.families.iter().find(|family| family.id == id);
        family.map(|family| family.name.clone())
    };
    let jobs = status.jobs.iter().map(|job| {
        json!({
            "column_family": name(job.family),
            "from_level": job.from_level,
            "to_level": job.to_level,
            "files": job.files,
            "bytes": job.bytes,
            "read_bytes": job.read_bytes,
            "written_bytes": job.written_bytes,
            "seconds": seconds(job.ns),
            "cores": job.cores,
            "requested": job.is_requested,
        })
    });
    json!({
        "paused": status.paused,
        "writes_stopped": status.writes_stopped,
        "limits": limits_json(status.limits),
        "pressure": status.pressure,
        "debt_bytes": status.debt_bytes,
        "write_bytes_per_second": status.write_bytes_per_second,
        "merge_bytes_per_second": status.merge_bytes_per_second,
        "column_families": status.families.iter().map(family_json).collect::<Vec<_>>(),
        "jobs": jobs.collect::<Vec<_>>(),
    })
}

fn family_json(family: &FamilyCompaction) -> Value {
    let is_used = |(_, level): &(usize, &LevelCompaction)| {
        level.files > 0 || level.counters != LevelCounters::default()
    };
    let levels = family.levels.iter().enumerate().filter(is_used);
    json!({
        "name": family.name,
        "base_level": family.base_level,
        "pressure": family.pressure,
        "debt_bytes": family.debt_bytes,
        "bytes": family.bytes(),
        "live_bytes": family.live_bytes,
        "space_amplification": family.space_amplification(),
        "write_amplification": family.write_amplification(),
        "levels": levels.map(|(at, level)| level_json(family, at, level)).collect::<Vec<_>>(),
    })
}

fn level_json(family: &FamilyCompaction, at: usize, level: &LevelCompaction) -> Value {
    let counters = &level.counters;
    json!({
        "level": at,
        "files": level.files,
        "bytes": level.bytes,
        "target_bytes": level.target_bytes,
        "score": level.score,
        "merging_files": level.merging_files,
        "merging_bytes": level.merging_bytes,
        "merges": counters.merges,
        "read_above_bytes": counters.read_above_bytes,
        "read_bytes": counters.read_bytes,
        "written_bytes": counters.written_bytes,
        "moved_bytes": counters.moved_bytes,
        "added_bytes": counters.added_bytes,
        "write_amplification": counters.write_amplification(),
        "space_amplification": family.space_amplification_of(level),
        "seconds": seconds(counters.ns),
        "cpu_seconds": seconds(counters.busy_ns),
    })
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_hexadecimal() {
        assert_eq!(key(None).unwrap(), None);
        assert_eq!(key(Some("")).unwrap(), Some(vec![]));
        assert_eq!(key(Some("00fF")).unwrap(), Some(vec![0, 255]));
        for wrong in ["0", "0g", "+1", "00 1"] {
            assert!(key(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
