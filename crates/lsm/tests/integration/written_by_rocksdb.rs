//! RocksDB writes (with its own tool `ldb`) and Millrace reads: every key by get and multi-get, and
//! iterators that seek, change direction and respect bounds, compared with a sorted map.

#![expect(clippy::disallowed_methods, reason = "a test makes, damages and deletes directories")]

use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Model, scan_both_ways};
use lsm::{Db, Iter, IterOptions, Kind, OpenOptions, Reader};
use reactor::{Core, RuntimeConfig};

/// splitmix64: the same directory every time.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("millrace-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn ldb(db: &Path, args: &[String]) {
    let output = Command::new("ldb")
        .arg(format!("--db={}", db.display()))
        .args(["--block_size=512", "--bloom_bits=10", "--compression_type=no"])
        .args((args[0] == "batchput").then_some("--create_if_missing"))
        .args((args[0] != "compact").then_some("--key_hex"))
        .args((args[0] == "batchput").then_some("--value_hex"))
        .args(args)
        .output()
        .expect("ldb runs: install Debian's rocksdb-tools (./test does)");
    assert!(output.status.success(), "ldb {args:?}: {output:?}");
}

fn hex(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|b| format!("{b:02X}")).collect();
    format!("0x{digits}")
}

/// A directory with overlapping level-0 files, a deeper level, point and range deletions, and
/// writes that are only in the log; and what a reader must find in it.
fn messy(db: &Path, seed: u64) -> Model {
    let mut random = Random(seed);
    let mut model = Model::new();
    let key = |n: u64| format!("key{n:05}").into_bytes();
    for round in 0..6 {
        let mut args = vec!["batchput".to_owned()];
        for n in 0..400 {
            let k = key(random.below(1500));
            let v = format!("value {round} {n} {}", "x".repeat(random.below(60) as usize));
            args.extend([hex(&k), hex(v.as_bytes())]);
            model.insert(k, v.into_bytes());
        }
        ldb(db, &args);
        for _ in 0..6 {
            let k = key(random.below(1500));
            ldb(db, &["delete".into(), hex(&k)]);
            model.remove(&k);
        }
        let from = random.below(1400);
        let (from, to) = (key(from), key(from + 1 + random.below(60)));
        ldb(db, &["deleterange".into(), hex(&from), hex(&to)]);
        let dead: Vec<_> = model.range(from..to).map(|(k, _)| k.clone()).collect();
        for k in dead {
            model.remove(&k);
        }
        if round == 2 {
            ldb(db, &["compact".into()]);
        }
    }
    model
}

fn with_reader<F, Fut>(db: &Path, options: OpenOptions, test: F)
where
    F: Fn(Core, Reader) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let db = db.to_owned();
    let config = RuntimeConfig {
        processors: reactor::processors()[..1].to_vec(),
        memory: 64 << 20,
        ..RuntimeConfig::default()
    };
    reactor::run(&config, move |core| {
        let (db, options, test) = (db.clone(), options.clone(), test.clone());
        async move {
            let db = Db::open(&core, &db, options).await.expect("the database opens");
            assert!(db.warnings().is_empty(), "{:?}", db.warnings());
            let reader = db.attach(&core);
            test(core, reader).await;
        }
    })
    .expect("the runtime starts");
}

fn caches() -> [OpenOptions; 2] {
    [OpenOptions::default(), OpenOptions { cache_bytes: 1 << 20, ..OpenOptions::default() }]
}

