//! Sequential reading of a file in large pieces.

use fs::{File, Slice};
use rocksfmt::LOG_BLOCK_BYTES;

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;
const _: () = assert!(CHUNK.is_multiple_of(LOG_BLOCK_BYTES));

/// Reads a file in order, one piece ahead.
pub(crate) struct Sequential {
    file: File,
    piece: Option<(u64, Slice)>,
    ahead: Option<(u64, fs::Reading)>,
}

impl Sequential {
    pub fn new(file: File) -> Sequential {
        Sequential { file, piece: None, ahead: None }
    }

    fn len_at(&self, offset: u64) -> usize {
        self.file.size().saturating_sub(offset).min(CHUNK as u64) as usize
    }

    /// Returns `len` bytes at `offset`; fast when offsets ascend.
    pub async fn bytes(&mut self, offset: u64, len: usize) -> std::io::Result<Slice> {
        if let Some((start, piece)) = &self.piece
            && let Some(from) = offset.checked_sub(*start)
            && from + len as u64 <= piece.len() as u64
        {
            return Ok(piece.slice(from as usize..from as usize + len));
        }
        if len > CHUNK / 2 {
            return fs::read(&self.file, offset, len).await;
        }
        self.piece = None;
        let piece = match self.ahead.take() {
            Some((start, reading)) if start <= offset && offset - start < CHUNK as u64 / 4 => {
                (start, reading.await?)
            }
            _ => (offset, fs::read(&self.file, offset, self.len_at(offset)).await?),
        };
        let inside = offset - piece.0 + len as u64 <= piece.1.len() as u64;
        let next = piece.0 + piece.1.len() as u64;
        // The next piece starts before this one ends, so that it contains whole blocks that cross
        // the border.
        let from = next.saturating_sub(CHUNK as u64 / 8);
        if next < self.file.size() && from > piece.0 {
            let reading = fs::start_read(&self.file, from, self.len_at(from))?;
            self.ahead = reading.map(|reading| (from, reading));
        }
        let start = piece.0;
        let result = if inside {
            Ok(piece.1.slice((offset - start) as usize..(offset - start) as usize + len))
        } else {
            fs::read(&self.file, offset, len).await
        };
        self.piece = Some(piece);
        result
    }
}
