"""``manage.py`` commands of a stack, without a start of Django for each.

One process loads the service and forks for each command. Loading takes 1.5 s of CPU, and most tests need several
commands. The fork executes ``manage.py`` itself, with the arguments and outputs that its caller sends over a socket.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import BinaryIO

from tests.stack.process import Process, python, wait_for

# What most commands import, beyond django.setup().
MODULES = ("config.urls", "config.api.session_tokens", "credits.reconcile", "runs.lifecycle")


class Commands(Process):
    """``run`` may be called by several threads."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.address = str(directory / f"commands-{id(self):x}")
        super().__init__(
            "commands",
            python("-m", "tests.stack.commands", self.address),
            log=directory / "commands.log",
            environment=environment,
        )

    def run(self, arguments: tuple[str, ...], stdout: BinaryIO, stderr: BinaryIO) -> int:
        """The exit code of ``manage.py ARGUMENTS``."""
        with socket.socket(socket.AF_UNIX) as connection:
            wait_for(lambda: self.connected(connection), 90, "the process for commands")
            socket.send_fds(connection, [b"+"], [stdout.fileno(), stderr.fileno()])
            connection.sendall(json.dumps(arguments).encode())
            connection.shutdown(socket.SHUT_WR)
            code = connection.recv(1)
        return code[0] if code else -signal.SIGKILL

    def connected(self, connection: socket.socket) -> bool:
        self.check()
        return connection.connect_ex(self.address) == 0


def execute(connection: socket.socket) -> int:
    """In a fork: the exit code of the command."""
    _, files, _, _ = socket.recv_fds(connection, 1, 2)
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
    sys.argv = ["manage.py", *json.load(connection.makefile("rb"))]
    try:
        runpy.run_path("manage.py", run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def main(address: str) -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    import django
    from django.db import connections

    from config.kernel import garbage

    garbage.collect_less_often()
    django.setup()
    for name in MODULES:
        importlib.import_module(name)
    connections.close_all()
    garbage.freeze_loaded_objects()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        while True:
            connection, _ = listener.accept()
            if os.fork():
                connection.close()
                continue
            # The commands start processes and wait for them.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            code = execute(connection)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.sendall(bytes([code]))
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
