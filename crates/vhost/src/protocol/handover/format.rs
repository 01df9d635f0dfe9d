//! The constants of `docs/formats/handover.md`.

pub(super) const MAGIC: [u8; 8] = *b"MRvhost\n";
pub(super) const VERSION: u32 = 1;
/// Magic, version, length of the fields.
pub(super) const PREFIX_BYTES: usize = 16;
/// The checksum after the fields.
pub(super) const SUFFIX_BYTES: usize = 4;
/// Longest document that is read.
pub const DOCUMENT_BYTES_MAX: usize = 1 << 20;
/// Longest name, bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// Most statistics, and most rate limits.
pub const NUMBERS_MAX: usize = 1024;

/// Tags of the fields.
pub(super) mod tag {
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
    pub const IN_FLIGHT: u16 = 14;
    pub const KEPT: u16 = 15;
    pub const WITHHELD: u16 = 16;
}

/// Flags of field [`tag::SESSION`].
pub(super) mod session_flag {
    pub const FEATURES: u8 = 1;
    pub const OWNED: u8 = 2;
    pub const WRITE_CACHE: u8 = 4;
    pub const LOG_SIGNAL: u8 = 8;
    pub const BACKEND_CHANNEL: u8 = 16;
}

/// Flags of a ring in field [`tag::RINGS`].
pub(super) mod ring_flag {
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
