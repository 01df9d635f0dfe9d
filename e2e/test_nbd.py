"""Disks for NBD clients: QEMU's tools copy them, and clients that send garbage, or nothing, harm nobody."""

import json
import os
import random
import signal
import socket
import struct
import subprocess
import threading
import time

import guest
import millrace
import nbd
import pytest
from test_disks import Disks, image
from test_metrics import metrics, sum_of

MIB = 1 << 20


def tool(name, *arguments, fails=False):
    """Runs one of QEMU's tools; returns what it says."""
    path = guest.need(name, "qemu-utils")
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == fails, f"{arguments}: {done.returncode} {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def disk(tmp_path, name, uri):
    return f"name={name} uri={uri} socket={tmp_path / name}.sock"


def serving(tmp_path, *specs, flags=(), address=None):
    """A node with these disks, and where its NBD clients connect."""
    address = address or f"127.0.0.1:{millrace.free_port()}"
    port = millrace.free_port()
    node = Disks(tmp_path / "log", *specs, flags=["--nbd", address, "--metrics", f"127.0.0.1:{port}", "--memory", "256M", *flags])
    node.address, node.metrics = address, port
    start = node.start

    def started():
        start()
        guest.wait_for("the node", lambda: "\nnbd: " in node.said(), saw=node.said)
        return node

    node.start = started
    return node


def again(address, name, seconds=20):
    """Connects as soon as somebody serves this export."""
    end = time.monotonic() + seconds
    while True:
        try:
            return nbd.Client(address, name)
        except (OSError, nbd.Closed, nbd.Refused):
            assert time.monotonic() < end
            time.sleep(0.02)


def content(path, seed, mib):
    path.write_bytes(random.Random(seed).randbytes(mib * MIB))
    return path


@pytest.mark.parametrize("how", ["tcp", "unix", "epoll", "free"])
def test_qemu_copies_images_in_and_out(tmp_path, how):
    flags = {"epoll": ["--io", "epoll"], "free": ["--sandbox", "off"]}.get(how, [])
    address = f"unix:{tmp_path / 'nbd.sock'}" if how in ("unix", "free") else None
    specs = [disk(tmp_path, "m", "mem:32M"), disk(tmp_path, "f", f"file:{image(tmp_path / 'f.img', 32)}")]
    with serving(tmp_path, *specs, flags=flags, address=address) as node:
        for name in ("m", "f"):
            uri = nbd.uri(node.address, name)
            said = tool("qemu-img", "info", uri)
            assert "virtual size: 32 MiB" in said
            source, copy = content(tmp_path / f"{name}.in", name, 32), tmp_path / f"{name}.out"
            tool("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", source, uri)
            tool("qemu-img", "convert", "-f", "raw", "-O", "qcow2", uri, copy)
            tool("qemu-img", "compare", "-f", "raw", "-F", "qcow2", source, copy)
            tool("qemu-img", "compare", "-f", "raw", "-F", "raw", source, uri)
        assert (tmp_path / "f.img").read_bytes() == (tmp_path / "f.in").read_bytes()
    if address:
        assert not (tmp_path / "nbd.sock").exists(), "the name goes with the node"


def test_qemu_reads_writes_flushes_discards_and_zeroes(tmp_path):
    path = image(tmp_path / "f.img", 16)
    with serving(tmp_path, disk(tmp_path, "f", f"file:{path}"), disk(tmp_path, "ro", f"file:{image(tmp_path / 'r', 1)}?readonly=on")) as node:
        commands = [
            "write -P 5 0 4M", "read -P 5 0 4M", "flush", "write -f -P 6 1M 512", "read -P 6 1M 512", "discard 2M 64k",
            "write -z 3M 64k", "read -P 0 3M 64k", "write -z -u 256k 4k", "read -P 0 256k 4k", "read -P 5 260k 4k",
        ]  # fmt: skip
        arguments = [word for command in commands for word in ("-c", command)]
        said = tool("qemu-io", "-f", "raw", *arguments, nbd.uri(node.address, "f"))
        assert "rror" not in said and "failed" not in said, said
        data = path.read_bytes()
        assert data[MIB : MIB + 512] == b"\6" * 512 and data[: 256 << 10] == b"\5" * (256 << 10)
        assert data[3 * MIB : 3 * MIB + 65536] == bytes(65536)
        tool("qemu-io", "-f", "raw", "-c", "write 0 512", nbd.uri(node.address, "ro"), fails=True)
        with nbd.Client(node.address, "ro") as client:
            assert client.flags & nbd.READ_ONLY
            assert client.write(0, bytes(512)) == nbd.EPERM
            assert client.read(0, 512) == bytes(512)


