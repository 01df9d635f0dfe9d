"""Copies of whole databases: `kv checkpoint`, `kv backup` and `kv restore`, of a directory and of a running node, judged by RocksDB's tools."""

import json
import threading

import databases
import millrace
import pytest
from test_transfer import fed, writable


class Writing(threading.Thread):
    """Sets k000000, k000001, ... one after the other, until it is stopped."""

    def __init__(self, node):
        super().__init__()
        self.node, self.acknowledged, self.stopped = node, 0, False
        self.start()

    def run(self):
        with self.node.connect() as client:
            while not self.stopped:
                client.call("SET", b"k%06d" % self.acknowledged, b"v" * (self.acknowledged % 3000))
                self.acknowledged += 1

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
