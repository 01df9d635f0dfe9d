//! An open SST file: the part of it that stays in memory, shared by all cores and never changed.
//!
//! Opening reads the file's tail in one read, if the MANIFEST says how long it is: footer,
//! metaindex, properties, index, filter, dictionary, range tombstones. Index and filter stay in
//! memory while there is room for them (see [`crate::table_memory`]). Otherwise they are read like
//! data blocks, and an index of one entry, which points to the index, stays. Of a partitioned index
//! or filter the top level stays, and the partitions are read like data blocks.

use std::sync::Arc;

use fs::{Dir, File, SharedFile, Slice};
use reactor::Core;
use rocksfmt::{
    BlockCheck, BlockHandle, Comparator, Decompressor, Dictionary, FOOTER_BYTES, FileMeta,
    FilterHandle, FilterLayout, Footer, IndexLayout, IndexSearch, IndexType, Metaindex, Properties,
    RangeTombstones, RangeTombstonesParsing, index_lookup, index_of_one,
};

use crate::error::{Error, Kind, Result};
use crate::table_memory::{Charge, TableMemory};

/// Largest block that is unpacked, in bytes: the largest buffer that a core can have, and so the
/// largest block that can be written.
pub(crate) const BLOCK_BYTES_MAX: usize = reactor::BUF_MAX;

/// An index block in memory, with a search structure that touches few cache lines.
pub(crate) struct IndexBlock {
    pub data: Box<[u8]>,
    pub layout: IndexLayout,
    search: Option<IndexSearch>,
}

impl IndexBlock {
    /// The block that may hold the first entry at or after the internal key `target`.
    #[inline]
    pub fn lookup(
        &self,
        comparator: Comparator,
        target: &[u8],
        scratch: &mut Vec<u8>,
    ) -> rocksfmt::Result<Option<BlockHandle>> {
        match &self.search {
            Some(search) => search.lookup(&self.data, &self.layout, target, scratch),
            None => index_lookup(&self.data, &self.layout, comparator, target, scratch),
        }
    }

    /// What [`IndexBlock::lookup`] reads, if it has the structure.
    #[inline]
    pub fn search(&self) -> Option<&IndexSearch> {
        self.search.as_ref()
    }

    /// Bytes of memory held.
    fn memory(&self) -> usize {
        self.data.len() + self.search.as_ref().map_or(0, IndexSearch::memory)
    }
}

/// A file's filter.
pub(crate) enum Filter {
    /// No filter: every key may be there.
    None,
    /// One filter for the whole file.
    Full { data: Box<[u8]>, layout: FilterLayout },
    /// One filter for the whole file, which is read on demand.
    OnDemand(BlockHandle),
    /// An index of filters.
    Partitioned(IndexBlock),
}

impl Filter {
    /// A short name for people.
    pub fn describe(&self) -> String {
        match self {
            Filter::None => "none".to_owned(),
            Filter::Partitioned(_) => "partitioned".to_owned(),
            Filter::OnDemand(_) => "not in memory".to_owned(),
            Filter::Full { layout, .. } => match layout {
                FilterLayout::Empty => "empty".to_owned(),
                FilterLayout::Bloom { probes, .. } => format!("Bloom, {probes} probes"),
                FilterLayout::LegacyBloom { probes, .. } => {
                    format!("legacy Bloom, {probes} probes")
                }
                FilterLayout::AlwaysMatch(why) => format!("not used ({why:?})"),
            },
        }
    }
}

/// An open table.
pub(crate) struct Table {
    pub meta: FileMeta,
    pub file: Arc<SharedFile>,
    pub comparator: Comparator,
    pub check: BlockCheck,
    pub footer: Footer,
    pub metaindex: Metaindex,
    pub properties: Properties,
    pub index: IndexBlock,
    /// The entries of `index` lead to index blocks: it is partitioned, or not in memory.
    pub two_level: bool,
    pub filter: Filter,
    pub dictionary: Option<Dictionary>,
    pub range_tombstones: Option<RangeTombstones>,
    /// The sequence number of all entries of an ingested file.
    pub global_sequence: Option<u64>,
    /// The memory that it holds.
    _charge: Charge,
}

/// Bytes of the tail read if index and filter do not stay in memory, about.
const TAIL_WITHOUT: usize = 16 << 10;
/// Least bytes of the tail read.
const TAIL_MIN: usize = 4 << 10;
/// Bytes of the tail read if the length of the tail is not known.
const TAIL_GUESS: usize = 128 << 10;
/// Most bytes of the tail read.
const TAIL_MAX: usize = 16 << 20;
/// Larger blocks before the tail are read in pieces of this size, in bytes.
const PIECE: usize = 256 << 10;

