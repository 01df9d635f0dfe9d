//! Merging the inputs of a plan into new tables: the job that runs on another core.
//!
//! Of the versions of a key, those that a reader may still see are kept (`compaction_iter`). A
//! file's range tombstones apply within its bounds only: they are truncated to the bounds of the
//! file they come from, and to those of the files that the merge makes.
//!
//! A large merge is split into ranges of keys, which run on several cores. `sources` reads the
//! inputs as one sequence, `output` ends tables where later merges will find them cheap, `below`
//! tells what deeper levels may have.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rocksfmt::{Comparator, Fragments, RangeDelAggregator};

use crate::error::{Error, Kind, Result};
use crate::merge_operator::merge_bytes_max;
use crate::range_tombstones::clipped;
use crate::read::level_iter::LevelIter;
use crate::table::Table;
use crate::version::{Family, Version};
use crate::write::blob_garbage::BlobMeter;
use crate::write::compaction_iter::{Around, CompactionIter, Place, Rules};
use crate::write::job::{self, ENTRIES_AT_ONCE, Job};
use crate::write::merge::below::Below;
use crate::write::merge::output::{Output, Tombstones};
use crate::write::merge::sources::{Merging, common_bytes};
use crate::write::pace::{MergeCounters, Pace, Paced};
use crate::write::picker::{KeyRange, Plan};

pub(super) mod below;
mod output;
mod sources;

/// The blocks that a merge holds may take this part of a core's memory.
pub(crate) const MEMORY_SHARE: u64 = 2;
/// When the blocks of all sources take more than that, a source that does not have the next entry
/// drops a block of at least this many bytes. Such a block is mostly one value, so it is seldom
/// read more than twice.
pub(crate) const LARGE_BLOCK: usize = 64 << 10;

/// The tables that a merge made.
#[derive(Default)]
pub(crate) struct MergedTables {
    /// Of the output level, in the order of their keys.
    pub tables: Vec<Table>,
    /// Of level 0: keys that cannot go down.
    pub staying: Option<Box<Table>>,
    /// References to blob files in the inputs and in the outputs.
    pub blobs: BlobMeter,
}

impl MergedTables {
    /// Adds the tables of the next range of keys.
    pub fn append(&mut self, mut next: MergedTables) {
        self.tables.append(&mut next.tables);
        self.staying = self.staying.take().or(next.staying);
        self.blobs.append(next.blobs);
    }
}

/// The result of a merge.
pub(crate) enum Merged {
    Tables(MergedTables),
    /// The slot of an input that cannot be read, because it is damaged or memory is lacking.
    Unread(u32, Error),
}

/// A merge, or the part of it within a range of user keys.
pub(crate) struct MergePart {
    pub version: Arc<Version>,
    pub family: u32,
    pub plan: Arc<Plan>,
    pub range: KeyRange,
    pub done: MergeCounters,
    pub pace: Arc<Pace>,
}

