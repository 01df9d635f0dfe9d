//! Repair of a database that has lost a file, or a part of one.
//!
//! Numbered changes, each always the same, are written one after the other into a few small tables,
//! at durability `power`; so the contents after n changes are known, and one key says which n a
//! database holds. In each world:
//!
//! 1. Two processes write. Either may be killed, or lose power, at any completion.
//! 2. CURRENT, the MANIFEST, a table or a log is removed, cut short, or changed in one byte.
//! 3. Repairs run, and are killed or lose power at any completion. The last one comes to its end.
//! 4. The database opens for writing, holds what `docs/DURABILITY.md` promises, goes on, and holds
//!    the same when it is opened again.
//!
//! What is promised, for damage of
//!
//! - CURRENT or the MANIFEST: all acknowledged changes;
//! - a table: the same, except for keys in its range, which may have any older value or none;
//! - a log: each key has the value that it had after one of the changes since the last flush.
//!
//! Except for damage of CURRENT, keys of an obsolete table that was not removed yet may have any
//! older value or none: if the MANIFEST must be rebuilt, the table counts again.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;

use lsm::{BatchWriter, Db, Durability, Error, IterOptions, OpenOptions, WriteOptions, Writer};
use reactor::Core;
use reactor::sim::{Crash, FailureKind, Rng, SimConfig, World};
use rocksfmt::{
    FileMeta, FileName, LogKind, LogReader, LogRecord, ManifestReplay, ManifestState, VersionEdit,
    parse_current,
};

use crate::engine::{DIR, Flaw, Pairs};

/// The key that each change sets to its number.
const LAST: &[u8] = b"last";
/// Other keys.
const KEYS: u64 = 24;
/// Repairs that may be interrupted.
const INTERRUPTIONS: u64 = 3;

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Changes acknowledged.
    pub acknowledged: u64,
    /// Files damaged: CURRENT, MANIFESTs, tables, logs.
    pub currents: u64,
    /// See [`Report::currents`].
    pub manifests: u64,
    /// See [`Report::currents`].
    pub tables: u64,
    /// See [`Report::currents`].
    pub logs: u64,
    /// Repairs that a crash interrupted.
    pub interrupted: u64,
    /// MANIFESTs that were rebuilt from the tables.
    pub rebuilt: u64,
    /// Databases that held exactly the first n changes.
    pub exact: u64,
    /// Obsolete tables that were there, without a MANIFEST.
    pub obsolete: u64,
    /// Keys that had an older value because of these.
    pub older: u64,
    /// The trace's hash and number of events.
    pub trace: (u64, u64),
}

fn key(n: u64) -> Vec<u8> {
    format!("key{:02}", n % KEYS).into_bytes()
}

/// What change `number` does to keys, in their order.
fn change(number: u64) -> BTreeMap<Vec<u8>, bool> {
    let mut keys = BTreeMap::new();
    if number.is_multiple_of(3) {
        keys.insert(key(number * 11), false);
    }
    if number.is_multiple_of(7) {
        keys.extend((0..3).map(|n| (key(number % (KEYS - 3) + n), false)));
    }
    keys.extend((0..1 + number % 3).map(|n| (key(number * 5 + n * 7), true)));
    keys.insert(LAST.to_vec(), true);
    keys
}

/// The value that change `number` gives to the keys that it sets.
fn value(number: u64) -> Vec<u8> {
    let len = 40 + (number * 7_919 % 400) as usize;
    format!("{number:08}-").into_bytes().repeat(1 + len / 9)
}

/// The number of the change that gave a value, if one did.
fn number_of(found: &[u8]) -> Option<u64> {
    let number = std::str::from_utf8(found.get(..8)?).ok()?.parse().ok()?;
    (found == value(number)).then_some(number)
}

/// For each key, the changes that set or removed it.
struct History(BTreeMap<Vec<u8>, Vec<(u64, bool)>>);

impl History {
    fn of(number: u64) -> History {
        let mut keys: BTreeMap<Vec<u8>, Vec<(u64, bool)>> = BTreeMap::new();
        for number in 1..=number {
            for (key, is_set) in change(number) {
                keys.entry(key).or_default().push((number, is_set));
            }
        }
        History(keys)
    }

    /// The changes whose value of a key may be there, if the database holds between `least` and
    /// `most` changes; `None` for no value.
    fn values(&self, key: &[u8], least: u64, most: u64) -> BTreeSet<Option<u64>> {
        let changes = self.0.get(key).map_or(&[][..], |changes| changes);
        let first = changes.partition_point(|(number, _)| *number <= least);
        let before = first.checked_sub(1).map_or((0, false), |at| changes[at]);
        let later = changes[first..].iter().take_while(|(number, _)| *number <= most);
        [before].iter().chain(later).map(|&(number, is_set)| is_set.then_some(number)).collect()
    }
}

