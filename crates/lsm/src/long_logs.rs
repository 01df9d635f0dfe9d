//! Logs that hold more than memory may: at the opening they become tables, piece by piece.
//!
//! 1. The opening has replayed them once, keeping nothing, so that damage and what cannot be served
//!    are found before anything is written.
//! 2. [`to_tables`] replays them again. Each piece that memory may hold becomes a table of each
//!    column family that it writes to.
//! 3. When all are there and their names are durable, one change of the MANIFEST names them and
//!    says that the logs are needed no more.
//!
//! Nobody reads or writes yet. A crash before the change leaves tables that nobody names, which the
//! next opening removes, and the logs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::Result;
use crate::flush::{self, Flushed};
use crate::job::{Job, Made, unmake};
use crate::mem::Mem;
use crate::pace::Pace;
use crate::recover;
use crate::recovered::Sorting;
use crate::recovery_plan::RecoveryPlan;
use crate::table::Table;
use crate::writer::{Generation, Inner};

/// See the module text. `generation` is what was recovered: its numbers, that is. Suspends for the
/// disk.
pub(crate) async fn to_tables(
    inner: &Inner,
    logs: &RecoveryPlan,
    generation: &Generation,
) -> Result<()> {
    let job = Job {
        core: inner.core.clone(),
        dir: inner.dir.clone(),
        db: inner.db.clone(),
        compression: inner.options.compression,
        made: Made::default(),
    };
    let tables = match write(inner, &job, logs).await {
        Ok(tables) => tables,
        Err(error) => {
            unmake(&inner.dir, job.made.take().into_iter()).await;
            return Err(error);
        }
    };
    let flushed = |(id, tables)| Flushed { id, mems: Vec::new(), tables };
    flush::install(inner, generation, tables.into_iter().map(flushed).collect(), true).await
}

/// The tables of each family, the oldest first.
async fn write(inner: &Inner, job: &Job, logs: &RecoveryPlan) -> Result<BTreeMap<u32, Vec<Table>>> {
    let version = inner.db.version();
    // Also a family without tables needs the logs no more.
    let none = version.families.iter().filter(|family| family.refused.is_none());
    let made = RefCell::new(none.map(|family| (family.id, Vec::new())).collect::<BTreeMap<_, _>>());
    let pace = Arc::<Pace>::default();
    let piece = async |piece: BTreeMap<u32, Sorting>| {
        for (id, mut sorting) in piece {
            let family = version.families.iter().find(|family| family.id == id);
            let Some(family) = family.filter(|family| family.refused.is_none()) else { continue };
            while sorting.step() {
                job.core.checkpoint().await;
            }
            let mem = Mem::Recovered(sorting.finish());
            let table = flush::table(job, family, &mem, &pace).await?;
            made.borrow_mut().entry(id).or_default().push(table);
        }
        Ok(())
    };
    let (state, options) = (&inner.db.0.manifest, inner.db.options());
    // They were said at the opening.
    let mut warnings = Vec::new();
    let rest =
        recover::logs(&inner.core, &inner.dir, logs, state, options, &mut warnings, &piece).await?;
    piece(rest.memtables).await?;
    inner.sync_names().await?;
    tracing::info!(
        bytes = logs.log_bytes(),
        tables = made.borrow().values().map(Vec::len).sum::<usize>(),
        "made tables of write-ahead logs that are longer than memory may hold"
    );
    Ok(made.take())
}
