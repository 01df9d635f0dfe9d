//! Limits of a disk's rates, which change while guests use it.
//!
//! A disk has [`Rates`] of its own, and may be in a group of disks that share the rates of the
//! group. Each is one [`Limit`], a token bucket whatever the number of rings and cores. A ring
//! that takes a request from the guest spends its cost, first from the disk's limit and then from
//! the group's, and keeps the request until the time for which it is paid; of a long request one
//! piece at a time. So rings that wait get their turns in the order in which they came, and no ring
//! of a group starves another. While a ring waits it takes nothing more from the guest. Its last
//! requests begin at once when it is stopped, so a limit delays no reset, no upgrade and no detach;
//! but they are paid for, so the ring waits when it is started again.
//!
//! The disks of a process belong to one core, and so do the groups. Rings on other cores look at a
//! number that every change increases.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwapOption;
use bdev::{Kind, Limit, Rates};

/// What a discard or a write of zeroes costs at most in the limit of writes: what that earns in
/// this time, in seconds. Their ranges may be as long as the disk, and the guest waits meanwhile.
const ZEROES_MAX: u64 = 5;
/// How long a ring waits before it asks again whether its limits have changed, in nanoseconds.
const ASK_NS: u64 = 50_000_000;

/// The limits of one disk, shared by its rings on all cores.
#[derive(Debug, Default)]
pub(crate) struct DiskLimits {
    own: Arc<Limit>,
    group: ArcSwapOption<(String, Arc<Limit>)>,
    /// Limits only what changes the disk, also discards and zeroes by their ranges.
    writes: ArcSwapOption<Limit>,
    /// Increased by each change, after it.
    changes: AtomicU64,
}

impl DiskLimits {
    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// The name and the limit of its group.
    pub fn group(&self) -> Option<(String, Arc<Limit>)> {
        self.group.load().as_deref().cloned()
    }

    /// Changes the disk's own rates.
    pub fn set(&self, rates: Rates, now_ns: u64) {
        self.own.set(rates, now_ns);
        self.changed();
    }

    /// Limits the bytes per second that change the disk; 0 is no limit. The ranges of discards and
    /// zeroes count as well.
    pub fn set_writes(&self, bytes_per_second: u64) {
        let limit = (bytes_per_second > 0)
            .then(|| Arc::new(Limit::new(Rates { iops: 0, bytes: bytes_per_second, burst_ns: 0 })));
        self.writes.store(limit);
        self.changed();
    }

    /// The disk's own limit.
    pub fn own(&self) -> &Limit {
        &self.own
    }
}

/// The groups of a process by name. A group without rates and without disks is forgotten.
#[derive(Default)]
pub(crate) struct LimitGroups(RefCell<BTreeMap<String, Group>>);

#[derive(Default)]
struct Group {
    limit: Arc<Limit>,
    disks: Vec<Weak<DiskLimits>>,
}

impl LimitGroups {
    /// Changes the rates of a group.
    pub fn set(&self, name: &str, rates: Rates, now_ns: u64) {
        let mut groups = self.0.borrow_mut();
        let group = groups.entry(name.to_owned()).or_default();
        group.limit.set(rates, now_ns);
        group.disks.iter().filter_map(Weak::upgrade).for_each(|disk| disk.changed());
        Self::forget_unused(&mut groups);
    }

    /// Puts a disk into a group, or into none.
    pub fn join(&self, disk: &Arc<DiskLimits>, name: Option<&str>) {
        let mut groups = self.0.borrow_mut();
        for group in groups.values_mut() {
            group.disks.retain(|other| other.upgrade().is_some_and(|it| !Arc::ptr_eq(&it, disk)));
        }
        let joined = name.map(|name| {
            let group = groups.entry(name.to_owned()).or_default();
            group.disks.push(Arc::downgrade(disk));
            (name.to_owned(), group.limit.clone())
        });
        disk.group.store(joined.map(Arc::new));
        disk.changed();
        Self::forget_unused(&mut groups);
    }

    fn forget_unused(groups: &mut BTreeMap<String, Group>) {
        groups.retain(|_, group| {
            group.disks.retain(|disk| disk.strong_count() > 0);
            !group.disks.is_empty() || !group.limit.rates().are_off()
        });
    }

    /// Name, rates and number of disks of each group.
    pub fn all(&self) -> Vec<(String, Rates, usize)> {
        let mut groups = self.0.borrow_mut();
        Self::forget_unused(&mut groups);
        let all = groups.iter();
        all.map(|(name, group)| (name.clone(), group.limit.rates(), group.disks.len())).collect()
    }
}

