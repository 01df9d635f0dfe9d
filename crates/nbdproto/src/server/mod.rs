//! The side that has the disk: the handshake with a client, its requests, and the replies.

pub mod handshake;
pub mod options;
pub mod reply;
pub mod request;
