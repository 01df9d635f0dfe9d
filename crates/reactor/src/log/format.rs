//! Renders an event as a line.
//!
//! The logging thread renders a line into one buffer, which then goes to the writer. Control
//! characters are escaped, so text from a client or a disk can neither end the line nor reach a
//! terminal as a control sequence. A line is cut at little more than [`LINE_MAX`] bytes.

use std::fmt::{self, Write};
use std::str::FromStr;

use tracing::field::{Field, Visit};
use tracing::{Event, Level};

/// Length of a line in bytes at which values are cut.
pub const LINE_MAX: usize = 4096;

/// The format of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Format {
    /// `2026-11-21T01:54:00.123456Z WARN core=1 lsm::recover: text key=value`
    #[default]
    Text,
    /// One object with `time`, `level`, `target`, `core`, `message` and `fields`.
    Json,
    /// `millrace: warning: text key=value`: a tool's message to its user.
    Tool,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Format, String> {
        match text {
            "text" => Ok(Format::Text),
            "json" => Ok(Format::Json),
            _ => Err(format!("must be text or json, not '{text}'")),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Text => "text",
            Format::Json => "json",
            Format::Tool => "tool",
        })
    }
}

impl Format {
    /// Renders an event with its newline.
    pub fn render(self, unix_us: u64, core: Option<usize>, event: &Event<'_>) -> Vec<u8> {
        let about = event.metadata();
        let mut line = Line::new(self);
        line.head(unix_us, core, *about.level(), about.target());
        event.record(&mut Message(&mut line));
        let mut fields = Fields { line: &mut line, first: true };
        event.record(&mut fields);
        if !fields.first && self == Format::Json {
            line.out.push(b'}');
        }
        line.finish()
    }

    /// Renders one of the log's own lines.
    pub fn render_own(self, unix_us: u64, level: Level, message: fmt::Arguments<'_>) -> Vec<u8> {
        let mut line = Line::new(self);
        line.head(unix_us, None, level, "reactor::log");
        line.message(message);
        line.finish()
    }
}

struct Line {
    out: Vec<u8>,
    format: Format,
}

impl Line {
    fn new(format: Format) -> Line {
        Line { out: Vec::with_capacity(192), format }
    }

    fn head(&mut self, unix_us: u64, core: Option<usize>, level: Level, target: &str) {
        match self.format {
            Format::Text => {
                self.time(unix_us);
                self.out.push(b' ');
                self.out.extend_from_slice(level.as_str().as_bytes());
                let pad = 6 - level.as_str().len();
                self.out.extend_from_slice(&b"      "[..pad]);
                if let Some(core) = core {
                    self.raw(format_args!("core={core} "));
                }
                self.out.extend_from_slice(target.as_bytes());
                self.out.extend_from_slice(b": ");
            }
            Format::Json => {
                self.out.extend_from_slice(b"{\"time\":\"");
                self.time(unix_us);
                self.out.extend_from_slice(b"\",\"level\":\"");
                self.out.extend(level.as_str().bytes().map(|byte| byte.to_ascii_lowercase()));
                self.out.extend_from_slice(b"\",\"target\":");
                self.raw(format_args!("{target:?}"));
                if let Some(core) = core {
                    self.raw(format_args!(",\"core\":{core}"));
                }
            }
            Format::Tool => self.out.extend_from_slice(match level {
                Level::ERROR => b"millrace: error: ",
                Level::WARN => b"millrace: warning: ",
                _ => b"millrace: ",
            }),
        }
    }

    fn message(&mut self, message: fmt::Arguments<'_>) {
        if self.format == Format::Json {
            self.out.extend_from_slice(b",\"message\":");
        }
        self.text(message);
    }

    fn finish(mut self) -> Vec<u8> {
        if self.format == Format::Json {
            self.out.push(b'}');
        }
        self.out.push(b'\n');
        self.out
    }

    /// Appends a text that is short and has no control characters.
    fn raw(&mut self, what: fmt::Arguments<'_>) {
        use std::io::Write as _;
        self.out.write_fmt(what).expect("a vector takes all");
    }

    /// Appends a text of any length and content; in JSON a string.
    fn text(&mut self, what: fmt::Arguments<'_>) {
        let json = self.format == Format::Json;
        if json {
            self.out.push(b'"');
        }
        let mut escaped = Escaped { out: &mut self.out, json };
        if escaped.write_fmt(what).is_err() {
            // It was cut, or its own formatting failed; both are visible.
            self.out.extend_from_slice("…".as_bytes());
        }
        if json {
            self.out.push(b'"');
        }
    }

    /// `2026-11-21T01:54:00.123456Z`.
    fn time(&mut self, unix_us: u64) {
        let (seconds, micros) = (unix_us / 1_000_000, unix_us % 1_000_000);
        let (year, month, day) = civil(seconds / 86_400);
        let of_day = seconds % 86_400;
        let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
        self.digits::<4>(year, b'-');
        self.digits::<2>(month, b'-');
        self.digits::<2>(day, b'T');
        self.digits::<2>(hour, b':');
        self.digits::<2>(minute, b':');
        self.digits::<2>(second, b'.');
        self.digits::<6>(micros, b'Z');
    }

