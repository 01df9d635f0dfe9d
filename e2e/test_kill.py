"""kill -9 under load, repeatedly: acknowledged writes survive, no MSET is half applied, and RocksDB agrees.

The expectations are kept here, outside the node. Each connection has keys of its own and sends its commands in pipelines, so at a
kill some commands are acknowledged, some applied and not acknowledged, and some not applied. Of the unacknowledged commands of a
key any number may have been applied, but in order.
"""

import contextlib
import random
import shutil
import subprocess
import sys
import threading
import time

import databases
import millrace
import pytest
import resp

CONNECTIONS = 4
KEYS = 60
PIPELINE = 24
# From 10 bytes to 100 KB; small values are far more frequent.
LENGTHS = [10] * 20 + [100] * 20 + [1000] * 10 + [4000] * 4 + [30_000] + [100_000]


class Command:
    """One command, its effect on each of its keys, and its reply given the keys' values."""

    def __init__(self, words, change, answer):
        self.words, self.change, self.answer = words, change, answer


def value(rng):
    """Random bytes, so that no two values are equal."""
    length = rng.choice(LENGTHS)
    stamp = b"%x" % rng.getrandbits(64)
    return (stamp + rng.randbytes(min(length, 64)) * (length // 64 + 1))[:length]


def commands(rng, number):
    """An endless sequence of commands of connection `number`."""
    key = lambda kind: b"%s:%d:%d" % (kind, number, rng.randrange(KEYS))  # noqa: E731
    while True:
        match rng.randrange(10):
            case 0:
                yield delete([key(b"s"), key(b"s"), key(b"c")])
            case 1 | 2:
                yield increment(key(b"c"), rng.randrange(1, 1000))
            case 3:
                yield append(key(b"a"), value(rng)[:2000])
            case 4:
                yield put(key(b"a"), value(rng)[:50])
            case 5:
                # Keys that only MSET writes, always together: half an MSET would show.
                group, token = rng.randrange(KEYS), value(rng)[:500]
                yield put_all({b"m:%d:%d:%d" % (number, group, part): token for part in range(4)})
            case _:
                yield put(key(b"s"), value(rng))


def put(key, new):
    return Command((b"SET", key, new), {key: lambda old: new}, lambda old: b"OK")


def put_all(pairs):
    words = (b"MSET", *(word for pair in pairs.items() for word in pair))
    return Command(words, {key: lambda old, new=new: new for key, new in pairs.items()}, lambda old: b"OK")


def delete(keys):
    keys = list(dict.fromkeys(keys))
    return Command((b"DEL", *keys), dict.fromkeys(keys, lambda old: None), lambda old: sum(old[key] is not None for key in keys))


def increment(key, by):
    grown = lambda old: b"%d" % (int(old or 0) + by)  # noqa: E731
    return Command((b"INCRBY", key, b"%d" % by), {key: grown}, lambda old: int(grown(old[key])))


def append(key, more):
    grown = lambda old: (old or b"") + more  # noqa: E731
    return Command((b"APPEND", key, more), {key: grown}, lambda old: len(grown(old[key])))


class Writer:
    """One connection's commands, and the expected values of its keys."""

    def __init__(self, number, rng):
        self.rng = rng
        self.commands = commands(rng, number)
        self.known = {}  # the acknowledged values; a key that is missing here is absent
        self.pending = []  # sent, or about to be, and not acknowledged
        self.acknowledged = 0
        self.wrong = None

    def run(self, port, stop):
        """Sends until stopped, or until the node is gone."""
        try:
            with resp.Connection(port) as client:
                while not stop.is_set():
                    self.pending = [next(self.commands) for _ in range(self.rng.randint(1, PIPELINE))]
                    client.send(b"".join(resp.encode(*command.words) for command in self.pending))
                    while self.pending:
                        self.acknowledge(client.reply())
        except (resp.Closed, OSError):
            pass
        except Exception as error:  # reported by the test, in another thread
            self.wrong = error

    def acknowledge(self, reply):
        command = self.pending[0]
        expected = command.answer({key: self.known.get(key) for key in command.change})
        assert reply == expected, f"{command.words[:2]}: {reply!r} instead of {expected!r}"
        self.make(command)
        del self.pending[0]
        self.acknowledged += 1

    def make(self, command):
        for key, change in command.change.items():
            new = change(self.known.get(key))
            if new is None:
                self.known.pop(key, None)
            else:
                self.known[key] = new

    def possible(self):
        """{key: its possible values} for the keys of unacknowledged commands."""
        states = {}
        for command in self.pending:
            for key, change in command.change.items():
                before = states.setdefault(key, [self.known.get(key)])
                before.append(change(before[-1]))
        return states

    def settle(self, found):
        """Compares with the values found, and adopts them. `found` has all keys of this connection."""
        possible = self.possible()
        for key in self.known.keys() | possible.keys() | found.keys():
            allowed = possible.get(key, [self.known.get(key)])
            there = found.get(key)
            if there not in allowed:
                raise AssertionError(f"{key}: found {brief(there)}, expected one of {[brief(one) for one in allowed]}")
        for key in found:
            if key.startswith(b"m:"):
                group = key.rpartition(b":")[0]
                assert len({found.get(b"%s:%d" % (group, part)) for part in range(4)}) == 1, f"half of an MSET was applied: {key}"
        self.known, self.pending = dict(found), []


def brief(what):
    return what if what is None or len(what) < 60 else b"%s... (%d bytes)" % (what[:40], len(what))


def serve(data, log, durability, driver):
    port = millrace.free_port()
    arguments = ["serve", "--data", data, "--listen", f"127.0.0.1:{port}", "--durability", durability]
    # Little memory: memtables are small, and kills hit flushes and compactions.
    arguments += ["--cores", "2", "--memory", "64M", "--io", driver]
    return millrace.Server([millrace.BINARY, *arguments], port, log)


def all_pairs(client):
    """All keys and values, read page by page."""
    pairs, start = {}, b"-"
    while True:
        flat = client.call("MR.RANGE", start, "+", "LIMIT", 200)
        pairs.update(zip(flat[::2], flat[1::2]))
        if len(flat) < 400:
            return pairs
        start = b"(" + flat[-2]


def kill(server):
    server.process.kill()
    server.process.wait()


def one_cycle(data, log, durability, rng, writers, cycle):
    """Starts a node, compares, writes, and kills it."""
    driver = "epoll" if cycle % 4 == 3 else "auto"
    if cycle % 5 == 4:
        # A kill while the node opens its database.
        server = serve(data, log, durability, driver)
        time.sleep(rng.uniform(0, 0.06))
        kill(server)
    with serve(data, log, durability, driver) as node:
        with node.connect() as client:
            found = all_pairs(client)
            settle(writers, found)
            # Until RocksDB has written there, too.
            assert node.counts_keys() == (cycle < JUDGED_EVERY)
            if node.counts_keys():
                assert client.call("DBSIZE") == len(found)
        stop = threading.Event()
        threads = [threading.Thread(target=writer.run, args=(node.port, stop)) for writer in writers]
        for thread in threads:
            thread.start()
        time.sleep(rng.uniform(0.02, 0.25))
        assert node.alive(), node.said()
        kill(node)
        stop.set()
        for thread in threads:
            thread.join()
    for writer in writers:
        if writer.wrong:
            raise writer.wrong


def settle(writers, found):
    for number, writer in enumerate(writers):
        writer.settle({key: what for key, what in found.items() if int(key.split(b":")[1]) == number})


def ldb(directory, *arguments):
    # The newer RocksDB writes an options file with names that the older one does not know.
    return databases.ldb(directory, *arguments, "--ignore_unknown_options")


def their_pairs(directory):
    pairs = {}
    for line in ldb(directory, "scan", "--hex").splitlines():
        key, what = line.split(" : ")
        pairs[bytes.fromhex(key[2:])] = bytes.fromhex(what[2:])
    return pairs


NEWER = """
import rocksdict, sys
whole, families = rocksdict.Options.load_latest(sys.argv[1], ignore_unknown_options=True)
whole.set_paranoid_checks(True)
db = rocksdict.Rdict(sys.argv[1], whole, families)
def scan():
    checked = rocksdict.ReadOptions()
    checked.set_verify_checksums(True)
    return dict(db.items(read_opt=checked))
before = scan()
db.compact_range(None, None)
assert scan() == before, "compacting changed something"
db.close()
for key, what in before.items():
    print(key.hex(), what.hex())
"""


JUDGED_EVERY = 10


def judge(data, copy, writers):
    """RocksDB 7.8 opens a copy for writing, then 9.8: both find the promised values; we continue with their directory."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(data, copy)
    ldb(copy, "checkconsistency")
    found = their_pairs(copy)
    settle(writers, found)
    ldb(copy, "compact")
    assert their_pairs(copy) == found
    newer = subprocess.run([sys.executable, "-c", NEWER, str(copy)], capture_output=True, text=True, timeout=120)
    assert newer.returncode == 0, newer.stderr[-3000:]
    read = {}
    for line in newer.stdout.splitlines():
        key, what = line.split(" ")
        read[bytes.fromhex(key)] = bytes.fromhex(what)
    assert read == found
    with contextlib.suppress(FileNotFoundError):
        (copy / "rocksdict-config.json").unlink()
    assert millrace.said_json("kv", "check", "--data", copy)["ok"]
    shutil.rmtree(data)
    copy.rename(data)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("durability", ["process", "power"])
def test_kill_9_loses_no_acknowledged_write(tmp_path, long, durability):
    cycles = 1000 if long else 50
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    writers = [Writer(number, random.Random(seed + number + 1)) for number in range(CONNECTIONS)]
    data, log = tmp_path / "db", tmp_path / "log"
    for cycle in range(cycles):
        one_cycle(data, log, durability, rng, writers, cycle)
        if cycle % JUDGED_EVERY == JUDGED_EVERY - 1:
            judge(data, tmp_path / "copy", writers)
    with serve(data, log, durability, "auto") as node, node.connect() as client:
        settle(writers, all_pairs(client))
    print(f"{sum(writer.acknowledged for writer in writers)} commands were acknowledged")
    assert all(writer.acknowledged > cycles for writer in writers)


def test_the_checker_notices_wrong_values():
    """Tests the expectations themselves: a writer with unacknowledged commands, and the values that may and may not follow."""

    def fails(**found):
        writer = Writer(0, random.Random(1))
        writer.known = {b"s:0:1": b"old", b"c:0:1": b"5", b"s:0:2": b"kept", **{b"m:0:1:%d" % part: b"one" for part in range(4)}}
        writer.pending = [put(b"s:0:1", b"new"), increment(b"c:0:1", 2), delete([b"s:0:1"]), append(b"a:0:1", b"x"), put_all({b"m:0:1:%d" % part: b"two" for part in range(4)})]
        there = {**writer.known, **{name.replace("_", ":").encode(): what for name, what in found.items()}}
        try:
            writer.settle({key: what for key, what in there.items() if what is not None})
        except AssertionError:
            return True
        assert writer.known == {key: what for key, what in there.items() if what is not None}
        return False

    two = {f"m_0_1_{part}": b"two" for part in range(4)}
    # No command was applied; some; all.
    assert not fails()
    assert not fails(s_0_1=b"new", c_0_1=b"7")
    assert not fails(s_0_1=None, c_0_1=b"7", a_0_1=b"x", **two)
    # An acknowledged value is lost, or a value was never written, or it belongs to another key.
    assert fails(s_0_2=None) and fails(s_0_2=b"other") and fails(s_0_3=b"strange")
    # Applied twice; applied to another value; half applied.
    assert fails(c_0_1=b"9") and fails(c_0_1=b"2") and fails(c_0_1=None) and fails(a_0_1=b"xx")
    assert fails(m_0_1_0=b"two") and fails(**{**two, "m_0_1_3": b"one"})
