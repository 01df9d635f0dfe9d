//! Garbage collection of blob files: moves the live values out of files that are mostly garbage.
//!
//! [`picker`] chooses the files, the victims. Then
//!
//! 1. [`moves`] reads the tables that may refer to them, and copies the live values to new blob
//!    files in the order in which they were written, file by file. The new files are durable.
//! 2. [`tables`] writes each of these tables again with the new references, and nothing else
//!    changed: every version, tombstone and sequence number stays, so that snapshots, iterators and
//!    checkpoints see no difference. Each table is one change of the MANIFEST; the first one also
//!    registers the new blob files. Merges go on meanwhile and may carry old references into other
//!    tables; these are written again, too.
//! 3. When no table is left that refers to a victim, one change of the MANIFEST counts what is left
//!    of the victims as garbage, and so drops them ([`collection`]).
//!
//! What must hold:
//!
//! - No log refers to a victim: recovery would miss its values.
//! - The new files and their names are durable before a table refers to them.
//! - A victim is dropped after the last table that refers to it.
//!
//! After a crash some tables refer to the old files and some to the new ones, and the MANIFEST
//! counts values as live in both. So each collection compares the references that it has read with
//! the counts of all files up to the newest victim, and counts the difference as garbage.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use rocksfmt::{BlobFileMeta, ManifestReplay};

use crate::db::CfId;
use crate::error::Kind;
use crate::mutant::mutant;
use crate::stored_options::StoredBlobs;
use crate::version::{Family, Version};
use crate::write::blob_gc::collection::collect;
use crate::write::blob_gc::picker::{BlobSize, Rules};
use crate::write::blob_gc::space::{Allowed, Space};
use crate::write::blob_writer;
use crate::write::state::WriteState;

mod collection;
mod limits;
mod moves;
pub(crate) mod picker;
mod space;
mod tables;

/// The limit of space without [`crate::WriteOptions::blob_space_max_ratio`].
const SPACE_MAX_RATIO: f64 = 2.0;
/// The family whose options new families get.
const DEFAULT_FAMILY: &str = "default";
/// Garbage of less than this part of the live bytes is left, or of less than half of what the limit
/// allows, or of less than one file.
const GARBAGE_PART: f64 = 0.25;
/// Garbage of fewer bytes is left, however few bytes are alive.
const GARBAGE_MIN: u64 = 64 << 10;
/// Most values that a collection moves: their places are held in memory, about 150 bytes each.
const VALUES_MAX: u64 = 100_000;
/// Values that are moved at most, if a single file has that many.
const MOVED_MAX: u64 = 2 * VALUES_MAX;
/// Shortest and longest pause after a failure, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;
const PAUSE_MAX_NS: u64 = 30_000_000_000;

/// What is known of blob files and of the collection of their garbage.
#[derive(Default)]
pub(crate) struct BlobGc {
    /// The complete blob files of each family that has some.
    sizes: RefCell<BTreeMap<CfId, Vec<BlobSize>>>,
    /// Files that are left as they are, because they or their tables cannot be read.
    left_alone: RefCell<BTreeSet<u64>>,
    /// Nothing is due in the version of this epoch.
    idle: Cell<Option<u64>>,
    pub space: Space,
}

impl BlobGc {
    /// The live bytes of these files.
    fn live_bytes(&self, numbers: &BTreeSet<u64>) -> u64 {
        let sizes = self.sizes.borrow();
        let some = sizes.values().flatten().filter(|size| numbers.contains(&size.number));
        some.map(BlobSize::live_bytes).sum()
    }

    /// Whether the MANIFEST still has any of these files.
    fn has_any(&self, numbers: &BTreeSet<u64>) -> bool {
        self.sizes.borrow().values().flatten().any(|size| numbers.contains(&size.number))
    }
}

impl WriteState {
    /// Notes the complete blob files of some families, after a change of the MANIFEST.
    pub fn note_blob_files(&self, manifest: &ManifestReplay, families: impl Iterator<Item = CfId>) {
        let mut all = self.blob_gc.sizes.borrow_mut();
        for family in families {
            let before = all.remove(&family).unwrap_or_default();
            if manifest.blob_files(family).next().is_none() {
                self.note_obsolete_blobs(&before, &[]);
                continue;
            }
            let complete = |blob: &BlobFileMeta| !self.blobs.is_unsealed(blob.number);
            let live = manifest.live_blob_files(family).into_iter().filter(complete);
            let sizes = live.map(|blob| BlobSize {
                number: blob.number,
                bytes: blob.total_bytes,
                garbage_bytes: blob.garbage_bytes,
                values: blob.total_count.saturating_sub(blob.garbage_count),
                is_eligible: true,
            });
            let sizes: Vec<BlobSize> = sizes.collect();
            self.note_obsolete_blobs(&before, &sizes);
            all.insert(family, sizes);
        }
        self.note_blob_space(&all);
    }

    /// Notes that some files are obsolete: complete ones of a family, before and after a change of
    /// the MANIFEST.
    fn note_obsolete_blobs(&self, before: &[BlobSize], after: &[BlobSize]) {
        let after: BTreeSet<u64> = after.iter().map(|size| size.number).collect();
        for size in before.iter().filter(|size| !after.contains(&size.number)) {
            self.obsolete.note_blob(size.number, size.bytes);
        }
    }

    /// What OPTIONS say about the blob files of a family. One that was made since the opening has
    /// the options of the default family.
    fn stored_blobs(&self, name: &str) -> StoredBlobs {
        let stored = &self.db.0.stored_options;
        stored.blobs(if stored.has_family(name) { name } else { DEFAULT_FAMILY })
    }

