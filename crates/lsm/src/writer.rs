//! Writing to a database. One core owns it and puts all batches in order.
//!
//! 1. [`Writer::write`] puts a batch into the queue. The commit task takes what has gathered as one
//!    group, gives each batch its sequence numbers, writes the group to the log and, as the
//!    durability asks, flushes it. Meanwhile the next group gathers.
//! 2. Then the group goes into the memtables, its last sequence is published, and every batch of it
//!    is acknowledged: readers on all cores see whole batches, in order.
//! 3. When the memtables have grown to their limit, new ones and a new log take their place, and
//!    the flush task (`flush.rs`) writes the old ones to tables of level 0. When two generations
//!    of memtables wait for that, so do writes.
//!
//! What must hold: a batch is acknowledged after its group is in the log as promised; the MANIFEST
//! is durable before a log that it makes needless is removed; a failed write to log or MANIFEST
//! ends all writing until the database is opened again, because nobody knows what is there.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

use fs::Dir;
use reactor::{Class, Core};
use rocksfmt::{BatchWriter, Compression, Op, ValueType, WriteBatch, pack};

use crate::db::Db;
use crate::error::{Error, Kind, Result};
use crate::flush;
use crate::manifest_writer::ManifestWriter;
use crate::mem::Mem;
use crate::version::Version;
use crate::wal_writer::{Durability, WalWriter};

/// How to write to a database.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// What an acknowledged write survives.
    pub durability: Durability,
    /// Make the database if there is none.
    pub create: bool,
    /// Bytes of memtables at which they are written to tables.
    pub memtable_bytes: usize,
    /// For the data blocks of tables.
    pub compression: Compression,
}

impl Default for WriteOptions {
    fn default() -> Self {
        WriteOptions {
            durability: Durability::default(),
            create: true,
            memtable_bytes: 64 << 20,
            compression: Compression::None,
        }
    }
}

/// Bytes of batches that go to the log together, as long as there is more than one.
const GROUP_BYTES: usize = 512 << 10;
/// Largest batch in bytes.
const BATCH_BYTES_MAX: usize = 256 << 20;
/// Generations of memtables that may wait for their tables.
const WAITING_MAX: usize = 2;
/// Files of level 0 at which writes wait.
const LEVEL0_FILES_MAX: usize = 20;

/// A batch on its way.
struct Pending {
    batch: BatchWriter,
    done: Rc<Done>,
}

/// What became of a batch: its last sequence.
#[derive(Default)]
struct Done {
    result: RefCell<Option<Result<u64>>>,
    waker: Cell<Option<Waker>>,
}

