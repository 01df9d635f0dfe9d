"""The counts of a client's cache."""

from typing import TypedDict


class CacheStats(TypedDict):
    """Counts of a client since it was made, and the present size of its cache."""

    hits: int
    """Reads of a key that the cache answered."""
    misses: int
    """Reads of a key that the server had to answer."""
    invalidations: int
    """Keys that the server has invalidated, whether they were cached or not."""
    clears: int
    """Times that everything was dropped: the connection ended, or all keys or a range of them were removed."""
    entries: int
    """Entries now."""
    bytes_cached: int
    """Bytes of their keys and values."""
    bytes_used: int
    """Bytes of memory that the cache uses for them; at most the option `cache`."""
    round_trips: int
    """Times that a read had to be sent to the server, or a stretch was asked for."""
    stretches: int
    """Stretches that were fetched by the option `read_ahead`."""
    values_ahead: int
    """Values that the stretches have brought."""
    values_ahead_used: int
    """Values of the stretches that were read."""
    index_is_whole: bool
    """Whether the index is there: then reads of keys that do not exist need no round trip, and count as hits."""
    index_keys: int
    """Keys of the index, with those that were written since it was loaded."""
    index_bytes: int
    """Bytes of memory that the index uses; at most the option `index`."""
    index_answers: int
    """Reads that the index has answered: there was no such key."""
    index_loads: int
    """Times that the index was loaded."""
    index_load_time: float
    """How long the last load took, in seconds."""
