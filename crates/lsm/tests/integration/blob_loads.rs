//! A load of large values, on the clock of a simulated world.

use std::path::Path;

use lsm::{Db, Durability, OpenOptions, WriteOptions};
use reactor::Class;
use reactor::sim::{SimConfig, World};

use crate::common::{key, on_first_core};

/// Merges lag after few files.
const LEVEL0: [(&str, &str); 3] = [
    ("level0_file_num_compaction_trigger", "2"),
    ("level0_slowdown_writes_trigger", "6"),
    ("level0_stop_writes_trigger", "12"),
];

/// Sets large values until the memtables have been flushed many times. Returns the time that this
/// took and the part of it that writes were slowed down, in nanoseconds.
fn load(seed: u64, blob_min: Option<usize>) -> (u64, u64) {
    let world = World::new(seed, 2, SimConfig::default());
    world.add_dir("/db");
    let (sender, result) = std::sync::mpsc::channel();
    on_first_core(&world, move |core, _| {
        let sender = sender.clone();
        async move {
            let options = WriteOptions {
                durability: Durability::Process,
                memtable_bytes: 100_000,
                blob_min,
                column_family_options: LEVEL0.map(|(a, b)| (a.to_owned(), b.to_owned())).into(),
                ..WriteOptions::default()
            };
            let open =
                Db::open_for_writing(&core, Path::new("/db"), OpenOptions::default(), options);
            let (db, writer) = open.await.unwrap();
            let from_ns = core.now_ns();
            let tasks: Vec<_> = (0..16)
                .map(|task| {
                    let writer = writer.clone();
                    core.spawn(Class::Foreground, async move {
                        for n in 0..1000 {
                            let n = 16 * n + task;
                            writer.put(&key(n % 500), &[n as u8; 4000]).await.unwrap();
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
            let stats = writer.stats();
            assert!(stats.logs > 20, "{stats:?}");
            sender.send((core.now_ns() - from_ns, stats.slowed_ns)).unwrap();
            writer.close().await.unwrap();
            drop(db);
        }
    });
    result.recv().unwrap()
}

/// Flushes and merges drain references. Writes were once admitted as if they drained values.
#[test]
fn large_values_in_blob_files_do_not_wait_for_merges_of_references() {
    let (inline_ns, _) = load(1, None);
    let (ns, slowed_ns) = load(1, Some(1000));
    assert!(slowed_ns < ns / 2, "slowed for {slowed_ns} of {ns} ns");
    assert!(ns < inline_ns, "{ns} ns, and {inline_ns} ns with values in tables");
}
