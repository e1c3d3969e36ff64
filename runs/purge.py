"""What a purged chat's runs held: turns, calls with their files, waitpoints, events, and the runs themselves."""

from __future__ import annotations

import logging
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.dispatch import receiver

from chats.services import chat_purged
from config.database import batches
from runs.models import LIVE_RUN_STATUSES, Run, RunEvent, ToolInvocation, Turn, Waitpoint
from runs.tools import files
from runs.tools.builtin import file_name_of

logger = logging.getLogger(__name__)

RUNS_BATCH = 50


@receiver(chat_purged, dispatch_uid="runs.purge")
def purge_runs_of(sender: type, chat_id: str, **kwargs: Any) -> bool:
    """True if runs are left. Raises Unavailable if files of them can't be removed now."""
    runs = Run.objects.filter(chat=chat_id)
    if runs.filter(status__in=LIVE_RUN_STATUSES).exists():
        logger.error("chat %s is not purged: it was deleted, but a run of it lives", chat_id)
        return True
    batches.in_batches(lambda: _purge_batch(runs))
    return runs.exists()


def _purge_batch(runs: QuerySet[Run]) -> int:
    batch = list(runs.order_by("pk").values_list("pk", flat=True)[:RUNS_BATCH])
    calls = ToolInvocation.objects.filter(run__in=batch, node_type="builtin")
    for call in calls.only("id", "name", "input", "result_urls"):
        if name := file_name_of(call.name, call.input):
            files.remove(call.id, name, call.result_urls)
    with transaction.atomic():
        taken = batches.take_batch(Run.objects.filter(pk__in=batch).order_by("pk"))
        for model in (RunEvent, Waitpoint, ToolInvocation, Turn):
            batches.delete_rows(model._base_manager.filter(run__in=taken))
        batches.delete_rows(Run.objects.filter(pk__in=taken))
    return len(taken)
