"""The program that checks values against JSON Schemas (Draft 2020-12), for ``runs.tools.schema`` only.

It is a process of its own that imports nothing of the service. No limit of the sizes limits the time of a check: two
references to one part, in parts that refer to each other in the same way, double the time with each part. The system
ends the process when a check has used its time or the memory. Patterns are matched in linear time, and references to
other documents are never fetched.

Each line of the input is a JSON object with ``schema`` (text), ``value`` and the ``seconds`` of the check. Each line of
the output is one of the answers of ``check``.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError, ValidationErrorKind, Validator

MESSAGE_MAX_CHARS = 1000
# Address space of the process, of which the interpreter and the library take 20 MiB, and the compiled schemas it keeps.
MEMORY_MAX_BYTES = 256 * 1024 * 1024
SCHEMAS_KEPT = 32
# Memory of a compiled `pattern`; a schema with a larger one is refused when the tool is saved.
TOOL_PATTERN_MAX_BYTES = 64 * 1024


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
    for line in sys.stdin.buffer:
        request = _read(line)
        # The timer's signal ends the process, also in the middle of a check.
        signal.setitimer(signal.ITIMER_PROF, float(request["seconds"]))
        for answer in check(request["schema"], request["value"]):
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read(text: str | bytes) -> Any:
    """With each digit of a number, as ``config.kernel.jsontext.from_text``."""
    return json.loads(text, parse_float=Decimal)


def check(schema: str, value: Any) -> Iterator[dict[str, Any]]:
    """``{"problem": …}`` for a schema that is not valid, otherwise ``{"valid": bool}``. After false there is a second
    answer, ``{"error": …}``, which can take much longer. An error has ``path``, ``message`` and ``rule``.
    """
    try:
        validator = _validator(schema)
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
        yield {"error": _shown(_mismatch(validator, value))}


@lru_cache(maxsize=SCHEMAS_KEPT)
def _validator(schema: str) -> Validator:
    """Raises ValidationError."""
    options = RegexOptions(size_limit=TOOL_PATTERN_MAX_BYTES)
    return Draft202012Validator(_read(schema), pattern_options=options, validate_formats=False, offline=True)


def _mismatch(validator: Validator, value: Any) -> ValidationError:
    """The first error. Where no alternative of ``anyOf`` or ``oneOf`` fits, that of the one that fits furthest."""
    error = next(validator.iter_errors(value))
    while alternatives := getattr(error.kind, "context", None):
        firsts = sorted((errors[0] for errors in alternatives if errors), key=_depth)
        if len(firsts) < len(alternatives) or (len(firsts) > 1 and _depth(firsts[-2]) == _depth(firsts[-1])):
            break  # several fit, or none fits better than the others
        error = firsts[-1]
    return error


def _depth(error: ValidationError) -> int:
    return len(error.instance_path)


def _shown(error: ValidationError) -> dict[str, Any]:
    path = [str(part)[:MESSAGE_MAX_CHARS] for part in error.instance_path]
    return {"path": path, "message": error.message[:MESSAGE_MAX_CHARS], "rule": error.kind.name}


if __name__ == "__main__":
    main()
