"""The JSON renderer, content negotiation without Accept, and the parser of JSON bodies."""

import re
from typing import Any

from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer

from config.kernel.jsontext import dumps, parse_object

# Possessive (*+): otherwise two groups of blanks in a row would divide a long one in every possible way.
_MEDIA_TYPE = re.compile(r'(?i)application/json[ \t]*+(;[ \t]*charset[ \t]*=[ \t]*"?utf-?8"?[ \t]*+)?;?[ \t]*')


class ExactJSONRenderer(BaseRenderer):
    """Writes a Decimal as an exact JSON number: never an exponent, never through a float."""

    media_type = "application/json"
    format = "json"
    charset = None  # JSON is UTF-8; the media type has no such parameter

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> bytes:
        return b"" if data is None else dumps(data)


class AnyMediaType(DefaultContentNegotiation):
    """For endpoints whose content is not JSON. Errors are JSON and the content has one type, so Accept is ignored."""

    def select_renderer(self, request: Any, renderers: Any, format_suffix: Any = None) -> tuple[Any, str]:
        return renderers[0], renderers[0].media_type


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
