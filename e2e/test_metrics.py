"""Metrics over HTTP: read by Prometheus's own parser, and the port under hostile clients."""

import contextlib
import http.client
import socket

import millrace
import pytest
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture(scope="module")
def data(workshop):
    return workshop.directory("ldb-put") / "db"


@pytest.fixture(params=["auto", "epoll"])
def told(data, tmp_path, request):
    """A node of two cores, and its metrics port."""
    port = millrace.free_port()
    with millrace.node(data, tmp_path / "log", "--cores", "2", "--io", request.param, "--metrics", f"127.0.0.1:{port}") as node:
        yield node, port


def ask(port, method="GET", path="/metrics", **kwargs):
    """(status, headers, body) of one request."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(client):
        client.request(method, path, **kwargs)
        answer = client.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def metrics(port):
    """{name: metric} as a monitoring system reads them."""
    status, headers, body = ask(port)
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4"), headers
    families = list(text_string_to_metric_families(body))
    assert len({family.name for family in families}) == len(families), "a metric is declared twice"
    return {family.name: family for family in families}


def sum_of(families, name):
    return sum(sample.value for sample in families[name].samples)


def test_a_parser_reads_every_metric_with_type_and_help(told):
    _, port = told
    families = metrics(port)
    assert len(families) > 40
    for name, family in families.items():
        assert name.startswith("millrace_") and family.type in ("counter", "gauge") and family.documentation, family
        assert family.samples, name
    assert {sample.labels["core"] for sample in families["millrace_commands"].samples} == {"0", "1"}
    assert families["millrace_build_info"].samples[0].labels["driver"]


def test_counters_follow_the_clients_and_agree_with_info(told):
    node, port = told
    before = metrics(port)
    with node.connect() as client:
        for _ in range(10):
            assert client.call("GET", "hello") == b"world"
            client.call("GET", "missing")
        info = client.call("INFO", "stats").decode()
        after = metrics(port)
        assert sum_of(after, "millrace_connections") == 1 == sum_of(after, "millrace_accepted_connections") - sum_of(before, "millrace_accepted_connections")
    for name, grown in (("millrace_keyspace_hits", 10), ("millrace_keyspace_misses", 10), ("millrace_commands", 21)):
        assert sum_of(after, name) - sum_of(before, name) == grown, name
    assert f"keyspace_hits:{int(sum_of(after, 'millrace_keyspace_hits'))}\r\n" in info
    assert sum_of(after, "millrace_memory_resident_bytes") > 1 << 20
    assert sum_of(after, "millrace_log_dropped_lines") == 0


def test_a_writing_node_has_metrics_of_its_writes(tmp_path):
    port, told_at = millrace.free_port(), millrace.free_port()
    arguments = ["serve", "--data", tmp_path / "db", "--listen", f"127.0.0.1:{port}", "--metrics", f"127.0.0.1:{told_at}"]
    arguments += ["--cores", "2", "--memory", "64M"]
    with millrace.Server([millrace.BINARY, *arguments], port, tmp_path / "log") as node:
        before = metrics(told_at)
        with node.connect() as client:
            client.pipeline([("SET", f"key{n}", b"x" * 10_000) for n in range(2000)])
            client.call("DEL", "key1", "no such key")
            for words in (["WATCH", "a"], ["SET", "a", "1"], ["MULTI"], ["EXEC"], ["WATCH", "a"], ["MULTI"], ["GET", "a"], ["EXEC"], ["WATCH", "a", "b"], ["MULTI"], ["PING"]):
                client.call(*words)
            during = metrics(told_at)
            assert sum_of(during, "millrace_watched_keys") == 2 and sum_of(during, "millrace_queued_bytes") > 0
        families = metrics(told_at)
        grown = {name: sum_of(families, name) - sum_of(before, name) for name in families}
        # Changes of a pipeline form one group.
        assert 2 <= grown["millrace_changes_written"] <= grown["millrace_changes"] <= 2010
        assert 1 <= grown["millrace_write_groups"] <= grown["millrace_write_batches"] <= 2010
        assert grown["millrace_wal_bytes"] >= grown["millrace_write_batch_bytes"] > 20_000_000
        assert grown["millrace_reactor_disk_syncs"] >= grown["millrace_write_groups"], "power is the default"
        assert sum_of(families, "millrace_memtable_bytes") > 0 and sum_of(families, "millrace_keys") >= 1999
        assert sum_of(families, "millrace_writing_failed") == 0
        assert grown["millrace_transactions"] == 1 == grown["millrace_transaction_conflicts"]
        for name in ("flushed_tables", "flushed_bytes", "compactions", "level0_files", "write_stall_seconds"):
            assert f"millrace_{name}" in families, name


def test_other_requests_get_http_errors(told):
    _, port = told
    assert ask(port, path="/healthz")[::2] == (200, "serving\n")
    status, headers, body = ask(port, "HEAD")
    assert status == 200 and int(headers["Content-Length"]) > 1000 and body == ""
    assert ask(port, path="/")[0] == 404
    status, headers, _ = ask(port, "DELETE")
    assert status == 405 and headers["Allow"] == "GET, HEAD"


def test_hostile_clients_are_disconnected_and_others_not_affected(told):
    node, port = told
    with contextlib.ExitStack() as stack:
        # More silent connections than it accepts at a time.
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(40)]
        for n, client in enumerate(idle):
            with contextlib.suppress(OSError):
                client.sendall([b"", b"GET", b"GET /metrics HTTP/1.1\r\n", b"x"][n % 4])
        with node.connect() as client:
            assert client.call("GET", "hello") == b"world"
        # The node closes all of them, the accepted ones after a timeout.
        for client in idle:
            with contextlib.suppress(ConnectionError):
                assert client.recv(100) == b""
    for garbage in (b"\x16\x03\x01\x02\n", b"PING\r\n", b"\n", b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 2000):
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            said = b""
            # An unread rest of a request causes a reset.
            with contextlib.suppress(ConnectionError):
                client.sendall(garbage)
                said = client.recv(1000)
            assert said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")) or len(garbage) > 8192 and not said, said
    assert node.alive() and sum_of(metrics(port), "millrace_protocol_errors") == 0


def test_a_port_in_use_is_an_error_with_advice(data):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = millrace.fail("serve", "--data", data, "--read-only", "--listen", f"127.0.0.1:{millrace.free_port()}", "--metrics", f"127.0.0.1:{port}")
        assert f"127.0.0.1:{port} is in use" in said and f"--metrics 127.0.0.1:{port + 1}" in said, said


def test_a_free_port_is_chosen_on_request_and_printed(data, tmp_path):
    with millrace.node(data, tmp_path / "log", "--metrics", "127.0.0.1:0") as node:
        said = next(line for line in node.until_ready().splitlines() if line.startswith("metrics: "))
        assert metrics(int(said.split(":")[3].split("/")[0]))
