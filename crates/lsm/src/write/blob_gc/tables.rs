//! Writing a table again with new references, and nothing else changed: the job that runs on
//! another core, and the installation of its result.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rocksfmt::{
    BLOB_RECORD_HEADER_BYTES, BlobIndex, FileMeta, ValueType, put_internal_key, unpack,
};

use crate::db::CfId;
use crate::error::{Error, Kind, Result};
use crate::read::level_iter::LevelIter;
use crate::read::walk::{Direction, Position};
use crate::table::Table;
use crate::table_options::TablePlace;
use crate::version::{Level, Version};
use crate::write::blob_garbage::BlobMeter;
use crate::write::blob_gc::moves::{Moved, entries};
use crate::write::job::{ENTRIES_AT_ONCE, Job};
use crate::write::pace::{Pace, Paced};
use crate::write::table_writer::{NewTable, TableWriter};

/// References to blob files: their number, and the bytes of their records.
pub(super) type References = BTreeMap<u64, (u64, u64)>;

/// Counts a reference of a key of `key_len` bytes.
pub(super) fn count_reference(references: &mut References, to: &BlobIndex, key_len: usize) {
    let sum = references.entry(to.file_number).or_default();
    sum.0 += 1;
    sum.1 =
        sum.1.saturating_add(to.size).saturating_add((BLOB_RECORD_HEADER_BYTES + key_len) as u64);
}

/// A table to be written again.
pub(super) struct Rewriting {
    pub version: Arc<Version>,
    pub family: CfId,
    pub slot: u32,
    pub place: TablePlace,
    pub moved: Arc<Moved>,
    pub victims: BTreeSet<u64>,
    /// It is known to refer to a victim.
    pub is_dirty: bool,
    pub pace: Arc<Pace>,
}

/// The new table.
pub(super) struct Rewritten {
    pub table: Table,
    /// The references before and after.
    pub blobs: BlobMeter,
    /// References that are new.
    pub added: References,
}

/// The result of writing a table again.
pub(super) enum Rewrite {
    Done(Box<Rewritten>),
    /// It does not refer to a victim.
    Clean,
    /// It cannot be read.
    Unread(crate::Error),
}

impl Rewriting {
    pub async fn run(&self, job: &Job) -> Result<Rewrite> {
        let family = self.version.family(self.family)?;
        let meta = self.version.meta(self.slot);
        let mut entries = match entries(job, &self.version, self.family, self.slot).await {
            Ok(entries) => entries,
            Err(error) => return Ok(Rewrite::Unread(error)),
        };
        if !self.is_dirty && !self.victims.contains(&meta.oldest_blob_file) {
            match self.refers(job, &mut entries).await {
                Err(error) => return Ok(Rewrite::Unread(error)),
                Ok(false) => return Ok(Rewrite::Clean),
                Ok(true) => {}
            }
            if let Err(error) = entries.seek(Position::First, Direction::Forward).await {
                return Ok(Rewrite::Unread(error));
            }
        }
        let table = NewTable {
            place: self.place,
            bytes: meta.size_bytes,
            oldest_ancestor_time: meta.oldest_ancestor_time,
        };
        let mut writer = TableWriter::create(job, family, table).await?;
        let mut paced = Paced::new(&self.pace, &job.busy);
        let (mut blobs, mut added) = (BlobMeter::default(), References::new());
        let (mut key, mut index) = (Vec::new(), Vec::new());
        let mut steps = 0;
        while entries.valid() {
            let (user, packed, value) = (entries.user_key(), entries.packed(), entries.value());
            key.clear();
            put_internal_key(&mut key, user, packed);
            let mut value = &value[..];
            if unpack(packed).1 == ValueType::BlobIndex as u8
                && let Ok(old) = BlobIndex::parse(value)
                && let Some(new) = self.moved.find(&old)
            {
                blobs.comes_in(&key, value);
                index.clear();
                new.encode(&mut index);
                value = &index;
                blobs.goes_out(&key, value);
                count_reference(&mut added, &new, user.len());
            }
            if let Err(error) = writer.add(&key, value).await {
                return match error.kind() {
                    // The table's checksums hold, but it is not in order.
                    Kind::Corruption | Kind::Unsupported => Ok(Rewrite::Unread(error)),
                    _ => Err(error),
                };
            }
            paced.done(&job.core, (key.len() + value.len()) as u64).await;
            if let Err(error) = entries.step(Direction::Forward).await {
                return Ok(Rewrite::Unread(error));
            }
            steps += 1;
            if steps % ENTRIES_AT_ONCE == 0 {
                job.core.checkpoint().await;
            }
        }
        let tombstones = self.version.tombstones(self.slot);
        for (start, end, sequence) in tombstones.iter().flat_map(|all| all.iter()) {
            writer.add_range_tombstone(start, end, sequence);
        }
        let mut table = writer.finish(meta.epoch).await?;
        // Tombstones may reach beyond the bounds of their table: the bounds stay. So does its age:
        // no compaction filter has seen its entries.
        table.meta = FileMeta {
            smallest: meta.smallest.clone(),
            largest: meta.largest.clone(),
            smallest_sequence: meta.smallest_sequence,
            largest_sequence: meta.largest_sequence,
            oldest_ancestor_time: meta.oldest_ancestor_time,
            creation_time: meta.creation_time,
            ..table.meta
        };
        if let Some(tombstones) = &mut table.range_tombstones {
            tombstones
                .set_bounds(&meta.smallest, &meta.largest)
                .map_err(|e| Error::format(format_args!("{:06}.sst", meta.number), &e))?;
        }
        Ok(Rewrite::Done(Box::new(Rewritten { table, blobs, added })))
    }

    /// Whether an entry refers to a victim.
    async fn refers(&self, job: &Job, entries: &mut LevelIter) -> Result<bool> {
        let mut steps = 0;
        while entries.valid() {
            if unpack(entries.packed()).1 == ValueType::BlobIndex as u8
                && let Ok(index) = BlobIndex::parse(&entries.value())
                && self.victims.contains(&index.file_number)
            {
                return Ok(true);
            }
            entries.step(Direction::Forward).await?;
            steps += 1;
            if steps % ENTRIES_AT_ONCE == 0 {
                job.core.checkpoint().await;
            }
        }
        Ok(false)
    }
}

/// Replaces a table of a level by another one with the same bounds.
pub(super) fn replace(version: &mut Version, id: CfId, at: usize, old: u32, table: Table) {
    let new = version.put(table);
    let Some(family) = version.families.find_mut(id) else { return };
    if let Some(level) = family.levels.get_mut(at) {
        *level = match at {
            0 => {
                let slots = level.slots.iter().map(|&slot| if slot == old { new } else { slot });
                Level::of(slots.collect(), &version.slots)
            }
            _ => level.edited(&version.slots, family.comparator, &[old], &[new]),
        };
    }
    version.slots.free(old);
}
