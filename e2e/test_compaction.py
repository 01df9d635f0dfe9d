"""Control over merges: `kv compact` on a node and on a directory, and `kv compaction`."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import time

import databases
import millrace
import pytest

ROUNDS = 3


def ask(node, command, **arguments):
    """A request at the admin socket of the state directory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as admin:
        admin.settimeout(30)
        admin.connect(str(pathlib.Path(os.environ["MILLRACE_STATE"], "admin.sock")))
        admin.sendall(json.dumps({"version": 1, "command": command, **arguments}).encode() + b"\n")
        return json.loads(admin.makefile().readline())["result"]


def fill(node, keys=range(3000), rounds=ROUNDS):
    """Writes every key several times, each time into a table of its own."""
    with node.connect() as client:
        for round in range(rounds):
            words = [("SET", b"k%06d" % n, b"%d-" % round + b"v" * 500) for n in keys]
            assert set(client.pipeline(words)) == {b"OK"}
            # Files are listed after memtables became tables.
            ask(node, "files-hold", log_bytes_max=0)


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_STATE", str(tmp_path / "state"))
    with millrace.node(tmp_path / "db", tmp_path / "log", "--cores", "2", writes=True) as node:
        node.until_ready()
        yield node


def status(*words):
    return millrace.said_json("kv", "compaction", *(words or ["status"]))


def levels():
    """{level: state} of the default family's levels with files."""
    family = next(family for family in status()["column_families"] if family["name"] == "default")
    return {level["level"]: level for level in family["levels"] if level["files"]}


def wait_for(what, is_so, seconds=30):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: {status()}"
        time.sleep(0.02)


def test_a_pause_stops_merges_and_a_request_compacts_all(tmp_path, node):
    assert status("pause") == {"paused": True, "was_paused": False}
    assert status("pause")["was_paused"]
    fill(node, rounds=5)
    before = status()
    assert before["paused"] and not before["jobs"], before
    assert levels().keys() == {0} and levels()[0]["files"] >= 5 and levels()[0]["score"] >= 1, before
    assert "paused" in millrace.fail("kv", "compact")
    assert "merges are paused" in millrace.succeed("kv", "compaction", "status")
    assert status("resume") == {"paused": False, "was_paused": True}
    assert not millrace.said_json("kv", "compact")["cancelled"]
    wait_for("one level", lambda: len(levels()) == 1 and not status()["jobs"])
    (level,) = levels().values()
    assert level["level"] > 0 and level["merges"] > 0 and level["written_bytes"] > 0, level
    family = status()["column_families"][0]
    assert family["space_amplification"] == 1 and family["write_amplification"] > 1, family
    with node.connect() as client:
        assert client.call("GET", b"k000007").startswith(b"4-")
        info = client.call("INFO", "compaction")
        assert b"compaction_paused:0" in info and b"family0_level%d:files=" % level["level"] in info, info
    node.stop()
    databases.ldb(tmp_path / "db", "checkconsistency")
    stat = millrace.said_json("kv", "stat", "--data", tmp_path / "db")["column_families"][0]
    assert stat["space_amplification"] >= 1 and stat["live_bytes"] <= stat["bytes"]


def test_a_compaction_of_a_range_leaves_others_alone(node):
    low, high = range(0, 1000), range(5000, 6000)
    for keys in (low, high):
        fill(node, keys=keys, rounds=1)
        millrace.succeed("kv", "compact")
    settled = levels()
    (bottom,) = settled
    assert settled[bottom]["files"] == 2, settled
    fill(node, keys=low, rounds=1)
    done = millrace.said_json("kv", "compact", "--from", b"k005".hex(), "--hex")
    assert (done["merges"], done["moved_files"]) == (0, 0) and levels().keys() == {0, bottom}, done
    done = millrace.said_json("kv", "compact", "--from", "k000000", "--to", "k001000")
    # The new file and the older one of the same keys, out of three of the same size.
    assert done["merges"] == 1 and done["read_bytes"] <= 1.1 * settled[bottom]["bytes"], done
    assert levels().keys() == {bottom} and levels()[bottom]["bytes"] <= 1.1 * settled[bottom]["bytes"]
    assert "range is empty" in millrace.fail("kv", "compact", "--from", "b", "--to", "a")
    assert "no column family" in millrace.fail("kv", "compact", "--column-family", "other")


def test_limits_hold_until_they_are_removed(node):
    assert status("limit", "--cores", "0.25", "--rate", "500K") == {"cores": 0.25, "bytes_per_second": 500 << 10}
    assert status("limit", "--cores", "none") == {"cores": None, "bytes_per_second": 500 << 10}
    fill(node, rounds=5)
    wait_for("a merge", lambda: status()["jobs"])
    (job, *_) = status()["jobs"]
    # Five times 1.5 MB take many seconds at this rate.
    assert job["bytes"] > 1 << 20 and job["read_bytes"] < job["bytes"], job
    status("pause")
    wait_for("a standstill", lambda: standing())
    assert status("limit", "--rate", "none") == {"cores": None, "bytes_per_second": None}
    status("resume")
    wait_for("the end", lambda: not status()["jobs"])
    assert 0 not in levels() or levels()[0]["files"] < 4


def standing():
    """Whether no merge gets on."""
    before = [job["read_bytes"] for job in status()["jobs"]]
    # At the limit, a job takes a step about four times a second.
    time.sleep(0.7)
    return before == [job["read_bytes"] for job in status()["jobs"]]


