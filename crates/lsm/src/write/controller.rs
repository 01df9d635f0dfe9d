//! The law of backpressure: from debt to the rate at which writes are admitted. Pure; tried against
//! step loads in the tests below.
//!
//! *Pressure* is a number from 0 to 1, the largest of:
//!
//! - files of level 0 that are left to merge, where a file that is being merged counts by the part
//!   that is left of its merge: 0 at the number at which a merge begins, ½ at
//!   `level0_file_num_compaction_trigger` more, 1 at `level0_stop_writes_trigger`, linear in
//!   between. A merge that waits for more files, because the base is much larger, is no debt;
//! - all files of level 0: 0 at `level0_slowdown_writes_trigger`, 1 at
//!   `level0_stop_writes_trigger`;
//! - bytes that merges are behind ([`Shape::debt`](crate::write::picker::Shape::debt)): 0 at half
//!   of the family's bytes (1 GiB if that is more), ½ at twice, 1 at four times as many; or
//!   earlier, at `soft_pending_compaction_bytes_limit` and `hard_pending_compaction_bytes_limit`.
//!
//! *Drain* is the rate at which bytes leave level 0, smoothed over some seconds. It is what the
//! database can take for long. So only the time counts in which merges are due or out of level 0,
//! and run as fast as they can. A merge of level 0 that waits for one of the base is a part of
//! that: both together are one sample.
//!
//! The rate is unlimited below pressure ¼; twice the drain at ¼; and the drain at ½, linear in
//! between. Above, it falls with the square of what is left to 1. So a load above what the database
//! can take settles at pressure ½, with a short level 0, and no write ever waits for a whole merge:
//! each group is delayed by as much as its bytes take at the rate, at most [`DELAY_MAX_NS`].
//!
//! The square is for a drain that falls faster than its measure follows, because the disk or
//! another program holds a merge up: the last files of level 0 are left to few, late groups
//! instead of being filled at once, after which all writes would wait.
//!
//! The same for memtables: when all of them but the one that is written to wait to be flushed, the
//! rate is that of flushes while half of the room in it is left, and falls with the square of what
//! is left.
//!
//! Blob files are removed when their collection ends, all at once. So their space is a matter of
//! time: the room that is left is to last until then, which is estimated by what the last ones
//! took for each byte of their work. Their pressure, 0 where collection begins and 1 at the limit
//! of their space, decides from when on collection hurries and writes are slowed
//! ([`BLOB_LIMITED`]).

use crate::family_options::FamilyOptions;

/// Longest delay of a group, in nanoseconds.
pub(crate) const DELAY_MAX_NS: u64 = 20_000_000;
/// Time that a writer may be idle and make up for later, in nanoseconds.
const BURST_NS: u64 = 5_000_000;
/// Time over which a drain is smoothed, in nanoseconds.
const SMOOTHED_NS: f64 = 10e9;
/// Least time of a sample, in nanoseconds.
const SAMPLE_NS: u64 = 50_000_000;
/// The longest time without any drain for which a sample waits, in nanoseconds.
const IDLE_MAX_NS: u64 = 1_500_000_000;
/// The drain before anything was measured, and the time for which it counts in nanoseconds: the
/// first samples may be of a merge that waits to begin.
const DRAIN_FIRST: f64 = 200e6;
const DRAIN_FIRST_NS: f64 = 2e8;
/// The least drain that is assumed, in bytes per second.
const DRAIN_MIN: f64 = 1e6;
/// Debt in bytes that is never too much.
const DEBT_MIN: u64 = 1 << 30;

/// Pressure from which on writes are limited.
pub(crate) const LIMITED: f64 = 0.25;
/// Pressure of blob files from which on their collection runs at full speed and writes are limited.
pub(crate) const BLOB_LIMITED: f64 = 0.125;
/// Pressure at which as much is admitted as leaves level 0.
pub(crate) const SETTLED: f64 = 0.5;
/// The least part of a drain that is admitted.
const PART_MIN: f64 = 0.01;

/// Level 0 of a family, as far as it counts for pressure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Level0 {
    /// Files that merges can reduce.
    pub files: usize,
    /// Files at which a merge begins, and at which an overload settles.
    pub due: f64,
    pub settled: f64,
    /// Files from which on writes are slowed, and at which they stop.
    slowdown: f64,
    pub stop: usize,
}

