"""TLS for clients: redis-cli, Python's ssl and our own client as peers; certificates; hand-over; hostile clients."""

import bisect
import itertools
import os
import pathlib
import random
import re
import socket
import ssl
import subprocess
import time
import urllib.request

import guest
import millrace
import pytest
import resp
from certificates import Certificates, TlsConnection, raw

CLIENT = pathlib.Path(os.environ.get("MILLRACE_CLIENT", millrace.TARGET / "debug" / "examples" / "everything"))
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


class TlsServer(millrace.Server):
    """A node that speaks TLS at its port."""

    certificates = None
    client = None

    def connect(self, timeout=20, **how):
        return self.certificates.connect(self.port, timeout, **{"client": self.client, **how})


def tls_node(certificates, tmp_path, *flags, client=None, name="server", log="log"):
    port = millrace.free_port()
    flags = ["--data", tmp_path / "db", "--listen", f"127.0.0.1:{port}", "--durability", "process", *certificates.flags(name), *flags]
    for flag, usual in ("--cores", "1"), ("--memory", "256M"):
        if flag not in flags:
            flags += [flag, usual]
    server = TlsServer([millrace.BINARY, "serve", *flags], port, tmp_path / log)
    server.certificates, server.client = certificates, client
    return server


@pytest.fixture(params=["io_uring", "epoll"])
def node(request, certificates, tmp_path):
    with tls_node(certificates, tmp_path, "--io", request.param) as node:
        yield node


def info(client, name):
    fields = dict(line.split(":", 1) for line in client.call("INFO", "all").decode().splitlines() if ":" in line)
    return fields[name]


def redis_cli(certificates, port, *words, tls=True, more=()):
    flags = ["--tls", "--cacert", certificates["ca.pem"], *more] if tls else []
    done = subprocess.run(["redis-cli", "-h", "127.0.0.1", "-p", str(port), *flags, *words], capture_output=True, text=True, timeout=20)
    return done.stdout.strip() + done.stderr.strip()


def test_redis_cli_speaks_tls(certificates, node):
    cli = lambda *words: redis_cli(certificates, node.port, *words)
    assert cli("PING") == "PONG"
    assert cli("SET", "k", "v") == "OK"
    assert cli("GET", "k") == "v"
    assert "proto 3\n" in cli("-3", "HELLO", "3")
    line = cli("CLIENT", "LIST")
    assert f"laddr=127.0.0.1:{node.port} " in line and " cmd=client|list " in line
    assert cli("CONFIG", "GET", "tls-port").split() == ["tls-port", str(node.port)]
    assert cli("CONFIG", "GET", "port").split() == ["port", "0"]
    assert cli("CONFIG", "GET", "tls-auth-clients").split() == ["tls-auth-clients", "no"]
    assert "tls" in node.until_ready().lower()


@pytest.mark.parametrize("version", VERSIONS, ids=["1.2", "1.3"])
def test_pipelined_replies_keep_their_order_however_the_bytes_are_cut(certificates, node, version):
    rng = random.Random(5)
    with certificates.connect(node.port, version=version) as client:
        assert client.socket.version() == {VERSIONS[0]: "TLSv1.2", VERSIONS[1]: "TLSv1.3"}[version]
        requests, expected = [], []
        for n in range(3000):
            value = rng.randbytes(rng.choice([1, 10, 100, 1000, 20000 if n % 50 == 0 else 3]))
            requests += [resp.encode("SET", f"k{n}", value), resp.encode("GET", f"k{n}"), resp.encode("ECHO", str(n))]
            expected += [b"OK", value, str(n).encode()]
        data, ends = b"".join(requests), list(itertools.accumulate(map(len, requests)))
        at = received = 0
        while at < len(data):
            cut = at + rng.choice([1, 5, 100, 3000, 16384, 50000])
            client.socket.sendall(data[at:cut])
            at = cut
            # One thread for both directions: two must not use an SSL object at once.
            sent = bisect.bisect_right(ends, at)
            if sent - received > 300 or at >= len(data):
                for n in range(received, sent):
                    assert client.reply() == expected[n], n
                received = sent
        assert received == len(expected)


