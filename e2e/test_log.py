"""The log of a node: its lines, its destination and its formats."""

import json
import os
import re
import signal

import millrace
import pytest


@pytest.fixture(scope="module")
def data(workshop):
    return workshop.directory("ldb-put") / "db"


def run_once(data, tmp_path, *flags, **kwargs):
    """Runs and stops a node; returns its output."""
    with millrace.node(data, tmp_path / "said", "--cores", "2", *flags, **kwargs) as node:
        node.until_ready()
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(10) == 0, node.said()
    return node.said()


def test_a_line_has_time_level_core_and_module(data, tmp_path):
    said = run_once(data, tmp_path)
    lines = [line for line in said.splitlines() if not line.startswith("millrace ")]
    assert any("stopping" in line for line in lines), said
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z (INFO |WARN |ERROR) (core=\d+ )?[a-z_:]+: ", line), line


def test_json_in_a_file_is_one_object_per_line_and_is_appended_to(data, tmp_path):
    file = tmp_path / "log.json"
    for count in (1, 2):
        said = run_once(data, tmp_path, "--log-format", "json", "--log-file", file)
        assert "stopping" not in said, said
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        serving = [line for line in lines if line["message"] == "serving"]
        assert len(serving) == count, lines
        assert serving[0]["level"] == "info" and serving[0]["core"] == 0 and serving[0]["target"].startswith("node::serve")
        assert serving[0]["fields"]["cores"] == 2 and ":" in serving[0]["fields"]["listen"], serving
        assert lines[-1]["message"].startswith("stopping"), lines


def test_the_level_is_set_by_flag_or_variable_and_the_flag_wins(data, tmp_path):
    debug = run_once(data, tmp_path, "--log-level", "warn,lsm=debug")
    assert "DEBUG" in debug and "lsm::" in debug and "INFO" not in debug, debug
    quiet = {**os.environ, "MILLRACE_LOG": "off"}
    assert "Z " not in run_once(data, tmp_path, env=quiet)
    assert "serving" in run_once(data, tmp_path, "--log-level", "info", env=quiet)
    said = millrace.fail("serve", "--data", data, "--read-only", "--log-level", "loud")
    assert "must be off, error" in said and "'loud'" in said, said
    said = millrace.fail("kv", "stat", "--data", data, env={**os.environ, "MILLRACE_LOG": "loud"})
    assert "MILLRACE_LOG" in said and "'loud'" in said, said


def test_a_file_that_cannot_be_opened_is_an_error_with_advice(data, tmp_path):
    file = tmp_path / "nowhere" / "log"
    said = millrace.fail("serve", "--data", data, "--read-only", "--listen", f"127.0.0.1:{millrace.free_port()}", "--log-file", file)
    assert str(file) in said and "--log-file" in said, said
