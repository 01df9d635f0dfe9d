//! A MANIFEST that grows and is replaced often, and a power cut at every completion of a run.
//!
//! Every batch puts a key of 200 bytes into each of four column families. One or two flushes make a
//! change that fills several sectors and make the MANIFEST long enough for a replacement. After the
//! cut the database must open, with every acknowledged batch.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;

use lsm::{BatchWriter, Db, Durability, OpenOptions, WriteOptions, Writer};
use reactor::Core;
use reactor::sim::{Crash, FailureKind, SimConfig, World};

use crate::engine::{DIR, Flaw, add_families};

const FAMILIES: u32 = 4;
const BATCHES: u64 = 14;

/// The counts of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whether the cut came before the end.
    pub was_cut: bool,
    /// Batches acknowledged.
    pub acknowledged: u64,
    /// The highest number of a MANIFEST.
    pub manifest: u64,
}

fn key(number: u64, family: u32) -> Vec<u8> {
    format!("{number:03}-{family}-{}", "k".repeat(194)).into_bytes()
}

async fn open(core: &Core) -> Result<(Db, Writer), lsm::Error> {
    let options = WriteOptions {
        durability: Durability::Power,
        memtable_bytes: 10_000,
        manifest_bytes: 1,
        ..WriteOptions::default()
    };
    Db::open_for_writing(core, Path::new(DIR), OpenOptions::default(), options).await
}

async fn write(core: &Core, acknowledged: &Cell<u64>) {
    let (_db, writer) = open(core).await.expect("the disk is sound");
    for number in 0..BATCHES {
        let mut batch = BatchWriter::new();
        for family in 0..FAMILIES {
            batch.put(family, &key(number, family), &[number as u8; 700]);
        }
        writer.write(batch).await.expect("the disk is sound");
        acknowledged.set(number + 1);
    }
    while !writer.is_quiesced() {
        core.sleep_ns(100_000).await;
    }
}

async fn check(core: &Core, acknowledged: u64) {
    let (db, writer) = match open(core).await {
        Ok(opened) => opened,
        Err(error) => panic!("after {acknowledged} acknowledged batches: {error}"),
    };
    let reader = db.attach(core);
    for number in 0..acknowledged {
        for family in 0..FAMILIES {
            let found = reader.get(family, &key(number, family), None).await.expect("a sound disk");
            let expected = [number as u8; 700];
            assert!(found.as_deref() == Some(&expected[..]), "batch {number} is not there");
        }
    }
    writer.close().await.expect("the disk is sound");
}

/// Runs one process until power is cut at the completion with number `cut`, and another one that
/// opens the database.
///
/// # Panics
/// When it cannot be opened, or a batch is missing.
pub fn manifest(seed: u64, cut: u64, flaw: Flaw) -> Report {
    let world = World::new(seed, 1, SimConfig::default());
    world.add_dir(DIR);
    add_families(&world, FAMILIES);
    flaw.begin(&world);
    let acknowledged = Rc::new(Cell::new(0));
    world.crash_at(Crash::PowerCut, cut..cut + 1);
    let noted = acknowledged.clone();
    let run = world.run(move |core| {
        let noted = noted.clone();
        async move { write(&core, &noted).await }
    });
    let was_cut = match run.map_err(|failure| failure.kind) {
        Ok(_) => false,
        Err(FailureKind::Crash(_)) => true,
        Err(kind) => panic!("{kind:?}"),
    };
    flaw.end();
    world.heal();
    let acknowledged = acknowledged.get();
    let number = |path: &std::path::PathBuf| {
        path.file_name()?.to_str()?.strip_prefix("MANIFEST-")?.parse().ok()
    };
    let manifest = world.paths().iter().filter_map(number).max().unwrap_or(0);
    let checked = world.run(move |core| async move { check(&core, acknowledged).await });
    checked.expect("there is no other failure");
    Report { was_cut, acknowledged, manifest }
}

/// Cuts power at completion `first` of a run, then at every `step`-th one in a new run, until a run
/// reaches its end. Returns the number of runs.
///
/// # Panics
/// As [`manifest`].
pub fn manifest_cut_everywhere(seed: u64, first: u64, step: usize, flaw: Flaw) -> u64 {
    for cut in (first..).step_by(step) {
        let report = manifest(seed, cut, flaw);
        if !report.was_cut {
            assert!(report.acknowledged == BATCHES && report.manifest > 20, "{report:?}");
            return cut - 1;
        }
    }
    unreachable!("some run reaches its end")
}
