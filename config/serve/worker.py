"""The worker class of gunicorn, which starts, watches and stops the processes of the web server.

gunicorn's worker has no server of its own here: ``config.serve.server`` serves on the process's event loop, and the
main thread reports to gunicorn that this loop works.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import select
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from gunicorn.workers.base import Worker as BaseWorker

from config.database import start
from config.kernel import garbage
from config.outbound.loop import raise_open_file_limit, shared
from config.serve.server import Server
from config.serve.state import State
from config.telemetry import logs as telemetry

TICK_SECONDS = 1.0


class Worker(BaseWorker):
    def load_wsgi(self) -> None:
        super().load_wsgi()
        garbage.freeze_loaded_objects()

    def run(self) -> None:
        raise_open_file_limit()
        logs = self.log_access if self.cfg.accesslog or self.cfg.syslog else None
        state = State(self.wsgi, self.cfg.threads, self.cfg.keepalive, logs)
        server = Server(state, [listener.sock for listener in self.sockets], self.cfg.worker_connections)
        is_ready = False
        while self.alive and os.getppid() == self.ppid:
            # gunicorn replaces a worker whose event loop is blocked for its time-out.
            with contextlib.suppress(concurrent.futures.TimeoutError):
                shared.submit(server.tick()).result(TICK_SECONDS)
                self.notify()
                if not is_ready:
                    is_ready = True
                    telemetry.announce_ready(f"{self.cfg.proc_name} on {', '.join(map(str, self.sockets))}")
                    start.look_for_database()
            self.wait_for_signal(TICK_SECONDS)
        ending = shared.submit(server.stop())
        with contextlib.suppress(concurrent.futures.TimeoutError):
            ending.result(self.cfg.graceful_timeout)

    def wait_for_signal(self, seconds: float) -> None:
        """A signal writes to the pipe, and its handler sets ``alive``."""
        if select.select([self.PIPE[0]], [], [], seconds)[0]:
            os.read(self.PIPE[0], 4096)

    def log_access(self, environ: dict[str, Any], status: str, sent: int, seconds: float) -> None:
        """gunicorn's access log, if an operator has enabled it."""
        response = SimpleNamespace(status=status, sent=sent, headers=[])
        self.log.access(response, SimpleNamespace(headers=[]), environ, timedelta(seconds=seconds))
