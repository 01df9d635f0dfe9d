//! The side that uses the disk: the handshake with a server, requests, and their replies.
//!
//! The server may lie. Everything that it says is checked against what was asked, and a reply that
//! fits nothing is a [`Fault`](fault::Fault), after which the connection is of no use.

pub mod fault;
pub mod handshake;
pub mod replies;
pub mod request;
