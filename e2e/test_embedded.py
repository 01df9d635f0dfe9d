"""The crate `millrace`: RocksDB opens what a program wrote with it, goes on, and the program reads that."""

import os
import pathlib
import subprocess

import databases
import millrace
import rocksdict

BLOCKING = pathlib.Path(os.environ.get("MILLRACE_EXAMPLE", millrace.TARGET / "debug" / "examples" / "blocking"))


def run(data):
    return subprocess.run([BLOCKING, data], check=True, capture_output=True, text=True, timeout=60).stdout


def number(n):
    return n.to_bytes(4, "big")


def test_a_program_and_rocksdb_take_turns(tmp_path):
    data = tmp_path / "numbers"
    assert run(data).splitlines()[0] == "1000 entries"
    written = {number(n): f"number {n}".encode() for n in range(1000)}
    # RocksDB 7.8, before the OPTIONS of a newer one are there.
    lines = databases.ldb(data, "scan", "--hex").lower().splitlines()
    assert lines == [f"0x{key.hex()} : 0x{value.hex()}" for key, value in written.items()]
    # RocksDB 9.8: it reads the logs, and writes.
    rocks = rocksdict.Rdict(str(data), rocksdict.Options(raw_mode=True))
    assert dict(rocks.items()) == written
    rocks[number(1000)] = b"from RocksDB"
    del rocks[number(0)]
    databases.close(rocks)
    # The program writes number 0 again.
    told = run(data).splitlines()
    assert told[0] == "1001 entries"
    assert told[1].endswith("from RocksDB")
