"""The link between client and server is cut: two network namespaces, as root."""

import itertools
import os
import pathlib
import shutil
import subprocess
import sys

import conftest
import pytest

HERE = pathlib.Path(__file__).resolve().parent
NUMBERS = itertools.count()


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def namespaces():
    """The names of two namespaces with a link, and the interface of the first, which has 10.9.0.1."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("it takes root and iproute2 to make network namespaces")
    number = f"{os.getpid()}x{next(NUMBERS)}"
    names = f"mr{number}s", f"mr{number}c"
    try:
        for name in names:
            if ip("netns", "add", name).returncode:
                pytest.skip("network namespaces cannot be made here")
        done = ip("-n", names[0], "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", names[1])
        if done.returncode:
            pytest.skip(f"no veth: {done.stderr}")
        for at, name in enumerate(names):
            for words in (("link", "set", "lo", "up"), ("addr", "add", f"10.9.0.{at + 1}/24", "dev", "link0"), ("link", "set", "link0", "up")):
                done = ip("-n", name, *words)
                assert done.returncode == 0, done.stderr
        yield *names, "link0"
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.parametrize("kind", ["node", "redis"])
def test_a_link_that_is_cut(kind, namespaces, tmp_path):
    near, far, interface = namespaces
    address, port = "10.9.0.1", "6379"
    if kind == "node":
        command = [conftest.MILLRACE, "serve", "--data", tmp_path / "data", "--listen", f"{address}:{port}", "--allow-remote"]
        command += ["--cores", "1", "--memory", "64M", "--durability", "process"]
    else:
        command = ["redis-server", "--port", port, "--bind", address, "--protected-mode", "no", "--save", "", "--dir", tmp_path]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(["ip", "netns", "exec", near, *map(str, command)], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        ping = ["ip", "netns", "exec", near, "redis-cli", "-h", address, "-p", port, "PING"]
        while "PONG" not in subprocess.run(ping, capture_output=True, text=True, timeout=30).stdout:
            assert server.poll() is None, (tmp_path / "log").read_text()
        program = [sys.executable, HERE / "link.py", f"{address}:{port}", near, interface]
        done = subprocess.run(["ip", "netns", "exec", far, *map(str, program)], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log").read_text()[-2000:]
    finally:
        conftest.end(server)
