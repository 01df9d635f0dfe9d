//! Blob files: values kept outside the SSTs (integrated BlobDB).
//!
//! ```text
//! header (30 bytes)   { record header (32), key, value }*   footer (32 bytes)
//! ```
//!
//! An SST entry of type BlobIndex holds a [`BlobIndex`]: file, offset of the *value*, size. The
//! record header and the key are right before the value. A reader parses the index, checks that the
//! record is inside the file ([`BlobIndex::record_range`]), reads that range, verifies it
//! ([`BlobIndex::verify_record`]) and decompresses the value.
//!
//! Entries with an expiration belong to the older stacked BlobDB and are refused.

use std::ops::Range;

use crate::block::decompress::Compression;
use crate::coding::{Decoder, put_varint};
use crate::crc::{crc32c, crc32c_append, mask_crc};
use crate::error::{Error, Result};
use crate::manifest::file_meta::BlobFileMeta;

/// Bytes of a blob file's header.
pub const BLOB_HEADER_BYTES: usize = 30;
/// Bytes of a blob file's footer.
pub const BLOB_FOOTER_BYTES: usize = 32;
/// Bytes before the key of each record.
pub const BLOB_RECORD_HEADER_BYTES: usize = 32;

const MAGIC: u32 = 0x0024_8F37;
const VERSION: u32 = 1;

/// The header of a blob file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobHeader {
    /// The column family of all its values.
    pub column_family_id: u32,
    /// The compression of its values.
    pub compression: Compression,
}

impl BlobHeader {
    /// Parses the first [`BLOB_HEADER_BYTES`] of a file.
    ///
    /// There is one version, and the header has no checksum: whatever else it says is damage.
    pub fn parse(data: &[u8]) -> Result<BlobHeader> {
        BlobHeader::parse_inner(data).map_err(|e| e.at("blob file header"))
    }

    fn parse_inner(data: &[u8]) -> Result<BlobHeader> {
        let mut d = Decoder::new(data);
        check_magic(d.fixed32("magic")?)?;
        let version = d.fixed32("version")?;
        if version != VERSION {
            return Err(Error::corruption(format!("blob file version {version}")));
        }
        let column_family_id = d.fixed32("column family")?;
        let flags = d.u8("flags")?;
        let compression = d.u8("compression")?;
        let compression = Compression::from_byte(compression)
            .map_err(|_| Error::corruption(format!("compression type 0x{compression:02x}")))?;
        let expires = (d.fixed64("expiration")?, d.fixed64("expiration")?);
        if flags & 1 != 0 || expires != (0, 0) {
            return Err(Error::corruption("values that expire (stacked BlobDB)"));
        }
        Ok(BlobHeader { column_family_id, compression })
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; BLOB_HEADER_BYTES] {
        let mut bytes = [0; BLOB_HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.column_family_id.to_le_bytes());
        bytes[13] = self.compression.to_byte();
        bytes
    }
}

/// The footer of a finished blob file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobFooter {
    /// Number of records.
    pub count: u64,
}

impl BlobFooter {
    /// Parses and verifies the last [`BLOB_FOOTER_BYTES`] of a file.
    pub fn parse(data: &[u8]) -> Result<BlobFooter> {
        BlobFooter::parse_inner(data).map_err(|e| e.at("blob file footer"))
    }

