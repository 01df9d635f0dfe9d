"""Disks that live on NBD servers, ours and QEMU's: they may die, be read-only, and be moved to and from."""

import json
import os
import signal
import subprocess
import time

import guest
import millrace
import nbd
import pytest
from test_admin import Node, spec
from test_disks import image
from test_events import events, names
from test_moves import filled
from test_nbd import disk, serving, tool

MIB = 1 << 20
SIZE = 64 * MIB


class QemuNbd:
    """QEMU's server of one image."""

    def __init__(self, tmp_path, path, *flags, unix=True):
        self.log = open(tmp_path / "qemu-nbd.log", "ab")
        self.address = f"unix:{tmp_path / 'qemu.sock'}" if unix else f"127.0.0.1:{millrace.free_port()}"
        where = ["-k", self.address[5:]] if unix else ["-b", "127.0.0.1", "-p", self.address.rsplit(":")[1]]
        self.command = [guest.need("qemu-nbd", "qemu-utils"), "-t", "-e", "0", "-f", "raw", "-x", "a", "--discard=unmap", *where, *flags, str(path)]
        self.process = None

    def __enter__(self):
        return self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)
        guest.wait_for("qemu-nbd", self.answers)
        return self

    def answers(self):
        assert self.process.poll() is None, open(self.log.name).read()
        try:
            nbd.Client(self.address).socket.close()
            return True
        except OSError:
            return False

    def kill(self):
        self.process.kill()
        self.process.wait()
        if self.address.startswith("unix:"):
            os.unlink(self.address[5:])

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()


def bench(tmp_path, seconds=3, **flags):
    """Starts to use disk `a`, and to check what it reads."""
    flags = {"rw": "randrw", "depth": 16, "queues": 2} | flags
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [millrace.BINARY, "bench", "vdisk", "--socket", tmp_path / "a.sock", "--seconds", seconds, "--verify", "--json", *words]
    return subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process, reconnects=0):
    """What it has done without an error."""
    said, error = process.communicate(timeout=guest.PATIENCE)
    assert process.returncode == 0, error
    said = json.loads(said)
    assert said["errors"] == 0 and said["reconnects"] == reconnects, said
    return said["operations"]


@pytest.fixture
def server(tmp_path):
    with QemuNbd(tmp_path, image(tmp_path / "far.img", 64)) as server:
        yield server


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as node:
        yield node


@pytest.mark.parametrize("how", ["unix", "tcp", "epoll", "free"])
def test_a_guest_waits_for_a_server_that_is_killed(tmp_path, how):
    flags = {"epoll": ["--io", "epoll"], "free": ["--sandbox", "off"]}.get(how, [])
    far = image(tmp_path / "far.img", 64)
    with QemuNbd(tmp_path, far, unix=how != "tcp") as server, Node(tmp_path, *flags, specs=[disk(tmp_path, "a", nbd.uri(server.address, "a"))]) as node:
        assert node.disks()["a"]["size_bytes"] == SIZE
        load = bench(tmp_path, 5)
        for nth in (1, 2):
            guest.wait_for("writes", lambda: far.stat().st_blocks > 0)
            server.kill()
            guest.wait_for("a loss", lambda nth=nth: node.said().count("connection to an NBD server is lost") == nth)
            time.sleep(nth - 1)
            server.start()
            guest.wait_for("a connection", lambda nth=nth: node.said().count("connected to an NBD server again") == nth)
        assert ended(load) > 0
        assert "panicked" not in node.said()


def test_our_own_server_may_be_killed_and_upgraded(tmp_path):
    far = image(tmp_path / "far.img", 64)
    (tmp_path / "far").mkdir()
    with serving(tmp_path / "far", disk(tmp_path, "far", f"file:{far}")) as server:
        uri = nbd.uri(server.address, "far")
        with Node(tmp_path, specs=[disk(tmp_path, "a", f"{uri}")]) as node:
            load = bench(tmp_path, 6)
            guest.wait_for("writes", lambda: far.stat().st_blocks > 0)
            os.kill(server.pid(), signal.SIGKILL)
            guest.wait_for("a loss", lambda: "is lost" in node.said())
            time.sleep(1)
            server.upgrade()
            assert ended(load) > 0
            assert "panicked" not in node.said() + server.said()


