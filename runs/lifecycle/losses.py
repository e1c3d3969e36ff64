"""What becomes of running runs that lost their worker. ``sweeps`` finds them."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction
from django.db.models import QuerySet

from config.database.batches import limit_lock_wait
from config.kernel import clock
from config.queue.nudges import nudge_after_commit
from runs import metrics
from runs.errors import RunError
from runs.lifecycle import line, spending
from runs.lifecycle.line import EXECUTE, NUDGE_GRACE, promote_next
from runs.lifecycle.moves import HOUSEKEEPING_LOCK_SECONDS, lock_run, move_lost, move_run
from runs.lifecycle.runs import finish
from runs.models import Run, RunStatus


@transaction.atomic
def release(rows: QuerySet[Run], run_ids: Sequence[str]) -> list[str]:
    """The runs, which are some of ``rows``, lost their worker: another may take them over. Returns their ids, without
    those that are not of ``rows`` any more, or locked.

    What their open turns cost is charged by their next owner's claim, by their end or by ``settle_lost``: here it would
    lock the accounts of many users at once, and the runs would wait for each other's.
    """
    limit_lock_wait(HOUSEKEEPING_LOCK_SECONDS)
    running = rows.filter(pk__in=run_ids, status=RunStatus.RUNNING).order_by("pk")
    runs = list(running.select_for_update(no_key=True, skip_locked=True).only("running_since", "ran_ms"))
    if not runs:
        return []
    released = [run.pk for run in runs]
    move_lost(runs, due_at=clock.now() + NUDGE_GRACE)
    nudge_after_commit(EXECUTE, *released)
    metrics.lost(len(released))
    return released


@transaction.atomic
def settle_lost(run_id: str) -> None:
    """Charge the open turn of a released run that no worker has taken over yet, and release its hold."""
    limit_lock_wait(HOUSEKEEPING_LOCK_SECONDS)
    rows = Run.objects.filter(pk=run_id, status=RunStatus.RUNNING, worker_id=None, parked=False)
    if run := rows.select_for_update(no_key=True, skip_locked=True).first():
        changes = spending.settle(run)
        if changes:
            move_run(run, RunStatus.RUNNING, (), owned=False, **changes)


@transaction.atomic
def give_up(run_id: str) -> None:
    """A running run that lost its worker too often → failed. Any other run, and a locked one, is left as it is."""
    run = lock_run(run_id, wait=False)
    if run is None or run.status != RunStatus.RUNNING or run.worker_id is not None:
        return
    if run.lease_losses >= line.RUN_LEASE_LOSSES_MAX:
        message = f"The run lost its worker {run.lease_losses} times."
        finish(run, RunStatus.FAILED, promote_next(run), owned=False, code=RunError.WORKER_LOST, message=message)
