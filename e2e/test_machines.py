"""Events in the life of a virtual machine with our disks, each with a real guest that verifies what it reads."""

import contextlib
import hashlib
import os
import pathlib
import random
import re
import threading
import time
import urllib.request

import guest
import migration
import millrace
import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_admin import Node
from test_disks import Disks, image, machine

TICK = r"GUEST TICK ops=[1-9]\d*"


def test_memory_is_plugged_in_and_unplugged_under_load(tmp_path):
    """The rings keep running, and requests use the new memory from the moment it appears until it is unplugged."""
    with machine(tmp_path, mode="load", secs=20, mib=16, above=4096) as (_, vm):
        vm.wait_for(TICK)
        vm.plug_memory()
        vm.wait_for(r"GUEST MOVED")
        vm.wait_for(TICK, times=vm.text().count("GUEST TICK") + 3)
        vm.unplug_memory()
        vm.wait_for(TICK, times=vm.text().count("GUEST TICK") + 1)
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


def test_memory_on_huge_pages(tmp_path):
    needed = 256 // 2
    with pages_of_2_mib(needed), machine(tmp_path, hugepages=True, mode="load", secs=3, mib=16) as (node, vm):
        vm.wait_for(TICK)
        node.restart()
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


class pages_of_2_mib:
    """Reserves a number of free huge pages for a `with` block."""

    PATH = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB")

    def __init__(self, number):
        self.number = number

    def __enter__(self):
        if not os.access(self.PATH / "nr_hugepages", os.W_OK) or os.geteuid() != 0:
            pytest.skip("the number of huge pages can only be set by root")
        self.before = int((self.PATH / "nr_hugepages").read_text())
        self.set(self.before + self.number)
        there = int((self.PATH / "free_hugepages").read_text())
        if there < self.number:
            self.set(self.before)
            pytest.skip(f"the kernel finds {there} huge pages of {self.number}: its memory is in use or in pieces")

    def __exit__(self, *_):
        self.set(self.before)

    def set(self, number):
        (self.PATH / "nr_hugepages").write_text(f"{number}\n")


def test_a_machine_reboots_by_itself_under_load(tmp_path):
    """Its kernel releases the disk before its load ends: requests then fail in the guest, not in the target."""
    uri = f"delay:write=0ms..20ms|file:{image(tmp_path / 'disk.img')}"
    spec = f"name=a uri={uri} socket={tmp_path / 'a.sock'} queues=4"
    words = dict(mode="reboot", secs=3, mib=16, workers=16)
    with (
        Node(tmp_path, specs=[spec]) as node,
        guest.Guest(tmp_path / "vm", tmp_path / "a.sock", queues=2, processors=2, **words) as vm,
    ):
        vm.wait_for(r"GUEST REBOOTED 2")
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()
        stat = node.disks("stat")["a"]
        assert (stat["errors"], stat["broken_rings"]) == (0, 0), stat


def test_a_machine_is_reset_and_paused_under_load(tmp_path, long):
    """With requests in flight each time."""
    uri = f"delay:write=0ms..20ms|file:{image(tmp_path / 'disk.img')}"
    times = 10 if long else 1
    with machine(tmp_path, uri, mode="load", secs=6, mib=16, workers=16) as (_, vm):
        for nth in range(times):
            vm.wait_for(r"GUEST LOAD workers", times=nth + 1)
            vm.wait_for(TICK, times=1 + vm.text().count("GUEST TICK"))
            vm.reset()
        vm.wait_for(r"GUEST LOAD workers", times=times + 1)
        for _ in range(4 * times):
            vm.stop()
            vm.cont()
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


def test_the_driver_is_unbound_and_bound_under_load(tmp_path):
    with machine(tmp_path, ill="vda", mode="rebind", secs=1, mib=16) as (_, vm):
        vm.wait_for(r"GUEST UNBINDS 3")
        vm.wait_for(r"GUEST REBIND OK")
        vm.wait_for_end()


def test_a_ring_stops_only_when_its_slow_requests_are_done(tmp_path):
    """Each write takes 5 s, and the machine is paused with writes in flight. In an upgrade the disk is handed over with them after 2 s."""
    uri = f"delay:write=5s|file:{image(tmp_path / 'disk.img')}"
    spec = f"name=a uri={uri} socket={tmp_path / 'a.sock'} queues=4"
    with (
        Node(tmp_path, specs=[spec]) as node,
        guest.Guest(tmp_path / "vm", tmp_path / "a.sock", queues=2, mode="load", secs=14, mib=16) as vm,
    ):

        def depth():
            return node.disks("stat")["a"]["depth"]

        guest.wait_for("writes at the disk", lambda: depth() == 8)
        node.upgrade()
        assert re.search(r"they follow with their requests in flight disks=\"?a", node.said()), node.said()
        guest.wait_for("writes at the disk", lambda: depth() == 8)
        vm.stop()
        assert depth() == 0
        vm.cont()
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


