"""The set-up of two machines as the documentation tells it: its commands, and two machines to paste them on. They are two
network namespaces, or, without root, this machine. Used by the black-box tests and by those of the Python package."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADING = "## Compute and storage on two machines\n"
NUMBERS = itertools.count()
# The name of the link at both ends, and their addresses.
LINK, ADDRESSES = "link0", ("10.0.0.1", "10.0.0.2")


def blocks(page, heading=HEADING):
    """The fenced blocks of a page's section, in order: pairs of language and text."""
    section = (ROOT / page).read_text().split(heading)[1].split("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.M | re.S)


def block(page, language, has, heading=HEADING):
    """The one block of the section that has a text."""
    found = [text for of, text in blocks(page, heading) if of == language and has in text]
    assert len(found) == 1, f"{len(found)} blocks in {page} have {has}"
    return found[0]


class Machines:
    """`storage` and `compute` are directories, one on each machine, with a clone of the repository each, in `millrace`."""

    def __init__(self, directory, program, namespaces, address):
        self.namespaces, self.address = namespaces, address
        self.storage, self.compute = directory / "storage", directory / "compute"
        clone = self.storage / "millrace"
        (clone / "target" / "release").mkdir(parents=True)
        # It is built already.
        (clone / "target" / "release" / "millrace").symlink_to(program)
        (clone / "run").symlink_to(ROOT / "run")
        built = self.storage / "bin"
        built.mkdir()
        (built / "cargo").write_text("#!/bin/sh\nexit 0\n")
        (built / "cargo").chmod(0o755)
        self.compute.mkdir()
        (self.compute / "millrace").symlink_to(ROOT)

    def place(self, text):
        return text.replace("10.0.0.1:6379", self.address).replace("10.0.0.1", self.address.split(":")[0])

    def inside(self, at, *words):
        return [*inside(self.namespaces[at]), *map(str, words)] if self.namespaces else [*map(str, words)]

    def send(self, *names, at=None):
        """Copies files from the one machine to the other."""
        for name in names:
            shutil.copy((at or self.storage) / name, self.compute)

    @contextlib.contextmanager
    def serve(self, commands, at=None):
        """Pastes commands, of which the last one serves, on the machine with the disks."""
        environment = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
        environment["PATH"] = f"{self.storage / 'bin'}:{environment['PATH']}"
        shell = self.inside(0, "bash", "-ec", self.place(commands))
        log = self.storage / "log"
        with open(log, "wb") as out:
            process = subprocess.Popen(shell, cwd=at or self.storage, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        try:
            host, port = self.address.split(":")
            deadline = time.monotonic() + 60
            while subprocess.run(self.inside(1, "bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}"), capture_output=True).returncode:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield
            assert process.poll() is None, log.read_text()
        finally:
            for how in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                    break

    def paste(self, *words, timeout=60, **environment):
        """Runs a program on the other machine; returns what it prints."""
        done = subprocess.run(self.inside(1, *words), cwd=self.compute, env=os.environ | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


def inside(namespace):
    """The words before a command that run it in a namespace."""
    return ["ip", "netns", "exec", namespace]


@contextlib.contextmanager
def namespaces():
    """Two network namespaces with a link, 10.0.0.1 and 10.0.0.2; nothing where they cannot be made."""
    number = f"{os.getpid()}x{next(NUMBERS)}"
    names = f"two{number}s", f"two{number}c"
    try:
        made = os.geteuid() == 0 and shutil.which("ip") and all(ip("netns", "add", name).returncode == 0 for name in names)
        words = ("type", "veth", "peer", "name", LINK, "netns", names[1])
        if made and ip("-n", names[0], "link", "add", LINK, *words).returncode == 0:
            for at, name in enumerate(names):
                for words in (("link", "set", "lo", "up"), ("addr", "add", f"{ADDRESSES[at]}/24", "dev", LINK), ("link", "set", LINK, "up")):
                    done = ip("-n", name, *words)
                    assert done.returncode == 0, done.stderr
            yield names
        else:
            yield None
    finally:
        for name in names if shutil.which("ip") else ():
            ip("netns", "del", name)


@contextlib.contextmanager
def machines(directory, program):
    """Two machines, of which the one with the disks has 10.0.0.1 where namespaces can be made."""
    with namespaces() as names:
        if names:
            yield Machines(directory, program, names, f"{ADDRESSES[0]}:6379")
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            yield Machines(directory, program, None, f"127.0.0.1:{port}")


class Link:
    """A link between two namespaces that has a rate and delays each way. tc's tbf keeps the rate; netem delays, or, where the
    kernel lacks it, a proxy for each port that something is sent to. `to` tells where to send to."""

    def __init__(self, stack, namespaces, rate, delay_ms):
        self.stack, self.namespaces, self.delay_ms = stack, namespaces, delay_ms
        self.proxied = set()
        netem = ["netem", "delay", f"{delay_ms}ms", "rate", rate, "limit", 10000]
        tbf = ["tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
        self.has_netem = all(self._tc(name, *netem).returncode == 0 for name in namespaces)
        if not self.has_netem:
            for name in namespaces:
                done = self._tc(name, *tbf)
                assert done.returncode == 0, done.stderr

    @staticmethod
    def _tc(name, *words):
        return subprocess.run(["tc", "-n", name, "qdisc", "replace", "dev", LINK, "root", *map(str, words)], capture_output=True, text=True)

    def sent_bytes(self):
        """What the first machine has sent over the link."""
        said = ip("-n", self.namespaces[0], "-s", "-j", "link", "show", LINK).stdout
        return json.loads(said)[0]["stats64"]["tx"]["bytes"]

    def to(self, port):
        """Where the first machine sends to, for a port of the second one."""
        if self.has_netem:
            return ADDRESSES[1], port
        if port not in self.proxied:
            self.proxied.add(port)
            at, to = f"127.0.0.1:{port}", f"{ADDRESSES[1]}:{port}"
            words = [*inside(self.namespaces[0]), sys.executable, ROOT / "e2e/delaying.py", at, to, self.delay_ms, 16]
            proxy = subprocess.Popen([*map(str, words)], stdin=subprocess.DEVNULL)
            self.stack.callback(proxy.wait)
            self.stack.callback(proxy.kill)
            listening = [*inside(self.namespaces[0]), "ss", "-Hltn", f"sport = :{port}"]
            deadline = time.monotonic() + 20
            while not subprocess.run(listening, capture_output=True, text=True).stdout:
                assert proxy.poll() is None and time.monotonic() < deadline, "the proxy does not start"
                time.sleep(0.05)
        return "127.0.0.1", port


@contextlib.contextmanager
def link(rate, delay_ms):
    """A link. `rate` is tc's, such as 1gbit. Skips the test where no namespaces can be made."""
    with namespaces() as names, contextlib.ExitStack() as stack:
        if not names or not shutil.which("tc"):
            pytest.skip("it takes root, ip and tc to make a link between network namespaces")
        yield Link(stack, names, rate, delay_ms)
