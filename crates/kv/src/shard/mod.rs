//! The shard: the writing side of a database. One core owns it and orders the changes of all cores.
//!
//! 1. A [`parcel`] of changes arrives, from a connection of this core or through the [`mailbox`].
//!    What a change has to know about its keys ([`knowledge`]) is looked up in the [`overlay`]
//!    (writes that readers do not see yet), in the memory of recently changed keys ([`known`]), and
//!    in what the engine has in memory.
//! 2. If everything is known, the change is made immediately ([`make`], [`modify`]): its batch goes
//!    to the engine in order, small ones of a turn together ([`flight`]), and the overlay notes
//!    what it leaves. So a thousand consecutive increments of one key are written as one group.
//! 3. If something is unknown, or other changes wait for one of the keys or for the same
//!    connection, the change becomes a [`job`]: it joins the queues of all its keys, reads when it
//!    is first at each of them, and is made when it is the first of its connection ([`turns`]). So
//!    a connection's changes read at the same time and are made one after the other. `FLUSHDB` and
//!    `MR.DELRANGE` ([`delete_range`]) hold later changes back until they are made. A transaction
//!    ([`execute`]) is one change of all its keys; one that concerns keys which it does not name
//!    ([`alone`]) holds later changes back, too. [`watches`] knows which connections watch a key.
//!    `BITOP` and a long `RESTORE` are computed in steps ([`long`]).
//! 4. When the engine reports that a batch is durable and visible, its answers are ready. An answer
//!    that needed no write waits for all writes before it, because it may depend on them. When all
//!    commands of a parcel have theirs ([`answers`]), the answers are sent back. Where connections
//!    are tracked, the answers wait until these are told what was written ([`announce`]).
//!
//! Invariants: changes of one key, and changes of one connection, are made in the order in which
//! they arrived; what an answer reports is durable; where the engine counts keys, each batch says
//! by how much it changes their number; after writing has ended every change is refused; a change
//! that is refused for now takes all changes that build on it with it; each command has
//! one answer; where a key of a change cannot be read, only the commands that name it are refused.
//! Everything here belongs to the owner's core.
//!
//! Not here: bounds on waiting changes. The cores that send them limit them (`client::write_room`).
//! The shard only makes sure that changes which build long values from short operands do not do so
//! all at once.
//!
//! Uses `client` and `command`; `mailbox` also uses `core`, in the circle that `core` names.

pub(crate) mod alone;
pub(crate) mod announce;
mod answers;
pub(crate) mod change;
pub(crate) mod delete_range;
pub(crate) mod execute;
mod flight;
mod job;
mod knowledge;
mod known;
mod long;
mod mailbox;
mod make;
mod modify;
mod overlay;
pub(crate) mod parcel;
mod reclaim;
pub(crate) mod turns;
mod watches;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::future::{Future, poll_fn};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::Waker;

use lsm::{
    CfId, Compacted, CompactionLimits, CompactionStatus, CompactionWatch, IngestFiles, Ingested,
    LiveFiles, Reader, Writer,
};
use reactor::{Class, Core, Event, JoinHandle, timeout};
use twox_hash::XxHash3_128;

use crate::core::ask::Posters;
use crate::expiry::ledger::Ledger;
use crate::expiry::live::LiveReader;
use crate::settings::{FAMILY, Settings};
use crate::shard::announce::{Announcements, Written};
use crate::shard::answers::{AnswerTarget, Origin};
use crate::shard::change::{Answer, Change, VALUE_BYTES_MAX};
use crate::shard::delete_range::Barrier;
use crate::shard::flight::{Flight, Gathered, land_all};
use crate::shard::job::Job;
use crate::shard::known::{Fingerprint, KnownKeys};
use crate::shard::overlay::{Overlay, Ticket};
use crate::shard::parcel::{AnswerSlot, Answered};
use crate::shard::reclaim::reclaim_all;
use crate::shard::turns::{Connection, Turns};
use crate::shard::watches::Watches;

/// Longest value that the overlay keeps for the next change of its key.
const KEPT_BYTES_MAX: usize = 1024;
/// Bytes of values that were built here and are not written yet, beyond which the next one waits.
const BUILT_BYTES_MAX: usize = 64 << 20;
/// How long changes are still made after closing has begun, and the answer to later ones.
const CLOSE_NS: u64 = 5_000_000_000;
const CLOSED: &str = "ERR the node is shutting down";
/// Default memory for remembering which keys exist.
const KNOWN_BYTES: usize = 1 << 20;
/// The connection number of direct callers of the shard.
const CALLER: Connection = 0;

