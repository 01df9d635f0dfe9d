"""The commands that many applications send first, beside Redis where it can judge: dumps, long values, slow commands, DEBUG."""

import contextlib
import random

import millrace
import pytest
import resp

OK = resp.Simple(b"OK")


@contextlib.contextmanager
def writable(tmp_path, *arguments):
    """A node with an empty database."""
    with millrace.node(tmp_path / "db", tmp_path / "log", "--durability", "process", *arguments, writes=True) as node:
        yield node


@pytest.fixture
def pair(tmp_path):
    """Redis and a node, both empty."""
    with millrace.redis_server(tmp_path, tmp_path / "redis.log") as theirs, writable(tmp_path) as ours:
        yield theirs, ours


def long_values(rng):
    return [b"", b"7", b"-129", b"70000", b"9999999999", b"01", b"x" * 63, b"x" * 64, b"ab" * 9000, rng.randbytes(20_000), rng.randbytes(900) * 3000, bytes(1_500_000)]


def test_dumps_are_restored_by_redis_and_by_a_node(pair):
    theirs, ours = (server.connect() for server in pair)
    with theirs, ours:
        for number, value in enumerate(long_values(random.Random(3))):
            key = b"key:%d" % number
            for one, other in ((theirs, ours), (ours, theirs)):
                assert one.call("SET", key, value) == OK
                assert other.call("DEL", key) in (0, 1)
                payload = one.call("DUMP", key)
                assert other.call("RESTORE", key, 0, payload) == OK
                assert other.call("GET", key) == value
                assert other.call("RESTORE", key, 0, payload) == "BUSYKEY Target key name already exists."
                assert other.call("RESTORE", key, 0, payload[:-1] + b"?", "REPLACE") == "ERR DUMP payload version or checksum are wrong"
                assert other.call("GET", key) == value


def test_long_values_are_counted_combined_copied_and_renamed(pair):
    rng = random.Random(4)
    a, b = rng.randbytes(3_000_001), bytes(2_000_000) + b"\1" + bytes(500_000)
    script = [
        ["SET", "a", a], ["SET", "b", b], ["BITCOUNT", "a"], ["BITCOUNT", "a", 100_000, -7], ["BITCOUNT", "a", 1_000_003, -9, "BIT"], ["BITPOS", "b", 1], ["BITPOS", "b", 1, 2_000_001],
        ["BITPOS", "b", 0, 2_000_000, -1, "BYTE"], ["BITOP", "AND", "and", "a", "b"], ["BITOP", "OR", "or", "a", "b", "missing"], ["BITOP", "XOR", "xor", "a", "b", "a", "a"],
        ["BITOP", "NOT", "not", "a"], ["BITOP", "XOR", "a", "a", "b"], ["SETBIT", "b", 24_000_000, 1], ["BITFIELD", "b", "INCRBY", "i64", 9_000_001, -5, "GET", "u8", "#1000000"],
        ["COPY", "a", "copy"], ["RENAME", "a", "renamed"], ["RENAMENX", "renamed", "b"], ["RENAME", "a", "x"], ["BITOP", "AND", "or", "missing"], ["EXISTS", "or", "a", "copy"],
        ["SETRANGE", "short", 0, "short"], ["BITOP", "OR", "both", "short", "copy"], ["SETBIT", "both", 3, 0], ["BITCOUNT", "both"],
    ]  # fmt: skip
    found = []
    for server in pair:
        with server.connect() as client:
            replies = client.pipeline(script)
            keys = sorted(client.call("KEYS", "*"))
            found.append((replies, keys, client.call("MGET", *keys)))
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]
    assert all(theirs == ours for theirs, ours in zip(found[0][2], found[1][2]))


def test_commands_of_one_key_keep_their_order_across_renames_and_combinations(pair):
    """All connections together; each has its keys, and all of a pipeline is sent at once."""
    rng = random.Random(5)
    requests = []
    for number in range(3000):
        one, other = (b"k%d" % rng.randrange(5) for _ in range(2))
        requests.append(
            rng.choice(
                [
                    ["SET", one, rng.randbytes(rng.choice((3, 70_000)))], ["APPEND", one, b"%d" % number], ["RENAME", one, other], ["COPY", one, other, "REPLACE"],
                    ["BITOP", rng.choice(("AND", "OR", "XOR")), one, one, other, b"k0"], ["SETBIT", one, rng.randrange(900), 1], ["DEL", one], ["STRLEN", one], ["BITCOUNT", other], ["EXISTS", one, other],
                ]
            )
        )  # fmt: skip
    theirs, ours = (server.connect() for server in pair)
    with theirs, ours:
        assert theirs.pipeline(requests) == ours.pipeline(requests)
        keys = [b"k%d" % number for number in range(5)]
        assert theirs.call("MGET", *keys) == ours.call("MGET", *keys)


