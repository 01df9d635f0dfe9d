//! Programs that write: each alone, in a directory of its own on the disk that has the database.
//!
//! Before a program starts, what others have written is on the disk (`sync`), so that nobody pays
//! for another's pages; the page cache is left as it is.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::Setup;
use super::bases::Base;
use super::ours::report;
use super::release;
use super::row::Round;
use super::sample::Sample;
use super::search::Knob;
use super::tool::{Background, Tool, files_ending};

/// Name of the directory beside the database.
const DIRECTORY: &str = "millrace-bench-writes";
/// Of the log that is replayed after a kill.
const LOG_BYTES: u64 = 1 << 30;
/// How often a growing log is looked at.
const LOOK: std::time::Duration = std::time::Duration::from_millis(10);

/// A part of the rate that a sample of the same round had.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// The sample's name.
    pub of: &'static str,
    /// The part, from 0 to 1.
    pub share: f64,
}

impl Load {
    /// Operations per second.
    fn rate(self, round: &Round) -> Result<String, String> {
        let most = round.ops(self.of).ok_or("the maximum was not measured")?;
        Ok((most * self.share).to_string())
    }
}

/// One thing to measure.
#[derive(Clone, Debug)]
pub enum Write {
    /// A case of ours, in an empty directory or a copy of the database.
    Ours {
        /// Its name in rows and results.
        name: &'static str,
        /// The case and its flags.
        flags: Vec<String>,
        /// In a copy of this database.
        copy: Option<Base>,
        /// At a part of the rate of another sample.
        load: Option<Load>,
    },
    /// RocksDB's release, likewise, at the best of its settings.
    Release {
        /// Its name in rows and results.
        name: &'static str,
        /// The case and its flags.
        flags: Vec<String>,
        /// What may be set.
        knobs: &'static [Knob],
        /// In a copy of this database.
        copy: Option<Base>,
        /// At a part of the rate of another sample, with its settings.
        load: Option<Load>,
    },
    /// Opening a database of ours whose writer was killed.
    Reopen,
    /// Our mailbox beside a lock.
    Locks,
}

/// What [`Write::Reopen`] is called.
pub const REOPEN: &str = "millrace reopen";

/// What [`Write::Locks`] is called.
pub const LOCKS: &str = "millrace locks";

/// Writes of a case that need not be durable: three quarters of the keys, so that a database of
/// four million gives 3 GB, many flushes and merges.
pub fn num_process(setup: &Setup) -> u64 {
    (setup.keys * 3 / 4).max(1)
}

/// Writes of a case that flushes each: a tenth of that, still several memtables.
pub fn num_power(setup: &Setup) -> u64 {
    (num_process(setup) / 10).max(1)
}

impl Write {
    /// Its name in rows and results.
    pub fn name(&self) -> &str {
        match self {
            Write::Ours { name, .. } | Write::Release { name, .. } => name,
            Write::Reopen => REOPEN,
            Write::Locks => LOCKS,
        }
    }

    /// Measures. What was measured before in this round is at hand.
    pub fn run(&self, setup: &Setup, round: &Round) -> Result<Sample, String> {
        match self {
            Write::Ours { flags, copy, load, .. } => {
                let place = Place::new(setup, *copy)?;
                let mut tool = ours(setup, flags, &place);
                if let Some(load) = load {
                    tool = tool.arg("--rate").arg(load.rate(round)?);
                }
                report(tool)
            }
            Write::Release { name, flags, knobs, copy, load } => {
                let mut flags = flags.clone();
                if let Some(load) = load {
                    flags.extend(["--rate".to_owned(), load.rate(round)?]);
                }
                let run = |chosen: &[&str]| {
                    let place = Place::new(setup, *copy)?;
                    release::run(setup, &place.0, &flags, chosen)
                };
                run(&setup.found.best(load.map_or(*name, |load| load.of), knobs, run)?)
            }
            Write::Reopen => reopen(setup),
            Write::Locks => locks(setup),
        }
    }
}

