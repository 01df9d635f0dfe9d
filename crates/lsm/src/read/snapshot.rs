//! Snapshots: registered, limited in number and in lifetime.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
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
    /// Sequences held, each with its number of snapshots.
    held: RefCell<BTreeMap<u64, usize>>,
    count: Cell<usize>,
    /// The smallest held sequence. The writer loads it before it drops older versions.
    oldest: Arc<AtomicU64>,
}

impl Registry {
    pub fn new(core: &Core, db: &Db) -> Rc<Registry> {
        let oldest = Arc::new(AtomicU64::new(NO_SNAPSHOT));
        db.0.snapshots.rcu(|all| {
            // Entries of dropped readers are not needed.
            let live = all.iter().filter(|other| Arc::strong_count(other) > 1 || is_held(other));
            let mut all: Vec<_> = live.cloned().collect();
            all.push(oldest.clone());
            all
        });
        let (held, count) = (RefCell::default(), Cell::new(0));
        Rc::new(Registry { core: core.clone(), db: db.clone(), held, count, oldest })
    }

    pub fn take(this: &Rc<Registry>) -> Result<Snapshot> {
        if this.count.get() >= SNAPSHOTS_MAX {
            return Err(Error::new(
                Kind::Expired,
                format!("cannot take a snapshot: this core already holds {SNAPSHOTS_MAX}"),
            ));
        }
        // First forbid all drops, then load the visible sequence. So the writer either sees the 0,
        // or `sequence` is no newer than the oldest one that the writer used.
        if this.count.get() == 0 {
            this.oldest.store(0, Ordering::SeqCst);
        }
        let sequence = this.db.0.sequence.load(Ordering::SeqCst);
        *this.held.borrow_mut().entry(sequence).or_insert(0) += 1;
        this.count.set(this.count.get() + 1);
        this.tell();
        let until_ns = this.core.now_ns().saturating_add(LIFETIME_NS);
        let clears = this.db.0.clears.load(Ordering::SeqCst);
        Ok(Snapshot { registry: this.clone(), sequence, until_ns, clears })
    }

    fn release(&self, sequence: u64) {
        let mut held = self.held.borrow_mut();
        if let Some(count) = held.get_mut(&sequence) {
            *count -= 1;
            if *count == 0 {
                held.remove(&sequence);
            }
        }
        drop(held);
        self.count.set(self.count.get() - 1);
        self.tell();
    }

    fn tell(&self) {
        let oldest = self.held.borrow().keys().next().copied().unwrap_or(NO_SNAPSHOT);
        self.oldest.store(oldest, Ordering::SeqCst);
    }
}

fn is_held(oldest: &AtomicU64) -> bool {
    oldest.load(Ordering::SeqCst) != NO_SNAPSHOT
}

/// The state that was visible at one moment, for up to an hour. Dropping it releases it.
pub struct Snapshot {
    registry: Rc<Registry>,
    sequence: u64,
    until_ns: u64,
    clears: u64,
}

impl Snapshot {
    /// The largest sequence number that it sees.
    pub(crate) fn sequence(&self) -> Result<u64> {
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
        self.registry.release(self.sequence);
    }
}
