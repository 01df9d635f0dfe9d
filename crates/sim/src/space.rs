//! The space of blob files while values are written over and over: it stays below the limit of
//! `blob_space_max_ratio`, however little is alive and however large memtables are.
//!
//! All keys are written once, in some worlds to tables, before blob files are turned on. Then they
//! are written again and again, in the order of the keys or at random, in some worlds while
//! compaction is paused for a time. After every few writes the lengths of all blob
//! files on the disk are compared with the bytes of the values that are really alive.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use lsm::{Db, Durability, OpenOptions, WriteOptions, Writer};
use reactor::sim::{Rng, SimConfig, World};
use reactor::{Class, Core, JoinHandle};

use crate::engine::{DIR, Flaw};

/// Garbage may have so many bytes in any case.
const GARBAGE_MAX_MIN: u64 = 32 << 20;

/// A key and the header of its value.
const RECORD_BYTES: u64 = 11 + 32;

/// What a world has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Bytes of the values that are alive, with their keys and headers.
    pub live: u64,
    /// The limit, as a multiple of them.
    pub ratio: f64,
    /// The most that blob files had, in bytes.
    pub most: u64,
    /// Values that were written to blob files.
    pub values: u64,
    /// Collections of garbage.
    pub collections: u64,
    /// Hash and number of the trace's events.
    pub trace: (u64, u64),
}

impl Report {
    /// Bytes above the limit.
    pub fn excess(&self) -> i64 {
        let garbage = ((self.ratio - 1.0) * self.live as f64) as u64;
        self.most as i64 - (self.live + garbage.max(GARBAGE_MAX_MIN)) as i64
    }
}

/// The values that are alive.
#[derive(Default)]
struct Live {
    bytes: BTreeMap<u64, u64>,
    report: Report,
}

/// Writes values over and over.
///
/// # Panics
/// When a write fails.
pub fn space(seed: u64, flaw: Flaw) -> Report {
    let mut rng = Rng::new(seed ^ 0x5BACE);
    let world = World::new(seed, 1, SimConfig::default());
    world.add_dir(DIR);
    flaw.begin(&world);
    let value = [1_000, 4_000, 16_000][rng.index(3)];
    let live = [2, 24, 48][rng.index(3)] << 20;
    let ratio = [1.5, 2.0, 3.0][rng.index(3)];
    // Of some megabytes there are several levels.
    let levels = [("max_bytes_for_level_base", "4000000"), ("target_file_size_base", "1000000")];
    let levels = levels.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let options = WriteOptions {
        durability: Durability::Process,
        column_family_options: if rng.coin() { levels.into() } else { BTreeMap::new() },
        memtable_bytes: [4, 16, 64][rng.index(3)] << 20,
        blob_min: Some(500),
        blob_space_max_ratio: Some(ratio),
        ..WriteOptions::default()
    };
    let (keys, rounds) = (live / value, 5);
    let in_order = rng.coin();
    // An operator pauses compaction, and with it collection, but not until level 0 is full.
    let paused = if rng.below(4) == 0 { (30 << 20) / value } else { 0 };
    let begins_in_tables = rng.coin();
    let alive: Rc<RefCell<Live>> = Rc::default();
    alive.borrow_mut().report.ratio = ratio;
    let (shared, disk) = (alive.clone(), world.clone());
    let ran = world.run(move |core| {
        let (options, alive, mut rng) = (options.clone(), shared.clone(), rng.clone());
        let disk = disk.clone();
        async move {
            let blob_min = options.blob_min.filter(|_| !begins_in_tables);
            let mut writer = open(&core, WriteOptions { blob_min, ..options.clone() }).await;
            // Without a table there are no blob files.
            writer.put(b"a", b"small").await.expect("it is written");
            writer.compact(0, None, None).await.expect("it is merged");
            let (mut all, mut groups) = (Vec::new(), 0);
            for at in 0..keys * rounds {
                if at == keys && begins_in_tables {
                    finish(&mut all).await;
                    writer.compact(0, None, None).await.expect("it is merged");
                    writer.close().await.expect("it closes");
                    drop(writer);
                    writer = open(&core, options.clone()).await;
                }
                let key = match in_order || at < keys {
                    true => at % keys,
                    false => rng.below(keys),
                };
                if paused > 0 && at == 2 * keys {
                    writer.pause_compaction();
                } else if paused > 0 && at == 2 * keys + paused {
                    writer.resume_compaction();
                }
                let len = value / 2 + rng.below(value);
                alive.borrow_mut().bytes.insert(key, len + RECORD_BYTES);
                let (own, mut noise) = (writer.clone(), rng.fork());
                all.push(core.spawn(Class::Foreground, async move {
                    // Not compressible.
                    let bytes: Vec<u8> =
                        (0..len.div_ceil(8)).flat_map(|_| noise.next_u64().to_le_bytes()).collect();
                    own.put(format!("key{key:08}").as_bytes(), &bytes[..len as usize]).await
                }));
                if all.len() == 8 {
                    groups += 1;
                    finish(&mut all).await;
                    // While the keys are written for the first time, few are alive.
                    if at >= keys && groups % 8 == 0 {
                        note(&disk, &mut alive.borrow_mut());
                    }
                }
            }
            let stats = writer.stats();
            alive.borrow_mut().report.collections = stats.blob_collections;
            alive.borrow_mut().report.values = stats.blob_values;
            writer.close().await.expect("it closes");
        }
    });
    flaw.end();
    ran.unwrap_or_else(|failure| panic!("{:?}", failure.kind));
    let mut report = alive.borrow().report;
    report.trace = world.trace();
    report
}

async fn open(core: &Core, options: WriteOptions) -> Writer {
    let open = Db::open_for_writing(core, Path::new(DIR), OpenOptions::default(), options);
    open.await.expect("it opens").1
}

async fn finish<T>(writes: &mut Vec<JoinHandle<lsm::Result<T>>>) {
    for write in writes.drain(..) {
        write.await.expect("it is written");
    }
}

/// Compares the space with what is alive. The moment with the largest excess counts.
fn note(disk: &World, alive: &mut Live) {
    let live = alive.bytes.values().sum();
    let blobs =
        disk.paths().into_iter().filter(|path| path.extension().is_some_and(|e| e == "blob"));
    let most = blobs.filter_map(|path| disk.len(path).ok()).sum();
    let now = Report { live, most, ..alive.report };
    if alive.report.live == 0 || now.excess() > alive.report.excess() {
        alive.report = now;
    }
}