impl Level0 {
    /// Level 0 with `files`, of which merges take `due` at least.
    pub fn new(options: &FamilyOptions, files: usize, due: usize) -> Level0 {
        let (stop, slowdown) = (options.level0_stop as f64, options.level0_slowdown as f64);
        let due = due as f64;
        let settled = (due + options.level0_trigger as f64).min((due + stop) / 2.0).max(due + 1.0);
        Level0 { files, due, settled, slowdown, stop: options.level0_stop }
    }

    /// Whether it may have a pressure.
    pub fn counts(&self) -> bool {
        self.files as f64 > self.due.min(self.slowdown)
    }

    /// The files that are left when merges have done the work of `merged` files.
    pub fn left(&self, merged: f64) -> f64 {
        (self.files as f64 - merged).max(0.0)
    }

    /// Its pressure when merges have done the work of `merged` files.
    pub fn pressure(&self, merged: f64) -> f64 {
        let stop = self.stop as f64;
        let left = along(self.left(merged), [self.due, self.settled, stop.max(self.settled)]);
        let middle = (self.slowdown + stop) / 2.0;
        left.max(along(self.files as f64, [self.slowdown, middle, stop]))
    }
}

/// The pressure of `debt` bytes that merges are behind, in a family with `bytes` in all levels.
pub(crate) fn debt_pressure(options: &FamilyOptions, debt: u64, bytes: u64) -> f64 {
    let soft = (bytes / 2).max(DEBT_MIN).min(options.pending_soft) as f64;
    let hard = (4.0 * soft).min(options.pending_hard as f64).max(soft + 1.0);
    let middle = (2.0 * soft).min((soft + hard) / 2.0);
    along(debt as f64, [soft, middle, hard])
}

/// The pressure of blob files with `total` bytes of values, whose garbage is collected from `start`
/// on, and which are to stay below `most`.
pub(crate) fn blob_pressure(total: u64, start: u64, most: u64) -> f64 {
    let (start, most) = (start as f64, most as f64);
    along(total as f64, [start, (start + most) / 2.0, most])
}

/// 0, ½ and 1 at three points, linear in between.
fn along(value: f64, [from, middle, to]: [f64; 3]) -> f64 {
    if value <= middle {
        ((value - from) / (middle - from).max(1e-9)).max(0.0) / 2.0
    } else {
        0.5 + ((value - middle) / (to - middle).max(1e-9)).min(1.0) / 2.0
    }
}

/// A rate that is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drain {
    rate: f64,
    /// Time that was measured, in nanoseconds.
    measured_ns: f64,
    sample: Option<Sample>,
}

/// The sample that is being taken. Times in nanoseconds, bytes drained in all.
#[derive(Clone, Copy, Debug)]
struct Sample {
    from_ns: u64,
    from: u64,
    now_ns: u64,
    now: u64,
    /// When something drained last, and the longest time in which nothing did.
    drained_at_ns: u64,
    idle_ns: u64,
}

impl Default for Drain {
    fn default() -> Drain {
        Drain { rate: DRAIN_FIRST, measured_ns: DRAIN_FIRST_NS, sample: None }
    }
}

impl Drain {
    /// Notes that `drained` bytes have drained in all so far. Counts only the time since the last
    /// call; call [`Drain::pause`] when there was nothing to drain, or no hurry.
    ///
    /// A merge that waits for another one, and then makes up for it, counts as a whole: after a
    /// time in which nothing drains a sample takes as long again.
    pub fn sample(&mut self, now_ns: u64, drained: u64) {
        let mut sample = self.sample.unwrap_or(Sample {
            from_ns: now_ns,
            from: drained,
            now_ns,
            now: drained,
            drained_at_ns: now_ns,
            idle_ns: 0,
        });
        if drained != sample.now {
            sample.drained_at_ns = now_ns;
        }
        sample.idle_ns = sample.idle_ns.max(now_ns - sample.drained_at_ns);
        (sample.now_ns, sample.now) = (now_ns, drained);
        self.sample = Some(sample);
        if now_ns - sample.from_ns >= (2 * sample.idle_ns.min(IDLE_MAX_NS)).max(SAMPLE_NS) {
            self.end_sample();
        }
    }

    /// Nothing is to be drained for now.
    pub fn pause(&mut self) {
        if self.sample.is_some_and(|sample| sample.now_ns - sample.from_ns >= SAMPLE_NS) {
            self.end_sample();
        }
        self.sample = None;
    }

