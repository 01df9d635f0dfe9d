//! Large values in blob files (RocksDB's integrated BlobDB).

use rocksfmt::{BLOB_RECORD_HEADER_BYTES, BlobIndex, Compression};

use crate::error::{Error, Kind, Result};
use crate::read::state::ReadContext;
use crate::read::value::Value;

/// Reads and unpacks the value that `index` refers to; verifies both checksums and the key.
pub(crate) async fn read(
    context: &ReadContext,
    family_at: usize,
    key: &[u8],
    index: &[u8],
) -> Result<Value> {
    let state = &*context.state;
    let family = &context.view.version.families[family_at];
    let reference = BlobIndex::parse(index).map_err(|e| {
        Error::format(format_args!("column family {}: a blob reference", family.name), &e)
    })?;
    let at = family
        .blobs
        .binary_search_by_key(&reference.file_number, |(number, _)| *number)
        .map_err(|_| {
            let what = if reference.file_number == 0 {
                "a value embedded in its SST file".to_owned()
            } else {
                format!("the missing file {:06}.blob", reference.file_number)
            };
            let kind =
                if reference.file_number == 0 { Kind::Unsupported } else { Kind::Corruption };
            Error::new(kind, format!("column family {}: an entry refers to {what}", family.name))
        })?;
    let file = &context.view.blobs[family_at][at];
    let place = |e: rocksfmt::Error| {
        Error::format(
            format_args!("{:06}.blob at offset {}", reference.file_number, reference.offset),
            &e,
        )
    };
    let range = reference.record_range(key.len(), file.size()).map_err(place)?;
    let len = (range.end - range.start) as usize;
    let record = state.read(file, range.start, len).await?;
    let stored = reference.verify_record(&record, key).map_err(place)?.len();
    debug_assert_eq!(stored + key.len() + BLOB_RECORD_HEADER_BYTES, record.len());
    let payload = record.slice(record.len() - stored..record.len());
    if reference.compression == Compression::None {
        return Ok(Value::block(payload));
    }
    Ok(Value::block(state.unpack_blob(reference.compression, &payload).await?))
}
