//! Counters of a disk's rings: written only by a ring's core, read by the metrics.
//!
//! A request's time runs from the turn that popped it to its completion. The clock is read once for
//! all requests that are completed together.

use std::sync::atomic::{AtomicU64, Ordering};

use bdev::Kind;

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Its current value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Number of buckets of a [`Latency`].
pub const LATENCY_BUCKETS: usize = 28;
/// Exponent of the first bucket's end.
const FIRST: u32 = 8;

/// A histogram of times, with a bucket for each power of two.
#[derive(Debug, Default)]
pub struct Latency {
    /// Sum of all times, nanoseconds.
    pub sum_ns: Counter,
    buckets: [Counter; LATENCY_BUCKETS],
}

impl Latency {
    #[inline]
    pub(crate) fn add(&self, ns: u64) {
        let bits = u64::BITS - (ns >> FIRST).leading_zeros();
        self.buckets[(bits as usize).min(LATENCY_BUCKETS - 1)].add(1);
        self.sum_ns.add(ns);
    }

    /// The number of requests in each bucket: those shorter than the bucket's [`Latency::end_ns`]
    /// and not shorter than the previous one's.
    pub fn counts(&self) -> [u64; LATENCY_BUCKETS] {
        std::array::from_fn(|at| self.buckets[at].get())
    }

    /// Where a bucket ends, in nanoseconds; the last one has no end.
    pub fn end_ns(bucket: usize) -> Option<u64> {
        (bucket + 1 < LATENCY_BUCKETS).then(|| 1 << (FIRST as usize + bucket))
    }
}

/// Requests of one kind.
#[derive(Debug, Default)]
pub struct KindStats {
    /// Submitted to the device.
    pub requests: Counter,
    /// Their bytes.
    pub bytes: Counter,
    /// Times of the requests that the device has finished.
    pub latency: Latency,
    /// Requests that failed at the device, for any reason.
    pub errors: Counter,
    /// Requests that failed for lack of space.
    pub no_space: Counter,
}

/// Counters of one ring since the disk was attached.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueStats {
    /// Reads.
    pub reads: KindStats,
    /// Writes.
    pub writes: KindStats,
    /// Flushes.
    pub flushes: KindStats,
    /// Discards.
    pub discards: KindStats,
    /// Writes of zeroes.
    pub zeroes: KindStats,
    /// Requests returned to the guest, including those that needed no device.
    pub completions: Counter,
    /// Turns in which requests were returned.
    pub batches: Counter,
    /// Interrupts sent.
    pub signals: Counter,
    /// Requests that an earlier process had not finished.
    pub resubmitted: Counter,
    /// Times that the ring was broken.
    pub broken: Counter,
    /// Kicks of the guest.
    pub kicks: Counter,
    /// Turns in which the ring was polled.
    pub turns: Counter,
    /// Turns that found something to do.
    pub worked: Counter,
    /// Requests that are at the device or wait for it.
    pub depth: Counter,
}

impl QueueStats {
    /// All counters except the current depth, each with the name that a successor uses.
    pub(crate) fn counters(&self) -> Vec<(String, &Counter)> {
        let mut all: Vec<_> = [
            ("completions", &self.completions),
            ("batches", &self.batches),
            ("signals", &self.signals),
            ("resubmitted", &self.resubmitted),
            ("broken", &self.broken),
            ("kicks", &self.kicks),
            ("turns", &self.turns),
            ("worked", &self.worked),
        ]
        .map(|(name, counter)| (name.to_owned(), counter))
        .into();
        let kinds = [
            ("reads", &self.reads),
            ("writes", &self.writes),
            ("flushes", &self.flushes),
            ("discards", &self.discards),
            ("zeroes", &self.zeroes),
        ];
        for (kind, of) in kinds {
            all.push((kind.to_owned(), &of.requests));
            all.push((format!("{kind}-bytes"), &of.bytes));
            all.push((format!("{kind}-errors"), &of.errors));
            all.push((format!("{kind}-no-space"), &of.no_space));
            all.push((format!("{kind}-ns"), &of.latency.sum_ns));
            let buckets = of.latency.buckets.iter().enumerate();
            all.extend(buckets.map(|(at, counter)| (format!("{kind}-log2-{at}"), counter)));
        }
        all
    }

    #[inline]
    pub(crate) fn submitted(&self, kind: Kind, len: u64) {
        let of = self.of(kind);
        of.requests.add(1);
        of.bytes.add(len);
    }

    #[inline]
    pub(crate) fn of(&self, kind: Kind) -> &KindStats {
        match kind {
            Kind::Read => &self.reads,
            Kind::Write => &self.writes,
            Kind::Flush => &self.flushes,
            Kind::Discard => &self.discards,
            Kind::WriteZeroes { .. } => &self.zeroes,
        }
    }

    #[cold]
    pub(crate) fn failed(&self, kind: Kind, no_space: bool) {
        let of = self.of(kind);
        of.errors.add(1);
        of.no_space.add(no_space.into());
    }

    #[inline]
    pub(crate) fn completed(&self, requests: u64) {
        self.completions.add(requests);
        self.batches.add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_has_a_name_of_its_own() {
        let stats = QueueStats::default();
        let names: std::collections::BTreeSet<_> =
            stats.counters().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), 8 + 5 * (5 + LATENCY_BUCKETS));
        stats.of(Kind::Read).latency.add(300);
        let counted: Vec<_> = stats.counters().into_iter().filter(|(_, n)| n.get() > 0).collect();
        let counted: Vec<_> = counted.iter().map(|(name, n)| (name.as_str(), n.get())).collect();
        assert_eq!(counted, [("reads-ns", 300), ("reads-log2-1", 1)]);
    }

    #[test]
    fn a_time_is_in_the_first_bucket_that_ends_after_it() {
        let latency = Latency::default();
        let times = [0, 1, 255, 256, 511, 512, 1_000_000, u64::from(u32::MAX), 1 << 34, u64::MAX];
        for ns in times {
            let before = latency.counts();
            latency.add(ns);
            let after = latency.counts();
            let at = (0..LATENCY_BUCKETS).find(|&at| after[at] != before[at]).unwrap();
            assert!(Latency::end_ns(at).is_none_or(|end| ns < end), "{ns} in {at}");
            assert!(
                at == 0 || Latency::end_ns(at - 1).is_some_and(|end| end <= ns),
                "{ns} in {at}"
            );
        }
        assert_eq!(latency.counts().iter().sum::<u64>(), times.len() as u64);
    }
}
