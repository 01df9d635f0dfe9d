//! Prints the report of a check.

use std::fmt::Write as _;
use std::path::Path;

use lsm::CheckReport;
use node::Size;
use serde_json::{Value, json};

use crate::output::thousands;

/// The report as JSON.
pub fn json(report: &CheckReport) -> Value {
    let damages: Vec<_> = report
        .damages
        .iter()
        .map(|damage| json!({ "file": damage.file, "offset": damage.offset, "what": damage.what }))
        .collect();
    json!({
        "ok": report.damages.is_empty(),
        "files": report.files,
        "bytes": report.bytes,
        "blocks": report.blocks,
        "entries": report.entries,
        "damages": damages,
        "warnings": report.warnings,
    })
}

/// The report for people: a line for each damage, and one that sums up.
pub fn text(path: &Path, report: &CheckReport) -> String {
    let mut out = String::new();
    for damage in &report.damages {
        // Most errors already begin with the file's name.
        let _ = match damage.offset {
            _ if damage.what.starts_with(&damage.file) => writeln!(out, "damaged: {}", damage.what),
            Some(offset) => {
                writeln!(out, "damaged: {} at offset {offset}: {}", damage.file, damage.what)
            }
            None => writeln!(out, "damaged: {}: {}", damage.file, damage.what),
        };
    }
    for warning in &report.warnings {
        let _ = writeln!(out, "warning: {warning}");
    }
    let verdict = match report.damages.len() {
        0 => "nothing is damaged".to_owned(),
        1 => "1 damage".to_owned(),
        damages => format!("{} damages", thousands(damages as u64)),
    };
    let _ = writeln!(
        out,
        "{}: {verdict}; read {} in {} files: {} blocks, {} entries",
        path.display(),
        Size(report.bytes),
        thousands(report.files),
        thousands(report.blocks),
        thousands(report.entries)
    );
    out
}

#[cfg(test)]
mod tests {
    use lsm::Damage;

    use super::*;

    fn report(damages: &[(&str, Option<u64>, &str)]) -> CheckReport {
        let damage = |&(file, offset, what): &(&str, Option<u64>, &str)| Damage {
            file: file.into(),
            offset,
            what: what.into(),
        };
        CheckReport {
            files: 3,
            bytes: 8192,
            blocks: 2,
            entries: 1000,
            damages: damages.iter().map(damage).collect(),
            warnings: Vec::new(),
        }
    }

    #[test]
    fn each_damage_is_named_once_with_its_place() {
        let damages = [
            ("000007.sst", Some(4096), "000007.sst at offset 4096: checksum differs"),
            ("000008.sst", None, "000008.sst: 3 bytes long, the manifest says 4"),
            ("000009.sst", Some(5), "keys are out of order"),
        ];
        assert_eq!(
            text(Path::new("/db"), &report(&damages)),
            "damaged: 000007.sst at offset 4096: checksum differs\n\
             damaged: 000008.sst: 3 bytes long, the manifest says 4\n\
             damaged: 000009.sst at offset 5: keys are out of order\n\
             /db: 3 damages; read 8 KiB in 3 files: 2 blocks, 1,000 entries\n"
        );
        assert!(text(Path::new("/db"), &report(&[])).contains("nothing is damaged"));
    }

    #[test]
    fn json_says_whether_damage_was_found() {
        assert_eq!(json(&report(&[]))["ok"], true);
        let json = json(&report(&[("000009.sst", Some(5), "x")]));
        assert_eq!(json["ok"], false);
        assert_eq!(json["damages"][0]["offset"], 5);
    }
}
