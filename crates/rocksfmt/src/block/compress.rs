//! Compresses blocks; `decompress` is the other direction.

use crate::block::decompress::Compression;
use crate::coding::put_varint;

/// The codecs and their state, created on first use and reused for every block.
#[derive(Default)]
pub(crate) struct Compressor {
    snappy: Option<snap::raw::Encoder>,
    zstd: Option<zstd::zstd_safe::CCtx<'static>>,
    out: Vec<u8>,
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").finish_non_exhaustive()
    }
}

impl Compressor {
    /// The compressed form of a block, if that saves an eighth of it. Zlib and BZip2 are supported
    /// for reading only.
    pub fn compress(&mut self, compression: Compression, block: &[u8]) -> Option<&[u8]> {
        self.out.clear();
        match compression {
            Compression::None | Compression::Zlib | Compression::Bzip2 => return None,
            Compression::Snappy => {
                self.out.resize(snap::raw::max_compress_len(block.len()), 0);
                let snappy = self.snappy.get_or_insert_with(snap::raw::Encoder::new);
                let len = snappy.compress(block, &mut self.out).ok()?;
                self.out.truncate(len);
            }
            Compression::Lz4 => {
                put_varint(&mut self.out, block.len() as u64);
                let at = self.out.len();
                self.out.resize(at + lz4_flex::block::get_maximum_output_size(block.len()), 0);
                let len = lz4_flex::block::compress_into(block, &mut self.out[at..]).ok()?;
                self.out.truncate(at + len);
            }
            Compression::Zstd => {
                put_varint(&mut self.out, block.len() as u64);
                let at = self.out.len();
                self.out.resize(at + zstd::zstd_safe::compress_bound(block.len()), 0);
                let context = match &mut self.zstd {
                    Some(context) => context,
                    none => none.insert(zstd::zstd_safe::CCtx::try_create()?),
                };
                let len = context.compress(&mut self.out[at..], block, ZSTD_LEVEL).ok()?;
                self.out.truncate(at + len);
            }
        }
        (self.out.len() <= block.len() - block.len() / 8).then_some(&self.out[..])
    }
}

/// RocksDB's default.
const ZSTD_LEVEL: i32 = 3;
