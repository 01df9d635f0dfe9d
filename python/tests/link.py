"""What a client does when its link to the server is cut: link.py ADDRESS NAMESPACE INTERFACE. Runs in a network
namespace of its own; the interface is the server's end. `test_link.py` starts it."""

import subprocess
import sys
import time

import millrace

ADDRESS, NAMESPACE, INTERFACE = sys.argv[1:]
HOST, PORT = ADDRESS.split(":")
TIMEOUT = 1.0


def link(state):
    subprocess.run(["ip", "-n", NAMESPACE, "link", "set", INTERFACE, state], check=True)


def beside_the_server(*words):
    """What redis-cli says that runs in the namespace of the server, where no link is between them."""
    command = ["ip", "netns", "exec", NAMESPACE, "redis-cli", "-h", HOST, "-p", PORT, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def sets():
    """How many SETs the server has executed."""
    for line in beside_the_server("INFO", "commandstats").splitlines():
        if line.startswith("cmdstat_set:calls="):
            return int(line.split("=")[1].split(",")[0])
    return 0


def fails(call, *arguments):
    """The error of a call that must fail. It must end by itself; how soon depends on the machine, so the bound is wide."""
    began = time.monotonic()
    try:
        found = call(*arguments)
    except millrace.Error as error:
        return error
    finally:
        assert time.monotonic() - began < 20 * TIMEOUT, f"{call.__name__} took {time.monotonic() - began} s"
    raise AssertionError(f"{call.__name__}{arguments}: {found!r}")


def until_it_works(call, *arguments):
    deadline = time.monotonic() + 60
    while True:
        try:
            return call(*arguments)
        except millrace.Error:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def main():
    with millrace.connect(ADDRESS, timeout=TIMEOUT, connect_timeout=TIMEOUT, cache=1 << 20, staleness_max=2.0) as client:
        for round in range(2):
            client.set(b"a", b"old %d" % round)
            for _ in range(3):
                assert client.get(b"a") == b"old %d" % round
            hits = client.cache_stats()["hits"]
            assert hits > 0

            before = sets()
            link("down")
            # Sent, and perhaps made: the client must neither hang nor send it again.
            error = fails(client.set, b"b", b"%d" % round)
            assert isinstance(error, (millrace.OutcomeUnknownError, millrace.UnreachableError, millrace.TimeoutError)), repr(error)
            new = b"new %d" % round
            beside_the_server("SET", "a", new.decode())
            # The cache may answer for as long as the options say, and not longer.
            deadline = time.monotonic() + 60
            while True:
                try:
                    assert client.get(b"a") == b"old %d" % round
                except millrace.Error:
                    break
                assert time.monotonic() < deadline, "the cache goes on answering without a link"
                time.sleep(0.05)
            for _ in range(2):
                fails(client.get, b"a")
                fails(client.delete, b"missing")
            link("up")
            assert until_it_works(client.get, b"a") == new, "what was cached before the cut"
            assert until_it_works(client.get, b"a") == new
            # What was on its way may still arrive, once.
            assert sets() - before - 1 in (0, 1), "the write was sent again"
            until_it_works(client.set, b"c", b"%d" % round)
            assert client.get(b"c") == b"%d" % round


main()
