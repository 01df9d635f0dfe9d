//! A disk's state on its way from one process to its successor: the session with the front end, the
//! rings, and the disk's own properties, as numbers. The descriptors travel beside the state, in
//! the order of [`DiskState::roles`].
//!
//! 1. The old process quiesces the rings and stops reading the connection. It calls
//!    [`Session::export`], fills in a [`DiskState`], and sends the bytes of [`DiskState::encode`]
//!    with the descriptors.
//! 2. The new process calls [`DiskState::decode`] and [`DiskState::assign`], then
//!    [`Session::import`], which returns the same actions as if the front end had sent everything
//!    again.
//! 3. Then the old process releases its own state. Until then an error leaves everything as it was.
//!
//! The format is in `docs/formats/handover.md`. A reader that meets an unknown field refuses the
//! whole document: it could not keep the field. A reader accepts exactly the bytes that a writer
//! would write for the same state, so every state has one form.
//!
//! `state` has the state and its descriptors, `format` the constants, `encode` and `decode` the
//! document.

mod decode;
mod encode;
mod error;
mod format;
mod state;

#[cfg(doc)]
use crate::protocol::session::Session;
pub(crate) use encode::document;
pub use error::HandoverError;
pub use format::{DOCUMENT_BYTES_MAX, NAME_BYTES_MAX, NUMBERS_MAX};
pub use state::{
    ConnectionState, DiskDescriptors, DiskState, InFlight, KeptState, MirrorState, Role,
    SessionState,
};
