"""Databases, for threads."""

import array
import gc
import random
import re
import threading

import conftest
import millrace
import pytest

FAST = {"durability": "process", "memory": 32 << 20}


@pytest.fixture
def db(tmp_path):
    with millrace.open(tmp_path / "db", **FAST) as db:
        yield db


def test_a_database_is_like_a_dictionary(tmp_path):
    """A thousand random steps on a database and on a dictionary, with openings in between."""
    randoms = random.Random(1)
    path, model = tmp_path / "db", {}
    db = millrace.open(path, **FAST)

    def key():
        return b"%03d" % randoms.randrange(200)

    def between(start, stop):
        return {k: v for k, v in model.items() if start <= k < stop}

    for step in range(2000):
        match randoms.randrange(12):
            case 0 | 1 | 2:
                k, value = key(), randoms.randbytes(randoms.choice([0, 1, 100, 5000]))
                db.put(k, value)
                model[k] = value
            case 3:
                k = key()
                db.delete(k)
                model.pop(k, None)
            case 4:
                k = key()
                assert db.get(k) == model.get(k)
                assert db.get(k, 1) == model.get(k, 1)
                assert (k in db) == (k in model)
                view = db.get_view(k)
                assert (view if view is None else bytes(view)) == model.get(k)
            case 5:
                keys = [key() for _ in range(randoms.randrange(20))]
                assert db.multi_get(keys) == [model.get(k) for k in keys]
            case 6:
                start, stop = key(), key()
                expected = sorted(between(start, stop).items())
                assert list(db.range(start, stop)) == expected
                assert list(db.range(start, stop, reverse=True)) == expected[::-1]
                assert list(db.keys(start, stop)) == [k for k, _ in expected]
            case 7:
                prefix = key()[:2]
                expected = sorted((k, v) for k, v in model.items() if k.startswith(prefix))
                assert list(db.prefix(prefix)) == expected
                assert list(db.prefix(prefix, reverse=True)) == expected[::-1]
            case 8:
                start, stop = sorted([key(), key()])
                db.delete_range(start, stop)
                for k in between(start, stop):
                    del model[k]
            case 9:
                batch = millrace.WriteBatch()
                for _ in range(randoms.randrange(10)):
                    k = key()
                    if randoms.random() < 0.7:
                        batch.put(k, b"batch")
                        model[k] = b"batch"
                    else:
                        batch.delete(k)
                        model.pop(k, None)
                db.write(batch)
            case 10 if step % 7 == 0:
                randoms.choice([db.flush, db.compact, db.sync])()
            case 11 if step % 5 == 0:
                db.close()
                db = millrace.open(path, **FAST)
        if step % 100 == 0:
            assert dict(db.range()) == model
            assert list(db) == sorted(model)
    db.close()


def test_the_operators_of_a_dictionary(db):
    db[b"a"] = b"1"
    assert db[b"a"] == b"1" and b"a" in db
    del db[b"a"]
    del db[b"a"]
    with pytest.raises(KeyError) as raised:
        db[b"a"]
    assert raised.value.args == (b"a",)


def test_arguments_are_anything_with_the_buffer_protocol(db):
    for key in (b"k", bytearray(b"k"), memoryview(b"k"), array.array("B", b"k")):
        db.put(key, key)
        assert db.get(key) == b"k"
        assert db.multi_get([key]) == [b"k"]
    db.put(b"", b"")
    assert db.get(memoryview(b"")) == b""
    numbers = array.array("q", [1, -2])
    db.put(b"numbers", numbers)
    assert db[b"numbers"] == numbers.tobytes()


@pytest.mark.parametrize("wrong", ["text", 1, None, [b"k"]])
def test_other_arguments_are_refused(db, wrong):
    with pytest.raises(TypeError, match="bytes-like object is required"):
        db.get(wrong)
    with pytest.raises(TypeError):
        db.put(b"k", wrong)
    with pytest.raises(TypeError):
        db.multi_get([b"k", wrong])
    with pytest.raises(BufferError):
        db.put(b"k", memoryview(b"abcdef")[::2])
    assert list(db) == []


def test_a_view_outlives_its_database(tmp_path):
    with millrace.open(tmp_path, **FAST) as db:
        db.put(b"k", b"value")
        view = db.get_view(b"k")
    del db
    gc.collect()
    assert view.readonly and bytes(view) == b"value" and view[1:3] == b"al"


