//! Iterates over one sorted run of tables: a level, or a single table of level 0.

use std::rc::Rc;

use rocksfmt::{BlockCursor, Comparator, KEY_TRAILER_BYTES, pack, unpack};

use crate::error::{Error, Result};
use crate::read::ahead::{ReadAhead, WINDOW_MAX};
use crate::read::block::Block;
use crate::read::run::Run;
use crate::read::state::ReadContext;
use crate::read::value::Value;
use crate::read::walk::{Direction, Position};
use crate::version::user_key;

/// Blocks after the current one that are searched for a position before a seek.
const NEAR_BLOCKS: usize = 2;

/// The bounds of an iterator as user keys: lower inclusive, upper exclusive.
#[derive(Default)]
pub(crate) struct Bounds {
    pub lower: Option<Vec<u8>>,
    pub upper: Option<Vec<u8>>,
}

impl Bounds {
    fn ahead(&self, direction: Direction) -> Option<&[u8]> {
        match direction {
            Direction::Forward => self.upper.as_deref(),
            Direction::Backward => self.lower.as_deref(),
        }
    }
}

/// An iterator over one sorted run.
pub(crate) struct LevelIter {
    context: ReadContext,
    comparator: Comparator,
    bounds: Rc<Bounds>,
    keep: bool,
    slots: Run,
    /// Index of the current table in `slots`; `slots.len()` when nowhere.
    at: usize,
    ahead: Option<ReadAhead>,
    /// The widest window of read-ahead.
    window_max: usize,
    block: Option<Block>,
    cursor: BlockCursor,
    direction: Direction,
    global: Option<u64>,
    /// Bytes usually read after a seek; the next seek reads that much at once.
    learned: usize,
    /// The iterator's direction after its recent seeks: users of RocksDB seek and then go backward
    /// as readily as forward. `None`: assume the direction of the seek.
    habit: Option<Direction>,
    /// Bytes consumed since the last seek, in tables already left.
    passed: usize,
    positioned: bool,
    /// It is before a table that cannot be read, in this direction: see [`LevelIter::stop_at`].
    edge: Option<Direction>,
}

impl LevelIter {
    pub fn new(
        context: &ReadContext,
        comparator: Comparator,
        slots: Run,
        bounds: &Rc<Bounds>,
        keep: bool,
        expected_bytes: usize,
        expected_backward: bool,
    ) -> LevelIter {
        LevelIter {
            context: context.clone(),
            comparator,
            bounds: bounds.clone(),
            keep,
            at: slots.len(),
            slots,
            ahead: None,
            window_max: WINDOW_MAX,
            block: None,
            cursor: BlockCursor::new(),
            direction: Direction::Forward,
            global: None,
            learned: expected_bytes,
            habit: expected_backward.then_some(Direction::Backward),
            passed: 0,
            positioned: false,
            edge: None,
        }
    }

    /// Limits the read-ahead to `bytes`.
    pub fn with_window_max(mut self, bytes: usize) -> LevelIter {
        self.window_max = bytes;
        self
    }

    #[inline]
    pub fn valid(&self) -> bool {
        self.cursor.valid()
    }

    #[inline]
    pub fn user_key(&self) -> &[u8] {
        let key = self.cursor.key();
        &key[..key.len().saturating_sub(KEY_TRAILER_BYTES)]
    }

    /// Packed sequence and type of the entry.
    #[inline]
    pub fn packed(&self) -> u64 {
        let key = self.cursor.key();
        let stored = key.last_chunk::<8>().map_or(0, |trailer| u64::from_le_bytes(*trailer));
        match self.global {
            None => stored,
            Some(sequence) => pack(sequence, unpack(stored).1),
        }
    }

    pub fn value(&self) -> Value {
        match &self.block {
            Some(block) => {
                let range = self.cursor.value_range();
                Value::block(block.data.slice(range))
            }
            None => Value::empty(),
        }
    }

    /// Bytes of memory that the current block occupies.
    pub fn footprint(&self) -> usize {
        self.block.as_ref().map_or(0, Block::footprint)
    }

    /// Releases all memory; call it before a seek that may wait.
    pub fn leave(&mut self) {
        self.block = None;
        if let Some(ahead) = &mut self.ahead {
            ahead.leave();
        }
    }

    /// Releases the current block. The key stays; call [`LevelIter::regain`] before any other
    /// method.
    pub fn shed(&mut self) {
        self.block = None;
    }

