"""The periodic deletion of old stream events."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from config.database import batches
from config.database.partitions import WEEK, WeeklyPartitions
from config.kernel import clock
from config.kernel.ids import first_id
from config.queue import jobs
from runs.models import FINAL_RUN_STATUSES, Run, RunEvent

# A run of half an hour has up to 36,000 events, and a statement must end within DATABASE_ANSWER_SECONDS.
PRUNE_RUNS = 10
EVENTS = WeeklyPartitions("runs_runevent", "run_id", partial(first_id, "run"), "runs_run")


def prune() -> int:
    """Remove the events of runs that finished more than RUN_EVENT_RETENTION_DAYS ago. Returns the number of runs whose
    events were deleted; those of dropped partitions are not counted.

    On PostgreSQL a week of events is dropped at once, as soon as all its runs are that old. If this takes a week
    longer than for a run that ends at once, its events are deleted like those of SQLite, PRUNE_RUNS runs a transaction.
    """
    before = clock.now() - timedelta(days=settings.RUN_EVENT_RETENTION_DAYS)

    def create_partitions() -> int:
        EVENTS.create_ahead(clock.now())
        return 0

    def drop_partitions() -> int:
        for week in EVENTS.weeks():
            if week + WEEK <= before and not _is_needed(week, before):
                EVENTS.drop(week)
        return 0

    def delete() -> int:
        to_be_dropped = [week for week in EVENTS.weeks() if week + 2 * WEEK > before]
        # Ids sort by creation time, so the index skips the events of younger runs, which are nearly all events.
        due = RunEvent.objects.filter(
            run_id__lt=first_id("run", min([before, *to_be_dropped])),
            run__finished_at__lt=before,
            run__status__in=FINAL_RUN_STATUSES,
        )
        return sum(jobs.each("prune-run-events", _batches(due), partial(_prune_batch, due)))

    return jobs.stages("prune-run-events", create_partitions, drop_partitions, delete)


def _is_needed(week: datetime, before: datetime) -> bool:
    """Whether a run of the week had not finished at ``before``. The last runs of a week are most likely to be one."""
    needed = Run.objects.exclude(status__in=FINAL_RUN_STATUSES, finished_at__lt=before).order_by("-pk")
    # No index has the time of the end, and a statement must end within DATABASE_ANSWER_SECONDS.
    days = [first_id("run", week + timedelta(days=day)) for day in range(WEEK.days + 1)]
    return any(
        needed.filter(pk__gte=begin, pk__lt=end).values("pk").first() for begin, end in reversed([*pairwise(days)])
    )


def _batches(due: QuerySet[RunEvent]) -> Iterator[tuple[str, str]]:
    """The first and the last run of each batch."""
    last = ""
    while run_ids := list(
        due.filter(run_id__gt=last).order_by("run_id").values_list("run_id", flat=True).distinct()[:PRUNE_RUNS]
    ):
        last = run_ids[-1]
        yield run_ids[0], last


@transaction.atomic
def _prune_batch(due: QuerySet[RunEvent], between: tuple[str, str]) -> int:
    among = due.filter(run_id__gte=between[0], run_id__lte=between[1])
    run_ids = list(among.order_by("run_id").values_list("run_id", flat=True).distinct())
    # Concurrent prunes skip the runs that another one has locked. What was due before the lock may be deleted by now.
    locked = batches.take_batch(Run.objects.filter(pk__in=run_ids).order_by("pk"), len(run_ids))
    still_due = list(due.filter(run_id__in=locked).order_by("run_id").values_list("run_id", flat=True).distinct())
    batches.delete_rows(RunEvent, "run_id", still_due)
    return len(still_due)
