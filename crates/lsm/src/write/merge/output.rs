//! The tables that a merge makes, and where each ends.
//!
//! A table ends at about the level's file size, but never between two versions of a key. It ends
//! earlier at a border of the files of the next level, so that the table will overlap few of them
//! when it is merged further down: from half of the size on, a little later with each border that
//! was passed. And it ends before it overlaps more of them than one merge may take
//! (`CompactionOutputs::ShouldStopBefore` of RocksDB).

use std::borrow::Cow;
use std::rc::Rc;

use rocksfmt::{Comparator, Fragments, RangeTombstone};

use crate::error::Result;
use crate::table::Table;
use crate::table_options::TablePlace;
use crate::version::{Family, Version, user_key};
use crate::write::blob_garbage::BlobMeter;
use crate::write::compaction_iter::CompactionIter;
use crate::write::job::{ENTRIES_AT_ONCE, Job};
use crate::write::merge::MergedTables;
use crate::write::merge::below::Below;
use crate::write::picker::{KeyRange, Plan};
use crate::write::table_writer::{NewTable, TableWriter, file_bytes_max};

/// A table may end at a border of the next level from this part of its size on, in percent; later
/// by this much for each border passed, up to a limit.
const BORDER_PERCENT: u64 = 50;
const BORDER_PERCENT_EACH: u64 = 5;
const BORDER_PERCENT_MAX: u64 = 90;
/// A table ends before it overlaps more than this many full ones of the next level. A merge takes
/// at least one table with all that it overlaps, and level 0 waits while one of the base is merged:
/// so small tables keep the wait short.
const OVERLAP_FILES: u64 = 4;
/// Range tombstones of a table, about: they are one block, and stay in memory.
const TOMBSTONES_MAX: usize = if cfg!(test) { 16 } else { 64 << 10 };

/// The tables that a merge makes.
pub(super) struct Output<'a> {
    job: &'a Job,
    family: &'a Family,
    /// The open table of the output level.
    file: Option<TableWriter<'a>>,
    /// The tables of the output level. One may end at about its size.
    table: NewTable,
    /// Size at which a table ends, in bytes.
    file_bytes_max: u64,
    next_level: NextLevel<'a>,
    /// Bytes of a table, together with those of the next level that it overlaps, at which it ends.
    overlap_most: u64,
    tombstones: Option<Tombstones>,
    /// What lies below.
    below: Below<'a>,
    /// The lower bound of the open table's keys; `None` for no bound.
    start: Option<Vec<u8>>,
    /// The upper bound of all keys.
    end: Option<Vec<u8>>,
    tables: Vec<Table>,
    /// Their bytes.
    tables_bytes: u64,
    /// References to blob files in the inputs and in the outputs.
    pub blobs: BlobMeter,
    /// Keys in these zones stay in level 0.
    zones: &'a [KeyRange],
    /// The present zone, or else the next one.
    zone: usize,
    /// The present key is in a zone.
    stays: bool,
    /// The open table of level 0.
    staying: Option<TableWriter<'a>>,
    /// The smallest epoch of the inputs; that of those in level 0.
    epoch: u64,
    staying_epoch: u64,
}

