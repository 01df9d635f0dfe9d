//! Large values: each is written once, to a blob file, and logs, memtables and tables hold a
//! reference to it.
//!
//! A column family has at most one open blob file. It has a fixed length, so that RocksDB can use
//! it at any moment, also after a crash (`docs/formats/blob.md`). The order:
//!
//! 1. The file with its header and its footer is durable, and so is its name. A change of the
//!    MANIFEST registers it, with upper bounds for its contents, and leaves a table that anchors it
//!    (`blob_anchor.rs`). Only then it gets values. A family without tables has none that could be
//!    the anchor: its first large values stay in the log, and the memtables become tables before
//!    the next group ([`Blobs::wants_anchor`]).
//! 2. The values of a group are appended before the group goes into the log, which names them. At
//!    `power` they are durable before the log is written.
//! 3. A flush makes the values durable before the tables that refer to them are installed.
//! 4. A full file is sealed: the footer follows the last value, the rest is cut off, and a change
//!    of the MANIFEST counts the unused part as garbage. So does the next opening with a file that
//!    a crash left open (`open/blob_tails.rs`).
//!
//! A value stays in the log, too, if a merge operand of its key may follow before its memtable is a
//! table (`blob_operands.rs`).
//!
//! If a blob file cannot be created, values stay in the log and in tables as small ones do. If one
//! cannot be written or flushed, it is given up: nothing more is written to it, and a new one takes
//! its place after a pause.
//!
//! - After a failed write, and at `power` after a failed flush, the values of the group are still
//!   in memory. They go to the log; the values before them are durable or will be flushed.
//! - At `process` a failed flush may have lost values that memtables refer to; as long as the
//!   process lives, readers still see them. The next flush of memtables copies them into tables
//!   ([`Blobs::failed`]), and the memtables count as full so that it comes soon.

use std::cell::{Cell, Ref, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use fs::{File, Mode};
use rocksfmt::{
    BLOB_FOOTER_BYTES, BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobFileMeta, BlobFooter,
    BlobHeader, BlobIndex, BlobRecord, Compression, FileMeta, FileName, Op, VersionEdit,
    WriteBatch,
};

use crate::db::{CfId, Db};
use crate::durability::Durability;
use crate::error::{Error, Result};
use crate::file_list::BlobPrefix;
use crate::mutant::mutant;
use crate::options::WriteOptions;
use crate::stored_options::StoredBlobs;
use crate::version::{BlobFile, Version};
use crate::write::blob_anchor;
use crate::write::blob_garbage;
use crate::write::blob_operands::Operands;
use crate::write::commit::batches;
use crate::write::insist;
use crate::write::state::{Pending, WriteState};

/// The bounds of a file's length. All of it is allocated in advance.
const FILE_BYTES_MIN: u64 = 64 << 10;
const FILE_BYTES_MAX: u64 = 256 << 20;
/// The unit of lengths; a multiple of every device's block. Values do not reach into the last one
/// of a file, so that writing them never touches the footer.
const UNIT: u64 = 64 << 10;
/// Bytes of a direct write, and of a buffered one.
const DIRECT_PIECE: usize = 64 << 10;
const BUFFERED_PIECE: usize = 1 << 20;
/// Writes in flight.
const WRITES_MAX: usize = 16;
/// The pause after a file could not be created, in nanoseconds.
const CREATE_PAUSE_NS: u64 = 1_000_000_000;

/// The blob files that are being written.
pub(crate) struct Blobs {
    /// What families store in blob files.
    stores: RefCell<BTreeMap<CfId, Store>>,
    open: RefCell<BTreeMap<CfId, OpenBlobFile>>,
    /// Files that are full.
    sealing: RefCell<Vec<Rc<OpenBlobFile>>>,
    /// Bytes that each family has stored since the memtables began.
    unflushed: RefCell<BTreeMap<CfId, u64>>,
    /// Both kinds by number, also while they are being written.
    unsealed: RefCell<BTreeMap<u64, File>>,
    /// Files to which logs may refer.
    in_logs: RefCell<Vec<InLogs>>,
    /// When a file may be created again.
    create_after_ns: Cell<u64>,
    /// A merge cannot be installed before a memtable is flushed.
    pub wants_flush: Cell<bool>,
    /// A family with large values in memtables has no table that a blob file could be anchored by.
    pub wants_anchor: Cell<bool>,
    /// How often a flush of a file has failed.
    failures: Cell<u64>,
    pub operands: Operands,
}

/// Most bytes of a blob file of a family, about.
pub(crate) fn file_bytes(said: &StoredBlobs, options: &WriteOptions) -> u64 {
    let bytes = said.file_bytes.unwrap_or(options.blob_file_bytes);
    bytes.clamp(FILE_BYTES_MIN, FILE_BYTES_MAX)
}

/// What a family stores in blob files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Store {
    /// Least bytes of a value.
    value_min: usize,
    /// Most bytes of a file.
    file_bytes: u64,
}

