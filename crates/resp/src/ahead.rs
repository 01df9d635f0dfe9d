//! Looks ahead in a pipeline.

/// The beginning of a `GET`, up to the length of the key.
const GET: &[u8; 14] = b"*2\r\n$3\r\nGET\r\n$";
/// Digits of a key's length.
const DIGITS_MAX: usize = 5;

/// Iterator of [`gets_ahead`].
#[derive(Clone, Debug)]
pub struct GetsAhead<'i> {
    input: &'i [u8],
    rest: &'i [u8],
}

/// The keys of the `GET`s with which `input` begins, up to the first other or unfinished command.
/// `input` begins with the first byte of a command. Decides nothing: what a command is says
/// [`Parser::parse`](crate::Parser::parse).
pub fn gets_ahead(input: &[u8]) -> GetsAhead<'_> {
    GetsAhead { input, rest: input }
}

impl GetsAhead<'_> {
    /// The bytes of the commands whose keys were returned.
    pub fn bytes(&self) -> usize {
        self.input.len() - self.rest.len()
    }
}

impl<'i> Iterator for GetsAhead<'i> {
    type Item = &'i [u8];

    #[inline]
    fn next(&mut self) -> Option<&'i [u8]> {
        let (begin, rest) = self.rest.split_first_chunk::<{ GET.len() }>()?;
        if begin[..8] != GET[..8] || !begin[8..].eq_ignore_ascii_case(&GET[8..]) {
            return None;
        }
        let digits = rest.iter().take(DIGITS_MAX).take_while(|byte| byte.is_ascii_digit()).count();
        let length =
            rest[..digits].iter().fold(0, |length, digit| 10 * length + usize::from(digit - b'0'));
        let rest = rest[digits..].strip_prefix(b"\r\n")?;
        let (key, rest) = rest.split_at_checked(length)?;
        self.rest = rest.strip_prefix(b"\r\n")?;
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, Parser, Progress, write_command};
    use proptest::prelude::*;

    fn command(args: &[&[u8]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_command(&mut bytes, args);
        bytes
    }

    #[test]
    fn gets_are_seen_up_to_the_first_other_command() {
        let commands: [&[&[u8]]; 5] = [
            &[b"GET", b"a"],
            &[b"get", b""],
            &[b"GeT", b"b\r\nc"],
            &[b"SET", b"d", b"e"],
            &[b"GET", b"f"],
        ];
        let input = commands.map(command).concat();
        let mut ahead = gets_ahead(&input);
        let keys: Vec<&[u8]> = ahead.by_ref().collect();
        assert_eq!(keys, [&b"a"[..], b"", b"b\r\nc"]);
        assert_eq!(
            ahead.bytes(),
            commands[..3].iter().map(|args| command(args).len()).sum::<usize>()
        );
        for end in 0..command(commands[0]).len() {
            assert_eq!(gets_ahead(&input[..end]).count(), 0, "{end}");
        }
        assert_eq!(gets_ahead(b"GET a\r\n").count(), 0);
        assert_eq!(gets_ahead(b"*2\r\n$3\r\nGET\r\n$-1\r\n").count(), 0);
    }

    const PARTS: [&[u8]; 5] =
        [b"*2\r\n$3\r\nGET\r\n", b"$1\r\n", b"a\r\n", b"GET a\r\n", b"$0\r\n\r\n"];

    proptest! {
        #[test]
        fn the_parser_finds_the_same_keys(
            parts in proptest::collection::vec(proptest::sample::select(&PARTS[..]), 0..12),
        ) {
            let mut input = parts.concat();
            let keys: Vec<Vec<u8>> = gets_ahead(&input).map(<[u8]>::to_vec).collect();
            let mut parser = Parser::new(Limits::default());
            let mut at = 0;
            for key in keys {
                let Ok(Progress::Complete(length)) = parser.parse(&mut input[at..]) else {
                    panic!("a whole command")
                };
                let spans = parser.args();
                prop_assert_eq!(spans.len(), 2);
                prop_assert_eq!(&input[at..][spans[1].range()], &key[..]);
                at += length;
            }
        }
    }
}