    /// Appends the last `N` decimal digits of a number, and the byte `then`. By hand, because `fmt`
    /// would take half the time of a whole line.
    fn digits<const N: usize>(&mut self, mut number: u64, then: u8) {
        let mut digits = [b'0'; N];
        for digit in digits.iter_mut().rev() {
            *digit += (number % 10) as u8;
            number /= 10;
        }
        self.out.extend_from_slice(&digits);
        self.out.push(then);
    }
}

/// A time in seconds since 1970, such as `2026-11-21 01:54:00`, in UTC.
pub fn utc(unix_seconds: u64) -> String {
    let (year, month, day) = civil(unix_seconds / 86_400);
    let of_day = unix_seconds % 86_400;
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// Year, month and day of a number of days since 1970, in the Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    // Counted from 1 March of the year 0, a leap day is the last day of its year, and the calendar
    // repeats every 400 years, which are 146097 days.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let of_era_year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * of_era_year + of_era_year / 4 - of_era_year / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + of_era_year + u64::from(month <= 2), month, day)
}

/// Escapes control characters, and fails when the line is long enough.
struct Escaped<'a> {
    out: &'a mut Vec<u8>,
    json: bool,
}

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        use std::io::Write as _;
        // Nearly all texts need no escaping at all.
        let plain = |byte: u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
        if self.out.len() + text.len() <= LINE_MAX && text.bytes().all(plain) {
            self.out.extend_from_slice(text.as_bytes());
            return Ok(());
        }
        for c in text.chars() {
            if self.out.len() >= LINE_MAX {
                return Err(fmt::Error);
            }
            match c {
                '"' | '\\' if self.json => self.out.extend_from_slice(&[b'\\', c as u8]),
                '\n' => self.out.extend_from_slice(b"\\n"),
                '\t' => self.out.extend_from_slice(b"\\t"),
                '\r' => self.out.extend_from_slice(b"\\r"),
                c if c.is_control() && self.json => {
                    write!(self.out, "\\u{:04x}", u32::from(c)).expect("a vector takes all");
                }
                c if c.is_control() => {
                    write!(self.out, "\\u{{{:x}}}", u32::from(c)).expect("a vector takes all");
                }
                c if c.is_ascii() => self.out.push(c as u8),
                c => self.out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        Ok(())
    }
}

/// Visits the message only.
struct Message<'a>(&'a mut Line);

impl Visit for Message<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0.message(format_args!("{value:?}"));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.0.message(format_args!("{value}"));
        }
    }
}

/// Visits all fields but the message.
struct Fields<'a> {
    line: &'a mut Line,
    first: bool,
}

impl Fields<'_> {
    /// Writes the name; false for the message, which is written elsewhere.
    fn name(&mut self, field: &Field) -> bool {
        if field.name() == "message" {
            return false;
        }
        let first = std::mem::replace(&mut self.first, false);
        match self.line.format {
            Format::Json => {
                self.line.out.extend_from_slice(if first { b",\"fields\":{" } else { b"," });
                self.line.raw(format_args!("{:?}:", field.name()));
            }
            Format::Text | Format::Tool => {
                self.line.raw(format_args!(" {}=", field.name()));
            }
        }
        true
    }

    /// Writes a value that has the same form in JSON and in text.
    fn bare(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        if self.name(field) {
            self.line.raw(value);
        }
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if self.name(field) {
            self.line.text(format_args!("{value:?}"));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if self.name(field) {
            match self.line.format {
                Format::Json => self.line.text(format_args!("{value}")),
                Format::Text | Format::Tool => self.line.text(format_args!("{value:?}")),
            }
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.bare(field, format_args!("{value}"));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.bare(field, format_args!("{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.bare(field, format_args!("{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // JSON has no infinite numbers.
        if value.is_finite() {
            self.bare(field, format_args!("{value}"));
        } else {
            self.record_debug(field, &value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        for (days, date) in [
            (0, (1970, 1, 1)),
            (58, (1970, 2, 28)),
            (59, (1970, 3, 1)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (20_778, (2026, 11, 21)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
        ] {
            assert_eq!(civil(days), date, "{days}");
        }
        // One day after the other: the day of the month counts up or begins again.
        for days in 0..100_000 {
            let ((year, month, day), next) = (civil(days), civil(days + 1));
            assert!(
                next == (year, month, day + 1)
                    || (day >= 28 && next == (year, month + 1, 1))
                    || ((month, day) == (12, 31) && next == (year + 1, 1, 1)),
                "{days}: {next:?}"
            );
        }
    }

    #[test]
    fn the_logs_own_lines_look_like_the_others() {
        let own = |format: Format| {
            let bytes = format.render_own(1_000_000, Level::WARN, format_args!("a\u{9b}\"b"));
            String::from_utf8(bytes).unwrap()
        };
        assert_eq!(
            own(Format::Text),
            "1970-01-01T00:00:01.000000Z WARN  reactor::log: a\\u{9b}\"b\n"
        );
        assert_eq!(
            own(Format::Json),
            "{\"time\":\"1970-01-01T00:00:01.000000Z\",\"level\":\"warn\",\
             \"target\":\"reactor::log\",\"message\":\"a\\u009b\\\"b\"}\n"
        );
        assert_eq!(own(Format::Tool), "millrace: warning: a\\u{9b}\"b\n");
    }
}
