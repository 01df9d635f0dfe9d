//! Bringing blocks and blobs into memory: from the cache, from a flight, or from the disk, checked
//! and unpacked.

use fs::{File, Slice};
use reactor::{Buf, Promise};
use rocksfmt::{
    BLOCK_TRAILER_BYTES, BlockHandle, BlockSum, Comparator, Compression, HeadLookup,
    compression_byte, head_lookup,
};

use crate::error::{Error, Kind, Result};
use crate::read::block::{Block, BlockKind};
use crate::read::cache::BlockKey;
use crate::read::flight::{self, Role};
use crate::read::state::ReaderState;
use crate::read::stats::count;
use crate::read::view::View;
use crate::table::{BLOCK_BYTES_MAX, Table};

/// The error of a read that failed.
fn not_read(file: &File, offset: u64, error: &std::io::Error) -> Error {
    let name = file.path().file_name().unwrap_or_default().to_string_lossy();
    Error::io(format_args!("{name} at offset {offset}"), error)
}

/// A stored block after its check.
enum Stored {
    Plain(Block),
    Packed(Packed),
}

/// A block to decompress.
struct Packed {
    handle: BlockHandle,
    kind: BlockKind,
    codec: Compression,
    payload: Slice,
    /// Length of the decompressed block.
    len: usize,
}

impl ReaderState {
    /// Returns a block, from memory or read. `keep` puts it into the cache.
    pub async fn block(
        &self,
        view: &View,
        slot: u32,
        handle: BlockHandle,
        kind: BlockKind,
        keep: bool,
    ) -> Result<Block> {
        let key = BlockKey::of(&view.version, slot, handle);
        loop {
            if let Some(block) = self.cached(key) {
                return Ok(block);
            }
            match flight::join(&self.flights, key) {
                Role::Leader(leader) => {
                    count(&self.counters.cache_misses, 1);
                    let brief = !keep || self.cache.borrow().budget() == 0;
                    let result = self.load(view, slot, handle, kind, brief).await;
                    if let Ok(block) = &result
                        && keep
                    {
                        self.keep(key, block);
                    }
                    leader.land(&result);
                    return result;
                }
                Role::Follower(follower) => {
                    count(&self.counters.shared_reads, 1);
                    if let Some(result) = follower.await {
                        return result;
                    }
                }
            }
        }
    }

    async fn load(
        &self,
        view: &View,
        slot: u32,
        handle: BlockHandle,
        kind: BlockKind,
        brief: bool,
    ) -> Result<Block> {
        let table = view.version.table(slot)?;
        let len = table.stored_len(handle)?;
        let file = view.file(slot)?;
        let stored = match brief {
            true => fs::read_briefly(file, handle.offset, len).await,
            false => fs::read(file, handle.offset, len).await,
        };
        let stored = stored.map_err(|e| not_read(file, handle.offset, &e))?;
        let unpacked = match self.unpack_now(table, handle, stored, kind) {
            Ok(done) => done,
            Err(need) => {
                let _room = self.promise(len + need).await?;
                let stored = self.read(file, handle.offset, len).await?;
                self.unpack(table, handle, stored, kind).await
            }
        };
        match unpacked {
            Err(error) if error.kind() == Kind::Corruption => {
                // A bit may have flipped in transfer and not on the disk: read it again.
                count(&self.counters.rereads, 1);
                let stored = self.read(file, handle.offset, len).await?;
                self.unpack(table, handle, stored, kind).await
            }
            done => done,
        }
    }

    /// Looks a key up at the beginning of an uncompressed data block; `None` if that does not tell.
    /// Reads and checks the whole block piece by piece.
    pub async fn peek(
        &self,
        view: &View,
        slot: u32,
        handle: BlockHandle,
        comparator: Comparator,
        target: &[u8],
    ) -> Result<Option<HeadLookup>> {
        const FOOTER_BYTES: usize = 4;
        const PIECE_BYTES: usize = 128 << 10;
        let table = view.version.table(slot)?;
        let file = view.file(slot)?;
        let len = table.stored_len(handle)?.saturating_sub(BLOCK_TRAILER_BYTES);
        let Some(footer_at) = len.checked_sub(FOOTER_BYTES) else { return Ok(None) };
        let tail_at = handle.offset + footer_at as u64;
        let tail = self.read(file, tail_at, FOOTER_BYTES + BLOCK_TRAILER_BYTES).await?;
        let Some((&footer, trailer)) = tail.split_first_chunk() else { return Ok(None) };
        let Some(&trailer) = trailer.first_chunk() else { return Ok(None) };
        if trailer[0] != Compression::None.to_byte() {
            return Ok(None);
        }
        drop(tail);
        let (mut told, mut at, mut sum) = (None, 0, BlockSum::new(table.check));
        while at < len {
            let piece =
                self.read(file, handle.offset + at as u64, PIECE_BYTES.min(len - at)).await?;
            if at == 0 {
                let footer = u32::from_le_bytes(footer);
                told = head_lookup(&piece, len, footer, comparator, target);
            }
            if told.is_none() || !self.verify {
                return Ok(told);
            }
            sum.add(&piece);
            at += piece.len();
            drop(piece);
            self.core.checkpoint().await;
        }
        sum.verify(trailer, handle.offset)
            .map_err(|e| Error::format(table.place(handle.offset), &e))?;
        Ok(told)
    }

