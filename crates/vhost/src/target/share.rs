//! A disk's share of a core, so that no disk waits long for another.
//!
//! - A core's pollers run in rounds. In each round a disk may submit [`QUANTUM`] bytes, from all
//!   its rings on this core together. Its last request of a round may exceed the quantum; the
//!   excess is deducted in the next rounds (deficit round robin).
//! - A request longer than [`PIECE`] is submitted in pieces, so the debt is at most one piece: a
//!   round costs the core the copying of less than `QUANTUM + PIECE` bytes for each disk, whatever
//!   a guest requests.
//! - The only active disk of a process may have [`WINDOW_ALONE`] bytes at its device. While another
//!   disk is active, it may have as many as the device handles without queueing, since most disks
//!   share a device: the window grows while requests take little longer than the shortest one, and
//!   is halved when they take more than twice as long. Every [`PROBE_NS`] it starts again with
//!   [`WINDOW_MIN`], to measure the shortest time. Pieces are also shorter then.
//!
//! The bytes of a request are its [`cost`]. A disk's rings on one core share a [`Share`], found in
//! [`Shares`]. Cores only see which disks of other cores are active ([`DiskActivity`]); each core
//! updates this once a millisecond. This file is hot, on the path of every request.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bdev::Kind;

use crate::ring::request::Request;

/// Bytes that a disk may submit in a round: about 100 µs of copying.
pub(crate) const QUANTUM: u64 = 1 << 20;
/// Longest part of a request that is submitted in one operation.
pub(crate) const PIECE: u64 = 512 << 10;
/// Like [`PIECE`], while another disk is active and the device is slow.
pub(crate) const PIECE_MIN: u64 = 128 << 10;
/// Bounds of the bytes that a disk has at its device while another disk is active.
const WINDOW_MIN: u64 = 128 << 10;
const WINDOW_MAX: u64 = 16 << 20;
/// The same for the only active disk.
const WINDOW_ALONE: u64 = 64 << 20;
/// A window grows by the bytes that complete in time, divided by this.
const GROWTH: u64 = 8;
/// Tolerance above twice the shortest time, in nanoseconds.
const SLACK_NS: u64 = 250_000;
const PROBE_NS: u64 = 2_000_000_000;
/// How long a disk counts as active, in units of 2^[`TICK_SHIFT`] ns.
const RECENT: u64 = 96;
const TICK_SHIFT: u32 = 20;
/// Lowest cost of a request: a ring full of small requests also keeps a core busy.
const COST_MIN: u64 = 4096;
/// Of a range that is discarded or zeroed, one byte in this many counts.
const RANGE_SHARE: u64 = 16;

const _: () = assert!(PIECE <= QUANTUM && PIECE_MIN <= WINDOW_MIN && WINDOW_MIN <= WINDOW_MAX);

/// The cost of a request, or of its longest piece.
#[inline]
pub(crate) fn cost(request: &Request<'_>) -> u64 {
    match request.kind {
        Kind::Read | Kind::Write => request.len.clamp(COST_MIN, PIECE),
        Kind::Flush => COST_MIN,
        Kind::Discard | Kind::WriteZeroes { .. } => {
            (request.len / RANGE_SHARE).clamp(COST_MIN, QUANTUM)
        }
    }
}

/// The request must wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Throttled;

/// The cost and the time of a submission, above the lowest [`TICKET_SHIFT`] bits of a number: 21
/// bits of bytes, and 26 bits of time in units of 4096 ns.
pub(crate) type Ticket = u64;
/// Bits below a [`Ticket`] that belong to the caller.
pub(crate) const TICKET_SHIFT: u32 = 17;
const TIME_SHIFT: u32 = 38;
const UNIT_SHIFT: u32 = 12;
const COST_MASK: u64 = (1 << (TIME_SHIFT - TICKET_SHIFT)) - 1;
const _: () = assert!(QUANTUM <= COST_MASK);

/// Which disks of a process are active.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    disks: AtomicU64,
    /// The latest active disk, and the latest other one: its number above [`NUMBER_SHIFT`], the
    /// time below.
    latest: AtomicU64,
    other: AtomicU64,
}

