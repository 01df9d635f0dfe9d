"""Merge operators and SingleDelete: RocksDB 7.8 and Millrace write to one directory in turn, and both read it after each round.

RocksDB writes operands, whose chains are split over files, levels, snapshots and the log. Millrace compacts and reads them, and
RocksDB compacts what Millrace left.
"""

import random
import re
import shutil

import alternating
import millrace
import pytest
import resp
import rocksdb78

KEYS = 40
SINGLES = 3  # Every third key is deleted by SingleDelete only, and never merged.


def number(value):
    return int.from_bytes(value, "little") if len(value) == 8 else 0


def append(delimiter):
    return lambda base, operand: operand if base is None else base + delimiter + operand


def xor(base, operand):
    size = max(len(base or b""), len(operand))
    left, right = ((part or b"").ljust(size, b"\0") for part in (base, operand))
    return bytes(a ^ b for a, b in zip(left, right))


OPERATORS = {
    "uint64add": lambda base, operand: (number(base or b"") + number(operand) & (1 << 64) - 1).to_bytes(8, "little"),
    "{id=stringappend;delimiter=|;}": append(b"|"),
    "{id=stringappend;delimiter=;}": append(b""),
    "{id=stringappendtest;delimiter=,-;}": append(b",-"),
    "put": lambda base, operand: operand,
    "max": lambda base, operand: max(base or b"", operand),
    "bytesxor": xor,
}
BLOBS = "enable_blob_files=true;min_blob_size=30;blob_file_size=3000;"


class Turns:
    """A directory that both engines write to, and what must be in it."""

    def __init__(self, operator, seed, directory, more=""):
        self.random = random.Random(f"merges {operator} {seed}")
        self.merge = OPERATORS[operator]
        self.text = f"merge_operator={operator};target_file_size_base=2000;compression=kNoCompression;{more}"
        self.ours = alternating.Ours(directory)
        self.data = directory / "db"
        self.copy = directory / "copy"
        self.model = {}

    def opened(self, data, automatic=False):
        text = self.text + f"disable_auto_compactions={'false' if automatic else 'true'};level0_file_num_compaction_trigger=2;"
        made = rocksdb78.options(text=text)
        return rocksdb78.opened(data, made, families={"default": made})

    def change(self, db):
        """Makes one change in RocksDB and in the model."""
        rng, model = self.random, self.model
        n = rng.randrange(KEYS)
        name, value = b"key%03d" % n, rng.randbytes(rng.choice([0, 7, 8, 8, 8, 9, 40]))
        if n % SINGLES == 0:
            if name in model:
                db.single_delete(name)
                del model[name]
            else:
                db.put(name, value)
                model[name] = value
            return
        dice = rng.random()
        if dice < 0.65:
            db._write("merge", "default", name, value)
            model[name] = self.merge(model.get(name), value)
        elif dice < 0.85:
            db.put(name, value)
            model[name] = value
        elif dice < 0.97:
            db.delete(name)
            model.pop(name, None)
        else:
            end = b"key%03d" % min(n + 4, KEYS)
            db.delete_range(name, end)
            for gone in [key for key in model if name <= key < end]:
                del model[gone]

    def theirs(self):
        rng = self.random
        with self.opened(self.data, automatic=rng.random() < 0.4) as db:
            for _ in range(rng.randrange(100, 300)):
                self.change(db)
                dice = rng.random()
                if dice < 0.05:
                    db.flush()
                elif dice < 0.09:
                    db.snapshot()
                elif dice < 0.10:
                    db.release()
                elif dice < 0.12:
                    start = rng.randrange(KEYS)
                    db.compact(b"key%03d" % start, b"key%03d" % (start + rng.randrange(8)))
            for _ in range(4):
                # So that our next opening compacts.
                self.change(db)
                db.flush()
            self.change(db)

    def mine(self):
        commands = []
        for n in self.random.sample([n for n in range(KEYS) if n % SINGLES], 4):
            name = b"key%03d" % n
            if self.random.random() < 0.5:
                self.model[name] = b"ours %d" % n
                commands.append(["SET", name, self.model[name]])
            else:
                self.model.pop(name, None)
                commands.append(["DEL", name])
        names = [b"key%03d" % n for n in range(KEYS)]
        self.ours.write(self.data, commands, self.random.random() < 0.4, {name: self.model.get(name) for name in names})

    def check(self, who, data=None):
        data, expected = data or self.data, sorted(self.model.items())
        pairs = [tuple(pair) for pair in millrace.scan(data)]
        assert pairs == expected, f"millrace {who}"
        pairs = [tuple(pair) for pair in millrace.scan(data, "--reverse")]
        assert pairs == expected[::-1], f"millrace backwards {who}"
        with self.ours.node(data) as node, node.connect() as client:
            names = [b"key%03d" % n for n in range(KEYS)]
            for found in (client.call("MGET", *names), client.pipeline([("GET", name) for name in names])):
                assert found == [self.model.get(name) for name in names], f"millrace's gets {who}"

    def check_theirs(self, who):
        shutil.copytree(self.data, self.copy)
        with self.opened(self.copy) as db:
            assert db.scan() == sorted(self.model.items()), f"RocksDB {who}"
            start = self.random.randrange(KEYS)
            db.compact(b"key%03d" % start, b"key%03d" % (start + 3))
            db.compact(bottommost=self.random.random() < 0.5)
            assert db.scan() == sorted(self.model.items()), f"RocksDB {who}, compacted"
        self.check(f"{who}, compacted by RocksDB", self.copy)
        shutil.rmtree(self.copy)


