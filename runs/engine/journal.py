"""What is recorded of a run: enough for any process to continue at the next step. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runs import lifecycle
from runs.models import FINAL_INVOCATION_STATUSES, Run, ToolInvocation, Turn, Waitpoint, WaitpointStatus


@dataclass(slots=True)
class Journal:
    """A run's turns, its tool calls in their order, and the answered waitpoints by their call's id and their kind."""

    turns: list[Turn] = field(default_factory=list)
    calls: list[ToolInvocation] = field(default_factory=list)
    answers: dict[tuple[str, str], Waitpoint] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The message's content as recorded."""
        return lifecycle.join_text(turn.text for turn in self.turns)

    @property
    def open_calls(self) -> list[ToolInvocation]:
        return [call for call in self.calls if call.status not in FINAL_INVOCATION_STATUSES]

    @property
    def length(self) -> tuple[int, int]:
        """The number of turns, and of calls that have an outcome."""
        return len(self.turns), len(self.calls) - len(self.open_calls)

    def take(self, calls: Sequence[ToolInvocation]) -> None:
        """New calls, and known calls as they now are."""
        changed = {call.id: call for call in calls}
        self.calls = [changed.pop(call.id, call) for call in self.calls] + list(changed.values())


def load(run: Run) -> Journal:
    return Journal(
        turns=list(Turn.objects.filter(run=run).order_by("index")),
        calls=list(ToolInvocation.objects.filter(run=run).order_by("turn_index", "call_index")),
        answers={
            (waitpoint.invocation_id, waitpoint.kind): waitpoint
            for waitpoint in Waitpoint.objects.filter(run=run, status=WaitpointStatus.COMPLETED)
        },
    )
