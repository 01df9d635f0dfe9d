"""Copies of whole databases: `kv checkpoint`, `kv backup` and `kv restore`, of a directory and of a running node, judged by RocksDB's tools."""

import json
import pathlib
import random
import signal
import socket
import subprocess
import threading
import time

import databases
import millrace
import pytest
import resp
from test_transfer import fed, writable


class Writing(threading.Thread):
    """Sets k000000, k000001, ..., at most one in a millisecond, until it is stopped: slow copies shall not be large."""

    def __init__(self, node):
        super().__init__()
        self.node, self.acknowledged, self.stopped = node, 0, False
        self.start()

    def run(self):
        with self.node.connect() as client:
            while not self.stopped:
                client.call("SET", b"k%06d" % self.acknowledged, b"v" * (self.acknowledged % 3000))
                self.acknowledged += 1
                time.sleep(0.001)

    def stop(self):
        self.stopped = True
        self.join()


def is_prefix(pairs, least):
    """Checks that a copy holds the first writes, at least those that were acknowledged before it was made."""
    assert [key for key, _ in pairs] == [b"k%06d" % n for n in range(len(pairs))]
    assert all(len(value) == n % 3000 for n, (_, value) in enumerate(pairs))
    assert len(pairs) >= least


def scanned_by_rocksdb(directory):
    """The pairs that RocksDB finds."""
    databases.ldb(directory, "checkconsistency")
    lines = databases.ldb(directory, "scan", "--hex").splitlines()
    halves = [line.replace(" ==> ", " : ").split(" : ") for line in lines if " : " in line or " ==> " in line]
    return [(bytes.fromhex(key.strip()[2:]), bytes.fromhex(value.strip()[2:])) for key, value in halves]


@pytest.mark.parametrize("sandbox", ["off", "on"])
def test_a_running_node_is_copied_while_it_is_written_to(tmp_path, sandbox):
    backups = tmp_path / "backups"
    with writable(tmp_path / "db", tmp_path / "log", "--durability", "process", "--sandbox", sandbox) as node:
        node.until_ready()
        writing = Writing(node)
        made = []
        try:
            for round in range(3):
                while writing.acknowledged < 2000 * (round + 1):
                    assert node.alive() and writing.is_alive(), node.said()
                least, copy = writing.acknowledged, tmp_path / f"copy{round}"
                said = millrace.said_json("kv", "checkpoint", copy)
                assert said["files"] > 2 and said["directory"] == str(copy)
                made.append((least, copy))
                said = millrace.said_json("kv", "backup", "create", backups)
                assert said["id"] == round + 1 and (round < 2 or said["copied_bytes"] < said["bytes"]), said
            told = millrace.fail("kv", "checkpoint", tmp_path / "other", "--data", tmp_path / "db")
            assert "open for writing" in told and "--admin" in told, told
        finally:
            writing.stop()
    for round, (least, copy) in enumerate(made):
        is_prefix(millrace.scan(copy), least)
        restored = tmp_path / f"restored{round}"
        said = millrace.said_json("kv", "restore", backups, "--data", restored, "--id", round + 1)
        assert said["id"] == round + 1 and said["kept_bytes"] == 0
        is_prefix(millrace.scan(restored), least)
        assert scanned_by_rocksdb(restored) == millrace.scan(restored)
        assert scanned_by_rocksdb(copy) == millrace.scan(copy)
    by_rocksdb = tmp_path / "by-rocksdb"
    databases.ldb(by_rocksdb, "restore", f"--backup_dir={backups}")
    is_prefix(scanned_by_rocksdb(by_rocksdb), made[-1][0])


END = 4_000_000_000_000


class Overwriting(threading.Thread):
    """Sets 50 keys again and again, to the number of the write, with the deadline END plus this number."""

    def __init__(self, node):
        super().__init__()
        self.node, self.written, self.stopped = node, 0, False
        self.start()

    def run(self):
        with self.node.connect() as client:
            while not self.stopped:
                for n in range(self.written, self.written + 20):
                    client.send(resp.encode("SET", b"k%d" % (n % 50), b"%d" % n, "PXAT", END + n))
                for _ in range(20):
                    assert client.reply() == resp.Simple(b"OK")
                self.written += 20

    def stop(self):
        self.stopped = True
        self.join()


