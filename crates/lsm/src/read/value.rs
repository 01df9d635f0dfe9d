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
    /// In memtable `mem` of family `family` of the view (both are indexes).
    Memory {
        view: Rc<View>,
        family: usize,
        mem: usize,
        value: MemValue,
    },
    Empty,
}

impl Value {
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
            Repr::Block(slice) => Some(slice),
            Repr::Memory { .. } | Repr::Empty => None,
        }
    }

    /// A part of the value.
    pub(crate) fn part(&self, range: Range<usize>) -> Value {
        match &self.0 {
            Repr::Block(slice) => Value(Repr::Block(slice.slice(range))),
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
            Repr::Block(slice) => slice,
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
