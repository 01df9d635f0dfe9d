//! Merging the inputs of a compaction into new tables: the job that runs on another core.
//!
//! Of the versions of a key, those that a reader may still see are kept (`compaction_iter`). A file's range
//! tombstones apply within its bounds only: they are truncated to the bounds of the file they come
//! from, and to those of the files that the merge makes.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rocksfmt::{Comparator, InternalKey, SENTINEL_PACKED};

use crate::error::{Error, Kind, Result};
use crate::merge_operator::merge_bytes_max;
use crate::read::ahead::WINDOW_MAX;
use crate::read::level_iter::{Bounds, LevelIter};
use crate::read::reader::Reader;
use crate::read::walk::{Direction, Position};
use crate::table::Table;
use crate::table_options::TablePlace;
use crate::version::{Family, Version, user_key};
use crate::write::blob_garbage::BlobMeter;
use crate::write::compaction_iter::{Around, CompactionIter, KeysBelow, Place, Rules};
use crate::write::job::{self, ENTRIES_AT_ONCE, Job};
use crate::write::merge_plan::{Plan, Zone};
use crate::write::pace::{Pace, Paced};
use crate::write::table_writer::{NewTable, TableWriter, file_bytes};

/// The blocks that a merge holds may take this part of a core's memory.
pub(crate) const MEMORY_SHARE: u64 = 2;
/// When the blocks of all sources take more than that part, a source that does not have the next
/// entry drops a block of at least this many bytes. Such a block is mostly one value, so it is
/// seldom read more than twice.
const LARGE_BLOCK: usize = 64 << 10;
/// The read-ahead of all sources may take this part of a core's memory.
const READ_AHEAD_SHARE: usize = 8;

/// The tables that a merge made.
#[derive(Default)]
pub(crate) struct MergedTables {
    /// Of level 1.
    pub level1: Vec<Table>,
    /// Of level 0: keys that cannot go to level 1.
    pub level0: Option<Box<Table>>,
    pub blobs: BlobMeter,
}

/// The result of a merge.
pub(crate) enum Merged {
    Tables(MergedTables),
    /// The slot of an input that cannot be read, because it is damaged or memory is lacking.
    Unread(u32, Error),
}

/// Merges the inputs of a plan into new tables. Adds the bytes that are done to `done`.
pub(crate) async fn merge(
    job: &Job,
    version: &Arc<Version>,
    id: u32,
    inputs: &Plan,
    done: &AtomicU64,
    pace: &Pace,
) -> Result<Merged> {
    let Some(family) = version.families.iter().find(|family| family.id == id) else {
        return Ok(Merged::Tables(MergedTables::default()));
    };
    let unread = async |slot: u32, error: Error| {
        job::remove_made(&job.dir, job.made.take().into_iter()).await;
        Ok(Merged::Unread(slot, error))
    };
    let comparator = family.comparator;
    let sources = match sources(job, version, comparator, inputs).await {
        Ok(sources) => sources,
        Err((slot, error)) => return unread(slot, error).await,
    };
    let slots = || inputs.level0.iter().chain(&inputs.level1).copied();
    let covering: Vec<u32> = slots().filter(|&slot| version.tombstones(slot).is_some()).collect();
    let snapshots = job.db.readable();
    let oldest = snapshots[0];
    let times = slots().map(|slot| version.meta(slot).oldest_ancestor_time);
    let table = NewTable {
        place: TablePlace { level: 1, base_level: 1, is_bottom: !inputs.deeper },
        bytes: file_bytes(job),
        oldest_ancestor_time: times.filter(|&time| time > 0).min().unwrap_or(0),
    };
    let mut output = Output::new(job, family, &inputs.stays, table);
    output.epoch = inputs.level0.iter().map(|&slot| version.meta(slot).epoch).min().unwrap_or(0);
    for slot in &covering {
        let all = truncated_tombstones(version, *slot, comparator).unwrap_or_default();
        output.tombstones.extend(all.iter().filter(|t| t.2 > oldest || inputs.deeper).cloned());
        output.all_tombstones.extend(all);
    }
    let mut paced = Paced::new(pace);
    let share = job.core.pool().limit() / MEMORY_SHARE as usize;
    let mut merging = Merging::new(sources, comparator, share);
    if let Err(error) = merging.regain().await {
        return unread(merging.first().map_or(0, LevelIter::slot), error).await;
    }
    let is_bottommost = !inputs.deeper && inputs.stays.is_empty();
    let mut around = AroundInputs {
        version,
        covering: &covering,
        stays: &inputs.stays,
        below: KeysBelow::new(version, family, 1),
        comparator,
    };
    let mut iter = CompactionIter::new(Rules {
        snapshots,
        place: if is_bottommost { Place::Bottommost } else { Place::Level },
        merge_operator: family.merge.certain(),
        merge_bytes: merge_bytes_max(&job.core),
        filter: family.filter.clone(),
    });
    let mut steps = 0;
    while let Some(source) = merging.first() {
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
        done.fetch_add(bytes, Ordering::Relaxed);
        if let Err(error) = merging.step().await {
            return unread(merging.first().map_or(slot, LevelIter::slot), error).await;
        }
        paced.done(&job.core, bytes).await;
        steps += 1;
        if steps % ENTRIES_AT_ONCE == 0 {
            job.core.checkpoint().await;
        }
    }
    iter.finish(&mut around);
    output.add_all(&mut iter, b"").await?;
    output.finish().await.map(Merged::Tables)
}

