//! Column families that are made and dropped while the database is open.
//!
//! Both are requests like batches, done in their order. A change is one record of the MANIFEST.
//!
//! If the directory has an OPTIONS file, a new one takes its place, with a section for each family:
//! programs that take their options from it open exactly its families. It always lists at least the
//! families of the MANIFEST: a new family is entered before the MANIFEST names it, and a dropped
//! one is taken out after the MANIFEST has dropped it. After a crash in between it lists one family
//! too many, until the next change, or until RocksDB opens the directory.

use fs::{Dir, DirEntry};
use reactor::Core;
use rocksfmt::{Comparator, FileName, OPTIONS_BYTES_MAX, VersionEdit, options_with_families};

use crate::db::{CfId, Db, named};
use crate::error::{Error, Kind, Result};
use crate::mem::live::LiveWriter;
use crate::merge_operator::FamilyMerge;
use crate::mutant::mutant;
use crate::stored_options::newest;
use crate::version::{Family, Version};
use crate::write::commit::Commit;
use crate::write::state::{Request, WriteState};
use crate::write::wal_writer::WalWriter;
use crate::write::writer::Writer;

/// How to make a column family. Its other options are those of the default family, in the
/// directory's OPTIONS file, or RocksDB's defaults if there is none.
#[derive(Clone, Debug, Default)]
pub struct ColumnFamilyOptions {
    /// The order of its keys.
    pub comparator: Comparator,
}

impl Writer {
    /// Makes an empty column family, and returns its id. It is durable when this returns, and
    /// batches may name it. Ids are never used again. Suspends for the disk.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] for an empty name, or one that a family has; [`Kind::Full`] and
    /// [`Kind::Memory`] if it was not made, for lack of space or memory or for now; [`Kind::Io`] if
    /// the MANIFEST failed: it may be there after a crash.
    pub async fn create_column_family(
        &self,
        name: &str,
        options: ColumnFamilyOptions,
    ) -> Result<CfId> {
        let comparator = options.comparator;
        let created = self.request(Request::Create { name: name.to_owned(), comparator })?.await?;
        CfId::try_from(created).map_err(|_| Error::new(Kind::Corruption, "an impossible id"))
    }

    /// Drops a column family with everything in it. Iterators of it go on; other reads, and batches
    /// that are submitted later, fail. A batch that is submitted while the family is being dropped
    /// may succeed without a trace in this family. Suspends for the disk.
    ///
    /// # Errors
    /// [`Kind::UnknownColumnFamily`]; [`Kind::Unsupported`] for the default family; otherwise as
    /// for [`Writer::create_column_family`].
    pub async fn drop_column_family(&self, family: CfId) -> Result<()> {
        self.request(Request::Drop(family))?.await.map(drop)
    }
}

impl Db {
    /// Whether [`Writer::create_column_family`] can make such a family. Suspends for the disk.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if it cannot; those of reading the OPTIONS file.
    pub async fn may_create_column_family(
        &self,
        core: &Core,
        name: &str,
        options: ColumnFamilyOptions,
    ) -> Result<()> {
        let version = self.version();
        may_create(&version, name)?;
        let largest = self.0.manifest.max_column_family;
        if largest == u32::MAX {
            return Err(no_id());
        }
        let new = (name, options.comparator.name());
        let families: Vec<_> = names(&version).chain([new]).collect();
        changed_options(&Dir::new(core, self.path()), &families).await.map(drop)
    }

    /// The column family of this name, if [`Writer::drop_column_family`] can drop it.
    ///
    /// # Errors
    /// [`Kind::UnknownColumnFamily`]; [`Kind::Unsupported`] for the default family.
    pub fn may_drop_column_family(&self, name: &str) -> Result<CfId> {
        let version = self.version();
        let family = named(&version, name)?;
        may_drop(family).map(|()| family.id)
    }
}

