//! Taking over what an older RocksDB wrote.
//!
//! What is written here is read by RocksDB 7.8 and newer. `gate.rs` refuses a database that an
//! older one wrote last, which may still be in use there, unless somebody agrees. Then a new
//! OPTIONS file notes the version from which on it can be read, with all options as they were: so
//! it need not be said again at the next opening. Where there is no OPTIONS file, our MANIFEST says
//! it.

use fs::Dir;
use rocksfmt::FileName;

use crate::db::Db;
use crate::error::{Error, Result};
use crate::open::choices::{OLDEST, newest};

/// Notes that no RocksDB older than 7.8 can read the database from now on. Suspends for the disk.
pub(crate) async fn note(dir: &Dir, db: &Db) -> Result<()> {
    if !db.0.choices.is_older() {
        return Ok(());
    }
    let io = |e: std::io::Error| Error::io(dir.path().display(), &e);
    let entries = dir.list().await.map_err(io)?;
    let Some(name) = newest(&entries) else { return Ok(()) };
    let text = dir.read_small(name, rocksfmt::OPTIONS_BYTES_MAX).await.map_err(io)?;
    let text = with_version(&String::from_utf8_lossy(&text));
    let numbers = entries.iter().filter_map(|entry| FileName::parse(&entry.name)?.number());
    let next = numbers
        .fold(db.0.manifest.next_number(), |next, number| next.max(number.saturating_add(1)));
    let name = FileName::Options(next).to_string();
    dir.write_small_atomically(&name, text.as_bytes()).await.map_err(io)
}

/// An OPTIONS file's text with the version of the oldest that reads the database from now on. Older
/// versions always wrote `wal_dir`; one that is not the database's directory was refused before.
fn with_version(text: &str) -> String {
    let line = |line: &str| match line.trim_start() {
        key if key.starts_with("rocksdb_version=") => {
            format!("  rocksdb_version={}.{}.0\n", OLDEST.0, OLDEST.1)
        }
        key if key.starts_with("wal_dir=") => String::new(),
        _ => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_version_and_the_own_directory_change() {
        let text = "[Version]\n  rocksdb_version=6.11.4\n  options_file_version=1.1\n\
                    [DBOptions]\n  wal_dir=/data\n  db_log_dir=\n";
        let expected = "[Version]\n  rocksdb_version=7.8.0\n  options_file_version=1.1\n\
                        [DBOptions]\n  db_log_dir=\n";
        assert_eq!(with_version(text), expected);
    }
}
