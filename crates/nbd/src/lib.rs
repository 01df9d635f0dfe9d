//! An NBD server: disks for clients of the Network Block Device protocol.
//!
//! The bytes of the protocol are apart from the I/O. `wire`, `options`, `handshake`, `request` and
//! `reply` take slices and return values; they never see the reactor. The room `server` uses them:
//! it has the sockets, and executes the requests at the devices.
//!
//! The specification is `doc/proto.md` of <https://github.com/NetworkBlockDevice/nbd>. Of it this
//! crate has the fixed newstyle handshake, simple and structured replies, block sizes and the
//! metadata context `base:allocation`. Left out: TLS, the oldstyle handshake, extended headers,
//! resizing, `NBD_CMD_CACHE` and fast zeroes, none of which is advertised.
//!
//! Invariant: bytes from the network cause no panic, no endless loop and no unbounded allocation.
//! An option is at most [`OPTION_BYTES_MAX`] long, the payload of a request [`PAYLOAD_BYTES_MAX`].
#![forbid(unsafe_code)]

#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzz;
mod handshake;
mod options;
mod reply;
mod request;
mod server;
mod wire;

pub use handshake::{Chosen, ExportInfo, Exports, Handshake, Progress};
pub use options::OPTION_BYTES_MAX;
pub use reply::{Errno, Extent, Replies};
pub use request::{Action, PAYLOAD_BYTES_MAX, REQUEST_BYTES, Request, Rules};
pub use server::{CONNECTIONS_MAX, Counters, Disk, Disks, Server};
pub use wire::Violation;
