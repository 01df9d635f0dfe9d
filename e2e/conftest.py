"""Fixtures that the tests share: the binary and the databases that RocksDB makes."""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import tempfile

import databases
import millrace
import pytest


# Databases are made by several threads in parallel. A program started by vfork while another thread does the same has
# failed with EFAULT, about once in a thousand times.
subprocess._USE_VFORK = False


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="the longer forms: more seeds, more bits flipped")


def pytest_collection_modifyitems(config, items):
    """Gives the long forms of tests a longer timeout."""
    if config.getoption("--long"):
        for item in items:
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def long(request):
    """Whether to run the long forms of tests."""
    return request.config.getoption("--long")


@pytest.fixture(autouse=True)
def state_of_its_own(tmp_path_factory, monkeypatch):
    """Gives each test's nodes a state directory of their own."""
    monkeypatch.delenv("MILLRACE_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="session", autouse=True)
def binary():
    """The program to test, which must be built."""
    if not millrace.BINARY.exists():
        pytest.exit(f"{millrace.BINARY} is missing: cargo build --release -p millrace-cli, or set MILLRACE", returncode=1)
    return millrace.BINARY


class Workshop:
    """Makes the databases ahead of the tests that read them, and keeps them until the session ends."""

    def __init__(self, root, names):
        self.root = root
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.jobs = {name: self.pool.submit(databases.build, name, root / name) for name in names}

    def directory(self, name):
        """The directory of a finished database, with `db` and `expected`."""
        # A database that is still queued is made here.
        if name not in self.jobs or self.jobs[name].cancel():
            self.jobs[name] = concurrent.futures.Future()
            self.jobs[name].set_result(databases.build(name, self.root / name))
        self.jobs[name].result()
        return self.root / name


@pytest.fixture(scope="session")
def workshop(request):
    """The databases; starts making those that the selected tests need."""
    # On a disk and not in memory, so that O_DIRECT is tested.
    root = pathlib.Path(tempfile.mkdtemp(prefix="millrace-e2e-"))
    names = {}
    # Of several workers each makes only the databases that its own tests ask for.
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    for item in request.session.items if alone else []:
        name = getattr(item, "callspec", None) and item.callspec.params.get("made")
        if name:
            names[name] = None
    shop = Workshop(root, names)
    yield shop
    shop.pool.shutdown(cancel_futures=True)
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def own_copy(workshop, tmp_path):
    """Copies a database, for a test that changes it."""

    def copy(name):
        target = tmp_path / name
        shutil.copytree(workshop.directory(name) / "db", target)
        return target

    return copy