/// The end of a file in memory, and the file for reads before it.
struct Tail {
    file: File,
    bytes: Slice,
    offset: u64,
    check: BlockCheck,
    limit: u64,
}

impl Tail {
    /// Reads the tail of a file, which has `tail_bytes` if that is known, and its footer.
    async fn read(
        core: &Core,
        shared: &Arc<SharedFile>,
        name: &str,
        tail_bytes: u64,
        charge: &Charge,
    ) -> Result<(Tail, Footer)> {
        let size = shared.size();
        let wanted = match tail_bytes {
            0 => TAIL_GUESS,
            known => (known as usize).saturating_add(FOOTER_BYTES),
        };
        let wanted = if charge.may_take(wanted) { wanted } else { TAIL_WITHOUT };
        let len = (wanted.clamp(TAIL_MIN, TAIL_MAX) as u64).min(size);
        let file = core.attach(shared);
        let offset = size - len;
        let bytes = fs::read(&file, offset, len as usize)
            .await
            .map_err(|e| Error::io(format_args!("{name} at offset {offset}"), &e))?;
        let footer = Footer::parse(&bytes, size).map_err(|e| {
            let offset = size.saturating_sub(FOOTER_BYTES as u64);
            Error::format(format_args!("{name} at offset {offset}"), &e)
        })?;
        Ok((Tail { file, bytes, offset, check: footer.check, limit: footer.offset }, footer))
    }

    /// A block with its trailer.
    async fn stored(&self, handle: BlockHandle) -> Result<Slice> {
        let len = self.stored_len(handle)?;
        match handle.offset.checked_sub(self.offset) {
            Some(start) => {
                let start = start as usize;
                Ok(self.bytes.slice(start..start + len))
            }
            None => {
                let read = fs::read(&self.file, handle.offset, len).await;
                read.map_err(|e| Error::io(self.place(handle.offset), &e))
            }
        }
    }

    /// A block with its trailer, which may be larger than a core's buffers together: RocksDB writes
    /// all range tombstones of a file as one block.
    async fn in_pieces(&self, handle: BlockHandle) -> Result<Vec<u8>> {
        let len = self.stored_len(handle)?;
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let offset = handle.offset + bytes.len() as u64;
            let read = fs::read(&self.file, offset, (len - bytes.len()).min(PIECE)).await;
            bytes.extend_from_slice(&read.map_err(|e| Error::io(self.place(offset), &e))?);
        }
        Ok(bytes)
    }

    fn place(&self, offset: u64) -> String {
        format!("{} at offset {offset}", self.file.path().display())
    }

    /// The length of a block with its trailer.
    fn stored_len(&self, handle: BlockHandle) -> Result<usize> {
        handle.stored_len(self.limit).ok_or_else(|| {
            let place = self.place(handle.offset);
            let text = format!("{place}: a block of {} bytes extends past the data", handle.size);
            Error::new(Kind::Corruption, text)
        })
    }

    /// A block's contents on the heap. They are always verified, whatever the options say, because
    /// they stay in memory and every lookup depends on them.
    async fn contents(&self, core: &Core, handle: BlockHandle) -> Result<Box<[u8]>> {
        let format = |e: rocksfmt::Error| {
            Error::format(
                format_args!("{} at offset {}", self.file.path().display(), handle.offset),
                &e,
            )
        };
        if handle.offset < self.offset && handle.size as usize > PIECE {
            let mut bytes = self.in_pieces(handle).await?;
            if self.check.verify(&bytes, handle.offset).map_err(format)? == 0 {
                bytes.truncate(handle.size as usize);
                return Ok(bytes.into_boxed_slice());
            }
        }
        let stored = self.stored(handle).await?;
        let byte = self.check.verify(&stored, handle.offset).map_err(format)?;
        let payload = &stored[..stored.len() - rocksfmt::BLOCK_TRAILER_BYTES];
        if byte == 0 {
            return Ok(payload.into());
        }
        let codec = rocksfmt::Compression::from_byte(byte).map_err(format)?;
        let len = codec.decompressed_len(payload, BLOCK_BYTES_MAX).map_err(format)?;
        if !core.pool().could_hold(len) {
            return Err(Error::new(
                Kind::Memory,
                format!("{}: a block unpacks to {len} bytes", self.file.path().display()),
            ));
        }
        let mut out = vec![0; len].into_boxed_slice();
        Decompressor::new().decompress(codec, payload, None, &mut out).map_err(format)?;
        Ok(out)
    }
}

