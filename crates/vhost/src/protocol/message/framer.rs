//! Messages from the pieces in which they arrive.

use std::os::fd::OwnedFd;

use super::{
    DESCRIPTORS_MAX, FLAGS_REPLY, FLAGS_VERSION, FLAGS_VERSION_MASK, HEADER_BYTES, Message,
    PAYLOAD_BYTES_MAX, Violation,
};
use crate::bytes::Reader;

/// Assembles a message from the pieces in which it arrives.
#[derive(Debug, Default)]
pub struct Framer {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Framer {
    /// Starts at the beginning of a message.
    pub fn new() -> Self {
        Self::default()
    }

    /// Continues in the middle of a message; see [`Framer::into_parts`].
    pub fn from_parts(bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> Result<Self, Violation> {
        let mut framer = Self { bytes: Vec::new(), descriptors };
        if framer.descriptors.len() > DESCRIPTORS_MAX {
            return Err(Violation::TooManyDescriptors);
        }
        let (header, payload) = bytes.split_at(bytes.len().min(HEADER_BYTES));
        for piece in [header, payload] {
            if piece.is_empty() {
                continue;
            }
            if framer.push(piece, Vec::new())?.is_some() {
                return Err(Violation::BeyondMessage);
            }
        }
        Ok(framer)
    }

    /// A message that has arrived whole, as bytes of a launcher's packet.
    pub fn whole(
        bytes: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<(Message, Vec<OwnedFd>), Violation> {
        let mut framer = Self::new();
        let (header, payload) = bytes.split_at(bytes.len().min(HEADER_BYTES));
        match framer.push(header, descriptors)? {
            Some(done) if payload.is_empty() => Ok(done),
            Some(_) => Err(Violation::BeyondMessage),
            None => framer.push(payload, Vec::new())?.ok_or(Violation::Incomplete),
        }
    }

    /// The bytes and descriptors received so far of an incomplete message, to be carried elsewhere.
    pub fn into_parts(self) -> (Vec<u8>, Vec<OwnedFd>) {
        (self.bytes, self.descriptors)
    }

    /// Like [`Framer::into_parts`], but the framer stays in use.
    pub fn parts(&self) -> (&[u8], &[OwnedFd]) {
        (&self.bytes, &self.descriptors)
    }

    /// Takes the descriptors received so far of a message that will not be completed.
    pub(crate) fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors)
    }

    /// Whether no part of a message has arrived.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.descriptors.is_empty()
    }

    /// The most bytes to receive next. Never 0.
    pub fn wanted(&self) -> usize {
        match self.header() {
            None => HEADER_BYTES - self.bytes.len(),
            Some((_, _, size)) => HEADER_BYTES + size as usize - self.bytes.len(),
        }
    }

    /// Takes received bytes, at most [`Framer::wanted`], and returns the message that they
    /// complete.
    ///
    /// After an error the connection must be closed and the framer must not be used again.
    pub fn push(
        &mut self,
        bytes: &[u8],
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<Option<(Message, Vec<OwnedFd>)>, Violation> {
        if bytes.len() > self.wanted() {
            return Err(Violation::BeyondMessage);
        }
        if self.descriptors.len() + descriptors.len() > DESCRIPTORS_MAX {
            return Err(Violation::TooManyDescriptors);
        }
        self.descriptors.append(&mut descriptors);
        self.bytes.extend_from_slice(bytes);
        let Some((request, flags, size)) = self.header() else {
            return Ok(None);
        };
        if flags & FLAGS_VERSION_MASK != FLAGS_VERSION {
            return Err(Violation::Version { flags });
        }
        if flags & FLAGS_REPLY != 0 {
            return Err(Violation::UnexpectedReply { request });
        }
        if size as usize > PAYLOAD_BYTES_MAX {
            return Err(Violation::PayloadTooLong { request, size });
        }
        if self.bytes.len() < HEADER_BYTES + size as usize {
            return Ok(None);
        }
        let payload = self.bytes[HEADER_BYTES..].to_vec();
        self.bytes.clear();
        Ok(Some((Message { request, flags, payload }, std::mem::take(&mut self.descriptors))))
    }

    fn header(&self) -> Option<(u32, u32, u32)> {
        let mut header = Reader::new(self.bytes.get(..HEADER_BYTES)?);
        Some((header.u32()?, header.u32()?, header.u32()?))
    }
}
