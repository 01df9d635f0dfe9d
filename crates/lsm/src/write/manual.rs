//! Control over merges: compaction of a range on request, pauses, and limits.

use crate::db::CfId;
use crate::error::{Error, Kind, Result};
use crate::version::{Family, Version, user_key};
use crate::write::compaction::{self, Attempt, Compaction};
use crate::write::picker::{KeyRange, Memory, Picker, Plan};
use crate::write::retry::Task;
use crate::write::state::WriteState;
use crate::write::writer::Writer;

/// What a compaction on request has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Merges.
    pub merges: u64,
    /// Files that only changed their level.
    pub moved_files: u64,
    /// Bytes of the tables that were merged.
    pub bytes: u64,
    /// Bytes of the tables that they became.
    pub into_bytes: u64,
}

/// Limits of merges. They hold until they are changed or the database is closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactionLimits {
    /// Most merges at the same time; `None`: one for each core, at most four.
    pub jobs: Option<usize>,
    /// Most bytes of entries that each merge goes through in a second; `None` for no limit.
    pub bytes_per_second: Option<u64>,
}

impl Writer {
    /// Compacts all keys from `from` (inclusive) to `to` (exclusive) into the deepest level that
    /// has any of them, level by level. Writes go on meanwhile, and what they add may stay
    /// above. Suspends until it is done.
    ///
    /// # Errors
    /// [`Kind::UnknownColumnFamily`]; [`Kind::Full`] or [`Kind::Memory`] if a merge found no space
    /// or memory; the error that ended all writing.
    pub async fn compact(
        &self,
        family: CfId,
        from: Option<&[u8]>,
        to: Option<&[u8]>,
    ) -> Result<Compacted> {
        let state = &*self.0;
        state.db.version().family(family)?;
        let _work = state.begin_work()?;
        self.flush().await?;
        let before = state.stats();
        let range = KeyRange { from: from.map(<[u8]>::to_vec), to: to.map(<[u8]>::to_vec) };
        let mut sweep = Sweep { family, range, level: 0, level0_left: None, done: None };
        while let Some(plan) = sweep.next(state).await? {
            merge(state, family, plan).await?;
        }
        let after = state.stats();
        Ok(Compacted {
            merges: after.merges - before.merges,
            moved_files: after.moved_files - before.moved_files,
            bytes: after.merged_bytes - before.merged_bytes,
            into_bytes: after.merged_into_bytes - before.merged_into_bytes,
        })
    }

    /// Begins no more merges until [`Writer::resume_compaction`]. Those under way end as usual.
    /// Writes slow down and stop when level 0 has as many files as always.
    pub fn pause_compaction(&self) {
        self.0.merges.paused.set(true);
    }

    /// Ends a pause.
    pub fn resume_compaction(&self) {
        self.0.merges.paused.set(false);
        self.0.merges.note_change();
        self.0.changed.notify_all();
    }

    /// Whether merges are paused.
    pub fn compaction_is_paused(&self) -> bool {
        self.0.merges.paused.get()
    }

    /// Limits merges from now on, those under way included.
    pub fn limit_compaction(&self, limits: CompactionLimits) {
        self.0.merges.limits.set(limits);
        self.0.set_paces();
        self.0.merges.note_change();
        self.0.changed.notify_all();
    }

    /// The limits of merges.
    pub fn compaction_limits(&self) -> CompactionLimits {
        self.0.merges.limits.get()
    }
}

/// Executes one merge of a request.
async fn merge(state: &WriteState, family: CfId, plan: Plan) -> Result<()> {
    let version = state.db.version();
    match Compaction::begin(state, version, family, plan).run().await? {
        Attempt::Merged | Attempt::LeftAlone => Ok(()),
        Attempt::TooMany(error) | Attempt::Failed(error) => Err(error),
        Attempt::Nothing => {
            Err(Error::new(Kind::Io, "the database is being closed: the compaction was cancelled"))
        }
    }
}

/// A compaction of a range: level by level, and in each from the first key to the last.
struct Sweep {
    family: CfId,
    range: KeyRange,
    /// The level that is compacted now.
    level: usize,
    /// Files of level 0 that are still to be merged; `None` before the first.
    level0_left: Option<usize>,
    /// The last key of it that is done.
    done: Option<Vec<u8>>,
}

impl Sweep {
    /// The next merge, if there is one. Waits while other merges have its files.
    async fn next(&mut self, state: &WriteState) -> Result<Option<Plan>> {
        loop {
            if let Some(error) = state.failure() {
                return Err(error);
            }
            let version = state.db.version();
            let family = version.family(self.family)?;
            let deepest = family.levels.iter().rposition(|level| !level.slots.is_empty());
            if deepest.is_none_or(|deepest| self.level >= deepest && self.level > 0) {
                return Ok(None);
            }
            let bytes = state.core.pool().limit() as u64 / crate::write::merge::MEMORY_SHARE;
            let left_alone = |slot| state.merges.quarantine.holds(&version, slot);
            let running = state.merges.running.borrow().clone();
            let of_family = running.iter().filter(|job| job.family == self.family);
            let plans: Vec<&Plan> = of_family.map(|job| &*job.plan).collect();
            let picker = Picker {
                version: &version,
                family,
                left_alone: &left_alone,
                running: &plans,
                memory: Memory { files: usize::MAX, bytes },
                compression: state.options.compression,
                turn: 0,
            };
            let place = compaction::has_place(state);
            match picker.pick_in(self.level, &self.range, self.done.as_deref()) {
                InRange::Plan(plan) if place => {
                    self.advance(&version, family, &plan);
                    return Ok(Some(*plan));
                }
                InRange::Nothing => {
                    let next = if self.level == 0 { picker.shape().0.base } else { self.level + 1 };
                    (self.level, self.done) = (next, None);
                }
                InRange::Plan(_) | InRange::Blocked => {
                    let changes = state.merges.changes();
                    let stuck = || state.retries.error(Task::Merge).is_some();
                    let changed = || state.merges.changes() != changes || stuck();
                    state.changed.wait_until(|| changed() || state.has_failed()).await;
                }
            }
        }
    }
}

impl Sweep {
    /// Notes that a merge is being done.
    fn advance(&mut self, version: &Version, family: &Family, plan: &Plan) {
        if self.level > 0 {
            let last = plan.inputs.last();
            self.done = last.map(|&slot| user_key(&version.meta(slot).largest).to_vec());
            return;
        }
        // Files that are flushed meanwhile are left.
        let all = family.levels.first().map_or(0, |level| level.slots.len());
        let left = self.level0_left.unwrap_or(all).saturating_sub(plan.inputs.len());
        self.level0_left = Some(left);
        if left == 0 {
            self.level = plan.output;
        }
    }
}

/// What a range has at a level.
pub(crate) enum InRange {
    Plan(Box<Plan>),
    /// No file of the range is left.
    Nothing,
    /// Running merges have its files.
    Blocked,
}