impl Store {
    /// For the family of a name, if it stores values in blob files.
    fn of(db: &Db, options: &WriteOptions, name: &str) -> Option<Store> {
        let said = db.0.stored_options.blobs(name);
        let value_min = options.blob_min.or(said.value_min)?.max(2);
        let file_bytes = file_bytes(&said, options).next_multiple_of(UNIT) + UNIT;
        said.are_supported.then_some(Store { value_min, file_bytes })
    }

    /// The length of the next file, which gets at least `bytes` of values and usually has `usual`.
    fn next_file_bytes(&self, bytes: u64, usual: u64) -> u64 {
        let unit = |bytes: u64| bytes.next_multiple_of(UNIT) + UNIT;
        let least = unit(bytes.saturating_add(BLOB_HEADER_BYTES as u64));
        self.file_bytes.min(unit(usual).max(least))
    }
}

/// A blob file to which only logs may refer.
#[derive(Clone, Copy)]
struct InLogs {
    family: CfId,
    number: u64,
    /// No log with this number or a larger one refers to it.
    until_log: u64,
    /// A flush has failed: the values that logs refer to may never be durable.
    is_failed: bool,
}

impl Blobs {
    /// For the column families of an open database. `recovered` are the blob files that recovered
    /// logs may refer to.
    pub fn new(db: &Db, options: &WriteOptions) -> Blobs {
        let families = db.version();
        let families = families.families.iter().filter(|family| family.refused.is_none());
        let stores =
            families.filter_map(|family| Some((family.id, Store::of(db, options, &family.name)?)));
        let until_log = db.next_file();
        let manifest = &db.0.manifest.column_families;
        let recovered = manifest.values().flat_map(|family| {
            let reserved = family.live_blob_files().filter(|blob| blob.is_reserved());
            reserved.map(|blob| InLogs {
                family: family.id,
                number: blob.number,
                until_log,
                is_failed: false,
            })
        });
        Blobs {
            stores: RefCell::new(stores.collect()),
            open: RefCell::default(),
            sealing: RefCell::default(),
            unflushed: RefCell::default(),
            unsealed: RefCell::default(),
            in_logs: RefCell::new(recovered.collect()),
            create_after_ns: Cell::new(0),
            wants_flush: Cell::new(false),
            wants_anchor: Cell::new(false),
            failures: Cell::new(0),
            operands: Operands::default(),
        }
    }

    /// Notes a new family. In the OPTIONS it has what the family `like` has.
    pub fn add_family(&self, db: &Db, options: &WriteOptions, family: CfId, like: &str) {
        if let Some(store) = Store::of(db, options, like) {
            self.stores.borrow_mut().insert(family, store);
        }
    }

    /// Notes that a family has been dropped.
    pub fn drop_family(&self, family: CfId) {
        self.stores.borrow_mut().remove(&family);
        self.clear_family(family);
    }

    /// Forgets the files of a family that was cleared: the space of the open one is free again.
    pub fn clear_family(&self, family: CfId) {
        if let Some(open) = self.open.borrow_mut().remove(&family) {
            self.unsealed.borrow_mut().remove(&open.number);
        }
        self.in_logs.borrow_mut().retain(|file| file.family != family);
    }

