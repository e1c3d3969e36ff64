"""Database work that is repeated while the database is not available."""

import asyncio
import contextvars
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

from django.db import InterfaceError, OperationalError, connection

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# Django raises these when a connection is lost or cannot be opened, and when an answer takes too long.
CONNECTION_ERRORS = (OperationalError, InterfaceError)
# PostgreSQL's errors about a single statement: no lock in time, a deadlock, a concurrent change, a cancel.
STATEMENT_CODES = {"55P03", "40P01", "40001", "57014"}
WAIT_SECONDS, WAIT_SECONDS_MAX = 0.05, 2.0
LOG_SECONDS = 60.0  # in which a process logs one line: a thousand runs may fail at every step for hours
# A success ends an outage if nothing has failed for this time: other connections may still be failing.
CALM_SECONDS = 5.0


class Outage:
    """Logs when this process loses the database, then once in LOG_SECONDS, and when it is back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._failed_at = self._logged_at = float("-inf")

    def failed(self, error: Exception) -> None:
        with self._lock:
            now = time.monotonic()
            first, self._failed_at = self._failures == 0, now
            self._failures += 1
            if first or now - self._logged_at >= LOG_SECONDS:
                self._logged_at = now
                line = "the database is not available (%s; %d failures); trying again"
                logger.warning(line, reason(error), self._failures)

    def ended(self) -> bool:
        """Call this after each success. Returns False if it is too early to say that the outage is over."""
        if not self._failures:
            return True
        with self._lock:
            if self._failures and time.monotonic() - self._failed_at >= CALM_SECONDS:
                logger.warning("the database is available again after %d failures", self._failures)
                self._failures = 0
            return not self._failures


outage = Outage()


def is_unavailable(error: Exception) -> bool:
    """Whether the error is about the whole database, so that other statements would fail, too."""
    return isinstance(error, CONNECTION_ERRORS) and getattr(error.__cause__, "sqlstate", None) not in STATEMENT_CODES


def reason(error: Exception) -> str:
    """Why the database is not available, in one line; of a statement's error only the name: messages quote values."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if getattr(cause, "sqlstate", None):
        return type(cause).__name__
    return str(error).strip().partition("\n")[0] or type(error).__name__


def attempt(step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``step`` once. After one of CONNECTION_ERRORS, this thread's next step opens a new connection."""
    try:
        return step(*args, **kwargs)
    except CONNECTION_ERRORS:
        connection.close()
        raise


async def persist(threads: Executor, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``step`` on one of ``threads``, and again with growing waits while the database is not available. A cancel
    waits for the end of the running call. If a step fails, it must not have changed its arguments. It may be repeated
    after a successful commit, if the connection was lost before the confirmation.
    """
    wait = WAIT_SECONDS
    while True:
        work = partial(contextvars.copy_context().run, partial(attempt, step, *args, **kwargs))
        future = asyncio.get_running_loop().run_in_executor(threads, work)
        try:
            done = await asyncio.shield(future)
            outage.ended()
            return done
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()
            raise
        except CONNECTION_ERRORS as error:
            outage.failed(error)
        await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311
        wait = min(wait * 2, WAIT_SECONDS_MAX)


def look_for_database() -> None:
    """Log an outage of the database now, and not only when a first request or message needs it. Does not block."""

    def ask() -> None:
        try:
            connection.ensure_connection()
            outage.ended()
        except CONNECTION_ERRORS as error:
            outage.failed(error)
        finally:
            connection.close()

    threading.Thread(target=ask, name="database-at-start", daemon=True).start()
