"""Flips one bit in every kind of block: `kv check` names file and offset, and everything else is still readable."""

import json
import random
import re

import databases
import layout
import millrace
import pytest
import resp

# kind of part -> a database that has one; `layout.table` finds the parts of tables.
TABLES = [
    ("data", "db_bench-dictionary-zstd"),
    ("data", "rocksdict-format-version-6"),
    ("data", "db_bench-format-version-2"),
    ("data", "db_bench-checksum-crc32c"),
    ("data", "db_bench-checksum-xxhash"),
    ("data", "db_bench-checksum-xxhash64"),
    ("index", "db_bench-format-version-5"),
    ("index", "rocksdict-index-kTwoLevelIndexSearch"),
    ("filter", "db_bench-format-version-5"),
    ("filter-index", "rocksdict-filter-partitioned"),
    ("rocksdb.properties", "db_bench-format-version-5"),
    ("rocksdb.range_del", "rocksdict-range-deletes-flushed"),
    ("rocksdb.compression_dict", "db_bench-dictionary-zstd"),
    ("metaindex", "db_bench-format-version-5"),
    ("metaindex", "rocksdict-format-version-6"),
    ("footer", "db_bench-format-version-5"),
    ("footer", "rocksdict-format-version-6"),
]
BLOBS = ["blob-header", "blob-record-header", "blob-value", "blob-footer"]


def named(said, file, part):
    """Asserts that a line names the file and an offset inside the part."""
    lines = [line for line in said.splitlines() if file.name in line]
    assert lines, f"{file.name} is not named: {said}"
    places = [int(place) for line in lines for place in re.findall(r"\bat (?:offset )?(\d+)", line)]
    assert any(part.start <= place < part.end for place in places), f"no offset in {part.start}..{part.end}: {said}"


