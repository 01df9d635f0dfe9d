//! One front end's connection: receives messages, and runs until it ends.
//!
//! `actions` performs the session's actions, `rings` starts, commands and stops the rings. They
//! are parts of [`Connection`] and use each other.

mod actions;
mod rings;

use std::cell::Cell;
use std::future::pending;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use reactor::{Either, UnixSocket, drop_in_background, is_background_full, race};

use crate::memory::dirty::DirtyLog;
use crate::memory::{GuestMemory, account};
use crate::protocol::config::SECTOR_BYTES;
use crate::protocol::handover::{ConnectionState, DiskState, KeptState, Role};
use crate::protocol::kept::Snapshot;
use crate::protocol::message::{Framer, InflightInfo, MEMORY_REGIONS_MAX};
use crate::protocol::ring_state::{RingProgress, RingState};
use crate::protocol::session::{Action, Offer, Session};
use crate::target::disk::config;
use crate::target::link::{DirectLink, Earlier, Link};
use crate::target::observer::FailedFlushes;
use crate::target::queue::{Command, RingEnd, RingHandle};
use crate::target::{FrontEnd, Order, Target};

/// Interval of checks whether [`drop_in_background`] has room, in nanoseconds. It is a thread, so
/// there is no event to wait for.
const FULL_NS: u64 = 1_000_000;

/// Why [`Connection::run`] returns.
pub(super) enum End {
    /// The front end closed the connection.
    Gone,
    /// The disk is being stopped.
    Stopped,
    /// The disk is to be quiesced; the connection stays.
    Quiescing,
    /// The disk is being stopped after it was exported.
    Exported,
    /// The front end violated the protocol, or the system refused a request.
    Failed(String),
}

/// Why an action failed.
pub(super) struct Refused(pub(super) String);

impl Refused {
    pub fn new(what: &str, why: impl std::fmt::Display) -> Refused {
        Refused(format!("{what}: {why}"))
    }
}

/// The descriptors of a ring, and the handle to it while it runs.
#[derive(Default)]
struct RingParts {
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    handle: Option<RingHandle>,
    /// The position of a quiesced ring.
    progress: Option<RingProgress>,
}

enum Next {
    Received(std::io::Result<(usize, Vec<OwnedFd>)>),
    Sent(std::io::Result<()>),
    Ended(RingEnd),
    Resized,
    /// The launcher is to know of it.
    FlushFailed,
    Released,
    Admitted,
    Locked,
    Stop,
    Quiesce,
}

pub(super) struct Connection<'a> {
    target: &'a Target,
    pub(super) link: Link,
    pub(super) session: Session,
    pub(super) memory: Arc<GuestMemory>,
    inflight: Option<(InflightInfo, OwnedFd)>,
    log: Option<(Arc<DirtyLog>, OwnedFd)>,
    log_signal: Option<OwnedFd>,
    channel: Option<UnixSocket>,
    rings: Vec<RingParts>,
    /// Rings were sent commands that may not be executed yet.
    commands_pending: bool,
    /// A ring was started that holds requests.
    holds: bool,
    /// A ring was started that waits for the image's lock.
    waits_for_lock: bool,
    /// Whether the launcher knows that a flush has failed: the next process fails all writes, too.
    flush_failed: Cell<bool>,
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        drop_in_background(self.link.take_descriptors());
        drop_in_background((self.inflight.take(), self.log.take()));
    }
}

