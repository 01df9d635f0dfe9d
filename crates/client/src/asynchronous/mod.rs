//! The client for asynchronous programs.

mod client;
mod driver;
mod range;
mod socket;
mod transaction;

pub use self::client::Client;
pub use self::range::Range;
pub use self::transaction::Transaction;
