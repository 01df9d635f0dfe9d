"""A full disk: a small file system, mounted where only the node sees it."""

import random
import resource
import signal
import time

import millrace
import pytest
import resp
from databases import ldb
from small_disk import SmallDisk

OK = resp.Simple(b"OK")


def value(number):
    return random.Random(number).randbytes(20_000)


def write_until_refused(client, first):
    """The first refused key, and the error."""
    for number in range(first, first + 20_000):
        reply = client.call("SET", f"key:{number}", value(number))
        if reply != OK:
            assert isinstance(reply, resp.Error), reply
            return number, str(reply)
    raise AssertionError("no write was refused")


def write_again(client, number):
    """Writes a key as soon as there is space."""
    deadline = time.monotonic() + 30
    while (reply := client.call("SET", f"key:{number}", value(number))) != OK:
        assert isinstance(reply, resp.Error) and time.monotonic() < deadline, reply
        time.sleep(0.05)


def until_all_is_well(client):
    """Waits until background writes have found space, too."""
    deadline = time.monotonic() + 30
    while (said := persistence(client))["disk_full"] != "0":
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def persistence(client):
    return dict(line.split(":", 1) for line in client.call("INFO", "persistence").decode().splitlines() if ":" in line)


def all_there(client, keys):
    for number in range(keys):
        assert client.call("GET", f"key:{number}") == value(number), number
    assert client.call("GET", f"key:{keys}") is None


def found_by_rocksdb(path):
    """The keys that `ldb` finds."""
    return set(ldb(path, "scan", "--no_value").split())


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_full_disk_refuses_writes_until_there_is_space_and_still_reads(durability, tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    with SmallDisk(mount) as disk:
        with disk.node(tmp_path / "log", durability) as node, node.connect() as client:
            node.until_ready()
            keys = 0
            for _ in range(2):
                disk.fill(4)
                keys, refusal = write_until_refused(client, keys)
                assert "MISCONF" in refusal and "the disk is full" in refusal, refusal
                time.sleep(2)
                all_there(client, keys)
                said = persistence(client)
                assert (said["disk_full"], said["write_failure"], said["aof_last_write_status"]) == ("1", "", "err"), said
                disk.make_space()
                write_again(client, keys)
                keys += 1
                until_all_is_well(client)
            assert persistence(client)["disk_full_times"] >= "2"
            assert node.said().count("the disk is full") == int(persistence(client)["disk_full_times"]), node.said()
            all_there(client, keys)
            # Killed on a full disk, and started again with free space.
            disk.fill(1)
            keys, _ = write_until_refused(client, keys)
            node.process.send_signal(signal.SIGKILL)
            node.process.wait()
        assert found_by_rocksdb(disk.inside() / "db") == {f"key:{number}" for number in range(keys)}
        disk.make_space()
        with disk.node(tmp_path / "log2", durability) as node, node.connect() as client:
            all_there(client, keys)
            write_again(client, keys)
            # Clearing frees space, even if there is none for other writes.
            disk.fill(4)
            write_until_refused(client, keys + 1)
            disk.fill(0)
            assert client.call("FLUSHALL") == OK
            write_again(client, 0)
            assert client.call("DBSIZE") == 1
        ldb(disk.inside() / "db", "checkconsistency")
        assert found_by_rocksdb(disk.inside() / "db") == {"key:0"}


def test_a_file_size_limit_refuses_writes_and_does_not_kill_the_node(tmp_path):
    """The kernel's SIGXFSZ once ended the process."""
    limit = 1 << 20

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True, preexec_fn=small_files) as node:
        with node.connect() as client:
            keys, refusal = write_until_refused(client, 0)
            assert "MISCONF" in refusal and "ulimit -f" in refusal, refusal
            all_there(client, keys)
            assert persistence(client)["write_failure"] == ""
        assert node.alive()
        node.process.kill()
    with millrace.node(tmp_path / "db", tmp_path / "log2", writes=True) as node:
        node.until_ready()
        with node.connect() as client:
            all_there(client, keys)
            assert client.call("SET", "after", "x") == OK
