//! Constants of the vhost-user protocol and of virtio-blk, named as in the specifications.
#![allow(missing_docs, reason = "the specifications define them")]

/// Requests of the front end.
pub mod request {
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
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
}

/// Requests of the target, on the backend channel.
pub mod backend {
    pub const CONFIG_CHANGE_MSG: u32 = 2;
}

/// Bits of a message's flags.
pub mod flags {
    pub const VERSION: u32 = 1;
    pub const VERSION_MASK: u32 = 3;
    pub const REPLY: u32 = 4;
    pub const NEED_REPLY: u32 = 8;
}

/// Flag in the payload of SET_VRING_KICK, SET_VRING_CALL and SET_VRING_ERR: there is no descriptor.
pub const NO_DESCRIPTOR: u64 = 1 << 8;
/// Flag of SET_VRING_ADDR: writes to the used ring are logged.
pub const VRING_LOG: u32 = 1;

/// Feature bits of virtio, virtio-blk and vhost.
pub mod feature {
    pub const SIZE_MAX: u64 = 1 << 1;
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Protocol feature bits.
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// Descriptor flags of split and packed rings.
pub mod desc {
    pub const NEXT: u16 = 1;
    pub const WRITE: u16 = 2;
    pub const INDIRECT: u16 = 4;
    /// Packed rings only.
    pub const AVAIL: u16 = 1 << 7;
    /// Packed rings only.
    pub const USED: u16 = 1 << 15;
}

/// Types of virtio-blk requests.
pub mod blk {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
    /// Flag of a WRITE_ZEROES segment: it may be unmapped.
    pub const UNMAP: u32 = 1;
    /// Bytes of a serial number.
    pub const ID_BYTES: u32 = 20;
    /// Bytes of a sector.
    pub const SECTOR: u64 = 512;
}
