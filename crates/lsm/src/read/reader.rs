//! One core's access to a database: its view, its channel to every file, its cache.
//!
//! A block is taken from the core's cache, else from a flight in progress, else read through the
//! core's own ring. Cores share only data that never changes (tables, indexes, filters), so two
//! reading cores share no cache line that either writes.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

use fs::{File, Slice};
use reactor::{Buf, Class, Core, Promise, Spare};
use rocksfmt::{
    BLOCK_TRAILER_BYTES, BlockHandle, BlockSum, Comparator, Compression, Decompressor, HeadLookup,
    compression_byte, head_lookup,
};

use crate::db::{CfId, Db};
use crate::error::{Error, Kind, Result};
use crate::read::ahead::{Chunk, Chunks};
use crate::read::block::{Block, BlockKind};
use crate::read::cache::{BlockCache, BlockKey};
use crate::read::flight::{self, Flights, Role};
use crate::read::iter::{Iter, IterOptions};
use crate::read::snapshot::{Registry, Snapshot};
use crate::read::value::Value;
use crate::table::{BLOCK_BYTES_MAX, Table};
use crate::version::{Slot, Version};

/// One core's view of a version: its own handle on every file.
pub(crate) struct View {
    pub version: Arc<Version>,
    files: Vec<Option<File>>,
    /// The blob files of each family, in the order of [`crate::version::Family::blobs`].
    pub blobs: Vec<Vec<File>>,
}

impl View {
    /// Attaches this core to a version's files; reuses the handles of an older view.
    fn new(core: &Core, version: Arc<Version>, older: Option<&View>) -> View {
        let known = |at: usize, table: &Arc<Table>| match older?.version.slots.get(at)? {
            Slot::Open(other) if Arc::ptr_eq(other, table) => older?.files[at].clone(),
            _ => None,
        };
        let attach = |(at, slot): (usize, &Slot)| match slot {
            Slot::Open(table) => known(at, table).or_else(|| Some(core.attach(&table.file))),
            Slot::Broken { .. } | Slot::Free => None,
        };
        let files = version.slots.iter().enumerate().map(attach).collect();
        let blobs = version
            .families
            .iter()
            .map(|family| family.blobs.iter().map(|(_, blob)| core.attach(&blob.file)).collect())
            .collect();
        View { version, files, blobs }
    }

    /// This core's handle on an open table's file.
    #[inline]
    pub fn file(&self, slot: u32) -> Result<&File> {
        match &self.files[slot as usize] {
            Some(file) => Ok(file),
            None => Err(self
                .version
                .table(slot)
                .err()
                .unwrap_or_else(|| Error::new(Kind::Corruption, "an open table has no file"))),
        }
    }
}

impl Db {
    /// A reader for one core, with a cache of its own. A task of the core renews its view while the
    /// core does not read: an old view would hold memtables and deleted files.
    pub fn attach(&self, core: &Core) -> Reader {
        let reader = Reader::new(self, core);
        core.spawn(Class::Background, reader.keep_view_new());
        reader
    }
}

/// Counters of one core's reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReaderStats {
    /// Point lookups, including those of multi-gets.
    pub gets: u64,
    /// Point lookups that found the key.
    pub found: u64,
    /// Iterator seeks.
    pub seeks: u64,
    /// Iterator steps.
    pub steps: u64,
    /// Tombstones and covered or invisible entries that iterators skipped.
    pub skipped: u64,
    /// Blocks found in the cache.
    pub cache_hits: u64,
    /// Blocks that were read.
    pub cache_misses: u64,
    /// Blocks that another request of this core was already reading.
    pub shared_reads: u64,
    /// Bytes read ahead for iterators.
    pub read_ahead_bytes: u64,
    /// Tables that a filter excluded from a lookup.
    pub filter_negative: u64,
    /// Blocks read again after a failed checksum.
    pub rereads: u64,
    /// Bytes in the cache now.
    pub cache_bytes: u64,
    /// Budget of the cache in bytes.
    pub cache_budget: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        #[derive(Default)]
        pub(crate) struct Counters { $(pub $name: Cell<u64>),* }
        impl Counters {
            fn read(&self) -> ReaderStats {
                ReaderStats { $($name: self.$name.get(),)* ..ReaderStats::default() }
            }
        }
    };
}
counters!(
    gets,
    found,
    seeks,
    steps,
    skipped,
    cache_hits,
    cache_misses,
    shared_reads,
    read_ahead_bytes,
    filter_negative,
    rereads
);

/// Adds to a counter.
#[inline]
pub(crate) fn count(counter: &Cell<u64>, n: u64) {
    counter.set(counter.get() + n);
}

