//! The crate's error: what kind of trouble, and the evidence for it.
//!
//! Callers match on [`Kind`]; people read the text. The error is one pointer wide and is built only
//! in `#[cold]` constructors, so a `Result` costs the success path no more than an `Option<Box<_>>`
//! does.

use std::borrow::Cow;
use std::fmt;

/// What a caller may want to tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The bytes contradict the format or fail their checksum.
    Corruption,
    /// The bytes are (or may be) fine but use something this reader does not know; the text names
    /// it.
    Unsupported,
    /// A length inside the bytes asks for more than the caller's limit.
    TooLarge,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Kind::Corruption => "corruption",
            Kind::Unsupported => "unsupported",
            Kind::TooLarge => "too large",
        }
    }
}

/// Result of everything in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure to understand some bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Inner>);

#[derive(Clone, PartialEq, Eq)]
struct Inner {
    kind: Kind,
    what: Cow<'static, str>,
    /// Innermost first: "entry 3", then "index block at 4711".
    places: Vec<Cow<'static, str>>,
}

impl Error {
    /// An error of the given kind; `what` says what was expected against what was found.
    #[cold]
    #[inline(never)]
    pub fn new(kind: Kind, what: impl Into<Cow<'static, str>>) -> Error {
        Error(Box::new(Inner { kind, what: what.into(), places: Vec::new() }))
    }

    /// Shorthand for [`Kind::Corruption`].
    #[cold]
    #[inline(never)]
    pub fn corruption(what: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Kind::Corruption, what)
    }

    /// Shorthand for [`Kind::Unsupported`].
    #[cold]
    #[inline(never)]
    pub fn unsupported(what: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Kind::Unsupported, what)
    }

    /// Shorthand for [`Kind::TooLarge`].
    #[cold]
    #[inline(never)]
    pub fn too_large(what: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Kind::TooLarge, what)
    }

    /// The same error, saying in which object it happened ("footer", "manifest record at 32768").
    #[cold]
    #[inline(never)]
    pub fn at(mut self, place: impl Into<Cow<'static, str>>) -> Error {
        self.0.places.push(place.into());
        self
    }

    /// What kind of trouble this is.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.0.kind.word())?;
        for place in self.0.places.iter().rev() {
            write!(f, "{place}: ")?;
        }
        f.write_str(&self.0.what)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

const _: () = assert!(size_of::<Result<()>>() == size_of::<usize>());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_reads_from_the_outside_in() {
        let e = Error::corruption("restart count 9 needs 36 bytes, block has 8")
            .at("index block at 4711")
            .at("000012.sst");
        assert_eq!(
            e.to_string(),
            "corruption: 000012.sst: index block at 4711: restart count 9 needs 36 bytes, block has 8"
        );
        assert_eq!(e.kind(), Kind::Corruption);
    }
}