def checked(data, file, part):
    """Asserts that `kv check` fails and names the damage, as text and as JSON."""
    done = millrace.command("kv", "check", "--data", data)
    assert done.returncode == 1, f"kv check: {done.returncode}\n{done.stdout}{done.stderr}"
    named(done.stdout, file, part)
    done = millrace.command("kv", "check", "--data", data, "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["ok"] is False
    places = [damage["offset"] for damage in said["damages"] if damage["file"] == file.name]
    assert any(place is not None and part.start <= place < part.end for place in places), (part, said)


def read_around(data, log, expected):
    """Serves the damaged directory; returns the numbers of keys read and of errors. A wrong value or a nil fails."""
    right = errors = 0
    with millrace.node(data, log) as node, node.connect() as client:
        replies = client.pipeline([("GET", key) for key, _ in expected])
        for (key, value), reply in zip(expected, replies):
            if isinstance(reply, resp.Error):
                errors += 1
            else:
                assert reply == value, f"{key!r}: {reply!r} instead of {value!r}"
                right += 1
        assert client.call("PING") == b"PONG"
    return right, errors


def table_with(data, kind):
    """The first table that has such a part, and the part."""
    for file in sorted(data.glob("*.sst")):
        for part in layout.table(file):
            if part.kind == kind and part.end - part.start > 8:
                return file, part
    raise AssertionError(f"no table in {data} has a part {kind}")


@pytest.mark.parametrize("kind,name", TABLES)
def test_a_bit_in_a_table(kind, name, own_copy, workshop, tmp_path, long):
    data = own_copy(name)
    file, part = table_with(data, kind)
    places = {"footer": [part.end - 3, part.start + 1]}.get(kind, [part.middle])
    if long and kind != "footer":
        places = list(range(part.start, part.end, max(1, (part.end - part.start) // 24)))
    for bit, place in enumerate(places):
        layout.flip(file, place, bit % 8)
        checked(data, file, part)
        try:
            right, errors = read_around(data, tmp_path / "log", databases.expected(workshop.directory(name)))
        except AssertionError as refused:
            # Damage to a part that the whole file depends on may keep the node from starting, with an explanation.
            if kind not in ("footer", "metaindex", "rocksdb.properties", "index", "rocksdb.range_del") or "it ended with" not in str(refused):
                raise
            assert file.name in str(refused)
        else:
            if kind == "data":
                assert right > 0 and errors > 0, (right, errors)
        layout.flip(file, place, bit % 8)
    millrace.succeed("kv", "check", "--data", data)


@pytest.mark.parametrize("kind", BLOBS)
def test_a_bit_in_a_blob_file(kind, own_copy, workshop, tmp_path):
    name = "rocksdict-blobs-kNoCompression"
    data = own_copy(name)
    file = sorted(data.glob("*.blob"))[0]
    part = next(part for part in layout.blob(file) if part.kind == kind)
    layout.flip(file, part.middle if kind != "blob-value" else part.end - 3)
    checked(data, file, part)
    if kind == "blob-value":
        right, errors = read_around(data, tmp_path / "log", databases.expected(workshop.directory(name)))
        assert errors == 1 and right == 2999


@pytest.mark.parametrize("name", ["rocksdict-wal-only", "db_bench-wal-only", "rocksdict-wal-recycled"])
def test_a_bit_in_a_wal(name, own_copy):
    data = own_copy(name)
    file = max(data.glob("*.log"))
    records = layout.log(file)
    assert len(records) > 100
    part = records[len(records) // 2]
    layout.flip(file, part.end - 1)
    checked(data, file, part)


def test_a_bit_in_the_manifest(own_copy):
    data = own_copy("rocksdict-many-manifest-records")
    file = max(data.glob("MANIFEST-*"))
    records = layout.log(file)
    part = records[len(records) // 2]
    layout.flip(file, part.end - 1)
    checked(data, file, part)
    said = millrace.fail("serve", "--read-only", "--listen", f"127.0.0.1:{millrace.free_port()}", "--data", data)
    named(said, file, part)


def test_current_that_names_a_missing_manifest(own_copy):
    data = own_copy("db_bench-format-version-5")
    (data / "CURRENT").write_text("MANIFEST-099999\n")
    assert "MANIFEST-099999" in millrace.fail("kv", "scan", "--data", data)
    (data / "CURRENT").write_bytes(b"\xff\0garbage")
    assert "CURRENT" in millrace.fail("kv", "scan", "--data", data)


def test_a_missing_or_truncated_table(own_copy):
    data = own_copy("db_bench-format-version-5")
    file = sorted(data.glob("*.sst"))[0]
    whole = file.read_bytes()
    for cut in (len(whole) // 2, 10, 0):
        file.write_bytes(whole[:cut])
        done = millrace.command("kv", "check", "--data", data)
        assert 0 < done.returncode < 100 and file.name in done.stdout + done.stderr, (cut, done)
    file.unlink()
    done = millrace.command("kv", "check", "--data", data)
    assert 0 < done.returncode < 100 and file.name in done.stdout + done.stderr, done


def test_a_scan_stops_at_the_damage_and_can_start_after_it(own_copy, workshop, tmp_path):
    name = "db_bench-format-version-5"
    data = own_copy(name)
    expected = databases.expected(workshop.directory(name))
    file, part = table_with(data, "data")
    layout.flip(file, part.middle)
    done = millrace.command("kv", "scan", "--hex", "--data", data)
    assert 0 < done.returncode < 100 and file.name in done.stderr
    half = len(expected) // 2
    assert millrace.scan(data, "--from", expected[half][0].hex()) == expected[half:]
    with millrace.node(data, tmp_path / "log") as node, node.connect() as client:
        assert isinstance(client.call("MR.RANGE", "-", "+"), resp.Error)
        flat = client.call("MR.RANGE", b"[" + expected[half][0], "+")
        assert list(zip(flat[::2], flat[1::2])) == expected[half:]


def test_random_bytes_anywhere_never_crash_it(own_copy, tmp_path, long):
    """Random damage is always reported by an exit code and a message."""
    rng = random.Random(9)
    for name in ("rocksdict-column-families", "db_bench-range-tombstones", "rocksdict-blobs-kZSTD"):
        data = own_copy(name)
        files = [f for f in sorted(data.iterdir()) if f.stat().st_size and not f.name.startswith(("LOG", "OPTIONS", "IDENTITY"))]
        for _ in range(60 if long else 6):
            file = rng.choice(files)
            before = file.read_bytes()
            broken = bytearray(before)
            for _ in range(rng.randint(1, 4)):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            file.write_bytes(broken)
            for command in (["kv", "check"], ["kv", "scan", "--hex"], ["kv", "stat"]):
                done = millrace.command(*command, "--data", data)
                assert 0 <= done.returncode < 100 and "panicked" not in done.stderr, (file.name, command, done.stderr[-2000:])
            file.write_bytes(before)