/// The data around the inputs of a merge.
struct AroundInputs<'a> {
    version: &'a Version,
    /// Slots of the inputs with range tombstones.
    covering: &'a [u32],
    /// Keys that stay in level 0, above older versions that are left alone.
    stays: &'a [Zone],
    below: KeysBelow<'a>,
    comparator: Comparator,
}

impl Around for AroundInputs<'_> {
    fn exists_below(&mut self, user_key: &[u8]) -> bool {
        let order = self.comparator;
        let has_key = |zone: &Zone| {
            zone.from.as_ref().is_none_or(|from| order.cmp_user(from, user_key).is_le())
                && zone.to.as_ref().is_none_or(|to| order.cmp_user(user_key, to).is_lt())
        };
        self.stays.iter().any(has_key) || self.below.may_have(user_key)
    }

    fn has_tombstones(&self) -> bool {
        !self.covering.is_empty()
    }

    fn covered(&mut self, user_key: &[u8], at: u64) -> u64 {
        let all = self.covering.iter().filter_map(|&slot| self.version.tombstones(slot));
        all.map(|tombstones| tombstones.max_sequence(user_key, at)).max().unwrap_or(0)
    }
}

/// An iterator at the first entry of each input: each file of level 0, and all of level 1.
///
/// # Errors
/// The slot of an input that cannot be read, and why.
async fn sources(
    job: &Job,
    version: &Arc<Version>,
    comparator: Comparator,
    inputs: &Plan,
) -> std::result::Result<Vec<LevelIter>, (u32, Error)> {
    let context = Reader::uncached(&job.db, &job.core).context_at(version);
    let bounds = std::rc::Rc::new(Bounds::default());
    let runs = inputs.level0.iter().map(|&slot| vec![slot]).chain([inputs.level1.clone()]);
    let window = job.core.pool().limit() / READ_AHEAD_SHARE / (inputs.level0.len() + 1);
    let mut sources = Vec::new();
    for run in runs.filter(|run| !run.is_empty()) {
        let mut source =
            LevelIter::new(&context, comparator, run.into(), &bounds, false, WINDOW_MAX, false)
                .with_window_max(window);
        if let Err(error) = source.seek(Position::First, Direction::Forward).await {
            return Err((source.slot(), error));
        }
        if source.footprint() >= LARGE_BLOCK {
            source.shed();
        }
        sources.push(source);
    }
    Ok(sources)
}

/// Several sources as one, in the order of internal keys: a heap ordered by their next entries.
struct Merging {
    sources: Vec<LevelIter>,
    comparator: Comparator,
    /// Indexes of the sources with an entry left. Each is before its two children.
    heap: Vec<usize>,
    /// Limit of the memory of their blocks, in bytes.
    share: usize,
}

impl Merging {
    fn new(sources: Vec<LevelIter>, comparator: Comparator, share: usize) -> Merging {
        let heap: Vec<usize> = (0..sources.len()).filter(|&at| sources[at].valid()).collect();
        let mut merging = Merging { sources, comparator, heap, share };
        for at in (0..merging.heap.len() / 2).rev() {
            merging.sift_down(at);
        }
        merging
    }

    /// The source that has the next entry.
    fn first(&self) -> Option<&LevelIter> {
        self.heap.first().map(|&at| &self.sources[at])
    }