#[test]
fn every_key_is_found_by_get_and_multi_get_and_others_are_not() {
    let dir = Scratch::new("get");
    let model = messy(&dir.0, 1);
    for options in caches() {
        let model = model.clone();
        with_reader(&dir.0, options, move |_, reader| {
            let model = model.clone();
            async move {
                let keys: Vec<Vec<u8>> =
                    (0..1600).map(|n| format!("key{n:05}").into_bytes()).collect();
                for key in &keys {
                    let found = reader.get(0, key, None).await.unwrap();
                    assert_eq!(found.as_deref(), model.get(key).map(|v| &v[..]), "{key:?}");
                    if let Some(cached) = reader.get_cached(0, key) {
                        let cached = cached.unwrap();
                        assert_eq!(cached.as_deref(), model.get(key).map(|v| &v[..]));
                    }
                }
                for chunk in keys.chunks(64) {
                    let refs: Vec<&[u8]> = chunk.iter().map(|k| &k[..]).collect();
                    let found = reader.multi_get(0, &refs, None).await;
                    for (key, value) in chunk.iter().zip(found) {
                        let value = value.unwrap();
                        assert_eq!(value.as_deref(), model.get(key).map(|v| &v[..]));
                    }
                }
                assert!(reader.get(0, b"", None).await.unwrap().is_none());
                assert_eq!(
                    reader.get(7, b"k", None).await.unwrap_err().kind(),
                    Kind::UnknownColumnFamily
                );
                assert!(reader.stats().found >= 2 * model.len() as u64);
            }
        });
    }
}

#[test]
fn scans_of_both_directions_give_every_key_in_order() {
    let dir = Scratch::new("scan");
    let model = messy(&dir.0, 2);
    for options in caches() {
        let model = model.clone();
        with_reader(&dir.0, options, move |_, reader| {
            let model = model.clone();
            async move {
                let mut iter = reader.iter(0, IterOptions::default()).unwrap();
                scan_both_ways(&mut iter, &model).await;
            }
        });
    }
}

/// Checks the position of an iterator. `history` is how it got there.
fn check(iter: &Iter, expected: Option<(&Vec<u8>, &Vec<u8>)>, history: &[String]) {
    let found = iter.valid().then(|| (iter.key(), iter.value()));
    let expected = expected.map(|(k, v)| (&k[..], &v[..]));
    assert_eq!(found, expected, "after {history:?}");
}

#[test]
fn iterators_seek_turn_and_stop_at_bounds_like_a_sorted_map() {
    for seed in 3..6 {
        let dir = Scratch::new(&format!("turn{seed}"));
        let model = messy(&dir.0, seed);
        for options in caches() {
            let model = model.clone();
            with_reader(&dir.0, options, move |_, reader| {
                let model = model.clone();
                async move { walk_at_random(&reader, &model, seed).await }
            });
        }
    }
}

async fn walk_at_random(reader: &Reader, model: &Model, seed: u64) {
    let mut random = Random(seed * 1000);
    let key = |n: u64| format!("key{n:05}").into_bytes();
    for walk in 0..60u64 {
        let (mut lower, mut upper, mut prefix) = (None, None, None);
        match walk % 4 {
            1 => {
                let from = random.below(1500);
                lower = Some(key(from));
                upper = Some(key(from + random.below(300)));
            }
            2 => prefix = Some(format!("key0{}", random.below(12)).into_bytes()),
            3 => upper = Some(key(random.below(1500))),
            _ => {}
        }
        let visible: Model = model
            .iter()
            .filter(|(k, _)| {
                lower.as_ref().is_none_or(|l| *k >= l)
                    && upper.as_ref().is_none_or(|u| *k < u)
                    && prefix.as_ref().is_none_or(|p| k.starts_with(p))
            })
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        let options = IterOptions {
            lower,
            upper,
            prefix,
            fill_cache: walk % 2 == 0,
            expected: (walk % 3 == 0).then_some(40),
            expected_backward: walk % 5 == 0,
            ..IterOptions::default()
        };
        let mut iter = reader.iter(0, options).unwrap();
        let mut at: Option<Vec<u8>> = None;
        let mut history = Vec::new();
        for _ in 0..120 {
            let target = key(random.below(1600));
            let action = random.below(12);
            let expected = match (action, &at) {
                (0, _) => {
                    iter.seek_to_first().await.unwrap();
                    visible.iter().next()
                }
                (1, _) => {
                    iter.seek_to_last().await.unwrap();
                    visible.iter().next_back()
                }
                (2, _) => {
                    iter.seek(&target).await.unwrap();
                    visible.range(target.clone()..).next()
                }
                (3, _) => {
                    iter.seek_for_prev(&target).await.unwrap();
                    visible.range(..=target.clone()).next_back()
                }
                (4..8, Some(k)) => {
                    iter.next().await.unwrap();
                    visible.range::<Vec<u8>, _>((Bound::Excluded(k), Bound::Unbounded)).next()
                }
                (_, Some(k)) => {
                    iter.prev().await.unwrap();
                    visible.range::<Vec<u8>, _>((Bound::Unbounded, Bound::Excluded(k))).next_back()
                }
                (_, None) => {
                    iter.next().await.unwrap();
                    None
                }
            };
            history.push(format!("{action} {}", String::from_utf8_lossy(&target)));
            check(&iter, expected, &history);
            at = expected.map(|(k, _)| k.clone());
        }
    }
}