/// What a damaged database must hold.
#[derive(Clone, Debug)]
struct Promise {
    /// What is damaged.
    damaged: String,
    /// All changes up to this one.
    least: u64,
    /// No later ones.
    most: u64,
    /// Keys in these ranges may have any older value.
    loose: Vec<(Vec<u8>, Vec<u8>)>,
    /// It need not be the state at one moment.
    is_mixed: bool,
}

impl Promise {
    /// What a whole database holds.
    fn of(least: u64, most: u64) -> Promise {
        Promise { damaged: String::new(), least, most, loose: Vec::new(), is_mixed: false }
    }

    /// Checks the contents. Returns how many changes they have, or `None` if they are not those of
    /// one moment, and the number of keys with an older value.
    fn check(&self, found: &Pairs) -> (Option<u64>, u64) {
        let history = History::of(self.most);
        let numbers: BTreeMap<&[u8], u64> = found
            .iter()
            .map(|(key, value)| {
                let number = number_of(value);
                let name = String::from_utf8_lossy(key);
                (&key[..], number.unwrap_or_else(|| panic!("{name} has a value that nobody wrote")))
            })
            .collect();
        let is_loose = |key: &[u8]| {
            self.loose.iter().any(|(first, last)| (first..=last).contains(&&key.to_vec()))
        };
        let now = match numbers.get(LAST) {
            _ if self.is_mixed || is_loose(LAST) => None,
            number => Some(number.copied().unwrap_or(0)),
        };
        if let Some(now) = now {
            let Promise { least, most, .. } = self;
            assert!(now >= *least, "{now} of {least} acknowledged changes are there");
            assert!(now <= *most, "change {now} of {most} was never made");
        }
        for key in numbers.keys() {
            assert!(
                history.0.contains_key(*key),
                "{} was never written",
                String::from_utf8_lossy(key)
            );
        }
        let (mut older, mut is_exact) = (0, now.is_some());
        for key in history.0.keys() {
            let (least, most) = now.map_or((self.least, self.most), |now| (now, now));
            let has = numbers.get(&key[..]).copied();
            let fits = history.values(key, least, most);
            if fits.contains(&has) {
                continue;
            }
            let name = String::from_utf8_lossy(key);
            let any = history.values(key, 0, most);
            assert!(
                is_loose(key) && any.contains(&has),
                "{name} is of change {has:?} and should be of one of {fits:?}: {self:?}, {now:?}"
            );
            (older, is_exact) = (older + 1, false);
        }
        (now.filter(|_| is_exact), older)
    }
}

/// The files that a directory has before the damage.
struct Files {
    current: u64,
    state: ManifestState,
    /// Tables that are there and that the MANIFEST does not name, with their keys, if known.
    obsolete: Vec<Option<(Vec<u8>, Vec<u8>)>>,
}

fn keys_of(meta: &FileMeta) -> (Vec<u8>, Vec<u8>) {
    (meta.smallest_user_key().to_vec(), meta.largest_user_key().to_vec())
}

fn path(name: impl std::fmt::Display) -> String {
    format!("{DIR}/{name}")
}

impl Files {
    /// `None` if the database was not created yet.
    fn of(world: &World) -> Option<Files> {
        let current = parse_current(&world.bytes(path("CURRENT")).ok()?).ok()?;
        let bytes = world.bytes(path(FileName::Manifest(current))).expect("CURRENT names it");
        let (mut replay, mut named) = (ManifestReplay::new(), BTreeMap::new());
        let each = |record: LogRecord<'_>| {
            for (_, meta) in VersionEdit::decode(record.data)?.new_files {
                named.insert(meta.number, keys_of(&meta));
            }
            replay.record(record.data)
        };
        LogReader::new(LogKind::Manifest).feed(&bytes, true, each).expect("a whole MANIFEST");
        let state = replay.finish().expect("a whole MANIFEST");
        let live = state.column_families[&0].files().map(|(_, meta)| meta.number);
        let live: BTreeSet<u64> = live.collect();
        let obsolete = world.paths().into_iter().filter_map(|path| {
            let name = path.strip_prefix(DIR).ok()?.to_str()?.to_owned();
            match FileName::parse(&name) {
                Some(FileName::Sst(number)) if !live.contains(&number) => {
                    Some(named.get(&number).cloned())
                }
                _ => None,
            }
        });
        let obsolete = obsolete.collect();
        Some(Files { current, state, obsolete })
    }

    fn tables(&self) -> Vec<FileMeta> {
        self.state.column_families[&0].files().map(|(_, meta)| meta.clone()).collect()
    }

    /// The logs that count and have something, by number.
    fn logs(&self, world: &World) -> Vec<u64> {
        let first =
            self.state.column_families[&0].log_number.max(self.state.min_log_number_to_keep);
        let numbers = world.paths().into_iter().filter_map(|path| {
            match FileName::parse(path.strip_prefix(DIR).ok()?.to_str()?) {
                Some(FileName::Wal(number)) if number >= first => Some(number),
                _ => None,
            }
        });
        let mut numbers: Vec<u64> = numbers.collect();
        numbers.retain(|&number| {
            world
                .bytes(path(FileName::Wal(number)))
                .is_ok_and(|bytes| bytes.iter().any(|&b| b != 0))
        });
        numbers
    }

    /// The changes that are in tables, because a flush has ended after them.
    fn flushed(&self) -> u64 {
        let (mut number, mut sequence) = (0, 0);
        loop {
            sequence += change(number + 1).len() as u64;
            if sequence > self.state.last_sequence {
                return number;
            }
            number += 1;
        }
    }
}

