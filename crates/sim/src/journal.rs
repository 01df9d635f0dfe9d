//! A log that loses no acknowledged record, and flawed variants of it.
//!
//! The smallest program with correct durability, to show that the simulated disk accepts a correct
//! program and catches a wrong one. Every core has one writer with a directory of its own. In each
//! generation of the process:
//!
//! 1. Recovery reads the log that `CURRENT` names, up to the first incomplete record, and checks
//!    that every acknowledged record is there, and no record that was not written.
//! 2. It copies the records into a new log, syncs that, syncs the directory, replaces `CURRENT`,
//!    and removes the old logs. It must not append to the old log, although that is readable: after
//!    a failed flush the page cache shows data that will never be on the disk, and another flush
//!    succeeds.
//! 3. It appends records, one by one or a few together, syncs, and then acknowledges them.
//! 4. At some point the process is killed or power is cut, also during recovery, and the next
//!    generation begins; or an operation fails, and the process ends.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use fs::{Dir, File, Mode};
use reactor::Core;
use reactor::sim::{
    Access, Crash, FailureKind, Fault, FaultCounts, FaultKind, Rng, SimConfig, World,
};

/// A fault of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// None.
    None,
    /// Records are acknowledged without a sync.
    NoSync,
    /// The directory is not synced after `CURRENT` was replaced.
    NoDirSync,
    /// `CURRENT` is replaced by a file whose bytes were not synced.
    NoDraftSync,
    /// The log that recovery found is synced and appended to, not copied.
    NoCopy,
    /// After a failed sync the log is opened again, synced, and appended to.
    SyncAgain,
}

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Records acknowledged.
    pub acknowledged: u64,
    /// Records found by recoveries that had not been acknowledged.
    pub unacknowledged_found: u64,
    /// Processes killed.
    pub kills: u64,
    /// Power cuts.
    pub power_cuts: u64,
    /// Processes that ended after an error.
    pub ends: u64,
    /// Faults that struck.
    pub faults: FaultCounts,
    /// The trace's hash and number of events.
    pub trace: (u64, u64),
}

/// The records that one writer's log must and may have.
#[derive(Default)]
struct Model {
    /// Payloads, in order, as they were given to the disk.
    written: Vec<Vec<u8>>,
    /// Number of acknowledged records among them.
    acknowledged: usize,
    /// The durable contents of `CURRENT`, and its other possible contents: a value that was read
    /// is not therefore durable.
    current: String,
    attempted: Vec<String>,
    report: Report,
}

type Shared = Rc<RefCell<Model>>;

const HEAD: usize = 20;

/// A record: length and number, a checksum of both and the payload, the payload, and zeroes up to
/// the file's alignment.
fn encode(number: u64, payload: &[u8], alignment: usize) -> Vec<u8> {
    let mut record = vec![0; HEAD];
    record[..8].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    record[8..16].copy_from_slice(&number.to_le_bytes());
    record.extend_from_slice(payload);
    let sum = rocksfmt::crc32c_append(rocksfmt::crc32c(&record[..16]), payload);
    record[16..HEAD].copy_from_slice(&sum.to_le_bytes());
    record.resize(record.len().next_multiple_of(alignment), 0);
    record
}

/// The payloads of the whole records, which are numbered from 0.
fn decode(bytes: &[u8], alignment: usize) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    let mut rest = bytes;
    while let Some((head, tail)) = rest.split_first_chunk::<HEAD>() {
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
        let len = usize::try_from(word(0)).unwrap_or(usize::MAX);
        let Some(payload) = tail.get(..len) else { break };
        let number = payloads.len() as u64;
        if word(8) != number || encode(number, payload, 1)[..HEAD] != *head {
            break;
        }
        payloads.push(payload.to_vec());
        rest = rest.get((HEAD + len).next_multiple_of(alignment)..).unwrap_or(&[]);
    }
    payloads
}

struct Writer {
    core: Core,
    dir: Dir,
    mode: Mode,
    alignment: usize,
    flaw: Flaw,
    model: Shared,
}

impl Writer {
    async fn open(&self, name: &str) -> io::Result<File> {
        Ok(self.core.attach(&self.dir.open_for_writing(name, self.mode).await?))
    }

