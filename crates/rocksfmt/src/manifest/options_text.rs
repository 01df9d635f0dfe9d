//! Adding column families to the text of an OPTIONS file, and taking them out.

use std::fmt::Write;

use crate::manifest::options_file::{escape_option, unescape};

/// Options of the default column family that a new one does not get: they name classes of the
/// program, and say what its values mean.
const NOT_COPIED: [&str; 4] =
    ["merge_operator", "compaction_filter", "compaction_filter_factory", "sst_partitioner_factory"];

/// A section: its kind, the column family that it belongs to, and its lines with the title.
struct Section<'a> {
    kind: &'a str,
    family: Option<String>,
    lines: Vec<&'a str>,
}

/// The text of an OPTIONS file with sections for exactly these column families, which are names
/// with the names of their comparators. A family without sections gets copies of those of the
/// default family, with its own comparator. Everything else stays as it is. `None` if the text has
/// no sections of the default family.
pub fn options_with_families(text: &str, families: &[(&str, &str)]) -> Option<String> {
    let sections = sections(text);
    let of_default = |section: &&Section<'_>| section.family.as_deref() == Some("default");
    let default: Vec<&Section<'_>> = sections.iter().filter(of_default).collect();
    if default.is_empty() {
        return None;
    }
    let mut new = String::with_capacity(text.len() * 2);
    let stays = |name: &String| families.iter().any(|(family, _)| family == name);
    for section in &sections {
        if section.family.as_ref().is_none_or(stays) {
            for line in &section.lines {
                new.push_str(line);
                new.push('\n');
            }
        }
    }
    let is_there =
        |name: &str| sections.iter().any(|section| section.family.as_deref() == Some(name));
    for (name, comparator) in families.iter().filter(|(name, _)| !is_there(name)) {
        if !new.ends_with("\n\n") {
            new.push('\n');
        }
        for section in &default {
            copy(section, name, comparator, &mut new);
        }
    }
    Some(new)
}

/// Appends a copy of a section for another family.
fn copy(section: &Section<'_>, name: &str, comparator: &str, new: &mut String) {
    let _ = writeln!(new, "[{} \"{}\"]", section.kind, escape_option(name));
    for line in section.lines.iter().skip(1) {
        let key = line.split_once('=').map(|(key, _)| key.trim());
        match key {
            Some(key) if NOT_COPIED.contains(&key) => {
                let _ = writeln!(new, "  {key}=nullptr");
            }
            Some("comparator") => {
                let _ = writeln!(new, "  comparator={comparator}");
            }
            _ => {
                new.push_str(line);
                new.push('\n');
            }
        }
    }
}

fn sections(text: &str) -> Vec<Section<'_>> {
    let mut sections = vec![Section { kind: "", family: None, lines: Vec::new() }];
    for line in text.lines() {
        let title = line.trim().strip_prefix('[').and_then(|line| line.strip_suffix(']'));
        if let Some(title) = title {
            let (kind, family) = match title.split_once('"') {
                Some((kind, name)) => (kind.trim(), Some(unescape(name.trim_end_matches('"')))),
                None => (title, None),
            };
            sections.push(Section { kind, family, lines: Vec::new() });
        }
        if let Some(last) = sections.last_mut() {
            last.lines.push(line);
        }
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OptionsFile;

    const TEXT: &str = "# A comment.\n[Version]\n  rocksdb_version=7.8.3\n\n[DBOptions]\n  \
        max_background_jobs=2\n\n[CFOptions \"default\"]\n  comparator=leveldb.BytewiseComparator\n  \
        merge_operator=UInt64AddOperator\n  prefix_extractor=rocksdb.FixedPrefix.4\n  num_levels=5\n  \n[TableOptions/BlockBasedTable \
        \"default\"]\n  block_size=4096\n  \n";

    #[test]
    fn a_new_family_copies_the_default_one() {
        let reverse = "rocksdb.ReverseBytewiseComparator";
        let all = [("default", "leveldb.BytewiseComparator"), ("a:b#c\\d", reverse)];
        let text = options_with_families(TEXT, &all).unwrap();
        assert!(text.starts_with(TEXT), "{text}");
        let file = OptionsFile::parse(text.as_bytes());
        let name = "a:b#c\\d";
        assert_eq!(file.column_family(name, "comparator"), Some(reverse));
        assert_eq!(file.column_family(name, "merge_operator"), None);
        // A hash index needs it.
        assert_eq!(file.column_family(name, "prefix_extractor"), Some("rocksdb.FixedPrefix.4"));
        assert_eq!(file.column_family(name, "num_levels"), Some("5"));
        assert_eq!(file.table(name, "block_size"), Some("4096"));
        assert_eq!(file.column_family("default", "merge_operator"), Some("UInt64AddOperator"));
        // Again, nothing changes; without it, the first text is back.
        assert_eq!(options_with_families(&text, &all).unwrap(), text);
        let without = options_with_families(&text, &all[..1]).unwrap();
        assert_eq!(OptionsFile::parse(without.as_bytes()), OptionsFile::parse(TEXT.as_bytes()));
    }

    #[test]
    fn a_file_without_the_default_family_is_not_changed() {
        assert_eq!(options_with_families("[Version]\n", &[("default", "x")]), None);
    }
}
