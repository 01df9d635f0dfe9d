//! The tables of a sorted run that an iterator goes through. Those of a level are the version's, so
//! that a new iterator costs the same however many there are. They are reached through the core's
//! own view: a reference count of the version's would be written by all cores.

use std::ops::Deref;
use std::rc::Rc;

use crate::read::view::View;
use crate::version::{Level, Version};

/// The slots of a sorted run, by smallest key.
pub(crate) enum Run {
    /// All tables of a sorted level of a family, by its place.
    Level { view: Rc<View>, family_at: usize, depth: usize },
    /// Some tables of one.
    Tables(Box<[u32]>),
    /// A table of level 0.
    Table([u32; 1]),
}

impl Run {
    /// The largest sequence of its tables, or more.
    pub fn largest_sequence(&self, version: &Version) -> u64 {
        match self {
            Run::Level { view, family_at, depth } => {
                level(view, *family_at, *depth).largest_sequence()
            }
            tables => {
                let all = tables.iter().map(|&slot| version.meta(slot).largest_sequence);
                all.max().unwrap_or(0)
            }
        }
    }
}

fn level(view: &View, family_at: usize, depth: usize) -> &Level {
    &view.version.families[family_at].levels[depth]
}

impl Deref for Run {
    type Target = [u32];

    #[inline]
    fn deref(&self) -> &[u32] {
        match self {
            Run::Level { view, family_at, depth } => &level(view, *family_at, *depth).slots,
            Run::Tables(tables) => tables,
            Run::Table(table) => table,
        }
    }
}

impl From<Vec<u32>> for Run {
    fn from(tables: Vec<u32>) -> Run {
        Run::Tables(tables.into())
    }
}
