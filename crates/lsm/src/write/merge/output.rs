//! The tables that a merge makes, and where each ends.
//!
//! A table ends at about the level's file size, but never between two versions of a key. It ends
//! earlier at a border of the files of the next level, so that the table will overlap few of them
//! when it is merged further down: from half of the size on, a little later with each border that
//! was passed. And it ends before it overlaps more of them than one merge may take
//! (`CompactionOutputs::ShouldStopBefore` of RocksDB).

use rocksfmt::Comparator;

use crate::error::Result;
use crate::range_tombstones::Tombstone;
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
    /// The range tombstones that the output level keeps.
    tombstones: Kept,
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
    /// All range tombstones of the inputs, for the table of level 0.
    all_tombstones: Kept,
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
        below: &Below<'a>,
    ) -> Output<'a> {
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
            tombstones: Kept::new(family.comparator),
            start: range.from.clone(),
            end: range.to.clone(),
            tables: Vec::new(),
            tables_bytes: 0,
            blobs: BlobMeter::default(),
            zones: &plan.stays,
            zone: 0,
            stays: false,
            staying: None,
            all_tombstones: Kept::new(family.comparator),
            epoch: oldest(plan.output),
            staying_epoch: oldest(0),
        }
    }

    /// Adds range tombstones of the inputs: those that the output level keeps, and all.
    pub fn add_tombstones(&mut self, kept: Vec<Tombstone>, all: Vec<Tombstone>) {
        self.tombstones.ahead.extend(kept);
        if !self.zones.is_empty() {
            self.all_tombstones.ahead.extend(all);
        }
    }

    /// Begins a key. A table may end only here: the versions of a key stay together.
    async fn begin_key(&mut self, next: &[u8]) -> Result<()> {
        self.advance(Some(next)).await?;
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
            || self.next_level.overlapped + bytes > self.family.options.compaction_bytes
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

    async fn end_file(&mut self, next: Option<&[u8]>) -> Result<()> {
        let bounds = (self.start.as_deref(), next);
        if self.tombstones.advance(bounds) && self.file.is_none() {
            self.file = Some(TableWriter::create(self.job, self.family, self.table).await?);
        }
        if let Some(mut file) = self.file.take() {
            self.tombstones.write(bounds, &mut file, self.job).await;
            let table = file.finish(self.epoch).await?;
            self.tables_bytes += table.meta.size_bytes;
            self.tables.push(table);
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
        for zone in self.zones {
            let bounds = (zone.from.as_deref(), zone.to.as_deref());
            if self.all_tombstones.advance(bounds) && self.staying.is_none() {
                let table = TableWriter::create(self.job, self.family, self.staying()).await?;
                self.staying = Some(table);
            }
            if let Some(file) = &mut self.staying {
                self.all_tombstones.write(bounds, file, self.job).await;
            }
        }
        let mut staying = None;
        if let Some(file) = self.staying.take() {
            staying = Some(Box::new(file.finish(self.staying_epoch).await?));
        }
        Ok(MergedTables { tables: self.tables, staying, blobs: self.blobs })
    }
}

/// Range tombstones that are written to one range of keys after the other, in the order of the
/// keys: a range looks only at those that reach into it.
struct Kept {
    order: Comparator,
    /// Those that start in later ranges; after the first [`Kept::advance`] the first ones at the
    /// end.
    ahead: Vec<Tombstone>,
    sorted: bool,
    /// Those that started in this range or before, and may end in it or later.
    open: Vec<Tombstone>,
}

/// The bounds of a range of user keys: inclusive, exclusive. `None` for no bound.
type Bounds<'a> = (Option<&'a [u8]>, Option<&'a [u8]>);

impl Kept {
    fn new(order: Comparator) -> Kept {
        Kept { order, ahead: Vec::new(), sorted: false, open: Vec::new() }
    }

    /// Goes on to a range behind the last one. Whether there are tombstones in it.
    fn advance(&mut self, (from, to): Bounds<'_>) -> bool {
        let order = self.order;
        if !self.sorted {
            self.ahead.sort_by(|a, b| order.cmp_user(&b.0, &a.0));
            self.sorted = true;
        }
        if let Some(from) = from {
            self.open.retain(|(_, end, _)| order.cmp_user(end, from).is_gt());
        }
        let starts =
            |(start, _, _): &mut Tombstone| to.is_none_or(|to| order.cmp_user(start, to).is_lt());
        while let Some(next) = self.ahead.pop_if(starts) {
            if from.is_none_or(|from| order.cmp_user(&next.1, from).is_gt()) {
                self.open.push(next);
            }
        }
        let is_empty = from.zip(to).is_some_and(|(from, to)| order.cmp_user(from, to).is_ge());
        !is_empty && !self.open.is_empty()
    }

    /// The parts within the range of the last [`Kept::advance`].
    fn parts<'a>(
        &'a self,
        (from, to): Bounds<'a>,
    ) -> impl Iterator<Item = (&'a [u8], &'a [u8], u64)> {
        let order = self.order;
        self.open.iter().map(move |(start, end, sequence)| {
            let starts_before = |from: &&[u8]| order.cmp_user(start, from).is_lt();
            let ends_after = |to: &&[u8]| order.cmp_user(end, to).is_gt();
            let start = from.filter(starts_before).unwrap_or(start);
            (start, to.filter(ends_after).unwrap_or(end), *sequence)
        })
    }

    /// Writes these parts.
    async fn write(&self, bounds: Bounds<'_>, file: &mut TableWriter<'_>, job: &Job) {
        for (count, (start, end, sequence)) in (1..).zip(self.parts(bounds)) {
            file.add_range_tombstone(start, end, sequence);
            if count % ENTRIES_AT_ONCE == 0 {
                job.core.checkpoint().await;
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_range_gets_the_parts_of_the_tombstones_in_it(
            tombstones in proptest::collection::vec((0..30u8, 1..30u8, 0..5u64), 0..20),
            mut borders in proptest::collection::vec(0..40u8, 0..6),
            skips in proptest::collection::vec(any::<bool>(), 7),
            reverse: bool,
        ) {
            let order = if reverse { Comparator::ReverseBytewise } else { Comparator::Bytewise };
            let key = |at: u8| vec![if reverse { 100 - at } else { at }];
            let mut kept = Kept::new(order);
            for &(start, len, sequence) in &tombstones {
                kept.ahead.push((key(start), key(start + len), sequence));
            }
            borders.sort_unstable();
            let all = |bound: Option<u8>, none: u8| bound.unwrap_or(none);
            for (number, skip) in (0..=borders.len()).zip(skips) {
                let from = number.checked_sub(1).map(|at| borders[at]);
                let to = borders.get(number).copied();
                if skip {
                    continue;
                }
                let (first, last) = (from.map(key), to.map(key));
                let bounds = (first.as_deref(), last.as_deref());
                let mut expected: Vec<_> = tombstones
                    .iter()
                    .map(|&(start, len, sequence)| {
                        (start.max(all(from, 0)), (start + len).min(all(to, 99)), sequence)
                    })
                    .filter(|(start, end, _)| start < end)
                    .map(|(start, end, sequence)| (key(start), key(end), sequence))
                    .collect();
                let some = kept.advance(bounds);
                let mut parts: Vec<_> = match some {
                    true => kept.parts(bounds).map(|(a, b, s)| (a.to_vec(), b.to_vec(), s)).collect(),
                    false => Vec::new(),
                };
                expected.sort();
                parts.sort();
                prop_assert_eq!(parts, expected);
            }
        }
    }
}
