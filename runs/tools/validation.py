"""The program that checks values against JSON Schemas (Draft 2020-12), for ``runs.tools.schema`` only. It imports
nothing of the service, and never fetches references to other documents. A small schema can make a check of a small
value last for hours (docs/decisions/0025): the system ends the process when a check has used up its time or its memory.

Each line of the input is a JSON object with ``schema`` (text), ``value``, and ``seconds``, the time limit of the check.
Each line of the output is the answer of ``check``.
"""

import json
import resource
import signal
import sys
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError, ValidationErrorKind, Validator

MESSAGE_MAX_CHARS = 400
PATH_MAX_CHARS = 200
# The process's address space, for the interpreter and the library (20 MiB) and the compiled schemas.
MEMORY_MAX_BYTES = 256 * 1024 * 1024
SCHEMAS_KEPT = 32
# The memory of a compiled `pattern`; a schema with a larger pattern is refused when the tool is saved.
TOOL_PATTERN_MAX_BYTES = 64 * 1024

# Numbers keep all digits, as in ``config.kernel.jsontext.from_text``.
_read = partial(json.loads, parse_float=Decimal)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
    for line in sys.stdin.buffer:
        request = _read(line)
        # The timer's signal ends the process, also in the middle of a check.
        signal.setitimer(signal.ITIMER_PROF, float(request["seconds"]))
        sys.stdout.write(json.dumps(check(request["schema"], request["value"])) + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def check(schema: str, value: Any) -> dict[str, str]:
    """``problem``: where and why the schema is not valid; ``error``: where the value breaks which rule. Or empty."""
    try:
        validator = _validator(schema)
    except ValidationError as error:
        reason = error.message
        if isinstance(error.kind, ValidationErrorKind.Format) and error.kind.format == "regex":
            reason = (
                f"The pattern {str(error.instance)[:100]} cannot be used: it is malformed, too large (limit long texts "
                "by maxLength), or has look-around or back-references, which no search in linear time supports."
            )
        return {"problem": f"{_path(error)}: {reason[:MESSAGE_MAX_CHARS]}"}
    except ValueError as error:  # too deep, or with half a surrogate pair
        return {"problem": f"the top level: {str(error)[:MESSAGE_MAX_CHARS]}"}
    if validator.is_valid(value):
        return {}
    first = next(validator.iter_errors(value))
    return {"error": f"at {_path(first)}: {first.message[:MESSAGE_MAX_CHARS]} (rule: {first.kind.name})"}


@lru_cache(maxsize=SCHEMAS_KEPT)
def _validator(schema: str) -> Validator:
    """Raises ValidationError."""
    options = RegexOptions(size_limit=TOOL_PATTERN_MAX_BYTES)
    return Draft202012Validator(_read(schema), pattern_options=options, validate_formats=False, offline=True)


def _path(error: ValidationError) -> str:
    return ".".join(map(str, error.instance_path))[:PATH_MAX_CHARS] or "the top level"


if __name__ == "__main__":
    main()
