"""Random commands: all commands of docs/RESP.md, with edge cases as arguments, and the comparison with Redis's replies.

`reply_of` alone lists the known differences from Redis.
"""

import resp

KEYS = [b"a", b"b", b"c", b"n", b"m", b"f", b"", b"bin\0\xff\r\n", b"L" * 300, b"{x}*?[a]"]
NUMBERS = [b"0", b"1", b"-1", b"7", b"9223372036854775807", b"-9223372036854775808", b"9223372036854775808", b"10", b"1000"]
ODD = [b"", b" 1", b"01", b"+1", b"-0", b"1.5", b"1e3", b"0x1p3", b"nan", b"inf", b"-inf", b"x", b"\0", b"$1\r\n", b"1" * 400]
TIMES = [b"0", b"-1", b"x", b""]
# Times at which keys end, in seconds or milliseconds: far ahead, long ago, and such as are refused.
SECONDS = [b"4102444800", b"4102444801", b"4102444802", b"1", b"9223372036854775", b"9223372036854775807", *TIMES]
MILLISECONDS = [b"4102444800000", b"4102444800499", b"4102444801500", b"1", b"9223372036854775807", *TIMES]
# From now on they differ by the time between the two servers, so only those are used that are refused.
REFUSED_TIMES = [b"9223372036854775807", b"9223372036854775808", *TIMES]

# What Redis 7.0.15 dumps, as it is, as an integer and compressed; and what it refuses.
PAYLOADS = [
    b"\x00\x03bar\n\x00\xe6\xbeI`\xeef\xfd\x17", b"\x00\xc1\xe8\x03\n\x00\x89\xd1G\x8e\xba\xc4\xb7d",
    b"\x00\xc3\n@x\x02aba\xe0j\x01\x01ab\n\x00\xb2\x88p\x8cS\x07\x16\xd2", b"\x00\x1ex1-mixed-value-of-thirty-bytes\n\x00\x08\xfa\x12Lc4\xd7\xfd",
    b"\x00\x03bas\n\x00\xe6\xbeI`\xeef\xfd\x17", b"short", b"",
]  # fmt: skip
FIELDS = [b"u8", b"i5", b"u1", b"i1", b"u63", b"i64", b"u64", b"i65", b"x8"]

# Commands that Redis does not know either, and commands with invalid arguments.
REFUSED = [
    [b"NONSENSE", b"a"], [b"GET"], [b"SET", b"a"], [b"MSET", b"a"], [b"CLIENT", b"NONSENSE"], [b"CLIENT"], [b"CONFIG", b"GET"], [b"CONFIG", b"NONSENSE", b"x"],
    [b"CLIENT", b"REPLY", b"x"], [b"CLIENT", b"KILL", b"1.2.3.4:5"], [b"CLIENT", b"KILL", b"ID", b"0"], [b"CLIENT", b"NO-EVICT", b"x"], [b"CLIENT", b"PAUSE", b"x"],
    [b"CLIENT", b"SETNAME", b"a b"], [b"CLIENT", b"LIST", b"TYPE", b"x"], [b"CLIENT", b"UNBLOCK", b"x"], [b"HELLO", b"4"], [b"HELLO", b"x"], [b"HELLO", b"3", b"x"],
    [b"AUTH", b"x"], [b"AUTH", b"default", b"x"], [b"AUTH", b"nobody", b"x"], [b"AUTH", b"a", b"b", b"c"], [b"SELECT", b"x"], [b"SELECT", b"99"], [b"SHUTDOWN", b"x"],
    [b"FLUSHDB", b"x"], [b"FLUSHALL", b"SYNC", b"x"], [b"SCAN", b"x"], [b"SCAN", b"0", b"COUNT", b"0"], [b"SCAN", b"0", b"TYPE"], [b"COMMAND", b"GETKEYS", b"x"],
    [b"EXEC"], [b"DISCARD"], [b"EXEC", b"x"], [b"MULTI", b"x"], [b"WATCH"],
]  # fmt: skip


def key(rng):
    return rng.choice(KEYS)


def value(rng):
    kind = rng.randrange(20)
    if kind < 8:
        return rng.choice(NUMBERS)
    if kind < 13:
        return rng.choice(ODD)
    return rng.randbytes(rng.choice((1, 10, 100, 2000, 2000, 30_000)))


