//! Blob files that we wrote, as a crash leaves them.
//!
//! Such a file has a footer in advance, whose count is the upper bound that the MANIFEST has. When
//! it is sealed, its footer says how many values it has (`docs/formats/blob.md`). A file that was
//! not sealed is read record by record here. Then
//!
//! - the replay of the logs asks whether the values that they name are there. At `process` a power
//!   cut may leave a log that names values of which the disk has only zeros: then the log ends
//!   before the first such batch;
//! - an opening for writing seals the file, if nothing valid follows its first gap.

use std::collections::BTreeMap;
use std::ops::Range;

use fs::{Dir, Mode};
use reactor::Core;
use rocksfmt::{
    BLOB_FOOTER_BYTES, BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobFileMeta, BlobFooter,
    BlobIndex, BlobRecord, FileName, ManifestState, VersionEdit,
};

use crate::error::{Error, Kind, Result};
use crate::mutant::mutant;
use crate::open::sequential::Sequential;
use crate::write::blob_garbage::{self, Links};
use crate::write::blob_writer::end_file;
use crate::write::state::WriteState;

/// Bytes that are searched at a time for a valid record after damage.
const SEARCHED: u64 = 64 << 10;
/// The unit that a disk writes as a whole, in bytes.
const SECTOR: u64 = 512;
/// Records between two checks whether other tasks want the core.
const RECORDS_AT_ONCE: u64 = 256;

/// What a blob file that we wrote holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlobTail {
    pub family: u32,
    pub is_sealed: bool,
    /// Where there are valid records, in order.
    ranges: Vec<Range<u64>>,
    count: u64,
    /// Parts of it were never written.
    is_torn: bool,
}

/// The blob files that we wrote, by number.
pub(crate) type BlobTails = BTreeMap<u64, BlobTail>;

impl BlobTail {
    /// The number of its valid records.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The end of its valid records, if nothing valid follows.
    pub fn end(&self) -> Option<u64> {
        match &self.ranges[..] {
            [] => Some(BLOB_HEADER_BYTES as u64),
            [all] if all.start == BLOB_HEADER_BYTES as u64 => Some(all.end),
            _ => None,
        }
    }
}

/// The error of a log that names a value that its blob file lacks, and whether the value was never
/// durable.
pub(crate) fn lacks(tails: &BlobTails, index: &[u8]) -> Option<(String, bool)> {
    // A reference that does not parse is an error when it is read.
    let index = BlobIndex::parse(index).ok()?;
    let tail = tails.get(&index.file_number)?;
    let end = index.offset.saturating_add(index.size);
    let is_in = |range: &Range<u64>| range.start < index.offset && end <= range.end;
    if tail.ranges.iter().any(is_in) {
        return None;
    }
    let name = FileName::Blob(index.file_number);
    Some((format!("a value is missing in {name} at offset {}", index.offset), tail.is_torn))
}

/// Reads the ends of the live blob files that we wrote. Suspends for the disk. A file that cannot
/// be read is omitted.
pub(crate) async fn read(core: &Core, dir: &Dir, state: &ManifestState) -> Result<BlobTails> {
    let mut tails = BlobTails::new();
    for family in state.column_families.values() {
        for blob in family.live_blob_files().filter(|blob| blob.is_reserved()) {
            let name = FileName::Blob(blob.number).to_string();
            match read_one(core, dir, &name, family.id, blob.total_count).await {
                Ok(tail) => drop(tails.insert(blob.number, tail)),
                Err(error) if error.kind() == Kind::Memory => return Err(error),
                Err(error) => tracing::debug!("{error}"),
            }
        }
    }
    Ok(tails)
}

async fn read_one(
    core: &Core,
    dir: &Dir,
    name: &str,
    family: u32,
    reserved: u64,
) -> Result<BlobTail> {
    let io = |e: std::io::Error| Error::io(name, &e);
    let shared = dir.open(name).await.map_err(io)?;
    let start = BLOB_HEADER_BYTES as u64;
    let Some(end) = shared.size().checked_sub(BLOB_FOOTER_BYTES as u64).filter(|&e| e >= start)
    else {
        return Err(Error::new(Kind::Corruption, format!("{name}: too short")));
    };
    let file = core.attach(&shared);
    let footer = fs::read(&file, end, BLOB_FOOTER_BYTES).await.map_err(io)?;
    match BlobFooter::parse(&footer) {
        Ok(footer) if footer.count != reserved => {
            let ranges = Some(start..end).filter(|all| !all.is_empty()).into_iter().collect();
            return Ok(BlobTail {
                family,
                is_sealed: true,
                ranges,
                count: footer.count,
                // What logs name after its end was missing when it was sealed.
                is_torn: true,
            });
        }
        _ => {}
    }
    let mut scan = Scan { core, file: Sequential::new(file), end };
    scan.records(family).await.map_err(io)
}

