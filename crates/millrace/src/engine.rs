//! The callers' end of a database: chooses a core for each request and hands it over.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use lsm::{BatchWriter, CfId, Unwritten};

use crate::batch::WriteBatch;
use crate::bounds::Limits;
use crate::door::{Door, NoAnswer};
use crate::error::{Error, ErrorKind, Result};
use crate::near::{self, Answer};
use crate::request::{Back, Chunk, Handle, OpenCursor, Read, Write};
use crate::shared::{self, Opened, Shared};
use crate::stats::Stats;
use crate::value::Value;

/// An open database. Dropping it closes the database, which goes on in its own threads.
pub(crate) struct Engine {
    pub shared: Arc<Shared>,
    reads: Box<[Door<Read>]>,
    writes: Door<Write>,
    /// The core of the next snapshot or range.
    next: AtomicUsize,
}

impl Engine {
    pub fn new(shared: Arc<Shared>, Opened { reads, writes }: Opened) -> Engine {
        Engine { shared, reads: reads.into(), writes, next: AtomicUsize::new(0) }
    }

    /// The core that caches a key: it gets all gets of this key.
    #[inline]
    fn core_of(&self, key: &[u8]) -> usize {
        match self.reads.len() {
            1 => 0,
            _ => self.core_of_hash(hash(key)),
        }
    }

    #[inline]
    fn core_of_hash(&self, hash: u64) -> usize {
        (hash % self.reads.len() as u64) as usize
    }

    /// Looks a key up on the caller's thread; `None` if a core must do it.
    #[inline]
    fn get_near(&self, family: CfId, key: &[u8]) -> Option<Answer> {
        let hash = hash(key);
        self.shared.near.get(self.core_of_hash(hash), family, key, hash >> 8)
    }

    /// Counters since the opening.
    pub fn stats(&self) -> Stats {
        Stats { gets_by_caller: self.shared.near.answered() }
    }

    fn next_core(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % self.reads.len()
    }

    #[inline]
    fn check(&self) -> Result<()> {
        if self.shared.is_stopping() {
            return Err(self.shared.no_answer());
        }
        self.check_here()
    }

    /// Whether this process has the threads of the database.
    #[inline]
    pub fn check_here(&self) -> Result<()> {
        if !self.shared.is_here() {
            let text = "the database belongs to the parent of this forked process: open it after \
                        the fork, in the process that uses it";
            return Err(Error::new(ErrorKind::Closed, text));
        }
        Ok(())
    }

    /// Why a core has not answered. One that did so before the stop has panicked.
    #[cold]
    fn explain(&self, NoAnswer: NoAnswer) -> Error {
        match self.shared.is_stopping() {
            true => self.shared.no_answer(),
            false => shared::panicked(),
        }
    }

    async fn read<T>(&self, core: usize, make: impl FnOnce(Back<T>) -> Read) -> Result<T> {
        self.check()?;
        match self.reads[core].call(make).await {
            Ok(answer) => answer,
            Err(no_answer) => Err(self.explain(no_answer)),
        }
    }

    async fn change<T>(&self, make: impl FnOnce(Back<T>) -> Write) -> Result<T> {
        self.check()?;
        match self.writes.call(make).await {
            Ok(answer) => answer,
            Err(no_answer) => Err(self.explain(no_answer)),
        }
    }

    pub async fn get(
        &self,
        family: CfId,
        key: &[u8],
        snapshot: Option<&Arc<Handle>>,
    ) -> Result<Option<Value>> {
        if snapshot.is_none() {
            self.check()?;
            if let Some(Answer { value, yields }) = self.get_near(family, key) {
                if yields {
                    near::yield_now().await;
                }
                return Ok(value);
            }
        }
        let key_owned: Box<[u8]> = key.into();
        match snapshot {
            None => {
                let core = self.core_of(key);
                self.read(core, |back| Read::Get { family, key: key_owned, back }).await
            }
            Some(snapshot) => {
                let at = snapshot.clone();
                let make = |back| Read::GetAt { snapshot: at, family, key: key_owned, back };
                self.read(snapshot.core, make).await
            }
        }
    }

