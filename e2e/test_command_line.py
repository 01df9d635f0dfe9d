"""The `millrace` command: its output, exit codes and error messages."""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import termios

import databases
import millrace
import pytest
import sandbox


@pytest.fixture(scope="module")
def data(workshop):
    return workshop.directory("ldb-put") / "db"


def test_get_prints_the_value(data):
    assert millrace.succeed("kv", "get", "hello", "--data", data) == "world\n"
    assert millrace.succeed("kv", "get", "--hex", b"hello".hex(), "--data", data).strip() == b"world".hex()


def test_get_of_a_missing_key_has_an_exit_code_of_its_own(data):
    missing = millrace.command("kv", "get", "missing", "--data", data)
    assert missing.returncode > 0 and missing.stdout == ""
    assert missing.returncode != millrace.command("kv", "get", "hello", "--data", "/nonexistent").returncode or "missing" in missing.stderr


def test_scan_has_bounds_a_direction_and_a_limit(data):
    rows = millrace.scan(data)
    keys = [key for key, _ in rows]
    assert keys == sorted(keys) and b"fruit:apple" in keys
    apple, hello = b"fruit:apple".hex(), b"hello".hex()
    assert [key for key, _ in millrace.scan(data, "--from", apple, "--to", hello)] == [b"fruit:apple"]
    assert millrace.scan(data, "--reverse", "--limit", 2) == rows[::-1][:2]
    assert millrace.scan(data, "--from", hello) == [row for row in rows if row[0] >= b"hello"]
    assert millrace.scan(data, "--limit", 0) == []
    assert "hello" in millrace.succeed("kv", "scan", "--data", data)


def test_commands_read_from_a_running_node(data, tmp_path):
    with millrace.node(data, tmp_path / "log") as node:
        at = ["--connect", f"127.0.0.1:{node.port}"]
        assert millrace.succeed("kv", "get", "hello", *at) == "world\n"
        assert millrace.command("kv", "get", "missing", *at).returncode > 0
        for flags in ([], ["--reverse"], ["--limit", "2"], ["--from", b"fruit:b".hex()]):
            assert millrace.succeed("kv", "scan", "--hex", *flags, *at) == millrace.succeed("kv", "scan", "--hex", *flags, "--data", data)
        assert millrace.succeed("kv", "stat", *at)


def test_stat_describes_the_database(workshop):
    directory = workshop.directory("rocksdict-column-families") / "db"
    said = millrace.succeed("kv", "stat", "--data", directory)
    for word in ("default", "blobs", "reverse", "rocksdb.ReverseBytewiseComparator"):
        assert word in said, said
    assert "dropped" not in said
    assert re.search("(?i)sequence", said) and re.search("(?i)level", said)


def test_json_is_json(data, tmp_path):
    assert millrace.said_json("kv", "get", "hello", "--data", data)
    assert millrace.said_json("kv", "stat", "--data", data)
    assert millrace.said_json("kv", "check", "--data", data)
    lines = millrace.succeed("kv", "scan", "--json", "--data", data).splitlines()
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError:
        rows = json.loads("\n".join(lines))
    rows = rows[0] if len(rows) == 1 and isinstance(rows[0], list) else rows
    assert len(rows) == len(millrace.scan(data))


def test_check_reports_how_much_it_read(data):
    done = millrace.command("kv", "check", "--data", data)
    assert done.returncode == 0 and done.stdout + done.stderr


def test_check_counts_the_entries_of_logs(tmp_path):
    databases.ldb(tmp_path / "db", "batchput", "a", "1", "b", "2", "c", "3", "--create_if_missing")
    logs = sum(file.stat().st_size for file in (tmp_path / "db").glob("*.log"))
    said = millrace.said_json("kv", "check", "--data", tmp_path / "db")
    assert logs > 0 and said["bytes"] == logs and said["entries"] == 3, said


def test_check_has_a_progress_bar_on_a_terminal_and_none_elsewhere(data):
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    arguments = [millrace.BINARY, "kv", "check", "--data", data]
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=side, timeout=20, env={**os.environ, "TERM": "xterm"})
    os.close(side)
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:
        pass
    os.close(terminal)
    assert done.returncode == 0 and b"nothing is damaged" in done.stdout
    assert b"checking" in shown and shown.rstrip(b" \r\n").endswith(b"\x1b[2K"), "the progress bar is shown, and then cleared"
    done = millrace.command("kv", "check", "--data", data)
    assert done.returncode == 0 and done.stderr == ""


def test_an_unknown_column_family_is_named(data):
    said = millrace.fail("kv", "scan", "--data", data, "--column-family", "nonesuch")
    assert "nonesuch" in said