pub(crate) struct Inner {
    pub core: Core,
    pub db: Db,
    view: RefCell<Rc<View>>,
    pub counters: Counters,
    cache: RefCell<BlockCache>,
    flights: RefCell<Flights>,
    /// The chunks that iterators have read ahead.
    read_ahead: RefCell<Vec<Weak<Chunks>>>,
    decompressor: RefCell<Decompressor>,
    snapshots: Rc<Registry>,
    verify: bool,
}

/// A stored block after its check.
enum Stored {
    Plain(Block),
    Packed(Packed),
}

/// A block to decompress.
struct Packed {
    handle: BlockHandle,
    kind: BlockKind,
    codec: Compression,
    payload: Slice,
    /// Length of the decompressed block.
    len: usize,
}

/// A reader and the view that a lookup or an iterator uses until it ends.
#[derive(Clone)]
pub(crate) struct At {
    pub inner: Rc<Inner>,
    pub view: Rc<View>,
}

/// One core's handle on a database. Clones are the same reader.
#[derive(Clone)]
pub struct Reader(pub(crate) Rc<Inner>);

impl Reader {
    pub(crate) fn new(db: &Db, core: &Core) -> Reader {
        Reader::with_cache(db, core, db.options().cache_bytes)
    }

    /// A reader without a cache, for background work.
    pub(crate) fn uncached(db: &Db, core: &Core) -> Reader {
        Reader::with_cache(db, core, 0)
    }

    fn with_cache(db: &Db, core: &Core, cache_bytes: usize) -> Reader {
        let inner = Rc::new(Inner {
            core: core.clone(),
            db: db.clone(),
            view: RefCell::new(Rc::new(View::new(core, db.version(), None))),
            counters: Counters::default(),
            cache: RefCell::new(BlockCache::new(cache_bytes)),
            flights: RefCell::default(),
            read_ahead: RefCell::default(),
            decompressor: RefCell::default(),
            snapshots: Registry::new(core, db),
            verify: db.options().verify_checksums,
        });
        let weak: Weak<Inner> = Rc::downgrade(&inner);
        core.pool().add_spare(weak);
        Reader(inner)
    }

    /// The reader with the newest view.
    #[inline]
    pub(crate) fn at(&self) -> At {
        let inner = &*self.0;
        if inner.view.borrow().version.epoch != inner.db.0.epoch.load(Ordering::Acquire) {
            self.renew();
        }
        At { inner: self.0.clone(), view: inner.view.borrow().clone() }
    }

    /// The reader with a version that need not be the newest.
    pub(crate) fn at_version(&self, version: &Arc<Version>) -> At {
        let view = View::new(&self.0.core, version.clone(), None);
        At { inner: self.0.clone(), view: Rc::new(view) }
    }

    /// A future that renews the view whenever the writer has published a version, also while nobody
    /// reads. It ends at the first change after the last handle on this reader is gone.
    pub(crate) fn keep_view_new(&self) -> impl Future<Output = ()> + use<> {
        let (reader, db) = (Rc::downgrade(&self.0), Arc::downgrade(&self.0.db.0));
        let mut registered = false;
        std::future::poll_fn(move |cx| {
            let Some(db) = db.upgrade() else { return Poll::Ready(()) };
            let mine = cx.waker();
            let Some(inner) = reader.upgrade() else {
                let others = |all: &Arc<Vec<Waker>>| -> Vec<Waker> {
                    all.iter().filter(|other| !other.will_wake(mine)).cloned().collect()
                };
                db.renewals.rcu(others);
                return Poll::Ready(());
            };
            drop(Reader(inner).at());
            if !std::mem::replace(&mut registered, true) {
                db.renewals.rcu(|all| all.iter().chain([mine]).cloned().collect::<Vec<_>>());
            }
            Poll::Pending
        })
    }

    /// Takes the newest version for operations that begin from now on.
    #[cold]
    fn renew(&self) {
        let inner = &*self.0;
        let newest = View::new(&inner.core, inner.db.version(), Some(&inner.view.borrow()));
        inner.view.replace(Rc::new(newest));
    }

    /// The core it reads through.
    pub fn core(&self) -> &Core {
        &self.0.core
    }

    /// The database.
    pub fn db(&self) -> &Db {
        &self.0.db
    }

    /// Creates an iterator over a column family, on no entry.
    ///
    /// # Errors
    /// The family is unknown or cannot be served.
    pub fn iter(&self, family: CfId, options: IterOptions) -> Result<Iter> {
        Iter::new(self, family, options)
    }

