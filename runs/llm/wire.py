"""What the formats of all providers need: server-sent events, clean text and JSON, names and ids that every provider
accepts, and parts of a transcript. Nothing here is specific to a provider.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from config.kernel.jsontext import VALUES_MAX, MalformedJSON, from_text, has_more_values, parse_object, to_text
from runs.errors import FailureReason
from runs.llm.base import AssistantMessage, AttachedFile, ModelError, ModelRequest, ToolCall
from runs.tools import schema
from runs.tools.base import ToolSpec, clean_text

MODEL_EVENT_MAX_BYTES = 2 * 1024 * 1024  # of one event in the answer of a provider; a longer one is a `MODEL_ERROR`
LONE_SURROGATE = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")
DEPTH_MAX = 32  # the most levels of an item of reasoning; known items have four
ACCEPTED = re.compile(r"[A-Za-z0-9_-]{1,64}")
HASH_CHARS = 8
ACCEPTED_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")  # OpenAI's chat completions refuse a longer id
MALFORMED_ARGUMENTS = "malformed_arguments"


def read_event(data: bytes) -> Any:
    """The JSON of an event. Raises ValueError or RecursionError."""
    if has_more_values(data, VALUES_MAX):
        raise ValueError("too many values")
    return from_text(data)


class SseDecoder:
    """Takes chunks of any length. A chunk may end within a line, a character or a line break."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        # The bytes of the lines in ``_data``, with their field names: a line without a value takes memory, too.
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> tuple[list[bytes], int]:
        """The data of each event that this chunk completes, and the bytes of its whole lines of data. Raises ModelError
        if an event is too long.
        """
        self._rest += chunk
        events, size = list[bytes](), 0
        if b"\n" in chunk:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._data.append(bytes(line[5:].strip()))
                    self._data_bytes += len(line) + 1
                    size += len(line)
                elif self._data and not line.rstrip(b"\r"):
                    events.append(b"\n".join(self._data))
                    self._data.clear()
                    self._data_bytes = 0
        if len(self._rest) + self._data_bytes > MODEL_EVENT_MAX_BYTES:
            raise ModelError(FailureReason.MALFORMED_ANSWER, detail="An event is too long.")
        return events, size


def join_surrogates(text: str) -> str:
    """The text with each surrogate pair as one character, and without NUL and lone surrogates."""
    if text.isascii():
        return text.replace("\x00", "")
    text = LONE_SURROGATE.sub("\ufffd", text)  # the codec's error handler would be slow
    return clean_text(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le"))


def clean_json(value: Any, depth: int = 0) -> Any:
    """The value with all its texts cleaned. Raises ValueError for too many levels or a number that is not finite."""
    if depth > DEPTH_MAX or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError
    if isinstance(value, str):
        return join_surrogates(value)
    if isinstance(value, dict):
        return {join_surrogates(name): clean_json(part, depth + 1) for name, part in value.items()}
    if isinstance(value, list):
        return [clean_json(part, depth + 1) for part in value]
    return value


def sent_name(name: str) -> str:
    """``name``, or a name that every provider accepts and that is the same at every turn."""
    if ACCEPTED.fullmatch(name):
        return name
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[: 63 - HASH_CHARS] + f"_{_digest(name)[:HASH_CHARS]}"


def sent_id(call_id: str, length: int = 0) -> str:
    """``call_id``, or an id that every provider accepts, the same at every turn; with ``length``, of that length."""
    if length:
        fits = len(call_id) == length and call_id.isascii() and call_id.isalnum()
        return call_id if fits else _digest(call_id)[:length]
    return call_id if ACCEPTED_ID.fullmatch(call_id) else f"call_{_digest(call_id)[:32]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. Malformed or too long ones become the only value of an object, as text."""
    if len(arguments) <= schema.TOOL_INPUT_MAX_CHARS:
        with suppress(MalformedJSON):
            return parse_object(arguments)
    return {MALFORMED_ARGUMENTS: arguments}


def in_order(message: AssistantMessage, origin: str | None) -> Iterator[str | ToolCall | dict[str, Any]]:
    """The texts, the calls and the items of reasoning of an earlier turn, in the order in which they came. Left out are
    reasoning of another origin, and reasoning at the end of the turn, which providers refuse.
    """
    characters = calls = 0
    for kept in message.reasoning if message.origin == origin else ():
        if kept["characters"] >= len(message.text) and kept["calls"] >= len(message.tool_calls):
            break
        if text := message.text[characters : kept["characters"]]:
            yield text
        yield from message.tool_calls[calls : kept["calls"]]
        yield kept["item"]
        characters, calls = max(characters, kept["characters"]), max(calls, kept["calls"])
    if text := message.text[characters:]:
        yield text
    yield from message.tool_calls[calls:]


def function_of(tool: ToolSpec) -> dict[str, Any]:
    """A tool in OpenAI's formats, which refuse a schema without ``type`` or ``properties``."""
    parameters = {"type": "object", "properties": {}} | tool.input_schema
    return {"name": sent_name(tool.name), "description": tool.description, "parameters": parameters}


def sampling(request: ModelRequest, **names: str) -> dict[str, Any]:
    """The sampling parameters by the provider's ``names`` of them; none if the model does not accept any."""
    given = request.model.parameters if request.model.dialect.sampling else {}
    return {theirs: given[ours] for theirs, ours in names.items() if ours in given}


def file_text(file: AttachedFile) -> str:
    """A file as text: its name, type and size, with its text or a note why that is missing."""
    # Quoted as JSON, so that a name cannot imitate other parts of the message.
    size = f", {file.size_bytes} bytes" if file.size_bytes else ""
    label = f"Attachment {to_text(file.name)} ({file.content_type}{size})"
    if file.note:
        label += f" [{file.note}]"
    return label if file.text is None else f"{label}:\n\n{file.text}"


def data_url(file: AttachedFile) -> str:
    return f"data:{file.content_type};base64,{file.data}"
