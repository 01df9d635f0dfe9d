"""Disks move to other devices while guests use them: `millrace disk move`."""

import filecmp
import json
import os
import random
import signal
import subprocess
import threading
import time

import guest
import millrace
import pytest
from front_end import OK, ZEROES, FrontEnd
from small_disk import SmallDisk
from test_admin import Node, spec
from test_disks import image
from test_events import events, names
from test_limits import driven, operations
from test_metrics import metrics

SIZE = 64 << 20


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as node:
        yield node


def filled(path):
    """An image with data, holes, and zeroes that were written."""
    rng = random.Random(5)
    with open(path, "wb") as file:
        file.truncate(SIZE)
        for at in range(0, SIZE, 1 << 20):
            file.seek(at)
            if at % 3 == 0:
                file.write(rng.randbytes(1 << 20))
            elif at % 5 == 0:
                file.write(bytes(1 << 20))
    return path


def move(node, name, to, *words):
    return node.do("move", name, "--to", f"file:{to}", *words)


def status(node, name="a"):
    return json.loads(node.do("move", "--status", name, "--json"))["moves"][0]


def until(node, *stages):
    return guest.wait_for(stages, lambda: (now := status(node))["stage"] in stages and now)


def test_a_moved_disk_has_the_same_data_and_the_same_holes(node, tmp_path):
    old, new = filled(tmp_path / "a.img"), tmp_path / "b.img"
    node.do("attach", spec(tmp_path, "a", f"file:{old}"))
    assert "has moved to" in move(node, "a", new, "--finish-when-ready")
    assert "is not being moved" in node.refuses("move", "a", "--abort")
    assert node.disks()["a"]["uri"] == f"file:{new}"
    assert filecmp.cmp(old, new, shallow=False)
    # Zeroes that were written have become holes.
    assert new.stat().st_blocks < old.stat().st_blocks
    # The old image is free; what it has, where the disk has holes, is cleared.
    before = new.read_bytes()
    old.write_bytes(b"x" * SIZE)
    move(node, "a", old, "--finish-when-ready")
    assert old.read_bytes() == before and old.stat().st_blocks <= new.stat().st_blocks + 16
    # A relative path begins where the command runs.
    here = tmp_path / "here"
    here.mkdir()
    millrace.succeed("disk", "move", "a", "--to", "file:c.img", "--finish-when-ready", "--state", node.state, cwd=here)
    assert (here / "c.img").read_bytes() == before
    assert [name for name in names(events(node)) if "move" in name] == ["move-begun", "moved"] * 3
    # The state directory has the new device.
    node.restart()
    assert node.disks()["a"]["uri"] == f"file:{here}/c.img"
    kept = json.loads((node.state / "disks.json").read_text())["disks"]
    assert [disk["uri"] for disk in kept] == [f"file:{here}/c.img"]


@pytest.mark.parametrize("packed", [False, True], ids=["split", "packed"])
def test_a_guest_loses_nothing_while_its_disk_moves_to_and_fro(node, tmp_path, packed, long):
    if packed and not long:
        pytest.skip("--long moves packed rings, too")
    moves = 20 if long else 4
    images = [image(tmp_path / f"{name}.img") for name in "ab"]
    node.do("attach", spec(tmp_path, "a", f"file:{images[0]}"))
    words = dict(queues=2, processors=2, packed=packed, mode="load", secs=6 + 4 * moves, mib=16, holes="holes")
    with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", **words) as vm:
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        for nth in range(moves):
            move(node, "a", images[(nth + 1) % 2], "--finish-when-ready")
        assert node.disks()["a"]["uri"].endswith("a.img")
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()
    assert names(events(node)).count("moved") == moves


@pytest.mark.parametrize("finish", [True, False], ids=["finishing", "waiting"])
def test_a_node_that_dies_during_a_move_continues_with_one_of_the_two(node, tmp_path, finish, long):
    kills = 20 if long else 4
    rng = random.Random(kills + finish)
    images = [image(tmp_path / f"{name}.img") for name in "ab"]
    node.do("attach", spec(tmp_path, "a", f"file:{images[0]}"))
    words = dict(queues=2, processors=2, mode="load", secs=8 + 5 * kills, mib=16, holes="holes")
    with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", **words) as vm:
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        for nth in range(kills):
            if nth % 3 == 2:
                # The launcher gives up on nodes that die within a second, one after the other.
                time.sleep(1)
            here = node.disks()["a"]["uri"].endswith("a.img")
            move(node, "a", images[here], *["--finish-when-ready"] * finish, "--background")
            time.sleep(rng.random() * 0.5)
            dead = node.pid()
            os.kill(dead, signal.SIGKILL)
            guest.wait_for("the next node", lambda dead=dead: millrace.serving(node.process.pid, node.said()) not in (None, dead))
            guest.wait_for("its disk", lambda: node.disks()["a"].get("connected"))
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


