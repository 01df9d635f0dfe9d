//! A ring as the front end has set it up, and its position.

use crate::protocol::config::feature;
use crate::protocol::message::{PackedBase, RingAddresses};

/// What makes a ring check for requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kick {
    /// Nothing: the ring does not run.
    #[default]
    Unset,
    /// The front end has no kick descriptor: the ring is polled.
    Polling,
    /// The descriptor of [`Action::Kick`](crate::session::Action::Kick).
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
    /// Where to begin: the next avail index, or for packed rings a [`PackedBase`]. An
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
    pub(crate) fn is_enabled(&self, features: u64) -> bool {
        self.enabled || features & feature::PROTOCOL_FEATURES == 0
    }

    /// Whether size, addresses and kick are known.
    pub(crate) fn is_complete(&self) -> bool {
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

/// The position of a ring that is not idle. Nothing of the ring is in flight, except for what the
/// in-flight region records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingProgress {
    /// Next avail index to take; for packed rings the next descriptor.
    pub next_avail: u16,
    /// Packed rings: the wrap counter of `next_avail`.
    pub avail_wrap: bool,
    /// Next used index to fill; for packed rings the next descriptor to use.
    pub next_used: u16,
    /// Packed rings: the wrap counter of `next_used`.
    pub used_wrap: bool,
    /// The used index at the last check whether the guest wants a call.
    pub signalled_used: u16,
    /// The ring is broken and must not be read until it is started again.
    pub broken: bool,
}

impl RingProgress {
    /// The inverse of [`RingProgress::base`]. If nothing is in flight, the base is complete.
    pub fn from_base(base: u32, packed: bool, broken: bool) -> Self {
        if !packed {
            let next = base as u16;
            let same =
                Self { next_avail: next, next_used: next, signalled_used: next, ..Self::default() };
            return Self { broken, ..same };
        }
        let PackedBase { avail, avail_wrap, used, used_wrap } = PackedBase::from_bits(base);
        let signalled_used = used;
        Self { next_avail: avail, avail_wrap, next_used: used, used_wrap, signalled_used, broken }
    }

    /// The position at which the ring continues, in the form of SET_VRING_BASE.
    pub fn base(&self, packed: bool) -> u32 {
        if !packed {
            return self.next_avail.into();
        }
        let (avail, used) = (self.next_avail, self.next_used);
        PackedBase { avail, avail_wrap: self.avail_wrap, used, used_wrap: self.used_wrap }.bits()
    }
}
