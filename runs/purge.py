"""Deletes the runs of a purged chat with all that belongs to them, and the old events of other runs."""

import logging
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Max, Q, QuerySet
from django.dispatch import receiver

from chats.services import chat_purged
from config.database import batches
from config.kernel import clock
from config.kernel.ids import first_id
from config.queue import jobs
from runs import models
from runs.models import FINAL_RUN_STATUSES, LIVE_RUN_STATUSES, CountedBeginning, Run, RunEvent, ToolInvocation
from runs.tools import builtin, files
from runs.tools.base import BUILTIN

logger = logging.getLogger(__name__)

RUNS_BATCH = 10
# For each run: a statement must end within DATABASE_ANSWER_SECONDS, and a run may have a million events.
EVENTS_BATCH = 10_000


@receiver(chat_purged, dispatch_uid="runs.purge")
def purge_runs_of(sender: type, chat_id: str, **kwargs: Any) -> bool:
    """Returns True if runs remain. Raises Unavailable if the storage cannot delete their files now."""
    runs = Run.objects.filter(chat=chat_id)
    if runs.filter(status__in=LIVE_RUN_STATUSES).exists():
        logger.error("chat %s is not purged: it is deleted, but one of its runs has not ended", chat_id)
        return True
    batches.in_batches(lambda: _purge_batch(runs))
    return runs.exists()


def _purge_batch(runs: QuerySet[Run]) -> int:
    batch = list(runs.order_by("pk").values_list("pk", flat=True)[:RUNS_BATCH])
    # Calls of other types can have images, which are stored even if no outcome was recorded.
    stores_files = [name for name, tool in builtin.TOOLS.items() if tool.stores_files]
    calls = ToolInvocation.objects.filter(~Q(node_type=BUILTIN) | Q(name__in=stores_files), run__in=batch)
    for call_id in calls.values_list("pk", flat=True):
        files.remove_all(call_id)
    _delete_events(batch)
    if batches.stopping.is_set():
        return 0
    with transaction.atomic():
        taken = batches.take_batch(Run.objects.filter(pk__in=batch).order_by("pk"), to_delete=True)
        first = (models.ClientRun, RunEvent, models.RunMetadata, models.Waitpoint, ToolInvocation)
        for model in (*first, models.ModelAttempt, models.Compaction, models.Turn):
            batches.delete_rows(model, "run_id", taken)
        batches.delete_rows(Run, "id", taken)
    return len(taken)


def prune_events() -> int:
    """Delete the events of runs that finished more than RUN_EVENT_RETENTION_DAYS ago, and counts of providers that are
    older; those are learned again if they are needed. Returns how many rows were deleted.
    """
    before = clock.now() - timedelta(days=settings.RUN_EVENT_RETENTION_DAYS)
    old = CountedBeginning.objects.filter(created_at__lt=before)
    counts = batches.in_batches(lambda: batches.delete_batch(old))
    return counts + sum(jobs.each_batch("prune-run-events", _due(before), _delete_events, RUNS_BATCH))


def _due(before: datetime) -> Iterator[str]:
    """The runs with old events. Ids sort by creation time, so the index skips the events of younger runs."""
    ended = {"run__finished_at__lt": before, "run__status__in": FINAL_RUN_STATUSES}
    due = RunEvent.objects.filter(run_id__lt=first_id("run", before), **ended)
    runs, last = due.order_by("run_id").values_list("run_id", flat=True).distinct(), ""
    while found := list(runs.filter(run_id__gt=last)[:RUNS_BATCH]):
        yield from found
        last = found[-1]


def _delete_events(run_ids: list[str]) -> list[int]:
    deleted, last = 0, Run.objects.filter(pk__in=run_ids).aggregate(last=Max("last_stream_index"))["last"] or 1
    for index in range(EVENTS_BATCH, last + EVENTS_BATCH, EVENTS_BATCH):
        if batches.stopping.is_set():
            break
        with transaction.atomic():
            # Concurrent jobs skip runs that another job has locked.
            locked = batches.take_batch(Run.objects.filter(pk__in=run_ids).order_by("pk"))
            deleted += RunEvent.objects.filter(run__in=locked, index__lte=index).delete()[0]
    return [deleted]