    /// Bytes of the values in a family's files that are not sealed, and the lengths of these.
    pub fn unsealed_bytes(&self, family: CfId) -> (u64, u64) {
        let (open, sealing) = (self.open.borrow(), self.sealing.borrow());
        let sealing = sealing.iter().map(|file| &**file).filter(|file| file.family == family);
        let all = open.get(&family).into_iter().chain(sealing);
        all.fold((0, 0), |(values, length), file| (values + file.end, length + file.length()))
    }

    /// Bytes that each family has stored since the memtables began.
    pub fn unflushed(&self) -> Ref<'_, BTreeMap<CfId, u64>> {
        self.unflushed.borrow()
    }

    /// Notes that new memtables begin.
    pub fn begin_memtables(&self) {
        self.unflushed.borrow_mut().clear();
        self.wants_anchor.set(false);
        self.operands.begin_memtables();
    }

    /// The blob files of a family to which logs may refer.
    pub fn in_logs(&self, family: CfId) -> Vec<u64> {
        let all = self.in_logs.borrow();
        all.iter().filter(|file| file.family == family).map(|file| file.number).collect()
    }

    /// Whether logs may refer to a blob file.
    pub fn are_in_logs(&self) -> bool {
        !self.in_logs.borrow().is_empty()
    }

    /// The contents of the files that are not sealed. Called by the task that writes them.
    pub fn prefixes(&self) -> Vec<BlobPrefix> {
        let prefix = |file: &OpenBlobFile| BlobPrefix {
            number: file.number,
            end: file.end,
            count: file.count,
        };
        let sealing = self.sealing.borrow();
        self.open.borrow().values().chain(sealing.iter().map(|file| &**file)).map(prefix).collect()
    }

    /// Whether a file is not complete.
    pub fn is_unsealed(&self, number: u64) -> bool {
        self.unsealed.borrow().contains_key(&number)
    }

    /// How often a flush of a file has failed.
    pub fn failures(&self) -> u64 {
        self.failures.get()
    }

    /// The files of which a flush has failed, and to which logs may refer: their values must not
    /// be referred to by tables.
    pub fn failed(&self) -> Vec<u64> {
        let all = self.in_logs.borrow();
        all.iter().filter(|file| file.is_failed).map(|file| file.number).collect()
    }

    /// Whether the log of this number may refer to such a file.
    pub fn has_failed(&self, log: u64) -> bool {
        self.in_logs.borrow().iter().any(|file| file.is_failed && log < file.until_log)
    }

    /// Takes a file out of use: it is sealed.
    fn retire(&self, db: &Db, file: OpenBlobFile) {
        let until_log = db.next_file();
        for in_logs in self.in_logs.borrow_mut().iter_mut() {
            if in_logs.number == file.number {
                in_logs.until_log = until_log;
            }
        }
        self.sealing.borrow_mut().push(Rc::new(file));
    }

    /// Takes all files out of use, and notes that no log refers to any: the memtables are empty,
    /// and no others wait to be flushed.
    pub fn release(&self, db: &Db) {
        let open = std::mem::take(&mut *self.open.borrow_mut());
        open.into_values().for_each(|file| self.retire(db, file));
        self.in_logs.borrow_mut().clear();
        self.wants_flush.set(false);
    }

    /// Notes that no log before `next_log` is needed any more.
    pub fn flushed(&self, next_log: u64) {
        self.in_logs.borrow_mut().retain(|file| file.until_log > next_log);
        self.wants_flush.set(false);
    }

    /// Whether any family stores values in blob files.
    pub fn has_stores(&self) -> bool {
        !self.stores.borrow().is_empty()
    }

    /// Least bytes of a value that a family stores in blob files.
    pub fn value_min(&self, family: CfId) -> Option<usize> {
        self.stores.borrow().get(&family).map(|store| store.value_min)
    }

    /// Bytes that the values of a group take in the blob file of each family.
    fn wanted(&self, group: &mut [Pending]) -> Result<BTreeMap<CfId, u64>> {
        let mut wanted = BTreeMap::new();
        let stores = self.stores.borrow();
        let value_min = stores.values().map(|store| store.value_min).min();
        let Some(value_min) = value_min else { return Ok(wanted) };
        for (batch, _) in batches(group).filter(|(batch, _)| batch.len() >= value_min) {
            let format = |e: rocksfmt::Error| Error::format("a batch", &e);
            for op in WriteBatch::parse(batch.finish(0)).map_err(format)?.ops() {
                let Op::Put { cf, key, value } = op.map_err(format)?.1 else { continue };
                let store = stores.get(&cf).filter(|store| value.len() >= store.value_min);
                if store.is_some() && !self.operands.keep_whole(cf, key) {
                    *wanted.entry(cf).or_default() += record_bytes(key, value);
                }
            }
        }
        Ok(wanted)
    }

    /// Appends the large values of a group to the open blob files.
    fn store(&self, group: &mut [Pending]) -> Result<()> {
        let (stores, mut open) = (self.stores.borrow(), self.open.borrow_mut());
        for (batch, _) in batches(group) {
            let moved = batch.store_values(|cf, key, value, index| {
                let store = stores.get(&cf).filter(|store| value.len() >= store.value_min);
                let is_stored = store.is_some() && !self.operands.keep_whole(cf, key);
                let file = open.get_mut(&cf).filter(|_| is_stored);
                file.is_some_and(|file| file.put(key, value, index))
            });
            moved.map_err(|e| Error::format("a batch", &e))?;
        }
        Ok(())
    }
}

