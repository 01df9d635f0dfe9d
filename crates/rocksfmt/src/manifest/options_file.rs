//! Reads OPTIONS files, the INI text in which RocksDB stores the options of a database.
//!
//! ```text
//! [CFOptions "default"]
//!   comparator=leveldb.BytewiseComparator
//! [TableOptions/BlockBasedTable "default"]
//!   block_size=4096
//! ```
//!
//! A database opens without an OPTIONS file, and its MANIFEST and SST properties take precedence,
//! so reading is tolerant: any line that is not a section or `key=value` is skipped. Escapes (`\#`,
//! `\:`, `\n`, …) are undone.

use std::collections::BTreeMap;

/// The part of an OPTIONS file that is read; real files have 10 to 30 KiB per column family.
pub const OPTIONS_BYTES_MAX: usize = 16 << 20;

/// The sections of an OPTIONS file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OptionsFile {
    /// By kind (`Version`, `DBOptions`, `CFOptions`, `TableOptions/BlockBasedTable`) and column
    /// family name, which is empty for sections without one.
    sections: BTreeMap<(String, String), BTreeMap<String, String>>,
}

impl OptionsFile {
    /// Reads the text of an OPTIONS file; skips lines without a meaning.
    pub fn parse(text: &[u8]) -> OptionsFile {
        let text = String::from_utf8_lossy(&text[..text.len().min(OPTIONS_BYTES_MAX)]);
        let mut file = OptionsFile::default();
        let mut section = None;
        for line in text.lines() {
            let line = strip_comment(line).trim();
            if let Some(title) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                let (kind, name) = match title.split_once('"') {
                    Some((kind, name)) => (kind, name.trim_end().trim_end_matches('"')),
                    None => (title, ""),
                };
                let key = (kind.trim().to_owned(), unescape(name));
                file.sections.entry(key.clone()).or_default();
                section = Some(key);
            } else if let (Some((key, value)), Some(section)) = (line.split_once('='), &section)
                && let Some(values) = file.sections.get_mut(section)
            {
                values.insert(key.trim().to_owned(), unescape(value.trim()));
            }
        }
        file
    }

    /// The values of a section, by its kind and the column family's name (empty for none).
    pub fn section(&self, kind: &str, column_family: &str) -> Option<&BTreeMap<String, String>> {
        self.sections.get(&(kind.to_owned(), column_family.to_owned()))
    }

    /// The kinds of sections of a column family.
    pub fn kinds(&self, column_family: &str) -> impl Iterator<Item = &str> {
        let named = self.sections.keys().filter(move |(_, name)| name == column_family);
        named.map(|(kind, _)| kind.as_str())
    }

    /// One value of the database's own options.
    pub fn db(&self, key: &str) -> Option<&str> {
        self.section("DBOptions", "")?.get(key).map(String::as_str)
    }

    /// One value of a column family's options; `nullptr` counts as absent.
    pub fn column_family(&self, name: &str, key: &str) -> Option<&str> {
        let value = self.section("CFOptions", name)?.get(key)?;
        (value != "nullptr").then_some(value)
    }

    /// One value of a column family's block-based table options; `nullptr` counts as absent.
    pub fn table(&self, name: &str, key: &str) -> Option<&str> {
        let value = self.section("TableOptions/BlockBasedTable", name)?.get(key)?;
        (value != "nullptr").then_some(value)
    }

    /// The column families for which the file has sections.
    pub fn column_family_names(&self) -> impl Iterator<Item = &str> {
        let named = self.sections.keys();
        named.filter(|(kind, _)| kind == "CFOptions").map(|(_, name)| name.as_str())
    }

    /// The version of RocksDB that wrote the file.
    pub fn rocksdb_version(&self) -> Option<&str> {
        let version = self.section("Version", "")?;
        version.get("rocksdb_version").map(String::as_str)
    }
}

/// Cuts off a comment: everything after a `#` that is not escaped.
fn strip_comment(line: &str) -> &str {
    let mut escaped = false;
    for (at, c) in line.char_indices() {
        if c == '#' && !escaped {
            return &line[..at];
        }
        escaped = c == '\\' && !escaped;
    }
    line
}

/// A value as it is written into an OPTIONS file.
pub fn escape_option(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    for c in value.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\\' | '#' | ':' => out.extend(['\\', c]),
            _ => out.push(c),
        }
    }
    out
}

pub(super) fn unescape(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('n') => out.push('\n'),
                Some('r') => out.push('\r'),
                Some(other) => out.push(other),
                None => out.push('\\'),
            },
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SAMPLE: &[u8] = b"# This is a RocksDB option file.\n\
        [Version]\n  rocksdb_version=7.8.3\n  options_file_version=1.1\n\
        [DBOptions]\n  wal_dir=/data/wal\n  max_open_files=-1\n\n\
        [CFOptions \"default\"]\n  comparator=leveldb.BytewiseComparator\n  merge_operator=nullptr\n\
        compaction_options_fifo={allow_compaction=false;age_for_warm=0;}\n\
        [TableOptions/BlockBasedTable \"default\"]\n  block_size=4096 # bytes\n\
        [CFOptions \"a\\#b\"]\n  prefix_extractor=rocksdb.FixedPrefix.8\n";

    #[test]
    fn sections_and_values_are_found() {
        let file = OptionsFile::parse(SAMPLE);
        assert_eq!(file.rocksdb_version(), Some("7.8.3"));
        assert_eq!(file.db("wal_dir"), Some("/data/wal"));
        assert_eq!(file.column_family("default", "comparator"), Some("leveldb.BytewiseComparator"));
        assert_eq!(file.column_family("default", "merge_operator"), None);
        assert_eq!(
            file.column_family("default", "compaction_options_fifo"),
            Some("{allow_compaction=false;age_for_warm=0;}")
        );
        assert_eq!(file.table("default", "block_size"), Some("4096"));
        assert_eq!(file.column_family("a#b", "prefix_extractor"), Some("rocksdb.FixedPrefix.8"));
        assert_eq!(file.column_family_names().collect::<Vec<_>>(), ["a#b", "default"]);
        assert_eq!(file.column_family("none", "comparator"), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_tolerated(cut in 0usize..SAMPLE.len(), junk in proptest::collection::vec(any::<u8>(), 0..40)) {
            let mut text = SAMPLE[..cut].to_vec();
            text.extend_from_slice(&junk);
            text.extend_from_slice(&SAMPLE[cut..]);
            let file = OptionsFile::parse(&text);
            prop_assert!(file.sections.len() <= text.len());
        }
    }
}