def test_a_move_waits_until_it_is_to_finish(node, tmp_path):
    old, new = filled(tmp_path / "a.img"), tmp_path / "b.img"
    node.do("attach", spec(tmp_path, "a", f"file:{old}"))
    assert "is ready" in move(node, "a", new)
    assert status(node)["left_bytes"] == 0 and status(node)["uri"] == f"file:{new}"
    assert operations(driven(tmp_path, "a", rw="randwrite", depth=1)) > 0
    assert node.disks()["a"]["uri"] == f"file:{old}"
    # What would end a move, or what a move would miss.
    assert "is being moved" in node.refuses("resize", "a", "--size", "128M")
    assert "is being moved" in node.refuses("detach", "a", "--force")
    assert "is being moved" in node.refuses("move", "a", "--to", f"file:{tmp_path}/c.img")
    assert not (tmp_path / "c.img").exists()
    assert "being moved" in millrace.fail("upgrade", "--state", node.state)
    assert "has moved" in node.do("move", "a", "--finish-when-ready")
    assert filecmp.cmp(old, new, shallow=False)
    assert "is not being moved" in node.refuses("move", "a", "--abort")
    node.upgrade()
    assert node.disks()["a"]["uri"] == f"file:{new}"


def test_an_aborted_move_leaves_the_disk_where_it_is(node, tmp_path):
    old, new = filled(tmp_path / "a.img"), tmp_path / "b.img"
    node.do("attach", spec(tmp_path, "a", f"file:{old}"))
    node.do("move", "--limit", "4M")
    move(node, "a", new, "--finish-when-ready", "--background")
    guest.wait_for("some of it", lambda: status(node)["copied_bytes"] > 0)
    assert "copying" in node.do("move", "--status") and "at most 4 MiB" in node.do("move", "--status")
    assert "was aborted" in node.do("move", "a", "--abort")
    assert status(node)["stage"] == "aborted" and node.disks()["a"]["uri"] == f"file:{old}"
    assert names(events(node))[-1] == "move-failed"
    node.do("move", "--limit", "0")
    move(node, "a", new, "--finish-when-ready")
    assert filecmp.cmp(old, new, shallow=False)


def test_a_change_of_the_limit_lets_no_more_pass(node, tmp_path):
    old = tmp_path / "a.img"
    old.write_bytes(random.Random(5).randbytes(SIZE))
    node.do("attach", spec(tmp_path, "a", f"file:{old}"))
    node.do("move", "--limit", "64K")
    move(node, "a", tmp_path / "b.img", "--background")
    guest.wait_for("some of it", lambda: status(node)["copied_bytes"] > 0)
    for more in range(1, 5):
        time.sleep(0.5)
        node.do("move", "--limit", (64 << 10) + more)
    time.sleep(0.5)
    assert status(node)["copied_bytes"] < 4 << 20
    node.do("move", "a", "--abort")


