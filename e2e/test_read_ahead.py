"""Stretches of blob files, and the client that reads ahead in the order of the writes."""

import os
import pathlib
import random
import signal
import socket
import subprocess
import threading

import millrace
import pytest
import resp

AHEAD = pathlib.Path(os.environ.get("MILLRACE_AHEAD", millrace.TARGET / "debug" / "examples" / "ahead"))
FLAGS = ["--blob-min", "1K", "--durability", "process"]


def value(n, size=4096):
    return (b"%d:" % n * size)[:size]


def key(n):
    return b"key:%08d" % n


def records(reply):
    """The records of the frames of a stretch."""
    for frame in reply[1:]:
        assert 0 < len(frame) <= 65536
        at = 0
        while at < len(frame):
            key_length, value_length = (int.from_bytes(frame[at + from_ : at + from_ + 4], "little") for from_ in (0, 4))
            offset = int.from_bytes(frame[at + 8 : at + 16], "little")
            at += 16
            yield frame[at : at + key_length], frame[at + key_length : at + key_length + value_length], offset
            at += key_length + value_length
        assert at == len(frame)


def read_file(client, file, step=262144, start=0):
    """All records of a file, by parts of a length."""
    at, found = start, []
    while True:
        reply = client.call("MR.STRETCH", file, at, step)
        found += records(reply)
        if reply[0] == 0:
            return found
        assert reply[0] == at + step
        at = reply[0]


def prime(root):
    """A database with a table: without one, values stay in the log until the first flush."""
    (root / "pairs").write_bytes(b"first\t1\n")
    millrace.succeed("kv", "import", root / "pairs", "--data", root / "db")


@pytest.fixture
def node(tmp_path):
    prime(tmp_path)
    with millrace.node(tmp_path / "db", tmp_path / "log", "--cores", "2", *FLAGS, writes=True) as node:
        yield node


def fill(client, numbers):
    client.send(b"".join(resp.encode("SET", key(n), value(n)) for n in numbers))
    for _ in numbers:
        assert client.reply() == b"OK"


def begin(client):
    """Writes until values go to a blob file, which is made when it is needed first."""
    for _ in range(1000):
        client.call("SET", "warm", value(0))
        if len(client.call("MR.GET", "warm")) == 3:
            client.call("DEL", "warm")
            return
    raise AssertionError("values do not go to a blob file")


def test_places_and_stretches_show_what_is_present(node):
    with node.connect() as client:
        assert dict(zip(*[iter(client.call("MR.INFO"))] * 2)) == {
            b"version": 4,
            b"stretch-bytes-max": 262144,
            b"frame-bytes-max": 65536,
            b"index-keys-max": 32768,
        }
        begin(client)
        order = random.Random(1).sample(range(500), 500)
        fill(client, order)
        client.call("SET", "small", "x")
        assert client.call("MR.GET", "small") == [b"x"]
        assert client.call("MR.GET", "none") is None
        file, offset, found = client.call("MR.GET", key(order[0]))
        assert found == value(order[0])
        # In the order of the writes, by parts of any length.
        for step in (262144, 100_000, 7777):
            found = read_file(client, file, step)
            assert [name for name, _, _ in found] == [key(n) for n in order]
            assert all(text == value(n) for (_, text, _), n in zip(found, order))
            assert found[0][2] == offset
        # From the middle on.
        assert [name for name, _, _ in read_file(client, file, start=offset)] == [key(n) for n in order[1:]]
        # What is overwritten or removed is left out, and so is what may end.
        client.call("SET", key(order[3]), value(1000))
        client.call("DEL", key(order[4]))
        client.call("EXPIRE", key(order[5]), 1000)
        left = [name for name, _, _ in read_file(client, file)]
        assert left[:5] == [key(order[n]) for n in (0, 1, 2, 6, 7)]
        again = client.call("MR.GET", key(order[3]))
        assert again[2] == value(1000) and again[:2] != [file, offset]
        client.call("FLUSHALL")
        assert read_file(client, file) == []
        # Impossible parts.
        for words in ([file, 1 << 62, 5], [99999, 0, 100], [file, 0, 0], [(1 << 63) - 1, (1 << 63) - 1, 1 << 40]):
            assert client.call("MR.STRETCH", *words) == [0]
            assert client.call("MR.STRETCH", *words, "next") == [0, 0]
        assert "negative" in client.call("MR.STRETCH", -1, 0, 1)
        for words in ((1, 2), (1, 2, 3, "other"), (1, 2, 3, "NEXT", 4)):
            assert isinstance(client.call("MR.STRETCH", *words), resp.Error)
        client.call("MULTI")
        assert client.call("MR.GET", "small") == b"QUEUED"
        assert isinstance(client.call("MR.STRETCH", 1, 2, 3), resp.Error)


