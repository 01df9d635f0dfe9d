//! `limit:` limits the requests, and the bytes, per second that reach a device.
//!
//! A budget is one number: the time by which everything admitted would have been earned at the
//! rate. A request may begin when that time is not in the future, and advances it by the request's
//! cost. So an idle device saves budget, at most the time given for a burst, and a request that
//! costs more than a burst begins all the same and is paid for afterwards. Channels of all cores
//! advance the same number, which is the only cache line they share.
//!
//! Waiting requests begin in their order. A flush costs nothing and never waits; discards and
//! zeroes cost a request and no bytes.

use std::any::Any;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use reactor::Core;

use crate::channel::Channel;
use crate::io::{Done, Io, Kind, QUEUE_DEPTH, Status};

/// Rates of requests and bytes, and how much of them an idle device saves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Requests per second; 0 is no limit.
    pub iops: u64,
    /// Bytes of reads and writes per second; 0 is no limit.
    pub bytes: u64,
    /// The budget that is saved at most: as much as these nanoseconds earn.
    pub burst_ns: u64,
}

impl Rates {
    /// The default of [`Rates::burst_ns`].
    pub const BURST_NS: u64 = 100_000_000;

    /// Whether nothing is limited.
    pub fn are_off(&self) -> bool {
        self.iops == 0 && self.bytes == 0
    }
}

/// The budgets that all channels of a device share, or several devices. Their rates may change.
#[derive(Debug, Default)]
pub struct Limit {
    requests: Budget,
    bytes: Budget,
}

#[derive(Debug, Default)]
struct Budget {
    /// 0 is no limit.
    per_second: AtomicU64,
    burst_ns: AtomicU64,
    earned_ns: AtomicU64,
}

impl Budget {
    fn new(per_second: u64, burst_ns: u64) -> Budget {
        Budget { per_second: per_second.into(), burst_ns: burst_ns.into(), ..Budget::default() }
    }

    /// Changes the rate. What was spent before `now` and is not yet earned is forgotten.
    fn set(&self, per_second: u64, burst_ns: u64, now: u64) {
        self.per_second.store(per_second, Ordering::Relaxed);
        self.burst_ns.store(burst_ns, Ordering::Relaxed);
        self.earned_ns.fetch_min(now, Ordering::Relaxed);
    }

    /// Spends `amount` and returns the time, at least `now`, from which it is available.
    fn spend(&self, now: u64, amount: u64) -> u64 {
        let per_second = self.per_second.load(Ordering::Relaxed);
        if per_second == 0 {
            return now;
        }
        let cost = u128::from(amount) * 1_000_000_000 / u128::from(per_second);
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        let saved = now.saturating_sub(self.burst_ns.load(Ordering::Relaxed));
        let mut earned = self.earned_ns.load(Ordering::Relaxed);
        loop {
            let from = earned.max(saved);
            let next = from.saturating_add(cost);
            match self.earned_ns.compare_exchange_weak(
                earned,
                next,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return from.max(now),
                Err(other) => earned = other,
            }
        }
    }
}

impl Limit {
    /// Budgets that have saved a burst.
    pub fn new(rates: Rates) -> Limit {
        let Rates { iops, bytes, burst_ns } = rates;
        Limit { requests: Budget::new(iops, burst_ns), bytes: Budget::new(bytes, burst_ns) }
    }

    /// Changes the rates. What was spent before `now_ns` and is not yet earned is forgotten.
    pub fn set(&self, rates: Rates, now_ns: u64) {
        let Rates { iops, bytes, burst_ns } = rates;
        self.requests.set(iops, burst_ns, now_ns);
        self.bytes.set(bytes, burst_ns, now_ns);
    }

    /// The rates.
    pub fn rates(&self) -> Rates {
        Rates {
            iops: self.requests.per_second.load(Ordering::Relaxed),
            bytes: self.bytes.per_second.load(Ordering::Relaxed),
            burst_ns: self.requests.burst_ns.load(Ordering::Relaxed),
        }
    }

    /// How far the spending is ahead of the earnings of requests and bytes, in nanoseconds.
    pub fn ahead_ns(&self, now_ns: u64) -> [u64; 2] {
        [&self.requests, &self.bytes]
            .map(|budget| budget.earned_ns.load(Ordering::Relaxed).saturating_sub(now_ns))
    }

    /// Continues with what another process has spent ahead: [`Limit::ahead_ns`].
    pub fn set_ahead_ns(&self, ahead_ns: [u64; 2], now_ns: u64) {
        for (budget, ahead_ns) in [&self.requests, &self.bytes].into_iter().zip(ahead_ns) {
            budget.earned_ns.store(now_ns.saturating_add(ahead_ns), Ordering::Relaxed);
        }
    }

    /// Spends the budget of a part of a request: returns the time, at least `now_ns`, from which it
    /// may begin. The first part costs a request. Discards and zeroes cost no bytes, a flush costs
    /// nothing.
    pub fn spend(&self, now_ns: u64, kind: Kind, len: u64, is_first: bool) -> u64 {
        if kind == Kind::Flush {
            return now_ns;
        }
        let bytes = if let Kind::Read | Kind::Write = kind { len } else { 0 };
        self.requests.spend(now_ns, is_first.into()).max(self.bytes.spend(now_ns, bytes))
    }
}