# Not `max` with blob files: RocksDB 7.8 returns a base value in a blob file after it has released its memory.
WITH_BLOBS = ["uint64add", "{id=stringappend;delimiter=|;}"]


@pytest.mark.parametrize("operator, more", [(operator, "") for operator in OPERATORS] + [(operator, BLOBS) for operator in WITH_BLOBS])
def test_both_engines_merge_what_the_other_left(operator, more, tmp_path, long):
    turns = Turns(operator, 1, tmp_path, more)
    for _ in range(30 if long else 3):
        turns.theirs()
        turns.check("after RocksDB")
        turns.mine()
        turns.check("after millrace")
        turns.check_theirs("after millrace")
    assert turns.ours.merges >= 1


def test_an_operator_that_is_not_built_in_is_an_error_of_its_keys(tmp_path):
    made = rocksdb78.options(text="merge_operator=sortlist")
    with rocksdb78.opened(tmp_path / "db", made) as db:
        db.put(b"plain", b"value")
        db._write("merge", "default", b"list", b"1,3")
    ours = alternating.Ours(tmp_path)
    for writes in (False, True):
        with ours.node(tmp_path / "db", writes=writes) as node, node.connect() as client:
            assert client.call("GET", "plain") == b"value"
            error = client.pipeline([("GET", "list")])[0]
            assert isinstance(error, resp.Error) and re.search("MergeSortOperator is not built in", str(error)), error
            assert client.call("PING") == b"PONG"
    # It was kept as it is.
    with rocksdb78.opened(tmp_path / "db", made) as db:
        db._write("merge", "default", b"list", b"2")
        assert db.get(b"list") == b"1,2,3"


def test_empty_values_are_removed_by_the_filter_of_the_options(tmp_path):
    text = "compaction_filter=RemoveEmptyValueCompactionFilter;disable_auto_compactions=true"
    with rocksdb78.opened(tmp_path / "db", rocksdb78.options(text=text)) as db:
        for n in range(5):
            db.put(b"empty", b"")
            db.put(b"key%d" % n, b"value")
            db.flush()
    ours = alternating.Ours(tmp_path)
    ours.write(tmp_path / "db", [], False, {b"key0": b"value"})
    assert ours.merges == 1
    assert [key for key, _ in millrace.scan(tmp_path / "db")] == [b"key%d" % n for n in range(5)]
