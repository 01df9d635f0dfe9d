//! A disk's state on its way from one process to its successor: the session with the front end, the
//! rings, and the disk's own properties, as numbers. The descriptors travel beside the state, in
//! the order of [`DiskState::roles`].
//!
//! 1. The old process quiesces the rings and stops reading the connection. It calls
//!    [`Session::export`], fills in a [`DiskState`], and sends the bytes of [`DiskState::encode`]
//!    with the descriptors.
//! 2. The new process calls [`DiskState::decode`] and [`DiskState::assign`], then
//!    [`Session::import`], which returns the same actions as if the front end had sent everything
//!    again.
//! 3. Then the old process releases its own state. Until then an error leaves everything as it was.
//!
//! The format is in `docs/formats/handover.md`. A reader that meets an unknown field refuses the
//! whole document: it could not keep the field. A reader accepts exactly the bytes that a writer
//! would write for the same state, so every state has one form.

use std::fmt;
use std::os::fd::OwnedFd;

use crate::bytes::Reader;
use crate::protocol::config::feature;
use crate::protocol::message::{
    DESCRIPTORS_MAX, HEADER_BYTES, InflightInfo, LogInfo, PAYLOAD_BYTES_MAX, PackedBase,
    RING_SIZE_MAX, RINGS_MAX, RegionInfo, RingAddresses,
};
#[cfg(doc)]
use crate::protocol::session::Session;
use crate::protocol::session::{Kick, MEMORY_REGIONS_MAX, Ring, RingState, check_region};

const MAGIC: [u8; 8] = *b"MRvhost\n";
const VERSION: u32 = 1;
/// Magic, version, length of the fields.
const PREFIX_BYTES: usize = 16;
/// The checksum after the fields.
const SUFFIX_BYTES: usize = 4;
/// Longest document that is read.
pub const DOCUMENT_BYTES_MAX: usize = 1 << 20;
/// Longest name, bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// Most statistics, and most rate limits.
pub const NUMBERS_MAX: usize = 1024;

mod tag {
    pub const DISK: u16 = 1;
    pub const STATISTICS: u16 = 2;
    pub const LIMITS: u16 = 3;
    pub const MIRROR: u16 = 4;
    pub const SESSION: u16 = 5;
    pub const MEMORY: u16 = 6;
    pub const INFLIGHT: u16 = 7;
    pub const LOG: u16 = 8;
    pub const RINGS: u16 = 9;
    pub const PARTIAL: u16 = 10;
    pub const DESCRIPTORS: u16 = 11;
    pub const FLUSH_FAILED: u16 = 12;
    pub const UNSENT: u16 = 13;
    pub const UNDER_WAY: u16 = 14;
}

/// Why a disk cannot be taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoverError {
    /// The bytes are not a disk state.
    Magic,
    /// The version is not supported.
    Version(u32),
    /// Longer than [`DOCUMENT_BYTES_MAX`], or not as long as its header says.
    Length {
        /// Bytes.
        found: usize,
    },
    /// The checksum does not match.
    Checksum,
    /// A field that this version does not know, so it cannot keep the state.
    UnknownField(u16),
    /// A required field is missing.
    MissingField(u16),
    /// A field with contents that no writer produces.
    Field {
        /// The field.
        field: u16,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A writer would encode the same state differently.
    NotCanonical,
    /// The number of descriptors does not match the state.
    Descriptors {
        /// Descriptors that belong to the state.
        expected: usize,
        /// Descriptors that came.
        found: usize,
    },
    /// The front end uses features that this process does not offer.
    NotOffered {
        /// Virtio feature bits or protocol feature bits.
        bits: u64,
    },
    /// The front end uses a different number of rings than the disk has here.
    Rings {
        /// Rings of the disk.
        expected: usize,
        /// Rings of the session.
        found: usize,
    },
    /// The front end has more memory regions than this process accepts.
    Regions,
}

