"""The periodic deletion of old stream events."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from config.database import batches
from config.kernel import clock
from config.kernel.ids import first_id
from runs.models import FINAL_RUN_STATUSES, Run, RunEvent

PRUNE_RUNS = 200


def prune() -> int:
    """Delete the events of runs that finished more than RUN_EVENT_RETENTION_DAYS ago, PRUNE_RUNS runs a transaction.

    Returns the number of runs.
    """
    before = clock.now() - timedelta(days=settings.RUN_EVENT_RETENTION_DAYS)
    # Ids sort by creation time, so the index skips the events of younger runs, which are nearly all events.
    due = RunEvent.objects.filter(
        run_id__lt=first_id("run", before), run__finished_at__lt=before, run__status__in=FINAL_RUN_STATUSES
    )
    return batches.in_batches(lambda: _prune_batch(due))


@transaction.atomic
def _prune_batch(due: QuerySet[RunEvent]) -> int:
    run_ids = list(due.order_by("run_id").values_list("run_id", flat=True).distinct()[:PRUNE_RUNS])
    # Concurrent prunes skip the runs that another one has locked. What was due before the lock may be deleted by now.
    locked = batches.take_batch(Run.objects.filter(pk__in=run_ids).order_by("pk"), PRUNE_RUNS)
    still_due = list(due.filter(run_id__in=locked).values_list("run_id", flat=True).distinct())
    batches.delete_rows(RunEvent, "run_id", still_due)
    return len(still_due)
