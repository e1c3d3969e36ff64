"""Checks of a model's parameters, and of the JSON Schemas that callers send."""

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeAlias

from config.kernel.jsontext import to_text
from runs.tools.schema import check_schema

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
STOPS_MAX = 4
STOP_MAX_CHARS = 200
EXTRA_MAX_CHARS = 16 * 1024
# The fields of a request that the service sets itself.
RESERVED = {"model", "messages", "input", "instructions", "system", "tools", "tool_choice", "stream", "stream_options"}
RESERVED |= {"max_tokens", "max_completion_tokens", "max_output_tokens", "store", "include", "n"}
OUTPUT_SCHEMA_MAX_BYTES = 16 * 1024
# Levels of objects and lists in an `outputSchema`.
OUTPUT_SCHEMA_MAX_DEPTH = 16

# Libraries write the last two without need. A schema with one of these is checked by the rules of the first.
DRAFTS = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
)

# A rule for a value: a function that says whether the value is valid, and words for people.
Check: TypeAlias = tuple[Callable[[Any], bool], str]


def check_names(value: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """``value``, if it is an object that has only names of ``checks``, with valid values. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("A JSON object is required.")
    for name, given in value.items():
        if name not in checks:
            raise ValueError(f"There is no {name!r}; there are {', '.join(checks)}.")
        accepts, wanted = checks[name]
        if not accepts(given):
            raise ValueError(f"{name} must be {wanted}.")
    return value


def check_parameters(value: Any) -> dict[str, Any]:
    """``value``, if it has valid parameters; see ``check_names``. ``stop`` is not sent to openai_responses, ``seed`` is
    not sent to openai_responses and anthropic, which do not have it.
    """
    return check_names(value, CHECKS)


def _number(low: float, high: float) -> Check:
    numbers = (int, float, Decimal)  # bool is excluded
    return lambda value: type(value) in numbers and low <= value <= high, f"a number from {low:g} to {high:g}"


def _is_stop(value: Any) -> bool:
    fits = isinstance(value, list) and 1 <= len(value) <= STOPS_MAX
    return fits and all(isinstance(text, str) and 1 <= len(text) <= STOP_MAX_CHARS for text in value)


def _is_extra(value: Any) -> bool:
    return isinstance(value, dict) and len(to_text(value)) <= EXTRA_MAX_CHARS and not RESERVED & value.keys()


CHECKS: dict[str, Check] = {
    "temperature": _number(0, 2),
    "topP": _number(0, 1),
    "reasoningEffort": (EFFORTS.__contains__, f"one of {', '.join(EFFORTS)}"),
    "stop": (_is_stop, f"a list of 1 to {STOPS_MAX} texts of 1 to {STOP_MAX_CHARS} characters"),
    "seed": (lambda value: type(value) is int and abs(value) < 2**63, "a whole number"),
    # Merged into the body of a request.
    "extra": (
        _is_extra,
        f"a JSON object of at most {EXTRA_MAX_CHARS} characters without what the service sets itself: "
        f"{', '.join(sorted(RESERVED))}",
    ),
}


def check_output_schema(schema: Any) -> None:
    """Raises ValueError if ``schema`` is no schema of an object; see ``check_sent_schema``."""
    if not isinstance(schema, dict):
        raise ValueError("A JSON Schema of an object is required.")
    if schema.get("type") != "object":
        raise ValueError("The schema's type must be object.")
    check_sent_schema(schema)


def check_sent_schema(schema: dict[str, Any]) -> None:
    """Check a schema of a request. Raises ValueError with a message for people. Waits for another process."""
    if str(schema.get("$schema", DRAFTS[0])).removesuffix("#") not in DRAFTS:
        raise ValueError(f"The schema follows Draft 2020-12: leave $schema out, or use {DRAFTS[0]}.")
    if _depth(schema) > OUTPUT_SCHEMA_MAX_DEPTH:
        raise ValueError(f"The schema is nested more than {OUTPUT_SCHEMA_MAX_DEPTH} levels deep.")
    if len(to_text(schema).encode()) > OUTPUT_SCHEMA_MAX_BYTES:
        raise ValueError(f"The schema may have at most {OUTPUT_SCHEMA_MAX_BYTES} bytes.")
    check_schema(schema)


def _depth(value: Any) -> int:
    """The levels of objects and lists within each other."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (dict, list))]:
        depth += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return depth
