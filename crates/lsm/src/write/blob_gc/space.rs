//! The space that blob files take: what is known of it, how urgent collection is, and the rate at
//! which it frees space.

use std::cell::Cell;

use crate::db::CfId;
use crate::version::{Family, Version};
use crate::write::blob_gc::picker::{BlobSize, Rules};
use crate::write::controller;
use crate::write::state::WriteState;

/// As many generations of memtables refer to values before merges have met their references: level
/// 0 is merged when it has 12 tables or less, and some more come meanwhile.
const GENERATIONS: u64 = 16;
/// A generation refers to this part of the live bytes at most, or to as many as memtables may have:
/// garbage is to be found in time.
const GENERATION_PART: u64 = 64;
/// It may refer to so many bytes in any case.
const GENERATION_MIN: u64 = 1 << 20;

/// The space of all complete blob files.
#[derive(Default)]
pub(crate) struct Space {
    /// Their bytes, and those of their live values.
    bytes: Cell<(u64, u64)>,
    /// The lowest limit of bytes for each live byte, of the families whose garbage is collected.
    max_ratio: Cell<Option<f64>>,
    /// How urgent it is to collect garbage, from 0 to 1.
    pressure: Cell<f64>,
    /// A collection is under way.
    is_running: Cell<bool>,
    /// Bytes that collections have freed.
    freed: Cell<u64>,
    /// What the one under way will free.
    under_way: Cell<UnderWay>,
}

/// The progress of a collection.
#[derive(Clone, Copy, Default)]
struct UnderWay {
    /// Bytes that had been processed before.
    from: u64,
    /// Bytes that it processes, about, and those that it frees then.
    work: u64,
    gain: u64,
}

impl Space {
    /// Bytes in all complete blob files, and the live ones of these.
    pub fn bytes(&self) -> (u64, u64) {
        self.bytes.get()
    }

    /// How far blob files are on their way to the limit of their space, from 0 to 1; 0 unless
    /// garbage is being collected.
    pub fn pressure(&self) -> f64 {
        if self.is_running.get() { self.pressure.get() } else { 0.0 }
    }

    pub fn is_running(&self) -> bool {
        self.is_running.get()
    }

    /// Begins a collection that reads and writes `work` bytes, about, and frees `gain`.
    /// `done` bytes have been processed before.
    fn begin(&self, done: u64, work: u64, gain: u64) {
        self.is_running.set(true);
        self.under_way.set(UnderWay { from: done, work, gain });
    }

    fn end(&self, done: u64) {
        self.freed.set(self.freed_so_far(done));
        self.under_way.set(UnderWay::default());
        self.is_running.set(false);
    }

    /// Bytes that were freed, the part of the collection under way included.
    fn freed_so_far(&self, done: u64) -> u64 {
        let UnderWay { from, work, gain } = self.under_way.get();
        let part = done.saturating_sub(from) as f64 / work.max(1) as f64;
        self.freed.get() + (gain as f64 * part.min(1.0)) as u64
    }
}

/// The pressure of one family's files.
fn pressure(files: &[BlobSize], rules: &Rules) -> f64 {
    let total: u64 = files.iter().map(|file| file.bytes).sum();
    let live: u64 = files.iter().map(BlobSize::live_bytes).sum();
    // Less is left alone.
    if total - live < rules.garbage_min {
        return 0.0;
    }
    let live = rules.surely_live(live);
    controller::blob_pressure(total, live, rules.space_ratio, rules.space_max_ratio)
}

/// Bytes of values to which one generation of memtables may refer, in a database whose blob files
/// have `total` bytes, `live` of them counted as alive, and may have `most` for each live byte.
/// Until merges have met the references of [`GENERATIONS`] of them, the values that they replace
/// count as alive; what is really alive then must still suffice.
fn generation_bytes(total: u64, live: u64, most: f64) -> u64 {
    live.saturating_sub((total as f64 / most.max(1.0)) as u64) / GENERATIONS
}

