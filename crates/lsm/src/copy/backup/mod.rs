//! Backups: many states of a database in one directory, each file once, in the layout of RocksDB's
//! BackupEngine, so that either program restores and continues what the other has made.
//!
//! ```text
//! meta/ID                                        which files backup ID has (`meta.rs`)
//! private/ID/                                    CURRENT, MANIFEST, OPTIONS and logs
//! shared_checksum/NUMBER_sSESSION_BYTES.sst      a table, by the process that wrote it
//! shared_checksum/NUMBER_CRC32C_BYTES.EXT        a table of a writer that does not name itself,
//!                                                or a blob file
//! ```
//!
//! The database within that of a backup ([`WITHIN`]) has backups of its own, in a directory of that
//! name with the same layout and with the same numbers. So RocksDB restores a backup without it,
//! and does not know of its files. The description of a backup says that there is one (`meta.rs`);
//! one within of which no description speaks is ignored.
//!
//! - A file is there under its name only when it is complete and durable, and `meta/ID` only when
//!   all files of the backup are. So a crash leaves no backup or a whole one, and files that the
//!   next attempt takes after it has compared their checksums.
//! - The backup of the database within is made first.
//! - A deletion removes `meta/ID` first, durably, and then the files that no backup has.
//! - `LOCK` keeps two processes from changing the directory at the same time. RocksDB has no such
//!   lock.

pub(crate) mod create;
pub(crate) mod meta;
pub(crate) mod restore;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use fs::{Dir, LockGuard};
use reactor::Core;

use crate::copy::backup::meta::{Backup, BackupFile};
use crate::copy::transfer::Transfer;
use crate::error::{Error, Kind, Result, lacks_resources};
use crate::open::within::WITHIN;

/// The longest description of a backup, in bytes: almost a million files.
const META_BYTES_MAX: usize = 64 << 20;
const META: &str = "meta";
const PRIVATE: &str = "private";
const SHARED: &str = "shared";
const SHARED_CHECKSUM: &str = "shared_checksum";

/// A directory of backups.
pub struct BackupDir {
    core: Core,
    path: PathBuf,
    any_database: bool,
}

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifiedBackup {
    /// Files read.
    pub files: u64,
    /// Bytes read.
    pub bytes: u64,
    /// What is wrong, with the file's path.
    pub damages: Vec<String>,
}

/// The backups of a directory, and the descriptions that cannot be read.
pub(crate) struct All {
    pub backups: Vec<Backup>,
    pub damaged: Vec<(u32, Error)>,
}

impl All {
    /// The largest number of a backup.
    fn newest(&self) -> u32 {
        let damaged = self.damaged.iter().map(|(id, _)| *id);
        self.backups.iter().map(|backup| backup.id).chain(damaged).max().unwrap_or(0)
    }
}

impl BackupDir {
    /// The backups in a directory. A missing directory shows at the first use.
    pub fn new(core: &Core, path: &Path) -> BackupDir {
        BackupDir { core: core.clone(), path: path.to_owned(), any_database: false }
    }

    /// Also adds backups of another database than that of the newest backup.
    #[must_use]
    pub fn of_any_database(self) -> BackupDir {
        BackupDir { any_database: true, ..self }
    }

    /// The backups of the databases within.
    fn within(&self) -> BackupDir {
        let path = self.path.join(WITHIN);
        BackupDir { core: self.core.clone(), path, any_database: true }
    }

    fn dir(&self, name: &str) -> Dir {
        Dir::new(&self.core, &self.path.join(name))
    }

    fn root(&self) -> Dir {
        Dir::new(&self.core, &self.path)
    }

    fn private(&self, id: u32) -> Dir {
        self.dir(&format!("{PRIVATE}/{id}"))
    }

    fn failed(&self, name: &str, error: &std::io::Error) -> Error {
        Error::io(self.path.join(name).display(), error)
    }

