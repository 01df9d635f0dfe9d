//! Merging level 0 into level 1, in the background.
//!
//! All files of level 0 and those of level 1 that overlap them become new files of level 1. Of a
//! key's versions stay those that somebody may still see: the newest, and what a snapshot needs. A
//! tombstone goes when nothing older can lie below it. Files that overlap nothing are not written
//! again, they only change their level.
//!
//! A file's range tombstones count within its bounds alone: they are cut to the bounds of the file
//! they come from, and to those of the files that come out.
//!
//! Not merged, but left as they are: families that cannot be read, or have damaged files.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rocksfmt::{
    Comparator, FileName, InternalKey, KEY_TRAILER_BYTES, SENTINEL_PACKED, ValueType, VersionEdit,
    unpack,
};

use crate::blob_garbage::BlobMeter;
use crate::error::{Error, Kind, Result};
use crate::job::{self, ENTRIES_AT_ONCE, Job, Place};
use crate::level_iter::{Bounds, LevelIter};
use crate::mutant::mutant;
use crate::pace::{Pace, Paced};
use crate::reader::Reader;
use crate::space::Task;
use crate::table::Table;
use crate::table_writer::{FILE_BYTES, TableWriter};
use crate::version::{Family, Level, Slot, Version, user_key};
use crate::walk::{Direction, Position};
use crate::{commit, writer::Inner};

/// Files of level 0 that are merged.
const LEVEL0_FILES: usize = 4;
/// Files of level 0 that are merged though level 1 is so much larger that little comes of it.
const LEVEL0_FILES_MANY: usize = 12;
/// How much larger.
const MUCH_LARGER: u64 = 4;
/// A merge may stand on blocks that take such a part of a core's memory.
const MEMORY_SHARE: u64 = 2;
/// What a merge reads ahead of each source, in bytes.
const READ_AHEAD: usize = 1 << 20;

/// Merges whenever there is something to merge, until writing ends.
pub(crate) async fn run(inner: &Inner) {
    while !inner.rests() {
        let since_ns = inner.core.now_ns();
        match level0(inner).await {
            Ok(true) => {
                inner.merge_files_max.set(usize::MAX);
                inner.has_room(Task::Merge);
                inner.moved.ring();
            }
            Err(error) if error.kind() == Kind::Full => {
                inner.is_full(Task::Merge, &error);
                inner.until_space(since_ns).await;
                if inner.closing.get() {
                    return;
                }
            }
            Err(error) if error.kind() == Kind::Memory => {
                let files = inner.merge_files_max.get().min(commit::level0_files(inner));
                inner.merge_files_max.set((files / 2).max(1));
                inner.lacks_memory("a merge of fewer files", &error).await;
            }
            Ok(false) => {
                inner.has_room(Task::Merge);
                let wanted = || is_due(&inner.db.0.current.load());
                inner.moved.until(|| wanted() || inner.rests()).await;
            }
            Err(error) => inner.fail(&error),
        }
    }
}

/// How far a merge is, for whoever decides how fast writes may come.
pub(crate) struct Progress {
    pub started_ns: u64,
    /// Bytes to be merged.
    pub bytes: u64,
    /// Bytes that were merged, about.
    pub done: Arc<AtomicU64>,
    pace: Arc<Pace>,
    /// What it had slept when the merge began.
    slept_ns: u64,
}

impl Progress {
    /// Bytes that are left to be merged, about.
    pub fn left(&self) -> u64 {
        self.bytes.saturating_sub(self.done.load(Ordering::Relaxed))
    }

    /// Nanoseconds that the rest will take, as it went so far while it did not sleep.
    pub fn left_ns(&self, now_ns: u64) -> u64 {
        let done = self.done.load(Ordering::Relaxed).clamp(1, self.bytes.max(1));
        let slept_ns = self.pace.slept_ns() - self.slept_ns;
        let ns = now_ns.saturating_sub(self.started_ns).saturating_sub(slept_ns);
        let left = u128::from(ns) * u128::from(self.bytes.saturating_sub(done)) / u128::from(done);
        u64::try_from(left).unwrap_or(u64::MAX)
    }
}