impl WriteState {
    /// Computes the space again, after a change of the files.
    pub(super) fn note_blob_space<'a>(&self, all: impl Iterator<Item = (CfId, &'a [BlobSize])>) {
        let version = self.db.version();
        let (mut total, mut live, mut most, mut ratio) = (0, 0, 0.0_f64, f64::INFINITY);
        for (family, files) in all {
            let of_family: u64 = files.iter().map(BlobSize::live_bytes).sum();
            total += files.iter().map(|file| file.bytes).sum::<u64>();
            live += of_family;
            let Ok(family) = version.family(family) else { continue };
            if let Some(rules) = self.blob_gc_rules(&version, family, of_family) {
                most = most.max(pressure(files, &rules));
                ratio = rules.space_max_ratio.min(ratio);
            }
        }
        self.blob_gc.space.max_ratio.set(Some(ratio).filter(|ratio| ratio.is_finite()));
        self.blob_gc.space.bytes.set((total, live));
        self.blob_gc.space.pressure.set(most);
    }

    /// Most bytes of values that one generation of memtables refers to. `memtable_bytes` is the
    /// memory of memtables.
    pub fn blob_generation_bytes(&self, memtable_bytes: u64) -> u64 {
        let space = &self.blob_gc.space;
        let ((total, live), open) = (space.bytes(), self.blobs.open_bytes());
        let worthwhile = memtable_bytes.max(live / GENERATION_PART);
        match space.max_ratio.get() {
            Some(most) => generation_bytes(total + open, live + open, most)
                .min(worthwhile)
                .max(memtable_bytes.min(GENERATION_MIN)),
            None => worthwhile,
        }
    }

    /// Bytes of values in blob files that are newer than anything in the deeper levels of a family:
    /// as many bytes of older values may be garbage that no merge has found yet.
    pub(super) fn hidden_blob_bytes(&self, version: &Version, family: &Family) -> u64 {
        let level0 = family.levels.first().into_iter().flat_map(|level0| level0.slots.iter());
        let in_tables = level0.map(|&slot| version.table(slot).map_or(0, |table| table.blob_bytes));
        let waiting = self.flushes.waiting.borrow();
        let in_memory = waiting.iter().map(|generation| generation.blob_bytes);
        in_tables.chain(in_memory).sum::<u64>() + self.blobs.unflushed()
    }

    /// Notes that a collection begins.
    pub(super) fn begin_blob_gc(&self, work: u64, gain: u64) {
        self.blob_gc.space.begin(self.paces.blob_gc.done(), work, gain);
        self.set_paces();
    }

    /// Notes that it has ended.
    pub(super) fn end_blob_gc(&self) {
        self.blob_gc.space.end(self.paces.blob_gc.done());
        self.set_paces();
    }

    /// Bytes that collections have freed so far, about.
    pub fn blob_bytes_freed(&self) -> u64 {
        self.blob_gc.space.freed_so_far(self.paces.blob_gc.done())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_memtables_hide_fits_into_the_limit() {
        assert_eq!(generation_bytes(0, 0, 2.0), 0);
        assert_eq!(generation_bytes(32_000, 32_000, 2.0), 1_000);
        for most in [1.1, 2.0, 5.0] {
            for garbage in (0..200_000).step_by(10_000) {
                let (total, live) = (100_000 + garbage, 100_000);
                let hidden = GENERATIONS * generation_bytes(total, live, most);
                let within = total as f64 <= most * (live - hidden) as f64 + 1.0;
                assert!(within || hidden == 0, "{most}: {garbage} and {hidden}");
            }
        }
    }

    #[test]
    fn a_collection_frees_space_as_it_goes_on() {
        let space = Space::default();
        space.pressure.set(0.7);
        assert_eq!((space.pressure(), space.freed_so_far(50)), (0.0, 0));
        space.begin(50, 200, 1000);
        assert_eq!((space.pressure(), space.freed_so_far(50)), (0.7, 0));
        assert_eq!((space.freed_so_far(100), space.freed_so_far(900)), (250, 1000));
        space.end(900);
        assert_eq!((space.pressure(), space.freed_so_far(5000)), (0.0, 1000));
    }
}
