//! `kv checkpoint`, `kv backup` and `kv restore`. This process copies the files, also those of a
//! running node.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use lsm::{
    BackupDir, Checkpoint, CreatedBackup, Db, FileList, OpenOptions, RestoredBackup, Transfer,
    WriteOptions, Writer,
};
use node::Size;
use reactor::Core;
use reactor::log::utc;
use serde_json::{Value, json};

use super::destination::{new_directory, refuse_nested};
use super::original::Files;
use crate::args::{BackupCommand, Backups, CheckpointArgs, Copying, Original, RestoreArgs};
use crate::failure::{Failure, Verdict};
use crate::output::{Out, progress_bar, table, thousands};
use crate::tool_core::{POOL_BYTES, on_core};

/// `kv checkpoint`.
pub fn checkpoint(args: CheckpointArgs) -> Result<Verdict, Failure> {
    let CheckpointArgs { directory, original } = args;
    let (to, json) = (new_directory(&directory)?, original.node.json);
    let (made, took) = copied(original, to, "linking", async |_, list, to, transfer| {
        lsm::checkpoint(list, to, transfer).await
    })?;
    let Checkpoint { sequence, files, bytes, linked_bytes } = made;
    let place = directory.display();
    let text = format!(
        "made {place}: {} files, {}, of which {} are shared with the database, in {:.1} s",
        thousands(files),
        Size(bytes),
        Size(linked_bytes),
        took.as_secs_f64()
    );
    let summary = json!({
        "directory": directory,
        "sequence": sequence,
        "files": files,
        "bytes": bytes,
        "linked_bytes": linked_bytes,
        "seconds": took.as_secs_f64(),
    });
    print(json, &summary, &text)?;
    Ok(Verdict::Good)
}

/// Copies a database to a place outside of it. Returns the time it took, too.
#[expect(clippy::disallowed_methods, reason = "a tool reports how long it took")]
fn copied<T: Send + 'static>(
    original: Original,
    to: PathBuf,
    what: &'static str,
    copy: impl AsyncFnOnce(&Core, &FileList, &Path, &mut Transfer<'_>) -> lsm::Result<T>
    + Clone
    + Send
    + 'static,
) -> Result<(T, Duration), Failure> {
    let begun = Instant::now();
    on_core(original.copying.io, async move |core| {
        let mut files = Files::of(&core, &original).await?;
        let list = files.list();
        refuse_nested(&list.directory, &to)?;
        let bar = progress_bar(what);
        let rate = original.copying.rate_limit.map(|size| size.0);
        let mut progress = |done, total| {
            show(&bar, done, total);
            files.renew();
        };
        let mut transfer = Transfer::new(&core, rate, &mut progress);
        let done = copy(&core, &list, &to, &mut transfer).await;
        bar.finish_and_clear();
        match done {
            Ok(done) => Ok((done, begun.elapsed())),
            Err(error) => Err(files.explain(failure(list.directory, &error))),
        }
    })
}

/// Works on backups.
#[expect(clippy::disallowed_methods, reason = "a tool reports how long it took")]
fn transferred<T: Send + 'static>(
    backups: PathBuf,
    copying: &Copying,
    what: &'static str,
    work: impl AsyncFnOnce(BackupDir, &mut Transfer<'_>) -> lsm::Result<T> + Clone + Send + 'static,
) -> Result<(T, Duration), Failure> {
    let begun = Instant::now();
    let rate = copying.rate_limit.map(|size| size.0);
    on_core(copying.io, async move |core| {
        let bar = progress_bar(what);
        let mut progress = |done, total| show(&bar, done, total);
        let mut transfer = Transfer::new(&core, rate, &mut progress);
        let done = work(BackupDir::new(&core, &backups), &mut transfer).await;
        bar.finish_and_clear();
        let done = done.map_err(|error| match error.kind() {
            lsm::Kind::Corruption => failure(backups, &error)
                .hint("millrace kv backup list shows the backups; --id N takes another one"),
            _ => failure(backups, &error),
        })?;
        Ok((done, begun.elapsed()))
    })
}

