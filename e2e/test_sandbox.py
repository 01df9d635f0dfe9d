"""The process that serves guests is confined; its launcher does what the confined process cannot."""

import contextlib
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import time

import guest
import millrace
import pytest
import resp
import rocksdb78
import sandbox
from test_admin import Node, spec
from test_disks import Disks, image, machine

NOBODY = 65534


def status(pid):
    """The /proc status of a process or a thread, as a dict."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def has_ended(pid):
    """Whether a process has ended; a zombie has: the children of a killed process may have become ours."""
    try:
        return status(pid)["State"].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def environment(pid):
    """Empty while a process with threads executes another program."""
    with contextlib.suppress(ProcessLookupError):
        return pathlib.Path(f"/proc/{pid}/environ").read_text()
    return ""


def threads(pid):
    return [status(f"{pid}/task/{task.name}") for task in pathlib.Path(f"/proc/{pid}/task").iterdir()]


def descriptors(pid):
    """The open files of a process."""
    return [os.readlink(entry) for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir()]


@pytest.mark.parametrize("io", ["auto", "epoll"])
def test_every_thread_of_the_node_is_confined(tmp_path, io):
    path = image(tmp_path / "disk.img", 8)
    with Node(tmp_path, "--io", io, specs=[spec(tmp_path, "a", f"file:{path}?engine=sync")]) as node:
        assert "confined: paths, system calls, network and signals" in node.said()
        assert node.pid() != node.process.pid
        confined = threads(node.pid())
        assert len(confined) > 5
        for thread in confined:
            assert (thread["Seccomp"], thread["Seccomp_filters"], thread["NoNewPrivs"]) == ("2", "2", "1"), thread["Name"]
        assert status(node.process.pid)["Seccomp"] == "0"
        assert (status(node.pid())["THP_enabled"], status(node.process.pid)["THP_enabled"]) == ("1", "0")
        # The launcher has neither the image nor the socket of the disk; the node has no directory, and no file except the image.
        assert str(path) in descriptors(node.pid()) and str(path) not in descriptors(node.process.pid)
        opened = {name for name in descriptors(node.pid()) if name.startswith("/") and not name.startswith("/proc/")}
        assert opened <= {str(path), "/dev/null", str(node.log)}, opened


def test_without_a_sandbox_there_is_one_process(tmp_path):
    with Node(tmp_path, "--sandbox", "off", specs=[spec(tmp_path, "a")]) as node:
        assert node.pid() == node.process.pid and status(node.pid())["Seccomp"] == "0"
        node.do("attach", spec(tmp_path, "b"))
    with millrace.node(tmp_path / "db", tmp_path / "log", writes=True) as server:
        assert millrace.serving(server.process.pid) == server.process.pid
        # It still listens for `disk`, but guests must not reach an unconfined process.
        said = millrace.fail("disk", "attach", spec(tmp_path, "c"))
        assert "not confined" in said and "--state" in said and "--sandbox off" in said
        assert not (tmp_path / "c.sock").exists()


def test_stored_disks_are_served_by_a_confined_node(tmp_path, monkeypatch):
    """Also disks of the default state directory, with no other sign that there are disks."""
    with Disks(tmp_path / "log", flags=["--sandbox", "off", "--admin", tmp_path / "admin.sock"]) as node:
        guest.wait_for("the node", lambda: " serves " in node.said())
        millrace.succeed("disk", "attach", spec(tmp_path, "a"), "--admin", tmp_path / "admin.sock")
    with millrace.node(tmp_path / "db", tmp_path / "second", writes=True) as server:
        server.until_ready()
        assert status(millrace.serving(server.process.pid))["Seccomp"] == "2"
        assert (tmp_path / "a.sock").is_socket()


def test_a_database_and_its_clients_work_in_the_sandbox(tmp_path):
    """The database is created, filled until tables are written and compacted, closed, and opened again."""
    port = millrace.free_port()
    flags = ["--data", tmp_path / "db", "--listen", f"127.0.0.1:{port}", "--memory", "64M", "--sandbox", "on"]
    for nth in range(2):
        with Disks(tmp_path / "log", flags=flags) as node:
            guest.wait_for("the node", lambda: node.said().count(" serves ") == nth + 1)
            assert status(node.pid())["Seccomp"] == "2"
            with resp.Connection(port, 60) as client:
                sets = [("SET", f"key:{key}", os.urandom(4000)) for key in range(nth * 5000, (nth + 1) * 5000)]
                assert set(client.pipeline(sets)) == {b"OK"}
                assert client.call("DBSIZE") == (nth + 1) * 5000
                assert client.call("SAVE") == b"OK"
                info = client.call("INFO").decode()
                assert f"process_id:{node.pid()}" in info and f"executable:{millrace.BINARY}" in info
                try:
                    client.call("SHUTDOWN")
                except (OSError, EOFError, resp.Closed):
                    pass
            # The launcher ends with the node.
            assert node.process.wait(20) == 0
    assert list((tmp_path / "db").glob("*.sst"))
    millrace.succeed("kv", "check", "--data", tmp_path / "db")


def test_a_confined_node_follows_links(tmp_path):
    """Like any other node: links to tables, logs, MANIFEST, CURRENT, OPTIONS."""
    data, elsewhere = tmp_path / "db", tmp_path / "elsewhere"
    with rocksdb78.opened(data) as database:
        for n in range(100):
            database.put(b"key%03d" % n, b"value")
        database.flush()
        database.put(b"late", b"in the log")
    elsewhere.mkdir()
    for file in [file for file in data.iterdir() if not file.name.startswith("LOG")]:
        file.rename(elsewhere / file.name)
        file.symlink_to(elsewhere / file.name)
    (data / "LOCK").unlink()
    before = {file.name: file.read_bytes() for file in elsewhere.iterdir()}
    for mode in (["--read-only"], [], ["--durability", "process"]):
        port = millrace.free_port()
        flags = ["--data", data, "--listen", f"127.0.0.1:{port}", "--memory", "64M", "--sandbox", "on", *mode]
        with Disks(tmp_path / f"log{len(mode)}{mode[:1]}", flags=flags) as node:
            guest.wait_for("the node", lambda: " serves " in node.said())
            with resp.Connection(port, 60) as client:
                assert client.call("GET", "key007") == b"value" and client.call("GET", "late") == b"in the log"
                if mode != ["--read-only"]:
                    assert client.call("SET", "new", "value") == b"OK"
    assert {file.name: file.read_bytes() for file in elsewhere.iterdir()} == before


def test_a_confined_node_reads_the_directory_of_logs(tmp_path):
    """The logs are flushed to tables, so the database is served for reading."""
    data, logs = tmp_path / "db", tmp_path / "wal"
    with rocksdb78.opened(data, rocksdb78.options(wal_dir=str(logs).encode())) as database:
        database.put(b"key", b"value")
        database.flush()
    port = millrace.free_port()
    flags = ["--data", data, "--listen", f"127.0.0.1:{port}", "--memory", "64M", "--sandbox", "on", "--read-only"]
    with Disks(tmp_path / "log", flags=flags) as node:
        guest.wait_for("the node", lambda: " serves " in node.said())
        with resp.Connection(port, 60) as client:
            assert client.call("GET", "key") == b"value"


def test_both_processes_end_together(tmp_path):
    with Node(tmp_path, specs=[spec(tmp_path, "a")]) as node:
        child = node.pid()
        node.kill()
        guest.wait_for("the end of the node", lambda: has_ended(child), 10)
        node.start()
        # A terminal's signals reach both processes, and count once.
        child = node.pid()
        os.kill(child, signal.SIGINT)
        os.kill(child, signal.SIGTERM)
        time.sleep(0.2)
        assert node.disks()["a"]["size_bytes"] == 1 << 30
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(20) == 0
        assert not (tmp_path / "a.sock").exists() and not (node.state / "admin.sock").exists()


def test_an_upgrade_replaces_the_launcher_too(tmp_path):
    """In place: with its process id, its locks and sockets, and the present configuration."""

    def configure(*names):
        uris = {name: "null:1G" for name in names} | {"a": f"file:{tmp_path}/disk.img"}
        tables = [f"[[disk]]\nname = '{name}'\nuri = '{uris[name]}'\nsocket = '{tmp_path / name}.sock'\n" for name in names]
        (tmp_path / "node.toml").write_text("".join(tables))

    program = shutil.copy(millrace.BINARY, tmp_path / "new")
    image(tmp_path / "disk.img")
    configure("a", "b")
    with Node(tmp_path, "--config", tmp_path / "node.toml") as node:
        with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", queues=2, mode="load", secs=8, mib=8) as vm:
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*")
            node.do("attach", spec(tmp_path, "c"))
            affinity = os.sched_getaffinity(node.process.pid)
            configure("a", "d")
            for nth in range(3):
                node.upgrade(lambda: millrace.succeed("upgrade", "--to", program, "--state", node.state))
                renewed = guest.wait_for("the launcher", lambda: re.findall("is the launcher now node=(\\d+)", node.said())[nth:], 20)
                assert int(renewed[0]) == node.pid()
                assert os.readlink(f"/proc/{node.process.pid}/exe") == str(program)
                assert os.sched_getaffinity(node.process.pid) == affinity
                assert os.sched_getaffinity(node.pid()) == affinity
                assert (status(node.pid())["THP_enabled"], status(node.process.pid)["THP_enabled"]) == ("1", "0")
                # The old disks are still served, and the new ones are started.
                guest.wait_for("disk d", lambda: "d" in node.disks(), 10)
                disks = node.disks()
                assert set(disks) == {"a", "b", "c", "d"} and all("failed" not in disk for disk in disks.values())
                assert disks["c"]["attached"] and not disks["d"]["attached"] and disks["a"]["connected"]
            assert "another node uses" in millrace.fail("serve", "--state", node.state)
            # It knows its resources and their owners.
            node.do("detach", "b")
            assert not (tmp_path / "b.sock").exists()
            node.do("attach", spec(tmp_path, "e"))
            child = node.pid()
            node.kill()
            guest.wait_for("the end of the node", lambda: has_ended(child), 10)
            node.start()
            assert set(node.disks()) == {"a", "c", "d", "e"}
            vm.wait_for(r"GUEST LOAD OK")
            vm.wait_for_end()


def test_a_kill_during_a_handover_does_not_lose_the_disk(tmp_path, long):
    """The old node is killed at any moment, or just after it has handed over the disks: then its successor has them and serves.
    Otherwise both have ended, and the launcher starts the next one."""
    rng = random.Random(7)
    with Node(tmp_path, specs=[spec(tmp_path, "a")]) as node:
        for nth in range(40 if long else 6):
            old, before = node.pid(), len(node.said())

            def said(text, before=before):
                return text in node.said()[before:]

            node.process.send_signal(signal.SIGUSR2)
            if nth % 2:
                guest.wait_for("the moment", lambda: said("the node is the successor"), 20)
            else:
                time.sleep(rng.uniform(0, 0.05))
            with contextlib.suppress(ProcessLookupError):
                os.kill(old, signal.SIGKILL)
            guest.wait_for("an outcome", lambda: said("starting it again") or said("is the launcher now"), 20)
            if said("starting it again"):
                assert nth % 2 == 0, node.said()[before:]
                guest.wait_for("the next node", lambda: said(" serves "), 20)
            assert node.disks()["a"]["size_bytes"] == 1 << 30 and node.pid() != old


@pytest.mark.parametrize("broken", ["config", "password", "log"])
def test_a_launcher_is_replaced_while_files_of_the_configuration_are_broken(tmp_path, broken):
    """It once read them again, and ended with the node when one was just being written."""
    config, password, logs = tmp_path / "node.toml", tmp_path / "password", tmp_path / "logs"
    logs.mkdir()
    password.write_text("secret\n")
    config.write_text(f"password-file = '{password}'\n")
    if broken == "log":
        config.write_text(f"log-file = '{logs / 'node.log'}'\n")
    with Node(tmp_path, "--config", config, specs=[spec(tmp_path, "a")]) as node:
        with socket.socket(socket.AF_UNIX) as stays:
            # The launcher waits a second for this client.
            stays.connect(str(node.state / "admin.sock"))
            millrace.succeed("upgrade", "--state", node.state)
            assert "MILLRACE_LAUNCHER_RENEWED" not in environment(node.process.pid)
            text = config.read_text()
            match broken:
                case "config":
                    config.write_text("half writ")
                case "password":
                    password.unlink()
                case "log":
                    shutil.rmtree(logs)
            guest.wait_for("the launcher", lambda: "MILLRACE_LAUNCHER_RENEWED" in environment(node.process.pid), 20)
        assert set(node.disks()) == {"a"}
        node.do("attach", spec(tmp_path, "b"))
        reason = {"config": "node.toml:1: ", "password": "cannot read the password file", "log": "cannot open the log file"}[broken]
        assert f"the launcher continues, but a node that is started now would fail: {reason}" in node.said().replace(f"{tmp_path}/", "")
        assert "the node continues" in millrace.fail("upgrade", "--state", node.state)
        logs.mkdir(exist_ok=True)
        password.write_text("secret\n")
        config.write_text(text)
        millrace.succeed("upgrade", "--state", node.state)
        assert set(node.disks()) == {"a", "b"}


def test_a_launcher_that_cannot_be_replaced_stays(tmp_path):
    program = pathlib.Path(shutil.copy(millrace.BINARY, tmp_path / "new"))
    with Node(tmp_path, specs=[spec(tmp_path, "a")]) as node:
        with socket.socket(socket.AF_UNIX) as client:
            # An open connection makes it wait for a second, in which the program is removed.
            client.connect(str(node.state / "admin.sock"))
            node.upgrade(lambda: millrace.succeed("upgrade", "--to", program, "--state", node.state))
            program.unlink()
            guest.wait_for("its complaint", lambda: "the launcher stays as it is" in node.said(), 20)
        assert os.readlink(f"/proc/{node.process.pid}/exe") == str(millrace.BINARY)
        node.do("attach", spec(tmp_path, "b"))
        node.upgrade(lambda: millrace.succeed("upgrade", "--to", millrace.BINARY, "--state", node.state))
        guest.wait_for("the launcher", lambda: "is the launcher now" in node.said(), 20)
        assert set(node.disks()) == {"a", "b"}


def test_a_second_signal_ends_both_immediately(tmp_path):
    uri = f"delay:all=3s|file:{image(tmp_path / 'disk.img')}"
    with machine(tmp_path, uri, mode="boot", then="stay") as (node, vm):
        guest.wait_for("the firmware", lambda: "a front end has connected" in node.said())
        time.sleep(1)
        child = node.pid()
        node.process.send_signal(signal.SIGTERM)
        guest.wait_for("the first", lambda: "stopping" in node.said())
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(10) in (0, 128 + signal.SIGTERM)
        guest.wait_for("the end of the node", lambda: has_ended(child), 10)


def test_an_error_of_the_start_is_printed_once(tmp_path):
    said = millrace.fail("serve", "--disk", f"name=a uri=file:{tmp_path}/none.img socket={tmp_path}/a.sock")
    assert said.count("none.img") == 1, said
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag in ("--listen", "--metrics"):
            said = millrace.fail("serve", "--data", tmp_path / "db", "--sandbox", "on", flag, address)
            assert f"{address} is in use" in said, said
    said = millrace.fail("serve", "--data", tmp_path / "none", "--read-only", "--sandbox", "on", "--listen", "127.0.0.1:0")
    assert "there is no directory" in said, said
    said = millrace.fail("serve", "--data", tmp_path / "no" / "db", "--sandbox", "on", "--listen", "127.0.0.1:0")
    assert "cannot create directory" in said and "must exist" in said, said


def test_a_renamed_log_is_reopened(tmp_path):
    log = tmp_path / "millrace.log"
    with Node(tmp_path, "--log-file", log, specs=[spec(tmp_path, "a")]) as node:
        guest.wait_for("a line of the node", lambda: "serving a disk" in log.read_text(), 10)
        log.rename(tmp_path / "millrace.log.1")
        guest.wait_for("the next file", log.exists, 10)
        time.sleep(0.2)
        node.do("attach", spec(tmp_path, "b"))
        guest.wait_for("a line of the node", lambda: "serving a disk disk=b" in log.read_text(), 10)
        assert "disk=b" not in (tmp_path / "millrace.log.1").read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="to become somebody else takes root")
def test_an_unprivileged_user_has_a_sandbox_too(tmp_path):
    os.chmod(tmp_path, 0o777)
    for parent in tmp_path.parents:
        if parent.owner() == "root" and parent != pathlib.Path("/"):
            os.chmod(parent, parent.stat().st_mode | 0o111)
    path = image(tmp_path / "disk.img")
    os.chown(path, NOBODY, NOBODY)
    log = open(tmp_path / "log", "wb")
    binary = tmp_path / "millrace"
    binary.write_bytes(millrace.BINARY.read_bytes())
    binary.chmod(0o755)
    arguments = [binary, "serve", "--disk", spec(tmp_path, "a", f"file:{path}"), "--state", tmp_path / "state", "--sandbox", "on"]
    with subprocess.Popen(list(map(str, arguments)), user=NOBODY, group=NOBODY, extra_groups=[], stdout=log, stderr=log) as process:
        try:
            guest.wait_for("the node", lambda: b" serves " in (tmp_path / "log").read_bytes() or process.poll() is not None, 20)
            assert process.poll() is None, (tmp_path / "log").read_text()
            node = status(millrace.serving(process.pid))
            assert node["Seccomp"] == "2" and node["Uid"].split()[0] == str(NOBODY)
            with guest.Guest(tmp_path / "vm", tmp_path / "a.sock", mode="files") as vm:
                vm.wait_for(r"GUEST FILES OK")
                vm.wait_for_end()
        finally:
            process.terminate()
        assert process.wait(20) == 0
    log.close()


def losetup(*arguments):
    try:
        made = subprocess.run(["losetup", *map(str, arguments)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no losetup to make a block device with")
    return made.stdout.strip() if made.returncode == 0 else None


@contextlib.contextmanager
def block_device(path, mib):
    """The name of a block device over a file."""
    device = losetup("--find", "--show", image(path, mib))
    if not device or not pathlib.Path(device).is_block_device():
        pytest.skip("no loop device is to be had here")
    try:
        yield device
    finally:
        # A device that is still open is removed when it is closed.
        losetup("--detach", device)


@pytest.mark.parametrize("io", ["auto", "epoll"])
def test_block_devices_are_disks_of_a_confined_node(tmp_path, io, long):
    """With every engine: a guest reads, writes, discards, zeroes and flushes while the node is killed and upgraded, and the disk is resized."""
    if io == "epoll" and not long:
        pytest.skip("--long does it without io_uring, too")
    with contextlib.ExitStack() as stack:
        devices = {engine: stack.enter_context(block_device(tmp_path / engine, 32)) for engine in ("uring", "aio", "mmap", "sync")}
        specs = [spec(tmp_path, engine, f"file:{device}?engine={engine}") for engine, device in devices.items()]
        node = stack.enter_context(Node(tmp_path, "--sandbox", "on", "--io", io, specs=specs))
        assert status(node.pid())["Seccomp"] == "2"
        opened = descriptors(node.pid())
        assert all(device in opened for device in devices.values()), opened
        paths = [tmp_path / f"{engine}.sock" for engine in devices]
        vm = stack.enter_context(guest.Guest(tmp_path / "vm", paths, queues=2, mode="many", secs=12, mib=8, holes="holes"))

        def until_it_goes_on():
            vm.wait_for(r"GUEST TICK ops=[1-9]\d*", times=vm.text().count("GUEST TICK") + 2 * len(devices))

        until_it_goes_on()
        node.restart()
        until_it_goes_on()
        node.upgrade()
        until_it_goes_on()
        vm.wait_for(r"GUEST MANY OK")
        assert len(re.findall(r"GUEST CHECKED .* emptied=[1-9]", vm.text())) == len(devices), vm.text()
        vm.wait_for_end()
        assert {name: disk["size_bytes"] for name, disk in node.disks().items()} == dict.fromkeys(devices, 32 << 20)
        for engine, device in devices.items():
            node.do("resize", engine, "--size", "16M", "--shrink")
            assert "it has" in node.refuses("resize", engine, "--size", "48M")
            assert node.disks()[engine]["size_bytes"] == 16 << 20
            os.truncate(tmp_path / engine, 48 << 20)
            losetup("--set-capacity", device)
            node.do("resize", engine, "--size", "48M")
        assert {disk["size_bytes"] for disk in node.disks().values()} == {48 << 20}


def await_lines(process, log, *parts):
    """Waits until the node has said all of these, in any order."""
    has_all = lambda: all(part in log.read_text() for part in parts)  # noqa: E731
    guest.wait_for("the node", lambda: has_all() or process.poll() is not None, 20)
    assert has_all(), log.read_text()


def test_the_sandbox_is_the_same_without_io_uring(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        arguments = [millrace.BINARY, "serve", "--disk", spec(tmp_path, "a"), "--sandbox", "on"]
        process = subprocess.Popen(list(map(str, arguments)), preexec_fn=sandbox.without_io_uring, stdout=log, stderr=log)
    try:
        await_lines(process, tmp_path / "log", " serves ", "confined: paths")
        said = (tmp_path / "log").read_text()
        assert "io_uring is not available" in said and "confined: paths" in said and "epoll" in said, said
    finally:
        process.terminate()
    assert process.wait(20) == 0


def test_a_kernel_without_landlock_is_reported_or_refused(tmp_path):
    log = tmp_path / "log"
    arguments = [millrace.BINARY, "serve", "--disk", spec(tmp_path, "a")]
    with open(log, "wb") as out:
        process = subprocess.Popen(list(map(str, arguments)), preexec_fn=sandbox.without_landlock, stdout=out, stderr=out)
    try:
        await_lines(process, log, " serves ", "only partly confined")
        assert "paths=false calls=true" in log.read_text()
    finally:
        process.terminate()
    assert process.wait(20) == 0
    said = millrace.fail(*arguments[1:], "--sandbox", "on", preexec_fn=sandbox.without_landlock)
    assert "cannot be confined" in said and "--sandbox auto" in said
    assert not (tmp_path / "a.sock").exists()