pub(crate) struct LimitChannel {
    pub over: Channel,
    core: Core,
    keep: Option<Rc<dyn Any>>,
    slots: Vec<Waiting>,
    free: Vec<u32>,
    /// Oldest first.
    waiting: VecDeque<u32>,
}

/// A request that has not begun.
struct Waiting {
    from: u64,
    kind: Kind,
    offset: u64,
    len: u64,
    tag: u64,
    fua: bool,
    segments: Vec<libc::iovec>,
    keep: Option<Rc<dyn Any>>,
}

impl LimitChannel {
    pub fn new(over: Channel, core: &Core) -> LimitChannel {
        LimitChannel {
            over,
            core: core.clone(),
            keep: None,
            slots: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::with_capacity(QUEUE_DEPTH),
        }
    }

    pub fn hold(&mut self, keep: Rc<dyn Any>) {
        self.keep = Some(keep.clone());
        self.over.hold(keep);
    }

    /// # Safety
    /// As for [`Channel::submit`].
    pub unsafe fn submit(&mut self, limit: &Limit, io: &Io<'_>, done: &mut Vec<Done>) {
        let now = self.core.now_ns();
        let from = limit.spend(now, io.kind, io.len, true);
        if io.kind == Kind::Flush || (from <= now && self.waiting.is_empty()) {
            // SAFETY: by this function's contract.
            if unsafe { self.over.submit(io) }.is_err() {
                // Unreachable: the lower channel takes as many requests as the one above it.
                done.push(Done { tag: io.tag, status: Status::IoError });
            }
            return;
        }
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Waiting {
                from,
                kind: Kind::Flush,
                offset: 0,
                len: 0,
                tag: 0,
                fua: false,
                segments: Vec::new(),
                keep: None,
            });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[at as usize];
        (slot.from, slot.kind, slot.offset, slot.len) = (from, io.kind, io.offset, io.len);
        (slot.tag, slot.fua) = (io.tag, io.fua);
        slot.segments.clear();
        slot.segments.extend_from_slice(io.segments);
        slot.keep.clone_from(&self.keep);
        self.waiting.push_back(at);
    }

    pub fn poll(&mut self, done: &mut Vec<Done>) {
        let mut begun = false;
        while let Some(&at) = self.waiting.front() {
            let slot = &mut self.slots[at as usize];
            if slot.from > self.core.now_ns() {
                self.core.turn_at(slot.from);
                break;
            }
            if let Some(keep) = slot.keep.take() {
                self.over.hold(keep);
                begun = true;
            }
            let io = Io {
                kind: slot.kind,
                offset: slot.offset,
                len: slot.len,
                segments: &slot.segments,
                tag: slot.tag,
                fua: slot.fua,
            };
            // SAFETY: the request's tag has not come back, so its segments are valid by the
            // contract of `submit`, through which it came here. Their owner was passed to `hold`
            // just now.
            if unsafe { self.over.submit(&io) }.is_err() {
                // Unreachable: see `submit`.
                done.push(Done { tag: slot.tag, status: Status::IoError });
            }
            self.waiting.pop_front();
            self.free.push(at);
        }
        if begun && let Some(keep) = &self.keep {
            self.over.hold(keep.clone());
        }
        self.over.poll(done);
    }

    pub fn ready(&self) -> bool {
        let next = self.waiting.front().map(|&at| self.slots[at as usize].from);
        next.is_some_and(|from| from <= self.core.now_ns()) || self.over.ready()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The times at which each of `n` requests begins if all come at `now`.
    fn begins(budget: &Budget, now: u64, n: usize, amount: u64) -> Vec<u64> {
        (0..n).map(|_| budget.spend(now, amount)).collect()
    }

    #[test]
    fn a_budget_saves_a_burst_and_then_lets_through_at_its_rate() {
        let budget = Budget::new(1000, 3_000_000);
        let at = 1_000_000_000;
        let expected = [0, 0, 0, 0, 1, 2, 3].map(|ms: u64| at + ms * 1_000_000);
        assert_eq!(begins(&budget, at, 7, 1), expected);
        // After a long idle time, no more than a burst is saved.
        let later = at + 60_000_000_000;
        let expected = [0, 0, 0, 0, 1].map(|ms: u64| later + ms * 1_000_000);
        assert_eq!(begins(&budget, later, 5, 1), expected);
    }

    #[test]
    fn a_request_above_the_burst_begins_and_is_paid_for_afterwards() {
        let budget = Budget::new(1 << 20, 1_000_000);
        let at = 5_000_000_000;
        assert_eq!(budget.spend(at, 1 << 20), at);
        let next = budget.spend(at, 1);
        assert_eq!(next, at + 999_000_000);
        assert_eq!(budget.spend(at, u64::MAX).max(next), next + 953);
    }
}
