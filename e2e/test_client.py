"""The clients of `millrace::Client`: everything they do, against a node and against Redis; and the race."""

import os
import pathlib
import subprocess

import millrace
import pytest

EVERYTHING = pathlib.Path(os.environ.get("MILLRACE_CLIENT", millrace.TARGET / "debug" / "examples" / "everything"))


def everything(server, *arguments):
    done = subprocess.run([EVERYTHING, f"127.0.0.1:{server.port}", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def tracks(server):
    """Whether the server can tell a client which of its keys are written."""
    with server.connect() as client:
        client.call("HELLO", "3")
        return client.call("CLIENT", "TRACKING", "ON") == b"OK"


@pytest.mark.parametrize("cores", ["1", "2"])
def test_everything_with_a_node(tmp_path, cores):
    with millrace.node(tmp_path / "db", tmp_path / "log", "--cores", cores, "--durability", "process", writes=True) as node:
        everything(node, "millrace", *(["tracks"] if tracks(node) else []))


def test_everything_with_redis(tmp_path):
    with millrace.redis_server(tmp_path, tmp_path / "log") as server:
        everything(server, "redis", "tracks")


FIGURES = ["write_s", "sequential_s", "hot_s", "total_s"]
FLAGS = ["--threads", "4", "--sets", "3000"]


def check_race(said):
    assert said["threads"] == 4 and said["sets"] == 3000 and said["value_size"] == 4096
    assert said["writes"] == said["sequential_verified"] == 12000
    # 2,560 keys are a partition of 10 MB; each gets a tenth more reads than it has keys.
    assert said["hot_verified"] == 4 * (2560 + 256 + 440 + 44)
    assert all(said[figure] > 0 for figure in FIGURES)
    assert abs(said["total_s"] - sum(said[figure] for figure in FIGURES[:3])) < 1e-6


def test_a_race_with_a_node_of_its_own(tmp_path):
    said = millrace.said_json("bench", "race", "--data", tmp_path, *FLAGS, "--durability", "process")
    check_race(said)
    assert said["connect"] is None and said["durability"] == "process"
    assert list(tmp_path.iterdir()) == [], "the node's directory is left"


def test_a_race_with_a_server(tmp_path):
    with millrace.redis_server(tmp_path, tmp_path / "log") as server:
        address = f"127.0.0.1:{server.port}"
        said = millrace.said_json("bench", "race", "--connect", address, *FLAGS)
        check_race(said)
        assert said["connect"] == address and said["durability"] is None and said["cache_hits"] == 0
        said = millrace.said_json("bench", "race", "--connect", address, *FLAGS, "--cache", "128M")
        check_race(said)
        assert said["cache_hits"] == said["hot_verified"], "the sequential pass has cached everything"
        text = millrace.succeed("bench", "race", "--connect", address, "--threads", "1", "--sets", "10")
        assert "10 verified" in text and "total" in text


def test_a_race_says_what_is_wrong(tmp_path):
    assert "--data" in millrace.fail("bench", "race")
    assert "cannot connect" in millrace.fail("bench", "race", "--connect", f"127.0.0.1:{millrace.free_port()}")
    missing = tmp_path / "file"
    missing.touch()
    assert "cannot create" in millrace.fail("bench", "race", "--data", missing)
    assert list(tmp_path.iterdir()) == [missing]
