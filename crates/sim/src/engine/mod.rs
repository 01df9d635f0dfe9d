//! The engine, with kills and power cuts at any moment, checked against a list of all writes.
//!
//! One core owns the database, and several of its tasks write: batches of puts, deletes and range
//! deletes, with values from 10 bytes to 100 KB, into memtables so small that they are switched,
//! flushed and merged all the time. In some worlds of one column family merge operands set values,
//! too (RocksDB's operator `put`), and single deletes remove values that were set once. In every
//! third world the keys are spread over several column
//! families, and another one comes and goes (`families.rs`). In three of seven worlds merges are
//! paused, limited, requested and cancelled. In three of four pairs of worlds large values go to
//! blob files, and the garbage in these is collected. The MANIFEST is replaced when it has grown.
//! All cores read. Processes run one after the other on the same disk, each at its own durability:
//!
//! 1. It opens the database and compares it with the list. Batches are ordered at their submission,
//!    so the contents must be those of the first n batches: whole batches, without a gap, including
//!    all acknowledged ones. Every batch also sets one special key to its number, which tells n.
//! 2. Writers write; readers compare the database with the list, all keys at one moment or key by
//!    key.
//! 3. At some point the process is killed or power is cut, also while it opens the database; or it
//!    closes the database; or operations on the disk fail, once or for a while: on logs, tables,
//!    the MANIFEST, CURRENT or names. Or the disk is full for a while. Writes are then refused
//!    without effect, or their fate is unknown until the next opening or the next accepted write.
//!    Reading continues, and writing continues in the same process when the disk works again. In
//!    some worlds the device also stalls for a second now and then, and one read fails: that is
//!    repeated.
//! 4. In every second world a last process meets no fault. Its writers end, merges and collections
//!    come to rest, and every level has the size that the options allow.
//!
//! After a power cut less is promised of writes acknowledged at `process`: the opening may then
//! fail with damage in a log; with salvage it must succeed, and every key must have one of the
//! values it had since it was last durable.

mod faults;
mod model;
mod process;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use lsm::{Durability, MergeOperator, OpenOptions, WriteOptions};
use reactor::sim::{
    Access, Crash, FailureKind, Fault, FaultCounts, FaultKind, Rng, SimConfig, World,
};
use rocksfmt::{LogWriter, VersionEdit};

use self::faults::{add_blob_faults, add_faults, add_roughness};
use self::model::Model;
pub use self::model::Pairs;
use self::process::Process;
use crate::families;

/// The path of the database in the simulated world.
pub const DIR: &str = "/db";

/// A fault of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// None.
    None,
    /// It does not sync files whose names have this ending; for [`DIR`], it does not sync names.
    NoSync(&'static str),
    /// One of its built-in mutants.
    Mutant(&'static str),
}

impl Flaw {
    /// Sets the fault in a world.
    pub(crate) fn begin(self, world: &World) {
        match self {
            Flaw::None => {}
            Flaw::NoSync(end) => world.add_fault(Fault::new(FaultKind::Skip).on(end)),
            Flaw::Mutant(name) => lsm::set_mutant(name),
        }
    }

    /// Removes the fault.
    pub(crate) fn end(self) {
        if let Flaw::Mutant(_) = self {
            lsm::set_mutant("");
        }
    }
}

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Batches acknowledged.
    pub acknowledged: u64,
    /// Batches found by an opening that had not been acknowledged.
    pub unacknowledged_found: u64,
    /// Full scans of the database that were compared with the list.
    pub scans: u64,
    /// Lookups that were compared with the list.
    pub gets: u64,
    /// Scans of one moment that were repeated later, and were equal.
    pub held: u64,
    /// Databases loaded.
    pub loads: u64,
    /// Syncs of all writes.
    pub syncs: u64,
    /// Openings.
    pub openings: u64,
    /// Openings that were crashed.
    pub crashed_openings: u64,
    /// Openings that needed salvage.
    pub salvaged: u64,
    /// Openings that knew the number of keys.
    pub counted: u64,
    /// Processes killed.
    pub kills: u64,
    /// Power cuts.
    pub power_cuts: u64,
    /// Databases closed.
    pub closes: u64,
    /// Openings that an operation on the disk failed.
    pub failures: u64,
    /// Batches whose fate was unknown, and those of them that the next opening found.
    pub unknown: u64,
    /// See [`Report::unknown`].
    pub unknown_found: u64,
    /// Logs and MANIFESTs that were replaced after a failed write, in processes that ended
    /// normally.
    pub heals: u64,
    /// Batches refused because the disk was full, and the number of times that it was full, in
    /// processes that ended normally.
    pub refused: u64,
    /// See [`Report::refused`].
    pub full: u64,
    /// Memtables written to tables, and merges, in processes that ended normally.
    pub flushes: u64,
    /// See [`Report::flushes`].
    pub merges: u64,
    /// Table files that they recycled.
    pub rewritten: u64,
    /// Blob files that they began, and values that they stored in them.
    pub blob_files: u64,
    /// See [`Report::blob_files`].
    pub blob_values: u64,
    /// Collections of their garbage, and values that these moved.
    pub blob_collections: u64,
    /// See [`Report::blob_collections`].
    pub blob_moved: u64,
    /// Column families made and dropped.
    pub families_made: u64,
    /// See [`Report::families_made`].
    pub families_dropped: u64,
    /// Merge operands, and single deletes.
    pub operands: u64,
    /// See [`Report::operands`].
    pub single_deletes: u64,
    /// Databases that came to rest, and levels below level 0 that they then had.
    pub rested: u64,
    /// See [`Report::rested`].
    pub rested_levels: u64,
    /// Compactions on request, and those of them that were cancelled.
    pub compactions: u64,
    /// See [`Report::compactions`].
    pub cancelled: u64,
    /// Faults that struck.
    pub faults: FaultCounts,
    /// The trace's hash and number of events.
    pub trace: (u64, u64),
}

