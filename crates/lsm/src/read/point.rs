//! Point lookups: one state machine with three drivers.
//!
//! A [`Lookup`] goes from new to old: memtables and recovered writes, level 0 from the newest
//! table, then one table of each deeper level. [`Lookup::step`] uses data in memory and stops when
//! it needs a block or has the answer; the driver fetches the block and feeds it. A get awaits
//! block after block. A cached get gives up at the first block that is not in memory. A multi-get
//! steps all its lookups to their first block, starts all those reads, and continues in the order
//! of its requests.
//!
//! Hot: nothing here allocates for keys of up to 112 bytes.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use rocksfmt::{
    BlockHandle, FileMeta, FilterKey, HeadLookup, IndexCursor, IndexFormat, IndexLayout,
    KEY_TRAILER_BYTES, Lookup as Hit, ValueType, index_lookup, pack, point_lookup, unpack,
};

use crate::db::CfId;
use crate::error::{Error, Kind, Result};
use crate::mem::{Mem, MemCursor, split};
use crate::read::blob;
use crate::read::block::{Block, BlockKind, Layout};
use crate::read::cache::BlockKey;
use crate::read::operands::{FoundOperands, Order, is_operand};
use crate::read::seek::SeekKey;
use crate::read::state::ReadContext;
use crate::read::stats::count;
use crate::read::value::{Place, Value};
use crate::read::view::View;
use crate::read::warm::Known;
use crate::table::{Filter, IndexBlock, Table};
use crate::version::{Family, user_key};

/// A block that a lookup needs.
#[derive(Clone, Copy)]
struct Need {
    slot: u32,
    handle: BlockHandle,
    kind: BlockKind,
}

enum Step {
    Need(Need),
    /// The answer, or a reference to it in a blob file. Without [`Lookup::operands`]: else it is
    /// what is below them.
    Done(Option<Answer>),
    /// Many merge operands were found: other tasks get a turn, then [`Lookup::step`] continues.
    Pause,
}

enum Answer {
    Value(Value),
    Blob(Value),
}

/// What an entry says.
enum Resolved {
    /// Nothing: the reader does not see it.
    Invisible,
    /// A merge operand, which was taken.
    Operand,
    Step(Step),
}

/// Merge operands that are taken before other tasks get a turn.
const OPERANDS_AT_ONCE: usize = 512;

/// The purpose of the next block.
#[derive(Clone, Copy)]
enum Stage {
    /// The memtable with this index.
    Memory(usize),
    /// The present table, after an operand.
    SameTable,
    NextTable,
    Filter,
    IndexPartition,
    Data,
}

struct Lookup<'a> {
    family: &'a Family,
    family_at: usize,
    view: &'a Rc<View>,
    key: &'a [u8],
    seek: SeekKey,
    filter_key: FilterKey<'a>,
    sequence: u64,
    /// The sequence of the newest range tombstone over the key found so far.
    tombstone: u64,
    level: usize,
    position: usize,
    slot: u32,
    index_format: IndexFormat,
    stage: Stage,
    /// The index partition that led to the data block, if the index has two levels.
    partition: Option<Block>,
    scratch: Vec<u8>,
    /// Merge operands found so far. `seek` is after the last one.
    operands: Option<Box<FoundOperands>>,
    /// Only whether the key exists is asked: an operand tells that.
    only_existence: bool,
    /// The sequence of the newest entry that the reader sees.
    newest: Option<u64>,
    /// What is known of the key.
    known: Option<Known>,
}

