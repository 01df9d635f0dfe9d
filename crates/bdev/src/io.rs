//! A request to a device, and its completion. Devices, layers and channels build on these types.

/// Maximum number of requests in flight in one channel.
pub const QUEUE_DEPTH: usize = 1024;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read into the segments.
    Read,
    /// Write the contents of the segments.
    Write,
    /// Make durable the writes that had completed when this was submitted.
    Flush,
    /// The range is no longer needed.
    /// [`Geometry::zeroes_after_discard`](crate::Geometry::zeroes_after_discard) says how it reads
    /// afterwards.
    Discard,
    /// Make the range read as zeroes.
    WriteZeroes {
        /// The file may deallocate the range.
        unmap: bool,
    },
}

/// The names of the kinds, in the order of [`Kind::index`].
pub(crate) const KINDS: [&str; 5] = ["read", "write", "flush", "discard", "zeroes"];

impl Kind {
    pub(crate) fn index(self) -> usize {
        match self {
            Kind::Read => 0,
            Kind::Write => 1,
            Kind::Flush => 2,
            Kind::Discard => 3,
            Kind::WriteZeroes { .. } => 4,
        }
    }

    /// Its name, as URIs have it.
    pub fn name(self) -> &'static str {
        KINDS[self.index()]
    }
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Io<'a> {
    /// The operation.
    pub kind: Kind,
    /// Offset in bytes. Ignored for a flush.
    pub offset: u64,
    /// Length in bytes. Ignored for a flush.
    pub len: u64,
    /// The memory of a read or a write; the lengths add up to `len`.
    pub segments: &'a [libc::iovec],
    /// Returned with the completion.
    pub tag: u64,
    /// Force unit access: the request must be durable when it completes, whatever the device's own
    /// setting. Used for a guest that has switched the write cache off.
    pub fua: bool,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The request is done.
    Ok,
    /// The request failed, and a write may be done in part; or the request was invalid.
    IoError,
    /// The device does not support the operation.
    Unsupported,
    /// The device has no space left.
    NoSpace,
}

impl Status {
    pub(crate) fn of(errno: i32) -> Status {
        match errno {
            0 => Status::Ok,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Status::NoSpace,
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => Status::Unsupported,
            _ => Status::IoError,
        }
    }
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The tag of the request.
    pub tag: u64,
    /// How it ended.
    pub status: Status,
}

/// The channel has [`QUEUE_DEPTH`] requests in flight; nothing was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;
