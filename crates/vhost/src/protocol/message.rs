//! The messages of vhost-user, as bytes and descriptors: no state and no I/O.
//!
//! A message is a header of 12 bytes (request, flags, payload size; each a little-endian `u32`) and
//! a payload. Its descriptors come with the bytes of its header. A receiver must not read over the
//! end of a message, because it could not tell any more whose descriptors came: it asks
//! [`Framer::wanted`] how many bytes to receive, gives what came to [`Framer::push`], and has a
//! [`Message`] when that was the last piece. [`Request::decode`] then gives the request its
//! typed form, after checking payload size and number of descriptors.
//!
//! A peer announces nothing that reserves memory beyond [`PAYLOAD_BYTES_MAX`] and
//! [`DESCRIPTORS_MAX`]; descriptors are owned from the first moment, so that an error closes them.

use std::fmt;
use std::os::fd::OwnedFd;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 12;
/// Longest payload that is received. The longest one with a meaning has 268 bytes (a configuration
/// space).
pub const PAYLOAD_BYTES_MAX: usize = 4096;
/// Most descriptors that are received with one message. The most with a meaning are eight (a memory
/// table).
pub const DESCRIPTORS_MAX: usize = 32;
/// Most regions in one SET_MEM_TABLE.
pub const TABLE_REGIONS_MAX: usize = 8;
/// Longest configuration space that can be asked for.
pub const CONFIG_BYTES_MAX: usize = 256;
/// Largest ring of virtio.
pub const RING_SIZE_MAX: u16 = 32768;
/// Most rings of a device: a ring's number in kick, call and err messages has eight bits.
pub const RINGS_MAX: u16 = 256;

const FLAGS_VERSION_MASK: u32 = 0x3;
const FLAGS_VERSION: u32 = 0x1;
const FLAGS_REPLY: u32 = 0x4;
const FLAGS_NEED_REPLY: u32 = 0x8;

/// Ring index in a kick, call or err message.
const VRING_INDEX_MASK: u64 = 0xff;
/// Set in a kick, call or err message that has no descriptor.
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

/// What a front end did that its connection does not survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The flags name another version of the protocol.
    Version {
        /// The header's flags.
        flags: u32,
    },
    /// A reply where a request was due.
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
    /// A payload of another size than the request has.
    PayloadSize {
        /// The request.
        request: u32,
        /// Bytes found.
        found: usize,
    },
    /// Another number of descriptors than the request has.
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
    /// A request that cannot be obeyed, and whose sender did not ask to hear so.
    Refused {
        /// The request.
        request: u32,
        /// Why.
        reason: &'static str,
    },
    /// A request that waits for an answer which this device cannot give.
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

/// One message as it came: its payload is not checked yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// What is asked, see [`id`].
    pub request: u32,
    /// Version, reply and need-reply bits.
    pub flags: u32,
    /// What follows the header.
    pub payload: Vec<u8>,
}

impl Message {
    /// A request, as a front end sends it.
    pub fn request(request: u32, need_reply: bool, payload: Vec<u8>) -> Self {
        let flags = FLAGS_VERSION | if need_reply { FLAGS_NEED_REPLY } else { 0 };
        Self { request, flags, payload }
    }

    /// The answer to a request.
    pub fn reply(request: u32, payload: Vec<u8>) -> Self {
        Self { request, flags: FLAGS_VERSION | FLAGS_REPLY, payload }
    }

    /// Whether the sender wants to hear how it went, if that was negotiated.
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

/// The message on the backend's channel that tells the front end to read the configuration space
/// again.
pub fn config_change() -> Vec<u8> {
    Message::request(id::BACKEND_CONFIG_CHANGE, false, Vec::new()).encode()
}

/// Puts a message together from the pieces in which it arrives.
#[derive(Debug, Default)]
pub struct Framer {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Framer {
    /// At the border between two messages.
    pub fn new() -> Self {
        Self::default()
    }

    /// A framer that goes on in the middle of a message; see [`Framer::into_parts`].
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

    /// The bytes and descriptors of the message that has not wholly arrived, to be carried
    /// elsewhere.
    pub fn into_parts(self) -> (Vec<u8>, Vec<OwnedFd>) {
        (self.bytes, self.descriptors)
    }

    /// The same, while the framer goes on.
    pub fn parts(&self) -> (&[u8], &[OwnedFd]) {
        (&self.bytes, &self.descriptors)
    }

    /// Takes the descriptors that have come with it, when it does not go on.
    pub(crate) fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors)
    }

