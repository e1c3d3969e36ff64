"""Database work that is repeated while the database is not available."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

from django.db import DatabaseError, InterfaceError, OperationalError, connection

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# What Django raises when the connection is lost or cannot be made.
AWAY = (OperationalError, InterfaceError)
# PostgreSQL ended the connection, because this process was suspended in a transaction for longer than
# DATABASE_IDLE_TRANSACTION_SECONDS. To Django that is an InternalError.
LOST_CODES = {"25P03"}
WAIT_SECONDS, WAIT_SECONDS_MAX = 0.05, 2.0


def attempt(step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``step`` on this thread's connection. If the database was away, it raises one of ``AWAY`` and drops the
    connection, so that the next step gets a new one. Other errors pass unchanged.
    """
    try:
        return step(*args, **kwargs)
    except AWAY:
        connection.close()
        raise
    except DatabaseError as error:
        if getattr(error.__cause__, "sqlstate", None) not in LOST_CODES:
            raise
        connection.close()
        raise OperationalError(*error.args) from error


async def persist(threads: Executor, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``step`` on one of ``threads``, and again with growing waits while the database is not available.

    A try is never abandoned half-way: a cancel waits for the one that is running. A step must leave its arguments as
    they are if it fails, and may be repeated after a commit whose answer was lost.
    """
    wait = WAIT_SECONDS
    while True:
        work = partial(contextvars.copy_context().run, partial(attempt, step, *args, **kwargs))
        future = asyncio.get_running_loop().run_in_executor(threads, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()
            raise
        except AWAY as error:
            logger.warning("the database is not available (%s); trying again", type(error).__name__)
        await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311
        wait = min(wait * 2, WAIT_SECONDS_MAX)
