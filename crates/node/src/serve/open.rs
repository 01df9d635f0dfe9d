//! Opens a database, with errors that help.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use lsm::{Db, OpenOptions, WriteOptions, Writer};
use reactor::Core;

use crate::error::{Error, Kind};
use crate::machine::pseudo_file;

/// Opens the database in a directory. Suspends for all reads.
///
/// # Errors
/// As for [`Db::open`], with advice.
pub async fn open(core: &Core, path: &Path, options: OpenOptions) -> Result<Db, Error> {
    Db::open(core, path, options).await.map_err(|error| explain(path, &error))
}

/// Opens the database in a directory for writing. If it may be created (`write.create`), so may its
/// directory, in an existing one. The caller agrees before anything is changed: see
/// [`Db::open_for_writing_if`]. Suspends for all reads.
///
/// # Errors
/// As for [`Db::open_for_writing_if`], with advice.
pub async fn open_for_writing<T>(
    core: &Core,
    path: &Path,
    options: OpenOptions,
    write: WriteOptions,
    agrees: impl AsyncFn(&Db) -> lsm::Result<T>,
) -> Result<(Db, Writer, T), Error> {
    let explain = |error| explain(path, &error);
    if write.create && is_missing(core, path).await {
        let new = Db::before_creation(core, path, &options, &write).await.map_err(explain)?;
        agrees(&new).await.map_err(explain)?;
        make_directory(core, path).await.map_err(|error| no_directory(path, &error))?;
    }
    Db::open_for_writing_if(core, path, options, write, agrees).await.map_err(explain)
}