    async fn step(&mut self) -> Result<()> {
        let Some(&first) = self.heap.first() else { return Ok(()) };
        self.sources[first].step(Direction::Forward).await?;
        if !self.sources[first].valid() {
            self.heap.swap_remove(0);
        }
        self.sift_down(0);
        if self.sources[first].footprint() >= LARGE_BLOCK {
            self.shed();
        }
        self.regain().await
    }

    /// If the blocks of all sources take too much memory, drops large ones of sources that do not
    /// have the next entry.
    fn shed(&mut self) {
        let Some((_, others)) = self.heap.split_first() else { return };
        if self.heap.iter().map(|&at| self.sources[at].footprint()).sum::<usize>() <= self.share {
            return;
        }
        for &at in others {
            if self.sources[at].footprint() >= LARGE_BLOCK {
                self.sources[at].shed();
            }
        }
    }

    /// Reads the block of the source that has the next entry again, if it was dropped.
    async fn regain(&mut self) -> Result<()> {
        match self.heap.first() {
            Some(&first) => self.sources[first].regain().await,
            None => Ok(()),
        }
    }

    fn is_before(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.sources[self.heap[a]], &self.sources[self.heap[b]]);
        match self.comparator.cmp_user(a.user_key(), b.user_key()) {
            Less => true,
            Equal => a.packed() > b.packed(),
            Greater => false,
        }
    }

    fn sift_down(&mut self, mut at: usize) {
        loop {
            let mut child = 2 * at + 1;
            if child >= self.heap.len() {
                return;
            }
            if child + 1 < self.heap.len() && self.is_before(child + 1, child) {
                child += 1;
            }
            if !self.is_before(child, at) {
                return;
            }
            self.heap.swap(at, child);
            at = child;
        }
    }
}

/// The tables that a merge makes.
struct Output<'a> {
    job: &'a Job,
    family: &'a Family,
    /// The open table of level 1.
    file: Option<TableWriter<'a>>,
    /// The range tombstones that level 1 keeps.
    tombstones: Vec<Tombstone>,
    /// The lower bound of the open table's keys; `None` for the first table.
    start: Option<Vec<u8>>,
    tables: Vec<Table>,
    /// References to blob files in the inputs and in the outputs.
    blobs: BlobMeter,
    /// Keys in these zones stay in level 0.
    zones: &'a [Zone],
    /// The present zone, or else the next one.
    zone: usize,
    /// The present key is in a zone.
    stays: bool,
    /// The open table of level 0.
    staying: Option<TableWriter<'a>>,
    /// All range tombstones of the inputs, for the table of level 0.
    all_tombstones: Vec<Tombstone>,
    epoch: u64,
    /// The tables of level 1.
    table: NewTable,
}

