"""What the tests use of npm: the packages that a package-lock.json pins, installed once under var/check."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from tests.stack.process import ROOT

HERE = Path(__file__).resolve().parent
PINS = ("package.json", "package-lock.json")


@cache
def modules(packages: Path = HERE) -> Path:
    """The directory ``node_modules`` with what ``packages`` pins; AssertionError if the packages can't be had."""
    npm = shutil.which("npm")
    assert npm, "Node.js and npm are not installed (Debian: apt-get install nodejs npm)"
    pinned = hashlib.sha256(b"".join((packages / name).read_bytes() for name in PINS)).hexdigest()[:16]
    folder = ROOT / "var" / "check" / "npm" / pinned
    folder.mkdir(parents=True, exist_ok=True)
    # Tests run side by side in several processes.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            for name in PINS:
                shutil.copy(packages / name, folder)
            command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            (folder / "installed").touch()
    return folder / "node_modules"


def run(*command: str, folder: Path | None = None, text: str = "", packages: Path = HERE, **environment: str) -> str:
    """What a program printed, with the packages within its reach: ``node …``, or one of the packages' own."""
    installed = modules(packages)
    program = shutil.which(command[0], path=f"{installed / '.bin'}{os.pathsep}{os.environ['PATH']}")
    assert program, f"{command[0]} is not installed"
    options: dict[str, Any] = {"cwd": folder, "input": text, "capture_output": True, "text": True, "timeout": 120}
    variables = {**os.environ, "NODE_PATH": str(installed), **environment}
    done = subprocess.run([program, *command[1:]], env=variables, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