@pytest.mark.parametrize("version", VERSIONS, ids=["1.2", "1.3"])
def test_large_values(certificates, node, version):
    value = random.Random(1).randbytes(9_000_000)
    with certificates.connect(node.port, version=version) as client:
        assert client.call("SET", "large", value) == b"OK"
        assert client.call("GET", "large") == value
        assert client.pipeline([("GET", "large"), ("GETRANGE", "large", "5", "9"), ("GET", "large")]) == [value, value[5:10], value]


def test_the_end_is_announced_on_both_sides(certificates, node):
    with node.connect() as client:
        client.send(resp.encode("ECHO", "last") + resp.encode("QUIT"))
        # An end without close_notify would be an error of `recv`.
        assert client.until_closed() == b"$4\r\nlast\r\n+OK\r\n"
    # A client that says that it sends no more gets its replies all the same, and then hears the same of the node.
    with raw(node.port) as below:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        half = certificates.context().wrap_bio(incoming, outgoing, server_hostname="localhost")

        def until_done(action, *arguments):
            while True:
                try:
                    return action(*arguments)
                except ssl.SSLWantReadError:
                    below.sendall(outgoing.read())
                    part = below.recv(1 << 16)
                    assert part, "an end without close_notify"
                    incoming.write(part)

        until_done(half.do_handshake)
        half.write(resp.encode("ECHO", "half"))
        with pytest.raises(ssl.SSLWantReadError):
            half.unwrap()
        assert until_done(half.read, 100) == b"$4\r\nhalf\r\n"
        with pytest.raises(ssl.SSLZeroReturnError):
            until_done(half.read, 100)
    with node.connect() as client:
        client.send(resp.encode("ECHO", "cut"))
        client.socket.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
    with node.connect() as client:
        assert client.call("PING") == b"PONG"


def test_protocol_errors_are_told(certificates, node):
    with node.connect() as client:
        client.send(b"*1\r\n$9999999999\r\n" + b"x" * 100_000)
        assert client.until_closed().startswith(b"-ERR Protocol error")


def test_two_doors(certificates, tmp_path):
    tls_port = millrace.free_port()
    metrics_port = millrace.free_port()
    flags = [*certificates.flags(), "--tls-listen", f"127.0.0.1:{tls_port}", "--cores", "2", "--metrics", f"127.0.0.1:{metrics_port}"]
    with millrace.node(tmp_path / "db", tmp_path / "log", *flags, writes=True) as node:
        with node.connect() as plain, certificates.connect(tls_port) as secure:
            assert plain.call("SET", "k", "v") == b"OK"
            assert secure.call("GET", "k") == b"v"
            assert info(plain, "tcp_port") == str(node.port)
            assert plain.call("CONFIG", "GET", "port") == [b"port", str(node.port).encode()]
            assert plain.call("CONFIG", "GET", "tls-port") == [b"tls-port", str(tls_port).encode()]
            assert int(info(plain, "total_tls_connections_received")) == 1
            assert int(info(plain, "clients_tls_bytes")) > 0
            text = urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=20).read().decode()
            counted = re.findall(r"^millrace_tls_(connections|failures)_total\{.*\} (\d+)$", text, re.MULTILINE)
            assert sorted(counted) == [("connections", "0"), ("connections", "1"), ("failures", "0"), ("failures", "0")]
        assert redis_cli(certificates, node.port, "GET", "k", tls=False) == "v"
        assert redis_cli(certificates, tls_port, "GET", "k") == "v"
        assert f"with TLS on 127.0.0.1:{tls_port}" in node.until_ready()