impl<'a> Output<'a> {
    fn new(job: &'a Job, family: &'a Family, zones: &'a [Zone], table: NewTable) -> Output<'a> {
        Output {
            job,
            family,
            file: None,
            tombstones: Vec::new(),
            start: None,
            tables: Vec::new(),
            blobs: BlobMeter::default(),
            zones,
            zone: 0,
            stays: false,
            staying: None,
            all_tombstones: Vec::new(),
            epoch: 0,
            table,
        }
    }

    /// Begins a key. A table may end only here: the versions of a key stay together.
    async fn begin_key(&mut self, next: &[u8]) -> Result<()> {
        self.advance(Some(next)).await?;
        match &self.file {
            Some(file) if file.len() >= self.table.bytes && !self.stays => {
                self.end_file(Some(next)).await
            }
            _ => Ok(()),
        }
    }

    /// Advances to a key, or to the end. A table of level 1 ends before a zone: it must not span
    /// one.
    async fn advance(&mut self, next: Option<&[u8]>) -> Result<()> {
        let order = self.family.comparator;
        let is_before = |bound: &Option<Vec<u8>>| match (bound, next) {
            (Some(bound), Some(next)) => order.cmp_user(bound, next).is_le(),
            (_, None) => true,
            (None, Some(_)) => false,
        };
        let zones = self.zones;
        while let Some(zone) = zones.get(self.zone) {
            if !self.stays {
                if let Some(from) = &zone.from {
                    if !is_before(&zone.from) {
                        return Ok(());
                    }
                    self.end_file(Some(from)).await?;
                }
                self.stays = true;
            }
            if zone.to.is_none() || !is_before(&zone.to) {
                return Ok(());
            }
            self.start.clone_from(&zone.to);
            self.stays = false;
            self.zone += 1;
        }
        Ok(())
    }

    /// Adds the outputs of the entry that was pushed last.
    async fn add_all(&mut self, iter: &mut CompactionIter, value: &[u8]) -> Result<()> {
        while let Some(output) = iter.next(value) {
            if output.begins_key {
                self.begin_key(user_key(output.key)).await?;
            }
            self.add(output.key, output.value).await?;
        }
        Ok(())
    }

    async fn add(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let table = if self.stays { self.staying() } else { self.table };
        let file = if self.stays { &mut self.staying } else { &mut self.file };
        let file = match file {
            Some(file) => file,
            none => none.insert(TableWriter::create(self.job, self.family, table).await?),
        };
        self.blobs.goes_out(key, value);
        file.add(key, value).await
    }

    /// The table of level 0.
    fn staying(&self) -> NewTable {
        NewTable { place: TablePlace::FLUSH, ..self.table }
    }

    async fn end_file(&mut self, next: Option<&[u8]>) -> Result<()> {
        let inside = within(self.family.comparator, &self.tombstones, self.start.as_deref(), next);
        if !inside.is_empty() && self.file.is_none() {
            self.file = Some(TableWriter::create(self.job, self.family, self.table).await?);
        }
        if let Some(mut file) = self.file.take() {
            for (start, end, sequence) in inside {
                file.add_range_tombstone(start, end, sequence);
            }
            self.tables.push(file.finish(self.epoch).await?);
        }
        self.start = next.map(<[u8]>::to_vec);
        Ok(())
    }

    async fn finish(mut self) -> Result<MergedTables> {
        self.advance(None).await?;
        if !self.stays {
            self.end_file(None).await?;
        }
        let mut tombstones = BTreeSet::new();
        for zone in self.zones {
            let (from, to) = (zone.from.as_deref(), zone.to.as_deref());
            tombstones.extend(within(self.family.comparator, &self.all_tombstones, from, to));
        }
        if !tombstones.is_empty() && self.staying.is_none() {
            self.staying = Some(TableWriter::create(self.job, self.family, self.staying()).await?);
        }
        let mut stays = None;
        if let Some(mut file) = self.staying.take() {
            for (start, end, sequence) in tombstones {
                file.add_range_tombstone(start, end, sequence);
            }
            stays = Some(Box::new(file.finish(self.epoch).await?));
        }
        Ok(MergedTables { level1: self.tables, level0: stays, blobs: self.blobs })
    }
}

/// The parts of range tombstones within bounds.
fn within<'a>(
    order: Comparator,
    tombstones: &'a [Tombstone],
    from: Option<&'a [u8]>,
    to: Option<&'a [u8]>,
) -> BTreeSet<(&'a [u8], &'a [u8], u64)> {
    let cut = |(start, end, sequence): &'a Tombstone| {
        let starts_before = |from: &&[u8]| order.cmp_user(start, from).is_lt();
        let ends_after = |to: &&[u8]| order.cmp_user(end, to).is_gt();
        let start = from.filter(starts_before).unwrap_or(start);
        let end = to.filter(ends_after).unwrap_or(end);
        order.cmp_user(start, end).is_lt().then_some((start, end, *sequence))
    };
    tombstones.iter().filter_map(cut).collect()
}

/// A range of user keys with an exclusive end, and the sequence of its deletion.
type Tombstone = (Vec<u8>, Vec<u8>, u64);

/// A table's range tombstones, truncated to its bounds. `None` if the truncated ranges cannot be
/// represented.
pub(crate) fn truncated_tombstones(
    version: &Version,
    slot: u32,
    comparator: Comparator,
) -> Option<Vec<Tombstone>> {
    let Some(tombstones) = version.tombstones(slot) else { return Some(Vec::new()) };
    let meta = version.meta(slot);
    let smallest = user_key(&meta.smallest);
    let largest = InternalKey::parse(&meta.largest).ok()?;
    let mut truncated = Vec::new();
    for (start, end, sequence) in tombstones.iter() {
        let start = if comparator.cmp_user(start, smallest).is_lt() { smallest } else { start };
        let mut end = end.to_vec();
        if comparator.cmp_user(&end, largest.user_key).is_gt() {
            end = largest.user_key.to_vec();
            if largest.packed != SENTINEL_PACKED {
                // The largest key itself is included. Only this order has a successor of each key.
                if comparator != Comparator::Bytewise {
                    return None;
                }
                end.push(0);
            }
        }
        truncated.push((start.to_vec(), end, sequence));
    }
    Some(truncated)
}
