"""RocksDB 7.8 in this process, through its C interface, for options and operations that neither ldb nor rocksdict has.

This is Debian's librocksdb, which is built with assertions.
"""

import contextlib
import ctypes

LIBRARY = "librocksdb.so.7.8"
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t

_library = None


def library():
    """The C interface, loaded once."""
    global _library
    if _library is None:
        _library = ctypes.CDLL(LIBRARY)
    return _library


class RocksError(RuntimeError):
    """The error of a call to RocksDB."""


def call(name, *arguments, result=POINTER):
    """Calls `rocksdb_NAME`. Strings and bytes are passed as they are; integers, unless wrapped, as pointers or ints of the ABI."""
    function = getattr(library(), f"rocksdb_{name}")
    function.restype = result
    function.argtypes = None
    return function(*(POINTER(a) if isinstance(a, int) and a > 0xFFFF_FFFF else a for a in arguments))


def checked(name, *arguments, result=POINTER):
    """Calls `rocksdb_NAME` with an error pointer as the last argument, and raises its error."""
    error = ctypes.c_char_p()
    value = call(name, *arguments, ctypes.byref(error), result=result)
    if error.value is not None:
        raise RocksError(f"rocksdb_{name}: {error.value.decode(errors='replace')}")
    return value


def with_lengths(*texts):
    """Each string followed by its length, as the C interface takes them; `None` is a null pointer."""
    return [part for text in texts for part in (text, SIZE(len(text or b"")))]


def bytes_of(name, *arguments):
    """The bytes that a function returns with their length; RocksDB owns them."""
    length = SIZE()
    start = call(name, *arguments, ctypes.byref(length))
    return ctypes.string_at(start, length.value)


# Kept alive: RocksDB calls them as long as a database is open.
_kept = []


def comparator(name=b"test.Comparator"):
    """A bytewise comparator with a name that RocksDB does not know."""
    compare_type = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, SIZE, POINTER, SIZE)
    name_type = ctypes.CFUNCTYPE(ctypes.c_char_p, POINTER)
    destroy_type = ctypes.CFUNCTYPE(None, POINTER)

    def compare(_, a, a_len, b, b_len):
        a, b = ctypes.string_at(a, a_len), ctypes.string_at(b, b_len)
        return (a > b) - (a < b)

    parts = [destroy_type(lambda _: None), compare_type(compare), name_type(lambda _: name)]
    _kept.extend(parts)
    return call("comparator_create", None, *parts)


def compaction_filter_factory(name=b"test.FilterFactory"):
    """A compaction filter of the user's own."""
    name_type = ctypes.CFUNCTYPE(ctypes.c_char_p, POINTER)
    destroy_type = ctypes.CFUNCTYPE(None, POINTER)
    create_type = ctypes.CFUNCTYPE(POINTER, POINTER, POINTER)
    parts = [destroy_type(lambda _: None), create_type(lambda *_: None), name_type(lambda _: name)]
    _kept.extend(parts)
    return call("compactionfilterfactory_create", None, *parts)


def options(**values):
    """Options, set by name to a number, bytes or a pointer; `text` is `NAME=VALUE;...`, for options without a setter."""
    made = call("options_create")
    if text := values.pop("text", None):
        base, made = made, call("options_create")
        checked("get_options_from_string", base, text.encode(), made, result=None)
    call("options_set_create_if_missing", made, 1, result=None)
    for name, value in values.items():
        if name == "db_paths":
            paths = [call("dbpath_create", str(path).encode(), ctypes.c_uint64(size)) for path, size in value]
            call("options_set_db_paths", made, (POINTER * len(paths))(*paths), SIZE(len(paths)), result=None)
        elif name == "universal":
            call("options_set_compaction_style", made, 1, result=None)
        elif name == "plain_table":
            argument = (ctypes.c_uint32(0), ctypes.c_int(10), ctypes.c_double(0.75), SIZE(16))
            call("options_set_prefix_extractor", made, call("slicetransform_create_fixed_prefix", SIZE(4)), result=None)
            call("options_set_allow_mmap_reads", made, 1, result=None)
            call("options_set_plain_table_factory", made, *argument, result=None)
        elif name == "block_size":
            tables = call("block_based_options_create")
            call("block_based_options_set_block_size", tables, SIZE(value), result=None)
            call("options_set_block_based_table_factory", made, tables, result=None)
        elif isinstance(value, float):
            call(f"options_set_{name}", made, ctypes.c_double(value), result=None)
        elif isinstance(value, int) and not isinstance(value, bool) and value <= 0xFFFF_FFFF:
            # The widest type of any setter.
            call(f"options_set_{name}", made, ctypes.c_uint64(value), result=None)
        else:
            call(f"options_set_{name}", made, value, result=None)
    return made


def load_options(path):
    """Reads the newest OPTIONS file of a directory."""
    environment = call("create_default_env")
    cache = call("cache_create_lru", SIZE(1 << 20))
    outputs = [POINTER(), SIZE(), POINTER(), POINTER()]
    database, count, names, families = outputs
    references = (ctypes.byref(database), ctypes.byref(count), ctypes.byref(names), ctypes.byref(families))
    checked("load_latest_options", str(path).encode(), environment, ctypes.c_bool(False), cache, *references, result=None)
    call("load_latest_options_destroy", database, names, families, count, result=None)


