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

mod framer;
mod request;
mod violation;

pub use self::framer::Framer;
pub use self::request::Request;
pub use self::violation::Violation;
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
/// Default limit of memory regions: as many as QEMU and the Linux kernel support.
pub const MEMORY_REGIONS_MAX: u16 = 509;
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

    /// Whether a table with the regions `others` can have this one as well.
    pub(crate) fn check(&self, others: &[RegionInfo]) -> Result<(), &'static str> {
        if self.size == 0 {
            return Err("empty memory region");
        }
        // The end must not be 2^64 either, so that no sum below overflows.
        let end = |start: u64| start.checked_add(self.size);
        let (Some(guest_end), Some(_), Some(_)) =
            (end(self.guest_addr), end(self.user_addr), end(self.mmap_offset))
        else {
            return Err("memory region beyond the address space");
        };
        // Regions may overlap in the front end: it may map the same memory at two guest addresses.
        for other in others {
            if self.guest_addr < other.guest_addr + other.size && other.guest_addr < guest_end {
                return Err("memory regions overlap in the guest");
            }
        }
        Ok(())
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
