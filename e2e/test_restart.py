"""A node that is killed comes back by itself: the launcher has the connections, and neither QEMU nor the guest notices."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request

import guest
import migration
import millrace
import pytest
from test_admin import Node, spec
from test_disks import Disks, both_forms, image, machine, own_program
from test_sandbox import has_ended

TICK = r"GUEST TICK ops=[1-9]\d*"


def serving(node):
    """The process that serves the guests, once the launcher has one."""
    return guest.wait_for("a node", lambda: max(millrace.nodes(node.process.pid, node.said()), default=None), 20)


def kill(node):
    """Kills the process that serves the guests; the launcher starts the next one at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(serving(node), signal.SIGKILL)


def kill_and_wait(node):
    """The same, and waits until the next one serves."""
    said = len(node.said())
    kill(node)
    guest.wait_for("the next node", lambda: re.search(r"\bserving\b.* driver=", node.said()[said:]), 20)


def kill_until_it_is_given_up(node):
    """Kills each node soon after its start."""
    with contextlib.suppress(AssertionError):
        while node.process.poll() is None:
            kill(node)
            time.sleep(0.02)


@contextlib.contextmanager
def kills(*nodes, pause=(0.0, 0.4), seed=1):
    """Kills one of the nodes at random, again and again. They must not die too often to be started again."""
    rng, over, done = random.Random(seed), threading.Event(), []

    def run():
        while not over.wait(rng.uniform(*pause) + 1.0):
            node = rng.choice(nodes)
            kill_and_wait(node)
            done.append(node)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


@both_forms
def test_a_guest_under_load_does_not_notice(tmp_path, packed, long):
    """Requests complete out of order, so only the in-flight region knows which are left."""
    times, rng = 50 if long else 4, random.Random(packed)
    uri = f"delay:all=0ms..20ms|file:{image(tmp_path / 'disk.img')}"
    with machine(tmp_path, uri, packed=packed, mode="load", secs=5 + 2 * times, mib=16, workers=16) as (node, vm):
        vm.wait_for(TICK, times=2)
        for _ in range(times):
            # Ten deaths in a row, each within a second of the start, would be the end.
            time.sleep(1.0 + rng.uniform(0, 0.5))
            kill_and_wait(node)
        vm.wait_for(r"GUEST LOAD OK", timeout=60 + 5 * times)
        slowest_ms = int(vm.wait_for(r"GUEST CHECKED .*slowest_ms=(\d+)")[1])
        vm.wait_for_end()
        said = node.said()
    assert said.count("has connected") == 1, "the connection was lost"
    assert said.count("connection continues here") == times
    assert f"packed={str(packed).lower()} resubmits=" in said, "no request was in flight at any kill"
    print(f"{times} kills: slowest request in the guest {slowest_ms} ms")


@both_forms
def test_a_machine_is_stopped_and_continues_while_the_node_is_killed(tmp_path, packed, long):
    """Before the stop, while QEMU waits for the rings, while the machine stands still, and while it continues."""
    times = 20 if long else 2
    uri = f"delay:all=0ms..50ms|file:{image(tmp_path / 'disk.img')}"
    with machine(tmp_path, uri, packed=packed, mode="load", secs=6 + 2 * times, mib=16, workers=16) as (node, vm):
        for nth in range(times):
            vm.wait_for(TICK, times=2 + nth)
            for at_ms in (None, 0, 5):
                if at_ms is None:
                    kill(node)
                else:
                    threading.Timer(at_ms / 1000, kill, [node]).start()
                vm.stop()
                kill_and_wait(node)
                vm.cont()
                time.sleep(0.1)
            # Not ten deaths in a row, each soon after a start.
            time.sleep(1.5)
        vm.wait_for(r"GUEST LOAD OK", timeout=120)
        vm.wait_for_end()
        said = node.said()
    assert said.count("has connected") == 1, "the connection was lost"


