"""Ends the processes of a test run that was killed, so that none of them keeps using a port or a database.

The reaper is a separate process. Its standard input closes when its owner ends for any reason. It then executes the
lines of a file, the journal:

    + PID     end this process group
    - PID     this process group has ended
"""

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
    """Starts the reaper. Each watched process must lead a process group (``start_new_session=True``).

    ``journal`` is the path of the file.
    """

    def __init__(self) -> None:
        self.journal = Path(tempfile.mkdtemp(prefix="reaper-")) / "journal"
        self.journal.touch()
        # In a new session, because Ctrl-C in the terminal must not end the reaper before its owner.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, self.journal], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch(self, pid: int) -> None:
        self._record(f"+ {pid}")

    def forget(self, pid: int) -> None:
        self._record(f"- {pid}")

    def close(self) -> None:
        self._process.communicate()

    def _record(self, line: str) -> None:
        with self.journal.open("a") as journal:
            journal.write(line + "\n")


def signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group. Returns False if the group has ended."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def reap(commands: Iterable[str]) -> None:
    pids: set[int] = set()
    for line in commands:
        sign, _, argument = line.rstrip("\n").partition(" ")
        if sign == "+":
            pids.add(int(argument))
        elif sign == "-":
            pids.discard(int(argument))
    for pid in pids:
        # A stopped process handles SIGTERM only after SIGCONT.
        signal_group(pid, signal.SIGTERM)
        signal_group(pid, signal.SIGCONT)
    deadline = time.monotonic() + TERMINATE_SECONDS
    while pids and time.monotonic() < deadline:
        pids = {pid for pid in pids if signal_group(pid, 0)}
        time.sleep(0.05)
    for pid in pids:
        signal_group(pid, signal.SIGKILL)


def main(journal: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    with journal.open() as lines:
        shutil.rmtree(journal.parent)
        reap(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
