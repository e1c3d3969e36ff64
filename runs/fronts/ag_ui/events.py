"""A run as AG-UI 1.0 shows it: the events of its stream, and the messages of a chat. One AG-UI run ends with our run,
or where it needs the client; the next one continues there. Messages of earlier runs come from their rows, those of a
run up to some event from its stream, with the same ids: a client keeps the position of a message that it has.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet

from chats.models import Message
from config.api.live import Broken
from config.kernel import money
from config.kernel.jsontext import to_text
from runs.events import StreamType
from runs.fronts.reads import Recorded, recorded_of
from runs.fronts.rendering import Call, Data, Facts, Part, Rendering, amounts
from runs.models import ClientRun, InvocationStatus, Run, RunStatus, WaitpointKind
from runs.streams.reads import Event, existing
from runs.streams.views import as_line
from runs.tools.base import shown_result

AgUiMessage = dict[str, Any]

# The most messages in a snapshot, and about the most characters: clients send them back. The newest ones are kept.
SNAPSHOT_MESSAGES = 2000
SNAPSHOT_CHARS = 2 * 1024 * 1024
ROWS_AT_ONCE = 50
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


class AgUi(Rendering):
    """``thread`` and ``name`` are the client's ids of the chat and of the AG-UI run. ``before``: a snapshot of the
    messages before the stream, or None if the client has them. ``given``: the calls whose outcomes the client has.
    ``then``: the runs that follow in the same AG-UI run. ``with_user_messages``: whether snapshots have them.
    """

    shows_questions = False

    def __init__(self, run: Run, thread: str = "", name: str = "", then: Sequence[Run] = ()) -> None:
        super().__init__(run)
        self.thread, self.name, self.then = thread, name, then
        self.before: Part | None = None
        self.given: Collection[str] = ()
        self.with_user_messages = True
        self.is_sent = False  # whether the client has RUN_STARTED

    def wants(self, event: Event) -> bool:
        return super().wants(event) or (event.type == StreamType.MESSAGE_RESET and self.is_sent and self.has_text)

    def facts_of(self, event: Event) -> Facts:
        if event.type != StreamType.MESSAGE_RESET or not self.wants(event):
            return super().facts_of(event)
        if (run := Run.objects.filter(pk=self.run_id).first()) is None:
            raise Broken
        return self.snapshot(Transcript(run, event.index, self.then).messages)

    def snapshot(self, messages: Sequence[Data]) -> str:
        """The event as text. It can be large, so it is written here, not on the event loop."""
        shown = [message for message in messages if self.with_user_messages or message["role"] != "user"]
        return as_line(to_text({"type": "MESSAGES_SNAPSHOT", "messages": shown}))

    @property
    def turn_message(self) -> str:
        return turn_message(self.message_id or "", self.turn)

    def resumed(self) -> list[Part]:
        self.is_sent = True
        self.text_is_open = False  # the rest of an open text is a message with the same id
        ids = {"runId": self.run_id, "chatId": self.chat_id}
        started = self.of_run("RUN_STARTED", protocolVersion="1.0", metadata=ids)
        return [started] if self.before is None else [started, self.before]

    def ended(self, status: Data, facts: Facts) -> list[Part]:
        if self.then:
            return []
        if status["status"] == RunStatus.CANCELLED:
            return [self.of_run("RUN_FINISHED", outcome={"type": "cancelled"})]
        counts = {"inputTokens": facts.input_tokens, "outputTokens": facts.output_tokens}
        total = {"cachedInputTokens": facts.cached_input_tokens, "totalTokens": sum(counts.values())}
        if status["status"] != RunStatus.COMPLETED:
            error = {"message": status["errorMessage"], "code": status["errorCode"], "usage": [counts | total]}
            return [{"type": "RUN_ERROR", **error}]
        result = {"runId": self.run_id, "creditsUsed": money.to_number(facts.credits_spent), "output": facts.output}
        return [self.of_run("RUN_FINISHED", result=result, usage=[counts | total])]

    def client_calls(self) -> list[Part]:
        return [self.of_run("RUN_FINISHED", outcome={"type": "success", "pendingToolCallIds": list(self.calls)})]

    def of_run(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "threadId": self.thread, "runId": self.name, **more}

    def text(self, step: str, **more: str) -> list[Part]:
        kind = "CONTENT" if step == "delta" else step.upper()
        about = {"role": "assistant"} if step == "start" else more
        return [{"type": f"TEXT_MESSAGE_{kind}", "messageId": self.turn_message, **about}]

    def text_voided(self, facts: Facts) -> list[Part]:
        return [*(self.text("end") if self.text_is_open else []), facts]

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

    def ask(self, waitpoint: Data, call: Call) -> list[Part]:
        return [self.of_run("RUN_FINISHED", outcome={"type": "interrupt", "interrupts": [interrupt(waitpoint, call)]})]

    def notice(self, kind: str, data: Data) -> list[Part]:
        return [{"type": "CUSTOM", "name": str(kind), "value": dict(data)}]


def interrupt(waitpoint: Data, call: Call) -> dict[str, Any]:
    asked = waitpoint["requestPayload"]
    about = {"id": waitpoint["id"], "expiresAt": waitpoint["expiresAt"]}
    if call_id := asked.get("toolInvocationId") or (call.id if call.id != waitpoint["id"] else None):
        about["toolCallId"] = call_id
    if waitpoint["kind"] == WaitpointKind.CREDIT_APPROVAL:
        verb = "needs" if "reason" in asked else "costs"
        message = f"{asked['toolName']} {verb} {asked['estimatedCredits']} credits"
        about |= {"reason": "credit_approval", "message": message}
        return about | {"responseSchema": APPROVAL, "metadata": amounts(asked)}
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


# --- messages ---------------------------------------------------------------------------------------------------------


class Transcript(AgUi):
    """The messages of the run's chat up to the run's event ``last``, then the user's messages of queued runs and of
    ``then``, which may have started meanwhile. They are what the official client makes of the events.
    """

    def __init__(self, run: Run, last: int, then: Sequence[Run] = (), thread: str = "", name: str = "") -> None:
        super().__init__(run, thread, name, then)
        earlier = Run.objects.filter(chat=run.chat_id, created_at__lt=run.created_at)
        shown = Message.objects.filter(run_id__in=earlier.order_by().values("pk"))
        self.messages = [*messages_of(run, shown), *messages_of(run, Message.objects.filter(pk=run.user_message_id))]
        # The message of the last turn, and the pieces of its text.
        self.message: AgUiMessage = {}
        self.pieces: list[str] = []
        for event in existing(run.pk, 0, last):
            if event.index > last:
                break
            self.feed(event, self.facts_of(event), asks=False)
        self._close_text()
        later = Run.objects.filter(chat=run.chat_id, created_at__gt=run.created_at).order_by()
        queued = later.filter(Q(status=RunStatus.QUEUED) | Q(pk__in=[each.pk for each in then]))
        waiting = Message.objects.filter(run_id__in=queued.values("pk"), role=Message.Role.USER)
        self.messages += messages_of(run, waiting)

    def text(self, step: str, **more: str) -> list[Part]:
        if step == "delta":
            self.pieces.append(more["delta"])
        elif step == "end":
            self._begun()["content"] = "".join(self.pieces)
            self.pieces.clear()
        return []

    def text_voided(self, facts: Facts) -> list[Part]:
        self.pieces.clear()
        return []

    def call(self, call: Call) -> list[Part]:
        self._begun().setdefault("toolCalls", []).append(tool_call(call.id, call.name, to_text(call.input)))
        return []

    def output(self, call: Call, data: Data) -> list[Part]:
        content = told(data["status"], data.get("result"), data.get("errorMessage"))
        self.messages.append(tool_message(call.id, content))
        return []

    def _begun(self) -> AgUiMessage:
        """The message of this turn."""
        if self.message.get("id") != self.turn_message:
            self.message = {"id": self.turn_message, "role": "assistant"}
            self.messages.append(self.message)
        return self.message


def messages_of(run: Run, shown: QuerySet[Message]) -> list[AgUiMessage]:
    """The newest of the ``shown`` messages of the run's chat, oldest first, without those of replaced runs."""
    newest = shown.filter(chat=run.chat_id, replaced=False).order_by("-created_at", "-pk")
    found, size = list[AgUiMessage](), 0
    for start in range(0, SNAPSHOT_MESSAGES, ROWS_AT_ONCE):
        rows = list(newest[start : start + ROWS_AT_ONCE])
        recorded, names = recorded_of(run.user_id, rows), _names(rows)
        for row in rows:
            before = list(_shown(row, recorded, names))
            size += len(to_text(before))
            if found and size > SNAPSHOT_CHARS:
                return found
            found[:0] = before
        if len(rows) < ROWS_AT_ONCE:
            break
    return found


