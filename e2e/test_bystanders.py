"""A misbehaving front end must not affect others, neither in an upgrade nor at the end."""

import contextlib
import os
import pathlib
import signal
import socket
import struct
import subprocess
import time

import guest
import millrace
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
    """Sends requests until no more fit; returns the number of whole messages."""
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
        # An operator's client that sends requests and reads nothing.
        operator = socket.socket(socket.AF_UNIX)
        operator.connect(str(node.state / "admin.sock"))
        operator.sendall(b'{"version":1,"command":"top"}\n' * 100)
        for _ in range(10 if long else 2):
            serves = node.said().count(" serves ")
            node.upgrade()
            guest.wait_for("the successor", lambda: node.said().count(" serves ") > serves)
            guest.wait_for("all disks", lambda: set(node.disks()) == {"unread", "half", "idle"})
        # The successor has the unread replies.
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


@contextlib.contextmanager
def lingering():
    """A socket whose last close blocks until the returned function has been called."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        blocks = socket.create_connection(listener.getsockname())
        reads, _ = listener.accept()
        blocks.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
        blocks.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                blocks.send(bytes(1 << 16))
        with reads:
            yield blocks, lambda: reads.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)) or reads.close()


@pytest.mark.parametrize("how", ["itself", "in a socket", "behind another"])
def test_a_descriptor_whose_close_blocks_hurts_its_sender_only(tmp_path, how):
    with Node(tmp_path, specs=[spec(tmp_path, name, "mem:16M") for name in ("bad", "good")]) as node, lingering() as (blocks, release):
        bad = connect(tmp_path, "bad")
        sent = blocks
        # The launcher closes its copies after this test has closed its own: the last close blocks.
        node.process.send_signal(signal.SIGSTOP)
        if how == "in a socket":
            sent, theirs = socket.socketpair()
            socket.send_fds(theirs, [b"x"], [blocks.fileno()])
            theirs.close()
            blocks.close()
        if how == "behind another":
            # It is not received any more.
            with open("/dev/null") as null:
                socket.send_fds(bad, [GET_FEATURES[:1]], [null.fileno()])
        # A part of a message: the node never sees it.
        socket.send_fds(bad, [GET_FEATURES[:1]], [sent.fileno()])
        sent.close()
        node.process.send_signal(signal.SIGCONT)
        guest.wait_for("its end", lambda: "a descriptor could block" in node.said(), saw=node.said)
        bad.close()
        # Others come and go meanwhile, and their memory is released.
        for _ in range(3):
            command = [millrace.BINARY, "bench", "vdisk", "--seconds", "0.2", "--socket", tmp_path / "good.sock"]
            assert subprocess.run(command, capture_output=True).returncode == 0
        descriptors = len(list(pathlib.Path(f"/proc/{node.process.pid}/fd").iterdir()))
        guest.wait_for("their descriptors", lambda: len(list(pathlib.Path(f"/proc/{node.process.pid}/fd").iterdir())) <= descriptors)
        again = connect(tmp_path, "bad")
        again.settimeout(0.5)
        again.sendall(GET_FEATURES)
        with pytest.raises(TimeoutError):
            again.recv(REPLY_BYTES)
        release()
        again.settimeout(20)
        assert len(again.recv(REPLY_BYTES, socket.MSG_WAITALL)) == REPLY_BYTES
        node.do("detach", "bad", "--force")


# A device that does not answer for the duration of a test.
HANGS = "delay:read=600s|mem:64M"


@contextlib.contextmanager
def load(tmp_path, *names):
    """Front ends that read continuously, as long as they get replies."""
    command = [millrace.BINARY, "bench", "vdisk", "--rw", "randread", "--depth", "4", "--seconds", "60"]
    run = lambda name: subprocess.Popen([*command, "--socket", tmp_path / f"{name}.sock"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    running = [run(name) for name in names]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def reads(node, name):
    return node.disks("stat")[name]["read"]["requests"]


def family(pid):
    """A process and all its descendants."""
    return [pid] + [one for child in millrace.children(pid) for one in family(child)]


def runs(pid):
    """Whether a process is running; a zombie is not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_a_disk_whose_device_hangs_is_handed_over_at_the_deadline(tmp_path, sandbox):
    """Otherwise the old process would wait for ten minutes, and the guest with it."""
    specs = [spec(tmp_path, "hangs", HANGS), spec(tmp_path, "other", "mem:64M")]
    with Node(tmp_path, "--sandbox", sandbox, specs=specs) as node, load(tmp_path, "hangs", "other"):
        guest.wait_for("requests", lambda: reads(node, "hangs") == 4 and reads(node, "other") > 100)
        # It is served again when the old process has ended.
        node.upgrade()
        guest.wait_for("all disks", lambda: all(disk["connected"] for disk in node.disks().values()))
        assert node.disks("stat")["hangs"]["resubmitted"] == 4
        assert "the front end has gone" not in node.said() and "was closed" not in node.said()
        before = reads(node, "other")
        guest.wait_for("the other guest", lambda: reads(node, "other") > before + 100)


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_a_node_ends_in_time_with_a_hanging_device_and_in_an_upgrade(tmp_path, sandbox, long):
    """When idle, while a successor starts, while disks are handed over, while one waits for its device, after the handover."""
    moments = [None, 0.1, 1.0, 2.2, 4.0] if long else [None, 1.0, 2.2]
    for nth, moment in enumerate(moments):
        at = tmp_path / str(nth)
        at.mkdir()
        specs = [spec(at, "hangs", HANGS), *(spec(at, f"other{n}", "mem:16M") for n in range(3))]
        node = Node(at, "--sandbox", sandbox, specs=specs).start()
        with load(at, "hangs", "other0"):
            guest.wait_for("requests", lambda: reads(node, "hangs") == 4 and reads(node, "other0") > 100)
            known = set(family(node.process.pid))
            if moment:
                node.process.send_signal(signal.SIGUSR2)
                until = time.monotonic() + moment
                while time.monotonic() < until:
                    known |= set(family(node.process.pid))
                    time.sleep(0.01)
            told = time.monotonic()
            for pid in known if sandbox == "off" else [node.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            # Some kernels spend half a minute in reaping a process whose /proc was read.
            node.process.wait(50)
            guest.wait_for("the end of all", lambda: not any(map(runs, known)), 50)
            took = time.monotonic() - told
        # Sooner than the launcher kills a node that does not end.
        assert took < 50, f"{took} s at {moment}: {node.said()}"


def test_a_node_that_has_just_taken_over_ends_cleanly(tmp_path, long):
    """It once ended immediately with status 143, because the successor did not serve yet."""
    for nth in range(90 if long else 24):
        at = tmp_path / str(nth)
        at.mkdir()
        node = Node(at, specs=[spec(at, "disk", "mem:16M")]).start()
        node.process.send_signal(signal.SIGUSR2)
        until = time.monotonic() + 10
        while "handed over: the old process" not in node.said() and time.monotonic() < until:
            time.sleep(0.0005)
        time.sleep(nth % 6 * 0.0005)
        node.process.terminate()
        assert node.process.wait(15) == 0, node.said()
        assert "killed" not in node.said()


def message(request, payload=b"", flags=1):
    return struct.pack("<III", request, flags, len(payload)) + payload


def test_a_front_end_that_closes_its_channel_keeps_its_disk_through_a_resize(tmp_path):
    """The node once closed the connection, because it could not report the new size."""
    with Node(tmp_path, specs=[spec(tmp_path, "a", "mem:64M")]) as node:
        stream = connect(tmp_path, "a")
        stream.settimeout(10)
        # SET_FEATURES with VERSION_1 and PROTOCOL_FEATURES; SET_PROTOCOL_FEATURES with BACKEND_REQ and CONFIG; SET_OWNER.
        stream.sendall(message(2, struct.pack("<Q", 1 << 32 | 1 << 30)))
        stream.sendall(message(16, struct.pack("<Q", 1 << 5 | 1 << 9)))
        stream.sendall(message(3))
        ours, theirs = socket.socketpair()
        # SET_BACKEND_REQ_FD.
        socket.send_fds(stream, [message(21)], [theirs.fileno()])
        theirs.close()

        def asks():
            stream.sendall(GET_FEATURES)
            return len(stream.recv(REPLY_BYTES, socket.MSG_WAITALL))

        assert asks() == REPLY_BYTES
        ours.close()
        for size in ("96M", "80M"):
            node.do("resize", "a", "--size", size, "--shrink")
            guest.wait_for("the warning", lambda: "telling the front end of a new size" in node.said())
            assert asks() == REPLY_BYTES
