"""Shortens a chat's transcript before a turn that would not fit into its model's window. Each step is recorded: later
turns and later runs of the chat use it, and another worker that takes the run over does not repeat it.
"""

from __future__ import annotations

from runs.catalogue.definitions import ModelDefinition
from runs.engine.context import summary
from runs.engine.context.plan import BYTES_PER_TOKEN_MAX, Plan, Step, is_for_run, is_fresh, plan_of, record
from runs.engine.session import Session
from runs.errors import FailureReason
from runs.llm.base import ModelError
from runs.models import CompactionKind


async def fit(session: Session, model: ModelDefinition) -> Plan | None:
    """The transcript of the next turn, shortened until it fits. None if the process drains.

    Raises ModelError for a message that no window can hold, and RunFailed.
    """
    if not _can_hold(session, model):
        detail = f"The message alone is too long for a window of {model.context_tokens} tokens."
        raise ModelError(FailureReason.CONTEXT_TOO_LONG, detail=detail)
    while True:
        plan = plan_of(session, model)
        step = _next_step(session, plan)
        if step is None or step.cut == plan.cut:
            return plan
        if session.process.draining:
            return None
        if step.kind == CompactionKind.SUMMARY and not is_for_run(session):
            if not await summary.summarise(session, plan, step):
                return None
        else:
            step = plan.left_out(step) if step.kind == CompactionKind.SUMMARY else step
            await record(session, plan, step)


def can_shorten(session: Session, model: ModelDefinition) -> bool:
    """Whether a request that was refused as too long is tried again: once with half of its size, and then in the
    shortest form.
    """
    if not _can_hold(session, model):
        return False
    return _refusals(session, model) < 2 and plan_of(session, model).shortest() is not None


def _can_hold(session: Session, model: ModelDefinition) -> bool:
    """Whether any tokenizer could fit the message alone into the model's window."""
    return len(session.history.message.text.encode()) <= BYTES_PER_TOKEN_MAX * model.context_tokens


def _refusals(session: Session, model: ModelDefinition) -> int:
    reason = FailureReason.CONTEXT_TOO_LONG
    return sum(attempt.reason == reason and attempt.model == model.name for attempt in session.journal.failed())


def _next_step(session: Session, plan: Plan) -> Step | None:
    refusals, newest = _refusals(session, plan.model), session.history.compaction
    if refusals:
        failed = len(session.journal.failed())
        if not is_fresh(session) or newest is None or newest.failed_attempts < failed:
            return (plan.next_step(plan.now // 2) if refusals == 1 else None) or plan.shortest()
    return plan.next_step()
