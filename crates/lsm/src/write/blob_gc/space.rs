//! The space that blob files take: what is known of it, how urgent collection is, and the rate at
//! which it frees space.

use std::cell::Cell;

use crate::db::CfId;
use crate::write::blob_gc::picker::{BlobSize, Rules};
use crate::write::controller;
use crate::write::state::WriteState;

/// The space of all complete blob files.
#[derive(Default)]
pub(crate) struct Space {
    /// Their bytes, and those of their live values.
    bytes: Cell<(u64, u64)>,
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
    let more = total.saturating_sub(rules.garbage_min).max(live);
    controller::blob_pressure(more, live, rules.space_ratio, rules.space_max_ratio)
}

impl WriteState {
    /// Computes the space again, after a change of the files.
    pub(super) fn note_blob_space<'a>(&self, all: impl Iterator<Item = (CfId, &'a [BlobSize])>) {
        let version = self.db.version();
        let (mut total, mut live, mut most) = (0, 0, 0.0_f64);
        for (family, files) in all {
            let of_family: u64 = files.iter().map(BlobSize::live_bytes).sum();
            total += files.iter().map(|file| file.bytes).sum::<u64>();
            live += of_family;
            let name = version.family(family).map(|family| &family.name);
            if let Some(rules) = name.ok().and_then(|name| self.blob_gc_rules(name, of_family)) {
                most = most.max(pressure(files, &rules));
            }
        }
        self.blob_gc.space.bytes.set((total, live));
        self.blob_gc.space.pressure.set(most);
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
