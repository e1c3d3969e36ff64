"""The input of a tool call: from the model's text to an object that fits the tool's JSON Schema (Draft 2020-12); and
the schemas that callers send. A process checks them (``runs.tools.validation``), which the system ends in time.
"""

import contextlib
import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from config.kernel.errors import RateLimited
from config.kernel.jsontext import MalformedJSON, dumps, is_deeper, parse_object, to_text
from runs.errors import CallError
from runs.tools.base import ToolDefinition, ToolFailure, clean_text, tool_error

TOOL_INPUT_MAX_CHARS = 200_000
# Seconds of CPU time for the check of one input against its tool's schema; an input that needs more is `INVALID_INPUT`.
TOOL_CHECK_SECONDS = 0.5

OUTPUT_SCHEMA_MAX_BYTES = 16 * 1024
OUTPUT_SCHEMA_MAX_DEPTH = 16  # levels of objects and lists in an `outputSchema`

# Libraries write the last two without need. A schema with one of these is checked by the rules of the first.
DRAFTS = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
)

logger = logging.getLogger(__name__)

# Without -P, the modules of this package would hide those of the standard library.
COMMAND = [sys.executable, "-P", str(Path(__file__).with_name("validation.py"))]
# The most processes that are kept for later checks. There are as many at a time as threads that check.
IDLE_MAX = 2
SCHEMA_SECONDS = 0.1  # seconds of CPU time for the check of a new schema; usual schemas take a hundredth of it
WAIT_SECONDS = 1.0  # the time for which a request waits for another check of the same user
TOO_COSTLY = "too costly"  # the key in an answer if the check has used up its time or the memory
# No search in linear time supports such a pattern. Servers in JavaScript often have one for e-mail addresses.
LOOK_AROUND_OR_BACK_REFERENCE = re.compile(r"\(\?<?[=!]|\\[1-9]")
SCHEMAS = ("clientTools", "outputSchema")  # the fields of requests that are or contain schemas

_idle: list[subprocess.Popen[bytes]] = []
_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()


def parse_arguments(arguments: str) -> dict[str, Any]:
    """A call's input. Models call tools without parameters with an empty text. Raises ToolFailure ``INVALID_INPUT``."""
    if len(arguments) > TOOL_INPUT_MAX_CHARS:
        raise _invalid(f"it may have at most {TOOL_INPUT_MAX_CHARS} characters.")
    try:
        return parse_object(arguments.strip(), subject="it")
    except MalformedJSON as error:
        raise _invalid(error.message) from None


def check_input(definition: ToolDefinition, value: dict[str, Any]) -> None:
    """Raises ToolFailure ``INVALID_INPUT``, or ``TOOL_ERROR`` for a bad schema. Waits for another process."""
    if not definition.input_schema:
        return
    answer = _check(to_text(definition.input_schema), value, TOOL_CHECK_SECONDS)
    if "problem" in answer:
        raise tool_error(f"The input schema of {definition.name} is not valid. At {answer['problem']}")
    if TOO_COSTLY in answer:
        logger.warning("an input of the tool %s could not be checked within TOOL_CHECK_SECONDS", definition.name)
    if answer:
        raise _invalid(*answer.values())


def check_answer(schema: Mapping[str, Any], value: dict[str, Any]) -> None:
    """Raises ValueError, with a message for people, unless the user's answer fits. Waits for another process."""
    for reason in _check(to_text(schema), value, TOOL_CHECK_SECONDS).values():
        raise ValueError(f"It does not fit the question's schema: {reason}")


def check_schema(schema: dict[str, Any]) -> None:
    """Raises ValueError, with a message for people, if ``schema`` cannot describe a tool's input."""
    if schema.get("type", "object") != "object":
        raise ValueError("The input schema's type must be object.")
    answer = _check(to_text(schema), {}, SCHEMA_SECONDS)  # the shortest input shows how long a check takes at least
    if TOO_COSTLY in answer:
        raise ValueError("The input schema takes too long to check.")
    if "problem" in answer:
        raise ValueError(f"At {answer['problem']}")


