//! The state that the cores of a node share: settings that never change, the mailboxes of the cores
//! and of the shard, the end of a pause, the number of connections. Everything else belongs to one
//! core.

use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::task::Waker;

use lsm::OpenOptions;
use reactor::Core;
use reactor::mailbox::Mailbox;

use crate::core::state::CoreState;
use crate::expiry::Expiry;
use crate::node_info::NodeInfo;
use crate::settings::Settings;
use crate::shard::parcel::Delivery;

/// A function to run on another core.
pub(super) type Errand = Box<dyn FnOnce(&Rc<CoreState>) + Send>;

/// The mailbox for errands of one core.
pub(super) struct CoreMailbox {
    pub mailbox: Mailbox<Errand>,
    /// Wakes the task that runs the errands.
    pub waker: Waker,
}

/// The mailbox of the shard.
pub(super) struct ShardMailbox {
    core: usize,
    pub mailbox: Mailbox<Delivery>,
    pub waker: Waker,
}

/// The part of the key-value door that is the same on every core.
pub struct NodeState {
    settings: Settings,
    info: Box<dyn NodeInfo>,
    pub(super) mailboxes: Vec<OnceLock<CoreMailbox>>,
    /// How many of them are open, or were.
    opened: AtomicUsize,
    /// Empty on a read-only node.
    pub(super) shard: OnceLock<ShardMailbox>,
    /// The time until which commands are held back, in the cores' monotonic time. Hardly ever
    /// written.
    paused_until_ns: AtomicU64,
    /// The same for commands that write.
    writes_paused_until_ns: AtomicU64,
    /// The deadlines, once they are known.
    pub(crate) expiry: Arc<OnceLock<Arc<Expiry>>>,
    /// Number of connections of all cores.
    clients: AtomicUsize,
    /// Which cores have tracked connections. Hardly ever written.
    tracked: Vec<AtomicBool>,
    /// Number of entries that the slow logs have had. Hardly ever written.
    slow_commands: AtomicU64,
}

/// Counts one connection until dropped.
pub(crate) struct CountedClient(Arc<NodeState>);

impl Drop for CountedClient {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::Relaxed);
    }
}

impl NodeState {
    /// For a node of `cores` cores.
    pub fn new(cores: usize, settings: Settings, info: impl NodeInfo + 'static) -> Arc<Self> {
        Arc::new(Self {
            settings,
            info: Box::new(info),
            mailboxes: (0..cores).map(|_| OnceLock::new()).collect(),
            opened: AtomicUsize::new(0),
            shard: OnceLock::new(),
            paused_until_ns: AtomicU64::new(0),
            writes_paused_until_ns: AtomicU64::new(0),
            expiry: Arc::default(),
            clients: AtomicUsize::new(0),
            tracked: (0..cores).map(|_| AtomicBool::new(false)).collect(),
            slow_commands: AtomicU64::new(0),
        })
    }

    /// Takes the deadlines of a database into use that is only read. Suspends for the disk.
    ///
    /// # Errors
    /// Those of [`Db::open`](lsm::Db::open).
    pub async fn open_deadlines(
        &self,
        core: &Core,
        data: &Path,
        options: OpenOptions,
    ) -> lsm::Result<()> {
        let expiry = Expiry::default();
        expiry.open(core, data, options).await?;
        let _ = self.expiry.set(Arc::new(expiry));
        Ok(())
    }

    /// The limits in force.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn info(&self) -> &dyn NodeInfo {
        &*self.info
    }

    pub(crate) fn cores(&self) -> usize {
        self.mailboxes.len()
    }

    /// Opens the mailbox of a core, once; returns whether it is the last one of the node.
    pub(super) fn open_mailbox(&self, core: usize, mailbox: CoreMailbox) -> bool {
        self.mailboxes[core].set(mailbox).is_ok()
            && self.opened.fetch_add(1, Ordering::AcqRel) + 1 == self.cores()
    }

    /// Whether every core can be asked, or could.
    pub(super) fn is_open(&self) -> bool {
        self.opened.load(Ordering::Acquire) == self.cores()
    }

    /// Counts one more connection, unless the maximum is reached.
    pub(crate) fn count_client(self: &Arc<Self>) -> Option<CountedClient> {
        if self.clients.fetch_add(1, Ordering::Relaxed) >= self.settings.clients_max {
            self.clients.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(CountedClient(self.clone()))
    }

    /// Notes whether a core has tracked connections. A read that begins afterwards either sees a
    /// write, or the shard sees the note when the write has become visible: both sides have a fence
    /// between.
    pub(crate) fn track(&self, core: usize, tracked: bool) {
        self.tracked[core].store(tracked, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Whether a core has tracked connections, asked after a write has become visible.
    pub(crate) fn is_tracked(&self) -> bool {
        fence(Ordering::SeqCst);
        (0..self.tracked.len()).any(|core| self.tracks(core))
    }

    /// Whether this core has; after [`NodeState::is_tracked`].
    pub(crate) fn tracks(&self, core: usize) -> bool {
        self.tracked[core].load(Ordering::Relaxed)
    }

    /// The number of the next entry of a slow log.
    pub(crate) fn number_slow_command(&self) -> u64 {
        self.slow_commands.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn paused_until_ns(&self) -> u64 {
        self.paused_until_ns.load(Ordering::Relaxed)
    }

    pub(crate) fn writes_paused_until_ns(&self) -> u64 {
        self.writes_paused_until_ns.load(Ordering::Relaxed)
    }

    /// Holds back all commands, or only those that write. A longer pause goes on.
    pub(crate) fn pause_until_ns(&self, until_ns: u64, all: bool) {
        if all {
            self.paused_until_ns.fetch_max(until_ns, Ordering::Relaxed);
        }
        self.writes_paused_until_ns.fetch_max(until_ns, Ordering::Relaxed);
    }

    /// Ends all pauses.
    pub(crate) fn end_pauses(&self) {
        self.paused_until_ns.store(0, Ordering::Relaxed);
        self.writes_paused_until_ns.store(0, Ordering::Relaxed);
    }

    /// Whether clients may write.
    pub fn is_writable(&self) -> bool {
        self.shard.get().is_some()
    }

    /// The core that owns the shard.
    pub(crate) fn shard_core(&self) -> Option<usize> {
        self.shard.get().map(|shard| shard.core)
    }

    /// Opens the shard: from now on deliveries go into this mailbox, whose owner's task has this
    /// waker.
    pub(crate) fn open_shard(&self, core: usize, mailbox: &Mailbox<Delivery>, waker: &Waker) {
        self.shard.get_or_init(|| ShardMailbox {
            core,
            mailbox: mailbox.clone(),
            waker: waker.clone(),
        });
    }
}
