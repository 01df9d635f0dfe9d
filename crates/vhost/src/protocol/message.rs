//! The messages of vhost-user as bytes and descriptors, without state and without I/O.
//!
//! A message is a header of 12 bytes (request, flags, payload size; each a little-endian `u32`) and
//! a payload. Its descriptors come with the bytes of its header. A receiver must not read beyond
//! the end of a message: it could not tell which message the descriptors belong to. It asks
//! [`Framer::wanted`] how many bytes to receive and passes what it received to [`Framer::push`],
//! which returns a [`Message`] when it is complete. [`Request::decode`] checks payload size and
//! number of descriptors and returns the typed request.
//!
//! A peer cannot make the receiver reserve more than [`PAYLOAD_BYTES_MAX`] and [`DESCRIPTORS_MAX`].
//! Descriptors are owned from the start, so an error closes them.

use std::fmt;
use std::os::fd::OwnedFd;

use crate::bytes::Reader;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 12;
/// Longest payload that is received. The longest defined one has 268 bytes (a configuration space).
pub const PAYLOAD_BYTES_MAX: usize = 4096;
/// Most descriptors that are received with one message. The most in a defined message are eight (a
/// memory table).
pub const DESCRIPTORS_MAX: usize = 32;
/// Most regions in one SET_MEM_TABLE.
pub const TABLE_REGIONS_MAX: usize = 8;
/// Longest configuration space that can be requested.
pub const CONFIG_BYTES_MAX: usize = 256;
/// Largest ring of virtio.
pub const RING_SIZE_MAX: u16 = 32768;
/// Most rings of a device: kick, call and err messages have eight bits for the ring's index.
pub const RINGS_MAX: u16 = 256;

const FLAGS_VERSION_MASK: u32 = 0x3;
const FLAGS_VERSION: u32 = 0x1;
const FLAGS_REPLY: u32 = 0x4;
const FLAGS_NEED_REPLY: u32 = 0x8;

/// Ring index in a kick, call or err message.
const VRING_INDEX_MASK: u64 = 0xff;
/// Set in a kick, call or err message without a descriptor.
const VRING_NO_DESCRIPTOR: u64 = 0x100;
/// Flag of SET_VRING_ADDR: writes to the used ring are logged.
const VRING_FLAG_LOG: u32 = 0x1;

/// Numbers of requests.
#[expect(missing_docs, reason = "the names are the specification's")]
pub mod id {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const CREATE_CRYPTO_SESSION: u32 = 26;
    pub const POSTCOPY_ADVISE: u32 = 28;
    pub const POSTCOPY_END: u32 = 30;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const GET_STATUS: u32 = 40;
    pub const GET_SHARED_OBJECT: u32 = 41;
    pub const SET_DEVICE_STATE_FD: u32 = 42;
    pub const CHECK_DEVICE_STATE: u32 = 43;
    pub const GET_SHMEM_CONFIG: u32 = 44;

