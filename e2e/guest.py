"""A virtual machine in software emulation with vhost-user-blk disks, controlled by a test."""

import functools
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import time

import millrace

DIRECTORY = millrace.TARGET / "guest"
# A guest boots in 4 s on an idle machine; here other builds and tests may run, too.
PATIENCE = 120
# Bandwidth of a migration in bytes per second.
FAST = 60_000_000


def need(program, package):
    """The path of a program that the tests require."""
    found = shutil.which(program)
    assert found, f"{program} is missing: apt-get install {package}"
    return found


@functools.cache
def qemu_version():
    """Of the QEMU that the tests run, as numbers."""
    said = subprocess.run([need("qemu-system-x86_64", "qemu-system-x86"), "--version"], check=True, capture_output=True, text=True).stdout
    return tuple(int(number) for number in re.search(r"version (\d+)\.(\d+)", said).groups())


def images():
    """Kernel and initramfs, made at the first call."""
    subprocess.run([millrace.ROOT / "scripts" / "guest.sh", DIRECTORY], check=True, timeout=300)
    return DIRECTORY / "vmlinuz", DIRECTORY / "initramfs.gz"


def boot_image(path, **words):
    """Makes a disk from which a guest boots, with its orders."""
    kernel, _ = images()
    shutil.copy(kernel.parent / "boot.img", path)
    orders = " ".join(f"{name}={value}" for name, value in words.items())
    old = subprocess.run(["mtype", "-i", path, "::syslinux.cfg"], check=True, capture_output=True, text=True).stdout
    new = old.replace("mode=shell", orders)
    subprocess.run(["mcopy", "-o", "-i", path, "-", "::syslinux.cfg"], check=True, input=new, text=True)


def migration_uri(at):
    """Where a migration arrives, as QEMU has it: a socket's path, or a URI already."""
    return f"unix:{at}" if isinstance(at, pathlib.Path) else at


