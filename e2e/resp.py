"""A small RESP client that returns replies unchanged, with their types and error texts."""

import socket


class Closed(Exception):
    """The other side closed the connection."""


class Error(str):
    """An error reply."""

    def __repr__(self):
        return f"Error({str.__repr__(self)})"


class Simple(bytes):
    """A simple string, distinct from a bulk string."""

    def __repr__(self):
        return f"Simple({bytes.__repr__(self)})"


class Verbatim(bytes):
    """A verbatim string of RESP3, without its format."""


class Map(dict):
    """A map of RESP3."""


class Double(float):
    """A double of RESP3."""


class Push(list):
    """A push of RESP3."""


class RespSet(list):
    """A set of RESP3, in the order received."""


class Null:
    """The null of RESP3."""

    def __eq__(self, other):
        return isinstance(other, Null)

    def __repr__(self):
        return "Null()"


class NullArray(Null):
    """The null array of RESP2, distinct from its null bulk string."""

    def __eq__(self, other):
        return isinstance(other, NullArray)

    def __repr__(self):
        return "NullArray()"


def encode(*words):
    """One request."""
    out = [b"*%d\r\n" % len(words)]
    for word in words:
        word = word if isinstance(word, bytes) else str(word).encode()
        out.append(b"$%d\r\n%s\r\n" % (len(word), word))
    return b"".join(out)


class Connection:
    """A blocking connection to 127.0.0.1."""

    def __init__(self, port, timeout=20):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray()
        self.at = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        """Sends raw bytes."""
        self.socket.sendall(data)

    def call(self, *words):
        """One request and its reply."""
        self.send(encode(*words))
        return self.reply()

    def pipeline(self, requests, window=500):
        """Sends many requests, `window` at a time, and returns their replies."""
        replies = []
        for start in range(0, len(requests), window):
            part = requests[start : start + window]
            self.send(b"".join(encode(*request) for request in part))
            replies += [self.reply() for _ in part]
        return replies

    def fill(self):
        """Receives more bytes."""
        if self.at > 1 << 20:
            del self.buffer[: self.at]
            self.at = 0
        part = self.socket.recv(1 << 18)
        if not part:
            raise Closed(bytes(self.buffer[self.at :]))
        self.buffer += part

    def line(self):
        """The bytes up to the next line end."""
        while (end := self.buffer.find(b"\r\n", self.at)) < 0:
            self.fill()
        line = bytes(self.buffer[self.at : end])
        self.at = end + 2
        return line

    def exactly(self, length):
        """The next `length` bytes; skips the line end after them."""
        while len(self.buffer) < self.at + length + 2:
            self.fill()
        data = bytes(self.buffer[self.at : self.at + length])
        assert self.buffer[self.at + length : self.at + length + 2] == b"\r\n", "a bulk string without its line end"
        self.at += length + 2
        return data

    def reply(self):
        """The next reply."""
        line = self.line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return Simple(rest)
        if kind == b"-":
            return Error(rest.decode(errors="backslashreplace"))
        if kind == b":":
            return int(rest)
        if kind == b",":
            return Double(rest)
        if kind == b"#":
            return {b"t": True, b"f": False}[rest]
        if kind == b"_":
            return Null()
        if kind == b"$":
            return None if rest == b"-1" else self.exactly(int(rest))
        if kind == b"=":
            return Verbatim(self.exactly(int(rest))[4:])
        if kind == b"*":
            return NullArray() if rest == b"-1" else [self.reply() for _ in range(int(rest))]
        if kind == b"~":
            return RespSet(self.reply() for _ in range(int(rest)))
        if kind == b">":
            return Push(self.reply() for _ in range(int(rest)))
        if kind == b"%":
            return Map((hashable(self.reply()), self.reply()) for _ in range(int(rest)))
        raise AssertionError(f"not RESP: {line!r}")

    def until_closed(self):
        """All bytes until the other side closes."""
        try:
            while True:
                self.fill()
        except (Closed, ConnectionError):
            return bytes(self.buffer[self.at :])


def hashable(value):
    """The reply in a form that can be a key."""
    return repr(value) if isinstance(value, (list, dict)) else value
