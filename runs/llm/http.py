"""What the adapters of network providers share: the request, the time limits, the errors, the events of a turn. An
adapter adds its formats. Why no SDK is used: docs/decisions/0023.
"""

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import aiohttp

from config.kernel.jsontext import to_text
from config.outbound.transport import earn
from runs.catalogue.definitions import Server
from runs.errors import FailureReason
from runs.llm import base
from runs.llm.base import AssistantMessage, ModelError, ModelEvent, ModelRequest, ToolCall, TurnEnd, Usage
from runs.llm.connection import Deadlines, session
from runs.llm.measure import estimated_tokens
from runs.llm.refusals import redacted, refused, stopped
from runs.llm.wire import SseDecoder, clean_json, join_surrogates, read_event, sent_name
from runs.tokens import TextSize

# Bytes that are read before other runs of the event loop continue: a chunk can have tens of thousands of events.
BYTES_AT_ONCE = 8 * 1024
EVENTS_MAX = 200_000  # the most events that add nothing to the answer, such as pings
ERROR_BODY_MAX_BYTES = 16 * 1024
ERROR_BODY_SECONDS = 5.0  # the status is known before the body, which only explains it
DOCUMENT_MAX_BYTES = 4 * 1024 * 1024
COUNT_SECONDS = 5.0
# The count before a request may be slightly lower than the one after it: one token for each COUNT_MARGIN is added.
COUNT_MARGIN = 50
STREAM_TYPES = ("text/event-stream", "application/json", "application/octet-stream", "text/plain")
TOOL_CALL_ID_MAX_CHARS = 200
TOKENS_MAX = 1_000_000_000
# Reasons of an answer's end.
LENGTH = {"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"}
# All but the first two are Gemini's.
FILTERED = {"content_filter", "refusal", "safety", "recitation", "prohibited_content", "blocklist", "spii"}
# In this order: OpenRouter and Mistral; vLLM; DeepSeek; Gemini, after a call that it could not read.
BROKEN = {"error", "abort", "insufficient_system_resource", "function_call_filter", "malformed_function_call"}
# The exceptions of an adapter for an answer that does not follow its protocol.
NOT_VALID = (ValueError, ArithmeticError, TypeError, AttributeError, LookupError, RecursionError)


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    given: str = ""  # the arguments if none come in parts
    begins_whole: bool | None = None  # whether the first part of the arguments is an object; None: it was not parsed