    /// On the backend's own channel: the configuration space changed.
    pub const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// A violation of the protocol that closes the front end's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The flags have another protocol version.
    Version {
        /// The header's flags.
        flags: u32,
    },
    /// A reply instead of a request.
    UnexpectedReply {
        /// The header's request number.
        request: u32,
    },
    /// A payload beyond [`PAYLOAD_BYTES_MAX`].
    PayloadTooLong {
        /// The header's request number.
        request: u32,
        /// The announced size, bytes.
        size: u32,
    },
    /// More than [`DESCRIPTORS_MAX`] descriptors with one message.
    TooManyDescriptors,
    /// More bytes than [`Framer::wanted`] said.
    BeyondMessage,
    /// The payload size does not match the request.
    PayloadSize {
        /// The request.
        request: u32,
        /// Bytes found.
        found: usize,
    },
    /// The number of descriptors does not match the request.
    Descriptors {
        /// The request.
        request: u32,
        /// Descriptors found.
        found: usize,
    },
    /// A ring that the device does not have.
    NoSuchRing {
        /// The request.
        request: u32,
        /// The ring's number.
        ring: u32,
    },
    /// Feature bits that were never offered.
    NotOffered {
        /// The request.
        request: u32,
        /// The bits.
        bits: u64,
    },
    /// A request that cannot be obeyed, without a request for an acknowledgement.
    Refused {
        /// The request.
        request: u32,
        /// Why.
        reason: &'static str,
    },
    /// A request for a reply that this device does not support.
    Unanswerable {
        /// The request.
        request: u32,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Version { flags } => write!(f, "message flags {flags:#x}: expected version 1"),
            Self::UnexpectedReply { request } => {
                write!(f, "reply to request {request} where a request was due")
            }
            Self::PayloadTooLong { request, size } => {
                write!(f, "request {request}: payload of {size} bytes, at most {PAYLOAD_BYTES_MAX}")
            }
            Self::TooManyDescriptors => {
                write!(f, "more than {DESCRIPTORS_MAX} descriptors with one message")
            }
            Self::BeyondMessage => write!(f, "bytes beyond the end of the message"),
            Self::PayloadSize { request, found } => {
                write!(f, "request {request}: payload of {found} bytes does not fit the request")
            }
            Self::Descriptors { request, found } => {
                write!(f, "request {request}: {found} descriptors do not fit the request")
            }
            Self::NoSuchRing { request, ring } => {
                write!(f, "request {request}: the device has no ring {ring}")
            }
            Self::NotOffered { request, bits } => {
                write!(f, "request {request}: feature bits {bits:#x} were not offered")
            }
            Self::Refused { request, reason } => write!(f, "request {request}: {reason}"),
            Self::Unanswerable { request } => {
                write!(f, "request {request} waits for an answer that this device cannot give")
            }
        }
    }
}

impl std::error::Error for Violation {}

/// A message as received: its payload is not checked yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The request's number, see [`id`].
    pub request: u32,
    /// Version, reply and need-reply bits.
    pub flags: u32,
    /// The bytes after the header.
    pub payload: Vec<u8>,
}

impl Message {
    /// A request as a front end sends it.
    pub fn request(request: u32, need_reply: bool, payload: Vec<u8>) -> Self {
        let flags = FLAGS_VERSION | if need_reply { FLAGS_NEED_REPLY } else { 0 };
        Self { request, flags, payload }
    }

    /// The reply to a request.
    pub fn reply(request: u32, payload: Vec<u8>) -> Self {
        Self { request, flags: FLAGS_VERSION | FLAGS_REPLY, payload }
    }

    /// Whether the sender wants an acknowledgement, if that was negotiated.
    pub fn needs_reply(&self) -> bool {
        self.flags & FLAGS_NEED_REPLY != 0
    }

    /// The bytes to send.
    pub fn encode(&self) -> Vec<u8> {
        let size = u32::try_from(self.payload.len()).expect("a payload is far below 4 GiB");
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.payload.len());
        for word in [self.request, self.flags, size] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&self.payload);
        bytes
    }
}

/// The message on the backend channel that makes the front end read the configuration space again.
pub fn config_change() -> Vec<u8> {
    Message::request(id::BACKEND_CONFIG_CHANGE, false, Vec::new()).encode()
}

/// Assembles a message from the pieces in which it arrives.
#[derive(Debug, Default)]
pub struct Framer {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Framer {
    /// Starts at the beginning of a message.
    pub fn new() -> Self {
        Self::default()
    }

