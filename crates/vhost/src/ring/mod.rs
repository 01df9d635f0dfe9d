//! A ring of either format, and what both formats share.
//!
//! In one turn of a queue's poller, [`Ring::pop`] takes a batch of chains, records them in the
//! in-flight region and parses them. The poller submits the [`Ring::request`] of each tag to the
//! device. [`Ring::complete`] returns a batch to the guest, and [`Ring::should_signal`] tells
//! whether the guest wants an interrupt. Before the core sleeps, the poller calls
//! [`Ring::arm_kick`]; after it wakes, [`Ring::disarm_kick`].
//!
//! A ring belongs to one core. An invalid request is answered with a status. An inconsistency of
//! the ring itself breaks it: it pops and completes nothing more until the front end stops it and
//! starts a new one. Between pop and completion a request is named by its tag, which is the head or
//! the buffer id that the guest chose, so tags need no lookup.
//!
//! From the bottom: `setup` has the arguments and the faults, `request` parses chains, `inflight`
//! is the in-flight region, `table` has the requests of a ring by tag, `split` and `packed` are the
//! two formats, and this file is the ring that a queue uses. The room uses `memory`, and of
//! `protocol` only numbers (`config::feature`, `message::InflightInfo`).

pub(crate) mod inflight;
pub(crate) mod packed;
pub(crate) mod request;
pub(crate) mod setup;
pub(crate) mod split;
mod table;

use bdev::Kind;

use crate::memory::dirty::DirtyLog;
use crate::memory::{GuestMemory, full_fence};
use crate::ring::inflight::InflightArea;
use crate::ring::packed::PackedRing;
use crate::ring::request::{Disk, Finished, Request};
pub use crate::ring::setup::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, Fault, Recovered, Setup,
};
use crate::ring::split::SplitRing;
use crate::ring::table::RequestTable;

/// A running ring.
#[derive(Debug)]
pub enum Ring {
    /// Descriptor table, available ring and used ring (virtio 1.2, section 2.7).
    Split(Box<SplitRing>),
    /// One descriptor ring (section 2.8).
    Packed(Box<PackedRing>),
}

/// Evaluates the expression for the ring of either format.
macro_rules! either {
    ($self:expr, $ring:ident => $call:expr) => {
        match $self {
            Ring::Split($ring) => $call,
            Ring::Packed($ring) => $call,
        }
    };
}

impl Ring {
    /// Starts a ring at the position that the guest and the in-flight region have. With a region,
    /// unfinished requests of an earlier process are popped again, and the front end's start index
    /// is used only if the region is fresh.
    pub fn start(
        memory: &GuestMemory,
        setup: &Setup,
        inflight: Option<InflightArea>,
    ) -> Result<(Ring, Recovered), Fault> {
        if setup.has(F_RING_PACKED) {
            let (ring, recovered) = PackedRing::start(memory, setup, inflight)?;
            Ok((Ring::Packed(Box::new(ring)), recovered))
        } else {
            let (ring, recovered) = SplitRing::start(memory, setup, inflight)?;
            Ok((Ring::Split(Box::new(ring)), recovered))
        }
    }

    /// Takes up to `max` requests and appends the tags of those that the device must execute. All
    /// are recorded in the in-flight region. Requests that are answered without the device wait for
    /// the next [`Ring::complete`]. Returns how many requests were taken. After an error the ring
    /// is broken and nothing is appended.
    #[inline]
    pub fn pop(
        &mut self,
        memory: &GuestMemory,
        disk: &Disk,
        max: usize,
        tags: &mut Vec<u16>,
    ) -> Result<usize, Fault> {
        either!(self, ring => {
            ring.requests.begin()?;
            let before = tags.len();
            let mut lookup = memory.lookup(ring.requests.region);
            let taken = ring.take(&mut lookup, disk, max, tags);
            ring.requests.region = lookup.region();
            taken.map_err(|fault| ring.requests.break_ring(fault, tags, before))
        })
    }