    async fn lock(&self) -> Result<LockGuard> {
        self.root().lock_exclusive("LOCK").await.map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => {
                let what =
                    format!("{}: another process changes these backups", self.path.display());
                Error::new(Kind::Locked, what)
            }
            _ => self.failed("LOCK", &error),
        })
    }

    /// Makes a directory, durably, unless it exists.
    async fn make_dir(&self, path: &Path) -> Result<()> {
        match self.core.create_dir(path).await {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
            Err(error) => {
                return Err(Error::io(format_args!("cannot create {}", path.display()), &error));
            }
            Ok(()) => {}
        }
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let synced = self.core.sync_dir(parent.unwrap_or(Path::new("."))).await;
        synced.map_err(|e| Error::io(path.display(), &e))
    }

    async fn sync(&self, name: &str) -> Result<()> {
        self.dir(name).sync().await.map_err(|e| self.failed(name, &e))
    }

    /// The names and lengths of the files in a directory. A missing directory has none.
    async fn files_in(&self, name: &str) -> Result<BTreeMap<String, u64>> {
        match self.dir(name).list().await {
            Ok(entries) => {
                let files = entries.into_iter().filter(|entry| !entry.is_dir);
                Ok(files.map(|entry| (entry.name, entry.size)).collect())
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(error) => Err(self.failed(name, &error)),
        }
    }

    pub(crate) async fn all(&self) -> Result<All> {
        let mut all = All { backups: Vec::new(), damaged: Vec::new() };
        let meta = self.dir(META);
        for (name, bytes) in self.files_in(META).await? {
            let Some(id) = id_of(&name) else { continue };
            if bytes > META_BYTES_MAX as u64 {
                let what =
                    format!("meta/{id}: {bytes} bytes long, expected at most {META_BYTES_MAX}");
                all.damaged.push((id, Error::new(Kind::Corruption, what)));
                continue;
            }
            let read = match meta.read_small(&name, META_BYTES_MAX).await {
                Ok(text) => Backup::parse(id, &text),
                Err(e) if lacks_resources(&e) => {
                    return Err(self.failed(&format!("{META}/{name}"), &e));
                }
                Err(e) => Err(self.failed(&format!("{META}/{name}"), &e)),
            };
            match read {
                Ok(backup) => all.backups.push(backup),
                Err(error) => all.damaged.push((id, error)),
            }
        }
        all.backups.sort_by_key(|backup| backup.id);
        Ok(all)
    }

    /// The backups, oldest first, and the descriptions that cannot be read. Suspends for the disk.
    ///
    /// # Errors
    /// [`Kind::NoDatabase`] if there is no directory of backups; the disk's errors.
    pub async fn list(&self) -> Result<(Vec<Backup>, Vec<Error>)> {
        self.check_exists().await?;
        let All { backups, damaged } = self.all_with_within().await?;
        Ok((backups, damaged.into_iter().map(|(_, error)| error).collect()))
    }

    /// All backups, with the files of the databases within.
    async fn all_with_within(&self) -> Result<All> {
        let mut all = self.all().await?;
        let within = self.within().all().await?;
        let mut files: BTreeMap<u32, Result<Vec<BackupFile>>> = BTreeMap::new();
        files.extend(within.backups.into_iter().map(|backup| (backup.id, Ok(backup.files))));
        files.extend(within.damaged.into_iter().map(|(id, error)| (id, Err(error))));
        for mut backup in std::mem::take(&mut all.backups) {
            let id = backup.id;
            let missing =
                || Err(Error::new(Kind::Corruption, format!("{META}/{id}: it is missing")));
            let files = match backup.has_within {
                true => files.remove(&id).unwrap_or_else(missing),
                false => Ok(Vec::new()),
            };
            match files {
                Ok(files) => {
                    backup.files.extend(files.into_iter().map(|file| {
                        let path = format!("{WITHIN}/{}", file.path);
                        BackupFile { path, ..file }
                    }));
                    all.backups.push(backup);
                }
                Err(error) => {
                    all.damaged.push((id, Error::new(error.kind(), format!("{WITHIN}/{error}"))));
                }
            }
        }
        Ok(all)
    }

    async fn check_exists(&self) -> Result<()> {
        match self.dir(META).list().await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let what = format!("{}: no backups here (there is no meta/)", self.path.display());
                Err(Error::new(Kind::NoDatabase, what))
            }
            Err(error) => Err(self.failed(META, &error)),
            Ok(_) => Ok(()),
        }
    }

    async fn check_have(&self, ids: &[u32]) -> Result<()> {
        let names = self.files_in(META).await?;
        match ids.iter().find(|id| !names.contains_key(&id.to_string())) {
            Some(missing) => {
                let what = format!("{}: there is no backup {missing}", self.path.display());
                Err(Error::new(Kind::NoDatabase, what))
            }
            None => Ok(()),
        }
    }

    /// A backup; the newest one without an `id`.
    pub(crate) async fn find(&self, id: Option<u32>) -> Result<Backup> {
        self.check_exists().await?;
        let All { mut backups, damaged } = self.all_with_within().await?;
        let place = self.path.display();
        match id {
            // Not silently an older one.
            None => match (backups.pop(), damaged.into_iter().max_by_key(|(id, _)| *id)) {
                (Some(newest), None) => Ok(newest),
                (Some(newest), Some((id, _))) if newest.id > id => Ok(newest),
                (_, Some((_, error))) => Err(error),
                (None, None) => {
                    Err(Error::new(Kind::NoDatabase, format!("{place}: there is no backup")))
                }
            },
            Some(id) => {
                if let Some((_, error)) = damaged.into_iter().find(|(other, _)| *other == id) {
                    return Err(error);
                }
                let found = backups.into_iter().find(|backup| backup.id == id);
                found.ok_or_else(|| {
                    Error::new(Kind::NoDatabase, format!("{place}: there is no backup {id}"))
                })
            }
        }
    }

    /// Reads all files of a backup (the newest one without an `id`) and compares their lengths and
    /// checksums. Suspends for the disk.
    ///
    /// # Errors
    /// [`Kind::NoDatabase`] if there is no such backup; damage of its description. Damage of its
    /// files is in the result.
    pub async fn verify(
        &self,
        id: Option<u32>,
        transfer: &mut Transfer<'_>,
    ) -> Result<VerifiedBackup> {
        let backup = self.find(id).await?;
        let mut lengths = Vec::new();
        let mut done = VerifiedBackup::default();
        for file in &backup.files {
            let (dir, name) = file.place();
            let opened = self.dir(dir).open(name).await;
            let length = opened.map(|opened| opened.size());
            match &length {
                Err(error) => done.damages.push(format!("{}: {error}", file.path)),
                Ok(bytes) => transfer.expect(*bytes),
            }
            lengths.push(length.ok());
        }
        for (file, bytes) in backup.files.iter().zip(lengths) {
            let Some(bytes) = bytes else { continue };
            done.files += 1;
            done.bytes += bytes;
            if let Some(expected) = file.bytes
                && expected != bytes
            {
                let what = format!("{}: {bytes} bytes long, expected {expected}", file.path);
                done.damages.push(what);
                transfer.skip(bytes);
                continue;
            }
            let (dir, name) = file.place();
            let found = transfer.sum(&self.dir(dir), name).await;
            transfer.skip(bytes);
            match found {
                Err(error) => done.damages.push(error.to_string()),
                Ok(found) if file.crc32c.is_none_or(|expected| expected == found.crc32c) => {}
                Ok(found) => done.damages.push(format!(
                    "{}: the checksum is {}, expected {}",
                    file.path,
                    found.crc32c,
                    file.crc32c.unwrap_or(0)
                )),
            }
        }
        Ok(done)
    }

    /// Deletes backups and all files that no other backup has. Returns the bytes that were freed.
    /// Suspends for the disk.
    ///
    /// # Errors
    /// [`Kind::NoDatabase`] if there is no such backup: then none is deleted; the disk's errors.
    pub async fn delete(&self, ids: &[u32]) -> Result<u64> {
        self.check_exists().await?;
        // Before LOCK is made, and again when no other process deletes any.
        self.check_have(ids).await?;
        let _lock = self.lock().await?;
        self.check_have(ids).await?;
        for id in &BTreeSet::from_iter(ids) {
            let removed = self.dir(META).remove(&id.to_string()).await;
            removed.map_err(|e| self.failed(&format!("{META}/{id}"), &e))?;
        }
        self.sync(META).await?;
        let mut freed = self.remove_unused().await?;
        let all = self.all().await?;
        let ids = all.backups.iter().filter(|backup| backup.has_within).map(|backup| backup.id);
        let ids: BTreeSet<u32> = ids.chain(all.damaged.iter().map(|(id, _)| *id)).collect();
        freed += self.within().keep_only(&ids).await?;
        Ok(freed)
    }

    /// Deletes all backups but these. Returns the bytes that were freed. The directory that this
    /// one is in is locked.
    async fn keep_only(&self, ids: &BTreeSet<u32>) -> Result<u64> {
        let names = self.files_in(META).await?;
        if names.is_empty() {
            return Ok(0);
        }
        for name in names.keys().filter(|name| id_of(name).is_some_and(|id| !ids.contains(&id))) {
            let removed = self.dir(META).remove(name).await;
            removed.map_err(|e| self.failed(&format!("{META}/{name}"), &e))?;
        }
        self.sync(META).await?;
        self.remove_unused().await
    }

    /// Keeps the newest `keep` backups and deletes the others, with all files that no backup has.
    /// Returns the numbers of those deleted, and the bytes that were freed. Suspends for the disk.
    ///
    /// # Errors
    /// The disk's.
    pub async fn purge(&self, keep: usize) -> Result<(Vec<u32>, u64)> {
        let (backups, _) = self.list().await?;
        let old = backups.len().saturating_sub(keep);
        let ids: Vec<u32> = backups[..old].iter().map(|backup| backup.id).collect();
        let freed = self.delete(&ids).await?;
        Ok((ids, freed))
    }

    /// Removes files that no backup has. Shared files stay as long as some description cannot be
    /// read. The directory is locked.
    async fn remove_unused(&self) -> Result<u64> {
        let all = self.all().await?;
        let used: BTreeSet<&str> = all
            .backups
            .iter()
            .flat_map(|backup| &backup.files)
            .map(|file| file.path.as_str())
            .collect();
        let mut freed = 0;
        for place in [SHARED, SHARED_CHECKSUM] {
            for (name, bytes) in self.files_in(place).await? {
                let is_used = used.contains(format!("{place}/{name}").as_str());
                if is_used || !(all.damaged.is_empty() || is_temporary(&name)) {
                    continue;
                }
                freed += bytes;
                let removed = self.dir(place).remove(&name).await;
                removed.map_err(|e| self.failed(&format!("{place}/{name}"), &e))?;
            }
        }
        for name in self.files_in(META).await?.into_keys().filter(|name| is_temporary(name)) {
            let removed = self.dir(META).remove(&name).await;
            removed.map_err(|e| self.failed(&format!("{META}/{name}"), &e))?;
        }
        let ids: BTreeSet<u32> = all.backups.iter().map(|backup| backup.id).collect();
        let damaged: BTreeSet<u32> = all.damaged.iter().map(|(id, _)| *id).collect();
        let entries = match self.dir(PRIVATE).list().await {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(freed),
            Err(error) => return Err(self.failed(PRIVATE, &error)),
        };
        for entry in entries.into_iter().filter(|entry| entry.is_dir) {
            let Some(id) = id_of(&entry.name) else { continue };
            if !ids.contains(&id) && !damaged.contains(&id) {
                freed += self.remove_private(id).await?;
            }
        }
        Ok(freed)
    }

    /// Removes the private files of a backup that does not exist. Returns their bytes.
    async fn remove_private(&self, id: u32) -> Result<u64> {
        let name = format!("{PRIVATE}/{id}");
        let dir = self.private(id);
        let mut freed = 0;
        for (file, bytes) in self.files_in(&name).await? {
            freed += bytes;
            dir.remove(&file).await.map_err(|e| self.failed(&format!("{name}/{file}"), &e))?;
        }
        match self.core.remove_dir(dir.path()).await {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.failed(&name, &error)),
            _ => Ok(freed),
        }
    }
}

/// The number of a backup, from the name of its description.
fn id_of(name: &str) -> Option<u32> {
    let is_number = name.bytes().all(|byte| byte.is_ascii_digit()) && !name.starts_with('0');
    is_number.then(|| name.parse().ok())?
}

/// Whether an unfinished file has this name.
fn is_temporary(name: &str) -> bool {
    name.ends_with(".tmp")
}
