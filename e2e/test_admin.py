"""Disks that are attached to and detached from a running node through the admin socket."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import urllib.request

import guest
import millrace
import pytest
from front_end import DISCARD, FLUSH, IO_ERROR, OK, UNMAP, UNSUPPORTED, ZEROES, FrontEnd
from prometheus_client.parser import text_string_to_metric_families
from small_disk import SmallDisk
from test_disks import Disks, image


class Node(Disks):
    """A node with a state directory, to which disks are attached."""

    def __init__(self, tmp_path, *flags, specs=(), name="node", binary=millrace.BINARY):
        self.state = tmp_path / f"{name}-state"
        super().__init__(tmp_path / f"{name}.log", *specs, flags=["--state", self.state, *flags], binary=binary)
        self.sockets.append(self.state / "admin.sock")

    def start(self):
        earlier = self.said().count(" serves ") if self.log.exists() else 0
        super().start()
        guest.wait_for("the node", lambda: self.said().count(" serves ") > earlier)
        return self

    def do(self, *words):
        """The output of a `disk` command."""
        return millrace.succeed("disk", *words, "--state", self.state)

    def refuses(self, *words):
        return millrace.fail("disk", *words, "--state", self.state)

    def disks(self, command="list"):
        """{name: disk} as the node reports them."""
        return {disk["name"]: disk for disk in json.loads(self.do(command, "--json"))["disks"]}

    def ask(self, line):
        """The reply to a line of the protocol."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(self.state / "admin.sock"))
            client.sendall(line)
            return json.loads(client.makefile("rb").readline())


@pytest.fixture
def node(tmp_path):
    with Node(tmp_path) as node:
        yield node


def spec(tmp_path, name, uri="null:1G"):
    return f"name={name} uri={uri} socket={tmp_path / name}.sock queues=2"


def test_an_image_is_created_sparse_or_preallocated(tmp_path):
    sparse, full = tmp_path / "sparse.img", tmp_path / "full.img"
    millrace.succeed("disk", "create", sparse, "--size", "1G")
    millrace.succeed("disk", "create", full, "--size", "4M", "--preallocate")
    assert sparse.stat().st_size == 1 << 30 and sparse.stat().st_blocks == 0
    assert full.stat().st_size == 4 << 20 <= full.stat().st_blocks * 512
    assert "exists" in millrace.fail("disk", "create", sparse, "--size", "2G")
    assert sparse.stat().st_size == 1 << 30
    for size in ("0", "1000", "-1G", "100000000T"):
        millrace.fail("disk", "create", tmp_path / "wrong.img", f"--size={size}")
    millrace.fail("disk", "create", tmp_path / "none" / "a.img", "--size", "1M")
    assert not (tmp_path / "wrong.img").exists()


def test_an_image_is_copied_with_its_holes(node, tmp_path):
    old, new = tmp_path / "old image.img", tmp_path / "new.img"
    with open(old, "wb") as file:
        for mib in (0, 7, 30):
            file.seek(mib << 20)
            file.write(os.urandom(1 << 20))
        file.truncate(64 << 20)
    millrace.succeed("disk", "create", new, "--from", old)
    assert new.read_bytes() == old.read_bytes() and new.stat().st_blocks <= old.stat().st_blocks + 64
    larger = tmp_path / "larger.img"
    millrace.succeed("disk", "create", "larger.img", "--from", f"file:{new}", "--size", "128M", cwd=tmp_path)
    assert larger.stat().st_size == 128 << 20 and larger.read_bytes()[: 64 << 20] == old.read_bytes()
    assert "exists" in millrace.fail("disk", "create", new, "--from", old)
    for words, expected in [
        (["--from", old, "--size", "32M"], "more than 32 MiB"),
        (["--from", tmp_path / "none.img"], "none.img"),
        (["--from", old, "--preallocate"], "--preallocate"),
        ([], "--size"),
    ]:
        assert expected in millrace.fail("disk", "create", tmp_path / "wrong.img", *words)
        assert not (tmp_path / "wrong.img").exists()
    # A guest may write to it.
    node.do("attach", spec(tmp_path, "a", f"file:{new}"))
    assert "lock" in millrace.fail("disk", "create", tmp_path / "wrong.img", "--from", new)


