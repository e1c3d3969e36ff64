"""What is recorded of a run: enough for any process to continue at the next step. Reads only."""

from __future__ import annotations

from dataclasses import dataclass, field

from runs import lifecycle
from runs.models import FINAL_INVOCATION_STATUSES, ModelAttempt, Run, ToolInvocation, Turn, Waitpoint, WaitpointStatus


@dataclass(slots=True)
class Journal:
    """A run's turns, its tool calls in their order, and the answered waitpoints by their call's id and their kind."""

    turns: list[Turn] = field(default_factory=list)
    calls: list[ToolInvocation] = field(default_factory=list)
    answers: dict[tuple[str, str], Waitpoint] = field(default_factory=dict)
    # The failed requests for the turn that comes next, and for summaries before it.
    attempts: list[ModelAttempt] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The message's content as recorded."""
        return lifecycle.join_text(turn.text for turn in self.turns)

    @property
    def open_calls(self) -> list[ToolInvocation]:
        return [call for call in self.calls if call.status not in FINAL_INVOCATION_STATUSES]

    @property
    def length(self) -> tuple[int, int, int]:
        """The number of turns, of calls that have an outcome, and of failed attempts before the next turn."""
        return len(self.turns), len(self.calls) - len(self.open_calls), len(self.attempts)

    def failed(self, compaction: int = 0) -> list[ModelAttempt]:
        """The failed requests for the next turn, or for the summary of a compaction before it."""
        return [attempt for attempt in self.attempts if attempt.compaction == compaction]

    def take(self, moved: lifecycle.Moved) -> None:
        """New rows, and known calls as they now are."""
        changed = {call.id: call for call in moved.calls}
        self.calls = [changed.pop(call.id, call) for call in self.calls] + list(changed.values())
        if moved.turn is not None:
            self.turns.append(moved.turn)
            self.attempts.clear()
        if moved.attempt is not None:
            self.attempts.append(moved.attempt)


def load(run: Run) -> Journal:
    turns = list(Turn.objects.filter(run=run).order_by("index"))
    attempts = ModelAttempt.objects.filter(run=run, turn_index=len(turns) + 1).order_by("compaction", "number")
    return Journal(
        turns=turns,
        calls=list(ToolInvocation.objects.filter(run=run).order_by("turn_index", "call_index")),
        answers={
            (waitpoint.invocation_id, waitpoint.kind): waitpoint
            for waitpoint in Waitpoint.objects.filter(run=run, status=WaitpointStatus.COMPLETED)
            if waitpoint.invocation_id is not None
        },
        attempts=list(attempts),
    )