impl<'a> Connection<'a> {
    pub(super) fn new(target: &'a Target, link: Link) -> Connection<'a> {
        Connection {
            target,
            link,
            session: Session::new(Connection::offer(target)),
            memory: target.early.take(),
            inflight: None,
            log: None,
            log_signal: None,
            channel: None,
            rings: (0..target.options.queues).map(|_| RingParts::default()).collect(),
            commands_pending: false,
            holds: false,
            waits_for_lock: false,
            flush_failed: Cell::new(false),
        }
    }

    fn offer(target: &Target) -> Offer {
        // The geometry has the current size.
        target.events.resized.set(false);
        let mut config = config(&target.device().geometry(), target.options.queues);
        config.write_cache &= target.write_cache.get() != Some(false);
        let offer = Offer::new(config);
        let memory_regions_max = offer.memory_regions_max.min(account::regions_max());
        Offer { memory_regions_max, ..offer }
    }

    /// Continues a connection of another process. Its rings stay quiesced.
    pub(super) fn adopt(
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
        self.target.write_cache.set(Some(session.announced_write_cache()));
        self.session = session;
        let partial =
            Framer::from_parts(state.partial.clone(), partial).map_err(|error| bad(&error))?;
        if let Link::Direct(direct) = &mut self.link {
            direct.framer = partial;
        }
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

    /// Continues the session of a process that has died.
    pub(super) fn recover(&mut self, earlier: Earlier) -> Result<(), Refused> {
        let bad = |error: &dyn std::fmt::Display| Refused::new("the session", error);
        let state = DiskState::decode(&earlier.document).map_err(|error| bad(&error))?;
        let connection = state.connection.ok_or_else(|| bad(&"it has no connection"))?;
        let recorded = connection.session.inflight.map_or(0, |info| usize::from(info.queues));
        let unrecorded = connection.session.rings.iter().skip(recorded);
        if unrecorded.into_iter().any(|(_, progress)| progress.is_some()) {
            return Err(bad(&"no in-flight region tells which requests are not done"));
        }
        if state.flush_failed {
            self.target.device().set_flush_failed();
        }
        self.target.take_size(state.capacity_sectors.saturating_mul(SECTOR_BYTES));
        self.adopt(&connection, earlier.descriptors, Vec::new())?;
        if self.target.writes_through.take() {
            self.session.disable_write_cache();
        }
        // The other process may have died before it told the front end of a new size.
        self.target.events.resized.set(self.channel.is_some());
        Ok(())
    }

    /// Commits the message that is done, if the launcher has the front end's socket.
    fn commit(&mut self) -> Result<(), Refused> {
        let is_done = matches!(&self.link, Link::Kept(kept) if kept.is_open());
        if !is_done || self.session.is_waiting() {
            return Ok(());
        }
        let snapshot = self.snapshot()?;
        let Link::Kept(kept) = &mut self.link else { return Ok(()) };
        let committed = kept.commit(snapshot);
        committed.map_err(|error| Refused::new("answering the launcher", error))
    }

    /// The session as the launcher keeps it: without the positions of rings.
    fn snapshot(&self) -> Result<Snapshot, Refused> {
        let packed = self.session.packed();
        let progress = |ring| RingProgress::from_base(self.session.ring(ring).base, packed, false);
        let due = || Refused::new("the session", "a reply is due");
        let session = self.session.export(progress).ok_or_else(due)?;
        self.flush_failed.set(self.target.device().flush_failed());
        let roles = session.roles();
        let state = DiskState {
            name: self.target.options.name.clone(),
            capacity_sectors: self.target.device().size_bytes() / SECTOR_BYTES,
            connection: Some(ConnectionState { session, ..ConnectionState::default() }),
            flush_failed: self.flush_failed.get(),
            ..DiskState::default()
        };
        Ok(Snapshot { document: state.encode(), numbers: self.numbers(&roles)? })
    }

    /// The launcher's numbers of the session's descriptors.
    fn numbers(&self, roles: &[Role]) -> Result<Vec<u32>, Refused> {
        let Link::Kept(kept) = &self.link else { return Ok(Vec::new()) };
        let number = |role: &Role| {
            let number = self.raw(*role).and_then(|fd| kept.number(fd));
            number.ok_or_else(|| Refused::new("the session", format!("no number of {role:?}")))
        };
        roles.iter().map(number).collect()
    }

    /// A descriptor of the session.
    fn raw(&self, role: Role) -> Option<RawFd> {
        let Role::Memory(nth) = role else {
            return self.descriptor(role).map(|fd| fd.as_raw_fd());
        };
        let wanted = self.session.regions().get(usize::from(nth))?;
        let regions = self.target.regions.borrow();
        regions.iter().find(|(region, _)| region == wanted).map(|(_, fd)| fd.as_raw_fd())
    }

    /// The state that another process needs, with all rings quiesced; `None` while a reply is due.
    pub(super) fn state(&self) -> Option<ConnectionState> {
        let progress = |ring: u16| self.rings[usize::from(ring)].progress.unwrap_or_default();
        let (partial, descriptors) = self.link.partial();
        let (unsent, unsent_descriptor) = self.link.unsent()?;
        let session = self.session.export(progress)?;
        let kept = match &self.link {
            Link::Direct(_) => None,
            Link::Kept(kept) => {
                let numbers = self.numbers(&session.roles()).ok()?;
                Some(KeptState { pid: kept.pid, numbers })
            }
        };
        Some(ConnectionState {
            session,
            kept,
            partial: partial.to_vec(),
            partial_descriptors: descriptors.len() as u16,
            unsent,
            unsent_descriptor: unsent_descriptor.is_some(),
        })
    }

    /// The descriptors that belong to [`Connection::state`].
    pub(super) fn descriptor(&self, role: Role) -> Option<BorrowedFd<'_>> {
        let ring = |ring: u16| self.rings.get(usize::from(ring));
        match role {
            Role::Connection => Some(self.link.as_fd()),
            Role::Inflight => self.inflight.as_ref().map(|(_, fd)| fd.as_fd()),
            Role::Log => self.log.as_ref().map(|(_, fd)| fd.as_fd()),
            Role::LogSignal => self.log_signal.as_ref().map(AsFd::as_fd),
            Role::BackendChannel => self.channel.as_ref().map(AsFd::as_fd),
            Role::Kick(nth) => ring(nth)?.kick.as_ref().map(AsFd::as_fd),
            Role::Call(nth) => ring(nth)?.call.as_ref().map(AsFd::as_fd),
            Role::Err(nth) => ring(nth)?.err.as_ref().map(AsFd::as_fd),
            Role::Partial(nth) => self.link.partial().1.get(usize::from(nth)).map(AsFd::as_fd),
            Role::Unsent => self.link.unsent()?.1.map(AsFd::as_fd),
            Role::Listener | Role::Mirror | Role::Memory(_) => None,
        }
    }

    /// Runs until the connection ends or the disk must be quiesced. Starts quiesced rings again.
    pub(super) async fn run(&mut self) -> End {
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
                Next::FlushFailed => {
                    self.changed();
                    Ok(())
                }
                Next::Released => {
                    self.release();
                    Ok(())
                }
                Next::Admitted => {
                    self.give_to_guest().await;
                    Ok(())
                }
                Next::Locked => {
                    self.locked();
                    Ok(())
                }
                Next::Quiesce => return End::Quiescing,
                Next::Sent(Ok(())) => Ok(()),
                Next::Sent(Err(error)) => Err(Refused::new("sending a reply", error)),
                Next::Received(Ok((0, _))) => return End::Gone,
                Next::Received(Err(error)) => return End::Failed(format!("receiving: {error}")),
                Next::Ended(ended) => {
                    self.rings[usize::from(ended.index)].handle = None;
                    if self.session.ring(ended.index).state != RingState::Stopping {
                        return End::Failed(format!("ring {} has ended by itself", ended.index));
                    }
                    if self.has_no_ring() {
                        self.target.release_lock().await;
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
            if let Err(Refused(why)) = step.and_then(|()| self.commit()) {
                return End::Failed(why);
            }
            self.note_front_end();
        }
    }

    /// Notes what the front end does.
    pub(in crate::target) fn note_front_end(&self) {
        let runs = |ring: u16| self.session.ring(ring).state != RingState::Idle;
        let moves = self.session.logging();
        let does = match (0..self.session.rings()).any(runs) {
            true => FrontEnd::Running { moves },
            false => FrontEnd::Stopped { moves },
        };
        self.target.set_front_end(does);
    }

    /// The next event. A message that was sent before the last one was answered stays unread.
    async fn next(&mut self, received: &mut Vec<u8>) -> Next {
        let Connection { target, link, session, holds, waits_for_lock, flush_failed, .. } = self;
        let events = &target.events;
        let waits = session.is_waiting();
        let event = events.changed.wait_for(|| {
            if let Some(ended) = events.ended.borrow_mut().pop_front() {
                return Some(Next::Ended(ended));
            }
            if events.resized.take() {
                return Some(Next::Resized);
            }
            if *holds && target.hold.get().is_none() {
                return Some(Next::Released);
            }
            if events.admitted.take() {
                return Some(Next::Admitted);
            }
            if *waits_for_lock && target.lock.is_held() {
                return Some(Next::Locked);
            }
            match target.order.get() {
                Order::Stop => Some(Next::Stop),
                // A reply that is due must be sent first, whether or not the front end reads it.
                Order::Quiesce if !waits => Some(Next::Quiesce),
                Order::Serve | Order::Quiesce => None,
            }
        });
        // Only the launcher has to know: after a kill the next process opens the file anew.
        let is_kept = matches!(link, Link::Kept(_));
        let flushes = target.core.local::<FailedFlushes>();
        let failed = flushes.0.wait_for(|| {
            let is_told = flush_failed.get() || !target.device().flush_failed();
            (is_kept && !waits && !is_told).then_some(Next::FlushFailed)
        });
        let transfer = async {
            match link {
                Link::Direct(direct) if !direct.unsent.is_empty() => {
                    let DirectLink { socket, unsent, .. } = &mut **direct;
                    Next::Sent(unsent.all_sent(&target.core, socket).await)
                }
                _ if waits => pending().await,
                Link::Direct(direct) => {
                    let most = direct.framer.wanted();
                    Next::Received(direct.socket.recv(received, most).await)
                }
                Link::Kept(kept) => Next::Received(kept.receive(received).await),
            }
        };
        match race(race(event, failed), transfer).await {
            Either::First(Either::First(next) | Either::Second(next)) | Either::Second(next) => {
                next
            }
        }
    }

    /// Admits only descriptors whose operations never block. Closing others may take a while; this
    /// waits for it, but not after the disk is told to stop.
    async fn admit(&self, fds: Vec<OwnedFd>) -> Result<Vec<OwnedFd>, Refused> {
        if fds.is_empty() {
            return Ok(fds);
        }
        let refused = |why: &dyn std::fmt::Display| Refused::new("the front end's message", why);
        let admitted = reactor::admit(&self.target.core, fds);
        match self.target.unless_stopped(admitted).await {
            Some(admitted) => admitted.map_err(|error| refused(&error)),
            None => Err(refused(&"the disk stops")),
        }
    }

    /// Handles a message with descriptors. Their last reference is dropped on another thread.
    async fn message_with(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), Refused> {
        let kept: Vec<_> = fds.iter().filter_map(|fd| fd.try_clone().ok()).collect();
        let step = self.message(bytes, fds).await;
        drop_in_background(kept);
        let core = &self.target.core;
        let room = async {
            while is_background_full() {
                core.sleep_ns(FULL_NS).await;
            }
        };
        self.target.unless_stopped(room).await;
        step
    }

    async fn message(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), Refused> {
        let bad = |violation| Refused::new("the front end's message", violation);
        let Some((message, fds)) = self.link.message(bytes, fds).map_err(bad)? else {
            return Ok(());
        };
        let told = self.session.announced_write_cache();
        let mut actions = self.session.handle(&message, fds).map_err(bad)?;
        let tells = self.session.announced_write_cache();
        if tells != told
            && let Err(Refused(why)) = self.target.store_write_cache(Some(tells)).await
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

    /// Gives a disk that was withheld to its guest.
    async fn give_to_guest(&mut self) {
        let target = self.target;
        if target.writes_through.take() && self.session.write_cache() {
            self.session.disable_write_cache();
            self.each_ring(|_| Command::Fua(true));
            self.wait_commands().await;
            self.changed();
            if let Err(Refused(why)) = target.store_write_cache(Some(false)).await {
                tracing::error!(disk = &*target.name, "{why}");
            }
        }
        target.trouble.admit();
        self.rings.iter().filter_map(|parts| parts.handle.as_ref()).for_each(RingHandle::wake);
    }

    /// Tells the launcher that the session has changed without a message: the next process must
    /// know what the guest knows. While a reply is due, the message's commit tells.
    fn changed(&self) {
        if let Link::Kept(kept) = &self.link
            && !self.session.is_waiting()
            && let Ok(snapshot) = self.snapshot()
            && let Err(error) = kept.changed(snapshot)
        {
            tracing::warn!(disk = &*self.target.name, "telling the launcher of a change: {error}");
        }
    }

    /// Tells the rings and the guest the device's new size.
    fn resized(&mut self) {
        let sectors = self.target.device().size_bytes() / SECTOR_BYTES;
        self.each_ring(|connection| Command::Disk(connection.disk()));
        self.changed();
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
}
