//! Writing a table from sorted entries, and opening it. Flushes, merges and loads use it.

use fs::FileWriter;
use rocksfmt::{
    BlobIndex, BlockOptions, DictionaryTraining, FileMeta, FileName, SstBuilder, SstOptions,
    SstTimes, ValueType, blob_columns, unpack,
};

use crate::error::{Error, Result};
use crate::merge_operator::MergeOperator;
use crate::table::Table;
use crate::table_options::TablePlace;
use crate::version::Family;
use crate::write::job::Job;

/// Least limit of a table's size, in bytes.
const FILE_BYTES_MIN: u64 = 4 << 20;
/// Bytes that are gathered before they are passed to the file.
const PIECE: usize = 16 << 10;

/// Bytes of index and filter above which both have two levels even if the options do not say so:
/// these, or what is left of the memory of tables if that is less, because what does not fit is
/// read on demand. A table writer holds eight bytes for each key of an undivided filter.
const WHOLE_BYTES_MAX: usize = 4 << 20;
/// So many are read on demand as fast as parts of them.
const WHOLE_BYTES_MIN: usize = 64 << 10;

/// Largest size of a table below level 0, about. A table writer holds the table's index and filter,
/// a fiftieth of the table or more if values are small. So tables are small if there is little
/// memory.
pub(crate) fn file_bytes_max(job: &Job) -> u64 {
    (job.db.0.tables.budget() as u64).max(FILE_BYTES_MIN)
}

/// Size of the tables of a load, about.
pub(crate) fn file_bytes(job: &Job, family: &Family) -> u64 {
    family.options.file_bytes.min(file_bytes_max(job))
}

/// What is known of a table before it is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewTable {
    pub place: TablePlace,
    /// Its size, about.
    pub bytes: u64,
    /// When the oldest of its entries were written, in Unix seconds: for a flush when the memtable
    /// began, for a merge the least known time of its inputs. 0 for unknown: now counts.
    pub oldest_ancestor_time: u64,
}

/// A table that is being written.
pub(crate) struct TableWriter<'a> {
    job: &'a Job,
    family: &'a Family,
    name: String,
    file: FileWriter,
    builder: SstBuilder,
}

impl<'a> TableWriter<'a> {
    /// Creates the file with a new number. Suspends for the disk.
    pub async fn create(
        job: &'a Job,
        family: &'a Family,
        table: NewTable,
    ) -> Result<TableWriter<'a>> {
        let number = job.db.new_number();
        let name = FileName::Sst(number).to_string();
        let io = |e: std::io::Error| Error::io(&name, &e);
        let file = job.db.0.recycled_tables.open(&job.dir, &name, table.bytes).await.map_err(io)?;
        job.made.borrow_mut().push(FileName::Sst(number));
        let file = FileWriter::new(&job.core.attach(&file)).await.map_err(io)?;
        let now = job.core.unix_time_ms() / 1000;
        let oldest = match table.oldest_ancestor_time {
            0 => now,
            known => known,
        };
        let (options, place) = (&family.table_options, table.place);
        let builder = SstBuilder::new(SstOptions {
            comparator: family.comparator,
            column_family: family.id,
            column_family_name: family.name.clone(),
            blocks: BlockOptions {
                whole_bytes_max: job.db.0.tables.room().clamp(WHOLE_BYTES_MIN, WHOLE_BYTES_MAX),
                ..options.blocks(place)
            },
            compression: options.compression(place, job.compression),
            codec: options.codec(place),
            identity: job.db.0.identity(number),
            times: SstTimes {
                created: now,
                oldest_ancestor: oldest,
                oldest_key: if place.level == 0 { oldest } else { 0 },
            },
        });
        Ok(TableWriter { job, family, name, file, builder })
    }

    /// Bytes of the table so far, about.
    pub fn len(&self) -> u64 {
        self.builder.len()
    }

    /// Adds an entry by its internal key. Suspends when the disk is slower.
    pub async fn add(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let format = |e: rocksfmt::Error| Error::format(&self.name, &e);
        self.builder.add(key, value).map_err(format)?;
        let packed = key.last_chunk::<8>().map_or(0, |trailer| u64::from_le_bytes(*trailer));
        let kind = unpack(packed).1;
        if kind == ValueType::BlobIndex as u8 {
            let blob = BlobIndex::parse(value).map_err(format)?;
            self.builder.refers_to_blob_file(blob.file_number, blob.size);
        } else if kind == ValueType::WideColumnEntity as u8 {
            for blob in blob_columns(value).map_err(format)? {
                self.builder.refers_to_blob_file(blob.file_number, blob.size);
            }
        }
        self.write_piece().await?;
        if let Some(training) = self.builder.training() {
            self.train(training).await;
        }
        while self.builder.step() {
            self.write_piece().await?;
            self.job.core.checkpoint().await;
        }
        Ok(())
    }

    /// Trains the dictionary, which would hold the core for a tenth of a second or more.
    async fn train(&mut self, training: DictionaryTraining) {
        let dictionary = self.job.core.compute(move || training.run()).await;
        self.builder.trained(dictionary);
    }

    /// Writes the table's bytes once there are enough of them.
    async fn write_piece(&mut self) -> Result<()> {
        if self.builder.output().len() >= PIECE {
            let written = self.file.append(self.builder.output()).await;
            written.map_err(|e| Error::io(&self.name, &e))?;
            self.builder.output_taken();
        }
        Ok(())
    }

    /// Adds a range tombstone, in any order.
    pub fn add_range_tombstone(&mut self, start: &[u8], end: &[u8], sequence: u64) {
        self.builder.add_range_tombstone(start, end, sequence);
    }

    /// Completes the file, makes it durable and opens it. The caller makes its name durable.
    pub async fn finish(mut self, epoch: u64) -> Result<Table> {
        if let Some(training) = self.builder.last_training() {
            self.train(training).await;
        }
        while self.builder.finish_step() {
            self.write_piece().await?;
            self.job.core.checkpoint().await;
        }
        let io = |e: std::io::Error| Error::io(&self.name, &e);
        let merge = &self.family.merge;
        let of_operands = merge.operator.as_ref().filter(|_| self.builder.merges() > 0);
        if let Some(class) = merge.class.as_deref().or(of_operands.map(MergeOperator::name)) {
            self.builder.names_merge_operator(class);
        }
        let (rest, meta) = self.builder.finish();
        self.file.append(&rest).await.map_err(io)?;
        self.file.finish().await.map_err(io)?;
        let meta = FileMeta { epoch, ..meta };
        let (core, dir) = (&self.job.core, &self.job.dir);
        let memory = &self.job.db.0.tables;
        Table::open(core, dir, &self.name, meta, self.family.comparator, memory).await
    }
}
