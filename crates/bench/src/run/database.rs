//! The database of a measurement: opening it, warming its cache, and waiting for its background
//! work.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use lsm::{Db, OpenOptions, Reader, WriteOptions, Writer};
use node::{Error, Kind};
use reactor::{Class, Core};

use super::Plan;
use super::meeting::POLL_NS;
use crate::cases::warm_up;
use crate::outcome::Drained;

/// Calls in flight of the warm-up.
const WARM_UP_DEPTH: usize = 64;

/// Opens the database as the case needs it.
pub async fn open(
    core: &Core,
    plan: &Plan,
    options: OpenOptions,
) -> Result<(Db, Option<Writer>), Error> {
    if !plan.case.writes() {
        return Ok((node::open(core, &plan.data, options).await?, None));
    }
    let create = plan.case.fills();
    let entries = core.list(&plan.data).await.unwrap_or_default();
    if create && entries.iter().any(|entry| entry.name == "CURRENT") {
        let what =
            format!("cannot create a database in {}: it has one already", plan.data.display());
        return Err(Error::new(Kind::Usage, what).hint("name an empty directory, or use overwrite"));
    }
    let write = WriteOptions {
        durability: plan.write.durability,
        create,
        memtable_bytes: plan.write.memtable_bytes,
        compression: plan.write.compression,
        blob_min: plan.write.blob_min,
        blob_space_max_ratio: plan.write.blob_space_max_ratio,
        ..WriteOptions::default()
    };
    match Db::open_for_writing(core, &plan.data, options, write).await {
        Ok((db, writer)) => Ok((db, Some(writer))),
        Err(error) => Err(node::explain(&plan.data, &error)),
    }
}

/// Reads every key once, into this core's cache.
pub async fn warm(core: &Core, reader: &Reader, keys: u64) -> Result<(), String> {
    let tasks: Vec<_> = (0..WARM_UP_DEPTH)
        .map(|n| {
            let (core, reader) = (core.clone(), reader.clone());
            core.clone().spawn(Class::Foreground, async move {
                warm_up(&core, &reader, keys, n as u64, WARM_UP_DEPTH).await
            })
        })
        .collect();
    for task in tasks {
        task.await?;
    }
    Ok(())
}

/// Waits for all flushes and compactions. Returns the time that they took, the bytes that the
/// process has written to the device since its start, and those that the database has on it.
#[expect(clippy::disallowed_methods, reason = "asks the kernel after the window")]
pub async fn drain(core: &Core, writer: &Writer, dir: &Path) -> Drained {
    let from_ns = core.now_exact_ns();
    while !writer.is_quiesced() && writer.failure().is_none() {
        core.sleep_ns(POLL_NS).await;
    }
    let seconds = (core.now_exact_ns() - from_ns) as f64 / 1e9;
    let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let device_bytes = io.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.parse().ok());
    let blocks = std::fs::read_dir(dir).map(|files| {
        files.filter_map(|file| Some(file.ok()?.metadata().ok()?.blocks())).sum::<u64>()
    });
    Drained { seconds, device_bytes, disk_bytes: blocks.unwrap_or(0) * 512 }
}

/// The alignment of our reads, asked of one table file.
pub async fn alignment(core: &Core, plan: &Plan) -> usize {
    let Ok(entries) = core.list(&plan.data).await else { return 0 };
    let Some(table) = entries.iter().find(|entry| entry.name.ends_with(".sst")) else { return 0 };
    core.open(&plan.data.join(&table.name), false).await.map_or(0, |file| file.alignment())
}
