//! Stretches of blob files: the records of a range of a file, as they were written.
//!
//! A blob file has no index. A reader that begins in the middle looks for the checksum of a
//! record's header. A value may hold bytes that look like a record, and a record may be one of a
//! value that was overwritten: so a record counts only if the index of the database refers to
//! exactly this place ([`Reader::places`](crate::Reader::places)), which the caller has to ask.

use fs::Slice;
use rocksfmt::{BLOB_FOOTER_BYTES, BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobRecord};

use crate::db::CfId;
use crate::error::{Kind, Result};
use crate::read::state::ReadContext;
use crate::read::value::Place;

/// The longest record that a stretch holds, its header included.
pub const STRETCH_RECORD_BYTES_MAX: usize = 64 << 10;
/// Read beyond the range for the end of its last record; a longer rest is read by itself.
const TAIL_BYTES: usize = 8 << 10;
/// Bytes looked at between two checkpoints, and the same while a record's begin is looked for,
/// which takes a checksum at each byte.
const STEP_BYTES: usize = 16 << 10;
const SEARCH_BYTES: usize = 512;

/// Records of a range of a blob file, in the order of the file.
pub struct Stretch {
    file: u64,
    /// The offset of `data` in the file.
    base: u64,
    data: Slice,
    /// The last record, if it does not end within `data`.
    last: Option<(u64, Slice)>,
    records: Vec<Record>,
    /// The file has records, or may have, from the end of the range on.
    pub has_more: bool,
}

/// A record within `data`.
struct Record {
    at: u32,
    key_len: u32,
    value_len: u32,
}

/// A record of a blob file.
#[derive(Clone, Copy, Debug)]
pub struct StretchRecord<'a> {
    /// The key.
    pub key: &'a [u8],
    /// The value as it is stored: perhaps compressed, which its place does not say.
    pub value: &'a [u8],
    /// Where the value is.
    pub place: Place,
}

impl Stretch {
    /// Its records.
    pub fn records(&self) -> impl Iterator<Item = StretchRecord<'_>> {
        let within = self.records.iter().map(move |record| {
            let key_at = record.at as usize + BLOB_RECORD_HEADER_BYTES;
            let value_at = key_at + record.key_len as usize;
            let offset = self.base + value_at as u64;
            StretchRecord {
                key: &self.data[key_at..value_at],
                value: &self.data[value_at..value_at + record.value_len as usize],
                place: Place { file: self.file, offset },
            }
        });
        let last = self.last.iter().filter_map(move |(base, data)| {
            let found = BlobRecord::parse(data).ok()?;
            let (key, value) = found.verify(data).ok()?;
            let offset = base + (BLOB_RECORD_HEADER_BYTES + key.len()) as u64;
            Some(StretchRecord { key, value, place: Place { file: self.file, offset } })
        });
        within.chain(last)
    }
}

/// Reads the records that begin in `bytes` bytes from `from` on. `None`: there is no such file, or
/// nothing there.
pub(crate) async fn read(
    context: &ReadContext,
    family: CfId,
    file: u64,
    from: u64,
    bytes: usize,
) -> Result<Option<Stretch>> {
    let (state, version) = (&*context.state, &context.view.version);
    let blobs = &version.family(family)?.blobs;
    let family_at = version.families.place(family).unwrap_or_default();
    let Ok(at) = blobs.binary_search_by_key(&file, |(number, _)| *number) else { return Ok(None) };
    let handle = &context.view.blobs[family_at][at];
    let limit = handle.size().saturating_sub(BLOB_FOOTER_BYTES as u64);
    let from = from.max(BLOB_HEADER_BYTES as u64);
    if from >= limit || bytes == 0 {
        return Ok(None);
    }
    let end = limit.min(from.saturating_add(bytes as u64));
    let len = (limit.min(end + TAIL_BYTES as u64) - from) as usize;
    // The unused end of a complete file is cut off.
    let data = state.read_until_end(handle, from, len).await?;
    let asked = (end - from) as usize;
    let within = asked.min(data.len());
    let has_more = if data.len() < len { asked < data.len() } else { end < limit };
    let (mut records, mut last) = (Vec::new(), None);
    let (mut at, mut step) = (0, STEP_BYTES);
    while at < within {
        if at >= step {
            state.core.checkpoint().await;
            step = at + STEP_BYTES;
        }
        let until = (at + SEARCH_BYTES + BLOB_RECORD_HEADER_BYTES).min(data.len());
        let Some((start, found)) = BlobRecord::find(&data[..until], at) else {
            at += SEARCH_BYTES;
            state.core.checkpoint().await;
            continue;
        };
        if start >= within {
            break;
        }
        let record_len = usize::try_from(found.record_len()).unwrap_or(usize::MAX);
        if record_len > STRETCH_RECORD_BYTES_MAX {
            at = start.saturating_add(record_len);
            continue;
        }
        let Some(record) = data.get(start..start + record_len) else {
            let start = from + start as u64;
            if start + record_len as u64 <= limit {
                match state.read(handle, start, record_len).await {
                    Ok(record) if found.verify(&record).is_ok() => last = Some((start, record)),
                    Err(error) if error.kind() != Kind::Corruption => return Err(error),
                    _ => {}
                }
            }
            break;
        };
        // Not a record, or damage: a get of the key tells which.
        if found.verify(record).is_err() {
            at = start + 1;
            continue;
        }
        records.push(Record {
            at: start as u32,
            key_len: found.key_len as u32,
            value_len: found.value_len as u32,
        });
        at = start + record_len;
    }
    Ok(Some(Stretch { file, base: from, data, last, records, has_more }))
}
