//! Control over merges: compaction of a range on request, pauses, and limits.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use reactor::Class;

use crate::db::{CfId, Db};
use crate::error::{Error, Kind, Result};
use crate::mutant::mutant;
use crate::version::{Level, Version, user_key};
use crate::write::compaction::{self, Attempt, Compaction, Running};
use crate::write::merge::MEMORY_SHARE;
use crate::write::picker::{KeyRange, Memory, Picker, Plan};
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
    /// It was cancelled before its end.
    pub cancelled: bool,
}

/// Limits of merges. They hold until they are changed or the database is closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactionLimits {
    /// Processor time of all merges together, in hundredths of a core; `None`: one core for each
    /// merge, and four cores at most.
    pub cores_percent: Option<u32>,
    /// Most bytes of keys and values that all merges together go through in a second; `None` for
    /// no limit.
    pub bytes_per_second: Option<u64>,
}

/// Watches and cancels a compaction on request. Clones are the same.
#[derive(Clone, Default)]
pub struct CompactionWatch(Rc<Watched>);

#[derive(Default)]
struct Watched {
    cancelled: Cell<bool>,
    done: Cell<Compacted>,
    /// Bytes that were left to be merged when `done` had so many.
    left: Cell<(u64, u64)>,
    /// The merge under way.
    current: RefCell<Option<Arc<Running>>>,
}

impl CompactionWatch {
    /// What is done so far.
    pub fn done(&self) -> Compacted {
        self.0.done.get()
    }

    /// Bytes read by merges so far, and what they will be in the end, about.
    pub fn progress(&self) -> (u64, u64) {
        let (left, then) = self.0.left.get();
        let current = self.0.current.borrow();
        let current = current.as_ref().map_or(0, |job| job.progress.bytes - job.progress.left());
        let done = self.done().bytes + current;
        (done, (then + left).max(done))
    }

    /// Whether [`Writer::cancel_compaction`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.get()
    }

    pub(crate) fn set_current(&self, current: Option<Arc<Running>>) {
        self.0.current.replace(current);
    }

    /// Counts a merge that has ended.
    pub(crate) fn count(&self, plan: &Plan, bytes: u64, written: u64) {
        let mut done = self.done();
        if plan.moves {
            done.moved_files += plan.inputs.len() as u64;
        } else {
            done.merges += 1;
            done.bytes += bytes;
            done.into_bytes += written;
        }
        self.0.done.set(done);
        self.set_current(None);
    }
}

/// Cancels a compaction that nobody waits for any more.
/// Lets writes pass a full level 0, until it is dropped: see [`Writer::let_pass`].
pub struct LetPass(Rc<WriteState>);

impl Drop for LetPass {
    fn drop(&mut self) {
        let passing = &self.0.lifecycle.passing;
        passing.set(passing.get() - 1);
    }
}

struct CancelOnDrop<'a>(&'a Writer, CompactionWatch);

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        self.0.cancel_compaction(&self.1);
    }
}

impl Db {
    /// The column family with a name, if [`Writer::compact`] can compact a range of its keys.
    ///
    /// # Errors
    /// As for [`Db::column_family`]; [`Kind::Unsupported`] if in its order the range is empty.
    pub fn may_compact(&self, name: &str, from: Option<&[u8]>, to: Option<&[u8]>) -> Result<CfId> {
        let id = self.column_family(name)?;
        let version = self.version();
        let family = version.family(id)?;
        match from.zip(to) {
            Some((from, to)) if family.comparator.cmp_user(from, to).is_ge() => Err(Error::new(
                Kind::Unsupported,
                format!(
                    "the range is empty: in the order of column family {name} ({}) it ends before \
                     it begins",
                    family.comparator_name
                ),
            )),
            _ => Ok(id),
        }
    }
}

