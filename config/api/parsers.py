"""Reads JSON bodies: bounded, strict, and exact (numbers with a fraction become Decimal, never float).

Texts on which JSON readers disagree (duplicate keys, NaN, lone surrogates) and which a database can't store (NUL) are
refused here.
"""

from __future__ import annotations

import io
import re
from typing import Any

from django.conf import settings
from django.core.exceptions import BadRequest
from django.http import HttpRequest
from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.parsers import BaseParser

from config.kernel.errors import PayloadTooLarge
from config.kernel.jsontext import parse_object

READ_SIZE = 64 * 1024

# Possessive (*+): otherwise two groups of blanks in a row would divide a long one in every possible way.
_MEDIA_TYPE = re.compile(
    r'application/json[ \t]*+(;[ \t]*charset[ \t]*=[ \t]*"?utf-?8"?[ \t]*+)?;?[ \t]*', re.IGNORECASE
)


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

    Also reads a chunked body, which Django takes for an empty one because it has no Content-Length. Content-Length is
    not trusted: at most the limit and one byte are read, and a body shorter than announced is refused as incomplete.
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
    # The server sets the flag if its stream ends by itself. Reading another stream would wait for ever.
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
