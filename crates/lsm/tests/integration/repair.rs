//! Damaged directories: what a check finds, what an opening for writing leaves alone, and what a
//! repair keeps.
#![expect(clippy::disallowed_methods, reason = "files of the host, to damage them")]

use std::path::{Path, PathBuf};

use lsm::{CheckReport, Db, Durability, OpenOptions, RepairReport, WriteOptions};
use reactor::Core;
use rocksfmt::{FileName, LogKind, LogReader};

use crate::common::{Model, compare, fresh_dir, ldb, on_one_core, write_some};

fn options() -> WriteOptions {
    WriteOptions {
        durability: Durability::Process,
        memtable_bytes: 300_000,
        ..WriteOptions::default()
    }
}

/// Copies the files of a directory to an empty one with this name.
fn copy(from: &Path, name: &str) -> PathBuf {
    let to = fresh_dir(name);
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to
}

fn names(dir: &Path, end: &str) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(end)).collect();
    names.sort_unstable();
    names
}

/// A database after random writes: tables in several levels, and perhaps writes in a log.
fn written(name: &str, options: &WriteOptions) -> (PathBuf, Model) {
    let dir = fresh_dir(name);
    let (path, options) = (dir.clone(), options.clone());
    let model = on_one_core(move |core| {
        let (path, options) = (path.clone(), options.clone());
        async move {
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options);
            let (_db, writer) = open.await.unwrap();
            let mut model = Model::new();
            write_some(&core, &writer, &mut model, 2000).await;
            writer.close().await.unwrap();
            model
        }
    });
    (dir, model)
}

fn check(dir: &Path) -> CheckReport {
    let dir = dir.to_owned();
    on_one_core(move |core| {
        let dir = dir.clone();
        async move { lsm::check(&core, &dir, &OpenOptions::default(), |_, _| {}).await.unwrap() }
    })
}

fn repair(dir: &Path) -> RepairReport {
    let dir = dir.to_owned();
    on_one_core(move |core| {
        let dir = dir.clone();
        async move { lsm::repair(&core, &dir, &OpenOptions::default(), false, |_, _| {}).await.unwrap() }
    })
}

async fn opened(core: &Core, dir: &Path) -> lsm::Result<Db> {
    let open = Db::open_for_writing(core, dir, OpenOptions::default(), options());
    let (db, writer) = open.await?;
    writer.close().await?;
    Ok(db)
}

/// Opens a directory for writing. If it is refused, nothing has changed; otherwise it has
/// everything.
fn has_all_or_is_refused(dir: &Path, model: &Model) -> Option<String> {
    let before = names(dir, ".sst");
    let (path, model) = (dir.to_owned(), model.clone());
    let refused = on_one_core(move |core| {
        let (path, model) = (path.clone(), model.clone());
        async move {
            match opened(&core, &path).await {
                Ok(db) => {
                    compare(&core, &db, &model).await;
                    None
                }
                Err(error) => Some(error.to_string()),
            }
        }
    });
    if refused.is_some() {
        assert_eq!(names(dir, ".sst"), before);
    }
    refused
}

/// Where the records of the current MANIFEST begin, and its end.
fn manifest(dir: &Path) -> (PathBuf, Vec<u64>) {
    let current = std::fs::read_to_string(dir.join("CURRENT")).unwrap();
    let path = dir.join(current.trim_end());
    let bytes = std::fs::read(&path).unwrap();
    let (mut reader, mut borders) = (LogReader::new(LogKind::Manifest), Vec::new());
    let each = |record: rocksfmt::LogRecord<'_>| {
        borders.push(record.offset);
        Ok::<(), rocksfmt::Error>(())
    };
    reader.feed(&bytes, true, each).unwrap();
    borders.push(reader.good_until());
    (path, borders)
}

