//! Decompresses the records of a compressed write-ahead log.
//!
//! After a SetCompression record every logical record is one ZSTD frame that does not state its
//! size. The buffer and the context live as long as the reader, so a warm reader allocates nothing.

use zstd::stream::raw::{Decoder, InBuffer, Operation, OutBuffer};

/// The initial size of the output buffer; it doubles up to the caller's bound.
const OUTPUT_BYTES_MIN: usize = 64 * 1024;

/// A reusable ZSTD context and the last record it decompressed.
pub(crate) struct RecordDecompressor {
    context: Decoder<'static>,
    output: Vec<u8>,
}

impl std::fmt::Debug for RecordDecompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RecordDecompressor")
    }
}

/// Whether a record looks like a record of a compressed log: the only evidence if the
/// SetCompression record is damaged. An uncompressed batch starts with these bytes for few
/// sequences only, all above 4 * 10^9.
pub fn looks_compressed(record: &[u8]) -> bool {
    record.starts_with(&zstd::zstd_safe::MAGICNUMBER.to_le_bytes())
}

impl RecordDecompressor {
    pub(crate) fn new() -> Result<RecordDecompressor, String> {
        Ok(RecordDecompressor {
            context: Decoder::new().map_err(|e| format!("zstd: {e}"))?,
            output: vec![0; OUTPUT_BYTES_MIN],
        })
    }

    /// Decompresses one logical record to at most `bytes_max` bytes.
    pub(crate) fn run(&mut self, stored: &[u8], bytes_max: usize) -> Result<&[u8], String> {
        let (bytes, done) = self.expand(stored, bytes_max, false)?;
        if !done {
            return Err("zstd frame of a log record is truncated".into());
        }
        Ok(&self.output[..bytes])
    }

    /// The first bytes of a record that may be given only in part.
    pub(crate) fn head(&mut self, stored: &[u8]) -> Result<&[u8], String> {
        let (bytes, _) = self.expand(stored, OUTPUT_BYTES_MIN, true)?;
        Ok(&self.output[..bytes])
    }

    fn expand(
        &mut self,
        stored: &[u8],
        bytes_max: usize,
        head_only: bool,
    ) -> Result<(usize, bool), String> {
        let zstd = |e: std::io::Error| format!("zstd: {e}");
        self.context.reinit().map_err(zstd)?;
        let mut input = InBuffer::around(stored);
        let mut filled = 0;
        let mut frame_done = stored.is_empty();
        while input.pos() < stored.len() || !frame_done {
            if filled == self.output.len() {
                if head_only {
                    break;
                }
                if filled >= bytes_max {
                    return Err(format!("log record expands to more than {bytes_max} bytes"));
                }
                let grown = filled.saturating_mul(2).min(bytes_max.max(OUTPUT_BYTES_MIN));
                self.output.resize(grown, 0);
            }
            let consumed = input.pos();
            let mut output = OutBuffer::around(&mut self.output[filled..]);
            let hint = self.context.run(&mut input, &mut output).map_err(zstd)?;
            let produced = output.pos();
            filled += produced;
            frame_done = hint == 0;
            if produced == 0 && input.pos() == consumed && !frame_done {
                break;
            }
        }
        if filled > bytes_max {
            return Err(format!("log record expands to more than {bytes_max} bytes"));
        }
        Ok((filled, frame_done))
    }
}
