"""RocksDB writes and Millrace reads: every database of databases.py, by every kind of read, against RocksDB's own scan."""

import os
import random
import re

import databases
import millrace
import pytest

READABLE = [name for name, db in databases.DATABASES.items() if db.error is None and db.may_refuse is None]
REFUSED = [name for name, db in databases.DATABASES.items() if db.error is not None]
EITHER = [name for name, db in databases.DATABASES.items() if db.may_refuse is not None]


class Made:
    """A finished database, its expected contents, and a node that serves it."""

    def __init__(self, name, directory, node):
        self.data = directory / "db"
        self.families = {f: databases.expected(directory, f) for f in databases.DATABASES[name].families}
        self.expected = self.families["default"]
        self.node = node


@pytest.fixture(scope="module")
def made(request, workshop, tmp_path_factory):
    directory = workshop.directory(request.param)
    log = tmp_path_factory.mktemp("node") / "log"
    with millrace.node(directory / "db", log) as node:
        yield Made(request.param, directory, node)


def same(ours, theirs, what):
    """Compares two scans, and reports the first difference instead of two long lists."""
    for number, (a, b) in enumerate(zip(ours, theirs)):
        assert a == b, f"{what}: entry {number} differs: ours {short(a)}, theirs {short(b)}"
    assert len(ours) == len(theirs), f"{what}: {len(ours)} entries instead of {len(theirs)}"


def short(pair):
    return tuple(part[:60] for part in pair)


def missing_keys(expected):
    """Absent keys, near the existing ones and far from them."""
    there = {key for key, _ in expected}
    rng = random.Random(1)
    some = rng.sample(sorted(there), min(200, len(there))) + [b"user0001:x"]
    near = [change for key in some for change in (key + b"\0", key[:-1], key + b"zzz", bytes([255]) + key)]
    far = [rng.randbytes(rng.randint(1, 30)) for _ in range(100)] + [b"", b"\0", b"\xff" * 9]
    return [key for key in near + far if key not in there]


@pytest.mark.parametrize("made", READABLE, indirect=True)
class TestReading:
    """Every kind of read returns what RocksDB reads."""

    def test_every_key_by_get_and_no_other(self, made):
        with made.node.connect() as client:
            values = client.pipeline([("GET", key) for key, _ in made.expected])
            same([(key, value) for (key, _), value in zip(made.expected, values)], made.expected, "GET")
            for key, value in zip(keys := missing_keys(made.expected), client.pipeline([("GET", key) for key in keys])):
                assert value is None, f"{key!r} is absent, but GET returned {value!r}"

    def test_every_key_by_multi_get(self, made):
        wanted = [(key, value) for key, value in made.expected] + [(key, None) for key in missing_keys(made.expected)]
        random.Random(2).shuffle(wanted)
        batches = [wanted[start : start + 64] for start in range(0, len(wanted), 64)]
        with made.node.connect() as client:
            replies = client.pipeline([("MGET", *(key for key, _ in batch)) for batch in batches], window=20)
        for batch, reply in zip(batches, replies):
            assert isinstance(reply, list), reply
            same([(key, value or b"") for (key, _), value in zip(batch, reply)], [(k, v or b"") for k, v in batch], "MGET")
            assert [value is None for value in reply] == [value is None for _, value in batch]

    def test_range_reads_in_both_directions(self, made):
        for direction in ([], ["REVERSE"]):
            theirs = made.expected[::-1] if direction else made.expected
            same(in_pages(made.node, direction, 700), theirs, f"MR.RANGE {direction}")

    def test_range_reads_between_two_keys(self, made):
        keys = [key for key, _ in made.expected]
        rng = random.Random(3)
        with made.node.connect() as client:
            for _ in range(15 if keys else 0):
                low = rng.randrange(len(keys))
                high = min(len(keys) - 1, low + rng.choice((0, 1, 2, 20, 150)))
                for reverse in (False, True):
                    ours = client.call("MR.RANGE", b"[" + keys[low], b"(" + keys[high], *(["REVERSE"] if reverse else []))
                    theirs = made.expected[low:high]
                    same(pairs(ours), theirs[::-1] if reverse else theirs, f"[{keys[low]!r} ({keys[high]!r} {reverse}")
                ours = client.call("MR.RANGE", b"(" + keys[low], b"[" + keys[high], "LIMIT", 7, "NOVALUES")
                assert ours == keys[low + 1 : high + 1][:7]

    def test_kv_scan_of_the_closed_directory(self, made):
        for family, theirs in made.families.items():
            flags = [] if family == "default" else ["--column-family", family]
            same(millrace.scan(made.data, *flags), theirs, f"kv scan of {family}")
            same(millrace.scan(made.data, "--reverse", *flags), theirs[::-1], f"kv scan --reverse of {family}")

    def test_nothing_is_damaged(self, made):
        millrace.succeed("kv", "check", "--data", made.data)