/// Cuts the MANIFEST at borders of its records and within records.
#[test]
fn a_manifest_that_lost_its_end_is_found_and_rebuilt() {
    let (dir, model) = written("repair-cut", &options());
    let (_, borders) = manifest(&dir);
    let tables = names(&dir, ".sst").len();
    assert!(tables > 1 && borders.len() > 8, "{tables} tables, {} borders", borders.len());
    let (mut refusals, mut rebuilt) = (0, 0);
    let ends = borders.windows(2).flat_map(|pair| [pair[0], u64::midpoint(pair[0], pair[1])]);
    for (n, cut) in ends.enumerate().skip(1).step_by(5) {
        let dir = copy(&dir, "repair-cut-here");
        let (path, _) = manifest(&dir);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        let len = file.metadata().unwrap().len();
        file.set_len(cut).unwrap();
        if n % 3 == 0 {
            file.set_len(len).unwrap();
        }
        let other = copy(&dir, "repair-cut-opened");
        let report = check(&dir);
        let refused = has_all_or_is_refused(&other, &model);
        assert_eq!(refused.is_some(), !report.damages.is_empty(), "{refused:?} {report:?}");
        refusals += usize::from(refused.is_some());
        let report = repair(&dir);
        rebuilt += usize::from(report.rebuilt.is_some());
        assert!(report.lost.is_empty(), "cut at {cut}: {:?}", report.lost);
        assert_eq!(has_all_or_is_refused(&dir, &model), None, "cut at {cut}");
    }
    assert!(refusals > 5 && rebuilt > 5, "{refusals} and {rebuilt}");
}

/// A database with several blob files, whose values have the same length.
fn with_blobs(name: &str) -> PathBuf {
    let dir = fresh_dir(name);
    for round in 0..4 {
        let path = dir.clone();
        on_one_core(move |core| {
            let path = path.clone();
            async move {
                let write = WriteOptions { blob_min: Some(1000), ..options() };
                let open = Db::open_for_writing(&core, &path, OpenOptions::default(), write);
                let (_db, writer) = open.await.unwrap();
                for n in 0..150 {
                    let key = format!("key{:05}", round * 100 + n);
                    let value = format!("{round:03}{n:07}").repeat(200);
                    writer.put(key.as_bytes(), value.as_bytes()).await.unwrap();
                }
                writer.close().await.unwrap();
            }
        });
    }
    assert!(live_blobs(&dir).len() > 1, "{:?}", names(&dir, ""));
    dir
}

fn live_blobs(dir: &Path) -> Vec<String> {
    let state = crate::blobs::manifest(dir);
    let live = state.column_families[&0].live_blob_files();
    live.map(|blob| FileName::Blob(blob.number).to_string()).collect()
}

/// The blob file with the most values that are not garbage. Of others all may be garbage, and only
/// a link keeps them.
fn most_used_blob(dir: &Path) -> String {
    let state = crate::blobs::manifest(dir);
    let live = state.column_families[&0].live_blob_files();
    let most = live.max_by_key(|blob| blob.total_count - blob.garbage_count).unwrap();
    FileName::Blob(most.number).to_string()
}

fn damaged_files(report: &CheckReport) -> Vec<&str> {
    report.damages.iter().map(|damage| &damage.file[..]).collect()
}

#[test]
fn damaged_blob_files_stay_and_are_listed() {
    let whole = with_blobs("repair-blobs");
    assert!(check(&whole).damages.is_empty());
    let blob = live_blobs(&whole).remove(0);
    let bytes = std::fs::read(whole.join(&blob)).unwrap();
    let mut flipped = bytes.clone();
    flipped[bytes.len() / 2] ^= 1;
    for harm in [flipped, vec![0; bytes.len()], bytes[..bytes.len() / 2].to_vec(), Vec::new()] {
        let dir = copy(&whole, "repair-blobs-harmed");
        std::fs::write(dir.join(&blob), harm).unwrap();
        assert!(damaged_files(&check(&dir)).contains(&&blob[..]));
        let report = repair(&dir);
        assert!(report.damages.iter().any(|damage| damage.file == blob), "{report:?}");
        assert!(!report.needed && report.lost.is_empty(), "{report:?}");
    }
}

