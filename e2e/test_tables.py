"""Millrace writes tables as the OPTIONS file of a directory says: the same options, the same rows, compared with the tables of RocksDB."""

import random
import re
import subprocess

import millrace
import pytest
import rocksdb78
from rocksdict import BlockBasedIndexType, BlockBasedOptions, ChecksumType, DBCompressionType, Options, Rdict

ROWS = {b"key%06d" % (n * 7): (b"value %d " % (n % 97)) * 12 for n in range(6000)}


def configure(change, version):
    options, table = Options(raw_mode=True), BlockBasedOptions()
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    options.set_disable_auto_compactions(True)
    table.set_format_version(version)
    change(options, table)
    options.set_block_based_table_factory(table)
    return options


def compression(kind, level=32767, dictionary=0, train=0):
    def change(options, table):
        options.set_compression_type(kind)
        options.set_compression_options(-14, level, 0, dictionary)
        options.set_zstd_max_train_bytes(train)

    return change


def per_level(options, table):
    options.set_compression_type(DBCompressionType.none())
    options.set_compression_per_level([DBCompressionType.snappy(), DBCompressionType.zstd()])


def partitions(options, table):
    table.set_index_type(BlockBasedIndexType.two_level_index_search())
    table.set_partition_filters(True)
    table.set_bloom_filter(10.0, False)
    table.set_metadata_block_size(1024)
    table.set_index_block_restart_interval(3)


def two_level_index(options, table):
    table.set_index_type(BlockBasedIndexType.two_level_index_search())
    table.set_metadata_block_size(512)


def sizes(options, table):
    table.set_block_size(1500)
    table.set_block_restart_interval(4)


def table_option(name, *values):
    return lambda options, table: getattr(table, name)(*values)


CASES = {
    "nothing": lambda options, table: None,
    "snappy": compression(DBCompressionType.snappy()),
    "lz4": compression(DBCompressionType.lz4()),
    "zstd": compression(DBCompressionType.zstd(), 5),
    "zstd-dictionary": compression(DBCompressionType.zstd(), 3, 4096),
    "zstd-trained": compression(DBCompressionType.zstd(), 3, 4096, 100_000),
    "lz4-dictionary": compression(DBCompressionType.lz4(), 32767, 4096),
    "per-level": per_level,
    "partitions": partitions,
    "two-level-index": two_level_index,
    "sizes": sizes,
    # OPTIONS of 9.8 do not state other numbers of bits.
    "bloom": table_option("set_bloom_filter", 10.0, False),
    "crc32c": table_option("set_checksum_type", ChecksumType.crc32c()),
    "xxhash64": table_option("set_checksum_type", ChecksumType.xxhash64()),
}


def properties(path):
    """What sst_dump says about a table, by name; verifies its checksums."""
    for arguments in (["--command=verify", "--verify_checksum"], ["--command=none", "--show_properties"]):
        done = subprocess.run(["sst_dump", f"--file={path}", *arguments], capture_output=True, text=True, check=True)
        assert "orruption" not in done.stdout + done.stderr, done.stdout + done.stderr
    found = re.findall(r"^\s*#? ?([^:\n]+): (.*)$", done.stdout, re.MULTILINE)
    return {name.strip(): value.strip() for name, value in found}


def only_table(path):
    tables = sorted(path.glob("*.sst"))
    assert len(tables) == 1, tables
    return tables[0]


def their_table(path, change):
    with_options = Rdict(str(path), configure(change, 5))
    for key, value in ROWS.items():
        with_options[key] = value
    with_options.flush()
    with_options.close()
    return only_table(path)


def our_table(path, change):
    """RocksDB makes the directory with its options, Millrace the table."""
    Rdict(str(path), configure(change, 6)).close()
    with millrace.node(path, path.parent / "log", writes=True) as node, node.connect() as client:
        assert all(reply == b"OK" for reply in client.pipeline([("SET", *row) for row in ROWS.items()]))
    # The next opening writes what is in the log to a table.
    with millrace.node(path, path.parent / "log", writes=True) as node, node.connect() as client:
        assert client.call("DBSIZE") == len(ROWS)
    return only_table(path)


@pytest.mark.parametrize("case", CASES)
def test_tables_have_the_form_that_options_say(case, tmp_path):
    change = CASES[case]
    theirs = properties(their_table(tmp_path / "theirs", change))
    ours = properties(our_table(tmp_path / "ours", change))
    same = ["SST file compression algo", "entries", "raw key size", "raw value size", "filter policy name", "index partitions"]
    for name in [name for name in theirs if any(part in name for part in same)]:
        if name == "index partitions":
            # RocksDB also divides the index where it divides the filter.
            assert (int(theirs[name]) > 1) == (int(ours[name]) > 1), (name, theirs, ours)
        else:
            assert theirs[name] == ours[name], (name, theirs[name], ours[name])
    for name, factor in {"data blocks": 1.01, "data block size": 1.15, "filter block size": 1.1}.items():
        a, b = int(theirs[name]), int(ours[name])
        assert max(a, b) <= min(a, b) * factor + 100, (name, a, b)
    again = Rdict(str(tmp_path / "ours"), configure(change, 6))
    assert dict(again.items()) == ROWS
    again.compact_range(None, None)
    assert dict(again.items()) == ROWS
    again.close()


# 4 KiB is the usual size of a block, 1 MiB the largest; deflate refers back 16 or 32 KiB.
BLOCK_SIZES = [4 << 10, 16 << 10, 40 << 10, 256 << 10, 1 << 20]


def rows_that_repeat():
    """2.5 MiB of values, with repetitions at distances around the windows of the codecs."""
    rng = random.Random(7)
    said = bytearray(rng.randbytes(40_000))
    rows = {}
    for n in range(2500):
        distance = rng.choice([100, 5000, (16 << 10) - 262, 16 << 10, (16 << 10) + 100, 24 << 10, (32 << 10) - 262, 32 << 10])
        value = bytes(said[-distance:][:700]) + rng.randbytes(60) + b"value %d " % n * rng.randrange(40)
        said += value
        rows[b"key%06d" % n] = value
    return rows


@pytest.mark.parametrize("dictionary", [0, 32 << 10])
@pytest.mark.parametrize("codec", ["kSnappyCompression", "kZlibCompression", "kBZip2Compression", "kLZ4Compression", "kLZ4HCCompression", "kZSTD"])
def test_rocksdb_reads_compressed_blocks_of_every_size(codec, dictionary, tmp_path):
    rows = rows_that_repeat()
    pairs = tmp_path / "pairs"
    pairs.write_text("".join(f"{key.hex()} {value.hex()}\n" for key, value in rows.items()))
    for size in BLOCK_SIZES:
        path = tmp_path / str(size)
        text = f"compression={codec};compression_opts={{level=6;max_dict_bytes={dictionary};}};block_based_table_factory={{block_size={size};}}"
        with rocksdb78.opened(path, rocksdb78.options(text=text)):
            pass
        millrace.succeed("kv", "import", "--format", "hex", "--data", path, pairs)
        millrace.succeed("kv", "compact", "--data", path)
        found = [properties(table) for table in path.glob("*.sst")]
        assert sum(int(table["data block size"]) for table in found) < sum(map(len, rows.values())), "nothing is compressed"
        with rocksdb78.opened(path) as database:
            assert dict(database.scan()) == rows, size
        # rocksdict is built without Zlib: what it writes as Zlib is not compressed, and it reads no other.
        if codec != "kZlibCompression":
            again = Rdict(str(path), Options(raw_mode=True))
            assert dict(again.items()) == rows, size
            again.close()
