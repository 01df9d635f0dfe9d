"""A service manager with a descriptor store, as systemd is one (sd_notify(3), sd_listen_fds(3)), for a machine without systemd."""

import array
import fcntl
import os
import socket
import subprocess
import threading

from test_admin import Node

FIRST = 3


class Manager:
    """Keeps descriptors for the processes that it starts."""

    def __init__(self, path):
        self.path = path
        self.stored = {}
        self.told = []
        self.lock = threading.Lock()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self):
        while True:
            text, ancillary, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(253 * 4))
            fds = array.array("i")
            for _, _, data in ancillary:
                fds.frombytes(data)
            words = dict(line.split("=", 1) for line in text.decode().splitlines())
            if "END" in words:
                return
            with self.lock:
                self._take(words, list(fds))

    def _take(self, words, fds):
        name = words.get("FDNAME")
        if "FDSTORE" in words:
            assert words["FDPOLL"] == "0" and len(fds) == 1 and ":" not in name
            # As systemd does: what is there already, under whatever name, is not stored again.
            if any(os.path.sameopenfile(fds[0], fd) for fd in self.stored.values()):
                os.close(fds[0])
            else:
                assert name not in self.stored
                self.stored[name] = fds[0]
        elif "FDSTOREREMOVE" in words:
            if name in self.stored:
                os.close(self.stored.pop(name))
        else:
            self.told.append(words)

    def start(self, arguments, out):
        """Starts a process with what is stored."""
        self.settle()
        with self.lock:
            # Away from the numbers that they get.
            fds = [(name, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1000)) for name, fd in self.stored.items()]

        def prepare():
            for nth, (_, fd) in enumerate(fds):
                os.dup2(fd, FIRST + nth)

        words = {"NOTIFY_SOCKET": str(self.path), "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": ":".join(name for name, _ in fds)}
        try:
            return subprocess.Popen(
                ["/bin/sh", "-c", 'LISTEN_PID=$$ exec "$0" "$@"', *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=os.environ | (words if fds else {"NOTIFY_SOCKET": str(self.path)}), close_fds=False, preexec_fn=prepare,
            )  # fmt: skip
        finally:
            for _, fd in fds:
                os.close(fd)

    def settle(self):
        """Takes everything that was said before."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"SETTLE=1\n", str(self.path))
        while {"SETTLE": "1"} not in self.told:
            threading.Event().wait(0.001)
        self.told.remove({"SETTLE": "1"})

    def names(self):
        self.settle()
        return set(self.stored)

    def close(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"END=1\n", str(self.path))
        self.thread.join()
        for fd in self.stored.values():
            os.close(fd)
        self.socket.close()


class Managed(Node):
    """A node that a service manager starts."""

    def __init__(self, tmp_path, *flags, **words):
        super().__init__(tmp_path, *flags, **words)
        self.manager = Manager(tmp_path / "notify")

    def popen(self, out):
        return self.manager.start(self.arguments, out)

    def kill_launcher(self):
        """Kills the launcher, and with it the node; the manager starts the next one at once."""
        self.kill()
        self.start()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.manager.close()
