//! The state of a disk, of its connection and of its session, and the descriptors that belong to
//! it.

use std::os::fd::OwnedFd;

use super::HandoverError;
#[cfg(doc)]
use super::{NAME_BYTES_MAX, NUMBERS_MAX};
use crate::protocol::config::feature;
use crate::protocol::message::{InflightInfo, LogInfo, RegionInfo};
use crate::protocol::ring_state::{Kick, Ring, RingProgress};
#[cfg(doc)]
use crate::protocol::session::Session;

/// The purpose of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The socket on which front ends connect.
    Listener,
    /// The front end's connection.
    Connection,
    /// The bitmap of a running mirror.
    Mirror,
    /// The file of a memory region, by its index in the list.
    Memory(u16),
    /// The file of the in-flight region.
    Inflight,
    /// The file of the dirty log.
    Log,
    /// Signalled after the dirty log has changed.
    LogSignal,
    /// The backend's own channel.
    BackendChannel,
    /// A ring's kick.
    Kick(u16),
    /// A ring's call.
    Call(u16),
    /// A ring's err.
    Err(u16),
    /// Came with the partial message, at this index.
    Partial(u16),
    /// Goes with the first byte of the unsent replies.
    Unsent,
}

impl Role {
    pub(crate) fn numbers(self) -> [u16; 2] {
        match self {
            Self::Listener => [1, 0],
            Self::Connection => [2, 0],
            Self::Mirror => [3, 0],
            Self::Memory(i) => [4, i],
            Self::Inflight => [5, 0],
            Self::Log => [6, 0],
            Self::LogSignal => [7, 0],
            Self::BackendChannel => [8, 0],
            Self::Kick(i) => [9, i],
            Self::Call(i) => [10, i],
            Self::Err(i) => [11, i],
            Self::Partial(i) => [12, i],
            Self::Unsent => [13, 0],
        }
    }
}

/// A session with its front end, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionState {
    /// Virtio features that the front end acknowledged, if it did.
    pub features: Option<u64>,
    /// Protocol features that it acknowledged.
    pub protocol_features: u64,
    /// Whether SET_OWNER was received.
    pub owned: bool,
    /// Whether the write cache is on according to the configuration space.
    pub write_cache: bool,
    /// The guest's memory.
    pub regions: Vec<RegionInfo>,
    /// The in-flight region.
    pub inflight: Option<InflightInfo>,
    /// The dirty log.
    pub log: Option<LogInfo>,
    /// Whether there is a descriptor to signal changes of the log.
    pub log_signal: bool,
    /// Whether there is a backend channel.
    pub backend_channel: bool,
    /// The rings, with the positions of those that are not idle.
    pub rings: Vec<(Ring, Option<RingProgress>)>,
}

impl SessionState {
    /// The purposes of the session's descriptors, in order.
    pub fn roles(&self) -> Vec<Role> {
        let mut roles: Vec<Role> =
            (0u16..).zip(&self.regions).map(|(i, _)| Role::Memory(i)).collect();
        let single = [
            (self.inflight.is_some(), Role::Inflight),
            (self.log.is_some(), Role::Log),
            (self.log_signal, Role::LogSignal),
            (self.backend_channel, Role::BackendChannel),
        ];
        roles.extend(single.iter().filter(|(there, _)| *there).map(|(_, role)| *role));
        for (i, (ring, _)) in (0u16..).zip(&self.rings) {
            let of_ring = [
                (ring.kick == Kick::Descriptor, Role::Kick(i)),
                (ring.call, Role::Call(i)),
                (ring.err, Role::Err(i)),
            ];
            roles.extend(of_ring.iter().filter(|(there, _)| *there).map(|(_, role)| *role));
        }
        roles
    }

    pub(super) fn packed(&self) -> bool {
        self.features.unwrap_or(0) & feature::RING_PACKED != 0
    }
}

/// A connection, possibly in the middle of a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectionState {
    /// The session.
    pub session: SessionState,
    /// The bytes received so far of a message that is not complete.
    pub partial: Vec<u8>,
    /// The number of descriptors that came with `partial`.
    pub partial_descriptors: u16,
    /// The bytes of replies for which the front end's socket had no room.
    pub unsent: Vec<u8>,
    /// Whether a descriptor goes with the first byte of `unsent`.
    pub unsent_descriptor: bool,
    /// If a launcher has the front end's socket, what it knows. Nothing is partial or unsent then.
    pub kept: Option<KeptState>,
}

