"""What the adapters of network providers share: the connection, the time limits, the errors, the events of a turn.

An adapter adds its SDK, the format of a transcript and the format of an event. Requests use the provider's SDK
(address, authentication, headers), but this module decodes the events: the SDKs' typed events cost several times the
CPU, and a process has thousands of streams.
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
from runs.llm.registry import Provider
from runs.llm.sse import EventTooLong, SseDecoder, read_event
from runs.tools.base import clean_text, is_web_address, shorten

logger = logging.getLogger(__name__)

# ``_Deadlines`` limits the time of a turn.
HTTP_TIMEOUT = httpx2.Timeout(None, connect=10.0)
# Shorter than that of servers (uvicorn: 5 s): a request on a connection that the server is closing is lost.
KEEPALIVE_SECONDS = 4.0
CONNECTIONS_MIN = 2000
# Created at import: it takes so long to read the certificates that an event loop would stall.
SSL_CONTEXT = httpx2.create_ssl_context()
# The connection can be used again if the end of the body follows the last event within this time.
DRAIN_SECONDS = 0.25
# A chunk can hold tens of thousands of tiny events. After so many, the other runs of the event loop continue.
EVENTS_AT_ONCE = 1000
ERROR_BODY_MAX_BYTES = 16 * 1024
ERROR_DETAIL_MAX_CHARS = 300
TOOL_CALL_ID_MAX_CHARS = 200
TOKENS_MAX = 1_000_000_000
LONE_SURROGATE = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")
NO_REASON = "it gave no reason."
KEY_LIKE = re.compile(r"\b(sk|pk|key)-[\w*.\-]{6,}|Bearer \S+|//[^/\s@]*@")

# The errors of the layers below the SDK.
CONNECTION_FAILURES: tuple[type[Exception], ...] = (
    httpx2.HTTPError,
    httpx2.StreamError,
    httpx2.InvalidURL,
    aiohttp.ClientError,
    OSError,
    ValueError,
)


class BadStatus(Exception):
    """An HTTP status other than 200, with the beginning of the body."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body
        super().__init__(status)


async def check_status(response: httpx2.Response) -> None:
    """A response hook that raises BadStatus. The SDK would read the whole body of an error, of any length."""
    if response.status_code == 200:
        return
    body = b""
    if response.status_code >= 400:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) >= ERROR_BODY_MAX_BYTES:
                break
    raise BadStatus(response.status_code, body[:ERROR_BODY_MAX_BYTES])


def http_options() -> dict[str, Any]:
    """Arguments for an SDK's aiohttp client, whose pool and parser handle thousands of streams.

    It follows no redirects, which would send the key to another server.
    """
    return {
        "timeout": HTTP_TIMEOUT,
        "verify": SSL_CONTEXT,
        "limits": httpx2.Limits(
            max_connections=max(CONNECTIONS_MIN, settings.RUN_WORKER_CAPACITY), keepalive_expiry=KEEPALIVE_SECONDS
        ),
        "follow_redirects": False,
        "headers": {"Accept-Encoding": "identity"},
        "event_hooks": {"response": [check_status]},
    }


