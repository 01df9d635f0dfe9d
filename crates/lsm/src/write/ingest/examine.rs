//! Examining a file that is to be ingested, before any record names it.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use fs::Dir;
use reactor::Core;
use rocksfmt::{FileMeta, Properties};

use crate::db::{CfId, Db};
use crate::error::{Error, Kind, Result};
use crate::read::ahead::WINDOW_MAX;
use crate::read::level_iter::{Bounds, LevelIter};
use crate::read::reader::Reader;
use crate::read::run::Run;
use crate::read::walk::{Direction, Position};
use crate::table::Table;
use crate::table_memory::TableMemory;
use crate::version::{Family, Slot, Version, user_key};
use crate::write::job::ENTRIES_AT_ONCE;

/// The newest format version that RocksDB 7.8 reads.
const FORMAT_VERSION_MAX: u64 = 5;

impl Db {
    /// Whether [`Writer::ingest`](crate::Writer::ingest) would refuse files for a column family,
    /// wherever they are. Their data blocks are not read. Suspends for the disk.
    ///
    /// # Errors
    /// As for [`Writer::ingest`](crate::Writer::ingest), with the path of the file.
    pub async fn may_ingest(&self, core: &Core, family: CfId, files: &[PathBuf]) -> Result<()> {
        let version = self.version();
        let family = version.family(family)?;
        let mut metas = Vec::new();
        for path in files {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let dir = Dir::new(core, parent.unwrap_or(Path::new(".")));
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let examined = examine(core, self, &version, family, (&dir, &name), false).await;
            metas.push(examined.map_err(|error| {
                let place = path.display().to_string();
                let what = error.to_string();
                let what =
                    if what.contains(&place) { what } else { what.replacen(&*name, &place, 1) };
                Error::new(error.kind(), what)
            })?);
        }
        refuse_overlap(family, metas.iter().collect())
    }
}

/// Checks a file and describes it, with sequence number 0. With `verify` it is read to its end.
pub(super) async fn examine(
    core: &Core,
    db: &Db,
    version: &Version,
    family: &Family,
    (dir, name): (&Dir, &str),
    verify: bool,
) -> Result<FileMeta> {
    let size_bytes = dir.open(name).await.map_err(|e| Error::io(name, &e))?.size();
    let properties = Table::properties(core, dir, name).await?;
    if let Some(what) = obstacle(db, family, &properties) {
        return Err(Error::new(Kind::Unsupported, format!("{name} {what}")));
    }
    let now = core.unix_time_ms() / 1000;
    let mut meta =
        FileMeta { oldest_ancestor_time: now, creation_time: now, ..FileMeta::of_size(size_bytes) };
    // With its index in memory, whatever the budget: without its bounds it cannot be on demand.
    let memory = TableMemory::new(usize::MAX);
    let table = Table::open(core, dir, name, meta.clone(), family.comparator, &memory).await?;
    let alone = Version {
        families: version.families.clone(),
        slots: vec![Slot::Open(Arc::new(table))].into(),
        epoch: 0,
    };
    (meta.smallest, meta.largest) =
        bounds(core, db, alone, (family, name), verify.then_some(properties.num_entries)).await?;
    Ok(meta)
}

/// The smallest and the largest internal key of the only table of a version. With `entries` it is
/// read to its end and must have that many.
async fn bounds(
    core: &Core,
    db: &Db,
    alone: Version,
    (family, name): (&Family, &str),
    entries: Option<u64>,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let context = Reader::uncached(db, core).context_at(&alone.into());
    let (order, all) = (family.comparator, Rc::new(Bounds::default()));
    let mut iter = LevelIter::new(&context, order, Run::Table([0]), &all, false, WINDOW_MAX, false);
    let key = |iter: &LevelIter| [iter.user_key(), &iter.packed().to_le_bytes()].concat();
    let wrong = |what: &str| Error::new(Kind::Corruption, format!("{name} {what}"));
    iter.seek(Position::First, Direction::Forward).await?;
    if !iter.valid() {
        return Err(wrong("has no entries"));
    }
    let smallest = key(&iter);
    let Some(entries) = entries else {
        iter.seek(Position::Last, Direction::Backward).await?;
        return Ok((smallest, key(&iter)));
    };
    let (mut last, mut count) = (smallest.clone(), 1u64);
    loop {
        iter.step(Direction::Forward).await?;
        if !iter.valid() {
            break;
        }
        if order.cmp_user(user_key(&last), iter.user_key()).is_ge() {
            return Err(wrong(&format!("has keys that do not ascend, at entry {count}")));
        }
        last.clear();
        last.extend_from_slice(iter.user_key());
        last.extend_from_slice(&iter.packed().to_le_bytes());
        count += 1;
        if count.is_multiple_of(ENTRIES_AT_ONCE as u64) {
            core.checkpoint().await;
        }
    }
    match count == entries {
        true => Ok((smallest, last)),
        false => Err(wrong(&format!("has {count} entries, and says {entries}"))),
    }
}

/// Why a file cannot be ingested, if it cannot.
fn obstacle(db: &Db, family: &Family, properties: &Properties) -> Option<String> {
    match (properties.external_version, properties.external_sequence) {
        (Some(2), None | Some(0)) => {}
        (Some(2), Some(sequence)) => {
            return Some(format!(
                "was ingested before, with sequence number {sequence} written into it \
                 (write_global_seqno): make it again with SstFileWriter"
            ));
        }
        _ => return Some("was not made by RocksDB's SstFileWriter".to_owned()),
    }
    if properties.comparator != family.comparator_name.as_bytes() {
        return Some(format!(
            "is in the order of {:?}, column family {} in that of {:?}",
            String::from_utf8_lossy(&properties.comparator),
            family.name,
            family.comparator_name
        ));
    }
    if properties.num_range_deletions > 0 {
        return Some("has range deletions, which cannot be ingested".to_owned());
    }
    if properties.embedded_blobs {
        return Some("has blob values embedded, which is not supported".to_owned());
    }
    let format = properties.format_version;
    let written_by = db.0.stored_options.file.as_ref();
    let written_by = written_by.and_then(|file| file.rocksdb_version()).unwrap_or("7.8");
    let mut parts = written_by.split('.').map(|part| part.parse::<u64>().unwrap_or(0));
    let by = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let needed = if format == 6 { (8, 6) } else { (10, 4) };
    (format > FORMAT_VERSION_MAX && by < needed).then(|| {
        format!(
            "has format_version {format}, which RocksDB {written_by} cannot read, and RocksDB \
             {written_by} can open this database: make the file with format_version \
             {FORMAT_VERSION_MAX}"
        )
    })
}

/// Refuses tables of a family that overlap each other.
pub(super) fn refuse_overlap(family: &Family, mut metas: Vec<&FileMeta>) -> Result<()> {
    let order = family.comparator;
    metas.sort_by(|a, b| order.cmp_internal(&a.smallest, &b.smallest));
    match metas
        .windows(2)
        .any(|pair| order.cmp_user(user_key(&pair[0].largest), user_key(&pair[1].smallest)).is_ge())
    {
        true => Err(Error::new(
            Kind::Unsupported,
            "two of the files overlap: ingest them one after the other, the newest last",
        )),
        false => Ok(()),
    }
}