impl<'a> Lookup<'a> {
    #[inline(always)]
    fn new(view: &'a Rc<View>, family: CfId, key: &'a [u8], sequence: u64) -> Result<Lookup<'a>> {
        let found = view.version.family(family)?;
        let family_at = view.version.families.place(family).unwrap_or_default();
        Ok(Lookup {
            family: found,
            family_at,
            view,
            key,
            seek: SeekKey::new(key, sequence),
            filter_key: FilterKey::new(key),
            sequence,
            tombstone: 0,
            level: 0,
            position: 0,
            // None yet.
            slot: u32::MAX,
            index_format: IndexFormat::default(),
            stage: Stage::Memory(0),
            partition: None,
            scratch: Vec::new(),
            operands: None,
            only_existence: false,
            newest: None,
            known: None,
        })
    }

    #[inline]
    fn table(&self) -> Result<&'a Table> {
        self.view.version.table(self.slot)
    }

    /// Continues without I/O as far as possible.
    fn step(&mut self, context: &ReadContext) -> Result<Step> {
        match self.stage {
            Stage::Memory(first) => {
                self.stage = Stage::NextTable;
                if let Some(step) = self.look_in_memory(context, first)? {
                    return Ok(step);
                }
            }
            Stage::SameTable => {
                self.stage = Stage::NextTable;
                if let Some(step) = self.look_in_index(self.table()?)? {
                    return Ok(step);
                }
                self.leave_table();
            }
            _ => {}
        }
        loop {
            // Below a tombstone everything is older. Of the versions of a key in two tables of a
            // level, some may be newer; only operands lead from one to the other.
            let is_deleted = self.tombstone > 0 && self.operands.is_none();
            if is_deleted || !self.next_table() {
                return Ok(Step::Done(None));
            }
            let table = self.table()?;
            self.index_format = table.properties.index_format;
            if let Some(tombstones) = &table.range_tombstones {
                let over = tombstones.max_sequence(self.key, self.sequence);
                self.tombstone = self.tombstone.max(over);
            }
            if let Some(known) = self.known.filter(|known| known.slot == self.slot) {
                return Ok(self.need(known.handle, Stage::Data));
            }
            match &table.filter {
                Filter::None => {}
                Filter::Full { data, layout } => {
                    if !layout.may_contain(data, &self.filter_key) {
                        count(&context.state.counters.filter_negative, 1);
                        continue;
                    }
                }
                Filter::OnDemand(handle) => return Ok(self.need(*handle, Stage::Filter)),
                Filter::Partitioned(top) => match self.top_lookup(top, table)? {
                    Some(handle) => return Ok(self.need(handle, Stage::Filter)),
                    None => continue,
                },
            }
            if let Some(step) = self.look_in_index(table)? {
                return Ok(step);
            }
        }
    }

    /// Takes the block that the last step needed.
    fn feed(&mut self, context: &ReadContext, block: Block) -> Result<Step> {
        let table = self.table()?;
        match self.stage {
            Stage::Filter => {
                let Layout::Filter(layout) = block.layout else {
                    unreachable!("a filter partition was asked for")
                };
                if !layout.may_contain(&block.data, &self.filter_key) {
                    count(&context.state.counters.filter_negative, 1);
                } else if let Some(step) = self.look_in_index(table)? {
                    return Ok(step);
                }
            }
            Stage::IndexPartition => {
                let found = self.partition_lookup(&block, table)?;
                if let Some(handle) = found {
                    self.partition = Some(block);
                    return Ok(self.need(handle, Stage::Data));
                }
            }
            Stage::Data => {
                if let Some(step) = self.look_in_block(context, &block, table)? {
                    return Ok(step);
                }
            }
            Stage::Memory(_) | Stage::SameTable | Stage::NextTable => {
                unreachable!("no block was asked for")
            }
        }
        self.stage = Stage::NextTable;
        self.partition = None;
        self.leave_table();
        self.step(context)
    }

    /// Looks at the key's versions in a data block. `None`: older ones may be in the next table.
    fn look_in_block(
        &mut self,
        context: &ReadContext,
        block: &Block,
        table: &'a Table,
    ) -> Result<Option<Step>> {
        let mut has_operands = false;
        loop {
            // Of the first block that is looked at in its table, and before any operand.
            let known = self.known.take_if(|known| known.slot == self.slot);
            let entry = known.and_then(|known| known.entry);
            let found = match entry.filter(|&(_, _, end)| end as usize <= block.data.len()) {
                Some((packed, start, end)) => Hit::Found { packed, start, end },
                None => point_lookup(
                    &block.data,
                    block.entries(),
                    self.family.comparator,
                    self.seek.as_slice(),
                    &mut self.scratch,
                )
                .map_err(|e| Error::format(table.place(0), &e))?,
            };
            let (packed, range) = match found {
                Hit::Found { packed, start, end } => (packed, start as usize..end as usize),
                Hit::Absent => return Ok(None),
                // The seek key may be after the separator at the block's end already.
                Hit::PastEnd if has_operands => return self.look_in_index(table),
                Hit::PastEnd => return self.look_after(table),
            };
            let value = Value::block(block.data.slice(range));
            let global = table.global_sequence;
            match self.resolve(context, packed, global, value)? {
                Resolved::Invisible => return Ok(None),
                Resolved::Step(step) => return Ok(Some(step)),
                // All keys of an ingested table differ.
                Resolved::Operand if global.is_some() => return Ok(None),
                Resolved::Operand => has_operands = true,
            }
            if self.pauses() {
                (self.stage, self.partition) = (Stage::SameTable, None);
                return Ok(Some(Step::Pause));
            }
        }
    }

    /// Leaves a table without an answer. Older versions of a key may begin the next table of the
    /// same level, which matters only after an operand.
    #[inline]
    fn leave_table(&mut self) {
        if self.operands.is_some()
            && self.level > 0
            && user_key(&self.view.version.meta(self.slot).largest) == self.key
        {
            self.level -= 1;
        }
    }

    /// Whether it is time to give way, after an operand.
    fn pauses(&self) -> bool {
        let count = self.operands.as_ref().map_or(0, |operands| operands.count());
        count.is_multiple_of(OPERANDS_AT_ONCE)
    }

    /// Takes the result of looking at the beginning of the data block that the last step needed.
    /// Used only to learn whether the key exists: a value found here is empty.
    #[cold]
    fn feed_head(&mut self, context: &ReadContext, head: HeadLookup) -> Result<Step> {
        let table = self.table()?;
        match head {
            HeadLookup::Found(packed) => {
                let packed = match rocksfmt::value_type(packed) {
                    Ok(ValueType::WideColumnEntity | ValueType::ValuePreferredSeqno) => {
                        pack(unpack(packed).0, ValueType::Value as u8)
                    }
                    _ => packed,
                };
                let global = table.global_sequence;
                if let Resolved::Step(step) =
                    self.resolve(context, packed, global, Value::empty())?
                {
                    return Ok(step);
                }
            }
            HeadLookup::Absent => {}
            HeadLookup::PastEnd => {
                if let Some(step) = self.look_after(table)? {
                    return Ok(step);
                }
            }
        }
        self.stage = Stage::NextTable;
        self.partition = None;
        self.step(context)
    }

    /// Takes the result of fetching the block that the last step needed. A damaged filter hides no
    /// keys: without it every key may exist.
    fn take(&mut self, context: &ReadContext, result: Result<Block>) -> Result<Step> {
        match result {
            Ok(block) => self.feed(context, block),
            Err(error)
                if matches!(self.stage, Stage::Filter) && error.kind() == Kind::Corruption =>
            {
                let table = self.table()?;
                if let Some(step) = self.look_in_index(table)? {
                    return Ok(step);
                }
                self.stage = Stage::NextTable;
                self.step(context)
            }
            Err(error) => Err(error),
        }
    }

    fn need(&mut self, handle: BlockHandle, stage: Stage) -> Step {
        self.stage = stage;
        let kind = match stage {
            Stage::Filter => BlockKind::Filter,
            Stage::IndexPartition => BlockKind::Index(self.index_format),
            _ => BlockKind::Data,
        };
        Step::Need(Need { slot: self.slot, handle, kind })
    }

    /// Looks into the memtables from the one with index `first` on. After operands, it continues
    /// at the seek key.
    fn look_in_memory(&mut self, context: &ReadContext, first: usize) -> Result<Option<Step>> {
        for (at, mem) in self.family.mems.iter().enumerate().skip(first) {
            let over = mem.max_tombstone(self.key, self.sequence);
            self.tombstone = self.tombstone.max(over);
            if self.operands.is_none()
                && let Some((packed, value)) = mem.get(self.key, self.sequence)
            {
                let value = Value::memory(self.view, self.family_at, at, value);
                if let Resolved::Step(step) = self.resolve(context, packed, None, value)? {
                    return Ok(Some(step));
                }
            }
            if self.operands.is_some() {
                if let Some(step) = self.look_below_operand(context, at, mem)? {
                    return Ok(Some(step));
                }
            } else if self.tombstone > 0 {
                // Everything that is left is older.
                return Ok(Some(Step::Done(None)));
            }
        }
        Ok(None)
    }

    /// Looks at the versions of the key in a memtable from the seek key on.
    #[cold]
    fn look_below_operand(
        &mut self,
        context: &ReadContext,
        at: usize,
        mem: &Mem,
    ) -> Result<Option<Step>> {
        let mut cursor = MemCursor::new(mem);
        let mut more = cursor.seek(mem, self.seek.as_slice());
        while more && user_key(cursor.key(mem)) == self.key {
            let packed = split(cursor.key(mem)).1;
            let Some(value) = cursor.value(mem) else { break };
            let value = Value::memory(self.view, self.family_at, at, value);
            if let Resolved::Step(step) = self.resolve(context, packed, None, value)? {
                return Ok(Some(step));
            }
            if self.pauses() {
                self.stage = Stage::Memory(at);
                return Ok(Some(Step::Pause));
            }
            more = cursor.next(mem);
        }
        Ok(None)
    }

    /// Moves to the next table that may hold the key, newest first.
    fn next_table(&mut self) -> bool {
        let version = &self.view.version;
        while let Some(level) = self.family.levels.get(self.level) {
            if self.level == 0 {
                while let Some(&slot) = level.slots.get(self.position) {
                    self.position += 1;
                    if self.in_bounds(version.meta(slot)) {
                        self.slot = slot;
                        return true;
                    }
                }
            } else {
                let at = level.find(self.family.comparator, self.seek.as_slice());
                if let Some(&slot) = level.slots.get(at)
                    && self.starts_before(version.meta(slot))
                    && (slot != self.slot || self.operands.is_none())
                {
                    self.level += 1;
                    self.slot = slot;
                    return true;
                }
            }
            self.level += 1;
            self.position = 0;
        }
        false
    }

    fn starts_before(&self, meta: &FileMeta) -> bool {
        let smallest = user_key(&meta.smallest);
        self.family.comparator.cmp_user(smallest, self.key).is_le()
    }

    fn in_bounds(&self, meta: &FileMeta) -> bool {
        let comparator = self.family.comparator;
        self.starts_before(meta)
            && comparator.cmp_internal(&meta.largest, self.seek.as_slice()).is_ge()
    }

    fn partition_lookup(&mut self, block: &Block, table: &Table) -> Result<Option<BlockHandle>> {
        let comparator = self.family.comparator;
        let (data, target) = (&block.data, self.seek.as_slice());
        index_lookup(data, block.index(), comparator, target, &mut self.scratch)
            .map_err(|e| Error::format(table.place(table_base(table)), &e))
    }

    fn top_lookup(&mut self, top: &IndexBlock, table: &Table) -> Result<Option<BlockHandle>> {
        top.lookup(self.family.comparator, self.seek.as_slice(), &mut self.scratch)
            .map_err(|e| Error::format(table.place(table_base(table)), &e))
    }

    fn look_in_index(&mut self, table: &'a Table) -> Result<Option<Step>> {
        let found = self.top_lookup(&table.index, table)?;
        let stage = if table.two_level { Stage::IndexPartition } else { Stage::Data };
        Ok(found.map(|handle| self.need(handle, stage)))
    }

    /// All entries of the block come before the seek key. If the separator after it has the user
    /// key of the lookup, older versions may start the next block: look up the position after the
    /// separator.
    #[cold]
    fn look_after(&mut self, table: &'a Table) -> Result<Option<Step>> {
        let format = |e: rocksfmt::Error| Error::format(table.place(table_base(table)), &e);
        let mut cursor = IndexCursor::new();
        let comparator = self.family.comparator;
        let held = self.partition.take();
        let (data, layout): (&[u8], &IndexLayout) = match &held {
            Some(block) => (&block.data, block.index()),
            None => (&table.index.data, &table.index.layout),
        };
        if layout.format().user_keys
            || !cursor.seek(data, layout, comparator, self.seek.as_slice()).map_err(format)?
        {
            return Ok(None);
        }
        let separator = cursor.key();
        let Some(at) = separator.len().checked_sub(KEY_TRAILER_BYTES) else { return Ok(None) };
        let (user, trailer) = separator.split_at(at);
        let packed = u64::from_le_bytes(trailer.try_into().unwrap_or_default());
        if user != self.key || packed == 0 {
            return Ok(None);
        }
        let mut behind = user.to_vec();
        behind.extend_from_slice(&(packed - 1).to_le_bytes());
        let found = index_lookup(
            &table.index.data,
            &table.index.layout,
            comparator,
            &behind,
            &mut self.scratch,
        )
        .map_err(format)?;
        // From here on the wanted version comes after the separator.
        self.seek = SeekKey::with_packed(user, packed - 1);
        let stage = if table.two_level { Stage::IndexPartition } else { Stage::Data };
        Ok(found.map(|handle| self.need(handle, stage)))
    }

    /// Interprets an entry.
    fn resolve(
        &mut self,
        context: &ReadContext,
        packed: u64,
        global: Option<u64>,
        value: Value,
    ) -> Result<Resolved> {
        let (stored, kind) = unpack(packed);
        let sequence = global.unwrap_or(stored);
        if sequence > self.sequence {
            return Ok(Resolved::Invisible);
        }
        if sequence < self.tombstone {
            return Ok(Resolved::Step(Step::Done(None)));
        }
        self.newest.get_or_insert(sequence);
        let packed = pack(sequence, kind);
        if is_operand(packed) && !self.only_existence {
            return self.take_operand(context, packed, &value);
        }
        Ok(Resolved::Step(Step::Done(meaning(self.family, packed, value)?)))
    }

    #[cold]
    fn take_operand(
        &mut self,
        context: &ReadContext,
        packed: u64,
        operand: &[u8],
    ) -> Result<Resolved> {
        if self.operands.is_none() {
            let new = FoundOperands::new(context, self.family, Order::NewestFirst)?;
            self.operands = Some(Box::new(new));
        }
        if let Some(operands) = &mut self.operands {
            operands.push(operand)?;
        }
        self.seek = SeekKey::with_packed(self.key, packed - 1);
        Ok(Resolved::Operand)
    }
}

