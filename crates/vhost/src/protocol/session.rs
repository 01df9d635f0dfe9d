//! One front end's connection: its state, and what the target must do about each message. No I/O.
//!
//! 1. The target passes each message with its descriptors to [`Session::handle`] and performs the
//!    returned [`Action`]s in order. A [`Violation`] closes the connection.
//! 2. An action may fail (for example, a descriptor that cannot be mapped). Then the target skips
//!    the rest, calls [`Reply::refuse`] on the list's last reply and sends it. If there is no reply
//!    that can refuse, it closes the connection.
//! 3. Three replies come later: a stopped ring's base ([`Session::ring_stopped`]), a new in-flight
//!    region ([`Session::inflight_created`]), and the end of a reset, when its last ring has
//!    stopped. Until then [`Session::is_waiting`] is true, and the target does not read the next
//!    message.
//!
//! Descriptors pass through: each is in exactly one action and then belongs to the target; the
//! others are closed here. The session keeps numbers, and which descriptors exist, so that it can
//! be carried to another process ([`Session::export`], [`Session::import`]).
//!
//! # A ring
//!
//! ```text
//!                size, addresses, kick or polling, enabled, features: all known
//!              .------------------------------ StartRing ------------------------------.
//!              |                                                                       v
//!          +------+                                   +--------+  EnableRing(false)  +---------+
//!   ------>| Idle |                                   | Paused |<--- ENABLE 0 --------| Running |
//!          +------+                                   |        |---- ENABLE 1 ------->|         |
//!              ^                                      +--------+  EnableRing(true)   +---------+
//!              |                                           |  GET_VRING_BASE, RESET_DEVICE  |
//!              |  ring_stopped(base): reply                v           StopRing             |
//!              |  (after the last one of a reset)     +----------+                          |
//!              '--------------------------------------| Stopping |<-------------------------'
//!                                                     +----------+
//! ```
//!
//! A *running* ring is popped. A *paused* ring is not popped, but finishes the requests in flight.
//! A *stopping* ring also finishes them, and then no longer touches guest memory. GET_VRING_BASE of
//! an idle ring is answered immediately. GET_VRING_BASE removes the kick and call descriptors and
//! keeps size, addresses and the enabled flag: the next kick descriptor starts the ring again. A
//! front end may enable rings that it never sets up (SeaBIOS uses one of several), so enabling only
//! sets a flag. Without the feature PROTOCOL_FEATURES rings count as enabled.
//!
//! # Faults of the guest
//!
//! A ring's size and addresses are the guest's choice. Sizes that are not powers of two, unaligned
//! addresses and addresses outside memory are not violations: the target starts the ring, finds it
//! broken and signals its err descriptor. The connection stays open, and GET_VRING_BASE of the
//! broken ring is answered as usual.
//!
//! # Refusals
//!
//! A request that cannot be obeyed changes nothing. If the front end requested an acknowledgement,
//! it gets a failing one and the connection stays open. Otherwise the front end would assume
//! success, so the connection is closed. Unknown requests are counted and ignored, unless they need
//! a reply: no front end can rely on them.

use std::os::fd::OwnedFd;

use crate::protocol::config::{Config, WRITE_CACHE_OFFSET, feature};
use crate::protocol::handover::{HandoverError, RingProgress, Role, SessionState};
use crate::protocol::message::{
    self, InflightInfo, LogInfo, Message, RING_SIZE_MAX, RINGS_MAX, RegionInfo, Request,
    RingAddresses, Violation, id,
};

/// Bits of the protocol features.
#[expect(missing_docs, reason = "the names are the specification's")]
pub mod protocol_feature {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    /// The features that this session implements. QEMU acknowledges every offered bit from 0 to 16,
    /// even if it does not implement it, so nothing else may be offered.
    pub const IMPLEMENTED: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS;
}

/// Features that the ring code depends on: they cannot change while a ring is not idle.
const RING_FEATURES: u64 =
    feature::INDIRECT_DESC | feature::EVENT_IDX | feature::VERSION_1 | feature::RING_PACKED;

/// Default limit of memory regions: as many as QEMU and the Linux kernel support.
pub const MEMORY_REGIONS_MAX: u16 = 509;

/// What a disk offers to the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Virtio features; [`Config::features`].
    pub features: u64,
    /// Protocol features. Those not in [`protocol_feature::IMPLEMENTED`] are not offered.
    pub protocol_features: u64,
    /// Most memory regions at a time.
    pub memory_regions_max: u16,
    /// The disk.
    pub config: Config,
}

