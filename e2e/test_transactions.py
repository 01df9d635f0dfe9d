"""Transactions: the same replies as Redis 7.0.15, isolation between clients, and all or nothing after kill -9."""

import random
import shutil
import signal
import threading
import time

import millrace
import pytest
import resp
from small_disk import SmallDisk

OK = resp.Simple(b"OK")
QUEUED = resp.Simple(b"QUEUED")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Redis and a node, both empty and writable."""
    root = tmp_path_factory.mktemp("pair")
    with millrace.redis_server(root, root / "redis.log", "--databases", "1") as theirs, millrace.node(root / "db", root / "log", "--cores", "2", writes=True) as ours:
        yield theirs, ours


@pytest.fixture(params=[2, 3], ids=["resp2", "resp3"])
def both(request, pair):
    """Two connections to each, in RESP2 or RESP3, with both databases empty."""
    sides = [[server.connect(), server.connect()] for server in pair]
    for clients in sides:
        for client in clients:
            if request.param == 3:
                assert isinstance(client.call("HELLO", "3"), resp.Map)
        assert clients[0].call("FLUSHALL") == OK
    yield sides
    for clients in sides:
        for client in clients:
            client.socket.close()


def words_of(line):
    return [b"" if word == "''" else word.encode() for word in line.split()]


# Commands separated by ";". "2:" sends one on another connection.
STORIES = [
    "SET a 1 PXAT 4102444800000;MULTI;PEXPIRETIME a;INCR a;PEXPIRETIME a;SET a 2;PTTL a;PEXPIREAT a 1;GET a;EXEC;GET a;DBSIZE",
    "MULTI;SET a 1 PXAT 4102444800000;RENAME a b;EXPIRETIME b;COPY b c;PEXPIRETIME c;PERSIST b;PERSIST b;TTL b;EXPIREAT a 9;EXEC;PEXPIRETIME c;TTL b",
    "SET a 1;WATCH a;PEXPIREAT a 4102444800000;MULTI;GET a;EXEC;WATCH a;PERSIST a;MULTI;GET a;EXEC;WATCH a;PEXPIREAT a 1 LT;MULTI;GET a;EXEC",
    "SET a 1 PXAT 4102444800000;WATCH a;PEXPIREAT a 4102444800000 NX;GETEX a;MULTI;GETEX a PERSIST;GETEX a PXAT 1;GETEX a EX x;GET a;DBSIZE;EXEC",
    "SET a 1 PXAT 4102444800000;SET b 2;MULTI;KEYS b;FLUSHALL;PEXPIRETIME a;SET a 3 EXAT 4102444801;DBSIZE;EXEC;PEXPIRETIME a;SETEX a 0 x;PSETEX a x 1",
    "MULTI;EXEC;MULTI;SET a 1;GET a;INCR a;GET a;STRLEN a;EXEC;GET a",
    "MULTI;PING;PING x;ECHO y;SELECT 0;DBSIZE;EXISTS a a;MGET a b;TYPE a;TTL a;EXEC",
    "SET a 1;MULTI;APPEND a 23;GETRANGE a 1 -1;SETRANGE a 5 x;GET a;DEL a b;GET a;EXISTS a;SETNX a 7;SETNX a 8;GETSET a 9;GETDEL a;GET a;DBSIZE;EXEC;DBSIZE",
    "MULTI;MSET a 1 b 2;MSETNX b 3 c 4;MSETNX c 5 d 6;MGET a b c d;SET a 1 XX GET;SET e 1 NX;SET e 2 NX;DEL a b c d e;EXEC;DBSIZE",
    "MULTI;SET a x;INCR a;SET b 1;INCRBYFLOAT b 1.5;INCRBY b 1;EXEC;GET a",
    "MULTI;SET a x;INCR a;SET b 1 NX XX;INCRBY a x;INCRBYFLOAT a 1;SETRANGE a -1 x;SELECT 99;GET a;EXEC;GET a",
    "MULTI;SETRANGE a 536870912 x;SET b 1;APPEND b 2;EXEC;GET b",
    "EXEC;DISCARD;MULTI;DISCARD;EXEC;MULTI;SET a 1;DISCARD;GET a;EXEC x;DISCARD x;MULTI x;UNWATCH x;WATCH",
    "MULTI;MULTI;WATCH a;SET a 1;EXEC;MULTI;EXEC x;EXEC;GET a",
    "MULTI;NONSENSE;SET a 1;EXEC;GET a;MULTI;GET;EXEC;MULTI;CLIENT NONSENSE;EXEC;MULTI;MSET a;EXEC;MULTI;DISCARD x;EXEC;MULTI;WATCH;EXEC;MULTI;MULTI x;EXEC",
    "MULTI;SHUTDOWN;EXEC;MULTI;SHUTDOWN x;EXEC;MULTI;SAVE x;EXEC;MULTI;SAVE;EXEC;MULTI;PING a b;ECHO;EXEC;MULTI;PING a b;EXEC",
    "MULTI;UNWATCH;EXEC;UNWATCH;MULTI;RESET;EXEC;PING",
    "WATCH a;2:SET a 1;MULTI;GET a;EXEC;MULTI;GET a;EXEC",
    "WATCH a;SET a 1;MULTI;GET a;EXEC",
    "SET a 1;WATCH a;2:SET a 1;MULTI;EXEC;WATCH a b c;2:GET a;2:SET d 1;MULTI;PING;EXEC",
    "SET a 1;WATCH a;2:APPEND a '';MULTI;PING;EXEC;WATCH b;2:APPEND b '';MULTI;PING;EXEC",
    "SET a 1;WATCH a;2:SETRANGE a 0 '';MULTI;PING;EXEC;WATCH a;2:SETNX a 2;MULTI;PING;EXEC;WATCH b;2:DEL b;MULTI;PING;EXEC;WATCH b;2:SET b 1 XX;MULTI;PING;EXEC",
    "SET a 1;WATCH a;2:GETDEL a;MULTI;PING;EXEC;WATCH a;2:GETDEL a;MULTI;PING;EXEC;SET a 1;WATCH a;2:GETSET a 1;MULTI;PING;EXEC",
    "SET a 1;WATCH a;2:DEL a;MULTI;PING;EXEC;WATCH a;2:SET a 1;2:DEL a;MULTI;PING;EXEC",
    "SET a 1;WATCH a;2:FLUSHALL;MULTI;PING;EXEC;WATCH a;2:FLUSHALL;MULTI;PING;EXEC;SET b 1;WATCH b;FLUSHDB;MULTI;PING;EXEC",
    "WATCH a;2:MULTI;2:SET a 1;2:EXEC;MULTI;PING;EXEC;WATCH a;2:MULTI;2:GET a;2:EXEC;MULTI;PING;EXEC;WATCH a;2:MULTI;2:SET b 1;2:DISCARD;MULTI;PING;EXEC",
    "SET a 1;WATCH a;2:MULTI;2:FLUSHALL;2:EXEC;MULTI;PING;EXEC;WATCH a;2:MULTI;2:FLUSHALL;2:EXEC;MULTI;PING;EXEC",
    "WATCH a;2:SET a 1;UNWATCH;MULTI;PING;EXEC;WATCH a;2:SET a 1;MULTI;DISCARD;MULTI;PING;EXEC;WATCH a;2:SET a 1;EXEC x;MULTI;PING;EXEC",
    "WATCH a;2:SET a 1;MULTI;NONSENSE;EXEC;MULTI;PING;EXEC;WATCH a;MULTI;NONSENSE;EXEC;2:SET a 1;MULTI;PING;EXEC",
    "WATCH a;WATCH b;2:SET b 1;MULTI;SET a 1;EXEC;GET a;WATCH a a;2:SET b 1;MULTI;PING;EXEC",
    "WATCH a;2:INCR a;2:DECR a;MULTI;EXEC;WATCH a;EXEC;2:SET a 2;MULTI;EXEC",
    "MULTI;SET a 1;FLUSHALL;SET b 2;DBSIZE;EXISTS a b;FLUSHDB ASYNC;SET c 3;MGET a b c;EXEC;DBSIZE;MGET a b c",
    "MSET a 1 b 2 c 3;MULTI;DBSIZE;DEL a;DBSIZE;SET d 1;SET d 2;DBSIZE;GET d;FLUSHALL;DBSIZE;EXEC;DBSIZE;SET a 1;DBSIZE",
    "MSET a 1 b 2;MULTI;GET a;FLUSHALL;GET a;INCR a;GET a;EXISTS b;SET b 5;EXEC;MGET a b;DBSIZE",
    "MULTI;CLIENT SETNAME me;CLIENT GETNAME;HELLO 3 NONSENSE;HELLO 4;COMMAND GETKEYS GET a;CONFIG GET databases;EXEC;CLIENT GETNAME",
    "MULTI;CLIENT CACHING YES;CLIENT NO-EVICT x;AUTH x;EXEC",
    "MULTI;HELLO 3;GET nokey;EXEC;WATCH a;SET a b;MULTI;EXEC;HELLO 2;GET nokey",
    "MULTI;HELLO 2;GET nokey;MGET a b;EXEC;GET nokey",
    "MSET a 1 b 2 cc 3;MULTI;DEL b;KEYS ?;FLUSHALL;KEYS *;SET dd 1;KEYS *;EXEC;KEYS *",
    "MULTI;FLUSHALL;SET a 1 PXAT 4102444800000;EXEC;MULTI;FLUSHALL;SET a 1 PXAT 4102444800000;EXEC;PEXPIRETIME a;FLUSHALL;MULTI;FLUSHALL;FLUSHALL;EXEC",
    "COMMAND GETKEYS WATCH a b;COMMAND GETKEYS EXEC",
    "SET a 1 EX 100;MULTI;SET a 2;SET b 1;MSET c 1 a 3;EXEC;TTL a;DBSIZE;MULTI;SET a 4;PING;SET b 5 NONSENSE;SET a 6;SET '' 7;EXEC;MGET a b c '';DBSIZE;INCR a",
    "WATCH a b;2:MULTI;2:SET b 1;2:SET c 1;2:EXEC;MULTI;SET a 1;SET b 2;EXEC;MGET a b c;WATCH a;MULTI;SET b 2;EXEC;2:SET a 1;MULTI;SET a 3;EXEC;MGET a b c",
    "SET a 1;MULTI;RENAME a b;GET b;RENAME a b;COPY b c;COPY b c;COPY b c REPLACE;RENAMENX b c;RENAMENX b d;MGET a b c d;RENAME d d;RENAMENX d d;RENAME x x;RENAMENX x d;COPY x y;COPY d d;EXEC;MGET a b c d;DBSIZE",
    "MSET a 1 b 2;MULTI;DBSIZE;RENAME a b;DBSIZE;COPY b a;DBSIZE;RENAME a a;GET a;FLUSHALL;RENAME b c;SETBIT b 1 1;COPY b c;RENAMENX b c;RENAME b b;DBSIZE;EXEC;MGET a b c;DBSIZE",
    "MSET a 1 b 2;MULTI;DEL a;RENAME a b;COPY b a;INCR a;RENAME a b;APPEND b x;GET b;EXISTS a;DEL b;DBSIZE;EXEC;MGET a b;DBSIZE",
    "MULTI;SETBIT a 7 1;GETBIT a 7;GETBIT a 8;GETBIT b 0;BITCOUNT a;BITCOUNT a 0 0 BIT;BITCOUNT b;BITPOS a 1;BITPOS b 1;BITPOS b 0;SETBIT a 99999999999 1;GETBIT a x;BITCOUNT a x;BITPOS a 2;GET a;EXEC;GET a",
    "MULTI;BITFIELD a INCRBY u8 0 255 OVERFLOW FAIL INCRBY u8 0 255;BITFIELD_RO a GET u8 0 GET u8 8;BITFIELD_RO b GET u8 0;BITFIELD_RO a SET u8 0 1;BITFIELD c GET u8 0;BITFIELD a;BITFIELD a SET i8 0 x;EXEC;MGET a c",
    "MSET a 12 b 3456;MULTI;BITOP AND c a b;BITOP OR d a b x;BITOP XOR a a a;BITOP NOT e d;MGET a b c d e;BITOP NOT b x;BITOP AND y x x;BITOP NOT c a b;BITOP OR d x;EXISTS b d y;EXEC;MGET a b c d e;DBSIZE",
    "MSET a 12 b 3456;MULTI;DBSIZE;BITOP OR a a b;BITOP NOT c b;BITOP NOT b x;DBSIZE;FLUSHALL;BITOP OR a a c;SET c 1;BITOP OR b a c;DBSIZE;EXEC;MGET a b c;DBSIZE",
    "MULTI;SETBIT a 4000000 1;BITCOUNT a;BITPOS a 1;BITPOS a 0;BITCOUNT a 100000 -1;BITOP NOT b a;BITPOS b 0;BITPOS b 1 -1;BITCOUNT b;BITCOUNT b 7 4000000 BIT;GETBIT a 4000000;EXEC;STRLEN b",
    "MSET a 10 b hello;MULTI;OBJECT ENCODING a;OBJECT ENCODING b;OBJECT REFCOUNT b;OBJECT IDLETIME a;OBJECT FREQ a;OBJECT FREQ x;OBJECT ENCODING x;OBJECT HELP;TOUCH a b x a;MOVE a 0;SWAPDB 0 0;FUNCTION LIST;LATENCY LATEST;SLOWLOG LEN;SLOWLOG x;EXEC",
    "SET b 1;WATCH a;2:RENAME b a;MULTI;PING;EXEC;WATCH b;2:RENAME a b;MULTI;PING;EXEC;WATCH a;2:COPY b a;MULTI;PING;EXEC;WATCH b;2:COPY b a REPLACE;MULTI;PING;EXEC;WATCH c;2:BITOP NOT c a;MULTI;PING;EXEC",
    "WATCH a;2:SETBIT a 1 1;MULTI;PING;EXEC;WATCH a;2:SETBIT a 1 1;2:GETBIT a 1;MULTI;PING;EXEC;WATCH a;2:BITFIELD a SET u8 0 1;MULTI;PING;EXEC;WATCH a;2:BITFIELD a GET u8 0;2:TOUCH a;MULTI;PING;EXEC",
]  # fmt: skip


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story[:40])
def test_the_same_replies(story, both):
    for line in story.split(";"):
        number, line = (1, line[2:]) if line.startswith("2:") else (0, line)
        theirs, ours = (clients[number].call(*words_of(line)) for clients in both)
        theirs, ours = without_numbers(theirs), without_numbers(ours)
        assert type(ours) is type(theirs) and ours == theirs, (line, theirs, ours)


def test_values_are_restored(both):
    for value in (b"x", b"12", b"ab" * 500):
        theirs, ours = [], []
        for clients, replies in zip(both, (theirs, ours)):
            assert clients[0].call("SET", "from", value) == OK
            payload = clients[0].call("DUMP", "from")
            assert clients[0].call("MULTI") == OK
            for words in (["RESTORE", "to", "0", payload], ["GET", "to"], ["RESTORE", "to", "0", payload], ["RESTORE", "to", "0", payload, "REPLACE"], ["RESTORE", "x", "0", payload[:-1]], ["APPEND", "to", "y"], ["DBSIZE"]):
                assert clients[0].call(*words) == QUEUED
            replies.append(clients[0].call("EXEC"))
            replies.append(clients[0].call("GET", "to"))
            assert clients[0].call("DEL", "to", "x") == 1
        assert ours == theirs and ours[1] == value + b"y"


def test_commands_that_take_steps_are_refused_before_they_are_queued(both):
    client = both[1][0]
    assert client.call("MSET", "a", "1", "b", "2") == OK
    for words in (["LCS", "a", "b"], ["DUMP", "a"], ["SLOWLOG", "GET"]):
        assert client.call("MULTI") == OK
        assert client.call(*words) == "ERR this command is not executed inside a transaction: send it before MULTI"
        assert client.call("EXEC").startswith("EXECABORT ")
    assert client.call("MULTI") == OK
    assert client.call("RESTORE", "c", "0", "x" * 70_000).startswith("ERR RESTORE inside a transaction")
    assert client.call("EXEC").startswith("EXECABORT ")
    assert client.call("EXISTS", "c") == 0


def test_reports_of_a_transaction_are_bounded(both):
    client = both[1][0]
    assert client.call("MULTI") == OK
    for words in [["INFO"], ["COMMAND"], ["CLIENT", "LIST"], ["LASTSAVE"]] * 16:
        assert client.call(*words) == QUEUED
    assert client.call("PING") == QUEUED
    assert client.call("MEMORY", "STATS").startswith("ERR at most 64 commands")
    assert client.call("EXEC").startswith("EXECABORT ")
    assert client.call("MULTI") == OK
    for words in [["MEMORY", "STATS"], ["TIME"], ["INFO", "memory"], ["MEMORY", "USAGE", "a"], ["LASTSAVE"], ["PING"]]:
        assert client.call(*words) == QUEUED
    stats, time_of_day, report, usage, saved, pong = client.call("EXEC")
    assert b"keys.count" in stats and len(time_of_day) == 2 and b"used_memory" in report and isinstance(usage, (resp.Null, type(None))) and saved > 0 and pong == b"PONG"


def without_numbers(reply):
    """A reply without the connection's number in that of HELLO."""
    if isinstance(reply, resp.Map):
        return resp.Map((key, value) for key, value in reply.items() if key != b"id")
    if isinstance(reply, list):
        hidden = reply.index(b"id") + 1 if b"id" in reply else None
        return type(reply)(without_numbers(one) for at, one in enumerate(reply) if at != hidden)
    return reply


