"""Options of a directory are obeyed, or writing to it is refused by name and changes no byte."""

import os
import re
import shutil
import struct
import subprocess
import time

import databases
import guest
import millrace
import pytest
import rocksdb78


def snapshot(path):
    """Every path below a directory, and the bytes of every file."""
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def make(path, count=100, flush=False, **options):
    """Makes a database of RocksDB 7.8 with `count` keys, in its log or in a table."""
    with rocksdb78.opened(path, rocksdb78.options(**options)) as database:
        for n in range(count):
            database.put(b"key%05d" % n, b"value %d" % n)
        if flush:
            database.flush()


REFUSED = {}


def refused(pattern):
    """Registers the decorated maker: writing to its directory fails with a message that matches `pattern`."""

    def add(maker):
        REFUSED[maker.__name__.replace("_", "-").strip("-")] = (maker, pattern)
        return maker

    return add


@refused(r"column family odd .*only in the logs.*test\.Comparator")
def unknown_comparator_in_the_log(path):
    with rocksdb78.opened(path) as database:
        database.create_family("odd", rocksdb78.options(comparator=rocksdb78.comparator()))
        for n in range(100):
            database.put(b"odd%d" % n, b"value", "odd")
            database.put(b"key%d" % n, b"value")


@refused(r"test\.Comparator")
def unknown_comparator_of_default(path):
    make(path, flush=True, comparator=rocksdb78.comparator())


@refused(r"timestamp")
def timestamps(path):
    databases.db_bench(path, "fillseq,flush", num=50, user_timestamp_size=8)


@refused(r"another directory, .*\.wal \(wal_dir\)")
def wal_dir(path):
    make(path, wal_dir=f"{path}.wal".encode())


@refused(r"wal_dir=.*\.wal")
def wal_dir_that_is_empty_now(path):
    make(path, wal_dir=f"{path}.wal".encode())
    wal = path.with_name(path.name + ".wal")
    # RocksDB takes an absent log for one that was flushed and removed.
    for log in wal.glob("*.log"):
        log.unlink()


@refused(r"wal_dir=.*\.wal")
def wal_dir_that_is_gone(path):
    wal_dir_that_is_empty_now(path)
    shutil.rmtree(path.with_name(path.name + ".wal"))


@refused(r"db_paths")
def db_paths_elsewhere(path):
    make(path, db_paths=[(path.with_name("elsewhere"), 1 << 30)])


@refused(r"db_paths|cf_paths")
def db_paths_elsewhere_with_tables(path):
    make(path, flush=True, db_paths=[(path.with_name("elsewhere"), 1 << 30)])


@refused(r"db_paths, path 1")
def db_paths_of_which_the_second_is_in_use(path):
    more = path.with_name("more")
    with rocksdb78.opened(path, rocksdb78.options(write_buffer_size=65536, db_paths=[(path, 1000), (more, 1 << 30)])) as database:
        deadline = time.monotonic() + 60
        # Its own compactions write to the path that has space.
        while not list(more.glob("*.sst")):
            assert time.monotonic() < deadline
            for n in range(1000):
                database.put(b"key%05d" % n, os.urandom(100))
            database.flush()


@refused(r"num_levels=1.*Universal")
def one_level(path):
    make(path, universal=True, num_levels=1)


@refused(r"257 levels \(num_levels\), but at most 256")
def more_levels_than_supported(path):
    make(path, flush=True, num_levels=257)


def with_option(path, name, value):
    """Makes a database, and gives an option in its OPTIONS file another value."""
    make(path)
    newest = max(path.glob("OPTIONS-*"))
    text, count = re.subn(rf"(?m)^  {name}=.*$", f"  {name}={value}", newest.read_text())
    assert count == 1
    newest.write_text(text)
    with pytest.raises(rocksdb78.RocksError, match=name):
        rocksdb78.load_options(path)


@refused(r"column family default: num_levels=abc cannot be understood")
def levels_that_are_no_number(path):
    with_option(path, "num_levels", "abc")