@pytest.mark.parametrize("layer", ["", "limit:iops=1000000|"])
def test_copies_keep_holes(tmp_path, layer):
    path = image(tmp_path / "f.img", 64)
    with open(path, "r+b") as file:
        file.seek(10 * MIB)
        file.write(b"x" * MIB)
    with serving(tmp_path, disk(tmp_path, "f", f"{layer}file:{path}"), disk(tmp_path, "m", "mem:64M"), disk(tmp_path, "n", "null:64M")) as node:
        for name in ("f", "m"):
            uri = nbd.uri(node.address, name)
            if name == "m":
                tool("qemu-io", "-f", "raw", "-c", "write -P 120 10M 1M", uri)
            extents = json.loads(tool("qemu-img", "map", "--output=json", "-f", "raw", uri))
            assert [(extent["start"], extent["length"], extent["zero"]) for extent in extents] == [
                (0, 10 * MIB, True),
                (10 * MIB, MIB, False),
                (11 * MIB, 53 * MIB, True),
            ]
            before = sum_of(metrics(node.metrics), "millrace_nbd_bytes")
            copy = tmp_path / f"{name}.copy"
            tool("qemu-img", "convert", "-f", "raw", "-O", "raw", uri, copy)
            assert sum_of(metrics(node.metrics), "millrace_nbd_bytes") - before < 2 * MIB, "holes were read"
            assert copy.read_bytes() == bytes(10 * MIB) + b"x" * MIB + bytes(53 * MIB)
        extents = json.loads(tool("qemu-img", "map", "--output=json", "-f", "raw", nbd.uri(node.address, "n")))
        assert [extent["zero"] for extent in extents] == [False]


def test_only_served_disks_are_exported(tmp_path):
    with serving(tmp_path, disk(tmp_path, "a", "mem:4M"), flags=["--state", tmp_path / "state"]) as node:
        said = tool("qemu-img", "info", nbd.uri(node.address, "x"), fails=True)
        assert 'this node serves no disk "x"' in said
        ask = ["--state", tmp_path / "state"]
        with nbd.Client(node.address) as client:
            assert client.names() == ["a"]
            millrace.succeed("disk", "attach", *ask, disk(tmp_path, "b", "mem:8M"))
            assert client.names() == ["a", "b"]
            with pytest.raises(nbd.Refused):
                client.go("c")
            client.go("b")
            assert client.size == 8 * MIB and client.write(0, b"x" * 512) == 0
            refused = millrace.fail("disk", "detach", *ask, "b")
            assert "an NBD client is connected to disk b" in refused and "--force" in refused
            millrace.succeed("disk", "detach", *ask, "b", "--force")
            assert client.call(nbd.READ, 0, 512) == nbd.ESHUTDOWN
            with pytest.raises(nbd.Closed):
                client.take(1)
        with nbd.Client(node.address) as client:
            assert client.names() == ["a"]


def test_a_disk_that_a_machine_has_is_read_only(tmp_path):
    with serving(tmp_path, disk(tmp_path, "a", "mem:4M")) as node, nbd.Client(node.address, "a") as client:
        assert client.flags & nbd.READ_ONLY == 0 and client.write(0, b"x" * 512) == 0
        with socket.socket(socket.AF_UNIX) as front_end:
            front_end.connect(str(tmp_path / "a.sock"))
            guest.wait_for("a refusal", lambda: client.write(0, b"y" * 512) == nbd.EPERM)
            assert client.call(nbd.TRIM, 0, 4096) == nbd.EPERM
            assert client.call(nbd.FLUSH) == 0
            with nbd.Client(node.address, "a") as other:
                assert other.flags & nbd.READ_ONLY
            assert client.read(512, 512) == bytes(512)
        guest.wait_for("the machine to go", lambda: client.write(0, b"z" * 512) == 0)


