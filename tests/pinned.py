"""Python environments of their own, for packages that the service does not need or that conflict with its own."""

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack.process import ROOT, python

INSTALL_SECONDS = 500
# What package managers say if they do not reach a registry, and if it does not have a package.
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "connection broken", "ConnectionError")
LACKING = "No matching distribution"


def installed(kind: str, pins: Path, *options: str) -> Path:
    """The directory of the programs of the packages that ``pins`` names, installed once under var/. Skips the test if
    the registry cannot be reached or lacks a package.
    """
    digest = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = ROOT / "var" / kind / f"{pins.stem}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    # Tests run side by side in several processes.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            subprocess.run(python("-m", "venv", "--without-pip", "--clear", str(folder / "venv")), check=True)
            install(folder / "venv/bin/python", *options, "-r", str(pins))
            (folder / "installed").touch()
    return folder / "venv/bin"


def install(interpreter: Path, *what: str) -> None:
    """uv needs a tenth of pip's time, but knows only those registries and mirrors that it is told of itself."""
    uv = python("-m", "uv", "pip", "install", "--quiet", "--python", str(interpreter), *what)
    pip = python("-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-compile", *what)
    for command in (uv, pip):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the packages were not installed in {INSTALL_SECONDS} s: {' '.join(what)}")
        if not done.returncode:
            return
    if any(sign in done.stderr for sign in (*UNREACHABLE, LACKING)):
        pytest.skip(f"the registry of Python packages: {done.stderr}")
    raise AssertionError(done.stdout + done.stderr)
