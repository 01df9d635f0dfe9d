//! Checkpoints and backups: each holds the database as it was, whatever is written afterwards, and
//! RocksDB and Millrace read each other's.
#![expect(clippy::disallowed_methods, reason = "files of the host, as both programs left them")]

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lsm::{
    BackupDir, ClosedFiles, Db, Durability, FileList, Kind, OpenOptions, Transfer, WriteOptions,
    Writer,
};
use reactor::Core;

use crate::common::{self, Model, compare, ldb, on_one_core, write_some};
use crate::writing::rocksdb_scan;

fn small(durability: Durability) -> WriteOptions {
    WriteOptions { durability, memtable_bytes: 300_000, ..WriteOptions::default() }
}

/// With the larger ones of the values in blob files, which are as short as possible.
fn with_blobs(durability: Durability) -> WriteOptions {
    WriteOptions { blob_min: Some(100), blob_file_bytes: 1, ..small(durability) }
}

/// The contents of the blob files in a directory.
fn blobs_of(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = bytes_of(dir);
    all.retain(|path, _| path.extension() == Some("blob".as_ref()));
    all
}

/// An empty directory, with one for a database.
fn fresh_dir(name: &str) -> PathBuf {
    let dir = common::fresh_dir(name);
    std::fs::create_dir(dir.join("db")).unwrap();
    dir
}

/// Runs `main` on one core, with a directory that is removed afterwards.
fn in_directory(dir: PathBuf, main: impl AsyncFn(Core, PathBuf) + Clone + Send + 'static) {
    on_one_core(move |core| {
        let (dir, main) = (dir.clone(), main.clone());
        async move {
            main(core, dir.clone()).await;
            std::fs::remove_dir_all(&dir).unwrap();
        }
    });
}

async fn open(core: &Core, dir: &Path, options: WriteOptions) -> (Db, Writer) {
    Db::open_for_writing(core, dir, OpenOptions::default(), options).await.unwrap()
}

/// The contents of every file in a directory, of which all were there at the same time: an open
/// database makes and removes some meanwhile.
fn bytes_of(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    loop {
        let mut all = BTreeMap::new();
        let before = files_of(dir);
        for path in &before {
            match std::fs::read(path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
                bytes => drop(all.insert(path.clone(), bytes.unwrap())),
            }
        }
        if files_of(dir) == before {
            return all;
        }
    }
}

/// Every file in a directory and those below it.
fn files_of(dir: &Path) -> BTreeSet<PathBuf> {
    let mut all = BTreeSet::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => all.extend(files_of(&path)),
            false => drop(all.insert(path)),
        }
    }
    all
}

/// Opens a database, for writing if asked to, and compares it with a model.
async fn holds(core: &Core, dir: &Path, model: &Model, writes: bool) {
    if !writes {
        let db = Db::open(core, dir, OpenOptions::default()).await.unwrap();
        return compare(core, &db, model).await;
    }
    let options = WriteOptions { create: false, ..small(Durability::Power) };
    let opened = Db::open_for_writing(core, dir, OpenOptions::default(), options).await;
    let (db, writer) = opened.unwrap();
    compare(core, &db, model).await;
    writer.close().await.unwrap();
}

async fn backup(core: &Core, files: &FileList, to: &Path) -> lsm::CreatedBackup {
    let mut last = (0, 0);
    let mut note = |done, total| last = (done, total);
    let mut transfer = Transfer::new(core, None, &mut note);
    let made = BackupDir::new(core, to).create(files, &mut transfer).await.unwrap();
    drop(transfer);
    assert!(last.0 > 0 && last.0 >= last.1, "the progress ends at {last:?}");
    made
}

async fn restore(core: &Core, from: &Path, id: Option<u32>, to: &Path) -> lsm::Result<u32> {
    let mut quiet = |_, _| {};
    let mut transfer = Transfer::new(core, None, &mut quiet);
    let restored = BackupDir::new(core, from).restore(id, to, &mut transfer).await;
    restored.map(|restored| restored.id)
}