fn table_base(table: &Table) -> u64 {
    table.footer.index.or(table.metaindex.index).map_or(0, |handle| handle.offset)
}

/// The meaning of a visible entry: a value, a reference to a blob, or a deleted key.
fn meaning(family: &Family, packed: u64, value: Value) -> Result<Option<Answer>> {
    let format =
        |e: rocksfmt::Error| Error::format(format_args!("column family {}", family.name), &e);
    Ok(match rocksfmt::value_type(packed).map_err(format)? {
        ValueType::Value => Some(Answer::Value(value)),
        kind if kind.is_tombstone() => None,
        ValueType::BlobIndex => Some(Answer::Blob(value)),
        ValueType::WideColumnEntity => {
            let range = rocksfmt::default_column(&value).map_err(format)?;
            Some(Answer::Value(value.part(range)))
        }
        ValueType::ValuePreferredSeqno => {
            let len = rocksfmt::timed_put_value(&value).map_err(format)?.len();
            Some(Answer::Value(value.part(0..len)))
        }
        // Only whether it exists is asked.
        ValueType::Merge => Some(Answer::Value(value)),
        other => {
            return Err(Error::new(
                Kind::Corruption,
                format!("column family {}: unexpected entry of type {other:?}", family.name),
            ));
        }
    })
}