    /// Continues in the middle of a message; see [`Framer::into_parts`].
    pub fn from_parts(bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> Result<Self, Violation> {
        let mut framer = Self { bytes: Vec::new(), descriptors };
        if framer.descriptors.len() > DESCRIPTORS_MAX {
            return Err(Violation::TooManyDescriptors);
        }
        let (header, payload) = bytes.split_at(bytes.len().min(HEADER_BYTES));
        for piece in [header, payload] {
            if piece.is_empty() {
                continue;
            }
            if framer.push(piece, Vec::new())?.is_some() {
                return Err(Violation::BeyondMessage);
            }
        }
        Ok(framer)
    }

    /// The bytes and descriptors received so far of an incomplete message, to be carried elsewhere.
    pub fn into_parts(self) -> (Vec<u8>, Vec<OwnedFd>) {
        (self.bytes, self.descriptors)
    }

    /// Like [`Framer::into_parts`], but the framer stays in use.
    pub fn parts(&self) -> (&[u8], &[OwnedFd]) {
        (&self.bytes, &self.descriptors)
    }

    /// Takes the descriptors received so far of a message that will not be completed.
    pub(crate) fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors)
    }

    /// Whether no part of a message has arrived.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.descriptors.is_empty()
    }

    /// The most bytes to receive next. Never 0.
    pub fn wanted(&self) -> usize {
        match self.header() {
            None => HEADER_BYTES - self.bytes.len(),
            Some((_, _, size)) => HEADER_BYTES + size as usize - self.bytes.len(),
        }
    }

    /// Takes received bytes, at most [`Framer::wanted`], and returns the message that they
    /// complete.
    ///
    /// After an error the connection must be closed and the framer must not be used again.
    pub fn push(
        &mut self,
        bytes: &[u8],
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<Option<(Message, Vec<OwnedFd>)>, Violation> {
        if bytes.len() > self.wanted() {
            return Err(Violation::BeyondMessage);
        }
        if self.descriptors.len() + descriptors.len() > DESCRIPTORS_MAX {
            return Err(Violation::TooManyDescriptors);
        }
        self.descriptors.append(&mut descriptors);
        self.bytes.extend_from_slice(bytes);
        let Some((request, flags, size)) = self.header() else {
            return Ok(None);
        };
        if flags & FLAGS_VERSION_MASK != FLAGS_VERSION {
            return Err(Violation::Version { flags });
        }
        if flags & FLAGS_REPLY != 0 {
            return Err(Violation::UnexpectedReply { request });
        }
        if size as usize > PAYLOAD_BYTES_MAX {
            return Err(Violation::PayloadTooLong { request, size });
        }
        if self.bytes.len() < HEADER_BYTES + size as usize {
            return Ok(None);
        }
        let payload = self.bytes[HEADER_BYTES..].to_vec();
        self.bytes.clear();
        Ok(Some((Message { request, flags, payload }, std::mem::take(&mut self.descriptors))))
    }

    fn header(&self) -> Option<(u32, u32, u32)> {
        let mut header = Reader::new(self.bytes.get(..HEADER_BYTES)?);
        Some((header.u32()?, header.u32()?, header.u32()?))
    }
}

/// A region of guest memory, in numbers. Its descriptor travels beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionInfo {
    /// Guest physical address of the first byte.
    pub guest_addr: u64,
    /// Size in bytes.
    pub size: u64,
    /// The first byte's address in the front end. Ring addresses are in this address space.
    pub user_addr: u64,
    /// Offset of the region in the descriptor's file, bytes.
    pub mmap_offset: u64,
}

impl RegionInfo {
    /// Reads the 32 bytes that [`RegionInfo::encode`] appends.
    pub fn decode(fields: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            guest_addr: fields.u64()?,
            size: fields.u64()?,
            user_addr: fields.u64()?,
            mmap_offset: fields.u64()?,
        })
    }

    /// Appends the region to `bytes`, in the form that vhost-user messages have.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        for number in [self.guest_addr, self.size, self.user_addr, self.mmap_offset] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
}

/// The addresses of a ring in the front end. They may be unaligned: the guest chose them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptor table, or the packed ring.
    pub desc: u64,
    /// Used ring, or the device's event suppression.
    pub used: u64,
    /// Avail ring, or the driver's event suppression.
    pub avail: u64,
}

/// The place of an in-flight region in its descriptor's file, and its shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InflightInfo {
    /// Bytes to map.
    pub mmap_size: u64,
    /// Offset in the file, bytes.
    pub mmap_offset: u64,
    /// Number of rings that it has room for.
    pub queues: u16,
    /// Entries for each ring.
    pub queue_size: u16,
}