def test_a_disk_stays_read_only_while_its_machine_outlives_nodes(tmp_path):
    """From the first moment of the next node on: its launcher has the machine's connection."""
    path = image(tmp_path / "disk.img")
    done, answers, read = threading.Event(), set(), []

    def write():
        while not done.is_set():
            try:
                with nbd.Client(node.address, "a") as client:
                    for _ in range(20):
                        answers.add((bool(client.flags & nbd.READ_ONLY), client.write(0, b"x" * 4096)))
                        read.append(client.read(0, 4096))
            except (OSError, nbd.Closed, nbd.Refused):
                time.sleep(0.001)

    with (
        serving(tmp_path, disk(tmp_path, "a", f"file:{path}")) as node,
        guest.Guest(tmp_path / "vm", tmp_path / "a.sock", mode="load", secs=6, mib=16, then="stay") as vm,
    ):
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        writer = threading.Thread(target=write)
        writer.start()
        try:
            for nth in range(3):
                time.sleep(1)
                if nth == 1:
                    node.upgrade()
                else:
                    os.kill(node.pid(), signal.SIGKILL)
            vm.wait_for(r"GUEST LOAD OK")
        finally:
            # The disk is written when the machine has gone.
            done.set()
            writer.join()
        vm.quit()
    assert answers == {(True, nbd.EPERM)} and len(read) > 20


def test_hostile_clients_harm_nobody(tmp_path):
    rng = random.Random(7)
    with serving(tmp_path, disk(tmp_path, "a", "mem:16M")) as node, nbd.Client(node.address, "a") as good:
        pid = node.pid()
        for nth in range(60):
            with nbd.dial(node.address) as client:
                garbage = rng.randbytes(rng.choice([1, 4, 20, 100, 5000]))
                if nth % 3 == 1:
                    garbage = struct.pack(">I", 3) + b"IHAVEOPT" + garbage
                elif nth % 3 == 2:
                    option = rng.choice([1, 3, 6, 7, 8, 9, 10]), rng.choice([0, 4, 40])
                    garbage = struct.pack(">I8sII", 3, b"IHAVEOPT", *option) + garbage
                client.sendall(garbage)
        # One announces data and sends a part of it; one takes no replies; one does nothing.
        half, deaf, idle = nbd.Client(node.address, "a"), nbd.Client(node.address, "a"), nbd.dial(node.address)
        half.send(nbd.WRITE, 0, MIB, b"x" * 1000)
        for _ in range(300):
            deaf.send(nbd.READ, 0, MIB)
        for nth in range(50):
            assert good.write(nth * 4096, bytes([nth]) * 4096) == 0
            assert good.read(nth * 4096, 4096) == bytes([nth]) * 4096
        assert good.read(0, good.longest)[:4096] == bytes(4096)
        assert good.call(nbd.READ, 0, 2 * good.longest) == nbd.EINVAL
        for command, offset, length, error in [
            (nbd.READ, 16 * MIB, 512, nbd.EINVAL), (nbd.READ, (1 << 64) - 512, 512, nbd.EINVAL), (nbd.READ, 1, 512, nbd.EINVAL),
            (nbd.ZEROES, 16 * MIB, 512, nbd.ENOSPC), (99, 0, 512, nbd.EINVAL), (nbd.TRIM, 0, 511, nbd.EINVAL),
        ]:  # fmt: skip
            assert good.call(command, offset, length) == error
        assert good.call(nbd.WRITE, 16 * MIB - 512, 1024, bytes(1024)) == nbd.ENOSPC
        # Half of a request, and then the end.
        half.socket.close()
        deaf.socket.close()
        idle.close()
        assert good.read(0, 512) == bytes(512)
        assert node.pid() == pid and "panicked" not in node.said()