impl Offer {
    /// Offers everything that this disk supports.
    pub fn new(config: Config) -> Self {
        Self {
            features: config.features(),
            protocol_features: protocol_feature::IMPLEMENTED,
            memory_regions_max: MEMORY_REGIONS_MAX,
            config,
        }
    }
}

/// Bytes for the front end, and a descriptor that goes with the first byte.
#[derive(Debug)]
pub struct Reply {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// Descriptor.
    pub fd: Option<OwnedFd>,
    /// The request, if this is only an acknowledgement.
    acknowledges: Option<u32>,
}

impl Reply {
    fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, fd: None, acknowledges: None }
    }

    fn acknowledge(request: u32) -> Self {
        Self { bytes: message::reply_u64(request, 0), fd: None, acknowledges: Some(request) }
    }

    /// Turns an acknowledgement into a refusal after a failed action. Returns `false` if this is
    /// not an acknowledgement: then the connection must be closed.
    #[must_use]
    pub fn refuse(&mut self) -> bool {
        if let Some(request) = self.acknowledges {
            self.bytes = message::reply_u64(request, 1);
        }
        self.acknowledges.is_some()
    }
}

/// An instruction to the target.
#[derive(Debug)]
pub enum Action {
    /// Send this.
    Reply(Reply),
    /// [`Session::features`] changed, and perhaps [`Session::logging`]. Requests that are in flight
    /// now are logged by the new rule.
    FeaturesChanged,
    /// `true`: writes may stay in volatile caches until the guest flushes. `false`: they must be
    /// durable when they complete.
    WriteCache(bool),
    /// Replace all regions by these. Active rings continue with the new memory.
    ReplaceMemory(Vec<(RegionInfo, OwnedFd)>),
    /// Add a region. If it cannot be mapped: [`Session::forget_region`].
    AddRegion(RegionInfo, OwnedFd),
    /// Remove a region. Its memory stays mapped for requests in flight.
    RemoveRegion(RegionInfo),
    /// Rings that start from now on record their requests in this region and recover those found in
    /// it.
    Inflight(InflightInfo, OwnedFd),
    /// Rings that start from now on do not record their requests.
    DropInflight,
    /// Create a zeroed region for this many rings with this many entries each, packed or split
    /// according to [`Session::features`]. Then call [`Session::inflight_created`].
    CreateInflight {
        /// Rings.
        queues: u16,
        /// Entries for each.
        queue_size: u16,
    },
    /// Use this dirty log. Writes that complete after the reply are logged here.
    Log(LogInfo, OwnedFd),
    /// Signalled after the dirty log has changed.
    LogSignal(OwnedFd),
    /// The channel on which the target sends the message of [`Session::set_capacity`].
    BackendChannel(OwnedFd),
    /// Replace the ring's kick descriptor and close the old one.
    Kick(u16, Option<OwnedFd>),
    /// Replace the ring's call descriptor and close the old one.
    Call(u16, Option<OwnedFd>),
    /// Replace the ring's err descriptor and close the old one.
    Err(u16, Option<OwnedFd>),
    /// Start the ring as described by [`Session::ring`]: recover its requests in flight, and check
    /// for new ones without waiting for a kick.
    StartRing(u16),
    /// Resume popping (and check for requests), or pause it.
    EnableRing(u16, bool),
    /// The ring's [`Ring::log`] changed.
    RingLog(u16),
    /// Stop popping, finish the requests in flight, leave guest memory alone, then call
    /// [`Session::ring_stopped`].
    StopRing(u16),
}

/// What makes a ring check for requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kick {
    /// Nothing: the ring does not run.
    #[default]
    Unset,
    /// The front end has no kick descriptor: the ring is polled.
    Polling,
    /// The descriptor of [`Action::Kick`].
    Descriptor,
}

/// A ring's state; see the picture in the text of [`crate::session`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the module describes them")]
pub enum RingState {
    #[default]
    Idle,
    Running,
    Paused,
    Stopping,
}

/// A ring as the front end has set it up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    /// Number of descriptors; 0 if unknown.
    pub size: u16,
    /// Where to begin: the next avail index, or for packed rings a [`message::PackedBase`]. An
    /// in-flight region that has been used takes precedence.
    pub base: u32,
    /// The ring's addresses, if known.
    pub addresses: Option<RingAddresses>,
    /// The guest physical address of the used ring, if writes to it are logged.
    pub log: Option<u64>,
    /// The last value of SET_VRING_ENABLE.
    pub enabled: bool,
    /// How the ring is woken.
    pub kick: Kick,
    /// Whether there is a call descriptor.
    pub call: bool,
    /// Whether there is an err descriptor.
    pub err: bool,
    /// The ring's state.
    pub state: RingState,
}

