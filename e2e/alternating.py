"""Several engines write to one directory in turn, and all of them read it after each round.

The engines are Millrace, RocksDB 7.8 (through its C API) and a newer RocksDB (rocksdict). In a round one of them opens the
directory, writes a random history and stops or is killed. The history has everything that splits the versions of a key over
files or leaves tombstones: snapshots held across flushes and compactions, narrow compactions, trivial moves, SingleDeletes,
range deletions, blobs, keys at the borders of files. Then every engine must find exactly what a model holds, forwards and
backwards.

Before each round of ours RocksDB prepares every family for a compaction: narrow files in level 0, above keys whose versions
are split over files of level 1, or above pairs of SingleDelete and Put whose older Put is in a deep level. A run counts our
compactions.

    python3 e2e/alternating.py SEED...         runs these seeds
    python3 e2e/alternating.py FROM-TO         runs this range of seeds
      --rounds N      rounds of each (12)
      --keep          keeps the directory of a seed that fails
      --engines A,B   only these write: millrace, 7.8, newer

SingleDelete is used as RocksDB requires: for keys of their own, which are written once between two SingleDeletes.

Binaries with planted faults show that the test finds them (the names are in crates/lsm/src/write/picker and compaction_iter):

    cargo build -p millrace-cli --features lsm/mutants
    MILLRACE=target/debug/millrace MILLRACE_MUTANT=neighbours_stay_behind python3 e2e/alternating.py 0-5
    MILLRACE=target/debug/millrace MILLRACE_MUTANT=single_deletes_are_hidden python3 e2e/alternating.py 0-5
"""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

FAMILIES = ["default", "one", "blobs"]
KEYS = 60
ENGINES = ["millrace", "7.8", "newer"]
# Files of level 0 from which on Millrace compacts.
TRIGGER = 2


def key(n):
    """The n-th key. Every third is deleted by SingleDelete only."""
    return b"key%04d" % n


def single(name):
    """Whether a key is for SingleDelete."""
    return int(name[3:]) % 3 == 0


# ------------------------------------------------------------------------------------------------- RocksDB, as a process


class Newer:
    """rocksdict's RocksDB with the methods of rocksdb78.Database."""

    def __init__(self, path, families, read_only=False, **common):
        import rocksdict

        self.rocksdict = rocksdict
        names = {}
        for name, own in families.items():
            names[name] = self.options({**common, **own})
        access = rocksdict.AccessType.read_only() if read_only else rocksdict.AccessType.read_write()
        self.db = rocksdict.Rdict(str(path), self.options(common), names, access)
        self.families = {name: self.db if name == "default" else self.db.get_column_family(name) for name in families}
        self.snapshots = []

    def options(self, values):
        options, values = self.rocksdict.Options(raw_mode=True), dict(values)
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        tables = self.rocksdict.BlockBasedOptions()
        tables.set_format_version(5)  # the newest that 7.8 can read
        if block_size := values.pop("block_size", None):
            tables.set_block_size(block_size)
        options.set_block_based_table_factory(tables)
        renamed = {"level0_file_num_compaction_trigger": "level_zero_file_num_compaction_trigger"}
        for name, value in values.items():
            if name == "compression":
                options.set_compression_type(self.rocksdict.DBCompressionType.none())
            else:
                value = bool(value) if name in ("disable_auto_compactions", "enable_blob_files", "enable_blob_gc", "level_compaction_dynamic_level_bytes") else value
                getattr(options, "set_" + renamed.get(name, name))(value)
        return options

    def put(self, key, value, family):
        self.families[family][key] = value

    def delete(self, key, family):
        del self.families[family][key]

    def delete_range(self, start, end, family):
        self.families[family].delete_range(start, end)

    def snapshot(self):
        self.snapshots.append(self.db.snapshot())

    def release(self):
        if self.snapshots:
            self.snapshots.pop(0)

    def flush(self, family):
        self.families[family].flush()

    def compact(self, start, end, bottommost=False, level=None, *, family):
        options = self.rocksdict.CompactOptions()
        if level is not None:
            options.set_change_level(True)
            options.set_target_level(level)
        if bottommost:
            options.set_bottommost_level_compaction(self.rocksdict.BottommostLevelCompaction.force())
        self.families[family].compact_range(start, end, options)

    def get(self, key, family):
        return self.families[family].get(key)

    def scan(self, family, reverse=False):
        iterator = self.families[family].iter()
        iterator.seek_to_last() if reverse else iterator.seek_to_first()
        pairs = []
        while iterator.valid():
            pairs.append((iterator.key(), iterator.value()))
            iterator.prev() if reverse else iterator.next()
        iterator.status()
        return pairs

    def bounds(self):
        return [("", f["level"], f["start_key"], f["end_key"]) for f in self.db.live_files()]

    def close(self):
        self.snapshots.clear()
        for name, family in self.families.items():
            if name != "default":
                family.close()
        self.db.close()


