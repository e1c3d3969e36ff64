"""The text of a run's message: streamed, overtaken and joined. No status changes here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from django.db import transaction
from django.db.models import F

from config.database.writes import Writes
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


# For those runs that are as they are known and not locked: one locked run must not hold up the text of all runs.
_APPEND = """
    WITH given AS (
        SELECT * FROM unnest(%s::varchar[], %s::bigint[], %s::bigint[], %s::varchar[], %s::text[])
            AS given(run_id, "index", lease_token, worker_id, data)
    ), owned AS (
        SELECT given.run_id, given."index", given.data FROM given JOIN runs_run run ON run.id = given.run_id
        WHERE run.status = %s AND run.last_stream_index = given."index"
          AND run.lease_token = given.lease_token AND run.worker_id = given.worker_id
        FOR NO KEY UPDATE OF run SKIP LOCKED
    ), appended AS (
        INSERT INTO runs_runevent (run_id, "index", type, data, final, created_at)
        SELECT run_id, "index" + 1, %s, data, FALSE, %s FROM owned
    )
    UPDATE runs_run SET last_stream_index = last_stream_index + 1, unrecorded_text = TRUE, updated_at = %s
    FROM owned WHERE id = owned.run_id
"""


def append_text(batch: Sequence[tuple[Run, str]]) -> dict[str, Run]:
    """Append streamed text to many runs at once. Returns those runs by id as they then are; the row of a run that is
    missing is not as ``batch`` says. A run that another transaction has locked is returned as it was given, and nothing
    is written.
    """
    if Writes.are_one_statement() and _append_at_once(batch):
        return {run.pk: _with_text(run) for run, _ in batch}
    return _append_in_steps(batch)


def _append_at_once(batch: Sequence[tuple[Run, str]]) -> bool:
    """Whether all runs have their text. If not, some of them may have it (docs/decisions/0035)."""
    runs, now = [run for run, _ in batch], clock.now()
    texts = [to_text(events.message_delta(text)[1]) for _, text in batch]
    known = [[getattr(run, name) for run in runs] for name in ("pk", "last_stream_index", "lease_token", "worker_id")]
    writes = Writes()
    writes.execute(_APPEND, [*known, texts, RunStatus.RUNNING, StreamType.MESSAGE_DELTA, now, now])
    appended = writes.do()
    wakeups.after_commit(*(run.pk for run in runs))
    return appended == len(batch)


@transaction.atomic
def _append_in_steps(batch: Sequence[tuple[Run, str]]) -> dict[str, Run]:
    """``append_text`` on SQLite, and if some runs are locked or not as they are known."""
    ordered = sorted(batch, key=lambda item: item[0].pk)
    running = Run.objects.filter(pk__in=[run.pk for run, _ in ordered], status=RunStatus.RUNNING).order_by("pk")
    columns = ("pk", "last_stream_index", "lease_token", "worker_id")
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
    # ``_append_at_once``, or by a commit whose answer was lost. It holds less than ``text`` if more text came before
    # the repetition.
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
    return {run.pk: run for run in skipped} | {run.pk: _with_text(run) for run in [run for run, _ in owned] + written}


def _with_text(run: Run) -> Run:
    return changed(run, last_stream_index=run.last_stream_index + 1, unrecorded_text=True)


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