impl MergePart {
    /// Merges into new tables.
    pub async fn run(&self, job: &Job) -> Result<Merged> {
        let MergePart { version, plan, range, .. } = self;
        let Some(family) = version.families.find(self.family) else {
            return Ok(Merged::Tables(MergedTables::default()));
        };
        let unread = async |slot: u32, error: Error| {
            job::remove_made(&job.dir, job.made.take().into_iter()).await;
            Ok(Merged::Unread(slot, error))
        };
        let comparator = family.comparator;
        let sources = match sources::open(job, version, comparator, plan, range).await {
            Ok(sources) => sources,
            Err((slot, error)) => return unread(slot, error).await,
        };
        let snapshots = job.db.readable(&job.core);
        let below = Below::new(version, family, plan);
        let covered = self.tombstones(job, family, &snapshots).await?.map(Rc::new);
        let tombstones = covered.clone().map(|all| Tombstones::new(all, snapshots[0], range));
        let mut output = Output::new(job, version, family, plan, range, tombstones);
        let mut paced = Paced::new(&self.pace, &job.busy);
        let share = job.core.pool().limit() / MEMORY_SHARE as usize;
        let mut merging = Merging::new(sources, comparator, common_bytes(version, plan), share);
        if let Err(error) = merging.regain().await {
            return unread(merging.first().map_or(0, LevelIter::slot), error).await;
        }
        let is_after =
            |user: &[u8]| range.to.as_ref().is_some_and(|to| comparator.cmp_user(user, to).is_ge());
        let is_bottommost = below.is_empty() && plan.stays.is_empty();
        let mut around = AroundInputs { covered, stays: &plan.stays, below, comparator };
        let mut iter = CompactionIter::new(Rules {
            snapshots,
            place: if is_bottommost { Place::Bottommost } else { Place::Level },
            merge_operator: family.merge.certain(),
            merge_bytes: merge_bytes_max(&job.core),
            filter: family.filter.clone(),
            keep_sequences: job.db.keeps_sequences(),
        });
        // The counters are shared with the other parts' cores.
        let (mut steps, mut entries, mut written) = (0, 0, 0);
        while let Some(source) = merging.first() {
            if is_after(source.user_key()) {
                break;
            }
            let value = source.value();
            let slot = source.slot();
            if let Err(error) = iter.push(&mut around, source.user_key(), source.packed(), &value) {
                return unread(slot, error).await;
            }
            output.blobs.comes_in(iter.input_key(), &value);
            if let Err(error) = output.add_all(&mut iter, &value).await {
                return match error.kind() {
                    // The input's checksums hold, but it is not in order.
                    Kind::Corruption | Kind::Unsupported => unread(slot, error).await,
                    _ => Err(error),
                };
            }
            let bytes = (iter.input_key().len() + value.len()) as u64;
            entries += bytes;
            if let Err(error) = merging.step().await {
                return unread(merging.first().map_or(slot, LevelIter::slot), error).await;
            }
            paced.done(&job.core, bytes).await;
            steps += 1;
            if steps % ENTRIES_AT_ONCE == 0 {
                self.done.entries.fetch_add(std::mem::take(&mut entries), Ordering::Relaxed);
                let now = output.written();
                self.done.written.fetch_add(now.saturating_sub(written), Ordering::Relaxed);
                written = written.max(now);
                job.core.checkpoint().await;
            }
        }
        self.done.entries.fetch_add(entries, Ordering::Relaxed);
        iter.finish(&mut around);
        output.add_all(&mut iter, b"").await?;
        let merged = output.finish().await?;
        self.done.busy_ns.fetch_add(job.busy.get(), Ordering::Relaxed);
        Ok(Merged::Tables(merged))
    }

    /// The range tombstones of the inputs, of those that the same readers see only the newest.
    async fn tombstones(
        &self,
        job: &Job,
        family: &Family,
        snapshots: &[u64],
    ) -> Result<Option<Fragments>> {
        let version = &self.version;
        let mut all = RangeDelAggregator::new(family.comparator, snapshots.to_vec());
        let mut some = false;
        for (_, slot) in self.plan.files() {
            for (count, tombstone) in (1..).zip(clipped(version, family, slot)) {
                let (start, end, sequence) = tombstone?;
                if self.range.meets(family.comparator, start, &end) {
                    let added = all.add(start, &end, sequence);
                    added.map_err(|e| Error::format("a range tombstone", &e))?;
                    some = true;
                }
                if count % ENTRIES_AT_ONCE == 0 {
                    job.core.checkpoint().await;
                }
            }
        }
        if !some {
            return Ok(None);
        }
        let mut cutting = all.cut();
        while cutting.step() {
            job.core.checkpoint().await;
        }
        Ok(Some(cutting.finish()))
    }
}

/// The data around the inputs of a merge.
struct AroundInputs<'a> {
    /// The range tombstones of the inputs.
    covered: Option<Rc<Fragments>>,
    /// Keys that stay in level 0, above older versions that are left alone.
    stays: &'a [KeyRange],
    below: Below<'a>,
    comparator: Comparator,
}

impl Around for AroundInputs<'_> {
    fn exists_below(&mut self, user_key: &[u8]) -> bool {
        let order = self.comparator;
        let has_key = |zone: &KeyRange| {
            zone.from.as_ref().is_none_or(|from| order.cmp_user(from, user_key).is_le())
                && zone.to.as_ref().is_none_or(|to| order.cmp_user(user_key, to).is_lt())
        };
        self.stays.iter().any(has_key) || self.below.may_have(user_key)
    }

    fn has_tombstones(&self) -> bool {
        self.covered.is_some()
    }

    fn covered(&mut self, user_key: &[u8], at: u64) -> u64 {
        self.covered.as_ref().map_or(0, |set| set.max_sequence(user_key, at))
    }
}
