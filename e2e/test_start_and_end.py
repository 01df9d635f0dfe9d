"""Starts and ends: a node ends on request, starts immediately after a kill, and reports its limits."""

import os
import random
import signal
import subprocess
import threading
import time

import millrace
import pytest
import resp


def load(port, seconds, seed):
    """SETs, GETs and long ranges of several concurrent clients."""
    until = time.monotonic() + seconds

    def client(nth):
        rng = random.Random(seed * 100 + nth)
        connection = resp.Connection(port, 60)
        while time.monotonic() < until:
            if nth < 3:
                sets = [resp.encode("SET", f"k{rng.randrange(50_000):06}", rng.randbytes(1000)) for _ in range(100)]
                connection.send(b"".join(sets))
                for _ in sets:
                    connection.reply()
            elif nth < 5:
                connection.call("GET", f"k{rng.randrange(50_000):06}")
            else:
                connection.call("MR.RANGE", "-", "+", "LIMIT", "50000")

    clients = [threading.Thread(target=client, args=(nth,)) for nth in range(7)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()


def test_a_node_with_little_memory_ends_on_request(tmp_path, long):
    """Background work once waited for the memory of a cache that was no longer used."""
    for nth in range(50 if long else 1):
        memory = ["64M", "96M", "128M"][nth % 3]
        flags = ["--memory", memory, "--cores", "2", "--durability", "process"]
        with millrace.node(tmp_path / f"db{nth}", tmp_path / "log", *flags, writes=True) as node:
            load(node.port, 6 if long else 4, nth)
            node.process.send_signal(signal.SIGTERM)
            assert node.process.wait(30) == 0, node.said()


def test_values_of_a_megabyte_are_written_with_little_memory(tmp_path):
    """A compaction without memory for its blocks once ended all writing."""
    flags = ["--memory", "64M", "--cores", "1", "--durability", "process"]
    with millrace.node(tmp_path / "db", tmp_path / "log", *flags, writes=True) as node:
        failures = []

        def client(nth):
            connection = resp.Connection(node.port, 60)
            for at in range(30):
                answer = connection.call("SET", f"{nth}-{at % 10}", bytes([at]) * 1_000_000)
                if answer != b"OK":
                    failures.append(answer)

        clients = [threading.Thread(target=client, args=(nth,)) for nth in range(4)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        assert not failures, failures[:3]
        connection = node.connect(60)
        assert connection.call("GET", "3-9") == bytes([29]) * 1_000_000


def test_a_killed_node_starts_again_immediately(tmp_path, long):
    """The kernel closes the rings of a killed process later, and they hold its ports and locks until then."""
    port, metrics = millrace.free_port(), millrace.free_port()
    command = [millrace.BINARY, "serve", "--data", tmp_path / "db", "--listen", f"127.0.0.1:{port}", "--cores", "2"]
    command += ["--memory", "256M", "--metrics", f"127.0.0.1:{metrics}", "--state", tmp_path / "state"]
    command += ["--durability", "process"]
    for nth in range(15 if long else 4):
        with millrace.Server(command, port, tmp_path / f"log{nth}") as node:
            until = time.monotonic() + 0.5
            connections = [node.connect() for _ in range(20)]
            while time.monotonic() < until:
                for connection in connections:
                    connection.send(resp.encode("SET", f"key{random.random()}", "x" * 10_000) * 5)
                for connection in connections:
                    for _ in range(5):
                        assert connection.reply() == b"OK"
            node.process.kill()
            node.process.wait()


def test_resources_of_a_running_process_are_refused_soon(tmp_path):
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True) as node:
        for listen in [node.port, 0]:
            since = time.monotonic()
            said = millrace.fail("serve", "--data", tmp_path / "db", "--listen", f"127.0.0.1:{listen}", "--memory", "64M")
            assert "in use by another program" in said or "open for writing" in said, said
            assert time.monotonic() - since < 4, "it waited as for a killed process"


def serve_with(limits, tmp_path, *flags):
    """A node that is started under resource limits of the shell."""
    port = millrace.free_port()
    command = f'ulimit {limits}; exec "$0" "$@"'
    serve = [millrace.BINARY, "serve", "--data", tmp_path / "db", "--listen", f"127.0.0.1:{port}", "--memory", "256M"]
    return millrace.Server(["sh", "-c", command, *serve, "--cores", "2", *flags], port, tmp_path / "log")


def test_a_connection_without_a_free_descriptor_is_refused_with_a_reply(tmp_path):
    with serve_with("-n 400", tmp_path) as node:
        connection = node.connect()
        limit = int(connection.call("CONFIG", "GET", "maxclients")[1])
        assert 50 < limit < 400
        # The log is written beside the answers.
        deadline = time.monotonic() + 20
        while "descriptors" not in node.said():
            assert time.monotonic() < deadline, node.said()
            time.sleep(0.01)
        others = [node.connect() for _ in range(limit - 1)]
        assert all(other.call("PING") == b"PONG" for other in others)
        refused = node.connect()
        assert refused.reply() == resp.Error("ERR max number of clients reached")
        others.pop().socket.close()
        for _ in range(100):
            again = node.connect()
            try:
                if again.call("PING") == b"PONG":
                    break
            except (resp.Closed, OSError):
                pass
            time.sleep(0.05)
        else:
            pytest.fail("there is room again, and nobody gets it")


def test_few_descriptors_serve_some_connections_or_the_start_is_refused(tmp_path):
    """There was once room for one connection, and no message said so."""
    with serve_with("-n 128", tmp_path) as node:
        connection = node.connect()
        limit = int(connection.call("CONFIG", "GET", "maxclients")[1])
        assert 16 <= limit < 128
        others = [node.connect() for _ in range(limit - 1)]
        assert all(other.call("SET", "a", "b") == b"OK" for other in others)
    serve = [millrace.BINARY, "serve", "--data", tmp_path / "db", "--listen", f"127.0.0.1:{millrace.free_port()}", "--memory", "256M", "--cores", "2"]
    ended = subprocess.run(["sh", "-c", 'ulimit -n 48; exec "$0" "$@"', *map(str, serve)], stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode != 0 and "48 descriptors (`ulimit -n`) are too few" in ended.stderr and "ulimit -n 1024" in ended.stderr, ended.stderr


def test_the_soft_limit_of_descriptors_is_raised(tmp_path):
    hard = int(subprocess.check_output(["sh", "-c", "ulimit -Hn"], text=True).replace("unlimited", str(1 << 20)))
    if hard < 2000:
        pytest.skip("the hard limit is low here")
    with serve_with("-Sn 300", tmp_path) as node:
        limits = open(f"/proc/{millrace.serving(node.process.pid)}/limits").read()
        soft = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3]
        assert int(soft) > 300
        assert os.path.exists(tmp_path / "db")


def test_a_request_that_never_fits_gets_one_error(tmp_path):
    with millrace.node(tmp_path / "db", tmp_path / "log", "--memory", "64M", writes=True) as node:
        connection = node.connect()
        largest = int(connection.call("CONFIG", "GET", "proto-max-bulk-len")[1])
        assert connection.call("SET", "fits", b"x" * (largest - 1000)) == b"OK"
        connection.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % (largest + 1))
        assert f"request longer than {largest} bytes" in connection.reply()
        with pytest.raises((resp.Closed, OSError)):
            connection.reply()