/// The value of an iterator's entry; `None` for a tombstone.
pub(crate) async fn entry_value(
    context: &ReadContext,
    family_at: usize,
    key: &[u8],
    packed: u64,
    value: Value,
) -> Result<Option<Value>> {
    let family = &context.view.version.families[family_at];
    match meaning(family, packed, value)? {
        None => Ok(None),
        Some(Answer::Value(value)) => Ok(Some(value)),
        Some(Answer::Blob(index)) => blob::read(context, family_at, key, &index).await.map(Some),
    }
}

fn finish(context: &ReadContext, found: bool) {
    count(&context.state.counters.found, u64::from(found));
}

/// The value that a lookup found.
async fn answer(
    context: &ReadContext,
    lookup: Lookup<'_>,
    found: Option<Answer>,
) -> Result<Option<Value>> {
    finish(context, found.is_some() || lookup.operands.is_some());
    let base = match found {
        None => None,
        Some(Answer::Value(value)) => Some(value),
        Some(Answer::Blob(index)) => {
            Some(blob::read(context, lookup.family_at, lookup.key, &index).await?)
        }
    };
    match lookup.operands {
        None => Ok(base),
        Some(operands) => operands.value(base).await.map(Some),
    }
}

/// Continues a lookup to its end.
async fn run(context: &ReadContext, lookup: &mut Lookup<'_>) -> Result<Option<Answer>> {
    let state = &*context.state;
    let mut step = lookup.step(context)?;
    loop {
        match step {
            Step::Need(Need { slot, handle, kind }) => {
                let block = state.block(&context.view, slot, handle, kind, true).await;
                step = lookup.take(context, block)?;
            }
            Step::Pause => {
                state.core.checkpoint().await;
                step = lookup.step(context)?;
            }
            Step::Done(found) => return Ok(found),
        }
    }
}

