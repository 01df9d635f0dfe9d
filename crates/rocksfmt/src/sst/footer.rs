//! The last 53 bytes of an SST file, and block handles.
//!
//! Format versions 2 to 7 are read. Versions 2 to 5 keep the handles of the metaindex and the index
//! in the footer. Versions 6 and 7 keep only the metaindex size (the block ends right before the
//! footer), a base context for all block checksums, and a checksum of the footer itself; their
//! index handle is the metaindex entry `rocksdb.index`.

use crate::block::checksum::{BLOCK_TRAILER_BYTES, BlockCheck, ChecksumType, context_modifier};
use crate::coding::{Decoder, fixed32_at, fixed64_at, put_varint, varint64_at};
use crate::error::{Error, Result};

/// Bytes of the footer of every supported format version.
pub const FOOTER_BYTES: usize = 53;

const MAGIC: u64 = 0x88E2_41B7_85F4_CFF7;
const MAGIC_LEGACY: u64 = 0xDB47_7524_8B80_FB57;
const MAGIC_PLAIN: u64 = 0x8242_2296_63BF_9564;
const MAGIC_PLAIN_LEGACY: u64 = 0x4F34_18EB_7A8F_13B8;
const MAGIC_CUCKOO: u64 = 0x9267_89D0_C5F1_7873;
const EXTENDED_MAGIC: [u8; 4] = [0x3E, 0x00, 0x7A, 0x00];

/// The place of a block in its file. The size excludes the trailer of five bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHandle {
    /// First byte of the block.
    pub offset: u64,
    /// Stored bytes without the trailer.
    pub size: u64,
}

impl BlockHandle {
    /// Reads `varint64 offset, varint64 size` at `at`; returns the handle and the offset after it.
    #[inline(always)]
    pub fn decode_at(data: &[u8], at: usize) -> Option<(BlockHandle, usize)> {
        let (offset, at) = varint64_at(data, at)?;
        let (size, at) = varint64_at(data, at)?;
        Some((BlockHandle { offset, size }, at))
    }

    /// Reads a handle that fills `data`, as metaindex values do.
    pub fn decode(data: &[u8]) -> Result<BlockHandle> {
        let mut d = Decoder::new(data);
        Ok(BlockHandle { offset: d.varint64("block offset")?, size: d.varint64("block size")? })
    }

    /// Appends the handle.
    pub(crate) fn put(self, out: &mut Vec<u8>) {
        put_varint(out, self.offset);
        put_varint(out, self.size);
    }

    /// The handle `(0, 0)` stands for a missing block.
    pub fn is_none(&self) -> bool {
        self.offset == 0 && self.size == 0
    }

    /// Bytes to read: the block and its trailer. `None` if the block does not end before `end`,
    /// which is the footer's offset or the file's size; the caller treats that as corruption.
    #[inline]
    pub fn stored_len(&self, end: u64) -> Option<usize> {
        let len = self.size.checked_add(BLOCK_TRAILER_BYTES as u64)?;
        (self.offset.checked_add(len)? <= end).then_some(())?;
        usize::try_from(len).ok()
    }
}

/// A parsed footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footer {
    /// 2 to 7.
    pub format_version: u32,
    /// How to check the file's blocks.
    pub check: BlockCheck,
    /// The block that maps names to the other meta blocks.
    pub metaindex: BlockHandle,
    /// The index; `None` from version 6 on, when the metaindex has it.
    pub index: Option<BlockHandle>,
    /// File offset of the footer: every block ends before it.
    pub offset: u64,
}

impl Footer {
    /// The footer of format version 5.
    pub(crate) fn encode(
        kind: ChecksumType,
        metaindex: BlockHandle,
        index: BlockHandle,
    ) -> [u8; FOOTER_BYTES] {
        let mut handles = Vec::with_capacity(40);
        metaindex.put(&mut handles);
        index.put(&mut handles);
        let mut out = [0; FOOTER_BYTES];
        out[0] = kind.to_byte();
        out[1..1 + handles.len()].copy_from_slice(&handles);
        out[41..45].copy_from_slice(&5u32.to_le_bytes());
        out[45..].copy_from_slice(&MAGIC.to_le_bytes());
        out
    }

