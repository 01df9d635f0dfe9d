//! The `kv` commands that write to a directory: a core of this process opens it as a node would,
//! with the exclusive lock, so that the number of keys stays exact.

use std::collections::VecDeque;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;

use ::kv::{Answer, Change, Shard};
use lsm::{Db, Durability, OpenOptions, WriteOptions};
use reactor::Core;

use super::import::{Imported, Input};
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

/// A database opened for writing.
struct Opened {
    path: PathBuf,
    shard: Shard,
    _db: Db,
}

async fn open(core: &Core, target: &Target, write: WriteOptions) -> Result<Opened, Failure> {
    let path = target.location.data.clone().expect("the parser requires a place");
    let options = OpenOptions { cache_bytes: POOL_BYTES / 4, ..OpenOptions::default() };
    let write = WriteOptions { adopt: target.adopt, ..write };
    let (db, writer) = node::open_for_writing(core, &path, options, write).await?;
    let shard = Shard::new(core, db.attach(core), writer);
    Ok(Opened { path, shard, _db: db })
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
        Answer::Ok | Answer::Null | Answer::Bulk(_) | Answer::Old(_) => Ok(0),
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

/// `kv import --data`. Batches are not flushed to the disk separately; one flush at the end covers
/// all.
pub fn import(input: Input, target: Target) -> Result<Imported, Failure> {
    let io = target.io;
    on_core(io, async move |core| {
        // Before the database is created: a missing input should leave nothing behind.
        let mut input = input.open()?;
        let write = WriteOptions { durability: Durability::Process, ..WriteOptions::default() };
        let opened = open(&core, &target, write).await?;
        let mut batches = Batches { shard: &opened.shard, flying: VecDeque::new() };
        let mut imported = Imported::default();
        let read = async {
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
                    batches.send(std::mem::replace(&mut batch, Batch::None)).await?;
                    size = (0, 0);
                }
                size = (size.0 + 1, size.1 + step.bytes());
                batch.add(step);
            };
            // Entries before a mistake in the input are imported.
            batches.send(batch).await?;
            mistake.map_or(Ok(()), Err)
        };
        let read = read.await;
        let sync = opened.shard.change(Change::sync());
        let landed = batches.land(0).await;
        let synced = number(sync.await);
        let done = read.and(landed).and(synced.map(drop)).map(|()| imported);
        input.finish();
        opened.close(done).await
    })
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