/// A scan of a file that is not sealed.
struct Scan<'a> {
    core: &'a Core,
    file: Sequential,
    /// Where the footer begins.
    end: u64,
}

impl Scan<'_> {
    async fn records(&mut self, family: u32) -> std::io::Result<BlobTail> {
        let mut tail =
            BlobTail { family, is_sealed: false, ranges: Vec::new(), count: 0, is_torn: false };
        let mut at = BLOB_HEADER_BYTES as u64;
        while at < self.end {
            if let Some(next) = self.record(at).await? {
                match tail.ranges.last_mut() {
                    Some(last) if last.end == at => last.end = next,
                    _ => tail.ranges.push(at..next),
                }
                tail.count += 1;
                at = next;
                if tail.count.is_multiple_of(RECORDS_AT_ONCE) {
                    self.core.checkpoint().await;
                }
                continue;
            }
            let (next, has_zeros) = self.next(at).await?;
            tail.is_torn |= has_zeros;
            at = next;
        }
        Ok(tail)
    }

    /// The end of the valid record at `at`, if there is one.
    async fn record(&mut self, at: u64) -> std::io::Result<Option<u64>> {
        if self.end - at < BLOB_RECORD_HEADER_BYTES as u64 {
            return Ok(None);
        }
        let header = self.file.bytes(at, BLOB_RECORD_HEADER_BYTES).await?;
        let Ok(header) = BlobRecord::parse(&header) else { return Ok(None) };
        let len = header.record_len();
        if len > self.end - at {
            return Ok(None);
        }
        let record = self.file.bytes(at, len as usize).await?;
        Ok(header.verify(&record).is_ok().then_some(at + len))
    }

    /// The next valid record after `at`, or the end; and whether there are zeros of a sector
    /// before it that was never written.
    async fn next(&mut self, at: u64) -> std::io::Result<(u64, bool)> {
        let (mut from, mut has_zeros) = (at, false);
        while from < self.end {
            let len = (self.end - from).min(SEARCHED);
            let piece = self.file.bytes(from, len as usize).await?;
            let sectors = (from.next_multiple_of(SECTOR)..from + len).step_by(SECTOR as usize);
            let mut rest = std::iter::once(from).chain(sectors);
            let is_zero = |start: u64| {
                let end = (start / SECTOR + 1) * SECTOR;
                let end = end.min(from + len);
                piece[(start - from) as usize..(end - from) as usize].iter().all(|&b| b == 0)
            };
            let zero = rest.find(|&start| start < from + len && is_zero(start));
            let candidates = candidates(&piece);
            for start in candidates {
                let start = from + start as u64;
                if start > at && self.record(start).await?.is_some() {
                    return Ok((start, has_zeros || zero.is_some_and(|zero| zero < start)));
                }
            }
            has_zeros |= zero.is_some();
            // A header may cross the border.
            let step = len.saturating_sub(BLOB_RECORD_HEADER_BYTES as u64 - 1);
            if from + len == self.end {
                break;
            }
            from += step.max(1);
            self.core.checkpoint().await;
        }
        Ok((self.end, has_zeros))
    }
}

/// Where valid record headers begin in some bytes.
fn candidates(bytes: &[u8]) -> Vec<usize> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(header) = bytes.get(at..at + BLOB_RECORD_HEADER_BYTES) {
        if header[..8] == [0; 8] {
            // The length of a key may be 0, but then a value follows.
            let zeros = header.iter().take_while(|&&byte| byte == 0).count();
            if zeros == BLOB_RECORD_HEADER_BYTES {
                at += BLOB_RECORD_HEADER_BYTES - 16;
                continue;
            }
        }
        if header[16..24] == [0; 8] && BlobRecord::parse(header).is_ok() {
            found.push(at);
        }
        at += 1;
    }
    found
}