def has_deadlines(directory, log, least):
    """Checks that each key of a copy has the deadline of its value, and that the copy holds the writes before it."""
    with millrace.node(directory, log, writes=True) as node, node.connect() as client:
        keys = [b"k%d" % n for n in range(50)]
        values = [int(value) for value in client.call("MGET", *keys)]
        assert min(values) >= least - 50, (min(values), least)
        assert [client.call("PEXPIRETIME", key) for key in keys] == [END + n for n in values]


@pytest.mark.parametrize("durability", ["process", "power"])
def test_copies_hold_the_deadlines_of_keys(tmp_path, durability):
    data, backups = tmp_path / "db", tmp_path / "backups"
    made = []
    with writable(data, tmp_path / "log", "--durability", durability) as node:
        node.until_ready()
        writing = Overwriting(node)
        try:
            for round in range(4):
                before = writing.written
                while writing.written < before + 400:
                    assert node.alive() and writing.is_alive(), node.said()
                made.append(writing.written)
                millrace.succeed("kv", "checkpoint", tmp_path / f"copy{round}")
                made.append(writing.written)
                said = millrace.said_json("kv", "backup", "create", backups)
                assert said["id"] == round + 1, said
        finally:
            writing.stop()
    # Of directories that nobody has open.
    made.append(writing.written)
    millrace.succeed("kv", "checkpoint", tmp_path / "copy4", "--data", data)
    made.append(writing.written)
    assert millrace.said_json("kv", "backup", "create", backups, "--data", data)["id"] == 5
    for round in range(5):
        restored = tmp_path / f"restored{round}"
        millrace.succeed("kv", "restore", backups, "--data", restored, "--id", round + 1)
        has_deadlines(tmp_path / f"copy{round}", tmp_path / f"copy{round}.log", made[2 * round])
        has_deadlines(restored, tmp_path / f"restored{round}.log", made[2 * round + 1])
    # Both parts of a backup are verified and removed.
    within = backups / "millrace-expiry"
    assert sorted(path.name for path in (within / "meta").iterdir()) == list("12345")
    damaged = next((within / "private" / "5").glob("MANIFEST*"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:20] + b"x" + whole[21:])
    said = millrace.command("kv", "backup", "verify", backups, "--json")
    assert said.returncode == 1 and "millrace-expiry/private/5/" in json.loads(said.stdout)["damages"][0], said.stdout
    assert "checksum" in millrace.fail("kv", "restore", backups, "--data", tmp_path / "damaged")
    damaged.write_bytes(whole)
    # What the failed attempt has left is taken over.
    assert millrace.said_json("kv", "restore", backups, "--data", tmp_path / "damaged")["kept_bytes"] > 0
    has_deadlines(tmp_path / "damaged", tmp_path / "damaged.log", made[-1])
    assert millrace.said_json("kv", "backup", "purge", backups, "--keep", "2")["deleted"] == [1, 2, 3]
    assert sorted(path.name for path in (within / "meta").iterdir()) == list("45")
    assert sorted(path.name for path in (within / "private").iterdir()) == list("45")
    # RocksDB restores the database without them.
    by_rocksdb = tmp_path / "by-rocksdb"
    databases.ldb(by_rocksdb, "restore", f"--backup_dir={backups}")
    assert len(scanned_by_rocksdb(by_rocksdb)) == 50


def with_one_deadline(data, log):
    with writable(data, log) as node, node.connect() as client:
        assert client.call("SET", "k", "v", "PXAT", END) == resp.Simple(b"OK")


def deadline(directory, log):
    with millrace.node(directory, log, writes=True) as node, node.connect() as client:
        return client.call("PEXPIRETIME", "k")


