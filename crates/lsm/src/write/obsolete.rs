//! Obsolete files: recycled, or removed in the background.
//!
//! - Tables that the MANIFEST no longer names become recycled tables (`recycled_tables.rs`) while
//!   there is room for them.
//! - A few obsolete logs are kept to be written over (`wal_writer.rs`). They are renamed to
//!   `NNNNNN.dbtmp`: a tool that repairs a directory takes every log for writes that are in no
//!   table, and RocksDB's repair would then find each of them twice and drop the tables.
//! - Everything else is removed, one file at a time. Some disks stall while they are told of free
//!   blocks (50 ms for 64 MiB were measured), so there are pauses in between, unless many files
//!   wait, or many bytes of blob files.
//!
//! Readers of a removed file still have it open. Files that remain after a crash or an error are
//! handled by the next opening.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::{Rc, Weak};

use fs::Dir;
use reactor::{Core, DirEntry};
use rocksfmt::{FileMeta, FileName, LOG_BLOCK_BYTES, is_recyclable_log};

use crate::mutant::mutant;
use crate::write::commit;
use crate::write::state::{Generation, WriteState};

/// Most recycled logs, including one that only a clearing may take.
const RECYCLED_LOGS_MAX: usize = 3;
/// The pause after a removal, as a multiple of its duration.
const REMOVAL_PAUSE: u64 = 3;
/// Longest pause, in nanoseconds.
const REMOVAL_PAUSE_MAX_NS: u64 = 500_000_000;
/// With this many files to be removed there is no pause: disks are finite.
const OBSOLETE_MANY: usize = 64;

/// Files that are obsolete.
#[derive(Default)]
pub(crate) struct ObsoleteFiles {
    /// Files that wait to be recycled or removed.
    waiting: RefCell<VecDeque<Obsolete>>,
    /// Bytes of the blob files among them, and of those that are to come.
    blobs: RefCell<BTreeMap<u64, u64>>,
    /// Recycled logs, as temporary files of these numbers.
    pub recycled_logs: RefCell<Vec<u64>>,
    /// While there are any, no obsolete file is recycled or removed.
    holds: Cell<usize>,
}

/// Keeps all files of the database under their names, until it is dropped or writing ends. A copy
/// of the database links or reads them meanwhile. A link that is made under the name that the
/// MANIFEST has is safe after that, too: recycling renames a file first, and then looks for other
/// names of it.
pub(crate) struct Hold(Weak<WriteState>);

impl Hold {
    pub fn new(state: &Rc<WriteState>) -> Hold {
        state.obsolete.holds.set(state.obsolete.holds.get() + 1);
        Hold(Rc::downgrade(state))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(state) = self.0.upgrade() {
            state.obsolete.holds.set(state.obsolete.holds.get() - 1);
            state.changed.notify_all();
        }
    }
}

/// An obsolete file, and its length if it may be recycled.
struct Obsolete {
    file: FileName,
    recycle_bytes: Option<u64>,
}

/// Whether a log may be written over: its records say which log they belong to, so that they are
/// not taken for records of the new log. Suspends for the disk.
pub(crate) async fn may_be_written_over(
    core: &Core,
    dir: &Dir,
    name: &str,
) -> std::io::Result<bool> {
    let file = core.attach(&dir.open(name).await?);
    let len = file.size().min(LOG_BLOCK_BYTES as u64) as usize;
    Ok(len > 0 && is_recyclable_log(&fs::read(&file, 0, len).await?))
}

impl ObsoleteFiles {
    /// Notes that the MANIFEST no longer keeps a blob file of so many bytes.
    pub fn note_blob(&self, number: u64, bytes: u64) {
        self.blobs.borrow_mut().insert(number, bytes);
    }

    /// Bytes of blob files that are to be removed; 0 while files are held.
    pub fn blob_bytes(&self) -> u64 {
        match self.holds.get() {
            0 => self.blobs.borrow().values().sum(),
            _ => 0,
        }
    }
}

