"""Runs as clients list them: turns with their texts and calls, in the order in which a stream shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from chats.models import Message
from runs import services
from runs.fronts.rendering import CLIENT, SEPARATOR
from runs.models import Run, ToolInvocation, Turn, Waitpoint, WaitpointKind


@dataclass
class Recorded:
    """A run with what it recorded, in order. ``run`` has the ``calls`` of ``services.runs_of``."""

    run: Run
    turns: list[Turn] = field(default_factory=list)
    waitpoints: list[Waitpoint] = field(default_factory=list)

    @property
    def calls(self) -> list[ToolInvocation]:
        return vars(self.run)["calls"]

    def waitpoints_of(self, call: ToolInvocation) -> list[Waitpoint]:
        return [
            waitpoint
            for waitpoint in self.waitpoints
            if call.pk in (waitpoint.invocation_id, waitpoint.request_payload.get("toolInvocationId"))
        ]

    def waitpoint(self, waitpoint_id: Any) -> Waitpoint | None:
        return next((each for each in self.waitpoints if each.pk == waitpoint_id), None)

    def question(self, call_id: Any) -> Waitpoint | None:
        """What ``ask_user`` asks by the call of this id, or the question that stands for a call of its own."""
        asked = [each for each in self.waitpoints if each.kind == WaitpointKind.CLARIFICATION]
        return next((each for each in asked if call_id == (each.pk if is_own(each) else each.invocation_id)), None)

    def client_call(self, call_id: Any) -> ToolInvocation | None:
        """A call that the user's app executes."""
        return next((call for call in self.calls if call.node_type == CLIENT and call.pk == call_id), None)

    def own(self, turn: int) -> list[Waitpoint]:
        """The waitpoints that stand for calls of their own after this turn; 0 is before the first."""
        return [waitpoint for waitpoint in self.waitpoints if is_own(waitpoint) and self._turn_of(waitpoint) == turn]

    def _turn_of(self, waitpoint: Waitpoint) -> int:
        if waitpoint.invocation_id is not None:
            return next(call.turn_index for call in self.calls if call.pk == waitpoint.invocation_id)
        return max((turn.index for turn in self.turns if turn.finished_at <= waitpoint.created_at), default=0)

    def approval_of(self, call: ToolInvocation) -> Waitpoint | None:
        """The last approval that the call needed."""
        asked = [each for each in self.waitpoints_of(call) if each.kind == WaitpointKind.CREDIT_APPROVAL]
        return asked[-1] if asked else None

    def steps(self, content: str) -> Iterator[tuple[str, list[ToolInvocation]]]:
        """Each turn that shows something: its text, and its calls. ``content`` is the whole message: it can end with
        the text of a turn that was not recorded.
        """
        texts: list[str] = []
        recorded = join(turn.text for turn in self.turns)
        for turn in self.turns:
            texts.append(turn.text)
            if calls := self._shown(turn.index):
                yield join(texts), calls
                texts = []
        texts.append(content[len(recorded) :].removeprefix(SEPARATOR if recorded else ""))
        if any(texts):
            yield join(texts), []

    def _shown(self, turn: int) -> list[ToolInvocation]:
        """The turn's calls that a stream has shown, in that order."""
        moments = {call.pk: self._shown_at(call) for call in self.calls if call.turn_index == turn}
        calls = [call for call in self.calls if moments.get(call.pk)]
        return sorted(calls, key=lambda call: (moments[call.pk], call.call_index))

    def _shown_at(self, call: ToolInvocation) -> Any:
        moments = [*(waitpoint.created_at for waitpoint in self.waitpoints_of(call)), call.started_at, call.finished_at]
        return min(filter(None, moments), default=None)


def is_own(waitpoint: Waitpoint) -> bool:
    """Whether no call can show the waitpoint: it asks for a turn's credits, or for what the tool of a call wants to
    know.
    """
    asked = waitpoint.request_payload
    return "schema" in asked or (waitpoint.invocation_id is None and asked.get("toolInvocationId") is None)


def join(texts: Iterable[str]) -> str:
    return SEPARATOR.join(filter(None, texts))


def recorded_of(user: Any, messages: Sequence[Message]) -> dict[str, Recorded]:
    """The runs of the assistant's messages, by id, with a constant number of queries."""
    wanted = [message.run_id for message in messages if message.role == Message.Role.ASSISTANT]
    found = {run.pk: Recorded(run) for run in services.runs_of(user).filter(pk__in=wanted)}
    for turn in (
        Turn.objects.filter(run__in=found).only("run_id", "index", "text", "finished_at").order_by("run", "index")
    ):
        found[turn.run_id].turns.append(turn)
    for waitpoint in Waitpoint.objects.filter(run__in=found).order_by("created_at", "pk"):
        found[waitpoint.run_id].waitpoints.append(waitpoint)
    return found
