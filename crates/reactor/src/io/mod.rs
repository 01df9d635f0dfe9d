//! What a task reads, writes and waits for outside: files, sockets, counters and descriptors.
//!
//! `file`, `write`, `file_queue` and `mapped` work on open files; `net` and `unix` on sockets;
//! `eventfd` has the counters by which processes wake each other, through `aio_abi`; `watch` waits
//! for any descriptor, and `foreign` admits those of other processes. The room uses `driver`,
//! `memory`, and `core`, in the circle that `core` names.

pub mod aio_abi;
pub(crate) mod eventfd;
pub(crate) mod file;
pub(crate) mod file_queue;
pub(crate) mod foreign;
pub(crate) mod mapped;
pub(crate) mod net;
pub(crate) mod unix;
pub(crate) mod watch;
pub(crate) mod write;
