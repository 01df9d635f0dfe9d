//! Writes the seeds of every target to `corpus/<target>/`, so that the repository needs no binary
//! files.
//!
//! Run `cargo run --bin corpus`, then `cargo +nightly fuzz run <target>`.

use std::{fs, io, path::Path};

fn main() -> io::Result<()> {
    let of_files = rocksfmt::fuzz::TARGETS.iter().chain(rocksfmt::fuzz::LOG_TARGETS);
    let of_disks = vhost::fuzz_message::TARGETS.iter().chain(nbdproto::fuzz::TARGETS);
    for (name, _, seeds) in of_files.chain(of_disks).chain(node::fuzz::TARGETS) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
        fs::create_dir_all(&dir)?;
        for (i, seed) in seeds().iter().enumerate() {
            fs::write(dir.join(format!("seed{i}")), seed)?;
        }
    }
    Ok(())
}
