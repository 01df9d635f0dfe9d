#!/usr/bin/env python3
"""Lists the tests that the changes since BASE need (default: the merge base with origin/main, or else HEAD).

Prints three lines: the crates (`all`, or names of packages), the black-box tests (`all`, or files), and the other steps (`python`,
whose package is a workspace of its own). Each may be empty.
"""

import json
import pathlib
import subprocess
import sys


def lines(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def base():
    if len(sys.argv) > 1:
        return sys.argv[1]
    found = subprocess.run(["git", "merge-base", "HEAD", "origin/main"], capture_output=True, text=True)
    return found.stdout.strip() or "HEAD"


def changed_files():
    return {*lines("git", "diff", "--name-only", base()), *lines("git", "ls-files", "--others", "--exclude-standard")}


def with_dependents(folders):
    """The packages in these folders of crates/, and all packages that depend on them."""
    metadata = json.loads("\n".join(lines("cargo", "metadata", "--format-version=1", "--no-deps", "--locked")))
    packages = {package["name"]: package for package in metadata["packages"]}
    found = {name for name, package in packages.items() if pathlib.Path(package["manifest_path"]).parent.name in folders}
    while True:
        more = {name for name, package in packages.items() if any(dependency["name"] in found for dependency in package["dependencies"])}
        if more <= found:
            return sorted(found)
        found |= more


def main():
    crates, tests, others = set(), set(), set()
    for file in changed_files():
        parts = pathlib.PurePath(file).parts
        if file.endswith(".md") or parts[0] in ("docs", "fuzz", "bench", "LICENSE"):
            continue
        if parts[0] == "crates" and len(parts) > 2:
            crates.add(parts[1])
            tests.add("all")
        elif parts[0] == "python":
            others.add("python")
        elif parts[:2] == ("e2e", "clients"):
            tests.add("e2e/test_clients.py")
        elif file == "e2e/two_machines.py":
            tests.add("e2e/test_two_machines.py")
            others.add("python")
        elif parts[0] == "e2e":
            is_test = parts[-1].startswith("test_") and pathlib.Path(file).exists()
            tests.add(file if is_test else "all")
        else:
            crates.add("all")
            tests.add("all")
    print("all" if "all" in crates else " ".join(with_dependents(crates)))
    print("all" if "all" in tests else " ".join(sorted(tests)))
    print(" ".join(sorted(others)))


main()