impl WriteState {
    /// Recycles or removes tables that the MANIFEST no longer names.
    pub fn remove_tables<'a>(&self, metas: impl Iterator<Item = &'a FileMeta>) {
        let obsolete = metas.map(|meta| Obsolete {
            file: FileName::Sst(meta.number),
            recycle_bytes: Some(meta.size_bytes),
        });
        self.obsolete.waiting.borrow_mut().extend(obsolete);
        self.changed.notify_all();
    }

    /// Removes files: MANIFESTs that CURRENT does not name, blob files that the MANIFEST does not
    /// keep, tables that it has never named.
    pub fn remove_files(&self, files: Vec<FileName>) {
        let obsolete = |file| Obsolete { file, recycle_bytes: None };
        self.obsolete.waiting.borrow_mut().extend(files.into_iter().map(obsolete));
        self.changed.notify_all();
    }

    /// Recycles or removes obsolete files, one after the other, until writing ends.
    pub async fn remove_obsolete(&self) {
        let recycled = &self.db.0.recycled_tables;
        loop {
            let ends = || self.is_closing() || self.has_failed();
            // On a full disk no file is recycled, nor at the end: who opens the directory next may
            // write nothing.
            let releases = || self.retries.is_full() && !recycled.is_empty();
            let has_work = || !self.is_held() && !self.obsolete.waiting.borrow().is_empty();
            self.changed.wait_until(|| has_work() || releases() || ends()).await;
            let limit = match self.retries.is_full() || self.is_closing() {
                true => 0,
                false => recycled.bytes_max(),
            };
            let obsolete = match self.is_held() {
                true => None,
                false => self.obsolete.waiting.borrow_mut().pop_front(),
            };
            if obsolete.is_none() && !releases() {
                while let Some(name) = recycled.take_beyond(0) {
                    self.remove(&name).await;
                }
                return;
            }
            let mut name = obsolete.as_ref().map(|obsolete| obsolete.file.to_string());
            if let Some(Obsolete { file: FileName::Sst(number), recycle_bytes: Some(bytes) }) =
                obsolete
                && recycled.have_room(bytes, limit)
                && let Some(table) = &name
            {
                match self.dir.rename(table, &FileName::Temp(number).to_string()).await {
                    Ok(()) => recycled.put(number, bytes),
                    Err(error) => tracing::warn!("cannot rename {table}: {error}"),
                }
                name = None;
            }
            while let Some(name) = name.take().or_else(|| recycled.take_beyond(limit)) {
                self.remove_and_pause(&name).await;
            }
        }
    }

    async fn remove(&self, name: &str) {
        match self.dir.remove(name).await {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {name}: {error}");
            }
            _ => {}
        }
        if let Some(FileName::Blob(number)) = FileName::parse(name) {
            self.obsolete.blobs.borrow_mut().remove(&number);
        }
        self.note_removal();
    }

    async fn remove_and_pause(&self, name: &str) {
        let since_ns = self.core.now_ns();
        self.remove(name).await;
        let ends = self.is_closing() || self.has_failed();
        let are_many = self.obsolete.waiting.borrow().len() >= OBSOLETE_MANY
            || self.obsolete.blob_bytes() > self.obsolete_blobs_max();
        if !are_many && !ends {
            let ns = self.core.now_ns() - since_ns;
            self.core.sleep_ns((ns * REMOVAL_PAUSE).min(REMOVAL_PAUSE_MAX_NS)).await;
        }
    }

    /// Recycles or removes the logs of a generation that has become tables.
    pub async fn remove_logs_of(&self, generation: &Generation) {
        let others = match generation.log_number {
            Some(number) if !generation.log_failed && self.may_recycle_log() => {
                self.recycle_log(number).await;
                Vec::new()
            }
            Some(number) => vec![FileName::Wal(number)],
            None => self.recycle_logs(generation.next_log).await,
        };
        self.remove_files(others);
    }

    /// Recycles or removes, in the foreground, all logs below a number: the MANIFEST has made them
    /// obsolete.
    pub async fn remove_logs(&self, below: u64) {
        for file in self.recycle_logs(below).await {
            self.remove(&file.to_string()).await;
        }
    }

    /// Removes all recycled files, in the foreground: the disk is full.
    pub async fn remove_recycled(&self) {
        let tables = &self.db.0.recycled_tables;
        while let Some(name) = tables.take_beyond(0) {
            self.remove(&name).await;
        }
        for number in self.obsolete.recycled_logs.take() {
            self.remove(&FileName::Temp(number).to_string()).await;
        }
    }

    fn is_held(&self) -> bool {
        self.obsolete.holds.get() > 0
    }

    fn may_recycle_log(&self) -> bool {
        let held = self.is_held() && !mutant("held_files_are_recycled");
        !held && self.obsolete.recycled_logs.borrow().len() < RECYCLED_LOGS_MAX
    }

    /// Recycles a log: renames it to a temporary file.
    async fn recycle_log(&self, number: u64) {
        let log = FileName::Wal(number);
        match self.dir.rename(&log.to_string(), &FileName::Temp(number).to_string()).await {
            Ok(()) => self.obsolete.recycled_logs.borrow_mut().push(number),
            Err(error) => {
                tracing::warn!("cannot rename {log}: {error}");
                self.remove_files(vec![log]);
            }
        }
    }

    /// Recycles a few of the obsolete logs below a number, and of the logs that an earlier process
    /// recycled. Returns the others.
    pub async fn recycle_logs(&self, below: u64) -> Vec<FileName> {
        // One of these may be renamed during the loop below.
        let kept = self.obsolete.recycled_logs.borrow().clone();
        let listed = self.dir.list().await.unwrap_or_else(|error| {
            let path = self.dir.path().display();
            tracing::warn!("{path}: old logs stay until the next opening: {error}");
            Vec::new()
        });
        let mut others = Vec::new();
        for DirEntry { name, size, .. } in listed {
            let wanted = self.may_recycle_log() && size <= 2 * commit::log_room(&self.options);
            let fits =
                async || may_be_written_over(&self.core, &self.dir, &name).await.unwrap_or(false);
            match FileName::parse(&name) {
                Some(FileName::Wal(number)) if number < below => {
                    if wanted && fits().await {
                        self.recycle_log(number).await;
                    } else {
                        others.push(FileName::Wal(number));
                    }
                }
                // Other temporary files are recycled tables.
                Some(file @ FileName::Temp(number))
                    if !kept.contains(&number)
                        && !self.db.0.recycled_tables.has(number)
                        && fits().await =>
                {
                    match wanted {
                        true => self.obsolete.recycled_logs.borrow_mut().push(number),
                        false => others.push(file),
                    }
                }
                _ => {}
            }
        }
        others
    }
}
