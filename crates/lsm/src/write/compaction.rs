//! Merging level 0 into level 1, in the background.
//!
//! All files of level 0 and those of level 1 that overlap them become new files of level 1. Of a
//! key's versions stay those that somebody may still see (`keep.rs`). Files that overlap nothing
//! are not written again, they only change their level.
//!
//! A file's range tombstones count within its bounds alone: they are cut to the bounds of the file
//! they come from, and to those of the files that come out.
//!
//! Not merged, but left as they are: families that cannot be read, and damaged tables. A merge that
//! meets damage in one of its inputs gives up, says so, and leaves that table alone from then on:
//! the next one is planned around it (`merge_plan.rs`). Reads of it go on as before.
//!
//! No failure of a merge ends writing: what it has made is removed, and it is tried again later
//! (`space.rs`). One that lacks memory is tried with fewer files; a file that finds no memory by
//! itself, time after time, is left alone like a damaged one. Only a MANIFEST or a directory that
//! cannot be written ends writing.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rocksfmt::{
    Comparator, FileName, InternalKey, KEY_TRAILER_BYTES, SENTINEL_PACKED, VersionEdit, unpack,
};

use crate::error::{Error, Kind, Result};
use crate::mutant::mutant;
use crate::read::ahead::WINDOW_MAX;
use crate::read::level_iter::{Bounds, LevelIter};
use crate::read::reader::Reader;
use crate::read::walk::{Direction, Position};
use crate::table::Table;
use crate::version::{Family, Level, Slot, Version, user_key};
use crate::write::blob_garbage::BlobMeter;
use crate::write::job::{self, ENTRIES_AT_ONCE, Job, Place};
use crate::write::keep::Keep;
use crate::write::merge_plan::{self, Memory, Plan, Zone};
use crate::write::pace::{Pace, Paced};
use crate::write::space::Task;
use crate::write::table_writer::{TableWriter, file_bytes};
use crate::write::writer::Inner;

/// A merge may stand on blocks that take such a part of a core's memory.
const MEMORY_SHARE: u64 = 2;
/// A source that does not have the next entry gives up a block of so many bytes, when the blocks of
/// all take more than that part. Such a block is mostly one value, so it is seldom read more than
/// twice.
const LARGE_BLOCK: usize = 64 << 10;
/// What part of a core's memory a merge reads ahead, in all.
const READ_AHEAD_SHARE: usize = 8;
/// Attempts of a merge of as few files as there can be, before one that finds no memory is left
/// alone; and once another one was.
const MEMORY_TRIES: u32 = 8;
const MEMORY_TRIES_LATER: u32 = 2;

/// Merges whenever there is something to merge, until writing ends.
pub(crate) async fn run(inner: &Inner) {
    while !inner.rests() {
        let since_ns = inner.core.now_ns();
        let fell_short = match level0(inner).await {
            Ok(Turn::Merged) => {
                inner.merge_files_max.set(usize::MAX);
                inner.has_room(Task::Merge);
                inner.moved.ring();
                continue;
            }
            Ok(Turn::LeftAlone) => {
                inner.moved.ring();
                continue;
            }
            Ok(Turn::Nothing) => {
                inner.has_room(Task::Merge);
                let wanted = || is_due(inner, &inner.db.0.current.load());
                inner.moved.until(|| wanted() || inner.rests()).await;
                continue;
            }
            Ok(Turn::TooMany(error)) => {
                inner.lacks_memory("a merge of fewer files", &error).await;
                continue;
            }
            Ok(Turn::FellShort(error)) => error,
            Err(error) if matches!(error.kind(), Kind::Full | Kind::Memory) => error,
            Err(error) => return inner.fail(&error),
        };
        inner.try_later(Task::Merge, &fell_short, since_ns).await;
        if inner.closing.get() {
            return;
        }
    }
}