def test_the_commands_describe_themselves_like_redis(both):
    for name in ("multi", "exec", "discard", "watch", "unwatch"):
        (theirs, ours) = (resp.hashable(clients[0].call("COMMAND", "INFO", name)) for clients in both)
        assert ours == theirs


# Streams in one packet, and cut: with CLIENT REPLY, QUIT, and errors.
STREAMS = [
    "MULTI;SET a 1;INCR a;GET b;EXEC;GET a;WATCH a;MULTI;INCR a;EXEC;ECHO end",
    "MULTI;CLIENT REPLY SKIP;PING a;PING b;EXEC;PING c;PING d",
    "MULTI;PING a;CLIENT REPLY SKIP;EXEC;PING c;PING d",
    "MULTI;PING z;CLIENT REPLY OFF;PING a;EXEC;PING c;CLIENT REPLY ON;PING d",
    "CLIENT REPLY SKIP;MULTI;PING a;EXEC;PING c;PING d",
    "MULTI;PING a;CLIENT REPLY ON;EXEC;PING c",
    "CLIENT REPLY OFF;MULTI;PING a;CLIENT REPLY ON;PING b;EXEC;PING c",
    "CLIENT REPLY OFF;SET s 1;MULTI;INCR s;GET s;NONSENSE;EXEC;MULTI;INCR s;GET s;EXEC;CLIENT REPLY ON;GET s",
    "MULTI;SET a 1;SET b 2;EXEC;MULTI;MSET a 3 c 4;EXEC;SET a 5;MULTI;SET b 6;EXEC;MGET a b c;MULTI;SET a 7;EXEC;MULTI;INCR a;EXEC;GET a",
    "MULTI;SET a 1;EXEC;MULTI;SET a x;NONSENSE;EXEC;MULTI;SET a 2;DISCARD;GET a;MULTI;SET a 3;EXEC;WATCH a;MULTI;SET a 4;EXEC;MULTI;EXEC;GET a",
    "MULTI;SET a 1;EXEC;MULTI;SET a 2;PING;EXEC;MULTI;SET b 3;EXEC;RESET;MULTI;SET c 4;EXEC;APPEND a 5;MULTI;SET a 6;EXEC;MGET a b c",
    "CLIENT REPLY OFF;MULTI;SET a 1;SET b 2;EXEC;MULTI;SET c 3;EXEC;CLIENT REPLY ON;MGET a b c;MULTI;SET a 4;EXEC;CLIENT REPLY SKIP;SET b 5;MGET a b",
    "MULTI;SET q 1;QUIT;PING", "WATCH a;SET a 1;MULTI;GET a;EXEC;ECHO end", "SET w 1;WATCH w;MULTI;INCR w;EXEC;GET w",
]  # fmt: skip


