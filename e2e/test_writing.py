"""Writing: the same commands to Redis 7.0.15 and to Millrace get the same replies, and written values are kept."""

import random
import re
import shutil
import signal
import subprocess
import threading
import time

import databases
import millrace
import pytest
import redis
import resp

OK = resp.Simple(b"OK")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Redis and a node, both empty and writable."""
    root = tmp_path_factory.mktemp("pair")
    with millrace.redis_server(root, root / "redis.log") as theirs, millrace.node(root / "db", root / "log", "--cores", "2", writes=True) as ours:
        yield theirs, ours


@pytest.fixture(params=[2, 3], ids=["resp2", "resp3"])
def both(request, pair):
    """A connection to each, in RESP2 or RESP3, with both databases empty."""
    theirs, ours = (server.connect() for server in pair)
    with theirs, ours:
        for client in (theirs, ours):
            if request.param == 3:
                assert isinstance(client.call("HELLO", "3"), resp.Map)
            assert client.call("FLUSHALL") == OK
        yield theirs, ours


def same(both, *words):
    """The reply, which must be the same from both."""
    theirs, ours = (client.call(*words) for client in both)
    assert type(ours) is type(theirs) and ours == theirs, (words, theirs, ours)
    return ours


STORIES = [
    "SET a 1;GET a;SET a 2;GET a;SET a '' ;GET a;STRLEN a;DBSIZE",
    "SET a 1 NX;SET a 2 NX;GET a;SET b 1 XX;GET b;SET a 3 XX;GET a;SET a 4 XX GET;SET c 1 GET;SET c 2 NX GET;GET c;set a 5 get xx;SET d 1 KEEPTTL",
    "SET a;SET;SET a 1 NX XX;SET a 1 NONSENSE;SET a 1 EX;SET a 1 KEEPTTL EX 5;SET a 1 EX 5 KEEPTTL;SET a 1 EX 0;SET a 1 PX -5;SET a 1 EX x;SET a 1 EX 5 PX 5;GET a",
    "SETNX a 1;SETNX a 2;GET a;SETNX a;SETNX a 1 2",
    "MSET a 1 b 2 c 3;MGET a b c d;MSET a 1 a 2;GET a;MSET a;MSET a 1 b;DBSIZE;MSETNX d 1 e 2;MSETNX e 3 f 4;MGET d e f;MSETNX g 1 g 2;GET g;MSETNX g;MSETNX g 1 h;DBSIZE",
    "MSET a 1 b 2 c 3;DEL a x b a;DBSIZE;DEL a;DEL;UNLINK c c;UNLINK;DBSIZE;GET c",
    "APPEND a x;APPEND a '';APPEND a yz;GET a;APPEND b '';EXISTS b;APPEND a;DBSIZE",
    "SETRANGE a 3 x;GET a;SETRANGE a 0 '';SETRANGE b 5 '';EXISTS b;SETRANGE a 1 yy;GET a;SETRANGE a -1 x;SETRANGE a x x;SETRANGE a 536870911 xy;SETRANGE a 536870912 x;SETRANGE a 9223372036854775807 x;SETRANGE a 9223372036854775808 x;SETRANGE a 1",
    "INCR a;INCR a;DECR a;INCRBY a 10;DECRBY a 3;GET a;INCRBY a -100;INCRBY a x;INCRBY a 1.5;INCRBY a 9223372036854775808;DECRBY a x;INCR;INCR a b;DECRBY a;GET a",
    "SET a 9223372036854775807;INCR a;INCRBY a 1;DECR a;SET b -9223372036854775808;DECR b;DECRBY b 1;DECRBY b -9223372036854775808;INCRBY b -1;GET a;GET b",
    "SET a x;INCR a;SET a ' 1';INCR a;SET a 1.0;INCR a;SET a '';INCR a;SET a 01;INCR a;SET a +1;INCR a;SET a -0;INCR a;GET a",
    "INCRBYFLOAT a 10.5;INCRBYFLOAT a 0.1;GET a;INCRBYFLOAT a -5;INCRBYFLOAT a 5.0e3;SET a 5.0e3;INCRBYFLOAT a 2.0e2;SET a x;INCRBYFLOAT a 1;SET a 1;INCRBYFLOAT a x;INCRBYFLOAT a nan;INCRBYFLOAT a inf;INCRBYFLOAT a -inf;INCRBYFLOAT a ' 1';INCRBYFLOAT a 1e400;INCRBYFLOAT a;GET a;STRLEN a",
    "SET a inf;INCRBYFLOAT a 1;SET a 0x1p3;INCRBYFLOAT a 0xf;SET a '1 ';INCRBYFLOAT a 1;SET a 1e-19;INCRBYFLOAT a 0;GET a;SET a -0.0;INCRBYFLOAT a 0;INCRBYFLOAT a -0",
    "GETSET a 1;GETSET a 2;GET a;GETSET a;GETDEL a;GETDEL a;GETDEL;GETDEL a b;EXISTS a;DBSIZE",
    "MSET a 1 b 2;FLUSHDB;DBSIZE;GET a;SET a 3;FLUSHALL ASYNC;FLUSHDB SYNC;FLUSHDB NONSENSE;FLUSHALL SYNC x;DBSIZE;SET a 1;DBSIZE;GET a",
    "SAVE;SAVE x;BGSAVE x;LASTSAVE x;SHUTDOWN NONSENSE;SHUTDOWN SAVE NOSAVE;SHUTDOWN ABORT;SHUTDOWN ABORT NOW;CONFIG REWRITE;CONFIG SET;CONFIG SET a;CONFIG SET nonsense 1;CONFIG SET databases 3;CONFIG SET databases 3 nonsense 1;CONFIG SET save '' save '';CONFIG SET a b c;CONFIG SET appendonly",
    "SET '' empty;GET '';APPEND '' x;DEL '';DBSIZE",
    "HELLO 3 SETNAME;CLIENT REPLY NONSENSE;SELECT 0;SET a 1;HSET a f v x;NONSENSE",
]  # fmt: skip


def words_of(line):
    import shlex

    return shlex.split(line.strip())


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story[:30])
def test_sequential_commands_get_the_same_replies(story, both):
    for line in story.split(";"):
        if line.startswith("HSET"):
            continue
        same(both, *words_of(line))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story[:30])
def test_pipelined_commands_get_the_same_replies(story, both):
    requests = [words_of(line) for line in story.split(";") if not line.startswith("HSET")]
    theirs, ours = (client.pipeline(requests) for client in both)
    assert ours == theirs and list(map(type, ours)) == list(map(type, theirs))


WORDS = ["", "0", "-1", "1", "x", "1.5", " 1", "+1", "01", "-0", "0x1", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "9" * 30, "a\0b", "é", "1e3", "inf", "nan", "-"]
OPTIONS = ["NX", "xx", "Get", "KEEPTTL", "EX", "px", "ASYNC"]
COMMANDS = "SET SETNX MSET MSETNX DEL UNLINK APPEND SETRANGE INCR DECR INCRBY DECRBY INCRBYFLOAT GETSET GETDEL FLUSHDB FLUSHALL LASTSAVE".split()


def expires(words):
    """Whether it is a `SET` with a valid expiry: the documented difference."""
    rest = words[3:]
    options = [word.upper() for word in rest]
    return words[0].upper() == "SET" and any(word in ("EX", "PX") and options[at + 1 : at + 2] for at, word in enumerate(options))


@pytest.mark.parametrize("command", COMMANDS)
def test_odd_arguments_get_the_same_reply(command, pair):
    requests = [[command], [command.lower()]]
    for a in WORDS + OPTIONS:
        requests += [[command, a], [command, "k", a], [command, a, "1"], [command, "k", "1", a], [command, "k", a, "x", "y"]]
        requests += [[command, "k", "1", a, b] for b in WORDS + OPTIONS]
        requests += [[command, "n", a, b] for b in WORDS]
    requests = [words for words in requests if not expires(words) and words != ["LASTSAVE"] and words != ["lastsave"]]
    theirs, ours = (server.connect() for server in pair)
    with theirs, ours:
        replies = [client.pipeline([["FLUSHALL"], *requests]) for client in (theirs, ours)]
        different = [row for row in zip([["FLUSHALL"], *requests], *replies) if type(row[1]) is not type(row[2]) or row[1] != row[2]]
        assert not different, f"{len(different)}: {different[:5]}"
        assert sorted(theirs.call("KEYS", "*")) == sorted(ours.call("KEYS", "*"))


def random_commands(rng, count):
    """Commands on few keys, many of which change the results of others."""
    requests = []
    for _ in range(count):
        key = f"k{rng.randrange(12)}"
        value = rng.choice(["", "x", str(rng.randrange(-1000, 1000)), "y" * rng.randrange(3000), f"{rng.uniform(-50, 50):.{rng.randrange(9)}f}"])
        number = str(rng.randrange(-100, 100))
        small = f"{rng.uniform(-9, 9):.{rng.randrange(1, 18)}f}"
        requests.append(
            rng.choice(
                [
                    ["SET", key, value], ["SET", key, number], ["SET", key, value, "NX"], ["SET", key, value, "XX", "GET"], ["SETNX", key, value],
                    ["GET", key], ["GET", key], ["MGET", key, "k1", "k2"], ["STRLEN", key], ["EXISTS", key, "k3"], ["GETRANGE", key, 1, 5],
                    ["MSET", key, value, "k4", number], ["MSETNX", key, value, "k5", number], ["DEL", key], ["DEL", key, "k6", key], ["UNLINK", key],
                    ["APPEND", key, value[:20]], ["SETRANGE", key, rng.randrange(60), value[:9]], ["INCR", key], ["DECRBY", key, number], ["INCRBYFLOAT", key, small],
                    ["GETSET", key, number], ["GETDEL", key], ["DBSIZE"], ["TYPE", key], ["INCRBYFLOAT", key, number],
                ]
            )
        )  # fmt: skip
    return requests


@pytest.mark.parametrize("seed", range(3))
def test_random_commands_in_pipelines_get_the_same_replies(seed, both, long):
    rng = random.Random(seed)
    theirs, ours = both
    for _ in range(20 if long else 3):
        requests = random_commands(rng, 1500)
        window = rng.choice([1, 7, 100, 1500])
        replies = [client.pipeline(requests, window) for client in both]
        for words, a, b in zip(requests, *replies):
            assert a == b and type(a) is type(b), (seed, words, a, b)
        keys = sorted(theirs.call("KEYS", "*"))
        assert sorted(ours.call("KEYS", "*")) == keys
        assert ours.call("MGET", *keys, "none") == theirs.call("MGET", *keys, "none")


def test_increments_of_many_connections_are_all_counted(pair):
    ours = pair[1]
    with ours.connect() as client:
        client.call("DEL", "n", "list")

    def add(letter):
        with ours.connect() as client:
            client.pipeline([["INCR", "n"], ["APPEND", "list", letter]] * 500, 50)

    threads = [threading.Thread(target=add, args=[letter]) for letter in "abcdefgh"]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with ours.connect() as client:
        assert client.call("GET", "n") == b"4000"
        text = client.call("GET", "list")
        assert all(text.count(letter) == 500 for letter in b"abcdefgh")


def test_a_connection_may_be_silent(pair):
    with pair[1].connect() as client:
        client.send(resp.encode("CLIENT", "REPLY", "OFF") + resp.encode("SET", "s", "1") + resp.encode("INCR", "s") + resp.encode("CLIENT", "REPLY", "ON"))
        assert client.reply() == OK
        client.send(resp.encode("CLIENT", "REPLY", "SKIP") + resp.encode("INCR", "s") + resp.encode("INCR", "s"))
        assert client.reply() == 4
        assert client.call("GET", "s") == b"4"


@pytest.mark.parametrize("sent", ["SKIP;RESET", "OFF;RESET", "OFF;SKIP;RESET", "SKIP;OFF;RESET", "SKIP;ON", "SKIP;NONSENSE", "SKIP;RESET;NONSENSE"])
def test_a_reset_is_silent_where_that_of_redis_is(sent, pair):
    said = []
    for server in pair:
        with server.connect() as client:
            for word in sent.split(";"):
                client.send(resp.encode(*(["CLIENT", "REPLY", word] if word in ("ON", "OFF", "SKIP") else [word])))
            client.send(resp.encode("QUIT"))
            said.append(client.until_closed())
    assert said[1] == said[0]


def test_commands_are_described_as_redis_describes_them(pair):
    names = COMMANDS + ["AUTH", "SAVE", "BGSAVE", "SHUTDOWN", "CONFIG|SET", "CONFIG|REWRITE"]
    theirs, ours = (server.connect() for server in pair)
    with theirs, ours:
        for name in names:
            a, b = (client.call("COMMAND", "INFO", name)[0] for client in (theirs, ours))
            assert b[:2] == a[:2] and sorted(b[2]) == sorted(a[2]) and b[3:6] == a[3:6] and sorted(b[6]) == sorted(a[6]) and b[7] == a[7], (name, a, b)
        for words in (["SET", "k", "v"], ["MSET", "a", 1, "b", 2], ["DEL", "a", "b"], ["GETDEL", "a"], ["SETRANGE", "a", 1, "x"]):
            assert ours.call("COMMAND", "GETKEYS", *words) == theirs.call("COMMAND", "GETKEYS", *words)


def command_stats(client):
    """Calls, refusals and failures of each command that was called or refused."""
    stats = {}
    for line in client.call("INFO", "commandstats").decode().splitlines():
        if line.startswith("cmdstat_"):
            name, values = line.split(":")
            fields = dict(field.split("=") for field in values.split(","))
            assert list(fields) == ["calls", "usec", "usec_per_call", "rejected_calls", "failed_calls"], line
            stats[name] = [int(fields[name]) for name in ("calls", "rejected_calls", "failed_calls")]
    return stats


def figure(client, section, name):
    return int(re.search(rf"(?m)^{name}:(\d+)", client.call("INFO", section).decode())[1])


def test_refused_commands_are_not_counted_as_processed(pair):
    """Refused are unknown commands, too few arguments, and a missing password; a command that fails was executed."""
    grown = []
    for server in pair:
        with server.connect() as client, server.connect() as other:
            assert client.call("SET", "a", "text") == OK
            rows = []
            for line in "PING;NONSENSE;GET;GET a b;CLIENT NONSENSE;CLIENT;SET a b NONSENSE;INCR a;CLIENT CACHING YES;CLIENT CACHING;EXEC;DISCARD;MULTI".split(";"):
                before = figure(client, "stats", "total_commands_processed")
                other.call(*line.split())
                if line == "MULTI":
                    other.call("DISCARD")
                # Redis counts a call when it ends, Millrace when it is accepted: the previous INFO, or this one.
                rows.append((line, figure(client, "stats", "total_commands_processed") - before - 1))
            assert client.call("CONFIG", "SET", "requirepass", "secret") == OK
            try:
                with server.connect() as stranger:
                    before = figure(client, "stats", "total_commands_processed")
                    assert stranger.call("GET", "a").startswith("NOAUTH ")
                    assert stranger.call("AUTH", "wrong").startswith("WRONGPASS ")
                    rows.append(("stranger", figure(client, "stats", "total_commands_processed") - before - 1))
            finally:
                assert client.call("CONFIG", "SET", "requirepass", "") == OK
            grown.append(rows)
    assert grown[1] == grown[0]


def test_command_stats_count_what_redis_counts(pair):
    counted = []
    for server in pair:
        with server.connect() as client:
            assert client.call("FLUSHALL") == OK and client.call("CONFIG", "RESETSTAT") == OK
            for line in (
                "GET a;GET;GET a b;SET a x;SET a;SET a x y;INCR a;INCR n;INCR n;INCRBY n x;MSET a 1;MSET a 1 b;MSET a 1 b 2;NONSENSE;CLIENT NONSENSE;CLIENT;"
                "CLIENT REPLY x;CLIENT KILL 1.2.3.4:5;CONFIG SET nosuch 1;CONFIG GET x;APPEND a b;EXISTS a a;PTTL a;TTL a;SUBSTR a 0 1;GETRANGE a x 1;SETNX a 1;SELECT 99;PING a b;"
                "CLIENT REPLY ON;SAVE;LASTSAVE x;SETRANGE a -1 x;GETDEL a;ECHO;SET b y;SET b y;MSET c 1;UNLINK b"
            ).split(";"):
                client.call(*line.split())
            client.send(resp.encode("CLIENT", "REPLY", "SKIP") + resp.encode("INCR", "n") + resp.encode("CLIENT", "REPLY", "OFF"))
            client.send(resp.encode("SET", "n", "x") + resp.encode("INCR", "n") + resp.encode("INCRBY", "n", "y") + resp.encode("CLIENT", "REPLY", "ON"))
            assert client.reply() == OK
            stats = command_stats(client)
            # Redis counts a call when it ends, Millrace when it starts.
            stats.pop("cmdstat_info", None)
            stats.pop("cmdstat_config|resetstat", None)
            counted.append(stats)
    assert counted[1] == counted[0]


def test_a_connection_delayed_by_a_pause_counts_as_blocked(pair):
    for server in pair:
        with server.connect() as client, server.connect() as held:
            assert b"\r\nblocked_clients:0\r\n" in client.call("INFO", "clients")
            assert client.call("CLIENT", "PAUSE", "60000", "WRITE") == OK
            held.send(resp.encode("SET", "a", "1"))
            deadline = time.monotonic() + 20
            while b"\r\nblocked_clients:1\r\n" not in client.call("INFO", "clients"):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            assert client.call("CLIENT", "UNPAUSE") == OK and held.reply() == OK
            assert b"\r\nblocked_clients:0\r\n" in client.call("INFO", "clients")


@pytest.mark.parametrize("sent", [b"client list\r\n", resp.encode("CLIENT", "INFO"), resp.encode("PING") + resp.encode("CLIENT", "INFO") + resp.encode("ECHO", "x" * 1000)])
def test_a_connection_s_buffered_bytes_are_reported(pair, sent):
    said = []
    for server in pair:
        with server.connect() as client:
            client.send(sent)
            reply = client.reply()
            line = reply if reply != b"PONG" else client.reply()
            # This connection is the last one.
            fields = dict(field.split(b"=", 1) for field in line.splitlines()[-1].split())
            said.append((fields[b"qbuf"], fields[b"cmd"], fields[b"resp"]))
    assert said[1] == said[0]


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_works(protocol, pair):
    client = redis.Redis(port=pair[1].port, protocol=protocol)
    client.flushdb()
    assert client.set("a", 1) and client.get("a") == b"1" and client.set("a", 2, nx=True) is None and client.set("a", 2, get=True) == b"1"
    assert client.incr("a") == 3 and client.decr("a", 2) == 1 and client.incrbyfloat("f", 0.5) == 0.5
    assert client.append("s", "xyz") == 3 and client.setrange("s", 1, "--") == 3 and client.get("s") == b"x--"
    assert client.mset({"m1": "1", "m2": "2"}) and client.msetnx({"m2": "x", "m3": "y"}) is False
    assert client.delete("m1", "m9") == 1 and client.unlink("m2") == 1 and client.getdel("s") == b"x--" and client.getset("a", "z") == b"1"
    with client.pipeline(transaction=False) as pipe:
        for n in range(1000):
            pipe.incr("n")
        assert pipe.execute() == list(range(1, 1001))
    assert client.dbsize() == 3 and client.info("keyspace")["db0"]["keys"] == 3
    assert client.save() and client.bgsave() and client.lastsave().timestamp() > time.time() - 100
    assert client.info("persistence")["aof_last_write_status"] == "ok"
    with pytest.raises(redis.exceptions.ResponseError):
        client.incr("a")
    assert client.set("a", 1, ex=10) and 0 < client.ttl("a") <= 10
    assert client.flushall() and client.dbsize() == 0
    client.close()


def test_redis_cli_and_redis_benchmark_work(pair):
    port = str(pair[1].port)
    assert databases.run("redis-cli", "-p", port, "SET", "hello", "world").strip() == "OK"
    assert databases.run("redis-cli", "-p", port, "-x", "SET", "stdin", text="of the shell\n").strip() == "OK"
    assert databases.run("redis-cli", "-p", port, "GET", "stdin").strip() == "of the shell"
    load = "".join(f"SET bulk:{n} {n}\r\n" for n in range(2000))
    assert "errors: 0, replies: 2000" in databases.run("redis-cli", "-p", port, "--pipe", text=load)
    said = databases.run("redis-benchmark", "-p", port, "-t", "set,get,incr,mset", "-n", "3000", "-P", "16", "-c", "20", "-r", "1000", "-d", "300", "-q")
    assert said.count("requests per second") == 4 and "rror" not in said, said


def test_a_large_value_is_kept(pair):
    value = random.Random(1).randbytes(5 << 20)
    with pair[1].connect() as client:
        assert client.call("SET", "large", value) == OK
        assert client.call("GET", "large") == value
        assert client.call("APPEND", "large", b"!") == len(value) + 1
        assert client.call("GETDEL", "large") == value + b"!"


@pytest.mark.parametrize("durability", ["process", "power"])
def test_acknowledged_writes_survive_a_stop_and_a_kill(durability, tmp_path):
    data, log = tmp_path / "db", tmp_path / "log"
    expected = {}
    for round in range(3):
        with millrace.node(data, log, "--durability", durability, "--cores", "2", writes=True) as node:
            with node.connect() as client:
                keys = sorted(expected)
                assert client.call("MGET", *keys, "none") == [*(expected[key] for key in keys), None]
                if round == 0:
                    assert client.call("DBSIZE") == 0
                for n in range(300):
                    key, value = f"key:{n * (round + 1)}".encode(), f"{round}:{n}".encode() * 20
                    expected[key] = value
                replies = client.pipeline([["SET", key, value] for key, value in expected.items()])
                assert replies == [OK] * len(expected)
                assert client.call("DEL", "key:7") == (1 if b"key:7" in expected else 0)
                expected.pop(b"key:7", None)
            if round < 2:
                node.process.send_signal([signal.SIGKILL, signal.SIGTERM][round])
                node.process.wait(10)
    assert dict(millrace.scan(data)) == expected
    assert {line.split(" : ")[0]: line.split(" : ")[1] for line in databases.ldb(data, "scan").splitlines()} == {k.decode(): v.decode() for k, v in expected.items()}
    databases.ldb(data, "put", "theirs", "1")
    with millrace.node(data, log, writes=True) as node, node.connect() as client:
        assert client.call("INCR", "theirs") == 2
    assert databases.ldb(data, "get", "theirs").strip() == "2"


def test_writes_in_flight_at_a_stop_are_answered(tmp_path):
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True) as node, node.connect() as client:
        client.send(b"".join(resp.encode("INCR", "n") for _ in range(20000)))
        assert client.reply() == 1
        node.process.terminate()
        answered, last = 1, b""
        while (rest := client.until_closed()) != last:
            last = rest
        answered += last.count(b":")
        assert node.process.wait(10) == 0
    assert int(millrace.succeed("kv", "get", "n", "--data", tmp_path / "db")) >= answered


def test_shutdown_ends_the_node(tmp_path):
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True) as node, node.connect() as client:
        client.send(resp.encode("SET", "a", "1") + resp.encode("SHUTDOWN"))
        assert client.until_closed() == b"+OK\r\n"
        assert node.process.wait(10) == 0
    assert millrace.succeed("kv", "get", "a", "--data", tmp_path / "db").strip() == "1"


def test_a_writing_node_locks_out_others(tmp_path):
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True):
        for more in ([], ["--read-only"]):
            said = millrace.fail("serve", "--data", tmp_path / "db", "--listen", f"127.0.0.1:{millrace.free_port()}", *more)
            assert "open for writing" in said, said


def test_the_password_is_required_as_by_redis(tmp_path):
    (tmp_path / "password").write_text("secret\n")
    ours = millrace.node(tmp_path / "db", tmp_path / "log", "--password-file", tmp_path / "password", "--cores", "2", writes=True)
    theirs = millrace.redis_server(tmp_path, tmp_path / "redis.log", "--requirepass", "secret")
    for server in (ours, theirs):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                # A connection made before the node serves may be closed.
                with server.connect() as client:
                    client.call("PING")
                break
            except (OSError, EOFError):
                time.sleep(0.01)
    try:
        before = "GET a;SET a 1;SET a;PING;NONSENSE;HELLO;HELLO 3;HELLO 9;HELLO 3 AUTH default x;AUTH x;AUTH;AUTH a b c;AUTH nobody secret;AUTH default x;RESET;CONFIG GET requirepass;HSET a b c"
        after = "SET a 1;GET a;CONFIG GET requirepass;RESET;GET a;HELLO 2 AUTH default secret SETNAME me;CLIENT GETNAME;GET a"
        a, b = server_a, server_b = theirs.connect(), ours.connect()
        with server_a, server_b:
            for line in before.split(";") + ["AUTH secret"] + after.split(";"):
                if line.startswith("HELLO 2"):
                    replies = [client.call(*words_of(line)) for client in (a, b)]
                    assert [type(reply) for reply in replies] == [list, list]
                elif not line.startswith("HSET"):
                    same((a, b), *words_of(line))
            same((a, b), "CONFIG", "SET", "requirepass", "other")
            same((a, b), "GET", "a")
            for other in (theirs.connect(), ours.connect()):
                with other:
                    assert other.call("AUTH", "secret").startswith("WRONGPASS") and other.call("AUTH", "other") == OK
            same((a, b), "CONFIG", "SET", "requirepass", "")
            for _ in range(8):
                with ours.connect() as other:
                    assert other.call("GET", "a") == b"1", "on every core"
    finally:
        ours.stop()
        theirs.stop()


def test_other_machines_are_admitted_only_with_a_password(tmp_path):
    port = millrace.free_port()
    said = millrace.fail("serve", "--data", tmp_path / "db", "--listen", f"0.0.0.0:{port}")
    assert "no password" in said and "--password-file" in said, said
    assert not (tmp_path / "db").exists()
    (tmp_path / "empty").write_text("\n")
    assert "empty" in millrace.fail("serve", "--data", tmp_path / "db", "--password-file", tmp_path / "empty")


def test_an_older_rocksdb_s_database_is_adopted_only_on_request(tmp_path):
    data = tmp_path / "db"
    databases.ldb(data, "put", "hello", "world", "--create_if_missing")
    newest = max(data.glob("OPTIONS-*"))
    newest.write_text(newest.read_text().replace("rocksdb_version=7.8.3", "rocksdb_version=6.11.4"))
    before = sorted(path.name for path in data.iterdir())
    said = millrace.fail("serve", "--data", data, "--listen", f"127.0.0.1:{millrace.free_port()}")
    assert "6.11.4" in said and "7.8" in said and "--adopt" in said, said
    assert sorted(path.name for path in data.iterdir()) == before, "the directory is unchanged"
    with millrace.node(data, tmp_path / "log"):
        pass
    for more in (["--adopt"], []):
        with millrace.node(data, tmp_path / "log", *more, writes=True) as node, node.connect() as client:
            assert client.call("APPEND", "hello", "!") > 5
    assert databases.ldb(data, "get", "hello").strip() == "world!!"


def test_an_estimate_does_not_become_exact_by_writing(tmp_path):
    databases.ldb(tmp_path / "db", "put", "hello", "world", "--create_if_missing")
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True) as node, node.connect() as client:
        assert client.call("SET", "hello", "you") == OK and client.call("DEL", "hello", "nobody") == 1
        assert client.call("EXISTS", "hello") == 0 and 0 <= client.call("DBSIZE") <= 3


def test_a_full_disk_stops_only_writes(tmp_path):
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", mount], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system of its own: {done.stderr}")
    try:
        with millrace.node(mount / "db", tmp_path / "log", "--durability", "process", "--memory", "64M", writes=True) as node, node.connect() as client:
            assert client.call("SET", "first", "1") == OK
            replies = client.pipeline([["SET", f"k{n}", b"x" * 50000] for n in range(2000)], 50)
            refused = [reply for reply in replies if reply != OK]
            assert refused and all(reply.startswith("MISCONF ") for reply in refused), refused[:3]
            assert client.call("GET", "first") == b"1" and node.alive()
            assert b"aof_last_write_status:err" in client.call("INFO", "persistence")
    finally:
        shutil.rmtree(image, ignore_errors=True)
        subprocess.run(["umount", mount], check=True)


def test_a_connection_made_while_the_database_opens_is_answered(tmp_path):
    """It waits, as for any busy server; it is never accepted and then closed."""
    data = tmp_path / "db"
    with millrace.node(data, tmp_path / "log", "--durability", "process", writes=True) as node, node.connect() as client:
        # A log to replay at the next start.
        for nth in range(40):
            assert client.call("MSET", *[word for n in range(50) for word in (f"key:{nth}:{n}", b"x" * 10_000)]) == b"OK"
        node.process.kill()
        node.process.wait()
    # On a busy machine the database may be open before this process runs again.
    assert any(connects_early(tmp_path, data) for _ in range(5)), "the connection was never early enough"


def connects_early(tmp_path, data):
    """Connects to a node as soon as it listens; returns whether its database was not open yet."""
    copy, text = tmp_path / "copy", tmp_path / "log2"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(data, copy)
    port = millrace.free_port()
    again = [millrace.BINARY, "serve", "--data", copy, "--listen", f"127.0.0.1:{port}", "--cores", "1", "--memory", "256M"]
    with open(text, "wb") as log:
        process = subprocess.Popen(again, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                first = resp.Connection(port, 20)
                break
            except ConnectionRefusedError:
                assert process.poll() is None and time.monotonic() < deadline, text.read_text()
        with first:
            early = " keys, " not in text.read_text()
            assert first.call("GET", "key:39:49") == b"x" * 10_000
            return early
    finally:
        process.kill()
        process.wait()
