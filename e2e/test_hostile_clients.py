"""Clients that are hostile or do not read harm only themselves, and memory stays bounded."""

import os
import pathlib
import random
import resource
import socket
import threading
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
    """Asserts that other clients get prompt replies."""
    started = time.monotonic()
    with node.connect() as client:
        for n in range(20):
            assert len(client.call("GET", key(n * 997))) == 1000
    assert time.monotonic() - started < within


def test_garbage_affects_only_its_sender(node, long):
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
def test_clients_that_request_everything_and_do_not_read_hold_bounded_memory(node, clients, requests):
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


def test_a_slow_reader_gets_everything_and_delays_nobody(node):
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


@pytest.mark.parametrize("first", [b"POST / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nhOST: x\r\n"])
def test_a_web_page_cannot_send_commands(node, first):
    """A browser posts what a page wants to any port of its host: nothing after the request line is executed."""
    with socket.create_connection(("127.0.0.1", node.port), 5) as browser:
        browser.sendall(b"PING\r\n" + first + b"X: y\r\n\r\nCLIENT SETNAME page\r\nPING\r\n")
        browser.settimeout(5)
        replies = b""
        while more := browser.recv(4096):
            replies += more
    assert replies.startswith(b"+PONG\r\n")
    assert replies.count(b"PONG") == 1, replies
    assert b"+OK" not in replies, replies
    still_serves(node)


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


def test_a_request_at_the_size_limit(node):
    with node.connect() as client:
        many = [key(n % 20000) for n in range(10000)]
        assert [len(value) for value in client.call("MGET", *many)] == [1000] * 10000
    with node.connect() as client:
        assert len(client.call("ECHO", b"x" * (2 << 20))) == 2 << 20
    still_serves(node)


@pytest.mark.parametrize("mebibytes", [4, 8, 40])
def test_a_request_that_is_too_large_is_refused_before_its_end(node, mebibytes):
    with node.connect() as client:
        reply = client.call("ECHO", b"x" * (mebibytes << 20))
        assert isinstance(reply, resp.Error) and "--memory" in reply, reply
        assert client.until_closed() == b""
    still_serves(node)


def test_bytes_after_garbage_do_not_suppress_the_error(node):
    with node.connect() as client:
        client.send(b"*1\r\nnonsense\r\n" + b"x" * (1 << 20))
        assert client.reply() == "ERR Protocol error: expected '$', got 'n'"
        assert client.until_closed() == b""
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


