//! Watching the age of files: a task that lists those that are due, for the picker.
//!
//! It looks at all files every ten minutes, and when those of its last list are gone: a file that
//! went down a level may be due there, too. So a version costs nothing, however many files it has.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use reactor::timeout;

use crate::version::Version;
use crate::write::picker::{Aged, when_due};
use crate::write::state::WriteState;

/// Longest time between two looks, in seconds. The wall clock may be set meanwhile.
const LOOK_SECONDS: u64 = 600;
/// Files that are looked at in one step.
const FILES_AT_ONCE: usize = 512;
/// Most files of a family in a list.
const LISTED_MAX: usize = 4096;

/// The files that are due for their age.
#[derive(Default)]
pub(crate) struct AgedFiles {
    /// By family: the first level first, and how many of the list are known to be gone.
    families: RefCell<BTreeMap<u32, (Vec<Aged>, usize)>>,
    /// The last list had files.
    some: Cell<bool>,
}

impl AgedFiles {
    /// Calls `f` with the list of a family.
    pub fn with<R>(&self, family: u32, f: impl FnOnce(&[Aged]) -> R) -> R {
        let families = self.families.borrow();
        f(families.get(&family).map_or(&[], |(files, gone)| &files[*gone..]))
    }

    /// Whether there was a list and all of its files are gone.
    fn is_done(&self, version: &Version) -> bool {
        if !self.some.get() {
            return false;
        }
        let mut families = self.families.borrow_mut();
        families.retain(|&id, (files, gone)| {
            let family = version.family(id).ok();
            let is_gone =
                |aged: &&Aged| family.is_none_or(|family| aged.place(version, family).is_none());
            *gone += files[*gone..].iter().take_while(is_gone).count();
            *gone < files.len()
        });
        families.is_empty()
    }
}

impl WriteState {
    /// Lists files that are due for their age, until writing ends.
    pub async fn watch_ages(&self) {
        while !self.is_ending() {
            let next = self.list_aged().await;
            let left = next.saturating_sub(self.core.unix_time_ms() / 1000);
            let ns = left.clamp(1, LOOK_SECONDS) * 1_000_000_000;
            let is_done = || self.merges.aged.is_done(&self.db.0.current.load());
            let _ =
                timeout(&self.core, ns, self.changed.wait_until(|| self.is_ending() || is_done()))
                    .await;
        }
    }

    /// Lists the files that are due now. Returns when the next one will be, in Unix seconds.
    async fn list_aged(&self) -> u64 {
        let version = self.db.version();
        let now = self.core.unix_time_ms() / 1000;
        let (mut next, mut looked) = (u64::MAX, 0);
        let mut all = BTreeMap::new();
        for family in version.families.iter().filter(|family| family.refused.is_none()) {
            let options = &family.options;
            // Files that are written meanwhile.
            let soonest = options.ttl.min(options.period);
            next = next.min(now.saturating_add(soonest));
            if options.manual_only || soonest == u64::MAX {
                continue;
            }
            let deepest = family.levels.iter().rposition(|level| !level.slots.is_empty());
            let mut due = Vec::new();
            for (level, files) in family.levels.iter().enumerate() {
                for &slot in &files.slots {
                    looked += 1;
                    if looked % FILES_AT_ONCE == 0 {
                        self.core.checkpoint().await;
                    }
                    let times = version.times(slot);
                    let whens = when_due(options, level, deepest.unwrap_or(0), times);
                    let number = version.meta(slot).number;
                    match whens.iter().find(|when| when.0 <= now) {
                        Some(_) if self.merges.quarantine.holds(&version, slot) => {}
                        Some(&(_, what)) if due.len() < LISTED_MAX => {
                            due.push(Aged { level, slot, number, due: what });
                        }
                        Some(_) => {}
                        None => next = whens.iter().fold(next, |next, when| next.min(when.0)),
                    }
                }
            }
            if !due.is_empty() {
                all.insert(family.id, (due, 0));
            }
        }
        let aged = &self.merges.aged;
        aged.some.set(!all.is_empty());
        let is_new = *aged.families.borrow() != all;
        aged.families.replace(all);
        if is_new {
            self.merges.note_change();
            self.changed.notify_all();
        }
        next
    }
}
