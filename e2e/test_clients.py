"""Clients of other languages with client-side caching on, beside Redis: what they read is never older than what they were told.

redis-py is among the packages of the tests. The others are there after `./test clients`, which sets MILLRACE_CLIENTS to
their folder; without it they are left out. The program of a client (`clients/`) executes commands that it reads from its
standard input.
"""

import json
import os
import pathlib
import queue
import random
import shutil
import subprocess
import sys
import threading
import time

import millrace
import pytest

HERE = pathlib.Path(__file__).resolve().parent / "clients"
PACKAGES = pathlib.Path(os.environ["MILLRACE_CLIENTS"]) if "MILLRACE_CLIENTS" in os.environ else None
NODE = ["node", HERE / "driver.js"]

# How each client is started; with its port after it.
CLIENTS = {"redis-py": [sys.executable, HERE / "driver.py"]}
if PACKAGES:
    for name in ("node-redis", "node-redis5", "node-redis-pool", "node-redis5-pool", "ioredis", "ioredis5"):
        CLIENTS[name] = [*NODE, name]
    for name, program in (("jedis", "JedisDriver"), ("jedis5", "JedisDriver"), ("lettuce", "LettuceDriver")):
        CLIENTS[name] = ["java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", f"{PACKAGES / name}:{PACKAGES / name}/*", program]

# What all servers here say they are.
VERSION = "7.4.15"


class Client:
    """A client's program, connected to a server."""

    def __init__(self, name, port, log):
        environment = {**os.environ, "NODE_PATH": f"{PACKAGES}/npm/node_modules"}
        self.name = name
        self.log = log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                [*map(str, CLIENTS[name]), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        assert self.outcome("ready") == {"value": "ready"}

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def outcome(self, of, timeout=60):
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"{self.name} hangs: {of}") from None
        assert line is not None, f"{self.name} ended: {of}: {self.log.read_text(errors='replace')[-2000:]}"
        return json.loads(line)

    def attempt(self, *line):
        """The outcome of a command, which may fail."""
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        return self.outcome(line)

    def call(self, *line):
        """The value of a command."""
        outcome = self.attempt(*line)
        assert "value" in outcome, (line, outcome, self.log.read_text(errors="replace")[-2000:])
        return outcome["value"]

    def until(self, value, *line):
        """Calls until the value is this one. A message may arrive after the writer's reply; nothing else may be late."""
        deadline = time.monotonic() + 10
        while (found := self.call(*line)) != value:
            assert time.monotonic() < deadline, f"{self.name} {line}: {found}, and not {value}"
            time.sleep(0.001)

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def newer_redis(tmp_path_factory):
    """Redis 7.0 that says it is 7.4, because redis-py and Jedis cache only then. The text has the same length."""
    found = pathlib.Path(shutil.which("redis-server"))
    program = tmp_path_factory.mktemp("redis") / "redis-server"
    program.write_bytes(found.resolve().read_bytes().replace(b"7.0.15", VERSION.encode()))
    program.chmod(0o755)
    return program


class Place:
    """Where a server runs, so that it can be started again."""

    def __init__(self, kind, root, redis):
        self.kind, self.root, self.port = kind, root, millrace.free_port()
        if kind == "redis":
            self.arguments = [redis, "--port", self.port, "--bind", "127.0.0.1", "--save", "", "--databases", "1", "--dir", root]
        else:
            self.arguments = [
                millrace.BINARY, "serve", "--data", root / "db", "--listen", f"127.0.0.1:{self.port}", "--cores", "2", "--memory", "256M", "--redis-version", VERSION,
            ]  # fmt: skip

    def start(self):
        return millrace.Server(self.arguments, self.port, self.root / "log")


@pytest.fixture(scope="module", params=["millrace", "redis"])
def server(request, tmp_path_factory, newer_redis):
    with Place(request.param, tmp_path_factory.mktemp(request.param), newer_redis).start() as running:
        yield running