impl fmt::Display for HandoverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Magic => write!(f, "not a disk state"),
            Self::Version(version) => {
                write!(f, "disk state of version {version}, expected version {VERSION}")
            }
            Self::Length { found } => {
                write!(f, "disk state of {found} bytes does not match its length field")
            }
            Self::Checksum => write!(f, "disk state with a wrong checksum"),
            Self::UnknownField(field) => write!(f, "disk state with unknown field {field}"),
            Self::MissingField(field) => write!(f, "disk state without field {field}"),
            Self::Field { field, reason } => write!(f, "disk state, field {field}: {reason}"),
            Self::NotCanonical => write!(f, "disk state is not in its canonical form"),
            Self::Descriptors { expected, found } => {
                write!(f, "disk state with {found} descriptors, expected {expected}")
            }
            Self::NotOffered { bits } => {
                write!(f, "the front end uses feature bits {bits:#x}, which are not offered here")
            }
            Self::Rings { expected, found } => {
                write!(f, "the front end uses {found} rings, but the disk has {expected} here")
            }
            Self::Regions => {
                write!(f, "the front end has more memory regions than this process accepts")
            }
        }
    }
}

impl std::error::Error for HandoverError {}

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

/// The position of a ring that is not idle. Nothing of the ring is in flight, except for what the
/// in-flight region records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingProgress {
    /// Next avail index to take; for packed rings the next descriptor.
    pub next_avail: u16,
    /// Packed rings: the wrap counter of `next_avail`.
    pub avail_wrap: bool,
    /// Next used index to fill; for packed rings the next descriptor to use.
    pub next_used: u16,
    /// Packed rings: the wrap counter of `next_used`.
    pub used_wrap: bool,
    /// The used index at the last check whether the guest wants a call.
    pub signalled_used: u16,
    /// The ring is broken and must not be read until it is started again.
    pub broken: bool,
}

impl RingProgress {
    /// The inverse of [`RingProgress::base`]. If nothing is in flight, the base is complete.
    pub fn from_base(base: u32, packed: bool, broken: bool) -> Self {
        if !packed {
            let next = base as u16;
            let same =
                Self { next_avail: next, next_used: next, signalled_used: next, ..Self::default() };
            return Self { broken, ..same };
        }
        let PackedBase { avail, avail_wrap, used, used_wrap } = PackedBase::from_bits(base);
        let signalled_used = used;
        Self { next_avail: avail, avail_wrap, next_used: used, used_wrap, signalled_used, broken }
    }