/// The writing side of a database, on the core that owns it. Clones share it.
///
/// A node attaches it to its [`NodeState`](crate::NodeState); without a node, [`Shard::change`]
/// makes single changes with the same rules and the same exact count:
///
/// ```text
/// let (db, writer) = Db::open_for_writing(&core, path, options, write_options).await?;
/// let shard = Shard::new(&core, db.attach(&core), writer);
/// let answer = shard.change(Change::put(b"key", b"value")).await;
/// shard.close().await?;
/// ```
#[derive(Clone)]
pub struct Shard(Rc<ShardState>);

/// The shard's state; the files of this room implement its parts.
struct ShardState {
    core: Core,
    reader: Reader,
    writer: Writer,
    /// Its deadlines, and the reader that sees them.
    ledger: Ledger,
    live: LiveReader,
    /// The column family that it changes.
    family: CfId,
    overlay: RefCell<Overlay<Job>>,
    known: RefCell<KnownKeys>,
    watches: RefCell<Watches>,
    announcements: RefCell<Announcements>,
    /// Seed of the keys' hashes, so that clients cannot choose keys that collide.
    seed: u64,
    /// Small changes made in this turn, which go to the engine as one batch at its end.
    gathered: RefCell<Gathered>,
    /// Batches handed to the engine, and answers that wait for them, in order.
    flights: RefCell<VecDeque<Flight>>,
    /// The last ticket issued, and the last whose write has landed.
    ticket: Cell<Ticket>,
    landed: Cell<Ticket>,
    /// Notified when something has landed, been made, or ended the writing.
    changed: Event,
    /// Wakes the task that waits for the first flight.
    lander: RefCell<Option<Waker>>,
    /// Number of changes that wait in queues of keys and of connections.
    jobs: Cell<usize>,
    turns: RefCell<Turns<Job>>,
    /// Number of tasks that read for them and make them, and the changes that are first at all
    /// their keys and have no task yet.
    making: Cell<usize>,
    due: RefCell<VecDeque<Rc<Job>>>,
    /// Bytes of values that were built here and are not written yet, or are about to be built;
    /// beyond the maximum the next one waits.
    built_bytes: Cell<usize>,
    built_bytes_max: Cell<usize>,
    /// Longest value that is built.
    value_bytes_max: Cell<usize>,
    ahead_bytes: Cell<usize>,
    /// A change that takes long is being computed.
    computing: Cell<bool>,
    /// Answers for other cores, by core, and the way there.
    outbox: RefCell<Vec<Answered>>,
    posters: OnceCell<Posters>,
    /// A change of many keys is being made: later changes that it concerns wait in `held`.
    barrier: RefCell<Barrier>,
    held: RefCell<VecDeque<(Change, AnswerTarget)>>,
    /// The connections of these, and of that change.
    held_connections: RefCell<BTreeSet<Connection>>,
    failed: RefCell<Option<Box<str>>>,
    /// Number of failed writes after which the overlay's knowledge was wrong.
    refusals: Cell<u64>,
    stats: Cell<ShardStats>,
    /// Writes landed since the last sync, and its time.
    unsaved: Cell<u64>,
    saved_ms: Cell<u64>,
    /// Whether the last sync, and the last write, failed.
    save_failed: Cell<bool>,
    write_failed: Cell<bool>,
    tasks: RefCell<Vec<JoinHandle<()>>>,
}

/// Counters of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardStats {
    /// Changes made or refused.
    pub changes: u64,
    /// The part of them that wrote something.
    pub written: u64,
    /// Changes that had to wait for a read or for another change.
    pub waited: u64,
    /// Changes that wrote something since everything was last made to survive a power cut.
    pub unsaved: u64,
    /// Whether the last `SAVE` failed.
    pub save_failed: bool,
    /// Whether the last write was refused by the engine.
    pub write_failed: bool,
    /// Keys that connections watch, each counted once for every connection.
    pub watched_keys: u64,
    /// Connections that watch keys.
    pub watching_clients: u64,
}