/// What became of an attempt to merge.
enum Turn {
    /// Files were merged, moved, or cleared away meanwhile.
    Merged,
    /// No family needs a merge.
    Nothing,
    /// A table is left alone from now on.
    LeftAlone,
    /// There was no memory for as many files.
    TooMany(Error),
    /// It failed, and nothing is left of it.
    FellShort(Error),
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
pub(crate) fn is_due(inner: &Inner, version: &Version) -> bool {
    planned(inner, version, Memory { files: usize::MAX, bytes: u64::MAX }).is_some()
}

/// The first family that needs it, and what is to be merged of it.
fn work(inner: &Inner, version: &Version) -> Option<(u32, Plan)> {
    let bytes = inner.core.pool().limit() as u64 / MEMORY_SHARE;
    planned(inner, version, Memory { files: inner.merge_files_max.get(), bytes })
}

fn planned(inner: &Inner, version: &Version, memory: Memory) -> Option<(u32, Plan)> {
    let left_alone = |slot| inner.quarantine.holds(version, slot);
    version.families.iter().find_map(|family| {
        Some((family.id, merge_plan::plan(version, family, memory, &left_alone)?))
    })
}

/// What a merge made.
#[derive(Default)]
struct Made {
    /// Of level 1.
    tables: Vec<Table>,
    /// Of level 0.
    stays: Option<Box<Table>>,
    blobs: BlobMeter,
}

/// What a merge made, or what kept it from it.
enum Merged {
    Made(Made),
    /// The slot of an input that cannot be read, for want of memory or because it is damaged.
    Unread(u32, Error),
}

/// A merge of `inputs` found no memory to read a table, or for what it makes. The next one takes
/// fewer files; where there are no fewer, the table is left alone in the end.
fn found_no_memory(
    inner: &Inner,
    version: &Version,
    inputs: &Plan,
    slot: Option<u32>,
    error: Error,
) -> Turn {
    let files = inputs.level0.len();
    if files > inputs.least_files() {
        inner.merge_files_max.set((files / 2).max(1));
        return Turn::TooMany(error);
    }
    inner.merge_files_max.set(1);
    let tries = if inner.quarantine.for_memory() { MEMORY_TRIES_LATER } else { MEMORY_TRIES };
    if inner.space.failures(Task::Merge) + 1 < tries {
        return Turn::FellShort(error);
    }
    let Some(slot) = slot.or(inputs.level0.last().copied()) else { return Turn::FellShort(error) };
    inner.quarantine.add(version, slot, &error);
    inner.has_room(Task::Merge);
    Turn::LeftAlone
}

/// Merges level 0 of the first family that needs it.
///
/// # Errors
/// [`Kind::Full`] and [`Kind::Memory`] of the MANIFEST; all others end writing.
async fn level0(inner: &Inner) -> Result<Turn> {
    let version = inner.db.version();
    let Some((id, inputs)) = work(inner, &version) else { return Ok(Turn::Nothing) };
    let bytes =
        |slots: &[u32]| slots.iter().map(|&slot| version.meta(slot).size_bytes).sum::<u64>();
    let since_ns = inner.core.now_ns();
    let Made { tables, stays, blobs } = if inputs.moves {
        Made::default()
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
        let (from, plan) = (version.clone(), inputs.clone());
        let work = async move |job: Job| merge(&job, &from, id, &plan, &done, &pace).await;
        let merged = job::run(inner, Place::Merge, 0, work).await;
        inner.progress.take();
        let made = match merged {
            // Writing has ended.
            Ok(None) => return Ok(Turn::Nothing),
            Ok(Some(Merged::Made(made))) => made,
            Ok(Some(Merged::Unread(slot, error))) if error.kind() == Kind::Memory => {
                return Ok(found_no_memory(inner, &version, &inputs, Some(slot), error));
            }
            Ok(Some(Merged::Unread(slot, error))) => {
                inner.quarantine.add(&version, slot, &error);
                return Ok(Turn::LeftAlone);
            }
            Err(error) if error.kind() == Kind::Memory => {
                return Ok(found_no_memory(inner, &version, &inputs, None, error));
            }
            Err(error) => return Ok(Turn::FellShort(error)),
        };
        inner.sync_names().await?;
        made
    };
    let made = || tables.iter().chain(stays.as_deref()).map(|table| &table.meta);
    let written: u64 = made().map(|meta| meta.size_bytes).sum();
    let turn = inner.manifest_turn().await?;
    let all =
        || inputs.level0.iter().map(|slot| (0, slot)).chain(inputs.level1.iter().map(|s| (1, s)));
    if !all().all(|(level, &slot)| inner.db.version().is_at(&version, id, level, slot)) {
        // They were cleared away meanwhile.
        drop(turn);
        inner.remove_tables(made());
        return Ok(Turn::Merged);
    }
    let moved = inputs.level0.iter().filter(|_| inputs.moves).map(|&slot| version.meta(slot));
    let new = tables.iter().map(|table| &table.meta).chain(moved);
    let mut edit = VersionEdit {
        column_family: id,
        deleted_files: all()
            .map(|(level, &slot)| (level as u32, version.meta(slot).number))
            .collect(),
        new_files: new
            .map(|meta| (1, meta.clone()))
            .chain(stays.iter().map(|table| (0, table.meta.clone())))
            .collect(),
        ..VersionEdit::default()
    };
    edit.blob_garbage = blobs.garbage(turn.state(), &edit);
    if mutant("inputs_go_first") && !inputs.moves {
        let name = FileName::Sst(version.meta(inputs.level0[0]).number).to_string();
        inner.dir.remove(&name).await.map_err(|e| Error::io(&name, &e))?;
    }
    let made: Vec<u64> = made().map(|meta| meta.number).collect();
    let changed =
        turn.change(vec![edit], |newest| replace(newest, id, &inputs, tables, stays)).await;
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
    Ok(Turn::Merged)
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
pub(crate) fn cut(version: &Version, slot: u32, comparator: Comparator) -> Option<Vec<Tombstone>> {
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
    inputs: &Plan,
    done: &AtomicU64,
    pace: &Pace,
) -> Result<Merged> {
    let Some(family) = version.families.iter().find(|family| family.id == id) else {
        return Ok(Merged::Made(Made::default()));
    };
    let unread = async |slot: u32, error: Error| {
        job::unmake(&job.dir, job.made.take().into_iter()).await;
        Ok(Merged::Unread(slot, error))
    };
    let comparator = family.comparator;
    let at = Reader::uncached(&job.db, &job.core).context_at(version);
    let bounds = std::rc::Rc::new(Bounds::default());
    let mut sources = Vec::new();
    let runs = inputs.level0.iter().map(|&slot| vec![slot]).chain([inputs.level1.clone()]);
    let window = job.core.pool().limit() / READ_AHEAD_SHARE / (inputs.level0.len() + 1);
    for run in runs.filter(|run| !run.is_empty()) {
        let mut source =
            LevelIter::new(&at, comparator, run.into(), &bounds, false, WINDOW_MAX, false)
                .with_window_max(window);
        if let Err(error) = source.seek(Position::First, Direction::Forward).await {
            return unread(source.slot(), error).await;
        }
        if source.footprint() >= LARGE_BLOCK {
            source.shed();
        }
        sources.push(source);
    }
    let slots = || inputs.level0.iter().chain(&inputs.level1).copied();
    let covering: Vec<u32> = slots().filter(|&slot| version.tombstones(slot).is_some()).collect();
    let oldest = job.db.oldest_seen();
    let mut output = Output::new(job, family, &inputs.stays);
    output.epoch = inputs.level0.iter().map(|&slot| version.meta(slot).epoch).min().unwrap_or(0);
    for slot in &covering {
        let cut = cut(version, *slot, comparator).unwrap_or_default();
        output.tombstones.extend(cut.iter().filter(|t| t.2 > oldest || inputs.deeper).cloned());
        output.all_tombstones.extend(cut);
    }
    let mut paced = Paced::new(pace);
    let share = job.core.pool().limit() / MEMORY_SHARE as usize;
    let mut merged = Merging::new(sources, comparator, share);
    if let Err(error) = merged.regain().await {
        return unread(merged.first().map_or(0, LevelIter::slot), error).await;
    }
    let mut key: Vec<u8> = Vec::new();
    let mut keep = Keep::new(oldest);
    let mut steps = 0;
    while let Some(source) = merged.first() {
        let packed = source.packed();
        let (sequence, kind) = unpack(packed);
        let user = source.user_key();
        if key.len() != user.len() + KEY_TRAILER_BYTES || !key.starts_with(user) {
            output.key_changes(user).await?;
            let tombstones = covering.iter().filter_map(|&slot| version.tombstones(slot));
            let covered = tombstones.map(|set| set.max_sequence(user, oldest)).max();
            keep.begin_key(covered.unwrap_or(0), !inputs.deeper && !output.stays);
        }
        key.clear();
        key.extend_from_slice(user);
        key.extend_from_slice(&packed.to_le_bytes());
        let value = source.value();
        output.blobs.comes_in(&key, &value);
        if keep.stays(sequence, kind)
            && let Err(error) = output.add(&key, &value).await
        {
            return match error.kind() {
                // Its checksums hold, and yet it is not in order.
                Kind::Corruption | Kind::Unsupported => unread(source.slot(), error).await,
                _ => Err(error),
            };
        }
        let bytes = (key.len() + value.len()) as u64;
        done.fetch_add(bytes, Ordering::Relaxed);
        let slot = source.slot();
        if let Err(error) = merged.step().await {
            return unread(merged.first().map_or(slot, LevelIter::slot), error).await;
        }
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
    /// Bytes of memory that their blocks may take.
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

    /// Gives up large blocks of sources that do not have the next entry, when all take too much.
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

    /// Sees to it that the source that has the next entry has its block.
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

/// The files that come out.
struct Output<'a> {
    job: &'a Job,
    family: &'a Family,
    /// Of level 1.
    file: Option<TableWriter<'a>>,
    /// The range tombstones that stay there.
    tombstones: Vec<Tombstone>,
    /// Where the keys of the file begin; `None` for the first.
    start: Option<Vec<u8>>,
    tables: Vec<Table>,
    /// The references to blob files that came in and went out.
    blobs: BlobMeter,
    /// The zones of level 0, the one next or now, and whether it is now.
    zones: &'a [Zone],
    zone: usize,
    stays: bool,
    staying: Option<TableWriter<'a>>,
    all_tombstones: Vec<Tombstone>,
    epoch: u64,
}

impl<'a> Output<'a> {
    fn new(job: &'a Job, family: &'a Family, zones: &'a [Zone]) -> Output<'a> {
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
        }
    }

    /// A file may end here: the versions of a key stay together.
    async fn key_changes(&mut self, next: &[u8]) -> Result<()> {
        self.enter_zones(Some(next)).await?;
        match &self.file {
            Some(file) if file.len() >= file_bytes(self.job) && !self.stays => {
                self.end_file(Some(next)).await
            }
            _ => Ok(()),
        }
    }

    /// Goes on to a key, or to the end: no file of level 1 reaches over a zone.
    async fn enter_zones(&mut self, next: Option<&[u8]>) -> Result<()> {
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

    async fn add(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let file = if self.stays { &mut self.staying } else { &mut self.file };
        let file = match file {
            Some(file) => file,
            none => {
                none.insert(TableWriter::create(self.job, self.family, file_bytes(self.job)).await?)
            }
        };
        self.blobs.goes_out(key, value);
        file.add(key, value).await
    }

    async fn end_file(&mut self, next: Option<&[u8]>) -> Result<()> {
        let inside = within(self.family.comparator, &self.tombstones, self.start.as_deref(), next);
        if !inside.is_empty() && self.file.is_none() {
            self.file =
                Some(TableWriter::create(self.job, self.family, file_bytes(self.job)).await?);
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

    async fn finish(mut self) -> Result<Merged> {
        self.enter_zones(None).await?;
        if !self.stays {
            self.end_file(None).await?;
        }
        let mut tombstones = BTreeSet::new();
        for zone in self.zones {
            let (from, to) = (zone.from.as_deref(), zone.to.as_deref());
            tombstones.extend(within(self.family.comparator, &self.all_tombstones, from, to));
        }
        if !tombstones.is_empty() && self.staying.is_none() {
            self.staying =
                Some(TableWriter::create(self.job, self.family, file_bytes(self.job)).await?);
        }
        let mut stays = None;
        if let Some(mut file) = self.staying.take() {
            for (start, end, sequence) in tombstones {
                file.add_range_tombstone(start, end, sequence);
            }
            stays = Some(Box::new(file.finish(self.epoch).await?));
        }
        Ok(Merged::Made(Made { tables: self.tables, stays, blobs: self.blobs }))
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

/// Puts the new files in the place of the old.
fn replace(
    version: &mut Version,
    id: u32,
    inputs: &Plan,
    tables: Vec<Table>,
    stays: Option<Box<Table>>,
) {
    let stays = stays.map(|table| version.put(*table));
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
    // In the place of the run: what came meanwhile is newer.
    let older = levels[0].slots.iter().rposition(|slot| inputs.level0.contains(slot));
    let older = levels[0].slots[older.map_or(0, |last| last + 1)..].len();
    let mut rest0 = without(&levels[0], &inputs.level0);
    rest0.splice(rest0.len() - older..rest0.len() - older, stays);
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
