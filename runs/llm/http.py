"""What the adapters of network providers share: the connection, its clocks, its failures, the turn being put together.

An adapter adds what differs: how a transcript is written, how an event is read, its SDK. Requests go through
the provider's SDK (address, authentication, headers), but events are decoded here: the SDKs' typed ones cost several
times the CPU, and a process carries thousands of streams.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import aiohttp
import httpx2
from django.conf import settings

from runs.llm.base import (
    TOOL_NAME_MAX_CHARS,
    AssistantMessage,
    ModelError,
    ModelEvent,
    ModelRequest,
    ModelTimeout,
    TextDelta,
    ToolCall,
    Usage,
    estimate_tokens,
    transcript_chars,
)
from runs.llm.sse import EventTooLong, SseDecoder
from runs.tools.base import clean_text, is_web_address, shorten

logger = logging.getLogger(__name__)

# A turn's own clocks are kept by ``_Clock``.
HTTP_TIMEOUT = httpx2.Timeout(None, connect=10.0)
# Shorter than servers' own (uvicorn: 5 s): what is sent on a connection that the other side just closes is lost.
KEEPALIVE_SECONDS = 4.0
CONNECTIONS_MIN = 2000
# Made at import: reading the certificates takes long enough to hold up an event loop.
SSL_CONTEXT = httpx2.create_ssl_context()
# The end of a body that follows the last event at once lets the connection be used again; no turn waits longer for it.
DRAIN_SECONDS = 0.25
ERROR_BODY_MAX_BYTES = 16 * 1024
ERROR_DETAIL_MAX_CHARS = 300
TOOL_CALL_ID_MAX_CHARS = 200
TOKENS_MAX = 1_000_000_000
KEY_LIKE = re.compile(r"\b(sk|pk|key)-[\w*.\-]{6,}|Bearer \S+|//[^/\s@]*@")

# Whatever can go wrong between here and a provider, as the layers under its SDK name it.
CONNECTION_FAILURES: tuple[type[Exception], ...] = (
    httpx2.HTTPError,
    httpx2.StreamError,
    httpx2.InvalidURL,
    aiohttp.ClientError,
    OSError,
    ValueError,
)


class Refused(Exception):
    """An HTTP status other than 200, with as much of its body as may be read."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body
        super().__init__(status)


async def refuse(response: httpx2.Response) -> None:
    """A response hook. The SDK would read an error's body whole, however long it is."""
    if response.status_code == 200:
        return
    body = b""
    if response.status_code >= 400:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) >= ERROR_BODY_MAX_BYTES:
                break
    raise Refused(response.status_code, body[:ERROR_BODY_MAX_BYTES])


def http_options() -> dict[str, Any]:
    """Arguments for an SDK's aiohttp client, whose pool and parser carry thousands of streams.

    No redirect is followed: it would carry the key along.
    """
    return {
        "timeout": HTTP_TIMEOUT,
        "verify": SSL_CONTEXT,
        "limits": httpx2.Limits(
            max_connections=max(CONNECTIONS_MIN, settings.RUN_WORKER_CAPACITY), keepalive_expiry=KEEPALIVE_SECONDS
        ),
        "follow_redirects": False,
        "headers": {"Accept-Encoding": "identity"},
        "event_hooks": {"response": [refuse]},
    }


