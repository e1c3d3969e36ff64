"""A run as the AI SDK, versions 6 and 7, shows it: chunks of a UI message stream, and the equal UI messages of a chat.

A client repeats its request for ever if a stream finishes while an approved call has no output at all, or on a call
without ``providerExecuted``. So the outcome of a call that the client executed has this field, too.
"""

from typing import Any

from django.conf import settings

from chats.models import Message
from config.kernel import clock, money
from config.kernel.errors import DomainError
from config.kernel.jsontext import parse_value
from runs.calls import ToolInvocationSerializer, WaitpointSerializer
from runs.fronts.reads import Recorded
from runs.fronts.rendering import CLIENT, Call, Data, Facts, Part, Rendering, amounts
from runs.models import Awaiting, InvocationStatus, RunStatus, ToolInvocation, Waitpoint, WaitpointKind, WaitpointStatus
from runs.serializers import UsageSerializer
from runs.tools.base import ASK_USER

CANCELLED = "The call was cancelled."
STEP = {"type": "step-start"}


class Chunks(Rendering):
    closing = ("[DONE]",)
    has_begun = step_is_open = False

    def begin(self) -> list[Part]:
        if self.has_begun:
            return []
        self.has_begun = True
        about = {"runId": self.run_id, "chatId": self.chat_id}
        return [{"type": "start", "messageId": self.message_id, "messageMetadata": about}]

    def resumed(self) -> list[Part]:
        self.step_is_open = False
        return [{"type": "start", "messageId": self.message_id}]

    def begin_turn(self) -> list[Part]:
        return [*self.begin(), *super().begin_turn(), *self.step_started()]

    def step_started(self) -> list[Part]:
        parts = self.step_ended()
        self.step_is_open = True
        return [*parts, {"type": "start-step"}]

    def step_ended(self) -> list[Part]:
        was_open, self.step_is_open = self.step_is_open, False
        return [{"type": "finish-step"}] if was_open else []

    def text(self, step: str, **more: str) -> list[Part]:
        return [{"type": f"text-{step}", "id": f"t{self.turn}", **more}]

    def text_voided(self, facts: Facts) -> list[Part]:
        return [{"type": "reset-step"}]

    def call(self, call: Call) -> list[Part]:
        return [{"type": "tool-input-available"} | shown(call) | {"dynamic": True} | executed(call)]

    def progress(self, call: Call, data: Data) -> list[Part]:
        return [outcome(call, parked(call.expires_at, data))]

    def output(self, call: Call, data: Data) -> list[Part]:
        return [outcome(call, ended_as(call, data["status"], data.get("result"), data.get("errorMessage")))]

    def before_answer(self, call: Call) -> list[Part]:
        """A new step, if only calls of the server are open in this one. The client sends no approvals of a step in
        which a call has no final output. Of its own outputs, it sends only those in the last step.
        """
        is_beside = call.turn == self.calls_of and self.calls
        return self.step_started() if is_beside and all(open.awaiting != CLIENT for open in self.calls.values()) else []

    def ask(self, waitpoint: Data, call: Call) -> list[Part]:
        if waitpoint["kind"] == WaitpointKind.CLARIFICATION:
            return self.client_calls()
        chunk = {"type": "tool-approval-request", "approvalId": waitpoint["id"], "toolCallId": call.id}
        asked = waitpoint["requestPayload"]
        chunk |= {"reason": reason(asked), "approvalDescriptor": amounts(asked) | {"expiresAt": waitpoint["expiresAt"]}}
        return [chunk, *self.client_calls()]

    def answer(self, call: Call, waitpoint: Data) -> list[Part]:
        return [outcome(call, answered_as(waitpoint["resolvedPayload"]))]

    def client_calls(self) -> list[Part]:
        return [*self.step_ended(), {"type": "finish", "finishReason": "tool-calls"}]

    def notice(self, kind: str, data: Data) -> list[Part]:
        return [{"type": "data-notice", "data": {"type": kind, **data}, "transient": True}]

    def ended(self, status: Data, facts: Facts) -> list[Part]:
        parts = self.step_ended()
        if status["status"] == RunStatus.COMPLETED:
            about = completed(facts)
            return [*parts, {"type": "finish", "finishReason": facts.finish_reason or "stop", "messageMetadata": about}]
        if status["status"] == RunStatus.CANCELLED:
            return [*parts, {"type": "abort", "reason": "cancelled"}, {"type": "finish", "finishReason": "other"}]
        code = {"status": status["status"], "errorCode": status.get("errorCode")}
        failed = [{"type": "message-metadata", "messageMetadata": code}]
        return [*parts, *failed, {"type": "error", "errorText": status.get("errorMessage") or ""}]


