"""Sends the same commands to Redis 7.0.15 and to Millrace with the same keys: replies and error texts must be equal."""

import random
import re

import databases
import millrace
import pytest
import redis
import resp

KEYS = {
    b"hello": b"world",
    b"empty": b"",
    b"number": b"10",
    b"binary\0\xff": bytes(range(256)),
    b"a" * 200: b"long key",
    b"long": b"0123456789" * 5000,
    b"user:1": b"one",
    b"user:2": b"two",
    b"user:30": b"thirty",
    b"[x]": b"brackets",
    b"st*r": b"star",
    "grüße".encode(): "wärme".encode(),
} | {b"key:%04d" % n: b"value %d" % n for n in range(700)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Redis and a node with the same keys."""
    root = tmp_path_factory.mktemp("pair")
    db = databases.open_rocks(root / "db", **databases.SMALL_BLOCKS)
    for key, value in KEYS.items():
        db[key] = value
    db.flush()
    db.close()
    with millrace.redis_server(root, root / "redis.log") as theirs, millrace.node(root / "db", root / "log") as ours:
        with theirs.connect() as client:
            client.pipeline([("SET", key, value) for key, value in KEYS.items()])
        yield theirs, ours


@pytest.fixture(params=[2, 3], ids=["resp2", "resp3"])
def both(request, pair):
    """A connection to each, in RESP2 or RESP3."""
    theirs, ours = (server.connect() for server in pair)
    with theirs, ours:
        if request.param == 3:
            for client in (theirs, ours):
                assert isinstance(client.call("HELLO", "3"), resp.Map)
        yield theirs, ours


def ask(*words):
    return pytest.param(words, id=" ".join(str(w)[:24] for w in words) or "nothing")


SAME = [
    ["PING"], ["ping"], ["PING", "back"], ["PING", ""], ["PING", "a", "b"], ["ECHO", "x"], ["ECHO", b"\0\r\n"], ["ECHO"], ["ECHO", "a", "b"],
    ["GET", "hello"], ["get", "hello"], ["GET", "empty"], ["GET", "missing"], ["GET", b"binary\0\xff"], ["GET", "long"], ["GET", ""],
    ["GET"], ["GET", "a", "b"],
    ["MGET", "hello"], ["MGET", "hello", "missing", "empty", "hello"], ["MGET"], ["MGET", *(f"key:{n:04}" for n in range(0, 900, 3))],
    ["EXISTS", "hello"], ["EXISTS", "hello", "hello", "missing"], ["EXISTS", "missing"], ["EXISTS"],
    ["STRLEN", "hello"], ["STRLEN", "missing"], ["STRLEN", "empty"], ["STRLEN", "long"], ["STRLEN"], ["STRLEN", "a", "b"],
    ["GETRANGE", "hello", 0, -1], ["GETRANGE", "hello", 1, 2], ["GETRANGE", "hello", -3, -1], ["GETRANGE", "hello", 3, 1],
    ["GETRANGE", "hello", -100, 100], ["GETRANGE", "hello", 9, 12], ["GETRANGE", "hello", -2, -4], ["GETRANGE", "hello", 0, -100],
    ["GETRANGE", "hello", -100, -100], ["GETRANGE", "missing", 0, -1], ["GETRANGE", "empty", 0, -1], ["GETRANGE", "empty", -1, 0],
    ["GETRANGE", "long", 4990, 5010], ["GETRANGE", "hello", "a", 1], ["GETRANGE", "hello", 0, "b"], ["GETRANGE", "hello", 0],
    ["GETRANGE", "hello", 0, 9223372036854775807], ["GETRANGE", "hello", 0, 9223372036854775808], ["GETRANGE", "hello", "1.5", 2],
    ["GETRANGE", "hello", -9223372036854775808, -1], ["GETRANGE", "hello", " 1", 2], ["GETRANGE", "hello", "+1", 2], ["GETRANGE", "hello", "01", 2],
    ["SUBSTR", "hello", 1, 3],
    ["TYPE", "hello"], ["TYPE", "missing"], ["TYPE"], ["TYPE", "a", "b"],
    ["TOUCH", "hello", "missing", "hello"], ["TOUCH"],
    ["GETBIT", "hello", 0], ["GETBIT", "hello", 1], ["GETBIT", "hello", 999], ["GETBIT", "missing", 7], ["GETBIT", "hello", -1], ["GETBIT", "hello", "x"], ["GETBIT", "hello", 4294967296],
    ["BITCOUNT", "hello"], ["BITCOUNT", "missing"], ["BITCOUNT", "long"], ["BITCOUNT", "hello", 1, 2], ["BITCOUNT", "hello", -2, -1], ["BITCOUNT", "hello", 3, 17, "BIT"],
    ["BITCOUNT", "hello", 1], ["BITCOUNT", "missing", 1], ["BITCOUNT", "hello", "a", 1], ["BITCOUNT", "missing", "a", 1], ["BITCOUNT", "hello", 0, 1, "x"], ["BITCOUNT", "hello", -1, -2, "x"],
    ["BITCOUNT", "empty", 0, -1], ["BITCOUNT", "long", -7, -1, "bit"], ["BITCOUNT", "hello", 0, 1, "bit", "x"], ["BITCOUNT"],
    ["BITPOS", "hello", 1], ["BITPOS", "hello", 0], ["BITPOS", "missing", 0], ["BITPOS", "missing", 1], ["BITPOS", "empty", 0], ["BITPOS", "hello", 1, 2], ["BITPOS", "hello", 0, 1, 2],
    ["BITPOS", "hello", 1, 9, 17, "BIT"], ["BITPOS", "hello", 0, -3, -1, "BIT"], ["BITPOS", "hello", 2], ["BITPOS", "missing", "x"], ["BITPOS", "hello", 1, "x"], ["BITPOS", "missing", 1, "x"],
    ["BITPOS", "hello", 1, 0, 1, "x"], ["BITPOS", "hello", 1, 0, "y", "bit"], ["BITPOS", b"binary\0\xff", 0, -1], ["BITPOS", b"binary\0\xff", 0, -1, -1], ["BITPOS", "hello"],
    ["BITFIELD_RO", "hello", "GET", "u8", 0, "GET", "i5", 3], ["BITFIELD_RO", "missing", "GET", "i64", 7], ["BITFIELD_RO", "hello"], ["BITFIELD_RO", "hello", "GET", "u64", 0],
    ["BITFIELD_RO", "hello", "SET", "u8", 0, 1], ["BITFIELD_RO", "hello", "GET", "u8", "#2"], ["BITFIELD_RO", "hello", "GET", "u8", "-1"], ["BITFIELD_RO", "hello", "OVERFLOW", "x"],
    ["LCS", "hello", "long"], ["LCS", "hello", "missing"], ["LCS", "user:1", "user:2", "IDX"], ["LCS", "key:0123", "key:0213", "IDX", "WITHMATCHLEN", "MINMATCHLEN", 2], ["LCS", "key:0123", "key:0213", "LEN"],
    ["LCS", "key:0123", "key:0213"], ["LCS", "hello", "hello", "LEN", "IDX"], ["LCS", "hello", "hello", "x"], ["LCS", "hello", "hello", "MINMATCHLEN", "x"], ["LCS", "hello"],
    ["DUMP", "hello"], ["DUMP", "number"], ["DUMP", "empty"], ["DUMP", "missing"], ["DUMP"],
    ["OBJECT", "ENCODING", "hello"], ["OBJECT", "ENCODING", "number"], ["OBJECT", "ENCODING", "long"], ["OBJECT", "ENCODING", "missing"], ["OBJECT", "REFCOUNT", "hello"], ["OBJECT", "REFCOUNT", "number"],
    ["OBJECT", "FREQ", "hello"], ["OBJECT", "FREQ", "missing"], ["OBJECT", "IDLETIME", "missing"], ["OBJECT", "NONSENSE", "hello"], ["OBJECT"], ["OBJECT", "ENCODING"],
    ["MEMORY", "USAGE", "missing"], ["MEMORY", "USAGE", "missing", "SAMPLES", "x"], ["MEMORY", "USAGE", "hello", "SAMPLES", -1], ["MEMORY", "USAGE", "hello", "x"], ["MEMORY", "PURGE"], ["MEMORY", "NONSENSE"], ["MEMORY"],
    ["FUNCTION", "LIST"], ["FUNCTION", "LIST", "WITHCODE", "LIBRARYNAME", "x"], ["FUNCTION", "LIST", "LIBRARYNAME"], ["FUNCTION", "LIST", "x"], ["FUNCTION", "STATS"], ["FUNCTION", "DUMP"], ["FUNCTION", "KILL"],
    ["FUNCTION", "NONSENSE"], ["FUNCTION"], ["FUNCTION", "DUMP", "x"],
    ["LATENCY", "LATEST"], ["LATENCY", "HISTORY", "x"], ["LATENCY", "GRAPH", "x"], ["LATENCY", "RESET"], ["LATENCY", "RESET", "x"], ["LATENCY", "HISTOGRAM", "nonsense"], ["LATENCY", "NONSENSE"], ["LATENCY"],
    ["SLOWLOG", "GET", "x"], ["SLOWLOG", "GET", -2], ["SLOWLOG", "GET", 1, 2], ["SLOWLOG", "LEN", 1], ["SLOWLOG", "RESET"], ["SLOWLOG", "NONSENSE"], ["SLOWLOG"],
    ["DEBUG", "SLEEP", 0], ["DEBUG"], ["TIME", "x"],
    ["COMMAND", "GETKEYSANDFLAGS", "RENAME", "a", "b"], ["COMMAND", "GETKEYSANDFLAGS", "BITOP", "AND", "a", "b", "c"], ["COMMAND", "GETKEYSANDFLAGS", "COPY", "a", "b"],
    ["COMMAND", "GETKEYSANDFLAGS", "BITFIELD", "a", "GET", "u8", 0], ["COMMAND", "GETKEYSANDFLAGS", "BITFIELD", "a", "SET", "u8", 0, 1], ["COMMAND", "GETKEYS", "OBJECT", "ENCODING", "a"], ["COMMAND", "GETKEYS", "MEMORY", "USAGE", "a"],
    ["SELECT", 0], ["SELECT"], ["SELECT", "x"], ["SELECT", 99], ["SELECT", -1], ["SELECT", 0, 1],
    ["KEYS"], ["KEYS", "a", "b"],
    ["SCAN"], ["SCAN", "x"], ["SCAN", 0, "COUNT", 0], ["SCAN", 0, "COUNT", "x"], ["SCAN", 0, "NONSENSE"], ["SCAN", 0, "MATCH"],
    ["SCAN", 0, "COUNT", -5], ["SCAN", "99999999999999999999999"], ["SCAN", 0, "NONSENSE", 5],
    ["DBSIZE", "x"], ["RANDOMKEY", "x"],
    ["HELLO", 4], ["HELLO", 1], ["HELLO", "x"], ["HELLO", 3, "NONSENSE"], ["HELLO", 3, "SETNAME"], ["HELLO", 2, "SETNAME", "a b"],
    ["CLIENT"], ["CLIENT", "NONSENSE"], ["CLIENT", "GETNAME"], ["CLIENT", "SETNAME", "name"], ["CLIENT", "SETNAME", "with space"],
    ["CLIENT", "ID", "x"], ["CLIENT", "SETNAME"],
    ["COMMAND", "NONSENSE"], ["COMMAND", "INFO", "nonsense"],
    ["CONFIG"], ["CONFIG", "GET"], ["CONFIG", "GET", "no-such-parameter"], ["CONFIG", "NONSENSE"],
    ["QUIT", "now"], ["RESET", "x"],
    ["NONSENSE"], ["NONSENSE", "a", "b c", "d" * 200], ["nonsense", "\r\n"], ["", "a"], ["X" * 200], ["GETT", "hello"],
    ["SET", "k"], ["DEL"], ["INCR"], ["HSET", "k"], ["EXPIRE", "k"],
]  # fmt: skip


@pytest.mark.parametrize("words", [ask(*words) for words in SAME])
def test_the_same_reply(words, both):
    theirs, ours = (client.call(*words) for client in both)
    assert type(ours) is type(theirs) and ours == theirs


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    """A read-only Redis and a node; neither has these commands' keys."""
    root = tmp_path_factory.mktemp("replica")
    db = databases.open_rocks(root / "db", **databases.SMALL_BLOCKS)
    db.close()
    with millrace.redis_server(root, root / "redis.log") as theirs, millrace.node(root / "db", root / "log") as ours:
        with theirs.connect() as client:
            # Its master does not exist: it serves its data, and refuses writes.
            assert client.call("REPLICAOF", "127.0.0.1", "1") == resp.Simple(b"OK")
        yield theirs, ours


# Likely mistakes of scripts and people.
WORDS = ["", "0", "-1", "1", "x", "1.5", " 1", "+1", "01", "-0", "0x1", "9223372036854775808", "-9223372036854775809", "9" * 30, "help", "a\0b", "é", "*"]
OPTIONS = ["COUNT", "match", "Type", "SETNAME", "auth", "ON", "off", "ID", "skipme", "PATTERN", "ASYNC", "all", "WRITE"]
COMMANDS = [[word] for word in "PING ECHO RESET HELLO AUTH SELECT DBSIZE GET MGET EXISTS STRLEN GETRANGE SUBSTR SCAN KEYS TYPE TTL PTTL RANDOMKEY".split()]
COMMANDS += [[word] for word in "TOUCH GETBIT BITCOUNT BITPOS BITFIELD_RO LCS DUMP TIME BITFIELD BITOP SETBIT COPY RESTORE MOVE".split()]
COMMANDS += [["OBJECT", word] for word in "ENCODING FREQ IDLETIME REFCOUNT".split()] + [["MEMORY", "USAGE"], ["FUNCTION", "LIST"], ["FUNCTION", "FLUSH"], ["SLOWLOG", "GET"], ["LATENCY", "HISTORY"]]
COMMANDS += [["CLIENT", word] for word in "CACHING GETREDIR KILL NO-EVICT SETNAME TRACKING TRACKINGINFO UNBLOCK UNPAUSE NONSENSE".split()]
COMMANDS += [["COMMAND", word] for word in "LIST NONSENSE".split()] + [["CONFIG", word] for word in "GET NONSENSE".split()]
COMMANDS += [[word] for word in "FLUSHALL FLUSHDB SET DEL APPEND INCR SORT XGROUP SWAPDB RENAME NONSENSE".split()] + [["XGROUP", "create"]]


def excepted(words):
    """Whether the documentation names the difference."""
    match [*words, "", ""]:
        case ["TIME" | "time", "", ""]:
            return True
        case ["SCAN" | "scan", cursor, *_]:
            return re.fullmatch(r"[+0]?1|2|-?[1-9]\d{18}", cursor)
        case ["SELECT" | "select", index, *_]:
            return index == "1"
        case ["COMMAND" | "command", "LIST" | "list", more, *_]:
            return not more
        case ["CONFIG" | "config", "GET" | "get", *patterns]:
            return "*" in patterns
        case ["XGROUP" | "xgroup", word, *_]:
            return word == "help"
    return False


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_odd_arguments_get_the_same_reply(command, replica):
    requests = [command, [word.lower() for word in command]]
    for a in WORDS + OPTIONS:
        requests += [[*command, a], [*command, "x", a, "y", "z"], [*command, "2", a, "x", "y"]]
        requests += [[*command, a, b] for b in WORDS + OPTIONS]
        requests += [[*command, "0", a, b] for b in WORDS]
    requests = [words for words in requests if not excepted(words)]
    different = []
    theirs, ours = (server.connect() for server in replica)
    with theirs, ours:
        for words in requests:
            replies = [client.call(*words) for client in (theirs, ours)]
            if type(replies[0]) is not type(replies[1]) or replies[0] != replies[1]:
                if command != ["HELLO"] or isinstance(replies[0], resp.Error) or isinstance(replies[1], resp.Error):
                    different.append((words, *replies))
            if command == ["HELLO"]:
                assert [type(client.call("HELLO", 2)) for client in (theirs, ours)] == [list, list]
    assert not different, f"{len(different)}: {different[:5]}"


@pytest.mark.parametrize("pattern", ["*", "user:*", "user:?", "user:[12]", "user:[^1]*", "user:[1-2]", "\\[x\\]", "st\\*r", "h?llo", "nothing*", "", "*0*9", "key:00[0-4][5-9]", "[", "a\\", "gr*", "**e", "[^k]*", "key:[0-"])
def test_keys_that_match(pattern, both):
    theirs, ours = (sorted(client.call("KEYS", pattern)) for client in both)
    assert ours == theirs


def scanned(client, *options):
    cursor, found, rounds = b"0", [], 0
    while True:
        cursor, page = client.call("SCAN", cursor, *options)
        found += page
        rounds += 1
        assert rounds < 5000
        if cursor == b"0":
            return sorted(found)


@pytest.mark.parametrize("options", [[], ["COUNT", 7], ["COUNT", 10000], ["MATCH", "user:*"], ["MATCH", "key:*9", "COUNT", 3], ["TYPE", "string"], ["TYPE", "hash"], ["type", "STRING", "match", "h*", "count", "50"]])
def test_a_whole_scan_returns_every_key_once(options, both):
    theirs, ours = (scanned(client, *options) for client in both)
    assert ours == sorted(set(theirs))


def test_concurrent_scans_are_independent(pair):
    with pair[1].connect() as client:
        states = [[b"0", [], False] for _ in range(40)]
        while not all(done for _, _, done in states):
            for number, state in enumerate(states):
                if not state[2]:
                    state[0], page = client.call("SCAN", state[0], "COUNT", 20 + number)
                    state[1] += page
                    state[2] = state[0] == b"0"
        assert all(sorted(found) == sorted(KEYS) for _, found, _ in states)


@pytest.mark.parametrize("words", [["SET", "k", "v"], ["DEL", "hello"], ["INCR", "number"], ["MSET", "a", "1"], ["HSET", "h", "f", "v"], ["LPUSH", "l", "x"], ["EXPIRE", "hello", 5], ["FLUSHALL"], ["APPEND", "hello", "x"], ["GETDEL", "hello"], ["RENAME", "hello", "x"]])
def test_a_write_is_refused_as_read_only(words, both):
    reply = both[1].call(*words)
    assert isinstance(reply, resp.Error) and reply.startswith("READONLY "), reply
    assert both[1].call("GET", "hello") == b"world"


def test_hello_identifies_the_server(both):
    theirs, ours = (client.call("HELLO") for client in both)
    assert type(ours) is type(theirs)
    if isinstance(theirs, list):
        theirs, ours = (dict(zip(reply[::2], reply[1::2])) for reply in (theirs, ours))
    assert set(theirs) == set(ours)
    for name in (b"proto", b"mode", b"role", b"modules"):
        if name != b"role":
            assert ours[name] == theirs[name], name


def test_command_describes_every_command(both):
    theirs, ours = both
    known = ours.call("COMMAND")
    assert ours.call("COMMAND", "COUNT") == len(known)
    names = "get mget exists strlen getrange type echo scan touch getbit bitcount bitpos bitfield_ro bitop copy rename renamenx setbit lcs dump restore time move swapdb"
    for name in (*names.split(), *"object|encoding memory|usage function|list function|flush slowlog|get latency|history debug".split()):
        a, b = (client.call("COMMAND", "INFO", name) for client in (theirs, ours))
        assert b[0][0] == a[0][0] and b[0][1] == a[0][1] and b[0][3:6] == a[0][3:6], (name, a, b)
        assert name.split("|")[0].encode() in [row[0] for row in known]


def test_random_key_is_one_of_the_keys(both):
    found = {both[1].call("RANDOMKEY") for _ in range(200)}
    assert found <= set(KEYS) and len(found) > 20


def test_the_size_is_an_estimate(both):
    assert 0.5 * len(KEYS) <= both[1].call("DBSIZE") <= 2 * len(KEYS)


def test_info_has_sections_with_a_line_per_field(both):
    assert type(both[1].call("INFO")) is type(both[0].call("INFO"))
    reply = both[1].call("INFO")
    text = reply.decode()
    assert "# Server\r\n" in text and re.search(r"(?m)^redis_version:7\.0\.", text) and re.search(r"(?m)^tcp_port:\d+", text)
    for line in text.split("\r\n"):
        assert line == "" or line.startswith("# ") or re.fullmatch(r"[^:\s]+:.*", line), line
    one = both[1].call("INFO", "server").decode()
    assert one.startswith("# Server\r\n") and one.count("# ") == 1


def test_reset_and_quit(pair):
    for server in pair:
        with server.connect() as client:
            assert isinstance(client.call("HELLO", 3), resp.Map)
            assert client.call("RESET") == resp.Simple(b"RESET")
            assert client.call("GET", "missing") is None, "RESET goes back to RESP2"
            assert client.call("QUIT") == resp.Simple(b"OK")
            assert client.until_closed() == b""


INLINE = [
    b"PING\r\n", b"PING\n", b"  PING  \r\n", b"GET hello\r\n", b"get 'hello'\r\n", b'GET "hello"\r\n', b'ECHO "a\\x41\\n"\r\n', b"ECHO 'it\\'s'\r\n",
    b"\r\nPING\r\n", b"\r\n\r\n\nPING\r\n", b"*0\r\nPING\r\n", b"*-1\r\nPING\r\n", b"MGET hello missing\r\nPING\r\n", b"NONSENSE a b\r\n", b"ECHO \"\"\r\n",
]  # fmt: skip
BROKEN = [
    b'ECHO "abc\r\n', b"ECHO 'a'b\r\n", b"*x\r\n", b"*1\r\nPING\r\n", b"*1\r\n$x\r\n", b"*1\r\n$-5\r\n", b"*1\r\n$999999999999\r\n", b"*1\r\n:4\r\nPING\r\n",
    b"*99999999999999999999\r\n", b"A" * 70000, b"*1" + b"0" * 70000,
]  # fmt: skip


@pytest.mark.parametrize("sent", INLINE, ids=repr)
def test_inline_commands_and_empty_ones(sent, pair):
    replies = []
    for server in pair:
        with server.connect() as client:
            client.send(sent + b"*2\r\n$4\r\nECHO\r\n$4\r\nstop\r\n")
            found = []
            while not found or found[-1] != b"stop":
                found.append(client.reply())
            replies.append(found)
    assert replies[1] == replies[0]


@pytest.mark.parametrize("sent", BROKEN, ids=lambda sent: repr(sent[:24]))
def test_a_broken_request_is_answered_and_the_connection_closed(sent, pair):
    replies = []
    for server in pair:
        with server.connect() as client:
            client.send(b"PING\r\n" + sent)
            replies.append(client.until_closed())
    assert replies[1] == replies[0]


def test_a_pipeline_in_any_pieces_keeps_its_order(pair):
    requests = [("GET", f"key:{n % 800:04}") if n % 3 else ("MGET", f"key:{n % 700:04}", "hello") for n in range(3000)]
    stream = b"".join(resp.encode(*request) for request in requests)
    rng = random.Random(6)
    with pair[0].connect() as theirs, pair[1].connect() as ours:
        expected = theirs.pipeline(requests)
        at = 0
        import threading

        def send():
            nonlocal at
            while at < len(stream):
                step = rng.choice((1, 2, 3, 7, 50, 1000, 9000))
                ours.send(stream[at : at + step])
                at += step

        sender = threading.Thread(target=send)
        sender.start()
        found = [ours.reply() for _ in requests]
        sender.join()
    assert found == expected


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_works(protocol, pair):
    client = redis.Redis(port=pair[1].port, protocol=protocol, client_name="e2e")
    assert client.ping()
    assert client.get("hello") == b"world" and client.get("missing") is None
    assert client.mget(["hello", "missing", "number"]) == [b"world", None, b"10"]
    assert client.exists("hello", "missing", "empty") == 2
    assert client.strlen("long") == 50000 and client.getrange("hello", 1, 3) == b"orl"
    assert sorted(client.scan_iter(match="user:*")) == [b"user:1", b"user:2", b"user:30"]
    assert client.type("hello") == b"string" and client.client_getname() in ("e2e", b"e2e")
    assert client.info()["redis_version"].startswith("7.0.")
    with client.pipeline(transaction=False) as pipe:
        for n in range(100):
            pipe.get(f"key:{n:04}")
        assert pipe.execute() == [b"value %d" % n for n in range(100)]
    with pytest.raises(redis.exceptions.ReadOnlyError):
        client.set("a", "b")
    with pytest.raises(redis.exceptions.ResponseError):
        client.execute_command("NONSENSE")
    client.close()


def test_redis_cli_works(pair):
    cli = ["redis-cli", "-p", str(pair[1].port)]
    assert databases.run(*cli, "GET", "hello").strip() == "world"
    assert databases.run(*cli, "-3", "GET", "missing").strip() == ""
    assert databases.run(*cli, "--scan", "--pattern", "user:*").split() == ["user:1", "user:2", "user:30"]
    assert databases.run(*cli, "MR.RANGE", "[user:", "(user;").split() == ["user:1", "one", "user:2", "two", "user:30", "thirty"]


RANGES = [
    (("-", "+"), lambda rows: rows),
    (("-", "+", "REVERSE"), lambda rows: rows[::-1]),
    (("-", "+", "LIMIT", 3), lambda rows: rows[:3]),
    (("-", "+", "REVERSE", "LIMIT", 3), lambda rows: rows[::-1][:3]),
    (("-", "+", "LIMIT", 3, "REVERSE"), lambda rows: rows[::-1][:3]),
    (("-", "+", "BYTES", 0), lambda rows: []),
    (("-", "+", "BYTES", 1), lambda rows: rows[:1]),
    (("[user:1", "[user:9", "LIMIT", 2, "BYTES", 1000), lambda rows: [row for row in rows if b"user:1" <= row[0] <= b"user:9"][:2]),
    (("[user:1", "[user:2"), lambda rows: [row for row in rows if b"user:1" <= row[0] <= b"user:2"]),
    (("(user:1", "(user:3"), lambda rows: [row for row in rows if b"user:1" < row[0] < b"user:3"]),
    (("[user:9", "[user:1"), lambda rows: []),
    (("[user:15", "+", "LIMIT", 1), lambda rows: [row for row in rows if row[0] >= b"user:15"][:1]),
    (("-", "(user:15", "REVERSE", "LIMIT", 1), lambda rows: [row for row in rows if row[0] < b"user:15"][::-1][:1]),
]


@pytest.mark.parametrize("words,rows", RANGES, ids=lambda part: " ".join(map(str, part)) if isinstance(part, tuple) else "")
def test_a_range_read_has_its_bounds_and_its_direction(words, rows, both):
    expected = [part for row in rows(sorted(KEYS.items())) for part in row]
    assert both[1].call("MR.RANGE", *words) == expected
    assert both[1].call("mr.range", *words, "NOVALUES") == expected[::2]


@pytest.mark.parametrize("words", [(), ("-",), ("-", "+", "NONSENSE"), ("user:1", "+"), ("-", "user:1"), ("-", "+", "LIMIT"), ("-", "+", "LIMIT", "x"), ("-", "+", "BYTES", -1), ("-", "+", "LIMIT", -1)])
def test_an_invalid_range_read_is_an_error(words, both):
    assert isinstance(both[1].call("MR.RANGE", *words), resp.Error)
    assert both[1].call("PING") == b"PONG"