/// Damages a file: removes it, cuts it short, or changes a byte.
fn damage(world: &World, rng: &mut Rng, name: &str, may_change: bool) -> String {
    let place = path(name);
    let mut bytes = world.bytes(&place).expect("the file is there").to_vec();
    // What comes after is preallocated.
    let len = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |at| at + 1);
    let at = rng.index(len.max(1));
    match rng.below(if may_change { 3 } else { 2 }) {
        1 if len > 0 => {
            bytes.truncate(at);
            world.add_file(&place, bytes);
            format!("{name} is cut to {at} of {len} bytes")
        }
        2 if len > 0 => {
            bytes[at] ^= 1 << rng.below(8);
            world.add_file(&place, bytes);
            format!("{name} is changed at {at}")
        }
        _ => {
            world.remove_file(&place);
            format!("{name} is removed")
        }
    }
}

/// What the processes share.
#[derive(Default)]
struct State {
    made: Cell<u64>,
    acknowledged: Cell<u64>,
    report: Cell<Report>,
}

impl State {
    fn count(&self, change: impl FnOnce(&mut Report)) {
        let mut report = self.report.get();
        change(&mut report);
        self.report.set(report);
    }
}

fn options() -> WriteOptions {
    let options = [
        ("num_levels", 4),
        ("max_bytes_for_level_base", 12_000),
        ("max_bytes_for_level_multiplier", 3),
        ("target_file_size_base", 5_000),
    ];
    WriteOptions {
        durability: Durability::Power,
        memtable_bytes: 5_000,
        manifest_bytes: 4_000,
        column_family_options: options.map(|(k, v): (&str, u32)| (k.into(), v.to_string())).into(),
        ..WriteOptions::default()
    }
}

async fn open(core: &Core) -> Result<(Db, Writer), Error> {
    Db::open_for_writing(core, Path::new(DIR), OpenOptions::default(), options()).await
}

async fn scan(core: &Core, db: &Db) -> Result<Pairs, Error> {
    let mut iter = db.attach(core).iter(0, IterOptions::default())?;
    let mut found = Vec::new();
    iter.seek_to_first().await?;
    while iter.valid() {
        found.push((iter.key().to_vec(), iter.value().to_vec()));
        iter.next().await?;
    }
    Ok(found)
}

async fn make(writer: &Writer, number: u64) -> Result<(), Error> {
    let mut batch = BatchWriter::new();
    let value = value(number);
    for (key, is_set) in change(number) {
        match is_set {
            true => batch.put(0, &key, &value),
            false => batch.delete(0, &key),
        }
    }
    writer.write(batch).await.map(drop)
}

/// Opens the database, compares it, and makes some changes.
async fn write(core: &Core, state: &State, changes: u64, closes: bool) -> Result<(), Error> {
    let (db, writer) = open(core).await?;
    let (least, most) = (state.acknowledged.get(), state.made.get());
    let promise = Promise::of(least, most);
    let now = promise.check(&scan(core, &db).await?).0.expect("it is the state of one moment");
    state.made.set(now);
    state.acknowledged.set(now);
    for number in now + 1..=now + changes {
        state.made.set(number);
        make(&writer, number).await?;
        state.acknowledged.set(number);
        state.count(|report| report.acknowledged += 1);
    }
    match closes {
        true => writer.close().await,
        false => Ok(()),
    }
}

async fn repair(core: &Core, state: &State) -> Result<(), Error> {
    let options = OpenOptions::default();
    let report = lsm::repair(core, Path::new(DIR), &options, false, |_, _| {}).await?;
    state.count(|counts| counts.rebuilt += u64::from(report.rebuilt.is_some()));
    Ok(())
}

