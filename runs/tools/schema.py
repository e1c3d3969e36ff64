"""A tool call's input: from the text a model wrote to an object that fits the tool's JSON Schema (Draft 2020-12)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from django.conf import settings
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing import Registry

from runs.tools.base import INVALID_INPUT, TOOL_ERROR, ToolDefinition, ToolFailure, clean_text, shorten

ERRORS_CONSIDERED = 20


def parse_input(definition: ToolDefinition, arguments: str) -> dict[str, Any]:
    """The call's input. Raises ToolFailure ``INVALID_INPUT`` with the path and the rule, so that a model can mend it.

    No text at all is an empty object: that is how models call a tool without parameters.
    """
    if len(arguments) > settings.TOOL_INPUT_MAX_CHARS:
        raise _invalid(f"it may have at most {settings.TOOL_INPUT_MAX_CHARS} characters.")
    try:
        value = json.loads(
            arguments.strip() or "{}",
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
            strict=True,
        )
    except RecursionError:
        raise _invalid(_TOO_DEEP.format(settings.API_MAX_JSON_DEPTH)) from None
    except json.JSONDecodeError as error:
        raise _invalid(f"it is not valid JSON: {error.msg} at character {error.pos + 1}.") from None
    except ValueError as error:
        # Our own hooks' refusals, and Python's limit on the digits of an integer.
        refused = str(error) if isinstance(error, _Refused) else "a number has too many digits."
        raise _invalid(refused) from None
    if not isinstance(value, dict):
        raise _invalid("it must be a JSON object.")
    _check_values(value)
    _check_schema(definition, value)
    return value


def check_schema(schema: Any) -> None:
    """Raises ValueError, with a message for people, unless ``schema`` can describe a tool's input."""
    if not isinstance(schema, dict):
        raise ValueError("The input schema must be a JSON object.")
    if schema.get("type", "object") != "object":
        raise ValueError("The input schema's type must be object.")
    try:
        _validator(_key(schema))
    except SchemaError as error:
        raise ValueError(f"At {_path(error)}: {shorten(clean_text(error.message), 300)}") from None
    except Exception:
        raise ValueError("The input schema can't be read.") from None


_TOO_DEEP = "it is nested more than {} deep."


class _Refused(ValueError):
    pass


def _invalid(reason: str) -> ToolFailure:
    return ToolFailure(INVALID_INPUT, f"The input does not fit: {reason}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Refused("a key is there twice in one object.")
    return value


def _no_constant(name: str) -> Any:
    raise _Refused(f"{name} is not a JSON number.")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Refused("a number is out of range.")
    return number


def _check_values(value: dict[str, Any]) -> None:
    """Depth, and texts that no database could keep. Iterative: the input may be as deep as the parser allows."""
    pending: list[tuple[Any, int]] = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, str):
            if item != clean_text(item):
                raise _invalid("text may not contain NUL or a lone surrogate.")
            continue
        if not isinstance(item, (dict, list)):
            continue
        if depth > settings.API_MAX_JSON_DEPTH:
            raise _invalid(_TOO_DEEP.format(settings.API_MAX_JSON_DEPTH))
        if isinstance(item, dict):
            pending.extend((key, depth) for key in item)
        pending.extend((child, depth + 1) for child in (item.values() if isinstance(item, dict) else item))


def _check_schema(definition: ToolDefinition, value: dict[str, Any]) -> None:
    try:
        validator = _validator(_key(definition.input_schema))
        error = best_match(islice(validator.iter_errors(value), ERRORS_CONSIDERED))
    except Exception as problem:
        # The schema is staff's: a reference to nowhere, a circle, a pattern that is no regular expression.
        raise ToolFailure(TOOL_ERROR, f"The input schema of {definition.name} can't be used.") from problem
    if error is not None:
        raise _invalid(f"at {_path(error)}: {shorten(error.message, 400)} (rule: {error.validator})")


def _path(error: ValidationError | SchemaError) -> str:
    return shorten(".".join(str(part) for part in error.absolute_path), 200) or "the top level"


def _key(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True)


@lru_cache(maxsize=512)
def _validator(schema_text: str) -> Draft202012Validator:
    schema = json.loads(schema_text)
    Draft202012Validator.check_schema(schema)
    # A registry of its own: with the default one a reference to a URL would be fetched.
    return Draft202012Validator(schema, registry=Registry())
