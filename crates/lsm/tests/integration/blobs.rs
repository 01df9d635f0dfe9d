//! Databases with blob files, made by RocksDB, that we write to. The garbage that we count equals
//! the values that nothing refers to, and RocksDB opens and reads the database after every step.
#![expect(clippy::disallowed_methods, reason = "files of the host, as RocksDB left them")]

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use lsm::{BatchWriter, Db, Durability, OpenOptions, WriteOptions, Writer};
use reactor::Core;
use rocksfmt::{BlobIndex, FileName, LogKind, LogReader, ManifestReplay, ManifestState};

use crate::common::on_one_core;

pub type Model = BTreeMap<String, String>;

/// Runs a tool of RocksDB with an input.
pub fn tool(name: &str, args: &[&str], input: &str) -> String {
    let mut command = Command::new(name);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("install Debian's rocksdb-tools (./test does)");
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{name} {args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}

pub fn key(n: u64) -> String {
    format!("key{n:05}")
}

/// Puts keys, with values in a blob file of their own.
pub fn load(dir: &Path, keys: impl Iterator<Item = u64>, tag: &str, model: &mut Model) {
    let mut input = String::new();
    for n in keys {
        let value = format!("{tag}-{n}-").repeat(30 + n as usize % 7);
        input += &format!("{} ==> {value}\n", key(n));
        model.insert(key(n), value);
    }
    let db = format!("--db={}", dir.display());
    let blobs = ["--enable_blob_files", "--min_blob_size=50"];
    tool("ldb", &[&db, "load", "--create_if_missing", "--disable_wal", blobs[0], blobs[1]], &input);
}

pub fn scan(dir: &Path) -> Model {
    let db = format!("--db={}", dir.display());
    tool("ldb", &[&db, "checkconsistency"], "");
    let found = tool("ldb", &[&db, "scan"], "");
    let pairs =
        found.lines().filter_map(|line| line.split_once(" ==> ").or(line.split_once(" : ")));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

pub fn manifest(dir: &Path) -> ManifestState {
    let current = std::fs::read_to_string(dir.join("CURRENT")).unwrap();
    let bytes = std::fs::read(dir.join(current.trim_end())).unwrap();
    let (mut reader, mut replay) = (LogReader::new(LogKind::Manifest), ManifestReplay::new());
    reader.feed(&bytes, true, |record| replay.record(record.data)).unwrap();
    replay.finish().unwrap()
}

/// For each blob file: its references in all live tables, and the bytes of their records.
pub fn references(dir: &Path, state: &ManifestState) -> BTreeMap<u64, (u64, u64)> {
    let mut found: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for (_, file) in state.column_families[&0].files() {
        let name = dir.join(FileName::Sst(file.number).to_string());
        let name = format!("--file={}", name.display());
        let text = tool("sst_dump", &[&name, "--command=scan", "--output_hex"], "");
        let mut least = 0;
        // 'KEYHEX' seq:N, type:17 => VALUEHEX
        for line in text.lines().filter(|line| line.contains(", type:17 =>")) {
            let (key, value) = line.split_once(" => ").unwrap();
            let key_bytes = key.split('\'').nth(1).unwrap().len() as u64 / 2;
            let bytes: Vec<u8> = (0..value.len() / 2)
                .map(|at| u8::from_str_radix(&value[2 * at..2 * at + 2], 16).unwrap())
                .collect();
            let index = BlobIndex::parse(&bytes).unwrap();
            let sum = found.entry(index.file_number).or_default();
            *sum = (sum.0 + 1, sum.1 + 32 + key_bytes + index.size);
            least = if least == 0 { index.file_number } else { index.file_number.min(least) };
        }
        assert_eq!(file.oldest_blob_file, least, "what {:06}.sst is linked to", file.number);
    }
    found
}

/// Compares the MANIFEST with the references of a scan and with the directory.
pub fn is_right(dir: &Path) -> usize {
    let state = manifest(dir);
    let found = references(dir, &state);
    let family = &state.column_families[&0];
    let mut live: Vec<u64> = Vec::new();
    for blob in family.live_blob_files() {
        let alive = (blob.total_count - blob.garbage_count, blob.total_bytes - blob.garbage_bytes);
        assert_eq!(found.get(&blob.number).copied().unwrap_or_default(), alive, "{blob:?}");
        live.push(blob.number);
    }
    assert!(found.keys().all(|number| live.contains(number)), "{found:?} and {live:?}");
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let mut there: Vec<u64> = names
        .filter_map(|name| match FileName::parse(&name.to_string_lossy()) {
            Some(FileName::Blob(number)) => Some(number),
            _ => None,
        })
        .collect();
    there.sort_unstable();
    assert_eq!(there, live, "blob files in the directory, and live ones");
    live.len()
}

fn options() -> WriteOptions {
    WriteOptions {
        durability: Durability::Process,
        memtable_bytes: 100_000,
        // None, although the database's OPTIONS turn them on.
        blob_min: Some(usize::MAX),
        ..WriteOptions::default()
    }
}

/// Overwrites and deletes keys until all of them were merged.
async fn change(core: &Core, writer: &Writer, keys: &[u64], round: u64, model: &mut Model) {
    for pass in 0..4 {
        let logs = writer.stats().logs;
        for &n in keys.iter().cycle().skip(17 * pass) {
            let (key, value) = (key(n), format!("ours-{round}-{pass}-{n}"));
            let mut batch = BatchWriter::new();
            if (n + round).is_multiple_of(3) {
                batch.delete(0, key.as_bytes());
                model.remove(&key);
            } else {
                batch.put(0, key.as_bytes(), value.as_bytes());
                model.insert(key, value);
            }
            // Values that are in no blob file, to fill the memtables.
            batch.put(0, format!("zz{n}").as_bytes(), &[b'z'; 2_000]);
            model.insert(format!("zz{n}"), "z".repeat(2_000));
            writer.write(batch).await.unwrap();
            if writer.stats().logs > logs {
                break;
            }
        }
        while writer.stats().waiting_memtables > 0 {
            core.sleep_ns(1_000_000).await;
        }
    }
    while writer.stats().level0_files >= 4 {
        assert_eq!(writer.failure().map(|error| error.to_string()), None);
        core.sleep_ns(1_000_000).await;
    }
}

/// Opens, changes and closes the database with Millrace.
fn ours(dir: &Path, keys: Vec<u64>, round: u64, model: &Model) -> (Model, u64) {
    let (dir, model): (PathBuf, Model) = (dir.to_owned(), model.clone());
    on_one_core(move |core| {
        let (dir, keys, mut model) = (dir.clone(), keys.clone(), model.clone());
        async move {
            let open = Db::open_for_writing(&core, &dir, OpenOptions::default(), options());
            let (db, writer) = open.await.unwrap();
            change(&core, &writer, &keys, round, &mut model).await;
            let merges = writer.stats().merges;
            let reader = db.attach(&core);
            for (key, value) in &model {
                let found = reader.get(0, key.as_bytes(), None).await.unwrap();
                assert_eq!(found.as_deref(), Some(value.as_bytes()), "{key}");
            }
            // Files are removed one after the other.
            core.sleep_ns(500_000_000).await;
            writer.close().await.unwrap();
            (model, merges)
        }
    })
}

pub fn with_blobs(name: &str) -> (PathBuf, Model) {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("blobs-{name}"));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let mut model = Model::new();
    load(&dir, 0..100, "first", &mut model);
    load(&dir, 50..150, "second", &mut model);
    load(&dir, (0..150).step_by(3), "third", &mut model);
    (dir, model)
}

#[test]
fn merges_count_the_values_that_they_drop() {
    let (dir, mut model) = with_blobs("merges");
    assert_eq!(is_right(&dir), 3);
    let mut merges = 0;
    for (round, keys) in [(0..40), (60..90), (0..150)].into_iter().enumerate() {
        let merged;
        (model, merged) = ours(&dir, keys.collect(), round as u64, &model);
        merges += merged;
        is_right(&dir);
        // RocksDB 7.8 opens it, then Millrace again.
        assert_eq!(scan(&dir), model);
        is_right(&dir);
        load(&dir, (round as u64 * 7)..(round as u64 * 7 + 30), "again", &mut model);
        assert_eq!(scan(&dir), model);
    }
    assert!(merges >= 3, "{merges} merges");
}

#[test]
fn clearing_leaves_no_blob_files() {
    let (dir, _) = with_blobs("clear");
    let path = dir.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options());
            let (_db, writer) = open.await.unwrap();
            writer.clear(0).unwrap().await.unwrap();
            writer.put(b"after", b"it").await.unwrap();
            core.sleep_ns(500_000_000).await;
            writer.close().await.unwrap();
        }
    });
    assert_eq!(is_right(&dir), 0);
    let state = manifest(&dir);
    let blobs = state.column_families[&0].blob_files.values();
    assert!(blobs.clone().all(|blob| blob.garbage_count == blob.total_count), "{blobs:?}");
    assert_eq!(scan(&dir), Model::from([("after".to_owned(), "it".to_owned())]));
    let db = format!("--db={}", dir.display());
    let left = tool("ldb", &[&db, "list_live_files_metadata"], "");
    assert!(!left.contains(".blob"), "{left}");
}
