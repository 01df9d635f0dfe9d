"""Two nodes between which disks move, and what stands between them: a proxy that cuts, stalls and corrupts."""

import contextlib
import json
import os
import pathlib
import queue
import signal
import socket
import threading
import time

import guest
import millrace
from test_admin import Node

MIB = 1 << 20
# Kinds of frames: docs/formats/transfer.md.
HEADER_BYTES = 40
HELLO, WRITE, CLEAR, COMPARE, FLUSH, OWN, RETURN, ABANDON = range(1, 9)


class Store(Node):
    """A node that takes disks from others."""

    def __init__(self, tmp_path, name, *flags, moves=True, specs=(), address="127.0.0.1", within=(), binary=millrace.BINARY):
        """`within` are words before its command, which run it in a network namespace."""
        self.name, self.directory = name, pathlib.Path(tmp_path)
        self.address, self.port = address, millrace.free_port()
        listens = ["--moves", f"{address}:{self.port}"] if moves else []
        super().__init__(tmp_path, *listens, *flags, name=name, specs=specs, binary=binary)
        self.arguments[:0] = within

    def socket(self, disk="a"):
        """Where a machine connects to a disk."""
        return self.directory / f"{self.name}-{disk}.sock"

    def spec(self, uri, disk="a", queues=4):
        return f"name={disk} uri={uri} socket={self.socket(disk)} queues={queues}"

    def attach(self, uri, disk="a", *words):
        self.do("attach", self.spec(uri, disk), *words)

    def awaits(self, uri, disk="a"):
        """Attaches a disk whose data comes from another node."""
        self.attach(uri, disk, "--incoming")

    def send(self, there, disk="a", *words, port=None, to=None):
        """Moves a disk to another node, or to a proxy's port before it; returns what the command says."""
        at = f"127.0.0.1:{port}" if port else f"{there.address}:{there.port}"
        return self.do("move", disk, "--to", f"{at}/{to or disk}", *words)

    def send_json(self, there, disk="a", *words):
        return json.loads(self.send(there, disk, *words, "--json"))["moves"][0]

    def status(self, disk="a"):
        """The last move of a disk, or nothing."""
        moves = json.loads(self.do("move", "--status", disk, "--json"))["moves"]
        return moves[0] if moves else {"stage": None}

    def until(self, *stages, disk="a", timeout=guest.PATIENCE):
        """Waits until a move is in one of these stages."""
        return guest.wait_for(stages, lambda: (now := self.status(disk))["stage"] in stages and now, timeout, lambda: f"\n{self.status(disk)}\n{self.said()[-3000:]}")

    def elsewhere(self, disk="a"):
        """Why a disk is not served here, or nothing."""
        return self.disks()[disk].get("elsewhere")

    def transfer(self, disk="a"):
        """How far a disk is, as the state directory has it."""
        kept = json.loads((self.state / "disks.json").read_text())
        return kept.get("transfers", {}).get(disk)

    def stage(self, disk="a"):
        kept = self.transfer(disk)
        return kept and kept["stage"]

    def until_stage(self, *stages, disk="a", timeout=guest.PATIENCE):
        """Waits until the state directory has one of these stages."""
        return guest.wait_for(stages, lambda: self.stage(disk) in stages, timeout, lambda: f"\n{self.transfer(disk)}\n{self.said()[-3000:]}")

    def happened(self, disk="a"):
        """The names of a disk's events."""
        said = millrace.succeed("events", "--json", "--disk", disk, "--state", self.state)
        return [json.loads(line)["event"] for line in said.splitlines()]

    def kill_node(self):
        """Kills the process that serves; its launcher starts another one."""
        dead = self.pid()
        os.kill(dead, signal.SIGKILL)
        guest.wait_for("the next node", lambda: self.serves_instead_of(dead), saw=self.said)

    def serves_instead_of(self, dead):
        pid = millrace.serving(self.process.pid, self.said())
        return pid not in (None, dead, self.process.pid) and pid


