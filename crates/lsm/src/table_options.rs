//! How the tables of a column family are written: its choices in the directory's OPTIONS file, with
//! RocksDB's defaults for those that the file does not name. Without the file, or without the
//! family in it, the options of the opening apply ([`crate::WriteOptions::compression`]).

use std::collections::BTreeMap;

use rocksfmt::Compression;

use crate::stored_options::StoredOptions;

/// The place of a new table among the levels. Compression and filters depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TablePlace {
    pub level: usize,
    /// The level into which level 0 is merged.
    pub base_level: usize,
    /// The table comes from a merge or a load, and all deeper levels are empty.
    pub is_bottom: bool,
}

impl TablePlace {
    /// The place of flushed tables.
    pub const FLUSH: TablePlace = TablePlace { level: 0, base_level: 1, is_bottom: false };
}

/// The table options of a family. They never change while the database is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableOptions {
    /// `compression`; `None` if OPTIONS do not have the family.
    compression: Option<Compression>,
    /// `compression_per_level`: of level 0, then from the base level on; the last one is also of
    /// all deeper levels. It replaces `compression` unless it is empty.
    per_level: Vec<Compression>,
    /// `bottommost_compression`, if it is set.
    bottommost: Option<Compression>,
}

impl TableOptions {
    /// Reads a family's choices.
    ///
    /// # Errors
    /// The choice that cannot be obeyed, as text.
    pub fn read(stored: &StoredOptions, family: &str) -> Result<TableOptions, String> {
        let section = |kind| stored.file.as_ref()?.section(kind, family);
        let Some(choices) = section("CFOptions") else { return Ok(TableOptions::default()) };
        let choices = Choices { family, choices };
        Ok(TableOptions {
            compression: Some(choices.compression("compression")?.unwrap_or(Compression::Snappy)),
            per_level: choices.compressions("compression_per_level")?,
            bottommost: choices.compression("bottommost_compression")?,
        })
    }

    /// The compression of a new table; `opening` is that of the opening.
    pub fn compression(&self, place: TablePlace, opening: Compression) -> Compression {
        if place.is_bottom
            && let Some(bottommost) = self.bottommost
        {
            return bottommost;
        }
        let depth = match place.level {
            0 => 0,
            level => level.saturating_sub(place.base_level) + 1,
        };
        let last = self.per_level.len().saturating_sub(1);
        let of_level = self.per_level.get(depth.min(last)).copied();
        of_level.or(self.compression).unwrap_or(opening)
    }
}

/// A section of an OPTIONS file.
struct Choices<'a> {
    family: &'a str,
    choices: &'a BTreeMap<String, String>,
}

impl Choices<'_> {
    /// A value, unless it is absent or empty.
    fn get(&self, key: &str) -> Option<&str> {
        self.choices.get(key).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn compression(&self, key: &str) -> Result<Option<Compression>, String> {
        match self.get(key) {
            None | Some("kDisableCompressionOption") => Ok(None),
            Some(name) => self.codec(key, name).map(Some),
        }
    }

    fn compressions(&self, key: &str) -> Result<Vec<Compression>, String> {
        let names = self.get(key).unwrap_or_default().split(':').filter(|name| !name.is_empty());
        names.map(|name| self.codec(key, name)).collect()
    }

    fn codec(&self, key: &str, name: &str) -> Result<Compression, String> {
        Ok(match name {
            "kNoCompression" => Compression::None,
            "kSnappyCompression" => Compression::Snappy,
            "kZlibCompression" => Compression::Zlib,
            "kBZip2Compression" => Compression::Bzip2,
            "kLZ4Compression" | "kLZ4HCCompression" => Compression::Lz4,
            "kZSTD" | "kZSTDNotFinalCompression" => Compression::Zstd,
            _ => {
                return Err(format!(
                    "column family {} compresses with {name} ({key}), which is not supported",
                    self.family
                ));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(choices: &str) -> Result<TableOptions, String> {
        let text = format!("[CFOptions \"default\"]\n{choices}\n");
        let file = Some(rocksfmt::OptionsFile::parse(text.as_bytes()));
        TableOptions::read(&StoredOptions { file, ..StoredOptions::default() }, "default")
    }

    #[test]
    fn compression_follows_the_level() {
        use Compression::{Lz4, None, Snappy, Zlib, Zstd};
        let per_level = "compression_per_level=kNoCompression:kLZ4HCCompression:kZSTD";
        let bottom = "bottommost_compression=kZlibCompression";
        for (choices, base_level, expected) in [
            ("", 1, [Snappy, Snappy, Snappy, Snappy, Snappy]),
            ("compression=kZSTD", 1, [Zstd, Zstd, Zstd, Zstd, Zstd]),
            (per_level, 1, [None, Lz4, Zstd, Zstd, Zstd]),
            (per_level, 3, [None, Lz4, Lz4, Lz4, Zstd]),
            (bottom, 1, [Snappy, Snappy, Snappy, Snappy, Zlib]),
            (&format!("{per_level}\n{bottom}"), 1, [None, Lz4, Zstd, Zstd, Zlib]),
        ] {
            let options = read(choices).unwrap();
            let of = |level| {
                let place = TablePlace { level, base_level, is_bottom: level == 4 };
                options.compression(place, Lz4)
            };
            assert_eq!(std::array::from_fn(of), expected, "{choices}");
        }
    }

    #[test]
    fn without_the_family_the_opening_says() {
        let file =
            Some(rocksfmt::OptionsFile::parse(b"[CFOptions \"other\"]\ncompression=kZSTD\n"));
        for file in [file, None] {
            let stored = StoredOptions { file, ..StoredOptions::default() };
            let options = TableOptions::read(&stored, "default").unwrap();
            assert_eq!(options.compression(TablePlace::FLUSH, Compression::Lz4), Compression::Lz4);
        }
    }

    #[test]
    fn unknown_codecs_are_refused_by_name() {
        for choices in
            ["compression=kXpressCompression", "compression_per_level=kZSTD:kXpressCompression"]
        {
            let refused = read(choices).unwrap_err();
            assert!(refused.contains("kXpressCompression"), "{refused}");
            assert!(refused.contains(choices.split_once('=').unwrap().0), "{refused}");
        }
    }
}
