"""The request id of log lines: set by the middleware for a request, carried by Celery's message headers into the tasks
it starts.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

from celery import signals

request_id: ContextVar[str] = ContextVar("request_id", default="-")


class RequestIdFilter(logging.Filter):
    """Gives every record a ``request_id``; ``-`` outside of a request."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


@signals.before_task_publish.connect(dispatch_uid="config.api.logs")
def send_with_message(headers: dict[str, Any] | None = None, **kwargs: Any) -> None:
    if headers is not None and request_id.get() != "-":
        headers["request_id"] = request_id.get()


@signals.task_prerun.connect(dispatch_uid="config.api.logs")
def take_from_message(task: Any = None, **kwargs: Any) -> None:
    request_id.set(task.request.get("request_id") or "-")


@signals.task_postrun.connect(dispatch_uid="config.api.logs")
def forget(**kwargs: Any) -> None:
    request_id.set("-")
