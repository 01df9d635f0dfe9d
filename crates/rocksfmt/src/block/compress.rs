//! Compresses blocks; `decompress` is the other direction.

use crate::block::decompress::Compression;
use crate::coding::put_varint;

/// How a codec compresses the blocks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodecOptions {
    /// The level of Zlib and ZSTD; `None` for the codec's default.
    pub level: Option<i32>,
    /// A block is stored uncompressed if its compressed form has more bytes than this for each
    /// KiB.
    pub stored_per_kib_max: u32,
    /// Most bytes of a dictionary for data blocks; 0 for none. Snappy and BZip2 use none.
    pub dictionary_bytes: usize,
    /// Bytes of data blocks from which the dictionary is trained. With 0 the blocks are the
    /// dictionary.
    pub train_bytes: usize,
    /// Most bytes of data blocks that are held back for the choice of these blocks; 0 for the
    /// builder's own limit.
    pub buffer_bytes: usize,
}

impl Default for CodecOptions {
    fn default() -> CodecOptions {
        CodecOptions {
            level: None,
            stored_per_kib_max: 896,
            dictionary_bytes: 0,
            train_bytes: 0,
            buffer_bytes: 0,
        }
    }
}

/// Compresses one block after another, with the codec's state reused.
pub(crate) struct Compressor {
    compression: Compression,
    options: CodecOptions,
    /// For data blocks; empty for none.
    dictionary: Vec<u8>,
    codec: Codec,
    out: Vec<u8>,
}

/// The state of a codec, created on first use.
enum Codec {
    None,
    Snappy(Box<snap::raw::Encoder>),
    Zlib(Box<flate2::Compress>),
    Zstd(zstd::zstd_safe::CCtx<'static>, Option<zstd::zstd_safe::CDict<'static>>),
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").field("compression", &self.compression).finish_non_exhaustive()
    }
}

impl Compressor {
    pub fn new(compression: Compression, options: CodecOptions) -> Compressor {
        Compressor {
            compression,
            options,
            dictionary: Vec::new(),
            codec: Codec::None,
            out: Vec::new(),
        }
    }

    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Whether the codec can use a dictionary.
    pub fn takes_dictionary(&self) -> bool {
        matches!(self.compression, Compression::Zlib | Compression::Lz4 | Compression::Zstd)
    }

    /// Sets the dictionary for all data blocks. No block was compressed before.
    pub fn set_dictionary(&mut self, dictionary: Vec<u8>) {
        self.dictionary = dictionary;
    }

    /// The dictionary; empty for none.
    pub fn dictionary(&self) -> &[u8] {
        &self.dictionary
    }

    /// The compressed form of a block, if it is small enough. `is_data` tells a data block, which
    /// uses the dictionary, from an index block.
    pub fn compress(&mut self, block: &[u8], is_data: bool) -> Option<&[u8]> {
        self.out.clear();
        if !matches!(self.compression, Compression::None | Compression::Snappy) {
            put_varint(&mut self.out, block.len() as u64);
        }
        let len = match self.compression {
            Compression::None => return None,
            Compression::Snappy => self.snappy(block)?,
            Compression::Zlib => self.zlib(block, is_data)?,
            Compression::Bzip2 => self.bzip2(block)?,
            Compression::Lz4 => self.lz4(block, is_data)?,
            Compression::Zstd => self.zstd(block, is_data)?,
        };
        self.out.truncate(len);
        let max = block.len() as u64 * u64::from(self.options.stored_per_kib_max) / 1024;
        (len as u64 <= max).then_some(&self.out[..])
    }

    /// Makes room for a result of at most `max` bytes, and returns where it begins.
    fn room(&mut self, max: usize) -> usize {
        let at = self.out.len();
        self.out.resize(at + max, 0);
        at
    }

    fn snappy(&mut self, block: &[u8]) -> Option<usize> {
        let at = self.room(snap::raw::max_compress_len(block.len()));
        if !matches!(self.codec, Codec::Snappy(_)) {
            self.codec = Codec::Snappy(Box::new(snap::raw::Encoder::new()));
        }
        let Codec::Snappy(snappy) = &mut self.codec else { return None };
        snappy.compress(block, &mut self.out[at..]).ok()
    }

    /// Raw deflate with a window of 16 KiB, which every RocksDB can read.
    fn zlib(&mut self, block: &[u8], is_data: bool) -> Option<usize> {
        const WINDOW_BITS: u8 = 14;
        // More than that saves nothing.
        let at = self.room(block.len());
        if !matches!(self.codec, Codec::Zlib(_)) {
            let level = self.options.level.and_then(|level| u32::try_from(level).ok());
            let level = flate2::Compression::new(level.unwrap_or(6).min(9));
            let zlib = flate2::Compress::new_with_window_bits(level, false, WINDOW_BITS);
            self.codec = Codec::Zlib(Box::new(zlib));
        }
        let Codec::Zlib(zlib) = &mut self.codec else { return None };
        zlib.reset();
        if is_data && !self.dictionary.is_empty() {
            let from = self.dictionary.len().saturating_sub(1 << WINDOW_BITS);
            zlib.set_dictionary(&self.dictionary[from..]).ok()?;
        }
        let done = zlib.compress(block, &mut self.out[at..], flate2::FlushCompress::Finish);
        matches!(done, Ok(flate2::Status::StreamEnd)).then(|| at + zlib.total_out() as usize)
    }

    fn bzip2(&mut self, block: &[u8]) -> Option<usize> {
        let at = self.room(block.len());
        // As RocksDB: the smallest window; the level is not used.
        let mut bzip2 = bzip2::Compress::new(bzip2::Compression::fast(), 30);
        let done = bzip2.compress(block, &mut self.out[at..], bzip2::Action::Finish);
        matches!(done, Ok(bzip2::Status::StreamEnd)).then(|| at + bzip2.total_out() as usize)
    }

    fn lz4(&mut self, block: &[u8], is_data: bool) -> Option<usize> {
        let at = self.room(lz4_flex::block::get_maximum_output_size(block.len()));
        let out = &mut self.out[at..];
        let len = match &self.dictionary[..] {
            dictionary if is_data && dictionary.len() >= LZ4_DICTIONARY_MIN => {
                lz4_flex::block::compress_into_with_dict(block, out, dictionary)
            }
            _ => lz4_flex::block::compress_into(block, out),
        };
        Some(at + len.ok()?)
    }

    fn zstd(&mut self, block: &[u8], is_data: bool) -> Option<usize> {
        let at = self.room(zstd::zstd_safe::compress_bound(block.len()));
        let level = self.options.level.unwrap_or(ZSTD_LEVEL);
        if !matches!(self.codec, Codec::Zstd(..)) {
            let digested = match &self.dictionary[..] {
                [] => None,
                dictionary => Some(zstd::zstd_safe::CDict::try_create(dictionary, level)?),
            };
            self.codec = Codec::Zstd(zstd::zstd_safe::CCtx::try_create()?, digested);
        }
        let Codec::Zstd(context, digested) = &mut self.codec else { return None };
        let out = &mut self.out[at..];
        let len = match digested {
            Some(dictionary) if is_data => context.compress_using_cdict(out, block, dictionary),
            _ => context.compress(out, block, level),
        };
        Some(at + len.ok()?)
    }
}

/// RocksDB's default.
const ZSTD_LEVEL: i32 = 3;
/// A match of LZ4 has at least this many bytes.
const LZ4_DICTIONARY_MIN: usize = 4;
