"""Keyset pagination: ``?limit=&cursor=`` → ``{"items": […], "nextCursor": …}``, stable while rows are added."""

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Q, QuerySet, TextField, Value
from rest_framework.pagination import BasePagination
from simplejson import RawJSON

from config.kernel.errors import ValidationFailed
from config.kernel.jsontext import to_text

PAGE_MAX_BYTES = 1024 * 1024

# The default `limit` of lists, and the largest.
API_PAGE_SIZE = 20
API_PAGE_SIZE_MAX = 100

ORDER, NEWEST_FIRST = ("created_at", "pk"), ("-created_at", "-pk")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The microsecond and the id of the last row of a page.
CURSOR = re.compile(r"([0-9]{1,17})-([A-Za-z0-9_]{1,64})")
LIMIT_SCHEMA = {"type": "integer", "minimum": 1, "maximum": API_PAGE_SIZE_MAX, "default": API_PAGE_SIZE}
CURSOR_SCHEMA = {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_-]+$"}
NEXT_CURSOR = {"type": ["string", "null"], "description": "The `cursor` of the next page; null on the last page."}


def page(
    rows: QuerySet,
    query: Mapping[str, str],
    show: Callable[[Any], Any],
    *,
    limit: int = API_PAGE_SIZE,
    ascending: bool = False,
    at_once: int = API_PAGE_SIZE_MAX + 1,
    prepare: Callable[[list[Any]], None] = lambda rows: None,
) -> dict[str, Any]:
    """The page that ``query`` asks for, in the order (created_at, id), at most PAGE_MAX_BYTES long. ``show`` makes JSON
    of a row. ``limit`` is the default limit. ``at_once``: how many rows a query reads, if rows can be large.
    ``prepare`` gets the rows of each query, to read what belongs to them.
    """
    limit = read_limit(query["limit"]) if "limit" in query else limit
    position = decode_cursor(query["cursor"]) if "cursor" in query else None

    def found() -> Iterator[Any]:
        after, most = position, limit + 1
        while most:
            part = rows if after is None else rows.filter(beyond(*after, ascending=ascending))
            batch = list(part.order_by(*(ORDER if ascending else NEWEST_FIRST))[: min(most, at_once)])
            prepare(batch)
            yield from batch
            if len(batch) < min(most, at_once):
                return
            most -= len(batch)
            after = batch[-1].created_at, batch[-1].pk

    items: list[RawJSON] = []
    size, last = 0, None
    for row in found():
        text = to_text(show(row)) if len(items) < limit else ""
        size += len(text.encode(errors="replace"))
        if last is not None and (not text or size > PAGE_MAX_BYTES):
            return {"items": items, "nextCursor": encode_cursor(last.created_at, last.pk)}
        items.append(RawJSON(text))
        last = row
    return {"items": items, "nextCursor": None}


class KeysetPagination(BasePagination):
    """What the OpenAPI document says of pages."""

    def get_paginated_response_schema(self, schema: dict) -> dict:
        items = {**schema, "description": "The rows of this page."}
        properties = {"items": items, "nextCursor": NEXT_CURSOR}
        return {"type": "object", "required": ["items", "nextCursor"], "properties": properties}

    def get_schema_operation_parameters(self, view: Any) -> list[dict]:
        limit, cursor = "The most rows that the page may have.", "The `nextCursor` of the page before."
        return [
            {"name": "limit", "in": "query", "description": limit, "schema": LIMIT_SCHEMA},
            {"name": "cursor", "in": "query", "description": cursor, "schema": CURSOR_SCHEMA},
        ]


def read_limit(value: str) -> int:
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 6 else 0
    if not 1 <= number <= API_PAGE_SIZE_MAX:
        raise ValidationFailed({"limit": [f"Use a whole number from 1 to {API_PAGE_SIZE_MAX}."]})
    return number


def beyond(moment: datetime, key: str, *, ascending: bool = False) -> Q:
    """The rows after that of this time and key, in the order of a list."""
    forms = stored_forms(moment)
    step, first, last = ("gt", forms[0], forms[-1]) if ascending else ("lt", forms[-1], forms[0])
    after = Q(**{f"created_at__{step}": last}) | Q(**{"created_at__in": forms, f"pk__{step}": key})
    # The redundant bound on the first column lets both databases start at the right position in the index.
    return after & Q(**{f"created_at__{step}e": first})


def stored_forms(moment: datetime) -> list[Any]:
    """``moment`` as the database may have stored it, lowest first. SQLite compares times as text: its default writes
    milliseconds (``56.120``), Django microseconds (``56.120000``, or ``56`` for a whole second).
    """
    if connection.vendor != "sqlite":
        return [moment]
    # Not with %Y, which writes the year 300 with three digits.
    second = moment.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "seconds")
    forms = [f"{second}.{moment.microsecond:06d}"]
    if moment.microsecond % 1000 == 0:
        forms.insert(0, forms[0][:-3])
    if moment.microsecond == 0:
        forms.insert(0, second)
    return [Value(form, output_field=TextField()) for form in forms]


def encode_cursor(moment: datetime, key: str) -> str:
    return f"{(moment - EPOCH) // timedelta(microseconds=1)}-{key}"


def decode_cursor(cursor: str) -> tuple[datetime, str]:
    match = CURSOR.fullmatch(cursor)
    if match is None:
        raise ValidationFailed({"cursor": ["This cursor is not valid."]})
    return EPOCH + timedelta(microseconds=int(match[1])), match[2]
