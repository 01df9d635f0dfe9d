"""RocksDB 7.8 through its C API, as far as tests need it: Debian's librocksdb, which has its assertions on."""

import ctypes
import ctypes.util

LIBRARY = "librocksdb.so.7.8"
POINTER, TEXT, SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t

lib = ctypes.CDLL(LIBRARY)
libc = ctypes.CDLL(None)
libc.free.argtypes = [POINTER]


def call(name, *arguments):
    """Calls rocksdb_NAME; integers are values, everything else is passed as it is."""
    function = getattr(lib, "rocksdb_" + name)
    function.restype = POINTER
    return function(*arguments)


def checked(name, *arguments):
    """As call(), for functions whose last argument is where an error goes."""
    error = ctypes.c_void_p()
    result = call(name, *arguments, ctypes.byref(error))
    if error.value:
        text = ctypes.string_at(error.value).decode(errors="replace")
        libc.free(error)
        raise RuntimeError(f"rocksdb_{name}: {text}")
    return result


def p(value):
    """A pointer as an argument: ctypes would cut a plain integer to 32 bits."""
    return ctypes.c_void_p(value)


def bytes_of(name, *arguments):
    """The bytes that a function returns with their length; they belong to RocksDB."""
    length = SIZE()
    start = call(name, *arguments, ctypes.byref(length))
    return ctypes.string_at(start, length.value)


def set_options(options, **values):
    """Calls rocksdb_options_set_NAME for each."""
    for name, value in values.items():
        kind = ctypes.c_double if isinstance(value, float) else ctypes.c_uint64
        call("options_set_" + name, p(options), kind(value))


class Rocks:
    """An open database; its families and the options of each are given."""

    def __init__(self, path, families, read_only=False, **common):
        self.names = list(families)
        whole = call("options_create")
        set_options(whole, create_if_missing=1, create_missing_column_families=1, **common)
        each = []
        for own in families.values():
            options = call("options_create_copy", p(whole))
            set_options(options, **own)
            each.append(options)
        count = len(self.names)
        names = (TEXT * count)(*[name.encode() for name in self.names])
        handles = (POINTER * count)()
        arguments = [p(whole), str(path).encode(), count, names, (POINTER * count)(*each), handles]
        if read_only:
            self.db = checked("open_for_read_only_column_families", *arguments, ctypes.c_ubyte(0))
        else:
            self.db = checked("open_column_families", *arguments)
        self.handles = {name: handle for name, handle in zip(self.names, handles)}
        self.writing, self.reading = call("writeoptions_create"), call("readoptions_create")
        self.snapshots = []

    def _write(self, name, family, *parts):
        pieces = [piece for part in parts for piece in (part, SIZE(len(part)))]
        checked(name, p(self.db), p(self.writing), p(self.handles[family]), *pieces)

    def put(self, family, key, value):
        self._write("put_cf", family, key, value)

    def delete(self, family, key):
        self._write("delete_cf", family, key)

    def single_delete(self, family, key):
        self._write("singledelete_cf", family, key)

    def delete_range(self, family, start, end):
        self._write("delete_range_cf", family, start, end)

    def snapshot(self):
        """Takes a snapshot, which holds what it sees until release() or close()."""
        self.snapshots.append(call("create_snapshot", p(self.db)))

    def release(self):
        """Releases the oldest snapshot, if there is one."""
        if self.snapshots:
            call("release_snapshot", p(self.db), p(self.snapshots.pop(0)))

    def flush(self, family):
        options = call("flushoptions_create")
        checked("flush_cf", p(self.db), p(options), p(self.handles[family]))

    def compact(self, family, start, end, bottommost=False, level=None):
        """Compacts a range of keys, then moves it to a level if one is given; `None` is no bound."""
        options = call("compactoptions_create")
        if level is not None:
            call("compactoptions_set_change_level", p(options), ctypes.c_ubyte(1))
            call("compactoptions_set_target_level", p(options), ctypes.c_int(level))
        if bottommost:
            call("compactoptions_set_bottommost_level_compaction", p(options), ctypes.c_ubyte(2))
        bounds = [piece for bound in (start, end) for piece in (bound, SIZE(len(bound or b"")))]
        call("compact_range_cf_opt", p(self.db), p(self.handles[family]), p(options), *bounds)

    def get(self, family, key):
        length = SIZE()
        value = checked("get_cf", p(self.db), p(self.reading), p(self.handles[family]), key, SIZE(len(key)), ctypes.byref(length))
        return None if value is None else ctypes.string_at(value, length.value)

    def scan(self, family, reverse=False):
        """All pairs, in order or against it."""
        iterator = p(call("create_iterator_cf", p(self.db), p(self.reading), p(self.handles[family])))
        call("iter_seek_to_last" if reverse else "iter_seek_to_first", iterator)
        pairs = []
        valid = lib.rocksdb_iter_valid
        valid.restype = ctypes.c_ubyte
        while valid(iterator):
            pairs.append((bytes_of("iter_key", iterator), bytes_of("iter_value", iterator)))
            call("iter_prev" if reverse else "iter_next", iterator)
        checked("iter_get_error", iterator)
        call("iter_destroy", iterator)
        return pairs

    def bounds(self):
        """(family, level, smallest key, largest key) of every table."""
        files = p(call("livefiles", p(self.db)))
        count, level = lib.rocksdb_livefiles_count, lib.rocksdb_livefiles_level
        found = []
        for n in range(count(files)):
            name = ctypes.string_at(call("livefiles_column_family_name", files, n)).decode()
            keys = [bytes_of(f"livefiles_{end}", files, n) for end in ("smallestkey", "largestkey")]
            found.append((name, level(files, n), *keys))
        return found

    def close(self):
        while self.snapshots:
            self.release()
        for handle in self.handles.values():
            call("column_family_handle_destroy", p(handle))
        call("close", p(self.db))
        self.db = None
