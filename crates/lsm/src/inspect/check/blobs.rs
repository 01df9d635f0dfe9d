//! The check of blob files.

use rocksfmt::{
    BLOB_FOOTER_BYTES, BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobFooter, BlobHeader,
    BlobRecord, ColumnFamily, FileName,
};

use crate::error::{Error, Kind, Result};
use crate::inspect::check::blob_records::{BlobRecords, FileRecords, Record};
use crate::inspect::check::{Check, offset_in};
use crate::open::recovery_plan::Listed;
use crate::open::sequential::Sequential;

impl Check<'_> {
    /// Reads the live blob files of a column family that are there, and returns what they hold.
    pub(in crate::inspect) async fn blob_files(
        &mut self,
        family: &ColumnFamily,
        listed: &[Listed],
    ) -> BlobRecords {
        let mut all = BlobRecords::of(family);
        for blob in family.live_blob_files() {
            let name = FileName::Blob(blob.number).to_string();
            let Some(file) = listed.iter().find(|file| file.name == name) else { continue };
            let before = self.done;
            match self.blobs(&name, family.id, blob.number, all.room()).await {
                Ok(records) => all.put(blob.number, records),
                Err(error) => self.report.note(&name, offset_in(&error), &error),
            }
            self.report.files += 1;
            self.progress_to(before + file.size_bytes);
        }
        all
    }

    /// Reads every record of a blob file of a column family. Returns them, if they are not more
    /// than `room`.
    async fn blobs(
        &mut self,
        name: &str,
        family: u32,
        number: u64,
        room: usize,
    ) -> Result<FileRecords> {
        let shared = self.dir.open(name).await.map_err(|e| Error::io(name, &e))?;
        let mut file = Sequential::new(self.core.attach(&shared));
        let size = shared.size();
        let at = |offset: u64| format!("{name} at offset {offset}");
        let bad = |offset: u64, e: rocksfmt::Error| Error::format(at(offset), &e);
        let Some(end) = size.checked_sub((BLOB_HEADER_BYTES + BLOB_FOOTER_BYTES) as u64) else {
            return Err(Error::new(Kind::Corruption, format!("{name}: only {size} bytes long")));
        };
        let footer_at = end + BLOB_HEADER_BYTES as u64;
        // A file that a crash left open has values up to there.
        let open = self.blob_tails.get(&number).filter(|tail| !tail.is_sealed);
        let open_until = open.map(|tail| tail.end().unwrap_or(footer_at));
        let end = open_until.unwrap_or(footer_at);
        let header = file.bytes(0, BLOB_HEADER_BYTES).await.map_err(|e| Error::io(at(0), &e))?;
        let header = BlobHeader::parse(&header).map_err(|e| bad(0, e))?;
        if header.column_family_id != family {
            return Err(Error::new(
                Kind::Corruption,
                format!(
                    "{name}: expected a file of column family {family}, found one of {}",
                    header.column_family_id
                ),
            ));
        }
        let mut offset = BLOB_HEADER_BYTES as u64;
        let (mut records, mut found) = (0, Some(Vec::new()));
        while offset < end {
            let head = file
                .bytes(offset, BLOB_RECORD_HEADER_BYTES.min((size - offset) as usize))
                .await
                .map_err(|e| Error::io(at(offset), &e))?;
            let head = BlobRecord::parse(&head).map_err(|e| bad(offset, e))?;
            let len = head.record_len();
            if len > end - offset {
                return Err(Error::new(
                    Kind::Corruption,
                    format!("{}: a record of {len} bytes reaches into the footer", at(offset)),
                ));
            }
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let record = file.bytes(offset, len).await.map_err(|e| Error::io(at(offset), &e))?;
            let start = BLOB_RECORD_HEADER_BYTES;
            let key = record.get(start..start + head.key_len as usize).unwrap_or_default();
            let value = offset + start as u64 + head.key_len;
            found = found.filter(|found: &Vec<Record>| found.len() < room);
            if let Some(found) = &mut found {
                found.push(Record::new(key, value, head.value_len));
            }
            match head.verify(&record) {
                Ok(_) => {
                    records += 1;
                    self.report.bytes += len as u64;
                }
                Err(error) => self.report.note(name, Some(offset), &bad(offset, error)),
            }
            offset += len as u64;
            self.done += len as u64;
            if records % 256 == 255 {
                self.progress_to(self.done);
                self.core.checkpoint().await;
            }
        }
        self.report.entries += records;
        let footer = file.bytes(footer_at, BLOB_FOOTER_BYTES).await;
        let footer = footer.map_err(|e| Error::io(at(footer_at), &e))?;
        let footer = BlobFooter::parse(&footer).map_err(|e| bad(footer_at, e))?;
        if footer.count != records && open_until.is_none() {
            return Err(Error::new(
                Kind::Corruption,
                format!(
                    "{name}: found {records} whole records, but the footer says {}",
                    footer.count
                ),
            ));
        }
        Ok(found.map_or(FileRecords::Length(end), FileRecords::All))
    }
}