@refused(r"max_bytes_for_level_base= cannot be understood")
def size_of_a_level_that_is_empty(path):
    with_option(path, "max_bytes_for_level_base", "")


@refused(r"disable_auto_compactions=maybe cannot be understood")
def flag_that_is_neither_true_nor_false(path):
    with_option(path, "disable_auto_compactions", "maybe")


@refused(r"allow_2pc=2 cannot be understood")
def flag_of_the_database_that_is_neither_true_nor_false(path):
    with_option(path, "allow_2pc", "2")


@refused(r"FIFO")
def fifo(path):
    make(path, flush=True, compaction_style=2)


@refused(r"time stamp.*TtlCompactionFilterFactory")
def ttl(path):
    with rocksdb78.opened(path, ttl=1000) as database:
        database.put(b"hello", b"world")


@refused(r"allow_ingest_behind")
def ingest_behind(path):
    make(path, allow_ingest_behind=1)


@refused(r"(?i)prepared|two-phase|transaction")
def prepared_transaction(path):
    with rocksdb78.opened(path, transactions=True) as database:
        database.put(b"hello", b"world")
        database.prepare(b"one", b"a", b"1")


@refused(r"1 prepared transactions.*one")
def prepared_transaction_in_a_flushed_log(path):
    with rocksdb78.opened(path, transactions=True) as database:
        database.put(b"hello", b"world")
        database.prepare(b"one", b"a", b"1")
    with rocksdb78.opened(path, transactions=True):
        pass


@refused(r"table_factory=PlainTable")
def plain_tables_to_come(path):
    make(path, plain_table=True)


@refused(r"table_factory=PlainTable")
def plain_tables(path):
    make(path, flush=True, plain_table=True)


@refused(r"blob_dir")
def old_blobs(path):
    make(path)
    (path / "blob_dir").mkdir()


@refused(r"(?i)older.*--adopt|--adopt")
def no_options_file(path):
    make(path, flush=True)
    for file in path.glob("OPTIONS-*"):
        file.unlink()


@refused(r"OPTIONS-\d+ does not have all options of column family default")
def torn_options_file(path):
    make(path)
    newest = max(path.glob("OPTIONS-*"))
    text = newest.read_text()
    (path / "OPTIONS-000003").write_text(text)
    newest.write_text(text[: text.index("  num_levels")])


@refused(r"OPTIONS-\d+ has no")
def options_file_that_does_not_parse(path):
    make(path)
    max(path.glob("OPTIONS-*")).write_bytes(os.urandom(5000))


@refused(r"OPTIONS-\d+ does not have all options of column family late")
def family_without_options(path):
    make(path)
    with rocksdb78.opened(path) as database:
        old = {file.name: file.read_bytes() for file in path.glob("OPTIONS-*")}
        database.create_family("late", rocksdb78.options())
    for file in path.glob("OPTIONS-*"):
        file.unlink()
    for name, text in old.items():
        (path / name).write_bytes(text)


def table_without_a_footer(path):
    make(path, flush=True)
    table = next(path.glob("*.sst"))
    table.write_bytes(table.read_bytes()[:-20] + bytes(20))


def log_record(payload):
    """A log of one record, in the format of LevelDB and RocksDB."""
    covered = b"\x01" + payload
    crc = 0xFFFFFFFF
    for byte in covered:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<IH", masked, len(payload)) + covered


@refused(r"LevelDB.*--adopt")
def leveldb(path):
    """LevelDB's directory after its first writes: a log, and a MANIFEST with LevelDB's tags; no OPTIONS, no IDENTITY."""
    path.mkdir()
    comparator = b"leveldb.BytewiseComparator"
    manifest = b"\x01" + bytes([len(comparator)]) + comparator + b"\x02\x03\x09\x00\x03\x04\x04\x00"
    (path / "MANIFEST-000002").write_bytes(log_record(manifest))
    (path / "CURRENT").write_text("MANIFEST-000002\n")
    (path / "LOCK").touch()
    (path / "LOG").write_text("2026/01/01-00:00:00.000000 7f Delete type=3 #1\n")
    (path / "000003.log").write_bytes(log_record(struct.pack("<QI", 1, 1) + b"\x01\x05hello\x05world"))


