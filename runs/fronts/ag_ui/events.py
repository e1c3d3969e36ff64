"""The rendering of a run's stream as AG-UI 1.0. One AG-UI run is one answer: it ends with our run, or where our run
needs the client; the next one continues there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from config.kernel.jsontext import to_text
from runs.events import StreamType
from runs.fronts.rendering import NO_FACTS, Call, Data, Facts, Part, Rendering
from runs.models import InvocationStatus, RunStatus, WaitpointKind
from runs.streams.reads import Event
from runs.streams.views import as_line

PROTOCOL_VERSION = "1.0"
APPROVAL = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}},
    "required": ["approved"],
}
CAPABILITIES = {
    "transport": {"streaming": True, "resumable": True},
    "tools": {"supported": True, "parallelCalls": True, "clientProvided": True},
    "output": {"structuredOutput": True},
    "state": {"snapshots": False, "deltas": False, "memory": True},
    "humanInTheLoop": {"supported": True, "approvals": True, "interrupts": True, "approveWithEdits": False},
}
APPROVAL_DETAILS = ("estimatedCredits", "threshold", "reason", "topUpUrl")


class AgUi(Rendering):
    """``thread`` and ``name`` are the client's ids of the chat and of the AG-UI run. ``before``: a snapshot of the
    messages before the stream, or None if the client has them. ``given``: the calls whose outcomes the client has.
    ``finish``: the last RUN_FINISHED. ``goes_on``: another run follows in the same AG-UI run.
    """

    shows_questions = False

    def __init__(self, thread: str, name: str, run_id: str, chat_id: str, message_id: str | None = None) -> None:
        super().__init__(run_id, chat_id, message_id)
        self.thread, self.name = thread, name
        self.before: Part | None = None
        self.standing: Part = ""
        self.given: Collection[str] = ()
        self.finish: Part | None = None
        self.goes_on = False
        # Whether the client has RUN_STARTED, and a text message that it thinks is open.
        self.is_sent = False
        self.is_open = False

    def wants(self, event: Event) -> bool:
        return super().wants(event) or (event.type == StreamType.MESSAGE_RESET and self.is_sent and self.has_text)

    def feed(self, event: Event, facts: Facts = NO_FACTS, **how: bool) -> list[Part]:
        self.standing = facts.messages
        return super().feed(event, facts, **how)

    @property
    def turn_message(self) -> str:
        return turn_message(self.message_id or "", self.turn)

    # --- the run ------------------------------------------------------------------------------------------------------

    def started(self) -> list[Part]:
        return []  # ``resumed`` has said so: each stream continues somewhere, if only before the first event

    def resumed(self) -> list[Part]:
        is_sent, self.is_sent = self.is_sent, True
        if is_sent:
            return []
        self.text_is_open = False  # the rest of an open text is a message of the same id
        ids = {"runId": self.run_id, "chatId": self.chat_id}
        started = self._run("RUN_STARTED", protocolVersion=PROTOCOL_VERSION, metadata=ids)
        return [started] if self.before is None else [started, self.before]

    def ended(self, status: Data, facts: Facts) -> list[Part]:
        if self.goes_on:
            return []
        if status["status"] == RunStatus.CANCELLED:
            return [self._finished({"type": "cancelled"})]
        usage = [token_usage(facts)]
        if status["status"] == RunStatus.FAILED:
            error = {"message": status["errorMessage"], "code": status["errorCode"], "usage": usage}
            return [{"type": "RUN_ERROR", **error}]
        result = {"runId": self.run_id, "creditsUsed": facts.credits_used, "output": facts.output}
        return [self._run("RUN_FINISHED", result=result, usage=usage)]

    def client_calls(self) -> list[Part]:
        return [self._finished({"type": "success", "pendingToolCallIds": list(self.calls)})]

    def finished(self) -> Part:
        """The end of a stream that shows no run."""
        return self._run("RUN_FINISHED")

    def _finished(self, outcome: dict[str, Any]) -> Part:
        self.finish = self._run("RUN_FINISHED", outcome=outcome)
        return self.finish

    def _run(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "threadId": self.thread, "runId": self.name, **more}

    # --- text ---------------------------------------------------------------------------------------------------------

    def text_started(self) -> list[Part]:
        self.is_open = True
        return [{"type": "TEXT_MESSAGE_START", "messageId": self.turn_message, "role": "assistant"}]

    def text(self, delta: str) -> list[Part]:
        return [{"type": "TEXT_MESSAGE_CONTENT", "messageId": self.turn_message, "delta": delta}]

    def text_ended(self) -> list[Part]:
        self.is_open = False
        return [{"type": "TEXT_MESSAGE_END", "messageId": self.turn_message}]

    def text_voided(self) -> list[Part]:
        return [*(self.text_ended() if self.is_open else []), self.standing]

    # --- tool calls ---------------------------------------------------------------------------------------------------

    def call(self, call: Call) -> list[Part]:
        names = {"toolCallId": call.id, "toolCallName": call.name, "parentMessageId": self.turn_message}
        return [
            {"type": "TOOL_CALL_START", **names},
            {"type": "TOOL_CALL_ARGS", "toolCallId": call.id, "delta": to_text(call.input)},
            {"type": "TOOL_CALL_END", "toolCallId": call.id},
        ]

    def progress(self, call: Call, data: Data) -> list[Part]:
        content = {"status": "parked", "toolCallId": call.id, "toolName": call.name, "expiresAt": call.expires_at}
        content |= {name: data.get(name) for name in ("fraction", "message")}
        activity = {"messageId": f"{call.id}.progress", "activityType": "TOOL_PROGRESS", "content": content}
        return [{"type": "ACTIVITY_SNAPSHOT", **activity, "replace": True}]

    def output(self, call: Call, data: Data) -> list[Part]:
        if call.id in self.given:
            return []
        content = told(data["status"], data.get("result"), data.get("errorMessage"))
        message = {"messageId": f"{call.id}.result", "toolCallId": call.id, "role": "tool", "content": content}
        return [{"type": "TOOL_CALL_RESULT", **message}]

    # --- questions ----------------------------------------------------------------------------------------------------

    def answer(self, call: Call, waitpoint: Data) -> list[Part]:
        return []

    def ask(self, waitpoint: Data, call: Call) -> list[Part]:
        return [self._finished({"type": "interrupt", "interrupts": [interrupt(waitpoint, call)]})]

    def notice(self, kind: str, data: Data) -> list[Part]:
        return [{"type": "CUSTOM", "name": str(kind), "value": dict(data)}]


def interrupt(waitpoint: Data, call: Call) -> dict[str, Any]:
    asked = waitpoint["requestPayload"]
    about = {"id": waitpoint["id"], "expiresAt": waitpoint["expiresAt"]}
    if call_id := asked.get("toolInvocationId") or (call.id if call.id != waitpoint["id"] else None):
        about["toolCallId"] = call_id
    if waitpoint["kind"] == WaitpointKind.CREDIT_APPROVAL:
        verb = "needs" if "reason" in asked else "costs"
        return about | {
            "reason": "credit_approval",
            "message": f"{asked['toolName']} {verb} {asked['estimatedCredits']} credits",
            "responseSchema": APPROVAL,
            "metadata": {name: asked[name] for name in APPROVAL_DETAILS if name in asked},
        }
    name, value = "answer", {"type": "string"}
    if "schema" in asked:
        name, value = "data", asked["schema"]
    elif asked.get("options"):
        value = {"type": "string", "enum": asked["options"]}
    schema = {"type": "object", "properties": {name: value}, "required": [name]}
    return about | {"reason": "clarification", "message": asked["question"], "responseSchema": schema}


def turn_message(message_id: str, turn: int) -> str:
    """The id of the message that shows a turn of the assistant's message."""
    return message_id if turn < 2 else f"{message_id}.{turn}"


def told(status: str, result: str | None, error: str | None) -> str:
    """The content of a call's result: an error as text."""
    return (result if status == InvocationStatus.COMPLETED else error) or ""


def snapshot(messages: Sequence[Data]) -> str:
    """As text: it can be large, so it is not written on the event loop."""
    return as_line(to_text({"type": "MESSAGES_SNAPSHOT", "messages": messages}))


def token_usage(facts: Facts) -> dict[str, Any]:
    """The counts of ``RunSerializer``'s usage, in the protocol's words."""
    counts = {name: facts.usage.get(name, 0) for name in ("inputTokens", "outputTokens", "cachedInputTokens")}
    return counts | {"totalTokens": counts["inputTokens"] + counts["outputTokens"]}
