"""Makes databases with rocksdict whose writes are still in the log, and dies without closing them.

    write_logs.py CASE DIR

writes a database into DIR/db and its contents, as rocksdict reads them, into DIR/expected: lines `FAMILY KEYHEX VALUEHEX`,
and one line `sequence N`. The process then kills itself, so nothing is flushed.
"""

import os
import pathlib
import random
import re
import signal
import sys
import time

from rocksdict import Options, Rdict, WriteBatch


def options():
    opt = Options(raw_mode=True)
    opt.create_if_missing(True)
    return opt


def edited(db, changes):
    """Options that have no setter: write an OPTIONS file, change its lines, load it."""
    Rdict(db, options()).close()
    newest = max(pathlib.Path(db).glob("OPTIONS-*"))
    text = newest.read_text()
    for key, value in changes.items():
        text, count = re.subn(rf"(?m)^  {key}=.*$", f"  {key}={value}", text)
        assert count, key
    newest.write_text(text)
    opt, families = Options.load_latest(db)
    return opt, families


def finish(root, sequence, families):
    with open(root / "expected", "w") as out:
        for name, family in families.items():
            for key, value in family.items():
                out.write(f"{name} {key.hex()} {value.hex()}\n")
        out.write(f"sequence {sequence}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def families(root):
    """Every operation rocksdict has, in four column families: one flushed in between, one dropped."""
    rng = random.Random(7)
    db = Rdict(str(root / "db"), options())
    all = {"default": db}
    for name in ["flushed", "other", "gone"]:
        all[name] = db.create_column_family(name, options())
    key = lambda: b"key%04d" % rng.randrange(3000)

    def work(steps, prefix=b""):
        for step in range(steps):
            family = all[rng.choice(list(all))]
            kind = rng.randrange(20)
            if kind < 12:
                family[prefix + key()] = rng.randbytes(rng.choice([0, 3, 100, 70000 if step % 50 == 0 else 5]))
            elif kind < 15:
                family.delete(prefix + key())
            elif kind == 15:
                first = rng.randrange(2900)
                family.delete_range(prefix + b"key%04d" % first, prefix + b"key%04d" % (first + 90))
            elif kind == 16:
                family.put_entity(prefix + key(), names=[b"", b"a", b"b"], values=[b"plain", b"1", b""])
            else:
                batch = WriteBatch(raw_mode=True)
                for _ in range(rng.randrange(30)):
                    name = rng.choice(list(all))
                    batch.put(prefix + key(), b"in a batch", db.get_column_family_handle(name))
                    batch.delete(prefix + key(), db.get_column_family_handle(name))
                db.write(batch)

    work(1500)
    all["flushed"].delete_range(b"", b"\xff")
    all["flushed"].flush(True)
    work(1500, b"new")
    del all["gone"]
    db.drop_column_family("gone")
    work(500, b"new")
    finish(root, db.latest_sequence_number(), all)


def compressed(root):
    """A log compressed with zstd, large values among small ones."""
    opt, families = edited(str(root / "db"), {"wal_compression": "kZSTD"})
    db = Rdict(str(root / "db"), opt, families)
    rng = random.Random(8)
    for i in range(4000):
        size = 120000 if i % 500 == 0 else rng.randrange(200)
        db[b"%08d" % rng.randrange(2000)] = rng.randbytes(size // 2) + bytes(size - size // 2)
    finish(root, db.latest_sequence_number(), {"default": db})


def recycled(root):
    """Recycled logs: the last one has the bytes of an older one after its end."""
    opt = options()
    opt.set_recycle_log_file_num(3)
    db = Rdict(str(root / "db"), opt)
    for round in range(12):
        for i in range(2000 if round < 11 else 700):
            db[b"%02d-%06d" % (round, i)] = b"v" * (30 + round * 7)
        if round < 11:
            db.flush(True)
    finish(root, db.latest_sequence_number(), {"default": db})


def blobs(root):
    """Blob files with some values that died in compactions."""
    opt = options()
    opt.set_enable_blob_files(True)
    opt.set_min_blob_size(100)
    opt.set_enable_blob_gc(True)
    opt.set_blob_gc_age_cutoff(0.5)
    opt.set_disable_auto_compactions(True)
    db = Rdict(str(root / "db"), opt)
    for round in range(6):
        for i in range(0, 500, 1 + round % 3):
            db[b"%06d" % i] = bytes([round]) * 500
        db.flush(True)
        if round % 2:
            db.compact_range(None, None)
    finish(root, db.latest_sequence_number(), {"default": db})


def atomic(root):
    """Atomic flushes of several column families, because one memtable was full."""
    def small():
        opt = options()
        opt.set_atomic_flush(True)
        opt.set_write_buffer_size(1 << 16)
        opt.set_disable_auto_compactions(True)
        return opt

    db = Rdict(str(root / "db"), small())
    all = {"default": db}
    for name in ["one", "two"]:
        all[name] = db.create_column_family(name, small())
    for round in range(5):
        for i in range(100):
            for family in all.values():
                family[b"%02d-%04d" % (round, i)] = bytes(1000)
    while any(
        int(family.property_value(f"rocksdb.{name}"))
        for family in all.values()
        for name in ["num-immutable-mem-table", "mem-table-flush-pending", "num-running-flushes"]
    ):
        time.sleep(0.01)
    finish(root, db.latest_sequence_number(), all)


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[2])
    globals()[sys.argv[1]](root)
