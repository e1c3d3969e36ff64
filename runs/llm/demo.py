"""The offline demo model: no network, no key, the same events as another model. docs/demo-model.md has its scripts.
The transcript is the only state: the number of turns after the last user message gives the next turn, so that any
process can continue. MODEL_TIMEOUT_SECONDS limits the time slept. MODEL_STALL_SECONDS does not apply, because
``/wait 600`` would fail with the default settings.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from django.conf import settings

from config.kernel.jsontext import MalformedJSON, parse_value, to_text
from runs.catalogue.definitions import Server
from runs.errors import FailureReason
from runs.llm import base
from runs.llm.base import AssistantMessage, ModelError, ToolCall, ToolMessage, TurnEnd, Usage, UserMessage
from runs.llm.measure import estimated_tokens
from runs.llm.refusals import refused
from runs.models import OUTPUT_TOOL
from runs.tokens import TOKEN, TextSize, beginning, text_size
from runs.tools.base import ASK_USER, shorten

REPLY = (
    "Hello! I am the demo model and work offline, so this is all I can say by myself. "
    'Lines that start with "/" are a script for me, for example: /say Good morning'
)
RESULT = "{result}"
SHORT_SCRIPT_CHARS = 1000  # longer scripts are read on a thread, so that other runs of the event loop continue
WORDS_AT_ONCE = 50  # the number of words after which the other runs of the event loop continue
WORDS = re.compile(r"\S+\s*|\s+")
# By command: what follows it, the limits of each number there, and how many texts may follow the numbers.
COMMANDS: dict[str, tuple[str, tuple[tuple[int, int], ...], range]] = {
    "/ask": ("QUESTION", (), range(1, 2)),
    "/call": ("TOOL {json}", (), range(1, 2)),
    "/cut": ("", (), range(1)),
    "/fail": ("TEXT", (), range(1, 2)),
    "/flaky": ("CODE TIMES [TEXT]", ((400, 599), (0, 100)), range(2)),
    "/length": ("", (), range(1)),
    "/overflow": ("", (), range(1)),
    "/reason": ("TEXT", (), range(1, 2)),
    "/say": ("TEXT", (), range(1, 2)),
    "/stream": ("N MS", ((1, 100_000), (0, 60_000)), range(1)),
    "/usage": ("IN OUT", ((0, 1_000_000_000), (0, 1_000_000_000)), range(1)),
    "/wait": ("SECONDS", ((0, 600),), range(1)),
}
DIGITS, DIGITS_MAX = frozenset("0123456789."), 20
# A summary keeps lines with this word in full; other lines are cut to this number of characters.
REMEMBER = "remember"
SUMMARY_LINE_CHARS = 60
STREAM_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog")
# A command with its numbers and its text. ``/call`` has a tool's name and arguments; ``/ask`` becomes such a call.
Step = tuple[str, list[Any]]


class DemoModel:
    """``ModelClient`` of the provider ``demo``."""

    reads_files = False

    def __init__(self, server: Server) -> None:
        """The demo model has no settings."""

    async def stream(self, request: base.ModelRequest) -> AsyncIterator[base.ModelEvent]:
        if request.summarises:
            summary = _summary(request)
            yield summary
            yield TurnEnd(Usage(estimated_tokens(request), text_size(summary).tokens))
            return
        script, done, result = "", 0, None
        for message in request.messages:
            if isinstance(message, UserMessage) and not message.is_note:
                script, done, result = message.text, 0, None
            elif isinstance(message, AssistantMessage):
                done += 1
            elif isinstance(message, ToolMessage):
                result = message.content
        is_short = len(script) <= SHORT_SCRIPT_CHARS
        turns = parse_script(script) if is_short else await asyncio.to_thread(parse_script, script)
        turn = turns[done] if done < len(turns) else []
        if result is not None and result.startswith('"'):
            with suppress(MalformedJSON):
                result = str(parse_value(result))  # a JSON string without its quotes
        output = _Output(request, result)
        for command, values in turn:
            async for delta in output.run(command, values):
                yield delta
        calls = output.calls
        if len(calls) > base.TOOL_CALLS_PER_TURN_MAX:
            problem = f"A turn may call at most {base.TOOL_CALLS_PER_TURN_MAX} tools, not {len(calls)}."
            raise ModelError(FailureReason.ANSWER_TOO_LONG, problem)
        for index, (name, arguments) in enumerate(calls, 1):
            output.grow(name + arguments)
            if output.is_cut:
                raise ModelError(FailureReason.OUTPUT_LIMIT)
            yield ToolCall(f"call_{done + 1}_{index}", name, arguments)
        finish_reason = "length" if output.is_cut else "tool_calls" if calls else "stop"
        yield TurnEnd(output.reported or output.usage(), finish_reason, tuple(output.reasoning))


class _Output:
    """The output of one turn. ``failures``: its failed requests that no ``/flaky`` has accounted for yet."""

    def __init__(self, request: base.ModelRequest, result: str | None) -> None:
        self.request, self.result = request, result
        self.failures = request.failed_attempts
        self.room = request.max_output_tokens * TOKEN
        self.is_cut = False
        self.calls: list[list[str]] = []
        self.reported: Usage | None = None
        self.reasoning: list[dict[str, Any]] = []
        self.size = TextSize()
        self.characters = self.lines = self.words = 0
        self.seconds_left = float(settings.MODEL_TIMEOUT_SECONDS)

    async def run(self, command: str, values: list[Any]) -> AsyncIterator[str]:
        if self.is_cut and command != "/usage":
            return
        text, pause = "", 0.0
        match command, values:
            case "/say", [said]:
                text = said
            case "/usage", _:
                self.reported = Usage(*values)
            case "/call", _:
                self.calls.append(values)
            case "/wait", [seconds]:
                await self._sleep(seconds)
            case "/fail", [why]:
                raise ModelError(FailureReason.MODEL_FAILED, why)
            case "/cut", _:
                raise ModelError(FailureReason.CONNECTION_LOST)
            case "/overflow", _:
                raise ModelError(FailureReason.CONTEXT_TOO_LONG, status=400)
            case "/length", _:
                self.is_cut = True
            case "/reason", [thought]:
                self.grow(thought)
                self.reasoning.append({"type": "reasoning", "text": thought})
            case "/flaky", [status, times, *texts]:
                if self.failures < times:
                    raise refused(status, b"", {}, "")
                self.failures -= times
                text = "".join(texts)
            case "/stream", [count, milliseconds]:
                text = " ".join(itertools.islice(itertools.cycle(STREAM_WORDS), count))
                pause = milliseconds / 1000
        if not text:
            return
        if self.lines:
            yield self._delta("\n")
        self.lines += 1
        if self.result is not None:
            # Checked before the replacement: many placeholders and a long result would fill the memory.
            self._check_room(len(text) + text.count(RESULT) * (len(self.result) - len(RESULT)))
            text = text.replace(RESULT, self.result)
        for index, word in enumerate(WORDS.finditer(text)):
            if self.is_cut:
                return
            self.words += 1
            if index and pause:
                await self._sleep(pause)
            elif self.words % WORDS_AT_ONCE == 0:
                await asyncio.sleep(0)
            yield self._delta(word[0])

    def usage(self) -> Usage:
        output = min(self.size.tokens, self.request.max_output_tokens)
        reasoning = text_size("".join(item["text"] for item in self.reasoning)).tokens if self.reasoning else 0
        return Usage(estimated_tokens(self.request), output, reasoning_tokens=reasoning)

    def grow(self, text: str) -> None:
        """Count a text of the answer, which is cut at the request's output limit."""
        self._check_room(len(text))
        self.request.progress.usage = self.usage
        self.characters += len(text)
        self.size.add(text)
        self.is_cut = self.is_cut or self.size.weight >= self.room

    def _delta(self, text: str) -> str:
        self.grow(text)
        left = self.room - self.size.weight
        return text if left >= 0 else beginning(text, text_size(text).weight + left)

    def _check_room(self, characters: int) -> None:
        if self.characters + characters > base.MODEL_OUTPUT_MAX_CHARS:
            raise ModelError(FailureReason.ANSWER_TOO_LONG)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, self.seconds_left))
        self.seconds_left -= seconds
        if self.seconds_left < 0:
            raise ModelError(FailureReason.TIME_OUT)


