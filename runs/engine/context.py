"""What a run's next turn is given: the transcript for the model, and whether limits and budget allow the turn."""

from __future__ import annotations

from collections.abc import Mapping

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections

from chats.attachments import attached_to
from chats.models import Attachment, Message
from credits import ledger
from runs.engine.journal import Journal
from runs.errors import RunError
from runs.llm.base import AssistantMessage, AttachedFile, ModelRequest, ToolCall, ToolMessage, ToolSpec, UserMessage
from runs.models import InvocationStatus, Run, ToolInvocation
from runs.tools.base import ToolDefinition

History = tuple[UserMessage | AssistantMessage, ...]


def request(
    run: Run, history: History, journal: Journal, tools: Mapping[str, ToolDefinition], provider_model: str
) -> ModelRequest:
    """The request for the run's next turn."""
    messages: list[UserMessage | AssistantMessage | ToolMessage] = list(history)
    for turn in journal.turns:
        calls = tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in turn.tool_calls)
        messages.append(AssistantMessage(turn.text, calls))
        for call in journal.calls:
            if call.turn_index == turn.index:
                messages.append(ToolMessage(call.tool_call_id, call.name, *_outcome(call)))
    return ModelRequest(
        model=provider_model,
        messages=tuple(messages),
        tools=tuple(ToolSpec(tool.name, tool.description, dict(tool.input_schema)) for tool in tools.values()),
        run_id=run.id,
        turn_index=len(journal.turns) + 1,
    )


def _outcome(call: ToolInvocation) -> tuple[str, bool]:
    """A call's outcome for the model: content, and whether it is an error."""
    if call.status == InvocationStatus.COMPLETED:
        missing = [url for url in call.result_urls if url not in call.result]
        return "\n".join([call.result, *missing]), False
    return f"{call.error_code}: {call.error_message}", True


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


def history(run: Run) -> History:
    """The chat up to this run's own message, run by run: the message of a run that was enqueued later comes after it,
    even if the message is older.
    """
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
    """Why the run may not begin another turn, as (errorCode, message); None if it may. ``available`` are its user's
    credits; without them they are read.
    """
    if turns >= settings.RUN_TURN_LIMIT:
        return RunError.TURN_LIMIT_EXCEEDED, f"The run reached its limit of {settings.RUN_TURN_LIMIT} turns."
    if (ledger.available(run.user_id) if available is None else available) <= 0:
        return RunError.INSUFFICIENT_CREDITS, "No credits are available."
    if run.max_credits is not None and ledger.run_spent(run.id) >= run.max_credits:
        return RunError.BUDGET_EXCEEDED, "The run has spent its maxCredits."
    return None