@pytest.mark.parametrize("command", [["kv", "scan"], ["kv", "stat"], ["kv", "check"], ["kv", "get", "x"], ["serve", "--read-only"], ["bench", "readrandom", "--seconds", "1"]])
def test_a_directory_without_a_database_is_named(command, tmp_path):
    for directory in (tmp_path, tmp_path / "nothing"):
        said = millrace.fail(*command, "--data", directory)
        assert str(directory) in said, said
        assert list(tmp_path.iterdir()) == [], "nothing is created there"


def test_a_file_instead_of_a_directory(tmp_path):
    file = tmp_path / "file"
    file.write_text("no database")
    assert str(file) in millrace.fail("kv", "stat", "--data", file)


def test_a_port_that_is_taken_is_named(data):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = millrace.fail("serve", "--data", data, "--read-only", "--listen", f"127.0.0.1:{port}")
    assert str(port) in said and re.search("(?i)in use", said), said


def test_a_port_that_another_node_has_is_named(data, tmp_path):
    with millrace.node(data, tmp_path / "log") as node:
        said = millrace.fail("serve", "--data", data, "--read-only", "--listen", f"127.0.0.1:{node.port}")
        assert str(node.port) in said and re.search("(?i)in use", said), said


def test_connect_to_a_port_without_a_listener():
    port = millrace.free_port()
    said = millrace.fail("kv", "get", "x", "--connect", f"127.0.0.1:{port}")
    assert str(port) in said


@pytest.mark.parametrize("arguments", [["--nonsense"], ["nonsense"], ["kv", "scan", "--nonsense"], ["serve"], ["kv", "get"], ["serve", "--data", "/tmp", "--read-only", "--memory", "lots"], ["serve", "--data", "/tmp", "--read-only", "--cores", "none"], ["serve", "--data", "/tmp", "--read-only", "--poll", "sometimes"], ["serve", "--data", "/tmp", "--read-only", "--listen", "nowhere"]])
def test_wrong_usage_is_exit_code_2_and_a_hint(arguments):
    done = millrace.command(*arguments)
    assert done.returncode == 2 and done.stderr, (done.returncode, done.stderr)


