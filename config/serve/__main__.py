"""``python -m config.serve``: granian, whose processes serve ``config.asgi`` (docs/decisions/0021)."""

import argparse
import os
import resource
import signal
import sys
from functools import partial
from typing import Any

from granian import Granian
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels

from config import checks, settings
from config.outbound.loop import raise_open_file_limit

# One connection takes 26 KiB, and up to HEAD_MAX_BYTES while a head arrives.
CONNECTIONS_MAX = 16_384
# The part of the process's open files for connections; the rest is for databases, brokers, stored files and bodies.
CONNECTIONS_SHARE = 3 / 4
HEAD_MAX_BYTES = 128 * 1024
# The time for a head to arrive, and for an idle connection. The proxy in front must close idle connections earlier.
HEAD_SECONDS = 30
BACKLOG = 2048


def load(_: str, name: str, address: str) -> Any:
    """The application, in a process that serves it."""
    from config.asgi import application
    from config.database import retry
    from config.kernel import garbage
    from config.queue import publisher
    from config.telemetry import logs

    garbage.freeze_loaded_objects()
    publisher.metrics.put(None)
    logs.announce_ready(f"{name} on {address}")
    retry.look_for_database()
    return application


def end_on_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m config.serve", description="Serve HTTP.")
    parser.add_argument("--name", default="web", help="the name in the log")
    parser.add_argument("--host", default="0.0.0.0")  # noqa: S104  (for containers; make run gives another one)
    parser.add_argument("--workers", type=int, default=settings.WEB_WORKERS, help="processes")
    options = parser.parse_args()
    # Checked here and not in each process: the server would restart processes that end, for a minute.
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    checks.require_valid_settings()
    raise_open_file_limit()
    # Until a worker has its own handlers, a signal must end it: the inherited ones do nothing in it.
    os.register_at_fork(after_in_child=end_on_signals)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = Granian(
        "config.asgi",
        address=options.host,
        port=settings.PORT,
        interface=Interfaces.ASGI,
        workers=options.workers,
        http=HTTPModes.http1,
        websockets=False,
        backlog=BACKLOG,
        backpressure=min(CONNECTIONS_MAX, int(files * CONNECTIONS_SHARE)),
        http1_settings=HTTP1Settings(header_read_timeout=HEAD_SECONDS * 1000, max_buffer_size=HEAD_MAX_BYTES),
        log_level=LogLevels.warning,
        log_dictconfig=settings.LOGGING,
        respawn_failed_workers=True,
        workers_kill_timeout=settings.WEB_GRACEFUL_SECONDS,
    )
    address = f"{options.host}:{settings.PORT}"
    try:
        server.serve(target_loader=partial(load, name=options.name, address=address))
    except RuntimeError as error:  # such as a port in use; the other lines are granian's stack
        sys.exit(f"{options.name} on {address}: {str(error).partition(chr(10))[0]}")


if __name__ == "__main__":
    main()
