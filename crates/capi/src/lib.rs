//! The engine and the client of Millrace as a C library: `libmillrace.so` and `libmillrace.a`, with
//! the header `include/millrace.h`, which documents every function for its callers.
//!
//! It is a thin layer over the crate `millrace`:
//!
//! 1. Each function turns its arguments into Rust values. What is null and must not be, is an
//!    error.
//! 2. A blocking call waits in [`millrace::blocking`]. An asynchronous one becomes a future of
//!    `millrace::Db` in a completion queue (`queue.rs`). Clients are in `client/`.
//! 3. The result becomes a [`Code`], with an [`Error`] if the caller asks for it, and values whose
//!    memory the caller frees.
//!
//! **No panic reaches C**: every function that can panic runs in `answer` or `or_else`
//! (`error.rs`), which turn a panic into [`Code::Panicked`].
//!
//! # Contract
//!
//! The functions are called by C, so the compiler cannot check what their types say:
//!
//! - A handle is null, or comes from the function that makes handles of its kind and was not freed.
//!   A function that takes `Option<Box<T>>` frees it: no other call uses it at that time or later.
//!   `Option<&mut T>`: no other call uses it at that time.
//! - An `Out<T>` is null, or points to aligned memory for a `T`, which need not be initialized.
//! - A [`Slice`] is null, or points to so many bytes, which nobody changes during the call. Names
//!   and paths end with a zero byte. Arrays have as many items as the call says.
//!
//! A function without raw pointers is safe in Rust: its types say all of that. The others are
//! `unsafe`, and refer to this contract. Blocks of unsafe code are in `bytes.rs` (memory of the
//! caller) and `event.rs` (system calls), and where these are used.

mod batch;
mod bytes;
mod client;
mod db;
mod error;
mod event;
mod family;
mod iter;
mod options;
mod queue;
mod snapshot;
mod transaction;

pub use batch::*;
pub use bytes::{Out, Slice, Value, millrace_value_free, millrace_values_free};
pub use client::*;
pub use db::*;
pub use error::{
    Code, Error, ErrorOut, millrace_code_name, millrace_error_code, millrace_error_free,
    millrace_error_message,
};
pub use family::*;
pub use iter::*;
pub use options::*;
pub use queue::*;
pub use snapshot::*;
pub use transaction::*;

use std::ffi::{CStr, c_char};

/// The version of the library, such as `0.1.0`.
#[unsafe(no_mangle)]
pub extern "C" fn millrace_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}