class Database:
    """An open database with its families by name; without families it has the default one."""

    def __init__(self, pointer, families=None, close="close"):
        self.pointer = pointer
        self.families = families or {}
        self._close = close
        self.write_options = call("writeoptions_create")
        self.read_options = call("readoptions_create")
        self.snapshots = []

    def _of(self, name, family):
        """The function's name for a family, and the family's handle."""
        if family in self.families:
            return name + "_cf", [self.families[family]]
        return name, []

    def _write(self, name, family, *texts):
        name, handle = self._of(name, family)
        checked(name, self.pointer, self.write_options, *handle, *with_lengths(*texts), result=None)

    def put(self, key, value, family="default"):
        """Puts a key."""
        self._write("transactiondb_put" if self._close == "transactiondb_close" else "put", family, key, value)

    def delete(self, key, family="default"):
        """Deletes a key."""
        self._write("delete", family, key)

    def single_delete(self, key, family="default"):
        """Deletes a key that was written once since its last SingleDelete."""
        self._write("singledelete", family, key)

    def delete_range(self, start, end, family="default"):
        """Deletes the keys from `start` up to, but not including, `end`. Needs the families."""
        self._write("delete_range", family, start, end)

    def get(self, key, family="default"):
        """The value of a key, or None."""
        length = SIZE()
        name, handle = self._of("get", family)
        value = checked(name, self.pointer, self.read_options, *handle, *with_lengths(key), ctypes.byref(length))
        return None if value is None else ctypes.string_at(value, length.value)

    def scan(self, family="default", reverse=False):
        """All pairs, in order or in reverse."""
        name, handle = self._of("create_iterator", family)
        iterator = call(name, self.pointer, self.read_options, *handle)
        call("iter_seek_to_last" if reverse else "iter_seek_to_first", iterator, result=None)
        pairs = []
        while call("iter_valid", iterator, result=ctypes.c_ubyte):
            pairs.append((bytes_of("iter_key", iterator), bytes_of("iter_value", iterator)))
            call("iter_prev" if reverse else "iter_next", iterator, result=None)
        checked("iter_get_error", iterator, result=None)
        call("iter_destroy", iterator, result=None)
        return pairs

    def snapshot(self):
        """Takes a snapshot, held until release() or close()."""
        self.snapshots.append(call("create_snapshot", self.pointer))

    def release(self):
        """Releases the oldest snapshot, if any."""
        if self.snapshots:
            call("release_snapshot", self.pointer, self.snapshots.pop(0), result=None)

    def flush(self, family="default"):
        """Flushes the memtables."""
        name, handle = self._of("flush", family)
        checked(name, self.pointer, call("flushoptions_create"), *handle, result=None)

    def compact(self, start=None, end=None, bottommost=False, level=None, family="default"):
        """Compacts a range of keys, then moves it to `level` if given; `None` means unbounded."""
        made = call("compactoptions_create")
        if level is not None:
            call("compactoptions_set_change_level", made, ctypes.c_ubyte(1), result=None)
            call("compactoptions_set_target_level", made, ctypes.c_int(level), result=None)
        if bottommost:
            call("compactoptions_set_bottommost_level_compaction", made, ctypes.c_ubyte(2), result=None)
        _, handle = self._of("compact_range", family)
        name = "compact_range_cf_opt" if handle else "compact_range_opt"
        call(name, self.pointer, *handle, made, *with_lengths(start, end), result=None)

    def bounds(self):
        """(family, level, smallest key, largest key) of every table."""
        files = call("livefiles", self.pointer)
        found = []
        for n in range(call("livefiles_count", files, result=ctypes.c_int)):
            name = call("livefiles_column_family_name", files, n, result=ctypes.c_char_p).decode()
            keys = [bytes_of(f"livefiles_{end}", files, n) for end in ("smallestkey", "largestkey")]
            found.append((name, call("livefiles_level", files, n, result=ctypes.c_int), *keys))
        return found

    def prepare(self, name, key, value):
        """Prepares a transaction, which is neither committed nor rolled back."""
        made = call("transaction_begin", self.pointer, self.write_options, call("transaction_options_create"), None)
        checked("transaction_set_name", made, name, SIZE(len(name)), result=None)
        checked("transaction_put", made, *with_lengths(key, value), result=None)
        checked("transaction_prepare", made, result=None)
        return made

    def create_family(self, name, made):
        """Creates a column family."""
        self.families[name] = checked("create_column_family", self.pointer, made, name.encode())

    def close(self):
        """Closes the database without a flush; memtables stay in the log."""
        while self.snapshots:
            self.release()
        for family in self.families.values():
            call("column_family_handle_destroy", family, result=None)
        call(self._close, self.pointer, result=None)


def open_families(path, made, families, read_only=False):
    """Opens the database at `path` with these families: options by name, including `default`."""
    count = len(families)
    names = (ctypes.c_char_p * count)(*(family.encode() for family in families))
    each = (POINTER * count)(*families.values())
    places = (POINTER * count)()
    arguments = [made, str(path).encode(), ctypes.c_int(count), names, each, places]
    if read_only:
        pointer = checked("open_for_read_only_column_families", *arguments, ctypes.c_ubyte(0))
    else:
        pointer = checked("open_column_families", *arguments)
    return Database(pointer, dict(zip(families, places)))


@contextlib.contextmanager
def opened(path, made=None, ttl=None, families=None, transactions=False):
    """Opens the database at `path` for a `with` block. `families`: options by name, including `default`."""
    made = made or options()
    name = str(path).encode()
    if transactions:
        base = call("transactiondb_options_create")
        database = Database(checked("transactiondb_open", made, base, name), close="transactiondb_close")
    elif families:
        database = open_families(path, made, families)
    elif ttl is not None:
        database = Database(checked("open_with_ttl", made, name, ctypes.c_int(ttl)))
    else:
        database = Database(checked("open", made, name))
    try:
        yield database
    finally:
        database.close()