def test_a_range_is_in_the_order_of_its_family(tmp_path):
    data = tmp_path / "db"
    pairs = tmp_path / "pairs"
    millrace.succeed("kv", "put", "a", "1", "--data", data)
    millrace.succeed("kv", "column-families", "create", "down", "--descending", "--data", data)
    place = ("--column-family", "down", "--data", data)
    pairs.write_text("".join(f"k{n:03}\t{n}\n" for n in range(999, 499, -1)))
    millrace.succeed("kv", "import", pairs, *place)
    # The rest of an import that was interrupted: sorted as the family is.
    pairs.write_text("".join(f"k{n:03}\t{n}\n" for n in range(999, -1, -1)))
    assert millrace.said_json("kv", "import", pairs, "--resume", *place)["skipped"] == 500
    bounds = (b"k899".hex(), b"k799".hex())
    assert len(millrace.scan(data, "--column-family", "down", "--from", bounds[0], "--to", bounds[1])) == 100
    assert millrace.scan(data, "--column-family", "down", "--from", bounds[1], "--to", bounds[0]) == []
    before = {file.name: file.read_bytes() for file in data.iterdir()}
    assert "range is empty" in millrace.fail("kv", "compact", "--from", "k100", "--to", "k900", *place)
    assert "range is empty" in millrace.fail("kv", "compact", "--from", "k100", "--to", "a", "--data", data)
    assert {file.name: file.read_bytes() for file in data.iterdir()} == before
    done = millrace.said_json("kv", "compact", "--from", "k900", "--to", "k100", *place)
    assert done["merges"] + done["moved_files"] > 0, done
    with millrace.node(data, tmp_path / "log", "--admin", tmp_path / "admin", writes=True) as node:
        node.until_ready()
        node_of = ("--admin", tmp_path / "admin", "--column-family", "down")
        assert "range is empty" in millrace.fail("kv", "compact", "--from", "k100", "--to", "k900", *node_of)
        millrace.succeed("kv", "compact", "--from", "k900", "--to", "k100", *node_of)


def test_an_interrupt_cancels_a_compaction_in_the_middle_of_a_merge(node):
    fill(node)
    before = levels()
    assert before[0]["files"] == ROUNDS, before
    status("limit", "--rate", "100K")
    compact = subprocess.Popen([millrace.BINARY, "kv", "compact"], stderr=subprocess.PIPE, text=True)
    wait_for("a merge on request", lambda: any(job["requested"] for job in status()["jobs"]))
    compact.send_signal(signal.SIGINT)
    said = compact.communicate(timeout=30)[1]
    assert compact.returncode == 2 and "cancelled" in said, said
    wait_for("the end", lambda: not status()["jobs"])
    assert {at: level["files"] for at, level in levels().items()} == {0: ROUNDS}
    status("limit", "--rate", "none")
    assert millrace.said_json("kv", "compact")["merges"] == 1
    assert 0 not in levels()


def test_a_directory_is_compacted_without_a_node(tmp_path, monkeypatch):
    data = tmp_path / "db"
    monkeypatch.setenv("MILLRACE_STATE", str(tmp_path / "state"))
    with millrace.node(data, tmp_path / "log", writes=True) as node:
        node.until_ready()
        status("pause")
        fill(node)
        assert "--data" in millrace.fail("kv", "compact", "--data", data)
    pairs = millrace.scan(data)
    done = millrace.said_json("kv", "compact", "--data", data)
    assert done["merges"] > 0 and done["written_bytes"] < done["read_bytes"], done
    stat = millrace.said_json("kv", "stat", "--data", data)["column_families"][0]
    assert [level["level"] for level in stat["levels"] if level["files"]] == [stat["base_level"]], stat
    assert stat["space_amplification"] == 1 and stat["debt_bytes"] == 0
    assert millrace.scan(data) == pairs and len(pairs) == 3000
    databases.ldb(data, "checkconsistency")
    assert "no RocksDB database here" in millrace.fail("kv", "compact", "--data", tmp_path / "missing")


def stop_writes(node):
    """Pauses merges and writes until a write waits, because level 0 is full; returns the writing client."""
    status("pause")
    for round in range(40):
        fill(node, keys=range(10), rounds=1)
    client = node.connect(timeout=2)
    words = [("SET", b"big%06d" % n, b"v" * 10_000) for n in range(100)]
    with pytest.raises(TimeoutError):
        for _ in range(200):
            client.pipeline(words)
    assert "stopped until the end of the pause" in millrace.succeed("kv", "compaction", "status")
    assert status()["writes_stopped"] and status()["write_bytes_per_second"] == 0
    return client


@pytest.fixture
def small_node(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_STATE", str(tmp_path / "state"))
    with millrace.node(tmp_path / "db", tmp_path / "log", "--memory", "64M", writes=True) as node:
        node.until_ready()
        yield node


def test_copies_and_clearings_work_while_a_pause_stops_writes(tmp_path, small_node):
    client = stop_writes(small_node)
    millrace.succeed("kv", "checkpoint", tmp_path / "checkpoint", timeout=20)
    millrace.succeed("kv", "backup", "create", tmp_path / "backups", timeout=20)
    assert len(millrace.scan(tmp_path / "checkpoint")) >= 110
    with small_node.connect() as other:
        assert other.call("FLUSHALL") == b"OK"
        assert other.call("SET", "k", "v") == b"OK"
        assert other.call("DBSIZE") == 1
    assert status()["paused"] and not status()["writes_stopped"]
    client.socket.close()


def test_the_end_of_the_node_ends_a_pause(small_node):
    client = stop_writes(small_node)
    assert small_node.stop() == 0
    client.socket.close()


def test_a_successor_takes_over_while_a_pause_stops_writes(small_node):
    client = stop_writes(small_node)
    assert "serves now" in millrace.succeed("upgrade")
    with small_node.connect() as other:
        assert other.call("PING") == b"PONG"
        assert other.call("GET", "k000001") is not None
    assert not status()["paused"]
    client.socket.close()