    /// Takes a snapshot of the state that is visible now.
    ///
    /// # Errors
    /// [`Kind::Expired`] if too many snapshots are held.
    pub fn snapshot(&self) -> Result<Snapshot> {
        Registry::take(&self.0.snapshots)
    }

    /// The sequence number to read at, and a view with everything visible at it.
    ///
    /// The view contains everything that was visible before it was taken. It also keeps entries
    /// that are visible now and that a later flush or merge drops because newer versions hide them.
    /// So sequence and view match if no version was published between taking the two.
    #[inline]
    pub(crate) fn now(&self, snapshot: Option<&Snapshot>) -> Result<(At, u64)> {
        loop {
            let at = self.at();
            if let Some(snapshot) = snapshot {
                // Nothing that a snapshot sees is dropped while it is held.
                return Ok((at, snapshot.sequence()?));
            }
            let sequence = self.0.db.visible();
            if at.view.version.epoch == self.0.db.0.epoch.load(Ordering::Acquire) {
                return Ok((at, sequence));
            }
        }
    }

    /// Estimates a family's live keys from the files' own counts.
    ///
    /// # Errors
    /// The family is unknown or cannot be served.
    pub fn approximate_keys(&self, family: CfId) -> Result<u64> {
        let version = &self.at().view.version;
        Ok(version.family(family)?.estimated_keys(version))
    }

    /// Counters since the reader was created.
    pub fn stats(&self) -> ReaderStats {
        let cache = self.0.cache.borrow();
        ReaderStats {
            cache_bytes: cache.used(),
            cache_budget: cache.budget(),
            ..self.0.counters.read()
        }
    }

    /// Looks up a key; suspends for each block that is not in memory. `None`: no such key.
    ///
    /// # Errors
    /// Damage, a failing device, or a kind of value that cannot be served; see [`Kind`].
    pub async fn get(
        &self,
        family: CfId,
        key: &[u8],
        snapshot: Option<&Snapshot>,
    ) -> Result<Option<Value>> {
        let (at, sequence) = self.now(snapshot)?;
        crate::read::point::get(&at, family, key, sequence).await
    }

    /// Looks up a key in memory only. `None`: a block must be read.
    pub fn get_cached(&self, family: CfId, key: &[u8]) -> Option<Result<Option<Value>>> {
        match self.now(None) {
            Ok((at, sequence)) => crate::read::point::get_cached(&at, family, key, sequence),
            Err(error) => Some(Err(error)),
        }
    }

