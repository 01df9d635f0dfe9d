//! The `kv` commands that write to a directory: a core of this process opens it as a node would,
//! with the exclusive lock, so that the number of keys stays exact.

use std::collections::VecDeque;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;

use ::kv::{Answer, Change, Shard};
use lsm::{CfId, Comparator, Db, Durability, IterOptions, OpenOptions, WriteOptions};
use reactor::Core;

use super::import::{Imported, Input, Reading};
use super::steps::Step;
use crate::args::Target;
use crate::failure::Failure;
use crate::tool_core::{POOL_BYTES, on_core};

/// Bytes of keys and values in one batch of an import.
const BATCH_BYTES: usize = 1 << 20;
/// Keys in one batch of an import.
const BATCH_KEYS: usize = 1000;
/// Batches of an import in flight.
const BATCHES: usize = 8;

/// Sorted entries of at least this many bytes are loaded into tables directly.
const LOAD_BYTES_MIN: usize = 1 << 20;
/// Bytes of entries after which a load is made durable, so that an interrupted import can be
/// resumed from there.
const LOAD_BYTES: u64 = 256 << 20;

/// A database opened for writing.
struct Opened {
    path: PathBuf,
    shard: Shard,
    db: Db,
    family: CfId,
}

async fn open(core: &Core, target: &Target, write: WriteOptions) -> Result<Opened, Failure> {
    let path = target.location.data.clone().expect("the parser requires a place");
    let options = OpenOptions { cache_bytes: POOL_BYTES / 4, ..OpenOptions::default() };
    let write = WriteOptions { adopt: target.adopt, ..write };
    let name = target.column_family.as_deref().unwrap_or("default");
    let agrees = async |db: Option<&Db>| node::family_of(db, name);
    let (db, writer, family) = node::open_for_writing(core, &path, options, write, agrees).await?;
    let shard = Shard::of_family(core, db.attach(core), writer, family);
    Ok(Opened { path, shard, db, family })
}

impl Opened {
    /// Closes the database. If both the command and the closing fail, returns the command's
    /// failure.
    async fn close<T>(self, done: Result<T, Failure>) -> Result<T, Failure> {
        let closed = self.shard.close().await;
        let done = done?;
        closed.map_err(|error| node::explain(&self.path, &error))?;
        Ok(done)
    }
}

/// The number in an answer; 0 if it has none.
fn number(answer: Answer) -> Result<u64, Failure> {
    match answer {
        Answer::Integer(number) => Ok(number.unsigned_abs()),
        Answer::Refused(text) => Err(Failure::new(text)),
        Answer::Failed(text) => Err(Failure::new(text)),
        Answer::Ok | Answer::Null | Answer::Bulk(_) | Answer::Integers(_) | Answer::Old(_) => Ok(0),
    }
}

/// `kv put --data`.
pub fn put(key: Vec<u8>, value: Vec<u8>, target: Target) -> Result<(), Failure> {
    let io = target.io;
    on_core(io, async move |core| {
        let opened = open(&core, &target, WriteOptions::default()).await?;
        let answer = opened.shard.change(Change::put(&key, &value)).await;
        opened.close(number(answer).map(drop)).await
    })
}

/// `kv del --data`: how many of the keys existed.
pub fn delete(keys: Vec<Vec<u8>>, target: Target) -> Result<u64, Failure> {
    let io = target.io;
    on_core(io, async move |core| {
        let write = WriteOptions { create: false, ..WriteOptions::default() };
        let opened = open(&core, &target, write).await?;
        let change = Change::delete(keys.iter().map(Vec::as_slice));
        let answer = opened.shard.change(change).await;
        opened.close(number(answer)).await
    })
}

/// `kv import --data`. Sorted entries beyond all keys of the database become tables directly.
/// Others are written in batches, which are not flushed to the disk separately; one flush at the
/// end covers all.
pub fn import(input: Input, resume: bool, target: Target) -> Result<Imported, Failure> {
    let io = target.io;
    on_core(io, async move |core| {
        // Before anything is written: an input without an entry should change nothing.
        let mut input = Sorted::new(input.open()?);
        input.look_ahead()?;
        let write = WriteOptions { durability: Durability::Process, ..WriteOptions::default() };
        let opened = open(&core, &target, write).await?;
        let mut imported = Imported::default();
        let read = async {
            if resume {
                imported.skipped = opened.skip(&core, &mut input).await?;
            }
            opened.load(&mut input, &mut imported).await?;
            let mut batches = Batches { shard: &opened.shard, flying: VecDeque::new() };
            let written = batches.all(&mut input, &mut imported).await;
            let sync = opened.shard.change(Change::sync());
            let landed = batches.land(0).await;
            let synced = number(sync.await);
            written.and(landed).and(synced.map(drop))
        };
        let done = read.await;
        input.finish();
        opened.close(done.map(|()| imported)).await
    })
}

