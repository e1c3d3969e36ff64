"""Reads what a run's transcript needs of its chat: a constant number of queries, and of the content no more than the
model's window can hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from django.db import connection
from django.db.models import Sum
from django.db.models.functions import Length

from chats.attachments import attached_to
from chats.models import Message
from config.database.queries import read
from config.kernel.ids import any_of, array
from config.kernel.jsontext import from_text
from runs.engine.transcript import (
    NOTE_CHARS,
    Cut,
    Result,
    RunPart,
    TurnPart,
    cut_of,
    images,
    outcome,
    turn_part,
)
from runs.lifecycle import join_text
from runs.llm.base import AttachedFile, UserMessage
from runs.models import Compaction, Run, ToolInvocation
from runs.tools import base

# Most earlier runs of the chat that the model receives.
RUN_HISTORY_RUNS = 50

# English has about four bytes a token; with more, a window holds less text than is read.
WINDOW_BYTES_PER_TOKEN = 5


@dataclass(frozen=True, slots=True)
class Report:
    """What a provider counted for a request of ``size`` bytes, as ``runs.llm.measure`` counts them."""

    origin: str
    tokens: int
    size: int


@dataclass(frozen=True, slots=True)
class Older:
    """An earlier run that is not loaded, because the window could not hold it."""

    run_id: str
    full_size: int


@dataclass(frozen=True, slots=True)
class History:
    """A run's own message and the chat before it: ``runs`` are loaded, ``older`` come before them. ``compaction`` is
    the chat's newest one.
    """

    message: UserMessage
    runs: tuple[RunPart, ...] = ()
    older: tuple[Older, ...] = ()
    cut: Cut = field(default_factory=Cut)
    compaction: Compaction | None = None
    reports: tuple[Report, ...] = ()

    @property
    def earlier(self) -> tuple[Older | RunPart, ...]:
        return (*self.older, *self.runs)

    def after(self, run_id: str | None) -> tuple[tuple[Older, ...], tuple[RunPart, ...]]:
        """``older`` and ``runs`` after a run; all of them if it is none of them."""
        ids = [run.run_id for run in self.earlier]
        gone = ids.index(run_id) + 1 if run_id in ids else 0
        return self.older[gone:], self.runs[max(0, gone - len(self.older)) :]

    def shortened(self, cut: Cut) -> History:
        older, runs = self.after(cut.last_run_id)
        return replace(self, runs=runs, older=older, cut=cut)


_BYTES = {"postgresql": "octet_length({})", "sqlite": "length(CAST({} AS BLOB))"}

# The runs of the chat up to this one, newest first, with the sizes of what a transcript has of them: all, and notes
# in place of results.
_RUNS = """
    SELECT CAST(run.id AS varchar),
           CASE WHEN run.id = %s THEN CAST(message.content AS text) ELSE '' END,
           EXISTS (SELECT 1 FROM chats_attachment WHERE message_id = message.id),
           CAST({content} + COALESCE((
               SELECT SUM({text} + {tool_calls} + {reasoning} + 64) FROM runs_turn turn WHERE turn.run_id = run.id
           ), 0) AS bigint),
           CAST(COALESCE((
               SELECT SUM({result} + 64) FROM runs_toolinvocation call WHERE call.run_id = run.id
           ), 0) AS bigint),
           CAST(COALESCE((
               SELECT SUM(CASE WHEN {result} < {note} THEN {result} ELSE {note} END + 64)
               FROM runs_toolinvocation call WHERE call.run_id = run.id
           ), 0) AS bigint),
           CAST((
               SELECT MAX(id) FROM runs_compaction WHERE chat_id = run.chat_id AND (NOT only_run OR run_id = %s)
           ) AS bigint)
    FROM (
        SELECT id, chat_id, created_at, user_message_id FROM runs_run
        WHERE chat_id = %s AND (created_at, id) <= ((SELECT created_at FROM runs_run WHERE id = %s), %s)
        ORDER BY created_at DESC, id DESC LIMIT %s
    ) run
    JOIN chats_message message ON message.id = run.user_message_id
    ORDER BY run.created_at DESC, run.id DESC
