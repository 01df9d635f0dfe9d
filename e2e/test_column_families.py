"""Column families that `millrace kv column-families` makes and drops, judged by RocksDB."""

import json
import pathlib
import signal

import millrace
import resp
from databases import ldb
from rocksdict import Options, Rdict

OK = resp.Simple(b"OK")


def families(db):
    return [family["name"] for family in json.loads(millrace.succeed("kv", "column-families", "list", "--data", db, "--json"))]


def test_rocksdb_sees_families_that_were_made_and_dropped(tmp_path):
    db = tmp_path / "db"
    missing = millrace.fail("kv", "column-families", "create", "users", "--data", db)
    assert "no directory" in missing, missing
    ldb(db, "put", "a", "1", "--create_if_missing")
    for name in ("users", "häuser", "gone"):
        assert millrace.succeed("kv", "column-families", "create", name, "--data", db) == ""
    assert "there is one of that name" in millrace.fail("kv", "column-families", "create", "users", "--data", db)
    ldb(db, "--column_family=gone", "put", "x", "y")
    assert millrace.said_json("kv", "column-families", "drop", "gone", "--data", db) == {"dropped": "gone", "id": 3}
    said = millrace.fail("kv", "column-families", "drop", "gone", "--data", db)
    assert "no column family is named 'gone'" in said and "default, users, häuser" in said, said
    assert "cannot be dropped" in millrace.fail("kv", "column-families", "drop", "default", "--data", db)
    assert families(db) == ["default", "users", "häuser"]
    # Ids are not used again.
    assert millrace.said_json("kv", "column-families", "create", "last", "--descending", "--data", db) == {"created": "last", "id": 4}
    assert "häuser" in millrace.succeed("kv", "column-families", "list", "--data", db)
    ldb(db, "--column_family=users", "put", "u", "2")
    ldb(db, "checkconsistency")
    assert sorted(Rdict.list_cf(str(db), Options(raw_mode=True))) == sorted(["default", "users", "häuser", "last"])
    assert millrace.succeed("kv", "get", "u", "--column-family", "users", "--data", db) == "2\n"
    newest = max(pathlib.Path(db).glob("OPTIONS-*"))
    assert newest.read_text().count("[CFOptions ") == 4
    assert 'comparator=rocksdb.ReverseBytewiseComparator' in newest.read_text()


def serving(db, log, *flags):
    return millrace.node(db, log, *flags, writes=True)


def test_a_node_serves_one_family_and_leaves_the_others_as_they_are(tmp_path):
    db = tmp_path / "db"
    said = millrace.fail("serve", "--data", db, "--listen", "127.0.0.1:0", "--column-family", "users")
    assert "no column family is named 'users'" in said and "kv column-families create" in said, said
    with serving(db, tmp_path / "log0") as node, node.connect() as client:
        assert client.call("MSET", "a", "default", "b", "default") == OK
    millrace.succeed("kv", "column-families", "create", "users", "--data", db)
    with serving(db, tmp_path / "log1", "--column-family", "users") as node, node.connect() as client:
        assert "column family users, " in node.until_ready()
        assert client.call("GET", "a") is None and client.call("EXISTS", "a", "b") == 0
        assert client.call("SET", "a", "users") == OK
        assert client.call("MSET", *sum(([f"u:{n}", "x" * n] for n in range(100)), [])) == OK
        assert client.call("INCR", "n") == 1 and client.call("APPEND", "a", "!") == 6
        assert client.call("DEL", "b", "u:0", "u:0", "n") == 2
        assert client.call("MR.DELRANGE", "[u:1", "(u:5") == 44
        assert client.call("MGET", "a", "u:50", "u:0") == [b"users!", b"x" * 50, None]
        assert sorted(client.call("KEYS", "*")) == sorted([b"a", *(b"u:%d" % n for n in range(5, 10)), *(b"u:%d" % n for n in range(50, 100))])
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
    # The other family's keys are still counted.
    with serving(db, tmp_path / "log2") as node, node.connect() as client:
        assert node.counts_keys()
        assert client.call("DBSIZE") == 2 and client.call("MGET", "a", "b") == [b"default"] * 2
    with serving(db, tmp_path / "log3", "--column-family", "users") as node, node.connect() as client:
        assert client.call("GET", "a") == b"users!" and client.call("GET", "u:0") is None
    ldb(db, "checkconsistency")
    assert ldb(db, "--column_family=users", "get", "a").split() == ["users!"]
    with serving(db, tmp_path / "log4", "--column-family", "users") as node, node.connect() as client:
        assert client.call("FLUSHDB") == OK
        assert client.call("KEYS", "*") == [] and client.call("SET", "after", "1") == OK
    assert ldb(db, "--column_family=users", "scan", "--no_value").split() == ["after"]
    assert ldb(db, "scan", "--no_value").split() == ["a", "b"]
