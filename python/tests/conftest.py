"""Servers for the tests: a node and redis-server."""

import contextlib
import itertools
import os
import pathlib
import socket
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MILLRACE = pathlib.Path(os.environ.get("MILLRACE", ROOT / "target" / "debug" / "millrace"))


class Server:
    def __init__(self, process, port):
        self.process = process
        self.port = port
        self.address = f"127.0.0.1:{port}"


def ports():
    """Ports of 127.0.0.1 that the system gives to nobody who asks for any: below its range for those, and below the ports
    of e2e/millrace.py. Each worker of the tests has 1,000 of its own."""
    first = 12_000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.count(os.getpid()):
        yield first + number % 1000


PORTS = ports()


def free_port():
    """A port at which nobody listens, another one each time."""
    for port in PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as client:
        client.sendall(b"PING\r\n")
        # Any reply will do: a password may be wanted.
        return client.recv(1) in (b"+", b"-")
    return False


def end(process):
    """Ends a server, by force if it takes too long."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serve(command, port, log):
    with open(log, "wb") as out:
        process = subprocess.Popen([*map(str, command)], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not answers(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        yield Server(process, port)
    finally:
        end(process)


def start_node(directory, *flags):
    port = free_port()
    listen = f"127.0.0.1:{port}"
    command = [MILLRACE, "serve", "--data", directory / "data", "--listen", listen, "--cores", "1", "--memory", "64M"]
    return serve([*command, "--durability", "process", *flags], port, directory / "log")


def start_redis(directory, *flags):
    port = free_port()
    command = ["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    return serve([*command, "--dir", directory, *flags], port, directory / "log")


@pytest.fixture
def node(tmp_path):
    with start_node(tmp_path) as server:
        yield server


@pytest.fixture
def redis(tmp_path):
    with start_redis(tmp_path) as server:
        yield server


@pytest.fixture(params=["node", "redis"])
def server(request):
    return request.getfixturevalue(request.param)
