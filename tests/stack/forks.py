"""Starts ``python -m MODULE …``, ``python -c CODE`` and ``manage.py`` as forks of a process with the libraries loaded.

Loading them is most of the CPU time of a start, and the tests start hundreds of processes. A fork loads the service's
own code itself, with its own environment: the server has none of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO

# What the processes of the service load most of.
LIBRARIES = (
    "aiohttp",
    "axes",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.backends.base",
    "celery.bin.celery",
    "celery.concurrency.thread",
    "celery.fixups.django",
    "cryptography.fernet",
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "django.contrib.admin.utils",
    "django.contrib.auth.apps",
    "django.contrib.auth.hashers",
    "django.contrib.auth.password_validation",
    "django.contrib.sessions.backends.base",
    "django.core.handlers.wsgi",
    "django.core.mail",
    "django.core.management",
    "django.db.backends.postgresql.base",
    "django.db.migrations.autodetector",
    "django.forms",
    "django.test.testcases",
    "drf_spectacular.utils",
    "granian",
    "jinja2",
    "jsonschema",
    "jwt",
    "kombu.transport.redis",
    "markdown",
    "prometheus_client",
    "psycopg",
    "redis.asyncio",
    "requests",
    "rest_framework.serializers",
    "sqlite3",
    "ulid",
    "unfold.dataclasses",
    "uritemplate",
    "whitenoise.base",
    "xml.etree.ElementTree",
    "xml.sax.saxutils",
    "yaml",
)
# Benchmarks measure real starts.
allowed = False
STATUS = struct.Struct("i")
# Of the message that begins a fork: the length of its JSON.
LENGTH = struct.Struct("I")


class Fork:
    """What ``subprocess.Popen`` has, for a process that the server started."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.returncode: int | None = None
        self.pid = self._read()

    def _read(self) -> int:
        answer = self.connection.recv(STATUS.size, socket.MSG_WAITALL)
        number: int = STATUS.unpack(answer)[0] if answer else -signal.SIGKILL  # the server was killed
        return number

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            # Not ``select``, which knows no numbers of files from 1024 on.
            told = select.poll()
            told.register(self.connection, select.POLLIN)
            if not told.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            self.returncode = self._read()
            self.connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def can(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the command can start as a fork: a program in Python whose interpreter needs nothing before its start."""
    of_python = command[0] == sys.executable and command[1] in ("-m", "-c", "manage.py")
    return allowed and of_python and "LD_PRELOAD" not in environment


def start(command: Sequence[str], environment: Mapping[str, str], stdout: BinaryIO, stderr: BinaryIO) -> Fork:
    """``can`` is true for the command."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_server())
    message = json.dumps([list(command[1:]), dict(environment)]).encode()
    socket.send_fds(connection, [LENGTH.pack(len(message))], [stdout.fileno(), stderr.fileno()])
    connection.sendall(message)
    return Fork(connection)


@cache
def _server() -> str:
    """The address of this process's server, which ends with this process."""
    address = str(Path(tempfile.mkdtemp(prefix="forks-")) / "socket")
    command = [sys.executable, "-m", "tests.stack.forks", address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return address


# --- the server -------------------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Returns in each fork, which then has its environment, arguments and output. The server itself never returns."""
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    running: dict[int, socket.socket] = {}

    def reap(*args: object) -> None:
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with running.pop(pid) as connection, contextlib.suppress(OSError):
                connection.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))

    signal.signal(signal.SIGCHLD, reap)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                # The tests have ended, and end their processes.
                shutil.rmtree(Path(address).parent, ignore_errors=True)
                os._exit(0)
            connection, _ = listener.accept()
            size, files, _, _ = socket.recv_fds(connection, LENGTH.size, 2)
            message = connection.recv(LENGTH.unpack(size)[0], socket.MSG_WAITALL)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            pid = os.fork()
            if pid == 0:
                for other in (connection, *running.values()):
                    other.close()
                break
            running[pid] = connection
            for file in files:
                os.close(file)
            connection.sendall(STATUS.pack(pid))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    become(files, *json.loads(message))


def become(outputs: list[int], arguments: list[str], environment: dict[str, str]) -> None:
    """What the start of an interpreter does."""
    os.setsid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    for name in ("stdin", "stdout", "stderr"):
        number = getattr(sys, name).fileno()
        file = io.FileIO(number, "r" if name == "stdin" else "w", closefd=False)
        stream = io.TextIOWrapper(io.BufferedReader(file) if name == "stdin" else file, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")
    sys.argv = arguments


def execute() -> None:
    """Ends as the program does, with the exit of the interpreter."""
    if sys.argv[0] == "-m":
        name = sys.argv[1]
        sys.argv = sys.argv[1:]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        exec(sys.argv[1], {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
    execute()
