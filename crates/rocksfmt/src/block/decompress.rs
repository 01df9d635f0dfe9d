//! Decompresses blocks into a buffer of the caller.
//!
//! [`Compression::from_byte`] decodes the trailer's type byte; [`Compression::decompressed_len`]
//! gives the size of the buffer (it refuses a size above the caller's limit, because the block
//! itself states the size); [`Decompressor::decompress`] fills it. A block that decompresses to
//! another size is corrupt.
//!
//! Snappy data contains its size; for all other codecs a varint32 precedes the data. Zlib is raw
//! deflate without a header, LZ4 the block format, ZSTD a frame. A file's dictionary is used for
//! its data blocks only, never for its index blocks; Snappy and BZip2 ignore it.
//!
//! A [`Decompressor`] holds the codecs' state; one per core is enough. A [`Dictionary`] belongs to
//! a file.

use crate::coding::varint32_at;
use crate::error::{Error, Result};

/// A block's compression type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Stored as is.
    None,
    /// Snappy.
    Snappy,
    /// Raw deflate.
    Zlib,
    /// BZip2.
    Bzip2,
    /// LZ4 blocks; LZ4HC reads the same.
    Lz4,
    /// Zstandard, including its number from before the format was final.
    Zstd,
}

impl Compression {
    /// Decodes the type byte of a block trailer or blob index. An unsupported codec is named in the
    /// error.
    #[inline]
    pub fn from_byte(byte: u8) -> Result<Compression> {
        Ok(match byte {
            0 => Compression::None,
            1 => Compression::Snappy,
            2 => Compression::Zlib,
            3 => Compression::Bzip2,
            4 | 5 => Compression::Lz4,
            7 | 0x40 => Compression::Zstd,
            other => return Err(unknown(other)),
        })
    }

    /// The type byte of a block trailer.
    pub fn to_byte(self) -> u8 {
        match self {
            Compression::None => 0,
            Compression::Snappy => 1,
            Compression::Zlib => 2,
            Compression::Bzip2 => 3,
            Compression::Lz4 => 4,
            Compression::Zstd => 7,
        }
    }

    /// The name in a file's properties.
    pub fn name(self) -> &'static str {
        match self {
            Compression::None => "NoCompression",
            Compression::Snappy => "Snappy",
            Compression::Zlib => "Zlib",
            Compression::Bzip2 => "BZip2",
            Compression::Lz4 => "LZ4",
            Compression::Zstd => "ZSTD",
        }
    }

    /// The decompressed size of `payload` (the stored block without its trailer). A size above
    /// `max` is refused.
    pub fn decompressed_len(self, payload: &[u8], max: usize) -> Result<usize> {
        let len = match self {
            Compression::None => payload.len(),
            Compression::Snappy => match snap::raw::decompress_len(payload) {
                Ok(len) => len,
                Err(e) => return Err(Error::corruption(format!("snappy: {e}"))),
            },
            _ => self.body(payload)?.0,
        };
        if len > max {
            return Err(Error::too_large(format!(
                "{self:?} block decompresses to {len} bytes, limit {max}"
            )));
        }
        Ok(len)
    }

    /// The stated size, and the codec's bytes after it.
    fn body(self, payload: &[u8]) -> Result<(usize, &[u8])> {
        match varint32_at(payload, 0) {
            Some((len, at)) => Ok((len as usize, &payload[at..])),
            None => Err(Error::corruption(format!("{self:?} block without its size"))),
        }
    }
}

#[cold]
fn unknown(byte: u8) -> Error {
    Error::unsupported(match byte {
        6 => "compression XPRESS".to_owned(),
        0x80..=0xFE => format!("custom compression 0x{byte:02x}"),
        _ => format!("compression type 0x{byte:02x}"),
    })
}

/// The compression dictionary of a file.
pub struct Dictionary {
    bytes: Vec<u8>,
    /// Digested for ZSTD; `None` if ZSTD rejects it.
    zstd: Option<zstd::zstd_safe::DDict<'static>>,
}

impl Dictionary {
    /// Copies the contents of the dictionary block.
    pub fn new(bytes: &[u8]) -> Dictionary {
        Dictionary { bytes: bytes.to_vec(), zstd: zstd::zstd_safe::DDict::try_create(bytes) }
    }

    /// Bytes of the dictionary.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the dictionary has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

impl std::fmt::Debug for Dictionary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dictionary").field("len", &self.bytes.len()).finish()
    }
}

/// The codecs and their state, created on first use and reused for every block.
#[derive(Default)]
pub struct Decompressor {
    snappy: snap::raw::Decoder,
    zlib: Option<flate2::Decompress>,
    zstd: Option<zstd::zstd_safe::DCtx<'static>>,
}

impl std::fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decompressor").finish_non_exhaustive()
    }
}

