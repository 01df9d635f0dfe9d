//! What merges do now, and what flushes and merges have done to each level: for `kv stat`, INFO and
//! metrics. Computed on request; jobs count when they end.

use crate::version::{Family, Slot, Version, user_key};
use crate::write::compaction::Running;
use crate::write::controller::{self, Level0};
use crate::write::manual::CompactionLimits;
use crate::write::picker::{LevelSizes, Picker, Shape};
use crate::write::state::WriteState;
use crate::write::writer::Writer;

/// What was done to a level since the opening.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LevelCounters {
    /// Merges into it.
    pub merges: u64,
    /// Bytes of the tables of levels above that these read.
    pub read_above_bytes: u64,
    /// Bytes of its own tables that they read.
    pub read_bytes: u64,
    /// Bytes of the tables that they made.
    pub written_bytes: u64,
    /// Bytes of tables that were moved into it as they were.
    pub moved_bytes: u64,
    /// Bytes of tables that flushes, loads and ingestions added to it.
    pub added_bytes: u64,
    /// Nanoseconds that merges into it took.
    pub ns: u64,
    /// Nanoseconds that they occupied cores.
    pub busy_ns: u64,
}

impl LevelCounters {
    /// Bytes written to this level for each byte that came into it; 0 if none came.
    pub fn write_amplification(&self) -> f64 {
        ratio(self.written_bytes + self.added_bytes, self.read_above_bytes + self.added_bytes)
    }

    /// Adds the counters of another level.
    pub fn add(&mut self, other: &LevelCounters) {
        self.merges += other.merges;
        self.read_above_bytes += other.read_above_bytes;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.moved_bytes += other.moved_bytes;
        self.added_bytes += other.added_bytes;
        self.ns += other.ns;
        self.busy_ns += other.busy_ns;
    }
}

/// The state of merges.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompactionStatus {
    /// No merge begins, and those under way stand still.
    pub paused: bool,
    /// Writes wait, because level 0 is full.
    pub writes_stopped: bool,
    /// The limits in force.
    pub limits: CompactionLimits,
    /// How far merges are behind, from 0 to 1: writes are slowed from 1/4 on.
    pub pressure: f64,
    /// Bytes that merges have to read and write until no level exceeds its target, about.
    pub debt_bytes: u64,
    /// The rate at which writes are admitted, in bytes per second: 0 while they are stopped,
    /// `None` for no limit.
    pub write_bytes_per_second: Option<u64>,
    /// The rate that each merge keeps to, in bytes of keys and values per second; `None` for no
    /// limit.
    pub merge_bytes_per_second: Option<u64>,
    /// The families, also those without tables.
    pub families: Vec<FamilyCompaction>,
    /// The merges under way.
    pub jobs: Vec<CompactionJob>,
}

/// The levels of a family.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FamilyCompaction {
    /// Its id.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The level into which level 0 is merged.
    pub base_level: usize,
    /// See [`CompactionStatus::pressure`].
    pub pressure: f64,
    /// See [`CompactionStatus::debt_bytes`].
    pub debt_bytes: u64,
    /// Bytes of tables without obsolete versions, about: those of the last level, and those of
    /// others whose keys no deeper level may have.
    pub live_bytes: u64,
    /// All of its levels.
    pub levels: Vec<LevelCompaction>,
}

impl FamilyCompaction {
    /// Bytes of all levels.
    pub fn bytes(&self) -> u64 {
        self.levels.iter().map(|level| level.bytes).sum()
    }

    /// The counters of all levels together.
    pub fn counters(&self) -> LevelCounters {
        let mut all = LevelCounters::default();
        self.levels.iter().for_each(|level| all.add(&level.counters));
        all
    }

    /// Bytes written to tables for each byte that flushes, loads and ingestions added; 0 if there
    /// was none.
    pub fn write_amplification(&self) -> f64 {
        let all = self.counters();
        ratio(all.written_bytes + all.added_bytes, all.added_bytes)
    }

    /// Bytes of tables for each byte that is live; 0 without tables.
    pub fn space_amplification(&self) -> f64 {
        ratio(self.bytes(), self.live_bytes)
    }

    /// The part of the space amplification that one of its levels has.
    pub fn space_amplification_of(&self, level: &LevelCompaction) -> f64 {
        ratio(level.bytes, self.live_bytes)
    }
}

/// A level.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LevelCompaction {
    /// Files.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The size that it aims at; `None` for level 0, the last level, and levels above the base.
    pub target_bytes: Option<u64>,
    /// A merge is due from 1 on: for level 0 its files divided by
    /// `level0_file_num_compaction_trigger`, for others their bytes divided by their target.
    pub score: f64,
    /// Files that are being merged.
    pub merging_files: usize,
    /// Their bytes.
    pub merging_bytes: u64,
    /// What was done to it.
    pub counters: LevelCounters,
}

/// A merge under way.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompactionJob {
    /// Its family.
    pub family: u32,
    /// The level that is merged.
    pub from_level: usize,
    /// The level of its outputs.
    pub to_level: usize,
    /// Files that it merges.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The part of them that is merged, about.
    pub read_bytes: u64,
    /// Bytes of tables written so far.
    pub written_bytes: u64,
    /// How long it has run, in nanoseconds.
    pub ns: u64,
    /// The number of cores that it runs on.
    pub cores: usize,
    /// A user asked for it.
    pub is_requested: bool,
}

