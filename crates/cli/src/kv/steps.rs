//! Parses the input of an import: the formats that [`super::print`] writes, and Redis commands.
//!
//! | format | input |
//! |---|---|
//! | text | `KEY`, a tab, `VALUE`, escaped as `kv scan` prints them |
//! | hex | `KEYHEX VALUEHEX` |
//! | json | an object per line: `key` or `key_hex`, and `value` or `value_hex` |
//! | resp | the input of `redis-cli --pipe`: `SET`, `MSET`, `DEL` and `UNLINK`, as arrays or inline |
//!
//! Empty lines are skipped. Anything else is an error that names its line or command: guessing
//! would lose data.

use std::collections::VecDeque;
use std::io::{BufRead, Read};

use resp::{Limits, Parser, Progress};
use serde_json::Value;

use crate::failure::Failure;
use crate::output::{parse_hex, unescape};
use crate::style::Style;

/// The longest line, in bytes.
const LINE_BYTES_MAX: u64 = 1 << 30;

/// One operation of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Sets a key.
    Put(Vec<u8>, Vec<u8>),
    /// Removes a key.
    Delete(Vec<u8>),
}

impl Step {
    /// Bytes of the key and the value.
    pub fn bytes(&self) -> usize {
        match self {
            Step::Put(key, value) => key.len() + value.len(),
            Step::Delete(key) => key.len(),
        }
    }
}

/// The operations of an input, one at a time.
pub struct Steps<R> {
    input: R,
    style: Style,
    /// Lines or commands so far.
    count: u64,
    /// Bytes taken from the input.
    read: u64,
    line: Vec<u8>,
    parser: Parser,
    /// Offset of the first byte of `line` that is not parsed yet.
    start: usize,
    ready: VecDeque<Step>,
}

impl<R: BufRead> Steps<R> {
    /// Reads `input` in this format.
    pub fn new(input: R, style: Style) -> Steps<R> {
        let (line, ready) = (Vec::new(), VecDeque::new());
        let parser = Parser::new(Limits::default());
        Steps { input, style, count: 0, read: 0, line, parser, start: 0, ready }
    }

    /// Bytes taken from the input so far.
    pub fn bytes_read(&self) -> u64 {
        self.read
    }

    /// The next step; `None` at the end. Blocks while the input does.
    ///
    /// # Errors
    /// When the input cannot be read or parsed.
    pub fn next(&mut self) -> Result<Option<Step>, Failure> {
        match self.style {
            Style::Resp => self.next_of_command(),
            _ => self.next_of_line(),
        }
    }

    fn next_of_line(&mut self) -> Result<Option<Step>, Failure> {
        loop {
            self.line.clear();
            let mut limited = (&mut self.input).take(LINE_BYTES_MAX);
            let n = limited.read_until(b'\n', &mut self.line).map_err(|e| unreadable(&e))?;
            if n == 0 {
                return Ok(None);
            }
            self.count += 1;
            self.read += n as u64;
            if n as u64 == LINE_BYTES_MAX && !self.line.ends_with(b"\n") {
                return Err(self.wrong("is longer than 1 GiB"));
            }
            let line = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() {
                continue;
            }
            return match entry(self.style, line) {
                Ok((key, value)) => Ok(Some(Step::Put(key, value))),
                Err(what) => Err(self.wrong(&what)),
            };
        }
    }

