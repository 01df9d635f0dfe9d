//! The bytes of the Network Block Device protocol, without I/O: functions take slices and return
//! values.
//!
//! `wire` has the numbers and the reading of integers. The room `server` is the side that has the
//! disk: [`Handshake`], [`Request`], [`Replies`]. The room `client` is the side that uses it:
//! [`ClientHandshake`], [`Action::encode`], [`ClientReplies`].
//!
//! The specification is `doc/proto.md` of <https://github.com/NetworkBlockDevice/nbd>. Of it this
//! crate has the fixed newstyle handshake, simple and structured replies, block sizes and the
//! metadata context `base:allocation`. Left out: TLS, the oldstyle handshake, extended headers,
//! resizing, `NBD_CMD_CACHE` and fast zeroes, none of which is advertised.
//!
//! Invariant: bytes from the network cause no panic, no endless loop and no unbounded allocation.
//! An option is at most [`OPTION_BYTES_MAX`] long, the payload of a request [`PAYLOAD_BYTES_MAX`].
#![forbid(unsafe_code)]

mod client;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
mod server;
mod wire;

pub use client::fault::Fault;
pub use client::handshake::{ClientHandshake, Export};
pub use client::replies::{Answered, ClientReplies, Expect, REPLY_BYTES_MAX};
pub use server::handshake::{Chosen, ExportInfo, Exports, Handshake, Progress};
pub use server::options::OPTION_BYTES_MAX;
pub use server::reply::{Errno, Replies};
pub use server::request::{Action, PAYLOAD_BYTES_MAX, REQUEST_BYTES, Request, Rules};
pub use wire::{Extent, STRING_BYTES_MAX, Violation};