    /// What a family's blob files may take; `None` if its garbage is not collected. The limit that
    /// a command gives holds at any moment, and so does that of a database whose OPTIONS do not
    /// speak of blob files.
    fn allowed_blobs(&self, name: &str) -> Option<Allowed> {
        let (said, options) = (self.stored_blobs(name), &self.options);
        let collects = if said.is_on { said.collects } else { options.blob_min.is_some() };
        let is_given = options.blob_space_max_ratio.is_some();
        let is_hard = is_given || !said.is_on;
        (collects || is_given).then_some(Allowed { ratio: self.blob_space_ratio(), is_hard })
    }

    /// The limit of space, as a multiple of what is alive.
    fn blob_space_ratio(&self) -> f64 {
        self.options.blob_space_max_ratio.unwrap_or(SPACE_MAX_RATIO).max(1.0)
    }

    /// Bytes of a new blob file of a family, unless a value needs more.
    pub fn blob_file_bytes(&self, name: &str) -> u64 {
        let (said, options) = (self.stored_blobs(name), &self.options);
        let most = blob_writer::file_bytes(&said, options);
        // OPTIONS are obeyed as they are.
        match said.file_bytes.is_some() && options.blob_space_max_ratio.is_none() {
            true => most,
            false => most.min(limits::file_bytes(self.blob_garbage_max())),
        }
    }

    /// The rules for the complete files of a family; `None` if its garbage is not collected.
    fn blob_gc_rules(
        &self,
        version: &Version,
        family: &Family,
        files: &[BlobSize],
    ) -> Option<Rules> {
        let allowed = self.allowed_blobs(&family.name)?;
        let said = self.stored_blobs(&family.name);
        let file_bytes = self.blob_file_bytes(&family.name);
        let limits = self.family_space(version, family, files).limits(allowed, file_bytes);
        let live: u64 = files.iter().map(BlobSize::live_bytes).sum();
        let little = ((allowed.ratio - 1.0) / 2.0).min(GARBAGE_PART);
        let obeys = said.is_on && self.options.blob_space_max_ratio.is_none();
        Some(Rules {
            age_cutoff: if obeys { said.age_cutoff } else { 1.0 },
            threshold: said.force_threshold.filter(|_| said.is_on),
            start: limits.start,
            most: limits.most,
            garbage_min: file_bytes.min(((live as f64 * little) as u64).max(GARBAGE_MIN)),
            bytes_max: limits.moved,
            values_max: VALUES_MAX,
        })
    }
}

/// Collects garbage until writing ends.
pub(crate) async fn run(state: &WriteState) {
    let mut pause_ns = PAUSE_NS;
    loop {
        state.changed.wait_until(|| state.is_ending() || due(state).is_some()).await;
        if state.is_ending() {
            return;
        }
        let Some((family, victims)) = due(state) else { continue };
        let (live, tried) = (state.blob_gc.live_bytes(&victims), victims.clone());
        let in_tables = collection::entry_bytes(&state.db.version(), family, &victims);
        // Tables are read twice, about: for what they refer to, and to be written again.
        state.begin_blob_gc(live + 2 * in_tables);
        let collected = collect(state, family, victims).await;
        state.end_blob_gc(collected.is_err());
        match collected {
            Ok(()) => pause_ns = PAUSE_NS,
            Err(error) if error.is_transient() => {
                tracing::warn!("garbage of blob files is collected later: {error}");
                state.pause(pause_ns, || false).await;
                pause_ns = (2 * pause_ns).min(PAUSE_MAX_NS);
            }
            // A new table does not read as it was written: nothing refers to it yet.
            Err(error) if error.kind() == Kind::Corruption && !state.has_failed() => {
                leave_alone(state, &tried, &error.to_string());
            }
            Err(error) => {
                if !state.has_failed() {
                    state.fail(&error);
                }
                return;
            }
        }
    }
}

/// Whether garbage is collected, or is to be.
pub(crate) fn is_due(state: &WriteState) -> bool {
    state.blob_gc.space.is_running() || due(state).is_some()
}

/// The blob files of a family that are to be collected.
fn due(state: &WriteState) -> Option<(CfId, BTreeSet<u64>)> {
    let gc = &state.blob_gc;
    let version = state.db.0.current.load();
    if gc.idle.get() == Some(version.epoch) || state.merges.paused.get() {
        return None;
    }
    let mut sizes = gc.sizes.borrow_mut();
    for (&family, sizes) in sizes.iter_mut() {
        let Ok(of_family) = version.family(family) else { continue };
        let Some(rules) = state.blob_gc_rules(&version, of_family, sizes) else { continue };
        let in_logs = match mutant("gc_takes_files_of_logs") {
            true => Vec::new(),
            false => state.blobs.in_logs(family),
        };
        let left_alone = gc.left_alone.borrow();
        for size in sizes.iter_mut() {
            let number = size.number;
            // One with more values waits until they are fewer.
            let is_known = size.values <= MOVED_MAX;
            size.is_eligible =
                is_known && !in_logs.contains(&number) && !left_alone.contains(&number);
        }
        let picked = picker::pick(sizes, &rules);
        if !picked.is_empty() {
            return Some((family, picked.into_iter().collect()));
        }
    }
    gc.idle.set(Some(version.epoch));
    None
}

/// Does not collect files from now on.
fn leave_alone(state: &WriteState, files: &BTreeSet<u64>, why: &str) {
    for number in files {
        tracing::warn!("garbage in {number:06}.blob is not collected: {why}");
    }
    state.blob_gc.left_alone.borrow_mut().extend(files);
    state.blob_gc.idle.set(None);
}
