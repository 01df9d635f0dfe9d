//! The targets for SST and blob files.

use crate::fuzz::Target;
use crate::testing::block::{BlockBuilder, Form};
use crate::*;

/// Every target of this file.
pub const TARGETS: &[Target] = &[
    ("footer", footer, footer_seeds),
    ("block", block, block_seeds),
    ("index", index, index_seeds),
    ("filter", filter, filter_seeds),
    ("compress", compress, compress_seeds),
    ("properties", properties, properties_seeds),
    ("rangedel", rangedel, rangedel_seeds),
    ("blob", blob, blob_seeds),
    ("entity", entity, entity_seeds),
];

/// The largest block that the targets decompress.
const UNPACKED_MAX: usize = 1 << 20;

/// The end of a file.
pub fn footer(data: &[u8]) {
    for file_size in [data.len() as u64, 1 << 20, u64::MAX] {
        if let Ok(footer) = Footer::parse(data, file_size) {
            assert!(footer.metaindex.stored_len(footer.offset).is_some());
            let _ = footer.check.verify(data, footer.metaindex.offset);
        }
    }
}

fn footer_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for version in [2u8, 5, 6] {
        let mut f = vec![4];
        if version == 6 {
            f.extend([0x3E, 0, 0x7A, 0, 0, 0, 0, 0, 77, 0, 0, 0, 20, 0, 0, 0]);
        } else {
            f.extend([10, 20, 40, 20]);
        }
        f.resize(41, 0);
        f.extend([version, 0, 0, 0]);
        f.extend(0x88E2_41B7_85F4_CFF7u64.to_le_bytes());
        if version == 6 {
            let check = BlockCheck { kind: ChecksumType::Xxh3, base_context: 77 };
            let sum = check.compute(&f, (1 << 20) - 53);
            f[5..9].copy_from_slice(&sum.to_le_bytes());
        }
        seeds.push(f);
    }
    seeds
}

/// A data block: walks in both directions, seeks to its keys, and lookups.
pub fn block(data: &[u8]) {
    let Ok(layout) = BlockLayout::parse(data) else { return };
    let mut scratch = Vec::new();
    for comparator in [Comparator::Bytewise, Comparator::ReverseBytewise] {
        let mut cursor = BlockCursor::new();
        let mut keys: Vec<Vec<u8>> = vec![data.iter().copied().take(12).collect(), Vec::new()];
        let mut count = 0;
        let mut more = cursor.seek_to_first(data, &layout);
        while let Ok(true) = more {
            count += 1;
            let _ = (cursor.value(data), InternalKey::parse(cursor.key()));
            if keys.len() < 6 {
                keys.push(cursor.key().to_vec());
            }
            more = cursor.next(data, &layout);
        }
        assert!(count <= data.len() / 2);
        let mut count = 0;
        let mut more = cursor.seek_to_last(data, &layout);
        while let Ok(true) = more {
            count += 1;
            more = cursor.prev(data, &layout);
        }
        assert!(count <= data.len() / 2);
        for key in &keys {
            let _ = point_lookup(data, &layout, comparator, key, &mut scratch);
            if let Ok(true) = cursor.seek_for_prev(data, &layout, comparator, key) {
                let _ = (cursor.next(data, &layout), cursor.prev(data, &layout));
            }
            if let Ok(true) = cursor.seek(data, &layout, comparator, key) {
                let _ = (cursor.prev(data, &layout), cursor.prev(data, &layout));
                let _ = cursor.next(data, &layout);
            }
        }
    }
}

fn seed_keys() -> Vec<Vec<u8>> {
    let mut keys = Vec::new();
    for i in 0..40u64 {
        let mut key = Vec::new();
        put_internal_key(&mut key, format!("key{:03}", i / 2 * 3).as_bytes(), pack(90 - i, 1));
        keys.push(key);
    }
    keys
}

fn block_seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![vec![0, 0, 0, 0, 1, 0, 0, 0]];
    for (form, interval) in [(Form::Plain, 16), (Form::Plain, 1), (Form::Separated, 4)] {
        let mut b = BlockBuilder::new(form, interval).hash_buckets(interval as u16);
        seed_keys().iter().for_each(|k| b.add(k, b"some value"));
        seeds.push(b.finish());
    }
    seeds
}

