"""Redis 7.0's own test suite, unpatched, against a node: every test that is not in redis-suite.skip passes."""

import os
import subprocess

import millrace
import pytest

SUITE = millrace.ROOT / "scripts" / "redis-suite"


@pytest.mark.timeout(900)
def test_redis_s_own_suite_passes(long):
    environment = {**os.environ, "MILLRACE": str(millrace.BINARY), "MILLRACE_SUITE_PORT": str(millrace.free_port())}
    done = subprocess.run(
        [SUITE, *([] if long else ["--short"])], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout
