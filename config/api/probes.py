"""Probes. ``/livez``: this process answers. ``/readyz``: the database answers too, and all migrations are applied.
Without the broker the process is degraded, and still ready: requests and runs go on without it.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from config.database.retry import CONNECTION_ERRORS, outage
from config.kernel.jsontext import dumps
from config.redis import client

# The time limit of `/readyz`, after which a load balancer may stop waiting, and the limit of the broker's check in it.
READINESS_TIMEOUT_SECONDS = 3.0
BROKER_SECONDS = 1.0

logger = logging.getLogger(__name__)

OK, DEGRADED, UNAVAILABLE = "ok", "degraded", "unavailable"


def ask_database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    outage.ended()


_migrated = False


def ask_migrations() -> str | None:
    """Checks until all migrations are applied; they are not reversed while a process is running."""
    global _migrated
    if not _migrated:
        executor = MigrationExecutor(connection)
        if plan := executor.migration_plan(executor.loader.graph.leaf_nodes()):
            return f"not applied: {', '.join(f'{each.app_label}.{each.name}' for each, _ in plan)}"
        _migrated = True
    return None


def ask_broker() -> None:
    with client() as broker:
        broker.ping()


class Probe:
    """A check on its own thread, so that one that hangs is a failure. Requests that ask meanwhile share its result."""

    def __init__(self, name: str, ask: Callable[[], str | None]) -> None:
        self.name, self.ask, self.lock = name, ask, threading.Lock()
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
            connection.close()  # each thread has its own


NEEDED = [Probe("database", lambda: ask_database()), Probe("migrations", lambda: ask_migrations())]
BROKER = Probe("broker", lambda: ask_broker())


@require_safe
def livez(request: HttpRequest) -> HttpResponse:
    return _answer(200, {"status": OK})


@require_safe
def readyz(request: HttpRequest) -> HttpResponse:
    """200, or 503 if the process cannot serve, naming what is wrong; in READINESS_TIMEOUT_SECONDS at most."""
    needed = {probe.name: probe.start() for probe in NEEDED}
    asked = needed | {BROKER.name: BROKER.start()}
    wait(asked.values(), BROKER_SECONDS)
    wait(needed.values(), READINESS_TIMEOUT_SECONDS - BROKER_SECONDS)
    checks = {name: check.result() if check.done() else UNAVAILABLE for name, check in asked.items()}
    if any(checks[name] != OK for name in needed):
        return _answer(503, {"status": UNAVAILABLE, "checks": checks})
    return _answer(200, {"status": OK if checks[BROKER.name] == OK else DEGRADED, "checks": checks})


def _answer(status: int, body: dict) -> HttpResponse:
    return HttpResponse(dumps(body), "application/json", status, headers={"Cache-Control": "no-store"})