impl Opened {
    /// The order of the family's keys.
    fn order(&self) -> Comparator {
        let families = self.shard.column_families();
        let own = families.iter().find(|family| family.id == self.family);
        let order = own.and_then(|own| Comparator::from_name(own.comparator.as_bytes()).ok());
        order.unwrap_or_default()
    }

    /// Skips the entries of a sorted input up to the last key of the database: an import that was
    /// interrupted has written them. Returns how many.
    async fn skip(&self, core: &Core, input: &mut Sorted) -> Result<u64, Failure> {
        let reader = self.db.attach(core);
        let last = async {
            let mut iter = reader.iter(self.family, IterOptions::default())?;
            iter.seek_to_last().await?;
            Ok(iter.valid().then(|| (iter.key().to_vec(), iter.value().to_vec())))
        };
        let last: lsm::Result<_> = last.await;
        let Some((last, content)) = last.map_err(|error| node::explain(&self.path, &error))? else {
            return Ok(0);
        };
        let order = self.order();
        let is_less = |a: &[u8], b: &[u8]| order.cmp_user(a, b).is_lt();
        let mut skipped = 0;
        let mut before: Option<Vec<u8>> = None;
        while let Some(step) = input.next()? {
            match step {
                Step::Put(key, value) if is_less(&last, &key) => {
                    input.put_back(Step::Put(key, value));
                    break;
                }
                Step::Put(key, value) if key == last && value != content => {
                    return Err(Failure::new(
                        "cannot resume: the database's last key has another value",
                    )
                    .hint("this is not the input that was imported; import it without --resume"));
                }
                Step::Put(key, _) if before.as_ref().is_none_or(|before| is_less(before, &key)) => {
                    before = Some(key);
                    skipped += 1;
                }
                _ => {
                    return Err(Failure::new("cannot resume: the input is not sorted")
                        .hint("import all of it, without --resume"));
                }
            }
        }
        Ok(skipped)
    }

    /// Loads entries into tables, as long as their keys ascend and the database has nothing there.
    /// A few entries are left to be written in a batch, because small tables cost more.
    async fn load(&self, input: &mut Sorted, imported: &mut Imported) -> Result<(), Failure> {
        let bytewise = self.order() == Comparator::Bytewise;
        while bytewise && let Some(first) = input.sorted_from(LOAD_BYTES_MIN) {
            let explain = |error: lsm::Error| Failure::from(node::explain(&self.path, &error));
            if !self.shard.has_nothing_from(&first).map_err(explain)? {
                return Ok(());
            }
            let mut loaded = Imported::default();
            let mut mistake = None;
            let mut last: Option<Vec<u8>> = None;
            let load = self.shard.bulk_load(async |key, value| {
                let step = match input.next() {
                    Ok(step) => step,
                    Err(failure) => {
                        mistake = Some(failure);
                        None
                    }
                };
                match step {
                    Some(Step::Put(next, content))
                        if loaded.bytes < LOAD_BYTES
                            && last.as_ref().is_none_or(|last| *last < next) =>
                    {
                        key.extend_from_slice(&next);
                        value.extend_from_slice(&content);
                        loaded.entries += 1;
                        loaded.bytes += (next.len() + content.len()) as u64;
                        last = Some(next);
                        Ok(true)
                    }
                    other => {
                        other.into_iter().for_each(|step| input.put_back(step));
                        Ok(false)
                    }
                }
            });
            load.await.map_err(explain)?;
            // Entries before a mistake in the input are imported.
            imported.entries += loaded.entries;
            imported.bytes += loaded.bytes;
            imported.loaded += loaded.entries;
            mistake.map_or(Ok(()), Err)?;
        }
        Ok(())
    }
}

/// An input, of which some steps may be looked at before they are taken.
struct Sorted {
    input: Reading,
    ahead: VecDeque<Step>,
    /// The mistake that comes after these.
    mistake: Option<Failure>,
}