impl Decompressor {
    /// A decompressor without any codec state.
    pub fn new() -> Decompressor {
        Decompressor::default()
    }

    /// Decompresses `payload` into `out`, whose length must be that of
    /// [`Compression::decompressed_len`].
    pub fn decompress(
        &mut self,
        compression: Compression,
        payload: &[u8],
        dictionary: Option<&Dictionary>,
        out: &mut [u8],
    ) -> Result<()> {
        let expected = compression.decompressed_len(payload, usize::MAX)?;
        if expected != out.len() {
            return Err(wrong_size(compression, expected, out.len()));
        }
        let written = match compression {
            Compression::None => {
                out.copy_from_slice(payload);
                Ok(payload.len())
            }
            Compression::Snappy => self.snappy.decompress(payload, out).map_err(|e| e.to_string()),
            Compression::Lz4 => lz4(compression.body(payload)?.1, dictionary, out),
            Compression::Zstd => self.zstd(compression.body(payload)?.1, dictionary, out),
            Compression::Zlib => self.zlib(compression.body(payload)?.1, dictionary, out),
            Compression::Bzip2 => bzip2(compression.body(payload)?.1, out),
        };
        match written {
            Ok(written) if written == expected => Ok(()),
            Ok(written) => Err(wrong_size(compression, expected, written)),
            Err(text) => Err(Error::corruption(format!("{compression:?} block: {text}"))),
        }
    }

    fn zstd(&mut self, body: &[u8], dictionary: Option<&Dictionary>, out: &mut [u8]) -> Coded {
        let context = match &mut self.zstd {
            Some(context) => context,
            none => none.insert(zstd::zstd_safe::DCtx::try_create().ok_or("no memory for zstd")?),
        };
        let done = match dictionary.filter(|d| !d.is_empty()) {
            None => context.decompress(out, body),
            Some(d) => {
                let digested = d.zstd.as_ref().ok_or("zstd does not accept the dictionary")?;
                context.decompress_using_ddict(out, body, digested)
            }
        };
        done.map_err(|code| zstd::zstd_safe::get_error_name(code).to_owned())
    }

    fn zlib(&mut self, body: &[u8], dictionary: Option<&Dictionary>, out: &mut [u8]) -> Coded {
        let state = match &mut self.zlib {
            Some(state) => {
                state.reset(false);
                state
            }
            none => none.insert(flate2::Decompress::new(false)),
        };
        if let Some(d) = dictionary.filter(|d| !d.is_empty()) {
            // Deflate refers back at most 32 KiB.
            let from = d.len().saturating_sub(32 << 10);
            state.set_dictionary(&d.bytes[from..]).map_err(|e| e.to_string())?;
        }
        match state.decompress(body, out, flate2::FlushDecompress::Finish) {
            Ok(flate2::Status::StreamEnd) => Ok(state.total_out() as usize),
            Ok(status) => Err(format!("ends early ({status:?})")),
            Err(e) => Err(e.to_string()),
        }
    }
}

/// Bytes written, or the codec's error text.
type Coded = std::result::Result<usize, String>;

fn lz4(body: &[u8], dictionary: Option<&Dictionary>, out: &mut [u8]) -> Coded {
    match dictionary.filter(|d| !d.is_empty()) {
        None => lz4_flex::block::decompress_into(body, out),
        Some(d) => lz4_flex::block::decompress_into_with_dict(body, out, &d.bytes),
    }
    .map_err(|e| e.to_string())
}

fn bzip2(body: &[u8], out: &mut [u8]) -> Coded {
    let mut state = bzip2::Decompress::new(false);
    loop {
        let (read, written) = (state.total_in() as usize, state.total_out() as usize);
        let (Some(input), Some(room)) = (body.get(read..), out.get_mut(written..)) else {
            return Err("codec ran past its buffers".to_owned());
        };
        match state.decompress(input, room) {
            Ok(bzip2::Status::StreamEnd) => return Ok(state.total_out() as usize),
            Ok(_) if state.total_in() as usize == read && state.total_out() as usize == written => {
                return Err("ends early".to_owned());
            }
            Ok(_) => {}
            Err(e) => return Err(e.to_string()),
        }
    }
}