/// The failure for an error of the engine, without its advice for an opening.
pub fn failure(path: PathBuf, error: &lsm::Error) -> Failure {
    let what = error.to_string();
    match what.contains('/') {
        true => Failure::new(what),
        false => Failure::new(format!("{}: {what}", path.display())),
    }
}

/// `kv backup`.
pub fn backup(command: BackupCommand) -> Result<Verdict, Failure> {
    match command {
        BackupCommand::Create { backups, any_database, original } => {
            create(backups, any_database, original)
        }
        BackupCommand::List { backups } => list(backups),
        BackupCommand::Verify { backups, id, copying } => verify(backups, id, &copying),
        BackupCommand::Delete { backups, id } => delete(backups, id),
        BackupCommand::Purge { backups, keep } => purge(backups, keep),
    }
}

fn create(backups: PathBuf, any_database: bool, original: Original) -> Result<Verdict, Failure> {
    let (to, json) = (backups.clone(), original.node.json);
    let copy = async move |core: &Core, list: &FileList, to: &Path, transfer: &mut Transfer<'_>| {
        let backups = BackupDir::new(core, to);
        let backups = if any_database { backups.of_any_database() } else { backups };
        backups.create(list, transfer).await
    };
    let (made, took) = copied(original, to, "copying", copy)?;
    let CreatedBackup { id, sequence, files, bytes, shared_bytes } = made;
    let text = format!(
        "made backup {id} in {}: {} files, {}, of which {} were copied, in {:.1} s",
        backups.display(),
        thousands(files),
        Size(bytes),
        Size(bytes - shared_bytes),
        took.as_secs_f64()
    );
    let summary = json!({
        "id": id,
        "sequence": sequence,
        "files": files,
        "bytes": bytes,
        "copied_bytes": bytes - shared_bytes,
        "seconds": took.as_secs_f64(),
    });
    print(json, &summary, &text)?;
    Ok(Verdict::Good)
}

fn list(args: Backups) -> Result<Verdict, Failure> {
    let Backups { backups, json } = args;
    let path = backups.clone();
    let (all, damaged) = on_core(reactor::DriverKind::Auto, async move |core| {
        let listed = BackupDir::new(&core, &path).list().await;
        listed.map_err(|error| failure(path, &error))
    })?;
    let bytes =
        |backup: &lsm::Backup| -> u64 { backup.files.iter().filter_map(|file| file.bytes).sum() };
    let mut out = Out::new();
    if json {
        let one = |backup: &lsm::Backup| {
            json!({
                "id": backup.id,
                "unix_time": backup.time,
                "sequence": backup.sequence,
                "files": backup.files.len(),
                "shared_bytes": bytes(backup),
            })
        };
        let damaged: Vec<String> = damaged.iter().map(ToString::to_string).collect();
        out.json(&json!({"backups": all.iter().map(one).collect::<Vec<_>>(), "damaged": damaged}))?;
    } else {
        let head = ["BACKUP", "TIME (UTC)", "FILES", "SIZE", "SEQUENCE"].map(str::to_owned);
        let row = |backup: &lsm::Backup| {
            [
                backup.id.to_string(),
                utc(backup.time),
                thousands(backup.files.len() as u64),
                Size(bytes(backup)).to_string(),
                thousands(backup.sequence),
            ]
        };
        let rows: Vec<_> = std::iter::once(head).chain(all.iter().map(row)).collect();
        out.bytes(table(&rows, &[0, 2, 3, 4]).as_bytes())?;
        for error in &damaged {
            out.line(&format!("damaged: {error}"))?;
        }
    }
    out.flush()?;
    Ok(if damaged.is_empty() { Verdict::Good } else { Verdict::Bad })
}