#[test]
fn references_to_other_records_are_found() {
    let whole = with_blobs("repair-swapped");
    let used = most_used_blob(&whole);
    let other = live_blobs(&whole).into_iter().find(|blob| *blob != used).unwrap();
    let dir = copy(&whole, "repair-swapped-here");
    std::fs::copy(whole.join(other), dir.join(&used)).unwrap();
    let report = check(&dir);
    assert!(damaged_files(&report).iter().any(|file| file.ends_with(".sst")), "{report:?}");
    assert!(repair(&dir).damages.iter().any(|damage| damage.what.contains(&used)));
}

#[test]
fn a_rebuilt_manifest_lists_missing_blob_files() {
    let dir = with_blobs("repair-rebuilt");
    let blob = most_used_blob(&dir);
    let (manifest, _) = manifest(&dir);
    std::fs::remove_file(manifest).unwrap();
    std::fs::remove_file(dir.join(&blob)).unwrap();
    let report = repair(&dir);
    assert!(report.rebuilt.is_some());
    let lost: Vec<&str> = report.lost.iter().map(|loss| &loss.file[..]).collect();
    assert_eq!(lost, [&blob[..]]);
    // Their keys stay.
    let what = &check(&dir).damages[0].what;
    assert!(what.contains(&blob), "{what}");
}

/// One table refers to all blob files, and is linked to the first. Without that one the others
/// stay.
#[test]
fn a_lost_blob_file_takes_no_others_along() {
    let whole = with_blobs("repair-linked");
    let path = whole.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options()).await;
            let (_db, writer) = open.unwrap();
            writer.compact(0, None, None).await.unwrap();
            writer.close().await.unwrap();
        }
    });
    let lost = live_blobs(&whole).remove(0);
    for is_rebuilt in [false, true] {
        let dir = copy(&whole, "repair-linked-here");
        std::fs::remove_file(dir.join(&lost)).unwrap();
        if is_rebuilt {
            std::fs::remove_file(manifest(&dir).0).unwrap();
        }
        let report = repair(&dir);
        assert_eq!(report.lost.iter().map(|loss| &loss.file[..]).collect::<Vec<_>>(), [&lost[..]]);
        let (path, lost) = (dir.clone(), lost.clone());
        on_one_core(move |core| {
            let (path, lost) = (path.clone(), lost.clone());
            async move {
                let reader = opened(&core, &path).await.unwrap().attach(&core);
                let (mut whole, mut missing) = (0, 0);
                for n in 0..450 {
                    match reader.get(0, format!("key{n:05}").as_bytes(), None).await {
                        Ok(value) => whole += u64::from(value.unwrap().len() == 2000),
                        Err(error) => {
                            assert!(error.to_string().contains(&lost), "{error}");
                            missing += 1;
                        }
                    }
                }
                assert!(whole > 100 && missing > 0 && whole + missing == 450, "{whole} {missing}");
            }
        });
    }
}

/// A blob file to which only a log refers is kept by a table's link.
#[test]
fn a_lost_table_takes_no_value_of_a_log_along() {
    let crashed = crashed_with_a_value_in_a_log("repair-unkept");
    for name in names(&crashed, ".sst") {
        std::fs::remove_file(crashed.join(name)).unwrap();
    }
    let report = repair(&crashed);
    assert!(report.lost.iter().all(|loss| loss.file.ends_with(".sst")), "{report:?}");
    has_last_key(&crashed);
}