def hexed(value):
    return value.hex() if isinstance(value, bytes) else [hexed(v) for v in value] if isinstance(value, (list, tuple)) else value


def open_engine(name, path, families, read_only, common):
    """Opens a directory with one of the RocksDBs."""
    if name == "newer":
        return Newer(path, families, read_only, **common)
    import rocksdb78

    common = {"create_missing_column_families": 1, **common}
    made = {family: rocksdb78.options(**(common | own)) for family, own in families.items()}
    return rocksdb78.open_families(path, rocksdb78.options(**common), made, read_only)


def serve_engine(name):
    """The process of one engine: a request per line, an answer per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        families = {f: request["own"].get(f, {}) for f in FAMILIES}
        db = open_engine(name, request["path"], families, request["read_only"], request["common"])
        for operation, *arguments in request["operations"]:
            if operation in ("snapshot", "release"):
                getattr(db, operation)()
                continue
            family, *arguments = arguments
            arguments = [bytes.fromhex(a[1:]) if isinstance(a, str) and a[:1] == "x" else a for a in arguments]
            getattr(db, operation)(*arguments, family=family)
        answer = {"bounds": hexed(db.bounds())}
        if request["killed"]:
            print(json.dumps(answer), file=answers, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if request["read"]:
            for family in FAMILIES:
                forwards, backwards = db.scan(family), db.scan(family, reverse=True)
                gets = [(k, v) for k in map(key, range(KEYS)) if (v := db.get(k, family)) is not None]
                answer[family] = hexed([forwards, backwards, gets])
        db.close()
        print(json.dumps(answer), file=answers, flush=True)


class Engine:
    """A process that opens directories with one of the RocksDBs."""

    def __init__(self, name):
        self.name = name
        self.process = None

    def ask(self, path, operations=(), read=False, killed=False, read_only=False, common=None, own=None):
        if self.process is None:
            self.log = tempfile.TemporaryFile()
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--engine", self.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
            )
        request = {"path": str(path), "operations": operations, "read": read, "killed": killed, "read_only": read_only}
        request |= {"common": common or {}, "own": own or {}}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer or killed:
            self.end()
        if not answer:
            self.log.seek(0)
            raise AssertionError(f"RocksDB {self.name}: {self.log.read().decode(errors='replace')[-3000:]}")
        return json.loads(answer)

    def end(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(60)
            self.process.stdout.close()
            self.process = None


# ------------------------------------------------------------------------------------------------------------ a history


class Run:
    """The rounds of one seed over one directory."""

    def __init__(self, seed, directory, engines=ENGINES):
        self.random = random.Random(f"alternating {seed}")
        self.directory = directory
        self.data = directory / "db"
        # These families are never compacted below level 1.
        self.flat = self.random.sample(FAMILIES, 2)
        self.model = {family: {} for family in FAMILIES}
        self.writers = engines
        self.engines = {name: Engine(name) for name in ("7.8", "newer")}
        self.borders = []
        self.said = []

    def options(self, prepares=False):
        """Options of a round: tiny files, and lower levels with little or much data."""
        rng = self.random
        common = {
            "write_buffer_size": 1 << 20,
            "target_file_size_base": rng.choice([600, 2000, 8000]),
            "max_bytes_for_level_base": rng.choice([6000, 30000, 10 << 20]),
            "max_bytes_for_level_multiplier": 3.0,
            "level0_file_num_compaction_trigger": rng.choice([2, 4, 12]),
            "disable_auto_compactions": int(rng.random() < 0.6),
            "compression": 0,
            "level_compaction_dynamic_level_bytes": 0,
        }
        blobs = {"enable_blob_files": 1, "min_blob_size": 60, "blob_file_size": 4000, "enable_blob_gc": int(rng.random() < 0.7)}
        blobs |= {"blob_gc_age_cutoff": rng.choice([0.25, 1.0])}
        own = {family: {"max_bytes_for_level_base": 10 << 20, "disable_auto_compactions": 1} for family in self.flat}
        if prepares:
            # Files of a few entries; flushed files stay in level 0.
            small = {"target_file_size_base": rng.choice([1, 60, 150]), "block_size": rng.choice([1, 1, 100])}
            own = {family: own.get(family, {}) | small | {"disable_auto_compactions": 1} for family in FAMILIES}
        own["blobs"] = own.get("blobs", {}) | blobs
        return common, own

    def some_key(self, window):
        """A key of the window, often at or next to the border of a file."""
        rng = self.random
        window = (min(window[0], KEYS - 1), max(window[1], window[0] + 1))
        if self.borders and rng.random() < 0.35:
            at = rng.choice(self.borders) + rng.choice([0, 0, 0, -1, 1])
        else:
            at = rng.randrange(*window)
        return key(min(max(at, window[0]), window[1] - 1))

    def window(self):
        """The key range of a round: all keys, or between the borders of files."""
        rng = self.random
        if rng.random() < 0.25:
            return 0, KEYS
        start = rng.choice(self.borders) + rng.choice([-1, 0, 0, 1]) if self.borders and rng.random() < 0.6 else rng.randrange(KEYS)
        start = min(max(start, 0), KEYS - 2)
        if self.borders and rng.random() < 0.5:
            end = rng.choice(self.borders) + rng.choice([0, 1, 1, 2])
            if end <= start:
                start, end = max(end - 2, 0), start + 1
        else:
            end = start + rng.randrange(2, 15)
        return start, min(max(end, start + 2), KEYS)

    def value(self):
        rng = self.random
        return b"%08x" % rng.getrandbits(32) + b"v" * rng.choice([0, 4, 30, 80, 300])

    def change(self, family, window, can_single):
        """Makes one change in the model; returns it as an operation."""
        rng, model = self.random, self.model[family]
        name = self.some_key(window)
        if single(name):
            if name in model:
                if not can_single:
                    return None
                del model[name]
                return ["single_delete", family, "x" + name.hex()]
            model[name] = self.value()
            return ["put", family, "x" + name.hex(), "x" + model[name].hex()]
        if rng.random() < 0.4:
            model.pop(name, None)
            return ["delete", family, "x" + name.hex()]
        model[name] = self.value()
        return ["put", family, "x" + name.hex(), "x" + model[name].hex()]

    def history(self, can_single):
        """RocksDB's operations of a round."""
        rng = self.random
        window, operations = self.window(), []
        for _ in range(rng.randrange(20, 160)):
            family = rng.choice(FAMILIES)
            if rng.random() < 0.02:
                window = self.window()
            dice = rng.random()
            if dice < 0.78:
                operations.append(self.change(family, window, can_single))
            elif dice < 0.80:
                start, end = sorted([self.some_key(window), self.some_key(window)])
                operations.append(["delete_range", family, "x" + start.hex(), "x" + end.hex()])
                for name in [name for name in self.model[family] if start <= name < end]:
                    del self.model[family][name]
            elif dice < 0.88:
                operations.append(["flush", family])
            elif dice < 0.93:
                operations.append(["snapshot"])
            elif dice < 0.95:
                operations.append(["release"])
            elif dice < 0.985:
                start, end = sorted([self.some_key((0, KEYS)), self.some_key((0, KEYS))])
                if rng.random() < 0.6:
                    end = start
                operations.append(["compact", family, "x" + start.hex(), "x" + end.hex()])
            else:
                deep = None if family in self.flat else rng.choice([None, 2, 4])
                operations.append(["compact", family, None, None, rng.random() < 0.5, deep])
        return [operation for operation in operations if operation]

    def split(self, family, window):
        """Versions of a few keys that a compaction splits over files of level 1, because snapshots need all of them."""
        rng, operations = self.random, []
        for _ in range(rng.randrange(4, 10)):
            operations += [self.change(family, (window, window + 3), True), ["snapshot"]]
            if rng.random() < 0.25:
                operations.append(["flush", family])
        return operations + [["flush", family], ["compact", family, None, None]]

    def pairs(self, family, window):
        """A key that is put in a deep level, and deleted by SingleDelete and put again above it."""
        rng, model = self.random, self.model[family]
        name, operations = key(window + -window % 3), []

        def put():
            model[name] = self.value()
            operations.append(["put", family, "x" + name.hex(), "x" + model[name].hex()])

        if name not in model:
            put()
        operations += [["flush", family], ["compact", family, None, None, False, 4]]
        operations.append(["single_delete", family, "x" + name.hex()])
        if rng.random() < 0.5:
            operations.append(["flush", family])
        put()
        return operations

    def narrow(self, family, window):
        """Files of level 0 of one or two keys."""
        rng, operations = self.random, []
        start = min(max(window + rng.randrange(-2, 4), 0), KEYS - 2)
        for _ in range(rng.randrange(4, 7)):
            operations += [["flush", family]] + [self.change(family, (start, start + rng.choice([1, 2])), True) for _ in range(rng.choice([1, 1, 2]))]
        return operations

    def prepare(self):
        """Makes our next opening compact every family. The last changes are in the log only, or in a file."""
        operations = []
        for family in FAMILIES:
            window = self.random.randrange(KEYS - 3)
            operations += self.split(family, window) if family in self.flat else self.pairs(family, window)
            operations += self.narrow(family, window)
            if self.random.random() < 0.7:
                operations.append(["flush", family])
        return operations

    def aftermath(self):
        """SingleDeletes above compacted keys, which meet them in narrow compactions."""
        operations = []
        for family in FAMILIES:
            names = [name for name in sorted(self.model[family]) if single(name)]
            for name in self.random.sample(names, min(len(names), 4)):
                del self.model[family][name]
                operations.append(["single_delete", family, "x" + name.hex()])
            operations.append(["flush", family])
            operations += [["compact", family, operation[2], operation[2]] for operation in operations if operation[0] == "single_delete" and operation[1] == family]
        return operations

    def their_round(self, name, prepares=False):
        common, own = self.options(prepares)
        can_single = name == "7.8"
        operations = self.aftermath() if can_single and self.random.random() < 0.7 else []
        if prepares:
            operations += self.prepare()
        else:
            operations += self.history(can_single)
        killed = self.random.random() < 0.3
        self.said.append(f"{name}: {len(operations)} operations, {'killed' if killed else 'closed'}, {common}")
        answer = self.engines[name].ask(self.data, operations, killed=killed, common=common, own=own)
        ends = [bytes.fromhex(end) for _, _, *bounds in answer["bounds"] for end in bounds]
        self.borders = sorted({int(end[3:7]) for end in ends if end[:3] == b"key" and end[3:7].isdigit()})

    def our_round(self, ours):
        rng = self.random
        for _ in range(rng.choice([1, 1, 2, 4])):
            window = self.window()
            changes = [self.change("default", window, False) for _ in range(rng.randrange(30))]
            commands = []
            for operation, _, *parts in filter(None, changes):
                parts = [bytes.fromhex(part[1:]) for part in parts]
                commands.append(["SET", *parts] if operation == "put" else ["DEL", *parts])
            killed = rng.random() < 0.4
            self.said.append(f"millrace: {len(commands)} commands, {'killed' if killed else 'closed'}")
            ours.write(self.data, commands, killed, {key(n): self.model["default"].get(key(n)) for n in range(KEYS)})

    def round(self, ours):
        name = self.random.choice(self.writers + [w for w in self.writers if w != "newer"])
        if not self.data.exists():
            name = "7.8"
        if name == "millrace":
            self.their_round("7.8", prepares=True)
            self.our_round(ours)
        else:
            self.their_round(name)
        self.compare("millrace", ours.read(self.data))
        for name, engine in self.engines.items():
            common, own = self.options()
            self.compare(f"RocksDB {name}", engine.ask(self.data, read=True, read_only=True, common=common, own=own))
            if self.random.random() < 0.25:
                # The same after RocksDB compacts the files, first narrow ranges and then everything.
                copy = self.directory / "copy"
                shutil.copytree(self.data, copy)
                narrow = [["compact", family, "x" + key(at).hex(), "x" + key(at).hex()] for family in FAMILIES for at in self.borders[::3]]
                whole = [["compact", family, None, None, True] for family in FAMILIES] if self.random.random() < 0.6 else []
                self.compare(f"RocksDB {name} after compacting", engine.ask(copy, narrow + whole, read=True, common=common, own=own))
                self.compare("millrace after its compacting", ours.read(copy))
                shutil.rmtree(copy)

    def compare(self, who, found):
        for family in FAMILIES:
            expected = sorted(self.model[family].items())
            forwards, backwards, gets = [[tuple(map(bytes.fromhex, pair)) for pair in pairs] for pairs in found[family]]
            for what, pairs in (("a scan", forwards), ("a scan backwards", backwards[::-1]), ("gets", gets)):
                there, wanted = dict(pairs), dict(expected)
                wrong = sorted(k for k in there.keys() | wanted.keys() if there.get(k) != wanted.get(k))
                short = {k.decode(): (there.get(k, b"-")[:8], wanted.get(k, b"-")[:8]) for k in wrong[:8]}
                assert pairs == expected, f"{who}, {what} of {family}: {len(wrong)} keys differ (found, expected): {short}"

    def end(self):
        for engine in self.engines.values():
            engine.end()


