//! What the builder writes with any options, our reader finds, and RocksDB accepts.
#![expect(clippy::disallowed_methods, reason = "files of the host, for RocksDB's tools")]

use proptest::prelude::*;
use rocksfmt::*;

use crate::support::{self, Entries, Table, fresh_dir, run};

fn block_options() -> impl Strategy<Value = BlockOptions> {
    let checksum = prop_oneof![
        Just(ChecksumType::None),
        Just(ChecksumType::Crc32c),
        Just(ChecksumType::XxHash),
        Just(ChecksumType::XxHash64),
        Just(ChecksumType::Xxh3),
    ];
    (
        (prop_oneof![Just(1usize), 50usize..600, Just(4096)], 0u32..120),
        (1u32..20, 1u32..6),
        (any::<bool>(), checksum),
        prop_oneof![Just(0u64), Just(500), Just(10_000), Just(60_000)],
        (any::<bool>(), any::<bool>()),
        (prop_oneof![Just(1usize), 40usize..400], prop_oneof![Just(usize::MAX), 0usize..2000]),
    )
        .prop_map(|(block, restarts, (compress_index, checksum), filter, parts, bytes)| {
            BlockOptions {
                block_bytes: block.0,
                deviation_percent: block.1,
                restart_interval: restarts.0,
                index_restart_interval: restarts.1,
                compress_index,
                checksum,
                filter_millibits_per_key: filter,
                partition_index: parts.0,
                partition_filter: parts.1,
                partition_bytes: bytes.0,
                whole_bytes_max: bytes.1,
            }
        })
}

fn options() -> impl Strategy<Value = SstOptions> {
    let compression = prop_oneof![
        Just(Compression::None),
        Just(Compression::Snappy),
        Just(Compression::Zlib),
        Just(Compression::Bzip2),
        Just(Compression::Lz4),
        Just(Compression::Zstd),
    ];
    let codec = (
        prop_oneof![Just(None), (-5i32..12).prop_map(Some)],
        (prop_oneof![Just(0usize), 1usize..3000], prop_oneof![Just(0usize), 1usize..20_000]),
        prop_oneof![Just(0usize), 1usize..5000],
        prop_oneof![Just(896u32), Just(1024)],
    );
    (block_options(), compression, codec, any::<bool>()).prop_map(
        |(blocks, compression, (level, dictionary, buffer, stored), reverse)| SstOptions {
            comparator: match reverse {
                true => Comparator::ReverseBytewise,
                false => Comparator::Bytewise,
            },
            blocks,
            compression,
            codec: CodecOptions {
                level,
                stored_per_kib_max: stored,
                dictionary_bytes: dictionary.0,
                train_bytes: dictionary.1,
                buffer_bytes: buffer,
            },
            identity: SstIdentity {
                database: "id".into(),
                session: session_id([1, 2]),
                number: 12,
            },
            times: SstTimes { created: 30, oldest_ancestor: 20, oldest_key: 10 },
            ..SstOptions::default()
        },
    )
}

/// Entries with several versions of some keys, and values that compress.
fn entries() -> impl Strategy<Value = Vec<(Vec<u8>, u64, u8, Vec<u8>)>> {
    let key = prop_oneof![
        (0u32..400).prop_map(|i| format!("key{i:04}").into_bytes()),
        proptest::collection::vec(1u8..=255, 0..12),
    ];
    let value = (0usize..6, proptest::collection::vec(any::<u8>(), 0..20))
        .prop_map(|(times, word)| word.repeat(times));
    let kind = prop_oneof![
        6 => Just(ValueType::Value as u8),
        1 => Just(ValueType::Deletion as u8),
        1 => Just(ValueType::Merge as u8),
        1 => Just(ValueType::SingleDeletion as u8),
    ];
    proptest::collection::vec((key, 1u64..9, kind, value), 0..300)
}

