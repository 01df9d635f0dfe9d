//! Logs as crashes and damage leave them: how RocksDB 7.8 and Millrace recover them.
//!
//! The cases are those of the reference's section on the duties of a writer, so that stock RocksDB
//! loses nothing. Where RocksDB silently drops writes, Millrace refuses, names file and offset, and
//! with salvage serves the writes before.

#![expect(clippy::disallowed_methods, reason = "the files are made and copied on the host")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use lsm::{Db, IterOptions, Kind, OpenOptions, WriteOptions, Writer};
use reactor::Core;
use rocksfmt::testing::{BatchBuilder, LogBuilder};
use rocksfmt::{GroupEnd, LogWriter};

use crate::common::on_one_core;

const BLOCK: usize = 32 << 10;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// An empty database with these logs.
fn database(case: &str, logs: &[(u64, Vec<u8>)]) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("wal-{case}"));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let (reading, writing) = (OpenOptions::default(), WriteOptions::default());
            let (_, writer) = Db::open_for_writing(&core, &path, reading, writing).await.unwrap();
            writer.close().await.unwrap();
        }
    });
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "log") {
            std::fs::remove_file(path).unwrap();
        }
    }
    for (number, bytes) in logs {
        std::fs::write(dir.join(format!("{number:06}.log")), bytes).unwrap();
    }
    dir
}

fn key(sequence: u64) -> Vec<u8> {
    format!("key{sequence:06}").into_bytes()
}

/// The contents after the batches with these sequences.
fn model(sequences: impl IntoIterator<Item = u64>) -> Model {
    sequences.into_iter().map(|n| (key(n), vec![n as u8; 100])).collect()
}

fn batch(sequence: u64) -> Vec<u8> {
    BatchBuilder::new(sequence).put(0, &key(sequence), &[sequence as u8; 100]).finish()
}

/// A log of records without padding, and the offset of each.
fn plain(sequences: std::ops::Range<u64>) -> (Vec<u8>, Vec<usize>) {
    let mut log = LogBuilder::legacy();
    let mut starts = Vec::new();
    for sequence in sequences {
        starts.push(log.bytes().len());
        log.append(&batch(sequence));
    }
    (log.finish(), starts)
}

/// A log of ours, each batch in a group that is padded to 4 KiB.
fn padded(number: u64, sequences: std::ops::Range<u64>) -> Vec<u8> {
    let (mut bytes, mut log) = (Vec::new(), LogWriter::new(Some(number), 0));
    let end = |start| GroupEnd { start };
    log.end_group(end(0), sequences.start, 4096, &mut bytes);
    for sequence in sequences {
        let start = log.position();
        log.append(&batch(sequence), &mut bytes);
        log.end_group(end(start), sequence + 1, 4096, &mut bytes);
    }
    bytes
}

/// What RocksDB finds in a copy of the directory, or its error.
fn rocksdb(dir: &Path) -> Result<Model, String> {
    let copy = dir.with_extension("copy");
    let _ = std::fs::remove_dir_all(&copy);
    std::fs::create_dir_all(&copy).unwrap();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    // `put` opens it for writing, which replays the logs; a scan alone would open it for reading.
    let ldb = |args: &[&str]| {
        let db = format!("--db={}", copy.display());
        let out = Command::new("ldb").arg(db).args(args).output();
        let out = out.expect("ldb runs: install Debian's rocksdb-tools (./test does)");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match out.status.success() {
            true => Ok(text(&out.stdout)),
            false => Err(text(&out.stdout) + &text(&out.stderr)),
        }
    };
    ldb(&["put", "after", "wards"])?;
    let unhex = |text: &str| -> Vec<u8> {
        let digits = text.trim().trim_start_matches("0x");
        let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
        (0..digits.len()).step_by(2).map(byte).collect()
    };
    let scan = ldb(&["scan", "--hex"])?;
    std::fs::remove_dir_all(&copy).unwrap();
    let pairs = scan
        .lines()
        .filter_map(|line| line.split_once(" ==> ").or_else(|| line.split_once(" : ")))
        .map(|(key, value)| (unhex(key), unhex(value)));
    Ok(pairs.filter(|(key, _)| key != b"after").collect())
}

