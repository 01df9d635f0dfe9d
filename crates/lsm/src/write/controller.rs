//! The law of backpressure: from debt to the rate at which writes are admitted. Pure; tried against
//! step loads in the tests below.
//!
//! *Pressure* is a number from 0 to 1, the largest of:
//!
//! - files of level 0: 0 at `level0_file_num_compaction_trigger`, ½ at half of
//!   `level0_slowdown_writes_trigger`, 1 at `level0_stop_writes_trigger`, linear in between;
//! - bytes that merges are behind ([`Shape::debt`](crate::write::picker::Shape::debt)): 0 at half
//!   of the family's bytes (1 GiB if that is more), ½ at twice, 1 at four times as many; or
//!   earlier, at `soft_pending_compaction_bytes_limit` and `hard_pending_compaction_bytes_limit`.
//!
//! *Drain* is the rate at which bytes leave level 0, smoothed over some seconds. It is what the
//! database can take for long.
//!
//! Blob files have a pressure of their own, while their garbage is collected: 0 where collection
//! begins, 1 at the limit of their space, linear in between. Its drain is the rate at which
//! collection frees space. The lower rate of the two applies.
//!
//! The rate is unlimited below pressure ¼; twice the drain at ¼; the drain at ½; and a quarter of
//! it at 1, linear in between. So a load above what the database can take settles at pressure ½,
//! with a short level 0, and no write ever waits for a whole merge: each group is delayed by as
//! much as its bytes take at the rate, at most [`DELAY_MAX_NS`].
//!
//! The same for memtables: when all of them but the one that is written to wait to be flushed, the
//! rate falls with the room that is left in it, relative to the rate of flushes.

use crate::family_options::FamilyOptions;

/// Longest delay of a group, in nanoseconds.
pub(crate) const DELAY_MAX_NS: u64 = 20_000_000;
/// Time that a writer may be idle and make up for later, in nanoseconds.
const BURST_NS: u64 = 5_000_000;
/// Time over which a drain is smoothed, in nanoseconds.
const SMOOTHED_NS: f64 = 5e9;
/// Least time between two samples, in nanoseconds.
const SAMPLE_NS: u64 = 50_000_000;
/// The drain before anything was measured, and the least that is assumed, in bytes per second.
const DRAIN_FIRST: f64 = 200e6;
const DRAIN_MIN: f64 = 1e6;
/// Debt in bytes that is never too much.
const DEBT_MIN: u64 = 1 << 30;

/// Pressure from which on writes are limited.
pub(crate) const LIMITED: f64 = 0.25;
/// Pressure at which as much is admitted as leaves level 0.
pub(crate) const SETTLED: f64 = 0.5;

/// The pressure of one family: `files` in level 0 that merges can reduce, `debt` bytes that they
/// are behind, `bytes` in all levels.
pub(crate) fn pressure(options: &FamilyOptions, files: usize, debt: u64, bytes: u64) -> f64 {
    let (trigger, stop) = (options.level0_trigger as f64, options.level0_stop as f64);
    let settled = (options.level0_slowdown as f64 / 2.0).clamp(trigger + 1.0, stop);
    let level0 = along(files as f64, [trigger, settled, stop]);
    let soft = (bytes / 2).max(DEBT_MIN).min(options.pending_soft) as f64;
    let hard = (4.0 * soft).min(options.pending_hard as f64).max(soft + 1.0);
    let middle = (2.0 * soft).min((soft + hard) / 2.0);
    level0.max(along(debt as f64, [soft, middle, hard]))
}

/// The pressure of blob files of `total` bytes with `live` bytes of live values, whose garbage is
/// collected from a ratio of both on that is `start`, and which are to stay below `most`.
pub(crate) fn blob_pressure(total: u64, live: u64, start: f64, most: f64) -> f64 {
    let ratio = total as f64 / live.max(1) as f64;
    along(ratio, [start, (start + most) / 2.0, most])
}

/// The files of level 0 at which an overload settles.
pub(crate) fn settled_files(options: &FamilyOptions) -> usize {
    (options.level0_slowdown / 2).max(options.level0_trigger + 1)
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
    /// The last sample: when, and how many bytes had drained.
    sampled: Option<(u64, u64)>,
}

impl Default for Drain {
    fn default() -> Drain {
        Drain { rate: DRAIN_FIRST, measured_ns: 0.0, sampled: None }
    }
}

impl Drain {
    /// Takes a sample: `drained` bytes in all so far. Counts only the time since the last sample;
    /// call [`Drain::pause`] when there was nothing to drain.
    pub fn sample(&mut self, now_ns: u64, drained: u64) {
        let Some((then_ns, before)) = self.sampled else {
            self.sampled = Some((now_ns, drained));
            return;
        };
        let ns = now_ns.saturating_sub(then_ns);
        if ns < SAMPLE_NS {
            return;
        }
        let rate = drained.saturating_sub(before) as f64 * 1e9 / ns as f64;
        self.measured_ns += ns as f64;
        // The first samples count as much as each other.
        let weight = (1.0 - (-(ns as f64) / SMOOTHED_NS).exp()).max(ns as f64 / self.measured_ns);
        self.rate += (rate - self.rate) * weight;
        self.sampled = Some((now_ns, drained));
    }

    /// Nothing is to be drained for now.
    pub fn pause(&mut self) {
        self.sampled = None;
    }

    /// Bytes per second.
    pub fn rate(&self) -> f64 {
        self.rate.max(DRAIN_MIN)
    }
}

