//! The picker: which files are merged next. It only decides; it is a pure function of a version,
//! the family's options, and what runs already.
//!
//! 1. [`shape`] gives each level its target size, and a score that says how urgent it is.
//! 2. Levels are tried in the order of their scores. [`level0`] takes all files of level 0 that can
//!    be merged. For deeper levels [`levels`] chooses the file that overlaps least of the next
//!    level for its size; files full of tombstones count as larger, so they come early.
//! 3. The inputs grow until no user key has versions both in an input and in a file of the same
//!    level that is not one ([`inputs`], a clean cut). Files that overlap nothing below only move.
//! 4. If nothing is urgent, files that are full of tombstones go down ([`dense`]), and files are
//!    merged for their age ([`age`]).
//!
//! Several jobs may run on one family. What must hold:
//!
//! - A file is an input of one job at most.
//! - Two jobs with the same output level have disjoint ranges of user keys.
//! - One job at a time takes files out of level 0, and no file lies in a level between its start
//!   and its output.
//!
//! The rules are RocksDB's (`LevelCompactionBuilder`), with two differences: an output never ends
//! between two versions of a user key, and files that cannot be read are left alone, with what must
//! stay above them (see [`level0`]).

use rocksfmt::{Comparator, Compression, FileMeta, InternalKey, SENTINEL_PACKED};

use crate::family_options::FamilyOptions;
use crate::table_options::TablePlace;
use crate::version::{Family, Version};
use crate::write::manual::InRange;

mod age;
mod dense;
mod inputs;
mod level0;
mod levels;
mod shape;
#[cfg(test)]
mod tests;

pub(crate) use age::{Aged, when_due};
pub(crate) use level0::KeyRange;
pub(crate) use shape::{LevelSizes, Shape};

/// The inputs of a merge, by slot, and where its outputs go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The level that is merged down.
    pub start: usize,
    /// The level of the outputs.
    pub output: usize,
    /// Files of the start level: of level 0 the newest first, of others in the order of their
    /// keys.
    pub inputs: Vec<u32>,
    /// Files of the output level that the inputs overlap, in the order of their keys.
    pub overlapped: Vec<u32>,
    /// The files overlap nothing: they only change their level.
    pub moves: bool,
    /// Keys that stay in level 0; in order, and not adjacent.
    pub stays: Vec<KeyRange>,
    /// The first and the last user key of all inputs.
    pub hull: (Vec<u8>, Vec<u8>),
    /// Size at which an output ends, about, in bytes.
    pub file_bytes: u64,
    /// Where the outputs stand among the levels.
    pub place: TablePlace,
}

impl Plan {
    /// The fewest files of level 0 that this merge may take. If keys stay in level 0, a merge of
    /// one file could return the same file.
    pub fn least_files(&self) -> usize {
        level0::least_files(&self.stays)
    }

    /// The inputs, each with its level.
    pub fn files(&self) -> impl Iterator<Item = (usize, u32)> {
        let start = self.inputs.iter().map(|&slot| (self.start, slot));
        start.chain(self.overlapped.iter().map(|&slot| (self.output, slot)))
    }

    /// A plan that merges nothing and keeps other jobs from writing to a range of a level.
    pub fn reservation(level: usize, (first, last): (&[u8], &[u8])) -> Plan {
        Plan {
            start: level,
            output: level,
            inputs: Vec::new(),
            overlapped: Vec::new(),
            moves: true,
            stays: Vec::new(),
            hull: (first.to_vec(), last.to_vec()),
            file_bytes: 0,
            place: TablePlace::FLUSH,
        }
    }

    /// Whether another job may run beside this one, although both write to the same level.
    pub fn is_apart(&self, order: Comparator, output: usize, hull: (&[u8], &[u8])) -> bool {
        self.output != output
            || order.cmp_user(&self.hull.1, hull.0).is_lt()
            || order.cmp_user(hull.1, &self.hull.0).is_lt()
    }
}

/// The limits of a merge of level 0: files, and bytes for the current blocks of its sources.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub files: usize,
    pub bytes: u64,
}

/// What the picker knows.
pub(crate) struct Picker<'a> {
    pub version: &'a Version,
    pub family: &'a Family,
    /// Tables that must not be touched, because they cannot be read.
    pub left_alone: &'a dyn Fn(u32) -> bool,
    /// The jobs of this family that run.
    pub running: &'a [&'a Plan],
    pub memory: Memory,
    /// Bytes of values in blob files to which level 0 may refer before it is merged, however large
    /// the other inputs are: what they replace is garbage that nobody has found yet.
    pub hidden_max: u64,
    /// The compression of the opening, for families without OPTIONS.
    pub compression: Compression,
    /// Where the search for a file begins in large levels; any number.
    pub turn: usize,
    /// Files of the family that are due for their age; some may be gone.
    pub aged: &'a [Aged],
}

