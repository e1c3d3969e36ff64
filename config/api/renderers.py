"""Writing JSON: compact UTF-8, amounts digit for digit."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

import simplejson
from django.utils.functional import Promise
from rest_framework.renderers import BaseRenderer
from simplejson import RawJSON

from config.api import clock


class ExactJSONRenderer(BaseRenderer):
    """A Decimal becomes a JSON number as it stands: never an exponent, never by way of a float."""

    media_type = "application/json"
    format = "json"
    charset = None  # JSON is UTF-8; the media type has no such parameter

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> bytes:
        return b"" if data is None else dumps(data)


def dumps(data: Any) -> bytes:
    """``data`` as the bytes of an answer. A lone surrogate from elsewhere becomes ``?`` rather than an error on every
    read.
    """
    text = simplejson.dumps(
        data, use_decimal=False, default=_other, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    return text.encode("utf-8", errors="replace")


def _other(value: Any) -> Any:
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError("JSON has no such number")
        return RawJSON(format(value, "f"))
    if isinstance(value, datetime):
        return clock.iso(value)
    if isinstance(value, Promise):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