"""
# The content of runs: their calls, messages and turns, in rows of the same columns. Of each result the first
# characters, of a result with a note none. The assistant's message only if the run's turns do not have its text.
_CONTENT = """
    SELECT CAST('call' AS varchar), CAST(run_id AS varchar), CAST(turn_index AS bigint), CAST(call_index AS bigint),
           CAST(length(result) AS bigint),
           CASE WHEN length(result) > {note} AND (run_id {any_of} OR (run_id = %s AND turn_index <= %s))
                THEN '' ELSE substr(result, 1, %s) END,
           CAST(id AS varchar), CAST(tool_call_id AS varchar), CAST(name AS varchar), CAST(status AS varchar),
           CAST(result_urls AS text), CAST(error_code AS varchar), CAST(error_message AS text)
    FROM runs_toolinvocation WHERE run_id {any_of}
    UNION ALL
    SELECT 'message', run.id, 0, 0, CASE WHEN EXISTS (SELECT 1 FROM chats_attachment WHERE message_id = message.id)
                                         THEN 1 ELSE 0 END,
           message.content, message.id, message.role, '', '', '', '', ''
    FROM runs_run run JOIN chats_message message ON message.run_id = run.id
    WHERE run.id {any_of}
      AND (message.id = run.user_message_id OR run.status <> 'completed' OR run.turn_count = 0)
    UNION ALL
    SELECT 'turn', run_id, "index", CASE WHEN estimated THEN 0 ELSE input_tokens END, context_bytes,
           text, CAST(tool_calls AS text), CAST(reasoning AS text), origin, '', '', '', ''
    FROM runs_turn WHERE run_id {any_of}
"""


def load(run: Run, context_tokens: int) -> History:
    """The run's message, and of the chat before it what a window of ``context_tokens`` can hold."""
    most = RUN_HISTORY_RUNS
    listed = read(_sql(_RUNS), [run.pk, run.pk, run.chat_id, run.pk, run.pk, most + 2 if most else 1])
    (_, content, has_files, own_size, *_, newest), *earlier = listed
    compaction = Compaction.objects.get(pk=newest) if newest is not None else None
    cut = cut_of(compaction, run.pk) if compaction else Cut()
    if not most:
        cut = replace(cut, last_run_id=None, text="")
    ids = [row[0] for row in earlier]
    if cut.last_run_id in ids:
        earlier = earlier[: ids.index(cut.last_run_id)]
    noted = set(ids if cut.notes_run_id == run.pk else ())
    rest = 0
    if cut.notes_run_id in ids:
        noted.update(ids[ids.index(cut.notes_run_id) :])
        rest = _results_after(cut)
    room = context_tokens * WINDOW_BYTES_PER_TOKEN - own_size
    loaded: list[str] = []
    older: list[Older] = []
    for run_id, _, _, size, results, notes, _ in earlier:
        shown = results if run_id not in noted else notes + (rest if run_id == cut.notes_run_id else 0)
        room -= size + shown
        if room >= 0 and not older:
            loaded.append(run_id)
        else:
            older.append(Older(run_id, size + results))
    loaded.reverse()
    parts, reports = _load_parts(loaded, cut, noted - {cut.notes_run_id or ""}, base.TOOL_RESULT_MAX_CHARS)
    message = UserMessage(content, _files([run.user_message_id])[run.user_message_id] if has_files else ())
    sizes = {row[0]: row[3] + row[4] for row in earlier}
    return History(
        message,
        tuple(replace(part, full_size=sizes[part.run_id]) for part in parts),
        tuple(reversed(older)),
        cut,
        compaction,
        reports,
    )


def read_whole(run_ids: Sequence[str], result_chars: int) -> list[RunPart]:
    """Runs with their results, each of at most ``result_chars``, also those that have a note in the transcript."""
    return _load_parts(run_ids, Cut(), (), result_chars)[0]