    /// Reads a range of a file.
    pub async fn read(&self, file: &File, offset: u64, len: usize) -> Result<Slice> {
        fs::read(file, offset, len).await.map_err(|e| not_read(file, offset, &e))
    }

    /// Reads a range of a file that may have been cut since it was opened: as much as there is.
    pub async fn read_until_end(&self, file: &File, offset: u64, len: usize) -> Result<Slice> {
        fs::read_until_end(file, offset, len).await.map_err(|e| not_read(file, offset, &e))
    }

    /// Starts a read-ahead if memory is plentiful. Half of the memory outside the cache is reserved
    /// for demand reads; otherwise iterators would wait for memory that they hold themselves. "The
    /// cache" is the core's, also for a reader that has none of its own.
    pub fn read_ahead(&self, file: &File, offset: u64, len: usize) -> Option<fs::Reading> {
        let pool = self.core.pool();
        let cache = self.db.options().cache_bytes.min(pool.limit());
        let reserve = ((pool.limit() - cache) / 2).max(pool.limit() / 16);
        if pool.used().saturating_add(len).saturating_add(reserve) > pool.limit() {
            return None;
        }
        fs::start_read(file, offset, len).ok().flatten()
    }

    /// Reserves room for blocks of `bytes` in all; suspends until there is room.
    pub async fn promise(&self, bytes: usize) -> Result<Promise> {
        self.core
            .promise(bytes)
            .await
            .map_err(|e| Error::io("cannot reserve memory for blocks", &e))
    }

    pub async fn alloc(&self, len: usize) -> Result<Buf> {
        self.core.alloc_wait(len).await.map_err(|e| Error::io("cannot allocate a block", &e))
    }

    /// Checks the stored bytes of a block (with trailer) and unpacks them. Suspends only when
    /// memory is short.
    pub async fn unpack(
        &self,
        table: &Table,
        handle: BlockHandle,
        stored: Slice,
        kind: BlockKind,
    ) -> Result<Block> {
        match self.check(table, handle, stored, kind)? {
            Stored::Plain(block) => Ok(block),
            Stored::Packed(packed) => {
                let out = self.alloc(packed.len).await?;
                self.decompress(table, &packed, out)
            }
        }
    }

    /// As [`unpack`](Self::unpack) without suspending. When there is no memory now, returns the
    /// number of bytes needed. The stored bytes are dropped then, so that nobody waits for memory
    /// while holding some.
    pub fn unpack_now(
        &self,
        table: &Table,
        handle: BlockHandle,
        stored: Slice,
        kind: BlockKind,
    ) -> std::result::Result<Result<Block>, usize> {
        match self.check(table, handle, stored, kind) {
            Ok(Stored::Plain(block)) => Ok(Ok(block)),
            Ok(Stored::Packed(packed)) => match self.core.pool().alloc_reclaiming(packed.len) {
                Some(out) => Ok(self.decompress(table, &packed, out)),
                None => Err(packed.len),
            },
            Err(error) => Ok(Err(error)),
        }
    }

    fn check(
        &self,
        table: &Table,
        handle: BlockHandle,
        stored: Slice,
        kind: BlockKind,
    ) -> Result<Stored> {
        let format = |e: rocksfmt::Error| Error::format(table.place(handle.offset), &e);
        let checked = if self.verify {
            table.check.verify(&stored, handle.offset)
        } else {
            compression_byte(&stored)
        };
        let byte = checked.map_err(format)?;
        let payload = stored.slice(0..stored.len() - BLOCK_TRAILER_BYTES);
        if byte == 0 {
            return Block::parse(payload, kind).map(Stored::Plain).map_err(format);
        }
        let codec = Compression::from_byte(byte).map_err(format)?;
        let len = codec.decompressed_len(&payload, BLOCK_BYTES_MAX).map_err(format)?;
        Ok(Stored::Packed(Packed { handle, kind, codec, payload, len }))
    }

    fn decompress(&self, table: &Table, packed: &Packed, mut out: Buf) -> Result<Block> {
        let format = |e: rocksfmt::Error| Error::format(table.place(packed.handle.offset), &e);
        let dictionary = table.dictionary.as_ref().filter(|_| packed.kind == BlockKind::Data);
        self.decompressor
            .borrow_mut()
            .decompress(packed.codec, &packed.payload, dictionary, &mut out)
            .map_err(format)?;
        Block::parse(Slice::new(out.share(), 0..packed.len), packed.kind).map_err(format)
    }

    /// Decompresses a blob.
    pub async fn unpack_blob(&self, codec: Compression, payload: &Slice) -> Result<Slice> {
        let format = |e: rocksfmt::Error| Error::format("a blob", &e);
        let len = codec.decompressed_len(payload, BLOCK_BYTES_MAX).map_err(format)?;
        let mut out = self.alloc(len).await?;
        self.decompressor
            .borrow_mut()
            .decompress(codec, payload, None, &mut out)
            .map_err(format)?;
        Ok(Slice::new(out.share(), 0..len))
    }
}
