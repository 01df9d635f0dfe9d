//! Limits how much memory front ends can make this process map.
//!
//! A process has 2^47 bytes of addresses and some ten thousand mappings and descriptors, and a
//! sparse file of 100 TiB costs the front end that sends it nothing. So each mapping is charged to
//! the [`Account`] of its front end until it is unmapped. It is refused if the front end would have
//! more than a *quarter of what the others leave* of [`BYTES_MAX`] or [`mappings_max`]. The first
//! front end may have 16 TiB. Front ends that take all they can leave three quarters of the rest
//! each time, so no number of them uses everything up.
//!
//! Memory that is taken over from another process is charged and never refused: that process has
//! admitted it.
//!
//! A mapping lives as long as the requests that were popped with it (`target::queue`). Besides the
//! bytes, the number of tables that requests keep is limited: [`TABLES_MAX`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// Most bytes that all front ends may have mapped together: half of a process's addresses.
const BYTES_MAX: u64 = 64 << 40;
/// Most mappings, unless descriptors are scarcer: half of Linux's default limit for a process.
const MAPPINGS_MAX: u64 = 32 << 10;
/// One front end may have this fraction of what the others leave.
const SHARE: u64 = 4;

/// Most memory tables of a front end at a time, including those that only requests in flight still
/// use.
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

/// Most mappings that all front ends may have together. Each region keeps its descriptor for a
/// successor, so half of the process's descriptors is also a limit.
fn mappings_max() -> u64 {
    static MAX: OnceLock<u64> = OnceLock::new();
    *MAX.get_or_init(|| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the call writes only to `limit`, which is live.
        match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
            0 => (limit.rlim_cur / 2).min(MAPPINGS_MAX),
            _ => MAPPINGS_MAX,
        }
    })
}

/// Most regions of a front end that is the only one.
pub(crate) fn regions_max() -> u16 {
    u16::try_from(mappings_max() / SHARE).unwrap_or(u16::MAX)
}

/// The memory that one front end has mapped. Clones share the account.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account(Arc<AccountState>);

#[derive(Debug)]
struct AccountState {
    own: Counts,
    tables: AtomicU64,
    bounded: AtomicBool,
}

impl Default for AccountState {
    fn default() -> AccountState {
        AccountState {
            own: Counts::new(),
            tables: AtomicU64::new(0),
            bounded: AtomicBool::new(false),
        }
    }
}

/// The resource that is exhausted: the wanted amount, the amount that the front end has, and the
/// most that it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variant's text says it")]
pub enum NoRoom {
    /// Bytes.
    Bytes { wanted: u64, mapped: u64, most: u64 },
    /// Mappings, each with a descriptor.
    Regions { wanted: u64, mapped: u64, most: u64 },
    /// Tables that requests in flight keep.
    Tables { kept: u64 },
}

impl std::fmt::Display for NoRoom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NoRoom::Bytes { wanted, mapped, most } => write!(
                f,
                "no room for {wanted} more bytes of memory: the front end has {mapped} and may \
                 have {most} now"
            ),
            NoRoom::Regions { wanted, mapped, most } => write!(
                f,
                "no room for {wanted} more memory regions: the front end has {mapped} and may \
                 have {most} now: raise `ulimit -n` (LimitNOFILE)"
            ),
            NoRoom::Tables { kept } => {
                write!(f, "{kept} old memory tables are still used by requests at the device")
            }
        }
    }
}

impl Account {
    /// Enforces the limits from now on.
    pub fn bound(&self) {
        self.0.bounded.store(true, Relaxed);
    }

    /// Whether there is room for `bytes` in this many mappings.
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

    /// Charges a mapping until the entry is dropped. Front ends of several cores that do this at
    /// the same time may each exceed the limit by one mapping; the limits leave room for that.
    pub fn enter(&self, bytes: u64) -> Result<Entry, NoRoom> {
        self.room(bytes, 1)?;
        self.0.own.add(bytes);
        ALL.add(bytes);
        Ok(Entry { account: self.clone(), bytes })
    }

    /// Whether requests in flight still use old tables.
    pub fn keeps_tables(&self) -> bool {
        self.0.tables.load(Relaxed) > 1
    }

    /// Whether there is room for another table.
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

/// A mapping charged to an account.
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

/// A table charged to an account.
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
    fn a_table_is_accepted_again_after_old_ones_are_dropped() {
        let account = Account::default();
        let mut tables: Vec<_> = (0..2 * TABLES_MAX).map(|_| account.table()).collect();
        assert_eq!(account.table_room(), Ok(()), "tables that were taken over are not refused");
        account.bound();
        let kept = 2 * TABLES_MAX;
        assert_eq!(account.table_room(), Err(NoRoom::Tables { kept }));
        tables.truncate(TABLES_MAX as usize - 1);
        assert!(account.table_room().is_ok() && account.keeps_tables());
        tables.truncate(1);
        assert!(!account.keeps_tables());
    }
}