    fn parse_inner(data: &[u8]) -> Result<BlobFooter> {
        let mut d = Decoder::new(data);
        check_magic(d.fixed32("magic")?)?;
        let count = d.fixed64("count")?;
        let expires = (d.fixed64("expiration")?, d.fixed64("expiration")?);
        let crc = d.fixed32("checksum")?;
        check_crc("footer", mask_crc(crc32c(&data[..BLOB_FOOTER_BYTES - 4])), crc)?;
        if expires != (0, 0) {
            return Err(Error::unsupported("values that expire (stacked BlobDB)"));
        }
        Ok(BlobFooter { count })
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; BLOB_FOOTER_BYTES] {
        let mut bytes = [0; BLOB_FOOTER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.count.to_le_bytes());
        let crc = mask_crc(crc32c(&bytes[..BLOB_FOOTER_BYTES - 4]));
        bytes[BLOB_FOOTER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

/// The reference that an SST entry holds instead of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobIndex {
    /// The blob file; 0 means the SST itself ("embedded blobs").
    pub file_number: u64,
    /// Offset of the value's first byte.
    pub offset: u64,
    /// Stored bytes of the value.
    pub size: u64,
    /// The compression of the value.
    pub compression: Compression,
}

impl BlobIndex {
    /// Parses the value of an entry of type BlobIndex.
    pub fn parse(value: &[u8]) -> Result<BlobIndex> {
        BlobIndex::parse_inner(value).map_err(|e| e.at("blob index"))
    }

    fn parse_inner(value: &[u8]) -> Result<BlobIndex> {
        let mut d = Decoder::new(value);
        match d.u8("kind")? {
            1 => {}
            0 | 2 => return Err(Error::unsupported("value that expires (stacked BlobDB)")),
            kind => return Err(Error::corruption(format!("kind {kind}"))),
        }
        let file_number = d.varint64("file number")?;
        let offset = d.varint64("offset")?;
        let size = d.varint64("size")?;
        let compression = Compression::from_byte(d.u8("compression")?)?;
        if !d.is_empty() {
            return Err(Error::corruption(format!("{} bytes left over", d.len())));
        }
        if file_number == 0 {
            return Err(Error::unsupported("value embedded in its own SST"));
        }
        Ok(BlobIndex { file_number, offset, size, compression })
    }

    /// Appends its bytes: the value of an entry of type BlobIndex.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(1);
        for number in [self.file_number, self.offset, self.size] {
            put_varint(out, number);
        }
        out.push(self.compression.to_byte());
    }

    /// The range of the blob file to read: record header, key and value. `file_size` is the size of
    /// the whole file.
    pub fn record_range(&self, key_len: usize, file_size: u64) -> Result<Range<u64>> {
        let before = (BLOB_RECORD_HEADER_BYTES + key_len) as u64;
        let end = self.offset.checked_add(self.size);
        let limit = file_size.checked_sub(BLOB_FOOTER_BYTES as u64);
        match (self.offset.checked_sub(before), end, limit) {
            (Some(start), Some(end), Some(limit))
                if start >= BLOB_HEADER_BYTES as u64 && end <= limit =>
            {
                Ok(start..end)
            }
            _ => Err(Error::corruption(format!(
                "value of {} bytes at {} does not fit blob file {} of {file_size} bytes",
                self.size, self.offset, self.file_number
            ))),
        }
    }

    /// Checks the bytes of [`BlobIndex::record_range`] against their checksums, the entry's user
    /// key and this reference; returns the stored value.
    pub fn verify_record<'d>(&self, record: &'d [u8], user_key: &[u8]) -> Result<&'d [u8]> {
        self.verify_inner(record, user_key)
            .map_err(|e| e.at(format!("blob file {} at {}", self.file_number, self.offset)))
    }

    fn verify_inner<'d>(&self, record: &'d [u8], user_key: &[u8]) -> Result<&'d [u8]> {
        let header = BlobRecord::parse(record)?;
        if header.key_len != user_key.len() as u64 || header.value_len != self.size {
            return Err(Error::corruption(format!(
                "record has a key of {} and a value of {} bytes, the index says {} and {}",
                header.key_len,
                header.value_len,
                user_key.len(),
                self.size
            )));
        }
        let (key, value) = header.verify(record)?;
        if key != user_key {
            return Err(Error::corruption("record belongs to another key"));
        }
        Ok(value)
    }
}

/// Least bytes of a record in a file whose records are not known in advance.
const RECORD_BYTES_MIN: u64 = BLOB_RECORD_HEADER_BYTES as u64 + 1;