    /// Looks up keys: on the caller's thread, and the others each at the core that caches it.
    pub async fn multi_get(
        &self,
        family: CfId,
        keys: Vec<Box<[u8]>>,
        snapshot: Option<&Arc<Handle>>,
    ) -> Result<Vec<Option<Value>>> {
        let make = |keys: Vec<Box<[u8]>>| {
            let snapshot = snapshot.cloned();
            |back| Read::MultiGet { snapshot, family, keys, back }
        };
        if let Some(snapshot) = snapshot {
            return self.read(snapshot.core, make(keys)).await;
        }
        self.check()?;
        let mut found = vec![None; keys.len()];
        let mut rest = Vec::new();
        for (at, key) in keys.into_iter().enumerate() {
            match self.get_near(family, &key) {
                Some(Answer { value, yields }) => {
                    found[at] = value;
                    if yields {
                        near::yield_now().await;
                    }
                }
                None => rest.push((at, key)),
            }
        }
        let mut parts = vec![(Vec::new(), Vec::new()); self.reads.len()];
        for (at, key) in rest {
            let (places, keys) = &mut parts[self.core_of(&key)];
            places.push(at);
            keys.push(key);
        }
        let (places, asked): (Vec<Vec<usize>>, Vec<_>) = parts
            .into_iter()
            .enumerate()
            .filter(|(_, (places, _))| !places.is_empty())
            .map(|(core, (places, keys))| (places, Box::pin(self.read(core, make(keys)))))
            .unzip();
        for (places, answer) in places.into_iter().zip(all(asked).await) {
            for (at, value) in places.into_iter().zip(answer?) {
                found[at] = value;
            }
        }
        Ok(found)
    }

    /// A snapshot, and its sequence number.
    pub async fn snapshot(&self) -> Result<(Handle, u64)> {
        self.read(self.next_core(), |back| Read::Snapshot { back }).await
    }

    pub async fn open_cursor(
        &self,
        family: CfId,
        limits: Limits,
        reverse: bool,
        snapshot: Option<Arc<Handle>>,
    ) -> Result<Chunk> {
        let core = snapshot.as_ref().map_or_else(|| self.next_core(), |snapshot| snapshot.core);
        let make =
            |back| Read::Open(Box::new(OpenCursor { snapshot, family, limits, reverse, back }));
        self.read(core, make).await
    }

    pub async fn next_chunk(&self, cursor: Handle) -> Result<Chunk> {
        self.read(cursor.core, |back| Read::Next { cursor, back }).await
    }

    pub async fn write(&self, batch: WriteBatch) -> Result<()> {
        let batch = batch.into_inner(self.shared.number)?;
        let bytes = batch.len();
        self.submit(batch, bytes, None).await
    }

    /// Writes a batch that counts as `bytes` until it is done, if its condition holds.
    pub async fn submit(
        &self,
        batch: BatchWriter,
        bytes: usize,
        condition: Option<Box<Unwritten>>,
    ) -> Result<()> {
        self.check()?;
        let weight = self.writes.weigh(bytes).await;
        self.change(|back| Write::Batch { batch, condition, weight, back }).await
    }

    #[cfg(test)]
    pub async fn panic(&self, core: usize, in_task: bool) -> Result<()> {
        self.read(core, |back| Read::Panic { in_task, back }).await
    }

    pub async fn administer<T>(&self, make: impl FnOnce(Back<T>) -> Write) -> Result<T> {
        self.change(make).await
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.shared.is_here() {
            self.shared.stop();
        }
    }
}

/// Waits for all futures, which run at the same time.
async fn all<T, F: Future<Output = T>>(mut futures: Vec<Pin<Box<F>>>) -> Vec<T> {
    let mut results: Vec<Option<T>> = futures.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, result) in futures.iter_mut().zip(&mut results) {
            if result.is_none()
                && let Poll::Ready(value) = future.as_mut().poll(cx)
            {
                *result = Some(value);
            }
        }
        if results.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    results.into_iter().flatten().collect()
}

/// Spreads keys over cores (FNV-1a, with a finish that mixes its low bits).
fn hash(key: &[u8]) -> u64 {
    let hash = key.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    hash ^ (hash >> 32)
}