def stream_of(line):
    return b"".join(resp.encode(*words_of(command)) for command in line.split(";")) + resp.encode("QUIT")


def received(client):
    """Everything until the other side closes the connection."""
    return client.until_closed()


@pytest.mark.parametrize("line", STREAMS, ids=lambda line: line[:40])
def test_the_same_bytes_in_one_packet_and_cut_at_every_byte(line, pair):
    answers = []
    stream = stream_of(line)
    for server in pair:
        with server.connect() as client:
            assert client.call("FLUSHALL") == OK
        with server.connect() as client:
            client.send(stream)
            answers.append(received(client))
    assert answers[1] == answers[0]
    for at in range(1, len(stream), 3):
        with pair[1].connect() as client:
            assert client.call("FLUSHALL") == OK
        with pair[1].connect() as client:
            client.send(stream[:at])
            # The first part arrives alone.
            time.sleep(0.0005)
            client.send(stream[at:])
            assert received(client) == answers[0], at


def test_a_transaction_sees_nobody_elses_writes_and_is_seen_as_a_whole(pair):
    """Transfers between accounts by many clients; readers see the sum in one MGET and in one transaction."""
    accounts = [f"account:{n}" for n in range(8)]
    total, ended, wrong = 8 * 100, threading.Event(), []
    with pair[1].connect() as client:
        client.call("FLUSHALL")
        client.call("MSET", *(word for name in accounts for word in (name, "100")))

    def transfers(seed):
        rng = random.Random(seed)
        with pair[1].connect() as client:
            for _ in range(150):
                a, b = rng.sample(accounts, 2)
                if rng.random() < 0.5:
                    amount = str(rng.randrange(1, 9))
                    stream = [["MULTI"], ["DECRBY", a, amount], ["GET", a], ["INCRBY", b, amount], ["EXEC"]]
                    client.send(b"".join(resp.encode(*words) for words in stream))
                    replies = [client.reply() for _ in stream]
                    if replies[4][0] != int(replies[4][1]):
                        wrong.append(replies)
                    continue
                # By hand: read, and write if nobody has written.
                client.call("WATCH", a, b)
                mine, other = int(client.call("GET", a)), int(client.call("GET", b))
                amount = rng.randrange(1, 9)
                client.call("MULTI")
                client.call("SET", a, str(mine - amount))
                client.call("SET", b, str(other + amount))
                client.call("EXEC")

    def readers():
        with pair[1].connect() as client:
            while not ended.is_set():
                client.send(b"".join(resp.encode(*words) for words in [["MULTI"], *(["GET", name] for name in accounts), ["EXEC"]]))
                values = [client.reply() for _ in range(len(accounts) + 2)][-1]
                for values in (values, client.call("MGET", *accounts)):
                    if sum(map(int, values)) != total:
                        wrong.append(values)

    writers = [threading.Thread(target=transfers, args=(seed,)) for seed in range(8)]
    reading = [threading.Thread(target=readers) for _ in range(2)]
    for thread in writers + reading:
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    for thread in reading:
        thread.join()
    assert not wrong
    with pair[1].connect() as client:
        assert sum(map(int, client.call("MGET", *accounts))) == total


