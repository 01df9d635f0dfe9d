//! Standard output: readable bytes, lines, and JSON.
//!
//! A closed pipe is not an error: the reader has seen enough. [`Out`] then reports
//! [`Closed`](Stop::Closed) once, and the command ends.

use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Map, Value, json};

/// Why printing stopped.
#[derive(Debug)]
pub enum Stop {
    /// The reader closed the pipe: end quietly.
    Closed,
    /// The write failed for another reason, such as a full disk.
    Failed(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Stop::Closed,
            _ => Stop::Failed(error),
        }
    }
}

/// A progress bar of bytes on standard error. Hidden unless that is a terminal.
pub fn progress_bar(what: &str) -> ProgressBar {
    let template =
        format!("{what} {{bar:40}} {{bytes}} of {{total_bytes}}, {{bytes_per_sec}}, {{eta}} left");
    let style = ProgressStyle::with_template(&template).expect("the template is right");
    ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(5)).with_style(style)
}

/// Buffered standard output, or a file.
pub struct Out {
    to: BufWriter<Box<dyn Write>>,
    terminal: bool,
}

impl Out {
    /// Locks standard output.
    pub fn new() -> Out {
        let stdout = io::stdout();
        let terminal = stdout.is_terminal();
        Out { to: BufWriter::with_capacity(64 << 10, Box::new(stdout.lock())), terminal }
    }

    /// Creates a file, or truncates an existing one.
    ///
    /// # Errors
    /// The system's.
    #[expect(clippy::disallowed_methods, reason = "a tool's output, beside the core's work")]
    pub fn file(path: &Path) -> io::Result<Out> {
        let file = std::fs::File::create(path)?;
        Ok(Out { to: BufWriter::with_capacity(64 << 10, Box::new(file)), terminal: false })
    }

    /// Whether the output is a terminal.
    pub fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Writes bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        Ok(self.to.write_all(bytes)?)
    }

    /// Writes one line.
    pub fn line(&mut self, text: &str) -> Result<(), Stop> {
        self.to.write_all(text.as_bytes())?;
        Ok(self.to.write_all(b"\n")?)
    }

    /// Writes one JSON value on one line.
    pub fn json(&mut self, value: &Value) -> Result<(), Stop> {
        serde_json::to_writer(&mut self.to, value).map_err(io::Error::from)?;
        Ok(self.to.write_all(b"\n")?)
    }

    /// Writes out the buffer.
    pub fn flush(&mut self) -> Result<(), Stop> {
        Ok(self.to.flush()?)
    }
}

/// Appends bytes as text: printable text stays, everything else and the backslash are escaped.
pub fn escape_into(out: &mut String, bytes: &[u8]) {
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                c if c.is_control() => {
                    let mut utf8 = [0; 4];
                    for byte in c.encode_utf8(&mut utf8).bytes() {
                        escape_byte(out, byte);
                    }
                }
                c => out.push(c),
            }
        }
        for byte in chunk.invalid() {
            escape_byte(out, *byte);
        }
    }
}

fn escape_byte(out: &mut String, byte: u8) {
    out.push_str("\\x");
    hex_into(out, &[byte]);
}

/// Appends bytes in lower-case hexadecimal.
pub fn hex_into(out: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    out.reserve(bytes.len() * 2);
    for byte in bytes {
        out.push(char::from(DIGITS[usize::from(byte >> 4)]));
        out.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
}

/// Reads what [`escape_into`] writes; bytes that need no escape may also appear unescaped.
pub fn unescape(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let (&kind, behind) = rest.split_first()?;
        rest = behind;
        match kind {
            b'\\' => out.push(b'\\'),
            b'n' => out.push(b'\n'),
            b'r' => out.push(b'\r'),
            b't' => out.push(b'\t'),
            b'x' => {
                let (digits, behind) = rest.split_at_checked(2)?;
                if !digits.iter().all(u8::is_ascii_hexdigit) {
                    return None;
                }
                out.extend(parse_hex(digits)?);
                rest = behind;
            }
            _ => return None,
        }
    }
    Some(out)
}

/// Bytes in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    let mut out = String::new();
    hex_into(&mut out, bytes);
    out
}

