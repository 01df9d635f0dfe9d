//! The crate's one error.

use std::fmt;
use std::io;

/// The result of an operation of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The kinds of errors that callers treat differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No connection could be made, or it broke. Nothing was changed: the operation reads, or
    /// nothing of it was sent.
    Unreachable,
    /// The answer did not come within [`Options::timeout`](crate::Options::timeout). Nothing was
    /// changed: the operation reads, or nothing of it was sent.
    Timeout,
    /// The connection broke, or the time was over, after at least a part of a write was sent. It
    /// was made, or was not, or still will be: read the key before you write it again.
    OutcomeUnknown,
    /// A key that the transaction has read was written meanwhile. Nothing was written.
    Conflict,
    /// The server does not know the command, or not with these arguments; the text is the server's.
    Unsupported,
    /// The password is wrong or missing, or the user may not do this.
    Denied,
    /// The server only reads.
    ReadOnly,
    /// The key holds something that is not a string.
    WrongType,
    /// The server is starting, has too many clients, or is otherwise busy. Try again later.
    Busy,
    /// The server cannot write for now: its memory or its disk is full, or its disk fails.
    Full,
    /// Another error that the server answered.
    Server,
    /// The peer does not speak the Redis protocol, or a reply exceeds the limits.
    Protocol,
    /// An option, an address or an argument is impossible; the text names it.
    InvalidOption,
    /// The client was closed, or the runtime that drives it has ended.
    Closed,
}

/// A failed operation: its [kind](Error::kind), and a text that says what could not be done and
/// why.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/example.rs"));
/// # fn main() {
/// use millrace::blocking::Client;
/// use millrace::client::ErrorKind;
///
/// let error = Client::connect("127.0.0.1:1").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Unreachable);
/// assert!(error.to_string().starts_with("cannot connect to 127.0.0.1:1: "));
/// # }
/// ```
#[derive(Clone)]
pub struct Error(Box<(ErrorKind, String)>);

impl Error {
    #[cold]
    pub(crate) fn new(kind: ErrorKind, what: impl Into<String>) -> Error {
        Error(Box::new((kind, what.into())))
    }

    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        self.0.0
    }

    /// The error that a server's error reply stands for.
    #[cold]
    pub(crate) fn from_reply(text: &[u8]) -> Error {
        let code = text.split(|&byte| byte == b' ').next().unwrap_or_default();
        let rest = &text[code.len()..];
        let begins = |with: &[u8]| rest.get(1..).is_some_and(|rest| rest.starts_with(with));
        let kind = match code {
            b"NOAUTH" | b"WRONGPASS" | b"NOPERM" => ErrorKind::Denied,
            b"READONLY" => ErrorKind::ReadOnly,
            b"WRONGTYPE" => ErrorKind::WrongType,
            b"LOADING" | b"BUSY" | b"TRYAGAIN" | b"CLUSTERDOWN" | b"MASTERDOWN" => ErrorKind::Busy,
            b"OOM" | b"MISCONF" => ErrorKind::Full,
            b"NOPROTO" => ErrorKind::Unsupported,
            b"ERR" if begins(b"unknown command") || begins(b"unknown subcommand") => {
                ErrorKind::Unsupported
            }
            b"ERR" if begins(b"max number of clients") => ErrorKind::Busy,
            b"ERR" if begins(b"invalid password") || begins(b"AUTH ") => ErrorKind::Denied,
            _ => ErrorKind::Server,
        };
        Error::new(kind, format!("the server answered: {}", escape(text)))
    }

    #[cold]
    pub(crate) fn protocol(what: impl fmt::Display) -> Error {
        Error::new(ErrorKind::Protocol, format!("the server does not speak the protocol: {what}"))
    }

    /// A connection that broke.
    #[cold]
    pub(crate) fn broken(error: &io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::timeout(),
            _ => Error::new(ErrorKind::Unreachable, format!("the connection broke: {error}")),
        }
    }

    #[cold]
    pub(crate) fn ended() -> Error {
        Error::new(ErrorKind::Unreachable, "the server closed the connection")
    }

    #[cold]
    pub(crate) fn timeout() -> Error {
        Error::new(ErrorKind::Timeout, "no answer within the timeout")
    }

    #[cold]
    pub(crate) fn closed() -> Error {
        Error::new(ErrorKind::Closed, "the client is closed")
    }

    /// What this failure means for a write of which at least a part was sent.
    #[cold]
    pub(crate) fn of_sent_write(self) -> Error {
        Error::new(
            ErrorKind::OutcomeUnknown,
            format!("the outcome of the write is unknown: {self}"),
        )
    }

    /// Whether another attempt may succeed.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self.kind(), ErrorKind::Unreachable | ErrorKind::Timeout | ErrorKind::Busy)
    }
}

/// Bytes of a server as readable text of bounded length.
fn escape(text: &[u8]) -> String {
    let shown = &text[..text.len().min(512)];
    match std::str::from_utf8(shown) {
        Ok(plain) if !plain.contains(char::is_control) => plain.to_owned(),
        _ => shown.escape_ascii().to_string(),
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.1)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.0, self.0.1)
    }
}

impl std::error::Error for Error {}

/// A program that returns [`std::io::Error`] may use `?` on this crate's errors.
impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        io::Error::other(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_of_servers_have_the_kinds_that_callers_act_on() {
        for (text, kind) in [
            ("NOAUTH Authentication required.", ErrorKind::Denied),
            ("WRONGPASS invalid username-password pair or user is disabled.", ErrorKind::Denied),
            (
                "ERR unknown command 'MR.RANGE', with args beginning with: '-' ",
                ErrorKind::Unsupported,
            ),
            ("ERR unknown subcommand 'TRACKING'. Try CLIENT HELP.", ErrorKind::Unsupported),
            ("ERR max number of clients reached", ErrorKind::Busy),
            ("OOM command not allowed when used memory > 'maxmemory'.", ErrorKind::Full),
            ("MISCONF Errors writing to the database: no space", ErrorKind::Full),
            ("READONLY You can't write against a read only replica.", ErrorKind::ReadOnly),
            ("WRONGTYPE Operation against a key", ErrorKind::WrongType),
            ("ERR syntax error", ErrorKind::Server),
            ("", ErrorKind::Server),
        ] {
            assert_eq!(Error::from_reply(text.as_bytes()).kind(), kind, "{text}");
        }
        let long = Error::from_reply(&[b'x'; 100_000]);
        assert!(long.to_string().len() < 600);
        assert_eq!(
            Error::from_reply(b"ERR \x1b[2J").to_string(),
            r"the server answered: ERR \x1b[2J"
        );
    }
}
