//! The description of one backup, as RocksDB's BackupEngine writes it: `meta/ID`.
//!
//! ```text
//! schema_version 2.1                             only from version 2 on
//! 1795415306                                     time in Unix seconds
//! 3                                              last sequence number
//! metadata 6869                                  of the caller, in hexadecimal; may be absent
//! 2                                              number of files
//! shared_checksum/000022_sKPNEQ_980.sst crc32 3594820249
//! private/2/CURRENT crc32 3266449574
//! ```
//!
//! The name [`WITHIN`] as metadata says that the database within has a backup with this number.
//!
//! The checksum is CRC-32C of the whole file, unmasked. Version 2 may leave it out, and adds pairs
//! of name and value, among them `size`. A name that begins with `ni::` must be understood.

use crate::error::{Error, Kind, Result};
use crate::open::within::WITHIN;

/// One backup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backup {
    /// Its number. A newer backup has a larger one.
    pub id: u32,
    /// When it was made, in Unix seconds.
    pub time: u64,
    /// The last sequence number in it.
    pub sequence: u64,
    /// Whether the database within has a backup with the same number.
    pub(crate) has_within: bool,
    /// Its files.
    pub files: Vec<BackupFile>,
}

/// A file of a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupFile {
    /// Its path in the directory of backups.
    pub path: String,
    /// CRC-32C of its bytes, if it is known.
    pub crc32c: Option<u32>,
    /// Its length, if it is known.
    pub bytes: Option<u64>,
}

impl BackupFile {
    /// Its directory and its name there.
    pub(crate) fn place(&self) -> (&str, &str) {
        self.path.rsplit_once('/').unwrap_or(("", &self.path))
    }

    /// Whether it is of the database within.
    pub(crate) fn is_within(&self) -> bool {
        self.path.strip_prefix(WITHIN).is_some_and(|rest| rest.starts_with('/'))
    }

    /// Its name in the database: without what follows the first underscore, except the extension.
    pub(crate) fn name_in_database(&self) -> String {
        let (_, name) = self.place();
        match (name.split_once('_'), name.rsplit_once('.')) {
            (Some((number, _)), Some((_, extension))) => format!("{number}.{extension}"),
            _ => name.to_owned(),
        }
    }
}

/// The length in a name such as `000022_sKPNEQ_980.sst` or `000022_3594820249_980.sst`.
fn length_in(name: &str) -> Option<u64> {
    let (stem, _) = name.rsplit_once('.')?;
    let parts: Vec<&str> = stem.split('_').collect();
    (parts.len() >= 3).then(|| parts.last()?.parse().ok())?
}

impl Backup {
    /// The text of the description.
    pub(crate) fn render(&self) -> String {
        use std::fmt::Write;
        let mut text = format!("{}\n{}\n", self.time, self.sequence);
        if self.has_within {
            text += &format!("{}\n", within_line());
        }
        text += &format!("{}\n", self.files.len());
        for BackupFile { path, crc32c, .. } in &self.files {
            // Writing to a string does not fail.
            let _ = match crc32c {
                Some(crc) => writeln!(text, "{path} crc32 {crc}"),
                None => writeln!(text, "{path}"),
            };
        }
        text
    }

    /// Parses the description of backup `id`.
    pub(crate) fn parse(id: u32, text: &[u8]) -> Result<Backup> {
        let wrong = |what: &str| Error::new(Kind::Corruption, format!("meta/{id}: {what}"));
        let text = std::str::from_utf8(text).map_err(|_| wrong("not text"))?;
        let mut lines = text.lines().peekable();
        let mut schema = 1;
        if let Some(version) = lines.peek().and_then(|line| line.strip_prefix("schema_version ")) {
            let major = version.split('.').next().unwrap_or_default();
            schema = major.parse().map_err(|_| wrong("the schema version is not a number"))?;
            if schema != 2 {
                let what = format!("meta/{id}: schema version {version} is not supported");
                return Err(Error::new(Kind::Unsupported, what));
            }
            lines.next();
        }
        let mut has_within = false;
        let mut number = |what: &str| -> Result<u64> {
            let is_pair = |line: &&str| line.contains(' ') && !line.contains('/');
            while let Some(pair) = lines.next_if(is_pair) {
                has_within |= pair.eq_ignore_ascii_case(&within_line());
                refuse_unknown(id, pair)?;
            }
            let line = lines.next().unwrap_or_default();
            line.parse().map_err(|_| wrong(&format!("expected {what}, found {line:?}")))
        };
        let time = number("the time")?;
        let sequence = number("the sequence number")?;
        let count = number("the number of files")?;
        let mut files = Vec::new();
        for line in lines.by_ref().take(usize::try_from(count).unwrap_or(usize::MAX)) {
            files.push(file(id, schema, line)?);
        }
        if files.len() as u64 != count {
            return Err(wrong(&format!("expected {count} files, found {}", files.len())));
        }
        match lines.next() {
            Some(rest) if schema == 1 => Err(wrong(&format!("{rest:?} after the last file"))),
            _ => Ok(Backup { id, time, sequence, has_within, files }),
        }
    }
}