@pytest.fixture(scope="module", params=CLIENTS)
def shared_client(request, server, tmp_path_factory):
    client = Client(request.param, server.port, tmp_path_factory.mktemp("client") / "log")
    yield client
    client.close()


@pytest.fixture
def client(shared_client, server):
    """A client of an empty server, whose settings are the usual ones."""
    with server.connect() as other:
        other.call("CONFIG", "SET", "tracking-table-max-keys", 1_000_000)
        other.call("FLUSHALL")
        other.call("CONFIG", "RESETSTAT")
    return shared_client


@pytest.fixture
def other(server):
    """A connection of another client."""
    with server.connect() as connection:
        yield connection


def reads(connection, command="get"):
    """How often a command was executed."""
    for line in connection.call("INFO", "commandstats").decode().splitlines():
        if line.startswith(f"cmdstat_{command}:calls="):
            return int(line.split("=")[1].split(",")[0])
    return 0


def test_a_value_is_asked_for_once_until_it_is_written(client, other):
    for n in range(20):
        other.call("SET", "a", n)
        client.until(str(n), "get", "a")
        before = reads(other)
        assert [client.call("get", "a") for _ in range(10)] == [str(n)] * 10
        # A client may ask once more, if a message has come while it waited for the reply.
        assert reads(other) <= before + 1


# What another client does to a key that had the value "1", and what is read then.
CHANGES = [
    (("SET", "a", "2"), "2"), (("MSET", "b", "1", "a", "3"), "3"), (("DEL", "a"), None), (("UNLINK", "a"), None), (("FLUSHALL",), None), (("FLUSHDB", "ASYNC"), None),
    (("APPEND", "a", "x"), "1x"), (("INCR", "a"), "2"), (("SETRANGE", "a", "1", "y"), "1y"), (("GETDEL", "a"), None), (("GETSET", "a", "5"), "5"), (("GETEX", "a", "PX", "1"), None),
    (("RENAME", "a", "b"), None), (("COPY", "c", "a", "REPLACE"), "c"), (("SETBIT", "a", "7", "0"), "0"), (("BITOP", "NOT", "a", "missing"), None), (("PEXPIRE", "a", "1"), None),
    (("SET", "a", "6", "PX", "1"), None), (("PEXPIREAT", "a", "1"), None), (("RESTORE", "a", "0", "PAYLOAD", "REPLACE"), "c"),
]  # fmt: skip


def test_whatever_changes_a_key_is_heard_of(client, other):
    other.call("SET", "c", "c")
    payload = other.call("DUMP", "c")
    for change, value in CHANGES:
        other.call("SET", "c", "c")
        other.call("SET", "a", "1")
        client.until("1", "get", "a")
        other.call(*(payload if word == "PAYLOAD" else word for word in change))
        client.until(value, "get", "a")
        client.until([value], "mget", "a")


def test_a_transaction_of_another_client_is_heard_of(client, other):
    for n in range(20):
        for key in "ab":
            client.call("get", key)
        assert other.pipeline([("MULTI",), ("SET", "a", n), ("SET", "b", n), ("EXEC",)])[-1]
        for key in "ab":
            client.until(str(n), "get", key)


def test_an_expiry_is_heard_of(client, other):
    other.call("SET", "a", "1", "PX", "300")
    client.until("1", "get", "a")
    client.until(None, "get", "a")
    other.call("SET", "a", "2")
    client.until("2", "get", "a")


def test_own_writes_are_seen_at_once(client):
    for n in range(50):
        client.call("set", "a", str(n))
        client.until(str(n), "get", "a")
        client.until([str(n), None], "mget", "a", "b")
    assert client.call("del", "a") == 1
    client.until(None, "get", "a")


def test_more_keys_than_the_table_holds(client, other):
    other.call("CONFIG", "SET", "tracking-table-max-keys", 20)
    keys = [f"key:{n}" for n in range(200)]
    for round in range(3):
        other.call("MSET", *(word for key in keys for word in (key, f"{key}:{round}")))
        for key in keys:
            client.until(f"{key}:{round}", "get", key)
        for key in random.Random(round).choices(keys, k=100):
            assert client.call("get", key) == f"{key}:{round}"


