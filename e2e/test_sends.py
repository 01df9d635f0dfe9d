"""Disks move to other nodes, without a guest: `millrace disk move NAME --to HOST:PORT/NAME`."""

import contextlib
import filecmp
import json
import os
import random
import signal
import socket
import subprocess
import time

import guest
import millrace
import pytest
from certificates import Certificates
from front_end import FrontEnd
from sends import MIB, Between, Store
from test_disks import Disks, image, own_program
from test_events import Follower, events
from test_limits import driven, operations

SIZE = 32 << 20
FINISH = "--finish-when-ready"


@pytest.fixture
def nodes(tmp_path):
    with Store(tmp_path, "here") as here, Store(tmp_path, "there") as there:
        yield here, there


def filled(path, seed=5, size=SIZE):
    """An image with data, holes, and zeroes that were written; its last block has data."""
    rng = random.Random(seed)
    with open(path, "wb") as file:
        file.truncate(size)
        for nth, at in enumerate(range(0, size - MIB, MIB)):
            file.seek(at)
            if nth % 3 == 0:
                file.write(rng.randbytes(MIB - 4096 * rng.randrange(4)))
            elif nth % 5 == 0:
                file.write(bytes(MIB))
        file.seek(size - 512)
        file.write(rng.randbytes(512))
    return path


def other(path, size=SIZE):
    """An image that is full of other data."""
    path.write_bytes(random.Random(7).randbytes(size))
    return path


def blocks(path):
    return os.stat(path).st_blocks


