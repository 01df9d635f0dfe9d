"""Disks follow machines that migrate to other nodes, with real guests that verify what they read."""

import contextlib
import filecmp
import itertools
import json
import os
import re
import signal
import time

import guest
import migration
import millrace
import pytest
import two_machines
from sends import FLUSH, OWN, Between, Store
from test_disks import image, own_program

TICK = r"GUEST TICK ops=[1-9]\d*"
MIB = 1 << 20
# Of the namespace at which a machine arrives.
MIGRATION_PORT = 4444


class Places:
    """Two nodes, an image for each, and a machine whose disk moves between them. `link` has the words of `two_machines.link`, over which
    there is one way only."""

    def __init__(self, tmp_path, stack, *, size=64, flags=(), uri="file:{}", secs=10, between=False, link=None, binary=millrace.BINARY, **words):
        self.tmp_path, self.stack = tmp_path, stack
        self.link = link = link and stack.enter_context(two_machines.link(**link))
        self.words = dict(queues=2, processors=2, mode="load", secs=secs, mib=8, holes="holes", then="stay") | words
        self.within = [two_machines.inside(name) for name in link.namespaces] if link else [(), ()]
        places = [dict(address=address, within=within) for address, within in zip(two_machines.ADDRESSES, self.within)] if link else [{}, {}]
        flags = [*flags, "--allow-remote"] if link else flags
        self.nodes = [stack.enter_context(Store(tmp_path, name, *flags, binary=binary, **place)) for name, place in zip(("here", "there"), places)]
        self.images = [image(tmp_path / f"{name}.img", size) for name in ("here", "there")]
        self.uris = [uri.format(path) for path in self.images]
        self.between = {node: stack.enter_context(Between(node.port)) for node in self.nodes} if between else None
        self.nodes[0].attach(self.uris[0])
        self.machines = 1
        self.vm = stack.enter_context(guest.Guest(tmp_path / "vm-0", self.nodes[0].socket(), within=self.within[0], **self.words))
        self.vm.wait_for(TICK)

    @property
    def here(self):
        return self.nodes[0]

    @property
    def there(self):
        return self.nodes[1]

    @property
    def way(self):
        """The proxy on the way there."""
        return self.between[self.there]

    def send(self, *words):
        if self.link:
            host, port = self.link.to(self.there.port)
            return self.here.do("move", "a", "--to", f"{host}:{port}/a", *words)
        return self.here.send(self.there, "a", *words, port=self.way.port if self.between else None)

    def prepare(self, wait=True):
        """Sends the disk there until the move is ready."""
        if "a" in self.there.disks():
            self.there.do("detach", "a", "--force")
        self.there.awaits(self.uris[1])
        said = self.send(*([] if wait else ["--background"]))
        assert not wait or "is ready: migrate its machine now" in said

    def arrive(self, at):
        """A machine that waits for the migration."""
        self.machines += 1
        return self.stack.enter_context(guest.Guest(self.tmp_path / f"vm-{self.machines}", self.there.socket(), incoming=at, within=self.within[1], **self.words))

    def turn(self):
        """What was there is here."""
        self.nodes.reverse()
        self.images.reverse()
        self.uris.reverse()

    def ticks(self, vm=None, more=1):
        vm = vm or self.vm
        vm.wait_for(TICK, times=vm.text().count("GUEST TICK") + more)

    def migrate(self, before=None, arm=lambda: None):
        """The machine moves, and its disk with it; QEMU sometimes spoils a move, and then both go back and try again."""
        went = self.vm
        nth = 0

        def arrive(at):
            nonlocal nth
            nth += 1
            if nth > 1:
                if self.between:
                    self.way.go_on()
                self.send_again()
            arm()
            return self.arrive(f"tcp:{two_machines.ADDRESSES[1]}:{MIGRATION_PORT}" if self.link else at)

        to = "tcp:{}:{}".format(*self.link.to(MIGRATION_PORT)) if self.link else None
        self.vm = migration.move(went, arrive, arrived=before, to=to)
        self.there.until_stage("begun")
        self.here.until_stage("sent")
        self.ticks()
        self.turn()

    def send_again(self):
        """After a migration that has failed. The machine runs here, and the disk is here, too."""
        self.here.until_stage(None, "sending")
        if self.here.stage() is None:
            self.send()
        self.here.until("ready")

    def finish(self):
        """The guest ends its load, and compares all of its disk."""
        self.vm.wait_for(r"GUEST LOAD OK", timeout=240)
        checked = self.vm.wait_for(r"GUEST CHECKED ops=(\d+) swept=(\d+) slowest_ms=(\d+)")
        for node in self.nodes:
            assert "panicked" not in node.said()
        return int(checked[3])


