//! The state that one core's connections share: the engine's reader, the list of connections,
//! counters, budgets. It never leaves its core.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use lsm::{CfId, Reader};
use reactor::{Core, Event};

use crate::client::gauge::Gauge;
use crate::client::large::LargeRequests;
use crate::client::registry::Clients;
use crate::client::reply_room::ReplyRoom;
use crate::core::ask::{Posters, Questions};
use crate::core::command_stats::AllCommandStats;
use crate::core::node::NodeState;
use crate::core::scan_table::ScanTable;
use crate::core::secured::Secured;
use crate::core::slow_log::{Noted, SlowCommand, SlowLog};
use crate::core::tracking::Tracking;
use crate::core::writes::Writes;
use crate::expiry::live::LiveReader;
use crate::password::Password;
use crate::settings::{FAMILY, Settings};
use crate::shard::Shard;

/// RocksDB's name for the comparator whose order is the reverse of that of bytes.
const DESCENDING: &str = "rocksdb.ReverseBytewiseComparator";

/// Counters of one core's connections since the start or `CONFIG RESETSTAT`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KvStats {
    pub connections: u64,
    pub rejected: u64,
    pub commands: u64,
    pub errors: u64,
    pub protocol_errors: u64,
    pub received_bytes: u64,
    pub sent_bytes: u64,
    pub receives: u64,
    pub sends: u64,
    pub hits: u64,
    pub misses: u64,
    /// Reads answered from memory immediately, and reads that had to wait.
    pub reads_cached: u64,
    pub reads_waited: u64,
    /// Times a connection's commands waited for its client to read.
    pub slow_readers: u64,
    /// Connections closed because their clients read too little of their replies while others
    /// waited for memory.
    pub slow_closed: u64,
    /// Transactions executed, and those not executed because a watched key was written.
    pub transactions: u64,
    pub transaction_conflicts: u64,
    /// TLS connections whose handshake succeeded.
    pub tls_connections: u64,
    /// Handshakes that failed, and TLS connections closed because of a fault.
    pub tls_failures: u64,
}

/// One core's part of the key-value door.
pub(crate) struct CoreState {
    pub core: Core,
    pub reader: LiveReader,
    pub node: Arc<NodeState>,
    pub posters: Posters,
    pub clients: Clients,
    pub scans: RefCell<ScanTable>,
    pub stats: RefCell<KvStats>,
    pub commands: AllCommandStats,
    pub slow_log: SlowLog,
    /// A computation with a large table runs; one does at a time.
    computing: Cell<bool>,
    computed: Event,
    /// Every core of the node can be asked.
    pub opened: Event,
    pub questions: Questions,
    pub writes: Writes,
    pub tracking: Tracking,
    /// The password that clients must give, if any.
    pub password: RefCell<Option<Password>>,
    /// The node is stopping: no new commands are taken.
    pub stopping: Cell<bool>,
    pub started_ns: u64,
    /// The column family whose keys the protocol shows.
    pub family: CfId,
    /// The keys' order is the reverse of byte order.
    pub descending: bool,
    pub large: Rc<LargeRequests>,
    /// Bytes of replies that are made and not sent, or admitted and not yet made.
    pub unsent_bytes: Gauge,
    pub room: ReplyRoom,
    pub pinned_bytes: Gauge,
    /// Reads in progress, in tasks of their own.
    pub reads: Gauge,
    /// Bytes of values that were read before their turn and wait for it.
    pub found_bytes: Gauge,
    pub idle_buffer_bytes: Gauge,
    /// Queued commands of transactions.
    pub queued_bytes: Gauge,
    /// What TLS connections share.
    pub secured: Secured,
}

/// The turn of a computation, see [`CoreState::take_turn`].
pub(crate) struct ComputingTurn(Rc<CoreState>);

impl Drop for ComputingTurn {
    fn drop(&mut self) {
        self.0.computing.set(false);
        self.0.computed.notify_all();
    }
}

impl CoreState {
    /// `shard` is present on the core that owns it.
    pub fn new(
        core: &Core,
        reader: Reader,
        node: Arc<NodeState>,
        shard: Option<Shard>,
    ) -> Rc<Self> {
        let family = node.settings().family;
        let families = reader.db().column_families();
        let descending =
            families.iter().any(|known| known.id == family && known.comparator == DESCENDING);
        Rc::new(Self {
            core: core.clone(),
            reader: LiveReader::new(reader, node.expiry.clone()),
            family,
            descending,
            clients: Clients::new(core.id(), core.cores()),
            scans: RefCell::new(ScanTable::new(core.id())),
            stats: RefCell::default(),
            commands: AllCommandStats::default(),
            slow_log: SlowLog::default(),
            computing: Cell::new(false),
            computed: Event::new(),
            opened: Event::new(),
            questions: Questions::default(),
            writes: Writes::new(shard),
            tracking: Tracking::new(core.random_u64(), node.settings().tracking_keys_max),
            password: RefCell::new(node.settings().password.clone()),
            stopping: Cell::new(false),
            started_ns: core.now_ns(),
            large: Rc::default(),
            unsent_bytes: Gauge::default(),
            room: ReplyRoom::default(),
            pinned_bytes: Gauge::default(),
            reads: Gauge::default(),
            found_bytes: Gauge::default(),
            idle_buffer_bytes: Gauge::default(),
            queued_bytes: Gauge::default(),
            secured: Secured::default(),
            posters: Posters::new(&node),
            node,
        })
    }

    /// The number of keys where they are counted: only those of the default family may be.
    pub fn counted_keys(&self) -> Option<u64> {
        self.reader.db().keys().filter(|_| self.family == FAMILY)
    }

    /// The number of keys: exact where they are counted, otherwise an estimate.
    pub fn keys(&self) -> lsm::Result<u64> {
        match self.counted_keys() {
            Some(keys) => Ok(keys),
            None => self.reader.approximate_keys(self.family),
        }
    }

    /// Updates the counters.
    #[inline]
    pub fn count(&self, change: impl FnOnce(&mut KvStats)) {
        change(&mut self.stats.borrow_mut());
    }

    /// Waits for the turn of a computation that takes much memory. It lasts until the result is
    /// dropped.
    pub async fn take_turn(self: &Rc<Self>) -> ComputingTurn {
        self.computed.wait_until(|| !self.computing.get()).await;
        self.computing.set(true);
        ComputingTurn(self.clone())
    }

    /// Adds a command that has ended to the slow log, if it took long.
    pub fn note_slow(&self, noted: Noted) {
        let time_us = self.core.now_exact_ns().saturating_sub(noted.from_ns) / 1000;
        if self.slow_log.is_slow(time_us) {
            let number = self.node.number_slow_command();
            let unix_time_s = self.core.unix_time_ms() / 1000;
            self.slow_log.add(SlowCommand { number, unix_time_s, time_us, noted });
        }
    }

    /// Counts whether a command found its key.
    pub fn count_hit(&self, found: bool) {
        self.count(|stats| match found {
            true => stats.hits += 1,
            false => stats.misses += 1,
        });
    }

    /// Unsent bytes that a connection may have when all connections together have `total`.
    pub fn unsent_bytes_max(&self, total: usize) -> usize {
        let settings = self.node.settings();
        if total > settings.unsent_total_bytes_max {
            settings.unsent_bytes_max.min(Settings::REPLY_BYTES_SMALL)
        } else {
            settings.unsent_bytes_max
        }
    }
}
