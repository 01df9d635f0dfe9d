"""`lock=ring`: an image is locked while a machine uses it, so two nodes may have it open and a machine may move between them."""

import os
import signal

import guest
import millrace
import pytest
from test_admin import Node
from test_disks import image
from test_events import events, names
from test_limits import driven, operations
from test_restart import kill_and_wait, serving


@pytest.fixture
def nodes(tmp_path):
    shared = image(tmp_path / "disk.img")
    specs = [f"name={name} uri=file:{shared}?lock=ring socket={tmp_path / name}.sock queues=2" for name in "ab"]
    with Node(tmp_path, specs=specs[:1], name="one") as one, Node(tmp_path, specs=specs[1:], name="two") as two:
        yield one, two


def waits(node, name):
    return node.disks()[name]["waits_for_lock"]


def is_locked(tmp_path):
    """Whether a third user is kept out."""
    said = millrace.command("disk", "create", tmp_path / "copy.img", "--from", tmp_path / "disk.img")
    (tmp_path / "copy.img").unlink(missing_ok=True)
    return said.returncode != 0


def test_one_machine_at_a_time_uses_the_image(nodes, tmp_path):
    one, two = nodes
    assert not is_locked(tmp_path)
    first = driven(tmp_path, "a", seconds=10, rw="randwrite")
    guest.wait_for("the first", lambda: one.disks("stat")["a"]["write"]["requests"] > 0)
    assert is_locked(tmp_path) and not waits(one, "a")
    second = driven(tmp_path, "b", seconds=10, rw="randwrite")
    guest.wait_for("the second", lambda: waits(two, "b"))
    assert two.disks("stat")["b"]["completions"] == 0
    assert "waits" in two.do("list")
    guest.wait_for("the event", lambda: "lock-awaited" in names(events(two)))
    # An upgrade hands the lock over: nobody else gets the image in between.
    one.upgrade()
    assert waits(two, "b") and two.disks("stat")["b"]["completions"] == 0
    assert operations(first) > 0
    guest.wait_for("the lock", lambda: not waits(two, "b"))
    assert operations(second) > 0 and two.disks("stat")["b"]["completions"] > 0
    guest.wait_for("the end", lambda: not is_locked(tmp_path))


def test_a_killed_node_is_followed_by_one_with_the_lock(nodes, tmp_path):
    one, _ = nodes
    process = driven(tmp_path, "a", seconds=600, rw="randwrite")
    guest.wait_for("the machine", lambda: one.disks("stat")["a"]["completions"] > 0)
    for _ in range(3):
        kill_and_wait(one)
        guest.wait_for("the machine", lambda: one.disks("stat")["a"]["completions"] > 0)
        assert is_locked(tmp_path)
    process.send_signal(signal.SIGINT)
    assert operations(process) > 0
    guest.wait_for("the end", lambda: not is_locked(tmp_path))


def test_a_machine_does_not_go_on_with_an_image_that_another_one_has_used(nodes, tmp_path):
    one, two = nodes
    first = driven(tmp_path, "a", seconds=60, rw="randwrite")
    guest.wait_for("the first", lambda: one.disks("stat")["a"]["completions"] > 0)
    second = driven(tmp_path, "b", seconds=2, rw="randwrite")
    guest.wait_for("the second", lambda: waits(two, "b"))
    # The next node comes too late.
    os.kill(one.process.pid, signal.SIGSTOP)
    os.kill(serving(one), signal.SIGKILL)
    guest.wait_for("the lock", lambda: not waits(two, "b"))
    os.kill(one.process.pid, signal.SIGCONT)
    assert operations(second) > 0
    guest.wait_for("the pause", lambda: one.disks()["a"]["paused"])
    (paused,) = (event for event in events(one) if event["event"] == "paused")
    assert paused["disk"] == "a" and "another machine" in paused["why"]
    assert one.disks("stat")["a"]["completions"] == 0
    # The next node does not know less.
    kill_and_wait(one)
    guest.wait_for("the pause", lambda: one.disks()["a"]["paused"])
    assert "goes on" in one.do("resume", "a")
    guest.wait_for("the first", lambda: one.disks("stat")["a"]["completions"] > 0)
    kill_and_wait(one)
    guest.wait_for("the first", lambda: one.disks("stat")["a"]["completions"] > 0)
    first.kill()
    first.communicate()


def test_what_would_change_an_image_without_its_lock_is_refused(nodes, tmp_path):
    one, _ = nodes
    assert "not locked" in one.refuses("resize", "a", "--size", "2G")
    assert "lock=ring" in one.refuses("move", "a", "--to", f"file:{tmp_path}/other.img")
    assert not (tmp_path / "other.img").exists()
    process = driven(tmp_path, "a", seconds=3)
    guest.wait_for("the machine", lambda: one.disks("stat")["a"]["completions"] > 0)
    one.do("resize", "a", "--size", "2G")
    assert operations(process) > 0


def test_a_machine_that_waits_can_go(nodes, tmp_path):
    one, two = nodes
    first = driven(tmp_path, "a", seconds=10)
    guest.wait_for("the first", lambda: one.disks("stat")["a"]["completions"] > 0)
    second = driven(tmp_path, "b", seconds=60)
    guest.wait_for("the second", lambda: waits(two, "b"))
    two.upgrade()
    guest.wait_for("the second", lambda: waits(two, "b"))
    second.kill()
    second.communicate()
    guest.wait_for("the end", lambda: not two.disks()["b"]["connected"])
    assert not waits(two, "b")
    assert operations(first) > 0
