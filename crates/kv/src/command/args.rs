//! The arguments of a parsed command, as slices of the buffer they arrived in.

use resp::Span;

/// The arguments of one command, including its name.
#[derive(Clone, Copy, Debug)]
pub struct Args<'a> {
    bytes: &'a [u8],
    spans: &'a [Span],
}

impl<'a> Args<'a> {
    /// The arguments at `spans` of the command that `bytes` begins with. The spans come from the
    /// parser that parsed it.
    pub fn new(bytes: &'a [u8], spans: &'a [Span]) -> Self {
        Self { bytes, spans }
    }

    /// The bytes it was made of, from the command's first one on, and the spans.
    pub fn parts(&self) -> (&'a [u8], &'a [Span]) {
        (self.bytes, self.spans)
    }

    /// The number of arguments, including the name.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Whether there is no argument, not even a name.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// The argument at `index`; empty after the last.
    pub fn get(&self, index: usize) -> &'a [u8] {
        self.spans.get(index).map_or(b"", |span| &self.bytes[span.range()])
    }

    /// The arguments from `index` on.
    pub fn from(&self, index: usize) -> Args<'a> {
        Args { bytes: self.bytes, spans: self.spans.get(index..).unwrap_or_default() }
    }

    /// All arguments in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        let bytes = self.bytes;
        self.spans.iter().map(move |span| &bytes[span.range()])
    }

    /// Whether the argument at `index` is `word`, ignoring case.
    pub fn is(&self, index: usize, word: &str) -> bool {
        self.get(index).eq_ignore_ascii_case(word.as_bytes())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use resp::{Limits, Parser, Progress};

    /// Parses one inline command and passes its arguments to `then`.
    pub(crate) fn with<R>(line: &str, then: impl FnOnce(Args<'_>) -> R) -> R {
        let mut bytes = format!("{line}\r\n").into_bytes();
        let mut parser = Parser::new(Limits::default());
        assert_eq!(parser.parse(&mut bytes), Ok(Progress::Complete(bytes.len())));
        then(Args::new(&bytes, parser.args()))
    }

    #[test]
    fn arguments_are_slices_of_the_buffer() {
        with("get 'a b' c", |args| {
            assert_eq!((args.len(), args.get(1), args.get(3)), (3, &b"a b"[..], &b""[..]));
            assert_eq!(args.from(1).iter().collect::<Vec<_>>(), [&b"a b"[..], b"c"]);
            assert!(args.from(9).is_empty());
            assert!(args.is(0, "GET"));
        });
    }
}