impl Commit<'_> {
    /// Makes a column family.
    pub async fn create_family(&mut self, name: &str, comparator: Comparator) -> Result<u32> {
        let state = self.state;
        let turn = state.manifest_turn().await?;
        let version = state.db.version();
        may_create(&version, name)?;
        let Some(id) = turn.state().next_column_family() else {
            return Err(no_id());
        };
        let new = (name, comparator.name());
        write_options(state, names(&version).chain([new]).collect()).await?;
        let edit = VersionEdit {
            column_family: id,
            column_family_add: Some(name.to_owned()),
            comparator: Some(comparator.name().to_owned()),
            // If there is no log yet, it will get a larger number.
            log_number: Some(
                self.log.as_ref().map_or_else(|| state.db.new_number(), WalWriter::number)
                    + u64::from(mutant("family_begins_after_its_log")),
            ),
            max_column_family: Some(id),
            ..VersionEdit::default()
        };
        let (bytes, seed) = (state.options.memtable_bytes, state.core.random_u64());
        let shares = version.families.len() + 1;
        let (writer, mem) = LiveWriter::new(comparator, bytes, shares, seed);
        let family = Family {
            id,
            name: name.to_owned(),
            comparator_name: comparator.name().to_owned(),
            comparator,
            refused: None,
            mems: vec![mem],
            levels: Vec::new(),
            blobs: Vec::new(),
            merge: FamilyMerge::default(),
            filter: None,
            table_options: version.family(0)?.table_options.clone(),
            options: version.family(0)?.options.clone(),
        };
        let publish = |version: &mut Version| version.families.push(family);
        match mutant("family_is_not_registered") {
            true => state.db.publish(publish),
            false => turn.change(vec![edit], publish).await?,
        }
        let like = &version.family(0)?.name;
        state.blobs.add_family(&state.db, &state.options, id, like);
        self.live.insert(id, writer);
        Ok(id)
    }

    /// Drops a column family.
    pub async fn drop_family(&mut self, id: u32) -> Result<()> {
        let state = self.state;
        let turn = state.manifest_turn().await?;
        let version = state.db.version();
        let family = version.families.find(id).ok_or_else(|| {
            Error::new(Kind::UnknownColumnFamily, format!("no column family with id {id}"))
        })?;
        may_drop(family)?;
        let slots: Vec<u32> =
            family.levels.iter().flat_map(|level| level.slots.iter().copied()).collect();
        let blobs: Vec<FileName> =
            family.blobs.iter().map(|(number, _)| FileName::Blob(*number)).collect();
        if mutant("family_files_go_first") {
            state.remove_tables(slots.iter().map(|&slot| version.meta(slot)));
            // Another task removes them.
            state.core.sleep_ns(1_000_000).await;
        }
        let edit =
            VersionEdit { column_family: id, column_family_drop: true, ..VersionEdit::default() };
        let dropped = turn.change(vec![edit], |version| {
            for &slot in &slots {
                version.slots.free(slot);
            }
            version.families.remove(id);
        });
        if let Err(error) = dropped.await {
            // A write to it must not be acknowledged and then be dropped by a crash.
            state.hold_writes();
            return Err(error);
        }
        self.live.remove(&id);
        state.blobs.drop_family(id);
        state.remove_tables(slots.iter().map(|&slot| version.meta(slot)));
        state.remove_files(blobs);
        state.note_removal();
        if let Err(error) = write_options(state, names(&state.db.version()).collect()).await {
            tracing::warn!("the OPTIONS file still lists column family {}: {error}", family.name);
        }
        Ok(())
    }
}

/// Refuses the name of a new column family if it cannot have it.
fn may_create(version: &Version, name: &str) -> Result<()> {
    if name.is_empty() {
        let text = "cannot create a column family without a name";
        return Err(Error::new(Kind::Unsupported, text));
    }
    if version.families.iter().any(|family| family.name == name) {
        let text = format!("cannot create column family {name:?}: there is one of that name");
        return Err(Error::new(Kind::Unsupported, text));
    }
    Ok(())
}

/// Refuses to drop the default column family.
fn may_drop(family: &Family) -> Result<()> {
    if family.id == 0 {
        let text = "the default column family cannot be dropped; it can be cleared";
        return Err(Error::new(Kind::Unsupported, text));
    }
    Ok(())
}

/// The families of a version, with the names of their comparators.
fn names(version: &Version) -> impl Iterator<Item = (&str, &str)> {
    version.families.iter().map(|family| (&family.name[..], &family.comparator_name[..]))
}

fn no_id() -> Error {
    Error::new(Kind::Unsupported, "no id is left for a column family")
}

/// The OPTIONS file that must take the place of the newest one, for these families.
struct ChangedOptions {
    entries: Vec<DirEntry>,
    /// The name of the newest one.
    last: String,
    text: String,
}

/// `None` if the directory has no OPTIONS file, or one that lists exactly these families.
///
/// # Errors
/// [`Kind::Unsupported`] if it would be too large to be read again.
async fn changed_options(dir: &Dir, families: &[(&str, &str)]) -> Result<Option<ChangedOptions>> {
    let io = |e: std::io::Error| Error::io("the OPTIONS file", &e).of_new_file();
    let entries = dir.list().await.map_err(io)?;
    let Some(last) = newest(&entries).map(str::to_owned) else { return Ok(None) };
    let old = dir.read_small(&last, OPTIONS_BYTES_MAX).await.map_err(io)?;
    let text = options_with_families(&String::from_utf8_lossy(&old), families);
    let Some(text) = text.filter(|text| text.as_bytes() != old) else { return Ok(None) };
    if text.len() > OPTIONS_BYTES_MAX {
        let text = format!("the OPTIONS file would exceed {OPTIONS_BYTES_MAX} bytes");
        return Err(Error::new(Kind::Unsupported, text));
    }
    Ok(Some(ChangedOptions { entries, last, text }))
}

/// If the directory has an OPTIONS file, writes a new one for these families.
async fn write_options(state: &WriteState, families: Vec<(&str, &str)>) -> Result<()> {
    let dir = &state.dir;
    let io = |e: std::io::Error| Error::io("the OPTIONS file", &e).of_new_file();
    let mark = dir.mark();
    let Some(new) = changed_options(dir, &families).await? else { return Ok(()) };
    let name = FileName::Options(state.db.new_number()).to_string();
    dir.replace_small(&name, new.text.as_bytes()).await.map_err(io)?;
    dir.sync_since(mark).await.map_err(io)?;
    // RocksDB keeps two as well.
    let older = new.entries.iter().filter_map(|entry| match FileName::parse(&entry.name) {
        Some(file @ FileName::Options(_)) if entry.name != new.last => Some(file),
        _ => None,
    });
    state.remove_files(older.collect());
    Ok(())
}
