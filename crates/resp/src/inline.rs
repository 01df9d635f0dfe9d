//! Inline commands: one line of words, for people who use `telnet`.
//!
//! Words are separated by white space. A word may contain quoted parts. Within double quotes
//! `\n \r \t \a \b`, `\xHH`, and `\` before any other byte are escapes; within single quotes only
//! `\'` is. White space or the end of the line must follow a closing quote. Redis and `redis-cli`
//! read a line the same way.
//!
//! Unescaping never makes a word longer, so it happens in place: the words are spans of the line
//! itself.

use crate::request::Span;

/// A line whose quotes do not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unbalanced;

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c)
}

/// Splits the line `buffer[from..to]` into words, unescaping in place, and appends their spans to
/// `words`.
pub(crate) fn split(
    buffer: &mut [u8],
    from: usize,
    to: usize,
    words: &mut Vec<Span>,
) -> Result<(), Unbalanced> {
    let mut read = from;
    loop {
        while read < to && is_space(buffer[read]) {
            read += 1;
        }
        if read == to {
            return Ok(());
        }
        let start = read;
        let mut write = read;
        while read < to && !matches!(buffer[read], b' ' | b'\t' | b'\n' | b'\r') {
            match buffer[read] {
                quote @ (b'"' | b'\'') => {
                    let closed = unquote(buffer, (read + 1, to), write, quote)?;
                    (read, write) = (closed.read, closed.write);
                    // A closing quote ends the word.
                    if read < to && !is_space(buffer[read]) {
                        return Err(Unbalanced);
                    }
                    break;
                }
                byte => {
                    buffer[write] = byte;
                    write += 1;
                    read += 1;
                }
            }
        }
        words.push(Span::new(start, write));
    }
}

/// Splits one line into words by the same rules; `None` when its quotes do not match. For a command
/// line's prompt.
pub fn split_line(line: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut buffer = line.to_vec();
    let mut words = Vec::new();
    let end = buffer.len();
    split(&mut buffer, 0, end, &mut words).ok()?;
    Some(words.iter().map(|word| buffer[word.range()].to_vec()).collect())
}

struct Cursor {
    read: usize,
    write: usize,
}

/// Copies the quoted part that begins at `from` down to `write`; returns the positions after it.
fn unquote(
    buffer: &mut [u8],
    (from, to): (usize, usize),
    write: usize,
    quote: u8,
) -> Result<Cursor, Unbalanced> {
    let mut at = Cursor { read: from, write };
    while at.read < to {
        let byte = buffer[at.read];
        if byte == quote {
            at.read += 1;
            return Ok(at);
        }
        let rest = &buffer[at.read..to];
        let (value, used) = match (quote, rest) {
            (b'"', [b'\\', b'x', high, low, ..])
                if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
            {
                (hex(*high) << 4 | hex(*low), 4)
            }
            (b'"', [b'\\', escaped, ..]) => (unescape(*escaped), 2),
            (b'\'', [b'\\', b'\'', ..]) => (b'\'', 2),
            _ => (byte, 1),
        };
        buffer[at.write] = value;
        at.write += 1;
        at.read += used;
    }
    Err(Unbalanced)
}

fn unescape(byte: u8) -> u8 {
    match byte {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 0x08,
        b'a' => 0x07,
        other => other,
    }
}

fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        b'a'..=b'f' => digit - b'a' + 10,
        _ => digit - b'A' + 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(line: &str) -> Option<Vec<String>> {
        let words = split_line(line.as_bytes())?;
        Some(words.into_iter().map(|word| word.escape_ascii().to_string()).collect())
    }

    #[test]
    fn words_are_split_at_white_space() {
        assert_eq!(words("  get   key\t1 ").unwrap(), ["get", "key", "1"]);
        assert_eq!(words("").unwrap(), [""; 0]);
        assert_eq!(words(" \t ").unwrap(), [""; 0]);
    }

    #[test]
    fn double_quotes_take_escapes() {
        assert_eq!(words(r#"a "b c" "\x41\n\"\q""#).unwrap(), ["a", "b c", r#"A\n\"q"#]);
        assert_eq!(words(r#""\xzz""#).unwrap(), ["xzz"]);
        assert_eq!(words(r#""""#).unwrap(), [""]);
    }

    #[test]
    fn single_quotes_take_only_the_quote() {
        assert_eq!(words(r"'a \n \' b'").unwrap(), [r"a \\n \' b"]);
    }

    #[test]
    fn a_quoted_part_may_follow_plain_bytes_but_must_end_the_word() {
        assert_eq!(words(r#"ab"c d" e"#).unwrap(), ["abc d", "e"]);
        assert_eq!(words(r#""a"b"#), None);
        assert_eq!(words("'a'b"), None);
    }

    #[test]
    fn open_quotes_are_refused() {
        for line in ["\"", "'", "a \"b", "\"a\\\"", "'a\\'", "\"\\"] {
            assert_eq!(words(line), None, "{line}");
        }
    }

    proptest! {
        #[test]
        fn quoted_arguments_round_trip(args in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..6)) {
            let mut line = Vec::new();
            for arg in &args {
                line.push(b'"');
                for byte in arg {
                    line.extend_from_slice(format!("\\x{byte:02x}").as_bytes());
                }
                line.extend_from_slice(b"\" ");
            }
            prop_assert_eq!(split_line(&line), Some(args));
        }
    }
}
