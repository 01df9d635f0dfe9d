"""Several engines write to one directory in turn; see alternating.py."""

import alternating
import pytest


@pytest.mark.parametrize("seed", range(6))
def test_all_engines_find_the_same_after_each_has_written(seed, tmp_path, long):
    if seed > 1 and not long:
        pytest.skip("--long plays six seeds, and longer")
    merges = alternating.run(seed, 60 if long else 12, tmp_path)
    # A run without a compaction of ours would prove nothing about compactions.
    assert merges >= (40 if long else 8), merges


FAMILIES = {family: {} for family in alternating.FAMILIES}
PLAIN = {"compression": 0, "disable_auto_compactions": 1, "target_file_size_base": 4096}


class Theirs:
    """RocksDB 7.8 over a directory; each opening is a new process."""

    def __init__(self, data):
        self.data = data

    def does(self, *operations, killed=False):
        engine = alternating.Engine("7.8")
        hexed = [[part if not isinstance(part, bytes) else "x" + part.hex() for part in operation] for operation in operations]
        try:
            return engine.ask(self.data, hexed, killed=killed, read=not killed, common=PLAIN)
        finally:
            engine.end()

    def keys(self):
        """The keys of the default family."""
        return [bytes.fromhex(pair[0]) for pair in self.does()["default"][0]]


def test_versions_of_a_key_in_two_files_are_compacted_together(tmp_path):
    """The last entry of the first file deletes the first entry of the second: RocksDB moved both to level 1 unchanged."""
    theirs, ours = Theirs(tmp_path / "db"), alternating.Ours(tmp_path)
    theirs.does(
        ["put", "default", b"key0005", b"old"],
        ["put", "default", b"key0009", b"9"],
        ["flush", "default"],
        ["delete", "default", b"key0005"],
        ["put", "default", b"key0003", b"3"],
        ["flush", "default"],
        ["compact", "default", None, None],
        *[operation for n in range(4) for operation in (["put", "default", b"key0002", b"%d" % n], ["put", "default", b"key0003", b"%d" % n], ["flush", "default"])],
    )
    assert theirs.keys() == [b"key0002", b"key0003", b"key0009"]
    ours.write(tmp_path / "db", [], False, {b"key0005": None})
    assert ours.merges == 1
    assert [bytes.fromhex(pair[0]) for pair in ours.read(tmp_path / "db")["default"][0]] == [b"key0002", b"key0003", b"key0009"]
    assert theirs.keys() == [b"key0002", b"key0003", b"key0009"]


def test_a_single_delete_under_a_newer_put_is_kept(tmp_path):
    """Without it, a later SingleDelete removes the newer put, and the first put reappears."""
    theirs, ours = Theirs(tmp_path / "db"), alternating.Ours(tmp_path)
    key, value = b"key0003", b"value"
    theirs.does(["put", "default", key, value], ["flush", "default"], ["compact", "default", None, None, False, 4])
    theirs.does(["single_delete", "default", key], ["put", "default", key, value], killed=True)
    ours.write(tmp_path / "db", [], False, {key: value})
    # With neighbouring keys; otherwise the tables would only be moved.
    neighbours = [b"key0001", b"key0009"]
    theirs.does(["single_delete", "default", key], *[["put", "default", name, b""] for name in neighbours], ["flush", "default"], ["compact", "default", None, None])
    assert theirs.keys() == neighbours
    assert [bytes.fromhex(pair[0]) for pair in ours.read(tmp_path / "db")["default"][0]] == neighbours