    /// The request of a tag that was popped and is not completed.
    #[inline]
    pub fn request(&self, tag: u16) -> Request<'_> {
        self.requests().slots[usize::from(tag)].request(tag)
    }

    /// Returns requests to the guest in one batch, together with those answered since the last
    /// call: status bytes, dirty log, used entries, in-flight list, used index, in-flight marks.
    /// Returns how many. A broken ring completes nothing.
    #[inline]
    pub fn complete(
        &mut self,
        memory: &GuestMemory,
        log: Option<&DirtyLog>,
        finished: &[Finished],
    ) -> usize {
        either!(self, ring => {
            if ring.requests.broken.is_some() {
                ring.requests.drop_all(finished);
                return 0;
            }
            ring.complete(memory, log, finished)
        })
    }

    /// Whether to interrupt the guest for the completions since the last call. Always true once
    /// after a start, because the interrupt of an earlier process may have been lost.
    #[inline]
    pub fn should_signal(&mut self) -> bool {
        either!(self, ring => {
            let since = std::mem::take(&mut ring.requests.used_since);
            if std::mem::take(&mut ring.requests.signal_due) {
                return true;
            }
            if since == 0 {
                return false;
            }
            // The completions must be visible before the check: the guest first requests an
            // interrupt, then reads the ring.
            full_fence();
            ring.wants_signal(since)
        })
    }

    /// Asks the guest to kick at its next request, before the core sleeps. Returns false if a
    /// request is already there: no kick will come for it.
    #[must_use]
    pub fn arm_kick(&mut self, log: Option<&DirtyLog>) -> bool {
        either!(self, ring => {
            if ring.requests.broken.is_some() {
                return true;
            }
            ring.request_kick(log);
            // The request for a kick must be visible before the check: the guest first makes a
            // request available, then reads whether to kick. Without the fence both could miss the
            // other's store, and a request would wait forever.
            full_fence();
            !ring.has_work()
        })
    }

    /// Tells the guest that kicks are not needed.
    pub fn disarm_kick(&mut self, log: Option<&DirtyLog>) {
        either!(self, ring => {
            if ring.requests.broken.is_none() {
                ring.refuse_kick(log);
            }
        })
    }

    /// Whether a pop would find something.
    #[inline]
    pub fn has_work(&self) -> bool {
        either!(self, ring => ring.requests.broken.is_none() && ring.has_work())
    }

    /// The position at which another process would continue, in the form of [`Setup::base`].
    pub fn base(&self) -> u32 {
        either!(self, ring => ring.base())
    }

    /// Number of requests that were popped and are not completed, including those answered without
    /// the device.
    pub fn in_flight(&self) -> usize {
        self.requests().in_flight
    }

    /// Tags of requests that were popped and are not completed.
    pub(crate) fn tags_in_flight(&self) -> impl Iterator<Item = u16> + '_ {
        let slots = self.requests().slots.iter().zip(0..=u16::MAX);
        slots.filter(|(slot, _)| slot.busy).map(|(_, tag)| tag)
    }

    /// Kinds of the requests that were popped and are not completed.
    pub(crate) fn kinds_in_flight(&self) -> impl Iterator<Item = Kind> + '_ {
        self.requests().slots.iter().filter(|slot| slot.busy).map(|slot| slot.request(0).kind)
    }

    /// Number of requests answered without the device that wait for the next [`Ring::complete`].
    pub fn answered(&self) -> usize {
        self.requests().answered.len()
    }

    /// Number of requests of an earlier process that are not popped yet. They come before all
    /// others, so popping at most this many takes nothing new: a stopping ring finishes them first.
    pub fn resubmits(&self) -> usize {
        either!(self, ring => ring.resubmits.len())
    }

    /// Why the ring is broken, if it is.
    pub fn broken(&self) -> Option<Fault> {
        self.requests().broken
    }

    /// Whether memory of the ring itself or its in-flight region is lost: see
    /// [`Area::is_lost`](crate::Area::is_lost).
    pub fn is_lost(&self) -> bool {
        either!(self, ring => ring.is_lost())
    }

    /// Breaks the ring if it is not broken yet. Drops the requests in `tags`, which were popped and
    /// not submitted.
    pub fn break_off(&mut self, fault: Fault, tags: &mut Vec<u16>) -> Fault {
        let requests = either!(self, ring => &mut ring.requests);
        requests.broken.unwrap_or_else(|| requests.break_ring(fault, tags, 0))
    }

    /// Number of malformed requests.
    pub fn malformed(&self) -> u64 {
        self.requests().malformed
    }

    /// Changes whether writes to the ring are logged: see [`Setup::log`].
    pub fn set_log(&mut self, log: Option<u64>) {
        either!(self, ring => ring.set_log(log))
    }

    /// Marks in a dirty log every part of the ring that the device writes. To be called when a ring
    /// starts with an active log: a killed process may have written without marking.
    pub fn log_all(&self, log: &DirtyLog) {
        either!(self, ring => ring.log_all(log))
    }

    fn requests(&self) -> &RequestTable {
        either!(self, ring => &ring.requests)
    }
}
