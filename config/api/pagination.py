"""Keyset pagination: ``?limit=&cursor=`` → ``{"items": […], "nextCursor": …}``, stable while rows are added."""

from __future__ import annotations

import base64
import binascii
import json
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import Q, TextField, Value
from rest_framework.pagination import BasePagination
from rest_framework.request import Request
from rest_framework.response import Response

from config.kernel.errors import ValidationFailed


class KeysetPagination(BasePagination):
    """Pages by (created_at, id): newest first, or oldest first for a view with ``pagination_ascending``."""

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list:
        limit, cursor = self.read(request)
        ascending = getattr(view, "pagination_ascending", False)
        if cursor is not None:
            queryset = queryset.filter(beyond(*cursor, ascending=ascending))
        order = ("created_at", "pk") if ascending else ("-created_at", "-pk")
        rows = list(queryset.order_by(*order)[: limit + 1])
        self.next_cursor = None
        if len(rows) > limit:
            rows = rows[:limit]
            self.next_cursor = encode_cursor(rows[-1].created_at, rows[-1].pk)
        return rows

    def read(self, request: Request) -> tuple[int, tuple[datetime, str] | None]:
        """How many rows the page may have, and the row before it."""
        limit, cursor = (request.query_params.get(name) for name in ("limit", "cursor"))
        return self.read_limit(limit), None if cursor is None else decode_cursor(cursor)

    def read_limit(self, value: str | None) -> int:
        if value is None:
            return settings.API_PAGE_SIZE
        number = int(value) if value.isascii() and value.isdigit() and len(value) < 6 else 0
        if not 1 <= number <= settings.API_PAGE_SIZE_MAX:
            raise ValidationFailed({"limit": [f"Use a whole number from 1 to {settings.API_PAGE_SIZE_MAX}."]})
        return number

    def get_paginated_response(self, data: list) -> Response:
        return Response({"items": data, "nextCursor": self.next_cursor})

    def get_paginated_response_schema(self, schema: dict) -> dict:
        return {
            "type": "object",
            "required": ["items", "nextCursor"],
            "properties": {
                "items": {**schema, "description": "The rows of this page."},
                "nextCursor": {
                    "type": ["string", "null"],
                    "description": "The `cursor` of the next page; null on the last page.",
                },
            },
        }

    def get_schema_operation_parameters(self, view: Any) -> list[dict]:
        return [
            {
                "name": "limit",
                "in": "query",
                "description": "The most rows that the page may have.",
                "schema": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": settings.API_PAGE_SIZE_MAX,
                    "default": settings.API_PAGE_SIZE,
                },
            },
            {
                "name": "cursor",
                "in": "query",
                "description": "The `nextCursor` of the page before.",
                "schema": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_-]+$"},
            },
        ]


def beyond(moment: datetime, key: str, *, key_column: str = "pk", ascending: bool = False) -> Q:
    """The rows after that of this time and key, in the order of a list."""
    forms = stored_forms(moment)
    step, first, last = ("gt", forms[0], forms[-1]) if ascending else ("lt", forms[-1], forms[0])
    after = Q(**{f"created_at__{step}": last}) | Q(**{"created_at__in": forms, f"{key_column}__{step}": key})
    # The redundant bound on the first column lets both databases start at the right position in the index.
    return after & Q(**{f"created_at__{step}e": first})


def stored_forms(moment: datetime) -> list[Any]:
    """``moment`` as the database may have stored it, lowest first.

    SQLite compares times as text. Its own default writes milliseconds (``56.120``), Django writes microseconds
    (``56.120000``, or ``56`` for a whole second): equal as times, different as text.
    """
    if connection.vendor != "sqlite":
        return [moment]
    # Not by %Y, which writes the year 300 with three digits.
    second = moment.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "seconds")
    forms = [f"{second}.{moment.microsecond:06d}"]
    if moment.microsecond % 1000 == 0:
        forms.insert(0, forms[0][:-3])
    if moment.microsecond == 0:
        forms.insert(0, second)
    return [Value(form, output_field=TextField()) for form in forms]


def encode_cursor(moment: datetime, key: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([moment.isoformat(), key]).encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[datetime, str]:
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        moment, key = json.loads(raw)
        if not isinstance(key, str) or not key.isascii() or not key.isprintable() or not 0 < len(key) <= 64:
            raise ValueError
        parsed = datetime.fromisoformat(moment)
        if parsed.tzinfo is None:
            raise ValueError
        return parsed.astimezone(UTC), key
    except (ValueError, TypeError, binascii.Error, RecursionError, OverflowError):
        raise ValidationFailed({"cursor": ["This cursor is not valid."]}) from None