@refused(r"not empty: it has .*passwd")
def no_database_at_all(path):
    path.mkdir()
    (path / "passwd").write_text("root\n")
    (path / "ssh").mkdir()


@refused(r"there is no CURRENT file")
def database_without_current(path):
    make(path)
    (path / "CURRENT").unlink()


@refused(r"4294967295\.sst.*32 bits")
def stray_table_with_the_last_number(path):
    make(path)
    (path / "4294967295.sst").write_bytes(b"stray")


@refused(r"MANIFEST-18446744073709551615.*32 bits")
def stray_manifest_with_the_very_last_number(path):
    make(path)
    (path / "MANIFEST-18446744073709551615").write_bytes(b"")


@refused(r"OPTIONS-4278190080")
def stray_options_with_a_large_number(path):
    make(path)
    (path / "OPTIONS-4278190080").write_bytes(max(path.glob("OPTIONS-*")).read_bytes())


def varint(number):
    """A number as a varint."""
    text = b""
    while number >= 128:
        text, number = text + bytes([number & 127 | 128]), number >> 7
    return text + bytes([number])


def append_edit(path, edit):
    """Appends an edit to the MANIFEST of a database."""
    with (path / (path / "CURRENT").read_text().strip()).open("ab") as manifest:
        manifest.write(log_record(edit))


@refused(r"MANIFEST says .*numbers from 18446744073709551615")
def manifest_whose_next_number_is_the_last(path):
    make(path, flush=True)
    append_edit(path, b"\x03" + varint(2**64 - 1))


@refused(r"sequence 72057594037927935.*56 bits")
def manifest_whose_last_sequence_is_the_last(path):
    make(path, flush=True)
    append_edit(path, b"\x04" + varint(2**56 - 1))


@refused(r"CURRENT.*director")
def current_that_is_a_directory(path):
    path.mkdir()
    (path / "CURRENT").mkdir()


@refused(r"CURRENT: .*not a regular file")
def current_that_is_a_pipe(path):
    make(path)
    (path / "CURRENT").unlink()
    os.mkfifo(path / "CURRENT")


@refused(r"OPTIONS-\d+ cannot be read: not a regular file")
def options_that_are_a_pipe(path):
    make(path)
    newest = max(path.glob("OPTIONS-*"))
    newest.unlink()
    os.mkfifo(newest)


@refused(r"\d+\.log.*not a regular file")
def log_that_is_a_pipe(path):
    make(path)
    log = max(path.glob("*.log"))
    log.unlink()
    os.mkfifo(log)


@refused(r"CURRENT\.dbtmp is a directory")
def draft_of_current_that_is_a_directory(path):
    make(path)
    (path / "CURRENT.dbtmp").mkdir()


def blob_that_is(path, put):
    make(path, flush=True, text="enable_blob_files=true")
    blob = max(path.glob("*.blob"))
    blob.unlink()
    put(blob)


@refused(r"\d+\.blob: Is a directory")
def blob_that_is_a_directory(path):
    blob_that_is(path, os.mkdir)


@refused(r"\d+\.blob: not a regular file")
def blob_that_is_a_pipe(path):
    blob_that_is(path, os.mkfifo)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_reason_and_changes_nothing(name, tmp_path):
    maker, pattern = REFUSED[name]
    data = tmp_path / "db"
    maker(data)
    for has_lock in (True, False):
        if not has_lock:
            (data / "LOCK").unlink(missing_ok=True)
        before = snapshot(tmp_path)
        said = millrace.fail("kv", "put", "new", "value", "--data", data)
        assert re.search(pattern, said, re.DOTALL) and str(data) in said, said
        assert snapshot(tmp_path) == before, said


