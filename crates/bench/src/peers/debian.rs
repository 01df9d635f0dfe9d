//! Debian's db_bench: it makes the database. It is built with assertions on, so it is no fair peer.

use std::path::Path;

use super::tool::Tool;

/// Makes the database of the table.
pub fn make_database(dir: &Path, keys: u64) -> Result<(), String> {
    database_tool(dir, keys).output().map(|_| ())
}

fn database_tool(dir: &Path, keys: u64) -> Tool {
    Tool::new("db_bench").arg(format!("--db={}", dir.display())).arg(format!("--num={keys}")).args(
        [
            "--benchmarks=fillseq,compact",
            "--key_size=16",
            "--value_size=1000",
            "--block_size=4096",
            "--bloom_bits=10",
            "--compression_type=none",
        ],
    )
}

/// How the database of the table is made.
pub fn recipe() -> String {
    database_tool(Path::new("DIR"), super::KEYS).line()
}
