//! The incremental request parser. Hot file: no allocation per command, no byte examined twice.
//!
//! 1. The connection keeps its unconsumed input in one buffer and passes the part that begins with
//!    the current command to [`Parser::parse`], repeatedly as it grows.
//! 2. [`Progress::Complete`] holds the number of bytes of the command; [`Parser::args`] has its
//!    arguments as [`Span`]s, counted from the same beginning. The connection consumes those bytes
//!    and calls again with the rest.
//! 3. After [`Progress::Incomplete`] the parser keeps its state, so that a command that arrives
//!    byte by byte costs no more than one that arrives whole. Between two calls the buffer may move
//!    in memory; its unconsumed bytes stay the same.
//!
//! The parser owns no bytes. It owns the list of spans, eight bytes an argument, which is reused
//! from command to command and released after a command that made it large. A length that the peer
//! announces reserves nothing.
//!
//! Like Redis 7.0, the parser skips the two bytes after a bulk string and the byte after a header's
//! `\r` without reading them.

use std::ops::Range;

use crate::constants::{ARGS_MAX, BULK_BYTES_MAX, INLINE_BYTES_MAX, REQUEST_BYTES_MAX};
use crate::error::ProtocolError;
use crate::inline;
use crate::integer::parse_i64;

/// Capacity kept for the next command; a larger list is released.
const ARGS_KEPT: usize = 64;

/// The position of an argument, relative to the first byte of its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    start: u32,
    end: u32,
}

const _: () = assert!(size_of::<Span>() == 8);

impl Span {
    /// `Limits` keeps every position below `u32::MAX`.
    pub(crate) fn new(start: usize, end: usize) -> Self {
        Self { start: start as u32, end: end as u32 }
    }

    /// The range of the command's bytes.
    pub fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    /// Length in bytes.
    pub fn len(self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether the argument is the empty string.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }
}

/// Limits on a connection's requests. The defaults are Redis's.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest inline command, and longest header.
    pub inline_bytes_max: usize,
    /// Largest single argument.
    pub bulk_bytes_max: usize,
    /// Maximum number of arguments of a command.
    pub args_max: usize,
    /// Largest command as a whole; at most [`REQUEST_BYTES_MAX`].
    pub request_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            inline_bytes_max: INLINE_BYTES_MAX,
            bulk_bytes_max: BULK_BYTES_MAX,
            args_max: ARGS_MAX,
            request_bytes_max: REQUEST_BYTES_MAX,
        }
    }
}

/// How much of a command has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The whole command has arrived and has this many bytes. One without arguments is to be
    /// ignored without a reply.
    Complete(usize),
    /// At least this many bytes are still to come.
    Incomplete(usize),
}

/// Reads commands from a growing buffer. One per connection.
#[derive(Debug)]
pub struct Parser {
    limits: Limits,
    args: Vec<Span>,
    /// Everything before this position is understood.
    position: usize,
    /// No line end was found between `position` and here.
    searched: usize,
    /// Arguments still to come; `None` before the `*` header.
    args_left: Option<usize>,
    /// Length of the argument that begins at `position`, once its header is parsed.
    bulk: Option<usize>,
    /// The last call completed a command (or failed); the next call begins a new one.
    finished: bool,
    /// The client has yet to give the password.
    stranger: bool,
}

/// Maximum number and length of the arguments of a client that has yet to give the password.
const STRANGER_ARGS_MAX: usize = 10;
const STRANGER_BULK_BYTES_MAX: usize = 16 * 1024;

impl Parser {
    /// A parser at the beginning of a stream.
    pub fn new(mut limits: Limits) -> Self {
        limits.request_bytes_max = limits.request_bytes_max.min(REQUEST_BYTES_MAX);
        Self {
            limits,
            args: Vec::new(),
            position: 0,
            searched: 0,
            args_left: None,
            bulk: None,
            finished: false,
            stranger: false,
        }
    }

    /// Whether the client has yet to give the password: then its commands are short.
    pub fn set_stranger(&mut self, stranger: bool) {
        self.stranger = stranger;
    }

    /// The arguments of the command that the last call completed.
    pub fn args(&self) -> &[Span] {
        &self.args
    }

    /// Heap memory of the parser, in bytes: the spans of the arguments found so far.
    pub fn heap_bytes(&self) -> usize {
        self.args.capacity() * size_of::<Span>()
    }

    /// Releases the memory that is not needed between two commands, for an idle connection.
    pub fn release(&mut self) {
        if self.finished || (self.position == 0 && self.args.is_empty()) {
            self.reset();
            self.args = Vec::new();
        }
    }