impl BlobFileMeta {
    /// A file of `file_bytes` with room for records that will be written: its count and its bytes
    /// are upper bounds; see `docs/formats/blob.md`.
    pub fn reserved(number: u64, file_bytes: u64) -> BlobFileMeta {
        let total_bytes = file_bytes.saturating_sub((BLOB_HEADER_BYTES + BLOB_FOOTER_BYTES) as u64);
        let total_count = total_bytes / RECORD_BYTES_MIN;
        BlobFileMeta { number, total_count, total_bytes, garbage_count: 0, garbage_bytes: 0 }
    }

    /// Whether count and bytes are those of [`BlobFileMeta::reserved`]. Counts of records whose
    /// values have more than a byte never are.
    pub fn is_reserved(&self) -> bool {
        self.total_count > 0 && self.total_count == self.total_bytes / RECORD_BYTES_MIN
    }
}

/// The header of one record of a blob file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobRecord {
    /// Bytes of the key.
    pub key_len: u64,
    /// Stored bytes of the value.
    pub value_len: u64,
    blob_crc: u32,
}

impl BlobRecord {
    /// Parses and verifies the first [`BLOB_RECORD_HEADER_BYTES`] of a record.
    pub fn parse(data: &[u8]) -> Result<BlobRecord> {
        let mut d = Decoder::new(data);
        let key_len = d.fixed64("key length")?;
        let value_len = d.fixed64("value length")?;
        let expiration = d.fixed64("expiration")?;
        let header_crc = d.fixed32("header checksum")?;
        let blob_crc = d.fixed32("blob checksum")?;
        check_crc("record header", mask_crc(crc32c(&data[..24])), header_crc)?;
        if expiration != 0 {
            return Err(Error::unsupported("value that expires (stacked BlobDB)"));
        }
        Ok(BlobRecord { key_len, value_len, blob_crc })
    }

    /// The first offset from `from` on at which `data` has the header of a record, told by its
    /// checksum. A value may hold what looks like a record, so what is found is one only if an
    /// index refers to it.
    pub fn find(data: &[u8], from: usize) -> Option<(usize, BlobRecord)> {
        const LENGTHS_AND_EXPIRATION: usize = 24;
        const EXPIRATION: usize = 16;
        let mut at = from;
        while let Some(header) = data.get(at..at.checked_add(BLOB_RECORD_HEADER_BYTES)?) {
            let (sums, stored) = header.split_at(LENGTHS_AND_EXPIRATION);
            // The expiration is 0: no header begins where its last other byte would be within it.
            if let Some(last) = sums[EXPIRATION..].iter().rposition(|byte| *byte != 0) {
                at += last + 1;
                continue;
            }
            let is_header = stored.first_chunk() == Some(&mask_crc(crc32c(sums)).to_le_bytes());
            if is_header && let Ok(record) = BlobRecord::parse(header) {
                return Some((at, record));
            }
            at += 1;
            // A run of zeros: a header that begins within it ends in what follows.
            if sums.iter().all(|byte| *byte == 0) {
                let rest = &data[at..];
                let next = rest.iter().position(|byte| *byte != 0).unwrap_or(rest.len());
                at += next.saturating_sub(BLOB_RECORD_HEADER_BYTES);
            }
        }
        None
    }

    /// Appends a record for a value as it is stored.
    pub fn encode(key: &[u8], stored: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        for number in [key.len() as u64, stored.len() as u64, 0] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        let header_crc = mask_crc(crc32c(&out[start..]));
        let blob_crc = mask_crc(crc32c_append(crc32c(key), stored));
        out.extend_from_slice(&header_crc.to_le_bytes());
        out.extend_from_slice(&blob_crc.to_le_bytes());
        out.extend_from_slice(key);
        out.extend_from_slice(stored);
    }