def test_a_copy_shares_its_blocks_where_the_file_system_can(tmp_path):
    whole = image(tmp_path / "xfs.img", 512)
    subprocess.run(["mkfs.xfs", "-q", whole], check=True)
    mount = tmp_path / "mount"
    mount.mkdir()
    with SmallDisk(mount, image=whole) as disk:
        old, new, larger = (disk.inside() / name for name in ("old.img", "new.img", "larger.img"))
        old.write_bytes(os.urandom(32 << 20))
        os.sync()
        free = shutil.disk_usage(disk.inside()).free
        millrace.succeed("disk", "create", new, "--from", old)
        millrace.succeed("disk", "create", larger, "--from", old, "--size", "64M")
        assert free - shutil.disk_usage(disk.inside()).free < 4 << 20
        assert new.read_bytes() == old.read_bytes() and larger.read_bytes() == old.read_bytes() + bytes(32 << 20)
        # Each has its own blocks when it is written to.
        with open(new, "r+b") as file:
            file.write(b"new")
        assert new.read_bytes()[3:] == old.read_bytes()[3:] and old.read_bytes()[:3] == larger.read_bytes()[:3] != b"new"


def test_images_are_converted(tmp_path):
    raw, packed, again = tmp_path / "raw.img", tmp_path / "packed.qcow2", tmp_path / "again.img"
    raw.write_bytes(os.urandom(3 << 20) + bytes(5 << 20))
    millrace.succeed("disk", "convert", raw, packed)
    assert packed.read_bytes()[:4] == b"QFI\xfb"
    millrace.succeed("disk", "convert", packed, again)
    assert again.read_bytes() == raw.read_bytes()
    assert "exists" in millrace.fail("disk", "convert", raw, again)
    # A colon is not that of a protocol.
    shutil.copy(raw, tmp_path / "vm:1.img")
    millrace.succeed("disk", "convert", "vm:1.img", "vm:1.qcow2", cwd=tmp_path)
    assert "convert" in millrace.fail("disk", "create", tmp_path / "wrong.img", "--from", packed)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"raw.img", "packed.qcow2", "again.img", "vm:1.img", "vm:1.qcow2"}
    # The name decides: a guest may have written what looks like another format.
    packed.rename(tmp_path / "guest.img")
    millrace.succeed("disk", "convert", tmp_path / "guest.img", tmp_path / "copy.img")
    assert (tmp_path / "copy.img").read_bytes()[:4] == b"QFI\xfb"
    assert "qemu-img" in millrace.fail("disk", "convert", tmp_path / "none.img", tmp_path / "wrong.qcow2")
    assert not (tmp_path / "wrong.qcow2").exists()


def test_an_image_that_names_a_file_of_this_machine_is_not_converted(tmp_path):
    """Whoever has made it would get what is in there."""
    secret, outside = tmp_path / "secret", tmp_path / "outside.qcow2"
    secret.write_bytes(b"secret" * 1000)
    for words in (["-F", "raw", "-b", secret], ["-o", f"data_file={tmp_path / 'data'}"]):
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *words, outside, "1M"], check=True)
        said = millrace.fail("disk", "convert", outside, tmp_path / "new.img")
        assert "another file" in said and str(words[-1]).rpartition("/")[2] in said
        assert not (tmp_path / "new.img").exists()
        millrace.succeed("disk", "convert", outside, tmp_path / "new.img", "--with-backing")
        (tmp_path / "new.img").unlink()


@pytest.mark.parametrize("command", ["create", "convert"])
def test_an_image_has_its_name_when_it_is_whole(tmp_path, command):
    old, new = tmp_path / "old.img", tmp_path / "new.img"
    old.write_bytes(os.urandom(200 << 20))
    words = ["create", new, "--from", old] if command == "create" else ["convert", old, new]
    maker = subprocess.Popen([millrace.BINARY, "disk", *words], start_new_session=True)
    partial = guest.wait_for("some of it", lambda: next(tmp_path.glob(".new.img.*.partial"), None))
    os.killpg(maker.pid, signal.SIGKILL)
    maker.wait()
    assert not new.exists() and partial.exists()
    millrace.succeed("disk", *words)
    assert new.read_bytes() == old.read_bytes()


def test_a_copy_has_the_last_bytes_that_are_no_block(tmp_path):
    old, new = tmp_path / "old.img", tmp_path / "new.img"
    old.write_bytes(os.urandom(10_001))
    millrace.succeed("disk", "create", new, "--from", old)
    assert new.read_bytes() == old.read_bytes() + bytes(12_288 - 10_001)


