"""Each benchmark, for a second, on a tiny database: so that they never rot."""

import databases
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
def test_a_second_of_it(name, data):
    said = millrace.said_json("bench", name, "--data", data, "--cores", "1", "--depth", "16", "--seconds", "1")
    assert [figure for figure in FIGURES if figure not in said] == []
    assert said["ops_per_second"] > 100
    assert 0 < said["p50_us"] <= said["p99_us"] <= said["p999_us"]
    assert said["found"] > 0 and said["cpu_us_per_op"] > 0


def test_in_words(data):
    said = millrace.succeed("bench", "readrandom", "--data", data, "--cores", "1", "--depth", "8", "--seconds", "1")
    assert "readrandom" in said


def test_all_keys_are_found(data):
    said = millrace.said_json("bench", "readrandom", "--data", data, "--cores", "1", "--depth", "64", "--seconds", "1")
    assert said["found"] >= 0.99 * said["ops_per_second"]