@pytest.mark.parametrize("mode", ["default", "yes", "optional", "no"])
def test_certificates_of_clients(certificates, tmp_path, mode):
    others = Certificates(tmp_path / "others")
    flags = ["--tls-ca", certificates["ca.pem"]] + (["--tls-auth-clients", mode] if mode != "default" else [])
    must = mode in ("default", "yes")
    with tls_node(certificates, tmp_path, *flags, client="client" if must else None) as node:
        with certificates.connect(node.port, client="client") as client:
            assert client.call("PING") == b"PONG"

        def may(context_of):
            context = certificates.context()
            if context_of:
                context.load_cert_chain(context_of["client.pem"], context_of["client.key"])
            try:
                with TlsConnection(node.port, context) as client:
                    return client.call("PING") == b"PONG"
            except (OSError, ssl.SSLError, resp.Closed):
                return False

        assert may(None) == (not must)
        assert may(others) == (mode == "no")
        fails = "TLS handshake failed with 127.0.0.1:"
        if mode == "no":
            assert fails not in node.said()
        else:
            guest.wait_for("the log", lambda: fails in node.said())


def revocation_list(certificates, *revoked):
    """A file with what the authority has revoked."""
    settings = certificates["ca.conf"]
    settings.write_text("[ca]\ndefault_ca=own\n[own]\ndatabase=index.txt\ndefault_md=sha256\ndefault_crl_days=30\ncrlnumber=crlnumber\n")
    certificates["index.txt"].write_text("")
    certificates["crlnumber"].write_text("01\n")
    for name in revoked:
        certificates.openssl(f"ca -config ca.conf -cert ca.pem -keyfile ca.key -revoke {name}.pem")
    certificates.openssl("ca -config ca.conf -cert ca.pem -keyfile ca.key -gencrl -out crl.pem")
    return certificates["crl.pem"]


@pytest.mark.parametrize("mode", ["yes", "optional"])
def test_revoked_certificates_of_clients(tmp_path, mode):
    certificates = Certificates(tmp_path / "certificates")
    certificates.sign("stolen")
    others = Certificates(tmp_path / "others")
    crl = revocation_list(certificates, "stolen")
    flags = ["--tls-ca", certificates["ca.pem"], "--tls-auth-clients", mode, "--tls-crl", crl]
    with tls_node(certificates, tmp_path, *flags, client="client") as node:
        for version in VERSIONS:
            with certificates.connect(node.port, client="client", version=version) as client:
                assert client.call("CONFIG", "GET", "tls-crl-file") == [b"tls-crl-file", str(crl).encode()]
            with pytest.raises((OSError, ssl.SSLError, resp.Closed)):
                with certificates.connect(node.port, client="stolen", version=version) as client:
                    client.call("PING")
        guest.wait_for("the log", lambda: "Revoked" in node.said())
    # An authority without a list vouches for nobody.
    flags[-1] = revocation_list(others)
    with tls_node(certificates, tmp_path, *flags[:2], client="client") as node:
        with node.connect() as client:
            assert client.call("PING") == b"PONG"
    node = tls_node(certificates, tmp_path, *flags)
    try:
        node.until_ready()
        with pytest.raises((OSError, ssl.SSLError, resp.Closed)):
            with certificates.connect(node.port, client="client") as client:
                client.call("PING")
    finally:
        assert node.stop() == 0