    /// Bytes of the whole record: header, key and value.
    pub fn record_len(&self) -> u64 {
        (BLOB_RECORD_HEADER_BYTES as u64)
            .saturating_add(self.key_len)
            .saturating_add(self.value_len)
    }

    /// Checks key and value, which follow the header in `record`, and returns them.
    pub fn verify<'d>(&self, record: &'d [u8]) -> Result<(&'d [u8], &'d [u8])> {
        let mut d = Decoder::new(record);
        d.bytes(BLOB_RECORD_HEADER_BYTES, "header")?;
        let key = d.bytes(usize::try_from(self.key_len).unwrap_or(usize::MAX), "key")?;
        let value = d.bytes(usize::try_from(self.value_len).unwrap_or(usize::MAX), "value")?;
        self.verify_crc(crc32c_append(crc32c(key), value))?;
        Ok((key, value))
    }

    /// Checks key and value by the CRC32C of both together.
    pub fn verify_crc(&self, crc: u32) -> Result<()> {
        check_crc("value", mask_crc(crc), self.blob_crc)
    }
}

fn check_magic(found: u32) -> Result<()> {
    if found != MAGIC {
        return Err(Error::corruption(format!("bad magic {found:08x}")));
    }
    Ok(())
}

fn check_crc(what: &'static str, computed: u32, stored: u32) -> Result<()> {
    if computed != stored {
        return Err(Error::corruption(format!(
            "{what} checksum computed {computed:08x}, stored {stored:08x}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coding::put_varint;

    fn header() -> Vec<u8> {
        let mut h = MAGIC.to_le_bytes().to_vec();
        h.extend(1u32.to_le_bytes());
        h.extend(3u32.to_le_bytes());
        h.extend([0, 7]);
        h.extend([0; 16]);
        h
    }

    #[test]
    fn records_are_found_from_any_offset_on() {
        let mut data = vec![0; 50];
        let mut starts = Vec::new();
        for (key, value) in [(&b"a"[..], &[7_u8; 100][..]), (b"", b""), (b"bc", &[0; 60])] {
            starts.push(data.len());
            data.extend(record(key, value));
        }
        data.extend([0; 40]);
        for from in 0..data.len() + 2 {
            let next = starts.iter().copied().find(|start| *start >= from);
            let found = BlobRecord::find(&data, from);
            assert_eq!(found.map(|(at, _)| at), next, "from {from}");
        }
        let (at, found) = BlobRecord::find(&data, 51).unwrap();
        assert_eq!((found.key_len, found.value_len), (0, 0));
        assert!(found.verify(&data[at..]).is_ok());
        assert_eq!(BlobRecord::find(&data, usize::MAX), None);
        // Long runs of zeros before a record, whose header begins with zeros or not.
        for key in [&[b'k'; 256][..], b"k", b""] {
            let data = [vec![0; 1000], record(key, b"value")].concat();
            for from in [0, 1, 500, 968, 999, 1000] {
                let found = BlobRecord::find(&data, from);
                assert_eq!(found.map(|(at, _)| at), Some(1000), "{} from {from}", key.len());
            }
        }
    }

    fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
        let mut r = (key.len() as u64).to_le_bytes().to_vec();
        r.extend((value.len() as u64).to_le_bytes());
        r.extend(0u64.to_le_bytes());
        r.extend(mask_crc(crc32c(&r)).to_le_bytes());
        r.extend(mask_crc(crc32c(&[key, value].concat())).to_le_bytes());
        r.extend(key);
        r.extend(value);
        r
    }

    fn index(file: u64, offset: u64, size: u64) -> Vec<u8> {
        let mut v = vec![1];
        for n in [file, offset, size] {
            put_varint(&mut v, n);
        }
        v.push(7);
        v
    }

    #[test]
    fn a_value_is_found_through_its_index() {
        let mut file = header();
        assert_eq!(
            BlobHeader::parse(&file).unwrap(),
            BlobHeader { column_family_id: 3, compression: Compression::Zstd }
        );
        file.extend(record(b"key", b"some value"));
        let mut footer = MAGIC.to_le_bytes().to_vec();
        footer.extend(1u64.to_le_bytes());
        footer.extend([0; 16]);
        footer.extend(mask_crc(crc32c(&footer)).to_le_bytes());
        assert_eq!(BlobFooter::parse(&footer).unwrap(), BlobFooter { count: 1 });
        file.extend(&footer);

        let index = BlobIndex::parse(&index(9, 65, 10)).unwrap();
        let range = index.record_range(3, file.len() as u64).unwrap();
        let bytes = &file[range.start as usize..range.end as usize];
        assert_eq!(index.verify_record(bytes, b"key").unwrap(), b"some value");
        assert!(index.verify_record(bytes, b"yek").is_err());
        for at in 0..bytes.len() {
            let mut bad = bytes.to_vec();
            bad[at] ^= 4;
            assert!(index.verify_record(&bad, b"key").is_err(), "flip at {at}");
            assert!(index.verify_record(&bytes[..at], b"key").is_err(), "cut at {at}");
        }
        footer[5] ^= 1;
        assert!(BlobFooter::parse(&footer).is_err());
    }

    #[test]
    fn what_is_written_has_the_bytes_of_the_format() {
        let written = BlobHeader { column_family_id: 3, compression: Compression::Zstd }.encode();
        assert_eq!(written[..], header());
        let mut bytes = written.to_vec();
        BlobRecord::encode(b"key", b"some value", &mut bytes);
        assert_eq!(bytes[BLOB_HEADER_BYTES..], record(b"key", b"some value"));
        assert_eq!(BlobFooter::parse(&BlobFooter { count: 7 }.encode()).unwrap().count, 7);
        let mut value = Vec::new();
        let (file_number, offset, size) = (9, 65, 1 << 40);
        let written = BlobIndex { file_number, offset, size, compression: Compression::Zstd };
        written.encode(&mut value);
        assert_eq!(value, index(9, 65, 1 << 40));
        assert_eq!(BlobIndex::parse(&value).unwrap(), written);
    }

    #[test]
    fn an_index_outside_its_file_is_corruption() {
        for (offset, size) in [(64, 10), (65, 11), (u64::MAX, 10), (65, u64::MAX), (0, 0)] {
            let index = BlobIndex { file_number: 9, offset, size, compression: Compression::None };
            assert!(index.record_range(3, 107).is_err(), "{offset} {size}");
        }
        let index =
            BlobIndex { file_number: 9, offset: 65, size: 10, compression: Compression::None };
        assert_eq!(index.record_range(3, 107).unwrap(), 30..75);
        assert!(index.record_range(3, 20).is_err());
    }

    #[test]
    fn a_flipped_bit_is_damage() {
        let whole = [header(), BlobFooter { count: 7 }.encode().to_vec()].concat();
        for bit in 0..whole.len() * 8 {
            let mut bad = whole.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let (header, footer) = bad.split_at(BLOB_HEADER_BYTES);
            let (header, footer) =
                (BlobHeader::parse(header).err(), BlobFooter::parse(footer).err());
            for e in [header, footer].into_iter().flatten() {
                assert_eq!(e.kind(), crate::Kind::Corruption, "{bit}: {e}");
            }
        }
    }

    #[test]
    fn references_of_other_blob_stores_are_refused_by_name() {
        for kind in [0, 2] {
            let mut v = index(9, 65, 10);
            v[0] = kind;
            assert!(BlobIndex::parse(&v).unwrap_err().to_string().contains("stacked BlobDB"));
        }
        assert!(BlobIndex::parse(&index(0, 65, 10)).unwrap_err().to_string().contains("embedded"));
        let mut h = header();
        h[12] = 1;
        assert!(BlobHeader::parse(&h).unwrap_err().to_string().contains("stacked BlobDB"));
    }
}
