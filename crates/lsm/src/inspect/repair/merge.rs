//! Puts the tables of a rebuilt state into levels, and merges those of families without an order.

use std::sync::Arc;

use rocksfmt::{FileMeta, FileName, ManifestState};

use crate::error::{Error, Kind, Result};
use crate::inspect::repair::place::place;
use crate::inspect::repair::{Repair, hull};
use crate::table::Table;
use crate::table_options::TablePlace;
use crate::version::{Level, Version};
use crate::write::job::{Job, MadeFiles};
use crate::write::merge::{MergePart, Merged};
use crate::write::pace::{BusyTime, MergeCounters, Pace};
use crate::write::picker::{KeyRange, Plan};
use crate::write::table_writer::file_bytes;

impl Repair<'_> {
    /// Puts all tables of level 0 into levels. `new` has the tables that the version lacks.
    pub(super) async fn put_in_order(
        &mut self,
        job: &Job,
        state: &mut ManifestState,
        new: Vec<(u32, Table)>,
    ) -> Result<()> {
        let mut version = Version::clone(&job.db.version());
        for (id, table) in new {
            version.add_tables(id, 0, [table]);
        }
        let ids: Vec<u32> = state.column_families.keys().copied().collect();
        for id in ids {
            let Some(family) = state.column_families.get_mut(&id) else { continue };
            let order = family.comparator().map_err(|e| Error::format(&family.name, &e))?;
            let levels = self.stored_options.levels(&family.name).max(2);
            let metas = family.levels.concat();
            if let Some(placed) = place(order, metas.clone(), levels) {
                family.levels = placed;
                continue;
            }
            self.report.merged_bytes += metas.iter().map(|meta| meta.size_bytes).sum::<u64>();
            if self.dry_run {
                continue;
            }
            let merged = self.merged(job, &mut version, id, levels - 1).await?;
            if let Some(family) = state.column_families.get_mut(&id) {
                family.levels = vec![Vec::new(); levels - 1];
                family.levels.push(merged);
            }
        }
        Ok(())
    }

    /// Merges all tables of a family into tables for a level. Those that cannot be read are lost.
    async fn merged(
        &mut self,
        job: &Job,
        version: &mut Version,
        id: u32,
        level: usize,
    ) -> Result<Vec<FileMeta>> {
        loop {
            let Some(family) = version.families.find_mut(id) else {
                return Ok(Vec::new());
            };
            family.filter = None;
            let inputs: Vec<u32> = family.levels.iter().flat_map(|l| l.slots.clone()).collect();
            family.levels = vec![Level::of(inputs.clone(), &version.slots)];
            let (name, order) = (family.name.clone(), family.comparator);
            let metas: Vec<FileMeta> =
                inputs.iter().map(|&slot| version.meta(slot).clone()).collect();
            let Some(family) = version.families.find(id) else {
                return Ok(Vec::new());
            };
            let plan = Plan {
                start: 0,
                output: level,
                inputs: inputs.clone(),
                overlapped: Vec::new(),
                moves: false,
                stays: Vec::new(),
                hull: hull(order, &metas),
                file_bytes: file_bytes(job, family),
                place: TablePlace { level, base_level: 1, is_bottom: true },
            };
            let part = MergePart {
                version: Arc::new(version.clone()),
                family: id,
                plan: Arc::new(plan),
                range: KeyRange { from: None, to: None },
                done: MergeCounters::default(),
                pace: Arc::<Pace>::default(),
            };
            // If it fails, it removes what it has made, and only that.
            let own = Job {
                core: job.core.clone(),
                dir: job.dir.clone(),
                db: job.db.clone(),
                compression: job.compression,
                made: MadeFiles::default(),
                busy: BusyTime::default(),
            };
            let merged = part.run(&own).await;
            job.made.borrow_mut().extend(own.made.take());
            match merged? {
                Merged::Tables(made) => {
                    let all = made.tables.into_iter().chain(made.staying.map(|table| *table));
                    return Ok(all.map(|table| table.meta).collect());
                }
                Merged::Unread(slot, error) => {
                    if error.kind() != Kind::Corruption {
                        return Err(error);
                    }
                    let meta = version.meta(slot).clone();
                    self.lose_table(&name, &meta, error.to_string());
                    let rest = inputs.into_iter().filter(|&other| other != slot).collect();
                    let Some(family) = version.families.find_mut(id) else {
                        return Ok(Vec::new());
                    };
                    family.levels = vec![Level::of(rest, &version.slots)];
                    tracing::warn!("{} is left out: {error}", FileName::Sst(meta.number));
                }
            }
        }
    }
}
