//! Merging level 0 into level 1, in the background.
//!
//! All files of level 0 and those of level 1 that overlap them become new files of level 1. Of a
//! key's versions stay those that somebody may still see: the newest, and what a snapshot needs. A
//! tombstone goes when nothing older can lie below it.
//!
//! Not merged, but left as they are: families whose files have range tombstones or are damaged.

use std::sync::Arc;

use rocksfmt::{Comparator, FileName, ValueType, VersionEdit, unpack};

use crate::error::{Error, Result};
use crate::level_iter::{Bounds, LevelIter};
use crate::manifest_writer::ManifestWriter;
use crate::reader::{At, Reader};
use crate::table::Table;
use crate::table_writer::TableWriter;
use crate::version::{Family, Level, Slot, Version, user_key};
use crate::walk::{Direction, Position};
use crate::writer::Inner;

/// Files of level 0 that are merged.
pub(crate) const LEVEL0_FILES: usize = 4;
/// Size of a file of level 1, about.
const FILE_BYTES: u64 = 64 << 20;
/// Entries between two looks at whether others want the core.
const ENTRIES_AT_ONCE: usize = 32;

/// Merges level 0 of the first family that needs it; false if none does.
pub(crate) async fn level0(inner: &Inner, manifest: &mut ManifestWriter) -> Result<bool> {
    let reader = Reader::uncached(&inner.db, &inner.core);
    let at = reader.at();
    let version = &at.view.version;
    for family in &version.families {
        let Some(inputs) = inputs(version, family) else { continue };
        let tables = merge(inner, &at, family, &inputs).await?;
        inner.dir.sync().await.map_err(|e| Error::io(inner.dir.path().display(), &e))?;
        let number = |slot: &u32| version.meta(*slot).number;
        let gone0 = inputs.level0.iter().map(|slot| (0, number(slot)));
        let gone1 = inputs.level1.iter().map(|slot| (1, number(slot)));
        let edit = VersionEdit {
            column_family: family.id,
            next_file_number: Some(inner.next_file()),
            last_sequence: Some(inner.db.visible()),
            deleted_files: gone0.chain(gone1).collect(),
            new_files: tables.iter().map(|table| (1, table.meta.clone())).collect(),
            ..VersionEdit::default()
        };
        manifest.append(&edit).await?;
        inner.publish(|newest| replace(newest, family.id, &inputs, tables));
        // Whoever reads them still has them open.
        for slot in inputs.level0.iter().chain(&inputs.level1) {
            let name = FileName::Sst(number(slot)).to_string();
            inner.dir.remove(&name).await.map_err(|e| Error::io(&name, &e))?;
        }
        return Ok(true);
    }
    Ok(false)
}

/// What is merged, by slot. Level 1 in order.
struct Inputs {
    level0: Vec<u32>,
    level1: Vec<u32>,
    /// Whether deeper levels have files.
    deeper: bool,
}

fn inputs(version: &Version, family: &Family) -> Option<Inputs> {
    let level0 = family.levels.first()?.slots.clone();
    if level0.len() < LEVEL0_FILES || family.refused.is_some() {
        return None;
    }
    let comparator = family.comparator;
    let meta = |slot: &u32| version.meta(*slot);
    let less = |a: &&[u8], b: &&[u8]| comparator.cmp_user(a, b);
    let smallest = level0.iter().map(|slot| user_key(&meta(slot).smallest)).min_by(less)?;
    let largest = level0.iter().map(|slot| user_key(&meta(slot).largest)).max_by(less)?;
    let overlaps = |slot: &&u32| {
        comparator.cmp_user(user_key(&meta(slot).largest), smallest).is_ge()
            && comparator.cmp_user(user_key(&meta(slot).smallest), largest).is_le()
    };
    let level1: Vec<u32> = match family.levels.get(1) {
        Some(level) => level.slots.iter().filter(overlaps).copied().collect(),
        None => Vec::new(),
    };
    let deeper = family.levels.iter().skip(2).any(|level| !level.slots.is_empty());
    let mergeable = level0
        .iter()
        .chain(&level1)
        .all(|&slot| version.table(slot).is_ok_and(|table| table.range_tombstones.is_none()));
    mergeable.then_some(Inputs { level0, level1, deeper })
}

