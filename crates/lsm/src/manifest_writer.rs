//! Appending to the MANIFEST. A directory that is opened for writing gets a new one, which begins
//! with everything that is known; each later change is one record, durable before it counts.

use fs::{Dir, FileWriter, Mode};
use reactor::Core;
use rocksfmt::{FileName, LogWriter, ManifestState, VersionEdit};

use crate::error::{Error, Kind, Result};

/// See the module text.
pub(crate) struct ManifestWriter {
    name: String,
    file: FileWriter,
    log: LogWriter,
    record: Vec<u8>,
    /// An append failed: nobody knows what the file ends in.
    broken: bool,
}

impl ManifestWriter {
    /// Writes a new MANIFEST with all that `state` says and makes it the current one. Suspends
    /// for the disk.
    ///
    /// # Errors
    /// The device's.
    pub async fn create(
        core: &Core,
        dir: &Dir,
        number: u64,
        state: &ManifestState,
        next_file_number: u64,
    ) -> Result<ManifestWriter> {
        let name = FileName::Manifest(number).to_string();
        let io = |e: std::io::Error| Error::io(&name, &e);
        // Others may have to read it after a crash: buffered, so that it is never longer than it says.
        let file = core.attach(&dir.create_or_empty(&name, Mode::Buffered).await.map_err(io)?);
        let file = FileWriter::new(&file).await.map_err(io)?;
        let mut writer = ManifestWriter {
            name: name.clone(),
            file,
            log: LogWriter::new(None, 0),
            record: Vec::new(),
            broken: false,
        };
        for edit in snapshot(state, next_file_number) {
            writer.put(&edit).await?;
        }
        writer.sync().await?;
        // The MANIFEST's own name must last before CURRENT says it; the replacement syncs both.
        dir.sync().await.map_err(io)?;
        let current = format!("{name}\n");
        dir.write_small_atomically("CURRENT", current.as_bytes())
            .await
            .map_err(|e| Error::io("CURRENT", &e))?;
        Ok(writer)
    }

    /// Adds a record and makes it durable; suspends for the disk.
    ///
    /// # Errors
    /// The device's; after one, every later call fails.
    pub async fn append(&mut self, edit: &VersionEdit) -> Result<()> {
        self.put(edit).await?;
        self.sync().await
    }

    async fn put(&mut self, edit: &VersionEdit) -> Result<()> {
        if std::mem::replace(&mut self.broken, true) {
            return Err(Error::new(
                Kind::Io,
                format!("{}: an earlier write of it failed: open the database again", self.name),
            ));
        }
        self.record.clear();
        self.log.append(&edit.encode(), &mut self.record);
        self.file.append(&self.record).await.map_err(|e| Error::io(&self.name, &e))?;
        self.broken = false;
        Ok(())
    }

    async fn sync(&mut self) -> Result<()> {
        self.broken = true;
        self.file.sync().await.map_err(|e| Error::io(&self.name, &e))?;
        self.broken = false;
        Ok(())
    }
}

/// The records that a new MANIFEST begins with. A record that adds a column family changes no
/// files: RocksDB would ignore them.
fn snapshot(state: &ManifestState, next_file_number: u64) -> Vec<VersionEdit> {
    let mut edits = vec![VersionEdit {
        db_id: state.db_id.clone(),
        next_file_number: Some(next_file_number),
        max_column_family: Some(state.max_column_family),
        last_sequence: Some(state.last_sequence),
        min_log_number_to_keep: Some(state.min_log_number_to_keep).filter(|&number| number > 0),
        ..VersionEdit::default()
    }];
    for family in state.column_families.values() {
        let add = family.id != 0;
        edits.push(VersionEdit {
            column_family: family.id,
            column_family_add: add.then(|| family.name.clone()),
            comparator: Some(family.comparator_name.clone()),
            log_number: Some(family.log_number),
            ..VersionEdit::default()
        });
        edits.push(VersionEdit {
            column_family: family.id,
            log_number: Some(family.log_number),
            new_files: family.files().map(|(level, file)| (level as u32, file.clone())).collect(),
            new_blob_files: family.live_blob_files().cloned().collect(),
            ..VersionEdit::default()
        });
    }
    edits
}
