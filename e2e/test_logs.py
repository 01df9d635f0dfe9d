"""Write-ahead logs, live and obsolete, under RocksDB's recovery modes and its repair."""

import os
import pathlib
import random
import signal
import subprocess
import sys

import databases
import millrace
import pytest
import rocksdb78

MODES = ["kTolerateCorruptedTailRecords", "kAbsoluteConsistency", "kPointInTimeRecovery", "kSkipAnyCorruptedRecords"]
SCAN = """
import sys, rocksdb78
with rocksdb78.opened(sys.argv[1], rocksdb78.options(text=sys.argv[2] or None)) as database:
    for key, value in database.scan():
        print(key.decode(), value.decode(), sep="\\t")
"""


def their_scan(path, text=""):
    """What RocksDB 7.8 reads with these options, in a process of its own, so that a hang is a failure, too."""
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", SCAN, path, text], capture_output=True, text=True, timeout=30, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(line.split("\t") for line in done.stdout.splitlines())


def fill(node, seed, count=12_000):
    """Writes several memtables' worth of logs; returns the expected contents."""
    random_, expected = random.Random(seed), {}
    with node.connect() as client:
        for _ in range(count // 200):
            pairs = {"q%03d" % random_.randrange(800): "%08d" % random_.randrange(10**8) + "x" * random_.randrange(3000) for _ in range(200)}
            expected |= pairs
            assert client.call("MSET", *[part for pair in pairs.items() for part in pair]) == b"OK"
    return expected


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("mode", MODES)
def test_logs_are_read_in_the_recovery_mode_of_the_directory(mode, durability, killed, tmp_path):
    data, choice = tmp_path / "db", f"wal_recovery_mode={mode}"
    with rocksdb78.opened(data, rocksdb78.options(text=choice)) as database:
        database.put(b"hello", b"world")
    expected = {"hello": "world"}
    # The second node finds logs that the first one kept.
    for round_ in range(2):
        with millrace.node(data, tmp_path / "log", "--memory", "64M", "--durability", durability, writes=True) as node:
            expected |= fill(node, round_, 6_000 if durability == "power" else 12_000)
            if killed:
                os.killpg(node.process.pid, signal.SIGKILL)
                node.process.wait()
            else:
                node.stop()
    assert their_scan(data, choice) == expected


TWO_LOGS = """
import os, signal, sys, rocksdb78
options = rocksdb78.options(text="write_buffer_size=100000;max_write_buffer_number=20;min_write_buffer_number_to_merge=10")
with rocksdb78.opened(sys.argv[1], options) as database:
    database.put(b"balance", b"OLD"), database.put(b"victim", b"should be deleted")
    database.flush()
    database.put(b"balance", b"NEW"), database.delete(b"victim")
    for n in range(400):
        database.put(b"fill%05d" % n, b"x" * 500)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def two_logs_of_rocksdb(path):
    """Two logs of a killed process; the older one overwrites and deletes keys of a table."""
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", TWO_LOGS, path], env=environment, timeout=30)


def begun_logs(path):
    """The logs that have records. The next log of ours is made ahead."""
    return [log for log in sorted(path.glob("*.log")) if any(log.read_bytes()[:16])]


def logs_of_ours(path):
    """The logs of a killed node, which flushed none of them."""
    with millrace.node(path, path.with_suffix(".log"), "--memory", "32M", "--durability", "process", writes=True) as node:
        with node.connect() as client:
            for n in range(600):
                client.call("MSET", *[part for k in range(50) for part in (f"key{n * 50 + k:06d}", "x" * 200)])
                if len(begun_logs(path)) > 1:
                    break
        os.killpg(node.process.pid, signal.SIGKILL)
        node.process.wait()


def stat(data):
    return millrace.said_json("kv", "stat", "--data", data)


def refused_with_a_gap(data, log):
    """Asserts that reading, writing and checking name the log."""
    for words in (["check"], ["get", "balance"], ["put", "new", "value"]):
        done = millrace.command("kv", *words, "--data", data)
        assert done.returncode in (1, 2), (words, done)
        assert log.name in done.stdout + done.stderr, (words, done)


@pytest.mark.parametrize("maker", [two_logs_of_rocksdb, logs_of_ours])
def test_a_log_without_its_beginning_is_not_skipped(maker, tmp_path):
    data = tmp_path / "db"
    maker(data)
    for again in range(5):
        # On a slow machine a node may have written the table of the older log before it was killed.
        if maker is not logs_of_ours or not any(family["files"] for family in stat(data)["column_families"]):
            break
        data = tmp_path / f"db{again}"
        maker(data)
    older, newer = begun_logs(data)[-2:]
    whole = older.read_bytes()
    assert "nothing is damaged" in millrace.succeed("kv", "check", "--data", data)
    lost = [b"", whole[:7], whole[:11], whole[:20], bytes(len(whole)), whole[:512] + bytes(len(whole) - 512), whole[:40_001]]
    for left in lost:
        older.write_bytes(left)
        refused_with_a_gap(data, older)
    older.unlink()
    if maker is logs_of_ours:
        refused_with_a_gap(data, newer)
    else:
        # RocksDB may have written without a log here.
        assert f"warning: {newer.name} begins with sequence" in millrace.succeed("kv", "check", "--data", data)


WITHOUT_A_LOG = """
import os, signal, sys, rocksdict
options = rocksdict.Options(raw_mode=True)
options.create_if_missing(True)
database = rocksdict.Rdict(sys.argv[1], options)
without = rocksdict.WriteOptions()
without.disable_wal = True
for time in range(3):
    for n in range(5):
        database.put(b"logged%d.%d" % (time, n), b"value")
    if time < 2:
        for n in range(5):
            database.put(b"not%d.%d" % (time, n), b"value", write_opt=without)
        database.flush()
    for n in range(5):
        database.put(b"lost%d.%d" % (time, n), b"value", write_opt=without)
    database.put(b"last%d" % time, b"value")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_gap_from_writes_without_a_log_is_not_damage(tmp_path):
    """Such writes are lost with the process, and the database is healthy."""
    data = tmp_path / "db"
    subprocess.run([sys.executable, "-c", WITHOUT_A_LOG, data], timeout=30)
    assert list(data.glob("*.log"))
    millrace.succeed("kv", "check", "--data", data)
    assert millrace.succeed("kv", "get", "last2", "--data", data) == "value\n"
    millrace.succeed("kv", "put", "new", "value", "--data", data)
    assert millrace.succeed("kv", "get", "new", "--data", data) == "value\n"


def test_a_repair_by_rocksdb_finds_everything(tmp_path):
    data, expected = tmp_path / "db", {}
    for n in range(4):
        millrace.succeed("kv", "put", f"k{n}", "v", "--data", data)
        expected[f"k{n}"] = "v"
        assert len(list(data.glob("*.log"))) == 1, "a repair would take the writes of a flushed log for new ones"
    databases.ldb(data, "repair")
    assert their_scan(data) == expected
    millrace.succeed("kv", "put", "new", "v", "--data", data)
    assert their_scan(data) == expected | {"new": "v"}


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_a_repair_after_a_node_finds_everything(killed, tmp_path):
    data = tmp_path / "db"
    with millrace.node(data, tmp_path / "log", "--memory", "64M", "--durability", "process", writes=True) as node:
        # Too little for a compaction: RocksDB's repair puts all tables into level 0, where it refuses those of level 1, even its own.
        expected = fill(node, 1, 4_000)
        if killed:
            os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait()
        else:
            node.stop()
    databases.ldb(data, "repair")
    assert their_scan(data) == expected
