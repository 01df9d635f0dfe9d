//! A disk and its socket: accepts one connection after the other, performs what the front end's
//! messages request, and distributes the rings over the cores.
//!
//! 1. [`Target::serve`] does not accept a connection before the disk is ready: QEMU 7.2 never
//!    reconnects after a connection that was accepted and closed. It accepts the next connection
//!    when this one has ended.
//! 2. [`Session`] turns messages into actions; descriptors are mapped here. Rings are assigned to
//!    cores round robin, each with its own channel to the device (see `queue`).
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
//! # A launcher that has the front end's socket
//!
//! Then messages come from the launcher, one at a time, and each is *committed* when it is done
//! (`protocol/kept`, `link`). If this process dies, the next one continues the session: it recovers
//! every ring that was not stopped from the in-flight region, paused ones too, calls each guest
//! once, and gets the message that was not committed. Without an in-flight region it closes the
//! connection.
//!
//! # Handing a disk over
//!
//! ```text
//!   here                  Target::quiesce                    the rings have stopped
//!     serve --> [serving] -------------> [quiescing] ----------------------.
//!                   ^                                                      v
//!                   |                 Target::resume               [quiesced] --> stop: the end;
//!                   '--------------------------------------------------'   ^      nothing of what
//!   in another process, or here                                            |      was exported is
//!     take_over --> [taking] ----------------------------------------------'      is closed
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
//!
//! # The files
//!
//! `stats`, `log_limit`, `observer`, `trouble`, `share`, `limits`, `disk`, `unsent`, `link` and
//! `door` use none of the others but the one before; `queue` uses the first seven. `serve`,
//! `handover`, `image_lock` and `connection` are parts of the target: they use its state, which is
//! in this file, and this file calls them. The room uses all others.

mod connection;
mod disk;
pub(crate) mod door;
mod handover;
mod image_lock;
pub(crate) mod limits;
mod link;
pub(crate) mod log_limit;
pub(crate) mod observer;
pub(crate) mod queue;
mod serve;
pub(crate) mod share;
mod shared_memory_hint;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod standalone;
pub(crate) mod stats;
pub(crate) mod trouble;
mod unsent;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use bdev::{Bdev, Rates};
use reactor::{Core, Either, Event, race};

use crate::memory::{GuestMemory, RegionInfo};
use crate::protocol::handover::{DiskState, InFlight};
#[cfg(doc)]
use crate::protocol::session::Session;
use crate::target::connection::Refused;
use crate::target::image_lock::ImageLock;
use crate::target::limits::{DiskLimits, LimitGroups};
use crate::target::log_limit::LogLimits;
use crate::target::queue::{Hold, RingEnd, WaitGroup};
use crate::target::share::DiskActivity;
use crate::target::stats::QueueStats;
pub use crate::target::trouble::OnError;
use crate::target::trouble::Trouble;

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
    /// What happens to requests that the device fails.
    pub on_error: OnError,
}

/// A disk that is served to virtual machines.
pub struct Target {
    core: Core,
    device: RefCell<Bdev>,
    activity: DiskActivity,
    limits: Arc<DiskLimits>,
    options: TargetOptions,
    name: Arc<str>,
    /// What its cores are working on while they work for the disk.
    work: u64,
    stats: Vec<Arc<QueueStats>>,
    log_limits: Arc<LogLimits>,
    trouble: Arc<Trouble>,
    order: Cell<Order>,
    /// The end of the connection is not told.
    leaves: Cell<bool>,
    front_end: Cell<FrontEnd>,
    events: Rc<Events>,
    /// What front ends were told about the write cache, if known.
    write_cache: Cell<Option<bool>>,
    write_cache_store: OnceCell<WriteCacheStore>,
    /// The guest takes completed writes for durable, whatever its front end is told.
    writes_through: Cell<bool>,
    /// The guest's memory, for a successor.
    regions: RefCell<Vec<(RegionInfo, OwnedFd)>>,
    /// Memory that was mapped before the front end's connection came.
    early: RefCell<Arc<GuestMemory>>,
    /// The result that `quiesce` waits for, and its event.
    export: RefCell<Option<Result<Export, String>>>,
    exported: Event,
    /// Quiesce again, without the front end's connection.
    disconnect: Cell<bool>,
    /// Do not wait for the device.
    forced: Cell<bool>,
    /// The operations of abandoned rings, and whether there is a flush among them.
    in_flight: RefCell<Option<(WaitGroup, InFlight)>>,
    /// Set until [`Target::release`], while operations of the old process may be in flight.
    hold: Cell<Option<Hold>>,
    /// The image's lock, if it is locked only while it is used.
    lock: Rc<ImageLock>,
}

