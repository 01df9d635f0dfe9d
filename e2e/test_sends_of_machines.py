"""Disks follow machines that migrate to other nodes, with real guests that verify what they read."""

import contextlib
import filecmp
import json
import os
import re
import signal
import time

import guest
import migration
import millrace
import pytest
from sends import Between, Store
from test_disks import image

TICK = r"GUEST TICK ops=[1-9]\d*"
MIB = 1 << 20


class Places:
    """Two nodes, an image for each, and a machine whose disk moves between them."""

    def __init__(self, tmp_path, stack, *, size=64, flags=(), uri="file:{}", secs=10, between=None, **words):
        self.tmp_path, self.stack = tmp_path, stack
        self.words = dict(queues=2, processors=2, mode="load", secs=secs, mib=8, holes="holes", then="stay") | words
        self.nodes = [stack.enter_context(Store(tmp_path, name, *flags)) for name in ("here", "there")]
        self.images = [image(tmp_path / f"{name}.img", size) for name in ("here", "there")]
        self.uris = [uri.format(path) for path in self.images]
        self.nodes[0].attach(self.uris[0])
        self.machines = 1
        self.vm = stack.enter_context(guest.Guest(tmp_path / "vm-0", self.nodes[0].socket(), **self.words))
        self.vm.wait_for(TICK)

    @property
    def here(self):
        return self.nodes[0]

    @property
    def there(self):
        return self.nodes[1]

    def prepare(self, port=None, wait=True):
        """Sends the disk there until the move is ready."""
        if "a" in self.there.disks():
            self.there.do("detach", "a", "--force")
        self.there.awaits(self.uris[1])
        with contextlib.suppress(AssertionError):
            # Until the source of a move that has ended does not connect again.
            guest.wait_for("an old source", lambda: self.there.transfer()["id"] is not None, 3 if self.machines > 2 else 0)
            self.there.do("move", "a", "--abort")
        said = self.here.send(self.there, "a", *([] if wait else ["--background"]), port=port)
        assert not wait or "is ready: migrate its machine now" in said

    def arrive(self, at):
        """A machine that waits for the migration."""
        self.machines += 1
        return self.stack.enter_context(guest.Guest(self.tmp_path / f"vm-{self.machines}", self.there.socket(), incoming=at, **self.words))

    def turn(self):
        """What was there is here."""
        self.nodes.reverse()
        self.images.reverse()
        self.uris.reverse()

    def ticks(self, vm=None, more=1):
        vm = vm or self.vm
        vm.wait_for(TICK, times=vm.text().count("GUEST TICK") + more)

    def migrate(self, before=None):
        """The machine moves, and its disk with it; QEMU sometimes spoils a move, and then both go back and try again."""
        went = self.vm
        nth = 0

        def arrive(at):
            nonlocal nth
            nth += 1
            if nth > 1:
                self.send_again()
            return self.arrive(at)

        self.vm = migration.move(went, arrive, arrived=before)
        self.here.until("done")
        self.there.until_stage("begun")
        self.ticks()
        self.turn()

    def send_again(self):
        """After a migration that has failed. The machine runs here, and the disk is here, too."""
        self.here.until_stage(None, "sending")
        if self.here.stage() is None:
            # Until the destination of a disk that was taken back forgets the move.
            self.there.do("move", "a", "--abort")
            self.here.send(self.there)
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
