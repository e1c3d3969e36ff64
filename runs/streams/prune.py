"""The periodic deletion of old stream events."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction

from config.database import batches
from config.kernel import clock
from config.kernel.ids import first_id
from config.queue import jobs
from runs.models import FINAL_RUN_STATUSES, Run, RunEvent

# A run of half an hour has up to 36,000 events, and a statement must end within DATABASE_ANSWER_SECONDS.
PRUNE_RUNS = 10


def prune() -> int:
    """Delete the events of runs that finished more than RUN_EVENT_RETENTION_DAYS ago. Returns how many were deleted."""
    before = clock.now() - timedelta(days=settings.RUN_EVENT_RETENTION_DAYS)
    return sum(jobs.each_batch("prune-run-events", _due(before), _delete_events, PRUNE_RUNS))


def _due(before: datetime) -> Iterator[str]:
    """The runs. Ids sort by creation time, so the index skips the events of younger runs, which are nearly all."""
    due = RunEvent.objects.filter(
        run_id__lt=first_id("run", before), run__finished_at__lt=before, run__status__in=FINAL_RUN_STATUSES
    )
    runs, last = due.order_by("run_id").values_list("run_id", flat=True).distinct(), ""
    while found := list(runs.filter(run_id__gt=last)[:PRUNE_RUNS]):
        yield from found
        last = found[-1]


@transaction.atomic
def _delete_events(run_ids: list[str]) -> list[int]:
    # Concurrent jobs skip the runs that another one has locked.
    locked = batches.take_batch(Run.objects.filter(pk__in=run_ids).order_by("pk"))
    return [batches.delete_rows(RunEvent, "run_id", locked)]
