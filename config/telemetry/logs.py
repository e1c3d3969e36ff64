"""Log lines with the ids of their request, run and task: JSON in production, plain text locally. A line must not have
user content or secrets. So it has only the fields below, and of an exception, whose message quotes input, only types
and code locations.
"""

import json
import logging
import threading
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

logger = logging.getLogger(__name__)

NONE = "-"
REPEAT_SECONDS = 60.0
# The loggers of what repeats its line as long as Redis is away.
REPEATING = {"config.api.metrics_page", "config.api.probes", "config.redis", "config.queue.publisher"}
REPEATING |= {"celery.beat", "celery.worker.consumer.consumer"}
request_id: ContextVar[str] = ContextVar("request_id", default=NONE)
run_id: ContextVar[str] = ContextVar("run_id", default=NONE)
task_id: ContextVar[str] = ContextVar("task_id", default=NONE)
VARIABLES = (request_id, run_id, task_id)


class SafeMessage(logging.Filter):
    """Replaces the messages of the loggers of REPLACEMENTS, for all further readers of the record."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name in REPLACEMENTS:
            record.msg, record.args = REPLACEMENTS[record.name](record), ()
        return True


class OnceAMinute(logging.Filter):
    """Lets through one line of each kind (logger and text without values) of REPEATING in REPEAT_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[tuple[str, object], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name not in REPEATING:
            return True
        kind = record.name, record.msg
        if time.monotonic() - self.written.get(kind, float("-inf")) < REPEAT_SECONDS:
            return False
        self.written[kind] = time.monotonic()
        return True


def _failed_task(record: logging.LogRecord) -> str:
    data = getattr(record, "data", {})
    return f"task {data.get('name')} {data.get('description') or 'failed'}"


def _failed_request(record: logging.LogRecord) -> str:
    """With the route in place of the path, which is the credential of uploads, files and callbacks."""
    match = getattr(getattr(record, "request", None), "resolver_match", None)
    return f"{record.getMessage().partition(':')[0]}: /{match.route}" if match else "a request failed"


# Loggers whose messages quote exceptions or arguments, and the function that makes a safe message.
REPLACEMENTS = {
    "celery.app.trace": _failed_task,
    "django.request": _failed_request,
    "asyncio": lambda record: record.getMessage().partition("\n")[0],
}


class SafeFormatter(logging.Formatter):
    """Formats exceptions without their messages, which only developers see, with DEBUG."""

    def formatException(self, ei: Any) -> str:
        if settings.DEBUG or ei[1] is None:
            return super().formatException(ei)
        return "".join(_without_messages(ei[1], set())).rstrip("\n")


def _without_messages(error: BaseException, seen: set[int]) -> Iterator[str]:
    """Like ``traceback.format_exception``, without exception messages."""
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _without_messages(before, seen)
        yield "\nThe next exception followed:\n\n"
    yield from traceback.format_tb(error.__traceback__)
    # These messages name settings only and contain no user input.
    message = f": {error}" if isinstance(error, ImproperlyConfigured) else ""
    yield f"{type(error).__module__}.{type(error).__qualname__}{message}\n"
    for part in getattr(error, "exceptions", ()):
        yield "\nIt contains this exception:\n\n"
        yield from _without_messages(part, seen)


def ids() -> dict[str, str]:
    """The ids of the present request, run and task; ``-`` if there is none."""
    return {variable.name: variable.get() for variable in VARIABLES}


class JsonFormatter(SafeFormatter):
    """One object per line: time, level, logger, message, request_id, run_id, task_id, process, exception (if any)."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **ids(),
            "process": record.process,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(SafeFormatter):
    """Time, level, logger, message, and the ids that are set."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")  # noqa: DTZ006  (a developer reads local time)
        shown = "".join(f"  {name}={value}" for name, value in ids().items() if value != NONE)
        line = f"{at} {record.levelname:<7} {record.name}: {record.getMessage()}{shown}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def capture_unlogged_output() -> None:
    """Log warnings and exceptions that end a thread. Python writes them to stderr otherwise."""
    logging.captureWarnings(True)
    threading.excepthook = log_thread_failure


def log_thread_failure(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is not SystemExit:
        logger.error("the thread %s ended", ended.thread.name if ended.thread else "?", exc_info=ended.exc_value)


def announce_ready(process: str) -> None:
    """``process``: its name, and its address or queues."""
    logger.info("ready: %s, version %s", process, settings.SPECTACULAR_SETTINGS["VERSION"])


# config.celery connects these to its signals.
def write_headers(headers: dict[str, Any], **kwargs: Any) -> None:
    if request_id.get() != NONE:
        headers["request_id"] = request_id.get()


def read_headers(task: Any = None, **kwargs: Any) -> None:
    request_id.set(task.request.get("request_id") or NONE)
    task_id.set(task.request.id or NONE)


def reset(**kwargs: Any) -> None:
    for variable in VARIABLES:
        variable.set(NONE)
