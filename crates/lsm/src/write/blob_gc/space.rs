//! The space that blob files take: what is known of it, how urgent collection is, and the rate at
//! which it frees space.

use std::cell::Cell;
use std::collections::BTreeMap;

use reactor::timeout;

use crate::db::CfId;
use crate::mutant::mutant;
use crate::version::{Family, Version};
use crate::write::blob_gc::due;
use crate::write::blob_gc::limits::{self, Limits};
use crate::write::blob_gc::picker::{BlobSize, Rules};
use crate::write::controller;
use crate::write::state::WriteState;

/// A generation of memtables refers to this part of what garbage may have at most, and to this part
/// of the live bytes, or to as many as memtables may have. What it replaces is garbage that is not
/// found before merges have met its references; there are up to 16 such generations: level 0 is
/// merged when it has 12 tables or less, and some more come meanwhile.
const GENERATION_PART: u64 = 64;
/// And this part to level 0, before it is merged with much larger files.
const HIDDEN_PART: u64 = 8;
/// It may refer to so many bytes in any case.
const GENERATION_MIN: u64 = 1 << 20;

/// A collection takes at least this part of its time until it ends.
const LEFT_MIN: f64 = 1.0 / 16.0;

/// Longest that writes wait for space, in nanoseconds. After that values go to tables.
const WAIT_NS: u64 = 500_000_000;

/// The space of all complete blob files.
#[derive(Default)]
pub(crate) struct Space {
    /// Their bytes, and those of their live values.
    bytes: Cell<(u64, u64)>,
    /// Bytes of tables with live values, or with references to them.
    in_tables: Cell<u64>,
    /// Bytes that the collection under way has moved to files that count as complete, in a family.
    moved: Cell<Option<(CfId, u64)>>,
    /// The family for which it is most urgent to collect garbage.
    pressed: Cell<Pressed>,
    /// A collection is under way.
    is_running: Cell<bool>,
    /// The last one has failed.
    fails: Cell<bool>,
    /// Writes have waited in vain for space since the last one.
    is_slow: Cell<bool>,
    /// What the one under way does.
    under_way: Cell<UnderWay>,
    speed: Cell<Speed>,
}

/// A collection under way.
#[derive(Clone, Copy, Default)]
struct UnderWay {
    since_ns: u64,
    /// Bytes that had been processed before.
    from: u64,
    /// Bytes that it reads and writes, about.
    work: u64,
}

/// The time that a collection takes for each byte of its work, in nanoseconds: rather too much than
/// too little.
#[derive(Clone, Copy)]
struct Speed(f64);

impl Default for Speed {
    fn default() -> Speed {
        Speed(5.0)
    }
}

impl Speed {
    fn sample(self, work: u64, ns: u64) -> Speed {
        let now = ns as f64 / work.max(1) as f64;
        Speed(now.max((3.0 * self.0 + now) / 4.0))
    }
}

impl UnderWay {
    /// The time until it ends, in nanoseconds, about. It may stand still, while merges have the
    /// tables that it needs, and the last part of it is other than reading and writing.
    fn left_ns(&self, now_ns: u64, done: u64, speed: Speed) -> f64 {
        let ns = self.work as f64 * speed.0;
        let by_time = 1.0 - now_ns.saturating_sub(self.since_ns) as f64 / ns.max(1.0);
        let by_work = 1.0 - done.saturating_sub(self.from) as f64 / self.work.max(1) as f64;
        ns * by_time.max(by_work).max(LEFT_MIN)
    }
}

impl Space {
    /// Bytes in all complete blob files, and the live ones of these.
    pub fn bytes(&self) -> (u64, u64) {
        self.bytes.get()
    }

    /// Bytes of all live values, in blob files and tables, about.
    fn live_bytes(&self) -> u64 {
        self.bytes.get().1 + self.in_tables.get()
    }

    pub fn is_running(&self) -> bool {
        self.is_running.get()
    }

    fn begin(&self, under_way: UnderWay) {
        self.is_running.set(true);
        self.under_way.set(under_way);
    }

    /// Notes that values have been copied to files that count as complete from now on.
    pub fn note_moved(&self, family: CfId, bytes: u64) {
        self.moved.set(Some((family, bytes)));
    }

    /// Bytes that the collection under way has moved to files that count as complete, if it is one
    /// of this family.
    fn moved_in(&self, family: CfId) -> Option<u64> {
        self.moved.get().filter(|(id, _)| *id == family).map(|(_, bytes)| bytes)
    }

    fn end(&self, now_ns: u64, has_failed: bool) {
        self.fails.set(has_failed);
        let UnderWay { since_ns, work, .. } = self.under_way.take();
        if !has_failed && work > 0 {
            self.speed.set(self.speed.get().sample(work, now_ns.saturating_sub(since_ns)));
        }
        self.moved.set(None);
        self.is_running.set(false);
        self.is_slow.set(false);
    }
}