    /// Reads the current block again after [`LevelIter::shed`]. Suspends for it. Whether it was
    /// released.
    pub async fn regain(&mut self) -> Result<bool> {
        if self.valid()
            && self.block.is_none()
            && let Some(ahead) = &self.ahead
        {
            self.block = Some(ahead.again().await?);
            return Ok(true);
        }
        Ok(false)
    }

    /// The slot of the current table, or of the last one.
    pub fn slot(&self) -> u32 {
        self.slots.get(self.at).or(self.slots.last()).copied().unwrap_or_default()
    }

    /// The largest sequence number of all tables.
    pub fn largest_sequence(&self) -> u64 {
        self.slots.largest_sequence(&self.context.view.version)
    }

    /// The largest sequence number of the current table.
    pub fn table_sequence(&self) -> u64 {
        let version = &self.context.view.version;
        self.slots.get(self.at).map_or(0, |&slot| version.meta(slot).largest_sequence)
    }

    /// Moves on from an entry to the first one at or after the internal key `target`, or backward
    /// to the last one at or before it, but not beyond a table that has sequences above `hidden`:
    /// the caller knows that everything else on the way is deleted. Suspends for blocks, but reads
    /// none of the tables that it skips.
    pub async fn skip(&mut self, target: &[u8], hidden: u64, direction: Direction) -> Result<()> {
        let stop = self.first_beyond(target, hidden, direction);
        let target = stop.as_deref().unwrap_or(target);
        let position = match direction {
            Direction::Forward => Position::AtOrAfter(target),
            Direction::Backward => Position::AtOrBefore(target),
        };
        if direction == self.direction && self.find_near(position).await? {
            return Ok(());
        }
        self.seek(position, direction).await
    }

    /// Moves on to a position if it is in this block or the next ones. A seek would read this block
    /// again for each of many small ranges in it.
    async fn find_near(&mut self, position: Position<'_>) -> Result<bool> {
        if self.block.is_none() {
            return Ok(false);
        }
        if self.seek_in_block(position)? {
            return Ok(true);
        }
        for _ in 0..NEAR_BLOCKS {
            if self.take_block(self.direction, position).await? {
                return Ok(true);
            }
            if self.block.is_none() {
                break;
            }
        }
        Ok(false)
    }

    /// The first key of a table before `target` that has sequences above `hidden`, if there is one.
    /// The bounds of a table say which user keys it has: an ingested one has other sequences in its
    /// entries.
    fn first_beyond(&self, target: &[u8], hidden: u64, direction: Direction) -> Option<Vec<u8>> {
        let version = &self.context.view.version;
        let mut at = self.at;
        loop {
            let meta = version.meta(*self.slots.get(at)?);
            let (near, far) = match direction {
                Direction::Forward => (&meta.smallest, &meta.largest),
                Direction::Backward => (&meta.largest, &meta.smallest),
            };
            if meta.largest_sequence > hidden {
                let trailer = match direction {
                    Direction::Forward => u64::MAX,
                    Direction::Backward => 0,
                };
                let near = [user_key(near), &trailer.to_le_bytes()].concat();
                let order = self.comparator.cmp_internal(&near, target);
                let is_before = match direction {
                    Direction::Forward => order.is_lt(),
                    Direction::Backward => order.is_gt(),
                };
                return is_before.then_some(near);
            }
            let order = self.comparator.cmp_internal(far, target);
            match direction {
                Direction::Forward if order.is_lt() => at += 1,
                Direction::Backward if order.is_gt() => at = at.checked_sub(1)?,
                _ => return None,
            }
        }
    }

    fn format(&self, e: &rocksfmt::Error) -> Error {
        match self.slots.get(self.at) {
            Some(&slot) => {
                let number = self.context.view.version.meta(slot).number;
                Error::format(format_args!("{number:06}.sst"), e)
            }
            None => Error::format("a table", e),
        }
    }

    /// Before a seek: notes how much was read after the last one, and in which direction.
    fn learn(&mut self) {
        if self.positioned {
            let consumed = self.passed + self.ahead.as_ref().map_or(0, ReadAhead::consumed);
            self.learned = self.learned / 2 + consumed / 2;
            self.habit = Some(self.direction);
        }
        self.passed = 0;
        self.positioned = true;
    }