# ---------------------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("before", ["empty", "other data"])
def test_a_disk_that_no_machine_uses_moves_with_its_holes(nodes, tmp_path, before):
    here, there = nodes
    old, new = filled(tmp_path / "old.img"), tmp_path / "new.img"
    image(new, SIZE // MIB) if before == "empty" else other(new)
    here.attach(f"file:{old}")
    there.awaits(f"file:{new}")
    assert there.elsewhere() == "waits for a move" and there.stage() == "incoming"
    said = here.send(there, "a", FINISH)
    assert "has moved to" in said and f"127.0.0.1:{there.port}/a" in said
    assert filecmp.cmp(old, new, shallow=False)
    assert blocks(new) <= blocks(old), "holes stay holes, and zeroes become holes"
    assert f"has moved to 127.0.0.1:{there.port}/a" == here.elsewhere()
    assert (here.stage(), there.stage()) == ("sent", "whole")
    assert there.elsewhere() == "has come; its guest has not begun"
    moved = here.status()
    assert (moved["stage"], moved["why"], moved["uri"]) == ("done", None, f"127.0.0.1:{there.port}/a")
    assert moved["left_bytes"] == 0 and moved["to_node"] is True and moved["lost_connection"] is None
    # Holes and zeroes are not sent.
    assert 0 < moved["sent_bytes"] < SIZE // 2
    assert operations(driven_there(there)) > 0
    assert there.stage() == "begun" and there.elsewhere() is None
    assert here.happened() == ["attached", "move-begun", "moved"]
    assert [name for name in there.happened() if "connected" not in name] == ["attached", "coming", "came", "begun"]


def driven_there(node, disk="a", **flags):
    """Uses a disk at a node."""
    return driven(node.directory, f"{node.name}-{disk}", **flags)


@pytest.mark.parametrize(
    "size, block",
    [(512, 512), (4096, 4096), (1 << 20, 512), ((1 << 20) + 512, 512), (3 * 4096 + (2 << 20), 4096), ((1 << 33) + 512, 512)],
    ids=["a sector", "a block", "1 MiB", "and a sector", "4K blocks", "8 GiB of holes"],
)
def test_disks_of_odd_sizes(nodes, tmp_path, size, block):
    here, there = nodes
    old, new = tmp_path / "old.img", tmp_path / "new.img"
    data = random.Random(size).randbytes(min(size, 4 * MIB))
    with open(old, "wb") as file:
        file.truncate(size)
        for at in (0, size - len(data)):
            file.seek(at)
            file.write(data)
    with open(new, "wb") as file:
        file.truncate(size)
    options = "?block=512" if block == 512 else "?block=4K"
    here.attach(f"file:{old}{options}")
    there.awaits(f"file:{new}{options}")
    here.send(there, "a", FINISH)
    if size < 1 << 30:
        assert filecmp.cmp(old, new, shallow=False)
    else:
        for at in (0, size - len(data), 1 << 32):
            with open(old, "rb") as one, open(new, "rb") as two:
                one.seek(at)
                two.seek(at)
                assert one.read(len(data)) == two.read(len(data))
    assert blocks(new) <= blocks(old) + 16


@pytest.mark.parametrize(
    "source, sink",
    [
        ("mem:16M", "mem:16M"),
        ("mem:16M", "file:{}?engine=sync&write=through"),
        ("file:{}?engine=uring", "file:{}?engine=sync"),
        ("file:{}?engine=aio", "file:{}?engine=uring"),
        ("file:{}?engine=mmap", "file:{}?engine=aio"),
        ("file:{}?engine=sync", "file:{}?engine=mmap"),
        ("limit:iops=1000000|file:{}", "delay:all=0ms..3ms|file:{}"),
    ],
)
def test_every_kind_of_device_is_sent_and_received(nodes, tmp_path, source, sink):
    """What a front end has written arrives. Both nodes' devices are compared by moves into files."""
    here, there = nodes
    other(tmp_path / "old.img", 16 * MIB)
    image(tmp_path / "new.img", 16)
    here.attach(source.format(tmp_path / "old.img"))
    assert operations(driven_there(here, rw="randwrite", depth=4, seconds=1)) > 0
    there.awaits(sink.format(tmp_path / "new.img"))
    here.send(there, "a", FINISH)
    assert operations(driven_there(there, rw="randread", depth=1)) > 0
    # What this node has is as it was given.
    here.do("move", "a", "--abort", "--force")
    for node, name in ((here, "one.img"), (there, "two.img")):
        node.do("move", "a", "--to", f"file:{tmp_path / name}?write=through", FINISH)
    assert filecmp.cmp(tmp_path / "one.img", tmp_path / "two.img", shallow=False)


def test_a_disk_moves_to_and_fro(nodes, tmp_path):
    here, there = nodes
    images = [filled(tmp_path / "one.img"), other(tmp_path / "two.img")]
    here.attach(f"file:{images[0]}")
    there.awaits(f"file:{images[1]}")
    for nth in range(4):
        source, sink = nodes if nth % 2 == 0 else nodes[::-1]
        if nth > 0:
            # The disk that has moved away makes room for the one that comes.
            assert "the name a" in sink.refuses("attach", sink.spec("mem:32M"), "--incoming")
            sink.do("detach", "a")
            assert sink.transfer() is None
            sink.awaits(f"file:{images[(nth + 1) % 2]}")
            if nth > 1:
                forget(sink)
            assert operations(driven_there(source, rw="randwrite", depth=1, seconds=3)) > 0
        source.send(sink, "a", FINISH)
        assert filecmp.cmp(*images, shallow=False)
        assert (source.stage(), sink.stage()) == ("sent", "whole")


def forget(sink):
    """Until test_a_move_that_has_ended_does_not_take_a_disk_that_waits passes."""
    with contextlib.suppress(AssertionError):
        guest.wait_for("an old source", lambda: sink.transfer()["id"] is not None, 3)
        sink.do("move", "a", "--abort")


@pytest.mark.parametrize("how", ["done", "aborted"])
def test_a_move_that_has_ended_does_not_take_a_disk_that_waits(nodes, how):
    here, there = nodes
    here.attach("mem:8M")
    there.awaits("mem:8M")
    here.send(there)
    if how == "done":
        here.do("move", "a", FINISH)
        there.do("detach", "a")
        there.awaits("mem:8M")
    else:
        here.do("move", "a", "--abort")
        there.restart()
    time.sleep(3)
    assert there.transfer() == {"stage": "incoming", "id": None}


def test_a_disk_may_have_another_name_there(nodes, tmp_path):
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}", "vm-1")
    there.awaits(f"file:{image(tmp_path / 'new.img', 32)}", "other")
    here.send(there, "vm-1", FINISH, to="other")
    assert filecmp.cmp(tmp_path / "old.img", tmp_path / "new.img", shallow=False)
    assert here.elsewhere("vm-1").endswith("/other")


