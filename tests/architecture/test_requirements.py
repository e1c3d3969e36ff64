"""The lock files hold what the .in files name, and a hash of every package."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["requirements", "requirements-observability", "requirements-docs", "requirements-dev"]
# The tests of clients and the peers of the benchmarks have environments of their own.
LOCK_FILES = [*NAMES, "tests/clients/requirements", "benchmarks/pins/langgraph", "benchmarks/pins/aegra"]
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)


def pins(file: str) -> dict[str, str]:
    """Version by name, in the form in which names are compared; with the files that it includes."""
    text = (ROOT / file).read_text()
    found = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PIN.findall(text)}
    for included in re.findall(r"^-r (\S+)", text, re.MULTILINE):
        found |= pins(included)
    return found


@pytest.mark.parametrize("name", LOCK_FILES)
def test_a_lock_file_has_what_is_named(name):
    locked = pins(f"{name}.txt")
    assert pins(f"{name}.in").items() <= locked.items()


@pytest.mark.parametrize("name", LOCK_FILES)
def test_every_package_has_a_hash(name):
    for package in re.split(r"^(?=[A-Za-z0-9])", (ROOT / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]:
        assert re.match(r"\S+==\S+.*\\\n\s+--hash=sha256:[0-9a-f]{64}", package), package


def test_all_lock_files_have_the_same_versions():
    whole = pins("requirements-dev.txt")
    for name in NAMES:
        assert pins(f"{name}.txt").items() <= whole.items()
