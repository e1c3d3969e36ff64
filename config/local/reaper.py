"""Ends the processes of a program that was itself killed: no orphan keeps a port or a database busy.

Used by ``make run`` and by the test harness. The reaper is a process of its own that imports nothing of the service. It
waits until its standard input closes, which happens however its owner ends, and then follows the lines of a file:

    + PID     a process group to end
    - PID     ended already
    x PATH    a directory to remove at the end
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

TERMINATE_SECONDS = 5.0


class Reaper:
    """The owner's side. Processes must lead a process group (``start_new_session=True``).

    ``journal`` is the path of the file. A shell may append lines to it.
    """

    def __init__(self) -> None:
        self.journal = Path(tempfile.mkdtemp(prefix="reaper-")) / "journal"
        self.journal.touch()
        # A session of its own: Ctrl-C in the terminal must not end it before its owner.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, self.journal], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch(self, pid: int) -> None:
        self._record(f"+ {pid}")

    def forget(self, pid: int) -> None:
        self._record(f"- {pid}")

    def remove_at_end(self, path: str) -> None:
        self._record(f"x {path}")

    def close(self) -> None:
        self._process.communicate()

    def _record(self, line: str) -> None:
        with self.journal.open("a") as journal:
            journal.write(line + "\n")


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
        # A stopped process acts on SIGTERM only after SIGCONT.
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


def main(journal: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    with journal.open() as lines:
        # A shell that starts a process from now on cannot register it, and so does not start it.
        shutil.rmtree(journal.parent)
        reap(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
