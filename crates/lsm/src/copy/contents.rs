//! The files that a MANIFEST names.

use fs::Dir;
use reactor::Core;
use rocksfmt::{BLOB_FOOTER_BYTES, BlobFooter, FileName, OPTIONS_BYTES_MAX};

use crate::error::{Error, Kind, Result};
use crate::file_list::FileList;
use crate::open::recover;
use crate::open::recovery_plan::{Listed, RecoveryPlan};

/// A file of a database.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub number: u64,
    /// Its name in the database's directory.
    pub name: String,
    /// Its length in a copy.
    pub bytes: u64,
    /// It may be written to meanwhile: a copy is a part of it and a footer.
    pub part: Option<Part>,
}

/// The first bytes of a file, and those that follow in a copy.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub bytes: u64,
    pub footer: [u8; BLOB_FOOTER_BYTES],
}

impl Source {
    fn whole(number: u64, name: String, bytes: u64) -> Source {
        Source { number, name, bytes, part: None }
    }

    /// The bytes to be copied if that is not all of them, and those that follow.
    pub fn prefix(&self) -> (Option<u64>, &[u8]) {
        match &self.part {
            Some(part) => (Some(part.bytes), &part.footer),
            None => (None, &[]),
        }
    }
}

/// The files of a database besides its MANIFEST and its logs.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub tables: Vec<Source>,
    pub blobs: Vec<Source>,
    /// The newest OPTIONS file.
    pub options: Option<Source>,
    /// The identity of the database, if its MANIFEST states it.
    pub db_id: Option<String>,
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
        let mut contents = Contents { db_id: manifest.db_id.clone(), ..Contents::default() };
        for entry in entries.iter().filter(|entry| entry.size <= OPTIONS_BYTES_MAX as u64) {
            if let Some(FileName::Options(number)) = FileName::parse(&entry.name)
                && contents.options.as_ref().is_none_or(|newest| newest.number < number)
            {
                contents.options = Some(Source::whole(number, entry.name.clone(), entry.size));
            }
        }
        let listed = |entry: fs::DirEntry| Listed { name: entry.name, size_bytes: entry.size };
        let listed: Vec<Listed> = entries.into_iter().map(listed).collect();
        let plan = RecoveryPlan::new(&manifest, &listed)?;
        if let Some(missing) = plan.blobs_missing.first() {
            let what = format!("{} is missing", FileName::Blob(*missing));
            return Err(Error::new(Kind::Corruption, what));
        }
        if let Some(error) = plan.damaged.into_values().next() {
            return Err(error);
        }
        let families = manifest.column_families.values();
        for (_, meta) in families.flat_map(|family| family.files()) {
            let Some(name) = plan.tables.get(&meta.number).cloned() else { continue };
            contents.tables.push(Source::whole(meta.number, name, meta.size_bytes));
        }
        for (&number, blob) in &plan.blobs {
            let mut source = Source::whole(number, blob.name.clone(), blob.size_bytes);
            if let Some(open) = list.open_blobs.iter().find(|open| open.number == number) {
                let footer = BlobFooter { count: open.count }.encode();
                source.bytes = open.end + footer.len() as u64;
                source.part = Some(Part { bytes: open.end, footer });
            }
            contents.blobs.push(source);
        }
        Ok(contents)
    }

    /// Bytes of all these files.
    pub fn bytes(&self) -> u64 {
        let files = self.tables.iter().chain(&self.blobs).chain(&self.options);
        files.map(|file| file.bytes).sum()
    }
}