/// Takes the values of a group back that could not be written to `file`.
fn restore(group: &mut [Pending], file: &OpenBlobFile) -> Result<()> {
    for (batch, _) in batches(group) {
        let restored = batch.restore_values(|_, index| {
            let index = BlobIndex::parse(index).ok()?;
            let at = index
                .offset
                .checked_sub(file.start)
                .filter(|_| index.file_number == file.number)?;
            file.buffer.get(at as usize..)?.get(..index.size as usize)
        });
        restored.map_err(|e| Error::format("a batch", &e))?;
    }
    Ok(())
}

fn record_bytes(key: &[u8], value: &[u8]) -> u64 {
    (BLOB_RECORD_HEADER_BYTES + key.len() + value.len()) as u64
}

/// A blob file that gets values.
struct OpenBlobFile {
    number: u64,
    file: File,
    durability: Durability,
    family: CfId,
    /// Where values must end.
    limit: u64,
    /// The end of the last value.
    end: u64,
    /// Bytes from `start` on that are to be written, the first of them again.
    buffer: Vec<u8>,
    /// A multiple of the file's alignment.
    start: u64,
    /// The number of its values.
    count: u64,
    /// End and number of the values that were written without an error.
    written: (u64, u64),
    /// A write or a flush has failed: nothing more is written to it.
    is_given_up: bool,
}

impl OpenBlobFile {
    fn name(&self) -> String {
        FileName::Blob(self.number).to_string()
    }

    /// All of it is allocated.
    fn length(&self) -> u64 {
        self.limit + UNIT
    }

    /// Appends a value, and its reference to `index`. Returns false if it does not fit.
    fn put(&mut self, key: &[u8], value: &[u8], index: &mut Vec<u8>) -> bool {
        let bytes = record_bytes(key, value);
        if self.end + bytes > self.limit {
            return false;
        }
        BlobRecord::encode(key, value, &mut self.buffer);
        self.end += bytes;
        self.count += 1;
        let size = value.len() as u64;
        let (file_number, offset, compression) = (self.number, self.end - size, Compression::None);
        BlobIndex { file_number, offset, size, compression }.encode(index);
        true
    }

