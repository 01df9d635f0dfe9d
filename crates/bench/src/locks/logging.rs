//! Logging lines: through the rings of the log, and through a logger under a mutex.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use node::{Error, Kind};
use reactor::log::{Filter, Format, Log, LogFile, direct};
use tracing::level_filters::LevelFilter;

use super::bursts::{Sums, bursts};

/// How long the log's writer may take for a burst.
const PATIENCE: Duration = Duration::from_secs(10);

/// A line as a node logs it.
fn log_a_line(operation: u64) {
    tracing::info!(shard = 3, bytes = operation, "a memtable was written to a table");
}

/// A file for lines, removed on drop.
struct TempLog(PathBuf);

impl TempLog {
    fn new() -> TempLog {
        TempLog(std::env::temp_dir().join(format!("millrace-bench-log-{}", std::process::id())))
    }

    fn open(&self) -> Result<Box<LogFile>, Error> {
        let failed = |e| Error::new(Kind::System, format!("cannot open {}: {e}", self.0.display()));
        LogFile::open(&self.0).map(Box::new).map_err(failed)
    }
}

impl Drop for TempLog {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Bursts of lines through the rings of the log.
pub fn through_rings(threads: usize, length: Duration) -> Result<Sums, Error> {
    let file = TempLog::new();
    let filter = Filter::level(LevelFilter::INFO);
    let (log, _writer) = Log::start(Format::Text, filter, file.open()?)
        .map_err(|error| Error::new(Kind::System, format!("cannot start the log: {error}")))?;
    let written = AtomicBool::new(true);
    let settle = |_| {
        if !log.flush(PATIENCE) {
            written.store(false, Ordering::Relaxed);
        }
    };
    let sums = bursts(threads, length, || log.enter(None), |_, nth| log_a_line(nth), settle);
    match (log.dropped(), written.into_inner()) {
        (0, true) => Ok(sums),
        (dropped, _) => {
            let what = format!("the log did not keep up: {dropped} lines were dropped");
            Err(Error::new(Kind::System, what))
        }
    }
}

/// Bursts of lines through a logger under a mutex.
pub fn through_lock(threads: usize, length: Duration) -> Result<Sums, Error> {
    let file = TempLog::new();
    let log = direct(Format::Text, Filter::level(LevelFilter::INFO), file.open()?);
    let enter = || tracing::dispatcher::set_default(&log);
    Ok(bursts(threads, length, enter, |_, nth| log_a_line(nth), |_| ()))
}