def test_every_writing_command_is_refused(tmp_path):
    data = tmp_path / "db"
    make(data, wal_dir=str(tmp_path / "wal").encode())
    pairs = tmp_path / "pairs"
    pairs.write_text("a\tb\n")
    before = snapshot(data), snapshot(tmp_path / "wal")
    for words in (
        ["kv", "put", "a", "b"],
        ["kv", "del", "key00001"],
        ["kv", "import", pairs],
        ["serve", "--listen", f"127.0.0.1:{millrace.free_port()}"],
        ["serve", "--adopt", "--listen", f"127.0.0.1:{millrace.free_port()}"],
        ["bench", "overwrite", "--seconds", "1"],
    ):
        said = millrace.fail(*words, "--data", data)
        assert "wal_dir" in said, f"{words}: {said}"
        assert (snapshot(data), snapshot(tmp_path / "wal")) == before, words


WRONG = [
    (["kv", "column-families", "create", "other"], "there is one of that name"),
    (["kv", "column-families", "drop", "default"], "cannot be dropped"),
    (["kv", "column-families", "drop", "none"], "no column family is named 'none': the database has: default, other, odd"),
    (["kv", "compact", "--column-family", "none"], "'none'"),
    (["kv", "compact", "--column-family", "odd"], r"test\.Comparator"),
    (["kv", "put", "a", "b", "--column-family", "none"], "'none'"),
    (["kv", "put", "a", "b", "--column-family", "odd"], r"test\.Comparator"),
    (["kv", "del", "key00001", "--column-family", "none"], "'none'"),
    (["kv", "import", "PAIRS", "--column-family", "none"], "'none'"),
    (["kv", "import", "BAD"], "line 1"),
    (["kv", "import", "PAIRS", "--resume"], "not sorted"),
    (["kv", "import", "LAST", "--resume"], "the database's last key has another value"),
    (["kv", "import", "BAD_LATER", "--resume"], "line 2"),
    (["kv", "ingest", "TABLE", "--column-family", "none"], "'none'"),
    (["kv", "ingest", "BAD", "--no-verify"], "BAD"),
    (["kv", "ingest", "DB_TABLE", "--no-verify"], "was not made by RocksDB's SstFileWriter"),
    (["kv", "ingest", "TABLE", "TABLE"], "two of the files overlap"),
    (["serve", "--listen", "127.0.0.1:0", "--column-family", "none"], "'none'"),
    (["serve", "--listen", "127.0.0.1:0", "--column-family", "odd"], r"test\.Comparator"),
]


@pytest.mark.parametrize("words, pattern", WRONG, ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "")
def test_a_command_that_cannot_be_obeyed_changes_nothing(words, pattern, tmp_path):
    data = tmp_path / "db"
    make(data, flush=True)
    with rocksdb78.opened(data) as database:
        database.create_family("other", rocksdb78.options())
        database.create_family("odd", rocksdb78.options(comparator=rocksdb78.comparator()))
        # In the log, and nothing of the family whose writes would be lost with it.
        database.put(b"in the log", b"value")
    names = ("PAIRS", "BAD", "BAD_LATER", "LAST", "TABLE")
    files = {name: tmp_path / name for name in names} | {"DB_TABLE": next(data.glob("*.sst"))}
    files["PAIRS"].write_text("b\tb\na\tb\n")
    files["BAD"].write_text("no pair\n")
    files["BAD_LATER"].write_text("a\tb\nno pair\n")
    files["LAST"].write_text("a\tb\nkey00099\tanother value\n")
    databases.ldb(tmp_path / "unused", "--create_if_missing", "write_extern_sst", files["TABLE"], text="a ==> 1\n")
    words = [files.get(word, word) for word in words]
    (tmp_path / "empty").mkdir()
    for has_lock in (True, False):
        if not has_lock:
            (data / "LOCK").unlink()
        before = snapshot(tmp_path)
        said = millrace.fail(*words, "--data", data)
        assert re.search(pattern, said), said
        assert snapshot(tmp_path) == before, said
    if "none" in words or "ingest" in words or words[1:3] == ["import", files["BAD"]]:
        for new in tmp_path / "new", tmp_path / "empty":
            millrace.fail(*words, "--data", new)
            assert snapshot(tmp_path) == before