def join_surrogates(text: str) -> str:
    """The text with each surrogate pair as one character, and without NUL and lone surrogates."""
    if not text.isascii():
        # Not by the codec's error handler, which is slow.
        text = LONE_SURROGATE.sub("\ufffd", text).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    return clean_text(text)


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class TurnReader(ABC):
    """Collects the events of one turn. Text is passed on at once, calls and usage at the end."""

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
        """Read one event and return its text, not yet cleaned. An exception other than ModelError means that the
        event is malformed.
        """

    def text(self, part: str) -> str:
        """The text to pass on. The first half of a surrogate pair waits for the second."""
        self._grow(len(part))
        part = self._half + part
        self._half = part[-1] if "\ud800" <= part[-1:] <= "\udbff" else ""
        return join_surrogates(part[:-1] if self._half else part)

    def begin_call(self, call_id: str, name: str) -> _Call:
        """Raises TypeError for values that are not strings, as ``add_arguments`` does."""
        if len(self._calls) >= settings.TOOL_CALLS_PER_TURN_MAX:
            raise ModelError(f"The model called more than {settings.TOOL_CALLS_PER_TURN_MAX} tools in one turn.")
        self._grow(len(call_id + name + ""))
        self._calls.append(_Call(call_id, name))
        return self._calls[-1]

    def add_arguments(self, call: _Call, part: str) -> None:
        self._grow(len(part + ""))
        if part:
            call.arguments.append(part)

    def count_tokens(self, value: Any, before: int | None) -> int | None:
        """The reported count if it is valid, else ``before``."""
        return value if type(value) is int and 0 <= value <= TOKENS_MAX else before

    def is_complete(self) -> bool:
        """Whether the answer is complete, asked after the end of the body."""
        return self.ended

    def finish(self) -> Iterator[ModelEvent]:
        """The events of a complete turn. Raises ModelError if the turn is not complete."""
        if not self.is_complete():
            raise ModelError("The model provider's answer ended before it was complete.")
        match self.finish_reason:
            case "length" | "max_tokens" | "model_context_window_exceeded" if self._calls:
                raise ModelError(
                    "The model reached its limit of output tokens within a tool call. "
                    "Raise MODEL_MAX_OUTPUT_TOKENS or make the task smaller."
                )
            case "content_filter" | "refusal":
                raise ModelError("The model provider's content filter stopped the answer.")
        if self._half:
            yield TextDelta(join_surrogates(self._half))
        earlier = (message for message in self.request.messages if isinstance(message, AssistantMessage))
        used_ids = {call.id for message in earlier for call in message.tool_calls}
        for index, call in enumerate(self._calls, 1):
            if not (name := join_surrogates(call.name)[:TOOL_NAME_MAX_CHARS].strip()):
                raise ModelError("The model called a tool without a name.")
            call_id = join_surrogates(call.id)[:TOOL_CALL_ID_MAX_CHARS]
            if not call_id or call_id in used_ids:
                # Some servers send no ids, or count from 0 in every turn. A result must name its call.
                new_ids = (f"call_{self.request.turn_index}_{number}" for number in itertools.count(index))
                call_id = next(new_id for new_id in new_ids if new_id not in used_ids)
            used_ids.add(call_id)
            arguments = join_surrogates("".join(call.arguments)).strip() or "{}"
            yield ToolCall(call_id, name, arguments)
        # Some servers report no counts.
        yield Usage(
            estimate_tokens(transcript_chars(self.request)) if self.input_tokens is None else self.input_tokens,
            estimate_tokens(self._characters) if self.output_tokens is None else self.output_tokens,
        )

    def _grow(self, characters: int) -> None:
        self._characters += characters
        if self._characters > settings.MODEL_OUTPUT_MAX_CHARS:
            raise ModelError(f"The model wrote more than {settings.MODEL_OUTPUT_MAX_CHARS} characters in one turn.")


