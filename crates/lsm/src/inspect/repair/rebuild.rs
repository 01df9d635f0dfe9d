//! The state of a database without a MANIFEST, from its tables.
//!
//! A table says to which column family it belongs, and the order of its keys. Its range of keys and
//! its sequences are what is found in it. Blob files say to which family they belong.

use std::collections::BTreeMap;

use fs::DirEntry;
use rocksfmt::{
    BLOB_FOOTER_BYTES, BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobFileMeta, BlobFooter,
    BlobHeader, BlobRecord, ColumnFamily, Comparator, FileMeta, FileName, ManifestState,
    SEQUENCE_MAX,
};

use crate::error::{Error, Kind, Result};
use crate::inspect::check::Check;
use crate::inspect::repair::{Loss, MISSING_BLOB, Repair};
use crate::open::directory;
use crate::open::sequential::Sequential;
use crate::open::unnamed::NO_FAMILY;
use crate::stored_options::StoredOptions;
use crate::table::Table;

const DEFAULT: &str = "default";

/// The families found so far.
type Families = BTreeMap<u32, ColumnFamily>;

impl Repair<'_> {
    /// What was read of a file; `None` if it is damaged, which is noted as a loss.
    fn unless_damaged<T>(&mut self, entry: &DirEntry, read: Result<T>) -> Result<Option<T>> {
        match read {
            Ok(read) => Ok(Some(read)),
            Err(error) if error.kind() == Kind::Corruption => {
                self.lose(Loss {
                    file: entry.name.clone(),
                    what: error.to_string(),
                    ..Loss::default()
                });
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Reads all tables and blob files, and describes them as a state with everything in level 0.
    /// A MANIFEST that lost its end has column families (`known`).
    pub(super) async fn state_of_files(
        &mut self,
        known: Option<&ManifestState>,
    ) -> Result<ManifestState> {
        let mut families = Families::new();
        let default = comparator_name(&self.stored_options, DEFAULT);
        families.insert(0, family(0, DEFAULT, &default));
        for known in known.iter().flat_map(|state| state.column_families.values()) {
            families.insert(known.id, family(known.id, &known.name, &known.comparator_name));
        }
        let entries = self.entries.clone();
        for entry in &entries {
            let Some(FileName::Sst(number)) = FileName::parse(&entry.name) else { continue };
            let added = self.table(entry, number, &mut families).await;
            self.unless_damaged(entry, added)?;
            self.done += entry.size;
        }
        for entry in &entries {
            let Some(FileName::Blob(number)) = FileName::parse(&entry.name) else { continue };
            let read = self.blob_file(entry, number).await;
            if let Some((id, blob)) = self.unless_damaged(entry, read)?
                && let Some(family) = families.get_mut(&id)
            {
                family.blob_files.insert(number, blob);
            }
        }
        self.note_missing_blobs(&families);
        self.drop_families(&mut families);
        self.families_of_options(&mut families);
        let metas = families.values().flat_map(|family| family.files().map(|(_, meta)| meta));
        let last_sequence = metas.map(|meta| meta.largest_sequence).max().unwrap_or(0);
        let id = directory::identity(&self.dir).await?;
        Ok(ManifestState {
            max_column_family: families.keys().copied().max().unwrap_or(0),
            column_families: families,
            next_file_number: self.next_number,
            last_sequence,
            min_log_number_to_keep: 0,
            db_id: Some(id).filter(|id| !id.is_empty()),
            keys: None,
            wals: BTreeMap::new(),
            ours: true,
        })
    }

    /// Reads a table, and adds it to its family.
    async fn table(
        &mut self,
        entry: &DirEntry,
        number: u64,
        families: &mut Families,
    ) -> Result<()> {
        let properties = Table::properties(self.core, &self.dir, &entry.name).await?;
        let comparator = Comparator::from_name(&properties.comparator);
        let comparator = comparator.map_err(|e| Error::format(&entry.name, &e))?;
        // The sequence of an ingested table is in the MANIFEST that is lost.
        let ingested = properties.external_version.is_some();
        let largest_sequence = match ingested {
            true => properties.external_sequence.unwrap_or(0),
            false => SEQUENCE_MAX,
        };
        let meta = FileMeta { number, largest_sequence, ..FileMeta::of_size(entry.size) };
        let total = self.total;
        let mut check = Check::new(self.core, &self.dir, total, &mut *self.progress);
        check.progress_to(self.done);
        let seen = check.table(&entry.name, &meta, comparator, None).await?;
        let damages = check.report.damages;
        let oldest_blob_file = seen.oldest_blob_file();
        for (&file, references) in &seen.blob_files {
            *self.references.entry(file).or_default() += references;
        }
        let (Some((smallest_sequence, largest_sequence)), false) =
            (seen.sequences, seen.smallest.is_empty())
        else {
            return match damages.first() {
                Some(damage) => Err(Error::new(Kind::Corruption, damage.what.clone())),
                // It is empty.
                None => Ok(()),
            };
        };
        self.report.damages.extend(damages);
        let id = match properties.column_family_id {
            NO_FAMILY => 0,
            id => u32::try_from(id).map_err(|_| {
                let text = format!("{}: impossible column family {id}", entry.name);
                Error::new(Kind::Corruption, text)
            })?,
        };
        let name = properties.get(b"rocksdb.column.family.name").unwrap_or_default();
        let name = match (id, String::from_utf8_lossy(name)) {
            (0, _) => DEFAULT.to_owned(),
            (_, name) if name.is_empty() => format!("column-family-{id}"),
            (_, name) => name.into_owned(),
        };
        let family = families.entry(id).or_insert_with(|| family(id, &name, comparator.name()));
        if family.files().next().is_none() && id == 0 {
            comparator.name().clone_into(&mut family.comparator_name);
        }
        if family.comparator_name != comparator.name() {
            let text = format!(
                "{} is in the order of {}, other tables of column family {} in that of {}",
                entry.name,
                comparator.name(),
                family.name,
                family.comparator_name
            );
            return Err(Error::new(Kind::Unsupported, text));
        }
        family.levels[0].push(FileMeta {
            smallest: seen.smallest,
            largest: seen.largest,
            smallest_sequence,
            largest_sequence,
            oldest_blob_file,
            ..meta
        });
        if ingested && largest_sequence == 0 {
            self.report.warnings.push(format!(
                "{}: an ingested table whose age is lost: its entries count as the oldest",
                entry.name
            ));
        }
        Ok(())
    }

    /// Notes the blob files that are missing, although tables refer to them.
    fn note_missing_blobs(&mut self, families: &Families) {
        for (number, references) in std::mem::take(&mut self.references) {
            let file = FileName::Blob(number).to_string();
            let is_there = families.values().any(|family| family.blob_files.contains_key(&number));
            // A damaged one is noted already.
            if number == 0 || is_there || self.report.lost.iter().any(|loss| loss.file == file) {
                continue;
            }
            let what = MISSING_BLOB.to_owned();
            self.lose(Loss { file, what, entries: Some(references), ..Loss::default() });
        }
    }

    /// A blob file's family, and its whole records.
    async fn blob_file(&self, entry: &DirEntry, number: u64) -> Result<(u32, BlobFileMeta)> {
        let name = &entry.name;
        let io = |e: std::io::Error| Error::io(name, &e);
        let shared = self.dir.open(name).await.map_err(io)?;
        let mut file = Sequential::new(self.core.attach(&shared));
        let short = || Error::new(Kind::Corruption, format!("{name}: no header"));
        if shared.size() < BLOB_HEADER_BYTES as u64 {
            return Err(short());
        }
        let header = file.bytes(0, BLOB_HEADER_BYTES).await.map_err(io)?;
        let header = BlobHeader::parse(&header).map_err(|e| Error::format(name, &e))?;
        let mut blob = BlobFileMeta {
            number,
            total_count: 0,
            total_bytes: 0,
            garbage_count: 0,
            garbage_bytes: 0,
        };
        let mut offset = BLOB_HEADER_BYTES as u64;
        while shared.size() - offset >= BLOB_RECORD_HEADER_BYTES as u64 {
            let head = file.bytes(offset, BLOB_RECORD_HEADER_BYTES).await.map_err(io)?;
            let Ok(record) = BlobRecord::parse(&head) else { break };
            let len = record.record_len();
            if len > shared.size() - offset {
                break;
            }
            offset += len;
            blob.total_count += 1;
            blob.total_bytes += len;
            if blob.total_count.is_multiple_of(256) {
                self.core.checkpoint().await;
            }
        }
        // We wrote it, and a crash left it open: the next opening for writing ends it.
        let reserved = BlobFileMeta::reserved(number, shared.size());
        if let Some(at) = shared.size().checked_sub(BLOB_FOOTER_BYTES as u64)
            && blob.total_count < reserved.total_count
            && let Ok(footer) =
                BlobFooter::parse(&file.bytes(at, BLOB_FOOTER_BYTES).await.map_err(io)?)
            && footer.count == reserved.total_count
        {
            blob = reserved;
        }
        Ok((header.column_family_id, blob))
    }

    /// Drops the tables of families that are not in the OPTIONS file, or whose name a later family
    /// has: these were dropped.
    fn drop_families(&mut self, families: &mut Families) {
        let file =
            self.stored_options.file.as_ref().filter(|file| file.rocksdb_version().is_some());
        let named: Option<Vec<String>> =
            file.map(|file| file.column_family_names().map(str::to_owned).collect());
        let all: Vec<(u32, String)> =
            families.values().map(|family| (family.id, family.name.clone())).collect();
        for (id, name) in all.iter().filter(|(id, _)| *id != 0) {
            let is_listed = named.as_ref().is_none_or(|named| named.contains(name));
            if is_listed && !all.iter().any(|(other, same)| same == name && other > id) {
                continue;
            }
            let Some(family) = families.remove(id) else { continue };
            let numbers: Vec<String> =
                family.files().map(|(_, meta)| FileName::Sst(meta.number).to_string()).collect();
            self.report.warnings.push(format!(
                "column family {name} was dropped: {} are not used",
                numbers.join(", ")
            ));
        }
    }

    /// Adds the families that have no table but are in the OPTIONS file, under new ids: writes to
    /// them in the logs cannot be told from those to dropped families.
    fn families_of_options(&mut self, families: &mut Families) {
        let Some(file) = &self.stored_options.file else { return };
        let names: Vec<String> = file.column_family_names().map(str::to_owned).collect();
        for name in names {
            if families.values().any(|family| family.name == name) {
                continue;
            }
            let id = families.keys().copied().max().unwrap_or(0).saturating_add(1000);
            let comparator = comparator_name(&self.stored_options, &name);
            families.insert(id, family(id, &name, &comparator));
            self.report.warnings.push(format!(
                "column family {name} has no table: it is empty now, and what the write-ahead \
                 logs may have of it is lost"
            ));
        }
    }
}

fn family(id: u32, name: &str, comparator: &str) -> ColumnFamily {
    ColumnFamily {
        id,
        name: name.to_owned(),
        comparator_name: comparator.to_owned(),
        log_number: 0,
        levels: vec![Vec::new()],
        blob_files: BTreeMap::new(),
        timestamps_persisted: true,
        has_low_timestamp: false,
    }
}

fn comparator_name(options: &StoredOptions, family: &str) -> String {
    let said = options.family(family, "comparator");
    said.unwrap_or(Comparator::Bytewise.name()).to_owned()
}
