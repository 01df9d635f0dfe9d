"""Runs the `millrace` binary: one command, or a node that serves until the test ends."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time

import resp

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
BINARY = pathlib.Path(os.environ.get("MILLRACE", TARGET / "release" / "millrace"))


def command(*arguments, timeout=60, text=True, **kwargs):
    """Runs `millrace ARGUMENTS...` to its end."""
    return subprocess.run(
        [str(BINARY), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=timeout,
        text=text,
        **kwargs,
    )


def succeed(*arguments, **kwargs):
    """Runs a command that must succeed; returns its output."""
    done = command(*arguments, **kwargs)
    assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stderr}"
    return done.stdout


def fail(*arguments, **kwargs):
    """Runs a command that must fail; returns its message. A crash does not count as a failure, nor an argument that does not exist."""
    done = command(*arguments, **kwargs)
    said = done.stdout + done.stderr
    assert done.returncode > 0, f"{arguments}: {done.returncode}\n{said[-2000:]}"
    assert done.returncode < 100 and "panicked" not in said, f"{arguments}: {done.returncode}\n{said[-2000:]}"
    assert not re.search("unexpected argument|unrecognized subcommand", said), f"{arguments}: {said}"
    return done.stderr


def said_json(*arguments, **kwargs):
    """The one JSON value that a command prints."""
    return json.loads(succeed(*arguments, "--json", **kwargs))


def scan(data, *arguments):
    """(key, value) as `kv scan --hex` prints them."""
    return pairs_of(succeed("kv", "scan", "--hex", "--data", data, *arguments))


def pairs_of(output):
    """(key, value) of lines KEYHEX VALUEHEX."""
    pairs = []
    for line in output.splitlines():
        key, value = line.split(" ")
        pairs.append((bytes.fromhex(key), bytes.fromhex(value)))
    return pairs


def ports():
    """Ports of 127.0.0.1, each once. The system gives none of them to a client or to a listener that asks for any port,
    because they lie below its range for those. Each worker of the tests has 1,000 of its own, and starts somewhere among
    them, for another run of the tests beside this one."""
    lowest = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = lowest - 1000 * (worker + 1)
    assert first >= 1024, f"no ports are left for worker {worker} below {lowest}"
    for number in itertools.count(os.getpid()):
        yield first + number % 1000


PORTS = ports()


def free_port():
    """A port of 127.0.0.1 at which nobody listens, another one each time."""
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def children(pid):
    """The processes that a process has started; none if it has ended. Its threads may end meanwhile."""
    while True:
        found, changed = [], False
        try:
            tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            return []
        for task in tasks:
            try:
                found += map(int, (task / "children").read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                # A thread has ended, perhaps because the launcher executes another program.
                changed = True
        if not changed:
            return found


def waiting(pid):
    """What the threads of a process and of its children wait for in the kernel, and how busy the machine is."""
    lines = [f"load {pathlib.Path('/proc/loadavg').read_text().strip()}"]
    for process in [pid, *children(pid)]:
        for task in sorted(pathlib.Path(f"/proc/{process}/task").glob("*")):
            with contextlib.suppress(OSError):
                name, kernel = [(task / file).read_text().strip() for file in ("comm", "stack")]
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                calls = " < ".join(line.split()[-1].partition("+")[0] for line in kernel.splitlines()[:6])
                lines.append(f"{process}/{task.name} {name} {state} {calls}")
    return "\n".join(lines)


def role(pid):
    """What a launcher has started a process for: to be its first node, a successor, or a spare; none before it is a node."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for variable in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"MILLRACE_LAUNCHER="):
                return variable.partition(b":")[2].decode()
    return None


def nodes(pid, said):
    """The nodes of a launcher, without the one that stands ready. The launcher says when it calls that."""
    ours = [(child, role(child)) for child in children(pid)]
    return [child for child, role in ours if role is not None and (role != "spare" or re.search(rf" node={child}\b", said))]


def serving(pid, said=""):
    """The process that serves clients and guests: the one that was started, or the child that it launched."""
    return max(nodes(pid, said), default=pid)


class Server:
    """A process that listens on 127.0.0.1:`port`, for use with `with`; ended with its children."""

    def __init__(self, arguments, port, log, **kwargs):
        self.port = port
        self.log = pathlib.Path(log)
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [str(a) for a in arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, **kwargs
            )

    def __enter__(self):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"it ended with {self.process.returncode}: {self.said()}")
            try:
                with self.connect() as client:
                    if client.call("PING") == b"PONG":
                        return self
            except OSError:
                time.sleep(0.01)
        waits = waiting(self.process.pid)
        self.stop()
        raise AssertionError(f"not ready after 20 s: {self.said()}\n{waits}")

    def __exit__(self, *_):
        if self.stop() == "killed":
            raise AssertionError(f"it did not end within 10 s of SIGTERM: {self.said()}")

    def connect(self, timeout=20):
        """A new connection."""
        return resp.Connection(self.port, timeout)

    def said(self):
        """Its output so far."""
        return self.log.read_text(errors="replace")[-3000:]

    def until_ready(self):
        """Waits for the line in which a node reports that all cores serve, which comes after its first answers; returns its output."""
        while " keys, " not in (said := self.said()):
            assert self.alive(), said
            time.sleep(0.001)
        return said

    def counts_keys(self):
        """Whether the node knows the exact number of keys."""
        return "(about " not in self.until_ready()

    def alive(self):
        """Whether the process is running."""
        return self.process.poll() is None

    def rss(self):
        """Its resident memory in bytes."""
        for line in pathlib.Path(f"/proc/{serving(self.process.pid)}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"no VmRSS: {self.said()}")

    def stop(self):
        """Sends SIGTERM, and SIGKILL if needed; sends SIGKILL to remaining children."""
        killed = False
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                killed = True
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        return "killed" if killed else self.process.returncode


def node(data, log, *arguments, writes=False, **kwargs):
    """`millrace serve` over `data` on a free port; read-only without `writes`."""
    port = free_port()
    flags = list(arguments)
    if "--cores" not in flags:
        flags += ["--cores", "1"]
    if "--memory" not in flags:
        flags += ["--memory", "256M"]
    if not writes:
        flags += ["--read-only"]
    return Server([BINARY, "serve", "--data", data, "--listen", f"127.0.0.1:{port}", *flags], port, log, **kwargs)


def redis_server(directory, log, *arguments):
    """Redis on a free port, without persistence."""
    port = free_port()
    flags = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory, *arguments]
    return Server(["redis-server", *flags], port, log)