pub(crate) async fn get(
    context: &ReadContext,
    family: CfId,
    key: &[u8],
    sequence: u64,
) -> Result<Option<Value>> {
    count(&context.state.counters.gets, 1);
    let mut lookup = Lookup::new(&context.view, family, key, sequence)?;
    let found = run(context, &mut lookup).await?;
    answer(context, lookup, found).await
}

/// As [`get`], with the sequence of the newest entry of the key.
pub(crate) async fn get_numbered(
    context: &ReadContext,
    family: CfId,
    key: &[u8],
    sequence: u64,
) -> Result<Option<(Value, u64)>> {
    count(&context.state.counters.gets, 1);
    let mut lookup = Lookup::new(&context.view, family, key, sequence)?;
    let found = run(context, &mut lookup).await?;
    let newest = lookup.newest.unwrap_or(0);
    Ok(answer(context, lookup, found).await?.map(|value| (value, newest)))
}

/// Whether a key exists, for values that do not fit into memory: does not read its blob, and reads
/// no more of an oversized data block than needed. Needs one small buffer at a time.
#[cold]
pub(crate) async fn contains(
    context: &ReadContext,
    family: CfId,
    key: &[u8],
    sequence: u64,
) -> Result<bool> {
    let state = &*context.state;
    let view = &context.view;
    let mut lookup = Lookup::new(view, family, key, sequence)?;
    lookup.only_existence = true;
    let mut step = lookup.step(context)?;
    loop {
        match step {
            Step::Pause => step = lookup.step(context)?,
            Step::Need(Need { slot, handle, kind }) => {
                let block = state.block(view, slot, handle, kind, true).await;
                step = match block {
                    Err(error) if error.kind() == Kind::Memory && kind == BlockKind::Data => {
                        let (comparator, target) =
                            (lookup.family.comparator, lookup.seek.as_slice());
                        match state.peek(view, slot, handle, comparator, target).await? {
                            Some(head) => lookup.feed_head(context, head)?,
                            None => return Err(error),
                        }
                    }
                    block => lookup.take(context, block)?,
                };
            }
            Step::Done(found) => return Ok(found.is_some()),
        }
    }
}

