"""A request that kills the node kills every successor: its disk then stands still, and the others go on."""

import os
import re
import signal

import guest
import pytest
from test_admin import Node, spec
from test_events import events, names
from test_limits import driven, operations, use
from test_restart import kill_and_wait, serving

POISON = "error:kind=write&range=0..64K&status=panic|null:16M"


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as node:
        yield node


def stands_still(node, name="a"):
    return node.disks().get(name, {}).get("stands_still")


def until_it_stands_still(node, name="a", times=1):
    # The launcher has the events. A list of the disks fails if the node that makes it dies.
    guest.wait_for("the disk to stand still", lambda: names(events(node)).count("stands-still") >= times, 30)
    return guest.wait_for("the next node", lambda: stands_still(node, name), 30)


def end(process):
    process.kill()
    process.communicate()


def test_a_disk_that_kills_the_node_stands_still_and_the_others_go_on(node, tmp_path):
    node.do("attach", spec(tmp_path, "a", POISON))
    node.do("attach", spec(tmp_path, "b"))
    other = driven(tmp_path, "b", seconds=8)
    guest.wait_for("the other", lambda: node.disks()["b"]["connected"])
    poison = driven(tmp_path, "a", seconds=60, rw="randwrite")
    why = until_it_stands_still(node)
    assert "died 3 times" in why and "disk resume a" in why
    assert "stands still" in node.do("list") and why in node.do("list")
    all_events = events(node)
    assert names(all_events).count("ended") == 3
    (event,) = (event for event in all_events if event["event"] == "stands-still")
    assert event["disk"] == "a" and event["why"] == why
    # It tries again, with the same request.
    assert "goes on" in node.do("resume", "a")
    until_it_stands_still(node, times=2)
    assert names(events(node)).count("ended") == 6
    assert operations(other) > 0, "and without an error or another connection"
    assert poison.poll() is None, "it waits, with its connection"
    assert "virtual machine may be connected" in node.refuses("detach", "a")
    node.do("detach", "a", "--force")
    assert list(node.disks()) == ["b"] and not (tmp_path / "a.sock").exists()
    end(poison)
    node.do("attach", spec(tmp_path, "a"))
    assert use(tmp_path, "a") > 0


def test_it_stands_still_in_the_next_node_and_goes_on_when_its_guest_is_another(node, tmp_path):
    node.do("attach", spec(tmp_path, "a", POISON))
    poison = driven(tmp_path, "a", seconds=60, rw="randwrite")
    why = until_it_stands_still(node)
    kill_and_wait(node)
    assert guest.wait_for("the disks", lambda: stands_still(node), 20) == why
    node.upgrade()
    guest.wait_for("the launcher", lambda: "is the launcher now" in node.said(), 20)
    assert stands_still(node) == why
    kill_and_wait(node)
    assert guest.wait_for("the disks", lambda: stands_still(node), 20) == why
    end(poison)
    node.do("resume", "a")
    assert stands_still(node) is None
    assert use(tmp_path, "a", rw="randread") > 0
    # The launcher has another program now, and still learns what its node dies of.
    poison = driven(tmp_path, "a", seconds=60, rw="randwrite")
    until_it_stands_still(node, times=2)
    end(poison)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_signal_from_outside_is_not_laid_at_a_disk(node, tmp_path, number):
    node.do("attach", spec(tmp_path, "a"))
    process = driven(tmp_path, "a", seconds=6, depth=64)
    guest.wait_for("the guest", lambda: node.disks()["a"]["connected"])
    for _ in range(4):
        said = len(node.said())
        os.kill(serving(node), number)
        guest.wait_for("the next node", lambda said=said: re.search(r"\bserving\b.* driver=", node.said()[said:]), 20)
    assert operations(process) > 0
    assert names(events(node)).count("ended") == 4
    assert stands_still(node) is None and "worked for a disk" not in node.said()