def number(rng):
    return rng.choice(NUMBERS) if rng.random() < 0.8 else rng.choice(ODD)


def set_options(rng):
    words = []
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3))):
        words.append(rng.choice((b"NX", b"XX", b"GET", b"get", b"KEEPTTL", b"x", b"")))
    if rng.random() < 0.3:
        # With a time that has passed, Redis keeps the key until somebody looks at it, and DBSIZE counts it.
        words += end if (end := ends(rng))[-1] != b"1" else []
    return words


def ends(rng):
    """An option that says when a key ends."""
    kinds = ([b"EXAT", rng.choice(SECONDS)], [b"pxat", rng.choice(MILLISECONDS)], [rng.choice((b"EX", b"PX")), rng.choice(REFUSED_TIMES)])
    return rng.choices(kinds, (3, 4, 1))[0]


def expire_if(rng):
    return rng.choice(([], [], [], [b"NX"], [b"XX"], [b"gt"], [b"LT"], [b"XX", b"GT"], [b"NX", b"XX"], [b"GT", b"LT"], [b"x"]))


def offset(rng):
    """The offset of a bit; none that makes a value longer than Millrace allows."""
    return rng.choice((b"0", b"1", b"7", b"8", b"100", b"1000", b"40000", b"-1", b"x", b"99999999999999999999"))


def field_operations(rng):
    words = []
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        kind = rng.randrange(8)
        if kind == 0:
            words += [b"OVERFLOW", rng.choice((b"WRAP", b"sat", b"FAIL", b"x"))]
        where = [rng.choice(FIELDS[:6] if rng.random() < 0.95 else FIELDS), rng.choice((b"#3", offset(rng)))]
        words += [b"GET", *where] if kind < 4 else [rng.choice((b"SET", b"INCRBY")), *where, number(rng)]
    return words


def span(rng):
    """Optional positions in a value, and their unit."""
    words = [rng.choice((b"0", b"1", b"-1", b"5", b"-3", b"100", b"x")) for _ in range(rng.choice((0, 1, 2, 2, 2)))]
    return [*words, rng.choice((b"BIT", b"byte", b"x"))] if rng.random() < 0.3 else words


def keys(rng):
    return [key(rng) for _ in range(rng.choice((1, 1, 2, 3, 12)))]


def pairs(rng):
    return [word for one in keys(rng) for word in (one, value(rng))]