def test_a_disk_of_the_configuration_is_not_sent(tmp_path):
    """The next start would serve it again, when it is detached, with its old data."""
    old = filled(tmp_path / "old.img")
    spec = f"name=a uri=file:{old} socket={tmp_path / 'here-a.sock'} queues=2"
    with Store(tmp_path, "here", specs=[spec]) as here, Store(tmp_path, "there") as there:
        there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
        assert "is part of the node's configuration" in here.refuses("move", "a", "--to", f"127.0.0.1:{there.port}/a")
        assert there.transfer() == {"stage": "incoming", "id": None}


def test_a_guest_that_writes_faster_than_its_disk_is_sent_is_slowed_down(nodes, tmp_path):
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}")
    there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
    here.do("move", "--limit", "16M")
    writes = driven(tmp_path, "here-a", seconds=60, rw="randwrite", depth=4)
    guest.wait_for("writes", lambda: here.disks("stat")["a"]["completions"] > 100)
    here.send(there, "a", "--background")
    guest.wait_for("the limit", lambda: here.status()["writes_bytes_per_second"], 40)
    here.until("ready", timeout=40)
    assert "writes-limited" in here.happened()
    here.do("move", "a", "--abort")
    assert here.status()["writes_bytes_per_second"] is None
    writes.kill()
    writes.communicate()


def test_the_limit_of_moves_does_not_hold_while_a_guest_waits(nodes, tmp_path):
    here, there = nodes
    for disk in "ab":
        here.attach(f"file:{filled(tmp_path / f'{disk}.img')}", disk)
        there.awaits(f"file:{image(tmp_path / f'{disk}-new.img', 32)}", disk)
    here.do("move", "--limit", "256K")
    with FrontEnd(here.socket()) as machine:
        here.send(there, "a", "--background")
        guest.wait_for("some of it", lambda: here.status()["copied_bytes"] > 0)
        machine.begin_migration()
        time.sleep(0.5)
        assert here.status()["stage"] == "copying"
        # Most is not copied. A pass is under way.
        machine.stop()
        here.send(there, "b", "--background")
        here.until("done", timeout=15)
    assert filecmp.cmp(tmp_path / "a.img", tmp_path / "a-new.img", shallow=False)
    # The limit holds for others.
    assert here.status("b")["copied_bytes"] < 8 * MIB
    here.do("move", "b", "--abort")


def test_limits_travel(nodes, tmp_path):
    """As they are when the disk is given: until then operators change them at the source."""
    here, there = nodes
    for name in "abc":
        here.attach("mem:8M", name)
        there.awaits("mem:8M", name)
    here.do("limit", "a", "iops=99", "bytes=5M", "burst=2s")
    here.do("limit", "b", "iops=99")
    here.do("limit", "c", "group=tenant")
    here.do("limit", "--group", "tenant", "iops=3000")
    there.do("limit", "b", "iops=77", "group=own")
    for name in "abc":
        here.send(there, name, "--background")
        here.until("ready", disk=name)
    here.do("limit", "a", "iops=1234")
    here.do("limit", "b", "group=tenant")
    there.kill_node()
    for name in "abc":
        here.do("move", name, FINISH)
        here.until("done", disk=name)

    def limits(kind="disks"):
        return {limited["name"]: limited for limited in json.loads(there.do("limit", "--json"))[kind]}

    for _ in range(2):
        came = limits()
        assert (came["a"]["iops"], came["a"]["bytes_per_second"], came["a"]["burst_ns"]) == (1234, 5 * MIB, 2_000_000_000)
        assert (came["b"]["iops"], came["b"]["group"]) == (77, "own"), "a disk that has limits there keeps them"
        assert (came["c"]["group"], limits("groups")["tenant"]["iops"]) == ("tenant", 3000)
        there.restart()


def test_limits_of_an_earlier_attempt_are_replaced(nodes, tmp_path):
    here, there = nodes
    here.attach("mem:8M")
    there.awaits("mem:8M")
    for iops, taken_back in ((100, True), (200, False)):
        here.do("limit", "a", f"iops={iops}")
        here.send(there, "a", FINISH)
        assert json.loads(there.do("limit", "--json"))["disks"][0]["iops"] == iops
        if taken_back:
            here.do("move", "a", "--abort")
            there.restart()


