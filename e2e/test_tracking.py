"""CLIENT TRACKING: the same bytes as Redis 7.0.15 on every connection, and client-side caching of real clients."""

import random
import threading
import time

import millrace
import pytest
import redis
import redis.cache
import resp

NAMES = "ABCD"
ASYNCHRONOUS = (b"invalidate", b"tracking-redir-broken", b"message")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Redis and a node, both empty and writable."""
    root = tmp_path_factory.mktemp("pair")
    with millrace.redis_server(root, root / "redis.log", "--databases", "1") as theirs, millrace.node(root / "db", root / "log", "--cores", "2", writes=True) as ours:
        # So that the numbers of connections are not those of other replies.
        for server in (theirs, ours):
            for _ in range(100):
                server.connect().socket.close()
        yield theirs, ours


class Side:
    """Some connections to one server."""

    def __init__(self, server):
        self.server = server
        self.clients = {}
        self.ids = {}
        for name in NAMES:
            self.connect(name)

    def connect(self, name):
        self.clients[name] = self.server.connect()
        self.ids[name] = self.clients[name].call("CLIENT", "ID")

    def close(self):
        for client in self.clients.values():
            client.socket.close()

    def take(self, name, replies):
        """The next bytes of a connection, up to the last of so many replies."""
        client = self.clients[name]
        begin = client.at
        while replies:
            reply = client.reply()
            asynchronous = isinstance(reply, list) and reply and reply[0] in ASYNCHRONOUS
            replies -= not asynchronous
        data = bytes(client.buffer[begin : client.at])
        for other, number in self.ids.items():
            data = data.replace(b":%d\r\n" % number, b":@%s\r\n" % other.encode())
        return data

    def words(self, line):
        words = [word.encode() if word != "''" else b"" for word in line.split()]
        return [str(self.ids[word[1:].decode()]).encode() if word[:1] == b"@" else word for word in words]

    def step(self, step):
        """Sends commands in one write, and returns what each connection then receives."""
        name, _, line = step.partition(":")
        # With the number of replies, where not every command has one.
        name, _, replies = name.partition("=")
        if line == "close":
            self.clients[name].socket.close()
            time.sleep(0.05)
            del self.clients[name]
        else:
            commands = line.split("|")
            self.clients[name].send(b"".join(resp.encode(*self.words(command)) for command in commands))
        received = {}
        if name in self.clients:
            received[name] = self.take(name, int(replies or len(commands)))
        for other in sorted(self.clients, key=lambda other: other != name):
            self.clients[other].send(resp.encode("PING", "marker"))
            received[other] = received.get(other, b"") + self.take(other, 1)
        return received


# Steps are separated by ";": a connection and commands that it sends in one write. Then all connections are asked for what came.
STORIES = [
    # The default mode.
    "A:HELLO 3|CLIENT TRACKING ON;B:SET a 1;A:GET a;B:SET a 1;B:SET a 2;A:GET a;B:DEL a;B:DEL a;A:GET a;B:SET a 3",
    "A:HELLO 3|CLIENT TRACKING ON;A:MGET a b c;B:MSET a 1 b 2 d 4;B:SET c 1;A:EXISTS a b x;B:DEL b a;B:SETNX x 1;B:SETNX x 1",
    "A:HELLO 3|CLIENT TRACKING ON|GET a|SET a 1|GET a|SET a 2|SET a 3|GET a;A:SET b 1|SET a 1|SET b 2;A:GET a|GET b|MSET a 1 b 2|PING|GET c|APPEND c x|STRLEN c|INCR n",
    "A:HELLO 3|CLIENT TRACKING ON;B:SET a 12;A:STRLEN a;B:SETRANGE a 0 x;A:GETRANGE a 0 1;B:APPEND a y;A:SUBSTR a 0 0;B:SETBIT a 1 1;A:TYPE a;B:GETSET a 1;A:TTL a|PTTL a;B:INCR a;A:TOUCH a;B:DECR a;A:GETBIT a 1;B:INCRBYFLOAT a 1;A:BITCOUNT a;B:GETDEL a;A:OBJECT ENCODING a;B:SET a 1;A:DUMP a;B:SET a 1;A:LCS a b;B:SET b 1;A:BITPOS a 1;B:SET a 1;A:BITFIELD_RO a GET u8 0;B:BITFIELD a SET u8 0 1;A:GET a;B:BITFIELD a GET u8 0;B:BITOP NOT a a",
    # What does not enter keys.
    "A:HELLO 3|CLIENT TRACKING ON;B:SET a 1;A:SCAN 0|KEYS *|RANDOMKEY|DBSIZE|WATCH a|UNWATCH;B:SET a 2;A:GETSET a 3|GETDEL a|SET a 4 GET|COPY a b|BITFIELD a GET u8 0;B:SET a 2;B:SET b 2",
    "A:HELLO 3|CLIENT TRACKING ON;B:SET a 1;A:GET a|GET b|GET c;B:RENAME a b;A:GET a|GET b|GET c;B:COPY b c;B:RENAMENX b a;A:GET b|GET a;A:RENAME a b",
    "A:HELLO 3|CLIENT TRACKING ON;B:MSET a 1 b 1;A:GET a|GET b;B:SET a 2 NX;B:SET x 2 XX;B:SET a 2 XX;A:GET a|GET b;B:FLUSHALL;A:GET a;B:FLUSHDB;B:SET a 1;A:FLUSHALL|PING;A:GET a|FLUSHDB ASYNC|SET a 1",
    # On, off and again.
    "A:HELLO 3|CLIENT TRACKING ON|GET a|CLIENT TRACKING OFF;B:SET a 1;A:CLIENT TRACKING ON;B:SET a 1;A:GET a;A:CLIENT TRACKING OFF|CLIENT TRACKING ON;B:SET a 2;A:GET a|RESET;B:SET a 1;A:CLIENT TRACKINGINFO|CLIENT GETREDIR",
    "A:CLIENT TRACKING ON|GET a;B:SET a 1;A:HELLO 3|GET a;B:SET a 1;A:GET a|HELLO 2;B:SET a 1;A:HELLO 3|CLIENT TRACKINGINFO;B:SET a 1;A:GET a;B:SET a 1",
    "A:HELLO 3|CLIENT TRACKING ON|GET a;B:HELLO 3|CLIENT TRACKING ON|GET a|GET b;C:HELLO 3|CLIENT TRACKING ON|GET b;D:MSET a 1 b 1;A:GET a;B:GET a;B:SET a 1;A:SET a 1;A:close;B:GET a;C:SET a 9",
    # NOLOOP.
    "A:HELLO 3|CLIENT TRACKING ON NOLOOP|GET a|SET a 1;B:SET a 1;A:GET a;B:SET a 1;A:GET a|SET a 1|GET a;B:SET a 1;A:FLUSHALL;A:CLIENT TRACKINGINFO",
    # OPTIN and OPTOUT.
    "A:HELLO 3|CLIENT TRACKING ON OPTIN|GET a|CLIENT CACHING YES|GET b|GET c;B:MSET a 1 b 1 c 1;A:CLIENT CACHING YES|CLIENT ID|CLIENT TRACKINGINFO|GET a|CLIENT TRACKINGINFO;B:SET a 1;A:CLIENT CACHING YES|PING|GET a;B:SET a 2;A:CLIENT CACHING NO|CLIENT CACHING x|CLIENT CACHING YES|NONSENSE|GET a;B:SET a 3",
    "A:HELLO 3|CLIENT TRACKING ON OPTOUT|GET a|CLIENT CACHING NO|GET b|GET c;B:MSET a 1 b 1 c 1;A:CLIENT CACHING YES|CLIENT CACHING NO|CLIENT TRACKINGINFO|GET a;B:SET a 1;A:GET a;B:SET a 2",
    "A:HELLO 3|CLIENT CACHING YES|CLIENT CACHING NO|CLIENT CACHING x|CLIENT TRACKING ON|CLIENT CACHING YES|CLIENT CACHING NO",
    "A:HELLO 3|CLIENT TRACKING ON OPTIN|CLIENT CACHING YES|MULTI|GET a|GET b|EXEC|GET c;B:MSET a 1 b 1 c 1;A:MULTI|GET a|CLIENT CACHING YES|GET b|EXEC|GET c;B:MSET a 1 b 1 c 1;A:CLIENT CACHING YES|MULTI|GET a|DISCARD|GET b;B:MSET a 1 b 1",
    # Transactions.
    "A:HELLO 3|CLIENT TRACKING ON|MULTI|GET a|MGET b c|SET d 1|EXEC;B:MSET d 1 c 1 a 1;A:GET a|GET b|MULTI|SET b 1|SET a 1|SET b 2|EXEC|PING;B:MSET a 1 b 1",
    "A:HELLO 3|CLIENT TRACKING ON|MULTI|GET a|SET a 1|EXEC;B:SET a 1;A:MULTI|SET a 1|GET a|EXEC;B:SET a 1;A:GET a|MULTI|SET a 1|GET a|EXEC;B:SET a 1;A:MULTI|GET a|SET a 1|GET a|EXEC;B:SET a 1",
    "A:HELLO 3|CLIENT TRACKING ON|MULTI|SET a 1|GET a|SET a 2|EXEC;B:SET a 3;A:GET a;A:MULTI|SET c 1|GET c|DEL c|GET c|EXEC;B:SET c 1",
    "A:HELLO 3|CLIENT TRACKING ON NOLOOP|GET a|MULTI|SET a 1|GET a|COPY a b REPLACE|EXEC;B:SET a 3;A:GET a|GET b|MULTI|SET b 1|GET b|BITOP NOT a b|EXEC;B:SET b 1;B:SET a 1",
    "A:HELLO 3|CLIENT TRACKING ON|GET a|GET b;B:MULTI|SET b 1|SET a 1|SETNX b 2|DEL x|EXEC;A:GET a|WATCH b;B:SET b 2;A:MULTI|GET b|EXEC;B:SET b 1;A:MULTI|GET b|NONSENSE|EXEC;B:SET b 1;A:MULTI|GET b;B:SET a 1;A:GET a|EXEC;B:MSET a 1 b 1",
    "A:HELLO 3|CLIENT TRACKING ON|GET a|MULTI|FLUSHALL|EXEC|PING;B:SET a 1;A:GET a;B:MULTI|FLUSHALL|SET a 1|EXEC;A:GET a;B:MULTI|RENAME a b|EXEC",
    # BCAST.
    "A:HELLO 3|CLIENT TRACKING ON BCAST;B:SET a 1;B:SET a 1;B:MSET b 1 a 2 c 3;B:DEL a b x;B:MULTI|SET z 1|SET y 1|EXEC;B:FLUSHALL;A:CLIENT TRACKINGINFO;A:GET a;B:SET a 1",
    "A:HELLO 3|CLIENT TRACKING ON BCAST PREFIX user: PREFIX x;B:MSET user:2 1 x 1 user:1 1 use 1;B:SET xx 1;B:SET y 1;A:CLIENT TRACKING ON BCAST PREFIX y PREFIX user:1;A:CLIENT TRACKING ON BCAST PREFIX y|CLIENT TRACKINGINFO;B:SET y 1;A:CLIENT TRACKING ON BCAST|CLIENT TRACKINGINFO;B:MSET y 1 z 1;A:CLIENT TRACKING OFF;B:MSET y 1 z 1",
    "A:HELLO 3|CLIENT TRACKING ON BCAST|SET b 1|SET a 1|GET x|SET c 1;A:SET b 1|PING|GET b|APPEND b x;A:FLUSHALL|SET a 1;A:MULTI|SET b 1|SET a 1|EXEC|GET a",
    "A:HELLO 3|CLIENT TRACKING ON BCAST NOLOOP|SET b 1|SET a 1;B:SET a 1;A:SET a 1|FLUSHALL;B:HELLO 3|CLIENT TRACKING ON BCAST PREFIX a;A:MSET a 1 b 1 aa 1;B:MSET a 1 b 1",
    # Redirection.
    "B:SUBSCRIBE __redis__:invalidate;A:CLIENT TRACKING ON REDIRECT @B|GET a|CLIENT GETREDIR|CLIENT TRACKINGINFO;C:SET a 1;A:GET a|GET b;A:SET a 1;C:DEL b a;A:MGET a b|FLUSHALL;C:FLUSHALL;A:CLIENT TRACKING OFF|CLIENT GETREDIR;C:SET a 1",
    "A:CLIENT TRACKING ON REDIRECT @B|GET a;C:SET a 1;B:SUBSCRIBE __redis__:invalidate;C:SET a 1;A:GET a;C:SET a 1;B:UNSUBSCRIBE;A:GET a;C:SET a 1;B:PING|GET a",
    "B:HELLO 3;A:CLIENT TRACKING ON REDIRECT @B|GET a;C:SET a 1;A:GET a;B:SUBSCRIBE __redis__:invalidate;A:GET a;C:SET a 2;B:GET a|PING|UNSUBSCRIBE __redis__:invalidate|UNSUBSCRIBE",
    "B:HELLO 3;A:HELLO 3|CLIENT TRACKING ON REDIRECT @B|GET a;B:close;C:SET a 1;A:CLIENT TRACKINGINFO|CLIENT GETREDIR|GET a;C:SET a 1;A:CLIENT TRACKING ON|GET a|CLIENT TRACKINGINFO;C:SET a 1",
    "A:CLIENT TRACKING ON REDIRECT @B|GET a;B:close;C:SET a 1;A:CLIENT TRACKINGINFO|CLIENT GETREDIR|GET a",
    "B:SUBSCRIBE __redis__:invalidate;A:CLIENT TRACKING ON REDIRECT @B BCAST PREFIX a PREFIX b;C:MSET ab 1 a 1 ba 1 c 1;A:SET a 1;C:FLUSHALL",
    "A:CLIENT TRACKING ON REDIRECT @A|SUBSCRIBE __redis__:invalidate;B:HELLO 3|CLIENT TRACKING ON REDIRECT @B|GET a|SET a 1|GET a;C:SET a 2",
    "B:SUBSCRIBE __redis__:invalidate;A:CLIENT TRACKING ON REDIRECT @B NOLOOP|MULTI|SET a 1|GET a|EXEC;C:SET a 2;A:GET a|MULTI|SET a 1|GET a|EXEC;C:SET a 2;A:GET a|MULTI|GET a|SET a 1|EXEC;C:SET a 2",
    "A:CLIENT TRACKING ON REDIRECT @B NOLOOP|GET a;B:HELLO 3;A:SET a 1;C:SET a 1;A:GET a;C:SET a 1",
    # Subscribed connections of RESP2.
    "A:SUBSCRIBE __redis__:invalidate __redis__:invalidate|GET a|CLIENT ID|PING|PING x|MULTI|NONSENSE|GET|UNSUBSCRIBE x|UNSUBSCRIBE|UNSUBSCRIBE|GET a;A:SUBSCRIBE __redis__:invalidate|RESET|GET a;A:SUBSCRIBE|UNSUBSCRIBE x y|MULTI|SUBSCRIBE __redis__:invalidate|PING|EXEC|PING|UNSUBSCRIBE",
    # Errors.
    "A:HELLO 3|CLIENT TRACKING|CLIENT TRACKING x|CLIENT TRACKING ON x|CLIENT TRACKING ON REDIRECT|CLIENT TRACKING ON REDIRECT x|CLIENT TRACKING ON REDIRECT 0|CLIENT TRACKING ON REDIRECT -1|CLIENT TRACKING ON REDIRECT 999999|CLIENT TRACKING ON REDIRECT @B REDIRECT @B|CLIENT TRACKING ON PREFIX a|CLIENT TRACKING ON PREFIX|CLIENT TRACKING OFF PREFIX a|CLIENT TRACKING OFF REDIRECT 999999",
    "A:HELLO 3|CLIENT TRACKING ON BCAST OPTIN|CLIENT TRACKING ON BCAST OPTOUT|CLIENT TRACKING ON OPTIN OPTOUT|CLIENT TRACKING ON OPTIN|CLIENT TRACKING ON OPTOUT|CLIENT TRACKING ON BCAST|CLIENT TRACKING ON|CLIENT TRACKINGINFO|CLIENT TRACKING OFF|CLIENT TRACKING ON BCAST PREFIX a PREFIX ab|CLIENT TRACKING ON BCAST PREFIX a PREFIX a|CLIENT TRACKING ON BCAST PREFIX '' PREFIX a|CLIENT TRACKING ON BCAST PREFIX u:|CLIENT TRACKING ON BCAST PREFIX u:1|CLIENT TRACKING ON BCAST PREFIX u|CLIENT TRACKING ON|CLIENT TRACKING ON OPTIN|CLIENT TRACKING on bcast prefix v NoLoop|CLIENT TRACKINGINFO|CLIENT TRACKING off|CLIENT TRACKINGINFO|CLIENT GETREDIR",
    # While commands are queued, and without replies.
    "A:HELLO 3|CLIENT TRACKING ON|GET a|GET b|MULTI|GET c;B:SET a 1;A:SET b 1;A:EXEC;B:SET c 1",
    "A:HELLO 3|CLIENT TRACKING ON|GET a|GET b;A=1:CLIENT REPLY OFF|GET c|SET b 1|CLIENT REPLY ON;B:MSET a 1 c 1;A=1:CLIENT REPLY SKIP|SET a 1|GET a;B:SET a 1",
]  # fmt: skip


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story[:60])
@pytest.mark.parametrize("round", range(2))
def test_the_same_bytes(story, round, pair):
    sides = [Side(server) for server in pair]
    try:
        for side in sides:
            side.clients["D"].call("FLUSHALL")
        for step in story.split(";"):
            theirs, ours = (side.step(step) for side in sides)
            assert ours == theirs, f"after {step}"
    finally:
        for side in sides:
            side.close()


@pytest.fixture
def node(tmp_path):
    """An empty node of two cores that says it is a Redis which has client-side caching for all clients."""
    with millrace.node(tmp_path / "db", tmp_path / "log", "--cores", "2", "--redis-version", "7.4.0", writes=True) as server:
        yield server


def caching_client(server):
    return redis.Redis(port=server.port, protocol=3, cache_config=redis.cache.CacheConfig(), socket_timeout=20)


def test_the_version_that_is_told_can_be_set(node):
    with node.connect() as client:
        assert client.call("HELLO", 3)[b"version"] == b"7.4.0"
        assert b"redis_version:7.4.0\r\n" in client.call("INFO", "server")


def test_redis_py_caches_and_hears_of_writes(node):
    with caching_client(node) as reader, redis.Redis(port=node.port) as writer:
        writer.set("a", "1")
        assert [reader.get("a") for _ in range(3)] == [b"1"] * 3
        reads = writer.info("commandstats")["cmdstat_get"]["calls"]
        assert reads == 1, "the others came from its cache"
        for n in range(200):
            writer.set("a", n)
            # The message is queued now, and is sent before the next reply.
            reader.ping()
            assert reader.get("a") == str(n).encode()
            assert reader.mget("a", "b")[0] == str(n).encode()
        writer.flushall()
        reader.ping()
        assert reader.get("a") is None


def test_redis_py_s_caches_are_coherent(node):
    """Some writers and caching readers: nobody finds a value older than what was acknowledged before it asked."""
    keys, rounds = [f"key:{n}" for n in range(8)], 300
    acknowledged, wrong = dict.fromkeys(keys, 0), []

    def write(seed):
        rng = random.Random(seed)
        with redis.Redis(port=node.port) as client:
            for _ in range(rounds):
                key = rng.choice(keys)
                value = client.incr(key)
                acknowledged[key] = max(acknowledged[key], value)

    def read(seed):
        rng = random.Random(seed)
        with caching_client(node) as client:
            for n in range(rounds):
                key = rng.choice(keys)
                floor = acknowledged[key]
                # It looks into its cache after it has taken what has arrived; a command of its own makes sure that everything has.
                client.ping()
                found = int(client.get(key) or 0)
                if found < floor:
                    wrong.append((key, found, floor))
                if n % 100 == 99:
                    client.connection_pool.disconnect()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(3)] + [threading.Thread(target=read, args=(n,)) for n in range(3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_table_is_bounded(node):
    with node.connect() as reader, node.connect() as writer:
        assert writer.call("CONFIG", "SET", "tracking-table-max-keys", 200) == resp.Simple(b"OK")
        assert writer.call("CONFIG", "GET", "tracking-table-max-keys") == [b"tracking-table-max-keys", b"200"]
        reader.call("HELLO", 3)
        reader.call("CLIENT", "TRACKING", "ON")
        reader.send(b"".join(resp.encode("GET", f"key:{n}") for n in range(1000)))
        dropped, replies = set(), 0
        while replies < 1000:
            reply = reader.reply()
            if isinstance(reply, resp.Push):
                dropped.add(reply[1][0])
            else:
                replies += 1
        reader.send(resp.encode("PING"))
        while isinstance(reply := reader.reply(), resp.Push):
            dropped.add(reply[1][0])
        tracked = int(writer.call("INFO", "stats").split(b"tracking_total_keys:")[1].split(b"\r")[0])
        # Each of the two cores has an equal part.
        assert tracked == 100 and len(dropped) == 900
        # The others are still told of.
        for n in range(1000):
            writer.call("SET", f"key:{n}", 1)
        for _ in range(100):
            dropped.add(reader.reply()[1][0])
        assert len(dropped) == 1000


def test_a_client_that_does_not_read_is_told_to_drop_everything(node):
    names = [f"key:{n}:{'x' * 200}" for n in range(8000)]
    with node.connect() as reader, node.connect() as writer:
        reader.call("HELLO", 3)
        reader.call("CLIENT", "TRACKING", "ON", "BCAST")
        for _ in range(4):
            # More than the buffers of the sockets hold.
            writer.pipeline([("SET", name, 1) for name in names])
        report = writer.call("INFO", "clients").decode()
        waiting = int(report.split("clients_invalidations_bytes:")[1].split("\r")[0])
        assert waiting < 1 << 20
        reader.send(resp.encode("PING"))
        flushed = False
        while isinstance(reply := reader.reply(), resp.Push):
            flushed |= isinstance(reply[1], resp.Null)
        assert flushed and reply == resp.Simple(b"PONG")
        # From then on it is told of each.
        writer.call("SET", "last", 1)
        assert reader.reply() == [b"invalidate", [b"last"]]


@pytest.mark.timeout(120)
def test_many_connections_are_tracked(tmp_path, long):
    count = 9000 if long else 1500
    with millrace.node(tmp_path / "db", tmp_path / "log", "--cores", "2", "--memory", "512M", writes=True) as server:
        before = server.rss()
        readers = [server.connect() for _ in range(count)]
        try:
            for reader in readers:
                reader.send(resp.encode("HELLO", 3) + resp.encode("CLIENT", "TRACKING", "ON") + resp.encode("MGET", "a", "b"))
            for reader in readers:
                assert [type(reader.reply()) for _ in range(3)] == [resp.Map, resp.Simple, list]
            with server.connect() as writer:
                for key in "ab":
                    writer.call("SET", key, 1)
                    for reader in readers:
                        reader.send(resp.encode("PING"))
                    for reader in readers:
                        assert reader.reply() == [b"invalidate", [key.encode()]] and reader.reply() == resp.Simple(b"PONG")
            assert server.rss() - before < 64 << 20 + count * 30_000
        finally:
            for reader in readers:
                reader.socket.close()


def test_a_node_that_only_reads_tells_of_keys_that_end(tmp_path):
    """It removes nothing, so nothing else would tell a cache."""
    lives = (3, 6, 12, 24, 48)
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True) as node, node.connect() as client:
        for seconds in lives:
            client.call("SET", f"k{seconds}", "v", "PX", 1000 * seconds)
        client.call("SET", "stays", "v")
    with (
        millrace.node(tmp_path / "db", tmp_path / "log", "--cores", "2") as node,
        resp.Connection(node.port, timeout=60) as reader,
        resp.Connection(node.port, timeout=60) as listener,
    ):
        for connection, mode in ((reader, []), (listener, ["BCAST"])):
            assert connection.call("HELLO", 3)[b"proto"] == 3
            assert connection.call("CLIENT", "TRACKING", "ON", *mode) == b"OK"
        told = []

        def get(key):
            reader.send(resp.encode("GET", key))
            while isinstance(reply := reader.reply(), resp.Push):
                told.append(reply)
            return reply

        # The first one that has not ended yet.
        key = next(f"k{seconds}".encode() for seconds in lives if get(f"k{seconds}") == b"v")
        assert get("stays") == b"v"
        while [b"invalidate", [key]] not in told:
            push = reader.reply()
            assert isinstance(push, resp.Push)
            told.append(push)
        assert get(key) == resp.Null() and [b"invalidate", [b"stays"]] not in told
        while key not in (push := listener.reply())[1]:
            assert push[0] == b"invalidate"
