//! Counters of a disk's rings: written by a ring's core only, read by whoever tells metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::request::Kind;

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed) + n, Ordering::Relaxed);
    }

    /// Its value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Requests of one kind.
#[derive(Debug, Default)]
pub struct KindStats {
    /// Given to the device.
    pub requests: Counter,
    /// Their bytes.
    pub bytes: Counter,
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
    /// Discards and writes of zeroes.
    pub discards: KindStats,
    /// Requests that failed at the device.
    pub errors: Counter,
    /// Requests given back to the guest, also those that needed no device.
    pub completions: Counter,
    /// Turns in which requests were given back.
    pub batches: Counter,
    /// Interrupts.
    pub signals: Counter,
    /// Requests that an earlier process had left unfinished.
    pub resubmitted: Counter,
    /// Times that the guest made the ring meaningless.
    pub broken: Counter,
}

impl QueueStats {
    #[inline]
    pub(crate) fn begin(&self, kind: Kind, len: u64) {
        let of = match kind {
            Kind::Read => &self.reads,
            Kind::Write => &self.writes,
            Kind::Flush => &self.flushes,
            Kind::Discard | Kind::WriteZeroes { .. } => &self.discards,
        };
        of.requests.add(1);
        of.bytes.add(len);
    }

    #[inline]
    pub(crate) fn completed(&self, requests: u64) {
        self.completions.add(requests);
        self.batches.add(1);
    }
}