def test_increments_that_watch_are_never_lost(pair):
    """Each client reads, adds one by hand, and repeats when the transaction was not executed."""
    with pair[1].connect() as client:
        client.call("FLUSHALL")
    done = []

    def increments():
        with pair[1].connect() as client:
            for _ in range(40):
                while True:
                    client.call("WATCH", "counter")
                    value = client.call("GET", "counter")
                    value = int(value or 0)
                    client.call("MULTI")
                    client.call("SET", "counter", str(value + 1))
                    if not isinstance(client.call("EXEC"), resp.Null):
                        done.append(value)
                        break

    threads = [threading.Thread(target=increments) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(240))
    with pair[1].connect() as client:
        assert client.call("GET", "counter") == b"240"
        report = client.call("INFO", "stats").decode()
        conflicts = int(report.split("transaction_conflicts:")[1].split("\r")[0])
        assert int(report.split("\ntransactions:")[1].split("\r")[0]) >= 240 and conflicts >= 0
        assert "watching_clients:0\r\ntotal_watched_keys:0\r\n" in client.call("INFO", "clients").decode()


def test_a_connection_that_ends_leaves_neither_commands_nor_watches(pair):
    with pair[1].connect() as client:
        for _ in range(20):
            with pair[1].connect() as other:
                assert other.call("WATCH", "a", "b") == OK and other.call("MULTI") == OK
                assert other.call("SET", "a", "x" * 1000) == QUEUED
                report = client.call("INFO", "clients").decode()
                assert "watching_clients:1" in report and "total_watched_keys:2" in report
                assert int(report.split("clients_queued_bytes:")[1].split("\r")[0]) > 1000
                line = next(line for line in client.call("CLIENT", "LIST").decode().splitlines() if "multi=1 " in line)
                assert " flags=x " in line and " cmd=set " in line
            deadline = time.monotonic() + 10
            while "watching_clients:0\r\n" not in client.call("INFO", "clients").decode():
                assert time.monotonic() < deadline
        assert "clients_queued_bytes:0\r\n" in client.call("INFO", "clients").decode()