/// Makes a database with several column families.
pub(crate) fn add_families(world: &World, families: u32) {
    let first = VersionEdit {
        db_id: Some("a database".into()),
        comparator: Some("leveldb.BytewiseComparator".into()),
        log_number: Some(0),
        next_file_number: Some(2),
        last_sequence: Some(0),
        keys: Some(0),
        ..VersionEdit::default()
    };
    let (mut log, mut bytes) = (LogWriter::new(None, 0), Vec::new());
    log.append(&first.encode(), &mut bytes);
    for id in 1..families {
        let add = VersionEdit {
            column_family: id,
            column_family_add: Some(format!("f{id}")),
            comparator: Some("leveldb.BytewiseComparator".into()),
            log_number: Some(0),
            ..VersionEdit::default()
        };
        log.append(&add.encode(), &mut bytes);
    }
    world.add_file(format!("{DIR}/MANIFEST-000001"), bytes);
    world.add_file(format!("{DIR}/IDENTITY"), b"a database".to_vec());
    world.add_file(format!("{DIR}/CURRENT"), b"MANIFEST-000001\n".to_vec());
}

/// In worlds from this seed on, every process meets failing operations.
pub const FAILING: u64 = 1 << 32;

/// Runs several processes in one world, one after the other.
///
/// # Panics
/// When the database loses or invents data.
pub fn engine(seed: u64, flaw: Flaw) -> Report {
    run(seed, flaw, true, |_| None)
}

/// Options by which a few hundred kilobytes fill several levels.
fn small_levels(rng: &mut Rng) -> BTreeMap<String, String> {
    let options = [
        ("num_levels", 3 + rng.below(5)),
        ("max_bytes_for_level_base", 20_000 + rng.below(200_000)),
        ("max_bytes_for_level_multiplier", 2 + rng.below(4)),
        ("target_file_size_base", 4_000 + rng.below(60_000)),
        ("max_compaction_bytes", 50_000 + rng.below(500_000)),
    ];
    let options = options.map(|(name, value)| (name.to_owned(), value.to_string()));
    let dynamic = ("level_compaction_dynamic_level_bytes".to_owned(), rng.coin().to_string());
    options.into_iter().chain([dynamic]).collect()
}

/// The same; between two processes a judge may read the directory and report the number of batches
/// that it finds.
///
/// # Panics
/// As [`engine`]; also when the judge finds other contents.
pub fn engine_judged(seed: u64, flaw: Flaw, judge: impl FnMut(&World) -> Option<Pairs>) -> Report {
    run(seed, flaw, true, judge)
}