/// Whether a family needs a merge.
pub(crate) fn is_due(version: &Version) -> bool {
    version.families.iter().any(|family| can_merge(version, family))
}

/// The first family that needs it, and what is to be merged of it.
fn work(inner: &Inner, version: &Version) -> Option<(u32, Inputs)> {
    let memory = Memory {
        files: inner.merge_files_max.get(),
        bytes: inner.core.pool().limit() as u64 / MEMORY_SHARE,
    };
    version.families.iter().find_map(|family| Some((family.id, inputs(version, family, memory)?)))
}

/// What a merge may take: files of level 0, and bytes for the blocks that it stands on.
#[derive(Clone, Copy)]
struct Memory {
    files: usize,
    bytes: u64,
}

impl Memory {
    /// The oldest files that may be merged together, at least one. Newest first, as they are given.
    fn fitting<'a>(&self, version: &Version, level0: &'a [u32], level1: &[u32]) -> &'a [u32] {
        // A source holds a block as it is stored, and unpacked.
        let block = |slot: u32| {
            let properties = version.table(slot).map(|table| &table.properties);
            properties.map_or(0, |p| 2 * p.data_size / p.num_data_blocks.max(1))
        };
        let mut left =
            self.bytes.saturating_sub(level1.iter().copied().map(block).max().unwrap_or(0));
        let fits = |slot: &&u32| {
            let bytes = block(**slot);
            left = left.saturating_sub(bytes);
            left > 0
        };
        let count = level0.iter().rev().take_while(fits).count().min(self.files).max(1);
        &level0[level0.len().saturating_sub(count)..]
    }
}

/// Merges level 0 of the first family that needs it; false if none does.
async fn level0(inner: &Inner) -> Result<bool> {
    let version = inner.db.version();
    let Some((id, inputs)) = work(inner, &version) else { return Ok(false) };
    let bytes =
        |slots: &[u32]| slots.iter().map(|&slot| version.meta(slot).size_bytes).sum::<u64>();
    let since_ns = inner.core.now_ns();
    let (tables, blobs) = if inputs.moves {
        Default::default()
    } else {
        let done = Arc::new(AtomicU64::new(0));
        let pace = inner.merge_pace.clone();
        inner.progress.replace(Some(Progress {
            started_ns: since_ns,
            bytes: bytes(&inputs.level0) + bytes(&inputs.level1),
            done: done.clone(),
            slept_ns: pace.slept_ns(),
            pace: pace.clone(),
        }));
        inner.set_paces();
        let (from, inputs) = (version.clone(), inputs.clone());
        let work = async move |job: Job| merge(&job, &from, id, &inputs, &done, &pace).await;
        let merged =
            job::run(&inner.core, Place::Merge, &inner.db, inner.options.compression, work).await;
        inner.progress.take();
        let merged = merged?;
        inner.sync_names().await?;
        merged
    };
    let written: u64 = tables.iter().map(|table| table.meta.size_bytes).sum();
    let turn = inner.manifest_turn().await?;
    let all =
        || inputs.level0.iter().map(|slot| (0, slot)).chain(inputs.level1.iter().map(|s| (1, s)));
    if !all().all(|(level, &slot)| inner.db.version().is_at(&version, id, level, slot)) {
        // They were cleared away meanwhile.
        drop(turn);
        inner.remove_tables(tables.iter().map(|table| &table.meta));
        return Ok(true);
    }
    let moved = inputs.level0.iter().filter(|_| inputs.moves).map(|&slot| version.meta(slot));
    let new = tables.iter().map(|table| &table.meta).chain(moved);
    let mut edit = VersionEdit {
        column_family: id,
        deleted_files: all()
            .map(|(level, &slot)| (level as u32, version.meta(slot).number))
            .collect(),
        new_files: new.map(|meta| (1, meta.clone())).collect(),
        ..VersionEdit::default()
    };
    edit.blob_garbage = blobs.garbage(turn.state(), &edit);
    if mutant("inputs_go_first") && !inputs.moves {
        let name = FileName::Sst(version.meta(inputs.level0[0]).number).to_string();
        inner.dir.remove(&name).await.map_err(|e| Error::io(&name, &e))?;
    }
    let made: Vec<u64> = tables.iter().map(|table| table.meta.number).collect();
    let changed = turn.change(vec![edit], |newest| replace(newest, id, &inputs, tables)).await;
    if let Err(error) = &changed
        && error.kind() == Kind::Full
    {
        job::unmake(&inner.dir, made.into_iter()).await;
    }
    changed?;
    if !inputs.moves {
        tracing::debug!(
            level0 = inputs.level0.len(),
            level1 = inputs.level1.len(),
            bytes = bytes(&inputs.level0) + bytes(&inputs.level1),
            written,
            ms = (inner.core.now_ns() - since_ns) / 1_000_000,
            "merged level 0 into level 1"
        );
        inner.stats(|stats| {
            stats.merges += 1;
            stats.merged_bytes += bytes(&inputs.level0) + bytes(&inputs.level1);
            stats.merged_into_bytes += written;
        });
        inner.remove_tables(all().map(|(_, &slot)| version.meta(slot)));
    }
    Ok(true)
}