    fn next_of_command(&mut self) -> Result<Option<Step>, Failure> {
        loop {
            if let Some(step) = self.ready.pop_front() {
                return Ok(Some(step));
            }
            let input = &mut self.line[self.start..];
            match self.parser.parse(input) {
                Ok(Progress::Complete(n)) => {
                    self.count += 1;
                    let args: Vec<&[u8]> =
                        self.parser.args().iter().map(|span| &input[span.range()]).collect();
                    match steps(&args) {
                        Ok(steps) => self.ready.extend(steps),
                        Err(what) => return Err(self.wrong(&what)),
                    }
                    self.start += n;
                }
                Ok(Progress::Incomplete(_)) => {
                    self.line.drain(..self.start);
                    self.start = 0;
                    let chunk = self.input.fill_buf().map_err(|e| unreadable(&e))?;
                    let n = chunk.len();
                    self.line.extend_from_slice(chunk);
                    self.input.consume(n);
                    self.read += n as u64;
                    if n == 0 {
                        if self.line.is_empty() {
                            return Ok(None);
                        }
                        self.count += 1;
                        return Err(self.wrong("ends in the middle"));
                    }
                }
                Err(error) => {
                    self.count += 1;
                    return Err(self.wrong(&format!("is not a command: {error}")));
                }
            }
        }
    }

    fn wrong(&self, what: &str) -> Failure {
        let (unit, hint) = match self.style {
            Style::Resp => ("command", "earlier commands are imported"),
            _ => ("line", "earlier lines are imported; --format names the format of the input"),
        };
        Failure::new(format!("{unit} {} of the input {what}", self.count)).hint(hint)
    }
}

fn unreadable(error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot read the input: {error}"))
}

/// Parses the key and value of a line.
fn entry(style: Style, line: &[u8]) -> Result<(Vec<u8>, Vec<u8>), String> {
    let halves = |mark: u8| {
        let at = line.iter().position(|&byte| byte == mark)?;
        Some((&line[..at], &line[at + 1..]))
    };
    match style {
        Style::Text => {
            let (key, value) = halves(b'\t').ok_or("has no tab between key and value")?;
            if value.contains(&b'\t') {
                return Err("has more than one tab: one in a key or value is written \\t".into());
            }
            let read = |text| unescape(text).ok_or("has a backslash with an unknown escape");
            Ok((read(key)?, read(value)?))
        }
        Style::Hex => {
            let (key, value) = halves(b' ').ok_or("has no space between key and value")?;
            let read = |text| parse_hex(text).ok_or("is not hexadecimal");
            Ok((read(key)?, read(value)?))
        }
        Style::Json { .. } => {
            let object: Value =
                serde_json::from_slice(line).map_err(|error| format!("is not JSON: {error}"))?;
            let read = |name: &str| match (&object[name], &object[format!("{name}_hex")]) {
                (Value::String(text), Value::Null) => Ok(text.clone().into_bytes()),
                (Value::Null, Value::String(digits)) => parse_hex(digits.as_bytes())
                    .ok_or_else(|| format!("has a {name}_hex that is not hexadecimal")),
                _ => Err(format!("must have a string {name} or {name}_hex")),
            };
            Ok((read("key")?, read("value")?))
        }
        Style::Resp => unreachable!("commands are not parsed line by line"),
    }
}

