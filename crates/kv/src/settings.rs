//! The limits of the key-value door, all in one place. Per core where they say so.

use lsm::CfId;
use resp::Limits;

use crate::password::Password;

/// RocksDB's default column family. Changes name it until they go to the engine, which then gets
/// the family of the shard.
pub(crate) const FAMILY: CfId = 0;

/// Limits on connections. The defaults serve a node of any size. A full limit is a visible state
/// with backpressure; memory does not grow beyond it.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The column family whose keys the protocol shows and changes.
    pub family: CfId,
    /// The password that clients must give first; `CONFIG SET requirepass` changes it.
    pub password: Option<Password>,
    /// Whether `DEBUG` is allowed (`enable-debug-command`).
    pub debug_commands: bool,
    /// Maximum number of connections of all cores; further ones get an error and are closed.
    pub clients_max: usize,
    /// Largest single argument (`proto-max-bulk-len`).
    pub bulk_bytes_max: usize,
    /// Largest command as a whole.
    pub request_bytes_max: usize,
    /// Per core: bytes of commands of more than [`Settings::REQUEST_BYTES_SMALL`] that have not
    /// arrived whole. One connection may use all of it; all others together a quarter more, and
    /// wait beyond that. A larger command is refused.
    pub requests_bytes_max: usize,
    /// Concurrent reads of one connection.
    pub reads_max: usize,
    /// Concurrent reads of all connections of a core, beyond which each connection may have only a
    /// few. A read that waits takes about [`Settings::READ_BYTES`].
    pub reads_total_max: usize,
    /// Unsent bytes at which a connection's next command waits until its client reads.
    pub unsent_bytes_max: usize,
    /// Unsent bytes of all connections of a core together. Beyond it each connection may have only
    /// replies of up to [`Settings::REPLY_BYTES_SMALL`], and one connection at a time a longer
    /// one; the others wait.
    pub unsent_total_bytes_max: usize,
    /// Bytes of writes of a core's connections that the engine has not acknowledged. Beyond it no
    /// command that writes is taken.
    pub writes_bytes_max: usize,
    /// Per core: memory of the queued commands of all transactions. A connection may have half of
    /// it.
    pub queued_bytes_max: usize,
    /// Memory of the watches of all connections of all cores.
    pub watches_bytes_max: usize,
    /// Buffers that idle connections of a core keep for the next request, in bytes; further ones
    /// release theirs.
    pub idle_buffer_bytes_max: usize,
    /// Per core: bytes of values that are sent from the engine's own buffers and pin these. Beyond
    /// it values are copied.
    pub pinned_bytes_max: usize,
    /// Keys of which tracked connections of all cores are told, each core an equal part; 0 for no
    /// limit. `CONFIG SET tracking-table-max-keys` changes it.
    pub tracking_keys_max: usize,
    /// Per core: memory of the table of these keys.
    pub tracking_bytes_max: usize,
    /// Per core: memory of TLS connections, without their buffers of commands and replies. Beyond
    /// three quarters no further ones are accepted; beyond it one that holds much is closed.
    pub tls_bytes_max: usize,
    /// The version of Redis that `HELLO` and `INFO` report.
    pub redis_version: String,
    /// A value of at least this length is sent from where it lies instead of being copied.
    pub reference_bytes_min: usize,
}

impl Settings {
    /// Memory of a read in progress, without its blocks.
    pub const READ_BYTES: usize = 4 * 1024;
    /// An unfinished command of up to this size may always arrive.
    pub const REQUEST_BYTES_SMALL: usize = 64 * 1024;
    /// The same while the unfinished commands of a core's connections take more than half of
    /// [`Settings::requests_bytes_max`].
    pub const REQUEST_BYTES_LEAST: usize = 4 * 1024;
    /// Bytes of unacknowledged writes that one connection may have, and one write more.
    pub const WRITES_BYTES_MAX: usize = 4 << 20;
    /// A reply of up to this size may always be made; also the number of unsent bytes with which a
    /// connection may always take a command.
    pub const REPLY_BYTES_SMALL: usize = 4 * 1024;

    /// Largest value: the limit for an argument and for a value that a command builds
    /// (`proto-max-bulk-len`).
    pub fn value_bytes_max(&self) -> usize {
        let limits = self.limits();
        limits.bulk_bytes_max.min(limits.request_bytes_max)
    }

    /// Per core: messages that wait for tracked connections.
    pub(crate) fn tracking_pushes_bytes_max(&self) -> usize {
        self.unsent_total_bytes_max / 4
    }

    /// The limits that the parser enforces.
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
            family: FAMILY,
            password: None,
            debug_commands: false,
            clients_max: 10_000,
            bulk_bytes_max: resp::BULK_BYTES_MAX,
            request_bytes_max: resp::REQUEST_BYTES_MAX,
            requests_bytes_max: 64 << 20,
            reads_max: 128,
            reads_total_max: 1 << 16,
            unsent_bytes_max: 1 << 20,
            unsent_total_bytes_max: 64 << 20,
            writes_bytes_max: 32 << 20,
            queued_bytes_max: 64 << 20,
            watches_bytes_max: 24 << 20,
            idle_buffer_bytes_max: 8 << 20,
            pinned_bytes_max: 32 << 20,
            tracking_keys_max: 1_000_000,
            tracking_bytes_max: 32 << 20,
            tls_bytes_max: 64 << 20,
            redis_version: crate::REDIS_VERSION.to_owned(),
            reference_bytes_min: 16 << 10,
        }
    }
}
