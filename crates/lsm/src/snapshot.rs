//! Snapshots: registered, capped, and not for ever.

use std::cell::Cell;
use std::rc::Rc;

use reactor::Core;

use crate::error::{Error, Kind, Result};

/// Snapshots that one core's reader may hold at once.
const SNAPSHOTS_MAX: usize = 1024;
/// How long one is good for, in nanoseconds: an hour.
const LIFETIME_NS: u64 = 3_600_000_000_000;

/// The snapshots of one reader.
pub(crate) struct Registry {
    core: Core,
    held: Cell<usize>,
}

impl Registry {
    pub fn new(core: &Core) -> Rc<Registry> {
        Rc::new(Registry { core: core.clone(), held: Cell::new(0) })
    }

    pub fn take(this: &Rc<Registry>, sequence: u64) -> Result<Snapshot> {
        if this.held.get() >= SNAPSHOTS_MAX {
            return Err(Error::new(
                Kind::Expired,
                format!("{SNAPSHOTS_MAX} snapshots are held on this core"),
            ));
        }
        this.held.set(this.held.get() + 1);
        let until_ns = this.core.now_ns().saturating_add(LIFETIME_NS);
        Ok(Snapshot { registry: this.clone(), sequence, until_ns })
    }
}

/// What was visible at one moment, for as long as an hour. Dropping it lets it go.
pub struct Snapshot {
    registry: Rc<Registry>,
    sequence: u64,
    until_ns: u64,
}

impl Snapshot {
    /// The largest sequence number it sees.
    pub(crate) fn sequence(&self) -> Result<u64> {
        if self.registry.core.now_ns() > self.until_ns {
            return Err(Error::new(Kind::Expired, "the snapshot is older than an hour"));
        }
        Ok(self.sequence)
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        self.registry.held.set(self.registry.held.get() - 1);
    }
}