/// What a launcher knows of a connection whose socket it has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptState {
    /// The front end's process id; 0 if it is not known.
    pub pid: u32,
    /// The launcher's numbers of the session's descriptors, in the order of
    /// [`SessionState::roles`].
    pub numbers: Vec<u32>,
}

/// A mirror that copies the disk elsewhere. Its bitmap is in shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MirrorState {
    /// Bytes of the disk that one bit stands for; a power of two.
    pub granule_bytes: u64,
    /// Number of bits.
    pub bits: u64,
}

/// Operations that the old process still has at the device after a forced handover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlight {
    /// Whether there may be a flush among them.
    pub flushes: bool,
}

/// A disk with everything that its successor needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskState {
    /// The disk's name, at most [`NAME_BYTES_MAX`] bytes.
    pub name: String,
    /// Sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// How often the size has changed.
    pub resize_epoch: u64,
    /// Counters that the successor continues, at most [`NUMBERS_MAX`].
    pub statistics: Vec<(String, u64)>,
    /// What is left in each rate limit's bucket, at most [`NUMBERS_MAX`].
    pub limits: Vec<(String, u64)>,
    /// The running mirror, if there is one.
    pub mirror: Option<MirrorState>,
    /// Whether the listening socket is among the descriptors.
    pub listening: bool,
    /// Whether a flush of the device has failed, so that it takes no more writes.
    pub flush_failed: bool,
    /// Whether the disk is withheld from its guest: its data is, or may be, elsewhere.
    pub withheld: bool,
    /// Operations of the old process that are still in flight. Until it reports their end, the
    /// requests in the in-flight region must not be executed again.
    pub in_flight: Option<InFlight>,
    /// The front end's connection, if there is one.
    pub connection: Option<ConnectionState>,
}

/// A disk's descriptors, sorted by purpose.
#[derive(Debug, Default)]
pub struct DiskDescriptors {
    /// The listening socket.
    pub listener: Option<OwnedFd>,
    /// The connection.
    pub connection: Option<OwnedFd>,
    /// The mirror's bitmap.
    pub mirror: Option<OwnedFd>,
    /// The argument for [`Session::import`].
    pub session: Vec<OwnedFd>,
    /// The argument for [`crate::protocol::message::Framer::from_parts`].
    pub partial: Vec<OwnedFd>,
    /// Goes with [`ConnectionState::unsent`].
    pub unsent: Option<OwnedFd>,
}

impl DiskState {
    /// The purposes of the disk's descriptors, in order.
    pub fn roles(&self) -> Vec<Role> {
        let mut roles = Vec::new();
        let single = [
            (self.listening, Role::Listener),
            (self.connection.is_some(), Role::Connection),
            (self.mirror.is_some(), Role::Mirror),
        ];
        roles.extend(single.iter().filter(|(there, _)| *there).map(|(_, role)| *role));
        if let Some(connection) = &self.connection {
            roles.extend(connection.session.roles());
            roles.extend((0..connection.partial_descriptors).map(Role::Partial));
            roles.extend(connection.unsent_descriptor.then_some(Role::Unsent));
        }
        roles
    }

    /// Sorts descriptors that came in the order of [`DiskState::roles`].
    ///
    /// # Errors
    /// [`HandoverError::Descriptors`]; all descriptors are closed.
    pub fn assign(&self, fds: Vec<OwnedFd>) -> Result<DiskDescriptors, HandoverError> {
        let roles = self.roles();
        if roles.len() != fds.len() {
            return Err(HandoverError::Descriptors { expected: roles.len(), found: fds.len() });
        }
        let mut assigned = DiskDescriptors::default();
        for (role, fd) in roles.into_iter().zip(fds) {
            match role {
                Role::Listener => assigned.listener = Some(fd),
                Role::Connection => assigned.connection = Some(fd),
                Role::Mirror => assigned.mirror = Some(fd),
                Role::Partial(_) => assigned.partial.push(fd),
                Role::Unsent => assigned.unsent = Some(fd),
                _ => assigned.session.push(fd),
            }
        }
        Ok(assigned)
    }
}