const NUMBER_SHIFT: u32 = 44;

/// A disk's entry in its process's [`Activity`].
#[derive(Clone, Debug)]
pub(crate) struct DiskActivity {
    all: Arc<Activity>,
    number: u64,
}

impl DiskActivity {
    /// Registers a disk.
    pub fn register(all: &Arc<Activity>) -> DiskActivity {
        // Numbers are reused after a million disks.
        let number = all.disks.fetch_add(1, Relaxed) % ((1 << (64 - NUMBER_SHIFT)) - 1) + 1;
        DiskActivity { all: all.clone(), number }
    }

    /// Records that the disk is active. If two disks do so at the same time, one may be missed
    /// until its next call.
    fn mark_active(&self, tick: u64) {
        let latest = self.all.latest.load(Relaxed);
        if latest >> NUMBER_SHIFT != self.number {
            self.all.other.store(latest, Relaxed);
        }
        self.all.latest.store(self.number << NUMBER_SHIFT | tick, Relaxed);
    }

    /// Whether another disk is active.
    #[inline]
    fn is_other_active(&self, tick: u64) -> bool {
        [&self.all.latest, &self.all.other].into_iter().any(|entry| {
            let entry = entry.load(Relaxed);
            let (number, at) = (entry >> NUMBER_SHIFT, entry & ((1 << NUMBER_SHIFT) - 1));
            number != 0 && number != self.number && tick.saturating_sub(at) < RECENT
        })
    }
}

/// The disks' shares of a core.
#[derive(Default)]
pub(crate) struct Shares(RefCell<Vec<Weak<Share>>>);

impl Shares {
    /// A disk's share, common to all its rings on this core.
    pub fn of(&self, disk: &DiskActivity) -> Rc<Share> {
        let mut all = self.0.borrow_mut();
        all.retain(|share| share.strong_count() > 0);
        let same = |share: &Rc<Share>| {
            share.activity.number == disk.number && Arc::ptr_eq(&share.activity.all, &disk.all)
        };
        let known = all.iter().filter_map(Weak::upgrade).find(same);
        known.unwrap_or_else(|| {
            let share = Rc::new(Share {
                activity: disk.clone(),
                active_tick: Cell::new(0),
                round: Cell::new(0),
                left: Cell::new(QUANTUM as i64),
                in_flight: Cell::new(0),
                window: Cell::new(WINDOW_MIN),
                shortest_ns: Cell::new(u64::MAX),
                settled_ns: Cell::new(0),
                probe_ns: Cell::new(0),
            });
            all.push(Rc::downgrade(&share));
            share
        })
    }
}

/// One disk's share of a core.
pub(crate) struct Share {
    activity: DiskActivity,
    /// Tick of the last call of [`DiskActivity::mark_active`].
    active_tick: Cell<u64>,
    round: Cell<u64>,
    /// Bytes left in this round; a negative value is a debt.
    left: Cell<i64>,
    in_flight: Cell<u64>,
    /// Bytes that may be at the device while other disks are active.
    window: Cell<u64>,
    /// The shortest time of an operation since the window was reset.
    shortest_ns: Cell<u64>,
    /// Until then completions belong to an earlier window.
    settled_ns: Cell<u64>,
    /// When the window is reset.
    probe_ns: Cell<u64>,
}

impl Share {
    /// Starts a turn of one of the disk's rings in a round.
    #[inline]
    pub fn begin_round(&self, round: u64) {
        if self.round.replace(round) != round {
            self.left.set(self.left.get().saturating_add(QUANTUM as i64).min(QUANTUM as i64));
        }
    }

    /// Records that the disk is active.
    #[inline]
    pub fn mark_active(&self, now_ns: u64) {
        let tick = now_ns >> TICK_SHIFT;
        if self.active_tick.replace(tick) != tick {
            self.activity.mark_active(tick);
        }
    }

    /// Takes the cost of an operation from the share, unless it has to wait.
    #[inline]
    pub fn acquire(&self, cost: u64, now_ns: u64) -> Result<Ticket, Throttled> {
        if self.left.get() <= 0 || !self.has_room(cost, now_ns) {
            return Err(Throttled);
        }
        self.left.set(self.left.get() - cost as i64);
        self.in_flight.set(self.in_flight.get() + cost);
        Ok(now_ns >> UNIT_SHIFT << TIME_SHIFT | cost << TICKET_SHIFT)
    }

