//! Why a disk cannot be taken over.

use std::fmt;

#[cfg(doc)]
use super::DOCUMENT_BYTES_MAX;
use super::format::VERSION;

/// Why a disk cannot be taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoverError {
    /// The bytes are not a disk state.
    Magic,
    /// The version is not supported.
    Version(u32),
    /// Longer than [`DOCUMENT_BYTES_MAX`], or not as long as its header says.
    Length {
        /// Bytes.
        found: usize,
    },
    /// The checksum does not match.
    Checksum,
    /// A field that this version does not know, so it cannot keep the state.
    UnknownField(u16),
    /// A required field is missing.
    MissingField(u16),
    /// A field with contents that no writer produces.
    Field {
        /// The field.
        field: u16,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A writer would encode the same state differently.
    NotCanonical,
    /// The number of descriptors does not match the state.
    Descriptors {
        /// Descriptors that belong to the state.
        expected: usize,
        /// Descriptors that came.
        found: usize,
    },
    /// The front end uses features that this process does not offer.
    NotOffered {
        /// Virtio feature bits or protocol feature bits.
        bits: u64,
    },
    /// The front end uses a different number of rings than the disk has here.
    Rings {
        /// Rings of the disk.
        expected: usize,
        /// Rings of the session.
        found: usize,
    },
    /// The front end has more memory regions than this process accepts.
    Regions,
}

impl fmt::Display for HandoverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Magic => write!(f, "not a disk state"),
            Self::Version(version) => {
                write!(f, "disk state of version {version}, expected version {VERSION}")
            }
            Self::Length { found } => {
                write!(f, "disk state of {found} bytes does not match its length field")
            }
            Self::Checksum => write!(f, "disk state with a wrong checksum"),
            Self::UnknownField(field) => write!(f, "disk state with unknown field {field}"),
            Self::MissingField(field) => write!(f, "disk state without field {field}"),
            Self::Field { field, reason } => write!(f, "disk state, field {field}: {reason}"),
            Self::NotCanonical => write!(f, "disk state is not in its canonical form"),
            Self::Descriptors { expected, found } => {
                write!(f, "disk state with {found} descriptors, expected {expected}")
            }
            Self::NotOffered { bits } => {
                write!(f, "the front end uses feature bits {bits:#x}, which are not offered here")
            }
            Self::Rings { expected, found } => {
                write!(f, "the front end uses {found} rings, but the disk has {expected} here")
            }
            Self::Regions => {
                write!(f, "the front end has more memory regions than this process accepts")
            }
        }
    }
}

impl std::error::Error for HandoverError {}