def test_connections_are_bounded(tmp_path):
    with serving(tmp_path, disk(tmp_path, "a", "mem:4M"), disk(tmp_path, "b", "mem:4M")) as node:
        clients = [nbd.Client(node.address, "a") for _ in range(32)]
        # One disk leaves room for the others.
        with pytest.raises((nbd.Closed, OSError)):
            nbd.Client(node.address, "a").read(0, 512)
        clients += [nbd.Client(node.address, "b") for _ in range(32)]
        for _ in range(3):
            with pytest.raises(nbd.Closed):
                nbd.Client(node.address, "a")
        assert all(client.read(0, 512) == bytes(512) for client in clients)
        for client in clients:
            client.send(nbd.DISC)
            client.socket.close()
        with again(node.address, "a") as client:
            assert client.write(0, b"x" * 4096) == 0
            families = metrics(node.metrics)
            of = {name: {sample.labels.get("kind"): sample.value for sample in family.samples} for name, family in families.items()}
            assert of["millrace_nbd_refused_connections"][None] == 3
            assert of["millrace_nbd_bytes"] == {"read": 64 * 512, "write": 4096}
            assert of["millrace_nbd_requests"] == {"read": 64, "write": 1, "other": 0}
            assert of["millrace_nbd_connections"][None] >= 1


@pytest.mark.parametrize("address", ["tcp", "unix"])
def test_clients_come_back_to_a_node_that_was_killed(tmp_path, address):
    """Its launcher starts another one at the same address: the spare node, and then one that starts from the beginning."""
    address = f"unix:{tmp_path / 'nbd.sock'}" if address == "unix" else None
    with serving(tmp_path, disk(tmp_path, "a", "mem:4M"), address=address) as node:
        for nth in range(3):
            if nth == 0:
                guest.wait_for("a spare node", lambda: "a spare node was started" in node.said())
            with again(node.address, "a") as client:
                assert client.write(nth * 512, bytes([nth + 1]) * 512) == 0
                old = node.pid()
                os.kill(old, signal.SIGKILL)
                with pytest.raises((nbd.Closed, ConnectionError)):
                    client.take(1)
            guest.wait_for("another node", lambda old=old: node.pid() not in (old, node.process.pid))
            with again(node.address, "a") as client:
                assert client.read(0, 512 * (nth + 1)) == b"".join(bytes([n + 1]) * 512 for n in range(nth + 1))
            # It serves before it says so, and a signal in between ends it at once.
            guest.wait_for("its report", lambda nth=nth: node.said().count("\nnbd: ") == nth + 2)


def test_a_node_may_die_while_its_spare_starts(tmp_path):
    """The spare must not listen for itself then: its launcher does."""
    with serving(tmp_path, disk(tmp_path, "a", "mem:4M")) as node:
        known = []
        for delay_ms in (0, 6, 12):
            # Without a pause, because the moment is short.
            end = time.monotonic() + 20
            while not (spares := [pid for pid in millrace.children(node.process.pid) if pid not in known and millrace.role(pid) == "spare"]):
                assert time.monotonic() < end, node.said()
            known += spares
            time.sleep(delay_ms / 1000)
            old = node.pid()
            os.kill(old, signal.SIGKILL)
            guest.wait_for("another node", lambda old=old: node.pid() not in (old, node.process.pid), saw=node.said)
            with again(node.address, "a") as client:
                assert client.read(0, 512) == bytes(512)
            guest.wait_for("its report", lambda: node.said().count("\nnbd: ") == len(known) + 1)
            metrics(node.metrics)