def test_the_file_after_another_is_told(node):
    with node.connect() as client:
        begin(client)
        names = [f"long:{n}" for n in range(200)]
        for name in names:
            assert client.call("SET", name, bytes(60_000)) == b"OK"
        files = [client.call("MR.GET", name)[0] for name in names]
        in_order = sorted(set(files))
        assert len(in_order) > 1
        for file, after in zip(in_order, [*in_order[1:], 0]):
            first, second, *frames = client.call("MR.STRETCH", file, 0, 262144, "NEXT")
            assert (first, second) == (262144, after) and frames
            assert client.call("MR.STRETCH", file, 1 << 40, 262144, "NEXT") == [0, after]


def test_values_that_look_like_records_are_not_taken_for_any(node):
    """A value holds a whole record of another key."""
    with node.connect() as client:
        begin(client)
        fill(client, [1])
        file, offset, _ = client.call("MR.GET", key(1))
    # The bytes of that record, as they are in the file.
    path = next(path for path in (node.log.parent / "db").glob("*.blob") if int(path.stem) == file)
    with open(path, "rb") as blob:
        blob.seek(offset - len(key(1)) - 32)
        record = blob.read(32 + len(key(1)) + 4096)
    assert record.endswith(value(1))
    with node.connect() as client:
        client.call("SET", "evil", b"x" * 5000 + record + b"y" * 5000)
        client.call("SET", key(1), value(2))
        file, offset, _ = client.call("MR.GET", "evil")
        found = read_file(client, file, start=offset + 100)
        assert value(1) not in [text for _, text, _ in found]
        assert (key(1), value(2)) in [(name, text) for name, text, _ in found]


def test_who_has_read_a_stretch_is_told_of_writes(node):
    with node.connect() as client, node.connect() as reader:
        begin(client)
        fill(client, range(100))
        reader.call("HELLO", "3")
        reader.call("CLIENT", "TRACKING", "ON")
        file, offset, _ = reader.call("MR.GET", key(0))
        assert len(read_file(reader, file)) == 100

        def told():
            reader.send(resp.encode("PING"))
            pushes = []
            while (reply := reader.reply()) != b"PONG":
                pushes.append(reply[1])
            return pushes

        client.call("SET", key(7), value(8))
        client.call("DEL", key(9))
        client.call("SET", "other", value(8))
        assert told() == [[key(7)], [key(9)]]
        client.call("SET", key(7), value(9))
        assert told() == [[key(7)]], "each write of it is told"
        # Its own write, too.
        reader.send(resp.encode("SET", key(11), value(12)))
        assert reader.reply() == b"OK" and told() == [[key(11)]]
        client.call("MR.DELRANGE", "[" + key(50).decode(), "(" + key(51).decode())
        assert told() == [resp.Null()]
        assert len(read_file(reader, file)) > 90
        client.call("FLUSHALL")
        assert told() == [resp.Null()]
        assert "tracking_stretch_keys:0" in client.call("INFO", "stats").decode()


def test_a_reader_that_stops_in_the_middle_holds_bounded_memory(tmp_path):
    prime(tmp_path)
    with millrace.node(tmp_path / "db", tmp_path / "log", "--memory", "64M", *FLAGS, writes=True) as node:
        with node.connect() as client:
            begin(client)
            for n in range(0, 8000, 100):
                fill(client, range(n, n + 100))
            file, _, _ = client.call("MR.GET", key(4000))
            before = node.rss()
            stalled = [node.connect() for _ in range(20)]
            for reader in stalled:
                reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.call("CLIENT", "TRACKING", "ON")
                # Ten times the file, of which it takes a few bytes.
                reader.send(resp.encode("MR.STRETCH", file, 0, 262144) * 500)
                reader.socket.recv(1000)
            for n in range(0, 8000, 97):
                assert client.call("GET", key(n)) == value(n)
            assert node.rss() < before + (64 << 20)
            for reader in stalled:
                reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                reader.socket.close()
            assert len(read_file(client, file)) > 500
            assert node.alive()


