"""AG-UI's messages of a chat: those of earlier runs, from rows, and those of a run until an event, from its stream.

Both give a message the same id, because a client keeps the place of a message that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django.db.models import QuerySet

from chats.models import Message
from config.kernel.jsontext import to_text
from runs.events import StreamType
from runs.fronts import reads
from runs.fronts.ag_ui.events import AgUi, snapshot, told, turn_message
from runs.fronts.history import Recorded, recorded_of
from runs.fronts.rendering import NO_FACTS, Facts, Part
from runs.models import FINAL_INVOCATION_STATUSES, ClientRun, Run, RunStatus
from runs.streams.hub import Opening
from runs.streams.reads import Event
from runs.streams.views import existing_events
from runs.tools.base import shown_result

AgUiMessage = dict[str, Any]

# The newest messages of a chat that a snapshot shows, and about how many characters of them: clients send them back.
SNAPSHOT_MESSAGES = 2000
SNAPSHOT_CHARS = 2 * 1024 * 1024
ROWS_AT_ONCE = 50


class Transcript:
    """The messages that events of AG-UI make, as the official client makes them."""

    def __init__(self, messages: list[AgUiMessage]) -> None:
        self.messages = messages
        self.texts: list[str] = []

    def take(self, events: Iterable[Part]) -> None:
        for event in events:
            if isinstance(event, str):  # a snapshot: the text of this turn is void
                self.messages.pop()
                continue
            match event["type"]:
                case "TEXT_MESSAGE_START":
                    self._assistant(event["messageId"])
                case "TEXT_MESSAGE_CONTENT":
                    self.texts.append(event["delta"])
                case "TEXT_MESSAGE_END":
                    self.end_text()
                case "TOOL_CALL_START":
                    call = tool_call(event["toolCallId"], event["toolCallName"])
                    self._assistant(event["parentMessageId"]).setdefault("toolCalls", []).append(call)
                case "TOOL_CALL_ARGS":
                    call["function"]["arguments"] = event["delta"]
                case "TOOL_CALL_RESULT":
                    self.messages.append(tool_message(event["toolCallId"], event["content"]))

    def end_text(self) -> None:
        if self.texts:
            self.messages[-1]["content"] = "".join(self.texts)
            self.texts.clear()

    def _assistant(self, message_id: str) -> AgUiMessage:
        """The message with the id, a new one if there is none. After it are only the results of its calls."""
        last = next((message for message in reversed(self.messages) if message["role"] != "tool"), None)
        if last is not None and last["id"] == message_id:
            return last
        self.messages.append({"id": message_id, "role": "assistant"})
        return self.messages[-1]


def until(rendering: AgUi, run: Run, last: int) -> list[AgUiMessage]:
    """The messages of the run's chat up to its event ``last``, and those that wait in line. The new ``rendering`` is
    fed with the run's events.
    """
    earlier = Run.objects.filter(chat=run.chat_id, created_at__lt=run.created_at)
    shown = Message.objects.filter(run_id__in=earlier.order_by().values("pk"))
    asked = Message.objects.filter(pk=run.user_message_id)
    transcript = Transcript([*messages_of(run, shown), *messages_of(run, asked)])
    for event in existing_events(Opening(run.pk, 0, last, over=False, user_id=run.user_id)):
        if event.index > last:
            break
        facts = reads.facts_of(run.pk, event) if rendering.wants(event) else NO_FACTS
        transcript.take(rendering.feed(event, facts, asks=False))
    transcript.end_text()
    queued = Run.objects.filter(chat=run.chat_id, created_at__gt=run.created_at, status=RunStatus.QUEUED)
    waiting = Message.objects.filter(run_id__in=queued.order_by().values("pk"))
    return [*transcript.messages, *messages_of(run, waiting)]


def facts_of(run_id: str, event: Event) -> Facts:
    """``reads.facts_of``, and of a reset the messages before the text that it makes void."""
    if event.type != StreamType.MESSAGE_RESET:
        return reads.facts_of(run_id, event)
    run = Run.objects.filter(pk=run_id).first()
    if run is None:
        return NO_FACTS
    return Facts(messages=snapshot(until(AgUi("", "", run.pk, run.chat_id), run, event.index)))


def messages_of(run: Run, shown: QuerySet[Message]) -> list[AgUiMessage]:
    """The newest of the messages of the run's user, the oldest first, without those of replaced runs."""
    newest = shown.filter(chat=run.chat_id, replaced=False).order_by("-created_at", "-pk")
    found, size = list[list[AgUiMessage]](), 0
    for start in range(0, SNAPSHOT_MESSAGES, ROWS_AT_ONCE):
        rows = list(newest[start : start + ROWS_AT_ONCE])
        recorded, names = recorded_of(run.user_id, rows), _names(rows)
        for row in rows:
            found.append(list(_shown(row, recorded, names)))
            size += len(to_text(found[-1]))
            if size > SNAPSHOT_CHARS:
                return _in_order(found[:-1] or found)
        if len(rows) < ROWS_AT_ONCE:
            break
    return _in_order(found)


def _in_order(found: list[list[AgUiMessage]]) -> list[AgUiMessage]:
    return [message for messages in reversed(found) for message in messages]


def _names(rows: Iterable[Message]) -> Mapping[str, str]:
    """The clients' ids of the messages, by run. An id that a client gave twice stands for the last one."""
    named = ClientRun.objects.filter(run__in=[row.run_id for row in rows]).exclude(message_id="").order_by("pk")
    by_name = dict(named.values_list("message_id", "run_id"))
    return {run_id: name for name, run_id in by_name.items()}


def _shown(row: Message, recorded: Mapping[str, Recorded], names: Mapping[str, str]) -> Iterator[AgUiMessage]:
    if row.role == Message.Role.USER:
        yield {"id": names.get(row.run_id, row.pk), "role": "user", "content": row.content}
        return
    for turn, (text, calls) in enumerate(recorded[row.run_id].steps(row.content), 1):
        made = [tool_call(call.pk, call.name, to_text(call.input)) for call in calls]
        said = ({"content": text} if text else {}) | ({"toolCalls": made} if made else {})
        yield {"id": turn_message(row.pk, turn), "role": "assistant", **said}
        for call in calls:
            if call.status in FINAL_INVOCATION_STATUSES:
                result, _ = shown_result(vars(call)["result_start"], call.result_urls)
                yield tool_message(call.pk, told(call.status, result, call.error_message))


def newest(messages: list[AgUiMessage], most: int) -> list[AgUiMessage]:
    """The last messages, without results of calls that are left out."""
    kept = messages[-most:]
    while kept and kept[0]["role"] == "tool":
        kept.pop(0)
    return kept


def tool_call(call_id: str, name: str, arguments: str = "") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_message(call_id: str, content: str) -> AgUiMessage:
    return {"id": f"{call_id}.result", "role": "tool", "toolCallId": call_id, "content": content}
