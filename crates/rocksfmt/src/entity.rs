//! Values in an envelope: wide-column entities and values with a preferred sequence.
//!
//! A plain read of an entity returns its default column, which has the empty name, or an empty
//! value. Columns are strictly sorted by name, so only the first can be the default column. Version
//! 1 stores names and sizes in turn, then the values. Version 2 (11.x) has arrays and may keep a
//! column in a blob file; this reader refuses such a default column by name.

use std::ops::Range;

use crate::coding::Decoder;
use crate::error::{Error, Result};
use crate::sst::blob::BlobIndex;

const INLINE: u8 = 0x01;
const BLOB_INDEX: u8 = 0x11;

/// The range of the default column's value in an entity; empty if the entity has no default column.
pub fn default_column(entity: &[u8]) -> Result<Range<usize>> {
    default_column_inner(entity).map_err(|e| e.at("wide-column entity"))
}

fn default_column_inner(entity: &[u8]) -> Result<Range<usize>> {
    let mut d = Decoder::new(entity);
    match d.varint32("version")? {
        1 => version_1(entity.len(), d),
        2 => version_2(entity.len(), d),
        other => Err(Error::unsupported(format!("version {other}"))),
    }
}

fn version_1(len: usize, mut d: Decoder<'_>) -> Result<Range<usize>> {
    let count = d.varint32("column count")?;
    let mut default_len = None;
    let mut previous: Option<&[u8]> = None;
    let mut values_len = 0u64;
    for _ in 0..count {
        let name = d.lps("column name")?;
        let value_len = d.varint32("value size")?;
        if previous.is_some_and(|p| p >= name) {
            return Err(Error::corruption("columns are not sorted"));
        }
        if name.is_empty() {
            default_len = Some(value_len as usize);
        }
        values_len += u64::from(value_len);
        previous = Some(name);
    }
    let start = len - d.len();
    if values_len != d.len() as u64 {
        return Err(Error::corruption(format!("values of {values_len} bytes, {} left", d.len())));
    }
    Ok(start..start + default_len.unwrap_or(0))
}

fn version_2(len: usize, mut d: Decoder<'_>) -> Result<Range<usize>> {
    let count = d.varint32("column count")? as usize;
    let name_sizes_len = d.varint32("bytes of name sizes")? as usize;
    let value_sizes_len = d.varint32("bytes of value sizes")? as usize;
    let names_len = d.varint32("bytes of names")? as usize;
    let types = d.bytes(count, "column types")?;
    let mut name_sizes = Decoder::new(d.bytes(name_sizes_len, "name sizes")?);
    let mut value_sizes = Decoder::new(d.bytes(value_sizes_len, "value sizes")?);
    d.bytes(names_len, "names")?;
    let start = len - d.len();
    let Some(&first_type) = types.first() else { return Ok(start..start) };
    if name_sizes.varint32("name size")? != 0 {
        return Ok(start..start);
    }
    match first_type {
        INLINE => {}
        BLOB_INDEX => return Err(Error::unsupported("default column kept in a blob file")),
        other => return Err(Error::unsupported(format!("default column of type 0x{other:02x}"))),
    }
    let value_len = value_sizes.varint32("value size")? as usize;
    d.bytes(value_len, "default column")?;
    Ok(start..start + value_len)
}

/// The references of an entity's columns that are in blob files.
pub fn blob_columns(entity: &[u8]) -> Result<Vec<BlobIndex>> {
    let columns = || {
        let mut d = Decoder::new(entity);
        match d.varint32("version")? {
            2 => {}
            _ => return Ok(Vec::new()),
        }
        let count = d.varint32("column count")? as usize;
        let name_sizes_len = d.varint32("bytes of name sizes")? as usize;
        let value_sizes_len = d.varint32("bytes of value sizes")? as usize;
        let names_len = d.varint32("bytes of names")? as usize;
        let types = d.bytes(count, "column types")?;
        if !types.contains(&BLOB_INDEX) {
            return Ok(Vec::new());
        }
        d.bytes(name_sizes_len, "name sizes")?;
        let mut value_sizes = Decoder::new(d.bytes(value_sizes_len, "value sizes")?);
        d.bytes(names_len, "names")?;
        let mut found = Vec::new();
        for &kind in types {
            let value = d.bytes(value_sizes.varint32("value size")? as usize, "a column")?;
            if kind == BLOB_INDEX {
                found.push(BlobIndex::parse(value)?);
            }
        }
        Ok(found)
    };
    columns().map_err(|e: Error| e.at("wide-column entity"))
}

