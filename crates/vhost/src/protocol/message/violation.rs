//! Violations of the protocol.

use std::fmt;

#[cfg(doc)]
use super::Framer;
use super::{DESCRIPTORS_MAX, PAYLOAD_BYTES_MAX};

/// A violation of the protocol that closes the front end's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The flags have another protocol version.
    Version {
        /// The header's flags.
        flags: u32,
    },
    /// A reply instead of a request.
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
    /// A part of a message where a whole one was expected.
    Incomplete,
    /// The payload size does not match the request.
    PayloadSize {
        /// The request.
        request: u32,
        /// Bytes found.
        found: usize,
    },
    /// The number of descriptors does not match the request.
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
    /// A request that cannot be obeyed, without a request for an acknowledgement.
    Refused {
        /// The request.
        request: u32,
        /// Why.
        reason: &'static str,
    },
    /// A request for a reply that this device does not support.
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
            Self::Incomplete => write!(f, "a message is incomplete"),
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