def test_our_own_client_with_its_cache(certificates, tmp_path):
    with tls_node(certificates, tmp_path, "--cores", "2", "--redis-version", "7.4.0") as node:
        done = subprocess.run(
            [CLIENT, f"rediss://localhost:{node.port}", "millrace", "tracks", f"ca={certificates['ca.pem']}"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        with node.connect() as client:
            assert int(info(client, "total_tls_failures")) == 0


def test_errors_at_the_start_name_the_file(certificates, tmp_path):
    def refused(*flags):
        return millrace.fail("serve", "--data", tmp_path / "db", "--listen", f"127.0.0.1:{millrace.free_port()}", *flags)

    cert, key = certificates["server.pem"], certificates["server.key"]
    assert f"cannot read the TLS certificate {tmp_path}/none" in refused("--tls-cert", tmp_path / "none", "--tls-key", key)
    assert f"cannot read the TLS key {tmp_path}/none" in refused("--tls-cert", cert, "--tls-key", tmp_path / "none")
    other = certificates["client.key"]
    assert f"cannot use the TLS key {other}: it is not the key of the certificate" in refused("--tls-cert", cert, "--tls-key", other)
    assert f"cannot use the TLS certificate {key}: there is no certificate in it" in refused("--tls-cert", key, "--tls-key", key)
    assert f"cannot use the TLS authority {key}" in refused(*certificates.flags(), "--tls-ca", key)
    crl = [*certificates.flags(), "--tls-ca", certificates["ca.pem"], "--tls-crl"]
    assert f"cannot use the TLS revocation list {key}: there is no revocation list in it" in refused(*crl, key)
    assert "clients are asked for none" in refused(*crl, key, "--tls-auth-clients", "no")
    assert "add --tls-key FILE" in refused("--tls-cert", cert)
    assert "--tls-listen needs a certificate" in refused("--tls-listen", "127.0.0.1:1")
    assert "no authority is named" in refused(*certificates.flags(), "--tls-auth-clients", "yes")
    assert "no password is set" in refused(*certificates.flags(), "--tls-listen", f"0.0.0.0:{millrace.free_port()}")
    assert not (tmp_path / "db").exists()


def test_an_expired_certificate_is_a_warning(certificates, tmp_path):
    certificates.openssl("x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days -1 -extfile names -out past.pem")
    (certificates["past.key"]).write_bytes(certificates["server.key"].read_bytes())
    node = tls_node(certificates, tmp_path, name="past")
    try:
        said = guest.wait_for("the warning", lambda: "expired" in node.said() and node.said(), 20)
        assert f"the TLS certificate {certificates['past.pem']} expired 24 h ago" in said, said
        context = certificates.context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with TlsConnection(node.port, context) as client:
            assert client.call("PING") == b"PONG"
    finally:
        assert node.stop() == 0


def test_an_upgrade_keeps_both_doors_and_reads_the_files_again(certificates, tmp_path):
    own = Certificates(tmp_path / "own")
    tls_port = millrace.free_port()
    flags = [*own.flags(), "--tls-listen", f"127.0.0.1:{tls_port}", "--state", tmp_path / "state", "--cores", "2"]
    with millrace.node(tmp_path / "db", tmp_path / "log", *flags, writes=True) as node:
        with own.connect(tls_port) as client:
            assert client.call("SET", "k", "v") == b"OK"
        renewed = Certificates(tmp_path / "renewed")
        for name in "server.pem", "server.key":
            own[name].write_bytes(renewed[name].read_bytes())
        with own.connect(tls_port) as client:
            assert client.call("GET", "k") == b"v"
        assert "serves now" in millrace.succeed("upgrade", "--state", tmp_path / "state")
        with renewed.connect(tls_port) as client, node.connect() as plain:
            assert client.call("GET", "k") == plain.call("GET", "k") == b"v"
        own["server.key"].write_bytes(renewed["client.key"].read_bytes())
        assert "the node continues" in millrace.fail("upgrade", "--state", tmp_path / "state")
        assert "it is not the key of the certificate" in node.said()
        with renewed.connect(tls_port) as client:
            assert client.call("GET", "k") == b"v"


def test_a_confined_node_speaks_tls(certificates, tmp_path):
    flags = ["--state", tmp_path / "state", "--tls-ca", certificates["ca.pem"]]
    with tls_node(certificates, tmp_path, *flags, client="client") as node:
        with node.connect() as client:
            assert client.call("SET", "k", "v") == b"OK"
        assert "confined" in node.said()


# Hostile clients.


def closed(connection):
    """What arrives until the other side closes."""
    connection.settimeout(30)
    data = b""
    try:
        while part := connection.recv(1 << 16):
            data += part
    except ConnectionError:
        pass
    return data


def test_a_client_without_tls_is_logged_and_closed(certificates, node):
    with raw(node.port) as plain:
        plain.sendall(resp.encode("PING"))
        assert not closed(plain).startswith(b"+")
    guest.wait_for("the log line", lambda: "the client does not speak TLS" in node.said(), 20)
    with node.connect() as client:
        assert int(info(client, "total_tls_failures")) >= 1


def test_garbage_in_handshakes_affects_only_its_sender(certificates, node, long):
    rng = random.Random(6)
    # A handshake as it is, to be damaged.
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        certificates.context().wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    hello = outgoing.read()
    with node.connect() as good:
        for round_ in range(400 if long else 100):
            with raw(node.port) as bad:
                damaged = bytearray(hello)
                damaged[rng.randrange(len(damaged))] ^= rng.randint(1, 255)
                sent = [
                    rng.randbytes(rng.randint(1, 5000)),
                    bytes(damaged),
                    hello[: rng.randint(1, len(hello) - 1)],
                    b"\x16\x03\x01\xff\xff" + rng.randbytes(100),
                    hello + rng.randbytes(2000),
                    hello + b"\x17\x03\x03\x40\x00" + bytes(16384),
                ][round_ % 6]
                try:
                    for at in range(0, len(sent), 700):
                        bad.sendall(sent[at : at + 700])
                    if round_ % 3 == 0:
                        bad.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                except ConnectionError:
                    pass
            assert good.call("ECHO", str(round_)) == str(round_).encode()
    assert node.alive() and "panicked" not in node.said()


def test_stalled_handshakes_end_and_hold_nobody_up(certificates, node):
    before = node.rss()
    stalled = [raw(node.port) for _ in range(200)]
    try:
        for n, connection in enumerate(stalled):
            # A third says nothing; a third begins a record; a third sends a message of 60,000 bytes in small records.
            if n % 3:
                connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" if n % 3 == 1 else b"\x16\x03\x01\x00\x05\x01\x00\xea\x60\x00")
        with node.connect() as good:
            for n in range(200):
                assert good.call("ECHO", str(n)) == str(n).encode()
            assert int(info(good, "connected_clients")) == 201
            guest.wait_for("the end of the handshakes", lambda: info(good, "connected_clients") == "1", 60)
            assert int(info(good, "total_tls_failures")) == 200
        assert all(not closed(connection).startswith(b"+") for connection in stalled)
        guest.wait_for("the log's line", lambda: "not done within 10 s" in node.said())
        assert node.rss() < before + (64 << 20)
    finally:
        for connection in stalled:
            connection.close()


def test_records_that_do_not_end_hold_bounded_memory(certificates, tmp_path):
    """Each client sends the beginning of a record of 16 KiB. Beyond the memory for TLS they are turned away or closed."""
    with tls_node(certificates, tmp_path, "--memory", "32M") as node:
        context = certificates.context()
        holding = []
        try:
            for _ in range(150):
                try:
                    connection = TlsConnection(node.port, context)
                    connection.call("PING")
                    # Under the record layer: the beginning of a record.
                    os.write(connection.socket.fileno(), b"\x17\x03\x03\x40\x11" + bytes(16000))
                    holding.append(connection)
                except (OSError, ssl.SSLError, resp.Closed):
                    pass
            for connection in holding[: len(holding) // 2]:
                connection.socket.close()
            with node.connect() as good:
                assert good.call("PING") == b"PONG"
                held = int(info(good, "clients_tls_bytes"))
                most = int(good.call("CONFIG", "GET", "memory-connections-per-core")[1]) // 2
                assert held <= most + (20 << 10), (held, most)
                assert int(info(good, "rejected_connections")) + int(info(good, "total_tls_failures")) > 0
        finally:
            for connection in holding:
                connection.socket.close()


def test_clients_that_do_not_read_hold_bounded_memory_and_get_everything_later(certificates, node):
    value = random.Random(2).randbytes(1 << 20)
    with node.connect() as client:
        assert client.call("SET", "large", value) == b"OK"
    before = node.rss()
    slow = [node.connect() for _ in range(8)]
    try:
        for connection in slow:
            connection.send(resp.encode("GET", "large") * 40)
        with node.connect() as good:
            for n in range(200):
                assert good.call("ECHO", str(n)) == str(n).encode()
        assert node.rss() < before + (128 << 20)
        for _ in range(40):
            assert slow[0].reply() == value
    finally:
        for connection in slow:
            connection.socket.close()