/// A part of a request that a ring wants to submit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub kind: Kind,
    pub len: u64,
    /// It is the first part of the request.
    pub is_first: bool,
}

impl Piece {
    /// Spends its cost; returns the time from which it is paid.
    fn spend(self, limit: &Limit, now_ns: u64) -> u64 {
        limit.spend(now_ns, self.kind, self.len, self.is_first)
    }
}

/// A ring's view of its disk's limits.
pub(crate) struct RingLimits {
    disk: Arc<DiskLimits>,
    /// [`DiskLimits::changes`] when `limits` was made.
    seen: u64,
    /// Those that limit anything: the disk's own, the group's, and that of writes.
    limits: Vec<Arc<Limit>>,
    /// The last of them is for writes only.
    has_writes: bool,
    /// How many of them the next piece is paid from, and the time from which it is.
    paid: usize,
    paid_from_ns: u64,
    /// Bytes that are paid.
    paid_bytes: u64,
}

impl RingLimits {
    pub fn new(disk: Arc<DiskLimits>) -> RingLimits {
        let (seen, limits, has_writes) = (u64::MAX, Vec::new(), false);
        RingLimits { disk, seen, limits, has_writes, paid: 0, paid_from_ns: 0, paid_bytes: 0 }
    }

    /// How many bytes of the next piece may begin; else the time at which to ask again.
    #[inline]
    pub fn admit(&mut self, piece: Piece, now_ns: u64) -> Result<u64, u64> {
        self.look();
        if self.limits.is_empty() { Ok(piece.len) } else { self.pay(piece, now_ns) }
    }

    /// Notes changes of the limits.
    #[inline]
    fn look(&mut self) {
        let changes = self.disk.changes.load(Ordering::Acquire);
        if changes != self.seen {
            self.refresh(changes);
        }
    }

    #[cold]
    fn refresh(&mut self, changes: u64) {
        self.seen = changes;
        self.begun();
        let group = self.disk.group().map(|(_, limit)| limit);
        let limits = [Some(self.disk.own.clone()), group].into_iter().flatten();
        self.limits = limits.filter(|limit| !limit.rates().are_off()).collect();
        let writes = self.disk.writes.load_full();
        self.has_writes = writes.is_some();
        self.limits.extend(writes);
    }

    /// Pays from one limit after the other, from each when the time of the one before has come: a
    /// disk that waits for its own limit takes nothing from its group.
    #[cold]
    fn pay(&mut self, piece: Piece, now_ns: u64) -> Result<u64, u64> {
        if self.paid == 0 {
            self.paid_bytes = piece.len;
        }
        let piece = Piece { len: self.paid_bytes.min(piece.len), ..piece };
        let count = self.count(piece.kind);
        while self.paid_from_ns <= now_ns && self.paid < count {
            self.paid_from_ns = self.spend(self.paid, piece, now_ns);
            self.paid += 1;
        }
        match self.paid_from_ns <= now_ns {
            true => Ok(piece.len),
            false => Err(self.paid_from_ns.min(now_ns + ASK_NS)),
        }
    }

    /// Spends the cost of a piece at one of the limits; returns the time from which it is paid.
    fn spend(&self, at: usize, piece: Piece, now_ns: u64) -> u64 {
        let limit = &self.limits[at];
        let is_for_writes = self.has_writes && at + 1 == self.limits.len();
        match piece.kind {
            Kind::Discard | Kind::WriteZeroes { .. } if is_for_writes => {
                let most = limit.rates().bytes.saturating_mul(ZEROES_MAX);
                let len = piece.len.min(most);
                Piece { kind: Kind::Write, len, ..piece }.spend(limit, now_ns)
            }
            _ => piece.spend(limit, now_ns),
        }
    }

    /// How many of the limits are for requests of this kind.
    fn count(&self, kind: Kind) -> usize {
        let reads = self.has_writes && kind == Kind::Read;
        self.limits.len() - usize::from(reads)
    }

    /// Pays what is left of a piece that was not admitted, and begins all the same.
    #[cold]
    pub fn pay_the_rest(&mut self, piece: Piece, now_ns: u64) {
        let count = self.count(piece.kind).max(self.paid);
        for at in self.paid..count {
            self.spend(at, piece, now_ns);
        }
        self.paid = count;
    }