    /// Writes what was appended; at `power` it is durable afterwards.
    async fn write(&mut self) -> Result<()> {
        let align = self.file.alignment().max(1);
        let piece = match self.durability {
            Durability::Process => BUFFERED_PIECE,
            Durability::Power => DIRECT_PIECE,
        };
        let all = self.buffer.len().next_multiple_of(align);
        let done = self.buffer.len() / align * align;
        write(&self.file, &self.name(), self.start, &self.buffer, all, piece).await?;
        if self.durability == Durability::Power {
            sync(&self.file).await?;
        }
        self.buffer.drain(..done);
        self.start += done as u64;
        self.written = (self.end, self.count);
        Ok(())
    }
}

/// Writes `all` bytes: those of `bytes`, and zeros. Several pieces are under way at a time.
async fn write(
    file: &File,
    name: &str,
    start: u64,
    bytes: &[u8],
    all: usize,
    piece: usize,
) -> Result<()> {
    let io = |e: std::io::Error| Error::io(format_args!("{name} at {start}"), &e).in_part();
    let mut under_way = std::collections::VecDeque::new();
    let mut at = 0;
    while at < all {
        let len = piece.min(all - at);
        let given = bytes.get(at..bytes.len().min(at + len)).unwrap_or_default();
        let mut buf = insist::memory(file.core(), len).await.map_err(io)?;
        buf[..given.len()].copy_from_slice(given);
        buf[given.len()..len].fill(0);
        let mut write = file.write_at(start + at as u64, buf, len);
        write.start();
        under_way.push_back(write);
        at += len;
        if under_way.len() >= WRITES_MAX
            && let Some(first) = under_way.pop_front()
        {
            first.await.0.map_err(io)?;
        }
    }
    for write in under_way {
        write.await.0.map_err(io)?;
    }
    Ok(())
}

async fn sync(file: &File) -> Result<()> {
    file.sync_data().await.map_err(|e| Error::io(file.path().display(), &e).in_part())
}

impl WriteState {
    /// Moves the large values of a group to blob files. Their references take their places in the
    /// batches. Suspends for the disk.
    ///
    /// If a blob file cannot be written, its part of the values stays in the batches.
    ///
    /// # Errors
    /// Those that end writing.
    pub async fn store_large_values(&self, group: &mut [Pending]) -> Result<()> {
        let wanted = self.blobs.wanted(group)?;
        if wanted.is_empty() {
            return Ok(());
        }
        for (&family, &bytes) in &wanted {
            self.make_room(family, bytes).await?;
        }
        self.blobs.store(group)?;
        for family in wanted.into_keys() {
            // It is not in the map while it is written.
            let Some(mut file) = self.blobs.open.borrow_mut().remove(&family) else { continue };
            let before = file.written;
            if let Err(error) = file.write().await {
                if !mutant("values_stay_in_failed_file") {
                    restore(group, &file)?;
                }
                self.note_blob_failure(&error);
                (file.end, file.count) = file.written;
                file.is_given_up = true;
                self.blobs.retire(&self.db, file);
                self.changed.notify_all();
                continue;
            }
            let (count, bytes) = (file.written.1 - before.1, file.written.0 - before.0);
            self.blobs.open.borrow_mut().insert(family, file);
            *self.blobs.unflushed.borrow_mut().entry(family).or_default() += bytes;
            self.count(|stats| {
                stats.blob_values += count;
                stats.blob_bytes += bytes;
            });
        }
        Ok(())
    }

    /// A blob file is given up.
    fn note_blob_failure(&self, error: &Error) {
        let after_ns = self.core.now_ns() + CREATE_PAUSE_NS;
        self.blobs.create_after_ns.set(after_ns);
        self.retries.note_blob_heal(error);
        tracing::error!(
            "{}: {error}; a new blob file takes its place; check the device",
            self.dir.path().display()
        );
    }

