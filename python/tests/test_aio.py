"""Databases, for asyncio."""

import asyncio
import gc
import inspect
import os
import random

import millrace
import millrace.aio
import pytest

FAST = {"durability": "process", "memory": 32 << 20}


def run(main):
    asyncio.run(asyncio.wait_for(main, 60))


def test_everything(tmp_path):
    async def main():
        async with millrace.aio.open(tmp_path / "db", merge_operator="stringappend", **FAST) as db:
            await db.put(b"a", b"1")
            await db.merge(b"a", b"2")
            assert await db.get(b"a") == b"1,2" and await db.get(b"b", 0) == 0
            assert bytes(await db.get_view(b"a")) == b"1,2"
            await db.put(bytearray(b"b"), memoryview(b"2"))
            assert await db.multi_get([b"a", b"b", b"c"]) == [b"1,2", b"2", None]
            assert [e async for e in db.range(b"b")] == [(b"b", b"2")]
            assert [e async for e in db.prefix(b"a")] == [(b"a", b"1,2")]
            assert [k async for k in db.keys(reverse=True)] == [b"b", b"a"]
            users = await db.create_column_family("users")
            batch = millrace.aio.WriteBatch()
            batch.put(b"c", b"3")
            batch.delete(b"a")
            await db.write(batch)
            async with db.snapshot() as before:
                await users.put(b"1", b"Ada")
                await db.delete(b"b")
                assert await before.get(b"b") == b"2"
                assert await before.get(b"1", column_family=users) is None
                assert await before.multi_get([b"b", b"c"]) == [b"2", b"3"]
                assert [k async for k in before.keys()] == [b"b", b"c"]
                assert [e async for e in before.range(column_family=users)] == []
                assert [e async for e in before.prefix(b"b")] == [(b"b", b"2")]
            async with db.transaction() as transaction:
                assert await transaction.get(b"1", column_family=users) == b"Ada"
                transaction.put(b"2", b"Brian", column_family=users)
                transaction.delete(b"c")
                values = await asyncio.gather(transaction.get(b"c"), transaction.multi_get([b"c"]))
                assert values == [None, [None]]
                assert await transaction.snapshot().get(b"c") == b"3"
            with pytest.raises(millrace.ConflictError):
                async with db.transaction() as transaction:
                    await transaction.get(b"c")
                    await db.put(b"c", b"4")
                    transaction.put(b"c", b"5")
            transaction = await db.transaction()
            transaction.put(b"c", b"6")
            await transaction.commit()
            assert await db.get(b"c") == b"6"
            await db.delete_range(b"a", b"z")
            assert await db.column_families() == ["default", "users"]
            assert (await db.column_family("users")).name == "users"
            await db.sync()
            await db.flush()
            await db.compact()
            await users.compact()
            await db.checkpoint(tmp_path / "copy")
            await db.drop_column_family("users")
        with pytest.raises(millrace.ClosedError):
            await db.get(b"a")
        copy = await millrace.aio.open(tmp_path / "copy", **FAST)
        assert await (await copy.column_family("users")).get(b"2") == b"Brian"
        await copy.close()
        with pytest.raises(TypeError, match="encode it"):
            await copy.get("text")

    run(main())


def test_a_thousand_tasks(tmp_path):
    async def task(db, n):
        randoms = random.Random(n)
        key = b"%04d" % n
        for step in range(10):
            value = b"%d" % randoms.randrange(1000)
            await db.put(key, value)
            if step % 3 == 0:
                await asyncio.sleep(0)
            assert await db.get(key) == value
            assert (await db.multi_get([key, b"none"])) == [value, None]
        assert [k async for k in db.keys(key, key + b"\0")] == [key]

    async def main():
        before = len(os.listdir("/proc/self/task"))
        async with millrace.aio.open(tmp_path, **FAST) as db:
            tasks = [asyncio.create_task(task(db, n)) for n in range(1000)]
            await asyncio.sleep(0.01)
            # One core, and what it needs besides: not a thread for each call.
            assert len(os.listdir("/proc/self/task")) < before + 16
            await asyncio.gather(*tasks)
            assert [k async for k in db.keys()] == [b"%04d" % n for n in range(1000)]

    run(main())


