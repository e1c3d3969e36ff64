"""The offline demo model: no network, no key, the same events as another model (docs/demo-model.md).

A message without a line that starts with ``/`` gets a short reply. Any other message is a script:

=====================  ==============================================================================================
``/say TEXT``          streams TEXT word by word; the last tool result, if any, replaces ``{result}``
``/call TOOL {json}``  a tool call with the JSON as written, even if malformed; without JSON, with ``{}``
``/ask QUESTION``      a call of ``ask_user``
``/stream N MS``       N words, MS milliseconds apart
``/wait SECONDS``      sends nothing for 0 to 600 seconds
``/fail TEXT``         the model fails with TEXT
``/usage IN OUT``      the token counts of the line's turn
=====================  ==============================================================================================

Calls (``/call``, ``/ask``) on consecutive lines belong to one turn and end it; the last turn has no calls. Line breaks
join the lines of text of one turn. Blanks around a line and empty lines are ignored; a line of a script without ``/``
is text. The whole script is checked before its first line runs.

The transcript is the only state: the number of turns after the last user message gives the next turn, so that any
process can continue. MODEL_TIMEOUT_SECONDS limits the time slept; MODEL_STALL_SECONDS does not apply, because
``/wait 600`` would fail with the default settings.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from config.kernel.jsontext import MalformedJSON, parse_value, to_text
from runs.llm.base import (
    TOOL_NAME_MAX_CHARS,
    AssistantMessage,
    ModelError,
    ModelEvent,
    ModelRequest,
    ModelTimeout,
    TextDelta,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
    estimate_tokens,
    transcript_chars,
)
from runs.llm.registry import Provider
from runs.tools.base import ASK_USER, shorten

REPLY = (
    "Hello! I am the demo model and work offline, so this is all I can say by myself. "
    'Lines that start with "/" are a script for me, for example: /say Good morning'
)
RESULT = "{result}"
WAIT_SECONDS_MAX = 600
STREAM_WORDS_MAX = 100_000
STREAM_MILLISECONDS_MAX = 60_000
USAGE_TOKENS_MAX = 1_000_000_000
# The number of words after which the other runs of the event loop continue.
WORDS_AT_ONCE = 50
WORDS = re.compile(r"\S+\s*|\s+")
STREAM_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog")


@dataclass(slots=True)
class ScriptTurn:
    """One turn of a script; ``steps`` are (command, its values), ``calls`` are (tool name, arguments)."""

    steps: list[tuple[str, Any]] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    usage: Usage | None = None


class DemoModel:
    """``ModelClient`` of the provider ``demo``. It ignores attached files."""

    reads_files = False

    def __init__(self, provider: Provider) -> None:
        """The demo model has no settings."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        start = max((at for at, message in enumerate(request.messages) if isinstance(message, UserMessage)), default=-1)
        opening = request.messages[start] if start >= 0 else UserMessage("")
        since = request.messages[start + 1 :]
        done = sum(isinstance(message, AssistantMessage) for message in since)
        results = [message.content for message in since if isinstance(message, ToolMessage)]
        turns: list[ScriptTurn] = []
        if isinstance(opening, UserMessage):
            # Other runs of the event loop continue while a thread reads a long script.
            turns = await asyncio.to_thread(parse_script, opening.text)
        turn = turns[done] if done < len(turns) else ScriptTurn()
        output = _Output(_plain(results[-1]) if results else None)
        for step in turn.steps:
            async for delta in output.run(*step):
                yield delta
        if len(turn.calls) > settings.TOOL_CALLS_PER_TURN_MAX:
            most = settings.TOOL_CALLS_PER_TURN_MAX
            raise ModelError(f"A turn may call at most {most} tools, not {len(turn.calls)}.")
        characters = output.characters
        for index, (name, arguments) in enumerate(turn.calls, 1):
            characters += len(name) + len(arguments)
            yield ToolCall(f"call_{done + 1}_{index}", name, arguments)
        yield turn.usage or Usage(estimate_tokens(transcript_chars(request)), estimate_tokens(characters))

    async def aclose(self) -> None:
        """Nothing is open."""