fn checked(db: &Path) -> lsm::CheckReport {
    let db = db.to_owned();
    let config = RuntimeConfig {
        processors: reactor::processors()[..1].to_vec(),
        memory: 64 << 20,
        ..RuntimeConfig::default()
    };
    let mut reports = reactor::run(&config, move |core| {
        let db = db.clone();
        async move {
            let (mut last, mut total) = (0, 0);
            let report = lsm::check(&core, &db, &OpenOptions::default(), |done, of| {
                assert!(done <= of, "{done} of {of}");
                assert!(done >= last, "progress never goes back");
                (last, total) = (done, of);
            })
            .await
            .expect("the directory can be looked at");
            assert_eq!(last, total);
            report
        }
    })
    .expect("the runtime starts");
    reports.remove(0)
}

#[test]
fn a_check_of_an_undamaged_database_finds_nothing() {
    let dir = Scratch::new("check");
    messy(&dir.0, 11);
    let report = checked(&dir.0);
    assert_eq!(report.damages, [], "{report:?}");
    assert!(report.entries > 500 && report.files > 3, "{report:?}");
}

#[test]
fn a_missing_database_and_a_damaged_table_are_reported() {
    let dir = Scratch::new("damage");
    std::fs::create_dir_all(&dir.0).unwrap();
    let path = dir.0.clone();
    let config = RuntimeConfig {
        processors: reactor::processors()[..1].to_vec(),
        memory: 16 << 20,
        ..RuntimeConfig::default()
    };
    let errors = reactor::run(&config, move |core| {
        let path = path.clone();
        async move { Db::open(&core, &path, OpenOptions::default()).await.err() }
    })
    .unwrap();
    assert_eq!(errors[0].as_ref().unwrap().kind(), Kind::NoDatabase);

    let model = messy(&dir.0, 9);
    let mut tables: Vec<_> = std::fs::read_dir(&dir.0)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "sst"))
        .collect();
    tables.sort_by_key(|p| std::fs::metadata(p).unwrap().len());
    let victim = tables.pop().unwrap();
    let mut bytes = std::fs::read(&victim).unwrap();
    bytes[100] ^= 4;
    std::fs::write(&victim, bytes).unwrap();
    let name = victim.file_name().unwrap().to_string_lossy().into_owned();
    let report = checked(&dir.0);
    assert!(report.entries > 500 && report.blocks > 10, "{report:?}");
    assert_eq!(report.damages.len(), 1, "{report:?}");
    assert_eq!((&report.damages[0].file, report.damages[0].offset), (&name, Some(0)));
    with_reader(&dir.0, OpenOptions::default(), move |_, reader| {
        let (model, name) = (model.clone(), name.clone());
        async move {
            let (mut right, mut refused) = (0, 0);
            for (key, value) in &model {
                match reader.get(0, key, None).await {
                    Ok(found) => {
                        assert_eq!(found.as_deref(), Some(&value[..]));
                        right += 1;
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), Kind::Corruption);
                        assert!(error.to_string().contains(&name), "{error}");
                        assert!(error.to_string().contains("offset"), "{error}");
                        refused += 1;
                    }
                }
            }
            assert!(refused > 0 && right > 10 * refused, "{right} right, {refused} refused");
        }
    });
}