@pytest.mark.parametrize("name", ["rocksdict-layers", "db_bench-many-levels", "rocksdict-blobs-kZSTD", "rocksdict-odd-keys-two-level"])
@pytest.mark.parametrize("io", ["io_uring", "epoll"])
def test_two_cores_and_either_driver_read_the_same(io, name, workshop, tmp_path):
    directory = workshop.directory(name)
    expected = databases.expected(directory)
    with millrace.node(directory / "db", tmp_path / "log", "--cores", "2", "--io", io) as node:
        for _ in range(4):
            with node.connect() as client:
                values = client.pipeline([("GET", key) for key, _ in expected])
                same([(key, value) for (key, _), value in zip(expected, values)], expected, "GET")
        for direction in ([], ["REVERSE"]):
            same(in_pages(node, direction, 500), expected[::-1] if direction else expected, f"MR.RANGE {direction}")


def in_pages(node, direction, limit):
    """All pairs over RESP, `limit` at a time; each page starts after the last key of the page before."""
    found = []
    with node.connect() as client:
        start, end = "-", "+"
        while True:
            page = pairs(client.call("MR.RANGE", start, end, *direction, "LIMIT", limit))
            found += page
            if len(page) < limit:
                return found
            if direction:
                end = b"(" + page[-1][0]
            else:
                start = b"(" + page[-1][0]


def pairs(flat):
    """key, value, key, value as pairs."""
    assert isinstance(flat, list), flat
    return list(zip(flat[::2], flat[1::2]))


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_databases_are_errors_that_name_the_reason(name, workshop):
    data = workshop.directory(name) / "db"
    said = millrace.fail("kv", "scan", "--hex", "--data", data)
    assert re.search(databases.DATABASES[name].error, said), said


@pytest.mark.parametrize("name", EITHER)
def test_a_refusable_database_is_read_correctly_or_refused_by_name(name, workshop):
    directory = workshop.directory(name)
    done = millrace.command("kv", "scan", "--hex", "--data", directory / "db")
    if done.returncode == 0:
        same(millrace.pairs_of(done.stdout), databases.expected(directory), name)
    else:
        assert re.search(databases.DATABASES[name].may_refuse, done.stderr), done.stderr


def listing(directory):
    """Every file's name, size, modification time and contents."""
    return {
        path.name: (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
        for path in sorted(directory.iterdir())
    } | {"": os.stat(directory).st_mtime_ns}


@pytest.mark.parametrize("name", ["rocksdict-layers", "rocksdict-wal-recycled", "db_bench-reopened", "rocksdict-blobs-kZSTD"])
def test_reading_does_not_change_the_directory(name, own_copy, tmp_path):
    data = own_copy(name)
    before = listing(data)
    with millrace.node(data, tmp_path / "log") as node, node.connect() as client:
        client.call("MR.RANGE", "-", "+")
        client.call("GET", "user0001:00000050")
    millrace.scan(data)
    millrace.succeed("kv", "stat", "--data", data)
    millrace.succeed("kv", "check", "--data", data)
    assert listing(data) == before