async fn merge(inner: &Inner, at: &At, family: &Family, inputs: &Inputs) -> Result<Vec<Table>> {
    let comparator = family.comparator;
    let bounds = std::rc::Rc::new(Bounds::default());
    let mut sources = Vec::new();
    let runs = inputs.level0.iter().map(|&slot| vec![slot]).chain([inputs.level1.clone()]);
    for run in runs.filter(|run| !run.is_empty()) {
        let mut source = LevelIter::new(at, comparator, run.into(), &bounds, false, 0, false);
        source.seek(Position::First, Direction::Forward).await?;
        sources.push(source);
    }
    // What is older than this and hidden, nobody can see.
    let oldest = inner.db.oldest_seen();
    let mut output = Output::new(inner, family);
    let mut key: Vec<u8> = Vec::new();
    let mut user: Option<Vec<u8>> = None;
    // The newest version that everybody sees has been met: older ones are hidden.
    let mut hidden = false;
    let mut steps = 0;
    while let Some(next) = first(&sources, comparator) {
        let source = &mut sources[next];
        let packed = source.packed();
        let (sequence, kind) = unpack(packed);
        if user.as_deref() != Some(source.user_key()) {
            user = Some(source.user_key().to_vec());
            hidden = false;
            output.key_changes().await?;
        }
        let everybody = sequence <= oldest;
        let tombstone = ValueType::from_byte(kind).is_some_and(ValueType::is_tombstone);
        let nothing_below = everybody && tombstone && !inputs.deeper;
        if !(hidden || nothing_below) {
            key.clear();
            key.extend_from_slice(source.user_key());
            key.extend_from_slice(&packed.to_le_bytes());
            output.add(&key, &source.value()).await?;
        }
        // A merge operand is nothing without what lies below it.
        hidden |= everybody && kind != ValueType::Merge as u8;
        source.step(Direction::Forward).await?;
        steps += 1;
        if steps % ENTRIES_AT_ONCE == 0 {
            inner.core.checkpoint().await;
        }
    }
    output.finish().await
}

/// The source with the smallest internal key. There are few of them.
fn first(sources: &[LevelIter], comparator: Comparator) -> Option<usize> {
    let valid = sources.iter().enumerate().filter(|(_, source)| source.valid());
    let order = |a: &LevelIter, b: &LevelIter| {
        comparator.cmp_user(a.user_key(), b.user_key()).then_with(|| b.packed().cmp(&a.packed()))
    };
    valid.min_by(|(_, a), (_, b)| order(a, b)).map(|(at, _)| at)
}

/// The files that come out.
struct Output<'a> {
    inner: &'a Inner,
    family: &'a Family,
    file: Option<TableWriter<'a>>,
    epoch: u64,
    tables: Vec<Table>,
}

impl<'a> Output<'a> {
    fn new(inner: &'a Inner, family: &'a Family) -> Output<'a> {
        let version = inner.db.version();
        let level0 = family.levels.first().map_or(&[][..], |level| &level.slots);
        let epoch = level0.iter().map(|&slot| version.meta(slot).epoch).min().unwrap_or(0);
        Output { inner, family, file: None, epoch, tables: Vec::new() }
    }

    /// A file may end here: the versions of a key stay together.
    async fn key_changes(&mut self) -> Result<()> {
        match &self.file {
            Some(file) if file.len() >= FILE_BYTES => self.end_file().await,
            _ => Ok(()),
        }
    }

    async fn add(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(TableWriter::create(self.inner, self.family).await?),
        };
        file.add(key, value).await
    }

    async fn end_file(&mut self) -> Result<()> {
        if let Some(file) = self.file.take() {
            self.tables.push(file.finish(self.epoch).await?);
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<Vec<Table>> {
        self.end_file().await?;
        Ok(self.tables)
    }
}

/// Puts the new files in the place of the old.
fn replace(version: &mut Version, id: u32, inputs: &Inputs, tables: Vec<Table>) {
    let first = version.slots.len() as u32;
    version.slots.extend(tables.into_iter().map(|table| Slot::Open(Arc::new(table))));
    let new = first..version.slots.len() as u32;
    let Some(at) = version.families.iter().position(|family| family.id == id) else { return };
    let comparator = version.families[at].comparator;
    let levels = &mut version.families[at].levels;
    levels.resize_with(levels.len().max(2), Level::default);
    let rest0: Vec<u32> =
        levels[0].slots.iter().copied().filter(|slot| !inputs.level0.contains(slot)).collect();
    let mut rest1: Vec<u32> =
        levels[1].slots.iter().copied().filter(|slot| !inputs.level1.contains(slot)).collect();
    rest1.extend(new);
    let slots = &version.slots;
    rest1.sort_by(|a, b| {
        comparator
            .cmp_internal(&slots[*a as usize].meta().smallest, &slots[*b as usize].meta().smallest)
    });
    levels[0] = Level::of(rest0, slots);
    levels[1] = Level::of(rest1, slots);
    for &slot in inputs.level0.iter().chain(&inputs.level1) {
        let meta = version.slots[slot as usize].meta().clone();
        let error = Error::new(crate::error::Kind::Io, "a table that was merged into others");
        version.slots[slot as usize] = Slot::Broken { meta, error };
    }
}