def wait_for(what, condition, timeout=PATIENCE, saw=lambda: ""):
    """Waits until a condition returns a true value, and returns it; a message about the end of its patience has what `saw` returns."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"{what}: timed out after {timeout} s{saw()}"
        time.sleep(0.02)


class StorageDaemon:
    """qemu-storage-daemon with one disk at a socket: the reference target."""

    def __init__(self, path, image, queues=1, file="aio=threads"):
        self.socket = pathlib.Path(path)
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen([
            need("qemu-storage-daemon", "qemu-system-common"),
            "--blockdev", f"driver=file,filename={image},node-name=disk,locking=off,{file}",
            "--export", f"type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={queues},"
            f"addr.type=unix,addr.path={path}",
        ])  # fmt: skip
        wait_for("the daemon's socket", lambda: self.socket.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, "qemu-storage-daemon ended"

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Guest:
    """QEMU with disks at sockets.

    `packed` offers the guest packed rings. `words` are the guest's orders, see e2e/guest/init: mode="load", secs=10, then="stay"...
    `incoming` is a socket for a migration to arrive at, or a URI of QEMU; the guest is then paused until `cont`.
    `boot`: firmware and boot loader find the system on the first disk (`boot_image`), and there are no orders.
    Without `shared` the guest's memory is private, as if the option had been forgotten.
    `hugepages` puts the guest's memory on pages of 2 MiB; `ill` is a disk that may return errors to the guest's kernel.
    `within` are words before QEMU's command, which run it in a network namespace.
    """

    def __init__(
        self, directory, disks, *, queues=1, processors=1, memory=256, queue_size=128, packed=False, incoming=None, hugepages=False, ill=None,
        boot=False, shared=True, within=(), **words,
    ):
        self.ill = ill
        self.disks = [str(path) for path in (disks if isinstance(disks, (list, tuple)) else [disks])]
        self.queues, self.packed, self.memory_mib = queues, packed, memory
        # What it printed to the consoles of the machine that it comes from.
        self.said_before = ""
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.console = self.directory / "console"
        self.console.unlink(missing_ok=True)
        control = self.directory / "qmp"
        control.unlink(missing_ok=True)
        huge = ",hugetlb=on,hugetlbsize=2M" if hugepages else ""
        orders = " ".join(f"{name}={value}" for name, value in words.items())
        command = [
            *within, need("qemu-system-x86_64", "qemu-system-x86"),
            # QEMU before 8.0 omits memory barriers for a machine that can have only one processor, and the guest then
            # sometimes misses an interrupt. So maxcpus is at least 2.
            "-M", "q35", "-accel", "tcg", "-m", f"{memory}M,slots=2,maxmem=1G", "-smp", f"{processors},maxcpus={max(processors, 2)}",
            "-nodefaults", "-no-user-config", "-display", "none", "-serial", f"file:{self.console}",
            "-object", f"memory-backend-memfd,id=mem,size={memory}M,share={'on' if shared else 'off'}{huge}", "-numa", "node,memdev=mem",
            "-qmp", f"unix:{control},server=on,wait=off",
        ]  # fmt: skip
        if not boot:
            kernel, initramfs = images()
            append = f"console=ttyS0 quiet panic=1 no_timer_check memhp_default_state=online_movable nr_cpus={processors} {orders}"
            command += ["-kernel", str(kernel), "-initrd", str(initramfs), "-append", append]
        for nth, path in enumerate(self.disks):
            more = ",packed=on" * packed + ",bootindex=0" * (boot and not nth)
            command += [
                "-chardev", f"socket,id=c{nth},path={path},reconnect=1",
                "-device", f"vhost-user-blk-pci,id=disk{nth},chardev=c{nth},num-queues={queues},queue-size={queue_size}{more}",
            ]  # fmt: skip
        if incoming:
            command += ["-S", "-incoming", migration_uri(incoming)]
        self.said = open(self.directory / "qemu.log", "wb")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.said, stderr=self.said)
        self.qmp = None
        try:
            self.qmp = wait_for("QEMU's control socket", lambda: self._control(control))
        except BaseException:
            self.kill()
            raise

    def _control(self, path):
        assert self.process.poll() is None, f"QEMU ended ({self.process.returncode}): {self.complaints()}"
        try:
            return Control(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None

    def complaints(self):
        """QEMU's own messages."""
        return (self.directory / "qemu.log").read_text(errors="replace")

    def text(self):
        """The guest's console output so far."""
        try:
            return self.console.read_bytes().decode(errors="replace").replace("\r", "")
        except FileNotFoundError:
            return ""

    def last_words(self):
        """What a test that waits in vain should show: the machine's state, the end of its console, QEMU's messages."""
        try:
            self.qmp.socket.settimeout(5)
            state = self.status()
        except Exception as error:
            state = f"no answer ({error!r})"
        return f"\nQEMU's state: {state}\nits messages: {self.complaints()[-1000:]}\nthe console:\n{self.text()[-3000:]}"

    def wait_for(self, pattern, timeout=PATIENCE, times=1):
        """Waits until the console has `times` matching lines; returns the last match."""

        def found():
            ended = self.process.poll() is not None  # Before its last words are read.
            text = self.text()
            errors = rf"I/O error, dev (?!{self.ill}).*" if self.ill else "I/O error.*"
            # A kernel that shuts down releases its devices before its processes.
            up = re.sub(r"GUEST REBOOTS.*?(?=GUEST DISK|\Z)", "", text, flags=re.DOTALL)
            wrong = re.search(rf"GUEST (FAILED|WRONG).*|{errors}|Kernel panic.*", up)
            assert not wrong or re.search(pattern, wrong[0]), f"{wrong[0]}\n{text[-3000:]}"
            # A match at the end of what is there may be half a line.
            matches = [match for match in re.finditer(pattern, text) if match.end() < len(text)]
            if len(matches) >= times:
                return matches[times - 1]
            assert not ended, f"QEMU ended ({self.process.returncode}): {self.complaints()}\n{text[-3000:]}"
            return None

        return wait_for(f"the guest's '{pattern}'", found, timeout, self.last_words)

    def wait_for_end(self, timeout=PATIENCE):
        """Waits until QEMU exits by itself."""
        assert self.process.wait(timeout) == 0, self.complaints()

    def stop(self):
        """Pauses the guest."""
        self.qmp.do("stop")

    def cont(self):
        """Resumes the guest."""
        self.qmp.do("cont")

    def reset(self):
        """Presses the reset button."""
        self.qmp.do("system_reset")

    def plug_memory(self, mib=128):
        """Plugs in more memory."""
        self.qmp.do("object-add", **{"qom-type": "memory-backend-memfd", "id": "more", "size": mib << 20, "share": True})
        self.qmp.do("device_add", driver="pc-dimm", id="dimm", memdev="more")

    def unplug_memory(self):
        """Unplugs that memory, and waits until the guest has released it."""
        seen = len(self.qmp.events)

        def gone():
            self.qmp.do("query-status")
            said = [event["event"] for event in self.qmp.events[seen:]]
            assert not set(said) & {"MEM_UNPLUG_ERROR", "DEVICE_UNPLUG_GUEST_ERROR"}, self.qmp.events[seen:]
            return "DEVICE_DELETED" in said

        self.qmp.do("device_del", id="dimm")
        wait_for("the memory", gone)
        self.qmp.do("object-del", id="more")

    def status(self):
        """QEMU's state: running, paused, postmigrate..."""
        return self.qmp.do("query-status")["status"]

    def memory(self):
        """A file with the guest's memory, without plugged-in memory; offsets are physical addresses. The caller closes it."""
        size = self.memory_mib << 20
        for link in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir():
            if "memory-backend-memfd" in os.readlink(link) and link.stat().st_size == size:
                return open(link, "r+b", buffering=0)
        raise AssertionError("QEMU has no file for the guest's memory")

    def rings(self):
        """The rings of its disks as QEMU reports them: (disk, ring, entries, descriptors, driver area, device area); the last
        three are physical addresses."""
        found = []
        for disk in range(len(self.disks)):
            for ring in range(self.queues):
                is_ = self.qmp.do("x-query-virtio-queue-status", path=f"/machine/peripheral/disk{disk}/virtio-backend", queue=ring)
                found.append((disk, ring, is_["vring-num"], is_["vring-desc"], is_["vring-avail"], is_["vring-used"]))
        return found

    def begin_migration(self, path, bandwidth):
        """Starts to send its memory at this bandwidth; it keeps running until `end_migration`."""
        self.qmp.do("migrate-set-parameters", **{"max-bandwidth": bandwidth, "downtime-limit": 1})
        self.qmp.do("migrate", uri=migration_uri(path))

    def migration(self):
        """QEMU's report about the migration."""
        report = self.qmp.do("query-migrate")
        assert report.get("status") not in ("failed", "cancelled"), report
        return report

    def end_migration(self, early=False):
        """Waits until nearly all memory is sent, or with `early` two thirds, then stops the machine and waits until it has moved.

        If QEMU 7.2 reads its dirty logs a second time while the machine runs, its emulation nearly always loses pages. Ended
        early, it reads them once.
        """
        self.qmp.do("migrate-set-parameters", **{"max-bandwidth": FAST, "downtime-limit": 1500 if early else 1})
        if not early:

            def nearly():
                ram = self.migration().get("ram")
                return ram and ram["remaining"] < ram["total"] // 8

            wait_for("nearly all of the memory", nearly)
            self.qmp.do("migrate-set-parameters", **{"downtime-limit": 60_000})

        def ended():
            report = self.migration()
            return report if report.get("status") == "completed" else None

        return wait_for("the migration", ended)

    def quit(self):
        """Shuts QEMU down."""
        if self.process.poll() is None:
            try:
                self.qmp.do("quit")
            except (OSError, EOFError):
                pass
            self.process.wait(30)

    def signal(self, number):
        """Sends QEMU a signal: SIGKILL, SIGSTOP, SIGCONT."""
        os.kill(self.process.pid, number)

    def kill(self):
        """Kills QEMU."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.said.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Control:
    """QEMU's machine protocol: one command, one answer; events in between are kept in `events`."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(path))
        self.file = self.socket.makefile("rwb")
        self.events = []
        self._receive()
        self.do("qmp_capabilities")

    def _receive(self):
        line = self.file.readline()
        if not line:
            raise EOFError("QEMU closed its control socket")
        return json.loads(line)

    def do(self, command, **arguments):
        """Runs a command and returns its result."""
        order = {"execute": command}
        if arguments:
            order["arguments"] = arguments
        self.file.write(json.dumps(order).encode() + b"\n")
        self.file.flush()
        while True:
            answer = self._receive()
            if "event" in answer:
                self.events.append(answer)
            elif "error" in answer:
                raise AssertionError(f"{command}: {answer['error']}")
            else:
                return answer["return"]