impl Table {
    /// Opens and checks a file. Suspends for its reads.
    pub async fn open(
        core: &Core,
        dir: &Dir,
        name: &str,
        meta: FileMeta,
        comparator: Comparator,
        memory: &Arc<TableMemory>,
    ) -> Result<Table> {
        let charge = Charge::new(memory);
        let shared = dir.open(name).await.map_err(|e| Error::io(format_args!("{name}"), &e))?;
        if shared.size() != meta.size_bytes {
            return Err(Error::new(
                Kind::Corruption,
                format!(
                    "{name}: {} bytes long, the manifest says {}",
                    shared.size(),
                    meta.size_bytes
                ),
            ));
        }
        let format = |e: rocksfmt::Error| Error::format(name, &e);
        let (tail, footer) = Tail::read(core, &shared, name, meta.tail_bytes, &charge).await?;
        let metaindex =
            Metaindex::parse(&tail.contents(core, footer.metaindex).await?).map_err(format)?;
        let mut properties = match metaindex.properties {
            Some(handle) => read_properties(&tail, name, handle).await?,
            None => Properties::default(),
        };
        if properties.timestamps_stripped {
            return Err(Error::new(Kind::Unsupported, format!("{name}: user-defined timestamps")));
        }
        let global_sequence = properties.global_sequence(meta.largest_sequence).map_err(format)?;
        let index_handle = footer
            .index
            .or(metaindex.index)
            .ok_or_else(|| Error::new(Kind::Corruption, format!("{name}: no index block")))?;
        let mut loader = Loader { core, name, tail, comparator, properties: &properties, charge };
        let (index, two_level) = loader.index(index_handle, &meta).await?;
        let filter = loader.filter(metaindex.filter).await?;
        let dictionary = loader.dictionary(metaindex.compression_dict).await?;
        let handle = metaindex.range_deletions;
        let range_tombstones = loader.range_tombstones(handle, &meta, global_sequence).await?;
        let charge = loader.charge;
        properties.forget_names();
        Ok(Table {
            meta,
            file: shared,
            comparator,
            check: footer.check,
            footer,
            metaindex,
            properties,
            index,
            two_level,
            filter,
            dictionary,
            range_tombstones,
            global_sequence,
            _charge: charge,
        })
    }

    /// Reads a table's properties only. Suspends for the reads.
    pub async fn properties(core: &Core, dir: &Dir, name: &str) -> Result<Properties> {
        let shared = dir.open(name).await.map_err(|e| Error::io(format_args!("{name}"), &e))?;
        let charge = Charge::new(&TableMemory::new(0));
        let (tail, footer) = Tail::read(core, &shared, name, 0, &charge).await?;
        let metaindex = Metaindex::parse(&tail.contents(core, footer.metaindex).await?);
        match metaindex.map_err(|e| Error::format(name, &e))?.properties {
            Some(handle) => read_properties(&tail, name, handle).await,
            None => Ok(Properties::default()),
        }
    }

    /// The file and an offset, for errors.
    pub fn place(&self, offset: u64) -> String {
        let name = self.file.path().file_name().unwrap_or_default();
        format!("{} at offset {offset}", name.to_string_lossy())
    }

    /// The number of tombstones of single keys.
    pub fn deletions(&self) -> u64 {
        self.properties.num_deletions.saturating_sub(self.properties.num_range_deletions)
    }

    /// Whether its index or its filter is read on demand, though it is not partitioned.
    pub fn is_on_demand(&self) -> bool {
        let partitioned = self.properties.index_type == IndexType::TwoLevel;
        matches!(self.filter, Filter::OnDemand(_)) || (self.two_level && !partitioned)
    }

    /// The stored length of a data block with its trailer.
    ///
    /// # Errors
    /// The file is too short for it.
    pub fn stored_len(&self, handle: BlockHandle) -> Result<usize> {
        handle.stored_len(self.footer.offset).ok_or_else(|| {
            Error::new(
                Kind::Corruption,
                format!(
                    "{}: a block of {} bytes extends past the data",
                    self.place(handle.offset),
                    handle.size
                ),
            )
        })
    }
}

/// Loads the parts of a table that stay in memory.
struct Loader<'a> {
    core: &'a Core,
    name: &'a str,
    tail: Tail,
    comparator: Comparator,
    properties: &'a Properties,
    charge: Charge,
}

