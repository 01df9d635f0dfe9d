//! A disk and its socket: accepts one connection after the other, performs what the front end's
//! messages request, and distributes the rings over the cores.
//!
//! 1. [`Target::serve`] does not accept a connection before the disk is ready: QEMU 7.2 never
//!    reconnects after a connection that was accepted and closed. It accepts the next connection
//!    when this one has ended.
//! 2. [`Session`] turns messages into actions; descriptors are mapped here. Rings are assigned to
//!    cores round robin, each with its own channel to the device (see `queue.rs`).
//! 3. When the connection ends, for any reason, all rings stop: they pop nothing more, and their
//!    requests at the device finish in memory that stays mapped until then. After that only the
//!    in-flight region, which the front end keeps, records unfinished requests.
//!
//! # The write cache
//!
//! A guest that switched the write cache off takes every completed write for durable. It is not
//! asked again: after a crash of this process QEMU continues without telling us. So what a front
//! end was told is stored ([`Target::remember`]) before a SET_CONFIG is acknowledged, and before a
//! new front end receives its in-flight region. If nothing is stored and a front end brings a
//! region of an earlier process, the cache is off: slower, but always safe.
//!
//! All of this runs on one core and outside the path of requests.
//!
//! # Handing a disk over
//!
//! ```text
//!   here                  Target::rest                       the rings have stopped
//!     serve --> [serving] -------------> [coming to rest] -----------------.
//!                   ^                                                      v
//!                   |                 Target::go_on                  [at rest] --> stop: the end;
//!                   '--------------------------------------------------'   ^       nothing of what
//!   in another process, or here                                            |       was exported is
//!     take_over --> [taking] ----------------------------------------------'       closed for others
//!                             memory mapped, descriptors checked
//! ```
//!
//! A *quiesced* disk has nothing in flight: no request and no reply; nothing is popped or read, and
//! everything that another process needs has been exported. Two processes may hold the quiesced
//! disk at the same time. They agree between them which one continues. A disk continues in the same
//! way whether it was quiesced here or elsewhere: rings start where they stopped, check for
//! requests immediately, and signal once.
//!
//! A device may take minutes to finish its requests. [`Target::force`] quiesces the disk without
//! waiting: rings abandon what they have at the device, and only the in-flight region records it,
//! as after a crash. But this process is still alive, and its operations write to guest memory and
//! to the disk until [`Target::settled`]. The process that continues with the disk serves new
//! requests immediately. It neither executes nor completes the requests in the region before
//! [`Target::release`], so a late read never writes to memory that the guest has reused, and a late
//! write never overwrites a newer one.

#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod alone;
pub(crate) mod queue;
pub(crate) mod seldom;
pub(crate) mod share;
pub(crate) mod stats;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use bdev::{Bdev, Geometry};
use reactor::{Class, Core, EventFd, UnixListener, UnixSocket};

use crate::memory::account;
use crate::memory::dirty::DirtyLog;
use crate::memory::elsewhere::{self, drop_elsewhere};
use crate::memory::{GuestMemory, MemoryError, RegionInfo};
use crate::protocol::config::{Config, RangeLimits, SECTOR_BYTES, feature};
use crate::protocol::handover::{ConnectionState, DiskState, RingProgress, Role, UnderWay};
use crate::protocol::message::{Framer, InflightInfo};
use crate::protocol::session::{
    Action, Kick, MEMORY_REGIONS_MAX, Offer, Reply, RingState, Session,
};
use crate::protocol::unsent::Unsent;
use crate::ring::Setup;
use crate::ring::inflight::{Form, InflightRegion};
use crate::ring::request::{DATA_MAX, Disk, SERIAL_LEN};
use crate::target::queue::{Command, Ended, Hold, Obedience, Remote, Start};
use crate::target::seldom::{Line, Lines, Seldom};
use crate::target::share::Company;
use crate::target::stats::QueueStats;

/// Interval of checks whether the front ends' old resources are released, in nanoseconds.
const FULL_NS: u64 = 1_000_000;
/// Interval of checks whether the device has finished with old memory, and their number: one minute
/// in all.
const OLD_MEMORY_NS: u64 = 5_000_000;
const OLD_MEMORY_LOOKS: u32 = 12_000;
/// Pause after a failed accept, in nanoseconds.
const RETRY_NS: u64 = 100_000_000;
/// Longest segment of a request in bytes. The maximum number of segments stays within [`DATA_MAX`].
const SEGMENT_BYTES_MAX: u32 = 4 << 20;
/// Most ranges in one discard or write-zeroes request.
const RANGES_MAX: u32 = 1;

/// The options of a disk.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// The disk's name in the log.
    pub name: String,
    /// The serial number that the guest reads; its first 20 bytes.
    pub serial: String,
    /// Number of rings.
    pub queues: u16,
    /// The core of the first ring; the others follow round robin.
    pub first_core: usize,
}

/// A disk that is served to virtual machines.
pub struct Target {
    core: Core,
    device: Bdev,
    company: Company,
    options: TargetOptions,
    name: Arc<str>,
    stats: Vec<Arc<QueueStats>>,
    lines: Arc<Lines>,
    order: Cell<Order>,
    connected: Cell<bool>,
    events: Rc<Events>,
    /// What front ends were told about the write cache, if known.
    write_cache: Cell<Option<bool>>,
    keeper: OnceCell<Keeper>,
    /// The guest's memory, for a successor.
    regions: RefCell<Vec<(RegionInfo, OwnedFd)>>,
    /// Memory that was mapped before the front end's connection came.
    early: RefCell<Arc<GuestMemory>>,
    /// The result that `rest` waits for.
    export: RefCell<Option<Result<Export, String>>>,
    resting: RefCell<Option<Waker>>,
    /// Quiesce again, without the front end's connection.
    alone: Cell<bool>,
    /// Do not wait for the device.
    forced: Cell<bool>,
    /// The operations of abandoned rings, and whether there is a flush among them.
    under_way: RefCell<Option<(Obedience, UnderWay)>>,
    /// Set until [`Target::release`], while operations of the old process may be in flight.
    hold: Cell<Option<Hold>>,
}

/// A quiesced disk: its state, and the descriptors that belong to it, in the order of
/// [`DiskState::roles`].
pub type Export = (DiskState, Vec<OwnedFd>);

/// What the target must do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Serve,
    Rest,
    Stop,
}

/// Durably stores what front ends were told about the write cache: see [`Target::remember`].
pub type Keeper = Box<dyn Fn(Option<bool>) -> Pin<Box<dyn Future<Output = Result<(), String>>>>>;

