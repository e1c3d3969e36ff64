"""The input of a tool call: from the model's text to an object that fits the tool's JSON Schema (Draft 2020-12).

``runs.tools.validation`` checks it, in a process that the system ends when a check has used its time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.conf import settings

from config.kernel.jsontext import MalformedJSON, parse_object
from runs.errors import CallError
from runs.tools.base import ToolDefinition, ToolFailure, clean_text, shorten, tool_error

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("validation.py")
# Processes that are kept for the next checks. At a time there are as many as threads that check.
IDLE_MAX = 2
MISMATCH = "it does not match the tool's input schema."


class TooCostly(Exception):
    """The check has used its time."""


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
    """Raises ToolFailure ``INVALID_INPUT`` with the path and the broken rule, or ``TOOL_ERROR`` for a bad schema.
    Waits for another process: call it on a thread.
    """
    if not definition.input_schema:
        return
    try:
        answer = _check(definition.input_schema, value)
    except TooCostly:
        logger.warning("an input of the tool %s could not be checked within TOOL_CHECK_SECONDS", definition.name)
        raise _invalid("its check against the tool's input schema takes too long. Make it much shorter.") from None
    if "problem" in answer:
        raise tool_error(f"The input schema of {definition.name} is not valid. At {_problem(answer['problem'])}")
    if not answer["valid"]:
        error = answer["error"]
        message = error and f"at {_path(error)}: {shorten(error['message'], 400)} (rule: {error['rule']})"
        raise _invalid(message or MISMATCH)


def check_schema(schema: Any) -> None:
    """Raises ValueError, with a message for staff, if ``schema`` cannot describe a tool's input."""
    if not isinstance(schema, dict):
        raise ValueError("The input schema must be a JSON object.")
    if schema.get("type", "object") != "object":
        raise ValueError("The input schema's type must be object.")
    try:
        # The shortest input shows how long each check takes at least.
        answer = _check(schema, {})
    except TooCostly:
        raise ValueError("The input schema takes too long to check.") from None
    if "problem" in answer:
        raise ValueError(f"At {_problem(answer['problem'])}")


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


def _check(schema: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """The answers of ``validation.check``, joined. Raises TooCostly."""
    request = {
        "schema": json.dumps(schema, sort_keys=True),
        "options": {"size_limit": settings.TOOL_PATTERN_MAX_BYTES},
        "seconds": settings.TOOL_CHECK_SECONDS,
        "value": value,
    }
    while True:
        try:
            checker, is_new = _idle.pop(), False
        except IndexError:
            checker, is_new = _Checker(), True
        answer = checker.ask(json.dumps(request).encode())
        if not checker.has_ended and len(_idle) < IDLE_MAX:
            _idle.append(checker)
        else:
            status = checker.close()
        if answer:
            return answer
        if status == -signal.SIGPROF:
            raise TooCostly
        if is_new:
            raise RuntimeError(f"the process that checks inputs has ended with status {status}")


class _Checker:
    """A process of the program. It ends with its input, and no signal to the group of this process reaches it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.file = ours.makefile("rwb")
            # Without -P, the modules of this package would hide those of the standard library.
            command = [sys.executable, "-P", str(PROGRAM)]
            end = theirs.fileno()
            self.process = subprocess.Popen(
                command, stdin=end, stdout=end, stderr=subprocess.DEVNULL, start_new_session=True
            )
        self.has_ended = False

    def ask(self, request: bytes) -> dict[str, Any]:
        """Empty if the process has ended without an answer."""
        answer: dict[str, Any] = {}
        try:
            self.file.write(request + b"\n")
            self.file.flush()
            answer = self._read()
            if answer.get("valid") is False:
                answer |= self._read() or {"error": None}
        except OSError:
            self.has_ended = True
        return answer

    def _read(self) -> dict[str, Any]:
        line = self.file.readline()
        self.has_ended = not line
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer

    def close(self) -> int:
        """The status of the process."""
        with contextlib.suppress(OSError):
            self.file.close()
        return self.process.wait()


_idle: list[_Checker] = []
