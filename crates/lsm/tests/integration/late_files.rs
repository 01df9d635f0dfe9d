//! Writes while the names of new files take long to become durable, on the clock of a simulated
//! world.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use lsm::{Db, Durability, OpenOptions, WriteOptions};
use reactor::Class;
use reactor::sim::{Latency, SimConfig, World};

use crate::common::{key, on_first_core};

/// Sets values from 16 tasks while each change of a name takes `names_ms`. Returns the longest time
/// without an acknowledgement, in milliseconds, and the number of logs.
fn longest_pause_ms(names_ms: u64) -> (u64, u64) {
    let names = Latency { base_ns: names_ms * 1_000_000, spread_ns: 0, per_kib_ns: 0 };
    let world = World::new(1, 2, SimConfig { names, ..SimConfig::default() });
    world.add_dir("/db");
    let (sender, result) = std::sync::mpsc::channel();
    on_first_core(&world, move |core, _| {
        let sender = sender.clone();
        async move {
            let options = WriteOptions {
                durability: Durability::Process,
                memtable_bytes: 1 << 20,
                ..WriteOptions::default()
            };
            let open =
                Db::open_for_writing(&core, Path::new("/db"), OpenOptions::default(), options);
            let (db, writer) = open.await.unwrap();
            let last_ns = Rc::new(Cell::new(core.now_ns()));
            let longest_ns = Rc::new(Cell::new(0));
            let tasks: Vec<_> = (0..16)
                .map(|task| {
                    let (core, writer) = (core.clone(), writer.clone());
                    let (last_ns, longest_ns) = (last_ns.clone(), longest_ns.clone());
                    core.clone().spawn(Class::Foreground, async move {
                        for n in 0..2000 {
                            writer.put(&key(16 * n + task), &[n as u8; 1000]).await.unwrap();
                            let now_ns = core.now_ns();
                            let waited_ns = now_ns - last_ns.replace(now_ns);
                            longest_ns.set(waited_ns.max(longest_ns.get()));
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
            sender.send((longest_ns.get() / 1_000_000, writer.stats().logs)).unwrap();
            writer.close().await.unwrap();
            drop(db);
        }
    });
    result.recv().unwrap()
}

/// Groups once waited for all that was left to do for the next log: 40 ms in the second case.
#[test]
fn late_names_of_logs_and_tables_slow_writes_before_they_stop_them() {
    for (names_ms, most_ms) in [(0, 10), (10, 30)] {
        let (longest_ms, logs) = longest_pause_ms(names_ms);
        assert!(logs > 100, "{logs} logs");
        assert!(
            longest_ms <= most_ms,
            "{longest_ms} ms without an acknowledgement, {names_ms} for a name"
        );
    }
}
