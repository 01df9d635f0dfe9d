"""Merges for the age of tables: `ttl` of a directory's OPTIONS is obeyed, and RocksDB's own `ttl` goes on with our tables."""

import re
import subprocess
import time
from collections import Counter

import millrace
from rocksdict import AccessType, DBCompressionType, Options, Rdict

ROWS = {b"key%06d" % n: b"value %d" % n * 20 for n in range(3000)}


def options():
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_level_compaction_dynamic_level_bytes(False)
    options.set_compression_type(DBCompressionType.none())
    options.set_max_bytes_for_level_base(200_000)
    options.set_max_bytes_for_level_multiplier(4)
    options.set_target_file_size_base(50_000)
    options.set_num_levels(5)
    return options


def levels(path):
    """Files by level."""
    database = opened(path)
    found = Counter(file["level"] for file in database.live_files())
    database.close()
    return found


def opened(path):
    """The database in RocksDB, which changes nothing."""
    return Rdict(str(path), options(), access_type=AccessType.read_only())


def wait_for(is_so, what):
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def made_by_rocksdb(path):
    """All rows in a deep level, and the deletion of every third row above it. RocksDB may have moved that down on a slow machine."""
    with_ttl = {"ttl": "4", "disable_auto_compactions": "false"}
    database = Rdict(str(path), options())
    rows = dict(ROWS)
    for key, value in rows.items():
        database[key] = value
    database.flush()
    database.compact_range(None, None)
    for key in list(rows)[::3]:
        del database[key]
        del rows[key]
    database.flush()
    database.set_options(with_ttl)
    database.close()
    return rows


def scan(path):
    database = opened(path)
    found = dict(database.items())
    database.close()
    return found


def test_old_tables_of_rocksdb_go_down(tmp_path):
    for attempt in "abcd":
        path = tmp_path / attempt
        rows = made_by_rocksdb(path)
        before = levels(path)
        if len(before) > 1:
            break
    assert len(before) > 1, before
    time.sleep(5)
    with millrace.node(path, tmp_path / "log", "--cores", "2", writes=True) as node:
        node.until_ready()
        deepest = max(before)
        wait_for(lambda: set(levels_of(node)) == {deepest}, lambda: levels_of(node))
    assert set(levels(path)) == {deepest}
    assert scan(path) == rows


def levels_of(node):
    with node.connect() as client:
        info = client.call("INFO", "compaction").decode()
    found = re.findall(r"family0_level(\d+):files=(\d+)", info)
    return {int(level): int(files) for level, files in found if int(files)}


def test_rocksdb_goes_on_with_the_ages_of_our_tables(tmp_path):
    path = tmp_path / "db"
    rows = made_by_rocksdb(path)
    database = Rdict(str(path), options())
    database.set_options({"ttl": "0"})
    database.close()
    new = {b"key%06d" % (n * 10 + 1): b"new" for n in range(200)}
    began = int(time.time())
    with millrace.node(path, tmp_path / "log", writes=True) as node:
        node.until_ready()
        with node.connect() as client:
            assert set(client.pipeline([("SET", key, value) for key, value in new.items()])) == {b"OK"}
    rows |= new
    # The log becomes a table at the next opening.
    with millrace.node(path, tmp_path / "log", writes=True) as node:
        node.until_ready()
        wait_for(lambda: 0 in levels_of(node), lambda: levels_of(node))
    deepest = max(levels(path))
    assert set(levels(path)) != {deepest}
    files = sorted(path.glob("*.sst"), key=lambda file: int(file.stem))
    said = subprocess.run(["sst_dump", f"--file={files[-1]}", "--show_properties"], capture_output=True, text=True).stdout
    times = {name: int(time) for name, time in re.findall(r"((?:file )?creation time|time stamp of earliest key): (\d+)", said)}
    assert len(times) == 3 and all(began - 2 <= time <= began + 60 for time in times.values()), said
    time.sleep(4)
    database = Rdict(str(path), options())
    database.set_options({"ttl": "2"})
    wait_for(lambda: {file["level"] for file in database.live_files()} == {deepest}, database.live_files)
    assert dict(database.items()) == rows
    database.close()
