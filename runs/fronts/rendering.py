"""What the renderings of a run's stream share: which text is valid, where a turn begins, which calls are open. Each
protocol is a subclass, which renders these in its format. Only ``facts_of`` and ``call_about`` read tables.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from config.api.live import Broken
from config.kernel.jsontext import from_text
from credits import sums
from runs.events import SEPARATOR, StreamType
from runs.models import Run, RunStatus, ToolInvocation, Waitpoint, WaitpointKind
from runs.streams.reads import Event
from runs.tools.base import ASK_USER

# One frame of a protocol: JSON, or text that is sent as it is.
Part = dict[str, Any] | str
Data = Mapping[str, Any]
# What a rendering needs beside an event. A waitpoint that opens: its Call, or None. A reset: the messages before the
# void text, ready to send, if the protocol needs them. A status or a text: the Run, at the end with ``credits_spent``.
Facts = Any

CLIENT = "client"  # what a call awaits, and the node type of calls that the user's app executes


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call without an outcome. ``awaiting``: "client" if the user or the user's app gives the outcome."""

    id: str
    name: str
    turn: int
    input: Any = field(default_factory=dict)
    awaiting: str | None = None
    expires_at: str | None = None

    @classmethod
    def of(cls, row: ToolInvocation) -> Call:
        awaiting = CLIENT if row.name == ASK_USER or row.node_type == CLIENT else None
        return cls(row.pk, row.name, row.turn_index, row.input, awaiting)

    @classmethod
    def asking(cls, waitpoint_id: str, kind: str, asked: Data, turn: int = 0) -> Call:
        """The call that stands for a waitpoint that no call can show."""
        if kind != WaitpointKind.CLARIFICATION:
            return cls(waitpoint_id, asked["toolName"], turn)
        shown = {name: value for name, value in asked.items() if name != "toolInvocationId"}
        return cls(waitpoint_id, ASK_USER, turn, shown, CLIENT)


