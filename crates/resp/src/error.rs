//! Violations of the protocol by a peer, in the words of Redis 7.0.

use std::fmt;

/// A request that is not RESP. The connection receives the text as an error reply and is closed;
/// other connections are not affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolError {
    /// A `*` header that is not a number or exceeds the limit.
    InvalidMultibulkLength,
    /// A `*` header longer than a line may be.
    MultibulkHeaderTooLong,
    /// A `$` header that is not a number, is negative or exceeds the limit.
    InvalidBulkLength,
    /// A `$` header longer than a line may be.
    BulkHeaderTooLong,
    /// An argument that does not begin with `$`; the byte it begins with.
    ExpectedBulk(u8),
    /// An inline command longer than a line may be.
    InlineTooLong,
    /// An inline command with a quote left open, or one closed in the middle of a word.
    UnbalancedQuotes,
    /// More than ten arguments before the password was given.
    UnauthenticatedMultibulk,
    /// An argument of more than 16 KiB before the password was given.
    UnauthenticatedBulk,
    /// A request longer than the connection may hold. Redis closes the connection without a reason;
    /// we give one.
    RequestTooLong {
        /// The limit that was exceeded.
        bytes_max: usize,
    },
}

impl ProtocolError {
    /// Appends the error as a RESP error reply, `-ERR Protocol error: ...`.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"-ERR Protocol error: ");
        match self {
            // The byte is sent as it came, except for one that would end the line.
            Self::ExpectedBulk(byte) => {
                out.extend_from_slice(b"expected '$', got '");
                out.push(if matches!(byte, b'\r' | b'\n') { b' ' } else { *byte });
                out.push(b'\'');
            }
            other => out.extend_from_slice(other.text().as_bytes()),
        }
        if let Self::RequestTooLong { bytes_max } = self {
            out.extend_from_slice(b" than ");
            let mut digits = [0; crate::INTEGER_BYTES_MAX];
            out.extend_from_slice(crate::format_i64(
                &mut digits,
                i64::try_from(*bytes_max).unwrap_or(i64::MAX),
            ));
            out.extend_from_slice(b" bytes (the limit follows --memory)");
        }
        out.extend_from_slice(b"\r\n");
    }

    fn text(&self) -> &'static str {
        match self {
            Self::InvalidMultibulkLength => "invalid multibulk length",
            Self::MultibulkHeaderTooLong => "too big mbulk count string",
            Self::InvalidBulkLength => "invalid bulk length",
            Self::BulkHeaderTooLong => "too big bulk count string",
            Self::ExpectedBulk(_) => "expected '$'",
            Self::InlineTooLong => "too big inline request",
            Self::UnbalancedQuotes => "unbalanced quotes in request",
            Self::UnauthenticatedMultibulk => "unauthenticated multibulk length",
            Self::UnauthenticatedBulk => "unauthenticated bulk length",
            Self::RequestTooLong { .. } => "request longer",
        }
    }
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = Vec::new();
        self.write_to(&mut line);
        let text = &line[b"-ERR ".len()..line.len() - b"\r\n".len()];
        f.write_str(&text.escape_ascii().to_string().replace("\\'", "'"))
    }
}

impl std::error::Error for ProtocolError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(error: ProtocolError) -> Vec<u8> {
        let mut out = Vec::new();
        error.write_to(&mut out);
        out
    }

    #[test]
    fn texts_are_redis_texts() {
        assert_eq!(
            line(ProtocolError::ExpectedBulk(b'x')),
            b"-ERR Protocol error: expected '$', got 'x'\r\n"
        );
        assert_eq!(
            line(ProtocolError::InvalidBulkLength),
            b"-ERR Protocol error: invalid bulk length\r\n"
        );
        assert_eq!(
            line(ProtocolError::RequestTooLong { bytes_max: 5 }),
            b"-ERR Protocol error: request longer than 5 bytes (the limit follows --memory)\r\n"
        );
        assert_eq!(
            ProtocolError::ExpectedBulk(b'x').to_string(),
            "Protocol error: expected '$', got 'x'"
        );
    }

    #[test]
    fn a_line_ending_in_the_offending_byte_cannot_forge_a_reply() {
        assert_eq!(
            line(ProtocolError::ExpectedBulk(b'\n')),
            b"-ERR Protocol error: expected '$', got ' '\r\n"
        );
    }
}