impl Ring {
    /// Whether the ring may be popped once it is complete.
    fn is_enabled(&self, features: u64) -> bool {
        self.enabled || features & feature::PROTOCOL_FEATURES == 0
    }

    /// Whether size, addresses and kick are known.
    fn is_complete(&self) -> bool {
        self.size != 0 && self.addresses.is_some() && self.kick != Kick::Unset
    }

    /// The states that this ring can be in while no reply is due.
    pub(crate) fn possible_states(&self, features: u64) -> &'static [RingState] {
        match (self.is_complete(), self.is_enabled(features)) {
            (false, _) => &[RingState::Idle],
            (true, false) => &[RingState::Idle, RingState::Paused],
            (true, true) => &[RingState::Running],
        }
    }
}

/// Message counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// All messages.
    pub messages: u64,
    /// Unknown requests.
    pub unknown: u64,
    /// Requests refused with a failing acknowledgement.
    pub refused: u64,
}

/// A reply that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    /// To GET_VRING_BASE.
    Base(u16),
    /// To RESET_DEVICE, after this many rings have stopped.
    Reset { rings: u16, acknowledge: bool },
    /// To GET_INFLIGHT_FD. The reply has the form of a request with a payload of this length.
    Inflight { payload_bytes: usize },
}

/// How a request is answered.
enum Answer {
    /// By a reply of its own, now or later, or not at all.
    Own,
    /// By an acknowledgement, if one was requested.
    Acknowledge,
    /// By a failing acknowledgement, if one was requested.
    Refuse,
}

/// The state of a connection.
#[derive(Debug)]
pub struct Session {
    offer: Offer,
    features: Option<u64>,
    protocol_features: u64,
    owned: bool,
    write_cache: bool,
    regions: Vec<RegionInfo>,
    inflight: Option<InflightInfo>,
    log: Option<LogInfo>,
    log_signal: bool,
    backend_channel: bool,
    rings: Vec<Ring>,
    waiting: Option<Waiting>,
    counters: Counters,
    last_refusal: Option<Violation>,
}

impl Session {
    /// A new connection.
    ///
    /// # Panics
    /// If the disk has no ring, or more than [`RINGS_MAX`].
    pub fn new(offer: Offer) -> Self {
        let queues = offer.config.queues;
        assert!((1..=RINGS_MAX).contains(&queues), "a disk has 1 to {RINGS_MAX} rings");
        let protocol_features = offer.protocol_features & protocol_feature::IMPLEMENTED;
        let features = offer.features | feature::PROTOCOL_FEATURES;
        Self {
            offer: Offer { features, protocol_features, ..offer },
            features: None,
            protocol_features: 0,
            owned: false,
            write_cache: offer.config.write_cache,
            regions: Vec::new(),
            inflight: None,
            log: None,
            log_signal: false,
            backend_channel: false,
            rings: vec![Ring::default(); usize::from(queues)],
            waiting: None,
            counters: Counters::default(),
            last_refusal: None,
        }
    }

    /// The virtio features that the front end acknowledged; 0 until then.
    pub fn features(&self) -> u64 {
        self.features.unwrap_or(0)
    }

    /// Whether rings are packed.
    pub fn packed(&self) -> bool {
        self.features() & feature::RING_PACKED != 0
    }

    /// Whether writes to guest memory are recorded in the dirty log.
    pub fn logging(&self) -> bool {
        self.features() & feature::LOG_ALL != 0 && self.log.is_some()
    }

    /// Whether writes may stay in volatile caches. False until the guest has acknowledged FLUSH:
    /// until then it may never flush.
    pub fn write_cache(&self) -> bool {
        self.write_cache && self.features() & feature::FLUSH != 0
    }

    /// The write cache byte of the configuration space, whatever the guest has acknowledged.
    pub fn told_write_cache(&self) -> bool {
        self.write_cache
    }

    /// Makes writes durable when they complete, for a guest that may have been told that there is
    /// no write cache.
    pub fn distrust_write_cache(&mut self) {
        self.write_cache = false;
    }

    /// Number of rings of the device, used or not.
    pub fn rings(&self) -> u16 {
        self.offer.config.queues
    }

    /// A ring as the front end has set it up.
    ///
    /// # Panics
    /// If the device does not have this ring.
    pub fn ring(&self, ring: u16) -> &Ring {
        &self.rings[usize::from(ring)]
    }

    /// The guest's memory regions, in the order in which they were added.
    pub fn regions(&self) -> &[RegionInfo] {
        &self.regions
    }

