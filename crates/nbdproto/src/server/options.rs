//! The options of the handshake: their bytes, and the bytes of their replies.

use crate::wire::{OPTION_MAGIC, OPTION_REPLY_MAGIC, Reader, Violation, option_reply};

/// Maximum length of the data of an option, in bytes. The longest that a client needs is two names
/// of 4,096 bytes.
pub const OPTION_BYTES_MAX: usize = 16 << 10;
/// Length of an option without its data.
const HEADER_BYTES: usize = 16;

/// An option as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawOption<'a> {
    /// Its type.
    pub id: u32,
    /// Its data.
    pub data: &'a [u8],
}

impl RawOption<'_> {
    /// The option at the front of `input`, or `None` if it is incomplete.
    ///
    /// # Errors
    /// When it does not begin with the magic number, or is too long.
    pub fn parse(input: &[u8]) -> Result<Option<RawOption<'_>>, Violation> {
        let mut reader = Reader(input);
        let Some(magic) = reader.u64() else { return Ok(None) };
        if magic != OPTION_MAGIC {
            return Err(Violation::OptionMagic(magic));
        }
        let (Some(id), Some(len)) = (reader.u32(), reader.u32()) else { return Ok(None) };
        let too_long = || Violation::OptionLength(len);
        let len = usize::try_from(len).map_err(|_| too_long())?;
        if len > OPTION_BYTES_MAX {
            return Err(too_long());
        }
        Ok(reader.take(len).map(|data| RawOption { id, data }))
    }

    /// Its length on the wire.
    pub fn wire_len(&self) -> usize {
        HEADER_BYTES + self.data.len()
    }
}

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// The export's name.
    pub name: &'a str,
    /// Big-endian types of information that the client asks for.
    wanted: &'a [u8],
}

impl InfoRequest<'_> {
    /// Parses the data; `None` if it has another shape.
    pub fn parse(data: &[u8]) -> Option<InfoRequest<'_>> {
        let mut reader = Reader(data);
        let name = reader.string()?;
        let count = reader.u16()?;
        let wanted = reader.take(2 * usize::from(count))?;
        reader.is_empty().then_some(InfoRequest { name, wanted })
    }

    /// Whether the client asks for this type of information.
    pub fn wants(&self, info: u16) -> bool {
        self.wanted.chunks_exact(2).any(|two| two == info.to_be_bytes())
    }
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Debug, PartialEq, Eq)]
pub struct ContextRequest<'a> {
    /// The export's name.
    pub name: &'a str,
    /// Names or patterns of contexts.
    pub queries: Vec<&'a str>,
}

impl ContextRequest<'_> {
    /// Parses the data; `None` if it has another shape.
    pub fn parse(data: &[u8]) -> Option<ContextRequest<'_>> {
        let mut reader = Reader(data);
        let name = reader.string()?;
        let count = reader.u32()?;
        let mut queries = Vec::new();
        // Each takes at least four bytes of the data, which bounds their number.
        for _ in 0..count {
            queries.push(reader.string()?);
        }
        reader.is_empty().then_some(ContextRequest { name, queries })
    }
}

/// Writes the replies to one option.
pub struct OptionReplies<'a> {
    /// The option's type.
    pub id: u32,
    /// Where the replies go.
    pub out: &'a mut Vec<u8>,
}

impl OptionReplies<'_> {
    /// A reply with data in several parts.
    pub fn with(&mut self, kind: u32, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&self.id.to_be_bytes());
        self.out.extend_from_slice(&kind.to_be_bytes());
        self.out.extend_from_slice(&(len as u32).to_be_bytes());
        parts.iter().for_each(|part| self.out.extend_from_slice(part));
    }

    /// The last reply of a success.
    pub fn ack(&mut self) {
        self.with(option_reply::ACK, &[]);
    }

    /// An error, with a text for the user.
    pub fn error(&mut self, kind: u32, text: &str) {
        self.with(kind, &[text.as_bytes()]);
    }

    /// An item of information about an export.
    pub fn info(&mut self, kind: u16, parts: &[&[u8]]) {
        let kind = kind.to_be_bytes();
        let all: Vec<_> = [&kind[..]].into_iter().chain(parts.iter().copied()).collect();
        self.with(option_reply::INFO, &all);
    }
}
