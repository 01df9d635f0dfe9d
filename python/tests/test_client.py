"""Clients, of a node and of redis-server."""

import asyncio
import math
import re
import socket
import subprocess
import threading
import time

import conftest
import millrace
import millrace.aio
import pytest


def test_everything_for_threads(server, request):
    is_node = "node" in request.node.name
    with millrace.connect(server.address, timeout=10) as client:
        client.set(b"a", b"1")
        client[b"b"] = bytearray(b"2")
        assert client.get(b"a") == client[b"a"] == b"1" and client.get(b"c", 0) == 0
        assert b"a" in client and b"c" not in client
        assert client.multi_get([b"a", b"c", b"b"]) == [b"1", None, b"2"]
        assert client.delete(b"a") is True and client.delete(b"a") is False
        with pytest.raises(KeyError):
            client[b"a"]
        batch = millrace.ClientBatch()
        batch.set(b"c", b"3")
        batch.delete(b"b")
        assert len(batch) == 2 and batch.size == 3
        client.write(batch)
        assert client.multi_get([b"b", b"c"]) == [None, b"3"]
        with client.transaction() as transaction:
            assert transaction.get(b"c") == b"3"
            transaction.set(b"d", b"4")
            transaction.delete(b"c")
        with pytest.raises(millrace.ConflictError), client.transaction() as transaction:
            transaction.get(b"d")
            client[b"d"] = b"5"
            transaction.set(b"d", b"6")
        assert client[b"d"] == b"5"
        del client[b"d"]
        if is_node:
            for n in range(3000):
                client.set(b"n%04d" % n, b"%d" % n)
            assert [k for k, _ in client.range(b"n", b"o")] == [b"n%04d" % n for n in range(3000)]
            assert [v for _, v in client.prefix(b"n000", reverse=True)] == [b"%d" % n for n in range(9, -1, -1)]
            assert client.delete_range(b"n", b"o") == 3000
            batch.clear()
            batch.delete_range(b"a", b"b")
            client.write(batch)
        else:
            with pytest.raises(millrace.UnsupportedError):
                list(client.range())
        client.wait_coherent()
        assert client.cache_stats()["hits"] == 0
    with pytest.raises(millrace.ClosedError):
        client.get(b"a")