def test_many_disks_move_at_once(nodes, tmp_path, long):
    here, there = nodes
    count = 40 if long else 8
    for nth in range(count):
        here.attach(f"file:{filled(tmp_path / f'old{nth}.img', nth, 4 * MIB)}", f"d{nth}")
        there.awaits(f"file:{image(tmp_path / f'new{nth}.img', 4)}", f"d{nth}")
    here.do("move", "--limit", "16M")
    for nth in range(count):
        here.send(there, f"d{nth}", FINISH, "--background")
    assert "at most 16 MiB" in here.do("move", "--status")
    for nth in range(count):
        here.until("done", disk=f"d{nth}")
        assert filecmp.cmp(tmp_path / f"old{nth}.img", tmp_path / f"new{nth}.img", shallow=False)


def test_moves_to_nodes_and_devices_share_the_limit(nodes, tmp_path):
    here, there = nodes
    limit = 6 * MIB
    for name in "abc":
        here.attach(f"file:{other(tmp_path / f'{name}.img', 96 * MIB)}", name)
    there.awaits(f"file:{image(tmp_path / 'c2.img', 96)}", "c")
    here.do("move", "--limit", limit)
    for name in "ab":
        here.do("move", name, "--to", f"file:{tmp_path / f'{name}2.img'}", "--background")
    here.send(there, "c", "--background")

    def copied():
        return {name: here.status(name)["copied_bytes"] for name in "abc"}

    def rates(names):
        """Bytes per second of these moves, without what may pass at once when the shares change."""
        first = copied()
        guest.wait_for("8 MiB of each", lambda: all(now - first[name] >= 8 * MIB for name, now in copied().items() if name in names))
        before, began = copied(), time.monotonic()
        time.sleep(3)
        return {name: (copied()[name] - before[name]) / (time.monotonic() - began) for name in names}

    together = rates("abc")
    assert sum(together.values()) < 1.5 * limit, together
    assert min(together.values()) > max(together.values()) / 2, together
    for name in "ab":
        here.do("move", name, "--abort")
    alone = rates("c")["c"]
    assert 1.5 * together["c"] < alone < 1.5 * limit, (together, alone)
    assert here.status("c")["stage"] == "copying"


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_sent_is_refused(nodes, tmp_path):
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}?block=512")
    free = millrace.free_port()
    there.attach("mem:32M", "here-too")
    there.awaits(f"file:{image(tmp_path / 'small.img', 16)}", "small")
    there.awaits(f"file:{image(tmp_path / 'coarse.img', 32)}?block=4K", "coarse")
    there.awaits(f"file:{image(tmp_path / 'ro.img', 32)}?readonly=on", "ro")
    at = f"127.0.0.1:{there.port}"
    for words, expected in [
        (["none", "--to", f"{at}/a"], "there is no disk none"),
        (["a", "--to", f"{at}/none"], "it has no disk none"),
        (["a", "--to", f"{at}/here-too"], "--incoming"),
        (["a", "--to", f"{at}/small"], "it has 16777216 bytes, and the disk has 33554432"),
        (["a", "--to", f"{at}/coarse"], "its block has 4096 bytes, and that of the disk 512"),
        (["a", "--to", f"{at}/ro"], "read-only"),
        (["a", "--to", f"127.0.0.1:{free}/a"], f"127.0.0.1:{free}"),
        (["a", "--to", f"no-such-host.invalid:{free}/a"], "no-such-host.invalid"),
        (["a", "--to", f"{at}/"], "HOST:PORT/NAME"),
        (["--to", f"{at}/a"], "name the disk"),
    ]:
        assert expected in here.refuses("move", *words), words
        assert here.elsewhere() is None and here.transfer() is None
    assert here.status()["stage"] is None
    for name in ("small", "coarse", "ro"):
        assert there.transfer(name) == {"stage": "incoming", "id": None}, "a refused source leaves nothing"
    assert operations(driven_there(here)) > 0
    assert "move-begun" not in here.happened()


