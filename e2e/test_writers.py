"""RocksDB's processes and ours on one directory: killed while writing, still writing, or locked out by us."""

import random
import re
import subprocess
import sys
import time

import databases
import millrace
import pytest

WRITER = """
import sys, random
sys.path.insert(0, sys.argv[1])
import pathlib, databases
edits = dict(pair.split("=", 1) for pair in sys.argv[3:])
db = databases.open_rocks(pathlib.Path(sys.argv[2]), **edits)
rng = random.Random(4)
print("open", flush=True)
n = 0
while True:
    n += 1
    key = databases.numbered(rng.randrange(3000))
    if n % 11 == 0:
        del db[key]
    elif n % 997 == 0:
        start = rng.randrange(3000)
        db.delete_range(databases.numbered(start), databases.numbered(start + rng.randrange(200)))
    else:
        db[key] = databases.text_value(n)
    if n % 2000 == 0:
        print(n, flush=True)
"""


class Writer:
    """A RocksDB process that writes without end."""

    def __init__(self, data, *edits):
        here = str(databases.OPTIONS_TEMPLATE.parent)
        self.process = subprocess.Popen([sys.executable, "-c", WRITER, here, str(data), *edits], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "open\n"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


HISTORIES = {
    "only-a-wal": [],
    "flushing-and-compacting": ["write_buffer_size=65536", "max_bytes_for_level_base=262144", "target_file_size_base=65536"],
    "compressed-wal": ["wal_compression=kZSTD", "write_buffer_size=262144"],
    "recycled-wals": ["recycle_log_file_num=3", "write_buffer_size=65536"],
    "blobs": ["enable_blob_files=true", "min_blob_size=20", "write_buffer_size=65536", "enable_blob_garbage_collection=true"],
}


@pytest.mark.parametrize("history", HISTORIES)
def test_a_directory_of_a_killed_writer_is_read(history, tmp_path, long):
    rng = random.Random(history)
    for round_ in range(12 if long else 2):
        data = tmp_path / f"db{round_}"
        with Writer(data, *HISTORIES[history]) as writer:
            assert writer.process.stdout.readline() == "2000\n"
            time.sleep(rng.random() * 0.3)
        ours = millrace.scan(data)
        backwards = millrace.scan(data, "--reverse")
        theirs = databases.their_scan(databases.Database("", None), data, "default")
        assert len(ours) > 100
        assert ours == theirs, f"round {round_}: {len(ours)} entries, theirs {len(theirs)}"
        assert backwards == theirs[::-1]
        millrace.succeed("kv", "check", "--data", data)


def test_a_directory_that_rocksdb_has_open_is_refused_with_advice(tmp_path):
    data = tmp_path / "db"
    with Writer(data) as writer:
        for arguments in (["kv", "scan"], ["kv", "get", "k"], ["kv", "stat"], ["kv", "check"], ["serve", "--read-only", "--listen", f"127.0.0.1:{millrace.free_port()}"]):
            said = millrace.fail(*arguments, "--data", data)
            assert re.search("(?i)lock|open for writing", said) and str(data) in said, said
        assert writer.process.poll() is None
        assert writer.process.stdout.readline() == "2000\n", "the writer continues"
    millrace.succeed("kv", "scan", "--data", data, "--limit", 1)


def test_a_served_directory_locks_out_writers_but_not_readers(own_copy, tmp_path):
    data = own_copy("ldb-put")
    with millrace.node(data, tmp_path / "log") as node:
        with pytest.raises(RuntimeError, match="(?i)lock"):
            databases.ldb(data, "put", "new", "key")
        assert "hello : world" in databases.ldb(data, "scan")
        with node.connect() as client:
            assert client.call("GET", "hello") == b"world"
    databases.ldb(data, "put", "new", "key")
    assert millrace.succeed("kv", "get", "new", "--data", data).strip() == "key"


def test_two_nodes_may_serve_one_directory(own_copy, tmp_path):
    data = own_copy("ldb-put")
    with millrace.node(data, tmp_path / "one") as one, millrace.node(data, tmp_path / "two") as two:
        for node in (one, two):
            with node.connect() as client:
                assert client.call("GET", "hello") == b"world"


def test_a_secondary_reads_while_rocksdb_writes(tmp_path):
    if "--secondary" not in millrace.succeed("serve", "--help"):
        pytest.skip("this build has no --secondary")
    data = tmp_path / "db"
    with Writer(data) as writer:
        assert writer.process.stdout.readline() == "2000\n"
        with millrace.node(data, tmp_path / "log", "--secondary") as node, node.connect() as client:
            assert len(client.call("MR.RANGE", "-", "+", "NOVALUES")) > 100
