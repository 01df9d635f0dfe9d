"""Runs each benchmark for a second on a tiny database, to keep the benchmarks working."""

import os

import databases
import guest
import millrace
import pytest

NAMES = ["readrandom", "multireadrandom", "seekrandom", "readseq", "readreverse"]
FIGURES = ["ops_per_second", "found", "p50_us", "p99_us", "p999_us", "cpu_us_per_op", "bytes_per_io"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    databases.db_bench(root / "db", num=20000, value_size=1000, block_size=4096)
    return root / "db"


@pytest.mark.parametrize("name", NAMES)
def test_a_second_of_each_case(name, data):
    said = millrace.said_json("bench", name, "--data", data, "--cores", "1", "--depth", "16", "--seconds", "1")
    assert [figure for figure in FIGURES if figure not in said] == []
    assert said["ops_per_second"] > 100
    assert 0 < said["p50_us"] <= said["p99_us"] <= said["p999_us"]
    assert said["found"] > 0 and said["cpu_us_per_op"] > 0


WRITE_FIGURES = ["max_stall_ms", "stalled_ms", "write_amplification", "syncs"]


def test_a_second_of_writes(tmp_path):
    written = millrace.said_json(
        "bench", "fillrandom", "--data", tmp_path / "db", "--durability", "process", "--num", "20000", "--keys", "500"
    )
    assert written["operations"] == 20000 and written["found"] is None
    assert [figure for figure in WRITE_FIGURES if written[figure] is None] == []
    for name in ["overwrite", "readwhilewriting"]:
        said = millrace.said_json("bench", name, "--data", tmp_path / "db", "--keys", "500", "--seconds", "0.5")
        assert said["max_stall_ms"] > 0 and said["flush_us"] > 0 and said["durability"] == "power"
        assert said["operations"] > 0 and said["found"] in (None, said["operations"])


def test_writes_with_their_background_work(tmp_path):
    flags = ["--durability", "process", "--memtable", "1M", "--num", "20000", "--keys", "5000", "--drain"]
    said = millrace.said_json("bench", "fillrandom", "--data", tmp_path / "db", *flags)
    assert 0 < said["ops_per_second_drained"] <= said["ops_per_second"] and said["drain_seconds"] >= 0
    assert said["device_bytes"] > 20000 * 1000 and said["disk_bytes"] > 4000 * 1000
    assert "with the background work" in millrace.succeed("bench", "fillrandom", "--data", tmp_path / "other", *flags)


def test_readwhilewriting_keeps_the_requested_write_rate(tmp_path):
    """A single writing task that waits for each set reached a fifth of the rate."""
    data = tmp_path / "db"
    millrace.said_json("bench", "fillseq", "--data", data, "--keys", "20000")
    flags = ["--durability", "process", "--rate", "2000", "--seconds", "1", "--depth", "64"]
    said = millrace.said_json("bench", "readwhilewriting", "--data", data, *flags)
    assert said["writers"] == 16 and said["returned_bytes"] == said["found"] * 1000
    assert said["writes_per_second"] > 1000, said


def test_absent_keys(data):
    said = millrace.said_json("bench", "readrandom", "--absent", "--data", data, "--seconds", "0.3")
    assert said["absent"] and said["found"] == 0 and said["operations"] > 1000
    assert said["ios_per_op"] < 0.2, "the filters answer most gets"


def test_mixed_operations(tmp_path):
    data = tmp_path / "db"
    millrace.said_json("bench", "fillseq", "--data", data, "--keys", "20000", "--compression", "lz4")
    common = ["--data", data, "--keys", "20000", "--seconds", "0.5", "--durability", "process", "--cores", "2"]
    memory = ["--memory", "64M", "--memtable", "4M", "--compression", "lz4"]
    for workload in "dabcef":  # d reads the keys that it has inserted itself
        said = millrace.said_json("bench", "ycsb", "--workload", workload, *common, *memory)
        assert said["operations"] > 100 and said["found"] == said["operations"], workload
        assert said["workload"] == workload and said["memory_max_bytes"] > 0
    said = millrace.said_json("bench", "readrandomwriterandom", *common, "--rate", "2000")
    assert abs(said["offered_per_second"] / 2000 - 1) < 0.2 and said["write_percent"] == 10
    assert said["operations"] == round(said["offered_per_second"] * 0.5) == said["found"]
    assert 0 < said["p50_us"] <= said["p99_us"] <= said["p999_us"]
    assert "--workload" in millrace.fail("bench", "ycsb", "--data", data)
    assert "memtables" in millrace.fail("bench", "ycsb", "--workload", "a", "--data", data, "--memory", "64M")


def test_peers_are_measured_at_their_best(tmp_path):
    done = millrace.succeed("bench", "--peers", "--only", "vdisk null, randread 4 KiB, depth 1,", "--rounds", "1", "--seconds", "0.2", "--cores", "0,1")
    assert "| too few rounds |" in done, done
    assert "settings of qemu null-co randread 1: " in done and "iothread,id=thread,poll-max-ns=1000000" in done, done


def test_a_plot_needs_its_rows(tmp_path):
    said = millrace.fail("bench", "--peers", "--only", "logging a line", "--plot", tmp_path / "p99.svg")
    assert "90 % gets, 10 % durable sets" in said


def test_a_bulk_load_and_a_read(tmp_path):
    loaded = millrace.said_json("bench", "fillseq", "--data", tmp_path / "db", "--keys", "20000")
    assert loaded["operations"] == 20000 and loaded["write_amplification"] < 1.5
    said = millrace.said_json("bench", "readseq", "--data", tmp_path / "db", "--seconds", "0.5")
    assert said["keys"] == 20000 and said["found"] > 0


def test_locks():
    said = millrace.said_json("bench", "locks", "--seconds", "0.5")
    for lines in said["hand_over"], said["log"]:
        assert [line["threads"] for line in lines] == [1, 2, 4, 8, 16, 32]
        assert all(line["ns"] > 0 and line["lock_ns"] > 0 for line in lines)


VDISK_FIGURES = ["bytes_per_second", "mean_us", "p50_us", "p99_us", "p999_us", "max_us", "max_pause_ms", "cpu_us_per_op"]


def test_a_disk_of_another_target(tmp_path):
    image = tmp_path / "disk.img"
    image.touch()
    os.truncate(image, 64 << 20)
    with guest.StorageDaemon(tmp_path / "disk.sock", image, queues=2) as daemon:
        flags = ["--socket", daemon.socket, "--depth", "16", "--queues", "2", "--seconds", "0.5"]
        said = millrace.said_json("bench", "vdisk", *flags, "--rw", "randrw", "--verify")
        assert said["operations"] > 100 and said["errors"] == 0 and said["reconnects"] == 0
        assert said["verified"] > 50 and said["size_bytes"] == 64 << 20
        assert [figure for figure in VDISK_FIGURES if not said[figure] > 0] == []
        said = millrace.succeed("bench", "vdisk", *flags, "--rw", "read", "--bs", "65536")
        assert "vdisk read" in said and "longest pause" in said
    assert "somewhere" in millrace.fail("bench", "vdisk", "--socket", tmp_path / "somewhere")
    assert "--verify" in millrace.fail("bench", "vdisk", "--socket", tmp_path / "somewhere", "--verify")


def test_a_disk_of_our_own(tmp_path):
    image = tmp_path / "a disk.img"
    image.touch()
    os.truncate(image, 64 << 20)
    flags = ["--depth", "16", "--seconds", "0.3"]
    uri = f"file:{str(image).replace(' ', '%20')}?engine=uring"
    said = millrace.said_json("bench", "vdisk", "--disk", uri, *flags, "--queues", "2", "--rw", "randrw", "--verify")
    assert said["operations"] > 100 and said["errors"] == 0 and said["verified"] > 50 and said["disk"] == uri
    assert [figure for figure in VDISK_FIGURES if not said[figure] > 0] == []
    said = millrace.said_json("bench", "vdisk", "--disk", uri, *flags, "--rw", "randwrite", "--sync")
    assert said["operations"] > 10 and said["errors"] == 0 and said["sync"]
    said = millrace.said_json("bench", "vdisk", "--disk", "null:1G", "--seconds", "0.3", "--depth", "1", "--think-us", "1000")
    assert said["operations"] > 10 and said["mean_us"] > 0
    assert said["ops_per_second"] < 1000, "the guest waits for 1 ms after each request"
    said = millrace.said_json("bench", "vdisk", "--disk", "null:1G", "--idle", "3", "--seconds", "0.3")
    assert said["disks"] == 3 and said["cpu_percent"] >= 0
    assert "no-such-file" in millrace.fail("bench", "vdisk", "--disk", f"file:{tmp_path}/no-such-file", *flags)


def test_a_target_that_is_replaced(tmp_path):
    image = tmp_path / "disk.img"
    image.touch()
    os.truncate(image, 64 << 20)
    flags = ["--disk", f"file:{image}", "--rw", "randrw", "--depth", "8", "--verify"]
    for how, others in ("--upgrades", ["told_ms"]), ("--restarts", []):
        said = millrace.said_json("bench", "vdisk", *flags, how, "3")
        assert said["errors"] == 0 and said["verified"] > 50 and said["times"] == 3 and said["reconnects"] == 0
        for figure in ["pause_ms", "alone_ms", *others]:
            times = said[figure]
            assert 0 < times["median"] <= times["worst"] and len(times["all"]) == 3, figure
        assert bool(said["told_ms"]) == (how == "--upgrades")
    assert "depth 1" in millrace.succeed("bench", "vdisk", "--disk", "null:1G", "--depth", "1", "--upgrades", "1")
    assert "were as written" in millrace.succeed("bench", "vdisk", "--disk", "mem:16M", "--rw", "randrw", "--verify", "--upgrades", "1")


def test_text_output(data):
    said = millrace.succeed("bench", "readrandom", "--data", data, "--cores", "1", "--depth", "8", "--seconds", "1")
    assert "readrandom" in said


def test_all_keys_are_found(data):
    said = millrace.said_json("bench", "readrandom", "--data", data, "--cores", "1", "--depth", "64", "--seconds", "1")
    assert said["found"] >= 0.99 * said["ops_per_second"]
