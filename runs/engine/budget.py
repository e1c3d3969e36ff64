"""How much of a model's window a request takes, and how its transcript is shortened when that is too much. It decides
only; ``compaction`` makes the steps.

Sizes are bytes as ``runs.llm.measure`` counts them. The estimate of tokens is not the bound that credits are held
for (``spending``): it follows what the provider counted last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from runs.catalogue.definitions import ModelDefinition
from runs.engine import history
from runs.engine.history import History, Report
from runs.engine.transcript import Cut, TurnPart
from runs.llm.base import AttachedFile
from runs.llm.measure import BYTES_PER_TOKEN, files_bytes, message_bytes
from runs.models import CompactionKind

# Tokens of such a summary; never more than an eighth of the model's window.
RUN_SUMMARY_MAX_TOKENS = 2048

# A token is at least one byte. A provider that counts fewer tokens than one for so many bytes is not believed.
BYTES_PER_TOKEN_MAX = 8
# Of the room for the request: from where on the transcript is shortened, and to what.
FULL = 0.8
SHORTENED = 0.5
# Results that the model has not seen yet are never shorter.
RESULT_CHARS_MIN = 500


def output_limit(model: ModelDefinition) -> int:
    """The output limit of a request: a model's may be as large as its window."""
    return min(model.max_output_tokens, model.context_tokens // 2)


def room(model: ModelDefinition) -> int:
    """The tokens that a request may have."""
    return model.context_tokens - output_limit(model)


def summary_tokens(model: ModelDefinition) -> int:
    """The longest summary for a model's transcripts."""
    return max(1, min(RUN_SUMMARY_MAX_TOKENS, room(model) // 8))


def tokens_of(size: int, report: Report | None) -> int:
    """The estimate for a request of ``size`` bytes, after what the provider counted for an earlier one."""
    if report is None:
        return -(-size // BYTES_PER_TOKEN)
    counted = min(max(report.tokens, report.size // BYTES_PER_TOKEN_MAX, 1), report.size)
    if size <= report.size:
        return -(-counted * size // report.size)
    return counted + int((size - report.size) / min(BYTES_PER_TOKEN, report.size / counted))


@dataclass(frozen=True, slots=True)
class Step:
    """A step that shortens the transcript to ``cut``. ``before`` and ``after`` are estimated tokens of the request.

    A SUMMARY covers the runs up to ``cut.last_run_id``; its text is not known yet.
    """

    kind: CompactionKind
    cut: Cut
    before: int
    after: int
    # Later runs of the chat do not use it.
    only_run: bool = False


@dataclass(frozen=True)
class Plan:
    """The transcript of a run's next request. ``fixed`` are the bytes of instructions and tools."""

    model: ModelDefinition
    run_id: str
    history: History
    turns: Sequence[TurnPart]
    fixed: int
    report: Report | None

    @cached_property
    def cut(self) -> Cut:
        return self.history.cut

    @cached_property
    def _places(self) -> dict[str, int]:
        places = {run.run_id: place for place, run in enumerate(self.history.runs)}
        return places | {self.run_id: len(places)}

    def size(self, cut: Cut) -> int:
        """The bytes of the request with a cut. Runs that are not loaded count with all that they have."""
        return self._size(cut, range(len(self.history.runs) + 1), sum(run.full_size for run in self.history.older))

    def _size(self, cut: Cut, places: range, older: int) -> int:
        noted = self._places.get(cut.notes_run_id or "", -1)
        size = self.fixed + older + sum(map(message_bytes, cut.head()))
        files: list[AttachedFile] = []
        for place in places:
            if place < len(self.history.runs):
                run = self.history.runs[place]
                size += run.base_size
                files += run.message.files
                for turn in run.turns:
                    is_noted = place < noted or (place == noted and turn.index <= cut.notes_turn)
                    size += turn.noted_size if is_noted else turn.size
                continue
            size += message_bytes(self.history.message)
            files += self.history.message.files
            for turn in self.turns:
                if turn.index <= cut.short_turn:
                    size += turn.short_size
                elif noted == place and turn.index <= cut.notes_turn:
                    size += turn.noted_size
                else:
                    limit = cut.limit(turn.index)
                    size += turn.size if limit is None else _limited_size(turn, limit)
        return size + files_bytes(files, self.model.dialect)

    def tokens(self, cut: Cut) -> int:
        return tokens_of(self.size(cut), self.report)

    @cached_property
    def now(self) -> int:
        return self.tokens(self.cut)

    def next_step(self, limit: int | None = None) -> Step | None:
        """How the transcript is shortened next; None if it fits. ``limit``: the tokens that the request may have after
        a refusal, when the window is smaller than the catalogue says.
        """
        if step := self._too_many_runs():
            return step
        most = room(self.model) if limit is None else limit
        full, wanted = (int(most * FULL), int(most * SHORTENED)) if limit is None else (limit, limit)
        if self.now <= full and not self.history.older:
            return None
        notes = self._with_notes(wanted)
        if not self.history.older and self.tokens(notes) <= (full + wanted) // 2:
            return self._step(CompactionKind.RESULTS, notes)
        if self.history.older or self.history.runs:
            return self._without_runs(wanted)
        if notes != self.cut:
            return self._step(CompactionKind.RESULTS, notes)
        return self._own_shortened(most, wanted) if self.now > most else None

    def shortest(self) -> Step | None:
        """The shortest form of the request; None if it has it."""
        last = self._last_earlier() or self.cut.last_run_id
        done = self.turns[-2].index if len(self.turns) > 1 else 0
        cut = Cut(
            last_run_id=last,
            notes_run_id=self.run_id if done else None,
            notes_turn=done,
            short_turn=done,
            result_chars=RESULT_CHARS_MIN,
            result_turn=self.turns[-1].index if self.turns else 0,
        )
        size = self._own_size(cut)
        step = Step(CompactionKind.LEFT_OUT, cut, self.now, tokens_of(size, self.report), only_run=True)
        return step if step.after < step.before else None

    def left_out(self, step: Step) -> Step:
        """The runs of a summary without it."""
        cut = replace(step.cut, text=self.cut.text)
        return replace(step, kind=CompactionKind.LEFT_OUT, cut=cut)

    def earlier(self) -> list[tuple[str, int]]:
        """The earlier runs that no compaction covers, oldest first, with their full sizes."""
        older = [(run.run_id, run.full_size) for run in self.history.older]
        return older + [(run.run_id, run.full_size) for run in self.history.runs]

    def _last_earlier(self) -> str | None:
        earlier = self.earlier()
        return earlier[-1][0] if earlier else None

    def _step(self, kind: CompactionKind, cut: Cut) -> Step:
        return Step(kind, cut, self.now, self.tokens(cut))

    def _own_size(self, cut: Cut) -> int:
        own = len(self.history.runs)
        return self._size(cut, range(own, own + 1), 0)

    def _too_many_runs(self) -> Step | None:
        """More earlier runs than RUN_HISTORY_RUNS. Some more than necessary are left out, so that the transcript does
        not begin with another run at each request.
        """
        most = history.RUN_HISTORY_RUNS
        earlier = self.earlier()
        if len(earlier) <= most:
            return None
        gone = len(earlier) - (most - most // 4)
        return self._without(gone, CompactionKind.LEFT_OUT)

    def _with_notes(self, wanted: int) -> Cut:
        """As many results replaced by notes as ``wanted`` tokens need, the oldest first; never those of the last turn,
        which the model has not seen.
        """
        runs = [(run.run_id, run.turns) for run in self.history.runs]
        turns = [(run_id, turn) for run_id, parts in (*runs, (self.run_id, self.turns[:-1])) for turn in parts]
        noted = self._places.get(self.cut.notes_run_id or "", -1)
        size, cut = self.size(self.cut), self.cut
        for run_id, turn in turns:
            place = self._places[run_id]
            if place < noted or (place == noted and turn.index <= self.cut.notes_turn):
                continue
            if tokens_of(size, self.report) <= wanted:
                break
            if turn.noted_size < turn.size:
                size -= turn.size - turn.noted_size
                cut = replace(cut, notes_run_id=run_id, notes_turn=turn.index)
        return cut

    def _without_runs(self, wanted: int) -> Step:
        """The oldest runs summarised: all that are not loaded, and as many others as ``wanted`` tokens need."""
        counts = range(max(1, len(self.history.older)), len(self.earlier()) + 1)
        after = lambda gone: -self._without(gone, CompactionKind.SUMMARY).after  # noqa: E731
        place = bisect_left(counts, -wanted, key=after)
        return self._without(counts[min(place, len(counts) - 1)], CompactionKind.SUMMARY)

    def _without(self, gone: int, kind: CompactionKind) -> Step:
        cut = replace(self.cut, last_run_id=self.earlier()[gone - 1][0])
        loaded = max(0, gone - len(self.history.older))
        older = sum(run.full_size for run in self.history.older[gone:])
        size = self._size(cut, range(loaded, len(self.history.runs) + 1), older)
        if kind == CompactionKind.SUMMARY:
            size += summary_tokens(self.model) * BYTES_PER_TOKEN
        return Step(kind, cut, self.now, tokens_of(size, self.report))

    def _own_shortened(self, most: int, wanted: int) -> Step | None:
        """The run alone fills the window: texts and arguments of its older turns go, then long results are cut."""
        cut = self.cut
        for turn in self.turns[:-1]:
            if turn.index > cut.short_turn and self.tokens(cut) > wanted:
                cut = replace(cut, short_turn=turn.index)
        if self.tokens(cut) > most and self.turns and self.turns[-1].results:
            last = self.turns[-1]
            share = sum(len(result.content) for result in last.results) // len(last.results)
            share = min(share, cut.limit(last.index) or share)
            while self.tokens(cut) > wanted and share > RESULT_CHARS_MIN:
                share = max(RESULT_CHARS_MIN, share // 2)
                cut = replace(cut, result_chars=share, result_turn=last.index)
        return self._step(CompactionKind.RESULTS, cut) if cut != self.cut else None


def _limited_size(turn: TurnPart, most: int) -> int:
    return sum(map(message_bytes, turn.messages(most, short=False, used=set())))