# --- in chunks and in messages ----------------------------------------------------------------------------------------


def shown(call: Call) -> dict[str, Any]:
    return {"toolCallId": call.id, "toolName": call.name, "input": call.input}


def executed(call: Call) -> dict[str, bool]:
    """Whether the server executes the call."""
    return {} if call.awaiting == CLIENT else {"providerExecuted": True}


def outcome(call: Call, state: dict[str, Any]) -> dict[str, Any]:
    """The chunk that gives a call the ``state``: the state of its part in a UI message."""
    chunk = {"type": f"tool-{state['state']}", "toolCallId": call.id}
    if state["state"] == "output-denied":
        return chunk
    # The client has nothing more to do for the call.
    ended = {"providerExecuted": True} if call.awaiting == CLIENT else {}
    return chunk | {name: value for name, value in state.items() if name != "state"} | {"dynamic": True} | ended


def ended_as(call: Call, status: str, result: str | None, error: str | None) -> dict[str, Any]:
    """The state of a call with this final status."""
    if status == InvocationStatus.COMPLETED:
        return {"state": "output-available", "output": output_of(call, result)}
    if status == InvocationStatus.REFUSED:
        return {"state": "output-denied"}
    return {"state": "output-error", "errorText": error or CANCELLED}


def output_of(call: Call, result: str | None) -> Any:
    """A call's result as the client knows it: if the client executes the call, the JSON value that the client gave."""
    if call.awaiting != CLIENT or call.name == ASK_USER or result is None:
        return result
    try:
        value = parse_value(result)
    except DomainError:
        return result
    return result if isinstance(value, str) else value


def answered_as(given: Data | None) -> dict[str, Any]:
    """The state of a call that stands for a waitpoint with this ``resolvedPayload``."""
    if given is None:
        return {"state": "output-error", "errorText": CANCELLED}
    if given.get("approved") is False:
        return {"state": "output-denied"}
    output = given.get("data", {name: value for name, value in given.items() if name != "respondedAt"})
    return {"state": "output-available", "output": output}


def parked(expires_at: str | None, progress: Data) -> dict[str, Any]:
    """The state of a call that waits for its tool."""
    about = {"fraction": progress.get("fraction"), "message": progress.get("message")}
    output = {"status": "parked", **about, "expiresAt": expires_at}
    return {"state": "output-available", "output": output, "preliminary": True}


def reason(asked: Data) -> str:
    """Why the user is asked."""
    cost, limit = asked["estimatedCredits"], asked["threshold"]
    return f"{cost} credits, {limit} left" if "reason" in asked else f"{cost} credits, over {limit}"


def completed(run: Any) -> dict[str, Any]:
    """The metadata of a completed run."""
    used = money.to_number(run.credits_spent)
    return {"runId": run.pk, "status": run.status, "creditsUsed": used, "usage": UsageSerializer(run).data}


# --- messages ---------------------------------------------------------------------------------------------------------


def ui_message(message: Message, recorded: dict[str, Recorded], base: str) -> dict[str, Any]:
    """``base``: the path of the caller's surface. Without its run in ``recorded``, a message shows its text alone."""
    if message.role == Message.Role.USER:
        return {"id": message.pk, "role": "user", "parts": _sent(message, base)}
    shown: dict[str, Any] = {"id": message.pk, "role": "assistant"}
    if (found := recorded.get(message.run_id)) is None:
        return shown | {"parts": [STEP, {"type": "text", "text": message.content, "state": "done"}]}
    run = found.run
    about: dict[str, Any] = {"runId": run.pk, "chatId": run.chat_id}
    if run.status == RunStatus.COMPLETED:
        about |= completed(run)
    elif run.status == RunStatus.FAILED:
        about |= {"status": run.status, "errorCode": run.error_code}
    return shown | {"metadata": about, "parts": _parts(message, found)}