/// The blob files of a family, in bytes.
#[derive(Clone, Copy)]
pub(super) struct FamilySpace {
    /// All values in complete files.
    complete: u64,
    /// Values in files that get some or are to be sealed, and the lengths of these.
    unsealed: (u64, u64),
    /// Files that are to be removed, of all families.
    obsolete: u64,
    /// Values that are surely alive.
    live: u64,
    /// Bytes of the tables that have most of what is alive.
    in_tables: u64,
    /// Whether what a collection under way has written is among the complete files.
    is_moved: bool,
}

/// What the options allow a family.
#[derive(Clone, Copy)]
pub(super) struct Allowed {
    /// Bytes of all files for each byte that is alive.
    pub ratio: f64,
    /// At any moment.
    pub is_hard: bool,
}

/// A family's files and their limits, in bytes, as they were after the last change of the MANIFEST.
#[derive(Clone, Copy, Default)]
struct Pressed {
    family: CfId,
    /// All values in complete files; without those that the collection under way has moved, for
    /// which there is room.
    total: u64,
    /// Values in the other files.
    unsealed: u64,
    start: u64,
    most: u64,
}

/// Bytes in files that change between two changes of the MANIFEST.
#[derive(Clone, Copy, Debug, Default)]
struct Changing {
    /// Values in files of a family that are not complete.
    unsealed: u64,
    /// Files that are to be removed.
    obsolete: u64,
}

impl Pressed {
    /// `None` if there is little garbage, which is left alone.
    fn new(
        family: CfId,
        files: &[BlobSize],
        moved: u64,
        unsealed: u64,
        rules: &Rules,
    ) -> Option<Pressed> {
        let total: u64 = files.iter().map(|file| file.bytes).sum();
        let total = total.saturating_sub(moved);
        let garbage: u64 = files.iter().map(|file| file.garbage_bytes).sum();
        let pressed = Pressed { family, total, unsealed, start: rules.start, most: rules.most };
        (garbage >= rules.garbage_min).then_some(pressed)
    }

    /// All bytes at this moment, of which `most` may be.
    fn now(&self, changing: Changing) -> u64 {
        self.total + changing.unsealed.saturating_sub(self.unsealed) + changing.obsolete
    }

    fn pressure(&self, changing: Changing) -> f64 {
        match self.total {
            0 => 0.0,
            _ => controller::blob_pressure(self.now(changing), self.start, self.most),
        }
    }
}

/// Bytes of the tables of a family that have most of what is alive, without values that are
/// replaced by ones in blob files, of which level 0 and memtables know `hidden` bytes.
fn in_tables(family: &Family, hidden: u64) -> u64 {
    let bytes = family.last_level().map_or(0, |(_, last)| last.bytes());
    bytes.saturating_sub(family.replaced_bytes(family.blob_bytes_above_last() + hidden))
}

impl FamilySpace {
    /// What `allowed` means for files of about `file_bytes`.
    pub fn limits(&self, allowed: Allowed, file_bytes: u64) -> Limits {
        let Allowed { ratio, is_hard } = allowed;
        let limits = Limits::new(ratio, self.live, self.in_tables, file_bytes, is_hard);
        // Only complete files are collected.
        let complete = |bytes: u64| bytes.saturating_sub(self.unsealed.0);
        Limits { start: complete(limits.start), most: complete(limits.most), ..limits }
    }

    /// Whether there may be one more file.
    fn has_room(&self, limits: &Limits, file_bytes: u64) -> bool {
        let moved = if self.is_moved { 0 } else { limits.moved };
        let all = self.complete + self.unsealed.1 + self.obsolete + file_bytes + moved;
        all <= limits.cap || mutant("blob_files_have_no_cap")
    }
}

impl WriteState {
    /// The space of a family with these complete files.
    pub(super) fn family_space(
        &self,
        version: &Version,
        family: &Family,
        files: &[BlobSize],
    ) -> FamilySpace {
        let unsealed = self.blobs.unsealed_bytes(family.id);
        let complete = files.iter().map(|file| file.bytes).sum();
        let live: u64 = files.iter().map(BlobSize::live_bytes).sum();
        let moved = self.blob_gc.space.moved_in(family.id);
        let live = (live + unsealed.0).saturating_sub(moved.unwrap_or(0));
        // Garbage that no merge has found yet; but not more than half: it may be new values.
        let newest = self.hidden_blob_bytes(version, family);
        // As many older values are garbage that no merge has found yet.
        let in_levels = family.blob_bytes_above_last();
        let hidden = newest + (in_levels - family.replaced_bytes(in_levels));
        let hidden = hidden.min(live / 2);
        FamilySpace {
            complete,
            unsealed,
            obsolete: self.obsolete.blob_bytes(),
            live: live - hidden,
            in_tables: in_tables(family, newest),
            is_moved: moved.is_some(),
        }
    }