/// What is merged, by slot. Level 1 in order.
#[derive(Clone)]
struct Inputs {
    level0: Vec<u32>,
    level1: Vec<u32>,
    /// Whether deeper levels have files.
    deeper: bool,
    /// Nothing overlaps: the files only change their level.
    moves: bool,
}

/// Whether there is a merge for a family whose level 0 is full.
pub(crate) fn can_merge(version: &Version, family: &Family) -> bool {
    let memory = Memory { files: usize::MAX, bytes: u64::MAX };
    inputs(version, family, memory).is_some()
}

fn inputs(version: &Version, family: &Family, memory: Memory) -> Option<Inputs> {
    let level0 = family.levels.first()?.slots.clone();
    if level0.len() < LEVEL0_FILES || family.refused.is_some() {
        return None;
    }
    let bytes =
        |slots: &[u32]| slots.iter().map(|&slot| version.meta(slot).size_bytes).sum::<u64>();
    let comparator = family.comparator;
    let smallest = |slot: u32| user_key(&version.meta(slot).smallest);
    let largest = |slot: u32| user_key(&version.meta(slot).largest);
    let less = |a: &&[u8], b: &&[u8]| comparator.cmp_user(a, b);
    let first = level0.iter().map(|&slot| smallest(slot)).min_by(less)?;
    let last = level0.iter().map(|&slot| largest(slot)).max_by(less)?;
    let overlaps = |slot: &u32| {
        comparator.cmp_user(largest(*slot), first).is_ge()
            && comparator.cmp_user(smallest(*slot), last).is_le()
    };
    let level1: Vec<u32> = match family.levels.get(1) {
        Some(level) => level.slots.iter().copied().filter(overlaps).collect(),
        None => Vec::new(),
    };
    if level0.len() < LEVEL0_FILES_MANY && bytes(&level0) * MUCH_LARGER < bytes(&level1) {
        return None;
    }
    // Older versions of what stays in level 0 may go below it, never the other way.
    let level0 = memory.fitting(version, &level0, &level1).to_vec();
    let deeper = family.levels.iter().skip(2).any(|level| !level.slots.is_empty());
    let mut sorted = level0.clone();
    sorted.sort_by(|&a, &b| comparator.cmp_user(smallest(a), smallest(b)));
    let apart =
        sorted.windows(2).all(|two| comparator.cmp_user(largest(two[0]), smallest(two[1])).is_lt());
    let moves = apart && level1.is_empty();
    let mergeable =
        |&slot: &u32| version.table(slot).is_ok() && cut(version, slot, comparator).is_some();
    level0.iter().chain(&level1).all(mergeable).then_some(Inputs { level0, level1, deeper, moves })
}

impl Version {
    /// Whether this version has the table of another's slot in the same place.
    fn is_at(&self, other: &Version, family: u32, level: usize, slot: u32) -> bool {
        let same = match (self.slots.get(slot as usize), other.slots.get(slot as usize)) {
            (Some(Slot::Open(a)), Some(Slot::Open(b))) => Arc::ptr_eq(a, b),
            _ => false,
        };
        let family = self.families.iter().find(|f| f.id == family);
        let level = family.and_then(|family| family.levels.get(level));
        same && level.is_some_and(|level| level.slots.contains(&slot))
    }
}