    /// The in-flight region that rings use.
    pub fn inflight(&self) -> Option<&InflightInfo> {
        self.inflight.as_ref()
    }

    /// Whether a reply is due that depends on the target. The next message must not be handled
    /// before it is sent.
    pub fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Message counters.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Why the latest refused request was refused.
    pub fn last_refusal(&self) -> Option<Violation> {
        self.last_refusal
    }

    /// Sets the disk's size. Returns the message for the backend channel that makes the front end
    /// read it, if there is a channel.
    pub fn set_capacity(&mut self, capacity_sectors: u64) -> Option<Vec<u8>> {
        self.offer.config.capacity_sectors = capacity_sectors;
        self.backend_channel.then(message::config_change)
    }

    /// Removes the region of a failed [`Action::AddRegion`].
    pub fn forget_region(&mut self, region: &RegionInfo) {
        self.regions.retain(|known| known != region);
    }

    /// Drops the backend channel: its [`Action::BackendChannel`] failed, or it no longer works.
    pub fn forget_backend_channel(&mut self) {
        self.backend_channel = false;
    }

    /// Restores the regions after a failed [`Action::ReplaceMemory`].
    pub fn keep_regions(&mut self, regions: impl Iterator<Item = RegionInfo>) {
        self.regions = regions.collect();
    }

    /// Handles a message and returns the actions to perform.
    ///
    /// # Errors
    /// The connection must be closed, and the reason logged. All descriptors of the message are
    /// closed.
    pub fn handle(
        &mut self,
        message: &Message,
        fds: Vec<OwnedFd>,
    ) -> Result<Vec<Action>, Violation> {
        self.counters.messages += 1;
        let mut actions = Vec::new();
        let answer = Request::decode(message, fds.len())
            .and_then(|request| self.apply(message, request, fds, &mut actions));
        let acknowledge = message.needs_reply()
            && self.protocol_features & protocol_feature::REPLY_ACK != 0
            && !has_own_reply(message.request);
        match answer {
            Ok(Answer::Own) => {}
            Ok(Answer::Acknowledge) => {
                if acknowledge {
                    actions.push(Action::Reply(Reply::acknowledge(message.request)));
                }
            }
            Ok(Answer::Refuse) => {
                if acknowledge {
                    let bytes = message::reply_u64(message.request, 1);
                    actions.push(Action::Reply(Reply::new(bytes)));
                }
            }
            Err(violation) => {
                debug_assert!(actions.is_empty(), "a refused request changes nothing");
                self.last_refusal = Some(violation);
                if !acknowledge {
                    return Err(violation);
                }
                self.counters.refused += 1;
                let bytes = message::reply_u64(message.request, 1);
                actions.push(Action::Reply(Reply::new(bytes)));
            }
        }
        Ok(actions)
    }

    /// Reports that a ring is quiesced: every popped request is completed and pushed. `base` is
    /// where it continues.
    ///
    /// # Panics
    /// If the ring was not told to stop.
    pub fn ring_stopped(&mut self, ring: u16, base: u32) -> Vec<Action> {
        let stopped = &mut self.rings[usize::from(ring)];
        assert_eq!(stopped.state, RingState::Stopping, "ring {ring} was not told to stop");
        stopped.state = RingState::Idle;
        stopped.base = base;
        let mut actions = Vec::new();
        match self.waiting {
            Some(Waiting::Base(_)) => {
                self.waiting = None;
                self.answer_base(ring, &mut actions);
            }
            Some(Waiting::Reset { rings: 1, acknowledge }) => {
                self.waiting = None;
                self.reset(&mut actions);
                if acknowledge {
                    actions.push(Action::Reply(Reply::acknowledge(id::RESET_DEVICE)));
                }
            }
            Some(Waiting::Reset { rings, acknowledge }) => {
                self.waiting = Some(Waiting::Reset { rings: rings - 1, acknowledge });
            }
            Some(Waiting::Inflight { .. }) | None => {
                unreachable!("a ring stops only while its stop is waited for")
            }
        }
        actions
    }

    /// Reports the region that [`Action::CreateInflight`] requested. The front end returns it with
    /// SET_INFLIGHT_FD.
    ///
    /// # Panics
    /// If none was requested.
    pub fn inflight_created(&mut self, area: &InflightInfo, fd: OwnedFd) -> Vec<Action> {
        let Some(Waiting::Inflight { payload_bytes }) = self.waiting.take() else {
            panic!("no in-flight region was asked for");
        };
        let bytes = message::reply_inflight(area, payload_bytes);
        vec![Action::Reply(Reply { bytes, fd: Some(fd), acknowledges: None })]
    }

