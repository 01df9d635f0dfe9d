//! Tables that no version names any more, kept to be written again.
//!
//! A disk that is told of the blocks of removed files may stand still meanwhile (50 ms for 64 MiB
//! were measured), and new blocks are entered into the file system's books at the flushes of all.
//! So a table that the MANIFEST has made needless becomes `NNNNNN.dbtmp`, a name that recovery,
//! ours and RocksDB's, takes for garbage; and who writes a table takes such a file, gives it the
//! table's name, writes over it and cuts it to its length.
//!
//! What must hold:
//!
//! - A file becomes a spare when no MANIFEST that a crash can leave names it.
//! - It may be read for long after that, by older versions of any core and by other processes. So
//!   it is taken only when nobody else has it open, and only if it has no second name (a checkpoint
//!   made of hard links): [`fs::Dir::open_unshared`] asks the system. One that stays in use is
//!   removed after a while.
//! - There are as many bytes of spares as of tables in levels 0 and 1, at most: what the largest
//!   merge would need beside what it merges. On a full disk there are none.
//!
//! A power cut may bring back a name from before any renaming that was not synced yet, or leave a
//! file with two names. None of these is in the MANIFEST: the names are synced before a record
//! names the table.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use fs::{Dir, Mode, SharedFile};
use rocksfmt::FileName;

use crate::mutant::mutant;
use crate::version::Version;

/// Most spares.
const SPARES_MAX: usize = 256;
/// Spares that are tried for one table: each that is open elsewhere costs a look.
const TRIES: usize = 4;
/// Times that a spare is found open elsewhere before it is given up.
const REFUSALS_MAX: u32 = 16;

/// A file that may be written again, if nobody has it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spare {
    number: u64,
    bytes: u64,
    /// How often it was found open elsewhere.
    refusals: u32,
}

/// See the module text. Any core may put or take.
#[derive(Default)]
pub(crate) struct Spares {
    spares: ArcSwap<Vec<Spare>>,
    /// Tables that were written over spares.
    pub rewritten: AtomicU64,
}

/// Bytes of spares that there may be.
pub(crate) fn spares_max(version: &Version) -> u64 {
    let levels = version.families.iter().flat_map(|family| family.levels.iter().take(2));
    levels.flat_map(|level| &level.slots).map(|&slot| version.meta(slot).size_bytes).sum()
}

impl Spares {
    /// Whether there is room for a file of so many bytes, where `limit` bytes of spares may be.
    pub fn have_room(&self, bytes: u64, limit: u64) -> bool {
        let spares = self.spares.load();
        let sum: u64 = spares.iter().map(|spare| spare.bytes).sum();
        spares.len() < SPARES_MAX && sum.saturating_add(bytes) <= limit
    }

    /// Whether a temporary file of this number is one.
    pub fn has(&self, number: u64) -> bool {
        self.spares.load().iter().any(|spare| spare.number == number)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.spares.load().is_empty()
    }

    /// Adds the file that is named as a temporary one with this number.
    pub fn put(&self, number: u64, bytes: u64) {
        self.put_back(Spare { number, bytes, refusals: 0 });
    }

    fn put_back(&self, spare: Spare) {
        self.spares.rcu(|spares| spares.iter().copied().chain([spare]).collect::<Vec<_>>());
    }

    /// Takes the one of which least is left over when `bytes` are written, or the largest.
    fn take(&self, bytes: u64) -> Option<Spare> {
        let mut taken = None;
        self.spares.rcu(|spares| {
            let enough = spares.iter().filter(|spare| spare.bytes >= bytes);
            let all = || spares.iter().max_by_key(|spare| spare.bytes);
            taken = enough.min_by_key(|spare| spare.bytes).or_else(all).copied();
            spares.iter().copied().filter(|spare| Some(*spare) != taken).collect::<Vec<_>>()
        });
        taken
    }

    /// Takes one that is beyond `limit` bytes of them, to be removed: any where none may be, also
    /// an empty one.
    pub fn take_beyond(&self, limit: u64) -> Option<String> {
        if limit > 0 && self.have_room(0, limit) {
            return None;
        }
        self.take(0).map(|spare| FileName::Temp(spare.number).to_string())
    }

    /// Opens a file for a table of about so many bytes: a spare under the table's name, or a new
    /// one. Suspends for the disk.
    ///
    /// # Errors
    /// As the system gives them.
    pub async fn open(&self, dir: &Dir, name: &str, bytes: u64) -> io::Result<Arc<SharedFile>> {
        let mut refused = Vec::new();
        let mut file = None;
        while refused.len() < TRIES
            && let Some(spare) = self.take(bytes)
        {
            let old = FileName::Temp(spare.number).to_string();
            let opened = if mutant("spares_are_shared") {
                dir.open_for_writing(&old, Mode::Direct).await
            } else {
                dir.open_unshared(&old, Mode::Direct).await
            };
            match opened {
                Ok(opened) => {
                    dir.rename(&old, name).await?;
                    self.rewritten.fetch_add(1, Ordering::Relaxed);
                    file = Some(opened);
                    break;
                }
                // Somebody has cleared up.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(_) => refused.push(spare),
            }
        }
        for mut spare in refused {
            spare.refusals += 1;
            let old = FileName::Temp(spare.number).to_string();
            if spare.refusals < REFUSALS_MAX {
                self.put_back(spare);
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
    fn the_best_fit_is_taken_and_what_is_beyond_the_limit_goes() {
        let spares = Spares::default();
        for (number, bytes) in [(1, 10), (2, 30), (3, 20)] {
            assert!(spares.have_room(bytes, 60));
            spares.put(number, bytes);
        }
        assert!(!spares.have_room(1, 60) && spares.take_beyond(60).is_none());
        let number = |spare: Option<Spare>| spare.map(|spare| spare.number);
        assert_eq!(number(spares.take(15)), Some(3));
        assert_eq!(number(spares.take(50)), Some(2));
        assert_eq!(spares.take_beyond(9), Some("000001.dbtmp".to_owned()));
        assert_eq!(spares.take(0), None);
        // A full disk: whoever removes spares until there are none would never end.
        spares.put(4, 0);
        assert_eq!(spares.take_beyond(0), Some("000004.dbtmp".to_owned()));
        assert!(spares.is_empty() && spares.take_beyond(0).is_none());
    }
}
