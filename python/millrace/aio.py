"""Millrace for asyncio.

    import millrace.aio

    async with millrace.aio.open("/tmp/example.db") as db:
        await db.put(b"hello", b"world")
        async for key, value in db.prefix(b"h"):
            print(key, value)

No thread waits for a call: a database or a connection wakes the loop, once for all calls that have their answers. The
classes have the methods of those in `millrace`, as coroutines. Cancelling one is safe: what was not handed over yet has
not begun, what was handed over goes on without its caller, a write as well. The loop must have `add_reader`.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast, overload

from . import _native
from ._native import ClientBatch, WriteBatch
from ._options import ConnectOptions, OpenOptions
from ._stats import CacheStats

if TYPE_CHECKING:
    from typing import Unpack

    from typing_extensions import Buffer

__all__ = [
    "Client",
    "ClientBatch",
    "ClientTransaction",
    "ColumnFamily",
    "Db",
    "Range",
    "Snapshot",
    "Transaction",
    "WriteBatch",
    "connect",
    "open",
]

_D = TypeVar("_D")


class _Managed(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


_T = TypeVar("_T", bound=_Managed)


class _Soon(Generic[_T]):
    """Something that is awaited, or used with `async with`."""

    __slots__ = ("_begin", "_made")

    def __init__(self, begin: Callable[[], Awaitable[_T]]) -> None:
        self._begin = begin
        self._made: _T | None = None

    def __await__(self) -> Generator[Any, Any, _T]:
        return self._begin().__await__()

    async def __aenter__(self) -> _T:
        made = await self._begin()
        self._made = made
        return await made.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        made, self._made = self._made, None
        if made is not None:
            await made.__aexit__(kind, error, trace)


_E = TypeVar("_E")


class Range(Generic[_E]):
    """An asynchronous iterator over the entries (key, value) of a range, or over its keys. Tasks may share one: each
    entry goes to one of them."""

    __slots__ = ("_raw", "_turn")

    def __init__(self, raw: "_native.Range[_E]") -> None:
        self._raw = raw
        self._turn = asyncio.Lock()

    def __aiter__(self) -> AsyncIterator[_E]:
        return self

    async def __anext__(self) -> _E:
        while (entry := self._raw._pop()) is None:
            async with self._turn:
                # Another task may have filled it meanwhile.
                if (entry := self._raw._pop()) is not None:
                    return entry
                await self._raw._fill()
        return entry


class ColumnFamily:
    """A column family of an open database; see `millrace.ColumnFamily`."""

    __slots__ = ("_raw",)

    def __init__(self, raw: _native.ColumnFamily) -> None:
        self._raw: Any = raw

    def __repr__(self) -> str:
        return f"<millrace.aio.ColumnFamily {self.name!r}>"

    @property
    def name(self) -> str:
        """The name of the column family."""
        return cast(str, self._raw.name)

    @overload
    async def get(self, key: "Buffer") -> bytes | None: ...
    @overload
    async def get(self, key: "Buffer", default: _D) -> bytes | _D: ...
    async def get(self, key: "Buffer", default: Any = None) -> Any:
        """Looks up a key; returns `default` if there is no such key."""
        value = await self._raw.get(key)
        return default if value is None else value

    async def get_view(self, key: "Buffer") -> memoryview | None:
        """Looks up a key; returns the value as a read-only memoryview without a copy, or None."""
        return cast("memoryview | None", await self._raw.get_view(key))

    async def multi_get(self, keys: "Iterable[Buffer]") -> list[bytes | None]:
        """Looks up many keys, and reads all that is not in memory at the same time."""
        return cast("list[bytes | None]", await self._raw.multi_get(keys))

    async def put(self, key: "Buffer", value: "Buffer") -> None:
        """Sets a key."""
        await self._raw.put(key, value)

    async def delete(self, key: "Buffer") -> None:
        """Deletes a key, whether it exists or not."""
        await self._raw.delete(key)

    async def delete_range(self, start: "Buffer", stop: "Buffer") -> None:
        """Deletes all keys from `start` to before `stop`, with one write."""
        await self._raw.delete_range(start, stop)

    async def merge(self, key: "Buffer", operand: "Buffer") -> None:
        """Adds an operand to a key, which the merge operator combines with its value when it is read."""
        await self._raw.merge(key, operand)

    def range(
        self, start: "Buffer | None" = None, stop: "Buffer | None" = None, *, reverse: bool = False
    ) -> Range[tuple[bytes, bytes]]:
        """Iterates over the entries from `start` to before `stop`; with `reverse` from the last to the first."""
        return Range(self._raw.range(start, stop, reverse=reverse))

    def prefix(self, prefix: "Buffer", *, reverse: bool = False) -> Range[tuple[bytes, bytes]]:
        """Iterates over the entries whose keys begin with `prefix`."""
        return Range(self._raw.prefix(prefix, reverse=reverse))

    def keys(
        self, start: "Buffer | None" = None, stop: "Buffer | None" = None, *, reverse: bool = False
    ) -> Range[bytes]:
        """Iterates over the keys from `start` to before `stop`."""
        return Range(self._raw.keys(start, stop, reverse=reverse))

    async def compact(self, start: "Buffer | None" = None, stop: "Buffer | None" = None) -> None:
        """Compacts the tables from `start` to before `stop` into the deepest level."""
        await self._raw.compact(start, stop)


class Db(ColumnFamily):
    """An open database, and its default column family; see `millrace.Db`. In an `async with` statement it is closed at
    the end."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<millrace.aio.Db {str(self.path)!r}>"

    @property
    def path(self) -> os.PathLike[str]:
        """The directory."""
        return cast("os.PathLike[str]", self._raw.path)

    async def write(self, batch: WriteBatch) -> None:
        """Writes a batch, all of it or nothing. The batch may be used again."""
        await self._raw.write(batch)

    def snapshot(self) -> "_Soon[Snapshot]":
        """Takes a snapshot of the present state: `await` it, or use it with `async with`."""

        async def begin() -> Snapshot:
            return Snapshot(await self._raw.snapshot())

        return _Soon(begin)

    def transaction(self) -> "_Soon[Transaction]":
        """Begins an optimistic transaction: `await` it, or use it with `async with`."""

        async def begin() -> Transaction:
            return Transaction(await self._raw.transaction())

        return _Soon(begin)

    async def column_families(self) -> list[str]:
        """The names of all column families, the default one first."""
        return cast("list[str]", await self._raw.column_families())

    async def column_family(self, name: str) -> ColumnFamily:
        """The column family with a name."""
        return ColumnFamily(await self._raw.column_family(name))

    async def create_column_family(self, name: str) -> ColumnFamily:
        """Creates a column family. It is durable when this returns."""
        return ColumnFamily(await self._raw.create_column_family(name))

    async def drop_column_family(self, name: str) -> None:
        """Drops a column family with everything in it."""
        await self._raw.drop_column_family(name)

    async def checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Makes a checkpoint in a new directory."""
        await self._raw.checkpoint(path)

    async def sync(self) -> None:
        """Makes everything that was acknowledged before survive a power cut."""
        await self._raw.sync()

    async def flush(self) -> None:
        """Writes all memtables to tables. It is not needed for durability."""
        await self._raw.flush()

    async def close(self) -> None:
        """Closes the database for all handles, and waits for the end."""
        await self._raw.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        await self.close()


def _raw_family(column_family: ColumnFamily | None) -> Any:
    return None if column_family is None else column_family._raw


class Snapshot:
    """The state of a database at one moment; see `millrace.Snapshot`."""

    __slots__ = ("_raw",)

    def __init__(self, raw: _native.Snapshot) -> None:
        self._raw: Any = raw

    @overload
    async def get(self, key: "Buffer", *, column_family: ColumnFamily | None = None) -> bytes | None: ...
    @overload
    async def get(
        self, key: "Buffer", default: _D, *, column_family: ColumnFamily | None = None
    ) -> bytes | _D: ...
    async def get(
        self, key: "Buffer", default: Any = None, *, column_family: ColumnFamily | None = None
    ) -> Any:
        """Looks up a key; returns `default` if there is no such key."""
        value = await self._raw.get(key, column_family=_raw_family(column_family))
        return default if value is None else value

    async def multi_get(
        self, keys: "Iterable[Buffer]", *, column_family: ColumnFamily | None = None
    ) -> list[bytes | None]:
        """Looks up many keys, all at this moment."""
        return cast("list[bytes | None]", await self._raw.multi_get(keys, column_family=_raw_family(column_family)))

    def range(
        self,
        start: "Buffer | None" = None,
        stop: "Buffer | None" = None,
        *,
        reverse: bool = False,
        column_family: ColumnFamily | None = None,
    ) -> Range[tuple[bytes, bytes]]:
        """Iterates over the entries from `start` to before `stop`."""
        return Range(self._raw.range(start, stop, reverse=reverse, column_family=_raw_family(column_family)))

    def prefix(
        self, prefix: "Buffer", *, reverse: bool = False, column_family: ColumnFamily | None = None
    ) -> Range[tuple[bytes, bytes]]:
        """Iterates over the entries whose keys begin with `prefix`."""
        return Range(self._raw.prefix(prefix, reverse=reverse, column_family=_raw_family(column_family)))

    def keys(
        self,
        start: "Buffer | None" = None,
        stop: "Buffer | None" = None,
        *,
        reverse: bool = False,
        column_family: ColumnFamily | None = None,
    ) -> Range[bytes]:
        """Iterates over the keys from `start` to before `stop`."""
        return Range(self._raw.keys(start, stop, reverse=reverse, column_family=_raw_family(column_family)))

    def close(self) -> None:
        """Releases the snapshot."""
        self._raw.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()


class _Work:
    """What transactions have in common. Their reads take turns, so that tasks may share one."""

    __slots__ = ("_ended", "_raw", "_turn")

    def __init__(self, raw: Any) -> None:
        self._raw: Any = raw
        self._turn = asyncio.Lock()
        self._ended = False

    async def commit(self) -> None:
        """Makes the writes, all together. Raises ConflictError if a key that was read was written meanwhile; then
        nothing was written."""
        async with self._turn:
            self._ended = True
            await self._raw.commit()

    def abandon(self) -> None:
        """Abandons the transaction. Nothing is written."""
        self._ended = True
        self._raw.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if kind is not None:
            self.abandon()
        elif not self._ended:
            await self.commit()


class Transaction(_Work):
    """Reads and writes that take effect together at the commit, or not at all; see `millrace.Transaction`. In an
    `async with` statement it is committed at the end, or abandoned after an exception."""

    __slots__ = ()

    @overload
    async def get(self, key: "Buffer", *, column_family: ColumnFamily | None = None) -> bytes | None: ...
    @overload
    async def get(
        self, key: "Buffer", default: _D, *, column_family: ColumnFamily | None = None
    ) -> bytes | _D: ...
    async def get(
        self, key: "Buffer", default: Any = None, *, column_family: ColumnFamily | None = None
    ) -> Any:
        """Looks up a key, which nobody else may write until the commit."""
        async with self._turn:
            value = await self._raw.get(key, column_family=_raw_family(column_family))
        return default if value is None else value

    async def multi_get(
        self, keys: "Iterable[Buffer]", *, column_family: ColumnFamily | None = None
    ) -> list[bytes | None]:
        """Looks up many keys, which nobody else may write until the commit."""
        async with self._turn:
            return cast("list[bytes | None]", await self._raw.multi_get(keys, column_family=_raw_family(column_family)))

    def put(self, key: "Buffer", value: "Buffer", *, column_family: ColumnFamily | None = None) -> None:
        """Sets a key at the commit."""
        self._raw.put(key, value, column_family=_raw_family(column_family))

    def delete(self, key: "Buffer", *, column_family: ColumnFamily | None = None) -> None:
        """Deletes a key at the commit."""
        self._raw.delete(key, column_family=_raw_family(column_family))

    def snapshot(self) -> Snapshot:
        """The state that the transaction reads, without its writes."""
        return Snapshot(self._raw.snapshot())


class ClientTransaction(_Work):
    """An optimistic transaction of a server; see `millrace.ClientTransaction`."""

    __slots__ = ()

    @overload
    async def get(self, key: "Buffer") -> bytes | None: ...
    @overload
    async def get(self, key: "Buffer", default: _D) -> bytes | _D: ...
    async def get(self, key: "Buffer", default: Any = None) -> Any:
        """Reads a key, and makes the commit depend on it."""
        async with self._turn:
            value = await self._raw.get(key)
        return default if value is None else value

    def set(self, key: "Buffer", value: "Buffer", *, ttl: float | None = None) -> None:
        """Sets a key at the commit. With `ttl` the server removes it after so many seconds."""
        self._raw.set(key, value, ttl=ttl)

    def delete(self, key: "Buffer") -> None:
        """Deletes a key at the commit."""
        self._raw.delete(key)


class Client:
    """A client of a Millrace node, or, for all but ranges, of any Redis server; see `millrace.Client`. All calls share
    one connection: what concurrent tasks ask goes out together."""

    __slots__ = ("_raw",)

    def __init__(self, raw: _native.Client) -> None:
        self._raw: Any = raw

    @overload
    async def get(self, key: "Buffer") -> bytes | None: ...
    @overload
    async def get(self, key: "Buffer", default: _D) -> bytes | _D: ...
    async def get(self, key: "Buffer", default: Any = None) -> Any:
        """Looks up a key; returns `default` if there is no such key."""
        value = await self._raw.get(key)
        return default if value is None else value

    async def multi_get(self, keys: "Iterable[Buffer]") -> list[bytes | None]:
        """Looks up many keys."""
        return cast("list[bytes | None]", await self._raw.multi_get(keys))

    async def set(self, key: "Buffer", value: "Buffer", *, ttl: float | None = None) -> None:
        """Sets a key. It is acknowledged when it is as durable as the server makes writes. With `ttl` the server removes
        it after so many seconds, from then on; without, it has no deadline any more."""
        await self._raw.set(key, value, ttl=ttl)

    async def expire(self, key: "Buffer", ttl: float) -> bool:
        """Gives a key that is there so many seconds to live, from now on. Returns whether there is such a key."""
        return cast(bool, await self._raw.expire(key, ttl))

    async def persist(self, key: "Buffer") -> bool:
        """Takes the deadline of a key away. Returns whether it had one."""
        return cast(bool, await self._raw.persist(key))

    async def ttl(self, key: "Buffer") -> float | None:
        """The seconds that a key lives from now on: math.inf if it has no deadline, None if there is no such key. The
        server is asked, not the cache."""
        return cast("float | None", await self._raw.ttl(key))

    async def delete(self, key: "Buffer") -> bool:
        """Deletes a key. Returns whether there was one."""
        return cast(bool, await self._raw.delete(key))

    async def delete_range(self, start: "Buffer", stop: "Buffer") -> int:
        """Deletes all keys from `start` to before `stop`; returns how many there were. Only on a Millrace node."""
        return cast(int, await self._raw.delete_range(start, stop))

    async def write(self, batch: ClientBatch) -> None:
        """Writes a batch, all of it or nothing. The batch may be used again."""
        await self._raw.write(batch)

    def range(
        self, start: "Buffer | None" = None, stop: "Buffer | None" = None, *, reverse: bool = False
    ) -> Range[tuple[bytes, bytes]]:
        """Iterates over the entries from `start` to before `stop`. Only on a Millrace node."""
        return Range(self._raw.range(start, stop, reverse=reverse))

    def prefix(self, prefix: "Buffer", *, reverse: bool = False) -> Range[tuple[bytes, bytes]]:
        """Iterates over the entries whose keys begin with `prefix`. Only on a Millrace node."""
        return Range(self._raw.prefix(prefix, reverse=reverse))

    def transaction(self) -> ClientTransaction:
        """Begins an optimistic transaction, for use with `async with` or alone."""
        return ClientTransaction(self._raw.transaction())

    async def wait_coherent(self) -> None:
        """After this, no read returns a cached value older than the call."""
        await self._raw.wait_coherent()

    def cache_stats(self) -> CacheStats:
        """The counts of the cache, its read-ahead and its index; all 0 without a cache."""
        return cast(CacheStats, self._raw.cache_stats())

    def close(self) -> None:
        """Ends the client: later calls raise ClosedError. Those under way go on."""
        self._raw.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()


def open(path: str | os.PathLike[str], **options: "Unpack[OpenOptions]") -> _Soon[Db]:
    """Opens the database in a directory: `await` it, or use it with `async with`. See `millrace.open`."""

    async def begin() -> Db:
        return Db(await _native.open(path, False, **options))

    return _Soon(begin)


def connect(address: str, **options: "Unpack[ConnectOptions]") -> _Soon[Client]:
    """Connects to a Millrace node or a Redis server: `await` it, or use it with `async with`. See `millrace.connect`."""

    async def begin() -> Client:
        return Client(await _native.connect(address, False, **options))

    return _Soon(begin)