impl InflightInfo {
    /// Reads the 20 bytes that [`InflightInfo::encode`] appends.
    pub(crate) fn decode(fields: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            mmap_size: fields.u64()?,
            mmap_offset: fields.u64()?,
            queues: fields.u16()?,
            queue_size: fields.u16()?,
        })
    }

    /// Reads the payload of a message: 20 bytes by the specification, 24 from front ends in C,
    /// where the structure ends with padding.
    fn decode_message(fields: &mut Reader<'_>) -> Option<Self> {
        let area = Self::decode(fields)?;
        if !fields.is_empty() {
            fields.take(4)?;
        }
        Some(area)
    }

    /// Appends the region's place and shape to `bytes`.
    pub(crate) fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.mmap_size.to_le_bytes());
        bytes.extend_from_slice(&self.mmap_offset.to_le_bytes());
        bytes.extend_from_slice(&self.queues.to_le_bytes());
        bytes.extend_from_slice(&self.queue_size.to_le_bytes());
    }

    /// Whether the numbers are possible. The size that the region needs also depends on the rings'
    /// format.
    pub(crate) fn is_possible(&self) -> bool {
        self.mmap_size != 0
            && self.mmap_size.checked_add(self.mmap_offset).is_some()
            && (1..=RINGS_MAX).contains(&self.queues)
            && (1..=RING_SIZE_MAX).contains(&self.queue_size)
    }
}

/// The place of the dirty log in its descriptor's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogInfo {
    /// Bytes to map. One bit stands for each page of 4096 bytes of guest memory.
    pub mmap_size: u64,
    /// Offset in the file, bytes.
    pub mmap_offset: u64,
}

impl LogInfo {
    /// Whether the numbers are possible.
    pub(crate) fn is_possible(&self) -> bool {
        self.mmap_size != 0 && self.mmap_size.checked_add(self.mmap_offset).is_some()
    }
}

/// A request whose payload size and number of descriptors are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the specification's")]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<RegionInfo>),
    /// `None`: the old form, an address in the front end's memory without a descriptor.
    SetLogBase(Option<LogInfo>),
    SetLogFd,
    SetVringNum {
        ring: u32,
        size: u32,
    },
    SetVringAddr {
        ring: u32,
        addresses: RingAddresses,
        /// The guest physical address of the used ring, if writes to it are logged.
        log: Option<u64>,
    },
    SetVringBase {
        ring: u32,
        base: u32,
    },
    GetVringBase {
        ring: u32,
    },
    /// Without a descriptor the ring is polled.
    SetVringKick {
        ring: u32,
    },
    SetVringCall {
        ring: u32,
    },
    SetVringErr {
        ring: u32,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        ring: u32,
        enable: bool,
    },
    SetBackendReqFd,
    GetConfig {
        offset: u32,
        size: u32,
        flags: u32,
    },
    SetConfig {
        offset: u32,
        flags: u32,
        bytes: Vec<u8>,
    },
    GetInflightFd(InflightInfo),
    SetInflightFd(InflightInfo),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(RegionInfo),
    RemMemReg(RegionInfo),
    Unknown,
}

