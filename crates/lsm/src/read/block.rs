//! A block in memory: checked, unpacked, and shared within one core without copies.

use fs::Slice;
use rocksfmt::{BlockLayout, FilterLayout, IndexFormat, IndexLayout};

/// The layout of a block's bytes.
#[derive(Clone, Copy)]
pub(crate) enum Layout {
    Data(BlockLayout),
    /// A partition of a two-level index.
    Index(IndexLayout),
    /// A partition of a filter.
    Filter(FilterLayout),
}

/// The expected kind of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockKind {
    Data,
    Index(IndexFormat),
    Filter,
}

/// The verified, uncompressed bytes of a block and their layout.
#[derive(Clone)]
pub(crate) struct Block {
    pub data: Slice,
    pub layout: Layout,
}

impl Block {
    /// Parses the end of a block and checks the fields that lookups rely on.
    pub fn parse(data: Slice, kind: BlockKind) -> rocksfmt::Result<Block> {
        let layout = match kind {
            BlockKind::Data => Layout::Data(BlockLayout::parse(&data)?),
            BlockKind::Index(format) => Layout::Index(IndexLayout::parse(&data, format)?),
            BlockKind::Filter => Layout::Filter(FilterLayout::parse(&data)),
        };
        Ok(Block { data, layout })
    }

    /// Bytes of memory that its buffer occupies.
    pub fn footprint(&self) -> usize {
        self.data.footprint()
    }

    /// The layout of a data block.
    ///
    /// # Panics
    /// If it was read as another kind. That is a bug: blocks are cached by location, and each
    /// location is read as one kind only.
    #[inline]
    pub fn entries(&self) -> &BlockLayout {
        match &self.layout {
            Layout::Data(layout) => layout,
            _ => unreachable!("a data block is not an index or a filter"),
        }
    }

    /// The layout of an index partition.
    ///
    /// # Panics
    /// As for [`Block::entries`].
    pub fn index(&self) -> &IndexLayout {
        match &self.layout {
            Layout::Index(layout) => layout,
            _ => unreachable!("an index partition is not a data block or a filter"),
        }
    }
}