ON_KEYS = [
    (12, lambda r: [b"SET", key(r), value(r), *set_options(r)]),
    (8, lambda r: [b"SET", key(r), value(r)]),
    (3, lambda r: [b"SETNX", key(r), value(r)]),
    (5, lambda r: [b"MSET", *pairs(r)]),
    (3, lambda r: [b"MSETNX", *pairs(r)]),
    (3, lambda r: [b"GETSET", key(r), value(r)]),
    (3, lambda r: [b"GETDEL", key(r)]),
    (4, lambda r: [b"APPEND", key(r), value(r)]),
    (4, lambda r: [b"SETRANGE", key(r), r.choice((b"0", b"1", b"5", b"3000", b"-1", b"536870912", b"x")), value(r)]),
    (4, lambda r: [r.choice((b"DEL", b"UNLINK")), *keys(r)]),
    (6, lambda r: [r.choice((b"INCR", b"DECR")), key(r)]),
    (6, lambda r: [r.choice((b"INCRBY", b"DECRBY")), key(r), number(r)]),
    (4, lambda r: [b"INCRBYFLOAT", key(r), r.choice(NUMBERS[:4] + ODD)]),
    (10, lambda r: [b"GET", key(r)]),
    (4, lambda r: [b"MGET", *keys(r)]),
    (3, lambda r: [b"EXISTS", *keys(r)]),
    (2, lambda r: [b"STRLEN", key(r)]),
    (3, lambda r: [r.choice((b"GETRANGE", b"SUBSTR")), key(r), number(r), number(r)]),
    (2, lambda r: [r.choice((b"TYPE", b"TTL", b"PTTL")), key(r)]),
    (3, lambda r: [b"PEXPIREAT", key(r), r.choice(MILLISECONDS), *expire_if(r)]),
    (2, lambda r: [b"EXPIREAT", key(r), r.choice(SECONDS), *expire_if(r)]),
    (1, lambda r: [r.choice((b"EXPIRE", b"PEXPIRE")), key(r), r.choice(REFUSED_TIMES), *expire_if(r)]),
    (1, lambda r: [r.choice((b"SETEX", b"PSETEX")), key(r), r.choice(REFUSED_TIMES), value(r)]),
    (3, lambda r: [b"GETEX", key(r), *r.choice(([], [b"PERSIST"], [b"x"], ends(r), ends(r), [*ends(r), b"PERSIST"]))]),
    (2, lambda r: [b"PERSIST", key(r)]),
    (4, lambda r: [r.choice((b"EXPIRETIME", b"PEXPIRETIME")), key(r)]),
    (2, lambda r: [b"RESTORE", key(r), r.choice(MILLISECONDS), r.choice(PAYLOADS), b"ABSTTL", *r.choice(([], [b"REPLACE"]))]),
    (4, lambda r: [r.choice((b"RENAME", b"RENAMENX")), key(r), key(r)]),
    (3, lambda r: [b"COPY", key(r), key(r), *r.choice(([], [], [b"REPLACE"], [b"DB", b"0"], [b"DB", b"1"], [b"DB", b"x"], [b"x"]))]),
    (2, lambda r: [b"TOUCH", *keys(r)]),
    (4, lambda r: [b"SETBIT", key(r), offset(r), r.choice((b"0", b"1", b"2"))]),
    (2, lambda r: [b"GETBIT", key(r), offset(r)]),
    (2, lambda r: [b"BITCOUNT", key(r), *span(r)]),
    (2, lambda r: [b"BITPOS", key(r), r.choice((b"0", b"1", b"2")), *span(r)]),
    (4, lambda r: [b"BITOP", r.choice((b"AND", b"or", b"XOR", b"NOT", b"x")), key(r), *keys(r)]),
    (4, lambda r: [b"BITFIELD", key(r), *field_operations(r)]),
    (2, lambda r: [b"BITFIELD_RO", key(r), *field_operations(r)]),
    (3, lambda r: [b"RESTORE", key(r), r.choice((b"0", b"0", b"0", b"-1", b"x")), r.choice(PAYLOADS), *r.choice(([], [b"REPLACE"], [b"REPLACE", b"ABSTTL"], [b"IDLETIME", b"1"], [b"FREQ", b"256"], [b"x"]))]),
    (1, lambda r: [b"DUMP", key(r)]),
    (1, lambda r: [b"OBJECT", r.choice((b"ENCODING", b"FREQ", b"IDLETIME", b"REFCOUNT")), key(r)]),
    (1, lambda r: [b"MEMORY", b"USAGE", key(r)]),
    (1, lambda r: [b"MOVE", key(r), r.choice((b"0", b"1", b"x"))]),
]
OF_ALL_KEYS = [
    (3, lambda r: [b"DBSIZE"]),
    (2, lambda r: [b"KEYS", r.choice((b"*", b"?", b"[a-c]", b"a*", b"", b"\\*", b"{x}\\*\\?\\[a]", b"bin*"))]),
    (1, lambda r: [b"RANDOMKEY"]),
    (1, lambda r: [b"SCAN", b"0", b"COUNT", b"10000"]),
    (1, lambda r: [b"SCAN", b"0", b"COUNT", b"1000", b"MATCH", b"?"]),
    (1, lambda r: [b"SCAN", b"0", b"COUNT", b"10000", b"TYPE", r.choice((b"string", b"list"))]),
    (1, lambda r: [r.choice((b"FLUSHDB", b"FLUSHALL")), *r.choice(([], [], [b"ASYNC"], [b"SYNC"]))]),
    (1, lambda r: [b"SAVE"]),
    (1, lambda r: [b"LASTSAVE"]),
]
OTHERS = [
    (3, lambda r: r.choice(([b"PING"], [b"PING", value(r)], [b"PING", b"a", b"b"]))),
    (3, lambda r: [b"ECHO", value(r)]),
    (1, lambda r: [b"SELECT", b"0"]),
    (1, lambda r: [b"SWAPDB", r.choice((b"0", b"1", b"x")), b"0"]),
    (1, lambda r: [b"TIME"]),
    (1, lambda r: [b"FUNCTION", *r.choice(([b"LIST"], [b"FLUSH"], [b"FLUSH", b"SYNC"], [b"FLUSH", b"x"], [b"STATS"], [b"DUMP"], [b"KILL"], [b"DELETE", b"x"]))]),
    (1, lambda r: [b"SLOWLOG", r.choice((b"GET", b"LEN", b"RESET"))]),
    (1, lambda r: [b"LATENCY", r.choice((b"LATEST", b"RESET"))]),
    (1, lambda r: [b"DEBUG", b"SLEEP", b"0"]),
    (1, lambda r: [b"RESET"]),
    (2, lambda r: [b"HELLO", r.choice((b"2", b"3"))]),
    (1, lambda r: [b"HELLO", b"3", b"SETNAME", r.choice((b"me", b"a b", b""))]),
    (1, lambda r: [b"AUTH", b"default", b"any"]),
    (1, lambda r: [b"CLIENT", b"SETNAME", r.choice((b"me", b"", b"you"))]),
    (2, lambda r: [b"CLIENT", r.choice((b"GETNAME", b"GETREDIR", b"TRACKINGINFO", b"ID", b"INFO", b"LIST", b"UNPAUSE"))]),
    (1, lambda r: [b"CLIENT", b"NO-EVICT", b"on"]),
    (1, lambda r: [b"CLIENT", b"CACHING", r.choice((b"YES", b"NO", b"maybe"))]),
    (1, lambda r: [b"CLIENT", b"UNBLOCK", b"999999"]),
    (1, lambda r: [b"CLIENT", b"REPLY", b"ON"]),
    (1, lambda r: [b"COMMAND", r.choice((b"GETKEYS", b"GETKEYSANDFLAGS")), *r.choice(([b"SET", b"a", b"b", *set_options(r)], [b"MSET", b"a", b"1", b"b", b"2"], [b"GET"], [b"PING"], [b"GETDEL", b"x"]))]),
    (1, lambda r: [b"COMMAND", b"INFO", r.choice((b"set", b"get", b"mset", b"client|list", b"nonsense"))]),
    (1, lambda r: [b"INFO", r.choice((b"server", b"keyspace", b"nosuch"))]),
    (1, lambda r: [b"CONFIG", b"GET", r.choice((b"databases", b"nosuch*"))]),
    (6, lambda r: list(r.choice(REFUSED))),
]