/// A range of user keys, its end exclusive, and the sequence of its deletion.
type Tombstone = (Vec<u8>, Vec<u8>, u64);

/// A table's range tombstones, cut to its bounds; `None` where that cannot be said.
fn cut(version: &Version, slot: u32, comparator: Comparator) -> Option<Vec<Tombstone>> {
    let Some(tombstones) = version.tombstones(slot) else { return Some(Vec::new()) };
    let meta = version.meta(slot);
    let smallest = user_key(&meta.smallest);
    let largest = InternalKey::parse(&meta.largest).ok()?;
    let mut cut = Vec::new();
    for (start, end, sequence) in tombstones.iter() {
        let start = if comparator.cmp_user(start, smallest).is_lt() { smallest } else { start };
        let mut end = end.to_vec();
        if comparator.cmp_user(&end, largest.user_key).is_gt() {
            end = largest.user_key.to_vec();
            if largest.packed != SENTINEL_PACKED {
                // The largest key itself is within. Only this order has a next key for each.
                if comparator != Comparator::Bytewise {
                    return None;
                }
                end.push(0);
            }
        }
        cut.push((start.to_vec(), end, sequence));
    }
    Some(cut)
}

async fn merge(
    job: &Job,
    version: &Arc<Version>,
    id: u32,
    inputs: &Inputs,
    done: &AtomicU64,
    pace: &Pace,
) -> Result<(Vec<Table>, BlobMeter)> {
    let Some(family) = version.families.iter().find(|family| family.id == id) else {
        return Ok(Default::default());
    };
    let comparator = family.comparator;
    let at = Reader::uncached(&job.db, &job.core).at_version(version);
    let bounds = std::rc::Rc::new(Bounds::default());
    let mut sources = Vec::new();
    let runs = inputs.level0.iter().map(|&slot| vec![slot]).chain([inputs.level1.clone()]);
    for run in runs.filter(|run| !run.is_empty()) {
        let mut source =
            LevelIter::new(&at, comparator, run.into(), &bounds, false, READ_AHEAD, false);
        source.seek(Position::First, Direction::Forward).await?;
        sources.push(source);
    }
    let slots = || inputs.level0.iter().chain(&inputs.level1).copied();
    let covering: Vec<u32> = slots().filter(|&slot| version.tombstones(slot).is_some()).collect();
    // What is older than this and hidden, nobody can see.
    let oldest = job.db.oldest_seen();
    let mut output = Output::new(job, family);
    output.epoch = inputs.level0.iter().map(|&slot| version.meta(slot).epoch).min().unwrap_or(0);
    for slot in &covering {
        let cut = cut(version, *slot, comparator).unwrap_or_default();
        output.tombstones.extend(cut.into_iter().filter(|t| t.2 > oldest || inputs.deeper));
    }
    let mut paced = Paced::new(pace);
    let mut merged = Merging::new(sources, comparator);
    let mut key: Vec<u8> = Vec::new();
    // The newest version that everybody sees has been met: older ones are hidden.
    let mut hidden = false;
    let mut covered = 0;
    let mut steps = 0;
    while let Some(source) = merged.first() {
        let packed = source.packed();
        let (sequence, kind) = unpack(packed);
        let user = source.user_key();
        if key.len() != user.len() + KEY_TRAILER_BYTES || !key.starts_with(user) {
            hidden = false;
            output.key_changes(user).await?;
            let tombstones = covering.iter().filter_map(|&slot| version.tombstones(slot));
            covered = tombstones.map(|set| set.max_sequence(user, oldest)).max().unwrap_or(0);
        }
        key.clear();
        key.extend_from_slice(user);
        key.extend_from_slice(&packed.to_le_bytes());
        let everybody = sequence <= oldest;
        let tombstone = ValueType::from_byte(kind).is_some_and(ValueType::is_tombstone);
        let nothing_below = everybody && tombstone && !inputs.deeper;
        let value = source.value();
        output.blobs.comes_in(&key, &value);
        if !(hidden || nothing_below || sequence < covered) {
            output.add(&key, &value).await?;
        }
        // A merge operand is nothing without what lies below it.
        hidden |= everybody && kind != ValueType::Merge as u8;
        let bytes = (key.len() + value.len()) as u64;
        done.fetch_add(bytes, Ordering::Relaxed);
        merged.step().await?;
        paced.done(&job.core, bytes).await;
        steps += 1;
        if steps % ENTRIES_AT_ONCE == 0 {
            job.core.checkpoint().await;
        }
    }
    output.finish().await
}