def test_merges(tmp_path):
    with millrace.open(tmp_path, merge_operator="uint64add", **FAST) as db:
        one = (1).to_bytes(8, "little")
        db.merge(b"visits", one)
        batch = millrace.WriteBatch()
        batch.merge(b"visits", one)
        db.write(batch)
        assert int.from_bytes(db[b"visits"], "little") == 2
    with millrace.open(tmp_path / "other", **FAST) as db, pytest.raises(millrace.UnsupportedError):
        db.merge(b"k", b"v")


def test_snapshots_have_one_moment(db):
    users = db.create_column_family("users")
    db[b"a"], users[b"1"] = b"old", b"Ada"
    with db.snapshot() as before:
        db[b"a"] = b"new"
        db[b"b"] = b"new"
        del users[b"1"]
        assert before.get(b"a") == b"old" and before.get(b"b", 0) == 0
        assert before.multi_get([b"a", b"b"]) == [b"old", None]
        assert list(before.range()) == list(before.prefix(b"a")) == [(b"a", b"old")]
        assert list(before.keys(reverse=True)) == [b"a"]
        assert before.get(b"1", column_family=users) == b"Ada"
        assert before.multi_get([b"1"], column_family=users) == [b"Ada"]
        assert list(before.range(column_family=users)) == [(b"1", b"Ada")]
        assert list(before.prefix(b"1", column_family=users)) == [(b"1", b"Ada")]
        assert list(before.keys(column_family=users)) == [b"1"]
        left = before.range()
    assert list(left) == [(b"a", b"old")]
    with pytest.raises(millrace.ClosedError):
        before.get(b"a")


def test_column_families(db):
    users = db.create_column_family("users")
    users.put(b"1", b"Ada")
    batch = millrace.WriteBatch()
    batch.put(b"2", b"Brian", column_family=users)
    batch.put(b"k", b"default")
    batch.delete(b"1", column_family=users)
    batch.delete_range(b"x", b"y", column_family=users)
    assert len(batch) == 4 and batch.size > 0
    db.write(batch)
    assert list(users.range()) == [(b"2", b"Brian")] and list(db) == [b"k"]
    assert db.column_families() == ["default", "users"] and db.name == "default"
    assert db.column_family("users").name == "users"
    users.compact()
    db.drop_column_family("users")
    with pytest.raises(millrace.UnknownColumnFamilyError):
        db.column_family("users")
    batch.clear()
    assert len(batch) == 0


def test_transactions_conflict_with_what_they_have_read(db):
    db[b"a"] = b"1"
    with db.transaction() as transaction:
        assert transaction.get(b"a") == b"1"
        transaction.put(b"b", b"2")
        assert transaction.multi_get([b"a", b"b", b"c"]) == [b"1", b"2", None]
        assert transaction.snapshot().get(b"b") is None
        transaction.delete(b"a")
    assert list(db.range()) == [(b"b", b"2")]

    with pytest.raises(millrace.ConflictError), db.transaction() as transaction:
        transaction.get(b"b")
        db[b"b"] = b"3"
        transaction.put(b"c", b"lost")
    assert list(db.range()) == [(b"b", b"3")]

    with pytest.raises(ZeroDivisionError), db.transaction() as transaction:
        transaction.put(b"c", b"lost")
        1 / 0
    with db.transaction() as transaction:
        transaction.put(b"c", b"lost")
        transaction.abandon()
    assert b"c" not in db
    with pytest.raises(millrace.ClosedError):
        transaction.put(b"c", b"late")


def test_threads_add_up_in_transactions(db):
    db[b"sum"] = b"0"

    def add():
        for _ in range(50):
            while True:
                try:
                    with db.transaction() as transaction:
                        transaction.put(b"sum", b"%d" % (int(transaction.get(b"sum")) + 1))
                    break
                except millrace.ConflictError:
                    pass

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert db[b"sum"] == b"400"


