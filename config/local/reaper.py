"""Ends the processes of a program that was itself killed: no orphan keeps a port or a database busy.

Used by ``make run`` and by the test harness. The reaper is a process of its own that imports nothing of the service; it
reads commands from a pipe and acts when the pipe closes, however its owner ended:

    + PID     a process group to end
    - PID     ended already
    x PATH    a directory to remove at the end
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import TextIO

TERMINATE_SECONDS = 5.0


class Reaper:
    """The owner's end of the pipe. Processes must lead a process group (``start_new_session=True``)."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C in the terminal must not end it before its owner.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def watch(self, pid: int) -> None:
        self._tell(f"+ {pid}")

    def forget(self, pid: int) -> None:
        self._tell(f"- {pid}")

    def remove_at_end(self, path: str) -> None:
        self._tell(f"x {path}")

    def close(self) -> None:
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        # A reaper that is gone is no reason to fail: it only helps where the owner can't.
        if self._process.stdin:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()


def signal_group(pid: int, number: int) -> bool:
    """Signal a process group; False if nothing of it is left."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap(commands: Iterable[str]) -> None:
    pids: set[int] = set()
    directories: list[str] = []
    for line in commands:
        sign, _, argument = line.rstrip("\n").partition(" ")
        if sign == "+":
            pids.add(int(argument))
        elif sign == "-":
            pids.discard(int(argument))
        elif sign == "x":
            directories.append(argument)
    for pid in pids:
        # A stopped process acts on SIGTERM only once it goes on.
        signal_group(pid, signal.SIGTERM)
        signal_group(pid, signal.SIGCONT)
    deadline = time.monotonic() + TERMINATE_SECONDS
    while pids and time.monotonic() < deadline:
        pids = {pid for pid in pids if signal_group(pid, 0)}
        time.sleep(0.05)
    for pid in pids:
        signal_group(pid, signal.SIGKILL)
    for path in directories:
        shutil.rmtree(path, ignore_errors=True)


def main(commands: TextIO) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    reap(commands)


if __name__ == "__main__":
    main(sys.stdin)