impl<'a> Output<'a> {
    pub fn new(
        job: &'a Job,
        version: &'a Version,
        family: &'a Family,
        plan: &'a Plan,
        range: &KeyRange,
        tombstones: Option<Tombstones>,
    ) -> Output<'a> {
        let below = Below::new(version, family, plan);
        let most = file_bytes_max(job);
        let next_level = NextLevel::new(version, family, below.grandparents());
        // A file at a border of the next level may be larger, so that it can end at one.
        let slack = if below.is_empty() { 1 } else { 2 };
        let times = plan.files().map(|(_, slot)| version.times(slot).0);
        let oldest = |level: usize| {
            let files = plan.files().filter(move |file| file.0 <= level);
            let epochs = files.map(|(_, slot)| version.meta(slot).epoch);
            epochs.filter(|&epoch| epoch > 0).min().unwrap_or(0)
        };
        Output {
            job,
            family,
            file: None,
            table: NewTable {
                place: plan.place,
                bytes: plan.file_bytes.min(most),
                oldest_ancestor_time: times.filter(|&time| time > 0).min().unwrap_or(0),
            },
            file_bytes_max: plan.file_bytes.saturating_mul(slack).min(most),
            next_level,
            overlap_most: family
                .options
                .compaction_bytes
                .min(plan.file_bytes.saturating_mul(OVERLAP_FILES)),
            tombstones,
            below,
            start: range.from.clone(),
            end: range.to.clone(),
            tables: Vec::new(),
            tables_bytes: 0,
            blobs: BlobMeter::default(),
            zones: &plan.stays,
            zone: 0,
            stays: false,
            staying: None,
            epoch: oldest(plan.output),
            staying_epoch: oldest(0),
        }
    }

    /// Begins a key. A table may end only here: the versions of a key stay together.
    async fn begin_key(&mut self, next: &[u8]) -> Result<()> {
        self.advance(Some(next)).await?;
        if !self.stays {
            self.pass_tombstones(Some(next)).await?;
        }
        let borders = self.next_level.advance(next);
        if self.file.is_none() {
            self.next_level.begin_file();
        }
        match &self.file {
            Some(file) if !self.stays && self.ends(file.len(), borders) => {
                self.end_file(Some(next)).await
            }
            _ => Ok(()),
        }
    }

    /// Whether a table of `bytes` ends before the next key, which lies after `borders` more files
    /// of the next level.
    fn ends(&self, bytes: u64, borders: u64) -> bool {
        if bytes >= self.file_bytes_max {
            return true;
        }
        if borders == 0 {
            return false;
        }
        let percent = BORDER_PERCENT + BORDER_PERCENT_EACH * self.next_level.borders;
        bytes >= self.table.bytes / 100 * percent.min(BORDER_PERCENT_MAX)
            || self.next_level.overlapped + bytes > self.overlap_most
    }

    /// Advances to a key, or to the end. A table of the output level ends before a zone: it must
    /// not span one.
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
            if let (Some(tombstones), Some(to)) = (&mut self.tombstones, &zone.to) {
                tombstones.at = tombstones.all.find(to);
            }
            self.stays = false;
            self.zone += 1;
        }
        Ok(())
    }

    /// Bytes written so far, about.
    pub fn written(&self) -> u64 {
        let open = self.file.iter().chain(&self.staying).map(TableWriter::len);
        self.tables_bytes + open.sum::<u64>()
    }

    /// Adds the outputs of the entry that was pushed last.
    pub async fn add_all(&mut self, iter: &mut CompactionIter, value: &[u8]) -> Result<()> {
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

    /// Adds the range tombstones that end before the next key, or at it, and that the output level
    /// keeps. A table ends when it has many.
    async fn pass_tombstones(&mut self, next: Option<&[u8]>) -> Result<()> {
        let Some(Tombstones { all, oldest, mut at, .. }) = self.tombstones.clone() else {
            return Ok(());
        };
        let order = self.family.comparator;
        while let Some((start, end)) = all.range(at)
            && next.is_none_or(|next| order.cmp_user(end, next).is_le())
        {
            let start = self.within(start);
            if self.keeps((&start, end), all.sequences(at), oldest).await? >= TOMBSTONES_MAX {
                self.close_file(Some(end)).await?;
            }
            at += 1;
            if let Some(tombstones) = &mut self.tombstones {
                tombstones.at = at;
            }
            if at.is_multiple_of(ENTRIES_AT_ONCE) {
                self.job.core.checkpoint().await;
            }
        }
        Ok(())
    }

    /// The start of a range tombstone, or of the open table.
    fn within<'b>(&self, start: &'b [u8]) -> Cow<'b, [u8]> {
        match &self.start {
            Some(from) if self.family.comparator.cmp_user(start, from).is_lt() => {
                Cow::Owned(from.clone())
            }
            _ => Cow::Borrowed(start),
        }
    }

    /// Adds a range with those of its sequences that the output level keeps: that not every reader
    /// sees, or that have something below. Returns how many the open table has.
    async fn keeps(
        &mut self,
        (start, end): (&[u8], &[u8]),
        sequences: &[u64],
        oldest: u64,
    ) -> Result<usize> {
        let is_empty = self.family.comparator.cmp_user(start, end).is_ge();
        let everything = !is_empty && self.below.may_have_any(start, end);
        let kept = sequences.iter().filter(|&&at| !is_empty && (everything || at > oldest));
        for &sequence in kept {
            if self.file.is_none() {
                self.file = Some(TableWriter::create(self.job, self.family, self.table).await?);
                self.next_level.begin_file();
            }
            if let (Some(file), Some(tombstones)) = (&mut self.file, &mut self.tombstones) {
                file.add_range_tombstone(start, end, sequence);
                tombstones.count += 1;
            }
        }
        Ok(self.tombstones.as_ref().map_or(0, |tombstones| tombstones.count))
    }

    /// Ends the open table before a key, or after all keys, with the range tombstones until there.
    async fn end_file(&mut self, next: Option<&[u8]>) -> Result<()> {
        self.pass_tombstones(next).await?;
        if let (Some(next), Some(Tombstones { all, oldest, at, .. })) =
            (next, self.tombstones.clone())
            && let Some((start, _)) = all.range(at)
        {
            // The next table has the rest.
            let start = self.within(start);
            self.keeps((&start, next), all.sequences(at), oldest).await?;
        }
        self.close_file(next).await
    }

    async fn close_file(&mut self, next: Option<&[u8]>) -> Result<()> {
        if let Some(file) = self.file.take() {
            let table = file.finish(self.epoch).await?;
            self.tables_bytes += table.meta.size_bytes;
            self.tables.push(table);
        }
        if let Some(tombstones) = &mut self.tombstones {
            tombstones.count = 0;
        }
        self.start = next.map(<[u8]>::to_vec);
        self.next_level.begin_file();
        Ok(())
    }

    pub async fn finish(mut self) -> Result<MergedTables> {
        self.advance(None).await?;
        if !self.stays {
            let end = self.end.take();
            self.end_file(end.as_deref()).await?;
        }
        if let Some(Tombstones { all, .. }) = self.tombstones.take() {
            for zone in self.zones {
                let parts = all.between(zone.from.as_deref(), zone.to.as_deref());
                for (count, tombstone) in (1..).zip(parts) {
                    if self.staying.is_none() {
                        let table = self.staying();
                        let made = TableWriter::create(self.job, self.family, table).await?;
                        self.staying = Some(made);
                    }
                    if let Some(file) = &mut self.staying {
                        let RangeTombstone { start, end, sequence } = tombstone;
                        file.add_range_tombstone(start, end, sequence);
                    }
                    if count % ENTRIES_AT_ONCE == 0 {
                        self.job.core.checkpoint().await;
                    }
                }
            }
        }
        let mut staying = None;
        if let Some(file) = self.staying.take() {
            staying = Some(Box::new(file.finish(self.staying_epoch).await?));
        }
        Ok(MergedTables { tables: self.tables, staying, blobs: self.blobs })
    }
}

