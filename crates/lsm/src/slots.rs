//! The tables of a version by number of their slots.
//!
//! A version is copied for every change, and a database may have a hundred thousand tables. So the
//! slots are in chunks that versions share: a change copies the chunks that it touches, and the
//! list of chunks.

use std::ops::Index;
use std::sync::Arc;

use crate::version::Slot;

/// Slots of a chunk.
pub(crate) const CHUNK: usize = 128;

/// The slots of a version.
#[derive(Clone, Default)]
pub(crate) struct Slots {
    /// All but the last have [`CHUNK`] slots.
    chunks: Vec<Arc<Vec<Slot>>>,
    /// Those that are unused.
    free: Vec<u32>,
}

impl From<Vec<Slot>> for Slots {
    fn from(all: Vec<Slot>) -> Slots {
        let mut slots = Slots::default();
        all.into_iter().for_each(|slot| slots.push(slot));
        slots
    }
}

impl Slots {
    /// The number of slots, unused ones included.
    pub fn len(&self) -> usize {
        match self.chunks.split_last() {
            Some((last, full)) => full.len() * CHUNK + last.len(),
            None => 0,
        }
    }

    pub fn get(&self, at: usize) -> Option<&Slot> {
        self.chunks.get(at / CHUNK)?.get(at % CHUNK)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Slot> {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }

    /// The chunks, in the order of their slots.
    pub fn chunks(&self) -> &[Arc<Vec<Slot>>] {
        &self.chunks
    }

    /// Puts something into an unused slot; returns its number.
    pub fn put(&mut self, slot: Slot) -> u32 {
        match self.free.pop() {
            Some(free) => {
                *self.at_mut(free) = slot;
                free
            }
            None => {
                let at = self.len() as u32;
                self.push(slot);
                at
            }
        }
    }

    /// Empties a slot.
    pub fn free(&mut self, at: u32) {
        *self.at_mut(at) = Slot::Free;
        self.free.push(at);
    }

    fn at_mut(&mut self, at: u32) -> &mut Slot {
        &mut Arc::make_mut(&mut self.chunks[at as usize / CHUNK])[at as usize % CHUNK]
    }

    fn push(&mut self, slot: Slot) {
        match self.chunks.last_mut() {
            Some(last) if last.len() < CHUNK => Arc::make_mut(last).push(slot),
            _ => self.chunks.push(Arc::new(vec![slot])),
        }
    }
}

impl Index<usize> for Slots {
    type Output = Slot;

    #[inline]
    fn index(&self, at: usize) -> &Slot {
        &self.chunks[at / CHUNK][at % CHUNK]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, Kind};

    fn slot(number: u64) -> Slot {
        Slot::Broken {
            meta: Box::new(rocksfmt::testing::file_meta(number, b"a", b"b", (0, 0))),
            error: Error::new(Kind::Io, "none"),
        }
    }

    #[test]
    fn a_change_copies_only_what_it_touches() {
        let mut slots = Slots::from((0..1000).map(slot).collect::<Vec<_>>());
        let before = slots.clone();
        slots.free(500);
        assert_eq!(slots.put(slot(7777)), 500);
        assert_eq!(slots.put(slot(8888)), 1000);
        assert_eq!((slots.len(), before.len()), (1001, 1000));
        assert_eq!((slots[500].meta().number, before[500].meta().number), (7777, 500));
        assert_eq!(slots.iter().count(), 1001);
        let pairs = slots.chunks().iter().zip(before.chunks());
        let copied = pairs.filter(|(a, b)| !Arc::ptr_eq(a, b)).count();
        assert_eq!(copied, 2);
    }
}
