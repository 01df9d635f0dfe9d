//! RocksDB's own tools check the output of the writers: tables, a MANIFEST and a write-ahead log,
//! combined into databases with known contents.
#![expect(clippy::disallowed_methods, reason = "files of the host, for RocksDB's tools")]

use crate::support;
use std::collections::BTreeMap;
use std::path::Path;

use crate::support::{fresh_dir, run};

use rocksfmt::{
    BatchWriter, BlockOptions, ChecksumType, CodecOptions, Compression, GroupEnd, LogWriter,
    SstBuilder, SstIdentity, SstOptions, SstTimes, ValueType, VersionEdit, pack, put_internal_key,
    session_id,
};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// SplitMix64: a fixed seed gives the same databases in every run.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }

    fn key(&mut self) -> Vec<u8> {
        let mut key = format!("key{:05}", self.below(3000)).into_bytes();
        match self.below(8) {
            0 => key.push(0xFF),
            1 => key.extend(vec![b'x'; self.below(40) as usize]),
            _ => {}
        }
        key
    }

    fn value(&mut self) -> Vec<u8> {
        let len = match self.below(20) {
            0 => 0,
            1 => self.below(20_000),
            _ => self.below(200),
        };
        let byte = self.below(256) as u8;
        (0..len).map(|i| if i % 3 == 0 { byte } else { self.below(4) as u8 }).collect()
    }
}

enum Change {
    Put(Vec<u8>, Vec<u8>),
    Delete(Vec<u8>),
    DeleteRange(Vec<u8>, Vec<u8>),
}

fn changes(rng: &mut Rng, count: u64) -> Vec<Change> {
    (0..count)
        .map(|_| match rng.below(40) {
            0 => {
                let (a, b) = (rng.key(), rng.key());
                Change::DeleteRange(a.clone().min(b.clone()), a.max(b))
            }
            1..10 => Change::Delete(rng.key()),
            _ => Change::Put(rng.key(), rng.value()),
        })
        .collect()
}

fn apply(model: &mut Model, changes: &[Change]) {
    for change in changes {
        match change {
            Change::Put(key, value) => {
                model.insert(key.clone(), value.clone());
            }
            Change::Delete(key) => {
                model.remove(key);
            }
            Change::DeleteRange(start, end) => model.retain(|key, _| key < start || key >= end),
        }
    }
}

/// A table with these changes, the first at `sequence`, and its description for the MANIFEST.
fn table(changes: &[Change], sequence: u64, options: SstOptions) -> (Vec<u8>, rocksfmt::FileMeta) {
    let mut entries = Vec::new();
    let mut builder = SstBuilder::new(options);
    for (change, sequence) in changes.iter().zip(sequence..) {
        let mut internal = |key: &[u8], kind: ValueType, value: &[u8]| {
            let mut internal = Vec::new();
            put_internal_key(&mut internal, key, pack(sequence, kind as u8));
            entries.push((internal, value.to_vec()));
        };
        match change {
            Change::Put(key, value) => internal(key, ValueType::Value, value),
            Change::Delete(key) => internal(key, ValueType::Deletion, b""),
            Change::DeleteRange(start, end) => builder.add_range_tombstone(start, end, sequence),
        }
    }
    let comparator = rocksfmt::Comparator::Bytewise;
    entries.sort_by(|a, b| comparator.cmp_internal(&a.0, &b.0));
    let mut file = Vec::new();
    for (key, value) in &entries {
        builder.add(key, value).unwrap();
        if builder.output().len() > 10_000 {
            file.extend_from_slice(builder.output());
            builder.output_taken();
        }
    }
    if let Some((key, value)) = entries.last() {
        assert!(builder.add(key, value).is_err(), "entries must ascend");
    }
    let (rest, meta) = builder.finish();
    file.extend_from_slice(&rest);
    assert_eq!(meta.size_bytes, file.len() as u64);
    (file, meta)
}

fn scan(dir: &Path) -> Model {
    let unhex = |text: &str| support::unhex(text.trim().trim_start_matches("0x"));
    run("ldb", &[&format!("--db={}", dir.display()), "scan", "--hex"])
        .lines()
        .filter_map(|line| line.split_once(" ==> ").or_else(|| line.split_once(" : ")))
        .map(|(key, value)| (unhex(key), unhex(value)))
        .collect()
}

