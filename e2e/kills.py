"""Kills a process that uses every kind of write, again and again, and has two RocksDBs judge what it leaves.

The process is crates/lsm/examples/stress: puts, deletes, range deletes, merges, SingleDeletes and large values in batches over
several column families, ingestions, compactions of ranges of keys, checkpoints. Its history is a function of a seed. A file that
survives it says which step was acknowledged and which was to be written; it compares the database with the history when it is
started again.

Every directory that a kill leaves is read by RocksDB 7.8. Some are copied: both RocksDBs write, compact and scan the copy, which
then takes the place of the original. Checkpoints are opened by all three engines.

    python3 e2e/kills.py --kills 1000 [--seed N] [--durability process|power] [--directory DIR]

A run begins a new directory after fifty kills. A failure names its seed and leaves its directory.
"""

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import millrace  # noqa: E402

STRESS = pathlib.Path(os.environ.get("MILLRACE_STRESS", millrace.TARGET / "debug" / "examples" / "stress"))
FAMILIES = ["default", "sums", "large"]
FOREVER = (1 << 64) - 1
# A key of every family before the first step, and one of a judge, which is not in the history.
FIRST = (b"first", b"original")
THEIRS = b"theirs"
# Kills until a directory is judged by being written to.
JUDGED_EVERY = 5
KILLS_OF_A_DIRECTORY = 50


class Wrong(AssertionError):
    """The database is not what it should be."""


# ------------------------------------------------------------------------------------------------------------ the judges


def options_text(rng):
    """Options of the families: small files, so that a few hundred kilobytes fill several levels."""
    compression = rng.choice(["kNoCompression", "kSnappyCompression", "kLZ4Compression", "kZSTD"])
    tables = rng.choice(["", "block_based_table_factory={filter_policy=bloomfilter:10:false;partition_filters=true;index_type=kTwoLevelIndexSearch;metadata_block_size=300};"])
    common = (
        f"compression={compression};{tables}write_buffer_size=1000000;target_file_size_base={rng.choice([8000, 40000])};"
        f"max_bytes_for_level_base={rng.choice([30000, 200000])};max_bytes_for_level_multiplier=4;level0_file_num_compaction_trigger=2;"
        f"level_compaction_dynamic_level_bytes={rng.choice(['true', 'false'])};create_missing_column_families=true;"
    )
    return {
        "default": common + "merge_operator=stringappend;",
        "sums": common + "merge_operator=uint64add;",
        "large": common + rng.choice(["", "enable_blob_files=true;min_blob_size=2000;blob_file_size=200000;enable_blob_garbage_collection=true;"]),
    }


class Older:
    """RocksDB 7.8, with the options of the OPTIONS file as `texts` made it."""

    def __init__(self, path, texts, read_only):
        import rocksdb78

        made = {name: rocksdb78.options(text=text) for name, text in texts.items()}
        self.db = rocksdb78.open_families(path, made["default"], made, read_only)

    def make(self):
        """Makes a table in every family: it tells us the merge operator."""
        for family in FAMILIES:
            self.db.put(*FIRST, family)
            self.db.flush(family)

    def scan(self, family):
        return self.db.scan(family)

    def change(self):
        for family in FAMILIES:
            self.db.put(THEIRS, b"1" * 8, family)
            self.db.flush(family)
            self.db.delete(THEIRS, family)
            self.db.compact(b"key0010", b"key0012", family=family)
            self.db.compact(bottommost=True, family=family)

    def close(self):
        self.db.close()


class Newer:
    """A newer RocksDB, with the options of the OPTIONS file."""

    def __init__(self, path, _texts, read_only):
        import rocksdict

        whole, families = rocksdict.Options.load_latest(str(path), ignore_unknown_options=True)
        whole.set_paranoid_checks(True)
        access = rocksdict.AccessType.read_only() if read_only else rocksdict.AccessType.read_write()
        self.db = rocksdict.Rdict(str(path), whole, families, access)
        self.families = {name: self.db if name == "default" else self.db.get_column_family(name) for name in FAMILIES}

    def scan(self, family):
        return list(self.families[family].items())

    def change(self):
        for family in self.families.values():
            family[THEIRS] = b"1" * 8
            family.flush()
            del family[THEIRS]
            family.compact_range(None, None)

    def close(self):
        for name, family in self.families.items():
            if name != "default":
                family.close()
        self.db.close()


