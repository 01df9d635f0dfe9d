"""Limits of the rates of disks and of groups of disks, which change while guests use them.

A rate counts from the first request to the last, so a slow machine stays below a limit, and no test depends on its speed."""

import json
import os
import signal
import subprocess

import guest
import millrace
import pytest
from test_admin import Node, spec
from test_disks import Disks


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as node:
        yield node


def driven(tmp_path, name, seconds=1, **flags):
    """Starts to use a disk as fast as possible."""
    flags = {"rw": "randread", "depth": 16, "queues": 2} | flags
    words = [f"--{word}" if at == 0 else str(word) for pair in flags.items() for at, word in enumerate(pair)]
    arguments = [millrace.BINARY, "bench", "vdisk", "--socket", str(tmp_path / f"{name}.sock"), "--seconds", str(seconds), "--json", *words]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def operations(process):
    said, error = process.communicate(timeout=guest.PATIENCE)
    assert process.returncode == 0, error
    said = json.loads(said)
    assert said["errors"] == 0 and said["reconnects"] == 0
    return said["operations"]


def use(tmp_path, name, seconds=1, **flags):
    return operations(driven(tmp_path, name, seconds, **flags))


def limits(node):
    return json.loads(node.do("limit", "--json"))


def test_a_disk_does_no_more_than_its_limits(node, tmp_path):
    node.do("attach", spec(tmp_path, "a"))
    assert "no limits" in node.do("limit")
    assert "1,000 requests a second" in node.do("limit", "a", "iops=1000")
    assert 100 < use(tmp_path, "a") <= 1000 + 100 + 16
    assert node.disks("stat")["a"]["limits"]["iops"] == 1000
    assert "1,000 requests a second" in node.do("stat", "a")
    node.do("limit", "a", "iops=off", "bytes=4M")
    # 1024 reads of 4 KiB, and what a tenth of a second saves.
    assert 100 < use(tmp_path, "a", bs="4096") <= 1024 * 11 // 10 + 16
    assert use(tmp_path, "a", rw="randwrite", bs="65536") <= 64 * 11 // 10 + 16
    # A request that costs more than a second of the budget begins, and is paid for afterwards.
    node.do("limit", "a", "bytes=64K")
    before = node.disks("stat")["a"]["write"]["requests"]
    use(tmp_path, "a", rw="randwrite", bs="131072", depth=1)
    # One more of each ring when they stop.
    assert 1 <= node.disks("stat")["a"]["write"]["requests"] - before <= 2 + 2
    node.do("limit", "a", "bytes=off")
    assert use(tmp_path, "a") > 5000
    assert "no limits" in node.do("limit")


def test_disks_of_a_group_share_its_limits(node, tmp_path):
    for name in "abc":
        node.do("attach", spec(tmp_path, name))
    node.do("limit", "--group", "tenant", "iops=1000")
    for name in "ab":
        node.do("limit", name, "group=tenant")
    processes = [driven(tmp_path, name, seconds=2) for name in "abc"]
    a, b, c = [operations(process) for process in processes]
    assert a + b <= 2 * 1000 + 100 + 2 * 16 and c > 5000
    assert min(a, b) > max(a, b) // 4, "no disk of a group starves another"
    shown = limits(node)
    assert [(disk["name"], disk["group"]) for disk in shown["disks"]] == [("a", "tenant"), ("b", "tenant")]
    assert [(group["name"], group["iops"]) for group in shown["groups"]] == [("tenant", 1000)]
    node.do("limit", "a", "group=off")
    assert use(tmp_path, "a") > 5000


def test_a_change_of_limits_ends_the_wait_for_the_old_ones(node, tmp_path):
    node.do("attach", spec(tmp_path, "a"))
    # A request of 64 KiB waits for eighteen hours.
    node.do("limit", "a", "bytes=1")
    process = driven(tmp_path, "a", seconds=2, bs="65536", rw="randwrite", depth=4)
    guest.wait_for("requests", lambda: node.disks("stat")["a"]["depth"] > 0)
    node.do("limit", "a", "bytes=off")
    assert operations(process) > 1000


