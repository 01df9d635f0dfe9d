"""What a disk does when its device fails a request."""

import json
import os
import re
import signal
import urllib.request

import guest
import millrace
import pytest
from small_disk import SmallDisk
from test_admin import Node, spec
from test_events import events, names
from test_limits import driven, operations


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as node:
        yield node


def paused(node, name="a"):
    return node.disks()[name]["paused"]


def until_paused(node, name="a"):
    guest.wait_for("the pause", lambda: paused(node, name))


def failing(tmp_path, name, count, on_error, status="nospace"):
    # Each core's channel counts for itself.
    return spec(tmp_path, name, f"error:kind=write&status={status}&count={count}|null:1G") + f" on_error={on_error}"


@pytest.mark.parametrize("status", ["nospace", "unsupported"])
def test_a_disk_that_pauses_fails_no_request(node, tmp_path, status):
    node.do("attach", failing(tmp_path, "a", 1, "pause", status))
    assert not paused(node)
    process = driven(tmp_path, "a", seconds=3, rw="randwrite")
    until_paused(node)
    assert "paused" in node.do("list")
    before = node.disks("stat")["a"]["completions"]
    assert node.disks("stat")["a"]["completions"] == before
    # Each of its two rings fails once, together or one after the other.
    while process.poll() is None:
        if paused(node):
            assert "goes on" in node.do("resume", "a")
    assert operations(process) > before
    assert "has not paused" in node.do("resume", "a") and not paused(node)
    pauses = [name for name in names(events(node)) if name in ("paused", "resumed")]
    assert pauses in (["paused", "resumed"], ["paused", "resumed"] * 2)
    assert "there is no disk b" in node.refuses("resume", "b")


def test_errors_are_reported_or_ignored(node, tmp_path):
    for name, on_error in [("a", "ignore"), ("b", "report")]:
        uri = "error:kind=write&status=nospace&every=100|null:1G"
        node.do("attach", f"{spec(tmp_path, name, uri)} on_error={on_error}")
    assert operations(driven(tmp_path, "a", rw="randwrite")) > 100
    said = driven(tmp_path, "b", rw="randwrite").communicate(timeout=guest.PATIENCE)[0]
    assert json.loads(said)["errors"] > 0
    stat = node.disks("stat")
    assert stat["a"]["no_space"] > 0 and stat["b"]["no_space"] > 0
    assert "must be report, pause or ignore" in millrace.fail("disk", "attach", spec(tmp_path, "c") + " on_error=stop")


@pytest.mark.parametrize("how", ["upgrade", "kill"])
def test_a_paused_disk_goes_on_in_the_next_node(node, tmp_path, how):
    node.do("attach", failing(tmp_path, "a", 1, "pause"))
    process = driven(tmp_path, "a", seconds=4, rw="randwrite", queues=1)
    until_paused(node)
    # The device of the next node has failed nothing yet, so it fails once more.
    node.upgrade() if how == "upgrade" else os.kill(node.pid(), signal.SIGKILL)
    guest.wait_for("the second pause", lambda: names(events(node)).count("paused") == 2)
    node.do("resume", "a")
    assert operations(process) > 0
    assert not paused(node)


def test_a_paused_disk_can_be_detached(node, tmp_path):
    node.do("attach", failing(tmp_path, "a", 1000, "pause"))
    process = driven(tmp_path, "a", seconds=60, rw="randwrite")
    until_paused(node)
    node.do("detach", "a", "--force")
    assert node.disks() == {}
    process.kill()
    process.communicate()


def test_a_thin_image_on_a_full_disk_goes_on_when_there_is_space(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    with SmallDisk(mount, size_mib=64) as small:
        millrace.succeed("disk", "create", small.inside() / "a.img", "--size", "32M")
        node = Node(tmp_path)
        node.arguments = [*small.enter, *node.arguments]
        with node:
            node.do("attach", spec(tmp_path, "a", f"file:{mount}/a.img") + " on_error=pause")
            small.fill(8)
            process = driven(tmp_path, "a", seconds=4, rw="randwrite", bs="65536")
            until_paused(node)
            (event,) = (event for event in events(node) if event["event"] == "paused")
            assert re.fullmatch(r"no space left: its image occupies .* MiB, its file system has .* left", event["why"])
            assert "its image has no space left" in node.said()
            small.make_space()
            node.do("resume", "a")
            guest.wait_for("writes", lambda: not paused(node))
            assert operations(process) > 0


def test_the_space_of_a_thin_image_and_of_its_file_system_is_told(tmp_path):
    """Everywhere that disks are shown; and once, with an event, when little is left."""
    mount, port = tmp_path / "small", millrace.free_port()
    mount.mkdir()
    with SmallDisk(mount, size_mib=64) as small:
        for name, size in ("a", "32M"), ("b", "64M"):
            millrace.succeed("disk", "create", small.inside() / f"{name}.img", "--size", size)
        (small.inside() / "a.img").open("r+b").write(bytes(3 << 20))
        node = Node(tmp_path, "--metrics", f"127.0.0.1:{port}")
        node.arguments = [*small.enter, *node.arguments]
        with node:
            for name in "ab":
                node.do("attach", spec(tmp_path, name, f"file:{mount}/{name}.img"))
            node.do("attach", spec(tmp_path, "c"))
            disks = node.disks()
            assert (disks["a"]["occupied_bytes"], disks["b"]["occupied_bytes"]) == (3 << 20, 0)
            assert disks["a"]["available_bytes"] == disks["b"]["available_bytes"] == 61 << 20
            assert disks["c"]["occupied_bytes"] is None and disks["c"]["available_bytes"] is None
            assert "its image occupies 3 MiB, its file system has 61 MiB left" in node.do("stat", "a")
            top = json.loads(millrace.succeed("top", "--once", "--json", "--state", node.state).splitlines()[-1])
            assert {disk["name"]: disk["occupied_bytes"] for disk in top["disks"]} == {"a": 3 << 20, "b": 0, "c": None}
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
            assert f'millrace_disk_occupied_bytes{{disk="a"}} {3 << 20}\n' in text
            assert f'millrace_disk_available_bytes{{disk="b"}} {61 << 20}\n' in text
            assert 'millrace_disk_occupied_bytes{disk="c"}' not in text
            small.fill(2)
            guest.wait_for("the warning", lambda: "space-low" in names(events(node)), 30)
            of_disk = millrace.succeed("events", "--json", "--disk", "a", "--state", node.state)
            assert "space-low" in of_disk
            low = events(node)[-1]
            assert sorted(low["disks"]) == ["a", "b"] and low["available_bytes"] <= 2 << 20
            assert low["may_take_bytes"] == (32 - 3 + 64) << 20
            # A fresh answer comes at once, a second warning not at all.
            small.fill(1)
            assert node.disks()["a"]["available_bytes"] <= 2 << 20
            guest.wait_for("the next round", lambda: node.disks()["a"]["available_bytes"] <= 1 << 20)
            assert names(events(node)).count("space-low") == 1
            assert "has little space left" in node.said()
            assert "which may still take 93 MiB" in millrace.succeed("events", "--state", node.state)
