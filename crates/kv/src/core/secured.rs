//! What the TLS connections of a core share: memory, and how often their faults are logged.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;

use reactor::Core;

use crate::client::gauge::Gauge;

/// Memory of a TLS connection that holds nothing: rustls' state and its buffer, and a buffer of
/// replies.
pub(crate) const CONNECTION_BYTES: usize = 12 * 1024;

/// At most one line is logged in this time.
const LOG_NS: u64 = 1_000_000_000;

/// The state that a core's TLS connections share.
#[derive(Default)]
pub(crate) struct Secured {
    /// Memory of the connections, and of what they hold of records that have not arrived whole.
    pub bytes: Gauge,
    /// Received bytes on their way from a connection's input to its session.
    pub scratch: RefCell<Vec<u8>>,
    logged_ns: Cell<Option<u64>>,
    unlogged: Cell<u64>,
}

impl Secured {
    /// Whether there is memory for another connection; a quarter of `most` is for what connections
    /// receive.
    pub fn has_room(&self, most: usize) -> bool {
        self.bytes.get() + CONNECTION_BYTES <= most / 4 * 3
    }

    /// Logs why a connection was closed, unless another line has just been logged.
    pub fn log(&self, core: &Core, client: Option<SocketAddr>, what: &str, why: &str) {
        let now_ns = core.now_ns();
        if self.logged_ns.get().is_some_and(|then| now_ns.saturating_sub(then) < LOG_NS) {
            return self.unlogged.set(self.unlogged.get() + 1);
        }
        self.logged_ns.set(Some(now_ns));
        let client = client.map_or_else(String::new, |client| format!(" with {client}"));
        match self.unlogged.take() {
            0 => tracing::warn!("{what}{client}: {why}"),
            more => tracing::warn!(more, "{what}{client}: {why}"),
        }
    }
}