class Rendering(ABC):
    """One stream of one run, fed with all events in order. Its size does not grow with the run. ``message_id``: the id
    of the assistant's message, None until the run has begun. ``over``: the rendered stream has ended. ``has_ended``:
    the run has ended, too.
    """

    def __init__(self, run: Run) -> None:
        self.run_id, self.chat_id, self.message_id = run.pk, run.chat_id, run.assistant_message_id
        self.over = self.has_ended = False
        # The number of turns that showed something. ``calls_of``: the turn index of the last one's calls, or None.
        self.turn = 0
        self.calls_of: int | None = None
        # Characters of the message so far, and how many of them belong to earlier turns.
        self.length = self.earlier = 0
        self.text_is_open = self.has_text = False
        self.calls: dict[str, Call] = {}
        # The last waitpoint, and its call or the one that stands for it.
        self.asked: tuple[Data, Call] | None = None

    def wants(self, event: Event) -> bool:
        """Whether ``feed`` needs the facts of this event."""
        if event.type == StreamType.WAITPOINT_OPENED or event.final:
            return True
        # The first event says that the run is queued.
        begins = event.index > 1 and event.type in (StreamType.RUN_STATUS, StreamType.MESSAGE_DELTA)
        return begins and self.message_id is None

    def facts_of(self, event: Event) -> Facts:
        """The facts of an event, None if it needs none. Blocks. Raises Broken if the run was deleted."""
        if not self.wants(event):
            return None
        if event.type == StreamType.WAITPOINT_OPENED:
            return call_about(json.loads(event.data)["id"])
        runs = Run.objects.filter(pk=self.run_id)
        if not event.final:
            return runs.only("assistant_message_id").first()
        if (run := runs.annotate(credits_spent=sums.run_spent_subquery()).first()) is None:
            raise Broken
        return run

    def feed(self, event: Event, facts: Facts = None, *, asks: bool = True, overtaken: bool = False) -> list[Part]:
        """The parts of the event in the protocol. Without ``asks``, a waitpoint only shows its call: it needs no answer
        any more, or ``ask_now`` follows. ``overtaken``: text is left out, as a later ``message.reset`` makes it void.
        """
        if isinstance(facts, Run):
            self.message_id = facts.assistant_message_id
        if event.type == StreamType.MESSAGE_COMPLETED:
            return []  # the whole message once more
        data = from_text(event.data)
        match event.type:
            case StreamType.MESSAGE_DELTA:
                return self._text(data["text"], overtaken)
            case StreamType.MESSAGE_RESET:
                return self._reset(facts)
            case StreamType.RUN_STATUS:
                if event.final:
                    self.over = self.has_ended = True
                    return [*self._close_text(), *self.ended(data, facts)]
                return self.begin() if data["status"] == RunStatus.RUNNING else []
            case StreamType.TOOL_STARTED:
                return self._show(_call(data))
            case StreamType.TOOL_PARKED:
                return self._parked(data)
            case StreamType.TOOL_PROGRESS:
                call = self.calls.get(data["toolInvocationId"])
                return self.progress(call, data) if call else []
            case StreamType.TOOL_COMPLETED:
                shown = self._show(_call(data))
                return [*shown, *self.output(self.calls.pop(data["toolInvocationId"]), data)]
            case StreamType.WAITPOINT_OPENED:
                return self._opened(data, facts, asks)
            case StreamType.WAITPOINT_RESOLVED:
                # If the waitpoint is shown as a call of its own, this is the outcome of the call.
                call = self.calls.pop(data["id"], None)
                return self.answer(call, data) if call else []
            case StreamType.MODEL_RETRYING | StreamType.CONTEXT_COMPACTED:
                return self.notice(event.type, data)
        return []

    @property
    def awaits_client(self) -> bool:
        """Whether the stream has not ended, calls are open, and all of them await the client."""
        return not self.over and bool(self.calls) and all(call.awaiting == CLIENT for call in self.calls.values())

    def stop_for_client(self) -> list[Part]:
        """The end of the stream: only calls of the client are open."""
        self.over = True
        return [*self._close_text(), *self.client_calls()]

    def ask_now(self) -> list[Part]:
        """The end of the stream: the user must answer the last waitpoint."""
        self.over = True
        return [*self._close_text(), *self.ask(*self.asked)] if self.asked else []

    # --- what happened ------------------------------------------------------------------------------------------------

    def _text(self, text: str, overtaken: bool) -> list[Part]:
        start, self.length = self.length, self.length + len(text)
        text = text[max(0, self.earlier - start) :]
        if not text or overtaken:
            return []
        parts = self.begin_turn() if self.turn == 0 or self.calls_of is not None else []
        if self.earlier and not self.has_text:
            text = text.removeprefix(SEPARATOR)
        if text and not self.text_is_open:
            self.text_is_open = self.has_text = True
            parts += self.text("start")
        return [*parts, *self.text("delta", delta=text)] if text else parts

    def _reset(self, facts: Facts) -> list[Part]:
        """The message is sent again from its beginning: this turn's text is void, earlier turns' text is skipped."""
        self.length = 0
        if not self.has_text or self.calls_of is not None:
            return []
        parts = self.text_voided(facts)
        self.text_is_open = self.has_text = False
        return parts

    def begin_turn(self) -> list[Part]:
        parts = self._close_text()
        self.turn += 1
        self.calls_of, self.has_text = None, False
        return parts

    def _close_text(self) -> list[Part]:
        if not self.text_is_open:
            return []
        self.text_is_open = False
        return self.text("end")

    def _show(self, call: Call, *, asks: bool = False) -> list[Part]:
        """A call, unless it is shown already. ``asks``: the user must approve the call."""
        if call.id in self.calls:
            return []
        is_of_app = call.awaiting == CLIENT and call.name != ASK_USER
        parts = self.before_answer(call) if asks or is_of_app else []
        self.calls[call.id] = call
        if self.turn == 0 or self.calls_of not in (None, call.turn):
            parts += self.begin_turn()
        parts += self._close_text()
        # The calls end their turn's text.
        self.calls_of, self.earlier = call.turn, max(self.length, self.earlier)
        return [*parts, *self.call(call)]

    def _parked(self, data: Data) -> list[Part]:
        parts = self._show(_call(data))
        known = self.calls[data["toolInvocationId"]]
        call = self.calls[known.id] = replace(known, awaiting=data["awaiting"], expires_at=data["expiresAt"])
        return parts if call.awaiting == CLIENT else [*parts, *self.progress(call, {})]

    def _opened(self, data: Data, call: Call | None, asks: bool) -> list[Part]:
        clarifies = data["kind"] == WaitpointKind.CLARIFICATION
        if call is None or (clarifies and call.name != ASK_USER):
            call = Call.asking(data["id"], data["kind"], data["requestPayload"], self.calls_of or 0)
        is_shown = call.id != data["id"] or self.shows_questions
        parts = self._show(call, asks=not clarifies) if is_shown else []
        self.asked = data, call
        return [*parts, *self.ask_now()] if asks else parts

    # --- in the protocol's format -------------------------------------------------------------------------------------

    closing: ClassVar[tuple[Part, ...]] = ()  # the last parts of every stream
    shows_questions: ClassVar[bool] = True  # whether a question that belongs to no call is shown as a call

    def begin(self) -> list[Part]:
        """The run executes, perhaps not for the first time."""
        return []

    def resumed(self) -> list[Part]:
        """The stream begins here; the client has everything before."""
        return []

    @abstractmethod
    def text(self, step: str, **more: str) -> list[Part]:
        """The "start" of a turn's text, a "delta" with ``delta``, or the "end" of the text."""

    @abstractmethod
    def text_voided(self, facts: Facts) -> list[Part]:
        """The turn's text so far is void."""

    @abstractmethod
    def call(self, call: Call) -> list[Part]:
        """A call that is new to the client."""

    @abstractmethod
    def progress(self, call: Call, data: Data) -> list[Part]:
        """A call waits for its tool. ``data`` is empty, or has ``fraction`` and ``message``."""

    @abstractmethod
    def output(self, call: Call, data: Data) -> list[Part]:
        """The outcome of a call; ``data`` is that of ``tool.completed``."""

    def before_answer(self, call: Call) -> list[Part]:
        """The parts before a new call that the user must approve, or that the user's app executes."""
        return []

    @abstractmethod
    def ask(self, waitpoint: Data, call: Call) -> list[Part]:
        """The stream ends: the user must approve the call, or answer."""

    def answer(self, call: Call, waitpoint: Data) -> list[Part]:
        """The outcome of a call that stands for a waitpoint, if ``shows_questions``."""
        return []

    @abstractmethod
    def client_calls(self) -> list[Part]:
        """The stream ends: only the client can continue."""

    @abstractmethod
    def notice(self, kind: str, data: Data) -> list[Part]: ...

    @abstractmethod
    def ended(self, status: Data, facts: Facts) -> list[Part]:
        """The run has ended; ``status`` is the data of its last ``run.status``."""


def call_about(waitpoint_id: str) -> Call | None:
    """The call that the waitpoint is about; None if it is about a turn, or deleted."""
    waitpoint = Waitpoint.objects.filter(pk=waitpoint_id).select_related("invocation").first()
    if waitpoint is None:
        return None
    call = waitpoint.invocation
    if call is None and (named := waitpoint.request_payload.get("toolInvocationId")):
        call = ToolInvocation.objects.filter(pk=named).first()
    return Call.of(call) if call else None


def _call(data: Data) -> Call:
    awaiting = CLIENT if data["name"] == ASK_USER else data.get("awaiting")
    return Call(data["toolInvocationId"], data["name"], data["turnIndex"], data.get("input", {}), awaiting)


def amounts(asked: Data) -> dict[str, Any]:
    """What the user must know to approve, with amounts in credits."""
    return {name: asked[name] for name in ("estimatedCredits", "threshold", "reason", "topUpUrl") if name in asked}
