//! The engine on the program's own cores, for thread-per-core programs: no hand-over at all. Each
//! core reads through its own ring and cache, and core 0 writes.
//!
//! This uses the crates below this one, `reactor` and `lsm`, whose interfaces change more often.
//!
//! ```text
//! cargo run -p millrace --example thread_per_core -- /tmp/cores
//! ```

use std::error::Error;
use std::path::{Path, PathBuf};

use lsm::{BatchWriter, Db, OpenOptions, Reader, WriteOptions};
use reactor::{Class, Core, RuntimeConfig};

const KEYS: u32 = 10_000;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: thread_per_core DIRECTORY")?;
    // A thread on each processor, pinned to it. Each runs this function's future as its main task.
    let config = RuntimeConfig { memory: 64 << 20, ..RuntimeConfig::default() };
    let found = reactor::run(&config, move |core| {
        let path = PathBuf::from(&path);
        async move {
            match core.id() {
                0 => lead(&core, &path).await,
                _ => Ok(0), // It serves what core 0 asks of it until that has ended.
            }
        }
    })?;
    println!("found {} of {KEYS} keys", found.into_iter().sum::<lsm::Result<u32>>()?);
    Ok(())
}

/// Core 0: opens the database, fills it, and lets all cores read.
async fn lead(core: &Core, path: &Path) -> lsm::Result<u32> {
    match core.create_dir(path).await {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(lsm::Error::io(path.display(), &error));
        }
        _ => {}
    }
    let options = OpenOptions { cache_bytes: 32 << 20, ..OpenOptions::default() };
    let (db, writer) = Db::open_for_writing(core, path, options, WriteOptions::default()).await?;
    let mut batch = BatchWriter::new();
    for n in 0..KEYS {
        batch.put(0, &n.to_be_bytes(), b"value");
    }
    writer.write(batch).await?;
    let mut found = 0;
    for id in 0..core.cores() {
        let db = db.clone();
        let read = move |there: &Core| read_part(there.clone(), db.attach(there));
        found += core.spawn_on(id, Class::Foreground, read).await?;
    }
    writer.close().await?;
    Ok(found)
}

/// A core's part of the keys, on that core: tasks there are `!Send` and share its reader.
async fn read_part(core: Core, reader: Reader) -> lsm::Result<u32> {
    let mut found = 0;
    for n in (core.id() as u32..KEYS).step_by(core.cores()) {
        found += u32::from(reader.get(0, &n.to_be_bytes(), None).await?.is_some());
    }
    Ok(found)
}