class HttpModel(ABC):
    """``ModelClient`` of a provider behind HTTP, for one event loop.

    One generator makes the SDKs of all providers: ``sdk`` is the module of one.
    """

    path: ClassVar[str]
    sdk: ClassVar[Any]
    sdk_client: ClassVar[Any]
    sdk_error: ClassVar[type[Exception]]
    reader: ClassVar[type[TurnReader]]
    reads_files = True

    def __init__(self, provider: Provider) -> None:
        """Raises ModelError for a key or an address that is not valid."""
        url, key = provider.url, provider.key
        if not re.fullmatch(r"[\x21-\x7e]*", key):
            raise ModelError(f"{provider.key_setting} holds a character that is not valid in a key, such as a blank.")
        if not is_web_address(url):
            raise ModelError(f"{provider.url_setting} is not an http(s) address.")
        self._provider, self._key = provider, key
        self._failures: tuple[type[Exception], ...] = (BadStatus, self.sdk_error, *CONNECTION_FAILURES)
        self._sdk = self.sdk_client(
            base_url=url,
            api_key=key or "none",  # the SDK needs a key, even if the server needs none
            max_retries=0,
            timeout=HTTP_TIMEOUT,
            http_client=self.sdk.DefaultAioHttpClient(**http_options()),
        )

    @staticmethod
    @abstractmethod
    def body(request: ModelRequest) -> dict[str, Any]:
        """The request in the provider's format."""

    async def open(self, request: ModelRequest) -> httpx2.Response:
        """Post the request and return the response before its body."""
        # Not the SDK's typed method, which goes through the whole transcript again and takes ten times the CPU.
        stream: Any = self.sdk.AsyncStream[Any]
        body = self.body(request)
        response = await self._sdk.post(self.path, body=body, cast_to=httpx2.Response, stream=True, stream_cls=stream)
        return cast(httpx2.Response, response)

    async def aclose(self) -> None:
        await self._sdk.close()

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """See ``ModelClient.stream``."""
        deadlines = _Deadlines()
        reader, decoder = self.reader(request), SseDecoder()
        try:
            response = await deadlines.limit(self.open(request))
            try:
                chunks = response.aiter_bytes()
                while not reader.ended and (chunk := await deadlines.limit(anext(chunks, None))) is not None:
                    events = decoder.feed(chunk)
                    for at in range(0, len(events), EVENTS_AT_ONCE):
                        if at:
                            await asyncio.sleep(0)
                        text = "".join([self._read(reader, data) for data in events[at : at + EVENTS_AT_ONCE]])
                        if text and (text := reader.text(text)):
                            yield TextDelta(text)
                for event in reader.finish():
                    yield event
                await deadlines.drain(chunks)
            finally:
                await response.aclose()
        except EventTooLong:
            raise ModelError("The model provider's answer is malformed: an event is too long.") from None
        except self._failures as error:
            # The SDKs wrap the errors of the layers below them.
            cause = error.__cause__ if isinstance(error, self.sdk_error) and error.__cause__ else error
            if isinstance(cause, BadStatus):
                raise self._status_error(cause, request.model) from None
            logger.warning("no answer from the model provider: %s (%s)", type(error).__name__, type(cause).__name__)
            raise self._connection_failure(cause) from None

    def _read(self, reader: TurnReader, data: bytes) -> str:
        if data == b"[DONE]":
            reader.ended = True
            return ""
        if reader.ended:
            return ""
        try:
            event = read_event(data)
            failure = event.get("error")
            if not failure:
                return reader.read(event) + ""
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            raise ModelError("The model provider's answer is malformed: an event could not be read.") from None
        raise ModelError(f"The model provider stopped its answer: {self._detail(event)}")

    def _status_error(self, error: BadStatus, model: str) -> ModelError:
        status, url_setting = error.status, self._provider.url_setting
        what = f"The model provider refused the request (HTTP {status})"
        if status in (401, 403):
            return ModelError(f"{what}: check {self._provider.key_setting}.")
        if status == 404:
            return ModelError(f"{what}: it has no model {model!r}, or {url_setting} is not its address.")
        if status == 429:
            return ModelError(f"{what}: its rate limit or quota is exceeded. Try again later.")
        if status >= 500:
            return ModelError(f"The model provider has an internal error (HTTP {status}). Try again later.")
        if status < 400:
            return ModelError(
                f"The model provider answered with HTTP {status} instead of a stream: check {url_setting}."
            )
        try:
            detail = self._detail(json.loads(error.body))
        except (ValueError, RecursionError):
            detail = NO_REASON
        return ModelError(f"{what}: {detail}")

    def _detail(self, body: Any) -> str:
        """The provider's own message, short and without anything like a key: some providers quote the key."""
        error = body.get("error") if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        if not isinstance(message, str) or not message.strip():
            return NO_REASON
        message = message[:ERROR_BODY_MAX_BYTES]
        message = message.replace(self._key, "[key]") if self._key else message
        return shorten(KEY_LIKE.sub("[key]", join_surrogates(message)), ERROR_DETAIL_MAX_CHARS)

    def _connection_failure(self, cause: BaseException) -> ModelError:
        """Without the texts of the exceptions, which hold addresses and headers."""
        if isinstance(cause, (httpx2.ConnectError, httpx2.ConnectTimeout)):
            return ModelError(
                f"The model provider could not be reached. If this continues, check {self._provider.url_setting}."
            )
        return ModelError("The connection to the model provider broke.")


class _Deadlines:
    """The time limits of one turn: of the whole turn, and of the wait for each part."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + settings.MODEL_TIMEOUT_SECONDS

    async def limit(self, awaited: Awaitable[Any]) -> Any:
        """Raises ModelTimeout. The SDKs limit each read only, so a slow stream would never end."""
        scope = asyncio.timeout_at(min(self._end, self._loop.time() + settings.MODEL_STALL_SECONDS))
        try:
            async with scope:
                return await awaited
        except TimeoutError:
            if not scope.expired():
                raise
        if scope.when() == self._end:
            raise ModelTimeout(f"The model took longer than {settings.MODEL_TIMEOUT_SECONDS:g} seconds.")
        raise ModelTimeout(f"The model sent nothing for {settings.MODEL_STALL_SECONDS:g} seconds.")

    async def drain(self, chunks: AsyncIterator[bytes]) -> None:
        """Read to the end of the body, if it comes at once."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                async for _ in chunks:
                    pass
        except CONNECTION_FAILURES:
            return