class Ours:
    """Millrace, through its command and its server."""

    def __init__(self, directory):
        import millrace

        self.millrace = millrace
        self.log = directory / "log"
        self.merges = 0
        self.environment = os.environ | {"XDG_STATE_HOME": str(directory / "state")}

    def node(self, data, writes=False):
        flags = ["--durability", "process"] if writes else []
        return self.millrace.node(data, self.log, "--memory", "64M", *flags, writes=writes, env=self.environment)

    def let_merge(self, data):
        """Millrace obeys OPTIONS: lets it compact, and early."""
        options = max(data.glob("OPTIONS-*"), key=lambda path: int(path.name[8:]))
        text = options.read_text().replace("disable_auto_compactions=true", "disable_auto_compactions=false")
        options.write_text(re.sub(r"level0_file_num_compaction_trigger=\d+", f"level0_file_num_compaction_trigger={TRIGGER}", text))

    def write(self, data, commands, killed, expected):
        self.let_merge(data)
        with self.node(data, writes=True) as node, node.connect() as client:
            for reply in client.pipeline(commands, 50):
                assert reply == b"OK" or isinstance(reply, int), reply
            found = client.call("MGET", *expected)
            assert dict(zip(expected, found)) == expected, "millrace, while it writes"
            # Gives level 0 time to be compacted.
            for _ in range(100):
                info = dict(line.split(":", 1) for line in client.call("INFO", "persistence").decode().splitlines() if ":" in line)
                assert info["write_failure"] == "", info["write_failure"]
                if int(info["level0_files"]) < TRIGGER and info["memtables_waiting"] == "0":
                    break
                time.sleep(0.005)
            self.merges += int(info["merges"])
            if killed:
                node.process.send_signal(signal.SIGKILL)
                node.process.wait(10)

    def read(self, data):
        found = {}
        for family in FAMILIES:
            pairs = []
            for more in ([], ["--reverse"]):
                pairs.append(self.millrace.scan(data, "--column-family", family, *more))
            found[family] = hexed([*pairs, pairs[0]])
        with self.node(data) as node, node.connect() as client:
            names = [key(n) for n in range(KEYS)]
            found["default"][2] = hexed([(k, v) for k, v in zip(names, client.call("MGET", *names)) if v is not None])
        return found