impl Request {
    /// Returns the typed form of `message`, which came with `descriptors` descriptors.
    ///
    /// # Errors
    /// [`Violation::PayloadSize`], [`Violation::Descriptors`], and [`Violation::Refused`] for an
    /// undefined flag.
    pub fn decode(message: &Message, descriptors: usize) -> Result<Self, Violation> {
        let request = message.request;
        let size_error = Violation::PayloadSize { request, found: message.payload.len() };
        let decoded = Self::from_payload(request, &message.payload).ok_or(size_error)?;
        let fits = match &decoded {
            Self::SetMemTable(regions) => descriptors == regions.len(),
            Self::SetLogBase(area) => descriptors == usize::from(area.is_some()),
            Self::SetLogFd
            | Self::SetBackendReqFd
            | Self::SetInflightFd(_)
            | Self::AddMemReg(_) => descriptors == 1,
            Self::SetVringKick { .. } | Self::SetVringCall { .. } | Self::SetVringErr { .. } => {
                let none = Reader::new(&message.payload)
                    .u64()
                    .is_some_and(|v| v & VRING_NO_DESCRIPTOR != 0);
                descriptors == usize::from(!none)
            }
            // Older front ends send the region's descriptor with its removal.
            Self::RemMemReg(_) => descriptors <= 1,
            Self::Unknown => true,
            _ => descriptors == 0,
        };
        if !fits {
            return Err(Violation::Descriptors { request, found: descriptors });
        }
        if let Self::SetVringEnable { .. } = decoded
            && message.payload[4..] != [0; 4]
            && message.payload[4..] != [1, 0, 0, 0]
        {
            return Err(Violation::Refused { request, reason: "a ring is enabled with 0 or 1" });
        }
        Ok(decoded)
    }

