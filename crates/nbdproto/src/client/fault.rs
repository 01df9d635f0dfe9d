//! Why a server cannot be used.

/// Why a server cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It does not begin as an NBD server does.
    Greeting,
    /// It has only the handshake of old servers.
    OldStyle,
    /// It refuses the export: the number of its error, and its text.
    Refused(u32, String),
    /// The reply to an option is not one to the option that was sent.
    OptionReply,
    /// The reply to an option is longer than allowed, or they do not end.
    OptionLength(u32),
    /// What it says of the export is impossible.
    Export(&'static str),
    /// A reply does not begin with a magic number.
    ReplyMagic(u32),
    /// A reply to a request that was not sent, or was answered already.
    Cookie(u64),
    /// A reply of a kind or a length that does not fit its request.
    Reply(&'static str),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Greeting => f.write_str("not an NBD server"),
            Fault::OldStyle => f.write_str("the server has only the handshake of old servers"),
            Fault::Refused(kind, text) => {
                write!(f, "the server refuses the export ({})", refusal(*kind))?;
                if text.is_empty() { Ok(()) } else { write!(f, ": {text}") }
            }
            Fault::OptionReply => f.write_str("the server answers what was not asked"),
            Fault::OptionLength(len) => write!(f, "an answer of {len} bytes in the handshake"),
            Fault::Export(what) => write!(f, "an impossible export: {what}"),
            Fault::ReplyMagic(magic) => write!(f, "a reply begins with {magic:#010x}"),
            Fault::Cookie(cookie) => write!(f, "a reply to request {cookie}, which is not open"),
            Fault::Reply(what) => write!(f, "an impossible reply: {what}"),
        }
    }
}

impl std::error::Error for Fault {}

/// What an error reply to an option means.
fn refusal(kind: u32) -> &'static str {
    use crate::wire::option_reply as reply;
    match kind {
        reply::ERR_UNSUP => "it is too old",
        reply::ERR_POLICY => "its policy forbids it",
        reply::ERR_INVALID => "it calls the request invalid",
        reply::ERR_TLS_REQD => "it wants TLS, which is not supported",
        reply::ERR_UNKNOWN => "there is none of that name",
        reply::ERR_SHUTDOWN => "it shuts down",
        _ => "it gives an unknown reason",
    }
}
