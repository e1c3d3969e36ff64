"""What streams read from the database, as a few queries for all streams of a process together; and the pruning of old
events. Reads only, but for ``prune``; blocking, so for threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import transaction
from django.db.models import Q, QuerySet

from apikeys.models import ApiKey
from chats.models import Message
from config.database import batches
from config.kernel import clock
from config.kernel.ids import first_id
from config.kernel.jsontext import to_text
from runs.lifecycle import events
from runs.models import FINAL_RUN_STATUSES, Run, RunEvent

PAGE_EVENTS = 200
PAGE_BYTES = 256 * 1024
TAIL_EVENTS = 2000
PRUNE_RUNS = 200
LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


@dataclass(frozen=True, slots=True)
class Frame:
    """An event as its bytes in the stream. ``ends``: it is its run's last."""

    index: int
    body: bytes
    ends: bool = False


def frame(index: int | None, kind: str, data: str) -> bytes:
    """``data`` is JSON text, which has no line break. Without an index a client's position stays what it was."""
    if not data.isascii():
        # Line breaks to Unicode, but not to JSON nor to server-sent events; many clients split lines as Unicode does.
        data = data.translate(LINE_BREAKS)
    position = "" if index is None else f"id: {index}\n"
    return f"{position}event: {kind}\ndata: {data}\n\n".encode("utf-8", "replace")


def is_final(kind: str, data: str) -> bool:
    return kind == "run.status" and any(f'"status":"{status}"' in data for status in FINAL_RUN_STATUSES)


def page(run_id: str, after: int) -> list[Frame]:
    """The next events of one run, PAGE_EVENTS or about PAGE_BYTES of them at most."""
    rows = RunEvent.objects.filter(run_id=run_id, index__gt=after).order_by("index")[:PAGE_EVENTS]
    frames: list[Frame] = []
    size = 0
    for index, kind, data in rows.values_list("index", "type", "data"):
        frames.append(Frame(index, frame(index, kind, data), is_final(kind, data)))
        size += len(frames[-1].body)
        if size >= PAGE_BYTES:
            break
    return frames


def tails(positions: dict[str, int]) -> tuple[list[tuple[str, Frame]], bool]:
    """The events of each run after its position, in order, in one query; and whether there may be more."""
    wanted = reduce(or_, (Q(run_id=run_id, index__gt=after) for run_id, after in positions.items()))
    rows = RunEvent.objects.filter(wanted).order_by("run_id", "index").values_list("run_id", "index", "type", "data")
    found = [
        (run_id, Frame(index, frame(index, kind, data), is_final(kind, data)))
        for run_id, index, kind, data in rows[:TAIL_EVENTS]
    ]
    return found, len(found) == TAIL_EVENTS


def positions(run_ids: list[str]) -> dict[str, int]:
    """How far each run's stream has got; a run that is no more is missing."""
    return dict(Run.objects.filter(pk__in=run_ids).values_list("pk", "last_stream_index"))


def live_credentials(user_ids: Iterable[int], key_ids: Iterable[str]) -> tuple[set[int], set[str]]:
    """Which of the users are active, and which of the keys may still read runs."""
    users = get_user_model()._default_manager.filter(pk__in=list(user_ids), is_active=True)
    keys = ApiKey.objects.filter(pk__in=list(key_ids), revoked_at=None, expires_at__gt=clock.now())
    return (
        set(users.values_list("pk", flat=True)),
        {key_id for key_id, scopes in keys.values_list("pk", "scopes") if "runs:read" in scopes},
    )


def rebuilt(run_id: str, after: int) -> list[Frame]:
    """The end of a finished run's stream whose events are pruned, under the indexes that its last events had.

    Whoever has received some of the text gets ``message.reset`` first, as the text comes whole again.
    """
    run = Run.objects.filter(pk=run_id).first()
    if run is None or run.status not in FINAL_RUN_STATUSES:
        return []
    last = run.last_stream_index
    message = Message.objects.filter(pk=run.assistant_message_id).first() if run.assistant_message_id else None
    found: list[Frame] = []
    if message is not None and message.content:
        text = _frame(last - 2, *events.message_delta(message.content))
        if after:
            text = _frame(None, *events.message_reset(run)) + text
        found.append(Frame(last - 2, text))
        found.append(Frame(last - 1, _frame(last - 1, *events.message_completed(run, message.content))))
    kind, data = events.run_status(run, run.status, run.error_code, run.error_message)
    found.append(Frame(last, _frame(last, kind, data | {"at": clock.iso(run.finished_at)}), ends=True))
    return [frame for frame in found if frame.index > after]


def _frame(index: int | None, kind: str, data: dict[str, Any]) -> bytes:
    return frame(index, kind, to_text(data))


def prune() -> int:
    """Drop the events of runs that finished over RUN_EVENT_RETENTION_DAYS ago, a batch of runs at a time, each run's
    at once. Returns how many runs.
    """
    before = clock.now() - timedelta(days=settings.RUN_EVENT_RETENTION_DAYS)
    # Ids sort by the time they were made, so younger runs' events, which are nearly all, are not even looked at.
    due = RunEvent.objects.filter(
        run_id__lt=first_id("run", before), run__finished_at__lt=before, run__status__in=FINAL_RUN_STATUSES
    )
    return batches.in_batches(lambda: _prune_batch(due))


@transaction.atomic
def _prune_batch(due: QuerySet[RunEvent]) -> int:
    run_ids = list(due.order_by("run_id").values_list("run_id", flat=True).distinct()[:PRUNE_RUNS])
    # Of several at once, each takes runs that no other has.
    taken = batches.take_batch(Run.objects.filter(pk__in=run_ids).order_by("pk"), PRUNE_RUNS)
    batches.delete_rows(RunEvent.objects.filter(run_id__in=taken))
    return len(taken)