/// The fewest bytes of a record: its header and a value of two bytes. Shorter ones stay in tables.
const VALUE_RECORD_BYTES_MIN: u64 = BLOB_RECORD_HEADER_BYTES as u64 + 2;

/// Whether the unused part of a file that we wrote is counted as garbage. It has at most 33 bytes
/// for each value that it was reserved for, and a value that became garbage has more. So their
/// number tells, whatever the file has and had: reserved values are more than ever fit.
fn counts_unused(blob: &BlobFileMeta) -> bool {
    blob.garbage_bytes < blob.garbage_count.saturating_mul(VALUE_RECORD_BYTES_MIN)
}

/// Makes the values of a blob file durable that a crash left open and that is not ended: tables
/// will refer to them.
async fn sync_as_it_is(state: &WriteState, name: &str) -> Result<()> {
    state.dir.sync_file(name).await.map_err(|error| Error::io(name, &error))
}

/// Seals the blob files that a crash left open, and counts what they do not use as garbage.
/// Suspends for the disk.
///
/// # Errors
/// The device's.
pub(crate) async fn seal(state: &WriteState, tails: &BlobTails) -> Result<()> {
    for (&number, tail) in tails {
        let name = FileName::Blob(number).to_string();
        let Some(end) = tail.end() else {
            sync_as_it_is(state, &name).await?;
            continue;
        };
        if !tail.is_sealed {
            match state.dir.open_only_name(&name, Mode::Buffered).await {
                Ok(file) => {
                    end_file(&state.core.attach(&file), &name, end, &[], tail.count).await?;
                }
                // A checkpoint has a link to it: its database may have more values in this file.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    sync_as_it_is(state, &name).await?;
                }
                Err(error) => return Err(Error::io(&name, &error)),
            }
        }
        let turn = state.manifest_turn().await?;
        let mut blobs = turn.state().blob_files(tail.family);
        let is_counted = blobs.any(|blob| blob.number == number && counts_unused(blob));
        drop(blobs);
        // An earlier process may have counted it already. It may have known of more values: at
        // `process` a power cut takes values, but not what the MANIFEST says.
        if is_counted && !mutant("unused_part_counts_twice") {
            continue;
        }
        let used = (tail.count, end - BLOB_HEADER_BYTES as u64);
        // Which table is an anchor is not known any more.
        let (state, links) = (turn.state(), Links::MayBeFalse);
        let unused = blob_garbage::unused(state, tail.family, number, used, links);
        let Some(unused) = unused else { continue };
        let edit = VersionEdit {
            column_family: tail.family,
            blob_garbage: vec![unused],
            ..VersionEdit::default()
        };
        match turn.change(vec![edit], |_| {}).await {
            Err(error) if !matches!(error.kind(), Kind::Full | Kind::Memory) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All mixes of short and long values, living and dead, in the smallest file.
    #[test]
    fn the_unused_part_is_told_apart_from_dead_values() {
        let file_bytes = 64 << 10;
        let reserved = BlobFileMeta::reserved(7, file_bytes);
        for (short, long) in [(34, 34), (34, 9_000), (40, 200), (500, 65_000), (1_000, 30_000)] {
            for shorts in [0, 1, 2, 10, 300, 1_000, 1_900] {
                for longs in [0, 1, 2, 7, 60] {
                    let used_bytes = shorts * short + longs * long;
                    if used_bytes > reserved.total_bytes || shorts + longs == 0 {
                        continue;
                    }
                    for (dead_shorts, dead_longs) in
                        [(0, 0), (shorts, 0), (0, longs), (shorts, longs), (shorts / 2, longs / 2)]
                    {
                        let dead = BlobFileMeta {
                            garbage_count: dead_shorts + dead_longs,
                            garbage_bytes: dead_shorts * short + dead_longs * long,
                            ..reserved.clone()
                        };
                        assert!(!counts_unused(&dead), "{dead:?}");
                        for spare in [0, 1] {
                            let unused = reserved.total_count - shorts - longs - spare;
                            let counted = BlobFileMeta {
                                garbage_count: dead.garbage_count + unused,
                                garbage_bytes: dead.garbage_bytes + reserved.total_bytes
                                    - used_bytes,
                                ..reserved.clone()
                            };
                            assert!(counts_unused(&counted), "{counted:?}");
                        }
                    }
                }
            }
        }
    }
}
