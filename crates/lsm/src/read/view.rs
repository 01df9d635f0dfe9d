//! One core's access to the files of a version.

use std::rc::Rc;
use std::sync::Arc;

use fs::File;
use reactor::Core;

use crate::error::{Error, Kind, Result};
use crate::slots::CHUNK;
use crate::table::Table;
use crate::version::{Family, Slot, Version};

/// One core's view of a version: its own handle on every file.
pub(crate) struct View {
    pub version: Arc<Version>,
    /// By chunk of [`crate::slots::Slots`].
    files: Vec<Rc<[Option<File>]>>,
    /// The blob files of each family, in the order of [`crate::version::Family::blobs`].
    pub blobs: Vec<Rc<[File]>>,
}

impl View {
    /// Attaches this core to a version's files; reuses the handles of an older view.
    pub fn new(core: &Core, version: Arc<Version>, older: Option<&View>) -> View {
        let known = |chunk: usize, at: usize, table: &Arc<Table>| {
            let older = older?;
            match older.version.slots.chunks().get(chunk)?.get(at)? {
                Slot::Open(other) if Arc::ptr_eq(other, table) => {
                    older.files.get(chunk)?.get(at)?.clone()
                }
                _ => None,
            }
        };
        let attach = |(number, chunk): (usize, &Arc<Vec<Slot>>)| -> Rc<[Option<File>]> {
            if let Some(older) = older
                && let Some(same) = older.version.slots.chunks().get(number)
                && Arc::ptr_eq(same, chunk)
            {
                return older.files[number].clone();
            }
            let file = |(at, slot): (usize, &Slot)| match slot {
                Slot::Open(table) => {
                    known(number, at, table).or_else(|| Some(core.attach(&table.file)))
                }
                Slot::Broken { .. } | Slot::Free => None,
            };
            chunk.iter().enumerate().map(file).collect()
        };
        let files = version.slots.chunks().iter().enumerate().map(attach).collect();
        let attach = |family: &Arc<Family>| -> Rc<[File]> {
            if let Some(older) = older
                && let Some(at) = older.version.families.place(family.id)
                && Arc::ptr_eq(&older.version.families[at], family)
            {
                return older.blobs[at].clone();
            }
            family.blobs.iter().map(|(_, blob)| core.attach(&blob.file)).collect()
        };
        let blobs = version.families.iter().map(attach).collect();
        View { version, files, blobs }
    }

    /// This core's handle on an open table's file.
    #[inline]
    pub fn file(&self, slot: u32) -> Result<&File> {
        match &self.files[slot as usize / CHUNK][slot as usize % CHUNK] {
            Some(file) => Ok(file),
            None => Err(self
                .version
                .table(slot)
                .err()
                .unwrap_or_else(|| Error::new(Kind::Corruption, "an open table has no file"))),
        }
    }
}
