//! The Redis serialization protocol, versions 2 and 3, as bytes in and bytes out.
//!
//! 1. A server appends the bytes it receives to one buffer per connection and calls
//!    [`Parser::parse`] on it. The answer is a whole command (a list of [`Span`]s into that
//!    buffer), a request for more bytes, or a [`ProtocolError`] to send before closing.
//! 2. Replies are appended to a `Vec<u8>` through a [`Writer`], which knows the connection's
//!    [`Protocol`].
//! 3. A client writes requests with [`write_command`] and feeds the bytes it receives to a
//!    [`Decoder`], which returns [`Reply`] values.
//!
//! Invariants: nothing here does I/O; no input makes it panic; a length that a peer announces
//! allocates nothing before its bytes have arrived. Errors, limits and quoting rules are those of
//! Redis 7.0, so that its clients and its protocol tests see what they expect. Where a limit of
//! ours is tighter, [`Limits`] says so.
#![forbid(unsafe_code)]

mod ahead;
mod constants;
mod decode;
mod error;
#[doc(hidden)]
pub mod fuzz;
mod inline;
mod integer;
mod request;
mod writer;

pub use ahead::{GetsAhead, gets_ahead};
pub use constants::{
    ARGS_MAX, BULK_BYTES_MAX, INLINE_BYTES_MAX, REPLY_DEPTH_MAX, REQUEST_BYTES_MAX,
};
pub use decode::{DecodeError, Decoder, DecoderLimits, Reply};
pub use error::ProtocolError;
pub use inline::split_line;
pub use integer::{INTEGER_BYTES_MAX, format_i64, parse_i64};
pub use request::{Limits, Parser, Progress, Span};
pub use writer::{Protocol, Writer, write_command};
