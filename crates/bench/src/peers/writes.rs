//! Programs that write: each alone, in a directory of its own on the database's disk.
//!
//! Before a program starts, `sync` writes the dirty pages of the others to the disk, so that no
//! program pays for them; the page cache is left as it is.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::Setup;
use super::bases::Base;
use super::ours::report;
use super::release;
use super::row::Round;
use super::sample::Sample;
use super::search::Knob;
use super::tool::{Background, Tool, files_ending, make_dir};

/// Name of the directory beside the database.
const DIRECTORY: &str = "millrace-bench-writes";
/// Bytes of the log that is replayed after a kill.
const LOG_BYTES: u64 = 1 << 30;
/// The pause between two looks at the growing log.
const POLL: std::time::Duration = std::time::Duration::from_millis(10);

/// A part of the rate of another measurement of the same round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// The other measurement.
    pub of: &'static str,
    /// The part, from 0 to 1.
    pub share: f64,
}

impl Load {
    /// Operations per second, as a flag's value.
    fn rate(self, round: &Round) -> Result<String, String> {
        let most = round.ops(self.of).ok_or("the maximum was not measured")?;
        Ok((most * self.share).to_string())
    }
}

/// One measurement.
#[derive(Clone, Debug)]
pub enum Write {
    /// A case of ours.
    Ours {
        /// The measurement's name.
        name: &'static str,
        /// The case and its flags.
        flags: Vec<String>,
        /// The database to write to a copy of; otherwise the directory is empty.
        copy: Option<Base>,
        /// The load; without it, as fast as possible.
        load: Option<Load>,
    },
    /// RocksDB's release, at its best settings.
    Release {
        /// The measurement's name.
        name: &'static str,
        /// The case and its flags.
        flags: Vec<String>,
        /// The settings to search.
        knobs: &'static [Knob],
        /// The database to write to a copy of; otherwise the directory is empty.
        copy: Option<Base>,
        /// The load, with the settings of the measurement it is a part of.
        load: Option<Load>,
    },
    /// Opening a database of ours whose writer was killed.
    Reopen,
    /// Our mailbox and a lock.
    Locks,
}

/// The name of [`Write::Reopen`].
pub const REOPEN: &str = "millrace reopen";

/// The name of [`Write::Locks`].
pub const LOCKS: &str = "millrace locks";

/// The number of writes where they need not be durable: three quarters of the keys. With four
/// million keys that is 3 GB, with many flushes and compactions.
pub fn num_process(setup: &Setup) -> u64 {
    (setup.keys * 3 / 4).max(1)
}

/// The number of writes where each is flushed: a tenth of that, which is still several memtables.
pub fn num_power(setup: &Setup) -> u64 {
    (num_process(setup) / 10).max(1)
}

impl Write {
    /// The measurement that this one's load is a part of.
    pub fn needs(&self) -> Option<&'static str> {
        match self {
            Write::Ours { load, .. } | Write::Release { load, .. } => load.map(|load| load.of),
            _ => None,
        }
    }

    /// The measurement's name.
    pub fn name(&self) -> &'static str {
        match self {
            Write::Ours { name, .. } | Write::Release { name, .. } => name,
            Write::Reopen => REOPEN,
            Write::Locks => LOCKS,
        }
    }

    /// Measures. `round` has this round's earlier measurements.
    pub fn run(&self, setup: &Setup, round: &Round) -> Result<Sample, String> {
        match self {
            Write::Ours { flags, copy, load, .. } => {
                let dir = WriteDir::new(setup, *copy)?;
                let mut tool = ours(setup, flags, &dir);
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
                    let dir = WriteDir::new(setup, *copy)?;
                    release::run(setup, &dir.0, &flags, chosen)
                };
                run(&setup.searches.best(load.map_or(*name, |load| load.of), knobs, run)?)
            }
            Write::Reopen => reopen(setup),
            Write::Locks => locks(setup),
        }
    }
}

