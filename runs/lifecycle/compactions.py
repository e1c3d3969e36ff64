"""Compactions of a chat's transcript, recorded by the worker of the run that needs one. No status changes here."""

from __future__ import annotations

from django.db import transaction

from config.database.writes import Writes, insert
from runs import events
from runs.lifecycle import spending
from runs.lifecycle.crash import crash_after_commit
from runs.lifecycle.moves import Moved, fence, move_run
from runs.lifecycle.spending import Charge
from runs.models import Compaction, ModelAttempt, Run, RunStatus


@transaction.atomic
def record_compaction(run: Run, compaction: Compaction, charge: Charge | None) -> Moved:
    """Record a compaction and charge its summary. Its tokens are part of the run's usage."""
    fence(run)
    spending.charge(charge)
    also = Writes()
    also.insert(compaction)
    changes = spending.usage_of_summary(run, compaction)
    happened = [events.context_compacted(compaction)]
    moved = Moved(move_run(run, RunStatus.RUNNING, happened, owned=True, also=also, **changes))
    crash_after_commit("compaction")
    return moved


@transaction.atomic
def record_failed_summary(run: Run, attempt: ModelAttempt, partial: Charge | None) -> Moved:
    """The request for a summary failed: what the provider used is charged, and the rest of its hold is released. The
    attempt is for staff and for a later owner of the run; callers are not told.
    """
    fence(run)
    insert(attempt)
    return Moved(move_run(run, RunStatus.RUNNING, (), owned=True, **spending.settle(run, partial)))
