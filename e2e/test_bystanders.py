"""A front end that misbehaves is nobody else's problem: not in an upgrade, and not at the end."""

import signal
import socket

import guest
import pytest
from test_admin import Node, spec

# GET_FEATURES: header, no payload.
GET_FEATURES = bytes([1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])
REPLY_BYTES = 20


def connect(tmp_path, name):
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(str(tmp_path / f"{name}.sock"))
    return stream


def reads_nothing(tmp_path, name):
    """Asks until nothing more fits; gives how many whole messages that were."""
    stream, sent = connect(tmp_path, name), 0
    stream.settimeout(0.2)
    try:
        while True:
            sent += stream.send(GET_FEATURES[sent % len(GET_FEATURES) :])
    except TimeoutError:
        return stream, sent // len(GET_FEATURES)


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_a_front_end_that_reads_nothing_delays_no_upgrade_and_no_end(tmp_path, sandbox, long):
    specs = [spec(tmp_path, name, "mem:16M") for name in ("unread", "half", "idle")]
    with Node(tmp_path, "--sandbox", sandbox, specs=specs) as node:
        unread, asked = reads_nothing(tmp_path, "unread")
        half = connect(tmp_path, "half")
        half.sendall(GET_FEATURES[:5])
        # An operator who asks and reads nothing.
        operator = socket.socket(socket.AF_UNIX)
        operator.connect(str(node.state / "admin.sock"))
        operator.sendall(b'{"version":1,"command":"top"}\n' * 100)
        for _ in range(10 if long else 2):
            serves = node.said().count(" serves ")
            node.upgrade()
            guest.wait_for("the successor", lambda: node.said().count(" serves ") > serves)
            guest.wait_for("all disks", lambda: set(node.disks()) == {"unread", "half", "idle"})
        # What was not read has come along.
        unread.settimeout(20)
        replies = b""
        while len(replies) < asked * REPLY_BYTES and (more := unread.recv(1 << 16)):
            replies += more
        assert len(replies) == asked * REPLY_BYTES and replies == replies[:REPLY_BYTES] * asked
        half.sendall(GET_FEATURES[5:])
        half.settimeout(20)
        assert len(half.recv(REPLY_BYTES, socket.MSG_WAITALL)) == REPLY_BYTES
        again = reads_nothing(tmp_path, "idle")
        if sandbox == "off":
            node.process.send_signal(signal.SIGTERM)
            guest.wait_for("the end", lambda: node.process.poll() is not None, 30)
        else:
            assert node.stop() == 0, node.said()
        del again, operator