def test_limits_are_refused_and_the_transaction_is_aborted(tmp_path):
    with millrace.node(tmp_path / "db", tmp_path / "log", "--memory", "64M", writes=True) as node, node.connect() as client:
        assert client.call("WATCH", *(f"key:{n}" for n in range(5000))).startswith("ERR too many watched keys")
        assert client.call("MULTI") == OK
        replies = [client.call("SET", "a", "x" * 500_000) for _ in range(20)]
        assert replies[0] == QUEUED and any(isinstance(reply, resp.Error) and reply.startswith("OOM ") for reply in replies)
        assert client.call("EXEC").startswith("EXECABORT ")
        assert client.call("GET", "a") is None
        assert client.call("SET", "big", "x" * 2_000_000) == OK
        client.call("MULTI")
        for _ in range(10):
            assert client.call("GET", "big") == QUEUED
        assert client.call("EXEC").startswith("EXECABORT Transaction discarded because of: OOM ")
        client.call("MULTI")
        client.call("GET", "big")
        client.call("STRLEN", "big")
        assert client.call("EXEC") == [b"x" * 2_000_000, 2_000_000]
        client.call("MULTI")
        assert client.call("SCAN", "0").startswith("ERR SCAN and RANDOMKEY are not executed inside")
        assert client.call("RANDOMKEY").startswith("ERR SCAN and RANDOMKEY are not executed inside")
        assert client.call("EXEC").startswith("EXECABORT ")


