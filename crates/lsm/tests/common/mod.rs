//! What the engine's tests share: a directory, a core to run on, and RocksDB's own tool.
#![allow(dead_code, reason = "each suite uses its part")]
#![allow(clippy::disallowed_methods, reason = "tests are no part of a node")]

use std::path::{Path, PathBuf};
use std::process::Command;

use reactor::{Core, RuntimeConfig};

/// Chooses the reactor's driver.
pub const DRIVER: &str = "MILLRACE_DRIVER";

/// An empty directory of this name.
pub fn fresh_dir(name: &str) -> PathBuf {
    // The same test may run on another driver at the same time.
    let driver = std::env::var(DRIVER).unwrap_or_default();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}{driver}"));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Runs `main` on one core that has 64 MiB for its buffers.
pub fn on_one_core<T: Send + 'static, F>(main: impl Fn(Core) -> F + Clone + Send + 'static) -> T
where
    F: Future<Output = T> + 'static,
{
    on_one_core_with(64 << 20, main)
}

/// The same with as many bytes as the test says.
pub fn on_one_core_with<T: Send + 'static, F>(
    memory: usize,
    main: impl Fn(Core) -> F + Clone + Send + 'static,
) -> T
where
    F: Future<Output = T> + 'static,
{
    let config = RuntimeConfig {
        processors: reactor::processors()[..1].to_vec(),
        memory,
        ..RuntimeConfig::default()
    };
    reactor::run(&config, main).expect("the runtime starts").remove(0)
}

/// What RocksDB's `ldb` prints about the database in `dir`; it must succeed.
pub fn ldb(dir: &Path, args: &[&str]) -> String {
    let out = Command::new("ldb")
        .arg(format!("--db={}", dir.display()))
        .args(args)
        .output()
        .expect("ldb runs: install Debian's rocksdb-tools (./test does)");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "ldb {args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout)
}
