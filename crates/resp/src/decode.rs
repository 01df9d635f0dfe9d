//! The incremental reply decoder of a client.
//!
//! Bytes are fed as they arrive; whole replies come out. Aggregates are built on a stack of open
//! ones, so each byte is examined once however the stream is cut. A server is not trusted:
//! [`DecoderLimits`] bounds depth, elements and bytes of a reply, and announced elements reserve
//! nothing.

use std::fmt;

use crate::constants::{BULK_BYTES_MAX, REPLY_DEPTH_MAX, REPLY_LINE_BYTES_MAX};
use crate::integer::parse_i64;

/// A buffer that a reply has made longer is released when that is decoded.
const BUFFER_BYTES_KEPT: usize = 1 << 20;

/// One reply of either protocol.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// `+OK`.
    Simple(Vec<u8>),
    /// `-ERR ...`, also in its bulk form.
    Error(Vec<u8>),
    /// A 64-bit integer.
    Integer(i64),
    /// A bulk string.
    Bulk(Vec<u8>),
    /// Null of any kind.
    Null,
    /// A boolean (RESP3).
    Boolean(bool),
    /// A double (RESP3).
    Double(f64),
    /// An integer of any length, as digits.
    BigNumber(Vec<u8>),
    /// Text with its format, such as `txt`.
    Verbatim([u8; 3], Vec<u8>),
    /// An array, elements in order.
    Array(Vec<Reply>),
    /// A set, in the order it came.
    Set(Vec<Reply>),
    /// A map, in the order it came.
    Map(Vec<(Reply, Reply)>),
    /// An out-of-band message (RESP3).
    Push(Vec<Reply>),
}

impl Reply {
    /// The bytes of a string of any kind; `None` for everything else.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Simple(bytes)
            | Self::Bulk(bytes)
            | Self::Verbatim(_, bytes)
            | Self::BigNumber(bytes) => Some(bytes),
            _ => None,
        }
    }
}

/// Limits on a reply.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLimits {
    /// Largest bulk string.
    pub bulk_bytes_max: usize,
    /// Maximum number of elements in one reply, including those of nested aggregates.
    pub elements_max: usize,
    /// Maximum number of bytes in one reply, each element with the memory that it takes itself.
    pub reply_bytes_max: usize,
}

impl Default for DecoderLimits {
    fn default() -> Self {
        Self { bulk_bytes_max: BULK_BYTES_MAX, elements_max: 16 << 20, reply_bytes_max: 2 << 30 }
    }
}

/// Why a reply cannot be decoded. The connection cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// A line begins with a byte that is not a type.
    UnknownType(u8),
    /// An invalid number, boolean or length, or a string without its line end.
    Malformed(u8),
    /// A line, string, aggregate or reply beyond the limit.
    TooLarge,
    /// Aggregates nested deeper than the limit.
    TooDeep,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownType(byte) => write!(f, "unknown reply type '{}'", byte.escape_ascii()),
            Self::Malformed(byte) => write!(f, "malformed reply of type '{}'", byte.escape_ascii()),
            Self::TooLarge => f.write_str("reply larger than the limit"),
            Self::TooDeep => write!(f, "reply nested deeper than {REPLY_DEPTH_MAX}"),
        }
    }
}

impl std::error::Error for DecodeError {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Array,
    Set,
    Map,
    Push,
    /// Metadata before a reply; decoded and dropped.
    Attribute,
}

#[derive(Debug)]
struct Open {
    shape: Shape,
    /// Elements still to come; a map's keys and values count one each.
    left: usize,
    elements: Vec<Reply>,
}

/// What a line or string contains.
enum Token {
    Scalar(Reply),
    Open(Shape, usize),
}

/// Reads replies from a stream of bytes.
#[derive(Debug)]
pub struct Decoder {
    limits: DecoderLimits,
    buffer: Vec<u8>,
    position: usize,
    searched: usize,
    open: Vec<Open>,
    elements: usize,
    bytes: usize,
    failed: Option<DecodeError>,
}

impl Decoder {
    /// A decoder at the beginning of a stream.
    pub fn new(limits: DecoderLimits) -> Self {
        Self {
            limits,
            buffer: Vec::new(),
            position: 0,
            searched: 0,
            open: Vec::new(),
            elements: 0,
            bytes: 0,
            failed: None,
        }
    }

