"""Makes RocksDB databases with rocksdict, one per variant, and records their contents.

usage: generate.py DIR
For each variant: DIR/<name>/ is the database, DIR/<name>.scan the live entries, one "KEYHEX VALUEHEX" per line.
"""

import os
import random
import sys

from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    ChecksumType,
    DataBlockIndexType,
    DBCompressionType,
    Options,
    Rdict,
    SliceTransform,
    SstFileWriter,
)


def make(root, name, configure, keys=4000, value=lambda rng, i: value_of(rng), after=None, key=None):
    # With `after` the files stay as flushed: compaction would drop range tombstones and global sequences.
    rng = random.Random(name)
    options, table = Options(raw_mode=True), BlockBasedOptions()
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    configure(options, table)
    options.set_disable_auto_compactions(after is not None)
    options.set_block_based_table_factory(table)
    path = os.path.join(root, name)
    db = Rdict(path, options)
    key = key or (lambda i: b"key%08d" % (i * 7 % keys))
    for i in range(keys):
        db[key(i)] = value(rng, i)
    for i in range(0, keys, 11):
        del db[key(i)]
    db.flush()
    for i in range(0, keys, 5):
        db[key(i)] = b"again" + value(rng, i)
    if after:
        after(db, root, options)
    db.flush()
    if not after:
        db.compact_range(None, None)
    with open(os.path.join(root, name + ".scan"), "w") as out:
        for k, v in db.items():
            out.write(k.hex() + " " + v.hex() + "\n")
    db.close()


def value_of(rng):
    word = bytes(rng.randrange(97, 123) for _ in range(8))
    return word * rng.randrange(0, 20) + bytes(rng.randrange(256) for _ in range(rng.randrange(0, 12)))


def codec(compression, dictionary=0, train=0):
    def configure(options, table):
        options.set_compression_type(compression)
        options.set_compression_options(-14, 32767 if train or dictionary else 6, 0, dictionary)
        if train:
            options.set_zstd_max_train_bytes(train)

    return configure


def partitioned(interval):
    def configure(options, table):
        table.set_index_type(BlockBasedIndexType.two_level_index_search())
        table.set_partition_filters(True)
        table.set_bloom_filter(10.0, False)
        table.set_metadata_block_size(512)
        table.set_index_block_restart_interval(interval)

    return configure


def checksum(kind, version):
    def configure(options, table):
        table.set_checksum_type(kind)
        table.set_format_version(version)
        table.set_bloom_filter(10.0, False)

    return configure


def hash_blocks(options, table):
    table.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
    table.set_data_block_hash_ratio(0.75)


def hash_index(options, table):
    options.set_prefix_extractor(SliceTransform.create_fixed_prefix(6))
    table.set_index_type(BlockBasedIndexType.hash_search())


def intervals(data, index):
    def configure(options, table):
        table.set_block_restart_interval(data)
        table.set_index_block_restart_interval(index)
        table.set_block_size(1024)
        table.set_bloom_filter(14.0, False)

    return configure


def delete_ranges(db, root, options):
    for i in range(0, 4000, 400):
        db.delete_range(b"key%08d" % i, b"key%08d" % (i + 30))


def ingest(db, root, options):
    path = os.path.join(root, "external.sst")
    writer = SstFileWriter(options)
    writer.open(path)
    for i in range(500):
        writer[b"key%08d" % (i * 3)] = b"ingested%d" % i
    writer.finish()
    db.ingest_external_file([path])
    os.remove(path)
    with open(os.path.join(root, "ingested.sequence"), "w") as out:
        out.write(str(db.latest_sequence_number()))


def main(root):
    os.makedirs(root, exist_ok=True)
    c = DBCompressionType
    make(root, "plain", lambda o, t: None)
    for name in ["snappy", "zlib", "bz2", "lz4", "lz4hc", "zstd"]:
        make(root, name, codec(getattr(c, name)()))
    for name in ["zlib", "lz4", "zstd"]:
        make(root, name + "_dictionary", codec(getattr(c, name)(), dictionary=8192))
    make(root, "zstd_trained", codec(c.zstd(), dictionary=8192, train=100 * 8192))
    for interval in [1, 4, 8]:
        make(root, "partitioned%d" % interval, partitioned(interval))
    for kind in ["crc32c", "no_checksum", "xxhash", "xxhash64", "xxh3"]:
        for version in [5, 6]:
            make(root, "%s_v%d" % (kind, version), checksum(getattr(ChecksumType, kind)(), version), keys=800)
    for version in [2, 3, 4]:
        make(root, "version%d" % version, checksum(ChecksumType.crc32c(), version), keys=800)
    make(root, "hash_blocks", hash_blocks)
    make(root, "hash_index", hash_index)
    for data, index in [(1, 1), (3, 8), (64, 2), (1000, 16)]:
        make(root, "intervals_%d_%d" % (data, index), intervals(data, index))
    make(root, "range_deletions", lambda o, t: None, after=delete_ranges)
    make(root, "ingested", lambda o, t: None, after=ingest)
    make(root, "long_keys", lambda o, t: None, keys=300, key=lambda i: b"%04d" % (i * 7 % 300) * (i % 90 + 1))


main(sys.argv[1])
