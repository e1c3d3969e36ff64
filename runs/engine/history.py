"""Reads what a session begins with: what is recorded of its run, and the part of the chat that the transcript needs.
This takes a constant number of queries, and reads no more content than the model's window can hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from django.db import connection
from django.db.models import Case, Exists, OuterRef, Q, Sum, Value, When
from django.db.models.functions import Left, Length

from chats.attachments import attached_to
from chats.models import Attachment, Message
from config.database.queries import read
from runs.engine.transcript import NOTE_CHARS, Cut, RunPart, TurnPart, cut_of, turn_parts
from runs.events import join_text
from runs.lifecycle import Moved
from runs.llm.base import AttachedFile, UserMessage
from runs.models import Compaction, ModelAttempt, Run, RunStatus, ToolInvocation, Turn, Waitpoint, WaitpointStatus
from runs.tools import base

RUN_HISTORY_RUNS = 50  # most earlier runs of the chat that the model receives

# English has about four bytes for each token. With five, more text is read than a window usually holds.
WINDOW_BYTES_PER_TOKEN = 5


@dataclass(slots=True)
class Journal:
    """A run's turns, its tool calls in order, and its answered waitpoints by the id of their call and their kind."""

    turns: list[Turn] = field(default_factory=list)
    calls: list[ToolInvocation] = field(default_factory=list)
    answers: dict[tuple[str, str], Waitpoint] = field(default_factory=dict)
    # The failed requests for the turn that comes next, and for summaries before it.
    attempts: list[ModelAttempt] = field(default_factory=list)

    @property
    def text(self) -> str:
        return join_text(turn.text for turn in self.turns)

    @property
    def open_calls(self) -> list[ToolInvocation]:
        return [call for call in self.calls if call.is_open]

    @property
    def length(self) -> tuple[int, int, int]:
        """The number of turns, of calls that have an outcome, and of failed attempts before the next turn."""
        return len(self.turns), len(self.calls) - len(self.open_calls), len(self.attempts)

    def failed(self, compaction: int = 0) -> list[ModelAttempt]:
        """The failed requests for the next turn, or for the summary of a compaction before it."""
        return [attempt for attempt in self.attempts if attempt.compaction == compaction]

    def take(self, moved: Moved) -> None:
        """Add the rows of a transition, and replace the calls that it changed."""
        changed = {call.id: call for call in moved.calls}
        self.calls = [changed.pop(call.id, call) for call in self.calls] + list(changed.values())
        if moved.turn is not None:
            self.turns.append(moved.turn)
            self.attempts.clear()
        if moved.attempt is not None:
            self.attempts.append(moved.attempt)


def read_journal(run: Run) -> Journal:
    turns = list(Turn.objects.filter(run=run).order_by("index"))
    calls = list(ToolInvocation.objects.filter(run=run).order_by("turn_index", "call_index"))
    answered = Waitpoint.objects.filter(run=run, status=WaitpointStatus.COMPLETED, invocation__isnull=False)
    answers = {(str(waitpoint.invocation_id), waitpoint.kind): waitpoint for waitpoint in answered}
    attempts = ModelAttempt.objects.filter(run=run, turn_index=len(turns) + 1).order_by("compaction", "number")
    return Journal(turns, calls, answers, list(attempts))


@dataclass(frozen=True, slots=True)
class History:
    """A run's own message and the chat before it, oldest first. The oldest runs, which the window cannot hold, are not
    loaded. ``counted``: of each origin, the last turn that ``is_counted``.
    """

    message: UserMessage
    runs: tuple[RunPart, ...] = ()
    cut: Cut = field(default_factory=Cut)
    compaction: Compaction | None = None  # the newest one of the chat
    counted: tuple[Any, ...] = ()

    @property
    def unloaded(self) -> int:
        """The number of runs that are not loaded."""
        return sum(not run.is_loaded for run in self.runs)

    def after(self, run_id: str | None) -> tuple[RunPart, ...]:
        """The runs that come after a run; all if the run is not among them."""
        ids = [run.run_id for run in self.runs]
        return self.runs[ids.index(run_id) + 1 :] if run_id in ids else self.runs

    def shortened(self, cut: Cut) -> History:
        return replace(self, runs=self.after(cut.last_run_id), cut=cut)


def is_counted(turn: Any) -> bool:
    """Whether the provider has counted the tokens of the turn's request."""
    return bool(turn.input_tokens and turn.context_bytes) and not turn.estimated


# The columns that are read of calls and turns.
CALL = ["run_id", "turn_index", "id", "status", "shown", "chars", "result_urls", "error_code", "error_message"]
TURN = ["run_id", "index", "text", "tool_calls", "reasoning", "origin"]
COUNTED = ["estimated", "input_tokens", "context_bytes", "request_digest"]

_BYTES = {"postgresql": "octet_length({})", "sqlite": "length(CAST({} AS BLOB))"}

# The runs of the chat up to this one, without replaced ones, newest first. With the bytes that each has in a
# transcript: without results, of the results, and of notes in place of the results. A compaction that covers a replaced
# run as its last one is left out.
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
               SELECT MAX(id) FROM runs_compaction compaction
               WHERE chat_id = run.chat_id AND (NOT only_run OR run_id = %s) AND (run_id = %s OR NOT EXISTS (
                   SELECT 1 FROM runs_run covered WHERE covered.id = last_run_id AND covered.replaced_by IS NOT NULL
               ))
           ) AS bigint)
    FROM (
        SELECT id, chat_id, created_at, user_message_id FROM runs_run
        WHERE chat_id = %s AND (created_at, id) <= ((SELECT created_at FROM runs_run WHERE id = %s), %s)
              AND (replaced_by IS NULL OR id = %s)
        ORDER BY created_at DESC, id DESC LIMIT %s
    ) run
    JOIN chats_message message ON message.id = run.user_message_id
    ORDER BY run.created_at DESC, run.id DESC
