#!/usr/bin/env python3
"""Compares `multi_get` of 64 cold keys with rocksdict, which is RocksDB, on the same data.

    python python/bench.py --data DIR [--keys N] [--value-size BYTES] [--seconds S] [--rounds N]

RocksDB makes a database of N keys in DIR and compacts it; both then read it in turns, in processes of their own: random
batches of 64 keys, from the disk (direct reads; the caches are far smaller than the data). Every value is checked. rocksdict
has a multi-get for a list of keys; it is also measured with `async_io`, which reads with io_uring where it was built in.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

BATCH = 64
CACHE = 32 << 20


def key(n):
    return b"%016d" % n


def value(n, size):
    return random.Random(n).randbytes(size)


def rocks_options():
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.set_use_direct_reads(True)
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(rocksdict.Cache(CACHE))
    table.set_bloom_filter(10, False)
    options.set_block_based_table_factory(table)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    return options


def make(directory, keys, size):
    import rocksdict

    rocks = rocksdict.Rdict(str(directory), rocks_options())
    for first in range(0, keys, 1000):
        batch = rocksdict.WriteBatch(raw_mode=True)
        for n in range(first, min(first + 1000, keys)):
            batch.put(key(n), value(n, size))
        rocks.write(batch)
    rocks.flush()
    rocks.compact_range(None, None)
    rocks.close()


def reader(which, directory):
    """A function that looks up a list of keys."""
    if which == "millrace":
        import millrace

        return millrace.open(directory, create=False, memory=2 * CACHE).multi_get
    import rocksdict

    rocks = rocksdict.Rdict(str(directory), rocks_options(), access_type=rocksdict.AccessType.read_only())
    options = rocksdict.ReadOptions()
    options.set_async_io(which == "rocksdict-async")
    return lambda keys: rocks.get(keys, read_opt=options)


def measure(which, directory, keys, size, seconds, seed):
    look_up = reader(which, directory)
    randoms = random.Random(seed)

    def batch():
        return [randoms.randrange(keys) for _ in range(BATCH)]

    for _ in range(20):
        look_up([key(n) for n in batch()])
    times, checked = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        numbers = batch()
        asked = [key(n) for n in numbers]
        began = time.perf_counter()
        found = look_up(asked)
        times.append(time.perf_counter() - began)
        checked.append((numbers[0], found[0]))
    assert all(got == value(n, size) for n, got in checked), "wrong values"
    return {"which": which, "batches": len(times), "median_ms": 1e3 * statistics.median(times)}


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=pathlib.Path, required=True, help="the directory of the database")
    arguments.add_argument("--keys", type=int, default=500_000)
    arguments.add_argument("--value-size", type=int, default=1000)
    arguments.add_argument("--seconds", type=float, default=5)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    arguments.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.data, given.keys, given.value_size, given.seconds, given.seed)))
        return
    if not (given.data / "CURRENT").exists():
        make(given.data, given.keys, given.value_size)
    os.sync()
    results = {}
    for round_ in range(given.rounds):
        for which in ("millrace", "rocksdict", "rocksdict-async"):
            command = [sys.executable, __file__, *sys.argv[1:], "--one", which, "--seed", str(round_)]
            said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            results.setdefault(which, []).append(said["median_ms"])
            print(f"{which:16} {said['median_ms']:8.3f} ms  ({said['batches']} batches of {BATCH})")
    ours = statistics.median(results.pop("millrace"))
    for which, medians in results.items():
        print(f"{which} / millrace: {statistics.median(medians) / ours:.2f}")


if __name__ == "__main__":
    main()
