"""The set-up of two machines by paste, as README.md and docs/CLIENT.md tell it, with a client in Rust. python/tests has the
one in Python."""

import re
import tomllib

import millrace
import pytest
import two_machines

PAGE = "docs/CLIENT.md"


@pytest.fixture
def machines(tmp_path):
    with two_machines.machines(tmp_path, millrace.BINARY.resolve()) as made:
        yield made


@pytest.mark.timeout(600)
def test_a_program_in_rust_reads_from_another_machine_in_few_round_trips(machines):
    channel = tomllib.loads((millrace.ROOT / "rust-toolchain.toml").read_text())["toolchain"]["channel"]
    # The link leads nowhere else. What it builds is kept for the next time.
    environment = {"CARGO_NET_OFFLINE": "true", "CARGO_TARGET_DIR": str(millrace.TARGET / "two-machines")}
    environment |= {"RUSTUP_TOOLCHAIN": channel, "CARGO_PROFILE_RELEASE_OPT_LEVEL": "1"}
    program = two_machines.block(PAGE, "sh", "cargo new app")
    with machines.serve(two_machines.block(PAGE, "sh", "cargo build")):
        machines.send("secret")
        said = machines.paste("bash", "-ec", machines.place(program), timeout=500, **environment)
    trips = int(re.search(r"20000 gets in (\d+) round trips", said).group(1))
    # Half of the gets are for keys that do not exist.
    assert trips < 2000


def test_the_readme_starts_a_node_for_other_machines_which_wants_its_password(machines):
    clone = machines.storage / "millrace"
    with machines.serve(two_machines.block("README.md", "sh", "./run"), at=clone):
        host, port = machines.address.split(":")
        password = (clone / "secret").read_text().strip()
        assert len(password) == 32
        ask = ["redis-cli", "-h", host, "-p", port]
        assert "NOAUTH" in machines.paste(*ask, "GET", "k")
        assert machines.paste(*ask, "-a", password, "--no-auth-warning", "SET", "k", "v").strip() == "OK"


def test_every_block_of_the_set_up_is_run_by_a_test():
    """A new block needs a test here, in python/tests/test_two_machines.py, or beside the client that it is for."""
    known = ["cargo build", "cargo new app", "-m venv", "cache_stats", "openssl req"]
    for language, text in two_machines.blocks(PAGE):
        if language in ("sh", "python"):
            assert any(word in text for word in known), text
