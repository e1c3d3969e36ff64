"""Failures that schemathesis must ignore, each with the reason. All checks of schemathesis are enabled."""

import uuid
from typing import Any
from urllib.parse import urlsplit

import schemathesis

ACCEPTED_INVALID_DATA, REJECTED_VALID_DATA = "ST201", "ST202"
UNDOCUMENTED_STATUS, EVENT_VIOLATES_SCHEMA = "ST103", "ST108"
# A longer key is rejected, and must stay too long.
KEY_MAX_CHARS = 255

# Their patterns are for those who write requests: the service also takes upper case and international names.
NARROW_PATTERNS = ("violates `pattern` at /properties/url", "violates `pattern` at /properties/contentType")
# Rules of the JSON reader for every value, also in ignored fields. JSON Schema cannot express them.
JSON_RULES = (
    "The body contains text with NUL or a lone surrogate.",
    "The body contains a number that is out of range.",
    "The body is nested more than",
)
# Field → the reason why the service rejects some texts that match the field's schema.
FIELDS = {
    "cursor": "opaque: only one that the service has given out will do",
    "url": "a pattern can't say which texts are addresses",
    "contentType": "which types are taken is a setting",
    "sizeBytes": "how large files may be is a setting",
    "agent": "a name of the catalogue",
    "model": "a name of the catalogue",
    "outputSchema": "no schema can say which schemas can be checked",
    "createdAfter": "a date-time may have a leap second, or be the last one that there is",
    "createdBefore": "the same",
    "message": "a run that replaces another one may have none",
}
# The same for elements of a list. Their field names contain an index.
LISTS = {
    "tools": "names of the catalogue",
    "attachmentIds": "what the caller has uploaded",
    "clientTools": "no two have one name",
    "messages": "of a foreign protocol: only the last one is read",
}
# The same for every field.
MESSAGES = (
    "The number may have at most 6 decimals.",  # schemathesis checks multipleOf with floats, which reject valid amounts
    "Unknown field.",  # in a sequence of requests, schemathesis adds fields of earlier answers that no schema has
    "This field may not be blank.",  # Python treats more characters as blank than a regular expression does
)


@schemathesis.hook
def map_headers(context: Any, headers: dict[str, Any] | None) -> dict[str, Any] | None:
    """Make each Idempotency-Key unique, as a replayed answer may describe an object that was deleted since."""
    key = (headers or {}).get("Idempotency-Key")
    if headers and isinstance(key, str) and key and key.isascii() and key.isprintable() and len(key) <= KEY_MAX_CHARS:
        end = f" {uuid.uuid4()}"
        return {**headers, "Idempotency-Key": key[: KEY_MAX_CHARS - len(end)] + end}
    return headers


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Return False if the failure must be ignored."""
    if failure.code == EVENT_VIOLATES_SCHEMA:
        return False  # OpenAPI 3.1 describes a stream as one text and cannot describe its events
    if failure.code == UNDOCUMENTED_STATUS and "%0A" in urlsplit(response.request.url).path:
        return False  # no route has a line break
    if failure.code in (ACCEPTED_INVALID_DATA, REJECTED_VALID_DATA) and response.status_code == 413:
        return False  # how large files may be is a setting, and a text over its limit may be over that of the body
    if failure.code == ACCEPTED_INVALID_DATA and any(place in failure.message for place in NARROW_PATTERNS):
        return False
    if failure.code == REJECTED_VALID_DATA and response.status_code == 400:
        return not is_beyond_schemas(response.json()["error"])
    return True


def is_beyond_schemas(error: dict[str, Any]) -> bool:
    """Return whether every problem of the error is about a rule that no schema can express."""
    if error["message"].startswith(JSON_RULES):
        return True
    fields = error.get("details", {}).get("fields", {})
    # The front ends take the options of a run as fields of ``run``.
    names = {field.removeprefix("run."): messages for field, messages in fields.items()}
    return bool(names) and all(
        name in FIELDS or name.partition(".")[0] in LISTS or all(message in MESSAGES for message in messages)
        for name, messages in names.items()
    )