impl Sorted {
    fn new(input: Reading) -> Sorted {
        Sorted { input, ahead: VecDeque::new(), mistake: None }
    }

    fn next(&mut self) -> Result<Option<Step>, Failure> {
        match (self.ahead.pop_front(), self.mistake.take()) {
            (Some(step), mistake) => {
                self.mistake = mistake;
                Ok(Some(step))
            }
            (None, Some(mistake)) => Err(mistake),
            (None, None) => self.input.next(),
        }
    }

    /// Reads the first entry, unless it has been read.
    fn look_ahead(&mut self) -> Result<(), Failure> {
        let first = self.next()?;
        first.into_iter().for_each(|step| self.put_back(step));
        Ok(())
    }

    fn put_back(&mut self, step: Step) {
        self.ahead.push_front(step);
    }

    /// The first key, if the input goes on with sorted entries of this many bytes.
    fn sorted_from(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let (mut sum, mut at) = (0, 0);
        if self.mistake.is_some() {
            return None;
        }
        while sum < bytes {
            if at == self.ahead.len() {
                match self.input.next() {
                    Ok(Some(step)) => self.ahead.push_back(step),
                    Ok(None) => return None,
                    Err(mistake) => {
                        self.mistake = Some(mistake);
                        return None;
                    }
                }
            }
            let rises = match (at.checked_sub(1).map(|before| &self.ahead[before]), &self.ahead[at])
            {
                (None, Step::Put(..)) => true,
                (Some(Step::Put(before, _)), Step::Put(key, _)) => before < key,
                _ => false,
            };
            if !rises {
                return None;
            }
            sum += self.ahead[at].bytes();
            at += 1;
        }
        match self.ahead.front() {
            Some(Step::Put(key, _)) => Some(key.clone()),
            _ => None,
        }
    }

    fn finish(self) {
        self.input.finish();
    }
}

/// A batch being gathered.
enum Batch {
    None,
    Puts(Change),
    Deletes(Vec<Vec<u8>>),
}

impl Batch {
    fn add(&mut self, step: Step) {
        match (&mut *self, step) {
            (Batch::Puts(change), Step::Put(key, value)) => change.also_put(&key, &value),
            (Batch::Deletes(keys), Step::Delete(key)) => keys.push(key),
            (_, Step::Put(key, value)) => *self = Batch::Puts(Change::put(&key, &value)),
            (_, Step::Delete(key)) => *self = Batch::Deletes(vec![key]),
        }
    }
}

/// Batches that the shard has not answered yet.
struct Batches<'a> {
    shard: &'a Shard,
    flying: VecDeque<Pin<Box<dyn Future<Output = Answer>>>>,
}

impl Batches<'_> {
    /// Writes the rest of an input.
    async fn all(&mut self, input: &mut Sorted, imported: &mut Imported) -> Result<(), Failure> {
        let mut batch = Batch::None;
        let mut size = (0, 0);
        let mistake = loop {
            let step = match input.next() {
                Ok(Some(step)) => step,
                ended => break ended.err(),
            };
            imported.count(&step);
            let fits = matches!(
                (&batch, &step),
                (Batch::Puts(_), Step::Put(..)) | (Batch::Deletes(_), Step::Delete(_))
            );
            if !fits || size.0 >= BATCH_KEYS || size.1 + step.bytes() > BATCH_BYTES {
                self.send(std::mem::replace(&mut batch, Batch::None)).await?;
                size = (0, 0);
            }
            size = (size.0 + 1, size.1 + step.bytes());
            batch.add(step);
        };
        // Entries before a mistake in the input are imported.
        self.send(batch).await?;
        mistake.map_or(Ok(()), Err)
    }

    /// Submits a batch as soon as fewer than [`BATCHES`] are in flight.
    async fn send(&mut self, batch: Batch) -> Result<(), Failure> {
        let change = match batch {
            Batch::None => return Ok(()),
            Batch::Puts(change) => change,
            Batch::Deletes(keys) => Change::delete(keys.iter().map(Vec::as_slice)),
        };
        self.land(BATCHES - 1).await?;
        self.flying.push_back(Box::pin(self.shard.change(change)));
        Ok(())
    }

    /// Waits until at most `left` batches are in flight.
    async fn land(&mut self, left: usize) -> Result<(), Failure> {
        while self.flying.len() > left {
            let first = self.flying.pop_front().expect("the queue is not empty");
            number(first.await)?;
        }
        Ok(())
    }
}