fn verify(args: Backups, id: Option<u32>, copying: &Copying) -> Result<Verdict, Failure> {
    let Backups { backups, json } = args;
    let place = backups.display().to_string();
    let (found, _) = transferred(backups, copying, "verifying", async move |backups, transfer| {
        backups.verify(id, transfer).await
    })?;
    let mut text = format!(
        "{place}: {} files, {}: {} damaged",
        thousands(found.files),
        Size(found.bytes),
        found.damages.len()
    );
    for damage in &found.damages {
        text.push_str("\n  ");
        text.push_str(damage);
    }
    let summary = json!({"files": found.files, "bytes": found.bytes, "damages": found.damages});
    print(json, &summary, &text)?;
    Ok(if found.damages.is_empty() { Verdict::Good } else { Verdict::Bad })
}

fn delete(args: Backups, mut ids: Vec<u32>) -> Result<Verdict, Failure> {
    let Backups { backups, json } = args;
    ids.sort_unstable();
    ids.dedup();
    let wanted = ids.clone();
    let freed = on_core(reactor::DriverKind::Auto, async move |core| {
        let freed = BackupDir::new(&core, &backups).delete(&wanted).await;
        freed.map_err(|error| failure(backups, &error))
    })?;
    say_deleted(json, &ids, freed)
}

fn purge(args: Backups, keep: usize) -> Result<Verdict, Failure> {
    let Backups { backups, json } = args;
    let (ids, freed) = on_core(reactor::DriverKind::Auto, async move |core| {
        let purged = BackupDir::new(&core, &backups).purge(keep).await;
        purged.map_err(|error| failure(backups, &error))
    })?;
    say_deleted(json, &ids, freed)
}

fn say_deleted(json: bool, ids: &[u32], freed: u64) -> Result<Verdict, Failure> {
    let text = format!("deleted {} backups, which freed {}", ids.len(), Size(freed));
    print(json, &json!({"deleted": ids, "freed_bytes": freed}), &text)?;
    Ok(Verdict::Good)
}

/// `kv restore`.
pub fn restore(args: RestoreArgs) -> Result<Verdict, Failure> {
    let RestoreArgs { backups: Backups { backups, json }, data, id, copying } = args;
    let to = new_directory(&data)?;
    refuse_nested(&backups, &to)?;
    let (restored, took) =
        transferred(backups, &copying, "restoring", async move |backups, transfer| {
            backups.restore(id, &to, transfer).await
        })?;
    let RestoredBackup { id, sequence, files, bytes, kept_bytes } = restored;
    let text = format!(
        "restored backup {id} into {}: {} files, {}, in {:.1} s",
        data.display(),
        thousands(files),
        Size(bytes),
        took.as_secs_f64()
    );
    let summary = json!({
        "id": id,
        "directory": data,
        "sequence": sequence,
        "files": files,
        "bytes": bytes,
        "kept_bytes": kept_bytes,
        "seconds": took.as_secs_f64(),
    });
    print(json, &summary, &text)?;
    Ok(Verdict::Good)
}

pub fn print(json: bool, summary: &Value, text: &str) -> Result<(), Failure> {
    let mut out = Out::new();
    match json {
        true => out.json(summary)?,
        false => out.line(text)?,
    }
    Ok(out.flush()?)
}

pub fn show(bar: &ProgressBar, done: u64, total: u64) {
    bar.set_length(total.max(done));
    bar.set_position(done);
}

/// Opens a closed directory for a command that can also ask a running node. Suspends for the disk.
pub(super) async fn open_closed<T>(
    core: &Core,
    data: &Path,
    write: WriteOptions,
    agrees: impl AsyncFn(&Db) -> lsm::Result<T>,
) -> Result<(Db, Writer, T), Failure> {
    let options = OpenOptions { cache_bytes: POOL_BYTES / 4, ..OpenOptions::default() };
    node::open_for_writing(core, data, options, write, agrees).await.map_err(|error| {
        let is_locked = error.kind() == node::Kind::Locked;
        let failure: Failure = error.into();
        match is_locked {
            true => failure.hint("if it is a node, leave out --data, and name it with --state"),
            false => failure,
        }
    })
}
