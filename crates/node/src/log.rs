//! Where the log of a process goes.
//!
//! A service has a ring per core and a writer thread ([`reactor::log`]). A tool's lines go to
//! standard error immediately, in order with its other messages. A panic is logged too, and the
//! queue is written before the thread unwinds.

use std::path::PathBuf;
use std::time::Duration;

use reactor::log::{Filter, Format, Log, LogFile, NextFile, Sink, Writer, direct};
use tracing::level_filters::LevelFilter;

use crate::error::{Error, Kind};

/// The environment variable that sets the log level if no flag does.
pub const LOG_VARIABLE: &str = "MILLRACE_LOG";

/// How long a process that ends immediately waits for its log.
pub(crate) const LOG_PATIENCE: Duration = Duration::from_millis(100);
/// How long a panic waits for the log.
const PATIENCE: Duration = Duration::from_secs(1);

/// The log of a service.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// Which events.
    pub level: Filter,
    /// The format of the lines.
    pub format: Format,
    /// The file; `None` is standard error.
    pub file: Option<PathBuf>,
}

impl Default for LogConfig {
    fn default() -> LogConfig {
        LogConfig { level: Filter::level(LevelFilter::INFO), format: Format::Text, file: None }
    }
}

/// Opens the log of a service. A process that will be confined receives later files through `next`.
///
/// # Errors
/// When the file cannot be opened.
pub(crate) fn open(config: &LogConfig, next: Option<NextFile>) -> Result<Sink, Error> {
    let Some(path) = &config.file else { return Ok(Box::new(std::io::stderr())) };
    let file = match next {
        None => LogFile::open(path),
        Some(next) => LogFile::open_once(path, next),
    };
    let file = file.map_err(|error| {
        Error::new(Kind::Usage, format!("cannot open the log file {}: {error}", path.display()))
            .hint("name another with --log-file, or omit it to log to standard error")
    })?;
    Ok(Box::new(file))
}

/// Starts a service's log, for all threads. Dropping the writer writes the queued lines.
///
/// # Errors
/// When the thread cannot be started.
pub(crate) fn start(config: &LogConfig, sink: Sink) -> Result<(Log, Writer), Error> {
    let (log, writer) = Log::start(config.format, config.level.clone(), sink)
        .map_err(|error| Error::new(Kind::System, format!("cannot start the log: {error}")))?;
    // If a log is already installed, it stays.
    log.install();
    log_panics(log.clone());
    Ok((log, writer))
}

/// Sends a tool's log to standard error: warnings, or the level in `MILLRACE_LOG`.
///
/// # Errors
/// When the variable is invalid.
pub fn start_tool_log() -> Result<(), Error> {
    let level = match std::env::var(LOG_VARIABLE) {
        Ok(text) => text
            .parse()
            .map_err(|error| Error::new(Kind::Usage, format!("{LOG_VARIABLE}: {error}")))?,
        Err(_) => Filter::level(LevelFilter::WARN),
    };
    let log = direct(Format::Tool, level, Box::new(std::io::stderr()));
    let _ = tracing::dispatcher::set_global_default(log);
    Ok(())
}

/// Logs panics, and then calls the previous hook.
fn log_panics(log: Log) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let thread = std::thread::current();
        let place = info.location().map(ToString::to_string);
        tracing::error!(
            thread = thread.name().unwrap_or("unnamed"),
            place = place.as_deref().unwrap_or("unknown"),
            "panic: {}",
            info.payload_as_str().unwrap_or("no text")
        );
        log.flush(PATIENCE);
        before(info);
    }));
}

/// From now on a panic of any thread ends the process, once it is in the log: a node that has lost
/// a core would serve some of its clients and disks and leave the others without an answer. Whoever
/// started the node can start it again.
pub(crate) fn end_process_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        before(info);
        std::process::abort();
    }));
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a real thread, process and file")]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn a_panic_is_in_the_log_when_the_thread_is_gone() {
        let path = std::env::temp_dir().join(format!("millrace-panic-{}", std::process::id()));
        let config = LogConfig { file: Some(path.clone()), ..LogConfig::default() };
        let (log, writer) = start(&config, open(&config, None).unwrap()).unwrap();
        let thread = std::thread::Builder::new().name("unlucky".into());
        let entered = log.clone();
        let ended = thread.spawn(move || {
            let _entered = entered.enter(Some(3));
            tracing::warn!("before");
            panic!("out of {}", "luck");
        });
        assert!(ended.unwrap().join().is_err());
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().map(|line| line.split_once("Z ").unwrap().1).collect();
        assert_eq!(lines[0], "WARN  core=3 node::log::tests: before");
        let panic = "ERROR core=3 node::log: panic: out of luck thread=\"unlucky\" place=\"";
        assert!(lines[1].starts_with(panic), "{text}");
        drop(writer);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_panic_of_any_thread_ends_the_process() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "log::tests::child_panics"])
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(libc::SIGABRT));
    }

    #[test]
    #[ignore = "a process that another test starts"]
    fn child_panics() {
        end_process_on_panic();
        let _ended = std::thread::spawn(|| panic!("on purpose")).join();
    }

    #[test]
    fn a_log_file_that_cannot_be_opened_is_an_error_that_names_it() {
        let config = LogConfig { file: Some("/nowhere/at/all".into()), ..LogConfig::default() };
        let error = open(&config, None).err().expect("there is no such directory");
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
    }
}