    /// Exports the state in numbers, to be carried to another process. The target has the
    /// descriptors. `progress` returns the position of each active ring. Returns `None` while a
    /// reply is due.
    pub fn export(&self, mut progress: impl FnMut(u16) -> RingProgress) -> Option<SessionState> {
        if self.is_waiting() {
            return None;
        }
        let rings = (0u16..)
            .zip(&self.rings)
            .map(|(i, ring)| (*ring, (ring.state != RingState::Idle).then(|| progress(i))));
        Some(SessionState {
            features: self.features,
            protocol_features: self.protocol_features,
            owned: self.owned,
            write_cache: self.write_cache,
            regions: self.regions.clone(),
            inflight: self.inflight,
            log: self.log,
            log_signal: self.log_signal,
            backend_channel: self.backend_channel,
            rings: rings.collect(),
        })
    }

    /// Continues an exported session. Returns it with the actions that bring the target into the
    /// same state: the same as if the front end had sent everything again. `fds` are in the order
    /// of [`SessionState::roles`]. Active rings start from their [`RingProgress`], which the target
    /// finds in `state`.
    ///
    /// # Errors
    /// If the disk's offer no longer fits what the front end acknowledged, or if descriptors are
    /// missing. All descriptors are closed.
    pub fn import(
        offer: Offer,
        state: &SessionState,
        fds: Vec<OwnedFd>,
    ) -> Result<(Self, Vec<Action>), HandoverError> {
        let mut session = Self::new(offer);
        for (acknowledged, offered) in [
            (state.features.unwrap_or(0), session.offer.features),
            (state.protocol_features, session.offer.protocol_features),
        ] {
            if acknowledged & !offered != 0 {
                return Err(HandoverError::NotOffered { bits: acknowledged & !offered });
            }
        }
        let (expected, found) = (session.rings.len(), state.rings.len());
        if expected != found {
            return Err(HandoverError::Rings { expected, found });
        }
        if state.regions.len() > usize::from(offer.memory_regions_max) {
            return Err(HandoverError::Regions);
        }
        let roles = state.roles();
        if roles.len() != fds.len() {
            return Err(HandoverError::Descriptors { expected: roles.len(), found: fds.len() });
        }

        let mut actions = Vec::new();
        session.write_cache = state.write_cache;
        session.set_features(state.features, &mut actions);
        session.protocol_features = state.protocol_features;
        session.owned = state.owned;
        session.regions.clone_from(&state.regions);
        session.inflight = state.inflight;
        session.log = state.log;
        session.log_signal = state.log_signal;
        session.backend_channel = state.backend_channel;
        session.rings = state.rings.iter().map(|(ring, _)| *ring).collect();

        let mut regions = Vec::new();
        let mut descriptors = Vec::new();
        for (role, fd) in roles.into_iter().zip(fds) {
            match (role, state.inflight, state.log) {
                (Role::Memory(i), ..) => regions.push((state.regions[usize::from(i)], fd)),
                (Role::Inflight, Some(area), _) => descriptors.push(Action::Inflight(area, fd)),
                (Role::Log, _, Some(area)) => descriptors.push(Action::Log(area, fd)),
                (Role::LogSignal, ..) => descriptors.push(Action::LogSignal(fd)),
                (Role::BackendChannel, ..) => descriptors.push(Action::BackendChannel(fd)),
                (Role::Kick(i), ..) => descriptors.push(Action::Kick(i, Some(fd))),
                (Role::Call(i), ..) => descriptors.push(Action::Call(i, Some(fd))),
                (Role::Err(i), ..) => descriptors.push(Action::Err(i, Some(fd))),
                (role, ..) => unreachable!("a session has no {role:?}"),
            }
        }
        if !regions.is_empty() {
            actions.push(Action::ReplaceMemory(regions));
        }
        actions.append(&mut descriptors);
        for (i, ring) in (0u16..).zip(&session.rings) {
            if ring.state != RingState::Idle {
                actions.push(Action::StartRing(i));
            }
            if ring.state == RingState::Paused {
                actions.push(Action::EnableRing(i, false));
            }
        }
        Ok((session, actions))
    }