def test_a_family_for_which_options_have_no_room_is_refused_before_anything_changes(tmp_path):
    data = tmp_path / "db"
    make(data)
    newest = max(data.glob("OPTIONS-*"))
    # Legal, and below the 16 MiB that are read.
    newest.write_text(newest.read_text() + "# a comment\n" * 1_390_000)
    for has_lock in (True, False):
        if not has_lock:
            (data / "LOCK").unlink()
        before = snapshot(tmp_path)
        said = millrace.fail("kv", "column-families", "create", "new", "--data", data)
        assert "the OPTIONS file would exceed" in said, said
        assert snapshot(tmp_path) == before, said
    millrace.succeed("kv", "put", "a", "b", "--data", data)


@pytest.mark.parametrize("levels", [65, 100, 256])
def test_as_many_levels_as_are_supported_are_used(levels, tmp_path):
    data = tmp_path / "db"
    made = rocksdb78.options(num_levels=levels, level_compaction_dynamic_level_bytes=1)
    expected = {}
    for round_ in range(3):
        with rocksdb78.opened(data, made) as database:
            assert dict(database.scan()) == expected
            for n in range(50):
                database.put(b"key%d" % n, b"of RocksDB %d" % round_)
                expected[b"key%d" % n] = b"of RocksDB %d" % round_
            if round_ == 1:
                database.compact()
                assert database.bounds()[0][1] == levels - 1
        millrace.succeed("kv", "put", "key7", f"ours {round_}", "--data", data)
        expected[b"key7"] = b"ours %d" % round_
        assert dict(millrace.scan(data)) == expected
        millrace.succeed("kv", "compact", "--data", data)
        assert dict(millrace.scan(data)) == expected
        millrace.succeed("kv", "check", "--data", data)
    for file in [*data.glob("MANIFEST-*"), data / "CURRENT"]:
        file.unlink()
    millrace.succeed("kv", "check", "--repair", "--data", data)
    assert dict(millrace.scan(data)) == expected
    with rocksdb78.opened(data, made) as database:
        assert dict(database.scan()) == expected


@pytest.mark.parametrize("name, pattern", [("db-paths-of-which-the-second-is-in-use", "db_paths"), ("no-database-at-all", "no RocksDB database"), (None, None)])
def test_a_repair_that_is_refused_or_not_needed_changes_nothing(name, pattern, tmp_path):
    data = tmp_path / "db"
    (REFUSED[name][0] if name else make)(data)
    (data / "LOCK").unlink(missing_ok=True)
    before = snapshot(tmp_path)
    words = ("kv", "check", "--repair", "--data", data)
    said = millrace.fail(*words) if name else millrace.succeed(*words)
    assert re.search(pattern or "nothing to repair", said), said
    assert snapshot(tmp_path) == before, said


def test_backups_stay_unchanged_if_the_one_to_be_deleted_is_missing(tmp_path):
    data, backups = tmp_path / "db", tmp_path / "backups"
    make(data)
    millrace.succeed("kv", "backup", "create", backups, "--data", data)
    # Backups that RocksDB has made have none.
    (backups / "LOCK").unlink()
    before = snapshot(tmp_path)
    assert "there is no backup 7" in millrace.fail("kv", "backup", "delete", backups, "--id", "1", "--id", "7")
    assert snapshot(tmp_path) == before


