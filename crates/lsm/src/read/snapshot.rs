//! Snapshots: registered, limited in number and in lifetime.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use reactor::Core;

use crate::db::Db;
use crate::error::{Error, Kind, Result};

/// Most snapshots that one core's reader may hold.
const SNAPSHOTS_MAX: usize = 1024;
/// Lifetime of a snapshot in nanoseconds: one hour.
const LIFETIME_NS: u64 = 3_600_000_000_000;
/// What an expired snapshot sees is kept for so long, and then not any more, whether it is dropped
/// or not. A read looks whether its snapshot has expired by the time of its core's turn, and has
/// its files and memtables before that.
const EXPIRED_NS: u64 = 60_000_000_000;

/// In place of the sequence of a snapshot: there is none.
const NO_SNAPSHOT: u64 = u64::MAX;

/// A place for a snapshot of one core, for all cores to see.
#[derive(Debug)]
pub(crate) struct Place {
    sequence: AtomicU64,
    /// When it expires.
    until_ns: AtomicU64,
}

impl Place {
    /// The sequence of the snapshot that is held there, if there is one and what it sees has to be
    /// kept.
    pub fn held(&self, now_ns: u64) -> Option<u64> {
        // In this order: the time is that of this snapshot or of a later one.
        let sequence = self.sequence.load(Ordering::SeqCst);
        let until_ns = self.until_ns.load(Ordering::SeqCst);
        let is_held = sequence != NO_SNAPSHOT && now_ns <= until_ns.saturating_add(EXPIRED_NS);
        is_held.then_some(sequence)
    }
}

/// The snapshots of one reader.
pub(crate) struct Registry {
    core: Core,
    db: Db,
    /// The writer looks at them before it drops versions; see [`Db::readable`].
    places: Arc<[Place]>,
}

impl Registry {
    pub fn new(core: &Core, db: &Db) -> Rc<Registry> {
        let empty = || Place { sequence: AtomicU64::new(NO_SNAPSHOT), until_ns: AtomicU64::new(0) };
        let places: Arc<[Place]> = (0..SNAPSHOTS_MAX).map(|_| empty()).collect();
        db.0.snapshots.rcu(|all| {
            // Entries of dropped readers are not needed: their snapshots are gone, too.
            let live = all.iter().filter(|other| Arc::strong_count(other) > 1);
            live.chain([&places]).cloned().collect::<Vec<_>>()
        });
        Rc::new(Registry { core: core.clone(), db: db.clone(), places })
    }

    pub fn take(this: &Rc<Registry>) -> Result<Snapshot> {
        let now_ns = this.core.now_ns();
        let is_free = |place: &Place| place.held(now_ns).is_none();
        let Some(at) = this.places.iter().position(is_free) else {
            return Err(Error::new(
                Kind::Expired,
                format!("cannot take a snapshot: this core already holds {SNAPSHOTS_MAX}"),
            ));
        };
        let place = &this.places[at];
        let until_ns = now_ns.saturating_add(LIFETIME_NS);
        place.sequence.store(NO_SNAPSHOT, Ordering::SeqCst);
        place.until_ns.store(until_ns, Ordering::SeqCst);
        // First tell the sequence, then check that it is still the visible one. So a writer that
        // does not see it has loaded a visible sequence that is not newer, and keeps what is
        // visible at it. The loop repeats only when a group was published meanwhile.
        let visible = &this.db.0.sequence;
        let mut sequence = visible.load(Ordering::SeqCst);
        loop {
            place.sequence.store(sequence, Ordering::SeqCst);
            match visible.load(Ordering::SeqCst) {
                same if same == sequence => break,
                newer => sequence = newer,
            }
        }
        let clears = this.db.0.clears.load(Ordering::SeqCst);
        Ok(Snapshot { registry: this.clone(), at, sequence, until_ns, clears })
    }
}

/// The state that was visible at one moment, for up to an hour. Dropping it releases it, and so
/// does the end of the hour: one that is forgotten does not keep old values for ever.
pub struct Snapshot {
    registry: Rc<Registry>,
    /// Its place in [`Registry::places`].
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
        // When it has expired, its place may be that of another one.
        let place = &self.registry.places[self.at];
        if place.until_ns.load(Ordering::Relaxed) == self.until_ns {
            place.sequence.store(NO_SNAPSHOT, Ordering::SeqCst);
        }
    }
}