def test_deadlines_of_a_backup_that_are_lost_or_of_another_one_are_not_taken(tmp_path):
    data, backups = tmp_path / "db", tmp_path / "backups"
    with_one_deadline(data, tmp_path / "log")
    for _ in range(2):
        millrace.succeed("kv", "backup", "create", backups, "--data", data)
    within = backups / "millrace-expiry" / "meta"
    lost = (within / "2").read_bytes()
    (within / "2").unlink()
    listed = millrace.command("kv", "backup", "list", backups, "--json")
    assert listed.returncode == 1, listed.stdout
    assert "millrace-expiry/meta/2: it is missing" in json.loads(listed.stdout)["damaged"][0]
    for command in (("verify", backups), ("restore", backups, "--data", tmp_path / "lost")):
        command = command if command[0] == "restore" else ("backup", *command)
        assert "millrace-expiry/meta/2: it is missing" in millrace.fail("kv", *command)
    # RocksDB deletes the newest backup, and uses its number again.
    (within / "2").write_bytes(lost)
    (backups / "meta" / "2").unlink()
    databases.ldb(data, "backup", f"--backup_dir={backups}")
    millrace.succeed("kv", "restore", backups, "--data", tmp_path / "of-rocksdb", "--id", "2")
    assert deadline(tmp_path / "of-rocksdb", tmp_path / "log2") == -1
    millrace.succeed("kv", "restore", backups, "--data", tmp_path / "ours", "--id", "1")
    assert deadline(tmp_path / "ours", tmp_path / "log1") == END
    millrace.succeed("kv", "backup", "delete", backups, "--id", "1")
    assert not any(within.iterdir()), "nobody needs them"


def contents(path):
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [(file.name, file.read_bytes()) for file in files if file.is_file()]


def test_a_link_in_the_place_of_an_unfinished_copy_stays(tmp_path):
    data, backups = tmp_path / "db", tmp_path / "backups"
    with_one_deadline(data, tmp_path / "log")
    millrace.succeed("kv", "backup", "create", backups, "--data", data)
    for place in ("millrace-expiry", "000007.sst", "MANIFEST-000001"):
        theirs = tmp_path / f"theirs-{place}"
        if place == "millrace-expiry":
            millrace.succeed("kv", "checkpoint", theirs, "--data", data)
        else:
            theirs.write_bytes(b"theirs")
        before = contents(theirs)
        draft = tmp_path / f"new-{place}.tmp"
        draft.mkdir()
        (draft / "MILLRACE-COPY").touch()
        (draft / place).symlink_to(theirs)
        for command in (("restore", backups, "--data"), ("checkpoint", "--data", data)):
            told = millrace.fail("kv", *command, tmp_path / f"new-{place}")
            assert "in the way" in told and place in told, told
        assert contents(theirs) == before


def test_backups_of_a_directory_are_listed_verified_deleted_and_restored(tmp_path):
    data, backups = tmp_path / "db", tmp_path / "backups"
    for value in b"12":
        assert fed(b"a\tone\nb\t%c\n" % value, "kv", "import", "--data", data).returncode == 0
        told = millrace.succeed("kv", "backup", "create", backups, "--data", data, "--rate-limit", "100M")
        assert told.startswith(f"made backup {value - 48} in {backups}: "), told
    listed = millrace.said_json("kv", "backup", "list", backups)
    assert [backup["id"] for backup in listed["backups"]] == [1, 2] and listed["damaged"] == []
    table = millrace.succeed("kv", "backup", "list", backups).splitlines()
    assert table[0].split() == ["BACKUP", "TIME", "(UTC)", "FILES", "SIZE", "SEQUENCE"] and len(table) == 3
    assert millrace.said_json("kv", "backup", "verify", backups)["damages"] == []
    millrace.succeed("kv", "restore", backups, "--data", tmp_path / "first", "--id", "1")
    assert millrace.scan(tmp_path / "first") == [(b"a", b"one"), (b"b", b"1")]
    assert "not empty" in millrace.fail("kv", "restore", backups, "--data", tmp_path / "first")
    shared = next((backups / "private" / "2").glob("MANIFEST*"))
    whole = shared.read_bytes()
    shared.write_bytes(whole[:20] + b"x" + whole[21:])
    damaged = millrace.command("kv", "backup", "verify", backups, "--json")
    assert damaged.returncode == 1 and "checksum" in json.loads(damaged.stdout)["damages"][0]
    assert "checksum" in millrace.fail("kv", "restore", backups, "--data", tmp_path / "second")
    shared.write_bytes(whole)
    assert millrace.said_json("kv", "backup", "purge", backups, "--keep", "1")["deleted"] == [1]
    assert "no backup 1" in millrace.fail("kv", "backup", "delete", backups, "--id", "1")
    said = millrace.said_json("kv", "restore", backups, "--data", tmp_path / "second")
    assert said["id"] == 2 and millrace.scan(tmp_path / "second") == [(b"a", b"one"), (b"b", b"2")]
    assert "no backups here" in millrace.fail("kv", "backup", "list", tmp_path)