def test_a_machine_loses_nothing_when_servers_and_nodes_die(node, server, tmp_path):
    node.do("attach", spec(tmp_path, "a", nbd.uri(server.address, "a")))
    with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", queues=2, processors=2, mode="load", secs=14, mib=16, holes="holes") as vm:
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        for nth in range(4):
            time.sleep(1)
            server.kill()
            if nth == 1:
                old = node.pid()
                os.kill(old, signal.SIGKILL)
            server.start()
            if nth == 1:
                guest.wait_for("the next node", lambda old=old: node.pid() not in (old, node.process.pid))
            if nth == 2:
                node.upgrade()
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()
    assert "panicked" not in node.said()


def test_a_disk_pauses_while_its_server_stays_away(node, server, tmp_path):
    uri = nbd.uri(server.address, "a") + "&reconnect-delay=300ms"
    node.do("attach", spec(tmp_path, "a", uri) + " on_error=pause")
    load = bench(tmp_path, 2)
    guest.wait_for("writes", lambda: (tmp_path / "far.img").stat().st_blocks > 0)
    server.kill()
    guest.wait_for("the pause", lambda: node.disks()["a"]["paused"])
    server.start()

    def resumes():
        node.do("resume", "a")
        return load.poll() is not None or not node.disks()["a"]["paused"]

    guest.wait_for("its end", lambda: resumes() and load.poll() is not None)
    assert ended(load) > 0
    assert "paused" in names(events(node))


def test_the_next_nodes_connect_again(node, server, tmp_path):
    """An upgrade hands over the line to the launcher, which replaces its own program, too; a node that is killed gets another one."""
    node.do("attach", spec(tmp_path, "a", nbd.uri(server.address, "a")))
    load = bench(tmp_path, 12)
    for nth in range(4):
        old = node.pid()
        time.sleep(1)
        if nth % 2 == 0:
            node.upgrade()
        else:
            os.kill(old, signal.SIGKILL)
            guest.wait_for("the next node", lambda old=old: node.pid() not in (old, node.process.pid))
        server.kill()
        server.start()
    assert ended(load) > 0
    node.restart()
    assert node.disks()["a"]["size_bytes"] == SIZE
    ended(bench(tmp_path, 1))


def test_a_disk_moves_to_a_server_and_back(node, server, tmp_path):
    old, back, far = filled(tmp_path / "a.img"), tmp_path / "b.img", tmp_path / "far.img"
    far.write_bytes(b"x" * SIZE)
    uri = nbd.uri(server.address, "a")
    node.do("attach", spec(tmp_path, "a", f"file:{old}"))
    assert "has moved to" in node.do("move", "a", "--to", uri, "--finish-when-ready")
    assert node.disks()["a"]["uri"] == uri
    assert far.read_bytes() == old.read_bytes()
    assert far.stat().st_blocks < SIZE // 512, "holes stay holes"
    load = bench(tmp_path, 4)
    assert "has moved" in node.do("move", "a", "--to", f"file:{back}", "--finish-when-ready")
    assert "has moved" in node.do("move", "a", "--to", uri, "--finish-when-ready")
    # The line of the second move is the one that is used now.
    server.kill()
    server.start()
    assert ended(load) > 0
    said = node.refuses("move", "a", "--to", nbd.uri(server.address, "b"))
    assert "there is none of that name" in said
    assert node.disks()["a"]["uri"] == uri
    node.restart()
    ended(bench(tmp_path, 1))