/// An index block; the first byte defines its encoding.
pub fn index(data: &[u8]) {
    let Some((&flags, data)) = data.split_first() else { return };
    let format = index_format(flags);
    let Ok(layout) = IndexLayout::parse(data, format) else { return };
    let mut scratch = Vec::new();
    let mut cursor = IndexCursor::new();
    let mut keys: Vec<Vec<u8>> = vec![data.iter().copied().take(12).collect(), Vec::new()];
    let mut more = cursor.seek_to_first(data, &layout);
    while let Ok(true) = more {
        let _ = (data.get(cursor.first_key_range()), cursor.handle().stored_len(u64::MAX));
        if keys.len() < 6 {
            keys.push(cursor.key().to_vec());
        }
        more = cursor.next(data, &layout);
    }
    let mut more = cursor.seek_to_last(data, &layout);
    while let Ok(true) = more {
        more = cursor.prev(data, &layout);
    }
    let helper = IndexSearch::build(data, &layout, Comparator::Bytewise);
    for key in &keys {
        for comparator in [Comparator::Bytewise, Comparator::ReverseBytewise] {
            let _ = index_lookup(data, &layout, comparator, key, &mut scratch);
            if let Ok(true) = cursor.seek_for_prev(data, &layout, comparator, key) {
                let _ = (cursor.prev(data, &layout), cursor.next(data, &layout));
            }
        }
        if let Some(helper) = &helper {
            let _ = helper.lookup(data, &layout, key, &mut scratch);
        }
    }
}

fn index_format(flags: u8) -> IndexFormat {
    IndexFormat {
        user_keys: flags & 1 != 0,
        delta_values: flags & 2 != 0,
        first_keys: flags & 4 != 0,
    }
}

fn index_seeds() -> Vec<Vec<u8>> {
    (0u8..8)
        .map(|flags| {
            let format = index_format(flags);
            let mut b = BlockBuilder::new(Form::Index(format), if flags & 2 == 0 { 1 } else { 4 });
            let mut offset = 0;
            for key in seed_keys() {
                let user = &key[..key.len() - 8];
                let key = if format.user_keys { user } else { &key };
                b.add_index(key, BlockHandle { offset, size: 4000 + offset % 90 }, b"first");
                offset += 4000 + offset % 90 + 5;
            }
            [vec![flags], b.finish()].concat()
        })
        .collect()
}

/// A filter block.
pub fn filter(data: &[u8]) {
    let layout = FilterLayout::parse(data);
    for key in [&b""[..], b"key", &data[..data.len().min(300)]] {
        let key = FilterKey::new(key);
        let line = layout.line(&key);
        assert!(line.end <= data.len());
        let _ = layout.may_contain(data, &key);
        let _ = layout.may_contain(&data[..data.len() / 2], &key);
    }
}

fn filter_seeds() -> Vec<Vec<u8>> {
    let mut b = BloomBuilder::new(10_000);
    (0..100u32).for_each(|i| b.add(&i.to_le_bytes()));
    let legacy = [vec![0x55; 192], vec![6, 3, 0, 0, 0]].concat();
    vec![b.finish(), legacy, [vec![0; 64], vec![0xFE, 0, 1, 0, 0]].concat()]
}

/// A compressed block; the first byte is its type, the second says whether the rest is also the
/// dictionary.
pub fn compress(data: &[u8]) {
    let [kind, dictionary, payload @ ..] = data else { return };
    let Ok(compression) = Compression::from_byte(*kind) else { return };
    let Ok(len) = compression.decompressed_len(payload, UNPACKED_MAX) else { return };
    let dictionary = (dictionary & 1 != 0).then(|| Dictionary::new(payload));
    let mut out = vec![0; len];
    let mut decompressor = Decompressor::new();
    let first = decompressor.decompress(compression, payload, dictionary.as_ref(), &mut out);
    let again = decompressor.decompress(compression, payload, dictionary.as_ref(), &mut out);
    assert_eq!(first.is_ok(), again.is_ok(), "a failure changed the codec's state");
}

fn compress_seeds() -> Vec<Vec<u8>> {
    let data = b"abcabcabcabcabcabcabcabcabcabcabcdefg".repeat(4);
    let sized = |kind: u8, body: Vec<u8>| {
        let mut out = vec![kind, 0];
        put_varint(&mut out, data.len() as u64);
        out.extend(body);
        out
    };
    let snappy = snap::raw::Encoder::new().compress_vec(&data).unwrap_or_default();
    let mut zlib = Vec::with_capacity(1000);
    let _ = flate2::Compress::new(flate2::Compression::default(), false).compress_vec(
        &data,
        &mut zlib,
        flate2::FlushCompress::Finish,
    );
    vec![
        [vec![1, 0], snappy].concat(),
        sized(2, zlib),
        sized(4, lz4_flex::block::compress(&data)),
        sized(7, zstd::bulk::compress(&data, 1).unwrap_or_default()),
    ]
}