    /// Parses `input`, which begins with the first byte of the current command. Inline words are
    /// unescaped in place.
    pub fn parse(&mut self, input: &mut [u8]) -> Result<Progress, ProtocolError> {
        if self.finished {
            self.reset();
        }
        let progress = match input.first() {
            None => Ok(Progress::Incomplete(1)),
            Some(b'*') => self.parse_multibulk(input),
            Some(_) => self.parse_inline(input),
        };
        self.finished = !matches!(progress, Ok(Progress::Incomplete(_)));
        match progress {
            Ok(Progress::Incomplete(missing))
                if input.len() + missing > self.limits.request_bytes_max =>
            {
                self.finished = true;
                Err(self.request_too_long())
            }
            other => other,
        }
    }

    fn request_too_long(&self) -> ProtocolError {
        ProtocolError::RequestTooLong { bytes_max: self.limits.request_bytes_max }
    }

    fn reset(&mut self) {
        self.args.clear();
        self.args.shrink_to(ARGS_KEPT);
        self.position = 0;
        self.searched = 0;
        self.args_left = None;
        self.bulk = None;
        self.finished = false;
    }

    fn parse_inline(&mut self, input: &mut [u8]) -> Result<Progress, ProtocolError> {
        let Some(newline) = find(input, self.searched, b'\n') else {
            self.searched = input.len();
            if input.len() > self.limits.inline_bytes_max {
                return Err(ProtocolError::InlineTooLong);
            }
            return Ok(Progress::Incomplete(1));
        };
        // Redis accepts a longer line if it arrives in one piece. Whether a command is accepted
        // must not depend on that.
        if newline > self.limits.inline_bytes_max {
            return Err(ProtocolError::InlineTooLong);
        }
        let end = if newline > 0 && input[newline - 1] == b'\r' { newline - 1 } else { newline };
        inline::split(input, 0, end, &mut self.args)
            .map_err(|_| ProtocolError::UnbalancedQuotes)?;
        Ok(Progress::Complete(newline + 1))
    }

    fn parse_multibulk(&mut self, input: &[u8]) -> Result<Progress, ProtocolError> {
        let mut left = match self.args_left {
            Some(left) => left,
            None => {
                let Some(count) = self.header(input, ProtocolError::MultibulkHeaderTooLong)? else {
                    return Ok(Progress::Incomplete(1));
                };
                match count {
                    Some(count) if count <= 0 => return Ok(Progress::Complete(self.position)),
                    Some(count)
                        if self.stranger
                            && count <= i64::from(i32::MAX)
                            && count as usize > STRANGER_ARGS_MAX =>
                    {
                        return Err(ProtocolError::UnauthenticatedMultibulk);
                    }
                    Some(count) if count as u64 <= self.limits.args_max as u64 => count as usize,
                    _ => return Err(ProtocolError::InvalidMultibulkLength),
                }
            }
        };
        while left > 0 {
            let length = match self.bulk {
                Some(length) => length,
                None => {
                    // Redis waits for the whole header before it checks its first byte. So do we;
                    // otherwise a `-` in place of a `$` would be answered sooner than by Redis.
                    let first = input.get(self.position).copied();
                    let Some(length) = self.header(input, ProtocolError::BulkHeaderTooLong)? else {
                        self.args_left = Some(left);
                        return Ok(Progress::Incomplete(1));
                    };
                    match first {
                        Some(b'$') => {}
                        other => return Err(ProtocolError::ExpectedBulk(other.unwrap_or(0))),
                    }
                    match length {
                        Some(length)
                            if length >= 0
                                && length as u64 <= self.limits.bulk_bytes_max as u64 =>
                        {
                            if self.stranger && length as usize > STRANGER_BULK_BYTES_MAX {
                                return Err(ProtocolError::UnauthenticatedBulk);
                            }
                            length as usize
                        }
                        _ => return Err(ProtocolError::InvalidBulkLength),
                    }
                }
            };
            let end = self.position + length;
            if end + 2 > self.limits.request_bytes_max {
                return Err(self.request_too_long());
            }
            if input.len() < end + 2 {
                self.bulk = Some(length);
                self.args_left = Some(left);
                return Ok(Progress::Incomplete(end + 2 - input.len()));
            }
            self.args.push(Span::new(self.position, end));
            self.bulk = None;
            self.position = end + 2;
            self.searched = self.position;
            left -= 1;
        }
        Ok(Progress::Complete(self.position))
    }

