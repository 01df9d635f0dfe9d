//! Why memory cannot be mapped.

use std::{fmt, io};

use crate::memory::account::NoRoom;
use crate::protocol::message::RegionInfo;

/// Most regions of a table.
pub const REGIONS_MAX: usize = 512;

/// Why memory cannot be mapped.
#[derive(Debug)]
pub enum MemoryError {
    /// The region is empty, or its end is beyond the address space or the file offset's range.
    Range(RegionInfo),
    /// The region shares guest-physical or user addresses with another.
    Overlap(RegionInfo),
    /// The table has [`REGIONS_MAX`] regions.
    TooMany,
    /// The region to remove is not in the table.
    Unknown(RegionInfo),
    /// The file is shorter than the region needs.
    Short {
        /// Bytes that the file must have.
        needed: u64,
        /// Bytes that it has.
        size: u64,
    },
    /// The front end would exceed its share.
    NoRoom(NoRoom),
    /// The descriptor is not a regular file.
    NotAFile,
    /// The system refused.
    Io(io::Error),
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let region = |f: &mut fmt::Formatter<'_>, what: &str, r: &RegionInfo| {
            write!(f, "memory region at {:#x} of {:#x} bytes {what}", r.guest_addr, r.size)
        };
        match self {
            MemoryError::Range(r) => region(f, "is empty or too long", r),
            MemoryError::Overlap(r) => region(f, "overlaps another", r),
            MemoryError::Unknown(r) => region(f, "is not in the table", r),
            MemoryError::TooMany => write!(f, "more than {REGIONS_MAX} memory regions"),
            MemoryError::Short { needed, size } => {
                write!(f, "memory file has {size} bytes, {needed} are needed")
            }
            MemoryError::NoRoom(why) => why.fmt(f),
            MemoryError::NotAFile => write!(f, "memory descriptor is not a regular file"),
            MemoryError::Io(_) => write!(f, "mapping memory"),
        }
    }
}

impl std::error::Error for MemoryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            MemoryError::Io(error) => Some(error),
            _ => None,
        }
    }
}
