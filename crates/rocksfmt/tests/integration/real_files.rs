//! Files written by RocksDB 7.8 (db_bench) and 9.x (rocksdict), read entry by entry and compared
//! with the contents that their own tools report.

#![expect(clippy::disallowed_methods, reason = "tests read files themselves")]

use crate::support;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::support::{FilterForm, fresh_dir, generate, run, scan, unhex};
use rocksfmt::*;

fn expected(lines: &str) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut map = BTreeMap::new();
    for line in lines.lines() {
        let (key, value) = line.split_once(' ').unwrap();
        map.insert(unhex(key), unhex(value));
    }
    map
}

#[test]
fn rocksdict_files_of_every_variant_hold_what_rocksdict_reads() {
    let root = fresh_dir("rocksdict");
    generate(&root);
    let mut compressions = BTreeSet::new();
    let mut versions = BTreeSet::new();
    let mut checksums = BTreeSet::new();
    let mut filters = BTreeSet::new();
    let mut kinds = BTreeSet::new();
    let mut names = 0;
    for entry in std::fs::read_dir(&root).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_dir() {
            continue;
        }
        names += 1;
        let global =
            std::fs::read_to_string(path.with_extension("sequence")).unwrap_or("0".to_owned());
        let want = expected(&std::fs::read_to_string(path.with_extension("scan")).unwrap());
        let (live, tables) = scan(&path, global.parse().unwrap());
        assert!(!tables.is_empty() && !want.is_empty());
        assert!(
            live == want,
            "{path:?}: {} live entries, rocksdict has {}",
            live.len(),
            want.len()
        );
        for t in tables {
            compressions.extend(
                t.seen
                    .borrow()
                    .keys()
                    .copied()
                    .filter(|&c| c > 0)
                    .map(|c| (c, t.dictionary.is_some())),
            );
            versions.insert(t.footer.format_version);
            checksums.insert((t.footer.check.kind.to_byte(), t.footer.check.base_context != 0));
            let f = t.properties.index_format;
            kinds.insert(format!(
                "index {:?} user keys {} delta {}",
                t.properties.index_type, f.user_keys, f.delta_values
            ));
            if t.properties.external_version.is_some() {
                kinds.insert("external".to_owned());
            }
            if !t.tombstones.is_empty() {
                kinds.insert("range deletions".to_owned());
            }
            filters.insert(match t.filter {
                None => "none",
                Some((_, FilterForm::Full(FilterLayout::Bloom { .. }))) => "bloom",
                Some((_, FilterForm::Full(FilterLayout::LegacyBloom { .. }))) => "legacy bloom",
                Some((_, FilterForm::Full(_))) => "other",
                Some((_, FilterForm::Partitioned(_))) => "partitioned",
            });
        }
    }
    // The generator must have produced all the variants that this test covers.
    assert!(names > 30, "{names} databases");
    // The zlib of this rocksdict build never compresses a block enough to keep the result; the
    // db_bench test below covers it.
    for compression in [1, 3, 4, 5, 7] {
        assert!(
            compressions.contains(&(compression, false)),
            "compression {compression} did not occur"
        );
    }
    for compression in [4, 7] {
        assert!(
            compressions.contains(&(compression, true)),
            "no dictionary with compression {compression}"
        );
    }
    assert_eq!(versions, BTreeSet::from([2, 3, 4, 5, 6]));
    for kind in 0..5 {
        assert!(
            checksums.contains(&(kind, false)) && checksums.contains(&(kind, true)),
            "checksum {kind}"
        );
    }
    for kind in ["external", "range deletions", "index HashSearch user keys true delta true"] {
        assert!(kinds.contains(kind), "{kind} did not occur: {kinds:?}");
    }
    assert!(kinds.iter().any(|k| k.contains("TwoLevel")), "{kinds:?}");
    assert!(filters.contains("bloom") && filters.contains("partitioned"), "{filters:?}");
}

/// Runs db_bench 7.8 with the given flags after a small fill, and compares with `ldb scan`.
fn db_bench(name: &str, flags: &[&str]) -> Vec<support::Table> {
    let dir = fresh_dir(name);
    let db = format!("--db={}", dir.display());
    let mut args = vec![
        db.as_str(),
        "--benchmarks=fillrandom,flush",
        "--num=6000",
        "--value_size=60",
        "--seed=7",
    ];
    if !flags.iter().any(|f| f.starts_with("--compression_type")) {
        args.push("--compression_type=none");
    }
    args.extend(flags);
    run("db_bench", &args);
    let want = ldb_scan(&dir);
    let (live, tables) = scan(&dir, 0);
    assert!(want.len() > 1000, "{} entries in the database", want.len());
    assert!(live == want, "{name}: {} live entries, ldb has {}", live.len(), want.len());
    tables
}

fn ldb_scan(dir: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let text = run("ldb", &[&format!("--db={}", dir.display()), "scan", "--hex"]);
    let mut map = BTreeMap::new();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(" : ") else { continue };
        map.insert(unhex(key.trim_start_matches("0x")), unhex(value.trim_start_matches("0x")));
    }
    map
}

#[test]
fn db_bench_files_of_its_defaults() {
    for t in db_bench("db_bench_defaults", &[]) {
        assert_eq!(t.footer.format_version, 5);
        assert_eq!(t.footer.check.kind, ChecksumType::Xxh3);
    }
}