def test_a_disk_that_waits_is_neither_moved_nor_resized_nor_sent(nodes, tmp_path):
    here, there = nodes
    there.awaits("mem:8M")
    here.awaits("mem:8M")
    for words in (["move", "a", "--to", f"127.0.0.1:{here.port}/a"], ["move", "a", "--to", f"file:{tmp_path}/x.img"], ["resize", "a", "--size", "16M"]):
        assert "waits for a move" in there.refuses(*words), words
    assert not (tmp_path / "x.img").exists()
    assert "is not being moved" in there.refuses("move", "a", "--abort")
    there.do("detach", "a")
    assert there.transfer() is None and there.disks() == {}


def test_a_node_without_a_state_directory_neither_sends_nor_waits(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    admin, port = tmp_path / "admin", millrace.free_port()
    spec = f"name=a uri=mem:8M socket={tmp_path / 'x.sock'}"
    with Store(tmp_path, "there") as there, Disks(tmp_path / "log", spec, flags=["--admin", admin, "--moves", f"127.0.0.1:{port}"]):
        guest.wait_for("the node", admin.exists)
        there.awaits("mem:8M")
        said = millrace.fail("disk", "move", "a", "--to", f"127.0.0.1:{there.port}/a", "--admin", admin)
        assert "--state" in said
        said = millrace.fail("disk", "attach", f"name=b uri=mem:8M socket={tmp_path / 'b.sock'}", "--incoming", "--admin", admin)
        assert "--state" in said
        assert there.transfer() == {"stage": "incoming", "id": None}


def test_a_disk_that_is_being_sent_is_left_alone(nodes, tmp_path):
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}")
    there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
    there.awaits("mem:32M", "b")
    assert "is ready" in here.send(there) and here.status()["finishes"] is False
    assert (here.stage(), there.stage()) == ("sending", "incoming")
    assert there.elsewhere() == "is coming from another node" and here.elsewhere() is None
    for words in (["move", "a", "--to", f"127.0.0.1:{there.port}/b"], ["move", "a", "--to", f"file:{tmp_path}/x.img"], ["resize", "a", "--size", "64M"], ["detach", "a"]):
        assert "is being moved" in here.refuses(*words), words
    # Another source does not get in between.
    with Store(tmp_path, "third") as third:
        third.attach("mem:32M")
        refused = third.refuses("move", "a", "--to", f"127.0.0.1:{there.port}/a")
        assert "waits for another move" in refused and "--abort" in refused
    assert operations(driven_there(here, rw="randwrite", depth=2)) > 0
    assert "has moved" in here.do("move", "a", FINISH)
    assert filecmp.cmp(tmp_path / "old.img", tmp_path / "new.img", shallow=False)
    for words in (["move", "a", "--to", f"127.0.0.1:{there.port}/b"], ["move", "a", "--to", f"file:{tmp_path}/x.img"], ["resize", "a", "--size", "64M"]):
        assert "has moved to" in here.refuses(*words), words
    assert "is not being moved" in here.refuses("move", "a", FINISH)
    assert "has moved to" in here.do("list") and "elsewhere" in here.do("list")


# ------------------------------------------------------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("moves") / "certificates")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("moves") / "others")


def shows(certificates, name="server", ca=None):
    return ["--moves-cert", certificates[f"{name}.pem"], "--moves-key", certificates[f"{name}.key"], "--moves-ca", ca or certificates["ca.pem"]]


@pytest.mark.parametrize("moment", ["while it is copied", "when it is ready"])
def test_an_upgrade_leaves_a_move_to_the_next_process(tmp_path, moment):
    with own_program(tmp_path) as (own, put), Store(tmp_path, "here", binary=own) as here, Store(tmp_path, "there") as there:
        here.attach(f"file:{filled(tmp_path / 'old.img')}")
        here.attach("mem:8M", "b")
        there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
        here.do("move", "--limit", "3M" if moment == "while it is copied" else "0")
        mover = subprocess.Popen([millrace.BINARY, "disk", "move", "a", "--to", f"127.0.0.1:{there.port}/a", "--state", here.state])
        stage = "copying" if moment == "while it is copied" else "ready"
        here.until(stage)
        guest.wait_for("some of it", lambda: here.status()["copied_bytes"] > 0)
        # An upgrade that fails does not end it.
        put("#!/bin/sh\nexit 7\n")
        here.refuse_upgrade("exit status: 7")
        put(None)
        here.until(stage)
        before = here.pid()
        here.upgrade()
        assert here.pid() != before
        here.until(stage)
        if moment == "while it is copied":
            # The limit has not changed.
            moves = json.loads(here.do("move", "--status", "--json"))
            assert moves["bytes_per_second"] == 3 << 20 and moves["moves"][0]["left_bytes"] > 0
            assert mover.poll() is None
            here.do("move", "--limit", "0")
        assert mover.wait(guest.PATIENCE) == 0
        assert "has moved" in here.do("move", "a", FINISH)
        assert filecmp.cmp(tmp_path / "old.img", tmp_path / "new.img", shallow=False)
        assert here.happened() == ["attached", "move-begun", "moved"]


