"""A chat's messages as UI messages of the AI SDK, equal to what a client has made of the streams."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from chats.models import Message
from config.kernel import clock, money
from runs.events import request_payload
from runs.fronts.ai_sdk import chunks
from runs.fronts.history import Recorded
from runs.fronts.rendering import CLIENT, Call
from runs.models import (
    FINAL_INVOCATION_STATUSES,
    Awaiting,
    InvocationStatus,
    RunStatus,
    ToolInvocation,
    Waitpoint,
    WaitpointKind,
    WaitpointStatus,
)
from runs.serializers import ToolInvocationSerializer, UsageSerializer
from runs.tools.base import ASK_USER

ERRORS = (InvocationStatus.FAILED, InvocationStatus.CANCELLED)


def ui_message(message: Message, recorded: dict[str, Recorded]) -> dict[str, Any]:
    if message.role == Message.Role.USER:
        return {"id": message.pk, "role": "user", "parts": _sent(message)}
    run = recorded[message.run_id]
    return {"id": message.pk, "role": "assistant", "metadata": _metadata(run), "parts": _parts(message, run)}


def _sent(message: Message) -> list[dict[str, Any]]:
    files = [
        {
            "type": "file",
            "mediaType": attachment.content_type,
            "filename": attachment.file_name,
            "url": f"{settings.BASE_URL}/api/v1/attachments/{attachment.pk}/content",
        }
        for attachment in message.attachments.all()
    ]
    return [{"type": "text", "text": message.content}, *files]


def _metadata(recorded: Recorded) -> dict[str, Any]:
    run: Any = recorded.run
    about = {"runId": run.pk, "chatId": run.chat_id}
    if run.status == RunStatus.COMPLETED:
        used = money.to_number(run.credits_spent)
        return about | chunks.ended_metadata(run.pk, used, UsageSerializer(run).data)
    if run.status == RunStatus.FAILED:
        return about | {"status": run.status, "errorCode": run.error_code}
    return about


def _parts(message: Message, recorded: Recorded) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if first := recorded.own(0):
        parts += [{"type": "step-start"}, *map(_own, first)]
    for text, calls in recorded.steps(message.content):
        parts.append({"type": "step-start"})
        if text:
            parts.append({"type": "text", "text": text, "state": "done"})
        for number, call in enumerate(calls):
            parts += [{"type": "step-start"}] if _is_beside(call, calls[:number], recorded) else []
            parts.append(_tool(call, recorded))
        parts += map(_own, recorded.own(calls[0].turn_index) if calls else ())
    return parts


def _is_beside(call: ToolInvocation, shown: list[ToolInvocation], recorded: Recorded) -> bool:
    """As ``Chunks.before_approval``: whether only calls of the server were open when the user was asked to approve."""
    asked = recorded.waitpoints_of(call)[:1]
    if not asked or asked[0].kind != WaitpointKind.CREDIT_APPROVAL:
        return False
    is_open = [each for each in shown if each.finished_at is None or each.finished_at > asked[0].created_at]
    return bool(is_open) and all(_awaiting(each) is None for each in is_open)


def _awaiting(call: ToolInvocation) -> str | None:
    return CLIENT if call.name == ASK_USER or call.node_type == CLIENT else None


def _tool(call: ToolInvocation, recorded: Recorded) -> dict[str, Any]:
    awaiting = _awaiting(call)
    known = Call(call.pk, call.name, call.turn_index, call.input, awaiting)
    part = {"type": "dynamic-tool", "toolName": call.name, "toolCallId": call.pk, "input": call.input}
    part |= {"providerExecuted": True} if call.status in FINAL_INVOCATION_STATUSES else chunks.executed(known)
    approval = recorded.approval_of(call)
    if approval is not None:
        part["approval"] = _approval(approval)
    return part | _state(call, approval, awaiting)


def _state(call: ToolInvocation, approval: Waitpoint | None, awaiting: str | None) -> dict[str, Any]:
    if call.status == InvocationStatus.COMPLETED:
        result = ToolInvocationSerializer(call).data["result"]
        return {"state": "output-available", "output": chunks.output_of(call.name, awaiting, result)}
    if call.status in ERRORS:
        return {"state": "output-error", "errorText": call.error_message or chunks.CANCELLED}
    if call.status == InvocationStatus.REFUSED:
        return {"state": "output-denied"}
    if approval is not None and call.status == InvocationStatus.PENDING:
        is_pending = approval.status == WaitpointStatus.PENDING
        return {"state": "approval-requested" if is_pending else "approval-responded"}
    if call.awaiting == Awaiting.TOOL:
        output = chunks.parked(clock.iso(call.expires_at), call.progress or {})
        return {"state": "output-available", "output": output, "preliminary": True}
    return {"state": "input-available"}


def _approval(waitpoint: Waitpoint) -> dict[str, Any]:
    asked = request_payload(waitpoint)
    approval = {
        "id": waitpoint.pk,
        "descriptor": chunks.descriptor(asked, clock.iso(waitpoint.expires_at) or ""),
        "requestReason": chunks.reason(asked),
    }
    given = waitpoint.resolved_payload or {}
    return approval | {name: given[name] for name in ("approved", "reason") if name in given}


def _own(waitpoint: Waitpoint) -> dict[str, Any]:
    """A waitpoint that stands for a call of its own."""
    asked, given = request_payload(waitpoint), waitpoint.resolved_payload
    part: dict[str, Any] = {"type": "dynamic-tool", "toolCallId": waitpoint.pk}
    if waitpoint.kind == WaitpointKind.CLARIFICATION:
        shown = {name: value for name, value in asked.items() if name != "toolInvocationId"}
        part |= {"toolName": ASK_USER, "input": shown}
        pending = "input-available"
    else:
        part |= {"toolName": asked["toolName"], "input": {}, "providerExecuted": True, "approval": _approval(waitpoint)}
        pending = "approval-requested"
    if waitpoint.status == WaitpointStatus.PENDING:
        return part | {"state": pending}
    part["providerExecuted"] = True
    if given is None:
        return part | {"state": "output-error", "errorText": chunks.CANCELLED}
    if given.get("approved") is False:
        return part | {"state": "output-denied"}
    return part | {"state": "output-available", "output": chunks.given_of(given)}