def test_a_node_that_only_reads_executes_reads(tmp_path):
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True) as node, node.connect() as client:
        assert client.call("MSET", "a", "1", "b", "2") == OK
    with millrace.node(tmp_path / "db", tmp_path / "log") as node, node.connect() as client:
        assert client.call("WATCH", "a") == OK and client.call("MULTI") == OK
        for words in (["GET", "a"], ["MGET", "a", "c"], ["EXISTS", "a", "b"], ["DBSIZE"], ["PING"]):
            assert client.call(*words) == QUEUED
        assert client.call("EXEC") == [b"1", [b"1", None], 2, 2, b"PONG"]
        assert client.call("MULTI") == OK
        for words in (["GETBIT", "a", "2"], ["BITCOUNT", "a"], ["BITPOS", "b", "1"], ["BITFIELD_RO", "b", "GET", "u8", "0"], ["OBJECT", "ENCODING", "a"], ["OBJECT", "IDLETIME", "c"], ["TOUCH", "a", "c"]):
            assert client.call(*words) == QUEUED
        assert client.call("EXEC") == [1, 3, 2, [50], b"int", None, 1]
        assert client.call("MULTI") == OK
        assert client.call("SET", "a", "2").startswith("READONLY ")
        assert client.call("EXEC").startswith("EXECABORT ")


