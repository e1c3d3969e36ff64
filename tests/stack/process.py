"""One real process of a test: start, stop, kill, pause. Its output goes to a file. It ends with the test run."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.stack import forks
from tests.stack.reaper import Reaper, signal_group

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent.parent
# More than the longest grace of a process on a busy machine.
STOP_SECONDS = 90.0


@cache
def reaper() -> Reaper:
    return Reaper()


@cache
def remover() -> subprocess.Popen[str]:
    """Removes the directories that it reads, once this process has ended and the reaper has ended the others."""
    command = "found=$(cat); sleep 10; rm -rf $found"
    return subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, text=True, start_new_session=True)


def temporary_directory(prefix: str) -> Path:
    """A directory that is removed after the test run, even if the run is killed. Its path is short, for sockets."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    pipe = remover().stdin
    assert pipe is not None
    pipe.write(f"{path}\n")
    pipe.flush()
    return path


def remove_directory(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(predicate: Callable[[], T], timeout: float = 60.0, what: str = "", interval: float = 0.05) -> T:
    """The first truthy value of ``predicate``. AssertionError with the last value after ``timeout`` seconds. It looks
    less and less often, because each look at a running service takes time from what is waited for.
    """
    begun = time.monotonic()
    while True:
        answer = predicate()
        if answer:
            return answer
        waited = time.monotonic() - begun
        if waited > timeout:
            raise AssertionError(f"{what or 'what was waited for'} did not happen in {timeout:g} s; last: {answer!r}")
        time.sleep(max(interval, min(waited / 10, 0.25)))


class Process:
    """A command that can be restarted after it was stopped or killed. It leads its own process group."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        directory: Path = ROOT,
        user: str | None = None,
    ) -> None:
        self.name, self.command, self.log = name, list(command), log
        self.environment = dict(os.environ if environment is None else environment)
        self.directory, self.user = directory, user
        self.popen: subprocess.Popen[bytes] | forks.Fork | None = None
        # Whether it should run. An unexpected end fails the test that waits.
        self.wanted = False

    @property
    def pid(self) -> int:
        assert self.popen, f"{self.name} was never started"
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def start(self) -> None:
        assert not self.running, f"{self.name} is running already"
        with self.log.open("ab") as output:
            if self.directory == ROOT and not self.user and forks.can(self.command, self.environment):
                self.popen = forks.start(self.command, self.environment, output, output)
            else:
                self.popen = subprocess.Popen(
                    self.command,
                    cwd=self.directory,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    **self.as_user(),
                )
        self.wanted = True
        reaper().watch(self.popen.pid)

    def as_user(self) -> dict[str, Any]:
        if self.user is None:
            return {}
        return {"user": self.user, "group": pwd.getpwnam(self.user).pw_gid, "extra_groups": []}

    def send_signal(self, number: int) -> None:
        """Send the signal to the process only, not to its children."""
        assert self.popen
        self.popen.send_signal(number)

    def stop(self, number: int = signal.SIGTERM, timeout: float = STOP_SECONDS) -> int:
        """Signal it, wait and return its exit status. After ``timeout`` seconds, kill it and fail."""
        self.wanted = False
        if self.popen is None:
            return 0
        self.popen.send_signal(number)
        signal_group(self.pid, signal.SIGCONT)
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not stop within {timeout:g} s:\n{self.tail()}") from None
        finally:
            self._forget()

    def kill(self) -> None:
        """SIGKILL to the process and all its children, as in a power failure."""
        self.wanted = False
        if self.popen is not None:
            self._forget()

    def _forget(self) -> None:
        assert self.popen
        # End the processes of its group that outlived it.
        signal_group(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        reaper().forget(self.popen.pid)

    def pause(self) -> None:
        """Suspend it and its children: sockets stay open, but nothing answers."""
        signal_group(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        signal_group(self.pid, signal.SIGCONT)

    def check(self) -> None:
        """AssertionError if it ended unexpectedly."""
        if self.wanted and self.popen is not None and self.popen.poll() is not None:
            raise AssertionError(f"{self.name} ended by itself (status {self.popen.returncode}):\n{self.tail()}")

    def tail(self, lines: int = 60) -> str:
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Server(Process):
    """A separate server for a test. ``start`` waits until it is ready; ``with`` starts it and removes all its data."""

    data: Path

    def restart(self) -> None:
        if self.running:
            self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        remove_directory(self.data)


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def run(
    command: Sequence[str], environment: Mapping[str, str], timeout: float | None = 100
) -> subprocess.CompletedProcess[str]:
    """The end of the command and what it printed, without an exception for a status other than 0. A program in Python
    is a fork, which costs half of the CPU time of a start; a test of what a start imports cannot use it.
    """
    if not forks.can(command, environment):
        given: Any = {"cwd": ROOT, "env": environment, "stdin": subprocess.DEVNULL, "timeout": timeout, "check": False}
        return subprocess.run(command, capture_output=True, text=True, **given)
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        fork = forks.start(command, environment, stdout, stderr)
        try:
            status = fork.wait(timeout)
        finally:
            signal_group(fork.pid, signal.SIGKILL)
        outputs = [os.pread(file.fileno(), 1 << 26, 0).decode() for file in (stdout, stderr)]
    return subprocess.CompletedProcess(command, status, *outputs)
