"""The databases that RocksDB writes and Millrace reads.

Each entry of DATABASES is a small database with one option, or one history, that changes bytes on disk. The writers are
db_bench and ldb (Debian's RocksDB 7.8.3) and rocksdict (RocksDB 9.8); a few databases of RocksDB 11 come from an archive.
The expected contents are what the writer's RocksDB reads back: `ldb scan --hex`, or an iterator of rocksdict, over the
finished directory.

By hand, to look at one:

    python3 e2e/databases.py                 the names
    python3 e2e/databases.py NAME DIR        makes DIR/db, and DIR/expected/FAMILY with lines of KEYHEX VALUEHEX

Every maker runs in a process of its own. One that ends without closing its database leaves what a killed process leaves: a
WAL and no flush.
"""

import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from typing import Callable

OPTIONS_TEMPLATE = pathlib.Path(__file__).with_name("rocksdb-options.ini")


@dataclass
class Database:
    """How to make one database, and what reading it must give."""

    name: str
    make: Callable[[pathlib.Path], None]
    reader: str = "rocksdict"  # where the expected contents come from: "ldb", "rocksdict" or "archive"
    error: str | None = None  # reading must fail with a message that matches this
    # Reading must fail with a message that matches this, or be right: RocksDB reads the database, Millrace may refuse it.
    may_refuse: str | None = None
    families: list[str] = field(default_factory=lambda: ["default"])


DATABASES: dict[str, Database] = {}


def database(name, reader="rocksdict", **more):
    """Registers the decorated maker as a database."""

    def add(make):
        assert name not in DATABASES, name
        DATABASES[name] = Database(name, make, reader, **more)
        return make

    return add


# ---------------------------------------------------------------------------------------------------------------- db_bench

BENCH_FLAGS = {
    "num": 3000,
    "value_size": 120,
    "key_size": 16,
    "block_size": 1024,
    "bloom_bits": 10,
    "compression_type": "none",
    "seed": 7,
    "threads": 1,
}


