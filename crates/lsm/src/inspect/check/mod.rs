//! Reads and verifies a whole database: `millrace kv check`.
//!
//! 1. CURRENT, the MANIFEST and the logs are replayed as at an opening.
//! 2. Every table of the MANIFEST is read from its first block to its footer. Checked are the
//!    checksums of all blocks, including filters and partitions; that entries are in strict order
//!    and inside the file's bounds; that counts match the properties; and that the table's own
//!    filter finds every key.
//! 3. Every live blob file is read record by record, before the tables: each reference in them must
//!    name a record, with its key and length.
//! 4. The OPTIONS file must be whole: writers refuse a part of one.
//!
//! Damage does not end the check: it is noted with file and offset, and the check continues.

pub(crate) mod blob_records;
mod blobs;
pub(crate) mod table;

use std::path::Path;

use fs::Dir;
use reactor::Core;
use rocksfmt::{ColumnFamily, Comparator, FileMeta, FileName, ManifestState, SEQUENCE_MAX};

use crate::error::{Error, Kind, Result};
use crate::open::blob_tails::{self, BlobTails};
use crate::open::directory::lock_shared;
use crate::open::recover;
use crate::open::recovery_plan::{Listed, RecoveryPlan};
use crate::open::unnamed;
use crate::options::OpenOptions;
use crate::stored_options::StoredOptions;
use crate::table::Table;

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Name of the file.
    pub file: String,
    /// Offset in it, if known.
    pub offset: Option<u64>,
    /// Expected against found.
    pub what: String,
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// Files read.
    pub files: u64,
    /// Bytes read and verified.
    pub bytes: u64,
    /// Blocks verified.
    pub blocks: u64,
    /// Entries of tables and logs, and blob records.
    pub entries: u64,
    /// What is damaged.
    pub damages: Vec<Damage>,
    /// Oddities that need not be damage.
    pub warnings: Vec<String>,
}

/// Most damages listed per file; further ones are not listed.
pub(super) const DAMAGES_PER_FILE: usize = 16;

/// Reads and verifies the database in `path`. Calls `progress` from time to time with the bytes
/// done and the total bytes. Suspends for every read.
///
/// # Errors
/// Only those that prevent any check: no database, a lock, a directory that cannot be listed.
pub async fn check(
    core: &Core,
    path: &Path,
    options: &OpenOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<CheckReport> {
    let dir = Dir::new(core, path);
    let mut check = Check::new(core, &dir, 0, &mut progress);
    check.run(options).await?;
    Ok(check.report)
}

/// Reads and verifies a table that is in no database. Calls `progress` as [`check`] does. Suspends
/// for every read.
///
/// # Errors
/// If the file cannot be opened or is not a table.
pub async fn check_file(
    core: &Core,
    path: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<CheckReport> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let dir = Dir::new(core, parent.unwrap_or(Path::new(".")));
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let size_bytes = dir.open(&name).await.map_err(|e| Error::io(path.display(), &e))?.size();
    let properties = Table::properties(core, &dir, &name).await?;
    let comparator = Comparator::from_name(&properties.comparator);
    let comparator = comparator.map_err(|e| Error::format(path.display(), &e))?;
    let mut check = Check::new(core, &dir, size_bytes, &mut progress);
    check.report.files = 1;
    // Without bounds, none are checked. In a file to be ingested all sequence numbers are 0.
    let largest_sequence = if properties.external_version.is_some() { 0 } else { SEQUENCE_MAX };
    let meta = FileMeta { largest_sequence, ..FileMeta::of_size(size_bytes) };
    check.table(&name, &meta, comparator, None).await?;
    check.progress_to(size_bytes);
    Ok(check.report)
}

/// A check at work.
pub(super) struct Check<'a> {
    core: &'a Core,
    dir: &'a Dir,
    pub report: CheckReport,
    progress: &'a mut dyn FnMut(u64, u64),
    /// The blob files that we wrote.
    pub blob_tails: BlobTails,
    /// Bytes done, and the total.
    pub done: u64,
    total: u64,
}

impl<'a> Check<'a> {
    /// A check of files of a directory that have `total` bytes.
    pub fn new(
        core: &'a Core,
        dir: &'a Dir,
        total: u64,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Check<'a> {
        let (report, blob_tails) = (CheckReport::default(), BlobTails::new());
        Check { core, dir, report, progress, blob_tails, done: 0, total }
    }
}