async fn damages(core: &Core, of: &Path, id: u32) -> Vec<String> {
    let mut quiet = |_, _| {};
    let mut transfer = Transfer::new(core, None, &mut quiet);
    BackupDir::new(core, of).verify(Some(id), &mut transfer).await.unwrap().damages
}

fn ldb_restore(backups: &Path, to: &Path) {
    ldb(to, &["restore", &format!("--backup_dir={}", backups.display())]);
}

#[test]
fn a_checkpoint_holds_the_database_as_it_was_whatever_is_written_later() {
    for options in [
        small(Durability::Process),
        small(Durability::Power),
        with_blobs(Durability::Process),
        with_blobs(Durability::Power),
    ] {
        let (durability, blobs) = (options.durability, options.blob_min.is_some());
        let dir = fresh_dir(&format!("checkpoint-{durability:?}-{blobs}"));
        let base = dir.clone();
        let models = on_one_core(move |core| {
            let (base, options) = (base.clone(), options.clone());
            async move {
                let path = base.join("db");
                let (_db, writer) = open(&core, &path, options).await;
                let (mut model, mut models) = (Model::new(), Vec::new());
                let mut copied = Vec::new();
                let batches = if durability == Durability::Power { 60 } else { 400 };
                for round in 0..5 {
                    let made = writer.checkpoint(&base.join(round.to_string())).await.unwrap();
                    assert!(made.bytes > 0 && (round < 3 || made.linked_bytes > 0), "{made:?}");
                    models.push(model.clone());
                    copied.push(blobs_of(&base.join(round.to_string())));
                    write_some(&core, &writer, &mut model, batches).await;
                }
                let with_blobs = copied.iter().filter(|copied| !copied.is_empty()).count();
                assert!(if blobs { with_blobs >= 3 } else { with_blobs == 0 }, "{with_blobs}");
                let refused = writer.checkpoint(&base.join("1")).await.unwrap_err();
                assert!(refused.kind() == Kind::Unsupported && refused.to_string().contains("/1"));
                // Merges and recycled files must not touch the checkpoints' files.
                write_some(&core, &writer, &mut model, 5 * batches).await;
                for (round, model) in models.iter().enumerate() {
                    let path = base.join(round.to_string());
                    assert!(blobs_of(&path) == copied[round], "a copied blob file grows");
                    holds(&core, &path, model, false).await;
                    assert!(!path.join("LOCK").exists() && !path.join("IDENTITY").exists());
                    let quiet = |_, _| {};
                    let report = lsm::check(&core, &path, &OpenOptions::default(), quiet).await;
                    assert_eq!(report.unwrap().damages, []);
                }
                writer.close().await.unwrap();
                models
            }
        });
        for (round, model) in models.into_iter().enumerate() {
            let path = dir.join(round.to_string());
            ldb(&path, &["checkconsistency"]);
            let (own, expected) = (path.clone(), model.clone());
            on_one_core(move |core| {
                let (own, expected) = (own.clone(), expected.clone());
                async move { holds(&core, &own, &expected, true).await }
            });
            assert!(rocksdb_scan(&path) == model, "RocksDB finds something else in {round}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn long_logs_become_tables_before_a_checkpoint() {
    let dir = fresh_dir("checkpoint-long-logs");
    in_directory(dir, async |core, base| {
        let options = WriteOptions { durability: Durability::Process, ..WriteOptions::default() };
        let path = base.join("db");
        let (_db, writer) = open(&core, &path, options).await;
        writer.put(b"key000000", &vec![7; 20 << 20]).await.unwrap();
        let made = writer.checkpoint(&base.join("copy")).await.unwrap();
        assert!(made.linked_bytes > 20 << 20 && made.bytes < 21 << 20, "{made:?}");
        writer.put(b"key000000", b"later").await.unwrap();
        let expected = Model::from([(b"key000000".to_vec(), vec![7; 20 << 20])]);
        holds(&core, &base.join("copy"), &expected, false).await;
        // With a limit above it, a list names the log, as far as it is written.
        let live = writer.live_files(1 << 30).await.unwrap();
        let log = live.list().logs[0].bytes.unwrap();
        assert!((40..100_000).contains(&log), "{log}");
        drop(live);
        writer.close().await.unwrap();
    });
}

#[test]
fn copies_of_a_closed_database_leave_it_as_it_was() {
    let dir = fresh_dir("copies-closed");
    in_directory(dir, async |core, base| {
        let path = base.join("db");
        let (db, writer) = open(&core, &path, small(Durability::Process)).await;
        let mut model = Model::new();
        write_some(&core, &writer, &mut model, 700).await;
        let locked = ClosedFiles::of(&core, &path).await.err().unwrap();
        assert_eq!(locked.kind(), Kind::Locked);
        writer.close().await.unwrap();
        drop((db, writer));
        let before = bytes_of(&path);
        let files = ClosedFiles::of(&core, &path).await.unwrap();
        let mut quiet = |_, _| {};
        let mut transfer = Transfer::new(&core, None, &mut quiet);
        let copy = base.join("copy");
        let made = lsm::checkpoint(files.list(), &copy, &mut transfer).await.unwrap();
        assert!(made.linked_bytes > 0);
        backup(&core, files.list(), &base.join("backups")).await;
        drop(files);
        assert!(bytes_of(&path) == before, "a copy changed the database");
        restore(&core, &base.join("backups"), None, &base.join("restored")).await.unwrap();
        // An unfinished copy that was left is replaced; anything else there is not.
        std::fs::create_dir(base.join("again.tmp")).unwrap();
        std::fs::write(base.join("again.tmp/MILLRACE-COPY"), b"").unwrap();
        std::fs::write(base.join("again.tmp/000007.sst"), b"half").unwrap();
        let files = ClosedFiles::of(&core, &path).await.unwrap();
        lsm::checkpoint(files.list(), &base.join("again"), &mut transfer).await.unwrap();
        std::fs::create_dir(base.join("other.tmp")).unwrap();
        std::fs::write(base.join("other.tmp/mine"), b"mine").unwrap();
        let refused = lsm::checkpoint(files.list(), &base.join("other"), &mut transfer).await;
        assert!(refused.unwrap_err().to_string().contains("other.tmp/mine"));
        for copy in ["copy", "again", "restored"] {
            holds(&core, &base.join(copy), &model, false).await;
            holds(&core, &base.join(copy), &model, true).await;
        }
    });
}

/// The draft `NAME.tmp` may be a database that is not ours to remove.
#[test]
fn a_database_without_one_of_its_tables_is_not_copied() {
    in_directory(fresh_dir("incomplete"), async |core, dir| {
        let path = dir.join("db");
        let (db, writer) = open(&core, &path, small(Durability::Process)).await;
        write_some(&core, &writer, &mut Model::new(), 300).await;
        writer.flush().await.unwrap();
        writer.close().await.unwrap();
        drop((db, writer));
        let mut tables = files_of(&path);
        tables.retain(|file| file.extension() == Some("sst".as_ref()));
        let table = path.join(tables.first().unwrap());
        let bytes = std::fs::read(&table).unwrap();
        for there in [Some(&bytes[..bytes.len() - 1]), None] {
            std::fs::remove_file(&table).unwrap_or_default();
            if let Some(part) = there {
                std::fs::write(&table, part).unwrap();
            }
            let files = ClosedFiles::of(&core, &path).await.unwrap();
            let mut quiet = |_, _| {};
            let mut transfer = Transfer::new(&core, None, &mut quiet);
            let copied = lsm::checkpoint(files.list(), &dir.join("copy"), &mut transfer).await;
            let error = copied.expect_err("a table is missing or cut");
            assert_eq!(error.kind(), Kind::Corruption, "{error}");
            assert!(!dir.join("copy").join("CURRENT").exists());
        }
    });
}

#[test]
fn a_copy_removes_nothing_that_no_copy_has_left() {
    let dir = fresh_dir("copies-foreign");
    make_backups(&dir, 1, small(Durability::Process));
    in_directory(dir, async |core, base| {
        let (backups, target) = (base.join("backups"), base.join("new"));
        let files = ClosedFiles::of(&core, &base.join("db")).await.unwrap();
        let mut quiet = |_, _| {};
        let mut transfer = Transfer::new(&core, None, &mut quiet);
        let draft = base.join("new.tmp");
        restore(&core, &backups, None, &draft).await.unwrap();
        for (others, named) in [
            // A whole database.
            (&[][..], ""),
            (&["LOCK"], ""),
            // One that was made of what a killed copy has left.
            (&["MILLRACE-COPY", "LOCK"], "LOCK"),
            (&["MILLRACE-COPY", "IDENTITY"], "IDENTITY"),
            (&["MILLRACE-COPY", "mine"], "mine"),
        ] {
            others.iter().for_each(|name| std::fs::write(draft.join(name), b"").unwrap());
            let before = bytes_of(&draft);
            let made = lsm::checkpoint(files.list(), &target, &mut transfer).await;
            let restored = restore(&core, &backups, None, &target).await;
            for error in [made.unwrap_err(), restored.unwrap_err()] {
                assert_eq!(error.kind(), Kind::Unsupported);
                let place = format!("{}/{named}", draft.display());
                assert!(error.to_string().contains(&place), "{others:?}: {error}");
            }
            assert!(bytes_of(&draft) == before && !target.exists(), "{others:?}");
            others.iter().for_each(|name| std::fs::remove_file(draft.join(name)).unwrap());
        }
        std::fs::write(draft.join("MILLRACE-COPY"), b"").unwrap();
        // What a killed copy has left, without anything else, is used.
        restore(&core, &backups, None, &target).await.unwrap();
        assert!(!draft.exists() && !target.join("MILLRACE-COPY").exists());
    });
}

#[test]
fn only_one_process_at_a_time_makes_a_directory() {
    let dir = fresh_dir("copies-locked");
    make_backups(&dir, 1, small(Durability::Process));
    in_directory(dir, async |core, base| {
        let (backups, target) = (base.join("backups"), base.join("new"));
        let files = ClosedFiles::of(&core, &base.join("db")).await.unwrap();
        let mut quiet = |_, _| {};
        let mut transfer = Transfer::new(&core, None, &mut quiet);
        // The other process: it has restored a table, and has the lock.
        let draft = base.join("new.tmp");
        std::fs::create_dir(&draft).unwrap();
        std::fs::write(draft.join("000007.sst"), b"half").unwrap();
        let lock = core.lock_exclusive(&draft.join("MILLRACE-COPY")).await.unwrap();
        let before = bytes_of(&draft);
        let made = lsm::checkpoint(files.list(), &target, &mut transfer).await;
        let restored = restore(&core, &backups, None, &target).await;
        for error in [made.unwrap_err(), restored.unwrap_err()] {
            assert!(error.kind() == Kind::Locked, "{error}");
            assert!(error.to_string().contains("another process is making"), "{error}");
        }
        assert!(bytes_of(&draft) == before && !target.exists());
        // The lock ends with the process.
        drop(lock);
        lsm::checkpoint(files.list(), &target, &mut transfer).await.unwrap();
        assert!(!draft.exists() && !target.join("000007.sst").exists());
    });
}

/// Logs are allocated in advance, and recycled ones end in old records.
#[test]
fn only_the_used_part_of_a_log_is_copied() {
    for (name, batches, options) in [
        ("copies-logs-new", 20, WriteOptions::default()),
        ("copies-logs-recycled", 900, small(Durability::Process)),
    ] {
        let dir = fresh_dir(name);
        let base = dir.clone();
        let model = on_one_core(move |core| {
            let (base, options) = (base.clone(), options.clone());
            async move {
                let path = base.join("db");
                let (db, writer) = open(&core, &path, options).await;
                let mut model = Model::new();
                write_some(&core, &writer, &mut model, batches).await;
                // As a kill leaves it.
                std::fs::create_dir(base.join("killed")).unwrap();
                for (from, bytes) in bytes_of(&path) {
                    let file = from.file_name().unwrap();
                    std::fs::write(base.join("killed").join(file), bytes).unwrap();
                }
                writer.close().await.unwrap();
                drop((db, writer));
                for original in ["db", "killed"] {
                    let path = base.join(original);
                    let files = ClosedFiles::of(&core, &path).await.unwrap();
                    let logs = files.list().logs.clone();
                    let all: u64 = logs.iter().map(|log| log_bytes(&path, log.number)).sum();
                    let made = backup(&core, files.list(), &base.join("backups")).await;
                    let mut quiet = |_, _| {};
                    let mut transfer = Transfer::new(&core, None, &mut quiet);
                    let copy = base.join(format!("checkpoint-{original}"));
                    lsm::checkpoint(files.list(), &copy, &mut transfer).await.unwrap();
                    let copied: u64 = logs.iter().map(|log| log_bytes(&copy, log.number)).sum();
                    let used: u64 = logs.iter().map(|log| used_bytes(&path, log.number)).sum();
                    assert!(copied < all, "{original}: all of {all} bytes");
                    let most = used + logs.len() as u64 * (32 << 10);
                    assert!((used..=most).contains(&copied), "{original}: {copied}, used {used}");
                    let to = base.join(format!("restored-{original}"));
                    restore(&core, &base.join("backups"), Some(made.id), &to).await.unwrap();
                    for copy in [copy, to] {
                        holds(&core, &copy, &model, false).await;
                    }
                }
                model
            }
        });
        for id in ["2", "1"] {
            let to = dir.join(format!("by-rocksdb{id}"));
            ldb_restore(&dir.join("backups"), &to);
            assert!(rocksdb_scan(&to) == model, "RocksDB restores something else from {id}");
            std::fs::remove_file(dir.join("backups/meta").join(id)).unwrap();
        }
        for copy in ["checkpoint-db", "checkpoint-killed"] {
            assert!(rocksdb_scan(&dir.join(copy)) == model, "RocksDB finds something else");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

fn log_bytes(dir: &Path, number: u64) -> u64 {
    std::fs::metadata(dir.join(format!("{number:06}.log"))).unwrap().len()
}

/// The bytes of a log up to the end of its last record.
fn used_bytes(dir: &Path, number: u64) -> u64 {
    let bytes = std::fs::read(dir.join(format!("{number:06}.log"))).unwrap();
    let mut reader = rocksfmt::LogReader::new(rocksfmt::LogKind::Wal { number });
    let Ok(()) = reader.feed(&bytes, true, |_| Ok::<(), std::convert::Infallible>(()));
    reader.good_until()
}

/// Backups of a database that is being written to. Returns its contents at each.
fn make_backups(dir: &Path, rounds: u32, options: WriteOptions) -> Vec<Model> {
    let base = dir.to_owned();
    on_one_core(move |core| {
        let (base, options) = (base.clone(), options.clone());
        async move {
            let path = base.join("db");
            let (_db, writer) = open(&core, &path, options).await;
            let (mut model, mut models) = (Model::new(), Vec::new());
            for round in 1..=rounds {
                write_some(&core, &writer, &mut model, 250).await;
                let live = writer.live_files(1 << 20).await.unwrap();
                write_some(&core, &writer, &mut Model::new(), 250).await;
                let made = backup(&core, live.list(), &base.join("backups")).await;
                assert_eq!(made.id, round);
                drop(live);
                models.push(model.clone());
                // What was written during the backup is not in it.
                writer.clear(0).unwrap().await.unwrap();
                model.clear();
            }
            writer.close().await.unwrap();
            models
        }
    })
}

#[test]
fn backups_are_restored_by_both_programs() {
    restored_by_both("backups", small(Durability::Process));
    restored_by_both("backups-blobs", with_blobs(Durability::Process));
}

fn restored_by_both(name: &str, options: WriteOptions) {
    let dir = fresh_dir(name);
    let models = make_backups(&dir, 3, options);
    let (base, expected) = (dir.clone(), models.clone());
    on_one_core(move |core| {
        let (base, models) = (base.clone(), expected.clone());
        async move {
            let backups = base.join("backups");
            for (id, model) in (1..).zip(&models) {
                let to = base.join(format!("restored{id}"));
                assert_eq!(damages(&core, &backups, id).await, [""; 0]);
                assert_eq!(restore(&core, &backups, Some(id), &to).await.unwrap(), id);
                holds(&core, &to, model, true).await;
            }
            let missing = restore(&core, &backups, Some(9), &base.join("none")).await.unwrap_err();
            assert!(missing.kind() == Kind::NoDatabase && missing.to_string().contains("backup 9"));
            let full = restore(&core, &backups, None, &base.join("restored1")).await.unwrap_err();
            assert!(full.to_string().contains("not empty"), "{full}");
        }
    });
    // RocksDB restores the newest one that is there.
    for id in (1..=3).rev() {
        let to = dir.join(format!("by-rocksdb{id}"));
        ldb_restore(&dir.join("backups"), &to);
        ldb(&to, &["checkconsistency"]);
        assert!(rocksdb_scan(&to) == models[id - 1], "RocksDB restores something else from {id}");
        let base = dir.clone();
        on_one_core(move |core| {
            let backups = BackupDir::new(&core, &base.join("backups"));
            async move {
                let (before, _) = backups.list().await.unwrap();
                assert_eq!(before.len(), id);
                backups.delete(&[id as u32]).await.unwrap();
            }
        });
    }
    // With the last backup all files went.
    let left = bytes_of(&dir.join("backups"));
    assert!(left.keys().all(|path| path.ends_with("LOCK")), "{:?}", left.keys());
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_later_backup_copies_only_what_is_new_and_an_interrupted_one_is_continued() {
    let dir = fresh_dir("backups-increments");
    in_directory(dir, async |core, base| {
        let backups = base.join("backups");
        let path = base.join("db");
        let options = small(Durability::Process);
        let (_db, writer) = open(&core, &path, options).await;
        let mut model = Model::new();
        write_some(&core, &writer, &mut model, 1500).await;
        let live = writer.live_files(0).await.unwrap();
        let first = backup(&core, live.list(), &backups).await;
        assert_eq!(first.shared_bytes, 0);
        let second = backup(&core, live.list(), &backups).await;
        assert!(second.bytes - second.shared_bytes < 20_000, "{second:?}");
        // An attempt that ended before its description: whole files are taken over, and one
        // that has other bytes is not.
        std::fs::remove_file(backups.join("meta/1")).unwrap();
        std::fs::remove_file(backups.join("meta/2")).unwrap();
        let shared = bytes_of(&backups.join("shared_checksum"));
        let (victim, bytes) = shared.iter().next().unwrap();
        let mut changed = bytes.clone();
        changed[100] ^= 1;
        std::fs::write(victim, &changed).unwrap();
        let again = backup(&core, live.list(), &backups).await;
        let copied = again.bytes - again.shared_bytes;
        assert!(again.shared_bytes > 0 && copied >= bytes.len() as u64, "{again:?}");
        assert_eq!(damages(&core, &backups, again.id).await, [""; 0]);
        // Both names are links to one file only in the database.
        assert_eq!(std::fs::metadata(victim).unwrap().nlink(), 1);
        drop(live);
        // A restore that was interrupted takes over what it has verified.
        let to = base.join("restored");
        restore(&core, &backups, None, &to).await.unwrap();
        std::fs::rename(&to, base.join("restored.tmp")).unwrap();
        std::fs::write(base.join("restored.tmp/MILLRACE-COPY"), b"").unwrap();
        let table = bytes_of(&base.join("restored.tmp"));
        let table = table.keys().find(|path| path.extension() == Some("sst".as_ref()));
        std::fs::write(table.unwrap(), b"half of it").unwrap();
        std::fs::write(base.join("restored.tmp/000001.log"), b"of another backup").unwrap();
        restore(&core, &backups, None, &to).await.unwrap();
        assert!(!to.join("000001.log").exists());
        holds(&core, &to, &model, true).await;
        writer.close().await.unwrap();
    });
}

#[test]
fn one_flipped_bit_of_a_backup_is_found_and_never_restored() {
    let dir = fresh_dir("backups-damage");
    make_backups(&dir, 1, small(Durability::Process));
    in_directory(dir, async |core, base| {
        let backups = base.join("backups");
        let all = bytes_of(&backups);
        let files = all
            .iter()
            .filter(|(path, bytes)| !bytes.is_empty() && !path.starts_with(backups.join("meta")));
        for (n, (path, bytes)) in files.enumerate() {
            let mut changed = bytes.clone();
            let at = (n * 7919) % bytes.len();
            changed[at] ^= 1 << (n % 8);
            std::fs::write(path, &changed).unwrap();
            let found = damages(&core, &backups, 1).await;
            assert!(found.len() == 1 && found[0].contains("checksum"), "{found:?}");
            let to = base.join("restored");
            let error = restore(&core, &backups, Some(1), &to).await.unwrap_err();
            assert!(error.kind() == Kind::Corruption && !to.exists(), "{error}");
            std::fs::write(path, bytes).unwrap();
        }
        // A damaged description is not passed over in favour of an older backup.
        std::fs::write(backups.join("meta/2"), b"damaged").unwrap();
        let error = restore(&core, &backups, None, &base.join("restored")).await.unwrap_err();
        assert!(error.to_string().contains("meta/2"), "{error}");
        BackupDir::new(&core, &backups).delete(&[2]).await.unwrap();
        let (path, bytes) = all.iter().find(|(path, _)| path.ends_with("CURRENT")).unwrap();
        std::fs::remove_file(path).unwrap();
        assert_eq!(damages(&core, &backups, 1).await.len(), 1);
        std::fs::write(path, bytes).unwrap();
        restore(&core, &backups, Some(1), &base.join("restored")).await.unwrap();
    });
}

#[test]
fn a_directory_of_backups_is_of_one_database_and_not_the_directory_of_one() {
    let dir = fresh_dir("backups-other");
    make_backups(&dir, 1, small(Durability::Process));
    in_directory(dir, async |core, base| {
        let (backups, other) = (base.join("backups"), base.join("other"));
        std::fs::create_dir(&other).unwrap();
        let options = small(Durability::Power);
        let (db, writer) = open(&core, &other, options).await;
        writer.put(b"k", b"other").await.unwrap();
        writer.close().await.unwrap();
        drop((db, writer));
        let (before, database) = (bytes_of(&backups), bytes_of(&other));
        let files = ClosedFiles::of(&core, &other).await.unwrap();
        let mut quiet = |_, _| {};
        let mut transfer = Transfer::new(&core, None, &mut quiet);
        let refused = BackupDir::new(&core, &backups).create(files.list(), &mut transfer).await;
        let refused = refused.unwrap_err();
        assert!(refused.kind() == Kind::Unsupported, "{refused}");
        assert!(refused.to_string().contains("backup 1 is of another database"), "{refused}");
        assert!(bytes_of(&backups) == before, "the refusal changed the backups");
        let insists = BackupDir::new(&core, &backups).of_any_database();
        assert_eq!(insists.create(files.list(), &mut transfer).await.unwrap().id, 2);
        // A restored database continues the backups of its original.
        restore(&core, &backups, Some(1), &base.join("restored")).await.unwrap();
        BackupDir::new(&core, &backups).delete(&[2]).await.unwrap();
        let restored = ClosedFiles::of(&core, &base.join("restored")).await.unwrap();
        assert_eq!(backup(&core, restored.list(), &backups).await.id, 2);
        for place in ["other", "db"] {
            let place = BackupDir::new(&core, &base.join(place));
            let refused = place.create(files.list(), &mut transfer).await.unwrap_err();
            assert!(refused.to_string().contains("directory of a database"), "{refused}");
        }
        assert!(bytes_of(&other) == database && !other.join("meta").exists());
    });
}

#[test]
fn a_backup_that_is_named_twice_is_deleted_once() {
    let dir = fresh_dir("backups-twice");
    make_backups(&dir, 2, small(Durability::Process));
    in_directory(dir, async |core, base| {
        let backups = BackupDir::new(&core, &base.join("backups"));
        assert!(backups.delete(&[1, 1]).await.unwrap() > 0);
        assert!(!base.join("backups/private/1").exists());
        assert_eq!(damages(&core, &base.join("backups"), 2).await, [""; 0]);
    });
}

#[test]
fn a_description_that_cannot_be_read_hides_no_other() {
    let dir = fresh_dir("backups-unreadable");
    make_backups(&dir, 2, small(Durability::Process));
    in_directory(dir, async |core, base| {
        // Too long to be read.
        let long = std::fs::File::create(base.join("backups/meta/3")).unwrap();
        long.set_len(300 << 20).unwrap();
        std::fs::write(base.join("backups/meta/5"), [0xff; 10]).unwrap();
        let (listed, damaged) = BackupDir::new(&core, &base.join("backups")).list().await.unwrap();
        let listed: Vec<u32> = listed.iter().map(|backup| backup.id).collect();
        let damaged: Vec<String> = damaged.iter().map(ToString::to_string).collect();
        assert_eq!(listed, [1, 2], "{damaged:?}");
        assert!(damaged.iter().any(|what| what.contains("meta/3: 314572800 bytes")));
        assert!(damaged.iter().any(|what| what.contains("meta/5: not text")), "{damaged:?}");
        let to = base.join("restored");
        let error = restore(&core, &base.join("backups"), None, &to).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Corruption);
        restore(&core, &base.join("backups"), Some(2), &to).await.unwrap();
    });
}

#[test]
fn rocksdb_and_millrace_make_backups_in_one_directory_in_turn() {
    let dir = fresh_dir("backups-in-turn");
    let db = dir.join("db");
    let backups = dir.join("backups");
    let to_backups = format!("--backup_dir={}", backups.display());
    ldb(&db, &["put", "--create_if_missing", "k0", "rocksdb"]);
    for round in 0..3 {
        ldb(&db, &["put", &format!("k{round}"), "rocksdb"]);
        ldb(&db, &["backup", &to_backups]);
        let (base, writes) = (dir.clone(), round > 0);
        on_one_core(move |core| {
            let base = base.clone();
            async move {
                let db = base.join("db");
                if writes {
                    let options = WriteOptions::default();
                    let (_db, writer) = open(&core, &db, options).await;
                    writer.put(b"k", format!("millrace{round}").as_bytes()).await.unwrap();
                    writer.close().await.unwrap();
                }
                let files = ClosedFiles::of(&core, &db).await.unwrap();
                let made = backup(&core, files.list(), &base.join("backups")).await;
                assert_eq!(made.id, 2 * round + 2);
                assert!(made.shared_bytes > 0, "RocksDB has copied these tables: {made:?}");
            }
        });
        let expected = rocksdb_scan(&db);
        let restored = dir.join(format!("by-rocksdb{round}"));
        ldb_restore(&backups, &restored);
        assert!(rocksdb_scan(&restored) == expected);
        let own = dir.join(format!("by-millrace{round}"));
        let (from, to) = (backups.clone(), own.clone());
        on_one_core(move |core| {
            let (from, to) = (from.clone(), to.clone());
            async move {
                // RocksDB's own one of this round, which differs at most in `k`.
                restore(&core, &from, Some(2 * round + 1), &to).await.unwrap();
                assert_eq!(damages(&core, &from, 2 * round + 1).await, [""; 0]);
            }
        });
        let without_k = |mut model: Model| {
            model.remove(&b"k"[..]);
            model
        };
        assert!(without_k(rocksdb_scan(&own)) == without_k(expected));
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
