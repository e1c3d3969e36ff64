"""The input of a tool call: from the model's text to an object that fits the tool's JSON Schema (Draft 2020-12).

Patterns are matched in linear time, and references to other documents are never fetched.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from django.conf import settings
from jsonschema_rs import (
    Draft202012Validator,
    ReferencingError,
    RegexOptions,
    Registry,
    ValidationError,
    ValidationErrorKind,
    Validator,
)

from config.kernel.jsontext import MalformedJSON, parse_object
from runs.errors import CallError
from runs.tools.base import ToolDefinition, ToolFailure, clean_text, shorten, tool_error

# The address and the dialect of a schema whose parts are compiled.
BASE, DIALECT = "https://schema.invalid/", "https://json-schema.org/draft/2020-12/schema"
ALTERNATIVES = ("anyOf", "oneOf")
# How many alternatives within alternatives an error message descends into.
DESCENTS_MAX = 16
# The search for an error can double its time with each level of a schema that refers to itself.
REFERENCES, EXPLAINED_DEPTH_MAX = ('"$ref"', '"$dynamicRef"'), 8

# The keys and indexes that lead to a part of a schema or of a value.
Path = list[str | int]


def parse_arguments(arguments: str) -> dict[str, Any]:
    """A call's input. Empty text is an empty object: models call a tool without parameters in this way.

    Raises ToolFailure ``INVALID_INPUT`` with a message from which the model can correct the call.
    """
    if len(arguments) > settings.TOOL_INPUT_MAX_CHARS:
        raise _invalid(f"it may have at most {settings.TOOL_INPUT_MAX_CHARS} characters.")
    try:
        # As floats: JSON Schema's rules and the JSON columns of the database do not take Decimal.
        return parse_object(arguments.strip(), subject="it", floats=True)
    except MalformedJSON as error:
        raise _invalid(error.message) from None


def check_input(definition: ToolDefinition, value: dict[str, Any]) -> None:
    """Raises ToolFailure ``INVALID_INPUT`` with the path and the broken rule, or ``TOOL_ERROR`` for a bad schema."""
    schema_text = _key(definition.input_schema)
    try:
        valid = _validator(schema_text).is_valid(value)
    except ValidationError as error:
        raise tool_error(f"The input schema of {definition.name} is not valid. At {_problem(error)}") from error
    if not valid:
        raise _invalid(_mismatch(schema_text, value))


def check_schema(schema: Any) -> None:
    """Raises ValueError, with a message for staff, if ``schema`` cannot describe a tool's input."""
    if not isinstance(schema, dict):
        raise ValueError("The input schema must be a JSON object.")
    if schema.get("type", "object") != "object":
        raise ValueError("The input schema's type must be object.")
    try:
        _validator(_key(schema))
    except ValidationError as error:
        raise ValueError(f"At {_problem(error)}") from None


def _problem(error: ValidationError) -> str:
    """What is wrong with a schema."""
    message = error.message
    if isinstance(error.kind, ValidationErrorKind.Format) and error.kind.format == "regex":
        message = (
            f"The pattern {shorten(str(error.instance), 100)} cannot be used: it is malformed, too large (limit long "
            "texts by maxLength), or has look-around or back-references, which no search in linear time supports."
        )
    return f"{_path(error.instance_path)}: {shorten(clean_text(message), 400)}"


def _invalid(reason: str) -> ToolFailure:
    return ToolFailure(CallError.INVALID_INPUT, f"The input does not fit: {reason}")


def _mismatch(schema_text: str, value: dict[str, Any]) -> str:
    """Why the value does not fit: the path, the message and the rule of one error."""
    if not (any(name in schema_text for name in REFERENCES) and _is_deeper(value, EXPLAINED_DEPTH_MAX)):
        # A part of the schema that has an address of its own is not found by its path.
        with contextlib.suppress(ReferencingError, ValueError, LookupError):
            return _explained(_Parts(schema_text), value)
    return "it does not match the tool's input schema."


def _explained(parts: _Parts, value: dict[str, Any]) -> str:
    """Where no alternative of ``anyOf`` or ``oneOf`` fits, the error of the one that fits furthest into the value."""
    (error,) = parts.errors([[]], value)
    path = error.instance_path
    for _ in range(DESCENTS_MAX):
        if error.kind.name not in ALTERNATIVES:
            break
        alternatives = parts.alternatives(error.schema_path)
        errors = sorted(parts.errors(alternatives, error.instance), key=_depth)
        if len(errors) < len(alternatives) or (len(errors) > 1 and _depth(errors[-2]) == _depth(errors[-1])):
            break  # several fit, or none fits better than the others
        error = errors[-1]
        path = path + error.instance_path
    return f"at {_path(path)}: {shorten(error.message, 400)} (rule: {error.kind.name})"


def _depth(error: ValidationError) -> int:
    return len(error.instance_path)


def _is_deeper(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_is_deeper(part, depth - 1) for part in parts)


def _path(parts: Path) -> str:
    return shorten(".".join(map(str, parts)), 200) or "the top level"


def _key(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True)


def _options() -> dict[str, Any]:
    patterns = RegexOptions(size_limit=settings.TOOL_PATTERN_MAX_BYTES)
    return {"pattern_options": patterns, "validate_formats": False, "offline": True}


@lru_cache(maxsize=512)
def _validator(schema_text: str) -> Validator:
    """Raises ValidationError."""
    return Draft202012Validator(json.loads(schema_text), **_options())


class _Parts:
    """Validators of the parts of a schema, for error messages.

    Their errors do not contain the errors of all alternatives. Those can be as many as the alternatives to the power of
    the value's depth, and one error for each item of a long array takes seconds.
    """

    def __init__(self, schema_text: str) -> None:
        self.schema = json.loads(schema_text)
        self.registry = Registry([(BASE, self.schema | {"$schema": DIALECT})])
        self.keywords = dict.fromkeys(ALTERNATIVES, type("Alternatives", (_Alternatives,), {"parts": self}))

    def errors(self, paths: list[Path], value: Any) -> list[ValidationError]:
        """The first error of each part that the value does not fit."""
        found = []
        for validator in [self.validator(path, keywords=self.keywords) for path in paths]:
            try:
                validator.validate(value)
            except ValidationError as error:
                found.append(error)
        return found

    def validator(self, path: Path, **options: Any) -> Validator:
        pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
        reference = {"$ref": f"{BASE}#{quote(pointer)}"}
        return Draft202012Validator(reference, registry=self.registry, **_options(), **options)

    def alternatives(self, path: Path) -> list[Path]:
        part = self.schema
        for key in path:  # a property's name that is a number appears as an integer
            part = part[str(key) if isinstance(part, dict) else key]
        return [[*path, index] for index in range(len(part))]


class _Alternatives:
    """The keywords ``anyOf`` and ``oneOf``. The error says only that none fits, or more than one."""

    parts: _Parts

    def __init__(self, parent: dict[str, Any], value: Any, path: Path) -> None:
        self.validators = [self.parts.validator(each) for each in self.parts.alternatives(path)]
        self.only_one = path[-1] == "oneOf"

    def validate(self, instance: Any) -> None:
        fitting = sum(validator.is_valid(instance) for validator in self.validators)
        if not fitting:
            raise ValueError("The value is not valid under any of the given schemas")
        if self.only_one and fitting > 1:
            raise ValueError("The value is valid under more than one of the given schemas")
