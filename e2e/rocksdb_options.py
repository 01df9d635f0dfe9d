"""RocksDB 7.8 in this process, through its C interface: for options that neither ldb nor rocksdict has."""

import contextlib
import ctypes

LIBRARY = "librocksdb.so.7.8"
POINTER = ctypes.c_void_p

_library = None


def library():
    """The C interface, loaded once."""
    global _library
    if _library is None:
        _library = ctypes.CDLL(LIBRARY)
    return _library


class RocksError(RuntimeError):
    """What a call of RocksDB failed with."""


def call(name, *arguments, result=POINTER):
    """Calls `rocksdb_NAME`. Texts and bytes go as they are; integers, unless wrapped, as pointers or ints of the ABI."""
    function = getattr(library(), f"rocksdb_{name}")
    function.restype = result
    function.argtypes = None
    return function(*(POINTER(a) if isinstance(a, int) and a > 0xFFFF_FFFF else a for a in arguments))


def checked(name, *arguments, result=POINTER):
    """The same of a call whose last argument is the place of an error."""
    error = ctypes.c_char_p()
    value = call(name, *arguments, ctypes.byref(error), result=result)
    if error.value is not None:
        raise RocksError(error.value.decode())
    return value


# RocksDB calls them as long as a database is open.
_kept = []


def comparator(name=b"test.Comparator"):
    """A comparator that RocksDB does not know by its name; it compares bytes."""
    compare_type = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, ctypes.c_size_t, POINTER, ctypes.c_size_t)
    name_type = ctypes.CFUNCTYPE(ctypes.c_char_p, POINTER)
    destroy_type = ctypes.CFUNCTYPE(None, POINTER)

    def compare(_, a, a_len, b, b_len):
        a, b = ctypes.string_at(a, a_len), ctypes.string_at(b, b_len)
        return (a > b) - (a < b)

    parts = [destroy_type(lambda _: None), compare_type(compare), name_type(lambda _: name)]
    _kept.extend(parts)
    return call("comparator_create", None, *parts)


def compaction_filter_factory(name=b"test.FilterFactory"):
    """A compaction filter that is known to its user alone."""
    name_type = ctypes.CFUNCTYPE(ctypes.c_char_p, POINTER)
    destroy_type = ctypes.CFUNCTYPE(None, POINTER)
    create_type = ctypes.CFUNCTYPE(POINTER, POINTER, POINTER)
    parts = [destroy_type(lambda _: None), create_type(lambda *_: None), name_type(lambda _: name)]
    _kept.extend(parts)
    return call("compactionfilterfactory_create", None, *parts)


def options(**values):
    """Options with setters called by name: a number, bytes, or a pointer; `text` is `NAME=VALUE;...`, for those without one."""
    made = call("options_create")
    if text := values.pop("text", None):
        base, made = made, call("options_create")
        checked("get_options_from_string", base, text.encode(), made, result=None)
    call("options_set_create_if_missing", made, 1, result=None)
    for name, value in values.items():
        if name == "db_paths":
            paths = [call("dbpath_create", str(path).encode(), ctypes.c_uint64(size)) for path, size in value]
            call("options_set_db_paths", made, (POINTER * len(paths))(*paths), ctypes.c_size_t(len(paths)), result=None)
        elif name == "universal":
            call("options_set_compaction_style", made, 1, result=None)
        elif name == "plain_table":
            argument = (ctypes.c_uint32(0), ctypes.c_int(10), ctypes.c_double(0.75), ctypes.c_size_t(16))
            call("options_set_prefix_extractor", made, call("slicetransform_create_fixed_prefix", ctypes.c_size_t(4)), result=None)
            call("options_set_allow_mmap_reads", made, 1, result=None)
            call("options_set_plain_table_factory", made, *argument, result=None)
        elif name in ("write_buffer_size",):
            call(f"options_set_{name}", made, ctypes.c_size_t(value), result=None)
        else:
            call(f"options_set_{name}", made, value, result=None)
    return made


class Database:
    """An open database, with its families by name."""

    def __init__(self, pointer, families=None, close="close"):
        self.pointer = pointer
        self.families = families or {}
        self._close = close
        self.write_options = call("writeoptions_create")
        self.read_options = call("readoptions_create")

    def put(self, key, value, family="default"):
        """Puts a key."""
        sizes = [(text, ctypes.c_size_t(len(text))) for text in (key, value)]
        arguments = [part for pair in sizes for part in pair]
        if family in self.families:
            checked("put_cf", self.pointer, self.write_options, self.families[family], *arguments, result=None)
        elif self._close == "transactiondb_close":
            checked("transactiondb_put", self.pointer, self.write_options, *arguments, result=None)
        else:
            checked("put", self.pointer, self.write_options, *arguments, result=None)

    def get(self, key, family="default"):
        """The value of a key, or None."""
        length = ctypes.c_size_t()
        key = (key, ctypes.c_size_t(len(key)), ctypes.byref(length))
        if family in self.families:
            value = checked("get_cf", self.pointer, self.read_options, self.families[family], *key)
        else:
            value = checked("get", self.pointer, self.read_options, *key)
        return None if value is None else ctypes.string_at(value, length.value)

    def flush(self, family="default"):
        """Writes the memtables to a table."""
        made = call("flushoptions_create")
        if family in self.families:
            checked("flush_cf", self.pointer, made, self.families[family], result=None)
        else:
            checked("flush", self.pointer, made, result=None)

    def compact(self):
        """Compacts the whole of the default family."""
        call("compact_range", self.pointer, None, ctypes.c_size_t(0), None, ctypes.c_size_t(0), result=None)

    def prepare(self, name, key, value):
        """A transaction that is prepared and neither committed nor rolled back."""
        made = call("transaction_begin", self.pointer, self.write_options, call("transaction_options_create"), None)
        checked("transaction_set_name", made, name, ctypes.c_size_t(len(name)), result=None)
        arguments = [part for text in (key, value) for part in (text, ctypes.c_size_t(len(text)))]
        checked("transaction_put", made, *arguments, result=None)
        checked("transaction_prepare", made, result=None)
        return made

    def create_family(self, name, made):
        """Makes a column family."""
        self.families[name] = checked("create_column_family", self.pointer, made, name.encode())

    def close(self):
        """Closes it; what is in memtables stays in the log."""
        for family in self.families.values():
            call("column_family_handle_destroy", family, result=None)
        call(self._close, self.pointer, result=None)


@contextlib.contextmanager
def opened(path, made=None, ttl=None, families=None, transactions=False):
    """The database at `path`, closed at the end. `families`: options by name, with `default`."""
    made = made or options()
    name = str(path).encode()
    handles = None
    if transactions:
        base = call("transactiondb_options_create")
        database = Database(checked("transactiondb_open", made, base, name), close="transactiondb_close")
    elif families:
        count = len(families)
        names = (ctypes.c_char_p * count)(*(family.encode() for family in families))
        each = (POINTER * count)(*families.values())
        places = (POINTER * count)()
        pointer = checked("open_column_families", made, name, ctypes.c_int(count), names, each, places)
        handles = dict(zip(families, places))
        database = Database(pointer, handles)
    elif ttl is not None:
        database = Database(checked("open_with_ttl", made, name, ctypes.c_int(ttl)))
    else:
        database = Database(checked("open", made, name))
    try:
        yield database
    finally:
        database.close()