/// The range tombstones of the inputs, as a merge passes them.
#[derive(Clone)]
pub(super) struct Tombstones {
    all: Rc<Fragments>,
    /// Every reader sees those up to this sequence.
    oldest: u64,
    /// The first one that was not passed.
    at: usize,
    /// The number in the open table.
    count: usize,
}

impl Tombstones {
    /// Those from the start of a range of keys on.
    pub fn new(all: Rc<Fragments>, oldest: u64, range: &KeyRange) -> Tombstones {
        let at = range.from.as_ref().map_or(0, |from| all.find(from));
        Tombstones { all, oldest, at, count: 0 }
    }
}

/// The files of the next level that the open table overlaps.
struct NextLevel<'a> {
    version: &'a Version,
    order: Comparator,
    files: &'a [u32],
    /// The first file that does not end before the present key.
    at: usize,
    /// Bytes of the files that ended within the open table, and their number.
    overlapped: u64,
    borders: u64,
}

impl<'a> NextLevel<'a> {
    fn new(version: &'a Version, family: &Family, files: &'a [u32]) -> NextLevel<'a> {
        NextLevel { version, order: family.comparator, files, at: 0, overlapped: 0, borders: 0 }
    }

    /// Advances to a key. Returns the number of files that end before it.
    fn advance(&mut self, key: &[u8]) -> u64 {
        let from = self.at;
        while let Some(&slot) = self.files.get(self.at) {
            let meta = self.version.meta(slot);
            if self.order.cmp_user(user_key(&meta.largest), key).is_ge() {
                break;
            }
            self.overlapped += meta.size_bytes;
            self.at += 1;
        }
        let passed = (self.at - from) as u64;
        self.borders += passed;
        passed
    }

    fn begin_file(&mut self) {
        (self.overlapped, self.borders) = (0, 0);
    }
}
