//! The numbers of the protocol, and how its integers are read. All integers are big-endian.

/// First eight bytes of a connection.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// The next eight bytes, and the first of each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First bytes of the reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First bytes of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First bytes of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First bytes of a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags of the server and of the client; the bits are the same.
pub mod handshake_flag {
    /// The fixed newstyle handshake.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No 124 bytes of padding after the reply to an export's name.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Types of options.
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Types of replies to options.
pub mod option_reply {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    /// The bit of all errors.
    pub const ERR: u32 = 1 << 31;
    pub const ERR_UNSUP: u32 = ERR | 1;
    pub const ERR_POLICY: u32 = ERR | 2;
    pub const ERR_INVALID: u32 = ERR | 3;
    pub const ERR_TLS_REQD: u32 = ERR | 5;
    pub const ERR_UNKNOWN: u32 = ERR | 6;
    pub const ERR_SHUTDOWN: u32 = ERR | 7;
}

/// Types of information about an export.
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export supports.
pub mod transmission_flag {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Types of requests.
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub mod command_flag {
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Types of chunks of a structured reply, and the flag of the last one.
pub mod chunk {
    pub const DONE: u16 = 1;
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    /// The bit of all errors.
    pub const ERRORS: u16 = 1 << 15;
    pub const ERROR: u16 = ERRORS | 1;
}

/// The one metadata context: whether a range is allocated.
pub const ALLOCATION: &str = "base:allocation";
/// Its number.
pub const ALLOCATION_ID: u32 = 1;
/// Flags of an extent in that context.
pub mod extent_flag {
    pub const HOLE: u32 = 1;
    pub const ZERO: u32 = 1 << 1;
}

/// A part of an export, of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, not 0.
    pub len: u32,
    /// It is not allocated, and reads as zeroes.
    pub hole: bool,
}

/// Longest string of the protocol, in bytes.
pub const STRING_BYTES_MAX: usize = 4096;

/// Why a client is disconnected without a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// It has set handshake flags that the server does not know.
    ClientFlags(u32),
    /// An option does not begin with the magic number.
    OptionMagic(u64),
    /// An option is longer than [`OPTION_BYTES_MAX`](crate::OPTION_BYTES_MAX).
    OptionLength(u32),
    /// It asks for an export that does not exist, with the option that has no error reply.
    NoExport,
    /// A request does not begin with the magic number.
    RequestMagic(u32),
    /// The payload of a write is longer than [`PAYLOAD_BYTES_MAX`](crate::PAYLOAD_BYTES_MAX).
    PayloadLength(u32),
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Violation::ClientFlags(flags) => write!(f, "unknown client flags {flags:#x}"),
            Violation::OptionMagic(magic) => write!(f, "an option begins with {magic:#018x}"),
            Violation::OptionLength(len) => write!(f, "an option of {len} bytes"),
            Violation::NoExport => f.write_str("no export of that name"),
            Violation::RequestMagic(magic) => write!(f, "a request begins with {magic:#010x}"),
            Violation::PayloadLength(len) => write!(f, "a write of {len} bytes"),
        }
    }
}

impl std::error::Error for Violation {}

/// Takes integers and strings from the front of a slice.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next `n` bytes, or `None` if there are fewer.
    pub fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string after its length in 32 bits.
    pub fn string(&mut self) -> Option<&'a str> {
        let len = usize::try_from(self.u32()?).ok().filter(|&len| len <= STRING_BYTES_MAX)?;
        std::str::from_utf8(self.take(len)?).ok()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