def mend(text: str) -> str:
    """Text without NUL and lone surrogates; a pair that came as two halves is one character again."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return clean_text(text)


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class TurnReader(ABC):
    """One turn as it comes in: text goes out at once, calls and usage when it has ended."""

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self.ended = False
        self.finish_reason: str | None = None
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self._calls: list[_Call] = []
        self._characters = 0
        self._half = ""

    @abstractmethod
    def read(self, event: dict[str, Any]) -> str:
        """Take in one event; the text that it adds, not yet cleaned. An exception other than ModelError: malformed."""

    def text(self, part: str) -> str:
        """Text fit to leave; the first half of a surrogate pair stays behind until the second comes."""
        self._grow(len(part))
        part = self._half + part
        self._half = part[-1] if "\ud800" <= part[-1:] <= "\udbff" else ""
        return mend(part[:-1] if self._half else part)

    def begin_call(self, call_id: str, name: str) -> _Call:
        """Raises TypeError for what is no text, as ``add_arguments`` does."""
        if len(self._calls) >= settings.TOOL_CALLS_PER_TURN_MAX:
            raise ModelError(f"The model called more than {settings.TOOL_CALLS_PER_TURN_MAX} tools in one turn.")
        self._grow(len(call_id + name + ""))
        call = _Call(call_id, name)
        self._calls.append(call)
        return call

    def add_arguments(self, call: _Call, part: str) -> None:
        self._grow(len(part + ""))
        call.arguments.append(part)

    def count_tokens(self, value: Any, before: int | None) -> int | None:
        """A reported count if it is one, else what was known before."""
        return value if type(value) is int and 0 <= value <= TOKENS_MAX else before

    def is_whole(self) -> bool:
        """Whether the answer came to its end, now that the body has."""
        return self.ended

    def finish(self) -> Iterator[ModelEvent]:
        """The events that only a whole turn has. Raises ModelError if it is none."""
        if not self.is_whole():
            raise ModelError("The model provider's answer broke off before its end.")
        match self.finish_reason:
            case "length" | "max_tokens" | "model_context_window_exceeded" if self._calls:
                raise ModelError(
                    "The model reached its limit of output tokens within a tool call; "
                    "a higher MODEL_MAX_OUTPUT_TOKENS or a smaller task helps."
                )
            case "content_filter" | "refusal":
                raise ModelError("The model provider's content filter stopped the answer.")
        if self._half:
            yield TextDelta(mend(self._half))
        taken = {
            call.id
            for message in self.request.messages
            if isinstance(message, AssistantMessage)
            for call in message.tool_calls
        }
        for index, call in enumerate(self._calls, 1):
            name = mend(call.name)[:TOOL_NAME_MAX_CHARS].strip()
            if not name:
                raise ModelError("The model called a tool without naming it.")
            call_id = mend(call.id)[:TOOL_CALL_ID_MAX_CHARS]
            if not call_id or call_id in taken:
                # Some servers give none, or count from 0 in every turn; a result must tell which call it answers.
                fresh = (f"call_{self.request.turn_index}_{number}" for number in itertools.count(index))
                call_id = next(made for made in fresh if made not in taken)
            taken.add(call_id)
            arguments = mend("".join(call.arguments)).strip() or "{}"
            yield ToolCall(call_id, name, arguments)
        # A server that counts nothing: about four characters a token, of the transcript in and of what came out.
        yield Usage(
            estimate_tokens(transcript_chars(self.request)) if self.input_tokens is None else self.input_tokens,
            estimate_tokens(self._characters) if self.output_tokens is None else self.output_tokens,
        )

    def _grow(self, characters: int) -> None:
        self._characters += characters
        if self._characters > settings.MODEL_OUTPUT_MAX_CHARS:
            raise ModelError(f"The model said more than {settings.MODEL_OUTPUT_MAX_CHARS} characters in one turn.")


class Provider(ABC):
    """``ModelClient`` of a provider behind HTTP, for one event loop.

    The SDKs of all providers come of one generator: their clients, streams and errors differ in name alone.
    """

    key_setting: ClassVar[str]
    url_setting: ClassVar[str]
    path: ClassVar[str]
    sdk_client: ClassVar[Any]
    sdk_http_client: ClassVar[Any]
    sdk_stream: ClassVar[Any]
    sdk_error: ClassVar[type[Exception]]
    reader: ClassVar[type[TurnReader]]
    reads_files = True

    def __init__(self) -> None:
        """Raises ModelError for a key or an address that no request can be sent with."""
        url, key = getattr(settings, self.url_setting).rstrip("/"), getattr(settings, self.key_setting)
        if not re.fullmatch(r"[\x21-\x7e]*", key):
            raise ModelError(f"{self.key_setting} holds a character that no key has, such as a blank or a line break.")
        if not is_web_address(url):
            raise ModelError(f"{self.url_setting} is not an http(s) address.")
        self._key = key
        self._failures: tuple[type[Exception], ...] = (Refused, self.sdk_error, *CONNECTION_FAILURES)
        self._sdk = self.sdk_client(
            base_url=url,
            api_key=key or "none",  # a server of one's own may want none, the SDK does
            max_retries=0,
            timeout=HTTP_TIMEOUT,
            http_client=self.sdk_http_client(**http_options()),
        )

    @staticmethod
    @abstractmethod
    def body(request: ModelRequest) -> dict[str, Any]:
        """The request as the provider wants it."""

    async def open(self, request: ModelRequest) -> httpx2.Response:
        """Post the request; the response, its body unread."""
        # Straight to the SDK's transport: its typed method walks the whole transcript again, at ten times the CPU.
        response = await self._sdk.post(
            self.path,
            body=self.body(request),
            cast_to=httpx2.Response,
            stream=True,
            stream_cls=self.sdk_stream,
        )
        return cast(httpx2.Response, response)

    async def aclose(self) -> None:
        await self._sdk.close()

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """See ``ModelClient.stream``."""
        clock = _Clock()
        reader, decoder = self.reader(request), SseDecoder()
        try:
            response = await clock.limit(self.open(request))
            try:
                chunks = response.aiter_bytes()
                while not reader.ended and (chunk := await clock.limit(anext(chunks, None))) is not None:
                    text = "".join([self._read(reader, data) for data in decoder.feed(chunk)])
                    if text and (text := reader.text(text)):
                        yield TextDelta(text)
                for event in reader.finish():
                    yield event
                await clock.drain(chunks)
            finally:
                await response.aclose()
        except EventTooLong:
            raise ModelError("The model provider's answer is malformed: an event has no end.") from None
        except self._failures as error:
            # The SDKs wrap what went wrong below them.
            cause = error.__cause__ if isinstance(error, self.sdk_error) and error.__cause__ else error
            if isinstance(cause, Refused):
                raise self._refusal(cause, request.model) from None
            logger.warning("no answer from the model provider: %s (%s)", type(error).__name__, type(cause).__name__)
            raise self._connection_failure(cause) from None

    def _read(self, reader: TurnReader, data: bytes) -> str:
        if data == b"[DONE]":
            reader.ended = True
            return ""
        if reader.ended:
            return ""
        try:
            event = json.loads(data)
            failure = event.get("error")
            if not failure:
                return reader.read(event) + ""
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            raise ModelError("The model provider's answer is malformed: an event could not be read.") from None
        raise ModelError(f"The model provider broke off its answer: {self._detail(event)}")

    def _refusal(self, refused: Refused, model: str) -> ModelError:
        status = refused.status
        what = f"The model provider refused the request (HTTP {status})"
        if status in (401, 403):
            return ModelError(f"{what}: check {self.key_setting}.")
        if status == 404:
            return ModelError(f"{what}: it knows no model {model!r}, or {self.url_setting} is not its address.")
        if status == 429:
            return ModelError(f"{what}: its rate limit or quota is used up. Try again later.")
        if status >= 500:
            return ModelError(f"The model provider is in trouble (HTTP {status}). Try again later.")
        if status < 400:
            return ModelError(
                f"The model provider answered with HTTP {status} instead of a stream: check {self.url_setting}."
            )
        try:
            detail = self._detail(json.loads(refused.body))
        except (ValueError, RecursionError):
            detail = "it did not say why."
        return ModelError(f"{what}: {detail}")

    def _detail(self, body: Any) -> str:
        """What the provider says, short and without anything like a key: some quote the one they were sent."""
        error = body.get("error") if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        if not isinstance(message, str) or not message.strip():
            return "it did not say why."
        message = message.replace(self._key, "[key]") if self._key else message
        return shorten(KEY_LIKE.sub("[key]", mend(message)), ERROR_DETAIL_MAX_CHARS)

    def _connection_failure(self, cause: BaseException) -> ModelError:
        """By kind alone: these exceptions' own texts hold addresses and headers."""
        if isinstance(cause, (httpx2.ConnectError, httpx2.ConnectTimeout)):
            return ModelError(f"The model provider could not be reached; check {self.url_setting} if this goes on.")
        return ModelError("The connection to the model provider broke off.")


class _Clock:
    """The time of one turn: the whole of it, and the silence before each piece."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + settings.MODEL_TIMEOUT_SECONDS

    async def limit(self, awaited: Awaitable[Any]) -> Any:
        """The SDKs' own time-outs are per read, so that a stream that drips would never trip them."""
        scope = asyncio.timeout_at(min(self._end, self._loop.time() + settings.MODEL_STALL_SECONDS))
        try:
            async with scope:
                return await awaited
        except TimeoutError:
            if not scope.expired():
                raise
        if scope.when() == self._end:
            raise ModelTimeout(f"The model took longer than {settings.MODEL_TIMEOUT_SECONDS:g} seconds.")
        raise ModelTimeout(f"The model was silent for {settings.MODEL_STALL_SECONDS:g} seconds.")

    async def drain(self, chunks: AsyncIterator[bytes]) -> None:
        """Read the body's own end, if it comes at once."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                async for _ in chunks:
                    pass
        except CONNECTION_FAILURES:
            return