/// A case of ours on all processors there are to be, as a peer's threads have them.
fn ours(setup: &Setup, flags: &[String], place: &Place) -> Tool {
    let cores = match setup.other {
        Some(other) => format!("{},{other}", setup.processor),
        None => format!("{0}-{0}", setup.processor),
    };
    Tool::new(&setup.millrace)
        .arg("bench")
        .args(flags.iter().cloned())
        .arg("--data")
        .arg(&place.0)
        .args(["--cores".to_owned(), cores, "--json".to_owned()])
        .args(["--seconds".to_owned(), setup.seconds.to_string()])
}

/// Kills a writer when its log has 1 GiB, and opens what it left.
#[expect(clippy::disallowed_methods, reason = "waits for another program, on no core")]
fn reopen(setup: &Setup) -> Result<Sample, String> {
    let place = Place::new(setup, None)?;
    // A memtable that is never full: everything stays in the log.
    let flags = |case: &str| {
        [case, "--durability", "process", "--memtable", "64G", "--keys"]
            .map(str::to_owned)
            .into_iter()
            .chain([setup.keys.to_string()])
            .collect::<Vec<_>>()
    };
    let mut writer: Background =
        ours(setup, &flags("fillrandom"), &place).args(["--num", "1000000000"]).start()?;
    let bytes = loop {
        let logs = files_ending(&place.0, ".log")?;
        let bytes: u64 = logs.iter().filter_map(|log| log.metadata().ok()).map(|m| m.len()).sum();
        if bytes >= LOG_BYTES {
            break bytes;
        }
        writer.check()?;
        std::thread::sleep(LOOK);
    };
    // SIGKILL.
    drop(writer);
    let opened = report(ours(setup, &flags("overwrite"), &place).args(["--num", "1"]))?;
    let mut report = opened.report;
    report["log_bytes"] = json!(bytes);
    Ok(Sample { report, ..opened })
}

/// The core of the shard is on the first processor, the threads are where the kernel puts them.
fn locks(setup: &Setup) -> Result<Sample, String> {
    let tool = Tool::new(&setup.millrace)
        .args(["bench", "locks", "--json", "--cores"])
        .arg(format!("{0}-{0}", setup.processor))
        .args(["--seconds".to_owned(), setup.seconds.to_string()]);
    let command = tool.line();
    let report: Value = serde_json::from_str(tool.output()?.trim())
        .map_err(|error| format!("the report of {command} is no JSON: {error}"))?;
    let most = report["hand_over"]
        .as_array()
        .and_then(|lines| lines.last()?["ops_per_second"].as_f64())
        .ok_or_else(|| format!("strange report: {report}"))?;
    Ok(Sample { ops_per_second: most, command, report, ..Sample::default() })
}

/// A directory for one program to write in; removed at the end.
pub struct Place(pub PathBuf);

impl Place {
    /// An empty one, or one with a copy of the database.
    pub fn new(setup: &Setup, copy: Option<Base>) -> Result<Place, String> {
        let beside = setup.data.parent().filter(|dir| !dir.as_os_str().is_empty());
        let dir = beside.unwrap_or(Path::new(".")).join(DIRECTORY);
        let place = Place(dir);
        place.remove();
        std::fs::create_dir_all(&place.0)
            .map_err(|error| format!("making {}: {error}", place.0.display()))?;
        if let Some(base) = copy {
            place.copy_from(&base.dir(setup)?)?;
        }
        Tool::new("sync").output()?;
        Ok(place)
    }

    /// Tables never change, so both directories may have them; the rest is copied.
    fn copy_from(&self, database: &Path) -> Result<(), String> {
        for file in files_ending(database, "")? {
            let Some(name) = file.file_name() else { continue };
            let (to, table) = (self.0.join(name), file.extension().is_some_and(|e| e == "sst"));
            if !file.is_file() || (table && std::fs::hard_link(&file, &to).is_ok()) {
                continue;
            }
            std::fs::copy(&file, &to)
                .map_err(|error| format!("copying {}: {error}", file.display()))?;
        }
        Ok(())
    }

    fn remove(&self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.remove();
    }
}