    fn end_sample(&mut self) {
        let Some(sample) = self.sample.take() else { return };
        let ns = (sample.now_ns - sample.from_ns) as f64;
        let rate = sample.now.saturating_sub(sample.from) as f64 * 1e9 / ns.max(1.0);
        self.measured_ns += ns;
        // The first samples count as much as each other.
        let weight = (1.0 - (-ns / SMOOTHED_NS).exp()).max(ns / self.measured_ns);
        self.rate += (rate - self.rate) * weight;
        let at = Sample {
            from_ns: sample.now_ns,
            from: sample.now,
            drained_at_ns: sample.now_ns,
            idle_ns: 0,
            ..sample
        };
        self.sample = Some(at);
    }

    /// Bytes per second.
    pub fn rate(&self) -> f64 {
        self.rate.max(DRAIN_MIN)
    }
}

/// The rate of writes in bytes per second at a pressure of merges; `None` for no limit.
pub(crate) fn rate(pressure: f64, drain: f64) -> Option<f64> {
    if pressure < LIMITED {
        return None;
    }
    let part = if pressure <= SETTLED {
        2.0 - (pressure - LIMITED) / (SETTLED - LIMITED)
    } else {
        ((1.0 - pressure.min(1.0)) / (1.0 - SETTLED)).powi(2).max(PART_MIN)
    };
    Some(drain * part)
}

/// The part of background work's share of the disk that merges have in any case. An overload
/// settles where it begins: until then writes are slowed, and reads are not.
pub(crate) fn urgency(pressure: f64) -> f64 {
    ((pressure - SETTLED) / (1.0 - SETTLED)).clamp(0.0, 1.0)
}

/// The rate of writes while no other memtable is free and `room` (0 to 1) of this one is.
pub(crate) fn rate_into_last_memtable(room: f64, flushed: f64) -> f64 {
    flushed * (2.0 * room).powi(2).clamp(PART_MIN, 2.0)
}

/// Admits groups at a rate.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Admission {
    /// When the groups admitted so far are done at the rate.
    due_ns: u64,
}

