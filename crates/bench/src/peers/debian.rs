//! Debian's db_bench, which makes the databases. It is built with assertions on, so it is not a
//! fair peer.

use std::path::Path;

use super::tool::Tool;

/// Makes a database with the keys `0..keys`.
pub fn make_database(dir: &Path, keys: u64, value_size: usize, codec: &str) -> Result<(), String> {
    tool(dir, keys, value_size, codec).output().map(|_| ())
}

fn tool(dir: &Path, keys: u64, value_size: usize, codec: &str) -> Tool {
    Tool::new("db_bench")
        .arg(format!("--db={}", dir.display()))
        .arg(format!("--num={keys}"))
        .args(["--benchmarks=fillseq,compact", "--key_size=16"])
        .arg(format!("--value_size={value_size}"))
        .args(["--block_size=4096", "--bloom_bits=10"])
        .arg(format!("--compression_type={codec}"))
}

/// The command that makes such a database.
pub fn recipe(keys: u64, value_size: usize, codec: &str) -> String {
    tool(Path::new("DIR"), keys, value_size, codec).line()
}