class _Output:
    """The output of one turn: the characters, lines and words so far, and the seconds slept."""

    def __init__(self, result: str | None) -> None:
        self.result = result
        self.characters = 0
        self.lines = 0
        self.words = 0
        self.slept = 0.0

    async def run(self, command: str, values: Any) -> AsyncIterator[TextDelta]:
        if command == "/wait":
            await self._sleep(values)
            return
        if command == "/fail":
            raise ModelError(values)
        if self.lines:
            yield self._delta("\n")
        self.lines += 1
        if command == "/stream":
            count, milliseconds = values
            for index, word in enumerate(itertools.islice(itertools.cycle(STREAM_WORDS), count)):
                if index:
                    await self._sleep(milliseconds / 1000)
                yield self._delta(word if index == count - 1 else word + " ")
            return
        text: str = values
        if self.result is not None:
            # Before the replacement: many placeholders and a long result would fill the memory.
            self._check_room(len(text) + text.count(RESULT) * (len(self.result) - len(RESULT)))
            text = text.replace(RESULT, self.result)
        for match in WORDS.finditer(text):
            self.words += 1
            if self.words % WORDS_AT_ONCE == 0:
                await asyncio.sleep(0)
            yield self._delta(match[0])

    def _delta(self, text: str) -> TextDelta:
        self._check_room(len(text))
        self.characters += len(text)
        return TextDelta(text)

    def _check_room(self, characters: int) -> None:
        if self.characters + characters > settings.MODEL_OUTPUT_MAX_CHARS:
            raise ModelError(f"The model wrote more than {settings.MODEL_OUTPUT_MAX_CHARS} characters in one turn.")

    async def _sleep(self, seconds: float) -> None:
        left = settings.MODEL_TIMEOUT_SECONDS - self.slept
        self.slept += seconds
        await asyncio.sleep(min(seconds, max(0.0, left)))
        if seconds > left:
            raise ModelTimeout(f"The model took longer than {settings.MODEL_TIMEOUT_SECONDS:g} seconds.")


def _plain(content: str) -> str:
    """A tool result as text: a JSON string without its quotes, any other result unchanged."""
    if content.startswith('"'):
        with suppress(MalformedJSON):
            return str(parse_value(content))
    return content


def parse_script(message: str) -> list[ScriptTurn]:
    """The turns of a user's message. Raises ModelError, which names the wrong line and its correct form."""
    lines = [line.strip() for line in message.split("\n")]
    if not any(line.startswith("/") for line in lines):
        return [ScriptTurn(steps=[("/say", REPLY)])]
    turns = [ScriptTurn()]
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        if not line.startswith("/"):
            line = f"/say {line}"
        command, *rest = line.split(maxsplit=1)
        if turns[-1].calls and command not in ("/call", "/ask"):
            turns.append(ScriptTurn())
        try:
            _read_line(turns[-1], command, rest[0] if rest else "")
        except ValueError as error:
            raise ModelError(f"Line {number} of the script, {shorten(line, 100)!r}, is not valid: {error}") from None
    if turns[-1].calls:
        turns.append(ScriptTurn())
    return turns


def _read_line(turn: ScriptTurn, command: str, rest: str) -> None:
    """Add a line to its turn. Raises ValueError, whose text gives the correct form."""
    match command:
        case "/say" | "/fail" if rest:
            turn.steps.append((command, rest))
        case "/call" if rest:
            name, *arguments = rest.split(maxsplit=1)
            if len(name) > TOOL_NAME_MAX_CHARS:
                raise ValueError(f"a tool's name has at most {TOOL_NAME_MAX_CHARS} characters.")
            turn.calls.append((name, arguments[0] if arguments else "{}"))
        case "/ask" if rest:
            turn.calls.append((ASK_USER, to_text({"question": rest})))
        case "/stream":
            numbers = _whole_numbers(rest, (1, STREAM_WORDS_MAX), (0, STREAM_MILLISECONDS_MAX), "/stream N MS")
            turn.steps.append((command, numbers))
        case "/wait":
            seconds = float(rest) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", rest) else -1.0
            if not 0 <= seconds <= WAIT_SECONDS_MAX:
                raise ValueError(f"write /wait SECONDS, a number from 0 to {WAIT_SECONDS_MAX}.")
            turn.steps.append((command, seconds))
        case "/usage":
            turn.usage = Usage(*_whole_numbers(rest, (0, USAGE_TOKENS_MAX), (0, USAGE_TOKENS_MAX), "/usage IN OUT"))
        case "/say" | "/call" | "/ask" | "/fail":
            wanted = {"/say": "TEXT", "/call": "TOOL {json}", "/ask": "QUESTION", "/fail": "TEXT"}[command]
            raise ValueError(f"write {command} {wanted}.")
        case _:
            raise ValueError("the commands are /say, /call, /ask, /stream, /wait, /fail and /usage.")


def _whole_numbers(rest: str, first: tuple[int, int], second: tuple[int, int], usage: str) -> tuple[int, int]:
    words = rest.split()
    if len(words) == 2 and all(re.fullmatch(r"[0-9]{1,12}", word) for word in words):
        a, b = int(words[0]), int(words[1])
        if first[0] <= a <= first[1] and second[0] <= b <= second[1]:
            return a, b
    raise ValueError(f"write {usage}, whole numbers from {first[0]} to {first[1]} and from {second[0]} to {second[1]}.")
