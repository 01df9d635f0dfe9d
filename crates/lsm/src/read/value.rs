//! The result of a lookup: part of a block's buffer or of a memtable, without a copy.

use std::ops::{Deref, Range};
use std::rc::Rc;

use fs::Slice;

use crate::mem::MemValue;
use crate::read::view::View;

/// A value, as bytes. It keeps its block's buffer in memory while it lives, so hold it briefly.
#[derive(Clone)]
pub struct Value(Repr);

#[derive(Clone)]
enum Repr {
    Block(Slice),
    /// The whole value, as it is stored in a blob file.
    Blob(Slice, Place),
    /// In memtable `mem` of family `family` of the view (both are indexes).
    Memory {
        view: Rc<View>,
        family: usize,
        mem: usize,
        value: MemValue,
    },
    Empty,
}

/// Where a value is in the blob files of a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The number of the file.
    pub file: u64,
    /// The offset of the value's first byte.
    pub offset: u64,
}

impl Value {
    pub(crate) fn blob(slice: Slice, place: Place) -> Value {
        Value(Repr::Blob(slice, place))
    }

    /// Where it is stored in a blob file; `None` if it is not, or not as it is.
    pub fn place(&self) -> Option<Place> {
        match self.0 {
            Repr::Blob(_, place) => Some(place),
            _ => None,
        }
    }

    pub(crate) fn block(slice: Slice) -> Value {
        Value(Repr::Block(slice))
    }

    pub(crate) fn memory(view: &Rc<View>, family: usize, mem: usize, value: MemValue) -> Value {
        Value(Repr::Memory { view: view.clone(), family, mem, value })
    }

    /// An empty value.
    pub fn empty() -> Value {
        Value(Repr::Empty)
    }

    /// The value as part of a shared buffer, for sending without a copy; `None` if it is not in
    /// one.
    pub fn as_slice(&self) -> Option<&Slice> {
        match &self.0 {
            Repr::Block(slice) | Repr::Blob(slice, _) => Some(slice),
            Repr::Memory { .. } | Repr::Empty => None,
        }
    }

    /// A part of the value.
    pub(crate) fn part(&self, range: Range<usize>) -> Value {
        match &self.0 {
            Repr::Block(slice) | Repr::Blob(slice, _) => Value(Repr::Block(slice.slice(range))),
            Repr::Memory { view, family, mem, value } => Value(Repr::Memory {
                view: view.clone(),
                family: *family,
                mem: *mem,
                value: value.part(range),
            }),
            Repr::Empty => Value::empty(),
        }
    }
}

impl Deref for Value {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Block(slice) | Repr::Blob(slice, _) => slice,
            Repr::Memory { view, family, mem, value } => {
                view.version.families[*family].mems[*mem].value(value)
            }
            Repr::Empty => &[],
        }
    }
}

impl std::fmt::Debug for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Value({} bytes)", self.len())
    }
}
