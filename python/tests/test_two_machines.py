"""The set-up of two machines by paste, as README.md and docs/CLIENT.md tell it, with a client in Python."""

import importlib.util
import re
import sys

import conftest
import pytest

SPEC = importlib.util.spec_from_file_location("two_machines", conftest.ROOT / "e2e" / "two_machines.py")
two_machines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(two_machines)
PAGE = "docs/CLIENT.md"


@pytest.fixture
def machines(tmp_path):
    with two_machines.machines(tmp_path, conftest.MILLRACE.resolve()) as made:
        yield made


def run(machines, program):
    said = machines.paste(sys.executable, "-c", machines.place(program))
    # Half of the gets are for keys that do not exist.
    assert int(re.search(r"20000 gets in (\d+) round trips", said).group(1)) < 2000


def test_a_program_reads_from_another_machine_in_few_round_trips(machines):
    with machines.serve(two_machines.block(PAGE, "sh", "cargo build")):
        machines.send("secret")
        run(machines, two_machines.block(PAGE, "python", "cache_stats"))


def test_the_same_with_tls(machines):
    program = two_machines.block(PAGE, "python", "cache_stats")
    text = (conftest.ROOT / PAGE).read_text()
    option = re.search(r"In Python give `(tls_authority=.*?)` to `connect`", text).group(1)
    # The commands from the secret on, and then those for TLS, which serve in place of the others.
    secret = two_machines.block(PAGE, "sh", "cargo build").splitlines()[-2]
    with machines.serve(f"{secret}\n{two_machines.block(PAGE, 'sh', 'openssl req')}"):
        machines.send("secret", "ca.pem")
        with pytest.raises(AssertionError, match="millrace.*Error"):
            run(machines, program)
        run(machines, program.replace("**options)", f"**options, {option})"))


def test_the_example_of_the_readme(machines):
    clone = machines.storage / "millrace"
    with machines.serve(two_machines.block("README.md", "sh", "./run"), at=clone):
        machines.send("secret", at=clone)
        said = machines.paste(sys.executable, "-c", machines.place(two_machines.block("README.md", "python", "connect")))
        assert "b'world' None" in said and "'index_keys'" in said