def obeyed(path, families=("default",), count=300, **options):
    """Writes with RocksDB, with us and with RocksDB again; each finds all keys."""
    made = {name: rocksdb78.options(**options) for name in families}
    expected = {}

    def look_and_write(round_):
        with rocksdb78.opened(path, rocksdb78.options(**options), families=made if round_ else None) as database:
            for name in families if not round_ else ():
                if name != "default":
                    database.create_family(name, rocksdb78.options(**options))
            for key, value in expected.items():
                assert database.get(key) == value, (round_, key)
            for n in range(count):
                key, value = b"key%05d" % (n * (round_ + 1)), b"of RocksDB %d" % round_
                database.put(key, value)
                expected[key] = value
                for name in families[1:]:
                    database.put(key, value, name)

    for round_ in range(3):
        look_and_write(round_)
        words = "".join(f"key{n:05}\tours{round_}\n" for n in range(0, 3 * count, 5))
        (path.with_name("words")).write_text(words)
        millrace.succeed("kv", "import", path.with_name("words"), "--data", path)
        expected |= {b"key%05d" % n: b"ours%d" % round_ for n in range(0, 3 * count, 5)}
        found = dict(millrace.scan(path))
        assert found == expected
    look_and_write(3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"universal": True},
        {"universal": True, "num_levels": 2},
        {"num_levels": 1},
        {"text": "atomic_flush=true"},
        {"text": "recycle_log_file_num=2"},
        {"text": "manual_wal_flush=true"},
        {"text": "unordered_write=true"},
        {"text": "track_and_verify_wals_in_manifest=true"},
        {"text": "wal_compression=kZSTD"},
        {"text": "persist_stats_to_disk=true;stats_persist_period_sec=1"},
        {"text": "disable_auto_compactions=true"},
        {"text": "avoid_flush_during_recovery=true"},
    ],
    ids=lambda options: options.get("text", "-".join(options) or "default").split("=")[0],
)
def test_supported_options_are_obeyed(options, tmp_path):
    obeyed(tmp_path / "db", **options)


@pytest.mark.parametrize("options", [{"universal": True, "num_levels": 2}, {"num_levels": 1}], ids=["universal", "one-level"])
def test_compactions_stay_within_the_existing_levels(options, tmp_path):
    data = tmp_path / "db"
    make(data, **options)
    for n in range(6):
        millrace.succeed("kv", "put", f"key{n}", "ours", "--data", data)
    deadline = time.monotonic() + 20
    with millrace.node(data, tmp_path / "log", writes=True) as node, node.connect() as client:
        while int(re.search(rb"level0_files:(\d+)", said := client.call("INFO", "everything"))[1]) >= 4:
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
    (family,) = millrace.said_json("kv", "stat", "--data", data)["column_families"]
    assert [level["level"] for level in family["levels"] if level["files"]][-1] == 1, family["levels"]
    with rocksdb78.opened(data, rocksdb78.options(**options)) as database:
        assert all(database.get(b"key%d" % n) == b"ours" for n in range(6))
        assert database.get(b"key00099") == b"value 99"


@pytest.mark.parametrize("openings", range(1, 4))
def test_a_transaction_database_without_prepared_transactions_is_writable(openings, tmp_path):
    """From its second opening on it keeps a log that no family needs."""
    data, expected = tmp_path / "db", {}
    for n in range(openings):
        with rocksdb78.opened(data, transactions=True) as database:
            database.put(b"key%d" % n, b"theirs")
        expected[b"key%d" % n] = b"theirs"
    for n in range(2):
        millrace.succeed("kv", "put", f"ours{n}", "value", "--data", data)
        expected[b"ours%d" % n] = b"value"
        assert dict(millrace.scan(data)) == expected
        with rocksdb78.opened(data, transactions=True) as database:
            database.put(b"again", b"%d" % n)
        expected[b"again"] = b"%d" % n
    with rocksdb78.opened(data) as database:
        assert dict(database.scan()) == expected


def test_a_lock_that_is_a_pipe_is_named(tmp_path):
    data = tmp_path / "db"
    make(data, flush=True)
    (data / "LOCK").unlink()
    os.mkfifo(data / "LOCK")
    for words in (["kv", "put", "a", "b"], ["kv", "get", "key00001"]):
        said = millrace.fail(*words, "--data", data)
        assert f"cannot lock {data / 'LOCK'}: not a regular file" in said, said


NEEDLESS = ["000001.sst", "000001.blob", "000003.dbtmp", "000001.log", "000999.sst", "000998.dbtmp", "MANIFEST-000001", "MANIFEST-000997"]