    /// Computes the space again, after a change of the files.
    pub(super) fn note_blob_space(&self, all: &BTreeMap<CfId, Vec<BlobSize>>) {
        let version = self.db.version();
        let (mut total, mut live, mut pressed) = (0, 0, Pressed::default());
        let with_values = version.families.iter();
        let with_values = with_values.filter(|family| {
            self.blobs.value_min(family.id).is_some() || all.contains_key(&family.id)
        });
        let in_tables =
            with_values.map(|family| in_tables(family, self.hidden_blob_bytes(&version, family)));
        self.blob_gc.space.in_tables.set(in_tables.sum());
        for (&family, files) in all {
            total += files.iter().map(|file| file.bytes).sum::<u64>();
            live += files.iter().map(BlobSize::live_bytes).sum::<u64>();
            let Ok(family) = version.family(family) else { continue };
            if let Some(rules) = self.blob_gc_rules(&version, family, files) {
                let unsealed = self.blobs.unsealed_bytes(family.id).0;
                let moved = self.blob_gc.space.moved_in(family.id).unwrap_or(0);
                let next = Pressed::new(family.id, files, moved, unsealed, &rules);
                let of = |pressed: &Pressed| pressed.pressure(self.changing(pressed));
                pressed = next.filter(|next| of(next) >= of(&pressed)).unwrap_or(pressed);
            }
        }
        self.blob_gc.space.bytes.set((total, live));
        self.blob_gc.space.pressed.set(pressed);
    }

    /// How far blob files are on their way to the limit of their space, from 0 to 1; 0 unless
    /// garbage is being collected.
    pub fn blob_pressure(&self) -> f64 {
        let space = &self.blob_gc.space;
        let pressed = space.pressed.get();
        match space.is_running() {
            true => pressed.pressure(self.changing(&pressed)),
            false => 0.0,
        }
    }

    /// The room that blob files have left, in bytes, and the time until the collection under way
    /// frees space, in nanoseconds.
    pub fn blob_room(&self) -> (u64, f64) {
        let space = &self.blob_gc.space;
        let pressed = space.pressed.get();
        let room = pressed.most.saturating_sub(pressed.now(self.changing(&pressed)));
        let (now_ns, done) = (self.core.now_ns(), self.paces.blob_gc.done());
        (room, space.under_way.get().left_ns(now_ns, done, space.speed.get()))
    }

    fn changing(&self, pressed: &Pressed) -> Changing {
        let (unsealed, _) = self.blobs.unsealed_bytes(pressed.family);
        Changing { unsealed, obsolete: self.obsolete.blob_bytes() }
    }

    /// Waits until a family may have one more blob file, of `file_bytes`, while space is being
    /// freed. Returns whether it may.
    pub async fn wait_for_blob_space(&self, id: CfId, file_bytes: u64) -> bool {
        if self.may_create_blob_file(id, file_bytes) {
            return true;
        }
        let space = &self.blob_gc.space;
        // A merge may wait for the memtables of this group.
        let ends = || self.is_closing() || self.has_failed() || self.blobs.wants_flush.get();
        let is_freed = || {
            let is_collected = space.is_running() || (due(self).is_some() && !space.fails.get());
            let is_collected = is_collected && !self.merges.paused.get();
            !space.is_slow.get() && (is_collected || self.obsolete.blob_bytes() > 0)
        };
        let since_ns = self.core.now_ns();
        let done = || self.may_create_blob_file(id, file_bytes) || !is_freed() || ends();
        let waited = timeout(&self.core, WAIT_NS, self.changed.wait_until(done)).await;
        if waited.is_err() {
            // No other group waits in vain before a collection has ended.
            space.is_slow.set(true);
        }
        let (ns, may) = (self.core.now_ns() - since_ns, self.may_create_blob_file(id, file_bytes));
        tracing::debug!(family = id, may, ms = ns / 1_000_000, "writes waited for blob space");
        self.count(|stats| stats.stopped_ns += ns);
        may
    }

    /// Whether a family may have one more blob file, of `file_bytes`.
    fn may_create_blob_file(&self, id: CfId, file_bytes: u64) -> bool {
        let version = self.db.version();
        let Ok(family) = version.family(id) else { return false };
        let Some(allowed) = self.allowed_blobs(&family.name).filter(|allowed| allowed.is_hard)
        else {
            return true;
        };
        let sizes = self.blob_gc.sizes.borrow();
        let files = sizes.get(&id).map_or(&[][..], |files| &files[..]);
        let space = self.family_space(&version, family, files);
        space.has_room(&space.limits(allowed, file_bytes), file_bytes)
    }