def test_disks_are_attached_listed_and_detached(node, tmp_path):
    assert node.disks() == {}
    here = tmp_path / "a b"
    here.mkdir()
    image(here / "a.img", 8)
    # Relative paths are resolved in the working directory of the command, not of the node.
    millrace.succeed("disk", "attach", "name=a uri=file:a.img socket=a.sock", "--state", node.state, cwd=here)
    assert (here / "a.sock").is_socket() and (here / "a.sock").stat().st_mode & 0o777 == 0o600
    node.do("attach", spec(tmp_path, "b"))
    table = node.do("list")
    assert "8 MiB" in table and str(here / "a.sock") in table
    assert "the name b" in node.refuses("attach", spec(tmp_path, "b"))
    assert "missing.img" in node.refuses("attach", spec(tmp_path, "c", f"file:{tmp_path}/missing.img"))
    assert "locked" in node.refuses("attach", spec(tmp_path, "c", f"file:{here}/a.img".replace(" ", "%20")))
    assert set(node.disks()) == {"a", "b"}
    assert "the disks are: a, b" in node.refuses("detach", "c")
    node.do("detach", "a")
    assert set(node.disks("stat")) == {"b"} and not (here / "a.sock").exists()


def test_attached_disks_come_back_and_detached_ones_do_not(tmp_path):
    named = spec(tmp_path, "named", "null:1G")
    with Node(tmp_path, specs=[named]) as node:
        node.do("attach", spec(tmp_path, "kept"))
        node.do("attach", spec(tmp_path, "gone"))
        image(tmp_path / "lost.img", 8)
        node.do("attach", spec(tmp_path, "lost", f"file:{tmp_path}/lost.img"))
        assert "at the next start" in node.do("detach", "named")
        node.do("detach", "gone")
        node.kill()
        (tmp_path / "lost.img").unlink()
        node.start()
        disks = node.disks()
        assert {name: disk["attached"] for name, disk in disks.items()} == {"named": False, "kept": True, "lost": True}
        # A disk that cannot be opened does not affect the others.
        assert "lost.img" in disks["lost"]["failed"] and "failed" not in disks["kept"]
        assert "lost.img" in node.do("stat", "lost")
        node.do("detach", "lost")
        assert node.stop() == 0
    # The command line overrides a stored disk of the same name.
    with Node(tmp_path, specs=[spec(tmp_path, "kept", "null:2G")]) as node:
        disks = node.disks()
        assert {name: disk["uri"] for name, disk in disks.items()} == {"kept": "null:2G"}


def test_a_guest_sees_its_disk_grow(node, tmp_path):
    path = tmp_path / "disk.img"
    millrace.succeed("disk", "create", path, "--size", "64M")
    node.do("attach", spec(tmp_path, "a", f"file:{path}"))
    with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", queues=2, mode="grow") as vm:
        vm.wait_for(r"GUEST WAITS")
        assert node.disks()["a"]["connected"]
        assert "--force" in node.refuses("detach", "a")
        said = node.refuses("resize", "a", "--size", "32M")
        assert "last 32 MiB would be lost" in said and "--shrink" in said
        node.refuses("resize", "a", "--size", "1000")
        assert path.stat().st_size == 64 << 20
        assert "instead of 64 MiB" in node.do("resize", "a", "--size", "96M")
        assert int(vm.wait_for(r"GUEST SIZE (\d+)")[1]) == 96 << 11
        vm.wait_for_end()
    assert path.stat().st_size == 96 << 20
    stat = node.disks("stat")["a"]
    assert stat["write"]["requests"] >= 1 and stat["write"]["latency"]["p99_ns"] > 0
    guest.wait_for("the end of the connection", lambda: not node.disks()["a"]["connected"])
    node.do("resize", "a", "--size", "32M", "--shrink")
    assert path.stat().st_size == 32 << 20


def test_upgrades_keep_the_size_of_a_resized_disk(node, tmp_path):
    """Also of disks whose size is stored in the node only."""
    uris = ["null:64M", "delay:all=1ms|null:64M", "dirty:granule=4K|null:64M", "mem:64M", f"file:{image(tmp_path / 'disk.img', 64)}"]
    for nth, uri in enumerate(uris):
        node.do("attach", spec(tmp_path, f"disk{nth}", uri))
    for size in (96, 32, 48):
        for nth in range(len(uris)):
            node.do("resize", f"disk{nth}", "--size", f"{size}M", "--shrink")
        node.upgrade()
        guest.wait_for("the node", lambda: {disk["size_bytes"] for disk in node.disks().values()} == {size << 20}, 10)
        assert len(node.disks()) == len(uris)