def test_a_machine_boots_and_is_reset_while_the_node_is_killed(tmp_path, long):
    """In the firmware, between firmware and system, while the device starts: QEMU 7.2 gives a disk up if its connection is lost then."""
    with Disks(tmp_path / "log", f"name=a uri=file:{image(tmp_path / 'disk.img')} socket={tmp_path / 'a.sock'} queues=4") as node:
        for nth in range(10 if long else 2):
            words = dict(queues=2, processors=2, mode="load", secs=3, mib=4)
            with kills(node, pause=(0.0, 0.3), seed=nth) as done, guest.Guest(tmp_path / f"vm-{nth}", node.sockets[0], **words) as vm:
                vm.wait_for(TICK)
                vm.reset()
                vm.wait_for(r"GUEST LOAD workers", times=2)
                vm.wait_for(r"GUEST LOAD OK")
                vm.wait_for_end()
                assert len(done) > 2
        assert node.said().count("has connected") == nth + 1, "the connection was lost"


def test_a_machine_moves_while_both_nodes_are_killed(tmp_path, long):
    """Writes during the migration are in the dirty log, before each kill and after it."""
    shared = image(tmp_path / "disk.img")
    words = dict(queues=2, processors=2, mode="load", secs=16, mib=16, workers=16)
    with contextlib.ExitStack() as stack:
        here, there = (
            stack.enter_context(
                Disks(
                    tmp_path / f"{name}.log",
                    f"name={name} uri=delay:all=0ms..5ms|file:{shared}?lock=ring socket={tmp_path / name}.sock queues=4",
                )
            )
            for name in "ab"
        )
        vm = stack.enter_context(guest.Guest(tmp_path / "vm-a", here.sockets[0], **words))
        vm.wait_for(TICK, times=2)

        def arrive(at):
            return stack.enter_context(guest.Guest(tmp_path / f"vm-{at.name}", there.sockets[0], incoming=at, **words))

        def meanwhile():
            for _ in range(3):
                kill_and_wait(here)
                kill_and_wait(there)
                assert vm.migration()["status"] == "active"
                vm.wait_for(TICK, times=vm.text().count("GUEST TICK") + 1)

        moved = migration.move(vm, arrive, meanwhile)
        kill_and_wait(there)
        moved.wait_for(r"GUEST LOAD OK")
        moved.wait_for_end()
        assert here.said().count("has connected") == 1
        assert "resubmits=" in here.said(), "no request was in flight at any kill"


def test_kills_and_upgrades_in_turn(tmp_path, long):
    """The launcher hands its connections to its own next program, and a node of that program dies, too."""
    times = 10 if long else 2
    uri = f"delay:all=0ms..20ms|file:{image(tmp_path / 'disk.img')}"
    with machine(tmp_path, uri, mode="load", secs=8 + 5 * times, mib=16, workers=16) as (node, vm):
        for nth in range(times):
            vm.wait_for(TICK, times=2 + nth)
            kill_and_wait(node)
            node.upgrade()
            guest.wait_for("the launcher", lambda nth=nth: node.said().count("is the launcher now") == nth + 1, 20)
            kill_and_wait(node)
        vm.wait_for(r"GUEST LOAD OK", timeout=60 + 10 * times)
        vm.wait_for_end()
        assert node.said().count("has connected") == 1, "the connection was lost"


