"""What is recorded of a run, as its worker reads it: enough for any process to go on at the next step. Reads only."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections

from chats.attachments import attached_to
from chats.models import Attachment, Message
from config.kernel import clock
from credits import ledger
from runs import catalogue
from runs.lifecycle.runs import join_text
from runs.llm.base import AssistantMessage, AttachedFile, ModelRequest, ToolCall, ToolMessage, ToolSpec, UserMessage
from runs.models import (
    FINAL_INVOCATION_STATUSES,
    InvocationStatus,
    Run,
    RunStatus,
    ToolInvocation,
    Turn,
    Waitpoint,
    WaitpointStatus,
)
from runs.tools.base import ToolDefinition


@dataclass(slots=True)
class Journal:
    """A run with its turns, its calls, the answers it got, and the chat's earlier messages."""

    run: Run
    history: tuple[UserMessage | AssistantMessage, ...]
    turns: list[Turn] = field(default_factory=list)
    calls: list[ToolInvocation] = field(default_factory=list)
    answers: dict[str, Waitpoint] = field(default_factory=dict)
    # What ``refusal`` says of the first turn, if it was asked when the run was claimed.
    asked: bool = False
    refused: tuple[str, str] | None = None

    @property
    def text(self) -> str:
        """The message's content as recorded."""
        return join_text(turn.text for turn in self.turns)

    @property
    def open_calls(self) -> list[ToolInvocation]:
        return [call for call in self.calls if call.status not in FINAL_INVOCATION_STATUSES]

    def tools(self) -> dict[str, ToolDefinition]:
        return catalogue.remembered().tools_for(self.run.tools)

    def remaining_seconds(self) -> float:
        """The running time that the run has left."""
        run = self.run
        stretch = clock.now() - run.running_since if run.running_since else timedelta()
        return settings.RUN_TIMEOUT_SECONDS - run.ran_ms / 1000 - stretch.total_seconds()

    def request(self, provider_model: str) -> ModelRequest:
        """The transcript for the next turn."""
        messages: list[UserMessage | AssistantMessage | ToolMessage] = list(self.history)
        for turn in self.turns:
            calls = tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in turn.tool_calls)
            messages.append(AssistantMessage(turn.text, calls))
            for call in self.calls:
                if call.turn_index == turn.index:
                    messages.append(ToolMessage(call.tool_call_id, call.name, *_told(call)))
        return ModelRequest(
            model=provider_model,
            messages=tuple(messages),
            tools=tuple(
                ToolSpec(tool.name, tool.description, dict(tool.input_schema)) for tool in self.tools().values()
            ),
            run_id=self.run.id,
            turn_index=len(self.turns) + 1,
        )


def _told(call: ToolInvocation) -> tuple[str, bool]:
    """A call's outcome as the model is told it: content, and whether it is an error."""
    if call.status == InvocationStatus.COMPLETED:
        untold = [url for url in call.result_urls if url not in call.result]
        return "\n".join([call.result, *untold]), False
    return f"{call.error_code}: {call.error_message}", True


def load(run: Run, *, fresh: bool = False) -> Journal:
    """The journal of a run that was just claimed; ``fresh`` if nobody can have recorded anything yet."""
    journal = Journal(run=run, history=_history(run))
    if not fresh:
        journal.turns = list(Turn.objects.filter(run=run).order_by("index"))
        journal.calls = list(ToolInvocation.objects.filter(run=run).order_by("turn_index", "call_index"))
        journal.answers = {
            waitpoint.invocation_id: waitpoint
            for waitpoint in Waitpoint.objects.filter(run=run, status=WaitpointStatus.COMPLETED)
        }
    return journal


def reload(run: Run) -> Journal | None:
    """The journal as the database has it; None if the run is no longer this owner's."""
    current = Run.objects.filter(
        pk=run.pk, status=RunStatus.RUNNING, lease_token=run.lease_token, worker_id=run.worker_id
    ).first()
    return load(current) if current else None


# The messages of the chat's runs up to this one, run by run, the user's before the answer.
_MESSAGES = """
    SELECT message.id, message.run_id, message.role, message.content,
           EXISTS (SELECT 1 FROM chats_attachment WHERE message_id = message.id)
    FROM (
        SELECT id, created_at FROM runs_run WHERE chat_id = %s AND created_at <= %s
        ORDER BY created_at DESC, id DESC LIMIT %s
    ) run
    JOIN chats_message message ON message.run_id = run.id
    ORDER BY run.created_at, run.id, message.role DESC
"""


def _history(run: Run) -> tuple[UserMessage | AssistantMessage, ...]:
    """The chat up to this run's own message, run by run: a run queued meanwhile comes after, whatever its message's
    time."""
    db = connections[DEFAULT_DB_ALIAS]
    with db.cursor() as cursor:
        begun = db.ops.adapt_datetimefield_value(run.created_at)
        cursor.execute(_MESSAGES, [run.chat_id, begun, settings.RUN_HISTORY_RUNS + 1])
        rows = cursor.fetchall()
    own = [row for row in rows if row[0] == run.user_message_id]
    rows = [row for row in rows if row[1] != run.pk and row[3]] + own
    attached = attached_to([message_id for message_id, *_, has_attachments in rows if has_attachments])
    return tuple(
        UserMessage(content, tuple(map(_file, attached.get(message_id, ()))))
        if role == Message.Role.USER
        else AssistantMessage(content, ())
        for message_id, _, role, content, _ in rows
    )


def _file(attachment: Attachment) -> AttachedFile:
    return AttachedFile(attachment.file_name, attachment.content_type, attachment.size_bytes, attachment.stored_name)


def refusal(run: Run, turns: int, *, available: int | None = None) -> tuple[str, str] | None:
    """Why the run may not begin another turn, as (errorCode, message); None if it may. ``available`` credits are asked
    for if they aren't given."""
    if turns >= settings.RUN_TURN_LIMIT:
        return "TURN_LIMIT_EXCEEDED", f"The run reached its limit of {settings.RUN_TURN_LIMIT} turns."
    if (ledger.available(run.user_id) if available is None else available) <= 0:
        return "INSUFFICIENT_CREDITS", "No credits are available."
    if run.max_credits is not None and ledger.run_spent(run.id) >= run.max_credits:
        return "BUDGET_EXCEEDED", "The run has spent its maxCredits."
    return None
