//! Requests and their results.

/// A request. Offsets and lengths are multiples of 512 bytes. The data is in the slot's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "offset and length need no explanation")]
pub enum Request {
    /// Read into the slot's buffer.
    Read { offset: u64, len: u32 },
    /// Write from the slot's buffer.
    Write { offset: u64, len: u32 },
    /// Make completed writes durable.
    Flush,
    /// Discard a range.
    Discard { offset: u64, len: u32 },
    /// Make a range read as zeroes, possibly by unmapping it.
    WriteZeroes { offset: u64, len: u32, unmap: bool },
    /// Read the serial number, 20 bytes, into the slot's buffer.
    GetId,
}

/// A place for one request. Its index is the request's tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub(super) u16);

impl Slot {
    /// The slot's index, less than the queue's depth.
    #[inline]
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// The target's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The request succeeded.
    Ok,
    /// The request failed.
    IoError,
    /// The target does not support this request.
    Unsupported,
    /// An undefined status; 255 if the target wrote none.
    Other(u8),
}

impl From<u8> for Status {
    #[inline]
    fn from(byte: u8) -> Status {
        match byte {
            0 => Status::Ok,
            1 => Status::IoError,
            2 => Status::Unsupported,
            other => Status::Other(other),
        }
    }
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The slot, which belongs to the caller again.
    pub slot: Slot,
    /// The target's status.
    pub status: Status,
    /// The number of bytes that the target reports as written, including the status.
    pub written: u32,
}
