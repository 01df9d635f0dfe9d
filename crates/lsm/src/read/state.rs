//! The state of one core's reader: its view, cache, flights and memory.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fs::Slice;
use reactor::{Core, Spare};
use rocksfmt::Decompressor;

use crate::db::Db;
use crate::read::block::Block;
use crate::read::cache::{BlockCache, BlockKey};
use crate::read::chunk::{Chunk, Chunks};
use crate::read::flight::Flights;
use crate::read::shared_cache::{SharedBlocks, SharedCache};
use crate::read::snapshot::Registry;
use crate::read::stats::{Counters, ReaderStats, count};
use crate::read::view::View;
use crate::read::warm::Foreseen;
use crate::version::Version;

/// The state of one core's reader.
pub(crate) struct ReaderState {
    pub core: Core,
    pub db: Db,
    view: RefCell<Rc<View>>,
    pub counters: Counters,
    pub(super) cache: RefCell<BlockCache>,
    /// The cache that other threads read, if there is one. Then `cache` has only the blocks that
    /// it does not take, and both together keep to the budget of one.
    shared: Option<SharedCache>,
    pub(super) flights: RefCell<Flights>,
    /// Of the lookups that come next.
    pub(super) foreseen: RefCell<Foreseen>,
    /// The chunks that iterators have read ahead.
    read_ahead: RefCell<Vec<Weak<Chunks>>>,
    pub(super) decompressor: RefCell<Decompressor>,
    pub(super) snapshots: Rc<Registry>,
    /// Bytes of merge operands that reads hold now.
    pub(super) operand_bytes: Cell<usize>,
    pub(super) verify: bool,
}

impl ReaderState {
    /// The state of a reader at the newest version, with a cache of `cache_bytes`.
    pub fn new(db: &Db, core: &Core, cache_bytes: usize) -> Rc<ReaderState> {
        let state = Rc::new(ReaderState {
            core: core.clone(),
            db: db.clone(),
            view: RefCell::new(Rc::new(View::new(core, db.version(), None))),
            counters: Counters::default(),
            cache: RefCell::new(BlockCache::new(cache_bytes)),
            shared: (db.options().shared_cache && cache_bytes > 0)
                .then(|| SharedCache::new(core.pool(), cache_bytes)),
            flights: RefCell::default(),
            foreseen: RefCell::default(),
            read_ahead: RefCell::default(),
            decompressor: RefCell::default(),
            snapshots: Registry::new(core, db),
            operand_bytes: Cell::new(0),
            verify: db.options().verify_checksums,
        });
        let weak: Weak<ReaderState> = Rc::downgrade(&state);
        core.pool().add_spare(weak);
        state
    }

    /// The reader with the newest view.
    #[inline]
    pub fn context(self: &Rc<Self>) -> ReadContext {
        if self.view.borrow().version.epoch != self.db.0.epoch.load(Ordering::Acquire) {
            self.renew();
        }
        ReadContext { state: self.clone(), view: self.view.borrow().clone() }
    }

    /// The reader with a version that need not be the newest.
    pub fn context_at(self: &Rc<Self>, version: &Arc<Version>) -> ReadContext {
        let view = View::new(&self.core, version.clone(), None);
        ReadContext { state: self.clone(), view: Rc::new(view) }
    }

    /// Takes the newest version for operations that begin from now on.
    #[cold]
    fn renew(&self) {
        let newest = View::new(&self.core, self.db.version(), Some(&self.view.borrow()));
        self.view.replace(Rc::new(newest));
    }

    #[inline]
    pub fn cached(&self, key: BlockKey) -> Option<Block> {
        // Not borrowed any more when the shared cache needs memory, which may be this one's.
        let own = self.cache.borrow().get(key);
        let block = own.or_else(|| self.shared_block(key));
        if block.is_some() {
            count(&self.counters.cache_hits, 1);
        }
        block
    }

    /// A copy of a block of the shared cache, if there is memory for it.
    #[inline]
    fn shared_block(&self, key: BlockKey) -> Option<Block> {
        let block = self.shared.as_ref()?.blocks().get(key)?;
        let mut copy = self.core.pool().alloc_reclaiming(block.data.len())?;
        copy.copy_from_slice(&block.data);
        Some(Block { data: Slice::new(copy.share(), 0..block.data.len()), layout: block.layout })
    }

    pub fn keep(&self, key: BlockKey, block: &Block) {
        let mut cache = self.cache.borrow_mut();
        let Some(shared) = &self.shared else {
            cache.insert(key, block.clone());
            return;
        };
        // The newer block counts: the other cache makes room for it.
        let excess =
            |cache: &BlockCache| (cache.used() + shared.used()).saturating_sub(shared.budget());
        if shared.takes(block.data.len()) {
            shared.insert(key, block);
            let excess = excess(&cache);
            cache.shrink(excess);
        } else {
            cache.insert(key, block.clone());
            shared.shrink(excess(&cache));
        }
    }

    /// The readers' end of the shared cache.
    pub fn shared_blocks(&self) -> Option<&Arc<SharedBlocks>> {
        self.shared.as_ref().map(SharedCache::blocks)
    }

    /// Registers chunks as memory that may be reclaimed.
    pub fn add_read_ahead(&self, chunks: &Rc<Chunks>) {
        let mut all = self.read_ahead.borrow_mut();
        if all.len() == all.capacity() {
            all.retain(|chunks| chunks.strong_count() > 0);
        }
        all.push(Rc::downgrade(chunks));
    }

    /// Counters since the reader was created.
    pub fn stats(&self) -> ReaderStats {
        let cache = self.cache.borrow();
        ReaderStats {
            cache_bytes: cache.used() + self.shared.as_ref().map_or(0, SharedCache::used),
            cache_budget: cache.budget(),
            ..self.counters.read()
        }
    }
}

/// A reader and the view that a lookup or an iterator uses until it ends.
#[derive(Clone)]
pub(crate) struct ReadContext {
    pub state: Rc<ReaderState>,
    pub view: Rc<View>,
}

impl Spare for ReaderState {
    /// Releases the cache first, then data read ahead. That data may be needed soon, but a waiter
    /// needs memory now.
    fn give_up(&self, bytes: usize) -> usize {
        let mut given = self.cache.borrow_mut().shrink(bytes as u64) as usize;
        if let Some(shared) = self.shared.as_ref().filter(|_| given < bytes) {
            given += shared.shrink((bytes - given) as u64) as usize;
        }
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
