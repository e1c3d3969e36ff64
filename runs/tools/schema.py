"""The input of a tool call: from the model's text to an object that fits the tool's JSON Schema (Draft 2020-12).

``runs.tools.validation`` checks it, in a process that the system ends when a check has used its time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from config.kernel.errors import RateLimited
from config.kernel.jsontext import MalformedJSON, dumps, parse_object, to_text
from runs.errors import CallError
from runs.tools.base import ToolDefinition, ToolFailure, clean_text, shorten, tool_error

# Characters of a call's input.
TOOL_INPUT_MAX_CHARS = 200_000
# Memory of a compiled `pattern` of a tool's input schema; a larger one is refused when the tool is saved.
TOOL_PATTERN_MAX_BYTES = 64 * 1024
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
# Digests of schemas that took too long, so that sending one again costs nothing.
REFUSED_MAX = 1000
# The signals that end the program: of its timer, and of the library when no memory is left.
TOO_COSTLY = {-signal.SIGPROF, -signal.SIGABRT}
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
        error = answer["error"]
        message = error and f"at {_path(error)}: {shorten(error['message'], 400)} (rule: {error['rule']})"
        raise _invalid(message or MISMATCH)


def check_schema(schema: Any) -> None:
    """Raises ValueError, with a message for people, if ``schema`` cannot describe a tool's input."""
    if not isinstance(schema, dict):
        raise ValueError("The input schema must be a JSON object.")
    if schema.get("type", "object") != "object":
        raise ValueError("The input schema's type must be object.")
    text = to_text(schema)
    digest = hashlib.sha256(dumps(schema)).digest()
    try:
        if digest in _refused:
            raise TooCostly
        # The shortest input shows how long each check takes at least.
        answer = _check(text, {}, SCHEMA_SECONDS)
    except TooCostly:
        _refused[digest] = None
        while len(_refused) > REFUSED_MAX:
            _refused.popitem(last=False)
        raise ValueError("The input schema takes too long to check.") from None
    if "problem" in answer:
        raise ValueError(f"At {_problem(answer['problem'])}")


@contextlib.contextmanager
def one_check_of(user_id: int) -> Iterator[None]:
    """Around a request of a user that may have a schema: schemas that take long occupy one processor, and the others of
    the user do not occupy the threads that serve everybody. Raises RateLimited.
    """
    lock = _locks.setdefault(user_id, threading.Lock())
    if not lock.acquire(timeout=WAIT_SECONDS):
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
            f"The pattern {shorten(error['pattern'], 100)} cannot be used: it is malformed, too large beside the "
            "others of the schema (limit long texts by maxLength), or has look-around or back-references, which no "
            "search in linear time supports."
        )
    return f"{_path(error)}: {shorten(clean_text(message), 400)}"


def _invalid(reason: str) -> ToolFailure:
    return ToolFailure(CallError.INVALID_INPUT, f"The input does not fit: {reason}")


def _path(error: dict[str, Any]) -> str:
    return shorten(".".join(error["path"]), 200) or "the top level"


def _check(schema: str, value: Any, seconds: float) -> dict[str, Any]:
    """The answers of ``validation.check``, joined. Raises TooCostly."""
    request = {
        "schema": schema,
        "options": {"size_limit": TOOL_PATTERN_MAX_BYTES},
        "seconds": seconds,
        "value": value,
    }
    while True:
        try:
            checker, is_new = _idle.pop(), False
        except IndexError:
            checker, is_new = _Checker(), True
        answer = checker.ask(dumps(request))
        if not checker.has_ended and len(_idle) < IDLE_MAX:
            _idle.append(checker)
        else:
            status = checker.close()
        if answer:
            return answer
        if status == -signal.SIGPROF or (is_new and status in TOO_COSTLY):
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
_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
_refused: OrderedDict[bytes, None] = OrderedDict()
