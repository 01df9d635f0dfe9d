//! Large values in blob files (RocksDB's integrated BlobDB).

use rocksfmt::{BLOB_RECORD_HEADER_BYTES, BlobIndex, Compression};

use crate::error::{Error, Kind, Result};
use crate::read::state::ReadContext;
use crate::read::value::{Place, Value};
use crate::version::Family;

fn reference(family: &Family, index: &[u8]) -> Result<BlobIndex> {
    BlobIndex::parse(index).map_err(|e| {
        Error::format(format_args!("column family {}: a blob reference", family.name), &e)
    })
}

/// Where the value is that `index` refers to; `None` if it is compressed there.
pub(crate) fn place(family: &Family, index: &[u8]) -> Result<Option<Place>> {
    let BlobIndex { file_number, offset, compression, .. } = reference(family, index)?;
    Ok((compression == Compression::None).then_some(Place { file: file_number, offset }))
}

/// Reads and unpacks the value that `index` refers to; verifies both checksums and the key.
pub(crate) async fn read(
    context: &ReadContext,
    family_at: usize,
    key: &[u8],
    index: &[u8],
) -> Result<Value> {
    let state = &*context.state;
    let family = &context.view.version.families[family_at];
    let reference = reference(family, index)?;
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
        let place = Place { file: reference.file_number, offset: reference.offset };
        return Ok(Value::blob(payload, place));
    }
    Ok(Value::block(state.unpack_blob(reference.compression, &payload).await?))
}