/// A properties block; the bytes are also read as a metaindex.
pub fn properties(data: &[u8]) {
    if let Ok(p) = Properties::parse(data) {
        let _ = (p.global_sequence(0), p.global_sequence(5), p.raw().count());
    }
    if let Some(range) = Properties::global_sequence_range(data) {
        assert!(range.end <= data.len());
    }
    let _ = Metaindex::parse(data);
}

fn properties_seeds() -> Vec<Vec<u8>> {
    let mut p = BlockBuilder::new(Form::Plain, 1000);
    for (name, value) in [
        ("rocksdb.block.based.table.index.type", &[0, 0, 0, 0][..]),
        ("rocksdb.external_sst_file.global_seqno", &[5, 0, 0, 0, 0, 0, 0, 0]),
        ("rocksdb.external_sst_file.version", &[2, 0, 0, 0]),
        ("rocksdb.index.key.is.user.key", &[1]),
        ("rocksdb.num.entries", &[0x80, 1]),
    ] {
        p.add(name.as_bytes(), value);
    }
    let mut m = BlockBuilder::new(Form::Plain, 1);
    m.add(b"fullfilter.rocksdb.BuiltinBloomFilter", &[10, 20]);
    m.add(b"rocksdb.properties", &[0x80, 1, 30]);
    vec![p.finish(), m.finish()]
}

/// A range-deletion block.
pub fn rangedel(data: &[u8]) {
    for comparator in [Comparator::Bytewise, Comparator::ReverseBytewise] {
        let Ok(mut t) = RangeTombstones::parse(data, comparator, None) else { continue };
        let keys: Vec<Vec<u8>> = t.iter().take(8).map(|(start, ..)| start.to_vec()).collect();
        for key in &keys {
            let sequence = t.max_sequence(key, SEQUENCE_MAX);
            assert_eq!(
                t.cover(key, SEQUENCE_MAX, SEQUENCE_MAX).map_or(0, |c| c.sequence),
                sequence
            );
        }
        let _ = t.set_bounds(data, data);
        for key in &keys {
            let _ = t.cover(key, 7, 3);
            let _ = t.stretch(key, 7);
        }
    }
}

fn rangedel_seeds() -> Vec<Vec<u8>> {
    let mut b = BlockBuilder::new(Form::Plain, 1);
    for i in 0..20u64 {
        let mut key = Vec::new();
        put_internal_key(&mut key, format!("k{i:02}").as_bytes(), pack(50 - i, 0x0F));
        b.add(&key, format!("k{:02}", i + i % 5).as_bytes());
    }
    vec![b.finish()]
}

/// A blob index followed by a record, and the fixed parts of a blob file.
pub fn blob(data: &[u8]) {
    let _ = BlobHeader::parse(data);
    let _ = BlobFooter::parse(data);
    let (index, rest) = data.split_at(data.len().min(9));
    if let Ok(index) = BlobIndex::parse(index) {
        for file_size in [0, data.len() as u64, u64::MAX] {
            let _ = index.record_range(rest.len(), file_size);
        }
        let _ = index.verify_record(rest, b"key");
    }
}

fn blob_seeds() -> Vec<Vec<u8>> {
    let mut header = vec![0x37, 0x8F, 0x24, 0, 1, 0, 0, 0];
    header.resize(BLOB_HEADER_BYTES, 0);
    let mut footer = vec![0x37, 0x8F, 0x24, 0, 1];
    footer.resize(BLOB_FOOTER_BYTES - 4, 0);
    footer.extend(mask_crc(crc32c(&footer)).to_le_bytes());
    let mut record = [3u64.to_le_bytes(), 5u64.to_le_bytes(), [0; 8]].concat();
    record.extend(mask_crc(crc32c(&record)).to_le_bytes());
    record.extend(mask_crc(crc32c(b"keyvalue")).to_le_bytes());
    record.extend(b"keyvalue");
    let index = [vec![1, 9, 0xC1, 0x80, 0x80, 0x80, 0], vec![5, 0]].concat();
    vec![header, footer, [index, record].concat()]
}

/// A wide-column entity.
pub fn entity(data: &[u8]) {
    if let Ok(range) = default_column(data) {
        assert!(range.end <= data.len());
    }
    let _ = timed_put_value(data);
}

fn entity_seeds() -> Vec<Vec<u8>> {
    vec![
        b"\x01\x02\x00\x05\x01a\x03plainabc".to_vec(),
        b"\x02\x02\x02\x02\x01\x01\x11\x00\x01\x05\x01aplainx".to_vec(),
    ]
}
