"""A front end of vhost-user-blk that sends what a test wants: two split rings, and one request at a time on each."""

import mmap
import os
import socket
import struct

import guest

GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEM_TABLE, SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE = 1, 2, 3, 5, 8, 9, 10
SET_LOG_BASE, GET_VRING_BASE = 6, 11
SET_VRING_KICK, SET_VRING_CALL, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, SET_VRING_ENABLE = 12, 13, 15, 16, 18
# Flags of a message.
VERSION, NEED_REPLY = 1, 8
# Flush, discard, write zeroes, vhost-user's own features, virtio 1.
FEATURES = 1 << 9 | 1 << 13 | 1 << 14 | 1 << 30 | 1 << 32
# Several rings, logs of migrations in shared memory, acknowledgements.
PROTOCOL = 1 << 0 | 1 << 1 | 1 << 3
# The memory that the device writes is logged: the machine migrates.
LOG_ALL = 1 << 26
FLUSH, DISCARD, ZEROES = 4, 11, 13
UNMAP = 1
OK, IO_ERROR, UNSUPPORTED = 0, 1, 2

RINGS, ENTRIES = 2, 16
BYTES = 1 << 20
# Where the memory is in the front end, by its own account, and what it has for each ring.
BASE = 0x7000_0000
AREA, AVAILABLE, USED, REQUEST, STATUS = 0x10000, 0x1000, 0x2000, 0x3000, 0x4000


class FrontEnd:
    """A connection with running rings, for use with `with`."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(guest.PATIENCE)
        self.socket.connect(str(path))
        self.file = os.memfd_create("guest")
        os.truncate(self.file, BYTES)
        self.memory = mmap.mmap(self.file, BYTES)
        self.kicks = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(RINGS)]
        self.calls = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(RINGS)]
        # The available index of each ring.
        self.next = [0] * RINGS
        self._start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.memory.close()
        for fd in (self.file, *self.kicks, *self.calls):
            os.close(fd)

    def send(self, request, payload=b"", fds=(), flags=VERSION):
        """Sends a message, and waits for no reply."""
        message = struct.pack("<III", request, flags, len(payload)) + payload
        socket.send_fds(self.socket, [message], list(fds))

    def reply(self, request):
        """The number that the node replies."""
        answered, _, length = struct.unpack("<III", self.socket.recv(12, socket.MSG_WAITALL))
        assert (answered, length) == (request, 8)
        return struct.unpack("<Q", self.socket.recv(8, socket.MSG_WAITALL))[0]

    def ask(self, request):
        self.send(request)
        return self.reply(request)

    def do(self, request, payload, fds=()):
        """Sends a message that the node must obey."""
        self.send(request, payload, fds, VERSION | NEED_REPLY)
        assert self.reply(request) == 0

    def is_closed(self):
        """Whether the node closes the connection, which this waits for."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def _start(self):
        offered = self.ask(GET_FEATURES)
        assert offered & FEATURES == FEATURES, hex(offered)
        assert self.ask(GET_PROTOCOL_FEATURES) & PROTOCOL == PROTOCOL
        self.send(SET_PROTOCOL_FEATURES, struct.pack("<Q", PROTOCOL))
        self.do(SET_OWNER, b"")
        self.do(SET_FEATURES, struct.pack("<Q", FEATURES))
        self.do(SET_MEM_TABLE, struct.pack("<IIQQQQ", 1, 0, 0, BYTES, BASE, 0), [self.file])
        for ring in range(RINGS):
            at = BASE + ring * AREA
            self.do(SET_VRING_NUM, struct.pack("<II", ring, ENTRIES))
            self.do(SET_VRING_BASE, struct.pack("<II", ring, 0))
            self.do(SET_VRING_ADDR, struct.pack("<IIQQQQ", ring, 0, at, at + USED, at + AVAILABLE, 0))
            self.do(SET_VRING_CALL, struct.pack("<Q", ring), [self.calls[ring]])
            self.do(SET_VRING_KICK, struct.pack("<Q", ring), [self.kicks[ring]])
            self.do(SET_VRING_ENABLE, struct.pack("<II", ring, 1))

    def begin_migration(self):
        log = os.memfd_create("log")
        os.truncate(log, BYTES)
        self.send(SET_LOG_BASE, struct.pack("<QQ", BYTES, 0), [log])
        self.reply(SET_LOG_BASE)
        os.close(log)
        self.do(SET_FEATURES, struct.pack("<Q", FEATURES | LOG_ALL))

    def stop(self):
        """Stops the rings."""
        for ring in range(RINGS):
            self.send(GET_VRING_BASE, struct.pack("<II", ring, 0))
            self.reply(GET_VRING_BASE)

    def offer(self, head, ring=0):
        """Makes the chain of descriptors that begins there available."""
        at = ring * AREA + AVAILABLE
        struct.pack_into("<H", self.memory, at + 4 + 2 * (self.next[ring] % ENTRIES), head)
        self.next[ring] += 1
        struct.pack_into("<H", self.memory, at + 2, self.next[ring])
        os.eventfd_write(self.kicks[ring], 1)

    def call(self, kind, data=b"", ring=0):
        """Sends a request, and waits for its status."""
        at = ring * AREA
        request = struct.pack("<IIQ", kind, 0, 0) + data
        self.memory[at + REQUEST : at + REQUEST + len(request)] = request
        self.memory[at + STATUS] = 0xFF
        # The status follows the request, and the node writes it.
        struct.pack_into("<QIHH", self.memory, at, at + REQUEST, len(request), 1, 1)
        struct.pack_into("<QIHH", self.memory, at + 16, at + STATUS, 1, 2, 0)
        self.offer(0, ring)
        guest.wait_for("the request", lambda: struct.unpack_from("<H", self.memory, at + USED + 2)[0] == self.next[ring])
        return self.memory[at + STATUS]

    def range(self, kind, offset, length, flags=0, ring=0):
        """Discards or zeroes a range of bytes."""
        return self.call(kind, struct.pack("<QII", offset // 512, length // 512, flags), ring)
