"""Writing continues in the same process when files can be created again."""

import resource
import time

import millrace
import pytest
from databases import ldb
from test_full_disk import all_there, found_by_rocksdb, persistence, write_again, write_until_refused


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_node_without_descriptors_refuses_writes_until_it_has_some_again(durability, tmp_path):
    flags = ["--durability", durability, "--memory", "64M"]
    with millrace.node(tmp_path / "db", tmp_path / "log", *flags, writes=True) as node:
        node.until_ready()
        pid = millrace.serving(node.process.pid)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        with node.connect() as client:
            keys = 0
            for _ in range(2):
                # Files that are open stay so; no further one can be opened or created.
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, before[1]))
                keys, refusal = write_until_refused(client, keys)
                assert "MISCONF" in refusal, refusal
                said = persistence(client)
                assert (said["healing"], said["write_failure"], said["aof_last_write_status"]) == ("1", "", "err"), said
                assert "os error 24" in said["last_disk_error"], said
                all_there(client, keys)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
                write_again(client, keys)
                keys += 1
                until_healed(client)
            all_there(client, keys)
            assert client.call("DBSIZE") == keys
    ldb(tmp_path / "db", "checkconsistency")
    assert found_by_rocksdb(tmp_path / "db") == {f"key:{number}" for number in range(keys)}


def until_healed(client):
    """Waits until nothing waits for a retry."""
    deadline = time.monotonic() + 60
    while (said := persistence(client))["healing"] != "0":
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