    /// Moves to the first entry in a direction from a position. Suspends for blocks.
    pub async fn seek(&mut self, position: Position<'_>, direction: Direction) -> Result<()> {
        self.learn();
        self.cursor.reset();
        self.block = None;
        self.edge = None;
        let found = {
            let version = &self.context.view.version;
            let largest = |slot: &u32| -> &[u8] { &version.meta(*slot).largest };
            let smallest = |slot: &u32| -> &[u8] { &version.meta(*slot).smallest };
            match position {
                Position::First => 0,
                Position::Last => self.slots.len().wrapping_sub(1),
                Position::AtOrAfter(key) => self.slots.partition_point(|slot| {
                    self.comparator.cmp_internal(largest(slot), key).is_lt()
                }),
                Position::AtOrBefore(key) => self
                    .slots
                    .partition_point(|slot| {
                        self.comparator.cmp_internal(smallest(slot), key).is_le()
                    })
                    .wrapping_sub(1),
            }
        };
        // A window slightly too small costs another read at the end; one slightly too large costs
        // little.
        let window = self.learned + self.learned / 8;
        let habit = self.habit.filter(|_| window > 0).unwrap_or(direction);
        self.enter(found, position, habit, window).await?;
        if self.at >= self.slots.len() || self.edge.is_some() {
            // Nowhere: the read-ahead belongs to the table that was left.
            return Ok(());
        }
        if habit != direction
            && let Position::AtOrAfter(key) | Position::AtOrBefore(key) = position
        {
            // The blocks in the usual direction are being read. The entry itself is in their first
            // block, or in its neighbour on the other side.
            if self.take_block(habit, position).await? || self.at >= self.slots.len() {
                return Ok(());
            }
            let bounds = self.bounds.clone();
            if let Some(ahead) = &mut self.ahead {
                ahead.turn(key, direction, bounds.ahead(direction)).await?;
            }
            self.direction = direction;
        }
        self.settle(direction, position).await
    }

    /// Opens the table at `at` for iterating; without one, goes nowhere.
    async fn enter(
        &mut self,
        at: usize,
        position: Position<'_>,
        direction: Direction,
        window: usize,
    ) -> Result<()> {
        self.direction = direction;
        let Some(&slot) = self.slots.get(at) else {
            self.at = self.slots.len();
            self.block = None;
            self.cursor.reset();
            return Ok(());
        };
        if self.at != at || self.ahead.is_none() {
            self.at = at;
            self.ahead = None;
            match self.context.view.version.table(slot) {
                Ok(table) => self.global = table.global_sequence,
                Err(error) => return self.stop_at(slot, position, error),
            }
            let (comparator, keep) = (self.comparator, self.keep);
            let ahead = ReadAhead::new(&self.context, slot, comparator, keep, self.window_max);
            self.ahead = Some(ahead);
        }
        let bounds = self.bounds.clone();
        if let Some(ahead) = &mut self.ahead {
            ahead.seek(position, direction, window, bounds.ahead(direction)).await?;
        }
        Ok(())
    }

    /// Stops before a table that cannot be read, unless the position is inside its keys. The cursor
    /// is on an entry that no reader sees, with the table's first key in the direction of the
    /// position. The next step in this direction returns the error: so an iterator returns all keys
    /// before the table.
    #[cold]
    fn stop_at(&mut self, slot: u32, position: Position<'_>, error: Error) -> Result<()> {
        let meta = self.context.view.version.meta(slot);
        let order = |target: &[u8], key: &[u8]| self.comparator.cmp_user(user_key(target), key);
        let (direction, key, trailer) = match position {
            Position::First | Position::AtOrAfter(_) => {
                (Direction::Forward, user_key(&meta.smallest), u64::MAX)
            }
            Position::Last | Position::AtOrBefore(_) => {
                (Direction::Backward, user_key(&meta.largest), 0)
            }
        };
        let is_inside = match position {
            Position::First | Position::Last => false,
            Position::AtOrAfter(target) => order(target, key).is_ge(),
            Position::AtOrBefore(target) => order(target, key).is_le(),
        };
        if is_inside {
            return Err(error);
        }
        self.cursor.place(&[key, &u64::to_le_bytes(trailer)].concat());
        self.block = None;
        self.global = None;
        self.direction = direction;
        self.edge = Some(direction);
        Ok(())
    }

