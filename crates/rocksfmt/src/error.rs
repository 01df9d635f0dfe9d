//! The crate's error: a kind, and the evidence.
//!
//! Callers match on [`Kind`]; people read the text. The error is one pointer wide and is built only
//! in `#[cold]` constructors, so a `Result` costs the success path no more than an
//! `Option<Box<_>>`.

use std::borrow::Cow;
use std::fmt;

/// The kinds of failure that a caller treats differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The bytes contradict the format or fail their checksum.
    Corruption,
    /// The bytes may be valid but use a feature this reader does not know; the text names it.
    Unsupported,
    /// A length in the bytes exceeds the caller's limit.
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

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure to parse some bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Details>);

#[derive(Clone, PartialEq, Eq)]
struct Details {
    kind: Kind,
    what: Cow<'static, str>,
    /// Innermost first: "entry 3", then "index block at 4711".
    places: Vec<Cow<'static, str>>,
}

impl Error {
    /// An error of the given kind; `what` names expected against found.
    #[cold]
    #[inline(never)]
    pub fn new(kind: Kind, what: impl Into<Cow<'static, str>>) -> Error {
        Error(Box::new(Details { kind, what: what.into(), places: Vec::new() }))
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

    /// The same error with the object in which it happened ("footer", "manifest record at 32768").
    #[cold]
    #[inline(never)]
    pub fn at(mut self, place: impl Into<Cow<'static, str>>) -> Error {
        self.0.places.push(place.into());
        self
    }

    /// The kind of failure.
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
    fn the_text_names_places_from_the_outside_in() {
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