impl<'a> Picker<'a> {
    /// Knows no limits of memory, and no files that are due for their age.
    pub fn new(
        version: &'a Version,
        family: &'a Family,
        left_alone: &'a dyn Fn(u32) -> bool,
        running: &'a [&'a Plan],
    ) -> Picker<'a> {
        Picker {
            version,
            family,
            left_alone,
            running,
            memory: Memory { files: usize::MAX, bytes: u64::MAX },
            hidden_max: u64::MAX,
            compression: Compression::None,
            turn: 0,
            aged: &[],
        }
    }
}

/// The levels of a family that are due.
pub(crate) struct Due {
    shape: Shape,
    /// The most urgent first, with their scores.
    scores: Vec<(usize, f64)>,
    /// Files are full of tombstones.
    dense: bool,
    /// Files are due for their age.
    aged: bool,
}

impl Due {
    /// The score of the most urgent level. Below 1 no level is due.
    pub fn urgency(&self) -> f64 {
        self.scores.first().map_or(0.0, |score| score.1)
    }

    /// Whether nothing is due.
    pub fn is_nothing(&self) -> bool {
        self.scores.is_empty() && !self.dense && !self.aged
    }
}

/// Whether the picker found something.
enum Pick {
    Plan(Box<Plan>),
    /// Nothing is worthwhile.
    Nothing,
    /// Something is due, but its files are inputs of running jobs.
    Blocked,
}

/// So large a part of the large values in tables of the last level may be garbage, because newer
/// ones are in blob files.
const REPLACED_MAX: f64 = 0.25;
/// A level below level 0 may hide this many times more garbage in blob files than that.
const DEEP_HIDDEN: f64 = 2.0;

