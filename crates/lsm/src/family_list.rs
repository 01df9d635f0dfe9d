//! The column families of a version, by id.
//!
//! A version is copied for every change, and a database may have thousands of families. So versions
//! share families: a change copies those that it touches, and the list.

use std::ops::Deref;
use std::sync::Arc;

use crate::version::Family;

/// Column families, in the order of their ids.
#[derive(Clone, Default)]
pub(crate) struct FamilyList(Vec<Arc<Family>>);

impl FromIterator<Family> for FamilyList {
    fn from_iter<T: IntoIterator<Item = Family>>(all: T) -> FamilyList {
        let mut list = FamilyList(all.into_iter().map(Arc::new).collect());
        list.0.sort_by_key(|family| family.id);
        list
    }
}

impl Deref for FamilyList {
    type Target = [Arc<Family>];

    #[inline]
    fn deref(&self) -> &[Arc<Family>] {
        &self.0
    }
}

impl FamilyList {
    /// The index of the family with this id.
    #[inline]
    pub fn place(&self, id: u32) -> Option<usize> {
        match self.0.first() {
            Some(first) if first.id == id => Some(0),
            _ => self.0.binary_search_by_key(&id, |family| family.id).ok(),
        }
    }

    /// The family with this id.
    pub fn find(&self, id: u32) -> Option<&Arc<Family>> {
        self.place(id).map(|at| &self.0[at])
    }

    /// The family with this id, to change it.
    pub fn find_mut(&mut self, id: u32) -> Option<&mut Family> {
        self.place(id).map(|at| self.at_mut(at))
    }

    /// A family by its index, to change it.
    pub fn at_mut(&mut self, at: usize) -> &mut Family {
        Arc::make_mut(&mut self.0[at])
    }

    /// Adds a family with the largest id.
    pub fn push(&mut self, family: Family) {
        debug_assert!(self.0.last().is_none_or(|last| last.id < family.id), "ids ascend");
        self.0.push(Arc::new(family));
    }

    /// Removes the family with this id.
    pub fn remove(&mut self, id: u32) {
        if let Some(at) = self.place(id) {
            self.0.remove(at);
        }
    }
}