def test_a_guest_waits_for_a_disk_detached_by_force(node, tmp_path):
    disk = spec(tmp_path, "a", f"file:{image(tmp_path / 'disk.img')}")
    node.do("attach", disk)
    with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", queues=2, mode="load", secs=6, mib=8) as vm:
        vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
        node.do("detach", "a", "--force")
        node.do("attach", disk)
        vm.wait_for(r"GUEST LOAD OK")
        vm.wait_for_end()


def test_a_write_cache_that_a_guest_disabled_stays_disabled(node, tmp_path):
    path = image(tmp_path / "disk.img")
    node.do("attach", spec(tmp_path, "a", f"file:{path}"))
    with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", queues=2, mode="through", then="stay") as vm:
        vm.wait_for(r"GUEST CACHE write through")
        assert node.disks("stat")["a"]["write_cache"] is False
        node.restart(0)
        guest.wait_for("the guest", lambda: node.disks()["a"]["connected"])
        assert node.disks("stat")["a"]["write_cache"] is False
        assert "write cache off" in node.do("stat", "a")
        assert "not known" not in node.said(), node.said()


def test_a_node_without_state_trusts_no_write_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    disk = spec(tmp_path, "a", f"file:{image(tmp_path / 'disk.img')}")
    with Disks(tmp_path / "log", disk) as node:
        with guest.Guest(tmp_path / "vm", node.sockets[0], queues=2, mode="boot", then="stay") as vm:
            vm.wait_for(r"GUEST BOOTED")
            assert "not known" not in node.said(), node.said()
            node.restart(0)
            guest.wait_for("the guest", lambda: "it is not known whether the guest" in node.said())


def test_a_node_is_upgraded_by_command(tmp_path):
    """The reply comes from the old node, and names the new one."""
    disk = spec(tmp_path, "a", f"file:{image(tmp_path / 'disk.img')}")
    program = shutil.copy(millrace.BINARY, tmp_path / "new program")
    said = {}
    with Node(tmp_path, specs=[disk]) as node:
        with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", queues=2, mode="load", secs=6, mib=8) as vm:
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
            for other, why in (("missing", "No such file"), ("disk.img", "starting")):
                refused = millrace.fail("upgrade", "--to", other, "--state", node.state, cwd=tmp_path)
                assert "no upgrade: " in refused and why in refused and "the node continues" in refused, refused
            # Relative paths are resolved in the working directory of the command.
            command = ("upgrade", "--to", program.name, "--state", node.state)
            node.upgrade(lambda: said.update(millrace.said_json(*command, cwd=tmp_path)))
            assert said["successor"] == node.pid() and said["pause_us"] > 0
            guest.wait_for("the successor's admin socket", lambda: node.said().count(" serves ") == 2)
            assert node.disks()["a"]["connected"]
            assert os.readlink(f"/proc/{node.pid()}/exe") == str(program)
            # Without --to the program under the node's own name is used.
            node.upgrade(lambda: said.update(text=millrace.succeed("upgrade", "--state", node.state)))
            assert f"process {node.pid()} serves now" in said["text"], said
            vm.wait_for(r"GUEST LOAD OK")
            vm.wait_for_end()


def test_metrics_and_top_need_no_database(tmp_path):
    port = millrace.free_port()
    with Node(tmp_path, "--metrics", f"127.0.0.1:{port}", specs=[spec(tmp_path, "a", "mem:64M")]) as node:
        with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", queues=2, mode="files") as vm:
            vm.wait_for(r"GUEST FILES OK")
            vm.wait_for_end()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
        value = {}
        for family in families.values():
            for sample in family.samples:
                value[sample.name, sample.labels.get("kind"), sample.labels.get("le")] = sample.value
        stat = node.disks("stat")["a"]
        for kind in ("read", "write", "flush", "discard"):
            assert value["millrace_disk_requests_total", kind, None] == stat[kind]["requests"]
            assert value["millrace_disk_bytes_total", kind, None] == stat[kind]["bytes"]
            assert value["millrace_disk_errors_total", kind, None] == value["millrace_disk_no_space_total", kind, None] == 0
            # All requests to the device have completed.
            assert value["millrace_disk_latency_seconds_count", kind, None] == stat[kind]["requests"]
            assert value["millrace_disk_latency_seconds_bucket", kind, "+Inf"] == stat[kind]["requests"]
        assert stat["write"]["bytes"] >= 4 << 20 and stat["kicks"] > 0 and stat["interrupts"] > 0
        assert 0 < stat["polls_with_work"] <= stat["polls"] and stat["depth"] == 0 == stat["errors"]
        assert value["millrace_disk_connected", None, None] == 0 and families["millrace_reactor_turns"].samples
        said = millrace.succeed("top", "--once", "--interval", "0.2", "--state", node.state)
        assert "CORE" in said and "DISK" in said and "\x1b" not in said
        top = millrace.said_json("top", "--once", "--interval", "0.2", "--state", node.state)
        assert top["cores"][0]["core"] == 0 and top["disks"][0]["name"] == "a"


