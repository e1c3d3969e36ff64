"""The input of a tool call: from the model's text to an object that fits the tool's JSON Schema (Draft 2020-12).

``runs.tools.validation`` checks it, in a process that the system ends when a check has used its time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from config.kernel.errors import RateLimited
from config.kernel.jsontext import MalformedJSON, dumps, parse_object, to_text
from runs.errors import CallError
from runs.tools.base import ToolDefinition, ToolFailure, clean_text, shorten, tool_error

# Characters of a call's input.
TOOL_INPUT_MAX_CHARS = 200_000
# Time of a processor for the check of one input against its tool's schema; an input that needs more is
# `INVALID_INPUT`.
TOOL_CHECK_SECONDS = 0.5

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("validation.py")
# Processes that are kept for the next checks. At a time there are as many as threads that check.
IDLE_MAX = 2
# The time of a processor for a schema that is not used yet. Usual ones take a hundredth of it.
SCHEMA_SECONDS = 0.1
# How long a request waits for the check of another one of the same user.
WAIT_SECONDS = 0.25
# The same until the first check of this process, for which a program starts.
FIRST_WAIT_SECONDS = 5
# The fields of requests that are schemas or have some.
SCHEMAS = ("clientTools", "outputSchema")
# The signals that end the program: of its timer, and of the library when no memory is left.
TOO_COSTLY = {-signal.SIGPROF, -signal.SIGABRT}
# After this line of the program, another one says what is wrong.
INVALID = b'{"valid": false}\n'
MISMATCH = "it does not match the tool's input schema."


class TooCostly(Exception):
    """The check has used its time or the memory."""


def parse_arguments(arguments: str) -> dict[str, Any]:
    """A call's input. Empty text is an empty object: models call a tool without parameters in this way.

    Raises ToolFailure ``INVALID_INPUT`` with a message from which the model can correct the call.
    """
    if len(arguments) > TOOL_INPUT_MAX_CHARS:
        raise _invalid(f"it may have at most {TOOL_INPUT_MAX_CHARS} characters.")
    try:
        return parse_object(arguments.strip(), subject="it")
    except MalformedJSON as error:
        raise _invalid(error.message) from None


def check_input(definition: ToolDefinition, value: dict[str, Any]) -> None:
    """Raises ToolFailure ``INVALID_INPUT`` with the path and the broken rule, or ``TOOL_ERROR`` for a bad schema.
    Waits for another process: call it on a thread.
    """
    if not definition.input_schema:
        return
    try:
        answer = _check(to_text(definition.input_schema), value, TOOL_CHECK_SECONDS)
    except TooCostly:
        logger.warning("an input of the tool %s could not be checked within TOOL_CHECK_SECONDS", definition.name)
        raise _invalid("its check against the tool's input schema takes too long. Make it much shorter.") from None
    if "problem" in answer:
        raise tool_error(f"The input schema of {definition.name} is not valid. At {_problem(answer['problem'])}")
    if not answer["valid"]:
        raise _invalid(_mismatch(answer) or MISMATCH)


def check_answer(schema: Mapping[str, Any], value: dict[str, Any]) -> None:
    """Raises ValueError, with a message for people, unless the user's answer fits a schema of ``check_schema``. Waits
    for another process.
    """
    try:
        answer = _check(to_text(schema), value, TOOL_CHECK_SECONDS)
    except TooCostly:
        raise ValueError("The check against the question's schema takes too long.") from None
    if not answer.get("valid"):
        raise ValueError(f"It does not fit the question's schema: {_mismatch(answer) or 'no reason was found.'}")


def _mismatch(answer: dict[str, Any]) -> str | None:
    error = answer.get("error")
    return error and f"at {_path(error)}: {shorten(error['message'], 400)} (rule: {error['rule']})"


def check_schema(schema: Any) -> None:
    """Raises ValueError, with a message for people, if ``schema`` cannot describe a tool's input."""
    if not isinstance(schema, dict):
        raise ValueError("The input schema must be a JSON object.")
    if schema.get("type", "object") != "object":
        raise ValueError("The input schema's type must be object.")
    try:
        # The shortest input shows how long each check takes at least.
        answer = _check(to_text(schema), {}, SCHEMA_SECONDS)
    except TooCostly:
        raise ValueError("The input schema takes too long to check.") from None
    if "problem" in answer:
        raise ValueError(f"At {_problem(answer['problem'])}")


@contextlib.contextmanager
def one_check_of(user_id: int, body: Any = SCHEMAS) -> Iterator[None]:
    """Around the checks of a user's request, if its ``body`` has a schema: schemas that take long occupy one processor,
    and the others of the user do not occupy the threads that serve everybody. Raises RateLimited.
    """
    if not any(name in body for name in SCHEMAS):
        yield
        return
    lock = _locks.setdefault(user_id, threading.Lock())
    if not lock.acquire(timeout=WAIT_SECONDS if _checked.is_set() else FIRST_WAIT_SECONDS):
        raise RateLimited("Another schema of yours is being checked.", headers={"Retry-After": "1"})
    try:
        yield
    finally:
        lock.release()


def _problem(error: dict[str, Any]) -> str:
    """What is wrong with a schema."""
    message = error["message"]
    if "pattern" in error:
        message = (
            f"The pattern {shorten(error['pattern'], 100)} cannot be used: it is malformed, too large (limit long "
            "texts by maxLength), or has look-around or back-references, which no search in linear time supports."
        )
    return f"{_path(error)}: {shorten(clean_text(message), 400)}"


def _invalid(reason: str) -> ToolFailure:
    return ToolFailure(CallError.INVALID_INPUT, f"The input does not fit: {reason}")


def _path(error: dict[str, Any]) -> str:
    return shorten(".".join(error["path"]), 200) or "the top level"


def _check(schema: str, value: Any, seconds: float) -> dict[str, Any]:
    """The answers of ``validation.check``, joined. Raises TooCostly."""
    request = dumps({"schema": schema, "seconds": seconds, "value": value}) + b"\n"
    while True:
        try:
            process, is_new = _idle.pop(), False
        except IndexError:
            process, is_new = _start(), True
        answers = _ask(process, request)
        _checked.set()  # the program has started, whatever became of the schema
        answer: dict[str, Any] = {}
        for line in filter(None, answers):
            answer |= json.loads(line)
        if answers and answers[-1] and len(_idle) < IDLE_MAX:
            _idle.append(process)
        else:
            process.communicate()
        if answer:
            return answer
        if process.returncode == -signal.SIGPROF or (is_new and process.returncode in TOO_COSTLY):
            raise TooCostly
        if is_new:
            raise RuntimeError(f"the process that checks inputs has ended with status {process.returncode}")


def _start() -> subprocess.Popen[bytes]:
    """A process of the program. It ends with its input, and no signal to the group of this process reaches it."""
    # Without -P, the modules of this package would hide those of the standard library.
    command = [sys.executable, "-P", str(PROGRAM)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **pipes)


def _ask(process: Any, request: bytes) -> list[bytes]:
    """The lines of the answer. The last one is empty, or there is none, if the process has ended."""
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        process.stdin.write(request)
        process.stdin.flush()
        lines.append(process.stdout.readline())
        if lines[0] == INVALID:
            lines.append(process.stdout.readline())
    return lines


_idle: list[subprocess.Popen[bytes]] = []
_checked = threading.Event()
_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
