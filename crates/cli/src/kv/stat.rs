//! Prints the description of a database.

use std::fmt::Write as _;
use std::path::Path;

use lsm::{FamilyStat, Stat};
use node::Size;
use serde_json::{Value, json};

use crate::output::{escape_into, thousands};

/// The description as JSON.
pub fn json(path: &Path, stat: &Stat) -> Value {
    json!({
        "path": path,
        "db_id": stat.db_id,
        "manifest": stat.manifest,
        "last_sequence": stat.last_sequence,
        "next_file_number": stat.next_file_number,
        "rocksdb_version": stat.rocksdb_version,
        "memory_bytes": stat.memory_bytes,
        "warnings": stat.warnings,
        "column_families": stat.column_families.iter().map(family_json).collect::<Vec<_>>(),
    })
}

fn family_json(family: &FamilyStat) -> Value {
    let levels: Vec<_> = family
        .levels
        .iter()
        .enumerate()
        .map(|(number, level)| {
            json!({
                "level": number,
                "files": level.files,
                "bytes": level.bytes,
                "entries": level.entries,
                "deletions": level.deletions,
                "damaged": level.damaged,
                "target_bytes": level.target_bytes,
                "score": level.score,
            })
        })
        .collect();
    json!({
        "id": family.id,
        "name": family.name,
        "comparator": family.comparator,
        "refused": family.refused,
        "estimated_keys": family.estimated_keys,
        "memtable_entries": family.memtable_entries,
        "files": family.levels.iter().map(|level| level.files).sum::<usize>(),
        "bytes": family.levels.iter().map(|level| level.bytes).sum::<u64>(),
        "levels": levels,
        "base_level": family.base_level,
        "debt_bytes": family.debt_bytes,
        "live_bytes": family.live_bytes,
        "space_amplification": space_amplification(family),
        "blob_files": family.blob_files,
        "blob_bytes": family.blob_bytes,
        "blob_garbage_bytes": family.blob_garbage_bytes,
        "blob_space_amplification": blob_space_amplification(family),
        "features": family.features,
        "options": family.options,
    })
}

/// Bytes of tables for each live byte, about; 0 without tables.
fn space_amplification(family: &FamilyStat) -> f64 {
    let bytes: u64 = family.levels.iter().map(|level| level.bytes).sum();
    if family.live_bytes == 0 { 0.0 } else { bytes as f64 / family.live_bytes as f64 }
}

/// Bytes of blob files for each byte of live values; 0 without any.
fn blob_space_amplification(family: &FamilyStat) -> f64 {
    let live = family.blob_bytes.saturating_sub(family.blob_garbage_bytes);
    if live == 0 { 0.0 } else { family.blob_bytes as f64 / live as f64 }
}

/// The description for people, line by line.
pub fn text(path: &Path, stat: &Stat) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "RocksDB database in {}", path.display());
    if let Some(version) = &stat.rocksdb_version {
        let _ = writeln!(out, "  last opened for writing by RocksDB {version}");
    }
    if let Some(id) = &stat.db_id {
        let _ = writeln!(out, "  id {id}");
    }
    let _ = writeln!(
        out,
        "  {}, sequence {}, next file number {}",
        stat.manifest,
        thousands(stat.last_sequence),
        stat.next_file_number
    );
    let _ = writeln!(
        out,
        "  indexes, filters and recovered writes take {} of memory",
        Size(stat.memory_bytes as u64)
    );
    for warning in &stat.warnings {
        let _ = writeln!(out, "  warning: {warning}");
    }
    for family in &stat.column_families {
        out.push('\n');
        family_text(&mut out, family);
    }
    out
}