def test_many_stalled_large_commands_delay_others_no_longer_than_one(tmp_path):
    """The node once waited for them one after the other, ten seconds each."""
    with millrace.node(tmp_path / "db", tmp_path / "log", "--memory", "64M", writes=True) as node:
        largest = int(node.connect().call("CONFIG", "GET", "proto-max-bulk-len")[1]) - 1000
        stalling = [node.connect(60) for _ in range(20)]
        for client in stalling:
            client.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % largest + b"x" * 70_000)
        time.sleep(0.3)
        with node.connect(40) as honest:
            assert honest.call("SET", "large", b"x" * 200_000) == b"OK"
            assert len(honest.call("GET", "large")) == 200_000
        for client in stalling:
            client.socket.close()


def test_pipelines_of_short_commands_that_build_long_values_do_not_delay_the_end(tmp_path):
    """All of them once counted as accepted, and the node was killed after a minute."""
    with millrace.node(tmp_path / "db", tmp_path / "log", "--memory", "64M", writes=True) as node:
        clients = [node.connect(60) for _ in range(30)]
        for number, client in enumerate(clients):
            for order in ("SETRANGE", "APPEND"):
                words = [order, f"key{number}", *(["1048566"] if order == "SETRANGE" else []), "x"]
                client.send(resp.encode(*words) * 300)
        time.sleep(0.5)
        node.process.terminate()
        assert node.process.wait(timeout=30) == 0, node.said()


def test_large_values_wait_for_each_other_but_not_for_a_stalled_one(tmp_path, long):
    with millrace.node(tmp_path / "db", tmp_path / "log", "--memory", "64M", writes=True) as node:
        largest = int(node.connect().call("CONFIG", "GET", "proto-max-bulk-len")[1])
        size = largest * 3 // 4
        if long:
            # The node waits ten seconds for it.
            stalls = node.connect(60)
            stalls.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % size + b"x" * (size // 2))
            time.sleep(0.2)
        answers = []
        send = lambda nth: answers.append(node.connect(60).call("SET", f"k{nth}", b"x" * size))
        clients = [threading.Thread(target=send, args=(nth,)) for nth in range(5)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        assert answers == [b"OK"] * 5, answers
        if long:
            assert "others wait for" in stalls.reply()
            with pytest.raises((resp.Closed, OSError)):
                stalls.reply()


def test_a_successor_waits_as_long_as_the_old_process_has_the_database(tmp_path):
    state = tmp_path / "state"
    with millrace.node(tmp_path / "db", tmp_path / "log", "--state", state, writes=True) as node:
        node.until_ready()
        old = millrace.serving(node.process.pid)
        with node.connect() as client, node.connect() as slow:
            assert client.call("SET", "k", b"v" * 1_000_000) == b"OK"
            # The old process waits some seconds for a client that does not read.
            slow.send(resp.encode("GET", "k") * 20)
            time.sleep(0.5)
            upgrade = subprocess.Popen(
                [millrace.BINARY, "upgrade", "--state", state], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            deadline = time.monotonic() + 20
            while "handed over" not in node.said():
                assert upgrade.poll() is None and time.monotonic() < deadline, node.said()
                time.sleep(0.01)
            os.kill(old, signal.SIGSTOP)
            try:
                time.sleep(9)
                assert node.alive() and upgrade.poll() is None, node.said()
            finally:
                os.kill(old, signal.SIGCONT)
            said, _ = upgrade.communicate(timeout=30)
            assert upgrade.returncode == 0 and "serves now" in said, said
        assert millrace.serving(node.process.pid) != old
        with node.connect() as client:
            assert len(client.call("GET", "k")) == 1_000_000
