//! Appends replies to a buffer in the connection's protocol. Hot file: no allocation except the
//! buffer's own growth.
//!
//! Protocol 3 has types that protocol 2 lacks. A [`Writer`] converts them as Redis does: maps, sets
//! and pushes become arrays; booleans integers; doubles, big numbers and verbatim strings bulk
//! strings; null a null bulk string.

use std::io::Write as _;

use crate::integer::{INTEGER_BYTES_MAX, format_i64};

/// The version of the protocol that a connection speaks: 2 until the client sends `HELLO 3`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// RESP2.
    #[default]
    V2,
    /// RESP3.
    V3,
}

impl Protocol {
    /// The number in `HELLO` and its reply.
    pub fn number(self) -> i64 {
        match self {
            Self::V2 => 2,
            Self::V3 => 3,
        }
    }
}

/// Appends replies to a buffer.
#[derive(Debug)]
pub struct Writer<'a> {
    out: &'a mut Vec<u8>,
    protocol: Protocol,
}

impl<'a> Writer<'a> {
    /// A writer at the end of `out`.
    pub fn new(out: &'a mut Vec<u8>, protocol: Protocol) -> Self {
        Self { out, protocol }
    }

    /// The protocol of the replies.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// The length of the buffer.
    pub fn position(&self) -> usize {
        self.out.len()
    }

    /// `+OK`.
    pub fn ok(&mut self) {
        self.out.extend_from_slice(b"+OK\r\n");
    }

    /// A simple string. Line ends in it become spaces, so that it stays one reply.
    pub fn simple(&mut self, text: &str) {
        self.out.push(b'+');
        self.line(text.as_bytes());
    }

    /// An error, `text` with its code in front (`ERR syntax error`). Line ends in it become spaces.
    pub fn error(&mut self, text: &str) {
        self.error_bytes(text.as_bytes());
    }

    /// An error with bytes that a client sent, unchanged except for line ends.
    pub fn error_bytes(&mut self, text: &[u8]) {
        self.out.push(b'-');
        self.line(text);
    }

    /// An integer reply.
    #[inline]
    pub fn integer(&mut self, value: i64) {
        self.header(b':', value);
    }

    /// A bulk string with its header.
    #[inline]
    pub fn bulk(&mut self, bytes: &[u8]) {
        self.out.reserve(bytes.len() + INTEGER_BYTES_MAX + 5);
        self.bulk_header(bytes.len());
        self.out.extend_from_slice(bytes);
        self.out.extend_from_slice(b"\r\n");
    }

    /// The header of a bulk string. The caller sends its bytes and the closing `\r\n`.
    #[inline]
    pub fn bulk_header(&mut self, bytes_len: usize) {
        self.count(b'$', bytes_len);
    }

    /// Null in place of a string.
    #[inline]
    pub fn null(&mut self) {
        self.out.extend_from_slice(match self.protocol {
            Protocol::V2 => b"$-1\r\n",
            Protocol::V3 => b"_\r\n",
        });
    }

    /// Null in place of an array.
    pub fn null_array(&mut self) {
        self.out.extend_from_slice(match self.protocol {
            Protocol::V2 => b"*-1\r\n",
            Protocol::V3 => b"_\r\n",
        });
    }

    /// The beginning of an array; its elements follow.
    #[inline]
    pub fn array(&mut self, elements: usize) {
        self.count(b'*', elements);
    }

    /// The beginning of a map; a key and a value follow for each entry.
    pub fn map(&mut self, entries: usize) {
        match self.protocol {
            Protocol::V2 => self.count(b'*', entries.saturating_mul(2)),
            Protocol::V3 => self.count(b'%', entries),
        }
    }

    /// The beginning of attributes of the reply that follows, in RESP3 only; a key and a value
    /// follow for each entry.
    pub fn attributes(&mut self, entries: usize) {
        self.count(b'|', entries);
    }

    /// The beginning of a set; its elements follow.
    pub fn set(&mut self, elements: usize) {
        match self.protocol {
            Protocol::V2 => self.count(b'*', elements),
            Protocol::V3 => self.count(b'~', elements),
        }
    }

    /// The beginning of an out-of-band message.
    pub fn push(&mut self, elements: usize) {
        match self.protocol {
            Protocol::V2 => self.count(b'*', elements),
            Protocol::V3 => self.count(b'>', elements),
        }
    }

    /// A boolean.
    pub fn boolean(&mut self, value: bool) {
        self.out.extend_from_slice(match (self.protocol, value) {
            (Protocol::V2, false) => b":0\r\n",
            (Protocol::V2, true) => b":1\r\n",
            (Protocol::V3, false) => b"#f\r\n",
            (Protocol::V3, true) => b"#t\r\n",
        });
    }