def a_command(rng, kinds):
    """One command; sometimes with a word too few or too many."""
    words = rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0](rng)
    # Not these: with other arguments they become commands that are not tested here.
    if rng.random() < 0.03 and words[0] not in (b"SHUTDOWN", b"COMMAND", b"HELLO", b"INFO", b"WATCH", b"MULTI", b"SCAN"):
        return words[:-1] if rng.random() < 0.5 and len(words) > 1 else [*words, rng.choice(ODD)]
    return words


def kinds_for(alone):
    """The kinds of commands for a connection; `alone` says that no other one uses the database."""
    return ON_KEYS + OTHERS + (OF_ALL_KEYS if alone else [])


def fields(report):
    return sorted(line.split(b":")[0] for line in report.split(b"\r\n"))


def reply_of(words, reply):
    """A reply without the parts that may differ from Redis."""
    name = words[0].upper()
    second = words[1].upper() if len(words) > 1 else b""
    if isinstance(reply, resp.Error):
        return ("error", str(reply))
    if reply == b"QUEUED":
        return reply
    if name == b"HELLO" and isinstance(reply, (list, dict)):
        # Without the connection's number.
        pairs = list(reply.items()) if isinstance(reply, dict) else list(zip(reply[::2], reply[1::2]))
        return (type(reply), [pair for pair in pairs if pair[0] != b"id"])
    if name == b"KEYS":
        return sorted(reply)
    if name == b"SCAN":
        # The order differs; only whole scans are compared.
        return (reply[0], sorted(reply[1])) if len(reply[1]) < 10 or reply[0] == b"0" else None
    if name == b"RANDOMKEY":
        return type(reply)
    if name in (b"TTL", b"PTTL"):
        # The servers are not asked in the same moment.
        return reply if reply < 0 else reply // 10_000_000
    if name in (b"LASTSAVE", b"INFO", b"TIME", b"DUMP", b"OBJECT", b"MEMORY", b"SLOWLOG") or name == b"CLIENT" and second in (b"ID", b"INFO", b"LIST"):
        return type(reply)
    if name == b"COMMAND" and second == b"INFO":
        return [one if one is None or isinstance(one, resp.Null) else one[:7] for one in reply]
    return (type(reply), reply)
