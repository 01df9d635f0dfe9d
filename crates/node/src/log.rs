//! The log of a process: one plain line per event, on standard error.
//!
//! A service's lines begin with the time; a tool's look like its other messages. Nothing on the
//! way of a request logs, so the write may block.

use std::fmt;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogStyle {
    /// `2026-11-21T01:54:00.123456Z warning: text`, from information on.
    Service,
    /// `millrace: warning: text`, from warnings on.
    Tool,
}

/// Sends the process's log to standard error. Where a log is set up already, that one stays.
pub fn start_log(style: LogStyle) {
    let level = match style {
        LogStyle::Service => Level::INFO,
        LogStyle::Tool => Level::WARN,
    };
    let _ = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(level)
        .event_format(Line(style))
        .try_init();
}

struct Line(LogStyle);

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        match self.0 {
            LogStyle::Service => {
                SystemTime.format_time(&mut writer)?;
                writer.write_str(" ")?;
            }
            LogStyle::Tool => writer.write_str("millrace: ")?,
        }
        writer.write_str(match *event.metadata().level() {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            _ => "",
        })?;
        ctx.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts bytes and checks that the text is what was expected.
    #[derive(Clone)]
    struct Expect(&'static str, Arc<AtomicUsize>);

    impl Write for Expect {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let from = self.1.fetch_add(bytes.len(), Ordering::Relaxed);
            assert_eq!(&self.0.as_bytes()[from..from + bytes.len()], bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_tools_line_says_who_speaks_and_how_bad_it_is() {
        let expected =
            "millrace: warning: io_uring is not available\nmillrace: error: core 1 is gone\n";
        let seen = Expect(expected, Arc::default());
        let writer = seen.clone();
        let log = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .event_format(Line(LogStyle::Tool))
            .finish();
        tracing::subscriber::with_default(log, || {
            tracing::warn!("io_uring is not available");
            tracing::error!("core {} is gone", 1);
        });
        assert_eq!(seen.1.load(Ordering::Relaxed), expected.len());
    }
}
