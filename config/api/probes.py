"""Probes. ``/livez``: this process answers. ``/readyz``: the broker and the database answer too, and all migrations are
applied.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from django.conf import settings
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe

from config.database.retry import CONNECTION_ERRORS, outage
from config.kernel.jsontext import dumps
from config.redis import client

logger = logging.getLogger(__name__)

OK, UNAVAILABLE = "ok", "unavailable"


def ask_database() -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        outage.ended()
    finally:
        connection.close()  # each check has its own thread and connection


def ask_broker() -> None:
    with client() as broker:
        broker.ping()


class NotMigrated(Exception):
    """The database lacks migrations that this code needs; the message names them."""


_migrated = False
NAMED_MAX = 5


def ask_migrations() -> None:
    """Checked until all migrations are applied; they are not reversed while a process is running."""
    global _migrated
    if _migrated:
        return
    try:
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    finally:
        connection.close()
    if plan:
        names = [f"{migration.app_label}.{migration.name}" for migration, _ in plan]
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        raise NotMigrated(f"not applied: {', '.join(names[:NAMED_MAX])}{more}")
    _migrated = True


class Probe:
    """A check in a thread of its own, so that a check that hangs counts as a failure. At most one thread at a time, so
    that threads that hang do not accumulate.
    """

    def __init__(self, name: str, ask: Callable[[], None]) -> None:
        self.name = name
        self.ask = ask
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.state = UNAVAILABLE

    def start(self) -> None:
        with self.lock:
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name=f"probe-{self.name}", daemon=True)
                self.state = UNAVAILABLE
                self.thread.start()

    def answer(self, deadline: float) -> str:
        """The result by ``deadline`` (``time.monotonic``): ok, or the problem."""
        with self.lock:  # a thread that another request has created but not started can't be joined
            thread = self.thread
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.state

    def _run(self) -> None:
        try:
            self.ask()
            self.state = OK
        except NotMigrated as error:
            self.state = str(error)
        except CONNECTION_ERRORS as error:
            outage.failed(error)
        except Exception as error:  # any failure means "not ready"
            logger.warning("the %s does not answer (%s)", self.name, type(error).__name__)


PROBES = [
    Probe("database", lambda: ask_database()),
    Probe("migrations", lambda: ask_migrations()),
    Probe("broker", lambda: ask_broker()),
]


@csrf_exempt
@require_safe
def livez(request: HttpRequest) -> HttpResponse:
    return _answer(200, {"status": "ok"})


@csrf_exempt
@require_safe
def readyz(request: HttpRequest) -> HttpResponse:
    """200, or 503 naming what is wrong; in READINESS_TIMEOUT_SECONDS at most."""
    deadline = time.monotonic() + settings.READINESS_TIMEOUT_SECONDS
    for probe in PROBES:
        probe.start()
    checks = {probe.name: probe.answer(deadline) for probe in PROBES}
    ready = all(state == OK for state in checks.values())
    return _answer(200 if ready else 503, {"status": OK if ready else UNAVAILABLE, "checks": checks})


def _answer(status: int, body: dict) -> HttpResponse:
    response = HttpResponse(dumps(body), status=status, content_type="application/json")
    response["Cache-Control"] = "no-store"
    return response
