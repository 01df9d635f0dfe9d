"""docs/DIRECTORIES.md tells what each option that RocksDB writes means here."""

import re
import subprocess

import millrace
from rocksdict import Options, Rdict

# Sections of an OPTIONS file that have options of the database.
SECTIONS = ("DBOptions", "CFOptions", "TableOptions")


def written_by_debian(path):
    subprocess.run(["ldb", f"--db={path}", "--create_if_missing", "put", "key", "value"], check=True, capture_output=True)


def written_by_rocksdict(path):
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    Rdict(str(path), options).close()


def names(path):
    """The options of the newest OPTIONS file."""
    found, section = set(), ""
    for line in max(path.glob("OPTIONS-*")).read_text().splitlines():
        if line.startswith("["):
            section = line[1:].split("/")[0].split(" ")[0].rstrip("]")
        elif section in SECTIONS and "=" in line:
            found.add(line.split("=")[0].strip())
    return found


def test_the_page_names_every_option(tmp_path):
    told = set(re.findall(r"\w+", (millrace.ROOT / "docs" / "DIRECTORIES.md").read_text()))
    for write in (written_by_debian, written_by_rocksdict):
        path = tmp_path / write.__name__
        write(path)
        found = names(path)
        assert len(found) > 100
        assert not found - told, f"{write.__name__}: the page does not name {sorted(found - told)}"