def working(node):
    """Processor time that the serving process has used so far, in seconds."""
    fields = pathlib.Path(f"/proc/{millrace.serving(node.process.pid)}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def doing(node):
    """What a node that should be busy is doing."""
    with node.connect() as client:
        said = client.call("INFO", "everything").decode() + client.call("CLIENT", "LIST").decode()[:2000]
    threads = pathlib.Path(f"/proc/{millrace.serving(node.process.pid)}/task").iterdir()
    return said + "".join((thread / "stat").read_text() + (thread / "wchan").read_text() + "\n" for thread in threads)


def is_busy(node):
    """Whether the node is more than occasionally busy."""
    before = working(node)
    time.sleep(0.4)
    return working(node) - before > 0.1


@pytest.mark.parametrize("request_", [("KEYS", "*[0-9]*[0-9]*[0-9]*x"), ("MR.RANGE", "-", "+")], ids=lambda words: words[0])
@pytest.mark.parametrize("more", [b"", resp.encode("PING")], ids=["alone", "pipelined"])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_long_reply_is_not_made_for_a_client_that_is_gone(node, request_, more, reset):
    """A node that searches for keys is busy; soon after its clients are gone it is idle."""
    clients = [socket.create_connection(("127.0.0.1", node.port), 5) for _ in range(200)]
    before = working(node)
    for client in clients:
        client.sendall(resp.encode(*request_) * 80 + more)
    # Replies that nobody reads are not made beyond what the node buffers. A search reads the disk, for which it may have to wait
    # if others write; and it may be done when all are sent.
    assert request_[0] != "KEYS" or working(node) - before > 0.1 or any(is_busy(node) for _ in range(25)), doing(node)
    for client in clients:
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
    # All replies of KEYS would take half a minute or more.
    with node.connect() as client:
        end = time.monotonic() + 10
        while client.call("CLIENT", "LIST").count(b"\n") > 1:
            assert time.monotonic() < end, "it works for clients that are gone"
            time.sleep(0.1)
    assert not is_busy(node)


def test_a_client_that_closes_its_sending_side_gets_its_replies(node):
    with node.connect() as client:
        client.send(resp.encode("MR.RANGE", "-", "+") + resp.encode("PING"))
        client.socket.shutdown(socket.SHUT_WR)
        time.sleep(1.5)
        assert len(client.reply()) == 40000
        assert client.reply() == b"PONG" and client.until_closed() == b""


def test_commands_after_a_long_reply_wait_for_it(node):
    """They arrive with its command or while the reply is made, whole and in parts."""
    with node.connect() as client:
        rest = resp.encode("PING") * 5000
        client.send(resp.encode("MR.RANGE", "-", "+") + rest[:20])
        time.sleep(0.05)
        client.send(rest[20:30])
        time.sleep(0.05)
        client.send(rest[30:])
        assert len(client.reply()) == 40000
        assert all(client.reply() == b"PONG" for _ in range(5000))


def test_a_node_with_busy_clients_ends_soon(data, tmp_path):
    with millrace.node(data, tmp_path / "log") as node:
        with node.connect() as client:
            client.send(resp.encode("MR.RANGE", "-", "+") * 20)
            time.sleep(0.3)
            # Within the time that `stop` gives it.
            assert node.stop() == 0, node.said()


def test_a_node_ends_after_the_replies_to_clients_that_read(data, tmp_path):
    with millrace.node(data, tmp_path / "log") as node:
        with node.connect() as client:
            client.send(resp.encode("MR.RANGE", "-", "+") * 2)
            client.fill()
            node.process.terminate()
            # Slower than the node sends, but without a pause of a second.
            while len(client.buffer) < 12 << 20:
                client.fill()
                time.sleep(0.01)
            assert len(client.reply()) == 40000
        assert node.process.wait(5) == 0, node.said()


def values(tmp_path, sizes):
    """A database with a value of each length, under its index."""
    with millrace.node(tmp_path / "db", tmp_path / "log-made", "--memory", "512M", writes=True) as made:
        with made.connect() as client:
            for number, size in enumerate(sizes):
                assert client.call("SET", f"value{number}", os.urandom(1000) * (size // 1000)) == b"OK"
    return tmp_path / "db"


@pytest.mark.parametrize(
    "clients, size, request_",
    [
        (150, 2_600_000, [("GET", "value0")] * 3),
        (200, 10_000, [("GET", "value0")] * 300),
        (150, 100_000, [("MGET", *["value0"] * 50)] * 4),
        (150, 100_000, [("MR.RANGE", "-", "+")] * 4),
        (150, 20_000, [("ECHO", "x" * 20_000)] * 30),
    ],
    ids=["large", "many", "MGET", "MR.RANGE", "ECHO"],
)
def test_unread_replies_of_many_clients_have_one_bound(tmp_path, long, clients, size, request_):
    """They once had a bound for each client, and 300 clients held 300 times as much."""
    count = 40 if request_[0][0] == "MR.RANGE" else 1
    data = values(tmp_path, [size] * count + [1000])
    with millrace.node(data, tmp_path / "log", "--memory", "64M", writes=True) as node:
        words = b"".join(resp.encode(*words) for words in request_)
        greedy = [socket.create_connection(("127.0.0.1", node.port), 20) for _ in range(clients)]
        for client in greedy:
            # The kernel buffers little for it, too.
            client.setblocking(False)
            try:
                client.send(words)
            except BlockingIOError:
                pass
        highest = 0
        deadline = time.monotonic() + (10 if long else 3)
        with node.connect() as other:
            while time.monotonic() < deadline:
                highest = max(highest, node.rss())
                # Small replies do not wait.
                started = time.monotonic()
                assert len(other.call("GET", f"value{count}")) == 1000
                assert time.monotonic() - started < 10
                time.sleep(0.05)
        most = MEMORY * 1.15 + (24 << 20)
        print(f"{highest >> 20} MiB, at most {most / (1 << 20):.0f}")
        assert highest <= most
        # A client that reads gets its reply in the end, although the others still hold theirs; those are given up one by one.
        if long:
            with node.connect(timeout=150) as reads:
                assert len(reads.call("GET", "value0")) == size
        for client in greedy:
            client.close()
        assert node.alive()


class Honest(threading.Thread):
    """A well-behaved client: it writes and reads, and checks every reply, until it is stopped."""

    def __init__(self, node):
        super().__init__()
        self.node, self.over, self.rounds, self.failed = node, threading.Event(), 0, None
        self.start()

    def run(self):
        try:
            with self.node.connect(60) as client:
                while not self.over.is_set():
                    number = self.rounds % 50
                    value = b"%d:" % self.rounds + b"x" * (100 << (self.rounds % 10))
                    assert client.call("SET", f"honest{number}", value) == b"OK"
                    assert client.call("GET", f"honest{number}") == value
                    assert client.call("STRLEN", f"honest{number}") == len(value)
                    self.rounds += 1
        except Exception as error:
            self.failed = repr(error)

    def goes_on(self, rounds=20):
        """Waits until it has done some rounds more."""
        until, deadline = self.rounds + rounds, time.monotonic() + 60
        while self.rounds < until:
            assert self.is_alive() and not self.failed, self.failed
            assert time.monotonic() < deadline, "the well-behaved client is not served"
            time.sleep(0.01)

    def stop(self):
        self.over.set()
        self.join()
        assert not self.failed, self.failed


BAD_OFFSET = "ERR bit offset is not an integer or out of range"
TOO_LONG = "ERR string exceeds maximum allowed size (proto-max-bulk-len)"

# Commands that ask for much memory, and how their replies begin.
GREEDY = [
    (("SETRANGE", "none", "536870911", "x"), TOO_LONG),
    (("SETRANGE", "large", "536870000", "x" * 1000), TOO_LONG),
    (("SETRANGE", "none", "1099511627776", "x"), TOO_LONG),
    (("SETBIT", "none", "4294967295", "1"), (TOO_LONG, BAD_OFFSET)),
    (("SETBIT", "none", "400000000", "1"), (TOO_LONG, BAD_OFFSET)),
    (("BITFIELD", "none", "SET", "u8", "4294967288", "1"), (TOO_LONG, BAD_OFFSET)),
    (("BITFIELD", "large", "INCRBY", "u63", "#6000000", "1"), (TOO_LONG, BAD_OFFSET)),
    (("BITFIELD", "none", *("GET", "u8", "4000000") * 1000), [0] * 1000),
    (("GETRANGE", "none", "0", "1073741824"), b""),
    (("GETRANGE", "large", "-1073741824", "1073741824"), "the value"),
    (("LCS", "large", "large2", "LEN"), "ERR Insufficient memory"),
    (("LCS", "large", "large2", "IDX", "MINMATCHLEN", "1"), "ERR Insufficient memory"),
]


def refuses_what_is_too_large(node, value):
    """Commands that ask for much memory at once are refused, and connections of clients that announce too much are closed."""
    with node.connect(60) as client:
        for words, expected in GREEDY:
            reply = client.call(*words)
            if expected == "the value":
                assert reply == value
            elif isinstance(expected, (str, tuple)):
                assert isinstance(reply, resp.Error) and reply.startswith(expected), (words[:4], str(reply)[:200])
            else:
                assert reply == expected, (words[:4], str(reply)[:200])
        assert client.call("EXISTS", "none") == 0
        longest = int(client.call("CONFIG", "GET", "proto-max-bulk-len")[1])
        length, reply = 0, 0
        while not isinstance(reply, resp.Error):
            assert reply == length <= longest
            length += 300_000
            reply = client.call("APPEND", "grows", "x" * 300_000)
        assert reply == TOO_LONG and client.call("STRLEN", "grows") == length - 300_000 and client.call("DEL", "grows") == 1
    announced = [
        (b"*2\r\n$3\r\nGET\r\n$1073741824\r\n", "ERR Protocol error: "),
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1073741824\r\n" + b"x" * 10_000, "ERR Protocol error: "),
        (b"*1073741824\r\n", "ERR Protocol error: invalid multibulk length"),
        (b"*-1073741824\r\n*9223372036854775808\r\n", "ERR Protocol error: invalid multibulk length"),
        (b"*1\r\n$-5\r\n", "ERR Protocol error: invalid bulk length"),
        (b"x" * 100_000, "ERR Protocol error: too big inline request"),
    ]
    for sent, expected in announced:
        with node.connect(60) as client:
            client.send(sent)
            reply = client.reply()
            assert isinstance(reply, resp.Error) and reply.startswith(expected), (sent[:60], reply)
            assert client.until_closed() == b""


def test_a_crowd_of_hostile_clients_harms_nobody_else(tmp_path, long):
    """Clients of every kind at once: idle, in the middle of a command, not reading, and asking for more memory than there is."""
    crowd = 10_000 if long else 300
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flags = ["--memory", "64M", "--cores", "2", "--durability", "process"]
    with millrace.node(tmp_path / "db", tmp_path / "log", *flags, writes=True) as node:
        with node.connect(60) as client:
            value = random.Random(1).randbytes(1_000_000)
            for name in ("large", "large2"):
                assert client.call("SET", name, value) == b"OK"
            most = int(client.call("CONFIG", "GET", "maxclients")[1])
        if most < crowd + 200:
            pytest.skip(f"the node takes {most} connections here")
        # What a client of the crowd sends, and does not read the reply of.
        mget = b"*1000000\r\n$4\r\nMGET\r\n"
        kinds = [
            b"",
            b"*3\r\n$3\r\nSET\r\n$4\r\nha",
            b"*3\r\n$3\r\nSET\r\n$4\r\nhalf\r\n$1000000\r\n" + b"x" * 3000,
            mget + b"$1\r\nk\r\n" * 400,
            resp.encode("GET", "large") * 20,
            resp.encode("GETRANGE", "large", "0", "-1") * 20,
            resp.encode("MULTI") + resp.encode("SET", "hoarded", "x" * 20_000),
            resp.encode("WATCH", *(f"watched{number}" for number in range(300))),
            resp.encode("SETRANGE", "crowded", "500000", "x") + resp.encode("GET", "crowded") * 20,
            resp.encode("LCS", "large", "large2"),
        ]
        honest, peak, clients = Honest(node), 0, []
        try:
            for number in range(crowd):
                client = socket.create_connection(("127.0.0.1", node.port), 60)
                clients.append(client)
                client.setblocking(False)
                try:
                    client.send(kinds[number % len(kinds)])
                except (BlockingIOError, ConnectionError):
                    pass
                if number % 200 == 0:
                    peak = max(peak, node.rss())
            honest.goes_on()
            refuses_what_is_too_large(node, value)
            honest.goes_on()
            peak = max(peak, node.rss())
        finally:
            for client in clients:
                client.close()
        honest.goes_on()
        honest.stop()
        # A connection takes 3.5 KiB, and the buffer of an unfinished command of up to 4 KiB. It once took 11 KiB.
        most = MEMORY * 1.15 + (24 << 20) + crowd * 8192
        print(f"{crowd} clients: {peak >> 20} MiB, at most {most / (1 << 20):.0f}; {honest.rounds} rounds beside them")
        assert peak <= most