"""


def load(run: Run, context_tokens: int) -> History:
    """The run's message, and as much of the chat before it as a window of ``context_tokens`` can hold."""
    own = [run.pk] * 3
    listed = read(_runs_sql(), [*own, run.chat_id, *own, RUN_HISTORY_RUNS + 2])
    (_, content, has_files, own_size, *_, newest), *earlier = listed
    compaction = Compaction.objects.get(pk=newest) if newest is not None else None
    cut = cut_of(compaction, run.pk) if compaction else Cut()
    ids = [row[0] for row in earlier]
    if cut.last_run_id in ids:
        earlier = earlier[: ids.index(cut.last_run_id)]
    noted = set(ids if cut.notes_run_id == run.pk else ())
    rest = 0
    if cut.notes_run_id in ids:
        noted.update(ids[ids.index(cut.notes_run_id) :])
        # About the bytes of the results that have no note, in the run in which the notes end.
        calls = ToolInvocation.objects.filter(run=cut.notes_run_id, turn_index__gt=cut.notes_turn)
        rest = calls.aggregate(size=Sum(Length("result"), default=0))["size"]
    room = context_tokens * WINDOW_BYTES_PER_TOKEN - own_size
    loaded: list[str] = []
    sizes: dict[str, int] = {}
    for run_id, _, _, size, results, notes, _ in earlier:
        shown = results if run_id not in noted else notes + (rest if run_id == cut.notes_run_id else 0)
        room -= size + shown
        if room >= 0:
            loaded.insert(0, run_id)
        sizes[run_id] = size + results
    parts, counted = load_parts(loaded, cut, noted - {cut.notes_run_id or ""}, base.TOOL_RESULT_MAX_CHARS)
    message = UserMessage(content, _files([run.user_message_id])[run.user_message_id] if has_files else ())
    older = [
        RunPart(run_id, UserMessage(""), (), is_loaded=False) for run_id in reversed(sizes) if run_id not in loaded
    ]
    runs = tuple(replace(part, full_size=sizes[part.run_id]) for part in (*older, *parts))
    return History(message, runs, cut, compaction, counted)


def _runs_sql() -> str:
    columns = {"content": "message.content", "text": "turn.text", "result": "call.result"}
    columns |= {name: f"CAST(turn.{name} AS text)" for name in ("tool_calls", "reasoning")}
    sizes = {name: _BYTES[connection.vendor].format(column) for name, column in columns.items()}
    return _RUNS.format(note=NOTE_CHARS, **sizes)


def load_parts(
    run_ids: Sequence[str], cut: Cut, noted: Iterable[str], result_chars: int
) -> tuple[list[RunPart], tuple[Any, ...]]:
    """The runs in this order, with notes for results in those ``noted``; and ``counted`` of a ``History``."""
    if not run_ids:
        return [], ()
    calls: dict[str, list[Any]] = {}
    notes = Q(run__in=list(noted)) | Q(run=cut.notes_run_id, turn_index__lte=cut.notes_turn)
    shown = Case(When(notes & Q(chars__gt=NOTE_CHARS), then=Value("")), default=Left("result", result_chars))
    found = ToolInvocation.objects.filter(run__in=run_ids).annotate(chars=Length("result")).annotate(shown=shown)
    for call in found.order_by("turn_index", "call_index").values_list(*CALL, named=True):
        calls.setdefault(call.run_id, []).append(call)
    turns: dict[str, list[Any]] = {}
    recorded_turns = Turn.objects.filter(run__in=run_ids).order_by("index")
    for turn in recorded_turns.values_list(*TURN, *COUNTED, named=True):
        turns.setdefault(turn.run_id, []).append(turn)
    has_files = Exists(Attachment.objects.filter(message=OuterRef("pk")))
    # The assistant's message is read only if the run's turns may lack its text.
    recorded = Run.objects.filter(pk__in=run_ids, status=RunStatus.COMPLETED, turn_count__gt=0).values("pk")
    messages = Message.objects.filter(run_id__in=run_ids).exclude(role=Message.Role.ASSISTANT, run_id__in=recorded)
    given = list(messages.annotate(has_files=has_files))
    users: dict[str, Any] = {message.run_id: message for message in given if message.role == Message.Role.USER}
    answers = {message.run_id: message.content for message in given if message.role == Message.Role.ASSISTANT}
    attached = _files([message.pk for message in users.values() if message.has_files])
    parts: list[RunPart] = []
    counted: dict[str, Any] = {}
    for run_id in run_ids:
        if message := users.get(run_id):
            own = turn_parts(turns.get(run_id, ()), calls.get(run_id, ()))
            if own:
                own[-1] = replace(own[-1], is_refused=False)  # a note only follows a turn if another turn follows
            user = UserMessage(message.content, attached.get(message.pk, ()))
            parts.append(RunPart(run_id, user, tuple(own), _unrecorded(answers.get(run_id, ""), own)))
        counted |= {turn.origin: turn for turn in turns.get(run_id, ()) if is_counted(turn)}
    return parts, tuple(counted.values())


def _unrecorded(content: str, turns: Sequence[TurnPart]) -> str:
    """The end of the message that no turn has recorded: the run ended during that turn."""
    recorded = join_text(turn.text for turn in turns)
    return content[len(recorded) :].strip() if content.startswith(recorded) else ""


def _files(message_ids: Sequence[str]) -> dict[str, tuple[AttachedFile, ...]]:
    columns, attached = attrgetter("file_name", "content_type", "size_bytes", "stored_name"), attached_to(message_ids)
    return {message_id: tuple(AttachedFile(*columns(file)) for file in files) for message_id, files in attached.items()}