    /// Parses the footer of a file of `file_size` bytes. `tail` is the end of the file: at least
    /// [`FOOTER_BYTES`] long if the file is.
    pub fn parse(tail: &[u8], file_size: u64) -> Result<Footer> {
        Footer::parse_inner(tail, file_size).map_err(|e| e.at("footer"))
    }

    fn parse_inner(tail: &[u8], file_size: u64) -> Result<Footer> {
        let Some(magic) = tail.len().checked_sub(8).and_then(|at| fixed64_at(tail, at)) else {
            return Err(Error::corruption(format!(
                "file of {file_size} bytes is too short for an SST"
            )));
        };
        match magic {
            MAGIC => {}
            MAGIC_LEGACY => {
                return Err(Error::unsupported("block-based table of format version 0"));
            }
            MAGIC_PLAIN | MAGIC_PLAIN_LEGACY => {
                return Err(Error::unsupported("plain table format"));
            }
            MAGIC_CUCKOO => return Err(Error::unsupported("cuckoo table format")),
            other => return Err(Error::corruption(format!("bad SST magic {other:016x}"))),
        }
        let Some(bytes) = tail.last_chunk::<FOOTER_BYTES>() else {
            return Err(Error::corruption(format!(
                "{} bytes of footer, {FOOTER_BYTES} needed",
                tail.len()
            )));
        };
        let Some(offset) = file_size.checked_sub(FOOTER_BYTES as u64) else {
            return Err(Error::corruption(format!(
                "file of {file_size} bytes is too short for an SST"
            )));
        };
        let format_version = fixed32_at(bytes, 41).unwrap_or(0);
        let footer = match format_version {
            2..=5 => Footer::parse_classic(bytes, format_version, offset)?,
            6..=31 => Footer::parse_checked(bytes, format_version, offset)?,
            1 => return Err(Error::unsupported("SST format version 1")),
            // Part of the footer was never written.
            other => return Err(Error::corruption(format!("SST format version {other}"))),
        };
        for (handle, name) in [(Some(footer.metaindex), "metaindex"), (footer.index, "index")] {
            if handle.is_some_and(|h| h.stored_len(offset).is_none()) {
                return Err(Error::corruption(format!(
                    "{name} block {handle:?} extends past offset {offset}"
                )));
            }
        }
        Ok(footer)
    }

    fn parse_classic(
        bytes: &[u8; FOOTER_BYTES],
        format_version: u32,
        offset: u64,
    ) -> Result<Footer> {
        let mut d = Decoder::new(&bytes[1..41]);
        let metaindex = BlockHandle {
            offset: d.varint64("metaindex offset")?,
            size: d.varint64("metaindex size")?,
        };
        let index =
            BlockHandle { offset: d.varint64("index offset")?, size: d.varint64("index size")? };
        // These versions have no others: part of the footer was never written.
        let kind = ChecksumType::from_byte(bytes[0])
            .map_err(|_| Error::corruption(format!("unknown checksum type {}", bytes[0])))?;
        let check = BlockCheck { kind, base_context: 0 };
        Ok(Footer { format_version, check, metaindex, index: Some(index), offset })
    }

