"""Reading JSON bodies: bounded, strict, and exact (numbers with a fraction become Decimal, never float).

What one JSON reader takes and another does not (duplicate keys, NaN, lone surrogates), and what a database can't hold
(NUL), is refused here, so no code behind it has to think of it.
"""

from __future__ import annotations

import io
import json
import re
from decimal import Decimal
from typing import Any, NoReturn

from django.conf import settings
from django.core.exceptions import BadRequest
from django.http import HttpRequest
from rest_framework.exceptions import ParseError, UnsupportedMediaType
from rest_framework.parsers import BaseParser

from config.api.errors import PayloadTooLarge

# The widest numbers taken: integers of a signed 64-bit column, the exponents of a double, more digits than any amount
# has.
INTEGER_MAX = 2**63
NUMBER_MAX_CHARS = 64
EXPONENT_MAX = 308
READ_SIZE = 64 * 1024

_TEXT_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_MEDIA_TYPE = re.compile(r'application/json[ \t]*(;[ \t]*charset[ \t]*=[ \t]*"?utf-?8"?[ \t]*)?;?[ \t]*', re.IGNORECASE)


class StrictJSONParser(BaseParser):
    """``application/json`` in UTF-8, an object at the top."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> dict[str, Any]:
        check_media_type(media_type)
        return parse_object(stream.read())


def check_media_type(content_type: str | None) -> None:
    """415 unless it is ``application/json``, in UTF-8 if it names a charset."""
    if not _MEDIA_TYPE.fullmatch(content_type or ""):
        raise UnsupportedMediaType(content_type or "")


def load_body(request: HttpRequest) -> bytes:
    """The request's body, read once and kept as ``request.body``; 413 over ``API_MAX_BODY_BYTES``.

    Also reads a chunked body, which Django takes for an empty one as it has no Content-Length. Never believes
    Content-Length: at most the limit and a byte are read, and a body that ends before it is refused, for it is only
    the beginning of one.
    """
    if hasattr(request, "_body"):
        return request.body
    limit = settings.API_MAX_BODY_BYTES
    chunked = "chunked" in request.META.get("HTTP_TRANSFER_ENCODING", "").lower()
    try:
        announced = int(request.META.get("CONTENT_LENGTH") or 0)
    except ValueError:
        announced = -1
    if announced < 0:
        raise BadRequest("Content-Length is not a number.")
    if announced > limit:
        raise PayloadTooLarge
    stream: Any = request
    # The server says so if its stream ends by itself; reading one that does not would wait for ever.
    if chunked and request.META.get("wsgi.input_terminated"):
        stream = request.META["wsgi.input"]
    parts: list[bytes] = []
    size = 0
    try:
        while size <= limit and (part := stream.read(min(READ_SIZE, limit + 1 - size))):
            parts.append(part)
            size += len(part)
    except Exception as error:  # a client that went away, or a server's own exception for a malformed chunk
        raise BadRequest("The request body could not be read.") from error
    if size > limit:
        raise PayloadTooLarge
    if size < announced and not chunked:
        raise BadRequest("The request body is shorter than its Content-Length.")
    body = b"".join(parts)
    request._body = body
    request._stream = io.BytesIO(body)
    request.META["CONTENT_LENGTH"] = str(size)
    return body


def parse_object(raw: bytes) -> dict[str, Any]:
    """``raw`` as a JSON object; an empty body is ``{}``. Raises ParseError (400)."""
    if not raw:
        return {}
    value = parse_value(raw)
    if not isinstance(value, dict):
        raise ParseError("The body must be a JSON object.")
    return value


def parse_value(raw: bytes) -> Any:
    """Any strict JSON value. Raises ParseError (400)."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ParseError("The body is not valid UTF-8.") from None
    # Before parsing: the depth at which a parser gives up depends on the thread's stack.
    check_depth(raw)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=_fraction,
            parse_int=_integer,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        place = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ParseError(f"The body is not valid JSON{place}.") from None
    if "\\u" in text:  # neither can come from plain UTF-8
        check_text(value)
    return value


def check_depth(raw: bytes) -> None:
    deepest = settings.API_MAX_JSON_DEPTH
    if raw.count(b"[") + raw.count(b"{") <= deepest:
        return
    depth = 0
    for match in _TEXT_OR_BRACKET.finditer(raw):
        sign = match[0]
        if sign in b"[{":
            depth += 1
            if depth > deepest:
                raise ParseError(f"The body is nested more than {deepest} levels deep.")
        elif sign in b"]}":
            depth -= 1


def check_text(value: Any) -> None:
    """Refuse NUL, which no database column of ours takes, and half characters, which no UTF-8 text has."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if "\0" in item or any("\ud800" <= character <= "\udfff" for character in item):
                raise ParseError("Text must not hold NUL or lone surrogates.")
        elif isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ParseError("The body holds a key twice in one object.")
    return found


def _fraction(text: str) -> Decimal:
    number = Decimal(text) if len(text) <= NUMBER_MAX_CHARS else None
    if number is None or (number and abs(number.adjusted()) > EXPONENT_MAX):
        raise ParseError("The body holds a number that is out of range.")
    # Zero may carry any exponent (0E+999999999), and would be written out digit for digit.
    return number if number else Decimal(0)


def _integer(text: str) -> int:
    number = int(text) if len(text) <= NUMBER_MAX_CHARS else None
    if number is None or not -INTEGER_MAX <= number < INTEGER_MAX:
        raise ParseError("The body holds a number that is out of range.")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ParseError(f"{name} is not a JSON value.")
