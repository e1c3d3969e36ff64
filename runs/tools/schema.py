"""The input of a tool call: from the model's text to an object that fits the tool's JSON Schema (Draft 2020-12)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from django.conf import settings
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing import Registry

from config.kernel.jsontext import MalformedJSON, parse_object
from runs.errors import CallError
from runs.tools.base import ToolDefinition, ToolFailure, clean_text, shorten, tool_error

ERRORS_CONSIDERED = 20


def parse_input(definition: ToolDefinition, arguments: str) -> dict[str, Any]:
    """The call's input. Empty text is an empty object: models call a tool without parameters in this way.

    Raises ToolFailure ``INVALID_INPUT``, which names the path and the broken rule so that the model can correct the
    call.
    """
    if len(arguments) > settings.TOOL_INPUT_MAX_CHARS:
        raise _invalid(f"it may have at most {settings.TOOL_INPUT_MAX_CHARS} characters.")
    try:
        # As floats: JSON Schema's rules and the JSON columns of the database do not take Decimal.
        value = parse_object(arguments.strip(), subject="it", floats=True)
    except MalformedJSON as error:
        raise _invalid(error.message) from None
    _check_schema(definition, value)
    return value


def check_schema(schema: Any) -> None:
    """Raises ValueError, with a message for staff, if ``schema`` cannot describe a tool's input."""
    if not isinstance(schema, dict):
        raise ValueError("The input schema must be a JSON object.")
    if schema.get("type", "object") != "object":
        raise ValueError("The input schema's type must be object.")
    try:
        _validator(_key(schema))
    except SchemaError as error:
        raise ValueError(f"At {_path(error)}: {shorten(clean_text(error.message), 300)}") from None
    except Exception:
        raise ValueError("The input schema is not valid.") from None


def _invalid(reason: str) -> ToolFailure:
    return ToolFailure(CallError.INVALID_INPUT, f"The input does not fit: {reason}")


def _check_schema(definition: ToolDefinition, value: dict[str, Any]) -> None:
    try:
        validator = _validator(_key(definition.input_schema))
        error = best_match(islice(validator.iter_errors(value), ERRORS_CONSIDERED))
    except Exception as problem:
        # Staff enter the schema, which may hold a broken or circular reference or an invalid regular expression.
        raise tool_error(f"The input schema of {definition.name} is not valid.") from problem
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
    # With the default registry, a reference to a URL would be fetched.
    return Draft202012Validator(schema, registry=Registry())