impl Admission {
    /// The delay of a group of `bytes` at `rate`, in nanoseconds.
    pub fn delay_ns(&mut self, now_ns: u64, bytes: usize, rate: f64) -> u64 {
        let from = self.due_ns.max(now_ns.saturating_sub(BURST_NS));
        let takes = bytes as f64 * 1e9 / rate.max(1.0);
        // A group that takes longer is not made up for: its bytes are few, and it has waited.
        self.due_ns = (from + takes as u64).min(now_ns + DELAY_MAX_NS);
        self.due_ns.saturating_sub(now_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_follows_the_options() {
        let options = FamilyOptions::default();
        let of = |files| Level0::new(&options, files, 4).pressure(0.0);
        assert_eq!([0, 4, 8, 36, 99].map(of), [0.0, 0.0, 0.5, 1.0, 1.0]);
        let of = |debt, bytes| debt_pressure(&options, debt, bytes);
        let gib = 1 << 30;
        assert_eq!((of(gib, 0), of(2 * gib, 0), of(4 * gib, 0)), (0.0, 0.5, 1.0));
        assert_eq!((of(2 * gib, 4 * gib), of(4 * gib, 4 * gib)), (0.0, 0.5));
        let limited = FamilyOptions { pending_soft: 10, pending_hard: 20, ..options };
        assert!((debt_pressure(&limited, 15, 0) - 0.5).abs() < 0.1);
    }

    #[test]
    fn files_that_wait_for_more_or_are_merged_are_no_pressure() {
        let options = FamilyOptions::default();
        let of = |files, merged| Level0::new(&options, files, 12).pressure(merged);
        assert_eq!((of(12, 0.0), of(16, 0.0)), (0.0, 0.5));
        assert_eq!((of(16, 4.0), of(16, 2.0)), (0.0, 0.25), "by the part that is left");
        assert_eq!((of(28, 16.0), of(36, 36.0)), (0.5, 1.0), "reads have to pass all of them");
    }

    #[test]
    fn every_level_0_has_a_way_from_no_pressure_to_all() {
        for (trigger, slowdown, stop) in [(1, 1, 1), (4, 4, 4), (4, 5, 6), (2, 20, 36), (9, 9, 12)]
        {
            let options = FamilyOptions {
                level0_trigger: trigger,
                level0_slowdown: slowdown,
                level0_stop: stop,
                ..FamilyOptions::default()
            };
            let of = |files| Level0::new(&options, files, trigger).pressure(0.0);
            assert!(of(trigger.min(slowdown) - 1) == 0.0, "{options:?}");
            assert!((0..50).all(|files| of(files) <= of(files + 1)), "{options:?}");
            assert!(of(stop + 1) > SETTLED, "{options:?}");
        }
    }

    #[test]
    fn blob_files_have_a_pressure_on_the_way_to_their_limit() {
        let of = |total| blob_pressure(total, 160, 200);
        assert_eq!((of(100), of(160), of(200), of(900)), (0.0, 0.0, 1.0, 1.0));
        assert!((of(180) - 0.5).abs() < 1e-9 && (of(170) - 0.25).abs() < 1e-9);
        assert_eq!((blob_pressure(0, 0, 0), blob_pressure(9, 0, 0)), (0.0, 1.0));
    }

    #[test]
    fn a_merge_that_waits_to_begin_does_not_end_the_drain() {
        let mut drain = Drain::default();
        (0..10).for_each(|tenth| drain.sample(tenth * 100_000_000, 0));
        assert!((0.1 * DRAIN_FIRST..=DRAIN_FIRST).contains(&drain.rate()), "{drain:?}");
        (10..300).for_each(|tenth| drain.sample(tenth * 100_000_000, (tenth - 9) * 1_000_000));
        assert!((9e6..11e6).contains(&drain.rate()), "{drain:?}");
    }

    #[test]
    fn a_merge_that_waits_and_makes_up_for_it_is_one_sample() {
        // 80 MB a second on the whole: 1.2 s without, then 0.4 s at 320 MB a second; and a pause.
        let mut drain = Drain::default();
        for cycle in 0..20u64 {
            let (from_ns, from) = (cycle * 5_000_000_000, cycle * 128_000_000);
            for ms in (0..1600_u64).step_by(10) {
                let drained = ms.saturating_sub(1200) * 320_000;
                drain.sample(from_ns + ms * 1_000_000, from + drained);
                assert!(drain.rate() > 70e6, "{drain:?}");
            }
            drain.pause();
        }
        assert!((75e6..90e6).contains(&drain.rate()), "{drain:?}");
    }

    #[test]
    fn the_rate_falls_with_pressure() {
        assert_eq!(rate(0.2, 100.0), None);
        assert_eq!(rate(0.25, 100.0), Some(200.0));
        assert_eq!(rate(0.5, 100.0), Some(100.0));
        assert_eq!(rate(0.75, 100.0), Some(25.0));
        assert_eq!(rate(1.0, 100.0), Some(1.0));
        assert!(rate_into_last_memtable(0.5, 100.0) > rate_into_last_memtable(0.2, 100.0));
    }

    #[test]
    fn an_overload_slows_writes_before_reads() {
        assert_eq!([0.0, 0.5, 0.75, 1.0].map(urgency), [0.0, 0.0, 0.5, 1.0]);
        assert!(rate(0.5, 100.0).is_some());
    }

    #[test]
    fn a_group_is_never_delayed_for_long() {
        let mut admission = Admission::default();
        assert_eq!(admission.delay_ns(1_000_000_000, 1 << 30, 1.0), DELAY_MAX_NS);
        assert!(admission.delay_ns(1_020_000_000, 1, 1e9) < 1_000_000, "and made up for");
    }

    /// Level 0 and the merges that reduce it, in steps of a millisecond. A merge begins with `due`
    /// files, and takes all of level 0. It does `bytes_per_second` of it, with what it overlaps.
    /// Every second one waits for `blocked_ms` before, until another merge has left the base.
    struct Plant {
        options: FamilyOptions,
        due: usize,
        memtable: f64,
        level0: f64,
        merging: Option<(f64, f64)>,
        merges: u64,
        blocked_ms: u64,
        blocked_since: u64,
        drained: f64,
        bytes_per_second: f64,
        /// Every 20 s, merges run at a tenth of their speed for this time.
        held_up_ms: u64,
        steps: u64,
    }

    impl Plant {
        fn new(due: usize, blocked_ms: u64, bytes_per_second: f64) -> Plant {
            Plant {
                options: FamilyOptions::default(),
                due,
                memtable: 4e6,
                level0: 0.0,
                merging: None,
                merges: 0,
                blocked_ms,
                blocked_since: 0,
                drained: 0.0,
                bytes_per_second,
                held_up_ms: 0,
                steps: 0,
            }
        }

        fn is_due(&self) -> bool {
            self.merging.is_none() && self.files() >= self.due
        }

        fn step(&mut self, written: f64) {
            self.level0 += written;
            if self.is_due() {
                self.blocked_since += 1;
                if self.merges.is_multiple_of(2) || self.blocked_since > self.blocked_ms {
                    self.merging = Some((self.level0, self.level0));
                    self.merges += 1;
                    self.blocked_since = 0;
                }
            }
            self.steps += 1;
            let is_held_up = self.steps % 20_000 < self.held_up_ms;
            if let Some((all, left)) = &mut self.merging {
                let speed = self.bytes_per_second * if is_held_up { 0.1 } else { 1.0 };
                let done = (speed / 1000.0).min(*left);
                *left -= done;
                self.drained += done;
                if *left <= 0.0 {
                    self.level0 -= *all;
                    self.merging = None;
                }
            }
        }

        fn files(&self) -> usize {
            (self.level0 / self.memtable) as usize
        }

        /// The files whose work the merge has done.
        fn merged(&self) -> f64 {
            self.merging.map_or(0.0, |(all, left)| (all - left) / self.memtable)
        }
    }

    /// Offers a load that changes in steps; returns the most files, the longest delay in
    /// milliseconds and the bytes written in each step.
    fn run(loads: &[(u64, f64)], mut plant: Plant) -> (usize, u64, Vec<f64>) {
        let (mut drain, mut admission) = (Drain::default(), Admission::default());
        let (mut most, mut longest, mut written) = (0, 0, Vec::new());
        let (mut now_ns, mut blocked_until, mut waiting) = (0u64, 0u64, 0.0f64);
        for &(seconds, load) in loads {
            let mut sum = 0.0;
            for _ in 0..seconds * 1000 {
                now_ns += 1_000_000;
                // Writers wait for their groups: no more than a group each is pending.
                waiting = (waiting + load / 1000.0).min(256e3);
                let mut admitted = 0.0;
                while now_ns >= blocked_until && waiting >= 16e3 {
                    waiting -= 16e3;
                    admitted += 16e3;
                    let level0 = Level0::new(&plant.options, plant.files(), plant.due);
                    match plant.merging.is_some() || plant.is_due() {
                        true => drain.sample(now_ns, plant.drained as u64),
                        false => drain.pause(),
                    }
                    let pressure = level0.pressure(plant.merged());
                    let Some(rate) = rate(pressure, drain.rate()) else { continue };
                    let delay = admission.delay_ns(now_ns, 16_000, rate);
                    longest = longest.max(delay / 1_000_000);
                    blocked_until = now_ns + delay;
                }
                plant.step(admitted);
                sum += admitted;
                most = most.max(plant.files());
            }
            written.push(sum / seconds as f64);
        }
        (most, longest, written)
    }

    #[test]
    fn a_step_load_beyond_what_merges_take_settles_without_stops() {
        for due in [4, 12] {
            // 20 s at a quarter of what merges take, 60 s at ten times as much, and back.
            let loads = [(20, 5e6), (60, 200e6), (20, 5e6)];
            let (most, longest, written) = run(&loads, Plant::new(due, 0, 20e6));
            assert!(most < 36, "writes stopped: {most} files");
            assert!(longest <= 20, "{longest} ms");
            assert!((written[0] - 5e6).abs() < 0.2e6, "the first load was limited: {written:?}");
            assert!(written[1] > 0.85 * 20e6, "less than merges take: {written:?}");
            assert!(written[2] > 0.98 * 5e6, "the last load was limited: {written:?}");
        }
    }

    #[test]
    fn a_merge_that_is_held_up_slows_writes_and_does_not_stop_them() {
        for (held_up_ms, bytes_per_second) in [(500, 60e6), (1000, 60e6), (2000, 20e6)] {
            let plant = Plant { held_up_ms, ..Plant::new(4, 0, bytes_per_second) };
            let (most, longest, written) = run(&[(200, 200e6)], plant);
            assert!(most < 36, "writes stopped: {most} files");
            assert!(longest <= 20, "{longest} ms");
            assert!(written[0] > 0.85 * bytes_per_second, "{written:?}");
        }
    }

    #[test]
    fn a_load_just_below_what_merges_take_is_hardly_limited() {
        let (most, _, written) = run(&[(60, 17e6)], Plant::new(4, 0, 20e6));
        assert!(most <= 20, "{most} files");
        assert!(written[0] > 0.97 * 17e6, "{written:?}");
    }

    #[test]
    fn a_load_that_merges_can_take_never_waits() {
        // Merges begin with 12 files. Half of them wait for half a second, when five files more
        // have come. Level 0 can take 40 MB a second, or 32 with the waiting.
        for load in [4e6, 8e6, 16e6, 22e6] {
            let (most, longest, written) = run(&[(120, load)], Plant::new(12, 500, 40e6));
            assert!(most < 36, "{most} files at {load}");
            assert!(longest <= 1, "a group waited for {longest} ms at {load}");
            assert!(written[0] > 0.99 * load, "{written:?}");
        }
    }
}
