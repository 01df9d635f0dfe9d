//! Brings what the lookups of several keys will read into the processor's caches.
//!
//! A lookup in memory reads a line of the filter, one of the index's numbers, the offset of an
//! index entry, the entry, the cache's table, the block's restart points and its entries. Each of
//! these places depends on the one before, and a database is larger than the processor's caches, so
//! a lookup waits about ten times for memory. The keys of a pipeline are known together: they take
//! each step together here, so their waits overlap. The lookups follow, and find everything near.
//!
//! What was found on the way is kept for the lookups, which are made in the same order and in the
//! same version ([`Foreseen`]): the first table whose filter has the key, the block in it, and the
//! entry. A lookup still asks the memtables and the tables before that one. If it takes another way
//! than the one foreseen here (a memtable has the key, a filter errs, an index has partitions) it
//! just waits for memory.

use reactor::prefetch;
use rocksfmt::{BlockHandle, FilterKey, IndexSearch, IndexSteps, point_lookup};

use crate::db::CfId;
use crate::read::block::{Block, Layout};
use crate::read::cache::BlockKey;
use crate::read::seek::SeekKey;
use crate::read::state::ReadContext;
use crate::table::{Filter, IndexBlock, Table};
use crate::version::{Family, Version, user_key};

/// Most keys that are warmed together: about as many as a processor core has reads of memory in
/// flight.
pub const WARM_MAX: usize = 16;
/// Tables whose filters are asked for a key.
const TABLES_MAX: usize = 4;
/// Bytes of a cache line, and most lines of a value that are fetched.
const LINE_BYTES: usize = 64;
const VALUE_LINES: usize = 16;
/// Bytes of an entry's key that is not short: it may be in two lines.
const KEY_BYTES: usize = 32;
/// Entries of a block that are walked.
const ENTRIES_MAX: usize = 4;

/// What is known of the next lookups.
#[derive(Default)]
pub(crate) struct Foreseen {
    /// Of the version.
    epoch: u64,
    family: CfId,
    keys: [Option<(SeekKey, Known)>; WARM_MAX],
    next: usize,
}

/// Where a key is, if it is not in a newer table.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    pub slot: u32,
    pub handle: BlockHandle,
    /// The entry, if the block was in the cache: its packed sequence and type, and where its value
    /// begins and ends.
    pub entry: Option<(u64, u32, u32)>,
}

impl Foreseen {
    /// What is known of a key that is looked up now.
    #[inline]
    pub fn take(&mut self, version: &Version, family: CfId, key: &[u8]) -> Option<Known> {
        let (seek, known) = self.keys.get(self.next)?.as_ref()?;
        let is_next = self.epoch == version.epoch
            && self.family == family
            && user_key(seek.as_slice()) == key;
        let known = is_next.then_some(*known)?;
        self.next += 1;
        Some(known)
    }
}

