"""The threads that run database work for the event loop, each with a connection of its own."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

RETRY_SECONDS_MAX = 2.0
# PostgreSQL ended the connection because this process was suspended in a transaction:
# DATABASE_IDLE_TRANSACTION_SECONDS. To Django that is an InternalError.
IDLE_TOO_LONG = "25P03"


class Database:
    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(settings.RUN_WORKER_DB_THREADS, "run-db")

    async def run(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a step on a thread, and repeat it while the database is away. If the caller is cancelled, the step ends
        first.

        A step must leave its arguments as they are if it fails. It may be repeated after a commit whose answer was
        lost.
        """
        delay = 0.05
        while True:
            # The copied context makes the thread log under this run's request id.
            attempt = partial(contextvars.copy_context().run, _attempt, step, args, kwargs)
            future = asyncio.get_running_loop().run_in_executor(self.threads, attempt)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                await asyncio.wait([future])
                if not future.cancelled():
                    future.exception()
                raise
            except (OperationalError, InterfaceError) as error:
                logger.warning("the database did not answer (%s); trying again", type(error).__name__)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311
            delay = min(delay * 2, RETRY_SECONDS_MAX)

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)


def _attempt(step: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    try:
        return step(*args, **kwargs)
    except BaseException as error:
        if getattr(error.__cause__, "sqlstate", None) == IDLE_TOO_LONG:
            error = OperationalError(*error.args)
        if isinstance(error, (OperationalError, InterfaceError)):
            connection.close()
        raise error
