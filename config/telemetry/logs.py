"""Log lines: which request, run and task they belong to; JSON in production, plain text locally.

The request id is set by the middleware, and Celery's message headers carry it into the tasks that the request starts.
No line holds what users wrote or a secret: of unexpected exceptions only types and places are told, for their messages
quote what they choked on, and nothing of a record but the fields below is shown.
"""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from celery import signals
from django.core.exceptions import ImproperlyConfigured

NONE = "-"
request_id: ContextVar[str] = ContextVar("request_id", default=NONE)
run_id: ContextVar[str] = ContextVar("run_id", default=NONE)
task_id: ContextVar[str] = ContextVar("task_id", default=NONE)
VARIABLES = (request_id, run_id, task_id)

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class ContextFilter(logging.Filter):
    """Gives every record a ``request_id``, ``run_id`` and ``task_id``; ``-`` where there is none."""

    def filter(self, record: logging.LogRecord) -> bool:
        for variable in VARIABLES:
            setattr(record, variable.name, variable.get())
        if record.name in BLUNT:
            record.msg, record.args = BLUNT[record.name](record), ()
        return True


def _failed_task(record: logging.LogRecord) -> str:
    data = getattr(record, "data", {})
    return f"task {data.get('name')} {data.get('description') or 'broke'}"


# Loggers whose messages quote exceptions or arguments, and what is said instead.
BLUNT = {
    "celery.app.trace": _failed_task,
    "asyncio": lambda record: record.getMessage().partition("\n")[0],
}


class SafeFormatter(logging.Formatter):
    """``outspoken`` tells exceptions' messages too, for developers."""

    def __init__(self, *args: Any, outspoken: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outspoken = outspoken

    def formatException(self, ei: ExcInfo) -> str:
        if self.outspoken or ei[1] is None:
            return super().formatException(ei)
        return "".join(_told(ei[1], set())).rstrip("\n")


def _told(error: BaseException, seen: set[int]) -> Iterator[str]:
    """As ``traceback.format_exception``, but without the messages."""
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _told(before, seen)
        yield "\nand then:\n\n"
    yield from traceback.format_tb(error.__traceback__)
    # The one kind whose message is only ever about variables.
    told = f": {error}" if isinstance(error, ImproperlyConfigured) else ""
    yield f"{type(error).__module__}.{type(error).__qualname__}{told}\n"
    for part in getattr(error, "exceptions", ()):
        yield "\nin it:\n\n"
        yield from _told(part, seen)


class JsonFormatter(SafeFormatter):
    """One object a line: time, level, logger, message, request_id, run_id, task_id, process, and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{variable.name: getattr(record, variable.name, NONE) for variable in VARIABLES},
            "process": record.process,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(SafeFormatter):
    """Time, level, logger, message, and of the ids those that there are."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")  # noqa: DTZ006  (a developer reads local time)
        ids = {variable.name: getattr(record, variable.name, NONE) for variable in VARIABLES}
        shown = "".join(f"  {name}={value}" for name, value in ids.items() if value != NONE)
        line = f"{time} {record.levelname:<7} {record.name}: {record.getMessage()}{shown}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def catch_strays() -> None:
    """What would be printed bare goes the same way: warnings, and exceptions that end a thread."""
    logging.captureWarnings(True)
    threading.excepthook = _log_ended_thread


def _log_ended_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is not SystemExit and ended.exc_value is not None:
        name = ended.thread.name if ended.thread else "?"
        error = ended.exc_value
        logging.getLogger(__name__).error("the thread %s ended", name, exc_info=error)


@signals.before_task_publish.connect(dispatch_uid="config.telemetry.logs")
def send_with_message(headers: dict[str, Any] | None = None, **kwargs: Any) -> None:
    if headers is not None and request_id.get() != NONE:
        headers["request_id"] = request_id.get()


@signals.task_prerun.connect(dispatch_uid="config.telemetry.logs")
def take_from_message(task: Any = None, **kwargs: Any) -> None:
    request_id.set(task.request.get("request_id") or NONE)
    task_id.set(task.request.id or NONE)


@signals.task_postrun.connect(dispatch_uid="config.telemetry.logs")
def forget(**kwargs: Any) -> None:
    for variable in VARIABLES:
        variable.set(NONE)
