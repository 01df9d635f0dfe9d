"""The exceptions. Each is a kind of failure that a program may act on; its text says what failed and why."""

import builtins


class Error(Exception):
    """Any failure of Millrace."""


class NoDatabaseError(Error):
    """There is no database in the directory, and `create` is off."""


class LockedError(Error):
    """The database is open already, in another process or in this one."""


class CorruptionError(Error):
    """Bytes on the disk contradict the format or their checksum; the text names file and offset."""


class UnsupportedError(Error):
    """The database, the server or the call asks for something that is not there; the text names it."""


class IoError(Error):
    """The device or the system failed."""


class FullError(Error):
    """The disk, or the server's memory, is full. Nothing was written; a later attempt may succeed."""


class OutOfMemoryError(Error):
    """The operation needs more memory than the option `memory` allows."""


class ConflictError(Error):
    """A key that the transaction has read was written meanwhile. Nothing was written: begin again."""


class ExpiredError(Error):
    """A snapshot was held longer than an hour, or too many are held."""


class OlderError(Error):
    """A RocksDB older than 7.8 wrote the database last; see the option `adopt`."""


class UnknownColumnFamilyError(Error):
    """No column family has this name, or it was dropped."""


class InvalidOptionError(Error, ValueError):
    """An option, an address or an argument is impossible; the text names it."""


class ClosedError(Error):
    """The database, the client or the transaction has ended, or belongs to the parent of this forked process."""


class PanickedError(Error):
    """A thread of the database panicked. The database is closed; open it again."""


class UnreachableError(Error, ConnectionError):
    """No connection could be made, or it broke. Nothing was changed."""


class TimeoutError(Error, builtins.TimeoutError):
    """The answer did not come within the option `timeout`. Nothing was changed."""


class OutcomeUnknownError(Error):
    """The connection broke, or the time was over, after a part of a write was sent: it was made, or was not, or still
    will be."""


class DeniedError(Error, PermissionError):
    """The password is wrong or missing, the certificate is not trusted, or the user may not do this."""


class ReadOnlyError(Error):
    """The server only reads."""


class WrongTypeError(Error):
    """The key holds something that is not a string."""


class BusyError(Error):
    """The server is starting, has too many clients, or is otherwise busy. Try again later."""


class ServerError(Error):
    """Another error that the server answered."""


class ProtocolError(Error):
    """The peer does not speak the Redis protocol, or a reply exceeds the limits."""


def of_kind(kind: str) -> type[Error]:
    """The class of a kind of errors, by its name in Rust."""
    name = {"Memory": "OutOfMemory"}.get(kind, kind) + "Error"
    found: type[Error] = globals().get(name, Error)
    return found
