"""Pages of the hashes of all keys, and the client that tells misses without a round trip."""

import os
import pathlib
import random
import subprocess

import millrace
import pytest
import resp

INDEX = pathlib.Path(os.environ.get("MILLRACE_INDEX", millrace.TARGET / "debug" / "examples" / "index"))
FLAGS = ["--blob-min", "1K", "--durability", "process"]


def key(n):
    return b"key:%08d" % n


def pages(client, seed, count):
    """The hashes of all pages, and the number of keys of each."""
    after, found, lengths = None, [], []
    while True:
        words = ["MR.INDEX", seed, "COUNT", count] + ([] if after is None else ["AFTER", after])
        after, hashes = client.call(*words)
        assert len(hashes) % 8 == 0 and len(hashes) <= 8 * count
        lengths.append(len(hashes) // 8)
        found += [hashes[at : at + 8] for at in range(0, len(hashes), 8)]
        if after is None:
            return found, lengths


@pytest.fixture
def node(tmp_path):
    with millrace.node(tmp_path / "db", tmp_path / "log", "--cores", "2", *FLAGS, writes=True) as node:
        yield node


def fill(client, numbers, size=10):
    client.send(b"".join(resp.encode("SET", key(n), b"x" * size) for n in numbers))
    for _ in numbers:
        assert client.reply() == b"OK"


def test_pages_have_each_key_once_whatever_their_length(node):
    with node.connect() as client:
        assert client.call("MR.INDEX", 1) == [None, b""]
        fill(client, range(500))
        fill(client, range(500, 1000), 2000)  # In blob files, but for the first ones.
        client.call("SET", "ends", "x", "EX", 1000)
        client.call("DEL", key(3), key(700))
        whole, lengths = pages(client, 1, 32768)
        assert lengths == [999] and len(set(whole)) == 999
        for count in (1, 7, 998, 999, 1000):
            found, lengths = pages(client, 1, count)
            assert found == whole and max(lengths) <= count
        assert set(pages(client, 2, 100)[0]).isdisjoint(whole), "the seed counts"
        client.call("FLUSHALL")
        assert pages(client, 1, 10) == ([], [0])


def test_keys_have_the_documented_hash(node):
    """XXH3 with 64 bits, as its reference implementation computes it."""
    with node.connect() as client:
        for name, seed, expected in [
            (b"a", 0, 0xE6C632B61E964E1F),
            (b"abc", 0, 0x78AF5F94892F3950),
        ]:
            client.call("FLUSHALL")
            client.call("SET", name, "x")
            assert client.call("MR.INDEX", seed) == [None, expected.to_bytes(8, "little")]


def test_pages_of_another_form_are_refused(node):
    with node.connect() as client:
        for words in (["x"], [1, "COUNT", 0], [1, "COUNT"], [1, "AFTER"], [1, "LIMIT", 3], [1 << 64]):
            assert isinstance(client.call("MR.INDEX", *words), resp.Error)
        client.call("MULTI")
        assert isinstance(client.call("MR.INDEX", 1), resp.Error)


def test_a_page_ends_early_where_values_in_tables_are_long(tmp_path):
    with millrace.node(tmp_path / "db", tmp_path / "log", "--durability", "process", writes=True) as node, node.connect() as client:
        fill(client, range(300), 100_000)
        found, lengths = pages(client, 1, 32768)
        assert len(set(found)) == 300 and len(lengths) > 2


def test_a_client_that_does_not_read_pages_holds_bounded_memory_and_no_snapshot(node):
    with node.connect() as client:
        for n in range(0, 40000, 1000):
            fill(client, range(n, n + 1000))
        before = node.rss()
        stalled = [node.connect() for _ in range(20)]
        for reader in stalled:
            reader.send(resp.encode("MR.INDEX", 1) * 500)
            reader.socket.recv(1000)
        for n in random.Random(1).sample(range(40000), 500):
            assert client.call("GET", key(n)) == b"x" * 10
        assert node.rss() < before + (128 << 20)
        for reader in stalled:
            reader.socket.close()
        assert len(pages(client, 3, 32768)[0]) == 40000


@pytest.mark.parametrize("cuts", [[], ["cut"]], ids=["quiet", "cut"])
def test_what_an_index_says_is_always_so(node, cuts):
    """With writers that make and remove keys, and connections that end."""
    done = subprocess.run([INDEX, f"127.0.0.1:{node.port}", *cuts], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_race_with_an_index_tells_misses_by_itself(tmp_path):
    flags = ["--threads", "4", "--sets", "2000", "--index", "--memory", "64M", "--durability", "process"]
    said = millrace.said_json("bench", "race", "--data", tmp_path, *flags)
    assert said["index_keys"] == 8000 and said["missing_plain"] == said["missing"] == said["index_answers"] == 8000
    assert 0 < said["index_bytes"] <= 8000 * 8