    /// The time at which to ask again, if the next piece has to wait.
    pub fn waits_until(&self, now_ns: u64) -> Option<u64> {
        let same = self.disk.changes.load(Ordering::Acquire) == self.seen;
        (same && self.paid_from_ns > now_ns).then(|| self.paid_from_ns.min(now_ns + ASK_NS))
    }

    /// The piece that was admitted has begun, or is gone.
    #[inline]
    pub fn begun(&mut self) {
        (self.paid, self.paid_from_ns) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn rates(iops: u64, bytes: u64) -> Rates {
        Rates { iops, bytes, burst_ns: 0 }
    }

    fn piece(kind: Kind, len: u64) -> Piece {
        Piece { kind, len, is_first: true }
    }

    /// The requests that rings can begin in a second, each in turn.
    fn begun(rings: &mut [RingLimits], from_ns: u64, len: u64) -> Vec<u64> {
        let mut counts = vec![0; rings.len()];
        let mut now_ns = from_ns;
        while now_ns < from_ns + SECOND {
            for (ring, count) in rings.iter_mut().zip(&mut counts) {
                while ring.admit(piece(Kind::Write, len), now_ns).is_ok() {
                    ring.begun();
                    *count += 1;
                    assert!(*count < 1_000_000, "nothing limits the ring");
                }
            }
            now_ns += 100_000;
        }
        counts
    }

    #[test]
    fn a_disk_has_one_budget_for_all_rings() {
        let disk = Arc::<DiskLimits>::default();
        let mut rings = [(); 4].map(|()| RingLimits::new(disk.clone()));
        disk.set(rates(1000, 0), SECOND);
        let counts = begun(&mut rings, SECOND, 4096);
        assert!((995..=1005).contains(&counts.iter().sum::<u64>()), "{counts:?}");
        assert!(counts.iter().all(|count| (245..=255).contains(count)), "{counts:?}");
        disk.set(rates(0, 4096 * 100), 10 * SECOND);
        let counts = begun(&mut rings, 10 * SECOND, 4096);
        assert!((98..=105).contains(&counts.iter().sum::<u64>()), "{counts:?}");
    }

    #[test]
    fn a_limit_of_writes_delays_no_read() {
        let disk = Arc::<DiskLimits>::default();
        let mut ring = [RingLimits::new(disk.clone())];
        disk.set_writes(4096 * 100);
        let counts = begun(&mut ring, SECOND, 4096);
        assert!((98..=105).contains(&counts[0]), "{counts:?}");
        for _ in 0..1000 {
            assert!(ring[0].admit(piece(Kind::Read, 4096), 2 * SECOND).is_ok());
            ring[0].begun();
        }
        disk.set_writes(0);
        assert!(ring[0].admit(piece(Kind::Write, 4096), 2 * SECOND).is_ok());
    }

    #[test]
    fn a_limit_of_writes_counts_discards_and_zeroes_and_other_limits_do_not() {
        for kind in [Kind::Discard, Kind::WriteZeroes { unmap: true }] {
            let disk = Arc::<DiskLimits>::default();
            disk.set(rates(0, 4096), SECOND);
            disk.set_writes(4096 * 100);
            let mut ring = RingLimits::new(disk.clone());
            let begun_until = |ring: &mut RingLimits, ns: u64, len: u64| {
                let mut count = 0;
                while ring.admit(piece(kind, len), ns).is_ok() {
                    ring.begun();
                    count += 1;
                    assert!(count < 1_000_000, "nothing limits the ring");
                }
                count
            };
            let counts =
                (1..=100).map(|at| begun_until(&mut ring, SECOND + at * SECOND / 100, 4096));
            let count: u64 = counts.sum();
            assert!((98..=102).contains(&count), "{count}");
            // A long range delays what follows, but not for ever.
            ring.pay_the_rest(piece(kind, 4096), 3 * SECOND);
            ring.begun();
            assert!(ring.admit(piece(kind, 1 << 40), 4 * SECOND).is_ok());
            ring.begun();
            assert!(ring.admit(piece(kind, 4096), 8 * SECOND).is_err());
            assert!(ring.admit(piece(kind, 4096), (4 + ZEROES_MAX) * SECOND).is_ok());
            ring.begun();
            disk.set_writes(0);
            assert!(ring.admit(piece(kind, 1 << 40), (4 + ZEROES_MAX) * SECOND).is_ok());
        }
    }

    #[test]
    fn disks_of_a_group_share_its_rates_fairly_and_keep_their_own() {
        let groups = LimitGroups::default();
        let disks: [Arc<DiskLimits>; 3] = Default::default();
        disks.iter().for_each(|disk| groups.join(disk, Some("tenant")));
        groups.set("tenant", rates(900, 0), SECOND);
        let mut rings = [0, 1, 2].map(|at| RingLimits::new(disks[at].clone()));
        let counts = begun(&mut rings, SECOND, 512);
        assert!(counts.iter().all(|count| (295..=305).contains(count)), "{counts:?}");
        disks[0].set(rates(100, 0), 10 * SECOND);
        groups.set("tenant", rates(900, 0), 10 * SECOND);
        let counts = begun(&mut rings, 10 * SECOND, 512);
        assert!((95..=105).contains(&counts[0]), "{counts:?}");
        assert!((390..=410).contains(&counts[1]), "{counts:?}");
        groups.join(&disks[2], None);
        assert_eq!(groups.all(), [("tenant".to_owned(), rates(900, 0), 2)]);
        assert!(rings[2].admit(piece(Kind::Write, 1 << 30), 20 * SECOND).is_ok());
    }

    #[test]
    fn a_disk_that_waits_for_its_own_limit_takes_nothing_from_its_group() {
        let groups = LimitGroups::default();
        let disks: [Arc<DiskLimits>; 2] = Default::default();
        disks.iter().for_each(|disk| groups.join(disk, Some("g")));
        groups.set("g", rates(0, 100 << 20), SECOND);
        disks[0].set(rates(0, 1 << 20), SECOND);
        let mut rings = [0; 8].map(|_| RingLimits::new(disks[0].clone()));
        let long = piece(Kind::Write, 512 << 10);
        assert!(rings[0].admit(long, SECOND).is_ok());
        rings[0].begun();
        assert!(rings.iter_mut().all(|ring| ring.admit(long, SECOND).is_err()));
        let mut other = RingLimits::new(disks[1].clone());
        assert!(other.admit(piece(Kind::Read, 4096), SECOND + SECOND / 100).is_ok());
    }

    #[test]
    fn what_begins_at_a_stop_is_owed_at_the_next_start() {
        let disk = Arc::<DiskLimits>::default();
        disk.set(rates(10, 0), SECOND);
        let mut ring = RingLimits::new(disk.clone());
        for _ in 0..100 {
            if ring.admit(piece(Kind::Write, 4096), SECOND).is_err() {
                ring.pay_the_rest(piece(Kind::Write, 4096), SECOND);
            }
            ring.begun();
        }
        let mut again = RingLimits::new(disk);
        assert!(again.admit(piece(Kind::Write, 4096), 2 * SECOND).is_err());
        assert!(again.admit(piece(Kind::Write, 4096), 12 * SECOND).is_ok());
    }

    #[test]
    fn a_change_ends_the_wait_for_the_old_rate() {
        let disk = Arc::<DiskLimits>::default();
        let mut ring = RingLimits::new(disk.clone());
        disk.set(rates(0, 1), SECOND);
        assert!(ring.admit(piece(Kind::Read, 1 << 20), SECOND).is_ok(), "a large request begins");
        ring.begun();
        let again = ring.admit(piece(Kind::Read, 1 << 20), SECOND).unwrap_err();
        assert!(again <= SECOND + ASK_NS);
        assert_eq!(ring.waits_until(SECOND), Some(again));
        disk.set(rates(0, 1 << 40), 2 * SECOND);
        assert_eq!(ring.waits_until(2 * SECOND), None);
        assert!(ring.admit(piece(Kind::Read, 1 << 20), 2 * SECOND).is_ok());
        ring.begun();
        disk.set(rates(0, 0), 3 * SECOND);
        assert!(ring.admit(piece(Kind::Read, 1 << 40), 3 * SECOND).is_ok());
    }

    #[test]
    fn a_flush_costs_nothing_and_groups_without_use_are_forgotten() {
        let (groups, disk) = (LimitGroups::default(), Arc::<DiskLimits>::default());
        groups.join(&disk, Some("a"));
        groups.set("b", rates(1, 0), 0);
        assert_eq!(groups.all().len(), 2);
        groups.set("b", rates(0, 0), 0);
        disk.set(rates(1, 0), 0);
        let mut ring = RingLimits::new(disk.clone());
        assert!((0..9).all(|_| {
            let admitted = ring.admit(piece(Kind::Flush, 0), 5).is_ok();
            ring.begun();
            admitted
        }));
        drop((ring, disk));
        assert!(groups.all().is_empty());
    }
}
