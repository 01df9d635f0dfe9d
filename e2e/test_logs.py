"""The logs that are written, and those that are needed no more: what RocksDB's recovery modes and its repair make of them."""

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
    """What RocksDB 7.8 finds with these options, in a process of its own: one that does not end is a failure, too."""
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", SCAN, path, text], capture_output=True, text=True, timeout=30, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(line.split("\t") for line in done.stdout.splitlines())


def fill(node, seed, count=12_000):
    """Writes through several memtables' worth of logs. Returns what is there then."""
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
    # The second one finds logs that the first has kept.
    for round_ in range(2):
        with millrace.node(data, tmp_path / "log", "--memory", "64M", "--durability", durability, writes=True) as node:
            expected |= fill(node, round_, 6_000 if durability == "power" else 12_000)
            if killed:
                os.killpg(node.process.pid, signal.SIGKILL)
                node.process.wait()
            else:
                node.stop()
    assert their_scan(data, choice) == expected


def test_a_repair_by_rocksdb_finds_everything(tmp_path):
    data, expected = tmp_path / "db", {}
    for n in range(4):
        millrace.succeed("kv", "put", f"k{n}", "v", "--data", data)
        expected[f"k{n}"] = "v"
        assert len(list(data.glob("*.log"))) == 1, "a log that tables cover is taken for writes by a repair"
    databases.ldb(data, "repair")
    assert their_scan(data) == expected
    millrace.succeed("kv", "put", "new", "v", "--data", data)
    assert their_scan(data) == expected | {"new": "v"}


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_a_repair_of_what_a_node_left_finds_everything(killed, tmp_path):
    data = tmp_path / "db"
    with millrace.node(data, tmp_path / "log", "--memory", "64M", "--durability", "process", writes=True) as node:
        # Too little for a merge: RocksDB's repair puts all tables into level 0, where it refuses those of level 1, its own too.
        expected = fill(node, 1, 4_000)
        if killed:
            os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait()
        else:
            node.stop()
    databases.ldb(data, "repair")
    assert their_scan(data) == expected
