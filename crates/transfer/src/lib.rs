//! The data of a disk on its way from one node to another.
//!
//! ```text
//!   source node                                     destination node
//!     bdev::Copy --> Sender ==== TCP or TLS ====> Server --> Destination --> device
//! ```
//!
//! The source asks, the destination answers. Each request has a number, and may be answered in any
//! order. All of them may be repeated, so a connection that is lost is made again, and what was not
//! answered is sent once more. A destination that was started again since has another
//! *incarnation*: what it had acknowledged and not made durable may be lost, so the source compares
//! everything by checksums and sends what differs.
//!
//! The format is in `docs/formats/transfer.md`. `wire` and `shape` are pure; `tls` reads
//! certificates; `link` is one connection; `sender` and `server` are the two ends, which know
//! nothing of each other. What a node does with a disk that goes, and how the guest gets there, is
//! not here (crate `node`, `disks/sending.rs` and `disks/receiving.rs`).

mod link;
mod sender;
mod server;
mod shape;
mod tls;
mod wire;

pub use sender::{Dial, Sender};
pub use server::{Boxed, Destination, Destinations, Refusal, Server};
pub use shape::Shape;
pub use tls::{Identity, IdentityFault, IdentityFiles};
pub use wire::{Belongings, Hello, Limits, PIECE_BYTES_MAX, Stage, VERSION, Welcome};

#[cfg(feature = "testing")]
#[doc(hidden)]
pub use wire::fuzz;