/// The line that says that there is a backup of the database within.
fn within_line() -> String {
    let hex = WITHIN.bytes().map(|byte| format!("{byte:02X}"));
    format!("metadata {}", hex.collect::<String>())
}

fn refuse_unknown(id: u32, name: &str) -> Result<()> {
    match name.starts_with("ni::") {
        true => Err(Error::new(Kind::Unsupported, format!("meta/{id}: {name:?} is not known"))),
        false => Ok(()),
    }
}

/// Parses the line of a file.
fn file(id: u32, schema: u32, line: &str) -> Result<BackupFile> {
    let wrong = |what: &str| Error::new(Kind::Corruption, format!("meta/{id}: {line:?}: {what}"));
    let mut words = line.split(' ');
    let path = words.next().unwrap_or_default().to_owned();
    let parts: Vec<&str> = path.split('/').collect();
    let own = id.to_string();
    let is_name = |name: &&str| !matches!(*name, "" | "." | "..");
    let fits = match parts[..] {
        ["shared" | "shared_checksum", name] => is_name(&name),
        ["private", of, name] => of == own && is_name(&name),
        _ => false,
    };
    if !fits {
        return Err(wrong("not the path of a file of this backup"));
    }
    let mut found = BackupFile { crc32c: None, bytes: length_in(parts[parts.len() - 1]), path };
    while let Some(name) = words.next() {
        let value = words.next().ok_or_else(|| wrong("a name without a value"))?;
        match name {
            "crc32" => {
                let crc = value.parse().map_err(|_| wrong("the checksum is not a number"))?;
                found.crc32c = Some(crc);
            }
            "size" => {
                let bytes = value.parse().map_err(|_| wrong("the size is not a number"))?;
                found.bytes = Some(bytes);
            }
            other => refuse_unknown(id, other)?,
        }
    }
    if found.crc32c.is_none() && schema == 1 {
        return Err(wrong("no checksum"));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITTEN_BY_ROCKSDB: &str = "1795415306\n3\n3\n\
        shared_checksum/000022_sKPNEQKDHO1C6LF3X5YFY_980.sst crc32 3594820249\n\
        shared_checksum/000007_77_81.blob crc32 77\n\
        private/2/CURRENT crc32 3266449574\n";

    #[test]
    fn a_description_is_read_and_written_as_rocksdb_writes_it() {
        let backup = Backup::parse(2, WRITTEN_BY_ROCKSDB.as_bytes()).unwrap();
        assert_eq!((backup.time, backup.sequence), (1_795_415_306, 3));
        let names: Vec<_> = backup.files.iter().map(BackupFile::name_in_database).collect();
        assert_eq!(names, ["000022.sst", "000007.blob", "CURRENT"]);
        let lengths: Vec<_> = backup.files.iter().map(|file| file.bytes).collect();
        assert_eq!(lengths, [Some(980), Some(81), None]);
        assert_eq!(backup.render(), WRITTEN_BY_ROCKSDB);
    }

    #[test]
    fn version_2_may_lack_checksums_and_may_have_more_fields_unless_they_must_be_understood() {
        let text = "schema_version 2.1\n5\n6\nmetadata 6869\n1\nshared/000007.sst size 5 temp kCold\n\
                    // anything";
        let file = BackupFile { path: "shared/000007.sst".into(), crc32c: None, bytes: Some(5) };
        let expected = Backup { id: 9, time: 5, sequence: 6, has_within: false, files: vec![file] };
        assert_eq!(Backup::parse(9, text.as_bytes()).unwrap(), expected);
        for (text, what) in [
            (text.replace("temp", "ni::temp"), "not known"),
            (text.replace("metadata", "ni::other"), "not known"),
            (text.replace("2.1", "3"), "version 3"),
            (text.replace("schema_version 2.1\n", ""), "no checksum"),
        ] {
            let error = Backup::parse(9, text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn a_damaged_description_is_refused_and_no_path_leaves_the_directory() {
        let line = "private/2/CURRENT crc32 3266449574";
        for (from, to, what) in [
            ("1795415306", "x", "the time"),
            ("\n3\n3\n", "\n3\n4\n", "expected 4 files"),
            ("\n3\n3\n", "\n3\n2\n", "after the last file"),
            (line, "private/2/../x crc32 1", "not the path"),
            (line, "private/3/CURRENT crc32 1", "not the path"),
            (line, "/etc/passwd crc32 1", "not the path"),
            (line, "shared/.. crc32 1", "not the path"),
            (line, "shared/a crc32 -1", "not a number"),
            (line, "shared/a crc32", "without a value"),
        ] {
            let text = WRITTEN_BY_ROCKSDB.replace(from, to);
            let error = Backup::parse(2, text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(what), "{to}: {error}");
        }
        for end in 0..WRITTEN_BY_ROCKSDB.len() - 1 {
            let cut = &WRITTEN_BY_ROCKSDB.as_bytes()[..end];
            // A description that is cut within the last number cannot be told from a whole one.
            let in_last = WRITTEN_BY_ROCKSDB[..end].lines().count() == 6
                && !WRITTEN_BY_ROCKSDB[..end].ends_with(' ');
            assert!(Backup::parse(2, cut).is_err() || in_last, "{end}");
        }
    }
}
