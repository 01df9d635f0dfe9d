//! Taking over what an older RocksDB wrote.
//!
//! What is written here is read by RocksDB 7.8 and newer. A database that an older one wrote last
//! may still be in use there, so it is changed only when somebody says so. Then a new OPTIONS file
//! notes the version from which on it can be read, with all options as they were: so it need not be
//! said again at the next opening.

use fs::Dir;
use rocksfmt::FileName;

use crate::db::{Db, newest_options_name};
use crate::error::{Error, Kind, Result};

/// The oldest RocksDB that reads what is written here.
const OLDEST: (u64, u64) = (7, 8);

/// Refuses a database that an older RocksDB wrote last, or, with `adopt`, notes that none such can
/// read it from now on.
pub(crate) async fn check(dir: &Dir, db: &Db, adopt: bool) -> Result<()> {
    let written = db.0.options_file.as_ref().and_then(|file| file.rocksdb_version());
    let Some(version) = written.filter(|version| is_older(version)) else { return Ok(()) };
    if !adopt {
        return Err(Error::new(
            Kind::Older,
            format!(
                "{}: RocksDB {version} wrote this database last, and what is written here is read \
                 by RocksDB {}.{} and newer only",
                dir.path().display(),
                OLDEST.0,
                OLDEST.1,
            ),
        ));
    }
    let io = |e: std::io::Error| Error::io(dir.path().display(), &e);
    let entries = dir.list().await.map_err(io)?;
    let Some(name) = newest_options_name(&entries) else { return Ok(()) };
    let text = dir.read_small(name, rocksfmt::OPTIONS_BYTES_MAX).await.map_err(io)?;
    let text = with_version(&String::from_utf8_lossy(&text));
    let numbers = entries.iter().filter_map(|entry| FileName::parse(&entry.name)?.number());
    let next = numbers
        .fold(db.0.manifest.next_file_number, |next, number| next.max(number.saturating_add(1)));
    let name = FileName::Options(next).to_string();
    dir.write_small_atomically(&name, text.as_bytes()).await.map_err(io)
}

fn is_older(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) < OLDEST
}

/// An OPTIONS file's text with the version of the oldest that reads the database from now on.
fn with_version(text: &str) -> String {
    let line = |line: &str| match line.trim_start().starts_with("rocksdb_version=") {
        true => format!("  rocksdb_version={}.{}.0\n", OLDEST.0, OLDEST.1),
        false => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        for older in ["7.7.8", "6.29.5", "5.0", "7", "", "x.y"] {
            assert!(is_older(older), "{older}");
        }
        for newer in ["7.8.3", "7.10.2", "10.0.0", "8.0"] {
            assert!(!is_older(newer), "{newer}");
        }
    }

    #[test]
    fn only_the_version_changes() {
        let text = "[Version]\n  rocksdb_version=6.11.4\n  options_file_version=1.1\n";
        let expected = "[Version]\n  rocksdb_version=7.8.0\n  options_file_version=1.1\n";
        assert_eq!(with_version(text), expected);
    }
}