def test_a_pause_of_writes_holds_back_exec(pair):
    for server in pair:
        with server.connect() as client, server.connect() as other:
            client.call("DEL", "a")
            assert client.call("MULTI") == OK and client.call("SET", "a", "1") == QUEUED
            assert other.call("CLIENT", "PAUSE", "60000", "WRITE") == OK
            client.send(resp.encode("EXEC"))
            deadline = time.monotonic() + 10
            while b"blocked_clients:1\r\n" not in other.call("INFO", "clients"):
                assert time.monotonic() < deadline
            # A transaction that only reads goes on.
            assert other.call("MULTI") == OK and other.call("GET", "a") == QUEUED and other.call("EXEC") == [None]
            assert other.call("CLIENT", "UNPAUSE") == OK
            assert client.reply() == [OK]


@pytest.mark.parametrize("durability", ["process", "power"])
def test_after_kill_9_a_transaction_is_there_as_a_whole_or_not_at_all(tmp_path, durability):
    """Every transaction moves an amount and notes its number in two keys; acknowledged ones are there after the kill."""
    accounts = [f"account:{n}" for n in range(6)]
    rng = random.Random(7)
    seen = {}
    for run in range(4):
        with millrace.node(tmp_path / "db", tmp_path / "log", "--cores", "2", "--durability", durability, writes=True) as node:
            with node.connect() as client:
                if run == 0:
                    assert client.call("MSET", *(word for name in accounts for word in (name, "100"))) == OK
                assert sum(map(int, client.call("MGET", *accounts))) == 600
                for number in range(4):
                    values = client.call("MGET", f"first:{number}", f"second:{number}")
                    assert values[0] == values[1], values
                    found = int(values[0] or 0)
                    low, high = seen.get(number, (0, 0))
                    assert low <= found <= high, (run, number, values)
                    seen[number] = (found, found)

            def transfers(number, seed):
                rng = random.Random(seed)
                with node.connect() as client:
                    try:
                        while True:
                            a, b = rng.sample(accounts, 2)
                            low, high = seen[number]
                            next_ = str(low + 1)
                            stream = [["MULTI"], ["SET", f"first:{number}", next_], ["DECRBY", a, "7"], ["INCRBY", b, "7"], ["SET", f"second:{number}", next_], ["EXEC"]]
                            if rng.random() < 0.3:
                                # It only sets keys.
                                del stream[2:4]
                            elif rng.random() < 0.1:
                                # The same with a command that concerns all keys.
                                stream.insert(3, ["DBSIZE"])
                            seen[number] = (low, low + 1)
                            client.send(b"".join(resp.encode(*words) for words in stream))
                            replies = [client.reply() for _ in stream]
                            assert isinstance(replies[-1], list), replies
                            seen[number] = (low + 1, low + 1)
                    except (OSError, resp.Closed):
                        pass

            threads = [threading.Thread(target=transfers, args=(number, rng.random())) for number in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.3 + rng.random() / 3)
            for pid in {node.process.pid, millrace.serving(node.process.pid)}:
                millrace.os.kill(pid, signal.SIGKILL)
            for thread in threads:
                thread.join()
    assert all(low > 0 for low, _ in seen.values())
    shutil.rmtree(tmp_path / "db")