/// What the front end of a disk does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrontEnd {
    /// None is connected.
    Absent {
        /// The last one had been stopped to continue elsewhere.
        left: bool,
    },
    /// One is connected, and no ring runs.
    Stopped {
        /// The guest's writes to its memory were logged: it was stopped to continue elsewhere.
        moves: bool,
    },
    /// Rings run.
    Running {
        /// The guest's writes to its memory are logged: it is about to continue elsewhere.
        moves: bool,
    },
}

impl Default for FrontEnd {
    fn default() -> FrontEnd {
        FrontEnd::Absent { left: false }
    }
}

impl FrontEnd {
    /// Whether rings run.
    pub fn is_running(self) -> bool {
        matches!(self, FrontEnd::Running { .. })
    }
}

/// A quiesced disk: its state, and the descriptors that belong to it, in the order of
/// [`DiskState::roles`].
pub type Export = (DiskState, Vec<OwnedFd>);

/// What the target must do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Serve,
    Quiesce,
    Stop,
}

/// Durably stores what front ends were told about the write cache: see [`Target::remember`].
pub type WriteCacheStore =
    Box<dyn Fn(Option<bool>) -> Pin<Box<dyn Future<Output = Result<(), String>>>>>;

/// Wakes a connection for events other than those of its socket.
#[derive(Default)]
struct Events {
    ended: RefCell<VecDeque<RingEnd>>,
    /// The front end does not know the device's new size yet.
    resized: Cell<bool>,
    /// The disk is to be withheld no more.
    admitted: Cell<bool>,
    /// Notified after each change of these fields and of the target's orders.
    changed: Event,
}

impl Target {
    /// Creates a disk without a connection.
    pub fn new(core: &Core, device: Bdev, options: TargetOptions) -> Rc<Target> {
        Rc::new(Target {
            core: core.clone(),
            device: RefCell::new(device),
            activity: DiskActivity::register(&core.local()),
            limits: Arc::default(),
            name: options.name.as_str().into(),
            work: reactor::work_of(&options.name),
            stats: (0..options.queues).map(|_| Arc::default()).collect(),
            log_limits: Arc::default(),
            trouble: Arc::new(Trouble::new(options.on_error)),
            options,
            order: Cell::new(Order::Serve),
            leaves: Cell::new(false),
            front_end: Cell::default(),
            events: Rc::default(),
            write_cache: Cell::new(None),
            write_cache_store: OnceCell::new(),
            writes_through: Cell::new(false),
            regions: RefCell::default(),
            early: RefCell::default(),
            export: RefCell::default(),
            exported: Event::new(),
            disconnect: Cell::new(false),
            forced: Cell::new(false),
            in_flight: RefCell::default(),
            hold: Cell::new(None),
            lock: Rc::default(),
        })
    }

    /// Sets the function that durably stores what front ends are told about the write cache, and
    /// `known`, the value that it stored last. To be called once, before [`Target::serve`].
    pub fn remember(&self, known: Option<bool>, store: WriteCacheStore) {
        self.write_cache.set(known);
        let _ = self.write_cache_store.set(store);
    }

    async fn store_write_cache(&self, told: Option<bool>) -> Result<(), Refused> {
        self.write_cache.set(told);
        match self.write_cache_store.get() {
            Some(store) => self
                .unless_stopped(store(told))
                .await
                .unwrap_or_else(|| Err("the disk is being stopped".to_owned()))
                .map_err(|error| Refused::new("remembering the write cache", error)),
            None => Ok(()),
        }
    }