def run(*command, text=""):
    """Runs a tool with `text` as its input; shows its output only if it fails."""
    done = subprocess.run([str(c) for c in command], input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def db_bench(path, benchmarks="fillseq,compact", **flags):
    """Runs db_bench with BENCH_FLAGS, overridden by `flags`."""
    values = BENCH_FLAGS | flags
    run("db_bench", f"--db={path}", f"--benchmarks={benchmarks}", *(f"--{k}={v}" for k, v in values.items()))


def bench(name, benchmarks="fillseq,compact", error=None, may_refuse=None, families=None, **flags):
    """Registers a database made by one run of db_bench."""
    more = {"families": families} if families else {}
    database(f"db_bench-{name}", "ldb", error=error, may_refuse=may_refuse, **more)(
        lambda path: db_bench(path, benchmarks, **flags)
    )


for version in (2, 3, 4, 5):
    bench(f"format-version-{version}", format_version=version)
for number, kind in enumerate(("none", "crc32c", "xxhash", "xxhash64", "xxh3")):
    bench(f"checksum-{kind}", checksum_type=number)
for codec in ("snappy", "zlib", "lz4", "lz4hc", "bzip2", "zstd"):
    bench(f"compression-{codec}", compression_type=codec, compression_ratio=0.4)
    bench(f"format-version-2-{codec}", format_version=2, compression_type=codec, compression_ratio=0.4)
for codec in ("zlib", "lz4", "zstd"):
    bench(f"dictionary-{codec}", compression_type=codec, compression_ratio=0.4, compression_max_dict_bytes=4096)
bench(
    "dictionary-zstd-trained",
    compression_type="zstd",
    compression_ratio=0.4,
    compression_max_dict_bytes=4096,
    compression_zstd_max_train_bytes=65536,
)
bench("index-plain-with-compression", compression_type="zstd", compression_ratio=0.4, enable_index_compression=False)
bench("index-partitioned", partition_index=True, metadata_block_size=256)
bench("index-and-filter-partitioned", partition_index_and_filters=True, metadata_block_size=256)
bench("index-and-filter-partitioned-v2", partition_index_and_filters=True, metadata_block_size=256, format_version=2)
bench("index-with-first-key", index_with_first_key=True)
bench("index-restart-interval-8", index_block_restart_interval=8)
bench("index-restart-interval-8-v3", index_block_restart_interval=8, format_version=3)
bench("index-shortening-none", index_shortening_mode=0)
bench("index-shortening-both", index_shortening_mode=2)
bench("filter-ribbon", use_ribbon_filter=True)
bench("filter-none", bloom_bits=0)
bench("filter-legacy-bloom", format_version=4, bloom_bits=14)
bench("data-block-hash-index", use_data_block_hash_index=True, data_block_hash_table_util_ratio=0.75)
bench("block-align", block_align=True, block_size=4096)
bench("block-restart-interval-1", block_restart_interval=1)
bench("block-restart-interval-128", block_restart_interval=128)
bench("prefix-extractor", prefix_size=8, keys_per_prefix=16)
bench("prefix-extractor-no-whole-keys", prefix_size=8, keys_per_prefix=16, whole_key_filtering=False)
bench("compaction-universal", "fillrandom,overwrite", compaction_style=1, write_buffer_size=65536, num_levels=4)
bench("compaction-fifo", "fillrandom", compaction_style=2, write_buffer_size=65536, fifo_compaction_max_table_files_size_mb=100)
bench(
    "many-levels",
    "fillrandom,overwrite,deleterandom",
    write_buffer_size=65536,
    max_bytes_for_level_base=65536,
    target_file_size_base=32768,
)
bench("level-0-only", "fillrandom,overwrite,deleterandom", write_buffer_size=65536, disable_auto_compactions=True)
bench(
    "range-tombstones",
    "fillrandom",
    write_buffer_size=65536,
    writes_per_range_tombstone=40,
    range_tombstone_width=30,
    max_num_range_tombstones=60,
)
bench("single-deletes", "randomreplacekeys", numdistinct=300, duration=1, stddev=2000.0, write_buffer_size=4 << 20)
bench("single-deletes-in-wal", "randomreplacekeys", numdistinct=300, duration=1, stddev=2000.0, write_buffer_size=1 << 30)
bench("blobs", enable_blob_files=True, min_blob_size=0, write_buffer_size=65536)
for codec in ("lz4", "zstd", "snappy"):
    bench(f"blobs-{codec}", enable_blob_files=True, min_blob_size=64, blob_compression_type=codec, compression_ratio=0.4)
bench(
    "column-families",
    "fillrandom,flush",
    num_column_families=3,
    num_hot_column_families=3,
    families=["default", "column_family_name_000001", "column_family_name_000002"],
)
bench("wal-only", "fillseq")
bench("wal-only-overwritten-and-deleted", "fillrandom,overwrite,deleterandom")
bench("wal-compressed", "fillseq", wal_compression="zstd", compression_ratio=0.4)
bench("wals-tracked", "fillrandom", track_and_verify_wals_in_manifest=True, write_buffer_size=65536)
bench("wal-big-batches", "fillbatch", batch_size=700)
bench("values-empty", value_size=0)
bench("values-large", num=6, value_size=1_500_000)
bench("keys-long", num=500, key_size=900)
bench("merge-operands", "mergerandom,flush", merge_operator="put", num=500)
bench("merge-operands-in-wal", "mergerandom", merge_operator="put", num=500)
bench("timestamps", "fillseq,flush", user_timestamp_size=8, error="(?i)timestamp|u64ts")


@database("db_bench-reopened", "ldb")
def _(path):
    """Several runs over one directory: several MANIFESTs, WALs and generations of files."""
    for round_, kind in enumerate(("fillseq", "overwrite", "deleterandom", "overwrite")):
        db_bench(path, kind, num=1500, use_existing_db=int(round_ > 0), seed=round_ + 1, disable_auto_compactions=True)


@database("db_bench-wal-elsewhere", "ldb", may_refuse="(?i)wal")
def _(path):
    """`wal_dir` names another directory: its records may be read or refused, but not silently dropped."""
    db_bench(path, "fillseq", num=500, wal_dir=f"{path}.wal")


# --------------------------------------------------------------------------------------------------------------------- ldb

LDB_ROWS = {
    "": "the empty key",
    "hello": "world",
    "fruit:apple": "red",
    "fruit:banana": "yellow",
    "fruit:cherry": "dark red",
    "empty": "",
    "zz" * 40: "z" * 300,
}


def ldb(path, *arguments, text=""):
    """Runs ldb on the database."""
    return run("ldb", f"--db={path}", *arguments, text=text)


@database("ldb-put", "ldb")
def _(path):
    for key, value in LDB_ROWS.items():
        ldb(path, "--hex", "put", "0x" + key.encode().hex(), "0x" + value.encode().hex(), "--create_if_missing")
    ldb(path, "delete", "fruit:banana")
    ldb(path, "deleterange", "fruit:c", "fruit:d")


@database("ldb-column-families", "ldb", families=["default", "one", "two"])
def _(path):
    ldb(path, "put", "a", "1", "--create_if_missing")
    for family in ("one", "two", "gone"):
        ldb(path, "create_column_family", family)
        ldb(path, f"--column_family={family}", "batchput", "a", family, f"only-{family}", "x")
    ldb(path, "drop_column_family", "gone")
    ldb(path, "--column_family=two", "compact")


@database("ldb-ingested", "ldb")
def _(path):
    ldb(path, "batchput", "a", "put", "b", "put before", "--create_if_missing")
    ldb(path, "compact")
    ldb(path, "write_extern_sst", path.with_name("extern.sst"), text="b ==> ingested\nc ==> ingested\n")
    ldb(path, "ingest_extern_sst", path.with_name("extern.sst"))
    ldb(path, "put", "c", "put after")


@database("ldb-reduced-levels", "ldb")
def _(path):
    db_bench(path, "fillrandom,compact")
    ldb(path, "reduce_levels", "--new_levels=3")


@database("ldb-repaired", "ldb")
def _(path):
    db_bench(path, "fillrandom,flush,overwrite")
    for manifest in path.glob("MANIFEST-*"):
        manifest.unlink()
    ldb(path, "repair")


# --------------------------------------------------------------------------------------------------------------- rocksdict


def options(path, **edits):
    """Options of RocksDB 9.8, from its own options file with `edits`: every option, by its own name.

    A value may be a string or a number; editing a name that the file does not have fails.
    """
    import rocksdict

    text = OPTIONS_TEMPLATE.read_text()
    if "write_buffer_size" in edits:
        edits.setdefault("arena_block_size", 4096)  # otherwise one block alone would fill the memtable
    for name, value in edits.items():
        value = str(value).lower() if isinstance(value, bool) else str(value)
        text, count = re.subn(rf"(?m)^(  {name}=).*$", lambda m: m[1] + value, text)
        assert count == 1, f"{name}: {count} lines of this name in {OPTIONS_TEMPLATE.name}"
    template = path.with_name(path.name + ".options")
    template.mkdir(parents=True)
    (template / "OPTIONS-000001").write_text(text)
    (template / "rocksdict-config.json").write_text('{"raw_mode":true,"prefix_extractors":{}}')
    try:
        whole, families = rocksdict.Options.load_latest(str(template))
    finally:
        shutil.rmtree(template)
    whole.create_if_missing(True)
    return whole, families["default"]


def open_rocks(path, **edits):
    """Opens a new database with these options."""
    import rocksdict

    whole, default = options(path, **edits)
    return rocksdict.Rdict(str(path), whole, {"default": default})


def numbered(n):
    """The n-th ordinary key, which shares its prefix with its neighbours."""
    return b"user%04d:%08d" % (n // 50, n)


def text_value(n, length=120):
    """A value that compresses, but differs from all others."""
    return (b"value %d of the table, " % n * (length // 20 + 1))[:length]


def fill(db, count=3000, length=120, start=0):
    """Puts `count` ordinary keys in shuffled order."""
    order = list(range(start, start + count))
    random.Random(count).shuffle(order)
    for n in order:
        db[numbered(n)] = text_value(n, length)


SMALL_BLOCKS = {"block_size": 1024, "filter_policy": "bloomfilter:10:false"}


def rocks(name, finish="compact", error=None, may_refuse=None, **edits):
    """Registers a database of ordinary keys, flushed and compacted by rocksdict with changed options."""

    @database(f"rocksdict-{name}", error=error, may_refuse=may_refuse)
    def _(path):
        db = open_rocks(path, **(SMALL_BLOCKS | edits))
        fill(db)
        if finish == "compact":
            db.flush()
            db.compact_range(None, None)
            db.close()
        elif finish == "flush":
            db.close()
        else:
            if finish == "flush and leave":
                db.flush()
                fill(db, 200, start=3000)
            os._exit(0)


for version in (2, 3, 4, 5, 6):
    rocks(f"format-version-{version}", format_version=version)
for checksum in ("kNoChecksum", "kCRC32c", "kxxHash", "kxxHash64", "kXXH3"):
    rocks(f"checksum-{checksum}", checksum=checksum, format_version=6)
for codec in ("kSnappyCompression", "kZlibCompression", "kLZ4Compression", "kLZ4HCCompression", "kBZip2Compression", "kZSTD"):
    rocks(f"compression-{codec}", compression=codec)
for codec in ("kZlibCompression", "kLZ4Compression", "kZSTD"):
    rocks(
        f"dictionary-{codec}",
        compression=codec,
        compression_opts="{max_dict_bytes=4096;zstd_max_train_bytes=65536;level=3;window_bits=-14;strategy=0;}",
    )
    rocks(
        f"dictionary-untrained-{codec}",
        compression=codec,
        format_version=4,
        compression_opts="{max_dict_bytes=2048;zstd_max_train_bytes=0;use_zstd_dict_trainer=false;level=3;window_bits=-14;strategy=0;}",
    )
rocks("compression-by-level", compression="kLZ4Compression", bottommost_compression="kZSTD")
for index in ("kBinarySearch", "kHashSearch", "kTwoLevelIndexSearch", "kBinarySearchWithFirstKey"):
    extractor = "rocksdb.FixedPrefix.8" if index == "kHashSearch" else "nullptr"
    rocks(f"index-{index}", index_type=index, prefix_extractor=extractor, metadata_block_size=256)
    rocks(f"index-{index}-v2", index_type=index, prefix_extractor=extractor, metadata_block_size=256, format_version=2)
rocks("index-restart-interval-16", index_block_restart_interval=16)
rocks("index-two-level-restart-interval-4", index_type="kTwoLevelIndexSearch", index_block_restart_interval=4, metadata_block_size=512)
rocks("index-shortening-none", index_shortening="kNoShortening")
rocks("filter-partitioned", index_type="kTwoLevelIndexSearch", partition_filters=True, metadata_block_size=256)
rocks(
    "filter-partitioned-decoupled",
    index_type="kTwoLevelIndexSearch",
    partition_filters=True,
    decouple_partitioned_filters=True,
    metadata_block_size=256,
)
rocks(
    "filter-partitioned-prefix",
    index_type="kTwoLevelIndexSearch",
    partition_filters=True,
    metadata_block_size=256,
    prefix_extractor="rocksdb.FixedPrefix.8",
    whole_key_filtering=False,
)
rocks("filter-partitioned-ribbon", index_type="kTwoLevelIndexSearch", partition_filters=True, metadata_block_size=256, filter_policy="ribbonfilter:10")
rocks("filter-ribbon", filter_policy="ribbonfilter:10")
rocks("filter-ribbon-mixed", "flush", filter_policy="{id=ribbonfilter:10:2;bloom_before_level=2;}", write_buffer_size=65536)
rocks("filter-legacy-bloom", filter_policy="bloomfilter:10:false", format_version=4)
rocks("filter-none", filter_policy="nullptr")
rocks("filter-fraction-of-a-bit", filter_policy="bloomfilter:3.7:false")
rocks("data-block-hash-index", data_block_index_type="kDataBlockBinaryAndHash")
rocks("data-block-no-delta", use_delta_encoding=False)
rocks("block-align", block_align=True, compression="kNoCompression", block_size=4096)
rocks("block-one-entry", block_size=1)
rocks("prefix-fixed", prefix_extractor="rocksdb.FixedPrefix.8")
rocks("prefix-capped", prefix_extractor="rocksdb.CappedPrefix.9")
rocks("prefix-noop", prefix_extractor="rocksdb.Noop")
rocks("prefix-no-whole-keys", prefix_extractor="rocksdb.FixedPrefix.8", whole_key_filtering=False)
rocks("comparator-reverse", comparator="rocksdb.ReverseBytewiseComparator")
rocks("comparator-reverse-flushed", "flush", comparator="rocksdb.ReverseBytewiseComparator", write_buffer_size=65536)
rocks(
    "comparator-reverse-partitioned",
    comparator="rocksdb.ReverseBytewiseComparator",
    index_type="kTwoLevelIndexSearch",
    partition_filters=True,
    metadata_block_size=256,
)
rocks("comparator-reverse-wal-only", "leave", comparator="rocksdb.ReverseBytewiseComparator")
rocks("compaction-universal", "flush", compaction_style="kCompactionStyleUniversal", write_buffer_size=65536)
rocks("compaction-fifo", "flush", compaction_style="kCompactionStyleFIFO", write_buffer_size=65536)
for codec in ("kNoCompression", "kLZ4Compression", "kZSTD", "kSnappyCompression"):
    rocks(f"blobs-{codec}", enable_blob_files=True, min_blob_size=50, blob_compression_type=codec)
rocks("blobs-several-files", enable_blob_files=True, blob_file_size=65536, min_blob_size=10)
rocks("blobs-from-level-1", "flush", enable_blob_files=True, blob_file_starting_level=1, write_buffer_size=65536)
rocks("wal-only", "leave")
rocks("wal-compressed", "leave", wal_compression="kZSTD")
rocks("wal-recycled", "flush and leave", recycle_log_file_num=4, write_buffer_size=65536, wal_recovery_mode="kPointInTimeRecovery")
rocks("wal-recycled-any-mode", "leave", recycle_log_file_num=2, write_buffer_size=65536, wal_recovery_mode="kSkipAnyCorruptedRecords")
rocks("wal-tracked", "leave", track_and_verify_wals_in_manifest=True, write_buffer_size=65536)
rocks("wal-pipelined", "leave", enable_pipelined_write=True, write_buffer_size=65536)
rocks("wal-unordered", "leave", unordered_write=True, allow_concurrent_memtable_write=True)
rocks("wal-two-queues", "leave", two_write_queues=True)
rocks("file-checksums-in-manifest", file_checksum_gen_factory="FileChecksumGenCrc32cFactory")
rocks("times-of-sequence-numbers", preserve_internal_time_seconds=3600, compaction_style="kCompactionStyleUniversal")
rocks("statistics-persisted", "flush", persist_stats_to_disk=True, stats_persist_period_sec=1)
rocks("plain-values-and-one-level", num_levels=1, level_compaction_dynamic_level_bytes=False)


@database("rocksdict-empty")
def _(path):
    open_rocks(path).close()


@database("rocksdict-emptied")
def _(path):
    db = open_rocks(path, **SMALL_BLOCKS)
    fill(db, 500)
    db.flush()
    for n in range(500):
        del db[numbered(n)]
    db.flush()
    db.compact_range(None, None)
    db.close()


def odd_rows():
    """Boundary keys and values: empty, binary, nested prefixes, lengths at which a varint grows."""
    rows = {b"": b"the empty key", b"\0": b"", b"\0\0": b"\0", b"\xff": b"last but", b"\xff" * 20: b"last", b"empty": b""}
    rng = random.Random(5)
    for length in range(1, 40):
        rows[b"nested/" + b"a" * length] = b"%d" % length
    for length in (126, 127, 128, 129, 255, 256, 1000, 16383, 16384, 16385):
        rows[rng.randbytes(length)] = rng.randbytes(length)
    for _ in range(1500):
        rows[rng.randbytes(rng.randint(1, 24))] = rng.randbytes(rng.randint(0, 90))
    rows[b"line\nbreak\r\n"] = b"\r\n$-1\r\n"
    rows["Grüße 世界".encode()] = "Wert 値".encode()
    return rows


def odd(name, end, **edits):
    """Registers a database of boundary keys and values."""

    @database(f"rocksdict-odd-keys-{name}")
    def _(path):
        db = open_rocks(path, **(SMALL_BLOCKS | edits))
        for key, value in odd_rows().items():
            db[key] = value
        end(db)


def leave(db):
    os._exit(0)


def close(db):
    db.flush()
    db.close()


odd("flushed", close)
odd("wal-only", leave)
odd("hash-index", close, data_block_index_type="kDataBlockBinaryAndHash")
odd("first-key", close, index_type="kBinarySearchWithFirstKey")
odd("two-level", close, index_type="kTwoLevelIndexSearch", partition_filters=True, metadata_block_size=128)
odd("reverse", close, comparator="rocksdb.ReverseBytewiseComparator")
odd("old", close, format_version=2)


@database("rocksdict-values-large")
def _(path):
    db = open_rocks(path, **SMALL_BLOCKS)
    rng = random.Random(3)
    for n in range(4):
        db[b"flushed%d" % n] = rng.randbytes(1_100_000 + n)
        db[b"small%d" % n] = b"x"
    db.flush()
    db[b"in the wal"] = rng.randbytes(3_000_000)
    os._exit(0)


@database("rocksdict-layers")
def _(path):
    """Puts and deletes of the same keys in every layer: bottom level, L0 files, memtable."""
    db = open_rocks(path, disable_auto_compactions=True, **SMALL_BLOCKS)
    fill(db, 2000)
    db.flush()
    db.compact_range(None, None)
    rng = random.Random(11)
    for layer in range(6):
        for _ in range(300):
            n = rng.randrange(2200)
            if rng.random() < 0.35:
                del db[numbered(n)]
            else:
                db[numbered(n)] = b"layer %d " % layer + text_value(n, 60)
        if layer < 5:
            db.flush()
    os._exit(0)


@database("rocksdict-versions-kept-for-snapshots")
def _(path):
    """A compaction that had to keep old versions and deletions for held snapshots."""
    db = open_rocks(path, **SMALL_BLOCKS)
    held = []
    for round_ in range(5):
        for n in range(0, 600, round_ + 1):
            db[numbered(n)] = b"round %d" % round_
        for n in range(round_, 600, 17):
            del db[numbered(n)]
        held.append(db.snapshot())
        db.flush()
    db.compact_range(None, None)
    os._exit(0)


def range_deletes(name, end, **edits):
    """Registers a database with range deletions over lower layers, and puts over the range deletions."""

    @database(f"rocksdict-range-deletes-{name}")
    def _(path):
        db = open_rocks(path, disable_auto_compactions=True, **(SMALL_BLOCKS | edits))
        fill(db, 2000)
        db.flush()
        db.compact_range(None, None)
        held = db.snapshot()
        db.delete_range(numbered(100), numbered(200))
        db.delete_range(numbered(150), numbered(260))
        db[numbered(170)] = b"put over a range deletion"
        db.flush()
        db.delete_range(numbered(1000), numbered(1010))
        db.delete_range(numbered(1500), numbered(1500))
        db.delete_range(b"", numbered(20))
        db[numbered(7)] = b"put again"
        db.delete_range(numbered(1990), b"\xff")
        end(db)
        del held


def compact_and_close(db):
    db.flush()
    db.compact_range(None, None)
    db.close()


range_deletes("in-the-wal", leave)
range_deletes("flushed", close)
range_deletes("compacted-under-a-snapshot", compact_and_close)
range_deletes("old-format", close, format_version=2)
range_deletes("partitioned", close, index_type="kTwoLevelIndexSearch", partition_filters=True, metadata_block_size=256)


@database("rocksdict-range-deletes-only")
def _(path):
    db = open_rocks(path, **SMALL_BLOCKS)
    db.delete_range(b"a", b"z")
    db.flush()
    db.close()


@database("rocksdict-batches")
def _(path):
    """Write batches with every kind of record, in the WAL only."""
    import rocksdict

    db = open_rocks(path)
    other = db.create_column_family("other", options(path)[1])
    handle = db.get_column_family_handle("other")
    for round_ in range(30):
        batch = rocksdict.WriteBatch(raw_mode=True)
        for n in range(40):
            batch.put(numbered(round_ * 20 + n), b"%d" % round_)
            batch.put(numbered(n), b"other %d" % round_, handle)
        batch.delete(numbered(round_ * 7))
        batch.delete(numbered(round_), handle)
        batch.delete_range(numbered(round_ * 20 + 3), numbered(round_ * 20 + 6))
        db.write(batch)
    db.write(rocksdict.WriteBatch(raw_mode=True))
    del other
    os._exit(0)


DATABASES["rocksdict-batches"].families = ["default", "other"]


@database("rocksdict-column-families", families=["default", "plain", "blobs", "reverse", "Ünïcode name"])
def _(path):
    """Column families with different comparators and formats, one dropped, one in the WAL only."""
    db = open_rocks(path, **SMALL_BLOCKS)
    kinds = {
        "plain": {"format_version": 2},
        "blobs": {"enable_blob_files": True, "compression": "kZSTD"},
        "reverse": {"comparator": "rocksdb.ReverseBytewiseComparator", "compression": "kLZ4Compression"},
        "dropped": {},
    }
    fill(db, 400)
    for name, edits in kinds.items():
        family = db.create_column_family(name, options(path, **(SMALL_BLOCKS | edits))[1])
        fill(family, 600)
        family.flush()
    db.drop_column_family("dropped")
    fill(db.create_column_family("Ünïcode name", options(path)[1]), 50)
    os._exit(0)


@database("rocksdict-column-families-flushed-together", families=["default", "second"])
def _(path):
    """`atomic_flush`: version edits in atomic groups."""
    db = open_rocks(path, atomic_flush=True, **SMALL_BLOCKS)
    second = db.create_column_family("second", options(path)[1])
    for round_ in range(3):
        fill(db, 200, start=round_ * 100)
        fill(second, 300, start=round_ * 100)
        db.flush()
    os._exit(0)


@database("rocksdict-ingested")
def _(path):
    """Ingested files of SstFileWriter, with one sequence number for the whole file."""
    import rocksdict

    db = open_rocks(path, **SMALL_BLOCKS)
    fill(db, 1000)
    db.flush()
    held = db.snapshot()
    for part, version in enumerate((2, 5, 6)):
        file = str(path.with_name(f"part{part}.sst"))
        writer = rocksdict.SstFileWriter(options(path, **(SMALL_BLOCKS | {"format_version": version}))[1])
        writer.open(file)
        for n in range(part * 100, part * 100 + 300):
            if n % 10 == 9:
                del writer[numbered(n)]
            else:
                writer[numbered(n)] = b"ingested in part %d" % part
        writer.finish()
        db.ingest_external_file([file])
    db[numbered(5)] = b"put after"
    del held
    os._exit(0)


@database("rocksdict-entities", may_refuse="(?i)wide|entit")
def _(path):
    db = open_rocks(path, **SMALL_BLOCKS)
    fill(db, 100)
    for n in range(100, 120):
        db.put_entity(numbered(n), [b"", b"city"], [b"default column", b"Oslo"])
    db.flush()
    db.close()


@database("rocksdict-plain-table", error="(?i)plain|table|magic")
def _(path):
    import rocksdict

    whole = rocksdict.Options(raw_mode=True)
    whole.create_if_missing(True)
    whole.set_plain_table_factory(rocksdict.PlainTableFactoryOptions())
    whole.set_prefix_extractor(rocksdict.SliceTransform.create_fixed_prefix(4))
    whole.set_allow_mmap_reads(True)
    db = rocksdict.Rdict(str(path), whole)
    fill(db, 200)
    db.flush()
    db.close()


@database("rocksdict-many-manifest-records")
def _(path):
    """A MANIFEST of many edits, rolled over because of its size."""
    db = open_rocks(path, disable_auto_compactions=True, max_manifest_file_size=4000, **SMALL_BLOCKS)
    for round_ in range(30):
        fill(db, 40, start=round_ * 30)
        db.flush()
    db.compact_range(None, None)
    fill(db, 20, start=2000)
    os._exit(0)


# -------------------------------------------------------------------------------------------------------------- RocksDB 11

# Written by RocksDB 11.8 with bench/peers/examples/fixtures.rs: format version 7, which no packaged RocksDB writes yet.
ARCHIVE = pathlib.Path(__file__).with_name("rocksdb-11.tar.xz")


def unpack(name, target):
    """Unpacks one directory of the archive."""
    with tarfile.open(ARCHIVE) as archive:
        for member in archive.getmembers():
            if member.isfile() and member.name.startswith(f"./{name}/"):
                file = target / member.name.removeprefix(f"./{name}/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(archive.extractfile(member).read())


for part in (
    *("plain", "hash", "partitioned", "ribbon", "lz4", "zstd-dictionary", "blobs", "blobs-zstd"),
    *("wal", "wal-recycled", "wal-compressed-and-tracked"),
):
    database(f"rocksdb-11-{part}", "archive")(lambda path, part=part: unpack(f"{part}/db", path))


# ---------------------------------------------------------------------------------------------------------- what they read


def their_scan(db: Database, path: pathlib.Path, family: str):
    """(key, value) in the database's own order, as its writer's RocksDB reads them."""
    if db.reader == "archive":
        unpack(db.name.removeprefix("rocksdb-11-") + "/expected", path.with_name("archived"))
        return read_pairs(path.with_name("archived") / family)
    if db.reader == "ldb":
        pairs = []
        for line in ldb(path, "scan", "--hex", f"--column_family={family}").splitlines():
            key, value = line.split(" : ")
            pairs.append((bytes.fromhex(key[2:]), bytes.fromhex(value[2:])))
        return pairs
    import rocksdict

    whole, families = rocksdict.Options.load_latest(str(path), ignore_unknown_options=False)
    access = rocksdict.AccessType.read_only(error_if_log_file_exist=False)
    opened = rocksdict.Rdict(str(path), whole, families, access)
    try:
        source = opened if family == "default" else opened.get_column_family(family)
        ordered = rocksdict.ReadOptions()
        ordered.set_total_order_seek(True)
        return list(source.items(read_opt=ordered))
    finally:
        opened.close()


def build(name: str, directory: pathlib.Path):
    """Makes database `name` below `directory`, in processes of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    for step in ("make", "scan"):
        run(sys.executable, __file__, f"--{step}", name, directory)
    return directory / "db"


def expected(directory: pathlib.Path, family: str = "default"):
    """The contents that `build` found in `directory`: (key, value) in order."""
    return read_pairs(directory / "expected" / family)


def read_pairs(file):
    """(key, value) of lines KEYHEX VALUEHEX."""
    pairs = []
    for line in file.read_text().splitlines():
        key, value = line.split(" ")
        pairs.append((bytes.fromhex(key), bytes.fromhex(value)))
    return pairs


def main(arguments):
    match arguments:
        case []:
            print("\n".join(DATABASES))
        case ["--make", name, directory]:
            DATABASES[name].make(pathlib.Path(directory) / "db")
        case ["--scan", name, directory]:
            target = pathlib.Path(directory) / "expected"
            target.mkdir()
            db = DATABASES[name]
            for family in db.families if db.error is None else []:
                pairs = their_scan(db, pathlib.Path(directory) / "db", family)
                (target / family).write_text("".join(f"{k.hex()} {v.hex()}\n" for k, v in pairs))
        case [name, directory]:
            build(name, pathlib.Path(directory))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
