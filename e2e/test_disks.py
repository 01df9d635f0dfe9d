"""Disks for virtual machines: a real guest under QEMU verifies what it reads from our disk."""

import contextlib
import ctypes
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading
import time

import guest
import migration
import millrace
import pytest
import resp


class Successor:
    """A process started by a child of ours that has ended, which makes us its parent; with the methods of Popen that `Disks` needs."""

    PR_SET_CHILD_SUBREAPER = 36

    def __init__(self, pid):
        self.pid = pid
        self.returncode = None

    @staticmethod
    def inherit():
        """Makes us the parent of our children's children when their parents end."""
        assert ctypes.CDLL(None, use_errno=True).prctl(Successor.PR_SET_CHILD_SUBREAPER, 1) == 0

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=guest.PATIENCE):
        guest.wait_for("the end of a successor", lambda: self.poll() is not None, timeout)
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Disks:
    """A node that serves disks: started, killed and started again, and upgraded."""

    def __init__(self, log, *specs, flags=(), binary=millrace.BINARY):
        self.arguments = [binary, "serve", *flags]
        for spec in specs:
            self.arguments += ["--disk", spec]
        self.sockets = [pathlib.Path(word[7:]) for spec in specs for word in spec.split() if word.startswith("socket=")]
        self.log = pathlib.Path(log)
        self.process = None

    def start(self):
        """Starts the node and waits until it listens."""
        with open(self.log, "ab") as out:
            self.process = self.popen(out)
        for path in self.sockets:
            guest.wait_for(path, lambda path=path: self.process.poll() is not None or path.exists())
        assert self.process.poll() is None, self.said()
        return self

    def popen(self, out):
        return subprocess.Popen([str(a) for a in self.arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def said(self):
        """The output of all its processes."""
        return self.log.read_text(errors="replace")

    def kill(self):
        """Kills it at any instruction."""
        self.process.kill()
        self.process.wait()

    def restart(self, rest_s=0.2):
        """Kills it, and starts it again after a pause."""
        self.kill()
        time.sleep(rest_s)
        return self.start()

    def restart_connected(self, rest_s=0.2):
        """The same, and waits until QEMU has reconnected to all disks."""
        connected = self.said().count("has connected")
        self.restart(rest_s)
        guest.wait_for("QEMU", lambda: self.said().count("has connected") >= connected + len(self.sockets))

    def pid(self):
        """The process that serves the guests."""
        return millrace.serving(self.process.pid, self.said())

    def upgrade(self, ask=None):
        """Makes it hand over, by default to the program that its name refers to now, and waits until the old process has ended."""
        Successor.inherit()
        said, old = len(self.said()), self.pid()
        if ask:
            ask()
        else:
            self.process.send_signal(signal.SIGUSR2)
        successor = guest.wait_for("a successor", lambda: re.findall(r"handed over.* successor=(\d+)", self.said()[said:]), 30)
        assert len(successor) == 1, self.said()
        if old == self.process.pid:
            assert self.process.wait(30) == 0, self.said()
            self.process = Successor(int(successor[0]))
        else:
            # The launcher stays the same.
            guest.wait_for("the end of the old process", lambda: not pathlib.Path(f"/proc/{old}").exists(), 30)
            assert self.process.poll() is None, self.said()
        assert self.pid() == int(successor[0])

    def refuse_upgrade(self, why, meanwhile=lambda: None):
        """Makes it try the same, which must fail for this reason."""
        said = len(self.said())
        self.process.send_signal(signal.SIGUSR2)
        meanwhile()
        failed = guest.wait_for("a refusal", lambda: re.search(r"no upgrade.*", self.said()[said:]), 30)
        assert re.search(why, failed[0]), failed[0]

    def stop(self):
        """Stops it; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            assert self.stop() == 0, self.said()


def image(path, mib=128):
    with open(path, "wb") as file:
        file.truncate(mib << 20)
    return path


@contextlib.contextmanager
def machine(tmp_path, uri=None, name="a", flags=(), **words):
    """A node with one disk, and a guest with that disk."""
    uri = uri or f"file:{image(tmp_path / 'disk.img')}"
    path = tmp_path / f"{name}.sock"
    node = Disks(tmp_path / f"{name}.log", f"name={name} uri={uri} socket={path} queues=4", flags=flags)
    with node, guest.Guest(tmp_path / f"vm-{name}", path, queues=2, processors=2, **words) as vm:
        yield node, vm


# QEMU offers packed rings only on request.
both_forms = pytest.mark.parametrize("packed", [False, True], ids=["split", "packed"])


def test_a_file_system_on_every_engine(tmp_path):
    specs = [
        f"name={engine} uri=file:{image(tmp_path / engine)}?engine={engine} socket={tmp_path / engine}.sock queues=4"
        for engine in ("uring", "aio", "mmap", "sync")
    ]
    with (
        Disks(tmp_path / "log", *specs) as node,
        guest.Guest(tmp_path / "vm", node.sockets, queues=2, processors=2, mode="files") as vm,
    ):
        vm.wait_for(r"GUEST FILES OK")
        vm.wait_for_end()


@pytest.mark.parametrize("io", ["auto", "epoll"])
def test_discarded_blocks_read_as_zeroes(tmp_path, io, long):
    """Also in the node that takes over."""
    if io == "epoll" and not long:
        pytest.skip("--long does it without io_uring, too")
    uris = {engine: f"file:{image(tmp_path / engine, 32)}?engine={engine}" for engine in ("uring", "aio", "mmap", "sync")}
    uris["mem"] = "dirty:granule=4K|mem:32M"
    specs = [f"name={name} uri={uri} socket={tmp_path / name}.sock queues=2" for name, uri in uris.items()]
    with (
        Disks(tmp_path / "log", *specs, flags=["--io", io]) as node,
        guest.Guest(tmp_path / "vm", node.sockets, queues=2, mode="many", secs=6, mib=8, holes="holes") as vm,
    ):
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*", times=2 * len(uris))
        node.upgrade()
        vm.wait_for(r"GUEST MANY OK")
        assert len(re.findall(r"GUEST CHECKED .* emptied=[1-9]", vm.text())) == len(uris), vm.text()
        vm.wait_for_end()


def test_a_guest_has_its_disk_without_io_uring(tmp_path):
    with machine(tmp_path, flags=["--io", "epoll"], mode="files") as (_, vm):
        vm.wait_for(r"GUEST FILES OK")
        vm.wait_for_end()


@both_forms
def test_a_guest_survives_pauses_and_a_reset(tmp_path, packed, long):
    if not packed and not long:
        pytest.skip("split rings are paused and reset under load in test_machines.py; --long does both here")
    with machine(tmp_path, packed=packed, mode="load", secs=3, mib=16) as (node, vm):
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        for _ in range(3):
            vm.stop()
            vm.cont()
        vm.reset()
        vm.wait_for(r"GUEST LOAD workers", times=2)
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()
        assert "WARN" not in node.said(), node.said()


@both_forms
def test_a_kill_under_load_loses_and_repeats_nothing(tmp_path, packed, long):
    """Requests complete out of order, so only the in-flight region knows which are left."""
    if packed and not long:
        pytest.skip("the crate vhost does it at every step; --long does it here, too")
    times = 50 if long else 3
    uri = f"delay:all=0ms..20ms|file:{image(tmp_path / 'disk.img')}"
    with machine(tmp_path, uri, packed=packed, mode="load", secs=5 + 5 * times // 2, mib=16, workers=16) as (node, vm):
        for nth in range(times):
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*", times=2 + 2 * nth)
            node.restart()
        vm.wait_for(r"GUEST LOAD OK", timeout=60 + 5 * times)
        checked = vm.wait_for(r"GUEST CHECKED ops=(\d+)")
        assert int(checked[1]) > 100
        vm.wait_for_end()
    resubmitted = [int(word[10:]) for word in node.said().split() if word.startswith("resubmits=")]
    assert sum(resubmitted) > times, "no request was in flight at the kill"
    assert f"packed={str(packed).lower()} resubmits=" in node.said()
    if os.cpu_count() > 1:
        assert set(re.findall(r"core=(\d).* ring=[01] .*resubmits=", node.said())) == {"0", "1"}, "a disk's queues share a core"


def test_a_kill_while_the_firmware_reads(tmp_path):
    """Not earlier: QEMU 7.2 disables a device for good if its back end goes away while the device starts."""
    with machine(tmp_path, flags=["--log-level", "debug"], mode="load", secs=2, mib=8) as (node, vm):
        guest.wait_for("the firmware's ring", lambda: "a ring runs" in node.said())
        node.restart()
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


def test_a_machine_boots_from_its_disk_although_the_node_is_killed(tmp_path):
    """As in docs/DISKS.md: only firmware, a boot loader and the disk."""
    boot, other = tmp_path / "boot.img", image(tmp_path / "other.img")
    guest.boot_image(boot, mode="load", dev="vdb", secs=2, mib=16)
    paths = [tmp_path / "a.sock", tmp_path / "b.sock"]
    specs = [f"name={name} uri=file:{file} socket={path} queues=2" for name, file, path in zip("ab", (boot, other), paths)]
    with (
        Disks(tmp_path / "log", *specs) as node,
        guest.Guest(tmp_path / "vm", paths, queues=2, boot=True) as vm,
    ):
        vm.wait_for(r"SYSLINUX")
        node.restart()
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


def test_a_stopped_node_leaves_the_remaining_requests_to_the_next(tmp_path):
    with machine(tmp_path, mode="load", secs=6, mib=8) as (node, vm):
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        assert node.stop() == 0
        node.start()
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


@both_forms
def test_a_guest_moves_to_another_node_and_back(tmp_path, packed, long):
    """Shared storage: both nodes have the file open, and one guest writes at a time. Each node is killed just after the guest has
    arrived, with a region that is new but not empty, a known trap for targets. Every other node is upgraded before that.

    No move begins while QEMU is disconnected: the requests in flight are then in the region, which QEMU 7.2 does not migrate. The
    device is slow, so that every worker has a read or write in flight when the machine stops.
    """
    if packed and not long:
        pytest.skip("--long moves packed rings, too")
    shared = image(tmp_path / "disk.img")
    moves = 20 if long else 2
    words = dict(queues=2, processors=2, packed=packed, mode="load", secs=8 + 8 * moves, mib=1, workers=64)
    with contextlib.ExitStack() as stack:
        nodes = []
        for name in "ab":
            uri = f"delay:all=0ms..500ms|file:{shared}?lock=ring"
            spec = f"name={name} uri={uri} socket={tmp_path / name}.sock queues=4"
            nodes.append(stack.enter_context(Disks(tmp_path / f"{name}.log", spec, flags=["--log-level", "debug"])))
        vm = stack.enter_context(guest.Guest(tmp_path / "vm-a", nodes[0].sockets[0], **words))
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        for nth in range(moves):
            there = nodes[(nth + 1) % 2]
            run = there.said().count("a ring runs")

            def arrive(at, there=there, nth=nth):
                return stack.enter_context(guest.Guest(tmp_path / f"vm-{nth}", there.sockets[0], incoming=at, **words))

            def arrived(moved, vm=vm, nth=nth):
                if nth == 0:
                    migration.find_what_is_changed(vm, moved)

            vm = migration.move(vm, arrive, arrived=arrived)
            guest.wait_for("both rings", lambda there=there, run=run: there.said().count("a ring runs") >= run + 2)
            assert f"packed={str(packed).lower()}" in there.said()
            if nth % 2 == 1:
                there.upgrade()
            there.restart_connected(0)
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*", times=vm.text().count("GUEST TICK") + 1)
        vm.wait_for(r"GUEST LOAD OK", timeout=240)


def test_upgrades_under_load_are_short_pauses(tmp_path, long):
    """The connection stays the same: the guest and QEMU do not notice."""
    times = 50 if long else 3
    with machine(tmp_path, mode="load", secs=6 + 2 * times, mib=16, workers=16) as (node, vm):
        for nth in range(times):
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*", times=2 + nth)
            node.upgrade()
        vm.wait_for(r"GUEST LOAD OK", timeout=60 + 5 * times)
        slowest_ms = int(vm.wait_for(r"GUEST CHECKED .*slowest_ms=(\d+)")[1])
        vm.wait_for_end()
        said = node.said()
    pauses_us = [int(pause) for pause in re.findall(r"pause_us=(\d+)", said)]
    assert len(pauses_us) == times
    assert "resumes with unfinished requests" not in said, "a request was in flight when its ring was quiesced"
    print(f"{times} upgrades: longest pause {max(pauses_us)} us; slowest request in the guest {slowest_ms} ms")
    assert slowest_ms < 2000


def test_a_kill_after_an_upgrade_loses_nothing(tmp_path, long):
    if not long:
        pytest.skip("where a guest moves there and back a node is killed after an upgrade; --long does it alone, too")
    """The in-flight region is the one that the first node made."""
    uri = f"delay:all=0ms..20ms|file:{image(tmp_path / 'disk.img')}"
    with machine(tmp_path, uri, mode="load", secs=14, mib=16, workers=16) as (node, vm):
        for nth in range(2):
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*", times=2 + 3 * nth)
            node.upgrade()
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*", times=3 + 3 * nth)
            node.restart()
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()
        assert "resubmits=" in node.said(), "no request was in flight at the kill"


@pytest.mark.parametrize("uri", ["mem:128M", "dirty:granule=4K|mem:128M", "dirty:file={}/map|file:{}/disk.img"])
def test_upgrades_keep_the_state_of_disks_without_a_file(tmp_path, uri, long):
    if uri == "mem:128M" and not long:
        pytest.skip("it is below the bitmap of another one; --long does it alone, too")
    image(tmp_path / "disk.img")
    with machine(tmp_path, uri.format(tmp_path, tmp_path), mode="load", secs=6, mib=16) as (node, vm):
        for nth in range(2):
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*", times=2 + nth)
            node.upgrade()
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


def test_a_guest_moves_between_upgraded_nodes(tmp_path, long):
    if not long:
        pytest.skip("where a guest moves there and back one node is upgraded; --long does it with both")
    shared = image(tmp_path / "disk.img")
    with contextlib.ExitStack() as stack:
        here, there = (
            stack.enter_context(
                Disks(tmp_path / f"{name}.log", f"name={name} uri=file:{shared}?lock=ring socket={tmp_path / name}.sock queues=4")
            )
            for name in "ab"
        )
        words = dict(queues=2, processors=2, mode="load", secs=12, mib=16)
        vm = stack.enter_context(guest.Guest(tmp_path / "vm-a", here.sockets[0], **words))
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        here.upgrade()

        def arrive(at):
            moved = stack.enter_context(guest.Guest(tmp_path / "vm-b", there.sockets[0], incoming=at, **words))
            # It waits, connected and not set up.
            there.upgrade()
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*", times=2)
            return moved

        # Paused for good, with stopped rings and an active dirty log.
        moved = migration.move(vm, arrive, arrived=lambda _: here.upgrade())
        there.upgrade()
        there.restart(0)
        moved.wait_for(r"GUEST LOAD OK", timeout=240)


def test_idle_disks_are_handed_over_too(tmp_path):
    with Disks(tmp_path / "log", f"name=a uri=file:{image(tmp_path / 'disk.img')} socket={tmp_path / 'a.sock'}") as node:
        for _ in range(2):
            node.upgrade()
        assert node.sockets[0].exists()
        assert "in use" in millrace.fail("serve", "--disk", f"name=b uri=file:{tmp_path / 'disk.img'} socket={tmp_path / 'b.sock'}")
        with guest.Guest(tmp_path / "vm", node.sockets[0], mode="files") as vm:
            vm.wait_for(r"GUEST FILES OK")
            vm.wait_for_end()
    assert not node.sockets[0].exists(), "its last owner removes the name"


@contextlib.contextmanager
def own_program(tmp_path):
    """A copy of the program under a name that other programs can replace."""
    own = tmp_path / "bin" / "millrace"
    own.parent.mkdir()
    shutil.copy(millrace.BINARY, own)

    def put(text):
        new = own.with_suffix(".new")
        if text is None:
            shutil.copy(millrace.BINARY, new)
        else:
            new.write_text(text)
        new.chmod(0o755)
        new.rename(own)

    yield own, put


@pytest.mark.parametrize("sandbox", ["on", "off"])
def test_a_failed_upgrade_leaves_the_node_serving(tmp_path, sandbox, long):
    if sandbox == "off" and not long:
        pytest.skip("the simulator does it without a launcher; --long does it here, too")
    if sandbox == "on":
        # A request of 37 bytes with its number, to the launcher.
        other_version = r"\1\0\0\0\45\0\0\0\0\0\0\0" + r"\0" * 8 + '{"ask":"begin","version":9}  '
    else:
        other_version = r"\1\0\0\0\14\0\0\0\0\0\0\0MRnode\n\0\11\0\0\0"
    spec = f"name=a uri=file:{image(tmp_path / 'disk.img')} socket={tmp_path / 'a.sock'} queues=4"
    programs = {
        "#!/bin/sh\nexit 7\n": "starting.*gone.*exit status: 7",
        "no program at all": "starting .*millrace",
        # One with another protocol version, and one that ends when it has everything that can be opened ahead.
        f"#!/bin/sh\nprintf '{other_version}' >&0; sleep 60\n": "version 9",
        f"#!/bin/sh\nexec {millrace.BINARY} serve --disk 'name=a uri=null:1G socket=s' --cores 1 --memory 64M\n": "1 core",
    }
    if sandbox == "on" and long:
        # Ten seconds; the simulator has a shorter wait. Without a sandbox the same code waits.
        programs["#!/bin/sh\nexec sleep 1000\n"] = "starting: not done within"
    with own_program(tmp_path) as (own, put):
        node = Disks(tmp_path / "log", spec, binary=own, flags=["--sandbox", sandbox])
        words = dict(queues=2, processors=2, mode="load", secs=20 if long else 8, mib=16)
        with node, guest.Guest(tmp_path / "vm", node.sockets[0], **words) as vm:
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
            for text, why in programs.items():
                put(text)
                node.refuse_upgrade(why)
            put(None)
            node.upgrade()
            vm.wait_for(r"GUEST LOAD OK")
            vm.wait_for_end()


def test_an_upgrade_refuses_no_client_and_keeps_the_data(tmp_path):
    port, metrics = millrace.free_port(), millrace.free_port()
    spec = f"name=a uri=file:{image(tmp_path / 'disk.img')} socket={tmp_path / 'a.sock'} queues=4"
    flags = ["--data", tmp_path / "db", "--listen", f"127.0.0.1:{port}", "--metrics", f"127.0.0.1:{metrics}", "--memory", "256M"]
    refused, answered, done = [], [], threading.Event()

    def connect():
        while not done.is_set():
            try:
                with resp.Connection(port, 30) as client:
                    answered.append(client.call("GET", "key"))
            except ConnectionRefusedError as error:
                refused.append(error)
            except (OSError, EOFError, resp.Closed):
                pass  # A connection that the old node closed when it ended.

    node = Disks(tmp_path / "log", spec, flags=flags)
    words = dict(queues=2, processors=2, mode="load", secs=8, mib=16)
    with node, guest.Guest(tmp_path / "vm", node.sockets[0], **words) as vm:
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        with resp.Connection(port, 20) as client:
            assert client.call("SET", "key", "0") == b"OK"
        others = threading.Thread(target=connect)
        others.start()
        try:
            for nth in range(3):
                guest.wait_for("answers", lambda: answered.count(str(nth).encode()) > 5)
                node.upgrade()
                with resp.Connection(port, 20) as client:
                    assert client.call("INCR", "key") == nth + 1
        finally:
            done.set()
            others.join()
        assert not refused and None not in answered
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


def test_a_failing_disk_does_not_affect_another_disk(tmp_path):
    good, bad = image(tmp_path / "good.img"), image(tmp_path / "bad.img")
    node = Disks(
        tmp_path / "log",
        f"name=good uri=file:{good} socket={tmp_path / 'good.sock'}",
        f"name=bad uri=error:kind=write&every=3|file:{bad} socket={tmp_path / 'bad.sock'}",
    )
    with (
        node,
        guest.Guest(tmp_path / "vm-good", node.sockets[0], mode="load", secs=3, mib=8) as well,
        guest.Guest(tmp_path / "vm-bad", node.sockets[1], mode="files") as ill,
    ):
        ill.wait_for(r"I/O error|GUEST FAILED")
        well.wait_for(r"GUEST LOAD OK")
        well.wait_for_end()


def test_a_machine_without_shared_memory_is_logged(tmp_path):
    with (
        Disks(tmp_path / "log", f"name=alone uri=null:1G socket={tmp_path / 'a.sock'}") as node,
        guest.Guest(tmp_path / "vm", tmp_path / "a.sock", shared=False, mode="boot"),
    ):
        hint = guest.wait_for("the hint", lambda: re.search(r'.*share=on.*disk="alone".*', node.said()))
        assert " WARN " in hint[0]


def test_a_killed_or_frozen_machine_leaves_its_disk_to_the_next(tmp_path):
    with machine(tmp_path, mode="load", secs=60, mib=8) as (node, vm):
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        vm.signal(signal.SIGSTOP)
        time.sleep(0.5)
        vm.signal(signal.SIGCONT)
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*", times=3)
        vm.kill()
        guest.wait_for("the end of the connection", lambda: "has gone" in node.said())
        with guest.Guest(tmp_path / "second", node.sockets[0], queues=2, mode="files") as second:
            second.wait_for(r"GUEST FILES OK")
            second.wait_for_end()


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("name=a uri=file:missing.img socket=a.sock", "missing.img"),
        ("name=a uri=mem:many socket=a.sock", "many"),
        ("name=a uri=null:1G", "socket="),
        ("name=a uri=null:1G socket=a.sock queues=1000", "queues"),
        ("uri=null:1G socket=a.sock", "name="),
    ],
)
def test_a_disk_that_cannot_be_served_is_refused_with_a_reason(tmp_path, spec, expected):
    said = millrace.fail("serve", "--disk", spec, cwd=tmp_path)
    assert expected in said, said
    assert not os.listdir(tmp_path), "a file was left"


def test_a_socket_in_use_is_not_replaced(tmp_path):
    spec = f"name=a uri=null:1G socket={tmp_path / 'a.sock'}"
    with Disks(tmp_path / "log", spec):
        assert "in use" in millrace.fail("serve", "--disk", spec)
        assert (tmp_path / "a.sock").exists()


def test_an_idle_disk_costs_no_processor_time(tmp_path):
    specs = [f"name=d{nth} uri=null:1G socket={tmp_path / f'{nth}.sock'}" for nth in range(32)]
    with Disks(tmp_path / "log", *specs) as node:
        with guest.Guest(tmp_path / "vm", node.sockets[:8], mode="boot", then="stay") as vm:
            vm.wait_for(r"GUEST BOOTED")
            time.sleep(1)
            both = {node.pid(), node.process.pid}
            before = sum(map(cpu_s, both))
            time.sleep(2)
            spent = sum(map(cpu_s, both)) - before
            # The kernel counts in ticks of 10 ms; polling a disk would cost 2 s.
            assert spent < 0.5, f"{spent} s in 2 s"


def cpu_s(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
