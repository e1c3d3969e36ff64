"""The text of a run's message: streamed, overtaken and joined. No status changes here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from django.db import transaction
from django.db.models import F

from config.kernel import clock
from config.kernel.jsontext import to_text
from config.queue import wakeups
from runs import events
from runs.events import StreamEvent, StreamType
from runs.lifecycle.moves import changed, new_events
from runs.models import Run, RunEvent, RunStatus, Turn


def reset_events(run: Run, recorded: str) -> list[StreamEvent]:
    """The message starts again with the text that turns have recorded."""
    return [events.message_reset(run)] + ([events.message_delta(recorded)] if recorded else [])


@transaction.atomic
def append_text(batch: Sequence[tuple[Run, str]]) -> dict[str, Run]:
    """Append streamed text to many runs at once. Returns those runs by id as they then are; the row of a run that is
    missing is not as ``batch`` says. A run that another transaction has locked is returned as it was given, and nothing
    is written.
    """
    ordered = sorted(batch, key=lambda item: item[0].pk)
    running = Run.objects.filter(pk__in=[run.pk for run, _ in ordered], status=RunStatus.RUNNING).order_by("pk")
    columns = ("pk", "last_stream_index", "lease_token", "worker_id")
    # One locked run must not hold up the text of all runs.
    locked = running.select_for_update(no_key=True, skip_locked=True)
    found = {pk: (index, lease) for pk, index, *lease in locked.values_list(*columns)}
    before = [(run.last_stream_index, [run.lease_token, run.worker_id]) for run, _ in ordered]
    owned = [item for item, as_known in zip(ordered, before, strict=True) if found.get(item[0].pk) == as_known]
    skipped: list[Run] = []
    if len(found) < len(ordered):
        others = {pk: (index, lease) for pk, index, *lease in running.exclude(pk__in=found).values_list(*columns)}
        skipped = [run for (run, _), as_known in zip(ordered, before, strict=True) if others.get(run.pk) == as_known]
        found |= others
    # Only its owner adds to the stream of a running run: a row that is ahead by one under the same lease was written by
    # a commit whose answer was lost. It holds less than ``text`` if more text came before the repetition.
    written = [
        run
        for (run, text), (index, lease) in zip(ordered, before, strict=True)
        if found.get(run.pk) == (index + 1, lease) and _is_last(run, text)
    ]
    now = clock.now()
    RunEvent.objects.bulk_create(
        event for run, text in owned for event in new_events(run, [events.message_delta(text)], now)
    )
    Run.objects.filter(pk__in=[run.pk for run, _ in owned]).update(
        last_stream_index=F("last_stream_index") + 1, unrecorded_text=True, updated_at=now
    )
    wakeups.after_commit(*(run.pk for run, _ in owned))
    return {run.pk: run for run in skipped} | {
        run.pk: changed(run, last_stream_index=run.last_stream_index + 1, unrecorded_text=True)
        for run in [run for run, _ in owned] + written
    }


def _is_last(run: Run, text: str) -> bool:
    """Whether the event after the last one that ``run`` knows is this text."""
    ((kind, data),) = text_events(text)
    after = RunEvent.objects.filter(run_id=run.pk, index=run.last_stream_index + 1)
    return after.filter(type=kind, data=to_text(data)).exists()


def text_events(delta: str) -> list[StreamEvent]:
    return [events.message_delta(delta)] if delta else []


def join_text(texts: Iterable[str]) -> str:
    """A message's content from its turns' texts."""
    return "\n\n".join(text for text in texts if text)


def recorded_text(run: Run) -> str:
    """The message as its turns have it."""
    return join_text(Turn.objects.filter(run=run).order_by("index").values_list("text", flat=True))


def unrecorded_text(run: Run) -> str:
    """The streamed text that no turn has recorded."""
    return streamed_text(run)[len(recorded_text(run)) :] if run.unrecorded_text else ""


def streamed_text(run: Run) -> str:
    """The message as its stream has it: the deltas since the last reset."""
    parts: list[str] = []
    rows = RunEvent.objects.filter(run=run, type__in=[StreamType.MESSAGE_DELTA, StreamType.MESSAGE_RESET]).order_by(
        "index"
    )
    for kind, data in rows.values_list("type", "data"):
        if kind == StreamType.MESSAGE_RESET:
            parts.clear()
        else:
            parts.append(json.loads(data)["text"])
    return "".join(parts)
