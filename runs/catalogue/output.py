"""The schema of a run's output: JSON Schema of an object, within limits."""

from __future__ import annotations

from typing import Any

from config.kernel.jsontext import to_text
from runs.tools.schema import check_schema

# Size of an `outputSchema`.
OUTPUT_SCHEMA_MAX_BYTES = 16 * 1024
# Objects and lists within each other in an `outputSchema`.
OUTPUT_SCHEMA_MAX_DEPTH = 16

# Libraries write the last two without a need. What those drafts have otherwise is checked by the rules of the first.
DRAFTS = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
)


def check_output_schema(schema: Any) -> None:
    """Raises ValueError with a message for people. Waits for another process."""
    if not isinstance(schema, dict):
        raise ValueError("A JSON Schema of an object is required.")
    if schema.get("type") != "object":
        raise ValueError("The schema's type must be object.")
    if str(schema.get("$schema", DRAFTS[0])).removesuffix("#") not in DRAFTS:
        raise ValueError(f"The schema follows Draft 2020-12: leave $schema out, or use {DRAFTS[0]}.")
    most = OUTPUT_SCHEMA_MAX_BYTES
    if _depth(schema) > OUTPUT_SCHEMA_MAX_DEPTH:
        raise ValueError(f"The schema is nested more than {OUTPUT_SCHEMA_MAX_DEPTH} levels deep.")
    if len(to_text(schema).encode()) > most:
        raise ValueError(f"The schema may have at most {most} bytes.")
    check_schema(schema)


def _depth(value: Any) -> int:
    """The levels of objects and lists within each other."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (dict, list))]:
        depth += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return depth