def test_an_iterator_shows_one_moment_while_threads_write(db):
    for n in range(5000):
        db.put(b"%06d" % n, b"before")
    stop = threading.Event()

    def write():
        n = 0
        while not stop.is_set():
            db.put(b"%06d" % (n % 7000), b"after")
            db.delete(b"%06d" % ((n + 1) % 7000))
            n += 3

    first = db.range()
    assert next(first) == (b"000000", b"before")
    writer = threading.Thread(target=write)
    writer.start()
    try:
        rest = list(first)
        for _ in range(20):
            with db.snapshot() as snapshot:
                forward = list(snapshot.range())
                assert forward == list(snapshot.range(reverse=True))[::-1]
    finally:
        stop.set()
        writer.join()
    assert rest == [(b"%06d" % n, b"before") for n in range(1, 5000)]


def test_one_iterator_for_several_threads(db):
    batch = millrace.WriteBatch()
    for n in range(10_000):
        batch.put(b"%06d" % n, b"v")
    db.write(batch)
    shared, seen = db.keys(), [[] for _ in range(4)]
    threads = [threading.Thread(target=list.extend, args=(part, shared)) for part in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sum(seen, [])) == [b"%06d" % n for n in range(10_000)]


def test_a_checkpoint_can_be_opened(tmp_path, db):
    db[b"k"] = b"v"
    db.checkpoint(tmp_path / "copy")
    with millrace.open(tmp_path / "copy", create=False, **FAST) as copy:
        assert dict(copy.range()) == {b"k": b"v"}
        assert copy.path == tmp_path / "copy"


def test_errors_have_classes(tmp_path):
    with pytest.raises(millrace.NoDatabaseError):
        millrace.open(tmp_path / "none", create=False)
    with millrace.open(tmp_path / "db", **FAST) as db:
        with pytest.raises(millrace.LockedError):
            millrace.open(tmp_path / "db", **FAST)
        with pytest.raises(millrace.UnsupportedError):
            db.delete_range(b"b", b"a")
    with pytest.raises(millrace.ClosedError, match="closed"):
        db.get(b"k")
    db.close()
    for options in [
        {"durability": "paper"},
        {"compression": "rle"},
        {"merge_operator": "divide"},
        {"memory": 1},
        {"cores": 0},
    ]:
        with pytest.raises(millrace.InvalidOptionError) as raised:
            millrace.open(tmp_path / "other", **options)
        assert isinstance(raised.value, ValueError) and isinstance(raised.value, millrace.Error)
    with pytest.raises(TypeError):
        millrace.open(tmp_path / "other", speed="high")
    assert not (tmp_path / "other").exists()


def test_damage_is_an_error_that_names_the_file(tmp_path):
    with millrace.open(tmp_path, **FAST) as db:
        db[b"k"] = b"v" * 1000
        db.flush()
    (table,) = tmp_path.glob("*.sst")
    data = bytearray(table.read_bytes())
    data[500] ^= 1
    table.write_bytes(data)
    with millrace.open(tmp_path, **FAST) as db:
        with pytest.raises(millrace.CorruptionError, match=table.name):
            db.get(b"k")
        with pytest.raises(millrace.CorruptionError):
            list(db.range())


@pytest.mark.parametrize("source", ["crates/millrace/src/error.rs", "crates/client/src/error.rs"])
def test_every_kind_of_error_has_a_class(source):
    text = (conftest.ROOT / source).read_text()
    (body,) = re.findall(r"pub enum ErrorKind \{(.*?)\n\}", text, re.S)
    kinds = re.findall(r"^    (\w+),$", body, re.M)
    assert len(kinds) > 10
    for kind in kinds:
        of_kind = millrace._errors.of_kind(kind)
        assert of_kind is not millrace.Error, kind
        assert getattr(millrace, of_kind.__name__) is of_kind


def test_options(tmp_path):
    options = {
        "cores": 2,
        "memory": 64 << 20,
        "durability": "power",
        "compression": "lz4",
        "blob_min": 1000,
        "verify_checksums": False,
        "rocksdb_options": {"target_file_size_base": "1048576"},
    }
    with millrace.open(tmp_path, **options) as db:
        db.put(b"k", b"v" * 2000)
        db.flush()
        assert db[b"k"] == b"v" * 2000
        assert db.multi_get([b"%d" % n for n in range(10)] + [b"k"])[-1] == b"v" * 2000
    (written,) = tmp_path.glob("OPTIONS-*")
    assert "target_file_size_base=1048576" in written.read_text()