pub(crate) fn get_cached(
    context: &ReadContext,
    family: CfId,
    key: &[u8],
    sequence: u64,
) -> Option<Result<Option<Value>>> {
    let state = &*context.state;
    let mut lookup = match Lookup::new(&context.view, family, key, sequence) {
        Ok(lookup) => lookup,
        Err(error) => return Some(Err(error)),
    };
    lookup.known = state.foreseen.borrow_mut().take(&context.view.version, family, key);
    let mut step = lookup.step(context);
    loop {
        match step {
            Ok(Step::Need(Need { slot, handle, .. })) => {
                let block = state.cached(BlockKey::of(&context.view.version, slot, handle))?;
                step = lookup.feed(context, block);
            }
            Ok(Step::Pause | Step::Done(Some(Answer::Blob(_)))) => return None,
            Ok(Step::Done(found)) => {
                let base = found.map(|answer| match answer {
                    Answer::Value(value) | Answer::Blob(value) => value,
                });
                let value = match lookup.operands {
                    None => Ok(base),
                    Some(operands) => operands.value_now(base)?.map(Some),
                };
                count(&state.counters.gets, 1);
                finish(context, matches!(value, Ok(Some(_))));
                return Some(value);
            }
            Err(error) => return Some(Err(error)),
        }
    }
}