@pytest.mark.parametrize("ill", ["error:kind=write&chance=0.5", "delay:write=1000s"], ids=["errs", "is-stuck"])
def test_a_failing_disk_does_not_affect_others_of_the_machine(tmp_path, request, ill, long):
    if "error" in ill and not long:
        pytest.skip("another node's neighbour errs in test_disks.py; --long does it here, too")
    specs = [
        f"name=ill uri={ill}|file:{image(tmp_path / 'ill.img')} socket={tmp_path / 'ill.sock'}",
        f"name=well uri=file:{image(tmp_path / 'well.img')} socket={tmp_path / 'well.sock'}",
    ]
    words = dict(queues=2, processors=2, mode="load", dev="vdb", beside="vda", secs=4, mib=16, then="stay")
    metrics = millrace.free_port()
    node = Node(tmp_path, "--metrics", f"127.0.0.1:{metrics}", specs=specs)
    with node, guest.Guest(tmp_path / "vm", node.sockets[:2], ill="vda", **words) as vm:

        def is_ill():
            stat = node.disks("stat")["ill"]
            return stat["depth"] if "stuck" in request.node.name else stat["errors"]

        guest.wait_for("the disk to misbehave", is_ill)
        vm.wait_for(TICK, times=vm.text().count("GUEST TICK") + 1)
        vm.wait_for(r"GUEST LOAD OK")
        assert is_ill() and node.disks("stat")["well"]["errors"] == 0
        if "stuck" not in request.node.name:
            before = counts(metrics)
            node.upgrade()
            after = counts(metrics)
            assert before.keys() <= after.keys()
            assert not {name: (count, after[name]) for name, count in before.items() if after[name] < count}
        vm.kill()
        # A clean shutdown would wait for the requests in flight.
        node.kill()


