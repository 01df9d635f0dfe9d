//! How much of the process front ends may take up with memory that they hand over.
//!
//! A process has 2^47 bytes of addresses, some ten thousand mappings and as many descriptors, and a
//! sparse file of a hundred TiB costs the front end that sends it nothing. So each mapping is
//! entered in the [`Account`] of its front end until it is unmapped, and is refused if the front
//! end would have more than a *quarter of what the others leave* of [`BYTES_MAX`], or of
//! [`mappings_max`]. The first may have 16 TiB; front ends that take all they get leave three
//! quarters of the rest each time, so that no number of them uses everything up.
//!
//! What a process takes over from another is entered and never refused, since it was admitted
//! there.
//!
//! A mapping stays as long as a request that was taken with it (`queue.rs`). What is to be bounded
//! beside its bytes is the number of tables that are kept so: [`TABLES_MAX`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// Bytes that all front ends may have mapped together: half of the addresses of a process.
const BYTES_MAX: u64 = 64 << 40;
/// Mappings, where descriptors are not scarcer: half of what Linux lets a process have by default.
const MAPPINGS_MAX: u64 = 32 << 10;
/// Of what others leave, the part that one may have.
const SHARE: u64 = 4;

/// Tables of memory that a front end may have at a time, those included that only requests under
/// way still hold.
const TABLES_MAX: u64 = 64;

static ALL: Counts = Counts::new();

#[derive(Debug)]
struct Counts {
    bytes: AtomicU64,
    mappings: AtomicU64,
}

impl Counts {
    const fn new() -> Counts {
        Counts { bytes: AtomicU64::new(0), mappings: AtomicU64::new(0) }
    }

    fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
        self.mappings.fetch_add(1, Relaxed);
    }

    fn subtract(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Relaxed);
        self.mappings.fetch_sub(1, Relaxed);
    }
}

/// Mappings that all front ends may have together. Each region keeps its descriptor for a
/// successor, so half of the process's descriptors is the bound where that is less.
fn mappings_max() -> u64 {
    static MAX: OnceLock<u64> = OnceLock::new();
    *MAX.get_or_init(|| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the call writes to `limit`, which is live, and nowhere else.
        match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
            0 => (limit.rlim_cur / 2).min(MAPPINGS_MAX),
            _ => MAPPINGS_MAX,
        }
    })
}

/// Most regions that a front end can have when it is the only one.
pub(crate) fn regions_max() -> u16 {
    u16::try_from(mappings_max() / SHARE).unwrap_or(u16::MAX)
}

/// What one front end has mapped. Clones are the same account.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    own: Counts,
    tables: AtomicU64,
    bounded: AtomicBool,
}

impl Default for Shared {
    fn default() -> Shared {
        Shared { own: Counts::new(), tables: AtomicU64::new(0), bounded: AtomicBool::new(false) }
    }
}

/// Why something was not entered: of what is scarce, how much was wanted beside how much there is,
/// and how much the front end may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variant's text says it")]
pub enum NoRoom {
    /// Bytes.
    Bytes { wanted: u64, mapped: u64, most: u64 },
    /// Mappings, each with a descriptor.
    Regions { wanted: u64, mapped: u64, most: u64 },
    /// Tables that requests under way keep.
    Tables { kept: u64 },
}

impl std::fmt::Display for NoRoom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NoRoom::Bytes { wanted, mapped, most } => write!(
                f,
                "{wanted} bytes of memory beside {mapped} that this front end has are too much: it may have {most} now"
            ),
            NoRoom::Regions { wanted, mapped, most } => write!(
                f,
                "{wanted} memory regions beside {mapped} that this front end has are too many: it may have {most} now; \
                 `ulimit -n` (LimitNOFILE) may be too low"
            ),
            NoRoom::Tables { kept } => {
                write!(f, "requests that the device does not answer keep {kept} tables of before")
            }
        }
    }
}

impl Account {
    /// From now on more than its share is refused.
    pub fn bound(&self) {
        self.0.bounded.store(true, Relaxed);
    }

    /// Whether so many bytes in so many mappings have room.
    pub fn room(&self, bytes: u64, mappings: u64) -> Result<(), NoRoom> {
        if !self.0.bounded.load(Relaxed) {
            return Ok(());
        }
        let own = &self.0.own;
        let share = |all: &AtomicU64, own: u64, max: u64| {
            max.saturating_sub(all.load(Relaxed).saturating_sub(own)) / SHARE
        };
        let mapped = own.bytes.load(Relaxed);
        let most = share(&ALL.bytes, mapped, BYTES_MAX);
        if mapped.saturating_add(bytes) > most {
            return Err(NoRoom::Bytes { wanted: bytes, mapped, most });
        }
        let mapped = own.mappings.load(Relaxed);
        let most = share(&ALL.mappings, mapped, mappings_max());
        if mapped.saturating_add(mappings) > most {
            return Err(NoRoom::Regions { wanted: mappings, mapped, most });
        }
        Ok(())
    }

    /// Enters a mapping, until the entry is dropped. Front ends of other cores that do the same at
    /// this moment may both find room for what only one of them should have: that is their
    /// mapping more, and there is room for it.
    pub fn enter(&self, bytes: u64) -> Result<Entry, NoRoom> {
        self.room(bytes, 1)?;
        self.0.own.add(bytes);
        ALL.add(bytes);
        Ok(Entry { account: self.clone(), bytes })
    }

    /// Whether there are tables of before that requests under way still hold.
    pub fn keeps_tables(&self) -> bool {
        self.0.tables.load(Relaxed) > 1
    }

    /// Whether one table more has room.
    pub fn table_room(&self) -> Result<(), NoRoom> {
        match self.0.tables.load(Relaxed) {
            kept if kept >= TABLES_MAX && self.0.bounded.load(Relaxed) => {
                Err(NoRoom::Tables { kept })
            }
            _ => Ok(()),
        }
    }

    /// Counts a table.
    pub fn table(&self) -> Table {
        self.0.tables.fetch_add(1, Relaxed);
        Table(self.clone())
    }
}

/// A mapping in an account.
#[derive(Debug)]
pub(crate) struct Entry {
    account: Account,
    bytes: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.account.0.own.subtract(self.bytes);
        ALL.subtract(self.bytes);
    }
}

/// A table in an account.
#[derive(Debug)]
pub(crate) struct Table(Account);

impl Table {
    /// The account.
    pub fn account(&self) -> &Account {
        &self.0
    }
}

impl Default for Table {
    fn default() -> Table {
        Account::default().table()
    }
}

impl Clone for Table {
    fn clone(&self) -> Table {
        self.0.table()
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.0.0.tables.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_room_again_when_those_of_before_have_gone() {
        let account = Account::default();
        let mut tables: Vec<_> = (0..2 * TABLES_MAX).map(|_| account.table()).collect();
        assert_eq!(account.table_room(), Ok(()), "what was taken over is not refused");
        account.bound();
        let kept = 2 * TABLES_MAX;
        assert_eq!(account.table_room(), Err(NoRoom::Tables { kept }));
        tables.truncate(TABLES_MAX as usize - 1);
        assert!(account.table_room().is_ok() && account.keeps_tables());
        tables.truncate(1);
        assert!(!account.keeps_tables());
    }
}
