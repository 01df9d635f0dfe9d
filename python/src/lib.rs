//! Millrace for Python: the native part of the package `millrace`.
//!
//! Each class has two modes. In [`Mode::Blocking`](mode::Mode) a method waits, without the GIL, and
//! returns the result; these classes are the public ones. In `Mode::Loop` it returns an awaitable
//! of the running asyncio loop; `millrace/aio.py` wraps these.
//!
//! 1. A method copies its arguments into a request, while it holds the GIL.
//! 2. `Mode::run` makes a future of it: [`wait`] blocks the thread, [`task`] hands it to the loop.
//! 3. The future's [`Answer`](answer::Answer) becomes Python objects, or its failure an exception,
//!    on the thread that called.
//!
//! No thread of a database ever takes the GIL or touches a Python object: it only wakes.

#![deny(unsafe_code)]

mod answer;
mod batch;
mod bytes;
mod client;
mod db;
mod error;
mod family;
mod mode;
mod options;
mod range;
mod runtime;
mod slot;
mod snapshot;
mod task;
mod transaction;
mod wait;

use pyo3::prelude::*;

/// The native part of the package `millrace`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::batch::{ClientBatch, WriteBatch};
    #[pymodule_export]
    use super::client::{Client, ClientTransaction, connect};
    #[pymodule_export]
    use super::db::{Db, open};
    #[pymodule_export]
    use super::family::ColumnFamily;
    #[pymodule_export]
    use super::range::Range;
    #[pymodule_export]
    use super::snapshot::Snapshot;
    #[pymodule_export]
    use super::transaction::Transaction;
}
