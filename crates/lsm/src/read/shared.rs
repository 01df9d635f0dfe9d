//! Lookups by threads that are not cores: of what is in memory, or not at all.
//!
//! 1. [`SharedReader::get`] takes the newest version and a sequence that goes with it, as
//!    `Reader::now` does.
//! 2. It looks into the memtables, which any thread may read, then into the tables: their filters
//!    and indexes are part of the version, their blocks come from the core's shared cache.
//! 3. The caller takes the value while its memtable or block is pinned.
//!
//! It answers the common cases only. Whatever else it meets (a block that is not there, merge
//! operands, blobs, wide columns, versions of a key in two blocks, anything damaged) is `None`: the
//! caller asks the core, whose reader (`point.rs`) knows all cases and reports all errors. That is
//! why it is a second lookup beside the state machine of `point.rs`: without awaits, operands and
//! errors it is short, and a thread that is no core has none of the things that those need.
//! `point.rs` keeps its counts and its buffers, which belong to one core, and stays as fast as it
//! was.
//!
//! **Order.** Both ways read at the published sequence. It only grows, and an answer of the core or
//! an acknowledgement carries it along, so reads of one thread are monotonic across both ways, and
//! see the thread's own writes.
//!
//! **The end.** A [`SharedReader`] holds the database, with the lock of its directory. Whoever
//! hands it out drops it before the end is reported.
//!
//! Hot: no allocation for keys of up to 112 bytes, no lock that is waited for, and no write to
//! memory that other threads use, except the counts of a part's lock and of a block.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use arc_swap::Guard;
use rocksfmt::{
    BlockHandle, Comparator, FilterKey, Lookup as Hit, ValueType, index_lookup, point_lookup,
    unpack, value_type,
};

use crate::db::{CfId, Db};
use crate::read::block::Layout;
use crate::read::cache::BlockKey;
use crate::read::seek::SeekKey;
use crate::read::shared_cache::{SharedBlock, SharedBlocks};
use crate::table::{Filter, Table};
use crate::version::{Family, Version, user_key};

/// How often it tries to get a version and a sequence that match, while versions are published.
const TRIES: usize = 4;

/// Looks up what is in memory, from any thread: see [`Reader::shared`](crate::Reader::shared).
#[derive(Clone)]
pub struct SharedReader {
    db: Db,
    blocks: Arc<SharedBlocks>,
}

/// What an entry that the reader sees says.
enum Entry {
    Value,
    Deleted,
}

impl Entry {
    /// `None`: only the core can tell.
    fn of(sequence: u64, packed: u64, tombstone: u64) -> Option<Entry> {
        if sequence < tombstone {
            return Some(Entry::Deleted);
        }
        match value_type(packed).ok()? {
            ValueType::Value => Some(Entry::Value),
            kind if kind.is_tombstone() => Some(Entry::Deleted),
            _ => None,
        }
    }
}

impl SharedReader {
    pub(crate) fn new(db: &Db, blocks: &Arc<SharedBlocks>) -> SharedReader {
        SharedReader { db: db.clone(), blocks: blocks.clone() }
    }

    /// Looks up a key, and gives its value to `take`. `None`: this needs a core; `Some(None)`:
    /// there is no such key.
    pub fn get<T>(
        &self,
        family: CfId,
        key: &[u8],
        take: impl FnOnce(&[u8]) -> T,
    ) -> Option<Option<T>> {
        let (version, sequence) = self.now()?;
        let family = version.family(family).ok()?;
        let mut tombstone = 0;
        for mem in &family.mems {
            tombstone = tombstone.max(mem.max_tombstone(key, sequence));
            if let Some((packed, value)) = mem.get(key, sequence) {
                return Some(match Entry::of(unpack(packed).0, packed, tombstone)? {
                    Entry::Value => Some(take(mem.value(&value))),
                    Entry::Deleted => None,
                });
            }
            if tombstone > 0 {
                return Some(None);
            }
        }
        let mut lookup = Lookup {
            version: &version,
            family,
            blocks: &self.blocks,
            key,
            seek: SeekKey::new(key, sequence),
            filter_key: FilterKey::new(key),
            sequence,
            tombstone,
            scratch: Vec::new(),
        };
        lookup.look_in_tables(take)
    }

    /// The newest version, and a sequence at which it is complete; see `Reader::now`. `None` while
    /// versions are being published.
    fn now(&self) -> Option<(Guard<Arc<Version>>, u64)> {
        let state = &*self.db.0;
        for _ in 0..TRIES {
            let version = state.current.load();
            let sequence = self.db.visible();
            if version.epoch == state.epoch.load(Ordering::Acquire) {
                return Some((version, sequence));
            }
        }
        None
    }
}

