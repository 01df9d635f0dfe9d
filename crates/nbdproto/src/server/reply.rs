//! Replies to requests.

use crate::wire::{ALLOCATION_ID, CHUNK_MAGIC, Extent, SIMPLE_REPLY_MAGIC, chunk, extent_flag};

/// What a client is told of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errno {
    /// The export takes no writes.
    NotPermitted,
    /// The device failed.
    Io,
    /// There is no memory for the request.
    NoMemory,
    /// The request is wrong.
    Invalid,
    /// The device is full, or a write goes beyond its end.
    NoSpace,
    /// The export goes.
    Shutdown,
}

impl Errno {
    /// The protocol's number.
    pub fn number(self) -> u32 {
        match self {
            Errno::NotPermitted => 1,
            Errno::Io => 5,
            Errno::NoMemory => 12,
            Errno::Invalid => 22,
            Errno::NoSpace => 28,
            Errno::Shutdown => 108,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Errno::NotPermitted => {
                "this disk takes no writes here: it is read-only, or a virtual machine has it"
            }
            Errno::Io => "the device failed",
            Errno::NoMemory => "the node has no memory for the request now",
            Errno::Invalid => "the request is invalid",
            Errno::NoSpace => "no space is left on the device, or the request goes beyond its end",
            Errno::Shutdown => "the disk is not served any more",
        }
    }
}

/// Writes the replies of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Replies {
    /// Structured replies were negotiated.
    pub structured: bool,
}

impl Replies {
    /// The bytes before the data of a successful read, which are `len` bytes from `offset` on. If
    /// `len` is 0, the whole reply.
    pub fn read(self, out: &mut Vec<u8>, cookie: u64, offset: u64, len: u32) {
        match (self.structured, len) {
            (false, _) => simple(out, cookie, 0),
            (true, 0) => chunk_header(out, chunk::NONE, cookie, 0),
            (true, len) => {
                chunk_header(out, chunk::OFFSET_DATA, cookie, len + 8);
                out.extend_from_slice(&offset.to_be_bytes());
            }
        }
    }

    /// The success of a request without data in its reply.
    pub fn done(self, out: &mut Vec<u8>, cookie: u64) {
        // Shorter than a structured one, and allowed beside those.
        simple(out, cookie, 0);
    }

    /// The failure of a request.
    pub fn error(self, out: &mut Vec<u8>, cookie: u64, errno: Errno) {
        if !self.structured {
            return simple(out, cookie, errno.number());
        }
        let text = errno.text().as_bytes();
        chunk_header(out, chunk::ERROR, cookie, 6 + text.len() as u32);
        out.extend_from_slice(&errno.number().to_be_bytes());
        out.extend_from_slice(&(text.len() as u16).to_be_bytes());
        out.extend_from_slice(text);
    }

    /// The reply to a block status request: consecutive extents, at least one, from the request's
    /// offset on.
    pub fn block_status(self, out: &mut Vec<u8>, cookie: u64, extents: &[Extent]) {
        chunk_header(out, chunk::BLOCK_STATUS, cookie, 4 + 8 * extents.len() as u32);
        out.extend_from_slice(&ALLOCATION_ID.to_be_bytes());
        for Extent { len, hole } in extents {
            let flags = if *hole { extent_flag::HOLE | extent_flag::ZERO } else { 0 };
            out.extend_from_slice(&len.to_be_bytes());
            out.extend_from_slice(&flags.to_be_bytes());
        }
    }
}

fn simple(out: &mut Vec<u8>, cookie: u64, errno: u32) {
    out.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&errno.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
}

/// The header of a chunk that is the whole reply.
fn chunk_header(out: &mut Vec<u8>, kind: u16, cookie: u64, len: u32) {
    out.extend_from_slice(&CHUNK_MAGIC.to_be_bytes());
    out.extend_from_slice(&chunk::DONE.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
    out.extend_from_slice(&len.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Reader;

    fn bytes(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut out);
        out
    }

    /// Type, cookie and payload of the one chunk in these bytes.
    fn chunk(bytes: &[u8]) -> (u16, u64, &[u8]) {
        let mut reader = Reader(bytes);
        assert_eq!((reader.u32(), reader.u16()), (Some(CHUNK_MAGIC), Some(1)));
        let (kind, cookie) = (reader.u16().unwrap(), reader.u64().unwrap());
        reader.u32().unwrap();
        (kind, cookie, reader.0)
    }

    #[test]
    fn simple_replies_have_an_error_and_a_cookie() {
        let replies = Replies { structured: false };
        let ok = [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];
        assert_eq!(bytes(|out| replies.read(out, 9, 4096, 512)), ok);
        assert_eq!(bytes(|out| replies.done(out, 9)), ok);
        let error = bytes(|out| replies.error(out, 9, Errno::Shutdown));
        assert_eq!((error.len(), error[7]), (16, 108));
    }

    #[test]
    fn structured_replies_have_one_chunk_of_the_announced_length() {
        let replies = Replies { structured: true };
        let read = bytes(|out| replies.read(out, 3, 4096, 512));
        assert_eq!(read[16..20], 520_u32.to_be_bytes());
        assert_eq!(chunk(&read), (chunk::OFFSET_DATA, 3, &4096_u64.to_be_bytes()[..]));
        let nothing = bytes(|out| replies.read(out, 3, 4096, 0));
        assert_eq!(chunk(&nothing), (chunk::NONE, 3, &[][..]));
        let error = bytes(|out| replies.error(out, 3, Errno::Io));
        let (kind, _, payload) = chunk(&error);
        assert_eq!((kind, &payload[..6]), (chunk::ERROR, &[0, 0, 0, 5, 0, 17][..]));
        assert_eq!(&payload[6..], b"the device failed");
        assert_eq!(error[16..20], (payload.len() as u32).to_be_bytes());
        let extents = [Extent { len: 4096, hole: true }, Extent { len: 512, hole: false }];
        let status = bytes(|out| replies.block_status(out, 3, &extents));
        let (kind, _, payload) = chunk(&status);
        assert_eq!((kind, payload.len()), (chunk::BLOCK_STATUS, 20));
        assert_eq!(payload[..12], [0, 0, 0, 1, 0, 0, 16, 0, 0, 0, 0, 3]);
    }
}