/// Wakes a connection for events other than those of its socket.
#[derive(Default)]
struct Events {
    ended: RefCell<VecDeque<Ended>>,
    /// The front end does not know the device's new size yet.
    resized: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Events {
    fn ring(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl Target {
    /// Creates a disk without a connection.
    pub fn new(core: &Core, device: Bdev, options: TargetOptions) -> Rc<Target> {
        Rc::new(Target {
            core: core.clone(),
            device,
            company: Company::join(&core.local()),
            name: options.name.as_str().into(),
            stats: (0..options.queues).map(|_| Arc::default()).collect(),
            lines: Arc::default(),
            options,
            order: Cell::new(Order::Serve),
            connected: Cell::new(false),
            events: Rc::default(),
            write_cache: Cell::new(None),
            keeper: OnceCell::new(),
            regions: RefCell::default(),
            early: RefCell::default(),
            export: RefCell::default(),
            resting: RefCell::default(),
            alone: Cell::new(false),
            forced: Cell::new(false),
            under_way: RefCell::default(),
            hold: Cell::new(None),
        })
    }

    /// Sets the function that durably stores what front ends are told about the write cache, and
    /// `known`, the value that it stored last. To be called once, before [`Target::serve`].
    pub fn remember(&self, known: Option<bool>, keeper: Keeper) {
        self.write_cache.set(known);
        let _ = self.keeper.set(keeper);
    }

    async fn told_write_cache(&self, told: Option<bool>) -> Result<(), Refused> {
        self.write_cache.set(told);
        match self.keeper.get() {
            Some(keeper) => self
                .unless_stopped(keeper(told))
                .await
                .unwrap_or_else(|| Err("the disk is being stopped".to_owned()))
                .map_err(|error| Refused::new("remembering the write cache", error)),
            None => Ok(()),
        }
    }

    /// Waits for `done`, but not after the target is told to stop.
    async fn unless_stopped<T>(&self, done: impl Future<Output = T>) -> Option<T> {
        let mut done = pin!(done);
        poll_fn(|cx| {
            if self.order.get() == Order::Stop {
                return Poll::Ready(None);
            }
            self.events.waker.replace(Some(cx.waker().clone()));
            done.as_mut().poll(cx).map(Some)
        })
        .await
    }

    /// What front ends were told about the write cache, if known.
    pub fn write_cache(&self) -> Option<bool> {
        self.write_cache.get()
    }

    /// The device.
    pub fn device(&self) -> &Bdev {
        &self.device
    }

    /// Changes the size of the disk, in bytes, and notifies the guest. Suspends.
    ///
    /// # Errors
    /// As for [`Bdev::resize`].
    pub async fn resize(&self, size_bytes: u64) -> Result<(), bdev::Error> {
        self.device.resize(&self.core, size_bytes).await?;
        self.events.resized.set(true);
        self.events.ring();
        Ok(())
    }

    /// The counters of the rings.
    pub fn stats(&self) -> &[Arc<QueueStats>] {
        &self.stats
    }

    /// Whether a front end is connected.
    pub fn is_connected(&self) -> bool {
        self.connected.get()
    }

    /// Tells [`Target::serve`] to return.
    pub fn stop(&self) {
        self.give_order(Order::Stop);
    }

    fn give_order(&self, order: Order) {
        self.order.set(order);
        self.events.ring();
    }

    /// Quiesces the disk, after its requests at the device have finished. A caller that drops the
    /// future, or no longer wants the disk quiesced, must call [`Target::go_on`].
    ///
    /// # Errors
    /// Why the disk cannot be handed over or taken over.
    pub async fn rest(&self) -> Result<Export, String> {
        self.forced.set(false);
        self.rested().await
    }

    /// Closes the front end's connection of a quiesced disk and exports the disk without it;
    /// [`Target::go_on`] does not restore it. Suspends until no operation is in flight.
    ///
    /// # Errors
    /// As for [`Target::rest`].
    pub async fn rest_alone(&self) -> Result<Export, String> {
        self.settled().await;
        self.alone.set(true);
        self.rested().await
    }

    async fn rested(&self) -> Result<Export, String> {
        self.give_order(Order::Rest);
        poll_fn(|cx| {
            self.resting.replace(Some(cx.waker().clone()));
            self.export.take().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Makes [`Target::rest`] stop waiting for the device, if the front end has set an in-flight
    /// region and waits for no reply. [`Target::go_on`] must not follow.
    pub fn force(&self) {
        self.forced.set(true);
        self.events.ring();
    }

    /// Tells [`Target::serve`] to return without waiting for the device. The in-flight region
    /// records the unfinished requests.
    pub fn give_up(&self) {
        self.forced.set(true);
        self.stop();
    }

    /// Suspends until no operation of a forcibly quiesced disk is in flight. Only one task may
    /// wait, and only after [`Target::rest`].
    pub async fn settled(&self) {
        poll_fn(|cx| match &*self.under_way.borrow() {
            Some((operations, _)) => operations.poll(cx),
            None => Poll::Ready(()),
        })
        .await;
    }

    /// Whether the target waits for [`Target::release`].
    pub fn holds(&self) -> bool {
        self.hold.get().is_some()
    }

    /// Reports that no operation of the old process is in flight any more, for a disk that was
    /// forcibly quiesced there. `flush_failed` tells whether a flush has failed there.
    pub fn release(&self, flush_failed: bool) {
        if flush_failed {
            self.device.set_flush_failed();
        }
        self.hold.set(None);
        self.events.ring();
    }

    /// Resumes a quiesced disk.
    pub fn go_on(&self) {
        self.give_order(Order::Serve);
    }

    /// The guest's memory as far as the front end has set it up.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn memory(&self) -> std::io::Result<Vec<(RegionInfo, OwnedFd)>> {
        let regions = self.regions.borrow();
        regions.iter().map(|(region, fd)| Ok((*region, fd.try_clone()?))).collect()
    }

    /// Maps memory that [`Target::take_over`] will need, in advance. A failure is reported by
    /// [`Target::take_over`].
    pub fn map_early(&self, regions: &[(RegionInfo, OwnedFd)]) {
        let table: Vec<_> = regions.iter().map(|(region, fd)| (*region, fd.as_fd())).collect();
        if let Ok(memory) = GuestMemory::new().replace(&table) {
            self.early.replace(Arc::new(memory));
        }
    }

    /// Serves connections until [`Target::stop`].
    pub async fn serve(&self, listener: UnixListener) {
        self.serve_all(listener, None).await;
    }

    /// Takes over a disk that is quiesced in another process. The disk is then quiesced here, which
    /// completes [`Target::rest`]. After [`Target::go_on`] it is served until [`Target::stop`].
    pub async fn take_over(&self, state: &DiskState, descriptors: Vec<OwnedFd>) {
        self.order.set(Order::Rest);
        let (listener, connection) = match self.adopt(state, descriptors) {
            Ok(adopted) => adopted,
            Err(why) => return self.tell(Err(why)),
        };
        let export = self.export(&listener, connection.as_ref());
        let export = export.and_then(|export| {
            // The state to export from here must equal the imported one.
            let same = (export.0.capacity_sectors, &export.0.connection);
            match same == (state.capacity_sectors, &state.connection) {
                true => Ok(export),
                false => Err("the disk's size or session differs here".to_owned()),
            }
        });
        match self.at_rest(export).await {
            Order::Serve => self.serve_all(listener, connection).await,
            Order::Rest => self.serve_all(listener, None).await,
            Order::Stop => {}
        }
    }

    async fn serve_all(&self, listener: UnixListener, mut taken: Option<Connection<'_>>) {
        let name = &*self.name;
        loop {
            let mut connection = match taken.take() {
                Some(connection) => connection,
                None => match self.accept(&listener).await {
                    Accepted::Socket(socket) => {
                        // Early memory was mapped for a front end that did not come.
                        drop(self.early.take());
                        let connection = Connection::new(self, socket);
                        connection.memory.account().bound();
                        connection
                    }
                    Accepted::Rest => {
                        let export = self.export(&listener, None);
                        match self.at_rest(export).await {
                            Order::Serve | Order::Rest => continue,
                            Order::Stop => return,
                        }
                    }
                    Accepted::Stop => return,
                },
            };
            let pid = connection.socket.peer_pid().unwrap_or(0);
            if let Some(Line { left_out }) = self.line(&self.lines.connected) {
                tracing::info!(disk = name, pid, left_out, "a front end has connected");
            }
            self.connected.set(true);
            let _hint = hint_at_unshared_memory(&self.core, self.name.clone(), &self.stats);
            let end = loop {
                match connection.run().await {
                    End::Resting => {
                        connection.stop_rings(true).await;
                        let export = self.export(&listener, Some(&connection));
                        match self.at_rest(export).await {
                            Order::Serve => {}
                            Order::Rest => break End::Resting,
                            Order::Stop => break End::Stopped,
                        }
                    }
                    end => break end,
                }
            };
            // Operations of this front end must not overlap with the next one's connection.
            connection.stop_rings(false).await;
            drop(connection);
            drop_elsewhere(self.regions.take());
            self.connected.set(false);
            match end {
                End::Gone => {
                    if let Some(Line { left_out }) = self.line(&self.lines.gone) {
                        tracing::info!(disk = name, pid, left_out, "the front end has gone");
                    }
                }
                // Continue without the connection.
                End::Resting => {}
                End::Stopped => return,
                End::Failed(why) => {
                    if let Some(Line { left_out }) = self.line(&self.lines.refused) {
                        tracing::warn!(
                            disk = name,
                            pid,
                            left_out,
                            "the connection was closed: {why}"
                        );
                    }
                }
            }
        }
    }

    /// Whether to log an event of this kind now.
    fn line(&self, of: &Seldom) -> Option<Line> {
        of.line(self.core.now_ns())
    }

    fn tell(&self, export: Result<Export, String>) {
        self.export.replace(Some(export));
        if let Some(waker) = self.resting.take() {
            waker.wake();
        }
    }

    /// Publishes the export and waits for the next order: to serve, to stop, or to quiesce again
    /// without the connection.
    async fn at_rest(&self, export: Result<Export, String>) -> Order {
        self.tell(export);
        let order = poll_fn(|cx| {
            self.events.waker.replace(Some(cx.waker().clone()));
            match self.order.get() {
                Order::Rest if !self.alone.take() => Poll::Pending,
                order => Poll::Ready(order),
            }
        })
        .await;
        self.export.take();
        order
    }

    /// Everything that a successor needs of a quiesced disk.
    fn export(
        &self,
        listener: &UnixListener,
        connection: Option<&Connection<'_>>,
    ) -> Result<Export, String> {
        let state = DiskState {
            name: self.options.name.clone(),
            capacity_sectors: self.device.geometry().size_bytes / SECTOR_BYTES,
            statistics: self.statistics(),
            listening: true,
            flush_failed: self.device.flush_failed(),
            under_way: self.under_way(),
            connection: match connection {
                None => None,
                Some(connection) => Some(connection.state().ok_or("a reply is due")?),
            },
            ..DiskState::default()
        };
        let mut descriptors = Vec::new();
        let regions = self.regions.borrow();
        for role in state.roles() {
            let fd = match role {
                Role::Listener => Some(listener.as_fd()),
                Role::Memory(nth) => connection
                    .and_then(|connection| connection.session.regions().get(usize::from(nth)))
                    .and_then(|wanted| regions.iter().find(|(region, _)| region == wanted))
                    .map(|(_, fd)| fd.as_fd()),
                role => connection.and_then(|connection| connection.descriptor(role)),
            };
            let fd = fd.ok_or_else(|| format!("no descriptor for {role:?}"))?;
            descriptors
                .push(fd.try_clone_to_owned().map_err(|error| format!("{role:?}: {error}"))?);
        }
        Ok((state, descriptors))
    }

    /// Operations that are in flight although the disk is quiesced.
    fn under_way(&self) -> Option<UnderWay> {
        let under_way = self.under_way.borrow();
        let (operations, what) = under_way.as_ref()?;
        (!operations.is_given()).then_some(*what)
    }

    /// Imports a disk that is quiesced in another process.
    fn adopt(
        &self,
        state: &DiskState,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(UnixListener, Option<Connection<'_>>), String> {
        let parts = state.assign(descriptors).map_err(|error| error.to_string())?;
        let listener = parts.listener.ok_or("the listening socket is missing")?;
        let listener = UnixListener::from_fd(&self.core, listener)
            .map_err(|error| format!("the listening socket: {error}"))?;
        self.take_statistics(&state.statistics);
        self.take_size(state.capacity_sectors.saturating_mul(SECTOR_BYTES));
        if state.flush_failed {
            self.device.set_flush_failed();
        }
        self.hold.set(state.under_way.map(|UnderWay { flushes }| Hold { flushes }));
        let connection = match (&state.connection, parts.connection) {
            (Some(state), Some(socket)) => {
                let mut connection = UnixSocket::from_fd(&self.core, socket)
                    .map(|socket| Connection::new(self, socket))
                    .map_err(|error| format!("the connection: {error}"))?;
                connection.unsent.push(state.unsent.clone(), parts.unsent);
                let adopted = connection.adopt(state, parts.session, parts.partial);
                adopted.map_err(|Refused(why)| why)?;
                Some(connection)
            }
            _ => None,
        };
        Ok((listener, connection))
    }

    /// Keeps the size that the guest knows, even if the image's length has changed.
    fn take_size(&self, size_bytes: u64) {
        let found = self.device.size_bytes();
        if found != size_bytes && !self.device.is_memory() {
            tracing::warn!(
                disk = &*self.name,
                found,
                size_bytes,
                "the length of its image was changed from outside: the disk keeps the size that its \
                 guest knows (`millrace disk resize` changes it), and what is not there fails"
            );
        }
        self.device.set_taken_size(size_bytes);
    }

    /// The sums over all rings of the counters that are not 0.
    pub fn statistics(&self) -> Vec<(String, u64)> {
        let mut all: Vec<(String, u64)> = Vec::new();
        for stats in &self.stats {
            let counters =
                stats.counters().into_iter().map(|(name, counter)| (name, counter.get()));
            match all.is_empty() {
                true => all.extend(counters),
                false => all.iter_mut().zip(counters).for_each(|(all, (_, count))| all.1 += count),
            }
        }
        all.retain(|(_, count)| *count > 0);
        all
    }

    /// Adds another process's counters to those of the first ring. Unknown counters are ignored.
    pub fn take_statistics(&self, statistics: &[(String, u64)]) {
        let Some(first) = self.stats.first() else { return };
        for (name, counter) in first.counters() {
            if let Some((_, count)) = statistics.iter().find(|(known, _)| *known == name) {
                counter.add(*count);
            }
        }
    }

    async fn accept(&self, listener: &UnixListener) -> Accepted {
        loop {
            let accepted = {
                let mut accept = pin!(listener.accept());
                poll_fn(|cx| {
                    match self.order.get() {
                        Order::Serve => {}
                        Order::Rest => return Poll::Ready(Err(Accepted::Rest)),
                        Order::Stop => return Poll::Ready(Err(Accepted::Stop)),
                    }
                    self.events.waker.replace(Some(cx.waker().clone()));
                    accept.as_mut().poll(cx).map(Ok)
                })
                .await
            };
            match accepted {
                Ok(Ok(socket)) => return Accepted::Socket(socket),
                Ok(Err(error)) => {
                    tracing::warn!(disk = &*self.name, "accepting a connection: {error}");
                    self.core.sleep_ns(RETRY_NS).await;
                }
                Err(order) => return order,
            }
        }
    }
}

/// Interval of the checks for unheard kicks, in nanoseconds.
const UNHEARD_NS: u64 = 1_000_000_000;
/// Number of checks for each connection.
const UNHEARD_LOOKS: u32 = 60;

/// Logs a hint if a guest kicks and no ring ever has a request: then its memory is not the memory
/// that the front end has shared with us, for example because QEMU's memory backend is not shared.
fn hint_at_unshared_memory(
    core: &Core,
    name: Arc<str>,
    stats: &[Arc<QueueStats>],
) -> reactor::OwnedTask<()> {
    let stats = stats.to_vec();
    let sum = move |of: fn(&QueueStats) -> u64| stats.iter().map(|ring| of(ring)).sum::<u64>();
    let requests = |ring: &QueueStats| {
        ring.completions.get() + ring.reads.requests.get() + ring.writes.requests.get()
    };
    let (kicks_before, requests_before) = (sum(|ring| ring.kicks.get()), sum(requests));
    let there = core.clone();
    let looking = async move {
        let mut kicked = false;
        for _ in 0..UNHEARD_LOOKS {
            there.sleep_ns(UNHEARD_NS).await;
            if sum(requests) > requests_before {
                return;
            }
            if kicked {
                return tracing::warn!(
                    disk = &*name,
                    "the guest kicks its rings and there is never a request in them: is its memory \
                     shared (share=on of QEMU's memory-backend)?"
                );
            }
            kicked = sum(|ring| ring.kicks.get()) > kicks_before;
        }
    };
    core.spawn(Class::Control, looking).owned()
}

/// The result of waiting for a connection.
enum Accepted {
    Socket(UnixSocket),
    Rest,
    Stop,
}

/// The disk's properties as the guest sees them.
fn config(geometry: &Geometry, queues: u16) -> Config {
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
    let limits = |bytes: u64| RangeLimits { sectors_max: sectors(bytes), segments_max: RANGES_MAX };
    Config {
        capacity_sectors: geometry.size_bytes / SECTOR_BYTES,
        segments_max: geometry.max_segments.min((DATA_MAX / u64::from(SEGMENT_BYTES_MAX)) as u32),
        segment_bytes_max: SEGMENT_BYTES_MAX,
        block_size: geometry.block_size,
        physical_block_size: geometry.physical_block_size,
        min_io_bytes: geometry.min_io,
        opt_io_bytes: geometry.opt_io,
        write_cache: geometry.volatile_cache,
        read_only: geometry.read_only,
        queues,
        discard: geometry.discard.then(|| limits(geometry.discard_max)),
        discard_alignment_sectors: sectors(geometry.discard_alignment.into()),
        write_zeroes: geometry.write_zeroes.then(|| limits(geometry.write_zeroes_max)),
        write_zeroes_may_unmap: geometry.zeroes_after_discard,
    }
}

/// Why [`Connection::run`] returns.
enum End {
    /// The front end closed the connection.
    Gone,
    /// The disk is being stopped.
    Stopped,
    /// The disk is to be quiesced; the connection stays.
    Resting,
    /// The front end violated the protocol, or the system refused a request.
    Failed(String),
}

/// Why an action failed.
struct Refused(String);

impl Refused {
    fn new(what: &str, why: impl std::fmt::Display) -> Refused {
        Refused(format!("{what}: {why}"))
    }
}

/// The descriptors of a ring, and the handle to it while it runs.
#[derive(Default)]
struct RingParts {
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    remote: Option<Remote>,
    /// The position of a quiesced ring.
    progress: Option<RingProgress>,
}

enum Next {
    Received(std::io::Result<(usize, Vec<OwnedFd>)>),
    Sent(std::io::Result<()>),
    Ended(Ended),
    Resized,
    Released,
    Stop,
    Rest,
}

struct Connection<'a> {
    target: &'a Target,
    socket: UnixSocket,
    session: Session,
    framer: Framer,
    unsent: Unsent,
    memory: Arc<GuestMemory>,
    inflight: Option<(InflightInfo, OwnedFd)>,
    log: Option<(Arc<DirtyLog>, OwnedFd)>,
    log_signal: Option<OwnedFd>,
    channel: Option<UnixSocket>,
    rings: Vec<RingParts>,
    /// Rings were sent commands that may not be executed yet.
    told_rings: bool,
    /// A ring was started that holds requests.
    holds: bool,
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        drop_elsewhere(self.framer.take_descriptors());
        drop_elsewhere((self.inflight.take(), self.log.take()));
    }
}

impl<'a> Connection<'a> {
    fn new(target: &'a Target, socket: UnixSocket) -> Connection<'a> {
        Connection {
            target,
            socket,
            session: Session::new(Connection::offer(target)),
            framer: Framer::new(),
            unsent: Unsent::default(),
            memory: target.early.take(),
            inflight: None,
            log: None,
            log_signal: None,
            channel: None,
            rings: (0..target.options.queues).map(|_| RingParts::default()).collect(),
            told_rings: false,
            holds: false,
        }
    }

    fn offer(target: &Target) -> Offer {
        // The geometry has the current size.
        target.events.resized.set(false);
        let mut config = config(&target.device.geometry(), target.options.queues);
        config.write_cache &= target.write_cache.get() != Some(false);
        let offer = Offer::new(config);
        let memory_regions_max = offer.memory_regions_max.min(account::regions_max());
        Offer { memory_regions_max, ..offer }
    }

    /// Continues a connection of another process. Its rings stay quiesced.
    fn adopt(
        &mut self,
        state: &ConnectionState,
        descriptors: Vec<OwnedFd>,
        partial: Vec<OwnedFd>,
    ) -> Result<(), Refused> {
        let bad = |error: &dyn std::fmt::Display| Refused::new("the connection", error);
        // The other process has admitted these regions.
        let memory_regions_max = MEMORY_REGIONS_MAX;
        let offer = Offer { memory_regions_max, ..Connection::offer(self.target) };
        let imported = Session::import(offer, &state.session, descriptors);
        let (session, actions) = imported.map_err(|error| bad(&error))?;
        self.target.write_cache.set(Some(session.told_write_cache()));
        self.session = session;
        self.framer =
            Framer::from_parts(state.partial.clone(), partial).map_err(|error| bad(&error))?;
        for action in actions {
            match action {
                // After the disk is resumed.
                Action::StartRing(_) | Action::EnableRing(..) => {}
                action => self.apply(action)?,
            }
        }
        for (parts, (_, progress)) in self.rings.iter_mut().zip(&state.session.rings) {
            parts.progress = *progress;
        }
        self.memory.account().bound();
        Ok(())
    }

    /// The state that another process needs, with all rings quiesced; `None` while a reply is due.
    fn state(&self) -> Option<ConnectionState> {
        let progress = |ring: u16| self.rings[usize::from(ring)].progress.unwrap_or_default();
        let (partial, descriptors) = self.framer.parts();
        let (unsent, unsent_descriptor) = self.unsent.parts()?;
        Some(ConnectionState {
            session: self.session.export(progress)?,
            partial: partial.to_vec(),
            partial_descriptors: descriptors.len() as u16,
            unsent,
            unsent_descriptor: unsent_descriptor.is_some(),
        })
    }

    /// The descriptors that belong to [`Connection::state`].
    fn descriptor(&self, role: Role) -> Option<BorrowedFd<'_>> {
        let ring = |ring: u16| self.rings.get(usize::from(ring));
        match role {
            Role::Connection => Some(self.socket.as_fd()),
            Role::Inflight => self.inflight.as_ref().map(|(_, fd)| fd.as_fd()),
            Role::Log => self.log.as_ref().map(|(_, fd)| fd.as_fd()),
            Role::LogSignal => self.log_signal.as_ref().map(AsFd::as_fd),
            Role::BackendChannel => self.channel.as_ref().map(AsFd::as_fd),
            Role::Kick(nth) => ring(nth)?.kick.as_ref().map(AsFd::as_fd),
            Role::Call(nth) => ring(nth)?.call.as_ref().map(AsFd::as_fd),
            Role::Err(nth) => ring(nth)?.err.as_ref().map(AsFd::as_fd),
            Role::Partial(nth) => self.framer.parts().1.get(usize::from(nth)).map(AsFd::as_fd),
            Role::Unsent => self.unsent.parts()?.1.map(AsFd::as_fd),
            Role::Listener | Role::Mirror | Role::Memory(_) => None,
        }
    }

    /// Runs until the connection ends or the disk must be quiesced. Starts quiesced rings again.
    async fn run(&mut self) -> End {
        if let Err(Refused(why)) = self.wake_rings() {
            return End::Failed(why);
        }
        let mut received = Vec::new();
        loop {
            let step = match self.next(&mut received).await {
                Next::Stop => return End::Stopped,
                Next::Resized => {
                    self.resized();
                    Ok(())
                }
                Next::Released => {
                    self.release();
                    Ok(())
                }
                Next::Rest => return End::Resting,
                Next::Sent(Ok(())) => Ok(()),
                Next::Sent(Err(error)) => Err(Refused::new("sending a reply", error)),
                Next::Received(Ok((0, _))) => return End::Gone,
                Next::Received(Err(error)) => return End::Failed(format!("receiving: {error}")),
                Next::Ended(ended) => {
                    self.rings[usize::from(ended.index)].remote = None;
                    if self.session.ring(ended.index).state != RingState::Stopping {
                        return End::Failed(format!("ring {} has ended by itself", ended.index));
                    }
                    let actions = self.session.ring_stopped(ended.index, ended.base);
                    self.perform(actions).await
                }
                Next::Received(Ok((_, fds))) => {
                    let step = match self.admit(fds).await {
                        Ok(fds) if fds.is_empty() => self.message(&received, fds).await,
                        Ok(fds) => self.message_with(&received, fds).await,
                        Err(refused) => Err(refused),
                    };
                    received.clear();
                    step
                }
            };
            if let Err(Refused(why)) = step {
                return End::Failed(why);
            }
        }
    }

    /// The next event. A message that was sent before the last one was answered stays unread.
    async fn next(&mut self, received: &mut Vec<u8>) -> Next {
        let Connection { target, socket, session, framer, unsent, holds, .. } = self;
        let events = &target.events;
        let sends = !unsent.is_empty();
        let mut receive = pin!(socket.recv(received, framer.wanted()));
        let mut send = pin!(unsent.all_sent(&target.core, socket));
        poll_fn(|cx| {
            if let Some(ended) = events.ended.borrow_mut().pop_front() {
                return Poll::Ready(Next::Ended(ended));
            }
            if events.resized.take() {
                return Poll::Ready(Next::Resized);
            }
            if *holds && target.hold.get().is_none() {
                return Poll::Ready(Next::Released);
            }
            match target.order.get() {
                Order::Stop => return Poll::Ready(Next::Stop),
                // A reply that is due must be sent first, whether or not the front end reads it.
                Order::Rest if !session.is_waiting() => return Poll::Ready(Next::Rest),
                Order::Serve | Order::Rest => {}
            }
            events.waker.replace(Some(cx.waker().clone()));
            match (sends, session.is_waiting()) {
                (true, _) => send.as_mut().poll(cx).map(Next::Sent),
                (false, true) => Poll::Pending,
                (false, false) => receive.as_mut().poll(cx).map(Next::Received),
            }
        })
        .await
    }

    /// Admits only descriptors whose operations never block. Closing others may take a while; this
    /// waits for it, but not after the disk is told to stop.
    async fn admit(&self, fds: Vec<OwnedFd>) -> Result<Vec<OwnedFd>, Refused> {
        if fds.is_empty() {
            return Ok(fds);
        }
        let target = self.target;
        let mut admitted = pin!(reactor::admit(&target.core, fds));
        poll_fn(|cx| {
            if target.order.get() == Order::Stop {
                return Poll::Ready(Err(Refused::new("the front end's message", "the disk stops")));
            }
            target.events.waker.replace(Some(cx.waker().clone()));
            let admitted = admitted.as_mut().poll(cx);
            admitted.map_err(|error| Refused::new("the front end's message", error))
        })
        .await
    }

    /// Handles a message with descriptors. Their last reference is dropped on another thread.
    async fn message_with(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), Refused> {
        let kept: Vec<_> = fds.iter().filter_map(|fd| fd.try_clone().ok()).collect();
        let step = self.message(bytes, fds).await;
        drop_elsewhere(kept);
        let core = &self.target.core;
        let room = async {
            while elsewhere::is_full() {
                core.sleep_ns(FULL_NS).await;
            }
        };
        self.target.unless_stopped(room).await;
        step
    }

    async fn message(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), Refused> {
        let bad = |violation| Refused::new("the front end's message", violation);
        let Some((message, fds)) = self.framer.push(bytes, fds).map_err(bad)? else {
            return Ok(());
        };
        let told = self.session.told_write_cache();
        let mut actions = self.session.handle(&message, fds).map_err(bad)?;
        let tells = self.session.told_write_cache();
        if tells != told
            && let Err(Refused(why)) = self.target.told_write_cache(Some(tells)).await
        {
            // The new value is in force, and this is safe: if the cache is now off, writes are
            // durable; if it is now on, the stored value is off.
            tracing::error!(disk = &*self.target.name, "{why}");
            if let Some(Action::Reply(reply)) = actions.last_mut() {
                let _ = reply.refuse();
            }
        }
        self.perform(actions).await
    }

    /// Tells the rings and the guest the device's new size.
    fn resized(&mut self) {
        let sectors = self.target.device.size_bytes() / SECTOR_BYTES;
        self.each_ring(|connection| Command::Disk(connection.disk()));
        let Some(message) = self.session.set_capacity(sectors) else { return };
        let Some(channel) = &self.channel else { return };
        let why = match channel.try_send(&message, &[]) {
            Ok(sent) if sent == message.len() => return,
            // The channel is full of such messages; after any of them the front end reads the size.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
            Ok(_) => std::io::Error::from(std::io::ErrorKind::WriteZero),
            Err(error) => error,
        };
        // The guest learns the size when it reads it. Do not disturb it for that.
        tracing::warn!(
            disk = &*self.target.name,
            "telling the front end of a new size: {why}; it will not be told of later ones"
        );
        self.channel = None;
        self.session.forget_backend_channel();
    }

    /// Suspends while old memory, kept by requests at the device, leaves no room for the new
    /// memory, but at most for a minute, and not after the disk is told to stop.
    async fn until_old_memory_is_gone(&self, action: &Action) {
        let new: Vec<_> = match action {
            Action::ReplaceMemory(regions) => regions.iter().map(|(region, _)| region).collect(),
            Action::AddRegion(region, _) => vec![region],
            Action::RemoveRegion(_) => Vec::new(),
            _ => return,
        };
        let lacks = |region: &&&RegionInfo| !self.memory.regions().any(|known| known == **region);
        let new = new.iter().filter(lacks).map(|region| region.size);
        let (bytes, count) =
            new.fold((0_u64, 0), |(bytes, count), size| (bytes.saturating_add(size), count + 1));
        let (account, core) = (self.memory.account(), &self.target.core);
        let waiting = async {
            for _ in 0..OLD_MEMORY_LOOKS {
                let room = account.table_room().and_then(|()| account.room(bytes, count));
                if room.is_ok() || !account.keeps_tables() {
                    return;
                }
                core.sleep_ns(OLD_MEMORY_NS).await;
            }
        };
        self.target.unless_stopped(waiting).await;
    }

    /// Performs the session's actions in order.
    async fn perform(&mut self, actions: Vec<Action>) -> Result<(), Refused> {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Reply(reply) => {
                    // The reply tells the front end that its request is in force, on every ring's
                    // core.
                    self.until_obeyed().await;
                    self.reply(reply)?;
                }
                Action::CreateInflight { queues, queue_size } => {
                    // A new front end: it knows what it was told on this connection.
                    let volatile = self.target.device.geometry().volatile_cache;
                    let told = volatile.then_some(self.session.told_write_cache());
                    if told != self.target.write_cache.get()
                        && let Err(Refused(why)) = self.target.told_write_cache(told).await
                    {
                        tracing::warn!(disk = &*self.target.name, "{why}");
                    }
                    let (area, fd) = self.create_inflight(queues, queue_size)?;
                    actions.extend(self.session.inflight_created(&area, fd));
                }
                Action::StopRing(ring) => self.stop_ring(ring),
                action => {
                    self.until_old_memory_is_gone(&action).await;
                    if let Err(Refused(why)) = self.apply(action) {
                        let Some(Action::Reply(mut reply)) = actions.pop_back() else {
                            return Err(Refused(why));
                        };
                        if !reply.refuse() {
                            return Err(Refused(why));
                        }
                        let target = self.target;
                        if let Some(Line { left_out }) = target.line(&target.lines.refused) {
                            tracing::warn!(disk = &*target.name, left_out, "refused: {why}");
                        }
                        return self.reply(reply);
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends a reply, as far as the front end's socket has room.
    fn reply(&mut self, reply: Reply) -> Result<(), Refused> {
        self.unsent.push(reply.bytes, reply.fd);
        let sent = self.unsent.send(&self.socket);
        sent.map_err(|error| Refused::new("sending a reply", error))
    }

    fn apply(&mut self, action: Action) -> Result<(), Refused> {
        match action {
            Action::FeaturesChanged => {
                self.each_ring(|connection| Command::Disk(connection.disk()));
                self.each_ring(|connection| Command::Log(connection.log()));
            }
            Action::WriteCache(_) => {
                self.each_ring(|connection| Command::Through(!connection.session.write_cache()));
            }
            Action::ReplaceMemory(regions) => {
                let table: Vec<_> =
                    regions.iter().map(|(region, fd)| (*region, fd.as_fd())).collect();
                let room = self.memory.account().table_room().map_err(MemoryError::NoRoom);
                let memory = room.and_then(|()| self.memory.replace(&table)).map_err(|e| {
                    let known = self.target.regions.borrow();
                    self.session.keep_regions(known.iter().map(|(region, _)| *region));
                    Refused::new("the memory table", e)
                })?;
                self.set_memory(memory);
                drop_elsewhere(self.target.regions.replace(regions));
            }
            Action::AddRegion(region, fd) => {
                let room = self.memory.account().table_room().map_err(MemoryError::NoRoom);
                let added = room.and_then(|()| self.memory.with_region(region, fd.as_fd()));
                let memory = added.map_err(|e| {
                    self.session.forget_region(&region);
                    Refused::new("a memory region", e)
                })?;
                self.set_memory(memory);
                self.target.regions.borrow_mut().push((region, fd));
            }
            Action::RemoveRegion(region) => {
                let memory = self.memory.without_region(region);
                self.set_memory(memory.map_err(|e| Refused::new("a memory region", e))?);
                let known = self.session.regions();
                let mut regions = self.target.regions.borrow_mut();
                let gone = regions.extract_if(.., |(region, _)| !known.contains(region));
                drop_elsewhere(gone.collect::<Vec<_>>());
            }
            Action::Inflight(area, fd) => {
                // Whether it is valid shows when a ring starts: then its format is known.
                drop_elsewhere(self.inflight.replace((area, fd)));
            }
            Action::DropInflight => drop_elsewhere(self.inflight.take()),
            Action::Log(area, fd) => {
                let account = self.memory.account();
                let log = DirtyLog::map_for(account, fd.as_fd(), area.mmap_size, area.mmap_offset);
                let log = log.map_err(|e| Refused::new("the dirty log", e))?;
                drop_elsewhere(self.log.replace((Arc::new(log), fd)));
                self.each_ring(|connection| Command::Log(connection.log()));
            }
            // The front end reads the log without a signal.
            Action::LogSignal(fd) => self.log_signal = Some(fd),
            Action::BackendChannel(fd) => {
                let channel = UnixSocket::from_fd(&self.target.core, fd);
                let channel = channel.map_err(|e| {
                    self.session.forget_backend_channel();
                    Refused::new("the channel for messages", e)
                });
                // The front end no longer uses the old one either.
                self.channel = None;
                self.channel = Some(channel?);
            }
            Action::Kick(ring, fd) => {
                let event = event(fd.as_ref())?;
                self.part(ring).kick = fd;
                self.send(ring, Command::Kick(event));
            }
            Action::Call(ring, fd) => {
                let event = event(fd.as_ref())?;
                self.part(ring).call = fd;
                self.send(ring, Command::Call(event));
            }
            Action::Err(ring, fd) => {
                let event = event(fd.as_ref())?;
                self.part(ring).err = fd;
                self.send(ring, Command::Err(event));
            }
            Action::StartRing(ring) => self.start_ring(ring)?,
            Action::EnableRing(ring, enabled) => self.send(ring, Command::Enable(enabled)),
            Action::RingLog(ring) => {
                let log = self.session.ring(ring).log;
                self.send(ring, Command::RingLog(log));
            }
            Action::Reply(_) | Action::CreateInflight { .. } | Action::StopRing(_) => {
                unreachable!("done by `perform`")
            }
        }
        Ok(())
    }

    /// Suspends until every ring has executed the commands sent so far. Returns earlier if a ring
    /// ends, because it executes nothing more, or if the disk is told to stop.
    async fn until_obeyed(&mut self) {
        if !std::mem::take(&mut self.told_rings) {
            return;
        }
        let obedience = Obedience::default();
        self.each_ring(|_| Command::Obeyed(obedience.token()));
        self.told_rings = false;
        let target = self.target;
        poll_fn(|cx| {
            let ended = !target.events.ended.borrow().is_empty();
            if ended || target.order.get() == Order::Stop {
                return Poll::Ready(());
            }
            target.events.waker.replace(Some(cx.waker().clone()));
            obedience.poll(cx)
        })
        .await;
    }

    fn part(&mut self, ring: u16) -> &mut RingParts {
        &mut self.rings[usize::from(ring)]
    }

    fn send(&mut self, ring: u16, command: Command) {
        if let Some(remote) = &mut self.part(ring).remote {
            remote.send(command);
            self.told_rings = true;
        }
    }

    fn each_ring(&mut self, command: impl Fn(&Connection<'_>) -> Command) {
        for ring in 0..self.session.rings() {
            if self.part(ring).remote.is_some() {
                let command = command(self);
                self.send(ring, command);
            }
        }
    }

    fn set_memory(&mut self, memory: GuestMemory) {
        self.memory = Arc::new(memory);
        self.each_ring(|connection| Command::Memory(connection.memory.clone()));
    }

    /// The dirty log, if writes are logged.
    fn log(&self) -> Option<Arc<DirtyLog>> {
        let log = self.log.as_ref().filter(|_| self.session.logging());
        log.map(|(log, _)| log.clone())
    }

    fn form(&self) -> Form {
        if self.session.packed() { Form::Packed } else { Form::Split }
    }

    fn create_inflight(
        &self,
        queues: u16,
        queue_size: u16,
    ) -> Result<(InflightInfo, OwnedFd), Refused> {
        let made = InflightRegion::create(queues, queue_size, self.form());
        let (region, fd) = made.map_err(|e| Refused::new("making an in-flight region", e))?;
        Ok((region.info(), fd))
    }

    /// The disk for checking requests.
    fn disk(&self) -> Disk {
        let geometry = self.target.device.geometry();
        let config = config(&geometry, self.session.rings());
        let has = |bit| self.session.features() & bit != 0;
        // A driver that did not accept a limit does not know it.
        let bound = |bit, most| if has(bit) { most } else { u32::MAX };
        let mut serial = [0; SERIAL_LEN];
        for (to, from) in serial.iter_mut().zip(self.target.options.serial.bytes()) {
            *to = from;
        }
        let most = |limits: Option<RangeLimits>| limits.map_or(0, |limits| limits.sectors_max);
        Disk {
            capacity_sectors: config.capacity_sectors,
            block_size: config.block_size,
            read_only: config.read_only,
            discard: has(feature::DISCARD),
            write_zeroes: has(feature::WRITE_ZEROES),
            write_zeroes_may_unmap: config.write_zeroes_may_unmap,
            max_discard_sectors: most(config.discard),
            max_write_zeroes_sectors: most(config.write_zeroes),
            segments_max: bound(feature::SEG_MAX, config.segments_max),
            segment_bytes_max: bound(feature::SIZE_MAX, config.segment_bytes_max),
            serial,
        }
    }

    fn start_ring(&mut self, index: u16) -> Result<(), Refused> {
        let target = self.target;
        let inflight = match &self.inflight {
            None => None,
            Some((info, fd)) => {
                let account = self.memory.account();
                let region = InflightRegion::map_for(account, fd.as_fd(), *info, self.form());
                let region = region.map_err(|e| Refused::new("the in-flight region", e))?;
                if target.write_cache.get().is_none() && self.session.told_write_cache() {
                    self.session.distrust_write_cache();
                    tracing::info!(
                        disk = &*target.name,
                        "writes are made durable at once: it is not known whether the guest was \
                         told of a write cache"
                    );
                }
                region.queue(index)
            }
        };
        let ring = *self.session.ring(index);
        let progress = self.part(index).progress.take();
        let addresses = ring.addresses.unwrap_or_default();
        let parts = &self.rings[usize::from(index)];
        let start = Start {
            disk_name: target.name.clone(),
            index,
            setup: Setup {
                num: ring.size,
                desc: addresses.desc,
                avail: addresses.avail,
                used: addresses.used,
                log: ring.log,
                base: progress.map_or(ring.base, |progress| progress.base(self.session.packed())),
                features: self.session.features(),
            },
            memory: self.memory.clone(),
            disk: self.disk(),
            inflight,
            log: self.log(),
            kick: event(parts.kick.as_ref())?,
            call: event(parts.call.as_ref())?,
            err: event(parts.err.as_ref())?,
            polled: ring.kick == Kick::Polling,
            through: !self.session.write_cache(),
            enabled: ring.state != RingState::Paused,
            broken: progress.is_some_and(|progress| progress.broken),
            hold: target.hold.get(),
            device: target.device.clone(),
            company: target.company.clone(),
            stats: target.stats[usize::from(index)].clone(),
            lines: target.lines.clone(),
        };
        self.holds |= start.hold.is_some();
        let (remote, orders) = queue::remote();
        self.part(index).remote = Some(remote);
        let there = (target.options.first_core + usize::from(index)) % target.core.cores();
        let (core, events) = (target.core.clone(), target.events.clone());
        target.core.spawn(Class::Control, async move {
            let run = move |core: &Core| queue::run(core.clone(), start, orders);
            let ended = core.spawn_on(there, Class::Control, run).await;
            events.ended.borrow_mut().push_back(ended);
            events.ring();
        });
        Ok(())
    }

    fn stop_ring(&mut self, ring: u16) {
        if self.part(ring).remote.is_some() {
            self.send(ring, Command::Stop);
        } else {
            let base = self.session.ring(ring).base;
            let ended = Ended::at(ring, base, false);
            self.target.events.ended.borrow_mut().push_back(ended);
        }
    }

    /// Starts the rings that were quiesced.
    fn wake_rings(&mut self) -> Result<(), Refused> {
        for ring in 0..self.session.rings() {
            if self.part(ring).progress.is_some() {
                self.start_ring(ring)?;
            }
        }
        Ok(())
    }

    /// Lets the rings continue with the requests that they hold, if they may.
    fn release(&mut self) {
        if self.holds && self.target.hold.get().is_none() {
            self.holds = false;
            self.rings.iter().filter_map(|parts| parts.remote.as_ref()).for_each(Remote::release);
        }
    }

    /// Quiesces all rings: stops them and waits for their requests at the device. If the disk is
    /// forced, abandons the rings instead, provided that the disk continues elsewhere with the
    /// in-flight region (`goes_on`) or is being stopped.
    async fn stop_rings(&mut self, goes_on: bool) {
        for parts in &mut self.rings {
            if let Some(remote) = &mut parts.remote {
                remote.send(Command::Stop);
            }
        }
        let target = self.target;
        let events = &target.events;
        let packed = self.session.packed();
        let mut abandoned = None;
        let mut what = UnderWay::default();
        poll_fn(|cx| {
            self.release();
            let rings = &mut self.rings;
            for Ended { index, base, broken, flushes } in events.ended.borrow_mut().drain(..) {
                let parts = &mut rings[usize::from(index)];
                parts.remote = None;
                parts.progress = Some(RingProgress::from_base(base, packed, broken));
                what.flushes |= flushes;
            }
            events.waker.replace(Some(cx.waker().clone()));
            if rings.iter().all(|parts| parts.remote.is_none()) {
                return Poll::Ready(());
            }
            // Stopping is like a crash, whether or not the front end has an in-flight region.
            let known = goes_on && self.inflight.is_some() || target.order.get() == Order::Stop;
            if known && target.forced.get() && abandoned.is_none() {
                let operations = Obedience::default();
                for remote in rings.iter_mut().filter_map(|parts| parts.remote.as_mut()) {
                    remote.send(Command::Abandon(operations.token()));
                }
                abandoned = Some(operations);
            }
            Poll::Pending
        })
        .await;
        if let Some(operations) = abandoned {
            target.under_way.replace(Some((operations, what)));
        }
    }
}

/// Duplicates the descriptor of an eventfd for a ring. The original stays for a successor.
fn event(fd: Option<&OwnedFd>) -> Result<Option<EventFd>, Refused> {
    let event = fd.map(|fd| fd.try_clone().and_then(EventFd::from_fd)).transpose();
    event.map_err(|error| Refused::new("a ring's descriptor", error))
}
