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
//!
//! `action` has the actions, `requests` handles each message, `transfer` exports and imports a
//! session. These files and this one use each other: they are one state machine.

mod action;
mod requests;
mod transfer;

use std::os::fd::OwnedFd;

pub use self::action::{Action, Reply};
use self::requests::{Answer, Handler, has_own_reply};
use crate::protocol::config::{Config, feature};
use crate::protocol::message::{
    self, InflightInfo, LogInfo, MEMORY_REGIONS_MAX, Message, RINGS_MAX, RegionInfo, Request,
    Violation, id,
};
use crate::protocol::ring_state::{Kick, Ring, RingState};

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
    pub fn announced_write_cache(&self) -> bool {
        self.write_cache
    }

    /// Makes writes durable when they complete, for a guest that may have been told that there is
    /// no write cache.
    pub fn disable_write_cache(&mut self) {
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
        let answer = Request::decode(message, fds.len()).and_then(|request| {
            Handler { session: self, message, fds, actions: &mut actions }.apply(request)
        });
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

    fn has_active_ring(&self) -> bool {
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