impl Picker<'_> {
    /// The levels that are due; none in a family that is not merged.
    pub fn due(&self) -> Due {
        let (shape, sizes) = self.shape();
        let merged = self.family.refused.is_none() && !self.options().manual_only;
        let scores = if merged { shape.scores(self.options(), &sizes) } else { Vec::new() };
        let (dense, aged) = (merged && self.has_dense(), merged && !self.aged.is_empty());
        Due { shape, scores, dense, aged }
    }

    /// The next job, if one may run now.
    pub fn pick(&self, due: &Due) -> Option<Plan> {
        let Due { shape, scores, dense, aged } = due;
        let mut level0_waits = false;
        for &(level, _) in scores {
            let picked = match level {
                0 => self.pick_level0(shape),
                // More jobs out of the base would keep level 0 waiting for ever.
                _ if level == shape.base && level0_waits => Pick::Blocked,
                _ => self.pick_level(shape, level),
            };
            match picked {
                Pick::Plan(plan) => return Some(*plan),
                Pick::Blocked if level == 0 => {
                    if let Some(plan) = self.pick_within_level0(shape) {
                        return Some(plan);
                    }
                    level0_waits = true;
                }
                Pick::Blocked | Pick::Nothing => {}
            }
        }
        if *dense && let Some(plan) = self.pick_dense(shape, level0_waits) {
            return Some(plan);
        }
        if *aged { self.pick_aged(shape, level0_waits) } else { None }
    }

    /// A job on request: for a level's files with keys of a range, from the key `after` on; in
    /// level 0 only for files with entries up to the sequence `until`.
    pub fn pick_in(
        &self,
        level: usize,
        range: &KeyRange,
        after: Option<&[u8]>,
        until: u64,
    ) -> InRange {
        let (shape, _) = self.shape();
        match level {
            0 => self.pick_level0_in(&shape, range, until),
            _ => self.pick_level_in(&shape, level, range, after),
        }
    }

    /// The targets of the levels, and their bytes.
    pub fn shape(&self) -> (Shape, LevelSizes) {
        let options = self.options();
        let levels = self.family.levels.len().max(options.levels);
        let (mut bytes, mut idle) = (vec![0; levels], vec![0; levels]);
        for (at, level) in self.family.levels.iter().enumerate() {
            bytes[at] = level.bytes();
            idle[at] = level.compensated_bytes();
        }
        for (at, slot) in self.running.iter().flat_map(|plan| plan.files()) {
            idle[at] = idle[at].saturating_sub(self.version.compensated_bytes(slot));
        }
        let shape = Shape::of(options, &bytes);
        let level0_files = self.level0_files(shape.base);
        let level0_due = self.level0_due(bytes[0], bytes[shape.base]);
        let hides = self.hides(levels);
        (shape, LevelSizes { bytes, idle, hides, level0_files, level0_due })
    }

    /// See [`LevelSizes::hides`].
    fn hides(&self, levels: usize) -> Vec<f64> {
        let family = self.family;
        let Some((last, deepest)) = family.last_level() else { return Vec::new() };
        if family.blob_bytes_above_last() == 0 {
            return Vec::new();
        }
        let mut bytes = vec![0; levels];
        for (bytes, level) in bytes.iter_mut().zip(&family.levels).take(last).skip(1) {
            *bytes = level.blob_bytes;
        }
        for (at, slot) in self.running.iter().flat_map(|plan| plan.files()) {
            bytes[at] = bytes[at].saturating_sub(self.version.slots[slot as usize].blob_bytes());
        }
        let large = deepest.large_bytes.max(1) as f64;
        let hides = bytes.iter().map(|&bytes| {
            let replaced = family.replaced_bytes(bytes);
            let in_tables = replaced as f64 / (large * REPLACED_MAX);
            let in_blobs = (bytes - replaced) as f64 / (self.hidden_max as f64 * DEEP_HIDDEN);
            in_tables.max(in_blobs)
        });
        hides.collect()
    }

    fn options(&self) -> &FamilyOptions {
        &self.family.options
    }

    fn level(&self, at: usize) -> &[u32] {
        self.family.levels.get(at).map_or(&[], |level| &level.slots)
    }

    fn meta(&self, slot: u32) -> &FileMeta {
        self.version.meta(slot)
    }

    fn order(&self) -> Comparator {
        self.family.comparator
    }

    fn bytes(&self, slots: &[u32]) -> u64 {
        slots.iter().map(|&slot| self.meta(slot).size_bytes).sum()
    }

    /// Bytes of values in blob files to which files refer.
    fn hidden(&self, slots: &[u32]) -> u64 {
        slots.iter().map(|&slot| self.version.slots[slot as usize].blob_bytes()).sum()
    }

    /// Whether a file is an input of a running job.
    fn is_busy(&self, slot: u32) -> bool {
        self.running
            .iter()
            .any(|plan| plan.inputs.contains(&slot) || plan.overlapped.contains(&slot))
    }

    /// Whether a job with these inputs may run beside the others.
    fn may_run(&self, files: &[u32], output: usize, hull: (&[u8], &[u8])) -> bool {
        !files.iter().any(|&slot| self.is_busy(slot))
            && self.running.iter().all(|plan| plan.is_apart(self.order(), output, hull))
    }

    /// Where the tables of a level stand.
    fn place(&self, shape: &Shape, level: usize) -> TablePlace {
        place_in(self.family, shape, level)
    }

    /// Whether tables may move between two levels as they are: both have the same compression.
    fn may_move(&self, shape: &Shape, from: usize, to: usize) -> bool {
        let compression = |level: usize| {
            self.family.table_options.compression(self.place(shape, level), self.compression)
        };
        compression(from) == compression(to)
    }

    /// Size of the files of a level, in bytes.
    fn file_bytes(&self, shape: &Shape, level: usize) -> u64 {
        let options = self.options();
        let from = if options.dynamic { shape.base } else { 1 };
        let times = options.file_multiplier.saturating_pow(level.saturating_sub(from) as u32);
        options.file_bytes.saturating_mul(times)
    }
}

/// Where the tables of a level of a family stand.
pub(crate) fn place(family: &Family, level: usize) -> TablePlace {
    let bytes: Vec<u64> = family.levels.iter().map(|level| level.bytes()).collect();
    place_in(family, &Shape::of(&family.options, &bytes), level)
}

fn place_in(family: &Family, shape: &Shape, level: usize) -> TablePlace {
    let mut deeper = family.levels.iter().skip(level + 1);
    let is_bottom = level > 0 && deeper.all(|level| level.slots.is_empty());
    TablePlace { level, base_level: shape.base, is_bottom }
}

/// Whether a table's largest key is the exclusive end of a range tombstone.
fn ends_before(meta: &FileMeta) -> bool {
    InternalKey::parse(&meta.largest).is_ok_and(|largest| largest.packed == SENTINEL_PACKED)
}