def test_a_backup_by_rocksdb_is_restored(own_copy, tmp_path):
    database = own_copy("ldb-put")
    databases.ldb(database, "backup", f"--backup_dir={tmp_path / 'backups'}")
    millrace.succeed("kv", "restore", tmp_path / "backups", "--data", tmp_path / "restored")
    assert millrace.scan(tmp_path / "restored") == millrace.scan(database)


def external_tables(directory, parts):
    """Has RocksDB's SstFileWriter make a table of each part."""
    files = []
    for number, part in enumerate(parts):
        files.append(directory / f"part{number}.sst")
        text = "".join(f"{key} ==> {value}\n" for key, value in sorted(part.items()))
        databases.ldb(directory / "unused", "--create_if_missing", "write_extern_sst", files[-1], text=text)
    return files


def test_tables_are_ingested_into_a_running_node_and_into_a_directory(tmp_path):
    data = tmp_path / "db"
    parts = [{f"a{n:05d}": "new" for n in range(0, 3000, 3)}, {f"b{n:05d}": "new" for n in range(1000)}]
    files = external_tables(tmp_path, parts)
    before = [file.read_bytes() for file in files]
    with writable(data, tmp_path / "log", "--durability", "process") as node:
        node.until_ready()
        with node.connect() as client:
            assert client.call("SET", b"c", b"here") in (b"OK", "OK")
            said = millrace.said_json("kv", "ingest", files[1])
            assert said["entries"] == 1000 and said["sequence"] == 0 and said["levels"] == [6]
            # Nothing was there: the number of keys stays exact.
            assert client.call("DBSIZE") == 1001 and client.call("GET", b"b00007") == b"new"
            client.call("SET", b"a00003", b"old")
            client.call("SET", b"a00004", b"stays")
            said = millrace.said_json("kv", "ingest", "--move", files[0])
            assert said["sequence"] > 0 and not files[0].exists()
            assert [client.call("GET", key) for key in (b"a00003", b"a00004", b"a00006")] == [b"new", b"stays", b"new"]
            # A change sees what was ingested.
            assert client.call("APPEND", b"a00009", b"er") == 5 and client.call("DEL", b"a00012") == 1
    assert files[1].read_bytes() == before[1]
    pairs = dict(millrace.scan(data))
    assert len(pairs) == 1001 + 1000 + 1 - 1 and pairs[b"a00009"] == b"newer"
    assert dict(scanned_by_rocksdb(data)) == pairs
    files[0].write_bytes(before[0])
    told = millrace.succeed("kv", "ingest", files[0], "--data", data)
    assert told.startswith("ingested 1 files with 1,000 entries"), told
    pairs.update({key.encode(): b"new" for key in parts[0]})
    assert dict(millrace.scan(data)) == pairs
    assert dict(scanned_by_rocksdb(data)) == pairs
    files[0].write_bytes(before[0][:200] + b"?" + before[0][201:])
    told = millrace.fail("kv", "ingest", files[0], "--data", data)
    assert "checksum" in told and "nothing was ingested" in told, told
    assert dict(millrace.scan(data)) == pairs


