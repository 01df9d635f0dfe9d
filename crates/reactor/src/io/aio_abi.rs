//! The kernel's interface of Linux AIO (linux/aio_abi.h), on a little-endian machine.
#![expect(missing_docs, reason = "the names are the kernel's")]

use std::sync::atomic::AtomicU32;

pub const IOCB_CMD_PREAD: u16 = 0;
pub const IOCB_CMD_PREADV: u16 = 7;
pub const IOCB_CMD_PWRITEV: u16 = 8;
/// The completion also raises the eventfd `resfd`.
pub const IOCB_FLAG_RESFD: u32 = 1;
const RING_MAGIC: u32 = 0xA10A_10A1;

/// `struct iocb`: an operation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Iocb {
    pub data: u64,
    pub key: u32,
    pub rw_flags: u32,
    pub opcode: u16,
    pub priority: i16,
    pub fd: u32,
    pub buf: u64,
    pub nbytes: u64,
    pub offset: i64,
    pub reserved: u64,
    pub flags: u32,
    pub resfd: u32,
}

/// `struct io_event`: a completion.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Event {
    pub data: u64,
    pub obj: u64,
    pub res: i64,
    pub res2: i64,
}

/// The head of a context's completion ring, which is mapped at the address that is the context's
/// number; `nr` events follow.
#[repr(C)]
#[derive(Debug)]
pub struct Ring {
    pub id: u32,
    pub nr: u32,
    pub head: AtomicU32,
    pub tail: AtomicU32,
    pub magic: u32,
    pub compat_features: u32,
    pub incompat_features: u32,
    pub header_length: u32,
}

const _: () = assert!(size_of::<Iocb>() == 64 && size_of::<Event>() == 32);
const _: () = assert!(size_of::<Ring>() == 32 && cfg!(target_endian = "little"));

impl Ring {
    /// Whether completions can be taken from it without a system call.
    pub fn is_known(&self) -> bool {
        self.magic == RING_MAGIC && self.incompat_features == 0 && self.header_length == 32
    }
}