    /// Whether an operation fits into the window.
    #[inline]
    pub fn has_room(&self, cost: u64, now_ns: u64) -> bool {
        let sum = self.in_flight.get() + cost;
        sum <= WINDOW_MIN || sum == cost || sum <= self.allowance(now_ns)
    }

    /// Longest part of a request that is submitted in one operation now.
    #[inline]
    pub fn piece(&self, now_ns: u64) -> u64 {
        (self.allowance(now_ns) / 2 / PIECE_MIN * PIECE_MIN).clamp(PIECE_MIN, PIECE)
    }

    #[inline]
    fn allowance(&self, now_ns: u64) -> u64 {
        if !self.activity.is_other_active(now_ns >> TICK_SHIFT) {
            self.probe_ns.set(0);
            return WINDOW_ALONE;
        }
        if now_ns >= self.probe_ns.get() {
            self.probe_ns.set(now_ns + PROBE_NS);
            self.window.set(WINDOW_MIN);
            self.shortest_ns.set(u64::MAX);
        }
        self.window.get()
    }

    /// Returns the cost of a completed operation.
    #[inline]
    pub fn release(&self, ticket: Ticket, now_ns: u64) {
        let cost = ticket >> TICKET_SHIFT & COST_MASK;
        self.in_flight.set(self.in_flight.get() - cost);
        let units = (now_ns >> UNIT_SHIFT).wrapping_sub(ticket >> TIME_SHIFT);
        let took_ns = (units & (u64::MAX >> TIME_SHIFT)) << UNIT_SHIFT;
        let shortest = self.shortest_ns.get().min(took_ns);
        self.shortest_ns.set(shortest);
        let window = self.window.get();
        if took_ns <= 2 * shortest + SLACK_NS {
            self.window.set((window + cost / GROWTH).min(WINDOW_MAX));
        } else if now_ns >= self.settled_ns.get() {
            self.window.set((window / 2).max(WINDOW_MIN));
            self.settled_ns.set(now_ns + took_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const MS: u64 = 1_000_000;

    fn shares<const N: usize>() -> [Rc<Share>; N] {
        let (shares, all) = (Shares::default(), Arc::default());
        std::array::from_fn(|_| shares.of(&DiskActivity::register(&all)))
    }

    /// Takes as much as possible in a round, in operations of this cost. Nothing stays in flight.
    fn greed(share: &Share, round: u64, cost: u64) -> u64 {
        share.begin_round(round);
        let mut sum = 0;
        while let Ok(ticket) = share.acquire(cost, 0) {
            share.release(ticket, 0);
            sum += cost;
        }
        sum
    }

    #[test]
    fn a_disk_gets_its_quantum_in_each_round_whatever_its_requests_cost() {
        for cost in [COST_MIN, 5000, 65536, PIECE - 512, PIECE] {
            let [share] = shares();
            let mut sum = 0;
            for round in 1..=1000 {
                let taken = greed(&share, round, cost);
                assert!(taken < QUANTUM + cost, "{taken} bytes in one round");
                sum += taken;
                assert!(sum <= round * QUANTUM + cost, "{sum} in {round} rounds");
            }
            assert!(sum >= 1000 * QUANTUM, "{sum} in 1000 rounds");
        }
    }

    #[test]
    fn unused_rounds_are_not_saved() {
        let [share] = shares();
        greed(&share, 1, PIECE);
        assert!(greed(&share, 1_000_000, PIECE) < QUANTUM + PIECE);
    }

    #[test]
    fn the_rings_of_a_disk_share_one_share() {
        let (shares, all) = (Shares::default(), Arc::default());
        let disks = [0, 1].map(|_| DiskActivity::register(&all));
        let (a, again, b) = (shares.of(&disks[0]), shares.of(&disks[0]), shares.of(&disks[1]));
        assert!(Rc::ptr_eq(&a, &again) && !Rc::ptr_eq(&a, &b));
        let first = greed(&a, 1, 4096);
        assert_eq!((first, greed(&again, 1, 4096), greed(&b, 1, 4096)), (QUANTUM, 0, QUANTUM));
        drop((a, again));
        assert_eq!(shares.0.borrow().iter().filter(|share| share.strong_count() > 0).count(), 1);
    }

    #[test]
    fn the_window_shrinks_while_another_disk_is_active() {
        let [share, other] = shares();
        let in_flight = |now| {
            let mut tickets = Vec::new();
            for round in 1.. {
                share.begin_round(round);
                match share.acquire(PIECE_MIN, now) {
                    Ok(ticket) => tickets.push(ticket),
                    Err(Throttled) => break,
                }
            }
            let sum = share.in_flight.get();
            tickets.into_iter().for_each(|ticket| share.release(ticket, now));
            assert_eq!(share.in_flight.get(), 0);
            sum
        };
        assert_eq!(in_flight(0), WINDOW_ALONE);
        share.mark_active(2 * MS);
        assert_eq!(in_flight(2 * MS), WINDOW_ALONE, "its own activity does not count");
        other.mark_active(4 * MS);
        share.mark_active(6 * MS);
        assert_eq!((in_flight(8 * MS), share.piece(8 * MS)), (WINDOW_MIN, PIECE_MIN));
        assert_eq!((in_flight(110 * MS), share.piece(110 * MS)), (WINDOW_ALONE, PIECE));
        // An operation longer than the window may run alone. The other disk may be active on
        // another core.
        let elsewhere = Shares::default().of(&other.activity);
        elsewhere.mark_active(112 * MS);
        assert_eq!((in_flight(114 * MS), share.piece(114 * MS)), (WINDOW_MIN, PIECE_MIN));
        assert!(share.has_room(PIECE, 114 * MS));
    }

    /// A disk that submits as much as it may, with another active disk, to a device with a latency
    /// of `first_ns` and a throughput of `bytes_per_ms`. Returns the share of the throughput that
    /// it gets in two seconds, and the longest time in nanoseconds that it makes another disk wait
    /// there after the first 200 ms.
    fn beside(first_ns: u64, bytes_per_ms: u64) -> (f64, u64) {
        let [share, other] = shares();
        let (mut now, mut free_at, mut bytes, mut longest) = (MS, 0_u64, 0, 0);
        let mut at_device: VecDeque<(u64, Ticket)> = VecDeque::new();
        let end = 2000 * MS;
        for round in 1.. {
            while at_device.front().is_some_and(|&(done, _)| done <= now) {
                let (_, ticket) = at_device.pop_front().unwrap();
                bytes += ticket >> TICKET_SHIFT & COST_MASK;
                share.release(ticket, now);
            }
            if now > end {
                break;
            }
            other.mark_active(now);
            share.mark_active(now);
            share.begin_round(round);
            let piece = share.piece(now);
            while let Ok(ticket) = share.acquire(piece, now) {
                free_at = free_at.max(now) + piece * MS / bytes_per_ms;
                at_device.push_back((free_at + first_ns, ticket));
            }
            if now > 200 * MS {
                longest = longest.max(free_at.saturating_sub(now));
            }
            now += 20_000;
        }
        (bytes as f64 / (2000 * bytes_per_ms) as f64, longest)
    }

    #[test]
    fn a_device_is_kept_busy_without_queueing_whether_it_is_fast_or_slow() {
        for (first_us, mb_per_s) in [(80, 3000), (80, 500), (100, 20), (5000, 1000), (1000, 200)] {
            let first_ns = first_us * 1000;
            let (busy, longest) = beside(first_ns, mb_per_s * 1000);
            println!(
                "{first_us} us, {mb_per_s} MB/s: {busy:.2} of it, longest {} us",
                longest / 1000
            );
            // The shortest request has to go through the device, too.
            let least = PIECE_MIN * 1000 / mb_per_s + first_ns;
            assert!(busy > 0.7, "{first_us} us, {mb_per_s} MB/s: {busy}");
            assert!(
                longest < 4 * least + 2 * SLACK_NS,
                "{first_us} us, {mb_per_s} MB/s: {longest}"
            );
        }
    }
}