def test_what_was_acknowledged_before_a_kill_is_in_the_stretches(tmp_path):
    """Threads that set, each its own keys, a node that is killed meanwhile, and stretches of all files."""
    acknowledged = [0] * 4
    prime(tmp_path)
    with millrace.node(tmp_path / "db", tmp_path / "log", *FLAGS, writes=True) as node:
        with node.connect() as client:
            begin(client)

        def write(thread):
            try:
                with node.connect() as client:
                    for n in range(thread * 1_000_000, (thread + 1) * 1_000_000):
                        assert client.call("SET", key(n), value(n)) == b"OK"
                        acknowledged[thread] += 1
            except (OSError, resp.Closed):
                pass

        threads = [threading.Thread(target=write, args=[thread]) for thread in range(4)]
        for thread in threads:
            thread.start()
        while min(acknowledged) < 400:
            threading.Event().wait(0.01)
        os.killpg(node.process.pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
    with millrace.node(tmp_path / "db", tmp_path / "log", *FLAGS, writes=True) as node, node.connect() as client:
        found = {}
        wanted = {key(thread * 1_000_000 + n) for thread, count in enumerate(acknowledged) for n in range(count)}
        # The collection of garbage may move values to files that are not listed yet.
        for _ in range(20):
            for path in (tmp_path / "db").glob("*.blob"):
                found.update((name, text) for name, text, _ in read_file(client, int(path.stem)))
            if wanted <= found.keys():
                break
        for thread, count in enumerate(acknowledged):
            for n in range(thread * 1_000_000, thread * 1_000_000 + count):
                # While a file is made, values go to the log, and from there into tables.
                text = found.get(key(n)) or b"".join(client.call("MR.GET", key(n)))
                assert text == value(n), n
        assert all(text == value(int(name[4:])) for name, text in found.items())


def test_a_race_with_read_ahead_verifies_every_value_in_few_round_trips(tmp_path):
    flags = ["--threads", "4", "--sets", "10000", "--cache", "128M", "--read-ahead", "10M", "--memory", "64M"]
    # Gets of the first values, which are in tables, are a round trip each.
    said = millrace.said_json("bench", "race", "--data", tmp_path, *flags, "--durability", "process")
    assert said["sequential_verified"] == 40000 and said["hot_verified"] > 40000
    assert said["stretches"] > 5 and said["read_ahead"] == 10 << 20
    # The cache is a little smaller than the values, so how many stretches the hot pass fetches depends on the machine.
    assert said["sequential_gets_per_round_trip"] > 10 and said["hot_gets_per_round_trip"] > 2


def test_a_race_with_read_ahead_against_redis_reads_plainly(tmp_path):
    with millrace.redis_server(tmp_path, tmp_path / "log") as server:
        flags = ["--threads", "4", "--sets", "1000", "--cache", "64M", "--read-ahead", "10M"]
        said = millrace.said_json("bench", "race", "--connect", f"127.0.0.1:{server.port}", *flags)
        assert said["sequential_verified"] == 4000 and said["stretches"] == 0


@pytest.mark.parametrize("cuts", [[], ["cut"]], ids=["quiet", "cut"])
def test_readers_that_read_ahead_never_go_back(tmp_path, cuts):
    """With writers, and a node that moves values when it collects garbage."""
    prime(tmp_path)
    flags = ["--blob-min", "1K", "--blob-space-max-ratio", "1.3", "--memory", "64M", "--cores", "2", "--durability", "process"]
    with millrace.node(tmp_path / "db", tmp_path / "log", *flags, writes=True) as node:
        done = subprocess.run([AHEAD, f"127.0.0.1:{node.port}", *cuts], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