/// The rate of writes in bytes per second at a pressure; `None` for no limit.
pub(crate) fn rate(pressure: f64, drain: f64) -> Option<f64> {
    if pressure < LIMITED {
        return None;
    }
    let factor = if pressure <= SETTLED {
        2.0 - (pressure - LIMITED) / (SETTLED - LIMITED)
    } else {
        1.0 - 0.75 * (pressure - SETTLED) / (1.0 - SETTLED)
    };
    Some(drain * factor.max(0.25))
}

/// The part of background work's share of the disk that merges have in any case. An overload
/// settles where it begins: until then writes are slowed, and reads are not.
pub(crate) fn urgency(pressure: f64) -> f64 {
    ((pressure - SETTLED) / (1.0 - SETTLED)).clamp(0.0, 1.0)
}

/// The rate of writes while no other memtable is free and `room` (0 to 1) of this one is.
pub(crate) fn rate_into_last_memtable(room: f64, flushed: f64) -> f64 {
    flushed * (2.0 * room).clamp(0.05, 2.0)
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
        let of = |files| pressure(&options, files, 0, 0);
        assert_eq!((of(0), of(4), of(10), of(36), of(99)), (0.0, 0.0, 0.5, 1.0, 1.0));
        let of = |debt, bytes| pressure(&options, 0, debt, bytes);
        let gib = 1 << 30;
        assert_eq!((of(gib, 0), of(2 * gib, 0), of(4 * gib, 0)), (0.0, 0.5, 1.0));
        assert_eq!((of(2 * gib, 4 * gib), of(4 * gib, 4 * gib)), (0.0, 0.5));
        let limited = FamilyOptions { pending_soft: 10, pending_hard: 20, ..options };
        assert!((pressure(&limited, 0, 15, 0) - 0.5).abs() < 0.1);
    }

    #[test]
    fn blob_files_have_a_pressure_on_the_way_to_their_limit() {
        let of = |total| blob_pressure(total, 100, 1.6, 2.0);
        assert_eq!((of(100), of(160), of(200), of(900)), (0.0, 0.0, 1.0, 1.0));
        assert!((of(180) - 0.5).abs() < 1e-9 && (of(170) - 0.25).abs() < 1e-9);
        assert_eq!((blob_pressure(0, 0, 1.6, 2.0), blob_pressure(9, 0, 1.6, 2.0)), (0.0, 1.0));
    }

    #[test]
    fn the_rate_falls_with_pressure() {
        assert_eq!(rate(0.2, 100.0), None);
        assert_eq!(rate(0.25, 100.0), Some(200.0));
        assert_eq!(rate(0.5, 100.0), Some(100.0));
        assert_eq!(rate(1.0, 100.0), Some(25.0));
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

    /// Level 0 and the merges that reduce it, in steps of a millisecond. A merge takes all of
    /// level 0, and `bytes_per_second` of it, with what it overlaps.
    struct Plant {
        options: FamilyOptions,
        memtable: f64,
        level0: f64,
        merging: Option<(f64, f64)>,
        drained: f64,
        bytes_per_second: f64,
    }

    impl Plant {
        fn step(&mut self, written: f64) {
            let before = self.level0;
            self.level0 += written;
            assert!(before <= self.level0);
            let due = self.level0 / self.memtable >= self.options.level0_trigger as f64;
            if self.merging.is_none() && due {
                self.merging = Some((self.level0, self.level0));
            }
            if let Some((all, left)) = &mut self.merging {
                let done = (self.bytes_per_second / 1000.0).min(*left);
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
    }

    /// Offers a load that changes in steps; returns the most files, the longest delay in
    /// milliseconds and the bytes written in each step.
    fn run(loads: &[(u64, f64)], bytes_per_second: f64) -> (usize, u64, Vec<f64>) {
        let options = FamilyOptions::default();
        let memtable = 4e6;
        let mut plant =
            Plant { options, memtable, level0: 0.0, merging: None, drained: 0.0, bytes_per_second };
        let (mut drain, mut admission) = (Drain::default(), Admission::default());
        let (mut most, mut longest, mut written) = (0, 0, Vec::new());
        let (mut now_ns, mut blocked_until, mut waiting) = (0u64, 0u64, 0.0f64);
        for &(seconds, load) in loads {
            let mut sum = 0.0;
            for _ in 0..seconds * 1000 {
                now_ns += 1_000_000;
                // Writers wait for their groups: no more than a group each is pending.
                waiting = (waiting + load / 1000.0).min(64e3);
                let mut admitted = 0.0;
                while now_ns >= blocked_until && waiting >= 16e3 {
                    waiting -= 16e3;
                    admitted += 16e3;
                    let files = plant.files();
                    let pressure = pressure(&plant.options, files, 0, 0);
                    drain.sample(now_ns, plant.drained as u64);
                    if plant.merging.is_none() {
                        drain.pause();
                    }
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
        // 20 s at a quarter of what merges take, 60 s at ten times as much, and back.
        let (most, longest, written) = run(&[(20, 5e6), (60, 200e6), (20, 5e6)], 20e6);
        assert!(most < 36, "writes stopped: {most} files");
        assert!(longest <= 20, "{longest} ms");
        assert!((written[0] - 5e6).abs() < 0.2e6, "the first load was limited: {written:?}");
        assert!(written[1] > 0.85 * 20e6, "less than merges take: {written:?}");
        assert!(written[2] > 0.98 * 5e6, "the last load was limited: {written:?}");
    }

    #[test]
    fn a_load_just_below_what_merges_take_is_hardly_limited() {
        let (most, _, written) = run(&[(60, 17e6)], 20e6);
        assert!(most <= 20, "{most} files");
        assert!(written[0] > 0.97 * 17e6, "{written:?}");
    }
}