    fn parse_checked(
        bytes: &[u8; FOOTER_BYTES],
        format_version: u32,
        offset: u64,
    ) -> Result<Footer> {
        let mut d = Decoder::new(&bytes[1..41]);
        let magic = d.bytes(4, "extended magic")?;
        if magic != EXTENDED_MAGIC {
            return Err(Error::corruption(format!("bad extended magic {magic:02x?}")));
        }
        let is_newer = format_version > 7;
        let kind = ChecksumType::from_byte(bytes[0]).map_err(|error| match is_newer {
            true => error,
            // These versions have no others.
            false => Error::corruption(format!("unknown checksum type {}", bytes[0])),
        })?;
        let stored = d.fixed32("footer checksum")?;
        let base_context = d.fixed32("base context checksum")?;
        let size = u64::from(d.fixed32("metaindex size")?);
        d.bytes(16, "reserved")?;
        let reserved = d.fixed64("reserved")?;
        if base_context == 0 {
            return Err(Error::corruption("base context checksum is 0"));
        }
        // Before anything that a newer version may have given a meaning: a flipped bit must not
        // look like one.
        let mut zeroed = *bytes;
        zeroed[5..9].fill(0);
        let expected = kind.compute(&zeroed).wrapping_add(context_modifier(base_context, offset));
        if stored != expected {
            return Err(Error::corruption(format!(
                "checksum computed {expected:08x}, stored {stored:08x}"
            )));
        }
        if is_newer {
            return Err(Error::unsupported(format!("SST format version {format_version}")));
        }
        if reserved != 0 {
            let what = "reserved bytes are in use";
            return Err(match kind {
                // Nothing vouches for them.
                ChecksumType::None => Error::corruption(what),
                _ => Error::unsupported(what),
            });
        }
        let Some(start) = offset.checked_sub(size + BLOCK_TRAILER_BYTES as u64) else {
            return Err(Error::corruption(format!(
                "metaindex of {size} bytes before offset {offset}"
            )));
        };
        let metaindex = BlockHandle { offset: start, size };
        Ok(Footer {
            format_version,
            check: BlockCheck { kind, base_context },
            metaindex,
            index: None,
            offset,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coding::put_varint;

    fn classic(version: u32, metaindex: (u64, u64), index: (u64, u64)) -> Vec<u8> {
        let mut f = vec![1];
        for v in [metaindex.0, metaindex.1, index.0, index.1] {
            put_varint(&mut f, v);
        }
        f.resize(41, 0);
        f.extend(version.to_le_bytes());
        f.extend(MAGIC.to_le_bytes());
        f
    }

    fn checked(version: u32, kind: ChecksumType, size: u32, offset: u64) -> Vec<u8> {
        let mut f = vec![kind.to_byte()];
        f.extend(EXTENDED_MAGIC);
        f.extend([0; 4]);
        f.extend(77u32.to_le_bytes());
        f.extend(size.to_le_bytes());
        f.resize(41, 0);
        f.extend(version.to_le_bytes());
        f.extend(MAGIC.to_le_bytes());
        seal(&mut f, kind, offset);
        f
    }

    fn seal(footer: &mut [u8], kind: ChecksumType, offset: u64) {
        footer[5..9].fill(0);
        let sum = kind.compute(footer).wrapping_add(context_modifier(77, offset));
        footer[5..9].copy_from_slice(&sum.to_le_bytes());
    }

    fn kind_of(footer: &[u8], file_size: u64) -> crate::Kind {
        Footer::parse(footer, file_size).unwrap_err().kind()
    }

    #[test]
    fn versions_2_to_5_carry_both_handles() {
        for version in 2..=5 {
            let f = classic(version, (1000, 50), (500, 400));
            let footer = Footer::parse(&f, 2000).unwrap();
            assert_eq!(footer.metaindex, BlockHandle { offset: 1000, size: 50 });
            assert_eq!(footer.index, Some(BlockHandle { offset: 500, size: 400 }));
            assert_eq!(footer.check.kind, ChecksumType::Crc32c);
            assert_eq!(footer.offset, 1947);
            assert!(Footer::parse(&f, 1050 + 53).is_err(), "metaindex trailer inside the footer");
        }
    }

    #[test]
    fn versions_6_and_7_put_the_metaindex_right_before_the_footer() {
        for kind in [ChecksumType::None, ChecksumType::Crc32c, ChecksumType::Xxh3] {
            let f = checked(6, kind, 100, 947);
            let footer = Footer::parse(&f, 1000).unwrap();
            assert_eq!(footer.metaindex, BlockHandle { offset: 947 - 105, size: 100 });
            assert_eq!((footer.index, footer.check.base_context), (None, 77));
            assert!(Footer::parse(&f, 1001).is_err(), "a footer is tied to its offset");
            for i in 0..f.len() {
                let mut bad = f.clone();
                bad[i] ^= 1;
                if kind != ChecksumType::None {
                    assert!(Footer::parse(&bad, 1000).is_err(), "flip in byte {i}");
                }
            }
        }
        let mut reserved = checked(6, ChecksumType::Xxh3, 100, 947);
        reserved[35] = 1;
        assert_eq!(kind_of(&reserved, 1000), crate::Kind::Corruption);
        seal(&mut reserved, ChecksumType::Xxh3, 947);
        assert_eq!(kind_of(&reserved, 1000), crate::Kind::Unsupported);
        assert!(Footer::parse(&checked(7, ChecksumType::Xxh3, 943, 947), 1000).is_err());
    }

    /// A power cut may leave the last sector of a table, and not the one before.
    #[test]
    fn a_torn_footer_is_damage() {
        let whole = classic(5, (1000, 50), (500, 400));
        for written in 1..45 {
            for old in [0, 0x2e] {
                let mut torn = whole.clone();
                torn[..written].fill(old);
                let e = Footer::parse(&torn, 2000).err();
                assert!(e.is_none_or(|e| e.kind() == crate::Kind::Corruption), "{written}");
            }
        }
    }

    /// One damaged table stops only its range of keys, but something unsupported stops every
    /// writer.
    #[test]
    fn a_flipped_bit_is_damage() {
        let kinds = [
            ChecksumType::Crc32c,
            ChecksumType::XxHash,
            ChecksumType::XxHash64,
            ChecksumType::Xxh3,
        ];
        let checked = kinds.iter().flat_map(|&kind| [6, 7].map(|v| checked(v, kind, 100, 947)));
        let classic = [2, 4, 5].map(|version| classic(version, (800, 50), (500, 250)));
        for footer in checked.chain(classic) {
            for bit in 0..FOOTER_BYTES * 8 {
                let mut bad = footer.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                // The version of a footer without a checksum.
                if fixed32_at(&bad, 41) == Some(1) {
                    continue;
                }
                let e = Footer::parse(&bad, 1000).err();
                assert!(e.is_none_or(|e| e.kind() == crate::Kind::Corruption), "{footer:?} {bit}");
            }
        }
    }

    #[test]
    fn other_tables_and_versions_are_refused_by_name() {
        let old = (1, classic(1, (0, 8), (13, 8)));
        let newer =
            [8, 31].map(|version| (version, checked(version, ChecksumType::Xxh3, 100, 1947)));
        for (version, footer) in std::iter::once(old).chain(newer) {
            let e = Footer::parse(&footer, 2000).unwrap_err();
            assert_eq!(e.kind(), crate::Kind::Unsupported);
            assert!(e.to_string().contains(&format!("version {version}")), "{e}");
        }
        for version in [0, 8, 31, 32, 256, 0x2e2e_2e2e] {
            let e = Footer::parse(&classic(version, (0, 8), (13, 8)), 2000).unwrap_err();
            assert_eq!(e.kind(), crate::Kind::Corruption, "{e}");
        }
        for (magic, name) in
            [(MAGIC_PLAIN, "plain"), (MAGIC_CUCKOO, "cuckoo"), (MAGIC_LEGACY, "version 0")]
        {
            let mut f = classic(5, (0, 8), (13, 8));
            f[45..].copy_from_slice(&magic.to_le_bytes());
            assert!(Footer::parse(&f, 2000).unwrap_err().to_string().contains(name));
        }
        for len in 0..FOOTER_BYTES {
            assert!(
                Footer::parse(&classic(5, (0, 8), (13, 8))[FOOTER_BYTES - len..], len as u64)
                    .is_err()
            );
        }
    }
}