    /// A double, in the shortest form that reads back as the same number.
    pub fn double(&mut self, value: f64) {
        // Plain notation where it is short, scientific notation where it would be a row of zeros.
        let plain = value == 0.0 || (1e-5..1e17).contains(&value.abs());
        let text = match value {
            nan if nan.is_nan() => "nan".to_owned(),
            infinite if infinite.is_infinite() => {
                if value > 0.0 { "inf" } else { "-inf" }.to_owned()
            }
            _ if plain => format!("{value}"),
            _ => format!("{value:e}"),
        };
        match self.protocol {
            Protocol::V2 => self.bulk(text.as_bytes()),
            Protocol::V3 => {
                self.out.push(b',');
                self.line(text.as_bytes());
            }
        }
    }

    /// An integer of any length, given as its decimal digits.
    pub fn big_number(&mut self, digits: &str) {
        match self.protocol {
            Protocol::V2 => self.bulk(digits.as_bytes()),
            Protocol::V3 => {
                self.out.push(b'(');
                self.line(digits.as_bytes());
            }
        }
    }

    /// Verbatim text with a format of three letters: `txt` or `mkd`.
    pub fn verbatim(&mut self, format: &[u8; 3], text: &[u8]) {
        match self.protocol {
            Protocol::V2 => self.bulk(text),
            Protocol::V3 => {
                self.count(b'=', text.len().saturating_add(4));
                self.out.extend_from_slice(format);
                self.out.push(b':');
                self.out.extend_from_slice(text);
                self.out.extend_from_slice(b"\r\n");
            }
        }
    }

    fn line(&mut self, text: &[u8]) {
        self.out.extend(text.iter().map(
            |&byte| {
                if matches!(byte, b'\r' | b'\n') { b' ' } else { byte }
            },
        ));
        self.out.extend_from_slice(b"\r\n");
    }

    #[inline]
    fn count(&mut self, kind: u8, count: usize) {
        self.header(kind, i64::try_from(count).unwrap_or(i64::MAX));
    }

    #[inline]
    fn header(&mut self, kind: u8, value: i64) {
        let mut digits = [0; INTEGER_BYTES_MAX];
        self.out.push(kind);
        self.out.extend_from_slice(format_i64(&mut digits, value));
        self.out.extend_from_slice(b"\r\n");
    }
}

/// Appends a request, as a client sends it.
pub fn write_command(out: &mut Vec<u8>, args: &[&[u8]]) {
    // Writing to a vector cannot fail.
    let _ = write!(out, "*{}\r\n", args.len());
    for arg in args {
        Writer::new(out, Protocol::V2).bulk(arg);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(write: impl Fn(&mut Writer<'_>)) -> (String, String) {
        let text = |protocol| {
            let mut out = Vec::new();
            write(&mut Writer::new(&mut out, protocol));
            String::from_utf8(out).unwrap()
        };
        (text(Protocol::V2), text(Protocol::V3))
    }

    fn pair(v2: &str, v3: &str) -> (String, String) {
        (v2.to_owned(), v3.to_owned())
    }

    #[test]
    fn types_of_both_protocols_are_written_alike() {
        assert_eq!(both(|w| w.ok()), pair("+OK\r\n", "+OK\r\n"));
        assert_eq!(both(|w| w.integer(-12)), pair(":-12\r\n", ":-12\r\n"));
        assert_eq!(both(|w| w.bulk(b"abc")), pair("$3\r\nabc\r\n", "$3\r\nabc\r\n"));
        assert_eq!(both(|w| w.array(2)), pair("*2\r\n", "*2\r\n"));
        assert_eq!(both(|w| w.error("ERR no")), pair("-ERR no\r\n", "-ERR no\r\n"));
    }

    #[test]
    fn types_that_protocol_2_lacks_are_converted() {
        assert_eq!(both(|w| w.null()), pair("$-1\r\n", "_\r\n"));
        assert_eq!(both(|w| w.null_array()), pair("*-1\r\n", "_\r\n"));
        assert_eq!(both(|w| w.map(3)), pair("*6\r\n", "%3\r\n"));
        assert_eq!(both(|w| w.set(3)), pair("*3\r\n", "~3\r\n"));
        assert_eq!(both(|w| w.push(3)), pair("*3\r\n", ">3\r\n"));
        assert_eq!(both(|w| w.boolean(true)), pair(":1\r\n", "#t\r\n"));
        assert_eq!(both(|w| w.double(1.5)), pair("$3\r\n1.5\r\n", ",1.5\r\n"));
        assert_eq!(both(|w| w.double(f64::NEG_INFINITY)), pair("$4\r\n-inf\r\n", ",-inf\r\n"));
        assert_eq!(both(|w| w.double(1e300)), pair("$5\r\n1e300\r\n", ",1e300\r\n"));
        assert_eq!(both(|w| w.big_number("123")), pair("$3\r\n123\r\n", "(123\r\n"));
        assert_eq!(both(|w| w.verbatim(b"txt", b"hi")), pair("$2\r\nhi\r\n", "=6\r\ntxt:hi\r\n"));
    }

    #[test]
    fn an_error_that_quotes_line_ends_stays_one_line() {
        assert_eq!(both(|w| w.error("ERR a\r\n+OK")).0, "-ERR a  +OK\r\n");
    }
}