class TurnReader(ABC):
    """Collects the events of one turn. Text is passed on at once, calls and usage at the end."""

    def __init__(self, request: ModelRequest, secrets: tuple[str, ...] = ()) -> None:
        self.request = request
        self.secrets = secrets
        self.ended = False
        self.finish_reason: str | None = None
        self.finish_detail = ""  # the provider's text about the reason, for staff
        self.counts = Counter[str]()  # the counts that the provider has reported, by the names of ``Usage``
        self.reasoning: list[dict[str, Any]] = []
        self._calls: list[Call] = []
        # The calls and the items of reasoning by the keys with which the provider distinguishes them.
        self.calls, self.thoughts = dict[Any, Any](), dict[Any, dict[str, Any]]()
        self.characters = 0
        self._size = TextSize()
        self._passed_on = 0
        self._half = ""

    @abstractmethod
    def read(self, event: dict[str, Any]) -> str:
        """Read one event and return what ``text`` made of its text. Raises one of NOT_VALID for a malformed event."""

    def read_document(self, document: dict[str, Any]) -> str:
        """Read a whole answer, which some servers send instead of a stream, and return its text, as in ``read``."""
        return self.read(document)

    def text(self, part: str) -> str:
        """The text to pass on. The first half of a surrogate pair waits for the second half."""
        self.grow(part)
        part = self._half + part
        self._half = part[-1] if "\ud800" <= part[-1:] <= "\udbff" else ""
        text = join_surrogates(part.removesuffix(self._half))
        self._passed_on += len(text)
        return text

    def say_reason(self, reason: str | None) -> None:
        """Record why the answer ended, without the text that Gemini adds after a colon."""
        if reason:
            self.finish_reason = reason.partition(":")[0].lower()

    def keep(self, item: dict[str, Any]) -> None:
        """Record an item of reasoning with its position in the turn, where ``wire.in_order`` puts it back."""
        if self.request.model.dialect.reasoning_back:
            self.reasoning.append({"item": item, "characters": self._passed_on, "calls": len(self._calls)})

    def begin_call(self, call_id: str, name: str) -> Call:
        """Raises TypeError for values that are not strings; so does ``add_arguments``."""
        most = base.TOOL_CALLS_PER_TURN_MAX
        if len(self._calls) >= most:
            raise ModelError(FailureReason.ANSWER_TOO_LONG, f"The model called more than {most} tools in one turn.")
        self.grow(call_id + name + "")
        self._calls.append(Call(call_id, name))
        return self._calls[-1]

    def add_arguments(self, call: Call, part: str) -> None:
        self.grow(part + "")
        if part:
            call.arguments.append(part)

    def count(self, **reported: Any) -> None:
        """Record valid counts that are larger than before: counts are cumulative, but some servers later send 0."""
        for name, value in reported.items():
            if type(value) is int and 0 <= value <= TOKENS_MAX:
                self.counts[name] = max(value, self.counts[name])

    def complete(self) -> tuple[int, int | None] | None:
        """Characters and counted output tokens of a complete answer; None if it is not complete. After the reason of
        its end, only counts can follow. An end without a reason completes an answer that has begun.
        """
        is_complete = self.finish_reason is not None or (self.ended and self.has_begun)
        return (self.characters, self.counts.get("output_tokens")) if is_complete else None

    @property
    def has_begun(self) -> bool:
        """Whether a part of the answer has come. Events without a part cost nothing."""
        return bool(self._size.bytes or self._calls)

    def grow(self, text: str, kept: int = 0) -> None:
        """Count a text of the answer or of its reasoning, and ``kept`` characters that are stored with it."""
        self._size.add(text)
        self.characters += len(text) + kept
        if self.characters > base.MODEL_OUTPUT_MAX_CHARS:
            raise ModelError(FailureReason.ANSWER_TOO_LONG)

    def finish(self) -> Iterator[ModelEvent]:
        """The events of a complete turn. Raises ModelError if the turn is not complete."""
        if self.complete() is None:
            raise ModelError(FailureReason.CONNECTION_LOST, detail="The answer ended before it was complete.")
        cut = self.finish_reason in LENGTH
        if cut and self._calls:
            raise ModelError(FailureReason.OUTPUT_LIMIT)
        if self.finish_reason in FILTERED:
            raise ModelError(FailureReason.CONTENT_FILTERED, detail=redacted(self.finish_detail, self.secrets))
        if self.finish_reason in BROKEN:
            raise ModelError(FailureReason.PROVIDER_UNAVAILABLE, detail=f"The answer ended with {self.finish_reason}.")
        if self._half:
            yield join_surrogates(self._half)
        yield from self._finished_calls()
        finish_reason = "length" if cut else "tool_calls" if self._calls else "stop"
        try:
            reasoning = tuple(map(clean_json, self.reasoning))
        except ValueError:
            raise ModelError(FailureReason.MALFORMED_ANSWER, detail="The reasoning is not valid.") from None
        yield TurnEnd(self._usage(), finish_reason, reasoning)

    def _finished_calls(self) -> Iterator[ToolCall]:
        turns = [message for message in self.request.messages if isinstance(message, AssistantMessage)]
        earlier = [call for turn in turns for call in turn.tool_calls]
        ours = [tool.name for tool in self.request.tools] + [call.name for call in earlier]
        names = {sent_name(name): name for name in ours}
        used_ids = {call.id for call in earlier}
        for index, call in enumerate(self._calls, 1):
            name = join_surrogates(call.name).strip()
            name = names.get(name, name)[: base.TOOL_NAME_MAX_CHARS]
            if not name:
                raise ModelError(FailureReason.MALFORMED_ANSWER, detail="A tool call has no name.")
            call_id = join_surrogates(call.id)[:TOOL_CALL_ID_MAX_CHARS]
            if not call_id or call_id in used_ids:
                # Some servers send no ids, or count from 0 in every turn, but a result must identify its call.
                new_ids = (f"call_{self.request.turn_index}_{number}" for number in itertools.count(index))
                call_id = next(new_id for new_id in new_ids if new_id not in used_ids)
            used_ids.add(call_id)
            arguments = join_surrogates("".join(call.arguments) or call.given).strip() or "{}"
            yield ToolCall(call_id, name, arguments)

    def _usage(self) -> Usage:
        """The reported counts. Missing counts and 0 are estimated; only an empty answer may have 0 output tokens."""
        counts = self.counts
        input_tokens = counts["input_tokens"] or estimated_tokens(self.request)
        output_tokens = reported = counts.get("output_tokens")
        if not output_tokens and (output_tokens is None or self.has_begun):
            output_tokens = self._size.tokens
        cached = min(counts["cached_tokens"], input_tokens)
        return Usage(
            input_tokens,
            output_tokens,
            cached,
            min(counts["cache_write_tokens"], input_tokens - cached),
            min(counts["reasoning_tokens"], output_tokens),
            estimated=not counts["input_tokens"] or output_tokens != reported,
        )

    def partial_usage(self) -> Usage:
        """What was used so far. The provider may have counted only a part of the output, or none of it."""
        usage = self._usage()
        return replace(usage, output_tokens=max(usage.output_tokens, self._size.tokens))