def test_pipelines(client, other):
    other.call("SET", "text", "x")
    client.until("x", "get", "text")
    if client.name.endswith("pool"):
        # It sends each command over another connection.
        return
    replies = client.call("pipeline", ["set", "a", "1"], ["incr", "a"], ["get", "a"], ["incr", "text"], ["get", "missing"], ["del", "a"], ["get", "text"])
    assert "not an integer" in replies[3], replies
    assert replies[:3] + replies[4:] == ["OK", 2, "2", None, 1, "x"]
    many = client.call("pipeline", *(["incr", "n"] for _ in range(500)))
    assert many == list(range(1, 501))
    client.until("500", "get", "n")


def test_transactions(client, other):
    client.call("set", "a", "1")
    client.until("1", "get", "a")
    assert client.call("exec", ["set", "a", "2"], ["incr", "a"], ["get", "a"]) == ["OK", 3, "3"]
    client.until("3", "get", "a")
    if client.name.endswith("pool"):
        # A pool of node-redis watches on a connection that is taken out of it, which has no cache.
        return
    client.call("watch", "a")
    other.call("SET", "a", "7")
    assert client.call("exec", ["incr", "a"]) is None
    client.until("7", "get", "a")
    client.call("watch", "a")
    assert client.call("exec", ["incr", "a"], ["get", "b"]) == [8, None]
    client.until("8", "get", "a")


def test_what_is_read_never_goes_back(client, server):
    """While three connections increment keys, a client reads: each value is at least the one before, and the last is the last."""
    keys, until, failed = [f"key:{n}" for n in range(5)], time.monotonic() + 2, []

    def increment(seed):
        rng = random.Random(seed)
        with server.connect() as connection:
            try:
                while time.monotonic() < until:
                    connection.pipeline([("INCR", rng.choice(keys)) for _ in range(rng.randrange(1, 20))])
                    time.sleep(rng.random() * 0.01)
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=increment, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    seen, rng = dict.fromkeys(keys, 0), random.Random(9)
    while time.monotonic() < until:
        key = rng.choice(keys)
        found = int(client.call("get", key) or 0)
        assert found >= seen[key], f"{key}: {found} after {seen[key]}"
        seen[key] = found
    for thread in threads:
        thread.join()
    assert not failed
    with server.connect() as connection:
        for key in keys:
            client.until(connection.call("GET", key).decode(), "get", key)


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("kind", ["millrace", "redis"])
def test_a_server_that_is_killed_and_comes_back(name, kind, tmp_path, newer_redis):
    place = Place(kind, tmp_path, newer_redis)
    client = None
    try:
        for round in range(3):
            with place.start() as running:
                with running.connect() as other:
                    other.call("SET", "a", round)
                client = client or Client(name, place.port, tmp_path / "client.log")
                # Connections may fail until the client has a new one. Nothing from before may be read meanwhile.
                deadline = time.monotonic() + 20
                if name.startswith("jedis"):
                    # It finds out that a connection is lost only when it sends something, whatever the server.
                    while "error" in client.attempt("set", "b", "0"):
                        assert time.monotonic() < deadline
                while (outcome := client.attempt("get", "a")) != {"value": str(round)}:
                    assert "error" in outcome, f"round {round}: {outcome}"
                    assert time.monotonic() < deadline, outcome
                    time.sleep(0.01)
                with running.connect() as other:
                    for n in range(20):
                        other.call("SET", "b", n)
                        client.until(str(n), "get", "b")
                    before = reads(other)
                    for _ in range(20):
                        client.call("get", "b")
                    assert reads(other) <= before + 3, "it caches again"
                os.kill(millrace.serving(running.process.pid), 9)
                running.process.wait()
    finally:
        if client:
            client.close()
