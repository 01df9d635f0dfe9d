//! Sequential reading of all blocks of a table.

use fs::Slice;
use reactor::Core;
use rocksfmt::{BlockHandle, Compression, Decompressor, IndexCursor, IndexLayout};

use crate::error::{Error, Result};
use crate::open::sequential::Sequential;
use crate::table::{BLOCK_BYTES_MAX, Table};

/// The blocks of a table.
pub(crate) struct TableBlocks<'a> {
    core: &'a Core,
    name: &'a str,
    table: &'a Table,
    file: Sequential,
    decompressor: Decompressor,
}

impl<'a> TableBlocks<'a> {
    /// The blocks of a table with this file name.
    pub fn new(core: &'a Core, name: &'a str, table: &'a Table) -> TableBlocks<'a> {
        let file = Sequential::new(core.attach(&table.file));
        TableBlocks { core, name, table, file, decompressor: Decompressor::new() }
    }

    /// Reads, checks and unpacks a block. `is_data`: a data block, which may have a dictionary.
    pub async fn read(&mut self, handle: BlockHandle, is_data: bool) -> Result<Slice> {
        let len = self.table.stored_len(handle)?;
        let place = || format!("{} at offset {}", self.name, handle.offset);
        let stored =
            self.file.bytes(handle.offset, len).await.map_err(|e| Error::io(place(), &e))?;
        let format = |e: rocksfmt::Error| Error::format(place(), &e);
        let byte = self.table.check.verify(&stored, handle.offset).map_err(format)?;
        let payload = stored.slice(0..handle.size as usize);
        if byte == 0 {
            return Ok(payload);
        }
        let codec = Compression::from_byte(byte).map_err(format)?;
        let len = codec.decompressed_len(&payload, BLOCK_BYTES_MAX).map_err(format)?;
        let mut out = self.core.alloc_wait(len).await.map_err(|e| Error::io(place(), &e))?;
        let dictionary = self.table.dictionary.as_ref().filter(|_| is_data);
        self.decompressor.decompress(codec, &payload, dictionary, &mut out).map_err(format)?;
        Ok(Slice::new(out.share(), 0..len))
    }

    /// The data blocks, by the index.
    pub async fn data_handles(&mut self) -> Result<Vec<BlockHandle>> {
        let table = self.table;
        let format = |e: rocksfmt::Error| Error::format(format_args!("{}: index", self.name), &e);
        let top = index_handles(&table.index.data, &table.index.layout).map_err(format)?;
        if !table.two_level {
            return Ok(top);
        }
        let mut handles = Vec::new();
        for handle in top {
            let partition = self.read(handle, false).await?;
            let parsed = IndexLayout::parse(&partition, table.properties.index_format)
                .and_then(|layout| index_handles(&partition, &layout));
            handles.extend(parsed.map_err(|e| Error::format(self.name, &e))?);
        }
        Ok(handles)
    }
}

/// The blocks that an index block names.
pub(crate) fn index_handles(
    data: &[u8],
    layout: &IndexLayout,
) -> rocksfmt::Result<Vec<BlockHandle>> {
    let mut cursor = IndexCursor::new();
    let mut handles = Vec::new();
    let mut more = cursor.seek_to_first(data, layout)?;
    while more {
        handles.push(cursor.handle());
        more = cursor.next(data, layout)?;
    }
    Ok(handles)
}