/// A key on its way through the steps.
struct Warming<'a> {
    seek: SeekKey,
    filter_key: FilterKey<'a>,
    /// The tables that may have it, newest first.
    tables: [Option<(u32, &'a Table)>; TABLES_MAX],
    /// The first of them whose filter has it.
    table: Option<(u32, &'a Table)>,
    /// How far the search of its index has come, if that has the structure for it.
    steps: Option<IndexSteps>,
}

/// Prefetches for lookups of `keys`; see [`crate::Reader::warm`].
pub(crate) fn warm(context: &ReadContext, family: CfId, keys: &[&[u8]], sequence: u64) {
    let version = &*context.view.version;
    let Ok(family) = version.family(family) else { return };
    let mut all: [Option<Warming<'_>>; WARM_MAX] =
        std::array::from_fn(|at| keys.get(at).map(|key| find(version, family, key, sequence)));
    let filters = all.iter().flatten().flat_map(|one| {
        one.tables.iter().flatten().map(|(_, table)| (&one.filter_key, &table.filter))
    });
    for (key, filter) in filters {
        if let Filter::Full { data, layout } = filter
            && let Some(byte) = data.get(layout.line(key).start)
        {
            prefetch(byte);
        }
    }
    warm_indexes(&mut all);
    let known = warm_blocks(context, family, &all);
    let mut foreseen = context.state.foreseen.borrow_mut();
    (foreseen.epoch, foreseen.family, foreseen.next) = (version.epoch, family.id, 0);
    let found = all.into_iter().flatten().zip(known);
    // A key of which nothing is known is left out: the lookups of the others are in their order.
    let mut found = found.filter_map(|(one, known)| Some((one.seek, known?)));
    foreseen.keys.iter_mut().for_each(|key| *key = found.next());
}

/// Finds the tables that may have a key.
fn find<'a>(version: &'a Version, family: &Family, key: &'a [u8], sequence: u64) -> Warming<'a> {
    let comparator = family.comparator;
    let seek = SeekKey::new(key, sequence);
    let mut tables = [None; TABLES_MAX];
    let mut free = tables.iter_mut();
    let mut add = |slot: u32| {
        let meta = version.meta(slot);
        if comparator.cmp_user(user_key(&meta.smallest), key).is_le()
            && comparator.cmp_internal(&meta.largest, seek.as_slice()).is_ge()
            && let Ok(table) = version.table(slot)
            && let Some(free) = free.next()
        {
            *free = Some((slot, table));
        }
    };
    for (level, tables) in family.levels.iter().enumerate() {
        if level == 0 {
            tables.slots.iter().copied().for_each(&mut add);
        } else if !tables.slots.is_empty() {
            let at = tables.find(comparator, seek.as_slice());
            tables.slots.get(at).copied().into_iter().for_each(&mut add);
        }
    }
    Warming { seek, filter_key: FilterKey::new(key), tables, table: None, steps: None }
}

/// Chooses each key's table, and takes the steps through its index.
fn warm_indexes(all: &mut [Option<Warming<'_>>]) {
    for one in all.iter_mut().flatten() {
        let may_have = |table: &Table| match &table.filter {
            Filter::Full { data, layout } => layout.may_contain(data, &one.filter_key),
            Filter::None => true,
            Filter::OnDemand(_) | Filter::Partitioned(_) => false,
        };
        one.table = one.tables.iter().flatten().find(|(_, table)| may_have(table)).copied();
        if let Some((_, table)) = one.table
            && let Some(search) = table.index.search()
            && let Some((steps, line)) = search.begin(&table.index.layout, one.seek.as_slice())
        {
            one.steps = Some(steps);
            prefetch(line);
        }
    }
    for one in all.iter_mut().flatten() {
        if let Some((search, index, steps)) = one.search()
            && let Some(place) = search.restart(&index.data, &index.layout, steps)
        {
            prefetch(place);
        }
    }
    for one in all.iter_mut().flatten() {
        if let Some((search, index, steps)) = one.search()
            && let Some(entry) = search.entry(&index.data, &index.layout, steps)
        {
            prefetch(entry);
        }
    }
}

impl<'a> Warming<'a> {
    /// The search that has begun.
    fn search(&mut self) -> Option<(&'a IndexSearch, &'a IndexBlock, &mut IndexSteps)> {
        let index = &self.table?.1.index;
        Some((index.search()?, index, self.steps.as_mut()?))
    }

    /// The key's table and block.
    fn block(&self, family: &Family, scratch: &mut Vec<u8>) -> Option<(u32, BlockHandle)> {
        let (slot, table) = self.table?;
        if table.two_level {
            return None;
        }
        let target = self.seek.as_slice();
        let IndexBlock { data, layout, .. } = &table.index;
        let found = match (table.index.search(), &self.steps) {
            (Some(search), Some(steps)) => search.finish(data, layout, target, steps, scratch),
            _ => table.index.lookup(family.comparator, target, scratch),
        };
        Some((slot, found.ok()??))
    }
}

/// Takes the steps through the data blocks that are in the cache. Returns what is known of the
/// keys.
fn warm_blocks(
    context: &ReadContext,
    family: &Family,
    all: &[Option<Warming<'_>>],
) -> [Option<Known>; WARM_MAX] {
    let version = &context.view.version;
    let cache = context.state.cache.borrow();
    let mut scratch = Vec::new();
    let mut known = [None; WARM_MAX];
    for (known, one) in known.iter_mut().zip(all) {
        let found = one.as_ref().and_then(|one| one.block(family, &mut scratch));
        *known = found.map(|(slot, handle)| Known { slot, handle, entry: None });
    }
    let blocks: [Option<&Block>; WARM_MAX] = known.map(|known| {
        let Known { slot, handle, .. } = known?;
        cache.peek(BlockKey::of(version, slot, handle))
    });
    let blocks = || {
        let found = blocks.iter().zip(all).enumerate();
        found.filter_map(|(at, (block, one))| match block {
            Some(Block { data, layout: Layout::Data(layout) }) => {
                Some((at, &**data, layout, one.as_ref()?))
            }
            _ => None,
        })
    };
    let fetch = |data: &[u8], at: usize| data.get(at).map_or((), prefetch);
    let fetch_entry = |data: &[u8], at: usize| {
        fetch(data, at);
        fetch(data, at + KEY_BYTES);
    };
    for (_, data, layout, _) in blocks() {
        fetch(data, layout.middle_place());
    }
    let mut at = [None; WARM_MAX];
    for (nth, data, layout, _) in blocks() {
        let middle = layout.middle_entry(data);
        at[nth] = middle;
        middle.into_iter().for_each(|entry| fetch_entry(data, entry));
    }
    for _ in 1..ENTRIES_MAX {
        for (nth, data, layout, _) in blocks() {
            // The next entries of small ones are in the same lines.
            let next = at[nth].and_then(|from| {
                let next = layout.entry_after(data, from)?;
                (next - from > 2 * LINE_BYTES).then_some(next)
            });
            at[nth] = next;
            next.into_iter().for_each(|entry| fetch_entry(data, entry));
        }
    }
    for (nth, data, layout, one) in blocks() {
        let target = one.seek.as_slice();
        if let Ok(rocksfmt::Lookup::Found { packed, start, end }) =
            point_lookup(data, layout, family.comparator, target, &mut scratch)
        {
            if let Some(known) = &mut known[nth] {
                known.entry = Some((packed, start, end));
            }
            let lines = (start as usize..end as usize).step_by(LINE_BYTES);
            lines.take(VALUE_LINES).for_each(|line| fetch(data, line));
        }
    }
    known
}
