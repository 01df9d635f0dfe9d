//! Makes tables of the write-ahead logs that a repair cannot leave as they are.

use std::sync::Arc;

use fs::Dir;
use reactor::Core;
use rocksfmt::{FileName, ManifestState};

use crate::error::Result;
use crate::inspect::repair::Loss;
use crate::mem::Mem;
use crate::open::recover::{self, Piece};
use crate::open::recovery_plan::{PlannedLog, RecoveryPlan};
use crate::options::OpenOptions;
use crate::table::Table;
use crate::version::Version;
use crate::write::blob_garbage::BlobMeter;
use crate::write::flush;
use crate::write::job::Job;
use crate::write::pace::Pace;

/// Makes tables of the writes in logs, each log by itself, up to its first damage. Returns the
/// tables with their families, what was lost, and the last sequence. With no `job` it only looks.
/// Suspends for the disk.
pub(super) async fn to_tables(
    (core, dir): (&Core, &Dir),
    job: Option<&Job>,
    version: &Version,
    state: &ManifestState,
    logs: &[PlannedLog],
    options: &OpenOptions,
) -> Result<(Vec<(u32, Table)>, Vec<Loss>, u64)> {
    let (mut tables, mut losses, mut last_sequence) = (Vec::new(), Vec::new(), 0);
    let salvage = OpenOptions { salvage: true, ..options.clone() };
    for log in logs {
        let plan = RecoveryPlan {
            logs: vec![log.clone()],
            logs_are_alone: true,
            ..RecoveryPlan::default()
        };
        let mut warnings = Vec::new();
        let piece = async |piece: Piece| add(job, version, piece, &mut tables).await;
        let rest = recover::logs(core, dir, &plan, state, &salvage, &mut warnings, piece).await?;
        let border = None;
        add(job, version, Piece { memtables: rest.memtables, border }, &mut tables).await?;
        last_sequence = last_sequence.max(rest.last_sequence);
        let name = FileName::Wal(log.number).to_string();
        let rest = "; the rest of the logs is not served";
        losses.extend(warnings.iter().filter_map(|warning| {
            let what = format!("the writes from there on: {}", warning.strip_suffix(rest)?);
            Some(Loss { file: name.clone(), what, ..Loss::default() })
        }));
    }
    Ok((tables, losses, last_sequence))
}

/// Makes tables of a piece.
async fn add(
    job: Option<&Job>,
    version: &Version,
    piece: Piece,
    tables: &mut Vec<(u32, Table)>,
) -> Result<()> {
    let Some(job) = job else { return Ok(()) };
    let pace = Arc::<Pace>::default();
    for (id, mut sorting) in piece.memtables {
        let family = version.families.find(id);
        let Some(family) = family.filter(|family| family.refused.is_none()) else { continue };
        while sorting.step() {
            job.core.checkpoint().await;
        }
        let mem = Mem::Recovered(sorting.finish());
        let mut blobs = BlobMeter::default();
        let table = flush::table(job, family, &mem, 0, &pace, &mut blobs, None).await?;
        tables.push((id, table));
    }
    Ok(())
}