struct Lookup<'a> {
    version: &'a Version,
    family: &'a Family,
    blocks: &'a SharedBlocks,
    key: &'a [u8],
    seek: SeekKey,
    filter_key: FilterKey<'a>,
    sequence: u64,
    /// The sequence of the newest range tombstone over the key found so far.
    tombstone: u64,
    scratch: Vec<u8>,
}

/// The outcome of looking into a table.
enum Found {
    /// Nothing that the reader sees.
    Nothing,
    Deleted,
    /// The value is this part of the block.
    Value(Arc<SharedBlock>, std::ops::Range<usize>),
}

impl Lookup<'_> {
    /// From new to old: level 0 from its newest table, then one table of each deeper level.
    fn look_in_tables<T>(&mut self, take: impl FnOnce(&[u8]) -> T) -> Option<Option<T>> {
        let order = self.family.comparator;
        let family = self.family;
        for (depth, level) in family.levels.iter().enumerate() {
            let candidates = match depth {
                0 => &level.slots[..],
                _ => {
                    let at = level.find(order, self.seek.as_slice());
                    level.slots.get(at..at + 1).unwrap_or_default()
                }
            };
            for &slot in candidates {
                if self.is_out_of_bounds(slot, order) {
                    continue;
                }
                match self.look_in_table(slot, order)? {
                    Found::Value(block, range) => return Some(Some(take(&block.data[range]))),
                    Found::Deleted => return Some(None),
                    // Below a range tombstone everything is older.
                    Found::Nothing if self.tombstone > 0 => return Some(None),
                    Found::Nothing => {}
                }
            }
        }
        Some(None)
    }

    fn is_out_of_bounds(&self, slot: u32, order: Comparator) -> bool {
        let meta = self.version.meta(slot);
        order.cmp_user(user_key(&meta.smallest), self.key).is_gt()
            || order.cmp_internal(&meta.largest, self.seek.as_slice()).is_lt()
    }

    fn look_in_table(&mut self, slot: u32, order: Comparator) -> Option<Found> {
        let table = self.version.table(slot).ok()?;
        if let Some(tombstones) = &table.range_tombstones {
            let over = tombstones.max_sequence(self.key, self.sequence);
            self.tombstone = self.tombstone.max(over);
        }
        if !self.may_contain(slot, table)? {
            return Some(Found::Nothing);
        }
        let lookup = table.index.lookup(order, self.seek.as_slice(), &mut self.scratch);
        let Some(mut handle) = lookup.ok()? else { return Some(Found::Nothing) };
        if table.two_level {
            let partition = self.block(slot, handle)?;
            let Layout::Index(layout) = &partition.layout else { return None };
            let target = self.seek.as_slice();
            let lookup = index_lookup(&partition.data, layout, order, target, &mut self.scratch);
            match lookup.ok()? {
                Some(found) => handle = found,
                None => return Some(Found::Nothing),
            }
        }
        let block = self.block(slot, handle)?;
        let Layout::Data(layout) = &block.layout else { return None };
        let target = self.seek.as_slice();
        match point_lookup(&block.data, layout, order, target, &mut self.scratch).ok()? {
            Hit::Absent => Some(Found::Nothing),
            // Older versions may begin the next block.
            Hit::PastEnd => None,
            Hit::Found { packed, start, end } => {
                let sequence = table.global_sequence.unwrap_or(unpack(packed).0);
                if sequence > self.sequence {
                    return Some(Found::Nothing);
                }
                Some(match Entry::of(sequence, packed, self.tombstone)? {
                    Entry::Value => Found::Value(block, start as usize..end as usize),
                    Entry::Deleted => Found::Deleted,
                })
            }
        }
    }

    /// Asks the table's filter; `None` if it is not in memory.
    fn may_contain(&mut self, slot: u32, table: &Table) -> Option<bool> {
        let handle = match &table.filter {
            Filter::None => return Some(true),
            Filter::Full { data, layout } => {
                return Some(layout.may_contain(data, &self.filter_key));
            }
            Filter::OnDemand(handle) => *handle,
            Filter::Partitioned(top) => {
                let order = self.family.comparator;
                match top.lookup(order, self.seek.as_slice(), &mut self.scratch).ok()? {
                    Some(handle) => handle,
                    None => return Some(false),
                }
            }
        };
        let block = self.block(slot, handle)?;
        let Layout::Filter(layout) = &block.layout else { return None };
        Some(layout.may_contain(&block.data, &self.filter_key))
    }

    fn block(&self, slot: u32, handle: BlockHandle) -> Option<Arc<SharedBlock>> {
        self.blocks.get(BlockKey::of(self.version, slot, handle))
    }
}
