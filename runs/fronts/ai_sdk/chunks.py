"""A run's stream as chunks of the AI SDK's UI message stream, versions 6 and 7.

A client asks again for ever if a stream finishes while an approved call has no output at all, or on a call
without ``providerExecuted``: so the outcome of a call that the client executed has it too.
"""

from __future__ import annotations

from typing import Any

from config.kernel.errors import DomainError
from config.kernel.jsontext import parse_value
from runs.fronts.rendering import CLIENT, Call, Data, Facts, Part, Rendering
from runs.models import InvocationStatus, RunStatus, WaitpointKind
from runs.tools.base import ASK_USER

CANCELLED = "The call was cancelled."


class Chunks(Rendering):
    closing = ("[DONE]",)
    step_is_open = False

    def started(self) -> list[Part]:
        about = {"runId": self.run_id, "chatId": self.chat_id}
        return [{"type": "start", "messageId": self.message_id, "messageMetadata": about}]

    def resumed(self) -> list[Part]:
        self.step_is_open = False
        return [{"type": "start", "messageId": self.message_id}]

    def turn_started(self) -> list[Part]:
        parts = self.step_ended()
        self.step_is_open = True
        return [*parts, {"type": "start-step"}]

    def step_ended(self) -> list[Part]:
        was_open, self.step_is_open = self.step_is_open, False
        return [{"type": "finish-step"}] if was_open else []

    def text_started(self) -> list[Part]:
        return [{"type": "text-start", "id": self.text_id}]

    def text(self, delta: str) -> list[Part]:
        return [{"type": "text-delta", "id": self.text_id, "delta": delta}]

    def text_ended(self) -> list[Part]:
        return [{"type": "text-end", "id": self.text_id}]

    def text_voided(self) -> list[Part]:
        return [{"type": "reset-step"}]

    @property
    def text_id(self) -> str:
        return f"t{self.turn}"

    def call(self, call: Call) -> list[Part]:
        chunk = {"type": "tool-input-available", "toolCallId": call.id, "toolName": call.name, "input": call.input}
        return [chunk | {"dynamic": True} | executed(call)]

    def progress(self, call: Call, data: Data) -> list[Part]:
        return [_output(call, parked(call.expires_at, data)) | {"preliminary": True}]

    def output(self, call: Call, data: Data) -> list[Part]:
        if data["status"] == InvocationStatus.COMPLETED:
            return [_output(call, output_of(call.name, call.awaiting, data.get("result")))]
        if data["status"] == InvocationStatus.REFUSED:
            return [{"type": "tool-output-denied", "toolCallId": call.id}]
        return [_error(call, data.get("errorMessage") or CANCELLED)]

    def before_approval(self, call: Call) -> list[Part]:
        """A step of its own, if the server's calls of this one are open: the client does not send approvals of a step
        in which a call has no final output. It sends its own outputs only of the last step.
        """
        is_beside = call.turn == self.calls_of and self.calls
        return self.turn_started() if is_beside and all(open.awaiting != CLIENT for open in self.calls.values()) else []

    def ask(self, waitpoint: Data, call: Call) -> list[Part]:
        if waitpoint["kind"] == WaitpointKind.CLARIFICATION:
            return self.client_calls()
        chunk = {"type": "tool-approval-request", "approvalId": waitpoint["id"], "toolCallId": call.id}
        asked = waitpoint["requestPayload"]
        chunk |= {"reason": reason(asked), "approvalDescriptor": descriptor(asked, waitpoint["expiresAt"])}
        return [chunk, *self.client_calls()]

    def answer(self, call: Call, waitpoint: Data) -> list[Part]:
        given = waitpoint["resolvedPayload"]
        if given is None:
            return [_error(call, CANCELLED)]
        if given.get("approved") is False:
            return [{"type": "tool-output-denied", "toolCallId": call.id}]
        return [_output(call, given_of(given))]

    def client_calls(self) -> list[Part]:
        return [*self.step_ended(), {"type": "finish", "finishReason": "tool-calls"}]

    def notice(self, kind: str, data: Data) -> list[Part]:
        return [{"type": "data-notice", "data": {"type": kind, **data}, "transient": True}]

    def ended(self, status: Data, facts: Facts) -> list[Part]:
        parts = self.step_ended()
        if status["status"] == RunStatus.COMPLETED:
            about = ended_metadata(self.run_id, facts.credits_used, facts.usage)
            finish = {"type": "finish", "finishReason": facts.finish_reason or "stop", "messageMetadata": about}
            return [*parts, finish]
        if status["status"] == RunStatus.CANCELLED:
            return [*parts, {"type": "abort", "reason": "cancelled"}, {"type": "finish", "finishReason": "other"}]
        about = {"status": status["status"], "errorCode": status.get("errorCode")}
        failed = [{"type": "message-metadata", "messageMetadata": about}]
        return [*parts, *failed, {"type": "error", "errorText": status.get("errorMessage") or ""}]


# --- also what the list of messages has -------------------------------------------------------------------------------


def executed(call: Call) -> dict[str, bool]:
    """Whether the server executes the call."""
    return {} if call.awaiting == CLIENT else {"providerExecuted": True}


def _output(call: Call, output: Any) -> dict[str, Any]:
    return {"type": "tool-output-available", "toolCallId": call.id, "output": output, "dynamic": True} | _ended(call)


def _error(call: Call, text: str) -> dict[str, Any]:
    return {"type": "tool-output-error", "toolCallId": call.id, "errorText": text, "dynamic": True} | _ended(call)


def _ended(call: Call) -> dict[str, bool]:
    """Nothing of the call is left to the client."""
    return {"providerExecuted": True} if call.awaiting == CLIENT else {}


def output_of(name: str, awaiting: str | None, result: str | None) -> Any:
    """A result as its client knows it: of a call that the client executes, the JSON value that it gave."""
    if awaiting != CLIENT or name == ASK_USER or result is None:
        return result
    try:
        value = parse_value(result)
    except DomainError:
        return result
    return result if isinstance(value, str) else value


def given_of(resolved: Data) -> Any:
    """The output of a call that stands for a waitpoint."""
    return resolved.get("data", {name: value for name, value in resolved.items() if name != "respondedAt"})


def parked(expires_at: str | None, progress: Data) -> dict[str, Any]:
    about = {"fraction": progress.get("fraction"), "message": progress.get("message")}
    return {"status": "parked", **about, "expiresAt": expires_at}


def reason(asked: Data) -> str:
    """Why the user is asked."""
    cost, limit = asked["estimatedCredits"], asked["threshold"]
    return f"{cost} credits, {limit} left" if "reason" in asked else f"{cost} credits, over {limit}"


def descriptor(asked: Data, expires_at: str) -> dict[str, Any]:
    names = ("estimatedCredits", "threshold", "reason", "topUpUrl")
    return {name: asked[name] for name in names if name in asked} | {"expiresAt": expires_at}


def ended_metadata(run_id: str, credits_used: Any, usage: Data) -> dict[str, Any]:
    return {"runId": run_id, "status": RunStatus.COMPLETED.value, "creditsUsed": credits_used, "usage": usage}