def test_directories_with_names_of_obsolete_files_are_kept(tmp_path):
    data = tmp_path / "db"
    make(data, flush=True)
    for name in [*NEEDLESS, "OPTIONS-000996.dbtmp"]:
        (data / name).mkdir()
        (data / name / "something").write_text("of somebody")
    for n in range(3):
        millrace.succeed("kv", "put", f"new{n}", "value", "--data", data)
        assert len([name for name in data.glob("MANIFEST-*") if name.is_file()]) == 1
    with millrace.node(data, tmp_path / "log", "--durability", "process", writes=True) as node, node.connect() as client:
        assert client.call("GET", "key00007") == b"value 7" and client.call("GET", "new2") == b"value"
        assert f"{data / '000999.sst'}: left alone: a directory" in (tmp_path / "log").read_text()
    assert all((data / name / "something").exists() for name in NEEDLESS)
    with rocksdb78.opened(data) as database:
        assert len(list(database.scan())) == 103


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/nonexistent/x"), lambda path: path.write_text("torn")], ids=["pipe", "link", "file"])
def test_a_temporary_current_of_any_kind_is_removed(put, tmp_path):
    data = tmp_path / "db"
    make(data)
    put(data / "CURRENT.dbtmp")
    millrace.succeed("kv", "put", "new", "value", "--data", data)
    assert not os.path.lexists(data / "CURRENT.dbtmp") and len(list(data.glob("MANIFEST-*"))) == 1


def test_targets_of_links_are_read_and_never_written(tmp_path):
    data, elsewhere = tmp_path / "db", tmp_path / "elsewhere"
    make(data, flush=True)
    with rocksdb78.opened(data) as database:
        database.put(b"late", b"in the log")
    elsewhere.mkdir()
    for file in [*data.glob("*.sst"), *data.glob("*.log")]:
        shutil.move(file, elsewhere / file.name)
        file.symlink_to(elsewhere / file.name)
    before = snapshot(elsewhere)
    with millrace.node(data, tmp_path / "log", "--memory", "64M", "--durability", "process", writes=True) as node, node.connect() as client:
        assert client.call("GET", "late") == b"in the log" and client.call("GET", "key00007") == b"value 7"
        for n in range(6_000):
            client.call("SET", "key%05d" % (n % 500), "x" * 1500)
    assert snapshot(elsewhere) == before
    with rocksdb78.opened(data) as database:
        assert database.get(b"late") == b"in the log" and database.get(b"key00499") == b"x" * 1500


def test_other_families_are_kept(tmp_path):
    obeyed(tmp_path / "db", families=("default", "second"), count=100)


def test_a_family_with_an_unknown_comparator_is_kept_while_others_are_written(tmp_path):
    data = tmp_path / "db"
    odd = rocksdb78.options(comparator=rocksdb78.comparator())
    with rocksdb78.opened(data) as database:
        database.create_family("odd", odd)
        for n in range(100):
            database.put(b"odd%d" % n, b"value", "odd")
        database.flush("odd")
        database.put(b"hello", b"world")
    for n in range(3):
        millrace.succeed("kv", "put", f"key{n}", "ours", "--data", data)
    with rocksdb78.opened(data, families={"default": rocksdb78.options(), "odd": odd}) as database:
        assert all(database.get(b"odd%d" % n, "odd") == b"value" for n in range(100))
        assert database.get(b"key2") == b"ours" and database.get(b"hello") == b"world"


def test_values_with_a_time_stamp_are_not_served(tmp_path):
    data = tmp_path / "db"
    ttl(data)
    assert "time stamp" in millrace.fail("kv", "get", "hello", "--data", data)
    with rocksdb78.opened(data, ttl=1000) as database:
        assert database.get(b"hello") == b"world"


def test_a_filter_of_the_user_is_named(tmp_path):
    data = tmp_path / "db"
    make(data, compaction_filter_factory=rocksdb78.compaction_filter_factory())
    with millrace.node(data, tmp_path / "log", writes=True) as node:
        # The log is written by a thread of its own, and may come after what the node prints.
        guest.wait_for("a warning", lambda: "test.FilterFactory" in node.said(), saw=node.said)


def test_adopt_is_needed_once_without_an_options_file(tmp_path):
    data = tmp_path / "db"
    no_options_file(data)
    millrace.succeed("kv", "put", "new", "value", "--data", data, "--adopt")
    millrace.succeed("kv", "put", "newer", "value", "--data", data)
    with rocksdb78.opened(data) as database:
        assert database.get(b"newer") == b"value" and database.get(b"key00007") == b"value 7"