@pytest.mark.parametrize("uri", ["mem:64M", "file:{}", "file:{}?write=through"])
def test_discards_and_writes_of_zeroes_are_counted_exactly(node, tmp_path, uri):
    node.do("attach", spec(tmp_path, "a", uri.format(image(tmp_path / "disk.img", 64))))
    mib = 1 << 20
    with FrontEnd(tmp_path / "a.sock") as front_end:
        for nth, length in enumerate([4096, 8192, 3 * mib]):
            assert front_end.range(DISCARD, 8 * nth * mib, length, ring=nth % 2) == OK
        for nth, (length, flags) in enumerate([(4096, 0), (4096, UNMAP), (mib, 0), (2 * mib, UNMAP)]):
            assert front_end.range(ZEROES, 8 * nth * mib, length, flags, ring=nth % 2) == OK
        # These do not reach the device.
        for kind in (DISCARD, ZEROES):
            assert front_end.range(kind, 64 * mib, 4096) == IO_ERROR
            assert front_end.range(kind, 0, 4096, flags=2) == UNSUPPORTED
        assert front_end.call(FLUSH) == OK
        stat = node.disks("stat")["a"]
    counted = {kind: (stat[kind]["requests"], stat[kind]["bytes"]) for kind in ("read", "write", "flush", "discard", "zeroes")}
    discarded, zeroed = 3 * mib + 12288, 3 * mib + 8192
    assert counted == {"read": (0, 0), "write": (0, 0), "flush": (1, 0), "discard": (3, discarded), "zeroes": (4, zeroed)}
    assert (stat["completions"], stat["errors"], stat["depth"]) == (12, 0, 0)
    for kind, (requests, _) in counted.items():
        assert (stat[kind]["errors"], stat[kind]["no_space"], sum(stat[kind]["latency"]["log2_ns"])) == (0, 0, requests)
    # The next node goes on counting.
    node.upgrade()
    after = guest.wait_for("the node", lambda: node.disks("stat")["a"])
    assert counted == {kind: (after[kind]["requests"], after[kind]["bytes"]) for kind in counted}


@pytest.mark.parametrize("kind, name", [(DISCARD, "discard"), (ZEROES, "zeroes")])
def test_discards_and_writes_of_zeroes_that_fail_are_counted(node, tmp_path, kind, name):
    node.do("attach", spec(tmp_path, "a", f"error:kind={name}&status=nospace|mem:64M"))
    with FrontEnd(tmp_path / "a.sock") as front_end:
        for _ in range(2):
            assert front_end.range(kind, 4096, 8192) == IO_ERROR
    stat = node.disks("stat")["a"]
    assert (stat["errors"], stat["no_space"]) == (2, 2)
    assert [stat[name][word] for word in ("requests", "bytes", "errors", "no_space")] == [2, 16384, 2, 2]


def test_top_shows_the_shard_of_a_database(tmp_path):
    state, data = tmp_path / "state", tmp_path / "data"
    with millrace.node(data, tmp_path / "log", "--state", state, writes=True) as node, node.connect() as client:
        node.until_ready()
        seen = None
        while not (seen and seen["writes"] > 0 and seen["gets"] > 0):
            top = subprocess.Popen([millrace.BINARY, "top", "--once", "--interval", "0.3", "--json", "--state", state], stdout=subprocess.PIPE)
            while top.poll() is None:
                client.call("SET", "a", "b")
                assert client.call("GET", "a") == b"b"
            (seen,) = json.loads(top.stdout.read())["shards"]
        assert (seen["core"], seen["keys"], seen["connections"], seen["level0_files"]) == (0, 1, 1, 0)
        assert seen["commands"] > seen["writes"] and seen["memtable_bytes"] > 0 and seen["held_back"] == 0
        assert "SHARD" in millrace.succeed("top", "--once", "--interval", "0.1", "--state", state)


