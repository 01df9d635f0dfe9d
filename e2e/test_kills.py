"""Kills a process that uses every kind of write (see kills.py)."""

import kills
import pytest


@pytest.mark.parametrize("durability", ["process", "power"])
def test_nothing_acknowledged_is_lost_whatever_was_written(durability, long, tmp_path):
    for seed in range(4 if long else 1):
        kills.run(seed, durability, 50 if long else 25, tmp_path / str(seed))