    /// Looks up many keys: all filters first, then all needed blocks at once. The answers are in
    /// the order of the keys. Suspends as [`Reader::get`] does.
    pub async fn multi_get(
        &self,
        family: CfId,
        keys: &[&[u8]],
        snapshot: Option<&Snapshot>,
    ) -> Vec<Result<Option<Value>>> {
        match self.now(snapshot) {
            Ok((at, sequence)) => crate::read::point::multi_get(&at, family, keys, sequence).await,
            Err(error) => keys.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    /// Which of many keys exist: as [`Reader::multi_get`], but a value in a blob file or in an
    /// uncompressed block need not fit into memory.
    pub async fn contains(&self, family: CfId, keys: &[&[u8]]) -> Vec<Result<bool>> {
        let (at, sequence) = match self.now(None) {
            Ok(now) => now,
            Err(error) => return keys.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut answers = Vec::with_capacity(keys.len());
        let found = crate::read::point::multi_get(&at, family, keys, sequence).await;
        for (key, found) in keys.iter().zip(found) {
            answers.push(match found {
                Err(error) if error.kind() == Kind::Memory => {
                    crate::read::point::contains(&at, family, key, sequence).await
                }
                found => found.map(|value| value.is_some()),
            });
        }
        answers
    }
}

impl Spare for Inner {
    /// Releases the cache first, then data read ahead. That data may be needed soon, but a waiter
    /// needs memory now.
    fn give_up(&self, bytes: usize) -> usize {
        let mut given = self.cache.borrow_mut().shrink(bytes as u64) as usize;
        let read_ahead = self.read_ahead.borrow();
        for chunks in read_ahead.iter().filter_map(Weak::upgrade) {
            if given >= bytes {
                break;
            }
            given += chunks.borrow_mut().iter_mut().map(Chunk::give_up).sum::<usize>();
        }
        given
    }
}

impl Inner {
    #[inline]
    pub fn cached(&self, key: BlockKey) -> Option<Block> {
        let block = self.cache.borrow().get(key);
        if block.is_some() {
            count(&self.counters.cache_hits, 1);
        }
        block
    }

    pub fn keep(&self, key: BlockKey, block: &Block) {
        self.cache.borrow_mut().insert(key, block.clone());
    }

    /// Returns a block, from memory or read. `keep` puts it into the cache.
    pub async fn block(
        &self,
        view: &View,
        slot: u32,
        handle: BlockHandle,
        kind: BlockKind,
        keep: bool,
    ) -> Result<Block> {
        let key = BlockKey::of(&view.version, slot, handle);
        loop {
            if let Some(block) = self.cached(key) {
                return Ok(block);
            }
            match flight::join(&self.flights, key) {
                Role::Leader(leader) => {
                    count(&self.counters.cache_misses, 1);
                    let result = self.load(view, slot, handle, kind).await;
                    if let Ok(block) = &result
                        && keep
                    {
                        self.keep(key, block);
                    }
                    leader.land(&result);
                    return result;
                }
                Role::Follower(follower) => {
                    count(&self.counters.shared_reads, 1);
                    if let Some(result) = follower.await {
                        return result;
                    }
                }
            }
        }
    }

    async fn load(
        &self,
        view: &View,
        slot: u32,
        handle: BlockHandle,
        kind: BlockKind,
    ) -> Result<Block> {
        let table = view.version.table(slot)?;
        let len = table.stored_len(handle)?;
        let file = view.file(slot)?;
        let stored = self.read(file, handle.offset, len).await?;
        let unpacked = match self.unpack_now(table, handle, stored, kind) {
            Ok(done) => done,
            Err(need) => {
                let _room = self.promise(len + need).await?;
                let stored = self.read(file, handle.offset, len).await?;
                self.unpack(table, handle, stored, kind).await
            }
        };
        match unpacked {
            Err(error) if error.kind() == Kind::Corruption => {
                // A bit may have flipped in transfer and not on the disk: read it again.
                count(&self.counters.rereads, 1);
                let stored = self.read(file, handle.offset, len).await?;
                self.unpack(table, handle, stored, kind).await
            }
            done => done,
        }
    }

    /// Looks a key up at the beginning of an uncompressed data block; `None` if that does not tell.
    /// Reads and checks the whole block piece by piece.
    pub async fn peek(
        &self,
        view: &View,
        slot: u32,
        handle: BlockHandle,
        comparator: Comparator,
        target: &[u8],
    ) -> Result<Option<HeadLookup>> {
        const FOOTER_BYTES: usize = 4;
        const PIECE_BYTES: usize = 128 << 10;
        let table = view.version.table(slot)?;
        let file = view.file(slot)?;
        let len = table.stored_len(handle)?.saturating_sub(BLOCK_TRAILER_BYTES);
        let Some(footer_at) = len.checked_sub(FOOTER_BYTES) else { return Ok(None) };
        let tail_at = handle.offset + footer_at as u64;
        let tail = self.read(file, tail_at, FOOTER_BYTES + BLOCK_TRAILER_BYTES).await?;
        let Some((&footer, trailer)) = tail.split_first_chunk() else { return Ok(None) };
        let Some(&trailer) = trailer.first_chunk() else { return Ok(None) };
        if trailer[0] != Compression::None.to_byte() {
            return Ok(None);
        }
        drop(tail);
        let (mut told, mut at, mut sum) = (None, 0, BlockSum::new(table.check));
        while at < len {
            let piece =
                self.read(file, handle.offset + at as u64, PIECE_BYTES.min(len - at)).await?;
            if at == 0 {
                let footer = u32::from_le_bytes(footer);
                told = head_lookup(&piece, len, footer, comparator, target);
            }
            if told.is_none() || !self.verify {
                return Ok(told);
            }
            sum.add(&piece);
            at += piece.len();
            drop(piece);
            self.core.checkpoint().await;
        }
        sum.verify(trailer, handle.offset)
            .map_err(|e| Error::format(table.place(handle.offset), &e))?;
        Ok(told)
    }

    /// Reads a range of a file.
    pub async fn read(&self, file: &File, offset: u64, len: usize) -> Result<Slice> {
        let place = |e: &std::io::Error| {
            let name = file.path().file_name().unwrap_or_default().to_string_lossy();
            Error::io(format_args!("{name} at offset {offset}"), e)
        };
        fs::read(file, offset, len).await.map_err(|e| place(&e))
    }

    /// Starts a read-ahead if memory is plentiful. Half of the memory outside the cache is reserved
    /// for demand reads; otherwise iterators would wait for memory that they hold themselves. "The
    /// cache" is the core's, also for a reader that has none of its own.
    pub fn read_ahead(&self, file: &File, offset: u64, len: usize) -> Option<fs::Reading> {
        let pool = self.core.pool();
        let cache = self.db.options().cache_bytes.min(pool.limit());
        let reserve = ((pool.limit() - cache) / 2).max(pool.limit() / 16);
        if pool.used().saturating_add(len).saturating_add(reserve) > pool.limit() {
            return None;
        }
        fs::start_read(file, offset, len).ok().flatten()
    }

    /// Registers chunks as memory that may be reclaimed.
    pub fn add_read_ahead(&self, chunks: &Rc<Chunks>) {
        let mut all = self.read_ahead.borrow_mut();
        if all.len() == all.capacity() {
            all.retain(|chunks| chunks.strong_count() > 0);
        }
        all.push(Rc::downgrade(chunks));
    }

    /// Reserves room for blocks of `bytes` in all; suspends until there is room.
    pub async fn promise(&self, bytes: usize) -> Result<Promise> {
        self.core
            .promise(bytes)
            .await
            .map_err(|e| Error::io("cannot reserve memory for blocks", &e))
    }

    async fn alloc(&self, len: usize) -> Result<Buf> {
        self.core.alloc_wait(len).await.map_err(|e| Error::io("cannot allocate a block", &e))
    }

    /// Checks the stored bytes of a block (with trailer) and unpacks them. Suspends only when
    /// memory is short.
    pub async fn unpack(
        &self,
        table: &Table,
        handle: BlockHandle,
        stored: Slice,
        kind: BlockKind,
    ) -> Result<Block> {
        match self.check(table, handle, stored, kind)? {
            Stored::Plain(block) => Ok(block),
            Stored::Packed(packed) => {
                let out = self.alloc(packed.len).await?;
                self.decompress(table, &packed, out)
            }
        }
    }

    /// As [`unpack`](Self::unpack) without suspending. When there is no memory now, returns the
    /// number of bytes needed. The stored bytes are dropped then, so that nobody waits for memory
    /// while holding some.
    pub fn unpack_now(
        &self,
        table: &Table,
        handle: BlockHandle,
        stored: Slice,
        kind: BlockKind,
    ) -> std::result::Result<Result<Block>, usize> {
        match self.check(table, handle, stored, kind) {
            Ok(Stored::Plain(block)) => Ok(Ok(block)),
            Ok(Stored::Packed(packed)) => match self.core.pool().alloc_reclaiming(packed.len) {
                Some(out) => Ok(self.decompress(table, &packed, out)),
                None => Err(packed.len),
            },
            Err(error) => Ok(Err(error)),
        }
    }

    fn check(
        &self,
        table: &Table,
        handle: BlockHandle,
        stored: Slice,
        kind: BlockKind,
    ) -> Result<Stored> {
        let format = |e: rocksfmt::Error| Error::format(table.place(handle.offset), &e);
        let checked = if self.verify {
            table.check.verify(&stored, handle.offset)
        } else {
            compression_byte(&stored)
        };
        let byte = checked.map_err(format)?;
        let payload = stored.slice(0..stored.len() - BLOCK_TRAILER_BYTES);
        if byte == 0 {
            return Block::parse(payload, kind).map(Stored::Plain).map_err(format);
        }
        let codec = Compression::from_byte(byte).map_err(format)?;
        let len = codec.decompressed_len(&payload, BLOCK_BYTES_MAX).map_err(format)?;
        Ok(Stored::Packed(Packed { handle, kind, codec, payload, len }))
    }

    fn decompress(&self, table: &Table, packed: &Packed, mut out: Buf) -> Result<Block> {
        let format = |e: rocksfmt::Error| Error::format(table.place(packed.handle.offset), &e);
        let dictionary = table.dictionary.as_ref().filter(|_| packed.kind == BlockKind::Data);
        self.decompressor
            .borrow_mut()
            .decompress(packed.codec, &packed.payload, dictionary, &mut out)
            .map_err(format)?;
        Block::parse(Slice::new(out.share(), 0..packed.len), packed.kind).map_err(format)
    }

    /// Decompresses a blob.
    pub async fn unpack_blob(&self, codec: Compression, payload: &Slice) -> Result<Slice> {
        let format = |e: rocksfmt::Error| Error::format("a blob", &e);
        let len = codec.decompressed_len(payload, BLOCK_BYTES_MAX).map_err(format)?;
        let mut out = self.alloc(len).await?;
        self.decompressor
            .borrow_mut()
            .decompress(codec, payload, None, &mut out)
            .map_err(format)?;
        Ok(Slice::new(out.share(), 0..len))
    }
}
