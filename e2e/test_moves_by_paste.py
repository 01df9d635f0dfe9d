"""The move of a disk between two nodes by paste, as README.md tells it."""

import contextlib
import filecmp
import os
import signal
import subprocess

import millrace
import two_machines

HEADING = "## A disk moves to another node\n"


def test_a_disk_moves_between_two_nodes_by_paste(tmp_path):
    text = two_machines.block("README.md", "sh", "disk move", HEADING)
    for was, now in (("target/release/millrace", millrace.BINARY.resolve()), ("127.0.0.1:7070", f"127.0.0.1:{millrace.free_port()}")):
        assert was in text
        text = text.replace(was, str(now))
    log = tmp_path / "log"
    with open(log, "wb") as out:
        shell = subprocess.Popen(
            ["bash", "-ec", text], cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = shell.wait(120)
        finally:
            # The nodes, if a command has failed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    said = log.read_text()
    assert code == 0, said
    assert "disk vm1 has moved to 127.0.0.1:" in said and "elsewhere" in said and "panicked" not in said, said
    (old,), (new,) = tmp_path.glob("tmp.*/a.img"), tmp_path.glob("tmp.*/b.img")
    assert filecmp.cmp(old, new, shallow=False)
