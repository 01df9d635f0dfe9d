//! The limits of the key-value door, all in one place. Per core where they say so.

use resp::Limits;

use crate::password::Password;

/// What connections may take. The defaults serve a node of any size; a full limit is a visible
/// state, never a growth.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What clients must give before anything else; `CONFIG SET requirepass` changes it.
    pub password: Option<Password>,
    /// Connections of all cores; the next one is told so and closed.
    pub clients_max: usize,
    /// Largest single argument (`proto-max-bulk-len`).
    pub bulk_bytes_max: usize,
    /// Largest command as a whole.
    pub request_bytes_max: usize,
    /// Bytes for commands of more than [`Settings::REQUEST_BYTES_SMALL`] that have not arrived
    /// whole, of a core: so much for one connection, and a quarter of it for all others.
    /// Others wait; a command that is larger is refused.
    pub requests_bytes_max: usize,
    /// Reads of one connection under way at once.
    pub reads_max: usize,
    /// Reads of all connections of a core under way at once, beyond which each connection may have
    /// only a few. One that waits takes about [`Settings::READ_BYTES`].
    pub reads_total_max: usize,
    /// Unsent bytes at which a connection's commands wait for its reader.
    pub unsent_bytes_max: usize,
    /// Unsent bytes of all connections of a core together. Beyond it each connection may have only
    /// replies of up to [`Settings::REPLY_BYTES_SMALL`], and one connection at a time a longer
    /// one; the others wait.
    pub unsent_total_bytes_max: usize,
    /// Bytes of writes of a core's connections that the engine has not acknowledged; beyond it no
    /// command that writes is taken.
    pub writes_bytes_max: usize,
    /// Buffers that idle connections of a core keep for the next request; others give theirs back.
    pub idle_buffer_bytes_max: usize,
    /// Bytes of values that are sent from the engine's own buffers and keep these from being
    /// reused, per core; beyond it values are copied.
    pub pinned_bytes_max: usize,
    /// A value at least so long is sent from where it lies instead of being copied.
    pub reference_bytes_min: usize,
}

impl Settings {
    /// Memory of a read under way, beside its blocks.
    pub const READ_BYTES: usize = 4 * 1024;
    /// An unfinished command so small may always arrive.
    pub const REQUEST_BYTES_SMALL: usize = 64 * 1024;
    /// The same while the unfinished commands of a core's connections take more than half of what
    /// one may have.
    pub const REQUEST_BYTES_LEAST: usize = 4 * 1024;
    /// Bytes of writes that one connection may have on their way, and one write more.
    pub const WRITES_BYTES_MAX: usize = 4 << 20;
    /// A reply so long may always be made; and unsent bytes with which a connection may always take
    /// a command.
    pub const REPLY_BYTES_SMALL: usize = 4 * 1024;

    /// Largest value: what an argument may have, and what a command may build
    /// (`proto-max-bulk-len`).
    pub fn value_bytes_max(&self) -> usize {
        let limits = self.limits();
        limits.bulk_bytes_max.min(limits.request_bytes_max)
    }

    /// What the parser enforces.
    pub fn limits(&self) -> Limits {
        Limits {
            bulk_bytes_max: self.bulk_bytes_max,
            request_bytes_max: self.request_bytes_max.min(self.requests_bytes_max),
            ..Limits::default()
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            password: None,
            clients_max: 10_000,
            bulk_bytes_max: resp::BULK_BYTES_MAX,
            request_bytes_max: resp::REQUEST_BYTES_MAX,
            requests_bytes_max: 64 << 20,
            reads_max: 128,
            reads_total_max: 1 << 16,
            unsent_bytes_max: 1 << 20,
            unsent_total_bytes_max: 64 << 20,
            writes_bytes_max: 32 << 20,
            idle_buffer_bytes_max: 8 << 20,
            pinned_bytes_max: 32 << 20,
            reference_bytes_min: 16 << 10,
        }
    }
}
