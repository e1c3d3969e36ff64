"""Reads JSON bodies: strict, and exact (numbers with a fraction become Decimal, never float).

Texts on which JSON readers disagree (duplicate keys, NaN, lone surrogates) and which a database can't store (NUL) are
refused here.
"""

from __future__ import annotations

import re
from typing import Any

from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.parsers import BaseParser

from config.kernel.jsontext import parse_object

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
