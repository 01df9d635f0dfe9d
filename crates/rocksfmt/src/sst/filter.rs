//! Filter blocks: may this file hold this key?
//!
//! A filter answers "no" only if it is certain. Its last five bytes define its kind. New Bloom
//! (from format version 5 on) and legacy Bloom filters are evaluated; Ribbon filters and all
//! unknown ones always answer "maybe". Filters hold user keys without timestamps; they do not cover
//! range tombstones.
//!
//! Hash the key once ([`FilterKey`]), then query the filter of each file. Hot: a query touches one
//! cache line per filter; [`FilterLayout::line`] names it, so that a caller with several files can
//! touch the lines first.

use std::ops::Range;

use crate::coding::{fixed32_at, hash32};
use crate::sst::xxph3::xxph3;

/// Bytes of metadata at the end of a filter.
const METADATA_BYTES: usize = 5;
/// Bytes of one cache line of a filter.
const LINE_BYTES: usize = 64;
const LEGACY_SEED: u32 = 0xBC9F_1D34;

/// A key for queries of many filters, hashed once.
#[derive(Clone, Copy, Debug)]
pub struct FilterKey<'k> {
    key: &'k [u8],
    hash: u64,
}

impl<'k> FilterKey<'k> {
    /// Hashes a user key.
    #[inline]
    pub fn new(key: &'k [u8]) -> FilterKey<'k> {
        FilterKey { key, hash: xxph3(key) }
    }

    /// The 64-bit hash for new Bloom filters.
    #[inline]
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

/// The kind of filter in a block, with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterLayout {
    /// Without keys: never matches.
    Empty,
    /// Always answers "maybe", for the given reason.
    AlwaysMatch(AlwaysMatch),
    /// New Bloom: lines of 512 bits, in any number.
    Bloom {
        /// Number of lines.
        lines: u32,
        /// Bits tested per key.
        probes: u8,
    },
    /// Bloom of format versions below 5.
    LegacyBloom {
        /// Number of lines.
        lines: u32,
        /// Binary logarithm of the bytes per line.
        line_bytes_log2: u8,
        /// Bits tested per key.
        probes: u8,
    },
}

/// Why a filter always matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlwaysMatch {
    /// It was written that way.
    Written,
    /// A Ribbon filter.
    Ribbon,
    /// Parameters this reader does not know.
    Unknown,
}

impl FilterLayout {
    /// Parses the end of a full filter or a filter partition. An unknown filter always matches.
    pub fn parse(data: &[u8]) -> FilterLayout {
        let Some(bits) = data.len().checked_sub(METADATA_BYTES).filter(|&n| n > 0) else {
            return FilterLayout::Empty;
        };
        match (data[bits], data[bits + 1], data[bits + 2], data[bits + 3], data[bits + 4]) {
            (0, ..) => FilterLayout::AlwaysMatch(AlwaysMatch::Written),
            (0xFE, ..) => FilterLayout::AlwaysMatch(AlwaysMatch::Ribbon),
            (0xFF, 0, probes @ 1..=30, 0, 0) if bits.is_multiple_of(LINE_BYTES) => {
                match u32::try_from(bits / LINE_BYTES) {
                    Ok(lines) => FilterLayout::Bloom { lines, probes },
                    Err(_) => FilterLayout::AlwaysMatch(AlwaysMatch::Unknown),
                }
            }
            (probes @ 1..=127, ..) => {
                let lines = fixed32_at(data, bits + 1).unwrap_or(0);
                let line_bytes = bits.checked_div(lines as usize).unwrap_or(0);
                if line_bytes.is_power_of_two()
                    && line_bytes * lines as usize == bits
                    && line_bytes < 1 << 28
                {
                    let line_bytes_log2 = line_bytes.trailing_zeros() as u8;
                    FilterLayout::LegacyBloom { lines, line_bytes_log2, probes }
                } else {
                    FilterLayout::AlwaysMatch(AlwaysMatch::Unknown)
                }
            }
            _ => FilterLayout::AlwaysMatch(AlwaysMatch::Unknown),
        }
    }

    /// The range of the filter that [`FilterLayout::may_contain`] reads; empty if it reads nothing.
    #[inline]
    pub fn line(&self, key: &FilterKey<'_>) -> Range<usize> {
        match *self {
            FilterLayout::Bloom { lines, .. } => {
                let start = bloom_line(key.hash, lines);
                start..start + LINE_BYTES
            }
            FilterLayout::LegacyBloom { lines, line_bytes_log2, .. } => {
                let start =
                    ((hash32(key.key, LEGACY_SEED) % lines.max(1)) as usize) << line_bytes_log2;
                start..start + (1 << line_bytes_log2)
            }
            FilterLayout::Empty | FilterLayout::AlwaysMatch(_) => 0..0,
        }
    }