def test_top_continues_after_an_upgrade_and_a_restart(node, tmp_path):
    """The successor has the disks' counters and a clock of its own: a frame across both once showed 10^18 reads per second."""
    node.do("attach", spec(tmp_path, "a", "mem:64M"))
    load = ["bench", "vdisk", "--socket", tmp_path / "a.sock", "--rw", "randread", "--depth", "8", "--seconds", "0.5"]
    millrace.succeed(*load)
    top = subprocess.Popen([millrace.BINARY, "top", "--interval", "0.1", "--json", "--state", node.state], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        frame = lambda: json.loads(top.stdout.readline())
        assert frame()["disks"][0]["name"] == "a"
        for change in node.upgrade, node.restart:
            change()
            for _ in range(20):
                shown = frame()
                assert 0 < shown["seconds"] < 60, shown
                assert all(disk["read"]["iops"] < 1e9 for disk in shown["disks"]), shown
        assert top.poll() is None
    finally:
        top.kill()
        _, said = top.communicate()
    assert said == b"", said


def test_a_node_locks_its_state_directory(node, tmp_path):
    assert (node.state / "admin.sock").stat().st_mode & 0o777 == 0o600
    said = millrace.fail("serve", "--state", node.state)
    assert "another node" in said and "--state" in said
    assert node.disks() == {}
    node.stop()
    (node.state / "disks.json").write_text('{"version": 7}')
    assert "version 7" in millrace.fail("serve", "--state", node.state)
    (node.state / "disks.json").write_text("{")
    assert "disks.json" in millrace.fail("serve", "--state", node.state)
    said = millrace.fail("disk", "list", "--state", node.state)
    assert "is a node running?" in said


def test_a_node_is_found_at_its_default_socket(tmp_path, monkeypatch):
    with Disks(tmp_path / "log", spec(tmp_path, "a")) as node:
        guest.wait_for("the node", lambda: " serves " in node.said())
        assert "null:1G" in millrace.succeed("disk", "list")
        # A second node runs without an admin socket, and says so.
        with Disks(tmp_path / "second", spec(tmp_path, "b")) as second:
            guest.wait_for("the second", lambda: " serves " in second.said())
            assert "another node uses the state directory" in second.said()
    admin = tmp_path / "admin.sock"
    with Disks(tmp_path / "third", spec(tmp_path, "c"), flags=["--admin", admin]) as third:
        guest.wait_for("the third", lambda: " serves " in third.said())
        assert "null:1G" in millrace.succeed("disk", "list", "--admin", admin)


def test_an_invalid_request_gets_an_error_and_the_node_survives(node):
    for line in (b"\n", b"{}\n", b"[1]\n", b'{"version":2,"command":"top"}\n', b"\xff\n", b'{"version":1,"command":"x"}\n'):
        assert node.ask(line)["error"]
    assert "at most 65536 bytes" in node.ask(b"x" * (1 << 17))["error"]
    assert node.ask(b'{"version":1,"command":"disk-list"}\n')["result"] == {"disks": []}
    # More silent connections than it accepts at a time.
    idle = []
    for _ in range(100):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(node.state / "admin.sock"))
        idle.append(client)
    said = node.refuses("list")
    assert "64 programs are connected" in said and "cut off after a minute" in said
    for client in idle:
        client.close()
    guest.wait_for("the next client", lambda: "result" in answer_or_nothing(node))


def answer_or_nothing(node):
    try:
        return node.ask(b'{"version":1,"command":"disk-list"}\n')
    except (OSError, ValueError):
        return {}


@pytest.mark.parametrize("replies", [True, False], ids=["the successor answers", "nobody answers"])
def test_a_look_at_a_node_that_is_being_replaced_goes_to_its_successor(tmp_path, replies):
    """A command that changes something is not sent twice."""
    at = tmp_path / "admin.sock"
    seen = []

    def serve(listener):
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection:
                seen.append(json.loads(connection.makefile("rb").readline()))
                if replies and len(seen) == 2:
                    connection.sendall(b'{"version": 1, "result": {"disks": []}}\n')

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(at))
        listener.listen()
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        try:
            words = ("disk", "list", "--json", "--admin", at)
            if replies:
                assert json.loads(millrace.succeed(*words))["disks"] == []
            else:
                assert "the node closed the connection" in millrace.fail(*words)
            assert [one["command"] for one in seen] == ["disk-list"] * 2
            assert "the node closed the connection" in millrace.fail("disk", "detach", "a", "--admin", at)
            assert len(seen) == 3
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            server.join()