/// Two tables of level 0, or one of level 6 below one of level 0, and then a log.
#[test]
fn rocksdb_opens_scans_and_compacts_databases_written_for_it() {
    for seed in 0..16 {
        let mut rng = Rng(seed);
        let dir = fresh_dir(&format!("written-{seed}"));
        let mut model = Model::new();
        let options = SstOptions {
            compression: [
                Compression::None,
                Compression::Snappy,
                Compression::Lz4,
                Compression::Zstd,
            ][seed as usize % 4],
            codec: CodecOptions {
                dictionary_bytes: [0, 2000][rng.below(2) as usize],
                train_bytes: [0, 100_000][rng.below(2) as usize],
                ..CodecOptions::default()
            },
            blocks: BlockOptions {
                block_bytes: [4096, 200, 16 << 10][rng.below(3) as usize],
                filter_millibits_per_key: [10_000, 0, 16_000][rng.below(3) as usize],
                index_restart_interval: [1, 4][rng.below(2) as usize],
                compress_index: rng.below(2) == 0,
                checksum: [ChecksumType::Xxh3, ChecksumType::Crc32c, ChecksumType::XxHash64]
                    [rng.below(3) as usize],
                partition_index: rng.below(2) == 0,
                partition_filter: rng.below(2) == 0,
                partition_bytes: 300,
                whole_bytes_max: [usize::MAX, 1000][rng.below(2) as usize],
                ..BlockOptions::default()
            },
            times: SstTimes { created: 1_790_000_000, ..SstTimes::default() },
            ..SstOptions::default()
        };
        let mut sequence = 1;
        let mut edit = VersionEdit {
            comparator: Some("leveldb.BytewiseComparator".to_owned()),
            log_number: Some(9),
            next_file_number: Some(10),
            ..VersionEdit::default()
        };
        for (number, level) in [(4, if seed % 2 == 0 { 6 } else { 0 }), (5, 0)] {
            let count = 1 + rng.below(2500);
            let changes = changes(&mut rng, count);
            apply(&mut model, &changes);
            let identity = SstIdentity {
                database: "a database".into(),
                session: session_id([seed, 7]),
                number,
            };
            let options = SstOptions { identity, ..options.clone() };
            let (file, mut meta) = table(&changes, sequence, options);
            meta.epoch = number;
            let path = dir.join(format!("{number:06}.sst"));
            std::fs::write(&path, file).unwrap();
            run("sst_dump", &[&format!("--file={}", path.display()), "--command=verify"]);
            sequence += changes.len() as u64;
            edit.new_files.push((level, meta));
        }
        edit.last_sequence = Some(sequence - 1);
        let record = edit.encode();
        assert_eq!(VersionEdit::decode(&record).unwrap(), edit);
        let mut manifest = Vec::new();
        LogWriter::new(None, 0).append(&record, &mut manifest);
        std::fs::write(dir.join("MANIFEST-000003"), manifest).unwrap();
        std::fs::write(dir.join("CURRENT"), "MANIFEST-000003\n").unwrap();

        let mut log = Vec::new();
        let mut writer = LogWriter::new(Some(9), 0);
        let mut batch = BatchWriter::new();
        for _ in 0..rng.below(60) {
            let count = 1 + rng.below(30);
            let changes = changes(&mut rng, count);
            apply(&mut model, &changes);
            batch.clear();
            for change in &changes {
                match change {
                    Change::Put(key, value) => batch.put(0, key, value),
                    Change::Delete(key) => batch.delete(0, key),
                    Change::DeleteRange(start, end) => batch.delete_range(0, start, end),
                }
            }
            if seed.is_multiple_of(3) {
                batch.note_keys(-(seed as i64));
            }
            let end = GroupEnd { start: writer.position() };
            writer.append(batch.finish(sequence), &mut log);
            sequence += u64::from(batch.count());
            let alignment = [4096, 512][seed as usize % 2];
            writer.end_group(end, sequence, alignment, &mut log);
        }
        std::fs::write(dir.join("000009.log"), log).unwrap();

        assert!(scan(&dir) == model, "seed {seed}: RocksDB finds other values than were written");
        run("ldb", &[&format!("--db={}", dir.display()), "compact"]);
        assert!(scan(&dir) == model, "seed {seed}: after RocksDB compacted it");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
