"""The transcript of a chat as messages for a model: earlier runs with calls and results, then the run's own turns. The
same rows and cut always give the same messages. No query is made, and nothing is decided about what is left out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

from runs.events import join_text
from runs.llm.base import AssistantMessage, AttachedFile, Message, ToolCall, ToolMessage, UserMessage
from runs.llm.measure import message_bytes
from runs.models import OUTPUT_TOOL, Compaction, InvocationStatus, Turn
from runs.tools import files
from runs.tools.base import as_told

NO_ANSWER = "(no answer)"  # the assistant's text of a run without an answer, so that user and assistant take turns
# The note to the model after an answer as plain text, if the run has a schema for its output.
NOT_A_CALL = f"[Give your answer as the input of a call of {OUTPUT_TOOL}.]"
LEFT_OUT = "[The earlier part of this chat is not shown.]"
SUMMARY = "[The earlier part of this chat is not shown. This is a summary of it.]"
UNDERSTOOD = "Understood."
NOTE_CHARS = 200  # results of at most this many characters are never replaced by a note


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a call, of ``chars`` characters. ``content`` is empty if it was not loaded, for a note."""

    key: str
    content: str
    chars: int
    is_error: bool = False
    files: tuple[AttachedFile, ...] = ()

    def message(self, call_id: str, most: int | None) -> ToolMessage:
        """The result with at most ``most`` characters; for 0, a note that says its size; for None, the whole."""
        content, shown = self.content, self.files
        if most is not None and self.chars > max(most, NOTE_CHARS):
            content = f"[A result of {self.chars} characters, which is no longer shown.]"
            if most:
                content = f"{self.content[:most]}\n[… the result has {self.chars} characters.]"
        if most == 0 and shown:
            content, shown = f"{content}\n[{len(shown)} images, which are no longer shown.]", ()
        return ToolMessage(call_id, content, self.is_error, shown)


@dataclass(frozen=True)
class TurnPart:
    """One turn, with its calls and their results."""

    index: int
    text: str
    calls: tuple[tuple[ToolCall, Result], ...] = ()
    reasoning: tuple[dict[str, object], ...] = ()
    origin: str = ""
    is_refused: bool = False  # the turn has no calls, but another turn of its run follows: its answer was not accepted
    _sizes: dict[tuple[int | None, bool], int] = field(default_factory=dict, init=False, compare=False, repr=False)

    def messages(self, most: int | None, short: bool, used: set[str]) -> Iterator[Message]:
        """``most``: see ``Result.message``. ``short``: with little text, no arguments, no reasoning. ``used``: ids of
        earlier calls. Some servers number calls from 1 in each conversation, others refuse an id that occurs twice.
        """
        made = [(call.id if call.id not in used else result.key, call, result) for call, result in self.calls]
        used.update(call_id for call_id, _, _ in made)
        calls = tuple(ToolCall(call_id, call.name, "{}" if short else call.arguments) for call_id, call, _ in made)
        text, reasoning = (self.text, self.reasoning) if not short else (self.text[:NOTE_CHARS], ())
        if self.is_refused and not text.strip():
            text, reasoning = NO_ANSWER, ()
        yield AssistantMessage(text, calls, reasoning, self.origin)
        for call_id, _, result in made:
            yield result.message(call_id, most)
        if self.is_refused:
            yield UserMessage(NOT_A_CALL, is_note=True)

    def size(self, most: int | None = None, short: bool = False) -> int:
        """The bytes of ``messages``."""
        if (most, short) not in self._sizes:
            found = self.messages(most, short, set())
            self._sizes[most, short] = sum(map(message_bytes, found))
        return self._sizes[most, short]


@dataclass(frozen=True)
class RunPart:
    """A run. ``ending``: the text that no turn has recorded, None if the run goes on. ``full_size``: its bytes with all
    results, which is all that is known of a run that is not loaded.
    """

    run_id: str
    message: UserMessage
    turns: tuple[TurnPart, ...]
    ending: str | None = None
    full_size: int = 0
    is_loaded: bool = True

    def after_turns(self) -> Iterator[Message]:
        last = self.turns[-1] if self.turns else None
        if self.ending:
            yield AssistantMessage(self.ending)
        elif self.ending is not None and (last is None or last.calls or not last.text.strip()):
            yield AssistantMessage(NO_ANSWER)

    @cached_property
    def base_size(self) -> int:
        if not self.is_loaded:
            return self.full_size
        return message_bytes(self.message) + sum(map(message_bytes, self.after_turns()))