    /// Returns `None` if the payload size does not match the request.
    fn from_payload(request: u32, payload: &[u8]) -> Option<Self> {
        let mut fields = Reader::new(payload);
        let decoded = match request {
            id::GET_FEATURES => Self::GetFeatures,
            id::SET_FEATURES => Self::SetFeatures(fields.u64()?),
            id::SET_OWNER => Self::SetOwner,
            id::RESET_OWNER => Self::ResetOwner,
            id::SET_MEM_TABLE => {
                let count = fields.u32()? as usize;
                fields.u32()?;
                if count > TABLE_REGIONS_MAX {
                    return None;
                }
                Self::SetMemTable(
                    (0..count).map(|_| RegionInfo::decode(&mut fields)).collect::<Option<_>>()?,
                )
            }
            id::SET_LOG_BASE if payload.len() == 8 => {
                fields.u64()?;
                Self::SetLogBase(None)
            }
            id::SET_LOG_BASE => Self::SetLogBase(Some(LogInfo {
                mmap_size: fields.u64()?,
                mmap_offset: fields.u64()?,
            })),
            id::SET_LOG_FD => Self::SetLogFd,
            id::SET_VRING_NUM => Self::SetVringNum { ring: fields.u32()?, size: fields.u32()? },
            id::SET_VRING_ADDR => {
                let (ring, flags) = (fields.u32()?, fields.u32()?);
                let (desc, used, avail) = (fields.u64()?, fields.u64()?, fields.u64()?);
                let log = fields.u64()?;
                let log = (flags & VRING_FLAG_LOG != 0).then_some(log);
                Self::SetVringAddr { ring, addresses: RingAddresses { desc, used, avail }, log }
            }
            id::SET_VRING_BASE => Self::SetVringBase { ring: fields.u32()?, base: fields.u32()? },
            id::GET_VRING_BASE => {
                let ring = fields.u32()?;
                fields.u32()?;
                Self::GetVringBase { ring }
            }
            id::SET_VRING_KICK => Self::SetVringKick { ring: vring(&mut fields)? },
            id::SET_VRING_CALL => Self::SetVringCall { ring: vring(&mut fields)? },
            id::SET_VRING_ERR => Self::SetVringErr { ring: vring(&mut fields)? },
            id::GET_PROTOCOL_FEATURES => Self::GetProtocolFeatures,
            id::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(fields.u64()?),
            id::GET_QUEUE_NUM => Self::GetQueueNum,
            id::SET_VRING_ENABLE => {
                Self::SetVringEnable { ring: fields.u32()?, enable: fields.u32()? != 0 }
            }
            id::SET_BACKEND_REQ_FD => Self::SetBackendReqFd,
            id::GET_CONFIG => {
                let (offset, size, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
                // The request includes space for the answer, of any length. Some front ends omit
                // it.
                fields.take(fields.len().min(CONFIG_BYTES_MAX))?;
                Self::GetConfig { offset, size, flags }
            }
            id::SET_CONFIG => {
                let (offset, size, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
                Self::SetConfig { offset, flags, bytes: fields.take(size as usize)?.to_vec() }
            }
            id::GET_INFLIGHT_FD => Self::GetInflightFd(InflightInfo::decode_message(&mut fields)?),
            id::SET_INFLIGHT_FD => Self::SetInflightFd(InflightInfo::decode_message(&mut fields)?),
            id::RESET_DEVICE => Self::ResetDevice,
            id::GET_MAX_MEM_SLOTS => Self::GetMaxMemSlots,
            id::ADD_MEM_REG => {
                fields.u64()?;
                Self::AddMemReg(RegionInfo::decode(&mut fields)?)
            }
            id::REM_MEM_REG => {
                fields.u64()?;
                Self::RemMemReg(RegionInfo::decode(&mut fields)?)
            }
            _ => return Some(Self::Unknown),
        };
        fields.is_empty().then_some(decoded)
    }
}

/// The ring's number in a kick, call or err message.
fn vring(fields: &mut Reader<'_>) -> Option<u32> {
    Some((fields.u64()? & VRING_INDEX_MASK) as u32)
}

/// A reply with one number: features, or an acknowledgement (0 for success).
pub fn reply_u64(request: u32, value: u64) -> Vec<u8> {
    Message::reply(request, value.to_le_bytes().to_vec()).encode()
}

/// The reply to GET_VRING_BASE.
pub fn reply_vring_base(ring: u32, base: u32) -> Vec<u8> {
    let payload = [ring.to_le_bytes(), base.to_le_bytes()].concat();
    Message::reply(id::GET_VRING_BASE, payload).encode()
}

/// The reply to GET_CONFIG: exactly the requested `bytes`, or none if the request failed.
pub fn reply_config(offset: u32, flags: u32, bytes: &[u8]) -> Vec<u8> {
    let size = u32::try_from(bytes.len()).expect("at most CONFIG_BYTES_MAX");
    let mut payload = Vec::with_capacity(12 + bytes.len());
    if !bytes.is_empty() {
        for word in [offset, size, flags] {
            payload.extend_from_slice(&word.to_le_bytes());
        }
        payload.extend_from_slice(bytes);
    }
    Message::reply(id::GET_CONFIG, payload).encode()
}

/// The reply to GET_INFLIGHT_FD, in the form of a request whose payload had `payload_bytes`.
pub fn reply_inflight(area: &InflightInfo, payload_bytes: usize) -> Vec<u8> {
    let mut payload = Vec::with_capacity(24);
    area.encode(&mut payload);
    payload.resize(payload_bytes.clamp(20, 24), 0);
    Message::reply(id::GET_INFLIGHT_FD, payload).encode()
}

/// The position of a packed ring, as in SET_VRING_BASE and GET_VRING_BASE. (A split ring's base is
/// its avail index.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedBase {
    /// Next descriptor to take, below 32768.
    pub avail: u16,
    /// The wrap counter of `avail`.
    pub avail_wrap: bool,
    /// Next descriptor to use, below 32768.
    pub used: u16,
    /// The wrap counter of `used`.
    pub used_wrap: bool,
}

impl PackedBase {
    /// Bits 0-14 are the avail index, 15 its wrap counter, 16-30 the used index, 31 its wrap
    /// counter.
    pub fn from_bits(bits: u32) -> Self {
        Self {
            avail: (bits & 0x7fff) as u16,
            avail_wrap: bits & 0x8000 != 0,
            used: (bits >> 16 & 0x7fff) as u16,
            used_wrap: bits >> 31 != 0,
        }
    }

    /// The inverse of [`PackedBase::from_bits`].
    pub fn bits(self) -> u32 {
        u32::from(self.avail & 0x7fff)
            | u32::from(self.avail_wrap) << 15
            | u32::from(self.used & 0x7fff) << 16
            | u32::from(self.used_wrap) << 31
    }
}
