//! How the tables of a column family are written: its choices in the directory's OPTIONS file, with
//! RocksDB's defaults for those that the file does not name. Without the file, or without the
//! family in it, the options of the opening apply ([`crate::WriteOptions::compression`]).

use std::collections::BTreeMap;

use rocksfmt::{BlockOptions, ChecksumType, CodecOptions, Compression};

use crate::option_value;
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
    /// `compression_opts`.
    codec: CodecOptions,
    /// `bottommost_compression_opts`, if they are enabled.
    bottommost_codec: Option<CodecOptions>,
    /// `optimize_filters_for_hits`: tables of the bottommost level have no filter.
    skips_bottom_filters: bool,
    /// The options of the block-based table.
    blocks: BlockOptions,
}

/// Blocks are not made larger, whatever the options say: a reader holds whole blocks in memory.
const BLOCK_BYTES_MAX: u64 = 1 << 20;

impl TableOptions {
    /// Reads a family's choices.
    ///
    /// # Errors
    /// The choice that cannot be obeyed, as text.
    pub fn read(stored: &StoredOptions, family: &str) -> Result<TableOptions, String> {
        let section = |kind| stored.file.as_ref()?.section(kind, family);
        let Some(values) = section("CFOptions") else { return Ok(TableOptions::default()) };
        let choices = Choices { family, values };
        let nothing = BTreeMap::new();
        let values = section("TableOptions/BlockBasedTable").unwrap_or(&nothing);
        let blocks = Choices { family, values }.blocks()?;
        let bottommost = choices.codec_options("bottommost_compression_opts")?;
        Ok(TableOptions {
            // A file of ours names what was chosen.
            compression: match choices.compression("compression")? {
                None if stored.is_own => None,
                named => Some(named.unwrap_or(Compression::Snappy)),
            },
            per_level: choices.compressions("compression_per_level")?,
            bottommost: choices.compression("bottommost_compression")?,
            codec: choices.codec_options("compression_opts")?.options,
            bottommost_codec: bottommost.is_enabled.then_some(bottommost.options),
            skips_bottom_filters: choices.flag("optimize_filters_for_hits", false)?,
            blocks,
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

    /// How a new table compresses.
    pub fn codec(&self, place: TablePlace) -> CodecOptions {
        self.bottommost_codec.filter(|_| place.is_bottom).unwrap_or(self.codec)
    }

    /// The blocks of a new table.
    pub fn blocks(&self, place: TablePlace) -> BlockOptions {
        let mut blocks = self.blocks;
        if place.is_bottom && self.skips_bottom_filters {
            blocks.filter_millibits_per_key = 0;
        }
        blocks
    }
}

/// `compression_opts`.
#[derive(Default)]
struct StoredCodec {
    is_enabled: bool,
    options: CodecOptions,
}

/// A section of an OPTIONS file.
struct Choices<'a> {
    family: &'a str,
    values: &'a BTreeMap<String, String>,
}

impl Choices<'_> {
    /// A value, unless it is absent, empty or `nullptr`.
    fn get(&self, key: &str) -> Option<&str> {
        let value = self.values.get(key).map(String::as_str);
        value.filter(|value| !value.is_empty() && *value != "nullptr")
    }

    /// A value in one of RocksDB's forms.
    fn parsed<T>(
        &self,
        key: &str,
        default: T,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<T, String> {
        let Some(value) = self.get(key) else { return Ok(default) };
        parse(value).ok_or_else(|| not_understood(self.family, key, value))
    }

    fn unsigned(&self, key: &str, default: u64) -> Result<u64, String> {
        self.parsed(key, default, option_value::unsigned)
    }

    fn int(&self, key: &str, default: i32) -> Result<i32, String> {
        self.parsed(key, default, option_value::int)
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, String> {
        self.parsed(key, default, option_value::flag)
    }

    /// The options of the block-based table.
    fn blocks(&self) -> Result<BlockOptions, String> {
        if let Some(factory) = self.get("user_defined_index_factory") {
            return Err(format!(
                "tables of column family {} have an index of the user \
                 (user_defined_index_factory={factory}), which is not supported",
                self.family
            ));
        }
        let checksum = match self.get("checksum") {
            None | Some("kXXH3") => ChecksumType::Xxh3,
            Some("kNoChecksum") => ChecksumType::None,
            Some("kCRC32c") => ChecksumType::Crc32c,
            Some("kxxHash") => ChecksumType::XxHash,
            Some("kxxHash64") => ChecksumType::XxHash64,
            Some(other) => {
                return Err(format!(
                    "tables of column family {} have checksums of an unknown kind (checksum={other})",
                    self.family
                ));
            }
        };
        // Without whole keys a filter holds prefixes only, and no prefixes are written here.
        let filter = match self.flag("whole_key_filtering", true)? {
            true => self.get("filter_policy").map_or(0, filter_millibits),
            false => 0,
        };
        let partition_index = match self.get("index_type") {
            Some("kTwoLevelIndexSearch") => true,
            None | Some("kBinarySearch" | "kHashSearch" | "kBinarySearchWithFirstKey") => false,
            Some(other) => return Err(not_understood(self.family, "index_type", other)),
        };
        let block_bytes = self.unsigned("block_size", 4096)?.clamp(1, BLOCK_BYTES_MAX);
        let partition_bytes = self.unsigned("metadata_block_size", 4096)?;
        let partition_filters = self.flag("partition_filters", false)?;
        Ok(BlockOptions {
            block_bytes: block_bytes as usize,
            // As RocksDB: an impossible percentage is none.
            deviation_percent: match self.int("block_size_deviation", 10)? {
                percent @ 0..=100 => percent as u32,
                _ => 0,
            },
            restart_interval: self.interval("block_restart_interval", 16)?,
            index_restart_interval: self.interval("index_block_restart_interval", 1)?,
            compress_index: self.flag("enable_index_compression", true)?,
            checksum,
            filter_millibits_per_key: filter,
            partition_index,
            partition_filter: partition_index && partition_filters,
            partition_bytes: partition_bytes.clamp(1, BLOCK_BYTES_MAX) as usize,
            ..BlockOptions::default()
        })
    }

    fn interval(&self, key: &str, default: i32) -> Result<u32, String> {
        Ok(self.int(key, default)?.clamp(1, 1 << 20) as u32)
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

    /// Reads `{level=3;max_dict_bytes=0;...}`, or the older form without names.
    fn codec_options(&self, key: &str) -> Result<StoredCodec, String> {
        /// The names of the older form, in its order.
        const OLDER: [&str; 9] = [
            "window_bits",
            "level",
            "strategy",
            "max_dict_bytes",
            "zstd_max_train_bytes",
            "parallel_threads",
            "enabled",
            "max_dict_buffer_bytes",
            "use_zstd_dict_trainer",
        ];
        /// RocksDB's name for the codec's default level.
        const DEFAULT_LEVEL: i32 = 32767;
        let Some(text) = self.get(key) else { return Ok(StoredCodec::default()) };
        let named = |name: &str| match text.strip_prefix('{').and_then(|t| t.strip_suffix('}')) {
            Some(named) => {
                let mut pairs = named.split(';').filter_map(|pair| pair.split_once('='));
                pairs.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
            }
            None => text.split(':').nth(OLDER.iter().position(|older| *older == name)?),
        };
        let wrong =
            |name: &str, value: &str| not_understood(self.family, &format!("{key}: {name}"), value);
        let bytes = |name: &str| -> Result<usize, String> {
            let Some(value) = named(name) else { return Ok(0) };
            let bytes = option_value::unsigned(value).ok_or_else(|| wrong(name, value))?;
            Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
        };
        let int = |name: &str, default: i32| -> Result<i32, String> {
            let Some(value) = named(name) else { return Ok(default) };
            option_value::int(value).ok_or_else(|| wrong(name, value))
        };
        let default = CodecOptions::default();
        let level = int("level", DEFAULT_LEVEL)?;
        let stored_max = int("max_compressed_bytes_per_kb", default.stored_per_kib_max as i32)?;
        let options = CodecOptions {
            level: Some(level).filter(|&level| level != DEFAULT_LEVEL),
            stored_per_kib_max: stored_max.max(0) as _,
            dictionary_bytes: bytes("max_dict_bytes")?,
            train_bytes: bytes("zstd_max_train_bytes")?,
            buffer_bytes: bytes("max_dict_buffer_bytes")?,
        };
        let is_enabled = matches!(named("enabled"), Some("true" | "1"));
        Ok(StoredCodec { is_enabled, options })
    }
}

fn not_understood(family: &str, key: &str, value: &str) -> String {
    format!("column family {family}: {key}={value} cannot be understood")
}

/// Thousandths of a bit of filter for each key, by the name of a filter policy: `bloomfilter:9.9`.
/// A Ribbon policy states the bits of a Bloom filter of the same accuracy. Newer versions of
/// RocksDB do not state the bits; policies of users have none that are known here.
fn filter_millibits(policy: &str) -> u64 {
    const BITS_USUAL: f64 = 10.0;
    let name = policy.trim_start_matches('{').split(';').next().unwrap_or_default();
    let name = name.strip_prefix("id=").unwrap_or(name);
    let bits = name.split(':').nth(1).and_then(|bits| bits.parse().ok()).unwrap_or(BITS_USUAL);
    // As RocksDB rounds.
    match bits {
        bits if bits < 0.5 => 0,
        bits if bits < 1.0 => 1000,
        bits if bits < 100.0 => (bits * 1000.0 + 0.500_001) as u64,
        _ => 100_000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(choices: &str) -> Result<TableOptions, String> {
        read_with(choices, "")
    }

    fn read_with(choices: &str, table: &str) -> Result<TableOptions, String> {
        let text = format!(
            "[CFOptions \"default\"]\n{choices}\n\
             [TableOptions/BlockBasedTable \"default\"]\n{table}\n"
        );
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

    #[test]
    fn the_forms_of_compression_options_are_read() {
        let braces = "compression_opts={max_dict_buffer_bytes=7;checksum=false;enabled=false;\
                      max_dict_bytes=16384;max_compressed_bytes_per_kb=1000;parallel_threads=1;\
                      zstd_max_train_bytes=1048576;level=5;strategy=0;window_bits=-14;}";
        let expected = CodecOptions {
            level: Some(5),
            stored_per_kib_max: 1000,
            dictionary_bytes: 16384,
            train_bytes: 1 << 20,
            buffer_bytes: 7,
        };
        let options = read(braces).unwrap();
        let bottom = TablePlace { level: 6, base_level: 1, is_bottom: true };
        assert_eq!((options.codec(TablePlace::FLUSH), options.codec(bottom)), (expected, expected));
        let older = "bottommost_compression_opts=-14:32767:0:16384:0:1:true:0:true";
        let options = read(&format!("{braces}\n{older}")).unwrap();
        assert_eq!(options.codec(TablePlace::FLUSH), expected);
        let expected = CodecOptions { dictionary_bytes: 16384, ..CodecOptions::default() };
        assert_eq!(options.codec(bottom), expected);
        let refused = read("compression_opts={level=high;}").unwrap_err();
        assert!(refused.contains("compression_opts: level=high"), "{refused}");
    }

    #[test]
    fn the_options_of_blocks_are_read() {
        let millibits = |policy: &str| {
            let options = read_with("", &format!("filter_policy={policy}")).unwrap();
            options.blocks(TablePlace::FLUSH).filter_millibits_per_key
        };
        for (policy, expected) in [
            ("nullptr", 0),
            ("bloomfilter:10:false", 10_000),
            ("bloomfilter:10.5:false", 10_500),
            ("rocksdb.BloomFilter:0.2:false", 0),
            ("ribbonfilter:8:0", 8000),
            ("{id=bloomfilter:12:false;bloom_before_level=2147483647;}", 12_000),
            ("bloomfilter", 10_000),
            ("bloomfilter:1000:false", 100_000),
        ] {
            assert_eq!(millibits(policy), expected, "{policy}");
        }
        let all = "block_size=16384\nblock_size_deviation=200\nblock_restart_interval=0\n\
                   index_block_restart_interval=4\nindex_type=kTwoLevelIndexSearch\n\
                   partition_filters=true\nmetadata_block_size=1000\nchecksum=kCRC32c\n\
                   enable_index_compression=false\nfilter_policy=bloomfilter:10:false";
        let options = read_with("optimize_filters_for_hits=true", all).unwrap();
        let expected = BlockOptions {
            block_bytes: 16384,
            deviation_percent: 0,
            restart_interval: 1,
            index_restart_interval: 4,
            partition_index: true,
            partition_filter: true,
            partition_bytes: 1000,
            checksum: ChecksumType::Crc32c,
            ..BlockOptions::default()
        };
        assert_eq!(options.blocks(TablePlace::FLUSH), expected);
        let bottom = TablePlace { level: 6, base_level: 1, is_bottom: true };
        assert_eq!(options.blocks(bottom).filter_millibits_per_key, 0);
        for (wrong, part) in [
            ("checksum=kNew", "checksum=kNew"),
            ("block_size=big", "block_size=big"),
            ("index_type=kFoo", "index_type=kFoo"),
            ("partition_filters=maybe", "partition_filters=maybe"),
            ("user_defined_index_factory=trie", "user_defined_index_factory=trie"),
        ] {
            let refused = read_with("", wrong).unwrap_err();
            assert!(refused.contains(part), "{refused}");
        }
    }
}