def test_limits_delay_no_upgrade_and_no_detach(node, tmp_path):
    node.do("attach", spec(tmp_path, "a"))
    node.do("limit", "a", "iops=1", "burst=1s")
    process = driven(tmp_path, "a", seconds=3, depth=64)
    guest.wait_for("requests", lambda: node.disks("stat")["a"]["depth"] > 0)
    node.upgrade()
    assert node.disks("stat")["a"]["limits"]["iops"] == 1
    # Requests that a ring had taken when it was handed over have begun, and are owed.
    before = node.disks("stat")["a"]["completions"]
    assert before >= 64
    assert node.disks("stat")["a"]["completions"] <= before + 2
    node.do("limit", "a", "iops=off")
    assert operations(process) > before
    node.do("detach", "a", "--force")
    assert node.disks() == {} and "no limits" in node.do("limit"), "a detached disk is forgotten with its limits"


def test_limits_survive_restarts_and_upgrades(tmp_path):
    with Node(tmp_path, specs=[spec(tmp_path, "named")]) as node:
        node.do("attach", spec(tmp_path, "a"))
        node.do("limit", "a", "iops=700", "burst=1s", "group=g")
        node.do("limit", "named", "bytes=10M")
        node.do("limit", "--group", "g", "bytes=5M")
        before = limits(node)
        assert [disk["name"] for disk in before["disks"]] == ["a", "named"] and before["disks"][0]["burst_ns"] == 10**9
        node.upgrade()
        assert limits(node) == before
        node.restart()
        assert limits(node) == before
        assert use(tmp_path, "a", bs="4096") <= 700 * 2 + 16
        assert node.stop() == 0
        assert json.loads((node.state / "disks.json").read_text())["limits"]["groups"] == {"g": {"bytes_per_second": 5 << 20}}


@pytest.mark.parametrize("sandbox", ["on", "off"])
def test_without_a_state_directory_an_upgrade_takes_limits_along(tmp_path, sandbox, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "none"))
    admin = tmp_path / "admin"
    ask = lambda *words: millrace.succeed("disk", *words, "--admin", admin)
    with Disks(tmp_path / "log", spec(tmp_path, "a"), flags=["--admin", admin, "--sandbox", sandbox]) as node:
        guest.wait_for("the node", admin.exists)
        ask("limit", "a", "iops=500", "group=g")
        ask("limit", "--group", "g", "iops=400")
        before = ask("limit", "--json")
        node.upgrade()
        guest.wait_for("the node", admin.exists)
        assert ask("limit", "--json") == before
        assert use(tmp_path, "a") <= 400 + 50 + 16
        if sandbox == "on":
            # The launcher has replaced its program, and has them, too.
            guest.wait_for("the launcher", lambda: "is the launcher now" in node.said())
            os.kill(node.pid(), signal.SIGKILL)
            guest.wait_for("the node", lambda: "takes its place" in node.said() or "starting it again" in node.said())
            assert ask("limit", "--json") == before
            assert use(tmp_path, "a") <= 400 + 50 + 16


def test_limits_that_mean_nothing_are_refused(node, tmp_path):
    node.do("attach", spec(tmp_path, "a"))
    for words, expected in [
        (["b", "iops=1"], "there is no disk b"),
        (["b"], "there is no disk b"),
        (["a", "group="], "names no group"),
        (["--group", "off", "iops=1"], "cannot have the name off"),
        (["a", "iops=0"], "iops=0"),
        (["a", "iops=-1"], "iops=-1"),
        (["a", "speed=1"], "'speed' is not one of iops, bytes, burst, group"),
        (["iops=1"], "name a disk"),
        (["a", "iops=1", "--group", "g"], "not both"),
        (["--group", "g", "group=h"], "in no other group"),
        (["--group", "", "iops=1"], "the name of a group"),
        (["a", "group=x%sy" % "\t"], "white space"),
        (["a", "burst=2h"], "burst=2h"),
    ]:
        assert expected in node.refuses("limit", *words), words
    reply = node.ask(b'{"version":1,"command":"disk-limit","change":{"iops":5}}\n')
    assert "name a disk or a group" in reply["error"]
    reply = node.ask(b'{"version":1,"command":"disk-limit","change":{"name":"a","burst_ns":18446744073709551615}}\n')
    assert "an hour" in reply["error"]
    reply = node.ask(b'{"version":1,"command":"disk-limit","change":{"name":"a","iops":18446744073709551615}}\n')
    assert reply["result"]["disk"]["iops"] == 2**64 - 1
    assert use(tmp_path, "a") > 5000
    assert "no limits" not in node.do("limit") and len(limits(node)["disks"]) == 1