fn run(
    seed: u64,
    flaw: Flaw,
    may_merge: bool,
    mut judge: impl FnMut(&World) -> Option<Pairs>,
) -> Report {
    let mut rng = Rng::new(seed ^ 0x0E11_61E5);
    let cores = 1 + rng.index(3);
    let world = World::new(seed, cores, SimConfig::default());
    world.add_dir(DIR);
    let model: Rc<RefCell<Model>> = Rc::default();
    let failing = seed >= FAILING || rng.below(3) == 0;
    let scarce = seed % 4 == 1;
    let mut roughness = (seed % 5 == 4).then(|| Rng::new(seed ^ 0x57A1));
    // Blob files are as short as possible.
    let blob_min = [None, Some(300), Some(30), Some(3_000)][seed as usize / 2 % 4];
    // Their garbage is collected early, late, or not.
    let blob_space = [Some(1.1), Some(1.5), Some(1.1), Some(100.0)][seed as usize / 8 % 4];
    let mut blob_faults = (failing && blob_min.is_some()).then(|| Rng::new(seed ^ 0xB10B));
    let mut changes = Rng::new(seed ^ 0xC4A2);
    // Some worlds have one durability; in others it changes.
    let durability = [None, Some(Durability::Power), Some(Durability::Process)][rng.index(3)];
    let keys = [8, 60, 400][rng.index(3)];
    let families = if seed % 3 == 2 { 4 } else { 1 };
    let column_family_options =
        if rng.below(3) > 0 { small_levels(&mut rng) } else { BTreeMap::new() };
    if families > 1 {
        add_families(&world, families);
    }
    let merges = may_merge && seed % 4 == 3 && families == 1;
    for nth in 0..if seed.is_multiple_of(2) { 6 } else { 5 } {
        let rests = nth == 5;
        let (failing, scarce) = (failing && !rests, scarce && !rests);
        world.heal();
        // The disk may be as full for this process as for the last one.
        if !scarce || rng.coin() {
            world.set_capacity(None);
        }
        flaw.begin(&world);
        if rng.below(4) == 0 {
            // Tables take long, and writes continue meanwhile.
            let stall = FaultKind::Stall(1_000_000..30_000_000);
            world.add_fault(Fault::new(stall).of(Access::Sync).on(".sst"));
        }
        let fails = failing && (seed >= FAILING || rng.coin());
        if fails {
            add_faults(&world, &mut rng);
            if let Some(rng) = &mut blob_faults
                && rng.coin()
            {
                add_blob_faults(&world, rng);
            }
        }
        if let Some(rng) = roughness.as_mut().filter(|_| !rests) {
            add_roughness(&world, rng);
        }
        let either = [Durability::Power, Durability::Process][rng.index(2)];
        let options = WriteOptions {
            durability: durability.unwrap_or(either),
            memtable_bytes: [20_000, 60_000, 200_000][rng.index(3)],
            manifest_bytes: [3_000, 40_000][rng.index(2)],
            column_family_options: column_family_options.clone(),
            blob_min,
            blob_file_bytes: 1,
            blob_space_max_ratio: blob_space,
            merge_operator: merges.then_some(MergeOperator::Put),
            ..WriteOptions::default()
        };
        let reading = OpenOptions {
            cache_bytes: rng.index(2) * 100_000,
            memory_bytes: [2_000, usize::MAX][rng.index(2)],
            recovered_bytes: [10_000, usize::MAX][rng.index(2)],
            ..OpenOptions::default()
        };
        let own = Process::new(&world, &model, rng.fork());
        let process = Rc::new(Process {
            options,
            reading,
            controls: seed % 7 < 3 && !rests,
            changes: RefCell::new(changes.fork()),
            scarce,
            sound: !fails,
            rests,
            merges,
            keys,
            families,
            batches_max: [80, if scarce { 400 } else { 80 }, 80, 400][rng.index(4)],
            ..own
        });
        let crash = if rng.coin() { Crash::Kill } else { Crash::PowerCut };
        // Early crashes occur during the opening.
        let latest = [30, 150, 600, 3_000][rng.index(4)];
        if !rests {
            world.crash_at(crash, 1..if scarce { 4 * latest } else { latest });
        }
        let openings = model.borrow().report.openings;
        let result = world.run(|core| process.clone().run(core));
        let opened = model.borrow().report.openings > openings;
        let mut model = model.borrow_mut();
        let mut cut = false;
        match result.map_err(|failure| failure.kind) {
            Ok(results) => {
                if let Err(error) = &results[0] {
                    assert!(!opened && (fails || scarce), "writing or closing fails: {error}");
                    model.report.failures += 1;
                }
                // Power may also be cut while the database is not open.
                if rng.below(3) == 0 {
                    world.crash(Crash::PowerCut);
                    cut = true;
                }
            }
            Err(FailureKind::Crash(crash)) => {
                model.report.crashed_openings += u64::from(!opened);
                model.report.kills += u64::from(crash == Crash::Kill);
                cut = crash == Crash::PowerCut;
            }
            Err(kind) => panic!("{kind:?}"),
        }
        if cut {
            model.report.power_cuts += 1;
            model.acknowledged = model.durable;
            model.loose |= model.process_logs;
        }
        let is_made = world.bytes(format!("{DIR}/CURRENT")).is_ok();
        if is_made
            && !model.loose
            && let Some(mut found) = judge(&world)
        {
            found.retain(|(key, _)| key != families::KEY);
            model.settle(&found);
            let (number, least) = (model.number_in(&found), model.acknowledged);
            assert!(number >= least, "the judge finds {number} of {least} acknowledged batches");
            model.compare(&found, number);
        }
    }
    flaw.end();
    let mut report = model.borrow().report;
    report.faults = world.faults();
    report.trace = world.trace();
    report
}