    /// Obeys a request, or changes nothing and returns the reason.
    fn apply(
        &mut self,
        message: &Message,
        request: Request,
        mut fds: Vec<OwnedFd>,
        actions: &mut Vec<Action>,
    ) -> Result<Answer, Violation> {
        let refused = |reason| Err(Violation::Refused { request: message.request, reason });
        if self.is_waiting() {
            return refused("sent before the previous request was answered");
        }
        let mut reply = |bytes| actions.push(Action::Reply(Reply::new(bytes)));
        match request {
            Request::GetFeatures => {
                reply(message::reply_u64(message.request, self.offer.features));
                return Ok(Answer::Own);
            }
            Request::GetProtocolFeatures => {
                reply(message::reply_u64(message.request, self.offer.protocol_features));
                return Ok(Answer::Own);
            }
            Request::GetQueueNum => {
                reply(message::reply_u64(message.request, self.rings().into()));
                return Ok(Answer::Own);
            }
            Request::GetMaxMemSlots => {
                reply(message::reply_u64(message.request, self.offer.memory_regions_max.into()));
                return Ok(Answer::Own);
            }
            Request::GetConfig { offset, size, flags } => {
                let bytes = self.offer.config.read(self.write_cache, offset, size);
                reply(message::reply_config(offset, flags, &bytes.unwrap_or_default()));
                return Ok(Answer::Own);
            }
            Request::GetInflightFd(InflightInfo { queues, queue_size, .. }) => {
                if !(1..=self.rings()).contains(&queues)
                    || !(1..=RING_SIZE_MAX).contains(&queue_size)
                {
                    return refused(
                        "an in-flight region for an impossible number or size of rings",
                    );
                }
                self.waiting = Some(Waiting::Inflight { payload_bytes: message.payload.len() });
                actions.push(Action::CreateInflight { queues, queue_size });
                return Ok(Answer::Own);
            }
            Request::GetVringBase { ring } => {
                let ring = self.known_ring(message, ring)?;
                let state = &mut self.rings[usize::from(ring)].state;
                if *state == RingState::Idle {
                    self.answer_base(ring, actions);
                } else {
                    *state = RingState::Stopping;
                    self.waiting = Some(Waiting::Base(ring));
                    actions.push(Action::StopRing(ring));
                }
                return Ok(Answer::Own);
            }

            Request::SetFeatures(bits) => {
                let unknown = bits & !self.offer.features;
                if unknown != 0 {
                    return Err(Violation::NotOffered { request: message.request, bits: unknown });
                }
                let changed = bits ^ self.features();
                if changed & RING_FEATURES != 0 && self.rings_at_work() {
                    return refused("ring features changed while a ring is active");
                }
                self.set_features(Some(bits), actions);
                for ring in 0..self.rings() {
                    self.update_ring(ring, actions);
                }
            }
            Request::SetProtocolFeatures(bits) => {
                let unknown = bits & !self.offer.protocol_features;
                if unknown != 0 {
                    return Err(Violation::NotOffered { request: message.request, bits: unknown });
                }
                self.protocol_features = bits;
            }
            Request::SetOwner => self.owned = true,
            // Deprecated by the specification: some front ends sent it at unexpected times.
            Request::ResetOwner => {}

            Request::SetMemTable(regions) => {
                if regions.len() > usize::from(self.offer.memory_regions_max) {
                    return refused("too many memory regions");
                }
                for (i, region) in regions.iter().enumerate() {
                    if let Err(reason) = check_region(region, &regions[..i]) {
                        return refused(reason);
                    }
                }
                self.regions.clone_from(&regions);
                actions.push(Action::ReplaceMemory(regions.into_iter().zip(fds).collect()));
            }
            Request::AddMemReg(region) => {
                if self.regions.len() >= usize::from(self.offer.memory_regions_max) {
                    return refused("too many memory regions");
                }
                if let Err(reason) = check_region(&region, &self.regions) {
                    return refused(reason);
                }
                self.regions.push(region);
                actions.extend(fds.pop().map(|fd| Action::AddRegion(region, fd)));
            }
            Request::RemMemReg(region) => {
                let same = |known: &RegionInfo| {
                    RegionInfo { mmap_offset: 0, ..*known }
                        == RegionInfo { mmap_offset: 0, ..region }
                };
                let Some(at) = self.regions.iter().position(same) else {
                    return refused("no such memory region");
                };
                actions.push(Action::RemoveRegion(self.regions.remove(at)));
            }

            Request::SetLogBase(None) => return refused("dirty log without shared memory"),
            Request::SetLogBase(Some(area)) => {
                if self.protocol_features & protocol_feature::LOG_SHMFD == 0 {
                    return refused("dirty log in shared memory was not negotiated");
                }
                if !area.is_possible() {
                    return refused("impossible dirty log size");
                }
                self.log = Some(area);
                actions.extend(fds.pop().map(|fd| Action::Log(area, fd)));
                let bytes = message::reply_u64(message.request, 0);
                actions.push(Action::Reply(Reply::new(bytes)));
                return Ok(Answer::Own);
            }
            Request::SetLogFd => {
                self.log_signal = true;
                actions.extend(fds.pop().map(Action::LogSignal));
            }
            Request::SetInflightFd(area) => {
                if self.rings_at_work() {
                    return refused("in-flight region changed while a ring is active");
                }
                if !area.is_possible() {
                    return refused("impossible in-flight region size");
                }
                self.inflight = Some(area);
                actions.extend(fds.pop().map(|fd| Action::Inflight(area, fd)));
            }
            Request::SetBackendReqFd => {
                self.backend_channel = true;
                actions.extend(fds.pop().map(Action::BackendChannel));
            }
            Request::SetConfig { offset, flags, bytes } => {
                let ([value @ (0 | 1)], WRITE_CACHE_OFFSET, 0) = (&bytes[..], offset, flags) else {
                    return refused("only the write cache can be configured");
                };
                if self.offer.features & feature::CONFIG_WCE == 0 {
                    return refused("the write cache cannot be configured");
                }
                let before = self.write_cache();
                self.write_cache = *value == 1;
                if self.write_cache() != before {
                    actions.push(Action::WriteCache(!before));
                }
            }

            Request::SetVringNum { ring, size } => {
                let ring = self.known_ring(message, ring)?;
                let Some(size) =
                    u16::try_from(size).ok().filter(|n| (1..=RING_SIZE_MAX).contains(n))
                else {
                    return refused("impossible ring size");
                };
                let known = &mut self.rings[usize::from(ring)];
                if known.state != RingState::Idle && known.size != size {
                    return refused("size of an active ring changed");
                }
                known.size = size;
                self.update_ring(ring, actions);
            }
            Request::SetVringBase { ring, base } => {
                let ring = self.known_ring(message, ring)?;
                if !self.packed() && base > u16::MAX.into() {
                    return refused("base is not an index");
                }
                let known = &mut self.rings[usize::from(ring)];
                if known.state != RingState::Idle {
                    return refused("base of an active ring changed");
                }
                known.base = base;
            }
            Request::SetVringAddr { ring, addresses, log } => {
                let ring = self.known_ring(message, ring)?;
                let known = &mut self.rings[usize::from(ring)];
                if known.state != RingState::Idle {
                    if known.addresses != Some(addresses) {
                        return refused("addresses of an active ring changed");
                    }
                    if known.log != log {
                        actions.push(Action::RingLog(ring));
                    }
                }
                known.addresses = Some(addresses);
                known.log = log;
                self.update_ring(ring, actions);
            }
            Request::SetVringKick { ring } => {
                let ring = self.known_ring(message, ring)?;
                let fd = fds.pop();
                self.rings[usize::from(ring)].kick =
                    if fd.is_some() { Kick::Descriptor } else { Kick::Polling };
                actions.push(Action::Kick(ring, fd));
                self.update_ring(ring, actions);
            }
            Request::SetVringCall { ring } => {
                let ring = self.known_ring(message, ring)?;
                let fd = fds.pop();
                self.rings[usize::from(ring)].call = fd.is_some();
                actions.push(Action::Call(ring, fd));
            }
            Request::SetVringErr { ring } => {
                let ring = self.known_ring(message, ring)?;
                let fd = fds.pop();
                self.rings[usize::from(ring)].err = fd.is_some();
                actions.push(Action::Err(ring, fd));
            }
            Request::SetVringEnable { ring, enable } => {
                let ring = self.known_ring(message, ring)?;
                self.rings[usize::from(ring)].enabled = enable;
                self.update_ring(ring, actions);
            }

            Request::ResetDevice => {
                let mut stopping = 0;
                for (i, ring) in (0u16..).zip(&mut self.rings) {
                    ring.enabled = false;
                    if ring.state != RingState::Idle {
                        ring.state = RingState::Stopping;
                        actions.push(Action::StopRing(i));
                        stopping += 1;
                    }
                }
                if stopping > 0 {
                    let acknowledge = message.needs_reply()
                        && self.protocol_features & protocol_feature::REPLY_ACK != 0;
                    self.waiting = Some(Waiting::Reset { rings: stopping, acknowledge });
                    return Ok(Answer::Own);
                }
                self.reset(actions);
            }
            Request::Unknown => {
                if has_own_reply(message.request) {
                    return Err(Violation::Unanswerable { request: message.request });
                }
                self.counters.unknown += 1;
                return Ok(Answer::Refuse);
            }
        }
        Ok(Answer::Acknowledge)
    }

