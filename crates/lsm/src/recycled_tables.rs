//! Obsolete table files that are kept, so that new tables are written over them.
//!
//! Some disks stall while they are told of the blocks of removed files (50 ms for 64 MiB were
//! measured), and new blocks have to be entered into the file system's metadata, which slows
//! the flushes of all files. So a table that a change of the MANIFEST has made obsolete is renamed
//! to `NNNNNN.dbtmp`, a name that recovery, ours and RocksDB's, treats as garbage. The writer of a
//! new table takes such a file, gives it the table's name, writes over it and truncates it to its
//! length.
//!
//! What must hold:
//!
//! - A file is recycled only after no MANIFEST that a crash can leave names it.
//! - Older versions on any core and other processes may read it for a long time after that. So it
//!   is taken only when nothing else has it open, and only if it has no second name (a checkpoint
//!   made of hard links): [`fs::Dir::open_unshared`] asks the system. A file that stays in use is
//!   removed after a number of attempts.
//! - Recycled files have at most as many bytes as the largest recent job, none of which needed more
//!   for its outputs, and at most [`BYTES_MAX`]. On a full disk there are none, and none stay when
//!   writing ends.
//!
//! A power cut may restore a name from before a rename that was not synced yet, or leave a file
//! with two names. Neither is in the MANIFEST: names are synced before a record names the table.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use fs::{Dir, Mode, SharedFile};
use rocksfmt::FileName;

use crate::mutant::mutant;

/// Most files that are kept.
const FILES_MAX: usize = 256;
/// Most bytes that are kept. A compaction on request makes a whole database obsolete.
const BYTES_MAX: u64 = 512 << 20;
/// Files that are tried for one table. Each that is open elsewhere costs a system call.
const TRIES: usize = 4;
/// A file that was found open elsewhere this many times is removed.
const REFUSALS_MAX: u32 = 16;

/// A file that may be written over if nothing else has it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RecycledTable {
    number: u64,
    bytes: u64,
    /// How often it was found open elsewhere.
    refusals: u32,
}

/// The recycled files of a database. Any core may put or take.
#[derive(Default)]
pub(crate) struct RecycledTables {
    files: ArcSwap<Vec<RecycledTable>>,
    /// Tables that were written over recycled files.
    pub rewritten: AtomicU64,
    /// See [`RecycledTables::bytes_max`].
    job_bytes: AtomicU64,
}

/// After a job, the limit of the bytes of recycled files falls by this part of it if the job was
/// smaller.
const FADE: u64 = 8;

impl RecycledTables {
    /// The limit of their bytes: those of the largest of the recent merges, none of which needed
    /// more for its outputs, but no more than [`BYTES_MAX`].
    pub fn bytes_max(&self) -> u64 {
        self.job_bytes.load(Ordering::Relaxed)
    }

    /// Notes that a merge has made this many bytes obsolete.
    pub fn note_job(&self, bytes: u64) {
        let before = self.bytes_max();
        let bytes = bytes.min(BYTES_MAX).max(before - before / FADE);
        self.job_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Whether a file of `bytes` can be added without exceeding `limit` bytes.
    pub fn have_room(&self, bytes: u64, limit: u64) -> bool {
        let files = self.files.load();
        let sum: u64 = files.iter().map(|file| file.bytes).sum();
        files.len() < FILES_MAX && sum.saturating_add(bytes) <= limit
    }

    /// Whether the temporary file of this number is one.
    pub fn has(&self, number: u64) -> bool {
        self.files.load().iter().any(|file| file.number == number)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.files.load().is_empty()
    }

    /// Adds the temporary file of this number.
    pub fn put(&self, number: u64, bytes: u64) {
        self.put_back(RecycledTable { number, bytes, refusals: 0 });
    }

    fn put_back(&self, file: RecycledTable) {
        self.files.rcu(|files| files.iter().copied().chain([file]).collect::<Vec<_>>());
    }

    /// Takes the smallest file of at least `bytes`, or else the largest.
    fn take(&self, bytes: u64) -> Option<RecycledTable> {
        let mut taken = None;
        self.files.rcu(|files| {
            let enough = files.iter().filter(|file| file.bytes >= bytes);
            let all = || files.iter().max_by_key(|file| file.bytes);
            taken = enough.min_by_key(|file| file.bytes).or_else(all).copied();
            files.iter().copied().filter(|file| Some(*file) != taken).collect::<Vec<_>>()
        });
        taken
    }

    /// Takes a file to be removed if all files exceed `limit` bytes. With a limit of 0 it takes any
    /// file, also an empty one.
    pub fn take_beyond(&self, limit: u64) -> Option<String> {
        if limit > 0 && self.have_room(0, limit) {
            return None;
        }
        self.take(0).map(|file| FileName::Temp(file.number).to_string())
    }

    /// Opens a file for a table of about `bytes`: a recycled one under the table's name, or a new
    /// one. Suspends for the disk.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn open(&self, dir: &Dir, name: &str, bytes: u64) -> io::Result<Arc<SharedFile>> {
        let mut refused = Vec::new();
        let mut file = None;
        while refused.len() < TRIES
            && let Some(recycled) = self.take(bytes)
        {
            let old = FileName::Temp(recycled.number).to_string();
            let opened = if mutant("spares_are_shared") {
                dir.open_for_writing(&old, Mode::Direct).await
            } else {
                dir.open_unshared(&old, Mode::Direct).await
            };
            match opened {
                Ok(opened) => match dir.rename(&old, name).await {
                    Ok(()) => {
                        self.rewritten.fetch_add(1, Ordering::Relaxed);
                        file = Some(opened);
                        break;
                    }
                    // The search for old logs has removed it: it was in no list for a moment.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                },
                // Another process has removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(_) => refused.push(recycled),
            }
        }
        for mut recycled in refused {
            recycled.refusals += 1;
            let old = FileName::Temp(recycled.number).to_string();
            if recycled.refusals < REFUSALS_MAX {
                self.put_back(recycled);
            } else if let Err(error) = dir.remove(&old).await {
                tracing::warn!("{old} could not be removed: {error}");
            }
        }
        match file {
            Some(file) => Ok(file),
            None => dir.create(name, Mode::Direct).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_fit_is_taken_and_files_beyond_the_limit_are_removed() {
        let files = RecycledTables::default();
        for (number, bytes) in [(1, 10), (2, 30), (3, 20)] {
            assert!(files.have_room(bytes, 60));
            files.put(number, bytes);
        }
        assert!(!files.have_room(1, 60) && files.take_beyond(60).is_none());
        let number = |file: Option<RecycledTable>| file.map(|file| file.number);
        assert_eq!(number(files.take(15)), Some(3));
        assert_eq!(number(files.take(50)), Some(2));
        assert_eq!(files.take_beyond(9), Some("000001.dbtmp".to_owned()));
        assert_eq!(files.take(0), None);
        // On a full disk files are removed until there are none: an empty one must not be skipped.
        files.put(4, 0);
        assert_eq!(files.take_beyond(0), Some("000004.dbtmp".to_owned()));
        assert!(files.is_empty() && files.take_beyond(0).is_none());
    }
}