    /// The position at which the ring continues, in the form of SET_VRING_BASE.
    pub fn base(&self, packed: bool) -> u32 {
        if !packed {
            return self.next_avail.into();
        }
        let (avail, used) = (self.next_avail, self.next_used);
        PackedBase { avail, avail_wrap: self.avail_wrap, used, used_wrap: self.used_wrap }.bits()
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

    fn packed(&self) -> bool {
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
pub struct UnderWay {
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
    /// Operations of the old process that are still in flight. Until it reports their end, the
    /// requests in the in-flight region must not be executed again.
    pub under_way: Option<UnderWay>,
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

    /// Encodes the state.
    ///
    /// # Panics
    /// If a name is longer than [`NAME_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let mut fields = Writer(Vec::new());
        fields.field(tag::DISK, |w| {
            w.name(&self.name);
            w.u64(self.capacity_sectors);
            w.u64(self.resize_epoch);
            w.u8(u8::from(self.listening));
        });
        for (tag, numbers) in [(tag::STATISTICS, &self.statistics), (tag::LIMITS, &self.limits)] {
            if !numbers.is_empty() {
                fields.field(tag, |w| {
                    for (name, number) in numbers {
                        w.name(name);
                        w.u64(*number);
                    }
                });
            }
        }
        if let Some(mirror) = &self.mirror {
            fields.field(tag::MIRROR, |w| {
                w.u64(mirror.granule_bytes);
                w.u64(mirror.bits);
            });
        }
        if let Some(connection) = &self.connection {
            connection.encode(&mut fields);
        }
        fields.field(tag::DESCRIPTORS, |w| {
            for number in self.roles().into_iter().flat_map(Role::numbers) {
                w.u16(number);
            }
        });
        if self.flush_failed {
            fields.field(tag::FLUSH_FAILED, |_| {});
        }
        if let Some(connection) = &self.connection {
            connection.encode_unsent(&mut fields);
        }
        if let Some(UnderWay { flushes }) = self.under_way {
            fields.field(tag::UNDER_WAY, |w| w.u8(u8::from(flushes)));
        }
        document(&fields.0)
    }

    /// Decodes the bytes that [`DiskState::encode`] wrote.
    ///
    /// # Errors
    /// If the bytes differ in any detail from what [`DiskState::encode`] writes.
    pub fn decode(bytes: &[u8]) -> Result<Self, HandoverError> {
        let mut document = Reader::new(bytes);
        if document.take(MAGIC.len()) != Some(&MAGIC) {
            return Err(HandoverError::Magic);
        }
        let length_error = HandoverError::Length { found: bytes.len() };
        let version = document.u32().ok_or(length_error)?;
        if version != VERSION {
            return Err(HandoverError::Version(version));
        }
        let length = document.u32().ok_or(length_error)? as usize;
        if bytes.len() > DOCUMENT_BYTES_MAX || bytes.len() - PREFIX_BYTES != length + SUFFIX_BYTES {
            return Err(length_error);
        }
        let mut fields = Reader::new(document.take(length).ok_or(length_error)?);
        if document.u32() != Some(crc32c::crc32c(&bytes[..PREFIX_BYTES + length])) {
            return Err(HandoverError::Checksum);
        }
        let state = Self::decode_fields(&mut fields)?;
        if state.encode() != bytes {
            return Err(HandoverError::NotCanonical);
        }
        Ok(state)
    }

    fn decode_fields(fields: &mut Reader<'_>) -> Result<Self, HandoverError> {
        let mut state = Self::default();
        let mut seen = 0u32;
        let mut listed: &[u8] = &[];
        while !fields.is_empty() {
            let cut = HandoverError::Field { field: 0, reason: "cut short" };
            let field = fields.u16().ok_or(cut)?;
            let length = fields.u32().ok_or(cut)? as usize;
            let mut contents = Reader::new(fields.take(length).ok_or(cut)?);
            let error = |reason| HandoverError::Field { field, reason };
            if !(tag::DISK..=tag::UNDER_WAY).contains(&field) {
                return Err(HandoverError::UnknownField(field));
            }
            if seen & 1 << field != 0 {
                return Err(error("repeated"));
            }
            seen |= 1 << field;
            if field == tag::SESSION {
                state.connection = Some(ConnectionState::default());
            }
            let parsed = match (field, &mut state.connection) {
                (tag::DESCRIPTORS, _) => {
                    listed = contents.rest();
                    Some(())
                }
                (..=tag::MIRROR | tag::FLUSH_FAILED | tag::UNDER_WAY, _) => {
                    state.decode_own(field, &mut contents)
                }
                (_, Some(connection)) => connection.decode(field, &mut contents),
                (_, None) => return Err(HandoverError::MissingField(tag::SESSION)),
            };
            if parsed.is_none() || !contents.is_empty() {
                return Err(error("malformed"));
            }
        }
        for field in [tag::DISK, tag::DESCRIPTORS] {
            if seen & 1 << field == 0 {
                return Err(HandoverError::MissingField(field));
            }
        }
        let numbers = state.roles().into_iter().flat_map(Role::numbers);
        if !numbers.flat_map(u16::to_le_bytes).eq(listed.iter().copied()) {
            let reason = "not the descriptors that belong to the state";
            return Err(HandoverError::Field { field: tag::DESCRIPTORS, reason });
        }
        if state.connection.is_some() && seen & 1 << tag::RINGS == 0 {
            return Err(HandoverError::MissingField(tag::RINGS));
        }
        state.check()?;
        Ok(state)
    }

    fn decode_own(&mut self, field: u16, contents: &mut Reader<'_>) -> Option<()> {
        match field {
            tag::DISK => {
                self.name = decode_name(contents)?;
                self.capacity_sectors = contents.u64()?;
                self.resize_epoch = contents.u64()?;
                self.listening = contents.bool()?;
            }
            tag::STATISTICS => self.statistics = decode_numbers(contents)?,
            tag::LIMITS => self.limits = decode_numbers(contents)?,
            tag::FLUSH_FAILED => self.flush_failed = true,
            tag::UNDER_WAY => self.under_way = Some(UnderWay { flushes: contents.bool()? }),
            _ => {
                let (granule_bytes, bits) = (contents.u64()?, contents.u64()?);
                self.mirror = Some(MirrorState { granule_bytes, bits });
            }
        }
        Some(())
    }

    /// Checks the rules that the encoding does not enforce.
    fn check(&self) -> Result<(), HandoverError> {
        let error = |field, reason| Err(HandoverError::Field { field, reason });
        if self.mirror.is_some_and(|mirror| !mirror.granule_bytes.is_power_of_two()) {
            return error(tag::MIRROR, "granule size is not a power of two");
        }
        let session = self.connection.as_ref().map(|connection| &connection.session);
        if self.under_way.is_some() && session.is_none_or(|session| session.inflight.is_none()) {
            return error(tag::UNDER_WAY, "no in-flight region records it");
        }
        let Some(connection) = &self.connection else { return Ok(()) };
        let ConnectionState { session, partial, partial_descriptors, .. } = connection;
        if partial.len() >= HEADER_BYTES + PAYLOAD_BYTES_MAX
            || usize::from(*partial_descriptors) > DESCRIPTORS_MAX
            || (partial.is_empty() && *partial_descriptors != 0)
        {
            return error(tag::PARTIAL, "not a part of a message");
        }
        if connection.unsent.len() > HEADER_BYTES + PAYLOAD_BYTES_MAX {
            return error(tag::UNSENT, "more than a reply");
        }
        if session.regions.len() > usize::from(MEMORY_REGIONS_MAX) {
            return error(tag::MEMORY, "too many regions");
        }
        for (i, region) in session.regions.iter().enumerate() {
            if let Err(reason) = check_region(region, &session.regions[..i]) {
                return error(tag::MEMORY, reason);
            }
        }
        if session.inflight.is_some_and(|area| !area.is_possible()) {
            return error(tag::INFLIGHT, "impossible size");
        }
        if session.log.is_some_and(|area| !area.is_possible()) {
            return error(tag::LOG, "impossible size");
        }
        if !(1..=usize::from(RINGS_MAX)).contains(&session.rings.len()) {
            return error(tag::RINGS, "not 1 to 256");
        }
        for (ring, progress) in &session.rings {
            if let Err(reason) = check_ring(session, ring, progress.as_ref()) {
                return error(tag::RINGS, reason);
            }
        }
        Ok(())
    }
}

/// A document with these fields.
pub(crate) fn document(fields: &[u8]) -> Vec<u8> {
    let length = u32::try_from(fields.len()).expect("a document is far below 4 GiB");
    let mut document = Writer(MAGIC.to_vec());
    document.u32(VERSION);
    document.u32(length);
    document.0.extend_from_slice(fields);
    document.u32(crc32c::crc32c(&document.0));
    document.0
}

/// Checks whether a session can have brought the ring into this state.
fn check_ring(
    session: &SessionState,
    ring: &Ring,
    progress: Option<&RingProgress>,
) -> Result<(), &'static str> {
    if ring.size > RING_SIZE_MAX {
        return Err("impossible ring size");
    }
    if ring.log.is_some() && ring.addresses.is_none() {
        return Err("a log for a ring without addresses");
    }
    let possible = match session.features {
        Some(features) => ring.possible_states(features),
        None => &[RingState::Idle],
    };
    if !possible.contains(&ring.state) {
        return Err("ring state contradicts its size, addresses, kick and features");
    }
    if progress.is_some() != (ring.state != RingState::Idle) {
        return Err("progress of an idle ring, or no progress of an active one");
    }
    let Some(progress) = progress else {
        return Ok(());
    };
    let wraps = progress.avail_wrap || progress.used_wrap;
    if !session.packed() && wraps {
        return Err("wrap counters of a split ring");
    }
    if session.packed() && progress.next_avail.max(progress.next_used) >= RING_SIZE_MAX {
        return Err("a position beyond the end of a packed ring");
    }
    Ok(())
}

mod session_flag {
    pub const FEATURES: u8 = 1;
    pub const OWNED: u8 = 2;
    pub const WRITE_CACHE: u8 = 4;
    pub const LOG_SIGNAL: u8 = 8;
    pub const BACKEND_CHANNEL: u8 = 16;
}

mod ring_flag {
    pub const ENABLED: u16 = 1;
    pub const POLLING: u16 = 2;
    pub const KICK: u16 = 4;
    pub const CALL: u16 = 8;
    pub const ERR: u16 = 16;
    pub const ADDRESSES: u16 = 32;
    pub const LOG: u16 = 64;
    pub const RUNNING: u16 = 128;
    pub const PAUSED: u16 = 256;
    pub const AVAIL_WRAP: u16 = 512;
    pub const USED_WRAP: u16 = 1024;
    pub const BROKEN: u16 = 2048;
}

impl ConnectionState {
    fn encode(&self, fields: &mut Writer) {
        let session = &self.session;
        fields.field(tag::SESSION, |w| {
            use session_flag::*;
            w.u64(session.features.unwrap_or(0));
            w.u64(session.protocol_features);
            let flags = [
                (FEATURES, session.features.is_some()),
                (OWNED, session.owned),
                (WRITE_CACHE, session.write_cache),
                (LOG_SIGNAL, session.log_signal),
                (BACKEND_CHANNEL, session.backend_channel),
            ];
            w.u8(flags.iter().map(|(flag, set)| flag * u8::from(*set)).sum());
        });
        if !session.regions.is_empty() {
            fields.field(tag::MEMORY, |w| {
                for region in &session.regions {
                    region.encode(&mut w.0);
                }
            });
        }
        if let Some(area) = &session.inflight {
            fields.field(tag::INFLIGHT, |w| area.encode(&mut w.0));
        }
        if let Some(area) = &session.log {
            fields.field(tag::LOG, |w| {
                w.u64(area.mmap_size);
                w.u64(area.mmap_offset);
            });
        }
        fields.field(tag::RINGS, |w| {
            for (ring, progress) in &session.rings {
                w.ring(ring, &progress.unwrap_or_default());
            }
        });
        if !self.partial.is_empty() {
            fields.field(tag::PARTIAL, |w| {
                w.u16(self.partial_descriptors);
                w.0.extend_from_slice(&self.partial);
            });
        }
    }