@pytest.mark.parametrize("how", ["aborted", "killed"])
def test_a_command_that_waits_for_a_move_fails_if_that_does_not_move_the_disk(node, tmp_path, how):
    old, new = filled(tmp_path / "a.img"), tmp_path / "b.img"
    node.do("attach", spec(tmp_path, "a", f"file:{old}"))
    node.do("move", "--limit", "4M")
    words = ["disk", "move", "a", "--to", f"file:{new}", "--finish-when-ready", "--state", node.state]
    waits = subprocess.Popen([millrace.BINARY, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    guest.wait_for("some of it", lambda: any(moved["copied_bytes"] for moved in json.loads(node.do("move", "--status", "a", "--json"))["moves"]))
    if how == "aborted":
        node.do("move", "a", "--abort")
    else:
        os.kill(node.pid(), signal.SIGKILL)
    _, said = waits.communicate(timeout=60)
    assert waits.returncode != 0 and {"aborted": "was aborted", "killed": "has ended with its node"}[how] in said
    guest.wait_for("the event", lambda: "move-failed" in names(events(node)))
    assert node.disks()["a"]["uri"] == f"file:{old}"


def test_a_move_is_aborted_while_its_new_device_does_not_answer(node, tmp_path):
    node.do("attach", spec(tmp_path, "a", f"file:{image(tmp_path / 'a.img', 8)}"))
    move(node, "a", image(tmp_path / "b.img", 8), "--background")
    until(node, "ready")
    node.do("move", "a", "--abort")
    node.do("move", "a", "--to", f"delay:flush=600s|file:{tmp_path / 'b.img'}", "--finish-when-ready", "--background")
    until(node, "switching")
    assert "was aborted" in node.do("move", "a", "--abort")
    assert operations(driven(tmp_path, "a", seconds=1, rw="randwrite", depth=1)) > 0


@pytest.mark.parametrize("slow", ["moves", "device"])
def test_a_guest_that_writes_faster_than_its_disk_is_copied_is_slowed_down(node, tmp_path, slow):
    old, new = filled(tmp_path / "a.img"), tmp_path / "b.img"
    node.do("attach", spec(tmp_path, "a", f"file:{old}"))
    to = f"file:{new}"
    if slow == "moves":
        node.do("move", "--limit", "16M")
    else:
        # Most writes go there, too.
        to = f"limit:bytes=16M|{to}"
    process = driven(tmp_path, "a", seconds=60, rw="randwrite", depth=4)
    guest.wait_for("writes", lambda: node.disks("stat")["a"]["completions"] > 100)
    said = node.do("move", "a", "--to", to, "--finish-when-ready")
    assert "has moved" in said
    process.kill()
    process.communicate()
    assert status(node)["writes_bytes_per_second"] is None
    assert "writes-limited" in names(events(node))


def told(port):
    """The metrics of moves: {name: value}, and {(name, stage): value}, without the prefix."""
    samples = [sample for family in metrics(port).values() for sample in family.samples if "_move" in sample.name]
    assert {sample.labels.get("disk", "a") for sample in samples} == {"a"}
    key = lambda name, stage=None: (name.removeprefix("millrace_"), stage) if stage else name.removeprefix("millrace_disk_move_")
    return {key(sample.name, sample.labels.get("stage")): sample.value for sample in samples}


def ended(port):
    return [int(told(port)["moves_total", stage]) for stage in ("done", "aborted", "failed")]


def test_top_and_metrics_show_moves_that_are_under_way(tmp_path):
    port = millrace.free_port()
    with Node(tmp_path, "--metrics", f"127.0.0.1:{port}") as node:
        assert ended(port) == [0, 0, 0], "also without disks"
        words = ["top", "--once", "--interval", "0.3", "--state", node.state]
        shown = lambda: millrace.said_json(*words)["disks"][0]["move"]
        old, new = filled(tmp_path / "a.img"), tmp_path / "b.img"
        node.do("attach", spec(tmp_path, "a", f"file:{old}"))
        assert shown() is None and len(told(port)) == 3
        node.do("move", "--limit", "4M")
        move(node, "a", new, "--finish-when-ready", "--background")
        guest.wait_for("some of it", lambda: status(node)["copied_bytes"] > 0)
        before, top, said, now, after = status(node), shown(), millrace.succeed(*words), told(port), status(node)
        assert (top["stage"], top["uri"], top["writes_bytes_per_second"]) == ("copying", f"file:{new}", None)
        assert top["copied"] == top["copied_bytes"] / top["total_bytes"] and 0 < top["bytes_per_s"] < 20e6
        assert 0 < top["copied_bytes"] < top["total_bytes"] - top["left_bytes"] < top["total_bytes"]
        assert "MOVE" in said and "copying" in said and f"file:{new}" in said
        assert {stage: now["disk_move_stage", stage] for stage in ("copying", "ready", "switching")} == {"copying": 1, "ready": 0, "switching": 0}
        assert before["copied_bytes"] <= now["copied_bytes"] <= after["copied_bytes"]
        assert before["left_bytes"] >= now["left_bytes"] >= after["left_bytes"] > 0
        assert now["writes_limit_bytes_per_second"] == 0
        node.do("move", "a", "--abort")
        # What is remembered of a move that has ended is not shown.
        assert shown() is None and len(told(port)) == 3 and ended(port) == [0, 1, 0]
        assert "MOVE" not in millrace.succeed(*words)
        # A guest that writes too fast.
        node.do("move", "--limit", "16M")
        process = driven(tmp_path, "a", seconds=60, rw="randwrite", depth=4)
        guest.wait_for("writes", lambda: node.disks("stat")["a"]["completions"] > 100)
        move(node, "a", new, "--finish-when-ready", "--background")
        guest.wait_for("the limit", lambda: told(port).get("writes_limit_bytes_per_second", 0) >= 256 << 10)
        node.do("move", "--limit", "64K")
        assert shown()["writes_bytes_per_second"] >= 256 << 10
        process.kill()
        process.communicate()
        node.do("move", "--limit", "0")
        until(node, "done")
        assert len(told(port)) == 3 and ended(port) == [1, 1, 0]


def test_a_move_to_a_full_disk_fails_and_the_guest_goes_on(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    with SmallDisk(mount, size_mib=80) as small:
        filled(small.inside() / "a.img")
        port = millrace.free_port()
        node = Node(tmp_path, "--metrics", f"127.0.0.1:{port}")
        node.arguments = [*small.enter, *node.arguments]
        with node:
            node.do("attach", spec(tmp_path, "a", f"file:{mount}/a.img"))
            process = driven(tmp_path, "a", seconds=4, rw="randread")
            millrace.succeed("disk", "create", small.inside() / "b.img", "--size", "64M")
            small.fill(8)
            # There it is found, too, so that it is not created here.
            mount.joinpath("b.img").touch()
            said = node.refuses("move", "a", "--to", f"file:{mount}/b.img")
            assert "stays where it is" in said and "no space left" in said
            assert node.disks()["a"]["uri"].endswith("a.img") and ended(port) == [0, 0, 1]
            assert operations(process) > 0


def test_what_cannot_be_moved_is_refused(tmp_path):
    with Node(tmp_path, specs=[spec(tmp_path, "named", "mem:64M")]) as node:
        filled(tmp_path / "a.img")
        node.do("attach", spec(tmp_path, "a", f"file:{tmp_path}/a.img"))
        millrace.succeed("disk", "create", tmp_path / "small.img", "--size", "32M")
        millrace.succeed("disk", "create", tmp_path / "right.img", "--size", "64M")
        for words, expected in [
            (["named", "--to", "mem:64M"], "part of the node's configuration"),
            (["b", "--to", "mem:64M"], "there is no disk b"),
            (["a", "--to", f"file:{tmp_path}/small.img"], "33554432 bytes"),
            (["a", "--to", f"file:{tmp_path}/right.img?readonly=on"], "read-only"),
            (["a", "--to", f"file:{tmp_path}/a.img"], "lock"),
            (["a", "--to", f"file:{tmp_path}/none/b.img"], "none/b.img"),
            (["a", "--to", "what:1"], "what"),
            (["a", "--to", "b.img"], "HOST:PORT/NAME"),
            (["a", "--to", "b.example:7070"], "HOST:PORT/NAME"),
            (["a", "--to", "file:/dev/vd-nosuch"], "there is no device /dev/vd-nosuch"),
            (["a"], "--to URI"),
            (["--to", "mem:64M"], "name the disk"),
        ]:
            assert expected in node.refuses("move", *words), words
        assert "is not being moved" in node.refuses("move", "a", "--finish-when-ready")
        assert node.disks()["a"]["uri"].endswith("a.img")
        # Without a volatile cache every write is durable, and the guest may rely on that.
        node.do("attach", spec(tmp_path, "m", "mem:64M"))
        assert "write=through" in node.refuses("move", "m", "--to", f"file:{tmp_path}/right.img")
        node.do("move", "m", "--to", f"file:{tmp_path}/right.img?write=through", "--finish-when-ready")
        assert node.disks()["m"]["uri"].endswith("write=through")


def test_a_guest_that_writes_only_zeroes_is_slowed_down(node, tmp_path):
    old, new = filled(tmp_path / "a.img"), tmp_path / "b.img"
    node.do("attach", spec(tmp_path, "a", f"file:{old}"))
    node.do("move", "--limit", "16M")
    length = 8 << 20
    ended = threading.Event()

    def zero(machine):
        rng = random.Random(3)
        while not ended.is_set():
            assert machine.range(ZEROES, rng.randrange(SIZE // length) * length, length) == OK

    with FrontEnd(tmp_path / "a.sock") as machine:
        zeroing = threading.Thread(target=zero, args=[machine])
        zeroing.start()
        try:
            move(node, "a", new, "--finish-when-ready", "--background")
            guest.wait_for("the limit", lambda: "writes-limited" in names(events(node)), 150)
            until(node, "done")
        finally:
            ended.set()
            zeroing.join()


def test_a_new_disk_has_not_moved(node, tmp_path):
    old, new = filled(tmp_path / "a.img"), tmp_path / "b.img"
    node.do("attach", spec(tmp_path, "a", f"file:{old}"))
    move(node, "a", new, "--finish-when-ready")
    assert status(node)["stage"] == "done"
    node.do("detach", "a")
    node.do("attach", spec(tmp_path, "a", f"file:{old}"))
    assert json.loads(node.do("move", "--status", "a", "--json"))["moves"] == []
