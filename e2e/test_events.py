"""Events of a node and its disks, as `millrace events` shows them."""

import json
import os
import signal
import subprocess

import guest
import millrace
import pytest
from front_end import FLUSH, OK, SET_OWNER, FrontEnd
from test_admin import Node, spec
from test_disks import Disks, image
from test_limits import driven, operations, use


def events(node, *words):
    said = millrace.succeed("events", "--json", *words, "--state", node.state)
    return [json.loads(line) for line in said.splitlines()]


def names(all_events):
    return [event["event"] for event in all_events]


class Follower:
    """`millrace events --follow`, whose lines are read as they come."""

    def __init__(self, *words):
        self.process = subprocess.Popen([millrace.BINARY, "events", "--follow", *map(str, words)], stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def until(self, wanted):
        """The lines up to one that contains the text."""
        lines = []
        while wanted not in (lines or [""])[-1]:
            line = self.process.stdout.readline()
            assert line, f"the command has ended: {lines}"
            lines.append(line)
        return lines


def test_changes_connections_and_errors_are_events(tmp_path):
    with Node(tmp_path) as node:
        node.do("attach", spec(tmp_path, "a"))
        node.do("attach", spec(tmp_path, "b", "error:kind=write&status=nospace|null:1G"))
        use(tmp_path, "a")
        with Follower("--json", "--disk", "b", "--state", node.state) as follower:
            process = driven(tmp_path, "b", rw="randwrite", depth=1)
            error = json.loads(follower.until("device-error")[-1])
            assert (error["disk"], error["request"], error["bytes"], error["why"]) == ("b", "write", 4096, "no space left")
            process.kill()
            process.communicate()
            follower.until("disconnected")
        node.do("resize", "a", "--size", "2G")
        node.do("limit", "a", "iops=5000")
        node.do("limit", "--group", "g", "iops=5000")
        node.do("detach", "b")
        all_events = events(node)
        assert [event["number"] for event in all_events] == list(range(1, len(all_events) + 1))
        times = [event["time_ms"] for event in all_events]
        assert times == sorted(times)
        changes = [event for event in all_events if event["event"] not in ("connected", "disconnected", "device-error")]
        assert names(changes) == ["serving", "attached", "attached", "resized", "limited", "limited", "detached"]
        assert (changes[3]["old_size_bytes"], changes[3]["size_bytes"]) == (1 << 30, 2 << 30)
        assert (changes[4]["disk"], changes[5]["group"]) == ("a", "g")
        assert set(names(events(node, "--disk", "a"))) == {"attached", "connected", "disconnected", "resized", "limited"}
        shown = millrace.succeed("events", "--state", node.state)
        assert "2 GiB instead of 1 GiB" in shown and "no space left" in shown, shown


def test_a_follower_hears_of_deaths_and_upgrades(tmp_path):
    with Node(tmp_path) as node:
        node.do("attach", spec(tmp_path, "a"))
        with Follower("--json", "--state", node.state) as follower:
            follower.until("attached")
            first = node.pid()
            os.kill(first, signal.SIGKILL)
            died = [json.loads(line) for line in follower.until("serving")]
            assert names(died) == ["ended", "serving"]
            assert (died[0]["process"], died[0]["signal"]) == (first, signal.SIGKILL)
            node.upgrade()
            upgraded = [json.loads(line) for line in follower.until("serving")]
            assert "upgraded" in names(upgraded)
            # The launcher becomes the new program and keeps the events; the follower goes on there.
            guest.wait_for("the launcher", lambda: "is the launcher now" in node.said())
            node.do("limit", "a", "iops=5000")
            lines = [json.loads(line) for line in follower.until("limited")]
        assert "lost" not in names(died + upgraded + lines)
        all_events = events(node)
        assert names(all_events)[:4] == ["serving", "attached", "ended", "serving"]
        assert [event["number"] for event in all_events] == list(range(1, len(all_events) + 1))
        assert "upgrade" in millrace.fail("upgrade", "--to", "/bin/false", "--state", node.state)
        assert names(events(node))[-1] == "upgrade-failed"


def happened(node, name):
    """The one event of this name, without its number and time."""
    found = guest.wait_for(name, lambda: [event for event in events(node) if event["event"] == name])
    assert len(found) == 1
    return {field: value for field, value in found[0].items() if field not in ("number", "time_ms")}


def test_a_ring_that_a_guest_corrupts_is_an_event(tmp_path):
    with Node(tmp_path) as node:
        node.do("attach", spec(tmp_path, "a"))
        with FrontEnd(tmp_path / "a.sock") as front_end:
            assert front_end.call(FLUSH, ring=1) == OK
            front_end.offer(99, ring=1)
            why = "head 99 is outside the ring"
            assert happened(node, "ring-broken") == {"event": "ring-broken", "disk": "a", "ring": 1, "why": why}
            assert f"ring 1: {why}" in millrace.succeed("events", "--state", node.state)
            assert node.disks("stat")["a"]["broken_rings"] == 1
            assert front_end.call(FLUSH, ring=0) == OK, "the other ring goes on"
        guest.wait_for("the end", lambda: names(events(node))[-1] == "disconnected")


def test_a_connection_that_the_node_closes_is_an_event(tmp_path):
    with Node(tmp_path) as node:
        node.do("attach", spec(tmp_path, "a"))
        with FrontEnd(tmp_path / "a.sock") as front_end:
            front_end.send(SET_OWNER, flags=2)
            assert front_end.is_closed()
            closed = happened(node, "connection-closed")
        assert "expected version 1" in closed.pop("why")
        assert closed == {"event": "connection-closed", "disk": "a", "process": os.getpid()}
        assert names(events(node)) == ["serving", "attached", "connected", "connection-closed"]
        with FrontEnd(tmp_path / "a.sock") as front_end:
            assert front_end.call(FLUSH) == OK, "the next one is served"


def test_a_disk_that_cannot_be_opened_at_the_start_is_an_event(tmp_path):
    with Node(tmp_path) as node:
        node.do("attach", spec(tmp_path, "kept"))
        node.do("attach", spec(tmp_path, "lost", f"file:{image(tmp_path / 'lost.img', 8)}"))
        node.kill()
        (tmp_path / "lost.img").unlink()
        node.start()
        failed = happened(node, "not-opened")
        assert "lost.img" in failed.pop("why")
        assert failed == {"event": "not-opened", "disk": "lost"}


@pytest.mark.parametrize("sandbox", ["on", "off"])
def test_a_node_without_a_state_directory_has_events_too(tmp_path, sandbox, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "none"))
    admin = tmp_path / "admin"
    with Disks(tmp_path / "log", spec(tmp_path, "a"), flags=["--admin", admin, "--sandbox", sandbox]):
        guest.wait_for("the node", admin.exists)
        assert operations(driven(tmp_path, "a")) > 0
        with Follower("--admin", admin) as follower:
            shown = follower.until("disconnected")
        assert "serving" in shown[0] and "connected" in shown[1], shown


def test_a_follower_of_no_node_says_so(tmp_path):
    assert "is a node running" in millrace.fail("events", "--follow", "--state", tmp_path)
