"""What every type of tool shares: the values between the engine and a tool, and the limits of a tool's result. No tool
touches the database: it gets a snapshot of its catalogue row and returns text, addresses and a price.
"""

import base64
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Self

from django.conf import settings

from config.kernel.encryption import require_decrypted
from config.kernel.jsontext import MalformedJSON, parse_object, to_text
from config.limits.share import Threads
from config.outbound.addresses import parse
from runs.errors import CallError

TOOL_RESULT_MAX_CHARS = 100_000  # a longer result is cut
TOOL_RESULT_URLS_MAX = 50
RESULT_SHOWN_BYTES = 8 * 1024  # the most bytes of a result in representations of its call
PROGRESS_MAX_CHARS = 300
PARK_SECONDS = range(60, 30 * 24 * 3600 + 1)  # the seconds for which a call may await its tool

BUILTIN, HTTP, MCP, CLIENT = "builtin", "http", "mcp", "client"
ASK_USER = "ask_user"  # the engine does not call this built-in tool: it opens a waitpoint
FAILURE_MESSAGE_MAX_CHARS = 1000
URL_MAX_CHARS = 2048
SECRET_MIN_CHARS = 6  # shorter values (``true``, ``v1``) are ordinary words, not secrets
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ToolContext:
    """One call, which may take ``timeout_seconds``. ``threads`` compute; ``file_threads`` read and write files."""

    invocation_id: str
    run_id: str
    chat_id: str
    user_id: int
    user_name: str  # the ``sub`` of the user's session tokens
    timeout_seconds: float
    threads: Threads
    file_threads: Threads
    # The address to which the tool's server may send the outcome if it parks the call, and until when. Empty and None
    # if the call cannot be parked. The address is the credential.
    callback_url: str = field(default="", repr=False)
    park_until: datetime | None = None
    remote_task: str = ""  # what the tool's type stores about the call's task on its server, or the server's questions
    # For a parked call that has ended: the reason, which the tool's server is told; it is not asked for the outcome.
    end_reason: str = ""


@dataclass(frozen=True)
class ToolSpec:
    """What a model reads of a tool that it may call; ``input_schema`` is JSON Schema."""

    name: str
    description: str
    input_schema: dict[str, Any]

    @cached_property
    def text(self) -> str:
        """All of it as JSON. Kept, because the event loop measures it before each request."""
        return to_text([self.name, self.description, self.input_schema])


@dataclass(frozen=True)
class ToolDefinition:
    """A snapshot of a row of ``runs.models.Tool``. ``price`` is in micro-credits."""

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
    # Left out of repr, so that no log line can show them.
    secret_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    signing_secret: str = field(default="", repr=False)
    remote_name: str = ""
    park_seconds: int | None = None
    cancel_url: str = ""
    unsigned_callbacks: bool = False

    @cached_property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.description, dict(self.input_schema))

    @property
    def time_limit(self) -> float:
        return settings.TOOL_TIMEOUT_SECONDS if self.timeout_seconds is None else self.timeout_seconds

    def without_secrets(self, text: str) -> str:
        """A tool's text about a failure without its secrets: some servers show the request that they got."""
        return without_secrets(text, secrets_in(self.signing_secret, self.secret_headers.values()))

    @classmethod
    def from_row(cls, row: Any) -> Self:
        """The snapshot of a catalogue row. Raises DecryptionFailed, and ValueError for secrets that are not valid."""
        require_decrypted(row.secret_headers, row.signing_secret)
        values = {column.name: getattr(row, column.name) for column in fields(cls)}
        secret = parse_signing_secret(row.signing_secret)
        return cls(**values | {"secret_headers": parse_headers(row.secret_headers), "signing_secret": secret})


ToolImage = tuple[bytes, str]  # the content, and its type: one of ``runs.tools.files.IMAGE_TYPES``


