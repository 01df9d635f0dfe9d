"""Moves a machine from one QEMU to another, and compares both memories while both machines are paused.

A node marks its writes to a guest's memory in the dirty log. A page that it does not mark is stale at the destination, and the guest
may notice much later or never; the comparison shows it. Which bytes only the node writes is known without asking the node: the guest
reports which pages it only reads into (`verify.c`), and QEMU where the rings are.

Two kinds of bytes cannot show here and are covered by unit tests: a status byte is 0 before and after each request, and QEMU 7.2
marks used rings itself when it stops a device.

QEMU's software emulation sometimes loses other pages, with any disk; the machine would crash at the destination. Such pages are
counted, and the machine resumes at the source and moves again, in a way that QEMU seldom spoils.
"""

import collections
import contextlib
import struct

import guest

PAGE = 4096
CHUNK = 1 << 20
TRIES = 6

Outcome = collections.namedtuple("Outcome", "ours theirs")

# The number of moves, and for each move that QEMU spoilt the number of lost pages.
moves, spoilt = 0, []


def move(vm, arrive, meanwhile=None, arrived=None, to=None):
    """Moves a machine to the one that `arrive` starts, given the path to listen at; returns that machine, running. The source has ended.
    `meanwhile` is called while memory is being sent, `arrived` with the destination when both are paused and equal.
    `to` is the URI that the source sends to, if that is not where the machine arrives.
    """
    global moves
    for nth in range(TRIES):
        at = vm.directory / f"arrives-{nth}"
        there = arrive(at)
        vm.begin_migration(to or at, bandwidth=4_000_000 if meanwhile else guest.FAST)
        if meanwhile:
            guest.wait_for("memory on its way", lambda: vm.migration().get("ram", {}).get("transferred", 0) > 4_000_000)
            meanwhile()
        vm.end_migration(early=nth > 0)
        guest.wait_for("the machine where it arrives", lambda there=there: there.status() == "paused")
        moves += 1
        found = compare(vm, there)
        assert not found.ours, f"bytes written by the node did not arrive: {found.ours}"
        if not found.theirs:
            if arrived:
                arrived(there)
            there.said_before = vm.said_before + vm.text()
            vm.quit()
            there.cont()
            return there
        spoilt.append(len(found.theirs))
        looks = vm.migration()["ram"]["dirty-sync-count"]
        print(f"move {moves}: QEMU lost {len(found.theirs)} pages ({looks} looks), {' '.join(found.theirs[:9])}...: it is done again")
        there.kill()
        vm.cont()
    raise AssertionError(f"QEMU lost pages in {TRIES} moves in a row: {spoilt}")


def find_what_is_changed(here, there):
    """Given two paused, equal machines: changes a byte of one at each kind of place in turn; the comparison must find it."""
    with there.memory() as memory:
        (_, _, entries, descriptors, driver, device), *_ = here.rings()
        ours = {"data that was read": read_into(here)[0] + 1000}
        if here.packed:
            ours["its events"] = device
        else:
            ours["its used ring"] = device + 4 + 8 * entries - 1
        for name, address in ours.items():
            with changed(memory, address):
                found = compare(here, there)
                assert len(found.ours) == 1 and name in found.ours[0] and not found.theirs, (name, found)
        # The guest writes the available ring and the descriptors.
        for address in {driver, descriptors, 0x1234}:
            with changed(memory, address):
                assert compare(here, there) == Outcome([], [hex(address // PAGE * PAGE)]), hex(address)
    assert compare(here, there) == Outcome([], [])


@contextlib.contextmanager
def changed(memory, address):
    """Changes one byte for the duration of the block."""
    was = at(memory, address, 1)
    put(memory, address, bytes([was[0] ^ 1]))
    yield
    put(memory, address, was)


def put(memory, address, data):
    memory.seek(address)
    memory.write(data)


def compare(here, there):
    """The differences between two paused machines: the names of places that only the node writes, and the addresses of the other
    pages that differ."""
    with here.memory() as one, there.memory() as other:
        places = [place for ring in here.rings() for place in of_ring(one, ring, here.packed)]
        places += [(page, PAGE, f"data that was read, page {page:#x}") for page in read_into(here)]
        pages = differing(one, other)
        ours = []
        for address, length, name in places:
            touched = range(address // PAGE * PAGE, address + length, PAGE)
            if any(page in pages for page in touched) and at(one, address, length) != at(other, address, length):
                ours.append(name)
                pages.difference_update(page for page in touched)
        return Outcome(ours, sorted(map(hex, pages)))


def differing(one, other):
    """The addresses of differing pages."""
    pages, address = set(), 0
    while chunk := one_chunk(one, address):
        against = one_chunk(other, address)
        if chunk != against:
            pages |= {address + n for n in range(0, len(chunk), PAGE) if chunk[n : n + PAGE] != against[n : n + PAGE]}
        address += len(chunk)
    return pages


def one_chunk(memory, address):
    memory.seek(address)
    return memory.read(CHUNK)


def at(memory, address, length):
    """The bytes at an address."""
    memory.seek(address)
    return memory.read(length)


def read_into(vm):
    """The pages that the guest's workers read into, and that nothing else writes."""
    text = vm.said_before + vm.text()
    assert "GUEST CHECKED" not in text, "the guest was done before it moved: its pages belong to others now"
    lines = [line for line in text.splitlines() if line.startswith("GUEST READS INTO")]
    return [int(word, 16) for word in lines[-1].split()[3:]]


def of_ring(memory, ring, packed):
    """(address, length, name) of the parts of a ring that only the node writes."""
    disk, nth, entries, descriptors, _, device = ring
    name = f"disk {disk} ring {nth}"
    if not packed:
        return [(device, 6 + 8 * entries, f"{name}: its used ring, from {device:#x}")]
    # A descriptor with equal marks was returned, and the guest has not used its place since.
    marks = [flags & 0x8080 for (flags,) in struct.iter_unpack("<14xH", at(memory, descriptors, 16 * entries))]
    return [(device, 4, f"{name}: its events, at {device:#x}")] + [
        # Its address is still the guest's.
        (descriptors + 16 * place + 8, 8, f"{name}: its descriptor {place}, at {descriptors + 16 * place:#x}")
        for place, mark in enumerate(marks)
        if mark in (0, 0x8080)
    ]
