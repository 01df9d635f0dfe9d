//! Keys and values as the caller gets them.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// A key or a value, as bytes: it dereferences to `[u8]`.
///
/// Those of a [`Range`](crate::Range) share the memory of up to 256 KiB with their neighbours: copy
/// a few that are kept for long with `to_vec`.
#[derive(Clone)]
pub struct Value(Repr);

#[derive(Clone)]
enum Repr {
    Own(Box<[u8]>),
    /// From and to.
    Part(Arc<Vec<u8>>, u32, u32),
}

impl Value {
    pub(crate) fn copy(bytes: &[u8]) -> Value {
        Value(Repr::Own(bytes.into()))
    }

    pub(crate) fn part(of: &Arc<Vec<u8>>, from: u32, to: u32) -> Value {
        Value(Repr::Part(of.clone(), from, to))
    }
}

impl Deref for Value {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Own(bytes) => bytes,
            Repr::Part(of, from, to) => &of[*from as usize..*to as usize],
        }
    }
}

impl AsRef<[u8]> for Value {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Borrow<[u8]> for Value {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl From<&[u8]> for Value {
    fn from(bytes: &[u8]) -> Value {
        Value::copy(bytes)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::copy(text.as_bytes())
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Value {
        Value(Repr::Own(bytes.into()))
    }
}

impl From<Value> for Vec<u8> {
    fn from(value: Value) -> Vec<u8> {
        match value.0 {
            Repr::Own(bytes) => bytes.into_vec(),
            Repr::Part(..) => value.to_vec(),
        }
    }
}

impl<T: AsRef<[u8]> + ?Sized> PartialEq<T> for Value {
    fn eq(&self, other: &T) -> bool {
        **self == *other.as_ref()
    }
}

impl Eq for Value {}

impl std::hash::Hash for Value {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b\"{}\"", self.escape_ascii())
    }
}