    /// Waits for `done`, but not after the target is told to stop.
    async fn unless_stopped<T>(&self, done: impl Future<Output = T>) -> Option<T> {
        let stopped = self.events.changed.wait_until(|| self.order.get() == Order::Stop);
        match race(stopped, done).await {
            Either::First(()) => None,
            Either::Second(done) => Some(done),
        }
    }

    /// What front ends were told about the write cache, if known.
    pub fn write_cache(&self) -> Option<bool> {
        self.write_cache.get()
    }

    /// The device.
    pub fn device(&self) -> Bdev {
        self.device.borrow().clone()
    }

    /// Gives a quiesced disk another device, which has the same data and the same size. It is used
    /// after [`Target::resume`].
    pub fn replace_device(&self, device: Bdev) {
        self.device.replace(device);
    }

    /// Changes the size of the disk, in bytes, and notifies the guest. Suspends.
    ///
    /// # Errors
    /// As for [`Bdev::resize`].
    pub async fn resize(&self, size_bytes: u64) -> Result<(), bdev::Error> {
        self.device().resize(&self.core, size_bytes).await?;
        self.events.resized.set(true);
        self.events.changed.notify_all();
        Ok(())
    }

    /// Limits the disk's rates. Requests that wait for the old ones notice within 50 ms.
    pub fn set_limits(&self, rates: Rates) {
        self.limits.set(rates, self.core.now_ns());
    }

    /// Limits the bytes per second of writes, beside all other limits; 0 is no limit.
    pub fn limit_writes(&self, bytes_per_second: u64) {
        self.limits.set_writes(bytes_per_second);
    }

    /// Puts the disk into a group whose disks share its limits, or into none.
    pub fn join_group(&self, group: Option<&str>) {
        self.core.local::<LimitGroups>().join(&self.limits, group);
    }

    /// The limits of the disk's own rates, and its group.
    pub fn limits(&self) -> (Rates, Option<String>) {
        (self.limits.own().rates(), self.limits.group().map(|(name, _)| name))
    }

    /// The counters of the rings.
    pub fn stats(&self) -> &[Arc<QueueStats>] {
        &self.stats
    }

    /// Whether the disk has paused because its device has failed a request ([`OnError::Pause`]), or
    /// because somebody else has had its image.
    pub fn is_paused(&self) -> bool {
        self.trouble.is_paused()
    }

    /// Lets a paused disk go on: what waits is submitted again, within 50 ms. Returns false if
    /// it is not paused.
    pub fn go_on(&self) -> bool {
        self.claim_lost();
        self.trouble.resume()
    }

    /// Whether the guest waits for the image's lock.
    pub fn waits_for_lock(&self) -> bool {
        self.lock.is_awaited()
    }

    /// Whether the image may be changed by this process: it is locked, as far as it is to be.
    pub fn may_change(&self) -> bool {
        !self.device().locks_for_use() || self.lock.is_held()
    }

    /// Whether a front end is connected.
    pub fn is_connected(&self) -> bool {
        !matches!(self.front_end.get(), FrontEnd::Absent { .. })
    }

    /// What the front end does.
    pub fn front_end(&self) -> FrontEnd {
        self.front_end.get()
    }

    /// Suspends until the front end does something that is wanted.
    pub async fn until_front_end(&self, wanted: impl Fn(FrontEnd) -> bool) {
        self.events.changed.wait_until(|| wanted(self.front_end.get())).await;
    }

    fn set_front_end(&self, does: FrontEnd) {
        if self.front_end.replace(does) != does {
            self.events.changed.notify_all();
        }
    }

    /// Withholds the disk from its guest until [`Target::admit`]: its rings start and stop, but
    /// take nothing. Does nothing, and returns false, while a ring runs.
    pub fn withhold(&self) -> bool {
        let may = !self.front_end.get().is_running();
        if may {
            self.events.admitted.set(false);
            self.writes_through.set(false);
            self.trouble.withhold();
        }
        may
    }