def expect(seed, step):
    """What the families must hold after a step."""
    said = subprocess.run([STRESS, "expect", str(seed), str(step)], capture_output=True, text=True, check=True).stdout
    found = {name: [] for name in FAMILIES}
    for line in said.splitlines():
        name, key, value = (line + " ").split(" ")[:3]
        found[name].append((bytes.fromhex(key), bytes.fromhex(value)))
    return found


def compare(seed, found):
    """Compares what a judge found with the history; returns its step."""
    step = int(dict(found["default"]).get(b"last", b"0"))
    expected = expect(seed, step)
    for name in FAMILIES:
        if found[name] != expected[name]:
            is_, should = dict(found[name]), dict(expected[name])
            wrong = sorted(key for key in is_.keys() | should.keys() if is_.get(key) != should.get(key))
            short = {key: ((is_.get(key) or b"-")[:40], (should.get(key) or b"-")[:40]) for key in wrong[:5]}
            raise Wrong(f"step {step}, family {name}: {len(wrong)} keys differ (found, expected): {short}")
    return step


def serve_judge(name):
    """The process of one judge: a request per line, an answer per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            engine = {"7.8": Older, "newer": Newer}[name]
            db = engine(request["path"], request["texts"], request["does"] == "read")
            if request["does"] == "make":
                db.make()
            step = compare(request["seed"], {family: db.scan(family) for family in FAMILIES})
            if request["does"] == "change":
                db.change()
                after = compare(request["seed"], {family: db.scan(family) for family in FAMILIES})
                assert after == step, (after, step)
            db.close()
            answer = {"step": step}
        except (AssertionError, RuntimeError) as error:
            answer = {"error": str(error)}
        except Exception as error:  # rocksdict has exceptions of its own
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)


class Judge:
    """A process with one of the RocksDBs, which may end with one of its assertions."""

    def __init__(self, name, log):
        self.name, self.log = name, open(log, "w+b")
        command = [sys.executable, __file__, "--judge", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)

    def ask(self, path, texts, seed, does="read"):
        """The step that a directory has come to."""
        request = {"path": str(path), "texts": texts, "seed": seed, "does": does}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.log.seek(0)
            raise Wrong(f"RocksDB {self.name} ended: {self.log.read().decode(errors='replace')[-2000:]}")
        answer = json.loads(answer)
        if "error" in answer:
            raise Wrong(f"RocksDB {self.name}: {answer['error']}")
        return answer["step"]

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.log.close()


# -------------------------------------------------------------------------------------------------------------- the kills


class Kills:
    """Kills over one directory."""

    def __init__(self, seed, durability, directory):
        self.seed, self.durability = seed, durability
        self.random = random.Random(f"kills {seed} {durability}")
        self.data = directory / "db"
        self.log = directory / "log"
        self.copies = directory / "db.copies"
        self.texts = options_text(self.random)
        self.acknowledged = 0
        self.judges = {name: Judge(name, directory / f"log.{name}") for name in ("7.8", "newer")}
        # RocksDB makes the directory, its families and its options.
        self.judges["7.8"].ask(self.data, self.texts, seed, "make")

    def stress(self, steps=FOREVER):
        """The process: after its first line it has compared the database with the history, and writes."""
        log = open(self.log, "wb")
        command = [STRESS, "run", self.data, str(self.seed), self.durability, str(steps)]
        with log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def failed(self, process):
        raise Wrong(f"the process ended with {process.wait()}: {self.log.read_text(errors='replace')[-3000:]}")

    def kill(self):
        """One cycle: the process starts, compares, writes, and is killed; sometimes it closes the database."""
        rng = self.random
        if rng.random() < 0.15:
            # While it opens the database.
            process = self.stress()
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            process.wait()
            process.stdout.close()
        closes = rng.random() < 0.1
        process = self.stress(rng.randrange(1, 800) if closes else FOREVER)
        with process.stdout:
            said = process.stdout.readline()
            if not said.startswith("ready "):
                self.failed(process)
            self.acknowledged = int(said.split()[1])
            if closes:
                if not process.stdout.readline().startswith("closed ") or process.wait(60) != 0:
                    self.failed(process)
                return
            time.sleep(rng.choice([0.01, 0.05, 0.2, 0.4]) * rng.uniform(0.2, 1.0))
            if process.poll() is not None:
                self.failed(process)
            process.kill()
            process.wait()

    def judge(self, changes):
        """RocksDB reads the directory; or both write and compact a copy, which then is the directory."""
        expected = self.data.with_name("db.expected").read_bytes()
        intended, acknowledged = (int.from_bytes(expected[at : at + 8], "little") for at in (0, 8))
        asked = [self.data]
        if changes:
            copy = self.data.with_name("copy")
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self.data, copy)
            self.check_tables(copy)
            asked = [copy, copy]
        for path, judge in zip(asked, self.judges.values()):
            step = judge.ask(path, self.texts, self.seed, "change" if changes else "read")
            if not acknowledged <= step <= intended:
                raise Wrong(f"RocksDB {judge.name} finds step {step}: acknowledged {acknowledged}, intended {intended}")
        if changes:
            (copy / "rocksdict-config.json").unlink(missing_ok=True)
            shutil.rmtree(self.data)
            copy.rename(self.data)

    def check_tables(self, path):
        """RocksDB's own checks of a directory and of its tables."""
        ldb = ["ldb", f"--db={path}", "--ignore_unknown_options", "checkconsistency"]
        done = subprocess.run(ldb, capture_output=True, text=True)
        if done.returncode != 0 or "OK" not in done.stdout:
            raise Wrong(f"ldb checkconsistency: {done.stdout}{done.stderr}")
        # A kill leaves tables that are not finished and that no MANIFEST names; the next opening removes them.
        ldb[-1] = "list_live_files_metadata"
        done = subprocess.run(ldb, capture_output=True, text=True)
        live = set(re.findall(r"\d+\.sst", done.stdout))
        if done.returncode != 0 or "Live SST Files" not in done.stdout:
            raise Wrong(f"ldb list_live_files_metadata: {done.stdout}{done.stderr}")
        tables = path.with_name("tables")
        shutil.rmtree(tables, ignore_errors=True)
        tables.mkdir()
        for name in live:
            os.link(path / name, tables / name)
        done = subprocess.run(["sst_dump", f"--file={tables}", "--command=verify"], capture_output=True, text=True)
        said = done.stdout + done.stderr
        if done.returncode != 0 or "Corruption" in said or "is corrupted" in said:
            raise Wrong(f"sst_dump --command=verify: {said[-2000:]}")

    def check_copies(self):
        """Opens the checkpoints that were made, and removes them."""
        if not self.copies.exists():
            return
        for copy in self.copies.iterdir():
            # An interrupted checkpoint has another name.
            if copy.name.isdigit():
                done = subprocess.run([STRESS, "check", copy, str(self.seed)], capture_output=True, text=True)
                if done.returncode != 0:
                    raise Wrong(f"checkpoint {copy.name}: {done.stderr[-3000:]}")
                steps = {int(done.stdout)}
                steps |= {judge.ask(copy, self.texts, self.seed) for judge in self.judges.values()}
                if len(steps) != 1 or min(steps) < int(copy.name):
                    raise Wrong(f"checkpoint {copy.name}: steps {steps}")
            shutil.rmtree(copy)

    def run(self, kills):
        """Returns the number of steps that the history went."""
        for cycle in range(kills):
            self.kill()
            if cycle % JUDGED_EVERY == JUDGED_EVERY - 1:
                self.check_copies()
                self.judge(changes=True)
            else:
                self.judge(changes=False)
        process = self.stress(1)
        with process.stdout:
            if not process.stdout.readline().startswith("ready ") or process.wait(60) != 0:
                self.failed(process)
        return self.acknowledged

    def end(self):
        for judge in self.judges.values():
            judge.end()