    /// A flush of a blob file has failed. What it should have made durable may be lost once the
    /// process ends.
    fn note_failed_flush(&self, number: u64, error: &Error) {
        let blobs = &self.blobs;
        self.note_blob_failure(error);
        blobs.unsealed.borrow_mut().remove(&number);
        let given_up = {
            let mut open = blobs.open.borrow_mut();
            let family = open.values().find(|file| file.number == number).map(|file| file.family);
            family.and_then(|family| open.remove(&family))
        };
        if let Some(mut file) = given_up {
            file.is_given_up = true;
            blobs.retire(&self.db, file);
        }
        // At `power` all values that a log names were durable before.
        if self.options.durability == Durability::Process {
            let mut in_logs = blobs.in_logs.borrow_mut();
            in_logs
                .iter_mut()
                .filter(|file| file.number == number)
                .for_each(|file| file.is_failed = true);
            blobs.failures.set(blobs.failures.get() + 1);
        }
        self.changed.notify_all();
    }

    /// Makes sure that a family has an open blob file, with room for `bytes` unless that is more
    /// than a file has. Without a file, its values stay where they are.
    async fn make_room(&self, family: CfId, bytes: u64) -> Result<()> {
        let blobs = &self.blobs;
        let store = blobs.stores.borrow().get(&family).copied();
        let Some(store) = store else { return Ok(()) };
        let version = self.db.version();
        let is_live = |number: u64| {
            let blobs = version.family(family).map(|family| &family.blobs);
            blobs.is_ok_and(|blobs| blobs.iter().any(|(live, _)| *live == number))
        };
        let full = {
            let mut open = blobs.open.borrow_mut();
            match open.get(&family) {
                // The family was cleared, and the file with it.
                Some(file) if !is_live(file.number) => {
                    blobs.unsealed.borrow_mut().remove(&file.number);
                    open.remove(&family);
                    None
                }
                Some(file) if file.end + bytes <= file.limit => return Ok(()),
                Some(file) if bytes > store.file_bytes && file.end < file.limit / 2 => {
                    return Ok(());
                }
                Some(_) => open.remove(&family),
                None => None,
            }
        };
        if let Some(full) = full {
            blobs.retire(&self.db, full);
            self.changed.notify_all();
        }
        let has_table = |version: &Version| {
            let levels = version.family(family).map(|family| &family.levels);
            levels.is_ok_and(|levels| levels.iter().any(|level| !level.slots.is_empty()))
        };
        if !has_table(&version) {
            blobs.wants_anchor.set(true);
            return Ok(());
        }
        if self.core.now_ns() < blobs.create_after_ns.get() {
            return Ok(());
        }
        let Ok(name) = version.family(family).map(|family| &family.name) else { return Ok(()) };
        let file_bytes = store.next_file_bytes(bytes, self.blob_file_bytes(name));
        if !self.wait_for_blob_space(family, file_bytes).await {
            return Ok(());
        }
        match self.create_blob_file(family, file_bytes).await {
            Ok(Some(file)) => drop(blobs.open.borrow_mut().insert(family, file)),
            Ok(None) => {}
            // Its values go to the log.
            Err(error) if error.is_transient() => {
                tracing::debug!("{}: no blob file: {error}", self.dir.path().display());
                blobs.create_after_ns.set(self.core.now_ns() + CREATE_PAUSE_NS);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Creates a blob file and registers it. Returns `None` if the family has no table any more.
    async fn create_blob_file(&self, family: CfId, bytes: u64) -> Result<Option<OpenBlobFile>> {
        let (number, mark) = (self.db.new_number(), self.dir.mark());
        let mut file = match self.prepare_blob_file(number, family, bytes).await {
            Ok(file) => file,
            Err(error) => {
                self.remove_files(vec![FileName::Blob(number)]);
                return Err(error);
            }
        };
        if let Err(error) = self.sync_names(mark).await {
            self.remove_files(vec![FileName::Blob(number)]);
            return Err(error);
        }
        let turn = self.manifest_turn().await?;
        if turn.state().files(family).next().is_none() {
            drop(turn);
            self.remove_files(vec![FileName::Blob(number)]);
            return Ok(None);
        }
        self.blobs.unsealed.borrow_mut().insert(number, file.open.file.clone());
        let in_logs = InLogs { family, number, until_log: u64::MAX, is_failed: false };
        self.blobs.in_logs.borrow_mut().push(in_logs);
        let edit = VersionEdit {
            column_family: family,
            new_blob_files: vec![file.meta.clone()],
            ..VersionEdit::default()
        };
        let shared = file.shared.take();
        let publish = |version: &mut Version| publish(version, family, number, shared);
        let registered = match mutant("blob_file_is_not_registered") {
            true => {
                self.db.publish(publish);
                Ok(())
            }
            false => turn.change(vec![edit], publish).await,
        };
        if let Err(error) = registered {
            self.blobs.in_logs.borrow_mut().retain(|file| file.number != number);
            self.blobs.unsealed.borrow_mut().remove(&number);
            return Err(error);
        }
        self.count(|stats| stats.blob_files += 1);
        Ok(Some(file.open))
    }

    /// A blob file with header and footer, durable except for its name.
    async fn prepare_blob_file(&self, number: u64, family: CfId, bytes: u64) -> Result<Prepared> {
        let name = FileName::Blob(number).to_string();
        let io = |e: std::io::Error| Error::io(&name, &e);
        let durability = self.options.durability;
        let mode = match durability {
            Durability::Process => Mode::Buffered,
            Durability::Power => Mode::Direct,
        };
        let shared = self.dir.create_or_empty(&name, mode).await.map_err(io)?;
        let file = self.core.attach(&shared);
        file.allocate(bytes).await.map_err(io)?;
        let meta = BlobFileMeta::reserved(number, bytes);
        let header = BlobHeader { column_family_id: family, compression: Compression::None };
        let mut footer = vec![0; UNIT as usize - BLOB_FOOTER_BYTES];
        footer.extend(BlobFooter { count: meta.total_count }.encode());
        let mut open = OpenBlobFile {
            number,
            file,
            durability,
            family,
            limit: bytes - UNIT,
            end: BLOB_HEADER_BYTES as u64,
            buffer: header.encode().to_vec(),
            start: 0,
            count: 0,
            written: (BLOB_HEADER_BYTES as u64, 0),
            is_given_up: false,
        };
        write(&open.file, &name, bytes - UNIT, &footer, footer.len(), footer.len()).await?;
        open.write().await?;
        sync(&open.file).await?;
        Ok(Prepared { open, meta, shared: Some(Arc::new(BlobFile { file: shared })) })
    }

    /// Makes durable all values in files that are not sealed. Files of which that fails are given
    /// up: see [`Blobs::failed`].
    pub async fn sync_blob_files(&self) {
        if self.options.durability == Durability::Power || mutant("tables_before_values") {
            return;
        }
        let unsealed: Vec<(u64, File)> = {
            let unsealed = self.blobs.unsealed.borrow();
            unsealed.iter().map(|(&number, file)| (number, file.clone())).collect()
        };
        for (number, file) in unsealed {
            // Another task may have met its failure first.
            if let Err(error) = sync(&file).await
                && self.blobs.is_unsealed(number)
            {
                self.note_failed_flush(number, &error);
            }
        }
    }
}

/// A blob file that is not registered yet.
struct Prepared {
    open: OpenBlobFile,
    meta: BlobFileMeta,
    shared: Option<Arc<BlobFile>>,
}

/// Adds a blob file to a version, or replaces how it is open.
pub(crate) fn publish(version: &mut Version, id: CfId, number: u64, file: Option<Arc<BlobFile>>) {
    let family = version.families.find_mut(id);
    let (Some(family), Some(file)) = (family, file) else { return };
    family.blobs.retain(|(other, _)| *other != number);
    family.blobs.push((number, file));
    family.blobs.sort_by_key(|(number, _)| *number);
}

/// Seals full blob files, and at the end of writing all.
pub(crate) async fn run(state: &WriteState) {
    let blobs = &state.blobs;
    loop {
        let next = blobs.sealing.borrow().first().cloned();
        if state.has_failed() {
            return;
        }
        let Some(next) = next else {
            if state.is_ending() {
                let open = blobs.open.take();
                if open.is_empty() {
                    return;
                }
                blobs.sealing.borrow_mut().extend(open.into_values().map(Rc::new));
                continue;
            }
            let has_work = || !blobs.sealing.borrow().is_empty() || state.is_ending();
            state.changed.wait_until(has_work).await;
            continue;
        };
        match seal(state, &next).await {
            Err(error) if !error.is_transient() => return state.fail(&error),
            // The next opening counts the garbage.
            Err(error) => tracing::debug!("{}: {error}", next.name()),
            Ok(()) => {}
        }
        blobs.unsealed.borrow_mut().remove(&next.number);
        blobs.sealing.borrow_mut().remove(0);
    }
}

/// Ends a file after its last value, and counts the unused part as garbage. A file that was given
/// up keeps its length.
async fn seal(state: &WriteState, full: &OpenBlobFile) -> Result<()> {
    let name = full.name();
    let ended = match full.is_given_up {
        false => end_file(&full.file, &name, full.start, &full.buffer, full.count).await,
        true if state.blobs.is_unsealed(full.number) => match full.durability {
            Durability::Process => sync(&full.file).await,
            Durability::Power => Ok(()),
        },
        true => Ok(()),
    };
    if let Err(error) = &ended
        && state.blobs.is_unsealed(full.number)
    {
        state.note_failed_flush(full.number, error);
    }
    let is_whole = ended.is_ok() && !full.is_given_up;
    // From now on it is read directly, as tables are.
    let file = match is_whole {
        true => state.dir.open(&name).await.ok().map(|file| Arc::new(BlobFile { file })),
        false => None,
    };
    let turn = state.manifest_turn().await?;
    let used = (full.count, full.end - BLOB_HEADER_BYTES as u64);
    let (family, number) = (full.family, full.number);
    let mut edit = VersionEdit { column_family: family, ..VersionEdit::default() };
    let version = state.db.version();
    let own = |level, table: &FileMeta| own_link(&version, family, level, table);
    let links = blob_anchor::release(turn.state(), own, number, &mut edit);
    let unused = blob_garbage::unused(turn.state(), family, number, used, links);
    let Some(unused) = unused else { return Ok(()) };
    edit.blob_garbage.push(unused);
    // It is durable: flushes need not sync it any more.
    state.blobs.unsealed.borrow_mut().remove(&number);
    turn.change(vec![edit], |version| publish(version, family, number, file)).await
}

/// The link of a table to a blob file, without that of an anchor.
fn own_link(version: &Version, family: CfId, level: u32, table: &FileMeta) -> Option<u64> {
    let family = version.families.find(family)?;
    let slots = &family.levels.get(level as usize)?.slots;
    let order = family.comparator;
    let is_before =
        |&slot: &u32| order.cmp_internal(&version.meta(slot).smallest, &table.smallest).is_lt();
    let place = if level == 0 { 0 } else { slots.partition_point(is_before) };
    let own = slots[place..].iter().take(if level == 0 { usize::MAX } else { 1 });
    let mut own = own.map(|&slot| version.meta(slot));
    own.find(|own| own.number == table.number).map(|own| own.oldest_blob_file)
}

/// Writes `tail`, which begins at `start`, and a footer after it, and cuts the file there. All of
/// it is durable afterwards.
pub(crate) async fn end_file(
    file: &File,
    name: &str,
    start: u64,
    tail: &[u8],
    count: u64,
) -> Result<()> {
    let io = |e: std::io::Error| Error::io(name, &e).in_part();
    let mut bytes = tail.to_vec();
    bytes.extend(BlobFooter { count }.encode());
    let all = bytes.len().next_multiple_of(file.alignment().max(1));
    write(file, name, start, &bytes, all, BUFFERED_PIECE).await?;
    // Before the cut, which removes the footer at the old end.
    sync(file).await?;
    file.set_len(start + bytes.len() as u64).await.map_err(io)?;
    sync(file).await
}