    /// Appends received bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.position > 0 && self.position >= self.buffer.len() / 2 {
            self.buffer.drain(..self.position);
            self.searched = self.searched.saturating_sub(self.position);
            self.position = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole reply, or `None` if more bytes are needed. After an error every call returns
    /// that error.
    pub fn next_reply(&mut self) -> Result<Option<Reply>, DecodeError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let result = self.advance();
        if let Err(error) = result {
            self.failed = Some(error);
        }
        result
    }

    fn advance(&mut self) -> Result<Option<Reply>, DecodeError> {
        loop {
            let start = self.position;
            let Some(token) = self.token()? else {
                return Ok(None);
            };
            self.elements += 1;
            let bytes = self.position - start + size_of::<Reply>();
            self.bytes = self.bytes.saturating_add(bytes);
            if self.elements > self.limits.elements_max || self.bytes > self.limits.reply_bytes_max
            {
                return Err(DecodeError::TooLarge);
            }
            let mut whole = match token {
                Token::Scalar(reply) => reply,
                Token::Open(shape, left) if left > 0 || shape == Shape::Attribute => {
                    if self.open.len() == REPLY_DEPTH_MAX {
                        return Err(DecodeError::TooDeep);
                    }
                    if left > 0 {
                        self.open.push(Open { shape, left, elements: Vec::new() });
                    }
                    continue;
                }
                Token::Open(shape, _) => close(shape, Vec::new()),
            };
            // A complete element may complete the aggregates around it.
            loop {
                let Some(parent) = self.open.last_mut() else {
                    (self.elements, self.bytes) = (0, 0);
                    self.release();
                    return Ok(Some(whole));
                };
                parent.elements.push(whole);
                parent.left -= 1;
                if parent.left > 0 {
                    break;
                }
                let shape = parent.shape;
                let elements = std::mem::take(&mut parent.elements);
                self.open.pop();
                if shape == Shape::Attribute {
                    break;
                }
                whole = close(shape, elements);
            }
        }
    }

    /// Releases the memory of a long reply once all that arrived is decoded.
    fn release(&mut self) {
        if self.position == self.buffer.len() && self.buffer.capacity() > BUFFER_BYTES_KEPT {
            self.buffer = Vec::new();
            (self.position, self.searched) = (0, 0);
        }
    }

    /// Decodes one line and the string that belongs to it, and steps over both; `None` when they
    /// have not arrived whole.
    fn token(&mut self) -> Result<Option<Token>, DecodeError> {
        let Some(&kind) = self.buffer.get(self.position) else {
            return Ok(None);
        };
        let Some(newline) = self.line_end()? else {
            return Ok(None);
        };
        let malformed = DecodeError::Malformed(kind);
        let line = &self.buffer[self.position + 1..newline.max(self.position + 1)];
        let line = line.strip_suffix(b"\r").ok_or(malformed)?;
        let next = newline + 1;
        let token = match kind {
            b'+' => Token::Scalar(Reply::Simple(line.to_vec())),
            b'-' => Token::Scalar(Reply::Error(line.to_vec())),
            b':' => Token::Scalar(Reply::Integer(parse_i64(line).ok_or(malformed)?)),
            b'_' if line.is_empty() => Token::Scalar(Reply::Null),
            b'#' if line == b"t" => Token::Scalar(Reply::Boolean(true)),
            b'#' if line == b"f" => Token::Scalar(Reply::Boolean(false)),
            b',' => Token::Scalar(Reply::Double(double(line).ok_or(malformed)?)),
            b'(' if is_big_number(line) => Token::Scalar(Reply::BigNumber(line.to_vec())),
            b'$' | b'=' | b'!' => {
                let length = parse_i64(line).ok_or(malformed)?;
                if length == -1 && kind == b'$' {
                    Token::Scalar(Reply::Null)
                } else {
                    let length = usize::try_from(length).map_err(|_| malformed)?;
                    return self.string(kind, next, length);
                }
            }
            b'*' | b'~' | b'%' | b'>' | b'|' => {
                let count = parse_i64(line).ok_or(malformed)?;
                if count == -1 && kind == b'*' {
                    Token::Scalar(Reply::Null)
                } else {
                    let count = usize::try_from(count).map_err(|_| malformed)?;
                    let (shape, per_entry) = match kind {
                        b'*' => (Shape::Array, 1),
                        b'~' => (Shape::Set, 1),
                        b'%' => (Shape::Map, 2),
                        b'>' => (Shape::Push, 1),
                        _ => (Shape::Attribute, 2),
                    };
                    let left = count.checked_mul(per_entry).ok_or(DecodeError::TooLarge)?;
                    if left > self.limits.elements_max {
                        return Err(DecodeError::TooLarge);
                    }
                    Token::Open(shape, left)
                }
            }
            b'_' | b'#' | b'(' => return Err(malformed),
            other => return Err(DecodeError::UnknownType(other)),
        };
        self.step(next);
        Ok(Some(token))
    }

    /// The position of the `\n` that ends the line at `position`; `None` when it has not arrived.
    fn line_end(&mut self) -> Result<Option<usize>, DecodeError> {
        let from = self.searched.max(self.position);
        let newline =
            self.buffer[from..].iter().position(|&byte| byte == b'\n').map(|at| from + at);
        // A found end is found again immediately when the string after the line has not arrived
        // whole.
        self.searched = newline.unwrap_or(self.buffer.len());
        if self.searched - self.position > REPLY_LINE_BYTES_MAX {
            return Err(DecodeError::TooLarge);
        }
        Ok(newline)
    }

    /// Decodes the string of `length` bytes at `start`, which belongs to a line of type `kind`, and
    /// steps over both; `None` when it has not arrived whole.
    fn string(
        &mut self,
        kind: u8,
        start: usize,
        length: usize,
    ) -> Result<Option<Token>, DecodeError> {
        let malformed = DecodeError::Malformed(kind);
        if length > self.limits.bulk_bytes_max {
            return Err(DecodeError::TooLarge);
        }
        let Some(bytes) = self.buffer.get(start..start + length + 2) else {
            return Ok(None);
        };
        let bytes = bytes.strip_suffix(b"\r\n").ok_or(malformed)?;
        let reply = match (kind, bytes) {
            (b'$', _) => Reply::Bulk(bytes.to_vec()),
            (b'!', _) => Reply::Error(bytes.to_vec()),
            (_, [a, b, c, b':', text @ ..]) => Reply::Verbatim([*a, *b, *c], text.to_vec()),
            _ => return Err(malformed),
        };
        self.step(start + length + 2);
        Ok(Some(Token::Scalar(reply)))
    }

    fn step(&mut self, to: usize) {
        self.position = to;
        self.searched = to;
    }
}