def test_a_move_survives_the_death_of_the_server(node, server, tmp_path):
    node.do("attach", spec(tmp_path, "a", f"file:{filled(tmp_path / 'a.img')}"))
    node.do("move", "--limit", "20M")
    node.do("move", "a", "--to", nbd.uri(server.address, "a"), "--finish-when-ready", "--background")
    server.kill()
    server.start()
    node.do("move", "--limit", "0")
    guest.wait_for("the move", lambda: node.disks()["a"]["uri"].startswith("nbd"))
    assert (tmp_path / "far.img").read_bytes() == (tmp_path / "a.img").read_bytes()


@pytest.mark.parametrize("kind", ["qemu", "ours"])
def test_properties_of_an_export_are_those_of_the_disk(tmp_path, kind):
    """Seen through a second server: sizes, holes, read-only, discards."""
    path = image(tmp_path / "far.img", 16)
    with open(path, "r+b") as file:
        file.truncate(16 * MIB + 4608)
        file.seek(5 * MIB)
        file.write(b"x" * MIB)
    (tmp_path / "far").mkdir()
    ours = serving(tmp_path / "far", disk(tmp_path, "far", f"file:{path}?readonly=on"))
    with QemuNbd(tmp_path, path, "-r") if kind == "qemu" else ours as server:
        uri = nbd.uri(server.address, "a" if kind == "qemu" else "far")
        with serving(tmp_path, disk(tmp_path, "a", uri)) as node, nbd.Client(node.address, "a") as client:
            assert client.size == 16 * MIB + 4608
            assert client.flags & nbd.READ_ONLY and client.write(0, bytes(512)) == nbd.EPERM
            assert client.read(5 * MIB - 512, 1024) == bytes(512) + b"x" * 512
            extents = json.loads(tool("qemu-img", "map", "--output=json", "-f", "raw", nbd.uri(node.address, "a")))
            assert [(extent["start"], extent["zero"]) for extent in extents] == [(0, True), (5 * MIB, False), (6 * MIB, True)]
    if kind == "qemu":
        with QemuNbd(tmp_path, path) as server:
            for params, read_only in [("", False), ("&readonly=on", True)]:
                with serving(tmp_path, disk(tmp_path, "a", nbd.uri(server.address, "a") + params)) as node, nbd.Client(node.address, "a") as client:
                    assert bool(client.flags & nbd.READ_ONLY) == read_only
                    if not read_only:
                        assert client.write(0, b"y" * 4096) == 0 and client.call(nbd.FLUSH) == 0
                        assert client.call(nbd.ZEROES, 5 * MIB, MIB) == 0 and client.call(nbd.TRIM, 0, MIB) == 0
                        assert client.read(5 * MIB, MIB) == bytes(MIB)


def test_images_are_made_of_exports(server, tmp_path):
    far, copy = filled(tmp_path / "far.img"), tmp_path / "copy.img"
    uri = nbd.uri(server.address, "a")
    millrace.succeed("disk", "create", copy, "--from", uri)
    assert copy.read_bytes() == far.read_bytes() and copy.stat().st_blocks <= far.stat().st_blocks
    millrace.succeed("disk", "convert", uri, tmp_path / "copy.qcow2")
    tool("qemu-img", "compare", "-f", "raw", "-F", "qcow2", far, tmp_path / "copy.qcow2")


def test_a_device_that_cannot_be_opened_is_named(node, server, tmp_path):
    for uri, why in [
        (nbd.uri(server.address, "b"), "there is none of that name"),
        (f"nbd://127.0.0.1:{millrace.free_port()}/a", "refused"),
        ("nbd+unix:///a?socket=/none/there", "No such file"),
        ("nbd://no-such-host.invalid/a", "no-such-host.invalid"),
        ("nbds://127.0.0.1/a", "TLS"),
        ("nbd://127.0.0.1", "refused"),
    ]:
        said = node.refuses("attach", spec(tmp_path, "a", uri))
        assert why in said, said
    assert node.disks() == {}