    /// Most bytes of garbage in all blob files.
    pub fn blob_garbage_max(&self) -> u64 {
        limits::garbage_max(self.blob_space_ratio(), self.blob_gc.space.live_bytes())
    }

    /// Most bytes of blob files that may wait to be removed with pauses in between.
    pub fn obsolete_blobs_max(&self) -> u64 {
        limits::file_bytes(self.blob_garbage_max())
    }

    /// Bytes of values to which level 0 of a family may refer before it is merged, however large
    /// the other inputs are.
    pub fn blob_hidden_max(&self) -> u64 {
        self.blob_garbage_max() / HIDDEN_PART
    }

    /// Most bytes of values that one generation of memtables refers to. `memtable_bytes` is the
    /// memory of memtables.
    pub fn blob_generation_bytes(&self, memtable_bytes: u64) -> u64 {
        let live = self.blob_gc.space.live_bytes();
        let most = self.blob_garbage_max() / GENERATION_PART;
        most.min(memtable_bytes.max(live / GENERATION_PART)).max(memtable_bytes.min(GENERATION_MIN))
    }

    /// Bytes of values in blob files that are newer than anything in the deeper levels of a family:
    /// as many bytes of older values may be garbage that no merge has found yet.
    pub(super) fn hidden_blob_bytes(&self, version: &Version, family: &Family) -> u64 {
        let level0 = family.levels.first().into_iter().flat_map(|level0| level0.slots.iter());
        let in_tables = level0.map(|&slot| version.slots[slot as usize].blob_bytes());
        let waiting = self.flushes.waiting.borrow();
        let of_family = |all: &BTreeMap<CfId, u64>| all.get(&family.id).copied().unwrap_or(0);
        let in_memory = waiting.iter().map(|generation| of_family(&generation.blob_bytes));
        in_tables.chain(in_memory).sum::<u64>() + of_family(&self.blobs.unflushed())
    }

    /// Notes that a collection begins, which reads and writes `work` bytes, about.
    pub(super) fn begin_blob_gc(&self, work: u64) {
        let (since_ns, from) = (self.core.now_ns(), self.paces.blob_gc.done());
        self.blob_gc.space.begin(UnderWay { since_ns, from, work });
        self.set_paces();
    }

    /// Notes that it has ended.
    pub(super) fn end_blob_gc(&self, has_failed: bool) {
        self.blob_gc.space.end(self.core.now_ns(), has_failed);
        self.set_paces();
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_needs_room_beside_what_a_collection_writes() {
        let allowed = Allowed { ratio: 2.0, is_hard: true };
        let file = 16 << 20;
        let with = |complete, is_moved| {
            let unsealed = (5 << 20, 20 << 20);
            let space = FamilySpace {
                complete,
                unsealed,
                obsolete: 7 << 20,
                live: 1 << 30,
                in_tables: 1 << 20,
                is_moved,
            };
            space.has_room(&space.limits(allowed, file), file)
        };
        let limits = Limits::new(2.0, 1 << 30, 1 << 20, file, true);
        let most = limits.cap - (27 << 20) - file;
        assert!(with(most - limits.moved, false) && !with(most - limits.moved + 1, false));
        assert!(with(most, true) && !with(most + 1, true));
    }

    #[test]
    fn a_collection_ends_when_its_time_is_over_and_its_work_is_done() {
        let under_way = UnderWay { since_ns: 1000, from: 50, work: 100 };
        let left = |now_ns, done| under_way.left_ns(now_ns, done, Speed(4.0)) as u64;
        assert_eq!((left(1000, 50), left(1100, 75)), (400, 300));
        assert_eq!(left(1100, 150), 300, "it takes its time");
        assert_eq!(left(9000, 60), 360, "it has stood still");
        assert_eq!(left(9000, 900), 25);
        assert_eq!((Speed(4.0).sample(100, 200).0, Speed(4.0).sample(100, 900).0), (3.5, 9.0));
    }

    #[test]
    fn pressure_grows_with_what_is_written() {
        let pressed = Pressed { family: 0, total: 1000, unsealed: 50, start: 1000, most: 1100 };
        let of = |unsealed, obsolete| pressed.pressure(Changing { unsealed, obsolete });
        assert_eq!([0, 50, 100, 200].map(|now| of(now, 0)), [0.0, 0.0, 0.5, 1.0]);
        assert_eq!((of(50, 25), of(75, 25)), (0.25, 0.5));
        assert_eq!(Pressed::default().pressure(Changing { unsealed: 10, obsolete: 0 }), 0.0);
    }
}