@pytest.mark.parametrize("arguments", [[], ["kv"], ["kv", "scan"], ["kv", "get"], ["kv", "stat"], ["kv", "check"], ["serve"], ["bench"]])
def test_help_and_version(arguments):
    assert "Usage" in millrace.succeed(*arguments, "--help")
    assert re.match(r"millrace \d+\.\d+\.\d+", millrace.succeed("--version"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell):
    assert "millrace" in millrace.succeed("completions", shell)


def test_completion_in_bash_knows_commands_flags_and_their_values(tmp_path):
    (tmp_path / "script").write_text(millrace.succeed("completions", "bash"))

    def complete(*words):
        ask = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _millrace "$1" "${!#}" "${COMP_WORDS[COMP_CWORD-1]}"; echo "${COMPREPLY[@]}"'
        return subprocess.run(["bash", "-c", ask, "bash", tmp_path / "script", *words], text=True, capture_output=True, timeout=20, check=True).stdout.split()

    assert {"serve", "kv", "bench"} <= set(complete("millrace", ""))
    assert complete("millrace", "kv", "sc") == ["scan"]
    assert {"--reverse", "--column-family"} <= set(complete("millrace", "kv", "scan", "--"))
    assert "--column-family" not in complete("millrace", "kv", "check", "--")
    assert complete("millrace", "serve", "--poll", "a") == ["always", "adaptive"]


@pytest.mark.parametrize("command", ["", "serve", "bench", "kv", "kv get", "kv scan", "kv stat", "kv check", "completions", "man"])
def test_a_manual_page_has_every_flag_of_the_help(command):
    page = millrace.succeed("man", *command.split()).replace("\\", "")
    for flag in re.findall(r"(?m)^ +(?:-\w, )?(--[a-z-]+)(?=$|  | <)", millrace.succeed(*command.split(), "--help")):
        assert re.search(rf"fB{flag}fR.*\n(?!\.)\S", page), f"{flag} is not described"


def test_a_closed_pipe_is_not_an_error(workshop):
    directory = workshop.directory("db_bench-format-version-5") / "db"
    reader = subprocess.Popen([millrace.BINARY, "kv", "scan", "--hex", "--data", directory], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    reader.stdout.readline()
    reader.stdout.close()
    said = reader.stderr.read()
    reader.stderr.close()
    code = reader.wait(20)
    assert (code == 0 or code == -signal.SIGPIPE) and b"panic" not in said, (code, said)


def test_a_configuration_file_is_read_and_its_mistakes_are_named(data, tmp_path):
    config = tmp_path / "millrace.toml"
    config.write_text("nonsense = 1\n")
    said = millrace.fail("serve", "--data", data, "--read-only", "--config", config)
    assert "nonsense" in said, said
    port = millrace.free_port()
    config.write_text(f'listen = "127.0.0.1:{port}"\n')
    flags = [millrace.BINARY, "serve", "--data", data, "--read-only", "--cores", "1", "--config", config]
    with millrace.Server(flags, port, tmp_path / "log") as node, node.connect() as client:
        assert client.call("GET", "hello") == b"world"


@pytest.mark.parametrize("flags", [["--cores", "1", "--poll", "always"], ["--cores", "1", "--poll", "never"], ["--cores", "2"], ["--cores", "0-1", "--memory", "128M"], ["--cores", "1"], ["--io", "epoll"], ["--io", "epoll", "--cores", "2"]], ids=" ".join)
def test_ways_to_serve(flags, data, tmp_path):
    with millrace.node(data, tmp_path / "log", *flags) as node:
        clients = [node.connect() for _ in range(8)]
        for client in clients:
            assert client.call("GET", "hello") == b"world"
            client.socket.close()
    assert node.process.returncode == 0, node.said()


def test_without_io_uring_it_serves_and_says_so_once(workshop, tmp_path):
    directory = workshop.directory("rocksdict-layers")
    with millrace.node(directory / "db", tmp_path / "log", "--cores", "2", preexec_fn=sandbox.without_io_uring) as node:
        with node.connect() as client:
            flat = client.call("MR.RANGE", "-", "+")
            assert list(zip(flat[::2], flat[1::2])) == databases.expected(directory)
        assert len(re.findall("(?i)io_uring", node.said())) == 1, node.said()
    with pytest.raises(AssertionError, match="it ended with"):
        with millrace.node(directory / "db", tmp_path / "log", "--io", "io_uring", preexec_fn=sandbox.without_io_uring):
            pass


def test_sigint_ends_a_node(data, tmp_path):
    with millrace.node(data, tmp_path / "log") as node:
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(5) == 0, node.said()


@pytest.fixture
def checkout(tmp_path):
    """A directory with `./run`, and an environment whose cargo builds nothing: the binary under test is in place."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cargo").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "bin" / "cargo").chmod(0o755)
    (tmp_path / "target" / "release").mkdir(parents=True)
    (tmp_path / "target" / "release" / "millrace").symlink_to(millrace.BINARY.resolve())
    shutil.copy(millrace.ROOT / "run", tmp_path / "run")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return tmp_path / "run", {**os.environ, "PATH": path, "CARGO_TARGET_DIR": str(tmp_path / "target")}


def test_run_serves_a_directory(tmp_path, checkout):
    """`./run DIR ARGS`, as a newcomer pastes it."""
    databases.ldb(tmp_path / "db", "put", "hello", "world", "--create_if_missing")
    run, env = checkout
    port = millrace.free_port()
    with millrace.Server([run, tmp_path / "db", "--listen", f"127.0.0.1:{port}", "--cores", "1"], port, tmp_path / "log", env=env) as node:
        with node.connect() as client:
            assert client.call("GET", "hello") == b"world"


def test_run_creates_a_database_and_prints_commands_to_try(tmp_path, checkout):
    """`./run` alone, then the commands that it prints, pasted; then the same with the existing database."""
    run, env = checkout
    port = millrace.free_port()
    for time in range(2):
        with millrace.Server([run, "--listen", f"127.0.0.1:{port}", "--cores", "1"], port, tmp_path / "log", env=env) as node:
            tries = re.findall(r"(?m)^  ((?:redis-cli|\S+/millrace) .*)", node.said())
            answers = [subprocess.run(line, shell=True, text=True, capture_output=True, timeout=20, env=env) for line in tries]
            assert len(answers) == 6 and not any(answer.returncode for answer in answers), answers
            said = [answer.stdout for answer in answers]
            assert said[:4] == ["OK\n", "world\n", "OK\n", "fruit:plum\nblue\nfruit:cherry\ndark red\nfruit:apple\nred\n"] and said[5] == "world\n"
            assert time > 0 or said[4] == "4\n"
        assert node.process.returncode == 0


def test_run_explains_its_errors(tmp_path, checkout):
    run, env = checkout

    def fails(*arguments):
        done = subprocess.run([run, *arguments], stdin=subprocess.DEVNULL, text=True, capture_output=True, timeout=60, env=env)
        assert done.returncode in (1, 2), done
        return done.stderr

    (tmp_path / "file").write_text("")
    assert "nothing/deep" in fails(tmp_path / "nothing" / "deep")
    assert "file" in fails(tmp_path / "file")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = fails("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert "in use" in said and "Try, in a second terminal" not in said, said