    fn known_ring(&self, message: &Message, ring: u32) -> Result<u16, Violation> {
        match u16::try_from(ring) {
            Ok(known) if known < self.rings() => Ok(known),
            _ => Err(Violation::NoSuchRing { request: message.request, ring }),
        }
    }

    fn rings_at_work(&self) -> bool {
        self.rings.iter().any(|ring| ring.state != RingState::Idle)
    }

    fn set_features(&mut self, features: Option<u64>, actions: &mut Vec<Action>) {
        let write_cache = self.write_cache();
        if self.features != features {
            self.features = features;
            actions.push(Action::FeaturesChanged);
        }
        if self.write_cache() != write_cache {
            actions.push(Action::WriteCache(!write_cache));
        }
    }

    /// Moves the ring between idle, running and paused after one of the conditions has changed.
    fn update_ring(&mut self, ring: u16, actions: &mut Vec<Action>) {
        let Some(features) = self.features else {
            return;
        };
        let known = &mut self.rings[usize::from(ring)];
        let (enabled, complete) = (known.is_enabled(features), known.is_complete());
        known.state = match known.state {
            RingState::Idle if enabled && complete => {
                actions.push(Action::StartRing(ring));
                RingState::Running
            }
            RingState::Running if !enabled => {
                actions.push(Action::EnableRing(ring, false));
                RingState::Paused
            }
            RingState::Paused if enabled => {
                actions.push(Action::EnableRing(ring, true));
                RingState::Running
            }
            state => state,
        };
    }