def run(seed, durability, kills, directory):
    """Kills the process this often; a difference is an AssertionError that names the seed."""
    directory.mkdir(parents=True, exist_ok=True)
    history = Kills(seed, durability, directory)
    try:
        return history.run(kills)
    except Wrong as error:
        again = f"python3 e2e/kills.py --kills {kills} --seed {seed} --durability {durability}"
        raise AssertionError(f"{error}\n  its directory: {directory}\n  again (kills strike at other moments): {again}") from error
    finally:
        history.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=KILLS_OF_A_DIRECTORY)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--durability", choices=["process", "power"], help="both in turn, unless given")
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--judge", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.judge:
        return serve_judge(arguments.judge)
    left, seed = arguments.kills, arguments.seed
    while left > 0:
        kills = min(left, KILLS_OF_A_DIRECTORY)
        durability = arguments.durability or ["process", "power"][seed % 2]
        directory = pathlib.Path(tempfile.mkdtemp(prefix=f"kills-{seed}-", dir=arguments.directory))
        started = time.monotonic()
        try:
            steps = run(seed, durability, kills, directory)
        except AssertionError as error:
            print(error, flush=True)
            return 1
        print(f"seed {seed}, {durability}: {kills} kills, {steps} steps, {time.monotonic() - started:.1f} s", flush=True)
        shutil.rmtree(directory)
        left, seed = left - kills, seed + 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
