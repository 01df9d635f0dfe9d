//! Our own target for a measurement: the one place where the bench and `vhost` meet.

use std::path::{Path, PathBuf};

use node::{Error, Kind};

use super::VdiskPlan;

/// A target that serves one disk at a socket until this is dropped.
#[derive(Debug)]
pub struct Target {
    socket: PathBuf,
}

impl Target {
    /// Serves a disk with the plan's number of queues on its processor for targets, and comes back
    /// when the socket takes connections.
    ///
    /// # Errors
    /// When the disk cannot be opened or served.
    pub fn start(disk: &str, plan: &VdiskPlan) -> Result<Target, Error> {
        let what = format!(
            "serving {disk} with {} queues on processor {}: this version serves no disks",
            plan.queues, plan.target_processor
        );
        Err(Error::new(Kind::Usage, what).hint("name another target's socket with --socket"))
    }

    /// Where to connect.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}
