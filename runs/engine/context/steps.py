"""The rows of compactions."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from config.kernel import clock
from runs import lifecycle
from runs.engine.context.plan import Plan, Step
from runs.engine.session import Session
from runs.models import Compaction


def next_index(session: Session) -> int:
    newest = session.history.compaction
    return newest.index + 1 if newest is not None and newest.run_id == session.run.id else 1


def is_fresh(session: Session) -> bool:
    """Whether the transcript was shortened since the last turn: the next request is not that turn's with more."""
    newest, turn_index = session.history.compaction, len(session.journal.turns) + 1
    return newest is not None and (newest.run_id, newest.turn_index) == (session.run.id, turn_index)


def is_for_run(session: Session) -> bool:
    """Whether the newest compaction counts for this run only: then so do those after it, without a summary, because
    runs are missing that later runs of the chat are to have.
    """
    newest = session.history.compaction
    return newest is not None and newest.only_run


async def record(
    session: Session,
    plan: Plan,
    step: Step,
    started_at: datetime | None = None,
    charge: lifecycle.Charge | None = None,
    **of_summary: Any,
) -> None:
    """Make a step. ``of_summary`` are columns of its row."""
    shortened = session.history.shortened(step.cut)
    now = clock.now()
    compaction = Compaction(
        chat_id=session.run.chat_id,
        run=session.run,
        index=next_index(session),
        turn_index=len(session.journal.turns) + 1,
        failed_attempts=len(session.journal.failed_attempts),
        kind=step.kind,
        only_run=step.only_run or is_for_run(session),
        tokens_before=plan.now,
        tokens_after=replace(plan, history=shortened).now,
        started_at=started_at or now,
        finished_at=now,
        **asdict(step.cut),
        **of_summary,
    )
    await session.step(lifecycle.record_compaction, compaction, charge)
    session.history = replace(shortened, compaction=compaction)