    /// The records of the current log, the names of all logs, and the current one's.
    async fn recover(&self) -> io::Result<(Vec<Vec<u8>>, Vec<String>, String)> {
        let mut names: Vec<String> =
            self.dir.list().await?.into_iter().map(|entry| entry.name).collect();
        names.retain(|name| name.ends_with(".log"));
        let current = match self.dir.read_small("CURRENT", 100).await {
            Ok(bytes) => String::from_utf8(bytes).expect("CURRENT is text"),
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e),
        };
        {
            let model = self.model.borrow();
            let (last, attempted) = (&model.current, &model.attempted);
            let known = current == *last || attempted.contains(&current);
            assert!(known, "CURRENT says {current:?}, not {last:?} or one of {attempted:?}");
        }
        let mut found = Vec::new();
        if !current.is_empty() {
            assert!(names.contains(&current), "CURRENT names {current}, and there is {names:?}");
            found = decode(&self.dir.read_small(&current, 1 << 24).await?, self.alignment);
        }
        let mut model = self.model.borrow_mut();
        let (least, most) = (model.acknowledged, model.written.len());
        assert!(found.len() >= least, "{} of {least} acknowledged records are left", found.len());
        assert!(found.len() <= most && found[..] == model.written[..found.len()], "a false record");
        model.report.unacknowledged_found += (found.len() - least) as u64;
        Ok((found, names, current))
    }

    /// Makes a log with the recovered records, and makes it the current one. Returns it, its name,
    /// and its end.
    async fn new_log(
        &self,
        found: Vec<Vec<u8>>,
        names: &[String],
        current: String,
    ) -> io::Result<(File, String, u64)> {
        let mut bytes = Vec::new();
        for (n, payload) in found.iter().enumerate() {
            bytes.extend(encode(n as u64, payload, self.alignment));
        }
        let end = bytes.len() as u64;
        if self.flaw == Flaw::NoCopy && !current.is_empty() {
            let file = self.open(&current).await?;
            file.set_len(end).await?;
            file.sync_data().await?;
            self.settle(found, current.clone());
            return Ok((file, current, end));
        }
        let newest = names.last().and_then(|name| name.strip_suffix(".log"));
        let number = newest.map_or(0, |number| number.parse::<u64>().expect("we named it")) + 1;
        let name = format!("{number:06}.log");
        let file = self.core.attach(&self.dir.create(&name, self.mode).await?);
        if self.core.random_u64().is_multiple_of(2) {
            // Preallocated space has zeroes, with which no record begins.
            file.allocate(64 << 10).await?;
        }
        if end > 0 {
            let mut buf = self.core.alloc_wait(bytes.len()).await?;
            buf.copy_from_slice(&bytes);
            file.write_at(0, buf, bytes.len()).await.0?;
        }
        file.sync_data().await?;
        self.dir.sync().await?;
        self.model.borrow_mut().attempted.push(name.clone());
        self.replace_current(&name).await?;
        self.settle(found, name.clone());
        for old in names {
            self.dir.remove(old).await?;
        }
        Ok((file, name, end))
    }

    async fn replace_current(&self, name: &str) -> io::Result<()> {
        if !matches!(self.flaw, Flaw::NoDirSync | Flaw::NoDraftSync) {
            return self.dir.write_small_atomically("CURRENT", name.as_bytes()).await;
        }
        let draft = self.dir.create_or_empty("draft", Mode::Buffered).await?;
        let draft = self.core.attach(&draft);
        let mut buf = self.core.alloc_wait(name.len()).await?;
        buf.copy_from_slice(name.as_bytes());
        draft.write_at(0, buf, name.len()).await.0?;
        if self.flaw != Flaw::NoDraftSync {
            draft.sync_data().await?;
        }
        self.dir.rename("draft", "CURRENT").await?;
        if self.flaw != Flaw::NoDirSync {
            self.dir.sync().await?;
        }
        Ok(())
    }

    /// Counts the recovered records as acknowledged, and drops the rest.
    fn settle(&self, found: Vec<Vec<u8>>, current: String) {
        let mut model = self.model.borrow_mut();
        model.acknowledged = found.len();
        model.written = found;
        model.current = current;
        model.attempted.clear();
    }

    async fn append(&self, mut file: File, log: &str, mut offset: u64) -> io::Result<()> {
        loop {
            let first = self.model.borrow().written.len() as u64;
            let mut writes = Vec::new();
            for n in 0..1 + self.core.random_u64() % 3 {
                let len = 1 + self.core.random_u64() as usize % 3000;
                let payload = vec![self.core.random_u64() as u8 | 1; len];
                let record = encode(first + n, &payload, self.alignment);
                let mut buf = self.core.alloc_wait(record.len()).await?;
                buf.copy_from_slice(&record);
                let mut write = file.write_at(offset, buf, record.len());
                self.model.borrow_mut().written.push(payload);
                write.start();
                writes.push(write);
                offset += record.len() as u64;
            }
            for write in writes {
                write.await.0?;
            }
            if self.flaw != Flaw::NoSync
                && let Err(error) = file.sync_data().await
            {
                if self.flaw != Flaw::SyncAgain {
                    return Err(error);
                }
                file = self.open(log).await?;
                file.sync_data().await?;
            }
            let mut model = self.model.borrow_mut();
            model.report.acknowledged += (model.written.len() - model.acknowledged) as u64;
            model.acknowledged = model.written.len();
        }
    }

    async fn run(&self) -> io::Result<()> {
        let _lock = self.dir.lock_exclusive("LOCK").await?;
        let (found, names, current) = self.recover().await?;
        let (file, name, end) = self.new_log(found, &names, current).await?;
        self.append(file, &name, end).await
    }
}

