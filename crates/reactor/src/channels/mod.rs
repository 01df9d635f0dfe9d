//! What passes between cores and threads, without a lock, and how they wake each other.

pub(crate) mod bell;
pub mod inbox;
pub mod mailbox;
pub(crate) mod mesh;
pub mod reply;
pub mod sleep;
pub mod spsc;
pub mod waiters;
