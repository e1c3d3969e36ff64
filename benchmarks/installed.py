"""Other servers, installed with the pinned packages of ``pins/`` in virtual environments of their own, var/peers/."""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.stack.process import ROOT, python

PINS = Path(__file__).resolve().parent / "pins"
INSTALL_SECONDS = 600
# The package that a peer's version is the version of, its title, and the Python that it needs.
PEERS = {"langgraph": ("langgraph-api", "LangGraph dev server", (3, 11)), "aegra": ("aegra-api", "Aegra", (3, 12))}


class Missing(Exception):
    """A peer cannot be installed here."""


def version_of(name: str) -> str:
    """Title and version: ``LangGraph dev server 0.16.7``."""
    package, title, _ = PEERS[name]
    found = re.search(rf"^{package}==(\S+)", (PINS / f"{name}.txt").read_text(), re.MULTILINE)
    assert found, package
    return f"{title} {found[1]}"


def environment_of(name: str) -> Path:
    """The directory of the programs of ``pins/NAME.txt``, which are installed at the first use."""
    interpreter = python_of(PEERS[name][2])
    pins = PINS / f"{name}.txt"
    digest = hashlib.sha256(pins.read_bytes() + interpreter.encode()).hexdigest()[:16]
    folder = ROOT / "var" / "peers" / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            print(f"Installing {version_of(name)} under var/peers/ (once)", flush=True)
            uv("venv", "--quiet", "--clear", "--python", interpreter, str(folder / "venv"))
            into = ["--python", str(folder / "venv/bin/python")]
            uv("pip", "install", "--quiet", *into, "--require-hashes", "--requirement", str(pins))
            (folder / "installed").touch()
    return folder / "venv/bin"


def uv(*arguments: str) -> None:
    try:
        done = subprocess.run(
            python("-m", "uv", *arguments), capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"it was not installed within {INSTALL_SECONDS} s") from None
    if done.returncode:
        raise Missing(f"it cannot be installed: {done.stderr.strip()[-500:]}")


@cache
def python_of(version: tuple[int, int]) -> str:
    """A Python of at least this version: PEER_PYTHON, this one, one on PATH, or one of pyenv."""
    wanted = ".".join(map(str, version))
    names = [f"python3.{minor}" for minor in range(version[1], version[1] + 4)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [path for name in names for path in sorted(pyenv.glob(f"versions/{name[6:]}*/bin/python"))]
    for candidate in filter(None, [os.environ.get("PEER_PYTHON"), sys.executable, *names, *map(str, found)]):
        check = f"import sys, venv; sys.exit(sys.version_info < {version})"
        try:
            if not subprocess.run([candidate, "-c", check], capture_output=True, check=False).returncode:
                return candidate
        except OSError:
            continue
    raise Missing(f"it needs Python {wanted}, which was not found (PEER_PYTHON=/path/to/python names one)")