@pytest.fixture
def places(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda **words: Places(tmp_path, stack, **words)


@pytest.mark.parametrize("packed", [False, True], ids=["split", "packed"])
def test_a_guest_loses_nothing_while_it_moves_to_and_fro_with_its_disk(places, packed, long):
    if packed and not long:
        pytest.skip("--long moves packed rings, too")
    moves = 20 if long else 3
    on = places(secs=10 + 12 * moves, packed=packed)
    for nth in range(moves):
        on.prepare()
        on.migrate()
        moved = on.there.status()
        print(f"move {nth + 1}: its guest waited {moved['pause_us']} us at the source; {moved['sent_bytes'] >> 20} MiB in {moved['seconds']:.1f} s")
        assert on.there.elsewhere().startswith("has moved to") and on.here.elsewhere() is None
    slowest = on.finish()
    print(f"slowest request in the guest: {slowest} ms")
    on.vm.quit()


@pytest.mark.parametrize("rate", [125e6, 12.5e6], ids=["1 Gbit/s", "100 Mbit/s"])
def test_a_disk_moves_over_a_link_with_a_delay(places, rate, long):
    """1 ms each way. A kernel that has netem would delay QEMU's own connection, too."""
    if not long:
        pytest.skip("only with --long")
    on = places(secs=80, size=256, between=True)
    for way in on.between.values():
        way.delay, way.rate = 0.001, rate
    for _ in range(2):
        on.prepare()
        on.migrate()
        moved = on.there.status()
        print(f"its guest waited {moved['pause_us']} us at the source; {moved['sent_bytes'] >> 20} MiB in {moved['seconds']:.1f} s")
    on.finish()
    on.vm.quit()


@pytest.mark.parametrize("rate", ["1gbit", "100mbit"])
def test_a_machine_and_its_disk_move_over_one_link(places, rate, long):
    """The nodes and QEMU share a link between two network namespaces, with its rate and 1 ms each way."""
    slow = rate == "100mbit"
    if slow and not long:
        pytest.skip("only with --long")
    on = places(secs=40 if slow else 26, size=256, link=dict(rate=rate, delay_ms=1))
    # Data besides what the guest writes, among holes.
    with open(on.images[0], "r+b") as file:
        file.seek(128 * MIB)
        file.write(os.urandom(32 * MIB))
    on.prepare()
    compared, reports = [], []

    def before(_):
        # The guest is stopped at both ends: the images are what it sees.
        on.here.until_stage("sent", "given")
        on.there.until_stage("whole")
        compared.append(filecmp.cmp(*on.images, shallow=False))
        reports.append(on.vm.migration())

    on.migrate(before)
    moved, qemu = on.there.status(), reports[-1]
    slowest_ms = on.finish()
    print(
        f"{rate}, delay by {'netem' if on.link.has_netem else 'proxies'}: its guest waited {moved['pause_us']} us at the source, QEMU's downtime was "
        f"{qemu['downtime']} ms; {moved['sent_bytes'] >> 20} MiB of the disk in {moved['seconds']:.1f} s, {qemu['ram']['transferred'] >> 20} MiB of memory in "
        f"{qemu['total-time'] / 1000:.1f} s; slowest request in the guest {slowest_ms} ms"
    )
    assert all(compared)
    assert on.link.sent_bytes() > moved["sent_bytes"] + qemu["ram"]["transferred"], "not all of it took the link"
    assert moved["pause_us"] < 2_000_000
    on.vm.quit()


def test_the_disk_is_the_same_after_a_move(places):
    """Images are compared: the destination's before the guest begins there."""
    on = places(secs=14)
    on.prepare()
    compared = []

    def before(_):
        # The source may not have heard yet that the destination owns it.
        on.here.until_stage("sent", "given")
        on.there.until_stage("whole")
        compared.append(filecmp.cmp(*on.images, shallow=False))

    on.migrate(before)
    assert compared and all(compared)
    assert on.there.happened().count("moved") >= 1 and "begun" in on.here.happened()
    on.finish()


# ---------------------------------------------------------------------------------------------- migrations that fail


def begin(on, bandwidth=4_000_000):
    """Begins a migration; returns the machine at which it arrives."""
    arrives = on.arrive(on.tmp_path / f"arrives-{on.machines}")
    on.vm.begin_migration(on.tmp_path / f"arrives-{on.machines - 1}", bandwidth=bandwidth)
    guest.wait_for("memory on its way", lambda: on.vm.migration().get("ram", {}).get("transferred", 0) > 4_000_000)
    return arrives


@pytest.mark.parametrize("how", ["cancelled", "destination killed", "destination killed while the disk is copied"])
def test_a_migration_that_fails_while_memory_is_sent_leaves_the_disk_here(places, how, long):
    copies = how.endswith("copied")
    if copies and not long:
        pytest.skip("only with --long")
    on = places(secs=25)
    if copies:
        on.here.do("move", "--limit", "64K")
    on.prepare(wait=not copies)
    for nth in range(2):
        arrives = begin(on)
        assert not copies or on.here.status()["stage"] == "copying"
        if how == "cancelled":
            on.vm.qmp.do("migrate_cancel")
        arrives.kill()
        guest.wait_for("QEMU", lambda: on.vm.qmp.do("query-migrate")["status"] in ("cancelled", "failed"))
        assert on.vm.status() == "running"
        on.ticks()
        assert on.here.stage() == "sending" and on.here.elsewhere() is None and on.there.stage() == "incoming"
    on.here.do("move", "--limit", "0")
    # A machine that is paused for another reason keeps its disk.
    on.vm.stop()
    time.sleep(0.5)
    assert on.here.stage() == "sending"
    on.vm.cont()
    on.here.until("ready")
    on.migrate()
    on.finish()


@pytest.mark.parametrize("begins", ["before", "when the successor starts"])
def test_an_upgrade_is_refused_while_a_machine_migrates(places, tmp_path, begins):
    """Its guest would wait until the successor could continue the move."""
    late = begins != "before"
    with own_program(tmp_path) as (own, put):
        # A launcher asks the node when the successor has started.
        on = places(secs=25, binary=own, flags=["--sandbox", "off" if late else "on"])
        on.prepare()
        before, children = on.here.pid(), len(millrace.children(on.here.process.pid))

        def begin_late():
            guest.wait_for("the successor", lambda: len(millrace.children(on.here.process.pid)) > children)
            begin(on)

        if late:
            put(f'#!/bin/sh\nsleep 3\nexec {millrace.BINARY} "$@"\n')
        else:
            begin(on)
        on.here.refuse_upgrade("no other process could continue that now: a", begin_late if late else lambda: None)
        assert on.here.pid() == before
        on.vm.qmp.do("migrate_cancel")
        guest.wait_for("QEMU", lambda: on.vm.qmp.do("query-migrate")["status"] == "cancelled")
        on.here.until("ready")
        on.ticks()
        # As soon as it does not migrate, it is not refused.
        put(None)
        on.here.upgrade()
        on.here.until("ready")
        on.migrate()
        on.finish()


def test_a_machine_that_continues_at_the_source_gets_its_disk_back(places):
    """The migration has succeeded and the disk has moved, but the destination is lost before the guest has begun there."""
    on = places(secs=25)
    on.prepare()
    for nth in range(2):
        arrives = begin(on, guest.FAST)
        on.vm.end_migration(early=True)
        on.here.until_stage("sent")
        assert on.there.stage() == "whole"
        arrives.kill()
        on.vm.cont()
        on.ticks(more=2)
        assert on.here.elsewhere() is None and on.here.stage() is None and on.there.stage() == "incoming"
        assert "taken-back" in on.here.happened()
        on.send_again()
    on.migrate()
    on.finish()


def test_a_machine_that_continues_at_both_ends_has_its_disk_at_one(places):
    """An operator's mistake: the guest has begun at the destination, and the source's machine is resumed."""
    on = places(secs=15)
    on.prepare()
    arrives = begin(on, guest.FAST)
    on.vm.end_migration(early=True)
    arrives.cont()
    on.there.until_stage("begun")
    before = on.here.disks("stat")["a"]["completions"]
    on.vm.cont()
    guest.wait_for("the event", lambda: "elsewhere" in on.here.happened())
    time.sleep(2)
    assert on.here.disks("stat")["a"]["completions"] == before and on.here.stage() == "sent"
    assert "its guest has begun at" in on.here.refuses("move", "a", "--abort")


@pytest.mark.parametrize("when", ["copying", "ready", "moved"])
def test_the_source_machine_is_killed(places, when, long):
    if when == "copying" and not long:
        pytest.skip("only with --long")
    on = places(secs=20)
    if when == "copying":
        on.here.do("move", "--limit", "64K")
    on.prepare(wait=when != "copying")
    if when != "moved":
        arrives = begin(on)
        assert when == "ready" or on.here.status()["stage"] == "copying"
        on.vm.kill()
        arrives.kill()
        time.sleep(0.5)
        assert on.here.stage() == "sending" and on.here.elsewhere() is None
        on.here.do("move", "--limit", "0")
        # The machine starts again where its disk is.
        on.vm = on.stack.enter_context(guest.Guest(on.tmp_path / "again", on.here.socket(), **on.words))
        on.vm.wait_for(TICK)
        on.here.until("ready")
        on.migrate()
        on.finish()
    else:
        on.migrate(before=lambda _: on.vm.kill())
        on.finish()


# In which stages the disk is, and the frame that stops there, and whether that is delivered.
HELD = {"stopped": (("sending", "incoming"), FLUSH, True), "given": (("given", "incoming"), OWN, False), "owned": (("given", "whole"), OWN, True)}


def is_held(on, phase):
    """Waits until a move stands still in a phase."""
    assert on.way.held.wait(20), on.here.said()[-2000:]
    expected = HELD[phase][0]
    guest.wait_for(expected, lambda: (on.here.stage(), on.there.stage()) == expected, 20)


def begun_to_move(places, secs, phase, long):
    """Two nodes and a machine whose disk is ready to move, or is still being copied."""
    if phase in ("copying", "owned") and not long:
        pytest.skip("only with --long")
    on = places(secs=secs, between=True)
    if phase == "copying":
        on.here.do("move", "--limit", "64K")
    on.prepare(wait=phase != "copying")
    return on


@pytest.mark.parametrize("phase", ["copying", *HELD])
def test_the_source_machine_is_killed_when_it_has_stopped(places, phase, long):
    """The disk goes to the destination, also if little of it is there."""
    on = begun_to_move(places, 20, phase, long)

    def killed(_):
        if phase != "copying":
            is_held(on, phase)
        elif on.machines == 2:
            # QEMU has not spoilt a move, after which the disk would be ready.
            assert on.here.status()["stage"] == "copying"
        on.vm.kill()
        guest.wait_for("the node", lambda: not on.here.disks()["a"].get("connected"))
        on.here.do("move", "--limit", "0")
        on.way.go_on()

    # The rest of a disk is copied without a limit once its guest has stopped.
    on.migrate(before=killed, arm=on.way.stall if phase == "copying" else lambda: on.way.hold_at(*HELD[phase][1:]))
    on.finish()


@pytest.mark.parametrize("phase", ["copying", *HELD])
def test_the_destination_machine_is_killed_when_the_source_has_stopped(places, phase, long):
    """The machine goes on at the source, with its disk."""
    on = begun_to_move(places, 25, phase, long)
    arrives = begin(on, guest.FAST)
    if phase == "copying":
        # The rest is copied without a limit once the guest has stopped.
        on.way.stall()
    else:
        on.way.hold_at(*HELD[phase][1:])
    on.vm.end_migration(early=True)
    if phase == "copying":
        assert on.here.status()["stage"] == "copying"
    else:
        is_held(on, phase)
    arrives.kill()
    on.vm.cont()
    if phase in ("copying", "stopped"):
        # It does not need the other node.
        on.ticks(more=2)
    on.here.do("move", "--limit", "0")
    on.way.go_on()
    on.ticks(more=2)
    assert on.here.elsewhere() is None and on.there.stage() == "incoming"
    on.send_again()
    on.migrate()
    on.finish()


# ------------------------------------------------------------------------------------------------------- deaths and cuts

ACCIDENTS = {
    "the source's node dies": lambda on: on.here.kill_node(),
    "the source dies with its launcher": lambda on: on.here.restart(),
    "the destination's node dies": lambda on: on.there.kill_node(),
    "the destination dies with its launcher": lambda on: on.there.restart(),
    "the connection is cut": lambda on: on.way.cut(),
}
PHASES = ["copying", "ready", "stopped", "given", "owned"]
# QEMU 7.2 gives a device up whose connection is lost while the machine starts; 10.0 does not.
WHILE_IT_STARTS = [("the destination dies with its launcher", phase) for phase in ("stopped", "given", "owned")]
# The others take as long, and seldom find anything.
ALWAYS = [
    ("the source's node dies", "stopped"),
    ("the source dies with its launcher", "given"),
    ("the destination's node dies", "owned"),
    ("the connection is cut", "copying"),
]


@pytest.mark.parametrize("accident, phase", list(itertools.product(ACCIDENTS, PHASES)))
def test_a_move_survives(places, accident, phase, long):
    """The move goes on by itself. In `stopped` the guest has stopped and the rest is not durable yet, in `given` the destination
    has not heard that the disk is its own, and in `owned` the source has not heard that the destination knows."""
    if not long and (accident, phase) not in ALWAYS:
        pytest.skip("only with --long")
    if (accident, phase) in WHILE_IT_STARTS and guest.qemu_version() < (10, 0):
        pytest.skip("this QEMU gives the device up: scripts/newer-qemu")
    times = 6 if long else 1
    strike = ACCIDENTS[accident]
    on = places(secs=8 + 15 * times, between=True)
    for _ in range(times):
        if phase == "copying":
            on.here.do("move", "--limit", "2M")
            on.prepare(wait=False)
            guest.wait_for("some of it", lambda: on.here.status().get("copied_bytes"))
            assert on.here.status()["stage"] == "copying"
            strike(on)
            on.here.do("move", "--limit", "0")
            on.ticks(more=2)
        else:
            on.prepare()
        if phase == "ready":
            strike(on)
            on.ticks(more=2)
        if phase in ("copying", "ready"):
            guest.wait_for("the next node", lambda: on.here.status()["stage"] is not None)
            on.here.until("ready")
            on.migrate()
            continue

        def struck(_):
            is_held(on, phase)
            strike(on)
            on.way.go_on()

        on.migrate(before=struck, arm=lambda: on.way.hold_at(*HELD[phase][1:]))
    on.finish()