/// A block that a multi-get fetches.
enum Fetch<'a> {
    Running(Pin<Box<dyn Future<Output = Result<Block>> + 'a>>),
    Done(Result<Block>),
}

impl Fetch<'_> {
    fn poll(&mut self, cx: &mut Context<'_>) {
        if let Fetch::Running(fetch) = self
            && let Poll::Ready(result) = fetch.as_mut().poll(cx)
        {
            *self = Fetch::Done(result);
        }
    }
}

/// Where the values of keys are in blob files, without reading these. `None`: there is no value, or
/// it is not stored there as it is.
pub(crate) async fn places(
    context: &ReadContext,
    family: CfId,
    keys: &[&[u8]],
    sequence: u64,
) -> Vec<Result<Option<Place>>> {
    let (found, mut lookups, rest) = find(context, family, keys, sequence).await;
    let mut places: Vec<Result<Option<Place>>> =
        found.into_iter().map(|found| found.map(|_| None)).collect();
    for (at, rest) in rest {
        let Some(mut lookup) = lookups[at].take() else { continue };
        let found = match rest {
            Rest::Lookup => run(context, &mut lookup).await,
            Rest::Answer(found) => Ok(found),
        };
        places[at] = match found {
            Ok(Some(Answer::Blob(index))) if lookup.operands.is_none() => {
                blob::place(lookup.family, &index)
            }
            Ok(_) => Ok(None),
            Err(error) => Err(error),
        };
    }
    places
}

pub(crate) async fn multi_get(
    context: &ReadContext,
    family: CfId,
    keys: &[&[u8]],
    sequence: u64,
) -> Vec<Result<Option<Value>>> {
    let (mut results, mut lookups, rest) = find(context, family, keys, sequence).await;
    for (at, rest) in rest {
        let Some(mut lookup) = lookups[at].take() else { continue };
        let found = match rest {
            Rest::Lookup => run(context, &mut lookup).await,
            Rest::Answer(found) => Ok(found),
        };
        results[at] = match found {
            Ok(found) => answer(context, lookup, found).await,
            Err(error) => Err(error),
        };
    }
    results
}

/// The values of many keys, those in memory and in tables; and the lookups that are not at their
/// end, with what is left of each.
type FoundMany<'a> = (Vec<Result<Option<Value>>>, Vec<Option<Lookup<'a>>>, Vec<(usize, Rest)>);

