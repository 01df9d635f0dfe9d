"""Millrace stores large values in blob files. After kill -9 under load RocksDB 7.8 or 9.8 opens the directory for writing, which is
when unanchored blob files would be deleted, and reads every acknowledged value; then Millrace continues.
"""

import random
import threading
import time

import databases
import millrace
import pytest
import resp
from test_blobs import blob_files, read_by_both


def value(rng, round_, n):
    """A value; most are larger than a blob's minimum."""
    return b"%d of %d, " % (n, round_) * rng.choice([1, 30, 300, 2_000])


def load(node, seed, round_, acknowledged, pending):
    """Sets keys until the node ends. Each thread has its own keys."""
    rng = random.Random(seed)
    try:
        with node.connect() as client:
            for n in range(1_000_000):
                key = b"%d-%03d" % (seed % 4, rng.randrange(60))
                pending[key] = new = value(rng, round_, n)
                client.call("SET", key, new)
                acknowledged[key] = new
                pending.pop(key)
    except (OSError, resp.Closed):
        pass


def killed_under_load(node, load, model, during):
    """Four threads run `load(thread, acknowledged, pending)` until the node is killed, after `during()`. Adds what was acknowledged
    to the model, and returns the writes that were not."""
    acknowledged, pending = [{} for _ in range(4)], [{} for _ in range(4)]
    threads = [threading.Thread(target=load, args=(n, acknowledged[n], pending[n])) for n in range(4)]
    for thread in threads:
        thread.start()
    during()
    node.process.kill()
    node.process.wait()
    for thread in threads:
        thread.join()
    for of_thread in acknowledged:
        model.update(of_thread)
    return {key: value for of_thread in pending for key, value in of_thread.items()}


def kill_under_load(path, log, durability, round_, model):
    """Runs a node under load and kills it. Returns the writes that were not acknowledged."""
    with millrace.node(path, log, "--durability", durability, "--blob-min", "200", writes=True) as node:

        def sets(thread, acknowledged, pending):
            load(node, 4 * round_ + thread, round_, acknowledged, pending)

        return killed_under_load(node, sets, model, lambda: time.sleep(1.0))


def compare(found, model, pending):
    for key, value in pending.items():
        if found.get(key) == value:
            model[key] = value
    assert found.keys() == model.keys()
    for key, value in model.items():
        assert found[key] == value, key


@pytest.mark.parametrize("durability", ["process", "power"])
def test_acknowledged_values_survive_a_kill_and_stock_rocksdb(tmp_path, durability, long):
    path, log, model = tmp_path / "db", tmp_path / "log", {}
    # A table, which anchors the first blob file.
    db = databases.open_rocks(path, **databases.SMALL_BLOCKS, format_version=5)
    db[b"0-000"] = model[b"0-000"] = b"by RocksDB"
    db.close()
    assert not blob_files(path)
    for round_ in range(10 if long else 2):
        pending = kill_under_load(path, log, durability, round_, model)
        assert blob_files(path)
        compare(read_by_both(path), model, pending)
    with millrace.node(path, log, writes=True) as node, node.connect() as client:
        for key, expected in model.items():
            assert client.call("GET", key) == expected


@pytest.mark.parametrize("end", ["clean", "killed", "opened after a kill"])
def test_rocksdb_reads_values_and_drops_the_last_one_of_a_file(tmp_path, end):
    """The table that anchored the blob file once stayed linked to a file without live values: RocksDB took that for corruption. After
    a clean end it found values in the log, which it cannot read there without opening for writing."""
    path, log = tmp_path / "db", tmp_path / "log"
    databases.ldb(path, "--create_if_missing", "put", "m", "anchor")
    databases.ldb(path, "compact")
    with millrace.node(path, log, "--blob-min", "1", writes=True) as node, node.connect() as client:
        assert client.call("SET", "a", "123456") == b"OK"
        if end == "clean":
            node.stop()
        else:
            node.process.kill()
            node.process.wait()
    if end == "opened after a kill":
        with millrace.node(path, log, "--blob-min", "1", writes=True) as node, node.connect() as client:
            assert client.call("GET", "a") == b"123456"
            node.stop()
    assert blob_files(path)
    if end != "killed":
        assert databases.ldb(path, "get", "a") == "123456\n"
    databases.ldb(path, "put", "a", "new")
    databases.ldb(path, "put", "a", "newer")
    databases.ldb(path, "--from=a", "--to=b", "compact")
    assert databases.ldb(path, "scan").splitlines() == ["a : newer", "m : anchor"]
    with millrace.node(path, log, "--blob-min", "1", writes=True) as node, node.connect() as client:
        assert client.call("MGET", "a", "m") == [b"newer", b"anchor"]