class HttpModel(ABC):
    """``ModelClient`` of a server behind HTTP."""

    path: ClassVar[str]
    # The path at which the provider counts the tokens of a request, and the fields of a request that are sent there.
    count_path: ClassVar[str] = ""
    counted_fields: ClassVar[tuple[str, ...]] = ()
    reader: ClassVar[type[TurnReader]]
    reads_files = True

    def __init__(self, server: Server) -> None:
        self.server = server
        self.headers = {
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            "User-Agent": "agent-workflow-service",
            **(self.key_headers() if server.api_key else {}),
            **dict(server.headers),
        }
        self.secrets = server.secrets()

    def key_headers(self) -> dict[str, str]:
        if self.server.is_azure:
            return {"api-key": self.server.api_key}
        return {"Authorization": f"Bearer {self.server.api_key}"}

    @staticmethod
    @abstractmethod
    def fields(request: ModelRequest) -> dict[str, Any]:
        """The request in the provider's format, without the parameters' ``extra``. Fields with None are not sent."""

    @classmethod
    def body(cls, request: ModelRequest) -> dict[str, Any]:
        """The request as it is sent, with the parameters' ``extra``."""
        given = {name: value for name, value in cls.fields(request).items() if value is not None}
        return given | request.model.parameters.get("extra", {})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        url, content = self.server.base_url + path, to_text(body).encode()
        return session().post(url, data=content, headers=self.headers, allow_redirects=False)

    async def count(self, request: ModelRequest) -> int | None:
        if not self.count_path:
            return None
        body = {name: value for name, value in self.body(request).items() if name in self.counted_fields}
        try:
            async with asyncio.timeout(COUNT_SECONDS), self._post(self.count_path, body) as response:
                counted = read_event(await _error_body(response)).get("input_tokens")
                is_counted = response.status == 200 and type(counted) is int and counted > 0
        except (aiohttp.ClientError, TimeoutError, OSError, *NOT_VALID):
            return None
        return counted + counted // COUNT_MARGIN + COUNT_MARGIN if is_counted else None

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        deadlines, reader, body = Deadlines(), self.reader(request, self.secrets), self.body(request)
        try:
            response = await deadlines.limit(self._post(self.path, body))
            try:
                if response.status != 200:
                    raise refused(response.status, await _error_body(response), response.headers, self.secrets)
                _check_is_stream(response)
                async for text in self._texts(response, reader, deadlines):
                    yield text
                for event in reader.finish():
                    yield event
            finally:
                if not response.content.at_eof():
                    response.close()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = FailureReason.CONNECTION_LOST
            if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                reason = FailureReason.PROVIDER_UNREACHABLE
            elif isinstance(error, aiohttp.ClientResponseError):
                reason = FailureReason.MALFORMED_ANSWER
            # Without the error's text, which contains addresses and headers.
            raise ModelError(reason, detail=type(error).__name__) from None

    async def _texts(
        self, response: aiohttp.ClientResponse, reader: TurnReader, deadlines: Deadlines
    ) -> AsyncIterator[str]:
        """The texts of the answer. Some servers send a document instead of a stream, whatever their Content-Type is."""
        decoder, document = SseDecoder(), bytearray()
        events, is_stream = 0, False
        chunks = response.content.iter_any()
        # After its end, nothing can be added to the answer: its size counts as (0, 0). The rest of the body is read all
        # the same, so that the connection can be used again.
        while (chunk := await deadlines.next(chunks, (0, 0) if reader.ended else reader.complete())) is not None:
            if reader.ended:
                continue
            for first in range(0, len(chunk), BYTES_AT_ONCE):
                if first:
                    await asyncio.sleep(0)
                piece = chunk[first : first + BYTES_AT_ONCE]
                if document or (not is_stream and piece.lstrip()[:1] in (b"{", b"[")):
                    document += piece
                    earn(response, len(piece))
                    if len(document) > DOCUMENT_MAX_BYTES:
                        raise ModelError(FailureReason.MALFORMED_ANSWER, detail="The answer is too long.")
                    continue
                is_stream = is_stream or not piece.isspace()
                found, size = decoder.feed(piece)
                earn(response, size)
                events += len(found)
                if events > EVENTS_MAX + reader.characters:
                    raise ModelError(FailureReason.MALFORMED_ANSWER, detail="Too many events say nothing.")
                texts = list[str]()
                try:
                    for data in found:
                        reader.ended = reader.ended or data == b"[DONE]"
                        texts.append("" if reader.ended else self._read(reader, reader.read, data))
                finally:  # if an event raises an error, the texts before it are passed on first
                    if text := "".join(texts):
                        yield text
        if document:
            yield self._read(reader, reader.read_document, bytes(document))
            reader.ended = True
            if reader.complete() is None:
                raise ModelError(FailureReason.NOT_A_STREAM, detail="The document is no answer.", status=200)

    def _read(self, reader: TurnReader, read: Any, data: bytes) -> str:
        try:
            event = read_event(data)
            if not event.get("error"):
                text: str = read(event) + ""
                if text or reader.has_begun:
                    reader.request.progress.usage = reader.partial_usage
                return text
        except NOT_VALID:
            raise ModelError(FailureReason.MALFORMED_ANSWER, detail="An event could not be read.") from None
        raise stopped(event, self.secrets)


def _check_is_stream(response: aiohttp.ClientResponse) -> None:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ModelError(FailureReason.MALFORMED_ANSWER, detail="The answer is compressed.")
    # aiohttp's ``content_type`` takes minutes for a hostile header.
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind.count("/") == 1 and kind not in STREAM_TYPES:
        raise ModelError(FailureReason.NOT_A_STREAM, detail=f"The answer is {kind}.", status=200)


async def _error_body(response: aiohttp.ClientResponse) -> bytes:
    """The first bytes of the body, as far as they arrive within ERROR_BODY_SECONDS."""
    body = bytearray()
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(ERROR_BODY_SECONDS):
            async for part in response.content.iter_any():
                body += part
                if len(body) > ERROR_BODY_MAX_BYTES:
                    break
    return bytes(body)
