"""A small file system, mounted where only the node sees it: one that can be filled, or one whose files can share blocks."""

import errno
import pathlib
import shutil
import subprocess
import time

import millrace
import pytest


class SmallDisk:
    """A mount namespace with a tmpfs, or with the file system of an image, held by a process."""

    def __init__(self, mount, size_mib=160, image=None):
        self.mount = mount
        what = f"-o loop '{image}'" if image else f"-t tmpfs -o size={size_mib}m none"
        script = f"mount {what} '{mount}' && echo mounted && exec sleep 3600"
        # As root, or else as root of a user namespace.
        for flags in (["-m"], ["-r", "-m"]):
            self.holder = subprocess.Popen(["unshare", *flags, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            if self.holder.stdout.readline() == b"mounted\n":
                self.enter = ["nsenter", "-t", str(self.holder.pid), "-m", *(["-U", "--preserve-credentials"] if "-r" in flags else [])]
                return
            said = self.holder.communicate()[1].decode()
        pytest.skip(f"no small file system can be mounted here: {said}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.holder.kill()
        self.holder.communicate()

    def inside(self):
        """The mounted directory, as seen from outside."""
        return pathlib.Path(f"/proc/{self.holder.pid}/root{self.mount}")

    def node(self, log, durability):
        port = millrace.free_port()
        flags = ["--cores", "2", "--memory", "128M", "--durability", durability]
        serve = [millrace.BINARY, "serve", "--data", self.mount / "db", "--listen", f"127.0.0.1:{port}", *flags]
        return millrace.Server([*self.enter, *serve], port, log)

    def fill(self, left_mib):
        """Fills the disk until `left_mib` MiB are left."""
        with open(self.inside() / f"filler{time.monotonic_ns()}", "wb", buffering=0) as file:
            try:
                while shutil.disk_usage(self.inside()).free > left_mib << 20:
                    file.write(bytes(64 << 10))
            except OSError as error:
                assert error.errno == errno.ENOSPC, error

    def make_space(self):
        for filler in self.inside().glob("filler*"):
            filler.unlink()
