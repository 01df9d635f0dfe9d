//! Blob files with whole records and a damaged end: RocksDB reads no value of such a file, because
//! it reads the footer first, at the end of the file. All values are there, so the file is written
//! again, with the same offsets.

use fs::{FileWriter, Mode};
use rocksfmt::{
    BLOB_FOOTER_BYTES, BLOB_HEADER_BYTES, BLOB_RECORD_HEADER_BYTES, BlobFileMeta, BlobFooter,
    BlobHeader, BlobRecord, ColumnFamily, FileName,
};

use crate::error::{Error, Result};
use crate::inspect::check::{DAMAGES_PER_FILE, Damage};
use crate::inspect::repair::Repair;
use crate::open::blob_tails::{BlobTail, BlobTails};
use crate::open::sequential::Sequential;

/// Bytes that are copied at a time.
const PIECE: u64 = 256 << 10;

/// A blob file that gets a new end.
pub(super) struct LostEnd {
    number: u64,
    /// Its records, and where they end.
    count: u64,
    end: u64,
}

impl Repair<'_> {
    /// Finds the blob files of a family that have all their records and no footer after them.
    /// What a check has said about their ends is no damage that stays. `tails` are those that a
    /// crash left open.
    pub(super) async fn lost_ends(&mut self, family: &ColumnFamily, tails: &BlobTails) {
        for blob in family.live_blob_files() {
            let name = FileName::Blob(blob.number).to_string();
            if blob.is_reserved() {
                self.lost_end_in_advance(name, blob.number, tails.get(&blob.number)).await;
                continue;
            }
            // A check has reported what cannot be read, and what is missing.
            let Ok(Some((end, damages))) = self.lost_end(&name, blob).await else { continue };
            self.report.damages.retain(|damage| damage.file != name);
            self.report.damages.extend(damages);
            self.report.needed = true;
            self.report.warnings.push(format!(
                "the end of {name} is damaged, but all its values are there: its footer is written \
                 again"
            ));
            self.lost_ends.push(LostEnd { number: blob.number, count: blob.total_count, end });
        }
    }

    /// Lets a blob file that a crash left open end after its last record, if nothing but zeros
    /// follows and the footer that it got in advance is damaged. Without damage the next opening
    /// does that.
    async fn lost_end_in_advance(&mut self, name: String, number: u64, tail: Option<&BlobTail>) {
        let Some(tail) = tail.filter(|tail| !tail.is_sealed) else { return };
        let Some(end) = tail.end() else { return };
        let is_damaged = self.report.damages.iter().any(|damage| damage.file == name);
        // A check has reported what cannot be read.
        if !is_damaged || !self.has_zeros_from(&name, end).await.unwrap_or(false) {
            return;
        }
        self.report.damages.retain(|damage| damage.file != name);
        self.report.needed = true;
        self.report.warnings.push(format!(
            "the end of {name}, which a crash left open, is damaged: it ends after its last value now"
        ));
        self.lost_ends.push(LostEnd { number, count: tail.count(), end });
    }

    /// Whether a blob file begins with a header, and has only zeros from `at` to where its footer
    /// may begin.
    async fn has_zeros_from(&self, name: &str, at: u64) -> Result<bool> {
        let io = |e: std::io::Error| Error::io(name, &e);
        let shared = self.dir.open(name).await.map_err(io)?;
        let end = shared.size().saturating_sub(BLOB_FOOTER_BYTES as u64);
        let mut file = Sequential::new(self.core.attach(&shared));
        let header = file.bytes(0, BLOB_HEADER_BYTES).await.map_err(io)?;
        if BlobHeader::parse(&header).is_err() {
            return Ok(false);
        }
        let mut from = at;
        while from < end {
            let len = (end - from).min(PIECE);
            let piece = file.bytes(from, len as usize).await.map_err(io)?;
            if piece.iter().any(|&byte| byte != 0) {
                return Ok(false);
            }
            from += len;
            self.core.checkpoint().await;
        }
        Ok(true)
    }

    /// The end of the records of a blob file, if all are there and no footer follows, and the
    /// damaged values among them.
    async fn lost_end(
        &self,
        name: &str,
        blob: &BlobFileMeta,
    ) -> Result<Option<(u64, Vec<Damage>)>> {
        let io = |e: std::io::Error| Error::io(name, &e);
        let shared = self.dir.open(name).await.map_err(io)?;
        let size = shared.size();
        let mut file = Sequential::new(self.core.attach(&shared));
        let end = (BLOB_HEADER_BYTES as u64).saturating_add(blob.total_bytes);
        if size < end {
            return Ok(None);
        }
        let header = file.bytes(0, BLOB_HEADER_BYTES).await.map_err(io)?;
        BlobHeader::parse(&header).map_err(|e| Error::format(name, &e))?;
        if size - end == BLOB_FOOTER_BYTES as u64 {
            let footer = file.bytes(end, BLOB_FOOTER_BYTES).await.map_err(io)?;
            if BlobFooter::parse(&footer).is_ok_and(|footer| footer.count == blob.total_count) {
                return Ok(None);
            }
        } else if self.report.rebuilt.is_some() {
            // It is not known where the records end.
            return Ok(None);
        }
        let (mut at, mut count) = (BLOB_HEADER_BYTES as u64, 0);
        let mut damages = Vec::new();
        while at < end {
            if end - at < BLOB_RECORD_HEADER_BYTES as u64 {
                return Ok(None);
            }
            let header = file.bytes(at, BLOB_RECORD_HEADER_BYTES).await.map_err(io)?;
            let Ok(record) = BlobRecord::parse(&header) else { return Ok(None) };
            let len = record.record_len();
            if len > end - at {
                return Ok(None);
            }
            let bytes = file.bytes(at, usize::try_from(len).unwrap_or(usize::MAX)).await;
            if let Err(error) = record.verify(&bytes.map_err(io)?)
                && damages.len() < DAMAGES_PER_FILE
            {
                let what = Error::format(format_args!("{name} at offset {at}"), &error).to_string();
                damages.push(Damage { file: name.to_owned(), offset: Some(at), what });
            }
            at += len;
            count += 1;
            if u64::is_multiple_of(count, 256) {
                self.core.checkpoint().await;
            }
        }
        Ok((count == blob.total_count).then_some((end, damages)))
    }

    /// Writes the files with a lost end again. The damaged ones keep a name in the directory of
    /// lost files. A crash leaves each as it was or whole.
    pub(super) async fn write_ends(&self) -> Result<()> {
        for LostEnd { number, count, end } in &self.lost_ends {
            let name = FileName::Blob(*number).to_string();
            let io = |e: std::io::Error| Error::io(&name, &e);
            self.keep_lost(std::slice::from_ref(&name)).await?;
            let mut old =
                Sequential::new(self.core.attach(&self.dir.open(&name).await.map_err(io)?));
            // Whatever finds it takes it for obsolete.
            let draft = format!("{number:06}.dbtmp");
            let made = self.dir.create_or_empty(&draft, Mode::Buffered).await.map_err(io)?;
            let mut new = FileWriter::new(&self.core.attach(&made)).await.map_err(io)?;
            while new.len() < *end {
                let len = (end - new.len()).min(PIECE) as usize;
                let piece = old.bytes(new.len(), len).await.map_err(io)?;
                new.append(&piece).await.map_err(io)?;
                self.core.checkpoint().await;
            }
            new.append(&BlobFooter { count: *count }.encode()).await.map_err(io)?;
            new.finish().await.map_err(io)?;
            self.dir.rename(&draft, &name).await.map_err(io)?;
        }
        match self.lost_ends.is_empty() {
            true => Ok(()),
            false => {
                let synced = self.dir.sync().await;
                synced.map_err(|e| Error::io(self.dir.path().display(), &e))
            }
        }
    }
}
