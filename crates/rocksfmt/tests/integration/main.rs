//! Tests of RocksDB's formats with files that RocksDB wrote, in one program, which is linked once.

mod damage;
mod real_files;
mod real_logs;
mod round_trip;
mod support;
mod written_for_rocksdb;