/// What Millrace finds. It must find the same after it has written and opened the database again.
fn ours(dir: &Path, salvage: bool) -> lsm::Result<Model> {
    let found = open_and_write(dir, salvage, 0)?;
    for round in 1..3 {
        assert!(open_and_write(dir, false, round)? == found, "it did not stay");
    }
    Ok(found)
}

/// Opens a database, and retries while it is locked. Other tests start programs meanwhile: until
/// such a child executes its program it has our descriptors too, and with them the lock of a
/// database that was just closed.
async fn open(
    core: &Core,
    path: &Path,
    reading: &OpenOptions,
    writing: &WriteOptions,
) -> lsm::Result<(Db, Writer)> {
    let mut looks = 0;
    loop {
        match Db::open_for_writing(core, path, reading.clone(), writing.clone()).await {
            Err(error) if error.kind() == Kind::Locked && looks < 500 => looks += 1,
            opened => return opened,
        }
        core.sleep_ns(10_000_000).await;
    }
}

fn open_and_write(dir: &Path, salvage: bool, round: u8) -> lsm::Result<Model> {
    let path = dir.to_owned();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let reading = OpenOptions { salvage, ..OpenOptions::default() };
            let writing = WriteOptions { create: false, ..WriteOptions::default() };
            let (db, writer) = open(&core, &path, &reading, &writing).await?;
            let mut iter = db.attach(&core).iter(0, IterOptions::default())?;
            let mut model = Model::new();
            iter.seek_to_first().await?;
            while iter.valid() {
                model.insert(iter.key().to_vec(), iter.value().to_vec());
                iter.next().await?;
            }
            model.remove(&b"ours"[..]);
            writer.put(b"ours", &[round]).await?;
            writer.close().await?;
            Ok(model)
        }
    })
}

/// Both find the same, and RocksDB finds it again after Millrace has written.
fn both_find(case: &str, logs: &[(u64, Vec<u8>)], expected: &Model) {
    let dir = database(case, logs);
    assert!(rocksdb(&dir).unwrap() == *expected, "{case}: RocksDB finds something else");
    assert!(ours(&dir, false).unwrap() == *expected, "{case}: we find something else");
    let mut after = rocksdb(&dir).unwrap();
    assert_eq!(after.remove(&b"ours"[..]), Some(vec![2]));
    assert!(after == *expected, "{case}: RocksDB finds something else afterwards");
    std::fs::remove_dir_all(&dir).unwrap();
}