impl Loader<'_> {
    fn format(&self, error: &rocksfmt::Error) -> Error {
        Error::format(self.name, error)
    }

    /// The index, or an index of one entry if it does not stay in memory; and whether its entries
    /// point to index blocks.
    async fn index(&mut self, handle: BlockHandle, meta: &FileMeta) -> Result<(IndexBlock, bool)> {
        let partitioned = self.properties.index_type == IndexType::TwoLevel;
        if partitioned || self.charge.may_take(handle.size as usize) {
            let index = self.index_block(handle, self.properties).await?;
            if partitioned {
                self.charge.take_anyway(index.memory());
            }
            if partitioned || self.charge.take(index.memory()) {
                return Ok((index, partitioned));
            }
        }
        let user_keys = self.properties.index_format.user_keys;
        let (data, layout) = index_of_one(&meta.largest, handle, user_keys);
        Ok((IndexBlock { data: data.into(), layout, search: None }, true))
    }

    /// The filter. A damaged filter must not hide keys: without one, every key may be there.
    /// `check` reports it.
    async fn filter(&mut self, handle: Option<FilterHandle>) -> Result<Filter> {
        let loaded = match handle {
            _ if !self.properties.whole_key_filtering => return Ok(Filter::None),
            None => return Ok(Filter::None),
            Some(FilterHandle::Full(handle)) if !self.charge.take(handle.size as usize) => {
                return Ok(Filter::OnDemand(handle));
            }
            Some(FilterHandle::Full(handle)) => {
                let data = self.tail.contents(self.core, handle).await;
                data.map(|data| Filter::Full { layout: FilterLayout::parse(&data), data })
            }
            Some(FilterHandle::Partitioned(handle)) => {
                // Filter partitions carry no first keys, whatever the index does.
                let mut plain = self.properties.clone();
                plain.index_format.first_keys = false;
                let top = self.index_block(handle, &plain).await;
                top.map(|top| {
                    self.charge.take_anyway(top.memory());
                    Filter::Partitioned(top)
                })
            }
        };
        match loaded {
            Err(e) if e.kind() == Kind::Corruption => Ok(Filter::None),
            loaded => loaded,
        }
    }

    async fn dictionary(&mut self, handle: Option<BlockHandle>) -> Result<Option<Dictionary>> {
        let Some(handle) = handle else { return Ok(None) };
        let dictionary = Dictionary::new(&self.tail.contents(self.core, handle).await?);
        self.charge.take_anyway(dictionary.len());
        Ok(Some(dictionary))
    }

    async fn range_tombstones(
        &mut self,
        handle: Option<BlockHandle>,
        meta: &FileMeta,
        global_sequence: Option<u64>,
    ) -> Result<Option<RangeTombstones>> {
        let Some(handle) = handle else { return Ok(None) };
        let data = self.tail.contents(self.core, handle).await?;
        let format = |e: rocksfmt::Error| self.format(&e.at("range-deletion block"));
        let parsing = RangeTombstonesParsing::new(&data, self.comparator, global_sequence);
        let mut parsing = parsing.map_err(format)?;
        while parsing.step(&data).map_err(format)? {
            self.core.checkpoint().await;
        }
        drop(data);
        let mut sorting = parsing.sort();
        while sorting.step() {
            self.core.checkpoint().await;
        }
        let mut parsed = sorting.finish();
        // A table that is in no database has no bounds.
        if !meta.smallest.is_empty() {
            parsed.set_bounds(&meta.smallest, &meta.largest).map_err(|e| self.format(&e))?;
        }
        self.charge.take_anyway(parsed.memory());
        Ok((!parsed.is_empty()).then_some(parsed))
    }

    async fn index_block(
        &self,
        handle: BlockHandle,
        properties: &Properties,
    ) -> Result<IndexBlock> {
        let data = self.tail.contents(self.core, handle).await?;
        let layout = IndexLayout::parse(&data, properties.index_format).map_err(|e| {
            Error::format(format_args!("{} at offset {}", self.name, handle.offset), &e)
        })?;
        let search = IndexSearch::build(&data, &layout, self.comparator);
        Ok(IndexBlock { data, layout, search })
    }
}

/// Reads the properties. The sequence number of an ingested file may have been patched in later:
/// then the checksum holds only with a zero in its place.
async fn read_properties(tail: &Tail, name: &str, handle: BlockHandle) -> Result<Properties> {
    let stored = tail.stored(handle).await?;
    let payload_len = stored.len() - rocksfmt::BLOCK_TRAILER_BYTES;
    let place = format!("{name} at offset {}", handle.offset);
    if let Err(error) = tail.check.verify(&stored, handle.offset) {
        let patched = Properties::global_sequence_range(&stored[..payload_len]).map(|range| {
            let mut copy = stored.to_vec();
            copy[range].fill(0);
            copy
        });
        match patched {
            Some(copy) if tail.check.verify(&copy, handle.offset).is_ok() => {}
            _ => return Err(Error::format(place, &error)),
        }
    }
    Properties::parse(&stored[..payload_len]).map_err(|e| Error::format(place, &e))
}