def test_an_unreadable_table_does_not_affect_the_rest(tmp_path):
    data = tmp_path / "db"
    table_without_a_footer(data)
    with millrace.node(data, tmp_path / "log") as node, node.connect() as client:
        assert client.call("PING") == b"PONG" and node.alive()
    millrace.succeed("kv", "put", "new", "value", "--data", data)
    assert millrace.succeed("kv", "get", "new", "--data", data) == "value\n"
    assert ".sst" in millrace.fail("kv", "get", "key00007", "--data", data)


def test_a_checkpoint_is_writable(tmp_path):
    """It has no LOCK file."""
    data = tmp_path / "db"
    make(data, flush=True)
    databases.ldb(data, "checkpoint", f"--checkpoint_dir={tmp_path / 'copy'}")
    assert not (tmp_path / "copy" / "LOCK").exists()
    millrace.succeed("kv", "put", "new", "value", "--data", tmp_path / "copy")
    assert databases.ldb(tmp_path / "copy", "get", "new").strip() == "value"


@pytest.mark.parametrize("inside", [[], ["lost+found"], ["LOCK"], ["IDENTITY", "MANIFEST-000001", "LOCK"]], ids=lambda names: "-".join(names) or "empty")
def test_an_empty_directory_becomes_a_database(inside, tmp_path):
    data = tmp_path / "db"
    data.mkdir()
    for name in inside:
        (data / name).mkdir() if name == "lost+found" else (data / name).touch()
    millrace.succeed("kv", "put", "hello", "world", "--data", data)
    assert databases.ldb(data, "get", "hello").strip() == "world"


def test_an_error_of_the_system_is_named_with_its_file(tmp_path):
    data = tmp_path / "db"
    make(data, flush=True)

    def refused(prefix, *words):
        done = subprocess.run([*prefix, millrace.BINARY, *words, "--data", data], capture_output=True, text=True, timeout=60)
        assert done.returncode > 0, done
        return done.stderr

    (data / "LOCK").chmod(0o444)
    # Root without capabilities is an ordinary user.
    prefix = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    said = refused(prefix, "kv", "put", "a", "b")
    assert f"cannot lock {data / 'LOCK'}" in said and "ermission" in said, said
    (data / "LOCK").chmod(0o644)
    for files in range(5, 9):
        said = refused(["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"], "kv", "put", "a", "b")
        assert "ulimit -n" in said and str(data) in said, said


# One database for each kind of option; with --long all of them.
SOME = [
    "db_bench-column-families",
    "db_bench-wals-tracked",
    "db_bench-compaction-universal",
    "db_bench-compaction-fifo",
    "rocksdict-blobs-kNoCompression",
    "rocksdict-comparator-reverse-wal-only",
    "rocksdict-wal-two-queues",
    "rocksdict-statistics-persisted",
    "rocksdict-plain-values-and-one-level",
    "rocksdict-times-of-sequence-numbers",
    "rocksdict-entities",
    "rocksdict-plain-table",
]


def test_each_database_of_rocksdb_is_kept_or_refused(own_copy, workshop, long):
    unexpected = []
    for name in databases.DATABASES if long else SOME:
        made = databases.DATABASES[name]
        data = own_copy(name)
        before = snapshot(data)
        done = millrace.command("kv", "put", "zz ours", "value", "--data", data)
        if done.returncode:
            assert snapshot(data) == before, f"{name}: {done.stderr}"
            if made.error is None and made.may_refuse is None and "fifo" not in name and "11" not in name:
                unexpected.append(f"{name}: {done.stderr}")
        elif made.error is None and made.reader != "archive":
            for family in made.families:
                theirs = dict(databases.their_scan(made, data, family))
                expected = dict(databases.expected(workshop.directory(name), family))
                if family == "default":
                    expected[b"zz ours"] = b"value"
                assert theirs == expected, f"{name}, {family}"
        shutil.rmtree(data)
    assert not unexpected, "\n".join(unexpected)
