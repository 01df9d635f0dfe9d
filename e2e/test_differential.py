"""Sends the same random commands to Redis and to Millrace, under faults: the replies must be equal, one for each command.

A command that Millrace refuses (for lack of space) or does not answer (the connection was cut, the node was killed) is not sent
to Redis, so Redis's later replies show whether Millrace applied it. A failure names its seed; `--long` runs more seeds,
`MILLRACE_SEED=5` only that one, `MILLRACE_SEEDS=300` that many.
"""

import os
import random
import socket
import struct
import time

import commands
import millrace
import pytest
import resp
from small_disk import SmallDisk

LARGE = 40_000


class Pair:
    """Redis, a node on a small disk, and the commands for both."""

    def __init__(self, seed, disk, theirs, root):
        self.rng = random.Random(seed)
        self.seed, self.disk, self.theirs, self.root = seed, disk, theirs, root
        self.nodes = self.refused = 0
        self.ours = None

    def start(self):
        self.nodes += 1
        self.ours = self.disk.node(self.root / f"log{self.nodes}", "process").__enter__()

    def connections(self):
        return self.theirs.connect(), self.ours.connect()

    def fail(self, words, theirs, ours):
        said = b" ".join(word[:60] for word in words)
        raise AssertionError(f"seed {self.seed}: {said!r}: Redis {str(theirs)[:300]}, Millrace {str(ours)[:300]}")

    def compare(self, words, theirs, ours):
        if commands.reply_of(words, theirs) != commands.reply_of(words, ours):
            self.fail(words, theirs, ours)

    def some_commands(self, alone, most=80):
        kinds = commands.kinds_for(alone)
        return [commands.a_command(self.rng, kinds) for _ in range(self.rng.randint(1, most))]

    def state(self, server):
        """All keys, values and deadlines."""
        with server.connect() as client:
            keys = sorted(client.call("KEYS", "*"))
            assert client.call("DBSIZE") == len(keys), f"seed {self.seed}"
            ends = [client.call("PEXPIRETIME", key) for key in keys]
            return dict(zip(keys, zip(client.call("MGET", *keys), ends))) if keys else {}

    def same_state(self):
        theirs, ours = self.state(self.theirs), self.state(self.ours)
        assert theirs == ours, f"seed {self.seed}: {differences(theirs, ours)}"


def differences(theirs, ours):
    wrong = [key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)]
    return [(key, str(theirs.get(key))[:100], str(ours.get(key))[:100]) for key in wrong]


def until(client, marker):
    """The replies before that of the marker."""
    replies = []
    while (reply := client.reply()) != marker:
        replies.append(reply)
    return replies


def silent(rng, group):
    """A group of commands of which some have no reply, and the commands that have one."""
    # A command must follow SKIP, or it would skip the marker.
    group = [[b"PING"], *(words for words in group if words[0] not in (b"RESET", b"HELLO", b"CLIENT"))]
    if rng.random() < 0.5:
        return [[b"CLIENT", b"REPLY", b"OFF"], *group, [b"CLIENT", b"REPLY", b"ON"]], [[b"CLIENT", b"REPLY", b"ON"]]
    return [[b"CLIENT", b"REPLY", b"SKIP"], *group], group[1:]


def untroubled(pair):
    """Pipelines of all commands, some without replies, some ended by QUIT."""
    theirs, ours = pair.connections()
    with theirs, ours:
        for number in range(pair.rng.randint(1, 4)):
            group = answered = pair.some_commands(alone=True)
            if pair.rng.random() < 0.2:
                group, answered = silent(pair.rng, group)
            last = pair.rng.random() < 0.1
            marker = b"marker %d %d" % (number, pair.rng.randrange(1 << 30))
            stream = b"".join(resp.encode(*words) for words in [*group, [b"ECHO", marker]])
            found = []
            for client in (theirs, ours):
                client.send(stream)
                found.append(until(client, marker))
            assert len(found[0]) == len(answered), f"seed {pair.seed}: {answered} {found[0]}"
            assert len(found[1]) == len(answered), f"seed {pair.seed}: {len(found[1])} replies to {len(answered)} commands"
            for words, expected, reply in zip(answered, *found):
                pair.compare(words, expected, reply)
            if last:
                for client in (theirs, ours):
                    client.send(resp.encode("QUIT") + resp.encode("SET", "a", "behind QUIT"))
                    assert client.reply() == b"OK" and client.until_closed() == b"", f"seed {pair.seed}"
                return