def test_the_limit_of_moves_outlives_the_node(nodes):
    here, there = nodes
    rate = lambda: json.loads(here.do("move", "--status", "--json"))["bytes_per_second"]
    here.do("move", "--limit", "3M")
    here.kill_node()
    guest.wait_for("it", lambda: rate() == 3 << 20)
    here.upgrade()
    assert rate() == 3 << 20
    here.do("move", "--limit", "0")
    here.kill_node()
    assert rate() is None


def test_a_disk_moves_over_tls(tmp_path, certificates):
    filled(tmp_path / "old.img")
    with Store(tmp_path, "here", *shows(certificates, "client")) as here, Store(tmp_path, "there", *shows(certificates)) as there:
        here.attach(f"file:{tmp_path / 'old.img'}")
        there.awaits(f"file:{other(tmp_path / 'new.img')}")
        with Between(there.port) as between:
            here.send(there, "a", FINISH, port=between.port)
            assert between.bytes > 4 * MIB
        assert filecmp.cmp(tmp_path / "old.img", tmp_path / "new.img", shallow=False)
        there.awaits("mem:32M", "b")
        here.attach("mem:32M", "b")
        # Garbage, nothing at all, and connections that end at once harm nobody.
        idle = [socket.create_connection(("127.0.0.1", there.port)) for _ in range(5)]
        for nth in range(40):
            with socket.create_connection(("127.0.0.1", there.port)) as one:
                one.sendall(random.Random(nth).randbytes(nth * 37))
        here.send(there, "b", FINISH)
        for one in idle:
            one.close()


def test_a_node_trusts_only_whom_it_was_told_to_trust(tmp_path, certificates, others):
    """Also not a node that speaks no TLS, and not one with the name of another machine."""
    stranger = shows(others, "client")
    # It trusts us, but we do not trust it.
    half = shows(others, "client", certificates["ca.pem"])
    with Store(tmp_path, "there", *shows(certificates)) as there, Store(tmp_path, "plain") as plain:
        there.awaits("mem:8M")
        plain.awaits("mem:8M")
        for name, flags, sink in [("stranger", stranger, there), ("half", half, there), ("none", [], there), ("tls", shows(certificates), plain)]:
            with Store(tmp_path, name, *flags) as here:
                here.attach("mem:8M")
                began = time.monotonic()
                said = here.refuses("move", "a", "--to", f"127.0.0.1:{sink.port}/a")
                print(f"{name}: {time.monotonic() - began:.1f} s: {said.strip()}")
                assert "does not take disk a" in said, (name, said)
                assert here.transfer() is None and sink.transfer() == {"stage": "incoming", "id": None}
                assert operations(driven_there(here)) > 0
        with Store(tmp_path, "right", *shows(certificates, "client")) as here:
            here.attach("mem:8M")
            # The certificate is for localhost and 127.0.0.1.
            said = here.refuses("move", "a", "--to", f"127.0.0.2:{there.port}/a")
            assert "does not take disk a" in said
            here.do("move", "a", "--to", f"localhost:{there.port}/a", FINISH)
            assert here.elsewhere().startswith("has moved to localhost:")


