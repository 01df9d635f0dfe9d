//! RocksDB's own tools judge the databases that the simulations read: a generator that only our
//! reader understands would prove nothing.
#![expect(clippy::disallowed_methods, reason = "files of the host, for RocksDB's tools")]

use std::path::Path;
use std::process::Command;

use sim::database::{Model, database};

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

#[test]
fn rocksdb_reads_the_generated_databases_and_finds_what_the_model_says() {
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
        let scan = run("ldb", &[&format!("--db={}", dir.display()), "scan", "--hex"]);
        let found: Model = scan
            .lines()
            .filter_map(|line| line.split_once(" ==> ").or_else(|| line.split_once(" : ")))
            .map(|(key, value)| (unhex(key.trim()), unhex(value.trim())))
            .collect();
        assert_eq!(found.len(), made.model.len(), "seed {seed}");
        assert!(found == made.model, "seed {seed}: RocksDB finds other values than the model");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