def one_transaction(pair):
    """The commands of a transaction have the same replies as in Redis, and leave the same state."""
    group = [words for words in pair.some_commands(alone=True) if words[0] not in (b"RESET", b"SCAN", b"RANDOMKEY", b"DUMP", b"SLOWLOG")]
    theirs, ours = pair.connections()
    with theirs, ours:
        watched = [[b"WATCH", commands.key(pair.rng)]] if pair.rng.random() < 0.5 else []
        if watched and pair.rng.random() < 0.5:
            watched.append([b"SET", commands.key(pair.rng), b"since"])
        stream = [*watched, [b"MULTI"], *group, [b"EXEC"], [b"ECHO", b"marker"]]
        found = []
        for client in (theirs, ours):
            client.send(b"".join(resp.encode(*words) for words in stream))
            found.append(until(client, b"marker"))
        assert len(found[0]) == len(found[1]), f"seed {pair.seed}: {len(found[0])} {len(found[1])}"
        inside = None
        for words, expected, reply in zip(stream, *found):
            if words == [b"MULTI"]:
                inside = []
            elif inside is not None and expected == b"QUEUED":
                inside.append(words)
            if isinstance(expected, list) and words == [b"EXEC"]:
                assert isinstance(reply, list) and len(reply) == len(expected), f"seed {pair.seed}: {str(reply)[:300]}"
                for one, theirs_, ours_ in zip(inside, expected, reply):
                    pair.compare(one, theirs_, ours_)
                inside = None
            else:
                pair.compare(words, expected, reply)


def several(pair):
    """Concurrent connections, each with keys of its own."""
    clients = [pair.connections() for _ in range(4)]
    groups = []
    for number, (_, ours) in enumerate(clients):
        group = [own_keys(words, number) for words in pair.some_commands(alone=False)]
        groups.append([words for words in group if words])
        ours.send(b"".join(resp.encode(*words) for words in groups[-1]))
    for group, (theirs, ours) in zip(groups, clients):
        theirs.send(b"".join(resp.encode(*words) for words in group))
        for words in group:
            pair.compare(words, theirs.reply(), ours.reply())
        theirs.socket.close()
        ours.socket.close()


def own_keys(words, number):
    """The command on keys of this connection only; `None` for a command without keys."""
    name = words[0].upper()
    own = b"%d:" % number
    if name in (b"MSET", b"MSETNX"):
        return [words[0], *(own + word if at % 2 == 0 else word for at, word in enumerate(words[1:]))]
    if name in (b"RENAME", b"RENAMENX", b"COPY", b"LCS"):
        return [words[0], *(own + word for word in words[1:3]), *words[3:]]
    if name in (b"BITOP", b"OBJECT", b"MEMORY"):
        return [*words[:2], *(own + word for word in words[2:])]
    if name in (b"MGET", b"DEL", b"UNLINK", b"EXISTS", b"TOUCH"):
        return [words[0], *(own + word for word in words[1:])]
    if name in (b"SELECT", b"RESET", b"HELLO", b"AUTH", b"CLIENT", b"COMMAND", b"INFO", b"CONFIG", b"PING", b"ECHO", b"SWAPDB", b"TIME", b"FUNCTION", b"SLOWLOG", b"LATENCY", b"DEBUG"):
        return words
    if name in (b"FLUSHDB", b"FLUSHALL", b"QUIT", b"SHUTDOWN"):
        return None
    return [name, own + words[1], *words[2:]] if len(words) > 1 else words


