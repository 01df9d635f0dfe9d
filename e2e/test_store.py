"""A launcher that is killed comes back by itself: the service manager has its connections, and neither QEMU nor the guest notices."""

import random
import shutil
import subprocess
import time

import guest
import millrace
import pytest
from manager import Managed
from test_admin import spec
from test_disks import both_forms, image
from test_restart import TICK, kill_and_wait, kill_until_it_is_given_up


@pytest.fixture
def managed(tmp_path):
    with Managed(tmp_path, specs=[spec(tmp_path, "a", f"file:{image(tmp_path / 'disk.img')}")]) as node:
        yield node


def machine(node, tmp_path, name="a", **words):
    return guest.Guest(tmp_path / "vm", tmp_path / f"{name}.sock", queues=2, processors=2, **words)


def assert_nobody_noticed(node, vm):
    # A launcher that is killed while a message passes through closes the connection (docs/DISKS.md), of which QEMU
    # complains. QEMU asks for the size after each restart of the node.
    said = node.said()
    closed = said.count("died in a message")
    assert said.count("has connected") == 1 + closed, "the connection was lost"
    assert "panicked" not in said and "a killed launcher would lose it" not in said
    assert closed or not vm.complaints(), vm.complaints()


@both_forms
def test_a_guest_under_load_does_not_notice_that_the_launcher_is_killed(managed, tmp_path, packed, long):
    times = 40 if long else 4
    with machine(managed, tmp_path, packed=packed, mode="load", secs=6 + 2 * times, mib=16, workers=8) as vm:
        for nth in range(times):
            vm.wait_for(TICK, times=2 + nth)
            managed.kill_launcher()
        vm.wait_for(r"GUEST LOAD OK", timeout=120 + 5 * times)
        vm.wait_for(r"GUEST CHECKED .*slowest_ms=(\d+)")
        vm.wait_for_end()
        assert_nobody_noticed(managed, vm)
    assert managed.said().count("its front end stays connected") == times


def test_a_machine_stops_and_continues_while_launchers_and_nodes_are_killed(managed, tmp_path, long):
    rng = random.Random(7)

    def accident():
        # A launcher that is killed in the middle of a message loses the connection.
        time.sleep(0.1 + rng.uniform(0, 0.3))
        rng.choice([managed.kill_launcher, lambda: kill_and_wait(managed), managed.upgrade])()

    with machine(managed, tmp_path, mode="load", secs=60 if long else 15, mib=8) as vm:
        vm.wait_for(TICK)
        for _ in range(30 if long else 5):
            accident()
            vm.stop()
            accident()
            vm.cont()
        vm.wait_for(r"GUEST LOAD OK", timeout=240)
        vm.wait_for_end()
        assert_nobody_noticed(managed, vm)


def test_launchers_that_are_killed_while_they_start_lose_nothing(managed, tmp_path):
    with machine(managed, tmp_path, mode="load", secs=10, mib=8) as vm:
        vm.wait_for(TICK)
        for nth in range(30):
            managed.kill()
            with open(managed.log, "ab") as out:
                managed.process = managed.popen(out)
            time.sleep(nth * 0.003)
        managed.kill_launcher()
        vm.wait_for(r"GUEST LOAD OK", timeout=120)
        vm.wait_for_end()
        assert_nobody_noticed(managed, vm)
    assert len(managed.manager.names()) == 1


def test_the_manager_starts_a_node_again_that_was_given_up(managed, tmp_path):
    with machine(managed, tmp_path, mode="load", secs=20, mib=8) as vm:
        vm.wait_for(TICK)
        kill_until_it_is_given_up(managed)
        managed.process.wait(20)
        assert "giving up" in managed.said() and len(managed.manager.names()) == 1
        managed.start()
        vm.wait_for(r"GUEST LOAD OK", timeout=120)
        vm.wait_for_end()
        assert_nobody_noticed(managed, vm)


def test_the_memory_of_a_disk_outlives_the_launcher(tmp_path):
    with Managed(tmp_path, specs=[spec(tmp_path, "m", "mem:32M")]) as node:
        with machine(node, tmp_path, "m", mode="load", secs=6, mib=8) as vm:
            vm.wait_for(TICK)
            node.kill_launcher()
            vm.wait_for(TICK, times=3)
            node.kill_launcher()
            vm.wait_for(r"GUEST LOAD OK", timeout=60)
            vm.wait_for_end()
            assert_nobody_noticed(node, vm)


def test_the_store_has_what_a_node_serves(managed, tmp_path):
    assert {"READY": "1"} in managed.manager.told
    assert len(managed.manager.names()) == 1
    managed.do("attach", spec(tmp_path, "b"))
    assert len(managed.manager.names()) == 2
    managed.kill_launcher()
    assert set(managed.disks()) == {"a", "b"} and len(managed.manager.names()) == 2
    managed.do("detach", "b")
    assert len(managed.manager.names()) == 1
    managed.upgrade()
    guest.wait_for("the next launcher", lambda: "this program is the launcher now" in managed.said())
    assert len(managed.manager.names()) == 1
    assert managed.stop() == 0
    assert managed.manager.names() == set() and {"STOPPING": "1"} in managed.manager.told


def test_a_disk_that_is_not_configured_any_more_leaves_the_store(managed, tmp_path):
    managed.kill()
    at = managed.arguments.index("--disk")
    managed.arguments[at + 1] = spec(tmp_path, "other")
    managed.sockets[0] = tmp_path / "other.sock"
    managed.start()
    assert set(managed.disks()) == {"other"} and len(managed.manager.names()) == 1


def test_nonsense_in_the_store_is_removed(managed):
    managed.kill()
    manager = managed.manager
    for name in ("millrace.disk.77", "millrace.disk.x", "else"):
        manager.stored[name] = guest.socket.socket().detach()
    managed.start()
    assert "is not known any more" in managed.said()
    # The disk is there, under its next number.
    assert manager.names() == {"millrace.disk.78", "millrace.disk.x", "else"}


def test_systemd_accepts_the_unit(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is missing")
    unit = (millrace.ROOT / "contrib" / "systemd" / "millrace.service").read_text()
    assert "ExecStart=/usr/bin/millrace serve" in unit

    def complaints(text):
        path = tmp_path / "millrace.service"
        path.write_text(text.replace("/usr/bin/millrace", str(millrace.BINARY.resolve())))
        command = ["systemd-analyze", "verify", "--man=no", path]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)

    done = complaints(unit)
    assert (done.returncode, done.stdout) == (0, "")
    # It would find a key that systemd does not know.
    assert "FileDescriptorStoreMaximum" in complaints(unit.replace("FileDescriptorStoreMax", "FileDescriptorStoreMaximum")).stdout
