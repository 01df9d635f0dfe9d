"""Garbage collection of blob files under load: after kill -9 in the middle of it RocksDB 7.8 and 9.8 find the directory consistent and
read every acknowledged value; RocksDB writes and compacts it, and Millrace continues.
"""

import random
import subprocess
import time

import databases
import millrace
import pytest
import resp
from test_blob_writes import compare, killed_under_load
from test_blobs import blob_files, by_9_8, read_by_both

FLAGS = ["--blob-min", "1000", "--blob-space-max-ratio", "1.3", "--memory", "64M"]
# Short blob files, and merges that soon find garbage.
OPTIONS = {"enable_blob_files": True, "min_blob_size": 1000, "blob_file_size": 1 << 20, "level0_file_num_compaction_trigger": 2}


def load(node, thread, round_, acknowledged, pending):
    """Sets keys until the node ends. Each thread has its own keys."""
    rng = random.Random(4 * round_ + thread)
    try:
        with node.connect() as client:
            for n in range(1_000_000):
                key = b"%d-%03d" % (thread, rng.randrange(100))
                value = b"%d of %d, " % (n, round_) * rng.choice([1, 300, 2_000])
                pending[key] = value
                client.call("SET", key, value)
                acknowledged[key] = value
                pending.pop(key)
    except (OSError, resp.Closed):
        pass


def info(node):
    with node.connect() as client:
        lines = client.call("INFO", "all").decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def kill_while_collecting(path, log, round_, model):
    """Kills a node under load after some collections. Returns the writes that were not acknowledged."""
    with millrace.node(path, log, "--durability", "process", *FLAGS, writes=True) as node:

        def collections():
            until = time.monotonic() + 60
            while int(info(node)["blob_collections"]) < 3:
                assert time.monotonic() < until, info(node)
                time.sleep(0.05)
            time.sleep(random.Random(round_).random() / 2)

        def sets(thread, acknowledged, pending):
            load(node, thread, round_, acknowledged, pending)

        return killed_under_load(node, sets, model, collections)


def test_rocksdb_goes_on_after_a_kill_in_the_middle_of_collection(tmp_path, long):
    path, log, model = tmp_path / "db", tmp_path / "log", {}
    db = databases.open_rocks(path, **databases.SMALL_BLOCKS, **OPTIONS, format_version=5)
    db[b"0-000"] = model[b"0-000"] = b"by RocksDB"
    db.close()
    for round_ in range(20 if long else 2):
        pending = kill_while_collecting(path, log, round_, model)
        assert blob_files(path)
        subprocess.run(["ldb", f"--db={path}", "--ignore_unknown_options", "checkconsistency"], check=True, capture_output=True)
        compare(read_by_both(path), model, pending)
        db = by_9_8(path)
        for n in range(round_, 100, 7):
            db[b"0-%03d" % n] = model[b"0-%03d" % n] = b"9.8 in round %d, " % round_ * 500
        db.flush()
        db.compact_range(None, None)
        db.close()
    with millrace.node(path, log, *FLAGS, writes=True) as node, node.connect() as client:
        for key, expected in model.items():
            assert client.call("GET", key) == expected, key
        total, live = int(info(node)["blob_bytes"]), int(info(node)["blob_live_bytes"])
        assert live > 0 and float(info(node)["blob_space_amplification"]) == pytest.approx(total / live, abs=0.01)


def test_a_closed_database_shows_the_space_of_its_blob_files(tmp_path):
    path = tmp_path / "db"
    db = databases.open_rocks(path, **databases.SMALL_BLOCKS, **OPTIONS, format_version=5)
    for n in range(10):
        db[databases.numbered(n)] = b"x" * 5_000
    db.flush()
    db.close()
    text = millrace.succeed("kv", "stat", "--data", path)
    assert "of which 0 B are garbage; space amplification 1.00" in text
    assert millrace.said_json("kv", "stat", "--data", path)["column_families"][0]["blob_space_amplification"] == 1.0
