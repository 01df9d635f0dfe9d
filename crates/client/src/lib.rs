//! A client of Millrace nodes and Redis servers, for asynchronous programs and for threads, with a
//! cache that the server keeps coherent.
//!
//! - [`Client`] is for tokio: all calls of all tasks share one connection.
//! - [`blocking::Client`] is for threads: a thread that calls has a socket for itself.
//! - [`Options`]: password, timeouts, the cache. [`Error`]: each has a [kind](ErrorKind) to act on.
//!
//! `get`, `multi_get`, `set`, `delete`, deadlines of keys, atomic batches and optimistic
//! transactions work with any Redis server; ranges need a Millrace node.
//!
//! # What is tried again
//!
//! A call ends within [`Options::timeout`], whatever the server or the network does. Until then it
//! is made again if the connection breaks or none can be made, with growing pauses, where that is
//! safe: if it only reads, or if nothing of it was sent. Any other write that gets no answer fails
//! with [`ErrorKind::OutcomeUnknown`], because it may have been made. [`Options::retry`] switches
//! it off.
//!
//! # Keys with a deadline
//!
//! [`Client::set_with_ttl`] sets a key that the server removes after a time, [`Client::expire`]
//! gives a key that is there such a time, and [`Client::persist`] takes it away. Any other set of
//! the key takes it away, too. The time begins when the server makes the write, by the server's
//! clock: a write whose outcome is unknown may have begun it, and one that is made again begins it
//! anew. So these calls are writes like the others, and are made again only if nothing was sent.
//! [`Client::ttl`] tells how much is left.
//!
//! # Cache
//!
//! With [`Options::cache`], values that were read are kept in this process, as is the fact that
//! there is none. The server knows which keys were read (`CLIENT TRACKING`), and sends a message
//! when one of them is written by anybody.
//!
//! ```
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/example.rs"));
//! # fn main() -> client::Result<()> {
//! # let server = Redis::start(&[]);
//! # let address = server.address();
//! use millrace::client::Options;
//!
//! let client = Options::new().cache(64 << 20).connect_blocking(&address)?;
//! client.set("k", "1")?;
//! for _ in 0..1000 {
//!     assert_eq!(client.get("k")?.unwrap(), b"1");
//! }
//! assert_eq!(client.cache_stats().misses, 1);
//!
//! let other = Options::new().connect_blocking(&address)?;
//! other.set("k", "2")?;
//! client.wait_coherent();
//! assert_eq!(client.get("k")?.unwrap(), b"2");
//! # Ok(())
//! # }
//! ```
//!
//! How old a value can be:
//!
//! - A client never returns a value older than a write of its own that was acknowledged, or than an
//!   invalidation that it has received.
//! - An invalidation travels as fast as a reply. So a read may return a value that was overwritten
//!   a moment ago: by about the time that a message needs from the server. Two clients may see two
//!   writes in different order, if they cache one of the keys.
//! - If the server or the network is silent, values are served for at most
//!   [`Options::staleness_max`] after the last request that has been answered was sent. After that,
//!   reads wait for the server.
//! - When the connection ends, everything is dropped, before the first read on the next one.
//! - After [`Client::wait_coherent`], reads return nothing older than that call. It costs a round
//!   trip. Use it after something outside of the database has told of a write.
//! - Transactions, ranges and writes do not read the cache.
//!
//! The server's part is exact on Redis: it queues the invalidations of a write before the write is
//! acknowledged.
//!
//! A deadline that passes is no write: the server invalidates the key when it notices, and until
//! then a cached value may be returned, also after [`Client::wait_coherent`]. A Millrace node
//! removes keys in the order of their deadlines, Redis when somebody asks for them and by samples;
//! both look ten times a second, and fall behind when very many keys end at once. Once
//! [`Client::ttl`] has answered that there is no such key, no older value is returned. For a key
//! whose deadline must be kept to the moment, use a client without a cache, or ask for its `ttl`
//! first.

#![forbid(unsafe_code)]

mod asynchronous;
mod backoff;
mod batch;
pub mod blocking;
mod bounds;
mod cache;
mod command;
mod error;
mod mutant;
mod options;
mod seal;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod simulated;
mod tls;
mod ttl;
mod wire;

pub use asynchronous::{Client, Range, Transaction};
pub use batch::WriteBatch;
pub use bounds::KeyRange;
pub use cache::CacheStats;
pub use command::Entry;
pub use error::{Error, ErrorKind, Result};
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use mutant::{Mutant, set_mutant};
pub use options::Options;
pub use tls::Tls;
pub use ttl::Ttl;