/// RocksDB drops writes; Millrace refuses with this text, and with salvage serves the writes
/// before.
fn refused(case: &str, bytes: Vec<u8>, text: &str, rocksdb_finds: &Model, salvaged: &Model) {
    let dir = database(case, &[(50, bytes)]);
    let found = rocksdb(&dir).unwrap();
    assert!(found == *rocksdb_finds, "{case}: RocksDB finds {} keys", found.len());
    let error = ours(&dir, false).expect_err(case);
    assert_eq!(error.kind(), Kind::Corruption, "{case}: {error}");
    assert!(error.to_string().contains(text), "{case}: {error} does not say {text:?}");
    assert!(error.to_string().contains("--salvage"), "{case}: {error}");
    assert!(ours(&dir, true).unwrap() == *salvaged, "{case}: salvage finds something else");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_zero_tail_of_4_mib_is_the_end() {
    let (mut bytes, _) = plain(1..600);
    bytes.resize(bytes.len() + (4 << 20), 0);
    both_find("zero-tail", &[(50, bytes)], &model(1..600));
    let mut bytes = padded(50, 1..50);
    bytes.resize(bytes.len() + (4 << 20), 0);
    both_find("padded-zero-tail", &[(50, bytes)], &model(1..50));
}

#[test]
fn padded_logs_follow_each_other() {
    let logs = [(50, padded(50, 1..40)), (51, padded(51, 40..90))];
    both_find("padded-twice", &logs, &model(1..90));
}

#[test]
fn a_torn_record_in_a_padded_log_ends_it_and_the_next_log_continues() {
    for cut in [1, 11, 60, 120] {
        let mut torn = padded(50, 1..41);
        let at = torn.len() - 4096 + cut;
        torn.truncate(at);
        let logs = [(50, torn), (51, padded(51, 40..90))];
        both_find("torn-and-next", &logs, &model(1..90));
    }
}

#[test]
fn a_payload_whose_header_is_still_zero_is_not_there() {
    let (mut bytes, starts) = plain(1..100);
    bytes[starts[98]..starts[98] + 7].fill(0);
    both_find("no-header", &[(50, bytes)], &model(1..99));
}

#[test]
fn zero_padding_inside_a_block_hides_records_after_it() {
    let (mut bytes, starts) = plain(1..50);
    let zeros = bytes.len();
    bytes.resize(zeros + 500, 0);
    let mut more = LogBuilder::legacy();
    more.raw(&bytes);
    for sequence in 50..60 {
        more.append(&batch(sequence));
    }
    assert_eq!(starts.len(), 49);
    let text =
        format!("000050.log at {zeros}: a record cut short before a valid record with sequence 50");
    refused("zeros-inside", more.finish(), &text, &model(1..50), &model(1..50));
}

#[test]
fn a_zeroed_block_in_the_middle_is_not_skipped() {
    // 256 records of 128 bytes fill a block, so that each block is whole.
    let value = |n: u64| vec![n as u8; 128 - 7 - 12 - 4 - 9 + 1];
    let mut log = LogBuilder::legacy();
    let mut all = Model::new();
    for n in 1..=4 * 256u64 {
        log.append(&BatchBuilder::new(n).put(0, &key(n), &value(n)).finish());
        all.insert(key(n), value(n));
    }
    let mut bytes = log.finish();
    assert_eq!(bytes.len(), 4 * BLOCK);
    bytes[BLOCK..2 * BLOCK].fill(0);
    let without: Model =
        all.clone().into_iter().filter(|(k, _)| !(key(257)..=key(512)).contains(k)).collect();
    let before: Model = all.into_iter().filter(|(k, _)| *k <= key(256)).collect();
    let text = format!("000050.log at {BLOCK}: zeros before sequence 513, expected 257");
    refused("zeroed-block", bytes, &text, &without, &before);
}

#[test]
fn a_flipped_bit_in_an_early_record_is_not_the_end() {
    let (mut bytes, starts) = plain(1..201);
    bytes[starts[39] + 30] ^= 4;
    let text = format!("000050.log at {}: ", starts[39]);
    refused("flipped-bit", bytes, &text, &model(1..40), &model(1..40));
    // Also in a padded log of ours.
    let mut bytes = padded(50, 1..201);
    bytes[40 * 4096 + 30] ^= 4;
    let text = format!("000050.log at {}: ", 40 * 4096);
    refused("flipped-bit-padded", bytes, &text, &model(1..40), &model(1..40));
}

#[test]
fn an_unknown_tag_is_refused_by_both() {
    let (bytes, _) = plain(1..20);
    let mut log = LogBuilder::legacy();
    log.raw(&bytes).append(&BatchBuilder::new(20).record(0x77, &[]).finish());
    let dir = database("unknown-tag", &[(50, log.finish())]);
    let says = rocksdb(&dir).expect_err("RocksDB opens it");
    assert!(says.contains("unknown WriteBatch tag"), "{says}");
    let error = ours(&dir, false).expect_err("we open it");
    assert_eq!(error.kind(), Kind::Unsupported);
    assert!(error.to_string().contains("unknown write batch tag 0x77"), "{error}");
    std::fs::remove_dir_all(&dir).unwrap();
}