    /// Whether no part of a message has arrived.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.descriptors.is_empty()
    }

    /// How many bytes to receive next at most. Never 0.
    pub fn wanted(&self) -> usize {
        match self.header() {
            None => HEADER_BYTES - self.bytes.len(),
            Some((_, _, size)) => HEADER_BYTES + size as usize - self.bytes.len(),
        }
    }

    /// Takes what was received, at most [`Framer::wanted`] bytes, and gives the message that it
    /// completes.
    ///
    /// After an error the connection is closed; the framer is not used again.
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
        let mut header = Fields(self.bytes.get(..HEADER_BYTES)?);
        Some((header.u32()?, header.u32()?, header.u32()?))
    }
}

/// A piece of the guest's memory, in numbers; its descriptor travels beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionInfo {
    /// Guest physical address of the first byte.
    pub guest_addr: u64,
    /// Bytes.
    pub size: u64,
    /// The front end's own address of the first byte; ring addresses are given in these.
    pub user_addr: u64,
    /// Where in the descriptor's file the region begins, bytes.
    pub mmap_offset: u64,
}

/// Where a ring is, in the front end's own addresses. Nothing is known about alignment: the guest
/// chose them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptor table, or the packed ring.
    pub desc: u64,
    /// Used ring, or the device's event suppression.
    pub used: u64,
    /// Avail ring, or the driver's event suppression.
    pub avail: u64,
}

/// Where a region of shared memory for requests in flight is inside its descriptor's file, and its
/// shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InflightInfo {
    /// Bytes to map.
    pub mmap_size: u64,
    /// Where in the file, bytes.
    pub mmap_offset: u64,
    /// Rings it has room for.
    pub queues: u16,
    /// Entries for each ring.
    pub queue_size: u16,
}

impl InflightInfo {
    /// Whether such a region can be, as far as its numbers say. How large it must be depends on the
    /// rings' form.
    pub(crate) fn is_possible(&self) -> bool {
        self.mmap_size != 0
            && self.mmap_size.checked_add(self.mmap_offset).is_some()
            && (1..=RINGS_MAX).contains(&self.queues)
            && (1..=RING_SIZE_MAX).contains(&self.queue_size)
    }
}

/// Where the dirty log is inside its descriptor's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogInfo {
    /// Bytes to map; one bit for each page of 4096 bytes of guest memory.
    pub mmap_size: u64,
    /// Where in the file, bytes.
    pub mmap_offset: u64,
}

impl LogInfo {
    /// Whether such a log can be, as far as its numbers say.
    pub(crate) fn is_possible(&self) -> bool {
        self.mmap_size != 0 && self.mmap_size.checked_add(self.mmap_offset).is_some()
    }
}

/// A request with its payload checked for size, and its number of descriptors known to fit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the specification's")]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<RegionInfo>),
    /// `None`: the old form, an address in the front end's memory and no descriptor.
    SetLogBase(Option<LogInfo>),
    SetLogFd,
    SetVringNum {
        ring: u32,
        size: u32,
    },
    SetVringAddr {
        ring: u32,
        addresses: RingAddresses,
        /// The guest physical address of the used ring, if writes to it are to be logged.
        log: Option<u64>,
    },
    SetVringBase {
        ring: u32,
        base: u32,
    },
    GetVringBase {
        ring: u32,
    },
    /// Without a descriptor the ring is to be polled.
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
    /// The typed form of `message`, which came with `descriptors` descriptors.
    ///
    /// # Errors
    /// [`Violation::PayloadSize`], [`Violation::Descriptors`], and [`Violation::Refused`] for a
    /// flag with no meaning.
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
                let none =
                    Fields(&message.payload).u64().is_some_and(|v| v & VRING_NO_DESCRIPTOR != 0);
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

    /// `None` if the payload has another size than the request.
    fn from_payload(request: u32, payload: &[u8]) -> Option<Self> {
        let mut fields = Fields(payload);
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
                Self::SetMemTable((0..count).map(|_| fields.region()).collect::<Option<_>>()?)
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
            id::SET_VRING_KICK => Self::SetVringKick { ring: fields.vring()? },
            id::SET_VRING_CALL => Self::SetVringCall { ring: fields.vring()? },
            id::SET_VRING_ERR => Self::SetVringErr { ring: fields.vring()? },
            id::GET_PROTOCOL_FEATURES => Self::GetProtocolFeatures,
            id::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(fields.u64()?),
            id::GET_QUEUE_NUM => Self::GetQueueNum,
            id::SET_VRING_ENABLE => {
                Self::SetVringEnable { ring: fields.u32()?, enable: fields.u32()? != 0 }
            }
            id::SET_BACKEND_REQ_FD => Self::SetBackendReqFd,
            id::GET_CONFIG => {
                let (offset, size, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
                // Space for the answer comes along, of no matter which length; some front ends
                // leave it out.
                fields.take(fields.0.len().min(CONFIG_BYTES_MAX))?;
                Self::GetConfig { offset, size, flags }
            }
            id::SET_CONFIG => {
                let (offset, size, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
                Self::SetConfig { offset, flags, bytes: fields.take(size as usize)?.to_vec() }
            }
            id::GET_INFLIGHT_FD => Self::GetInflightFd(fields.inflight()?),
            id::SET_INFLIGHT_FD => Self::SetInflightFd(fields.inflight()?),
            id::RESET_DEVICE => Self::ResetDevice,
            id::GET_MAX_MEM_SLOTS => Self::GetMaxMemSlots,
            id::ADD_MEM_REG => {
                fields.u64()?;
                Self::AddMemReg(fields.region()?)
            }
            id::REM_MEM_REG => {
                fields.u64()?;
                Self::RemMemReg(fields.region()?)
            }
            _ => return Some(Self::Unknown),
        };
        fields.0.is_empty().then_some(decoded)
    }
}