/// Pairs of processes at `power`: in the first one flushes of the log fail, no table can be made
/// instead, and it is killed; the second one finds writes that only the page cache has, and power
/// is cut soon after it was opened. What the second one has acknowledged must be there.
///
/// # Panics
/// When the database loses or invents data.
pub fn doubtful(seed: u64, flaw: Flaw) -> Report {
    let mut rng = Rng::new(seed ^ 0xD0B7);
    let world = World::new(seed, 1, SimConfig::default());
    world.add_dir(DIR);
    let model: Rc<RefCell<Model>> = Rc::default();
    let column_family_options = small_levels(&mut rng);
    for run in 0..7 {
        world.heal();
        flaw.begin(&world);
        let fails = run % 2 == 0 && run < 6;
        if fails {
            let after = rng.below(12);
            let error = Fault::new(FaultKind::Error(5)).of(Access::Sync).on(".log");
            world.add_fault(error.after(after).times(1_000_000));
            world.add_fault(Fault::new(FaultKind::NameError(24)).on(".sst").times(1_000_000));
        } else {
            // The flush of what was recovered takes long.
            let stall = FaultKind::Stall(1_000_000..30_000_000);
            world.add_fault(Fault::new(stall).of(Access::Sync).on(".sst"));
        }
        let process = Rc::new(Process {
            options: WriteOptions {
                durability: Durability::Power,
                memtable_bytes: 200_000,
                column_family_options: column_family_options.clone(),
                ..WriteOptions::default()
            },
            sound: !fails,
            ..Process::new(&world, &model, rng.fork())
        });
        match run {
            6 => {}
            _ if fails => world.crash_at(Crash::Kill, 40..160),
            _ => world.crash_at(Crash::PowerCut, 20..200),
        }
        let result = world.run(|core| process.clone().run(core));
        let mut model = model.borrow_mut();
        match result.map_err(|failure| failure.kind) {
            Ok(results) => {
                let opens = results[0].is_ok() || fails;
                assert!(opens, "writing or closing fails: {:?}", results[0]);
            }
            Err(FailureKind::Crash(Crash::Kill)) => model.report.kills += 1,
            Err(FailureKind::Crash(Crash::PowerCut)) => {
                model.report.power_cuts += 1;
                model.acknowledged = model.durable;
            }
            Err(kind) => panic!("{kind:?}"),
        }
    }
    flaw.end();
    let mut report = model.borrow().report;
    report.faults = world.faults();
    report.trace = world.trace();
    report
}

/// One process in which a fault strikes once, and one that opens what it left. Returns whether the
/// fault struck. A failed read is repeated, so nothing may fail for one.
///
/// # Panics
/// When the database loses or invents data, or does not continue.
pub fn failing_once(seed: u64, fault: Fault, reads: bool) -> bool {
    let mut rng = Rng::new(seed ^ 0x0FA1);
    let world = World::new(seed, 1 + rng.index(2), SimConfig::default());
    world.add_dir(DIR);
    let model: Rc<RefCell<Model>> = Rc::default();
    let durability = [Durability::Power, Durability::Process][rng.index(2)];
    let blob_min = [None, Some(300)][rng.index(2)];
    let mut struck = false;
    for sound in [false, true] {
        if !sound {
            world.add_fault(fault.clone().times(1));
        }
        let process = Rc::new(Process {
            options: WriteOptions {
                durability,
                memtable_bytes: 20_000,
                manifest_bytes: 3_000,
                column_family_options: small_levels(&mut rng),
                blob_min,
                blob_file_bytes: 1,
                ..WriteOptions::default()
            },
            reading: OpenOptions { recovered_bytes: 10_000, ..OpenOptions::default() },
            sound: sound || reads,
            keys: 60,
            batches_max: 60,
            ..Process::new(&world, &model, rng.fork())
        });
        let results = world.run(|core| process.clone().run(core));
        let results = results.unwrap_or_else(|failure| panic!("{:?}", failure.kind));
        if let Err(error) = &results[0] {
            let opened = model.borrow().report.openings > 0;
            assert!(!sound && !reads && !opened, "writing or closing fails: {error}");
        }
        world.heal();
        struck |= world.faults() != FaultCounts::default();
    }
    struck
}
