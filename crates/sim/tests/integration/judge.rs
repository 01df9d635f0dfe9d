//! RocksDB's own tools read the databases of the simulations: a generator that only our reader
//! understands would prove nothing.
#![expect(clippy::disallowed_methods, reason = "files of the host, for RocksDB's tools")]

use std::path::Path;
use std::process::Command;

use reactor::sim::World;
use sim::database::{Model, database};
use sim::engine::{DIR, Flaw, Pairs, engine_judged};

fn run(tool: &str, args: &[&str]) -> String {
    let out = match Command::new(tool).args(args).output() {
        Ok(out) => out,
        Err(e) => panic!("this test needs `{tool}` of Debian's rocksdb-tools on the PATH: {e}"),
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{tool} {args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect()
}

/// The contents of all column families, sorted.
fn scan(dir: &Path) -> Pairs {
    let db = format!("--db={}", dir.display());
    let listed = run("ldb", &[&db, "list_column_families"]);
    let names = listed.split_once('{').and_then(|(_, names)| names.split_once('}'));
    let (names, _) = names.unwrap_or_else(|| panic!("no families in {listed}"));
    let mut found = Pairs::new();
    for name in names.split(", ") {
        let family = format!("--column_family={name}");
        let scanned = run("ldb", &[&db, "--try_load_options", &family, "scan", "--hex"]);
        let pairs = scanned
            .lines()
            .filter_map(|line| line.split_once(" ==> ").or_else(|| line.split_once(" : ")))
            .map(|(key, value)| (unhex(key.trim()), unhex(value.trim())));
        found.extend(pairs);
    }
    found.sort();
    found
}

#[test]
fn rocksdb_reads_the_generated_databases_and_agrees_with_the_model() {
    for seed in 0..12 {
        let made = database(seed);
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("judge-{seed}"));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        for (name, bytes) in &made.files {
            std::fs::write(dir.join(name), bytes).unwrap();
        }
        for name in made.data_bytes.keys() {
            let file = dir.join(name);
            let file = file.to_str().unwrap();
            run("sst_dump", &[&format!("--file={file}"), "--command=verify"]);
        }
        let found: Model = scan(&dir).into_iter().collect();
        assert_eq!(found.len(), made.model.len(), "seed {seed}");
        assert!(found == made.model, "seed {seed}: RocksDB finds other values than the model");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

/// Opens a copy for writing, which replays and removes the logs, and returns the contents.
fn opened_by_rocksdb(world: &World, dir: &Path) -> Pairs {
    let _ = std::fs::remove_dir_all(dir);
    std::fs::create_dir_all(dir).unwrap();
    for path in world.paths() {
        let name = path.strip_prefix(DIR).unwrap();
        std::fs::write(dir.join(name), world.bytes(&path).unwrap()).unwrap();
    }
    let db = format!("--db={}", dir.display());
    // Without the options, ldb would merge with an operator of its own.
    run("ldb", &[&db, "--try_load_options", "put", "a key of", "the judge's"]);
    run("ldb", &[&db, "--try_load_options", "checkconsistency"]);
    let mut found = scan(dir);
    let before = found.len();
    found.retain(|(key, _)| key != b"a key of");
    assert_eq!(found.len() + 1, before);
    std::fs::remove_dir_all(dir).unwrap();
    found
}

/// RocksDB opens every directory that a kill or a power cut leaves.
#[test]
fn rocksdb_loses_nothing_by_our_crashes() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("judge-crashed");
    let mut judged = 0;
    for seed in 0..if std::env::var_os("MILLRACE_LONG").is_some() { 400 } else { 16 } {
        println!("seed {seed}");
        engine_judged(seed, Flaw::None, |world| {
            judged += 1;
            Some(opened_by_rocksdb(world, &dir))
        });
    }
    println!("{judged} directories");
    assert!(judged >= 40, "{judged}");
}
