"""What a disk does when its device fails a request."""

import json
import os
import signal

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


def failing(tmp_path, name, count, on_error):
    # Each core's channel counts for itself.
    return spec(tmp_path, name, f"error:kind=write&status=nospace&count={count}|null:1G") + f" on_error={on_error}"


def test_a_disk_that_pauses_fails_no_request(node, tmp_path):
    node.do("attach", failing(tmp_path, "a", 1, "pause"))
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
            assert names(events(node)).count("paused") == 1
            small.make_space()
            node.do("resume", "a")
            guest.wait_for("writes", lambda: not paused(node))
            assert operations(process) > 0