async fn find<'a>(
    context: &'a ReadContext,
    family: CfId,
    keys: &[&'a [u8]],
    sequence: u64,
) -> FoundMany<'a> {
    let state = &*context.state;
    count(&state.counters.gets, keys.len() as u64);
    let view = &context.view;
    let mut results: Vec<Result<Option<Value>>> = Vec::with_capacity(keys.len());
    let mut lookups = Vec::with_capacity(keys.len());
    // Lookups that wait for a block, in the order of their requests.
    let mut waiting: VecDeque<(usize, Fetch<'_>)> = VecDeque::with_capacity(keys.len());
    // Lookups that end one after the other: their values are in blob files, or are to be merged.
    let mut rest = Vec::new();
    let mut settle = |at: usize,
                      step: Result<Step>,
                      lookup: &mut Lookup<'_>,
                      results: &mut Vec<Result<Option<Value>>>|
     -> Option<Need> {
        match step {
            Ok(Step::Need(need)) => return Some(need),
            Ok(Step::Pause) => rest.push((at, Rest::Lookup)),
            Ok(Step::Done(found)) if lookup.operands.is_some() => {
                rest.push((at, Rest::Answer(found)));
            }
            Ok(Step::Done(None)) => results[at] = Ok(None),
            Ok(Step::Done(Some(Answer::Value(value)))) => {
                finish(context, true);
                results[at] = Ok(Some(value));
            }
            Ok(Step::Done(found)) => rest.push((at, Rest::Answer(found))),
            Err(error) => results[at] = Err(error),
        }
        None
    };
    for (at, key) in keys.iter().enumerate() {
        results.push(Ok(None));
        let mut lookup = match Lookup::new(view, family, key, sequence) {
            Ok(lookup) => lookup,
            Err(error) => {
                results[at] = Err(error);
                lookups.push(None);
                continue;
            }
        };
        let step = lookup.step(context);
        let need = settle(at, step, &mut lookup, &mut results);
        lookups.push(Some(lookup));
        if let Some(Need { slot, handle, kind }) = need {
            let fetch = Box::pin(state.block(view, slot, handle, kind, true));
            waiting.push_back((at, Fetch::Running(fetch)));
        }
    }
    poll_all(&mut waiting).await;
    while let Some((at, result)) = next(&mut waiting).await {
        let Some(lookup) = lookups[at].as_mut() else { continue };
        let step = lookup.take(context, result);
        if let Some(Need { slot, handle, kind }) = settle(at, step, lookup, &mut results) {
            let fetch = Box::pin(state.block(view, slot, handle, kind, true));
            waiting.push_back((at, Fetch::Running(fetch)));
            poll_last(&mut waiting).await;
        }
    }
    (results, lookups, rest)
}

/// What is left of a lookup of a multi-get.
enum Rest {
    /// To continue it.
    Lookup,
    /// To make the value of what it found.
    Answer(Option<Answer>),
}

/// Polls every fetch once, so that all reads start; a finished one keeps its result.
async fn poll_all(waiting: &mut VecDeque<(usize, Fetch<'_>)>) {
    std::future::poll_fn(|cx| {
        waiting.iter_mut().for_each(|(_, fetch)| fetch.poll(cx));
        Poll::Ready(())
    })
    .await;
}

async fn poll_last(waiting: &mut VecDeque<(usize, Fetch<'_>)>) {
    std::future::poll_fn(|cx| {
        waiting.iter_mut().next_back().into_iter().for_each(|(_, fetch)| fetch.poll(cx));
        Poll::Ready(())
    })
    .await;
}

/// Waits for the first block in the queue. Meanwhile it polls the others too: one of them may lead
/// a flight that another task, or the first block itself, is waiting for (see
/// [`crate::read::flight`]), and two lookups waiting for each other would never end.
async fn next(waiting: &mut VecDeque<(usize, Fetch<'_>)>) -> Option<(usize, Result<Block>)> {
    std::future::poll_fn(|cx| {
        match waiting.front_mut() {
            None => return Poll::Ready(None),
            Some((_, first)) => first.poll(cx),
        }
        match waiting.pop_front() {
            Some((at, Fetch::Done(result))) => Poll::Ready(Some((at, result))),
            Some(running) => {
                waiting.push_front(running);
                waiting.iter_mut().skip(1).for_each(|(_, fetch)| fetch.poll(cx));
                Poll::Pending
            }
            None => Poll::Ready(None),
        }
    })
    .await
}
