//! Writes small databases with RocksDB 11, which no distribution packages yet, for the black-box
//! tests.
//!
//! ```text
//! cargo run --release --features codecs --example fixtures -- DIR
//! tar -C DIR --sort=name --owner=0 --group=0 --mtime=@0 -cJf ../../e2e/rocksdb-11.tar.xz .
//! ```
//!
//! Each becomes `DIR/NAME/db`; `DIR/NAME/expected/default` has the contents that RocksDB's own
//! iterator reads, as lines of `KEYHEX VALUEHEX`. The values are small, because the archive is part
//! of the repository.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

#[cfg(feature = "codecs")]
use rocksdb::DBCompressionType;
use rocksdb::{
    BlockBasedIndexType, BlockBasedOptions, ColumnFamilyDescriptor, DB, DataBlockIndexType,
    IteratorMode, Options, WriteBatch,
};

/// Changes the options of one database.
type Edit = fn(&mut Options, &mut BlockBasedOptions);

/// Name, whether the last writes stay in the WAL, and the options. Those with a codec need
/// `--features codecs`.
const DATABASES: &[(&str, bool, Edit)] = &[
    ("plain", false, |_, _| {}),
    ("hash", false, |_, table| table.set_data_block_index_type(DataBlockIndexType::BinaryAndHash)),
    #[cfg(feature = "codecs")]
    ("lz4", false, |options, _| options.set_compression_type(DBCompressionType::Lz4)),
    #[cfg(feature = "codecs")]
    ("zstd-dictionary", false, |options, _| {
        options.set_compression_type(DBCompressionType::Zstd);
        options.set_compression_options(-14, 3, 0, 2048);
        options.set_zstd_max_train_bytes(32 << 10);
    }),
    ("partitioned", false, |_, table| {
        table.set_index_type(BlockBasedIndexType::TwoLevelIndexSearch);
        table.set_partition_filters(true);
        table.set_metadata_block_size(256);
    }),
    ("ribbon", false, |_, table| {
        table.set_index_block_restart_interval(4);
        table.set_ribbon_filter(10.0);
    }),
    #[cfg(feature = "codecs")]
    ("blobs-zstd", false, |options, _| {
        options.set_enable_blob_files(true);
        options.set_blob_compression_type(DBCompressionType::Zstd);
    }),
    ("blobs", false, |options, _| {
        options.set_enable_blob_files(true);
        options.set_min_blob_size(40);
    }),
    ("wal", true, |_, _| {}),
    #[cfg(feature = "codecs")]
    ("wal-compressed-and-tracked", true, |options, _| {
        options.set_wal_compression_type(DBCompressionType::Zstd);
        options.set_track_and_verify_wals_in_manifest(true);
    }),
    ("wal-recycled", true, |options, _| {
        options.set_recycle_log_file_num(3);
        options.set_write_buffer_size(64 << 10);
    }),
];

fn key(n: u32) -> String {
    format!("user{:03}:{n:06}", n / 40)
}

fn value(n: u32, round: u32) -> String {
    format!("value {n} of round {round}, ").repeat(1 + n as usize % 4)
}

/// Puts, overwrites, single deletions, deletions and range deletions, over three layers of files.
fn fill(db: &DB) -> Result<(), Box<dyn Error>> {
    for round in 0..3 {
        for n in (0..900).filter(|n| round == 0 || n % (round + 3) == 0) {
            db.put(key(n), value(n, round))?;
        }
        db.delete_range_cf(
            db.cf_handle("default").ok_or("no default family")?,
            key(100 * round + 20),
            key(100 * round + 45),
        )?;
        let mut batch = WriteBatch::default();
        (0..900).step_by(37).for_each(|n| batch.delete(key(n + round)));
        batch.put(format!("once{round}"), b"");
        batch.single_delete(format!("once{round}"));
        batch.put(b"", format!("the empty key of round {round}"));
        db.write(batch)?;
        if round < 2 {
            db.flush()?;
        }
    }
    Ok(())
}

fn options(edit: Edit) -> Options {
    let mut options = Options::default();
    let mut table = BlockBasedOptions::default();
    options.create_if_missing(true);
    options.set_disable_auto_compactions(true);
    table.set_format_version(7);
    table.set_block_size(1024);
    table.set_bloom_filter(10.0, false);
    edit(&mut options, &mut table);
    options.set_block_based_table_factory(&table);
    options
}

fn family(edit: Edit) -> ColumnFamilyDescriptor {
    ColumnFamilyDescriptor::new("default", options(edit))
}

fn main() -> Result<(), Box<dyn Error>> {
    let root = std::env::args_os().nth(1).ok_or("usage: fixtures DIR")?;
    for &(name, leave, edit) in DATABASES {
        let home = Path::new(&root).join(name);
        let path = home.join("db");
        fs::create_dir_all(&path)?;
        let db = DB::open_cf_descriptors(&options(edit), &path, [family(edit)])?;
        fill(&db)?;
        if leave {
            // Copied while it is open, as a killed process leaves it.
            let copy = home.join("copy");
            fs::create_dir_all(&copy)?;
            for entry in fs::read_dir(&path)? {
                let entry = entry?;
                fs::copy(entry.path(), copy.join(entry.file_name()))?;
            }
            drop(db);
            fs::remove_dir_all(&path)?;
            fs::rename(&copy, &path)?;
        } else {
            db.flush()?;
            drop(db);
        }
        for entry in fs::read_dir(&path)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with("LOG") {
                fs::remove_file(entry.path())?;
            }
        }
        let reader =
            DB::open_cf_descriptors_read_only(&options(edit), &path, [family(edit)], false)?;
        let mut lines = String::new();
        for item in reader.iterator(IteratorMode::Start) {
            let (key, value) = item?;
            key.iter().try_for_each(|byte| write!(lines, "{byte:02x}"))?;
            lines.push(' ');
            value.iter().try_for_each(|byte| write!(lines, "{byte:02x}"))?;
            lines.push('\n');
        }
        fs::create_dir_all(home.join("expected"))?;
        fs::write(home.join("expected").join("default"), lines)?;
    }
    Ok(())
}
