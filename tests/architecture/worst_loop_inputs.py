"""What event loops execute, with its worst inputs (``worst_inputs``): while one of these computes, all others wait."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from config.kernel.jsontext import from_text, to_text
from config.outbound import addresses
from config.outbound.client import Answer
from runs.events import StreamType
from runs.fronts import views as fronts
from runs.fronts.ag_ui import events
from runs.fronts.ag_ui.events import SNAPSHOT_CHARS, tool_call
from runs.fronts.ai_sdk.chunks import Chunks
from runs.fronts.rendering import Call, Rendering
from runs.llm import refusals, wire
from runs.llm.http import DOCUMENT_MAX_BYTES as DOCUMENT
from runs.models import Run
from runs.streams.hub import Opening
from runs.streams.reads import Event
from runs.tools import http as http_tool
from runs.tools.mcp import tasks
from runs.tools.mcp import transport as mcp_transport
from runs.tools.schema import TOOL_INPUT_MAX_CHARS as ARGUMENTS
from tests.architecture.worst_inputs import (
    ANSWER,
    EVENT,
    HEADER,
    JSON_PARTS,
    KIB,
    OUTPUT,
    UNCLOSED,
    Work,
    around,
    array,
    filled,
)
from tests.architecture.worst_scanner_inputs import TOOL

# What a stream of a provider or a client brings at once, at most.
CHUNK = 384 * KIB
INTERRUPTED = Call("inv_a", "tool", 1)
RUN = Run(id="run_a", chat_id="chat_a", assistant_message_id="msg_a")
OPENING = Opening("run_a", 0, 1, final=None, user_id=1)


def fed(*chunks: bytes) -> None:
    decoder = wire.SseDecoder()
    for chunk in chunks:
        decoder.feed(chunk)


def url_of(text: str) -> Any:
    return addresses.parse(text, https_only=False)


def rendered(new: Callable[[], Rendering], kind: str, data: Mapping[str, Any]) -> bytes:
    """An event as frames of a chat front end."""
    event = Event(2, kind, to_text(data))
    return fronts.Frames(new(), OPENING).of(event, INTERRUPTED)


RENDERINGS: tuple[Callable[[], Rendering], ...] = (partial(Chunks, RUN), partial(events.AgUi, RUN, "thread", "name"))


def delta(new: Callable[[], Rendering], text: str) -> bytes:
    return rendered(new, StreamType.MESSAGE_DELTA, {"text": text})


def started(new: Callable[[], Rendering], input: Any) -> bytes:
    call = {"toolInvocationId": "inv_a", "name": "tool", "turnIndex": 1, "status": "DISPATCHING", "input": input}
    return rendered(new, StreamType.TOOL_STARTED, call)


def opened(new: Callable[[], Rendering], input: Any) -> bytes:
    asked = {"toolName": "tool", "estimatedCredits": 1, "threshold": 1, "input": input}
    waitpoint = {"id": "wp_a", "kind": "CREDIT_APPROVAL", "expiresAt": "", "requestPayload": asked}
    return rendered(new, StreamType.WAITPOINT_OPENED, waitpoint)


def snapshot(message: dict[str, Any]) -> bytes:
    return fronts.frame(events.AgUi(RUN).snapshot([message] * (SNAPSHOT_CHARS // len(to_text(message)))), "1.1")


def task(text: str, kind: str = "application/json") -> object:
    read = tasks._read(TOOL, Answer(200, {"Content-Type": kind}, text.encode(), False))
    return tasks._outcome(TOOL, read)


def task_result(content: str) -> object:
    return task(f'{{"id":1,"result":{{"status":"completed","result":{content}}}}}')


ON_EVENT_LOOPS: dict[str, list[Work]] = {
    "chunk of a provider": [
        partial(fed, filled(part, CHUNK).encode())
        for part in (":\n", "\n", "data:\n", "data:{}\n\n", "data:{}\r\n\r\n", "a")
    ],
    "event of a provider": [
        *[partial(wire.read_event, array(part, EVENT).encode()) for part in JSON_PARTS],
        *around(lambda text: wire.read_event(text.encode()), EVENT, *UNCLOSED),
        *[
            partial(wire.read_event, f'"{filled(part, EVENT // 2 - 2)}"'.encode())
            for part in ("a", "\\n", "\u00e9", "[{")
        ],
    ],
    "document of a provider": [
        *[partial(wire.read_event, array(part, DOCUMENT).encode()) for part in JSON_PARTS],
        *[
            partial(wire.read_event, f'"{filled(part, DOCUMENT // 2 - 2)}"'.encode())
            for part in ("a", "\\n", "\u00e9", "[{")
        ],
    ],
    "error of a provider": [
        *[
            partial(refusals.stopped, {"error": {"message": filled(part, DOCUMENT), "code": code}}, ("secret",))
            for part in ("//", "/", "//a", "a*** ", "a", "\u00e9")
            for code in (429, "invalid")
        ],
        partial(refusals.stopped, {"error": {"message": "a", "code": [[0]] * EVENT, "type": {"a": [0] * EVENT}}}, ()),
        partial(refusals.stopped, {"detail": [{"loc": [0] * EVENT, "msg": "a"}]}, ()),
    ],
    # JSON joins pairs, so that only the halves at the ends of two events make one here.
    "text of a provider": [
        *around(wire.join_surrogates, EVENT // 6, "a", "\u00e9", "\ud800"),
        *around(wire.join_surrogates, CHUNK // 30, "\ud83d\ude00"),
    ],
    "arguments in a transcript": [
        *[partial(wire.arguments_object, array(part, ARGUMENTS)) for part in JSON_PARTS],
        *around(wire.arguments_object, OUTPUT, "[", "[],"),
    ],
    "URL": [
        *around(url_of, HEADER, "/", "a.", "\u00e4.", "\u00e4", "@", ":", "%41", "a:", "[", before="http://"),
        *around(url_of, HEADER, "%", "\u00e4", "/..", "?", "#", before="http://a/"),
    ],
    "frames of a front end": [
        *[
            partial(delta, new, filled(part, OUTPUT))
            for part in ("a", "\u00e9", "\u2028", "\U0001f600", '"', "\x01")
            for new in RENDERINGS
        ],
        *[
            partial(show, new, {"a": from_text(array(part, ARGUMENTS))})
            for part in JSON_PARTS
            for show in (started, opened)
            for new in RENDERINGS
        ],
        partial(snapshot, {"id": "a", "role": "user", "content": filled("\u2028", KIB)}),
        partial(snapshot, {"id": "a", "role": "assistant", "toolCalls": [tool_call("a", "a")] * 64}),
    ],
    "answer 202 of a tool": [
        *[partial(http_tool._parked, array(part, ANSWER).encode()) for part in (*JSON_PARTS, "9" * 4300 + ",")],
        *[
            partial(http_tool._parked, f'{{"message":"{filled(part, ANSWER - 20)}"}}'.encode())
            for part in ("inv_", f"inv_{'a' * 60}", "\\u00e9", f"inv_a.{'a' * 43}")
        ],
        partial(http_tool._reason, TOOL, b"inv_" * (ANSWER // 4)),
    ],
    "task of an MCP server": [
        *around(
            lambda text: task(text, "text/event-stream"),
            ANSWER,
            *("data:\n\n", "data:[\n\n", "data:1\n\n", "data\n\n", "data:\n", "\r", "\n", "\r\n"),
        ),
        partial(task, "data:\n\n" * (mcp_transport.LINES_MAX // 2), "text/event-stream"),
        *[
            partial(task_result, f'{{"{name}":{array(part, size)}}}')
            for name in ("content", "structuredContent")
            for part in JSON_PARTS
            for size in (ANSWER - KIB, len(part) * mcp_transport.VALUES_MAX // (1 + part.count(":") + part.count("[")))
        ],
        *[
            partial(task_result, f'{{"content":{array(block, mcp_transport.VALUES_MAX * 10)}}}')
            for block in ('{"type":"text","text":"a"},', '{"type":"image","data":"A","mimeType":"a"},')
        ],
    ],
}