def check_output_schema(schema: dict[str, Any]) -> None:
    """Raises ValueError if ``schema`` is no schema of an object; see ``check_sent_schema``."""
    if schema.get("type") != "object":
        raise ValueError("The schema's type must be object.")
    check_sent_schema(schema)


def check_sent_schema(schema: dict[str, Any]) -> None:
    """Check a schema of a request. Raises ValueError with a message for people. Waits for another process."""
    if str(schema.get("$schema", DRAFTS[0])).removesuffix("#") not in DRAFTS:
        raise ValueError(f"The schema follows Draft 2020-12: leave $schema out, or use {DRAFTS[0]}.")
    text = to_text(schema)
    if is_deeper(text, OUTPUT_SCHEMA_MAX_DEPTH):
        raise ValueError(f"The schema is nested more than {OUTPUT_SCHEMA_MAX_DEPTH} levels deep.")
    if len(text.encode()) > OUTPUT_SCHEMA_MAX_BYTES:
        raise ValueError(f"The schema may have at most {OUTPUT_SCHEMA_MAX_BYTES} bytes.")
    check_schema(schema)


def read_schema(given: Any) -> dict[str, Any]:
    """A schema from a tool's server, parsed as strictly as other input. Patterns that cannot be matched are left out,
    because the server checks what it gets. Raises ValueError (``check_schema``).
    """
    try:
        schema = _matchable(parse_object(to_text(given), subject="The input schema"))
    except (MalformedJSON, RecursionError) as error:
        raise ValueError(str(error)) from None
    check_schema(schema)
    return schema


def _matchable(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_matchable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    pattern = schema.get("pattern")
    is_left_out = isinstance(pattern, str) and LOOK_AROUND_OR_BACK_REFERENCE.search(pattern)
    return {key: _matchable(part) for key, part in schema.items() if not (is_left_out and key == "pattern")}


@contextlib.contextmanager
def one_check_of(user_id: int, body: Any = SCHEMAS) -> Iterator[None]:
    """Allows one check at a time for each user, if the request's ``body`` has a schema. So slow schemas of one user
    occupy one processor, and not all threads that serve requests. Raises RateLimited.
    """
    if not any(name in body for name in SCHEMAS):
        yield
        return
    lock = _locks.setdefault(user_id, threading.Lock())
    if not lock.acquire(timeout=WAIT_SECONDS):
        raise RateLimited("Another schema of yours is being checked.", headers={"Retry-After": "1"})
    try:
        yield
    finally:
        lock.release()


def _invalid(reason: str) -> ToolFailure:
    return ToolFailure(CallError.INVALID_INPUT, f"The input does not fit: {reason}")


def _check(schema: str, value: Any, seconds: float) -> dict[str, str]:
    """The answer of ``validation.check``, or TOO_COSTLY with a reason."""
    request = dumps({"schema": schema, "seconds": seconds, "value": value}) + b"\n"
    while True:
        process: Any
        try:
            process, is_new = _idle.pop(), False
        except IndexError:
            # It ends with its input, and gets no signal that is sent to this process's group.
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process, is_new = subprocess.Popen(COMMAND, start_new_session=True, **pipes), True
        line = b""
        with contextlib.suppress(OSError):
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        if line and len(_idle) < IDLE_MAX:
            _idle.append(process)
        else:
            process.communicate()
        if line:
            return {kind: clean_text(text) for kind, text in json.loads(line).items()}
        # The timer has ended the process, or the library did without memory. A kept process may have ended before.
        if process.returncode == -signal.SIGPROF or (is_new and process.returncode == -signal.SIGABRT):
            return {TOO_COSTLY: "its check against the schema takes too long. Make it much shorter."}
        if is_new:
            raise RuntimeError(f"the process that checks inputs has ended with status {process.returncode}")
