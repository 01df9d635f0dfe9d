"""Deadlines: they survive kill -9, RocksDB does not see them, and what it writes has none."""

import time

import databases
import millrace
import resp
from test_transfer import fed

OK = resp.Simple(b"OK")


def ends(client, *keys):
    return [client.call("PEXPIRETIME", key) for key in keys]


def test_deadlines_survive_kill_9_and_pass_while_the_node_is_down(tmp_path):
    end = int(time.time() * 1000) + 100_000
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True) as node, node.connect() as client:
        assert client.call("SET", "late", "1", "PXAT", end) == OK
        assert client.call("SET", "soon", "1", "PX", "400") == OK
        assert client.call("SET", "over", "1", "PXAT", end) == OK
        assert client.call("SET", "over", "1") == OK
        assert client.call("SET", "kept", "1", "PXAT", end) == OK
        assert client.call("INCR", "kept") == 2
        node.process.kill()
        node.process.wait()
    time.sleep(0.5)
    with millrace.node(tmp_path / "db", tmp_path / "log2", writes=True) as node, node.connect() as client:
        assert client.call("MGET", "late", "soon", "over", "kept") == [b"1", None, b"1", b"2"]
        assert ends(client, "late", "soon", "over", "kept") == [end, -2, -1, end]
    with millrace.node(tmp_path / "db", tmp_path / "log3") as node, node.connect() as client:
        assert client.call("MGET", "late", "soon") == [b"1", None], "for a node that only reads, too"
        assert ends(client, "late", "soon") == [end, -2]


def test_many_keys_that_have_expired_are_reclaimed(tmp_path):
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True) as node, node.connect() as client:
        client.send(b"".join(resp.encode("SET", f"k{at}", "v", "PX", "300") for at in range(3000)))
        for _ in range(3000):
            assert client.reply() == OK
        assert client.call("SET", "stays", "v") == OK
        deadline = time.monotonic() + 30
        while client.call("DBSIZE") > 1 or b"expires=0" not in client.call("INFO", "keyspace"):
            assert time.monotonic() < deadline, client.call("INFO", "keyspace")
            time.sleep(0.05)
        assert b"expired_keys:3000" in client.call("INFO", "stats")
        assert client.call("KEYS", "*") == [b"stays"]


def test_rocksdb_opens_the_database_and_what_it_writes_does_not_end(tmp_path):
    end = int(time.time() * 1000) + 100_000
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True) as node, node.connect() as client:
        for key in ("ours", "theirs"):
            assert client.call("SET", key, "v", "PXAT", end) == OK
        node.process.kill()
        node.process.wait()
    # The same value again: only its sequence tells it apart.
    databases.ldb(tmp_path / "db", "put", "theirs", "v")
    with millrace.node(tmp_path / "db", tmp_path / "log2", writes=True) as node, node.connect() as client:
        assert ends(client, "ours", "theirs") == [end, -1]
        assert client.call("MGET", "ours", "theirs") == [b"v", b"v"]


def test_commands_for_directories_keep_the_deadlines_of_other_keys(tmp_path):
    """Merges into the deepest level give values the sequence 0, unless there are deadlines, which name them by it."""
    data, end = tmp_path / "db", int(time.time() * 1000) + 100_000
    for at in range(3):
        with millrace.node(data, tmp_path / f"log{at}", writes=True) as node, node.connect() as client:
            assert client.call("SET", f"k{at}", "v", "PXAT", end) == OK
    rows = b"".join(b"row%06d\t%s\n" % (at, b"v" * 200) for at in range(3000))
    for at in range(3):
        millrace.succeed("kv", "put", f"other{at}", "v", "--data", data)
        assert fed(rows, "kv", "import", "-", "--data", data).returncode == 0
        millrace.succeed("kv", "compact", "--data", data)
        millrace.succeed("kv", "check", "--repair", "--data", data)
    for copy in (["checkpoint", tmp_path / "copy", "--data", data], ["compact", "--data", tmp_path / "copy"]):
        millrace.succeed("kv", *copy)
    for at, directory in enumerate((data, tmp_path / "copy")):
        with millrace.node(directory, tmp_path / f"last{at}", writes=True) as node, node.connect() as client:
            assert ends(client, "k0", "k1", "k2", "other0") == [end, end, end, -1]
