"""What every kind of tool shares: the protocol between the engine and a tool, and the bounds of what a tool may answer.

Nothing here or in a tool touches the database: a tool gets a snapshot of its catalogue row and gives back text,
addresses and a price.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from django.conf import settings

# The built-in tool that is no call at all: the engine turns it into a waitpoint.
ASK_USER = "ask_user"
TOOL_ERROR = "TOOL_ERROR"
TOOL_TIMEOUT = "TOOL_TIMEOUT"
INVALID_INPUT = "INVALID_INPUT"
UNKNOWN_TOOL = "UNKNOWN_TOOL"
FAILURE_MESSAGE_MAX_CHARS = 1000
URL_MAX_CHARS = 2048

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolContext:
    """One call. ``timeout_seconds`` is the time that the run has left for it; ``executor`` runs what blocks."""

    invocation_id: str
    run_id: str
    chat_id: str
    user_id: int
    timeout_seconds: float
    executor: ThreadPoolExecutor


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A snapshot of a row of ``runs.models.Tool``. ``price`` is micro-credits; no time-out means the setting's."""

    name: str
    display_name: str
    description: str
    node_type: str
    input_schema: Mapping[str, Any]
    price: int
    approval: str = "threshold"
    timeout_seconds: float | None = None
    repeatable: bool = False
    url: str = ""
    # Held back from repr: what is logged must not show them.
    secret_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    remote_name: str = ""

    @classmethod
    def from_row(cls, row: Any) -> ToolDefinition:
        """Of a catalogue row. Raises ValueError if its secret headers are not a JSON object of texts."""
        return cls(
            name=row.name,
            display_name=row.display_name,
            description=row.description,
            node_type=row.node_type,
            input_schema=row.input_schema,
            price=row.price,
            approval=row.approval,
            timeout_seconds=row.timeout_seconds,
            repeatable=row.repeatable,
            url=row.url,
            secret_headers=parse_headers(row.secret_headers),
            remote_name=row.remote_name,
        )


@dataclass(frozen=True, slots=True)
class ToolResult:
    """``text`` is what the model reads. ``credit_used`` is micro-credits; None means the full price."""

    text: str
    urls: tuple[str, ...] = ()
    credit_used: int | None = None


class ToolFailure(Exception):
    """A call that failed. ``message`` is for people and for the model: never a secret, never a stack trace."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        self.message = shorten(clean_text(message), FAILURE_MESSAGE_MAX_CHARS)
        super().__init__(self.code, self.message)


Executor = Callable[[ToolDefinition, dict[str, Any], ToolContext], Awaitable[ToolResult]]


async def in_thread(context: ToolContext, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a blocking function on the engine's pool. A thread can't be stopped from outside: it bounds its own time."""
    return await asyncio.get_running_loop().run_in_executor(
        context.executor, partial(copy_context().run, function, *args, **kwargs)
    )


def clean_text(text: str) -> str:
    """Text that every database and JSON reader takes: NUL is dropped, a lone surrogate becomes U+FFFD."""
    return _SURROGATE.sub("\ufffd", text.replace("\x00", ""))


_SURROGATE = re.compile("[\ud800-\udfff]")


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean_result(result: ToolResult) -> ToolResult:
    """The result within the service's bounds; text that is too long is cut, with a note that tells the model so."""
    text, limit = clean_text(result.text), settings.TOOL_RESULT_MAX_CHARS
    if len(text) > limit:
        note = f"\n[Cut: the result has {len(text)} characters, of which {limit} are kept.]"
        text = text[: max(0, limit - len(note))] + note
    used = result.credit_used
    if used is not None and (type(used) is not int or used < 0):
        raise ToolFailure(TOOL_ERROR, "The tool answered with a price that is no amount.")
    return ToolResult(text, clean_urls(result.urls), used)


def clean_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ToolFailure unless they are few enough and each an absolute http(s) address of a sensible length."""
    if len(urls) > settings.TOOL_RESULT_URLS_MAX:
        raise ToolFailure(TOOL_ERROR, f"The tool answered with more than {settings.TOOL_RESULT_URLS_MAX} result URLs.")
    for url in urls:
        if not is_web_address(url):
            raise ToolFailure(TOOL_ERROR, f"A result URL of the tool is no http(s) address: {url[:200]}")
    return tuple(urls)


def is_web_address(url: str) -> bool:
    """Whether it is an absolute http(s) URL without blanks or control characters, at most ``URL_MAX_CHARS`` long."""
    if len(url) > URL_MAX_CHARS or re.search(r"[\s\x00-\x20\x7f\ud800-\udfff]", url):
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


def parse_headers(text: str | None) -> dict[str, str]:
    """A tool's secret headers, ``{"Authorization": "Bearer …"}`` as JSON text.

    Raises ValueError, with a message that never repeats a value, unless they are an object of header names, none of
    them one that the service sets itself, and printable values.
    """
    if not text:
        return {}
    try:
        headers = json.loads(text)
    except (ValueError, RecursionError):
        headers = None
    if not isinstance(headers, dict):
        raise ValueError('Secret headers must be a JSON object such as {"Authorization": "Bearer …"}.')
    for name, value in headers.items():
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}", name) or name.lower() in RESERVED_HEADERS:
            raise ValueError(f"{name[:100]!r} is not a header that may be set here.")
        if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]{0,4094}[\x21-\x7e])?", value):
            raise ValueError(f"The value of the header {name} must be a line of printable ASCII characters.")
    return headers


RESERVED_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "expect",
        "host",
        "idempotency-key",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
    }
)