    /// Takes blocks until the cursor is on the first entry from a position.
    async fn settle(&mut self, direction: Direction, position: Position<'_>) -> Result<()> {
        while self.at < self.slots.len() {
            if self.take_block(direction, position).await? {
                return Ok(());
            }
            // The table is exhausted. Unless it ended at the bound, try the next one.
            if self.block.is_none() && (!self.next_table(direction).await? || self.edge.is_some()) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Takes the next block and seeks the position in it; true if the cursor is on an entry. If
    /// there was no block, none is held afterwards.
    async fn take_block(&mut self, direction: Direction, position: Position<'_>) -> Result<bool> {
        self.block = None;
        let bounds = self.bounds.clone();
        let Some(ahead) = &mut self.ahead else { return Ok(false) };
        let Some(block) = ahead.next(bounds.ahead(direction)).await? else { return Ok(false) };
        self.block = Some(block);
        self.seek_in_block(position)
    }

    /// Moves to a position in the current block; false if it has none.
    fn seek_in_block(&mut self, position: Position<'_>) -> Result<bool> {
        let Some(block) = &self.block else { return Ok(false) };
        let (data, layout) = (&block.data, block.entries());
        let found = match position {
            Position::First => self.cursor.seek_to_first(data, layout),
            Position::Last => self.cursor.seek_to_last(data, layout),
            Position::AtOrAfter(key) => self.cursor.seek(data, layout, self.comparator, key),
            Position::AtOrBefore(key) => {
                self.cursor.seek_for_prev(data, layout, self.comparator, key)
            }
        };
        found.map_err(|e| self.format(&e))
    }

    /// Moves on to the neighbouring table, keeping the read-ahead's window.
    async fn next_table(&mut self, direction: Direction) -> Result<bool> {
        let window = match &self.ahead {
            Some(ahead) => {
                self.passed += ahead.consumed();
                ahead.window()
            }
            None => 0,
        };
        let next = match direction {
            Direction::Forward => self.at + 1,
            Direction::Backward => self.at.wrapping_sub(1),
        };
        let position = match direction {
            Direction::Forward => Position::First,
            Direction::Backward => Position::Last,
        };
        if let Some(&slot) = self.slots.get(next)
            && self.beyond_bound(slot, direction)
        {
            self.at = self.slots.len();
            self.cursor.reset();
            return Ok(false);
        }
        self.enter(next, position, direction, window).await?;
        Ok(self.at < self.slots.len())
    }

    fn beyond_bound(&self, slot: u32, direction: Direction) -> bool {
        let meta = self.context.view.version.meta(slot);
        match (direction, self.bounds.ahead(direction)) {
            (_, None) => false,
            (Direction::Forward, Some(upper)) => {
                self.comparator.cmp_user(user_key(&meta.smallest), upper).is_ge()
            }
            (Direction::Backward, Some(lower)) => {
                self.comparator.cmp_user(user_key(&meta.largest), lower).is_lt()
            }
        }
    }

    /// Moves within the current block; false at its end in this direction.
    #[inline]
    fn step_in_block(&mut self, direction: Direction) -> Result<bool> {
        let Some(block) = &self.block else { return Ok(false) };
        let (data, layout) = (&block.data, block.entries());
        let moved = match direction {
            Direction::Forward => self.cursor.next(data, layout),
            Direction::Backward => self.cursor.prev(data, layout),
        };
        moved.map_err(|e| self.format(&e))
    }

    /// Moves one entry in a direction. Suspends for the next block. Whether the entry is in the
    /// same block.
    pub async fn step(&mut self, direction: Direction) -> Result<bool> {
        if direction != self.direction {
            self.turn(direction).await?;
        }
        if self.step_in_block(direction)? {
            return Ok(true);
        }
        if self.edge.take() == Some(direction) {
            self.cursor.reset();
            self.context.view.version.table(self.slot())?;
        }
        let position = match direction {
            Direction::Forward => Position::First,
            Direction::Backward => Position::Last,
        };
        self.settle(direction, position).await?;
        Ok(false)
    }

    /// Reverses the direction: the current block stays, and only the blocks after it change.
    async fn turn(&mut self, direction: Direction) -> Result<()> {
        let bounds = self.bounds.clone();
        if let Some(ahead) = &mut self.ahead
            && self.cursor.valid()
        {
            ahead.turn(self.cursor.key(), direction, bounds.ahead(direction)).await?;
        }
        self.direction = direction;
        Ok(())
    }
}
