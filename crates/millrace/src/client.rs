//! Databases somewhere else: a client of Millrace nodes and Redis servers, with a coherent cache.
//!
//! [`Client`] is for tokio, [`blocking::Client`] for threads; both are also at their places in the
//! crate, as [`millrace::Client`](crate::Client) and
//! [`millrace::blocking::Client`](crate::blocking::Client).
//!
//! ```no_run
//! # fn main() -> millrace::client::Result<()> {
//! use millrace::client::Options;
//!
//! let client = Options::new().cache(256 << 20).connect_blocking("10.0.0.1:6379")?;
//! client.set("k", "v")?;
//! assert_eq!(client.get("k")?.as_deref(), Some(&b"v"[..]));
//! # Ok(())
//! # }
//! ```

#[doc(inline)]
pub use ::client::{
    CacheStats, Client, Entry, Error, ErrorKind, KeyRange, Options, Range, Result, Tls,
    Transaction, Ttl, WriteBatch, blocking,
};