/// Reads hexadecimal, with or without a leading `0x`.
pub fn parse_hex(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.strip_prefix(b"0x").unwrap_or(text);
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let nibble = |c: u8| char::from(c).to_digit(16).map(|digit| digit as u8);
    digits.chunks_exact(2).map(|pair| Some(nibble(pair[0])? << 4 | nibble(pair[1])?)).collect()
}

/// Puts bytes into a JSON object: as `name` if they are text, else (or if `as_hex`) as `name_hex`.
pub fn put_bytes(object: &mut Map<String, Value>, name: &str, bytes: &[u8], as_hex: bool) {
    match std::str::from_utf8(bytes) {
        Ok(text) if !as_hex => object.insert(name.to_owned(), json!(text)),
        _ => object.insert(format!("{name}_hex"), json!(hex(bytes))),
    };
}

/// Columns of text, each as wide as its widest cell, separated by two spaces. Those in `right` are
/// right-aligned.
pub fn table<const N: usize>(rows: &[[String; N]], right: &[usize]) -> String {
    let widths: [usize; N] =
        std::array::from_fn(|at| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0));
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (at, (cell, width)) in row.iter().zip(widths).enumerate() {
            if at > 0 {
                line.push_str("  ");
            }
            match right.contains(&at) {
                true => line.push_str(&format!("{cell:>width$}")),
                false => line.push_str(&format!("{cell:<width$}")),
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Writes a number with commas between the thousands.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A text that comes from another process, without what would change a terminal.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn escaped(bytes: &[u8]) -> String {
        let mut out = String::new();
        escape_into(&mut out, bytes);
        out
    }

    #[test]
    fn text_stays_readable_and_everything_else_is_escaped() {
        assert_eq!(escaped(b"user:42"), "user:42");
        assert_eq!(escaped("größe ✓".as_bytes()), "größe ✓");
        assert_eq!(escaped(b"a\tb\\c\n"), "a\\tb\\\\c\\n");
        assert_eq!(escaped(b"\0\x1f\x7f\xff\xc3"), "\\x00\\x1f\\x7f\\xff\\xc3");
        assert_eq!(escaped("\u{85}".as_bytes()), "\\xc2\\x85");
    }

    #[test]
    fn escaped_bytes_are_read_back() {
        let all: Vec<u8> = (0..=255).rev().chain("größe ✓ \u{85}\\x41".bytes()).collect();
        assert_eq!(unescape(escaped(&all).as_bytes()), Some(all));
        assert_eq!(unescape(b"a\xff\"b"), Some(b"a\xff\"b".to_vec()), "no escape is needed");
        for wrong in [&b"\\"[..], b"\\x", b"\\x1", b"\\xgg", b"\\q", b"\\x0x"] {
            assert_eq!(unescape(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn hexadecimal_goes_both_ways() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(parse_hex(hex(&all).as_bytes()), Some(all));
        assert_eq!(parse_hex(b"0xAbCd"), Some(vec![0xab, 0xcd]));
        assert_eq!(parse_hex(b""), Some(Vec::new()));
        for wrong in [&b"a"[..], b"0x0", b"gg", b"+1", b"\xc3\xa4"] {
            assert_eq!(parse_hex(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn json_has_text_as_text_and_other_bytes_in_hexadecimal() {
        let object = |bytes: &[u8], as_hex| {
            let mut object = Map::new();
            put_bytes(&mut object, "key", bytes, as_hex);
            Value::Object(object).to_string()
        };
        assert_eq!(object(b"abc", false), r#"{"key":"abc"}"#);
        assert_eq!(object(b"abc", true), r#"{"key_hex":"616263"}"#);
        assert_eq!(object(b"\xff", false), r#"{"key_hex":"ff"}"#);
    }

    #[test]
    fn table_columns_are_as_wide_as_their_widest_cell() {
        let rows = [["A", "SIZE", "B"], ["µs", "1", "x"]].map(|row| row.map(str::to_owned));
        assert_eq!(table(&rows, &[1]), "A   SIZE  B\nµs     1  x\n");
    }

    #[test]
    fn large_numbers_are_grouped() {
        assert_eq!(thousands(7), "7");
        assert_eq!(thousands(1000), "1,000");
        assert_eq!(thousands(4_194_304), "4,194,304");
    }
}