/// The value in an entry of type ValuePreferredSeqno: all but the last eight bytes.
#[inline]
pub fn timed_put_value(value: &[u8]) -> Result<&[u8]> {
    match value.split_last_chunk::<8>() {
        Some((value, _)) => Ok(value),
        None => Err(Error::corruption(format!(
            "value with preferred sequence of {} bytes",
            value.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Compression;
    use crate::coding::{put_lps, put_varint};

    fn v1(columns: &[(&[u8], &[u8])]) -> Vec<u8> {
        let mut e = vec![1, columns.len() as u8];
        for (name, value) in columns {
            put_lps(&mut e, name);
            put_varint(&mut e, value.len() as u64);
        }
        columns.iter().for_each(|(_, value)| e.extend(*value));
        e
    }

    fn v2(columns: &[(&[u8], &[u8], u8)]) -> Vec<u8> {
        let n = columns.len() as u8;
        let names: usize = columns.iter().map(|c| c.0.len()).sum();
        let mut e = vec![2, n, n, n, names as u8];
        e.extend(columns.iter().map(|c| c.2));
        e.extend(columns.iter().map(|c| c.0.len() as u8));
        e.extend(columns.iter().map(|c| c.1.len() as u8));
        columns.iter().for_each(|c| e.extend(c.0));
        columns.iter().for_each(|c| e.extend(c.1));
        e
    }

    #[test]
    fn the_default_column_is_the_one_without_a_name() {
        let e = v1(&[(b"", b"plain"), (b"a", b"other")]);
        assert_eq!(&e[default_column(&e).unwrap()], b"plain");
        let e = v1(&[(b"a", b"other")]);
        assert!(default_column(&e).unwrap().is_empty());
        let e = v2(&[(b"", b"plain", 1), (b"a", b"blob", 0x11)]);
        assert_eq!(&e[default_column(&e).unwrap()], b"plain");
        let e = v2(&[(b"a", b"other", 1)]);
        assert!(default_column(&e).unwrap().is_empty());
        assert!(default_column(&v1(&[])).unwrap().is_empty());
    }

    #[test]
    fn a_default_column_in_a_blob_file_is_refused_by_name() {
        let e = default_column(&v2(&[(b"", b"blob", 0x11)])).unwrap_err();
        assert_eq!(e.kind(), crate::Kind::Unsupported);
        assert!(e.to_string().contains("blob file"));
        assert_eq!(default_column(&[3, 0]).unwrap_err().kind(), crate::Kind::Unsupported);
    }

    #[test]
    fn columns_in_blob_files_are_found() {
        let index =
            BlobIndex { file_number: 7, offset: 300, size: 20, compression: Compression::None };
        let mut bytes = Vec::new();
        index.encode(&mut bytes);
        let e =
            v2(&[(b"", b"plain", 1), (b"a", &bytes, 0x11), (b"b", b"x", 1), (b"c", &bytes, 0x11)]);
        assert_eq!(blob_columns(&e).unwrap(), [index, index]);
        assert!(blob_columns(&v2(&[(b"a", b"other", 1)])).unwrap().is_empty());
        assert!(blob_columns(&v1(&[(b"a", b"other")])).unwrap().is_empty());
        for len in 0..e.len() {
            assert!(blob_columns(&e[..len]).is_err(), "cut at {len}");
        }
    }

    #[test]
    fn truncated_or_unsorted_entities_are_corrupt() {
        let e = v1(&[(b"", b"plain"), (b"a", b"other")]);
        for len in 0..e.len() {
            assert!(default_column(&e[..len]).is_err(), "cut at {len}");
        }
        assert!(default_column(&v1(&[(b"b", b"x"), (b"a", b"x")])).is_err());
        let huge = [1, 0xff, 0xff, 0xff, 0xff, 0x0f];
        assert!(default_column(&huge).is_err());
    }

    #[test]
    fn the_preferred_sequence_is_stripped() {
        assert_eq!(timed_put_value(b"value12345678").unwrap(), b"value");
        assert!(timed_put_value(b"1234567").is_err());
    }
}
