//! `kv compact`: this process compacts a directory; a running node compacts its own.

use std::cell::Cell;
use std::io::Write as _;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::time::Instant;

use ::kv::Shard;
use indicatif::ProgressBar;
use lsm::{CfId, CompactionWatch, Db, WriteOptions};
use node::{Request, Size};
use reactor::{Class, Core, timeout};
use serde_json::{Value, json};

use super::copies::{failure, open_closed, print, show};
use super::key_argument;
use crate::admin::Admin;
use crate::answer::number;
use crate::args::CompactArgs;
use crate::failure::{Failure, Verdict};
use crate::output::{hex, progress_bar, thousands};
use crate::tool_core::on_cores;

/// The time between two steps of the progress bar.
const STEP_NS: u64 = 200_000_000;

/// A range of keys.
#[derive(Clone)]
struct Range {
    from: Option<Vec<u8>>,
    to: Option<Vec<u8>>,
}

/// Runs the command.
#[expect(clippy::disallowed_methods, reason = "a tool reports how long it took")]
pub fn run(args: CompactArgs) -> Result<Verdict, Failure> {
    let (begun, as_json) = (Instant::now(), args.node.json);
    let bound = |key: &Option<_>, name| {
        key.clone().map(|key| key_argument(key, name, args.hex)).transpose()
    };
    let range = Range { from: bound(&args.from, "--from")?, to: bound(&args.to, "--to")? };
    let cores = args.cores.map_or(usize::MAX, |cores| cores.get());
    let mut done = on_cores(args.io, cores, async move |core| {
        let interrupted = Rc::new(Cell::new(false));
        let (flag, signals) = (interrupted.clone(), core.clone());
        core.spawn(Class::Control, async move {
            // Without a descriptor for signals, only SIGKILL ends this program.
            flag.set(reactor::signal(&signals).await.is_ok());
        });
        match &args.data {
            None => in_node(&core, &args, &range, &interrupted).await,
            Some(data) => in_directory(&core, data, &args, &range, &interrupted).await,
        }
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    done["seconds"] = seconds.into();
    let text = format!(
        "merged {} into {} in {} merges, moved {} files, in {seconds:.1} s",
        Size(number(&done, "read_bytes")),
        Size(number(&done, "written_bytes")),
        thousands(number(&done, "merges")),
        thousands(number(&done, "moved_files")),
    );
    if done["cancelled"] == true {
        print(as_json, &done, &format!("cancelled: {text}"))?;
        return Err(Failure::new("the compaction was cancelled; what is merged stays merged"));
    }
    print(as_json, &done, &text)?;
    Ok(Verdict::Good)
}

fn summary(answer: &Value) -> Value {
    let fields = ["merges", "moved_files", "read_bytes", "written_bytes", "cancelled"];
    fields.iter().map(|&field| (field.to_owned(), answer[field].clone())).collect()
}

async fn in_node(
    core: &Core,
    args: &CompactArgs,
    range: &Range,
    interrupted: &Cell<bool>,
) -> Result<Value, Failure> {
    let mut admin = Admin::connect(&args.node)?;
    let begun = admin.call(&Request::CompactBegin {
        column_family: args.column_family.clone(),
        from: range.from.as_deref().map(hex),
        to: range.to.as_deref().map(hex),
    })?;
    let id = number(&begun, "id");
    let (bar, mut said) = (progress_bar("compacting"), false);
    loop {
        let state = admin.call(&Request::CompactState { id });
        let state = state.map_err(|failure| failure.during("the compaction"))?;
        if state["ended"] == true {
            bar.finish_and_clear();
            return Ok(summary(&state));
        }
        if state["paused"] == true && !said {
            said = true;
            let what = "millrace: merges are paused: the compaction goes on after a resume";
            bar.suspend(|| writeln!(std::io::stderr(), "{what}")).ok();
        }
        show_part(&bar, (number(&state, "done_bytes"), number(&state, "total_bytes")));
        if interrupted.take() {
            let cancelled = admin.call(&Request::CompactCancel { id });
            cancelled.map_err(|failure| failure.during("the compaction"))?;
        }
        core.sleep_ns(STEP_NS).await;
    }
}

/// Bytes are not known before the first merge.
fn show_part(bar: &ProgressBar, (done, total): (u64, u64)) {
    if total > 0 {
        show(bar, done, total);
    }
}

async fn in_directory(
    core: &Core,
    data: &Path,
    args: &CompactArgs,
    range: &Range,
    interrupted: &Cell<bool>,
) -> Result<Value, Failure> {
    let write = WriteOptions { create: false, adopt: args.adopt, ..WriteOptions::default() };
    let agrees = async |db: &Db| {
        let (from, to) = (range.from.as_deref(), range.to.as_deref());
        db.may_compact(&args.column_family, from, to)
    };
    let (db, writer, family) = open_closed(core, data, write, agrees).await?;
    let shard = Shard::new(core, db.attach(core), writer);
    let done = compacted(core, &shard, family, range, interrupted).await;
    let closed = shard.close().await;
    let done = done?;
    closed.map_err(|error| node::explain(data, &error))?;
    Ok(done)
}

async fn compacted(
    core: &Core,
    shard: &Shard,
    family: CfId,
    range: &Range,
    interrupted: &Cell<bool>,
) -> Result<Value, Failure> {
    let (bar, watch) = (progress_bar("compacting"), CompactionWatch::default());
    let bounds = (range.from.as_deref(), range.to.as_deref());
    let mut work = pin!(shard.compact(family, bounds, &watch));
    let done = loop {
        match timeout(core, STEP_NS, work.as_mut()).await {
            Ok(done) => break done,
            Err(_) if interrupted.take() => shard.cancel_compaction(&watch),
            Err(_) => show_part(&bar, watch.progress()),
        }
    };
    bar.finish_and_clear();
    let done = done.map_err(|error| {
        let failed = failure(shard.path().to_owned(), &error);
        match error.kind() {
            lsm::Kind::Memory => failed
                .hint("a node with more --memory can compact it: millrace serve --memory SIZE"),
            _ => failed,
        }
    })?;
    Ok(json!({
        "merges": done.merges,
        "moved_files": done.moved_files,
        "read_bytes": done.bytes,
        "written_bytes": done.into_bytes,
        "cancelled": done.cancelled,
    }))
}