    /// Whether the key may be in the file. `data` is the block from which this layout was parsed.
    #[inline]
    pub fn may_contain(&self, data: &[u8], key: &FilterKey<'_>) -> bool {
        match *self {
            FilterLayout::Bloom { lines, probes } => {
                let start = bloom_line(key.hash, lines);
                match data.get(start..).and_then(|d| d.first_chunk::<LINE_BYTES>()) {
                    Some(line) => bloom_match(line, key.hash, probes),
                    None => true,
                }
            }
            FilterLayout::LegacyBloom { probes, .. } => {
                data.get(self.line(key)).is_none_or(|line| legacy_match(line, key.key, probes))
            }
            FilterLayout::AlwaysMatch(_) => true,
            FilterLayout::Empty => false,
        }
    }
}

#[inline(always)]
fn bloom_line(hash: u64, lines: u32) -> usize {
    ((u64::from(hash as u32) * u64::from(lines)) >> 32) as usize * LINE_BYTES
}

#[inline(always)]
fn bloom_match(line: &[u8; LINE_BYTES], hash: u64, probes: u8) -> bool {
    let mut h = (hash >> 32) as u32;
    for _ in 0..probes {
        let bit = (h >> 23) as usize;
        if line[bit >> 3] & (1 << (bit & 7)) == 0 {
            return false;
        }
        h = h.wrapping_mul(0x9E37_79B9);
    }
    true
}

fn legacy_match(line: &[u8], key: &[u8], probes: u8) -> bool {
    let mut h = hash32(key, LEGACY_SEED);
    let delta = h.rotate_right(17);
    let mask = line.len() * 8 - 1;
    for _ in 0..probes {
        let bit = h as usize & mask;
        if line[bit >> 3] & (1 << (bit & 7)) == 0 {
            return false;
        }
        h = h.wrapping_add(delta);
    }
    true
}

/// Builds new Bloom filters that RocksDB reads.
#[derive(Clone, Debug)]
pub struct BloomBuilder {
    hashes: Vec<u64>,
    millibits_per_key: u64,
}

impl BloomBuilder {
    /// A filter with this many thousandths of a bit for each key (10 bits per key: 10 000).
    pub fn new(millibits_per_key: u64) -> BloomBuilder {
        BloomBuilder { hashes: Vec::new(), millibits_per_key }
    }

    /// Adds a user key. Consecutive equal keys count once.
    pub fn add(&mut self, key: &[u8]) {
        let hash = xxph3(key);
        if self.hashes.last() != Some(&hash) {
            self.hashes.push(hash);
        }
    }

    /// The filter block.
    pub fn finish(self) -> Vec<u8> {
        if self.hashes.is_empty() {
            return Vec::new();
        }
        let mut bits = BloomBits::new(self.hashes.len() as u64, self.millibits_per_key);
        self.hashes.into_iter().for_each(|hash| bits.add(hash));
        bits.finish()
    }
}

/// The bits of a filter for a known number of keys.
#[derive(Clone, Debug)]
pub(crate) struct BloomBits {
    bits: Vec<u8>,
    lines: u32,
    probes: u8,
}

impl BloomBits {
    pub fn new(keys: u64, millibits_per_key: u64) -> BloomBits {
        let bits = (keys * millibits_per_key).div_ceil(1000);
        let bytes = (bits.div_ceil(8) as usize).next_multiple_of(LINE_BYTES).max(LINE_BYTES);
        let lines = u32::try_from(bytes / LINE_BYTES).unwrap_or(u32::MAX);
        let mut bits = Vec::with_capacity(lines as usize * LINE_BYTES + METADATA_BYTES);
        bits.resize(lines as usize * LINE_BYTES, 0);
        BloomBits { bits, lines, probes: probes_for(millibits_per_key) }
    }

    /// Adds a key by its hash.
    #[inline]
    pub fn add(&mut self, hash: u64) {
        let start = bloom_line(hash, self.lines);
        let Some(line) = self.bits[start..].first_chunk_mut::<LINE_BYTES>() else { return };
        let mut h = (hash >> 32) as u32;
        for _ in 0..self.probes {
            let bit = (h >> 23) as usize;
            line[bit >> 3] |= 1 << (bit & 7);
            h = h.wrapping_mul(0x9E37_79B9);
        }
    }

    /// The filter block.
    pub fn finish(mut self) -> Vec<u8> {
        self.bits.extend([0xFF, 0, self.probes, 0, 0]);
        self.bits
    }
}