/// Several sources as one, in the order of internal keys: a heap by their next entries.
struct Merging {
    sources: Vec<LevelIter>,
    comparator: Comparator,
    /// Places of those with an entry left; each is before its two children.
    heap: Vec<usize>,
}

impl Merging {
    fn new(sources: Vec<LevelIter>, comparator: Comparator) -> Merging {
        let heap: Vec<usize> = (0..sources.len()).filter(|&at| sources[at].valid()).collect();
        let mut merging = Merging { sources, comparator, heap };
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
        Ok(())
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

/// The files that come out.
struct Output<'a> {
    job: &'a Job,
    family: &'a Family,
    file: Option<TableWriter<'a>>,
    /// The range tombstones that stay.
    tombstones: Vec<Tombstone>,
    /// Where the keys of the file begin; `None` for the first.
    start: Option<Vec<u8>>,
    epoch: u64,
    tables: Vec<Table>,
    /// The references to blob files that came in and went out.
    blobs: BlobMeter,
}

impl<'a> Output<'a> {
    fn new(job: &'a Job, family: &'a Family) -> Output<'a> {
        Output {
            job,
            family,
            file: None,
            tombstones: Vec::new(),
            start: None,
            epoch: 0,
            tables: Vec::new(),
            blobs: BlobMeter::default(),
        }
    }

    /// A file may end here: the versions of a key stay together.
    async fn key_changes(&mut self, next: &[u8]) -> Result<()> {
        match &self.file {
            Some(file) if file.len() >= FILE_BYTES => self.end_file(Some(next)).await,
            _ => Ok(()),
        }
    }

    async fn add(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(TableWriter::create(self.job, self.family, FILE_BYTES).await?),
        };
        self.blobs.goes_out(key, value);
        file.add(key, value).await
    }

    async fn end_file(&mut self, next: Option<&[u8]>) -> Result<()> {
        let order = self.family.comparator;
        let mut inside = BTreeSet::new();
        for (start, end, sequence) in &self.tombstones {
            let (mut start, mut end) = (&start[..], &end[..]);
            if let Some(first) = &self.start
                && order.cmp_user(start, first).is_lt()
            {
                start = first;
            }
            if let Some(next) = next
                && order.cmp_user(end, next).is_gt()
            {
                end = next;
            }
            if order.cmp_user(start, end).is_lt() {
                inside.insert((start, end, *sequence));
            }
        }
        if !inside.is_empty() && self.file.is_none() {
            self.file = Some(TableWriter::create(self.job, self.family, FILE_BYTES).await?);
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

    async fn finish(mut self) -> Result<(Vec<Table>, BlobMeter)> {
        self.end_file(None).await?;
        Ok((self.tables, self.blobs))
    }
}

/// Puts the new files in the place of the old.
fn replace(version: &mut Version, id: u32, inputs: &Inputs, tables: Vec<Table>) {
    let mut new: Vec<u32> = tables.into_iter().map(|table| version.put(table)).collect();
    if inputs.moves {
        new.extend(&inputs.level0);
    }
    let Some(at) = version.families.iter().position(|family| family.id == id) else { return };
    let comparator = version.families[at].comparator;
    let levels = &mut version.families[at].levels;
    levels.resize_with(levels.len().max(2), Level::default);
    let without = |level: &Level, gone: &[u32]| -> Vec<u32> {
        level.slots.iter().copied().filter(|slot| !gone.contains(slot)).collect()
    };
    let rest0 = without(&levels[0], &inputs.level0);
    let mut level1 = without(&levels[1], &inputs.level1);
    level1.extend(new);
    levels[0] = Level::of(rest0, &version.slots);
    levels[1] = Level::sorted(level1, &version.slots, comparator);
    if !inputs.moves {
        for &slot in inputs.level0.iter().chain(&inputs.level1) {
            version.slots[slot as usize] = Slot::Free;
        }
    }
}
