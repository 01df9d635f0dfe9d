"""The options of `open` and `connect`."""

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict


class OpenOptions(TypedDict, total=False):
    """How to open a database. What the directory's own OPTIONS file says is obeyed, or opening is refused by name."""

    cores: int
    """The number of threads that run the database; 1 by default. Keys are spread over them."""
    processors: Sequence[int]
    """Runs one thread on each of these processors, instead of `cores`."""
    memory: int
    """Bytes of memory for caches, indexes, memtables and reads; 256 MiB by default, at least 16 MiB for each core."""
    durability: Literal["power", "process"]
    """What an acknowledged write survives: a power cut, the default, or only the end of the process."""
    create: bool
    """Whether to create a database, with its directory, if there is none; on by default."""
    adopt: bool
    """Take over a database that a RocksDB older than 7.8 wrote last, which cannot read it afterwards."""
    compression: Literal["none", "snappy", "zlib", "bzip2", "lz4", "zstd"]
    """How blocks of new tables are compressed, if the directory does not say; not at all by default."""
    merge_operator: str
    """The operator of `merge`: 'uint64add', 'stringappend', 'stringappendtest', 'put', 'max' or 'bytesxor'."""
    blob_min: int
    """Store values of at least this many bytes in blob files, where merges do not copy them."""
    verify_checksums: bool
    """Check the checksum of every block that is read; on by default."""
    rocksdb_options: Mapping[str, str]
    """RocksDB's options of the default column family by their names, for a database that is created."""


class ConnectOptions(TypedDict, total=False):
    """How a client connects and behaves. Times are in seconds."""

    user: str
    """The user whose password it is; `default` by default."""
    password: str
    """The password; none by default. One in the address takes its place."""
    database: int
    """The number of the database, for Redis servers that have several."""
    timeout: float
    """The longest time that a call takes, with all its attempts; 5 by default."""
    connect_timeout: float
    """The longest time for making one connection; 2 by default."""
    retry: bool
    """Whether calls are made again when the connection breaks, where that is safe; on by default."""
    cache: int
    """Caches what is read in at most this many bytes, and the server keeps it coherent; 0, the default, is no cache."""
    staleness_max: float
    """How long a cached value may be served while the server is not heard of; 3 by default."""
    read_ahead: int
    """Fetches into the cache what was written before and after a value that is read, in up to this many bytes at once,
    if the program reads in about the order in which it has written; 0, the default, is no read-ahead, and 10 MiB is good
    for most. It needs a cache of at least 2 MiB and a Millrace node that keeps values in blob files."""
    index: int
    """Keeps the hashes of all keys of the database in at most this many bytes, 5 to 8 for a key, so that reads of keys
    that do not exist need no round trip; 0, the default, is no index. It needs a cache and a Millrace node. It is loaded
    in the background."""
    reply_bytes_max: int
    """The longest reply that is accepted, in bytes; 1 GiB by default."""
    tls: bool
    """Speaks TLS, as the scheme `rediss` of an address does; off by default. The options below switch it on, too."""
    tls_authority: str | os.PathLike[str]
    """Trusts only the certificates of this PEM file."""
    tls_certificate: str | os.PathLike[str]
    """Shows the server the certificates of this PEM file; with `tls_key`."""
    tls_key: str | os.PathLike[str]
    """The file with the key of `tls_certificate`."""
    tls_server_name: str
    """The name that the server's certificate must have, if it is not the host of the address."""
