"""The program that checks values against JSON Schemas (Draft 2020-12), for ``runs.tools.schema`` only.

It is a process of its own that imports nothing of the service. No limit of the sizes limits the time of a check: two
references to one part, in parts that refer to each other in the same way, double the time with each part. The system
ends the process when a check has used its time or the memory. Patterns are matched in linear time, and references to
other documents are never fetched.

Each line of the input is a JSON object with the arguments of ``check``. Each line of the output is one of its answers.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from jsonschema_rs import (
    Draft202012Validator,
    ReferencingError,
    RegexOptions,
    Registry,
    ValidationError,
    ValidationErrorKind,
    Validator,
)

# The address and the dialect of a schema whose parts are compiled.
BASE, DIALECT = "https://schema.invalid/", "https://json-schema.org/draft/2020-12/schema"
ALTERNATIVES = ("anyOf", "oneOf")
# How many alternatives within alternatives an error message descends into.
DESCENTS_MAX = 16
# The search for an error can double its time with each level of a schema that refers to itself.
REFERENCES, EXPLAINED_DEPTH_MAX = ('"$ref"', '"$dynamicRef"'), 8
MESSAGE_MAX_CHARS = 1000
# Address space of the process, of which the interpreter and the library take 20 MiB, and the compiled schemas it keeps.
MEMORY_MAX_BYTES = 256 * 1024 * 1024
SCHEMAS_KEPT = 32
# All compiled patterns of one schema.
PATTERNS_MAX_BYTES = 4 * 1024 * 1024

# The keys and indexes that lead to a part of a schema or of a value.
Path = list[str | int]
# An error: ``path``, ``message`` and ``rule``.
Shown = dict[str, Any]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
    for line in sys.stdin.buffer:
        request = _read(line)
        # The timer's signal ends the process, also in the middle of a check.
        signal.setitimer(signal.ITIMER_PROF, float(request.pop("seconds")))
        for answer in check(**request):
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read(text: str | bytes) -> Any:
    """With each digit of a number, as ``config.kernel.jsontext.from_text``."""
    return json.loads(text, parse_float=Decimal)


def check(schema: str, options: dict[str, int], value: Any) -> Iterator[dict[str, Any]]:
    """``{"problem": Shown}`` for a schema that is not valid, otherwise ``{"valid": bool}``. After false there is a
    second answer: ``{"error": Shown}``, or null instead of it. ``options`` are those of ``RegexOptions``.
    """
    document = _read(schema)
    share = PATTERNS_MAX_BYTES // max(1, _patterns(document))
    options = options | {"size_limit": min(options["size_limit"], share)}
    try:
        validator = _validator(schema, tuple(options.items()))
    except ValidationError as error:
        is_pattern = isinstance(error.kind, ValidationErrorKind.Format) and error.kind.format == "regex"
        pattern = {"pattern": str(error.instance)[:MESSAGE_MAX_CHARS]} if is_pattern else {}
        yield {"problem": _shown(error) | pattern}
        return
    except ValueError as error:  # too deep, or with half a surrogate pair
        yield {"problem": {"path": [], "message": str(error)[:MESSAGE_MAX_CHARS]}}
        return
    valid = validator.is_valid(value)
    yield {"valid": valid}
    if not valid:
        yield {"error": _mismatch(_Parts(document, options), schema, value)}


def _patterns(part: Any) -> int:
    """How many patterns a part of a schema has, or more."""
    if isinstance(part, list):
        return sum(map(_patterns, part))
    if not isinstance(part, dict):
        return 0
    names = part.get("patternProperties")
    own = ("pattern" in part) + (len(names) if isinstance(names, dict) else 0)
    return own + sum(map(_patterns, part.values()))


def _shown(error: ValidationError, before: Path | None = None) -> Shown:
    path = [str(part)[:MESSAGE_MAX_CHARS] for part in [*(before or []), *error.instance_path]]
    return {"path": path, "message": error.message[:MESSAGE_MAX_CHARS], "rule": error.kind.name}


@lru_cache(maxsize=SCHEMAS_KEPT)
def _validator(schema: str, options: tuple[tuple[str, int], ...]) -> Validator:
    """Raises ValidationError."""
    return Draft202012Validator(_read(schema), **_compiling(dict(options)))


def _compiling(options: dict[str, int]) -> dict[str, Any]:
    return {"pattern_options": RegexOptions(**options), "validate_formats": False, "offline": True}


def _mismatch(parts: _Parts, schema: str, value: Any) -> Shown | None:
    """One error of a value that does not fit."""
    if not (any(name in schema for name in REFERENCES) and _is_deeper(value, EXPLAINED_DEPTH_MAX)):
        # A part of the schema that has an address of its own is not found by its path.
        with contextlib.suppress(ReferencingError, ValueError, LookupError):
            return _explained(parts, value)
    return None


def _explained(parts: _Parts, value: Any) -> Shown:
    """Where no alternative of ``anyOf`` or ``oneOf`` fits, the error of the one that fits furthest into the value."""
    (error,) = parts.errors([[]], value)
    before: Path = []
    for _ in range(DESCENTS_MAX):
        if error.kind.name not in ALTERNATIVES:
            break
        alternatives = parts.alternatives(error.schema_path)
        errors = sorted(parts.errors(alternatives, error.instance), key=_depth)
        if len(errors) < len(alternatives) or (len(errors) > 1 and _depth(errors[-2]) == _depth(errors[-1])):
            break  # several fit, or none fits better than the others
        before += error.instance_path
        error = errors[-1]
    return _shown(error, before)


def _depth(error: ValidationError) -> int:
    return len(error.instance_path)


def _is_deeper(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_is_deeper(part, depth - 1) for part in parts)


class _Parts:
    """Validators of the parts of a schema, for error messages.

    Their errors do not contain the errors of all alternatives. Those can be as many as the alternatives to the power of
    the value's depth, and one error for each item of a long array takes seconds.
    """

    def __init__(self, schema: dict[str, Any], options: dict[str, int]) -> None:
        self.schema, self.options = schema, options
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
        return Draft202012Validator(reference, registry=self.registry, **_compiling(self.options), **options)

    def alternatives(self, path: Path) -> list[Path]:
        part: Any = self.schema
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


if __name__ == "__main__":
    main()