async fn is_missing(core: &Core, path: &Path) -> bool {
    core.list(path).await.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// The error when a database's directory cannot be created.
pub(crate) fn no_directory(path: &Path, error: &io::Error) -> Error {
    Error::new(Kind::System, format!("cannot create directory {}: {error}", path.display()))
        .hint("the directory above it must exist and be writable")
}

/// Creates a directory, durably, unless it exists.
async fn make_directory(core: &Core, path: &Path) -> io::Result<()> {
    match core.create_dir(path).await {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
        Ok(()) => match path.parent() {
            Some(parent) if parent.as_os_str().is_empty() => core.sync_dir(Path::new(".")).await,
            Some(parent) => core.sync_dir(parent).await,
            None => Ok(()),
        },
    }
}

/// An error of the engine, with advice.
pub fn explain(path: &Path, error: &lsm::Error) -> Error {
    let mut what = error.to_string();
    let directory = path.display().to_string();
    if !what.contains(&directory) {
        what = format!("{directory}: {what}");
    }
    match error.kind() {
        lsm::Kind::NoDatabase => Error::new(Kind::NoDatabase, what).hint(no_database(path)),
        lsm::Kind::Locked => {
            let holder = lock_holder(path).unwrap_or_else(|| "another process".into());
            Error::new(
                Kind::Locked,
                format!("{}: {holder} has this database open for writing", path.display()),
            )
            .hint("close it there; millrace serve --read-only --secondary, kv get, kv scan and others with \
                 --secondary read its state as of now")
        }
        lsm::Kind::Corruption => Error::new(Kind::Damaged, what).hint(format!(
            "millrace kv check --data {0} lists all that is damaged; millrace kv check --data {0} \
             --repair drops what cannot be read and keeps the rest (add --dry-run to see what)",
            path.display()
        )),
        lsm::Kind::Unsupported => Error::new(Kind::Unsupported, what),
        // The logs exceed the memory: read-only does not help either, and the text says what does.
        lsm::Kind::Full if what.contains("raise --memory") => Error::new(Kind::System, what),
        lsm::Kind::Full => {
            Error::new(Kind::System, what).hint("make space; millrace serve --read-only needs none")
        }
        lsm::Kind::Older => Error::new(Kind::Unsupported, what).hint(
            "--adopt takes it over all the same; millrace serve --read-only changes nothing in it",
        ),
        lsm::Kind::UnknownColumnFamily => {
            Error::new(Kind::Usage, what).hint("millrace kv column-families create makes one")
        }
        lsm::Kind::Memory => Error::new(Kind::System, what)
            .hint("large values, and what is done with many of them, need more --memory"),
        lsm::Kind::Io | lsm::Kind::Expired | lsm::Kind::Conflict => Error::new(Kind::System, what),
    }
}

#[expect(clippy::disallowed_methods, reason = "looks for the cause after the start has failed")]
fn no_database(path: &Path) -> String {
    match std::fs::metadata(path) {
        Err(_) => format!("there is no directory {}", path.display()),
        Ok(meta) if !meta.is_dir() => {
            "name the directory that holds the files CURRENT and MANIFEST-...".to_owned()
        }
        Ok(_) => {
            let subdirectory = std::fs::read_dir(path).ok().and_then(|entries| {
                entries
                    .filter_map(|entry| Some(entry.ok()?.path()))
                    .filter(|entry| entry.join("CURRENT").is_file())
                    .min()
            });
            match subdirectory {
                Some(dir) => format!("did you mean {}?", dir.display()),
                None => "a RocksDB directory has a file named CURRENT; this one has none. \
                         Commands that write make a new database in an empty or missing \
                         directory: name one"
                    .to_owned(),
            }
        }
    }
}

/// The holder of a database's lock, as far as the kernel tells.
#[expect(clippy::disallowed_methods, reason = "looks for the cause after the start has failed")]
fn lock_holder(path: &Path) -> Option<String> {
    let meta = std::fs::metadata(path.join("LOCK")).ok()?;
    let locks = pseudo_file(Path::new("/proc/locks"))?;
    let pid = holder_of(&locks, meta.dev(), meta.ino())?;
    let name = pseudo_file(Path::new(&format!("/proc/{pid}/comm")))?;
    Some(format!("process {pid} ({})", name.trim()))
}

/// The process that holds a write lock on an inode, from lines such as `1: POSIX  ADVISORY  WRITE
/// 1234 fe:01:12345 0 EOF`.
fn holder_of(locks: &str, dev: u64, inode: u64) -> Option<u32> {
    // The kernel's encoding of a device number.
    let major = ((dev >> 8) & 0xfff) | ((dev >> 32) & !0xfff);
    let minor = (dev & 0xff) | ((dev >> 12) & !0xff);
    let place = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "WRITE")?;
        (words.get(at + 2) == Some(&place.as_str())).then(|| words[at + 1].parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found_by_device_and_inode() {
        let locks = "1: POSIX  ADVISORY  WRITE 1234 fe:01:555 0 EOF\n\
                     2: POSIX  ADVISORY  READ  99 fe:01:777 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 4321 fe:01:777 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 8 fe:01:778 0 EOF\n";
        assert_eq!(holder_of(locks, 0xfe01, 555), Some(1234));
        assert_eq!(holder_of(locks, 0xfe01, 777), Some(4321));
        assert_eq!(holder_of(locks, 0xfe01, 1), None);
    }

    #[test]
    fn engine_errors_get_advice() {
        let path = Path::new("/nowhere/at/all");
        let error = |kind| explain(path, &lsm::Error::new(kind, "what"));
        assert!(error(lsm::Kind::NoDatabase).advice().unwrap().contains("no directory"));
        assert!(error(lsm::Kind::Locked).advice().unwrap().contains("--secondary"));
        assert!(error(lsm::Kind::Corruption).advice().unwrap().contains("kv check"));
        assert_eq!(error(lsm::Kind::Unsupported).kind(), Kind::Unsupported);
        assert!(error(lsm::Kind::Full).advice().unwrap().contains("--read-only"));
        let long = lsm::Error::new(lsm::Kind::Full, "logs: free 5 bytes, or raise --memory");
        assert_eq!(explain(path, &long).advice(), None);
    }
}
