"""Millrace writes to databases with RocksDB's blob files. Both versions of RocksDB then open them for writing, which is when values
would be lost, and read every value.
"""

import random
import subprocess
import time

import databases
import millrace
import resp
import rocksdict

BLOBS = {"format_version": 5, "enable_blob_files": True, "min_blob_size": 40}


def fill(db, round_, keys, model):
    """Writes a blob file with a value for each key."""
    for n in keys:
        value = b"round %d of key %d, " % (round_, n) * 8
        db[databases.numbered(n)] = value
        model[databases.numbered(n)] = value
    db.flush()


def by_9_8(path):
    """Opens it with RocksDB 9.8 and its own options."""
    whole, families = rocksdict.Options.load_latest(str(path))
    return rocksdict.Rdict(str(path), whole, families)


def read_by_both(path):
    """The values that RocksDB 7.8 and 9.8 read, which must be equal."""
    text = subprocess.run(["ldb", f"--db={path}", "--ignore_unknown_options", "scan", "--hex"], capture_output=True, check=True, text=True).stdout
    lines = [line.split(" ==> " if " ==> " in line else " : ") for line in text.splitlines()]
    old = {bytes.fromhex(key.strip()[2:]): bytes.fromhex(value.strip()[2:]) for key, value in lines}
    db = by_9_8(path)
    new = dict(db.items())
    db.close()
    assert old == new
    return new


def ours(path, log, rng, model, keys):
    """Overwrites and deletes some keys; each start of a node flushes the last one's writes to a table, and compacts the tables."""
    for _ in range(6):
        with millrace.node(path, log, writes=True) as node, node.connect() as client:
            for n in rng.sample(keys, 12):
                key = databases.numbered(n)
                if rng.random() < 0.3:
                    client.call("DEL", key)
                    model.pop(key, None)
                else:
                    client.call("SET", key, b"ours %d" % n)
                    model[key] = b"ours %d" % n


def blob_files(path):
    return sorted(file.name for file in path.glob("*.blob"))


def test_every_value_is_read_after_compactions_and_a_clearing(tmp_path, long):
    rng = random.Random(10)
    path, log, model = tmp_path / "db", tmp_path / "log", {}
    db = databases.open_rocks(path, **(databases.SMALL_BLOCKS | BLOBS))
    fill(db, 0, range(100), model)
    fill(db, 1, range(30, 130), model)
    db.close()
    assert len(blob_files(path)) == 2
    # Keys of the first file, so that it becomes obsolete before the others.
    for round_ in range(20 if long else 3):
        ours(path, log, rng, model, list(range(130)) if round_ % 2 else list(range(40)))
        assert read_by_both(path) == model
        db = by_9_8(path)
        fill(db, 2 + round_, rng.sample(range(130), 20), model)
        db.close()
        assert read_by_both(path) == model
    with millrace.node(path, log, writes=True) as node, node.connect() as client:
        for key, value in model.items():
            assert client.call("GET", key) == value
        assert blob_files(path)
        assert client.call("FLUSHALL") == resp.Simple(b"OK")
        client.call("SET", "after", "it")
        until = time.monotonic() + 20
        while blob_files(path):
            assert time.monotonic() < until, blob_files(path)
            time.sleep(0.01)
    assert read_by_both(path) == {b"after": b"it"}
