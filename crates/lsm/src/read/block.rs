//! A block in memory: checked, unpacked, and shared on one core without a copy.

use fs::Slice;
use rocksfmt::{BlockLayout, FilterLayout, IndexFormat, IndexLayout};

/// Largest block we unpack, in bytes: whatever a core's memory can hold at all, and so whatever can
/// be written.
pub(crate) const BLOCK_BYTES_MAX: usize = reactor::BUF_MAX;

/// How the bytes of a block are laid out.
#[derive(Clone, Copy)]
pub(crate) enum Layout {
    Data(BlockLayout),
    /// A partition of a two-level index.
    Index(IndexLayout),
    /// A partition of a filter.
    Filter(FilterLayout),
}

/// What a block is expected to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockKind {
    Data,
    Index(IndexFormat),
    Filter,
}

/// The bytes of a block behind its checksum and codec, and how they are laid out.
#[derive(Clone)]
pub(crate) struct Block {
    pub data: Slice,
    pub layout: Layout,
}

impl Block {
    /// Looks at a block's end and checks what lookups rely on.
    pub fn parse(data: Slice, kind: BlockKind) -> rocksfmt::Result<Block> {
        let layout = match kind {
            BlockKind::Data => Layout::Data(BlockLayout::parse(&data)?),
            BlockKind::Index(format) => Layout::Index(IndexLayout::parse(&data, format)?),
            BlockKind::Filter => Layout::Filter(FilterLayout::parse(&data)),
        };
        Ok(Block { data, layout })
    }

    /// Bytes of memory its buffer occupies.
    pub fn footprint(&self) -> usize {
        self.data.footprint()
    }

    /// The layout of a data block.
    ///
    /// # Panics
    /// When it was read as something else, which is a mistake of ours: blocks are cached by
    /// place, and a place is read as one kind only.
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
