"""The transcript of a run's next request: how much of the model's window it takes, how it is shortened if that is too
much, and the record of each step that shortens it. ``fit`` makes the steps.

Sizes are bytes as ``runs.llm.measure`` counts them. The estimate of tokens differs from the bound for which credits are
held (``requests``): it follows the provider's last count.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from django.conf import settings

from config.kernel import clock
from runs import lifecycle
from runs.catalogue.definitions import ModelDefinition
from runs.engine import history
from runs.engine.history import History
from runs.engine.session import Session
from runs.engine.transcript import Cut, RunPart, messages
from runs.llm.base import ModelRequest
from runs.llm.measure import BYTES_PER_TOKEN, files_bytes, fixed_bytes, message_bytes
from runs.models import OUTPUT_TOOL, Compaction, CompactionKind, Turn
from runs.tools.base import ToolSpec

RUN_SUMMARY_MAX_TOKENS = 2048  # the most tokens of a summary; never more than an eighth of the model's room

# The description of OUTPUT_TOOL, by which the model gives the output of a run that has a schema for it.
OUTPUT_DESCRIPTION = "Gives your answer: its input is the answer. Call it alone, when no other call is left to make."

# A token has at least one byte, and at most this many: a provider's count outside of these bounds is corrected.
BYTES_PER_TOKEN_MAX = 8
# Parts of the room for a request: above FULL the transcript is shortened, to SHORTENED.
FULL = 0.8
SHORTENED = 0.5
# If the run alone fills the window, results that the model has not seen are cut to the longest of these that fits.
RESULT_CHARS = [500 << power for power in range(8, -1, -1)]


def output_limit(model: ModelDefinition) -> int:
    """The output limit of a request, at most half of the window: a model's own limit may be as large as its window."""
    return min(model.max_output_tokens, model.context_tokens // 2)


def room(model: ModelDefinition) -> int:
    """The most input tokens of a request."""
    return model.context_tokens - output_limit(model)


def summary_tokens(model: ModelDefinition) -> int:
    """The most tokens of a summary in a model's transcripts."""
    return max(1, min(RUN_SUMMARY_MAX_TOKENS, room(model) // 8))


@dataclass(frozen=True, slots=True)
class Step:
    """A step that shortens to ``cut``. The text of a SUMMARY is not known yet: ``cut`` has one of the longest size."""

    kind: CompactionKind
    cut: Cut
    only_run: bool = False  # whether later runs of the chat do not use the step


@dataclass(frozen=True)
class Plan:
    """The transcript of a run's next request. ``fixed``: the bytes of instructions and tools. ``counted``: the turn
    whose request the provider has counted last.
    """

    model: ModelDefinition
    history: History
    own: RunPart
    fixed: int
    counted: Turn | None

    @cached_property
    def now(self) -> int:
        return self.tokens(self.history.cut)

    @property
    def is_for_run(self) -> bool:
        """Whether the newest compaction counts for this run only. Then later compactions do so, too, and make no
        summary, because the transcript lacks runs that later runs of the chat must have.
        """
        return self.history.compaction is not None and self.history.compaction.only_run

    def size(self, cut: Cut) -> int:
        """The bytes of the request with this cut. Runs that are not loaded count in full."""
        runs = (*self.history.after(cut.last_run_id), self.own)
        form = cut.forms(runs)
        size = self.fixed + sum(map(message_bytes, cut.head()))
        for place, run in enumerate(runs):
            size += run.base_size + sum(turn.size(*form(place, turn.index)) for turn in run.turns)
        return size + files_bytes([file for run in runs for file in run.message.files], self.model.dialect)

    def tokens(self, cut: Cut) -> int:
        """An estimate, from the provider's count of an earlier request if there is one."""
        size = self.size(cut)
        if self.counted is None:
            return -(-size // BYTES_PER_TOKEN)
        before = self.counted.context_bytes
        tokens = min(max(self.counted.input_tokens, before // BYTES_PER_TOKEN_MAX, 1), before)
        if size <= before:
            return -(-tokens * size // before)
        return tokens + int((size - before) / min(BYTES_PER_TOKEN, before / tokens))

    def next_step(self, limit: int | None = None) -> Step | None:
        """The next step that shortens the transcript; None if it fits. ``limit``: the most tokens, after a refusal."""
        number, unloaded, most = len(self.history.runs), self.history.unloaded, history.RUN_HISTORY_RUNS
        if number > most:
            # Down to three quarters of the limit, so that not every request begins with another run.
            return Step(CompactionKind.LEFT_OUT, self._without(number - (most - most // 4)))
        most = room(self.model) if limit is None else limit
        full, wanted = (int(most * FULL), int(most * SHORTENED)) if limit is None else (limit, limit)
        if self.now <= full and not unloaded:
            return None
        notes = self._first(self._noted(), wanted)
        if not unloaded and self.tokens(notes) <= (full + wanted) // 2:
            return Step(CompactionKind.RESULTS, notes)
        if number:
            text = "x" * summary_tokens(self.model) * BYTES_PER_TOKEN
            cuts = [replace(self._without(gone), text=text) for gone in range(max(1, unloaded), number + 1)]
            step = Step(CompactionKind.SUMMARY, self._first(cuts, wanted))
            return self.left_out(step) if self.is_for_run else step
        if self.tokens(notes) < self.now:
            return Step(CompactionKind.RESULTS, notes)
        hard = self._first(self._hard(), wanted) if self.now > most else self.history.cut
        return Step(CompactionKind.RESULTS, hard) if self.tokens(hard) < self.now else None

    def shortest(self) -> Step | None:
        """The step to the shortest form of the request; None if the request already has it."""
        last = self._without(len(self.history.runs)).last_run_id
        cut = replace(self._hard()[-1], last_run_id=last, text="")
        is_shorter = self.tokens(cut) < self.now
        return Step(CompactionKind.LEFT_OUT, cut, only_run=True) if is_shorter else None

    def left_out(self, step: Step) -> Step:
        """The step that leaves the runs out, in place of their summary."""
        return replace(step, kind=CompactionKind.LEFT_OUT, cut=replace(step.cut, text=self.history.cut.text))

    def _first(self, cuts: Sequence[Cut], wanted: int) -> Cut:
        """The first of ``cuts`` (longest first) with at most ``wanted`` tokens; if none has, the last one."""
        place = bisect_left(cuts, -wanted, key=lambda cut: -self.tokens(cut))
        return cuts[min(place, len(cuts) - 1)]

    def _noted(self) -> list[Cut]:
        """Cuts with more results replaced by notes, oldest first; not the last turn's, which the model has not seen."""
        runs = (*self.history.runs, self.own)
        form = self.history.cut.forms(runs)
        turns = [(place, turn) for place, run in enumerate(runs) for turn in run.turns]
        if self.own.turns:
            turns.pop()
        return [self.history.cut] + [
            replace(self.history.cut, notes_run_id=runs[place].run_id, notes_turn=turn.index)
            for place, turn in turns
            if turn.size(0) < turn.size() and form(place, turn.index)[0] != 0
        ]

    def _without(self, gone: int) -> Cut:
        """The cut without this number of the oldest runs."""
        return replace(self.history.cut, last_run_id=self.history.runs[gone - 1].run_id) if gone else self.history.cut

    def _hard(self) -> list[Cut]:
        """Cuts that reduce the run's earlier turns to bare calls, and shorten the last turn's results more and more."""
        if not self.own.turns:
            return [self.history.cut]
        last = self.own.turns[-1].index
        cut = replace(self.history.cut, notes_run_id=self.own.run_id, notes_turn=last - 1)
        return [replace(cut, short_turn=last - 1, result_turn=last, result_chars=chars) for chars in RESULT_CHARS]


def plan_of(session: Session, model: ModelDefinition) -> Plan:
    # The provider's last count, in this run or in an earlier one of the chat, comes first.
    turns = (*reversed(session.journal.turns), *session.history.counted)
    counted = (turn for turn in turns if turn.origin == model.origin and history.is_counted(turn))
    fixed = fixed_bytes(session.instructions, _tools(session))
    own = RunPart(session.run.id, session.history.message, tuple(session.parts()))
    return Plan(model, session.history, own, fixed, next(counted, None))


def request_of(session: Session, plan: Plan) -> ModelRequest:
    """The request for the run's next turn. Its output limit is lower than the model's if the window is too full."""
    model, limit = plan.model, output_limit(plan.model)
    lowest = min(limit, settings.MODEL_MIN_OUTPUT_TOKENS)
    return ModelRequest(
        model=model,
        messages=tuple(messages(plan.history.cut, (*plan.history.runs, plan.own))),
        tools=_tools(session),
        chat_id=session.run.chat_id,
        turn_index=len(session.journal.turns) + 1,
        max_output_tokens=max(min(limit, model.context_tokens - plan.now), lowest),
        instructions=session.instructions,
        failed_attempts=len(session.journal.failed()),
    )


def _tools(session: Session) -> tuple[ToolSpec, ...]:
    """The tools that the model may call: the run's own, and last the tool for its output."""
    tools = [tool.spec for _, tool in sorted(session.tools().items())]
    if session.output_schema is not None:
        tools.append(ToolSpec(OUTPUT_TOOL, OUTPUT_DESCRIPTION, dict(session.output_schema)))
    return tuple(tools)


def next_index(session: Session) -> int:
    newest = session.history.compaction
    return newest.index + 1 if newest is not None and newest.run_id == session.run.id else 1


async def record(
    session: Session, plan: Plan, step: Step, charge: lifecycle.Charge | None = None, **of_summary: Any
) -> None:
    """Record a step and use its cut. ``of_summary``: columns of the row that a summary has."""
    shortened = session.history.shortened(step.cut)
    now = clock.now()
    compaction = Compaction(
        chat_id=session.run.chat_id,
        run=session.run,
        index=next_index(session),
        turn_index=len(session.journal.turns) + 1,
        failed_attempts=len(session.journal.failed()),
        kind=step.kind,
        only_run=step.only_run or plan.is_for_run,
        tokens_before=plan.now,
        tokens_after=replace(plan, history=shortened).now,
        **asdict(step.cut) | {"started_at": now, "finished_at": now} | of_summary,
    )
    await session.step(lifecycle.record_compaction, compaction, charge)
    session.history = replace(shortened, compaction=compaction)
