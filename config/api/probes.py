"""Probes. ``/livez``: this process answers. ``/readyz``: the database answers too, and all migrations are applied.
Without the broker the process is degraded, and still ready: requests and runs go on without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe

from config.database.retry import CONNECTION_ERRORS, outage
from config.kernel.jsontext import dumps
from config.redis import client

# Time limit of `/readyz`.
READINESS_TIMEOUT_SECONDS = 3.0

logger = logging.getLogger(__name__)

OK, DEGRADED, UNAVAILABLE = "ok", "degraded", "unavailable"
# The part of READINESS_TIMEOUT_SECONDS that a broker without an answer may take: a load balancer may wait no longer.
BROKER_SHARE = 1 / 3


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


_migrated = False
NAMED_MAX = 5


def ask_migrations() -> str | None:
    """Checked until all migrations are applied; they are not reversed while a process is running."""
    global _migrated
    if _migrated:
        return None
    try:
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    finally:
        connection.close()
    if plan:
        names = [f"{migration.app_label}.{migration.name}" for migration, _ in plan]
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        return f"not applied: {', '.join(names[:NAMED_MAX])}{more}"
    _migrated = True
    return None


class Probe:
    """A check in a thread of its own, so that a check that hangs counts as a failure. Requests that ask meanwhile share
    its result, so that threads that hang do not accumulate.
    """

    def __init__(self, name: str, ask: Callable[[], str | None]) -> None:
        self.name = name
        self.ask = ask
        self.lock = threading.Lock()
        self.check: Future[str] = Future()
        self.check.set_result(UNAVAILABLE)

    def start(self) -> Future[str]:
        """The result of the check that runs, or of a new one: ok, or the problem."""
        with self.lock:
            if self.check.done():
                self.check = Future()
                threading.Thread(target=self._run, args=(self.check,), name=f"probe-{self.name}", daemon=True).start()
            return self.check

    def _run(self, check: Future[str]) -> None:
        state = UNAVAILABLE
        try:
            state = self.ask() or OK
        except CONNECTION_ERRORS as error:
            outage.failed(error)
        except Exception as error:  # any failure means "not ready"
            logger.warning("the %s does not answer (%s)", self.name, type(error).__name__)
        finally:
            check.set_result(state)


def by(deadline: float, check: Future[str]) -> str:
    """The check's result at ``deadline`` (``time.monotonic``)."""
    try:
        return check.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return UNAVAILABLE


NEEDED = [Probe("database", lambda: ask_database()), Probe("migrations", lambda: ask_migrations())]
BROKER = Probe("broker", lambda: ask_broker())


@csrf_exempt
@require_safe
def livez(request: HttpRequest) -> HttpResponse:
    return _answer(200, {"status": "ok"})


@csrf_exempt
@require_safe
def readyz(request: HttpRequest) -> HttpResponse:
    """200, or 503 if the process cannot serve, naming what is wrong; in READINESS_TIMEOUT_SECONDS at most."""
    asked_at = time.monotonic()
    started, asked = {probe.name: probe.start() for probe in NEEDED}, BROKER.start()
    checks = {name: by(asked_at + READINESS_TIMEOUT_SECONDS, check) for name, check in started.items()}
    ready = all(state == OK for state in checks.values())
    checks[BROKER.name] = broker = by(asked_at + READINESS_TIMEOUT_SECONDS * BROKER_SHARE, asked)
    status = UNAVAILABLE if not ready else OK if broker == OK else DEGRADED
    return _answer(200 if ready else 503, {"status": status, "checks": checks})


def _answer(status: int, body: dict) -> HttpResponse:
    response = HttpResponse(dumps(body), status=status, content_type="application/json")
    response["Cache-Control"] = "no-store"
    return response
