//! Making a backup.
//!
//! 1. The MANIFEST is copied; its copy tells which tables and blob files there are.
//! 2. Each of these that no backup has is copied to `shared_checksum`, under a temporary name
//!    first. A file that an interrupted attempt has left is taken if it has the checksum of the
//!    original.
//! 3. Logs, OPTIONS and CURRENT are copied. All names are made durable, and then `meta/ID`.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use fs::{Dir, Mode};
use rocksfmt::FileName;

use crate::copy::backup::meta::{Backup, BackupFile};
use crate::copy::backup::{All, BackupDir, META, PRIVATE, SHARED_CHECKSUM};
use crate::copy::contents::{Contents, Source};
use crate::copy::transfer::{Sum, Transfer};
use crate::error::{Error, Kind, Result};
use crate::file_list::FileList;
use crate::mutant::mutant;
use crate::open::recover;
use crate::table::Table;

/// A backup that was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CreatedBackup {
    /// Its number.
    pub id: u32,
    /// The last sequence number in it.
    pub sequence: u64,
    /// Its files.
    pub files: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Bytes of files that earlier backups have, or an interrupted one has left.
    pub shared_bytes: u64,
}

impl BackupDir {
    /// Makes a backup of the files of a list. Creates the directory, in an existing one. The backup
    /// is whole and durable when this returns; after an error (unless it says that this is unknown)
    /// or an interruption there is none, and the next call takes over what was copied. Suspends for
    /// the disk.
    ///
    /// # Errors
    /// [`Kind::Locked`] if another process changes the backups; [`Kind::Unsupported`] if the
    /// directory is that of a database, or the newest backup is of another database (see
    /// [`BackupDir::of_any_database`]); a missing file; the disk's errors.
    pub async fn create(
        &self,
        list: &FileList,
        transfer: &mut Transfer<'_>,
    ) -> Result<CreatedBackup> {
        self.refuse_database().await?;
        self.make_dirs().await?;
        let _lock = self.lock().await?;
        let all = self.all().await?;
        let id = all
            .newest()
            .checked_add(1)
            .ok_or_else(|| Error::new(Kind::Unsupported, "no number is left for another backup"))?;
        let within = self.within();
        within.forget(id).await?;
        let mut of_within = CreatedBackup::default();
        if let Some(list) = &list.within {
            within.make_dirs().await?;
            of_within = within.make(id, &within.all().await?, list, transfer).await?;
        }
        let made = self.make(id, &all, list, transfer).await?;
        Ok(CreatedBackup {
            files: made.files + of_within.files,
            bytes: made.bytes + of_within.bytes,
            shared_bytes: made.shared_bytes + of_within.shared_bytes,
            ..made
        })
    }

    async fn make_dirs(&self) -> Result<()> {
        self.make_dir(&self.path).await?;
        for name in [META, PRIVATE, SHARED_CHECKSUM] {
            self.make_dir(&self.path.join(name)).await?;
        }
        Ok(())
    }

    /// Removes the description of a backup, durably, if there is one: a crash or another program
    /// has left it.
    async fn forget(&self, id: u32) -> Result<()> {
        match self.dir(META).remove(&id.to_string()).await {
            Ok(()) => self.sync(META).await,
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(self.failed(&format!("{META}/{id}"), &error)),
        }
    }

    /// Makes a backup beside `all` others. The directories are there, and locked.
    async fn make(
        &self,
        id: u32,
        all: &All,
        list: &FileList,
        transfer: &mut Transfer<'_>,
    ) -> Result<CreatedBackup> {
        // An interrupted deletion may have left a description that a power cut brings back.
        self.sync(META).await?;
        self.remove_private(id).await?;
        self.make_dir(self.private(id).path()).await?;
        let shared = all.backups.iter().flat_map(|backup| &backup.files);
        let known = shared.filter_map(|file| Some((file.path.clone(), file.crc32c?))).collect();
        let mut making = Making {
            to: self,
            from: Dir::new(&self.core, &list.directory),
            known,
            there: self.files_in(SHARED_CHECKSUM).await?,
            newest: all.backups.last(),
            files: BTreeMap::new(),
            made: CreatedBackup { id, sequence: list.sequence, ..CreatedBackup::default() },
        };
        making.all(list, transfer).await?;
        let Making { files, made, .. } = making;
        if !mutant("shared_names_are_not_synced") {
            self.sync(SHARED_CHECKSUM).await?;
        }
        self.sync(&format!("{PRIVATE}/{id}")).await?;
        self.publish(Backup {
            id,
            time: self.core.unix_time_ms() / 1000,
            sequence: list.sequence,
            has_within: list.within.is_some(),
            files: files.into_values().collect(),
        })
        .await?;
        Ok(made)
    }

