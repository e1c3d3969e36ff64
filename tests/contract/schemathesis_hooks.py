"""What schemathesis may not hold against the service, each with the reason. All of its checks are on."""

from __future__ import annotations

import uuid
from typing import Any

import schemathesis

REJECTED_VALID_DATA = "ST202"
EVENT_VIOLATES_SCHEMA = "ST108"

# Rules of the JSON reader for any value anywhere, also in fields that are ignored: JSON Schema has no words for them.
JSON_RULES = (
    "The body contains text with NUL or a lone surrogate.",
    "The body contains a number that is out of range.",
    "The body is nested more than",
)
# Field → why not every text that fits its schema is taken.
FIELDS = {
    "cursor": "opaque: only one that the service has given out will do",
    "url": "a pattern can't say which texts are addresses",
    "contentType": "which types are taken is a setting",
    "model": "a name of the catalogue",
}
# The same for elements of a list, whose fields have a number.
LISTS = {"tools": "names of the catalogue", "attachmentIds": "what the caller has uploaded"}
# The same for values of any field.
MESSAGES = (
    "The number may have at most 6 decimals.",  # multipleOf is checked with floats, which would refuse good amounts
    "This field may not be blank.",  # Python's blanks are more than a regular expression's
)


@schemathesis.hook
def map_headers(context: Any, headers: dict[str, Any] | None) -> dict[str, Any] | None:
    """A key of each request's own: the stored answer to an earlier one would tell of what is deleted by now."""
    key = (headers or {}).get("Idempotency-Key")
    if headers and isinstance(key, str) and key and key.isascii() and key.isprintable() and len(key) < 200:
        return {**headers, "Idempotency-Key": f"{key} {uuid.uuid4()}"}
    return headers


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """False: not counted."""
    if failure.code == EVENT_VIOLATES_SCHEMA:
        return False  # OpenAPI 3.1 describes a stream as one text, and has no words for its events
    if failure.code == REJECTED_VALID_DATA and response.status_code == 400:
        return not is_beyond_schemas(response.json()["error"])
    return True


def is_beyond_schemas(error: dict[str, Any]) -> bool:
    """Whether the error is about nothing but what no schema can say."""
    if error["message"].startswith(JSON_RULES):
        return True
    fields = error.get("details", {}).get("fields", {})
    return bool(fields) and all(
        field in FIELDS or field.partition(".")[0] in LISTS or all(message in MESSAGES for message in messages)
        for field, messages in fields.items()
    )