def test_a_kill_during_a_handover_keeps_the_connection(tmp_path, long):
    """The old node is killed at any moment: its successor, or the node that is started next, has the guest."""
    rng = random.Random(7)
    uri = f"delay:all=0ms..20ms|file:{image(tmp_path / 'disk.img')}"
    times = 20 if long else 3
    with machine(tmp_path, uri, mode="load", secs=8 + 4 * times, mib=16, workers=16) as (node, vm):
        for nth in range(times):
            vm.wait_for(TICK, times=2 + nth)
            old, said = node.pid(), len(node.said())
            node.process.send_signal(signal.SIGUSR2)
            time.sleep(rng.uniform(0, 0.05))
            with contextlib.suppress(ProcessLookupError):
                os.kill(old, signal.SIGKILL)

            def over(said=said):
                # Two processes write: the launcher's line may follow those of the node that it has started.
                now = node.said()[said:]
                return "is the launcher now" in now or "starting it again" in now and re.search(r"\bserving\b.* driver=", now)

            guest.wait_for("an outcome", over, 20)
            time.sleep(2)
        vm.wait_for(r"GUEST LOAD OK", timeout=60 + 10 * times)
        vm.wait_for_end()
        assert node.said().count("has connected") == 1, "the connection was lost"


def spares(node):
    """The spare nodes that were started so far."""
    return [int(pid) for pid in re.findall(r"a spare node was started spare=(\d+)", node.said())]


def metrics_answer(port):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).status == 200


class LogsToFiles(Node):
    """A node whose log is in a file that is renamed."""

    def __init__(self, tmp_path, *flags, **words):
        self.file, self.earlier = tmp_path / "file.log", tmp_path / "earlier.log"
        super().__init__(tmp_path, "--log-file", self.file, *flags, **words)

    def said(self):
        return super().said() + "".join(file.read_text() for file in (self.earlier, self.file) if file.exists())


def test_a_spare_node_stands_ready_and_takes_the_place_of_a_dead_one(tmp_path):
    """It serves metrics, too, and writes into the log's next file; its own death is nobody else's, and it ends with the node."""
    port = millrace.free_port()
    specs = [spec(tmp_path, "a", f"file:{image(tmp_path / 'disk.img')}")]
    with LogsToFiles(tmp_path, "--metrics", f"127.0.0.1:{port}", specs=specs) as node:
        for nth in range(2):
            guest.wait_for("a spare node", lambda nth=nth: len(spares(node)) == nth + 1, 20)
            spare = spares(node)[-1]
            assert serving(node) != spare
            if nth == 1:
                node.file.rename(node.earlier)
                guest.wait_for("the next log file", node.file.exists, 20)
                time.sleep(0.2)
            kill(node)
            guest.wait_for("the spare node", lambda spare=spare: f"takes its place node={spare}" in node.said(), 20)
            guest.wait_for("its disk", lambda: node.disks()["a"], 20)
            assert serving(node) == spare
            guest.wait_for("its metrics", lambda: metrics_answer(port), 20)
        assert re.search(r"\bserving\b.* driver=", node.file.read_text())
        guest.wait_for("a spare node", lambda: len(spares(node)) == 3, 20)
        os.kill(spares(node)[-1], signal.SIGKILL)
        guest.wait_for("a warning", lambda: "the spare node has ended" in node.said(), 20)
        assert serving(node) == spare and node.disks()
    assert has_ended(spare)


def test_a_spare_node_ends_with_its_launcher(tmp_path):
    """Told to end, and killed."""
    for number in signal.SIGTERM, signal.SIGKILL:
        with Node(tmp_path, specs=[spec(tmp_path, "a")]) as node:
            earlier = len(spares(node))
            guest.wait_for("a spare node", lambda earlier=earlier: len(spares(node)) > earlier, 20)
            spare = spares(node)[-1]
            node.process.send_signal(number)
            node.process.wait(20)
            guest.wait_for("its end", lambda spare=spare: has_ended(spare), 20)


def test_a_node_that_is_told_to_end_while_it_is_started_again(tmp_path):
    """It leaves no names of sockets."""
    for pause_s in 0.0, 0.005, 0.02, 0.1:
        with Node(tmp_path, specs=[spec(tmp_path, "a")]) as node:
            guest.wait_for("the node", lambda: node.disks())
            kill(node)
            time.sleep(pause_s)
            node.process.send_signal(signal.SIGTERM)
            node.process.wait(70)
            assert not (tmp_path / "a.sock").exists() and not (node.state / "admin.sock").exists(), node.said()