    /// Refuses the directory of a database.
    async fn refuse_database(&self) -> Result<()> {
        let entries = self.core.list(&self.path).await.unwrap_or_default();
        match entries.iter().any(|entry| entry.name == "CURRENT") {
            true => {
                let what = format!(
                    "{} is the directory of a database: name another one for its backups",
                    self.path.display()
                );
                Err(Error::new(Kind::Unsupported, what))
            }
            false => Ok(()),
        }
    }

    /// Writes the description of a backup.
    async fn publish(&self, backup: Backup) -> Result<()> {
        let (id, text) = (backup.id, backup.render());
        let name = format!("{META}/{id}");
        let draft = format!(".{id}.tmp");
        let meta = self.dir(META);
        let written = async {
            let file = meta.create_or_empty(&draft, Mode::Buffered).await?;
            let mut writer = fs::FileWriter::new(&self.core.attach(&file)).await?;
            writer.append(text.as_bytes()).await?;
            writer.finish().await?;
            meta.rename(&draft, &id.to_string()).await
        };
        written.await.map_err(|e| self.failed(&name, &e))?;
        meta.sync().await.map_err(|e| {
            let what = format!(
                "{}: {e}; backup {id} is whole, but it is unknown whether it will be there after a \
                 power cut",
                self.path.join(&name).display()
            );
            Error::new(Kind::Io, what)
        })
    }
}

/// A backup that is being made.
struct Making<'a> {
    to: &'a BackupDir,
    /// The directory of the database.
    from: Dir,
    /// The checksums of the files of all backups, by path.
    known: BTreeMap<String, u32>,
    /// The files in `shared_checksum`, with their lengths.
    there: BTreeMap<String, u64>,
    newest: Option<&'a Backup>,
    /// The files of this backup, by path.
    files: BTreeMap<String, BackupFile>,
    made: CreatedBackup,
}