/// Opens the repaired database, compares it, changes it, and compares it again.
async fn judge(core: &Core, state: &State, promise: &Promise) -> Result<(), Error> {
    let (db, writer) = open(core).await?;
    let mut found = scan(core, &db).await?;
    let (exact, older) = promise.check(&found);
    state.count(|report| {
        report.exact += u64::from(exact.is_some());
        report.older += older;
    });
    if let Some(keys) = db.keys() {
        assert_eq!(keys, found.len() as u64, "the number of keys");
    }
    for number in promise.most + 1..promise.most + 4 {
        make(&writer, number).await?;
        for (key, is_set) in change(number) {
            found.retain(|(other, _)| *other != key);
            if is_set {
                found.push((key, value(number)));
            }
        }
    }
    found.sort();
    writer.close().await?;
    drop((db, writer));
    let (db, writer) = open(core).await?;
    assert!(scan(core, &db).await? == found, "the repaired database has changed");
    writer.close().await
}

/// Runs a process. Returns whether it came to its end.
fn run<F: Future<Output = Result<(), Error>> + 'static>(
    world: &World,
    rng: &mut Rng,
    latest: Option<u64>,
    main: impl Fn(Core) -> F + 'static,
) -> bool {
    if let Some(latest) = latest {
        world.crash_at(if rng.coin() { Crash::Kill } else { Crash::PowerCut }, 1..latest);
    }
    match world.run(main).map_err(|failure| failure.kind) {
        Ok(results) => {
            if let Err(error) = &results[0] {
                panic!("on a sound disk: {error}");
            }
            if rng.coin() {
                world.crash(Crash::PowerCut);
            }
            true
        }
        Err(FailureKind::Crash(_)) => false,
        Err(kind) => panic!("{kind:?}"),
    }
}

/// Damages the directory. Returns what it must hold when it is repaired.
fn damaged(world: &World, rng: &mut Rng, state: &State, files: &Files) -> Promise {
    let (tables, logs) = (files.tables(), files.logs(world));
    let (least, most) = (state.acknowledged.get(), state.made.get());
    let mut promise = Promise::of(least, most);
    let all = (Vec::new(), vec![0xff]);
    let obsolete = files.obsolete.iter().map(|keys| keys.clone().unwrap_or_else(|| all.clone()));
    promise.loose.extend(obsolete);
    match rng.below(4) {
        1 if !tables.is_empty() => {
            let meta = &tables[rng.index(tables.len())];
            promise.damaged = damage(world, rng, &FileName::Sst(meta.number).to_string(), false);
            promise.loose.push(keys_of(meta));
            state.count(|report| report.tables += 1);
        }
        2 if !logs.is_empty() => {
            let number = logs[rng.index(logs.len())];
            promise.damaged = damage(world, rng, &FileName::Wal(number).to_string(), true);
            promise.least = files.flushed().min(least);
            promise.is_mixed = true;
            state.count(|report| report.logs += 1);
        }
        3 => {
            promise.damaged = damage(world, rng, "CURRENT", true);
            // The MANIFEST is intact.
            promise.loose.clear();
            state.count(|report| report.currents += 1);
        }
        _ => {
            promise.damaged =
                damage(world, rng, &FileName::Manifest(files.current).to_string(), true);
            state.count(|report| {
                report.manifests += 1;
                report.obsolete += files.obsolete.len() as u64;
            });
        }
    }
    promise
}

/// One world.
///
/// # Panics
/// When a repaired database does not hold what it must.
pub fn repairs(seed: u64, flaw: Flaw) -> Report {
    let mut rng = Rng::new(seed ^ 0x4E_9A14);
    let world = World::new(seed, 1, SimConfig::default());
    world.add_dir(DIR);
    let state = Rc::new(State::default());
    flaw.begin(&world);
    for _ in 0..2 {
        let (own, changes, closes) = (state.clone(), 10 + rng.below(60), rng.coin());
        let latest = (rng.below(4) > 0).then(|| [60, 300, 900][rng.index(3)]);
        run(&world, &mut rng, latest, move |core| {
            let own = own.clone();
            async move { write(&core, &own, changes, closes).await }
        });
    }
    if let Some(files) = Files::of(&world) {
        let promise = damaged(&world, &mut rng, &state, &files);
        for interruption in 0..=INTERRUPTIONS {
            let latest = (interruption < INTERRUPTIONS).then(|| [20, 60, 200][rng.index(3)]);
            let own = state.clone();
            let has_ended = run(&world, &mut rng, latest, move |core| {
                let own = own.clone();
                async move { repair(&core, &own).await }
            });
            if has_ended {
                break;
            }
            state.count(|report| report.interrupted += 1);
        }
        let (own, promise) = (state.clone(), RefCell::new(promise));
        run(&world, &mut rng, None, move |core| {
            let (own, promise) = (own.clone(), promise.borrow().clone());
            async move { judge(&core, &own, &promise).await }
        });
    }
    flaw.end();
    let mut report = state.report.get();
    report.trace = world.trace();
    report
}