    /// Gives a disk that is withheld to its guest, which has used it at another node. If it has
    /// `switched` the write cache off there, its front end does not tell, and its writes are made
    /// durable immediately.
    pub fn admit(&self, switched: bool) {
        match self.front_end.get() {
            FrontEnd::Absent { .. } => {
                if switched {
                    self.write_cache.set(Some(false));
                    // The session of a connection that continues may not know it yet.
                    self.writes_through.set(true);
                }
                self.trouble.admit();
            }
            _ => {
                self.writes_through.set(switched);
                self.events.admitted.set(true);
                self.events.changed.notify_all();
            }
        }
    }

    /// Whether the disk is withheld from its guest.
    pub fn is_withheld(&self) -> bool {
        self.trouble.is_withheld()
    }

    /// Tells [`Target::serve`] to return.
    pub fn stop(&self) {
        self.give_order(Order::Stop);
    }

    /// The same, and leaves the front end's connection as a process does that is killed: the
    /// launcher passes it to the next one.
    pub fn leave(&self) {
        self.leaves.set(true);
        self.stop();
    }

    fn give_order(&self, order: Order) {
        self.order.set(order);
        self.events.changed.notify_all();
    }

    /// Quiesces the disk, after its requests at the device have finished. A caller that drops the
    /// future, or no longer wants the disk quiesced, must call [`Target::resume`].
    ///
    /// # Errors
    /// Why the disk cannot be handed over or taken over.
    pub async fn quiesce(&self) -> Result<Export, String> {
        self.forced.set(false);
        self.quiesced().await
    }

    /// Closes the front end's connection of a quiesced disk and exports the disk without it;
    /// [`Target::resume`] does not restore it. Suspends until no operation is in flight.
    ///
    /// # Errors
    /// As for [`Target::quiesce`].
    pub async fn quiesce_disconnected(&self) -> Result<Export, String> {
        self.settled().await;
        self.disconnect.set(true);
        self.quiesced().await
    }

    async fn quiesced(&self) -> Result<Export, String> {
        self.give_order(Order::Quiesce);
        self.exported.wait_for(|| self.export.take()).await
    }

    /// Makes [`Target::quiesce`] stop waiting for the device, if the front end has set an in-flight
    /// region and waits for no reply. [`Target::resume`] must not follow.
    pub fn force(&self) {
        self.forced.set(true);
        self.events.changed.notify_all();
    }

    /// Tells [`Target::serve`] to return without waiting for the device. The in-flight region
    /// records the unfinished requests.
    pub fn stop_now(&self) {
        self.forced.set(true);
        self.stop();
    }

    /// Suspends until no operation of a forcibly quiesced disk is in flight. Only one task may
    /// wait, and only after [`Target::quiesce`].
    pub async fn settled(&self) {
        let operations = self.in_flight.borrow().as_ref().map(|(operations, _)| operations.clone());
        if let Some(operations) = operations {
            operations.wait().await;
        }
    }

    /// Whether the target waits for [`Target::release`].
    pub fn holds(&self) -> bool {
        self.hold.get().is_some()
    }

    /// Reports that no operation of the old process is in flight any more, for a disk that was
    /// forcibly quiesced there. `flush_failed` tells whether a flush has failed there.
    pub fn release(&self, flush_failed: bool) {
        if flush_failed {
            self.device().set_flush_failed();
        }
        self.hold.set(None);
        self.events.changed.notify_all();
    }

    /// Resumes a quiesced disk.
    pub fn resume(&self) {
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
}

/// Limits the rates that the disks of a group share, on the core of the disks.
pub fn set_group_limits(core: &Core, group: &str, rates: Rates) {
    core.local::<LimitGroups>().set(group, rates, core.now_ns());
}

/// Name, limits and number of disks of each group, on the core of the disks.
pub fn limit_groups(core: &Core) -> Vec<(String, Rates, usize)> {
    core.local::<LimitGroups>().all()
}