fn close(shape: Shape, elements: Vec<Reply>) -> Reply {
    match shape {
        Shape::Array | Shape::Attribute => Reply::Array(elements),
        Shape::Set => Reply::Set(elements),
        Shape::Push => Reply::Push(elements),
        Shape::Map => {
            let mut entries = Vec::with_capacity(elements.len() / 2);
            let mut elements = elements.into_iter();
            while let (Some(key), Some(value)) = (elements.next(), elements.next()) {
                entries.push((key, value));
            }
            Reply::Map(entries)
        }
    }
}

fn double(text: &[u8]) -> Option<f64> {
    match text {
        b"inf" => Some(f64::INFINITY),
        b"-inf" => Some(f64::NEG_INFINITY),
        b"nan" | b"-nan" => Some(f64::NAN),
        [b'-' | b'0'..=b'9', ..] => std::str::from_utf8(text).ok()?.parse().ok(),
        _ => None,
    }
}

fn is_big_number(text: &[u8]) -> bool {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    !digits.is_empty() && digits.iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Protocol, Writer};
    use proptest::prelude::*;

    fn decode(stream: &[u8], step: usize) -> (Vec<Reply>, Option<DecodeError>) {
        let limits =
            DecoderLimits { bulk_bytes_max: 1000, elements_max: 1000, reply_bytes_max: 4000 };
        let mut decoder = Decoder::new(limits);
        let mut found = Vec::new();
        for chunk in stream.chunks(step) {
            decoder.feed(chunk);
            loop {
                match decoder.next_reply() {
                    Ok(Some(reply)) => found.push(reply),
                    Ok(None) => break,
                    Err(error) => return (found, Some(error)),
                }
            }
        }
        (found, None)
    }

    fn one(stream: &str) -> Reply {
        let (mut found, error) = decode(stream.as_bytes(), 1);
        assert_eq!((found.len(), error), (1, None), "{stream:?}");
        found.remove(0)
    }

    fn error(stream: &str) -> Option<DecodeError> {
        let (found, error) = decode(stream.as_bytes(), 3);
        assert!(found.is_empty(), "{stream:?}");
        error
    }

    #[test]
    fn every_type_is_read() {
        assert_eq!(one("+OK\r\n"), Reply::Simple(b"OK".to_vec()));
        assert_eq!(one("-ERR x\r\n"), Reply::Error(b"ERR x".to_vec()));
        assert_eq!(one("!5\r\nERR x\r\n"), Reply::Error(b"ERR x".to_vec()));
        assert_eq!(one(":-7\r\n"), Reply::Integer(-7));
        assert_eq!(one("$3\r\na\nb\r\n"), Reply::Bulk(b"a\nb".to_vec()));
        assert_eq!(one("$-1\r\n"), Reply::Null);
        assert_eq!(one("*-1\r\n"), Reply::Null);
        assert_eq!(one("_\r\n"), Reply::Null);
        assert_eq!(one("#t\r\n"), Reply::Boolean(true));
        assert_eq!(one(",-1.5e3\r\n"), Reply::Double(-1500.0));
        assert_eq!(one(",inf\r\n"), Reply::Double(f64::INFINITY));
        assert_eq!(
            one("(-123456789012345678901234\r\n"),
            Reply::BigNumber(b"-123456789012345678901234".to_vec())
        );
        assert_eq!(one("=6\r\ntxt:hi\r\n"), Reply::Verbatim(*b"txt", b"hi".to_vec()));
        assert_eq!(one("*0\r\n"), Reply::Array(vec![]));
        assert_eq!(one("~1\r\n:1\r\n"), Reply::Set(vec![Reply::Integer(1)]));
        assert_eq!(one(">1\r\n+x\r\n"), Reply::Push(vec![Reply::Simple(b"x".to_vec())]));
        assert_eq!(
            one("%1\r\n+a\r\n*2\r\n:1\r\n*1\r\n_\r\n"),
            Reply::Map(vec![(
                Reply::Simple(b"a".to_vec()),
                Reply::Array(vec![Reply::Integer(1), Reply::Array(vec![Reply::Null])])
            )])
        );
    }

    #[test]
    fn attributes_are_read_and_dropped() {
        assert_eq!(one("|1\r\n+ttl\r\n:3\r\n:5\r\n"), Reply::Integer(5));
        assert_eq!(one("*1\r\n|1\r\n+ttl\r\n:3\r\n:5\r\n"), Reply::Array(vec![Reply::Integer(5)]));
        assert_eq!(one("|0\r\n:5\r\n"), Reply::Integer(5));
    }

    #[test]
    fn garbage_is_an_error_and_stays_one() {
        assert_eq!(error("x\r\n"), Some(DecodeError::UnknownType(b'x')));
        assert_eq!(error("\n"), Some(DecodeError::Malformed(b'\n')));
        for bad in [
            ":1a\r\n",
            ":\r\n",
            "#x\r\n",
            "_x\r\n",
            ",x\r\n",
            "(x\r\n",
            "$-2\r\n",
            "*-2\r\n",
            "%-1\r\n",
            "=2\r\nab\r\n",
            "+a\n",
            "$1\r\nabc",
        ] {
            assert_eq!(error(bad), Some(DecodeError::Malformed(bad.as_bytes()[0])), "{bad:?}");
        }
        let mut decoder = Decoder::new(DecoderLimits::default());
        decoder.feed(b"x\r\n+OK\r\n");
        assert_eq!(decoder.next_reply(), decoder.next_reply());
    }

    #[test]
    fn sizes_are_bounded() {
        assert_eq!(error("$1001\r\n"), Some(DecodeError::TooLarge));
        assert_eq!(error("*1001\r\n"), Some(DecodeError::TooLarge));
        assert_eq!(error("%501\r\n"), Some(DecodeError::TooLarge));
        assert_eq!(error(&"*1\r\n".repeat(REPLY_DEPTH_MAX + 1)), Some(DecodeError::TooDeep));
        assert_eq!(error("*100\r\n*100\r\n:1\r\n"), None);
        assert_eq!(
            error(&format!(
                "*2\r\n*900\r\n{}*900\r\n{}",
                ":1\r\n".repeat(900),
                ":1\r\n".repeat(900)
            )),
            Some(DecodeError::TooLarge)
        );
        assert_eq!(
            error(&format!("+{}", "x".repeat(REPLY_LINE_BYTES_MAX + 1))),
            Some(DecodeError::TooLarge)
        );
        assert_eq!(error(&"|0\r\n".repeat(2000)), Some(DecodeError::TooLarge));
        // Few bytes, but much memory.
        let small = format!("*900\r\n{}", "_\r\n".repeat(900));
        assert_eq!(error(&small), Some(DecodeError::TooLarge));
    }

    #[test]
    fn the_buffer_of_a_long_reply_is_released() {
        let mut decoder = Decoder::new(DecoderLimits::default());
        let long = vec![b'x'; 2 * BUFFER_BYTES_KEPT];
        let mut stream = Vec::new();
        Writer::new(&mut stream, Protocol::V2).bulk(&long);
        decoder.feed(&stream);
        assert_eq!(decoder.next_reply(), Ok(Some(Reply::Bulk(long))));
        assert!(decoder.buffer.capacity() <= BUFFER_BYTES_KEPT);
        decoder.feed(b"+next\r\n");
        assert_eq!(decoder.next_reply(), Ok(Some(Reply::Simple(b"next".to_vec()))));
    }

    #[test]
    fn announced_elements_reserve_nothing() {
        let mut decoder = Decoder::new(DecoderLimits::default());
        decoder.feed(b"*16000000\r\n:1\r\n");
        assert_eq!(decoder.next_reply(), Ok(None));
        assert!(decoder.open[0].elements.capacity() < 100);
    }

    fn reply() -> impl Strategy<Value = Reply> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..12);
        let leaf = prop_oneof![
            "[a-zA-Z ]{0,8}".prop_map(|text| Reply::Simple(text.into_bytes())),
            "[A-Z]{1,4} [a-z]{0,8}".prop_map(|text| Reply::Error(text.into_bytes())),
            any::<i64>().prop_map(Reply::Integer),
            bytes().prop_map(Reply::Bulk),
            Just(Reply::Null),
            any::<bool>().prop_map(Reply::Boolean),
            proptest::num::f64::NORMAL.prop_map(Reply::Double),
            "-?[1-9][0-9]{0,30}".prop_map(|text| Reply::BigNumber(text.into_bytes())),
            bytes().prop_map(|text| Reply::Verbatim(*b"txt", text)),
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            let list = || proptest::collection::vec(inner.clone(), 0..5);
            prop_oneof![
                list().prop_map(Reply::Array),
                list().prop_map(Reply::Set),
                list().prop_map(Reply::Push),
                proptest::collection::vec((inner.clone(), inner.clone()), 0..4)
                    .prop_map(Reply::Map),
            ]
        })
    }

    fn write(writer: &mut Writer<'_>, reply: &Reply) {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        match reply {
            Reply::Simple(bytes) => writer.simple(&text(bytes)),
            Reply::Error(bytes) => writer.error_bytes(bytes),
            Reply::Integer(value) => writer.integer(*value),
            Reply::Bulk(bytes) => writer.bulk(bytes),
            Reply::Null => writer.null(),
            Reply::Boolean(value) => writer.boolean(*value),
            Reply::Double(value) => writer.double(*value),
            Reply::BigNumber(digits) => writer.big_number(&text(digits)),
            Reply::Verbatim(format, bytes) => writer.verbatim(format, bytes),
            Reply::Array(list) => {
                writer.array(list.len());
                list.iter().for_each(|element| write(writer, element));
            }
            Reply::Set(list) => {
                writer.set(list.len());
                list.iter().for_each(|element| write(writer, element));
            }
            Reply::Push(list) => {
                writer.push(list.len());
                list.iter().for_each(|element| write(writer, element));
            }
            Reply::Map(entries) => {
                writer.map(entries.len());
                for (key, value) in entries {
                    write(writer, key);
                    write(writer, value);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn replies_round_trip_in_protocol_3(replies in proptest::collection::vec(reply(), 1..4), step in 1usize..50) {
            let mut stream = Vec::new();
            for reply in &replies {
                write(&mut Writer::new(&mut stream, Protocol::V3), reply);
            }
            let (found, error) = decode(&stream, step);
            prop_assert_eq!(error, None);
            prop_assert_eq!(found, replies);
        }

        #[test]
        fn replies_in_protocol_2_decode(reply in reply(), step in 1usize..50) {
            let mut stream = Vec::new();
            write(&mut Writer::new(&mut stream, Protocol::V2), &reply);
            let (found, error) = decode(&stream, step);
            prop_assert_eq!((found.len(), error), (1, None));
        }
    }
}