def _names(rows: Iterable[Message]) -> Mapping[str, str]:
    """The clients' ids of the messages, by run. An id that a client gave twice belongs to the last message."""
    named = ClientRun.objects.filter(run__in=[row.run_id for row in rows]).exclude(message_id="")
    later = ClientRun.objects.filter(chat=OuterRef("chat"), message_id=OuterRef("message_id"), pk__gt=OuterRef("pk"))
    return dict(named.exclude(Exists(later)).values_list("run_id", "message_id"))


def _shown(row: Message, recorded: Mapping[str, Recorded], names: Mapping[str, str]) -> Iterator[AgUiMessage]:
    if row.role == Message.Role.USER:
        yield {"id": names.get(row.run_id, row.pk), "role": "user", "content": row.content}
        return
    for turn, (text, calls) in enumerate(recorded[row.run_id].steps(row.content), 1):
        made = [tool_call(call.pk, call.name, to_text(call.input)) for call in calls]
        said = ({"content": text} if text else {}) | ({"toolCalls": made} if made else {})
        yield {"id": turn_message(row.pk, turn), "role": "assistant", **said}
        for call in calls:
            if not call.is_open:
                result, _ = shown_result(vars(call)["result_start"], call.result_urls)
                yield tool_message(call.pk, told(call.status, result, call.error_message))


def tool_call(call_id: str, name: str, arguments: str = "") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_message(call_id: str, content: str) -> AgUiMessage:
    return {"id": f"{call_id}.result", "role": "tool", "toolCallId": call_id, "content": content}