impl Shard {
    /// Takes over the writer of a database, on the core that opened it.
    pub fn new(core: &Core, reader: Reader, writer: Writer) -> Self {
        Self::of_family(core, reader, writer, FAMILY)
    }

    /// The same for the keys of a column family.
    pub fn of_family(core: &Core, reader: Reader, writer: Writer, family: CfId) -> Self {
        Self::with_memory(core, reader, writer, family, KNOWN_BYTES)
    }

    /// The same for the keys of a column family, with `known_bytes` of memory for remembering which
    /// of them exist. A change whose key is remembered reads nothing.
    pub fn with_memory(
        core: &Core,
        reader: Reader,
        writer: Writer,
        family: CfId,
        known_bytes: usize,
    ) -> Self {
        let is_empty = family == FAMILY && reader.db().keys() == Some(0);
        let ledger = Ledger::new(core, family, reader.clone(), writer.clone());
        let shared = Arc::new(OnceLock::from(ledger.shared().clone()));
        let live = LiveReader::new(reader.clone(), shared);
        let shard = Rc::new(ShardState {
            core: core.clone(),
            reader,
            writer,
            ledger,
            live,
            family,
            overlay: RefCell::default(),
            known: RefCell::new(KnownKeys::new(known_bytes, is_empty)),
            watches: RefCell::new(Watches::new(Settings::default().watches_bytes_max)),
            announcements: RefCell::default(),
            seed: core.random_u64(),
            gathered: RefCell::default(),
            flights: RefCell::default(),
            ticket: Cell::new(0),
            landed: Cell::new(0),
            changed: Event::new(),
            lander: RefCell::default(),
            jobs: Cell::new(0),
            turns: RefCell::default(),
            making: Cell::new(0),
            due: RefCell::default(),
            built_bytes: Cell::new(0),
            built_bytes_max: Cell::new(BUILT_BYTES_MAX),
            value_bytes_max: Cell::new(VALUE_BYTES_MAX),
            ahead_bytes: Cell::new(0),
            computing: Cell::new(false),
            outbox: RefCell::new((0..core.cores()).map(|_| Vec::new()).collect()),
            posters: OnceCell::new(),
            barrier: RefCell::default(),
            held: RefCell::default(),
            held_connections: RefCell::default(),
            failed: RefCell::default(),
            refusals: Cell::new(0),
            stats: Cell::default(),
            unsaved: Cell::new(0),
            save_failed: Cell::new(false),
            write_failed: Cell::new(false),
            saved_ms: Cell::new(core.unix_time_ms()),
            tasks: RefCell::default(),
        });
        let lander = core.spawn(Class::Foreground, land_all(shard.clone()));
        shard.tasks.borrow_mut().push(lander);
        let reclaimer = core.spawn(Class::Background, reclaim_all(shard.clone()));
        shard.tasks.borrow_mut().push(reclaimer);
        Self(shard)
    }

    /// Takes the deadlines of the database into use; before the first change. Suspends for the
    /// disk.
    ///
    /// # Errors
    /// Those of [`Db::open_for_writing`](lsm::Db::open_for_writing).
    pub async fn open_deadlines(&self) -> lsm::Result<()> {
        self.0.ledger.open().await
    }

    /// Makes a change: suspends until it is as durable as the database was opened for, and visible.
    /// The change is made even if the future is dropped; changes are made in the order of the
    /// calls.
    pub fn change(&self, change: Change) -> impl Future<Output = Answer> + use<> {
        let slot = Rc::new(AnswerSlot::default());
        self.accept(CALLER, vec![change], &slot);
        async move {
            let answers = poll_fn(|cx| slot.poll(cx)).await;
            answers.into_iter().next().map_or(Answer::Null, |run| run.answer)
        }
    }

    /// Takes the changes of a connection of this core.
    pub(crate) fn accept(
        &self,
        connection: Connection,
        changes: Vec<Change>,
        slot: &Rc<AnswerSlot>,
    ) {
        self.0.accept(connection, changes, Origin::Here(slot.clone()));
        self.0.end_turn();
    }

    /// The directory of the database.
    pub fn path(&self) -> &Path {
        self.0.reader.db().path()
    }