#[test]
fn db_bench_files_of_every_codec() {
    for (name, byte) in
        [("snappy", 1), ("zlib", 2), ("bzip2", 3), ("lz4", 4), ("lz4hc", 5), ("zstd", 7)]
    {
        for dictionary in [0, 4096] {
            let flags = [
                format!("--compression_type={name}"),
                format!("--compression_max_dict_bytes={dictionary}"),
                "--enable_index_compression=true".to_owned(),
            ];
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            let tables = db_bench("db_bench_codecs", &flags);
            assert!(
                tables.iter().any(|t| t.seen.borrow().get(&byte).is_some_and(|&n| n > 10)),
                "{name}"
            );
            let with = tables.iter().any(|t| t.dictionary.is_some());
            assert_eq!(with, dictionary > 0, "{name}");
        }
    }
}

#[test]
fn db_bench_files_with_first_keys_in_the_index() {
    for interval in [1, 4] {
        let flags =
            ["--index_with_first_key=true", &format!("--index_block_restart_interval={interval}")];
        for t in db_bench(&format!("db_bench_first_key_{interval}"), &flags) {
            assert_eq!(t.properties.index_type, IndexType::BinarySearchWithFirstKey);
        }
    }
}

#[test]
fn db_bench_files_with_aligned_blocks() {
    for t in db_bench("db_bench_block_align", &["--block_align=true", "--bloom_bits=10"]) {
        assert!(!t.properties.index_format.delta_values);
    }
}

#[test]
fn db_bench_files_with_partitions_and_hashed_data_blocks() {
    let flags = [
        "--partition_index_and_filters=true",
        "--metadata_block_size=256",
        "--bloom_bits=10",
        "--use_data_block_hash_index=true",
        "--compression_type=zstd",
        "--compression_max_dict_bytes=4096",
        "--compression_zstd_max_train_bytes=65536",
    ];
    for t in db_bench("db_bench_partitioned", &flags) {
        assert_eq!(t.properties.index_type, IndexType::TwoLevel);
        assert!(matches!(t.filter, Some((_, FilterForm::Partitioned(_)))));
    }
}

#[test]
fn db_bench_files_with_filters_of_every_age() {
    let find = |version: u32, extra: &[&str]| {
        let version = format!("--format_version={version}");
        let mut flags = vec![version.as_str(), "--bloom_bits=10"];
        flags.extend(extra);
        db_bench("db_bench_filters", &flags)
    };
    for version in 2..=4 {
        for t in find(version, &[]) {
            assert_eq!(t.footer.format_version, version);
            let Some((_, FilterForm::Full(layout))) = t.filter else { panic!("no filter") };
            assert!(matches!(layout, FilterLayout::LegacyBloom { .. }), "{layout:?}");
        }
    }
    for t in find(5, &[]) {
        let Some((_, FilterForm::Full(layout))) = t.filter else { panic!("no filter") };
        assert!(matches!(layout, FilterLayout::Bloom { .. }), "{layout:?}");
    }
    let ribbon = find(5, &["--use_ribbon_filter=true", "--benchmarks=fillrandom,flush,compact"]);
    assert!(ribbon.iter().any(|t| matches!(
        t.filter,
        Some((_, FilterForm::Full(FilterLayout::AlwaysMatch(AlwaysMatch::Ribbon))))
    )));
}

#[test]
fn db_bench_files_with_range_tombstones() {
    let flags = [
        "--writes_per_range_tombstone=50",
        "--max_num_range_tombstones=100",
        "--range_tombstone_width=20",
        "--disable_auto_compactions=true",
        "--write_buffer_size=131072",
        "--max_write_buffer_number=50",
        "--level0_slowdown_writes_trigger=1000",
        "--level0_stop_writes_trigger=1000",
    ];
    let tables = db_bench("db_bench_range_tombstones", &flags);
    assert!(tables.len() > 2, "{} files", tables.len());
    assert!(tables.iter().map(|t| t.tombstones.len()).sum::<usize>() > 50);
}

#[test]
fn db_bench_blob_files_hold_the_values_their_indexes_name() {
    let dir = fresh_dir("db_bench_blobs");
    for (compression, byte) in [("none", Compression::None), ("zstd", Compression::Zstd)] {
        let db = dir.join(compression);
        run(
            "db_bench",
            &[
                &format!("--db={}", db.display()),
                "--benchmarks=fillrandom,flush",
                "--num=2000",
                "--value_size=300",
                "--enable_blob_files=true",
                "--min_blob_size=100",
                "--compression_type=none",
                &format!("--blob_compression_type={compression}"),
            ],
        );
        let want = ldb_scan(&db);
        let (live, _) = scan(&db, 0);
        assert_eq!(live.len(), want.len());
        let mut files = BTreeMap::new();
        for (key, reference) in &live {
            let index = BlobIndex::parse(reference).unwrap();
            let bytes: &Vec<u8> = files.entry(index.file_number).or_insert_with(|| {
                std::fs::read(db.join(format!("{:06}.blob", index.file_number))).unwrap()
            });
            let range = index.record_range(key.len(), bytes.len() as u64).unwrap();
            let stored =
                index.verify_record(&bytes[range.start as usize..range.end as usize], key).unwrap();
            let mut value = vec![0; index.compression.decompressed_len(stored, 1 << 20).unwrap()];
            Decompressor::new().decompress(index.compression, stored, None, &mut value).unwrap();
            assert!(want[key] == value, "{key:02x?}");
        }
        assert!(!files.is_empty());
        for bytes in files.values() {
            assert_eq!(
                BlobHeader::parse(bytes).unwrap(),
                BlobHeader { column_family_id: 0, compression: byte }
            );
            let footer = BlobFooter::parse(&bytes[bytes.len() - BLOB_FOOTER_BYTES..]).unwrap();
            assert!(footer.count >= live.len() as u64);
        }
    }
}
