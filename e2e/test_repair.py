"""`kv check --repair`: what is intact is kept, RocksDB opens the result, and a kill leaves the old or the new state."""

import json
import random
import shutil
import signal
import subprocess
import time

import databases
import layout
import millrace
import pytest
from rocksdict import Options, Rdict

# Databases whose MANIFEST is lost: tables in one and in several levels, range deletions, blob files, column families,
# writes that are only in logs, merge operands, tables that RocksDB's repair put into level 0.
REBUILT = [
    "db_bench-format-version-5",
    "db_bench-reopened",
    "db_bench-range-tombstones",
    "db_bench-blobs-lz4",
    "ldb-column-families",
    "ldb-put",
    "db_bench-wal-only-overwritten-and-deleted",
    "db_bench-merge-operands",
]


def repair(data, *arguments, code=None, reads=True):
    """Repairs a directory; returns the report. RocksDB finds it consistent, if 7.8 `reads` it, and a check finds nothing."""
    done = millrace.command("kv", "check", "--repair", "--data", data, "--json", *arguments)
    assert done.returncode in (0, 1) and "panicked" not in done.stderr, done.stderr
    said = json.loads(done.stdout)
    assert code in (None, done.returncode), said
    assert done.returncode == (1 if said["lost"] or said["damages"] else 0), said
    if "--dry-run" not in arguments:
        assert not said["lost"] or said["repaired"]
        again = millrace.said_json("kv", "check", "--repair", "--data", data) if not said["damages"] else None
        assert again is None or not again["needed"], "a second repair finds something"
        if reads:
            databases.ldb(data, "checkconsistency")
    return said


def families_of(data):
    return [family["name"] for family in millrace.said_json("kv", "column-families", "list", "--data", data)]


def contents(data):
    """All entries, by column family."""
    return {name: dict(millrace.scan(data, "--column-family", name)) for name in families_of(data)}


def without_manifest(data):
    for file in [*data.glob("MANIFEST-*"), data / "CURRENT"]:
        file.unlink()


def repaired_by_ldb(data, tmp_path):
    """What RocksDB's repair keeps of a copy."""
    copy = tmp_path / "by-ldb"
    shutil.copytree(data, copy)
    databases.ldb(copy, "repair")
    return contents(copy)


@pytest.mark.parametrize("made", REBUILT)
def test_a_lost_manifest_is_rebuilt_from_the_tables_and_logs(made, own_copy, tmp_path):
    data = own_copy(made)
    before = contents(data)
    without_manifest(data)
    files = {file.name: file.stat().st_size for file in data.iterdir()}
    assert repair(data, "--dry-run")["needed"]
    assert {file.name: file.stat().st_size for file in data.iterdir()} == files, "a dry run changes something"
    said = repair(data, code=0)
    assert said["rebuilt"] and said["repaired"]
    assert contents(data) == before
    assert "nothing is damaged" in millrace.succeed("kv", "check", "--data", data)
    millrace.succeed("kv", "put", "new", "value", "--data", data, "--adopt")
    assert millrace.succeed("kv", "get", "new", "--data", data) == "value\n"


def several_tables(path):
    """1500 keys in tables of level 1, and newer values of some in level 0."""
    pairs = [text for n in range(1500) for text in (f"key{n:05}", f"{n:0200}")]
    databases.ldb(path, "batchput", *pairs, "--create_if_missing")
    databases.ldb(path, "compact", "--file_size=20000", "--compression_type=no")
    newer = [text for n in range(0, 1500, 7) for text in (f"key{n:05}", f"newer {n}")]
    databases.ldb(path, "batchput", *newer)
    databases.ldb(path, "put", "last", "in the log")


def keeps_at_least(data, kept):
    """Asserts that the directory has these entries."""
    ours = contents(data)
    for family, entries in kept.items():
        wrong = [key for key, value in entries.items() if ours[family].get(key) != value]
        assert not wrong, f"{family}: RocksDB's repair keeps {wrong[:5]} and {len(wrong)} in all"