/// A case of ours on all processors of the run, which a peer's threads use, too.
fn ours(setup: &Setup, flags: &[String], dir: &WriteDir) -> Tool {
    let cores = match setup.other {
        Some(other) => format!("{},{other}", setup.processor),
        None => format!("{0}-{0}", setup.processor),
    };
    Tool::new(&setup.millrace)
        .arg("bench")
        .args(flags.iter().cloned())
        .arg("--data")
        .arg(&dir.0)
        .args(["--cores".to_owned(), cores, "--json".to_owned()])
        .args(["--seconds".to_owned(), setup.seconds.to_string()])
}

/// Kills a writer when its log has 1 GiB, and opens its database.
#[expect(clippy::disallowed_methods, reason = "waits for another program, on no core")]
fn reopen(setup: &Setup) -> Result<Sample, String> {
    let dir = WriteDir::new(setup, None)?;
    // With a memtable that is never full everything stays in the log.
    let flags = |case: &str| {
        [case, "--durability", "process", "--memtable", "64G", "--keys"]
            .map(str::to_owned)
            .into_iter()
            .chain([setup.keys.to_string()])
            .collect::<Vec<_>>()
    };
    let mut writer: Background =
        ours(setup, &flags("fillrandom"), &dir).args(["--num", "1000000000"]).start()?;
    let bytes = loop {
        let logs = files_ending(&dir.0, ".log")?;
        let bytes: u64 = logs.iter().filter_map(|log| log.metadata().ok()).map(|m| m.len()).sum();
        if bytes >= LOG_BYTES {
            break bytes;
        }
        writer.check()?;
        std::thread::sleep(POLL);
    };
    // SIGKILL.
    drop(writer);
    let opened = report(ours(setup, &flags("overwrite"), &dir).args(["--num", "1"]))?;
    let mut report = opened.report;
    report["log_bytes"] = json!(bytes);
    Ok(Sample { report, ..opened })
}

/// Measures locks: the shard's core is on the first processor, the threads are on any.
fn locks(setup: &Setup) -> Result<Sample, String> {
    let tool = Tool::new(&setup.millrace)
        .args(["bench", "locks", "--json", "--cores"])
        .arg(format!("{0}-{0}", setup.processor))
        .args(["--seconds".to_owned(), setup.seconds.to_string()]);
    let command = tool.line();
    let report: Value = serde_json::from_str(tool.output()?.trim())
        .map_err(|error| format!("the report of {command} is not JSON: {error}"))?;
    let most = report["hand_over"]
        .as_array()
        .and_then(|lines| lines.last()?["ops_per_second"].as_f64())
        .ok_or_else(|| format!("the report has no rate: {report}"))?;
    Ok(Sample { ops_per_second: most, command, report, ..Sample::default() })
}

/// A directory for one program to write to; removed on drop.
pub struct WriteDir(pub PathBuf);

impl WriteDir {
    /// An empty directory, or one with a copy of a database.
    pub fn new(setup: &Setup, copy: Option<Base>) -> Result<WriteDir, String> {
        let beside = setup.data.parent().filter(|dir| !dir.as_os_str().is_empty());
        let dir = beside.unwrap_or(Path::new(".")).join(DIRECTORY);
        let dir = WriteDir(dir);
        dir.remove();
        make_dir(&dir.0)?;
        if let Some(base) = copy {
            dir.copy_from(&base.dir(setup)?)?;
        }
        Tool::new("sync").output()?;
        Ok(dir)
    }

    /// Links the tables, which never change, and copies the other files.
    fn copy_from(&self, database: &Path) -> Result<(), String> {
        for file in files_ending(database, "")? {
            let Some(name) = file.file_name() else { continue };
            let (to, table) = (self.0.join(name), file.extension().is_some_and(|e| e == "sst"));
            if !file.is_file() || (table && std::fs::hard_link(&file, &to).is_ok()) {
                continue;
            }
            std::fs::copy(&file, &to)
                .map_err(|error| format!("cannot copy {}: {error}", file.display()))?;
        }
        Ok(())
    }

    fn remove(&self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Drop for WriteDir {
    fn drop(&mut self) {
        self.remove();
    }
}
