"""The loop of one run: durable steps, one after another, from the end of its journal; and all ways in which the run
ends here. Each step ends with one transaction that records its outcome. Between two steps, the run can move to another
process.
"""

import asyncio
import logging
from typing import Any

from django.db import IntegrityError

from config.telemetry.logs import request_id
from runs import lifecycle
from runs.engine import calls
from runs.engine.requests import Exhausted, RunFailed
from runs.engine.session import Interruption, Session
from runs.engine.turns import try_turn
from runs.errors import RunError
from runs.models import RunStatus

logger = logging.getLogger(__name__)


async def execute(session: Session) -> None:
    """Execute the run until it ends, waits, is handed over or belongs to another worker.

    Raises CancelledError if another worker has the run or this process ends: then nothing more may be written. Any
    other error comes from the transition that was to end the run.
    """
    request_id.set(session.run.request_id or session.run.id)
    # The transition that ends the run, with its arguments.
    end: tuple[Any, ...] | None = None
    is_behind = False
    # The journal's length when the database last refused a write because the row was already there.
    refused_at: tuple[int, int, int] | None = None
    while True:
        try:
            if is_behind:
                if not await session.reload():
                    logger.info("run %s is no longer this worker's", session.run.id)
                    return
                is_behind = False
            if end is None and session.run.cancel_requested_at is not None:
                end = (lifecycle.cancel,)
            if end is None:
                await _steps(session)
            elif session.run.status == RunStatus.RUNNING:
                await session.step(*end, partial=session.partial_charge(), stores_text=True)
            return
        except asyncio.CancelledError:
            if session.interruption is Interruption.BEHIND:
                session.interruption, is_behind = None, True
            elif session.interruption is Interruption.REQUESTED:
                end = (lifecycle.cancel,)
            else:
                raise
        except lifecycle.LeaseLost:
            is_behind = True
        except RunFailed as failure:
            end = (lifecycle.fail, failure.code, failure.message, failure.attempt, failure.reason)
        except Exception as error:
            if end is not None:
                raise
            # The answer to a commit was lost, and the repeated step found its own rows: the journal in the database is
            # ahead of the session's journal.
            if isinstance(error, IntegrityError) and refused_at != session.journal.length:
                logger.warning("run %s is read again after a write that was already there", session.run.id)
                refused_at, is_behind = session.journal.length, True
                continue
            logger.exception("run %s failed for an unexpected reason", session.run.id)
            end = (lifecycle.fail, RunError.INTERNAL_ERROR, "Something went wrong on our side.")


async def _steps(session: Session) -> None:
    """Make steps until the run is no longer running here. Raises RunFailed."""
    try:
        async with asyncio.timeout(max(0.0, session.remaining_seconds())) as scope:
            while session.run.status == RunStatus.RUNNING and not session.run.parked:
                if session.process.draining:
                    await session.step(lifecycle.hand_over)
                    return
                try:
                    if session.journal.open_calls:
                        await calls.resume(session)
                    else:
                        await try_turn(session)
                except Exhausted as step:
                    if not session.run.waits_for_credits:
                        raise
                    await session.step(lifecycle.pause, step.refusal, step.call)
    except TimeoutError:
        if not scope.expired():
            raise
        raise RunFailed(RunError.RUN_TIMEOUT, "The run took longer than it may.") from None