    /// Answers GET_VRING_BASE of an idle ring.
    fn answer_base(&mut self, ring: u16, actions: &mut Vec<Action>) {
        let known = &mut self.rings[usize::from(ring)];
        if known.kick == Kick::Descriptor {
            actions.push(Action::Kick(ring, None));
        }
        if known.call {
            actions.push(Action::Call(ring, None));
        }
        known.kick = Kick::Unset;
        known.call = false;
        let bytes = message::reply_vring_base(ring.into(), known.base);
        actions.push(Action::Reply(Reply::new(bytes)));
    }

    /// Ends RESET_DEVICE, when all rings are idle. The connection's state stays: owner, protocol
    /// features, memory, dirty log, backend channel, and the call and err descriptors, which some
    /// front ends send only once. The in-flight region is dropped: it counts requests of rings that
    /// now start from the beginning. The write cache stays: QEMU does not read it again, and tells
    /// the guest the old value.
    fn reset(&mut self, actions: &mut Vec<Action>) {
        for (i, ring) in (0u16..).zip(&mut self.rings) {
            if ring.kick == Kick::Descriptor {
                actions.push(Action::Kick(i, None));
            }
            *ring = Ring { call: ring.call, err: ring.err, ..Ring::default() };
        }
        if self.inflight.take().is_some() {
            actions.push(Action::DropInflight);
        }
        self.set_features(None, actions);
    }
}

/// Whether the request has a reply other than an acknowledgement.
fn has_own_reply(request: u32) -> bool {
    matches!(
        request,
        id::GET_FEATURES
            | id::SET_LOG_BASE
            | id::GET_VRING_BASE
            | id::GET_PROTOCOL_FEATURES
            | id::GET_QUEUE_NUM
            | id::GET_CONFIG
            | id::CREATE_CRYPTO_SESSION
            | id::POSTCOPY_ADVISE
            | id::POSTCOPY_END
            | id::GET_INFLIGHT_FD
            | id::GET_MAX_MEM_SLOTS
            | id::GET_STATUS
            | id::GET_SHARED_OBJECT
            | id::SET_DEVICE_STATE_FD
            | id::CHECK_DEVICE_STATE
            | id::GET_SHMEM_CONFIG
    )
}

/// Checks a region against the others.
pub(crate) fn check_region(region: &RegionInfo, others: &[RegionInfo]) -> Result<(), &'static str> {
    if region.size == 0 {
        return Err("empty memory region");
    }
    // The end must not be 2^64 either, so that no sum below overflows.
    let end = |start: u64| start.checked_add(region.size);
    let (Some(guest_end), Some(_), Some(_)) =
        (end(region.guest_addr), end(region.user_addr), end(region.mmap_offset))
    else {
        return Err("memory region beyond the address space");
    };
    // Regions may overlap in the front end: it may map the same memory at two guest addresses.
    for other in others {
        if region.guest_addr < other.guest_addr + other.size && other.guest_addr < guest_end {
            return Err("memory regions overlap in the guest");
        }
    }
    Ok(())
}
