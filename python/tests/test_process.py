"""Programs that end, fork or are interrupted, in whatever state the database is."""

import signal
import subprocess
import sys
import textwrap

import conftest
import pytest


def run(text, *arguments, timeout=60):
    code = textwrap.dedent(text)
    command = [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    return done


def succeed(*arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("how", ["pass", "sys.exit(0)", "os._exit(0)", "db.close()", "del db, view, range_, snapshot"])
def test_a_program_ends_without_closing(tmp_path, how):
    program = f"""
        import os, sys, threading, time, millrace
        db = millrace.open(sys.argv[1])
        db[b"k"] = b"v"
        view, range_, snapshot = db.get_view(b"k"), db.range(), db.snapshot()
        next(range_)
        def forever():
            try:
                while True:
                    db.get(b"k")
            except (millrace.ClosedError, NameError):
                pass
        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.05)
        {how}
    """
    succeed(program, tmp_path)
    assert succeed("import sys, millrace; print(millrace.open(sys.argv[1])[b'k'])", tmp_path) == "b'v'\n"


def test_a_loop_ends_without_closing(tmp_path):
    program = """
        import asyncio, sys, millrace.aio
        async def main():
            db = await millrace.aio.open(sys.argv[1])
            await asyncio.gather(*(db.put(b"%d" % n, b"v") for n in range(100)))
            asyncio.ensure_future(db.put(b"late", b"v"))
            range_ = db.range()
            await range_.__anext__()
        asyncio.run(main())
    """
    succeed(program, tmp_path)


def test_a_child_cannot_use_the_handles_of_its_parent(tmp_path):
    program = """
        import os, sys, millrace
        db = millrace.open(sys.argv[1] + "/a")
        db[b"k"] = b"v"
        child = os.fork()
        if child == 0:
            try:
                db.get(b"k")
            except millrace.ClosedError as error:
                assert "fork" in str(error)
                # One of its own is another matter.
                with millrace.open(sys.argv[1] + "/b") as own:
                    own[b"k"] = b"child"
                sys.exit(7)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert db[b"k"] == b"v"
        with millrace.open(sys.argv[1] + "/b") as other:
            assert other[b"k"] == b"child"
    """
    succeed(program, tmp_path)


def test_what_belongs_to_the_parent_is_left_alone_by_a_child(tmp_path):
    program = """
        import os, sys, millrace
        client = millrace.connect(sys.argv[1], cache=1 << 20)
        client[b"k"] = b"v"
        assert client[b"k"] == b"v"
        transaction = client.transaction()
        assert transaction.get(b"k") == b"v"
        child = os.fork()
        if child == 0:
            refused = 0
            for use in (lambda: transaction.get(b"k"), transaction.commit, lambda: client[b"k"]):
                try:
                    use()
                except millrace.ClosedError as error:
                    refused += "fork" in str(error)
            transaction.abandon()
            client.close()
            del transaction, client
            sys.exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        transaction.set(b"k", b"w")
        transaction.commit()
        assert client[b"k"] == b"w" and client.cache_stats()["clears"] == 0
    """
    with conftest.start_redis(tmp_path) as server:
        succeed(program, server.address)


def test_a_child_connects_for_itself(tmp_path):
    program = """
        import asyncio, os, sys, millrace.aio
        address = sys.argv[1]
        client = millrace.connect(address)
        client[b"k"] = b"v"
        async def get():
            async with millrace.aio.connect(address) as own:
                return await own.get(b"k")
        assert asyncio.run(get()) == b"v"
        child = os.fork()
        if child == 0:
            try:
                client.get(b"k")
            except millrace.ClosedError as error:
                assert "fork" in str(error)
                assert millrace.connect(address)[b"k"] == b"v"
                assert asyncio.run(get()) == b"v"
                sys.exit(7)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client[b"k"] == b"v"
    """
    with conftest.start_redis(tmp_path) as server:
        succeed(program, server.address)


def test_an_interrupt_ends_a_wait(tmp_path):
    """The handler of a signal runs while a call waits, and its exception ends the call."""
    program = """
        import signal, sys, threading, time, millrace
        db = millrace.open(sys.argv[1], durability="process")
        stop = []
        def handle(*_):
            # Another one would end the program while it deals with the first.
            if not stop:
                stop.append(True)
                raise KeyboardInterrupt
        signal.signal(signal.SIGINT, handle)
        def interrupt():
            while not stop:
                time.sleep(0.02)
                signal.raise_signal(signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            n = 0
            while True:
                db.put(b"%d" % n, b"v" * 1000)
                n += 1
        except KeyboardInterrupt:
            pass
        assert db.get(b"0", b"v" * 1000) == b"v" * 1000
        db.close()
        print("interrupted")
    """
    assert succeed(program, tmp_path) == "interrupted\n"


def test_a_killed_program_loses_nothing(tmp_path):
    program = """
        import os, signal, sys, millrace
        db = millrace.open(sys.argv[1], durability="process")
        for n in range(1000):
            db[b"%04d" % n] = b"v"
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(program, tmp_path).returncode == -signal.SIGKILL
    assert succeed("import sys, millrace; print(len(list(millrace.open(sys.argv[1]))))", tmp_path) == "1000\n"
