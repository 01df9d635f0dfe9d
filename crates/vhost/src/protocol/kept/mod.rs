//! A connection that outlives the process behind it. No I/O.
//!
//! ```text
//!   front end  <--- socket --->  the launcher  <--- packets --->  the node
//!                                Keeper                           Target
//! ```
//!
//! The launcher alone reads from and writes to the front end's socket. It gives the node one
//! message at a time with its descriptors; the node answers with one *commit*: its session as a
//! document, the reply if one is due, and the numbers of the descriptors that it still uses. The
//! launcher stores the document and then sends the reply. If the node dies, the next one gets the
//! last document, its descriptors, and the message that was not committed.
//!
//! 1. A message takes effect once, or twice with the same result: a node that died between acting
//!    and committing has a successor that acts again. So every message can be repeated.
//! 2. A reply is sent at most once, because only the launcher sends one, and it does so only for a
//!    committed message. At most one message is open, and at most one reply is due.
//! 3. The document has no positions of rings. A ring continues from its in-flight region
//!    (`docs/formats/inflight.md`).
//! 4. The launcher knows the length of a message and the number of its descriptors, and nothing
//!    else of it. It does not read documents.
//!
//! `packet` has the packets between launcher and node (`docs/formats/kept.md`), `keeper` the
//! launcher's side of one connection.

mod keeper;
mod packet;

pub use self::keeper::{Keeper, KeeperState, OpenMessage, Taken};
pub use self::packet::{FromLauncher, FromNode, LIVE_MAX, PACKET_BYTES_MAX, Snapshot};