impl Writer {
    /// Compacts all keys from `from` (inclusive) to `to` (exclusive) into the deepest level that
    /// has any of them, level by level. Writes go on meanwhile, and what they add may stay
    /// above. Suspends until it is done; a pause holds it up. Dropping the future cancels it.
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
        self.compact_watched(family, from, to, &CompactionWatch::default()).await
    }

    /// The same, watched by another task, which may cancel it: then it ends with what was done.
    ///
    /// # Errors
    /// As for [`Writer::compact`].
    pub async fn compact_watched(
        &self,
        family: CfId,
        from: Option<&[u8]>,
        to: Option<&[u8]>,
        watch: &CompactionWatch,
    ) -> Result<Compacted> {
        self.0.db.version().family(family)?;
        let range = KeyRange { from: from.map(<[u8]>::to_vec), to: to.map(<[u8]>::to_vec) };
        let sweep = Sweep {
            family,
            range,
            level: 0,
            until: u64::MAX,
            level0_left: None,
            done: None,
            left_of: None,
        };
        let _cancel = CancelOnDrop(self, watch.clone());
        let (writer, watch) = (self.clone(), watch.clone());
        // Its merges must end in an orderly way if this future is dropped.
        let work = async move { sweep.run(&writer, &watch).await };
        self.0.core.spawn(Class::Background, work).await
    }

    /// Cancels a compaction on request, and removes what its present merge has written. Merges
    /// that have ended stay.
    pub fn cancel_compaction(&self, watch: &CompactionWatch) {
        watch.0.cancelled.set(!mutant("cancel_is_ignored"));
        self.0.changed.notify_all();
    }

    /// Stops merges, and the collection of garbage in blob files, until
    /// [`Writer::resume_compaction`]: none begins, and those under way stand still. Writes slow
    /// down and stop when level 0 has as many files as always.
    pub fn pause_compaction(&self) {
        if !self.0.lifecycle.leaving.get() {
            self.0.hold_merges(true);
        }
    }

    /// Ends a pause.
    pub fn resume_compaction(&self) {
        self.0.hold_merges(false);
    }

    /// Prepares the end of writing: ends a pause, for good, and lets submitted writes pass a full
    /// level 0, so that none of them waits for merges. Call it when no new writes are accepted.
    pub fn leave(&self) {
        self.0.leave();
    }

    /// Lets writes that were submitted before a request of another kind pass a full level 0, as
    /// long as the returned guard lives: for a caller that waits for them before it submits that
    /// request, and submits no other writes meanwhile.
    #[must_use]
    pub fn let_pass(&self) -> LetPass {
        let state = &self.0;
        state.lifecycle.passing.set(state.lifecycle.passing.get() + 1);
        state.changed.notify_all();
        LetPass(state.clone())
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

/// A compaction of a range: level by level, and in each from the first key to the last.
struct Sweep {
    family: CfId,
    range: KeyRange,
    /// The level that is compacted now.
    level: usize,
    /// The last sequence at the begin: files of level 0 that were written later are left.
    until: u64,
    /// Files of level 0 that are still to be merged; `None` before the first.
    level0_left: Option<usize>,
    /// The last key of it that is done.
    done: Option<Vec<u8>>,
    /// The level at whose begin the rest was estimated.
    left_of: Option<usize>,
}

impl Sweep {
    async fn run(mut self, writer: &Writer, watch: &CompactionWatch) -> Result<Compacted> {
        let state = &*writer.0;
        let _work = state.begin_work()?;
        writer.flush().await?;
        self.until = state.db.visible();
        while let Some((version, plan)) = self.next(state, watch).await? {
            let chosen = plan.clone();
            let merge =
                Compaction::begin(state, version.clone(), self.family, plan, Some(watch.clone()));
            let attempt = merge.run().await;
            watch.set_current(None);
            if let Err(error) = &attempt
                && !error.is_transient()
            {
                state.fail(error);
            }
            match attempt? {
                Attempt::Merged => {
                    state.merges.files_max.set(usize::MAX);
                    self.advance(&version, &chosen);
                }
                Attempt::LeftAlone | Attempt::Again => {}
                Attempt::TooMany(error) => {
                    state.pause_for_memory("a merge of fewer files", &error).await
                }
                Attempt::Failed(error) => return Err(error),
                Attempt::Nothing if watch.is_cancelled() => {}
                Attempt::Nothing => return Err(closing()),
            }
        }
        Ok(Compacted { cancelled: watch.is_cancelled(), ..watch.done() })
    }

    /// The next merge, if there is one. Waits while other merges have its files, and during a
    /// pause.
    async fn next(
        &mut self,
        state: &WriteState,
        watch: &CompactionWatch,
    ) -> Result<Option<(Arc<Version>, Plan)>> {
        loop {
            if let Some(error) = state.failure() {
                return Err(error);
            }
            if watch.is_cancelled() {
                return Ok(None);
            }
            if state.is_ending() {
                return Err(closing());
            }
            let version = state.db.version();
            let family = version.family(self.family)?;
            let left_alone = |slot| state.merges.quarantine.holds(&version, slot);
            let running = state.merges.running.borrow().clone();
            let of_family = running.iter().filter(|job| job.family == self.family);
            let plans: Vec<&Plan> = of_family.map(|job| &*job.plan).collect();
            let bytes = state.core.pool().limit() as u64 / MEMORY_SHARE;
            let picker = Picker {
                memory: Memory { files: state.merges.files_max.get(), bytes },
                compression: state.options.compression,
                ..Picker::new(&version, family, &left_alone, &plans)
            };
            let deepest = picker.deepest_in(&self.range);
            if deepest.is_none_or(|deepest| self.level >= deepest && self.level > 0) {
                return Ok(None);
            }
            if self.left_of != Some(self.level) {
                let left = picker.bytes_to_merge(self.level, &self.range);
                watch.0.left.set((left, watch.done().bytes));
                self.left_of = Some(self.level);
            }
            let place = compaction::has_place(state);
            match picker.pick_in(self.level, &self.range, self.done.as_deref(), self.until) {
                InRange::Plan(plan) if place => {
                    let plan = *plan;
                    return Ok(Some((version, plan)));
                }
                InRange::Nothing => {
                    let next = if self.level == 0 { picker.shape().0.base } else { self.level + 1 };
                    (self.level, self.done) = (next, None);
                }
                InRange::Plan(_) | InRange::Blocked => {
                    let changes = state.merges.changes();
                    let changed = || state.merges.changes() != changes || state.is_ending();
                    state.changed.wait_until(|| changed() || watch.is_cancelled()).await;
                }
            }
        }
    }

    /// Notes that a merge is done.
    fn advance(&mut self, version: &Version, plan: &Plan) {
        if self.level > 0 {
            let last = plan.inputs.last();
            self.done = last.map(|&slot| user_key(&version.meta(slot).largest).to_vec());
            return;
        }
        let family = version.families.find(self.family);
        let level0 = family.and_then(|family| family.levels.first());
        let is_old = |slot: &&u32| version.meta(**slot).smallest_sequence <= self.until;
        let old = |slots: &[u32]| slots.iter().filter(is_old).count();
        let all = level0.map_or(0, |level| old(&level.slots));
        // Tables of keys that must stay in level 0 would be merged for ever.
        let left = self.level0_left.unwrap_or(all).saturating_sub(old(&plan.inputs));
        self.level0_left = Some(left);
        if left == 0 {
            self.level = plan.output;
        }
    }
}

fn closing() -> Error {
    Error::new(Kind::Io, "the database is being closed: the compaction ended early")
}

impl Picker<'_> {
    /// The deepest level that has keys of a range.
    fn deepest_in(&self, range: &KeyRange) -> Option<usize> {
        let has_some = |level: &Arc<Level>| level.slots.iter().any(|&slot| self.meets(range, slot));
        self.family.levels.iter().rposition(has_some)
    }

    /// Bytes that a compaction of a range reads from a level on, about.
    fn bytes_to_merge(&self, from: usize, range: &KeyRange) -> u64 {
        let all = *range == KeyRange { from: None, to: None };
        let bytes = |level: &Level| match all {
            true => level.bytes(),
            false => {
                let inside = level.slots.iter().filter(|&&slot| self.meets(range, slot));
                inside.map(|&slot| self.version.meta(slot).size_bytes).sum()
            }
        };
        let (mut coming, mut sum) = (0, 0);
        for level in self.family.levels.iter().skip(from) {
            let here = bytes(level);
            if coming > 0 && here > 0 {
                sum += coming + here;
            }
            coming += here;
        }
        sum
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