def _sql(statement: str) -> str:
    size = _BYTES[connection.vendor]
    return statement.format(
        content=size.format("message.content"),
        text=size.format("turn.text"),
        tool_calls=size.format("CAST(turn.tool_calls AS text)"),
        reasoning=size.format("CAST(turn.reasoning AS text)"),
        result=size.format("call.result"),
        note=NOTE_CHARS,
        any_of=any_of(),
    )


def _results_after(cut: Cut) -> int:
    """About the bytes of those results of the run of the last note that have none."""
    calls = ToolInvocation.objects.filter(run=cut.notes_run_id, turn_index__gt=cut.notes_turn)
    return int(calls.aggregate(size=Sum(Length("result"), default=0))["size"])


def _load_parts(
    run_ids: Sequence[str], cut: Cut, noted: Iterable[str], result_chars: int
) -> tuple[list[RunPart], tuple[Report, ...]]:
    """The runs in the given order, and what providers counted for their last requests. ``noted`` are the runs in which
    notes stand for all results.
    """
    if not run_ids:
        return [], ()
    wanted = array(run_ids)
    chars = [array(noted), cut.notes_run_id or "", cut.notes_turn, result_chars]
    rows = read(_sql(_CONTENT), [*chars, wanted, wanted, wanted])
    results: dict[tuple[str, int], list[Result]] = {}
    users: dict[str, tuple[str, str, bool]] = {}
    answers: dict[str, str] = {}
    turns: dict[str, list[TurnPart]] = {}
    reports: dict[str, dict[str, Report]] = {}
    # A turn comes after the calls. Sorted here, because the database would sort large rows on its disk.
    for kind, run_id, index, number, size, text, *texts in sorted(rows, key=lambda row: tuple(row[:4])):
        if kind == "call":
            key, call_id, name, status, urls, code, message = texts
            links = json.loads(urls)
            ended = outcome(status, text, links, code, message, size)
            found = Result(key, call_id, name, *ended, images(key, links))
            results.setdefault((run_id, index), []).append(found)
        elif kind == "message":
            message_id, role, *_ = texts
            if role == Message.Role.USER:
                users[run_id] = message_id, text, bool(size)
            else:
                answers[run_id] = text
        else:
            calls, reasoning, origin, *_ = texts
            ended_calls = results.get((run_id, index), ())
            part = turn_part(index, text, json.loads(calls), ended_calls, tuple(from_text(reasoning)), origin)
            turns.setdefault(run_id, []).append(part)
            if number and size:
                reports.setdefault(run_id, {})[origin] = Report(origin, number, size)
    attached = _files([message_id for message_id, _, has_files in users.values() if has_files])
    parts = [
        RunPart(
            run_id,
            UserMessage(users[run_id][1], attached.get(users[run_id][0], ())),
            _ended(turns.get(run_id, ())),
            _unrecorded(answers.get(run_id, ""), turns.get(run_id, ())),
        )
        for run_id in run_ids
        if run_id in users
    ]
    latest: dict[str, Report] = {}
    for run_id in run_ids:
        latest |= reports.get(run_id, {})
    return parts, tuple(latest.values())


def _ended(turns: Sequence[TurnPart]) -> tuple[TurnPart, ...]:
    """The turns of a run that has ended: nothing is said after the last one."""
    return (*turns[:-1], replace(turns[-1], is_refused=False)) if turns else ()


def _unrecorded(content: str, turns: Sequence[TurnPart]) -> str:
    """The end of a message that no turn has: the run ended meanwhile."""
    recorded = join_text(turn.text for turn in turns)
    return content[len(recorded) :].strip() if content.startswith(recorded) else ""


def _files(message_ids: Sequence[str]) -> dict[str, tuple[AttachedFile, ...]]:
    return {
        message_id: tuple(
            AttachedFile(file.file_name, file.content_type, file.size_bytes, file.stored_name) for file in attachments
        )
        for message_id, attachments in attached_to(message_ids).items()
    }
