"""Large numbers and sizes, in directories that RocksDB makes, Millrace changes and RocksDB opens again."""

import json
import subprocess

import millrace
import resp
import rocksdb78
from databases import ldb

OK = resp.Simple(b"OK")
# The smallest budget that a node takes with a database.
SMALL = ("--memory", "64M")


def test_a_directory_with_many_column_families(tmp_path, long):
    count = 1000 if long else 40
    db, names = tmp_path / "db", ["default"]
    made = rocksdb78.options(create_missing_column_families=1)
    names += [f"f{n:04}" for n in range(count)]
    with rocksdb78.opened(db, made, families={name: made for name in names}) as rocks:
        for name in names:
            rocks.put(b"made", name.encode(), name)
    # Each opening makes a table of what the log holds for each family.
    last = names[-1]
    millrace.succeed("kv", "put", "key", "1", "--column-family", last, "--data", db)
    millrace.succeed("kv", "put", "key", "0", "--data", db)
    text = tmp_path / "entries.txt"
    text.write_text("".join(f"i{n}\t{n}\n" for n in range(5)))
    said = millrace.said_json("kv", "import", text, "--column-family", last, "--data", db)
    assert said["entries"] == 5
    assert millrace.succeed("kv", "delete", "i3", "--column-family", last, "--data", db) == ""
    assert "0 of 1 keys existed" in millrace.command("kv", "del", "i4", "--column-family", names[1], "--data", db).stderr
    expected = [(b"i0", b"0"), (b"i1", b"1"), (b"i2", b"2"), (b"i4", b"4"), (b"key", b"1"), (b"made", last.encode())]
    assert millrace.scan(db, "--column-family", last) == expected
    assert millrace.succeed("kv", "get", "key", "--data", db) == "0\n"
    said = millrace.fail("kv", "put", "a", "b", "--column-family", "none", "--data", db)
    assert "no column family is named 'none'" in said and f"and {count + 1 - 20} more" in said, said
    # Nothing is made for a family that cannot exist.
    millrace.fail("kv", "put", "a", "b", "--column-family", "none", "--data", tmp_path / "missing")
    assert not (tmp_path / "missing").exists()

    millrace.succeed("kv", "column-families", "create", "new", "--data", db)
    millrace.succeed("kv", "column-families", "drop", names[1], "--data", db)
    names = [name for name in names if name != names[1]] + ["new"]
    with millrace.node(db, tmp_path / "log", "--column-family", last, *SMALL, writes=True) as node, node.connect() as client:
        assert client.call("GET", "key") == b"1" and client.call("SET", "served", "yes") == OK
        address = f"127.0.0.1:{node.port}"
        # What a node serves needs no name, or the right one.
        assert millrace.succeed("kv", "get", "served", "--connect", address) == "yes\n"
        assert millrace.succeed("kv", "get", "served", "--column-family", last, "--connect", address) == "yes\n"
        millrace.succeed("kv", "put", "tool", "1", "--column-family", last, "--connect", address)
        for command in (["get", "a"], ["scan"], ["put", "a", "b"], ["del", "a"], ["import", text], ["export"]):
            said = millrace.fail("kv", *command, "--column-family", "default", "--connect", address)
            assert f"the node serves the column family '{last}', not 'default'" in said, said
        # A line for each family that has something, and no more.
        assert len(client.call("INFO", "compaction")) < 400 * (count + 2)
        assert node.rss() < 120 << 20
    expected += [(b"served", b"yes"), (b"tool", b"1")]
    options = rocksdb78.options()
    with rocksdb78.opened(db, options, families={name: options for name in names}) as rocks:
        assert rocks.scan(last) == expected
        assert rocks.scan(names[1]) == [(b"made", names[1].encode())] and rocks.scan("new") == []
        rocks.compact(family=last)
        rocks.put(b"again", b"1", last)
    ldb(db, "checkconsistency")
    assert millrace.scan(db, "--column-family", last) == [(b"again", b"1"), *expected]


