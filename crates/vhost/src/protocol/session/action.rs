//! The instructions of a session to its target.

use std::os::fd::OwnedFd;

#[cfg(doc)]
use super::Session;
use crate::protocol::message::{self, InflightInfo, LogInfo, RegionInfo};
#[cfg(doc)]
use crate::protocol::ring_state::Ring;

/// Bytes for the front end, and a descriptor that goes with the first byte.
#[derive(Debug)]
pub struct Reply {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// Descriptor.
    pub fd: Option<OwnedFd>,
    /// The request, if this is only an acknowledgement.
    pub(super) acknowledges: Option<u32>,
}

impl Reply {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, fd: None, acknowledges: None }
    }

    pub(super) fn acknowledge(request: u32) -> Self {
        Self { bytes: message::reply_u64(request, 0), fd: None, acknowledges: Some(request) }
    }

    /// Turns an acknowledgement into a refusal after a failed action. Returns `false` if this is
    /// not an acknowledgement: then the connection must be closed.
    #[must_use]
    pub fn refuse(&mut self) -> bool {
        if let Some(request) = self.acknowledges {
            self.bytes = message::reply_u64(request, 1);
        }
        self.acknowledges.is_some()
    }
}

/// An instruction to the target.
#[derive(Debug)]
pub enum Action {
    /// Send this.
    Reply(Reply),
    /// [`Session::features`] changed, and perhaps [`Session::logging`]. Requests that are in flight
    /// now are logged by the new rule.
    FeaturesChanged,
    /// `true`: writes may stay in volatile caches until the guest flushes. `false`: they must be
    /// durable when they complete.
    WriteCache(bool),
    /// Replace all regions by these. Active rings continue with the new memory.
    ReplaceMemory(Vec<(RegionInfo, OwnedFd)>),
    /// Add a region. If it cannot be mapped: [`Session::forget_region`].
    AddRegion(RegionInfo, OwnedFd),
    /// Remove a region. Its memory stays mapped for requests in flight.
    RemoveRegion(RegionInfo),
    /// Rings that start from now on record their requests in this region and recover those found in
    /// it.
    Inflight(InflightInfo, OwnedFd),
    /// Rings that start from now on do not record their requests.
    DropInflight,
    /// Create a zeroed region for this many rings with this many entries each, packed or split
    /// according to [`Session::features`]. Then call [`Session::inflight_created`].
    CreateInflight {
        /// Rings.
        queues: u16,
        /// Entries for each.
        queue_size: u16,
    },
    /// Use this dirty log. Writes that complete after the reply are logged here.
    Log(LogInfo, OwnedFd),
    /// Signalled after the dirty log has changed.
    LogSignal(OwnedFd),
    /// The channel on which the target sends the message of [`Session::set_capacity`].
    BackendChannel(OwnedFd),
    /// Replace the ring's kick descriptor and close the old one.
    Kick(u16, Option<OwnedFd>),
    /// Replace the ring's call descriptor and close the old one.
    Call(u16, Option<OwnedFd>),
    /// Replace the ring's err descriptor and close the old one.
    Err(u16, Option<OwnedFd>),
    /// Start the ring as described by [`Session::ring`]: recover its requests in flight, and check
    /// for new ones without waiting for a kick.
    StartRing(u16),
    /// Resume popping (and check for requests), or pause it.
    EnableRing(u16, bool),
    /// The ring's [`Ring::log`] changed.
    RingLog(u16),
    /// Stop popping, finish the requests in flight, leave guest memory alone, then call
    /// [`Session::ring_stopped`].
    StopRing(u16),
}
