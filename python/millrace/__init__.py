"""Millrace: an embedded key-value engine that reads and writes RocksDB databases, and a client of Millrace nodes and
Redis servers.

    import millrace

    with millrace.open("/tmp/example.db") as db:
        db[b"hello"] = b"world"
        print(db[b"hello"])

`millrace.aio` has the same for asyncio. Keys and values are any objects with the buffer protocol, such as bytes; what is
returned is bytes. A call releases the GIL while it waits.
"""

import os
from typing import TYPE_CHECKING, cast

from . import _native
from ._errors import (
    BusyError,
    ClosedError,
    ConflictError,
    CorruptionError,
    DeniedError,
    Error,
    ExpiredError,
    FullError,
    InvalidOptionError,
    IoError,
    LockedError,
    NoDatabaseError,
    OlderError,
    OutcomeUnknownError,
    OutOfMemoryError,
    PanickedError,
    ProtocolError,
    ReadOnlyError,
    ServerError,
    TimeoutError,
    UnknownColumnFamilyError,
    UnreachableError,
    UnsupportedError,
    WrongTypeError,
)
from ._native import (
    Client,
    ClientBatch,
    ClientTransaction,
    ColumnFamily,
    Db,
    Range,
    Snapshot,
    Transaction,
    WriteBatch,
)
from ._options import ConnectOptions, OpenOptions
from ._stats import CacheStats

if TYPE_CHECKING:
    from typing import Unpack

__all__ = [
    "BusyError",
    "CacheStats",
    "Client",
    "ClientBatch",
    "ClientTransaction",
    "ClosedError",
    "ColumnFamily",
    "ConflictError",
    "ConnectOptions",
    "CorruptionError",
    "Db",
    "DeniedError",
    "Error",
    "ExpiredError",
    "FullError",
    "InvalidOptionError",
    "IoError",
    "LockedError",
    "NoDatabaseError",
    "OlderError",
    "OpenOptions",
    "OutOfMemoryError",
    "OutcomeUnknownError",
    "PanickedError",
    "ProtocolError",
    "Range",
    "ReadOnlyError",
    "ServerError",
    "Snapshot",
    "TimeoutError",
    "Transaction",
    "UnknownColumnFamilyError",
    "UnreachableError",
    "UnsupportedError",
    "WriteBatch",
    "WrongTypeError",
    "connect",
    "open",
]


def open(path: str | os.PathLike[str], **options: "Unpack[OpenOptions]") -> Db:
    """Opens the database in a directory; what is missing is created. `OpenOptions` has the options."""
    return cast(Db, _native.open(path, True, **options))


def connect(address: str, **options: "Unpack[ConnectOptions]") -> Client:
    """Connects to a Millrace node or a Redis server: HOST:PORT, or redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], or
    rediss:// for TLS. `ConnectOptions` has the options."""
    return cast(Client, _native.connect(address, True, **options))