/// A crash leaves a blob file with room after its values.
#[test]
fn a_blob_file_left_open_is_whole_after_a_rebuild() {
    let dir = fresh_dir("repair-open");
    let path = dir.clone();
    let crashed = on_one_core(move |core| {
        let path = path.clone();
        async move {
            let write = WriteOptions { blob_min: Some(1000), ..options() };
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), write);
            let (_db, writer) = open.await.unwrap();
            // Without garbage: a copy may have half a file of its collection.
            for n in 0..300 {
                let value = format!("{n:010}").repeat(200);
                writer.put(format!("key{n:05}").as_bytes(), value.as_bytes()).await.unwrap();
            }
            while !writer.is_quiesced() {
                core.sleep_ns(1_000_000).await;
            }
            writer.put(b"last", &[b'x'; 3000]).await.unwrap();
            let crashed = copy(&path, "repair-open-crashed");
            assert!(writer.stats().blob_values > 100, "{:?}", writer.stats());
            writer.close().await.unwrap();
            crashed
        }
    });
    let (manifest, _) = manifest(&crashed);
    std::fs::remove_file(manifest).unwrap();
    let report = repair(&crashed);
    assert!(report.rebuilt.is_some() && report.lost.is_empty(), "{report:?}");
    assert!(report.damages.is_empty(), "{report:?}");
    for again in 0..2 {
        let report = check(&crashed);
        assert!(report.damages.is_empty(), "{again}: {report:?}");
        has_last_key(&crashed);
    }
}

/// A directory that a crash leaves: the log refers to a value in an open blob file, which the last
/// change of the MANIFEST has registered.
fn crashed_with_a_value_in_a_log(name: &str) -> PathBuf {
    let dir = fresh_dir(name);
    let copied = format!("{name}-crashed");
    on_one_core(move |core| {
        let (path, copied) = (dir.clone(), copied.clone());
        async move {
            let write = WriteOptions { blob_min: Some(1000), ..options() };
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), write);
            let (_db, writer) = open.await.unwrap();
            writer.put(b"first", b"1").await.unwrap();
            writer.flush().await.unwrap();
            writer.put(b"last", &[b'x'; 3000]).await.unwrap();
            assert_eq!(writer.stats().blob_values, 1);
            copy(&path, &copied)
        }
    })
}

/// The value of a key in this directory.
fn value_of(dir: &Path, key: &'static [u8]) -> Option<Vec<u8>> {
    let path = dir.to_owned();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let reader = opened(&core, &path).await.unwrap().attach(&core);
            reader.get(0, key, None).await.unwrap().map(|value| value.to_vec())
        }
    })
}

fn has_last_key(dir: &Path) {
    assert_eq!(value_of(dir, b"last").as_deref(), Some(&[b'x'; 3000][..]));
}

/// Both keys of this directory are there.
fn has_both_keys(dir: &Path) {
    has_last_key(dir);
    assert!(value_of(dir, b"first").is_some());
}

/// A blob file is registered before a log refers to it: a MANIFEST that does not name it lost its
/// end, and an opening for writing would remove the only copy of the values.
#[test]
fn a_manifest_that_lost_a_blob_file_of_the_logs_is_rebuilt() {
    let crashed = crashed_with_a_value_in_a_log("repair-unnamed-blob");
    let (manifest, _) = manifest(&crashed);
    let bytes = std::fs::read(&manifest).unwrap();
    std::fs::write(&manifest, &bytes[..bytes.len() - 1]).unwrap();
    let what = check(&crashed).damages.remove(0).what;
    assert!(
        what.contains("has lost its end: it does not name") && what.contains(".blob"),
        "{what}"
    );
    let path = crashed.clone();
    on_one_core(move |core| {
        let path = path.clone();
        async move {
            let open = Db::open_for_writing(&core, &path, OpenOptions::default(), options()).await;
            let refused = open.err().unwrap();
            assert!(refused.to_string().contains("check --repair"), "{refused}");
        }
    });
    let report = repair(&crashed);
    assert!(report.rebuilt.is_some() && report.lost.is_empty(), "{report:?}");
    assert!(check(&crashed).damages.is_empty());
    has_both_keys(&crashed);
}