@pytest.mark.parametrize("harm", ["missing", "cut", "garbage"])
@pytest.mark.parametrize("manifest", ["there", "lost"])
def test_a_table_that_cannot_be_read_is_dropped_and_all_else_kept(harm, manifest, tmp_path):
    data = tmp_path / "db"
    several_tables(data)
    before = contents(data)["default"]
    tables = sorted(data.glob("*.sst"))
    assert len(tables) > 8
    table = tables[3]
    if harm == "missing":
        table.unlink()
    else:
        whole = table.read_bytes()
        table.write_bytes(whole[: len(whole) // 2] if harm == "cut" else bytes(len(whole)))
    if manifest == "lost":
        without_manifest(data)
    by_ldb = repaired_by_ldb(data, tmp_path)
    known = not (manifest == "lost" and harm == "missing")
    said = repair(data, code=1 if known else 0)
    after = contents(data)["default"]
    gone = {key for key in before if key not in after}
    if known:
        [lost] = said["lost"]
        assert lost["file"] == table.name
        assert harm == "missing" or (data / "lost" / table.name).exists()
    if manifest == "there":
        first, last = bytes.fromhex(lost["smallest_hex"]), bytes.fromhex(lost["largest_hex"])
        assert all(first <= key <= last for key in gone)
        assert all(after[key] == before[key] for key in before if not first <= key <= last)
    assert 0 < len(gone) < 300 and all(before[key] == value for key, value in after.items())
    keeps_at_least(data, by_ldb)


@pytest.mark.parametrize("manifest", ["there", "lost"])
@pytest.mark.parametrize("place", [-13, -40, -12, -53], ids=["reserved", "metaindex-size", "version", "checksum-type"])
def test_a_bit_in_the_footer_of_a_table_stops_only_this_table(place, manifest, tmp_path):
    data = tmp_path / "db"
    options = Options(raw_mode=True)
    options.set_disable_auto_compactions(True)
    db = Rdict(str(data), options)
    for first in "ab":
        for n in range(50):
            db[b"%s%d" % (first.encode(), n)] = b"value"
        db.flush()
    db.close()
    whole, harmed = sorted(data.glob("*.sst"))
    layout.flip(harmed, harmed.stat().st_size + place, 3)
    if manifest == "there":
        millrace.succeed("kv", "put", "new", "value", "--data", data)
        assert millrace.succeed("kv", "get", "a7", "--data", data) == "value\n"
        said = millrace.fail("kv", "get", "b7", "--data", data)
        assert harmed.name in said and "orruption" in said, said
    else:
        without_manifest(data)
    said = repair(data, code=1, reads=False)
    assert [lost["file"] for lost in said["lost"]] == [harmed.name]
    left = {b"a%d" % n: b"value" for n in range(50)} | ({b"new": b"value"} if manifest == "there" else {})
    assert contents(data)["default"] == left
    db = Rdict(str(data), Options(raw_mode=True))
    assert dict(db.items()) == left
    db.close()


@pytest.mark.parametrize("place", [4, 12, 13, 20], ids=["version", "flags", "compression", "expiration"])
def test_a_bit_in_the_header_of_a_blob_file_does_not_stop_a_repair(place, own_copy):
    data = own_copy("rocksdict-blobs-kNoCompression")
    file = sorted(data.glob("*.blob"))[0]
    layout.flip(file, place, 0 if place == 12 else 5)
    without_manifest(data)
    done = millrace.command("kv", "check", "--repair", "--data", data, "--json")
    assert done.returncode == 1, done.stderr
    # References to its values stay, as damage.
    assert [lost["file"] for lost in json.loads(done.stdout)["lost"]] == [file.name]
    millrace.succeed("kv", "stat", "--data", data)


@pytest.mark.parametrize("manifest", ["there", "lost"])
@pytest.mark.parametrize("harm", ["flip", "grown", "cut"])
def test_a_blob_file_with_a_damaged_end_is_written_again(harm, manifest, tmp_path):
    data = tmp_path / "db"
    options = Options(raw_mode=True)
    options.set_enable_blob_files(True)
    options.set_min_blob_size(100)
    db = Rdict(str(data), options)
    rows = {b"key%d" % n: b"%d" % n * 200 for n in range(100)}
    for key, value in rows.items():
        db[key] = value
    db.close()
    [file] = data.glob("*.blob")
    whole = file.read_bytes()
    file.write_bytes({"grown": whole + b"z" * 100, "cut": whole[:-10]}.get(harm, whole))
    if harm == "flip":
        layout.flip(file, len(whole) - 20)
    if manifest == "lost":
        without_manifest(data)
    is_mended = manifest == "there" or harm == "flip"
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    assert repair(data, "--dry-run")["needed"] == (is_mended or manifest == "lost")
    assert {path.name: path.read_bytes() for path in data.iterdir()} == before
    done = millrace.command("kv", "check", "--repair", "--data", data, "--json")
    assert done.returncode == (0 if is_mended else 1), done.stderr
    said = json.loads(done.stdout)
    assert any(file.name in warning for warning in said["warnings"]) == is_mended
    if not is_mended:
        return
    assert contents(data)["default"] == rows
    assert file.read_bytes() == whole and (data / "lost" / file.name).read_bytes() == before[file.name]
    assert not repair(data, code=0, reads=False)["needed"]
    db = Rdict(str(data), options)
    assert dict(db.items()) == rows
    db.close()


def test_without_current_the_manifest_has_the_state(tmp_path):
    data = tmp_path / "db"
    several_tables(data)
    before = contents(data)
    (data / "CURRENT").unlink()
    said = repair(data, code=0)
    assert said["rebuilt"] is None and "CURRENT" in said["warnings"][0]
    assert contents(data) == before


def test_a_damaged_log_is_kept_up_to_the_damage(own_copy):
    data = own_copy("db_bench-wal-only")
    before = contents(data)["default"]
    file = max(data.glob("*.log"))
    records = layout.log(file)
    layout.flip(file, records[len(records) // 2].end - 1)
    assert "--repair" in millrace.fail("kv", "put", "a", "b", "--data", data)
    said = repair(data, code=1)
    assert [lost["file"] for lost in said["lost"]] == [file.name] and (data / "lost" / file.name).exists()
    after = contents(data)["default"]
    assert len(before) // 3 < len(after) < len(before) and after == {key: before[key] for key in after}
    millrace.succeed("kv", "put", "a", "b", "--data", data)


def test_a_kill_leaves_the_old_state_or_the_new_one(own_copy, long):
    data = own_copy("db_bench-reopened")
    before = contents(data)
    without_manifest(data)
    rng = random.Random(5)
    arguments = [str(millrace.BINARY), "kv", "check", "--repair", "--data", str(data)]
    for _ in range(200 if long else 15):
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.random() * 0.12)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (data / "CURRENT").exists():
            assert contents(data) == before
            without_manifest(data)
    repair(data, code=0)
    assert contents(data) == before


def test_a_directory_in_use_or_without_a_database_is_refused(tmp_path):
    data = tmp_path / "db"
    several_tables(data)
    with millrace.node(data, tmp_path / "log"):
        assert "open" in millrace.fail("kv", "check", "--repair", "--data", data)
    (tmp_path / "empty").mkdir()
    assert "no RocksDB database" in millrace.fail("kv", "check", "--repair", "--data", tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    assert "nothing to repair" in millrace.succeed("kv", "check", "--repair", "--data", data)