def counts(port):
    """All counters, as Prometheus reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    grow = [family for family in families if family.type in ("counter", "histogram") and family.name.startswith("millrace_disk_")]
    return {(sample.name, *sorted(sample.labels.items())): sample.value for family in grow for sample in family.samples}


def test_a_read_only_disk(tmp_path):
    held = random.Random(1).randbytes(1 << 20)
    (tmp_path / "disk.img").write_bytes(held)
    with machine(tmp_path, f"file:{tmp_path / 'disk.img'}?readonly=on", ill="vda", mode="readonly") as (_, vm):
        vm.wait_for(rf"GUEST HOLDS ro=1 {hashlib.sha256(held).hexdigest()}")
        vm.wait_for(r"GUEST READONLY OK")
        vm.wait_for_end()
    assert (tmp_path / "disk.img").read_bytes() == held


def test_a_guest_sees_the_properties_of_its_disks(tmp_path):
    file = f"file:{image(tmp_path / 'disk.img')}?lock=off&readonly=on"
    shapes = {
        "vda": (f"{file}&block=512", {"logical_block_size": 512, "physical_block_size": 4096, "minimum_io_size": 4096}),
        "vdb": (f"{file}&block=4K", {"logical_block_size": 4096, "physical_block_size": 4096, "minimum_io_size": 4096}),
        "vdc": ("null:1G", {"logical_block_size": 512, "physical_block_size": 512, "minimum_io_size": 512, "optimal_io_size": 0}),
        "vdd": ("null:1G?block=4K", {"logical_block_size": 4096, "physical_block_size": 4096}),
    }
    specs = [f"name={name} uri={uri} socket={tmp_path / name}.sock" for name, (uri, _) in shapes.items()]
    with Disks(tmp_path / "log", *specs) as node, guest.Guest(tmp_path / "vm", node.sockets, mode="shape") as vm:
        vm.wait_for(r"GUEST SHAPE OK")
        vm.wait_for_end()
        for name, (_, expected) in shapes.items():
            for what, value in expected.items():
                vm.wait_for(rf"GUEST SHAPE {name} {what}={value}\n")
        assert int(vm.wait_for(r"GUEST SHAPE vdc discard_max_bytes=(\d+)")[1]) > 0
        assert int(vm.wait_for(r"GUEST SHAPE vdc write_zeroes_max_bytes=(\d+)")[1]) > 0
        assert int(vm.wait_for(r"GUEST SHAPE vda write_zeroes_max_bytes=(\d+)")[1]) == 0, "it is read-only"


def test_many_disks_of_one_node_and_one_machine(tmp_path):
    """Some are under load when the node is killed, the others idle."""
    busy, idle = 24, 100
    specs = [f"name=d{nth} uri=file:{image(tmp_path / f'{nth}.img', 16)} socket={tmp_path / f'{nth}.sock'} queues=2" for nth in range(busy)]
    specs += [f"name=i{nth} uri=null:1G socket={tmp_path / f'i{nth}.sock'}" for nth in range(idle)]
    with (
        Node(tmp_path, specs=specs) as node,
        guest.Guest(tmp_path / "vm", node.sockets[:busy], queues=2, processors=2, mode="many", secs=6, mib=4) as vm,
    ):
        vm.wait_for(TICK, times=2 * busy)
        node.restart()
        vm.wait_for(r"GUEST CHECKED", times=busy)
        vm.wait_for(r"GUEST MANY OK")
        vm.wait_for_end()
        assert len(node.disks()) == busy + idle


def test_all_queues_of_a_disk_on_one_core(tmp_path, long):
    """Other tests spread them over all cores."""
    if not long:
        pytest.skip("two queues to a core is what many disks do, too; --long does it under load and kills")
    uri = f"delay:all=0ms..20ms|file:{image(tmp_path / 'disk.img')}"
    with machine(tmp_path, uri, flags=["--cores", "1"], mode="load", secs=6, mib=16, workers=16) as (node, vm):
        vm.wait_for(TICK, times=2)
        node.restart()
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()
        assert set(re.findall(r"core=(\d).* ring=[01] .*resubmits=", node.said())) == {"0"}


def test_a_kill_while_a_migrating_machine_sends_its_memory(tmp_path):
    """Writes during the migration are in the dirty log, before the kill and after it."""
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
            return stack.enter_context(guest.Guest(tmp_path / "vm-b", there.sockets[0], incoming=at, **words))

        def meanwhile():
            # A machine that stands still for a moment has no request in flight.
            for _ in range(5):
                here.restart_connected(0)
                assert vm.migration()["status"] == "active"
                vm.wait_for(TICK, times=vm.text().count("GUEST TICK") + 1)
                if "resubmits=" in here.said():
                    return

        moved = migration.move(vm, arrive, meanwhile)
        moved.wait_for(r"GUEST LOAD OK")
        moved.wait_for_end()
        assert "resubmits=" in here.said(), "no request was in flight at any kill"


def test_a_kill_at_any_moment_of_the_start(tmp_path, long):
    """QEMU 7.2 disables its disk if the node is killed while the device starts, or between firmware and system. The next machine
    must then find the disk intact."""
    tries = 16 if long else 1
    given_up = r"cannot be started|start failed|restore failed|initialization failed"
    with Disks(tmp_path / "log", f"name=a uri=file:{image(tmp_path / 'disk.img')} socket={tmp_path / 'a.sock'} queues=4") as node:
        for nth in range(tries):
            words = dict(queues=2, processors=2, mode="load", secs=1, mib=4)
            with guest.Guest(tmp_path / f"vm-{nth}", node.sockets[0], **words) as vm:
                time.sleep(0.2 + 3.2 * (nth + 0.5) / tries)
                said = len(node.said())
                node.restart(0)

                def over(vm=vm, said=said):
                    seen = vm.text() + vm.complaints() + node.said()[said:]
                    return re.search(rf"GUEST LOAD OK|{given_up}", seen)

                guest.wait_for("the guest, or QEMU's giving up", over)
        with guest.Guest(tmp_path / "vm", node.sockets[0], queues=2, mode="files") as vm:
            vm.wait_for(r"GUEST FILES OK")
            vm.wait_for_end()


def test_a_newer_qemu_notices_the_death_of_a_node_without_a_launcher(tmp_path):
    """While the guest stands still, while it stops, and between firmware and system: QEMU 7.2 goes on as if the old process were there."""
    if guest.qemu_version() < (10, 0):
        pytest.skip("this QEMU notices too little: scripts/newer-qemu")
    spec = f"name=a uri=delay:all=0ms..20ms|file:{image(tmp_path / 'disk.img')} socket={tmp_path / 'a.sock'} queues=2"
    with Disks(tmp_path / "log", spec, flags=["--sandbox", "off"]) as node:
        with guest.Guest(tmp_path / "vm", node.sockets[0], queues=2, processors=2, mode="load", secs=12, mib=8, workers=8) as vm:

            def ticks():
                vm.wait_for(TICK, times=vm.text().count("GUEST TICK") + 1)

            ticks()
            vm.stop()
            node.restart_connected(0)
            vm.cont()
            ticks()
            for after_s in 0, 0.003, 0.01:
                killed = threading.Timer(after_s, node.kill)
                killed.start()
                vm.stop()
                killed.join()
                node.restart_connected(0)
                vm.cont()
                ticks()
            vm.wait_for(r"GUEST LOAD OK")
            vm.wait_for_end()
        for nth, after_s in enumerate((0.5, 1.0, 1.5, 2.0, 2.5)):
            with guest.Guest(tmp_path / f"vm-{nth}", node.sockets[0], queues=2, processors=2, mode="load", secs=1, mib=4) as vm:
                time.sleep(after_s)
                node.restart(0)
                vm.wait_for(r"GUEST LOAD OK")
                vm.wait_for_end()