def test_certificates_of_the_nodes_themselves_may_be_trusted(tmp_path):
    """Without an authority."""
    made = Certificates(tmp_path / "certificates")
    for name in ("one", "two"):
        made.openssl(
            f"req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -x509 -days 2 -subj /CN={name} -keyout {name}.key -out {name}.pem"
            " -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE"
        )
    with Store(tmp_path, "here", *shows(made, "one", made["two.pem"])) as here, Store(tmp_path, "there", *shows(made, "two", made["one.pem"])) as there:
        here.attach(f"file:{filled(tmp_path / 'old.img')}")
        there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
        here.send(there, "a", FINISH)
        assert filecmp.cmp(tmp_path / "old.img", tmp_path / "new.img", shallow=False)


def test_settings_that_do_not_fit_are_refused(tmp_path, certificates):
    state = tmp_path / "state"
    port = millrace.free_port()
    serve = ["serve", "--state", state]
    for flags, expected in [
        (["--moves-cert", certificates["server.pem"]], "belong together"),
        (["--moves", f"0.0.0.0:{port}"], "--allow-remote"),
        (["--moves", "nonsense"], "nonsense"),
        (["--moves", f"127.0.0.1:{port}", "--metrics", f"127.0.0.1:{port}"], "cannot serve both"),
        (shows(certificates)[:3] + [certificates["ca.pem"]] + shows(certificates)[4:], "key"),
        (["--moves-cert", tmp_path / "none", *shows(certificates)[2:]], "none"),
    ]:
        assert expected in millrace.fail(*serve, *flags), flags
    with socket.create_server(("127.0.0.1", port)):
        assert str(port) in millrace.fail(*serve, "--moves", f"127.0.0.1:{port}")


# ----------------------------------------------------------------------------------------------- what commands report


def test_commands_report_moves_as_documented(nodes, tmp_path):
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}")
    there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
    here.do("move", "--limit", "4M")
    with Follower("--json", "--disk", "a", "--state", here.state) as follower, Follower("--json", "--state", there.state) as other_follower:
        began = here.send_json(there, "a", "--background")
        assert began["stage"] == "copying" and began["to_node"] is True and began["finishes"] is False
        guest.wait_for("some of it", lambda: here.status()["copied_bytes"] > 0)
        shown = here.do("move", "--status")
        assert "copying" in shown and "at most 4 MiB" in shown and f"127.0.0.1:{there.port}/a" in shown
        top = millrace.said_json("top", "--once", "--interval", "0.2", "--state", here.state)["disks"][0]["move"]
        assert (top["stage"], top["uri"], top["lost_connection"]) == ("copying", f"127.0.0.1:{there.port}/a", None)
        here.do("move", "--limit", "0")
        here.until("ready")
        ready = here.do("move", "a", "--status")
        assert "ready" in ready
        done = json.loads(here.do("move", "a", FINISH, "--json"))["moves"][0]
        assert done["stage"] == "done" and done["pause_us"] >= 0 and done["seconds"] > 0
        moved = json.loads(follower.until('"moved"')[-1])
        assert moved["uri"] == f"127.0.0.1:{there.port}/a" and moved["pause_us"] == done["pause_us"]
        came = [json.loads(line)["event"] for line in other_follower.until('"came"')]
        assert came[-2:] == ["coming", "came"]
    assert "elsewhere" not in {event["event"] for event in events(here)}
    for node in nodes:
        shown = millrace.succeed("events", "--state", node.state)
        assert "{" not in shown
        shown = node.do("list")
        assert "elsewhere" in shown and node.elsewhere() in shown
    assert millrace.command("disk", "move", "a", "--abort", "--status", "--state", here.state).returncode == 2
    assert millrace.command("disk", "move", "a", "--force", "--state", here.state).returncode == 2


# --------------------------------------------------------------------------------------------------------------- aborts


def test_an_aborted_move_leaves_the_disk_here_and_the_other_node_waiting(nodes, tmp_path):
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}")
    there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
    here.do("move", "--limit", "2M")
    here.send(there, "a", "--background")
    guest.wait_for("some of it", lambda: here.status()["copied_bytes"] > 0)
    assert "was aborted" in here.do("move", "a", "--abort")
    assert here.status()["stage"] == "aborted" and here.transfer() is None
    assert there.transfer() == {"stage": "incoming", "id": None}
    here.do("move", "--limit", "0")
    assert "is ready" in here.send(there)
    assert "was aborted" in here.do("move", "a", "--abort")
    assert there.elsewhere() == "waits for a move"
    assert here.happened()[-1] == "move-failed"
    here.send(there, "a", FINISH)
    assert filecmp.cmp(tmp_path / "old.img", tmp_path / "new.img", shallow=False)