@dataclass(frozen=True, slots=True)
class ToolResult:
    """``text`` is what the model reads. ``credit_used``: micro-credits; None means the full price. ``images`` are to be
    stored; then their addresses are added to ``urls``.
    """

    text: str
    urls: tuple[str, ...] = ()
    credit_used: int | None = None
    images: tuple[ToolImage, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Parked:
    """In place of a result: the outcome comes later, by a callback, or by the type's ``contact``, which is due after
    ``contact_in_seconds`` and gets ``remote_task``. The progress is ``fraction``, from 0 to 1, and ``message``.
    """

    message: str = ""
    fraction: float | None = None
    expires_in_seconds: float | None = None  # None: the tool's ``park_seconds``
    remote_task: str = ""  # empty: unchanged
    contact_in_seconds: float | None = None

    @property
    def asks_user(self) -> bool:
        """Whether ``remote_task`` is a ``runs.tools.questions.Dialogue`` with a question of the server to the user."""
        return bool(self.remote_task) and self.contact_in_seconds is None


class ToolFailure(Exception):
    """A call that failed. Users and the model read ``message``, which has no secret and no stack trace."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        self.message = shorten(clean_text(message), FAILURE_MESSAGE_MAX_CHARS)
        super().__init__(self.code, self.message)


tool_error = partial(ToolFailure, CallError.TOOL_ERROR)
Outcome = ToolResult | Parked
Executor = Callable[[ToolDefinition, dict[str, Any], ToolContext], Awaitable[Outcome]]
# Returns the outcome of an open call, and None for a call that has ended.
Contact = Callable[[ToolDefinition, ToolContext], Awaitable[Outcome | None]]


def input_object(*, optional: Iterable[str] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of an input that has these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def text_input(max_length: int, description: str) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": max_length, "description": description}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinTool(ToolDefinition):
    """A built-in tool: its row in a new catalogue, and its code."""

    node_type: str = BUILTIN
    repeatable: bool = True
    execute: Executor | None  # None for ``ask_user``
    stores_files: bool = False  # whether a purge deletes files of its calls
    contact: Contact | None = None

    def row(self) -> dict[str, Any]:
        columns = ("name", "display_name", "description", "node_type", "input_schema", "price", "repeatable")
        return {column: getattr(self, column) for column in (*columns, "park_seconds")}


def clean_text(text: str) -> str:
    """Text that every database and JSON reader accepts: without NUL, each lone surrogate as U+FFFD."""
    return _SURROGATE.sub("\ufffd", text.replace("\x00", ""))


def secrets_in(key: str, headers: Iterable[str]) -> tuple[str, ...]:
    """The texts that no message may repeat, the longest first: the key, and the values of headers, also without their
    first word (Bearer); each also in its form in JSON.
    """
    plain = [key, *(part for value in headers for part in (value, value.partition(" ")[2]))]
    found = {form for value in plain for form in (value, to_text(value)[1:-1]) if len(value) >= SECRET_MIN_CHARS}
    return tuple(sorted(found, key=len, reverse=True))


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "[key]")
    return text


def as_told(result: str, urls: Sequence[str]) -> str:
    """A result as the model reads it: with the ``urls`` that its text does not contain."""
    return "\n".join([result, *(url for url in urls if url not in result)])


def shown_result(beginning: str, urls: Sequence[str]) -> tuple[str, bool]:
    """A result as representations show it, and whether it is cut. ``beginning``: at least as much as is shown."""
    told = as_told(beginning, urls).encode()
    return told[:RESULT_SHOWN_BYTES].decode(errors="ignore"), len(told) > RESULT_SHOWN_BYTES


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def result_text(name: str, value: Any) -> str:
    """A tool's answer as the model reads it: text unchanged, any other value as JSON. Raises ToolFailure."""
    if isinstance(value, str):
        return value
    try:
        return to_text(value)
    except (ValueError, RecursionError):
        raise tool_error(f"{name} returned a result that is not valid JSON.") from None


def clean_result(result: ToolResult) -> ToolResult:
    """The result within the service's limits. Text that is too long is cut, with a note. Raises ToolFailure."""
    text, limit = clean_text(result.text), TOOL_RESULT_MAX_CHARS
    if len(text) > limit:
        note = f"\n[Truncated: the result has {len(text)} characters, the limit is {limit}.]"
        text = text[: max(0, limit - len(note))] + note
    if len(result.urls) > TOOL_RESULT_URLS_MAX:
        raise tool_error(f"The tool returned more than {TOOL_RESULT_URLS_MAX} result URLs.")
    for url in result.urls:
        if not is_address(url):
            raise tool_error(f"A result URL of the tool is not an http(s) address: {url[:200]}")
    return replace(result, text=text)


def is_address(url: str) -> bool:
    """Whether ``url`` is an absolute http(s) URL without blanks, control characters and credentials."""
    try:
        parse(url, https_only=False)
    except ValueError:
        return False
    return len(url) <= URL_MAX_CHARS and not re.search(r"[\s\ud800-\udfff]", url)


def parse_headers(text: str | None) -> dict[str, str]:
    """A tool's secret headers from JSON text. Raises ValueError, with a message that repeats no value."""
    try:
        headers = parse_object(text or "")
    except MalformedJSON:
        raise ValueError('Secret headers must be a JSON object such as {"Authorization": "Bearer …"}.') from None
    for name, value in headers.items():
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}", name) or name.lower() in RESERVED_HEADERS:
            raise ValueError(f"{name[:100]!r} is not a header that can be set here.")
        if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]{0,4094}[\x21-\x7e])?", value):
            raise ValueError(f"The value of the header {name} must be a line of printable ASCII characters.")
    return headers


def parse_signing_secret(text: str | None) -> str:
    """The base64 text of a tool's signing secret. Raises ValueError with a message that does not repeat it."""
    secret = (text or "").removeprefix("whsec_")
    try:
        if text and not base64.b64decode(secret, validate=True):
            raise ValueError
    except ValueError:
        raise ValueError("A signing secret is base64, for example of 32 random bytes; whsec_ may precede it.") from None
    return secret


RESERVED_HEADERS = {
    *("accept", "accept-encoding", "connection", "content-length", "content-type", "expect", "host"),
    *("idempotency-key", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "user-agent"),
    *("webhook-id", "webhook-signature", "webhook-timestamp"),
}
