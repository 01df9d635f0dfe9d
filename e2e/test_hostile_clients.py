"""Clients that mean no good, or do not read: they hurt only themselves, and memory stays where it was."""

import random
import resource
import socket
import time

import databases
import millrace
import pytest
import resp

MEMORY = 64 << 20


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """20,000 keys of 1 KB."""
    root = tmp_path_factory.mktemp("hostile")
    databases.db_bench(root / "db", num=20000, value_size=1000, block_size=4096)
    return root / "db"


@pytest.fixture(params=["io_uring", "epoll"])
def node(request, data, tmp_path, long):
    if request.param == "epoll" and not long:
        pytest.skip("the other driver has its turn in the longer form")
    with millrace.node(data, tmp_path / "log", "--memory", "64M", "--io", request.param) as node:
        yield node


def key(n):
    return n.to_bytes(8, "big") + b"0" * 8


def still_serves(node, within=1.0):
    """Others are answered, and soon."""
    started = time.monotonic()
    with node.connect() as client:
        for n in range(20):
            assert len(client.call("GET", key(n * 997))) == 1000
    assert time.monotonic() - started < within


def test_garbage_hurts_only_its_sender(node, long):
    rng = random.Random(8)
    with node.connect() as good:
        for round_ in range(400 if long else 60):
            with socket.create_connection(("127.0.0.1", node.port), 5) as bad:
                kind = round_ % 4
                sent = [
                    lambda: rng.randbytes(rng.randint(1, 5000)),
                    lambda: b"*" + rng.randbytes(40),
                    lambda: resp.encode("GET", rng.randbytes(30))[: rng.randint(1, 40)],
                    lambda: b"*3\r\n$4\r\nMGET\r\n$1000000\r\n" + rng.randbytes(100),
                ][kind]()
                try:
                    bad.sendall(sent)
                    if round_ % 3 == 0:
                        bad.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                except ConnectionError:
                    pass
            assert len(good.call("GET", key(round_))) == 1000
    assert node.alive()
    still_serves(node)


@pytest.mark.parametrize(
    "clients, requests",
    [
        (8, [resp.encode("MGET", *(key(n) for n in range(64))), resp.encode("MR.RANGE", "-", "+")]),
        (50, [resp.encode("SCAN", "0", "COUNT", "10000")]),
    ],
    ids=["values", "scans"],
)
def test_clients_that_ask_for_everything_and_do_not_read_hold_bounded_memory(node, clients, requests):
    still_serves(node)
    before = node.rss()
    greedy = [socket.create_connection(("127.0.0.1", node.port), 20) for _ in range(clients)]
    try:
        for number, client in enumerate(greedy):
            client.setblocking(False)
            request = requests[number % len(requests)] * 50
            deadline = time.monotonic() + 12 / clients
            while time.monotonic() < deadline:
                try:
                    client.send(request)
                except BlockingIOError:
                    break
                except ConnectionError:
                    break
        highest = 0
        for _ in range(15):
            highest = max(highest, node.rss())
            time.sleep(0.1)
        still_serves(node, within=3)
        assert highest < before + MEMORY + (32 << 20), f"{before >> 20} MiB before, {highest >> 20} MiB now"
    finally:
        for client in greedy:
            client.close()
    still_serves(node)
    assert node.alive()


def test_a_slow_reader_gets_everything_and_stops_nobody(node):
    with node.connect() as slow:
        slow.send(resp.encode("MR.RANGE", "-", "+", "LIMIT", 18000))
        taken = bytearray()
        for _ in range(8):
            taken += slow.socket.recv(1000)
            still_serves(node)
            time.sleep(0.1)
        slow.buffer += taken
        reply = slow.reply()
        assert len(reply) == 36000 and reply[0] == key(0) and reply[-2] == key(17999) and len(reply[-1]) == 1000


def test_one_byte_at_a_time(node):
    with node.connect() as client:
        for byte in resp.encode("GET", key(5)) + b"PING\r\n":
            client.send(bytes([byte]))
        assert len(client.reply()) == 1000 and client.reply() == b"PONG"


def test_a_thousand_idle_connections(node):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    before = node.rss()
    idle = []
    try:
        for _ in range(1000):
            idle.append(node.connect())
        assert idle[-1].call("PING") == b"PONG" and idle[0].call("PING") == b"PONG"
        still_serves(node)
        assert node.rss() < before + MEMORY, f"{before >> 20} MiB before, {node.rss() >> 20} MiB now"
        assert all(len(client.call("GET", key(n))) == 1000 for n, client in enumerate(idle))
    finally:
        for client in idle:
            client.socket.close()
    still_serves(node)


def test_a_request_at_the_border_of_what_is_allowed(node):
    with node.connect() as client:
        many = [key(n % 20000) for n in range(10000)]
        assert [len(value) for value in client.call("MGET", *many)] == [1000] * 10000
    with node.connect() as client:
        try:
            reply = client.call("ECHO", b"x" * (8 << 20))
            assert isinstance(reply, resp.Error) or len(reply) == 8 << 20
        except (ConnectionError, resp.Closed):
            pass  # too large for a node of this size: it may be cut off
    still_serves(node)


def test_a_client_that_leaves_in_the_middle_of_a_reply(node):
    before = None
    for _ in range(60):
        client = socket.create_connection(("127.0.0.1", node.port), 5)
        client.sendall(resp.encode("MR.RANGE", "-", "+") + resp.encode("MGET", *(key(n) for n in range(500))))
        client.recv(1000)
        client.close()
        before = before or node.rss()
    still_serves(node)
    assert node.rss() < before + MEMORY


def test_it_ends_soon_when_told_to_although_clients_are_busy(data, tmp_path):
    with millrace.node(data, tmp_path / "log") as node:
        with node.connect() as client:
            client.send(resp.encode("MR.RANGE", "-", "+") * 20)
            started = time.monotonic()
            assert node.stop() == 0, node.said()
            assert time.monotonic() - started < 8