def test_slow_commands_of_all_cores_are_listed(tmp_path):
    with writable(tmp_path, "--cores", "2") as node:
        clients = [node.connect() for _ in range(6)]
        first = clients[0]
        assert first.call("CONFIG", "GET", "slowlog*") == [b"slowlog-log-slower-than", b"10000", b"slowlog-max-len", b"128"]
        assert first.call("CONFIG", "SET", "slowlog-log-slower-than", 0, "slowlog-max-len", 20) == OK
        first.call("SLOWLOG", "RESET")
        for number, client in enumerate(clients):
            client.call("CLIENT", "SETNAME", f"name{number}")
            client.call("SET", f"key{number}", "x" * 200)
            client.call("KEYS", "*")
        assert first.call("SLOWLOG", "LEN") >= 18
        entries = first.call("SLOWLOG", "GET", -1)
        numbers = [entry[0] for entry in entries]
        assert len(entries) == 20 and numbers == sorted(set(numbers), reverse=True)
        assert {name for *_, name in entries} >= {b"name%d" % number for number in range(1, 6)}
        words = [entry[3] for entry in entries]
        assert [b"KEYS", b"*"] in words and [b"SET", b"key5", b"x" * 128 + b"... (72 more bytes)"] in words
        assert all(len(entry) == 6 and entry[2] >= 0 and entry[4].startswith(b"127.0.0.1:") for entry in entries)
        assert len(first.call("SLOWLOG", "GET", 3)) == 3
        assert first.call("CONFIG", "SET", "requirepass", "secret") == OK
        assert first.call("AUTH", "secret") == OK
        assert b"secret" not in repr(first.call("SLOWLOG", "GET", -1)).encode()
        assert first.call("CONFIG", "SET", "slowlog-log-slower-than", -1) == OK
        first.call("SLOWLOG", "RESET")
        first.call("KEYS", "*")
        assert first.call("SLOWLOG", "GET", -1) == [] and first.call("SLOWLOG", "LEN") == 0
        for client in clients:
            client.socket.close()


def test_the_library_of_a_client_is_listed(tmp_path):
    with writable(tmp_path) as node, node.connect() as client:
        assert client.call("CLIENT", "SETINFO", "LIB-NAME", "redis-py") == OK
        assert client.call("CLIENT", "SETINFO", "lib-ver", "8.1.0") == OK
        assert client.call("CLIENT", "INFO").endswith(b" lib-name=redis-py lib-ver=8.1.0\n")
        assert client.call("CLIENT", "SETINFO", "lib-ver", "8 1") == "ERR lib-ver cannot contain spaces, newlines or special characters."
        assert client.call("CLIENT", "SETINFO", "x", "y") == "ERR Unrecognized option 'x'"
        assert client.call("CLIENT", "NO-TOUCH", "on") == OK
        assert isinstance(client.call("CLIENT", "NO-TOUCH", "x"), resp.Error)


def test_debug_is_refused_unless_it_is_enabled(tmp_path):
    with writable(tmp_path) as node, node.connect() as client:
        assert client.call("DEBUG", "SLEEP", 0).startswith("ERR DEBUG command not allowed. ")
        assert client.call("CONFIG", "GET", "enable-debug-command") == [b"enable-debug-command", b"no"]
    with writable(tmp_path, "--enable-debug-command") as node, node.connect() as client, node.connect() as other:
        client.send(resp.encode("DEBUG", "SLEEP", 3600))
        assert other.call("SET", "key", "value") == OK, "other connections are served"
        assert other.call("DEBUG", "RELOAD") == OK and other.call("GET", "key") == b"value"
        assert other.call("DEBUG", "OBJECT", "key").startswith(b"Value at:")
        assert other.call("DEBUG", "OBJECT", "missing") == "ERR no such key"
        assert other.call("DEBUG", "SEGFAULT") == "ERR unknown subcommand or wrong number of arguments for 'SEGFAULT'. Try DEBUG HELP."
