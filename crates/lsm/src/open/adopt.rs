//! Adoption of a database that an older RocksDB wrote.
//!
//! RocksDB 7.8 and newer read what is written here. `gate.rs` refuses a database that an older
//! version wrote last, since that version may still be in use, unless the caller agrees. Then a new
//! OPTIONS file with the same options states the oldest version that can read the database, so
//! later openings need no consent. Without an OPTIONS file, our MANIFEST states it.

use fs::Dir;
use rocksfmt::FileName;

use crate::db::Db;
use crate::error::{Error, Result};
use crate::stored_options::{OLDEST, newest};

/// Records that no RocksDB older than 7.8 can read the database from now on. Suspends for the disk.
pub(crate) async fn note(dir: &Dir, db: &Db) -> Result<()> {
    if !db.0.stored_options.is_older() {
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

/// The text of an OPTIONS file with its version replaced by the oldest that reads the database from
/// now on. Old versions always wrote `wal_dir`; `gate.rs` has already refused any value other than
/// the database's directory.
fn with_version(text: &str) -> String {
    let line = |line: &str| match line.trim_start() {
        key if key.starts_with("rocksdb_version=") => {
            format!("  rocksdb_version={}.{}.0\n", OLDEST.0, OLDEST.1)
        }
        key if key.starts_with("wal_dir=") => String::new(),
        // Old versions did not write the delimiter. New ones leave out only an empty one.
        "merge_operator=StringAppendOperator" | "merge_operator=StringAppendTESTOperator" => {
            String::new()
        }
        _ => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_version_and_the_wal_dir_change() {
        let text = "[Version]\n  rocksdb_version=6.11.4\n  options_file_version=1.1\n\
                    [DBOptions]\n  wal_dir=/data\n  db_log_dir=\n  \
                    merge_operator=StringAppendOperator\n";
        let expected = "[Version]\n  rocksdb_version=7.8.0\n  options_file_version=1.1\n\
                        [DBOptions]\n  db_log_dir=\n";
        assert_eq!(with_version(text), expected);
    }
}