fn ratio(bytes: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { bytes as f64 / of as f64 }
}

impl Writer {
    /// The state of merges and levels. It costs time for each file above the last levels.
    pub fn compaction_status(&self) -> CompactionStatus {
        let state = &*self.0;
        let version = state.db.version();
        let running = state.merges.running.borrow();
        let debt = state.debt();
        let families = version.families.iter().filter(|family| family.refused.is_none());
        CompactionStatus {
            paused: state.merges.paused.get(),
            writes_stopped: state.lifecycle.stopped.get(),
            limits: state.merges.limits.get(),
            pressure: state.backlog().pressure,
            debt_bytes: debt.bytes,
            write_bytes_per_second: match state.lifecycle.stopped.get() {
                true => Some(0),
                false => state.admitted().map(|rate| rate as u64),
            },
            merge_bytes_per_second: state.paces.merge.rate(),
            families: families.map(|family| family_status(state, &version, family)).collect(),
            jobs: running
                .iter()
                .filter(|job| job.cores() > 0)
                .map(|job| job_status(state, job))
                .collect(),
        }
    }
}

fn job_status(state: &WriteState, job: &Running) -> CompactionJob {
    let progress = &job.progress;
    CompactionJob {
        family: job.family,
        from_level: job.plan.start,
        to_level: job.plan.output,
        files: job.plan.files().count(),
        bytes: progress.bytes,
        read_bytes: progress.bytes - progress.left(),
        written_bytes: progress.written(),
        ns: state.core.now_ns().saturating_sub(job.since_ns),
        cores: job.cores(),
        is_requested: job.is_requested,
    }
}

fn family_status(state: &WriteState, version: &Version, family: &Family) -> FamilyCompaction {
    let left_alone = |slot| state.merges.quarantine.holds(version, slot);
    let mut status = shape_of(version, family, &left_alone);
    let counters = state.merges.counters(family.id);
    for (level, counters) in status.levels.iter_mut().zip(counters) {
        level.counters = counters;
    }
    for job in state.merges.running.borrow().iter().filter(|job| job.family == family.id) {
        for (at, slot) in job.plan.files() {
            if let Some(level) = status.levels.get_mut(at) {
                level.merging_files += 1;
                // The family may have been cleared meanwhile.
                if !matches!(version.slots[slot as usize], Slot::Free) {
                    level.merging_bytes += version.meta(slot).size_bytes;
                }
            }
        }
    }
    status
}

/// The shape of a family that nothing is done to.
pub(crate) fn shape_of(
    version: &Version,
    family: &Family,
    left_alone: &dyn Fn(u32) -> bool,
) -> FamilyCompaction {
    let (shape, sizes) = Picker::new(version, family, left_alone, &[]).shape();
    let options = &family.options;
    let scores = shape.fill(options, &sizes);
    let files = |at: usize| family.levels.get(at).map_or(0, |level| level.slots.len());
    let level = |(at, score): (usize, f64)| LevelCompaction {
        files: files(at),
        bytes: sizes.bytes[at],
        target_bytes: target(&shape, at),
        score,
        ..LevelCompaction::default()
    };
    let debt = shape.debt(&sizes);
    FamilyCompaction {
        id: family.id,
        name: family.name.clone(),
        base_level: shape.base,
        pressure: match options.manual_only {
            true => 0.0,
            false => pressure(family, &sizes, debt),
        },
        debt_bytes: if options.manual_only { 0 } else { debt },
        live_bytes: live_bytes(version, family),
        levels: scores.into_iter().enumerate().map(level).collect(),
    }
}

fn pressure(family: &Family, sizes: &LevelSizes, debt: u64) -> f64 {
    let level0 = Level0::new(&family.options, sizes.level0_files, sizes.level0_due);
    let bytes = sizes.bytes.iter().sum();
    level0.pressure(0.0).max(controller::debt_pressure(&family.options, debt, bytes))
}

fn target(shape: &Shape, level: usize) -> Option<u64> {
    shape.targets.get(level).copied().filter(|&target| target < u64::MAX)
}

/// Bytes of the files whose keys no file of a deeper level may have.
fn live_bytes(version: &Version, family: &Family) -> u64 {
    let order = family.comparator;
    let overlaps = |deeper: &[u32], slot: u32| {
        let meta = version.meta(slot);
        let (first, last) = (user_key(&meta.smallest), user_key(&meta.largest));
        let from = deeper.partition_point(|&slot| {
            order.cmp_user(user_key(&version.meta(slot).largest), first).is_lt()
        });
        deeper.get(from).is_some_and(|&slot| {
            order.cmp_user(user_key(&version.meta(slot).smallest), last).is_le()
        })
    };
    let mut live = 0;
    for (at, level) in family.levels.iter().enumerate() {
        let deeper = &family.levels[at + 1..];
        if deeper.iter().all(|deeper| deeper.slots.is_empty()) {
            return live + level.bytes();
        }
        let alone =
            level.slots.iter().filter(|&&slot| !deeper.iter().any(|d| overlaps(&d.slots, slot)));
        live += alone.map(|&slot| version.meta(slot).size_bytes).sum::<u64>();
    }
    live
}