    /// Parses the header line at `position` and steps over it. The outer `None` means that it has
    /// not arrived whole, the inner `None` that its number is invalid.
    #[inline]
    #[expect(
        clippy::option_option,
        reason = "incomplete and invalid are different results, both handled by the callers"
    )]
    fn header(
        &mut self,
        input: &[u8],
        too_long: ProtocolError,
    ) -> Result<Option<Option<i64>>, ProtocolError> {
        let start = self.position;
        // Nearly every header is a type byte and one or two digits.
        if let Some(&[_, a, b'\r', _]) = input.get(start..start + 4)
            && a.is_ascii_digit()
        {
            self.step(start + 4)?;
            return Ok(Some(Some(i64::from(a - b'0'))));
        }
        if let Some(&[_, a, b, b'\r', _]) = input.get(start..start + 5)
            && matches!(a, b'1'..=b'9')
            && b.is_ascii_digit()
        {
            self.step(start + 5)?;
            return Ok(Some(Some(i64::from(a - b'0') * 10 + i64::from(b - b'0'))));
        }
        let line_end = find(input, self.searched.max(start), b'\r');
        let line_bytes_max = self.limits.inline_bytes_max;
        if line_end.unwrap_or(input.len()) - start > line_bytes_max {
            // The limit that would be exceeded first if the bytes arrived one by one.
            let request_first = self.limits.request_bytes_max <= start + line_bytes_max;
            return Err(if request_first { self.request_too_long() } else { too_long });
        }
        match line_end {
            Some(line_end) if line_end + 1 < input.len() => {
                // A lone `\r` at the start leaves nothing after the type byte.
                let number = parse_i64(input.get(start + 1..line_end).unwrap_or_default());
                self.step(line_end + 2)?;
                Ok(Some(number))
            }
            Some(line_end) => {
                self.searched = line_end;
                Ok(None)
            }
            None => {
                self.searched = input.len();
                Ok(None)
            }
        }
    }

    #[inline]
    fn step(&mut self, to: usize) -> Result<(), ProtocolError> {
        if to > self.limits.request_bytes_max {
            return Err(self.request_too_long());
        }
        self.position = to;
        self.searched = to;
        Ok(())
    }
}