impl Done {
    fn set(&self, result: Result<u64>) {
        self.result.replace(Some(result));
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// Lets one task sleep until another has something for it.
#[derive(Default)]
pub(crate) struct Signal(RefCell<Vec<Waker>>);

impl Signal {
    pub fn ring(&self) {
        for waker in self.0.take() {
            waker.wake();
        }
    }

    /// Waits until `ready` holds; asked anew after every ring.
    pub async fn until(&self, ready: impl Fn() -> bool) {
        poll_fn(|cx| {
            if ready() {
                return Poll::Ready(());
            }
            self.0.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// Memtables that are to become tables, and the first log that is not theirs.
pub(crate) struct Generation {
    pub mems: Vec<(u32, Arc<Mem>)>,
    pub next_log: u64,
}

pub(crate) struct Inner {
    pub core: Core,
    pub dir: Dir,
    pub db: Db,
    pub options: WriteOptions,
    queue: RefCell<VecDeque<Pending>>,
    queued: Signal,
    pub waiting: RefCell<VecDeque<Generation>>,
    /// Generations that have become tables.
    pub gone: Cell<u64>,
    /// Rings when a generation has come, and when one has gone.
    pub moved: Signal,
    next_file: Cell<u64>,
    failed: RefCell<Option<Error>>,
    pub closing: Cell<bool>,
    /// Tasks that are still at work.
    working: Cell<usize>,
    ended: Signal,
}

impl Inner {
    /// A number that no file has.
    pub fn new_number(&self) -> u64 {
        let number = self.next_file.get();
        self.next_file.set(number + 1);
        number
    }

    pub fn next_file(&self) -> u64 {
        self.next_file.get()
    }

    /// Changes the version for all who begin to read from now on.
    pub fn publish(&self, change: impl FnOnce(&mut Version)) {
        let shared = &*self.db.0;
        let mut version = Version::clone(&shared.current.load());
        change(&mut version);
        version.epoch += 1;
        let epoch = version.epoch;
        shared.current.store(Arc::new(version));
        shared.epoch.store(epoch, Ordering::Release);
    }

    /// Ends all writing.
    pub fn fail(&self, error: &Error) {
        tracing::error!("{}: writing ends: {error}", self.dir.path().display());
        self.failed.borrow_mut().get_or_insert_with(|| error.clone());
        for pending in self.queue.take() {
            pending.done.set(Err(error.clone()));
        }
        self.queued.ring();
        self.moved.ring();
    }

    pub fn has_failed(&self) -> bool {
        self.failed.borrow().is_some()
    }

    fn ends(&self) {
        self.working.set(self.working.get() - 1);
        self.ended.ring();
    }
}

/// The writing end of a database, on the core that opened it for writing; see the module text.
/// Clones are the same.
#[derive(Clone)]
pub struct Writer(Rc<Inner>);

impl Writer {
    /// Starts to write: `first_log` is a new log's number, `mems` what was recovered.
    pub(crate) async fn start(
        core: &Core,
        dir: &Dir,
        db: &Db,
        options: WriteOptions,
        manifest: ManifestWriter,
        next_file: u64,
    ) -> Result<Writer> {
        let inner = Rc::new(Inner {
            core: core.clone(),
            dir: dir.clone(),
            db: db.clone(),
            options,
            queue: RefCell::default(),
            queued: Signal::default(),
            waiting: RefCell::default(),
            gone: Cell::new(0),
            moved: Signal::default(),
            next_file: Cell::new(next_file),
            failed: RefCell::new(None),
            closing: Cell::new(false),
            working: Cell::new(2),
            ended: Signal::default(),
        });
        let log =
            WalWriter::create(core, dir, inner.new_number(), inner.options.durability).await?;
        // What was recovered from older logs is the first generation to become tables.
        let mems = db
            .version()
            .families
            .iter()
            .flat_map(|family| family.mems.iter().map(|mem| (family.id, mem.clone())))
            .collect();
        inner.waiting.borrow_mut().push_back(Generation { mems, next_log: log.number() });
        let live = new_memtables(&inner);
        let commit = inner.clone();
        core.spawn(Class::Foreground, async move {
            commit_all(&commit, log, live).await;
            commit.ends();
        });
        let flush = inner.clone();
        core.spawn(Class::Background, async move {
            flush::run(&flush, manifest).await;
            flush.ends();
        });
        Ok(Writer(inner))
    }

    /// Writes a batch, all or nothing. Suspends until it is as durable as was asked for and
    /// visible; returns the sequence number of its last operation.
    ///
    /// # Errors
    /// [`Kind::UnknownColumnFamily`], [`Kind::Unsupported`] for range deletions, [`Kind::Memory`]
    /// for a batch of more than 256 MiB, and [`Kind::Io`] when the log cannot be written: then it
    /// is not known whether the batch will be there after the next opening.
    pub async fn write(&self, mut batch: BatchWriter) -> Result<u64> {
        let inner = &*self.0;
        if let Some(error) = &*inner.failed.borrow() {
            return Err(error.clone());
        }
        if inner.closing.get() {
            return Err(Error::new(Kind::Io, "the database is being closed"));
        }
        if batch.len() > BATCH_BYTES_MAX {
            let text = format!("a batch of {} bytes, at most {BATCH_BYTES_MAX}", batch.len());
            return Err(Error::new(Kind::Memory, text));
        }
        self.check(batch.finish(0))?;
        if batch.is_empty() {
            return Ok(inner.db.visible());
        }
        let done = Rc::new(Done::default());
        inner.queue.borrow_mut().push_back(Pending { batch, done: done.clone() });
        inner.queued.ring();
        poll_fn(|cx| match done.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                done.waker.set(Some(cx.waker().clone()));
                Poll::Pending
            }
        })
        .await
    }

    /// Only what can be applied goes into the log.
    fn check(&self, batch: &[u8]) -> Result<()> {
        let format = |e: rocksfmt::Error| Error::format("a batch", &e);
        let version = self.0.db.version();
        for op in WriteBatch::parse(batch).map_err(format)?.ops() {
            let (_, op) = op.map_err(format)?;
            if let Some(id) = op.column_family() {
                version.family(id)?;
            }
            if !matches!(op, Op::Put { .. } | Op::Delete { .. }) {
                return Err(Error::new(Kind::Unsupported, format!("writing {op:?}")));
            }
        }
        Ok(())
    }

    /// Sets a key of the default column family; see [`Writer::write`].
    ///
    /// # Errors
    /// As for [`Writer::write`].
    pub async fn put(&self, key: &[u8], value: &[u8]) -> Result<u64> {
        let mut batch = BatchWriter::new();
        batch.put(0, key, value);
        self.write(batch).await
    }

    /// Deletes a key of the default column family; see [`Writer::write`].
    ///
    /// # Errors
    /// As for [`Writer::write`].
    pub async fn delete(&self, key: &[u8]) -> Result<u64> {
        let mut batch = BatchWriter::new();
        batch.delete(0, key);
        self.write(batch).await
    }

    /// Ends writing: what was handed over before is still written. Suspends until that is done and
    /// no table is being written. What is in memtables stays in the log.
    ///
    /// # Errors
    /// What ended the writing earlier, if something did.
    pub async fn close(&self) -> Result<()> {
        let inner = &*self.0;
        inner.closing.set(true);
        inner.queued.ring();
        inner.moved.ring();
        inner.ended.until(|| inner.working.get() == 0).await;
        match &*inner.failed.borrow() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

/// New memtables for all column families that can be written, in the version that readers take.
fn new_memtables(inner: &Inner) -> BTreeMap<u32, memtable::Writer> {
    let mut live = BTreeMap::new();
    inner.publish(|version| {
        for family in version.families.iter_mut().filter(|family| family.refused.is_none()) {
            let (writer, table) =
                memtable::Memtable::new(family.comparator, usize::MAX, inner.core.random_u64());
            family.mems.insert(0, Arc::new(Mem::Live(table)));
            live.insert(family.id, writer);
        }
    });
    live
}

async fn commit_all(inner: &Inner, mut log: WalWriter, mut live: BTreeMap<u32, memtable::Writer>) {
    let mut group = Vec::new();
    if inner.options.durability == Durability::Power {
        // What was recovered is not known to be durable: after a flush that failed, the page cache
        // shows what no later flush writes. Were a power cut to take it, what is acknowledged on
        // top of it would lie behind a hole. So it is written anew first, to a table.
        inner.moved.until(|| inner.gone.get() > 0 || inner.has_failed()).await;
    }
    loop {
        let idle = || inner.queue.borrow().is_empty();
        inner.queued.until(|| !idle() || inner.closing.get() || inner.has_failed()).await;
        if idle() {
            return;
        }
        let result = async {
            if are_full(inner, &live) {
                log = switch(inner, &mut live).await?;
            }
            take_group(inner, &mut group);
            let first = inner.db.visible() + 1;
            let mut next = first;
            for pending in &mut group {
                log.add(pending.batch.finish(next));
                next += u64::from(pending.batch.count());
            }
            log.commit(next).await?;
            let mut sequence = first;
            for pending in &mut group {
                apply(pending.batch.finish(sequence), &mut live)?;
                sequence += u64::from(pending.batch.count());
            }
            inner.db.0.sequence.store(next - 1, Ordering::Release);
            Ok(first)
        };
        match result.await {
            Ok(first) => {
                let mut sequence = first - 1;
                for pending in group.drain(..) {
                    sequence += u64::from(pending.batch.count());
                    pending.done.set(Ok(sequence));
                }
            }
            Err(error) => {
                for pending in group.drain(..) {
                    pending.done.set(Err(Error::clone(&error)));
                }
                inner.fail(&error);
                return;
            }
        }
    }
}

/// Small entries take much more memory than their bytes; memory is reserved in chunks that are
/// larger than a small limit.
fn are_full(inner: &Inner, live: &BTreeMap<u32, memtable::Writer>) -> bool {
    let sum = |of: fn(&memtable::Memtable) -> usize| -> usize {
        live.values().map(|writer| of(writer.memtable())).sum()
    };
    let limit = inner.options.memtable_bytes;
    sum(memtable::Memtable::memory) >= limit && sum(memtable::Memtable::bytes) >= limit / 4
}

fn take_group(inner: &Inner, group: &mut Vec<Pending>) {
    let mut queue = inner.queue.borrow_mut();
    let mut bytes = 0;
    while let Some(next) = queue.front() {
        bytes += next.batch.len();
        if !group.is_empty() && bytes > GROUP_BYTES {
            return;
        }
        group.extend(queue.pop_front());
    }
}

/// Puts a batch into the memtables. It was checked, and they have no limit of their own.
fn apply(batch: &[u8], live: &mut BTreeMap<u32, memtable::Writer>) -> Result<()> {
    let format = |e: rocksfmt::Error| Error::format("a batch", &e);
    for op in WriteBatch::parse(batch).map_err(format)?.ops() {
        let (sequence, op) = op.map_err(format)?;
        let (cf, key, kind, value) = match op {
            Op::Put { cf, key, value } => (cf, key, ValueType::Value, value),
            Op::Delete { cf, key } => (cf, key, ValueType::Deletion, &b""[..]),
            _ => continue,
        };
        let Some(writer) = live.get_mut(&cf) else { continue };
        writer
            .insert(key, pack(sequence, kind as u8), value)
            .map_err(|e| Error::new(Kind::Memory, e.to_string()))?;
    }
    Ok(())
}

/// Whether so many files wait to be merged that no more may come: reads ask each of them, and
/// RocksDB stops its writers at 36.
fn level0_is_full(inner: &Inner) -> bool {
    let version = inner.db.0.current.load();
    version.families.iter().any(|family| {
        family.levels.first().is_some_and(|level| level.slots.len() >= LEVEL0_FILES_MAX)
    })
}

/// Begins a new log and new memtables; the old ones wait to become tables.
async fn switch(inner: &Inner, live: &mut BTreeMap<u32, memtable::Writer>) -> Result<WalWriter> {
    let full = || inner.waiting.borrow().len() >= WAITING_MAX || level0_is_full(inner);
    inner.moved.until(|| !full() || inner.has_failed()).await;
    if let Some(error) = &*inner.failed.borrow() {
        return Err(error.clone());
    }
    let number = inner.new_number();
    let log = WalWriter::create(&inner.core, &inner.dir, number, inner.options.durability).await?;
    let version = inner.db.version();
    let mems = version
        .families
        .iter()
        .filter(|family| live.contains_key(&family.id))
        .filter_map(|family| Some((family.id, family.mems.first()?.clone())))
        .collect();
    *live = new_memtables(inner);
    inner.waiting.borrow_mut().push_back(Generation { mems, next_log: number });
    inner.moved.ring();
    Ok(log)
}