def _sent(message: Message, base: str) -> list[dict[str, Any]]:
    url = f"{settings.BASE_URL}{base}/attachments"
    files = [
        {"type": "file", "mediaType": file.content_type, "filename": file.file_name, "url": f"{url}/{file.pk}/content"}
        for file in message.attachments.all()
    ]
    return [{"type": "text", "text": message.content}, *files]


def _parts(message: Message, recorded: Recorded) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for text, shown in recorded.steps(message.content, asks=True):
        if text or not parts or any(isinstance(each, ToolInvocation) for each in shown):
            parts.append(STEP)
        if text:
            parts.append({"type": "text", "text": text, "state": "done"})
        for number, each in enumerate(shown):
            if isinstance(each, ToolInvocation) and _is_beside(each, shown[:number], recorded):
                parts.append(STEP)
            parts.append(_own(each) if isinstance(each, Waitpoint) else _tool(each, recorded))
    return parts


def _is_beside(call: ToolInvocation, before: list[Any], recorded: Recorded) -> bool:
    """Whether only calls of the server were open when this one was shown: the same rule as ``Chunks.before_answer``."""
    asked = recorded.waitpoints_of(call)[:1]
    is_of_app = call.node_type == CLIENT and call.started_at is not None
    if not is_of_app and not (asked and asked[0].kind == WaitpointKind.CREDIT_APPROVAL):
        return False
    shown_at = recorded.shown_at(call)
    calls = [each for each in before if isinstance(each, ToolInvocation)]
    is_open = [each for each in calls if each.finished_at is None or each.finished_at > shown_at]
    return bool(is_open) and all(Call.of(each).awaiting is None for each in is_open)


def _part(call: Call, is_open: bool, approval: Waitpoint | None, state: dict[str, Any]) -> dict[str, Any]:
    part = {"type": "dynamic-tool"} | shown(call) | (executed(call) if is_open else {"providerExecuted": True})
    return part | ({} if approval is None else {"approval": _approval(approval)}) | state


def _tool(row: ToolInvocation, recorded: Recorded) -> dict[str, Any]:
    call, state = Call.of(row), {"state": "input-available"}
    asked = reversed(recorded.waitpoints_of(row))
    approval = next((each for each in asked if each.kind == WaitpointKind.CREDIT_APPROVAL), None)
    if not row.is_open:
        state = ended_as(call, row.status, ToolInvocationSerializer(row).data["result"], row.error_message)
    elif approval is not None and row.status == InvocationStatus.PENDING:
        is_pending = approval.status == WaitpointStatus.PENDING
        state = {"state": "approval-requested" if is_pending else "approval-responded"}
    elif row.awaiting == Awaiting.TOOL:
        state = parked(clock.iso(row.expires_at), row.progress or {})
    return _part(call, row.is_open, approval, state)


def _own(waitpoint: Waitpoint) -> dict[str, Any]:
    """The part of a waitpoint that is shown as a call of its own."""
    call = Call.asking(waitpoint.pk, waitpoint.kind, WaitpointSerializer(waitpoint).data["requestPayload"])
    approval = waitpoint if call.awaiting is None else None
    is_open = waitpoint.status == WaitpointStatus.PENDING
    asked = {"state": "input-available" if approval is None else "approval-requested"}
    return _part(call, is_open, approval, asked if is_open else answered_as(waitpoint.resolved_payload))


def _approval(waitpoint: Waitpoint) -> dict[str, Any]:
    data = WaitpointSerializer(waitpoint).data
    asked, given = data["requestPayload"], data["resolvedPayload"] or {}
    about = {"id": waitpoint.pk, "descriptor": amounts(asked) | {"expiresAt": data["expiresAt"]}}
    answer = {name: given[name] for name in ("approved", "reason") if name in given}
    return about | {"requestReason": reason(asked)} | answer