def test_numbers_of_an_ingestion_whose_program_is_gone_are_released(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_STATE", str(tmp_path / "state"))

    def ask(connection, command, **arguments):
        connection.sendall(json.dumps({"version": 1, "command": command, **arguments}).encode() + b"\n")
        return json.loads(connection.makefile().readline())

    def connect():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(30)
        connection.connect(str(tmp_path / "state" / "admin.sock"))
        return connection

    with writable(tmp_path / "db", tmp_path / "log") as node:
        node.until_ready()
        with connect() as other:
            with connect() as program:
                # As many as may be reserved.
                begun = ask(program, "ingest-begin", files=100_000)["result"]
                numbers = begun["numbers"][:2]
                placed = pathlib.Path(begun["directory"], f"{numbers[0]:06}.dbtmp")
                placed.write_bytes(b"a part of a table")
                assert "result" in ask(program, "ingest-renew", numbers=numbers)
                assert "may wait" in ask(other, "ingest-begin", files=1)["error"]
                assert ask(program, "ingest-release", numbers=numbers[1:])["result"]["released"] == 1
                assert "does not expect" in ask(program, "ingest-renew", numbers=numbers)["error"]
            # The program has gone.
            deadline = time.monotonic() + 30
            while "error" in ask(other, "ingest-begin", files=1) or placed.exists():
                assert time.monotonic() < deadline, "the numbers are not released"
                time.sleep(0.02)
            finish = {"column_family": "default", "numbers": numbers}
            assert "does not expect" in ask(other, "ingest-finish", **finish)["error"]


def test_sorted_input_becomes_tables_and_an_interrupted_import_is_resumed(tmp_path):
    data = tmp_path / "db"
    lines = [b"k%07d\t%s\n" % (n, b"v%d" % n * 20) for n in range(30_000)]
    done = fed(b"".join(lines), "kv", "import", "--data", data, "--json")
    said = json.loads(done.stdout)
    assert said["entries"] == said["loaded"] == 30_000 and said["skipped"] == 0, done
    levels = millrace.said_json("kv", "stat", "--data", data)["column_families"][0]["levels"]
    assert [level["entries"] for level in levels if level["entries"]] == [30_000], levels
    more = [b"k%07d\t%s\n" % (n, b"w" * 50) for n in range(30_000, 60_000)]
    said = json.loads(fed(b"".join(lines + more), "kv", "import", "--data", data, "--resume", "--json").stdout)
    assert said["skipped"] == said["entries"] == said["loaded"] == 30_000, said
    # Where the order ends, the rest is written as usual; also where there are keys already.
    tail = [b"k0000005\tchanged\n", b"z\tlast\n"]
    high = [b"x%07d\t%s\n" % (n, b"y" * 100) for n in range(20_000)]
    done = fed(b"".join(high + tail), "kv", "import", "--data", data, "--json")
    said = json.loads(done.stdout)
    assert said["entries"] == 20_002 and said["loaded"] == 20_000, said
    found = dict(millrace.scan(data))
    assert len(found) == 80_001 and found[b"k0000005"] == b"changed" and found[b"k0000004"] == b"v4" * 20
    assert dict(scanned_by_rocksdb(data)) == found
    with writable(data, tmp_path / "log") as node:
        node.until_ready()
        with node.connect() as client:
            assert node.counts_keys() and client.call("DBSIZE") == 80_001
    told = fed(b"".join(high + [b"no tab\n"]), "kv", "import", "--data", tmp_path / "other")
    assert told.returncode == 2 and b"line 20001" in told.stderr, told
    assert len(millrace.scan(tmp_path / "other")) == 20_000
    assert b"another value" in fed(b"z\tother\n", "kv", "import", "--data", data, "--resume").stderr
    assert b"not sorted" in fed(b"b\t1\na\t1\n", "kv", "import", "--data", data, "--resume").stderr


def files_of(directory):
    """The files in a directory, with what they hold."""
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def filled(tmp_path):
    """A database with two backups of different contents."""
    data = tmp_path / "db"
    for round in range(2):
        values = random.Random(round)
        lines = [b"k%05d\t%s\n" % (n, values.randbytes(500).hex().encode()) for n in range(4000)]
        assert fed(b"".join(lines), "kv", "import", "--data", data).returncode == 0
        millrace.succeed("kv", "backup", "create", tmp_path / "backups", "--data", data)
    return data


def test_a_database_in_the_place_of_an_unfinished_copy_stays(tmp_path, filled):
    copy, taken = tmp_path / "copy", tmp_path / "copy.tmp"
    with writable(taken, tmp_path / "log") as node:
        node.until_ready()
        with node.connect() as client:
            client.call("SET", b"k", b"v")
            for command in (("checkpoint", copy, "--data", filled), ("restore", tmp_path / "backups", "--data", copy)):
                told = millrace.fail("kv", *command)
                assert f"{taken}/" in told and "in the way" in told, told
            assert client.call("GET", b"k") == b"v"
    assert millrace.scan(taken) == [(b"k", b"v")] and not copy.exists()


def test_of_two_commands_that_make_one_directory_the_second_fails(tmp_path, filled):
    backups, target = tmp_path / "backups", tmp_path / "new"
    arguments = [millrace.BINARY, "kv", "restore", backups, "--data", target, "--id", "1", "--rate-limit"]
    # So slow that it is there until it is killed.
    first = subprocess.Popen([*map(str, arguments), "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    mark = tmp_path / "new.tmp" / "MILLRACE-COPY"
    try:
        while not mark.exists() or len(list(mark.parent.iterdir())) < 2:
            assert first.poll() is None, first.stderr.read()
        for command in (("restore", backups, "--data", target), ("checkpoint", target, "--data", filled)):
            told = millrace.fail("kv", *command)
            assert "another process is making this directory" in told, told
        assert first.poll() is None and not target.exists()
    finally:
        first.kill()
        first.communicate()
    assert mark.exists()
    assert millrace.said_json("kv", "restore", backups, "--data", target, "--id", "2")["id"] == 2
    assert millrace.scan(target) == millrace.scan(filled)
    assert not mark.parent.exists() and not (target / mark.name).exists()


def test_a_copy_that_cannot_work_is_refused_before_anything_is_written(tmp_path, filled):
    backups, before = tmp_path / "backups", files_of(tmp_path)
    (tmp_path / "link").symlink_to(filled)
    (tmp_path / "nowhere").symlink_to("missing")
    for copy in (filled, filled / "new", tmp_path / "link", tmp_path / "link" / "new", tmp_path):
        told = millrace.fail("kv", "backup", "create", copy, "--data", filled)
        assert "name a place outside of it" in told, told
    told = millrace.fail("kv", "checkpoint", filled / "new", "--data", filled)
    assert "is in" in told, told
    assert "is in" in millrace.fail("kv", "restore", backups, "--data", backups / "new")
    assert "nowhere" in millrace.fail("kv", "restore", backups, "--data", tmp_path / "nowhere")
    assert "root of a file system" in millrace.fail("kv", "restore", backups, "--data", "/proc")
    for command in (("checkpoint", "new", "--data", filled), ("restore", backups, "--data", "new"), ("ingest", "f")):
        assert "must be above 0" in millrace.fail("kv", *command, "--rate-limit", "0", cwd=tmp_path)
    other = tmp_path / "other"
    millrace.succeed("kv", "put", "k", "v", "--data", other)
    told = millrace.fail("kv", "backup", "create", backups, "--data", other)
    assert "another database" in told, told
    after = files_of(tmp_path)
    assert {path: after[path] for path in before} == before
    assert {path.parts[0] for path in after} == {path.parts[0] for path in before} | {"other"}
    # These do work.
    (tmp_path / "empty").mkdir()
    (tmp_path / "to-empty").symlink_to("empty")
    millrace.succeed("kv", "restore", backups, "--data", "to-empty/.", cwd=tmp_path)
    millrace.succeed("kv", "checkpoint", "./new/.", "--data", "db", cwd=tmp_path)
    for copy in ("empty", "new"):
        assert millrace.scan(tmp_path / copy) == millrace.scan(filled)
    assert not list(tmp_path.glob("*.tmp"))
    assert millrace.said_json("kv", "backup", "create", backups, "--data", other, "--any-database")["id"] == 3


def test_backups_take_the_used_part_of_logs_and_damage_of_one_hides_no_other(tmp_path):
    data, backups = tmp_path / "db", tmp_path / "backups"
    for round in range(2):
        millrace.succeed("kv", "put", f"k{round}", "v", "--data", data)
        assert max(path.stat().st_size for path in data.glob("*.log")) > 1 << 20
        said = millrace.said_json("kv", "backup", "create", backups, "--data", data)
        assert said["copied_bytes"] < 200_000, said
    databases.ldb(tmp_path / "by-rocksdb", "restore", f"--backup_dir={backups}")
    assert dict(scanned_by_rocksdb(tmp_path / "by-rocksdb")) == dict(millrace.scan(data)) == {b"k0": b"v", b"k1": b"v"}
    with open(backups / "meta" / "3", "wb") as long:
        long.truncate(300 << 20)
    listed = millrace.command("kv", "backup", "list", backups, "--json")
    said = json.loads(listed.stdout)
    assert listed.returncode == 1 and [backup["id"] for backup in said["backups"]] == [1, 2]
    assert len(said["damaged"]) == 1 and "meta/3" in said["damaged"][0], said
    told = millrace.fail("kv", "restore", backups, "--data", tmp_path / "restored")
    assert "meta/3" in told and "--id N" in told, told
    said = millrace.said_json("kv", "backup", "delete", backups, "--id", "1", "--id", "3", "--id", "1")
    assert said["deleted"] == [1, 3] and not (backups / "private" / "1").exists(), said


def test_a_copy_and_an_ingestion_say_what_is_wrong_in_the_words_of_the_user(tmp_path, filled, monkeypatch):
    part = external_tables(tmp_path, [{"a": "1", "b": "2"}])[0]
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    told = millrace.fail("kv", "ingest", "--no-verify", part, "--data", filled)
    assert str(part) in told and "dbtmp" not in told, told
    table = next(filled.glob("*.sst"))
    told = millrace.fail("kv", "ingest", "--no-verify", table, "--data", filled)
    assert f"{table} was not made by RocksDB's SstFileWriter" in told, told
    monkeypatch.setenv("MILLRACE_STATE", str(tmp_path / "state"))
    for command in (("ingest",), ("compaction", "limit")):
        assert "--state" not in millrace.fail("kv", *command)
    with writable(filled, tmp_path / "log") as node:
        node.until_ready()
        arguments = ["kv", "backup", "create", tmp_path / "others", "--rate-limit", "1M"]
        copying = subprocess.Popen([millrace.BINARY, *map(str, arguments)], stderr=subprocess.PIPE, text=True)
        while not list(tmp_path.glob("others/private/1/MANIFEST*")):
            assert copying.poll() is None, copying.stderr.read()
        # Stopped before it has opened all files.
        copying.send_signal(signal.SIGSTOP)
    for path in [*filled.glob("*.sst"), *filled.glob("*.log")]:
        path.unlink()
    copying.send_signal(signal.SIGCONT)
    told = copying.communicate()[1]
    assert copying.returncode == 2 and "the node ended during the copy" in told and "repeat the command" in told, told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_cancelled_backup_keeps_nothing_in_the_node(tmp_path, number):
    with writable(tmp_path / "db", tmp_path / "log", "--durability", "process", "--admin", tmp_path / "admin") as node:
        node.until_ready()
        with node.connect() as client:
            client.pipeline([("SET", b"k%06d" % n, random.randbytes(1000)) for n in range(3000)])
        # A node keeps files for eight programs at a time.
        for n in range(9):
            backups = tmp_path / f"backups{n}"
            flags = ("--rate-limit", "100K", "--admin", tmp_path / "admin")
            copying = subprocess.Popen(
                [millrace.BINARY, "kv", "backup", "create", backups, *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A shell starts what runs in its background with SIGINT ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            deadline = time.monotonic() + 20
            while not any(file.is_file() and file.stat().st_size for file in backups.rglob("*")):
                assert copying.poll() is None and time.monotonic() < deadline, copying.communicate()
                time.sleep(0.01)
            copying.send_signal(number)
            copying.communicate(timeout=20)
        millrace.succeed("kv", "backup", "create", tmp_path / "whole", "--admin", tmp_path / "admin")