    /// Lists the files that hold the database now, and keeps them, for a copy of it: see
    /// [`Writer::live_files`]. Suspends for the disk.
    ///
    /// # Errors
    /// As [`Writer::live_files`].
    pub async fn live_files(&self, log_bytes_max: u64) -> lsm::Result<LiveFiles> {
        self.0.writer.live_files(log_bytes_max).await
    }

    /// Numbers for files that are to be ingested: see [`Writer::reserve_files`].
    pub fn reserve_files(&self, count: usize) -> Vec<u64> {
        self.0.writer.reserve_files(count)
    }

    /// Removes such files: see [`Writer::discard_files`]. Suspends for the disk.
    pub async fn discard_files(&self, numbers: &[u64]) {
        self.0.writer.discard_files(numbers).await;
    }

    /// Ingests files that are in the database's directory: see [`Writer::ingest`]. Changes made
    /// meanwhile wait for the last step. Suspends for the disk. The ingestion is finished even if
    /// the future is dropped.
    ///
    /// # Errors
    /// As [`Writer::ingest`].
    pub async fn ingest(&self, files: Vec<IngestFiles>, verify: bool) -> lsm::Result<Ingested> {
        let shard = self.0.clone();
        let ingest = async move {
            let ingestion = shard.writer.prepare_ingestion(&files, verify).await?;
            // A change that is made before and written after would count its keys wrongly.
            let is_free = || matches!(*shard.barrier.borrow(), Barrier::None);
            shard.changed.wait_until(is_free).await;
            shard.barrier.replace(Barrier::All);
            let passing = shard.writer.let_pass();
            shard.changed.wait_until(|| shard.is_idle()).await;
            drop(passing);
            let done = shard.writer.finish_ingestion(ingestion).await;
            shard.known.borrow_mut().forget();
            shard.watches.borrow_mut().touch_all();
            shard.announce([Written::All(CALLER)]);
            shard.set_barrier(Barrier::None, None);
            done
        };
        self.0.core.spawn(Class::Foreground, ingest).await
    }

    /// Loads sorted entries into a range without keys: see [`Writer::bulk_load`]. No change may be
    /// made meanwhile. Suspends for the disk.
    ///
    /// # Errors
    /// As [`Writer::bulk_load`].
    pub async fn bulk_load(
        &self,
        next: impl AsyncFnMut(&mut Vec<u8>, &mut Vec<u8>) -> lsm::Result<bool>,
    ) -> lsm::Result<u64> {
        let loaded = self.0.writer.bulk_load(self.0.family, next).await;
        self.0.known.borrow_mut().forget();
        self.0.announce([Written::All(CALLER)]);
        self.0.end_turn();
        loaded
    }

    /// Whether the database has nothing from a key on: see [`Writer::has_nothing_from`].
    ///
    /// # Errors
    /// As [`Writer::has_nothing_from`].
    pub fn has_nothing_from(&self, key: &[u8]) -> lsm::Result<bool> {
        self.0.writer.has_nothing_from(self.0.family, key)
    }

    /// The column families of the database.
    pub fn column_families(&self) -> Vec<lsm::ColumnFamilyInfo> {
        self.0.reader.db().column_families()
    }

    /// The column family with a name, if a range of its keys can be compacted.
    ///
    /// # Errors
    /// As [`Db::may_compact`](lsm::Db::may_compact).
    pub fn may_compact(
        &self,
        name: &str,
        (from, to): (Option<&[u8]>, Option<&[u8]>),
    ) -> lsm::Result<CfId> {
        self.0.reader.db().may_compact(name, from, to)
    }

    /// Compacts a range of keys: see [`Writer::compact_watched`].
    ///
    /// # Errors
    /// As [`Writer::compact`].
    pub async fn compact(
        &self,
        family: CfId,
        (from, to): (Option<&[u8]>, Option<&[u8]>),
        watch: &CompactionWatch,
    ) -> lsm::Result<Compacted> {
        self.0.writer.compact_watched(family, from, to, watch).await
    }

    /// Cancels it: see [`Writer::cancel_compaction`].
    pub fn cancel_compaction(&self, watch: &CompactionWatch) {
        self.0.writer.cancel_compaction(watch);
    }

    /// Stops merges, or lets them go on: see [`Writer::pause_compaction`].
    pub fn pause_compaction(&self, paused: bool) {
        match paused {
            true => self.0.writer.pause_compaction(),
            false => self.0.writer.resume_compaction(),
        }
    }

