"""Writing from the command line: `kv put`, `kv del`, and `kv import` of the output of `kv export`, to a directory and to a node."""

import json
import os
import shutil
import subprocess

import databases
import millrace
import pytest

BINARY_PAIRS = {
    b"plain": b"text",
    "größe".encode(): "ß".encode(),
    b"\x00\xff\t\n\\": bytes(range(256)),
    b"\r\n": b"\r\n",
    b"no value": b"",
    b"long": b"0123456789abcdef\n" * 20_000,
    **{b"n%05d" % n: b"v%d" % (n * n) for n in range(3000)},
}


def imports(pairs, directory, *flags):
    """Imports pairs through standard input, in hexadecimal."""
    lines = b"".join(key.hex().encode() + b" " + value.hex().encode() + b"\n" for key, value in pairs.items())
    return fed(lines, "kv", "import", "--format", "hex", "--data", directory, *flags)


def fed(text, *arguments):
    """Runs `millrace ARGUMENTS...` with this standard input."""
    return subprocess.run([millrace.BINARY, *map(str, arguments)], input=text, capture_output=True, timeout=60)


def writable(data, log, *flags):
    """A writable node."""
    port = millrace.free_port()
    arguments = [millrace.BINARY, "serve", "--data", data, "--listen", f"127.0.0.1:{port}", "--cores", "1", "--memory", "256M", *flags]
    return millrace.Server(arguments, port, log)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A directory with BINARY_PAIRS, written by an import."""
    directory = tmp_path_factory.mktemp("transfer") / "db"
    done = imports(BINARY_PAIRS, directory, "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 0 and said["entries"] == len(BINARY_PAIRS) and said["deletions"] == 0, done
    assert said["bytes"] == sum(len(key) + len(value) for key, value in BINARY_PAIRS.items())
    return directory


def test_imported_pairs_are_read_by_us_and_by_rocksdb(full, tmp_path):
    assert dict(millrace.scan(full)) == BINARY_PAIRS
    copy = tmp_path / "copy"
    shutil.copytree(full, copy)
    dumped = databases.ldb(copy, "scan", "--hex")
    assert dumped.count("\n") >= len(BINARY_PAIRS) and "0x" + b"plain".hex().upper() in dumped
    databases.ldb(copy, "checkconsistency")


@pytest.mark.parametrize("form", ["text", "hex", "json", "resp"])
def test_import_reverses_export(full, tmp_path, form):
    """From a directory through a file into a node, and from there through a pipe into a directory."""
    first = tmp_path / "first"
    said = json.loads(millrace.succeed("kv", "export", "--data", full, "--format", form, "--out", first, "--json"))
    assert said["entries"] == len(BINARY_PAIRS)
    with writable(tmp_path / "served", tmp_path / "log") as node:
        at = ["--connect", f"127.0.0.1:{node.port}"]
        told = millrace.succeed("kv", "import", first, "--format", form, *at)
        assert "imported 3,006 entries" in told, told
        with node.connect() as client:
            assert client.call("DBSIZE") == len(BINARY_PAIRS)
            assert client.call("GET", b"\x00\xff\t\n\\") == bytes(range(256))
        again = millrace.succeed("kv", "export", "--format", form, *at, text=False)
    assert again == first.read_bytes()
    done = fed(again, "kv", "import", "--format", form, "--data", tmp_path / "third")
    assert done.returncode == 0, done
    assert millrace.scan(tmp_path / "third") == millrace.scan(full)
    assert millrace.scan(tmp_path / "served") == millrace.scan(full)


def test_redis_takes_an_export_and_a_pipe_for_redis_is_imported(full, tmp_path):
    exported = millrace.succeed("kv", "export", "--data", full, "--format", "resp", text=False)
    (tmp_path / "redis").mkdir()
    with millrace.redis_server(tmp_path / "redis", tmp_path / "log") as redis:
        piped = subprocess.run(["redis-cli", "-p", str(redis.port), "--pipe"], input=exported, capture_output=True, timeout=60)
        assert b"errors: 0, replies: %d" % len(BINARY_PAIRS) in piped.stdout, piped
        with redis.connect() as client:
            assert client.call("DBSIZE") == len(BINARY_PAIRS) and client.call("GET", "no value") == b""
    typed = b'SET a 1\r\nset b "two words"\r\nMSET c 3 d 4\r\nDEL a nothing\r\nSET b 2\r\n'
    done = fed(typed, "kv", "import", "--format", "resp", "--data", tmp_path / "db", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["deletions"] == 2, done
    assert millrace.scan(tmp_path / "db") == [(b"b", b"2"), (b"c", b"3"), (b"d", b"4")]


def test_an_export_has_bounds(full):
    text = millrace.succeed("kv", "export", "--data", full, "--from", "n00010", "--to", "n00012")
    assert text == "n00010\tv100\nn00011\tv121\n"


def test_put_and_del_do_the_same_to_a_directory_and_a_node(tmp_path):
    directory = tmp_path / "db"

    def through(*place):
        assert millrace.succeed("kv", "put", "key", "value", *place) == ""
        assert millrace.succeed("kv", "get", "key", *place) == "value\n"
        assert json.loads(millrace.succeed("kv", "put", "--hex", "00ff", "0a", "--json", *place)) == {"put": 1}
        assert fed(b"from\nthere", "kv", "put", "piped", "-", *place).returncode == 0
        assert millrace.succeed("kv", "get", "--hex", b"piped".hex(), *place).strip() == b"from\nthere".hex()
        assert json.loads(millrace.succeed("kv", "del", "key", "no such key", "--json", *place)) == {"keys": 2, "deleted": 1}
        missing = millrace.command("kv", "del", "key", *place)
        assert missing.returncode == 1 and "0 of 1 keys" in missing.stderr, missing
        assert millrace.succeed("kv", "del", "--hex", "00ff", *place) == ""
        assert millrace.succeed("kv", "scan", *place) == "piped\tfrom\\nthere\n"

    through("--data", directory)
    with writable(directory, tmp_path / "log") as node:
        through("--connect", f"127.0.0.1:{node.port}")
        # The count of keys continues from one to the other.
        assert node.counts_keys()
        with node.connect() as client:
            assert client.call("DBSIZE") == 1
        said = millrace.fail("kv", "put", "a", "b", "--data", directory)
        assert "open for writing" in said, said
    assert databases.ldb(directory, "get", "piped").strip() == "from\nthere"


def test_a_password_has_the_same_sources_as_for_redis_cli(tmp_path):
    (tmp_path / "password").write_text("open sesame\n")
    data, port = tmp_path / "db", millrace.free_port()
    millrace.succeed("kv", "put", "key", "value", "--data", data)
    log = open(tmp_path / "log", "wb")
    arguments = ["serve", "--data", data, "--listen", f"127.0.0.1:{port}", "--cores", "1", "--memory", "64M", "--password-file", tmp_path / "password"]
    process = subprocess.Popen([str(a) for a in [millrace.BINARY, *arguments]], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert "serves" in process.stdout.readline()
        at = ["--connect", f"127.0.0.1:{port}"]
        env = {**os.environ, "REDISCLI_AUTH": "open sesame"}
        assert millrace.succeed("kv", "get", "key", *at, env=env) == "value\n"
        assert "REDISCLI_AUTH" in millrace.fail("kv", "get", "key", *at)
        assert "WRONGPASS" in millrace.fail("kv", "get", "key", *at, env={**env, "REDISCLI_AUTH": "no"})
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
        log.close()


def test_an_error_in_the_input_is_named_and_earlier_pairs_are_kept(tmp_path):
    directory = tmp_path / "db"
    done = fed(b"a\t1\nb\t2\n\nno tab\nc\t3\n", "kv", "import", "--data", directory)
    assert done.returncode == 2 and b"line 4 of the input has no tab" in done.stderr, done
    assert millrace.scan(directory) == [(b"a", b"1"), (b"b", b"2")]
    for form, text, said in [("resp", b"SET a 5\nINCR a\n", b'command 2 of the input is "INCR"'), ("json", b"{}", b"line 1"), ("hex", b"0 0", b"line 1")]:
        done = fed(text, "kv", "import", "--format", form, "--data", directory)
        assert done.returncode == 2 and said in done.stderr, done
    assert millrace.scan(directory)[0] == (b"a", b"5")


def test_impossible_requests_are_explained(tmp_path):
    assert "cannot open" in millrace.fail("kv", "import", tmp_path / "nothing", "--data", tmp_path / "db")
    assert not (tmp_path / "db").exists()
    assert "no RocksDB database" in (said := millrace.fail("kv", "del", "a", "--data", tmp_path)) or "CURRENT" in said, said
    assert "--format json" in millrace.fail("kv", "export", "--data", tmp_path, "--json")
    databases.ldb(tmp_path / "one", "put", "a", "b", "--create_if_missing")
    assert "No space left" in millrace.fail("kv", "export", "--data", tmp_path / "one", "--out", "/dev/full")
