"""Each disk is changed by itself: no command waits for the device of another disk, or for the end of an upgrade."""

import json
import os
import signal
import socket
import subprocess

import guest
import millrace
from test_admin import Node, spec
from test_bystanders import HANGS, load, reads
from test_disks import image
from test_limits import driven, operations


def begun(node, *words):
    """A `disk` command that is under way."""
    return subprocess.Popen([millrace.BINARY, "disk", *map(str, words), "--state", node.state], stderr=subprocess.PIPE, text=True)


def test_no_disk_waits_for_the_device_of_another(tmp_path):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent, Node(tmp_path) as node:
        silent.settimeout(30)
        uri = f"nbd://127.0.0.1:{silent.getsockname()[1]}/x?reconnect-delay=600"
        node.do("attach", spec(tmp_path, "a", "mem:8M"))
        node.do("attach", spec(tmp_path, "b", f"file:{image(tmp_path / 'b.img', 8)}"))
        hanging = [begun(node, "attach", spec(tmp_path, "c", uri)), begun(node, "move", "a", "--to", uri)]
        hanging += [begun(node, "attach", spec(tmp_path, f"c{nth}", uri)) for nth in range(16)]
        connections = [silent.accept() for _ in hanging]
        # The same disk and the same socket are taken; nothing else is.
        assert "disk c is being attached" in node.refuses("attach", spec(tmp_path, "c", "mem:8M"))
        twin = spec(tmp_path, "c", "mem:8M").replace("name=c", "name=twin")
        assert "c.sock" in node.refuses("attach", twin)
        node.do("attach", spec(tmp_path, "d", "mem:8M"))
        node.do("resize", "b", "--size", "16M")
        node.do("limit", "b", "iops=50000")
        node.do("move", "b", "--to", f"file:{image(tmp_path / 'other.img', 16)}", "--finish-when-ready")
        node.do("detach", "d")
        assert all(command.poll() is None for command in hanging)
        # An upgrade waits until they have given up, and for ten seconds at most.
        millrace.succeed("upgrade", "--state", node.state)
        for command in hanging:
            assert "nbd://" in command.communicate(timeout=30)[1] and command.returncode != 0
        for connection, _ in connections:
            connection.close()


def test_a_disk_moves_while_the_end_of_an_upgrade_waits_for_another_one(tmp_path):
    """The old process stays for the requests that its device has. Then the launcher's program is replaced, which the move outlives."""
    specs = [spec(tmp_path, "hangs", HANGS)]
    with Node(tmp_path, specs=specs) as node:
        node.do("attach", spec(tmp_path, "a", "mem:8M"))
        node.do("attach", spec(tmp_path, "b", f"file:{image(tmp_path / 'b.img', 8)}"))
        with load(tmp_path, "hangs"), socket.create_server(("127.0.0.1", 0)) as silent:
            guest.wait_for("requests", lambda: reads(node, "hangs") == 4)
            upgrade = subprocess.Popen([millrace.BINARY, "upgrade", "--state", node.state])
            guest.wait_for("the successor", lambda: "handed over" in node.said())
            assert node.said().count("is the launcher now") == 0
            node.do("move", "a", "--to", "mem:8M", "--background")
            node.do("move", "b", "--to", f"file:{image(tmp_path / 'new.img', 8)}", "--background")
            # The launcher's program is replaced when it has no order to carry out.
            attaches = begun(node, "attach", spec(tmp_path, "c", f"nbd://127.0.0.1:{silent.getsockname()[1]}/x"))
            guest.wait_for("the launcher", lambda: "is the launcher now" in node.said(), 60)
            assert "disk c: " in attaches.communicate()[1]
        assert upgrade.wait() == 0
        for name in "ab":
            guest.wait_for("the move", lambda name=name: stage(node, name) == "ready")
            node.do("move", name, "--finish-when-ready")
            guest.wait_for("the end", lambda name=name: stage(node, name) == "done")
        written = driven(tmp_path, "a", seconds=1, rw="randwrite", depth=1)
        assert operations(written) > 0
        # The launcher has the memory of the one, and the name of the other.
        os.kill(node.pid(), signal.SIGKILL)
        guest.wait_for("the next node", lambda: {name: disk["uri"] for name, disk in node.disks().items() if name in "ab"} == {"a": "mem:8M", "b": f"file:{tmp_path / 'new.img'}"})
        assert operations(driven(tmp_path, "a", seconds=1, rw="randwrite", depth=1)) > 0


def stage(node, name):
    return json.loads(node.do("move", "--status", name, "--json"))["moves"][0]["stage"]


def test_a_disk_that_could_not_be_opened_is_attached_anew(tmp_path):
    """Also if only its server is missing, which the launcher does not notice."""
    port = millrace.free_port()
    with Node(tmp_path) as node:
        with Node(tmp_path, "--nbd", f"127.0.0.1:{port}", name="far") as far:
            far.do("attach", spec(tmp_path, "x", "mem:8M"))
            node.do("attach", spec(tmp_path, "c", f"nbd://127.0.0.1:{port}/x"))
        node.restart()
        assert "failed" in node.disks()["c"]
        assert "the name c" in node.refuses("attach", spec(tmp_path, "c", "mem:8M"))
        node.do("detach", "c")
        node.do("attach", spec(tmp_path, "c", "mem:8M"))
        assert operations(driven(tmp_path, "c", seconds=1)) > 0
