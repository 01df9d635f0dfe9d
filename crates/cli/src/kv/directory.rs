//! The `kv` commands on a directory: a core of this process reads it.

use std::path::PathBuf;

use lsm::{CfId, Db, IterOptions, OpenOptions};
use reactor::Core;

use super::listing::{Listed, Listing, Printer};
use super::print::value;
use crate::args::{Entries, Source};
use crate::failure::{Failure, Verdict};
use crate::output::{Out, progress_bar};
use crate::style::Style;
use crate::tool_core::{POOL_BYTES, on_core};

/// Entries between two checkpoints at which other tasks can run.
const RUN: u64 = 256;

/// A database that a command has opened, on its core.
struct Opened {
    core: Core,
    db: Db,
    path: PathBuf,
}

impl Opened {
    /// The column family with this name; the default one without a name.
    fn family(&self, name: Option<&str>) -> Result<CfId, Failure> {
        let family = self.db.column_family(name.unwrap_or("default"));
        family.map_err(|error| self.explain(&error))
    }

    fn explain(&self, error: &lsm::Error) -> Failure {
        node::explain(&self.path, error).into()
    }
}

async fn open(core: Core, source: &Source) -> Result<Opened, Failure> {
    let path = source.location.data.clone().expect("the parser requires a place");
    let options = OpenOptions {
        secondary: source.secondary,
        salvage: source.salvage,
        cache_bytes: POOL_BYTES / 4,
        ..OpenOptions::default()
    };
    let db = node::open(&core, &path, options).await?;
    Ok(Opened { core, db, path })
}

/// `kv get --data`.
pub fn get(key: Vec<u8>, source: Source, entries: Entries) -> Result<Verdict, Failure> {
    let io = source.io;
    on_core(io, async move |core| {
        let opened = open(core, &source).await?;
        let family = opened.family(entries.column_family.as_deref())?;
        let reader = opened.db.attach(&opened.core);
        let found = reader.get(family, &key, None).await.map_err(|error| opened.explain(&error))?;
        let mut out = Out::new();
        value(&mut out, Style::new(source.json, entries.hex), &key, found.as_deref())?;
        out.flush()?;
        Ok(if found.is_some() { Verdict::Good } else { Verdict::Bad })
    })
}

/// `kv scan --data` and `kv export --data`.
pub fn list(listing: Listing, source: Source) -> Result<Listed, Failure> {
    let io = source.io;
    on_core(io, async move |core| {
        let Listing { range, .. } = listing.clone();
        let opened = open(core, &source).await?;
        let family = opened.family(listing.column_family.as_deref())?;
        let reader = opened.db.attach(&opened.core);
        let keys = reader.approximate_keys(family).unwrap_or(0);
        let mut printer = Printer::new(&listing, keys)?;
        let options = IterOptions {
            lower: range.from,
            upper: range.to,
            expected: range.limit.and_then(|limit| usize::try_from(limit).ok()),
            expected_backward: range.reverse,
            ..IterOptions::default()
        };
        let walk = async {
            let mut iter = reader.iter(family, options)?;
            if range.reverse {
                iter.seek_to_last().await?;
            } else {
                iter.seek_to_first().await?;
            }
            while iter.valid() && range.limit.is_none_or(|limit| printer.listed.entries < limit) {
                if let Err(stop) = printer.entry(iter.key(), iter.value()) {
                    return Ok(Err(stop));
                }
                if printer.listed.entries % RUN == 0 {
                    opened.core.checkpoint().await;
                }
                if range.reverse {
                    iter.prev().await?;
                } else {
                    iter.next().await?;
                }
            }
            Ok(Ok(()))
        };
        let walked = walk.await;
        // Entries read before damage are printed before the error.
        if !matches!(walked, Ok(Err(_))) {
            printer.flush()?;
        }
        walked
            .map_err(|error: lsm::Error| opened.explain(&error))?
            .map_err(|stop| listing.stopped(stop))?;
        Ok(printer.finish())
    })
}

/// `kv stat --data`.
pub fn stat(source: Source) -> Result<Verdict, Failure> {
    let io = source.io;
    on_core(io, async move |core| {
        let opened = open(core, &source).await?;
        let stat = opened.db.stat();
        let mut out = Out::new();
        if source.json {
            out.json(&super::stat::json(&opened.path, &stat))?;
        } else {
            out.bytes(super::stat::text(&opened.path, &stat).as_bytes())?;
        }
        out.flush()?;
        Ok(Verdict::Good)
    })
}

/// `kv check --data`.
pub fn check(source: Source) -> Result<Verdict, Failure> {
    let io = source.io;
    on_core(io, async move |core| {
        let path = source.location.data.clone().expect("the parser requires a place");
        let options = OpenOptions { secondary: source.secondary, ..OpenOptions::default() };
        let bar = progress_bar("checking");
        let report = lsm::check(&core, &path, &options, |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        })
        .await;
        bar.finish_and_clear();
        let report = report.map_err(|error| node::explain(&path, &error))?;
        let mut out = Out::new();
        if source.json {
            out.json(&super::report::json(&report))?;
        } else {
            out.bytes(super::report::text(&path, &report).as_bytes())?;
        }
        out.flush()?;
        Ok(if report.damages.is_empty() { Verdict::Good } else { Verdict::Bad })
    })
}
