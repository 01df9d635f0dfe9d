//! Snapshots: registered, limited in number and in lifetime.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use reactor::Core;

use crate::db::{Db, NO_SNAPSHOT};
use crate::error::{Error, Kind, Result};

/// Most snapshots that one core's reader may hold.
const SNAPSHOTS_MAX: usize = 1024;
/// Lifetime of a snapshot in nanoseconds: one hour.
const LIFETIME_NS: u64 = 3_600_000_000_000;

/// The snapshots of one reader.
pub(crate) struct Registry {
    core: Core,
    db: Db,
    /// The sequence of each snapshot, or [`NO_SNAPSHOT`]. The writer loads them before it drops
    /// versions; see [`Db::readable`].
    held: Arc<[AtomicU64]>,
}

impl Registry {
    pub fn new(core: &Core, db: &Db) -> Rc<Registry> {
        let held: Arc<[AtomicU64]> =
            (0..SNAPSHOTS_MAX).map(|_| AtomicU64::new(NO_SNAPSHOT)).collect();
        db.0.snapshots.rcu(|all| {
            // Entries of dropped readers are not needed: their snapshots are gone, too.
            let live = all.iter().filter(|other| Arc::strong_count(other) > 1);
            live.chain([&held]).cloned().collect::<Vec<_>>()
        });
        Rc::new(Registry { core: core.clone(), db: db.clone(), held })
    }

    pub fn take(this: &Rc<Registry>) -> Result<Snapshot> {
        let is_free = |held: &AtomicU64| held.load(Ordering::Relaxed) == NO_SNAPSHOT;
        let Some(at) = this.held.iter().position(is_free) else {
            return Err(Error::new(
                Kind::Expired,
                format!("cannot take a snapshot: this core already holds {SNAPSHOTS_MAX}"),
            ));
        };
        // First tell the sequence, then check that it is still the visible one. So a writer that
        // does not see it has loaded a visible sequence that is not newer, and keeps what is
        // visible at it. The loop repeats only when a group was published meanwhile.
        let visible = &this.db.0.sequence;
        let mut sequence = visible.load(Ordering::SeqCst);
        loop {
            this.held[at].store(sequence, Ordering::SeqCst);
            match visible.load(Ordering::SeqCst) {
                same if same == sequence => break,
                newer => sequence = newer,
            }
        }
        let until_ns = this.core.now_ns().saturating_add(LIFETIME_NS);
        let clears = this.db.0.clears.load(Ordering::SeqCst);
        Ok(Snapshot { registry: this.clone(), at, sequence, until_ns, clears })
    }
}

/// The state that was visible at one moment, for up to an hour. Dropping it releases it.
pub struct Snapshot {
    registry: Rc<Registry>,
    /// Its place in [`Registry::held`].
    at: usize,
    sequence: u64,
    until_ns: u64,
    clears: u64,
}

impl Snapshot {
    /// The largest sequence number that it sees.
    ///
    /// # Errors
    /// [`Kind::Expired`] if it was held for too long, or the database was cleared.
    pub fn sequence(&self) -> Result<u64> {
        if self.registry.core.now_ns() > self.until_ns {
            return Err(Error::new(Kind::Expired, "the snapshot is older than an hour"));
        }
        if self.clears != self.registry.db.0.clears.load(Ordering::SeqCst) {
            return Err(Error::new(Kind::Expired, "the database was cleared after the snapshot"));
        }
        Ok(self.sequence)
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        self.registry.held[self.at].store(NO_SNAPSHOT, Ordering::SeqCst);
    }
}