impl Check<'_> {
    async fn run(&mut self, options: &OpenOptions) -> Result<()> {
        let current = match recover::current(self.dir).await {
            Ok(current) => current,
            Err(error) if error.kind() == Kind::Corruption => {
                self.report.note("CURRENT", None, &error);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let _lock = if options.secondary { None } else { Some(lock_shared(self.dir).await?) };
        let entries =
            self.dir.list().await.map_err(|e| Error::io(self.dir.path().display(), &e))?;
        let listed: Vec<Listed> = entries
            .iter()
            .map(|entry| Listed { name: entry.name.clone(), size_bytes: entry.size })
            .collect();
        let manifest = FileName::Manifest(current).to_string();
        let state = match recover::manifest(self.core, self.dir, &manifest).await {
            Ok(state) => state,
            Err(error) => {
                self.report.note(&manifest, offset_in(&error), &error);
                return Ok(());
            }
        };
        if !options.secondary
            && let Some(what) =
                unnamed::lost_end(self.core, self.dir, &manifest, &state, &entries).await?
        {
            self.report.note(&manifest, None, &what);
        }
        self.report.files += 2;
        self.total = total_bytes(&state, &listed);
        let stored_options = StoredOptions::read(self.dir, &entries).await?;
        let families = state.column_families.values().map(|family| &family.name);
        if let Some((name, lacks)) = stored_options.name.clone().zip(stored_options.lacks(families))
        {
            self.report.note(&name, None, &format!("{name} {lacks}"));
        }
        match RecoveryPlan::new(&state, &listed) {
            Ok(mut plan) => {
                let has_lock = listed.iter().any(|file| file.name == "LOCK");
                self.report.warnings.extend(plan.lacks_log(&state, has_lock));
                plan.empty_logs_may_count = stored_options.keeps_logs_at_openings();
                plan.blob_tails = blob_tails::read(self.core, self.dir, &state).await?;
                self.blob_tails.clone_from(&plan.blob_tails);
                self.logs(plan, &state, options, &manifest).await;
            }
            Err(error) => self.report.note(&file_in(&error, &manifest), None, &error),
        }
        for family in state.column_families.values() {
            self.family(family, &listed, &manifest).await;
        }
        self.progress_to(self.total);
        Ok(())
    }

    pub fn progress_to(&mut self, done: u64) {
        self.done = done;
        (self.progress)(done, self.total);
    }

    /// Replays the logs.
    async fn logs(
        &mut self,
        plan: RecoveryPlan,
        state: &ManifestState,
        options: &OpenOptions,
        manifest: &str,
    ) {
        let bytes = plan.log_bytes();
        self.total += bytes;
        self.progress_to(self.done);
        let strict = OpenOptions { salvage: false, ..options.clone() };
        // A replayed piece is not needed any more.
        let piece = async |_| Ok(());
        let (core, dir, report) = (self.core, self.dir, &mut self.report);
        match recover::logs(core, dir, &plan, state, &strict, &mut report.warnings, piece).await {
            Ok(replayed) => {
                report.files += plan.logs.len() as u64;
                report.bytes += bytes;
                report.entries += replayed.operations;
            }
            Err(error) => report.note(&file_in(&error, manifest), offset_in(&error), &error),
        }
        self.progress_to(self.done + bytes);
    }

    /// Reads a family's tables and blob files.
    async fn family(&mut self, family: &ColumnFamily, listed: &[Listed], manifest: &str) {
        let comparator = match family.comparator() {
            Ok(comparator) => comparator,
            Err(error) => return self.report.note(manifest, None, &error),
        };
        let blobs = family.live_blob_files().map(|blob| FileName::Blob(blob.number).to_string());
        let is_there = |name: &str| listed.iter().any(|file| file.name == name);
        for name in blobs.filter(|name| !is_there(name)) {
            self.report.note(&name, None, &format!("{name} is missing"));
        }
        let records = self.blob_files(family, listed).await;
        for (_, meta) in family.files() {
            let old = format!("{:06}.ldb", meta.number);
            let name = if listed.iter().any(|file| file.name == old) {
                old
            } else {
                FileName::Sst(meta.number).to_string()
            };
            let before = self.done;
            if let Err(error) = self.table(&name, meta, comparator, Some(&records)).await {
                self.report.note(&name, offset_in(&error), &error);
            }
            self.report.files += 1;
            self.progress_to(before + meta.size_bytes);
        }
    }
}

impl CheckReport {
    fn note(&mut self, file: &str, offset: Option<u64>, what: &dyn std::fmt::Display) {
        let of_file = self.damages.iter().filter(|damage| damage.file == file).count();
        if of_file < DAMAGES_PER_FILE {
            let what = what.to_string();
            self.damages.push(Damage { file: file.to_owned(), offset, what });
        }
    }
}

/// The first offset in an error's text ("at offset 5" or "at 5"), if any.
fn offset_in(error: &Error) -> Option<u64> {
    let text = error.to_string();
    text.split(" at ").skip(1).find_map(|rest| {
        let rest = rest.strip_prefix("offset ").unwrap_or(rest);
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..digits].parse().ok()
    })
}

/// The file that an error's text begins with, or `otherwise`.
fn file_in(error: &Error, otherwise: &str) -> String {
    let text = error.to_string();
    let end = text.find([' ', ':']).unwrap_or(text.len());
    match FileName::parse(&text[..end]) {
        Some(_) => text[..end].to_owned(),
        None => otherwise.to_owned(),
    }
}

fn total_bytes(state: &ManifestState, listed: &[Listed]) -> u64 {
    let tables: u64 = state
        .column_families
        .values()
        .flat_map(|family| family.files())
        .map(|(_, meta)| meta.size_bytes)
        .sum();
    let blobs: u64 = listed
        .iter()
        .filter(|file| matches!(FileName::parse(&file.name), Some(FileName::Blob(_))))
        .map(|file| file.size_bytes)
        .sum();
    tables + blobs
}