def test_large_keys_and_values(tmp_path, long):
    megabytes = 100 if long else 16
    db, value = tmp_path / "db", bytes(range(256)) * (megabytes << 12)
    keys = [b"k%03d" % n + b"K" * (65536 - 4) for n in range(200 if long else 30)]
    with rocksdb78.opened(db) as rocks:
        rocks.put(b"large", value)
        for n, key in enumerate(keys):
            rocks.put(key, b"%d" % n)
        rocks.flush()
        rocks.put(b"logged", value)
    assert "nothing is damaged" in millrace.succeed("kv", "check", "--data", db)
    stored = tmp_path / "value"
    stored.write_bytes(value[::-1])
    with stored.open("rb") as file:
        subprocess.run([millrace.BINARY, "kv", "put", "ours", "-", "--data", db], stdin=file, check=True, timeout=60)
    millrace.succeed("kv", "put", keys[3].decode(), "changed", "--data", db)
    millrace.succeed("kv", "compact", "--data", db)
    with millrace.node(db, tmp_path / "log", "--memory", "1G", writes=True) as node, node.connect() as client:
        assert client.call("GET", "large") == value and client.call("GET", "logged") == value
        assert client.call("MGET", *keys[:5]) == [b"0", b"1", b"2", b"changed", b"4"]
    # A node without memory for a value says so, and serves the others.
    with millrace.node(db, tmp_path / "log", *SMALL, writes=True) as node, node.connect() as client:
        assert client.call("GET", keys[2]) == b"2"
        assert client.call("SET", keys[2], "2") == OK
        assert node.rss() < 150 << 20
    with rocksdb78.opened(db) as rocks:
        found = rocks.scan()
    expected = {key: b"%d" % n for n, key in enumerate(keys)} | {b"large": value, b"logged": value, b"ours": value[::-1]}
    expected[keys[3]] = b"changed"
    assert found == sorted(expected.items())
    ldb(db, "checkconsistency")


def test_a_block_of_range_tombstones_that_exceeds_the_memory_of_a_core(tmp_path, long):
    """RocksDB writes all range tombstones of a file as one block."""
    db = tmp_path / "db"
    # As many bytes: a million small ones, or few with long keys.
    count, end = (1_000_000, b"c") if long else (400, b"c" * (64 << 10))
    key = lambda n, more: b"k%08d" % n + more
    made = rocksdb78.options(write_buffer_size=256 << 20)
    with rocksdb78.opened(db, made, families={"default": made}) as rocks:
        for n in range(count):
            if n % 10 == 0:
                rocks.put(key(n, b"a"), b"deleted")
                rocks.put(key(n, b"x"), b"stays")
        rocks.flush()
        rocks.compact()
        for n in range(count):
            rocks.delete_range(key(n, end[:-1]) if not long else key(n, b""), key(n, end))
            if not long and n % 10 == 0:
                rocks.delete(key(n, b"a"))
        rocks.flush()
    expected = [(key(n, b"x"), b"stays") for n in range(0, count, 10)]
    with millrace.node(db, tmp_path / "log", *SMALL, writes=True) as node, node.connect() as client:
        assert client.call("GET", key(0, b"x")) == b"stays" and client.call("GET", key(0, b"a")) is None
        first = client.call("MR.RANGE", "-", "+", "LIMIT", 2)
        assert first == [part for pair in expected[:2] for part in pair]
        assert client.call("SET", "new", "1") == OK
    expected.append((b"new", b"1"))
    assert millrace.scan(db) == expected
    millrace.succeed("kv", "compact", "--data", db, timeout=300)
    levels = json.loads(millrace.succeed("kv", "stat", "--data", db, "--json"))["column_families"][0]["levels"]
    assert sum(level["deletions"] for level in levels) == 0, levels
    assert "nothing is damaged" in millrace.succeed("kv", "check", "--data", db)
    with rocksdb78.opened(db, made) as rocks:
        assert rocks.scan() == expected
    ldb(db, "checkconsistency")
