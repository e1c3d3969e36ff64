"""The text of a run's message: streamed, overtaken and joined. No status changes here."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from django.db import connection, transaction

from config.database.queries import read
from config.kernel import clock
from config.kernel.jsontext import to_text
from config.queue import publisher
from runs import events
from runs.events import StreamEvent, StreamType, join_text
from runs.lifecycle.moves import LeaseLost, changed, move_run
from runs.models import Run, RunEvent, RunStatus, Turn


def reset_events(run: Run, recorded: str) -> list[StreamEvent]:
    """The events that start the message again with the text of the recorded turns."""
    return [events.message_reset(run), *text_events(recorded)]


# The columns in which a run's row must agree with what its owner knows.
KNOWN = ("last_stream_index", "lease_token", "worker_id")

# Only runs whose rows agree and are not locked get their text: one locked run must not delay the text of all runs.
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
    FROM owned WHERE id = owned.run_id RETURNING CAST(id AS varchar)
"""


def append_text(batch: Sequence[tuple[Run, str]]) -> dict[str, Run]:
    """Append streamed text to many runs at once. Returns the runs as they then are, by id, without those whose rows
    differ from ``batch``. A run that another transaction has locked is returned as it was given, without its text.
    """
    appended = (_append_at_once if connection.vendor == "postgresql" else _append_in_steps)(batch)
    publisher.wake_after_commit(*appended)
    found: dict[str, list[Any]] = {}
    if others := [run.pk for run, _ in batch if run.pk not in appended]:
        rows = Run.objects.filter(pk__in=others, status=RunStatus.RUNNING)
        found = {pk: known for pk, *known in rows.values_list("pk", *KNOWN)}
    written: dict[str, Run] = {}
    for run, text in batch:
        index, *lease = found.get(run.pk, [None])
        owned = lease == [run.lease_token, run.worker_id]
        if owned and index == run.last_stream_index:
            written[run.pk] = run  # the row is locked
        elif run.pk in appended or (owned and _is_last(run, text)):
            written[run.pk] = changed(run, last_stream_index=run.last_stream_index + 1, unrecorded_text=True)
    return written


def _append_at_once(batch: Sequence[tuple[Run, str]]) -> set[str]:
    runs, now = [run for run, _ in batch], clock.now()
    texts = [to_text(events.message_delta(text)[1]) for _, text in batch]
    known = [[getattr(run, name) for run in runs] for name in ("pk", *KNOWN)]
    values = [*known, texts, RunStatus.RUNNING, StreamType.MESSAGE_DELTA, now, now]
    return {run_id for (run_id,) in read(_APPEND, values)}


@transaction.atomic
def _append_in_steps(batch: Sequence[tuple[Run, str]]) -> set[str]:
    """``_append_at_once`` on SQLite, which has one writer at a time and no row locks."""
    appended: set[str] = set()
    for run, text in batch:
        with contextlib.suppress(LeaseLost):
            move_run(run, RunStatus.RUNNING, text_events(text), unrecorded_text=True)
            appended.add(run.pk)
    return appended


def _is_last(run: Run, text: str) -> bool:
    """Whether the only event after those that ``run`` knows is this text: only the owner adds to the stream of a
    running run, so the answer of a commit was lost. The event differs if more text came before the repetition.
    """
    ((kind, data),) = text_events(text)
    after = RunEvent.objects.filter(run_id=run.pk, index__gt=run.last_stream_index)
    return list(after.values_list("index", "type", "data")[:2]) == [(run.last_stream_index + 1, kind, to_text(data))]


def text_events(delta: str) -> list[StreamEvent]:
    return [events.message_delta(delta)] if delta else []


def recorded_text(run: Run) -> str:
    return join_text(Turn.objects.filter(run=run).order_by("index").values_list("text", flat=True))


def streamed_text(run: Run) -> str:
    """The message's text in the stream: the deltas since the last reset."""
    parts: list[str] = []
    kinds = [StreamType.MESSAGE_DELTA, StreamType.MESSAGE_RESET]
    rows = RunEvent.objects.filter(run=run, type__in=kinds).order_by("index")
    for kind, data in rows.values_list("type", "data"):
        if kind == StreamType.MESSAGE_RESET:
            parts.clear()
        else:
            parts.append(json.loads(data)["text"])
    return "".join(parts)
