//! The names of a database's files, and the contents of its CURRENT file.

use std::fmt;

use crate::error::{Error, Result};

/// A file of a database directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileName {
    /// A write-ahead log, `000004.log`.
    Wal(u64),
    /// A table, `000009.sst`; `.ldb` in directories of LevelDB.
    Sst(u64),
    /// A blob file, `000010.blob`.
    Blob(u64),
    /// `MANIFEST-000005`.
    Manifest(u64),
    /// `OPTIONS-000007`.
    Options(u64),
    /// An unfinished file, `000008.dbtmp`.
    Temp(u64),
    /// `CURRENT`, which names the MANIFEST.
    Current,
    /// `LOCK`.
    Lock,
    /// `IDENTITY`.
    Identity,
    /// RocksDB's text log, `LOG` and `LOG.old.…`.
    InfoLog,
}

impl FileName {
    /// Parses a name; `None` for a file that does not belong to the database.
    pub fn parse(name: &str) -> Option<FileName> {
        match name {
            "CURRENT" => return Some(FileName::Current),
            "LOCK" => return Some(FileName::Lock),
            "IDENTITY" => return Some(FileName::Identity),
            "LOG" => return Some(FileName::InfoLog),
            _ => {}
        }
        if name.starts_with("LOG.old") {
            return Some(FileName::InfoLog);
        }
        if let Some(digits) = name.strip_prefix("MANIFEST-") {
            return number(digits).map(FileName::Manifest);
        }
        if let Some(rest) = name.strip_prefix("OPTIONS-") {
            return match rest.strip_suffix(".dbtmp") {
                Some(digits) => number(digits).map(FileName::Temp),
                None => number(rest).map(FileName::Options),
            };
        }
        let (digits, extension) = name.split_once('.')?;
        let number = number(digits)?;
        match extension {
            "log" => Some(FileName::Wal(number)),
            "sst" | "ldb" => Some(FileName::Sst(number)),
            "blob" => Some(FileName::Blob(number)),
            "dbtmp" => Some(FileName::Temp(number)),
            _ => None,
        }
    }

    /// The number in the name; all numbered files share one sequence of numbers.
    pub fn number(self) -> Option<u64> {
        match self {
            FileName::Wal(number)
            | FileName::Sst(number)
            | FileName::Blob(number)
            | FileName::Manifest(number)
            | FileName::Options(number)
            | FileName::Temp(number) => Some(number),
            FileName::Current | FileName::Lock | FileName::Identity | FileName::InfoLog => None,
        }
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileName::Wal(number) => write!(f, "{number:06}.log"),
            FileName::Sst(number) => write!(f, "{number:06}.sst"),
            FileName::Blob(number) => write!(f, "{number:06}.blob"),
            FileName::Manifest(number) => write!(f, "MANIFEST-{number:06}"),
            FileName::Options(number) => write!(f, "OPTIONS-{number:06}"),
            FileName::Temp(number) => write!(f, "{number:06}.dbtmp"),
            FileName::Current => f.write_str("CURRENT"),
            FileName::Lock => f.write_str("LOCK"),
            FileName::Identity => f.write_str("IDENTITY"),
            FileName::InfoLog => f.write_str("LOG"),
        }
    }
}

/// Accepts digits only; `str::parse` would also accept a sign.
fn number(digits: &str) -> Option<u64> {
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}

/// The number of the MANIFEST that a CURRENT file names.
pub fn parse_current(contents: &[u8]) -> Result<u64> {
    let Some(line) = contents.strip_suffix(b"\n") else {
        return Err(Error::corruption("CURRENT does not end with a newline"));
    };
    let name = std::str::from_utf8(line).ok();
    match name.and_then(FileName::parse) {
        Some(FileName::Manifest(number)) => Ok(number),
        _ => Err(Error::corruption(format!(
            "CURRENT names {:?}, expected a MANIFEST",
            String::from_utf8_lossy(&line[..line.len().min(64)])
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_a_round_trip() {
        for number in [0, 1, 999_999, 1_000_000, u64::MAX] {
            for name in [
                FileName::Wal(number),
                FileName::Sst(number),
                FileName::Blob(number),
                FileName::Manifest(number),
                FileName::Options(number),
                FileName::Temp(number),
            ] {
                assert_eq!(FileName::parse(&name.to_string()), Some(name));
                assert_eq!(name.number(), Some(number));
            }
        }
        for name in [FileName::Current, FileName::Lock, FileName::Identity, FileName::InfoLog] {
            assert_eq!(FileName::parse(&name.to_string()), Some(name));
            assert_eq!(name.number(), None);
        }
        assert_eq!(FileName::parse("000007.ldb"), Some(FileName::Sst(7)));
        assert_eq!(FileName::parse("7.sst"), Some(FileName::Sst(7)));
        assert_eq!(FileName::parse("LOG.old.1700000000"), Some(FileName::InfoLog));
        assert_eq!(FileName::parse("OPTIONS-000012.dbtmp"), Some(FileName::Temp(12)));
    }

    #[test]
    fn unknown_files_are_not_recognised() {
        for name in [
            "",
            ".",
            "archive",
            "+7.sst",
            "-7.sst",
            "7",
            ".sst",
            "7.sst.bak",
            "7 .sst",
            "MANIFEST-",
            "MANIFEST-x",
            "MANIFEST-000001.bak",
            "99999999999999999999999.sst",
            "current",
            "COMPACTION_PROGRESS-5",
        ] {
            assert_eq!(FileName::parse(name), None, "{name}");
        }
    }

    #[test]
    fn current_needs_its_newline_and_a_manifest() {
        assert_eq!(parse_current(b"MANIFEST-000005\n").unwrap(), 5);
        for (contents, text) in [
            (&b"MANIFEST-000005"[..], "newline"),
            (b"", "newline"),
            (b"\n", "expected a MANIFEST"),
            (b"MANIFEST-000005\n\n", "expected a MANIFEST"),
            (b"000005.sst\n", "expected a MANIFEST"),
            (b"MANIFEST-\xff\n", "expected a MANIFEST"),
        ] {
            let e = parse_current(contents).unwrap_err().to_string();
            assert!(e.contains(text), "{e}");
        }
    }
}
