//! Tests of the engine through its public interface, in one program, which is linked once.
//! A test that needs a process of its own (for its allocator or its memory protection) is a
//! separate program.

mod ages;
mod blob_gc;
mod blob_loads;
mod blobs;
mod closing;
mod column_families;
mod common;
mod compaction;
mod conditions;
mod copies;
mod failing_tables;
mod fairness;
mod full_disk;
mod healing;
mod ingest;
mod large;
mod late_files;
mod manifest;
mod memory;
mod merges;
mod model;
mod range_deletes;
mod repair;
mod shared;
mod wal_cases;
mod writing;
mod written_by_rocksdb;