def test_methods_are_coroutine_functions():
    for name in ("get", "put", "multi_get", "write", "close"):
        assert inspect.iscoroutinefunction(getattr(millrace.aio.Db, name))


def test_cancellation_at_any_time(tmp_path):
    """Tasks that are cancelled after a random time leave whole batches, and nothing that hangs."""

    async def write(db, n):
        batch = millrace.WriteBatch()
        for part in range(10):
            batch.put(b"%d-%04d" % (part, n), b"v" * 100)
        await db.write(batch)
        async for _ in db.range():
            await db.get(b"0-%04d" % n)

    async def main():
        randoms = random.Random(3)
        async with millrace.aio.open(tmp_path, **FAST) as db:
            tasks = [asyncio.create_task(write(db, n)) for n in range(600)]
            for task in randoms.sample(tasks, 450):
                if randoms.random() < 0.3:
                    await asyncio.sleep(0)
                task.cancel()
            left = [task for task in tasks if not task.cancelling()]
            await asyncio.sleep(0.2)
            for task in left:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(result is None or isinstance(result, asyncio.CancelledError) for result in done)
            await db.put(b"after", b"1")
            assert await db.get(b"after") == b"1"
            await db.sync()
            parts = [[k[2:] async for k in db.keys(b"%d-" % part, b"%d." % part)] for part in range(10)]
            assert parts[0] and all(part == parts[0] for part in parts)

    run(main())


def test_a_cancelled_wait_loses_no_entry(tmp_path):
    async def main():
        async with millrace.aio.open(tmp_path, **FAST) as db:
            batch = millrace.WriteBatch()
            for n in range(20_000):
                batch.put(b"%06d" % n, b"v" * 50)
            await db.write(batch)
            await db.flush()
            keys, seen, cancelled = db.keys(), [], 0
            while True:
                step = asyncio.ensure_future(keys.__anext__())
                if len(seen) % 3 == 0:
                    await asyncio.sleep(0)
                    if not step.done():
                        step.cancel()
                try:
                    seen.append(await step)
                except asyncio.CancelledError:
                    cancelled += 1
                    await asyncio.sleep(0.001)
                except StopAsyncIteration:
                    break
            assert seen == [b"%06d" % n for n in range(20_000)]

    run(main())


def test_a_transaction_survives_a_cancelled_read(tmp_path):
    async def main():
        async with millrace.aio.open(tmp_path, **FAST) as db:
            await db.put(b"k", b"1")
            transaction = await db.transaction()
            for _ in range(20):
                read = asyncio.ensure_future(transaction.get(b"k"))
                await asyncio.sleep(0)
                read.cancel()
                await asyncio.gather(read, return_exceptions=True)
            assert await transaction.get(b"k") == b"1"
            await db.put(b"k", b"2")
            transaction.put(b"k", b"3")
            with pytest.raises(millrace.ConflictError):
                await transaction.commit()

    run(main())


def test_one_database_in_several_loops(tmp_path):
    opened = []

    async def begin():
        opened.append(await millrace.aio.open(tmp_path, **FAST))
        await opened[0].put(b"k", b"0")

    async def go_on(n):
        assert await opened[0].get(b"k") == b"%d" % n
        await opened[0].put(b"k", b"%d" % (n + 1))

    run(begin())
    for n in range(20):
        run(go_on(n))
        gc.collect()
    threads_end = asyncio.new_event_loop()
    threads_end.run_until_complete(opened[0].close())
    threads_end.close()


def test_a_loop_that_ends_with_calls_under_way(tmp_path):
    async def begin(db):
        for n in range(500):
            asyncio.ensure_future(db.put(b"%d" % n, b"v"))
            asyncio.ensure_future(db.get(b"%d" % n))
        await asyncio.sleep(0)

    async def main():
        return await millrace.aio.open(tmp_path, **FAST)

    db = asyncio.run(main())
    for _ in range(5):
        # It cancels what is left.
        asyncio.run(begin(db))
    asyncio.run(db.close())


def test_a_call_needs_a_running_loop(tmp_path):
    with pytest.raises(RuntimeError, match="no running event loop"):
        millrace._native.open(tmp_path, False)