fn family_text(out: &mut String, family: &FamilyStat) {
    out.push_str("column family ");
    escape_into(out, family.name.as_bytes());
    let _ = writeln!(
        out,
        " (id {}), about {} keys, ordered by {}",
        family.id,
        thousands(family.estimated_keys),
        family.comparator
    );
    if let Some(refused) = &family.refused {
        let _ = writeln!(out, "  cannot be read: {refused}");
    }
    if family.memtable_entries > 0 {
        let entries = thousands(family.memtable_entries as u64);
        let _ = writeln!(out, "  {entries} entries recovered from the write-ahead log");
    }
    if family.levels.iter().any(|level| level.files > 0) {
        let _ = writeln!(
            out,
            "  {:>5} {:>7} {:>10} {:>6} {:>15} {:>15}",
            "level", "files", "size", "score", "entries", "tombstones"
        );
    }
    for (number, level) in family.levels.iter().enumerate().filter(|(_, level)| level.files > 0) {
        let _ = write!(
            out,
            "  {number:>5} {:>7} {:>10} {:>6.2} {:>15} {:>15}",
            thousands(level.files as u64),
            Size(level.bytes).to_string(),
            level.score,
            thousands(level.entries),
            thousands(level.deletions)
        );
        match level.damaged {
            0 => out.push('\n'),
            damaged => {
                let _ = writeln!(out, "  ({damaged} damaged)");
            }
        }
    }
    if family.live_bytes > 0 {
        let _ = writeln!(
            out,
            "  base level {}, debt of merges {}, space amplification {:.2}",
            family.base_level,
            Size(family.debt_bytes),
            space_amplification(family)
        );
    }
    if family.blob_files > 0 {
        let _ = writeln!(
            out,
            "  {} blob files, {}, of which {} are garbage; space amplification {:.2}",
            family.blob_files,
            Size(family.blob_bytes),
            Size(family.blob_garbage_bytes),
            blob_space_amplification(family)
        );
    }
    for (feature, files) in &family.features {
        let _ = writeln!(out, "  {feature}: {}", files_text(*files));
    }
    if !family.options.is_empty() {
        out.push_str("  options\n");
    }
    for (name, value) in &family.options {
        let _ = writeln!(out, "    {name}={value}");
    }
}

fn files_text(files: u64) -> String {
    match files {
        1 => "1 file".to_owned(),
        files => format!("{} files", thousands(files)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use lsm::LevelStat;

    use super::*;

    fn stat() -> Stat {
        let level = LevelStat {
            files: 2,
            bytes: 4096,
            entries: 1500,
            deletions: 3,
            damaged: 1,
            ..LevelStat::default()
        };
        Stat {
            db_id: Some("an-id".into()),
            manifest: "MANIFEST-000005".into(),
            last_sequence: 1500,
            next_file_number: 9,
            rocksdb_version: Some("7.8.3".into()),
            memory_bytes: 2048,
            column_families: vec![FamilyStat {
                id: 0,
                name: "default".into(),
                comparator: "leveldb.BytewiseComparator".into(),
                refused: None,
                estimated_keys: 1497,
                memtable_entries: 0,
                levels: vec![LevelStat::default(), level],
                base_level: 1,
                debt_bytes: 0,
                live_bytes: 4096,
                blob_files: 0,
                blob_bytes: 0,
                blob_garbage_bytes: 0,
                features: BTreeMap::from([("format version 5".into(), 1)]),
                options: BTreeMap::from([("bottommost_compression".into(), "kZSTD".into())]),
            }],
            warnings: vec!["000009.blob is missing".into()],
        }
    }

    #[test]
    fn text_shows_levels_with_files_and_warnings() {
        let text = text(Path::new("/db"), &stat());
        assert!(text.contains("warning: 000009.blob is missing"), "{text}");
        let levels: Vec<&str> =
            text.lines().filter(|line| line.trim_start().starts_with('1')).collect();
        assert_eq!(levels.len(), 1, "{text}");
        let words: Vec<&str> = levels[0].split_whitespace().collect();
        assert_eq!(words, ["1", "2", "4", "KiB", "0.00", "1,500", "3", "(1", "damaged)"]);
        assert!(text.contains("  format version 5: 1 file\n"), "{text}");
        assert!(text.contains("    bottommost_compression=kZSTD\n"), "{text}");
    }

    #[test]
    fn json_has_the_same_figures() {
        let json = json(Path::new("/db"), &stat());
        assert_eq!(json["last_sequence"], 1500);
        let family = &json["column_families"][0];
        assert_eq!(family["files"], 2);
        assert_eq!(family["levels"][1]["damaged"], 1);
        assert_eq!(family["features"]["format version 5"], 1);
    }
}