/// RocksDB's choice of probes for a filter of this density.
fn probes_for(millibits_per_key: u64) -> u8 {
    const STEPS: [u64; 12] =
        [2080, 3580, 5100, 6640, 8300, 10070, 11720, 14001, 16050, 18300, 22001, 25501];
    match STEPS.iter().position(|&limit| millibits_per_key <= limit) {
        Some(i) => i as u8 + 1,
        None if millibits_per_key > 50_000 => 24,
        None => ((millibits_per_key - 1) / 2000 - 1) as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "0a000000000104000000000000400000000000410000000200000400000000002000020002000020000000002001010000000000020000000000040000000000ff00060000";

    fn unhex(s: &str) -> Vec<u8> {
        (0..s.len()).step_by(2).map(|i| u8::from_str_radix(&s[i..i + 2], 16).unwrap()).collect()
    }

    #[test]
    fn the_builder_writes_the_bytes_of_rocksdb() {
        let mut b = BloomBuilder::new(10_000);
        for key in [b"a", b"a", b"b", b"c"] {
            b.add(key);
        }
        assert_eq!(b.finish(), unhex(ABC));
    }

    #[test]
    fn a_filter_from_rocksdb_finds_its_keys_and_few_others() {
        let data = unhex(ABC);
        let layout = FilterLayout::parse(&data);
        assert_eq!(layout, FilterLayout::Bloom { lines: 1, probes: 6 });
        for key in [b"a", b"b", b"c"] {
            assert!(layout.may_contain(&data, &FilterKey::new(key)));
        }
        let hits = (0..10_000u32)
            .filter(|i| layout.may_contain(&data, &FilterKey::new(&i.to_le_bytes())))
            .count();
        assert!(hits < 50, "{hits} of 10000 unknown keys match a nearly empty filter");
    }

    #[test]
    fn a_large_filter_has_no_false_negative_and_about_one_percent_false_positives() {
        let mut b = BloomBuilder::new(10_000);
        let key = |i: u32| format!("key{i:09}");
        for i in 0..20_000 {
            b.add(key(i).as_bytes());
        }
        let data = b.finish();
        let layout = FilterLayout::parse(&data);
        let matches = |i| layout.may_contain(&data, &FilterKey::new(key(i).as_bytes()));
        assert!((0..20_000).all(matches));
        let wrong = (20_000..40_000).filter(|&i| matches(i)).count();
        assert!((50..400).contains(&wrong), "{wrong} false positives of 20000");
    }

    #[test]
    fn the_last_five_bytes_decide() {
        let with = |meta: [u8; 5]| [vec![0; 64], meta.to_vec()].concat();
        assert_eq!(FilterLayout::parse(&[]), FilterLayout::Empty);
        assert_eq!(FilterLayout::parse(&[0xFF, 0, 6, 0, 0]), FilterLayout::Empty);
        for (meta, reason) in [
            ([0, 0, 0, 0, 0], AlwaysMatch::Written),
            ([0xFE, 0, 1, 0, 0], AlwaysMatch::Ribbon),
            ([0xFF, 1, 6, 0, 0], AlwaysMatch::Unknown),
            ([0xFF, 0, 0x26, 0, 0], AlwaysMatch::Unknown),
            ([0xFF, 0, 6, 0, 1], AlwaysMatch::Unknown),
            ([0xFF, 0, 0, 0, 0], AlwaysMatch::Unknown),
            ([0x80, 0, 0, 0, 0], AlwaysMatch::Unknown),
            ([6, 0, 0, 0, 0], AlwaysMatch::Unknown),
            ([6, 3, 0, 0, 0], AlwaysMatch::Unknown),
        ] {
            let data = with(meta);
            assert_eq!(
                FilterLayout::parse(&data),
                FilterLayout::AlwaysMatch(reason),
                "{meta:02x?}"
            );
            assert!(FilterLayout::parse(&data).may_contain(&data, &FilterKey::new(b"x")));
        }
        let data = with([6, 1, 0, 0, 0]);
        let layout = FilterLayout::parse(&data);
        assert_eq!(layout, FilterLayout::LegacyBloom { lines: 1, line_bytes_log2: 6, probes: 6 });
        assert!(!layout.may_contain(&data, &FilterKey::new(b"x")));
    }

    #[test]
    fn probes_follow_the_table() {
        for (millibits, probes) in
            [(1000, 1), (10_000, 6), (16_050, 9), (25_501, 12), (30_000, 13), (60_000, 24)]
        {
            assert_eq!(probes_for(millibits), probes, "{millibits}");
        }
    }
}