@pytest.mark.parametrize("sandbox", ["auto", "off"])
@pytest.mark.parametrize("address", ["tcp", "unix"])
def test_an_upgrade_keeps_the_address_and_every_acknowledged_write(tmp_path, sandbox, address):
    address = f"unix:{tmp_path / 'nbd.sock'}" if address == "unix" else None
    spec = disk(tmp_path, "a", f"file:{image(tmp_path / 'a.img', 4)}")
    stop, written, refused = threading.Event(), {}, []
    with serving(tmp_path, spec, flags=["--sandbox", sandbox], address=address) as node:

        def write():
            nth = 0
            while not stop.is_set():
                try:
                    with nbd.Client(node.address, "a") as client:
                        while not stop.is_set():
                            nth += 1
                            assert client.write(nth % 1000 * 4096, struct.pack(">I", nth) * 1024) == 0
                            written[nth % 1000] = nth
                except ConnectionRefusedError as error:
                    refused.append(error)
                except (nbd.Closed, OSError):
                    pass

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(3):
                before = len(written)
                guest.wait_for("writes", lambda before=before: len(written) > min(before + 20, 999))
                node.upgrade()
        finally:
            stop.set()
            writer.join()
        assert not refused
        with again(node.address, "a") as client:
            for block, nth in written.items():
                assert client.read(block * 4096, 4096) in (struct.pack(">I", nth) * 1024, struct.pack(">I", nth + 1000) * 1024)
        node.stop()
    if address:
        assert not (tmp_path / "nbd.sock").exists()


def test_an_upgrade_waits_for_what_slow_disks_have_in_flight(tmp_path):
    """Some megabytes are in flight, and take longer than the rest of an upgrade may."""
    spec = disk(tmp_path, "a", f"limit:bytes=1500K&burst=1ms|file:{image(tmp_path / 'a.img', 64)}")
    stop, lost = threading.Event(), []
    with serving(tmp_path, spec) as node:

        def write():
            while not stop.is_set():
                try:
                    with nbd.Client(node.address, "a", timeout=60) as client:
                        # More than a connection may have in flight.
                        for nth in range(64):
                            client.send(nbd.WRITE, nth * MIB, MIB, bytes([nth]) * MIB)
                        client.take(16)
                except (nbd.Closed, OSError) as error:
                    lost.append(error)

        writers = [threading.Thread(target=write) for _ in range(3)]
        for writer in writers:
            writer.start()
        try:
            time.sleep(3)
            began = time.monotonic()
            node.upgrade()
            assert time.monotonic() - began > 4, "nothing was in flight"
            assert "no upgrade" not in node.said()
        finally:
            stop.set()
            node.stop()
            for writer in writers:
                writer.join()


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_an_upgrade_follows_the_configuration_to_another_address(tmp_path, sandbox):
    config = tmp_path / "config.toml"
    addresses = [f"127.0.0.1:{millrace.free_port()}", f"unix:{tmp_path / 'nbd.sock'}"]
    config.write_text(f"nbd = '{addresses[0]}'\n")
    spec = disk(tmp_path, "a", "mem:4M")
    with Disks(tmp_path / "log", spec, flags=["--config", config, "--sandbox", sandbox]) as node:
        for nth in (1, 2, 3):
            with again(addresses[(nth - 1) % 2], "a") as client:
                assert client.write(0, bytes([nth]) * 512) == 0
            config.write_text(f"nbd = '{addresses[nth % 2]}'\n")
            node.upgrade()
            with again(addresses[nth % 2], "a") as client:
                assert client.read(0, 512) == bytes([nth]) * 512
            with pytest.raises(OSError):
                nbd.Client(addresses[(nth - 1) % 2], "a")


def test_the_address_must_be_free_and_out_of_reach_of_others(tmp_path):
    with serving(tmp_path, disk(tmp_path, "a", "mem:4M"), address=f"unix:{tmp_path / 'nbd.sock'}") as node:
        said = millrace.fail("serve", "--disk", disk(tmp_path, "b", "mem:4M"), "--nbd", node.address)
        assert "nbd.sock is in use" in said, said
        with nbd.Client(node.address, "a") as client:
            assert client.read(0, 512) == bytes(512)
    for address, why in [("0.0.0.0:10809", "--allow-remote"), ("here", "127.0.0.1:10809 or unix:PATH"), ("unix:", "unix:PATH")]:
        said = millrace.fail("serve", "--disk", disk(tmp_path, "b", "mem:4M"), "--nbd", address)
        assert why in said, said
    (tmp_path / "file").write_text("not a socket")
    said = millrace.fail("serve", "--disk", disk(tmp_path, "b", "mem:4M"), "--nbd", f"unix:{tmp_path / 'file'}")
    assert "not a socket" in said and (tmp_path / "file").read_text() == "not a socket"