def full_disk(pair):
    """The disk is full for a while: each refused command has one error and is not applied."""
    pair.disk.fill(0)
    theirs, ours = pair.connections()
    with theirs, ours:
        # The log's reserved space is used first.
        filling = [b"SET", b"filling", pair.rng.randbytes(LARGE)]
        while not isinstance(ours.call(*filling), resp.Error):
            theirs.call(*filling)
        for number in range(6):
            if number == 4:
                pair.disk.make_space()
            group = pair.some_commands(alone=True, most=60)
            for _ in range(10):
                group.insert(pair.rng.randint(0, len(group)), [b"SET", commands.key(pair.rng), pair.rng.randbytes(LARGE)])
            ours.send(b"".join(resp.encode(*words) for words in group))
            for words in group:
                reply = ours.reply()
                if isinstance(reply, resp.Error) and reply.startswith("MISCONF "):
                    assert "the disk is full" in reply, f"seed {pair.seed}: {words[:1]}: {reply}"
                    pair.refused += 1
                else:
                    pair.compare(words, theirs.call(*words), reply)
    pair.disk.make_space()
    with pair.ours.connect() as client:
        deadline = time.monotonic() + 30
        while isinstance(reply := client.call("SET", "space", "again"), resp.Error) or b"disk_full:1" in client.call("INFO", "persistence"):
            assert time.monotonic() < deadline, f"seed {pair.seed}: {reply}"
            time.sleep(0.02)
    with pair.theirs.connect() as client:
        client.call("SET", "space", "again")


def catch_up(pair, group, done):
    """Makes Redis execute as much of a pipeline as the node has executed; the node has answered the first `done` commands."""
    state = pair.state(pair.ours)
    with pair.theirs.connect() as client:
        for at, words in enumerate(group):
            if at >= done and pair.state(pair.theirs) == state:
                return
            client.call(*words)
    pair.same_state()


def about_keys(group):
    """The commands that concern keys, not the connection."""
    return [words for words in group if words[0] not in (b"RESET", b"HELLO", b"AUTH", b"CLIENT", b"QUIT")]


def cut(pair):
    """The connection is cut in the middle of a pipeline: a prefix of it is executed, and nothing else."""
    group = about_keys(pair.some_commands(alone=True))
    stream = b"".join(resp.encode(*words) for words in group)
    ours = pair.ours.connect()
    number = ours.call("CLIENT", "ID")
    ours.send(stream[: pair.rng.randint(0, len(stream))])
    if pair.rng.random() < 0.5:
        time.sleep(pair.rng.random() * 0.005)
    if pair.rng.random() < 0.5:
        # Closing resets the connection.
        ours.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ours.socket.close()
    with pair.ours.connect() as client:
        deadline = time.monotonic() + 20
        while client.call("CLIENT", "LIST", "ID", number):
            assert time.monotonic() < deadline, f"seed {pair.seed}: a connection that was cut is still there"
            time.sleep(0.002)
    # Its last writes may still be in flight: a write of the same core is answered after them.
    for _ in range(12):
        with pair.ours.connect() as client:
            client.call("DEL", "nothing")
    catch_up(pair, group, 0)


def kill(pair):
    """kill -9: all acknowledged writes survive, and a prefix of the others."""
    group = about_keys(pair.some_commands(alone=True))
    theirs, ours = pair.connections()
    with theirs, ours:
        ours.send(b"".join(resp.encode(*words) for words in group))
        done = pair.rng.randint(0, len(group))
        for words in group[:done]:
            pair.compare(words, theirs.call(*words), ours.reply())
        pair.ours.process.kill()
        pair.ours.process.wait()
    pair.ours.__exit__()
    pair.start()
    catch_up(pair, group[done:], 0)


ROUNDS = [(8, untroubled), (3, one_transaction), (5, several), (1, full_disk), (4, cut), (1, kill)]


def seeds(long):
    if "MILLRACE_SEED" in os.environ:
        return [int(os.environ["MILLRACE_SEED"])]
    return range(int(os.environ.get("MILLRACE_SEEDS", 100 if long else 3)))


@pytest.mark.timeout(3600)
def test_every_reply_equals_redis_s_under_faults(tmp_path, long):
    mount = tmp_path / "small"
    mount.mkdir()
    refused = 0
    for seed in seeds(long):
        # Its own directory, so that Redis loads no file of an earlier SAVE.
        root = tmp_path / str(seed)
        root.mkdir()
        with SmallDisk(mount) as disk, millrace.redis_server(root, root / "redis.log", "--databases", "1") as theirs:
            pair = Pair(seed, disk, theirs, root)
            pair.start()
            try:
                rounds = pair.rng.choices([make for _, make in ROUNDS], [weight for weight, _ in ROUNDS], k=30)
                for make in [*rounds, full_disk, kill]:
                    make(pair)
                    pair.same_state()
            finally:
                pair.ours.stop()
            refused += pair.refused
    assert refused > 0, "nothing was refused"
