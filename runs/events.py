"""The payloads of stream events and webhooks: what happened to a run, as clients see it. No table is read."""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any

from config.kernel import clock, money
from runs.calls import WaitpointSerializer
from runs.models import Compaction, InvocationStatus, ModelAttempt, Run, ToolInvocation, Waitpoint, WaitpointStatus
from runs.tools.base import shown_result
from webhooks.events import Event


class StreamType(StrEnum):
    """Every type of stream event."""

    RUN_STATUS = "run.status"
    MESSAGE_DELTA = "message.delta"
    MESSAGE_COMPLETED = "message.completed"
    MESSAGE_RESET = "message.reset"
    TOOL_STARTED = "tool.started"
    TOOL_PARKED = "tool.parked"
    TOOL_PROGRESS = "tool.progress"
    TOOL_COMPLETED = "tool.completed"
    MODEL_RETRYING = "model.retrying"
    CONTEXT_COMPACTED = "context.compacted"
    WAITPOINT_OPENED = "waitpoint.opened"
    WAITPOINT_RESOLVED = "waitpoint.resolved"


StreamEvent = tuple[StreamType, dict[str, Any]]
SEPARATOR = "\n\n"  # between the texts of two turns
# The webhook events by the stream event that they report, and by the status in it.
WEBHOOKS = {(event.stream_type, event.stream_status): event for event in Event}


def webhooks_of(happened: Iterable[StreamEvent]) -> Iterator[tuple[Event, dict[str, Any]]]:
    """The webhook events of a transition and their fields; AGENT_WAITING has them from ``waitpoint.opened``."""
    given: dict[str, Any] = {}
    for kind, data in happened:
        given |= data
        if kind == StreamType.WAITPOINT_OPENED:
            given["waitpointId"] = data["id"]
        if event := WEBHOOKS.get((kind, data.get("status", ""))):
            yield event, {name: given[name] for name in event.fields}


def join_text(texts: Iterable[str]) -> str:
    """A message's content from its turns' texts."""
    return SEPARATOR.join(filter(None, texts))


def run_status(run: Run) -> StreamEvent:
    data: dict[str, Any] = {"runId": run.id, "chatId": run.chat_id, "status": run.status, "at": clock.iso(clock.now())}
    if run.error_code is not None:
        data |= {"errorCode": run.error_code, "errorMessage": run.error_message}
    return StreamType.RUN_STATUS, data


def message_delta(text: str) -> StreamEvent:
    return StreamType.MESSAGE_DELTA, {"text": text}


def message_reset(run: Run) -> StreamEvent:
    """All text received so far is void; the deltas that follow start the message from its beginning."""
    return StreamType.MESSAGE_RESET, {"messageId": run.assistant_message_id}


def message_completed(run: Run, content: str) -> StreamEvent:
    return StreamType.MESSAGE_COMPLETED, {"messageId": run.assistant_message_id, "content": content}


def model_retrying(attempt: ModelAttempt) -> StreamEvent:
    """A request to a model failed. ``model`` is asked ``delaySeconds`` later."""
    wait = (attempt.next_at - attempt.finished_at).total_seconds() if attempt.next_at else 0.0
    failed = {"attempt": attempt.number, "reason": attempt.reason}
    return StreamType.MODEL_RETRYING, failed | {"delaySeconds": round(wait, 3), "model": attempt.next_model}


def context_compacted(compaction: Compaction) -> StreamEvent:
    """The transcript was shortened. The counts are estimates."""
    tokens = {"tokensBefore": compaction.tokens_before, "tokensAfter": compaction.tokens_after}
    return StreamType.CONTEXT_COMPACTED, tokens


def tool_started(invocation: ToolInvocation) -> StreamEvent:
    return StreamType.TOOL_STARTED, _tool(invocation) | {"input": invocation.input, "awaiting": invocation.awaiting}


def tool_parked(invocation: ToolInvocation) -> StreamEvent:
    """The outcome will come without a worker: from the tool, or from the caller's app."""
    data = _tool(invocation) | {"awaiting": invocation.awaiting, "expiresAt": clock.iso(invocation.expires_at)}
    del data["status"]
    return StreamType.TOOL_PARKED, data


def tool_progress(invocation: ToolInvocation) -> StreamEvent:
    about = {"toolInvocationId": invocation.id, "name": invocation.name}
    return StreamType.TOOL_PROGRESS, about | (invocation.progress or {})


def tool_completed(invocation: ToolInvocation) -> StreamEvent:
    """Sent at each end of a call, which ``status`` names. With the ``input`` if there was no ``tool.started``."""
    is_completed = invocation.status == InvocationStatus.COMPLETED
    shown, is_cut = shown_result(invocation.result, invocation.result_urls) if is_completed else (None, False)
    data = _tool(invocation) | {"result": shown, "resultTruncated": is_cut}
    data |= {"creditUsed": money.to_number(invocation.credit_used), "resultUrls": invocation.result_urls}
    data["durationMs"] = invocation.duration_ms
    if invocation.started_at in (None, invocation.finished_at):
        data["input"] = invocation.input
    if invocation.error_code is not None:
        data |= {"errorCode": invocation.error_code, "errorMessage": invocation.error_message}
    return StreamType.TOOL_COMPLETED, data


def _tool(invocation: ToolInvocation) -> dict[str, Any]:
    place = {"turnIndex": invocation.turn_index, "callIndex": invocation.call_index}
    return {"toolInvocationId": invocation.id, "name": invocation.name} | place | {"status": invocation.status}


def waitpoint_moved(waitpoint: Waitpoint) -> StreamEvent:
    is_open = waitpoint.status == WaitpointStatus.PENDING
    kind = StreamType.WAITPOINT_OPENED if is_open else StreamType.WAITPOINT_RESOLVED
    return kind, dict(WaitpointSerializer(waitpoint).data)
