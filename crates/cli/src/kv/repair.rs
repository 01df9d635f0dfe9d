//! `kv check --repair`.

use std::fmt::Write as _;
use std::path::Path;

use lsm::{Loss, OpenOptions, RepairReport};
use node::Size;
use serde_json::{Value, json};

use super::copies::{print, show};
use crate::args::Source;
use crate::failure::{Failure, Verdict};
use crate::output::{hex, progress_bar, thousands};
use crate::tool_core::on_core;

/// Runs the command.
pub fn run(source: Source, dry_run: bool) -> Result<Verdict, Failure> {
    let io = source.io;
    on_core(io, async move |core| {
        let path = source.location.data.clone().expect("the parser requires a place");
        let bar = progress_bar("reading");
        let options = OpenOptions::default();
        let report = lsm::repair(&core, &path, &options, dry_run, |done, total| {
            show(&bar, done, total);
        });
        let report = report.await;
        bar.finish_and_clear();
        let report = report.map_err(|error| node::explain(&path, &error))?;
        let summary = summary(&report, dry_run);
        print(source.json, &summary, text(&path, &report, dry_run).trim_end())?;
        let is_whole = report.lost.is_empty() && report.damages.is_empty();
        Ok(if is_whole { Verdict::Good } else { Verdict::Bad })
    })
}

fn summary(report: &RepairReport, dry_run: bool) -> Value {
    let loss = |loss: &Loss| {
        let keys = loss.keys.as_ref();
        json!({
            "file": loss.file,
            "what": loss.what,
            "column_family": loss.column_family,
            "smallest_hex": keys.map(|keys| hex(&keys.0)),
            "largest_hex": keys.map(|keys| hex(&keys.1)),
            "entries": loss.entries,
        })
    };
    let damages = report.damages.iter();
    json!({
        "repaired": report.needed && !dry_run,
        "needed": report.needed,
        "rebuilt": report.rebuilt,
        "tables": report.tables,
        "merged_bytes": report.merged_bytes,
        "logs": report.logs,
        "lost": report.lost.iter().map(loss).collect::<Vec<_>>(),
        "damages": damages
            .map(|d| json!({ "file": d.file, "offset": d.offset, "what": d.what }))
            .collect::<Vec<_>>(),
        "warnings": report.warnings,
    })
}

fn text(path: &Path, report: &RepairReport, dry_run: bool) -> String {
    let mut out = String::new();
    if let Some(why) = &report.rebuilt {
        let _ = writeln!(out, "no MANIFEST can be used ({why}): it is rebuilt from the tables");
    }
    for loss in &report.lost {
        let _ = write!(
            out,
            "lost: {}: {}",
            loss.file,
            loss.what.trim_start_matches(&format!("{}: ", loss.file))
        );
        if let Some(family) = &loss.column_family {
            let _ = write!(out, "; column family {family}");
        }
        if let Some((first, last)) = &loss.keys {
            let _ = write!(out, "; keys from {} to {}", key(first), key(last));
        }
        if let Some(entries) = loss.entries {
            let _ = write!(out, "; {} values", thousands(entries));
        }
        out.push('\n');
    }
    for damage in &report.damages {
        let _ = writeln!(out, "stays damaged: {}", damage.what);
    }
    for warning in &report.warnings {
        let _ = writeln!(out, "warning: {warning}");
    }
    let verdict = match (report.needed, dry_run) {
        (false, _) => "nothing to repair",
        (true, true) => "to be repaired",
        (true, false) => "repaired",
    };
    let _ = write!(out, "{}: {verdict}: {} tables", path.display(), thousands(report.tables));
    if report.merged_bytes > 0 {
        let _ =
            write!(out, "; {} of tables without an order are merged", Size(report.merged_bytes));
    }
    if report.logs > 0 {
        let _ = write!(out, "; {} write-ahead logs become tables", thousands(report.logs));
    }
    if report.needed && !dry_run {
        let _ = write!(out, "; what was dropped is in {}", path.join("lost").display());
    }
    out.push('\n');
    out
}

/// A key for people.
fn key(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        Ok(text) if !text.chars().any(char::is_control) => format!("{text:?}"),
        _ => format!("0x{}", hex(key)),
    }
}
