//! `kv ingest`: this process verifies the files and puts them into the database's directory; a
//! node, or this process, adds them to the database.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ::kv::Shard;
use lsm::{Db, IngestFiles, Transfer, WriteOptions};
use node::Request;
use node::Size;
use reactor::Core;
use serde_json::{Value, json};

use super::copies::{failure, open_closed, print, show};
use crate::admin::Admin;
use crate::answer::{array, number};
use crate::args::{IngestArgs, Original};
use crate::failure::{Failure, Verdict};
use crate::output::{progress_bar, thousands};
use crate::tool_core::on_core;

/// How often the node hears of the command while it copies.
const RENEWAL: Duration = Duration::from_secs(10);

/// Runs the command.
#[expect(
    clippy::disallowed_methods,
    reason = "a tool removes what it has moved, and reports how long it took"
)]
pub fn run(args: IngestArgs) -> Result<Verdict, Failure> {
    let IngestArgs { files, column_family, moves, no_verify, into } = args;
    let (begun, json) = (Instant::now(), into.node.json);
    let (paths, count) = (files.clone(), files.len());
    let mut done = on_core(into.copying.io, async move |core| {
        if !no_verify {
            verify(&core, &paths).await?;
        }
        match into.data.clone() {
            Some(data) => into_directory(&core, &data, &paths, column_family, moves, &into).await,
            None => into_node(&core, &paths, column_family, moves, &into).await,
        }
    })?;
    if moves {
        for path in &files {
            std::fs::remove_file(path).map_err(|error| {
                let what = format!("everything is ingested, but {} stays: {error}", path.display());
                Failure::new(what)
            })?;
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let text = format!(
        "ingested {count} files with {} entries ({}) in {seconds:.1} s",
        thousands(number(&done, "entries")),
        Size(number(&done, "bytes")),
    );
    done["files"] = count.into();
    done["seconds"] = seconds.into();
    print(json, &done, &text)?;
    Ok(Verdict::Good)
}

/// Reads every byte of the files.
async fn verify(core: &Core, files: &[PathBuf]) -> Result<(), Failure> {
    let bar = progress_bar("verifying");
    for path in files {
        let checked = lsm::check_file(core, path, |done, total| show(&bar, done, total)).await;
        let report = checked.map_err(|error| failure(path.clone(), &error))?;
        if let Some(damage) = report.damages.first() {
            let place = path.display();
            let offset = damage.offset.map_or(String::new(), |at| format!(" at offset {at}"));
            return Err(Failure::new(format!("{place}{offset}: {}", damage.what))
                .hint("nothing was ingested"));
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Puts the files into a database's directory.
async fn place(
    core: &Core,
    files: &[PathBuf],
    numbers: &[u64],
    directory: &Path,
    moves: bool,
    into: &Original,
    mut alive: impl FnMut(),
) -> Result<(), Failure> {
    let bar = progress_bar("copying");
    let mut progress = |done, total| {
        show(&bar, done, total);
        alive();
    };
    let rate = into.copying.rate_limit.map(|size| size.0);
    let mut transfer = Transfer::new(core, rate, &mut progress);
    let files: Vec<(PathBuf, u64)> = files.iter().cloned().zip(numbers.iter().copied()).collect();
    let placed = lsm::place_files(&files, directory, moves, &mut transfer).await;
    bar.finish_and_clear();
    placed.map_err(|error| failure(directory.to_owned(), &error))
}

#[expect(clippy::disallowed_methods, reason = "a tool has no core's clock in its client")]
async fn into_node(
    core: &Core,
    files: &[PathBuf],
    column_family: String,
    moves: bool,
    into: &Original,
) -> Result<Value, Failure> {
    let mut admin = Admin::connect(&into.node)?;
    let begun = admin.call(&Request::IngestBegin { files: files.len() })?;
    let numbers: Vec<u64> = array(&begun, "numbers").iter().filter_map(Value::as_u64).collect();
    let directory = PathBuf::from(begun["directory"].as_str().unwrap_or_default());
    if numbers.len() != files.len() {
        return Err(Failure::new(format!("the node's answer has other numbers: {begun}")));
    }
    // The node discards the files if the connection ends.
    let (mut renewed, mut lost) = (Instant::now(), None);
    let renew = || {
        if lost.is_none() && renewed.elapsed() >= RENEWAL {
            renewed = Instant::now();
            lost = admin.call(&Request::IngestRenew { numbers: numbers.clone() }).err();
        }
    };
    place(core, files, &numbers, &directory, moves, into, renew).await?;
    if let Some(lost) = lost {
        return Err(lost.during("the ingestion"));
    }
    let finished = admin.call(&Request::IngestFinish { column_family, numbers: numbers.clone() });
    finished.map_err(|failure| {
        let ended = failure.is_gone();
        let failure = named(failure, &directory, files, &numbers).during("the ingestion");
        match ended {
            true => failure.hint(
                "it is unknown whether the files are ingested: when a node serves the database \
                 again, look for their keys before you repeat the command",
            ),
            false => failure,
        }
    })
}

/// Names the user's files in place of those in the database's directory.
fn named(failure: Failure, directory: &Path, files: &[PathBuf], numbers: &[u64]) -> Failure {
    files.iter().zip(numbers).fold(failure, |failure, (path, number)| {
        let (own, path) = (format!("{number:06}.dbtmp"), path.display().to_string());
        failure.rename(&directory.join(&own).display().to_string(), &path).rename(&own, &path)
    })
}

async fn into_directory(
    core: &Core,
    data: &Path,
    files: &[PathBuf],
    column_family: String,
    moves: bool,
    into: &Original,
) -> Result<Value, Failure> {
    let agrees = async |db: &Db| {
        let family = db.column_family(&column_family)?;
        db.may_ingest(core, family, files).await?;
        Ok(family)
    };
    let (db, writer, family) = open_closed(core, data, WriteOptions::default(), agrees).await?;
    let shard = Shard::new(core, db.attach(core), writer);
    let ingest = async {
        let numbers = shard.reserve_files(files.len());
        place(core, files, &numbers, data, moves, into, || {}).await?;
        let ingested = vec![IngestFiles { family, numbers: numbers.clone() }];
        let ingested = shard.ingest(ingested, false).await;
        ingested.map_err(|error| named(failure(data.to_owned(), &error), data, files, &numbers))
    };
    let done = ingest.await;
    let closed = shard.close().await;
    let done = done?;
    closed.map_err(|error| node::explain(data, &error))?;
    Ok(json!({
        "entries": done.entries,
        "bytes": done.bytes,
        "sequence": done.sequence,
        "levels": done.levels,
    }))
}
