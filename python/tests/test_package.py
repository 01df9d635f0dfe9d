"""Stubs, types and the examples of the documentation."""

import inspect
import pathlib
import re
import subprocess
import sys
import textwrap

import conftest
import millrace
import millrace.aio
import pytest


def test_the_stubs_match_the_module(tmp_path):
    # Their options are keywords that None leaves out; the stubs say what a program may give.
    (tmp_path / "allowed").write_text("millrace._native.open\nmillrace._native.connect\n")
    command = [sys.executable, "-m", "mypy.stubtest", "millrace", "--ignore-disjoint-bases", "--allowlist", "allowed"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_is_typed(tmp_path):
    (tmp_path / "program.py").write_text(
        """
import millrace
import millrace.aio

async def main() -> None:
    async with millrace.aio.open("db", durability="process") as db:
        reveal_type(await db.get(b"k"))
        async for key, value in db.range(reverse=True):
            reveal_type(key)
        async with db.transaction() as transaction:
            reveal_type(transaction)
    async with millrace.aio.connect("127.0.0.1:6379", cache=1 << 20) as client:
        reveal_type(await client.delete(b"k"))
        reveal_type(await client.ttl(b"k"))
        reveal_type(client.cache_stats()["index_is_whole"])

with millrace.connect("127.0.0.1:6379", cache=4 << 20, read_ahead=1 << 20, index=1 << 20) as client2:
    stats: millrace.CacheStats = client2.cache_stats()
    reveal_type(stats["index_load_time"])
    reveal_type(client2.ttl(b"k"))
    client2.set(b"k", b"v", ttl=0.5)
    client2.set(b"k", b"v", ttl="1")  # type: ignore[arg-type]
millrace.connect("127.0.0.1:6379", read_ahead="1M")  # type: ignore[arg-type]

with millrace.open("db", memory=1 << 30) as db2:
    reveal_type(db2.get(b"k", 0))
    db2.put("text", b"")  # type: ignore[arg-type]
    for key in db2:
        reveal_type(key)
"""
    )
    command = [sys.executable, "-m", "mypy", "--strict", "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    simple = [text.replace("builtins.", "") for text in revealed]
    expected = ["bytes | None", "bytes", "millrace.aio.Transaction", "bool", "float | None", "bool", "float", "float | None"]
    expected += ["bytes | int", "bytes"]
    assert simple == expected


def test_the_client_has_all_options_and_counts_of_the_one_in_rust():
    source = conftest.ROOT / "crates" / "client" / "src"
    options = set(re.findall(r"pub fn (\w+)\(mut self", (source / "options.rs").read_text()))
    names = millrace.ConnectOptions.__annotations__.keys()
    assert {name for name in names if not name.startswith("tls_")} == options
    counts = re.search(r"pub struct CacheStats \{(.*?)^\}", (source / "cache" / "mod.rs").read_text(), re.M | re.S)
    assert millrace.CacheStats.__annotations__.keys() == set(re.findall(r"pub (\w+):", counts.group(1)))


@pytest.mark.parametrize("module", [millrace, millrace.aio])
def test_everything_public_has_a_docstring(module):
    assert module.__doc__
    for name in module.__all__:
        item = getattr(module, name)
        assert inspect.getdoc(item), name
        for member, value in vars(item).items() if inspect.isclass(item) else ():
            if not member.startswith("_"):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_asyncio_has_all_that_threads_have():
    for name in ("Db", "ColumnFamily", "Snapshot", "Transaction", "Client", "ClientTransaction"):
        of_threads = {member for member in dir(getattr(millrace, name)) if not member.startswith("_")}
        of_tasks = {member for member in dir(getattr(millrace.aio, name)) if not member.startswith("_")}
        assert of_threads == of_tasks, name


def examples():
    for page in ("README.md", "python/README.md", "docs/EMBEDDING.md", "docs/CLIENT.md"):
        text = (conftest.ROOT / page).read_text()
        for number, example in enumerate(re.findall(r"^ *```python\n(.*?)^ *```$", text, re.M | re.S)):
            yield pytest.param(textwrap.dedent(example), id=f"{page}-{number}")


@pytest.mark.parametrize("example", list(examples()))
def test_the_examples_of_the_documentation_run(tmp_path, example):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with conftest.start_node(tmp_path, "--password-file", secret) as server:
        text = example.replace("/tmp/example.db", str(tmp_path / "example.db"))
        text = text.replace("10.0.0.1:6379", server.address)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_every_page_has_examples():
    pages = {str(param.id).rsplit("-", 1)[0] for param in examples()}
    assert pages == {"README.md", "python/README.md", "docs/EMBEDDING.md", "docs/CLIENT.md"}
    assert pathlib.Path(millrace.__file__).with_name("py.typed").exists()