/// The first `byte` in `input` at or after `from`.
fn find(input: &[u8], from: usize, byte: u8) -> Option<usize> {
    let rest = input.get(from..)?;
    rest.iter().position(|&candidate| candidate == byte).map(|at| from + at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_strangers_are_short() {
        let parse = |request: &str, stranger| {
            let mut parser = Parser::new(Limits::default());
            parser.set_stranger(stranger);
            parser.parse(&mut request.as_bytes().to_vec())
        };
        let long = |stranger| parse("*2\r\n$4\r\nAUTH\r\n$16385\r\n", stranger);
        assert_eq!(long(true), Err(ProtocolError::UnauthenticatedBulk));
        assert!(matches!(long(false), Ok(Progress::Incomplete(_))));
        assert_eq!(parse("*11\r\n", true), Err(ProtocolError::UnauthenticatedMultibulk));
        assert!(matches!(parse("*11\r\n", false), Ok(Progress::Incomplete(_))));
        let most = "*10\r\n$16384\r\n";
        assert!(matches!(parse(most, true), Ok(Progress::Incomplete(_))));
        let invalid = "*99999999999\r\n";
        assert_eq!(parse(invalid, true), Err(ProtocolError::InvalidMultibulkLength));
    }

    fn strict() -> Limits {
        Limits { inline_bytes_max: 64, bulk_bytes_max: 1000, args_max: 10, request_bytes_max: 5000 }
    }

    /// All commands of `stream`, parsed as if `step` bytes arrived at a time.
    fn commands(stream: &[u8], step: usize) -> (Vec<Vec<Vec<u8>>>, Option<ProtocolError>) {
        let mut parser = Parser::new(strict());
        let (mut buffer, mut found) = (Vec::new(), Vec::new());
        for chunk in stream.chunks(step) {
            buffer.extend_from_slice(chunk);
            loop {
                match parser.parse(&mut buffer) {
                    Ok(Progress::Complete(length)) => {
                        let args = parser
                            .args()
                            .iter()
                            .map(|span| buffer[span.range()].to_vec())
                            .collect::<Vec<_>>();
                        buffer.drain(..length);
                        if !args.is_empty() {
                            found.push(args);
                        }
                    }
                    Ok(Progress::Incomplete(missing)) => {
                        assert!(missing > 0);
                        break;
                    }
                    Err(error) => return (found, Some(error)),
                }
            }
        }
        (found, None)
    }

    fn whole(stream: &[u8]) -> (Vec<Vec<String>>, Option<ProtocolError>) {
        let result = commands(stream, stream.len().max(1));
        for step in 1..stream.len().min(40) {
            assert_eq!(commands(stream, step), result, "{step} bytes at a time");
        }
        let text =
            |args: Vec<Vec<u8>>| args.iter().map(|arg| arg.escape_ascii().to_string()).collect();
        (result.0.into_iter().map(text).collect(), result.1)
    }

    #[test]
    fn a_pipeline_is_taken_command_by_command() {
        let (found, error) = whole(
            b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n*1\r\n$4\r\nPING\r\nget \"a b\"\r\n*1\r\n$0\r\n\r\n",
        );
        assert_eq!(found, [vec!["GET", "key"], vec!["PING"], vec!["get", "a b"], vec![""]]);
        assert_eq!(error, None);
    }

    #[test]
    fn empty_commands_are_ignored() {
        assert_eq!(whole(b"\r\n\n*0\r\n*-7\r\nping\n").0, [["ping"]]);
    }

    #[test]
    fn bytes_after_a_bulk_string_are_skipped() {
        assert_eq!(whole(b"*1\r\n$4\rxPINGab*1\r\n$4\r\nPING\r\n").0, [["PING"], ["PING"]]);
    }

    #[test]
    fn headers_that_are_not_numbers_are_refused() {
        for bad in [
            "*\r\n",
            "*a\r\n",
            "*01\r\n",
            "*+1\r\n",
            "* 1\r\n",
            "*11\r\n",
            "*99999999999999999999\r\n",
        ] {
            assert_eq!(
                whole(bad.as_bytes()).1,
                Some(ProtocolError::InvalidMultibulkLength),
                "{bad:?}"
            );
        }
        for bad in ["$\r\n", "$-1\r\n", "$1001\r\n", "$1x\r\n", "$00\r\n"] {
            let stream = format!("*1\r\n{bad}");
            assert_eq!(
                whole(stream.as_bytes()).1,
                Some(ProtocolError::InvalidBulkLength),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn an_argument_begins_with_a_dollar() {
        assert_eq!(whole(b"*1\r\n-4\r\n").1, Some(ProtocolError::ExpectedBulk(b'-')));
        assert_eq!(whole(b"*1\r\n\r\n").1, Some(ProtocolError::ExpectedBulk(b'\r')));
        assert_eq!(whole(b"*1\r\nx").1, None, "the header is not whole yet");
    }

    #[test]
    fn lines_without_end_are_refused_at_the_limit() {
        assert_eq!(whole(&[b'a'; 64]).1, None);
        assert_eq!(whole(&[b'a'; 65]).1, Some(ProtocolError::InlineTooLong));
        assert_eq!(whole(&[b'*'; 65]).1, Some(ProtocolError::MultibulkHeaderTooLong));
        let mut stream = b"*1\r\n".to_vec();
        stream.extend_from_slice(&[b'$'; 65]);
        assert_eq!(whole(&stream).1, Some(ProtocolError::BulkHeaderTooLong));
    }

    #[test]
    fn quotes_must_match() {
        assert_eq!(whole(b"get \"a\r\n").1, Some(ProtocolError::UnbalancedQuotes));
    }

    #[test]
    fn a_request_beyond_the_limit_is_refused_before_it_arrives() {
        let mut stream = b"*6\r\n".to_vec();
        for _ in 0..5 {
            stream.extend_from_slice(b"$1000\r\n");
            stream.extend_from_slice(&[b'x'; 1000]);
            stream.extend_from_slice(b"\r\n");
        }
        let (found, error) = commands(&stream, 100);
        assert_eq!(
            (found.len(), error),
            (0, Some(ProtocolError::RequestTooLong { bytes_max: 5000 }))
        );
        let (found, error) = commands(&stream, stream.len());
        assert_eq!(
            (found.len(), error),
            (0, Some(ProtocolError::RequestTooLong { bytes_max: 5000 }))
        );
    }

    #[test]
    fn missing_bytes_of_a_large_argument_are_reported() {
        let mut parser = Parser::new(Limits::default());
        let mut input = b"*2\r\n$3\r\nGET\r\n$100000\r\nabc".to_vec();
        assert_eq!(parser.parse(&mut input), Ok(Progress::Incomplete(100_000 - 3 + 2)));
        assert!(parser.heap_bytes() < 100, "announced lengths reserve nothing");
    }

    #[test]
    fn the_list_of_a_command_of_many_arguments_is_released() {
        let mut parser = Parser::new(Limits::default());
        let mut stream = b"*5000\r\n".to_vec();
        for _ in 0..5000 {
            stream.extend_from_slice(b"$1\r\nx\r\n");
        }
        assert_eq!(parser.parse(&mut stream), Ok(Progress::Complete(stream.len())));
        assert_eq!(parser.args().len(), 5000);
        let mut ping = b"ping\r\n".to_vec();
        assert_eq!(parser.parse(&mut ping), Ok(Progress::Complete(6)));
        assert!(parser.heap_bytes() <= ARGS_KEPT * 8, "{}", parser.heap_bytes());
        parser.release();
        assert_eq!(parser.heap_bytes(), 0);
    }
}