/// The operations of a command.
fn steps(args: &[&[u8]]) -> Result<Vec<Step>, String> {
    let Some((name, rest)) = args.split_first() else { return Ok(Vec::new()) };
    let put = |key: &[u8], value: &[u8]| Step::Put(key.to_vec(), value.to_vec());
    match (name.to_ascii_uppercase().as_slice(), rest) {
        (b"SET", [key, value]) => Ok(vec![put(key, value)]),
        (b"MSET", pairs) if !pairs.is_empty() && pairs.len() % 2 == 0 => {
            Ok(pairs.chunks_exact(2).map(|pair| put(pair[0], pair[1])).collect())
        }
        (b"DEL" | b"UNLINK", keys) if !keys.is_empty() => {
            Ok(keys.iter().map(|key| Step::Delete(key.to_vec())).collect())
        }
        (b"SELECT", [index]) if *index == b"0" => Ok(Vec::new()),
        _ => {
            let name = String::from_utf8_lossy(&name[..name.len().min(64)]).into_owned();
            Err(format!(
                "is {name:?} with {} arguments: only SET key value, MSET, DEL and UNLINK are imported",
                rest.len()
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::print::Lines;
    use super::*;

    fn all(style: Style, input: &[u8]) -> Result<Vec<Step>, String> {
        let mut steps = Steps::new(input, style);
        let mut found = Vec::new();
        while let Some(step) = steps.next().map_err(|failure| failure.to_string())? {
            found.push(step);
        }
        assert_eq!(steps.bytes_read(), input.len() as u64);
        Ok(found)
    }

    fn put(key: &[u8], value: &[u8]) -> Step {
        Step::Put(key.to_vec(), value.to_vec())
    }

    #[test]
    fn exported_entries_are_imported_unchanged() {
        let bytes: Vec<u8> = (0..=255).collect();
        let long = b"x\n".repeat(300_000);
        let entries: [(&[u8], &[u8]); 6] = [
            (b"hello", b"world"),
            (&bytes, b"\t\n\\"),
            (b"", b""),
            ("größe".as_bytes(), &bytes),
            (b"\r", b"\r"),
            (b"long", &long),
        ];
        let json = |hex| Style::Json { hex };
        for style in [Style::Text, Style::Hex, json(false), json(true), Style::Resp] {
            let mut lines = Lines::new(style);
            let mut text = Vec::new();
            entries
                .iter()
                .for_each(|(key, value)| text.extend_from_slice(lines.render(key, value)));
            let steps: Vec<Step> = entries.iter().map(|(key, value)| put(key, value)).collect();
            assert!(all(style, &text) == Ok(steps), "{style:?}");
        }
    }

    #[test]
    fn lines_can_end_in_crlf_and_the_last_needs_no_end() {
        let text = b"a\t1\r\n\n\r\nb\t2";
        assert_eq!(all(Style::Text, text), Ok(vec![put(b"a", b"1"), put(b"b", b"2")]));
    }

    #[test]
    fn commands_are_taken_in_either_form_and_in_order() {
        let text = b"SELECT 0\r\nset a \"1 2\"\r\n*3\r\n$3\r\nDEL\r\n$1\r\na\r\n$1\r\nb\r\n\
                     *5\r\n$4\r\nMSET\r\n$1\r\nc\r\n$2\r\n\r\n\r\n$1\r\nd\r\n$0\r\n\r\n";
        let steps = vec![
            put(b"a", b"1 2"),
            Step::Delete(b"a".to_vec()),
            Step::Delete(b"b".to_vec()),
            put(b"c", b"\r\n"),
            put(b"d", b""),
        ];
        assert_eq!(all(Style::Resp, text), Ok(steps));
    }

    #[test]
    fn a_mistake_is_named_by_its_line_or_command() {
        let wrong = |style, input: &[u8]| all(style, input).unwrap_err();
        assert!(wrong(Style::Text, b"a\tb\n\nab\n").starts_with("line 3 of the input has no tab"));
        assert!(
            wrong(Style::Text, b"a\tb\tc").starts_with("line 1 of the input has more than one")
        );
        assert!(wrong(Style::Text, b"a\t\\q").contains("backslash"));
        assert!(wrong(Style::Hex, b"00 1").contains("is not hexadecimal"));
        let json = Style::Json { hex: false };
        assert!(wrong(json, b"[1]").contains("must have a string key"));
        assert!(wrong(json, b"{\"key\":\"a\",\"value\":1}").contains("must have a string value"));
        assert!(
            wrong(json, b"{\"key\":\"a\",\"value\":\"\",\"value_hex\":\"\"}").contains("value")
        );
        assert!(wrong(json, b"{").contains("is not JSON"));
        assert!(
            wrong(Style::Resp, b"SET a 1\nINCR a\n")
                .starts_with("command 2 of the input is \"INCR\"")
        );
        assert!(wrong(Style::Resp, b"SET a 1 EX 5\n").contains("with 4 arguments"));
        assert!(
            wrong(Style::Resp, b"*2\r\n$3\r\nDEL\r\n").starts_with("command 1 of the input ends")
        );
        assert!(wrong(Style::Resp, b"*1\r\n:1\r\n").contains("is not a command"));
    }
}