/// Runs several generations of the program in one world.
///
/// # Panics
/// When an acknowledged record is lost, or a record is found that was not written.
pub fn journal(seed: u64, flaw: Flaw) -> Report {
    const CORES: usize = 2;
    let world = World::new(seed, CORES, SimConfig::default());
    let mut rng: Rng = world.rng();
    let mode = if rng.coin() { Mode::Direct } else { Mode::Buffered };
    let failing = rng.coin();
    let models: Vec<Shared> = (0..CORES).map(|_| Shared::default()).collect();
    for id in 0..CORES {
        world.add_dir(format!("/log{id}"));
    }
    if failing {
        let error = || Fault::new(FaultKind::Error(5));
        world.add_fault(error().of(Access::Sync).chance(20_000));
        world.add_fault(error().of(Access::Write).chance(10_000));
        world.add_fault(Fault::new(FaultKind::Short).of(Access::Write).chance(50_000));
        world.add_fault(Fault::new(FaultKind::Stall(0..5_000_000)).of(Access::Sync).chance(50_000));
        world.add_fault(Fault::new(FaultKind::NameError(5)).chance(5_000));
    }
    let mut report = Report::default();
    for generation in 0..8 {
        let crash = if rng.coin() { Crash::Kill } else { Crash::PowerCut };
        // Early crashes occur during recovery.
        let most = if rng.coin() { 40 } else { 400 };
        world.crash_at(crash, 1..most);
        let result = world.run(|core| {
            let writer = Writer {
                dir: Dir::new(&core, format!("/log{}", core.id()).as_ref()),
                mode,
                alignment: if mode == Mode::Direct { 512 } else { 1 },
                flaw,
                model: models[core.id()].clone(),
                core,
            };
            async move {
                let error = writer.run().await.expect_err("it never ends without an error");
                assert!(failing, "generation {generation} of a sound disk: {error}");
            }
        });
        match result.map_err(|failure| failure.kind) {
            Ok(_) => report.ends += 1,
            Err(FailureKind::Crash(Crash::Kill)) => report.kills += 1,
            Err(FailureKind::Crash(Crash::PowerCut)) => report.power_cuts += 1,
            Err(kind) => panic!("{kind:?}"),
        }
    }
    for model in models {
        let one = model.borrow().report;
        report.acknowledged += one.acknowledged;
        report.unacknowledged_found += one.unacknowledged_found;
    }
    report.faults = world.faults();
    report.trace = world.trace();
    report
}
