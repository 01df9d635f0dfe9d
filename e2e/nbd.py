"""A client of the Network Block Device protocol that sends what a test wants."""

import socket
import struct

READ, WRITE, DISC, FLUSH, TRIM, ZEROES = 0, 1, 2, 3, 4, 6
FUA = 1
EPERM, EIO, EINVAL, ENOSPC, ESHUTDOWN = 1, 5, 22, 28, 108
READ_ONLY = 1 << 1
OPT_ABORT, OPT_LIST, OPT_GO = 2, 3, 7
REP_ACK, REP_SERVER, REP_INFO = 1, 2, 3


class Closed(Exception):
    """The server has closed the connection."""


class Refused(Exception):
    """The server has refused an option."""


def dial(address, timeout=20):
    """A socket connected to HOST:PORT or unix:PATH."""
    if address.startswith("unix:"):
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(timeout)
        client.connect(address[5:])
    else:
        host, port = address.rsplit(":", 1)
        client = socket.create_connection((host, int(port)), timeout)
    return client


def uri(address, name):
    """The URI of an export, as QEMU's tools read it."""
    if address.startswith("unix:"):
        return f"nbd+unix:///{name}?socket={address[5:]}"
    return f"nbd://{address}/{name}"


class Client:
    """A connection, for use with `with`. With `name` it uses that export, with simple replies."""

    def __init__(self, address, name=None, timeout=20):
        self.socket = dial(address, timeout)
        self.cookie = 0
        self.take(18)
        self.socket.sendall(struct.pack(">I", 3))
        if name is not None:
            self.go(name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def take(self, n):
        """The next `n` bytes."""
        parts = []
        while n > 0:
            try:
                part = self.socket.recv(min(n, 1 << 20))
            except ConnectionError:
                part = b""
            if not part:
                raise Closed
            parts.append(part)
            n -= len(part)
        return b"".join(parts)

    def option(self, kind, data=b""):
        """Sends an option; returns the type and the data of each reply before the acknowledgement."""
        self.socket.sendall(struct.pack(">8sII", b"IHAVEOPT", kind, len(data)) + data)
        replies = []
        while True:
            magic, option, reply, length = struct.unpack(">QIII", self.take(20))
            assert (magic, option) == (0x0003E889045565A9, kind)
            body = self.take(length)
            if reply == REP_ACK:
                return replies
            if reply >> 31:
                raise Refused(body.decode())
            replies.append((reply, body))

    def names(self):
        """The names of all exports."""
        return [body[4:].decode() for _, body in self.option(OPT_LIST)]

    def go(self, name):
        """Chooses an export."""
        name = name.encode()
        for _, body in self.option(OPT_GO, struct.pack(">I", len(name)) + name + struct.pack(">HH", 1, 3)):
            kind = struct.unpack(">H", body[:2])[0]
            if kind == 0:
                self.size, self.flags = struct.unpack(">QH", body[2:])
            elif kind == 3:
                self.block, self.preferred, self.longest = struct.unpack(">III", body[2:])

    def send(self, command, offset=0, length=0, data=b"", flags=0):
        """Sends a request; returns its cookie."""
        self.cookie += 1
        self.socket.sendall(struct.pack(">IHHQQI", 0x25609513, flags, command, self.cookie, offset, length) + data)
        return self.cookie

    def reply(self):
        """The cookie and the error of the next reply."""
        magic, error, cookie = struct.unpack(">IIQ", self.take(16))
        assert magic == 0x67446698
        return cookie, error

    def call(self, command, offset=0, length=0, data=b"", flags=0):
        """Sends a request and waits for its reply; returns the error."""
        cookie = self.send(command, offset, length, data, flags)
        answered, error = self.reply()
        assert answered == cookie
        return error

    def read(self, offset, length):
        assert self.call(READ, offset, length) == 0
        return self.take(length)

    def write(self, offset, data, flags=0):
        return self.call(WRITE, offset, len(data), data, flags)
