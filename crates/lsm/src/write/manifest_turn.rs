//! Turns at the MANIFEST: one task at a time changes it, and no table is added or removed without
//! a turn.

use std::cell::RefCell;

use reactor::Event;
use rocksfmt::{FileName, ManifestReplay, VersionEdit};

use crate::error::Result;
use crate::file_list::FilePrefix;
use crate::version::Version;
use crate::write::manifest_writer::ManifestWriter;
use crate::write::state::WriteState;

/// The MANIFEST, for the task whose turn it is.
pub(crate) struct SharedManifest {
    /// `None` during a turn.
    writer: RefCell<Option<ManifestWriter>>,
    /// Notified when a turn has ended.
    returned: Event,
}

impl SharedManifest {
    pub fn new(writer: ManifestWriter) -> SharedManifest {
        SharedManifest { writer: RefCell::new(Some(writer)), returned: Event::default() }
    }
}

/// The only access to the MANIFEST.
pub(crate) struct ManifestTurn<'a> {
    state: &'a WriteState,
    manifest: Option<ManifestWriter>,
}

impl WriteState {
    /// Waits until no other task changes the MANIFEST.
    ///
    /// # Errors
    /// The error that ended all writing.
    pub async fn manifest_turn(&self) -> Result<ManifestTurn<'_>> {
        let shared = &self.manifest;
        shared.returned.wait_until(|| shared.writer.borrow().is_some()).await;
        match self.failure() {
            Some(error) => Err(error),
            None => Ok(ManifestTurn { state: self, manifest: shared.writer.take() }),
        }
    }
}

impl ManifestTurn<'_> {
    /// Makes a change durable, one edit for each column family, and publishes it to every read that
    /// begins from then on. Suspends for the disk.
    pub async fn change(
        mut self,
        edits: Vec<VersionEdit>,
        apply: impl FnOnce(&mut Version),
    ) -> Result<()> {
        let Some(manifest) = &mut self.manifest else {
            unreachable!("a turn has the manifest until it ends")
        };
        let families: Vec<u32> = edits.iter().map(|edit| edit.column_family).collect();
        manifest.append(&self.state.db, edits).await?;
        let mut dead = Vec::new();
        self.state.db.publish(|version| {
            apply(version);
            let mut changed = version.families.iter_mut();
            while let Some(family) = changed.find(|family| families.contains(&family.id)) {
                if family.blobs.is_empty() {
                    continue;
                }
                let live = manifest.state().live_blob_files(family.id);
                family.blobs.retain(|(number, _)| {
                    let is_live = live.iter().any(|blob| blob.number == *number);
                    if !is_live {
                        dead.push(FileName::Blob(*number));
                    }
                    is_live
                });
            }
        });
        dead.extend(manifest.take_replaced().into_iter().map(FileName::Manifest));
        self.state.remove_files(dead);
        Ok(())
    }

    /// The number of the MANIFEST and its length, unless it is still to be begun.
    pub fn file(&self) -> Option<FilePrefix> {
        self.manifest.as_ref().and_then(ManifestWriter::written)
    }

    /// The present state of the MANIFEST.
    pub fn state(&self) -> &ManifestReplay {
        match &self.manifest {
            Some(manifest) => manifest.state(),
            None => unreachable!("a turn has the manifest until it ends"),
        }
    }
}

impl Drop for ManifestTurn<'_> {
    fn drop(&mut self) {
        let shared = &self.state.manifest;
        shared.writer.replace(self.manifest.take());
        shared.returned.notify_all();
    }
}
