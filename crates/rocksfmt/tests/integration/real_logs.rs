//! Logs and MANIFESTs written by RocksDB 7.8 (db_bench, ldb) and 9.x (rocksdict), some by processes
//! that were killed, compared with the contents that RocksDB itself reports.

#![expect(clippy::disallowed_methods, reason = "tests read files themselves")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::{fresh_dir, run, unhex};
use rocksfmt::*;

type Pairs = BTreeMap<Vec<u8>, Vec<u8>>;

/// The interpreter of the project's own environment, if there is one.
fn python() -> String {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/python");
    match Path::new(own).exists() {
        true => own.to_owned(),
        false => "python3".to_owned(),
    }
}

/// Makes rocksdict create a database and die; returns its directory, its contents, and its last
/// sequence.
fn killed_writer(case: &str) -> (PathBuf, BTreeMap<String, Pairs>, u64) {
    let root = fresh_dir(&format!("logs-{case}"));
    let python = python();
    run(&python, &["-c", "import rocksdict"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/support/write_logs.py");
    let output = Command::new(python).args([script, case]).arg(&root).output().unwrap();
    let Ok(expected) = std::fs::read_to_string(root.join("expected")) else {
        panic!("{case}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let mut families: BTreeMap<String, Pairs> = BTreeMap::new();
    let mut sequence = None;
    for line in expected.lines() {
        let mut words = line.split(' ');
        let (name, key) = (words.next().unwrap(), words.next().unwrap());
        match words.next() {
            None => sequence = Some(key.parse().unwrap()),
            Some(value) => {
                let family = families.entry(name.to_owned()).or_default();
                family.insert(unhex(key), unhex(value));
            }
        }
    }
    (root.join("db"), families, sequence.expect("the script writes the sequence last"))
}

/// Reads a log in pieces of a few blocks.
fn read_log(path: &Path, kind: LogKind) -> (Vec<(u64, Vec<u8>)>, LogReader) {
    let bytes = std::fs::read(path).unwrap();
    let mut reader = LogReader::new(kind);
    let mut records = Vec::new();
    let mut rest = &bytes[..];
    while reader.end().is_none() {
        let (piece, tail) = rest.split_at(rest.len().min(3 * LOG_BLOCK_BYTES));
        rest = tail;
        let fed: std::result::Result<(), ()> = reader.feed(piece, rest.is_empty(), |record| {
            records.push((record.offset, record.data.to_vec()));
            Ok(())
        });
        fed.unwrap();
    }
    (records, reader)
}

fn manifest_path(db: &Path) -> PathBuf {
    let current = std::fs::read(db.join("CURRENT")).unwrap();
    db.join(FileName::Manifest(parse_current(&current).unwrap()).to_string())
}

fn manifest(db: &Path) -> ManifestState {
    let (records, reader) = read_log(&manifest_path(db), LogKind::Manifest);
    assert_eq!(reader.end(), Some(&LogEnd::Clean));
    let mut replay = ManifestReplay::new();
    for (offset, record) in records {
        replay.record(&record).unwrap_or_else(|e| panic!("record at {offset}: {e}"));
    }
    replay.finish().unwrap()
}

/// The numbers of one kind of file in a directory.
fn listed(db: &Path, number: impl Fn(FileName) -> Option<u64>) -> BTreeMap<u64, u64> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(db).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let Some(parsed) = FileName::parse(&name) else {
            assert_eq!(name, "rocksdict-config.json");
            continue;
        };
        assert!(name.starts_with(&parsed.to_string()));
        if let Some(number) = number(parsed) {
            found.insert(number, entry.metadata().unwrap().len());
        }
    }
    found
}

fn logs(db: &Path) -> Vec<u64> {
    let wals = listed(db, |name| match name {
        FileName::Wal(number) => Some(number),
        _ => None,
    });
    wals.into_keys().collect()
}

/// The contents of a database's logs: live pairs by column family, and the last sequence.
struct Replayed {
    families: BTreeMap<String, Pairs>,
    last_sequence: u64,
    ends: Vec<LogEnd>,
    operations: BTreeSet<&'static str>,
}

/// Replays the logs into an empty state, by RocksDB's rules.
fn replay(db: &Path) -> Replayed {
    let state = manifest(db);
    let oldest = state.column_families.values().map(|cf| cf.log_number).min().unwrap();
    let oldest = oldest.max(state.min_log_number_to_keep);
    let mut replayed = Replayed {
        families: state
            .column_families
            .values()
            .map(|cf| (cf.name.clone(), Pairs::new()))
            .collect(),
        last_sequence: state.last_sequence,
        ends: Vec::new(),
        operations: BTreeSet::new(),
    };
    let mut expected = None;
    for number in logs(db).into_iter().filter(|&n| n >= oldest) {
        let path = db.join(FileName::Wal(number).to_string());
        let (records, reader) = read_log(&path, LogKind::Wal { number });
        replayed.ends.push(reader.end().unwrap().clone());
        for (offset, record) in records {
            let batch = WriteBatch::parse(&record).unwrap();
            batch.verify().unwrap_or_else(|e| panic!("{path:?} at {offset}: {e}"));
            assert!(expected.is_none_or(|e| e == batch.sequence()), "{path:?} at {offset}");
            expected = Some(batch.next_sequence());
            replayed.last_sequence = replayed.last_sequence.max(batch.next_sequence() - 1);
            for op in batch.ops() {
                let (_, op) = op.unwrap();
                let Some(id) = op.column_family() else { continue };
                let Some(cf) = state.column_families.get(&id) else { continue };
                if number >= cf.log_number {
                    apply(replayed.families.get_mut(&cf.name).unwrap(), op);
                    replayed.operations.insert(name_of(&op));
                }
            }
        }
    }
    replayed
}

fn name_of(op: &Op<'_>) -> &'static str {
    match op {
        Op::Put { .. } => "put",
        Op::Delete { .. } => "delete",
        Op::SingleDelete { .. } => "single delete",
        Op::Merge { .. } => "merge",
        Op::DeleteRange { .. } => "delete range",
        Op::Entity { .. } => "entity",
        other => panic!("unexpected operation {other:?}"),
    }
}

fn apply(pairs: &mut Pairs, op: Op<'_>) {
    match op {
        Op::Put { key, value, .. } => {
            pairs.insert(key.to_vec(), value.to_vec());
        }
        Op::Entity { key, columns, .. } => {
            let value = columns[default_column(columns).unwrap()].to_vec();
            pairs.insert(key.to_vec(), value);
        }
        Op::Delete { key, .. } | Op::SingleDelete { key, .. } => {
            pairs.remove(key);
        }
        Op::DeleteRange { begin, end, .. } => {
            pairs.retain(|key, _| &key[..] < begin || &key[..] >= end);
        }
        other => panic!("unexpected operation {other:?}"),
    }
}

/// `ldb dump_wal`: sequence, count, bytes, offset and operations of every record.
fn dump_wal(path: &Path) -> Vec<(u64, u32, usize, u64, String)> {
    let file = format!("--walfile={}", path.display());
    let text = run("ldb", &["dump_wal", &file, "--print_value", "--write_committed=true"]);
    let mut lines = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with("Sequence,")) {
        let mut fields = line.splitn(5, ',');
        let mut field = || fields.next().unwrap_or_else(|| panic!("{line}"));
        lines.push((
            field().parse().unwrap(),
            field().parse().unwrap(),
            field().parse().unwrap(),
            field().parse().unwrap(),
            field().trim().to_owned(),
        ));
    }
    lines
}

/// A batch as `ldb dump_wal --print_value` prints it.
fn in_ldbs_words(batch: &WriteBatch<'_>) -> String {
    let hex = |bytes: &[u8]| {
        let digits: String = bytes.iter().map(|b| format!("{b:02X}")).collect();
        format!("0x{digits}")
    };
    let mut words = Vec::new();
    for op in batch.ops() {
        words.push(match op.unwrap().1 {
            Op::Put { cf, key, value } => format!("PUT({cf}) : {} : {}", hex(key), hex(value)),
            Op::Merge { cf, key, operand } => {
                format!("MERGE({cf}) : {} : {}", hex(key), hex(operand))
            }
            Op::Delete { cf, key } => format!("DELETE({cf}) : {}", hex(key)),
            Op::SingleDelete { cf, key } => format!("SINGLE_DELETE({cf}) : {}", hex(key)),
            Op::DeleteRange { cf, begin, end } => {
                format!("DELETE_RANGE({cf}) : {} {}", hex(begin), hex(end))
            }
            other => panic!("unexpected operation {other:?}"),
        });
    }
    words.join(" ")
}

fn db_bench(db: &Path, args: &[&str]) {
    let db = format!("--db={}", db.display());
    let mut all = vec![db.as_str(), "--compression_type=none"];
    all.extend(args);
    run("db_bench", &all);
}

#[test]
fn logs_of_db_bench_hold_what_ldb_dumps() {
    let cases: [(&str, &[&str]); 6] = [
        ("puts", &["--benchmarks=fillrandom", "--batch_size=7"]),
        ("large", &["--benchmarks=fillrandom", "--value_size=50000", "--num=100"]),
        ("families", &["--benchmarks=fillrandom", "--num_column_families=4"]),
        ("merges", &["--benchmarks=mergerandom", "--merge_operator=uint64add", "--value_size=8"]),
        (
            "deletes",
            &[
                "--benchmarks=fillseq,deleterandom",
                "--writes_per_range_tombstone=50",
                "--max_num_range_tombstones=30",
                "--range_tombstone_width=5",
            ],
        ),
        ("compressed", &["--benchmarks=fillrandom", "--wal_compression=zstd", "--batch_size=300"]),
    ];
    let mut operations = BTreeSet::new();
    for (case, args) in cases {
        let db = fresh_dir(&format!("dumped-{case}"));
        db_bench(&db, &[&["--num=3000", "--value_size=100"], args].concat());
        let mut records_seen = 0;
        for number in logs(&db) {
            let path = db.join(FileName::Wal(number).to_string());
            let (records, reader) = read_log(&path, LogKind::Wal { number });
            assert_eq!(reader.end(), Some(&LogEnd::Clean), "{case}");
            assert_eq!(reader.compressed(), case == "compressed");
            let dumped = dump_wal(&path);
            assert_eq!(records.len(), dumped.len(), "{case}");
            for ((offset, record), (sequence, count, bytes, at, words)) in
                records.iter().zip(dumped)
            {
                let batch = WriteBatch::parse(record).unwrap();
                assert_eq!((batch.sequence(), batch.count()), (sequence, count));
                assert_eq!(record.len(), bytes);
                // Before a block's padding, ldb reports the start of the padding.
                assert!(*offset - at < 7, "record at {offset}, ldb says {at}");
                let ours = in_ldbs_words(&batch);
                let spaces = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
                assert_eq!(spaces(&ours), spaces(&words), "{case} at {offset}");
                operations.extend(batch.ops().map(|op| name_of(&op.unwrap().1)));
                records_seen += 1;
            }
        }
        assert!(records_seen >= 10, "{case}: {records_seen} records");
    }
    let seen: Vec<_> = operations.into_iter().collect();
    assert_eq!(seen, ["delete", "delete range", "merge", "put"]);
}

#[test]
fn a_killed_writers_log_holds_what_rocksdb_recovers() {
    let db = fresh_dir("killed");
    let mut child = Command::new("db_bench")
        .args(["--benchmarks=fillrandom", "--num=100000000", "--value_size=100"])
        .args(["--write_buffer_size=1000000000", "--compression_type=none", "--threads=2"])
        .arg(format!("--db={}", db.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("this test needs the tool `db_bench` on the PATH");
    let written = |db: &Path| -> u64 {
        let Ok(entries) = std::fs::read_dir(db) else { return 0 };
        let logs = entries.flatten().filter(|e| e.path().extension().is_some_and(|x| x == "log"));
        logs.map(|e| e.metadata().map_or(0, |m| m.len())).sum()
    };
    let mut waited = 0;
    while written(&db) < 3 << 20 {
        waited += 1;
        assert!(waited < 60_000, "db_bench writes nothing");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let replayed = replay(&db);
    assert!(replayed.ends.iter().all(|e| matches!(e, LogEnd::Clean | LogEnd::Truncated { .. })));
    let ours = &replayed.families["default"];
    assert!(ours.len() > 10_000);
    // Last, because the scan opens the database for writing: the data that RocksDB recovers.
    let db = format!("--db={}", db.display());
    let mut theirs = Pairs::new();
    for line in run("ldb", &[&db, "scan", "--hex"]).lines() {
        let (key, value) = line.split_once(" : ").unwrap();
        theirs.insert(unhex(&key[2..]), unhex(&value[2..]));
    }
    assert!(*ours == theirs, "{} pairs, RocksDB has {}", ours.len(), theirs.len());
}

#[test]
fn operations_of_four_column_families_are_replayed() {
    let (db, expected, sequence) = killed_writer("families");
    let replayed = replay(&db);
    assert_eq!(replayed.last_sequence, sequence);
    for name in ["default", "flushed", "other"] {
        let (ours, theirs) = (&replayed.families[name], &expected[name]);
        assert!(theirs.len() > 300, "{name}");
        assert!(ours == theirs, "{name}: {} pairs, RocksDB has {}", ours.len(), theirs.len());
    }
    assert!(!replayed.families.contains_key("gone"));
    let seen: Vec<_> = replayed.operations.into_iter().collect();
    assert_eq!(seen, ["delete", "delete range", "entity", "put"]);
    let state = manifest(&db);
    assert!(
        state.column_family("flushed").unwrap().log_number > state.column_families[&0].log_number
    );
}

#[test]
fn a_log_compressed_by_rocksdb_9_is_replayed() {
    let (db, expected, sequence) = killed_writer("compressed");
    let number = *logs(&db).last().unwrap();
    let path = db.join(FileName::Wal(number).to_string());
    assert!(read_log(&path, LogKind::Wal { number }).1.compressed());
    let replayed = replay(&db);
    assert_eq!(replayed.last_sequence, sequence);
    assert!(replayed.families == expected);
}

#[test]
fn a_recycled_log_is_read_up_to_its_stale_tail() {
    let (db, expected, sequence) = killed_writer("recycled");
    let number = *logs(&db).last().unwrap();
    let path = db.join(FileName::Wal(number).to_string());
    let (_, reader) = read_log(&path, LogKind::Wal { number });
    assert_eq!(reader.recycled(), Some(true));
    let Some(&LogEnd::StaleTail { offset }) = reader.end() else {
        panic!("{:?}", reader.end());
    };
    let bytes = std::fs::read(&path).unwrap();
    let mut scan = DamageScan::new(&reader, offset, sequence + 1);
    assert_eq!(scan.push(scan.start(), &bytes[scan.start() as usize..]), None);
    let replayed = replay(&db);
    assert_eq!(replayed.last_sequence, sequence);
    let last_round = |pairs: &Pairs| -> Pairs {
        let of_round = |(k, _): &(&Vec<u8>, &Vec<u8>)| k.starts_with(b"11-");
        pairs.iter().filter(of_round).map(|(k, v)| (k.clone(), v.clone())).collect()
    };
    let want = last_round(&expected["default"]);
    assert_eq!(want.len(), 700);
    assert!(replayed.families["default"] == want);

    // Flip one bit in an early record: the stale tail begins there, but a newer record of this log
    // shows that it is damage.
    let mut bad = bytes.clone();
    bad[3000] ^= 1;
    let mut reader = LogReader::new(LogKind::Wal { number });
    let mut next = 0;
    let fed: Result<()> = reader.feed(&bad, true, |record| {
        next = WriteBatch::parse(record.data)?.next_sequence();
        Ok(())
    });
    fed.unwrap();
    let Some(&LogEnd::StaleTail { offset }) = reader.end() else {
        panic!("{:?}", reader.end());
    };
    let mut scan = DamageScan::new(&reader, offset, next);
    let later = scan.push(scan.start(), &bad[scan.start() as usize..]).unwrap();
    assert_eq!(later.sequence, Some(next + 1));
}

/// Live blob files are exactly those that RocksDB keeps; garbage was counted.
#[test]
fn blob_files_of_rocksdb_9_are_known() {
    let (db, _, sequence) = killed_writer("blobs");
    let state = manifest(&db);
    let default = &state.column_families[&0];
    let live: BTreeSet<u64> = default.live_blob_files().map(|blob| blob.number).collect();
    let there = listed(&db, |name| match name {
        FileName::Blob(number) => Some(number),
        _ => None,
    });
    assert!(live.len() > 1);
    assert!(live.iter().all(|number| there.contains_key(number)), "{live:?} {there:?}");
    assert!(default.blob_files.values().any(|blob| blob.garbage_count > 0));
    assert!(default.files().all(|(_, file)| file.oldest_blob_file >= *live.first().unwrap()));
    assert_eq!(state.last_sequence, sequence);
}

#[test]
fn atomic_flushes_of_rocksdb_9_are_applied_together() {
    let (db, _, sequence) = killed_writer("atomic");
    let (records, _) = read_log(&manifest_path(&db), LogKind::Manifest);
    let edits: Vec<_> = records.iter().map(|(_, r)| VersionEdit::decode(r).unwrap()).collect();
    assert!(edits.iter().any(|edit| edit.atomic_group_remaining == Some(2)));
    let state = manifest(&db);
    assert_eq!(replay(&db).last_sequence, sequence);
    let files = |state: &ManifestState| -> Vec<usize> {
        state.column_families.values().map(|cf| cf.files().count()).collect()
    };
    let whole = files(&state);
    assert!(whole.len() == 3 && whole.iter().all(|&count| count > 1), "{whole:?}");
    // Cut inside the last group: none of its flushes counts.
    let last = edits.iter().rposition(|edit| edit.atomic_group_remaining == Some(1)).unwrap();
    let mut replay = ManifestReplay::new();
    for (_, record) in &records[..=last] {
        replay.record(record).unwrap();
    }
    let cut = files(&replay.finish().unwrap());
    assert!(cut.iter().zip(&whole).all(|(cut, whole)| cut + 1 == *whole), "{cut:?} of {whole:?}");
}

/// Lines of `ldb manifest_dump` such as ` 21:213082[14053 .. 21128]['…`.
fn dumped_files(text: &str) -> BTreeSet<(String, usize, u64, u64, u64, u64)> {
    let mut files = BTreeSet::new();
    let (mut family, mut level) = (String::new(), 0);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("--------------- Column family \"") {
            family = rest.split('"').next().unwrap().to_owned();
        } else if let Some(rest) = line.strip_prefix("--- level ") {
            level = rest.split(' ').next().unwrap().parse().unwrap();
        } else if let Some((number, rest)) = line.trim_start().split_once(':')
            && let Ok(number) = number.parse()
            && let Some((size, rest)) = rest.split_once('[')
            && let Some((smallest, rest)) = rest.split_once(" .. ")
            && let Some((largest, _)) = rest.split_once(']')
        {
            let parse = |text: &str| text.parse::<u64>().unwrap();
            let (size, smallest, largest) = (parse(size), parse(smallest), parse(largest));
            files.insert((family.clone(), level, number, size, smallest, largest));
        }
    }
    files
}

#[test]
fn a_manifest_of_rocksdb_7_lists_what_ldb_dumps() {
    let db = fresh_dir("manifest");
    let args = [
        "--benchmarks=fillrandom,overwrite,waitforcompaction",
        "--num=40000",
        "--value_size=100",
        "--write_buffer_size=300000",
        "--target_file_size_base=200000",
        "--max_bytes_for_level_base=800000",
        "--num_column_families=3",
        "--track_and_verify_wals_in_manifest=1",
    ];
    db_bench(&db, &args);
    let state = manifest(&db);
    let path = format!("--path={}", manifest_path(&db).display());
    // Keys in the dump are not text.
    let dump = Command::new("ldb").args(["manifest_dump", &path, "--verbose"]).output().unwrap();
    let text = String::from_utf8_lossy(&dump.stdout);
    let mut ours = BTreeSet::new();
    let mut levels = BTreeSet::new();
    for cf in state.column_families.values() {
        for (level, file) in cf.files() {
            levels.insert(level);
            ours.insert((
                cf.name.clone(),
                level,
                file.number,
                file.size_bytes,
                file.smallest_sequence,
                file.largest_sequence,
            ));
        }
        assert_eq!(cf.comparator().unwrap(), Comparator::Bytewise);
    }
    assert_eq!(ours, dumped_files(&text));
    assert!(levels.len() > 1 && state.column_families.len() == 3, "{levels:?}");
    let totals = text.lines().find(|line| line.starts_with("next_file_number")).unwrap();
    let words: Vec<&str> = totals.split_whitespace().collect();
    let total = |name| {
        let at = words.iter().position(|word| *word == name).unwrap();
        words[at + 1].parse::<u64>().unwrap()
    };
    assert_eq!(state.last_sequence, total("last_sequence"));
    assert_eq!(u64::from(state.max_column_family), total("max_column_family"));
    assert_eq!(state.min_log_number_to_keep, total("min_log_number_to_keep"));
    // All files exist with their sizes, and so do the tracked logs.
    let there = listed(&db, |name| match name {
        FileName::Sst(number) => Some(number),
        _ => None,
    });
    for (_, _, number, size, ..) in &ours {
        assert_eq!(there.get(number), Some(size), "file {number}");
    }
    assert!(!state.wals.is_empty());
    assert!(state.wals.keys().all(|number| logs(&db).contains(number)));
}

#[test]
fn column_families_created_and_dropped_by_ldb_are_followed() {
    let root = fresh_dir("ldb");
    let db = root.join("db");
    let path = format!("--db={}", db.display());
    run("ldb", &[&path, "put", "a", "1", "--create_if_missing"]);
    run("ldb", &[&path, "create_column_family", "first"]);
    run("ldb", &[&path, "create_column_family", "second"]);
    run("ldb", &[&path, "--column_family=second", "put", "b", "2"]);
    run("ldb", &[&path, "drop_column_family", "first"]);
    run("ldb", &[&path, "create_column_family", "third"]);
    run("ldb", &[&path, "--column_family=third", "batchput", "c", "3", "d", "4"]);
    run("ldb", &[&path, "--column_family=third", "deleterange", "c", "d"]);
    let state = manifest(&db);
    let names: Vec<_> = state.column_families.values().map(|cf| (cf.id, &cf.name[..])).collect();
    assert_eq!(names, [(0, "default"), (2, "second"), (3, "third")]);
    assert_eq!(state.max_column_family, 3);
    let replayed = replay(&db);
    assert_eq!(replayed.operations.into_iter().collect::<Vec<_>>(), ["delete range"]);

    let options = listed(&db, |name| match name {
        FileName::Options(number) => Some(number),
        _ => None,
    });
    let (newest, _) = options.last_key_value().unwrap();
    let text = std::fs::read(db.join(FileName::Options(*newest).to_string())).unwrap();
    let options = OptionsFile::parse(&text);
    let mut names: Vec<_> = options.column_family_names().collect();
    names.sort_unstable();
    assert_eq!(names, ["default", "second", "third"]);
    assert_eq!(options.column_family("third", "comparator"), Some("leveldb.BytewiseComparator"));
    assert_eq!(options.column_family("third", "prefix_extractor"), None);
    assert_eq!(options.column_family("third", "num_levels"), Some("7"));
    assert_eq!(options.rocksdb_version(), Some("7.8.3"));
}

/// At every length to which a crash can cut a real log or MANIFEST, the records read are a prefix.
#[test]
fn every_cut_of_a_real_log_reads_as_a_prefix() {
    let db = fresh_dir("cuts");
    db_bench(&db, &["--benchmarks=fillrandom", "--num=1200", "--value_size=90", "--batch_size=3"]);
    let wal = *logs(&db).last().unwrap();
    for (path, kind) in [
        (db.join(FileName::Wal(wal).to_string()), LogKind::Wal { number: wal }),
        (manifest_path(&db), LogKind::Manifest),
    ] {
        let bytes = std::fs::read(&path).unwrap();
        let read = |bytes: &[u8]| {
            let mut records = Vec::new();
            let mut reader = LogReader::new(kind);
            let fed: std::result::Result<(), ()> = reader.feed(bytes, true, |record| {
                records.push(record.data.to_vec());
                Ok(())
            });
            fed.unwrap();
            (records, reader.end().unwrap().clone())
        };
        let (whole, end) = read(&bytes);
        assert_eq!(end, LogEnd::Clean);
        for cut in (0..bytes.len()).step_by(bytes.len() / 700 + 1) {
            let (records, end) = read(&bytes[..cut]);
            assert_eq!(records, whole[..records.len()]);
            assert!(matches!(end, LogEnd::Clean | LogEnd::Truncated { .. }), "{cut}: {end:?}");
        }
        let mut junk = bytes.clone();
        junk.extend_from_slice(b"\x12\x34\x56\x78\x90\x01\x01junk");
        let (records, end) = read(&junk);
        assert_eq!(records.len(), whole.len());
        assert_eq!(end, LogEnd::Truncated { offset: bytes.len() as u64 });
    }
}
