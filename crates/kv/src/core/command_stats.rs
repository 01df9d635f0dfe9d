//! `INFO commandstats`: how often each command was called on a core, how long that took, and how
//! often it was refused.
//!
//! The time is that of the core: from taking a command until its reply is ready or waits for
//! something else. It does not include waiting for a disk or for the shard. Consecutive commands of
//! the same name are timed together, so that a pipeline reads the clock twice.

use std::cell::RefCell;

use crate::command::spec::{CommandId, Spec};
use crate::command::table::TABLE;

/// Counters of one command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CommandStats {
    /// Number of executions.
    pub calls: u64,
    pub time_ns: u64,
    /// Refusals before execution.
    pub rejected: u64,
    /// The calls that were answered by an error.
    pub failed: u64,
}

/// Counters of all commands, on one core.
pub(crate) struct AllCommandStats(RefCell<Vec<CommandStats>>);

impl Default for AllCommandStats {
    fn default() -> Self {
        Self(RefCell::new(vec![CommandStats::default(); CommandId::COUNT]))
    }
}

impl AllCommandStats {
    #[inline]
    pub fn count(&self, command: CommandId, change: impl FnOnce(&mut CommandStats)) {
        change(&mut self.0.borrow_mut()[command as usize]);
    }

    /// Counts commands that were answered by errors.
    pub fn failed(&self, command: Option<CommandId>, times: u64) {
        if let Some(command) = command {
            self.count(command, |stats| stats.failed += times);
        }
    }

    pub fn reset(&self) {
        self.0.borrow_mut().fill(CommandStats::default());
    }

    /// The counters by [`CommandId`].
    pub fn list(&self) -> Vec<CommandStats> {
        self.0.borrow().clone()
    }
}

/// The commands that were called or refused, by name, with the sums of all cores' counters.
pub(crate) fn sums<'a>(
    cores: impl Iterator<Item = &'a [CommandStats]> + Clone,
) -> impl Iterator<Item = (&'static str, CommandStats)> {
    let sum_of = move |spec: &Spec| {
        let mut sum = CommandStats::default();
        for stats in cores.clone().filter_map(|core| core.get(spec.id as usize)) {
            sum.calls += stats.calls;
            sum.time_ns += stats.time_ns;
            sum.rejected += stats.rejected;
            sum.failed += stats.failed;
        }
        (spec.name, sum)
    };
    let all = TABLE.iter().flat_map(|spec| std::iter::once(spec).chain(spec.subcommands));
    all.map(sum_of).filter(|(_, sum)| *sum != CommandStats::default())
}