def test_everything_for_asyncio(server, request):
    is_node = "node" in request.node.name

    async def main():
        async with millrace.aio.connect(server.address, timeout=10) as client:
            await asyncio.gather(*(client.set(b"n%04d" % n, b"%d" % n) for n in range(1500)))
            values = await asyncio.gather(*(client.get(b"n%04d" % n) for n in range(1500)))
            assert values == [b"%d" % n for n in range(1500)]
            assert await client.get(b"none", 0) == 0
            assert await client.multi_get([b"n0001", b"none"]) == [b"1", None]
            assert await client.delete(b"n0001") is True and await client.delete(b"n0001") is False
            batch = millrace.aio.ClientBatch()
            batch.set(b"a", b"1")
            batch.delete(b"n0002")
            await client.write(batch)
            async with client.transaction() as transaction:
                assert await transaction.get(b"a") == b"1"
                transaction.set(b"a", b"2")
            with pytest.raises(millrace.ConflictError):
                async with client.transaction() as transaction:
                    await transaction.get(b"a")
                    await client.set(b"a", b"3")
                    transaction.delete(b"a")
            assert await client.get(b"a") == b"3"
            if is_node:
                seen = [k async for k, _ in client.range(b"n")]
                assert seen == [b"n%04d" % n for n in range(1500) if n not in (1, 2)]
                assert [k async for k, _ in client.prefix(b"n148", reverse=True)] == [
                    b"n%04d" % n for n in range(1489, 1479, -1)
                ]
                assert await client.delete_range(b"n", b"o") == 1498
            else:
                with pytest.raises(millrace.UnsupportedError):
                    [e async for e in client.range()]
            # Cancelled calls leave a connection that works.
            tasks = [asyncio.create_task(client.set(b"c%d" % n, b"v")) for n in range(200)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await client.get(b"c1") == b"v"
            await client.wait_coherent()
        with pytest.raises(millrace.ClosedError):
            await client.get(b"a")

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("options", [{}, {"cache": 1 << 20}])
def test_keys_with_deadlines_for_threads(server, options):
    with millrace.connect(server.address, timeout=10, **options) as client:
        assert client.ttl(b"k") is None and client.expire(b"k", 60) is False and client.persist(b"k") is False
        client.set(b"k", b"1", ttl=60)
        assert client[b"k"] == b"1" and 30 < client.ttl(b"k") <= 60
        assert client.persist(b"k") is True and client.ttl(b"k") == math.inf and client.persist(b"k") is False
        assert client.expire(b"k", 0.5 * 3600) is True and 900 < client.ttl(b"k") <= 1800
        client[b"k"] = b"2"
        assert client.ttl(b"k") == math.inf
        batch = millrace.ClientBatch()
        batch.set(b"k", b"3", ttl=60)
        batch.set(b"other", b"3")
        client.write(batch)
        assert client.multi_get([b"k", b"other"]) == [b"3", b"3"]
        assert 30 < client.ttl(b"k") <= 60 and client.ttl(b"other") == math.inf
        with client.transaction() as transaction:
            assert transaction.get(b"k") == b"3"
            transaction.set(b"other", b"4", ttl=60)
            transaction.set(b"k", b"4")
        assert client.ttl(b"k") == math.inf and 30 < client.ttl(b"other") <= 60
        for impossible in (0, -1, math.nan, math.inf, 1e18):
            for call in (client.set, batch.set):
                with pytest.raises(millrace.InvalidOptionError):
                    call(b"k", b"5", ttl=impossible)
                    client.write(batch)
            batch.clear()
            with pytest.raises(millrace.InvalidOptionError):
                client.expire(b"k", impossible)
        assert client[b"k"] == b"4"
        # It ends, whether the cache has it or not.
        client.set(b"k", b"6", ttl=0.01)
        deadline = time.monotonic() + 60
        while client.get(b"k") is not None:
            assert time.monotonic() < deadline
        assert client.ttl(b"k") is None


def test_keys_with_deadlines_for_asyncio(server):
    async def main():
        async with millrace.aio.connect(server.address, timeout=10, cache=1 << 20) as client:
            assert await client.ttl(b"k") is None and await client.expire(b"k", 60) is False
            await client.set(b"k", b"1", ttl=60)
            assert 30 < await client.ttl(b"k") <= 60
            assert await client.persist(b"k") is True and await client.persist(b"k") is False
            assert await client.ttl(b"k") == math.inf
            async with client.transaction() as transaction:
                assert await transaction.get(b"k") == b"1"
                transaction.set(b"k", b"2", ttl=60)
            assert await client.get(b"k") == b"2" and 30 < await client.ttl(b"k") <= 60
            with pytest.raises(millrace.InvalidOptionError):
                await client.set(b"k", b"3", ttl=0)
            assert await client.expire(b"k", 0.01) is True
            await client.get(b"k")
            while await client.ttl(b"k") is not None:
                pass
            assert await client.get(b"k") is None

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_cache_is_kept_coherent(redis):
    with millrace.connect(redis.address, cache=1 << 20) as client, millrace.connect(redis.address) as other:
        client[b"k"] = b"1"
        for _ in range(100):
            assert client[b"k"] == b"1"
        assert client.cache_stats()["misses"] == 1
        other[b"k"] = b"2"
        client.wait_coherent()
        assert client[b"k"] == b"2"

    async def main():
        async with millrace.aio.connect(redis.address, cache=1 << 20) as client:
            for _ in range(100):
                assert await client.get(b"k") == b"2"
            assert client.cache_stats()["misses"] == 1

    asyncio.run(main())


def calls(admin, command):
    """How often the server was asked so: its own count. Those of `admin` count, too."""
    with socket.create_connection(("127.0.0.1", admin.port), 10) as connection, connection.makefile("rb") as replies:
        connection.sendall(b"INFO commandstats\r\n")
        text = replies.read(int(replies.readline()[1:])).decode()
    found = re.search(rf"^cmdstat_{command}:calls=(\d+)", text, re.M)
    return int(found.group(1)) if found else 0


def wait_for_index(client):
    deadline = time.monotonic() + 60
    while not client.cache_stats()["index_is_whole"]:
        assert time.monotonic() < deadline, client.cache_stats()
        time.sleep(0.01)


def test_with_an_index_a_key_that_does_not_exist_is_no_round_trip(node):
    with millrace.connect(node.address) as other:
        batch = millrace.ClientBatch()
        for n in range(1000):
            batch.set(b"there %d" % n, b"v")
        other.write(batch)
        with millrace.connect(node.address, cache=1 << 20, index=1 << 20) as client:
            wait_for_index(client)
            before = calls(node, "get") + calls(node, "mget")
            assert all(client.get(b"none %d" % n) is None for n in range(1000))
            assert client.multi_get([b"none at all", b"none either"]) == [None, None]
            assert calls(node, "get") + calls(node, "mget") == before
            stats = client.cache_stats()
            assert stats["index_answers"] == 1002 and stats["round_trips"] == stats["misses"] == 0
            assert stats["index_keys"] == 1000 and stats["index_loads"] == 1
            assert 0 < stats["index_bytes"] <= 1 << 20 and stats["index_load_time"] > 0
            # What others make is there.
            other[b"none 7"] = b"made"
            client.wait_coherent()
            assert client.get(b"none 7") == b"made" and client.get(b"there 7") == b"v"
            assert calls(node, "get") == before + 2


def test_with_an_index_a_key_that_does_not_exist_is_no_round_trip_for_tasks(node):
    async def main():
        async with millrace.aio.connect(node.address, cache=1 << 20, index=1 << 20) as client:
            await client.set(b"there", b"v")
            while not client.cache_stats()["index_is_whole"]:
                await asyncio.sleep(0.01)
            assert await asyncio.gather(*(client.get(b"none %d" % n) for n in range(100))) == [None] * 100
            assert calls(node, "get") == 0 and client.cache_stats()["index_answers"] == 100
            assert await client.get(b"there") == b"v" and calls(node, "get") == 1

    asyncio.run(asyncio.wait_for(main(), 60))


def fill_in_order(client, count):
    """Sets keys one after the other; their values are in blob files, but for some of the first."""
    for first in range(0, count, 100):
        batch = millrace.ClientBatch()
        for n in range(first, first + 100):
            batch.set(b"in order %d" % n, b"%4000d" % n)
        client.write(batch)


@pytest.fixture
def node_with_blobs(tmp_path):
    with conftest.start_node(tmp_path, "--blob-min", "1K") as server:
        yield server


AHEAD = {"cache": 64 << 20, "read_ahead": 2 << 20}


def test_with_read_ahead_reads_in_the_order_of_the_writes_are_few_round_trips(node_with_blobs):
    node = node_with_blobs
    with millrace.connect(node.address, **AHEAD) as client:
        fill_in_order(client, 5000)
        for n in range(1000, 5000):
            assert client.get(b"in order %d" % n) == b"%4000d" % n
        stats = client.cache_stats()
        assert stats["stretches"] > 0 and stats["values_ahead_used"] > 3000
        assert stats["round_trips"] < 400, stats
        # Each of these is the value alone, or its place, too.
        assert calls(node, "get") + calls(node, r"mr\.get") < 400
        assert calls(node, r"mr\.stretch") > 0


def test_with_read_ahead_reads_in_the_order_of_the_writes_are_few_round_trips_for_tasks(node_with_blobs):
    async def main():
        async with millrace.aio.connect(node_with_blobs.address, **AHEAD) as client:
            await asyncio.to_thread(fill)
            for n in range(1000, 5000):
                assert await client.get(b"in order %d" % n) == b"%4000d" % n
            stats = client.cache_stats()
            assert stats["stretches"] > 0 and stats["round_trips"] < 400, stats

    def fill():
        with millrace.connect(node_with_blobs.address) as client:
            fill_in_order(client, 5000)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_read_ahead_and_an_index_on_a_redis_server_are_plain_reads(redis):
    with millrace.connect(redis.address, **AHEAD, index=1 << 20) as client:
        client[b"k"] = b"v"
        assert client.get(b"k") == b"v" and client.get(b"none") is None
        stats = client.cache_stats()
        assert (stats["misses"], stats["stretches"], stats["index_is_whole"], stats["index_loads"]) == (2, 0, False, 0)


@pytest.mark.parametrize("options", [{"read_ahead": 1 << 20}, {"index": 1 << 20}, {"cache": 4 << 20, "index": 1}])
def test_read_ahead_and_an_index_without_room_are_refused(options):
    with pytest.raises(millrace.InvalidOptionError, match=[*options][-1]):
        millrace.connect("127.0.0.1:1", **options)


def test_threads_share_a_client(node):
    with millrace.connect(node.address) as client:

        def work(name):
            for n in range(100):
                client.set(b"%d-%d" % (name, n), b"v")
                assert client.get(b"%d-%d" % (name, n)) == b"v"

        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(1 for _ in client.range()) == 800


def test_a_password(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("tell nobody")
    with conftest.start_node(tmp_path, "--password-file", secret) as server:
        for wrong in ({}, {"password": "guess"}):
            with pytest.raises(millrace.DeniedError) as raised, millrace.connect(server.address, **wrong) as client:
                client.get(b"k")
            assert isinstance(raised.value, PermissionError)
        with millrace.connect(server.address, password="tell nobody") as client:
            client[b"k"] = b"v"
            assert client[b"k"] == b"v"


def test_tls(tmp_path):
    def openssl(arguments):
        subprocess.run(["openssl", *arguments.split()], cwd=tmp_path, check=True, capture_output=True)

    new = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    openssl(f"{new} -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.pem")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1")
    openssl(f"{new} -subj /CN=server -keyout server.key -out server.csr")
    openssl("x509 -req -days 2 -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names -out server.pem")
    port = conftest.free_port()
    flags = ["--tls-port", port, "--tls-cert-file", "server.pem", "--tls-key-file", "server.key"]
    flags += ["--tls-ca-cert-file", "ca.pem", "--tls-auth-clients", "no"]
    flags = [tmp_path / word if str(word).endswith((".pem", ".key")) else word for word in flags]
    with conftest.start_redis(tmp_path, *flags):
        address = f"127.0.0.1:{port}"
        with millrace.connect(address, tls_authority=tmp_path / "ca.pem") as client:
            client[b"k"] = b"v"
        with millrace.connect(f"rediss://{address}", tls_authority=tmp_path / "ca.pem") as client:
            assert client[b"k"] == b"v"
        with pytest.raises(millrace.Error):
            millrace.connect(address, tls=True)
    with pytest.raises(millrace.InvalidOptionError, match="together"):
        millrace.connect(address, tls_certificate="client.pem")


def test_errors_have_classes(redis):
    port = conftest.free_port()
    with pytest.raises(millrace.UnreachableError) as raised:
        millrace.connect(f"127.0.0.1:{port}")
    assert isinstance(raised.value, ConnectionError)
    for address, options in [("nowhere", {}), (redis.address, {"timeout": -1.0}), (redis.address, {"cache": 1})]:
        with pytest.raises(millrace.InvalidOptionError):
            millrace.connect(address, **options)
    with millrace.connect(redis.address) as client:
        client.set(b"k", b"v")
        redis.process.kill()
        redis.process.wait()
        with pytest.raises((millrace.UnreachableError, millrace.TimeoutError)):
            with millrace.connect(redis.address, timeout=0.5):
                pass

    async def main():
        with pytest.raises(millrace.UnreachableError):
            await millrace.aio.connect(f"127.0.0.1:{port}")

    asyncio.run(main())