/// The file with these entries, the entries in their order, and the description. `steps` decides
/// whether the builder's work is done in pieces, and that of its dictionary elsewhere.
fn build(
    options: SstOptions,
    entries: &[(Vec<u8>, u64, u8, Vec<u8>)],
    tombstones: &[(Vec<u8>, Vec<u8>, u64)],
    steps: bool,
) -> (Vec<u8>, Entries, FileMeta) {
    let comparator = options.comparator;
    let mut sorted: Entries = entries
        .iter()
        .map(|(user, sequence, kind, value)| {
            let mut key = Vec::new();
            put_internal_key(&mut key, user, pack(*sequence, *kind));
            (key, value.clone())
        })
        .collect();
    sorted.sort_by(|a, b| comparator.cmp_internal(&a.0, &b.0));
    // One entry for each user key and sequence.
    sorted.dedup_by(|a, b| {
        a.0[..a.0.len() - 8] == b.0[..b.0.len() - 8] && a.0[a.0.len() - 7..] == b.0[b.0.len() - 7..]
    });
    let mut builder = SstBuilder::new(options);
    for (start, end, sequence) in tombstones {
        builder.add_range_tombstone(start, end, *sequence);
    }
    let mut file = Vec::new();
    for (key, value) in &sorted {
        builder.add(key, value).unwrap();
        if steps && let Some(training) = builder.training() {
            builder.trained(training.run());
        }
        while steps && builder.step() {}
        if builder.output().len() > 1000 {
            file.extend_from_slice(builder.output());
            builder.output_taken();
        }
    }
    if steps && let Some(training) = builder.last_training() {
        builder.trained(training.run());
    }
    while steps && builder.finish_step() {
        file.extend_from_slice(builder.output());
        builder.output_taken();
    }
    let (rest, meta) = builder.finish();
    file.extend_from_slice(&rest);
    (file, sorted, meta)
}

fn verify(name: &str, file: &[u8]) {
    let dir = fresh_dir(name);
    let path = dir.join("000012.sst");
    std::fs::write(&path, file).unwrap();
    let said = run("sst_dump", &[&format!("--file={}", path.display()), "--command=verify"]);
    assert!(!said.contains("orruption"), "{said}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, ..ProptestConfig::default() })]

    #[test]
    fn every_entry_is_found_with_any_options(
        options in options(),
        entries in entries(),
        tombstones in proptest::collection::vec(
            (proptest::collection::vec(97u8..100, 1..3), proptest::collection::vec(97u8..100, 1..3), 1u64..9),
            0..4,
        ),
        steps: bool,
    ) {
        let bytewise = options.comparator == Comparator::Bytewise;
        let tombstones = if bytewise { tombstones } else { Vec::new() };
        let (file, sorted, meta) = build(options.clone(), &entries, &tombstones, steps);
        let (other, ..) = build(options.clone(), &entries, &tombstones, !steps);
        prop_assert!(file == other, "the file depends on how the work is divided");
        prop_assert_eq!(meta.size_bytes, file.len() as u64);
        prop_assert_eq!(meta.unique_id, options.identity.unique_id());
        let table = Table::open(file).unwrap();
        prop_assert_eq!(&table.walk().unwrap(), &sorted);
        support::check_table(&table, &sorted);
        let properties = &table.properties;
        let partitioned = properties.index_type == IndexType::TwoLevel;
        prop_assert!(partitioned || !options.blocks.partition_index || sorted.is_empty());
        prop_assert_eq!(table.filter.is_some(), options.blocks.filter_millibits_per_key > 0 && !sorted.is_empty());
        prop_assert_eq!(properties.num_data_blocks == 0, sorted.is_empty());
        prop_assert_eq!(table.footer.check.kind, options.blocks.checksum);
        // Everything that an opening needs is in the tail.
        let from = meta.size_bytes - meta.tail_bytes;
        let handles = [table.footer.index, Some(table.footer.metaindex), table.meta.properties];
        prop_assert!(handles.iter().flatten().all(|handle| handle.offset >= from));
    }
}

#[test]
fn rocksdb_verifies_tables_of_many_options() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for case in 0..10 {
        let options = options().new_tree(&mut runner).unwrap().current();
        let entries = entries().new_tree(&mut runner).unwrap().current();
        if options.comparator != Comparator::Bytewise
            || options.blocks.checksum == ChecksumType::None
        {
            continue;
        }
        let (file, sorted, _) = build(options.clone(), &entries, &[], true);
        if sorted.is_empty() {
            continue;
        }
        verify(&format!("round-trip-{case}"), &file);
    }
}