/// The footer of an open blob file was written in advance, after zeros: without it RocksDB reads
/// nothing of the file.
#[test]
fn an_open_blob_file_without_its_end_gets_one() {
    let whole = crashed_with_a_value_in_a_log("repair-open-end");
    let blob = live_blobs(&whole).remove(0);
    let bytes = std::fs::read(whole.join(&blob)).unwrap();
    let mut flipped = bytes.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for harm in [bytes[..bytes.len() - 1].to_vec(), bytes[..bytes.len() / 2].to_vec(), flipped] {
        let dir = copy(&whole, "repair-open-end-harmed");
        std::fs::write(dir.join(&blob), harm).unwrap();
        assert!(damaged_files(&check(&dir)).contains(&&blob[..]));
        let report = repair(&dir);
        assert!(report.needed && report.lost.is_empty(), "{report:?}");
        assert!(report.damages.is_empty(), "{report:?}");
        assert!(check(&dir).damages.is_empty());
        has_both_keys(&dir);
        ldb(&dir, &["put", "other", "o"]);
        assert_eq!(ldb(&dir, &["get", "last"]).trim().len(), 3000);
    }
}

#[test]
fn an_intact_manifest_is_used_although_current_and_a_table_are_lost() {
    let (dir, _) = written("repair-current", &options());
    // The newest one: older ones may be obsolete.
    let table = names(&dir, ".sst").pop().unwrap();
    std::fs::remove_file(dir.join(&table)).unwrap();
    std::fs::write(dir.join("CURRENT"), "x\n").unwrap();
    let report = repair(&dir);
    assert_eq!(report.rebuilt, None);
    assert_eq!(report.lost.len(), 1, "{report:?}");
    assert!(report.lost[0].file == table && report.lost[0].keys.is_some(), "{report:?}");
    assert!(check(&dir).damages.is_empty());
}

#[test]
fn current_may_be_anything() {
    use std::os::unix::fs::symlink;
    let (whole, model) = written("repair-anything", &options());
    for kind in ["directory", "loop", "socket"] {
        let dir = copy(&whole, "repair-anything-here");
        let current = dir.join("CURRENT");
        std::fs::remove_file(&current).unwrap();
        match kind {
            "directory" => std::fs::create_dir(&current).unwrap(),
            "loop" => symlink("CURRENT", &current).unwrap(),
            _ => drop(std::os::unix::net::UnixListener::bind(&current).unwrap()),
        }
        assert!(!check(&dir).damages.is_empty(), "{kind}");
        let report = repair(&dir);
        assert!(report.needed && report.lost.is_empty() && report.rebuilt.is_none(), "{report:?}");
        assert_eq!(has_all_or_is_refused(&dir, &model), None, "{kind}");
    }
}

#[test]
fn a_damaged_options_file_is_replaced() {
    let write = WriteOptions {
        column_family_options: [("write_buffer_size".into(), "300000".into())].into(),
        ..options()
    };
    let (whole, model) = written("repair-options", &write);
    let name = names(&whole, "").into_iter().find(|name| name.starts_with("OPTIONS")).unwrap();
    let text = std::fs::read_to_string(whole.join(&name)).unwrap();
    for older in [false, true] {
        let dir = copy(&whole, "repair-options-here");
        let damaged = if older { "OPTIONS-000900" } else { &name };
        std::fs::write(dir.join(damaged), &text[..text.len() / 3]).unwrap();
        assert_eq!(damaged_files(&check(&dir)), [damaged]);
        assert!(has_all_or_is_refused(&copy(&dir, "repair-options-opened"), &model).is_some());
        let report = repair(&dir);
        let lost: Vec<&str> = report.lost.iter().map(|loss| &loss.file[..]).collect();
        assert_eq!(lost, [damaged]);
        assert!(dir.join("lost").join(damaged).exists());
        assert_eq!(dir.join(&name).exists(), older);
        assert!(check(&dir).damages.is_empty());
        assert_eq!(has_all_or_is_refused(&dir, &model), None);
    }
}

#[test]
fn a_missing_log_is_a_warning() {
    let (dir, _) = written("repair-no-log", &options());
    assert!(check(&dir).warnings.is_empty());
    for log in names(&dir, ".log") {
        std::fs::remove_file(dir.join(log)).unwrap();
    }
    let report = check(&dir);
    assert!(report.warnings[0].contains("no write-ahead log"), "{report:?}");
}