def run(seed, rounds, directory, engines=ENGINES):
    """Runs a seed; a difference is an AssertionError that names the seed and the command to repeat it."""
    directory.mkdir(parents=True, exist_ok=True)
    history, ours, number = Run(seed, directory, engines), Ours(directory), 0
    try:
        for number in range(1, rounds + 1):
            history.round(ours)
    except (AssertionError, RuntimeError, OSError, EOFError) as error:
        before = "\n  ".join(history.said[-6:])
        raise AssertionError(f"seed {seed}, round {number}: {error}\n  {before}\n  again: python3 e2e/alternating.py {seed} --rounds {number} --engines {','.join(engines)}") from error
    finally:
        history.end()
    return ours.merges


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        return serve_engine(arguments.engine)
    failed = 0
    for text in arguments.seeds:
        first, _, last = text.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            directory = pathlib.Path(tempfile.mkdtemp(prefix=f"alternating-{seed}-"))
            started, good = time.monotonic(), True
            try:
                merges = run(seed, arguments.rounds, directory, arguments.engines.split(","))
                print(f"seed {seed}: ok, {merges} merges of ours, {time.monotonic() - started:.1f} s", flush=True)
            except AssertionError as error:
                failed, good = failed + 1, False
                print(error, flush=True)
            if good or not arguments.keep:
                shutil.rmtree(directory)
            else:
                print(f"  its directory: {directory}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
