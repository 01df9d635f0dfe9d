//! Turns at the MANIFEST: one task at a time changes it, and no table is added or removed without
//! a turn.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use reactor::Event;
use rocksfmt::{FileName, ManifestReplay, VersionEdit};

use crate::error::Result;
use crate::file_list::FilePrefix;
use crate::version::Version;
use crate::write::blob_anchor;
use crate::write::manifest_writer::{ManifestWriter, added_by};
use crate::write::retry::Task;
use crate::write::state::WriteState;

/// The MANIFEST, for the task whose turn it is.
pub(crate) struct SharedManifest {
    /// `None` during a turn.
    writer: RefCell<Option<ManifestWriter>>,
    /// Notified when a turn has ended.
    returned: Event,
    /// Batches wait until the MANIFEST is decided.
    holds_writes: Cell<bool>,
}

impl SharedManifest {
    pub fn new(writer: ManifestWriter) -> SharedManifest {
        SharedManifest {
            writer: RefCell::new(Some(writer)),
            returned: Event::default(),
            holds_writes: Cell::new(false),
        }
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

impl WriteState {
    /// A change of the contents has failed. If it may be there after a crash, no batch may follow
    /// it before the MANIFEST is decided.
    pub fn hold_writes(&self) {
        self.manifest.holds_writes.set(self.retries.error(Task::Manifest).is_some());
    }

    /// Whether no batch may be written: see [`WriteState::hold_writes`].
    pub fn holds_writes(&self) -> bool {
        let holds =
            self.manifest.holds_writes.get() && self.retries.error(Task::Manifest).is_some();
        self.manifest.holds_writes.set(holds);
        holds
    }

    /// Notes the result of a write of the MANIFEST.
    fn note_manifest(&self, manifest: &mut ManifestWriter, result: &Result<()>) {
        match result {
            Err(error) if manifest.is_undecided() => self.note_failure(Task::Manifest, error),
            Err(_) => {}
            Ok(()) => {
                self.retries.set_manifest_heals(manifest.heals());
                self.note_success(Task::Manifest);
            }
        }
        self.remove_files(manifest.take_obsolete());
    }
}

impl ManifestTurn<'_> {
    /// Makes a change durable, one edit for each column family, and publishes it to every read that
    /// begins from then on. Suspends for the disk.
    ///
    /// # Errors
    /// Those of [`ManifestWriter::append`]. Then nothing is published, and the new files of the
    /// change are removed: immediately, or when it is known that the MANIFEST does not name them.
    pub async fn change(
        mut self,
        mut edits: Vec<VersionEdit>,
        apply: impl FnOnce(&mut Version),
    ) -> Result<()> {
        let Some(manifest) = &mut self.manifest else {
            unreachable!("a turn has the manifest until it ends")
        };
        let kept = edits.iter_mut().try_for_each(|edit| {
            let in_logs = self.state.blobs.in_logs(edit.column_family);
            blob_anchor::keep(manifest.state(), edit, &in_logs)
        });
        self.state.blobs.wants_flush.set(kept.is_err());
        if let Err(error) = kept {
            self.state.queue.arrived.notify_all();
            self.state.remove_files(added_by(&edits));
            return Err(error);
        }
        let families: Vec<u32> = edits.iter().map(|edit| edit.column_family).collect();
        let appended = manifest.append(&self.state.db, edits).await;
        self.state.note_manifest(manifest, &appended);
        appended?;
        self.state.note_blob_files(manifest.state(), families.iter().copied());
        let mut dead = Vec::new();
        self.state.db.publish(|version| {
            apply(version);
            for id in families {
                if version.families.find(id).is_none_or(|family| family.blobs.is_empty()) {
                    continue;
                }
                let Some(family) = version.families.find_mut(id) else { continue };
                let live = manifest.state().live_blob_files(id);
                let live: BTreeSet<u64> = live.iter().map(|blob| blob.number).collect();
                family.blobs.retain(|(number, _)| {
                    let is_live = live.contains(number);
                    if !is_live {
                        dead.push(FileName::Blob(*number));
                    }
                    is_live
                });
            }
        });
        self.state.remove_files(dead);
        Ok(())
    }

    /// The number of the MANIFEST and its length, unless it is still to be begun.
    pub fn file(&self) -> Option<FilePrefix> {
        self.manifest.as_ref().and_then(ManifestWriter::written)
    }

    /// Replaces the MANIFEST if a write of it has failed. Suspends for the disk.
    pub async fn decide(mut self) -> Result<()> {
        let Some(manifest) = &mut self.manifest else {
            unreachable!("a turn has the manifest until it ends")
        };
        let decided = manifest.decide(&self.state.db).await;
        self.state.note_manifest(manifest, &decided);
        decided
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
