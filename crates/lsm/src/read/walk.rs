//! Walks the data blocks of one table in order, through one or two levels of index.

use rocksfmt::{BlockHandle, IndexCursor, KEY_TRAILER_BYTES};

use crate::error::{Error, Result};
use crate::read::block::{Block, BlockKind};
use crate::read::state::ReadContext;
use crate::table::Table;

/// The direction of a walk or an iterator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

/// The target of a seek.
#[derive(Clone, Copy)]
pub(crate) enum Position<'a> {
    First,
    Last,
    /// The block that may hold the first entry at or after this internal key.
    AtOrAfter(&'a [u8]),
    /// The last block that may hold an entry at or before this internal key.
    AtOrBefore(&'a [u8]),
}

/// A position among a table's data blocks.
pub(crate) struct Walk {
    context: ReadContext,
    slot: u32,
    user_keys: bool,
    top: IndexCursor,
    partition: Option<(Block, IndexCursor)>,
}

impl Walk {
    pub fn new(context: &ReadContext, slot: u32) -> Walk {
        let user_keys = context
            .view
            .version
            .table(slot)
            .is_ok_and(|table| table.index.layout.format().user_keys);
        let top = IndexCursor::new();
        Walk { context: context.clone(), slot, user_keys, top, partition: None }
    }

    /// The current block.
    pub fn handle(&self) -> BlockHandle {
        match &self.partition {
            Some((_, cursor)) => cursor.handle(),
            None => self.top.handle(),
        }
    }

    /// The user key of the separator after the current block.
    pub fn separator(&self) -> &[u8] {
        let key = match &self.partition {
            Some((_, cursor)) => cursor.key(),
            None => self.top.key(),
        };
        if self.user_keys { key } else { &key[..key.len().saturating_sub(KEY_TRAILER_BYTES)] }
    }

    /// Moves to a position; false if there is no such block. Suspends for an index partition.
    pub async fn go(&mut self, position: Position<'_>) -> Result<bool> {
        let (found, two_level) = {
            let table = self.context.view.version.table(self.slot)?;
            let (data, layout) = (&table.index.data, &table.index.layout);
            (place(&mut self.top, data, layout, table, position)?, table.two_level)
        };
        self.partition = None;
        if !found || !two_level {
            return Ok(found);
        }
        self.load_partition(position).await?;
        // A key after the last entry of its partition belongs to the next partition.
        if self.partition.as_ref().is_some_and(|(_, cursor)| !cursor.valid()) {
            return self.cross(Direction::Forward).await;
        }
        Ok(true)
    }

    /// Moves one block in a direction; false at the end. Suspends for an index partition.
    pub async fn step(&mut self, direction: Direction) -> Result<bool> {
        let context = self.context.clone();
        let table = context.view.version.table(self.slot)?;
        let format = |e: rocksfmt::Error| Error::format(table.place(0), &e);
        if let Some((block, cursor)) = &mut self.partition {
            let moved = match direction {
                Direction::Forward => cursor.next(&block.data, block.index()),
                Direction::Backward => cursor.prev(&block.data, block.index()),
            };
            if moved.map_err(format)? {
                return Ok(true);
            }
            return self.cross(direction).await;
        }
        let (data, layout) = (&table.index.data, &table.index.layout);
        match direction {
            Direction::Forward => self.top.next(data, layout),
            Direction::Backward => self.top.prev(data, layout),
        }
        .map_err(format)
    }

    /// Moves to the next partition that is not empty.
    async fn cross(&mut self, direction: Direction) -> Result<bool> {
        let context = self.context.clone();
        let table = context.view.version.table(self.slot)?;
        loop {
            let (data, layout) = (&table.index.data, &table.index.layout);
            let (moved, position) = match direction {
                Direction::Forward => (self.top.next(data, layout), Position::First),
                Direction::Backward => (self.top.prev(data, layout), Position::Last),
            };
            if !moved.map_err(|e| Error::format(table.place(0), &e))? {
                self.partition = None;
                return Ok(false);
            }
            self.load_partition(position).await?;
            if self.partition.as_ref().is_some_and(|(_, cursor)| cursor.valid()) {
                return Ok(true);
            }
        }
    }

    async fn load_partition(&mut self, position: Position<'_>) -> Result<()> {
        let context = self.context.clone();
        let state = &*context.state;
        let table = context.view.version.table(self.slot)?;
        let kind = BlockKind::Index(table.properties.index_format);
        let handle = self.top.handle();
        let block = state.block(&context.view, self.slot, handle, kind, true).await?;
        let mut cursor = IndexCursor::new();
        place(&mut cursor, &block.data, block.index(), table, position)?;
        self.partition = Some((block, cursor));
        Ok(())
    }
}

fn place(
    cursor: &mut IndexCursor,
    data: &[u8],
    layout: &rocksfmt::IndexLayout,
    table: &Table,
    position: Position<'_>,
) -> Result<bool> {
    match position {
        Position::First => cursor.seek_to_first(data, layout),
        Position::Last => cursor.seek_to_last(data, layout),
        Position::AtOrAfter(key) => cursor.seek(data, layout, table.comparator, key),
        Position::AtOrBefore(key) => cursor.seek_for_prev(data, layout, table.comparator, key),
    }
    .map_err(|e| Error::format(table.place(0), &e))
}