#[cold]
fn wrong_size(compression: Compression, expected: usize, found: usize) -> Error {
    Error::corruption(format!(
        "{compression:?} block should decompress to {expected} bytes, not {found}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coding::put_varint;
    use std::io::Write;

    const ALL: [Compression; 6] = [
        Compression::None,
        Compression::Snappy,
        Compression::Zlib,
        Compression::Bzip2,
        Compression::Lz4,
        Compression::Zstd,
    ];

    fn compress(compression: Compression, data: &[u8], dictionary: Option<&[u8]>) -> Vec<u8> {
        let mut out = Vec::new();
        match compression {
            Compression::None => return data.to_vec(),
            Compression::Snappy => return snap::raw::Encoder::new().compress_vec(data).unwrap(),
            _ => put_varint(&mut out, data.len() as u64),
        }
        match compression {
            Compression::Zlib => {
                let mut c = flate2::Compress::new(flate2::Compression::default(), false);
                if let Some(d) = dictionary {
                    c.set_dictionary(d).unwrap();
                }
                let mut body = Vec::with_capacity(data.len() * 2 + 100);
                c.compress_vec(data, &mut body, flate2::FlushCompress::Finish).unwrap();
                out.extend(body);
            }
            Compression::Bzip2 => {
                let mut w = bzip2::write::BzEncoder::new(&mut out, bzip2::Compression::default());
                w.write_all(data).unwrap();
                w.finish().unwrap();
            }
            Compression::Lz4 => out.extend(match dictionary {
                None => lz4_flex::block::compress(data),
                Some(d) => lz4_flex::block::compress_with_dict(data, d),
            }),
            _ => {
                let mut c = match dictionary {
                    None => zstd::bulk::Compressor::new(3),
                    Some(d) => zstd::bulk::Compressor::with_dictionary(3, d),
                }
                .unwrap();
                out.extend(c.compress(data).unwrap());
            }
        }
        out
    }

    fn sample(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * i / 7 % 23) as u8 ^ (i / 100) as u8).collect()
    }

    #[test]
    fn every_codec_round_trips_and_its_state_is_reusable() {
        let mut d = Decompressor::new();
        for round in 0..3 {
            for compression in ALL {
                for len in [0, 1, 100, 4096, 70_000] {
                    let data = sample(len);
                    let payload = compress(compression, &data, None);
                    assert_eq!(compression.decompressed_len(&payload, len).unwrap(), len);
                    let mut out = vec![0xEE; len];
                    d.decompress(compression, &payload, None, &mut out).unwrap();
                    assert_eq!(out, data, "{compression:?} {len} round {round}");
                }
            }
        }
    }

    #[test]
    fn dictionaries_work_where_rocksdb_uses_them() {
        let raw = sample(40_000);
        let dictionary = Dictionary::new(&raw);
        let mut d = Decompressor::new();
        for compression in [Compression::Zlib, Compression::Lz4, Compression::Zstd] {
            let data = &raw[30_000..34_000];
            // Deflate refers back at most 32 KiB; give the encoder the same tail.
            let used = if compression == Compression::Zlib {
                &raw[raw.len() - 32_768..]
            } else {
                &raw[..]
            };
            let payload = compress(compression, data, Some(used));
            let mut out = vec![0; data.len()];
            d.decompress(compression, &payload, Some(&dictionary), &mut out).unwrap();
            assert_eq!(out, data, "{compression:?}");
            assert!(
                payload.len() < compress(compression, data, None).len(),
                "{compression:?} used no dictionary"
            );
            let without = d.decompress(compression, &payload, None, &mut out);
            assert!(without.is_err() || out != data, "{compression:?}");
            d.decompress(compression, &payload, Some(&dictionary), &mut out).unwrap();
        }
    }

    #[test]
    fn a_size_above_the_limit_is_refused_before_anything_is_allocated() {
        for compression in ALL {
            let payload = compress(compression, &sample(1000), None);
            let e = compression.decompressed_len(&payload, 999).unwrap_err();
            assert_eq!(e.kind(), crate::Kind::TooLarge, "{compression:?}");
        }
        assert!(
            Compression::Zstd.decompressed_len(&[0xff, 0xff, 0xff, 0xff, 0x0f], 1 << 24).is_err()
        );
    }

    #[test]
    fn damaged_payloads_are_errors_or_wrong_bytes_but_never_panics() {
        let data = sample(3000);
        let mut d = Decompressor::new();
        for compression in ALL {
            let payload = compress(compression, &data, None);
            let mut out = vec![0; data.len()];
            for at in 0..payload.len() {
                let mut bad = payload.clone();
                bad[at] ^= 1 << (at % 8);
                let _ = d.decompress(compression, &bad, None, &mut out);
                if compression != Compression::None {
                    assert!(
                        d.decompress(compression, &payload[..at], None, &mut out).is_err(),
                        "cut at {at}"
                    );
                }
            }
            d.decompress(compression, &payload, None, &mut out).unwrap();
            assert_eq!(out, data);
        }
    }

    #[test]
    fn unsupported_codecs_are_named() {
        assert!(Compression::from_byte(6).unwrap_err().to_string().contains("XPRESS"));
        assert!(
            Compression::from_byte(0x85)
                .unwrap_err()
                .to_string()
                .contains("custom compression 0x85")
        );
        assert_eq!(Compression::from_byte(0x40).unwrap(), Compression::Zstd);
        assert_eq!(Compression::from_byte(5).unwrap(), Compression::Lz4);
    }
}
