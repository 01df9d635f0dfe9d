//! The files that a MANIFEST names.

use fs::Dir;
use reactor::Core;
use rocksfmt::{FileName, OPTIONS_BYTES_MAX};

use crate::error::{Error, Kind, Result};
use crate::file_list::FileList;
use crate::open::recover;
use crate::open::recovery_plan::{Listed, RecoveryPlan};

/// A file of a database that is never changed.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub number: u64,
    /// Its name in the database's directory.
    pub name: String,
    pub bytes: u64,
}

/// The files of a database besides its MANIFEST and its logs.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub tables: Vec<Source>,
    pub blobs: Vec<Source>,
    /// The newest OPTIONS file.
    pub options: Option<Source>,
}

impl Contents {
    /// Finds the files that the copy of a MANIFEST in `copy` names. Suspends for the disk.
    ///
    /// # Errors
    /// A file is missing or has another length, is in another directory, or the copy cannot be
    /// read.
    pub async fn of(core: &Core, list: &FileList, copy: &Dir) -> Result<Contents> {
        let manifest = FileName::Manifest(list.manifest.number).to_string();
        let manifest = recover::manifest(core, copy, &manifest).await?;
        let from = Dir::new(core, &list.directory);
        let failed = |e: std::io::Error| {
            Error::io(format_args!("cannot list {}", list.directory.display()), &e)
        };
        let entries = from.list().await.map_err(failed)?;
        let mut contents = Contents::default();
        for entry in entries.iter().filter(|entry| entry.size <= OPTIONS_BYTES_MAX as u64) {
            if let Some(FileName::Options(number)) = FileName::parse(&entry.name)
                && contents.options.as_ref().is_none_or(|newest| newest.number < number)
            {
                let (name, bytes) = (entry.name.clone(), entry.size);
                contents.options = Some(Source { number, name, bytes });
            }
        }
        let listed = |entry: fs::DirEntry| Listed { name: entry.name, size_bytes: entry.size };
        let listed: Vec<Listed> = entries.into_iter().map(listed).collect();
        let plan = RecoveryPlan::new(&manifest, &listed)?;
        if let Some(missing) = plan.blobs_missing.first() {
            let what = format!("{} is missing", FileName::Blob(*missing));
            return Err(Error::new(Kind::Corruption, what));
        }
        let families = manifest.column_families.values();
        for (_, meta) in families.flat_map(|family| family.files()) {
            let Some(name) = plan.tables.get(&meta.number).cloned() else { continue };
            contents.tables.push(Source { number: meta.number, name, bytes: meta.size_bytes });
        }
        for (&number, blob) in &plan.blobs {
            let (name, bytes) = (blob.name.clone(), blob.size_bytes);
            contents.blobs.push(Source { number, name, bytes });
        }
        Ok(contents)
    }

    /// Bytes of all these files.
    pub fn bytes(&self) -> u64 {
        let files = self.tables.iter().chain(&self.blobs).chain(&self.options);
        files.map(|file| file.bytes).sum()
    }
}