class Late:
    """Delivers to a socket what is sent, some time later."""

    def __init__(self, sink, delay):
        self.sink, self.delay, self.sent = sink, delay, queue.Queue()
        self.delivers = threading.Thread(target=self._deliver, daemon=True)
        self.delivers.start()

    def sendall(self, data):
        self.sent.put((time.monotonic() + self.delay, data))

    def end(self):
        self.sent.put(None)
        self.delivers.join()

    def _deliver(self):
        with contextlib.suppress(OSError):
            while (sent := self.sent.get()) is not None:
                due, data = sent
                time.sleep(max(0, due - time.monotonic()))
                self.sink.sendall(data)


class Between:
    """A proxy for the connections between two nodes. It can cut all of them, let none through, deliver nothing, or change bytes."""

    def __init__(self, port):
        self.to = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.lock = threading.Lock()
        self.pairs = []
        # Bytes that were delivered towards the destination, connections that were made, bytes that were changed.
        self.bytes = self.connections = self.changed = 0
        # Closes each connection after so many bytes; changes a byte after so many; refuses new connections; delivers nothing.
        self.cut_after = self.corrupt_after = None
        self.refuses = self.ended = False
        self.flows = threading.Event()
        self.flows.set()
        self.back_flows = threading.Event()
        self.back_flows.set()
        # Bytes per second towards the destination, and seconds that each way takes, for connections from then on.
        self.rate = self.delay = None
        # A kind of frame at which everything stops, and whether that frame is delivered. `held` is set then.
        self.hold, self.delivers = None, False
        self.held = threading.Event()
        self.kinds = []

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.ended = True
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.flows.set()
        self.back_flows.set()
        self.cut()

    def _accept(self):
        while not self.ended:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            if self.refuses:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.to), 5)
                server.settimeout(None)
                for one in (client, server):
                    # Else an answer waits for the acknowledgement of the one before, 40 ms.
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                client.close()
                continue
            with self.lock:
                self.connections += 1
                self.pairs.append((client, server))
            for words in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=words, daemon=True).start()

    def _pump(self, source, sink, towards):
        passed = 0
        flows = self.flows if towards else self.back_flows
        late = Late(sink, self.delay) if self.delay else None
        deliver = (late or sink).sendall
        with contextlib.suppress(OSError):
            for data in self._pieces(source, towards):
                flows.wait()
                passed += len(data)
                if towards:
                    if self.corrupt_after is not None and passed > self.corrupt_after:
                        at = len(data) // 2
                        data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
                        self.corrupt_after = None
                        self.changed += 1
                    if self.cut_after is not None and passed > self.cut_after:
                        deliver(data[: len(data) // 2])
                        break
                    if self.rate:
                        time.sleep(len(data) / self.rate)
                deliver(data)
                if towards:
                    self.bytes += len(data)
        if late:
            late.end()
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _pieces(self, source, towards):
        """What comes, towards the destination by frames. Stops everything at the frame that is to be held."""
        rest = b""
        while data := source.recv(1 << 16):
            if not towards:
                yield data
                continue
            rest += data
            while len(rest) >= HEADER_BYTES:
                if rest[:4] != b"MRDT":
                    # TLS.
                    yield rest
                    rest = b""
                    break
                length = HEADER_BYTES + int.from_bytes(rest[32:36], "little")
                if len(rest) < length:
                    break
                frame, rest = rest[:length], rest[length:]
                self.kinds.append(frame[4])
                if frame[4] == self.hold:
                    self.hold = None
                    self.back_flows.clear()
                    if self.delivers:
                        yield frame
                        self.held.set()
                        continue
                    self.flows.clear()
                    self.held.set()
                yield frame

    def hold_at(self, kind, delivers):
        """Stops everything at the next frame of this kind: before it is delivered, or when it was."""
        self.held.clear()
        self.delivers, self.hold = delivers, kind

    def cut(self):
        """Ends all connections that there are."""
        with self.lock:
            pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for one in pair:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()

    def stall(self):
        """Delivers nothing any more, in both directions, and takes no new connection, until `go_on`."""
        self.refuses = True
        self.flows.clear()
        self.back_flows.clear()

    def stall_answers(self):
        """Delivers requests, but no answers to them."""
        self.back_flows.clear()

    def go_on(self):
        """Delivers again what comes, and what was held."""
        self.refuses, self.hold = False, None
        self.flows.set()
        self.back_flows.set()