    fn encode_unsent(&self, fields: &mut Writer) {
        if !self.unsent.is_empty() {
            fields.field(tag::UNSENT, |w| {
                w.u8(u8::from(self.unsent_descriptor));
                w.0.extend_from_slice(&self.unsent);
            });
        }
    }

    fn decode(&mut self, field: u16, contents: &mut Reader<'_>) -> Option<()> {
        let session = &mut self.session;
        match field {
            tag::SESSION => {
                use session_flag::*;
                let (features, protocol_features) = (contents.u64()?, contents.u64()?);
                let flags = contents.u8()?;
                session.features = (flags & FEATURES != 0).then_some(features);
                session.protocol_features = protocol_features;
                session.owned = flags & OWNED != 0;
                session.write_cache = flags & WRITE_CACHE != 0;
                session.log_signal = flags & LOG_SIGNAL != 0;
                session.backend_channel = flags & BACKEND_CHANNEL != 0;
            }
            tag::MEMORY => {
                while !contents.is_empty() {
                    session.regions.push(RegionInfo::decode(contents)?);
                }
            }
            tag::INFLIGHT => {
                session.inflight = Some(InflightInfo::decode(contents)?);
            }
            tag::LOG => {
                let (mmap_size, mmap_offset) = (contents.u64()?, contents.u64()?);
                session.log = Some(LogInfo { mmap_size, mmap_offset });
            }
            tag::RINGS => {
                while !contents.is_empty() {
                    session.rings.push(decode_ring(contents)?);
                }
            }
            tag::UNSENT => {
                self.unsent_descriptor = contents.bool()?;
                self.unsent = contents.rest().to_vec();
            }
            _ => {
                self.partial_descriptors = contents.u16()?;
                self.partial = contents.rest().to_vec();
            }
        }
        Some(())
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn name(&mut self, name: &str) {
        assert!(name.len() <= NAME_BYTES_MAX, "a name of {} bytes", name.len());
        self.u8(name.len() as u8);
        self.0.extend_from_slice(name.as_bytes());
    }

    fn field(&mut self, tag: u16, contents: impl FnOnce(&mut Self)) {
        self.u16(tag);
        let at = self.0.len();
        self.u32(0);
        contents(self);
        let length = u32::try_from(self.0.len() - at - 4).expect("a field is far below 4 GiB");
        self.0[at..at + 4].copy_from_slice(&length.to_le_bytes());
    }

    fn ring(&mut self, ring: &Ring, progress: &RingProgress) {
        use ring_flag::*;
        let flags = [
            (ENABLED, ring.enabled),
            (POLLING, ring.kick == Kick::Polling),
            (KICK, ring.kick == Kick::Descriptor),
            (CALL, ring.call),
            (ERR, ring.err),
            (ADDRESSES, ring.addresses.is_some()),
            (LOG, ring.log.is_some()),
            (RUNNING, ring.state == RingState::Running),
            (PAUSED, ring.state == RingState::Paused),
            (AVAIL_WRAP, progress.avail_wrap),
            (USED_WRAP, progress.used_wrap),
            (BROKEN, progress.broken),
        ];
        let addresses = ring.addresses.unwrap_or_default();
        self.u16(ring.size);
        self.u16(flags.iter().map(|(flag, set)| flag * u16::from(*set)).sum());
        self.u32(ring.base);
        self.u64(addresses.desc);
        self.u64(addresses.used);
        self.u64(addresses.avail);
        self.u64(ring.log.unwrap_or(0));
        self.u16(progress.next_avail);
        self.u16(progress.next_used);
        self.u16(progress.signalled_used);
    }
}

/// Reads a length byte and that many bytes of text.
fn decode_name(fields: &mut Reader<'_>) -> Option<String> {
    let length = fields.u8()?;
    Some(fields.str(length.into())?.to_owned())
}

/// Reads names with their numbers to the end, at most [`NUMBERS_MAX`].
fn decode_numbers(fields: &mut Reader<'_>) -> Option<Vec<(String, u64)>> {
    let mut numbers = Vec::new();
    while !fields.is_empty() && numbers.len() < NUMBERS_MAX {
        numbers.push((decode_name(fields)?, fields.u64()?));
    }
    Some(numbers)
}

fn decode_ring(fields: &mut Reader<'_>) -> Option<(Ring, Option<RingProgress>)> {
    use ring_flag::*;
    let (size, flags, base) = (fields.u16()?, fields.u16()?, fields.u32()?);
    let (desc, used, avail) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let log = fields.u64()?;
    let set = |flag: u16| flags & flag != 0;
    let ring = Ring {
        size,
        base,
        addresses: set(ADDRESSES).then_some(RingAddresses { desc, used, avail }),
        log: set(LOG).then_some(log),
        enabled: set(ENABLED),
        kick: match (set(POLLING), set(KICK)) {
            (_, true) => Kick::Descriptor,
            (true, false) => Kick::Polling,
            (false, false) => Kick::Unset,
        },
        call: set(CALL),
        err: set(ERR),
        state: match (set(RUNNING), set(PAUSED)) {
            (true, _) => RingState::Running,
            (false, true) => RingState::Paused,
            (false, false) => RingState::Idle,
        },
    };
    let progress = RingProgress {
        next_avail: fields.u16()?,
        avail_wrap: set(AVAIL_WRAP),
        next_used: fields.u16()?,
        used_wrap: set(USED_WRAP),
        signalled_used: fields.u16()?,
        broken: set(BROKEN),
    };
    Some((ring, (ring.state != RingState::Idle).then_some(progress)))
}