/// What is left of a payload.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn vring(&mut self) -> Option<u32> {
        Some((self.u64()? & VRING_INDEX_MASK) as u32)
    }

    fn region(&mut self) -> Option<RegionInfo> {
        Some(RegionInfo {
            guest_addr: self.u64()?,
            size: self.u64()?,
            user_addr: self.u64()?,
            mmap_offset: self.u64()?,
        })
    }

    /// 20 bytes by the specification; 24 in C, whose structure ends with padding.
    fn inflight(&mut self) -> Option<InflightInfo> {
        let area = InflightInfo {
            mmap_size: self.u64()?,
            mmap_offset: self.u64()?,
            queues: self.u16()?,
            queue_size: self.u16()?,
        };
        if !self.0.is_empty() {
            self.take(4)?;
        }
        Some(area)
    }
}

/// A reply with one number: features, an acknowledgement (0 for success).
pub fn reply_u64(request: u32, value: u64) -> Vec<u8> {
    Message::reply(request, value.to_le_bytes().to_vec()).encode()
}

/// The reply to GET_VRING_BASE.
pub fn reply_vring_base(ring: u32, base: u32) -> Vec<u8> {
    let payload = [ring.to_le_bytes(), base.to_le_bytes()].concat();
    Message::reply(id::GET_VRING_BASE, payload).encode()
}

/// The reply to GET_CONFIG: `bytes` are exactly the ones asked for, or none to say that they cannot
/// be had.
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
    payload.extend_from_slice(&area.mmap_size.to_le_bytes());
    payload.extend_from_slice(&area.mmap_offset.to_le_bytes());
    payload.extend_from_slice(&area.queues.to_le_bytes());
    payload.extend_from_slice(&area.queue_size.to_le_bytes());
    payload.resize(payload_bytes.clamp(20, 24), 0);
    Message::reply(id::GET_INFLIGHT_FD, payload).encode()
}

/// Where a packed ring stands, as SET_VRING_BASE and GET_VRING_BASE have it. (A split ring's base
/// is its avail index.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedBase {
    /// Next descriptor to take, below 32768.
    pub avail: u16,
    /// The wrap counter that goes with it.
    pub avail_wrap: bool,
    /// Next descriptor to give back, below 32768.
    pub used: u16,
    /// The wrap counter that goes with it.
    pub used_wrap: bool,
}

impl PackedBase {
    /// From bits 0-14 avail index, 15 its wrap counter, 16-30 used index, 31 its wrap counter.
    pub fn from_bits(bits: u32) -> Self {
        Self {
            avail: (bits & 0x7fff) as u16,
            avail_wrap: bits & 0x8000 != 0,
            used: (bits >> 16 & 0x7fff) as u16,
            used_wrap: bits >> 31 != 0,
        }
    }

    /// The opposite of [`PackedBase::from_bits`].
    pub fn bits(self) -> u32 {
        u32::from(self.avail & 0x7fff)
            | u32::from(self.avail_wrap) << 15
            | u32::from(self.used & 0x7fff) << 16
            | u32::from(self.used_wrap) << 31
    }
}
