//! How the tasks of one core wait for each other: [`Event`], [`Oneshot`], [`timeout`], [`race`].
//!
//! All state is plain memory of one core. There are no atomics, and a notification allocates
//! nothing. For messages between cores see `mailbox`, `spsc` and [`Core::call`](crate::Core::call).
//!
//! A task that polls a condition with [`Core::sleep_ns`](crate::Core::sleep_ns) can nearly always
//! wait for an [`Event`] instead: the code that changes the condition notifies it. What the kernel
//! announces through a descriptor has its own waits: [`Watch`](crate::Watch) and
//! [`Core::process_end`](crate::Core::process_end).
//!
//! This module uses `core` only for its timers.

mod event;
mod join;
mod oneshot;
mod timeout;

pub use event::{Event, Wait};
pub use join::join_all;
pub use oneshot::{Closed, Oneshot, OneshotReceiver, OneshotSender, oneshot};
pub use timeout::{Either, Elapsed, Race, Timeout, race, timeout};