impl Making<'_> {
    async fn all(&mut self, list: &FileList, transfer: &mut Transfer<'_>) -> Result<()> {
        let private = self.to.private(self.made.id);
        let manifest = FileName::Manifest(list.manifest.number).to_string();
        let bytes = self.private(&manifest, list.manifest.bytes, transfer).await?;
        let contents = Contents::of(&self.to.core, list, &private).await?;
        if !self.to.any_database {
            self.refuse_other(contents.db_id.as_deref()).await?;
        }
        transfer.expect(bytes + contents.bytes());
        for table in &contents.tables {
            let properties = Table::properties(&self.to.core, &self.from, &table.name).await?;
            self.shared(table, "sst", properties.session(), transfer).await?;
        }
        for blob in &contents.blobs {
            self.shared(blob, "blob", None, transfer).await?;
        }
        if let Some(options) = &contents.options {
            self.private(&options.name, None, transfer).await?;
        }
        for log in &list.logs {
            self.private(&FileName::Wal(log.number).to_string(), log.bytes, transfer).await?;
        }
        let current = format!("{manifest}\n");
        let written = private.replace_small("CURRENT", current.as_bytes()).await;
        written.map_err(|e| Error::io(private.path().join("CURRENT").display(), &e))?;
        let crc32c = rocksfmt::crc32c(current.as_bytes());
        self.add(self.private_path("CURRENT"), Sum { bytes: current.len() as u64, crc32c });
        Ok(())
    }

    /// Refuses a database with another identity than the newest backup. Either may be unknown.
    async fn refuse_other(&self, db_id: Option<&str>) -> Result<()> {
        let (Some(newest), Some(db_id)) = (self.newest, db_id) else { return Ok(()) };
        let names = newest.files.iter().map(BackupFile::name_in_database);
        let manifest = names
            .into_iter()
            .find(|name| matches!(FileName::parse(name), Some(FileName::Manifest(_))));
        let Some(manifest) = manifest else { return Ok(()) };
        let dir = self.to.private(newest.id);
        // If it is damaged, a verification says so.
        let Ok(state) = recover::manifest(&self.to.core, &dir, &manifest).await else {
            return Ok(());
        };
        match state.db_id {
            Some(other) if other != db_id => {
                self.to.remove_private(self.made.id).await?;
                let what = format!(
                    "{}: backup {} is of another database, {other}, and this one is {db_id}",
                    self.to.path.display(),
                    newest.id
                );
                Err(Error::new(Kind::Unsupported, what))
            }
            _ => Ok(()),
        }
    }

    fn private_path(&self, name: &str) -> String {
        format!("{PRIVATE}/{}/{name}", self.made.id)
    }

    fn add(&mut self, path: String, sum: Sum) {
        self.made.files += 1;
        self.made.bytes += sum.bytes;
        let (crc32c, bytes) = (Some(sum.crc32c), Some(sum.bytes));
        self.files.insert(path.clone(), BackupFile { path, crc32c, bytes });
    }

    /// Copies a file that only this backup has. Returns its length.
    async fn private(
        &mut self,
        name: &str,
        bytes: Option<u64>,
        transfer: &mut Transfer<'_>,
    ) -> Result<u64> {
        let to = self.to.private(self.made.id);
        let sum = transfer.copy((&self.from, name), bytes, (&to, name)).await?;
        self.add(self.private_path(name), sum);
        Ok(sum.bytes)
    }

    /// Takes or copies a file that other backups may have. Files are the same if they have the same
    /// name: `session` and number, or number and checksum; and the same length.
    async fn shared(
        &mut self,
        file: &Source,
        extension: &str,
        session: Option<&str>,
        transfer: &mut Transfer<'_>,
    ) -> Result<()> {
        let Source { number, bytes, .. } = *file;
        let mut original = None;
        let of_writer = match session {
            Some(session) => format!("s{session}"),
            None => {
                let sum = transfer.sum_part(&self.from, &file.name, file.prefix()).await?;
                original.insert(sum).crc32c.to_string()
            }
        };
        let name = format!("{number:06}_{of_writer}_{bytes}.{extension}");
        let path = format!("{SHARED_CHECKSUM}/{name}");
        let to = self.to.dir(SHARED_CHECKSUM);
        if self.there.get(&name) == Some(&bytes) {
            if let Some(&crc32c) = self.known.get(&path) {
                self.take(path, Sum { bytes, crc32c }, transfer);
                return Ok(());
            }
            let source = match original {
                Some(sum) => sum,
                None => transfer.sum_part(&self.from, &file.name, file.prefix()).await?,
            };
            if transfer.sum(&to, &name).await? == source {
                self.take(path, source, transfer);
                return Ok(());
            }
        }
        let draft = format!(".{name}.tmp");
        let sum =
            transfer.copy_part((&self.from, &file.name), file.prefix(), (&to, &draft)).await?;
        if sum.bytes != bytes || original.is_some_and(|original| original != sum) {
            let place = self.from.path().join(&file.name);
            let what = format!("{}: changed while it was copied", place.display());
            return Err(Error::new(Kind::Corruption, what));
        }
        let renamed = to.rename(&draft, &name).await;
        renamed.map_err(|e| Error::io(to.path().join(&name).display(), &e))?;
        self.add(path, sum);
        Ok(())
    }

    /// Adds a file that is there.
    fn take(&mut self, path: String, sum: Sum, transfer: &mut Transfer<'_>) {
        self.made.shared_bytes += sum.bytes;
        transfer.skip(sum.bytes);
        self.add(path, sum);
    }
}