@dataclass(frozen=True, slots=True)
class Cut:
    """What the transcript leaves out: the state in a ``Compaction``, whose fields have the same names."""

    last_run_id: str | None = None
    text: str = ""
    notes_run_id: str | None = None
    notes_turn: int = 0
    short_turn: int = 0
    result_chars: int | None = None
    result_turn: int = 0

    def forms(self, runs: Sequence[RunPart]) -> Callable[[int, int], tuple[int | None, bool]]:
        """A function that says how a turn is shown. It takes the place of the turn's run in ``runs``, and the turn's
        index. It returns ``most`` and ``short`` of ``TurnPart.messages``.
        """
        noted = next((place for place, run in enumerate(runs) if run.run_id == self.notes_run_id), -1)
        own = len(runs) - 1  # the last one is the run itself

        def form(place: int, turn: int) -> tuple[int | None, bool]:
            if place == own and turn <= self.short_turn:
                return 0, True
            if place < noted or (place == noted and turn <= self.notes_turn):
                return 0, False
            return (self.result_chars if place == own and turn <= self.result_turn else None), False

        return form

    def head(self) -> tuple[Message, ...]:
        if self.last_run_id is None:
            return ()
        return UserMessage(f"{SUMMARY}\n\n{self.text}" if self.text else LEFT_OUT), AssistantMessage(UNDERSTOOD)


def cut_of(compaction: Compaction, run_id: str) -> Cut:
    """The cut of a compaction for a later request of this run."""
    cut = Cut(**{field.name: getattr(compaction, field.name) for field in fields(Cut)})
    return cut if compaction.run_id == run_id else replace(cut, short_turn=0, result_chars=None, result_turn=0)


def messages(cut: Cut, runs: Sequence[RunPart]) -> list[Message]:
    """The whole transcript: the chat's earlier runs, and last the run itself."""
    found: list[Message] = list(cut.head())
    used: set[str] = set()
    form = cut.forms(runs)
    for place, run in enumerate(runs):
        if run.is_loaded:
            found.append(run.message)
        for turn in run.turns:
            found += turn.messages(*form(place, turn.index), used)
        found += run.after_turns()
    return found


def turn_parts(turns: Iterable[Turn], calls: Iterable[Any]) -> list[TurnPart]:
    """Recorded turns of a run, with its ``calls`` in order: ToolInvocation objects, or rows with the part of the result
    that is ``shown`` and its length in ``chars``. Calls without an outcome are left out. The output of an earlier run
    becomes text, because its tool is no longer offered.
    """
    results = {turn: list(map(_result, made)) for turn, made in groupby(calls, attrgetter("turn_index"))}
    parts: list[TurnPart] = []
    for turn in turns:
        output = next((call for call in turn.tool_calls if "key" in call and call["told"] is None), None)
        if output is not None:
            parts.append(TurnPart(turn.index, join_text([turn.text, output["arguments"]]), origin=turn.origin))
            continue
        left = iter(results.get(turn.index, ()))
        pairs = [(call, _told(call) if "key" in call else next(left, None)) for call in turn.tool_calls]
        made = tuple((ToolCall(call["id"], call["name"], call["arguments"]), ended) for call, ended in pairs if ended)
        reasoning, is_refused = tuple(turn.reasoning), not turn.tool_calls
        parts.append(TurnPart(turn.index, turn.text, made, reasoning, turn.origin, is_refused))
    return parts


def _result(call: Any) -> Result:
    """A call's outcome for the model. ``chars`` does not count the addresses of results: for a result that was not
    loaded, it is not known which of them its text lacks.
    """
    is_error = call.status != InvocationStatus.COMPLETED
    if is_error:
        content = f"{call.error_code or call.status}: {call.error_message or 'The call did not end.'}"
        chars = len(content)
    else:
        text, chars = (call.shown, call.chars) if hasattr(call, "shown") else (call.result, len(call.result))
        content = as_told(text, call.result_urls)
    found = filter(None, (files.stored_image(call.id, url) for url in call.result_urls))
    images = tuple(AttachedFile(name, kind, 0, stored_name) for stored_name, name, kind in found)
    return Result(call.id, content, chars, is_error, images)


def _told(call: dict[str, Any]) -> Result:
    return Result(call["key"], call["told"], len(call["told"]), is_error=True)