def test_a_disk_whose_guest_has_not_begun_is_taken_back(nodes, tmp_path):
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}")
    there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
    here.send(there, "a", FINISH)
    assert "is served here" in here.do("move", "a", "--abort")
    assert here.elsewhere() is None and here.transfer() is None
    assert there.stage() == "incoming" and "taken-back" in here.happened()
    assert operations(driven_there(here, rw="randwrite")) > 0
    here.send(there, "a", FINISH)
    assert filecmp.cmp(tmp_path / "old.img", tmp_path / "new.img", shallow=False)


def test_a_disk_that_was_taken_back_may_go_again(nodes, tmp_path):
    here, there = nodes
    here.attach("mem:8M")
    there.awaits("mem:8M")
    here.send(there, "a", FINISH)
    here.do("move", "a", "--abort")
    assert "has moved" in here.send(there, "a", FINISH)


def test_a_disk_whose_guest_has_begun_is_not_taken_back(nodes, tmp_path):
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}")
    there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
    here.send(there, "a", FINISH)
    assert operations(driven_there(there)) > 0
    assert "its guest has begun at" in here.refuses("move", "a", "--abort")
    assert here.stage() == "sent" and there.stage() == "begun"
    # By force: an operator knows what he does.
    assert "is served here" in here.do("move", "a", "--abort", "--force")
    assert here.elsewhere() is None and operations(driven_there(here)) > 0


def test_the_other_node_is_gone_for_good(nodes, tmp_path):
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}")
    there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
    here.send(there, "a", FINISH)
    there.kill()
    refused = here.refuses("move", "a", "--abort")
    assert "--force" in refused and f"127.0.0.1:{there.port}" in refused
    # If the disk was given back, and only the answer was lost, it is asked again.
    assert here.stage() == "given"
    assert "--force" in here.refuses("detach", "a")
    assert "is served here" in here.do("move", "a", "--abort", "--force")
    assert operations(driven_there(here)) > 0
    there.start()


def test_the_destination_gives_up(nodes, tmp_path):
    """The source's move fails, and the disk stays where it is."""
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}")
    there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
    here.send(there)
    assert "waits for another move" in there.do("move", "a", "--abort")
    guest.wait_for("the source", lambda: here.status()["stage"] == "failed")
    assert there.transfer() == {"stage": "incoming", "id": None} and here.transfer() is None
    here.send(there, "a", FINISH)
    assert filecmp.cmp(tmp_path / "old.img", tmp_path / "new.img", shallow=False)


def test_a_move_that_is_ready_fails_when_the_destination_detaches_the_disk(nodes, tmp_path):
    here, there = nodes
    here.attach("mem:8M")
    there.awaits("mem:8M")
    here.send(there)
    there.do("detach", "a")
    assert "it has no disk a" in here.until("failed", timeout=10)["why"]


@pytest.mark.parametrize("again", [False, True], ids=["gone", "attached again"])
def test_the_destination_detaches_the_disk(nodes, tmp_path, again):
    """The move fails, or goes on with the disk that waits now, from the beginning."""
    here, there = nodes
    here.attach(f"file:{filled(tmp_path / 'old.img')}")
    there.awaits(f"file:{image(tmp_path / 'new.img', 32)}")
    here.send(there)
    there.do("detach", "a")
    if again:
        there.awaits(f"file:{other(tmp_path / 'newer.img')}")
    done = millrace.command("disk", "move", "a", FINISH, "--state", here.state)
    if not again:
        assert done.returncode == 2 and "it has no disk a" in done.stderr, done
        there.awaits(f"file:{other(tmp_path / 'newer.img')}")
    if done.returncode:
        assert here.status()["stage"] == "failed" and here.elsewhere() is None and here.transfer() is None
        assert operations(driven_there(here)) > 0
        here.send(there, "a", FINISH)
    assert filecmp.cmp(tmp_path / "old.img", tmp_path / "newer.img", shallow=False)