def test_disks_and_their_settings_come_back(tmp_path):
    """Attached disks, memory, sizes."""
    with Node(tmp_path, specs=[spec(tmp_path, "a"), spec(tmp_path, "m", "mem:16M")]) as node:
        node.do("attach", spec(tmp_path, "b", f"file:{image(tmp_path / 'disk.img', 8)}"))
        with guest.Guest(tmp_path / "vm", tmp_path / "m.sock", queues=2, mode="load", secs=4, mib=8) as vm:
            vm.wait_for(TICK)
            kill_and_wait(node)
            disks = node.disks()
            assert set(disks) == {"a", "b", "m"} and all("failed" not in disk for disk in disks.values())
            assert disks["b"]["attached"] and disks["m"]["connected"]
            node.do("resize", "m", "--size", "32M")
            kill_and_wait(node)
            assert node.disks()["m"]["size_bytes"] == 32 << 20
            vm.wait_for(r"GUEST LOAD OK")
            vm.wait_for_end()
        kill_and_wait(node)
        node.do("detach", "b")
        assert not (tmp_path / "b.sock").exists()


def test_a_disk_is_resized_while_the_node_is_killed(tmp_path, long):
    """Its size is the old one or the new one; the guest notices nothing else."""
    rng, path, rounds = random.Random(3), image(tmp_path / "a.img", 64), 25 if long else 4
    with Node(tmp_path) as node:
        node.do("attach", spec(tmp_path, "a", f"file:{path}"))
        with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", queues=2, mode="load", secs=5 * rounds, mib=8) as vm:
            vm.wait_for(TICK)
            size = 64
            for _ in range(rounds):
                before, size = size, 160 - size
                words = ["disk", "resize", "a", "--size", f"{size}M", "--shrink", "--state", str(node.state)]
                resizes = subprocess.Popen([millrace.BINARY, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                time.sleep(rng.uniform(0, 0.03))
                kill_and_wait(node)
                resizes.wait(30)
                assert node.disks()["a"]["size_bytes"] in (before << 20, size << 20)
                millrace.succeed(*words)
                assert node.disks()["a"]["size_bytes"] == size << 20 == path.stat().st_size
                # A node that dies within a second of its start is not started again at once.
                time.sleep(1)
            vm.wait_for(r"GUEST LOAD OK", 10 * rounds)
            vm.wait_for_end()


def test_a_node_that_dies_again_and_again_is_given_up(tmp_path):
    with Node(tmp_path, specs=[spec(tmp_path, "a")]) as node:
        kill_until_it_is_given_up(node)
        assert node.process.wait(20) == 128 + signal.SIGKILL
        assert re.search(r"starting it again.* pause_ms=3000", node.said()) and "giving up" in node.said()
        assert not (tmp_path / "a.sock").exists()
        node.start()


def is_served(path):
    use = [millrace.BINARY, "bench", "vdisk", "--socket", str(path), "--seconds", "0.2", "--json"]
    return subprocess.run(use, capture_output=True).returncode == 0


@pytest.mark.parametrize("how", ["exits", "is gone"])
def test_a_program_that_does_not_start_ends_nothing(tmp_path, how):
    """The file under the program's name is broken when the node dies: the launcher starts its own program."""
    spec = f"name=a uri=null:1G socket={tmp_path / 'a.sock'} queues=2"
    with own_program(tmp_path) as (own, put), Disks(tmp_path / "log", spec, binary=own) as node:
        guest.wait_for("the node", lambda: " serves " in node.said() or "serving" in node.said())
        if how == "exits":
            put("#!/bin/sh\nexit 7\n")
        else:
            own.unlink()
        for nth in range(1, 4):
            kill_and_wait(node)
            guest.wait_for(f"life {nth}", lambda: is_served(tmp_path / "a.sock"))
        assert node.process.poll() is None
        assert "the launcher's own program is started" in node.said()


def test_a_node_that_cannot_start_is_tried_again(tmp_path):
    """Another process has taken its address when it died."""
    port = millrace.free_port()
    specs = [spec(tmp_path, "a", "mem:8M")]
    with Node(tmp_path, "--metrics", f"127.0.0.1:{port}", specs=specs) as node, contextlib.ExitStack() as stack:
        os.kill(node.process.pid, signal.SIGSTOP)
        kill(node)
        guest.wait_for("the address", lambda: takes(stack, port))
        os.kill(node.process.pid, signal.SIGCONT)
        guest.wait_for("an attempt", lambda: re.search(r"exit code \d+\): starting it again", node.said()), saw=node.said)
        stack.close()
        guest.wait_for("the node", lambda: is_served(tmp_path / "a.sock"))


def takes(stack, port):
    with contextlib.suppress(OSError):
        return stack.enter_context(socket.create_server(("127.0.0.1", port)))


def test_the_waits_of_a_guest_around_kills_are_measured(tmp_path):
    words = [millrace.ROOT / "scripts/bench-kills", "--dir", tmp_path, "--kills", "2", "--disk", "null:1G"]
    done = subprocess.run(words, env=os.environ | {"MILLRACE": str(millrace.BINARY)}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    waits = json.loads(done.stdout)["disks"]["null:1G"]
    for name in "pause_ms", "alone_ms":
        assert 0 < waits[name]["median"] <= waits[name]["worst"] and len(waits[name]["all"]) == 2
    assert not list(tmp_path.iterdir())


def test_an_image_that_cannot_be_opened_after_a_kill_delays_only_its_disk(tmp_path):
    specs = [f"name={name} uri=file:{image(tmp_path / f'{name}.img', 8)} socket={tmp_path / f'{name}.sock'} queues=2" for name in "ab"]
    use = lambda name: subprocess.run([millrace.BINARY, "bench", "vdisk", "--socket", str(tmp_path / f"{name}.sock"), "--seconds", "0.2", "--json"], capture_output=True).returncode
    with Disks(tmp_path / "log", *specs) as node:
        assert use("a") == use("b") == 0
        (tmp_path / "a.img").rename(tmp_path / "elsewhere.img")
        kill_and_wait(node)
        guest.wait_for("the other disk", lambda: use("b") == 0)
        assert "it is tried again" in node.said()
        (tmp_path / "elsewhere.img").rename(tmp_path / "a.img")
        guest.wait_for("the disk", lambda: use("a") == 0)
        assert node.process.poll() is None


def test_a_server_that_does_not_answer_after_a_kill_delays_only_its_disk(tmp_path):
    """The disk comes first, and there are more others than are opened at once."""
    images = {f"d{n}": f"file:{image(tmp_path / f'd{n}.img', 8)}" for n in range(12)}
    with Node(tmp_path, "--nbd", f"unix:{tmp_path / 'nbd.sock'}", specs=[spec(tmp_path, "x", "mem:8M")], name="far") as far:
        specs = [spec(tmp_path, "a", f"nbd+unix:///x?socket={tmp_path / 'nbd.sock'}")]
        with Node(tmp_path, specs=specs + [spec(tmp_path, name, uri) for name, uri in images.items()]) as node:
            silent = serving(far)
            os.kill(silent, signal.SIGSTOP)
            try:
                kill_and_wait(node)
                # Else its opening has ended before the node serves, with an error after 10 s.
                assert "it opens slowly" in node.said() and "it is tried again" not in node.said()
                disks = node.disks()
                assert list(disks) == ["a", *images] and "follows" in disks["a"]
                assert all("size_bytes" in disks[name] for name in images)
            finally:
                os.kill(silent, signal.SIGCONT)
            guest.wait_for("the disk", lambda: "size_bytes" in node.disks()["a"], 30)
            assert node.process.poll() is None