def _summary(request: base.ModelRequest) -> str:
    """The lines with "remember" in full, then the beginnings of the other lines, as far as there is room."""
    texts = [message.text for message in request.messages if isinstance(message, UserMessage)]
    lines = [line for text in texts for line in text.split("\n") if line.strip() and not line.endswith(":")]
    kept = [line for line in lines if REMEMBER in line.lower()]
    kept += [shorten(line, SUMMARY_LINE_CHARS) for line in lines if REMEMBER not in line.lower()]
    return beginning("\n".join(dict.fromkeys(kept)), request.max_output_tokens * TOKEN)


def parse_script(message: str) -> list[list[Step]]:
    """The turns of a user's message. Raises ModelError, which names the wrong line and its correct form."""
    lines = [line.strip() for line in message.split("\n")]
    if not any(line.startswith("/") for line in lines):
        return [[("/say", [REPLY])]]
    turns: list[list[Step]] = [[]]
    called = ""  # the tool that the turn's last step calls
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            command, values = _read_line(line if line.startswith("/") else f"/say {line}")
        except ValueError as error:
            message = f"Line {number} of the script, {shorten(line, 100)!r}, is not valid: {error}"
            raise ModelError(FailureReason.MODEL_FAILED, message) from None
        if called and (command != "/call" or OUTPUT_TOOL in (called, values[0])):
            turns.append([])
        turns[-1].append((command, values))
        called = values[0] if command == "/call" else ""
    return turns


def _read_line(line: str) -> Step:
    """Raises ValueError, whose text gives the correct form."""
    command, *more = line.split(maxsplit=1)
    rest = more[0] if more else ""
    if command not in COMMANDS:
        raise ValueError(f"the commands are {', '.join(COMMANDS)}.")
    form, limits, texts = COMMANDS[command]
    words = rest.split(maxsplit=len(limits))
    numbers, text = words[: len(limits)], words[len(limits) :]
    given: list[Any] = []
    with suppress(ValueError):
        for word, (least, most) in zip(numbers, limits, strict=True):
            if len(word) <= DIGITS_MAX and DIGITS.issuperset(word):
                number = float(word) if command == "/wait" else int(word)
                given += [number] if least <= number <= most else []
    if len(given) < len(limits) or len(text) not in texts:
        ranges = "".join(f", from {least} to {most}" for least, most in limits)
        raise ValueError(f"write {command} {form}".rstrip() + f"{ranges}.")
    if command == "/ask":
        return "/call", [ASK_USER, to_text({"question": rest})]
    if command == "/call":
        name, *arguments = rest.split(maxsplit=1)
        if len(name) > base.TOOL_NAME_MAX_CHARS:
            raise ValueError(f"a tool's name has at most {base.TOOL_NAME_MAX_CHARS} characters.")
        return command, [name, arguments[0] if arguments else "{}"]
    return command, [*given, *text]
