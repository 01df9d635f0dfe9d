//! Files and directories that a database uses outside its directory.

use std::path::{Path, PathBuf};

use rocksfmt::{FileName, OPTIONS_BYTES_MAX, OptionsFile};

/// The paths outside its directory that a database reads: targets of its symbolic links, and the
/// directory of `wal_dir`, which is only listed. Called by a process that gives up access to all
/// other paths before it opens the database. Does not suspend and uses no core; unreadable entries
/// are omitted.
#[expect(clippy::disallowed_methods, reason = "for a process that has no core yet")]
pub fn outside(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let (mut paths, mut newest) = (Vec::new(), None);
    for entry in entries.flatten() {
        let file = entry.file_name();
        let Some(file) = file.to_str().and_then(FileName::parse) else { continue };
        if let FileName::Options(number) = file {
            newest = newest.max(Some((number, entry.path())));
        }
        if entry.file_type().is_ok_and(|kind| kind.is_symlink())
            && let Ok(leads_to) = std::fs::canonicalize(entry.path())
            && leads_to.is_file()
        {
            paths.push(leads_to);
        }
    }
    if let Some((_, name)) = newest
        // Opening a pipe would block.
        && std::fs::metadata(&name)
            .is_ok_and(|meta| meta.is_file() && meta.len() <= OPTIONS_BYTES_MAX as u64)
        && let Ok(text) = std::fs::read(name)
        && let Some(logs) = OptionsFile::parse(&text).db("wal_dir").map(Path::new)
        && logs.is_dir()
    {
        paths.push(logs.to_owned());
    }
    paths
}