def test_a_full_disk_refuses_exec_as_a_whole(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    with SmallDisk(mount) as disk, disk.node(tmp_path / "log", "process") as node, node.connect() as client:
        assert client.call("SET", "counter", "0") == OK
        refused = done = 0
        for number in range(400):
            stream = [["MULTI"], ["INCR", "counter"], ["SET", f"large:{number}", random.randbytes(1_000_000)], ["EXEC"]]
            client.send(b"".join(resp.encode(*words) for words in stream))
            reply = [client.reply() for _ in stream][-1]
            if isinstance(reply, resp.Error):
                assert reply.startswith("EXECABORT Transaction discarded because of: MISCONF ") and "the disk is full" in reply
                refused += 1
                # A watch goes on to work; a transaction that only reads is executed.
                assert client.call("MULTI") == OK and client.call("GET", "counter") == QUEUED and client.call("EXEC") == [b"%d" % done]
            else:
                done += 1
                assert reply == [done, OK]
            assert client.call("EXISTS", f"large:{number}") == int(isinstance(reply, list))
            if isinstance(reply, resp.Error):
                # So is one that only sets keys, as long as the disk is full.
                stream = [["MULTI"], *(["SET", f"{name}:{number}", random.randbytes(16_000)] for name in "abc"), ["EXEC"]]
                client.send(b"".join(resp.encode(*words) for words in stream))
                reply = [client.reply() for _ in stream][-1]
                assert reply == [OK] * 3 or reply.startswith("EXECABORT Transaction discarded because of: MISCONF "), reply
                assert client.call("EXISTS", *(f"{name}:{number}" for name in "abc")) == 3 * isinstance(reply, list)
            if refused == 3:
                break
        assert refused == 3 and int(client.call("GET", "counter")) == done