    /// Whether merges are paused.
    pub fn compaction_is_paused(&self) -> bool {
        self.0.writer.compaction_is_paused()
    }

    /// The limits of merges.
    pub fn compaction_limits(&self) -> CompactionLimits {
        self.0.writer.compaction_limits()
    }

    /// Limits merges: see [`Writer::limit_compaction`].
    pub fn limit_compaction(&self, limits: CompactionLimits) {
        self.0.writer.limit_compaction(limits);
    }

    /// The state of merges and levels: see [`Writer::compaction_status`].
    pub fn compaction_status(&self) -> CompactionStatus {
        self.0.writer.compaction_status()
    }

    /// The error that ended all writing, if any.
    pub fn failure(&self) -> Option<lsm::Error> {
        self.0.writer.failure()
    }

    /// Counters since the start.
    pub fn stats(&self) -> ShardStats {
        ShardStats {
            unsaved: self.0.unsaved.get(),
            save_failed: self.0.save_failed.get(),
            write_failed: self.0.write_failed.get(),
            watched_keys: self.0.watches.borrow().keys() as u64,
            watching_clients: self.0.watches.borrow().connections() as u64,
            ..self.0.stats.get()
        }
    }

    /// The time of the last `SAVE`, or of the start, in milliseconds since 1970.
    pub fn saved_unix_ms(&self) -> u64 {
        self.0.saved_ms.get()
    }

    /// The last error of the device that the engine's writer has met.
    pub fn last_error(&self) -> Option<lsm::Error> {
        self.0.writer.last_error()
    }

    /// Counters of the engine's writer.
    pub fn writer_stats(&self) -> lsm::WriterStats {
        self.0.writer.stats()
    }

    /// Prepares for the end, when no new changes are accepted: see [`Writer::leave`].
    pub fn leave(&self) {
        self.0.writer.leave();
    }

    /// Closes the shard. Changes handed over before are still made and written, for some seconds;
    /// the rest is refused. Suspends for that.
    ///
    /// # Errors
    /// The error that ended all writing earlier, if any.
    pub async fn close(&self) -> lsm::Result<()> {
        self.end().await;
        let closed = self.0.writer.close().await;
        self.0.ledger.close().await.and(closed)
    }

    /// As [`Shard::close`], for a successor that opens the database at once:
    /// [`Writer::hand_over`].
    ///
    /// # Errors
    /// Those of [`Shard::close`].
    pub async fn hand_over(&self) -> lsm::Result<()> {
        self.end().await;
        let closed = self.0.writer.hand_over().await;
        self.0.ledger.hand_over().await.and(closed)
    }

    async fn end(&self) {
        let shard = &self.0;
        shard.stop_announcing();
        shard.writer.leave();
        let is_free = || matches!(*shard.barrier.borrow(), Barrier::None);
        let is_done = || shard.is_idle() && is_free();
        let done = timeout(&shard.core, CLOSE_NS, shard.changed.wait_until(is_done)).await;
        if done.is_err() {
            shard.failed.borrow_mut().get_or_insert_with(|| CLOSED.into());
            shard.changed.notify_all();
            shard.changed.wait_until(is_done).await;
        }
        for task in shard.tasks.take() {
            task.cancel();
        }
    }
}

impl ShardState {
    /// Whether nothing waits and nothing is in flight.
    fn is_idle(&self) -> bool {
        self.jobs.get() == 0
            && self.flights.borrow().is_empty()
            && self.gathered.borrow().batch.is_empty()
    }

    #[inline]
    fn print(&self, key: &[u8]) -> Fingerprint {
        Fingerprint(XxHash3_128::oneshot_with_seed(self.seed, key))
    }

    /// Whether the keys are counted: those of the default family may be.
    fn is_counted(&self) -> bool {
        self.family == FAMILY && self.reader.db().keys().is_some()
    }

    /// What the engine is told of a batch that adds `keys` to the column family.
    fn counted(&self, keys: i64) -> Option<i64> {
        let of_default = if self.family == FAMILY { keys } else { 0 };
        self.reader.db().keys().is_some().then_some(of_default)
    }

    fn count(&self, change: impl FnOnce(&mut ShardStats)) {
        let mut stats = self.stats.get();
        change(&mut stats);
        self.stats.set(stats);
    }
}
